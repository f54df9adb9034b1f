"""The CUDA driver, through CuPy, or ctypes where CuPy has no binding: device properties, launches, tensor
maps, synchronisation of streams, graph capture, memory that belongs to a graph.

Nothing here depends on the current call or on its stream: that is `fp8moe.kernels_cuda.runtime.launch`.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import cupy

runtime = cupy.cuda.runtime

# ---------------------------------------------------------------- devices


@cache
def architecture(device: int) -> str:
    """sm_90a for compute capability 9.0: "a" enables the instructions that only this architecture has."""
    capability = int(cupy.cuda.Device(device).compute_capability)
    if capability < 80:
        raise RuntimeError(
            f"CUDA device {device} has compute capability {capability / 10}; wanted 8.0 or newer, with the "
            "instructions of the kernels; pass arrays on another device, or on the CPU"
        )
    return f"sm_{capability}" + ("a" if capability >= 90 else "")


@cache
def has_dependent_launch(device: int) -> bool:
    """Whether a kernel can start before the previous one has finished (programmatic dependent launch)."""
    return int(cupy.cuda.Device(device).compute_capability) >= 90


@cache
def multiprocessors(device: int) -> int:
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@cache
def shared_limit(device: int) -> int:
    """Most bytes of shared memory of a block: 227 KB on sm_90, 163 on sm_80, 99 on sm_89 and sm_120."""
    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


# ---------------------------------------------------------------- kernels

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
#: CUlaunchConfig: grid and block in three dimensions, shared memory; stream, attributes, their number
LAUNCH_CONFIG = struct.Struct("7I4xQQI4x")
#: CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, true
DEPENDENT_LAUNCH = (6, 1)


class LaunchBuffers:
    """Memory that cuLaunchKernelEx reads, of one thread, rewritten for each launch.

    parameters, size: the kernel's parameters and their size in bytes; ``extra_at``: the address of the
    `extra` array that points to both. config: a CUlaunchConfig with one attribute. The addresses are kept
    because ctypes converts an integer in half the time of an array.
    """

    def __init__(self) -> None:
        self.parameters, self.size = ctypes.create_string_buffer(4096), ctypes.c_size_t()
        extra = 1, ctypes.addressof(self.parameters), 2, ctypes.addressof(self.size), 0
        self._extra, self._pointers = (ctypes.c_void_p * 5)(*extra), dict[tuple[int, int], Any]()
        self.config = ctypes.create_string_buffer(LAUNCH_CONFIG.size)
        self._attribute = (ctypes.c_uint64 * 9)(*DEPENDENT_LAUNCH)
        self.extra_at = ctypes.addressof(self._extra)
        self.config_at = ctypes.addressof(self.config)
        self.attribute_at = ctypes.addressof(self._attribute)

    def pointers_at(self, maps: int, words: int) -> int:
        """Address of an array of pointers into ``parameters``: to ``maps`` tensor maps of 128 bytes, then to
        ``words`` words of 8 bytes. It is made once for a thread, as making one of twenty takes the host 2 us.
        """
        pointers = self._pointers.get((maps, words))
        if pointers is None:
            start = ctypes.addressof(self.parameters)
            end = start + 128 * maps
            addresses = *range(start, end, 128), *range(end, end + 8 * words, 8)
            pointers = self._pointers[maps, words] = (ctypes.c_void_p * len(addresses))(*addresses)
        return ctypes.addressof(pointers)


@cache
def launch_kernel() -> Any:
    """cuLaunchKernelEx(config, kernel, parameters, extra)."""
    function = _library().cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p] * 4
    return function


def allow_shared(kernel: int, nbytes: int) -> None:
    """Allow launches of a kernel with this much dynamic shared memory."""
    while_capturing(cupy.cuda.driver.funcSetAttribute, kernel, _MAX_DYNAMIC_SHARED, nbytes)


@lru_cache(maxsize=4096)
def tensor_map(address: int, rows: int, columns: int, box: int) -> bytes:
    """A tensor map (cuTensorMapEncodeTiled) of bytes [rows, columns], for boxes of ``box`` rows of 128 bytes,
    swizzled. Cached, as encoding one takes the host 3 us and depends on these arguments alone."""
    space = ctypes.create_string_buffer(128 + 64)
    start = -(-ctypes.addressof(space) // 64) * 64
    status = _library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start),
        0,  # CU_TENSOR_MAP_DATA_TYPE_UINT8
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(columns),  # row stride in bytes
        (ctypes.c_uint32 * 2)(128, box),
        (ctypes.c_uint32 * 2)(1, 1),
        0,  # CU_TENSOR_MAP_INTERLEAVE_NONE
        3,  # CU_TENSOR_MAP_SWIZZLE_128B
        3,  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
        0,  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: zeros
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled({address:#x}, {rows} x {columns}): error {status}")
    return ctypes.string_at(start, 128)


# ---------------------------------------------------------------- streams and graphs


def order(before: int, after: int, device: int) -> None:
    """Make later work on the stream ``after`` wait for the work that is now on ``before``. A stream under
    capture cannot wait for work outside its graph: there the caller must order them."""
    try:
        if runtime.streamIsCapturing(after):
            return
    except runtime.CUDARuntimeError:  # the default stream, while another stream is captured
        return
    current = runtime.getDevice()
    try:
        runtime.setDevice(device)
        event = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
        runtime.eventRecord(event, before)
        runtime.streamWaitEvent(after, event)
        runtime.eventDestroy(event)  # returns at once; the event is freed after the last wait on it
    finally:
        runtime.setDevice(current)


def while_capturing(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that may load kernels and allocate memory while this thread is capturing a stream."""
    exchange = _library().cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED; the call exchanges it with the current mode
    pointer = ctypes.byref(mode)
    try:
        exchange(pointer)
        return function(*arguments)
    finally:
        exchange(pointer)


def kept_by_graph(stream: int, memory: Any) -> None:
    """Keep memory alive until the graph that the stream is being captured in, and every executable graph made
    of it, is destroyed: a replay writes to the memory again, and CuPy's pool, which does not know of graphs,
    would hand it out in between. The first call of this function after that releases it."""
    status, graph, owner = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    # The driver calls `destroy` from a thread of its own, maybe while the interpreter shuts down: no Python.
    destroyed, destroy = ctypes.create_string_buffer(32), _libc().sem_post
    _libc().sem_init(destroyed, 0, 0)
    with _kept_lock:  # first: once the graph has the semaphore, its memory must not be freed
        _kept[:] = [pair for pair in _kept if _libc().sem_trywait(pair[0])]
        _kept.append((destroyed, memory))
    error = _library().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), None, ctypes.byref(graph), None, None
    )
    # 1: CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, and CU_GRAPH_USER_OBJECT_MOVE
    error = error or _library().cuUserObjectCreate(ctypes.byref(owner), destroyed, destroy, 1, 1)
    error = error or _library().cuGraphRetainUserObject(graph, owner, 1, 1)
    if error:
        _libc().sem_post(destroyed)
        raise RuntimeError(f"cuGraphRetainUserObject: error {error}")


def count_kept_by_graphs() -> int:
    """Number of allocations that `kept_by_graph` keeps alive."""
    return len(_kept)


_kept: list[tuple[Any, Any]] = []  # a semaphore that is posted when the graph is destroyed; the memory
_kept_lock = threading.Lock()


@cache
def _library() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
