"""The public operations as torch operators: autograd, fake tensors, `torch.compile`.

Names and arguments are those of `fp8moe`; tensors in, tensors out. Every operator is declared once
(`fp8moe.adapters.torch_library`); its shapes come from a dry run of the library's own checks. A
`QuantTensor` has no gradient: it passes straight to the library. So do plain tensors in eager mode, where
torch's dispatcher would cost the host some 25 us a call.

Not supported, and refused: transforms of `torch.func` (vmap, grad, jvp and the like), forward-mode
differentiation, and a gradient of a gradient.
"""

import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import fp8moe
from fp8moe import PermutationPlan, Permuted, Quantized, QuantTensor, SortedChunks, SwigluGrad, checks
from fp8moe.activation import SWIGLU, Activation
from fp8moe.adapters.torch_library import (
    differentiable,
    listed,
    once_differentiable,
    operator,
    plan_arguments,
    plan_of,
)
from fp8moe.formats import COLUMN_BLOCK
from fp8moe.plan import places, plan_spec, static_bound
from fp8moe.record_trees import arrays_in
from fp8moe.transpose import transposed_block

# ---------------------------------------------------------------- the public functions


def plan_topk(
    topk_ids: Tensor, num_experts: int, *, align_size: int = 1, num_out_tokens: Any = None
) -> PermutationPlan:
    """`fp8moe.plan_topk`. "exact" reads the row count back, so it cannot be compiled."""
    if _eager(topk_ids=topk_ids) or num_out_tokens == "exact":
        return fp8moe.plan_topk(topk_ids, num_experts, align_size=align_size, num_out_tokens=num_out_tokens)
    data = _plan_topk(topk_ids, num_experts, align_size, num_out_tokens)
    tokens, k = topk_ids.shape
    return replace(plan_spec(tokens, num_experts, k, align_size, num_out_tokens, has_slots=True), data=data)


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
    tokens, experts = routing_map.shape
    width = places(topk, experts)
    return replace(plan_spec(tokens, experts, width, align_size, num_out_tokens, has_slots=False), data=data)


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
    if isinstance(x, QuantTensor) or (eager and not needs_grad):
        return fp8moe.permute(x, plan, probs, fill_padding=fill_padding)
    found = _permute_with_grad(x, probs, *plan_arguments(plan), fill_padding)
    data, moved = (found, None) if probs is None else found
    return Permuted(data, moved, plan)


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
    if eager and not _needs_grad(x, merging_probs):
        return fp8moe.unpermute(x, plan, merging_probs)
    return _unpermute_with_grad(x, merging_probs, *plan_arguments(plan))


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
    how: dict[str, Any] = {"align_size": align_size, "chunks_per_group": chunks_per_group}
    how |= {"num_out_tokens": num_out_tokens, "keep_rest": keep_rest}
    if _needs_grad(x, probs) and not _may_need_grad(x):
        moved = sort_chunks(_no_columns(probs), split_sizes, sorted_indices, probs, **how)
        return replace(moved, data=sort_chunks(x, split_sizes, sorted_indices, **how).data)
    if isinstance(x, QuantTensor) or (eager and not _needs_grad(x, probs)):
        return fp8moe.sort_chunks(x, split_sizes, sorted_indices, probs, **how)
    options = align_size, chunks_per_group, keep_rest
    found = _sort_chunks_with_grad(x, probs, split_sizes, sorted_indices, options, num_out_tokens)
    return SortedChunks(found[0], None if probs is None else found[1], found[-1])


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
    if rows == "exact" and not eager:
        raise ValueError(
            'num_out_tokens: got "exact", which reads the counts back, in compiled code; wanted an int, or '
            "None for the static bound"
        )
    return _pad_with_grad(x, counts, align_size, rows, verb == "unpad")


def swiglu(
    h: Tensor,
    probs: Tensor | None = None,
    *,
    activation: Activation = SWIGLU,
) -> Tensor:
    """`fp8moe.swiglu`, with gradients for h and probs."""
    if _eager(h=h, probs=probs) and not _needs_grad(h, probs):
        return fp8moe.swiglu(h, probs, activation=activation)
    return _swiglu_with_grad(h, probs, scalars_of(activation))


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
    data, scales = _quantize(x, fmt, listed(block), pow2, eps, layout, scale_rounding)
    return QuantTensor(data, scales, fmt, block, layout)  # type: ignore[arg-type]


