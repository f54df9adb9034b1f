"""Grouped GEMM: one matrix product per expert, over the rows in ``expert_offsets``.

FP8: operands are decoded exactly (code * scale; scales that are powers of two do not round), products are
accumulated in float32 over 128 values of K, and these partial sums are promoted to a float32 accumulator: the
two-level accumulation of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2). ``backend`` (CUDA kernel) and
``num_sms`` (SM limit) have no effect here, and neither have wgrad's ``tokens_per_expert``, as padding is
zeros.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fp8moe.formats import BFLOAT16
from fp8moe.records import PermutationPlan, Permuted, QuantTensor
from fp8moe.reference.numerics import decode_blocks, expert_ranges, quietly, to_f32
from fp8moe.reference.permute import permute

_BLOCK = 128


@quietly
def grouped_gemm(
    x: Any,
    w: Any,
    expert_offsets: np.ndarray,
    tokens_per_expert: np.ndarray | None,
    *,
    bias: np.ndarray | None = None,
    transpose_w: bool,
    backend: str | None,
    num_sms: int | None,
    out: np.ndarray,
) -> None:
    out[:] = np.zeros((), out.dtype)
    for e, (lo, hi) in enumerate(expert_ranges(expert_offsets, len(out))):
        if lo == hi:
            continue
        if isinstance(x, QuantTensor):
            total = _forward_blocks(x, w, e, lo, hi)
        else:
            total = _wide(x[lo:hi]) @ (_wide(w[e]) if transpose_w else _wide(w[e]).T)
        if bias is not None:
            total += bias[e]
        out[lo:hi] = total.astype(out.dtype)
        if tokens_per_expert is not None:
            out[min(lo + max(int(tokens_per_expert[e]), 0), hi) : hi] = np.zeros((), out.dtype)


@quietly
def add_grouped_gemm(
    x: np.ndarray,
    w: np.ndarray,
    expert_offsets: np.ndarray,
    *,
    transpose_w: bool,
    num_sms: int | None,
    out: np.ndarray,
) -> None:
    ranges = expert_ranges(expert_offsets, len(out))
    for e, (lo, hi) in enumerate(ranges):
        total = _wide(x[lo:hi]) @ (_wide(w[e]) if transpose_w else _wide(w[e]).T)
        out[lo:hi] = (_wide(out[lo:hi]) + total).astype(out.dtype)
    out[: ranges[0][0]] = out[ranges[-1][1] :] = np.zeros((), out.dtype)


def permute_gemm(
    x: QuantTensor,
    w: QuantTensor,
    plan: PermutationPlan,
    probs: np.ndarray | None,
    *,
    bias: np.ndarray | None = None,
    backend: str | None,
    num_sms: int | None,
    out: Permuted,
) -> None:
    codes, scales = (np.empty((plan.num_out_tokens, a.shape[1]), a.dtype) for a in (x.data, x.scales))
    permuted = replace(out, data=replace(x, data=codes, scales=scales))
    permute(x, plan, probs, fill_padding=True, zero_unweighted=False, out=permuted)
    options: dict[str, Any] = {"bias": bias, "transpose_w": False, "backend": backend, "num_sms": num_sms}
    operands = permuted.data, w, plan.expert_offsets, plan.tokens_per_expert
    grouped_gemm(*operands, **options, out=out.data)


def _forward_blocks(x: QuantTensor, w: QuantTensor, e: int, lo: int, hi: int) -> np.ndarray:
    scales_x = x.scales[:, lo:hi].T if x.layout == "gemm_ready" else x.scales[lo:hi]
    return _promoted(
        decode_blocks(x.data[lo:hi], scales_x, (1, _BLOCK), x.fmt),
        decode_blocks(w.data[e], w.scales[e], (_BLOCK, _BLOCK), w.fmt),
    )


def _promoted(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a [M, K] @ b [N, K].T, with one float32 partial sum per 128 values of K."""
    total = np.zeros((len(a), len(b)), np.float32)
    for k in range(0, a.shape[1], _BLOCK):
        total += a[:, k : k + _BLOCK] @ b[:, k : k + _BLOCK].T
    return total


@quietly
def grouped_gemm_wgrad(
    dy: Any,
    x: Any,
    expert_offsets: np.ndarray,
    tokens_per_expert: np.ndarray | None,
    *,
    accumulate: bool,
    first: int = 0,
    backend: str | None,
    num_sms: int | None,
    out: np.ndarray,
) -> None:
    out = out[:, first : first + dy.shape[1]]
    rows, transposed = dy.shape[0], isinstance(dy, QuantTensor) and dy.transposed
    first_block = 0
    for e, (lo, hi) in enumerate(expert_ranges(expert_offsets, rows)):
        if transposed:
            if lo < hi and lo % _BLOCK:
                raise ValueError(f"expert_offsets: got {lo}; wanted multiples of 128 for (128, 128) blocks")
            blocks = slice(lo // _BLOCK, -(-hi // _BLOCK))
            total = _promoted(
                *(
                    decode_blocks(q.data[:, lo:hi], q.scales[:, blocks], (_BLOCK, _BLOCK), q.fmt)
                    for q in (dy, x)
                )
            )
        elif isinstance(dy, QuantTensor):
            blocks = slice(first_block, first_block + -(-(hi - lo) // _BLOCK))
            total = _promoted(
                decode_blocks(dy.data[:, lo:hi], dy.scales[blocks].T, (1, _BLOCK), dy.fmt),
                decode_blocks(x.data[:, lo:hi], x.scales[blocks].T, (1, _BLOCK), x.fmt),
            )
            first_block = blocks.stop
        else:
            total = _wide(dy[lo:hi]).T @ _wide(x[lo:hi])
        if accumulate:
            total = total + _wide(out[e])
        out[e] = total.astype(out.dtype)


def _wide(x: np.ndarray) -> np.ndarray:
    return to_f32(x) if x.dtype == BFLOAT16 or x.dtype == np.float16 else x
