"""Decoding and encoding of FP8 codes and scales; splitting rows among threads."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import ml_dtypes
import numba
import numpy as np

from fp8moe.formats import BFLOAT16, FLOAT8_DTYPES, FORMATS, Block

_ALL_CODES = np.arange(256, dtype=np.uint8)

#: code -> float32 value, exact; e2m1 codes are 0..15
DECODE = {
    **{fmt: _ALL_CODES.view(dtype).astype(np.float32) for fmt, dtype in FLOAT8_DTYPES.items()},
    "e2m1": _ALL_CODES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32),
}


#: Around what may be too large for its dtype: infinity, and no warning, as on a GPU. Rows that belong to no
#: expert may hold whatever was in memory.
quietly = np.errstate(over="ignore", invalid="ignore")


def to_f32(x: np.ndarray) -> np.ndarray:
    """Any float array as float32; exact for bfloat16 and float16."""
    if x.dtype == BFLOAT16:
        # 2.5 times the speed of ml_dtypes' own cast, which goes value by value
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32, copy=False)


def encode(y: np.ndarray, fmt: str) -> np.ndarray:
    """float values -> codes: saturating, round to nearest even, every NaN the canonical one."""
    limit = FORMATS[fmt].max
    # Clamped before the cast: libraries disagree about what lies beyond the largest code.
    codes = np.clip(y, -limit, limit).astype(FLOAT8_DTYPES[fmt]).view(np.uint8)
    return np.where(np.isnan(y), np.uint8(FORMATS[fmt].nan), codes)


def decode_blocks(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], fmt: str) -> np.ndarray:
    """code * scale as float32 [M, K], for scales [ceil(M/bm), ceil(K/bk)] already decoded to float32."""
    out = np.empty(codes.shape, np.float32)
    split_rows(_decode_loop, len(codes), codes, scales, *block, DECODE[fmt], out, work=codes.size)
    return out


@numba.njit(nogil=True, cache=True)
def _decode_loop(first, last, codes, scales, block_rows, block_columns, table, out):  # type: ignore[no-untyped-def]
    columns = codes.shape[1]
    for r in range(first, last):
        for c in range(scales.shape[1]):
            scale = scales[r // block_rows, c]
            for i in range(c * block_columns, min((c + 1) * block_columns, columns)):
                out[r, i] = table[codes[r, i]] * scale


@numba.njit(nogil=True, cache=True)
def transpose_into(rows, out):  # type: ignore[no-untyped-def]
    """out[c, r] = rows[r, c], in tiles of 64 x 64: a plain transposed copy misses the cache at every byte."""
    for r0 in range(0, rows.shape[0], 64):
        for c0 in range(0, rows.shape[1], 64):
            for c in range(c0, min(c0 + 64, rows.shape[1])):
                for r in range(r0, min(r0 + 64, rows.shape[0])):
                    out[c, r] = rows[r, c]


def decode_scales(scales: np.ndarray, block: Block) -> np.ndarray:
    """Scales as float32 factors, whatever they are stored as."""
    if scales.dtype == np.float32:
        return scales
    if block == (1, 16):
        return DECODE["e4m3"][scales]
    return scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="fp8moe")


def split_rows(loop: Callable[..., None], rows: int, *args: Any, work: int) -> None:
    """Call ``loop(first, last, *args)`` on parts of ``range(rows)``, in threads.

    ``loop`` is compiled without the GIL, and each row writes its own outputs. ``work``: elements in all;
    under 65,536 a second thread costs more than it saves.
    """
    threads = min(os.cpu_count() or 1, 8, rows)
    if threads <= 1 or work < 65_536:
        loop(0, rows, *args)
        return
    bounds = [rows * i // threads for i in range(threads + 1)]
    parts = [_pool(threads).submit(loop, lo, hi, *args) for lo, hi in itertools.pairwise(bounds)]
    for part in parts:
        part.result()


def expert_ranges(expert_offsets: np.ndarray, rows: int) -> list[tuple[int, int]]:
    """(first, last) row of each expert, cut at the rows there are."""
    bounds = np.clip(expert_offsets.astype(np.int64), 0, rows)
    return [(int(lo), int(hi)) for lo, hi in itertools.pairwise(bounds)]
