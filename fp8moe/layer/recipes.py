"""The three precision recipes of the expert layer, composed of the operations' inner functions: the layer
checks its arguments once, so nothing here is checked again.

"fp8_flow" (arXiv 2511.02302) has two explicit casts, of the input and of the output gradient. Rows are
dispatched and permuted in FP8, the SwiGLU kernel quantises its result, and the scaling-aware transpose makes
the column-wise operands of the weight gradients. "fp8_blockwise" is the baseline with bfloat16 between
kernels, which dequantises and requantises every column-wise operand: 12 casts. "bf16" has no casts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fp8moe.formats import BFLOAT16
from fp8moe.layer.permuted_rows import (
    int32_counts,
    permute,
    permute_backward,
    permute_gemm,
    permute_transpose,
    unpermute,
    unpermute_backward,
)
from fp8moe.ops.bias import raw_chunk_sums, sums_of_chunks
from fp8moe.ops.grouped_gemm import (
    raw_grouped_gemm,
    raw_grouped_gemm_wgrad,
    raw_grouped_gemm_wgrad_of_parts,
)
from fp8moe.ops.quantize import columns_of, raw_dequantize, raw_quantize, raw_transpose_codes
from fp8moe.ops.swiglu import (
    coded_h,
    raw_swiglu,
    raw_swiglu_backward,
    raw_swiglu_quantize,
    raw_swiglu_quantize_backward,
    transposed_y,
)
from fp8moe.ops.transpose import raw_scaling_aware_transpose
from fp8moe.records import Quantized, QuantTensor
from fp8moe.runtime import checks

RecipeName = Literal["bf16", "fp8_blockwise", "fp8_flow"]
#: of a layer; dbias13 is none of a forward without bias13
GRADIENTS = ("dx", "dprobs", "dw13", "dw2", "dbias13")


@dataclass(frozen=True)
class Recipe:
    """What follows from the name of a recipe.

    quantizes: whether the GEMMs multiply FP8 codes, so that rows and weights are quantised.
    dtypes: of rows that are not quantised yet. weight_dtypes: of weights; None: the rows' dtype.
    ffn_multiple: F of the weights must be a multiple of it, so that no block of codes spans two halves.
    align_size: each expert's rows are padded to a multiple of it: the FP8 weight gradient contracts over
    blocks of 128 rows.
    format_between_ranks: format in which rows are dispatched and permuted; None: unchanged.
    scaling_aware: whether row-wise codes are transposed as codes for the weight gradients, so that the scales
    of x and dy must be powers of two.
    gradient_in_parts: whether w13's gradient can be computed for w1 and w3 separately, and without the
    columns that pad F.
    makes_activation: whether the backward makes the activation's output of h, so that the forward saves it
    only where h is not saved.
    codes_h: whether the forward can save FP8 codes of h in h's place.
    forward, backward_input, backward_weight: the steps, functions of this file. forward returns y and fields
    of `Saved`, backward_input dx, dprobs and fields of `SavedForWeights`, backward_weight dw13 and dw2; it
    takes each operand out of the dictionary that it is given, so that its memory is free after its last use.
    """

    name: RecipeName
    quantizes: bool
    dtypes: tuple[np.dtype, ...]
    weight_dtypes: tuple[np.dtype, ...] | None
    ffn_multiple: int
    align_size: int
    format_between_ranks: str | None
    scaling_aware: bool
    gradient_in_parts: bool
    makes_activation: bool
    codes_h: bool
    forward: Callable[..., tuple[Any, dict[str, Any]]]
    backward_input: Callable[..., tuple[Any, Any, dict[str, Any]]]
    backward_weight: Callable[..., tuple[Any, Any]]


def cast(recipe: Recipe, x: Any) -> Any:
    """Rows in the format in which the recipe permutes them."""
    return x if recipe.format_between_ranks is None else raw_quantize(x, fmt=recipe.format_between_ranks)


def parts_of(dw13: Any) -> tuple[Any, ...]:
    """The accumulators of w1 and w3, or the single one of w13, as a tuple."""
    return dw13 if isinstance(dw13, tuple) else (dw13,)


# The recipes have the same structure and differ in where they cast. ``del`` frees permuted tensors, which
# have k rows per token, after their last use.


def _forward_fp8_flow(x, w13, w2, bias13, plan, probs, options, gradients):  # type: ignore[no-untyped-def]
    first = permute_gemm(x, w13.rowwise, plan, probs, bias=bias13, **options.gemm)  # x is FP8 already: cast 1
    h, saved = first.data, {"probs": first.probs, "x": x}
    del first
    kept = _kept_h(h, options, gradients)
    codes = coded_h(h) if kept is not None and options.save == "fp8" else None  # of the same read of h
    a = _activate(h, saved["probs"], plan, options.activation, codes)
    # the backward makes the activation in the pass over h
    alone = "dw2" in gradients and not of_h(gradients) and not options.recompute
    saved |= {"h": kept if codes is None else codes, "a": a if alone else None}
    del h, kept
    rows_of_y = raw_grouped_gemm(a, w2.rowwise, plan.expert_offsets, int32_counts(plan), **options.gemm)
    del a
    return unpermute(rows_of_y, plan), saved


def columnwise(w: Quantized) -> QuantTensor:
    """What dgrad multiplies by. Where only row-wise codes are kept it is derived from them, for one GEMM: the
    last reference to it is that GEMM's argument."""
    return raw_transpose_codes(w.rowwise) if w.columnwise is None else w.columnwise


