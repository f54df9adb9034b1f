"""A small decoder-only transformer with expert layers, trained on the bytes of Shakespeare's plays, in bf16,
fp8_flow and fp8_blockwise from the same seeds.

    python examples/train_moe_torch.py                     # GPU: 600 steps; CPU: a few small steps
    python examples/train_moe_torch.py --steps 200 --recipes bf16 fp8_flow --out run

Prints the mean loss of the last tenth of the steps; writes losses and times to OUT.json and, with matplotlib,
the curves to OUT.svg.
"""

import argparse
import contextlib
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fp8moe.demo.text import shakespeare
from fp8moe.info import commit, versions
from fp8moe.torch import FP8FlowMoE, weights_unchanged

BYTES = 256


class Block(nn.Module):
    def __init__(self, width, heads, experts, topk, ffn, recipe, device):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_experts = (nn.RMSNorm(width, device=device) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False, device=device)
        self.out = nn.Linear(width, width, bias=False, device=device)
        self.experts = FP8FlowMoE(width, ffn, experts, topk, recipe=recipe, device=device)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.experts(self.before_experts(x))


class Model(nn.Module):
    def __init__(self, a, recipe, device):
        super().__init__()
        self.embed = nn.Embedding(BYTES, a.width, device=device)
        self.position = nn.Embedding(a.length, a.width, device=device)
        blocks = [Block(a.width, a.heads, a.experts, a.topk, a.ffn, recipe, device) for _ in range(a.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(a.width, device=device)
        self.head = nn.Linear(a.width, BYTES, bias=False, device=device)

    def forward(self, text):
        x = self.embed(text) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def backward(model, text, micro_batches):
    """This micro-batch's share of the loss; gradients accumulate."""
    with torch.autocast(text.device.type, torch.bfloat16):
        logits = model(text[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten()) / micro_batches
    loss.backward()
    return loss.detach()


def train(a, recipe, text, device):
    """(losses, seconds) of one recipe; all recipes have the same initial weights and batches."""
    torch.manual_seed(a.seed)
    model = Model(a, recipe, device)
    # fused, as usual on CUDA; it changes the weights without incrementing their version counters
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    generator = torch.Generator().manual_seed(a.seed)
    window = torch.arange(a.length + 1)
    losses, start = [], time.perf_counter()
    for step in range(a.steps):
        warmup, progress = min(1.0, (step + 1) / a.warmup), step / a.steps
        for group in optimizer.param_groups:
            group["lr"] = a.lr * warmup * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        starts = torch.randint(len(text) - a.length, (a.batch, 1), generator=generator)
        batch = text[starts + window].to(device).long()
        optimizer.zero_grad(set_to_none=True)
        # weights change only in optimizer steps, so one set of FP8 copies serves all micro-batches
        with weights_unchanged(model) if a.micro_batches > 1 else contextlib.nullcontext():
            loss = sum(backward(model, part, a.micro_batches) for part in batch.chunk(a.micro_batches))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss)
        if a.report and step % a.report == 0:
            print(f"{recipe:14} step {step:5} loss {loss.item():.4f}", flush=True)
    return torch.stack(losses).tolist(), time.perf_counter() - start


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    full = device.type == "cuda"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=["bf16", "fp8_flow", "fp8_blockwise"])
    parser.add_argument("--out", type=Path, help="without its ending")
    for name, at_size, as_toy in (
        ("steps", 600, 4),  # at 16,384 bytes a step each byte is read 15 times
        ("warmup", 100, 2),
        ("batch", 64, 2),
        ("length", 256, 32),
        ("width", 256, 128),
        ("heads", 4, 2),
        ("layers", 4, 1),
        ("experts", 16, 4),
        ("topk", 2, 2),
        ("ffn", 256, 128),
        ("seed", 0, 0),
        ("micro-batches", 1, 1),
        ("report", 100, 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=at_size if full else as_toy)
    parser.add_argument("--lr", type=float, default=1e-3)
    a = parser.parse_args()
    text = torch.from_numpy(shakespeare().copy())
    settings = {k: v for k, v in vars(a).items() if k != "out"}
    packages = {**versions(), "torch": torch.__version__}
    device_name = torch.cuda.get_device_name() if full else "cpu"
    runs = {}
    report = {
        "settings": settings,
        "text": f"Shakespeare's plays, {len(text) / 1e6:.2f} MB",
        "device": device_name,
        "versions": packages,
        "commit": commit(),
        "runs": runs,
    }
    for recipe in a.recipes:
        losses, seconds = train(a, recipe, text, device)
        last = losses[-max(1, a.steps // 10) :]
        runs[recipe] = {"losses": losses, "seconds": seconds, "final": sum(last) / len(last)}
        change = runs[recipe]["final"] / runs[a.recipes[0]]["final"] - 1
        per_step = 1e3 * seconds / a.steps
        print(f"{recipe:14} last tenth {runs[recipe]['final']:.4f} ({change:+.3%})  {per_step:.1f} ms a step")
        if a.out:
            a.out.with_suffix(".json").write_text(json.dumps(report))
            picture(report, a.out.with_suffix(".svg"))


def picture(report, path):
    """Plots the loss of every recipe, as a mean over 20 steps."""
    try:
        import matplotlib
    except ImportError:
        print(f"no picture; to write {path}: pip install matplotlib")
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for recipe, run in report["runs"].items():
        losses = np.array(run["losses"])
        size = min(20, len(losses))
        smooth = np.convolve(losses, np.ones(size) / size, "valid")
        axes.plot(np.arange(len(smooth)) + size - 1, smooth, label=f"{recipe}: {run['final']:.4f}", lw=1)
    axes.set(xlabel="step", ylabel="loss, nats a byte", yscale="log")
    axes.legend(title="last tenth")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
