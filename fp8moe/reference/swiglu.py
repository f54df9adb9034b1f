"""SwiGLU and its backward, plain or fused with quantise.

h holds (a | b) side by side; without a gate h is a, and b' = 1. a' = min(a, clamp), b' = clip(b, -clamp,
clamp) + linear_offset, and y = ((a' * s) * b') * prob, each step rounded to float32 in that order. s is the
gate's weight: sigmoid(z) with z = alpha * a' for SiLU, z = a' * (2c + 2c * 0.044715 * a'^2), c = sqrt(2 /
pi), for GELU by tanh (where 1 + tanh(z / 2) = 2 sigmoid(z)), and the normal distribution function Phi(a') for
GELU. The sigmoid and Phi are computed in float64 and rounded once, which is the nearest float32 except for
about one value in 10^8; an implementation with another exponential differs only by that exponential's error.

The derivative of a' * s is s + slope, slope = a' * ds/da': z' * (a' * s) * (1 - s), and a' * phi(a') for
GELU, with the normal density phi.

Squared ReLU: a' = s = max(a, 0), and slope = s.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fp8moe.activation import Activation
from fp8moe.records import Quantized, QuantTensor, SwigluGrad
from fp8moe.reference.bias import chunk_sums
from fp8moe.reference.numerics import quietly, split_rows, to_f32
from fp8moe.reference.quantize import dequantize, quantize
from fp8moe.reference.transpose import scaling_aware_transpose
from fp8moe.runtime.loops import compiled


@quietly
def swiglu(h: np.ndarray, probs: np.ndarray | None, *, activation: Activation, out: np.ndarray) -> None:
    out[:] = forward(h, probs, activation).astype(out.dtype, copy=False)


def swiglu_quantize(
    h: np.ndarray,
    probs: np.ndarray | None,
    *,
    activation: Activation,
    expert_offsets: np.ndarray | None,
    codes_of_h: QuantTensor | None = None,
    out: QuantTensor | Quantized,
) -> None:
    """codes_of_h: for h, row-wise quantised, or None. Infinities of h have the NaN code, which gradients and
    statistics keep; the format's largest number would hide them."""
    y = np.zeros((len(h), activation.width(h.shape[1])), np.float32)
    real = slice(0, _rows_of(expert_offsets, len(h)))
    y[real] = forward(h[real], _part(probs, real), activation)
    _quantize(y, expert_offsets, out)
    if codes_of_h is not None:
        values = np.zeros(h.shape, h.dtype)
        values[real] = h[real]
        values[np.isinf(values)] = np.nan
        quantize(values, round_up=True, eps=0.0, out=codes_of_h)


@quietly
def swiglu_backward(
    grad: np.ndarray,
    h: np.ndarray,
    probs: np.ndarray | None,
    *,
    activation: Activation,
    out: SwigluGrad,
) -> None:
    dh, dprobs = backward(grad, h, probs, activation)
    out.dh[:] = dh.astype(out.dh.dtype, copy=False)
    if out.dprobs is not None:
        out.dprobs[:] = dprobs.astype(out.dprobs.dtype, copy=False)


@quietly
def swiglu_quantize_backward(
    grad: np.ndarray,
    h: np.ndarray | QuantTensor,
    probs: np.ndarray | None,
    *,
    activation: Activation,
    expert_offsets: np.ndarray | None,
    sums: np.ndarray | None = None,
    y: QuantTensor | None = None,
    out: SwigluGrad,
) -> None:
    """h: an array or its row-wise codes. y: for the transposed codes that the forward's y would have, or
    None."""
    if isinstance(h, QuantTensor):
        values = np.empty(h.shape, np.float32)
        dequantize(h, out=values)
        h = values
    if y is not None:
        codes, scales = np.empty(grad.shape, np.uint8), np.empty((len(h), y.scales.shape[0]), np.float32)
        both = Quantized(QuantTensor(codes, scales, y.fmt, (1, 128)), y)
        swiglu_quantize(h, probs, activation=activation, expert_offsets=expert_offsets, out=both)
    real = slice(0, _rows_of(expert_offsets, len(h)))
    dh = np.zeros(h.shape, np.float32)
    dh[real], dprobs = backward(grad[real], h[real], _part(probs, real), activation)
    _quantize(dh, expert_offsets, out.dh)
    if sums is not None and expert_offsets is not None:
        chunk_sums(dh, expert_offsets, out=sums)
    if out.dprobs is not None:
        out.dprobs[:] = 0
        out.dprobs[real] = dprobs.astype(out.dprobs.dtype, copy=False)


