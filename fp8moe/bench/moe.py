"""The whole layer, forward and backward, in every recipe."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe.bench.harness import Case, Size, host, routing


def cases(size: Size) -> Iterator[Case]:
    tokens, hidden, ffn, experts, topk = (256, 128, 128, 4, 2) if size == "quick" else (2048, 512, 256, 8, 2)
    rng = np.random.default_rng(0)
    bf16 = ml_dtypes.bfloat16
    x, dy = (rng.standard_normal((tokens, hidden), dtype=np.float32).astype(bf16) for _ in range(2))
    w13 = (rng.standard_normal((experts, 2 * ffn, hidden)) / hidden**0.5).astype(bf16)
    w2 = (rng.standard_normal((experts, hidden, ffn)) / ffn**0.5).astype(bf16)
    ids = routing(tokens, experts, topk)
    probs = rng.random((tokens, topk), dtype=np.float32)
    plain, _ = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="bf16")
    expected = plain.astype(np.float32)

    def run(recipe, x, dy, w13, w2, ids, probs):  # type: ignore[no-untyped-def]
        y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe=recipe)
        fp8moe.moe_backward(saved, dy)
        return y

    def right(y, *_):  # type: ignore[no-untyped-def]
        return bool(np.linalg.norm(host(y).astype(np.float32) - expected) < 0.125 * np.linalg.norm(expected))

    for recipe in ("bf16", "fp8_blockwise", "fp8_flow"):
        yield Case(
            f"layer forward+backward {recipe}",
            f"{tokens} x {hidden} x {ffn}, {experts} top-{topk}",
            (x, dy, w13, w2, ids, probs),
            lambda *arrays, recipe=recipe: run(recipe, *arrays),
            right,
            flops=2 * 3 * 3 * tokens * topk * hidden * ffn,
        )