def dequantize(q: QuantTensor, *, dtype: str = "float32") -> Tensor:
    """`fp8moe.dequantize`."""
    if _eager(q=q):
        return fp8moe.dequantize(q, dtype=dtype)
    return _dequantize(q, dtype)


def scaling_aware_transpose(
    q: QuantTensor, expert_offsets: Tensor | None = None, *, target: str = "column", align_size: int = 1
) -> QuantTensor:
    """`fp8moe.scaling_aware_transpose`."""
    if _eager(q=q, expert_offsets=expert_offsets):
        return fp8moe.scaling_aware_transpose(q, expert_offsets, target=target, align_size=align_size)
    checks.choice("q.block", q.block, COLUMN_BLOCK)
    data, scales = _transpose(q, expert_offsets, target, align_size)
    return QuantTensor(data, scales, q.fmt, transposed_block(q.block, target), transposed=target == "block")


def permute_transpose(q: QuantTensor, plan: PermutationPlan, *, target: str = "column") -> QuantTensor:
    """`fp8moe.permute_transpose`."""
    if _eager(q=q):
        return fp8moe.permute_transpose(q, plan, target=target)
    checks.choice("q.block", q.block, COLUMN_BLOCK)
    data, scales = _permute_transpose(q, plan, target)
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
    how = (fmt, listed(block), activation, columnwise, expert_offsets, align_size)
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
    how = (fmt, listed(block), activation, columnwise, expert_offsets, align_size)
    if eager:
        return fp8moe.swiglu_quantize_backward(grad, h, probs, **_options(*how))
    tensors = _swiglu_quantize_backward(grad, h, probs, *how)
    return SwigluGrad(_quantized(tensors, fmt, block, columnwise), None if probs is None else tensors[-1])


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
    if isinstance(x, QuantTensor):
        if transpose_w:
            raise ValueError("transpose_w: got True with FP8 weights; wanted it with tensors")
        return _grouped_gemm_fp8(x, w, expert_offsets, backend)
    return _grouped_gemm_with_grad(x, w, expert_offsets, transpose_w, backend)


def scalars_of(activation: Activation) -> tuple[str, float | None, float, float]:
    """An activation as operators take it."""
    checks.options("activation", activation, Activation)
    return activation.kind, activation.clamp, activation.alpha, activation.linear_offset


def _options(
    fmt: str, block: list[int], activation: Activation, columnwise: bool, offsets: Any, align_size: int
) -> dict[str, Any]:
    """What SwiGLU with quantise takes by name, from the order in which its operators take it."""
    return {
        "fmt": fmt,
        "block": tuple(block) or None,
        "activation": activation,
        "columnwise": columnwise,
        "expert_offsets": offsets,
        "align_size": align_size,
    }


def _quantized(tensors: Any, fmt: str, block: tuple[int, int], columnwise: bool) -> Any:
    rowwise = QuantTensor(tensors[0], tensors[1], fmt, block)
    if not columnwise:
        return rowwise
    return Quantized(rowwise, QuantTensor(tensors[2], tensors[3], fmt, (block[1], 1)))


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


def quantize_weights(
    w: Tensor | tuple[Tensor, Tensor],
    out: Quantized | None = None,
    *,
    parts: int = 1,
    rows: int | None = None,
    columns: int | None = None,
) -> Quantized:
    """`fp8moe.quantize_weights`. Codes have no gradient. out: in eager mode only. Views that are transposed
    are read as they lie; what lies otherwise is copied first."""
    given: tuple[Tensor, ...] = w if isinstance(w, tuple) else (w,)
    eager, given = _eager(**{f"w[{i}]": t for i, t in enumerate(given)}), tuple(t.detach() for t in given)
    transposed = all(t.ndim == 3 and not t.is_contiguous() and t.mT.is_contiguous() for t in given)
    given = tuple(t.mT if transposed else t for t in given)
    # NumPy may not see the memory of a CPU's weights: FSDP could not free it then
    given = tuple(
        t.clone(memory_format=torch.contiguous_format) if t.device.type == "cpu" else t.contiguous()
        for t in given
    )
    how: Any = {"parts": parts, "rows": rows, "columns": columns, "transposed": transposed}
    if eager:
        return fp8moe.quantize_weights(given if isinstance(w, tuple) else given[0], **how, out=out)
    data, scales, column_data, column_scales = _quantize_weights(list(given), *how.values())
    return Quantized(
        QuantTensor(data, scales, "e4m3", (128, 128)),
        QuantTensor(column_data, column_scales, "e4m3", (128, 128), transposed=True),
    )


