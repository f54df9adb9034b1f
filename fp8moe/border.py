"""The border: arrays of any framework come in as raw buffers, results leave as the caller's kind.

A raw buffer is a `numpy.ndarray` on the CPU and a `DeviceArray` on CUDA. Nothing is copied on the way in.
A framework is never imported here: when one of its arrays arrives, it is in `sys.modules` already.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from fp8moe import checks, dlpack, replay, tracing
from fp8moe.formats import BFLOAT16, FLOAT8_DTYPES
from fp8moe.records import (
    ArraySpec,
    DeviceArray,
    PermutationPlan,
    Quantized,
    QuantTensor,
    arrays_in,
    field_names,
    is_metadata,
    map_arrays,
)

RawArray = np.ndarray | DeviceArray
Device = str | int  # "cpu", or the ordinal of a CUDA device
NOWHERE = -1  # the device of arrays that are shapes only (`fp8moe.placed`): nothing is computed there


class BackendUnavailable(RuntimeError):
    """The device an array lies on has no working backend here; the message says what to install."""


def enter(**values: Any) -> Call:
    """Take the arguments of one public call. The first array decides what kind the results are.

    Raises TypeError for what is not an array or lies on another device than the first, ValueError for
    an array that is not C-contiguous, or for ``out``, which is written to, that is read-only.
    """
    first, *_ = values
    if values[first] is None:
        raise TypeError(f"{first}: got None; wanted an array")
    call = Call()
    call.args = SimpleNamespace(**{k: call._take(k, v) for k, v in values.items()})
    if values.get("out") is not None:
        map_arrays(_require_writable, values["out"], "out")
    return call


def replayed(function: Any) -> Any:
    """A public function whose calls on CUDA are remembered by what came in, from the second one on, and then
    done again without what only shapes decide (see `fp8moe.replay`).

    A call that looked at values, or that refused something, is not remembered.
    """
    parameters = list(inspect.signature(function).parameters)
    place_of_out = parameters.index("out") if "out" in parameters else None

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        first = type(arguments[0]) if arguments else None
        if first is np.ndarray or replay.current.recorder is not None:
            return function(*arguments, **options)
        if place_of_out is not None:
            out = arguments[place_of_out] if len(arguments) > place_of_out else options.get("out")
            if out is not None and not _always_writable(out):
                return function(*arguments, **options)
        given = (*arguments, *options.values())
        call = Call()
        memory: list[DeviceArray] = []
        try:
            what: list[Any] = []
            for v in given:
                kind = type(v)
                if kind in replay.PLAIN:  # most are; a call of `signature` for each takes a microsecond
                    what.append(v)
                    continue
                if kind is bool or kind is float:
                    what.append((kind, v))
                    continue
                family = _family_of_type(kind)  # type: ignore[arg-type]
                if family is not None:  # and so do `_take` and `signature` for an array
                    array = family.view(v, "")
                    if type(array) is not DeviceArray:
                        return function(*arguments, **options)
                    call._locate("", array.device, family)
                    memory.append(array)
                    what.append((array.shape, array.dtype, array.ptr & 15))
                    continue
                if not is_metadata(v):
                    v = call._take("", v)
                    if call.device == "cpu":
                        return function(*arguments, **options)
                what.append(replay.signature(v, memory))
            if checks.LOOK_AT_VALUES:
                return function(*arguments, **options)
            key = (function, call.device, len(arguments), *options, *what)
            recipe = _recipes.get(key, 0)
        except Exception:  # the function itself says what is wrong
            return function(*arguments, **options)
        if type(recipe) is replay.Recipe:
            if recipe.written and not recipe.apart(memory):
                return function(*arguments, **options)
            return call._replay(recipe, given, memory)
        if recipe is None:
            return function(*arguments, **options)
        if len(_recipes) >= MOST_RECIPES:
            _recipes.clear()
        _recipes[key] = seen = recipe + 1
        if seen < 2:  # shapes that come once are not worth it
            return function(*arguments, **options)
        recorder = replay.current.recorder = replay.Recorder([(a.ptr, a.nbytes) for a in memory])
        try:
            result = function(*arguments, **options)
        finally:
            replay.current.recorder = None
        _recipes[key] = recipe = recorder.recipe(result, given)
        if recipe is not None:
            recipe.written = _written([*parameters[: len(arguments)], *options], given)
            recipe.sizes = [a.nbytes for a in memory]
        return result

    return call


def _written(names: list[str], given: tuple[Any, ...]) -> range:
    """Which of a call's arrays, in the order of `replay.signature`, are those of ``out``."""
    if "out" not in names:
        return range(0)
    ends = []
    found: list[DeviceArray] = []
    for value in given[: names.index("out") + 1]:
        ends.append(len(found))
        if not is_metadata(value):
            replay.signature(Call()._take("", value), found)
    return range(ends[-1], len(found))


