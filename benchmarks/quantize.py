"""Quantise: one read, one write of codes and scales."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe.benchmarks.harness import Case, close, host, tall

SHAPES = [(4096, 2048), (48_128, 7168)]


def cases(quick: bool) -> list[Case]:
    return [case for shape in ([(512, 512)] if quick else SHAPES) for case in one_shape(*shape)]


def one_shape(rows: int, columns: int) -> list[Case]:
    x = tall(rows, columns).astype(ml_dtypes.bfloat16)
    shape = f"{rows} x {columns}"
    made = []
    for name, block, scale_bytes in (("1x128", (1, 128), 4 / 128), ("MXFP8 1x32", (1, 32), 1 / 32)):
        made.append(
            Case(
                f"quantize {name}",
                shape,
                (x,),
                lambda a, block=block: fp8moe.quantize(a, block=block),
                _right,
                nbytes=int(x.size * (3 + scale_bytes)),
            )
        )
    made.append(
        Case(
            "quantize 1x128 and 128x1",
            shape,
            (x,),
            lambda a: fp8moe.quantize(a, columnwise=True),
            lambda q, a: _right(q.rowwise, a) and _right_columns(q.columnwise, a),
            nbytes=int(x.size * (4 + 8 / 128)),
        )
    )
    q = fp8moe.quantize(x)
    made.append(
        Case(
            "dequantize 1x128 to bfloat16",
            shape,
            (q.data, q.scales),
            lambda codes, scales: fp8moe.dequantize(fp8moe.QuantTensor(codes, scales), dtype="bfloat16"),
            lambda y, *_: close(host(y[:512]).astype(np.float32), x[:512].astype(np.float32)),
            nbytes=int(x.size * (3 + 4 / 128)),
        )
    )
    return made


def _right(q: Any, x: np.ndarray) -> bool:
    """The first rows, dequantised."""
    rows = min(len(x), 512)
    top = fp8moe.QuantTensor(host(q.data[:rows]), host(q.scales[:rows]), q.fmt, q.block)
    return close(fp8moe.dequantize(top), x[:rows])


def _right_columns(q: Any, x: np.ndarray) -> bool:
    data, scales = host(q.data[:, :512]).copy(), host(q.scales[:4])
    back = fp8moe.dequantize(fp8moe.QuantTensor(data, scales, q.fmt, q.block))
    return close(back, x[: len(back)])
