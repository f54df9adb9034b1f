"""A training step of a layer's experts with each library: the part "layer" of `compare`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.contender import Contender, Part, Results, Step, TrainingStep
from fp8moe.bench.harness import routing


@dataclass(frozen=True)
class Experts:
    """x, dy: bfloat16 [T, H]; w13: bfloat16 [E, 2F, H], gates before ups; w2: bfloat16 [E, H, F]; ids: int32
    [T, k], distinct within a token; probs: float32 [T, k]."""

    x: Any
    dy: Any
    w13: Any
    w2: Any
    ids: Any
    probs: Any

    def leaves(self) -> tuple[Any, ...]:
        return self.x, self.w13, self.w2, self.probs


def experts(device: str, tokens: int, experts: int, hidden: int, ffn: int, topk: int) -> Experts:
    import torch

    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return (torch.randn(shape, device=device, generator=generator) * scale).bfloat16()

    ids = torch.from_numpy(routing(tokens, experts, topk)).to(device)
    probs = torch.rand(tokens, topk, device=device, generator=generator).softmax(-1)
    inputs = Experts(
        normal(tokens, hidden),
        normal(tokens, hidden),
        normal(experts, 2 * ffn, hidden, scale=hidden**-0.5),
        normal(experts, hidden, ffn, scale=ffn**-0.5),
        ids,
        probs,
    )
    for leaf in inputs.leaves():
        leaf.requires_grad_()
    return inputs


def experts_in_float64(inputs: Experts) -> Results:
    """y, dx, dw13, dw2, dprobs, expert by expert, by autograd of the definition."""
    import torch
    from torch.nn.functional import silu

    x, w13, w2, probs = (leaf.detach() for leaf in inputs.leaves())
    y, dx = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for _ in range(2))
    dw13, dw2 = torch.empty_like(w13, dtype=torch.float64), torch.empty_like(w2, dtype=torch.float64)
    dprobs = torch.zeros_like(probs, dtype=torch.float64)
    for expert in range(len(w2)):
        token, slot = torch.where(inputs.ids == expert)
        parts = x[token], w13[expert], w2[expert], probs[token, slot]
        rows, up, down, share = (part.double().requires_grad_() for part in parts)
        gate, value = (rows @ up.T).chunk(2, dim=-1)
        out = share[:, None] * ((silu(gate) * value) @ down.T)
        drows, dw13[expert], dw2[expert], dshare = torch.autograd.grad(
            out, (rows, up, down, share), inputs.dy[token].double()
        )
        y.index_add_(0, token, out.detach())
        dx.index_add_(0, token, drows)
        dprobs[token, slot] = dshare
    return y, dx, dw13, dw2, dprobs


def step_of(inputs: Experts, forward: Callable[..., Any]) -> TrainingStep:
    """Forward and backward of ``forward(x, w13, w2, ids, probs)``."""
    x, w13, w2, probs = inputs.leaves()
    return by_autograd(lambda: forward(x, w13, w2, inputs.ids, probs), inputs.leaves(), inputs.dy)


def by_autograd(forward: Callable[[], Any], leaves: Any, dy: Any) -> TrainingStep:
    """Forward and backward of ``forward()``, with the gradients of ``leaves``."""
    import torch

    def step() -> Results:
        y = forward()
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    return TrainingStep(forward, step, tuple(leaves), dy)


def by_fp8moe(recipe: Any) -> Callable[[Experts], Step]:
    def make(inputs: Experts) -> Step:
        import fp8moe.torch

        def forward(*arguments: Any) -> Any:
            return fp8moe.torch.moe_experts(*arguments, recipe=recipe)

        return step_of(inputs, forward)

    return make


def by_arrays(recipe: str) -> Callable[[Experts], Step]:
    """`moe_forward` and `moe_backward` on CuPy arrays, or NumPy arrays on the CPU, without torch."""

    def make(inputs: Experts) -> Step:
        import fp8moe

        x, dy, w13, w2, ids, probs = (
            array_of(t) for t in (inputs.x, inputs.dy, inputs.w13, inputs.w2, inputs.ids, inputs.probs)
        )

        def forward() -> Any:
            return fp8moe.moe_forward(x, w13, w2, ids, probs, recipe=recipe)

        def step() -> Results:
            y, saved = forward()
            grads = fp8moe.moe_backward(saved, dy, dtype="bfloat16")  # as in torch
            return y, grads.dx, grads.dw13, grads.dw2, grads.dprobs

        return TrainingStep(forward, step)

    return make


def array_of(tensor: Any) -> Any:
    """The same memory as a CuPy or NumPy array."""
    import torch

    from fp8moe import formats

    tensor = tensor.detach()
    is_bfloat16 = tensor.dtype == torch.bfloat16
    bits = tensor.view(torch.int16) if is_bfloat16 else tensor
    if not tensor.is_cuda:
        array = bits.numpy()
    else:
        import cupy

        array = cupy.asarray(bits)
    return array.view(formats.BFLOAT16) if is_bfloat16 else array


def tensors_of(results: Results) -> Results:
    """The inverse of `array_of`: the same memory as torch tensors."""
    import torch

    from fp8moe import formats

    def tensor(array: Any) -> Any:
        if array.dtype != formats.BFLOAT16:
            return torch.from_dlpack(array)
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)

    return tuple(tensor(array) for array in results)


def by_torch(inputs: Experts) -> Step:
    return step_of(inputs, around(experts_by(torch_product)))


def by_compiled_torch(inputs: Experts) -> Step:
    import torch

    return step_of(inputs, torch.compile(around(experts_by(torch_product)), fullgraph=True))


def by_torchao(compiled: bool) -> Callable[[Experts], Step]:
    """torchao's FP8 product with one scale per row; `around` pads the experts."""

    def make(inputs: Experts) -> Step:
        import torch
        from torchao.prototype import moe_training  # type: ignore[import-not-found, unused-ignore]

        product = moe_training._to_fp8_rowwise_then_scaled_grouped_mm

        def multiply(rows: Any, weights: Any, ends: Any) -> Any:
            return product(rows, weights, ends, pad_token_groups_for_grouped_mm=False)

        layer = around(experts_by(multiply), align=16)
        return step_of(inputs, torch.compile(layer) if compiled else layer)

    return make


