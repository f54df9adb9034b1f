"""Launchers of swiglu.cu: the same names and signatures as `fp8moe.reference.swiglu`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fp8moe.kernels_cuda.launch import KINDS, launch, scratch
from fp8moe.kernels_cuda.quantize import quantize
from fp8moe.records import Activation, Quantized, QuantTensor, SwigluGrad


def swiglu(h: Any, probs: Any, *, activation: Activation, out: Any) -> None:
    _forward(h, probs, activation, None, out)


def swiglu_quantize(
    h: Any, probs: Any, *, activation: Activation, expert_offsets: Any, out: QuantTensor | Quantized
) -> None:
    y = scratch((h.shape[0], h.shape[1] // 2), np.float32)
    _forward(h, probs, activation, expert_offsets, y)
    quantize(y, pow2=True, eps=0.0, out=out, expert_offsets=expert_offsets)


def swiglu_backward(grad: Any, h: Any, probs: Any, *, activation: Activation, out: SwigluGrad) -> None:
    _backward(grad, h, probs, activation, None, out)


def swiglu_quantize_backward(
    grad: Any, h: Any, probs: Any, *, activation: Activation, expert_offsets: Any, out: SwigluGrad
) -> None:
    dh = scratch(h.shape, np.float32)
    _backward(grad, h, probs, activation, expert_offsets, replace(out, dh=dh))
    quantize(dh, pow2=True, eps=0.0, out=out.dh, expert_offsets=expert_offsets)


def _forward(h: Any, probs: Any, activation: Activation, offsets: Any, y: Any) -> None:
    rows, width = y.shape
    launch(
        "swiglu",
        "swiglu_forward",
        rows,
        256,
        h,
        KINDS[h.dtype],
        probs,
        0 if probs is None else KINDS[probs.dtype],
        _last(offsets),
        *_constants(activation),
        width,
        KINDS[y.dtype],
        y,
    )


def _backward(grad: Any, h: Any, probs: Any, activation: Activation, offsets: Any, out: SwigluGrad) -> None:
    rows, width = grad.shape
    launch(
        "swiglu",
        "swiglu_backward",
        rows,
        256,
        grad,
        h,
        KINDS[h.dtype],
        probs,
        0 if probs is None else KINDS[probs.dtype],
        _last(offsets),
        *_constants(activation),
        width,
        KINDS[out.dh.dtype],
        out.dh,
        0 if out.dprobs is None else KINDS[out.dprobs.dtype],
        out.dprobs,
    )


def _constants(activation: Activation) -> tuple[float, float, float]:
    clamp = float("inf") if activation.clamp is None else activation.clamp
    return float(clamp), float(activation.alpha), float(activation.linear_offset)


def _last(offsets: Any) -> int:
    """Address of the last offset: rows behind it are nobody's."""
    return 0 if offsets is None else offsets.ptr + 4 * (offsets.shape[0] - 1)
