"""Launchers of permute.cu, unpermute.cu and sort_chunks.cu, with the names and signatures of
`fp8moe.reference.permute`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fp8moe.formats import BFLOAT16, BLOCKED_128X4
from fp8moe.kernels_cuda.layout import compact_scratch, to_layout
from fp8moe.kernels_cuda.runtime.configuration import Configuration
from fp8moe.kernels_cuda.runtime.encodings import KINDS, rows_of
from fp8moe.kernels_cuda.runtime.launch import fill_bytes, launch, once, scratch, shared_limit, threads
from fp8moe.records import (
    DeviceArray,
    PermutationPlan,
    Permuted,
    QuantTensor,
    SortedChunks,
    cached_plan_layout,
)

# Tuned on an H200; docs/experiments/permute.md has the figures.
PIECE = 16_384  # bytes of a row per warp and iteration
LONG_ROW = 7168  # from here on 16 warps per SM suffice; 24 leave a bad tail wave
LONG_ROW_SHARED = 14_000
# Zero rows are copied from this many bytes of shared memory. With long pieces that would reduce occupancy
# (152.3 instead of 146.3 us), and ordinary stores are used.
ZEROS, LONG_PIECE = 2048, 12_000
SHARE = 256  # vectors of a row per thread block of unpermute_bf16: two per thread
FILLERS = 132  # thread blocks of unpermute_bf16_backward that write zero rows
CHUNK_THREADS = 256  # must match sort_chunks.cu
UNIT = 4096  # bytes of rows per warp of sort_chunks_rows


class Pieces(NamedTuple):
    """Partition of rows into pieces, one warp (and thread block) per piece. Pieces of a row have equal sizes,
    rounded up to 16 bytes."""

    blocks: int
    shared: int  # bytes of shared memory per thread block
    per_row: int
    nbytes: int  # of a piece; the last one may be shorter
    zeros: int = 0  # bytes of shared memory as the source of zero rows
    together: int = 1  # rows whose pieces one warp moves


def permute_pieces(tokens: int, row_bytes: int, scale_bytes: int, *, fill: bool) -> Pieces:
    """Pieces of permute_rows."""
    count = -(-row_bytes // PIECE)
    piece = -(-row_bytes // count // 16) * 16
    zeros = ZEROS if fill and piece < LONG_PIECE else 0
    least = LONG_ROW_SHARED if row_bytes >= LONG_ROW else 0  # limits the number of resident warps
    shared = max(zeros + piece + scale_bytes + 16, least)
    return Pieces(tokens * count, shared, count, piece, zeros)


def sort_chunks_pieces(rows: int, row_bytes: int, scale_bytes: int) -> Pieces:
    """Pieces of sort_chunks_rows."""
    count = -(-row_bytes // UNIT)
    piece = -(-row_bytes // count // 16) * 16
    together = max(1, min(32, UNIT // (row_bytes + scale_bytes)))
    shared = together * (piece + scale_bytes) + 16
    return Pieces(-(-rows // together) * count, shared, count, piece, together=together)


def unpermute_configuration(tokens: int, vectors: int) -> Configuration:
    """Configuration of unpermute_bf16: consecutive blocks for the ``vectors`` of eight values of a row."""
    return Configuration(tokens * threads(vectors, SHARE), SHARE // 2)


def unpermute_backward_configuration(tokens: int, columns: int) -> Configuration:
    """Configuration of unpermute_bf16_backward: blocks that write zero rows, then one per token."""
    return Configuration(FILLERS + tokens, 256 if columns > 2048 else 192)


def sort_chunks_configuration(rows: int, chunks: int) -> Configuration:
    """Configuration of sort_chunks_sources: one thread per row, and at least one block, which writes the
    offsets even without rows. Shared memory: eight bytes per warp, five words per chunk and one more."""
    return Configuration(
        max(1, threads(rows, CHUNK_THREADS)), CHUNK_THREADS, CHUNK_THREADS // 4 + 4 * (5 * chunks + 1)
    )


def plan_parts(plan: PermutationPlan) -> dict[str, Any]:
    """A plan's arrays by name, as parts of its buffer for `launch`."""
    sizes = plan.num_tokens, plan.num_experts, plan.max_experts_per_token, plan.has_slots
    parts: dict[str, Any] = {"slots": None}
    for name, (start, _) in cached_plan_layout(*sizes)[1].items():
        parts[name] = plan.data, start * plan.data.dtype.itemsize
    return parts


