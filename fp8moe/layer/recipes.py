"""The three precision recipes of the expert layer, composed of the public operations.

"fp8_flow" (arXiv 2511.02302) has two explicit casts, of the input and of the output gradient. Rows are
dispatched and permuted in FP8, the SwiGLU kernel quantises its result, and the scaling-aware transpose makes
the column-wise operands of the weight gradients. "fp8_blockwise" is the baseline with bfloat16 between
kernels, which dequantises and requantises every column-wise operand: 12 casts. "bf16" has no casts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from fp8moe.activation import SWIGLU, Activation
from fp8moe.layer.permuted_rows import (
    PlacedRows,
    int32_counts,
    permute,
    permute_backward,
    permute_gemm,
    permute_transpose,
    unpermute,
    unpermute_backward,
)
from fp8moe.ops.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_wgrad,
)
from fp8moe.ops.quantize import columns_of, dequantize, quantize
from fp8moe.ops.swiglu import swiglu, swiglu_backward, swiglu_quantize, swiglu_quantize_backward
from fp8moe.records import PermutationPlan, QuantTensor, Record
from fp8moe.runtime.record_trees import nbytes

Recipe = Literal["bf16", "fp8_blockwise", "fp8_flow"]
RECIPES = get_args(Recipe)
RECOMPUTE = None, "moe_expert"
#: each expert's rows are padded to a multiple of it: the FP8 weight gradient contracts over blocks of 128
#: rows
ALIGN_SIZE = {"bf16": 1, "fp8_blockwise": 128, "fp8_flow": 128}
#: format in which rows are dispatched and permuted; None: unchanged
FORMAT_BETWEEN_RANKS = {"fp8_flow": "e4m3", "fp8_blockwise": None, "bf16": None}
GRADIENTS = ("dx", "dprobs", "dw13", "dw2")


@dataclass(frozen=True)
class Saved(Record):
    """The tensors that `moe_forward` saves for `moe_backward`.

    x: the input of fc1. fp8_flow: FP8, before the permutation (k times smaller); fp8_blockwise: FP8,
    permuted; bf16: bfloat16, permuted. h, a: fc1's output and the activation's output; None with recompute,
    which computes them again. fp8_flow: a is column-wise, [F, P] in (128, 128) blocks. w13, w2: the weights,
    as given or quantised. Quantised weights are saved without row-wise codes that only the forward uses
    (always w2's; w13's unless recompute). ``nbytes`` does not include the weights.
    overwritten: how often the codes of w13 and of w2 had been overwritten (`quantize_weights` with ``out=``)
    when the forward read them; None for weights that the forward quantised. backend: the GEMM backend of
    forward and backward; None: the fastest. num_sms: maximum number of multiprocessors of these GEMMs; None:
    all. later: with ``overlap_chunks``, the records of the chunks after the first, without the weights.
    """

    recipe: str
    recompute: str | None
    plan: PermutationPlan | PlacedRows
    probs: Any
    x: Any
    h: Any
    a: Any
    w13: Any
    w2: Any
    activation: Activation = SWIGLU
    route: Any = None  # of expert parallelism
    overwritten: tuple[int | None, int | None] = (None, None)
    backend: str | None = None
    num_sms: int | None = None
    later: tuple[Saved, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes saved for the backward, without the weights."""
        return nbytes(self.plan, self.probs, self.x, self.h, self.a, self.route, self.later)

    @property
    def num_tokens(self) -> int:
        """Number of rows of dy."""
        if self.route is None:
            return self.plan.num_tokens
        return sum(chunk.route.num_tokens for chunk in (self, *self.later))

    def needed_for(self, gradients: Collection[str]) -> Saved:
        """A copy without the tensors that only other gradients need: with frozen weights (LoRA), without x
        and a; with no gradients, only the plan and the route, so that errors can name what is missing."""
        if not gradients:
            return replace(self, recompute=None, probs=None, x=None, h=None, a=None, w13=None, w2=None)
        x = self.x if "dw13" in gradients or self.recompute else None
        h = self.h if _of_h(gradients) else None
        return replace(self, x=x, h=h, a=self.a if "dw2" in gradients else None)


