"""A call on memory that somebody else owns, as a compiler's runtime does (XLA's, for JAX under ``jit``).

What a call allocates follows from shapes: `Layout` finds it out beforehand. Arrays that the call returns are
asked for one by one; its temporaries share one workspace, where those that do not live at the same time have
the same room. `Layout.run` then does the call at the addresses it is given, and again without its checks and
shapes, which take the host longer than the launches.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fp8moe import border, checks, replay, tracing
from fp8moe.records import ArraySpec, DeviceArray, arrays_in, map_arrays

ALIGNMENT = 256  # bytes, of a temporary in the workspace: as cudaMalloc's
NOBODYS = 1 << 60  # an address


class Layout:
    """What ``function``, called with a list of arrays, allocates and returns.

    arguments: the arrays' shapes and dtypes. in_place: which of them the function adds to and returns.

    outputs: the arrays to be made, each an `ArraySpec`; the last one is the workspace, where there is one.
    aliases: the output that is an argument changed in place, by the argument's number.
    leaves: for each array of the result the number of its output, or ~i where it is argument i untouched.
    only_launches: whether the call brings nothing from the host, so that a graph may hold it.
    """

    def __init__(
        self,
        function: Callable[[list[Any]], Any],
        arguments: Sequence[ArraySpec],
        in_place: Collection[int] = (),
    ):
        self._function, self._arguments = function, arguments
        self._known: dict[int, _Known] = {}  # by device
        result, shapes = _dry_run(function, arguments)
        numbers = [a.owner if type(a.owner) is int else a.owner.number for a in arrays_in(result)]
        self._result = map_arrays(lambda _, a: replace(a, owner=None), result)
        del result
        made = dict.fromkeys(n for n in numbers if n >= 0 or ~n in in_place)  # each once, in this order
        number_of = {n: i for i, n in enumerate(made)}
        self.outputs = [arguments[~n] if n < 0 else shapes.specs[n] for n in made]
        self.aliases = {~n: i for n, i in number_of.items() if n < 0}
        self.leaves = [number_of.get(n, n) for n in numbers]
        self.only_launches = not shapes.uploads and not checks.LOOK_AT_VALUES
        self._offsets, size = _pack(shapes, made)
        self._places = [number_of.get(n, -1) for n in range(len(shapes.specs))]
        if size:
            self.outputs.append(ArraySpec((size,), np.dtype(np.uint8)))

    def result(self, arrays: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """What the call returns, of the arrays it was given and of its outputs."""
        picked = (arrays[~n] if n < 0 else outputs[n] for n in self.leaves)
        return map_arrays(lambda _, a: next(picked), self._result)

    def run(
        self,
        arguments: Sequence[Any],
        outputs: Sequence[Any],
        address_of: Callable[[Any], int],
        device: int,
        stream: int,
    ) -> None:
        """Do the call on a CUDA device's stream, which may be being captured. An argument that is changed in
        place is not looked at: its output is."""
        arrays = [*arguments, *outputs]
        known = self._known.get(device) or self._learn(device, stream)
        addresses = [address_of(arrays[i]) for i in known.needed]
        if known.steps is None or functools.reduce(operator.or_, addresses, 0) & 15:
            self._call([address_of(a) for a in arrays], _Placed(self, device, stream))
            return
        with known.one_at_a_time, border.launching_on(device, stream, None):
            if known.scratch:
                addresses.append(known.memory_on(device, stream))
            replay.play(known.steps, addresses)

    def _learn(self, device: int, stream: int) -> _Known:
        """Find out what is launched: the call on addresses that are nobody's, with nothing launched."""
        specs = [*self._arguments, *self.outputs]
        addresses = list(
            itertools.accumulate((_rounded(s.nbytes) + ALIGNMENT for s in specs), initial=NOBODYS)
        )
        apart = [i for i in range(len(specs)) if i not in self.aliases]
        recorder = _Recorder([(addresses[i], specs[i].nbytes) for i in apart])
        recorder.dry, replay.current.recorder = True, recorder
        steps = None
        try:
            with border.while_capturing():  # kernels are loaded
                self._call(addresses[:-1], _Nobodys(self, device, stream, addresses[-1]))
            steps = recorder.launches()
        except replay.LooksAtValues:  # it has to be done as it stands, each time
            pass
        finally:
            replay.current.recorder = None
        known = _Known(steps, apart, [spec.nbytes for spec, _ in recorder.allocations])
        self._known[device] = known
        return known

    def _call(self, addresses: list[int], memory: _Placed) -> None:
        for i, output in self.aliases.items():
            addresses[i] = addresses[len(self._arguments) + output]
        memory.outputs = addresses[len(self._arguments) :]
        given = zip(addresses, self._arguments, strict=False)
        with border.on_memory(memory):
            self._function([DeviceArray(p, tuple(s.shape), s.dtype, memory.device, None) for p, s in given])


def result_specs(function: Callable[[list[Any]], Any], arguments: Sequence[ArraySpec]) -> Any:
    """Shapes and dtypes of what ``function`` returns, called with a list of such arrays. Lengths may be
    symbols, as torch's compiler has them."""
    result, _ = _dry_run(function, arguments)
    return map_arrays(lambda _, a: ArraySpec(a.shape, a.dtype), result)


