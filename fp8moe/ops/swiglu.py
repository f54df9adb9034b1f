"""SwiGLU and the other activations, plain or fused with quantisation, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.activation import SWIGLU, Activation
from fp8moe.formats import COLUMN_BLOCK, Block
from fp8moe.ops.quantize import quant_spec
from fp8moe.ops.transpose import check_transpose, column_scale_rows, transpose_spec
from fp8moe.records import ArrayLike, ArraySpec, Quantized, QuantTensor, SwigluGrad
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import current, enter, operation


@operation
def swiglu(
    h: ArrayLike,
    probs: ArrayLike | None = None,
    *,
    activation: Activation = SWIGLU,
) -> Any:
    """Activation: y = act(a) * (b + linear_offset) * prob, for h = (a | b); y = act(h) * prob without a gate.

    Parameters
    ----------
    h : ArrayLike, floating point, [P, 2F]
        Gate and up projections, side by side; [P, F] without a gate.
    probs : ArrayLike, floating point, [P], or None
        A factor per row.
    activation : Activation
        The activation function; SwiGLU by default.

    Returns
    -------
    ArrayLike, [P, F]
        In h's dtype. Computed in float32 (float64 for float64); on CUDA, for 16-bit inputs, with a sigmoid of
        relative error at most 2^-20.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or shape.

    Notes
    -----
    SwiGLU: act(a) = a * sigmoid(alpha * a) (Shazeer, arXiv 2002.05202; alpha and the clamp are from gpt-oss).

    Examples
    --------
    >>> fp8moe.swiglu(np.array([[0.0, 100.0, 5.0, 2.0]], np.float32)).tolist()
    [[0.0, 200.0]]
    """
    a = _enter(activation, checks.FLOATS, h=h, probs=probs)
    return raw_swiglu(a.h, a.probs, activation=activation)


def raw_swiglu(h: Any, probs: Any = None, *, activation: Activation = SWIGLU) -> Any:
    call, (rows, columns) = current.call, h.shape
    out = call.empty(ArraySpec((rows, activation.width(columns)), h.dtype))
    call.run("swiglu", "swiglu", h, probs, activation=activation, out=out)
    return out


@operation
def swiglu_backward(
    grad: ArrayLike,
    h: ArrayLike,
    probs: ArrayLike | None = None,
    *,
    activation: Activation = SWIGLU,
) -> SwigluGrad:
    """Gradients of `swiglu`.

    Parameters
    ----------
    grad : ArrayLike, [P, F]
        In h's dtype.
    h : ArrayLike, floating point, [P, 2F]
        The forward's.
    probs : ArrayLike, floating point, [P], or None
        The forward's.
    activation : Activation
        The forward's.

    Returns
    -------
    SwigluGrad
        dh with h's shape and dtype; dprobs [P], float32 (float64 for float64), or None. dprobs sums over F in
        a fixed order, so results are deterministic.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or shape.

    Examples
    --------
    >>> g = fp8moe.swiglu_backward(np.ones((1, 1), np.float32), np.array([[0.0, 4.0]], np.float32))
    >>> g.dh.tolist(), g.dprobs  # silu'(0) = 1/2
    ([[2.0, 0.0]], None)
    """
    a = _enter(activation, checks.FLOATS, h=h, probs=probs, grad=grad)
    return raw_swiglu_backward(a.grad, a.h, a.probs, activation=activation)


def raw_swiglu_backward(
    grad: Any, h: Any, probs: Any = None, *, activation: Activation = SWIGLU
) -> SwigluGrad:
    call = current.call
    out: SwigluGrad = call.empty(SwigluGrad(ArraySpec(tuple(h.shape), h.dtype), _dprobs_spec(h, probs)))
    call.run("swiglu", "swiglu_backward", grad, h, probs, activation=activation, out=out)
    return out


@operation
def swiglu_quantize(
    h: ArrayLike,
    probs: ArrayLike | None = None,
    *,
    fmt: str = "e4m3",
    block: Block = (1, 128),
    activation: Activation = SWIGLU,
    columnwise: bool = False,
    transposed: bool = False,
    expert_offsets: ArrayLike | None = None,
    align_size: int = 1,
) -> Any:
    """`swiglu` in float32 followed by `quantize` with power-of-two scales (rounded up), in one pass.

    Parameters
    ----------
    h : ArrayLike, bfloat16, float16 or float32, [P, 2F]
        Gate and up projections, side by side; [P, F] without a gate.
    probs : ArrayLike, floating point, [P], or None
        A factor per row.
    fmt : "e4m3" or "e5m2"
        Format of the codes.
    block : tuple of int
        (1, 128) or (1, 32).
    activation : Activation
        The activation function; SwiGLU by default.
    columnwise : bool
        Return `Quantized` with an additional column-wise tensor in (128, 1) or (32, 1) blocks. Both are
        quantised from the same float32 values.
    transposed : bool
        Return `Quantized` whose column-wise tensor is bitwise equal to ``scaling_aware_transpose(rowwise,
        expert_offsets, target="block", align_size=align_size)``, without reading the row-wise tensor again.
        Requires block (1, 128).
    expert_offsets : ArrayLike, int32, [E+1], or None
        First row of each expert. Column blocks then restart at each expert, and rows past the last offset may
        be skipped.
    align_size : int
        Every expert offset is a multiple of it.

    Returns
    -------
    QuantTensor or Quantized, [P, F]
        `Quantized` with ``columnwise`` or ``transposed``. Scales are compact; `to_layout` converts them.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype, shape or block, and for both ``columnwise`` and ``transposed``.

    Notes
    -----
    The fusion of SwiGLU and quantisation follows arXiv 2511.02302.

    Examples
    --------
    >>> q = fp8moe.swiglu_quantize(np.full((1, 256), 100.0, np.float32))
    >>> q.shape, fp8moe.dequantize(q)[0, 0].item()  # 10,000 rounded to four bits
    ((1, 128), 10240.0)
    """
    a = _enter(
        activation,
        checks.QUANTIZABLE,
        align_size,
        h=h,
        probs=probs,
        expert_offsets=expert_offsets,
    )
    options = _check_quantized(fmt, block, columnwise, transposed, a.expert_offsets, align_size)
    return raw_swiglu_quantize(a.h, a.probs, activation=activation, **options)


def raw_swiglu_quantize(
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
    codes_of_h: QuantTensor | None = None,
) -> Any:
    """codes_of_h: memory of `coded_h` for h, row-wise quantised in the same pass with NaN for infinities, or
    None."""
    call = current.call
    shape = h.shape[0], activation.width(h.shape[1])
    out = call.empty(activation_spec(shape, fmt, block, columnwise, transposed, expert_offsets, align_size))
    options: dict[str, Any] = {"activation": activation, "expert_offsets": expert_offsets}
    call.run("swiglu", "swiglu_quantize", h, probs, **options, codes_of_h=codes_of_h, out=out)
    return out


def coded_h(h: Any) -> QuantTensor:
    """Memory for h as FP8 codes, which stand for it in `raw_swiglu_quantize_backward`."""
    return current.call.empty(quant_spec(tuple(h.shape), "e4m3", (1, 128), "compact"))  # type: ignore[no-any-return]


@operation
def swiglu_quantize_backward(
    grad: ArrayLike,
    h: ArrayLike,
    probs: ArrayLike | None = None,
    *,
    fmt: str = "e4m3",
    block: Block = (1, 128),
    activation: Activation = SWIGLU,
    columnwise: bool = False,
    transposed: bool = False,
    expert_offsets: ArrayLike | None = None,
    align_size: int = 1,
) -> SwigluGrad:
    """`swiglu_backward` in float32 followed by `quantize` of dh, in one pass.

    Parameters
    ----------
    grad : ArrayLike, [P, F]
        In h's dtype. F must be a multiple of the block, so that no block spans both halves of dh.
    h : ArrayLike, bfloat16, float16 or float32, [P, 2F]
        The forward's.
    probs : ArrayLike, floating point, [P], or None
        The forward's.
    fmt : "e4m3" or "e5m2"
        Format of the codes.
    block : tuple of int
        (1, 128) or (1, 32).
    activation : Activation
        The forward's.
    columnwise : bool
        As in `swiglu_quantize`, for dh.
    transposed : bool
        As in `swiglu_quantize`, for dh.
    expert_offsets : ArrayLike, int32, [E+1], or None
        As in `swiglu_quantize`.
    align_size : int
        Every expert offset is a multiple of it.

    Returns
    -------
    SwigluGrad
        dh as a `QuantTensor` of h's shape, or `Quantized`; dprobs float32 [P] or None.

    Raises
    ------
    TypeError, ValueError
        As for `swiglu_quantize`.

    Examples
    --------
    >>> grad, h = np.ones((1, 128), np.float32), np.zeros((1, 256), np.float32)
    >>> g = fp8moe.swiglu_quantize_backward(grad, h)
    >>> g.dh.shape, fp8moe.dequantize(g.dh).max().item()
    ((1, 256), 0.0)
    """
    a = _enter(
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
    options = _check_quantized(fmt, block, columnwise, transposed, a.expert_offsets, align_size)
    return raw_swiglu_quantize_backward(a.grad, a.h, a.probs, activation=activation, **options)


def raw_swiglu_quantize_backward(
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
    sums: Any = None,
    y: QuantTensor | None = None,
) -> SwigluGrad:
    """h: an array, or codes as `coded_h`. sums: memory of `fp8moe.ops.bias.sums_of_chunks` for the sums of dh
    before it is quantised, or None. y: memory of `transposed_y` for the transposed codes that the result of
    the forward would have, or None."""
    call, shape = current.call, tuple(h.shape)
    dh = activation_spec(shape, fmt, block, columnwise, transposed, expert_offsets, align_size)
    out: SwigluGrad = call.empty(SwigluGrad(dh, _dprobs_spec(grad, probs)))
    options: dict[str, Any] = {"activation": activation, "expert_offsets": expert_offsets}
    call.run("swiglu", "swiglu_quantize_backward", grad, h, probs, **options, sums=sums, y=y, out=out)
    return out


def transposed_y(h: Any, activation: Activation, expert_offsets: Any, align_size: int) -> QuantTensor:
    """Memory for the transposed codes of `swiglu_quantize` of h."""
    shape = h.shape[0], activation.width(h.shape[1])
    options = "e4m3", (1, 128), False, True, expert_offsets, align_size
    return current.call.empty(activation_spec(shape, *options).columnwise)  # type: ignore[no-any-return]


def _check_quantized(
    fmt: str, block: Block, columnwise: bool, transposed: bool, offsets: Any, align_size: int
) -> dict[str, Any]:
    """Check how a result is quantised; returns the options of the functions that do it."""
    block = checks.block("block", block, COLUMN_BLOCK)
    columnwise = checks.flag("columnwise", columnwise)
    checks.choice("fmt", fmt, ("e4m3", "e5m2"))
    align_size = checks.integer("align_size", align_size, 1)
    transposed = checks.flag("transposed", transposed)
    if transposed and columnwise:
        raise ValueError("columnwise, transposed: got both; wanted one of them")
    if transposed and block != (1, 128):
        raise ValueError(f"block: got {block} with transposed=True; wanted (1, 128)")
    if transposed:
        experts = None if offsets is None else offsets.shape[0] - 1
        check_transpose(block, experts, align_size, "block", "compact")
    return {
        "fmt": fmt,
        "block": block,
        "columnwise": columnwise,
        "transposed": transposed,
        "expert_offsets": offsets,
        "align_size": align_size,
    }


def activation_spec(
    shape: tuple[int, int],
    fmt: str,
    block: Block,
    columnwise: bool,
    transposed: bool,
    offsets: Any,
    align_size: int,
) -> Any:
    """Specs of a quantised activation [P, F], row-wise or in both orientations."""
    rowwise = quant_spec(shape, fmt, block, "compact")
    if transposed:
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
) -> Any:
    """The arrays as raw buffers, checked."""
    checks.options("activation", activation, Activation)
    call = enter(**arrays)
    a = call.args
    checks.dtype("h", a.h, dtypes)
    checks.shape("h", a.h, ("P", "2F" if activation.gated else "F"))
    rows, width = a.h.shape
    if activation.gated and width % 2:
        raise ValueError(f"h: got {width} columns; wanted an even number, for the halves (a | b)")
    if a.probs is not None:
        checks.dtype("probs", a.probs, checks.FLOATS)
        checks.shape("probs", a.probs, (rows,))
    if "grad" in arrays:
        checks.dtype("grad", a.grad, (a.h.dtype,), "pass grad in the dtype of h")
        checks.shape("grad", a.grad, (rows, activation.width(width)))
    if getattr(a, "expert_offsets", None) is not None:
        align_size = checks.integer("align_size", align_size, 1)
        checks.offsets(call, "expert_offsets", a.expert_offsets, align_size=align_size)
    return a


def _dprobs_spec(h: Any, probs: Any) -> ArraySpec | None:
    if probs is None:
        return None
    return ArraySpec((h.shape[0],), np.dtype(np.float64) if h.dtype == np.float64 else checks.FLOAT32)
