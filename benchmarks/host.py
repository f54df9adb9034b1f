"""What a call costs the host, through each framework's form of the layer: ``python -m benchmarks.host [--out
FILE] [--part layer operations] [--quick] [--device cpu]``; for expert parallelism ``torchrun --nproc-per-node
2 -m benchmarks.host``, which measures nothing else.

Host time of a call until it returns: sustained, as in a training step's sequence of calls, and alone, after
the device has finished all earlier work. Beside it the device time of the same work in a CUDA graph: where
the host takes longer, it is what a user waits for. A layer's forward, and its forward and backward, with
routing given except for `FP8FlowMoE`, whose router is part of it; every result is first compared with
float64. Libraries run in turn, so that all meet the same other load. On the CPU only this program itself is
tried: its times are of the operations.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fp8moe
import fp8moe.torch
from benchmarks.compare import checked_steps, described, first_line, packages
from benchmarks.compare_layer import (
    BFLOAT16,
    E4M3,
    LAYER,
    Experts,
    by_arrays,
    by_autograd,
    by_transformers,
    experts,
    tensors_of,
)
from benchmarks.contender import Contender, Results, Step, TrainingStep
from benchmarks.transformer_engine import seconds as graph_seconds
from fp8moe import expert_parallel
from fp8moe.bench.harness import Cuda, append
from fp8moe.info import commit, versions
from fp8moe.runtime.tables import line

ROUNDS = 21  # of the median
#: calls in sequence that do not fill the launch queue, which has room for about a thousand launches
SUSTAINED_CALLS, SUSTAINED_STEPS = 50, 8
#: tokens, experts, hidden, ffn, top-k: where the host is slower than the device, and where it is not
SHAPES = [
    (64, 8, 512, 256, 2),
    (64, 8, 7168, 2048, 8),
    (64, 128, 2048, 768, 8),
    (2048, 128, 2048, 768, 8),
    (2048, 32, 2880, 2880, 4),
]
QUICK = [(48, 4, 128, 128, 2)]
TOKENS, EXPERTS, HIDDEN, TOPK = 4096, 256, 7168, 8  # of the operations
PARTS = ("layer", "operations")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="one small shape, few repetitions")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args(words)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, which torch does not find; wanted cpu, to try the program")
    shapes, rounds = (QUICK, 3) if given.quick else (SHAPES, ROUNDS)
    failures: list[int] = []
    if "RANK" in os.environ:
        measured = over_ranks(given.device, shapes)
    else:
        measured = itertools.chain(
            layers(given.device, shapes if "layer" in given.part else [], failures),
            operations(given.device, given.quick) if "operations" in given.part else [],
        )
    for shape, calls in measured:
        report(calls, shape, given.device, rounds, given.out)
    return 1 if any(failures) else 0


# ---------------------------------------------------------------- the layer


@dataclass(frozen=True)
class RoutedExperts(Experts):
    """Experts with the routing of a router, which a layer with this router finds by itself."""

    router: Any


def routed(device: str, *shape: int) -> RoutedExperts:
    _, count, hidden, ffn, topk = shape
    inputs = experts(device, *shape)
    torch.manual_seed(0)
    options: Any = {"device": "meta", "dtype": torch.bfloat16}
    router = fp8moe.torch.FP8FlowMoE(hidden, ffn, count, topk, **options).router.to_empty(device=device)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_(std=hidden**-0.5)
        for buffer in router.buffers():
            buffer.zero_()
        _, ids, probs = router(inputs.x.detach(), pass_rows=True)
    given = {**vars(inputs), "ids": ids, "probs": probs.detach().requires_grad_()}
    return RoutedExperts(**given, router=router)


def by_layer(recipe: Any) -> Callable[[Any], Step]:
    """`FP8FlowMoE`, with its router."""

    def make(inputs: RoutedExperts) -> Step:
        count, hidden, ffn = inputs.w2.shape
        options: Any = {"recipe": recipe, "device": "meta", "dtype": torch.bfloat16}
        layer = fp8moe.torch.FP8FlowMoE(hidden, ffn, count, inputs.ids.shape[1], **options)
        layer.router = inputs.router
        layer.w13, layer.w2 = (torch.nn.Parameter(w.detach()) for w in (inputs.w13, inputs.w2))
        leaves = inputs.x, layer.w13, layer.w2, *inputs.router.parameters()
        return by_autograd(lambda: layer(inputs.x), leaves, inputs.dy)

    return make


def without_router(results: Results) -> Results:
    """y, dw13 and dw2: x's gradient includes the router's."""
    y, _, dw13, dw2, *_ = results
    return y, None, dw13, dw2, None


def by_jax(recipe: Any) -> Callable[[Experts], Step]:
    """`fp8moe.jax.moe_experts` in jitted functions: one of the forward, one of a step."""

    def make(inputs: Experts) -> Step:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the others need memory, too
        import jax

        import fp8moe.jax

        def array(tensor: Any) -> Any:
            return jax.dlpack.from_dlpack(tensor.detach())

        x, w13, w2, probs = map(array, inputs.leaves())
        ids, dy = array(inputs.ids), array(inputs.dy)

        def forward(x: Any, w13: Any, w2: Any, probs: Any, ids: Any) -> Any:
            return fp8moe.jax.moe_experts(x, w13, w2, ids, probs, recipe=recipe)

        def step(x: Any, w13: Any, w2: Any, probs: Any, ids: Any, dy: Any) -> Any:
            y, pull = jax.vjp(lambda *leaves: forward(*leaves, ids), x, w13, w2, probs)
            return y, *pull(dy)

        one, whole = jax.jit(forward), jax.jit(step)
        return TrainingStep(lambda: one(x, w13, w2, probs, ids), lambda: whole(x, w13, w2, probs, ids, dy))

    return make


def torch_of_jax(results: Results) -> Results:
    return tuple(torch.from_dlpack(result) for result in results)


#: of `compare`'s: torch as its user writes it, and the other libraries, where they are installed
PEERS = (
    "torch grouped_mm, bf16",
    "transformers, bf16",
    "SonicMoE, bf16",
    "Transformer Engine, bf16",
    "Transformer Engine, FP8 blocks",
    "fp8moe, bf16",
    "fp8moe, fp8_flow",
    "fp8moe of arrays, bf16",
)
JAX: dict[str, Any] = {"needs": ("jax",), "install": "pip install 'fp8moe[jax]'", "decode": torch_of_jax}
TRANSFORMERS: dict[str, Any] = {"needs": ("transformers",), "install": "pip install 'fp8moe[transformers]'"}
FORMS = (
    Contender("fp8moe of arrays, fp8_flow", by_arrays("fp8_flow"), E4M3, decode=tensors_of),
    *(
        contender
        for recipe, bound in (("bf16", BFLOAT16), ("fp8_flow", E4M3))
        for contender in (
            Contender(f"FP8FlowMoE with router, {recipe}", by_layer(recipe), bound, decode=without_router),
            Contender(f"transformers by fp8moe, {recipe}", by_transformers(recipe), bound, **TRANSFORMERS),
            Contender(f"JAX under jit, {recipe}", by_jax(recipe), bound, **JAX),
        )
    ),
)
PART: dict[str, Any] = {
    "contenders": (*(c for c in LAYER.contenders if c.name in PEERS), *FORMS),
    "inputs": routed,
}


#: XLA captures its programs by itself; a list of sizes on the host
NOT_CAPTURED = ("JAX", "Transformer Engine")


#: title and width of the printed columns
COLUMNS = {"us": -54, "sustained": 10, "alone": 10, "on the device": 14}


class Call(NamedTuple):
    """Something to time. graph_us: returns the device time of the same work in a CUDA graph, or None."""

    name: str
    run: Callable[[], Any]
    graph_us: Callable[[], float | None] = lambda: None
    versions: Callable[[], dict[str, str]] = dict
    count: int = SUSTAINED_CALLS


#: a shape, and what is timed in turn
Calls = tuple[str, Sequence[Call]]


def layers(device: str, shapes: Sequence[tuple[int, ...]], failures: list[int]) -> Iterator[Calls]:
    """failures: is extended by the number of wrong results, and of failures of torch and of this library."""
    part = replace(LAYER, **PART)
    if missing := [f"{c.name} ({c.install})" for c in part.contenders if c.missing()]:
        print("not installed here:", *missing, sep="\n  ")
    for shape in shapes:
        print(f"\nlayer, {described(shape)}", flush=True)
        steps, wrong = checked_steps(part, shape, device)
        failures.append(wrong)
        yield (
            described(shape),
            [call for contender, step, _ in steps for call in calls_of_step(contender, step)],
        )


def calls_of_step(contender: Contender, step: Any) -> Iterator[Call]:
    for what, run in (("forward", step.forward), ("forward and backward", step.whole)):
        yield Call(
            f"{contender.name}: {what}",
            run,
            graph_us=lambda run=run: graph_us(contender, run),  # type: ignore[misc]
            versions=lambda: packages(contender),
            count=SUSTAINED_STEPS,
        )


def graph_us(contender: Contender, run: Callable[[], Any], **options: int) -> float | None:
    """Device time without the host; None where it cannot be captured. options: of `graph_seconds`."""
    if contender.name.startswith(NOT_CAPTURED):
        return None
    gc.collect()
    gc.disable()  # it may free a graph, which is not allowed during a capture
    try:
        if "arrays" in contender.name:
            return 1e6 * Cuda().seconds([run], 15)
        return 1e6 * graph_seconds([run], **options)
    except Exception as error:
        print(f"  {contender.name}: not in a CUDA graph: {type(error).__name__}: {first_line(error)}")
        torch.cuda.synchronize()
        return None
    finally:
        gc.enable()


# ---------------------------------------------------------------- operations


def operations(device: str, quick: bool) -> Iterator[Calls]:
    tokens, count, hidden = (64, 8, 256) if quick else (TOKENS, EXPERTS, HIDDEN)
    topk = min(TOPK, count)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    differentiable = x.clone().requires_grad_()
    probs = torch.rand(tokens, topk, device=device)
    ids = torch.rand(tokens, count, device=device).topk(topk).indices.int()
    rows = tokens * topk + count * 16
    offsets = torch.arange(0, tokens + 1, tokens // 8, device=device, dtype=torch.int32)
    shape = f"{tokens} x {hidden}"

    def permute(x: torch.Tensor) -> Any:
        return fp8moe.torch.permute_and_pad(
            x, ids, probs, num_experts=count, align_size=16, num_out_tokens=rows
        )

    grad = torch.randn_like(permute(x).data)

    def permute_and_back() -> Any:
        return torch.autograd.grad(permute(differentiable).data, differentiable, grad)

    q, of_torch = fp8moe.quantize(x), fp8moe.torch.quantize(x)
    yield (
        f"{shape}, {count} experts, top-{topk}",
        [
            Call("permute+pad bf16, plan and rows", lambda: permute(x)),
            Call("permute+pad bf16, for autograd", lambda: permute(differentiable)),
            Call("permute+pad bf16, forward and backward", permute_and_back),
        ],
    )
    yield (
        shape,
        [
            Call("quantize 1x128", lambda: fp8moe.torch.quantize(x)),
            Call("quantize 1x128, out=", lambda: fp8moe.quantize(x, out=q)),
            Call("dequantize", lambda: fp8moe.dequantize(q, dtype="bfloat16")),
            Call("scaling_aware_transpose", lambda: fp8moe.torch.scaling_aware_transpose(of_torch, offsets)),
        ],
    )
    few = min(256, tokens)
    w = fp8moe.quantize_weights(torch.randn(8, 512, 256, device=device).bfloat16())
    small = fp8moe.quantize(x[:few, :256].contiguous())
    ends = torch.arange(0, few + 1, few // 8, device=device, dtype=torch.int32)
    run = partial(fp8moe.grouped_gemm, small, w.rowwise, ends)
    yield f"{few} x 512 x 256, 8 experts", [Call("grouped_gemm fp8", run)]


# ---------------------------------------------------------------- expert parallelism


def over_ranks(device: str, shapes: Sequence[tuple[int, ...]]) -> Iterator[Calls]:
    """The layer and dispatch over the ranks that torchrun started, which share each shape's experts. The host
    time includes the wait for the rows' counts."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # as in `exchange`
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    comm = fp8moe.torch.ProcessGroup()
    for shape in shapes:
        yield f"{described(shape)}, {comm.world_size} ranks", [*calls_over_ranks(comm, device, *shape)]
    dist.destroy_process_group()