def _kept_h(h: Any, options: Any, gradients: Collection[str]) -> Any:
    return None if options.recompute or not of_h(gradients) else h


def _backward_input_fp8_flow(saved, dy, gradients):  # type: ignore[no-untyped-def]
    plan, offsets, options = saved.plan, saved.plan.expert_offsets, saved.options
    h, a, dh, dx, dprobs, sums = saved.h, None, None, None, None, None
    placed: dict[str, Any] = {"expert_offsets": offsets, "align_size": plan.align_size}
    if options.recompute and gradients:
        h = permute_gemm(saved.x, saved.w13.rowwise, plan, bias=saved.bias13, **options.gemm).data
    if "dw2" in gradients and not of_h(gradients):
        rowwise = saved.a
        if rowwise is None:
            values = raw_dequantize(h) if isinstance(h, QuantTensor) else h
            rowwise = _activate(values, saved.probs, plan, options.activation)
            del values
        a = raw_scaling_aware_transpose(rowwise, **placed, target=TARGET)
        del rowwise
    if of_h(gradients):
        # dy is FP8 already: cast 2
        da = permute_gemm(dy, columnwise(saved.w2), plan, **options.gemm).data
        sums = sums_of_chunks(h.shape, plan) if "dbias13" in gradients else None
        transposed = "dw13" in gradients or sums is not None  # its kernel computes the sums
        a = transposed_y(h, options.activation, **placed) if "dw2" in gradients else None
        grad = raw_swiglu_quantize_backward(
            da,
            h,
            saved.probs,
            **placed,
            activation=options.activation,
            transposed=transposed,
            sums=sums,
            y=a,
        )
        dprobs_of_rows = grad.dprobs
        rowwise, dh = (grad.dh.rowwise, grad.dh.columnwise) if transposed else (grad.dh, None)
        del da, grad
    if of_inputs(gradients):
        dxe = raw_grouped_gemm(rowwise, columnwise(saved.w13), offsets, int32_counts(plan), **options.gemm)
        del rowwise
        dx, dprobs = permute_backward(dxe, plan, dprobs_of_rows)
    # dy before the permutation: transposing its permuted rows would read k times as many (571 us, not 360;
    # 131,072 x 7168, 32 experts)
    return dx, dprobs, _operands(gradients, dy, a, dh, saved.x, sums)


def _backward_weight_fp8_flow(options, plan, operands, dw13, dw2, dtype, ffn):  # type: ignore[no-untyped-def]
    offsets, a, dh = plan.expert_offsets, operands.pop("a"), operands.pop("dh")
    gemm = {"dtype": dtype, "tokens_per_expert": int32_counts(plan), **options.gemm}
    if a is not None:
        transposed = permute_transpose(operands.pop("dy"), plan, target=TARGET)
        a = columns_of(a, 0, ffn or a.shape[1])
        dw2 = raw_grouped_gemm_wgrad(transposed, a, offsets, dw2, **gemm)
        del transposed
    del a
    if dh is None:
        return None, dw2
    transposed = permute_transpose(operands.pop("x"), plan, target=TARGET)
    count = len(dw13) if isinstance(dw13, tuple) else options.activation.columns(1) if ffn else 1
    width = dh.shape[1] // count
    parts = [columns_of(dh, i * width, ffn or width) for i in range(count)]
    if not isinstance(dw13, tuple):  # with gates, and padded: without the padding after each half
        return raw_grouped_gemm_wgrad_of_parts(parts, transposed, offsets, dw13, **gemm), dw2
    both = zip(parts, dw13, strict=True)
    return tuple(raw_grouped_gemm_wgrad(dh, transposed, offsets, out, **gemm) for dh, out in both), dw2