#: by what came in: how often so far, or how to do it again, or None where that cannot be
_recipes: dict[Any, Any] = {}
MOST_RECIPES = 512


class Call:
    """One call through the border: ``args`` are raw, `empty` allocates, `run` computes, `leave` returns."""

    args: SimpleNamespace

    def __init__(self) -> None:
        self.device: Device = "cpu"
        self.family: Family = NUMPY
        self._first: str | None = None

    def _take(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        if field_names(type(value)) is None:
            if isinstance(value, tuple) and not (value and is_metadata(value)):
                return map_arrays(self._take_array, value, name)
            return self._take_array(name, value)
        if not isinstance(value, (QuantTensor, Quantized, PermutationPlan)):
            raise _no_array(value, name)
        remembered = value.__dict__.get("_raw")
        if remembered is not None and _is_unchanged(value, remembered):
            raw, device, family, _ = remembered
            self._locate(name, device, family)
            return raw
        value = map_arrays(self._take_array, value, name)
        return _as_codes(value) if isinstance(value, QuantTensor) else value

    def _take_array(self, name: str, array: Any) -> RawArray:
        family = family_of(array, name)
        raw = family.view(array, name)
        if isinstance(raw, np.ndarray):
            self._locate(name, "cpu", family.beside(array) if self._first is None else family)
        else:
            self._locate(name, raw.device, family)
        return raw

    def _locate(self, name: str, device: Device, family: Family) -> None:
        """The first array says where all lie."""
        if self._first is None:
            self.device, self.family, self._first = device, family, name
        elif device != self.device:
            raise TypeError(
                f"{name}: got an array on {describe(device)}; wanted {describe(self.device)}, where "
                f"{self._first} lies; move one of them first"
            )
        elif family is not self.family and device != "cpu":
            before, after = family.stream(device), self.family.stream(device)
            if before != after:
                order(before, after, int(device))

    def empty(self, spec: Any) -> Any:
        """Allocate every `ArraySpec` in a record of them, by the caller's framework on CUDA."""
        if type(spec) is ArraySpec:
            return self._allocate(spec)
        names = field_names(type(spec))
        if names is None:
            return tuple(self.empty(s) for s in spec) if isinstance(spec, tuple) else spec
        new = object.__new__(type(spec))
        for name in names:
            value = getattr(spec, name)
            new.__dict__[name] = value if is_metadata(value) else self.empty(value)
        return new

    def _allocate(self, spec: ArraySpec) -> RawArray:
        raw: Any = self.family.empty(spec, self.device)
        if replay.current.recorder is not None:
            replay.current.recorder.allocated(spec, False, raw)
        return raw

    def _scratch(self, spec: ArraySpec, device: int) -> RawArray:
        raw: Any = self.family.scratch(spec, device)
        if replay.current.recorder is not None:
            replay.current.recorder.allocated(spec, True, raw)
        return raw

    def _replay(self, recipe: replay.Recipe, given: tuple[Any, ...], memory: list[Any]) -> Any:
        for spec, scratch in recipe.allocations:
            memory.append((self.family.scratch if scratch else self.family.empty)(spec, self.device))
        if recipe.steps:
            with self._on_device():
                replay.play(recipe.steps, [array.ptr for array in memory])
        if tracing.active():
            for note, what in recipe.traced:
                note(what)
        return recipe.result(self, given, memory)

    def run(self, room: str, verb: str, *args: Any, out: Any, **options: Any) -> None:
        """Have the backend of this device fill ``out``. Empty outputs return here, and only here."""
        if self.device == NOWHERE:
            return
        backend = load_backend(self.device, room)
        if _is_empty(out):
            return
        tracing.record_launch(verb)
        if self.device == "cpu":
            context = _module("fp8moe.reference.numerics").DefaultArithmetic()
        else:
            context = self._on_device()
        with context:
            getattr(backend, verb)(*args, out=out, **options)

    def _on_device(self) -> Any:
        """What is launched in this context runs on the stream that the caller's arrays are ordered on."""
        return launching_on(int(self.device), self.family.stream(self.device), self._scratch)

    def leave(self, out: Any) -> Any:
        """Raw buffers back to the caller's kind of array; on CUDA, records remember their raw form."""
        left = self._leave(out)
        if replay.current.recorder is not None and not is_metadata(left):
            replay.current.recorder.left.append((left, out))
        return left

    def _leave(self, out: Any) -> Any:
        if is_metadata(out):
            return out
        if isinstance(out, tuple):
            return tuple(self._leave(v) for v in out)
        names = field_names(type(out))
        if names is None:
            return self.family.wrap(out)
        new = object.__new__(type(out))
        for name in names:
            value = getattr(out, name)
            if type(value) is not DeviceArray:  # those are made when they are asked for: Record.__getattr__
                new.__dict__[name] = self._leave(value)
        if self.device != "cpu":
            out.__dict__["_fits"] = True  # its arrays came from one spec: see checks.fits
            names = tuple(n for n in names if not is_metadata(getattr(out, n)))
            new.__dict__["_raw"] = (out, self.device, self.family, names)
        return new

    def upload(self, host: np.ndarray) -> RawArray:
        """Bring a small host array to the device of this call, on its stream."""
        if self.device == "cpu":
            return host
        raw = self.family.empty(ArraySpec(host.shape, host.dtype), self.device)
        if self.device == NOWHERE:
            _memory.get().uploads = True
        else:
            with self._on_device() as launching:
                launching.copy_to_device(host, raw)
        return raw

    def values(self, raw: RawArray) -> np.ndarray | None:
        """What an array holds, for checks: on the CPU; on CUDA with FP8MOE_CHECK=1, as it synchronises."""
        if isinstance(raw, np.ndarray):
            return raw
        if self.device == NOWHERE or not checks.LOOK_AT_VALUES:
            return None
        return self.to_host(raw)

    def to_host(self, raw: RawArray) -> np.ndarray:
        """Bring a small array to the host. On CUDA this synchronises with the call's stream."""
        if isinstance(raw, np.ndarray):
            return raw
        if self.device == NOWHERE:
            raise TypeError(
                "this call looks at values, which are not known yet; pass num_out_tokens as a number"
            )
        with self._on_device() as launching:
            return launching.copy_to_host(raw)


def launching_on(device: int, stream: int, scratch: Any) -> Any:
    """A context whose launches go to one stream, and whose scratch memory comes from ``scratch``."""
    launch = _module("fp8moe.kernels_cuda.launch")
    return launch.On(device, stream, scratch, replay.current.recorder)


def order(before: int, after: int, device: int) -> None:
    """Have one stream of a device wait for what is on another one now; the host waits for nothing."""
    _module("fp8moe.kernels_cuda.launch").order(before, after, device)


def while_capturing() -> Any:
    """A context in which kernels may be loaded and memory allocated whatever stream is captured."""
    return _module("fp8moe.kernels_cuda.launch").while_capturing()


def _is_unchanged(record: Any, remembered: tuple[Any, Device, Family, tuple[str, ...]]) -> bool:
    """Whether a record's arrays are still what it remembers: torch can give a tensor other memory, shape and
    dtype (``resize_``, ``set_``, ``.data``). What nobody has asked for is where its memory is."""
    raw, _, family, names = remembered
    kept, there = record.__dict__, raw.__dict__
    for name in names:
        array = kept.get(name)
        if array is None:
            if not family.lies(there[name]):
                return False
            continue
        known = getattr(raw, name)
        if type(known) is DeviceArray:
            if not family.is_unchanged(array, known):
                return False
        else:  # a record
            inside = array.__dict__.get("_raw")
            if inside is None or inside[0] is not known or not _is_unchanged(array, inside):
                return False
    return True


def _is_empty(out: Any) -> bool:
    """Whether no array of a record has an element."""
    names = field_names(type(out))
    if names is not None:
        return all(_is_empty(getattr(out, name)) for name in names)
    if isinstance(out, (DeviceArray, np.ndarray)):
        return out.size == 0
    return all(map(_is_empty, out)) if isinstance(out, tuple) else True


@contextmanager
def on_memory(memory: Any) -> Iterator[None]:
    """Calls inside take and return raw `DeviceArray`s, allocate by ``memory.empty`` and ``.scratch``, and
    run on ``memory.stream`` (see `fp8moe.placed`)."""
    token = _memory.set(memory)
    try:
        yield
    finally:
        _memory.reset(token)


_memory: ContextVar[Any] = ContextVar("fp8moe_memory")


def place_of(raw: RawArray) -> tuple[Device, int] | None:
    """Device and address of a raw array; None while only shapes are known."""
    if isinstance(raw, np.ndarray):
        return "cpu", raw.__array_interface__["data"][0]
    return None if raw.device == NOWHERE else (raw.device, raw.ptr)


def _as_codes(q: QuantTensor) -> QuantTensor:
    """Codes are bytes inside the library, whatever float8 dtype they came as."""
    if q.data.dtype != FLOAT8_DTYPES.get(q.fmt):
        return q
    return replace(q, data=q.data.view(np.dtype(np.uint8)))


def describe(device: Device) -> str:
    return "the CPU" if device == "cpu" else f"CUDA device {device}"


# ---------------------------------------------------------------- backends, by device


_module = cache(importlib.import_module)


@cache
def load_backend(device: Device, room: str) -> ModuleType:
    """The module of one topic: ``fp8moe.reference`` on the CPU, ``fp8moe.kernels_cuda`` on CUDA."""
    if device == "cpu":
        return _module(f"fp8moe.reference.{room}")
    require_cupy(f"{room} on {describe(device)}")
    return _module(f"fp8moe.kernels_cuda.{room}")


def require_cupy(purpose: str) -> ModuleType:
    try:
        return _module("cupy")
    except ImportError as error:
        raise BackendUnavailable(
            f"{purpose} needs the CUDA backend, and CuPy cannot be imported ({error}); "
            "install it with: pip install 'fp8moe[cuda13]' (or fp8moe[cuda12] for a CUDA 12 driver)"
        ) from error


# ---------------------------------------------------------------- families of arrays


class Family:
    """How one framework's arrays are viewed, allocated and handed back."""

    name = "numpy"
    always_writable = False  # whether none of its arrays is read-only

    def view(self, x: Any, name: str) -> RawArray:
        return _require_contiguous(x, name, "numpy.ascontiguousarray")

    def empty(self, spec: ArraySpec, device: Device) -> RawArray:
        if device == "cpu":
            return np.empty(spec.shape, spec.dtype)
        cupy = require_cupy(f"an array on {describe(device)}")
        with cupy.cuda.Device(device), cupy.cuda.Stream.null:  # its pool goes by stream: see `stream`
            return _cupy_empty(cupy, spec)

    def scratch(self, spec: ArraySpec, device: Device) -> RawArray:
        """Memory for the length of one call."""
        return self.empty(spec, device)

    def wrap(self, raw: RawArray) -> Any:
        return raw if isinstance(raw, np.ndarray) else _cupy_view(require_cupy("a result"), raw)

    def stream(self, device: Device) -> int:
        """Address of the CUDA stream that this family's arrays are ordered on; 0: the default stream."""
        return 0

    def lies(self, memory: DeviceArray) -> bool:
        """Whether memory that was viewed or allocated is where it was. Only torch's can move."""
        return True

    def is_unchanged(self, x: Any, raw: DeviceArray) -> bool:
        """Whether `view` of an array would be what it was."""
        now = self.view(x, "")
        return type(now) is DeviceArray and (now.ptr, now.shape, now.dtype) == (raw.ptr, raw.shape, raw.dtype)

    def beside(self, x: Any) -> Family:
        """The family whose results on the CPU lie where this array does."""
        return self

    def is_read_only(self, x: Any) -> bool:
        return not self.always_writable and not x.flags.writeable


class _CpuMemory:
    """A tensor by NumPy's array interface. ``Tensor.numpy`` would do, but makes its storage one that cannot
    be resized, as FSDP does to free what it gathered."""

    def __init__(self, x: Any, ptr: int, dtype: np.dtype):
        self._owner = x
        shape = tuple(x.shape)
        self.__array_interface__ = {"data": (ptr, False), "shape": shape, "typestr": dtype.str, "version": 3}


class _Torch(Family):
    name = "torch"
    always_writable = True

    def view(self, x: Any, name: str) -> RawArray:
        torch = sys.modules["torch"]
        try:
            if x.requires_grad and torch.is_grad_enabled():
                raise TypeError(
                    f"{name}: got a tensor that requires grad, which this function would cut off; use "
                    "fp8moe.adapters.torch_ops, or pass x.detach()"
                )
            if not x.is_contiguous():
                if x.layout is not torch.strided:
                    raise RuntimeError("no strides")
                raise _not_contiguous(name, tuple(x.shape), x.stride(), "x.contiguous()")
            if x.is_neg():
                raise ValueError(f"{name}: got a view that negates its memory; pass x.resolve_neg()")
            dtype = _NUMPY_DTYPES.get(x.dtype)
            if dtype is None:
                dtype = _NUMPY_DTYPES[x.dtype] = dtype_named(str(x.dtype).removeprefix("torch."), name)
            if not (x.is_cuda or x.is_cpu):
                raise TypeError(f"{name}: got a tensor on {x.device}; wanted cpu or cuda")
            ptr = x.data_ptr()
            if not ptr and x.numel():
                raise TypeError(
                    f"{name}: got a tensor whose memory was freed, or that never had any; wanted its values "
                    "in memory, as FSDP's unshard brings them back"
                )
            if x.is_cuda:
                return DeviceArray(ptr, x.shape, dtype, x.get_device(), x)
        except RuntimeError as error:  # sparse, MKL-DNN's and nested ones, and those inside torch.func.vmap
            raise TypeError(
                f"{name}: got a tensor of layout {x.layout} that is not one piece of memory "
                f"({str(error).splitlines()[0]}); wanted a strided one outside of torch.func's transforms; "
                "pass x.to_dense(), or go through fp8moe.adapters.torch_ops"
            ) from None
        if not x.numel():
            return np.empty(tuple(x.shape), dtype)
        return np.asarray(_CpuMemory(x, ptr, _plain(dtype))).view(dtype)

    def empty(self, spec: ArraySpec, device: Device) -> RawArray:
        if device == "cpu":
            return np.empty(spec.shape, spec.dtype)
        torch, ordinal = sys.modules["torch"], int(device)
        shape = spec.shape or ((),)  # lengths one by one: of a tuple torch takes a microsecond more
        owner = torch.empty(*shape, dtype=_torch_dtype(spec.dtype), device=_torch_device(ordinal))
        if type(owner) is not torch.Tensor:
            raise TypeError(
                f"a result: torch made a {type(owner).__name__}, which has no memory; call this outside of "
                "FakeTensorMode, or through fp8moe.adapters.torch_ops"
            )
        return DeviceArray(owner.data_ptr(), spec.shape, spec.dtype, ordinal, owner)

    def wrap(self, raw: RawArray) -> Any:
        torch = sys.modules["torch"]
        if isinstance(raw, DeviceArray):
            return _whole_or_part(torch, raw)
        tensor = torch.from_numpy(raw.view(_plain(raw.dtype)))
        return tensor.view(getattr(torch, raw.dtype.name))

    def stream(self, device: Device) -> int:
        return _torch_stream()(device)

    def lies(self, memory: DeviceArray) -> bool:
        return memory.owner.data_ptr() + memory.start == memory.ptr

    def is_unchanged(self, x: Any, raw: DeviceArray) -> bool:
        return (
            x.data_ptr() == raw.ptr
            and x.shape == raw.shape
            and _NUMPY_DTYPES.get(x.dtype) is raw.dtype
            and x.is_contiguous()
            and not (x.requires_grad or x.is_neg())
        )


class _StandsForOthers(Family):
    """Tensors that are not the memory they own, as DTensor and FakeTensor, whose address is null."""

    def view(self, x: Any, name: str) -> RawArray:
        fix = "its plain tensors"
        if hasattr(x, "to_local"):
            fix = "x.to_local()"
        raise TypeError(
            f"{name}: got {type(x).__module__}.{type(x).__qualname__}, which only stands for other tensors; "
            f"wanted a plain tensor; pass {fix}"
        )


class _Cupy(Family):
    name = "cupy"
    always_writable = True

    def view(self, x: Any, name: str) -> RawArray:
        if not x.flags.c_contiguous:
            raise _not_contiguous(name, x.shape, x.strides, "cupy.ascontiguousarray(x)")
        memory = x.data
        return DeviceArray(memory.ptr, x.shape, _known_dtype(x.dtype, name), memory.device_id, x)

    def empty(self, spec: ArraySpec, device: Device) -> RawArray:
        cupy = sys.modules["cupy"]
        if cupy.cuda.runtime.getDevice() == device:
            return _cupy_empty(cupy, spec)
        with cupy.cuda.Device(device):
            return _cupy_empty(cupy, spec)

    def scratch(self, spec: ArraySpec, device: Device) -> RawArray:
        raw = self.empty(spec, device)
        stream = sys.modules["cupy"].cuda.get_current_stream(device)
        if stream.is_capturing():
            _module("fp8moe.kernels_cuda.launch").kept_by_graph(stream.ptr, raw)
        return raw

    def stream(self, device: Device) -> int:
        return sys.modules["cupy"].cuda.get_current_stream(device).ptr


class _Jax(Family):
    name = "jax"

    def __init__(self, device: Any = None, committed: bool = True):
        """device: JAX's own, of results on the CPU, which has several where XLA is told so."""
        self._device, self._committed = device, committed

    def view(self, x: Any, name: str) -> RawArray:
        jax = sys.modules["jax"]
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"{name}: got {type(x).__name__}, a value being traced by JAX; call this outside "
                "jax.jit, or through jax.pure_callback"
            )
        try:
            return _EXCHANGED.view(x, name)
        except TypeError:
            if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
                raise TypeError(
                    f"{name}: got dtype {x.dtype}; wanted numbers; of keys pass jax.random.key_data(x)"
                ) from None
            if x.is_deleted():
                raise ValueError(
                    f"{name}: got an array that was deleted or donated; wanted one that is alive"
                ) from None
            if len(x.devices()) != 1:
                raise TypeError(
                    f"{name}: got an array on {len(x.devices())} devices; wanted it on one; call this inside "
                    "jax.shard_map, through fp8moe.adapters.jax_ops"
                ) from None
            raise

    def beside(self, x: Any) -> Family:
        return self if isinstance(x, np.ndarray) else _jax_on(*x.devices(), x.committed)

    def empty(self, spec: ArraySpec, device: Device) -> RawArray:
        if spec.dtype.itemsize == 8 and not sys.modules["jax"].config.jax_enable_x64:
            raise TypeError(
                f"dtype: got {spec.dtype.name}, of which JAX would keep 32 bits; wanted another, or "
                'jax.config.update("jax_enable_x64", True)'
            )
        return super().empty(spec, device)

    def wrap(self, raw: RawArray) -> Any:
        jax = sys.modules["jax"]
        if not isinstance(raw, np.ndarray):
            return jax.dlpack.from_dlpack(_cupy_view(require_cupy("a result"), raw))
        if self._committed:  # and nothing is compiled for, as jax.numpy.asarray does for each new shape
            return jax.device_put(raw, self._device)
        with jax.default_device(self._device):
            return jax.device_put(raw)

    def is_read_only(self, x: Any) -> bool:
        return True


