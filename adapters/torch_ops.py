"""The public operations as torch operators: autograd, fake tensors, `torch.compile`.

Names and arguments are those of `fp8moe`; tensors in, tensors out. Every operator is a
`torch.library.custom_op` in the namespace ``fp8moe``; its shapes come from the same ``*_spec`` functions
that allocate in the library. A `QuantTensor` has no gradient: it passes straight to the library. So do plain
tensors in eager mode, where an operator with its gradient would cost the host some 25 us a call.

Not supported, and refused: transforms of `torch.func` (vmap, grad, jvp and the like), forward-mode
differentiation, and a gradient of a gradient.
"""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import fp8moe
from fp8moe import PermutationPlan, Permuted, Quantized, QuantTensor, SortedChunks, SwigluGrad, checks
from fp8moe.activation import SWIGLU, Activation
from fp8moe.formats import COLUMN_BLOCK
from fp8moe.interop import dtype_named
from fp8moe.permute import permute_spec, sort_chunks_spec, unpermute_spec
from fp8moe.plan import places, plan_spec, static_bound
from fp8moe.quantize import quantize_spec
from fp8moe.records import SYMBOLIC_TYPES, ArraySpec, arrays_in
from fp8moe.swiglu import activation_spec
from fp8moe.transpose import transpose_spec, transposed_block

SYMBOLIC_TYPES.add(torch.SymInt)

# ---------------------------------------------------------------- the public functions


def plan_topk(
    topk_ids: Tensor, num_experts: int, *, align_size: int = 1, num_out_tokens: Any = None
) -> PermutationPlan:
    """`fp8moe.plan_topk`. "exact" reads the row count back, so it cannot be compiled."""
    if _eager(topk_ids=topk_ids) or num_out_tokens == "exact":
        return fp8moe.plan_topk(topk_ids, num_experts, align_size=align_size, num_out_tokens=num_out_tokens)
    data = _plan_topk(topk_ids, num_experts, align_size, num_out_tokens)
    return replace(_topk_spec(topk_ids, num_experts, align_size, num_out_tokens), data=data)


def plan_routing_map(
    routing_map: Tensor, *, align_size: int = 1, topk: int | None = None, num_out_tokens: Any = None
) -> PermutationPlan:
    """`fp8moe.plan_routing_map`. Compiled, it needs ``topk`` or an int ``num_out_tokens``."""
    counts = num_out_tokens == "exact" or (topk is None and num_out_tokens is None)
    if _eager(routing_map=routing_map) or counts:
        return fp8moe.plan_routing_map(
            routing_map, align_size=align_size, topk=topk, num_out_tokens=num_out_tokens
        )
    data = _plan_routing_map(routing_map, align_size, topk, num_out_tokens)
    return replace(_mask_spec(routing_map, align_size, topk, num_out_tokens), data=data)


def permute(
    x: Tensor | QuantTensor,
    plan: PermutationPlan,
    probs: Tensor | None = None,
    *,
    fill_padding: bool = True,
) -> Permuted:
    """`fp8moe.permute`, with gradients for x and probs."""
    eager, needs_grad = _eager(x=x, probs=probs), _needs_grad(x, probs)
    if needs_grad and not _may_need_grad(x):
        moved = permute(_no_columns(probs), plan, probs, fill_padding=fill_padding).probs
        return Permuted(permute(x, plan, fill_padding=fill_padding).data, moved, plan)
    if isinstance(x, QuantTensor):
        return fp8moe.permute(x, plan, probs, fill_padding=fill_padding)
    if eager:
        if not needs_grad:
            return fp8moe.permute(x, plan, probs, fill_padding=fill_padding)
        data, moved = _EagerPermute.apply(x, probs, plan, fill_padding)
        return Permuted(data, moved, plan)
    data, moved = _permute(x, *_flat(plan), probs, fill_padding)
    return Permuted(data, None if probs is None else moved, plan)


def permute_and_pad(
    x: Tensor | QuantTensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    *,
    align_size: int,
    topk: int | None = None,
    num_out_tokens: Any = None,
    num_experts: int | None = None,
    fill_padding: bool = True,
) -> Permuted:
    """`fp8moe.permute_and_pad`, with gradients for x and probs."""
    if _eager(x=x, routing_map=routing_map, probs=probs) and not _needs_grad(x, probs):
        return fp8moe.permute_and_pad(
            x,
            routing_map,
            probs,
            align_size=align_size,
            topk=topk,
            num_out_tokens=num_out_tokens,
            num_experts=num_experts,
            fill_padding=fill_padding,
        )
    if num_experts is None:
        plan = plan_routing_map(routing_map, align_size=align_size, topk=topk, num_out_tokens=num_out_tokens)
    else:
        plan = plan_topk(routing_map, num_experts, align_size=align_size, num_out_tokens=num_out_tokens)
    return permute(x, plan, probs, fill_padding=fill_padding)


def unpermute(x: Tensor | QuantTensor, plan: PermutationPlan, merging_probs: Tensor | None = None) -> Tensor:
    """`fp8moe.unpermute`, with gradients for x and merging_probs."""
    eager = _eager(x=x, merging_probs=merging_probs)
    if isinstance(x, QuantTensor):
        if _needs_grad(merging_probs):
            raise TypeError(
                "merging_probs: got a tensor that requires grad with a QuantTensor; wanted plain rows, whose "
                "products with the gradient it is; pass fp8moe.dequantize(x)"
            )
        return fp8moe.unpermute(x, plan, merging_probs)
    if eager:
        if not _needs_grad(x, merging_probs):
            return fp8moe.unpermute(x, plan, merging_probs)
        return _EagerUnpermute.apply(x, merging_probs, plan)
    return _unpermute(x, *_flat(plan), merging_probs)


