"""Launchers of bias.cu, with the names and signatures of `fp8moe.reference.bias`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.formats import BFLOAT16
from fp8moe.kernels_cuda.permute import whole_vectors
from fp8moe.kernels_cuda.runtime.encodings import KINDS
from fp8moe.kernels_cuda.runtime.launch import launch, multiprocessors, scratch, shared_limit, threads

# Must match bias.cu.
SLICE_LANES, SLICE_THREADS = 16, 256  # vectors of eight columns of a thread block's slice
TOKENS_AT_ONCE = 2 * SLICE_THREADS // SLICE_LANES
CHUNK, SUM_THREADS = 128, 128  # rows and threads of chunk_sums
SHARED_OF_MULTIPROCESSOR = 228 << 10  # at most; of 1 KB more per block than it asks for


def slices_configuration(
    tokens: int, vectors: int, shared: int, multiprocessors: int
) -> tuple[tuple[int, int], int]:
    """(blocks, threads) of add_biases_bf16 and dot_biases_bf16: no more groups of tokens than blocks fit on
    the device together, at most four on a multiprocessor."""
    slices = threads(vectors, SLICE_LANES)
    resident = multiprocessors * min(4, max(SHARED_OF_MULTIPROCESSOR // (shared + 1024), 1))
    groups = min(threads(tokens, TOKENS_AT_ONCE), max(resident // slices, 1))
    return (slices, groups), SLICE_THREADS


def add_biases(y: Any, bias: Any, topk_ids: Any, topk_probs: Any, *, out: Any) -> None:
    experts, width = bias.shape
    tokens, k = topk_ids.shape
    ids = topk_ids, topk_ids.dtype.itemsize == 8
    probs = topk_probs, KINDS[topk_probs.dtype]
    if shared := _slice_bytes(y, bias, out):
        grid = slices_configuration(tokens, width // 8, shared, multiprocessors())
        operands = y, bias, KINDS[bias.dtype], *ids, *probs, experts, k, tokens, width // 8, out
        launch("bias", "add_biases_bf16", *grid, *operands, shared=shared)
        return
    kinds = KINDS[y.dtype], KINDS[bias.dtype]
    sizes = experts, k, width
    launch("bias", "add_biases_rows", tokens, 256, y, bias, *kinds, *ids, *probs, *sizes, out)


def add_biases_backward(grad: Any, bias: Any, topk_ids: Any, topk_probs: Any, *, out: Any) -> None:
    experts, width = bias.shape
    tokens, k = topk_ids.shape
    ids = topk_ids, topk_ids.dtype.itemsize == 8
    kind = KINDS[out.dtype]
    if shared := _slice_bytes(grad, bias):
        grid = slices_configuration(tokens, width // 8, shared, multiprocessors())
        slices, entries = grid[0][0], tokens * k
        partial = scratch((slices, entries), np.float32)
        operands = grad, bias, KINDS[bias.dtype], *ids, experts, k, tokens, width // 8, partial
        launch("bias", "dot_biases_bf16", *grid, *operands, shared=shared)
        launch("bias", "sum_slices", threads(entries), 256, partial, slices, entries, kind, out)
        return
    kinds = KINDS[grad.dtype], KINDS[bias.dtype]
    sizes = experts, k, width
    launch("bias", "add_biases_rows_backward", tokens, 256, grad, bias, *kinds, *ids, *sizes, kind, out)


def _slice_bytes(rows: Any, bias: Any, *others: Any) -> int:
    """Shared memory of the kernels that hold a slice of all biases, 0 if they do not serve these arrays."""
    if rows.dtype != BFLOAT16 or bias.dtype not in (BFLOAT16, np.float32) or bias.shape[1] % 8:
        return 0
    size = bias.shape[0] * SLICE_LANES * 8 * bias.dtype.itemsize
    return size if whole_vectors(rows, bias, *others) and size <= shared_limit() else 0


def chunk_sums(x: Any, expert_offsets: Any, *, out: Any) -> None:
    rows, width = x.shape
    by_vectors = width % 8 == 0 and whole_vectors(x) and x.dtype != np.float64
    grid = (out.shape[0], threads(width // 8 if by_vectors else width, SUM_THREADS)), SUM_THREADS
    chunks = _chunks(out, expert_offsets, rows)
    launch("bias", "chunk_sums", *grid, x, KINDS[x.dtype], *chunks, width, by_vectors, out)


def expert_sums(sums: Any, expert_offsets: Any, *, rows: int, accumulate: bool, out: Any) -> None:
    experts, width = out.shape
    chunks = _chunks(sums, expert_offsets, rows)
    grid = (experts, threads(width)), 256
    launch("bias", "expert_sums", *grid, sums, KINDS[sums.dtype], *chunks, width, accumulate, out)


def _chunks(sums: Any, expert_offsets: Any, rows: int) -> tuple[Any, ...]:
    """Arguments that describe the chunks of `fp8moe.ops.bias.sums_of_chunks`: offsets, experts, rows, and
    whether all offsets are multiples of CHUNK."""
    return expert_offsets, expert_offsets.shape[0] - 1, rows, sums.shape[0] == rows // CHUNK