@cache
def _jax_on(device: Any, committed: bool) -> _Jax:
    return _Jax(device, committed)


class _Numba(Family):
    name = "numba"
    always_writable = True

    def view(self, x: Any, name: str) -> RawArray:
        return _EXCHANGED.view(x, name)

    def wrap(self, raw: RawArray) -> Any:
        if isinstance(raw, np.ndarray):
            return raw
        return sys.modules["numba.cuda"].as_cuda_array(_cupy_view(require_cupy("a result"), raw))


class _Raw(Family):
    """Raw buffers themselves, inside `on_memory`."""

    name = "raw"
    always_writable = True

    def view(self, x: Any, name: str) -> RawArray:
        if type(x) is not DeviceArray:
            raise _no_array(x, name)
        _known_dtype(x.dtype, name)
        return x

    def empty(self, spec: ArraySpec, device: Device) -> RawArray:
        return _memory.get().empty(spec, device)

    def scratch(self, spec: ArraySpec, device: Device) -> RawArray:
        return _memory.get().scratch(spec, device)

    def wrap(self, raw: RawArray) -> Any:
        return raw

    def stream(self, device: Device) -> int:
        return _memory.get().stream


class _Exchanged(Family):
    """Anything else with ``__dlpack__`` or ``__cuda_array_interface__``; results are NumPy or CuPy."""

    name = "dlpack"

    def view(self, x: Any, name: str) -> RawArray:
        interface = _cuda_array_interface(x)
        if interface is not None:
            return _from_cuda_array_interface(interface, x, name)
        exchanged = _exchange(x, name)
        if not dlpack.is_c_contiguous(exchanged.shape, exchanged.strides):
            raise _not_contiguous(name, exchanged.shape, exchanged.strides, "a contiguous copy")
        if exchanged.device_type == dlpack.CPU:
            return dlpack.as_numpy(exchanged)
        return DeviceArray(
            exchanged.ptr, exchanged.shape, exchanged.dtype, exchanged.device_id, (x, exchanged)
        )

    def is_read_only(self, x: Any) -> bool:
        interface = _cuda_array_interface(x)
        return interface["data"][1] if interface is not None else _exchange(x, "out").read_only


