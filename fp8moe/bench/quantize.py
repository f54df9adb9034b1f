"""Quantise: one read of the input, one write of codes and scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe.bench.harness import Case, Size, close, host, tall

SHAPES = [(4096, 2048), (48_128, 7168)]
# [experts, N, K]: w13 and w2 of the layers in benchmarks/layer.py
WEIGHTS = [
    (8, 4096, 7168),
    (8, 7168, 2048),
    (32, 4096, 7168),
    (32, 7168, 2048),
    (128, 2048, 4096),
    (128, 4096, 1024),
    (32, 3072, 4096),
    (32, 4096, 1536),
    (128, 1536, 2048),
    (128, 2048, 768),
]
WIDE = WEIGHTS[:3]  # also in float32


def cases(size: Size) -> Iterator[Case]:
    for shape in {"quick": [(512, 512)], "cpu": SHAPES[:1], "cuda": SHAPES}[size]:
        yield from one_shape(*shape)
    few = [(2, 256, 384)] if size == "quick" else [(8, 1536, 2048)]
    for dtype, many in ((ml_dtypes.bfloat16, WEIGHTS), (np.float32, WIDE)):
        for experts, n, k in many if size == "cuda" else few:
            yield weights(experts, n, k, dtype)


def one_shape(rows: int, columns: int) -> list[Case]:
    x = tall(rows, columns).astype(ml_dtypes.bfloat16)
    shape = f"{rows} x {columns}"
    result = []
    for name, block, scale_bytes in (("1x128", (1, 128), 4 / 128), ("MXFP8 1x32", (1, 32), 1 / 32)):
        result.append(
            Case(
                f"quantize {name}",
                shape,
                (x,),
                lambda a, block=block: fp8moe.quantize(a, block=block),
                _right,
                nbytes=int(x.size * (3 + scale_bytes)),
            )
        )
    result.append(
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
    result.append(
        Case(
            "dequantize 1x128 to bfloat16",
            shape,
            (q.data, q.scales),
            lambda codes, scales: fp8moe.dequantize(fp8moe.QuantTensor(codes, scales), dtype="bfloat16"),
            lambda y, *_: close(host(y[:512]).astype(np.float32), x[:512].astype(np.float32)),
            nbytes=int(x.size * (3 + 4 / 128)),
        )
    )
    return result


def weights(experts: int, rows: int, columns: int, dtype: Any) -> Case:
    """Weights in both orientations, with (128, 128) blocks."""
    top = tall(min(experts * rows, 4096), columns).astype(dtype)  # rows repeat, as in tall
    w = np.resize(top, (experts, rows, columns))
    return Case(
        f"quantize weights, {w.dtype}",
        f"{experts} x {rows} x {columns}",
        (w,),
        lambda w: fp8moe.quantize_weights(w),
        _right_weights,
        nbytes=int(w.nbytes + w.size * (2 + 8 / 128**2)),
    )


def _right_weights(q: Any, w: np.ndarray) -> bool:
    """Compares the last expert's first rows of blocks, and the same part of its transpose, bit for bit."""
    expected = fp8moe.quantize_weights(w[-1:, :128])
    pairs = (
        (q.rowwise.data[-1, :128], expected.rowwise.data[0]),
        (q.rowwise.scales[-1, :1], expected.rowwise.scales[0]),
        (q.columnwise.data[-1, :, :128], expected.columnwise.data[0]),
        (q.columnwise.scales[-1, :, :1], expected.columnwise.scales[0]),
    )
    return all(np.array_equal(host(a), b) for a, b in pairs)


def _right(q: Any, x: np.ndarray) -> bool:
    """Compares the first rows, dequantised."""
    rows = min(len(x), 512)
    top = fp8moe.QuantTensor(host(q.data[:rows]), host(q.scales[:rows]), q.fmt, q.block)
    return close(fp8moe.dequantize(top), x[:rows])


def _right_columns(q: Any, x: np.ndarray) -> bool:
    data, scales = host(q.data[:, :512]).copy(), host(q.scales[:4])
    back = fp8moe.dequantize(fp8moe.QuantTensor(data, scales, q.fmt, q.block))
    return close(back, x[: len(back)])
