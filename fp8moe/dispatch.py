"""The only way into an operation and out: arrays of any framework come in as raw buffers, the backend of
their device computes, results leave as the caller's kind.

`operation` makes a public function of an operation. On the CPU it calls it with NumPy arrays. On CUDA it
finds out once, for given shapes, what is allocated and launched (`fp8moe.launch_plan`), and does that. An
operation that calls others is one call: only the outermost looks at arrays.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from fp8moe import checks, counters, interop
from fp8moe.formats import FLOAT8_DTYPES
from fp8moe.interop import NUMPY, Device, Framework, RawArray, describe_device, load_module, require_cupy
from fp8moe.launch_plan import PLANS_KEPT, LaunchPlan, Log, NotPlannable
from fp8moe.record_trees import METADATA_TYPES, field_names, is_metadata
from fp8moe.records import ArraySpec, DeviceArray, PermutationPlan, Quantized, QuantTensor, Record

NOWHERE = -1  # the device of arrays that are shapes only: nothing is computed there
WRITTEN = ("out", "dw13", "dw2")  # arguments that an operation writes to
Function = TypeVar("Function", bound=Callable[..., Any])


class _State(threading.local):
    call: Call | None = None  # of the outermost operation that runs in this thread


_state = _State()
#: by function and what came in: how to do the call, or None where only the call itself can
_plans: dict[Any, LaunchPlan | None] = {}
_adding = threading.Lock()


def cached_plans() -> list[tuple[str, LaunchPlan | None]]:
    """The operations whose calls are cached, the oldest first, each with its launch plan, or None where every
    call is done anew because what it launches depends on values."""
    return [(identity[0].__name__, plan) for identity, plan in list(_plans.items())]


def clear_cached_plans() -> None:
    _plans.clear()


def operation(function: Function) -> Function:
    """A public function, of one that is written for raw buffers (see `enter`)."""
    signature = inspect.signature(function)
    names = list(signature.parameters)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if _state.call is not None:
            return function(*arguments, **options)
        given = (*arguments, *options.values())
        if checks.LOOK_AT_VALUES or (given and type(given[0]) is np.ndarray):
            return _run_now(function, names, arguments, options)
        key: list[Any] = [function, len(arguments), *options]
        arrays: list[Any] = []
        for value in given:
            kind = type(value)
            if kind in PLAIN:
                key.append(value)
            elif kind is bool or kind is float:  # True, 1 and 1.0 are equal, and not all welcome everywhere
                key.append((kind, value))
            elif interop.framework_of_type(kind) is not None:  # type: ignore[arg-type]
                key.append(_ARRAY)
                arrays.append(value)
            elif not _flatten(value, key, arrays):
                return _run_now(function, names, arguments, options)
        framework = interop.framework_of_type(type(arrays[0])) if arrays else None  # type: ignore[arg-type]
        description = None if framework is None else framework.describe(arrays)
        if framework is None or description is None:
            return _run_now(function, names, arguments, options)
        device, addresses, described = description
        key += (framework, device, *described)
        identity = tuple(key)
        try:
            plan = _plans.get(identity, _UNKNOWN)
        except TypeError:  # something has no hash
            return _run_now(function, names, arguments, options)
        if plan is _UNKNOWN:
            plan = _make_plan(function, names, arguments, options, framework, device, described)
            with _adding:
                if len(_plans) >= PLANS_KEPT:
                    _plans.pop(next(iter(_plans)))  # the oldest
                _plans[identity] = plan
        if plan is None or (plan.written and not plan.fits(addresses)):
            return _run_now(function, names, arguments, options)
        return plan.run(given, arrays, addresses)

    return call  # type: ignore[return-value]


#: types of arguments that are told apart by their values alone
PLAIN = METADATA_TYPES - {bool, float}
_UNKNOWN: Any = object()
_ARRAY: Any = object()  # in a key: their shapes and dtypes come after all values


def _flatten(value: Any, key: list[Any], arrays: list[Any]) -> bool:
    """Add what a record, a tuple or an option is to the key, and its arrays, in the order of `map_arrays`;
    False where it holds what is none of them."""
    kind = type(value)
    if kind is tuple:
        key.append((tuple, len(value)))  # or (1,), 7 and 1, (7,) would be the same
        parts: Any = value
    elif isinstance(value, Record):
        key.append(kind)
        fields: Any = kind.__dataclass_fields__  # type: ignore[attr-defined]
        parts = [getattr(value, name) for name in fields]
    else:
        key.append((kind, value))
        return True
    for part in parts:
        of = type(part)
        if of in PLAIN:
            key.append(part)
        elif of is bool or of is float:
            key.append((of, part))
        elif interop.framework_of_type(of) is not None:  # type: ignore[arg-type]
            key.append(_ARRAY)
            arrays.append(part)
        elif not (of is tuple or is_metadata(part) or isinstance(part, Record)) or not _flatten(
            part, key, arrays
        ):
            return False
    return True


def _make_plan(
    function: Any,
    names: list[str],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    framework: Framework,
    device: int,
    described: Sequence[tuple[tuple[int, ...], np.dtype, int]],
) -> LaunchPlan | None:
    log = Log(described, device)
    given, raw = (*arguments, *options.values()), []
    written: list[int] = []
    remaining = log.inputs[::-1]
    for name, value in zip((*_names_of(names, len(arguments)), *options), given, strict=True):
        first = len(log.inputs) - len(remaining)
        raw.append(map_raw(lambda _, a: remaining.pop(), value))
        if name in WRITTEN:
            written += range(first, len(log.inputs) - len(remaining))
    if written and not framework.always_writable:
        return None
    call = DryRun(log, framework)
    with counters.TraceOnly() as counts, Running(call):
        try:
            result = function(
                *raw[: len(arguments)],
                **dict(zip(options, raw[len(arguments) :], strict=True)),
            )
            return LaunchPlan(log, result, raw, written, counts, framework)
        except NotPlannable:
            return None


def _run_now(function: Any, names: list[str], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The call itself, on raw buffers of its arrays."""
    call = Call()
    named = [*zip(_names_of(names, len(arguments)), arguments, strict=True), *options.items()]
    raw = [call.take(name, value) for name, value in named]
    with Running(call):
        result = function(
            *raw[: len(arguments)],
            **dict(zip(options, raw[len(arguments) :], strict=True)),
        )
    return call.leave(result)


