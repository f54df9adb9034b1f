"""Launching: kernels by file and name, on the device and stream of a call, with its scratch memory."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import cupy
import numpy as np

from fp8moe.kernels_cuda import compiler, driver
from fp8moe.kernels_cuda.driver import LAUNCH_CONFIG
from fp8moe.records import ArraySpec, DeviceArray

SHARED = 32 * 1024  # bytes of shared memory beside what it declares that a block gets without asking

Allocate = Callable[[ArraySpec, int], DeviceArray]

# ---------------------------------------------------------------- where this thread launches


def _outside(spec: ArraySpec, device: int) -> DeviceArray:
    raise RuntimeError("scratch memory is asked for outside of a call")


class _Current(threading.local):
    """Where this thread launches; autograd runs backwards in threads of its own."""

    def __init__(self) -> None:
        # device, address of the stream, allocator, and the log of a dry run (fp8moe.launch_plan)
        self.place: tuple[int, int, Allocate, Any] = (0, 0, _outside, None)
        self.bound: set[int] = set()  # devices whose context this thread has had
        self.buffers = driver.LaunchBuffers()


_current = _Current()


def run_at(
    place: tuple[int, int, Allocate, Any], function: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Call a function that launches everything on one device, one stream, with one allocator; with a log
    nothing is launched."""
    before, current = _current.place, driver.runtime.getDevice()
    device = place[0]
    if current != device or device not in _current.bound:
        # a new thread, as autograd's are, says it has device 0, and has no context to launch in
        driver.runtime.setDevice(device)
        _current.bound.add(device)
    _current.place = place
    try:
        return function(*args, **options)
    finally:
        if current != device:
            driver.runtime.setDevice(current)
        _current.place = before


def current_device() -> int:
    return _current.place[0]


def current_stream() -> int:
    return _current.place[1]


def current_architecture() -> str:
    return driver.architecture(_current.place[0])


def multiprocessors(most: int | None = None) -> int:
    """Of the current device; at most so many."""
    there = driver.multiprocessors(_current.place[0])
    return there if most is None else min(there, most)


def shared_limit() -> int:
    """Bytes of shared memory that a block of the current device can have."""
    return driver.shared_limit(_current.place[0])


def scratch(shape: tuple[int, ...], dtype: Any) -> DeviceArray:
    """Uninitialised memory that lives as long as the caller holds it."""
    device, _, allocate, _ = _current.place
    return allocate(ArraySpec(shape, np.dtype(dtype)), device)


# ---------------------------------------------------------------- launches


class Kernel:
    """A loaded kernel and the layout of its parameters, seen at its first launch."""

    def __init__(self, code: bytes, name: str):
        module = cupy.cuda.function.Module()
        with driver.while_capturing():
            module.load(code)
            self._function = module.get_function(name)  # keeps the module
        self.ptr = self._function.ptr
        self.shared = SHARED
        self.parameters: struct.Struct | None = None


