"""Launchers of permute.cu: the same names and signatures as `fp8moe.reference.permute`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.formats import BFLOAT16
from fp8moe.kernels_cuda.launch import KINDS, fill_bytes, launch, rows_of, scratch, threads
from fp8moe.records import DeviceArray, PermutationPlan, Permuted, QuantTensor, SortedChunks

# Tuned on an H200; kernels_cuda/README.md has the figures.
PIECE = 16_384  # bytes of a row that one warp moves at a time
ZEROS = 2048  # as in permute.cu
LONG_ROW = 7168  # from here on 16 warps a multiprocessor are enough, and 24 make a bad second wave
LONG_ROW_SHARED = 14_000
SHARE = 256  # vectors of a row that a block of merge_bf16 sums
FILLERS = 132  # blocks of merge_bf16_backward that write rows of zeros


def permute(x: Any, plan: PermutationPlan, probs: Any, *, fill_padding: bool, out: Any) -> None:
    data, scales = (x.data, x.scales) if isinstance(x, QuantTensor) else (x, None)
    moved, moved_scales = (out.data.data, out.data.scales) if isinstance(x, QuantTensor) else (out.data, None)
    if isinstance(x, QuantTensor) and x.block is None:
        scales = moved_scales = None
    if data.size and _whole_vectors(data, scales, moved, moved_scales):
        _permute_rows(data, scales, probs, plan, fill_padding, moved, moved_scales, out.probs)
        return
    source, column = sources(plan)
    gather(x, source, fill_padding, out.data)
    if probs is not None:
        rows, size = plan.num_out_tokens, probs.dtype.itemsize
        arguments = (probs, source, column, probs.shape[1], rows, size, fill_padding, out.probs)
        launch("permute", "gather_probs", threads(rows), 256, *arguments)


def _permute_rows(
    data: Any,
    scales: Any,
    probs: Any,
    plan: PermutationPlan,
    fill: bool,
    out: Any,
    out_scales: Any,
    out_probs: Any,
) -> None:
    tokens = data.shape[0]
    row_bytes = data.nbytes // tokens
    scale_bytes = 0 if scales is None else scales.nbytes // tokens
    pieces = -(-row_bytes // PIECE)
    piece_bytes = -(-row_bytes // pieces // 16) * 16
    launch(
        "permute",
        "permute_rows",
        tokens * pieces,
        32,
        data,
        row_bytes,
        piece_bytes,
        pieces,
        scales,
        scale_bytes,
        probs,
        0 if probs is None else probs.dtype.itemsize,
        plan.prob_columns,
        plan.row_id_map,
        plan.slots,
        plan.pad_offsets,
        plan.tokens_per_expert,
        plan.expert_offsets,
        plan.max_experts_per_token,
        plan.num_experts,
        plan.num_out_tokens,
        fill,
        row_bytes < LONG_ROW,  # short rows leave L2 first: 17.4 us against 18.1
        out,
        out_scales,
        out_probs,
        shared=max(ZEROS + piece_bytes + scale_bytes + 16, LONG_ROW_SHARED if row_bytes >= LONG_ROW else 0),
    )


def _whole_vectors(*arrays: Any) -> bool:
    """Whether every row of every array is a multiple of 16 bytes, and starts at one."""
    return all(
        a is None or (a.shape[0] and a.nbytes // a.shape[0] % 16 == 0 and a.nbytes and a.ptr % 16 == 0)
        for a in arrays
    )


def unpermute(x: Any, plan: PermutationPlan, merging_probs: Any, *, out: Any) -> None:
    tokens, width = out.shape
    probs = (
        merging_probs,
        0 if merging_probs is None else KINDS[merging_probs.dtype],
        plan.prob_columns,
        plan.max_experts_per_token,
        plan.num_out_tokens,
    )
    maps = (plan.row_id_map, plan.slots, plan.pad_offsets)
    if not isinstance(x, QuantTensor) and x.dtype == BFLOAT16 and x.size and _whole_vectors(x, out):
        vectors = width // 8
        grid = (tokens, -(-vectors // SHARE))
        launch("permute", "merge_bf16", grid, 128, x, *maps, *probs, vectors, SHARE, out)
        return
    launch("permute", "merge_rows", tokens, 256, *rows_of(x), *maps, *probs, width, KINDS[out.dtype], out)


def permute_backward(grad: Any, plan: PermutationPlan, grad_probs: Any, *, out: Any) -> None:
    unpermute(grad, plan, None, out=out[0])
    if grad_probs is None:
        return
    source, column = sources(plan)
    fill_bytes(out[1], 0)
    rows, size = plan.num_out_tokens, grad_probs.dtype.itemsize
    launch(
        "permute",
        "scatter_probs",
        threads(rows),
        256,
        grad_probs,
        source,
        column,
        plan.prob_columns,
        rows,
        size,
        out[1],
    )


def unpermute_backward(grad: Any, plan: PermutationPlan, x: Any, merging_probs: Any, *, out: Any) -> None:
    grad_x, grad_probs = out
    if merging_probs is None:
        permute(grad, plan, None, fill_padding=True, out=Permuted(grad_x, None, plan))
        return
    fill_bytes(grad_probs, 0)
    if grad.dtype == BFLOAT16 and grad.size and _whole_vectors(grad, x, grad_x):
        launch(
            "permute",
            "merge_bf16_backward",
            FILLERS + plan.num_tokens,
            256 if grad.shape[1] > 2048 else 64,
            grad,
            x,
            plan.row_id_map,
            plan.slots,
            plan.pad_offsets,
            plan.tokens_per_expert,
            plan.expert_offsets,
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
    launch(
        "permute",
        "merge_rows_backward",
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
    sorted_indices: DeviceArray,
    probs: Any,
    *,
    align_size: int,
    chunks_per_group: int,
    out: SortedChunks,
) -> None:
    rows_in, rows_out = _data(x).shape[0], _data(out.data).shape[0]
    segments = _segments(
        split_sizes, sorted_indices, align_size, chunks_per_group, rows_in, out.group_offsets
    )
    source = _segment_sources(segments, False, rows_in, rows_out)
    gather(x, source, True, out.data)
    if probs is not None:
        gather(probs, source, True, out.probs)


def sort_chunks_backward(
    grad: Any,
    split_sizes: DeviceArray,
    sorted_indices: DeviceArray,
    grad_probs: Any,
    *,
    align_size: int,
    chunks_per_group: int,
    out: Any,
) -> None:
    rows_in, rows_out = _data(out[0]).shape[0], _data(grad).shape[0]
    segments = _segments(split_sizes, sorted_indices, align_size, chunks_per_group, rows_in, None)
    source = _segment_sources(segments, True, rows_out, rows_in)
    gather(grad, source, True, out[0])
    if grad_probs is not None:
        gather(grad_probs, source, True, out[1])


def pad(x: Any, tokens_per_expert: DeviceArray, *, align_size: int, out: Any) -> None:
    rows_in, rows_out = _data(x).shape[0], _data(out).shape[0]
    segments = _segments(tokens_per_expert, None, align_size, 1, rows_in, None)
    gather(x, _segment_sources(segments, False, rows_in, rows_out), True, out)


def unpad(x: Any, tokens_per_expert: DeviceArray, *, align_size: int, out: Any) -> None:
    rows_in, rows_out = _data(x).shape[0], _data(out).shape[0]
    segments = _segments(tokens_per_expert, None, align_size, 1, rows_out, None)
    gather(x, _segment_sources(segments, True, rows_in, rows_out), True, out)


def sources(plan: PermutationPlan) -> tuple[Any, Any]:
    """int32 [num_out_tokens] each: the token of every row, and its probability's column; -1 for none."""
    source = scratch((plan.num_out_tokens,), np.int32)
    column = scratch((plan.num_out_tokens,), np.int32)
    fill_bytes(source, 0xFF)
    width = plan.max_experts_per_token
    launch(
        "permute",
        "row_sources",
        threads(plan.num_tokens * width),
        256,
        plan.row_id_map,
        plan.slots,
        plan.pad_offsets,
        plan.num_tokens,
        width,
        plan.num_out_tokens,
        source,
        column,
    )
    return source, column


