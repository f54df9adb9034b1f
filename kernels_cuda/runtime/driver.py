"""The CUDA driver, through CuPy, or ctypes where CuPy has no binding: device properties, the functions that
launch, synchronisation of streams, graph capture, memory that belongs to a graph.

Nothing here depends on the current call or on its stream: that is `fp8moe.kernels_cuda.runtime.launch`.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from functools import cache
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


@cache
def functions() -> tuple[int, int, int]:
    """Addresses of cuLaunchKernelEx, cuMemsetD8Async and cuTensorMapEncodeTiled."""
    library = _library()
    launch, fill, encode = library.cuLaunchKernelEx, library.cuMemsetD8Async, library.cuTensorMapEncodeTiled
    return _address(launch), _address(fill), _address(encode)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def allow_shared(kernel: int, nbytes: int) -> None:
    """Allow launches of a kernel with this much dynamic shared memory."""
    while_capturing(cupy.cuda.driver.funcSetAttribute, kernel, _MAX_DYNAMIC_SHARED, nbytes)


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
