"""Weights of published checkpoints as records of (128, 128) blocks: moved, and MXFP4 decoded to e4m3."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fp8moe.formats import BFLOAT16, ceil_div
from fp8moe.records import Quantized
from fp8moe.reference.numerics import DECODE, encode, to_f32, transpose_into

ROOM = 6  # 6 * 2^6 = 384: the largest e2m1 value times this is an e4m3 value
LOWEST = -17  # 6 * 2^-17 and all below is rounded to zero
#: [shifts, e2m1 codes]: e2m1 values times powers of two, in the last row times NaN; and which are not exact
_VALUES = DECODE["e2m1"] * np.array([*(2.0**n for n in range(LOWEST, ROOM + 1)), np.nan], np.float32)[:, None]
CODES = encode(_VALUES, "e4m3")
INEXACT = (DECODE["e4m3"][CODES] != _VALUES) & ~np.isnan(_VALUES)


def place_tiles(
    codes: np.ndarray,
    scales: np.ndarray,
    *,
    strides: tuple[int, int, int, int],
    source: tuple[int, int, int, int],
    target: tuple[int, int, int, int, int],
    out: Quantized,
) -> None:
    """Copies blocks of ``codes`` [M, N, K] to a part of ``out``. The part's rows and columns past the source
    get codes of zero, its blocks without any source a scale of 1.

    strides: the scale of block (r, c) of matrix m is element ``start + m * matrix + r * row + c * column`` of
    ``scales``, which are float32, bfloat16 or uint8 (E8M0). source: first row, first column, rows, columns.
    target: first matrix, first row, first column, rows, columns. ``out`` has the codes as they are stored,
    and transposed; either may be None."""
    row, column, rows, columns = source
    start, *steps = strides
    for m, matrix in enumerate(codes):
        part = np.zeros(target[3:], np.uint8)
        part[:rows, :columns] = matrix[row : row + rows, column : column + columns]
        tiles = np.ones([ceil_div(size, 128) for size in target[3:]], np.float32)
        down, right = np.ogrid[: ceil_div(rows, 128), : ceil_div(columns, 128)]
        given = scales.reshape(-1)[start + m * steps[0] + down * steps[1] + right * steps[2]]
        tiles[: len(down), : right.size] = _factors(given)
        _place(part, tiles, target[0] + m, target[1:3], out)


def place_mxfp4(
    nibbles: np.ndarray,
    scales: np.ndarray,
    *,
    source: tuple[int, int, int],
    target: tuple[int, int, int, int, int],
    rounded: np.ndarray,
    out: Quantized,
) -> None:
    """Converts e2m1 codes [M, N, K/2], of scales E8M0 [M, N, K/32], to a part of ``out``, as `place_tiles`.

    source: first row, step between rows, rows. A block's scale is 2^-6 times the largest scale of its 32s
    that are not all zero, at least 2^-126, and 1 for a block of zeros. ``rounded`` [.. M]: the number of
    values that are not exact is added to each matrix's."""
    first, step, rows = source
    for m in range(len(nibbles)):
        part, tiles = (
            np.zeros(target[3:], np.uint8),
            np.ones([ceil_div(s, 128) for s in target[3:]], np.float32),
        )
        every = slice(first, first + step * rows, step)
        for strip in range(0, rows, 128):
            pairs, exponents = (x[m, every][strip : strip + 128] for x in (nibbles, scales))
            nibbles_of = np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(*exponents.shape, 32)
            bases = _bases(np.any(nibbles_of & 7, axis=-1), exponents.astype(np.int16))
            tiles[strip // 128, : len(bases)] = np.ldexp(np.float32(1), bases - 127)
            shifts = np.clip(exponents - np.repeat(bases, 4)[: exponents.shape[1]], LOWEST, ROOM) - LOWEST
            shifts[exponents == 255] = len(CODES) - 1
            index = (shifts.astype(np.uint16) * 16)[..., None] + nibbles_of
            rounded[target[0] + m] += np.count_nonzero(INEXACT.take(index))
            codes = CODES.take(index)
            part[strip : strip + len(pairs), : 2 * pairs.shape[1]] = codes.reshape(len(pairs), -1)
        _place(part, tiles, target[0] + m, target[1:3], out)


def _bases(used: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """The E8M0 byte of the scale of each 128 columns, for 128 rows of blocks of 32."""
    top = np.where(used & (exponents < 255), exponents, -1).max(axis=0)
    top = np.pad(top, (0, -len(top) % 4), constant_values=-1).reshape(-1, 4).max(axis=1)
    return np.where(top < 0, 127, np.maximum(top - ROOM, 1))


def _factors(scales: np.ndarray) -> np.ndarray:
    if scales.dtype == np.uint8:
        return scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return to_f32(scales) if scales.dtype == BFLOAT16 else scales


def _place(part: np.ndarray, tiles: np.ndarray, matrix: int, first: tuple[int, int], out: Quantized) -> None:
    for q, straight in ((out.rowwise, True), (out.columnwise, False)):
        if q is None:
            continue
        for x, to, unit in ((part, q.data[matrix], 1), (tiles, q.scales[matrix], 128)):
            row, column = (at // unit for at in first)
            if straight:
                to[row : row + x.shape[0], column : column + x.shape[1]] = x
                continue
            transposed = np.empty(x.shape[::-1], x.dtype)
            transpose_into(x, transposed)
            to[column : column + x.shape[1], row : row + x.shape[0]] = transposed
