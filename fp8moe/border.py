"""The border: arrays of any framework come in as raw buffers, results leave as the caller's kind.

A raw buffer is a `numpy.ndarray` on the CPU and a `DeviceArray` on CUDA. Nothing is copied on the way in.
A framework is never imported here: when one of its arrays arrives, it is in `sys.modules` already.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from fp8moe import dlpack, tracing
from fp8moe.formats import BFLOAT16, FLOAT8_DTYPES
from fp8moe.records import ArraySpec, DeviceArray, QuantTensor, arrays_in, is_metadata, map_arrays

RawArray = np.ndarray | DeviceArray
Device = str | int  # "cpu", or the ordinal of a CUDA device


class BackendUnavailable(RuntimeError):
    """The device an array lies on has no working backend here; the message says what to install."""


def enter(**values: Any) -> Call:
    """Take the arguments of one public call. The first array decides what kind the results are.

    Raises TypeError for what is not an array or lies on another device than the first, ValueError for
    an array that is not C-contiguous.
    """
    return Call(values)


class Call:
    """One call through the border: ``args`` are raw, `empty` allocates, `run` computes, `leave` returns."""

    def __init__(self, values: dict[str, Any]):
        self.device: Device = "cpu"
        self.family: Family = NUMPY
        self._first = ""
        self.args = SimpleNamespace(**{k: self._take(k, v) for k, v in values.items()})

    def _take(self, name: str, value: Any) -> Any:
        if value is not None and is_metadata(value):
            family_of(value, name)  # a number or a tuple where an array belongs: refused there
        value = map_arrays(self._take_array, value, name)
        return _as_codes(value) if isinstance(value, QuantTensor) else value

    def _take_array(self, name: str, array: Any) -> RawArray:
        family = family_of(array, name)
        raw = family.view(array, name)
        device: Device = "cpu" if isinstance(raw, np.ndarray) else raw.device
        if not self._first:
            self.device, self.family, self._first = device, family, name
        elif device != self.device:
            raise TypeError(
                f"{name}: got an array on {describe(device)}; wanted {describe(self.device)}, where "
                f"{self._first} lies; move one of them first"
            )
        return raw

    def empty(self, spec: Any) -> Any:
        """Allocate every `ArraySpec` in a record of them, by the caller's framework on CUDA."""
        return map_arrays(
            lambda _, s: self.family.empty(s, self.device) if isinstance(s, ArraySpec) else s,
            spec,
        )

    def run(self, room: str, verb: str, *args: Any, out: Any, **options: Any) -> None:
        """Have the backend of this device fill ``out``. Empty outputs return here, and only here."""
        backend = load_backend(self.device, room)
        if all(a.size == 0 for a in arrays_in(out)):
            return
        tracing.record_launch(verb)
        with self.family.stream(self.device):
            getattr(backend, verb)(*args, out=out, **options)

    def leave(self, out: Any) -> Any:
        """Raw buffers back to the caller's kind of array."""
        return map_arrays(lambda _, raw: self.family.wrap(raw), out)

    def upload(self, host: np.ndarray) -> RawArray:
        """Bring a small host array to the device of this call. On CUDA it is ordered on the stream."""
        if self.device == "cpu":
            return host
        cupy = require_cupy(f"an array on {describe(self.device)}")
        with cupy.cuda.Device(self.device):
            owner = cupy.asarray(host)
        return DeviceArray(owner.data.ptr, host.shape, host.dtype, int(self.device), owner)

    def to_host(self, raw: RawArray) -> np.ndarray:
        """Bring a small array to the host. On CUDA this synchronises."""
        if isinstance(raw, np.ndarray):
            return raw
        cupy = require_cupy(f"reading back from {describe(raw.device)}")
        return cupy.asnumpy(_cupy_view(cupy, raw)).view(raw.dtype)


