"""torch tensors in CPU memory that the library takes for tensors on a CUDA device, with as many Python calls.

`install`: their kernels run on the CPU, as `cuda_on_cpu` runs them. `without_kernels`: nothing runs, so that
what remains of a call is the host's work.
"""

import ctypes
import functools
import importlib

import cuda_on_cpu
import torch

from fp8moe.records import DeviceArray
from fp8moe.runtime import interop

DTYPES = "float64", "float32", "float16", "bfloat16", "uint8", "int32", "int64", "float8_e4m3fn"
NUMPY_DTYPES = {getattr(torch, name): interop.dtype_named(name, "") for name in DTYPES}
TORCH_DTYPES = {dtype: torch_dtype for torch_dtype, dtype in NUMPY_DTYPES.items()}
KINDS = torch.Tensor, torch.nn.Parameter


class TorchOnDevice(interop.torch.Torch):
    def view(self, x, name):
        if not x.data_ptr() or not x.is_contiguous():
            super().view(x, name)  # which this call rejects
        dtype = interop.dtype_named(str(x.dtype).removeprefix("torch."), name)
        return DeviceArray(x.data_ptr(), x.shape, dtype, 0, x)  # .numpy() would fix its memory

    def empty(self, spec, device):
        owner = torch.empty(*(spec.shape or ((),)), dtype=TORCH_DTYPES[spec.dtype])
        return DeviceArray(owner.data_ptr(), spec.shape, spec.dtype, 0, owner)

    def describe(self, arrays, differentiable=False):
        addresses, described = [], []
        refused = not differentiable and torch.is_grad_enabled()
        for x in arrays:
            if type(x) not in KINDS or not x.data_ptr() or not x.is_contiguous():
                return None
            if refused and x.requires_grad:
                return None
            addresses.append(x.data_ptr())
            described.append((x.shape, NUMPY_DTYPES[x.dtype], x.data_ptr() & 15))
        return 0, addresses, described

    def prepare(self, device, arrays):
        empty = functools.partial(torch.empty, device="cpu")
        makers = []
        for shape, dtype, _ in arrays:
            makers.append(functools.partial(empty, *(shape or ((),)), dtype=TORCH_DTYPES[dtype]))
        return int, makers  # the stream's address is 0

    def stream(self, device):
        return 0


def install(monkeypatch, **device):
    """device: see `cuda_on_cpu.install`."""
    cuda_on_cpu.install(monkeypatch, **device)
    family, others = TorchOnDevice(), interop.framework_of_type
    framework_of_type = functools.cache(lambda kind: family if kind in KINDS else others(kind))
    monkeypatch.setattr(interop, "framework_of_type", framework_of_type)


class _Kernel:
    """The parts of a loaded kernel that launch.py uses."""

    ptr, parameters, shared = 1, None, 1 << 30

    def __init__(self, name):
        self.name = name


def without_kernels(monkeypatch, multiprocessors=132):
    """As `install`, with a driver that does nothing."""
    install(monkeypatch, multiprocessors=multiprocessors)
    driver, launch, numba_cuda, replay = (
        importlib.import_module(f"fp8moe.kernels_cuda.runtime.{name}")
        for name in ("driver", "launch", "numba_cuda", "replay")
    )
    # a function of C that ignores what it is given and returns 0
    address = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
    monkeypatch.setattr(driver, "functions", functools.cache(lambda: (address,) * 3))
    monkeypatch.setattr(launch, "load_kernel", functools.cache(lambda *kernel: _Kernel(kernel[1])))
    monkeypatch.setattr(numba_cuda, "load_numba_kernel", lambda kernel, *_: _Kernel(kernel.__name__))
    monkeypatch.setattr(numba_cuda, "_loaded", {})
    monkeypatch.setattr(replay.LOOP, "run", replay.LOOP.compiled)
