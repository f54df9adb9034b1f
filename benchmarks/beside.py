"""Products concurrent with a kernel that occupies some of the GPU's multiprocessors, as a collective does:
``python -m benchmarks.beside [--out FILE] [--rounds N]``.

The other kernel runs on a separate stream and has started before; its shared memory leaves no room for a
block of the products on the same SM. Its blocks are launched individually, which the hardware distributes
over the GPU, or in clusters of four, as NCCL's are on Hopper. A round is twenty calls, after a pause. A row
has the median of the rounds and the limit: the time without the other kernel, times all SMs over the
remaining ones.
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
from fp8moe.bench.harness import COOLING, append
from fp8moe.formats import BFLOAT16
from fp8moe.info import commit, versions
from fp8moe.runtime.tables import line

#: title and width of the printed columns
COLUMNS = {"product": -32, "SMs": 5, "by": 3, "ms": 7, "limit": 7, "TFLOP/s": 8}
OCCUPIED = (
    (0, 1),
    (8, 1),
    (32, 1),
    (8, 4),
    (32, 4),
)  # (occupied SMs, cluster size) of the other kernel
CALLS, SECONDS = 20, 20
SHARED = 200 << 10  # bytes; with these, no block of the products fits on the same SM
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
def occupied(blocks: int, cluster: int = 1) -> Iterator[None]:
    """Inside the context, so many blocks occupy one SM each; they exit by themselves after 20 seconds.

    They poll a flag in GPU memory: while eight blocks polled a flag in host memory, products that take 1.4 ms
    alone, with a fixed share of the tiles per block, took 6 to 13 ms, and 2.4 ms with this kernel.
    """
    import cupy

    if blocks == 0:
        yield
        return
    kernel = cupy.RawKernel(SOURCE, "hold", options=("--std=c++17", f"-DCLUSTER={cluster}"))
    kernel.max_dynamic_shared_size_bytes = SHARED
    flags = cupy.zeros(2, np.int32)  # number of started blocks, and the stop flag
    cupy.cuda.Device().synchronize()
    kernel_stream, control_stream = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    begun, over = flags.data.ptr, flags.data.ptr + 4
    with kernel_stream:
        kernel((blocks,), (32,), (begun, over, np.int64(SECONDS * 10**9)), shared_mem=SHARED)
    try:
        limit = time.monotonic() + SECONDS / 2
        with control_stream:
            while int(flags[0].get()) < blocks:
                if time.monotonic() > limit:
                    raise RuntimeError(
                        f"blocks: got {blocks}, of which not all started; wanted a GPU with free SMs"
                    )
        yield
    finally:
        cupy.cuda.runtime.memsetAsync(over, 1, 4, control_stream.ptr)
        control_stream.synchronize()
        kernel_stream.synchronize()


def seconds(call: Callable[[], Any], calls: int = CALLS) -> float:
    """Mean time of a call, by events around several."""
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
    """Products of a layer's first weights, as calls on the current device."""
    import cupy

    generator = cupy.random.default_rng(0)

    def normal(*shape: int) -> Any:
        values = generator.standard_normal(shape, np.float32)
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
    sms = device.attributes["MultiProcessorCount"]
    rows, width, depth, experts = shape = 32_768, 4096, 7168, 8
    print(f"{name}: {' x '.join(map(str, shape[:3]))}, {experts} experts")
    print(line(COLUMNS, COLUMNS.values()))
    for product, call in products(*shape).items():
        alone = 0.0
        for blocks, cluster in OCCUPIED:
            times = []
            for _ in range(arguments.rounds):
                with occupied(blocks, cluster):
                    times.append(seconds(call))
            median = statistics.median(times)
            alone = alone or median
            limit = alone * sms / (sms - blocks)
            rate = 2 * rows * width * depth / median / 1e12
            times_of = f"{median * 1e3:.3f}", f"{limit * 1e3:.3f}"
            print(line((product, blocks, cluster, *times_of, f"{rate:.0f}"), COLUMNS.values()))
            row = {
                "topic": "beside",
                "name": product,
                "shape": f"{rows} x {width} x {depth}, {experts} experts",
                "device": name,
                "held": blocks,
                "cluster": cluster,
                "us": median * 1e6,
                "limit_us": limit * 1e6,
                "tflops": rate,
                "versions": versions(),
                "commit": commit(),
                "command": "python -m benchmarks.beside",
            }
            append(arguments.out, row)


if __name__ == "__main__":
    main()
