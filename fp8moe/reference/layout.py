"""Scale layouts, as index maps.

The 128x4 blocked layout has tiles of 512 bytes: 128 rows of an operand (``outer``) by 4 scale blocks along K
(``inner``). In row-wise tensors outer are the rows; in column-wise ones, which are stored transposed, the
columns. Tiles are in row-major order. Each expert begins a new tile row; if rows are K, each expert has
separate tiles.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fp8moe.formats import BLOCKED_128X4, blocked_tiles, ceil_div, is_columnwise
from fp8moe.records import QuantTensor
from fp8moe.reference.numerics import expert_ranges


def to_layout(q: QuantTensor, expert_offsets: np.ndarray | None, *, out: QuantTensor) -> None:
    """Converts scales from one layout to another; the codes are shared."""
    rows = q.shape[0]
    if out.layout == "gemm_ready":
        out.scales[:, :rows] = q.scales.T
        out.scales[:, rows:] = 0
    elif q.layout == "gemm_ready":
        out.scales[:] = q.scales[:, :rows].T
    else:
        to_blocked = out.layout == BLOCKED_128X4
        compact, blocked = (q, out) if to_blocked else (out, q)
        places = blocked_places(compact, expert_offsets)
        has_place = places >= 0
        out.scales[:] = 0
        if to_blocked:
            out.scales.reshape(-1)[places[has_place]] = q.scales[has_place]
        else:
            out.scales[has_place] = blocked.scales.reshape(-1)[places[has_place]]


def compact_scratch(q: QuantTensor) -> QuantTensor:
    """A tensor with scratch compact scales, to be converted to the layout of ``q``."""
    rows, columns = q.shape
    tiles = blocked_tiles(q.scales.shape, q.block)
    shape = (4 * tiles, columns) if is_columnwise(q.block) else (rows, ceil_div(columns, 32))
    return replace(q, scales=np.empty(shape, np.uint8), layout="compact")


def blocked_places(q: QuantTensor, expert_offsets: np.ndarray | None) -> np.ndarray:
    """Index of each compact scale in the blocked array, int64; -1 for rows of no expert."""
    rows, columns = q.shape
    ranges = [(0, rows)] if expert_offsets is None else expert_ranges(expert_offsets, rows)
    places = np.full(q.scales.shape, -1, np.int64)
    tiles = strips = 0  # of earlier experts
    for lo, hi in ranges:
        if is_columnwise(q.block):
            count = ceil_div(hi - lo, 32)
            outer, inner = np.arange(columns)[None], np.arange(count)[:, None]
            start = tiles * ceil_div(columns, 128) * 512
            places[strips : strips + count] = start + place_in_blocked(outer, inner, ceil_div(count, 4))
            strips += count
        else:
            outer, inner = 128 * tiles + np.arange(hi - lo)[:, None], np.arange(places.shape[1])[None]
            places[lo:hi] = place_in_blocked(outer, inner, ceil_div(places.shape[1], 4))
        tiles += ceil_div(hi - lo, 128)
    return places


def place_in_blocked(outer: np.ndarray, inner: np.ndarray, across: int) -> np.ndarray:
    """Index of scale (outer, inner) with ``across`` tiles per tile row."""
    tile = outer // 128 * across + inner // 4
    return tile * 512 + outer % 32 * 16 + outer % 128 // 32 * 4 + inner % 4
