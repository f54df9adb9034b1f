"""Launch plans: what a call on CUDA allocates and launches, recorded once for given shapes in a dry run.

The dry run calls the operation with descriptors in place of arrays (`DeviceArray` whose owner is the number
of a buffer). The operation's checks, output shapes and launchers run unchanged, but allocations, launches and
releases are only logged. A launch refers to memory as (buffer, offset in bytes), so a plan can run at any
addresses. A plan holds no memory and never changes: threads share it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from fp8moe.records import ArraySpec, DeviceArray, Record
from fp8moe.runtime import counters, interop
from fp8moe.runtime.call import (
    NOWHERE,
    WRITTEN,
    Call,
    NotPlannable,
    count_overwrite,
    cuda_launch,
    current,
    replace_arrays,
)
from fp8moe.runtime.interop import Framework, RawArray
from fp8moe.runtime.interop.base import Wanted
from fp8moe.runtime.record_trees import METADATA_TYPES, is_metadata

#: descriptors get addresses outside any allocation, a different one for each buffer, aligned as its array is
FIRST_ADDRESS, ADDRESS_STEP = 1 << 62, 1 << 42

Getter = Callable[[list[Any]], Any]


class Buffer(int):
    """The number of a buffer that the call allocates. Dropping its last reference logs its release."""

    steps: list[Any]

    def __del__(self) -> None:
        self.steps.append(~self)


class DryRun(Call):
    """A call on descriptors that logs allocations, releases and launches.

    inputs: descriptors of the arguments' arrays, which are the first buffers.
    buffers: shape and dtype of each buffer. scratch_buffers: those that a launcher asked for.
    counters: zeroed integers in one of them that no launch has taken yet.
    made: what launchers make once per launch plan, by key; alive until the end of the call.
    steps: n for the allocation of buffer n, ~n for its release; a launch is (function, fixed arguments,
        values, places), where places are the addresses among the values: (index, buffer, offset in bytes).
    events: what `fp8moe.trace` counts. uploads: whether the call copies something from the host.
    argument_of: by the id of the raw form of an argument that holds arrays: its index, from the end.
    returned: the buffers that are in the result.
    overwritten: (buffer, offset in bytes) of each array that `count_overwrite` was called for.
    """

    def __init__(
        self,
        described: Iterable[tuple[tuple[int, ...], np.dtype, int]],
        device: int,
        framework: Framework,
    ):
        """described: shape, dtype and alignment of each array of the arguments."""
        self.device, self.framework = device, framework
        self.buffers: list[tuple[tuple[int, ...], np.dtype]] = []
        self.steps: list[Any] = []
        self.scratch_buffers: set[int] = set()
        self.counters: list[DeviceArray] = []
        self.made: dict[Any, Any] = {}
        self.events: list[tuple[str, Any]] = []
        self.uploads = False
        self.argument_of: dict[int, int] = {}
        self.returned: set[int] = set()
        self.overwritten: list[tuple[int, int]] = []
        self.inputs: list[DeviceArray] = []
        for shape, dtype, align in described:
            number = len(self.inputs)
            # address 0 where nothing is launched
            address = 0 if device == NOWHERE else FIRST_ADDRESS + number * ADDRESS_STEP + align
            self.inputs.append(DeviceArray(address, shape, dtype, device, number))
            self.buffers.append((shape, dtype))

    def perform(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self.device != NOWHERE:
            arguments = (self.device, 0, self.scratch, self), function, *arguments
            function = cuda_launch().run_at
        before, counting = current.call, counters.counting()
        try:
            counters.active.set((self.events.append,))
            current.call = self
            return function(*arguments, **options)
        finally:
            current.call = before
            counters.active.set(counting)

    _do: Any = staticmethod(operator.call)  # the launchers log their launches

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        number = Buffer(len(self.buffers))
        number.steps = self.steps
        self.steps.append(int(number))
        self.buffers.append((shape, dtype))
        address = 0 if self.device == NOWHERE else FIRST_ADDRESS + number * ADDRESS_STEP
        return DeviceArray(address, shape, dtype, int(self.device), number)

    def scratch(self, spec: ArraySpec, device: int) -> DeviceArray:
        self.scratch_buffers.add(len(self.buffers))
        return self.array(spec.shape, spec.dtype)

    def count_overwrite(self, raw: RawArray) -> None:
        assert isinstance(raw, DeviceArray)
        self.overwritten.append((int(raw.owner), raw.start))

    def upload(self, host: np.ndarray) -> RawArray:
        self.uploads = True
        if self.device != NOWHERE:
            raise NotPlannable
        return self.array(host.shape, host.dtype)

    def values(self, raw: RawArray) -> np.ndarray | None:
        return None

    def to_host(self, raw: RawArray) -> np.ndarray:
        if self.device != NOWHERE:
            raise NotPlannable
        raise TypeError(
            'num_out_tokens: got "exact", the default for a mask without topk, where values are not known, '
            "as under jax.jit; wanted a number; pass num_out_tokens as a number, or topk= for a mask"
        )

    def depends_on_values(self) -> None:
        raise NotPlannable

    def getters(self, values: Iterable[Any]) -> list[Getter]:
        """For each value, a function that gets it from a list of the call's buffers and arguments."""
        getters: list[Getter] = []
        for value in values:
            if id(value) in self.argument_of:
                getters.append(itemgetter(self.argument_of[id(value)]))
            elif type(value) is DeviceArray:
                number = int(value.owner)
                if value.start or tuple(value.shape) != tuple(self.buffers[number][0]):
                    raise NotPlannable
                self.returned.add(number)
                getters.append(itemgetter(number))
            elif isinstance(value, Record):
                fields, variable = dict(vars(value)), {}
                for name, part in vars(value).items():
                    if type(part) not in METADATA_TYPES and not (type(part) is tuple and is_metadata(part)):
                        fields[name], variable[name] = None, part  # the fields stay in their order
                parts = list(zip(variable, self.getters(variable.values()), strict=True))
                getters.append(partial(_new_record, type(value), fields, parts))
            elif is_metadata(value):
                getters.append(partial(_constant, value))
            elif isinstance(value, tuple):
                getters.append(partial(_new_tuple, self.getters(value)))
            else:
                raise NotPlannable
        return getters