def gather(x: Any, source: Any, fill: bool, out: Any) -> None:
    """out[i] = x[source[i]], codes and scales alike."""
    if isinstance(x, QuantTensor):
        gather(x.data, source, fill, out.data)
        if x.block is not None:
            gather(x.scales, source, fill, out.scales)
        return
    rows = out.shape[0]
    width = out.nbytes // rows if rows else 0
    if width:
        launch("permute", "gather_rows", rows, 128, x, source, width, fill, out)


def _segments(
    sizes: DeviceArray, order: DeviceArray | None, align: int, per_group: int, rows_in: int, offsets: Any
) -> Any:
    chunks = sizes.shape[0]
    starts, segments = scratch((chunks + 1,), np.int64), scratch((3, chunks), np.int64)
    launch(
        "permute",
        "chunk_segments",
        1,
        1,
        sizes,
        order,
        sizes.dtype.itemsize == 8,
        order is not None and order.dtype.itemsize == 8,
        chunks,
        align,
        per_group,
        rows_in,
        starts,
        segments,
        offsets,
    )
    return segments


def _segment_sources(segments: Any, backward: bool, rows_in: int, rows_out: int) -> Any:
    source = scratch((rows_out,), np.int32)
    chunks = segments.shape[1]
    launch(
        "permute",
        "segment_sources",
        threads(rows_out),
        256,
        segments,
        chunks,
        backward,
        rows_in,
        rows_out,
        source,
    )
    return source


def _data(x: Any) -> Any:
    return x.data if isinstance(x, QuantTensor) else x
