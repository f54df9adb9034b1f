"""Whole training steps of a Qwen3-MoE of Hugging Face transformers, with its own experts and with this
library's, one model after another (three do not fit in memory at once), with the same initial weights and
tokens: 8 layers of 2048 x 768 with 128 experts, top-8, 8 x 2048 tokens, fused AdamW. ``python -m
benchmarks.model [--out FILE]``, on CUDA.

A step is forward, backward, optimizer step and zero_grad. "bfloat16" has parameters in bfloat16; "autocast"
has them in float32, like the Trainer's ``bf16=True``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import fp8moe.transformers as adapter
from fp8moe.bench.harness import append
from fp8moe.info import commit, versions
from fp8moe.runtime.tables import line

BATCH, LENGTH, VOCABULARY = 8, 2048, 32_000
WARM, STEPS = 4, 16
#: (name, experts_implementation, recipe)
CONTENDERS = [
    ("transformers grouped_mm", "grouped_mm", None),
    ("fp8moe bf16", "fp8moe_bf16", "bf16"),
    ("fp8moe fp8_flow", "fp8moe_fp8_flow", "fp8_flow"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for _, implementation, recipe in CONTENDERS:
        if recipe is not None:
            adapter.enable(recipe, name=implementation)  # type: ignore[arg-type]
    batches = learnable(WARM + STEPS)
    for dtype in ("bfloat16", "autocast"):
        for name, implementation, _ in CONTENDERS:
            row = measure(name, implementation, dtype, batches)
            losses = " ".join(f"{v:.3f}" for v in row["losses"])
            speed = f"{row['ms']:.1f} ms", f"{row['tokens_per_s']:,.0f} tokens/s"
            cells = name, dtype, *speed, f"{row['peak_bytes'] / 2**30:.1f} GiB", f"losses {losses}"
            print(line(cells, (-24, -9, 11, 18, 10, -1)), flush=True)
            append(arguments.out, row)


def measure(name: str, implementation: str, dtype: str, batches: list[torch.Tensor]) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = training(implementation, dtype)
    losses = [step(ids) for ids in batches[:WARM]]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    events[0].record()
    for ids, event in zip(batches[WARM:], events[1:], strict=True):
        losses.append(step(ids))
        event.record()
    torch.cuda.synchronize()
    ms = statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(events))
    return {
        "topic": "model",
        "name": name,
        "shape": f"Qwen3-MoE, 8 layers, {BATCH} x {LENGTH} tokens, {dtype}",
        "device": torch.cuda.get_device_name(),
        "ms": ms,
        "tokens_per_s": BATCH * LENGTH / ms * 1e3,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "losses": torch.stack(losses[::2]).tolist(),
        "versions": {**versions(), "torch": torch.__version__, "transformers": transformers.__version__},
        "commit": commit(),
        "command": "python -m benchmarks.model",
    }


def learnable(count: int) -> list[torch.Tensor]:
    """Batches of tokens; each token is one of two possible successors of the previous token."""
    generator = torch.Generator().manual_seed(1)
    successors = torch.randint(VOCABULARY, (VOCABULARY, 2), generator=generator)
    choices = torch.randint(2, (LENGTH, count * BATCH), generator=generator)
    tokens = [torch.randint(VOCABULARY, (count * BATCH,), generator=generator)]
    for i in range(LENGTH - 1):
        tokens.append(successors[tokens[-1], choices[i]])
    return list(torch.stack(tokens, dim=1).cuda().chunk(count))


def training(implementation: str, dtype: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A training step that returns its loss, on the device."""
    # the type hints of Qwen3MoeConfig lack some of these options
    options: dict[str, Any] = {"experts_implementation": implementation, "head_dim": 128}
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        **options,
    )
    torch.manual_seed(0)
    autocast = dtype == "autocast"
    with torch.device("cuda"):
        model: Any = transformers.Qwen3MoeForCausalLM(config)
    if not autocast:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    return step


if __name__ == "__main__":
    main()
