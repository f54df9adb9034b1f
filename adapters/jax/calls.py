"""Calls of the library in traced JAX programs: a primitive, the string that describes a call, and the handler
that XLA runs for it.

The string names a function of the library and contains its static arguments; arrays are replaced by their
indices, and listed with shapes and dtypes. Any process that has imported `fp8moe.jax` can run
the program.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import functools
import json
import math
import os
import threading
import time
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
from fp8moe.adapters.jax import ffi as jax_ffi
from fp8moe.layer.options import LayerOptions
from fp8moe.layer.saved import Saved
from fp8moe.ops.grouped_gemm import SYNCHRONISING_BACKENDS, not_on_cpu
from fp8moe.records import (
    ArraySpec,
    MoEGrads,
    Options,
    PermutationPlan,
    Permuted,
    Quantized,
    QuantTensor,
    SortedChunks,
    SwigluGrad,
)
from fp8moe.runtime.call import as_codes
from fp8moe.runtime.interop.base import dtype_named
from fp8moe.runtime.interop.jax import check_result
from fp8moe.runtime.record_trees import arrays_in, field_names, map_arrays
from fp8moe.runtime.recording import GivenMemory

GRAPHS = os.environ.get("FP8MOE_JAX_GRAPHS", "1") != "0"
TARGETS = ("fp8moe_call", "fp8moe_call_in_graph")

# ---------------------------------------------------------------- descriptions

RECORDS = (
    *(QuantTensor, Quantized, PermutationPlan, Permuted, SortedChunks, Routed),
    *(SwigluGrad, MoEGrads, Saved),
)
_KINDS = {kind.__name__: kind for kind in (*RECORDS, Activation, LayerOptions, RouterConfig)}
_functions: dict[str, Callable[..., Any]] = {}
_THIS_PROCESS = uuid.uuid4().hex


def name_function(function: Callable[..., Any]) -> str:
    """Registers a function for descriptions and returns its name: for a function of a module of the library
    the same name in every process, for any other function a name that is valid in this process only."""
    name = f"{function.__module__}.{getattr(function, '__qualname__', '')}"
    if not name.startswith("fp8moe.") or "<" in name:
        name = f"{_THIS_PROCESS}.{len(_functions)}"
    _functions[name] = function
    return name


def describe(
    name: str, args: tuple[Any, ...], options: dict[str, Any], changed: set[int]
) -> tuple[str, list[Any]]:
    """Serialises a call and lists its arrays. changed: ids of the arrays that the function adds to. Such an
    array is listed as often as it is passed, because each sum needs its own memory; any other array once."""
    operands: list[Any] = []
    number_of: dict[int, int] = {}

    def number(array: Any) -> int:
        if id(array) in changed or id(array) not in number_of:
            number_of[id(array)] = len(operands)
            operands.append(array)
        return number_of[id(array)]

    description = {
        "fp8moe": fp8moe.__version__,
        "function": name,
        "args": _encode(args, number),
        "options": {key: _encode(options[key], number, key) for key in sorted(options)},
    }
    verb = name.rpartition(".")[2]
    for a in operands:
        dtype_named(str(a.dtype), verb)
        if not all(isinstance(n, int) for n in a.shape):
            raise TypeError(
                f"{verb}: got an array of symbolic shape {a.shape}; wanted numbers; call "
                "jax.export.export for each shape"
            )
    description["arrays"] = [[np.dtype(a.dtype).name, *a.shape] for a in operands]
    description["in_place"] = [i for i, a in enumerate(operands) if id(a) in changed]
    return json.dumps(description, separators=(",", ":")), operands


def _encode(value: Any, number: Callable[[Any], int], name: str = "an argument") -> Any:
    """A value as JSON. number: returns the index of an array. name: of the argument, for errors."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value)
    if isinstance(value, tuple):
        return [_encode(v, number) for v in value]
    if isinstance(value, (list, set, frozenset)):
        values = value if isinstance(value, list) else sorted(value)  # the same text in every process
        return {"list": [_encode(v, number) for v in values]}
    if isinstance(value, (type, np.dtype)):
        raise TypeError(f"{name}: got {value!r}; wanted the name of the type, such as 'float32'")
    if type(value).__name__ in _KINDS:
        fields = {n: _encode(getattr(value, n), number) for n in field_names(type(value)) or ()}
        return {"record": type(value).__name__, **fields}
    return {"array": number(value)}


