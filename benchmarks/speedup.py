"""Draw the sweep's speed-ups: ``python -m benchmarks.speedup`` writes ``docs/images/sweep-h200*.svg``, with
fp8_flow over the fastest other library, forward and backward, by tokens and model. A cross, below 1, is where
that library is faster; a hollow point is where this library's own bf16 is faster than fp8_flow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import pictures
from benchmarks.table import fastest_other, is_ours, swept

FILES = pictures.files("sweep-h200")
#: the work, its title, and the name of fp8_flow's rows
PANELS = (
    ("1 a step", "one micro-batch to a step", "fp8_flow"),
    ("8 a step", "eight micro-batches, copies shared", "fp8_flow, copies shared"),
)
COLOURS = "#1f4e9c", "#c0504d", "#4f9d69", "#8064a2", "#d08a2e", "#2e9aa8"
ON_DARK = "#9cc4ff", "#f08a84", "#8fd6a5", "#c3b0e0", "#f2c27b", "#86d5df"


class Point(NamedTuple):
    tokens: int
    speedup: float
    other: str
    own_bf16_is_faster: bool


def digest() -> str:
    """Digest of the rows in the picture."""
    return pictures.digest(swept())


def points(work: str, name: str) -> dict[str, list[Point]]:
    """Of each model, by tokens."""
    times: dict[tuple[str, int], dict[str, float]] = {}
    for row in swept():
        if row["shape"].endswith(f", {work}"):
            times.setdefault((row["model"], row["tokens"]), {})[row["name"]] = row["ms"]
    found: dict[str, list[Point]] = {}
    for (model, tokens), ms in sorted(times.items(), key=lambda item: item[0][1]):
        if name in ms and (other := fastest_other(ms)) is not None:
            faster = ms.get("bf16", ms[name]) < ms[name]
            found.setdefault(model, []).append(Point(tokens, ms[other] / ms[name], other, faster))
    return found


def places() -> str:
    """A sentence with every place where another library is faster than fp8_flow."""
    faster = [
        f"{model}, {point.tokens} tokens, {work}: {point.other} {1 / point.speedup:.2f}x"
        for work, _, name in PANELS
        for model, of_model in points(work, name).items()
        for point in of_model
        if point.speedup < 1
    ]
    if not faster:
        others = "; ".join(sorted({row["name"] for row in swept() if not is_ours(row["name"])}))
        return f"No other library measured ({others}) is faster than fp8_flow in any of these places."
    return f"Another library is faster than fp8_flow here: {'; '.join(faster)}."


def draw(out: Path, dark: bool = False, narrow: bool = False) -> None:
    with pictures.styled(dark):
        from matplotlib import pyplot

        figure, panels = (
            pyplot.subplots(2, 1, figsize=(4.6, 7.6)) if narrow else pyplot.subplots(1, 2, figsize=(9, 3.9))
        )
        models = list(dict.fromkeys(row["model"] for row in swept()))
        colour_of = dict(zip(models, ON_DARK if dark else COLOURS, strict=False))
        for axes, (work, title, name) in zip(panels, PANELS, strict=True):
            _panel(axes, points(work, name), title, colour_of)
        panels[0].set_ylabel("fp8_flow over the fastest other library")
        handles, labels = panels[0].get_legend_handles_labels()
        columns = 2 if narrow else 3
        figure.legend(handles, labels, loc="upper center", ncols=columns, frameon=False, fontsize=8.5)
        row, others = swept()[0], sorted({p.other for w, _, n in PANELS for p in _all(points(w, n))})
        separator = "\n" if narrow else "; "
        of = ", ".join(others)
        origin = [row["device"], f"{row['command']}, commit {row['commit']}", f"fastest others: {of}"]
        figure.text(0.5, 0.01, separator.join(origin), ha="center", fontsize=6.5)
        height = figure.get_size_inches()[1]
        below, above = 0.16 * (1 + 2 * narrow), 0.2 * -(-len(labels) // columns)
        figure.tight_layout(rect=(0, below / height, 1, 1 - above / height))
        pictures.write(figure, out, digest())


def _all(by_model: dict[str, list[Point]]) -> list[Point]:
    return [point for of_model in by_model.values() for point in of_model]


def _panel(axes: Any, by_model: dict[str, list[Point]], title: str, colour_of: dict[str, str]) -> None:
    tokens = sorted({point.tokens for point in _all(by_model)})
    for model, of_model in by_model.items():
        colour, x = colour_of[model], [point.tokens for point in of_model]
        axes.plot(x, [point.speedup for point in of_model], color=colour, label=model, linewidth=1.5)
        for point in of_model:
            face = "none" if point.own_bf16_is_faster else colour
            marker, size = ("o", 5) if point.speedup >= 1 else ("X", 9)
            axes.plot(
                point.tokens, point.speedup, marker, color=colour, markerfacecolor=face, markersize=size
            )
    axes.axhspan(0, 1, color="#c0504d", alpha=0.15, linewidth=0)
    axes.text(0.99, 0.02, "another library is faster", transform=axes.transAxes, ha="right", fontsize=7)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens], fontsize=7.5)
    axes.set_ylim(0.8 * min(1, *(p.speedup for p in _all(by_model))), None)
    axes.set_xlabel("tokens of a micro-batch", fontsize=8)
    axes.set_title(title, fontsize=9.5)
    axes.grid(axis="y", alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    for file, variant in FILES.items():
        draw(file, **variant)
