"""What the library needs of an array framework; NumPy's implementation is the default."""

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
from fp8moe.records import ArraySpec, DeviceArray

#: an array without its framework: `numpy.ndarray` on the CPU, `DeviceArray` on CUDA
RawArray = np.ndarray | DeviceArray
Device = str | int  # "cpu", or the ordinal of a CUDA device
#: a device, the arrays' addresses, and shape, dtype and alignment of each
Description = tuple[int, list[int], list[tuple[tuple[int, ...], np.dtype, int]]]
Wanted = tuple[tuple[int, ...], np.dtype, bool]  # an array to allocate, and whether it ends with the call


class BackendUnavailable(RuntimeError):
    """There is no working backend for the device of an array; the message names what to install."""


load_module = cache(importlib.import_module)


def require_cupy(purpose: str) -> ModuleType:
    try:
        return load_module("cupy")
    except ImportError as error:
        raise BackendUnavailable(
            f"{purpose} needs the CUDA backend, and CuPy cannot be imported ({error}); "
            "install it with: pip install 'fp8moe[cuda13]' (or fp8moe[cuda12] for a CUDA 12 driver)"
        ) from error


def describe_device(device: Device) -> str:
    return "the CPU" if device == "cpu" else f"CUDA device {device}"


class Framework:
    """How one framework's arrays are viewed, allocated and handed back."""

    name = "numpy"
    always_writable = False  # whether none of its arrays is read-only

    def view(self, x: Any, name: str) -> RawArray:
        return require_contiguous(x, name, "numpy.ascontiguousarray")

    def empty(self, spec: ArraySpec, device: Device) -> RawArray:
        if device == "cpu":
            return np.empty(spec.shape, spec.dtype)
        cupy = require_cupy(f"an array on {describe_device(device)}")
        with cupy.cuda.Device(device), cupy.cuda.Stream.null:  # the memory pool is per stream: see `stream`
            return load_module("fp8moe.interop.cupy").cupy_empty(cupy, spec)

    def scratch(self, spec: ArraySpec, device: Device) -> RawArray:
        """Memory for the length of one call."""
        return self.empty(spec, device)

    # What a launch plan does (`fp8moe.launch_plan`), with as few Python calls as can be.

    def describe(self, arrays: list[Any]) -> Description | None:
        """What `view` would make of these arrays, if they are this framework's and lie on one CUDA device;
        None where `view` has to look at them one by one."""
        framework_of_type = load_module("fp8moe.interop").framework_of_type
        device, addresses, described = None, [], []
        for x in arrays:
            try:
                raw = self.view(x, "")
            except Exception:  # the call's own `view` raises it with the argument's name
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
        """A function that returns `stream`, and one for each of these arrays that allocates it."""
        makers: list[Callable[[], Any]] = []
        for shape, dtype, temporary in arrays:
            make = self.scratch if temporary else self.empty
            makers.append(partial(make, ArraySpec(shape, dtype), device))
        return partial(self.stream, device), makers

    #: address of what these allocate, and whether that is the caller's kind of array, which `wrap` makes else
    address: Callable[[Any], int] = staticmethod(attrgetter("ptr"))
    allocates_results = False

    def wrap(self, raw: RawArray) -> Any:
        return (
            raw
            if isinstance(raw, np.ndarray)
            else load_module("fp8moe.interop.cupy").cupy_view(require_cupy("a result"), raw)
        )

    def stream(self, device: Device) -> int:
        """Address of the CUDA stream that this framework's arrays are ordered on; 0: the default stream."""
        return 0

    def beside(self, x: Any) -> Framework:
        """The framework whose results on the CPU lie where this array does."""
        return self

    def is_read_only(self, x: Any) -> bool:
        return not self.always_writable and not x.flags.writeable


def no_array(x: Any, name: str) -> TypeError:
    return TypeError(
        f"{name}: got {type(x).__module__}.{type(x).__qualname__}; wanted an array (NumPy, torch, "
        "CuPy, JAX, or anything with __dlpack__ or __cuda_array_interface__)"
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


_KNOWN = {dtype: dtype for dtype in _DTYPES.values()}


def known_dtype(dtype: np.dtype, argument: str) -> np.dtype:
    """The native dtype that equals this one. NumPy composes ``dtype.name`` at each use, which takes 2 us."""
    same = _KNOWN.get(dtype)
    if same is None:
        native = dtype_named(dtype.name, argument)
        raise TypeError(
            f"{argument}: got dtype {dtype.str}, whose bytes are in another order than this machine's; pass "
            f"it .astype({native.name!r})"
        )
    return same


def plain_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of the same size that every framework exchanges: bfloat16 as int16, float8 as uint8."""
    if dtype.kind != "V" and dtype.name not in ("bfloat16",) and not dtype.name.startswith("float8"):
        return dtype
    return np.dtype(np.int16 if dtype == BFLOAT16 else np.uint8)


def require_contiguous(x: np.ndarray, name: str, fix: str) -> np.ndarray:
    if isinstance(x, (np.ma.MaskedArray, np.matrix)):
        raise TypeError(
            f"{name}: got a {type(x).__name__}, whose mask or shapes would be lost; wanted an array; pass "
            "x.filled(value), or numpy.asarray(x)"
        )
    if not x.flags.c_contiguous:
        raise not_contiguous(name, x.shape, x.strides, f"{fix}(x)")
    known_dtype(x.dtype, name)
    return x


def not_contiguous(name: str, shape: Any, strides: Any, fix: str) -> ValueError:
    return ValueError(
        f"{name}: got shape {tuple(shape)} with strides {tuple(strides or ())}; wanted a C-contiguous "
        f"array; pass {fix}"
    )