class LaunchPlan:
    """A call that can be repeated on other arrays of the same shapes, dtypes and alignments."""

    def __init__(
        self,
        function: Callable[..., Any],
        names: Sequence[str],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        framework: Framework,
        device: int,
        described: Sequence[tuple[tuple[int, ...], np.dtype, int]],
    ):
        """names: of the function's parameters. Raises NotPlannable."""
        call = DryRun(described, device, framework)
        given = (*arguments, *options.values())
        raw: list[Any] = []
        inputs = call.inputs[::-1]
        self.written: list[int] = []  # the numbers of the inputs that the call writes to
        labels = [*names[: len(arguments)], *[""] * (len(arguments) - len(names)), *options]
        for name, value in zip(labels, given, strict=True):
            before = len(described) - len(inputs)
            is_array = interop.framework_of_type(type(value)) is not None  # type: ignore[arg-type]
            if is_array or isinstance(value, (Record, tuple)):
                value = inputs.pop() if is_array else replace_arrays(lambda *_: inputs.pop(), value, name)
                call.argument_of[id(value)] = len(raw) - len(given)
            raw.append(value)
            if name in WRITTEN:
                self.written += range(before, len(described) - len(inputs))
        if self.written and not framework.always_writable:
            raise NotPlannable
        count = len(arguments)
        result = call.perform(function, *raw[:count], **dict(zip(options, raw[count:], strict=True)))
        self._held = result  # keeps its buffers from being logged as released
        (self._result,) = call.getters((result,))
        first, wanted = len(described), list[Wanted]()  # buffers from `first` on are allocated
        for number, (shape, dtype) in enumerate(call.buffers):
            wanted.append((shape, dtype, number not in call.returned))
        self._run_steps = cuda_launch().run_steps
        self._stream, makers = framework.prepare(device, wanted[first:])
        self._device, self._events, self._num_allocated = device, call.events, len(wanted) - first
        self._overwritten, self._count_in_framework = call.overwritten, framework.overwritten
        self._num_inputs = first
        self._address, self._wrap = framework.address, framework.wrap
        self._to_wrap = [] if framework.allocates_results else [n for n in call.returned if n >= first]
        #: every input that is written to with every other input, and their sizes in bytes; each pair once
        self._pairs: list[tuple[int, int, int, int]] = []
        for i in self.written:
            sizes = [math.prod(s) * d.itemsize for s, d in call.buffers[:first]]
            others = [j for j in range(first) if j > i or j not in self.written]
            self._pairs += [(i, sizes[i], j, sizes[j]) for j in others]
        self._steps: list[Any] = []
        for step in call.steps:
            if type(step) is tuple:
                self._steps.append(step)
            elif step >= 0:
                self._steps.append((None, makers[step - first], step, 0 not in wanted[step][0]))
            else:
                self._steps.append((None, None, ~step, False))

    def fits(self, addresses: list[int]) -> bool:
        """Whether no input that is written to overlaps another input."""
        for i, size, j, other in self._pairs:
            if addresses[j] < addresses[i] + size and addresses[i] < addresses[j] + other:
                return False
        return True

    def run(self, given: Sequence[Any], arrays: list[Any], addresses: list[int]) -> Any:
        """Do the call with the arguments ``given``, which hold ``arrays`` at ``addresses``. Both lists are
        extended by what the call allocates."""
        for number, start in self._overwritten:
            if number < self._num_inputs:  # before the launches: an interrupt may come after them
                count_overwrite((self._device, addresses[number] + start))
                self._count_in_framework(arrays[number])
        arrays += [None] * self._num_allocated
        addresses += [0] * self._num_allocated
        if self._steps:
            self._run_steps(self._steps, arrays, addresses, self._address, self._device, self._stream())
        for count in counters.counting():
            for event in self._events:
                count(event)
        for number, start in self._overwritten:
            if number >= self._num_inputs:
                count_overwrite((self._device, addresses[number] + start))
        for number in self._to_wrap:
            arrays[number] = self._wrap(arrays[number])
        arrays += given
        return self._result(arrays)


def _new_record(
    kind: type, fields: dict[str, Any], parts: list[tuple[str, Getter]], values: list[Any]
) -> Any:
    new: Any = object.__new__(kind)
    new.__dict__.update(fields)
    for name, get in parts:
        new.__dict__[name] = get(values)
    return new


def _new_tuple(parts: list[Getter], values: list[Any]) -> tuple[Any, ...]:
    return tuple([get(values) for get in parts])


def _constant(value: Any, values: list[Any]) -> Any:
    return value
