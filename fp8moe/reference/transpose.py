"""Scaling-aware transpose: row-wise FP8 to column-wise FP8 by changing exponents, never through a wider type.

A row's scale is 2^r, a column block's target 2^t, so a code is re-encoded as code * 2^(r - t): exact if
representable, otherwise rounded to nearest even. There are 256 codes, and beyond 40 powers of two every
result is zero or the largest code, so the entire arithmetic is one table.

The idea is from the FP8-Flow-MoE paper (arXiv 2511.02302); the rounding is not. Its kernel keeps the mantissa
when the exponent underflows and zeroes subnormals.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from fp8moe.formats import BLOCKED_128X4, FORMATS, MIN_SCALE_EXPONENT, is_mx
from fp8moe.records import PermutationPlan, QuantTensor
from fp8moe.reference.layout import compact_scratch, to_layout
from fp8moe.reference.numerics import DECODE, encode, split_rows, transpose_into
from fp8moe.reference.permute import Entries, gather_rows, inverse
from fp8moe.reference.quantize import strips_of
from fp8moe.runtime.loops import compiled

_REACH = 40  # e5m2 spans 2^-16 to 2^15.8: a shift by 40 gives zero or saturates
_ZERO, _NAN = -10_000, 10_000  # exponents of a zero scale and of an E8M0 NaN
_NAN_TARGET = 128  # E8M0's byte 255
_INFINITY = 1_000  # exponent required by an infinite MXFP8 code: the largest, whatever its scale


def scaling_aware_transpose(
    q: QuantTensor, expert_offsets: np.ndarray | None, *, target: str, out: QuantTensor
) -> None:
    if out.layout == BLOCKED_128X4:
        compact = compact_scratch(out)
        scaling_aware_transpose(q, expert_offsets, target=target, out=compact)
        to_layout(compact, expert_offsets, out=out)
        return
    exponents = row_exponents(q)
    rows, columns = q.data.shape
    height = q.block[1]  # type: ignore[index]
    strips = strips_of((rows, columns), (height, 1), expert_offsets)
    targets = np.empty((len(strips), columns), np.int32)
    if not len(strips) or int(strips[-1, 1]) < rows or expert_offsets is not None:
        out.data[:] = 0
    split_rows(
        _transpose_loop,
        len(strips),
        q.data,
        exponents,
        strips,
        height,
        target != "column",
        needed_exponents(q.fmt, is_mx(q.block)),
        *((-127, -127, _NAN_TARGET) if is_mx(q.block) else (MIN_SCALE_EXPONENT, 0, 0)),
        shift_table(q.fmt),
        targets,
        out.data,
        work=rows * columns,
    )
    scales = targets + 127 if is_mx(q.block) else np.ldexp(np.float32(1), targets)
    out.scales[:] = 0
    if target == "block":
        if (strips[:, 0] % height).any():
            first = strips[strips[:, 0] % height != 0][0, 0]
            raise ValueError(f'expert_offsets: got {first}; target="block" wanted multiples of {height}')
        out.scales[:, strips[:, 0] // height] = scales[:, ::height].T
        return
    out.scales[: len(strips)] = scales


def permute_transpose(q: QuantTensor, plan: PermutationPlan, *, target: str, out: QuantTensor) -> None:
    """Gathers the rows, then transposes. Padding rows are zeros and do not affect targets."""
    entries = Entries(plan)
    source = inverse(entries.row, entries.token, plan.num_out_tokens)
    rows = QuantTensor(
        np.empty((plan.num_out_tokens, q.data.shape[1]), np.uint8),
        np.empty((plan.num_out_tokens, q.scales.shape[1]), q.scales.dtype),
        q.fmt,
        q.block,
    )
    gather_rows(q, source, True, rows)
    scaling_aware_transpose(rows, plan.expert_offsets, target=target, out=out)


def row_exponents(q: QuantTensor) -> np.ndarray:
    """log2 of every row-block scale, a power of two, int32 [M, ceil(K/B)]."""
    if q.scales.dtype == np.uint8:
        return np.where(q.scales == 255, _NAN, q.scales.astype(np.int32) - 127).astype(np.int32)
    exponent = np.frexp(q.scales)[1]
    return np.where(q.scales == 0, _ZERO, exponent - 1).astype(np.int32)


@cache
def needed_exponents(fmt: str, mx: bool) -> np.ndarray:
    """For each code, the smallest power-of-two scale exponent of a block that contains it (at scale 1).

    _ZERO for zeros, which have no requirement; _NAN for NaN, which sets the scale to 1 (MXFP8: to NaN), and
    for infinity except in MXFP8.
    """
    value = np.abs(DECODE[fmt].astype(np.float64))
    with np.errstate(invalid="ignore"):
        mantissa, exponent = np.frexp(value / FORMATS[fmt].max)
    needed = np.where(mantissa == 0.5, exponent - 1, exponent)  # ceil(log2(v / max))
    needed = np.where(value == 0, _ZERO, needed)
    needed = np.where(np.isinf(value), _INFINITY if mx else _NAN, needed)
    return np.where(np.isnan(value), _NAN, needed).astype(np.int32)


@cache
def shift_table(fmt: str) -> np.ndarray:
    """code * 2^d for every d from -40 to 40, uint8 [84, 256]; then the rows of scale 0 and of scale NaN."""
    shifts = np.ldexp(1.0, np.arange(-_REACH, _REACH + 1))
    with np.errstate(invalid="ignore"):
        values = DECODE[fmt].astype(np.float64) * np.concatenate([shifts, [0.0, np.nan]])[:, None]
    return encode(values, fmt)


@compiled
def _transpose_loop(  # type: ignore[no-untyped-def]
    first,
    last,
    codes,
    exponents,
    strips,
    width,
    tile,
    needed,
    smallest,
    of_zeros,
    of_nan,
    table,
    targets,
    out,
):
    columns = codes.shape[1]
    index = np.empty(columns, np.int32)
    moved = np.empty((128, columns), np.uint8)
    for s in range(first, last):
        lo, hi = strips[s, 0], strips[s, 1]
        target = targets[s]
        target[:] = _ZERO
        for r in range(lo, hi):
            for b in range(exponents.shape[1]):
                begin, end = b * width, min((b + 1) * width, columns)
                e = exponents[r, b]
                if tile:
                    occupied = e == _NAN
                    for i in range(begin, end):
                        occupied = occupied or (codes[r, i] & 0x7F) != 0
                    if occupied and e != _ZERO:
                        for i in range(begin, end):
                            target[i] = max(target[i], e)
                elif e == _NAN:
                    for i in range(begin, end):
                        target[i] = _NAN
                else:
                    for i in range(begin, end):
                        n = needed[codes[r, i]]
                        if n == _NAN:
                            target[i] = _NAN
                        elif n != _ZERO and e != _ZERO and target[i] != _NAN:
                            target[i] = max(target[i], e + n)
        for i in range(columns):
            if target[i] == _ZERO:
                target[i] = of_zeros
            elif target[i] == _NAN:
                target[i] = of_nan
            else:
                target[i] = min(max(target[i], smallest), 127)
        for r in range(lo, hi):
            for b in range(exponents.shape[1]):
                e = exponents[r, b]
                for i in range(b * width, min((b + 1) * width, columns)):
                    if e == _ZERO:
                        index[i] = 2 * _REACH + 1
                    elif e == _NAN:
                        index[i] = 2 * _REACH + 2
                    else:
                        index[i] = min(max(e - target[i], -_REACH), _REACH) + _REACH
            if of_nan:  # MXFP8: the whole block is NaN
                for i in range(columns):
                    if target[i] == of_nan:
                        index[i] = 2 * _REACH + 2
            for i in range(columns):
                moved[r - lo, i] = table[index[i], codes[r, i]]
        transpose_into(moved[: hi - lo], out[:, lo:hi])
