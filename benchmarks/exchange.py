"""Exchange of rows between GPUs, and the layer with expert parallelism, FP8 against bfloat16: ``python -m
benchmarks.exchange [--out FILE] [--ranks N] [--by NCCL PEER]``. One process per GPU of this machine;
over NCCL, and by writing to peer memory.

rows: N rows of 7168 on each rank, equally many for each rank. exchange: one call with packed rows. of the
dispatched rows: with as many for each rank as the dispatch below sends, nearly every row to every rank. with
its quantise: packing of bfloat16 to FP8 rows in one buffer, then the exchange. dispatch: all of
`expert_parallel.dispatch` from bfloat16, top-8 of 64 experts per rank, including counts. combine: the return
of those rows and their sums. layer: forward and backward of `FP8FlowMoE`; for fp8_flow also with other rows,
and another routing, in every step, in two and four overlapping chunks, with a capacity (a quarter more
entries than an even routing has, and rows for every token), and with both. Times are medians of the slowest
rank. For the first three, and for all with a capacity, graph_us is the device time without the host, from ten
calls in a CUDA graph. ``--trace``: only the kernels of one dispatch and one combine on the first rank, in
their order, each with the time before it in which the device is idle.
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
from benchmarks.layer import training_step
from fp8moe import expert_parallel
from fp8moe.bench.harness import append
from fp8moe.expert_parallel import Capacity, Counts
from fp8moe.info import commit, versions
from fp8moe.runtime.tables import line
from fp8moe.torch import FP8FlowMoE, ProcessGroup, SymmetricMemory, window_bytes

HIDDEN, FFN, TOPK = 7168, 2048, 8
ROWS, TOKENS = (4096, 8192, 32_768), (4096, 16_384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, default=0, help="GPUs; by default all, on the CPU two processes")
    parser.add_argument("--by", nargs="+", choices=("nccl", "peer"), default=["nccl", "peer"])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="of each rank")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="of the layer, of each rank")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: gloo, tiny sizes")
    parser.add_argument("--trace", action="store_true", help="list kernels in place of times")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    world = arguments.ranks or (gpus if arguments.device == "cuda" else 2)
    if arguments.device == "cuda" and not 0 < world <= gpus:
        parser.error(f"--ranks: got {world} with {gpus} GPUs; wanted 1 to all of them, or --device cpu")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes_and_transports = arguments.by, arguments.rows, arguments.tokens
    by, rows, tokens = sizes_and_transports if arguments.device == "cuda" else (["gloo"], [64], [64])
    sizes = rows, tokens
    options = arguments.device, arguments.out, arguments.trace
    torch.multiprocessing.spawn(run, (world, port, by, sizes, *options), nprocs=world)


def run(
    rank: int,
    world: int,
    port: int,
    by: list[str],
    sizes: tuple[list[int], list[int]],
    device: str,
    out: Path | None,
    traces: bool = False,
) -> None:
    cuda = device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank) if cuda else None,
    )
    hidden, layers = HIDDEN if cuda else 256, [(tokens, 8 if cuda else 2) for tokens in sizes[1]]
    for name in by:
        room = window_bytes(world, max(*sizes[0], *sizes[1]), HIDDEN, TOPK)
        comm = SymmetricMemory(None, room) if name == "peer" else ProcessGroup()
        torch.manual_seed(rank)

        def report_row(row: dict[str, Any], suffix: str = "", by: str = name) -> None:
            report({**row, "name": row["name"] + suffix, "by": by}, rank, world, device, out)

        for rows in sizes[0]:
            for row in (of_kernels if traces else of_rows)(comm, rows, hidden, device):
                report_row(row)
        if traces:
            continue
        for layer in layers:
            for recipe in ("bf16", "fp8_blockwise", "fp8_flow"):
                report_row(of_layer(comm, *layer, recipe, device))
            report_row(of_layer(comm, *layer, "fp8_flow", device, inputs=16), ", new inputs in each step")
            for chunks in (2, 4):
                transport_of_row, suffix = transport(name, room, 0, chunks)
                report_row(of_layer(transport_of_row, *layer, "fp8_flow", device), suffix)
        if name == "peer":
            continue
        for rows in sizes[0]:
            for row in of_bounded(rows, hidden, device):
                report_row(row)
        for layer in layers:
            for chunks in (1, 2, 4):
                transport_of_row, suffix = transport(name, room, layer[0] // chunks, chunks)
                report_row(of_layer(transport_of_row, *layer, "fp8_flow", device), suffix)
    dist.destroy_process_group()


def transport(name: str, room: int, rows: int, chunks: int) -> tuple[ProcessGroup, str]:
    """A transport with so many overlapping chunks, and unless ``rows`` is 0 a capacity for so many tokens per
    chunk; and the suffix of its name."""
    suffix = f", {chunks} chunks" if chunks > 1 else ""
    if name == "peer":
        return SymmetricMemory(None, room, overlap_chunks=chunks), suffix
    if not rows:
        return ProcessGroup(overlap_chunks=chunks), suffix
    capacity = Capacity(rows, rows * TOPK * 5 // 4)
    return ProcessGroup(capacity=capacity, overlap_chunks=chunks), f"{suffix}, capacity"


def of_rows(comm: ProcessGroup, rows: int, hidden: int, device: str) -> list[dict[str, Any]]:
    x, ids, probs = routed(rows, hidden, device)
    equal = ((rows // comm.world_size,) * comm.world_size,) * comm.world_size
    results = []
    for name, fmt in (("bf16", None), ("fp8", "e4m3")):
        cases = of_format(comm, x, ids, probs, equal, fmt)
        for verb, action in cases:
            with fp8moe.trace() as counted:
                action()
            sent = counted.sent_bytes
            row = {"name": f"{verb}, {name}", "shape": f"{rows} x {hidden}", "sent_bytes": sent}
            row["us"] = seconds(action, device) * 1e6
            if device == "cuda" and verb != "dispatch":  # which reads counts on the host
                row["graph_us"] = graph_seconds(action) * 1e6
            results.append(row)
    return results + of_sums(comm, x, ids, probs)


def of_kernels(comm: ProcessGroup, rows: int, hidden: int, device: str) -> list[dict[str, Any]]:
    """The kernels of one call of dispatch and of combine, as [name, us, us of idle time before it]."""
    x, ids, probs = routed(rows, hidden, device)
    results = []
    for fmt in (None, "e4m3"):
        of_dispatch = partial(expert_parallel.dispatch, x, ids, probs, 64 * comm.world_size, comm, fmt=fmt)
        received = of_dispatch()
        y = torch.randn(received.topk_ids.shape[0], hidden, device=device, dtype=torch.bfloat16)
        of_combine = partial(expert_parallel.combine, y, received.route, comm, fmt=fmt)
        for verb, action in (("dispatch", of_dispatch), ("combine", of_combine)):
            for _ in range(3):
                action()
            events = kernels_of(action, device)
            row: dict[str, Any] = {"name": f"{verb}, {fmt or 'bf16'}, kernels", "shape": f"{rows} x {hidden}"}
            row["us"] = events[-1][1] + events[-1][2] - events[0][1] if events else 0.0
            row["kernels"], end = [], events[0][1] if events else 0.0
            for name, start, us in events:
                row["kernels"].append([name, us, max(start - end, 0.0)])
                end = max(end, start + us)
            results.append(row)
    return results


def kernels_of(action: Callable[[], Any], device: str) -> list[tuple[str, float, float]]:
    """(name, start, duration) of each kernel and copy on this rank's device, in microseconds."""
    if device != "cuda":
        action()
        return []
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        action()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(
        ((e.name, e.time_range.start, e.time_range.elapsed_us()) for e in events), key=lambda e: e[1]
    )


