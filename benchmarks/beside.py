"""Products beside a kernel that holds some of the GPU's multiprocessors, as a collective does:
``python -m fp8moe.benchmarks.beside [--out FILE] [--rounds N]``.

The other kernel is on a stream of its own and has begun; no other block fits beside one of its. Its blocks
are launched one by one, which the hardware spreads, or in clusters of four, as NCCL's are on Hopper. A round
is twenty calls, after a pause. A line has the median of the rounds, and the limit: the time alone, times all
multiprocessors over those that are left.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fp8moe
from fp8moe.benchmarks.harness import COOLING, append
from fp8moe.formats import BFLOAT16
from fp8moe.info import commit, versions

HELD = (
    (0, 1),
    (8, 1),
    (32, 1),
    (8, 4),
    (32, 4),
)  # blocks that hold a multiprocessor each, and their clusters
CALLS, SECONDS = 20, 20
SHARED = 200 << 10  # bytes: no block of the products fits beside one that has them
SOURCE = r"""
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
hold(int* begun, const volatile int* over, long long ns) {
  extern __shared__ char memory[];
  memory[threadIdx.x] = 0;
  if (threadIdx.x) return;
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  atomicAdd_system(begun, 1);
  do {
    __nanosleep(500);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (!*over && now - start < ns);
}
"""


@contextmanager
def held(blocks: int, cluster: int = 1) -> Iterator[None]:
    """Inside, so many blocks hold a multiprocessor each; they leave by themselves after 20 seconds.

    They look at a flag in the GPU's own memory: while eight looked at one in the host's, products of
    1.4 ms alone, with a fixed share of the tiles for each block, took 6 to 13, and beside this 2.4.
    """
    import cupy

    if blocks == 0:
        yield
        return
    kernel = cupy.RawKernel(SOURCE, "hold", options=("--std=c++17", f"-DCLUSTER={cluster}"))
    kernel.max_dynamic_shared_size_bytes = SHARED
    flags = cupy.zeros(2, np.int32)  # how many have begun, and whether it is over
    cupy.cuda.Device().synchronize()
    one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    begun, over = flags.data.ptr, flags.data.ptr + 4
    with one:
        kernel((blocks,), (32,), (begun, over, np.int64(SECONDS * 10**9)), shared_mem=SHARED)
    try:
        limit = time.monotonic() + SECONDS / 2
        with other:
            while int(flags[0].get()) < blocks:
                if time.monotonic() > limit:
                    raise RuntimeError(
                        f"blocks: got {blocks}, of which not all began; wanted a GPU with room"
                    )
        yield
    finally:
        cupy.cuda.runtime.memsetAsync(over, 1, 4, other.ptr)
        other.synchronize()
        one.synchronize()


def seconds(call: Callable[[], Any], calls: int = CALLS) -> float:
    """Of a call, by events around so many."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        call()
        stream.synchronize()
        time.sleep(COOLING)
        begin.record(stream)
        for _ in range(calls):
            call()
        end.record(stream)
        end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3 / calls


def products(rows: int, width: int, depth: int, experts: int) -> dict[str, Callable[[], Any]]:
    """Calls of the products of a layer's first weights, on the current device."""
    import cupy

    drawn = cupy.random.default_rng(0)

    def normal(*shape: int) -> Any:
        values = drawn.standard_normal(shape, np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)

    x, dy, w = normal(rows, depth), normal(rows, width), normal(experts, width, depth)
    offsets = cupy.asarray((np.arange(experts + 1) * (rows // experts)).astype(np.int32))
    q, dq, wq = fp8moe.quantize(x), fp8moe.quantize(dy), fp8moe.quantize_weights(w)
    transposed = fp8moe.scaling_aware_transpose
    blocks = transposed(dq, target="block"), transposed(q, target="block")
    columns = transposed(dq, offsets), transposed(q, offsets)
    product: Any = fp8moe.grouped_gemm
    gradient: Any = fp8moe.grouped_gemm_wgrad
    return {
        "grouped_gemm fp8": partial(product, q, wq.rowwise, offsets),
        "grouped_gemm fp8, dgrad": partial(product, dq, wq.columnwise, offsets),
        "grouped_gemm_wgrad fp8 blocks": partial(gradient, *blocks, offsets),
        "grouped_gemm_wgrad fp8": partial(gradient, *columns, offsets),
        "grouped_gemm bfloat16": partial(product, x, w, offsets),
        "grouped_gemm bfloat16, dgrad": partial(product, dy, w, offsets, transpose_w=True),
        "grouped_gemm_wgrad bfloat16": partial(gradient, dy, x, offsets, dtype="bfloat16"),
    }


def main() -> None:
    import cupy

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    device = cupy.cuda.Device()
    name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
    everything = device.attributes["MultiProcessorCount"]
    rows, width, depth, experts = shape = 32_768, 4096, 7168, 8
    print(f"{name}: {' x '.join(map(str, shape[:3]))}, {experts} experts")
    print(f"{'product':32} {'held':>5} {'by':>3} {'ms':>7} {'limit':>7} {'TFLOP/s':>8}")
    for product, call in products(*shape).items():
        alone = 0.0
        for blocks, cluster in HELD:
            times = []
            for _ in range(arguments.rounds):
                with held(blocks, cluster):
                    times.append(seconds(call))
            middle = statistics.median(times)
            alone = alone or middle
            limit = alone * everything / (everything - blocks)
            rate = 2 * rows * width * depth / middle / 1e12
            print(f"{product:32} {blocks:5} {cluster:3} {middle * 1e3:7.3f} {limit * 1e3:7.3f} {rate:8.0f}")
            row = {
                "topic": "beside",
                "name": product,
                "shape": f"{rows} x {width} x {depth}, {experts} experts",
                "device": name,
                "held": blocks,
                "cluster": cluster,
                "us": middle * 1e6,
                "limit_us": limit * 1e6,
                "tflops": rate,
                "versions": versions(),
                "commit": commit(),
                "command": "python -m fp8moe.benchmarks.beside",
            }
            append(arguments.out, row)


if __name__ == "__main__":
    main()