def _as_codes(q: QuantTensor) -> QuantTensor:
    """Codes are bytes inside the library, whatever float8 dtype they came as."""
    if q.data.dtype != FLOAT8_DTYPES.get(q.fmt):
        return q
    return replace(q, data=q.data.view(np.dtype(np.uint8)))


def describe(device: Device) -> str:
    return "the CPU" if device == "cpu" else f"CUDA device {device}"


# ---------------------------------------------------------------- backends, by device


def load_backend(device: Device, room: str) -> ModuleType:
    """The module of one topic: ``fp8moe.reference`` on the CPU, ``fp8moe.kernels_cuda`` on CUDA."""
    if device == "cpu":
        return importlib.import_module(f"fp8moe.reference.{room}")
    require_cupy(f"{room} on {describe(device)}")
    name = f"fp8moe.kernels_cuda.{room}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise BackendUnavailable(
            f"{room}: this version has no CUDA kernels for it yet; move the arrays to the CPU, where the "
            "reference computes it"
        ) from None


def require_cupy(purpose: str) -> ModuleType:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise BackendUnavailable(
            f"{purpose} needs the CUDA backend, and CuPy cannot be imported ({error}); "
            "install it with: pip install 'fp8moe[cuda13]' (or fp8moe[cuda12] for a CUDA 12 driver)"
        ) from error


# ---------------------------------------------------------------- families of arrays


class Family:
    """How one framework's arrays are viewed, allocated and handed back."""

    name = "numpy"

    def view(self, x: Any, name: str) -> RawArray:
        return _require_contiguous(x, name, "numpy.ascontiguousarray")

    def empty(self, spec: ArraySpec, device: Device) -> RawArray:
        if device == "cpu":
            return np.empty(spec.shape, spec.dtype)
        cupy = require_cupy(f"an array on {describe(device)}")
        with cupy.cuda.Device(device):
            owner = cupy.empty(spec.shape, _cupy_dtype(spec.dtype))
        return DeviceArray(owner.data.ptr, tuple(spec.shape), spec.dtype, int(device), owner)

    def wrap(self, raw: RawArray) -> Any:
        return raw if isinstance(raw, np.ndarray) else _cupy_view(require_cupy("a result"), raw)

    def stream(self, device: Device) -> AbstractContextManager[Any]:
        """Make the stream that this family's arrays are ordered on CuPy's current one, and the device."""
        if device == "cpu":
            return nullcontext()
        return _on_stream(device, lambda cupy: cupy.cuda.Stream.null)


class _Torch(Family):
    name = "torch"

    def view(self, x: Any, name: str) -> RawArray:
        torch = sys.modules["torch"]
        if x.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"{name}: got a tensor that requires grad, which this function would cut off; use "
                "fp8moe.adapters.torch_ops, or pass x.detach()"
            )
        if not x.is_contiguous():
            raise _not_contiguous(name, tuple(x.shape), x.stride(), "x.contiguous()")
        dtype = dtype_named(str(x.dtype).removeprefix("torch."), name)
        if x.device.type == "cuda":
            return DeviceArray(x.data_ptr(), tuple(x.shape), dtype, x.device.index, x)
        if x.device.type != "cpu":
            raise TypeError(f"{name}: got a tensor on {x.device}; wanted cpu or cuda")
        if _plain(dtype) == dtype:
            return x.detach().numpy()
        return x.detach().view(getattr(torch, _plain(dtype).name)).numpy().view(dtype)

    def empty(self, spec: ArraySpec, device: Device) -> RawArray:
        if device == "cpu":
            return np.empty(spec.shape, spec.dtype)
        torch = sys.modules["torch"]
        owner = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype.name), device=f"cuda:{device}")
        return DeviceArray(owner.data_ptr(), tuple(spec.shape), spec.dtype, int(device), owner)

    def wrap(self, raw: RawArray) -> Any:
        torch = sys.modules["torch"]
        if isinstance(raw, DeviceArray):
            return raw.owner
        tensor = torch.from_numpy(raw.view(_plain(raw.dtype)))
        return tensor.view(getattr(torch, raw.dtype.name))

    def stream(self, device: Device) -> AbstractContextManager[Any]:
        if device == "cpu":
            return nullcontext()
        current = sys.modules["torch"].cuda.current_stream(device)
        return _on_stream(device, lambda cupy: cupy.cuda.Stream.from_external(current))