def sort_chunks(
    x: Tensor | QuantTensor,
    split_sizes: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    *,
    align_size: int = 1,
    chunks_per_group: int = 1,
    num_out_tokens: int | None = None,
    keep_rest: bool = False,
) -> SortedChunks:
    """`fp8moe.sort_chunks`, with gradients for x and probs."""
    eager = _eager(x=x, split_sizes=split_sizes, sorted_indices=sorted_indices, probs=probs)
    options: dict[str, Any] = {"align_size": align_size, "chunks_per_group": chunks_per_group}
    options["keep_rest"] = keep_rest
    how = {**options, "num_out_tokens": num_out_tokens}
    if _needs_grad(x, probs) and not _may_need_grad(x):
        moved = sort_chunks(_no_columns(probs), split_sizes, sorted_indices, probs, **how)
        return replace(moved, data=sort_chunks(x, split_sizes, sorted_indices, **how).data)
    if isinstance(x, QuantTensor) or (eager and not _needs_grad(x, probs)):
        return fp8moe.sort_chunks(x, split_sizes, sorted_indices, probs, **how)
    if eager:
        found = _EagerSortChunks.apply(x, probs, split_sizes, sorted_indices, options, num_out_tokens)
        return SortedChunks(*found)
    data, moved, offsets = _sort_chunks(
        x, split_sizes, sorted_indices, probs, align_size, chunks_per_group, num_out_tokens, keep_rest
    )
    return SortedChunks(data, None if probs is None else moved, offsets)


def pad(
    x: Tensor | QuantTensor,
    tokens_per_expert: Tensor | list[int] | tuple[int, ...],
    align_size: int,
    *,
    num_out_tokens: Any = None,
) -> Any:
    """`fp8moe.pad`, with a gradient for x. "exact" reads the row count back, so it cannot be compiled."""
    return _resize("pad", x, tokens_per_expert, align_size, num_out_tokens)


def unpad(
    x: Tensor | QuantTensor,
    tokens_per_expert: Tensor | list[int] | tuple[int, ...],
    align_size: int,
    *,
    num_out_tokens: Any = None,
) -> Any:
    """`fp8moe.unpad`, with a gradient for x. "exact" reads the row count back, so it cannot be compiled."""
    return _resize("unpad", x, tokens_per_expert, align_size, num_out_tokens)


