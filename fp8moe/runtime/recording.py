"""Recordings: what a call on CUDA allocates and launches, found once for given shapes by a dry run, and
replayed.

The dry run calls the operation with descriptors in place of arrays (`DeviceArray` whose owner is the number
of a buffer). The operation's checks, output shapes and launchers run unchanged, but allocations, launches and
releases are only logged. A launch refers to memory as (buffer, offset in bytes), so that a `Recording` can
run at any addresses. Either the caller's framework allocates, as the call goes on, or the caller gives all
memory (`GivenMemory`), as XLA's runtime does for JAX under ``jit``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fp8moe.records import ArraySpec, DeviceArray, Record
from fp8moe.runtime import checks, counters, interop
from fp8moe.runtime.call import (
    NOWHERE,
    WRITTEN,
    Call,
    NotRecordable,
    count_overwrite,
    cuda_launch,
    current,
    replace_arrays,
)
from fp8moe.runtime.interop import NUMPY, Device, Framework, RawArray, load_module, require_cupy
from fp8moe.runtime.interop.base import Wanted
from fp8moe.runtime.record_trees import METADATA_TYPES, arrays_in, is_metadata, map_arrays

#: descriptors get addresses outside any allocation, a different one for each buffer, aligned as its array is
FIRST_ADDRESS, ADDRESS_STEP = 1 << 62, 1 << 42


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
    made: what launchers make once per recording, by key; alive until the end of the call.
    steps: n for the allocation of buffer n, ~n for its release; a `Step` for each launch and memset.
    events: what `fp8moe.trace` counts. uploads: whether the call copies something from the host.
    num_arguments: of the call. argument_of: by the id of the raw form of an argument that holds arrays: its
        number.
    overwritten: (buffer, offset in bytes) of each array that `count_overwrite` was called for.
    foreseen: later calls, each with descriptors of its arguments, which refer to no buffer.
    """

    def __init__(
        self,
        described: Iterable[tuple[tuple[int, ...], np.dtype, int]],
        device: int,
        framework: Framework,
    ):
        """described: shape, dtype and alignment of each array of the arguments."""
        self.reads_values = False
        self.device, self.framework = device, framework
        self.buffers: list[tuple[tuple[int, ...], np.dtype]] = []
        self.steps: list[Any] = []
        self.scratch_buffers: set[int] = set()
        self.counters: list[DeviceArray] = []
        self.made: dict[Any, Any] = {}
        self.events: list[tuple[str, Any]] = []
        self.uploads = False
        self.num_arguments, self.argument_of = 0, dict[int, int]()
        self.overwritten: list[tuple[int, int]] = []
        self.foreseen: list[tuple[Callable[..., Any], Any]] = []
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

    def foresee(self, function: Callable[..., Any], *arguments: Any) -> None:
        if self.device != NOWHERE:
            self.foreseen.append((function, map_arrays(lambda a: replace(a, owner=None), arguments)))

    def load_kernels(self) -> None:
        """Load the kernels of all launches. If some are not in the cache and have to be compiled, which takes
        seconds, so are those of the foreseen calls, at the same time."""
        if not (unloaded := cuda_launch().unloaded(self.steps)):
            return
        codes = [kernel.code for kernel in unloaded]  # None where another thread has loaded it since
        if not all(code is None or code.is_cached for code in codes):
            for function, arguments in self.foreseen:
                self._dry_run_later(function, arguments)
        cuda_launch().load_kernels(unloaded)

    def _dry_run_later(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        described = [(a.shape, a.dtype, 0) for a in arrays_in(arguments)]
        later = DryRun(described, int(self.device), self.framework)
        inputs = iter(later.inputs)
        with contextlib.suppress(Exception):  # which that call raises, if it comes
            later.perform(function, *map_arrays(lambda _: next(inputs), arguments))

    def upload(self, host: np.ndarray) -> RawArray:
        self.uploads = True
        if self.device != NOWHERE:
            raise NotRecordable
        return self.array(host.shape, host.dtype)

    def to_host(self, raw: RawArray) -> np.ndarray:
        if self.device != NOWHERE:
            raise NotRecordable
        raise TypeError(
            'num_out_tokens: got "exact", the default for a mask without topk, where values are not known, '
            "as under jax.jit; wanted a number; pass num_out_tokens as a number, or topk= for a mask"
        )

    def depends_on_values(self) -> None:
        raise NotRecordable


class _Made(NamedTuple):
    """A part of a call's result: a record (kind: its type), or a tuple, or a constant (kind: None).

    fields: of a record, with those that hold no arrays; of a constant its value. parts: names, of a record's
    other fields, and where their values are among the call's values."""

    kind: type | None
    fields: Any
    parts: list[tuple[str, int]]


def _parts_of(value: Any, index_of: Callable[[Any], int | None], made: list[_Made], first: int) -> int:
    """The index of a result among a call's values, which `made` are added to from ``first`` on. index_of:
    None for what is made."""
    index = index_of(value)
    if index is not None:
        return index
    if isinstance(value, Record):
        fields, parts = dict(vars(value)), []
        for name, part in vars(value).items():
            if type(part) not in METADATA_TYPES and not (type(part) is tuple and is_metadata(part)):
                fields[name] = None  # the fields stay in their order
                parts.append((name, _parts_of(part, index_of, made, first)))
        made.append(_Made(type(value), fields, parts))
    elif is_metadata(value):
        made.append(_Made(None, value, []))
    elif isinstance(value, tuple):
        made.append(_Made(tuple, None, [("", _parts_of(part, index_of, made, first)) for part in value]))
    else:
        raise NotRecordable
    return first + len(made) - 1


# ---------------------------------------------------------------- replay


#: bytes of temporaries up to which a recording allocates everything before its first launch
TOGETHER = 64 << 20


class _Part(NamedTuple):
    """What a recording does before it allocates again. wanted: arrays to allocate. steps: launches after
    that. released: indices of arrays to release then."""

    wanted: list[Wanted]
    steps: list[Any]
    released: list[int]


class Layout:
    """Where the arrays of a record are in a list of arrays: one may hold several.

    like: the record, with an `ArraySpec` for each array; what is neither array nor metadata is its own.
    leaves: of each array its number in the list, and its offset there in bytes. made: what a caller derives
    from it, by key.
    """

    def __init__(self, like: Any, leaves: tuple[tuple[int, int], ...]):
        self.like, self.leaves, self.made = like, leaves, dict[Any, Any]()

    def record(self, arrays: Sequence[Any], part: Callable[[Any, int, ArraySpec], Any]) -> Any:
        """The record of arrays. part: gives the array of a spec that begins at an offset in another one."""
        leaves = iter(self.leaves)

        def array(spec: Any) -> Any:
            if type(spec) is not ArraySpec:
                return spec
            number, start = next(leaves)
            return part(arrays[number], start, spec)

        return map_arrays(array, self.like)


def raw_part(raw: RawArray, start: int, spec: ArraySpec) -> RawArray:
    """`Layout.record`'s part of a raw array."""
    if raw.shape == spec.shape and raw.dtype == spec.dtype:
        return raw
    assert isinstance(raw, DeviceArray)
    check_part(raw.shape, raw.dtype.itemsize, start, spec)
    return raw.part(start, spec.shape, spec.dtype)


def check_part(shape: Sequence[int], itemsize: int, start: int, spec: ArraySpec) -> None:
    """Refuse what is no memory of several arrays: a saved array whose shape has changed."""
    if len(shape) != 1 or itemsize != 1 or start + spec.nbytes > shape[0]:
        raise RuntimeError(
            f"saved tensors: got one of shape {[*shape]} in place of {[*spec.shape]}, {spec.dtype.name}; "
            "wanted the forward's; do not change the memory of weights, or saved tensors, before the backward"
        )


class Recording:
    """A call that can be repeated on other arrays of the same shapes, dtypes and alignments. It holds no
    memory and never changes: threads share it.

    Everything is allocated before the first launch, and temporaries share one workspace, unless it is larger
    than `TOGETHER`. Such a call, whose kernels take longer than the host, allocates and releases in between:
    all at once would be up to 69 % more memory for a layer.
    """

    def __init__(self, call: DryRun, result: Any, written: Sequence[int], kept: Any = None):
        """written: the inputs that the call writes to. kept: a further result, a record whose arrays live
        and die together: up to `TOGETHER` they are one allocation; the result is a tuple of arrays and None.
        Raises NotRecordable."""
        self._held = result, kept  # their buffers would log their release
        first, framework, launch = len(call.inputs), call.framework, cuda_launch()
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in call.buffers]
        returned = {int(a.owner) for a in arrays_in(result) if type(a) is DeviceArray}
        of_kept = [] if kept is None else arrays_in(kept)
        owners = dict.fromkeys([int(a.owner) for a in of_kept])
        packed = [n for n in owners if n >= first and n not in returned]
        offsets, size = _pack(call.steps, sizes, {*returned, *packed})
        ends = [*itertools.accumulate([_rounded(max(sizes[n], 1)) for n in packed], initial=0)]
        together = size <= TOGETHER
        if not together or ends[-1] > TOGETHER:
            returned, packed = {*returned, *packed}, []
        parts, number = [_Part([], [], [])], first
        places = {n: (n, 0) for n in range(first)}  # of each buffer: the index of its array, and an offset
        if together and size:
            parts[0].wanted.append(((size,), np.dtype(np.uint8), True))
            number += 1
        if packed:
            parts[0].wanted.append(((ends[-1],), np.dtype(np.uint8), False))
            places |= {n: (number, start) for n, start in zip(packed, ends, strict=False)}
            number += 1
        for step in call.steps:
            part = parts[-1]
            if type(step) is not int:
                part.steps.append(step)
            elif max(step, ~step) in packed:
                continue
            elif together and max(step, ~step) not in returned:
                places[max(step, ~step)] = first, offsets[max(step, ~step)]
            elif step < 0:
                part.released.append(places[~step][0])
            else:
                if not together and (part.steps or part.released):
                    parts.append(part := _Part([], [], []))
                part.wanted.append((*call.buffers[step], step not in returned))
                places[step] = number, 0
                number += 1
        device = int(call.device)
        self._stream, makers = framework.prepare(device, [array for part in parts for array in part.wanted])
        each, self._parts = iter(makers), list[Any]()
        for wanted, steps, released in parts:
            allocated = [(make, 0 not in shape) for (shape, *_), make in zip(wanted, each, strict=False)]
            plan = launch.Plan(steps, device, places.__getitem__) if steps else None
            self._parts.append((allocated, plan, released))
        self._device, self._run_at, self._events = device, launch.run_at, call.events
        self._num_inputs = first
        self._overwritten = [(places[n][0], places[n][1] + start) for n, start in call.overwritten]
        self._address, self._wrap, self._count_in = framework.address, framework.wrap, framework.overwritten
        self._to_wrap = [places[n][0] for n in returned if n >= first and not framework.allocates_results]

        def index_of(value: Any) -> int | None:
            if id(value) in call.argument_of:
                return number + call.argument_of[id(value)]
            if type(value) is not DeviceArray:
                return None
            if value.start or tuple(value.shape) != tuple(call.buffers[int(value.owner)][0]):
                raise NotRecordable
            return places[int(value.owner)][0]

        self._made = list[_Made]()
        self._result = _parts_of(result, index_of, self._made, number + call.num_arguments)
        if kept is not None:
            #: where `launch` leaves the results, and what is kept
            self._results = [None if a is None else index_of(a) for a in result]
            placed = [(places[int(a.owner)], a.start) for a in of_kept]
            self._kept = [*dict.fromkeys([array for (array, _), _ in placed])]
            leaves = tuple([(self._kept.index(array), offset + start) for (array, offset), start in placed])
            self._layout = Layout(map_arrays(lambda a: ArraySpec(tuple(a.shape), a.dtype), kept), leaves)
        #: every input that is written to with every other input, and their sizes in bytes; each pair once
        self.pairs: list[tuple[int, int, int, int]] = []
        for i in written:
            others = [j for j in range(first) if j > i or j not in written]
            self.pairs += [(i, sizes[i], j, sizes[j]) for j in others]

    def fits(self, addresses: list[int]) -> bool:
        """Whether no input that is written to overlaps another input."""
        for i, size, j, other in self.pairs:
            if addresses[j] < addresses[i] + size and addresses[i] < addresses[j] + other:
                return False
        return True

    def run(self, addresses: list[int], arrays: list[Any], given: Sequence[Any]) -> Any:
        """Do the call again. arrays: those in the arguments ``given``, at ``addresses``; both lists are
        extended by what the call allocates, on the framework's stream."""
        self.launch(addresses, arrays)
        arrays += given
        for kind, fields, parts in self._made:
            new: Any = fields
            if kind is tuple:
                new = tuple([arrays[index] for _, index in parts])
            elif kind is not None:
                new = object.__new__(kind)
                values = new.__dict__
                values.update(fields)
                for name, index in parts:
                    values[name] = arrays[index]
            arrays.append(new)
        return arrays[self._result]

    def replay(self, addresses: list[int], arrays: list[Any]) -> tuple[list[Any], list[Any], Layout]:
        """`run` for a `fp8moe.runtime.dispatch.Fixed`, whose results these are."""
        self.launch(addresses, arrays)
        results = [None if i is None else arrays[i] for i in self._results]
        return results, [arrays[i] for i in self._kept], self._layout

    def launch(self, addresses: list[int], arrays: list[Any]) -> None:
        """`run` without its result, whose arrays are then in ``arrays``."""
        for number, start in self._overwritten:
            if number < self._num_inputs:  # before the launches: an interrupt may come after them
                count_overwrite((self._device, addresses[number] + start))
                self._count_in(arrays[number])
        stream = self._stream()
        self._run_at((self._device, stream, None, None), self._launch, addresses, arrays, stream)
        for count in counters.counting():
            for event in self._events:
                count(event)
        for number, start in self._overwritten:
            if number >= self._num_inputs:
                count_overwrite((self._device, addresses[number] + start))
        for number in self._to_wrap:
            arrays[number] = self._wrap(arrays[number])

    def _launch(self, addresses: list[int], arrays: list[Any], stream: int) -> None:
        for allocated, plan, released in self._parts:
            for make, has_elements in allocated:
                arrays.append(make())  # the only reference, so that its release frees it
                address = self._address(arrays[-1])
                if has_elements and not address:
                    raise TypeError(
                        f"a result: got a {type(arrays[-1]).__name__} without memory from the caller's "
                        "framework; call this outside of FakeTensorMode, or through fp8moe.torch"
                    )
                addresses.append(address)
            if plan is not None:
                plan.run(addresses, stream)
            for number in released:
                arrays[number] = None