@dataclass(frozen=True)
class SavedForWeights(Record):
    """The operands of the weight gradients, which `moe_backward_input` saves for `moe_backward_weight`.

    Size in bytes without scales, for P permuted rows, T tokens, and F padded as in the weights: "fp8_flow" T
    H (dy) + P F (a) + T H (x) + 2 P F (dh); "fp8_blockwise" P H + P F + P H + 2 P F; "bf16" twice that of
    "fp8_blockwise". x, and a without recompute, share the forward's memory, and dy may share the caller's:
    this memory must not be modified before the weight gradients have been computed. The weights and h are not
    included, so the forward's `Saved` may be deleted.

    Attributes
    ----------
    dy, a : arrays or QuantTensor, or None
        Operands of w2's gradient; None if it is not requested. In fp8_flow dy is FP8 and not yet permuted,
        and a column-wise; in the others dy is permuted, and a row-wise.
    dh, x : arrays or QuantTensor, or None
        Operands of w13's gradient; None if it is not requested. dh is column-wise in fp8_flow, in the others
        row-wise; x as in `Saved`.
    later : tuple of SavedForWeights
        With ``overlap_chunks``, the records of the chunks after the first.
    """

    recipe: str
    recompute: str | None
    plan: PermutationPlan | PlacedRows
    dy: Any
    a: Any
    dh: Any
    x: Any
    activation: Activation = SWIGLU
    backend: str | None = None
    num_sms: int | None = None
    later: tuple[SavedForWeights, ...] = ()

    @property
    def nbytes(self) -> int:
        """Total bytes, including memory shared with the forward's `Saved` and with the caller."""
        return nbytes(self.plan, self.dy, self.a, self.dh, self.x, self.later)


def cast(recipe: str, x: Any) -> Any:
    fmt = FORMAT_BETWEEN_RANKS[recipe]
    return x if fmt is None else quantize(x, fmt=fmt)


def parts_of(dw13: Any) -> tuple[Any, ...]:
    """The accumulators of w1 and w3, or the single one of w13, as a tuple."""
    return dw13 if isinstance(dw13, tuple) else (dw13,)


# The recipes have the same structure and differ in where they cast. ``del`` frees permuted tensors, which
# have k rows per token, after their last use.


def _forward_fp8_flow(x, w13, w2, plan, probs, activation, recompute, gradients):  # type: ignore[no-untyped-def]
    first = permute_gemm(x, w13.rowwise, plan, probs)  # x is FP8 already: cast 1
    h, saved = first.data, {"probs": first.probs, "x": x}
    del first
    transposed = "dw2" in gradients and not recompute
    a = _activate(h, saved["probs"], plan, activation, transposed)
    rowwise, columnwise = (a.rowwise, a.columnwise) if transposed else (a, None)
    saved |= {"h": _kept_h(h, recompute, gradients), "a": columnwise}
    del h, a
    rows_of_y = grouped_gemm(rowwise, w2.rowwise, plan.expert_offsets, int32_counts(plan))
    del rowwise
    return unpermute(rows_of_y, plan), saved


def _kept_h(h: Any, recompute: bool, gradients: Collection[str]) -> Any:
    return None if recompute or not _of_h(gradients) else h


def _backward_input_fp8_flow(saved, dy, gradients):  # type: ignore[no-untyped-def]
    plan, offsets = saved.plan, saved.plan.expert_offsets
    h, a, dh, dx, dprobs = saved.h, saved.a, None, None, None
    if saved.recompute:
        h = permute_gemm(saved.x, saved.w13.rowwise, plan).data
        if "dw2" in gradients:
            a = _activate(h, saved.probs, plan, saved.activation, transposed=True).columnwise
    if _of_h(gradients):
        # dy is FP8 already: cast 2
        da = permute_gemm(dy, saved.w2.columnwise, plan).data
        transposed = "dw13" in gradients
        grad = swiglu_quantize_backward(
            da,
            h,
            saved.probs,
            expert_offsets=offsets,
            align_size=plan.align_size,
            activation=saved.activation,
            transposed=transposed,
        )
        dprobs_of_rows = grad.dprobs
        rowwise, dh = (grad.dh.rowwise, grad.dh.columnwise) if transposed else (grad.dh, None)
        del da, grad
    if _of_inputs(gradients):
        dxe = grouped_gemm(rowwise, saved.w13.columnwise, offsets, int32_counts(plan))
        del rowwise
        dx, dprobs = permute_backward(dxe, plan, dprobs_of_rows)
    # dy before the permutation: transposing its permuted rows would read k times as many (571 us, not 360;
    # 131,072 x 7168, 32 experts)
    return dx, dprobs, _operands(gradients, dy, a, dh, saved.x)


