"""FP8 decoding and encoding; the threads of compiled loops and their floating-point environment."""

from __future__ import annotations

import contextvars
import ctypes
import itertools
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from fp8moe.formats import BFLOAT16, FLOAT8_DTYPES, FORMATS, Block
from fp8moe.runtime.loops import compiled
from fp8moe.runtime.workers import Workers

_ALL_CODES = np.arange(256, dtype=np.uint8)

#: code -> float32 value, exact; e2m1 codes are 0..15
DECODE = {
    **{fmt: _ALL_CODES.view(dtype).astype(np.float32) for fmt, dtype in FLOAT8_DTYPES.items()},
    "e2m1": _ALL_CODES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32),
}


@cache
def _environment() -> tuple[Any, Any, Any] | None:
    """libm's fegetenv and fesetenv, and its FE_DFL_ENV; None without a POSIX libm."""
    if os.name != "posix":
        return None
    libm = ctypes.PyDLL(None)  # Python is normally linked to it
    if not hasattr(libm, "fesetenv"):
        libm = ctypes.PyDLL("libm.so.6")
    libm.fegetenv.argtypes = libm.fesetenv.argtypes = [ctypes.c_void_p]
    if sys.platform == "darwin":
        default: Any = ctypes.addressof(ctypes.c_char.in_dll(libm, "_FE_DFL_ENV"))
    else:
        default = ctypes.c_void_p(-1)
    return libm.fegetenv, libm.fesetenv, default


def set_default_arithmetic() -> None:
    """Makes this thread keep subnormals and round to nearest."""
    if (environment := _environment()) is not None:
        _, set_environment, default = environment
        set_environment(default)


def in_default_arithmetic(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function while this thread keeps subnormals and rounds to nearest, and NumPy does not warn of
    overflow or underflow, as on a GPU.

    XLA's threads flush subnormals to zero, new threads inherit their parent's mode, and torch and NumPy let
    the caller choose: results would depend on the calling thread and on earlier calls.
    """
    # NumPy's mode is a context variable: this copy of the context ends with the call, also with one that an
    # interrupt (Ctrl-C) ends, which may come before the first instruction of an ``__exit__`` in Python
    run = contextvars.copy_context().run
    if (environment := _environment()) is None:
        return run(_without_warnings, function, arguments, options)
    get_environment, set_environment, default = environment
    before = ctypes.create_string_buffer(128)  # fenv_t has at most 32 bytes
    get_environment(before)
    try:
        set_environment(default)
        return run(_without_warnings, function, arguments, options)
    finally:
        set_environment(before)  # a function of C, and the only call here


def _without_warnings(function: Callable[..., Any], arguments: Any, options: Any) -> Any:
    np.seterr(all="ignore")
    return function(*arguments, **options)


#: For values that may overflow their dtype: infinity without a warning, as on a GPU. Rows of no expert may
# contain uninitialised memory.
quietly = np.errstate(over="ignore", invalid="ignore")


def to_f32(x: np.ndarray) -> np.ndarray:
    """Any float array as float32; exact for bfloat16 and float16."""
    if x.dtype == BFLOAT16:
        # 2.5 times as fast as ml_dtypes' own cast, which is scalar
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32, copy=False)


def accumulator_of(dtype: np.dtype) -> np.dtype:
    """The dtype in which values of a dtype are summed: float32, or float64 for float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def widen(x: np.ndarray, wide: np.dtype) -> np.ndarray:
    """Any float array as ``wide``, which is float32 or float64."""
    return x if x.dtype == wide else to_f32(x).astype(wide, copy=False)


def encode(y: np.ndarray, fmt: str) -> np.ndarray:
    """float values -> codes: saturating, round to nearest even, every NaN becomes the canonical one."""
    limit = FORMATS[fmt].max
    # Clamped before the cast: libraries differ on values beyond the largest code.
    codes = np.clip(y, -limit, limit).astype(FLOAT8_DTYPES[fmt]).view(np.uint8)
    return np.where(np.isnan(y), np.uint8(FORMATS[fmt].nan), codes)


def decode_blocks(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], fmt: str) -> np.ndarray:
    """code * scale as float32 [M, K], for scales [ceil(M/bm), ceil(K/bk)] already decoded to float32."""
    out = np.empty(codes.shape, np.float32)
    split_rows(_decode_loop, len(codes), codes, scales, *block, DECODE[fmt], out, work=codes.size)
    return out


@compiled
def _decode_loop(first, last, codes, scales, block_rows, block_columns, table, out):  # type: ignore[no-untyped-def]
    columns = codes.shape[1]
    for r in range(first, last):
        for c in range(scales.shape[1]):
            scale = scales[r // block_rows, c]
            for i in range(c * block_columns, min((c + 1) * block_columns, columns)):
                out[r, i] = table[codes[r, i]] * scale


@compiled
def transpose_into(rows, out):  # type: ignore[no-untyped-def]
    """out[c, r] = rows[r, c], in tiles of 64 x 64: a plain transposed copy misses the cache at every byte."""
    for r0 in range(0, rows.shape[0], 64):
        for c0 in range(0, rows.shape[1], 64):
            for c in range(c0, min(c0 + 64, rows.shape[1])):
                for r in range(r0, min(r0 + 64, rows.shape[0])):
                    out[c, r] = rows[r, c]


def decode_scales(scales: np.ndarray, block: Block) -> np.ndarray:
    """Scales as float32 factors, for any storage dtype."""
    if scales.dtype == np.float32:
        return scales
    if block == (1, 16):
        return DECODE["e4m3"][scales]
    return scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


_workers = Workers(prepare=set_default_arithmetic)


def split_rows(loop: Callable[..., None], rows: int, *args: Any, work: int) -> None:
    """Call ``loop(first, last, *args)`` on parts of ``range(rows)``, in threads.

    ``loop`` is compiled without the GIL, and each row writes its own outputs. ``work``: total number of
    elements; below 65,536 a second thread costs more than it saves.
    """
    threads = min(os.cpu_count() or 1, 8, rows)
    if threads <= 1 or work < 65_536:
        loop(0, rows, *args)
        return
    bounds = [rows * i // threads for i in range(threads + 1)]
    _workers.run(loop, [(lo, hi, *args) for lo, hi in itertools.pairwise(bounds)])


def expert_ranges(expert_offsets: np.ndarray, rows: int) -> list[tuple[int, int]]:
    """(first, last) row of each expert, clamped to the number of rows."""
    bounds = np.clip(expert_offsets.astype(np.int64), 0, rows)
    return [(int(lo), int(hi)) for lo, hi in itertools.pairwise(bounds)]
