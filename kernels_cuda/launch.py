"""Launching: kernels by file and name on the device and stream of a call, scratch memory, argument tables."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import cupy
import numpy as np

from fp8moe.formats import BFLOAT16, Block, is_mx
from fp8moe.kernels_cuda import compiler
from fp8moe.records import ArraySpec, DeviceArray, QuantTensor

runtime, driver = cupy.cuda.runtime, cupy.cuda.driver

# The tables of common.cuh.
KINDS = {BFLOAT16: 0, np.dtype(np.float16): 1, np.dtype(np.float32): 2, np.dtype(np.float64): 3}
KIND_NAMES = {BFLOAT16: "BF16", np.dtype(np.float16): "F16", np.dtype(np.float32): "F32"}
FORMATS = {"e4m3": 0, "e5m2": 1, "e2m1": 2}
LAYOUTS: dict[Block, int] = {(1, 128): 1, (1, 32): 2, (1, 16): 3, None: 4}
PLAIN = 0
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED = 32 * 1024  # bytes of shared memory beside what it declares that a block gets without asking

Allocate = Callable[[ArraySpec, int], DeviceArray]


def _outside(spec: ArraySpec, device: int) -> DeviceArray:
    raise RuntimeError("scratch memory is asked for outside of a call")


# CUlaunchConfig: grid and block in three dimensions each, shared memory; stream, attributes; how many
_CONFIG = struct.Struct("7I4xQQI4x")


class _Current(threading.local):
    """Where this thread launches; autograd runs backwards in threads of its own."""

    def __init__(self) -> None:
        # device, address of the stream, allocator, and the log of a dry run (fp8moe.launch_plan)
        self.place: tuple[int, int, Allocate, Any] = (0, 0, _outside, None)
        self.bound: set[int] = set()  # devices whose context this thread has had
        # cuLaunchKernel's `extra`: a buffer of parameters and its size
        buffer, size = ctypes.create_string_buffer(4096), ctypes.c_size_t()
        self._extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
        self.parameters = buffer, size, ctypes.addressof(self._extra)
        # cuLaunchKernelEx's: a CUlaunchConfig, and its one attribute
        self._attribute = (ctypes.c_uint64 * 9)(6, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self.config = ctypes.create_string_buffer(_CONFIG.size), ctypes.addressof(self._attribute)


_current = _Current()


class On:
    """Inside this context everything runs on one device, one stream, with one allocator."""

    def __init__(self, device: int, stream: int, allocate: Allocate, log: Any = None):
        self._new = (device, stream, allocate, log)

    def __enter__(self) -> Any:
        self._before = _current.place
        _current.place = self._new
        self._device = runtime.getDevice()
        if self._device != self._new[0] or self._new[0] not in _current.bound:
            # a new thread, as autograd's are, says it has device 0, and has no context to launch in
            runtime.setDevice(self._new[0])
            _current.bound.add(self._new[0])
        return sys.modules[__name__]

    def __exit__(self, *_: object) -> None:
        if self._device != self._new[0]:
            runtime.setDevice(self._device)
        _current.place = self._before


def run_steps(
    steps: list[Any],
    memory: list[Any],
    addresses: list[int],
    address_of: Callable[[Any], int],
    device: int,
    stream: int,
) -> None:
    """What a launch plan consists of (`fp8moe.launch_plan.LaunchPlan`), on one stream. memory, addresses: of
    its buffers, by number; those that it allocates are added."""
    before, current = _current.place, runtime.getDevice()
    if current != device or device not in _current.bound:
        runtime.setDevice(device)  # see `On`
        _current.bound.add(device)
    _current.place = (device, stream, _outside, None)
    try:
        for function, fixed, values, places in steps:
            if function is not None:
                values = values.copy()  # other threads have the plan, too
                for at, buffer, offset in places:
                    values[at] = addresses[buffer] + offset
                function(*fixed, values)
            elif fixed is None:
                memory[values] = None
            else:
                memory[values] = fixed()  # by no other name, or its release would come late
                addresses[values] = address = address_of(memory[values])
                if not address and places:
                    kind = type(memory[values]).__name__
                    raise TypeError(
                        f"a result: got a {kind} without memory from the caller's framework; "
                        "call this outside of FakeTensorMode, or through fp8moe.adapters.torch_ops"
                    )
    finally:
        if current != device:
            runtime.setDevice(current)
        _current.place = before


class Kernel:
    """A loaded kernel and the layout of its parameters, seen at its first launch."""

    def __init__(self, code: bytes, name: str):
        module = cupy.cuda.function.Module()
        module.load(code)
        self._function = module.get_function(name)  # keeps the module
        self.ptr = self._function.ptr
        self.shared = SHARED
        self.parameters: struct.Struct | None = None


def launch(
    source: str,
    kernel: str,
    grid: int | tuple[int, ...],
    block: int,
    *arguments: Any,
    shared: int = 0,
    defines: tuple[str, ...] = (),
    boxes: tuple[int, ...] = (),
) -> None:
    """Launch ``kernel`` of ``source``.cu, compiled with ``defines``. Integers are int64 in the kernel, floats
    float32; the first arguments, one for each of ``boxes``, go as tensor maps of bytes whose boxes are so
    many rows of 128 bytes (and no floats behind them)."""
    start(_kernel(source, kernel, defines, _current.place[0]), grid, block, shared, arguments, boxes)


def start(
    kernel: Kernel,
    grid: int | tuple[int, ...],
    block: int,
    shared: int,
    arguments: Any,
    boxes: tuple[int, ...] = (),
) -> None:
    """Launch a loaded kernel on the current stream. Its blocks may start before the launch in front of it is
    done (programmatic dependent launch, from sm_90 on), and wait for that themselves (ptx.cuh:
    pdl_wait).

    The parameters are packed here, in C's layout, and handed to the driver as one block of bytes: 3 us less
    than CuPy's launcher takes for twenty.
    """
    x, y = grid if isinstance(grid, tuple) else (grid, 1)
    if x == 0 or y == 0:
        return
    if shared > kernel.shared:
        driver.funcSetAttribute(kernel.ptr, MAX_DYNAMIC_SHARED, shared)
        kernel.shared = shared
    if kernel.parameters is None:
        plain = ("f" if isinstance(a, float) else "q" for a in arguments[len(boxes) :])
        kernel.parameters = struct.Struct("128s" * len(boxes) + "".join(plain))
    values = [a.ptr if type(a) is DeviceArray else 0 if a is None else a for a in arguments]
    if boxes:
        tiled = tuple(
            (a.size // a.shape[-1], a.shape[-1] * a.dtype.itemsize, box)
            for a, box in zip(arguments, boxes, strict=False)
        )
        _do(go_tiled, (kernel, tiled, x, y, block, shared), values, arguments)
    else:
        _do(go, (kernel, x, y, block, shared), values, arguments)


def go(kernel: Kernel, x: int, y: int, block: int, shared: int, values: list[Any]) -> None:
    buffer, size, extra = _current.parameters
    parameters = kernel.parameters
    parameters.pack_into(buffer, 0, *values)  # type: ignore[union-attr]
    size.value = parameters.size  # type: ignore[union-attr]
    # as _go: a call more costs the host 0.1 us
    place, (config, attribute) = _current.place, _current.config
    _CONFIG.pack_into(config, 0, x, y, 1, block, 1, 1, shared, place[1], attribute, _has_early(place[0]))
    status = _launch_ex()(config, kernel.ptr, None, extra)
    if status:
        raise RuntimeError(f"cuLaunchKernelEx: error {status}")


def _go(kernel: Kernel, x: int, y: int, block: int, shared: int, parameters: Any, extra: Any) -> None:
    place, (config, attribute) = _current.place, _current.config
    _CONFIG.pack_into(config, 0, x, y, 1, block, 1, 1, shared, place[1], attribute, _has_early(place[0]))
    status = _launch_ex()(config, kernel.ptr, parameters, extra)
    if status:
        raise RuntimeError(f"cuLaunchKernelEx: error {status}")


@cache
def _launch_ex() -> Any:
    function = _driver().cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p] * 4
    return function


def go_tiled(
    kernel: Kernel,
    tiled: tuple[tuple[int, int, int], ...],
    x: int,
    y: int,
    block: int,
    shared: int,
    values: list[Any],
) -> None:
    """As `go`, but each parameter by its address: the driver knows how far tensor maps, which lie at
    multiples of 64 bytes of its own memory, are from the start of a block of parameters."""
    maps = [_tensor_map(values[i], *of) for i, of in enumerate(tiled)]
    buffer = _current.parameters[0]
    kernel.parameters.pack_into(buffer, 0, *maps, *values[len(maps) :])  # type: ignore[union-attr]
    start, plain = ctypes.addressof(buffer), len(values) - len(maps)
    places = [start + 128 * i for i in range(len(maps))]
    places += [start + 128 * len(maps) + 8 * i for i in range(plain)]
    pointers = (ctypes.c_void_p * len(places))(*places)
    _go(kernel, x, y, block, shared, pointers, None)


@lru_cache(maxsize=4096)
def _tensor_map(address: int, rows: int, columns: int, box: int) -> bytes:
    """The driver's description of bytes [rows, columns], for boxes of ``box`` rows of 128 bytes, swizzled
    (cuTensorMapEncodeTiled). It depends on nothing else; a new one takes the host 3 us."""
    space = ctypes.create_string_buffer(128 + 64)
    start = -(-ctypes.addressof(space) // 64) * 64
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start),
        0,  # CU_TENSOR_MAP_DATA_TYPE_UINT8
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(columns),  # bytes from row to row
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


@cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _do(function: Callable[..., None], before: tuple[Any, ...], values: list[Any], arguments: Any) -> None:
    """Do something on the stream; in a dry run, log it with which of its values are memory."""
    log = _current.place[3]
    if log is None:
        function(*before, values)
    else:
        log.launched(function, before, values, arguments)


def order(before: int, after: int, device: int) -> None:
    """What goes to the stream ``after`` from here on waits for what is on ``before``. A stream that is being
    captured in a graph cannot wait for what is not in it: there the caller has to."""
    try:
        if runtime.streamIsCapturing(after):
            return
    except runtime.CUDARuntimeError:  # the default stream, while another one is captured
        return
    current = runtime.getDevice()
    runtime.setDevice(device)
    try:
        event = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
        runtime.eventRecord(event, before)
        runtime.streamWaitEvent(after, event)
        runtime.eventDestroy(event)  # which waits for nothing, and lives as long as it is waited for
    finally:
        runtime.setDevice(current)


@contextmanager
def while_capturing() -> Iterator[None]:
    """Inside, this thread may load kernels and allocate although it captures a stream in a graph."""
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED; what was in force comes back in it
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def kept_by_graph(stream: int, memory: Any) -> None:
    """Hold memory until the graph that the stream is being captured in, and all that is made of it, is
    destroyed: a replay writes to the memory again, and CuPy's pool, which knows of no graphs, would have
    given it to somebody else. The next call after that releases it."""
    status, graph, owner = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    # The driver calls this from a thread of its own, maybe as late as at the interpreter's end: no Python.
    destroyed, destroy = ctypes.create_string_buffer(32), _libc().sem_post
    _libc().sem_init(destroyed, 0, 0)
    found = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), None, ctypes.byref(graph), None, None
    )
    # 1: CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, and CU_GRAPH_USER_OBJECT_MOVE
    found = found or _driver().cuUserObjectCreate(ctypes.byref(owner), destroyed, destroy, 1, 1)
    found = found or _driver().cuGraphRetainUserObject(graph, owner, 1, 1)
    if found:
        raise RuntimeError(f"cuGraphRetainUserObject: error {found}")
    with _KEPT_LOCK:
        _KEPT[:] = [one for one in _KEPT if _libc().sem_trywait(one[0])]
        _KEPT.append((destroyed, memory))


_KEPT: list[tuple[Any, Any]] = []  # a semaphore that is posted when the graph is destroyed, and the memory
_KEPT_LOCK = threading.Lock()


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def threads(count: int, block: int = 256) -> int:
    """Blocks of ``block`` threads for ``count`` threads."""
    return -(-count // block)


def scratch(shape: tuple[int, ...], dtype: Any) -> DeviceArray:
    """Uninitialised memory that lives as long as the caller holds it."""
    device, _, allocate, _ = _current.place
    return allocate(ArraySpec(shape, np.dtype(dtype)), device)


def fill_bytes(x: DeviceArray, value: int) -> None:
    """Set every byte of a buffer."""
    if x.nbytes:
        _do(fill, (value, x.nbytes), [x.ptr], (x,))


def fill(value: int, nbytes: int, address: list[int]) -> None:
    runtime.memsetAsync(address[0], value, nbytes, _current.place[1])


def copy_to_device(host: np.ndarray, out: DeviceArray) -> None:
    """The host array may be changed or freed as soon as this returns."""
    _depends_on_values()
    host = np.ascontiguousarray(host)
    if host.nbytes:
        runtime.memcpyAsync(
            out.ptr, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, _current.place[1]
        )


def copy_to_host(x: DeviceArray) -> np.ndarray:
    """Read a small buffer back; this waits for the stream."""
    _depends_on_values()
    host = np.empty(x.shape, x.dtype)
    if x.nbytes:
        runtime.memcpyAsync(host.ctypes.data, x.ptr, x.nbytes, runtime.memcpyDeviceToHost, _current.place[1])
        runtime.streamSynchronize(_current.place[1])
    return host


def conversion(x: Any, q: QuantTensor) -> tuple[str, ...]:
    """Definitions of a kernel that quantises x."""
    return f"KIND={KIND_NAMES[x.dtype]}", *formats(q)


def formats(q: QuantTensor) -> tuple[str, ...]:
    return f"FMT={FORMATS[q.fmt]}", f"MX={int(is_mx(q.block))}"


def _depends_on_values() -> None:
    log = _current.place[3]
    if log is not None:
        log.depends_on_values()


def rows_of(x: Any) -> tuple[Any, ...]:
    """(data, scales, kind, fmt, layout) of an array or a row-wise QuantTensor, as `row_value` takes them."""
    if isinstance(x, QuantTensor):
        return x.data, x.scales, 0, FORMATS[x.fmt], LAYOUTS[x.block]
    return x, None, KINDS[x.dtype], 0, PLAIN


@cache
def _kernel(source: str, kernel: str, defines: tuple[str, ...], device: int) -> Kernel:
    path = compiler.SOURCES / f"{source}.cu"
    return Kernel(compiler.cubin(path, architecture(device), defines or compiler.variants(path)[0]), kernel)


@cache
def architecture(device: int) -> str:
    """sm_90a for compute capability 9.0: the "a" gives the instructions that only that chip has."""
    capability = cupy.cuda.Device(device).compute_capability
    return f"sm_{capability}" + ("a" if int(capability) >= 90 else "")


@cache
def _has_early(device: int) -> bool:
    return int(cupy.cuda.Device(device).compute_capability) >= 90


@cache
def _multiprocessors(device: int) -> int:
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def multiprocessors() -> int:
    return _multiprocessors(_current.place[0])


@cache
def _shared_limit(device: int) -> int:
    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


def shared_limit() -> int:
    """Bytes of shared memory that a block can have: 227 KB on sm_90, 163 on sm_80, 99 on sm_89 and sm_120."""
    return _shared_limit(_current.place[0])


def current_architecture() -> str:
    return architecture(current_device())


def current_device() -> int:
    return _current.place[0]


def current_stream() -> int:
    return _current.place[1]