def _resize(verb: str, x: Any, counts: Any, align_size: int, rows: Any) -> Any:
    listed = isinstance(counts, (list, tuple))
    eager = _eager(x=x, tokens_per_expert=None if listed else counts)
    back = "unpad" if verb == "pad" else "pad"
    if isinstance(x, QuantTensor) or (eager and not _needs_grad(x)):
        return getattr(fp8moe, verb)(x, counts, align_size, num_out_tokens=rows)
    align_size = checks.integer("align_size", align_size, 1)
    checks.shape("x", x, ("N", "H"))
    if listed:
        counts = [checks.integer("tokens_per_expert", c, 0) for c in counts]
        if rows is None or rows == "exact":
            rows = sum(counts) if verb == "unpad" else sum(-(-c // align_size) * align_size for c in counts)
        counts = torch.tensor(counts, dtype=torch.int32, device=x.device)
    checks.shape("tokens_per_expert", counts, ("E",))
    if rows is None:
        rows = static_bound(x.shape[0], counts.shape[0], align_size) if verb == "pad" else x.shape[0]
    if eager:
        return _EagerPad.apply(x, counts, align_size, rows, getattr(fp8moe, verb), getattr(fp8moe, back))
    if rows == "exact":
        raise ValueError(
            'num_out_tokens: got "exact", which reads the counts back, in compiled code; wanted an int, or '
            "None for the static bound"
        )
    return (_pad if verb == "pad" else _unpad)(x, counts, align_size, rows)


def swiglu(
    h: Tensor,
    probs: Tensor | None = None,
    *,
    activation: Activation = SWIGLU,
) -> Tensor:
    """`fp8moe.swiglu`, with gradients for h and probs."""
    if _eager(h=h, probs=probs):
        if not _needs_grad(h, probs):
            return fp8moe.swiglu(h, probs, activation=activation)
        return _EagerSwiglu.apply(h, probs, activation)
    return _swiglu(h, probs, *scalars_of(activation))


def quantize(
    x: Tensor,
    *,
    fmt: str = "e4m3",
    block: tuple[int, int] | None = (1, 128),
    pow2: bool = True,
    eps: float = 0.0,
    layout: str = "compact",
    scale_rounding: str = "up",
) -> QuantTensor:
    """`fp8moe.quantize` in one orientation. Codes have no gradient: where x requires one, nothing of it comes
    back through them, as through ``x.detach()``."""
    eager, x = _eager(x=x), _detached("x", x)
    if eager:
        how = {"pow2": pow2, "eps": eps, "layout": layout, "scale_rounding": scale_rounding}
        return fp8moe.quantize(x, fmt=fmt, block=block, **how)
    data, scales = _quantize(x, fmt, _listed(block), pow2, eps, layout, scale_rounding)
    return QuantTensor(data, scales, fmt, block, layout)  # type: ignore[arg-type]


def dequantize(q: QuantTensor, *, dtype: str = "float32") -> Tensor:
    """`fp8moe.dequantize`."""
    if _eager(q=q):
        return fp8moe.dequantize(q, dtype=dtype)
    return _dequantize(q.data, q.scales, q.fmt, _listed(q.block), q.layout, q.transposed, dtype)


def scaling_aware_transpose(
    q: QuantTensor, expert_offsets: Tensor | None = None, *, target: str = "column", align_size: int = 1
) -> QuantTensor:
    """`fp8moe.scaling_aware_transpose`."""
    if _eager(q=q, expert_offsets=expert_offsets):
        return fp8moe.scaling_aware_transpose(q, expert_offsets, target=target, align_size=align_size)
    checks.choice("q.block", q.block, COLUMN_BLOCK)
    data, scales = _transpose(q.data, q.scales, q.fmt, _listed(q.block), expert_offsets, target, align_size)
    return QuantTensor(data, scales, q.fmt, transposed_block(q.block, target), transposed=target == "block")


def permute_transpose(q: QuantTensor, plan: PermutationPlan, *, target: str = "column") -> QuantTensor:
    """`fp8moe.permute_transpose`."""
    if _eager(q=q):
        return fp8moe.permute_transpose(q, plan, target=target)
    checks.choice("q.block", q.block, COLUMN_BLOCK)
    data, scales = _permute_transpose(q.data, q.scales, q.fmt, _listed(q.block), target, *_flat(plan))
    return QuantTensor(data, scales, q.fmt, transposed_block(q.block, target), transposed=target == "block")


def swiglu_quantize(
    h: Tensor,
    probs: Tensor | None = None,
    *,
    fmt: str = "e4m3",
    block: tuple[int, int] = (1, 128),
    activation: Activation = SWIGLU,
    columnwise: bool = False,
    expert_offsets: Tensor | None = None,
    align_size: int = 1,
) -> Any:
    """`fp8moe.swiglu_quantize`. Codes have no gradient: `swiglu_quantize_backward` is called by hand."""
    eager = _eager(h=h, probs=probs, expert_offsets=expert_offsets)
    h, probs = _detached("h", h), None if probs is None else probs.detach()
    how = (fmt, _listed(block), *scalars_of(activation), columnwise, expert_offsets, align_size)
    if eager:
        return fp8moe.swiglu_quantize(h, probs, **_options(*how))
    return _quantized(_swiglu_quantize(h, probs, *how), fmt, block, columnwise)


def swiglu_quantize_backward(
    grad: Tensor,
    h: Tensor,
    probs: Tensor | None = None,
    *,
    fmt: str = "e4m3",
    block: tuple[int, int] = (1, 128),
    activation: Activation = SWIGLU,
    columnwise: bool = False,
    expert_offsets: Tensor | None = None,
    align_size: int = 1,
) -> SwigluGrad:
    """`fp8moe.swiglu_quantize_backward`."""
    eager = _eager(grad=grad, h=h, probs=probs, expert_offsets=expert_offsets)
    grad, h = _detached("grad", grad), _detached("h", h)
    probs = None if probs is None else probs.detach()
    how = (fmt, _listed(block), *scalars_of(activation), columnwise, expert_offsets, align_size)
    if eager:
        return fp8moe.swiglu_quantize_backward(grad, h, probs, **_options(*how))
    *dh, dprobs = _swiglu_quantize_backward(grad, h, probs, *how)
    return SwigluGrad(_quantized(dh, fmt, block, columnwise), None if probs is None else dprobs)


def grouped_gemm(
    x: Tensor | QuantTensor,
    w: Tensor | QuantTensor,
    expert_offsets: Tensor,
    *,
    transpose_w: bool = False,
    backend: str | None = None,
) -> Tensor:
    """`fp8moe.grouped_gemm`, with gradients for x and w where they are tensors. FP8 operands have none: their
    gradients are products of other codes, as `moe_experts` makes them. Rows that no expert has get zeros."""
    tensors = [t for t in (x, w) if isinstance(t, Tensor)]
    for name, t in (("x", x), ("w", w)):
        if not isinstance(t, (Tensor, QuantTensor)):
            raise _no_tensor(name, t)
    if _eager(x=x, w=w, expert_offsets=expert_offsets) and not _needs_grad(*tensors):
        x, w = (t.contiguous() if isinstance(t, Tensor) else t for t in (x, w))
        return fp8moe.grouped_gemm(x, w, expert_offsets, transpose_w=transpose_w, backend=backend)
    if isinstance(x, QuantTensor) != isinstance(w, QuantTensor):
        raise TypeError(f"w: got a {type(w).__name__}; wanted a {type(x).__name__}, as x is")
    if isinstance(x, QuantTensor) and isinstance(w, QuantTensor):
        if (x.block, w.block) != ((1, 128), (128, 128)):
            raise ValueError(f"x.block, w.block: got {x.block}, {w.block}; wanted (1, 128), (128, 128)")
        if transpose_w:
            raise ValueError("transpose_w: got True with FP8 weights; wanted it with tensors")
        codes = (x.data, x.scales, x.fmt, x.layout, w.data, w.scales, w.fmt)
        return _grouped_gemm_fp8(*codes, expert_offsets, backend)
    return _grouped_gemm(x, w, expert_offsets, transpose_w, backend)


def scalars_of(activation: Activation) -> tuple[str, float | None, float, float]:
    """An activation as operators take it."""
    checks.options("activation", activation, Activation)
    return activation.kind, activation.clamp, activation.alpha, activation.linear_offset


def _options(fmt: str, block: list[int], *others: Any) -> dict[str, Any]:
    """What SwiGLU with quantise takes by name, from the order in which its operators take it."""
    *scalars, columnwise, expert_offsets, align_size = others
    return {
        "fmt": fmt,
        "block": tuple(block) or None,
        "activation": Activation(*scalars),
        "columnwise": columnwise,
        "expert_offsets": expert_offsets,
        "align_size": align_size,
    }


def _quantized(tensors: Any, fmt: str, block: tuple[int, int], columnwise: bool) -> Any:
    data, scales, column_data, column_scales = tensors
    rowwise = QuantTensor(data, scales, fmt, block)  # type: ignore[arg-type]
    if not columnwise:
        return rowwise
    return Quantized(rowwise, QuantTensor(column_data, column_scales, fmt, (block[1], 1)))  # type: ignore[arg-type]


def as_float8(q: QuantTensor) -> QuantTensor:
    """The same tensor with its codes viewed as torch's float8 dtype instead of uint8."""
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[q.fmt]
    return replace(q, data=q.data.view(dtype))


def check_float(name: str, x: Any, dimensions: int = 1) -> None:
    """A floating-point tensor of at least so many dimensions; of quantised weights nothing is asked here."""
    if isinstance(x, Quantized):
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; wanted a tensor")
    if not x.is_floating_point():
        raise TypeError(f"{name}: got dtype {x.dtype}; wanted a floating-point dtype; pass {name}.float()")
    if x.ndim < dimensions:
        raise ValueError(f"{name}: got shape {list(x.shape)}; wanted at least {dimensions} dimensions")


def refuse_transforms(what: str) -> None:
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{what}: got a call inside one of torch.func's transforms (grad, vmap, ...), which do not reach "
            "through the experts; use torch.autograd.grad or backward(), and a dimension of x for a batch"
        )


def quantize_weights(w: Tensor, out: Quantized | None = None) -> Quantized:
    """`fp8moe.quantize_weights`. Codes have no gradient. out: in eager mode only."""
    if _eager(w=w):
        return _codes_of(w.detach(), out)
    data, scales, column_data, column_scales = _quantize_weights(w.detach())
    return Quantized(
        QuantTensor(data, scales, "e4m3", (128, 128)),
        QuantTensor(column_data, column_scales, "e4m3", (128, 128), transposed=True),
    )


def gradient_dtype(*weights: torch.dtype) -> str:
    """What `moe_backward` is to make for weights of these dtypes: bfloat16 at once, the others of float32."""
    return "bfloat16" if set(weights) == {torch.bfloat16} else "float32"


_ABOVE = {"FP8FlowMoE": "torch_moe", "moe_experts": "torch_functional"}


def __getattr__(name: str) -> Any:
    """What stands on this module and is looked for here."""
    if name not in _ABOVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(f"fp8moe.adapters.{_ABOVE[name]}"), name)
    return found


