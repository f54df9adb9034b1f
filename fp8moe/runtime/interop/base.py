"""The interface to an array framework; the default implementation is NumPy's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import cache, partial
from operator import attrgetter
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from fp8moe.formats import BFLOAT16
from fp8moe.records import ArraySpec, DeviceArray, Permuted, SortedChunks

#: a raw buffer: `numpy.ndarray` on the CPU, `DeviceArray` on CUDA
RawArray = np.ndarray | DeviceArray
Device = str | int  # "cpu", or the ordinal of a CUDA device
#: (device, addresses of the arrays, (shape, dtype, address modulo 16) of each)
Description = tuple[int, list[int], list[tuple[tuple[int, ...], np.dtype, int]]]
Wanted = tuple[tuple[int, ...], np.dtype, bool]  # an array to allocate; True: temporary, for one call


class BackendUnavailable(RuntimeError):
    """No backend works for the device of an array; the message says what to install."""


load_module = cache(importlib.import_module)


def require_cupy(purpose: str) -> ModuleType:
    try:
        return load_module("cupy")
    except ImportError as error:
        raise BackendUnavailable(
            f"{purpose} needs the CUDA backend, and CuPy cannot be imported ({error}); "
            "install it with: pip install 'fp8moe[cuda13]' (or fp8moe[cuda12] for a CUDA 12 driver)"
        ) from error


NOWHERE = -1  # the device of arrays that have a shape and no memory: nothing is executed
Place = tuple[Device, int]  # device and address


def place_of(raw: RawArray) -> Place | None:
    """Where a raw array lies; None while only shapes are known."""
    if isinstance(raw, np.ndarray):
        return "cpu", raw.__array_interface__["data"][0]
    return None if raw.device == NOWHERE else (raw.device, raw.ptr)


def describe_device(device: Device) -> str:
    return "the CPU" if device == "cpu" else f"CUDA device {device}"


class Framework:
    """Views, allocates and returns arrays of one framework."""

    name = "numpy"
    always_writable = False  # whether its arrays are never read-only

    def view(self, x: Any, name: str) -> RawArray:
        return require_contiguous(x, name, "numpy.ascontiguousarray")

    def place(self, x: Any, name: str) -> Place | None:
        """Where an array lies; None while only shapes are known. It may refuse what `view` refuses."""
        return place_of(self.view(x, name))

    def empty(self, spec: ArraySpec, device: Device) -> RawArray:
        if device == "cpu":
            return np.empty(spec.shape, spec.dtype)
        cupy = require_cupy(f"an array on {describe_device(device)}")
        with cupy.cuda.Device(device), cupy.cuda.Stream.null:  # the memory pool is per stream: see `stream`
            return load_module("fp8moe.runtime.interop.cupy").cupy_empty(cupy, spec)

    def scratch(self, spec: ArraySpec, device: Device) -> RawArray:
        """Allocate temporary memory for one call."""
        return self.empty(spec, device)

    # The methods that a recording calls (`fp8moe.runtime.recording`), with as few Python calls as
    # possible.

    def describe(self, arrays: list[Any]) -> Description | None:
        """Describe arrays as `view` would, if all are this framework's and on one CUDA device; otherwise
        None, and the caller uses `view` for each array."""
        framework_of_type = load_module("fp8moe.runtime.interop").framework_of_type
        device, addresses, described = None, [], []
        for x in arrays:
            try:
                raw = self.view(x, "")
            except Exception:  # `view` raises it again, with the argument's name
                return None
            if type(raw) is not DeviceArray or framework_of_type(type(x)) is not self:
                return None
            if device is not None and raw.device != device:
                return None
            device = raw.device
            addresses.append(raw.ptr)
            described.append((raw.shape, raw.dtype, raw.ptr & 15))
        return None if device is None else (device, addresses, described)

    def prepare(
        self, device: int, arrays: Iterable[Wanted]
    ) -> tuple[Callable[[], int], list[Callable[[], Any]]]:
        """(a function that returns `stream`, a function per array that allocates it)."""
        makers: list[Callable[[], Any]] = []
        for shape, dtype, temporary in arrays:
            make = self.scratch if temporary else self.empty
            makers.append(partial(make, ArraySpec(shape, dtype), device))
        return partial(self.stream, device), makers

    #: address: of an array from these functions. allocates_results: whether they return the framework's own
    #: arrays, allocated on the current device, which is that of the call; otherwise `wrap` converts them
    address: Callable[[Any], int] = staticmethod(attrgetter("ptr"))
    allocates_results = False

    def wrap(self, raw: RawArray) -> Any:
        return (
            raw
            if isinstance(raw, np.ndarray)
            else load_module("fp8moe.runtime.interop.cupy").cupy_view(require_cupy("a result"), raw)
        )

    def stream(self, device: Device) -> int:
        """Handle of the CUDA stream on which this framework orders its arrays; 0: the default stream."""
        return 0

    def beside(self, x: Any) -> Framework:
        """The framework object that places CPU results on the device of this array."""
        return self

    def is_read_only(self, x: Any) -> bool:
        return not self.always_writable and not x.flags.writeable

    def overwritten(self, x: Any) -> None:
        """Called after an operation has overwritten an array that was given to it."""


def no_array(x: Any, name: str) -> TypeError:
    fix = f"; pass {name}.data" if isinstance(x, (Permuted, SortedChunks)) else ""
    return TypeError(
        f"{name}: got {type(x).__module__}.{type(x).__qualname__}; wanted an array (NumPy, torch, "
        f"CuPy, JAX, or anything with __dlpack__ or __cuda_array_interface__){fix}"
    )


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


KNOWN_DTYPES = {dtype: dtype for dtype in _DTYPES.values()}


def known_dtype(dtype: np.dtype, argument: str) -> np.dtype:
    """The native dtype equal to this one. Cached, because NumPy takes 2 us to build ``dtype.name`` at each
    use."""
    known = KNOWN_DTYPES.get(dtype)
    if known is None:
        native = dtype_named(dtype.name, argument)
        raise TypeError(
            f"{argument}: got dtype {dtype.str}; wanted this machine's byte order; pass "
            f"{argument}.astype({native.name!r})"
        )
    return known


def plain_dtype(dtype: np.dtype) -> np.dtype:
    """A dtype of the same size that every framework can exchange: int16 for bfloat16, uint8 for float8."""
    if dtype.kind != "V" and dtype.name not in ("bfloat16",) and not dtype.name.startswith("float8"):
        return dtype
    return np.dtype(np.int16 if dtype == BFLOAT16 else np.uint8)


def require_contiguous(x: np.ndarray, name: str, fix: str) -> np.ndarray:
    if isinstance(x, (np.ma.MaskedArray, np.matrix)):
        raise TypeError(
            f"{name}: got a {type(x).__name__}; wanted a plain array, without a mask or matrix semantics; "
            f"pass {name}.filled(value), or numpy.asarray({name})"
        )
    if not x.flags.c_contiguous:
        raise not_contiguous(name, x.shape, x.strides, f"{fix}({name})")
    if x.dtype not in KNOWN_DTYPES:
        known_dtype(x.dtype, name)
    return x


def not_contiguous(name: str, shape: Any, strides: Any, fix: str) -> ValueError:
    return ValueError(
        f"{name}: got shape {tuple(shape)} with strides {tuple(strides or ())}; wanted a C-contiguous "
        f"array; pass {fix}"
    )
