"""SwiGLU and its backward, plain or fused with quantise.

h holds (a | b) side by side. a' = min(a, clamp), b' = clip(b, -clamp, clamp) + linear_offset, and
y = ((a' * s) * b') * prob with s = sigmoid(alpha * a'), each step rounded to float32 in that order. The
sigmoid itself is computed in float64 and rounded once, so it is the float32 nearest to the truth but for
about one value in 10^8; an implementation with another exponential differs from it by its own error only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.records import Activation, Quantized, QuantTensor, SwigluGrad
from fp8moe.reference.numerics import to_f32
from fp8moe.reference.quantize import quantize


def swiglu(h: np.ndarray, probs: np.ndarray | None, *, activation: Activation, out: np.ndarray) -> None:
    out[:] = _forward(h, probs, activation).astype(out.dtype)


def swiglu_quantize(
    h: np.ndarray,
    probs: np.ndarray | None,
    *,
    activation: Activation,
    expert_offsets: np.ndarray | None,
    out: QuantTensor | Quantized,
) -> None:
    y = _forward(_without_tail(h, expert_offsets), probs, activation)
    quantize(y, pow2=True, eps=0.0, out=out, expert_offsets=expert_offsets)


def swiglu_backward(
    grad: np.ndarray,
    h: np.ndarray,
    probs: np.ndarray | None,
    *,
    activation: Activation,
    out: SwigluGrad,
) -> None:
    dh, dprobs = _backward(grad, h, probs, activation)
    out.dh[:] = dh.astype(out.dh.dtype)  # type: ignore[index,union-attr,call-overload]
    if out.dprobs is not None:
        out.dprobs[:] = dprobs


def swiglu_quantize_backward(
    grad: np.ndarray,
    h: np.ndarray,
    probs: np.ndarray | None,
    *,
    activation: Activation,
    expert_offsets: np.ndarray | None,
    out: SwigluGrad,
) -> None:
    grad, h = _without_tail(grad, expert_offsets), _without_tail(h, expert_offsets)
    dh, dprobs = _backward(grad, h, probs, activation)
    quantize(dh, pow2=True, eps=0.0, out=out.dh, expert_offsets=expert_offsets)  # type: ignore[arg-type]
    if out.dprobs is not None:
        out.dprobs[:] = dprobs


def _without_tail(x: np.ndarray, expert_offsets: np.ndarray | None) -> np.ndarray:
    """The same rows with zeros past the last expert, so that garbage there reaches nobody."""
    if expert_offsets is None or int(expert_offsets[-1]) >= len(x):
        return x
    x = x.copy()
    x[int(expert_offsets[-1]) :] = np.zeros((), x.dtype)
    return x


def _halves(h: np.ndarray, activation: Activation) -> tuple[np.ndarray, np.ndarray, np.dtype]:
    wide = np.dtype(np.float64 if h.dtype == np.float64 else np.float32)
    values = h if h.dtype == wide else to_f32(h)
    width = h.shape[1] // 2
    return values[:, :width], values[:, width:], wide


def _clamped(a: np.ndarray, b: np.ndarray, activation: Activation) -> tuple[np.ndarray, np.ndarray]:
    if activation.clamp is not None:
        limit = a.dtype.type(activation.clamp)
        a, b = np.minimum(a, limit), np.clip(b, -limit, limit)
    if activation.linear_offset:
        b = b + b.dtype.type(activation.linear_offset)
    return a, b


def _sigmoid(z: np.ndarray, wide: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (1.0 / (1.0 + np.exp(-z.astype(np.float64)))).astype(wide)


def _forward(h: np.ndarray, probs: np.ndarray | None, activation: Activation) -> np.ndarray:
    a, b, wide = _halves(h, activation)
    a, b = _clamped(a, b, activation)
    with np.errstate(invalid="ignore", over="ignore"):
        y = a * _sigmoid(wide.type(activation.alpha) * a, wide) * b
        return y if probs is None else y * probs.astype(wide)[:, None]


def _backward(
    grad: np.ndarray, h: np.ndarray, probs: np.ndarray | None, activation: Activation
) -> tuple[np.ndarray, Any]:
    """With g = a' * s: da = grad * prob * b' * (s + alpha * g * (1 - s)), db = grad * prob * g, each zero
    where the clamp holds; dprob = sum of grad * g * b', summed in float64 and rounded once."""
    raw_a, raw_b, wide = _halves(h, activation)
    a, b = _clamped(raw_a, raw_b, activation)
    alpha = wide.type(activation.alpha)
    grad = grad if grad.dtype == wide else to_f32(grad)
    with np.errstate(invalid="ignore", over="ignore"):
        s = _sigmoid(alpha * a, wide)
        g = a * s
        scaled = grad if probs is None else grad * probs.astype(wide)[:, None]
        da = scaled * b * (s + alpha * g * (wide.type(1) - s))
        db = scaled * g
        if activation.clamp is not None:
            limit = wide.type(activation.clamp)
            da = np.where(raw_a <= limit, da, wide.type(0))
            db = np.where(np.abs(raw_b) <= limit, db, wide.type(0))
        dprobs = None if probs is None else (grad * g * b).sum(axis=1, dtype=np.float64)
    return np.concatenate([da, db], axis=1), dprobs
