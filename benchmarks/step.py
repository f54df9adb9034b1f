"""Draw one training step from the results files: ``python -m benchmarks.step`` writes
``docs/images/step-h200*.svg``, for the README and the start page: for light and dark backgrounds, and with
its two halves beside each other or, for narrow screens, one below the other.

Left: a layer's experts with this library and with others (``compare-h200.jsonl``), or without a measured
comparison the layer with its router (``layer-h200.jsonl``). Right: a training step of Qwen3-MoE with its
optimizer (``model-h200.jsonl``). Each picture contains a digest of its rows, which a test compares with the
current results.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import pictures
from benchmarks.table import Rows, compared, newest, newest_layers, rows_of

FILES = pictures.files("step-h200")
#: contender of `compare`: its label and colours on light and dark; other libraries in grey, the slowest first
LAYERS = {
    "transformers, bf16": ("transformers' grouped_mm, bf16", "#c4c4c4", "#6b6b6b"),
    "torch grouped_mm compiled, bf16": ("torch grouped_mm compiled, bf16", "#a3a3a3", "#868686"),
    "torchao, FP8 rows": ("torchao, FP8", "#d9b48f", "#a07a52"),
    "torchao compiled, FP8 rows": ("torchao compiled, FP8", "#d9b48f", "#a07a52"),
    "SonicMoE, bf16": ("SonicMoE, bf16", "#7d7d7d", "#b0b0b0"),
    "fp8moe, bf16": ("fp8moe, bf16", "#7aa6d8", "#5d8fc9"),
    "fp8moe, fp8_flow": ("fp8moe, fp8_flow", "#1f4e9c", "#9cc4ff"),
}
#: row of `model`: the contender whose label and colour it has
MODELS = {
    "transformers grouped_mm": "transformers, bf16",
    "fp8moe bf16": "fp8moe, bf16",
    "fp8moe fp8_flow": "fp8moe, fp8_flow",
}


def layers() -> Rows:
    """Rows of the layer; of a library timed both eagerly and compiled, only the compiled rows."""
    rows = compared() or [{**r, "name": f"fp8moe, {r['name']}"} for r in newest_layers()]
    names = {r["name"] for r in rows}
    eager = {name for name in names if name.replace(", ", " compiled, ") in names}
    return [r for r in rows if r["name"] in set(LAYERS) - eager]


def models() -> Rows:
    return [{**r, "name": MODELS[r["name"]]} for r in newest(rows_of("model-h200")) if r["name"] in MODELS]


def digest() -> str:
    """Digest of the rows in the picture."""
    return pictures.digest([layers(), models()])


def draw(out: Path, dark: bool = False, narrow: bool = False) -> None:
    with pictures.styled(dark):
        from matplotlib import pyplot

        figure, (left, right) = (
            pyplot.subplots(2, 1, figsize=(4.6, 8.2), height_ratios=(3, 2.6))
            if narrow
            else pyplot.subplots(1, 2, figsize=(9, 4.4), width_ratios=(5, 2.4))
        )
        _bars(left, layers(), "one MoE layer, forward and backward", _size, dark)
        _bars(right, models(), "Qwen3-MoE, 8 layers, training step", lambda s: s.split(", ")[-1], dark)
        left.set_ylabel("time (ms), lower is better")
        handle_of = dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
        handle_of |= dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
        labels = [label for label, *_ in LAYERS.values() if label in handle_of]
        handles = [handle_of[label] for label in labels]
        columns = 1 if narrow else 3
        figure.legend(handles, labels, loc="upper center", ncols=columns, frameon=False, fontsize=9)
        separator = "\n" if narrow else "; "
        runs = dict.fromkeys(f"{r['command']}, commit {r['commit']}" for r in (*layers(), *models()))
        origin = separator.join([layers()[0]["device"], *runs])
        figure.text(0.5, 0.01, origin, ha="center", fontsize=6.5)
        height = figure.get_size_inches()[1]
        below, above = 0.14 * (1 + origin.count("\n")), 0.2 * -(-len(labels) // columns)
        figure.tight_layout(rect=(0, below / height, 1, 1 - above / height))
        pictures.write(figure, out, digest())


def _size(shape: str) -> str:
    tokens, widths, experts = shape.split(", ")
    return f"{tokens}\n{widths}\n{experts.replace(' top-8', '')}"


def _bars(axes, rows: Rows, title: str, named, dark: bool) -> None:  # type: ignore[no-untyped-def]
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    names = [name for name in LAYERS if any(r["name"] == name for r in rows)]
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        times = {r["shape"]: r["ms"] for r in rows if r["name"] == name}
        places = [n + (i - (len(names) - 1) / 2) * width for n, shape in enumerate(shapes) if shape in times]
        heights = [times[shape] for shape in shapes if shape in times]
        label, *colours = LAYERS[name]
        colour = colours[dark]
        bars = axes.bar(places, heights, width * 0.95, color=colour, label=label)
        axes.bar_label(
            bars, [f"{h:.0f}" if h >= 100 else f"{h:.1f}" for h in heights], fontsize=6.5, padding=1
        )
    axes.set_xticks(range(len(shapes)), [named(s) for s in shapes], fontsize=7.5)
    axes.set_title(title, fontsize=9.5)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    for file, variant in FILES.items():
        draw(file, **variant)
