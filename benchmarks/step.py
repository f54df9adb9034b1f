"""Draw one training step, from the results files: ``python -m fp8moe.benchmarks.step``, to
``docs/images/step-h200.png``, for the README and the start page.

Left, the layer's forward and backward, whose weights change every step (``layer-h200.jsonl``); right, a whole
step of Qwen3-MoE with its optimizer (``model-h200.jsonl``). The picture holds a digest of the rows that it
was drawn from, which a test compares with those that there are.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from fp8moe.benchmarks.roofline import PICTURES
from fp8moe.benchmarks.table import Rows, newest, newest_layers, rows_of

PICTURE = PICTURES / "step-h200.png"
COLOURS = {"transformers grouped_mm": "#9e9e9e", "bf16": "#7aa6d8", "fp8_flow": "#1f4e9c"}
LABELS = {
    "transformers grouped_mm": "bf16, transformers' grouped_mm",
    "bf16": "bf16, fp8moe",
    "fp8_flow": "fp8_flow, fp8moe",
}


def layers() -> Rows:
    return [r for r in newest_layers() if r["name"] in COLOURS]


def models() -> Rows:
    """Names without the library's, which stands in the labels."""
    return [{**r, "name": r["name"].removeprefix("fp8moe ")} for r in newest(rows_of("model-h200"))]


def digest() -> str:
    """Of the rows that the picture shows."""
    return hashlib.sha256(json.dumps([layers(), models()]).encode()).hexdigest()


def draw(out: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4.2), width_ratios=(5, 2.6))
    _bars(left, layers(), "one expert layer, forward and backward", _size)
    _bars(right, models(), "Qwen3-MoE of 8 layers, a whole step", lambda shape: shape.split(", ")[-1])
    left.set_ylabel("milliseconds, less is better")
    handles, labels = right.get_legend_handles_labels()  # all that there are, transformers' too
    figure.legend(handles, labels, loc="upper center", ncols=3, frameon=False)
    origins = [f"{r['command']}, commit {r['commit']}" for r in (layers()[0], models()[0])]
    figure.text(0.5, 0.01, f"{layers()[0]['device']}; " + "; ".join(origins), ha="center", fontsize=7.5)
    figure.tight_layout(rect=(0, 0.03, 1, 0.93))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=240, metadata={"Rows": digest(), "Software": None})
    pyplot.close(figure)


def _size(shape: str) -> str:
    tokens, widths, experts = shape.split(", ")
    return f"{tokens}\n{widths}\n{experts.replace(' top-8', '')}"


def _bars(axes, rows: Rows, title: str, named) -> None:  # type: ignore[no-untyped-def]
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    names = [name for name in COLOURS if any(r["name"] == name for r in rows)]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [next(r["ms"] for r in rows if (r["name"], r["shape"]) == (name, s)) for s in shapes]
        places = [n + (i - (len(names) - 1) / 2) * width for n in range(len(shapes))]
        bars = axes.bar(places, heights, width * 0.95, color=COLOURS[name], label=LABELS[name])
        axes.bar_label(
            bars, [f"{h:.0f}" if h >= 100 else f"{h:.1f}" for h in heights], fontsize=7.5, padding=1
        )
    axes.set_xticks(range(len(shapes)), [named(s) for s in shapes], fontsize=7.5)
    axes.set_title(title, fontsize=9.5)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    draw(PICTURE)
