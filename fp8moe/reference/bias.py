"""The bias of the experts' second GEMM, each row by itself; sums over the experts' rows, for the gradient of
the first GEMM's bias."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from fp8moe.reference.numerics import accumulator_of, expert_ranges, quietly, split_rows, widen
from fp8moe.runtime.loops import compiled


def add_biases(
    y: np.ndarray, bias: np.ndarray, topk_ids: np.ndarray, topk_probs: np.ndarray, *, out: np.ndarray
) -> None:
    wide = accumulator_of(out.dtype)
    total = np.zeros(out.shape, wide)
    biases, probs = widen(bias, wide), widen(topk_probs, wide)
    split_rows(_add_loop, len(out), biases, topk_ids, probs, total, work=out.size * topk_ids.shape[1])
    out[:] = (total + widen(y[:, : out.shape[1]], wide)).astype(out.dtype)


def add_biases_backward(
    grad: np.ndarray, bias: np.ndarray, topk_ids: np.ndarray, topk_probs: np.ndarray, *, out: np.ndarray
) -> None:
    wide = accumulator_of(grad.dtype)
    dots = np.zeros(out.shape, np.float64)
    rows, biases = widen(grad, wide), widen(bias, wide)
    split_rows(_dot_loop, len(out), rows, biases, topk_ids, dots, work=rows.size * topk_ids.shape[1])
    out[:] = widen(dots, wide).astype(out.dtype)


def _fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c: in float32 rounded once, as one instruction does, in float64 twice."""

    def instructions(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        a, b, c = operands
        if signature.return_type == types.float32:
            return builder.fma(a, b, c)
        return builder.fadd(builder.fmul(a, b), c)

    return c(a, b, c), instructions


_multiply_add: Any = intrinsic(_fused)


@compiled
def _add_loop(first, last, biases, ids, probs, total):  # type: ignore[no-untyped-def]
    for t in range(first, last):
        for j in range(ids.shape[1]):
            expert = ids[t, j]
            if 0 <= expert < biases.shape[0]:
                prob = probs[t, j]
                for i in range(biases.shape[1]):
                    total[t, i] = _multiply_add(prob, biases[expert, i], total[t, i])


@compiled
def _dot_loop(first, last, rows, biases, ids, dots):  # type: ignore[no-untyped-def]
    for t in range(first, last):
        for j in range(ids.shape[1]):
            expert = ids[t, j]
            if 0 <= expert < biases.shape[0]:
                total = 0.0
                for i in range(biases.shape[1]):
                    total += np.float64(rows[t, i]) * np.float64(biases[expert, i])
                dots[t, j] = total


CHUNK = 128  # rows


@quietly
def chunk_sums(x: np.ndarray, expert_offsets: np.ndarray, *, out: np.ndarray) -> None:
    for first, lo, hi in _chunks(out, expert_offsets, len(x)):
        for chunk, row in enumerate(range(lo, hi, CHUNK), first):
            out[chunk] = widen(x[row : min(row + CHUNK, hi)], out.dtype).sum(axis=0)


@quietly
def expert_sums(
    sums: np.ndarray, expert_offsets: np.ndarray, *, rows: int, accumulate: bool, out: np.ndarray
) -> None:
    for e, (first, lo, hi) in enumerate(_chunks(sums, expert_offsets, rows)):
        total = sums[first : first - (lo - hi) // CHUNK].sum(axis=0, dtype=np.float64)
        out[e] = total + out[e] if accumulate else total


def _chunks(sums: np.ndarray, expert_offsets: np.ndarray, rows: int) -> list[tuple[int, int, int]]:
    """(number of the first chunk, first row, last row) of each expert."""
    step = len(sums) != rows // CHUNK
    ranges = enumerate(expert_ranges(expert_offsets, rows))
    return [(lo // CHUNK + e * step, lo, hi) for e, (lo, hi) in ranges]
