"""SwiGLU fused with quantise, forward and backward."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe.benchmarks.harness import Case, host


def cases(quick: bool) -> list[Case]:
    rows, width = (512, 256) if quick else (8192, 2048)
    rng = np.random.default_rng(0)
    h = rng.standard_normal((rows, 2 * width), dtype=np.float32).astype(ml_dtypes.bfloat16)
    grad = rng.standard_normal((rows, width), dtype=np.float32).astype(ml_dtypes.bfloat16)
    probs = rng.random(rows, dtype=np.float32)
    a, b = h[:, :width].astype(np.float32), h[:, width:].astype(np.float32)
    y = a / (1 + np.exp(-a)) * b * probs[:, None]
    shape = f"{rows} x {width}"
    scales = 4 / 128
    return [
        Case(
            "swiglu*prob+quantize",
            shape,
            (h, probs),
            fp8moe.swiglu_quantize,
            lambda q, *_: _close(host(fp8moe.dequantize(q)), y),
            nbytes=int(rows * width * (5 + scales)) + probs.nbytes,
        ),
        Case(
            "swiglu backward+quantize",
            shape,
            (grad, h, probs),
            fp8moe.swiglu_quantize_backward,
            lambda g, *_: _close(
                host(fp8moe.dequantize(g.dh))[:, width:],
                grad.astype(np.float32) * a / (1 + np.exp(-a)) * probs[:, None],
            ),
            nbytes=int(rows * width * (8 + 2 * scales)) + 2 * probs.nbytes,
        ),
    ]


def _close(got: np.ndarray, wanted: np.ndarray) -> bool:
    return float(np.linalg.norm(got - wanted)) < 2.0**-4 * float(np.linalg.norm(wanted))