# ---------------------------------------------------------------- eager mode


def _eager(**values: Any) -> bool:
    """Whether these are plain tensors of an eager call: not compiled, not fake. Refuses what is neither a
    tensor nor a QuantTensor nor None, and tensors that are differentiated or batched by other means than
    autograd, whose operators here have no rules for that."""
    if torch.compiler.is_compiling():
        return False
    plain = True
    for name, v in values.items():
        if type(v) is QuantTensor:
            v = v.data
        if v is None or type(v) in _PLAIN:
            continue
        if not isinstance(v, Tensor):
            raise _no_tensor(name, v)
        plain = False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        _refuse_transforms(values)
    return plain


_PLAIN = frozenset((Tensor, torch.nn.Parameter, QuantTensor))


def _refuse_transforms(values: dict[str, Any]) -> None:
    if torch._C._are_functorch_transforms_active():  # where tensors of the outside have no address either
        first = next(iter(values))
        raise TypeError(
            f"{first}: got under a transform of torch.func (vmap, grad, vjp, jvp or jacrev); wanted "
            "outside of any, there are no rules for them here; differentiate with torch.autograd.grad or "
            "backward(), and in place of vmap put the batch into the rows or loop over it"
        )
    for name, v in values.items():
        if isinstance(v, Tensor) and forward_ad.unpack_dual(v).tangent is not None:
            raise TypeError(
                f"{name}: got a tensor with a tangent of forward-mode differentiation; wanted a plain one; "
                "differentiate with torch.autograd.grad or backward()"
            )


def _needs_grad(*values: Tensor | QuantTensor | None) -> bool:
    """A QuantTensor has no gradient."""
    if torch.is_grad_enabled():
        for v in values:  # any() of a generator takes twice as long
            if isinstance(v, Tensor) and v.requires_grad:
                return True
    return False


_DIFFERENTIABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _may_need_grad(x: Any) -> bool:
    """Whether rows are of a kind that has a gradient; codes are not, and their probabilities, which may have
    one, move apart from them, beside rows of no columns."""
    if isinstance(x, QuantTensor):
        return False
    if not isinstance(x, Tensor):
        raise _no_tensor("x", x)
    if x.dtype not in _DIFFERENTIABLE and x.requires_grad:
        raise TypeError(
            f"x: got {x.dtype} rows that require grad; wanted bfloat16, float16, float32 or float64 ones; "
            "pass x.detach()"
        )
    return x.dtype in _DIFFERENTIABLE


def _no_columns(probs: Any) -> Tensor:
    return probs.detach().new_empty((probs.shape[0], 0))


def _detached(name: str, x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise _no_tensor(name, x)
    return x.detach()


def _no_tensor(name: str, x: Any) -> TypeError:
    return TypeError(f"{name}: got {type(x).__module__}.{type(x).__qualname__}; wanted a torch tensor")


_TWICE = (
    "the gradient of a function of fp8moe.adapters.torch_ops is differentiated, which is not twice "
    "differentiable; leave out create_graph=True, or detach() its results"
)


class _Once(torch.autograd.Function):
    """A backward as a function of the incoming gradients and of what was kept, which has no gradient."""

    @staticmethod
    def forward(ctx, backward, kept, count, *tensors):  # type: ignore[no-untyped-def]
        return backward(kept, *tensors[:count])

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        raise RuntimeError(_TWICE)


def _once_differentiable(backward):  # type: ignore[no-untyped-def]
    """`torch.autograd.function.once_differentiable`, which lets results pass for constants where the incoming
    gradient is one, and where `torch.autograd.grad` is asked for a gradient of something before them."""

    def run(ctx, *grads):  # type: ignore[no-untyped-def]
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        return _Once.apply(backward, ctx, len(grads), *grads, *ctx.saved_tensors)

    return run


class _EagerPermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probs, plan, fill_padding):  # type: ignore[no-untyped-def]
        data, ctx.sizes = _flat(plan)
        ctx.save_for_backward(data)
        ctx.has_probs = probs is not None
        moved = fp8moe.permute(x, plan, probs, fill_padding=fill_padding)
        return moved.data, moved.probs

    @staticmethod
    @_once_differentiable
    def backward(ctx, grad, grad_probs):  # type: ignore[no-untyped-def]
        (data,) = ctx.saved_tensors
        plan = _plan_of(data, ctx.sizes)
        grads = fp8moe.permute_backward(grad.contiguous(), plan, _given(grad_probs, ctx.has_probs))
        return *grads, None, None


class _EagerUnpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probs, plan):  # type: ignore[no-untyped-def]
        data, ctx.sizes = _flat(plan)
        ctx.save_for_backward(data, *(() if probs is None else (x, probs)))
        return fp8moe.unpermute(x, plan, probs)

    @staticmethod
    @_once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        data, *rows = ctx.saved_tensors
        plan = _plan_of(data, ctx.sizes)
        return *fp8moe.unpermute_backward(grad.contiguous(), plan, *rows), None


class _EagerSortChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probs, sizes, indices, options, num_out_tokens):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(sizes, indices)
        ctx.options, ctx.tokens, ctx.has_probs = options, x.shape[0], probs is not None
        got = fp8moe.sort_chunks(x, sizes, indices, probs, **options, num_out_tokens=num_out_tokens)
        ctx.mark_non_differentiable(got.group_offsets)
        return got.data, got.probs, got.group_offsets

    @staticmethod
    @_once_differentiable
    def backward(ctx, grad, grad_probs, _):  # type: ignore[no-untyped-def]
        grads = fp8moe.sort_chunks_backward(
            grad.contiguous(),
            *ctx.saved_tensors,
            _given(grad_probs, ctx.has_probs),
            **ctx.options,
            num_tokens=ctx.tokens,
        )
        return *grads, None, None, None, None


class _EagerPad(torch.autograd.Function):
    """Padding, or its way back: each is the other's gradient."""

    @staticmethod
    def forward(ctx, x, counts, align_size, rows, verb, back):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(counts)
        ctx.how = align_size, x.shape[0], back
        return verb(x, counts, align_size, num_out_tokens=rows)

    @staticmethod
    @_once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        align_size, rows, back = ctx.how
        found = back(grad.contiguous(), *ctx.saved_tensors, align_size, num_out_tokens=rows)
        return found, None, None, None, None, None


