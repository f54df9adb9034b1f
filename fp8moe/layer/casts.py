"""The casts of an expert layer one by one: the tensors that they round, and the layer in bfloat16 with some
of them, from which `fp8moe.torch.diagnose` finds what each costs.

Names of casts: x, w13, h (save="fp8"), a, w2, dy and dh; with "^T" the column-wise form in which x, a, dy and
dh are multiplied in the weight gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8moe.layer.options import LayerOptions
from fp8moe.layer.permuted_rows import PlacedRows, permute, permute_gemm, permute_transpose, unpermute
from fp8moe.layer.recipes import TARGET, Recipe, columnwise, requantize
from fp8moe.layer.saved import Saved, SavedForWeights
from fp8moe.ops.grouped_gemm import raw_grouped_gemm, raw_grouped_gemm_wgrad
from fp8moe.ops.permute import raw_permute_backward, raw_unpermute_backward
from fp8moe.ops.quantize import raw_dequantize, raw_quantize
from fp8moe.ops.swiglu import (
    raw_swiglu,
    raw_swiglu_backward,
    raw_swiglu_quantize,
    raw_swiglu_quantize_backward,
)
from fp8moe.ops.transpose import raw_scaling_aware_transpose
from fp8moe.records import PermutationPlan, Quantized, QuantTensor, Record
from fp8moe.runtime.dispatch import operation

#: casts whose rounding reaches each gradient, h only where its codes are saved
UPSTREAM = {
    "dx": ("x", "w13", "h", "w2", "dy", "dh"),
    "dprobs": ("x", "w13", "h", "w2", "dy"),
    "dw13": ("x", "w13", "h", "w2", "dy", "dh"),
    "dw2": ("x", "w13", "h", "a", "dy"),
}


def casts_of(options: LayerOptions) -> tuple[str, ...]:
    """Names of the casts of a layer, in the order in which they are made."""
    return "x", "w13", *(("h",) if options.save == "fp8" else ()), "a", "w2", "dy", "dh"


@dataclass(frozen=True)
class Rounded(Record):
    """A tensor before a cast, and its codes. before: float32 or bfloat16, in the codes' logical shape."""

    before: Any
    codes: QuantTensor


@operation
def rounded(
    x: Any, dy: Any, w13: Quantized, w2: Quantized, saved: Saved, operands: SavedForWeights, name: str
) -> Rounded:
    """The operand of a cast of the layer's rows, and the codes that its kernels have made of it.

    x, dy: [T, H], bfloat16. w13, w2: what the forward has multiplied. saved, operands: of this forward and
    its `moe_backward_input`, with a plan. What the records do not hold is made by the layer's own kernels.
    ``before`` of a and dh is rounded to bfloat16, which the layer's kernels do not do. Rows past the plan's
    last offset are unspecified.
    """
    plan, options, transposed = saved.plan, saved.options, name.endswith("^T")
    flow, name = options.precision.scaling_aware, name.removesuffix("^T")
    if name in ("x", "dy"):
        codes, rows = (saved.x, x) if name == "x" else (operands.dy, dy)
        if not transposed:
            return Rounded(rows if flow else permute(rows, plan).data, codes)
        permuted = permute(codes, plan).data if flow else codes
        return Rounded(raw_dequantize(permuted), columns_of_rows(codes, plan, options.precision))
    h = _h(saved, w13)
    if name == "h":
        return Rounded(h, saved.h)
    layer: dict[str, Any] = {"activation": options.activation}
    placed = {"expert_offsets": plan.expert_offsets, "align_size": plan.align_size}
    if name == "a" and transposed and isinstance(saved.h, QuantTensor):  # the backward makes it of h's codes
        h = raw_dequantize(saved.h, dtype="bfloat16")
    if name == "a":
        before = raw_swiglu(h, saved.probs, **layer)
        codes = raw_swiglu_quantize(h, saved.probs, **layer, **placed) if flow else raw_quantize(before)
    else:
        h = raw_dequantize(saved.h, dtype="bfloat16") if isinstance(saved.h, QuantTensor) else h
        da = _gemm(operands.dy, columnwise(w2), plan, options)
        before = raw_swiglu_backward(da, h, saved.probs, **layer).dh
        if flow:
            codes = raw_swiglu_quantize_backward(da, h, saved.probs, **layer, **placed).dh
        else:
            codes = operands.dh
    if not transposed:
        return Rounded(before, codes)
    made = getattr(operands, name) if flow else columns_of_rows(codes, plan, options.precision)
    return Rounded(raw_dequantize(codes), made)


