"""Time operations and compare them with the copy bandwidth of the same machine, measured in the same run.

A topic is a module of this folder with ``cases(size) -> Iterator[Case]``, which makes the arrays of one
shape at a time, and for a CPU small ones: no run needs 2 GB. A case states the minimum number of bytes that
the operation must move; its limit is that number divided by the copy bandwidth. Cases with wrong results are
not reported.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
import platform
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fp8moe.info import command, commit, versions
from fp8moe.runtime import tables
from fp8moe.runtime.record_trees import arrays_in, nbytes

CACHE_BYTES = 50_000_000  # L2 of an H200
# Total size of the inputs and results used in turn. When N bytes are read repeatedly, a cache of C bytes with
# random replacement holds the share h = exp(-(1 - h) N / C): 20 % at 2 C, 2 % at 4 C, 0.03 % at 8 C.
CYCLE_BYTES = 8 * CACHE_BYTES
MEASURED = 1e-3  # minimum seconds between two events, which with the start of a graph take some 2 us
COPIES = 4  # of 1 GiB, half a millisecond each
FLUSH_BYTES, FLUSHED = 8_000_000_000, 30  # as in DeepGEMM's benchmark
# pause in seconds: a clock that was lowered rises slowly (1223 TFLOP/s right after other work, 1411 after a
# pause)
COOLING = 0.2
TOPICS = (
    "plan",
    "permute",
    "unpermute",
    "sort_chunks",
    "quantize",
    "transpose",
    "swiglu",
    "grouped_gemm",
    "router",
    "moe",
)


#: which shapes: small ones, or those for a device
Size = Literal["quick", "cpu", "cuda"]


@dataclass(frozen=True)
class Case:
    """An operation to time.

    name, shape: description. arrays: its inputs in NumPy; they are copied to the device.
    run: called with the arrays, or with the result of ``prepare``, which is not timed.
    check: called with run's result and the NumPy arrays; returns whether the result is correct.
    nbytes: minimum number of bytes to move (each input read once, each output written once), 0 if the limit
        is not bandwidth. flops: number of operations, two per multiply-add.
    """

    name: str
    shape: str
    arrays: tuple[np.ndarray, ...]
    run: Callable[..., Any]
    check: Callable[..., bool]
    nbytes: int = 0
    flops: int = 0
    prepare: Callable[..., tuple[Any, ...]] = lambda *arrays: arrays


@dataclass(frozen=True)
class Result:
    """One line of a results file. ``limit_percent`` is relative to the copy bandwidth of the same run.

    single_us: for matrix products, one call after a write of 8 GB, median of 30, after a pause: L2 is
    flushed, and the power cap, which limits sustained calls, is not reached. host_us: time until a call
    returns, without the device. extra_bytes: peak device memory of a call beyond its results; extra_percent:
    relative to their size. All four on CUDA only.
    """

    topic: str
    name: str
    shape: str
    device: str
    us: float
    limit_us: float | None
    limit_percent: float | None
    tflops: float | None
    single_us: float | None
    copy_gb_s: float
    nbytes: int
    host_us: float | None
    extra_bytes: int | None
    extra_percent: float | None
    versions: dict[str, str]
    commit: str
    command: str


class Cpu:
    """Wall time of calls."""

    name = f"cpu ({platform.machine()})"
    max_sets = 8

    def upload(self, x: np.ndarray) -> Any:
        return x

    def seconds(self, calls: list[Callable[[], Any]], repeats: int) -> float:
        """Median time of a call; the calls are made in turn."""
        for call in calls:
            call()
        times = []
        for _, call in zip(range(repeats), itertools.cycle(calls), strict=False):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return float(np.median(times))

    def single_seconds(self, call: Callable[[], Any]) -> float | None:
        return None

    def host_seconds(self, call: Callable[[], Any]) -> float | None:
        return None

    def extra_bytes(self, call: Callable[[], Any]) -> tuple[int, int] | None:
        return None

    def copy_rate(self) -> float:
        """Bytes per second, read and written, of a copy far larger than the caches."""
        source = np.ones(2**26, np.float32)
        target = np.empty_like(source)
        return 2 * source.nbytes / self.seconds([lambda: np.copyto(target, source)], 5)


class Cuda:
    """Device time of captured calls. Host time and memory are measured with CuPy's memory pool."""

    max_sets = 32

    def __init__(self) -> None:
        from fp8moe.runtime.interop import require_cupy

        self.cupy = require_cupy("bench --device cuda")
        properties = self.cupy.cuda.runtime.getDeviceProperties(0)
        self.name = properties["name"].decode()

    def upload(self, x: np.ndarray) -> Any:
        return self.cupy.asarray(x)

    def seconds(self, calls: list[Callable[[], Any]], repeats: int) -> float:
        """Median time per call over replays of a CUDA graph of the calls: device time, without launch gaps.

        The graph repeats the calls until it takes MEASURED seconds, so that the events and the start of the
        graph become negligible. The results of several calls are kept alive: overwritten in L2, where the
        previous call left them, they would not all be written to memory."""
        with self.cupy.cuda.Stream(non_blocking=True) as stream:
            make_in_turn(calls, 2)  # compiles, and allocates the memory that the capture uses

            def replayed(rounds: int, repeats: int) -> float:
                stream.begin_capture()
                make_in_turn(calls, rounds)
                graph = stream.end_capture()
                graph.launch(stream)
                return self._between_events(lambda: graph.launch(stream), repeats, stream) / rounds

            rounds = math.ceil(MEASURED / replayed(1, 3))
            return replayed(rounds, repeats) / len(calls)

    def single_seconds(self, call: Callable[[], Any]) -> float | None:
        """Median time of calls between which other memory is written."""
        free, _ = self.cupy.cuda.runtime.memGetInfo()
        flush_buffer = self.cupy.empty(min(FLUSH_BYTES, free // 4), np.uint8)
        stream = self.cupy.cuda.get_current_stream()
        pairs = [tuple(self.cupy.cuda.Event() for _ in range(2)) for _ in range(FLUSHED)]
        stream.synchronize()
        time.sleep(COOLING)
        for before, after in pairs:
            flush_buffer.fill(0)
            before.record(stream)
            call()
            after.record(stream)
        stream.synchronize()
        elapsed = self.cupy.cuda.get_elapsed_time
        return float(np.median([elapsed(*pair) for pair in pairs])) / 1e3

    def host_seconds(self, call: Callable[[], Any]) -> float | None:
        """Median time until a call returns, with an empty launch queue before it."""
        times = []
        with self._pool():
            for _ in range(50):
                self.cupy.cuda.Device().synchronize()
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
        return float(np.median(times))

    def extra_bytes(self, call: Callable[[], Any]) -> tuple[int, int] | None:
        """(peak bytes of a call beyond its results, bytes of its results), counted by the memory pool."""

        class Peak(self.cupy.cuda.MemoryHook):  # type: ignore[name-defined]
            live = peak = 0

            def malloc_postprocess(self, **allocation: Any) -> None:
                Peak.live += allocation["size"]
                Peak.peak = max(Peak.peak, Peak.live)

        with self._pool():
            call()
            with Peak():
                result = call()
        result_bytes = sum(a.nbytes for a in arrays_in(result))
        return max(Peak.peak - result_bytes, 0), result_bytes

    def copy_rate(self) -> float:
        source = self.cupy.ones(2**30, np.uint8)
        target = self.cupy.empty_like(source)
        stream = self.cupy.cuda.get_current_stream()
        copy = partial(self.cupy.copyto, target, source)
        copy()

        def copies() -> None:
            for _ in range(COPIES):
                copy()

        return COPIES * 2 * source.nbytes / self._between_events(copies, 20 // COPIES, stream)

    def _pool(self) -> Any:
        """CuPy's own memory pool, as a context."""
        return self.cupy.cuda.using_allocator(self.cupy.get_default_memory_pool().malloc)

    def _between_events(self, action: Callable[[], Any], repeats: int, stream: Any) -> float:
        events = [self.cupy.cuda.Event() for _ in range(repeats + 1)]
        events[0].record(stream)
        for event in events[1:]:
            action()
            event.record(stream)
        stream.synchronize()
        elapsed = self.cupy.cuda.get_elapsed_time
        return float(np.median([elapsed(a, b) for a, b in itertools.pairwise(events)])) / 1e3


def torch_memory() -> AbstractContextManager[Any]:
    """Context in which CuPy allocates from torch's caching allocator, for CuPy's current stream."""
    import cupy
    import torch

    torch.cuda.init()

    def allocate(nbytes: int, device: int) -> int:
        if nbytes == 0:
            return 0
        stream = cupy.cuda.get_current_stream().ptr
        return int(torch.cuda.caching_allocator_alloc(nbytes, device, stream))

    finalizing = sys.is_finalizing  # this module's globals may be None by then

    def free(address: int, device: int) -> None:
        # during finalisation torch's modules no longer exist, and the process frees the memory
        if address and not finalizing():
            torch.cuda.caching_allocator_delete(address)

    context: AbstractContextManager[Any] = cupy.cuda.using_allocator(
        cupy.cuda.PythonFunctionAllocator(allocate, free).malloc
    )
    return context


def make_in_turn(calls: list[Callable[[], Any]], rounds: int) -> None:
    """Make the calls in turn, for several rounds; a result stays alive until every other call has been made
    again."""
    results: deque[Any] = deque(maxlen=len(calls))
    for call in calls * rounds:
        results.append(call())


def main(
    topics: list[str],
    device: str,
    quick: bool,
    out: Path | None,
    *,
    allocator: str | None = None,
    only_list: bool = False,
    as_json: bool = False,
) -> int:
    """Time every case of the topics; return 1 if a result was wrong."""
    if only_list:
        print(json.dumps(TOPICS) if as_json else "\n".join(TOPICS))
        return 0
    unknown = [t for t in topics if t not in TOPICS]
    if unknown:
        raise ValueError(f"topics: got {', '.join(unknown)}; wanted any of {', '.join(TOPICS)}")
    from fp8moe.info import cuda_is_ready

    if device == "auto":
        device = "cuda" if cuda_is_ready() else "cpu"
    if allocator is not None and device != "cuda":
        raise ValueError(f"--allocator: got {allocator} on the {device}; wanted --device cuda")
    machine: Cpu | Cuda = Cuda() if device == "cuda" else Cpu()
    with torch_memory() if allocator == "torch" else nullcontext():
        size: Size = "quick" if quick else "cuda" if device == "cuda" else "cpu"
        return _measured(topics or list(TOPICS), machine, size, out, as_json)


#: title and width of the printed columns
COLUMNS = {
    **{"case": -40, "shape": -40, "us": 10, "limit us": 9, "%": 5},
    **{"TFLOP/s": 8, "host us": 8, "extra": 7},
}


def _measured(topics: list[str], machine: Cpu | Cuda, size: Size, out: Path | None, as_json: bool) -> int:
    """Prints the table of the topics and appends their rows; returns 1 if a result was wrong."""
    rate = machine.copy_rate()
    if not as_json:
        print(f"{machine.name}: copy {rate / 1e9:.1f} GB/s")
        print(tables.line(COLUMNS, COLUMNS.values()))
    rows: list[dict[str, Any]] = []
    wrong: list[dict[str, str]] = []
    with progress() as bar:
        for topic in topics:
            for case in importlib.import_module(f"fp8moe.bench.{topic}").cases(size):
                bar.set_description(case.name)
                result = measure(topic, case, machine, rate, 5 if size == "quick" else 15)
                bar.update()
                if result is None:
                    wrong.append({"topic": topic, "name": case.name, "shape": case.shape})
                    text = tables.line((case.name, case.shape, "WRONG RESULT, not timed"), (-40, -40, -1))
                else:
                    rows.append(asdict(result))
                    append(out, rows[-1])
                    text = line(result)
                if not as_json:
                    bar.write(text)
    if as_json:
        told = {"device": machine.name, "copy_gb_s": rate / 1e9, "rows": rows, "wrong": wrong}
        print(json.dumps(told))
    return 1 if wrong else 0


def append(out: Path | None, row: dict[str, Any]) -> None:
    """Append a line to a results file, if there is one."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


def measure(topic: str, case: Case, machine: Cpu | Cuda, rate: float, repeats: int) -> Result | None:
    """Check a case, then time it; None if its result is wrong."""
    arrays = case.prepare(*(machine.upload(a) for a in case.arrays))
    result = case.run(*arrays)
    if not case.check(result, *case.arrays):
        return None
    # use several sets of inputs and results, together larger than any cache
    sets = [arrays]
    size = sum(a.nbytes for a in case.arrays) + nbytes(result)
    del result
    while len(sets) < machine.max_sets and size * len(sets) < CYCLE_BYTES:
        sets.append(case.prepare(*(machine.upload(a.copy()) for a in case.arrays)))
    single = partial(case.run, *arrays)
    host, memory = machine.host_seconds(single), machine.extra_bytes(single)
    seconds = machine.seconds([partial(case.run, *each) for each in sets], repeats)
    single_call_seconds = machine.single_seconds(single) if case.flops else None
    limit = case.nbytes / rate if case.nbytes else None
    return Result(
        topic=topic,
        name=case.name,
        shape=case.shape,
        device=machine.name,
        us=seconds * 1e6,
        limit_us=None if limit is None else limit * 1e6,
        limit_percent=None if limit is None else 100 * limit / seconds,
        tflops=case.flops / seconds / 1e12 if case.flops else None,
        single_us=None if single_call_seconds is None else single_call_seconds * 1e6,
        copy_gb_s=rate / 1e9,
        nbytes=case.nbytes,
        host_us=None if host is None else host * 1e6,
        extra_bytes=None if memory is None else memory[0],
        extra_percent=None if memory is None else 100 * memory[0] / max(memory[1], 1),
        versions=versions(),
        commit=commit(),
        command=command(),
    )


def line(r: Result) -> str:
    def number(x: float | None, digits: int) -> str:
        return "" if x is None else f"{x:.{digits}f}"

    extra = "" if r.extra_percent is None else f"{r.extra_percent:.2f} %"
    cells = (
        *(r.name, r.shape, number(r.us, 1), number(r.limit_us, 1), number(r.limit_percent, 0)),
        *(number(r.tflops, 2), number(r.host_us, 0), extra),
    )
    text = tables.line(cells, COLUMNS.values())
    if r.single_us is None or r.tflops is None:
        return text
    return f"{text} {r.tflops * r.us / r.single_us:.0f} in one call"


def progress() -> Any:
    """A progress bar on a terminal (tqdm, where it is installed), with lines printed above it; otherwise only
    the lines."""
    if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
        return importlib.import_module("tqdm").tqdm(leave=False, unit="case")
    return Silent()


class Silent(AbstractContextManager[Any]):
    def __exit__(self, *_: object) -> None: ...

    def set_description(self, text: str) -> None: ...

    def update(self) -> None: ...

    def write(self, text: str) -> None:
        print(text, flush=True)


def routing(tokens: int, experts: int, topk: int, seed: int = 0, skew: float = 0.0) -> np.ndarray:
    """Exact top-k ids [T, k], distinct within a token; expert e is chosen with weight (e + 1) ** -skew.

    Sampled without replacement as the largest Gumbel-perturbed log weights (Yellott 1977).
    """
    uniform = np.random.default_rng(seed).random((tokens, experts))
    scores = -np.log(-np.log(uniform)) - skew * np.log(np.arange(1, experts + 1))
    return np.ascontiguousarray(
        np.argpartition(-scores, min(topk, experts - 1), axis=1)[:, :topk].astype(np.int32)
    )


def host(x: Any) -> np.ndarray:
    """A result as a NumPy array, from any device."""
    return x.get() if hasattr(x, "get") else np.asarray(x)


def tall(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Normal float32 values [rows, columns]; after 4096 rows they repeat, which does not help a kernel."""
    top = np.random.default_rng(seed).standard_normal((min(rows, 4096), columns), dtype=np.float32)
    return top if len(top) == rows else np.resize(top, (rows, columns))


def close(got: np.ndarray, wanted: np.ndarray, bound: float = 2.0**-4) -> bool:
    """Whether the norm of the error is within a share of the norm; the default is the loss by FP8
    quantisation."""
    exact = wanted.astype(np.float64)
    return float(np.linalg.norm(got.astype(np.float64) - exact)) < bound * float(np.linalg.norm(exact))