class _EagerSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, probs, activation):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(h, *(() if probs is None else (probs,)))
        ctx.activation = activation
        return fp8moe.swiglu(h, probs, activation=activation)

    @staticmethod
    @_once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        h, *probs = ctx.saved_tensors
        g = fp8moe.swiglu_backward(grad.contiguous(), h, *probs, activation=ctx.activation)
        return g.dh, g.dprobs.to(probs[0].dtype) if probs else None, None


# ---------------------------------------------------------------- the operators

_NONE = 0  # operators return tensors only: an empty one stands for None


def operator(name: str, fake, writes: tuple[str, ...] = ()):  # type: ignore[no-untyped-def]
    """Register a function as ``fp8moe::name`` with its fake, run below autograd. writes: the arguments whose
    memory it changes."""

    def register(function):  # type: ignore[no-untyped-def]
        def below_autograd(*args):  # type: ignore[no-untyped-def]
            with torch.no_grad():
                return function(*args)

        schema = torch.library.infer_schema(function, mutates_args=writes)
        operator = torch.library.custom_op(
            f"fp8moe::{name}", below_autograd, mutates_args=writes, schema=schema
        )
        operator.register_fake(fake)
        return operator

    return register


def _flat(plan: PermutationPlan) -> tuple[Tensor, list[int]]:
    """A plan as operators take it: its array and its sizes."""
    sizes = plan.num_tokens, plan.num_experts, plan.max_experts_per_token
    return plan.data, [*sizes, int(plan.has_slots), plan.num_out_tokens, plan.align_size]


def _plan_of(data: Any, sizes: Sequence[int]) -> PermutationPlan:
    tokens, experts, width, has_slots, rows, align = sizes
    return PermutationPlan(data, tokens, experts, width, bool(has_slots), rows, align)


def spec_of(x: Tensor) -> ArraySpec:
    return ArraySpec(tuple(x.shape), dtype_named(str(x.dtype).removeprefix("torch."), "x"))


def _listed(block: Any) -> list[int]:
    """A block as operators take it, empty for None."""
    if block is not None and not isinstance(block, tuple):
        raise ValueError(f"block: got {block!r}; wanted a tuple of two ints, or None")
    return list(block or ())


def _quant_spec(
    data: Tensor, scales: Tensor, fmt: str, block: list[int], layout: str, transposed: bool = False
) -> QuantTensor:
    return QuantTensor(spec_of(data), spec_of(scales), fmt, tuple(block) or None, layout, transposed)  # type: ignore[arg-type]


def like(spec: ArraySpec | None, device: torch.device) -> Tensor:
    """An empty tensor of a spec: what a fake returns."""
    if spec is None:
        return torch.empty(_NONE, device=device)
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype.name), device=device)


def or_empty(x: Tensor | None, device: torch.device) -> Tensor:
    return torch.empty(_NONE, device=device) if x is None else x


def _topk_spec(topk_ids: Tensor, num_experts: int, align_size: int, rows: int | None) -> PermutationPlan:
    tokens, k = topk_ids.shape
    return plan_spec(tokens, num_experts, k, align_size, rows, has_slots=True)


def _mask_spec(routing_map: Tensor, align_size: int, topk: int | None, rows: int | None) -> PermutationPlan:
    tokens, experts = routing_map.shape
    return plan_spec(tokens, experts, places(topk, experts), align_size, rows, has_slots=False)


def _plan_topk_fake(topk_ids, *options):  # type: ignore[no-untyped-def]
    return like(_topk_spec(topk_ids, *options).data, topk_ids.device)


@operator("plan_topk", _plan_topk_fake)
def _plan_topk(topk_ids: Tensor, num_experts: int, align_size: int, num_out_tokens: int | None) -> Tensor:
    plan = fp8moe.plan_topk(topk_ids, num_experts, align_size=align_size, num_out_tokens=num_out_tokens)
    return plan.data  # type: ignore[no-any-return]


def _plan_routing_map_fake(routing_map, *options):  # type: ignore[no-untyped-def]
    return like(_mask_spec(routing_map, *options).data, routing_map.device)


@operator("plan_routing_map", _plan_routing_map_fake)
def _plan_routing_map(
    routing_map: Tensor, align_size: int, topk: int | None, num_out_tokens: int | None
) -> Tensor:
    how: Any = {"align_size": align_size, "topk": topk, "num_out_tokens": num_out_tokens}
    return fp8moe.plan_routing_map(routing_map, **how).data  # type: ignore[no-any-return]


def _permute_fake(x, plan, sizes, probs, fill_padding):  # type: ignore[no-untyped-def]
    spec = permute_spec(spec_of(x), _plan_of(plan, sizes), None if probs is None else spec_of(probs))
    return like(spec.data, x.device), like(spec.probs, x.device)


@operator("permute", _permute_fake)
def _permute(
    x: Tensor, plan: Tensor, sizes: list[int], probs: Tensor | None, fill_padding: bool
) -> tuple[Tensor, Tensor]:
    moved = fp8moe.permute(x, _plan_of(plan, sizes), probs, fill_padding=fill_padding)
    return moved.data, or_empty(moved.probs, x.device)


def _permute_backward_fake(grad, plan, sizes, grad_probs):  # type: ignore[no-untyped-def]
    p = _plan_of(plan, sizes)
    shape = None if grad_probs is None else (p.num_tokens, p.prob_columns)
    probs = torch.empty(_NONE, device=grad.device) if shape is None else grad_probs.new_empty(shape)
    return grad.new_empty(unpermute_spec(spec_of(grad), p).shape), probs


@operator("permute_backward", _permute_backward_fake)
def _permute_backward(
    grad: Tensor, plan: Tensor, sizes: list[int], grad_probs: Tensor | None
) -> tuple[Tensor, Tensor]:
    grad_x, probs = fp8moe.permute_backward(grad, _plan_of(plan, sizes), grad_probs)
    return grad_x, or_empty(probs, grad.device)


def _unpermute_fake(x, plan, sizes, merging_probs):  # type: ignore[no-untyped-def]
    return x.new_empty((sizes[0], x.shape[1]))


