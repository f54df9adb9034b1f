"""The expert layer as a torch module: router, experts, and when the weights are quantised."""

from __future__ import annotations

import itertools
import math
import weakref
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fp8moe
from fp8moe import Quantized, checks
from fp8moe.adapters import torch_distributed, torch_ops
from fp8moe.adapters.torch_distributed import ProcessGroup
from fp8moe.expert_parallel import Engine, Transport
from fp8moe.moe import RECIPES, Saved
from fp8moe.placed import Layout
from fp8moe.plan import static_bound
from fp8moe.records import ArraySpec, arrays_in, map_arrays


class FP8FlowMoE(nn.Module):
    """Top-k routed SwiGLU experts: y[t] = sum of prob * w2[e] @ (silu(gate) * up) over t's experts e, with
    [gate, up] = w13[e] @ x[t].

    hidden, ffn: multiples of 128 for the FP8 recipes.
    recipe: "fp8_flow" (two casts, arXiv 2511.02302), "fp8_blockwise" (the baseline that requantises), or
        "bf16" (torch's grouped matrix product between this library's permutation).
    recompute: "moe_expert" keeps only the input of the first product for the backward.
    clamp, alpha, linear_offset: of the activation, see `fp8moe.swiglu`.
    dtype: of the master weights w13 [E, 2 ffn, hidden] and w2 [E, hidden, ffn] and of the router's, float32
        by default. The state dict holds these and nothing else.

    The FP8 copies of the weights, one of each orientation, are made in the first forward after the weights
    have changed (an optimizer's step, or a loaded state dict), so once a step, however many micro-batches it
    has, into the same memory each time. `quantize_weights` makes them at another moment: before a CUDA graph
    is captured, and after each step when a captured graph is replayed, which looks at no versions.
    `fully_shard` gathers weights without counting a version: there they are made anew with every gathering.

    A parameter with a tensor ``main_grad`` (float32 or bfloat16, Megatron's convention) gets its gradient
    added to that, by the matrix product itself, and ``grad_added_to_main_grad`` set; its ``grad`` stays None.

    process_group: the ranks of expert parallelism, or what moves rows between them: a
        `fp8moe.expert_parallel.Transport`, as `fp8moe.adapters.torch_symmetric_memory` has one. Of
        num_experts each rank holds an equal share, w13 and w2 are this rank's, and rows travel in FP8 for
        "fp8_flow". The counts of rows are looked at once a forward, so that no CUDA graph can hold it. The
        router is every rank's own: average its gradient as any other parameter's, and not those of w13 and
        w2.

    `torch.compile` takes all of it as one graph (``fullgraph=True``), in which the experts are one operator
    and their gradient another, for each number of tokens anew; with a process_group there is a break before
    and behind them.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_experts: int,
        topk: int,
        *,
        recipe: str = "fp8_flow",
        recompute: str | None = None,
        normalize_probs: bool = True,
        clamp: float | None = None,
        alpha: float = 1.0,
        linear_offset: float = 0.0,
        process_group: Any = None,
        device: Any = None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        checks.choice("recipe", recipe, RECIPES)
        checks.choice("recompute", recompute, (None, "moe_expert"))
        if recipe != "bf16" and (hidden % 128 or ffn % 128):
            raise ValueError(f"hidden, ffn: got {hidden}, {ffn}; wanted multiples of 128 for {recipe!r}")
        if not 0 < topk <= num_experts:
            raise ValueError(f"topk: got {topk}; wanted 1 to num_experts = {num_experts}")
        self.hidden, self.ffn, self.num_experts, self.topk = hidden, ffn, num_experts, topk
        self.recipe, self.recompute, self.normalize_probs = recipe, recompute, normalize_probs
        self.activation: dict[str, Any] = {"clamp": clamp, "alpha": alpha, "linear_offset": linear_offset}
        self._comm = _comm_of(process_group)
        ranks = 1 if self._comm is None else self._comm.world_size
        if num_experts % ranks:
            raise ValueError(
                f"num_experts: got {num_experts}; wanted a multiple of {ranks}, the group's ranks"
            )
        place = {"device": device, "dtype": dtype}
        self.router = nn.Linear(hidden, num_experts, bias=False, **place)
        self.w13 = nn.Parameter(torch.empty(num_experts // ranks, 2 * ffn, hidden, **place))
        self.w2 = nn.Parameter(torch.empty(num_experts // ranks, hidden, ffn, **place))
        self._fp8: dict[str, tuple[_MadeOf | None, Quantized]] = {}  # name -> what it was made of, and it
        self._handle = _handle_of(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with variance 1 / fan-in."""
        self.router.reset_parameters()
        for w in (self.w13, self.w2):
            nn.init.normal_(w, std=1 / math.sqrt(w.shape[-1]))

    def forward(self, x: Tensor, topk_ids: Tensor | None = None, topk_probs: Tensor | None = None) -> Tensor:
        """x [..., hidden], any float; y has its shape and dtype. topk_ids, topk_probs [tokens, k]: another
        router's choice instead of this one's."""
        if (topk_ids is None) != (topk_probs is None):
            raise ValueError("topk_ids, topk_probs: got one of them; wanted both, or neither")
        tokens = x.reshape(-1, self.hidden)
        if topk_ids is None or topk_probs is None:
            topk_ids, topk_probs = self.route(tokens)
        y = self._experts(tokens.bfloat16(), topk_ids, topk_probs)
        return y.to(x.dtype).reshape(x.shape)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(ids [T, k], probabilities [T, k]): softmax over all experts in float32, then the k largest, made
        to sum to one again unless ``normalize_probs`` is False."""
        weight = self.router.weight.float()
        probs, ids = torch.softmax(tokens.float() @ weight.t(), dim=-1).topk(self.topk, dim=-1)
        return ids, probs / probs.sum(dim=-1, keepdim=True) if self.normalize_probs else probs

    @torch.no_grad()
    def quantize_weights(self) -> None:
        """Make the FP8 copies of the weights now, in the memory of those before."""
        if self.recipe != "bf16":
            for name in ("w13", "w2"):
                self._quantize(name)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden} x {self.ffn}, {self.num_experts} experts, top-{self.topk}, "
            f"recipe={self.recipe!r}, recompute={self.recompute!r}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        # fully_shard gathers weights anew without counting a version, and sets them like this each time
        fp8 = self.__dict__.get("_fp8", {})
        if name in fp8:
            fp8[name] = None, fp8[name][1]
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fp8": {}}  # made anew where it is wanted

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = _handle_of(self)

    def _experts(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        if self._comm is not None or not torch.compiler.is_compiling():
            return self._eagerly(x, ids, probs)
        if self.recipe == "bf16":
            return self._in_bf16(x, ids, probs)
        adds = [getattr(w, "main_grad", None) is not None for w in (self.w13, self.w2)]
        options = (self.recipe, self.recompute, *self.activation.values())
        return _experts_op(x, self.w13, self.w2, ids, probs, self._handle, adds, *options)[0]

    # Compiled code calls this as it is: everything in it is one kernel after another already.
    @torch.compiler.disable
    def _eagerly(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        if self.recipe == "bf16":
            return self._in_bf16(x, ids, probs)
        fp8 = [self._fp8_weight(name) for name in ("w13", "w2")]
        options = (self.recipe, self.recompute, self.activation, self._comm)
        return _Experts.apply(x, self.w13, self.w2, ids, probs, fp8, options)

    def _fp8_weight(self, name: str) -> Quantized:
        w = getattr(self, name)
        made_of, fp8 = self._fp8.get(name, (None, None))
        capturing = w.is_cuda and torch.cuda.is_current_stream_capturing()
        if fp8 is not None and (capturing or (made_of is not None and made_of.still(w))):
            return fp8
        if capturing:
            raise RuntimeError(
                f"{name}: no FP8 copy of it while a CUDA graph is captured; call quantize_weights() before"
            )
        return self._quantize(name)

    def _quantize(self, name: str) -> Quantized:
        w = getattr(self, name)
        _, old = self._fp8.get(name, (None, None))
        if old is not None and old.rowwise.data.device != w.device:
            old = None
        # captured graphs know the addresses. NumPy may not see the memory of a CPU's weights: FSDP could not
        # free it then
        source = w.detach().clone() if w.device.type == "cpu" else w.detach()
        new = fp8moe.quantize_weights(source, out=old)
        self._fp8[name] = _MadeOf(w), new
        return new

    def _in_bf16(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        comm, rows, experts = self._comm, None, len(self.w13)
        if comm is not None:
            arrived = torch_distributed.dispatch(x, ids, probs, self.num_experts, comm)
            x, ids, probs = arrived.x, arrived.topk_ids, arrived.topk_probs
            rows = static_bound(arrived.num_entries, experts, 16)
        # torch's grouped product wants what it reads in multiples of 16 bytes
        plan = torch_ops.plan_topk(ids, experts, align_size=16, num_out_tokens=rows)
        moved = torch_ops.permute(x, plan, probs.float())
        ends = plan.expert_offsets[1:]
        h = nn.functional.grouped_mm(moved.data, self.w13.bfloat16().transpose(1, 2), offs=ends)
        a = torch_ops.swiglu(h, moved.probs, **self.activation)
        y = torch_ops.unpermute(
            nn.functional.grouped_mm(a, self.w2.bfloat16().transpose(1, 2), offs=ends), plan
        )
        return y if comm is None else torch_distributed.combine(y, arrived.route, comm)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w13, w2, ids, probs, fp8, options):  # type: ignore[no-untyped-def]
        recipe, recompute, activation, ctx.comm = options
        w13_fp8, w2_fp8 = fp8
        y, ctx.saved = fp8moe.moe_forward(
            x.contiguous(),
            w13_fp8,
            w2_fp8,
            ids,
            probs.contiguous(),
            recipe=recipe,
            recompute=recompute,
            comm=ctx.comm,
            **activation,
        )
        ctx.weights, ctx.probs_dtype = (w13, w2), probs.dtype
        ctx.versions = [w._version for w in ctx.weights]
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        if [w._version for w in ctx.weights] != ctx.versions:
            raise RuntimeError("w13, w2: changed in place between the forward and its backward")
        into = [getattr(w, "main_grad", None) for w in ctx.weights]
        dx, dprobs, grads = _backward(ctx.saved, dy, ctx.weights, into, ctx.comm)
        return dx, *grads, None, dprobs.to(ctx.probs_dtype), None, None


def _comm_of(group: Any) -> Any:
    if isinstance(group, torch.distributed.ProcessGroup):
        return ProcessGroup(group)
    if group is None or isinstance(group, Transport | Engine):
        return group
    raise TypeError(
        f"process_group: got {type(group).__qualname__}; wanted a torch.distributed.ProcessGroup, or a "
        "fp8moe.expert_parallel.Transport or Engine"
    )


def _backward(
    saved: Saved, dy: Tensor, weights: Any, into: Any, comm: Any = None
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """dx, dprobs, and the gradients of the weights that have none to add theirs to."""
    dtype = torch_ops.gradient_dtype(*(w.dtype for w in weights))
    g = fp8moe.moe_backward(saved, dy.contiguous(), dw13=into[0], dw2=into[1], dtype=dtype, comm=comm)
    grads: list[Tensor | None] = []
    for w, main, new in zip(weights, into, (g.dw13, g.dw2), strict=True):
        if main is not None:
            w.grad_added_to_main_grad = True
        grads.append(new.to(w.dtype) if main is None else None)
    return g.dx, g.dprobs, grads


class _MadeOf:
    """The values of a weight at one time. In-place changes count versions, and an address means something as
    long as its storage lives."""

    def __init__(self, w: Tensor):
        self.storage, self.at = StorageWeakRef(w.untyped_storage()), (w.data_ptr(), w._version)

    def still(self, w: Tensor) -> bool:
        return self.at == (w.data_ptr(), w._version) and not self.storage.expired()


# ---------------------------------------------------------------- under torch.compile
#
# An operator takes tensors and plain values only. It finds its layer, with the FP8 copies of its weights, by
# a number in a tensor (a plain one would have the same code compiled for every layer anew), and gives back,
# behind y, what the backward needs. What that is follows from shapes.

_layers: weakref.WeakValueDictionary[int, FP8FlowMoE] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _handle_of(layer: FP8FlowMoE) -> Tensor:
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


@lru_cache(maxsize=256)
def _layout(shapes: Any, recipe: str, recompute: str | None, activation: Any) -> Layout:
    """Of y and what is kept, the weights apart."""

    def forward(arrays: Any) -> Any:
        options = {"recipe": recipe, "recompute": recompute, **dict(activation)}
        y, saved = fp8moe.moe_forward(*arrays, **options)
        return y, replace(saved, w13=None, w2=None)

    return Layout(forward, [ArraySpec(*s) for s in shapes])


def _results(
    tensors: list[Tensor], recipe: str, recompute: str | None, *activation: Any
) -> tuple[Any, Saved]:
    """Shapes and dtypes of y and of what is kept."""
    names = ("clamp", "alpha", "linear_offset")
    shapes = tuple((tuple(map(int, s.shape)), s.dtype) for s in map(torch_ops.spec_of, tensors))  # no symbols
    found = _layout(shapes, recipe, recompute, tuple(zip(names, activation, strict=True)))
    y, kept = found.result(tensors, found.outputs)
    return y, kept


def _experts_fake(x, w13, w2, ids, probs, handle, adds, *options):  # type: ignore[no-untyped-def]
    return [torch_ops.like(a, x.device) for a in arrays_in(_results([x, w13, w2, ids, probs], *options))]


@torch_ops.operator("experts", _experts_fake)
def _experts_op(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    probs: Tensor,
    handle: Tensor,
    adds: list[bool],
    recipe: str,
    recompute: str | None,
    clamp: float | None,
    alpha: float,
    linear_offset: float,
) -> list[Tensor]:
    layer = _layers[int(handle)]
    y, saved = fp8moe.moe_forward(
        x.contiguous(),
        layer._fp8_weight("w13"),
        layer._fp8_weight("w2"),
        ids,
        probs.contiguous(),
        recipe=recipe,
        recompute=recompute,
        clamp=clamp,
        alpha=alpha,
        linear_offset=linear_offset,
    )
    return [y, *arrays_in(replace(saved, w13=None, w2=None))]


def _experts_backward_fake(  # type: ignore[no-untyped-def]
    dy, kept, w13, w2, ids, probs, handle, adds, *options
):
    grads = [dy.new_empty(0) if add else torch.empty_like(w) for w, add in zip((w13, w2), adds, strict=True)]
    return [torch.empty_like(dy), torch.empty_like(probs, dtype=torch.float32), *grads]


@torch_ops.operator("experts_backward", _experts_backward_fake)
def _experts_backward_op(
    dy: Tensor,
    kept: list[Tensor],
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    probs: Tensor,
    handle: Tensor,
    adds: list[bool],
    recipe: str,
    recompute: str | None,
    clamp: float | None,
    alpha: float,
    linear_offset: float,
) -> list[Tensor]:
    layer = _layers[int(handle)]
    weights = (layer.w13, layer.w2)
    # dy has the shape and dtype of x, which nothing keeps
    _, shapes = _results([dy, w13, w2, ids, probs], recipe, recompute, clamp, alpha, linear_offset)
    following = iter(kept)
    saved = map_arrays(lambda _, a: next(following), shapes)
    fp8 = [layer._fp8_weight(name) for name in ("w13", "w2")]
    into = [getattr(w, "main_grad", None) if add else None for w, add in zip(weights, adds, strict=True)]
    dx, dprobs, grads = _backward(replace(saved, w13=fp8[0], w2=fp8[1]), dy, weights, into)
    return [dx, dprobs, *(dy.new_empty(0) if g is None else g for g in grads)]


def _experts_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, w13, w2, ids, probs, handle, ctx.adds, *ctx.options = inputs
    ctx.save_for_backward(w13, w2, ids, probs, handle, *output[1:])


def _experts_grad(ctx, grads):  # type: ignore[no-untyped-def]
    w13, w2, ids, probs, handle, *kept = ctx.saved_tensors
    dx, dprobs, *dw = _experts_backward_op(
        grads[0].contiguous(), kept, w13, w2, ids, probs, handle, ctx.adds, *ctx.options
    )
    dw = [None if add else g for g, add in zip(dw, ctx.adds, strict=True)]
    return dx, *dw, None, dprobs.to(probs.dtype), *[None] * 7


_experts_op.register_autograd(_experts_grad, setup_context=_experts_setup)
