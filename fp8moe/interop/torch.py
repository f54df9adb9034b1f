"""torch tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from operator import methodcaller
from types import ModuleType
from typing import Any

import numpy as np

from fp8moe.interop.base import (
    Description,
    Device,
    Framework,
    RawArray,
    Wanted,
    dtype_named,
    not_contiguous,
    plain_dtype,
)
from fp8moe.records import ArraySpec, DeviceArray


class _CpuMemory:
    """A tensor by NumPy's array interface. ``Tensor.numpy`` would do, but makes its storage one that cannot
    be resized, as FSDP does to free what it gathered."""

    def __init__(self, x: Any, ptr: int, dtype: np.dtype):
        self._owner = x
        shape = tuple(x.shape)
        self.__array_interface__ = {"data": (ptr, False), "shape": shape, "typestr": dtype.str, "version": 3}


class Torch(Framework):
    name = "torch"
    always_writable = True

    def view(self, x: Any, name: str) -> RawArray:
        torch = sys.modules["torch"]
        try:
            if x.requires_grad and torch.is_grad_enabled():
                raise TypeError(
                    f"{name}: got a tensor that requires grad, which this function would cut off; use "
                    "fp8moe.adapters.torch_ops, pass x.detach(), or call it under torch.no_grad()"
                )
            if not x.is_contiguous():
                if x.layout is not torch.strided:
                    raise RuntimeError("no strides")
                raise not_contiguous(name, tuple(x.shape), x.stride(), "x.contiguous()")
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
        return np.asarray(_CpuMemory(x, ptr, plain_dtype(dtype))).view(dtype)

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
        if not raw.size:  # NumPy gives it strides of zero, which torch's grouped product refuses
            return torch.empty(*raw.shape, dtype=_torch_dtype(raw.dtype), device="cpu")
        tensor = torch.from_numpy(raw.view(plain_dtype(raw.dtype)))
        return tensor.view(getattr(torch, raw.dtype.name))

    def stream(self, device: Device) -> int:
        return _torch_stream()(device)

    def describe(self, arrays: list[Any]) -> Description | None:
        torch = sys.modules["torch"]
        kinds, recording = (torch.Tensor, torch.nn.Parameter), torch.is_grad_enabled()
        device = None
        addresses, described = [], []
        try:
            for x in arrays:
                if type(x) not in kinds or not x.is_cuda or not x.is_contiguous() or x.is_neg():
                    return None
                if (recording and x.requires_grad) or (dtype := _NUMPY_DTYPES.get(x.dtype)) is None:
                    return None
                ptr, ordinal = x.data_ptr(), x.get_device()
                if (device is not None and ordinal != device) or not (ptr or not x.numel()):
                    return None
                device = ordinal
                addresses.append(ptr)
                described.append((x.shape, dtype, ptr & 15))
        except RuntimeError:  # sparse ones, and those inside of torch.func's transforms
            return None
        return None if device is None else (device, addresses, described)

    def prepare(
        self, device: int, arrays: Iterable[Wanted]
    ) -> tuple[Callable[[], int], list[Callable[[], Any]]]:
        empty, where = sys.modules["torch"].empty, _torch_device(device)
        makers: list[Callable[[], Any]] = []
        for shape, dtype, _ in arrays:
            makers.append(partial(empty, *(shape or ((),)), dtype=_torch_dtype(dtype), device=where))
        return partial(_torch_stream(), device), makers

    address = staticmethod(methodcaller("data_ptr"))

    allocates_results = True


class StandsForOthers(Framework):
    """Tensors that are not the memory they own, as DTensor and FakeTensor, whose address is null."""

    def view(self, x: Any, name: str) -> RawArray:
        fix = "its plain tensors"
        if hasattr(x, "to_local"):
            fix = "x.to_local()"
        raise TypeError(
            f"{name}: got {type(x).__module__}.{type(x).__qualname__}, which only stands for other tensors; "
            f"wanted a plain tensor; pass {fix}"
        )


_NUMPY_DTYPES: dict[Any, np.dtype] = {}  # by torch's


@cache
def _torch_dtype(dtype: np.dtype) -> Any:
    torch_dtype = getattr(sys.modules["torch"], dtype.name)
    _NUMPY_DTYPES[torch_dtype] = dtype
    return torch_dtype


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
