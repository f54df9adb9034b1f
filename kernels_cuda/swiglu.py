"""Launchers of swiglu.cu: the same names and signatures as `fp8moe.reference.swiglu`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fp8moe.activation import Activation
from fp8moe.kernels_cuda.launch import KIND_NAMES, KINDS, conversion, launch, scratch, threads
from fp8moe.kernels_cuda.quantize import (
    TILE,
    TILE_THREADS,
    quantize,
    rows_are_whole,
    tile_blocks,
    tile_bytes,
    tile_results,
    tiles_are_whole,
    with_experts,
)
from fp8moe.records import DeviceArray, Quantized, QuantTensor, SwigluGrad


def swiglu(h: Any, probs: Any, *, activation: Activation, out: Any) -> None:
    if not _by_vectors(h, out):
        _forward(h, probs, activation, None, out)
        return
    rows, vectors = h.shape[0], h.shape[1] // 16
    launch(
        "swiglu",
        "swiglu_rows",
        threads(rows * vectors, 2 * 64),
        64,
        h,
        *_probs(probs),
        *_constants(activation),
        rows,
        vectors,
        out,
        defines=_plain_variant(h, activation),
    )


def swiglu_quantize(
    h: Any, probs: Any, *, activation: Activation, expert_offsets: Any, out: QuantTensor | Quantized
) -> None:
    if isinstance(out, QuantTensor) and rows_are_whole(h, h.shape[1] // 2, out):
        vectors = h.shape[1] // 16
        launch(
            "swiglu",
            "swiglu_quantize_rows",
            threads(h.shape[0] * vectors, 2 * 64),
            64,
            h,
            *_probs(probs),
            _last(expert_offsets),
            *_constants(activation),
            h.shape[0],
            vectors,
            out.data,
            out.scales,
            defines=_variant(h, activation, out),
        )
        return
    rows, width = h.shape[0], h.shape[1] // 2
    shared = tile_bytes(2 * h.dtype.itemsize, expert_offsets)
    if isinstance(out, Quantized) and tiles_are_whole(h, width, out.rowwise, shared, expert_offsets):
        blocks, taken = tile_blocks(out.columnwise, width, expert_offsets)
        launch(
            "swiglu",
            "swiglu_quantize_tiles",
            blocks,
            TILE_THREADS,
            h,
            *_probs(probs),
            *_constants(activation),
            rows,
            width,
            *with_experts(expert_offsets),
            out.columnwise.scales.shape[0],
            taken,
            *tile_results(out.rowwise, out.columnwise),
            shared=shared,
            defines=_variant(h, activation, out.columnwise),
        )
        return
    y = scratch((rows, width), np.float32)
    _forward(h, probs, activation, expert_offsets, y)
    quantize(y, round_up=True, eps=0.0, out=out, expert_offsets=expert_offsets)


def swiglu_backward(grad: Any, h: Any, probs: Any, *, activation: Activation, out: SwigluGrad) -> None:
    if not _by_vectors(h, out.dh, grad):
        _backward(grad, h, probs, activation, None, out)
        return
    launch(
        "swiglu",
        "swiglu_backward_rows",
        threads(h.shape[0], 4),
        128,
        grad,
        h,
        *_probs(probs),
        *_constants(activation),
        h.shape[0],
        grad.shape[1] // 8,
        out.dh,
        out.dprobs,
        defines=_plain_variant(h, activation),
    )


def swiglu_quantize_backward(
    grad: Any, h: Any, probs: Any, *, activation: Activation, expert_offsets: Any, out: SwigluGrad
) -> None:
    if isinstance(out.dh, QuantTensor) and rows_are_whole(h, grad.shape[1], out.dh) and grad.ptr % 16 == 0:
        launch(
            "swiglu",
            "swiglu_quantize_backward_rows",
            threads(h.shape[0], 4),
            128,
            grad,
            h,
            *_probs(probs),
            _last(expert_offsets),
            *_constants(activation),
            h.shape[0],
            grad.shape[1] // 8,
            out.dh.data,
            out.dh.scales,
            out.dprobs,
            defines=_variant(h, activation, out.dh),
        )
        return
    dh = scratch(h.shape, np.float32)
    _backward(grad, h, probs, activation, expert_offsets, replace(out, dh=dh))
    quantize(dh, round_up=True, eps=0.0, out=out.dh, expert_offsets=expert_offsets)


def _forward(h: Any, probs: Any, activation: Activation, offsets: Any, y: Any) -> None:
    rows, width = y.shape
    launch(
        "swiglu",
        "swiglu_forward",
        rows,
        256,
        h,
        KINDS[h.dtype],
        *_probs(probs),
        _last(offsets),
        *_constants(activation),
        width,
        KINDS[y.dtype],
        y,
        defines=_act(activation),
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
        *_probs(probs),
        _last(offsets),
        *_constants(activation),
        width,
        KINDS[out.dh.dtype],
        out.dh,
        0 if out.dprobs is None else KINDS[out.dprobs.dtype],
        out.dprobs,
        defines=_act(activation),
    )


def _by_vectors(h: Any, *others: Any) -> bool:
    """Whether the fast path takes these. In float32 its sigmoid's 2^-20 would show, in 16 bits not."""
    sixteen = h.dtype.itemsize == 2
    return sixteen and h.shape[1] % (2 * TILE) == 0 and all(a.ptr % 16 == 0 for a in (h, *others))


def _variant(h: Any, activation: Activation, out: QuantTensor) -> tuple[str, ...]:
    return *conversion(h, out), *_bare(activation)


def _plain_variant(h: Any, activation: Activation) -> tuple[str, ...]:
    return f"KIND={KIND_NAMES[h.dtype]}", "FMT=0", "MX=0", *_bare(activation)


def _bare(activation: Activation) -> tuple[str, ...]:
    bare = activation.clamp is None and activation.linear_offset == 0 and activation.alpha == 1
    return f"BARE={int(bare)}", *_act(activation)


def _act(activation: Activation) -> tuple[str, ...]:
    return () if activation.kind == "swiglu" else (f"ACT={activation.kind.upper()}",)


def _probs(probs: Any) -> tuple[Any, int]:
    return probs, 0 if probs is None else KINDS[probs.dtype]


def _constants(activation: Activation) -> tuple[float, float, float]:
    clamp = float("inf") if activation.clamp is None else activation.clamp
    return float(clamp), float(activation.alpha), float(activation.linear_offset)


def _last(offsets: Any) -> DeviceArray | None:
    """The last offset: rows behind it are nobody's."""
    if offsets is None:
        return None
    at = offsets.ptr + 4 * (offsets.shape[0] - 1)
    return DeviceArray(at, (1,), offsets.dtype, offsets.device, offsets.owner)
