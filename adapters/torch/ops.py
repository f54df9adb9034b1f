"""The public operations as torch operators, with autograd, fake tensors and `torch.compile`.

Names and arguments are those of `fp8moe`, with tensors as arguments and results. Each function is declared
once, from the core's function (`fp8moe.adapters.torch.operation`), and has its docstring; a dry run of the
core's own checks gives its operator's shapes. A `QuantTensor` is not differentiable. There is no `to_layout`,
no gradient such as ``permute_backward`` and no ``moe_forward``: autograd computes the gradients, and
`moe_experts` the layer. Checkpoints are converted by `fp8moe.from_block_fp8` and its kin, which take tensors.

Not supported (an error is raised): transforms of `torch.func` (vmap, grad, jvp and others), forward-mode
differentiation, and second derivatives.
"""

import functools
import math
from dataclasses import replace
from operator import attrgetter
from typing import Any

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor

import fp8moe
from fp8moe import Permuted, Quantized, QuantTensor, SortedChunks, SwigluGrad
from fp8moe.adapters.torch.accumulation import accumulators_of, no_entries
from fp8moe.adapters.torch.halves import asked_for
from fp8moe.adapters.torch.library import (
    OPERATORS,
    PLAIN,
    dispatch_modes,
    is_direct,
    once_differentiable,
    operator,
    operator_of,
)
from fp8moe.adapters.torch.operation import (
    DIFFERENTIABLE,
    Gradient,
    Values,
    check_float,
    check_tensor,
    documented,
    is_recorded,
    operation,
    plan_with,
    public,
    refuse_transforms,
    unrecorded,
)
from fp8moe.formats import COLUMN_BLOCK, round_up
from fp8moe.ops.plan import is_exact, places, plan_spec
from fp8moe.ops.transpose import transposed_block
from fp8moe.runtime import checks
from fp8moe.runtime.record_trees import arrays_in

__all__ = [
    "as_float8",
    "dequantize",
    "grouped_gemm",
    "pad",
    "permute",
    "permute_and_pad",
    "permute_gemm",
    "permute_transpose",
    "plan_index_map",
    "plan_routing_map",
    "plan_row_map",
    "plan_topk",
    "quantize",
    "quantize_weights",
    "scaling_aware_transpose",
    "sort_chunks",
    "swiglu",
    "swiglu_quantize",
    "swiglu_quantize_backward",
    "transpose_codes",
    "unpad",
    "unpermute",
]

# ---------------------------------------------------------------- plans


def _exact_plan(function: Any, values: Values) -> Any:
    """Plans whose row count is read back by the host; they cannot be part of a compiled graph."""
    rows, by_default = values["num_out_tokens"], values.get("topk", 0) is None
    if is_exact(rows) or (rows is None and by_default):
        wanted = f"an int, or {'topk= with None' if by_default else 'None'} for the static bound"
        return unrecorded(function.__wrapped__, values, f"num_out_tokens: got {rows!r}{_READS}", wanted)
    return None


def _by_topk(values: Values, data: Tensor) -> fp8moe.PermutationPlan:
    tokens, k = values["topk_ids"].shape
    sizes = values["num_experts"], k, values["align_size"], values["num_out_tokens"]
    return replace(plan_spec(tokens, *sizes, has_slots=True), data=data)


def _by_mask(values: Values, data: Tensor) -> fp8moe.PermutationPlan:
    tokens, experts = values["routing_map"].shape
    sizes = places(values["topk"], experts), values["align_size"], values["num_out_tokens"]
    return replace(plan_spec(tokens, experts, *sizes, has_slots=False), data=data)


def _by_row_map(values: Values, data: Tensor) -> fp8moe.PermutationPlan:
    tokens, columns = values["row_id_map"].shape
    sizes = columns // 2, columns // 2, 1, values["num_out_tokens"]
    return replace(plan_spec(tokens, *sizes, has_slots=False), data=data)


def _by_index_map(values: Values, data: Tensor) -> fp8moe.PermutationPlan:
    tokens = values["row_id_map"].shape[0] // values["topk"]
    sizes = 1, values["topk"], 1, values["num_out_tokens"]
    return replace(plan_spec(tokens, *sizes, has_slots=True), data=data)


_READS = ", which reads the row count back"
_EXACT = 'num_out_tokens="exact" reads the row count back, which causes a graph break in compiled code.'
_DATA: Any = attrgetter("data")
plan_topk = operation(fp8moe.plan_topk, Tensor, _by_topk, results=_DATA, prepare=_exact_plan, note=_EXACT)
plan_routing_map = operation(
    fp8moe.plan_routing_map, Tensor, _by_mask, results=_DATA, prepare=_exact_plan, note=_EXACT
)

