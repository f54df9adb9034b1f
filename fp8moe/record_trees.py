"""Treats records and tuples as trees whose leaves are arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from fp8moe.records import ArraySpec, DeviceArray, Options

#: types of fields that are not arrays
METADATA_TYPES = frozenset({int, float, str, bool, type(None)})
#: types of symbolic integers of a compiler, added by its adapter (`fp8moe.adapters.torch_library`)
SYMBOLIC_TYPES: set[type] = set()


def is_metadata(value: Any) -> bool:
    """Whether a field is not an array: None, a number, a name, a block."""
    if type(value) in METADATA_TYPES or type(value) in SYMBOLIC_TYPES:
        return True
    if isinstance(value, tuple):
        return all(map(is_metadata, value))
    return isinstance(value, (str, int, float, Options))  # subclasses, such as numpy.float64


_field_names: dict[type, tuple[str, ...] | None] = {ArraySpec: None, DeviceArray: None}


def field_names(kind: type) -> tuple[str, ...] | None:
    """Field names of a record type; None for any other type."""
    try:
        return _field_names[kind]
    except KeyError:
        names = tuple(f.name for f in fields(kind)) if is_dataclass(kind) else None
        return _field_names.setdefault(kind, names)


def map_arrays(fn: Callable[[str, Any], Any], value: Any, name: str = "") -> Any:
    """Replace every array in a record, tuple or plain value by ``fn(name, array)``."""
    if is_metadata(value):
        return value
    if isinstance(value, tuple):
        return tuple(map_arrays(fn, v, f"{name}[{i}]") for i, v in enumerate(value))
    names = field_names(type(value))
    if names is None:
        return fn(name, value)
    prefix = f"{name}." if name else ""
    new = object.__new__(type(value))
    for field in names:
        new.__dict__[field] = map_arrays(fn, getattr(value, field), prefix + field)
    return new


def arrays_in(value: Any) -> list[Any]:
    """Every array in a record, tuple or plain value."""
    arrays: list[Any] = []
    map_arrays(lambda _, a: arrays.append(a), value)
    return arrays


def nbytes(*values: Any) -> int:
    """Bytes of all arrays in the given records; an array that appears twice is counted once."""
    unique = {id(a): a for value in values for a in arrays_in(value)}
    return sum(a.nbytes for a in unique.values())
