"""Compare this library with others: ``python -m benchmarks.compare``, with the options ``--part NAME``,
``--out FILE`` and ``--picture FILE``.

One process times the same work with the same rows, routing and weights for every installed library: a
training step of a layer's experts (forward and backward, routing given, FP8 copies of the weights made in
every step), one FP8 grouped product, and the quantisation of rows. Every result is first compared with
float64; wrong results are not timed. For missing libraries the installation command is printed.

Every library is called as in its own documentation, in eager mode unless its name here contains "compiled".
If it requires experts padded to a multiple of rows, plain torch pads them, and the padding is timed too.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import math
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.compare_layer import LAYER
from benchmarks.compare_operations import PRODUCT, QUANTIZE
from benchmarks.contender import Contender, Part, Step
from fp8moe.bench.harness import append
from fp8moe.info import command, commit, versions
from fp8moe.runtime.tables import line

#: (tokens, experts, hidden, ffn, top-k): experts of DeepSeek-V3, Qwen3-235B and Qwen3-30B
SHAPES = [(4096, 8, 7168, 2048, 8), (8192, 32, 4096, 1536, 8), (16_384, 128, 2048, 768, 8)]
QUICK = [(512, 4, 512, 256, 2)]
ON_THE_CPU = [(256, 4, 256, 128, 2)]
ROUNDS = 3
WARM, TIMED = 0.1, 0.2  # seconds of warm-up steps and of timed steps
PARTS = (LAYER, PRODUCT, QUANTIZE)


def main(
    device: str,
    quick: bool = False,
    out: Path | None = None,
    picture: Path | None = None,
    parts: Iterable[Part] = PARTS,
) -> int:
    """Compare the installed libraries; return 1 if a result was wrong, or if torch or this library failed.

    Parameters
    ----------
    device : "auto", "cpu" or "cuda"
        "auto" selects CUDA if torch has a CUDA device.
    quick : bool
        One small shape; the CPU always uses a small shape.
    out : Path, optional
        File to which rows are appended as JSON lines.
    picture : Path, optional
        File to which `draw` writes a chart of the layer's rows.
    parts : iterable of Part
        Parts to compare.

    Raises
    ------
    ImportError
        Without torch, which is needed to call every library; for a picture, without matplotlib.
    ValueError
        For a picture without the part "layer", or of another kind than SVG and PNG.
    """
    for package in ("torch", "matplotlib") if picture is not None else ("torch",):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"compare needs {package}, which is missing: pip install 'fp8moe[bench,torch]'")
    import torch

    parts = tuple(parts)
    if picture is not None and LAYER not in parts:
        named = ", ".join(repr(part.name) for part in parts)
        raise ValueError(
            f"--picture: got it with the parts {named}; wanted {LAYER.name!r}, which it shows, too"
        )
    if picture is not None and picture.suffix not in (".svg", ".png"):
        raise ValueError(f"--picture: got {picture}; wanted a name that ends in .svg or .png")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = ON_THE_CPU if device == "cpu" else QUICK if quick else SHAPES
    rows: list[dict[str, Any]] = []
    wrong = 0
    missing: dict[str, str] = {}
    for part in parts:
        for shape in shapes:
            print(f"\n{part.name}, {described(shape)}", flush=True)
            measured, failures = measure(part, shape, device)
            wrong += failures
            for row in measured:
                speed = f"{row['tflops']:.1f} TFLOP/s" if row["tflops"] else ""
                cells = f"  {row['name']}", f"{row['ms']:.3f} ms", speed, f"error {row['error']:.1e}"
                print(line(cells, (-34, 13, 16, 13)), flush=True)
                append(out, row)
            rows += measured
        missing |= {c.name: c.install for c in part.contenders if c.missing()}
    if missing:
        print("\nnot installed here:")
        for name, install in missing.items():
            tell(name, install)
    if picture is not None:
        draw(rows, picture)
    return 1 if wrong else 0


def named_parts(names: Iterable[str] | None) -> tuple[Part, ...]:
    """Parts with these names; all parts without names.

    Raises
    ------
    ValueError
        If a name is unknown.
    """
    part_of = {part.name: part for part in PARTS}
    for name in names or ():
        if name not in part_of:
            raise ValueError(f"--part: got {name!r}; wanted one of {', '.join(map(repr, part_of))}")
    return tuple(part_of[name] for name in names) if names else PARTS


def measure(part: Part, shape: tuple[int, ...], device: str) -> tuple[list[dict[str, Any]], int]:
    """Rows of every contender that runs on this device with correct results, and the number of wrong or
    failed ones.

    All results are checked first; then the contenders are timed alternately, so that a rise of the GPU's
    temperature affects all of them.
    """
    import torch

    steps, wrong = checked_steps(part, shape, device)
    times = in_turn([step for _, step, _ in steps], device)
    device_name = torch.cuda.get_device_name() if device == "cuda" else f"cpu ({platform.machine()})"
    flops = part.flops(*shape)
    origin = {"commit": commit(), "command": command()}
    rows = [
        {
            "topic": "compare",
            "part": part.name,
            "name": contender.name,
            "shape": described(shape),
            "device": device_name,
            "ms": 1e3 * seconds,
            "tflops": flops / seconds / 1e12 if flops else None,
            "error": error,
            "versions": {**versions(), **packages(contender)},
            **origin,
        }
        for (contender, _, error), seconds in zip(steps, times, strict=True)
    ]
    return rows, wrong


def checked_steps(
    part: Part, shape: tuple[int, ...], device: str
) -> tuple[list[tuple[Contender, Step, float]], int]:
    """The steps of every contender that runs on this device with correct results, with their errors, and the
    number of wrong or failed ones."""
    inputs = part.inputs(device, *shape)
    expected = part.oracle(inputs)
    steps: list[tuple[Contender, Step, float]] = []
    wrong = 0
    for contender in part.contenders:
        if contender.missing():
            continue
        if contender.cuda_only and device != "cuda":
            tell(contender.name, "runs on CUDA only")
            continue
        start = time.perf_counter()
        try:
            step = contender.make(inputs)
            results = contender.decode(step())
            pairs = [pair for pair in zip(results, expected, strict=True) if pair[0] is not None]
            errors = [relative_error(*pair) for pair in pairs]
        except Exception as error:  # others continue; failures of torch and of this library are counted
            tell(contender.name, f"does not run here: {type(error).__name__}: {first_line(error)}")
            wrong += not contender.needs
            continue
        worst = max(errors)
        tell(contender.name, f"first call {time.perf_counter() - start:.1f} s")
        if not worst <= contender.bound:
            outputs = [name for name, result in zip(part.outputs, results, strict=True) if result is not None]
            each = ", ".join(f"{name} {e:.1e}" for name, e in zip(outputs, errors, strict=True))
            tell(contender.name, f"WRONG RESULT, not timed: {each}; wanted {contender.bound:.1e}")
            wrong += 1
            continue
        steps.append((contender, step, worst))
    return steps, wrong


def tell(name: str, what: str) -> None:
    print(line((f"  {name}", what), (-34, -1)), flush=True)


def described(shape: tuple[int, ...]) -> str:
    tokens, experts, hidden, ffn, topk = shape
    return f"{tokens} tokens, {hidden} x {ffn}, {experts} experts top-{topk}"


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def packages(contender: Contender) -> dict[str, str]:
    """Versions of torch and of the modules that the contender needs."""
    names = ["torch", *(distributions().get(need, [need])[0] for need in contender.needs)]
    package_versions = {}
    for name in names:
        try:
            package_versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # built from source
            package_versions[name] = str(getattr(sys.modules.get(name), "__version__", "unknown"))
    return package_versions


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Distributions that provide each module; slow, because it reads the files of all installed packages."""
    return importlib.metadata.packages_distributions()