def _quantize(y: np.ndarray, expert_offsets: np.ndarray | None, out: Any) -> None:
    """Quantises row-wise, and column-wise likewise or, for (128, 128) blocks, by transposing the row-wise
    codes."""
    transposed = isinstance(out, Quantized) and out.columnwise.block == (128, 128)
    first = out.rowwise if transposed else out
    quantize(y, round_up=True, eps=0.0, out=first, expert_offsets=expert_offsets)
    if transposed:
        scaling_aware_transpose(out.rowwise, expert_offsets, target="block", out=out.columnwise)


def _rows_of(expert_offsets: np.ndarray | None, rows: int) -> int:
    """Number of rows up to the last expert's end; later rows are not used."""
    return rows if expert_offsets is None else min(int(expert_offsets[-1]), rows)


def _part(probs: np.ndarray | None, rows: slice) -> np.ndarray | None:
    return None if probs is None else probs[rows]


def forward(h: np.ndarray, probs: np.ndarray | None, activation: Activation) -> np.ndarray:
    """y in float32, or float64 for float64: compiled for float32, otherwise plain."""
    if h.dtype == np.float64:
        return forward_plain(h, probs, activation)
    h = to_f32(h)
    y = np.empty((len(h), activation.width(h.shape[1])), np.float32)
    split_rows(_forward_loop, len(h), h, _weights(probs), *_constants(activation), y, work=h.size)
    return y


def backward(
    grad: np.ndarray, h: np.ndarray, probs: np.ndarray | None, activation: Activation
) -> tuple[np.ndarray, Any]:
    """(dh, dprobs), as `forward`."""
    if h.dtype == np.float64:
        return backward_plain(grad, h, probs, activation)
    h, grad = to_f32(h), to_f32(grad)
    dh, dprobs = np.empty(h.shape, np.float32), np.empty(len(h), np.float64)
    arguments = (grad, h, _weights(probs), *_constants(activation), dh, dprobs)
    split_rows(_backward_loop, len(h), *arguments, work=h.size)
    return dh, None if probs is None else dprobs


@quietly
def forward_plain(h: np.ndarray, probs: np.ndarray | None, activation: Activation) -> np.ndarray:
    wide = _wide(h)
    a, b = _clamped(*_halves(h, activation), activation)
    y = a * _weight(a, activation, wide) * b
    return y if probs is None else y * probs.astype(wide)[:, None]


@quietly
def backward_plain(
    grad: np.ndarray, h: np.ndarray, probs: np.ndarray | None, activation: Activation
) -> tuple[np.ndarray, Any]:
    """With g = a' * s: da = grad * prob * b' * (s + slope), db = grad * prob * g, each zero where clamped;
    dprob = sum of grad * g * b', summed in float64."""
    wide = _wide(h)
    raw_a, raw_b = _halves(h, activation)
    a, b = _clamped(raw_a, raw_b, activation)
    grad = grad if grad.dtype == wide else to_f32(grad)
    s = _weight(a, activation, wide)
    g = a * s
    scaled = grad if probs is None else grad * probs.astype(wide)[:, None]
    da = scaled * b * (s + _slope(a, g, s, activation, wide))
    db = scaled * g
    if activation.clamp is not None:
        limit = wide.type(activation.clamp)
        da = np.where(raw_a > limit, wide.type(0), da)
        db = np.where(np.abs(raw_b) > limit, wide.type(0), db)
    dprobs = None if probs is None else (grad * g * b).sum(axis=1, dtype=np.float64)
    return np.concatenate([da, db], axis=1) if activation.gated else da, dprobs


def _wide(h: np.ndarray) -> np.dtype:
    return np.dtype(np.float64 if h.dtype == np.float64 else np.float32)


def _halves(h: np.ndarray, activation: Activation) -> tuple[np.ndarray, np.ndarray]:
    values, width = h if h.dtype == np.float64 else to_f32(h), h.shape[1] // 2
    if not activation.gated:
        return values, np.ones((), values.dtype)
    return values[:, :width], values[:, width:]


def _clamped(a: np.ndarray, b: np.ndarray, activation: Activation) -> tuple[np.ndarray, np.ndarray]:
    if activation.function == "relu2":
        a = np.where(a < 0, a.dtype.type(0), a)
    if activation.clamp is not None:
        limit = a.dtype.type(activation.clamp)
        a, b = np.minimum(a, limit), np.clip(b, -limit, limit)
    if activation.linear_offset:
        b = b + b.dtype.type(activation.linear_offset)
    return a, b


LINE = 2 * math.sqrt(2 / math.pi)  # 2c
CUBE = LINE * 0.044715