def _names_of(names: list[str], count: int) -> list[str]:
    """Of positional arguments, also of those that a ``*name`` takes."""
    if count <= len(names):
        return names[:count]
    return names + [f"{names[-1]}[{i}]" for i in range(count - len(names))]


class Running:
    """Inside this context operations are part of ``call``: they take and return raw buffers."""

    def __init__(self, call: Call):
        self._call = call

    def __enter__(self) -> None:
        self._before, _state.call = _state.call, self._call

    def __exit__(self, *_: object) -> None:
        _state.call = self._before


def enter(**values: Any) -> Call:
    """The call that an operation is part of; its ``args`` are these values, as raw buffers.

    Outside of an operation, a call of its own, whose results `Call.leave` hands back.

    Raises TypeError for what is not an array or lies on another device than the first, ValueError for
    an array that is not C-contiguous, or for ``out``, which is written to, that is read-only.
    """
    first, *_ = values
    if values[first] is None:
        raise TypeError(f"{first}: got None; wanted an array")
    call = _state.call
    if call is None:
        call = Call()
        values = {name: call.take(name, value) for name, value in values.items()}
    for name, value in values.items():
        if type(value) not in _ARRAYS:
            _require_arrays(name, value)
    call.args = SimpleNamespace(**values)
    return call


_ARRAYS = frozenset({type(None), DeviceArray, np.ndarray, QuantTensor, Quantized, PermutationPlan})


def _require_arrays(name: str, value: Any) -> None:
    if isinstance(value, tuple(_ARRAYS)):
        return
    if isinstance(value, tuple) and not (value and is_metadata(value)):
        for i, part in enumerate(value):
            _require_arrays(f"{name}[{i}]", part)
        return
    raise interop.no_array(value, name)


