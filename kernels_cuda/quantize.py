"""Launchers of quantize.cu, with the names and signatures of `fp8moe.reference.quantize`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.formats import BLOCKED_128X4, ceil_div, is_columnwise, is_mx, swapped
from fp8moe.kernels_cuda.layout import compact_scratch, to_layout
from fp8moe.kernels_cuda.runtime.configuration import Configuration
from fp8moe.kernels_cuda.runtime.encodings import FORMATS, KINDS, conversion, experts_of, with_experts
from fp8moe.kernels_cuda.runtime.launch import (
    fill_bytes,
    launch,
    multiprocessors,
    scratch,
    shared_limit,
    threads,
)
from fp8moe.records import Quantized, QuantTensor

ROW_BLOCKS = ((1, 128), (1, 32))  # blocks with fast paths
TILE, TILE_THREADS = 128, 512  # must match tile_order.cuh
WEIGHT_THREADS = 256  # must match weight_block.cuh
RESIDENT = 2  # resident thread blocks of the tile kernels per SM
# Tiles per thread block above which dynamic scheduling is worth one more launch: 79.8 instead of 83.2 us for
# 32,768 x 2048 row-wise and column-wise (15.5 tiles per block). For the transpose of 12,544 x 5120 (10 per
# block) it cost time: 40.7 instead of 39.9 us.
MANY_TURNS = 12
DECLARED = 12 * 1024  # upper bound of the tile kernels' static shared memory in bytes


def quantize(
    x: Any, *, round_up: bool, eps: float, out: QuantTensor | Quantized, expert_offsets: Any = None
) -> None:
    if blocks_are_whole(x, out):
        rowwise, columnwise = (out.rowwise, out.columnwise) if isinstance(out, Quantized) else (out, None)
        _quantize_weights(x, round_up, eps, x.shape[-2:], rowwise, columnwise)
        return
    shared = tile_bytes(x.dtype.itemsize, experts_of(expert_offsets))
    if isinstance(out, Quantized) and tiles_are_whole(x, x.shape[-1], out, shared, expert_offsets):
        _quantize_tiles(x, round_up, eps, out.rowwise, out.columnwise, expert_offsets)
        return
    if isinstance(out, Quantized):
        quantize(x, round_up=round_up, eps=eps, out=out.rowwise, expert_offsets=expert_offsets)
        if out.columnwise.block == (128, 128):
            transpose_codes(out.rowwise, out=out.columnwise)
        else:
            quantize(x, round_up=round_up, eps=eps, out=out.columnwise, expert_offsets=expert_offsets)
        return
    *lead, rows, columns = x.shape
    rule = (FORMATS[out.fmt], round_up, is_mx(out.block), float(eps))
    if is_columnwise(out.block):
        if tiles_are_whole(x, columns, out, shared, expert_offsets):
            _quantize_tiles(x, round_up, eps, None, out, expert_offsets)
            return
        if out.layout == BLOCKED_128X4:
            _quantize_then_convert(x, round_up, eps, out, expert_offsets)
            return
        assert out.block is not None
        count = out.scales.shape[0]
        strips = make_strips(expert_offsets, 1, rows, out.block[0], count)
        fill_bytes(out.data, 0)
        grid = (count, threads(columns, 128))
        launch(
            "quantize",
            "quantize_columns",
            grid,
            128,
            x,
            KINDS[x.dtype],
            strips,
            rows,
            columns,
            *rule,
            out.data,
            out.scales,
        )
        return
    if not lead and rows_are_whole(x, columns, out):
        ready = 0
        blocks = columns // (32 if is_mx(out.block) else 128)
        if out.layout == "gemm_ready":
            ready = out.scales.shape[1]
            fill_bytes(out.scales, 0)
        elif out.layout == BLOCKED_128X4:
            ready = out.scales.shape[1] // 4
            if out.scales.size != rows * blocks:
                fill_bytes(out.scales, 0)
        arguments = (x, x.size // 8, blocks, round_up, float(eps), ready, out.data, out.scales)
        launch("quantize", "quantize_rows", *by_warps(x.size).grid, *arguments, defines=conversion(x, out))
        return
    if out.layout == BLOCKED_128X4:
        _quantize_then_convert(x, round_up, eps, out, None)
        return
    height, width = out.block or (max(rows, 1), max(columns, 1))
    matrices = int(np.prod(lead, dtype=np.int64))
    count = matrices * ceil_div(rows, height)
    blocks = ceil_div(columns, width)
    if out.block is None and not x.size:  # no elements: the single scale is written nevertheless
        rows, columns, height, count, blocks = 1, 0, 1, 1, 1
    row_stride, column_stride = blocks, 1
    if out.layout == "gemm_ready" and height == 1:
        fill_bytes(out.scales, 0)
        row_stride, column_stride = 1, out.scales.shape[1]
    strips = make_strips(None, matrices, rows, height, count)
    launch(
        "quantize",
        "quantize_blocks",
        (count, blocks),
        128,
        x,
        KINDS[x.dtype],
        strips,
        columns,
        width,
        *rule,
        row_stride,
        column_stride,
        out.data,
        out.scales,
    )


def _quantize_then_convert(x: Any, round_up: bool, eps: float, out: QuantTensor, expert_offsets: Any) -> None:
    """For shapes and addresses without a fast path."""
    compact = compact_scratch(out)
    quantize(x, round_up=round_up, eps=eps, out=compact, expert_offsets=expert_offsets)
    to_layout(compact, expert_offsets, out=out)


def blocks_are_whole(x: Any, out: QuantTensor | Quantized) -> bool:
    """Whether all blocks are complete (128, 128) blocks at 16-byte aligned addresses."""
    sides = tuple(filter(None, (out.rowwise, out.columnwise))) if isinstance(out, Quantized) else (out,)
    return (
        sides[0].block == (128, 128)
        and x.shape[-1] % 128 == x.shape[-2] % 128 == 0
        and all(a.ptr % 16 == 0 for a in (x, *(side.data for side in sides)))
    )


def _quantize_weights(
    x: Any,
    round_up: bool,
    eps: float,
    sizes: tuple[int, ...],
    rowwise: QuantTensor | None,
    columnwise: QuantTensor | None,
    first: tuple[int, int] = (0, 0),
) -> None:
    """sizes: rows and columns of the results. first: row and column of the results at which x begins,
    multiples of 128."""
    *lead, rows, columns = x.shape
    either = rowwise or columnwise
    assert either is not None
    straight = (None, None) if rowwise is None else _from(rowwise, *first)
    transposed = (None, None) if columnwise is None else _from(columnwise, *reversed(first))
    configuration = weights_configuration(int(np.prod(lead, dtype=np.int64)), rows, columns)
    launch(
        "quantize",
        "quantize_weights",
        configuration.blocks,
        configuration.threads,
        x,
        rows,
        columns,
        *sizes,
        round_up,
        float(eps),
        *straight,
        *transposed,
        defines=conversion(x, either),
    )


def _from(q: QuantTensor, row: int, column: int) -> tuple[Any, Any]:
    """Codes and scales of (128, 128) blocks from a row and a column on, as parts without a shape."""
    codes = q.data.part(row * q.data.shape[-1] + column, (1,))
    return codes, q.scales.part(row // TILE * q.scales.shape[-1] + column // TILE, (1,))


def quantize_parts(
    parts: tuple[Any, ...], *, count: int, transposed: bool, round_up: bool, eps: float, out: Quantized
) -> None:
    rowwise, columnwise = (out.columnwise, out.rowwise) if transposed else (out.rowwise, out.columnwise)
    matrices, rows, columns = swapped(out.shape) if transposed else out.shape
    along = 2 if transposed else 1  # the dimension divided into parts
    part = [rows, columns]
    part[along - 1] //= count
    apart = count // len(parts)  # parts per array
    filled = parts[0].shape[along] == apart * part[along - 1] and parts[0].shape[3 - along] == part[2 - along]
    if filled and all(blocks_are_whole(x, out) for x in parts):
        for i, x in enumerate(parts):
            before = i * x.shape[along]
            place = (before, 0) if along == 1 else (0, before)
            _quantize_weights(x, round_up, eps, (rows, columns), rowwise, columnwise, place)
        return
    for i in range(count):
        x = parts[i // apart]
        real = list(x.shape[1:])
        real[along - 1] //= apart
        start = i % apart * (real[0] * x.shape[2] if along == 1 else real[1])
        first = [0, 0]
        first[along - 1] = i * part[along - 1]
        strides = x.shape[1] * x.shape[2], x.shape[2]
        source = x.part(start, x.shape)
        aligned = source.ptr % 16 == 0 and x.shape[2] % 8 == 0 == strides[0] % 8
        configuration = part_configuration(matrices, *part)
        launch(
            "quantize",
            "quantize_weights_part",
            configuration.blocks,
            configuration.threads,
            source,
            aligned,
            *strides,
            *real,
            *first,
            *part,
            rows,
            columns,
            round_up,
            float(eps),
            *((None, None) if rowwise is None else (rowwise.data, rowwise.scales)),
            *((None, None) if columnwise is None else (columnwise.data, columnwise.scales)),
            defines=conversion(x, out.rowwise),
        )


def part_configuration(matrices: int, rows: int, columns: int) -> Configuration:
    """Configuration of quantize_weights_part and transpose_codes: one thread block per (128, 128) block,
    including incomplete ones."""
    return Configuration((threads(rows, TILE) * threads(columns, TILE), matrices), WEIGHT_THREADS)


def weights_configuration(matrices: int, rows: int, columns: int) -> Configuration:
    """Configuration of quantize_weights: one thread block per (128, 128) block."""
    return Configuration((rows // TILE * (columns // TILE), matrices), WEIGHT_THREADS)


def by_warps(size: int) -> Configuration:
    """Configuration of kernels built on fp8.cuh's quantize_warp for ``size`` values: four vectors of eight
    per thread."""
    return Configuration(threads(size // 8, 4 * 64), 64)


def _quantize_tiles(
    x: Any, round_up: bool, eps: float, rowwise: QuantTensor | None, columnwise: QuantTensor, offsets: Any
) -> None:
    rows, columns = x.shape
    configuration, taken = tile_launch(columnwise, columns, x.dtype.itemsize, offsets)
    if rowwise is not None and rowwise.layout == BLOCKED_128X4 and rows % 128:
        fill_bytes(rowwise.scales, 0)
    launch(
        "quantize",
        "quantize_tiles",
        configuration.blocks,
        configuration.threads,
        x,
        rows,
        columns,
        *with_experts(offsets),
        strips_with_scales(columnwise),
        round_up,
        float(eps),
        taken,
        *tile_results(rowwise, columnwise),
        shared=configuration.shared,
        defines=conversion(x, columnwise),
    )


def tiles_are_whole(x: Any, columns: int, out: QuantTensor | Quantized, shared: int, offsets: Any) -> bool:
    """Whether the tile kernels support this: columns a multiple of 128, x 16-byte aligned, and in ``out``,
    whose memory may be the caller's, the row-wise codes and the scales of columns, which are written as
    words; enough shared memory, and strip numbers that fit 32 bits even if every expert had all rows."""
    rowwise, columnwise = (out.rowwise, out.columnwise) if isinstance(out, Quantized) else (None, out)
    blocks = rowwise is None or (rowwise.block in ROW_BLOCKS and rowwise.layout != "gemm_ready")
    whole = x.ndim == 2 and columns % 128 == 0 and x.ptr % 16 == 0 and columnwise.scales.ptr % 4 == 0
    whole &= rowwise is None or rowwise.data.ptr % 4 == 0
    ranges = 1 if offsets is None else offsets.shape[0] + 1
    return blocks and whole and fits_in_shared(shared) and ranges * threads(x.shape[0], 32) < 2**31


def strips_with_scales(columnwise: QuantTensor) -> int:
    """Number of strips with allocated scales."""
    return columnwise.scales.shape[1 if columnwise.layout == BLOCKED_128X4 else 0]


def tiles_down(strips: int, *, mx: bool) -> int:
    """Number of rows of tiles."""
    return threads(strips, 4) if mx else strips


def tiles_configuration(
    strips: int, columns: int, value_bytes: int, experts: int | None, *, mx: bool, multiprocessors: int
) -> tuple[Configuration, bool]:
    """Configuration of the tile kernels: one wave of persistent thread blocks, and whether they claim tiles
    dynamically, which pays off for many tiles only (tile_order.cuh: Turns). value_bytes: bytes read per
    result."""
    rest = 0 if experts is None else 2  # additional strips for rows of no expert
    tiles = tiles_down(strips + rest, mx=mx) * threads(columns, TILE)
    blocks = min(tiles, multiprocessors * RESIDENT)
    shared = tile_bytes(value_bytes, experts)
    return Configuration(blocks, TILE_THREADS, shared), tiles > MANY_TURNS * blocks


def tile_launch(
    columnwise: QuantTensor, columns: int, value_bytes: int, offsets: Any
) -> tuple[Configuration, Any]:
    """The configuration, and the zeroed tile counter of a dynamic schedule, or None for a static one."""
    configuration, when_free = tiles_configuration(
        strips_with_scales(columnwise),
        columns,
        value_bytes,
        experts_of(offsets),
        mx=is_mx(columnwise.block),
        multiprocessors=multiprocessors(),
    )
    if not when_free:
        return configuration, None
    # not `zeroed_counter`: blocks read their first tile before they wait, so this launch has to come directly
    # before theirs
    taken = scratch((1,), np.int32)
    launch("quantize", "no_tiles_taken", 1, 1, taken)
    return configuration, taken


def tile_bytes(value_bytes: int, experts: int | None) -> int:
    """Shared memory: the output tile as codes, the input tile, and the table of strips, three words for each
    expert and for the rows before and after all of them."""
    ranges = 0 if experts is None else experts + 2
    return TILE * TILE * (1 + value_bytes) + 3 * 4 * ranges


def fits_in_shared(dynamic: int) -> bool:
    """Whether this dynamic shared memory fits next to the static one of the tile kernels."""
    return dynamic + DECLARED <= shared_limit()


def tile_results(rowwise: QuantTensor | None, columnwise: QuantTensor) -> tuple[Any, ...]:
    rows = (None, None) if rowwise is None else (rowwise.data, rowwise.scales)
    return *rows, columnwise.data, columnwise.scales


def rows_are_whole(x: Any, columns: int, out: QuantTensor) -> bool:
    """Whether rows (or halves of rows) of ``columns`` are whole blocks at addresses for 16-byte loads."""
    return (
        out.block in ROW_BLOCKS and columns % out.block[1] == 0 and x.ptr % 16 == 0 and out.data.ptr % 8 == 0
    )


def transpose_codes(q: QuantTensor, *, out: QuantTensor) -> None:
    *lead, rows, columns = q.data.shape
    configuration = part_configuration(int(np.prod(lead, dtype=np.int64)), rows, columns)
    arguments = (q.data, q.scales, rows, columns, out.data, out.scales)
    launch("quantize", "transpose_codes", configuration.blocks, configuration.threads, *arguments)


def dequantize(q: QuantTensor, *, out: Any, expert_offsets: Any = None) -> None:
    *_, rows, columns = q.shape
    kind, fmt = KINDS[out.dtype], FORMATS[q.fmt]
    if is_columnwise(q.block):
        assert q.block is not None
        known = count = q.scales.shape[0]
        if expert_offsets is not None:  # an upper bound of the number of strips
            count = max(known, threads(rows, q.block[0]) + expert_offsets.shape[0] - 1)
        strips = make_strips(expert_offsets, 1, rows, q.block[0], count)
        fill_bytes(out, 0)
        grid = (count, threads(columns, 128))
        arguments = (q.data, q.scales, known, strips, rows, columns, fmt, is_mx(q.block), kind, out)
        launch("quantize", "dequantize_columns", grid, 128, *arguments)
        return
    height, width = q.block or (max(rows, 1), max(columns, 1))
    blocks = ceil_div(columns, width)
    ready = q.layout == "gemm_ready" and height == 1
    strides = (1, q.scales.shape[1], 0) if ready else (blocks, 1, blocks * ceil_div(rows, height))
    of_codes = columns, 1
    if q.transposed:
        strides, of_codes = (1, ceil_div(rows, height), strides[2]), (1, rows)
    fast = q.block in ROW_BLOCKS and columns % 16 == 0
    if fast and q.data.ptr % 16 == out.ptr % 16 == 0 and out.size < 2**35:
        vectors = out.size // 16
        arguments = (q.data, q.scales, vectors, columns // 16, *strides[:2], out)
        launch("quantize", "dequantize_rows", threads(vectors), 256, *arguments, defines=conversion(out, q))
        return
    scale_kind = 0 if q.scales.dtype == np.float32 else 1 if is_mx(q.block) else 2
    launch(
        "quantize",
        "dequantize_blocks",
        threads(out.size),
        256,
        q.data,
        q.scales,
        out.size,
        rows,
        columns,
        height,
        width,
        *of_codes,
        *strides,
        fmt,
        scale_kind,
        kind,
        out,
    )


def make_strips(offsets: Any, matrices: int, rows: int, height: int, capacity: int) -> Any:
    """int32 [capacity, 2] on the device: first and last + 1 row of every strip."""
    strips = scratch((capacity, 2), np.int32)
    experts = with_experts(offsets)
    launch("quantize", "make_strips", 1, 1, *experts, matrices, rows, height, capacity, strips)
    return strips
