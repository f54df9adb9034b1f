"""What a call on CUDA allocates and launches: found once for given shapes, by a dry run, done by addresses.

The dry run calls the operation with descriptors (`DeviceArray` whose owner is a `Buffer`) in place of arrays:
its checks, output shapes and launchers run as they are, and what would be allocated, launched and freed is
logged instead. Launches name memory by (buffer, offset in bytes). A plan holds no memory, and never changes:
threads share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fp8moe import counters
from fp8moe.interop import Framework, load_module
from fp8moe.record_trees import METADATA_TYPES, field_names, is_metadata
from fp8moe.records import ArraySpec, DeviceArray, Record

#: descriptors' addresses: nobody's memory, a different one for each buffer, of the alignment that it has
FIRST_ADDRESS, ADDRESS_STEP = 1 << 62, 1 << 42
PLANS_KEPT = 512


class NotPlannable(Exception):
    """The call reads or writes memory from the host, so what it does depends on more than shapes."""


class Launch(NamedTuple):
    """``function(*fixed, values)`` with the addresses of ``places`` (value, buffer, offset) in the values."""

    function: Callable[..., None]
    fixed: tuple[Any, ...]
    values: list[Any]
    places: list[tuple[int, int, int]]


class Log:
    """What a dry run did: launches, and allocations and releases by the buffer's number."""

    def __init__(self, inputs: Sequence[tuple[tuple[int, ...], Any, int]], device: int):
        """inputs: shape, dtype and alignment of each array that comes in."""
        self.device = device
        self.steps: list[Launch | int] = []  # n: buffer n is allocated; ~n: it is released
        self.specs: list[ArraySpec] = []
        self.scratch: set[int] = set()  # buffers that a launcher asked for
        self.inputs = [self._descriptor(ArraySpec(s, d), align) for s, d, align in inputs]

    def _descriptor(self, spec: ArraySpec, align: int) -> DeviceArray:
        number = len(self.specs)
        self.specs.append(spec)
        # none where nothing is launched, and lengths may be a compiler's symbols
        address = 0 if self.device < 0 else FIRST_ADDRESS + number * ADDRESS_STEP + align
        return DeviceArray(address, spec.shape, spec.dtype, self.device, Buffer(number, None))

    def allocate(self, spec: ArraySpec, scratch: bool) -> DeviceArray:
        new = self._descriptor(spec, 0)
        number = new.owner.number
        if scratch:
            self.scratch.add(number)
        self.steps.append(number)
        new.owner.steps = self.steps
        return new

    def launched(self, function: Callable[..., None], fixed: Any, values: list[Any], arguments: Any) -> None:
        arrays = [(i, a) for i, a in enumerate(arguments) if type(a) is DeviceArray]
        places = [(i, a.owner.number, a.start) for i, a in arrays]
        self.steps.append(Launch(function, fixed, values, places))

    def depends_on_values(self) -> None:
        raise NotPlannable


class Buffer:
    """Stands for memory, and logs when nobody needs it any more."""

    __slots__ = ("number", "steps")

    def __init__(self, number: int, steps: list[Any] | None):
        self.number, self.steps = number, steps

    def __del__(self) -> None:
        if self.steps is not None:
            self.steps.append(~self.number)


class LaunchPlan:
    """A call that can be done on any arrays of the shapes, dtypes and alignments that it was made for."""

    def __init__(
        self,
        log: Log,
        result: Any,
        given: Sequence[Any],
        written: Sequence[int],
        counts: counters.Trace,
        framework: Framework,
    ):
        """given: the arguments of the dry run. written: the inputs, by their numbers, that the call writes
        to."""
        inputs = len(log.inputs)
        steps = list(log.steps)  # what is released after this, the result is
        self._result, returned = _template(result, given, inputs, log.specs)
        self._device, self._counts = log.device, counts
        self._stream = framework.stream_getter(log.device)
        self.written = written
        self._sizes = [spec.nbytes for spec in log.specs] if written else []
        self._last = len(log.specs)
        self._steps: list[Any] = []
        for step in steps:
            if isinstance(step, Launch):
                self._steps.append(step)
            elif step >= 0:
                make = framework.allocator(log.specs[step], log.device, step not in returned)
                self._steps.append((None, make, step, 0 not in log.specs[step].shape))
            else:
                self._steps.append((None, None, ~step, False))
        self._address, self._finish = framework.address, framework.finish

    def fits(self, addresses: list[int]) -> bool:
        """Whether what is written to overlaps nothing else that came in."""
        for i in self.written:
            start, end = addresses[i], addresses[i] + self._sizes[i]
            for j, other in enumerate(addresses):
                if i != j and other < end and start < other + self._sizes[j]:
                    return False
        return True

    def run(self, given: Sequence[Any], arrays: list[Any], addresses: list[int]) -> Any:
        """The call of ``given``, whose arrays are ``arrays``, at ``addresses``."""
        room = self._last - len(addresses)
        memory, addresses = [*arrays, *[None] * room], [*addresses, *[0] * room]
        if self._steps:
            launch = load_module("fp8moe.kernels_cuda.launch")
            launch.run_steps(self._steps, memory, addresses, self._address, self._device, self._stream())
        if counting := counters.counting():
            counters.add(self._counts, counting)
        return self._result(given, memory, self._finish)


Template = Callable[[Sequence[Any], list[Any], Callable[[Any], Any]], Any]


def _template(
    result: Any, given: Sequence[Any], inputs: int, specs: list[ArraySpec]
) -> tuple[Template, set[int]]:
    """What makes the call's result of its arguments and of the memory by buffers; the buffers in it."""
    returned: set[int] = set()

    def build(value: Any) -> Template:
        if value is None or (type(value) is not DeviceArray and is_metadata(value)):
            return lambda given, memory, finish: value
        for i, ours in enumerate(given):
            if value is ours:
                return lambda given, memory, finish: given[i]
        if type(value) is DeviceArray:
            number = value.owner.number
            if value.start or tuple(value.shape) != tuple(specs[number].shape):
                raise NotPlannable
            if number < inputs:
                return lambda given, memory, finish: memory[number]
            returned.add(number)
            return lambda given, memory, finish: finish(memory[number])
        if isinstance(value, tuple):
            parts = [build(v) for v in value]
            return lambda given, memory, finish: tuple([p(given, memory, finish) for p in parts])
        kind = type(value)
        if not issubclass(kind, Record):
            raise NotPlannable
        plain, others = {}, []
        for name in field_names(kind) or ():
            part = getattr(value, name)
            if type(part) in METADATA_TYPES or (isinstance(part, tuple) and is_metadata(part)):
                plain[name] = part
            else:
                others.append((name, build(part)))

        def record(given: Sequence[Any], memory: list[Any], finish: Callable[[Any], Any]) -> Any:
            new = object.__new__(kind)
            fields = new.__dict__
            fields.update(plain)
            for name, make in others:
                fields[name] = make(given, memory, finish)
            return new

        return record

    return build(result), returned
