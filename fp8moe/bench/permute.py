"""Permute + pad: every token read once, every output row written once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe.bench.harness import Case, Size, host, routing

# shapes of the FP8-Flow-MoE paper's benchmark: tokens, experts, hidden, top-k, alignment
SHAPES = [
    (4096, 64, 2048, 6, 16),
    (4096, 64, 2048, 6, 128),
    (4096, 256, 7168, 8, 16),
    (4096, 256, 7168, 8, 128),
    (4096, 512, 9216, 8, 128),
]
QUICK, CPU = [(512, 32, 512, 4, 16)], SHAPES[:2]


def cases(size: Size) -> Iterator[Case]:
    for shape in {"quick": QUICK, "cpu": CPU, "cuda": SHAPES}[size]:
        yield from one_shape(*shape)
    if size == "cuda":
        yield from one_shape(4096, 256, 7168, 8, 128, skew=1.0)


def one_shape(tokens: int, experts: int, hidden: int, topk: int, align: int, skew: float = 0.0) -> list[Case]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, hidden), dtype=np.float32).astype(ml_dtypes.bfloat16)
    q = fp8moe.quantize(x)
    ids = routing(tokens, experts, topk, skew=skew)
    rows = int(fp8moe.plan_topk(ids, experts, align_size=align).expert_offsets[-1])
    shape = f"{tokens},{experts},{hidden},{topk} A={align}" + (" skewed" if skew else "")

    def plan(ids: Any) -> fp8moe.PermutationPlan:
        return fp8moe.plan_topk(ids, experts, align_size=align, num_out_tokens="exact")

    return [
        Case(
            "permute+pad bf16",
            shape,
            (x, ids),
            fp8moe.permute,
            partial(moved, tokens=x),
            nbytes=(tokens + rows) * 2 * hidden,
            prepare=lambda x, ids: (x, plan(ids)),
        ),
        Case(
            "permute+pad fp8+scales",
            shape,
            (q.data, q.scales, ids),
            fp8moe.permute,
            partial(moved, tokens=q.data),
            nbytes=(tokens + rows) * (hidden + 4 * q.scales.shape[1]),
            prepare=lambda data, scales, ids: (fp8moe.QuantTensor(data, scales), plan(ids)),
        ),
    ]


def moved(result: fp8moe.Permuted, *_: np.ndarray, tokens: np.ndarray) -> bool:
    """Every mapped row equals its token, byte for byte, and all other rows are zeros."""
    data = result.data.data if isinstance(result.data, fp8moe.QuantTensor) else result.data
    plan = result.plan
    bits = np.uint8 if tokens.dtype.itemsize == 1 else np.uint16
    width = plan.max_experts_per_token
    row_map, pad_offsets = host(plan.row_id_map), host(plan.pad_offsets)
    expected = np.zeros(data.shape, bits)
    for slot in range(width):
        routed = row_map[:, slot] >= 0
        rows = row_map[routed, slot] + pad_offsets[row_map[routed, width + slot]]
        expected[rows] = tokens.view(bits)[routed]
    return bool((host(data).view(bits) == expected).all())