def record(
    function: Callable[..., Any],
    names: Sequence[str],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    framework: Framework,
    device: int,
    described: Sequence[tuple[tuple[int, ...], np.dtype, int]],
    keeps: bool = False,
) -> Recording:
    """Record a call for which the framework of its arrays allocates. names: of the function's parameters.
    keeps: whether it returns a pair, its result and what is kept. Raises NotRecordable."""
    call = DryRun(described, device, framework)
    given = (*arguments, *options.values())
    call.num_arguments = len(given)
    raw: list[Any] = []
    written: list[int] = []
    inputs = call.inputs[::-1]
    labels = [*names[: len(arguments)], *[""] * (len(arguments) - len(names)), *options]
    for name, value in zip(labels, given, strict=True):
        before = len(described) - len(inputs)
        is_array = interop.framework_of_type(type(value)) is not None  # type: ignore[arg-type]
        if is_array or isinstance(value, (Record, tuple)):
            value = inputs.pop() if is_array else replace_arrays(lambda *_: inputs.pop(), value, name)
            call.argument_of[id(value)] = len(raw)
        raw.append(value)
        if name in WRITTEN:
            written += range(before, len(described) - len(inputs))
    if written and not framework.always_writable:
        raise NotRecordable
    count = len(arguments)
    named = dict(zip(options, raw[count:], strict=True))
    result = call.perform(function, *raw[:count], **named)
    call.load_kernels()
    result, kept = result if keeps else (result, None)
    return Recording(call, result, written, kept)


