"""The expert layer beside SonicMoE (arXiv 2512.14080), each with its own router, forward and backward, in one
process: ``python -m fp8moe.benchmarks.sonicmoe [--out FILE]``, on CUDA, with ``pip install sonic-moe
'quack-kernels<0.5'`` (Python 3.12, Hopper or newer).

Weights change as in `fp8moe.benchmarks.layer`, by a fused AdamW step between the steps that is not timed, or
are unchanged: then steps follow each other, as micro-batches do. SonicMoE's autotuner runs before the first
timed step.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fp8moe.adapters.torch_moe import FP8FlowMoE, weights_unchanged
from fp8moe.benchmarks.harness import append
from fp8moe.benchmarks.layer import ROUNDS, SHAPES, TIMED, WARM, Contender, in_turn, training_step
from fp8moe.info import commit, versions

UNCHANGED = ", weights unchanged"
# (name, recipe or None for SonicMoE, whether an optimizer changes the weights between steps)
ROWS = [
    ("SonicMoE, bf16", None, True),
    ("fp8_flow", "fp8_flow", True),
    ("SonicMoE, bf16" + UNCHANGED, None, False),
    ("fp8_flow" + UNCHANGED, "fp8_flow", False),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for shape in sorted({*SHAPES} - {SHAPES[1]}, key=math.prod):  # the smallest first
        for row in measure(*shape):
            print(f"{row['shape']:46} {row['name']:34} {row['ms']:8.2f} ms", flush=True)
            append(arguments.out, row)


def measure(tokens: int, experts: int, hidden: int, ffn: int, topk: int) -> list[dict[str, Any]]:
    """One row per entry of ROWS, with the same weights, in turn."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    shared = FP8FlowMoE(hidden, ffn, experts, topk, **options)
    optimizer = torch.optim.AdamW(shared.parameters(), lr=1e-5, fused=True)
    contenders = []
    for _, recipe, changes in ROWS:
        inside: Callable[[], Any] = nullcontext
        if recipe is None:
            forward, backward = sonicmoe_step(shared, tokens)
        else:
            layer = FP8FlowMoE(hidden, ffn, experts, topk, recipe=recipe, device="meta")  # type: ignore[arg-type]
            layer.router, layer.w13, layer.w2 = shared.router, shared.w13, shared.w2
            forward, backward = training_step(layer, tokens)
            if not changes:
                inside = partial(weights_unchanged, layer)

        def step(forward: Any = forward, backward: Any = backward) -> None:
            backward(forward())

        for _ in range(3):
            with inside():
                step()
            optimizer.zero_grad()
        contenders.append(Contender(step, inside, changes, kept_bytes=0))
    for contender, measured in zip(contenders, in_turn(contenders, optimizer, 1), strict=True):
        ms = statistics.median(measured)
        contender.warm, contender.timed = (math.ceil(window / ms) for window in (WARM, TIMED))
    times = [statistics.median(measured) for measured in in_turn(contenders, optimizer, ROUNDS)]
    peers = {name: importlib.metadata.version(name) for name in ("sonic-moe", "quack-kernels")}
    return [
        {
            "topic": "layer_sonicmoe",
            "name": name,
            "shape": f"{tokens} tokens, {hidden} x {ffn}, {experts} experts top-{topk}",
            "device": torch.cuda.get_device_name(),
            "ms": ms,
            "tflops": 3 * 2 * 3 * tokens * topk * hidden * ffn / ms / 1e9,
            "versions": {**versions(), "torch": torch.__version__, **peers},
            "commit": commit(),
            "command": "python -m fp8moe.benchmarks.sonicmoe",
        }
        for (name, *_), ms in zip(ROWS, times, strict=True)
    ]


def sonicmoe_step(
    layer: FP8FlowMoE, tokens: int
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
    """`training_step` by SonicMoE, with the layer's weights and its own router."""
    from sonicmoe.enums import ActivationType  # type: ignore[import-not-found, unused-ignore]
    from sonicmoe.functional import (  # type: ignore[import-not-found, unused-ignore]
        moe_TC_softmax_topk_layer,
    )

    assert layer.router is not None
    router_weight = layer.router.weight
    x = torch.randn(tokens, layer.hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x)

    def forward() -> torch.Tensor:
        y, _, _ = moe_TC_softmax_topk_layer(
            x,
            router_weight,
            layer.w13.permute(1, 2, 0),  # SonicMoE's layout: experts last
            None,
            layer.w2.permute(1, 2, 0),
            None,
            layer.topk,
            torch.cuda.current_stream().cuda_stream,
            ActivationType.SWIGLU,
            is_inference_mode_enabled=False,
            concat_layout=True,  # gates before ups
        )
        return y  # type: ignore[no-any-return]

    def backward(y: torch.Tensor) -> None:
        y.backward(dy)
        x.grad = None

    return forward, backward


if __name__ == "__main__":
    main()
