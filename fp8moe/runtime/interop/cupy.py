"""CuPy arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np

from fp8moe.records import ArraySpec, DeviceArray
from fp8moe.runtime.interop.base import (
    KNOWN_DTYPES,
    Description,
    Device,
    Framework,
    Place,
    RawArray,
    Wanted,
    known_dtype,
    load_module,
    not_contiguous,
)


class Cupy(Framework):
    name = "cupy"
    always_writable = True

    def view(self, x: Any, name: str) -> RawArray:
        if not x.flags.c_contiguous:
            raise not_contiguous(name, x.shape, x.strides, f"cupy.ascontiguousarray({name})")
        memory = x.data
        return DeviceArray(memory.ptr, x.shape, known_dtype(x.dtype, name), memory.device_id, x)

    def place(self, x: Any, name: str) -> Place:
        return x.data.device_id, x.data.ptr

    def empty(self, spec: ArraySpec, device: Device) -> RawArray:
        cupy = sys.modules["cupy"]
        if cupy.cuda.runtime.getDevice() == device:
            return cupy_empty(cupy, spec)
        with cupy.cuda.Device(device):
            return cupy_empty(cupy, spec)

    def scratch(self, spec: ArraySpec, device: Device) -> RawArray:
        raw = self.empty(spec, device)
        self._keep(raw.owner, device)  # type: ignore[union-attr]
        return raw

    def _keep(self, memory: Any, device: Device) -> None:
        """Keep temporary memory as long as the graph that the current stream is being captured in."""
        stream = sys.modules["cupy"].cuda.get_current_stream(device)
        if stream.is_capturing():
            load_module("fp8moe.kernels_cuda.runtime.driver").kept_by_graph(stream.ptr, memory)

    def stream(self, device: Device) -> int:
        return sys.modules["cupy"].cuda.get_current_stream(device).ptr

    def describe(self, arrays: list[Any]) -> Description | None:
        kind, device = sys.modules["cupy"].ndarray, None
        addresses, described = [], []
        for x in arrays:
            if type(x) is not kind:
                return super().describe(arrays)
            # _c_contiguous is what ``flags`` say, for which CuPy makes an object in 0.3 us
            if not x._c_contiguous or (dtype := KNOWN_DTYPES.get(x.dtype)) is None:
                return None
            memory = x.data
            if device is None:
                device = memory.device_id
            elif device != memory.device_id:
                return None
            address = memory.ptr
            addresses.append(address)
            described.append((x.shape, dtype, address & 15))
        return None if device is None else (device, addresses, described)

    def prepare(
        self, device: int, arrays: Iterable[Wanted]
    ) -> tuple[Callable[[], int], list[Callable[[], Any]]]:
        makers: list[Callable[[], Any]] = []
        for shape, dtype, temporary in arrays:
            make = partial(sys.modules["cupy"].ndarray, shape, _cupy_dtype(dtype))
            makers.append(partial(self._temporary, make, device) if temporary else make)
        return partial(self.stream, device), makers

    def _temporary(self, make: Callable[[], Any], device: int) -> Any:
        self._keep(memory := make(), device)
        return memory

    address = staticmethod(attrgetter("data.ptr"))

    allocates_results = True


def cupy_empty(cupy: ModuleType, spec: ArraySpec) -> DeviceArray:
    owner = cupy.empty(spec.shape, _cupy_dtype(spec.dtype))
    return DeviceArray(owner.data.ptr, spec.shape, spec.dtype, owner.data.device_id, owner)


def cupy_view(cupy: ModuleType, raw: DeviceArray) -> Any:
    owner = raw.owner
    if isinstance(owner, cupy.ndarray) and owner.data.ptr == raw.ptr and owner.shape == tuple(raw.shape):
        return owner
    memory = cupy.cuda.UnownedMemory(raw.ptr, max(raw.nbytes, 1), raw.owner, raw.device)
    return cupy.ndarray(raw.shape, _cupy_dtype(raw.dtype), cupy.cuda.MemoryPointer(memory, 0))


@cache
def _cupy_dtype(dtype: np.dtype) -> np.dtype:
    """CuPy supports bfloat16 but not float8, which becomes uint8."""
    return np.dtype(np.uint8) if dtype.name.startswith("float8") else dtype
