"""Draw the padding of each bucket policy of `fp8moe.fsdp`: ``python -m benchmarks.padding`` writes
``docs/images/fsdp-padding.svg`` and prints the points. They are computed, not measured."""

from __future__ import annotations

from pathlib import Path

from benchmarks.roofline import MARKS, PICTURES
from fp8moe.fsdp import POLICIES, plan_buckets
from fp8moe.runtime.tables import line

# name: (experts per rank, hidden, ffn)
MODELS = {"DeepSeek-V3, 32 experts": (32, 7168, 2048), "Qwen3-30B-A3B, 16 experts": (16, 2048, 768)}
RANKS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def ratios(experts: int, hidden: int, ffn: int, policy: str) -> list[float]:
    """Padded elements over actual elements of an expert layer's w13 and w2, for each number of ranks."""
    params = [("w13", (experts, 2 * ffn, hidden), True), ("w2", (experts, hidden, ffn), True)]
    return [plan_buckets(params, ranks, policy).ratio for ranks in RANKS]


def draw(out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fp8moe"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(MODELS), figsize=(10, 4), sharey=True)
    for axes, (name, sizes) in zip(panels, MODELS.items(), strict=True):
        for i, policy in enumerate(POLICIES):
            shares = ratios(*sizes, policy)
            style = "k:" if policy == "min" else MARKS[i] + "-"
            axes.plot(RANKS, shares, style, ms=4, lw=1, label=policy)
            cells = name, policy, *(f"{r:.3f}" for r in shares)
            print(line(cells, (-28, -10, *[5] * len(shares))))
        axes.set(xscale="log", yscale="log", xlabel="ranks that share a bucket", title=name)
        axes.set_xticks(RANKS, [str(r) for r in RANKS], fontsize=6)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("elements with padding / without")
    panels[0].set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(PICTURES / "fsdp-padding.svg")