def _weight(a: np.ndarray, activation: Activation, wide: np.dtype) -> np.ndarray:
    """s of the gates."""
    if activation.function == "relu2":
        return a
    if activation.function == "gelu":
        return _erfc(-a.astype(np.float64) * math.sqrt(0.5)).astype(wide) / wide.type(2)
    if activation.function == "gelu_tanh":
        z = a * (wide.type(LINE) + wide.type(CUBE) * (a * a))
    else:
        z = wide.type(activation.alpha) * a
    return (1.0 / (1.0 + np.exp(-z.astype(np.float64)))).astype(wide)


def _slope(a: np.ndarray, g: np.ndarray, s: np.ndarray, activation: Activation, wide: np.dtype) -> np.ndarray:
    if activation.function == "relu2":
        return s
    if activation.function == "gelu":
        x = a.astype(np.float64)
        return (x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)).astype(wide)
    by = wide.type(activation.alpha)
    if activation.function == "gelu_tanh":
        by = wide.type(LINE) + wide.type(3 * CUBE) * (a * a)
    return by * g * (wide.type(1) - s)


def _erfc(x: np.ndarray) -> np.ndarray:
    return np.array([math.erfc(v) for v in x.ravel().tolist()], np.float64).reshape(x.shape)


# ---------------------------------------------------------------- the compiled forms


def _weights(probs: np.ndarray | None) -> np.ndarray:
    return np.empty(0, np.float32) if probs is None else probs.astype(np.float32)


def _constants(activation: Activation) -> tuple[Any, ...]:
    clamp = np.inf if activation.clamp is None else activation.clamp
    numbers = (np.float32(v) for v in (clamp, activation.alpha, activation.linear_offset))
    return FUNCTIONS.index(activation.function), activation.gated, *numbers


FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu2")
GELU, GELU_TANH, RELU2 = range(1, 4)
LINE32, CUBE32, SLOPE32 = np.float32(LINE), np.float32(CUBE), np.float32(3 * CUBE)
HALF_ROOT, ROOT_PI = math.sqrt(0.5), math.sqrt(2 * math.pi)


@compiled
def _value(a, b, function, clamp, alpha, offset):  # type: ignore[no-untyped-def]
    """(a', b', s): one element of `_clamped` and `_weight`."""
    if function == RELU2:
        a = np.float32(0) if a < 0 else a
        return a, b, a
    if a > clamp:
        a = clamp
    if b > clamp:
        b = clamp
    if b < -clamp:
        b = -clamp
    if offset != np.float32(0):
        b += offset
    if function == GELU:
        return a, b, np.float32(math.erfc(-np.float64(a) * HALF_ROOT)) * np.float32(0.5)
    z = a * (LINE32 + CUBE32 * (a * a)) if function == GELU_TANH else alpha * a
    return a, b, np.float32(1.0 / (1.0 + math.exp(-np.float64(z))))


@compiled
def _slope_of(a, g, s, function, alpha):  # type: ignore[no-untyped-def]
    """One element of `_slope`."""
    if function == RELU2:
        return s
    if function == GELU:
        x = np.float64(a)
        return np.float32(x * math.exp(-x * x / 2) / ROOT_PI)
    by = LINE32 + SLOPE32 * (a * a) if function == GELU_TANH else alpha
    return by * g * (np.float32(1) - s)


@compiled
def _forward_loop(  # type: ignore[no-untyped-def]
    first, last, h, probs, function, gated, clamp, alpha, offset, y
):
    width = y.shape[1]
    for r in range(first, last):
        for i in range(width):
            b = h[r, width + i] if gated else np.float32(1)
            a, b, s = _value(h[r, i], b, function, clamp, alpha, offset)
            y[r, i] = a * s * b
        if probs.size:
            for i in range(width):
                y[r, i] *= probs[r]


@compiled
def _backward_loop(  # type: ignore[no-untyped-def]
    first, last, grad, h, probs, function, gated, clamp, alpha, offset, dh, dprobs
):
    width = grad.shape[1]
    for r in range(first, last):
        total = 0.0
        for i in range(width):
            b = h[r, width + i] if gated else np.float32(1)
            a, b, s = _value(h[r, i], b, function, clamp, alpha, offset)
            g = a * s
            scaled = grad[r, i]
            total += np.float64(scaled * g * b)
            if probs.size:
                scaled *= probs[r]
            da = scaled * b * (s + _slope_of(a, g, s, function, alpha))
            db = scaled * g
            dh[r, i] = np.float32(0) if h[r, i] > clamp else da
            if gated:
                dh[r, width + i] = np.float32(0) if abs(h[r, width + i]) > clamp else db
        dprobs[r] = total