def gradient_dtype(*weights: torch.dtype) -> str:
    """What `moe_backward` is to make for weights of these dtypes: bfloat16 at once, the others of float32."""
    return "bfloat16" if set(weights) == {torch.bfloat16} else "float32"


_ABOVE = {
    "FP8FlowMoE": "torch_moe",
    "moe_experts": "torch_functional",
    "moe_experts_permuted": "torch_functional",
    "route": "torch_router",
}


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


# ---------------------------------------------------------------- the operators


@operator("plan_topk")
def _plan_topk(topk_ids: Tensor, num_experts: int, align_size: int, num_out_tokens: int | None) -> Tensor:
    rows: Any = num_out_tokens
    return fp8moe.plan_topk(topk_ids, num_experts, align_size=align_size, num_out_tokens=rows).data


@operator("plan_routing_map")
def _plan_routing_map(
    routing_map: Tensor, align_size: int, topk: int | None, num_out_tokens: int | None
) -> Tensor:
    how: Any = {"align_size": align_size, "topk": topk, "num_out_tokens": num_out_tokens}
    return fp8moe.plan_routing_map(routing_map, **how).data


@operator("permute")
def _permute(x: Tensor, plan: PermutationPlan, probs: Tensor | None, fill_padding: bool) -> list[Any]:
    moved = fp8moe.permute(x, plan, probs, fill_padding=fill_padding)
    return [moved.data, moved.probs]


@operator("permute_backward")
def _permute_backward(grad: Tensor, plan: PermutationPlan, grad_probs: Tensor | None) -> list[Any]:
    return fp8moe.permute_backward(grad, plan, grad_probs)


@operator("unpermute")
def _unpermute(x: Tensor, plan: PermutationPlan, merging_probs: Tensor | None) -> Tensor:
    return fp8moe.unpermute(x, plan, merging_probs)


@operator("unpermute_backward")
def _unpermute_backward(
    grad: Tensor, plan: PermutationPlan, x: Tensor | None, merging_probs: Tensor | None
) -> list[Any]:
    return fp8moe.unpermute_backward(grad, plan, x, merging_probs)


@operator("sort_chunks")
def _sort_chunks(
    x: Tensor,
    split_sizes: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    align_size: int,
    chunks_per_group: int,
    num_out_tokens: int | None,
    keep_rest: bool,
) -> list[Any]:
    options: Any = {"align_size": align_size, "chunks_per_group": chunks_per_group, "keep_rest": keep_rest}
    got = fp8moe.sort_chunks(x, split_sizes, sorted_indices, probs, num_out_tokens=num_out_tokens, **options)
    return [got.data, got.probs, got.group_offsets]


@operator("sort_chunks_backward")
def _sort_chunks_backward(
    grad: Tensor,
    split_sizes: Tensor,
    sorted_indices: Tensor,
    grad_probs: Tensor | None,
    align_size: int,
    chunks_per_group: int,
    num_tokens: int,
    keep_rest: bool,
) -> list[Any]:
    options: Any = {"align_size": align_size, "chunks_per_group": chunks_per_group, "keep_rest": keep_rest}
    return fp8moe.sort_chunks_backward(
        grad, split_sizes, sorted_indices, grad_probs, num_tokens=num_tokens, **options
    )


@operator("pad")
def _pad(x: Tensor, tokens_per_expert: Tensor, align_size: int, num_out_tokens: int) -> Tensor:
    return fp8moe.pad(x, tokens_per_expert, align_size, num_out_tokens=num_out_tokens)


@operator("unpad")
def _unpad(x: Tensor, tokens_per_expert: Tensor, align_size: int, num_out_tokens: int) -> Tensor:
    return fp8moe.unpad(x, tokens_per_expert, align_size, num_out_tokens=num_out_tokens)


@operator("swiglu")
def _swiglu(h: Tensor, probs: Tensor | None, activation: Activation) -> Tensor:
    return fp8moe.swiglu(h, probs, activation=activation)


@operator("swiglu_backward")
def swiglu_backward(grad: Tensor, h: Tensor, probs: Tensor | None, activation: Activation) -> list[Any]:
    g = fp8moe.swiglu_backward(grad, h, probs, activation=activation)
    return [g.dh, g.dprobs]