# ---------------------------------------------------------------- memory that the caller gives

ALIGNMENT = 256  # bytes, of a temporary in the workspace, as of cudaMalloc


class GivenMemory:
    """The memory that the caller of ``function``, which is called with a list of arrays, has to allocate, as
    follows from shapes alone. Each array that the call returns is an output of its own; temporaries share
    one workspace, where those that are not alive at the same time overlap.

    arguments: the arrays' shapes and dtypes. in_place: which of them the function adds to and returns.

    outputs: an `ArraySpec` of each array to allocate; the last one is the workspace, where one is needed.
    aliases: by the number of an argument that is changed in place, the number of its output.
    leaves: for each array of the result the number of its output, or ~i where it is argument i, unchanged.
    only_launches: whether the call copies nothing from the host, so that a CUDA graph can capture it.
    devices: what is launched, by device.
    """

    def __init__(
        self,
        function: Callable[[list[Any]], Any],
        arguments: Sequence[ArraySpec],
        in_place: Collection[int] = (),
    ):
        self._function, self._arguments = function, arguments
        self.devices: dict[int, OnDevice] = {}
        call = _descriptors(arguments, NOWHERE)
        result = call.perform(function, list(call.inputs))
        inputs, specs = len(arguments), [ArraySpec(*buffer) for buffer in call.buffers]
        buffers = [int(a.owner) for a in arrays_in(result)]
        self._result = map_arrays(lambda a: replace(a, owner=None), result)
        made = dict.fromkeys(n for n in buffers if n >= inputs or n in in_place)  # each once, in order
        number_of = {n: i for i, n in enumerate(made)}
        self.outputs = [specs[n] for n in made]
        self.aliases = {n: i for n, i in number_of.items() if n < inputs}
        self.leaves = [number_of.get(n, ~n) for n in buffers]
        self.only_launches = not call.uploads and not checks.reads_values()
        offsets, size = _pack(call.steps, [spec.nbytes for spec in specs], made)
        #: of each buffer: the number of the array among arguments and outputs that it lies in, and its offset
        self._places = [
            (inputs + number_of[n], 0) if n in made else (n if n < inputs else inputs + len(made), offsets[n])
            for n in range(len(specs))
        ]
        if size:
            self.outputs.append(ArraySpec((size,), np.dtype(np.uint8)))

    def result(self, arrays: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """What the call returns, made of its arguments' arrays and its outputs."""
        picked = (arrays[~n] if n < 0 else outputs[n] for n in self.leaves)
        return map_arrays(lambda a: next(picked), self._result)

    def run(
        self,
        arguments: Sequence[Any],
        outputs: Sequence[Any],
        address_of: Callable[[Any], int],
        device: int,
        stream: int,
    ) -> None:
        """Do the call on a CUDA device's stream, which may be capturing. Of an argument that is changed in
        place, the output's address is used."""
        arrays = [*arguments, *outputs]
        # one, also where two threads make it at once: graphs captured with it use its scratch memory
        there = self.devices.get(device) or self.devices.setdefault(device, self._record(device))
        addresses = [address_of(arrays[i]) for i in there.needed]
        if there.plan is None or functools.reduce(operator.or_, addresses, 0) & 15:
            self._run_now([address_of(a) for a in arrays], device, stream)
            return
        with there.one_at_a_time:
            if there.scratch:
                addresses.append(there.memory_on(device, stream))
            cuda_launch().run_at((device, stream, None, None), there.plan.run, addresses, stream)

    def _record(self, device: int) -> OnDevice:
        """Record what is launched."""
        call = _descriptors(self._arguments, device)
        try:
            if checks.reads_values():
                raise NotRecordable
            call.perform(self._function, list(call.inputs))
            call.load_kernels()
        except NotRecordable:  # every run calls the function
            return OnDevice(None, [], 0)
        following, scratch = iter(self._places), 0
        places: list[tuple[int, int]] = []  # as `_places`, of this dry run; array -1 is scratch memory
        for number, buffer in enumerate(call.buffers):
            if number in call.scratch_buffers:
                places.append((-1, scratch))
                scratch += _rounded(ArraySpec(*buffer).nbytes)
            else:
                places.append(next(following))
        launches = [step for step in call.steps if type(step) is not int]
        needed = sorted({places[b][0] for step in launches for _, b, _ in step.places} - {-1})
        index = {**{a: i for i, a in enumerate(needed)}, -1: len(needed)}
        plan = cuda_launch().Plan(launches, device, lambda n: (index[places[n][0]], places[n][1]))
        return OnDevice(plan, needed, scratch)

    def _run_now(self, addresses: list[int], device: int, stream: int) -> None:
        memory = _Memory((addresses[array] + offset for array, offset in self._places), stream)
        call = Call()
        call.device, call.framework = device, memory
        call.perform(self._function, [memory.empty(spec, device) for spec in self._arguments])


def result_specs(function: Callable[[list[Any]], Any], arguments: Sequence[ArraySpec]) -> Any:
    """Shapes and dtypes of what ``function`` returns when it is called with a list of such arrays. Dimensions
    may be symbols, as in torch.compile."""
    call = _descriptors(arguments, NOWHERE)
    return map_arrays(lambda a: ArraySpec(a.shape, a.dtype), call.perform(function, list(call.inputs)))


def _descriptors(arguments: Sequence[ArraySpec], device: int) -> DryRun:
    return DryRun([(tuple(a.shape), a.dtype, 0) for a in arguments], device, NUMPY)


class OnDevice:
    """A call on one device: its plan of launches (None where they depend on values), the numbers of the
    arrays whose addresses it needs, and the size of its scratch memory in bytes, whose address comes last."""

    def __init__(self, plan: Any, needed: list[int], scratch: int):
        self.one_at_a_time = threading.Lock()
        self._memory: dict[int, Any] = {}  # by stream
        self.plan, self.needed, self.scratch = plan, needed, scratch

    def memory_on(self, device: int, stream: int) -> int:
        """The address of scratch memory. All calls on a stream share it, as they run one after the other, and
        so do the graphs captured from it; it lives as long as this object."""
        if stream not in self._memory:
            relaxed = load_module("fp8moe.kernels_cuda.runtime.driver").while_capturing
            self._memory[stream] = relaxed(allocate_scratch, self.scratch, device, stream)
        return self._memory[stream].ptr


class _Memory(Framework):
    """Hands out given addresses, one after the other, as the memory that a call on a stream allocates."""

    def __init__(self, addresses: Iterator[int], stream: int):
        self._addresses, self._stream = addresses, stream

    def empty(self, spec: ArraySpec, device: Device) -> DeviceArray:
        return DeviceArray(next(self._addresses), tuple(spec.shape), spec.dtype, int(device), None)

    def scratch(self, spec: ArraySpec, device: Device) -> DeviceArray:
        memory = allocate_scratch(spec.nbytes, int(device), self._stream)
        return DeviceArray(memory.ptr, tuple(spec.shape), spec.dtype, int(device), memory)

    def stream(self, device: Device) -> int:
        return self._stream


def allocate_scratch(nbytes: int, device: int, stream: int) -> Any:
    """Scratch memory of launchers, from CuPy's pool: it is small and not known before the launch."""
    cupy = require_cupy("scratch memory")
    with cupy.cuda.Device(device), _stream(stream):
        return cupy.cuda.alloc(nbytes)


class _Stream:
    """A stream that another library owns, by the ``__cuda_stream__`` protocol."""

    def __init__(self, address: int):
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@functools.cache
def _stream(address: int) -> Any:
    return require_cupy("a stream").cuda.Stream.from_external(_Stream(address))


def _pack(steps: list[Any], sizes: list[int], returned: Collection[int]) -> tuple[list[int], int]:
    """The offset in the workspace of each allocation that is not returned (0 for others), and its size."""
    offsets, live, size = [0] * len(sizes), dict[int, tuple[int, int]](), 0
    for step in steps:
        if type(step) is not int:
            continue
        number = max(step, ~step)
        if number in returned:
            continue
        if step < 0:
            del live[number]
            continue
        wanted = _rounded(max(sizes[number], 1))  # also of no elements: a launch may get its address
        start = 0
        for first, end in sorted(live.values()):
            if first - start >= wanted:
                break
            start = max(start, end)
        offsets[number], live[number] = start, (start, start + wanted)
        size = max(size, start + wanted)
    return offsets, size


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