plan_row_map = operation(fp8moe.plan_row_map, Tensor, _by_row_map, results=_DATA)
plan_index_map = operation(fp8moe.plan_index_map, Tensor, _by_index_map, results=_DATA)

# ---------------------------------------------------------------- rows


def _no_columns(probs: Tensor) -> Tensor:
    """One row of zero columns for each row of ``probs``, with which an operation moves the probabilities
    alone."""
    return probs.detach().new_empty((probs.shape[0], 0))


def _permuted(values: Values, data: Any, probs: Tensor | None = None) -> Permuted:
    return Permuted(data, probs, values["plan"])


def _probs_separately(function: Any, values: Values) -> Any:
    """Permutes the probabilities of codes, which are differentiable, in a separate call."""
    probs = values["probs"]
    compact = {"layout": "compact"} if "layout" in values else {}
    moved = function(**{**values, "x": _no_columns(probs), **compact}).probs
    code_probs = probs.detach() if values.get("zero_unweighted") else None
    return replace(function(**{**values, "probs": code_probs}), probs=moved)


_permute_backward = operator_of(fp8moe.permute_backward, list)
permute = operation(
    fp8moe.permute,
    list,
    _permuted,
    results=attrgetter("data", "probs"),
    gradient=Gradient(
        ("x", "probs"),
        lambda values: ("plan",),
        lambda values, grad, probs=None: _permute_backward.run(grad, values["plan"], probs),
        _probs_separately,
    ),
)