@operator("quantize")
def _quantize(
    x: Tensor, fmt: str, block: list[int], pow2: bool, eps: float, layout: str, scale_rounding: str
) -> list[Any]:
    how: Any = {"pow2": pow2, "eps": eps, "layout": layout, "scale_rounding": scale_rounding}
    q = fp8moe.quantize(x, fmt=fmt, block=tuple(block) or None, **how)
    return [q.data, q.scales]


@operator("quantize_weights")
def _quantize_weights(
    w: list[Tensor], parts: int, rows: int | None, columns: int | None, transposed: bool
) -> list[Any]:
    how: Any = {"parts": parts, "rows": rows, "columns": columns, "transposed": transposed}
    return arrays_in(fp8moe.quantize_weights(w[0] if len(w) == 1 else tuple(w), **how))


@operator("dequantize")
def _dequantize(q: QuantTensor, dtype: str) -> Tensor:
    return fp8moe.dequantize(q, dtype=dtype)


@operator("scaling_aware_transpose")
def _transpose(q: QuantTensor, expert_offsets: Tensor | None, target: str, align_size: int) -> list[Any]:
    found = fp8moe.scaling_aware_transpose(q, expert_offsets, target=target, align_size=align_size)
    return [found.data, found.scales]


@operator("permute_transpose")
def _permute_transpose(q: QuantTensor, plan: PermutationPlan, target: str) -> list[Any]:
    found = fp8moe.permute_transpose(q, plan, target=target)
    return [found.data, found.scales]


@operator("swiglu_quantize")
def _swiglu_quantize(
    h: Tensor,
    probs: Tensor | None,
    fmt: str,
    block: list[int],
    activation: Activation,
    columnwise: bool,
    expert_offsets: Tensor | None,
    align_size: int,
) -> list[Any]:
    how = _options(fmt, block, activation, columnwise, expert_offsets, align_size)
    return arrays_in(fp8moe.swiglu_quantize(h, probs, **how))


@operator("swiglu_quantize_backward")
def _swiglu_quantize_backward(
    grad: Tensor,
    h: Tensor,
    probs: Tensor | None,
    fmt: str,
    block: list[int],
    activation: Activation,
    columnwise: bool,
    expert_offsets: Tensor | None,
    align_size: int,
) -> list[Any]:
    how = _options(fmt, block, activation, columnwise, expert_offsets, align_size)
    g = fp8moe.swiglu_quantize_backward(grad, h, probs, **how)
    return [*arrays_in(g.dh), g.dprobs]


@operator("grouped_gemm")
def _grouped_gemm(
    x: Tensor, w: Tensor, expert_offsets: Tensor, transpose_w: bool, backend: str | None
) -> Tensor:
    return fp8moe.grouped_gemm(x, w, expert_offsets, transpose_w=transpose_w, backend=backend)


@operator("grouped_gemm_fp8")
def _grouped_gemm_fp8(x: QuantTensor, w: QuantTensor, expert_offsets: Tensor, backend: str | None) -> Tensor:
    return fp8moe.grouped_gemm(x, w, expert_offsets, backend=backend)


@operator("grouped_gemm_wgrad")
def _grouped_gemm_wgrad(
    dy: Tensor, x: Tensor, expert_offsets: Tensor, dtype: str, backend: str | None
) -> Tensor:
    return fp8moe.grouped_gemm_wgrad(dy, x, expert_offsets, dtype=dtype, backend=backend)


# ---------------------------------------------------------------- gradients
#
# The same in eager mode and in compiled code. Each is an operator above.


