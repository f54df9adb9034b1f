"""Trains the demo's model in every recipe and reports a table, a plot and a text sample."""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import fp8moe
from fp8moe.demo.model import Config, Model, batches, learning_rate
from fp8moe.demo.text import generated_text
from fp8moe.info import command, commit
from fp8moe.layer.recipes import RECIPES

#: maximum relative difference of fp8_flow's loss from bf16's, averaged over the last tenth of the run
ALLOWED_DEVIATION = 0.0025


@dataclass
class Run:
    """Measurements of one recipe."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    casts: int = 0
    saved_bytes: int = 0

    @property
    def first(self) -> float:
        return float(np.mean(self.losses[:3]))

    @property
    def final(self) -> float:
        """Mean loss over the last tenth of the steps."""
        return float(np.mean(self.losses[-max(1, len(self.losses) // 10) :]))


def train(config: Config, text: np.ndarray, xp: ModuleType = np) -> tuple[dict[str, Run], dict[str, Model]]:
    """Train one model per recipe on the same batches. The recipes alternate at each step, so that the load of
    the machine affects all timings equally."""
    tqdm = importlib.import_module("tqdm").tqdm
    models: dict[str, Model] = {recipe: Model(config, recipe, xp) for recipe in RECIPES}
    runs: dict[str, Run] = {recipe: Run() for recipe in RECIPES}
    bar = tqdm(batches(text, config), total=config.steps, unit="step", dynamic_ncols=True)
    for step, (contexts, targets) in enumerate(bar):
        contexts, targets = xp.asarray(contexts), xp.asarray(targets)
        for recipe, model in models.items():
            start = time.perf_counter()
            with fp8moe.trace() as traced:
                loss, grads = model.loss(contexts, targets)
            model.adamw(grads, learning_rate(config, step))
            run = runs[recipe]
            run.losses.append(loss)  # a Python float, so the device has finished
            run.seconds.append(time.perf_counter() - start)
            run.casts, run.saved_bytes = traced.casts, traced.saved_bytes
        bar.set_postfix({recipe: f"{run.losses[-1]:.3f}" for recipe, run in runs.items()})
    return runs, models


def deviation(runs: dict[str, Run], recipe: str) -> float:
    """Relative difference of a recipe's final loss from bf16's."""
    return runs[recipe].final / runs["bf16"].final - 1


def table(runs: dict[str, Run]) -> str:
    head = (
        f"{'recipe':14} {'first loss':>10} {'last loss':>10} {'vs bf16':>9} {'casts':>6} {'saved':>9} "
        f"{'ms/step':>8}"
    )
    lines = [head, "-" * len(head)]
    for recipe, run in runs.items():
        lines.append(
            f"{recipe:14} {run.first:10.4f} {run.final:10.4f} {deviation(runs, recipe):+9.3%} "
            f"{run.casts:6} {run.saved_bytes / 2**20:5.2f} MiB {np.median(run.seconds) * 1e3:8.1f}"
        )
    lines.append(
        "last loss: mean of the last tenth; casts: explicit, per step; saved: bytes for the backward"
    )
    return "\n".join(lines)


def picture(runs: dict[str, Run], path: Path) -> None:
    """Plot the loss curves and their difference from bf16, smoothed over a tenth of the run."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    figure, (top, below) = plt.subplots(
        2, 1, figsize=(8, 6.5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    base = np.array(runs["bf16"].losses)
    width = max(1, len(base) // 10)
    for color, (recipe, run) in enumerate(runs.items()):
        top.plot(run.losses, f"C{color}", label=f"{recipe} ({run.final:.4f})", linewidth=1)
        if recipe != "bf16" and len(base) >= width:
            window = np.ones(width) / width
            smooth = np.convolve(run.losses, window, "valid") / np.convolve(base, window, "valid") - 1
            steps = np.arange(width - 1, len(base))
            below.plot(steps, smooth * 100, f"C{color}", label=recipe, linewidth=1)
    below.axhspan(-100 * ALLOWED_DEVIATION, 100 * ALLOWED_DEVIATION, color="0.9")
    top.set_ylabel("loss, nats per byte")
    top.legend(title="recipe (mean of the last tenth)")
    below.set_xlabel("step")
    below.set_ylabel("difference from bf16, %")
    below.legend()
    top.set_title("The same byte-level mixture-of-experts model in three recipes")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def sample(model: Model, prompt: bytes, length: int, temperature: float = 0.6) -> str:
    """Generate a continuation of a prompt."""
    rng = np.random.default_rng(0)
    text = list(prompt.rjust(model.config.window, b"\n"))
    for _ in range(length):
        context = model.xp.asarray(np.array([text[-model.config.window :]], np.uint8))
        probs = model.next_byte_probs(context)[0]
        probs = np.asarray(probs.get() if hasattr(probs, "get") else probs, np.float64) ** (1 / temperature)
        text.append(int(rng.choice(256, p=probs / probs.sum())))
    return printable(bytes(text[-length - len(prompt) :]).decode("utf-8", "replace"))


def printable(text: str) -> str:
    """The text with escapes for characters that a terminal would obey, line ends excepted."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def verdicts(runs: dict[str, Run]) -> list[tuple[bool, str]]:
    """(passed, description) of each of the demo's checks."""
    difference = deviation(runs, "fp8_flow")
    all_fell = all(run.final < 0.6 * run.first for run in runs.values())
    return [
        (all_fell, "every recipe's loss fell by more than 40 %"),
        (abs(difference) <= ALLOWED_DEVIATION, f"fp8_flow is within 0.25 % of bf16 ({difference:+.3%})"),
        (
            runs["fp8_flow"].casts < runs["fp8_blockwise"].casts,
            f"{runs['fp8_flow'].casts} casts per step instead of {runs['fp8_blockwise'].casts}",
        ),
    ]


def main(config: Config, device: str, text_file: Path | None, folder: Path, check: bool) -> int:
    """Train, report, and return the exit code: 1 if ``check`` and a check failed."""
    start = time.perf_counter()
    xp: Any = np
    if device == "cuda":
        from fp8moe.runtime.interop import require_cupy

        xp = require_cupy("--device cuda")
    text = generated_text() if text_file is None else np.fromfile(text_file, np.uint8)
    if len(text) <= config.window:
        raise ValueError(f"text: got {len(text)} bytes; wanted more than the window size, {config.window}")
    print(
        f"{config.layers} MoE layer(s), {config.experts} experts, top-{config.topk}, hidden {config.hidden}; "
        f"{len(text):,} bytes of text; {config.steps} steps of {config.tokens} bytes on {device}"
    )
    importlib.import_module("matplotlib")  # missing packages and folders are reported before the training
    folder.mkdir(parents=True, exist_ok=True)
    runs, models = train(config, text, xp)
    picture(runs, folder / "loss.png")
    report = {
        "config": asdict(config),
        "device": device,
        "commit": commit(),
        "command": command(),
        "runs": {r: asdict(run) | {"final": run.final} for r, run in runs.items()},
    }
    (folder / "results.json").write_text(json.dumps(report) + "\n")
    print("\n" + table(runs))
    print("\nsample of fp8_flow:\n" + sample(models["fp8_flow"], b"def ", 240))
    print()
    results = verdicts(runs)
    for passed, description in results:
        print(("ok      " if passed else "FAILED  ") + description)
    print(f"plot: {folder / 'loss.png'}   results: {folder / 'results.json'}")
    print(f"{time.perf_counter() - start:.0f} s")
    return 0 if all(passed for passed, _ in results) or not check else 1
