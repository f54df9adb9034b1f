"""Forward and backward of the expert layer in torch, including the router, in every recipe: time, the share
of making the weights' FP8 copies, non-GEMM time, memory saved for backward. ``python -m
benchmarks.layer [--out FILE]``, on CUDA.

A fused AdamW step changes the weights between steps; it is not timed. Rows named "weights unchanged" run
inside `weights_unchanged`, without making copies: a micro-batch after the first, or inference with gradients.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8moe.bench.harness import append
from fp8moe.info import commit, versions
from fp8moe.runtime.tables import line
from fp8moe.torch import FP8FlowMoE, weights_unchanged

#: title and width of the printed columns
COLUMNS = {
    **{"shape": -46, "recipe": -40, "ms": 9, "of bf16": 9},
    **{"copies %": 9, "other %": 9, "saved MiB": 9},
}

# (tokens, experts, hidden, ffn, top-k). The first three: DeepSeek-V3's experts, with the number that one GPU
# of an expert-parallel group holds; then layers with smaller experts, down to Qwen3-30B's
SHAPES = [
    (4096, 8, 7168, 2048, 8),
    (16_384, 8, 7168, 2048, 8),
    (16_384, 32, 7168, 2048, 8),
    (32_768, 128, 4096, 1024, 8),
    (8192, 32, 4096, 1536, 8),
    (16_384, 128, 2048, 768, 8),
]
QUICK = [(512, 4, 512, 256, 2)]
ROUNDS = 4
# Milliseconds of warm-up steps and of timed steps of one recipe. A training run has one recipe, and its
# products soon run at the clock that the power limit allows; with only 5 steps of each of five recipes in
# turn, the GPU cools during the lighter ones: fp8_flow was then 1.27x bf16 for 16,384 x 2048 x 768, and with
# three recipes in turn (on another GPU) 1.39x.
WARM, TIMED = 250.0, 250.0
# (name, options, whether the FP8 copies of the weights are kept)
RECIPES: list[tuple[str, dict[str, Any], bool]] = [
    ("bf16", {"recipe": "bf16"}, False),
    ("fp8_flow", {}, False),
    ("fp8_flow, weights unchanged", {}, True),
    ("fp8_flow, weights unchanged, h in FP8", {"save": "fp8"}, True),
    ("fp8_flow, moe_expert", {"recompute": "moe_expert"}, False),
    ("fp8_blockwise", {"recipe": "fp8_blockwise"}, False),
]
PRODUCTS = ("gemm", "nvjet", "cutlass")  # parts of kernel names
COPIES = ("quantize_weights",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="one small shape")
    arguments = parser.parse_args()
    print(line(COLUMNS, COLUMNS.values()))
    for shape in QUICK if arguments.quick else SHAPES:
        rows = measure(*shape)
        for row in rows:
            ratio, saved = rows[0]["ms"] / row["ms"], row["kept_bytes"] / 2**20
            percents = f"{row['copies_percent']:.1f}", f"{row['outside_percent']:.1f}"
            cells = row["shape"], row["name"], f"{row['ms']:.2f}", f"{ratio:.2f}x", *percents, f"{saved:.0f}"
            print(line(cells, COLUMNS.values()), flush=True)
            append(arguments.out, row)


@dataclass
class Contender:
    """One row: its step, the context in which its steps run, and its numbers of warm-up and timed steps."""

    step: Callable[[], None]
    inside: Callable[[], Any]
    changes: bool
    kept_bytes: int
    warm: int = 0
    timed: int = 3

    def steps(self) -> list[bool]:
        """For each of its consecutive steps, whether it is timed."""
        return [False] * self.warm + [True] * self.timed


def measure(tokens: int, experts: int, hidden: int, ffn: int, topk: int) -> list[dict[str, Any]]:
    """One row per recipe, with the same weights. The recipes run alternately, so that a rise of the GPU's
    temperature affects all of them."""
    options_of_weights: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(0)
    shared = FP8FlowMoE(hidden, ffn, experts, topk, **options_of_weights)
    optimizer = torch.optim.AdamW(shared.parameters(), lr=1e-5, fused=True)
    contenders = []
    for _, options, keeps_copies in RECIPES:
        layer = FP8FlowMoE(hidden, ffn, experts, topk, **options, device="meta")
        layer.router, layer.w13, layer.w2 = shared.router, shared.w13, shared.w2
        forward, backward = training_step(layer, tokens)

        def step(forward: Any = forward, backward: Any = backward) -> None:
            backward(forward())

        inside = (lambda layer=layer: weights_unchanged(layer)) if keeps_copies else nullcontext
        with inside():
            for _ in range(3):
                step()
                optimizer.zero_grad()
            before = torch.cuda.memory_allocated()
            y = forward()
            kept_bytes = torch.cuda.memory_allocated() - before - y.nbytes
            backward(y)
            optimizer.zero_grad()
            del y
        contenders.append(Contender(step, inside, not keeps_copies, kept_bytes))
    for contender, measured in zip(contenders, in_turn(contenders, optimizer, 1), strict=True):
        ms = statistics.median(measured)
        contender.warm, contender.timed = (math.ceil(window / ms) for window in (WARM, TIMED))
    times = [statistics.median(measured) for measured in in_turn(contenders, optimizer, ROUNDS)]
    kernels = kernel_times(contenders, optimizer)
    return [
        {
            "topic": "layer",
            "name": name,
            "shape": f"{tokens} tokens, {hidden} x {ffn}, {experts} experts top-{topk}",
            "device": torch.cuda.get_device_name(),
            "ms": ms,
            "tflops": 3 * 2 * 3 * tokens * topk * hidden * ffn / ms / 1e9,
            **shares,
            "kept_bytes": contender.kept_bytes,
            "versions": {**versions(), "torch": torch.__version__},
            "commit": commit(),
            "command": "python -m benchmarks.layer",
        }
        for (name, *_), contender, ms, shares in zip(RECIPES, contenders, times, kernels, strict=True)
    ]


def in_turn(contenders: list[Contender], optimizer: Any, rounds: int) -> list[list[float]]:
    """Milliseconds of every contender's timed steps. The steps of one contender are consecutive, as in a
    training loop (the host does not wait between them). If its weights change, the optimizer steps between
    them."""
    events: list[list[Any]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, pairs in zip(contenders, events, strict=True):
            with contender.inside():
                for timed in contender.steps():
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    marker()
                    start.record()
                    contender.step()
                    end.record()
                    marker()
                    if contender.changes:
                        optimizer.step()
                    optimizer.zero_grad()
                    if timed:
                        pairs.append((start, end))
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) for start, end in pairs] for pairs in events]


def marker() -> None:
    """A kernel that nothing else launches, which divides the profile into steps: 2 us."""
    torch.cuda._sleep(1)


def training_step(
    layer: FP8FlowMoE, tokens: int
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
    """(forward, backward) on random rows, through the layer's router. The weights' gradients are stored as
    ``grad`` in the weights' dtype, in every recipe."""
    options: dict[str, Any] = {"device": layer.w13.device, "dtype": layer.w13.dtype}
    x = torch.randn(tokens, layer.hidden, **options).requires_grad_()
    dy = torch.randn(tokens, layer.hidden, **options)

    def forward() -> torch.Tensor:
        return layer(x)

    def backward(y: torch.Tensor) -> None:
        y.backward(dy)
        x.grad = None

    return forward, backward


