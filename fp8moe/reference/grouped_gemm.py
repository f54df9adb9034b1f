"""Grouped GEMM: one matrix product an expert, over the rows that ``expert_offsets`` gives it.

FP8: the products of 128 values of the contraction are summed in float32, multiplied by both scales, and
added to a float32 sum (the two-level accumulation of DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.formats import BFLOAT16
from fp8moe.records import QuantTensor
from fp8moe.reference.numerics import DECODE, expert_ranges, to_f32

_BLOCK = 128


def grouped_gemm(x: Any, w: Any, expert_offsets: np.ndarray, *, transpose_w: bool, out: np.ndarray) -> None:
    out[:] = np.zeros((), out.dtype)
    for e, (lo, hi) in enumerate(expert_ranges(expert_offsets, len(out))):
        if lo == hi:
            continue
        if isinstance(x, QuantTensor):
            out[lo:hi] = _forward_blocks(x, w, e, lo, hi).astype(out.dtype)
        else:
            weight = _wide(w[e]) if transpose_w else _wide(w[e]).T
            out[lo:hi] = (_wide(x[lo:hi]) @ weight).astype(out.dtype)


def _forward_blocks(x: QuantTensor, w: QuantTensor, e: int, lo: int, hi: int) -> np.ndarray:
    scales_x = x.scales[:, lo:hi].T if x.layout == "gemm_ready" else x.scales[lo:hi]
    scales_w = np.repeat(w.scales[e], _BLOCK, axis=0)[: w.data.shape[1]]  # [N, K/128]
    total = np.zeros((hi - lo, w.data.shape[1]), np.float32)
    for block in range(scales_x.shape[1]):
        k = slice(block * _BLOCK, (block + 1) * _BLOCK)
        part = DECODE[x.fmt][x.data[lo:hi, k]] @ DECODE[w.fmt][w.data[e, :, k]].T
        total += part * scales_x[:, block, None] * scales_w[None, :, block]
    return total


def grouped_gemm_wgrad(
    dy: Any, x: Any, expert_offsets: np.ndarray, *, accumulate: bool, out: np.ndarray
) -> None:
    rows = dy.shape[0]
    first_block = 0
    for e, (lo, hi) in enumerate(expert_ranges(expert_offsets, rows)):
        if isinstance(dy, QuantTensor):
            total = np.zeros(out.shape[1:], np.float32)
            for block, r in enumerate(range(lo, hi, _BLOCK), start=first_block):
                m = slice(r, min(r + _BLOCK, hi))
                part = DECODE[dy.fmt][dy.data[:, m]] @ DECODE[x.fmt][x.data[:, m]].T
                total += part * dy.scales[block][:, None] * x.scales[block][None, :]
            first_block += -(-(hi - lo) // _BLOCK)
        else:
            total = _wide(dy[lo:hi]).T @ _wide(x[lo:hi])
        if accumulate:
            total = total + _wide(out[e])
        out[e] = total.astype(out.dtype)


def _wide(x: np.ndarray) -> np.ndarray:
    return to_f32(x) if x.dtype == BFLOAT16 or x.dtype == np.float16 else x
