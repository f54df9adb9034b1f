"""Differences between training runs that have the same seed: their mean and its 95 % interval.

    python -m benchmarks.pairs runs/*.jsonl [--base bf16] [--of evaluation|step]

Reads the rows of `examples/pretrain_moe.py`. Runs are compared at the last step that all have: by their
losses on held-out text, or by the mean of the last tenth of the training losses. The interval is Student's,
of the relative differences of the pairs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fp8moe.runtime.tables import table

#: of a run's row, what runs of one kind differ in
OF_PAIR = ("kind", "step", "seed", "recipe", "save", "device", "commit", "versions", "command")


class Run(NamedTuple):
    """settings: those that all compared runs share. losses: by step, of evaluations and of steps."""

    recipe: str
    seed: int
    settings: dict[str, Any]
    evaluations: dict[int, float]
    steps: dict[int, float]


def run_of(path: Path) -> Run:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if not rows or rows[0].get("kind") != "run":
        raise ValueError(f"{path}: got no row of a run; wanted rows of examples/pretrain_moe.py")
    first = rows[0]
    recipe = first["recipe"] + (" save=fp8" if first["save"] == "fp8" else "")
    settings = {name: value for name, value in first.items() if name not in OF_PAIR}
    losses = {
        kind: {r["step"]: r["loss"] for r in rows if r["kind"] == kind} for kind in ("evaluation", "step")
    }
    return Run(recipe, first["seed"], settings, losses["evaluation"], losses["step"])


def losses_at_end(runs: Sequence[Run], of: str) -> tuple[int, list[float]]:
    """The last step that all runs have, and each run's loss there."""
    losses = [run.evaluations if of == "evaluation" else run.steps for run in runs]
    shared = set.intersection(*map(set, losses))
    if not shared:
        raise ValueError(f"runs: got none of the kind {of!r} that all have; wanted one")
    last = max(shared)
    if of == "evaluation":
        return last, [values[last] for values in losses]
    tenth = range(last - max(1, last // 10) + 1, last + 1)
    return last, [sum(values[step] for step in tenth) / len(tenth) for values in losses]


def probability_within(t: float, freedom: int) -> float:
    """Of a variable of Student's distribution: that it lies between -t and t (Abramowitz and Stegun, 26.7.3
    and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = total = cosine if odd else 1.0
    if freedom == 1:
        total = 0.0
    for i in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (i - 1) / i
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def student(freedom: int, probability: float = 0.95) -> float:
    """The t with which a variable of Student's distribution lies between -t and t with this probability."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        below = probability_within(middle, freedom) < probability
        low, high = (middle, high) if below else (low, middle)
    return high


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """(mean, half of the width of its 95 % interval); an infinite one for a single difference."""
    count = len(differences)
    mean = sum(differences) / count
    if count == 1:
        return mean, math.inf
    variance = sum((d - mean) ** 2 for d in differences) / (count - 1)
    return mean, student(count - 1) * math.sqrt(variance / count)


def report(runs: Sequence[Run], base: str, of: str) -> list[str]:
    if len({json.dumps(run.settings, sort_keys=True) for run in runs}) > 1:
        names = {n for run in runs for n in run.settings if run.settings[n] != runs[0].settings.get(n)}
        raise ValueError(f"runs: got different {', '.join(sorted(names))}; wanted one of each")
    step, losses = losses_at_end(runs, of)
    by_recipe: dict[str, dict[int, float]] = {}
    for run, loss in zip(runs, losses, strict=True):
        if run.seed in by_recipe.setdefault(run.recipe, {}):
            raise ValueError(f"runs: got two of {run.recipe}, seed {run.seed}; wanted one")
        by_recipe[run.recipe][run.seed] = loss
    if base not in by_recipe:
        raise ValueError(f"--base: got {base}; wanted one of {', '.join(by_recipe)}")
    rows: list[list[str]] = [["recipe", "seeds", "loss", f"vs {base}", "95 % interval"]]
    for recipe, values in by_recipe.items():
        seeds = sorted(values.keys() & by_recipe[base].keys())
        row = [recipe, str(len(values)), f"{sum(values.values()) / len(values):.5f}"]
        if recipe == base or not seeds:
            rows.append([*row, "", ""])
            continue
        mean, half = interval([values[seed] / by_recipe[base][seed] - 1 for seed in seeds])
        within = f"{mean - half:+.3%} to {mean + half:+.3%}" if math.isfinite(half) else "of one pair: none"
        rows.append([*row, f"{mean:+.3%}", within])
    where = "on held-out text" if of == "evaluation" else "of training, the last tenth"
    return [*table(rows), f"losses {where}, at step {step}; relative differences, paired by seed"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+", type=Path, help="files of rows, one for each run")
    parser.add_argument("--base", default="bf16", help="recipe that the others are compared with")
    parser.add_argument("--of", choices=("evaluation", "step"), default="evaluation", help="which losses")
    a = parser.parse_args(argv)
    try:
        print("\n".join(report([run_of(path) for path in a.rows], a.base, a.of)))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