def permute(
    x: Any, plan: PermutationPlan, probs: Any, *, fill_padding: bool, zero_unweighted: bool, out: Any
) -> None:
    data, scales, moved, moved_scales = x, None, out.data, None
    if isinstance(x, QuantTensor):
        data, moved = x.data, out.data.data
        if x.block is not None:
            scales, moved_scales = x.scales, out.data.scales
    if whole_vectors(data, scales, moved, moved_scales):
        parts, tokens, row_bytes = plan_parts(plan), data.shape[0], data.shape[1] * data.dtype.itemsize
        scale_bytes = 0 if scales is None else scales.shape[1] * scales.dtype.itemsize
        pieces = permute_pieces(tokens, row_bytes, scale_bytes, fill=fill_padding)
        defines: tuple[str, ...] = ()
        if scales is not None and out.data.layout == BLOCKED_128X4:
            defines = ("BLOCKED=1",)
            if moved_scales is not None and plan.num_out_tokens % 128:  # missing rows of the last tile
                fill_bytes(moved_scales, 0)
        launch(
            "permute",
            "permute_rows",
            pieces.blocks,
            32,
            data,
            row_bytes,
            pieces.nbytes,
            pieces.per_row,
            scales,
            scale_bytes,
            probs,
            0 if probs is None else probs.dtype.itemsize,
            0 if probs is None else probs.shape[1],
            parts["row_id_map"],
            parts["slots"],
            parts["pad_offsets"],
            parts["tokens_per_expert"],
            parts["expert_offsets"],
            plan.max_experts_per_token,
            plan.num_experts,
            plan.num_out_tokens,
            fill_padding,
            pieces.zeros,
            moved,
            moved_scales,
            out.probs,
            shared=pieces.shared,
            defines=defines,
        )
    else:
        source, column = sources(plan)
        if scales is not None and out.data.layout == BLOCKED_128X4:
            compact = compact_scratch(out.data)
            gather(x.data, source, fill_padding, moved)
            gather(scales, source, True, compact.scales)
            to_layout(compact, None, out=out.data)
        else:
            gather(x, source, fill_padding, out.data)
        if probs is not None:
            gather_probs(probs, source, column, fill_padding, out.probs)
    if zero_unweighted and moved.size:
        _zero_unweighted(plan, probs, moved)


def _zero_unweighted(plan: PermutationPlan, probs: Any, out: Any) -> None:
    launch(
        "permute",
        "zero_unweighted_rows",
        threads(plan.num_tokens, 8),
        256,
        plan.row_id_map,
        plan.slots,
        plan.pad_offsets,
        probs,
        KINDS[probs.dtype],
        plan.prob_columns,
        plan.num_tokens,
        plan.max_experts_per_token,
        plan.num_experts,
        plan.num_out_tokens,
        out.nbytes // out.shape[0],
        out,
    )


def whole_vectors(*arrays: Any) -> bool:
    """Whether every row of every array is 16-byte aligned and a multiple of 16 bytes."""
    for a in arrays:
        if a is not None:
            row_bytes = math.prod(a.shape[1:]) * a.dtype.itemsize
            if not row_bytes or row_bytes % 16 or a.ptr % 16 or not a.shape[0]:
                return False
    return True


def unpermute(x: Any, plan: PermutationPlan, merging_probs: Any, *, out: Any) -> None:
    _merge(x, plan, merging_probs, out, None, None)


def permute_backward(grad: Any, plan: PermutationPlan, grad_probs: Any, *, out: Any) -> None:
    _merge(grad, plan, None, out[0], grad_probs, out[1])