@operator("unpermute", _unpermute_fake)
def _unpermute(x: Tensor, plan: Tensor, sizes: list[int], merging_probs: Tensor | None) -> Tensor:
    return fp8moe.unpermute(x, _plan_of(plan, sizes), merging_probs)


def _unpermute_backward_fake(grad, plan, sizes, x, merging_probs):  # type: ignore[no-untyped-def]
    probs = torch.empty(_NONE, device=grad.device) if merging_probs is None else merging_probs
    return grad.new_empty((sizes[-2], grad.shape[1])), torch.empty_like(probs)


@operator("unpermute_backward", _unpermute_backward_fake)
def _unpermute_backward(
    grad: Tensor,
    plan: Tensor,
    sizes: list[int],
    x: Tensor | None,
    merging_probs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    grad_x, probs = fp8moe.unpermute_backward(grad, _plan_of(plan, sizes), x, merging_probs)
    return grad_x, or_empty(probs, grad.device)


def _sort_chunks_fake(x, sizes, indices, probs, align_size, chunks_per_group, rows, keep_rest):  # type: ignore[no-untyped-def]
    groups = sizes.shape[0] // chunks_per_group
    if rows is None:
        rows = x.shape[0] if align_size == 1 else static_bound(x.shape[0], groups, align_size)
    spec = sort_chunks_spec(spec_of(x), None if probs is None else spec_of(probs), groups, rows)
    return tuple(like(s, x.device) for s in (spec.data, spec.probs, spec.group_offsets))


@operator("sort_chunks", _sort_chunks_fake)
def _sort_chunks(
    x: Tensor,
    sizes: Tensor,
    indices: Tensor,
    probs: Tensor | None,
    align_size: int,
    chunks_per_group: int,
    num_out_tokens: int | None,
    keep_rest: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    got = fp8moe.sort_chunks(
        x,
        sizes,
        indices,
        probs,
        align_size=align_size,
        chunks_per_group=chunks_per_group,
        num_out_tokens=num_out_tokens,
        keep_rest=keep_rest,
    )
    return got.data, or_empty(got.probs, x.device), got.group_offsets


def _sort_chunks_backward_fake(grad, sizes, indices, grad_probs, align, group, tokens, keep_rest):  # type: ignore[no-untyped-def]
    probs = torch.empty(_NONE, device=grad.device)
    return grad.new_empty((tokens, grad.shape[1])), (
        probs if grad_probs is None else grad_probs.new_empty(tokens)
    )


@operator("sort_chunks_backward", _sort_chunks_backward_fake)
def _sort_chunks_backward(
    grad: Tensor,
    sizes: Tensor,
    indices: Tensor,
    grad_probs: Tensor | None,
    align_size: int,
    chunks_per_group: int,
    num_tokens: int,
    keep_rest: bool,
) -> tuple[Tensor, Tensor]:
    grad_x, probs = fp8moe.sort_chunks_backward(
        grad,
        sizes,
        indices,
        grad_probs,
        align_size=align_size,
        chunks_per_group=chunks_per_group,
        num_tokens=num_tokens,
        keep_rest=keep_rest,
    )
    return grad_x, or_empty(probs, grad.device)


def _pad_fake(x, tokens_per_expert, align_size, num_out_tokens):  # type: ignore[no-untyped-def]
    return x.new_empty((num_out_tokens, x.shape[1]))


@operator("pad", _pad_fake)
def _pad(x: Tensor, tokens_per_expert: Tensor, align_size: int, num_out_tokens: int) -> Tensor:
    return fp8moe.pad(x, tokens_per_expert, align_size, num_out_tokens=num_out_tokens)


@operator("unpad", _pad_fake)
def _unpad(x: Tensor, tokens_per_expert: Tensor, align_size: int, num_out_tokens: int) -> Tensor:
    return fp8moe.unpad(x, tokens_per_expert, align_size, num_out_tokens=num_out_tokens)


def _swiglu_fake(h, probs, *activation):  # type: ignore[no-untyped-def]
    return h.new_empty((h.shape[0], h.shape[1] // 2))


@operator("swiglu", _swiglu_fake)
def _swiglu(
    h: Tensor, probs: Tensor | None, kind: str, clamp: float | None, alpha: float, linear_offset: float
) -> Tensor:
    return fp8moe.swiglu(h, probs, activation=Activation(kind, clamp, alpha, linear_offset))  # type: ignore[arg-type]


def _swiglu_backward_fake(grad, h, probs, *activation):  # type: ignore[no-untyped-def]
    wide = torch.float64 if h.dtype == torch.float64 else torch.float32
    shape = _NONE if probs is None else h.shape[0]
    dtype = torch.float32 if probs is None else wide
    return torch.empty_like(h), torch.empty(shape, dtype=dtype, device=h.device)


@operator("swiglu_backward", _swiglu_backward_fake)
def swiglu_backward(
    grad: Tensor,
    h: Tensor,
    probs: Tensor | None,
    kind: str,
    clamp: float | None,
    alpha: float,
    linear_offset: float,
) -> tuple[Tensor, Tensor]:
    activation = Activation(kind, clamp, alpha, linear_offset)  # type: ignore[arg-type]
    g = fp8moe.swiglu_backward(grad, h, probs, activation=activation)
    return g.dh, or_empty(g.dprobs, h.device)


def _quantize_fake(x, fmt, block, pow2, eps, layout, scale_rounding="up"):  # type: ignore[no-untyped-def]
    spec = quantize_spec(spec_of(x), fmt, tuple(block) or None, layout, False, scale_rounding)
    return like(spec.data, x.device), like(spec.scales, x.device)


@operator("quantize", _quantize_fake)
def _quantize(
    x: Tensor, fmt: str, block: list[int], pow2: bool, eps: float, layout: str, scale_rounding: str = "up"
) -> tuple[Tensor, Tensor]:
    how = {"pow2": pow2, "eps": eps, "layout": layout, "scale_rounding": scale_rounding}
    q = fp8moe.quantize(x, fmt=fmt, block=tuple(block) or None, **how)  # type: ignore[arg-type]
    return q.data, q.scales


def _quantize_weights_fake(w):  # type: ignore[no-untyped-def]
    spec = quantize_spec(spec_of(w), "e4m3", (128, 128), "compact", True)
    return [like(a, w.device) for a in arrays_in(spec)]


@operator("quantize_weights", _quantize_weights_fake)
def _quantize_weights(w: Tensor) -> list[Tensor]:
    return arrays_in(_codes_of(w))


def _codes_of(w: Tensor, out: Quantized | None = None) -> Quantized:
    # NumPy may not see the memory of a CPU's weights: FSDP could not free it then
    return fp8moe.quantize_weights(w.clone() if w.device.type == "cpu" else w.contiguous(), out=out)


def _dequantize_fake(data, scales, fmt, block, layout, transposed, dtype):  # type: ignore[no-untyped-def]
    shape = _quant_spec(data, scales, fmt, block, layout, transposed).shape
    return torch.empty(shape, dtype=getattr(torch, dtype), device=data.device)


@operator("dequantize", _dequantize_fake)
def _dequantize(
    data: Tensor, scales: Tensor, fmt: str, block: list[int], layout: str, transposed: bool, dtype: str
) -> Tensor:
    q = QuantTensor(data, scales, fmt, tuple(block) or None, layout, transposed)  # type: ignore[arg-type]
    return fp8moe.dequantize(q, dtype=dtype)


def _transpose_fake(data, scales, fmt, block, expert_offsets, target, align_size):  # type: ignore[no-untyped-def]
    q = _quant_spec(data, scales, fmt, block, "compact")
    experts = None if expert_offsets is None else expert_offsets.shape[0] - 1
    spec = transpose_spec(q, data.shape[0], experts, align_size, target)
    return like(spec.data, data.device), like(spec.scales, data.device)


@operator("scaling_aware_transpose", _transpose_fake)
def _transpose(
    data: Tensor,
    scales: Tensor,
    fmt: str,
    block: list[int],
    expert_offsets: Tensor | None,
    target: str,
    align_size: int,
) -> tuple[Tensor, Tensor]:
    q = QuantTensor(data, scales, fmt, tuple(block) or None)  # type: ignore[arg-type]
    got = fp8moe.scaling_aware_transpose(q, expert_offsets, target=target, align_size=align_size)
    return got.data, got.scales


def _permute_transpose_fake(data, scales, fmt, block, target, plan, sizes):  # type: ignore[no-untyped-def]
    _, experts, *_, rows, align = sizes
    spec = transpose_spec(_quant_spec(data, scales, fmt, block, "compact"), rows, experts, align, target)
    return like(spec.data, data.device), like(spec.scales, data.device)


@operator("permute_transpose", _permute_transpose_fake)
def _permute_transpose(
    data: Tensor,
    scales: Tensor,
    fmt: str,
    block: list[int],
    target: str,
    plan: Tensor,
    sizes: list[int],
) -> tuple[Tensor, Tensor]:
    q = QuantTensor(data, scales, fmt, tuple(block) or None)  # type: ignore[arg-type]
    got = fp8moe.permute_transpose(q, _plan_of(plan, sizes), target=target)
    return got.data, got.scales


def _quantized_fake(shape, device, fmt, block, columnwise, offsets, align):  # type: ignore[no-untyped-def]
    spec = activation_spec(shape, fmt, tuple(block) or None, columnwise, offsets, align)
    return [like(part, device) for part in _parts(spec)]


def _swiglu_quantize_fake(h, probs, fmt, block, *others):  # type: ignore[no-untyped-def]
    columnwise, offsets, align = others[-3:]
    shape = h.shape[0], h.shape[1] // 2
    return tuple(_quantized_fake(shape, h.device, fmt, block, columnwise, offsets, align))


def _parts(q: Any) -> tuple[Any, Any, Any, Any]:
    """Codes and scales of the row-wise tensor and of the column-wise one, None where there is none."""
    if not isinstance(q, Quantized):
        return q.data, q.scales, None, None
    return q.rowwise.data, q.rowwise.scales, q.columnwise.data, q.columnwise.scales


def _tensors_of(q: Any, device: Any) -> list[Tensor]:
    return [or_empty(part, device) for part in _parts(q)]


@operator("swiglu_quantize", _swiglu_quantize_fake)
def _swiglu_quantize(
    h: Tensor,
    probs: Tensor | None,
    fmt: str,
    block: list[int],
    kind: str,
    clamp: float | None,
    alpha: float,
    linear_offset: float,
    columnwise: bool,
    expert_offsets: Tensor | None,
    align_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    how = _options(fmt, block, kind, clamp, alpha, linear_offset, columnwise, expert_offsets, align_size)
    q = fp8moe.swiglu_quantize(h, probs, **how)
    return tuple(_tensors_of(q, h.device))  # type: ignore[return-value]


def _swiglu_quantize_backward_fake(  # type: ignore[no-untyped-def]
    grad, h, probs, fmt, block, *others
):
    columnwise, offsets, align = others[-3:]
    dh = _quantized_fake(tuple(h.shape), h.device, fmt, block, columnwise, offsets, align)
    shape = _NONE if probs is None else h.shape[0]
    return *dh, torch.empty(shape, dtype=torch.float32, device=h.device)


@operator("swiglu_quantize_backward", _swiglu_quantize_backward_fake)
def _swiglu_quantize_backward(
    grad: Tensor,
    h: Tensor,
    probs: Tensor | None,
    fmt: str,
    block: list[int],
    kind: str,
    clamp: float | None,
    alpha: float,
    linear_offset: float,
    columnwise: bool,
    expert_offsets: Tensor | None,
    align_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    how = _options(fmt, block, kind, clamp, alpha, linear_offset, columnwise, expert_offsets, align_size)
    g = fp8moe.swiglu_quantize_backward(grad, h, probs, **how)
    return *_tensors_of(g.dh, h.device), or_empty(g.dprobs, h.device)  # type: ignore[return-value]


# ---------------------------------------------------------------- gradients
#
# Each setup keeps the plan (or sizes) and what the gradient needs; each gradient is an operator above.


def _grouped_gemm_fake(x, w, expert_offsets, transpose_w, backend):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], w.shape[2 if transpose_w else 1]))


@operator("grouped_gemm", _grouped_gemm_fake)
def _grouped_gemm(
    x: Tensor, w: Tensor, expert_offsets: Tensor, transpose_w: bool, backend: str | None
) -> Tensor:
    x, w = x.contiguous(), w.contiguous()
    return fp8moe.grouped_gemm(x, w, expert_offsets, transpose_w=transpose_w, backend=backend)


def _grouped_gemm_wgrad_fake(dy, x, expert_offsets, backend):  # type: ignore[no-untyped-def]
    return dy.new_empty((expert_offsets.shape[0] - 1, dy.shape[1], x.shape[1]))


@operator("grouped_gemm_wgrad", _grouped_gemm_wgrad_fake)
def _grouped_gemm_wgrad(dy: Tensor, x: Tensor, expert_offsets: Tensor, backend: str | None) -> Tensor:
    dtype = str(dy.dtype).removeprefix("torch.")
    wide = "float32" if dtype == "float16" else dtype  # there is no sum in float16
    dy, x = dy.contiguous(), x.contiguous()
    return fp8moe.grouped_gemm_wgrad(dy, x, expert_offsets, dtype=wide, backend=backend).to(dy.dtype)


def _grouped_gemm_fp8_fake(x, x_scales, x_fmt, layout, w, w_scales, w_fmt, expert_offsets, backend):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], w.shape[1]), dtype=torch.bfloat16)