def _backward_weight_fp8_flow(operands, dw13, dw2, dtype, ffn):  # type: ignore[no-untyped-def]
    plan, offsets = operands.plan, operands.plan.expert_offsets
    a, dh, x = operands.a, operands.dh, operands.x
    options = {"dtype": dtype, "tokens_per_expert": int32_counts(plan)}
    if a is not None:
        transposed = permute_transpose(operands.dy, plan, target=_TARGET)
        a = columns_of(a, 0, ffn or a.shape[1])
        dw2 = grouped_gemm_wgrad(transposed, a, offsets, dw2, **options)
        del transposed
    if dh is None:
        return None, dw2
    transposed = permute_transpose(x, plan, target=_TARGET)
    parts = _parts_of_dh(dh, dw13, ffn)
    sums = [grouped_gemm_wgrad(half, transposed, offsets, out, **options) for half, out in parts]
    return tuple(sums) if isinstance(dw13, tuple) else sums[0], dw2


def _parts_of_dh(dh: QuantTensor, dw13: Any, ffn: int | None) -> list[tuple[QuantTensor, Any]]:
    """(columns of dh, accumulator of their gradient) for w13, or for w1 and w3 separately."""
    outs = parts_of(dw13)
    width = dh.shape[1] // len(outs)
    return [(columns_of(dh, i * width, ffn or width), out) for i, out in enumerate(outs)]


def _activate(h, probs, plan, activation, transposed):  # type: ignore[no-untyped-def]
    options = {"activation": activation, "transposed": transposed}
    return swiglu_quantize(
        h, probs, expert_offsets=plan.expert_offsets, align_size=plan.align_size, **options
    )


# One scale per tile, as in the paper's transpose. One scale per column would keep the last bits of values of
# at most 2^-15 of their tile's maximum, but make the weight gradients 20 % slower.
_TARGET = "block"


def _forward_fp8_blockwise(x, w13, w2, plan, probs, activation, recompute, gradients):  # type: ignore[no-untyped-def]
    permuted = permute(x, plan, probs)
    q = _quantized(permuted.data)  # cast 1
    saved = {"probs": permuted.probs, "x": q if gradients else None}
    del permuted
    h = grouped_gemm(q, w13.rowwise, plan.expert_offsets)
    del q
    a = quantize(swiglu(h, saved["probs"], activation=activation))  # cast 2
    saved |= {"h": _kept_h(h, recompute, gradients), "a": None if recompute or not gradients else a}
    del h
    rows_of_y = grouped_gemm(a, w2.rowwise, plan.expert_offsets)
    del a
    return unpermute(rows_of_y, plan), saved


def _backward_input_fp8_blockwise(saved, dy, gradients):  # type: ignore[no-untyped-def]
    plan, offsets = saved.plan, saved.plan.expert_offsets
    h, a, dh, dx, dprobs = saved.h, saved.a, None, None, None
    if saved.recompute:
        h = grouped_gemm(saved.x, saved.w13.rowwise, offsets)
        a = quantize(swiglu(h, saved.probs, activation=saved.activation)) if "dw2" in gradients else None
    dout = _quantized(permute(dy, plan).data)  # cast 3
    if _of_h(gradients):
        da = grouped_gemm(dout, saved.w2.columnwise, offsets)
        grad = swiglu_backward(da, h, saved.probs, activation=saved.activation)
        del da
        dh, dprobs_of_rows = quantize(grad.dh), grad.dprobs  # cast 4
        del grad
    if _of_inputs(gradients):
        dxe = grouped_gemm(dh, saved.w13.columnwise, offsets)
        dx, dprobs = permute_backward(dxe, plan, dprobs_of_rows)
    return dx, dprobs, _operands(gradients, dout, a, dh, saved.x)


def _backward_weight_fp8_blockwise(operands, dw13, dw2, dtype, _):  # type: ignore[no-untyped-def]
    offsets = operands.plan.expert_offsets
    if operands.a is not None:
        columnwise = _requantize(operands.dy), _requantize(operands.a)  # casts 5 to 8
        dw2 = grouped_gemm_wgrad(*columnwise, offsets, dw2, dtype=dtype)
        del columnwise
    if operands.dh is not None:
        columnwise = _requantize(operands.dh), _requantize(operands.x)  # casts 9 to 12
        dw13 = grouped_gemm_wgrad(*columnwise, offsets, dw13, dtype=dtype)
    return dw13, dw2