def columns_of_rows(q: QuantTensor, plan: PermutationPlan | PlacedRows, recipe: Recipe) -> QuantTensor:
    """x or dy as a weight gradient multiplies it."""
    return permute_transpose(q, plan, target=TARGET) if recipe.scaling_aware else requantize(q)


def _gemm(
    x: QuantTensor,
    w: QuantTensor,
    plan: PermutationPlan | PlacedRows,
    options: LayerOptions,
    bias: Any = None,
) -> Any:
    """The product of rows that "fp8_flow" has not permuted yet, and the baseline has."""
    if options.precision.scaling_aware:
        return permute_gemm(x, w, plan, bias=bias, **options.gemm).data
    return raw_grouped_gemm(x, w, plan.expert_offsets, bias=bias, **options.gemm)


def _h(saved: Saved, w13: Quantized) -> Any:
    """fc1's output as the forward has used it, which is saved as codes or not at all with some options."""
    if saved.h is not None and not isinstance(saved.h, QuantTensor):
        return saved.h
    return _gemm(saved.x, w13.rowwise, saved.plan, saved.options, saved.bias13)


@dataclass(frozen=True)
class LayerTensors(Record):
    """What a forward and backward of a layer compute, in bfloat16; dw13 and dw2 in float32. h, a, dh: of the
    plan's rows."""

    h: Any
    a: Any
    y: Any
    dh: Any
    dx: Any
    dprobs: Any
    dw13: Any
    dw2: Any


@operation
def layer_in_bf16(
    x: Any,
    dy: Any,
    w13: Any,
    w2: Any,
    bias13: Any,
    probs: Any,
    plan: PermutationPlan,
    options: LayerOptions,
    casts: tuple[str, ...] = (),
) -> LayerTensors:
    """The layer by the products of "bf16", of operands that the named casts have rounded: also the
    column-wise form of an operand is then that of the recipe.

    x, dy: [T, H]. w13, w2: [E, 2F, H] and [E, H, F], all bfloat16, F as for the recipe. plan: the recipe's.
    """
    offsets = plan.expert_offsets
    gemm: dict[str, Any] = {"num_sms": options.num_sms}
    layer: dict[str, Any] = {"activation": options.activation}

    def cast(name: str, t: Any, **block: Any) -> tuple[Any, Any]:
        """The operand as it is multiplied, and its column-wise form."""
        if name not in casts:
            return t, t
        q = raw_quantize(t, **block)
        wide = raw_dequantize(q, dtype="bfloat16")
        if name in ("h", "w13", "w2"):
            return wide, wide
        if options.precision.scaling_aware:
            placed = {"expert_offsets": offsets, "align_size": plan.align_size}
            q = raw_scaling_aware_transpose(q, **placed, target=TARGET)
        else:
            q = requantize(q)
        return wide, raw_dequantize(q, dtype="bfloat16")

    w13, w2 = cast("w13", w13, block=(128, 128))[0], cast("w2", w2, block=(128, 128))[0]
    rows = permute(x, plan, probs)
    (x, x_of_dw), probs = cast("x", rows.data), rows.probs
    h = raw_grouped_gemm(x, w13, offsets, bias=bias13, **gemm)
    a, a_of_dw = cast("a", raw_swiglu(h, probs, **layer))
    saved_h = cast("h", h)[0]
    if saved_h is not h:
        a_of_dw = cast("a", raw_swiglu(saved_h, probs, **layer))[1]
    y = unpermute(raw_grouped_gemm(a, w2, offsets, **gemm), plan)
    dy, dy_of_dw = cast("dy", raw_unpermute_backward(dy, plan)[0])
    da = raw_grouped_gemm(dy, w2, offsets, transpose_w=True, **gemm)
    grad = raw_swiglu_backward(da, saved_h, probs, **layer)
    dh, dh_of_dw = cast("dh", grad.dh)
    dxe = raw_grouped_gemm(dh, w13, offsets, transpose_w=True, **gemm)
    dx, dprobs = raw_permute_backward(dxe, plan, grad.dprobs)
    dw13 = raw_grouped_gemm_wgrad(dh_of_dw, x_of_dw, offsets, **gemm)
    dw2 = raw_grouped_gemm_wgrad(dy_of_dw, a_of_dw, offsets, **gemm)
    return LayerTensors(h, a, y, grad.dh, dx, dprobs, dw13, dw2)
