"""Operations inside ``jax.jit`` compared with the same kernels alone: ``python -m
benchmarks.jax_inside [--out FILE] [--quick]``, on CUDA.

Alone: device time of a CUDA graph of 16 operations on four sets of arrays in turn, each with its own results.
Inside: wall time of a jitted function of 16 operations, which includes host time wherever the device waits
for the host, minus that of a function of 8 operations, to exclude the start and end of a program.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fp8moe
import fp8moe.jax
from fp8moe.bench import permute, plan, swiglu, transpose
from fp8moe.bench.harness import Case, Cuda, append, host
from fp8moe.info import commit, versions
from fp8moe.runtime.record_trees import arrays_in, map_arrays
from fp8moe.runtime.tables import line

SETS, OPERATIONS, CALLS = 4, 16, 3
#: title and width of the printed columns
COLUMNS = {"case": -34, "shape": -34, "alone us": 9, "inside us": 9, "more us": 8, "%": 6}
SMALL = (256, 8, 512, 2, 16)


def cases(quick: bool) -> list[Case]:
    """Cases of the data movement and transpose tables, and one whose time is almost only launch latency."""
    small = permute.one_shape(*SMALL)
    if quick:
        return small
    small += [c for c in plan.cases("cuda") if "256 experts" in c.shape or "256" in c.shape][:2]
    large = permute.one_shape(4096, 256, 7168, 8, 16) + permute.one_shape(4096, 256, 7168, 8, 128)
    tall = [c for c in transpose.cases("cuda") if c.shape.startswith(("48128", "4096,256"))]
    return [*small, *large, *tall, next(swiglu.cases("cuda"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="small shapes")
    arguments = parser.parse_args()
    machine = Cuda()
    print(line(COLUMNS, COLUMNS.values()))
    for case in cases(arguments.quick):
        row = measure(case, machine)
        alone, inside = row["us"], row["inside_us"]
        times = (f"{t:.1f}" for t in (alone, inside, inside - alone, 100 * inside / alone - 100))
        print(line((row["name"], row["shape"], *times), COLUMNS.values()), flush=True)
        append(arguments.out, row)


def measure(case: Case, machine: Cuda) -> dict[str, Any]:
    sets = [case.prepare(*(machine.upload(a) for a in case.arrays)) for _ in range(SETS)]
    result = case.run(*sets[0])
    if not case.check(result, *case.arrays):
        raise SystemExit(f"{case.name}: wrong result")
    results: list[Any] = []
    calls: list[Any] = [
        partial(lambda each: results.append(case.run(*each)), sets[i % SETS]) for i in range(OPERATIONS)
    ]
    alone = machine.seconds(calls, 15)
    results.clear()
    device = jax.devices("cuda")[0]
    jax_sets = [map_arrays(lambda a: jax.device_put(host(a), device), each) for each in sets]
    run = fp8moe.jax.traceable(case.run)

    def jitted(count: int) -> Any:
        return jax.jit(lambda sets: [outputs(run(*sets[i % SETS])) for i in range(count)])

    function, half = jitted(OPERATIONS), jitted(OPERATIONS // 2)
    for expected, actual in zip(arrays_in(outputs(result)), arrays_in(function(jax_sets)[0]), strict=True):
        if not np.array_equal(host(expected).view(np.uint8), np.asarray(actual).view(np.uint8)):
            raise SystemExit(f"{case.name}: different result inside jit")
    inside = (seconds(function, jax_sets) - seconds(half, jax_sets)) / (OPERATIONS - OPERATIONS // 2)
    return {
        "topic": "jax",
        "name": case.name,
        "shape": case.shape,
        "device": machine.name,
        "us": alone * 1e6,
        "inside_us": inside * 1e6,
        "versions": {**versions(), "jax": jax.__version__},
        "commit": commit(),
        "command": "python -m benchmarks.jax_inside",
    }


def seconds(function: Any, argument: Any) -> float:
    """Median time of a call."""
    times = []
    for _ in range(9):
        jax.block_until_ready(function(argument))
        start = time.perf_counter()
        for _ in range(CALLS):
            last = function(argument)
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start) / CALLS)
    return float(np.median(times))


def outputs(result: Any) -> Any:
    """One or two of the result's arrays: returning arrays from a jitted function takes longer than computing
    them (plan_topk with all seven 108 us, with one 10)."""
    if isinstance(result, fp8moe.PermutationPlan):
        return result.row_id_map
    return (result.data, result.probs) if isinstance(result, fp8moe.Permuted) else result


if __name__ == "__main__":
    main()
