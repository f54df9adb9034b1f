"""Launchers of bias.cu, with the names and signatures of `fp8moe.reference.bias`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.formats import BFLOAT16
from fp8moe.kernels_cuda.permute import whole_vectors
from fp8moe.kernels_cuda.runtime.configuration import Configuration
from fp8moe.kernels_cuda.runtime.encodings import KINDS
from fp8moe.kernels_cuda.runtime.launch import launch, threads

VECTORS = 2  # 16-byte vectors of a row per thread of add_biases_bf16, at a time; must match bias.cu
MOST_THREADS = 256  # per block, must match bias.cu
CHUNK, SUM_THREADS = 128, 128  # rows and threads of chunk_sums, must match bias.cu


def add_biases_configuration(tokens: int, vectors: int) -> Configuration:
    """Configuration of add_biases_bf16: one block per token, of as few warps as a row needs in as few turns
    as possible."""
    turns = threads(vectors, VECTORS * MOST_THREADS)
    return Configuration(tokens, 32 * threads(vectors, 32 * VECTORS * turns))


def add_biases_backward_configuration(tokens: int, k: int) -> Configuration:
    """Configuration of add_biases_bf16_backward: one block per token, one warp per expert of it."""
    return Configuration(tokens, min(32 * k, MOST_THREADS))


def add_biases(y: Any, bias: Any, topk_ids: Any, topk_probs: Any, *, out: Any) -> None:
    experts, width = bias.shape
    tokens, k = topk_ids.shape
    ids = topk_ids, topk_ids.dtype.itemsize == 8
    probs = topk_probs, KINDS[topk_probs.dtype]
    if y.dtype == bias.dtype == BFLOAT16 and whole_vectors(y, bias, out):
        vectors = width // 8
        grid = add_biases_configuration(tokens, vectors).grid
        sizes = experts, k, vectors
        launch("bias", "add_biases_bf16", *grid, y, y.shape[1] // 8, bias, *ids, *probs, *sizes, out)
        return
    kinds = KINDS[y.dtype], KINDS[bias.dtype]
    sizes = experts, k, width
    launch("bias", "add_biases_rows", tokens, 256, y, y.shape[1], bias, *kinds, *ids, *probs, *sizes, out)


def add_biases_backward(grad: Any, bias: Any, topk_ids: Any, topk_probs: Any, *, out: Any) -> None:
    experts, width = bias.shape
    tokens, k = topk_ids.shape
    ids = topk_ids, topk_ids.dtype.itemsize == 8
    kind = KINDS[out.dtype]
    if grad.dtype == bias.dtype == BFLOAT16 and whole_vectors(grad, bias):
        grid = add_biases_backward_configuration(tokens, k).grid
        sizes = experts, k, width // 8
        launch("bias", "add_biases_bf16_backward", *grid, grad, bias, *ids, *sizes, kind, out)
        return
    kinds = KINDS[grad.dtype], KINDS[bias.dtype]
    sizes = experts, k, width
    launch("bias", "add_biases_rows_backward", tokens, 256, grad, bias, *kinds, *ids, *sizes, kind, out)


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