def _merge(
    x: Any, plan: PermutationPlan, merging_probs: Any, out: Any, grad_probs: Any, out_probs: Any
) -> None:
    """Sums rows into ``out``; gathers grad_probs [rows] into out_probs [T, columns]."""
    tokens, width = out.shape
    parts = plan_parts(plan)
    maps = parts["row_id_map"], parts["slots"], parts["pad_offsets"]
    probs = (
        merging_probs,
        0 if merging_probs is None else KINDS[merging_probs.dtype],
        plan.prob_columns,
        plan.max_experts_per_token,
        plan.num_experts,
        plan.num_out_tokens,
    )
    back = (grad_probs, 0 if grad_probs is None else grad_probs.dtype.itemsize, out_probs)
    if not isinstance(x, QuantTensor) and x.dtype == BFLOAT16 and x.size and whole_vectors(x, out):
        vectors = width // 8
        grid = unpermute_configuration(tokens, vectors).grid
        arguments = (x, *maps, *probs, vectors, threads(vectors, SHARE), out)
        if grad_probs is None:
            launch("unpermute", "unpermute_bf16", *grid, *arguments)
        else:
            launch("unpermute", "unpermute_bf16_and_probs", *grid, *arguments, *back)
        return
    launch(
        "unpermute",
        "unpermute_rows",
        tokens,
        256,
        *rows_of(x),
        *maps,
        *probs,
        width,
        KINDS[out.dtype],
        out,
        *back,
    )


def unpermute_backward(grad: Any, plan: PermutationPlan, x: Any, merging_probs: Any, *, out: Any) -> None:
    grad_x, grad_probs = out
    if merging_probs is None:
        moved = Permuted(grad_x, None, plan)
        permute(grad, plan, None, fill_padding=True, zero_unweighted=False, out=moved)
        return
    if grad.dtype == BFLOAT16 and grad.size and whole_vectors(grad, x, grad_x):
        parts = plan_parts(plan)
        launch(
            "unpermute",
            "unpermute_bf16_backward",
            *unpermute_backward_configuration(plan.num_tokens, grad.shape[1]).grid,
            grad,
            x,
            parts["row_id_map"],
            parts["slots"],
            parts["pad_offsets"],
            parts["tokens_per_expert"],
            parts["expert_offsets"],
            merging_probs,
            KINDS[merging_probs.dtype],
            plan.prob_columns,
            plan.max_experts_per_token,
            plan.num_experts,
            plan.num_out_tokens,
            grad.shape[1] // 8,
            FILLERS,
            grad_x,
            grad_probs,
        )
        return
    source, column = sources(plan)
    fill_bytes(grad_x, 0)
    fill_bytes(grad_probs, 0)
    launch(
        "unpermute",
        "unpermute_rows_backward",
        plan.num_out_tokens,
        256,
        grad,
        x,
        KINDS[grad.dtype],
        source,
        column,
        merging_probs,
        KINDS[merging_probs.dtype],
        plan.prob_columns,
        grad.shape[1],
        grad_x,
        grad_probs,
    )


def sort_chunks(
    x: Any,
    split_sizes: DeviceArray,
    sorted_indices: DeviceArray | None,
    probs: Any,
    *,
    align_size: int,
    chunks_per_group: int,
    keep_rest: bool,
    out: SortedChunks,
) -> None:
    chunks = (split_sizes, sorted_indices, align_size, chunks_per_group, keep_rest)
    _move(x, probs, chunks, False, out.data, out.probs, out.group_offsets)


def sort_chunks_backward(
    grad: Any,
    split_sizes: DeviceArray,
    sorted_indices: DeviceArray | None,
    grad_probs: Any,
    *,
    align_size: int,
    chunks_per_group: int,
    keep_rest: bool,
    out: Any,
) -> None:
    chunks = (split_sizes, sorted_indices, align_size, chunks_per_group, keep_rest)
    _move(grad, grad_probs, chunks, True, out[0], out[1], None)


def pad(x: Any, tokens_per_expert: DeviceArray, *, align_size: int, out: Any) -> None:
    _move(x, None, (tokens_per_expert, None, align_size, 1, False), False, out, None, None)


def unpad(x: Any, tokens_per_expert: DeviceArray, *, align_size: int, out: Any) -> None:
    _move(x, None, (tokens_per_expert, None, align_size, 1, False), True, out, None, None)


