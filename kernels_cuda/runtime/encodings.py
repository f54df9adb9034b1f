"""Codes of dtypes, FP8 formats and scale layouts in kernel arguments: the tables of common.cuh."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.formats import BFLOAT16, BLOCKED_128X4, Block, is_mx
from fp8moe.records import QuantTensor

KINDS = {BFLOAT16: 0, np.dtype(np.float16): 1, np.dtype(np.float32): 2, np.dtype(np.float64): 3}
KIND_NAMES = {BFLOAT16: "BF16", np.dtype(np.float16): "F16", np.dtype(np.float32): "F32"}
FORMATS = {"e4m3": 0, "e5m2": 1, "e2m1": 2}
LAYOUTS: dict[Block, int] = {(1, 128): 1, (1, 32): 2, (1, 16): 3, None: 4}
PLAIN = 0  # the layout of an array without scales


def conversion(x: Any, q: QuantTensor) -> tuple[str, ...]:
    """Preprocessor definitions of a kernel that quantises x."""
    return f"KIND={KIND_NAMES[x.dtype]}", *formats(q)


def formats(q: QuantTensor) -> tuple[str, ...]:
    """Preprocessor definitions of a kernel that reads or writes these codes."""
    blocked = ("BLOCKED=1",) if q.layout == BLOCKED_128X4 else ()
    return f"FMT={FORMATS[q.fmt]}", f"MX={int(is_mx(q.block))}", *blocked


def rows_of(x: Any) -> tuple[Any, ...]:
    """(data, scales, kind, fmt, layout) of an array or a row-wise QuantTensor: the arguments of
    `row_value`."""
    if isinstance(x, QuantTensor):
        return x.data, x.scales, 0, FORMATS[x.fmt], LAYOUTS[x.block]
    return x, None, KINDS[x.dtype], 0, PLAIN


def with_experts(offsets: Any) -> tuple[Any, int]:
    """Expert offsets and their number as kernel arguments; null and 0 if there are none."""
    return offsets, experts_of(offsets) or 0


def experts_of(offsets: Any) -> int | None:
    return None if offsets is None else offsets.shape[0] - 1