def _activate(h, probs, plan, activation, codes=None):  # type: ignore[no-untyped-def]
    placed = {"expert_offsets": plan.expert_offsets, "align_size": plan.align_size}
    return raw_swiglu_quantize(h, probs, activation=activation, **placed, codes_of_h=codes)


# One scale per tile, as in the paper's transpose. One scale per column would keep the last bits of values of
# at most 2^-15 of their tile's maximum, but make the weight gradients 20 % slower.
TARGET = "block"


def _forward_fp8_blockwise(x, w13, w2, bias13, plan, probs, options, gradients):  # type: ignore[no-untyped-def]
    permuted = permute(x, plan, probs)
    q = _quantized(permuted.data)  # cast 1
    saved = {"probs": permuted.probs, "x": q if gradients else None}
    del permuted
    h = raw_grouped_gemm(q, w13.rowwise, plan.expert_offsets, bias=bias13, **options.gemm)
    del q
    a = raw_quantize(raw_swiglu(h, saved["probs"], activation=options.activation))  # cast 2
    saved |= {"h": _kept_h(h, options, gradients), "a": None if options.recompute or not gradients else a}
    del h
    rows_of_y = raw_grouped_gemm(a, w2.rowwise, plan.expert_offsets, **options.gemm)
    del a
    return unpermute(rows_of_y, plan), saved


def _backward_input_fp8_blockwise(saved, dy, gradients):  # type: ignore[no-untyped-def]
    plan, offsets, options = saved.plan, saved.plan.expert_offsets, saved.options
    h, a, dh, dx, dprobs, sums = saved.h, saved.a, None, None, None, None
    if options.recompute and gradients:
        h = raw_grouped_gemm(saved.x, saved.w13.rowwise, offsets, bias=saved.bias13, **options.gemm)
        if "dw2" in gradients:
            a = raw_quantize(raw_swiglu(h, saved.probs, activation=options.activation))
    dout = _quantized(permute(dy, plan).data)  # cast 3
    if of_h(gradients):
        da = raw_grouped_gemm(dout, columnwise(saved.w2), offsets, **options.gemm)
        grad = raw_swiglu_backward(da, h, saved.probs, activation=options.activation)
        del da
        sums = raw_chunk_sums(grad.dh, plan) if "dbias13" in gradients else None
        dh, dprobs_of_rows = raw_quantize(grad.dh), grad.dprobs  # cast 4
        del grad
    if of_inputs(gradients):
        dxe = raw_grouped_gemm(dh, columnwise(saved.w13), offsets, **options.gemm)
        dx, dprobs = permute_backward(dxe, plan, dprobs_of_rows)
    return dx, dprobs, _operands(gradients, dout, a, dh, saved.x, sums)


def _backward_weight_fp8_blockwise(options, plan, operands, dw13, dw2, dtype, _):  # type: ignore[no-untyped-def]
    gemm = {"dtype": dtype, **options.gemm}
    if operands["a"] is not None:
        columnwise = requantize(operands.pop("dy")), requantize(operands.pop("a"))  # casts 5 to 8
        dw2 = raw_grouped_gemm_wgrad(*columnwise, plan.expert_offsets, dw2, **gemm)
        del columnwise
    if operands["dh"] is not None:
        columnwise = requantize(operands.pop("dh")), requantize(operands.pop("x"))  # casts 9 to 12
        dw13 = raw_grouped_gemm_wgrad(*columnwise, plan.expert_offsets, dw13, **gemm)
    return dw13, dw2


def _quantized(x: Any) -> QuantTensor:
    """Rows in FP8; another library's dispatcher may have quantised them already."""
    return x if isinstance(x, QuantTensor) else raw_quantize(x)  # type: ignore[no-any-return]


def requantize(q: Any) -> QuantTensor:
    """Row-wise to column-wise by dequantising and quantising. Experts and blocks both start at multiples of
    128."""
    return raw_quantize(raw_dequantize(q, dtype="bfloat16"), block=(128, 1))


def _forward_bf16(x, w13, w2, bias13, plan, probs, options, gradients):  # type: ignore[no-untyped-def]
    permuted = permute(x, plan, probs)
    h = raw_grouped_gemm(permuted.data, w13, plan.expert_offsets, bias=bias13, **options.gemm)
    saved = {"probs": permuted.probs, "x": permuted.data if gradients else None}
    del permuted
    a = raw_swiglu(h, saved["probs"], activation=options.activation)
    saved |= {"h": _kept_h(h, options, gradients), "a": None if options.recompute or not gradients else a}
    del h
    rows_of_y = raw_grouped_gemm(a, w2, plan.expert_offsets, **options.gemm)
    del a
    return unpermute(rows_of_y, plan), saved


