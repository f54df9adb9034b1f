"""One call of an operation: its arrays as raw buffers, what it allocates and computes, its results.

Arrays of any framework come in as raw buffers, the backend of their device computes, results leave as the
caller's kind.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from fp8moe import checks, counters, interop
from fp8moe.formats import FLOAT8_DTYPES
from fp8moe.interop import NUMPY, Device, Framework, RawArray, describe_device, load_module, require_cupy
from fp8moe.record_trees import METADATA_TYPES, is_metadata
from fp8moe.records import ArraySpec, PermutationPlan, QuantTensor, Record

NOWHERE = -1  # the device of arrays that are shapes only: nothing is computed there
WRITTEN = ("out", "dw13", "dw2")  # arguments that an operation writes to


class NotPlannable(Exception):
    """The call depends on more than shapes: it reads or writes memory from the host."""


class _Current(threading.local):
    call: Call | None = None  # of the outermost operation that runs in this thread


current = _Current()


class Call:
    """One call: ``args`` are raw, `empty` and `array` allocate, `run` computes, `leave` returns."""

    args: SimpleNamespace

    def __init__(self) -> None:
        self.device: Device = "cpu"
        self.framework: Framework = NUMPY
        self._first: str | None = None
        self._given: list[tuple[Any, Any]] = []  # raw buffers and records, and what they were

    def perform(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function, whose operations are part of this call: they take and return raw buffers."""
        before, current.call = current.call, self
        try:
            return function(*arguments, **options)
        finally:
            current.call = before

    # -------------------------------------------------------- in

    def take(self, name: str, value: Any) -> Any:
        """The raw form of an argument; what holds no arrays stays as it is."""
        raw = replace_arrays(partial(self._view, name in WRITTEN), value, name)
        if raw is not value:
            self._given.append((raw, value))
        return raw

    def _view(self, written: bool, name: str, array: Any) -> RawArray:
        framework = interop.framework_of(array, name)
        raw = framework.view(array, name)
        if written and framework.is_read_only(array):
            kind = f"{type(array).__module__}.{type(array).__qualname__}"
            raise ValueError(
                f"{name}: got {kind}, which is read-only; wanted memory to write to, or None for new memory"
            )
        if isinstance(raw, np.ndarray):
            self._locate(name, "cpu", framework.beside(array) if self._first is None else framework)
        else:
            self._locate(name, raw.device, framework)
        self._given.append((raw, array))
        return raw

    def _locate(self, name: str, device: Device, framework: Framework) -> None:
        """All arrays lie where the first one does."""
        if self._first is None:
            self.device, self.framework, self._first = device, framework, name
        elif device != self.device:
            raise TypeError(
                f"{name}: got an array on {describe_device(device)}; wanted {describe_device(self.device)}, "
                f"where {self._first} lies; move one of them first"
            )
        elif framework is not self.framework and device != "cpu":
            before, after = framework.stream(device), self.framework.stream(device)
            if before != after:
                load_module("fp8moe.kernels_cuda.driver").order(before, after, int(device))

    # -------------------------------------------------------- inside

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> RawArray:
        """Allocate an array, by the caller's framework on CUDA."""
        return self.framework.empty(ArraySpec(shape, dtype), self.device)

    def empty(self, spec: Any) -> Any:
        """Allocate every `ArraySpec` in a record or a tuple of them."""
        if type(spec) is ArraySpec:
            return self.array(spec.shape, spec.dtype)
        if isinstance(spec, tuple):
            return tuple([self.empty(part) for part in spec])
        if not isinstance(spec, Record):
            return spec
        new = object.__new__(type(spec))
        for name, part in vars(spec).items():
            new.__dict__[name] = self.empty(part) if isinstance(part, (ArraySpec, Record, tuple)) else part
        return new

    def run(self, topic: str, name: str, *arguments: Any, out: Any, **options: Any) -> None:
        """Have the backend of this device fill ``out``. Empty outputs return here, and only here."""
        if self.device == NOWHERE:
            return
        function = getattr(load_backend(self.device, topic), name)
        if _is_empty(out):
            return
        for count in counters.counting():
            count(("launches", name))
        self._do(function, *arguments, out=out, **options)

    def _do(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """On the CPU with its arithmetic; on CUDA on the stream that the caller's arrays are ordered on."""
        if self.device == "cpu":
            with load_module("fp8moe.reference.numerics").DefaultArithmetic():
                return function(*arguments, **options)
        stream = self.framework.stream(self.device)
        place = int(self.device), stream, self.framework.scratch, None
        return cuda_launch().run_at(place, function, *arguments, **options)

    def count_overwrite(self, raw: RawArray) -> None:
        """Count that this call has overwritten an array that was given to it."""
        if (place := place_of(raw)) is not None:
            count_overwrite(place)

    def upload(self, host: np.ndarray) -> RawArray:
        """Copy a small host array to the device of this call, on its stream."""
        if self.device == "cpu":
            return host
        raw = self.array(host.shape, host.dtype)
        self._do(cuda_launch().copy_to_device, host, raw)
        return raw

    def values(self, raw: RawArray) -> np.ndarray | None:
        """An array's values on the host, for checks: on CUDA only with FP8MOE_CHECK=1, as it synchronises."""
        if isinstance(raw, np.ndarray):
            return raw
        return self.to_host(raw) if checks.LOOK_AT_VALUES else None

    def to_host(self, raw: RawArray) -> np.ndarray:
        """Copy a small array to the host. On CUDA this synchronises with the call's stream."""
        if isinstance(raw, np.ndarray):
            return raw
        host: np.ndarray = self._do(cuda_launch().copy_to_host, raw)
        return host

    # -------------------------------------------------------- out

    def leave(self, out: Any) -> Any:
        """Raw buffers back to the caller's kind of array, those that came in to what they were. Inside of an
        operation, which its outermost call leaves, nothing changes."""
        if current.call is self or is_metadata(out):
            return out
        for raw, given in self._given:
            if raw is out:
                return given
        if isinstance(out, tuple):
            return tuple([self.leave(part) for part in out])
        if not isinstance(out, Record):
            return self.framework.wrap(out)
        new = object.__new__(type(out))
        for name, part in vars(out).items():
            new.__dict__[name] = self.leave(part)
        return new


# ---------------------------------------------------------------- arguments as trees of arrays


def replace_arrays(fn: Callable[[str, Any], Any], value: Any, name: str) -> Any:
    """An argument with ``fn(name, array)`` in the place of every array. FP8 codes are uint8 inside the
    library, also where they came as a float8 dtype. Raises TypeError where a record has no array in a field
    that must be one."""
    if isinstance(value, tuple):
        if is_metadata(value):
            return value
        return tuple([replace_arrays(fn, part, f"{name}[{i}]") for i, part in enumerate(value)])
    if not isinstance(value, Record):
        return value if interop.framework_of_type(type(value)) is None else fn(name, value)  # type: ignore[arg-type]
    new = object.__new__(type(value))
    for field, part in vars(value).items():
        if type(part) in METADATA_TYPES:
            pass
        elif isinstance(part, (Record, tuple)):
            part = replace_arrays(fn, part, f"{name}.{field}")
        elif interop.framework_of_type(type(part)) is not None:  # type: ignore[arg-type]
            part = fn(f"{name}.{field}", part)
        elif not is_metadata(part):
            raise interop.no_array(part, f"{name}.{field}")
        new.__dict__[field] = part
    return as_codes(new) if isinstance(new, QuantTensor) else new


def as_codes(q: QuantTensor) -> QuantTensor:
    """A raw tensor with codes as uint8."""
    if q.data is None or getattr(q.data, "dtype", None) != FLOAT8_DTYPES.get(q.fmt):
        return q
    return replace(q, data=q.data.view(np.dtype(np.uint8)))


def _is_empty(out: Any) -> bool:
    """Whether no array of an output has an element; the plan of permuted rows is none."""
    if not isinstance(out, (Record, tuple)):
        return out is None or 0 in out.shape
    for part in out if isinstance(out, tuple) else vars(out).values():
        if isinstance(part, (Record, tuple)):
            if not (is_metadata(part) or isinstance(part, PermutationPlan) or _is_empty(part)):
                return False
        elif part is not None and 0 not in getattr(part, "shape", (0,)):
            return False
    return True


#: by device and address, how often `count_overwrite` was called; it keeps an entry for each array ever given
overwrite_counts: Counter[tuple[Device, int]] = Counter()
_counting = threading.Lock()


def count_overwrite(place: tuple[Device, int]) -> None:
    with _counting:  # an addition reads, then writes
        overwrite_counts[place] += 1


def place_of(raw: RawArray) -> tuple[Device, int] | None:
    """Device and address of a raw array; None while only shapes are known."""
    if isinstance(raw, np.ndarray):
        return "cpu", raw.__array_interface__["data"][0]
    return None if raw.device == NOWHERE else (raw.device, raw.ptr)


# ---------------------------------------------------------------- backends, by device


@cache
def load_backend(device: Device, topic: str) -> ModuleType:
    """The module of one topic: ``fp8moe.reference`` on the CPU, ``fp8moe.kernels_cuda`` on CUDA."""
    if device == "cpu":
        return load_module(f"fp8moe.reference.{topic}")
    require_cupy(f"{topic} on {describe_device(device)}")
    return load_module(f"fp8moe.kernels_cuda.{topic}")


#: the module that launches kernels, which imports CuPy
cuda_launch: Callable[[], Any] = partial(load_module, "fp8moe.kernels_cuda.launch")
