"""Calls on memory that the caller allocates, as XLA's runtime does for JAX under ``jit``.

`Layout` records in a dry run what a call allocates, which follows from shapes. Each array that the call
returns is an output of its own; temporaries share one workspace, where those that are not alive at the same
time overlap. `Layout.run` then launches at the addresses that it is given.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fp8moe.records import ArraySpec, DeviceArray
from fp8moe.runtime import checks
from fp8moe.runtime.call import NOWHERE, Call, NotPlannable, cuda_launch
from fp8moe.runtime.interop import NUMPY, Device, Framework, load_module, require_cupy
from fp8moe.runtime.launch_plan import DryRun
from fp8moe.runtime.record_trees import arrays_in, map_arrays

ALIGNMENT = 256  # bytes, of a temporary in the workspace, as of cudaMalloc


class Layout:
    """What ``function``, called with a list of arrays, allocates and returns.

    arguments: the arrays' shapes and dtypes. in_place: which of them the function adds to and returns.

    outputs: an `ArraySpec` of each array to allocate; the last one is the workspace, where one is needed.
    aliases: by the number of an argument that is changed in place, the number of its output.
    leaves: for each array of the result the number of its output, or ~i where it is argument i, unchanged.
    only_launches: whether the call copies nothing from the host, so that a CUDA graph can capture it.
    plans: what is launched, by device.
    """

    def __init__(
        self,
        function: Callable[[list[Any]], Any],
        arguments: Sequence[ArraySpec],
        in_place: Collection[int] = (),
    ):
        self._function, self._arguments = function, arguments
        self.plans: dict[int, DevicePlan] = {}
        result, call = _dry_run(function, arguments, NOWHERE)
        inputs, specs = len(arguments), [ArraySpec(*buffer) for buffer in call.buffers]
        buffers = [int(a.owner) for a in arrays_in(result)]
        self._result = map_arrays(lambda a: replace(a, owner=None), result)
        steps = call.steps.copy()
        del result
        made = dict.fromkeys(n for n in buffers if n >= inputs or n in in_place)  # each once, in order
        number_of = {n: i for i, n in enumerate(made)}
        self.outputs = [specs[n] for n in made]
        self.aliases = {n: i for n, i in number_of.items() if n < inputs}
        self.leaves = [number_of.get(n, ~n) for n in buffers]
        self.only_launches = not call.uploads and not checks.reads_values()
        offsets, size = _pack(steps, specs, made)
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
        # one plan, also where two threads make it at once: graphs captured with it use its scratch memory
        plan = self.plans.get(device) or self.plans.setdefault(device, self._make_plan(device))
        addresses = [address_of(arrays[i]) for i in plan.needed]
        if plan.steps is None or functools.reduce(operator.or_, addresses, 0) & 15:
            self._call([address_of(a) for a in arrays], device, stream)
            return
        launch = cuda_launch()
        with plan.one_at_a_time:
            if plan.scratch:
                addresses.append(plan.memory_on(device, stream))
            launch.run_steps(plan.steps, [], addresses, None, device, stream)

    def _make_plan(self, device: int) -> DevicePlan:
        """Record what is launched."""
        try:
            if checks.reads_values():
                raise NotPlannable
            _, call = _dry_run(self._function, self._arguments, device)
        except NotPlannable:  # every run calls the function
            return DevicePlan(None, [], 0)
        following, scratch = iter(self._places), 0
        places: list[tuple[int, int]] = []  # as `_places`, of this dry run; array -1 is scratch memory
        for number, buffer in enumerate(call.buffers):
            if number in call.scratch_buffers:
                places.append((-1, scratch))
                scratch += _rounded(ArraySpec(*buffer).nbytes)
            else:
                places.append(next(following))
        launches = [step for step in call.steps if type(step) is tuple]
        used = sorted({places[b][0] for *_, at in launches for _, b, _ in at} - {-1})
        index = {**{a: i for i, a in enumerate(used)}, -1: len(used)}
        steps = [
            (*launch, [(i, index[places[b][0]], places[b][1] + offset) for i, b, offset in at])
            for *launch, at in launches
        ]
        return DevicePlan(steps, used, scratch)

    def _call(self, addresses: list[int], device: int, stream: int) -> None:
        memory = _Memory((addresses[array] + offset for array, offset in self._places), stream)
        call = Call()
        call.device, call.framework = device, memory
        call.perform(self._function, [memory.empty(spec, device) for spec in self._arguments])


def result_specs(function: Callable[[list[Any]], Any], arguments: Sequence[ArraySpec]) -> Any:
    """Shapes and dtypes of what ``function`` returns when it is called with a list of such arrays. Dimensions
    may be symbols, as in torch.compile."""
    result, _ = _dry_run(function, arguments, NOWHERE)
    return map_arrays(lambda a: ArraySpec(a.shape, a.dtype), result)


def _dry_run(
    function: Callable[[list[Any]], Any], arguments: Sequence[ArraySpec], device: int
) -> tuple[Any, DryRun]:
    call = DryRun([(tuple(a.shape), a.dtype, 0) for a in arguments], device, NUMPY)
    return call.perform(function, list(call.inputs)), call


class DevicePlan:
    """What a call launches: ``steps``, on the addresses of the arrays ``needed`` and of scratch memory."""

    def __init__(self, steps: list[Any] | None, needed: list[int], scratch: int):
        """steps: None where they depend on values. scratch: size in bytes."""
        self.one_at_a_time = threading.Lock()
        self._memory: dict[int, Any] = {}  # by stream
        self.steps, self.needed, self.scratch = steps, needed, scratch

    def memory_on(self, device: int, stream: int) -> int:
        """The address of scratch memory. All calls on a stream share it, as they run one after the other, and
        so do the graphs captured from it; it lives as long as this plan."""
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


def _pack(steps: list[Any], specs: list[ArraySpec], returned: Collection[int]) -> tuple[list[int], int]:
    """The offset in the workspace of each allocation that is not returned (0 for others), and its size."""
    offsets, live, size = [0] * len(specs), dict[int, tuple[int, int]](), 0
    for step in steps:
        number = step if step >= 0 else ~step
        if number in returned:
            continue
        if step < 0:
            del live[number]
            continue
        wanted = _rounded(specs[number].nbytes)
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
