"""CuPy arrays."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from fp8moe.records import ArraySpec, DeviceArray
from fp8moe.runtime.interop.base import Device, Framework, RawArray, known_dtype, load_module, not_contiguous


class Cupy(Framework):
    name = "cupy"
    always_writable = True

    def view(self, x: Any, name: str) -> RawArray:
        if not x.flags.c_contiguous:
            raise not_contiguous(name, x.shape, x.strides, f"cupy.ascontiguousarray({name})")
        memory = x.data
        return DeviceArray(memory.ptr, x.shape, known_dtype(x.dtype, name), memory.device_id, x)

    def empty(self, spec: ArraySpec, device: Device) -> RawArray:
        cupy = sys.modules["cupy"]
        if cupy.cuda.runtime.getDevice() == device:
            return cupy_empty(cupy, spec)
        with cupy.cuda.Device(device):
            return cupy_empty(cupy, spec)

    def scratch(self, spec: ArraySpec, device: Device) -> RawArray:
        raw = self.empty(spec, device)
        stream = sys.modules["cupy"].cuda.get_current_stream(device)
        if stream.is_capturing():
            load_module("fp8moe.kernels_cuda.runtime.driver").kept_by_graph(stream.ptr, raw)
        return raw

    def stream(self, device: Device) -> int:
        return sys.modules["cupy"].cuda.get_current_stream(device).ptr


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
