"""Scaling-aware transpose: one read and one write of codes and scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import fp8moe
from fp8moe.bench.harness import Case, Size, close, host, routing, tall

TO = {"column": "", "block": " to blocks"}  # suffix of the name, by target
# rows, columns, groups: shapes of the FP8-Flow-MoE paper, and DeepSeek-V3's permuted rows
CPU = [(6464, 2048, 8)]
SHAPES = [(6464, 7168, 8), (29_024, 1280, 16), (12_496, 5120, 20), (48_128, 7168, 256)]


def cases(size: Size) -> Iterator[Case]:
    for shape in {"quick": [(640, 512, 4)], "cpu": CPU, "cuda": SHAPES}[size]:
        yield one_shape(*shape, 128)
    if size == "cuda":
        for target in TO:  # as with a plan of align_size=128
            yield one_shape(48_128, 7168, 256, 128, 128, target)
        yield one_shape(12_496, 5120, 20, 32)
        for target in TO:
            yield permuted(4096, 256, 7168, 8, target)


def one_shape(
    rows: int, columns: int, groups: int, block: int, align: int = 16, target: str = "column"
) -> Case:
    rng = np.random.default_rng(0)
    x = tall(rows, columns) * np.exp2(rng.integers(-3, 4, (rows, 1))).astype(np.float32)
    q = fp8moe.quantize(x, block=(1, block))
    # every group has a multiple of 16 rows, as FP8 GEMMs without a grouped kernel require, or of `align`
    counts = align * np.bincount(rng.integers(0, groups, rows // align), minlength=groups)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)

    def right(t: Any, *_: np.ndarray) -> bool:
        end = int(offsets[1])  # the first group
        return close(back(t, end), fp8moe.dequantize(q)[:end] if rows < 10_000 else x[:end])

    return Case(
        "scaling_aware_transpose" + (" MXFP8" if block == 32 else "") + TO[target],
        f"{rows} x {columns}, {groups} groups" + (f" in multiples of {align}" if align > 16 else ""),
        (q.data, q.scales, offsets),
        lambda data, scales, offsets: fp8moe.scaling_aware_transpose(
            fp8moe.QuantTensor(data, scales, block=(1, block)), offsets, align_size=align, target=target
        ),
        right,
        nbytes=2 * (q.data.nbytes + q.scales.nbytes),
    )


def back(t: Any, rows: int) -> np.ndarray:
    """The first rows, dequantised."""
    strips = -(-rows // t.block[0])
    scales = host(t.scales[:, :strips] if t.transposed else t.scales[:strips]).copy()
    return fp8moe.dequantize(replace(t, data=host(t.data[:, :rows]).copy(), scales=scales))


def permuted(tokens: int, experts: int, columns: int, topk: int, target: str) -> Case:
    q = fp8moe.quantize(tall(tokens, columns))
    ids = routing(tokens, experts, topk)
    plan = fp8moe.plan_topk(ids, experts, align_size=128)
    rows = int(plan.expert_offsets[-1])

    def right(t: Any, *_: np.ndarray) -> bool:
        expected = fp8moe.permute(q, plan).data
        return close(
            back(t, 1280), fp8moe.dequantize(fp8moe.QuantTensor(expected.data[:1280], expected.scales[:1280]))
        )

    return Case(
        "permute_transpose" + TO[target],
        f"{tokens},{experts},{columns},{topk} -> {rows}",
        (q.data, q.scales, ids),
        lambda q, plan: fp8moe.permute_transpose(q, plan, target=target),
        right,
        # one read of the permuted rows, as in a transpose alone, and one write
        nbytes=2 * rows * (columns + 4 * q.scales.shape[1]),
        prepare=lambda data, scales, ids: (
            fp8moe.QuantTensor(data, scales),
            fp8moe.plan_topk(ids, experts, align_size=128, num_out_tokens="exact"),
        ),
    )