class _Cupy(Family):
    name = "cupy"

    def view(self, x: Any, name: str) -> RawArray:
        if not x.flags.c_contiguous:
            raise _not_contiguous(name, x.shape, x.strides, "cupy.ascontiguousarray(x)")
        return DeviceArray(x.data.ptr, x.shape, dtype_named(x.dtype.name, name), x.device.id, x)

    def stream(self, device: Device) -> AbstractContextManager[Any]:
        return _on_stream(device, lambda cupy: cupy.cuda.get_current_stream())


class _Jax(Family):
    name = "jax"

    def view(self, x: Any, name: str) -> RawArray:
        if isinstance(x, sys.modules["jax"].core.Tracer):
            raise TypeError(
                f"{name}: got {type(x).__name__}, a value being traced by JAX; call this outside "
                "jax.jit, or through jax.pure_callback"
            )
        return _EXCHANGED.view(x, name)

    def wrap(self, raw: RawArray) -> Any:
        jax = sys.modules["jax"]
        if isinstance(raw, np.ndarray):
            return jax.numpy.asarray(raw)
        return jax.dlpack.from_dlpack(_cupy_view(require_cupy("a result"), raw))


class _Numba(Family):
    name = "numba"

    def view(self, x: Any, name: str) -> RawArray:
        return _EXCHANGED.view(x, name)

    def wrap(self, raw: RawArray) -> Any:
        if isinstance(raw, np.ndarray):
            return raw
        return sys.modules["numba.cuda"].as_cuda_array(_cupy_view(require_cupy("a result"), raw))


class _Exchanged(Family):
    """Anything else with ``__dlpack__`` or ``__cuda_array_interface__``; results are NumPy or CuPy."""

    name = "dlpack"

    def view(self, x: Any, name: str) -> RawArray:
        interface = getattr(x, "__cuda_array_interface__", None) if not _has_host_dlpack(x) else None
        if interface is not None:
            return _from_cuda_array_interface(interface, x, name)
        # stream=1: the legacy default stream, which this family runs on; the producer orders itself before it
        on_cuda = x.__dlpack_device__()[0] in (2, 13)
        exchanged = dlpack.read_capsule(x.__dlpack__(stream=1) if on_cuda else x.__dlpack__())
        if not dlpack.is_c_contiguous(exchanged.shape, exchanged.strides):
            raise _not_contiguous(name, exchanged.shape, exchanged.strides, "a contiguous copy")
        if exchanged.device_type == dlpack.CPU:
            return dlpack.as_numpy(exchanged)
        return DeviceArray(
            exchanged.ptr, exchanged.shape, exchanged.dtype, exchanged.device_id, (x, exchanged)
        )


def _has_host_dlpack(x: Any) -> bool:
    return hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] in (1, 2, 3, 13)