def _decode(value: Any, arrays: Sequence[Any]) -> Any:
    if isinstance(value, list):
        return tuple(_decode(v, arrays) for v in value)
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    if "list" in value:
        return [_decode(v, arrays) for v in value["list"]]
    fields = {n: _decode(v, arrays) for n, v in value.items() if n != "record"}
    if "record" not in value:
        return fields
    kind: Any = _KINDS[value["record"]]
    if issubclass(kind, Options):
        return kind(**fields)
    record = object.__new__(kind)
    record.__dict__.update(fields)
    # quantised tensors may be given as float8
    return as_codes(record) if isinstance(record, QuantTensor) else record


def _option_values(value: Any, name: str) -> set[Any]:
    """Values of an option (``backend`` or ``num_sms``) in a call, or in the forward of a backward call."""
    if isinstance(value, dict):
        option = value.get(name)
        return _option_values([*value.values()], name) | ({option} if option else set())
    return set().union(*(_option_values(part, name) for part in value)) if isinstance(value, list) else set()


class Described:
    """A parsed description: function, array specs, memory and XLA target."""

    def __init__(self, text: str):
        description = json.loads(text)
        version, function = description["fp8moe"], description["function"]
        if version != fp8moe.__version__:
            raise RuntimeError(
                f"program: got one that was made with fp8moe {version}; wanted {fp8moe.__version__}, the "
                "installed version; export it again"
            )
        if function not in _functions:
            raise RuntimeError(
                f"program: got a call of {function}; wanted a registered function; import the adapter that "
                "defines it, or trace the program in this process"
            )
        # not a method: the memory would refer to this object, and with it its scratch memory would
        # outlive the program until garbage is collected
        self.run = functools.partial(_call_function, _functions[function], description)
        self.specs = [ArraySpec(tuple(shape), np.dtype(dtype)) for dtype, *shape in description["arrays"]]
        self.memory = GivenMemory(self.run, self.specs, set(description["in_place"]))
        arguments = [description["args"], description["options"]]
        self.options = {name: _option_values(arguments, name) for name in ("backend", "num_sms")}
        synchronises = bool(self.options["backend"] & SYNCHRONISING_BACKENDS)
        only_launches = self.memory.only_launches and not synchronises
        self.target = TARGETS[only_launches and GRAPHS]


def _call_function(function: Callable[..., Any], description: dict[str, Any], arrays: Sequence[Any]) -> Any:
    args, options = (_decode(description[name], arrays) for name in ("args", "options"))
    return function(*args, **options)


# ---------------------------------------------------------------- the primitive


def call(name: str, args: tuple[Any, ...], options: dict[str, Any], changed: set[int]) -> Any:
    """Calls the function ``name`` on traced (or concrete) arrays, as one operation of the program. changed:
    ids of the arrays that the function adds to."""
    args, options, changed = _as_jax(args, options, changed)
    text, operands = describe(name, args, options, changed)
    described = _described(text)
    memory = described.memory
    outputs = ()
    operands = list(vary_alike(*operands))
    for spec in memory.outputs:
        check_result(spec)
    if memory.outputs:
        outputs = _call_p.bind(*operands, text=text)
    return memory.result(operands, outputs)


