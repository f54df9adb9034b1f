"""The experts of six models by tokens, with this library and every other that is installed: ``python -m
benchmarks.sweep --out FILE``, on CUDA; ``--device cpu`` tries the program with a tiny model.

Work, with given routing: "forward"; "1 a step", forward and backward; and "8 a step", eight micro-batches
whose gradients autograd adds in ``grad``, of which a row has the time of one. "copies each time" makes the
FP8 weights in every forward, "copies shared" once a step, inside `weights_unchanged`. A row has the time,
the host's where it is slower; the host's alone, until the call returns; that of the same work in a CUDA
graph; the memory that the forward saves, and the peak. Results are first compared with float64, and
contenders run in turn, so that a rise of the GPU's temperature affects all.

Rows are appended as they are measured, and those of the same commit and device that the file has are not
measured again: ``--seconds`` limits a run, and the next one goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare import checked_steps, first_line, in_turn, packages, tell
from benchmarks.compare_layer import BFLOAT16, E4M3, LAYER, Experts, experts, step_of
from benchmarks.contender import Contender, TrainingStep
from benchmarks.host import graph_us
from fp8moe.bench.harness import append
from fp8moe.info import commit, versions
from fp8moe.runtime.tables import line
from fp8moe.torch import moe_experts, weights_unchanged

#: hidden, ffn, experts, top-k. A rank of an expert-parallel model has few experts, to which all its rows go.
MODELS = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "GLM-4.5-Air": (4096, 1408, 128, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "Mixtral-8x7B": (4096, 14_336, 8, 2),
    "DeepSeek-V3 on 32 ranks": (7168, 2048, 8, 8),
    "Kimi-K2 on 64 ranks": (7168, 2048, 6, 6),
}
TINY = {"tiny": (128, 128, 4, 2)}
TOKENS = 64, 512, 2048, 8192, 32_768
ACCUMULATED = 8  # micro-batches of a step
MOST = 8192  # tokens of such a micro-batch: with more, what micro-batches share is a small part
WORK = "forward", "1 a step", f"{ACCUMULATED} a step"
# seconds of one contender's steps in a round, so that all models take less than four minutes; at least one is
# timed, and one that takes longer needs no warm-up
ROUNDS, WARM, TIMED = 2, 0.03, 0.06
SHARED = "fp8_flow, copies shared"
COLUMNS = -38, -10, 13  # widths of a printed row


def compiled(recipe: Any) -> Callable[[Experts], TrainingStep]:
    def forward(x: Any, w13: Any, w2: Any, ids: Any, probs: Any) -> Any:
        return moe_experts(x, w13, w2, ids, probs, recipe=recipe)

    return lambda inputs: step_of(inputs, torch.compile(forward, fullgraph=True))


#: of `compare`, with this library's by the names of their recipes; the baseline of 12 casts is left out
CONTENDERS = (
    *(
        replace(c, name=c.name.removeprefix("fp8moe, "))
        for c in LAYER.contenders
        if not c.name.startswith(("fp8moe of", "fp8moe, fp8_blockwise"))
    ),
    Contender("bf16 compiled", compiled("bf16"), BFLOAT16, cuda_only=True),
    Contender("fp8_flow compiled", compiled("fp8_flow"), E4M3, cuda_only=True),
)


@dataclass(frozen=True)
class Case:
    """What a row has the time of: ``count`` micro-batches. forward: one of them."""

    name: str
    work: str
    run: Callable[[], Any]
    forward: Callable[[], Any]
    contender: Contender
    error: float
    count: int = 1
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--work", nargs="+", choices=WORK, default=WORK)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="contenders, in place of all that are eager"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing after so many")
    given = parser.parse_args(words)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, which torch does not find; wanted cpu, to try the program")
    named = {c.name: c for c in CONTENDERS if not c.missing()}
    if wrong := [name for name in given.only or () if name not in named]:
        parser.error(f"--only: got {wrong}; wanted some of {[*named]}, which are installed")
    chosen = given.only or [name for name in named if "compiled" not in name]
    on_cuda = given.device == "cuda"
    models = {model: MODELS[model] for model in given.models} if on_cuda else TINY
    tokens, end = given.tokens or (TOKENS if on_cuda else (8,)), time.monotonic() + given.seconds
    name = torch.cuda.get_device_name() if on_cuda else "cpu"
    done = measured(given.out, name)
    print("not installed here:", *(c.name for c in CONTENDERS if c.missing()), sep="\n  ")
    failures = 0
    for model, (hidden, ffn, count, topk) in models.items():
        for number in tokens:
            works = [w for w in given.work if w != WORK[2] or number <= MOST]
            cell = {(model, number, work) for work in works}
            left = [n for n in chosen if any((*key, n) not in done for key in cell)]
            if not left:
                continue
            if time.monotonic() > end:
                print(
                    f"--seconds {given.seconds:g} are over: the same command goes on with {model}, {number}"
                )
                return 1
            print(f"{model}, {number} tokens", flush=True)
            if any("compiled" in n for n in left):
                torch.compiler.reset()  # it refuses to compile a function for more than some shapes
            part = replace(LAYER, contenders=tuple(named[n] for n in left), inputs=with_parameters)
            steps, wrong_results = checked_steps(part, (number, count, hidden, ffn, topk), given.device)
            failures += wrong_results
            cases = [
                case
                for each in steps
                for case in cases_of(*each, works)
                if (model, number, case.work, case.name) not in done
            ]
            broken = [case for case in cases if not runs(case)]
            failures += sum(not case.contender.needs for case in broken)
            cases = [case for case in cases if case not in broken]
            for row in rows(cases, given.device):
                row |= {"model": model, "tokens": number, "device": name}
                row["shape"] = f"{model}, {number} tokens, {row['work']}"
                print(line((f"  {row['name']}", row["work"], f"{row['ms']:.3f} ms"), COLUMNS), flush=True)
                append(given.out, row)
            del cases, steps, part
            if on_cuda:
                torch.cuda.empty_cache()
    return 1 if failures else 0


def measured(out: Path | None, device: str) -> Collection[tuple[str, int, str, str]]:
    """Model, tokens, work and name of the rows of this commit and device in the file; and of "fp8_flow" where
    the last of its rows is there."""
    if out is None or not out.exists():
        return set()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    rows = [r for r in rows if (r["commit"], r["device"]) == (commit(), device)]
    found = {(r["model"], r["tokens"], r["work"], r["name"]) for r in rows}
    return found | {(*key, "fp8_flow") for *key, name in found if name == SHARED}


def with_parameters(device: str, *shape: int) -> Experts:
    """The inputs of `compare`, with weights that `weights_unchanged` accepts."""
    inputs = experts(device, *shape)
    w13, w2 = (torch.nn.Parameter(w.detach()) for w in (inputs.w13, inputs.w2))
    return replace(inputs, w13=w13, w2=w2)


def cases_of(contender: Contender, step: Any, error: float, works: Collection[str]) -> Iterator[Case]:
    """What is measured of a contender."""
    case = partial(Case, forward=step.forward, contender=contender, error=error)
    for work, run in zip(WORK, (step.forward, step.whole), strict=False):
        if work in works:
            yield case(contender.name, work, run)
    if WORK[2] not in works:
        return
    several = partial(accumulate, step)
    makes_copies = contender.name == "fp8_flow"
    each = ", copies each time" * makes_copies
    yield case(contender.name + each, WORK[2], several, count=ACCUMULATED)
    if makes_copies:
        _, w13, w2, _ = step.leaves
        inside = partial(weights_unchanged, torch.nn.ParameterList([w13, w2]))
        yield case(SHARED, WORK[2], partial(accumulate, step, inside), count=ACCUMULATED, inside=inside)


def accumulate(step: TrainingStep, inside: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
    """A step of several micro-batches, with the gradients of the weights added."""
    x, *_, probs = step.leaves
    with inside():
        for _ in range(ACCUMULATED):
            step.forward().backward(step.dy)
            x.grad = probs.grad = None
    for leaf in step.leaves:
        leaf.grad = None


def runs(case: Case) -> bool:
    try:
        case.run()
    except Exception as error:  # the others go on
        tell(case.name, f"{case.work} does not run: {type(error).__name__}: {first_line(error)}")
        return False
    return True


def rows(cases: list[Case], device: str) -> Iterator[dict[str, Any]]:
    """A row of each case, without model, tokens and device."""
    times = in_turn([case.run for case in cases], device, ROUNDS, WARM, TIMED)
    for case, seconds in zip(cases, times, strict=True):
        on_cuda = of_device(case) if device == "cuda" else dict.fromkeys(ON_CUDA)
        yield {
            "topic": "sweep",
            "name": case.name,
            "work": case.work,
            "micro_batches": case.count,
            "ms": 1e3 * seconds / case.count,
            **on_cuda,
            "error": case.error,
            "versions": {**versions(), **packages(case.contender)},
            "commit": commit(),
            "command": "python -m benchmarks.sweep",
        }


#: fields of a row that a GPU has
ON_CUDA = "host_ms", "graph_ms", "saved_bytes", "peak_bytes"


def of_device(case: Case) -> dict[str, Any]:
    """`ON_CUDA`. Memory is beside inputs and weights: what the forward saves, and the peak of the work, with
    its gradients."""
    host = []
    for _ in range(3 if case.count == 1 else 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        case.run()
        host.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    with case.inside():
        case.forward()  # makes the copies that are shared
        before = torch.cuda.memory_allocated()
        y = case.forward()
        saved = torch.cuda.memory_allocated() - before - y.nbytes
        del y
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    case.run()
    peak = torch.cuda.max_memory_allocated() - before
    # of one micro-batch: several are a loop of it
    graph = graph_us(case.contender, case.run, rounds=1, repeats=3) if case.count == 1 else None
    return {
        "host_ms": 1e3 * statistics.median(host) / case.count,
        "graph_ms": None if graph is None else graph / 1e3,
        "saved_bytes": saved,
        "peak_bytes": peak,
    }


if __name__ == "__main__":
    sys.exit(main())