@operator("grouped_gemm_fp8", _grouped_gemm_fp8_fake)
def _grouped_gemm_fp8(
    x: Tensor,
    x_scales: Tensor,
    x_fmt: str,
    layout: str,
    w: Tensor,
    w_scales: Tensor,
    w_fmt: str,
    expert_offsets: Tensor,
    backend: str | None,
) -> Tensor:
    rows = QuantTensor(x, x_scales, x_fmt, (1, 128), layout)  # type: ignore[arg-type]
    weights = QuantTensor(w, w_scales, w_fmt, (128, 128))  # type: ignore[arg-type]
    return fp8moe.grouped_gemm(rows, weights, expert_offsets, backend=backend)


def _gradient(operator, setup, backward) -> None:  # type: ignore[no-untyped-def]
    operator.register_autograd(backward, setup_context=setup)


def _given(grad: Tensor | None, present: bool) -> Tensor | None:
    return grad.contiguous() if present and grad is not None else None


def _permute_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, plan, ctx.sizes, probs, _ = inputs
    ctx.has_probs = probs is not None
    ctx.save_for_backward(plan)


def _permute_grad(ctx, grad, grad_probs):  # type: ignore[no-untyped-def]
    probs = _given(grad_probs, ctx.has_probs)
    grad_x, grad_probs = _permute_backward(grad.contiguous(), *ctx.saved_tensors, ctx.sizes, probs)
    return grad_x, None, None, grad_probs if ctx.has_probs else None, None