def routed(rows: int, hidden: int, device: str) -> tuple[Any, Any, Any]:
    """Rows with expert ids and probabilities."""
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    ids = torch.rand(rows, 64 * dist.get_world_size(), device=device).topk(TOPK).indices
    return x, ids, torch.rand(rows, TOPK, device=device)


def of_bounded(rows: int, hidden: int, device: str) -> list[dict[str, Any]]:
    """dispatch, and combine in bfloat16, with a capacity sufficient for every token."""
    comm = ProcessGroup(capacity=Capacity(rows, rows * TOPK))
    x, ids, probs = routed(rows, hidden, device)
    measured = []
    for name, fmt in (("bf16", None), ("fp8", "e4m3")):

        def dispatch(fmt: str | None = fmt) -> Any:
            return expert_parallel.dispatch(x, ids, probs, 64 * comm.world_size, comm, fmt=fmt)

        dispatched = dispatch()
        y = torch.randn(dispatched.x.shape, device=device, dtype=torch.bfloat16)

        def combine(y: Any = y, route: Any = dispatched.route) -> Any:
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
    """combine in bfloat16 and in FP8, and the relative difference of the two."""
    dispatched = expert_parallel.dispatch(x, ids, probs, 64 * comm.world_size, comm)
    y, measured, sums = torch.randn_like(dispatched.x), [], []
    for name, fmt in (("bf16", None), ("fp8", "e4m3")):

        def action(fmt: str | None = fmt) -> Any:
            return expert_parallel.combine(y, dispatched.route, comm, fmt=fmt)

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

    def exchange(rows: Any, fmt: str | None, counts: Counts = equal) -> Any:
        message = expert_parallel.messages.Message(rows, fmt)
        pending = expert_parallel.exchange.deliver(message, None, counts, comm)
        if pending is None:
            packed, size = message.pack(), message.row_bytes
            pending = expert_parallel.exchange.exchange_rows(packed, size, counts, comm)
        return pending.wait()

    def dispatch() -> Any:
        return expert_parallel.dispatch(x, ids, probs, 64 * comm.world_size, comm, fmt=fmt)

    counts = dispatch().route.counts
    sent = torch.randn(sum(counts[comm.rank]), x.shape[1], device=x.device, dtype=x.dtype)
    sent = expert_parallel.messages.Message(sent, fmt).pack()
    return [
        ("exchange", lambda: exchange(ready, None)),
        ("exchange of the dispatched rows", lambda: exchange(sent, None, counts)),
        ("exchange with quantisation", lambda: exchange(x, fmt)),
        ("dispatch", dispatch),
    ]