class _PlanAndPermute(torch.autograd.Function):
    """`fp8moe.permute_and_pad` as one call, in eager mode. made: gets its result, whose tensors are those
    that are returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, values: Values, made: list[Permuted]) -> Any:
        moved = fp8moe.permute_and_pad(**values)
        plan = moved.plan
        ctx.save_for_backward(plan.data)
        ctx.plan = vars(plan) | {"data": None}
        made.append(moved)
        return moved.data if probs is None else (moved.data, moved.probs)

    @staticmethod
    @torch.compiler.disable
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, probs: Tensor | None = None) -> Any:
        plan = plan_with(ctx.plan, *ctx.saved_tensors)
        probs = None if probs is None else probs.contiguous()
        grads = _permute_backward.run(grad.contiguous(), plan, probs)
        return grads[0], grads[1] if len(grads) > 1 else None, None, None


_plan_and_permute_now = super(torch.autograd.Function, _PlanAndPermute).apply  # type: ignore[misc]


def _plan_and_permute(values: Values) -> Permuted:
    x, probs = values["x"], values["probs"]
    plain = not torch.compiler.is_compiling() and is_direct(x) and (probs is None or type(probs) in PLAIN)
    if plain and x.dtype in DIFFERENTIABLE:
        made: list[Permuted] = []
        _plan_and_permute_now(x, probs, values, made)
        return made[0]
    routing, rows = values["routing_map"], values["num_out_tokens"]
    options = {"align_size": values["align_size"], "num_out_tokens": rows}
    if values["num_experts"] is None:
        plan = plan_routing_map(routing, topk=values["topk"], **options)
    else:
        plan = plan_topk(routing, values["num_experts"], **options)
    options = {name: values[name] for name in ("fill_padding", "layout")}
    return permute(values["x"], plan, values["probs"], **options)


permute_and_pad = public(fp8moe.permute_and_pad, _plan_and_permute, ("x", "probs"), _EXACT)


def _refuse_probs_of_codes(function: Any, values: Values) -> None:
    raise TypeError(
        "merging_probs: got a tensor that requires grad with a QuantTensor; wanted floating-point rows, "
        "which its gradient depends on; pass fp8moe.dequantize(x)"
    )


def _unpermute_saves(values: Values) -> tuple[str, ...]:
    """The rows themselves are needed only for the gradient of the probabilities."""
    return ("plan",) if values["merging_probs"] is None else ("x", "plan", "merging_probs")


def _unpermute_gradient(values: Values, grad: Tensor) -> Any:
    return _unpermute_backward.run(grad, values["plan"], values["x"], values["merging_probs"])


_unpermute_backward = operator_of(fp8moe.unpermute_backward, list)
unpermute = operation(
    fp8moe.unpermute,
    Tensor,
    gradient=Gradient(("x", "merging_probs"), _unpermute_saves, _unpermute_gradient, _refuse_probs_of_codes),
)


def _sort_chunks_gradient(values: Values, grad: Tensor, *others: Tensor) -> Any:
    chunks = values["split_sizes"], values["sorted_indices"]
    probs = others[0] if len(others) > 1 else None
    options = values["align_size"], values["chunks_per_group"], values["rows"], values["keep_rest"]
    return _sort_chunks_backward.run(grad, *chunks, probs, *options)


_sort_chunks_backward = operator_of(fp8moe.sort_chunks_backward, list)
sort_chunks = operation(
    fp8moe.sort_chunks,
    list,
    lambda values, data, *others: SortedChunks(data, others[0] if len(others) > 1 else None, others[-1]),
    results=attrgetter("data", "probs", "group_offsets"),
    gradient=Gradient(
        ("x", "probs"),
        lambda values: ("split_sizes", "sorted_indices"),
        _sort_chunks_gradient,
        _probs_separately,
    ),
)


def _counts_as_tensor(function: Any, values: Values) -> Any:
    """Converts counts in a list to a tensor; the number of rows is then known."""
    counts, rows = values["tokens_per_expert"], values["num_out_tokens"]
    if isinstance(values["x"], QuantTensor):
        return None
    if isinstance(counts, (list, tuple)):
        align_size = checks.integer("align_size", values["align_size"], 1)
        counts = [checks.integer("tokens_per_expert", c, 0) for c in counts]
        if rows is None or is_exact(rows):
            rows = sum(round_up(c, align_size) if function is pad else c for c in counts)
        counts = torch.tensor(counts, dtype=torch.int32, device=values["x"].device)
        values.update(tokens_per_expert=counts, num_out_tokens=rows)
    elif is_exact(rows) and is_recorded(values):
        wanted = "an int, or None for the static bound"
        return unrecorded(function, values, f"num_out_tokens: got {rows!r}{_READS}", wanted)
    return None


def _padding_gradient(name: str) -> Gradient:
    """The gradient of padding is unpadding, and the reverse."""

    def backward(values: Values, grad: Tensor) -> list[Tensor]:
        sizes = values["tokens_per_expert"], values["align_size"], values["rows"]
        return [OPERATORS[name].run(grad, *sizes)]

    return Gradient(("x",), lambda values: ("tokens_per_expert",), backward)


pad = operation(fp8moe.pad, Tensor, prepare=_counts_as_tensor, gradient=_padding_gradient("unpad"))
unpad = operation(fp8moe.unpad, Tensor, prepare=_counts_as_tensor, gradient=_padding_gradient("pad"))

# ---------------------------------------------------------------- SwiGLU and FP8


def _swiglu_gradient(values: Values, grad: Tensor) -> list[Tensor]:
    probs = values["probs"]
    dh, *dprobs = swiglu_backward.run(grad, values["h"], probs, values["activation"])
    return [dh, *(d.to(probs.dtype) for d in dprobs)]


swiglu_backward = operator_of(fp8moe.swiglu_backward, list, results=attrgetter("dh", "dprobs"))
swiglu = operation(
    fp8moe.swiglu,
    Tensor,
    gradient=Gradient(("h", "probs"), lambda values: ("h", "probs"), _swiglu_gradient),
)


def _quantized(values: Values, data: Tensor, scales: Tensor, *columns: Tensor) -> QuantTensor | Quantized:
    block = values["block"]
    rowwise = QuantTensor(data, scales, values["fmt"], block, values.get("layout", "compact"))
    if not columns:
        return rowwise
    return Quantized(rowwise, QuantTensor(columns[0], columns[1], values["fmt"], (block[1], 1)))


def _quantized_gradient(values: Values, *tensors: Tensor) -> SwigluGrad:
    dprobs = None if values["probs"] is None else tensors[-1]
    return SwigluGrad(_quantized(values, *(tensors if dprobs is None else tensors[:-1])), dprobs)


def _transposed(values: Values, data: Tensor, scales: Tensor) -> QuantTensor:
    q, target = values["q"], values["target"]
    block = transposed_block(q.block, target)
    return QuantTensor(data, scales, q.fmt, block, values["layout"], transposed=target == "block")


def _other_orientation(values: Values, data: Tensor, scales: Tensor) -> QuantTensor:
    q = values["q"]
    return QuantTensor(data, scales, q.fmt, q.block, transposed=not q.transposed)


def _check_block(function: Any, values: Values) -> None:
    checks.choice("q.block", values["q"].block, COLUMN_BLOCK)


quantize = operation(fp8moe.quantize, list, _quantized, results=arrays_in, without=("columnwise", "out"))
dequantize = operation(fp8moe.dequantize, Tensor)
scaling_aware_transpose = operation(
    fp8moe.scaling_aware_transpose, list, _transposed, results=arrays_in, prepare=_check_block
)
permute_transpose = operation(
    fp8moe.permute_transpose, list, _transposed, results=arrays_in, prepare=_check_block
)
transpose_codes = operation(fp8moe.transpose_codes, list, _other_orientation, results=arrays_in)
swiglu_quantize = operation(
    fp8moe.swiglu_quantize, list, _quantized, results=arrays_in, without=("transposed",)
)
swiglu_quantize_backward = operation(
    fp8moe.swiglu_quantize_backward,
    list,
    _quantized_gradient,
    results=arrays_in,
    without=("transposed",),
)


@operator("quantize_weights")
def _quantize_weights(
    x: list[Tensor],
    fmt: str,
    parts: int,
    rows: int | None,
    columns: int | None,
    transposed: bool,
    columnwise: bool,
) -> list[Any]:
    options: Any = {"fmt": fmt, "parts": parts, "rows": rows, "columns": columns, "transposed": transposed}
    options["columnwise"] = columnwise
    return arrays_in(fp8moe.quantize_weights(x[0] if len(x) == 1 else tuple(x), **options))


@documented(
    fp8moe.quantize_weights,
    (),
    "Any floating-point dtype and strides: a transposed view is read in place, other strided tensors are "
    "copied first. Compiled code does not support ``out``.",
)
def quantize_weights(
    x: Tensor | tuple[Tensor, ...],
    *,
    fmt: str = "e4m3",
    parts: int = 1,
    rows: int | None = None,
    columns: int | None = None,
    transposed: bool = False,
    columnwise: bool = True,
    out: Quantized | None = None,
) -> Quantized:
    refuse_transforms("x")
    weights = x if isinstance(x, tuple) else (x,)
    if not weights:
        raise ValueError("x: got an empty tuple; wanted a tensor, or a tuple of them")
    checks.flag("transposed", transposed)
    columnwise = checks.flag("columnwise", columnwise)
    for i, w in enumerate(weights):
        check_float(f"x[{i}]" if isinstance(x, tuple) else "x", w)
    weights = tuple([w.detach() for w in weights])
    if not transposed and all(
        w.ndim == 3 and not w.is_contiguous() and w.mT.is_contiguous() for w in weights
    ):
        weights, transposed = tuple([w.mT for w in weights]), True
    # cloned, because NumPy must not reference the memory of CPU weights: FSDP could not free it
    weights = tuple(
        [
            w.clone(memory_format=torch.contiguous_format) if w.device.type == "cpu" else w.contiguous()
            for w in weights
        ]
    )
    options: Any = {"fmt": fmt, "parts": parts, "rows": rows, "columns": columns, "transposed": transposed}
    options["columnwise"] = columnwise
    if out is not None:
        options |= {"x": weights if isinstance(x, tuple) else weights[0], "out": out}
        return unrecorded(fp8moe.quantize_weights, options, "out: got one", "None")  # type: ignore[no-any-return]
    if not torch.compiler.is_compiling() and is_direct(weights[0]):  # its result is the record
        return fp8moe.quantize_weights(weights if len(weights) > 1 else weights[0], **options)
    data, scales, *others = _quantize_weights(list(weights), *options.values())
    rowwise = QuantTensor(data, scales, fmt, (128, 128))
    if not columnwise:
        return Quantized(rowwise)
    data, scales = others
    return Quantized(rowwise, QuantTensor(data, scales, fmt, (128, 128), transposed=True))


# ---------------------------------------------------------------- products


def _product_flops(x: Any, w: Any, *_: Any) -> int:
    """Of all rows of x, including padding: the device alone knows how many belong to an expert."""
    return 2 * x.shape[0] * math.prod(w.shape[1:])


def _permuted_product_flops(x: QuantTensor, w: QuantTensor, plan: fp8moe.PermutationPlan, *_: Any) -> int:
    return 2 * plan.num_tokens * plan.max_experts_per_token * math.prod(w.shape[1:])


def _wgrad_flops(dy: Tensor, x: Tensor, *_: Any) -> int:
    """Of all rows, as `_product_flops`."""
    return 2 * dy.shape[0] * dy.shape[1] * x.shape[1]


_grouped_gemm_wgrad = operator_of(fp8moe.grouped_gemm_wgrad, Tensor, without=("out",), flops=_wgrad_flops)
_grouped_gemm_fp8 = operator_of(
    fp8moe.grouped_gemm,
    Tensor,
    name="grouped_gemm_fp8",
    without=("transpose_w",),
    types={"x": QuantTensor, "w": QuantTensor},
    flops=_product_flops,
)


def _product_of_codes(function: Any, values: Values) -> Any:
    x, w = values["x"], values["w"]
    if isinstance(x, QuantTensor) != isinstance(w, QuantTensor):
        raise TypeError(f"w: got a {type(w).__name__}; wanted a {type(x).__name__}, as x is")
    if isinstance(x, Tensor):
        return None
    if values["transpose_w"]:
        raise ValueError("transpose_w: got True with FP8 weights; wanted it with tensors")
    names = "expert_offsets", "tokens_per_expert", "backend", "num_sms"
    return _grouped_gemm_fp8(x, w, *(values[name] for name in names))


def _product_gradient(values: Values, dy: Tensor) -> list[Tensor | None]:
    x, w, offsets, backend, num_sms = (values[n] for n in ("x", "w", "expert_offsets", "backend", "num_sms"))
    node, dx, dw = values["node"], None, None
    needs_dx, needs_dw, *_ = asked_for(node)
    if needs_dx:
        dx = OPERATORS["grouped_gemm"].run(dy, w, offsets, None, not values["transpose_w"], backend, num_sms)
    if needs_dw:
        pair = (x, dy) if values["transpose_w"] else (dy, x)
        following = node.next_functions[1][0]
        dw = weight_gradient(pair[0], pair[1], offsets, w.dtype, backend, num_sms, node, following)
    return [dx, dw]


def weight_gradient(
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    backend: str | None,
    num_sms: int | None,
    node: Any,
    following: Any,
) -> Tensor:
    """The weight gradient that ``node``, which runs, passes to ``following``."""
    (grad,) = (None,) if dispatch_modes() else accumulators_of(node, [following])
    if grad is not None:
        fp8moe.grouped_gemm_wgrad(dy, x, offsets, grad, backend=backend, num_sms=num_sms)
        return no_entries(grad)
    # float16 outputs are not supported
    name = "float32" if dtype == torch.float16 else str(dtype).removeprefix("torch.")
    return _grouped_gemm_wgrad.run(dy, x, offsets, name, backend, num_sms, None).to(dtype)


_product = operation(
    fp8moe.grouped_gemm,
    Tensor,
    prepare=_product_of_codes,
    gradient=Gradient(("x", "w"), lambda values: ("x", "w", "expert_offsets"), _product_gradient),
    flops=_product_flops,
    note="FP8 operands have no gradient; ``moe_experts`` computes it with separately quantised codes. The "
    "gradient of w is added to an existing ``grad``, as `set_fuse_wgrad_accumulation` says.",
)


_permute_gemm = operation(
    fp8moe.permute_gemm,
    list,
    _permuted,
    results=attrgetter("data", "probs"),
    flops=_permuted_product_flops,
)


def _with_probs_gradient(values: Values) -> Permuted:
    """Permutes probabilities that require a gradient in a separate call."""
    probs = values["probs"]
    if not isinstance(probs, Tensor) or not probs.requires_grad:
        return _permute_gemm(**values)
    moved = permute(_no_columns(probs), values["plan"], probs).probs
    return replace(_permute_gemm(**{**values, "probs": None}), probs=moved)


permute_gemm = public(
    fp8moe.permute_gemm,
    _with_probs_gradient,
    ("probs",),
    "The codes have no gradient; ``moe_experts`` computes it with separately quantised codes.",
)


@functools.wraps(_product)
def grouped_gemm(x: Any, w: Any, expert_offsets: Tensor, *counts: Tensor | None, **options: Any) -> Any:
    for name, t in (("x", x), ("w", w)):
        if isinstance(t, Tensor):  # a sparse one has no contiguous()
            check_tensor(name, t)
    x, w = (t.contiguous() if isinstance(t, Tensor) else t for t in (x, w))
    return _product(x, w, expert_offsets, *counts, **options)


# ---------------------------------------------------------------- float8 views, and names of later modules


def as_float8(q: QuantTensor) -> QuantTensor:
    """View codes as torch's float8 dtype instead of uint8.

    Parameters
    ----------
    q : QuantTensor
        Quantised tensor of torch tensors.

    Returns
    -------
    QuantTensor
        A view of the same memory.

    Examples
    --------
    >>> import torch
    >>> import fp8moe.torch
    >>> fp8moe.torch.as_float8(fp8moe.torch.quantize(torch.ones(1, 128))).data.dtype
    torch.float8_e4m3fn
    """
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[q.fmt]
    return replace(q, data=q.data.view(dtype))
