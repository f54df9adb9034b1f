"""Dispatch of operations: `operation` makes a public function of one that is written for raw buffers.

On the CPU the operation is called with NumPy arrays. On CUDA the first call with given shapes records what
the operation allocates and launches (`fp8moe.runtime.recording`), and later calls replay it. An operation
that calls others is one call (`fp8moe.runtime.call`): only the outermost converts arrays. Where it has
checked their arguments it calls their inner functions: `raw_NAME` allocates for the operation NAME, and runs
it, on raw buffers within a call, without checks.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from fp8moe.records import (
    ArraySpec,
    DeviceArray,
    Options,
    PermutationPlan,
    Quantized,
    QuantTensor,
    Record,
)
from fp8moe.runtime import checks, interop
from fp8moe.runtime.call import NOWHERE, Call, NotRecordable, current
from fp8moe.runtime.interop.base import Description
from fp8moe.runtime.record_trees import METADATA_TYPES, arrays_in, is_metadata, map_arrays
from fp8moe.runtime.recording import Layout, Recording, record

__all__ = [
    "NOWHERE",
    "Call",
    "cached_recordings",
    "clear_recordings",
    "current",
    "enter",
    "known",
    "operation",
    "remember",
]

Function = TypeVar("Function", bound=Callable[..., Any])

#: by the function, all plain arguments, and shape, dtype and alignment of every array; None where what is
#: launched depends on values
_recordings: dict[Any, Recording | None] = {}
_adding = threading.Lock()
RECORDINGS_KEPT = 512  # the oldest is dropped


def cached_recordings() -> list[tuple[str, Recording | None]]:
    """The operations of all cached calls, the oldest first, each with its recording, or None where what is
    launched depends on values, so that every call is made anew."""
    return [(identity[0].__name__, recording) for identity, recording in list(_recordings.items())]


def clear_recordings() -> None:
    _recordings.clear()
    _known.clear()


#: what callers remember of calls that they have checked, by key; it may have their recordings
_known: dict[Any, Any] = {}
known = _known.get


def remember(key: Any, value: Any) -> None:
    _add(_known, key, value)


def _add(table: dict[Any, Any], key: Any, value: Any) -> None:
    with _adding:
        if len(table) >= RECORDINGS_KEPT:
            table.pop(next(iter(table)))
        table[key] = value


_UNKNOWN: Any = object()
#: an array in a key: shapes and dtypes of all arrays come at the end
_ARRAY: Any = object()
#: what a value adds to a key, by its type: itself, itself with its type, `_ARRAY`, or its parts
_PLAIN, _TYPED, _TUPLE, _RECORD = "plain", "typed", "tuple", "record"
#: types whose values are told apart by equality alone: True, 1 and 1.0 are equal, but not interchangeable
PLAIN = METADATA_TYPES - {bool, float}
_forms: dict[type, Any] = {bool: _TYPED, float: _TYPED, tuple: _TUPLE, **dict.fromkeys(PLAIN, _PLAIN)}


def _form_of(kind: type) -> Any:
    """What values of a type add to a key; None where that depends on the value."""
    form = None
    if interop.framework_of_type(kind) is not None:  # type: ignore[arg-type]
        form = _ARRAY
    elif issubclass(kind, Record):
        form = _RECORD
    elif issubclass(kind, (np.generic, Options)):
        form = _TYPED
    return None if form is None else _forms.setdefault(kind, form)


def operation(function: Function) -> Function:
    """Make a public function of one that is written for raw buffers (see `enter`)."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if current.call is not None:
            return function(*arguments, **options)
        given = (*arguments, *options.values())
        if (given and type(given[0]) is np.ndarray) or checks.reads_values():
            return _run_now(function, names, arguments, options)
        key: list[Any] = [function, len(arguments), *options]
        arrays: list[Any] = []
        remaining = [iter(given)]
        while remaining:  # records and tuples are replaced by their parts
            for value in remaining[-1]:
                kind = type(value)
                form = _forms.get(kind) or _form_of(kind)
                if form is _PLAIN:
                    key.append(value)
                elif form is _ARRAY:
                    key.append(_ARRAY)
                    arrays.append(value)
                elif form is _RECORD:
                    key.append(kind)
                    remaining.append(iter(vars(value).values()))
                    break
                elif form is _TUPLE and not PLAIN.issuperset(map(type, value)):
                    key.append((tuple, len(value)))  # otherwise (1,), 7 and 1, (7,) would be the same
                    remaining.append(iter(value))
                    break
                elif form is not None or is_metadata(value):
                    key.append((kind, value))
                else:
                    return _run_now(function, names, arguments, options)
            else:
                remaining.pop()
        framework = interop.framework_of_type(type(arrays[0])) if arrays else None  # type: ignore[arg-type]
        description = None if framework is None else framework.describe(arrays)
        if framework is None or description is None:
            return _run_now(function, names, arguments, options)
        device, addresses, described = description
        identity = (*key, framework, device, *described)
        try:
            recording = _recordings.get(identity, _UNKNOWN)
        except TypeError:  # an argument is not hashable
            return _run_now(function, names, arguments, options)
        if recording is _UNKNOWN:
            call_of = function, names, arguments, options
            recording = _recorded(identity, *call_of, framework, device, described)
        if recording is None or (recording.pairs and not recording.fits(addresses)):
            return _run_now(function, names, arguments, options)
        return recording.run(addresses, arrays, given)

    return call  # type: ignore[return-value]