def _as_jax(
    args: tuple[Any, ...], options: dict[str, Any], changed: set[int]
) -> tuple[tuple[Any, ...], dict[str, Any], set[int]]:
    """The call with jax.Arrays in place of NumPy's, whose 64-bit types JAX replaces by 32-bit ones unless x64
    is enabled: the description must have the dtypes that the program has."""
    made: dict[int, jax.Array] = {}

    def converted(array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        if id(array) not in made:
            made[id(array)] = jnp.asarray(array)
        return made[id(array)]

    args = map_arrays(converted, args)
    options = {key: map_arrays(converted, value) for key, value in options.items()}
    return args, options, changed | {id(new) for old, new in made.items() if old in changed}


def vary_alike(*values: Any) -> tuple[Any, ...]:
    """Arrays (or records of arrays) that all vary over the same axes of a ``jax.shard_map`` with
    ``check_vma=True``, as JAX does for the operands of its own operations: results vary over every axis over
    which an operand does, and the gradient of an operand that varies over fewer is summed over the others.
    Every ``custom_vjp`` needs such arrays, because its backward computes gradients that vary alike."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return values
    axes = frozenset().union(*map(_varying_axes, jax.tree.leaves(values)))

    def vary(array: Any) -> Any:
        missing = tuple(a for a in manual if a in axes - _varying_axes(array))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    varied: tuple[Any, ...] = jax.tree.map(vary, values)
    return varied


def _varying_axes(array: Any) -> frozenset[Any]:
    axes: frozenset[Any] = jax.typeof(array).manual_axis_type.varying
    return axes


@functools.lru_cache(maxsize=4096)
def _described(text: str) -> Described:
    """The description of a call that is being traced."""
    return Described(text)


_call_p = Primitive("fp8moe")
_call_p.multiple_results = True


@functools.lru_cache(maxsize=4096)
def _eager(text: str) -> Any:
    return jax.jit(functools.partial(_call_p.bind, text=text))


@_call_p.def_impl
def _run(*arrays: Any, text: str) -> Any:
    with jax.disable_jit(False):  # otherwise `_eager` would call this again
        return _eager(text)(*arrays)


@_call_p.def_abstract_eval
def _results(*arrays: Any, text: str) -> Any:
    varying: dict[str, Any] = {}
    # results vary as operands do: see `vary_alike`
    if arrays and jax.sharding.get_abstract_mesh().manual_axes:
        mesh, axes = arrays[0].sharding.mesh, arrays[0].manual_axis_type
        if axes.varying:
            varying = {"sharding": jax.NamedSharding(mesh, jax.P()), "manual_axis_type": axes}
    return [jax.core.ShapedArray(s.shape, s.dtype, **varying) for s in _described(text).memory.outputs]


def _batch(arrays: Any, axes: Any, *, text: str) -> Any:
    """Calls the function for one batch element after another."""
    batched = [jnp.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True) if axis is not None]
    shared = [a for a, axis in zip(arrays, axes, strict=True) if axis is None]
    step = _one_element(text, tuple(axis is not None for axis in axes))
    _, outputs = jax.lax.scan(step, shared, batched)
    return outputs, [0] * len(outputs)


@functools.lru_cache(maxsize=4096)
def _one_element(text: str, is_batched: tuple[bool, ...]) -> Any:
    """A step of `jax.lax.scan` that calls the function for one batch element. It is the same object in every
    call, so that JAX finds the compiled loop again."""

    def step(shared: Any, elements: Any) -> Any:
        of_all, own = iter(shared), iter(elements)
        operands = (next(own if batched else of_all) for batched in is_batched)
        return shared, _call_p.bind(*operands, text=text)

    return step


def _refuse_gradient(tangents: Any, arrays: Any, *, text: str) -> Any:
    name = _name_in(text)
    if name.endswith("_backward") or name == "grouped_gemm_wgrad":
        instead = "it computes a gradient, and has no second derivative; pass jax.lax.stop_gradient(...)"
    elif name in ("moe_forward", "grouped_gemm", "permute_gemm"):
        instead = "call fp8moe.jax.moe_experts, which has gradients, but no second derivatives"
    elif name.startswith("plan"):
        instead = "pass jax.lax.stop_gradient(...)"
    else:
        instead = (
            "FP8 codes have none: pass the float arrays to fp8moe.jax.moe_experts, which quantises them and "
            "has their gradients, or jax.lax.stop_gradient(...)"
        )
    raise TypeError(f"{name}: got arrays that are differentiated; wanted ones without a gradient; {instead}")


def _name_in(text: str) -> str:
    return str(json.loads(text)["function"]).rpartition(".")[2]


def _lower(context: Any, *operands: Any, text: str) -> Any:
    _refuse_partitioning(context.module_context.axis_context, text)
    described = _described(text)
    rule = jax.ffi.ffi_lowering(described.target, operand_output_aliases=dict(described.memory.aliases))
    return rule(context, *operands, call=text)


def _lower_on_cpu(context: Any, *operands: Any, text: str) -> Any:
    for name, values in _described(text).options.items():
        for value in values:
            raise not_on_cpu(name, value)
    return _lower(context, *operands, text=text)


def _refuse_partitioning(context: Any, text: str) -> None:
    """XLA cannot partition a custom call: every device would compute the whole call."""
    if hasattr(context, "manual_axes"):  # inside shard_map
        devices = math.prod(n for axis, n in context.mesh.shape.items() if axis not in context.manual_axes)
    else:
        devices = getattr(context, "num_devices", 1)
    if devices > 1:
        raise ValueError(
            f"{_name_in(text)}: got a program that XLA partitions over {devices} devices; wanted arrays of "
            "one device, because XLA would run the whole call on each; call it inside jax.shard_map over all "
            "axes of the mesh, or pass token_sharding to fp8moe.jax.moe_experts"
        )


ad.primitive_jvps[_call_p] = _refuse_gradient
batching.primitive_batchers[_call_p] = _batch
mlir.register_lowering(_call_p, _lower_on_cpu, platform="cpu")
mlir.register_lowering(_call_p, _lower, platform="cuda")

# ---------------------------------------------------------------- the handler that XLA runs

# Each call site has its own description, because its scratch memory must not be shared. It
# lives as long as the site: a CUDA graph captured of the program uses that memory.


def places_called() -> int:
    """Number of call sites of loaded programs that have been called."""
    return sum("described" in site.kept for site in jax_ffi.live_sites())


_calling: set[int] = set()  # the threads that run calls
_last_end = 0.0  # when a call ended, by time.monotonic()


@atexit.register
def _finish() -> None:
    """On the host, calls run in XLA's threads. These cannot enter Python during interpreter shutdown, and XLA
    waits for them: a process that exits before its results are ready would hang."""
    if not jax_ffi.live_sites():
        return
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # errors of the program, or of an array deleted meanwhile
            array.block_until_ready()
    # results that no array refers to; what this thread has called was ended, maybe by an interrupt
    start = time.monotonic()
    while _calling - {threading.get_ident()} or time.monotonic() - max(start, _last_end) < 0.1:
        time.sleep(0.01)


def _execute(call: jax_ffi.Call) -> None:
    described = call.site.kept.get("described")
    if described is None:  # one description, also where two devices call at once: each may capture a graph
        described = call.site.kept.setdefault("described", _checked_description(call))
    if call.device < 0:
        _run_on_host(described, call)
    else:
        described.memory.run(call.arguments, call.results, jax_ffi.address_of, call.device, call.stream)


def _checked_description(call: jax_ffi.Call) -> Described:
    described = Described(call.site.text.decode())
    for kind, specs, buffers in (
        ("arrays", described.specs, call.arguments),
        ("results", described.memory.outputs, call.results),
    ):
        given = [(jax_ffi.dtype_of(b), jax_ffi.shape_of(b)) for b in buffers]
        expected = [(np.dtype(s.dtype).name, tuple(s.shape)) for s in specs]
        if given != expected:
            got, wanted = (", ".join(f"{dtype}{[*shape]}" for dtype, shape in a) for a in (given, expected))
            raise RuntimeError(
                f"program: got {kind} {got}; wanted {wanted}, as in this version of fp8moe; trace the "
                "program again"
            )
    return described


def _run_on_host(described: Described, call: jax_ffi.Call) -> None:
    global _last_end
    thread = threading.get_ident()
    try:
        _calling.add(thread)
        # not counted by `fp8moe.trace`: XLA calls this in the caller's thread or in another one
        contextvars.Context().run(_run_with_host_arrays, described, call)
        _last_end = time.monotonic()
    finally:
        _calling.discard(thread)


def _run_with_host_arrays(described: Described, call: jax_ffi.Call) -> None:
    memory = described.memory
    results = [
        _host_array(b, spec, writable=True) for b, spec in zip(call.results, memory.outputs, strict=True)
    ]
    arrays = [
        results[memory.aliases[i]] if i in memory.aliases else _host_array(b, spec, writable=False)
        for i, (b, spec) in enumerate(zip(call.arguments, described.specs, strict=True))
    ]
    for n, made in zip(memory.leaves, arrays_in(described.run(arrays)), strict=True):
        if n >= 0 and n not in memory.aliases.values():
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
