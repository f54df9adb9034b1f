"""A plan of launches as arrays, and the loop that has the driver make them.

What a plan launches lies in memory as the driver reads it: a CUlaunchConfig for each kernel, the kernels'
parameters, the shapes of tensor maps. A call only adds the addresses of its arrays, in a copy of its own, so
that threads share a plan. Numba compiles the loop: between two launches no Python runs, and the GIL is
released. With a driver that does nothing twelve launches take 1.4 us, and 250 us interpreted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from fp8moe.kernels_cuda.runtime import driver
from fp8moe.runtime.loops import Loop

#: CUlaunchConfig, whose stream is not known yet; then the kernel's handle, or 0 for a memset; the number of
#: its first word among all parameters; how many tensor maps, and then words of 8 bytes, its parameters are.
#: A memset has three words: address, byte, number of bytes
STEP = np.dtype(
    [
        *(("grid", "u4", 3), ("block", "u4", 3), ("shared", "u4")),
        *(("stream", "i8"), ("attributes", "i8"), ("num_attributes", "u4")),
        *(("kernel", "i8"), ("parameters", "i8"), ("maps", "i8"), ("words", "i8")),
    ],
    align=True,
)
#: a word that the address of an array is added to
PLACE = np.dtype([("word", "i8"), ("array", "i8")])
#: what cuTensorMapEncodeTiled reads: dimensions (columns, rows), bytes from row to row, rows and columns of a
#: box, strides of its elements; then the word at which the map is made, which first holds the address of the
#: mapped bytes
TENSOR_MAP = np.dtype(
    [("dimensions", "u8", 2), ("stride", "u8"), ("box", "u4", 2), ("strides", "u4", 2), ("word", "i8")]
)
DIMENSIONS, STRIDE, BOX, STRIDES = (TENSOR_MAP.fields[name][1] for name in TENSOR_MAP.names[:4])  # type: ignore[index]
STEP_BYTES, SHAPE_BYTES = STEP.itemsize, TENSOR_MAP.itemsize
MAP_BYTES = 128  # of a CUtensorMap, at a multiple of 64 bytes
#: CU_TENSOR_MAP_DATA_TYPE_UINT8, two dimensions
BYTES = 0, 2
#: CU_TENSOR_MAP_INTERLEAVE_NONE, SWIZZLE_128B, L2_PROMOTION_L2_256B; zeros outside: FLOAT_OOB_FILL_NONE
SWIZZLED = 0, 3, 3, 0
#: CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, true
_DEPENDENT_LAUNCH = np.array([6, 1, *[0] * 7], np.int64)
DEPENDENT_LAUNCH = _DEPENDENT_LAUNCH.ctypes.data


class Step(NamedTuple):
    """A launch of a kernel, or a memset where ``kernel`` is None.

    parameters: 8 bytes for each value after the tensor maps; of a memset address, byte and number of bytes.
    maps: for each tensor map the address of bytes, their rows and columns, and the rows of a box.
    places: where the address of an array is added: number among tensor maps and values, array, and offset in
    bytes.
    """

    kernel: Any
    grid: tuple[int, int]
    block: int
    shared: int
    parameters: bytes
    maps: Sequence[tuple[int, int, int, int]] = ()
    places: Sequence[tuple[int, int, int]] = ()

    @property
    def name(self) -> str:
        return "memset" if self.kernel is None else str(self.kernel.name)


# ---------------------------------------------------------------- the loop


def call(function: int, arguments: tuple[Any, ...]) -> int:
    """Call a function of C. Each argument takes a register or 8 bytes of the stack, of which the function
    reads as much as its parameter has."""
    return _prototype(len(arguments))(int(function))(*map(int, arguments))  # type: ignore[no-any-return]


@cache
def _prototype(arguments: int) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * arguments)


@intrinsic
def _compiled_call(typing: Any, function: Any, arguments: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        words = [builder.extract_value(values[1], n) for n in range(len(arguments))]
        status = context.get_value_type(types.int32)
        kind = ir.FunctionType(status, [word.type for word in words])
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), words)

    return types.int32(types.int64, types.UniTuple(types.int64, len(arguments))), generate


@overload(call)
def _call(function, arguments):  # type: ignore[no-untyped-def]
    return lambda function, arguments: _compiled_call(function, arguments)  # type: ignore[call-arg]


def loop(steps, places, maps, parameters, addresses, stream, launch, fill, encode):  # type: ignore[no-untyped-def]
    """Make the launches of a plan on a stream. addresses: of its arrays. launch, fill, encode: those of
    cuLaunchKernelEx, cuMemsetD8Async and cuTensorMapEncodeTiled. Returns the driver's status, and the number
    of the step that it is of; of a tensor map ~number."""
    steps = steps.copy()
    words = np.empty(len(parameters) + 7, np.int64)
    words = words[-np.int64(words.ctypes.data) % 64 // 8 :]  # from a multiple of 64 bytes on
    words[: len(parameters)] = parameters
    for i in range(len(places)):
        words[places[i]["word"]] += addresses[places[i]["array"]]
    start = np.int64(words.ctypes.data)
    for i in range(len(maps)):
        word, at = maps[i]["word"], np.int64(maps.ctypes.data) + i * SHAPE_BYTES
        shape = at + DIMENSIONS, at + STRIDE, at + BOX, at + STRIDES
        status = call(encode, (start + 8 * word, *BYTES, words[word], *shape, *SWIZZLED))
        if status != 0:
            return status, ~i
    pointers = np.empty(len(parameters), np.int64)
    for i in range(len(steps)):
        step, first = steps[i], steps[i]["parameters"]
        if step["kernel"] == 0:
            status = call(fill, (words[first], words[first + 1], words[first + 2], stream))
        else:
            step["stream"] = stream
            at = start + 8 * first
            for n in range(step["maps"] + step["words"]):
                pointers[n] = at
                at += MAP_BYTES if n < step["maps"] else 8
            config = np.int64(steps.ctypes.data) + i * STEP_BYTES
            status = call(launch, (config, step["kernel"], np.int64(pointers.ctypes.data), 0))
        if status != 0:
            return status, i
    return 0, 0


_NOTHING = *(np.empty(0, dtype) for dtype in (STEP, PLACE, TENSOR_MAP, np.int64)), np.empty(0, np.int64)
LOOP = Loop(loop, *_NOTHING, 0, 0, 0, 0)


# ---------------------------------------------------------------- plans


class Plan:
    """Launches and memsets of a device, made at addresses that `run` is given. It never changes."""

    def __init__(
        self,
        steps: Sequence[Step],
        device: int,
        place_of: Callable[[int], tuple[int, int]] = lambda array: (array, 0),
    ):
        """place_of: for an array of the steps, the number of the address that is given to `run`, and the
        offset in bytes from it."""
        self.steps = tuple(steps)
        rows, places, maps, parameters = list[Any](), list[Any](), list[Any](), bytearray()
        attributes = DEPENDENT_LAUNCH, driver.has_dependent_launch(device)
        for step in steps:
            if step.maps:
                parameters += bytes(-len(parameters) % 64)
            first, after = len(parameters), len(parameters) + MAP_BYTES * len(step.maps)
            for address, n, columns, box in step.maps:
                maps.append(((columns, n), columns, (128, box), (1, 1), len(parameters) // 8))
                parameters += address.to_bytes(8, "little").ljust(MAP_BYTES, b"\0")
            parameters += step.parameters
            for i, array, offset in step.places:
                number, start = place_of(array)
                at = first + MAP_BYTES * i if i < len(step.maps) else after + 8 * (i - len(step.maps))
                parameters[at : at + 8] = (start + offset).to_bytes(8, "little")
                places.append((at // 8, number))
            handle = 0 if step.kernel is None else step.kernel.ptr
            config = (*step.grid, 1), (step.block, 1, 1), step.shared, 0, *attributes
            rows.append((*config, handle, first // 8, len(step.maps), len(step.parameters) // 8))
        tables = np.array(rows, STEP), np.array(places, PLACE), np.array(maps, TENSOR_MAP)
        self._arrays = *tables, np.array(np.frombuffer(parameters, np.int64))

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on a stream of the current device."""
        status, number = LOOP.run(*self._arrays, np.array(addresses, np.int64), stream, *driver.functions())
        if status:
            raise self._error(status, number)

    def _error(self, status: int, number: int) -> Exception:
        if number < 0:
            (columns, rows), *_ = self._arrays[2][~number]
            return RuntimeError(f"cuTensorMapEncodeTiled({rows} x {columns}): error {status}")
        step = self.steps[number]
        function = "cuMemsetD8Async" if step.kernel is None else "cuLaunchKernelEx"
        return RuntimeError(f"{function}: error {status} ({step.name})")