def _dry_run(function: Callable[[list[Any]], Any], arguments: Sequence[ArraySpec]) -> tuple[Any, _Shapes]:
    """The call on arrays that are nowhere, where nothing is computed."""
    shapes = _Shapes()
    given = [DeviceArray(0, tuple(a.shape), a.dtype, border.NOWHERE, ~i) for i, a in enumerate(arguments)]
    with border.on_memory(shapes), tracing.silent():
        return function(given), shapes


class _Known:
    """What a call launches: ``steps`` on the addresses of the arrays ``needed``, and of ``scratch`` bytes."""

    def __init__(self, steps: list[replay.Step] | None, arrays: list[int], scratch: list[int]):
        """steps: on ``arrays`` and then on pieces of scratch memory of so many bytes; None: not known."""
        used = sorted({b for *_, places in steps or () for _, b, _ in places if b < len(arrays)})
        self.one_at_a_time = threading.Lock()
        self._memory: dict[int, Any] = {}  # by stream
        self.needed = [arrays[b] for b in used]
        to = {b: (i, 0) for i, b in enumerate(used)}
        self.scratch = 0
        for piece, nbytes in enumerate(scratch):
            to[len(arrays) + piece] = len(used), self.scratch
            self.scratch += _rounded(nbytes)
        self.steps = steps and [
            (function, before, values, [(at, to[b][0], to[b][1] + offset) for at, b, offset in places])
            for function, before, values, places in steps
        ]

    def memory_on(self, device: int, stream: int) -> int:
        """The address of scratch memory, the same for all calls on a stream, which come one after the other,
        and in a captured graph, which goes on using it."""
        if stream not in self._memory:
            with border.while_capturing():
                self._memory[stream] = _scratch(self.scratch, device, stream)
        return self._memory[stream].ptr


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Recorder(replay.Recorder):
    """Knows all memory but scratch beforehand."""

    def allocated(self, spec: Any, scratch: bool, raw: DeviceArray) -> None:
        if scratch:
            super().allocated(spec, scratch, raw)


class _Owner:
    """Owns memory that does not exist, and says when nobody needs it any more."""

    def __init__(self, number: int, events: list[tuple[int, bool]]):
        self.number, self._events = number, events
        events.append((number, True))

    def __del__(self) -> None:
        self._events.append((self.number, False))


class _Shapes:
    """Notes what is allocated, and from when to when it lives."""

    stream = 0
    uploads = False  # whether the call brings something from the host

    def __init__(self) -> None:
        self.specs: list[ArraySpec] = []
        self.events: list[tuple[int, bool]] = []  # number of an allocation; whether it begins, or ends

    def empty(self, spec: ArraySpec, device: int) -> DeviceArray:
        self.specs.append(spec)
        owner = _Owner(len(self.specs) - 1, self.events)
        return DeviceArray(0, tuple(spec.shape), spec.dtype, border.NOWHERE, owner)

    scratch = empty


class _Placed:
    """Gives a call's allocations, in their order, the places of a layout."""

    def __init__(self, layout: Layout, device: int, stream: int):
        self._layout, self.device, self.stream = layout, device, stream
        self.outputs: list[int] = []  # addresses
        self._next = 0

    def empty(self, spec: ArraySpec, device: int) -> DeviceArray:
        number, self._next = self._next, self._next + 1
        place, offset = self._layout._places[number], self._layout._offsets[number]
        return DeviceArray(self.outputs[place] + offset, tuple(spec.shape), spec.dtype, device, None)

    def scratch(self, spec: ArraySpec, device: int) -> DeviceArray:
        held = _scratch(spec.nbytes, device, self.stream)
        return DeviceArray(held.ptr, tuple(spec.shape), spec.dtype, device, held)


class _Nobodys(_Placed):
    """The same at addresses that nobody reads or writes, from ``start`` on."""

    def __init__(self, layout: Layout, device: int, stream: int, start: int):
        super().__init__(layout, device, stream)
        self._start = start

    def scratch(self, spec: ArraySpec, device: int) -> DeviceArray:
        start, self._start = self._start, self._start + _rounded(spec.nbytes) + ALIGNMENT
        return DeviceArray(start, tuple(spec.shape), spec.dtype, device, None)


def _scratch(nbytes: int, device: int, stream: int) -> Any:
    """From CuPy's pool: what launchers ask for is small, and not known beforehand."""
    cupy = border.require_cupy("scratch memory")
    with cupy.cuda.Device(device), _stream(stream):
        return cupy.cuda.alloc(nbytes)


class _Stream:
    """Somebody else's stream, by CUDA's protocol for Python."""

    def __init__(self, address: int):
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@functools.cache
def _stream(address: int) -> Any:
    return border.require_cupy("a stream").cuda.Stream.from_external(_Stream(address))


def _pack(shapes: _Shapes, returned: Collection[int]) -> tuple[list[int], int]:
    """Offsets in the workspace of all that is not returned (0 for that), and the workspace's size."""
    offsets, live, size = [0] * len(shapes.specs), dict[int, tuple[int, int]](), 0
    for number, begins in shapes.events:
        if number in returned:
            continue
        if not begins:
            del live[number]
            continue
        wanted = _rounded(shapes.specs[number].nbytes)
        start = 0
        for first, end in sorted(live.values()):
            if first - start >= wanted:
                break
            start = max(start, end)
        offsets[number], live[number] = start, (start, start + wanted)
        size = max(size, start + wanted)
    return offsets, size
