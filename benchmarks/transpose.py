"""Scaling-aware transpose: one read and one write of codes and scales."""

from __future__ import annotations

import numpy as np

import fp8moe
from fp8moe.benchmarks.harness import Case, host


def cases(quick: bool) -> list[Case]:
    shapes = [(640, 512, 4)] if quick else [(6464, 7168, 8), (29024, 1280, 16)]
    return [one_shape(*shape) for shape in shapes]


def one_shape(rows: int, columns: int, groups: int) -> Case:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns), dtype=np.float32)
    x *= np.exp2(rng.integers(-3, 4, (rows, 1))).astype(np.float32)
    q = fp8moe.quantize(x)
    offsets = (np.arange(groups + 1) * rows // groups).astype(np.int32)
    values = fp8moe.dequantize(q)

    def right(t: fp8moe.QuantTensor, *_: np.ndarray) -> bool:
        t = fp8moe.QuantTensor(host(t.data), host(t.scales), t.fmt, t.block)
        back = fp8moe.dequantize(t, expert_offsets=offsets)
        return float(np.linalg.norm(back - values)) < 1e-4 * float(np.linalg.norm(values))

    return Case(
        "scaling_aware_transpose",
        f"{rows} x {columns}, {groups} groups",
        (q.data, q.scales, offsets),
        lambda data, scales, offsets: fp8moe.scaling_aware_transpose(
            fp8moe.QuantTensor(data, scales), offsets
        ),
        right,
        nbytes=2 * (q.data.nbytes + q.scales.nbytes),
    )