def relative_error(result: Any, expected: Any) -> float:
    """Norm of the difference over the norm of the expected values; infinite if the result contains NaN."""
    if result.shape != expected.shape:
        raise ValueError(f"result: got shape {list(result.shape)}; wanted {list(expected.shape)}")
    error = float((result.double() - expected).norm() / expected.norm())
    return math.inf if math.isnan(error) else error


def in_turn(
    steps: list[Step], device: str, rounds: int = ROUNDS, warming: float = WARM, timing: float = TIMED
) -> list[float]:
    """Median seconds of each step over several rounds. In a round, each step runs for ``warming`` seconds and
    is then timed for ``timing`` seconds."""
    if device == "cpu":
        return [statistics.median(wall_time(step) for _ in range(3)) for step in steps]
    import torch

    counts = []
    for step in steps:
        step()
        (seconds,) = event_times(step, 1)
        counts.append((round(warming / seconds), math.ceil(timing / seconds)))
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, (warm, timed), samples in zip(steps, counts, times, strict=True):
            for _ in range(warm):
                step()
            samples += event_times(step, timed)
            torch.cuda.synchronize()
    return [statistics.median(samples) for samples in times]


def wall_time(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def event_times(step: Step, count: int) -> list[float]:
    import torch

    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
    for start, end in pairs:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


# -- the chart


OURS, OTHERS = "#1b7f5c", "#8d99a6"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw bars of the layer's step for every library, one panel per shape, as SVG or PNG by the path's
    suffix.

    Parameters
    ----------
    rows : list of dict
        Rows as this command writes them; rows of other parts than "layer" are ignored.
    path : Path
        Output file; its folder is created. Equal rows give equal files.

    Raises
    ------
    ValueError
        If there are no rows of the layer, or rows of several devices.
    """
    rows = [row for row in rows if row.get("part") == "layer"]
    devices = list(dict.fromkeys(row["device"] for row in rows))
    if len(devices) != 1:
        raise ValueError(f"rows: got rows of {devices or 'no layer'}; wanted rows of the layer on one device")
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "fp8moe"
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    panels = [[row for row in rows if row["shape"] == shape] for shape in shapes]
    heights = [len(panel) + 1 for panel in panels]
    figure, grid = pyplot.subplots(
        len(shapes), 1, figsize=(9, 0.34 * sum(heights) + 1.1), height_ratios=heights, squeeze=False
    )
    for axes, shape, panel in zip(grid[:, 0], shapes, panels, strict=True):
        panel = sorted(panel, key=lambda row: -row["ms"])
        colors = [OURS if row["name"].startswith("fp8moe") else OTHERS for row in panel]
        bars = axes.barh([row["name"] for row in panel], [row["ms"] for row in panel], color=colors)
        axes.bar_label(bars, [f"{row['ms']:.2f} ms" for row in panel], padding=4, fontsize=9)
        axes.set_title(shape, fontsize=10, loc="left")
        axes.set_xlim(0, 1.15 * max(row["ms"] for row in panel))
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(axis="y", length=0, labelsize=9)
        axes.xaxis.set_visible(False)
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    commands = "; ".join(dict.fromkeys(row["command"] for row in rows))
    figure.suptitle(f"A layer's experts, forward and backward, on {devices[0]}", fontsize=11)
    figure.supxlabel(f"{commands} (commit {commits})", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=160)
    pyplot.close(figure)


def command_line(words: list[str] | None = None) -> int:
    """The exit code of ``python -m benchmarks.compare``: as `main`'s, or 2 for an unusable argument."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quick", action="store_true", help="a small shape, few repetitions")
    parser.add_argument("--part", action="append", help="run only this part; repeatable")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--picture", type=Path, help="plot layer times, .svg or .png")
    given = parser.parse_args(words)
    try:
        return main(given.device, given.quick, given.out, given.picture, named_parts(given.part))
    except (ImportError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(command_line())