class Call:
    """One call: ``args`` are raw, `empty` allocates, `run` computes, `leave` returns."""

    args: SimpleNamespace

    def __init__(self) -> None:
        self.device: Device = "cpu"
        self.framework: Framework = NUMPY
        self._first: str | None = None
        self._given: list[tuple[Any, Any]] = []  # raw buffers and records, and what they were

    # -------------------------------------------------------- in

    def take(self, name: str, value: Any) -> Any:
        """The raw form of an argument; what holds no arrays stays as it is."""
        if not _may_hold_arrays(value):
            return value
        raw = map_raw(self._take_array, value, name)
        if name in WRITTEN:
            map_raw(_require_writable, value, name)
        self._given.append((raw, value))
        return raw

    def _take_array(self, name: str, array: Any) -> RawArray:
        framework = interop.framework_of(array, name)
        raw = framework.view(array, name)
        if isinstance(raw, np.ndarray):
            self._locate(name, "cpu", framework.beside(array) if self._first is None else framework)
        else:
            self._locate(name, raw.device, framework)
        self._given.append((raw, array))
        return raw

    def _locate(self, name: str, device: Device, framework: Framework) -> None:
        """The first array says where all lie."""
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
                order(before, after, int(device))

    # -------------------------------------------------------- inside

    def empty(self, spec: Any) -> Any:
        """Allocate every `ArraySpec` in a record of them, by the caller's framework on CUDA."""
        if type(spec) is ArraySpec:
            return self._allocate(spec)
        names = field_names(type(spec))
        if names is None:
            return tuple(self.empty(s) for s in spec) if isinstance(spec, tuple) else spec
        new = object.__new__(type(spec))
        for name in names:
            value = getattr(spec, name)
            if type(value) is ArraySpec:
                value = self._allocate(value)
            elif type(value) not in METADATA_TYPES and not is_metadata(value):
                value = self.empty(value)
            new.__dict__[name] = value
        return new

    def _allocate(self, spec: ArraySpec) -> RawArray:
        return self.framework.empty(spec, self.device)

    def run(self, room: str, verb: str, *args: Any, out: Any, **options: Any) -> None:
        """Have the backend of this device fill ``out``. Empty outputs return here, and only here."""
        if self.device == NOWHERE:
            return
        backend = load_backend(self.device, room)
        if _is_empty(out):
            return
        counters.record_launch(verb)
        with self._on_device():
            getattr(backend, verb)(*args, out=out, **options)

    def _on_device(self) -> Any:
        """What is launched in this context runs on the stream that the caller's arrays are ordered on."""
        if self.device == "cpu":
            return load_module("fp8moe.reference.numerics").DefaultArithmetic()
        stream = self.framework.stream(self.device)
        return launching_on(int(self.device), stream, self.framework.scratch)

    def upload(self, host: np.ndarray) -> RawArray:
        """Bring a small host array to the device of this call, on its stream."""
        if self.device == "cpu":
            return host
        raw = self._allocate(ArraySpec(host.shape, host.dtype))
        with self._on_device() as launching:
            launching.copy_to_device(host, raw)
        return raw

    def values(self, raw: RawArray) -> np.ndarray | None:
        """What an array holds, for checks: on the CPU; on CUDA with FP8MOE_CHECK=1, as it synchronises."""
        if isinstance(raw, np.ndarray):
            return raw
        return self.to_host(raw) if checks.LOOK_AT_VALUES else None

    def to_host(self, raw: RawArray) -> np.ndarray:
        """Bring a small array to the host. On CUDA this synchronises with the call's stream."""
        if isinstance(raw, np.ndarray):
            return raw
        with self._on_device() as launching:
            return launching.copy_to_host(raw)

    # -------------------------------------------------------- out

    def leave(self, out: Any) -> Any:
        """Raw buffers back to the caller's kind of array, those that came in to what they were. Inside of an
        operation, which its outermost call leaves, nothing changes."""
        if _state.call is self or is_metadata(out):
            return out
        for raw, given in self._given:
            if raw is out:
                return given
        if isinstance(out, tuple):
            return tuple(self.leave(v) for v in out)
        names = field_names(type(out))
        if type(out) is DeviceArray or names is None:
            return self.framework.wrap(out)
        new = object.__new__(type(out))
        for name in names:
            new.__dict__[name] = self.leave(getattr(out, name))
        return new