def kernel_times(contenders: list[Contender], optimizer: Any) -> list[dict[str, Any]]:
    """Milliseconds per step in products, in making FP8 copies and in all kernels, their shares, and
    microseconds of each kernel, from one more run of the timed loop under the profiler. If a kernel's blocks
    start before the previous kernel ends, the time for which they wait is included in the kernel's."""
    with profiled() as profile:
        in_turn(contenders, optimizer, 1)
    traced = profile.profiler.kineto_results.events()
    kernels = sorted(
        (e for e in traced if e.device_type() == torch.autograd.DeviceType.CUDA and e.duration_ns()),
        key=lambda e: e.start_ns(),
    )
    totals: list[dict[str, float]] = [defaultdict(float) for _ in contenders]
    by_kernel: list[dict[str, float]] = [defaultdict(float) for _ in contenders]
    per_contender = zip(contenders, totals, by_kernel, strict=True)
    order = [
        (total, kernel_us, timed)
        for contender, total, kernel_us in per_contender
        for timed in contender.steps()
    ]
    marks = 0  # steps are between marks 2 n and 2 n + 1
    for event in kernels:
        name, ms = event.name().lower(), event.duration_ns() / 1e6
        if "spin_kernel" in name:
            marks += 1
        elif marks % 2:
            total, kernel_us, timed = order[marks // 2]
            if timed:
                kernel_us[short_name(event.name())] += 1e3 * ms
                total["kernel_ms"] += ms
                total["gemm_ms"] += ms if any(word in name for word in PRODUCTS) else 0.0
                total["copies_ms"] += ms if any(word in name for word in COPIES) else 0.0
    if marks != 2 * len(order):
        raise RuntimeError(f"the profile has {marks} marks between steps; wanted {2 * len(order)}")
    rows = []
    for contender, total, kernel_us in zip(contenders, totals, by_kernel, strict=True):
        row: dict[str, Any] = {
            name: total[name] / contender.timed for name in ("kernel_ms", "gemm_ms", "copies_ms")
        }
        row["kernels_us"] = {
            name: round(us / contender.timed, 1)
            for name, us in sorted(kernel_us.items(), key=lambda k: -k[1])
        }
        row["outside_percent"] = 100 * (1 - row["gemm_ms"] / row["kernel_ms"])
        row["copies_percent"] = 100 * row["copies_ms"] / (row["kernel_ms"] - row["copies_ms"])
        rows.append(row)
    return rows


def short_name(kernel: str) -> str:
    """A kernel's name without return type, namespaces and arguments; all of cuBLAS's kernels have one
    name."""
    name = kernel.removeprefix("void ").partition("<")[0].partition("(")[0].rpartition("::")[2].strip()
    return "cuBLAS" if name.startswith(("nvjet", "cutlass", "splitKreduce")) else name


@contextmanager
def profiled() -> Iterator[Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield profile
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