def _backward_input_bf16(saved, dy, gradients):  # type: ignore[no-untyped-def]
    plan, offsets, options = saved.plan, saved.plan.expert_offsets, saved.options
    h, a, dh, dx, dprobs, sums = saved.h, saved.a, None, None, None, None
    if options.recompute and gradients:
        h = raw_grouped_gemm(saved.x, saved.w13, offsets, bias=saved.bias13, **options.gemm)
        a = raw_swiglu(h, saved.probs, activation=options.activation) if "dw2" in gradients else None
    dout, _ = unpermute_backward(dy, plan)
    if of_h(gradients):
        da = raw_grouped_gemm(dout, saved.w2, offsets, transpose_w=True, **options.gemm)
        grad = raw_swiglu_backward(da, h, saved.probs, activation=options.activation)
        del da
        dh, sums = grad.dh, raw_chunk_sums(grad.dh, plan) if "dbias13" in gradients else None
    if of_inputs(gradients):
        dxe = raw_grouped_gemm(dh, saved.w13, offsets, transpose_w=True, **options.gemm)
        dx, dprobs = permute_backward(dxe, plan, grad.dprobs)
    return dx, dprobs, _operands(gradients, dout, a, dh, saved.x, sums)


def _backward_weight_bf16(options, plan, operands, dw13, dw2, dtype, _):  # type: ignore[no-untyped-def]
    offsets, gemm = plan.expert_offsets, options.gemm
    dy, a, dh, x = (operands.pop(name) for name in ("dy", "a", "dh", "x"))
    if a is not None:
        dw2 = raw_grouped_gemm_wgrad(dy, a, offsets, dw2, dtype=_at_least(dtype, dy), **gemm)
    del dy, a
    if dh is not None:
        dw13 = raw_grouped_gemm_wgrad(dh, x, offsets, dw13, dtype=_at_least(dtype, dh), **gemm)
    return dw13, dw2


def _at_least(dtype: str, operand: Any) -> str:
    """The dtype of weight gradients: float64 for float64 operands, so that they are not rounded to
    float32."""
    return "float64" if dtype == "float32" and operand.dtype == "float64" else dtype


def of_inputs(gradients: Collection[str]) -> bool:
    return "dx" in gradients or "dprobs" in gradients


def of_h(gradients: Collection[str]) -> bool:
    return "dw13" in gradients or "dbias13" in gradients or of_inputs(gradients)


def _operands(gradients: Collection[str], dy: Any, a: Any, dh: Any, x: Any, sums: Any) -> dict[str, Any]:
    """The operands of the weight gradients, as fields of `SavedForWeights`; None if not requested."""
    of_w2, of_w13 = "dw2" in gradients, "dw13" in gradients
    return {
        "dy": dy if of_w2 else None,
        "a": a if of_w2 else None,
        "dh": dh if of_w13 else None,
        "x": x if of_w13 else None,
        "dh_sums": sums,
    }


_BF16 = Recipe(
    name="bf16",
    quantizes=False,
    dtypes=checks.FLOATS,
    weight_dtypes=None,
    ffn_multiple=1,
    align_size=1,
    format_between_ranks=None,
    scaling_aware=False,
    gradient_in_parts=False,
    makes_activation=False,
    codes_h=False,
    forward=_forward_bf16,
    backward_input=_backward_input_bf16,
    backward_weight=_backward_weight_bf16,
)
_FP8_BLOCKWISE = Recipe(
    name="fp8_blockwise",
    quantizes=True,
    dtypes=(BFLOAT16,),
    weight_dtypes=checks.QUANTIZABLE,
    ffn_multiple=128,
    align_size=128,
    format_between_ranks=None,
    scaling_aware=False,
    gradient_in_parts=False,
    makes_activation=False,
    codes_h=False,
    forward=_forward_fp8_blockwise,
    backward_input=_backward_input_fp8_blockwise,
    backward_weight=_backward_weight_fp8_blockwise,
)
_FP8_FLOW = Recipe(
    name="fp8_flow",
    quantizes=True,
    dtypes=(BFLOAT16,),
    weight_dtypes=checks.QUANTIZABLE,
    ffn_multiple=128,
    align_size=128,
    format_between_ranks="e4m3",
    scaling_aware=True,
    gradient_in_parts=True,
    makes_activation=True,
    codes_h=True,
    forward=_forward_fp8_flow,
    backward_input=_backward_input_fp8_flow,
    backward_weight=_backward_weight_fp8_flow,
)
RECIPES: dict[RecipeName, Recipe] = {recipe.name: recipe for recipe in (_BF16, _FP8_BLOCKWISE, _FP8_FLOW)}