def _move(
    x: Any, probs: Any, chunks: tuple[Any, ...], backward: bool, out: Any, out_probs: Any, offsets: Any
) -> None:
    """Moves rows of chunks to their destinations or back. chunks: (sizes, order, align, chunks per group,
    keep_rest)."""
    sizes, order, align, per_group, keep_rest = chunks
    data, scales = (x.data, x.scales) if isinstance(x, QuantTensor) else (x, None)
    moved, moved_scales = (out.data, out.scales) if isinstance(x, QuantTensor) else (out, None)
    if isinstance(x, QuantTensor) and x.block is None:
        scales = moved_scales = None
    count, rows_in, rows = sizes.shape[0], data.shape[0], moved.shape[0]
    configuration = sort_chunks_configuration(rows, count)
    if configuration.shared > shared_limit():
        name, most = "tokens_per_expert" if order is None else "split_sizes", shared_limit() // 20 - 4
        raise ValueError(
            f"{name}: got {count} chunks; wanted at most {most}, which this device's blocks can hold"
        )
    source = scratch((rows,), np.int32)
    launch(
        "sort_chunks",
        "sort_chunks_sources",
        configuration.blocks,
        configuration.threads,
        sizes,
        order,
        sizes.dtype.itemsize == 8,
        order is not None and order.dtype.itemsize == 8,
        count,
        align,
        per_group,
        keep_rest,
        backward,
        rows_in,
        rows,
        probs,
        0 if probs is None else probs.dtype.itemsize,
        source,
        out_probs,
        offsets,
        shared=configuration.shared,
    )
    if not whole_vectors(data, scales, moved, moved_scales):
        gather(x, source, True, out)
        return
    row_bytes, scale_bytes = data.nbytes // rows_in, 0 if scales is None else scales.nbytes // rows_in
    pieces = sort_chunks_pieces(rows, row_bytes, scale_bytes)
    launch(
        "sort_chunks",
        "sort_chunks_rows",
        pieces.blocks,
        32,
        data,
        row_bytes,
        pieces.nbytes,
        pieces.per_row,
        pieces.together,
        scales,
        scale_bytes,
        source,
        rows,
        moved,
        moved_scales,
        shared=pieces.shared,
    )


def sources(plan: PermutationPlan, *, columns: bool = True) -> tuple[Any, Any]:
    """int32 [num_out_tokens] each: every row's token, -1 for none, and, unless ``columns`` is False, the
    column of its probability. Made once per recording: a layer's backward needs them three times."""
    key = "sources", plan.data.ptr, plan.num_out_tokens, columns
    return once(key, lambda: _sources(plan, columns))  # type: ignore[no-any-return]


def _sources(plan: PermutationPlan, columns: bool) -> tuple[Any, Any]:
    source = scratch((plan.num_out_tokens,), np.int32)
    column = scratch((plan.num_out_tokens,), np.int32) if columns else None
    fill_bytes(source, 0xFF)
    width, parts = plan.max_experts_per_token, plan_parts(plan)
    launch(
        "permute",
        "row_sources",
        threads(plan.num_tokens * width),
        256,
        parts["row_id_map"],
        parts["slots"],
        parts["pad_offsets"],
        plan.num_tokens,
        width,
        plan.prob_columns,
        plan.num_experts,
        plan.num_out_tokens,
        source,
        column,
    )
    return source, column


def gather_probs(probs: Any, source: Any, column: Any, fill: bool, out: Any) -> None:
    """out[i] = probs[source[i], column[i]]."""
    rows = out.shape[0]
    arguments = (probs, source, column, probs.shape[1], rows, probs.dtype.itemsize, fill, out)
    launch("permute", "gather_probs", threads(rows), 256, *arguments)


def gather(x: Any, source: Any, fill: bool, out: Any) -> None:
    """out[i] = x[source[i]], for codes and scales."""
    if isinstance(x, QuantTensor):
        gather(x.data, source, fill, out.data)
        if x.block is not None:
            gather(x.scales, source, fill, out.scales)
        return
    rows = out.shape[0]
    width = out.nbytes // rows if rows else 0
    if width:
        launch("permute", "gather_rows", rows, 128, x, source, width, fill, out)
