"""Train a Qwen3-MoE of Hugging Face transformers with its own experts and with this library's, from the same
weights on the same plays of Shakespeare, and print losses and tokens per second. On a CPU a few steps of a
small model; on a GPU 8 layers of 2048 x 768 with 128 experts. Needs ``pip install 'fp8moe[transformers]'``.

    python examples/finetune_transformers.py [STEPS]
"""

import argparse
import time

import torch
import transformers

import fp8moe.transformers
from fp8moe.demo.text import shakespeare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = DEVICE == "cuda"
PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("steps", nargs="?", type=int, default=30 if GPU else 3)
STEPS = PARSER.parse_args().steps
BATCH, LENGTH = (8, 2048) if GPU else (2, 64)
TEXT = torch.tensor(shakespeare(), dtype=torch.long, device=DEVICE)


def model(experts):
    config = transformers.Qwen3MoeConfig(
        vocab_size=32_000 if GPU else 256,
        hidden_size=2048 if GPU else 64,
        num_hidden_layers=8 if GPU else 2,
        num_attention_heads=16 if GPU else 4,
        num_key_value_heads=4 if GPU else 2,
        head_dim=128 if GPU else 16,
        num_experts=128 if GPU else 8,
        num_experts_per_tok=8 if GPU else 2,
        moe_intermediate_size=768 if GPU else 48,
        experts_implementation=experts,
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).to(DEVICE, torch.bfloat16)


def train(experts):
    network, generator = model(experts), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4 if GPU else 3e-3, fused=True)
    losses, began = [], 0.0
    for step in range(STEPS):
        if step == min(2, STEPS - 1):  # the first steps compile kernels
            began = time.perf_counter() + (torch.cuda.synchronize() or 0 if GPU else 0)
        starts = torch.randint(len(TEXT) - LENGTH, (BATCH,), generator=generator)
        ids = torch.stack([TEXT[i : i + LENGTH] for i in starts.tolist()])
        loss = network(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = (time.perf_counter() - began) / (STEPS - min(2, STEPS - 1))
    print(f"{experts:12} losses {' '.join(f'{v:.3f}' for v in losses[:: max(1, STEPS // 8)])}", end="")
    print(f", {BATCH * LENGTH / seconds:,.0f} tokens per second")


fp8moe.transformers.enable(recipe="fp8_flow")
for name in ("grouped_mm", "fp8moe"):
    train(name)