def torch_product(rows: Any, weights: Any, ends: Any) -> Any:
    from torch.nn.functional import grouped_mm

    return grouped_mm(rows, weights, offs=ends)


def experts_by(multiply: Callable[..., Any]) -> Callable[..., Any]:
    """The experts, with ``multiply(rows, weights [E, K, N], ends)`` as the product."""
    from torch.nn.functional import silu

    def run(rows: Any, ends: Any, w13: Any, w2: Any) -> Any:
        gate, value = multiply(rows, w13.transpose(1, 2), ends).chunk(2, dim=-1)
        return multiply(silu(gate) * value, w2.transpose(1, 2), ends)

    return run


def around(run: Callable[..., Any], align: int = 1) -> Callable[..., Any]:
    """A layer from ``run(rows, ends, w13, w2)`` and torch operations. ends: int32 [E], end of each expert's
    rows; rows after the last end belong to no expert."""
    import torch

    def forward(x: Any, w13: Any, w2: Any, ids: Any, probs: Any) -> Any:
        count = len(w2)
        expert, order = ids.reshape(-1).sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(count, device=x.device), right=True).int()
        rows, position = x[order // ids.shape[1]], torch.arange(len(order), device=x.device)
        if align > 1:
            starts = torch.cat([ends.new_zeros(1), ends[:-1]])
            sizes = -(-(ends - starts) // align) * align
            padded_ends = sizes.cumsum(0).int()
            position = position + (padded_ends - sizes - starts)[expert]
            size = -(-(len(order) + count * (align - 1)) // align) * align
            rows, ends = rows.new_zeros(size, rows.shape[1]).index_copy(0, position, rows), padded_ends
        out = run(rows, ends, w13, w2)[position[order.argsort()]]
        return (out.view(*ids.shape, -1) * probs[..., None].to(out.dtype)).sum(1)

    return forward


def experts_of_transformers(w13: Any, w2: Any, implementation: str) -> Any:
    """Qwen3-MoE's experts with these parameters, in one of transformers' implementations."""
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    count, hidden, ffn = w2.shape
    config = Qwen3MoeConfig(num_experts=count, hidden_size=hidden, moe_intermediate_size=ffn)
    config._experts_implementation = implementation
    with torch.device("meta"):
        module: Any = Qwen3MoeExperts(config)
    module.gate_up_proj, module.down_proj = w13, w2
    return module


def by_transformers(recipe: Any = None) -> Callable[[Experts], Step]:
    """transformers' own grouped GEMM, or with a recipe this library's implementation."""

    def make(inputs: Experts) -> Step:
        import torch

        implementation = "grouped_mm"
        if recipe is not None:
            import fp8moe.transformers

            implementation = f"fp8moe_{recipe}"
            fp8moe.transformers.enable(recipe, name=implementation)
        weights = [torch.nn.Parameter(w.detach()) for w in (inputs.w13, inputs.w2)]
        module, ids = experts_of_transformers(*weights, implementation), inputs.ids.long()
        leaves = inputs.x, *weights, inputs.probs
        return by_autograd(lambda: module(inputs.x, ids, inputs.probs), leaves, inputs.dy)

    return make


def by_sonicmoe(inputs: Experts) -> Step:
    import torch
    from sonicmoe.enums import ActivationType  # type: ignore[import-not-found, unused-ignore]
    from sonicmoe.functional import (  # type: ignore[import-not-found, unused-ignore]
        moe_general_routing_inputs,
    )

    tokens, topk = inputs.ids.shape
    token = torch.arange(tokens, device=inputs.x.device, dtype=torch.int32).repeat_interleave(topk)

    def forward(x: Any, w13: Any, w2: Any, ids: Any, probs: Any) -> Any:
        weights = w13.permute(1, 2, 0), None, w2.permute(1, 2, 0), None  # SonicMoE's layout: experts last
        y, _ = moe_general_routing_inputs(
            x,
            probs.reshape(-1),
            token,
            ids.reshape(-1),
            *weights,
            E=len(w2),
            stream_id=torch.cuda.current_stream().cuda_stream,
            activation_type=ActivationType.SWIGLU,
            is_inference_mode_enabled=False,
            concat_layout=True,  # gates before ups
        )
        return y

    return step_of(inputs, forward)


def by_transformer_engine(fp8: bool) -> Callable[[Experts], Step]:
    """Transformer Engine's `GroupedLinear`, which takes each expert's number of rows as a list on the
    host."""

    def make(inputs: Experts) -> Step:
        import torch
        import transformer_engine.pytorch as te  # type: ignore[import-not-found, unused-ignore]
        from torch.nn.functional import silu
        from transformer_engine.common.recipe import (  # type: ignore[import-not-found, unused-ignore]
            Float8BlockScaling,
        )

        def linear(weights: Any) -> Any:
            count, n, k = weights.shape
            module = te.GroupedLinear(count, k, n, bias=False, params_dtype=torch.bfloat16)
            for expert in range(count):
                getattr(module, f"weight{expert}").data.copy_(weights[expert])
            return module

        up, down = linear(inputs.w13.detach()), linear(inputs.w2.detach())
        recipe = Float8BlockScaling() if fp8 else None

        def run(rows: Any, ends: Any, w13: Any, w2: Any) -> Any:
            sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
            sizes[-1] += len(rows) - sum(sizes)  # the module takes every row
            with te.autocast(enabled=fp8, recipe=recipe):
                gate, value = up(rows, sizes).chunk(2, dim=-1)
                return down(silu(gate) * value, sizes)

        forward = around(run, align=16 if fp8 else 1)
        leaves = inputs.x, *up.parameters(), *down.parameters(), inputs.probs

        arguments = inputs.x, inputs.w13, inputs.w2, inputs.ids, inputs.probs
        return by_autograd(lambda: forward(*arguments), leaves, inputs.dy)

    return make


def weights_stacked(results: Results) -> Results:
    """y, dx, dw13, dw2, dprobs of Transformer Engine, which has one parameter per expert."""
    import torch

    y, dx, *each, dprobs = results
    count = len(each) // 2
    return y, dx, torch.stack(each[:count]), torch.stack(each[count:]), dprobs


# Bounds of the error of a correct result. Rounding to nearest has an error of up to half a unit in the last
# place, 2^-9 of a value in bfloat16 and 2^-4 in E4M3, uniformly distributed: a relative norm of that over
# sqrt(3). A gradient depends on six rounded operands (x, w13, dy, w2, the activation's gradient, w13 again),
# and the activation's derivative may double a square: a factor sqrt(12 / 3). bfloat16 has twice that for
# roundings outside the products, such as torch's sum over eight experts.
BFLOAT16, E4M3 = 2 * 2 * 2.0**-9, 2 * 2.0**-4
TRANSFORMER_ENGINE: dict[str, Any] = {
    "needs": ("transformer_engine",),
    "install": "pip install --no-build-isolation 'transformer-engine[pytorch]'",
    "cuda_only": True,
    "decode": weights_stacked,
}
TORCHAO: dict[str, Any] = {
    "needs": ("torchao",),
    "install": "pip install 'torchao>=0.18'",
    "cuda_only": True,
}

LAYER = Part(
    "layer",
    (
        Contender("torch grouped_mm, bf16", by_torch, BFLOAT16),
        Contender("torch grouped_mm compiled, bf16", by_compiled_torch, BFLOAT16, cuda_only=True),
        Contender(
            "transformers, bf16",
            by_transformers(),
            BFLOAT16,
            ("transformers",),
            "pip install 'fp8moe[transformers]'",
        ),
        Contender(
            "SonicMoE, bf16",
            by_sonicmoe,
            BFLOAT16,
            ("sonicmoe", "quack"),
            "pip install sonic-moe 'quack-kernels<0.5' (Python 3.12, Hopper or newer)",
            cuda_only=True,
        ),
        Contender("Transformer Engine, bf16", by_transformer_engine(False), BFLOAT16, **TRANSFORMER_ENGINE),
        Contender("Transformer Engine, FP8 blocks", by_transformer_engine(True), E4M3, **TRANSFORMER_ENGINE),
        Contender("torchao, FP8 rows", by_torchao(False), E4M3, **TORCHAO),
        Contender("torchao compiled, FP8 rows", by_torchao(True), E4M3, **TORCHAO),
        Contender("fp8moe, bf16", by_fp8moe("bf16"), BFLOAT16),
        Contender("fp8moe of arrays, bf16", by_arrays("bf16"), BFLOAT16, decode=tensors_of),
        Contender("fp8moe, fp8_blockwise", by_fp8moe("fp8_blockwise"), E4M3),
        Contender("fp8moe, fp8_flow", by_fp8moe("fp8_flow"), E4M3),
    ),
    experts,
    experts_in_float64,
    ("y", "dx", "dw13", "dw2", "dprobs"),
    lambda tokens, experts, hidden, ffn, topk: 3 * 2 * 3 * tokens * topk * hidden * ffn,
)
