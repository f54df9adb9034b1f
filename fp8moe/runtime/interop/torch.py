"""torch tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from operator import methodcaller
from types import ModuleType
from typing import Any

import numpy as np

from fp8moe.records import ArraySpec, DeviceArray
from fp8moe.runtime.interop.base import (
    Description,
    Device,
    Framework,
    Place,
    RawArray,
    Wanted,
    dtype_named,
    not_contiguous,
    plain_dtype,
)


class _CpuMemory:
    """A tensor with NumPy's array interface. ``Tensor.numpy`` is not used because it makes the storage
    non-resizable, and FSDP resizes storages to free gathered parameters."""

    def __init__(self, x: Any, ptr: int, dtype: np.dtype):
        self._owner = x
        shape = tuple(x.shape)
        self.__array_interface__ = {"data": (ptr, False), "shape": shape, "typestr": dtype.str, "version": 3}


def nested(name: str) -> TypeError:
    return TypeError(
        f"{name}: got a nested tensor; wanted a tensor of one shape; pass torch.cat({name}.unbind())"
    )


def check_memory(name: str, x: Any) -> None:
    """Refuse a strided tensor with elements whose storage has no memory for them: torch does not notice, and
    reads past the end."""
    if not x.numel():
        return
    if x.is_contiguous():
        last = x.numel() - 1
    else:
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    there, wanted = x.untyped_storage().nbytes(), (x.storage_offset() + last + 1) * x.itemsize
    if not there or not x.data_ptr():
        raise TypeError(
            f"{name}: got a tensor whose memory was freed, or that never had memory; wanted an allocated "
            "tensor; call FSDP's unshard first"
        )
    if there < wanted:
        raise ValueError(
            f"{name}: got shape {[*x.shape]}, which ends at byte {wanted} of a storage that was resized to "
            f"{there} bytes; wanted memory for every element; resize the storage back, or make a new tensor"
        )


class Torch(Framework):
    name = "torch"
    always_writable = True

    def view(self, x: Any, name: str) -> RawArray:
        torch = sys.modules["torch"]
        try:
            shape = x.shape
            if x.requires_grad and torch.is_grad_enabled():
                raise TypeError(
                    f"{name}: got a tensor that requires grad, but this function does not record gradients; "
                    f"use fp8moe.torch, pass {name}.detach(), or call it under torch.no_grad()"
                )
            if not x.is_contiguous():
                if x.layout is not torch.strided:
                    raise RuntimeError("no strides")
                raise not_contiguous(name, tuple(shape), x.stride(), f"{name}.contiguous()")
            if x.is_neg():
                raise ValueError(f"{name}: got a view that negates its memory; pass {name}.resolve_neg()")
            dtype = _NUMPY_DTYPES.get(x.dtype)
            if dtype is None:
                dtype = _NUMPY_DTYPES[x.dtype] = dtype_named(str(x.dtype).removeprefix("torch."), name)
            if not (x.is_cuda or x.is_cpu):
                raise TypeError(f"{name}: got a tensor on {x.device}; wanted cpu or cuda")
            check_memory(name, x)
            ptr = x.data_ptr()
            if x.is_cuda:
                return DeviceArray(ptr, shape, dtype, x.get_device(), x)
        except RuntimeError as error:  # sparse, MKL-DNN and nested tensors, and those inside torch.func.vmap
            if x.is_nested:
                raise nested(name) from None
            raise TypeError(
                f"{name}: got a tensor of layout {x.layout} without a single memory address "
                f"({str(error).splitlines()[0]}); wanted a strided tensor outside torch.func's transforms; "
                f"pass {name}.to_dense(), or use fp8moe.torch"
            ) from None
        if not x.numel():
            return np.empty(tuple(shape), dtype)
        return np.asarray(_CpuMemory(x, ptr, plain_dtype(dtype))).view(dtype)

    def place(self, x: Any, name: str) -> Place | None:
        try:
            address = x.data_ptr() if x.is_cuda else 0
        except RuntimeError:  # as in `view`, which says why
            address = 0
        return (x.get_device(), address) if address else super().place(x, name)

    def empty(self, spec: ArraySpec, device: Device) -> RawArray:
        if device == "cpu":
            return np.empty(spec.shape, spec.dtype)
        torch, ordinal = sys.modules["torch"], int(device)
        shape = spec.shape or ((),)  # separate arguments: a tuple takes torch a microsecond more
        owner = torch.empty(*shape, dtype=_torch_dtype(spec.dtype), device=_torch_device(ordinal))
        if type(owner) is not torch.Tensor:
            raise TypeError(
                f"a result: torch made a {type(owner).__name__}, which has no memory; call this outside "
                "FakeTensorMode, or use fp8moe.torch"
            )
        return DeviceArray(owner.data_ptr(), spec.shape, spec.dtype, ordinal, owner)

    def wrap(self, raw: RawArray) -> Any:
        torch = sys.modules["torch"]
        if isinstance(raw, DeviceArray):
            return _whole_or_part(torch, raw)
        if not raw.size:  # NumPy's strides would be 0, which torch's grouped GEMM rejects
            return torch.empty(*raw.shape, dtype=_torch_dtype(raw.dtype), device="cpu")
        tensor = torch.from_numpy(raw.view(plain_dtype(raw.dtype)))
        return tensor.view(getattr(torch, raw.dtype.name))

    def stream(self, device: Device) -> int:
        return _torch_stream()(device)

    def overwritten(self, x: Any) -> None:
        """Makes autograd reject a backward that saved the old values."""
        if not x.is_inference():
            sys.modules["torch"].autograd.graph.increment_version(x)

    def describe(self, arrays: Sequence[Any], differentiable: bool = False) -> Description | None:
        """differentiable: whether the caller records gradients."""
        torch = sys.modules["torch"]
        kinds, refused = (torch.Tensor, torch.nn.Parameter), not differentiable and torch.is_grad_enabled()
        device = None
        addresses, described = [], []
        try:
            for x in arrays:
                if type(x) not in kinds or not x.is_cuda or not x.is_contiguous() or x.is_neg():
                    return None
                if (refused and x.requires_grad) or (dtype := _NUMPY_DTYPES.get(x.dtype)) is None:
                    return None
                ptr, ordinal = x.data_ptr(), x.get_device()
                if device is not None and ordinal != device:
                    return None
                if x.untyped_storage().nbytes() < x.storage_offset() * dtype.itemsize + x.nbytes:
                    return None  # see `check_memory`
                device = ordinal
                addresses.append(ptr)
                described.append((x.shape, dtype, ptr & 15))
        except RuntimeError:  # sparse tensors, and tensors inside torch.func's transforms
            return None
        return None if device is None else (device, addresses, described)

    def prepare(
        self, device: int, arrays: Iterable[Wanted]
    ) -> tuple[Callable[[], int], list[Callable[[], Any]]]:
        empty, torch_device = sys.modules["torch"].empty, _torch_device(device)
        makers: list[Callable[[], Any]] = []
        for shape, dtype, _ in arrays:
            makers.append(partial(empty, *(shape or ((),)), dtype=_torch_dtype(dtype), device=torch_device))
        return partial(_torch_stream(), device), makers

    address = staticmethod(methodcaller("data_ptr"))

    allocates_results = True


class StandsForOthers(Framework):
    """Wrapper tensors without data of their own, such as DTensor and FakeTensor; their address is null."""

    def view(self, x: Any, name: str) -> RawArray:
        fix = "its plain tensors"
        if hasattr(x, "to_local"):
            fix = "x.to_local()"
        raise TypeError(
            f"{name}: got {type(x).__module__}.{type(x).__qualname__}, which only wraps other tensors; "
            f"wanted a plain tensor; pass {fix}"
        )


_NUMPY_DTYPES: dict[Any, np.dtype] = {}  # key: torch dtype


@cache
def _torch_dtype(dtype: np.dtype) -> Any:
    torch_dtype = getattr(sys.modules["torch"], dtype.name)
    _NUMPY_DTYPES[torch_dtype] = dtype
    return torch_dtype


@cache
def _torch_stream() -> Any:
    """A function that returns the handle of a device's current stream; torch's public API creates an object,
    1.7 us."""
    torch = sys.modules["torch"]
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw_stream or (lambda device: torch.cuda.current_stream(device).cuda_stream)


def _whole_or_part(torch: ModuleType, raw: DeviceArray) -> Any:
    """The owner, or the slice of it that a packed array occupies."""
    owner = raw.owner
    if tuple(owner.shape) == raw.shape:
        return owner
    start = (raw.ptr - owner.data_ptr()) // raw.dtype.itemsize
    return owner[start : start + raw.size].view(raw.shape)


@cache
def _torch_device(ordinal: int) -> Any:
    return sys.modules["torch"].device("cuda", ordinal)