def _contiguous(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.contiguous()


class _Permute(torch.autograd.Function):
    """x and, where there are some, the probabilities."""

    @staticmethod
    def forward(ctx: Any, x: Any, probs: Any, plan: Any, sizes: Any, fill_padding: bool) -> Any:
        ctx.save_for_backward(plan)
        ctx.sizes, ctx.has_probs = sizes, probs is not None
        found = _permute.run(x, plan_of(plan, sizes), probs, fill_padding)
        return found[0] if probs is None else tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any, grad_probs: Any = None) -> Any:
        (data,) = ctx.saved_tensors
        plan = plan_of(data, ctx.sizes)
        dx, *dprobs = _permute_backward.run(grad.contiguous(), plan, _contiguous(grad_probs))
        return dx, dprobs[0] if dprobs else None, None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, probs: Any, plan: Any, sizes: Any) -> Any:
        # the rows themselves are needed for the probabilities' gradient only
        ctx.save_for_backward(plan, *(() if probs is None else (x, probs)))
        ctx.sizes = sizes
        return _unpermute.run(x, plan_of(plan, sizes), probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        plan, *rows = ctx.saved_tensors
        x, probs = rows or (None, None)
        dx, *dprobs = _unpermute_backward.run(grad.contiguous(), plan_of(plan, ctx.sizes), x, probs)
        return dx, dprobs[0] if dprobs else None, None, None


class _SortChunks(torch.autograd.Function):
    """x, the probabilities where there are some, and the groups' offsets."""

    @staticmethod
    def forward(ctx: Any, x: Any, probs: Any, sizes: Any, indices: Any, options: Any, rows: Any) -> Any:
        ctx.save_for_backward(sizes, indices)
        ctx.options, ctx.tokens, ctx.has_probs = options, x.shape[0], probs is not None
        align_size, chunks_per_group, keep_rest = options
        found = _sort_chunks.run(x, sizes, indices, probs, align_size, chunks_per_group, rows, keep_rest)
        ctx.mark_non_differentiable(found[-1])
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any, *others: Any) -> Any:
        grad_probs = _contiguous(others[0]) if ctx.has_probs else None
        align_size, chunks_per_group, keep_rest = ctx.options
        options = align_size, chunks_per_group, ctx.tokens, keep_rest
        dx, *dprobs = _sort_chunks_backward.run(grad.contiguous(), *ctx.saved_tensors, grad_probs, *options)
        return dx, dprobs[0] if dprobs else None, None, None, None, None


class _Pad(torch.autograd.Function):
    """Padding, or its reverse: each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, counts: Any, align_size: int, rows: Any, reverse: bool) -> Any:
        ctx.save_for_backward(counts)
        ctx.align_size, ctx.rows, ctx.reverse = align_size, x.shape[0], reverse
        return (_unpad if reverse else _pad).run(x, counts, align_size, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        back = _pad if ctx.reverse else _unpad
        return (
            back.run(grad.contiguous(), *ctx.saved_tensors, ctx.align_size, ctx.rows),
            None,
            None,
            None,
            None,
        )


def _activation_of(scalars: Any) -> Activation:
    """From `scalars_of`, of which a compiler may have made symbols."""
    kind, clamp, alpha, linear_offset = scalars
    return Activation(kind, None if clamp is None else float(clamp), float(alpha), float(linear_offset))


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Any, probs: Any, activation: Any) -> Any:
        ctx.save_for_backward(h, *(() if probs is None else (probs,)))
        ctx.activation = activation
        return _swiglu.run(h, probs, _activation_of(activation))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        h, *rest = ctx.saved_tensors
        probs = rest[0] if rest else None
        dh, *dprobs = swiglu_backward.run(grad.contiguous(), h, probs, _activation_of(ctx.activation))
        return dh, None if probs is None else dprobs[0].to(probs.dtype), None


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, expert_offsets: Any, transpose_w: bool, backend: Any) -> Any:
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w, expert_offsets)
        ctx.transpose_w, ctx.backend = transpose_w, backend
        return _grouped_gemm.run(x, w, expert_offsets, transpose_w, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Any) -> Any:
        x, w, expert_offsets = ctx.saved_tensors
        of_x, of_w, *_ = ctx.needs_input_grad
        dy, dx, dw = dy.contiguous(), None, None
        if of_x:
            dx = _grouped_gemm.run(dy, w, expert_offsets, not ctx.transpose_w, ctx.backend)
        if of_w:
            # there is no sum in float16
            dtype = "float32" if w.dtype == torch.float16 else str(w.dtype).removeprefix("torch.")
            pair = (x, dy) if ctx.transpose_w else (dy, x)
            dw = _grouped_gemm_wgrad.run(*pair, expert_offsets, dtype, ctx.backend).to(w.dtype)
        return dx, dw, None, None, None


_permute_with_grad = differentiable(_Permute)
_unpermute_with_grad = differentiable(_Unpermute)
_sort_chunks_with_grad = differentiable(_SortChunks)
_pad_with_grad = differentiable(_Pad)
_swiglu_with_grad = differentiable(_Swiglu)
_grouped_gemm_with_grad = differentiable(_GroupedGemm)
