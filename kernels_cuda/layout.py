"""Launchers of layout.cu, with the names and signatures of `fp8moe.reference.layout`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fp8moe.formats import BLOCKED_128X4, blocked_tiles, ceil_div, is_columnwise
from fp8moe.kernels_cuda.runtime.configuration import Configuration
from fp8moe.kernels_cuda.runtime.encodings import with_experts
from fp8moe.kernels_cuda.runtime.launch import fill_bytes, launch, scratch, threads
from fp8moe.records import QuantTensor


def to_layout(q: QuantTensor, expert_offsets: Any, *, out: QuantTensor) -> None:
    if "gemm_ready" in (q.layout, out.layout):
        _convert(q, out)
        return
    to_blocked = out.layout == BLOCKED_128X4
    compact, blocked = (q, out) if to_blocked else (out, q)
    if not to_blocked and expert_offsets is not None:
        fill_bytes(out.scales, 0)  # rows of no expert
    columnwise = is_columnwise(q.block)
    tiles = blocked_tiles(blocked.scales.shape, q.block)
    known, width = compact.scales.shape
    launch(
        "layout",
        "convert_blocked_scales",
        *blocked_configuration(tiles, ceil_div(width, 128 if columnwise else 4)).grid,
        compact.scales,
        *with_experts(expert_offsets),
        q.shape[0],
        width,
        known,
        columnwise,
        to_blocked,
        blocked.scales,
    )


def compact_scratch(q: QuantTensor) -> QuantTensor:
    """A tensor with scratch compact scales, to be converted to the layout of ``q``."""
    rows, columns = q.shape
    tiles = blocked_tiles(q.scales.shape, q.block)
    shape = (4 * tiles, columns) if is_columnwise(q.block) else (rows, ceil_div(columns, 32))
    return replace(q, scales=scratch(shape, np.uint8), layout="compact")


def blocked_configuration(tiles: int, across: int) -> Configuration:
    """Configuration of convert_blocked_scales: one thread block per tile, four bytes per thread."""
    return Configuration((tiles, across), 128)


def _convert(q: QuantTensor, out: QuantTensor) -> None:
    ready = out.layout == "gemm_ready"
    rows = q.shape[0]
    blocks, padded = (out if ready else q).scales.shape
    size = (padded if ready else rows) * blocks
    arguments = (q.scales, rows, blocks, padded, ready, out.scales)
    launch("layout", "convert_scales", threads(size), 256, *arguments)
