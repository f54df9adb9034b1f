"""Python functions as custom calls of XLA, without a compiled extension: ctypes reads the structures of XLA's
foreign function interface (FFI).

The FFI is a C ABI (``xla/ffi/api/c_api.h``, which jaxlib ships). While its major version is 0, structures are
only extended at the end, and each starts with its size, which is checked here. A program contains only the
target's name and one string per call, so JAX's compilation cache and ``jax.export`` accept it; they reject
programs with host callbacks.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

_Word = ctypes.c_uint64
_HEADER: Any = (("size", ctypes.c_size_t), ("extension", ctypes.c_void_p))
_COMMAND_BUFFER_COMPATIBLE = 1
_METADATA = 1  # extension type of a call that queries the handler's metadata
_INTERNAL = 13  # error code
_PLATFORMS = {"cpu": False, "CUDA": True}


class _Extension(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("kind", ctypes.c_int), ("following", ctypes.c_void_p)]


class _Version(ctypes.Structure):
    _fields_ = [*_HEADER, ("major", ctypes.c_int), ("minor", ctypes.c_int)]


class _Metadata(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32)]


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


_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_FUNCTIONS = ("error", None, None, None, "stream", *[None] * 12, "device")


class _Api(ctypes.Structure):
    _fields_ = [
        *_HEADER,
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        *((name or f"unused{i}", _Function) for i, name in enumerate(_FUNCTIONS)),
    ]


class Call(NamedTuple):
    """One call of a target. attribute: address and length of its string; the address is the same in every
    call of one call site of a loaded program. arguments, results: addresses of buffers, for `address_of` and
    `shape_of`. device, stream: the CUDA device and stream; -1 and 0 on the host."""

    attribute: tuple[int, int]
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


def register(target: str, function: Callable[[Call], None], *, command_buffer: bool) -> None:
    """Registers ``function`` as the handler of custom calls to ``target``, on the host and on CUDA.
    command_buffer: whether XLA may capture the call in a CUDA graph."""
    for platform, on_device in _PLATFORMS.items():
        handler = _Function(_handler(function, on_device, _COMMAND_BUFFER_COMPATIBLE * command_buffer))
        _handlers.append(handler)
        address = ctypes.cast(handler, ctypes.c_void_p).value
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(address), platform=platform)


_handlers: list[Any] = []  # handlers, kept alive because XLA holds their addresses


def _handler(function: Callable[[Call], None], on_device: bool, traits: int) -> Callable[[int], int | None]:
    def handle(address: int) -> int | None:
        frame = _Frame.from_address(address)
        try:
            if frame.extension and _Extension.from_address(frame.extension).kind == _METADATA:
                _write_metadata(frame, traits)
                return None
            device, stream = (
                (_query_context(frame, "device"), _query_context(frame, "stream")) if on_device else (-1, 0)
            )
            (attribute,) = _words(frame.attributes)
            span = (_Word * 2).from_address(attribute)
            function(Call((span[0], span[1]), _words(frame.arguments), _words(frame.results), device, stream))
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
