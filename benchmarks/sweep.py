"""The experts of five models at the micro-batches that people train with: ``python -m benchmarks.sweep [--out
FILE] [--models NAME ...] [--tokens N ...]``, on CUDA.

A step is one or eight micro-batches, forward and backward with given routing, whose gradients autograd adds
in ``grad``; then the weights change (a fused AdamW step), which is not timed. A row has the time of a
micro-batch: that of a whole step, host included where it is slower, over their number. "copies each time"
makes the FP8 weights in every forward, "copies shared" once a step, inside `weights_unchanged`. Contenders
run in turn, so that a rise of the GPU's temperature affects all.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare_layer import around, experts_by, experts_of_transformers, torch_product
from fp8moe.bench.harness import append
from fp8moe.info import commit, versions
from fp8moe.runtime.tables import line
from fp8moe.torch import FP8FlowMoE, moe_experts, weights_unchanged

#: hidden, ffn, experts, top-k
MODELS = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "GLM-4.5-Air": (4096, 1408, 128, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "Mixtral-8x7B": (4096, 14_336, 8, 2),
    "DeepSeek-V3 on 32 ranks": (7168, 2048, 8, 8),
}
TOKENS = (512, 2048, 8192)
ROUNDS = 2
WARM, TIMED = 100.0, 160.0  # milliseconds of one contender's steps in a round
ACCUMULATED = 8  # micro-batches of a step

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Contender:
    name: str
    forward: Forward
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    micro_batches: int = 1

    def step(self, x: torch.Tensor, dy: torch.Tensor) -> None:
        with self.inside():
            for _ in range(self.micro_batches):
                self.forward(x).backward(dy)
                x.grad = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    arguments = parser.parse_args()
    for model in arguments.models:
        weights = Weights(*MODELS[model])
        for tokens in arguments.tokens:
            for row in weights.measure(model, tokens):
                print(
                    line((model, tokens, row["name"], f"{row['ms']:.3f} ms"), (-24, 6, -48, 11)), flush=True
                )
                append(arguments.out, row)
        del weights
        torch.cuda.empty_cache()


class Weights:
    """One set of weights, which all contenders multiply: parameters w13 and w2 of a layer."""

    def __init__(self, hidden: int, ffn: int, experts: int, topk: int):
        torch.manual_seed(0)
        self.sizes = hidden, ffn, experts, topk
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "router": False}
        self.layer = FP8FlowMoE(hidden, ffn, experts, topk, **options)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=1e-5, fused=True)

    def contenders(self, tokens: int) -> list[Contender]:
        hidden, ffn, experts, topk = self.sizes
        w13, w2 = self.layer.w13, self.layer.w2
        ids = torch.rand(tokens, experts, device="cuda").topk(topk).indices
        probs = torch.rand(tokens, topk, device="cuda").requires_grad_()
        by_torch = around(experts_by(torch_product))

        def layer(recipe: Any) -> FP8FlowMoE:
            new = FP8FlowMoE(hidden, ffn, experts, topk, recipe=recipe, router=False, device="meta")
            new.w13, new.w2 = w13, w2
            return new

        bf16, flow = layer("bf16"), layer("fp8_flow")
        function = partial(moe_experts, w13=w13, w2=w2, topk_ids=ids, topk_probs=probs)
        forwards: dict[str, Forward] = {
            "torch grouped_mm, bf16": lambda x: by_torch(x, w13, w2, ids, probs),
            "bf16": lambda x: bf16(x, ids, probs),
            "fp8_flow": lambda x: flow(x, ids, probs),
            "fp8_flow, moe_experts": lambda x: function(x),
        }
        parameters = torch.nn.ParameterList([w13, w2])
        shared: dict[str, torch.nn.Module] = {"fp8_flow": flow, "fp8_flow, moe_experts": parameters}
        if (experts_of_transformers := self.of_transformers()) is not None:
            forwards["fp8_flow, transformers"] = lambda x: experts_of_transformers(x, ids, probs)
            shared["fp8_flow, transformers"] = experts_of_transformers
        result = [Contender(name, forward) for name, forward in forwards.items() if name in ONE]
        for name, forward in forwards.items():
            each_time = ", copies each time" if "fp8" in name else ""
            result.append(Contender(name + each_time, forward, nullcontext, ACCUMULATED))
            if name in shared:
                inside = partial(weights_unchanged, shared[name])
                result.append(Contender(f"{name}, copies shared", forward, inside, ACCUMULATED))
        return [c for c in result if c.micro_batches == 1 or c.name not in LEFT_OUT]

    def of_transformers(self) -> torch.nn.Module | None:
        """transformers' experts with these weights, where it is installed."""
        try:
            import fp8moe.transformers
        except ImportError:
            return None
        fp8moe.transformers.enable("fp8_flow", name="fp8moe_flow")
        module: torch.nn.Module = experts_of_transformers(self.layer.w13, self.layer.w2, "fp8moe_flow")
        return module

    def measure(self, model: str, tokens: int) -> list[dict[str, Any]]:
        hidden = self.sizes[0]
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
        dy = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        contenders = self.contenders(tokens)
        first = [statistics.median(self.times(c, x, dy, 2, 2)) for c in contenders]
        times: list[list[float]] = [[] for _ in contenders]
        for _ in range(ROUNDS):
            for contender, ms, measured in zip(contenders, first, times, strict=True):
                counts = (math.ceil(window / ms) for window in (WARM, TIMED))
                measured += self.times(contender, x, dy, *counts)
        return [
            {
                "topic": "sweep",
                "name": contender.name,
                "model": model,
                "tokens": tokens,
                "micro_batches": contender.micro_batches,
                "shape": f"{model}, {tokens} tokens, {contender.micro_batches} a step",
                "device": torch.cuda.get_device_name(),
                "ms": statistics.median(measured) / contender.micro_batches,
                "versions": {**versions(), "torch": torch.__version__},
                "commit": commit(),
                "command": "python -m benchmarks.sweep",
            }
            for contender, measured in zip(contenders, times, strict=True)
        ]

    def times(
        self, contender: Contender, x: torch.Tensor, dy: torch.Tensor, warm: int, timed: int
    ) -> list[float]:
        """Milliseconds of whole steps. The optimizer's step between them is not timed."""
        pairs = []
        for number in range(warm + timed):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            contender.step(x, dy)
            end.record()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if number >= warm:
                pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


#: contenders with one micro-batch a step
ONE = ("torch grouped_mm, bf16", "bf16", "fp8_flow")
#: those that are not timed with several
LEFT_OUT = ("fp8_flow, moe_experts, copies each time", "fp8_flow, transformers, copies each time")

if __name__ == "__main__":
    main()