def _quantized(x: Any) -> QuantTensor:
    """Rows in FP8; another library's dispatcher may have quantised them already."""
    return x if isinstance(x, QuantTensor) else quantize(x)  # type: ignore[no-any-return]


def _requantize(q: Any) -> QuantTensor:
    """Row-wise to column-wise by dequantising and quantising. Experts and blocks both start at multiples of
    128."""
    return quantize(dequantize(q, dtype="bfloat16"), block=(128, 1))


def _forward_bf16(x, w13, w2, plan, probs, activation, recompute, gradients):  # type: ignore[no-untyped-def]
    permuted = permute(x, plan, probs)
    h = grouped_gemm(permuted.data, w13, plan.expert_offsets)
    saved = {"probs": permuted.probs, "x": permuted.data if gradients else None}
    del permuted
    a = swiglu(h, saved["probs"], activation=activation)
    saved |= {"h": _kept_h(h, recompute, gradients), "a": None if recompute or not gradients else a}
    del h
    rows_of_y = grouped_gemm(a, w2, plan.expert_offsets)
    del a
    return unpermute(rows_of_y, plan), saved


def _backward_input_bf16(saved, dy, gradients):  # type: ignore[no-untyped-def]
    plan, offsets = saved.plan, saved.plan.expert_offsets
    h, a, dh, dx, dprobs = saved.h, saved.a, None, None, None
    if saved.recompute:
        h = grouped_gemm(saved.x, saved.w13, offsets)
        a = swiglu(h, saved.probs, activation=saved.activation) if "dw2" in gradients else None
    dout, _ = unpermute_backward(dy, plan)
    if _of_h(gradients):
        da = grouped_gemm(dout, saved.w2, offsets, transpose_w=True)
        grad = swiglu_backward(da, h, saved.probs, activation=saved.activation)
        del da
        dh = grad.dh
    if _of_inputs(gradients):
        dxe = grouped_gemm(dh, saved.w13, offsets, transpose_w=True)
        dx, dprobs = permute_backward(dxe, plan, grad.dprobs)
    return dx, dprobs, _operands(gradients, dout, a, dh, saved.x)


def _backward_weight_bf16(operands, dw13, dw2, dtype, _):  # type: ignore[no-untyped-def]
    offsets = operands.plan.expert_offsets
    if operands.a is not None:
        dw2 = grouped_gemm_wgrad(operands.dy, operands.a, offsets, dw2, dtype=_at_least(dtype, operands.dy))
    if operands.dh is not None:
        dw13 = grouped_gemm_wgrad(operands.dh, operands.x, offsets, dw13, dtype=_at_least(dtype, operands.dh))
    return dw13, dw2


def _at_least(dtype: str, operand: Any) -> str:
    """The dtype of weight gradients: float64 for float64 operands, so that they are not rounded to
    float32."""
    return "float64" if dtype == "float32" and operand.dtype == "float64" else dtype


def _of_inputs(gradients: Collection[str]) -> bool:
    return "dx" in gradients or "dprobs" in gradients


def _of_h(gradients: Collection[str]) -> bool:
    return "dw13" in gradients or _of_inputs(gradients)


def _operands(gradients: Collection[str], dy: Any, a: Any, dh: Any, x: Any) -> dict[str, Any]:
    """The operands of the weight gradients, as fields of `SavedForWeights`; None if not requested."""
    of_w2, of_w13 = "dw2" in gradients, "dw13" in gradients
    return {
        "dy": dy if of_w2 else None,
        "a": a if of_w2 else None,
        "dh": dh if of_w13 else None,
        "x": x if of_w13 else None,
    }


STEPS = {
    "fp8_flow": (_forward_fp8_flow, _backward_input_fp8_flow, _backward_weight_fp8_flow),
    "fp8_blockwise": (_forward_fp8_blockwise, _backward_input_fp8_blockwise, _backward_weight_fp8_blockwise),
    "bf16": (_forward_bf16, _backward_input_bf16, _backward_weight_bf16),
}
