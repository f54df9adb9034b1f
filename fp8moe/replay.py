"""What a call on CUDA did, to be done again on other arrays of the same shapes: without its checks, shapes
and launchers, which take the host longer than the launches themselves (`border.replayed` decides when).

A recipe names memory by (buffer, offset). Buffers are the arrays that came in, in the order of `signature`,
then those that the call allocated. It holds no memory.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from fp8moe.records import METADATA_TYPES, DeviceArray, field_names, is_metadata

Place = tuple[int, int]  # buffer, offset in bytes
# function, arguments before its values, values, and (which value, buffer, offset) of those that are addresses
Step = tuple[Callable[..., None], tuple[Any, ...], list[Any], list[tuple[int, int, int]]]


def play(steps: list[Step], addresses: list[int]) -> None:
    """Launch what a `Recorder` noted, on other memory."""
    for function, before, recorded, places in steps:
        values = recorded.copy()  # other threads replay it, too
        for at, buffer, offset in places:
            values[at] = addresses[buffer] + offset
        function(*before, values)


class LooksAtValues(Exception):
    """A call that was only to be noted reads or writes memory from the host."""


class Recorder:
    """Notes what one call allocates, launches and returns; ``dry``: and nothing is launched."""

    dry = False

    def __init__(self, buffers: list[tuple[int, int]]):
        """buffers: address and size of what came in."""
        self.kept: list[DeviceArray] = []  # what was freed meanwhile would lend its address to another
        self.buffers = buffers
        self.allocations: list[tuple[Any, bool]] = []  # spec, whether it is scratch
        # function, arguments before its values, values, which of the values are addresses
        self.steps: list[tuple[Callable[..., None], tuple[Any, ...], list[Any], list[int]]] = []
        self.traced: list[tuple[Callable[..., None], Any]] = []
        self.left: list[tuple[Any, Any]] = []  # what the caller gets, and its raw form
        self.whole = True  # False: it did something that cannot be done again so

    def allocated(self, spec: Any, scratch: bool, raw: DeviceArray) -> None:
        self.kept.append(raw)
        self.allocations.append((spec, scratch))
        self.buffers.append((raw.ptr, raw.nbytes))

    def looked_at_values(self) -> None:
        self.whole = False
        if self.dry:
            raise LooksAtValues

    def place(self, address: int) -> Place | None:
        """Where an address lies, if it is one."""
        for i, (ptr, nbytes) in enumerate(self.buffers):
            if nbytes and ptr <= address < ptr + nbytes:
                return i, address - ptr
        return None

    def launches(self) -> list[Step] | None:
        """What was launched, for `play`; None if it cannot be done again on other arrays."""
        spans = sorted(b for b in self.buffers if b[1])
        apart = all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
        if not self.whole or not apart:  # arrays that overlap: an address has no one place
            return None
        steps = []
        for function, before, values, addresses in self.steps:
            places = []
            for at in addresses:
                found = self.place(values[at])
                if found is None:  # an empty array, or memory from elsewhere
                    return None
                places.append((at, *found))
            steps.append((function, before, values, places))
        return steps

    def recipe(self, result: Any, arguments: tuple[Any, ...]) -> Recipe | None:
        steps = self.launches()
        try:
            if steps is not None:
                return Recipe(self.allocations, steps, self.traced, self._template(result, arguments))
        except LookupError:
            pass
        return None

    def _template(self, value: Any, arguments: tuple[Any, ...]) -> Template:
        if is_metadata(value):
            return lambda call, arguments, memory: value
        for i, argument in enumerate(arguments):
            if value is argument:
                return lambda call, arguments, memory: arguments[i]
        for ours, raw in self.left:
            if value is ours:
                return self._left(raw)
        if isinstance(value, tuple):
            parts = [self._template(v, arguments) for v in value]
            return lambda call, arguments, memory: tuple(p(call, arguments, memory) for p in parts)
        names = field_names(type(value))
        if names is None:
            raise LookupError
        kind, fields = type(value), [(n, self._template(getattr(value, n), arguments)) for n in names]

        def record(call: Any, arguments: tuple[Any, ...], memory: list[DeviceArray]) -> Any:
            new = object.__new__(kind)
            for name, make in fields:
                new.__dict__[name] = make(call, arguments, memory)
            return new

        return record

    def _left(self, raw: Any) -> Template:
        """What `border.Call.leave` makes of a raw result."""
        if is_metadata(raw):
            return lambda call, arguments, memory: raw
        if isinstance(raw, tuple):
            parts = [self._left(v) for v in raw]
            return lambda call, arguments, memory: tuple(p(call, arguments, memory) for p in parts)
        if type(raw) is DeviceArray:
            (_, buffer, offset, shape, dtype) = self._found("", raw)

            def array(call: Any, arguments: tuple[Any, ...], memory: list[DeviceArray]) -> Any:
                whole = memory[buffer]
                return call.family.wrap(
                    DeviceArray(whole.ptr + offset, shape, dtype, whole.device, whole.owner, offset)
                )

            return array
        kind, values = type(raw), [(n, getattr(raw, n)) for n in field_names(type(raw)) or ()]
        plain = {n: v for n, v in values if is_metadata(v)}
        arrays = [self._found(n, v) for n, v in values if type(v) is DeviceArray]
        nested = [(n, self._left(v)) for n, v in values if n not in plain and type(v) is not DeviceArray]
        known = None if nested else signature(raw, [])
        names = tuple(n for n, v in values if n not in plain)

        def record(call: Any, arguments: tuple[Any, ...], memory: list[DeviceArray]) -> Any:
            inner, outer = object.__new__(kind), object.__new__(kind)
            fields = inner.__dict__
            fields.update(plain)
            for name, buffer, offset, shape, dtype in arrays:
                whole = memory[buffer]
                at = whole.ptr + offset
                fields[name] = DeviceArray(at, shape, dtype, whole.device, whole.owner, offset)
            outer.__dict__.update(plain)
            for name, make in nested:
                outer.__dict__[name] = part = make(call, arguments, memory)
                fields[name] = part.__dict__["_raw"][0]
            if known is not None:
                fields["_signature"] = known, [fields[name] for name, *_ in arrays]
            fields["_fits"] = True
            outer.__dict__["_raw"] = (inner, call.device, call.family, names)
            return outer

        return record

    def _found(self, name: str, raw: DeviceArray) -> tuple[str, int, int, tuple[int, ...], Any]:
        place = self.place(raw.ptr) if raw.size else None
        if place is None:  # an empty array has no place of its own
            raise LookupError
        return name, *place, raw.shape, raw.dtype


Template = Callable[[Any, tuple[Any, ...], list[DeviceArray]], Any]


class Recipe:
    """How to do a call again."""

    def __init__(self, allocations: Any, steps: Any, traced: Any, result: Template):
        self.allocations, self.steps, self.traced, self.result = allocations, steps, traced, result
        self.written = range(0)  # which of the arrays that come in are written to
        self.sizes: list[int] = []  # of all of them, in bytes

    def apart(self, memory: list[DeviceArray]) -> bool:
        """Whether what is written to overlaps nothing else that came in."""
        for i in self.written:
            start = memory[i].ptr
            end = start + self.sizes[i]
            for j, other in enumerate(memory):
                if i != j and other.ptr < end and start < other.ptr + self.sizes[j]:
                    return False
        return True


def signature(value: Any, memory: list[DeviceArray]) -> Any:
    """What decides how a raw argument is treated: shapes, dtypes, alignment and metadata. Its arrays are
    added to ``memory``, in a fixed order."""
    kind = type(value)
    if kind is DeviceArray:
        memory.append(value)
        return value.shape, value.dtype, value.ptr & 15
    if kind in PLAIN:
        return value
    if kind is tuple:
        return tuple([signature(v, memory) for v in value])
    if is_metadata(value):  # True, 1 and 1.0 are equal, and not all welcome everywhere
        return kind, value
    known = value.__dict__.get("_signature")
    if known is None:
        inside: list[DeviceArray] = []
        names = field_names(kind) or ()
        known = (kind, *[signature(getattr(value, n), inside) for n in names]), inside
        value.__dict__["_signature"] = known
    memory.extend(known[1])
    return known[0]


PLAIN = METADATA_TYPES - {bool, float}


class _Current(threading.local):
    recorder: Recorder | None = None


current = _Current()
