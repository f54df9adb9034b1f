"""Launchers of swiglu.cu and swiglu_transpose.cu, with the names and signatures of
`fp8moe.reference.swiglu`."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np

from fp8moe.activation import Activation
from fp8moe.kernels_cuda.bias import chunk_sums
from fp8moe.kernels_cuda.quantize import (
    TILE,
    dequantize,
    quantize,
    rows_are_whole,
    tile_bytes,
    tile_launch,
    tile_results,
    tiles_are_whole,
)
from fp8moe.kernels_cuda.runtime.configuration import Configuration
from fp8moe.kernels_cuda.runtime.encodings import KIND_NAMES, KINDS, conversion, experts_of, with_experts
from fp8moe.kernels_cuda.runtime.launch import launch, scratch, threads
from fp8moe.kernels_cuda.transpose import scaling_aware_transpose
from fp8moe.records import DeviceArray, Quantized, QuantTensor, SwigluGrad


def rows_configuration(rows: int, vectors: int) -> Configuration:
    """Configuration of swiglu_rows and swiglu_quantize_rows: two vectors of eight values per thread."""
    return Configuration(threads(rows * vectors, 2 * 64), 64)


def backward_configuration(rows: int) -> Configuration:
    """Configuration of swiglu_backward_rows and swiglu_quantize_backward_rows: one warp per row."""
    return Configuration(threads(rows, 4), 4 * 32)


def transposed_configuration(rows: int, width: int) -> Configuration:
    """Configuration of the kernels that also write transposed codes: one thread block per tile of the result
    (backward: per tile of each half)."""
    return Configuration(rows // TILE * (width // TILE), 256)


def swiglu(h: Any, probs: Any, *, activation: Activation, out: Any) -> None:
    if not _by_vectors(h, activation, out):
        _forward(h, probs, activation, None, out)
        return
    rows, vectors = h.shape[0], out.shape[1] // 8
    launch(
        "swiglu",
        "swiglu_rows",
        *rows_configuration(rows, vectors).grid,
        h,
        *_probs(probs),
        *_constants(activation),
        rows,
        vectors,
        out,
        defines=_plain_variant(h, activation),
    )


def swiglu_quantize(
    h: Any,
    probs: Any,
    *,
    activation: Activation,
    expert_offsets: Any,
    codes_of_h: QuantTensor | None = None,
    out: QuantTensor | Quantized,
) -> None:
    rows, width = h.shape[0], activation.width(h.shape[1])
    by_rows = isinstance(out, QuantTensor) and rows_are_whole(h, width, out)
    in_one_pass = codes_of_h is not None and by_rows and rows_are_whole(h, width, codes_of_h)
    if codes_of_h is not None and not in_one_pass:
        quantize(h, round_up=True, eps=0.0, out=codes_of_h)
        arguments = (h, KINDS[h.dtype], h.size, codes_of_h.data)
        launch("swiglu", "infinities_to_nan", threads(h.size, 256), 256, *arguments, defines=_act(activation))
    if isinstance(out, QuantTensor) and by_rows:
        vectors = width // 8
        of_h = () if codes_of_h is None or not in_one_pass else (codes_of_h.data, codes_of_h.scales)
        launch(
            "swiglu",
            "swiglu_quantize_rows_and_h" if of_h else "swiglu_quantize_rows",
            *rows_configuration(h.shape[0], vectors).grid,
            h,
            *_probs(probs),
            _last(expert_offsets),
            *_constants(activation),
            h.shape[0],
            vectors,
            out.data,
            out.scales,
            *of_h,
            defines=_variant(h, activation, out),
        )
        return
    if _is_transposed(out):
        _quantize_transpose(h, probs, activation, expert_offsets, out)
        return
    value_bytes = 2 * h.dtype.itemsize  # a and b
    shared = tile_bytes(value_bytes, experts_of(expert_offsets))
    if isinstance(out, Quantized) and tiles_are_whole(h, width, out, shared, expert_offsets):
        configuration, taken = tile_launch(out.columnwise, width, value_bytes, expert_offsets)
        launch(
            "swiglu",
            "swiglu_quantize_tiles",
            configuration.blocks,
            configuration.threads,
            h,
            *_probs(probs),
            *_constants(activation),
            rows,
            width,
            *with_experts(expert_offsets),
            out.columnwise.scales.shape[0],
            taken,
            *tile_results(out.rowwise, out.columnwise),
            shared=configuration.shared,
            defines=_variant(h, activation, out.columnwise),
        )
        return
    y = scratch((rows, width), np.float32)
    _forward(h, probs, activation, expert_offsets, y)
    quantize(y, round_up=True, eps=0.0, out=out, expert_offsets=expert_offsets)


def swiglu_backward(grad: Any, h: Any, probs: Any, *, activation: Activation, out: SwigluGrad) -> None:
    if not _by_vectors(h, activation, out.dh, grad):
        _backward(grad, h, probs, activation, None, out)
        return
    launch(
        "swiglu",
        "swiglu_backward_rows",
        *backward_configuration(h.shape[0]).grid,
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
    grad: Any,
    h: Any,
    probs: Any,
    *,
    activation: Activation,
    expert_offsets: Any,
    sums: Any = None,
    y: QuantTensor | None = None,
    out: SwigluGrad,
) -> None:
    if _in_tiles(grad, h, y, out.dh):
        _quantize_backward_tiles(grad, h, probs, activation, expert_offsets, sums, y, out)
        return
    if isinstance(h, QuantTensor):
        values = scratch(h.shape, np.float32)
        dequantize(h, out=values)
        h = values
    if y is not None:
        _transposed_y(h, probs, activation, expert_offsets, y)
    if sums is not None:
        dh = scratch(h.shape, np.float32)
        _backward(grad, h, probs, activation, expert_offsets, replace(out, dh=dh, dprobs=None))
        chunk_sums(dh, expert_offsets, out=sums)
    same = h.dtype == grad.dtype and grad.ptr % 16 == 0
    if isinstance(out.dh, QuantTensor) and rows_are_whole(h, grad.shape[1], out.dh) and same:
        launch(
            "swiglu",
            "swiglu_quantize_backward_rows",
            *backward_configuration(h.shape[0]).grid,
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
    if _is_transposed(out.dh):
        rowwise = replace(out, dh=out.dh.rowwise)
        swiglu_quantize_backward(
            grad, h, probs, activation=activation, expert_offsets=expert_offsets, out=rowwise
        )
        scaling_aware_transpose(out.dh.rowwise, expert_offsets, target="block", out=out.dh.columnwise)
        return
    dh = scratch(h.shape, np.float32)
    _backward(grad, h, probs, activation, expert_offsets, replace(out, dh=dh))
    quantize(dh, round_up=True, eps=0.0, out=out.dh, expert_offsets=expert_offsets)


def _quantize_transpose(h: Any, probs: Any, activation: Activation, offsets: Any, out: Any) -> None:
    rows, width = h.shape[0], activation.width(h.shape[1])
    if not _by_blocks(h, width, *_results(out)[::2]):
        swiglu_quantize(h, probs, activation=activation, expert_offsets=offsets, out=out.rowwise)
        scaling_aware_transpose(out.rowwise, offsets, target="block", out=out.columnwise)
        return
    launch(
        "swiglu_transpose",
        "swiglu_quantize_transpose",
        *transposed_configuration(rows, width).grid,
        h,
        *_probs(probs),
        *with_experts(offsets),
        *_constants(activation),
        rows,
        width,
        *_results(out),
        defines=_variant(h, activation, out.rowwise),
    )


def _in_tiles(grad: Any, h: Any, y: QuantTensor | None, dh: Any) -> bool:
    """Whether the backward of 128 x 128 tiles writes these results."""
    coded = isinstance(h, QuantTensor)
    if not _is_transposed(dh) and not (isinstance(dh, QuantTensor) and (coded or y is not None)):
        return False
    return _by_blocks(
        h.data if coded else h, grad.shape[1], grad, *_results(dh)[::2], None if y is None else y.data
    )


def _quantize_backward_tiles(
    grad: Any,
    h: Any,
    probs: Any,
    activation: Activation,
    offsets: Any,
    sums: Any,
    y: QuantTensor | None,
    out: SwigluGrad,
) -> None:
    rows, width = grad.shape
    tiles = width // TILE
    partial = None if out.dprobs is None else scratch((tiles, rows), np.float64)
    first = out.dh.rowwise if isinstance(out.dh, Quantized) else out.dh
    defines = _variant(grad, activation, first)
    coded = isinstance(h, QuantTensor)
    launch(
        "swiglu_transpose",
        "swiglu_quantize_backward_transpose",
        *transposed_configuration(rows, width).grid,
        grad,
        *((h.data, h.scales) if coded else (h, None)),
        *_probs(probs),
        *with_experts(offsets),
        *_constants(activation),
        rows,
        width,
        *_results(out.dh),
        *((None, None) if y is None else (y.data, y.scales)),
        partial,
        sums,
        shared=(activation.columns(1) + (y is not None)) * _bytes_of_tile(first.fmt),
        defines=(*defines, *(("CODED=1",) if coded else ()), *(("SUMS=1",) if sums is not None else ())),
    )
    if partial is not None:
        arguments = (partial, tiles, rows, out.dprobs)
        launch("swiglu_transpose", "sum_tiles", threads(rows), 256, *arguments, defines=defines)


def _bytes_of_tile(fmt: str) -> int:
    """Of `Made` in swiglu_transpose.cu: codes, and of each row its scale and one factor, or two for e5m2."""
    return TILE * TILE + (2 if fmt == "e4m3" else 3) * 4 * TILE


def _transposed_y(h: Any, probs: Any, activation: Activation, offsets: Any, y: QuantTensor) -> None:
    rows, width = h.shape[0], activation.width(h.shape[1])
    codes, scales = scratch((rows, width), np.uint8), scratch((rows, -(-width // TILE)), np.float32)
    rowwise = QuantTensor(codes, scales, y.fmt, (1, TILE))
    swiglu_quantize(h, probs, activation=activation, expert_offsets=offsets, out=rowwise)
    scaling_aware_transpose(rowwise, offsets, target="block", out=y)


def _is_transposed(out: Any) -> bool:
    """Whether the column-wise codes are the transposed row-wise codes."""
    return isinstance(out, Quantized) and out.columnwise.block == (128, 128)


def _by_blocks(h: Any, width: int, *others: Any) -> bool:
    """Whether the kernels of 128 x 128 tiles support these arrays, of which some may be None."""
    whole = h.shape[0] % TILE == 0 and width % TILE == 0
    return whole and all(a.ptr % 16 == 0 for a in (h, *others) if a is not None)


def _results(out: QuantTensor | Quantized) -> tuple[Any, ...]:
    """Codes and scales of both orientations; None for those that are not written."""
    if isinstance(out, QuantTensor):
        return out.data, out.scales, None, None
    return out.rowwise.data, out.rowwise.scales, out.columnwise.data, out.columnwise.scales


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
        *_wide_constants(activation),
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
        KINDS[grad.dtype],
        h,
        KINDS[h.dtype],
        *_probs(probs),
        _last(offsets),
        *_wide_constants(activation),
        width,
        KINDS[out.dh.dtype],
        out.dh,
        0 if out.dprobs is None else KINDS[out.dprobs.dtype],
        out.dprobs,
        defines=_act(activation),
    )


def _by_vectors(h: Any, activation: Activation, *others: Any) -> bool:
    """Whether the fast path supports these arrays. Its sigmoid error of 2^-20 is visible in float32 but not
    in 16-bit results."""
    sixteen = h.dtype.itemsize == 2
    return sixteen and activation.width(h.shape[1]) % TILE == 0 and all(a.ptr % 16 == 0 for a in (h, *others))


def _variant(h: Any, activation: Activation, out: QuantTensor) -> tuple[str, ...]:
    return *conversion(h, out), *_bare(activation)


def _plain_variant(h: Any, activation: Activation) -> tuple[str, ...]:
    return f"KIND={KIND_NAMES[h.dtype]}", "FMT=0", "MX=0", *_bare(activation)


def _bare(activation: Activation) -> tuple[str, ...]:
    bare = activation.clamp is None and activation.linear_offset == 0 and activation.alpha == 1
    return f"BARE={int(bare)}", *_act(activation)


def _act(activation: Activation) -> tuple[str, ...]:
    function = () if activation.function == "silu" else (f"ACT={activation.function.upper()}",)
    return function if activation.gated else (*function, "GATED=0")


def _probs(probs: Any) -> tuple[Any, int]:
    return probs, 0 if probs is None else KINDS[probs.dtype]


def _constants(activation: Activation) -> tuple[float, float, float]:
    clamp = float("inf") if activation.clamp is None else activation.clamp
    return float(clamp), float(activation.alpha), float(activation.linear_offset)


def _wide_constants(activation: Activation) -> tuple[int, ...]:
    """The bits of float64, for kernels that take it: a float argument is float32."""
    return struct.unpack("3q", struct.pack("3d", *_constants(activation)))


def _last(offsets: Any) -> DeviceArray | None:
    """The last offset; rows past it belong to no expert."""
    if offsets is None:
        return None
    return offsets.part(offsets.shape[0] - 1, (1,))  # type: ignore[no-any-return]