class DryRun(Call):
    """A call on descriptors, which logs what would be allocated and launched."""

    def __init__(self, log: Log, framework: Framework):
        super().__init__()
        self.log, self.device, self.framework = log, log.device, framework
        self.uploads = False  # whether the call brings something from the host

    def _allocate(self, spec: ArraySpec) -> RawArray:
        return self.log.allocate(spec, scratch=False)

    def _scratch(self, spec: ArraySpec, device: int) -> RawArray:
        return self.log.allocate(spec, scratch=True)

    def _on_device(self) -> Any:
        return launching_on(int(self.device), 0, self._scratch, self.log)

    def upload(self, host: np.ndarray) -> RawArray:
        self.uploads = True
        if self.device != NOWHERE:
            raise NotPlannable
        return self._allocate(ArraySpec(host.shape, host.dtype))

    def values(self, raw: RawArray) -> np.ndarray | None:
        return None

    def to_host(self, raw: RawArray) -> np.ndarray:
        if self.device != NOWHERE:
            raise NotPlannable
        raise TypeError("this call looks at values, which are not known yet; pass num_out_tokens as a number")


def _may_hold_arrays(value: Any) -> bool:
    """Whether an argument is an array, or a record or a tuple of them."""
    if isinstance(value, (Record, tuple)):
        return not is_metadata(value)
    return interop.framework_of_type(type(value)) is not None  # type: ignore[arg-type]


def map_raw(fn: Callable[[str, Any], Any], value: Any, name: str = "") -> Any:
    """`map_arrays` of an argument; FP8 codes are bytes inside the library, whatever dtype they came as."""
    if isinstance(value, tuple):
        if is_metadata(value):
            return value
        return tuple([map_raw(fn, v, f"{name}[{i}]") for i, v in enumerate(value)])
    if not isinstance(value, Record):
        return value if interop.framework_of_type(type(value)) is None else fn(name, value)  # type: ignore[arg-type]
    prefix = f"{name}." if name else ""
    new = object.__new__(type(value))
    for field in field_names(type(value)) or ():
        part = getattr(value, field)
        if isinstance(part, (Record, tuple)):
            part = map_raw(fn, part, prefix + field)
        elif type(part) not in METADATA_TYPES and not is_metadata(part):
            part = fn(prefix + field, part)
        new.__dict__[field] = part
    return _as_codes(new) if isinstance(new, QuantTensor) else new


def _as_codes(q: QuantTensor) -> QuantTensor:
    if q.data is None or getattr(q.data, "dtype", None) != FLOAT8_DTYPES.get(q.fmt):
        return q
    return replace(q, data=q.data.view(np.dtype(np.uint8)))


def _require_writable(name: str, x: Any) -> None:
    if interop.framework_of(x, name).is_read_only(x):
        raise ValueError(
            f"{name}: got {type(x).__module__}.{type(x).__qualname__}, which is read-only; wanted memory to "
            "write to, or None for new memory"
        )


def _is_empty(out: Any) -> bool:
    """Whether no array of a record has an element."""
    if isinstance(out, (DeviceArray, np.ndarray)):
        return 0 in out.shape
    names = field_names(type(out))
    parts = out if isinstance(out, tuple) else [getattr(out, name) for name in names or ()]
    return all(map(_is_empty, parts))


def place_of(raw: RawArray) -> tuple[Device, int] | None:
    """Device and address of a raw array; None while only shapes are known."""
    if isinstance(raw, np.ndarray):
        return "cpu", raw.__array_interface__["data"][0]
    return None if raw.device == NOWHERE else (raw.device, raw.ptr)


# ---------------------------------------------------------------- backends, by device


@cache
def load_backend(device: Device, room: str) -> ModuleType:
    """The module of one topic: ``fp8moe.reference`` on the CPU, ``fp8moe.kernels_cuda`` on CUDA."""
    if device == "cpu":
        return load_module(f"fp8moe.reference.{room}")
    require_cupy(f"{room} on {describe_device(device)}")
    return load_module(f"fp8moe.kernels_cuda.{room}")


def launching_on(device: int, stream: int, scratch: Any, log: Log | None = None) -> Any:
    """A context whose launches go to one stream, and whose scratch memory comes from ``scratch``; with a log,
    nothing is launched."""
    return load_module("fp8moe.kernels_cuda.launch").On(device, stream, scratch, log)


def order(before: int, after: int, device: int) -> None:
    """Have one stream of a device wait for what is on another one now; the host waits for nothing."""
    load_module("fp8moe.kernels_cuda.driver").order(before, after, device)


def while_capturing() -> Any:
    """A context in which kernels may be loaded and memory allocated whatever stream is captured."""
    return load_module("fp8moe.kernels_cuda.driver").while_capturing()
