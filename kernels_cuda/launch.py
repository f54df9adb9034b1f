"""Launching: kernels by file and name on the current device and stream, scratch memory, argument tables."""

from __future__ import annotations

from functools import cache
from typing import Any

import cupy
import numpy as np

from fp8moe.formats import BFLOAT16, Block
from fp8moe.kernels_cuda import compiler
from fp8moe.records import DeviceArray, QuantTensor

# The tables of common.cuh.
KINDS = {BFLOAT16: 0, np.dtype(np.float16): 1, np.dtype(np.float32): 2, np.dtype(np.float64): 3}
FORMATS = {"e4m3": 0, "e5m2": 1, "e2m1": 2}
LAYOUTS: dict[Block, int] = {(1, 128): 1, (1, 32): 2, (1, 16): 3, None: 4}
PLAIN = 0


def launch(
    source: str, kernel: str, grid: int | tuple[int, ...], block: int, *arguments: Any, shared: int = 0
) -> None:
    """Launch ``kernel`` of ``source``.cu on the current stream. Integers are int64 in the kernel."""
    grid = (grid,) if isinstance(grid, int) else grid
    if 0 in grid:
        return
    function = _function(source, kernel, cupy.cuda.Device().id)
    function(grid, (block,), tuple(_argument(a) for a in arguments), shared_mem=shared)


def threads(count: int, block: int = 256) -> int:
    """Blocks of ``block`` threads for ``count`` threads."""
    return -(-count // block)


def scratch(shape: tuple[int, ...], dtype: Any) -> Any:
    """Memory of the device's pool that lives as long as the caller holds it."""
    return cupy.empty(shape, dtype)


def fill_bytes(x: Any, value: int) -> None:
    """Set every byte of a buffer, on the current stream."""
    if x.nbytes:
        ptr = x.ptr if isinstance(x, DeviceArray) else x.data.ptr
        cupy.cuda.runtime.memsetAsync(ptr, value, x.nbytes, cupy.cuda.get_current_stream().ptr)


def rows_of(x: Any) -> tuple[Any, ...]:
    """(data, scales, kind, fmt, layout) of an array or a row-wise QuantTensor, as `row_value` takes them."""
    if isinstance(x, QuantTensor):
        return x.data, x.scales, 0, FORMATS[x.fmt], LAYOUTS[x.block]
    return x, None, KINDS[x.dtype], 0, PLAIN


def _argument(a: Any) -> Any:
    if isinstance(a, DeviceArray):
        return a.ptr
    if isinstance(a, cupy.ndarray):
        return a.data.ptr
    if a is None:
        return 0
    if isinstance(a, float):
        return np.float32(a)
    return int(a) if isinstance(a, (bool, int, np.integer)) else a


@cache
def _function(source: str, kernel: str, device: int) -> Any:
    module = cupy.cuda.function.Module()
    module.load(compiler.cubin(compiler.SOURCES / f"{source}.cu", _architecture(device))[0])
    return module.get_function(kernel)


def _architecture(device: int) -> str:
    """sm_90a for compute capability 9.0: the "a" gives the instructions that only that chip has."""
    capability = cupy.cuda.Device(device).compute_capability
    return f"sm_{capability}" + ("a" if int(capability) >= 90 else "")
