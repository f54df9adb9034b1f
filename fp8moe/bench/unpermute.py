"""Unpermute + unpad, and the backward of permute and unpermute: sums over each token's rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe.bench.harness import Case, Size, host, routing
from fp8moe.bench.permute import QUICK

SHAPES = [(4096, 64, 2048, 6, 16), (4096, 256, 7168, 8, 16)]


def cases(size: Size) -> Iterator[Case]:
    for shape in {"quick": QUICK, "cpu": SHAPES[:1], "cuda": SHAPES}[size]:
        yield from one_shape(*shape)


def one_shape(tokens: int, experts: int, hidden: int, topk: int, align: int) -> list[Case]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, hidden), dtype=np.float32).astype(ml_dtypes.bfloat16)
    ids = routing(tokens, experts, topk)
    probs = rng.random((tokens, topk), dtype=np.float32)
    rows = int(fp8moe.plan_topk(ids, experts, align_size=align).expert_offsets[-1])
    shape = f"{tokens},{experts},{hidden},{topk} A={align}"
    row = 2 * hidden
    sums = topk * x.astype(np.float32)

    def plan(ids: Any) -> fp8moe.PermutationPlan:
        return fp8moe.plan_topk(ids, experts, align_size=align, num_out_tokens="exact")

    def spread(x: Any, ids: Any, probs: Any) -> tuple[Any, ...]:
        moved = fp8moe.permute(x, plan(ids), probs)
        return moved.data, moved.plan, moved.probs

    return [
        Case(
            "unpermute+unpad bf16",
            shape,
            (x, ids),
            fp8moe.unpermute,
            lambda y, *_: _close(y, sums),
            nbytes=(tokens * topk + tokens) * row,
            prepare=lambda x, ids: (fp8moe.permute(x, plan(ids)).data, plan(ids)),
        ),
        Case(
            "permute backward, prob grads",
            shape,
            (x, ids, probs),
            fp8moe.permute_backward,
            lambda grads, *_: _close(grads[0], sums) and bool((host(grads[1]) == probs).all()),
            nbytes=(tokens * topk + tokens) * row + 2 * probs.nbytes,
            prepare=spread,
        ),
        Case(
            "unpermute backward, merging probs",
            shape,
            (x, ids, probs),
            fp8moe.unpermute_backward,
            lambda grads, *_: bool(
                np.allclose(host(grads[1]), (x.astype(np.float32) ** 2).sum(1, keepdims=True), rtol=1e-4)
            ),
            nbytes=(tokens + tokens * topk + rows) * row,
            prepare=lambda x, ids, probs: (x, plan(ids), fp8moe.permute(x, plan(ids)).data, probs),
        ),
    ]


def _close(y: Any, expected: np.ndarray) -> bool:
    """Equal rows are summed exactly in float32, then rounded once to bfloat16."""
    return bool(np.allclose(host(y).astype(np.float32), expected, rtol=2.0**-8))