def calls_over_ranks(
    comm: Any, device: str, tokens: int, count: int, hidden: int, ffn: int, topk: int
) -> Iterator[Call]:
    torch.manual_seed(comm.rank)
    x, dy = (torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
    ids = torch.rand(tokens, count, device=device).topk(topk).indices
    probs = torch.rand(tokens, topk, device=device)
    given = x.clone().requires_grad_()
    for recipe, fmt in (("bf16", None), ("fp8_flow", "e4m3")):
        options: Any = {"recipe": recipe, "device": device, "dtype": torch.bfloat16}
        torch.manual_seed(0)  # the same router on all ranks
        layer = fp8moe.torch.FP8FlowMoE(hidden, ffn, count, topk, process_group=comm, **options)
        step = by_autograd(partial(layer, given), (given, *layer.parameters()), dy)
        for what, run in (("forward", step.forward), ("forward and backward", step.whole)):
            yield Call(f"FP8FlowMoE with router, {recipe}: {what}", run, count=SUSTAINED_STEPS)
        dispatch = partial(expert_parallel.dispatch, x, ids, probs, count, comm, fmt=fmt)
        yield Call(f"dispatch, {recipe}", dispatch, count=SUSTAINED_STEPS)


# ---------------------------------------------------------------- times


def report(calls: Sequence[Call], shape: str, device: str, rounds: int, out: Path | None) -> None:
    """Measure calls in turn; print and append their rows."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        print(line(COLUMNS, COLUMNS.values()))
    for call, (sustained, alone) in zip(calls, host_times(calls, device, rounds), strict=True):
        row = {
            "topic": "host",
            "name": call.name,
            "shape": shape,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "host_us": sustained * 1e6,
            "first_us": alone * 1e6,
            "graph_us": call.graph_us() if device == "cuda" else None,
            "versions": {**versions(), "torch": torch.__version__, **call.versions()},
            "commit": commit(),
            "command": "python -m benchmarks.host",
        }
        if not first:
            continue
        times = (row[t] for t in ("host_us", "first_us", "graph_us"))
        cells = f"  {call.name}", *("" if us is None else f"{us:.1f}" for us in times)
        print(line(cells, COLUMNS.values()), flush=True)
        append(out, row)


def host_times(calls: Sequence[Call], device: str, rounds: int) -> list[tuple[float, float]]:
    """(sustained, alone): median seconds of each call."""
    for call in calls:  # records it
        seconds(call.run, 2, device)
    if device == "cuda":  # no call is timed while Numba compiles the loop that launches
        importlib.import_module("fp8moe.kernels_cuda.runtime.replay").LOOP.compile().wait()
    alone: list[list[float]] = [[] for _ in calls]
    sustained: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, of_one, of_many in zip(calls, alone, sustained, strict=True):
            of_one.append(seconds(call.run, 1, device))
            of_many.append(seconds(call.run, call.count, device) / call.count)
    return [
        (statistics.median(of_many), statistics.median(of_one))
        for of_many, of_one in zip(sustained, alone, strict=True)
    ]


def seconds(run: Callable[[], Any], count: int, device: str) -> float:
    """Host time of calls in sequence, after all earlier work."""
    if dist.is_initialized():
        dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    start, last = time.perf_counter(), None
    for _ in range(count):
        last = run()
    taken = time.perf_counter() - start
    for result in last if isinstance(last, (tuple, list)) else (last,):
        if hasattr(result, "block_until_ready"):  # of JAX, whose calls may still be queued
            result.block_until_ready()
    return taken


if __name__ == "__main__":
    raise SystemExit(main())
