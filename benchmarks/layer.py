"""The expert layer in torch, forward and backward, in every recipe: time, time outside of the matrix
products, memory kept for the backward. ``python -m fp8moe.benchmarks.layer [--out FILE]``, on CUDA."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fp8moe.adapters.torch_moe import FP8FlowMoE
from fp8moe.benchmarks.harness import append, commit, versions

# DeepSeek-V3's experts, as many as one GPU of an expert-parallel group holds
SHAPES = [(4096, 8), (16_384, 8), (16_384, 32)]
HIDDEN, FFN, TOPK = 7168, 2048, 8
ROUNDS, IN_A_ROW = 7, 4  # steps, as a training loop has them: the host waits for none
RECIPES = [("bf16", None), ("fp8_blockwise", None), ("fp8_flow", None), ("fp8_flow", "moe_expert")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="one small shape")
    arguments = parser.parse_args()
    shapes = [(512, 4, 512, 256, 2)] if arguments.quick else [(t, e, HIDDEN, FFN, TOPK) for t, e in SHAPES]
    print(f"{'shape':38} {'recipe':28} {'ms':>8} {'TFLOP/s':>8} {'outside %':>9} {'kept MiB':>9}")
    for shape in shapes:
        for row in measure(*shape):
            print(
                f"{row['shape']:38} {row['name']:28} {row['ms']:8.2f} {row['tflops']:8.0f} "
                f"{row['outside_percent']:9.1f} {row['kept_bytes'] / 2**20:9.0f}",
                flush=True,
            )
            append(arguments.out, row)


def measure(tokens: int, experts: int, hidden: int, ffn: int, topk: int) -> list[dict[str, Any]]:
    """A row for each recipe. They take turns: what the first were timed with cool, and the others when the
    device's power was short, would not compare."""
    place: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    steps, kept_bytes = [], []
    for recipe, recompute in RECIPES:
        torch.manual_seed(0)
        layer = FP8FlowMoE(hidden, ffn, experts, topk, recipe=recipe, recompute=recompute, **place)
        forward, backward = training_step(layer, tokens)

        def step(forward: Any = forward, backward: Any = backward) -> None:
            backward(forward())

        for _ in range(3):
            step()
        before = torch.cuda.memory_allocated()
        y = forward()
        kept_bytes.append(torch.cuda.memory_allocated() - before - y.nbytes)
        backward(y)
        del y
        steps.append(step)
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        for step, found in zip(steps, times, strict=True):
            step()  # what it finds in the caches is its own
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(IN_A_ROW):
                step()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / IN_A_ROW)
    rows = []
    for (recipe, recompute), step, found, kept in zip(RECIPES, steps, times, kept_bytes, strict=True):
        seconds = statistics.median(found) / 1e3
        inside, total = kernel_times(step)
        rows.append(
            {
                "topic": "layer",
                "name": recipe + ("" if recompute is None else f", {recompute}"),
                "shape": f"{tokens} tokens, {hidden} x {ffn}, {experts} experts top-{topk}",
                "device": torch.cuda.get_device_name(),
                "ms": seconds * 1e3,
                "tflops": 3 * 2 * 3 * tokens * topk * hidden * ffn / seconds / 1e12,
                "gemm_ms": inside,
                "kernel_ms": total,
                "outside_percent": 100 * (1 - inside / total),
                "kept_bytes": kept,
                "versions": {**versions(), "torch": torch.__version__},
                "commit": commit(),
                "command": "python -m fp8moe.benchmarks.layer",
            }
        )
    return rows


def training_step(
    layer: FP8FlowMoE, tokens: int
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
    """(forward, backward) on random rows, routed once. The weights' gradients come in their own dtype, as
    `grad`, in every recipe."""
    place: dict[str, Any] = {"device": layer.w13.device, "dtype": layer.w13.dtype}
    x = torch.randn(tokens, layer.hidden, **place).requires_grad_()
    dy = torch.randn(tokens, layer.hidden, **place)
    ids, probs = layer.route(x.detach())
    probs = probs.detach().requires_grad_()

    def forward() -> torch.Tensor:
        return layer(x, ids, probs)

    def backward(y: torch.Tensor) -> None:
        y.backward(dy)
        x.grad = probs.grad = layer.w13.grad = layer.w2.grad = None

    return forward, backward


def kernel_times(step: Any) -> tuple[float, float]:
    """(milliseconds in matrix products, in all kernels) of a step."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    inside = total = 0.0
    for event in profile.key_averages():
        spent = event.self_device_time_total / 1e3
        name = event.key.lower()
        total += spent
        inside += spent if any(word in name for word in ("gemm", "nvjet", "cutlass")) else 0.0
    return inside, total


if __name__ == "__main__":
    main()
