"""One step of AdamW on experts' weights, and FP8 codes of the updated weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fp8moe.records import Quantized, QuantTensor
from fp8moe.reference.numerics import quietly, widen
from fp8moe.reference.quantize import quantize_parts

F32 = np.dtype(np.float32)


@quietly
def adamw(
    param: np.ndarray,
    grad: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    step: np.ndarray,
    settings: np.ndarray,
    *,
    parts: int,
    first: int,
    of: int,
    maximize: bool,
    out: Quantized,
) -> None:
    """Each operation is rounded to float32, and results once more to the dtypes of w and of the averages."""
    lr, beta1, beta2, eps, weight_decay = settings.astype(np.float64)
    number = np.float64(step[0])
    decay, size = np.float32(lr * weight_decay), np.float32(lr / (1 - beta1**number))
    root = np.float32(1 / np.sqrt(1 - beta2**number))
    gradient = -widen(grad, F32) if maximize else widen(grad, F32)
    wide = widen(param, F32)
    wide = wide - decay * wide
    average = np.float32(beta1) * widen(exp_avg, F32) + np.float32(1 - beta1) * gradient
    square = np.float32(beta2) * widen(exp_avg_sq, F32) + np.float32(1 - beta2) * gradient * gradient
    wide = wide - size * average / (np.sqrt(square) * root + np.float32(eps))
    param[:], exp_avg[:], exp_avg_sq[:] = (
        x.astype(kept.dtype) for x, kept in ((wide, param), (average, exp_avg), (square, exp_avg_sq))
    )
    rows = out.rowwise.data.shape[1] // of
    sides = [*filter(None, (out.rowwise, out.columnwise))]
    own = [_rows_of(q, first * rows, (first + parts) * rows) for q in sides]
    copies = [replace(q, data=d.copy(), scales=s.copy()) for q, (d, s) in zip(sides, own, strict=True)]
    new = Quantized(*copies)
    quantize_parts((param,), count=parts, transposed=False, round_up=True, eps=0.0, out=new)
    for q, (data, scales) in zip(copies, own, strict=True):
        data[:], scales[:] = q.data, q.scales


def _rows_of(q: QuantTensor, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
    """Views of the codes and scales of some rows."""
    lead = (slice(None),) * (2 if q.transposed else 1)
    return q.data[(*lead, slice(lo, hi))], q.scales[(*lead, slice(lo // 128, -(-hi // 128)))]