def _recorded(identity: Any, *call: Any) -> Recording | None:
    """A new recording, from arguments of `record`."""
    try:
        recording = record(*call)
    except NotRecordable:
        recording = None
    _add(_recordings, identity, recording)
    return recording


class Fixed:
    """An operation of arrays alone, for calls that are made again and again with the same other arguments:
    nothing else is looked at, and no records are made.

    function: is called with the raw arrays that it reads, and with those that it writes to; returns a tuple
    of results, arrays or None, and a record of arrays that are kept together. names: of the former arrays.
    """

    def __init__(self, name: str, function: Callable[..., tuple[tuple[Any, ...], Any]], names: Sequence[str]):
        self.__name__, self._function, self._names = name, function, names
        self._layouts: dict[Any, Layout] = {}

    def recording(
        self, framework: Any, description: Description, arrays: list[Any], out: tuple[Any, ...]
    ) -> Recording | None:
        """description: of the arrays, and of those that are written to."""
        device, _, described = description
        identity = self, framework, device, len(out), *described
        recording = _recordings.get(identity, _UNKNOWN)
        if recording is _UNKNOWN:
            call: Any = self._function, ("arrays", "out"), (tuple(arrays), out), {}
            recording = _recorded(identity, *call, framework, device, described, True)
        return recording

    def __call__(self, arrays: list[Any], out: tuple[Any, ...] = ()) -> tuple[list[Any], list[Any], Layout]:
        """The results; the arrays that hold what is kept, and where it is in them."""
        given = [*arrays, *out]
        framework = interop.framework_of_type(type(arrays[0]))  # type: ignore[arg-type]
        description = None if checks.reads_values() else framework.describe(given)  # type: ignore[union-attr]
        if description is not None:
            recording = self.recording(framework, description, arrays, out)
            if recording is not None and recording.fits(description[1]):
                return recording.replay(description[1], given)
        call = Call()
        raw = [call.take(name, a) for name, a in zip(self._names, arrays, strict=False)]
        results, kept = call.perform(self._function, raw, tuple([call.take("out", a) for a in out]))
        leaves, key = arrays_in(kept), tuple([(tuple(a.shape), a.dtype) for a in raw])
        if (layout := self._layouts.get(key)) is None:
            like = map_arrays(lambda a: ArraySpec(tuple(a.shape), a.dtype), kept)
            layout = Layout(like, tuple([(i, 0) for i in range(len(leaves))]))
            _add(self._layouts, key, layout)
        return [call.leave(a) for a in results], [call.leave(a) for a in leaves], layout


def _run_now(function: Any, names: list[str], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call the function on raw buffers of its arrays, without a recording."""
    call = Call()
    given = zip(_names_of(names, len(arguments)), arguments, strict=True)
    raw = [call.take(name, value) for name, value in given]
    named = {name: call.take(name, value) for name, value in options.items()}
    return call.leave(call.perform(function, *raw, **named))


def _names_of(names: list[str], count: int) -> list[str]:
    """Names of ``count`` positional arguments, including those that a ``*name`` takes."""
    return [*names, *(f"{names[-1]}[{i}]" for i in range(count - len(names)))][:count]


def enter(**values: Any) -> Call:
    """The call that an operation is part of, with these values as raw buffers in its ``args``.

    Outside an operation this is a new call, whose results `Call.leave` converts.

    Raises TypeError for an argument that is no array or lies on another device than the first, ValueError for
    an array that is not C-contiguous, or for a read-only ``out``.
    """
    first, *_ = values
    if values[first] is None:
        raise TypeError(f"{first}: got None; wanted an array")
    call = current.call
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