def of_layer(
    comm: ProcessGroup, tokens: int, experts: int, recipe: str, device: str, inputs: int = 1
) -> dict[str, Any]:
    """inputs: number of different inputs, used in turn by the steps."""
    hidden, ffn = (HIDDEN, FFN) if device == "cuda" else (256, 128)
    topk = min(TOPK, experts)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "recipe": recipe}
    layer = FP8FlowMoE(hidden, ffn, experts * comm.world_size, topk, process_group=comm, **options)
    steps = itertools.cycle([training_step(layer, tokens) for _ in range(inputs)])

    def step() -> None:
        forward, backward = next(steps)
        backward(forward())

    us = seconds(step, device, calls=3, repeats=5) * 1e6
    shape = f"{tokens} tokens, {hidden} x {ffn}, {experts} experts per rank, top-{topk}"
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
    """`seconds` of a call replayed in a CUDA graph, without the host."""
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    gc.disable()  # garbage collection may free a graph, which is not allowed during capture
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                action()
    finally:
        gc.enable()
    return seconds(graph.replay, "cuda", calls=2) / calls


def seconds(action: Callable[[], Any], device: str, calls: int = 10, repeats: int = 7) -> float:
    """The slowest rank's median time of a call, from several calls at a time, because ranks do not start
    together."""
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
    times = f"{row['us']:.1f} us", f"{row.get('graph_us', 0):.1f}"
    cells = row["by"], row["name"], row["shape"], *times, row.get("sent_bytes", 0), row.get("error", "")
    print(line(cells, (-5, -26, -57, 13, 10, 12, -1)), flush=True)
    for name, us, idle in row.get("kernels", ()):
        print(line((name[:70], f"{us:.1f} us", f"after {idle:.1f} us"), (-72, 12, 16)), flush=True)
    if out:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        prefix = {
            "topic": "exchange",
            "device": f"{world} x {name}",
            "versions": {**versions(), "torch": torch.__version__},
        }
        origin = {"commit": commit(), "command": "python -m benchmarks.exchange"}
        append(out, {**prefix, **row, **origin})


if __name__ == "__main__":
    main()
