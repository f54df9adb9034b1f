"""One call of an operation: its raw buffers, allocations, execution on a backend, and results.

Arrays of any framework are converted to raw buffers, the backend of their device runs, and results are
converted to arrays of the caller's framework.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from fp8moe.formats import FLOAT8_DTYPES
from fp8moe.records import ArraySpec, DeviceArray, PermutationPlan, QuantTensor, Record
from fp8moe.runtime import checks, counters, interop
from fp8moe.runtime.interop import (
    NUMPY,
    Device,
    Framework,
    RawArray,
    describe_device,
    load_module,
    require_cupy,
)
from fp8moe.runtime.interop.base import NOWHERE, place_of
from fp8moe.runtime.record_trees import METADATA_TYPES, is_metadata

_log = logging.getLogger(__name__)
DESCRIPTIONS = frozenset(("fmt", "block", "layout", "transposed"))  # arguments and fields that hold no arrays
#: arguments that an operation writes to
WRITTEN = ("out", "dw13", "dw2", "param", "exp_avg", "exp_avg_sq")


class NotRecordable(Exception):
    """The call cannot be recorded, because it reads or writes device memory from the host."""


class _Current(threading.local):
    call: Any = None  # the outermost `Call` that runs in this thread; None outside of operations


current = _Current()


class Call:
    """The state of one call: ``args`` are its arguments as raw buffers; `empty` and `array` allocate, `run`
    executes, `leave` returns."""

    args: SimpleNamespace

    def __init__(self) -> None:
        self.reads_values = checks.reads_values()  # from CUDA memory, for checks
        self.device: Device = "cpu"
        self.framework: Framework = NUMPY
        self._first: str | None = None  # the name of the first array
        self._given: list[tuple[Any, Any]] = []  # raw buffers and records, and what they were made from

    def perform(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run a function. Operations in it are part of this call: they take and return raw buffers."""
        before, current.call = current.call, self
        try:
            return function(*arguments, **options)
        finally:
            current.call = before

    # -------------------------------------------------------- arguments

    def take(self, name: str, value: Any) -> Any:
        """Convert an argument to raw buffers; one without arrays is returned as it is."""
        if name in DESCRIPTIONS:
            return value
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
        """Refuse an array on another device than the first one's; for an array of another framework order the
        two frameworks' streams."""
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
                load_module("fp8moe.kernels_cuda.runtime.driver").order(before, after, int(device))

    # -------------------------------------------------------- execution

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> RawArray:
        """Allocate an array; on CUDA the caller's framework does."""
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
            if type(part) is ArraySpec:
                part = self.array(part.shape, part.dtype)
            elif isinstance(part, (Record, tuple)) and name not in DESCRIPTIONS:
                part = self.empty(part)
            new.__dict__[name] = part
        return new

    def run(self, topic: str, name: str, *arguments: Any, out: Any, **options: Any) -> None:
        """Have the backend of this call's device fill ``out``. Only here do empty outputs return early."""
        if self.device == NOWHERE:
            return
        function = getattr(load_backend(self.device, topic), name)
        if _is_empty(out):
            return
        for count in counters.counting():
            count(("launches", name))
        self._do(function, *arguments, out=out, **options)

    def _do(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function of the backend: on the CPU in default arithmetic, on CUDA on the stream of the
        caller's framework."""
        if self.device == "cpu":
            run = load_module("fp8moe.reference.numerics").in_default_arithmetic
            return run(function, *arguments, **options)
        stream = self.framework.stream(self.device)
        place = int(self.device), stream, self.framework.scratch, None
        return cuda_launch().run_at(place, function, *arguments, **options)

    def count_overwrite(self, raw: RawArray) -> None:
        """Count that this call overwrites an array that was given to it, or a part of it. To be called before
        it does: an interrupt may come in between."""
        place = place_of(raw)
        if place is None:
            return
        count_overwrite(place)
        for given, array in self._given:
            if isinstance(given, (np.ndarray, DeviceArray)) and given.nbytes:
                start = place_of(given)[1]  # type: ignore[index]
                if start <= place[1] < start + given.nbytes:
                    interop.framework_of(array, "out").overwritten(array)

    def foresee(self, function: Callable[..., Any], *arguments: Any) -> None:
        """The caller is likely to call ``function`` later, with such arguments: see `DryRun.foresee`."""

    def upload(self, host: np.ndarray) -> RawArray:
        """Copy a small host array to the device of this call, on its stream."""
        if self.device == "cpu":
            return host
        raw = self.array(host.shape, host.dtype)
        self._do(cuda_launch().copy_to_device, host, raw)
        return raw

    def values(self, raw: RawArray) -> np.ndarray | None:
        """An array's values on the host, for checks; on CUDA only with FP8MOE_CHECK=1: it synchronises."""
        if isinstance(raw, np.ndarray):
            return raw
        return self.to_host(raw) if self.reads_values else None

    def to_host(self, raw: RawArray) -> np.ndarray:
        """Copy a small array to the host. On CUDA this synchronises with the call's stream."""
        if isinstance(raw, np.ndarray):
            return raw
        host: np.ndarray = self._do(cuda_launch().copy_to_host, raw)
        return host

    # -------------------------------------------------------- results

    def leave(self, out: Any) -> Any:
        """Convert results to arrays of the caller's framework, and raw buffers of arguments back to these
        arguments. Inside another operation everything stays raw: the outermost call converts it."""
        if current.call is self or type(out) in METADATA_TYPES:
            return out
        for raw, given in self._given:
            if raw is out:
                return given
        if isinstance(out, tuple):
            return tuple([self.leave(part) for part in out])
        if isinstance(out, (np.ndarray, DeviceArray)):
            return self.framework.wrap(out)
        if not isinstance(out, Record):
            return out if is_metadata(out) else self.framework.wrap(out)
        new = object.__new__(type(out))
        for name, part in vars(out).items():
            plain = type(part) in METADATA_TYPES or name in DESCRIPTIONS
            new.__dict__[name] = part if plain else self.leave(part)
        return new


# ---------------------------------------------------------------- arrays in arguments and outputs


def replace_arrays(fn: Callable[[str, Any], Any], value: Any, name: str) -> Any:
    """Replace every array of an argument by ``fn(name, array)``. Codes of a float8 dtype become uint8. Raises
    TypeError for a field of a record that holds neither an array nor metadata."""
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
        elif field in DESCRIPTIONS:
            pass  # checked with the record
        elif isinstance(part, (Record, tuple)):
            part = replace_arrays(fn, part, f"{name}.{field}")
        elif interop.framework_of_type(type(part)) is not None:  # type: ignore[arg-type]
            part = fn(f"{name}.{field}", part)
        elif not is_metadata(part):
            raise interop.no_array(part, f"{name}.{field}")
        new.__dict__[field] = part
    return as_codes(new) if isinstance(new, QuantTensor) else new


def as_codes(q: QuantTensor) -> QuantTensor:
    """A raw tensor with codes of dtype uint8."""
    if (
        q.data is None
        or not isinstance(q.fmt, str)
        or getattr(q.data, "dtype", None) != FLOAT8_DTYPES.get(q.fmt)
    ):
        return q
    return replace(q, data=q.data.view(np.dtype(np.uint8)))


def _is_empty(out: Any) -> bool:
    """Whether every array of an output is empty; a `PermutationPlan` in it is an input and does not count."""
    if not isinstance(out, (Record, tuple)):
        return out is None or 0 in out.shape
    for part in out if isinstance(out, tuple) else vars(out).values():
        if isinstance(part, (Record, tuple)):
            if not (is_metadata(part) or isinstance(part, PermutationPlan) or _is_empty(part)):
                return False
        elif part is not None and 0 not in getattr(part, "shape", (0,)):
            return False
    return True


#: calls of `count_overwrite` by device and address; entries are never removed
overwrite_counts: Counter[tuple[Device, int]] = Counter()
_counting = threading.Lock()


def count_overwrite(place: tuple[Device, int]) -> None:
    with _counting:  # += reads, then writes
        overwrite_counts[place] += 1


# ---------------------------------------------------------------- backends, by device


@cache
def load_backend(device: Device, topic: str) -> ModuleType:
    """The module of one topic: ``fp8moe.reference`` on the CPU, ``fp8moe.kernels_cuda`` on CUDA."""
    backend = "fp8moe.reference" if device == "cpu" else "fp8moe.kernels_cuda"
    if backend not in _logged:
        _logged.add(backend)
        _log.info("backend %s, as the first array lies on %s", backend, describe_device(device))
    if device != "cpu":
        require_cupy(f"{topic} on {describe_device(device)}")
    return load_module(f"{backend}.{topic}")


_logged: set[str] = set()


#: returns the module that launches kernels; loaded at the first use, as it imports CuPy
cuda_launch: Callable[[], Any] = partial(load_module, "fp8moe.kernels_cuda.runtime.launch")
