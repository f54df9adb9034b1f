"""SwiGLU and its backward, plain or fused with quantise.

h holds (a | b) side by side. a' = min(a, clamp), b' = clip(b, -clamp, clamp) + linear_offset, and
y = ((a' * s) * b') * prob with s = sigmoid(alpha * a'), each step rounded to float32 in that order. The
sigmoid itself is computed in float64 and rounded once, so it is the float32 nearest to the truth but for
about one value in 10^8; an implementation with another exponential differs from it by its own error only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fp8moe.records import Activation, Quantized, QuantTensor, SwigluGrad
from fp8moe.reference.numerics import compiled, quietly, split_rows, to_f32
from fp8moe.reference.quantize import quantize


@quietly
def swiglu(h: np.ndarray, probs: np.ndarray | None, *, activation: Activation, out: np.ndarray) -> None:
    out[:] = forward(h, probs, activation).astype(out.dtype, copy=False)


def swiglu_quantize(
    h: np.ndarray,
    probs: np.ndarray | None,
    *,
    activation: Activation,
    expert_offsets: np.ndarray | None,
    out: QuantTensor | Quantized,
) -> None:
    y = np.zeros((len(h), h.shape[1] // 2), np.float32)
    real = slice(0, _rows_of(expert_offsets, len(h)))
    y[real] = forward(h[real], _part(probs, real), activation)
    quantize(y, round_up=True, eps=0.0, out=out, expert_offsets=expert_offsets)


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
    h: np.ndarray,
    probs: np.ndarray | None,
    *,
    activation: Activation,
    expert_offsets: np.ndarray | None,
    out: SwigluGrad,
) -> None:
    real = slice(0, _rows_of(expert_offsets, len(h)))
    dh = np.zeros(h.shape, np.float32)
    dh[real], dprobs = backward(grad[real], h[real], _part(probs, real), activation)
    quantize(dh, round_up=True, eps=0.0, out=out.dh, expert_offsets=expert_offsets)  # type: ignore[arg-type]
    if out.dprobs is not None:
        out.dprobs[:] = 0
        out.dprobs[real] = dprobs.astype(out.dprobs.dtype, copy=False)


def _rows_of(expert_offsets: np.ndarray | None, rows: int) -> int:
    """Rows up to the last expert's end: what lies behind reaches nobody."""
    return rows if expert_offsets is None else min(int(expert_offsets[-1]), rows)


def _part(probs: np.ndarray | None, rows: slice) -> np.ndarray | None:
    return None if probs is None else probs[rows]


def forward(h: np.ndarray, probs: np.ndarray | None, activation: Activation) -> np.ndarray:
    """y in float32, or float64 for float64: compiled for float32, plain else."""
    if h.dtype == np.float64:
        return forward_plain(h, probs, activation)
    h = to_f32(h)
    y = np.empty((len(h), h.shape[1] // 2), np.float32)
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
    a, b = _clamped(*_halves(h), activation)
    y = a * _sigmoid(wide.type(activation.alpha) * a, wide) * b
    return y if probs is None else y * probs.astype(wide)[:, None]


@quietly
def backward_plain(
    grad: np.ndarray, h: np.ndarray, probs: np.ndarray | None, activation: Activation
) -> tuple[np.ndarray, Any]:
    """With g = a' * s: da = grad * prob * b' * (s + alpha * g * (1 - s)), db = grad * prob * g, each zero
    where the clamp holds; dprob = sum of grad * g * b', summed in float64."""
    wide = _wide(h)
    raw_a, raw_b = _halves(h)
    a, b = _clamped(raw_a, raw_b, activation)
    alpha = wide.type(activation.alpha)
    grad = grad if grad.dtype == wide else to_f32(grad)
    s = _sigmoid(alpha * a, wide)
    g = a * s
    scaled = grad if probs is None else grad * probs.astype(wide)[:, None]
    da = scaled * b * (s + alpha * g * (wide.type(1) - s))
    db = scaled * g
    if activation.clamp is not None:
        limit = wide.type(activation.clamp)
        da = np.where(raw_a > limit, wide.type(0), da)
        db = np.where(np.abs(raw_b) > limit, wide.type(0), db)
    dprobs = None if probs is None else (grad * g * b).sum(axis=1, dtype=np.float64)
    return np.concatenate([da, db], axis=1), dprobs


def _wide(h: np.ndarray) -> np.dtype:
    return np.dtype(np.float64 if h.dtype == np.float64 else np.float32)


def _halves(h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, width = h if h.dtype == np.float64 else to_f32(h), h.shape[1] // 2
    return values[:, :width], values[:, width:]


def _clamped(a: np.ndarray, b: np.ndarray, activation: Activation) -> tuple[np.ndarray, np.ndarray]:
    if activation.clamp is not None:
        limit = a.dtype.type(activation.clamp)
        a, b = np.minimum(a, limit), np.clip(b, -limit, limit)
    if activation.linear_offset:
        b = b + b.dtype.type(activation.linear_offset)
    return a, b


def _sigmoid(z: np.ndarray, wide: np.dtype) -> np.ndarray:
    return (1.0 / (1.0 + np.exp(-z.astype(np.float64)))).astype(wide)


# ---------------------------------------------------------------- the compiled forms


def _weights(probs: np.ndarray | None) -> np.ndarray:
    return np.empty(0, np.float32) if probs is None else probs.astype(np.float32)


def _constants(activation: Activation) -> tuple[np.float32, ...]:
    clamp = np.inf if activation.clamp is None else activation.clamp
    return np.float32(clamp), np.float32(activation.alpha), np.float32(activation.linear_offset)


@compiled
def _value(a, b, clamp, alpha, offset):  # type: ignore[no-untyped-def]
    """(a', b', sigmoid(alpha * a')): one element of `_clamped` and `_sigmoid`."""
    if a > clamp:
        a = clamp
    if b > clamp:
        b = clamp
    if b < -clamp:
        b = -clamp
    if offset != np.float32(0):
        b += offset
    return a, b, np.float32(1.0 / (1.0 + math.exp(-np.float64(alpha * a))))


@compiled
def _forward_loop(first, last, h, probs, clamp, alpha, offset, y):  # type: ignore[no-untyped-def]
    width = y.shape[1]
    for r in range(first, last):
        for i in range(width):
            a, b, s = _value(h[r, i], h[r, width + i], clamp, alpha, offset)
            y[r, i] = a * s * b
        if probs.size:
            for i in range(width):
                y[r, i] *= probs[r]


@compiled
def _backward_loop(  # type: ignore[no-untyped-def]
    first, last, grad, h, probs, clamp, alpha, offset, dh, dprobs
):
    width = grad.shape[1]
    one = np.float32(1)
    for r in range(first, last):
        total = 0.0
        for i in range(width):
            a, b, s = _value(h[r, i], h[r, width + i], clamp, alpha, offset)
            g = a * s
            scaled = grad[r, i]
            total += np.float64(scaled * g * b)
            if probs.size:
                scaled *= probs[r]
            da = scaled * b * (s + alpha * g * (one - s))
            db = scaled * g
            dh[r, i] = np.float32(0) if h[r, i] > clamp else da
            dh[r, width + i] = np.float32(0) if abs(h[r, width + i]) > clamp else db
        dprobs[r] = total
