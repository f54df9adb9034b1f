"""Launching: kernels by file and name on the device and stream of a call, scratch memory, argument tables."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import cupy
import numpy as np

from fp8moe.formats import BFLOAT16, Block
from fp8moe.kernels_cuda import compiler
from fp8moe.records import ArraySpec, DeviceArray, QuantTensor

runtime, driver = cupy.cuda.runtime, cupy.cuda.driver

# The tables of common.cuh.
KINDS = {BFLOAT16: 0, np.dtype(np.float16): 1, np.dtype(np.float32): 2, np.dtype(np.float64): 3}
FORMATS = {"e4m3": 0, "e5m2": 1, "e2m1": 2}
LAYOUTS: dict[Block, int] = {(1, 128): 1, (1, 32): 2, (1, 16): 3, None: 4}
PLAIN = 0
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED = 48 * 1024  # bytes of shared memory that a block gets without asking

Allocate = Callable[[ArraySpec, int], DeviceArray]


class _Current(threading.local):
    """Where this thread launches; autograd runs backwards in threads of its own."""

    device = 0
    ptr = 0  # of the stream: CuPy's launcher asks its stream for this attribute and no other
    allocate: Allocate


_current = _Current()


class On:
    """Inside this context everything runs on one device, one stream, with one allocator."""

    def __init__(self, device: int, stream: int, allocate: Allocate):
        self._new = (device, stream, allocate)

    def __enter__(self) -> Any:
        self._before = dict(_current.__dict__)
        self._device = runtime.getDevice()
        _current.device, _current.ptr, _current.allocate = self._new
        if self._device != _current.device:
            runtime.setDevice(_current.device)
        return sys.modules[__name__]

    def __exit__(self, *_: object) -> None:
        if self._device != _current.device:
            runtime.setDevice(self._device)
        _current.__dict__.clear()
        _current.__dict__.update(self._before)


def launch(
    source: str, kernel: str, grid: int | tuple[int, ...], block: int, *arguments: Any, shared: int = 0
) -> None:
    """Launch ``kernel`` of ``source``.cu. Integers are int64 in the kernel."""
    start(_function(source, kernel, _current.device), grid, block, shared, arguments)


def start(
    function: Any, grid: int | tuple[int, ...], block: int, shared: int, arguments: tuple[Any, ...]
) -> None:
    """Launch a loaded kernel on the current stream."""
    grid = (grid,) if isinstance(grid, int) else grid
    if 0 in grid:
        return
    if shared > SHARED:
        driver.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED, shared)
    function(grid, (block,), tuple(map(_argument, arguments)), shared, _current)


def threads(count: int, block: int = 256) -> int:
    """Blocks of ``block`` threads for ``count`` threads."""
    return -(-count // block)


def scratch(shape: tuple[int, ...], dtype: Any) -> DeviceArray:
    """Uninitialised memory that lives as long as the caller holds it."""
    return _current.allocate(ArraySpec(shape, np.dtype(dtype)), _current.device)


def fill_bytes(x: DeviceArray, value: int) -> None:
    """Set every byte of a buffer."""
    if x.nbytes:
        runtime.memsetAsync(x.ptr, value, x.nbytes, _current.ptr)


def copy_to_device(host: np.ndarray, out: DeviceArray) -> None:
    """The host array may be changed or freed as soon as this returns."""
    host = np.ascontiguousarray(host)
    if host.nbytes:
        runtime.memcpyAsync(out.ptr, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, _current.ptr)


def copy_to_host(x: DeviceArray) -> np.ndarray:
    """Read a small buffer back; this waits for the stream."""
    host = np.empty(x.shape, x.dtype)
    if x.nbytes:
        runtime.memcpyAsync(host.ctypes.data, x.ptr, x.nbytes, runtime.memcpyDeviceToHost, _current.ptr)
        runtime.streamSynchronize(_current.ptr)
    return host


def rows_of(x: Any) -> tuple[Any, ...]:
    """(data, scales, kind, fmt, layout) of an array or a row-wise QuantTensor, as `row_value` takes them."""
    if isinstance(x, QuantTensor):
        return x.data, x.scales, 0, FORMATS[x.fmt], LAYOUTS[x.block]
    return x, None, KINDS[x.dtype], 0, PLAIN


def _argument(a: Any) -> Any:
    kind = type(a)
    if kind is DeviceArray:
        return a.ptr
    if kind is int:
        return a
    if a is None:
        return 0
    return np.float32(a) if kind is float else int(a)


@cache
def _function(source: str, kernel: str, device: int) -> Any:
    return load(compiler.cubin(compiler.SOURCES / f"{source}.cu", architecture(device)), kernel)


def load(code: bytes, kernel: str) -> Any:
    """A kernel of a cubin, on the current device."""
    module = cupy.cuda.function.Module()
    module.load(code)
    return module.get_function(kernel)


def architecture(device: int) -> str:
    """sm_90a for compute capability 9.0: the "a" gives the instructions that only that chip has."""
    capability = cupy.cuda.Device(device).compute_capability
    return f"sm_{capability}" + ("a" if int(capability) >= 90 else "")


@cache
def _multiprocessors(device: int) -> int:
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def multiprocessors() -> int:
    return _multiprocessors(_current.device)


def current_device() -> int:
    return _current.device
