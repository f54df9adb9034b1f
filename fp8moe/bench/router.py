"""The router's selection of experts, forward with and without losses, and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import fp8moe
from fp8moe.bench.harness import Case, Size, host

DEEPSEEK = fp8moe.RouterConfig(8, "sigmoid", num_groups=8, topk_groups=4, scaling_factor=2.5)
QWEN3 = fp8moe.RouterConfig(8)
#: (model, tokens, experts, configuration, whether there is a bias)
SHAPES = [("Qwen3-MoE", 16_384, 128, QWEN3, False), ("DeepSeek-V3", 16_384, 256, DEEPSEEK, True)]


def cases(size: Size) -> Iterator[Case]:
    for shape in [("quick", 512, 32, QWEN3, True)] if size == "quick" else SHAPES:
        yield from one_shape(*shape)


def one_shape(model: str, tokens: int, experts: int, config: fp8moe.RouterConfig, biased: bool) -> list[Case]:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((tokens, experts), dtype=np.float32)
    bias = rng.standard_normal(experts, dtype=np.float32) * 0.01
    grads = rng.standard_normal((tokens, config.topk), dtype=np.float32)
    inputs = (logits, bias) if biased else (logits,)
    expected = fp8moe.route(logits, config, expert_bias=bias if biased else None)
    expected_grad = fp8moe.route_backward(grads, logits, expected.topk_ids, config)

    def right(actual: fp8moe.Routed, *_: np.ndarray) -> bool:
        same = host(actual.topk_ids) == expected.topk_ids  # except where two scores differ by rounding
        return float(same.mean()) > 0.999 and bool(
            (np.abs(host(actual.topk_probs) - expected.topk_probs)[same] < 1e-5).all()
        )

    def is_close(actual: Any, *_: np.ndarray) -> bool:
        return bool((np.abs(host(actual) - expected_grad) < 1e-4).all())

    results = tokens * config.topk * 8
    shape = f"{model}: {tokens} x {experts}, top-{config.topk}"
    return [
        Case(
            "route",
            shape,
            inputs,
            lambda x, b=None: fp8moe.route(x, config, expert_bias=b),
            right,
            nbytes=logits.nbytes + results,
        ),
        Case(
            "route with losses",
            shape,
            inputs,
            lambda x, b=None: fp8moe.route(x, config, expert_bias=b, num_sequences=4),
            right,
            nbytes=logits.nbytes + results,
        ),
        Case(
            "route backward",
            shape,
            (grads, logits, expected.topk_ids),
            lambda grad, x, ids: fp8moe.route_backward(grad, x, ids, config),
            is_close,
            nbytes=2 * logits.nbytes + results,
        ),
    ]