def _from_cuda_array_interface(interface: dict, x: Any, name: str) -> DeviceArray:
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    strides = interface.get("strides")
    if strides and not dlpack.is_c_contiguous(shape, tuple(s // dtype.itemsize for s in strides)):
        raise _not_contiguous(name, shape, strides, "a contiguous copy")
    ptr, device = interface["data"][0], 0
    if 0 not in shape:
        attributes = require_cupy(f"{name} on CUDA").cuda.runtime.pointerGetAttributes(ptr)
        if attributes.type not in (2, 3):  # cudaMemoryTypeDevice, cudaMemoryTypeManaged
            raise TypeError(
                f"{name}: got an array at {ptr:#x}, no CUDA device's memory; wanted a device array"
            )
        device = attributes.device
    return DeviceArray(ptr, shape, dtype, device, x)


NUMPY = Family()
_EXCHANGED = _Exchanged()
_FAMILIES: dict[str, Family] = {
    "numpy": NUMPY,
    "torch": _Torch(),
    "cupy": _Cupy(),
    "jax": _Jax(),
    "jaxlib": _Jax(),
    "numba": _Numba(),
    "numba_cuda": _Numba(),
}


@lru_cache(maxsize=256)
def _family_of_type(kind: Any) -> Family | None:
    for base in kind.__mro__:
        family = _FAMILIES.get(base.__module__.partition(".")[0])
        if family is not None:
            return family if family is not NUMPY or issubclass(kind, np.ndarray) else None
    if hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__"):
        return _EXCHANGED
    return None


def family_of(x: Any, name: str) -> Family:
    """The family of an array, by its type's home; no framework is imported to find out."""
    family = _family_of_type(type(x))  # type: ignore[arg-type]
    if family is None:
        raise TypeError(
            f"{name}: got {type(x).__module__}.{type(x).__qualname__}; wanted an array (NumPy, torch, "
            "CuPy, JAX, or anything with __dlpack__ or __cuda_array_interface__)"
        )
    return family


# ---------------------------------------------------------------- dtypes and strides

_DTYPES = {
    dtype.name: dtype
    for dtype in map(
        np.dtype,
        (
            np.bool_,
            np.int8,
            np.int16,
            np.int32,
            np.int64,
            np.uint8,
            np.uint16,
            np.uint32,
            np.uint64,
            np.float16,
            np.float32,
            np.float64,
            ml_dtypes.bfloat16,
            ml_dtypes.float8_e4m3fn,
            ml_dtypes.float8_e5m2,
            ml_dtypes.float8_e8m0fnu,
        ),
    )
}


def dtype_named(name: str, argument: str) -> np.dtype:
    if name not in _DTYPES:
        raise TypeError(f"{argument}: dtype {name} is not supported; wanted one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _plain(dtype: np.dtype) -> np.dtype:
    """The dtype of the same size that every framework exchanges: bfloat16 as int16, float8 as uint8."""
    if dtype.kind != "V" and dtype.name not in ("bfloat16",) and not dtype.name.startswith("float8"):
        return dtype
    return np.dtype(np.int16 if dtype == BFLOAT16 else np.uint8)


@contextmanager
def _on_stream(device: Device, choose: Callable[[ModuleType], Any]) -> Iterator[None]:
    cupy = require_cupy(f"work on {describe(device)}")
    with cupy.cuda.Device(device), choose(cupy):
        yield


def _cupy_view(cupy: ModuleType, raw: DeviceArray) -> Any:
    if type(raw.owner).__module__.partition(".")[0] == "cupy":
        return raw.owner
    memory = cupy.cuda.UnownedMemory(raw.ptr, max(raw.nbytes, 1), raw.owner, raw.device)
    return cupy.ndarray(raw.shape, _cupy_dtype(raw.dtype), cupy.cuda.MemoryPointer(memory, 0))


def _cupy_dtype(dtype: np.dtype) -> np.dtype:
    """CuPy knows bfloat16 but no float8."""
    return np.dtype(np.uint8) if dtype.name.startswith("float8") else dtype


def _require_contiguous(x: np.ndarray, name: str, fix: str) -> np.ndarray:
    if not x.flags.c_contiguous:
        raise _not_contiguous(name, x.shape, x.strides, f"{fix}(x)")
    dtype_named(x.dtype.name, name)
    return x


def _not_contiguous(name: str, shape: Any, strides: Any, fix: str) -> ValueError:
    return ValueError(
        f"{name}: got shape {tuple(shape)} with strides {tuple(strides or ())}; wanted a C-contiguous "
        f"array; pass {fix}"
    )