def _exchange(x: Any, name: str) -> dlpack.Exchanged:
    """What the DLPack capsule of an array says."""
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise _no_array(x, name)
    try:
        # stream=1: the legacy default stream, which this family runs on; the producer orders itself before it
        options = {"stream": 1} if x.__dlpack_device__()[0] in (2, 13) else {}
        try:  # read-only memory has its mark since version 1.0, and else no capsule
            capsule = x.__dlpack__(max_version=(1, 0), **options)
        except TypeError:  # from before there were versions
            capsule = x.__dlpack__(**options)
        return dlpack.read_capsule(capsule)
    except Exception as error:
        raise TypeError(
            f"{name}: got {type(x).__module__}.{type(x).__qualname__}, whose __dlpack__ gives nothing to "
            f"read ({error}); wanted an array of a dtype and on a device that DLPack and this library know"
        ) from error


def _cuda_array_interface(x: Any) -> Any:
    """What an array says by this protocol, where it has no DLPack."""
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return None
    return getattr(x, "__cuda_array_interface__", None)


def _from_cuda_array_interface(interface: dict, x: Any, name: str) -> DeviceArray:
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    strides = interface.get("strides")
    if strides and not dlpack.is_c_contiguous(shape, tuple(s // dtype.itemsize for s in strides)):
        raise _not_contiguous(name, shape, strides, "a contiguous copy")
    dtype = _known_dtype(dtype, name)
    ptr, device = interface["data"][0], 0
    if 0 not in shape:
        runtime = require_cupy(f"{name} on CUDA").cuda.runtime
        try:
            attributes = runtime.pointerGetAttributes(ptr)
        except runtime.CUDARuntimeError as error:
            raise BackendUnavailable(
                f"{name}: got an array on CUDA, which does not work here ({error}); install a driver for it"
            ) from error
        if attributes.type not in (2, 3):  # cudaMemoryTypeDevice, cudaMemoryTypeManaged
            raise TypeError(
                f"{name}: got an array at {ptr:#x}, no CUDA device's memory; wanted a device array"
            )
        device = attributes.device
        stream = interface.get("stream")
        if stream == 0:
            raise ValueError(
                f"{name}: got stream 0 in __cuda_array_interface__, which the protocol forbids; wanted None, "
                "1 (the legacy default stream), 2 (the thread's), or a stream's address"
            )
        if stream is not None and stream != 1:
            order(stream, 0, device)  # 0: what this family runs on
    return DeviceArray(ptr, shape, dtype, device, x)


def _require_writable(name: str, x: Any) -> None:
    if family_of(x, name).is_read_only(x):
        raise ValueError(
            f"{name}: got {type(x).__module__}.{type(x).__qualname__}, which is read-only; wanted memory to "
            "write to, or None for new memory"
        )


def _always_writable(value: Any) -> bool:
    if field_names(type(value)) is None:
        family = _family_of_type(type(value))  # type: ignore[arg-type]
        return family is not None and family.always_writable
    remembered = value.__dict__.get("_raw")
    if remembered is not None:
        return bool(remembered[2].always_writable)
    return all(map(_always_writable, arrays_in(value)))


NUMPY = Family()
_EXCHANGED = _Exchanged()
_STANDS_FOR_OTHERS = _StandsForOthers()
_FAMILIES: dict[str, Family] = {
    "numpy": NUMPY,
    "torch": _Torch(),
    "cupy": _Cupy(),
    "jax": _Jax(),
    "jaxlib": _Jax(),
    "numba": _Numba(),
    "numba_cuda": _Numba(),
    "fp8moe": _Raw(),
}


def _array_types(home: str) -> Any:
    """What is an array among the types of a package."""
    if home == "torch":
        return sys.modules["torch"].Tensor
    if home in ("jax", "jaxlib"):
        return sys.modules["jax"].Array, sys.modules["jax"].core.Tracer, np.ndarray
    return {"numpy": np.ndarray, "cupy": getattr(sys.modules.get("cupy"), "ndarray", object)}.get(
        home, object
    )


@lru_cache(maxsize=256)
def _family_of_type(kind: Any) -> Family | None:
    """None for what is no array, records among it."""
    if field_names(kind) is not None:
        return None
    for base in kind.__mro__:
        home = base.__module__.partition(".")[0]
        family = _FAMILIES.get(home)
        if family is None:
            continue
        if not issubclass(kind, _array_types(home)):
            return None
        if home == "torch" and kind.__torch_dispatch__ is not sys.modules["torch"].Tensor.__torch_dispatch__:
            return _STANDS_FOR_OTHERS
        return family
    if hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__"):
        return _EXCHANGED
    return None


def family_of(x: Any, name: str) -> Family:
    """The family of an array, by its type's home; no framework is imported to find out."""
    family = _family_of_type(type(x))  # type: ignore[arg-type]
    if family is None:
        raise _no_array(x, name)
    return family


def _no_array(x: Any, name: str) -> TypeError:
    return TypeError(
        f"{name}: got {type(x).__module__}.{type(x).__qualname__}; wanted an array (NumPy, torch, "
        "CuPy, JAX, or anything with __dlpack__ or __cuda_array_interface__)"
    )


# ---------------------------------------------------------------- dtypes and strides

_DTYPES = {
    dtype.name: dtype
    for dtype in map(
        np.dtype,
        (
            np.bool_,
            np.int8,
            np.int16,
            np.int32,
            np.int64,
            np.uint8,
            np.uint16,
            np.uint32,
            np.uint64,
            np.float16,
            np.float32,
            np.float64,
            ml_dtypes.bfloat16,
            ml_dtypes.float8_e4m3fn,
            ml_dtypes.float8_e5m2,
            ml_dtypes.float8_e8m0fnu,
        ),
    )
}


def dtype_named(name: str, argument: str) -> np.dtype:
    if name not in _DTYPES:
        raise TypeError(f"{argument}: dtype {name} is not supported; wanted one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


_KNOWN = {dtype: dtype for dtype in _DTYPES.values()}


def _known_dtype(dtype: np.dtype, argument: str) -> np.dtype:
    """NumPy makes a dtype's name anew whenever it is asked, 2 us and more."""
    known = _KNOWN.get(dtype)
    if known is None:
        native = dtype_named(dtype.name, argument)
        raise TypeError(
            f"{argument}: got dtype {dtype.str}, whose bytes are in another order than this machine's; pass "
            f"it .astype({native.name!r})"
        )
    return known


def _plain(dtype: np.dtype) -> np.dtype:
    """The dtype of the same size that every framework exchanges: bfloat16 as int16, float8 as uint8."""
    if dtype.kind != "V" and dtype.name not in ("bfloat16",) and not dtype.name.startswith("float8"):
        return dtype
    return np.dtype(np.int16 if dtype == BFLOAT16 else np.uint8)


_NUMPY_DTYPES: dict[Any, np.dtype] = {}  # by torch's


@cache
def _torch_dtype(dtype: np.dtype) -> Any:
    found = getattr(sys.modules["torch"], dtype.name)
    _NUMPY_DTYPES[found] = dtype
    return found


@cache
def _torch_stream() -> Any:
    """Address of a device's current stream; torch's public way makes an object first, 1.7 us."""
    torch = sys.modules["torch"]
    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick or (lambda device: torch.cuda.current_stream(device).cuda_stream)


def _whole_or_part(torch: ModuleType, raw: DeviceArray) -> Any:
    """The owner itself, or the part of it that a packed array is."""
    owner = raw.owner
    if tuple(owner.shape) == raw.shape:
        return owner
    start = (raw.ptr - owner.data_ptr()) // raw.dtype.itemsize
    return owner[start : start + raw.size].view(raw.shape)


@cache
def _torch_device(ordinal: int) -> Any:
    return sys.modules["torch"].device("cuda", ordinal)


def _cupy_empty(cupy: ModuleType, spec: ArraySpec) -> DeviceArray:
    owner = cupy.empty(spec.shape, _cupy_dtype(spec.dtype))
    return DeviceArray(owner.data.ptr, spec.shape, spec.dtype, owner.data.device_id, owner)


def _cupy_view(cupy: ModuleType, raw: DeviceArray) -> Any:
    owner = raw.owner
    if isinstance(owner, cupy.ndarray) and owner.data.ptr == raw.ptr and owner.shape == tuple(raw.shape):
        return owner
    memory = cupy.cuda.UnownedMemory(raw.ptr, max(raw.nbytes, 1), raw.owner, raw.device)
    return cupy.ndarray(raw.shape, _cupy_dtype(raw.dtype), cupy.cuda.MemoryPointer(memory, 0))


@cache
def _cupy_dtype(dtype: np.dtype) -> np.dtype:
    """CuPy knows bfloat16 but no float8."""
    return np.dtype(np.uint8) if dtype.name.startswith("float8") else dtype


def _require_contiguous(x: np.ndarray, name: str, fix: str) -> np.ndarray:
    if isinstance(x, (np.ma.MaskedArray, np.matrix)):
        raise TypeError(
            f"{name}: got a {type(x).__name__}, whose mask or shapes would be lost; wanted an array; pass "
            "x.filled(value), or numpy.asarray(x)"
        )
    if not x.flags.c_contiguous:
        raise _not_contiguous(name, x.shape, x.strides, f"{fix}(x)")
    _known_dtype(x.dtype, name)
    return x


def _not_contiguous(name: str, shape: Any, strides: Any, fix: str) -> ValueError:
    return ValueError(
        f"{name}: got shape {tuple(shape)} with strides {tuple(strides or ())}; wanted a C-contiguous "
        f"array; pass {fix}"
    )
