"""A call of the library as one step of a traced JAX program: a primitive, the string that describes the call,
and what XLA runs by that string.

The string names a function of the library and has its plain arguments, with numbers in the place of arrays
and their shapes, so that any process that has imported `fp8moe.adapters.jax_ops` can run the program.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import math
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import fp8moe
from fp8moe import Routed, RouterConfig
from fp8moe.activation import Activation
from fp8moe.adapters import jax_ffi
from fp8moe.call import as_codes
from fp8moe.grouped_gemm import SYNCHRONISING_BACKENDS, not_on_cpu
from fp8moe.moe import Saved
from fp8moe.record_trees import arrays_in, field_names
from fp8moe.records import (
    ArraySpec,
    MoEGrads,
    PermutationPlan,
    Permuted,
    Quantized,
    QuantTensor,
    SortedChunks,
    SwigluGrad,
)
from fp8moe.workspace import Layout

GRAPHS = os.environ.get("FP8MOE_JAX_GRAPHS", "1") != "0"
TARGETS = ("fp8moe_call", "fp8moe_call_in_graph")

# ---------------------------------------------------------------- descriptions

RECORDS = (
    *(QuantTensor, Quantized, PermutationPlan, Permuted, SortedChunks, Routed),
    *(SwigluGrad, MoEGrads, Saved),
)
_KINDS = {kind.__name__: kind for kind in (*RECORDS, Activation, RouterConfig)}
_functions: dict[str, Callable[..., Any]] = {}
_THIS_PROCESS = uuid.uuid4().hex


def name_function(function: Callable[..., Any]) -> str:
    """The name by which descriptions call it: the same in every process for what a module of the library
    has, else one that no other process knows."""
    name = f"{function.__module__}.{getattr(function, '__qualname__', '')}"
    if not name.startswith("fp8moe.") or "<" in name:
        name = f"{_THIS_PROCESS}.{len(_functions)}"
    _functions[name] = function
    return name


def describe(
    name: str, args: tuple[Any, ...], options: dict[str, Any], operands: list[Any], in_place: set[int]
) -> str:
    """operands: the arrays, each once. in_place: numbers of those that the function adds to."""
    number_of = {id(a): i for i, a in enumerate(operands)}
    description = {
        "fp8moe": fp8moe.__version__,
        "function": name,
        "args": _encode(args, number_of),
        "options": {key: _encode(options[key], number_of) for key in sorted(options)},
        "arrays": [[np.dtype(a.dtype).name, *a.shape] for a in operands],
        "in_place": sorted(in_place),
    }
    return json.dumps(description, separators=(",", ":"))


def _encode(value: Any, number_of: dict[int, int]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, tuple):
        return [_encode(v, number_of) for v in value]
    if type(value).__name__ in _KINDS:
        fields = {n: _encode(getattr(value, n), number_of) for n in field_names(type(value)) or ()}
        return {"record": type(value).__name__, **fields}
    return {"array": number_of[id(value)]}


def _decode(value: Any, arrays: Sequence[Any]) -> Any:
    if isinstance(value, list):
        return tuple(_decode(v, arrays) for v in value)
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    fields = {n: _decode(v, arrays) for n, v in value.items() if n != "record"}
    if "record" not in value:
        return fields
    record = object.__new__(_KINDS[value["record"]])
    record.__dict__.update(fields)
    return as_codes(record) if isinstance(record, QuantTensor) else record  # codes that came as float8


def _asked(value: Any, name: str) -> set[Any]:
    """What a call, or the forward of which it is the backward, asks of its products by this name."""
    if isinstance(value, dict):
        asked = value.get(name)
        return _asked([*value.values()], name) | ({asked} if asked else set())
    return set().union(*(_asked(part, name) for part in value)) if isinstance(value, list) else set()


class Described:
    """What a description says."""

    def __init__(self, text: str):
        description = json.loads(text)
        version, function = description["fp8moe"], description["function"]
        if version != fp8moe.__version__:
            raise RuntimeError(
                f"program: got one that was made with fp8moe {version}; wanted {fp8moe.__version__}, "
                "which is here; export it again"
            )
        if function not in _functions:
            raise RuntimeError(
                f"program: got a call of {function}; wanted a function that is known here; import "
                "the adapter that has it, or trace the program in this process"
            )
        self._function, self._description = _functions[function], description
        self.specs = [ArraySpec(tuple(shape), np.dtype(dtype)) for dtype, *shape in description["arrays"]]
        self.layout = Layout(self.run, self.specs, set(description["in_place"]))
        given = [description["args"], description["options"]]
        self.asked = {name: _asked(given, name) for name in ("backend", "num_sms")}
        synchronises = bool(self.asked["backend"] & SYNCHRONISING_BACKENDS)
        only_launches = self.layout.only_launches and not synchronises
        self.target = TARGETS[only_launches and GRAPHS]

    def run(self, arrays: Sequence[Any]) -> Any:
        args, options = (_decode(self._description[name], arrays) for name in ("args", "options"))
        return self._function(*args, **options)


# ---------------------------------------------------------------- the primitive


def call(name: str, args: tuple[Any, ...], options: dict[str, Any], leaves: list[Any], changed: Any) -> Any:
    """``name``'s function on traced arrays (or others), as a step of the program. leaves: all arrays among
    the arguments. changed: ids of those that the function adds to."""
    operands = list({id(a): a for a in leaves}.values())  # each once
    in_place = {i for i, a in enumerate(operands) if id(a) in changed}
    text = describe(name, args, options, operands, in_place)
    described = _described(text)
    layout = described.layout
    made = ()
    if layout.outputs:
        made = _call_p.bind(*operands, text=text)
    return layout.result(operands, made)


@functools.lru_cache(maxsize=4096)
def _described(text: str) -> Described:
    """Of a call that is being traced."""
    return Described(text)


_call_p = Primitive("fp8moe")
_call_p.multiple_results = True


@functools.lru_cache(maxsize=4096)
def _eager(text: str) -> Any:
    return jax.jit(functools.partial(_call_p.bind, text=text))


@_call_p.def_impl
def _run(*arrays: Any, text: str) -> Any:
    return _eager(text)(*arrays)


@_call_p.def_abstract_eval
def _results(*arrays: Any, text: str) -> Any:
    return [jax.core.ShapedArray(s.shape, s.dtype) for s in _described(text).layout.outputs]


def _batch(arrays: Any, axes: Any, *, text: str) -> Any:
    """One after the other."""
    batched = [jnp.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True) if axis is not None]

    def one(some: Any) -> Any:
        following = iter(some)
        given = (a if axis is None else next(following) for a, axis in zip(arrays, axes, strict=True))
        return _call_p.bind(*given, text=text)

    made = jax.lax.map(one, batched)
    return made, [0] * len(made)


def _refuse_gradient(tangents: Any, arrays: Any, *, text: str) -> Any:
    name = _name_in(text)
    if name.endswith("_backward") or name == "grouped_gemm_wgrad":
        instead = "it computes a gradient, which has none here; pass jax.lax.stop_gradient(...)"
    elif name in ("moe_forward", "grouped_gemm"):
        instead = "call jax_ops.moe_ffn, which has gradients"
    elif name.startswith("plan"):
        instead = "pass jax.lax.stop_gradient(...)"
    else:
        instead = (
            "FP8 codes have none: pass the float arrays to jax_ops.moe_ffn, which quantises them inside and "
            "has their gradients, or jax.lax.stop_gradient(...)"
        )
    raise TypeError(f"{name}: got arrays that are differentiated; wanted ones without a gradient; {instead}")


def _name_in(text: str) -> str:
    return str(json.loads(text)["function"]).rpartition(".")[2]


def _lower(context: Any, *operands: Any, text: str) -> Any:
    _refuse_partitioning(context.module_context.axis_context, text)
    described = _described(text)
    rule = jax.ffi.ffi_lowering(described.target, operand_output_aliases=dict(described.layout.aliases))
    return rule(context, *operands, call=text)


def _lower_on_cpu(context: Any, *operands: Any, text: str) -> Any:
    for name, values in _described(text).asked.items():
        for value in values:
            raise not_on_cpu(name, value)
    return _lower(context, *operands, text=text)


def _refuse_partitioning(context: Any, text: str) -> None:
    """XLA does not divide a custom call: it would do all of it on every device."""
    if hasattr(context, "manual_axes"):  # inside shard_map
        devices = math.prod(n for axis, n in context.mesh.shape.items() if axis not in context.manual_axes)
    else:
        devices = getattr(context, "num_devices", 1)
    if devices > 1:
        raise ValueError(
            f"{_name_in(text)}: got a program that XLA divides over {devices} devices; wanted the arrays of "
            "one device, since XLA would do the whole call on each; call it inside jax.shard_map over all "
            "axes of the mesh, or pass token_sharding to jax_ops.moe_ffn"
        )


ad.primitive_jvps[_call_p] = _refuse_gradient
batching.primitive_batchers[_call_p] = _batch
mlir.register_lowering(_call_p, _lower_on_cpu, platform="cpu")
mlir.register_lowering(_call_p, _lower, platform="cuda")

# ---------------------------------------------------------------- what XLA runs

# A place's layout has scratch memory, which no other may use at the same time; the address of the string is
# that of one place of a loaded program, and may serve another when that program is gone.
_places: dict[int, tuple[bytes, Described]] = {}


def places_called() -> int:
    """How many places of loaded programs have been called."""
    return len(_places)


_host_calls: list[bool] = []  # one of each call that is going on
_calls_done = threading.Event()  # since it was looked at


@atexit.register
def _finish() -> None:
    """On the host XLA's own threads make the calls. They cannot enter Python while it ends, and XLA waits for
    them: a process that ended with results still to come would hang."""
    if not _places:
        return
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # of the program, or of an array that was deleted meanwhile
            array.block_until_ready()
    while _calls_done.wait(timeout=0.1) or _host_calls:  # results that nobody holds
        _calls_done.clear()


def _execute(call: jax_ffi.Call) -> None:
    address, length = call.attribute
    text = ctypes.string_at(address, length)
    known = _places.get(address)
    if known is None or known[0] != text:
        known = _places[address] = text, _first_time(text.decode(), call)
    described = known[1]
    if call.device < 0:
        _on_host(described, call)
    else:
        described.layout.run(call.arguments, call.results, jax_ffi.address_of, call.device, call.stream)


def _first_time(text: str, call: jax_ffi.Call) -> Described:
    described = Described(text)
    for kind, specs, buffers in (
        ("arrays", described.specs, call.arguments),
        ("results", described.layout.outputs, call.results),
    ):
        shapes, wanted = [*map(jax_ffi.shape_of, buffers)], [tuple(s.shape) for s in specs]
        if shapes != wanted:
            raise RuntimeError(
                f"program: got {kind} of shapes {shapes} for a call that has {wanted} here; it was made by "
                "another version of fp8moe; trace it again"
            )
    return described


def _on_host(described: Described, call: jax_ffi.Call) -> None:
    _host_calls.append(True)
    try:
        _on_host_arrays(described, call)
    finally:
        _host_calls.pop()
        _calls_done.set()


def _on_host_arrays(described: Described, call: jax_ffi.Call) -> None:
    layout = described.layout
    results = [
        _host_array(b, spec, writable=True) for b, spec in zip(call.results, layout.outputs, strict=True)
    ]
    arrays = [
        results[layout.aliases[i]] if i in layout.aliases else _host_array(b, spec, writable=False)
        for i, (b, spec) in enumerate(zip(call.arguments, described.specs, strict=True))
    ]
    for n, made in zip(layout.leaves, arrays_in(described.run(arrays)), strict=True):
        if n >= 0 and n not in layout.aliases.values():
            np.copyto(results[n], made)


def _host_array(buffer: int, spec: ArraySpec, *, writable: bool) -> np.ndarray:
    if not spec.size:
        return np.empty(spec.shape, spec.dtype)
    memory: Any = (ctypes.c_char * spec.nbytes).from_address(jax_ffi.address_of(buffer))
    array: np.ndarray = np.ndarray(spec.shape, spec.dtype, memory)
    array.flags.writeable = writable
    return array


for _number, _target in enumerate(TARGETS):
    jax_ffi.register(_target, _execute, command_buffer=bool(_number))
