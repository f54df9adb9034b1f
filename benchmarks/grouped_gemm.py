"""Grouped GEMM, in multiply-adds a second."""

from __future__ import annotations

import numpy as np

import fp8moe
from fp8moe.benchmarks.harness import Case, host


def cases(quick: bool) -> list[Case]:
    rows, width, depth, groups = (512, 256, 256, 4) if quick else (4096, 1024, 1024, 8)
    rng = np.random.default_rng(0)
    x = fp8moe.quantize(rng.standard_normal((rows, depth), dtype=np.float32))
    w = fp8moe.quantize_weights(rng.standard_normal((groups, width, depth), dtype=np.float32)).rowwise
    offsets = (np.arange(groups + 1) * rows // groups).astype(np.int32)
    last = fp8moe.dequantize(x)[-1].astype(np.float64) @ fp8moe.dequantize(w)[-1].astype(np.float64).T

    def run(xd, xs, wd, ws, offsets):  # type: ignore[no-untyped-def]
        return fp8moe.grouped_gemm(
            fp8moe.QuantTensor(xd, xs), fp8moe.QuantTensor(wd, ws, block=(128, 128)), offsets
        )

    return [
        Case(
            "grouped_gemm fp8",
            f"{rows} x {width} x {depth}, {groups} groups",
            (x.data, x.scales, w.data, w.scales, offsets),
            run,
            lambda y, *_: bool(
                np.linalg.norm(host(y)[-1].astype(np.float64) - last) < 2.0**-8 * np.linalg.norm(last)
            ),
            flops=2 * rows * width * depth,
        )
    ]