@cache
def load_kernel(source: str, kernel: str, defines: tuple[str, ...], device: int) -> Kernel:
    """A kernel of ``source``.cu, by default in the source's most usual variant."""
    path = compiler.SOURCES / f"{source}.cu"
    defines = defines or compiler.variants(path)[0]
    return Kernel(compiler.cubin(path, driver.architecture(device), defines), kernel)


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
    float32, (array, n) the address n bytes into it; the first arguments, one for each of ``boxes``, go as
    tensor maps of bytes whose boxes are so many rows of 128 bytes (and no floats behind them)."""
    loaded = load_kernel(source, kernel, defines, _current.place[0])
    launch_loaded(loaded, grid, block, shared, arguments, boxes)


def launch_loaded(
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
        driver.allow_shared(kernel.ptr, shared)
        kernel.shared = shared
    if kernel.parameters is None:
        plain = ("f" if isinstance(a, float) else "q" for a in arguments[len(boxes) :])
        kernel.parameters = struct.Struct("128s" * len(boxes) + "".join(plain))
    log, values, places = _current.place[3], [], []
    for i, a in enumerate(arguments):
        start = 0
        if type(a) is tuple:
            a, start = a
        if type(a) is not DeviceArray:
            values.append(0 if a is None else a)
            continue
        values.append(a.ptr + start)
        if log is not None:
            places.append((i, int(a.owner), a.start + start))
    function: Callable[..., None] = launch_packed
    fixed: tuple[Any, ...] = (kernel, x, y, block, shared)
    if boxes:
        tiled = tuple(
            (a.size // a.shape[-1], a.shape[-1] * a.dtype.itemsize, box)
            for a, box in zip(arguments, boxes, strict=False)
        )
        function, fixed = launch_with_tensor_maps, (kernel, tiled, x, y, block, shared)
    if log is None:
        function(*fixed, values)
    else:
        log.steps.append((function, fixed, values, places))


def launch_packed(kernel: Kernel, x: int, y: int, block: int, shared: int, values: list[Any]) -> None:
    """Launch x by y blocks with these parameters."""
    buffers, parameters = _current.buffers, kernel.parameters
    parameters.pack_into(buffers.parameters, 0, *values)  # type: ignore[union-attr]
    buffers.size.value = parameters.size  # type: ignore[union-attr]
    _launch(kernel, x, y, block, shared, None, buffers.extra_at)


def _launch(
    kernel: Kernel, x: int, y: int, block: int, shared: int, pointers: int | None, extra: int | None
) -> None:
    """pointers, extra: addresses of the driver's ``kernelParams`` or of its ``extra``."""
    (device, stream, *_), buffers = _current.place, _current.buffers
    attributes = buffers.attribute_at, driver.has_dependent_launch(device)
    LAUNCH_CONFIG.pack_into(buffers.config, 0, x, y, 1, block, 1, 1, shared, stream, *attributes)
    if status := driver.launch_kernel()(buffers.config_at, kernel.ptr, pointers, extra):
        raise RuntimeError(f"cuLaunchKernelEx: error {status}")


def launch_with_tensor_maps(
    kernel: Kernel,
    tiled: tuple[tuple[int, int, int], ...],
    x: int,
    y: int,
    block: int,
    shared: int,
    values: list[Any],
) -> None:
    """As `launch_packed`, but each parameter by its address: the driver knows how far tensor maps, which lie
    at multiples of 64 bytes of its own memory, are from the start of a block of parameters.
    tiled: rows, columns and rows of a box of each tensor map, which takes the place of an address among the
    values."""
    for i, shape in enumerate(tiled):
        values[i] = driver.tensor_map(values[i], *shape)
    buffers = _current.buffers
    kernel.parameters.pack_into(buffers.parameters, 0, *values)  # type: ignore[union-attr]
    pointers = buffers.pointers_at(len(tiled), len(values) - len(tiled))
    _launch(kernel, x, y, block, shared, pointers, None)


def threads(count: int, block: int = 256) -> int:
    """Blocks of ``block`` threads for ``count`` threads."""
    return -(-count // block)


# ---------------------------------------------------------------- dry runs and launch plans


def _depends_on_values() -> None:
    log = _current.place[3]
    if log is not None:
        log.depends_on_values()


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
    before, current = _current.place, driver.runtime.getDevice()
    if current != device or device not in _current.bound:
        driver.runtime.setDevice(device)  # see `run_at`
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
            driver.runtime.setDevice(current)
        _current.place = before


# ---------------------------------------------------------------- fills and copies


def fill_bytes(x: DeviceArray, value: int) -> None:
    """Set every byte of a buffer."""
    log, nbytes = _current.place[3], x.nbytes
    if nbytes and log is None:
        fill_memory(value, nbytes, [x.ptr])
    elif nbytes:
        log.steps.append((fill_memory, (value, nbytes), [x.ptr], [(0, int(x.owner), x.start)]))


def fill_memory(value: int, nbytes: int, address: list[int]) -> None:
    driver.runtime.memsetAsync(address[0], value, nbytes, _current.place[1])


def copy_to_device(host: np.ndarray, out: DeviceArray) -> None:
    """The host array may be changed or freed as soon as this returns."""
    _depends_on_values()
    host = np.ascontiguousarray(host)
    if host.nbytes:
        runtime = driver.runtime
        runtime.memcpyAsync(
            out.ptr, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, _current.place[1]
        )


def copy_to_host(x: DeviceArray) -> np.ndarray:
    """Read a small buffer back; this waits for the stream."""
    _depends_on_values()
    host = np.empty(x.shape, x.dtype)
    if x.nbytes:
        runtime, stream = driver.runtime, _current.place[1]
        runtime.memcpyAsync(host.ctypes.data, x.ptr, x.nbytes, runtime.memcpyDeviceToHost, stream)
        runtime.streamSynchronize(stream)
    return host
