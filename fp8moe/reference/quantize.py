"""Quantise and dequantise by blocks.

Per block, in float32: amax = max(|x|, eps); scale = amax / max_of_format, rounded up to a power of two where
that is asked for; code = x * (1 / scale), saturated, rounded to nearest even. An amax of 0, infinity or NaN
gives scale 1.

MXFP8's scale is 2^e with e = ceil(log2(amax / max_of_format)), as in Transformer Engine, or, without rounding
up, e = floor(log2(amax)) - emax of the format, the OCP MX rule, in which an infinity is 2^128; e >= -127, and
zeros have -127. Rounded up, an infinity gives 2^127. An amax of NaN gives the scale NaN, byte 255, and codes
that are values times NaN or, without rounding up, times 0: torchao's RCEIL and FLOOR.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.formats import (
    BFLOAT16,
    BLOCKED_128X4,
    FORMATS,
    MIN_SCALE_EXPONENT,
    Block,
    ceil_div,
    is_columnwise,
    is_mx,
)
from fp8moe.records import Quantized, QuantTensor
from fp8moe.reference.layout import compact_scratch, to_layout
from fp8moe.reference.numerics import (
    decode_blocks,
    decode_scales,
    encode,
    expert_ranges,
    split_rows,
    to_f32,
    transpose_into,
)
from fp8moe.runtime.loops import compiled


def quantize(
    x: np.ndarray,
    *,
    round_up: bool,
    eps: float,
    out: QuantTensor | Quantized,
    expert_offsets: np.ndarray | None = None,
) -> None:
    """Fills ``out``, whose records specify format, blocks and layout. ``round_up``: scales are rounded up to
    powers of two; otherwise MXFP8 scales are rounded down, others not at all. ``expert_offsets``: column-wise
    blocks restart at each expert; rows past the last offset are not written."""
    if isinstance(out, Quantized):
        quantize(x, round_up=round_up, eps=eps, out=out.rowwise, expert_offsets=expert_offsets)
        if out.columnwise is None:
            return
        if out.columnwise.block == (128, 128):
            transpose_codes(out.rowwise, out=out.columnwise)
        else:
            quantize(x, round_up=round_up, eps=eps, out=out.columnwise, expert_offsets=expert_offsets)
        return
    if out.layout == BLOCKED_128X4:
        compact = compact_scratch(out)
        quantize(x, round_up=round_up, eps=eps, out=compact, expert_offsets=expert_offsets)
        to_layout(compact, expert_offsets, out=out)
        return
    if out.block is None:
        flat = x.reshape(1, -1)
        scales, codes = np.empty((1, 1), np.float32), np.empty(flat.shape, np.uint8)
        quantize_strips(flat, np.array([[0, 1]]), max(x.size, 1), out, round_up, eps, codes, scales)
        out.data[:], out.scales[:] = codes.reshape(x.shape), scales[0]
        return
    if not x.size:
        return  # the result has no elements either
    strips = strips_of(x.shape, out.block, expert_offsets)
    rows = x.reshape(-1, x.shape[-1])
    width = out.block[1]
    if is_columnwise(out.block):
        codes = np.zeros(rows.shape, np.uint8)
        quantize_strips(rows, strips, width, out, round_up, eps, codes, out.scales)
        out.scales[len(strips) :] = 0
        transpose_into(codes, out.data)
    elif out.layout == "gemm_ready":
        scales = np.empty((len(rows), ceil_div(x.shape[-1], width)), np.float32)
        quantize_strips(rows, strips, width, out, round_up, eps, out.data, scales)
        out.scales[:, : len(rows)] = scales.T
        out.scales[:, len(rows) :] = 0
    else:
        quantize_strips(
            rows,
            strips,
            width,
            out,
            round_up,
            eps,
            out.data.reshape(rows.shape),
            out.scales.reshape(len(strips), -1),
        )


def quantize_parts(
    parts: tuple[np.ndarray, ...],
    *,
    count: int,
    transposed: bool,
    round_up: bool,
    eps: float,
    out: Quantized,
) -> None:
    """Quantises matrices that consist of ``count`` parts of rows, taken from the arrays of ``parts`` in
    order. Rows past each part and all columns past the input are zero-padded to ``out``'s sizes."""
    experts, rows, columns = out.rowwise.data.shape
    whole = np.zeros((experts, count, rows // count, columns), parts[0].dtype)
    for i, x in enumerate(parts):
        x = np.swapaxes(x, 1, 2) if transposed else x
        each = count // len(parts)
        real = x.reshape(experts, each, x.shape[1] // each, x.shape[2])
        first = i * real.shape[1]
        whole[:, first : first + real.shape[1], : real.shape[2], : real.shape[3]] = real
    quantize(whole.reshape(experts, rows, columns), round_up=round_up, eps=eps, out=out)


def strips_of(
    shape: tuple[int, ...], block: tuple[int, int], expert_offsets: np.ndarray | None = None
) -> np.ndarray:
    """First and last + 1 row of every row of blocks, int64 [S, 2]. A strip never crosses an expert."""
    *lead, rows, _ = shape
    if lead:
        ranges = [(e * rows, (e + 1) * rows) for e in range(lead[0])]
    elif expert_offsets is not None and block[0] > 1:
        ranges = expert_ranges(expert_offsets, rows)
    else:
        ranges = [(0, rows)]
    height = block[0]
    firsts = [np.arange(lo, hi, height) for lo, hi in ranges]
    lasts = [np.minimum(f + height, hi) for f, (_, hi) in zip(firsts, ranges, strict=True)]
    if not firsts:
        return np.zeros((0, 2), np.int64)
    return np.stack([np.concatenate(firsts), np.concatenate(lasts)], axis=1).astype(np.int64)


def quantize_strips(
    rows: np.ndarray,
    strips: np.ndarray,
    width: int,
    kind: QuantTensor,
    round_up: bool,
    eps: float,
    codes: np.ndarray,
    scales: np.ndarray,
) -> None:
    """Quantises blocks of ``width`` columns by the rows of each strip: compiled."""
    if rows.dtype == BFLOAT16:
        bits, shift = rows.view(np.uint16), 16
    else:
        bits, shift = to_f32(rows).view(np.uint32), 0
    fmt = FORMATS[kind.fmt]
    split_rows(
        _quantize_loop,
        len(strips),
        bits,
        np.uint32(shift),
        strips,
        width,
        np.float32(fmt.max),
        np.uint32(fmt.mantissa_bits),
        np.int32(fmt.bias),
        np.int32(fmt.emax),
        np.uint32(fmt.nan),
        is_mx(kind.block),
        round_up,
        np.float32(eps),
        codes,
        scales,
        work=rows.size,
    )


def quantize_strips_plain(
    rows: np.ndarray,
    strips: np.ndarray,
    width: int,
    kind: QuantTensor,
    round_up: bool,
    eps: float,
    codes: np.ndarray,
    scales: np.ndarray,
) -> None:
    """The same, block by block: the readable version that tests compare with the compiled one."""
    x = to_f32(rows)
    for s, (lo, hi) in enumerate(strips):
        for c in range(scales.shape[1]):
            block = x[lo:hi, c * width : (c + 1) * width]
            amax = np.max(np.abs(block), initial=np.float32(0))
            if not np.isnan(amax):
                amax = max(amax, np.float32(eps))
            inv, scales[s, c] = block_scale(amax, kind.fmt, kind.block, round_up)
            with np.errstate(over="ignore", invalid="ignore"):
                codes[lo:hi, c * width : (c + 1) * width] = encode(block * inv, kind.fmt)


def block_scale(amax: np.float32, fmt: str, block: Block, round_up: bool) -> tuple[np.float32, Any]:
    """(factor to multiply by, scale to store) for one block."""
    one, least = np.float32(1), np.float32(2.0**MIN_SCALE_EXPONENT)
    if is_mx(block):
        if np.isnan(amax):
            return np.float32(np.nan if round_up else 0), np.uint8(255)
        exponent = mx_exponent(amax, fmt, round_up)
        return np.float32(2.0**-exponent), np.uint8(exponent + 127)
    if amax == 0 or not np.isfinite(amax):
        return one, one
    scale = amax / np.float32(FORMATS[fmt].max)
    if round_up:
        mantissa, above = np.frexp(scale)  # mantissa in [1/2, 1)
        scale = np.float32(2.0 ** (int(above) - int(mantissa == 0.5)))
    scale = max(scale, least)
    return one / scale, scale


def mx_exponent(amax: np.float32, fmt: str, round_up: bool) -> int:
    """log2 of MXFP8's scale."""
    if np.isinf(amax):
        return 127 if round_up else 128 - FORMATS[fmt].emax
    if not round_up:
        exponent = int(np.frexp(amax)[1]) - 1 - FORMATS[fmt].emax
    else:
        mantissa, above = np.frexp(amax / np.float32(FORMATS[fmt].max))  # mantissa in [1/2, 1)
        exponent = int(above) - int(mantissa == 0.5)
    return -127 if amax == 0 else max(exponent, -127)


@compiled
def _largest(x):  # type: ignore[no-untyped-def]
    # Separate function, because it stays scalar if inlined by hand: 9 of 19 ms for 4096 x 2048.
    top = np.uint32(0)
    for i in range(x.size):
        top = max(top, x[i])
    return top


@compiled
def _quantize_loop(  # type: ignore[no-untyped-def]
    first,
    last,
    bits,
    shift,
    strips,
    width,
    limit,
    mantissa_bits,
    bias,
    emax,
    nan_code,
    mx,
    round_up,
    eps,
    codes,
    scales,
):
    # Works on bit patterns, in loops that LLVM vectorises.
    columns = bits.shape[1]
    absolute = np.uint32(0x7FFFFFFF)
    infinity = np.uint32(0x7F800000)
    amax = np.empty(columns, np.uint32)
    inv = np.empty(columns, np.float32)
    value_bits = np.empty(columns, np.uint32)
    value = value_bits.view(np.float32)
    shifted = np.empty(columns, np.float32)
    shifted_bits = shifted.view(np.uint32)
    one_bits = np.empty(1, np.uint32)
    one_value = one_bits.view(np.float32)

    one_value[0] = limit
    limit_bits = one_bits[0]
    one_value[0] = eps
    eps_bits = one_bits[0]
    drop = np.uint32(np.uint32(23) - mantissa_bits)
    half = np.uint32((np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1))
    rebias = np.uint32(np.uint32(127 - bias) << mantissa_bits)
    min_normal = np.uint32(np.uint32(128 - bias) << np.uint32(23))
    # Adding 2^(23 - e), with 2^-e the smallest subnormal, rounds a subnormal code by float addition.
    one_bits[0] = np.uint32(127 + 23 - (bias - 1 + np.int32(mantissa_bits))) << np.uint32(23)
    magic, magic_bits = one_value[0], one_bits[0]
    # MXFP8: amax / limit exceeds a power of two if adding this to amax's bits carries into the exponent.
    # Below `normal_from` the quotient is a subnormal float32, of whose spacing a bit of amax is 2/7: one bit
    # above 2^-127 is rounded away.
    above_limit = np.uint32(0x7FFFFF) - (limit_bits & np.uint32(0x7FFFFF))
    normal_from = np.uint32(np.uint32(emax + 1) << np.uint32(23))

    for s in range(first, last):
        lo, hi = strips[s, 0], strips[s, 1]
        amax[:] = np.uint32(0)
        for r in range(lo, hi):
            for i in range(columns):
                # compared as integers, so that NaN is largest
                amax[i] = max(amax[i], np.uint32(np.uint32(bits[r, i]) << shift) & absolute)
        for c in range(scales.shape[1]):
            begin, end = c * width, min((c + 1) * width, columns)
            top = max(_largest(amax[begin:end]), eps_bits)  # a NaN's bits exceed any eps
            scale = factor = np.float32(1)
            if mx:
                above = np.uint32(above_limit - np.uint32(top < normal_from) if round_up else 0)
                byte = max(np.int32(np.uint32(top + above) >> np.uint32(23)) - emax, np.int32(0))
                if top == infinity and round_up:
                    byte = np.int32(254)
                one_bits[0] = max(np.uint32(254 - byte) << np.uint32(23), np.uint32(1 << 22))  # 2^-127
                if top > infinity:
                    byte = np.int32(255)
                    one_bits[0] = top if round_up else np.uint32(0)  # NaN or 0
                scales[s, c] = byte
                factor = one_value[0]
            else:
                if np.uint32(0) < top < infinity:
                    one_bits[0] = top
                    one_value[0] /= limit
                    if round_up:
                        one_bits[0] = np.uint32(one_bits[0] + np.uint32(0x7FFFFF)) & infinity
                    one_bits[0] = max(one_bits[0], np.uint32(1 << 23))  # keeps scales normal: >= 2^-126
                    scale = one_value[0]
                    factor = np.float32(1) / scale
                scales[s, c] = scale
            inv[begin:end] = factor
        for r in range(lo, hi):
            for i in range(columns):
                value_bits[i] = np.uint32(np.uint32(bits[r, i]) << shift)
            for i in range(columns):
                value[i] *= inv[i]
                shifted[i] = min(abs(value[i]), limit) + magic
            for i in range(columns):
                # Numba widens uint32 sums to 64 bits; narrowing each one keeps full vector width.
                u = value_bits[i]
                a = min(u & absolute, limit_bits)
                odd = np.uint32(a >> drop) & np.uint32(1)
                normal = np.uint32(np.uint32(np.uint32(a + half) + odd) >> drop)
                subnormal = np.uint32(shifted_bits[i] - magic_bits)
                code = subnormal if a < min_normal else np.uint32(normal - rebias)
                code |= np.uint32(u >> np.uint32(24)) & np.uint32(0x80)
                codes[r, i] = nan_code if (u & absolute) > infinity else code


def transpose_codes(q: QuantTensor, *, out: QuantTensor) -> None:
    """One scale per block serves both orientations: nothing is rounded."""
    for source, target in ((q.data, out.data), (q.scales, out.scales)):
        for matrix, transposed in zip(_matrices(source), _matrices(target), strict=True):
            transpose_into(matrix, transposed)


def dequantize(q: QuantTensor, *, out: np.ndarray, expert_offsets: np.ndarray | None = None) -> None:
    """value = code * scale, in float32, then rounded to ``out``'s dtype."""
    scales = decode_scales(q.scales, q.block)
    if is_columnwise(q.block):
        height = q.block[0]  # type: ignore[index]
        ranges = [(0, len(out))] if expert_offsets is None else expert_ranges(expert_offsets, len(out))
        out[:] = np.zeros((), out.dtype)
        block = 0
        for lo, hi in ranges:
            blocks = slice(block, block + ceil_div(hi - lo, height))
            values = decode_blocks(q.data[:, lo:hi], scales[blocks].T, (1, height), q.fmt)
            out[lo:hi] = values.astype(out.dtype, copy=False).T
            block = blocks.stop
        return
    codes = q.data
    if q.fmt == "e2m1":
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], -1)
    if q.block is None:
        block_shape, scales = codes.shape[-2:], scales.reshape(1, 1)
    else:
        block_shape = q.block
    if q.layout == "gemm_ready" and block_shape[0] == 1:
        scales = scales[:, : len(codes)].T
    if q.transposed:
        out = np.swapaxes(out, -1, -2)
    for part, factors, target in zip(_matrices(codes), _matrices(scales), _matrices(out), strict=True):
        target[:] = decode_blocks(part, factors, block_shape, q.fmt).astype(out.dtype, copy=False)


def _matrices(x: np.ndarray) -> np.ndarray:
    return x if x.ndim == 3 else x[None]
