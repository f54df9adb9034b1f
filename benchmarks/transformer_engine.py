"""Transformer Engine's permutation functions of the adapter compared with fp8moe's own, as a torch user calls
them. ``python -m benchmarks.transformer_engine [--out FILE]``, on CUDA.

Device time: a CUDA graph of each call on several inputs in turn, so that none is in the L2 cache. Every
result is first compared with that of plain torch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fp8moe.torch
import fp8moe.transformer_engine.pytorch as te
from fp8moe.bench.harness import Cuda, append, routing
from fp8moe.info import commit, versions
from fp8moe.runtime.tables import line

SHAPE = 4096, 256, 7168, 8  # tokens, experts, hidden, top-k of DeepSeek-V3
QUICK = 64, 8, 128, 2
TURNS, ROUNDS, REPEATS = 3, 3, 15  # number of inputs used in turn, rounds of them in a graph, replays of it


class Inputs(NamedTuple):
    x: Tensor  # bfloat16 [T, H]
    ids: Tensor  # int32 [T, k]
    mask: Tensor  # bool [T, E]
    probs: Tensor  # float32 [T, E], with one sixteenth of the routed ones set to 0
    weights: Tensor  # float32 [T, k]


def inputs(shape: tuple[int, int, int, int], seed: int, device: str) -> Inputs:
    tokens, experts, hidden, topk = shape
    ids = torch.from_numpy(routing(tokens, experts, topk, seed)).to(device)
    random = torch.Generator(device).manual_seed(seed)
    options: Any = {"device": device, "generator": random}
    mask = torch.zeros(tokens, experts, dtype=torch.bool, device=device).scatter_(1, ids.long(), True)
    probs = torch.rand(tokens, experts, **options) * mask
    probs *= torch.rand(tokens, experts, **options) < 15 / 16
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, **options)
    return Inputs(x, ids, mask, probs, torch.rand(tokens, topk, **options))


class Case(NamedTuple):
    """name, run: makes one call. check: whether its result is correct. nbytes: minimum number of bytes to
    move."""

    name: str
    run: Callable[[], Any]
    check: Callable[[Any], bool]
    nbytes: int


def cases(inputs_of_case: Inputs) -> Iterator[Case]:
    """Cases for one set of inputs."""
    x, ids, mask, probs, weights = inputs_of_case
    (tokens, hidden), topk = x.shape, ids.shape[1]
    rows, shape, row = tokens * topk, x.shape, 2 * hidden
    token = mask.t().nonzero(as_tuple=True)[1]
    routed = x[token]
    weighted = probs.t()[mask.t()]
    by_mask = fp8moe.torch.plan_routing_map(mask, num_out_tokens=rows)
    row_map, moved = by_mask.row_id_map.clone(), fp8moe.torch.permute(x, by_mask).data
    by_index, index_map = te.moe_permute(x, ids, rows, map_type="index")
    sums = topk * x.float()
    permute_bytes, unpermute_bytes = (tokens + rows) * row, (rows + tokens) * row

    def is_equal(expected: Tensor) -> Callable[[Any], bool]:
        return lambda result: torch.equal(result if isinstance(result, Tensor) else result[0], expected)

    def is_close(
        expected: Tensor,
    ) -> Callable[[Any], bool]:  # summed in float32, then rounded to bfloat16 once
        return lambda y: bool(torch.allclose(y.float(), expected, rtol=2.0**-8, atol=1e-3))

    nonzero_rows = routed * (weighted != 0).unsqueeze(1)
    yield Case(
        "fp8moe.torch.permute", lambda: fp8moe.torch.permute(x, by_mask).data, is_equal(routed), permute_bytes
    )
    yield Case("moe_permute, mask", lambda: te.moe_permute(x, mask, rows), is_equal(routed), permute_bytes)
    yield Case(
        "moe_permute_with_probs",
        lambda: te.moe_permute_with_probs(x, probs, mask, rows),
        is_equal(nonzero_rows),
        permute_bytes,
    )
    yield Case(
        "moe_permute, index",
        lambda: te.moe_permute(x, ids, rows, map_type="index"),
        lambda result: torch.equal(result[0][result[1].long()], x.repeat(topk, 1)),
        permute_bytes,
    )
    yield Case(
        "fp8moe.torch.unpermute",
        lambda: fp8moe.torch.unpermute(moved, by_mask),
        is_close(sums),
        unpermute_bytes,
    )
    yield Case(
        "moe_unpermute, mask",
        lambda: te.moe_unpermute(moved, row_map, restore_shape=shape),
        is_close(sums),
        unpermute_bytes,
    )
    yield Case(
        "moe_unpermute, mask, probs",
        lambda: te.moe_unpermute(moved, row_map, probs, shape),
        is_close(probs.sum(1, keepdim=True) * x.float()),
        unpermute_bytes,
    )
    yield Case(
        "moe_unpermute, index",
        lambda: te.moe_unpermute(by_index, index_map, weights, map_type="index"),
        is_close(weights.sum(1, keepdim=True) * x.float()),
        unpermute_bytes,
    )


def seconds(calls: list[Callable[[], Any]], rounds: int = ROUNDS, repeats: int = REPEATS) -> float:
    """Median device time of a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events)) / 1e3 / (rounds * len(calls))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="one small shape")
    arguments = parser.parse_args()
    shape = QUICK if arguments.quick else SHAPE
    rate = Cuda().copy_rate()
    name = torch.cuda.get_device_name()
    print(f"{name}: copy {rate / 1e9:.1f} GB/s")
    for turns in zip(*(cases(inputs(shape, seed, "cuda")) for seed in range(TURNS)), strict=True):
        if not all(case.check(case.run()) for case in turns):
            raise RuntimeError(f"{turns[0].name}: WRONG RESULT")
        us = seconds([case.run for case in turns]) * 1e6
        percent = 100 * turns[0].nbytes / rate / us * 1e6
        cells = turns[0].name, ",".join(map(str, shape)), f"{us:.1f} us", f"{percent:.1f} %"
        print(line(cells, (-28, -16, 11, 8)), flush=True)
        row = {
            "topic": "transformer_engine",
            "name": turns[0].name,
            "shape": ",".join(map(str, shape)),
            "device": name,
            "us": us,
            "limit_percent": percent,
            "copy_gb_s": rate / 1e9,
            "nbytes": turns[0].nbytes,
            "versions": {**versions(), "torch": torch.__version__},
            "commit": commit(),
            "command": "python -m benchmarks.transformer_engine",
        }
        append(arguments.out, row)


if __name__ == "__main__":
    main()
