"""SwiGLU, plain or fused with quantise, and the backward of both."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe import checks
from fp8moe.activation import SWIGLU, Activation
from fp8moe.dispatch import Call, enter, operation
from fp8moe.formats import COLUMN_BLOCK, Block
from fp8moe.quantize import quant_spec
from fp8moe.records import ArraySpec, Quantized, SwigluGrad
from fp8moe.transpose import column_scale_rows, transpose_spec


@operation
def swiglu(
    h: Any,
    probs: Any = None,
    *,
    activation: Activation = SWIGLU,
) -> Any:
    """y = act(a) * (b + linear_offset) * prob, for h = (a | b): SwiGLU, or another `Activation`.

    h: float [P, 2F]. probs: float [P] or None.
    Computed in float32 (float64 for float64), on CUDA for 16 bits with a sigmoid within 2^-20 of itself.
    Returns [P, F] in h's dtype.
    """
    call, a = _enter(activation, checks.FLOATS, h=h, probs=probs)
    out = call.empty(ArraySpec((a.h.shape[0], a.h.shape[1] // 2), a.h.dtype))
    call.run("swiglu", "swiglu", a.h, a.probs, activation=activation, out=out)
    return call.leave(out)


@operation
def swiglu_backward(
    grad: Any,
    h: Any,
    probs: Any = None,
    *,
    activation: Activation = SWIGLU,
) -> SwigluGrad:
    """Gradient of `swiglu`: dh [P, 2F] in h's dtype, dprobs float32 (float64 for float64) [P], or None.

    grad: [P, F] in h's dtype.

    The sum over F in dprobs has a fixed order: the result is the same from run to run.
    """
    call, a = _enter(activation, checks.FLOATS, h=h, probs=probs, grad=grad)
    spec = SwigluGrad(ArraySpec(tuple(a.h.shape), a.h.dtype), _dprobs_spec(a.h, a.probs))
    out = call.empty(spec)
    call.run("swiglu", "swiglu_backward", a.grad, a.h, a.probs, activation=activation, out=out)
    return call.leave(out)


@operation
def swiglu_quantize(
    h: Any,
    probs: Any = None,
    *,
    fmt: str = "e4m3",
    block: Block = (1, 128),
    activation: Activation = SWIGLU,
    columnwise: bool = False,
    transposed: bool = False,
    expert_offsets: Any = None,
    align_size: int = 1,
) -> Any:
    """`swiglu` in float32, then `quantize` with scales rounded up to powers of two, in one pass.

    h: bfloat16, float16 or float32 [P, 2F]. probs: float [P] or None. block: (1, 128) or (1, 32).
    columnwise: return `Quantized`, with the (128, 1) transposed tensor beside the row-wise one; both are
        quantised from the same float32 values.
    transposed: return `Quantized`, with ``scaling_aware_transpose(rowwise, expert_offsets, target="block",
        align_size=align_size)`` beside the row-wise tensor, bit for bit, without reading that again. block is
        (1, 128) then.
    expert_offsets, align_size: as in `scaling_aware_transpose`: column blocks start anew with each
        expert, and rows past the last offset need not be computed.

    Returns a `QuantTensor` [P, F] or `Quantized`.
    """
    call, a = _enter(
        activation,
        checks.QUANTIZABLE,
        align_size,
        h=h,
        probs=probs,
        expert_offsets=expert_offsets,
    )
    shape = (a.h.shape[0], a.h.shape[1] // 2)
    out = call.empty(activation_spec(shape, fmt, block, columnwise, a.expert_offsets, align_size, transposed))
    call.run(
        "swiglu",
        "swiglu_quantize",
        a.h,
        a.probs,
        activation=activation,
        expert_offsets=a.expert_offsets,
        out=out,
    )
    return call.leave(out)


@operation
def swiglu_quantize_backward(
    grad: Any,
    h: Any,
    probs: Any = None,
    *,
    fmt: str = "e4m3",
    block: Block = (1, 128),
    activation: Activation = SWIGLU,
    columnwise: bool = False,
    transposed: bool = False,
    expert_offsets: Any = None,
    align_size: int = 1,
) -> SwigluGrad:
    """`swiglu_backward` in float32, then `quantize` of dh, in one pass.

    grad: [P, F], h: [P, 2F], both bfloat16, both float16 or both float32. F must be a multiple of the block,
        so that no block holds values of both halves of dh. The rest is as in `swiglu_quantize`.

    Returns `SwigluGrad`: dh a `QuantTensor` [P, 2F] or `Quantized`, dprobs float32 [P] or None.
    """
    call, a = _enter(
        activation,
        checks.QUANTIZABLE,
        align_size,
        h=h,
        probs=probs,
        grad=grad,
        expert_offsets=expert_offsets,
    )
    width = checks.block("block", block, COLUMN_BLOCK)[1]  # type: ignore[index]
    if a.grad.shape[1] % width:
        raise ValueError(
            f"grad: got F = {a.grad.shape[1]}; wanted a multiple of {width}, so that no block spans both "
            "halves of dh"
        )
    dh = activation_spec(tuple(a.h.shape), fmt, block, columnwise, a.expert_offsets, align_size, transposed)
    out = call.empty(SwigluGrad(dh, _dprobs_spec(a.h, a.probs)))
    call.run(
        "swiglu",
        "swiglu_quantize_backward",
        a.grad,
        a.h,
        a.probs,
        activation=activation,
        expert_offsets=a.expert_offsets,
        out=out,
    )
    return call.leave(out)


def activation_spec(
    shape: tuple[int, int],
    fmt: str,
    block: Block,
    columnwise: bool,
    offsets: Any,
    align_size: int,
    transposed: bool = False,
) -> Any:
    """Shapes of a quantised activation [P, F], row-wise or in both orientations."""
    block = checks.block("block", block, COLUMN_BLOCK)
    columnwise = checks.flag("columnwise", columnwise)
    checks.choice("fmt", fmt, ("e4m3", "e5m2"))
    align_size = checks.integer("align_size", align_size, 1)
    rowwise = quant_spec(shape, fmt, block, "compact")
    if checks.flag("transposed", transposed):
        if columnwise:
            raise ValueError("columnwise, transposed: got both; wanted one of them")
        if block != (1, 128):
            raise ValueError(f"block: got {block} with transposed=True; wanted (1, 128)")
        experts = None if offsets is None else offsets.shape[0] - 1
        return Quantized(rowwise, transpose_spec(rowwise, shape[0], experts, align_size, "block"))
    if not columnwise:
        return rowwise
    column = COLUMN_BLOCK[block]
    rows = None
    if offsets is not None:
        rows = column_scale_rows(shape[0], offsets.shape[0] - 1, column[0], align_size)
    return Quantized(rowwise, quant_spec(shape, fmt, column, "compact", rows))


def _enter(
    activation: Activation,
    dtypes: tuple[np.dtype, ...],
    align_size: int = 1,
    **arrays: Any,
) -> tuple[Call, Any]:
    checks.options("activation", activation, Activation)
    call = enter(**arrays)
    a = call.args
    checks.dtype("h", a.h, dtypes)
    checks.shape("h", a.h, ("P", "2F"))
    rows, width = a.h.shape
    if width % 2:
        raise ValueError(f"h: got {width} columns; wanted an even number, (a | b) side by side")
    if a.probs is not None:
        checks.dtype("probs", a.probs, checks.FLOATS)
        checks.shape("probs", a.probs, (rows,))
    if "grad" in arrays:
        checks.dtype("grad", a.grad, (a.h.dtype,), "as h is")
        checks.shape("grad", a.grad, (rows, width // 2))
    if getattr(a, "expert_offsets", None) is not None:
        align_size = checks.integer("align_size", align_size, 1)
        checks.offsets(call, "expert_offsets", a.expert_offsets, align_size=align_size)
    return call, a


def _dprobs_spec(h: Any, probs: Any) -> ArraySpec | None:
    if probs is None:
        return None
    return ArraySpec((h.shape[0],), np.dtype(np.float64) if h.dtype == np.float64 else checks.FLOAT32)
