"""Treats records and tuples as trees whose leaves are arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from fp8moe.records import ArraySpec, DeviceArray, Options

#: types of fields that are not arrays
METADATA_TYPES: frozenset[type] = frozenset({int, float, str, bool, type(None)})
#: types of symbolic integers of a compiler, added by its adapter (`fp8moe.adapters.torch.library`)
SYMBOLIC_TYPES: set[type] = set()


def is_metadata(value: Any) -> bool:
    """Whether a field is not an array: None, a number, a name, a block."""
    if type(value) in METADATA_TYPES or type(value) in SYMBOLIC_TYPES:
        return True
    if isinstance(value, tuple):
        return METADATA_TYPES.issuperset(map(type, value)) or all(map(is_metadata, value))
    return isinstance(value, (str, int, float, Options))  # subclasses, such as numpy.float64


_field_names: dict[type, tuple[str, ...] | None] = {ArraySpec: None, DeviceArray: None}


def field_names(kind: type) -> tuple[str, ...] | None:
    """Field names of a record type; None for any other type."""
    try:
        return _field_names[kind]
    except KeyError:
        names = tuple(f.name for f in fields(kind)) if is_dataclass(kind) else None
        return _field_names.setdefault(kind, names)


_METADATA, _TUPLE, _ARRAY = "metadata", "tuple", "array"
_forms: dict[type, Any] = {**dict.fromkeys(METADATA_TYPES, _METADATA), tuple: _TUPLE, list: _ARRAY}


def prepare(*kinds: type) -> None:
    """Determines how values of these types are traversed, which is otherwise done at first use: a compiler
    that traces the first use inside of a checkpointed function refuses to keep what it found."""
    for kind in kinds:
        _form(kind)


def _form(kind: type) -> Any:
    """How values of a type are traversed: the field names of a record, or one of the three above."""
    names = field_names(kind)
    if kind in METADATA_TYPES or kind in SYMBOLIC_TYPES or issubclass(kind, (str, int, float, Options)):
        form: Any = _METADATA
    elif issubclass(kind, tuple):
        form = _TUPLE
    else:
        form = _ARRAY if names is None else names
    return _forms.setdefault(kind, form)


def map_arrays(fn: Callable[[Any], Any], value: Any) -> Any:
    """Replace every array in a record, tuple or plain value by ``fn(array)``."""
    kind = type(value)
    form = _forms.get(kind) or _form(kind)
    if form is _METADATA:
        return value
    if form is _ARRAY:
        return fn(value)
    if form is _TUPLE:
        return value if is_metadata(value) else tuple([map_arrays(fn, part) for part in value])
    new = object.__new__(kind)
    for field in form:
        part = getattr(value, field)
        if type(part) not in METADATA_TYPES:  # most are, and a call for each takes longer than the rest
            part = fn(part) if _forms.get(type(part)) is _ARRAY else map_arrays(fn, part)
        new.__dict__[field] = part
    return new


def arrays_in(value: Any) -> list[Any]:
    """Every array in a record, tuple or plain value."""
    arrays: list[Any] = []
    _collect(value, arrays)
    return arrays


def _collect(value: Any, arrays: list[Any]) -> None:
    kind = type(value)
    form = _forms.get(kind) or _form(kind)
    if form is _METADATA:
        return
    if form is _ARRAY:
        arrays.append(value)
    else:
        for part in value if form is _TUPLE else [getattr(value, field) for field in form]:
            if type(part) in METADATA_TYPES:  # as in `map_arrays`
                continue
            if _forms.get(type(part)) is _ARRAY:
                arrays.append(part)
            else:
                _collect(part, arrays)


def nbytes(*values: Any) -> int:
    """Bytes of all arrays in the given records; an array that appears twice is counted once."""
    unique = {id(a): a for value in values for a in arrays_in(value)}
    return sum(a.nbytes for a in unique.values())