def _unpermute_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, plan, ctx.sizes, probs = inputs
    ctx.has_probs = probs is not None
    # the rows themselves are needed for the probabilities' gradient only
    ctx.save_for_backward(plan, *((x, probs) if ctx.has_probs else ()))


def _unpermute_grad(ctx, grad):  # type: ignore[no-untyped-def]
    plan, *rows = ctx.saved_tensors
    x, probs = rows or (None, None)
    grad_x, grad_probs = _unpermute_backward(grad.contiguous(), plan, ctx.sizes, x, probs)
    return grad_x, None, None, grad_probs if ctx.has_probs else None


def _sort_chunks_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, sizes, indices, probs, ctx.align_size, ctx.chunks_per_group, _, ctx.keep_rest = inputs
    ctx.tokens, ctx.has_probs = x.shape[0], probs is not None
    ctx.save_for_backward(sizes, indices)


def _sort_chunks_grad(ctx, grad, grad_probs, _):  # type: ignore[no-untyped-def]
    grad_x, grad_probs = _sort_chunks_backward(
        grad.contiguous(),
        *ctx.saved_tensors,
        _given(grad_probs, ctx.has_probs),
        ctx.align_size,
        ctx.chunks_per_group,
        ctx.tokens,
        ctx.keep_rest,
    )
    return grad_x, None, None, grad_probs if ctx.has_probs else None, None, None, None, None


def _pad_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, counts, ctx.align_size, _ = inputs
    ctx.tokens = x.shape[0]
    ctx.save_for_backward(counts)


def _pad_grad(ctx, grad):  # type: ignore[no-untyped-def]
    return _unpad(grad.contiguous(), *ctx.saved_tensors, ctx.align_size, ctx.tokens), None, None, None


def _unpad_grad(ctx, grad):  # type: ignore[no-untyped-def]
    return _pad(grad.contiguous(), *ctx.saved_tensors, ctx.align_size, ctx.tokens), None, None, None


def _swiglu_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    h, probs, *ctx.activation = inputs
    ctx.has_probs = probs is not None
    ctx.save_for_backward(h, *((probs,) if ctx.has_probs else ()))


def _swiglu_grad(ctx, grad):  # type: ignore[no-untyped-def]
    h, *rest = ctx.saved_tensors
    probs = rest[0] if rest else None
    dh, dprobs = swiglu_backward(grad.contiguous(), h, probs, *ctx.activation)
    return dh, None if probs is None else dprobs.to(probs.dtype), None, None, None, None


def _grouped_gemm_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, w, expert_offsets, ctx.transpose_w, ctx.backend = inputs
    ctx.save_for_backward(x, w, expert_offsets)


def _grouped_gemm_grad(ctx, dy):  # type: ignore[no-untyped-def]
    x, w, expert_offsets = ctx.saved_tensors
    of_x, of_w, *_ = ctx.needs_input_grad
    dx = _grouped_gemm(dy, w, expert_offsets, not ctx.transpose_w, ctx.backend) if of_x else None
    pair = (x, dy) if ctx.transpose_w else (dy, x)
    dw = _grouped_gemm_wgrad(*pair, expert_offsets, ctx.backend) if of_w else None
    return dx, dw, None, None, None


_gradient(_permute, _permute_setup, _permute_grad)
_gradient(_unpermute, _unpermute_setup, _unpermute_grad)
_gradient(_sort_chunks, _sort_chunks_setup, _sort_chunks_grad)
_gradient(_pad, _pad_setup, _pad_grad)
_gradient(_unpad, _pad_setup, _unpad_grad)
_gradient(_swiglu, _swiglu_setup, _swiglu_grad)
_gradient(_grouped_gemm, _grouped_gemm_setup, _grouped_gemm_grad)


def _no_gradient(ctx, *grads):  # type: ignore[no-untyped-def]
    raise RuntimeError(_TWICE)


_BACKWARDS = _permute_backward, _unpermute_backward, _sort_chunks_backward, swiglu_backward
for _operator in (*_BACKWARDS, _grouped_gemm_wgrad):
    _operator.register_autograd(_no_gradient)
