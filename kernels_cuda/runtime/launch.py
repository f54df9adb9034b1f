"""Launches of kernels, by file and name, on the current call's device and stream, with scratch memory."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import cupy
import numpy as np

from fp8moe.kernels_cuda.runtime import compiler, driver
from fp8moe.kernels_cuda.runtime.replay import Plan, Step
from fp8moe.records import ArraySpec, DeviceArray

SHARED = 32 * 1024  # bytes of dynamic shared memory that every launch may use without `allow_shared`
COUNTERS = 64  # that a recording allocates and zeroes together

Allocate = Callable[[ArraySpec, int], DeviceArray]

# ---------------------------------------------------------------- where this thread launches


def _outside(spec: ArraySpec, device: int) -> DeviceArray:
    raise RuntimeError("scratch memory: requested outside of a call")


class _Current(threading.local):
    """Where this thread launches. Per thread, as torch's autograd runs backward passes in its own threads."""

    def __init__(self) -> None:
        # device, address of the stream, allocator, log of a dry run (fp8moe.runtime.recording) or None
        self.place: tuple[int, int, Allocate, Any] = (0, 0, _outside, None)
        self.bound: set[int] = set()  # devices whose context has been current in this thread


_current = _Current()


def run_at(
    place: tuple[int, int, Allocate, Any], function: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Call a function whose launches all go to one device and stream and use one allocator. With a log they
    are only logged."""
    before, current = _current.place, driver.runtime.getDevice()
    device, set_device = place[0], driver.runtime.setDevice
    try:
        if current != device or device not in _current.bound:
            # a new thread, such as one of autograd's, reports device 0 but has no current context
            set_device(device)
            _current.bound.add(device)
        _current.place = place
        return function(*args, **options)
    finally:  # in this order: an interrupt may come after a call, and not before
        _current.place = before
        if current != device:
            set_device(current)


def run_on(device: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, which launches nothing, with a device's context."""
    return run_at((device, 0, _outside, None), function, *arguments)


def current_device() -> int:
    return _current.place[0]


def current_stream() -> int:
    return _current.place[1]


def current_architecture() -> str:
    return driver.architecture(_current.place[0])


def multiprocessors(most: int | None = None) -> int:
    """Multiprocessors of the current device, limited to ``most``."""
    there = driver.multiprocessors(_current.place[0])
    return there if most is None else min(there, most)


def shared_limit() -> int:
    """Most bytes of shared memory of a block on the current device."""
    return driver.shared_limit(_current.place[0])


def scratch(shape: tuple[int, ...], dtype: Any) -> DeviceArray:
    """Uninitialised memory that is released with the last reference to it."""
    device, _, allocate, _ = _current.place
    return allocate(ArraySpec(shape, np.dtype(dtype)), device)


def zeroed_counter() -> DeviceArray:
    """An int32 that is zero when the next kernel starts. A recording zeroes all of its counters by one
    memset before its first launch: a kernel after a memset cannot start while the kernel before it ends."""
    log = _current.place[3]
    if log is None:
        fill_bytes(counter := scratch((1,), np.int32), 0)
        return counter
    if not log.counters:
        launched = log.steps.copy()
        log.steps.clear()
        fill_bytes(block := scratch((COUNTERS,), np.int32), 0)
        log.counters += [block.part(i, (1,)) for i in range(COUNTERS)]
        log.steps += launched
    return log.counters.pop()  # type: ignore[no-any-return]


def once(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """make(); in a recording, the result of its first call with this key. The kernels that it launches must
    read only arrays that no launch of the recording writes to later."""
    log = _current.place[3]
    if log is None:
        return make()
    if key not in log.made:
        log.made[key] = make()
    return log.made[key]


# ---------------------------------------------------------------- launches


class Kernel:
    """A kernel of a device, which is loaded when its handle is first needed, so that a dry run asks for all
    of its kernels before it waits for the first; and the kinds of its parameters, which its first launch
    sets."""

    def __init__(self, code: compiler.Code, name: str, device: int):
        self.name, self.device, self.shared = name, device, SHARED
        self.parameters: struct.Struct | None = None
        self.code: compiler.Code | None = code  # until it is loaded
        self._ptr, self._loading = 0, threading.Lock()

    @property
    def ptr(self) -> int:
        if self.code is not None:
            load_kernels([self])
        return self._ptr

    def load(self) -> None:
        """Load the code, which takes no time any more, on the current device."""
        code = self.code
        content = b"" if code is None else code.result()
        with self._loading:
            if self.code is None:
                return
            module = cupy.cuda.function.Module()
            driver.while_capturing(module.load, content)
            self._function = driver.while_capturing(module.get_function, self.name)  # keeps the module loaded
            if self.shared > SHARED:
                driver.allow_shared(self._function.ptr, self.shared)
            self._ptr = self._function.ptr
            self.code = None

    def allow_shared(self, nbytes: int) -> None:
        """Allow launches with this much dynamic shared memory."""
        with self._loading:
            if self.code is None and nbytes > self.shared:
                driver.allow_shared(self._ptr, nbytes)
            self.shared = max(self.shared, nbytes)


def unloaded(steps: Iterable[Any]) -> list[Kernel]:
    """The kernels of steps that are not loaded. An int, as in the log of a dry run, is no step."""
    kernels = [step.kernel for step in steps if type(step) is Step and type(step.kernel) is Kernel]
    return [kernel for kernel in kernels if kernel.code is not None] if kernels else kernels


def load_kernels(kernels: Sequence[Kernel]) -> None:
    """Load kernels of one device, when all of them are compiled."""
    run_on(kernels[0].device, _load_compiled, kernels)


def _load_compiled(kernels: Sequence[Kernel]) -> None:
    codes = [kernel.code for kernel in kernels]  # None where another thread has loaded it since
    compiler.finish([code for code in codes if code is not None])
    for kernel in kernels:
        kernel.load()


@cache
def load_kernel(source: str, kernel: str, defines: tuple[str, ...], device: int) -> Kernel:
    """A kernel of ``source``.cu; without ``defines``, of the file's first variant."""
    path = compiler.files()[f"{source}.cu"]
    defines = defines or compiler.variants(path)[0]
    return Kernel(compiler.requested(path, driver.architecture(device), defines), kernel, device)


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
    """Launch ``kernel`` of ``source``.cu, compiled with ``defines``. It gets integers as int64, floats as
    float32, an array as its address and (array, n) as the address n bytes into it. The first arguments, one
    for each element of ``boxes``, are passed as tensor maps whose boxes have that many rows of 128 bytes; a
    kernel with tensor maps takes no floats."""
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
    """Launch a loaded kernel on the current stream. From sm_90 on its blocks may start before the previous
    kernel has finished (programmatic dependent launch), and wait for it themselves (ptx.cuh: pdl_wait)."""
    x, y = grid if isinstance(grid, tuple) else (grid, 1)
    if x == 0 or y == 0:
        return
    if shared > kernel.shared:
        kernel.allow_shared(shared)
    if kernel.parameters is None:
        kernel.parameters = struct.Struct(
            "".join("f4x" if isinstance(a, float) else "q" for a in arguments[len(boxes) :])
        )
    values: list[Any] = []
    places = []
    for i, a in enumerate(arguments):
        start = 0
        if type(a) is tuple:
            a, start = a
        if type(a) is not DeviceArray:
            values.append(0 if a is None else a)
            continue
        values.append(a.ptr + start)
        places.append((i, a, start))
    maps = [
        (address, a.size // a.shape[-1], a.shape[-1] * a.dtype.itemsize, box)
        for address, a, box in zip(values, arguments, boxes, strict=False)
    ]
    parameters = kernel.parameters.pack(*values[len(maps) :])
    _do(Step(kernel, (x, y), block, shared, parameters, maps), places)


def _do(step: Step, places: list[tuple[int, DeviceArray, int]]) -> None:
    """Do a step now, or log it. places: those of the step, with the arrays themselves."""
    device, stream, _, log = _current.place
    if log is None:
        Plan([step], device).run((), stream)
    else:
        numbered = [(i, int(a.owner), a.start + offset) for i, a, offset in places]
        log.steps.append(Step(*step[:-1], numbered))


def threads(count: int, block: int = 256) -> int:
    """The number of blocks of ``block`` threads that ``count`` threads need."""
    return -(-count // block)


# ---------------------------------------------------------------- fills and copies


def _depends_on_values() -> None:
    log = _current.place[3]
    if log is not None:
        log.depends_on_values()


def fill_bytes(x: DeviceArray, value: int) -> None:
    """Set every byte of a buffer."""
    if nbytes := x.nbytes:
        _do(Step(None, (0, 0), 0, 0, struct.pack("3q", x.ptr, value, nbytes)), [(0, x, 0)])


def copy_to_device(host: np.ndarray, out: DeviceArray) -> None:
    """Copy a host array, which may be changed or freed as soon as this returns."""
    _depends_on_values()
    host = np.ascontiguousarray(host)
    if host.nbytes:
        runtime = driver.runtime
        runtime.memcpyAsync(
            out.ptr, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, _current.place[1]
        )


def copy_to_host(x: DeviceArray) -> np.ndarray:
    """Copy a small buffer to the host; this synchronises with the stream."""
    _depends_on_values()
    host = np.empty(x.shape, x.dtype)
    if x.nbytes:
        runtime, stream = driver.runtime, _current.place[1]
        runtime.memcpyAsync(host.ctypes.data, x.ptr, x.nbytes, runtime.memcpyDeviceToHost, stream)
        runtime.streamSynchronize(stream)
    return host
