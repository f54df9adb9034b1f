"""Planning: the row map for a routing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import fp8moe
from fp8moe.bench.harness import Case, Size, host, routing


def cases(size: Size) -> Iterator[Case]:
    for shape in [(512, 32, 4)] if size == "quick" else [(4096, 256, 8), (4096, 64, 6)]:
        yield from both(*shape)


def both(tokens: int, experts: int, topk: int) -> list[Case]:
    ids = routing(tokens, experts, topk)
    mask = np.zeros((tokens, experts), bool)
    np.put_along_axis(mask, ids.astype(np.int64), True, axis=1)
    counts = np.bincount(ids.reshape(-1), minlength=experts)
    shape = f"{tokens} x {experts} top-{topk}"

    def right(plan: fp8moe.PermutationPlan, *_: np.ndarray) -> bool:
        return bool((host(plan.tokens_per_expert) == counts).all())

    return [
        Case("plan_topk", shape, (ids,), lambda a: fp8moe.plan_topk(a, experts, align_size=16), right),
        Case(
            "plan_routing_map",
            shape,
            (mask,),
            lambda a: fp8moe.plan_routing_map(a, topk=topk, align_size=16),
            right,
        ),
    ]
