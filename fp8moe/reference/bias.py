"""The bias of the experts' second product, each row by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from fp8moe.reference.numerics import accumulator_of, split_rows, widen
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
