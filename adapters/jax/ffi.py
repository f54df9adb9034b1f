"""Python functions as custom calls of XLA, without a compiled extension: ctypes reads the structures of XLA's
foreign function interface (FFI).

The FFI is a C ABI (``xla/ffi/api/c_api.h``, which jaxlib ships). While its major version is 0, structures are
only extended at the end, and each starts with its size, which is checked here. A program contains only the
target's name and one string per call, so JAX's compilation cache and ``jax.export`` accept it; they reject
programs with host callbacks.

A call site has a state that XLA destroys with the last of what can still run it: the executable, its running
executions and the CUDA graphs captured of it. So a `Site` lives exactly as long as its program.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

_Word = ctypes.c_uint64
_HEADER: Any = (("size", ctypes.c_size_t), ("extension", ctypes.c_void_p))
_COMMAND_BUFFER_COMPATIBLE = 1
_METADATA = 1  # extension type of a call that queries the handler's metadata
_INSTANTIATE = 0  # stage of a call that creates a call site
_INTERNAL = 13  # error code
_PLATFORMS = {"cpu": False, "CUDA": True}


class _Extension(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("kind", ctypes.c_int), ("following", ctypes.c_void_p)]


class _Version(ctypes.Structure):
    _fields_ = [*_HEADER, ("major", ctypes.c_int), ("minor", ctypes.c_int)]


class _Metadata(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("version", _Version),
        ("traits", ctypes.c_uint32),
        ("state_type", ctypes.c_int64),
    ]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Extension), ("metadata", ctypes.POINTER(_Metadata))]


class _List(ctypes.Structure):
    _fields_ = [*_HEADER, ("count", ctypes.c_int64), ("types", ctypes.c_void_p), ("items", ctypes.c_void_p)]


class _Attributes(ctypes.Structure):
    _fields_ = [
        *_HEADER,
        ("count", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
    ]


class _Frame(ctypes.Structure):
    _fields_ = [
        *_HEADER,
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _List),
        ("results", _List),
        ("attributes", _Attributes),
    ]


class _Buffer(ctypes.Structure):
    _fields_ = [
        *_HEADER,
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dimensions", ctypes.POINTER(ctypes.c_int64)),
    ]


class _ErrorArguments(ctypes.Structure):
    _fields_ = [*_HEADER, ("message", ctypes.c_char_p), ("code", ctypes.c_int)]


class _Query(ctypes.Structure):
    """Arguments of XLA_FFI_Stream_Get and of XLA_FFI_DeviceOrdinal_Get, which writes 4 bytes of the
    result."""

    _fields_ = [*_HEADER, ("context", ctypes.c_void_p), ("answer", _Word)]


class _State(ctypes.Structure):
    """Arguments of XLA_FFI_State_Set and XLA_FFI_State_Get."""

    _fields_ = [
        *_HEADER,
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("type", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
    ]


class _TypeInfo(ctypes.Structure):
    _fields_ = [*_HEADER, ("deleter", ctypes.c_void_p)]


class _TypeRegistration(ctypes.Structure):
    _fields_ = [
        *_HEADER,
        ("name", ctypes.c_char_p),
        ("length", ctypes.c_size_t),
        ("type", ctypes.c_void_p),
        ("info", ctypes.c_void_p),
    ]


class _ErrorDestruction(ctypes.Structure):
    _fields_ = [*_HEADER, ("error", ctypes.c_void_p)]


_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_Function = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)  # these return at once: they keep the GIL
_FUNCTIONS = (
    *("error", None, "destroy_error", None, "stream", "register_type", None, "set_state", "get_state"),
    *(*[None] * 8, "device"),
)


class _Api(ctypes.Structure):
    _fields_ = [
        *_HEADER,
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        *((name or f"unused{i}", _Function) for i, name in enumerate(_FUNCTIONS)),
    ]


class Site:
    """A call site of a loaded program. text: its string. kept: what the handler keeps for its later calls."""

    def __init__(self, text: bytes):
        self.text = text
        self.kept: dict[str, Any] = {}


class Call(NamedTuple):
    """One call of a target. arguments, results: addresses of buffers, for `address_of`, `shape_of` and
    `dtype_of`. device, stream: the CUDA device and stream; -1 and 0 on the host."""

    site: Site
    arguments: Sequence[int]
    results: Sequence[int]
    device: int
    stream: int


_DATA = _Buffer.data.offset


def address_of(buffer: int) -> int:
    """Address of the first element."""
    return _Word.from_address(buffer + _DATA).value


def shape_of(buffer: int) -> tuple[int, ...]:
    array = _Buffer.from_address(buffer)
    return tuple(array.dimensions[: array.rank])


#: XLA's numbers of the dtypes that operations accept
_DTYPES = {
    **{1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64"},
    **{6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64"},
    **{10: "float16", 16: "bfloat16", 11: "float32", 12: "float64"},
    **{19: "float8_e5m2", 20: "float8_e4m3fn", 33: "float8_e8m0fnu"},
}


def dtype_of(buffer: int) -> str:
    number = _Buffer.from_address(buffer).dtype
    return _DTYPES.get(number, f"XLA's dtype {number}")


def register(target: str, function: Callable[[Call], None], *, command_buffer: bool) -> None:
    """Registers ``function`` as the handler of custom calls to ``target``, on the host and on CUDA.
    command_buffer: whether XLA may capture the call in a CUDA graph."""
    for platform, on_device in _PLATFORMS.items():
        handler = _Handler(_handler(function, on_device, _COMMAND_BUFFER_COMPATIBLE * command_buffer))
        _handlers.append(handler)
        capsule = jax.ffi.pycapsule(_address(handler))
        stages = {"instantiate": capsule, "execute": capsule}
        jax.ffi.register_ffi_target(target, stages, platform=platform)


_handlers: list[Any] = []  # handlers, kept alive because XLA holds their addresses


def _handler(function: Callable[[Call], None], on_device: bool, traits: int) -> Callable[[int], int | None]:
    def handle(address: int) -> int | None:
        frame = _Frame.from_address(address)
        try:
            if frame.extension and _Extension.from_address(frame.extension).kind == _METADATA:
                _write_metadata(frame, traits)
                return None
            if frame.stage == _INSTANTIATE:
                _add_site(frame)
                return None
            device, stream = (
                (_query_context(frame, "device"), _query_context(frame, "stream")) if on_device else (-1, 0)
            )
            site = _sites[_state(frame, "get_state")]
            function(Call(site, _words(frame.arguments), _words(frame.results), device, stream))
        except BaseException as error:  # exceptions must not propagate into XLA
            return _error_result(frame, f"{type(error).__name__}: {error}")
        return None

    return handle


def _words(items: _List | _Attributes) -> Sequence[int]:
    return (_Word * items.count).from_address(items.items) if items.count else ()  # type: ignore[return-value]


def _write_metadata(frame: _Frame, traits: int) -> None:
    api = _Api.from_address(frame.api)
    sizes = {"call frame": (frame, _Frame), "API": (api, _Api)}
    if api.version.major != 0 or any(s.size < ctypes.sizeof(kind) for s, kind in sizes.values()):
        raise RuntimeError(
            f"jaxlib: got version {api.version.major}.{api.version.minor} of XLA's FFI; wanted 0.3, as in "
            "jaxlib 0.10, or a later one of major version 0"
        )
    metadata = _MetadataExtension.from_address(frame.extension).metadata.contents
    metadata.version.major, metadata.version.minor = api.version.major, api.version.minor
    metadata.traits = traits
    metadata.state_type = _state_type(frame.api).value


def _query_context(frame: _Frame, name: str) -> int:
    query = _Query(ctypes.sizeof(_Query), None, frame.context, 0)
    if _function(frame.api, name)(ctypes.addressof(query)):
        raise RuntimeError(f"XLA: got no {name} for a custom call")
    return int(query.answer)


def _error_result(frame: _Frame, message: str) -> int | None:
    arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, message.encode(), _INTERNAL)
    return _function(frame.api, "error")(ctypes.addressof(arguments))  # type: ignore[no-any-return]


@functools.cache
def _function(api: int, name: str) -> Any:
    return getattr(_Api.from_address(api), name)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


# ---------------------------------------------------------------- call sites
#
# The state of a call site is a lock that is held while the site exists. XLA destroys the state in any thread,
# also in one that cannot enter Python because the interpreter shuts down, so the deleter is the function of
# Python that releases a lock, which needs no interpreter. The next compilation drops the sites of free locks.

_sites: dict[int, Site] = {}  # by the address of the lock
_dropping = threading.RLock()  # what a site holds may be released by code that asks for the sites
_allocate_lock, _acquire_lock, _free_lock = (
    ctypes.PYFUNCTYPE(result, *arguments)((f"PyThread_{verb}_lock", ctypes.pythonapi))
    for verb, result, *arguments in (
        ("allocate", ctypes.c_void_p),
        ("acquire", ctypes.c_int, ctypes.c_void_p, ctypes.c_int),
        ("free", None, ctypes.c_void_p),
    )
)
_STATE_INFO = _TypeInfo(ctypes.sizeof(_TypeInfo), None, _address(ctypes.pythonapi.PyThread_release_lock))


@functools.cache
def _state_type(api: int) -> ctypes.c_int64:
    """The number that XLA gives the type of the states; on each platform, as each has an XLA of its own."""
    number, name = ctypes.c_int64(0), b"fp8moe_call_site"
    registration = _TypeRegistration(
        ctypes.sizeof(_TypeRegistration),
        None,
        name,
        len(name),
        ctypes.addressof(number),
        ctypes.addressof(_STATE_INFO),
    )
    if _function(api, "register_type")(ctypes.addressof(registration)):
        raise RuntimeError("XLA: got no type for the state of a custom call")
    return number


def _state(frame: _Frame, verb: str, state: int | None = None) -> int:
    arguments = _State(
        *(ctypes.sizeof(_State), None, frame.context, _INSTANTIATE),
        *(ctypes.addressof(_state_type(frame.api)), state),
    )
    if error := _function(frame.api, verb)(ctypes.addressof(arguments)):
        destruction = _ErrorDestruction(ctypes.sizeof(_ErrorDestruction), None, error)
        _function(frame.api, "destroy_error")(ctypes.addressof(destruction))
        raise RuntimeError("XLA: got no state for a custom call")
    return arguments.state or 0


def _add_site(frame: _Frame) -> None:
    live_sites()
    (attribute,) = _words(frame.attributes)
    address, length = (_Word * 2).from_address(attribute)
    lock = _allocate_lock()
    _acquire_lock(lock, 0)
    _sites[lock] = Site(ctypes.string_at(address, length))  # first: XLA may call as soon as it has the state
    _state(frame, "set_state", lock)


def live_sites() -> list[Site]:
    """The call sites of all programs that are loaded. Those of other programs are dropped."""
    with _dropping:
        for lock in [*_sites]:
            if lock in _sites and _acquire_lock(lock, 0):
                del _sites[lock]  # first, because another thread may get the memory of the lock
                _free_lock(lock)
    return [*_sites.values()]
