"""Chunk sort and pad: contiguous chunks of rows, each read once and written once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe.bench.harness import Case, Size, host

SHAPES = [(256, 32_768, 7168), (256, 32_768, 2048)]


def cases(size: Size) -> Iterator[Case]:
    for shape in {"quick": [(16, 512, 512)], "cpu": [(64, 8192, 2048)], "cuda": SHAPES}[size]:
        yield from one_shape(*shape)


def one_shape(chunks: int, rows: int, hidden: int) -> list[Case]:
    rng = np.random.default_rng(0)
    sizes = np.bincount(rng.integers(0, chunks, rows), minlength=chunks).astype(np.int32)
    order = rng.permutation(chunks).astype(np.int32)
    x = rng.standard_normal((rows, hidden), dtype=np.float32).astype(ml_dtypes.bfloat16)
    q = fp8moe.quantize(x)
    shape = f"{chunks} chunks, {rows} x {hidden}"
    starts = np.concatenate(([0], np.cumsum(sizes)))
    source = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
    fp8_row = hidden + 4 * q.scales.shape[1]
    padded = int((-(-sizes // 16) * 16).sum())

    def right(result: Any, *_: np.ndarray) -> bool:
        if isinstance(result.data, fp8moe.QuantTensor):
            data, scales = host(result.data.data), host(result.data.scales)
            return bool((data == q.data[source]).all() and (scales == q.scales[source]).all())
        return bool((host(result.data).view(np.uint16) == x.view(np.uint16)[source]).all())

    def padded_right(result: Any, *_: np.ndarray) -> bool:
        ends = np.cumsum(-(-sizes // 16) * 16)
        expected = np.zeros((padded, hidden), np.uint16)
        for start, size, end in zip(starts, sizes, ends, strict=False):
            row = end - -(-size // 16) * 16
            expected[row : row + size] = x.view(np.uint16)[start : start + size]
        return bool((host(result).view(np.uint16) == expected).all())

    return [
        Case(
            "sort_chunks fp8+scales",
            shape,
            (q.data, q.scales, sizes, order),
            fp8moe.sort_chunks,
            right,
            nbytes=2 * rows * fp8_row,
            prepare=lambda data, scales, *rest: (fp8moe.QuantTensor(data, scales), *rest),
        ),
        Case(
            "sort_chunks bf16", shape, (x, sizes, order), fp8moe.sort_chunks, right, nbytes=4 * rows * hidden
        ),
        Case(
            "pad bf16 A=16",
            shape,
            (x, sizes),
            lambda x, sizes: fp8moe.pad(x, sizes, 16, num_out_tokens=padded),
            padded_right,
            nbytes=2 * (rows + padded) * hidden,
        ),
    ]
