"""Rows between GPUs, and the layer over them, FP8 against bfloat16: ``python -m fp8moe.benchmarks.exchange
[--out FILE] [--ranks N] [--by NCCL PEER]``, a process for each GPU of this machine; by NCCL, and by writing
into each other's memory.

rows: N rows of 7168 on each rank, as many to each. exchange: one call, packed rows. with its quantise: from
bfloat16 to FP8 rows in one buffer, then that. dispatch: the whole of `expert_parallel.dispatch` from
bfloat16, top-8 of 64 experts a rank, counts and all. combine: those rows back, and their sums. layer:
forward and backward of `FP8FlowMoE`, of fp8_flow also with other rows, and another routing, at every step, in
two and four chunks that overlap, with a capacity (a quarter more entries than an even routing has, and rows
for every token), and both. Times are the slowest rank's, medians; of the first two, and of all that has a
capacity, also the device's alone, ten calls in a CUDA graph (graph_us).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fp8moe
from fp8moe import expert_parallel
from fp8moe.adapters.torch_distributed import ProcessGroup
from fp8moe.adapters.torch_moe import FP8FlowMoE
from fp8moe.adapters.torch_symmetric_memory import SymmetricMemory, window_bytes
from fp8moe.benchmarks.harness import append
from fp8moe.benchmarks.layer import training_step
from fp8moe.expert_parallel import Capacity, Counts
from fp8moe.info import commit, versions

HIDDEN, FFN, TOPK = 7168, 2048, 8
ROWS, TOKENS = (4096, 8192, 32_768), (4096, 16_384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, default=0, help="GPUs; by default all")
    parser.add_argument("--by", nargs="+", choices=("nccl", "peer"), default=["nccl", "peer"])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="of each rank")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="of the layer, of each rank")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: gloo, tiny sizes")
    arguments = parser.parse_args()
    world = arguments.ranks or torch.cuda.device_count()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = arguments.by, arguments.rows, arguments.tokens
    by, rows, tokens = given if arguments.device == "cuda" else (["gloo"], [64], [64])
    sizes = rows, tokens
    torch.multiprocessing.spawn(run, (world, port, by, sizes, arguments.device, arguments.out), nprocs=world)


def run(
    rank: int,
    world: int,
    port: int,
    by: list[str],
    sizes: tuple[list[int], list[int]],
    device: str,
    out: Path | None,
) -> None:
    cuda = device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    hidden, layers = HIDDEN if cuda else 256, [(tokens, 8 if cuda else 2) for tokens in sizes[1]]
    for name in by:
        room = window_bytes(world, max(*sizes[0], *sizes[1]), HIDDEN, TOPK)
        comm = SymmetricMemory(None, room) if name == "peer" else ProcessGroup()
        torch.manual_seed(rank)

        def tell(row: dict[str, Any], words: str = "", by: str = name) -> None:
            report({**row, "name": row["name"] + words, "by": by}, rank, world, device, out)

        for rows in sizes[0]:
            for row in of_rows(comm, rows, hidden, device):
                tell(row)
        for layer in layers:
            for recipe in ("bf16", "fp8_blockwise", "fp8_flow"):
                tell(of_layer(comm, *layer, recipe, device))
            tell(of_layer(comm, *layer, "fp8_flow", device, inputs=16), ", other rows each step")
            for chunks in (2, 4):
                way, words = transport(name, room, 0, chunks)
                tell(of_layer(way, *layer, "fp8_flow", device), words)
        if name == "peer":
            continue
        for rows in sizes[0]:
            for row in of_bounded(rows, hidden, device):
                tell(row)
        for layer in layers:
            for chunks in (1, 2, 4):
                way, words = transport(name, room, layer[0] // chunks, chunks)
                tell(of_layer(way, *layer, "fp8_flow", device), words)
    dist.destroy_process_group()


def transport(name: str, room: int, rows: int, chunks: int) -> tuple[ProcessGroup, str]:
    """One that overlaps so many chunks, and has a capacity for ``rows`` tokens a chunk unless that is 0."""
    words = f", {chunks} chunks" if chunks > 1 else ""
    if name == "peer":
        return SymmetricMemory(None, room, overlap_chunks=chunks), words
    if not rows:
        return ProcessGroup(overlap_chunks=chunks), words
    capacity = Capacity(rows, rows * TOPK * 5 // 4)
    return ProcessGroup(capacity=capacity, overlap_chunks=chunks), f"{words}, capacity"


def of_rows(comm: ProcessGroup, rows: int, hidden: int, device: str) -> list[dict[str, Any]]:
    x, ids, probs = routed(rows, hidden, device)
    equal = ((rows // comm.world_size,) * comm.world_size,) * comm.world_size
    measured = []
    for name, fmt in (("bf16", None), ("fp8", "e4m3")):
        cases = of_format(comm, x, ids, probs, equal, fmt)
        for verb, action in cases:
            with fp8moe.trace() as counted:
                action()
            sent = counted.sent_bytes
            row = {"name": f"{verb}, {name}", "shape": f"{rows} x {hidden}", "sent_bytes": sent}
            row["us"] = seconds(action, device) * 1e6
            if device == "cuda" and verb != "dispatch":  # which looks at counts
                row["graph_us"] = graph_seconds(action) * 1e6
            measured.append(row)
    return measured + of_sums(comm, x, ids, probs)


def routed(rows: int, hidden: int, device: str) -> tuple[Any, Any, Any]:
    """Rows, and their expert ids and probabilities."""
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    ids = torch.rand(rows, 64 * dist.get_world_size(), device=device).topk(TOPK).indices
    return x, ids, torch.rand(rows, TOPK, device=device)


def of_bounded(rows: int, hidden: int, device: str) -> list[dict[str, Any]]:
    """dispatch, and combine in bfloat16, with a capacity for every token."""
    comm = ProcessGroup(capacity=Capacity(rows, rows * TOPK))
    x, ids, probs = routed(rows, hidden, device)
    measured = []
    for name, fmt in (("bf16", None), ("fp8", "e4m3")):

        def dispatch(fmt: str | None = fmt) -> Any:
            return expert_parallel.dispatch(x, ids, probs, 64 * comm.world_size, comm, fmt=fmt)

        arrived = dispatch()
        y = torch.randn(arrived.x.shape, device=device, dtype=torch.bfloat16)

        def combine(y: Any = y, route: Any = arrived.route) -> Any:
            return expert_parallel.combine(y, route, comm)

        for action in (dispatch, combine) if fmt is None else (dispatch,):
            row: dict[str, Any] = {"name": f"{action.__name__}, {name}, capacity"}
            row["shape"] = f"{rows} x {hidden}"
            row["us"] = seconds(action, device) * 1e6
            if device == "cuda":
                row["graph_us"] = graph_seconds(action) * 1e6
            measured.append(row)
    return measured


def of_sums(comm: ProcessGroup, x: Any, ids: Any, probs: Any) -> list[dict[str, Any]]:
    """combine, in bfloat16 and in FP8, and how far the second is from the first."""
    arrived = expert_parallel.dispatch(x, ids, probs, 64 * comm.world_size, comm)
    y, measured, sums = torch.randn_like(arrived.x), [], []
    for name, fmt in (("bf16", None), ("fp8", "e4m3")):

        def action(fmt: str | None = fmt) -> Any:
            return expert_parallel.combine(y, arrived.route, comm, fmt=fmt)

        with fp8moe.trace() as counted:
            sums.append(action().double())
        row = {"name": f"combine, {name}", "shape": f"{x.shape[0]} x {x.shape[1]}"}
        measured.append({**row, "sent_bytes": counted.sent_bytes, "us": seconds(action, x.device.type) * 1e6})
    measured[1]["error"] = float((sums[1] - sums[0]).norm() / sums[0].norm())
    return measured


def of_format(
    comm: ProcessGroup, x: Any, ids: Any, probs: Any, equal: Counts, fmt: str | None
) -> list[tuple[str, Callable[[], Any]]]:
    ready = expert_parallel.messages.Message(x, fmt).pack()

    def exchange(rows: Any, fmt: str | None) -> Any:
        message = expert_parallel.messages.Message(rows, fmt)
        pending = expert_parallel.exchange.deliver(message, None, equal, comm)
        if pending is None:
            packed, size = message.pack(), message.row_bytes
            pending = expert_parallel.exchange.exchange_rows(packed, size, equal, comm)
        return pending.wait()

    def dispatch() -> Any:
        return expert_parallel.dispatch(x, ids, probs, 64 * comm.world_size, comm, fmt=fmt)

    return [
        ("exchange", lambda: exchange(ready, None)),
        ("with its quantise", lambda: exchange(x, fmt)),
        ("dispatch", dispatch),
    ]


def of_layer(
    comm: ProcessGroup, tokens: int, experts: int, recipe: str, device: str, inputs: int = 1
) -> dict[str, Any]:
    """inputs: how many, of which every step takes the next."""
    hidden, ffn = (HIDDEN, FFN) if device == "cuda" else (256, 128)
    topk = min(TOPK, experts)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "recipe": recipe}
    layer = FP8FlowMoE(hidden, ffn, experts * comm.world_size, topk, process_group=comm, **options)
    steps = itertools.cycle([training_step(layer, tokens) for _ in range(inputs)])

    def step() -> None:
        forward, backward = next(steps)
        backward(forward())

    us = seconds(step, device, calls=3, repeats=5) * 1e6
    shape = f"{tokens} tokens, {hidden} x {ffn}, {experts} experts a rank, top-{topk}"
    row = {"name": f"layer, {recipe}", "shape": shape, "us": us, "tokens_per_s": tokens / us * 1e6}
    if comm.capacity is not None:
        row["overflow"] = comm.overflow().tolist()
        if device == "cuda":
            x, dy = torch.randn(2, tokens, hidden, device=device, dtype=torch.bfloat16)
            leaves = [x.requires_grad_(), *layer.parameters()]
            gradients = partial(torch.autograd.grad, inputs=leaves, grad_outputs=dy)
            row["graph_us"] = graph_seconds(lambda: gradients(layer(x)), calls=2) * 1e6
    return row


def graph_seconds(action: Callable[[], Any], calls: int = 10) -> float:
    """The same of calls that a CUDA graph replays: the host is not in it."""
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    gc.disable()  # what it frees may be a graph, which no capture allows
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                action()
    finally:
        gc.enable()
    return seconds(graph.replay, "cuda", calls=2) / calls


def seconds(action: Callable[[], Any], device: str, calls: int = 10, repeats: int = 7) -> float:
    """The slowest rank's median time of a call, of several in a row: the ranks do not start together."""
    for _ in range(3):
        action()
    times = []
    for _ in range(repeats):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            action()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls)
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def report(row: dict[str, Any], rank: int, world: int, device: str, out: Path | None) -> None:
    if rank:
        return
    more = f"{row.get('graph_us', 0):10.1f} {row.get('sent_bytes', 0):12} {row.get('error', '')}"
    print(f"{row['by']:5} {row['name']:26} {row['shape']:57} {row['us']:10.1f} us {more}", flush=True)
    if out:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        kept = {
            "topic": "exchange",
            "device": f"{world} x {name}",
            "versions": {**versions(), "torch": torch.__version__},
        }
        said = {"commit": commit(), "command": "python -m fp8moe.benchmarks.exchange"}
        append(out, {**kept, **row, **said})


if __name__ == "__main__":
    main()
