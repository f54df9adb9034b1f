"""Arrays of any other library, through DLPack or ``__cuda_array_interface__``."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.runtime.interop import capsule
from fp8moe.runtime.interop.base import (
    BackendUnavailable,
    DeviceArray,
    Framework,
    RawArray,
    known_dtype,
    load_module,
    no_array,
    not_contiguous,
    require_cupy,
)


class Exchanged(Framework):
    """Any object with ``__dlpack__`` or ``__cuda_array_interface__``; results are NumPy or CuPy arrays."""

    name = "dlpack"

    def view(self, x: Any, name: str) -> RawArray:
        interface = _cuda_array_interface(x)
        if interface is not None:
            return _from_cuda_array_interface(interface, x, name)
        exchanged = _exchange(x, name)
        if not capsule.is_c_contiguous(exchanged.shape, exchanged.strides):
            raise not_contiguous(name, exchanged.shape, exchanged.strides, "a contiguous copy")
        if exchanged.device_type == capsule.CPU:
            return capsule.as_numpy(exchanged)
        return DeviceArray(
            exchanged.ptr, exchanged.shape, exchanged.dtype, exchanged.device_id, (x, exchanged)
        )

    def is_read_only(self, x: Any) -> bool:
        interface = _cuda_array_interface(x)
        return interface["data"][1] if interface is not None else _exchange(x, "out").read_only


def _exchange(x: Any, name: str) -> capsule.Exchanged:
    """Read the DLPack capsule of an array."""
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise no_array(x, name)
    try:
        # stream=1: the legacy default stream, on which these calls run; the producer synchronises with it
        options = {"stream": 1} if x.__dlpack_device__()[0] in (2, 13) else {}
        try:  # since 1.0 a flag marks read-only memory; before, exporting it fails
            exported = x.__dlpack__(max_version=(1, 0), **options)
        except TypeError:  # a producer without max_version
            exported = x.__dlpack__(**options)
        exchanged = capsule.read_capsule(exported)
    except Exception as error:
        raise TypeError(
            f"{name}: got {type(x).__module__}.{type(x).__qualname__}, whose __dlpack__ gives no readable "
            f"array ({error}); wanted a dtype and device that DLPack and this library support"
        ) from error
    capsule.check_shape(name, exchanged.shape, exchanged.dtype.itemsize)
    if not exchanged.ptr and 0 not in exchanged.shape:
        raise ValueError(f"{name}: got shape {[*exchanged.shape]} at a null pointer; wanted memory")
    return exchanged


def _cuda_array_interface(x: Any) -> Any:
    """The ``__cuda_array_interface__`` of an array without DLPack, else None."""
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return None
    return getattr(x, "__cuda_array_interface__", None)


def _from_cuda_array_interface(interface: dict, x: Any, name: str) -> DeviceArray:
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    capsule.check_shape(name, shape, dtype.itemsize)
    strides = interface.get("strides")
    if strides and not capsule.is_c_contiguous(shape, tuple(s // dtype.itemsize for s in strides)):
        raise not_contiguous(name, shape, strides, "a contiguous copy")
    dtype = known_dtype(dtype, name)
    ptr, device = interface["data"][0], 0
    if 0 not in shape:
        runtime = require_cupy(f"{name} on CUDA").cuda.runtime
        try:
            attributes = runtime.pointerGetAttributes(ptr)
        except runtime.CUDARuntimeError as error:
            raise BackendUnavailable(
                f"{name}: got an array on CUDA, but the CUDA driver does not work ({error}); install a driver"
            ) from error
        if attributes.type not in (2, 3):  # cudaMemoryTypeDevice, cudaMemoryTypeManaged
            raise TypeError(
                f"{name}: got an array at {ptr:#x}, which is not CUDA device memory; wanted a device array"
            )
        device = attributes.device
        stream = interface.get("stream")
        if stream == 0:
            raise ValueError(
                f"{name}: got stream 0 in __cuda_array_interface__, which the protocol forbids; wanted None, "
                "1 (the legacy default stream), 2 (the thread's), or a stream's address"
            )
        if stream is not None and stream != 1:
            # 0: the stream of this framework
            load_module("fp8moe.kernels_cuda.runtime.driver").order(stream, 0, device)
    return DeviceArray(ptr, shape, dtype, device, x)


EXCHANGED = Exchanged()
