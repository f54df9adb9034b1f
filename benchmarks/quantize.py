"""Quantise: one read, one write of codes and scales."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe.benchmarks.harness import Case, host


def cases(quick: bool) -> list[Case]:
    rows, columns = (512, 512) if quick else (4096, 2048)
    x = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    x = x.astype(ml_dtypes.bfloat16)
    shape = f"{rows} x {columns}"
    made = []
    for name, block, scale_bytes in (("1x128", (1, 128), 4 / 128), ("MXFP8 1x32", (1, 32), 1 / 32)):
        made.append(
            Case(
                f"quantize {name}",
                shape,
                (x,),
                lambda a, block=block: fp8moe.quantize(a, block=block),
                lambda q, a: _close(host(fp8moe.dequantize(q)), a),
                nbytes=int(x.size * (3 + scale_bytes)),
            )
        )
    made.append(
        Case(
            "quantize 1x128 and 128x1",
            shape,
            (x,),
            lambda a: fp8moe.quantize(a, columnwise=True),
            lambda q, a: all(_close(host(fp8moe.dequantize(t)), a) for t in (q.rowwise, q.columnwise)),
            nbytes=int(x.size * (4 + 8 / 128)),
        )
    )
    return made


def _close(got: np.ndarray, x: np.ndarray) -> bool:
    wide = x.astype(np.float32)
    return float(np.linalg.norm(got - wide)) < 2.0**-4 * float(np.linalg.norm(wide))
