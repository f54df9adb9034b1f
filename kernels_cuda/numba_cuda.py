"""The one place that imports Numba's CUDA target (numba-cuda is in maintenance; it may have to be replaced).

With NUMBA_ENABLE_CUDASIM=1 the same kernels run in Numba's simulator on NumPy arrays, without a GPU.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from fp8moe.records import DeviceArray

try:
    cuda: Any = importlib.import_module("numba.cuda")
except Exception as error:  # with NumPy 2.5 it is an AttributeError from deep inside
    raise ImportError(
        f"Numba's CUDA target cannot be imported ({type(error).__name__}: {error}); "
        "pip install 'fp8moe[cuda13]', which asks for numpy<2.5"
    ) from error
SIMULATED = bool(importlib.import_module("numba.core.config").ENABLE_CUDASIM)
# Threads of a block, and of one that scans a single token; the simulator makes a Python thread of each.
BLOCK, WARP = (4, 2) if SIMULATED else (256, 32)
jit = cuda.jit
int32: Any = importlib.import_module("numba").int32


class _Exported:
    """A buffer as Numba takes it."""

    def __init__(self, raw: DeviceArray):
        self.__cuda_array_interface__ = {
            "shape": raw.shape,
            "typestr": raw.dtype.str,
            "data": (raw.ptr, False),
            "version": 3,
            "strides": None,
        }


def run(kernel: Any, blocks: int, threads: int, shared_bytes: int, *arguments: Any) -> None:
    """Launch on the current CuPy stream."""
    if blocks == 0:
        return
    if SIMULATED:
        kernel[blocks, threads, 0, shared_bytes](*arguments)
        return
    import cupy

    stream = cuda.external_stream(cupy.cuda.get_current_stream().ptr)
    views = [
        cuda.as_cuda_array(_Exported(a), sync=False) if isinstance(a, DeviceArray) else a for a in arguments
    ]
    with warnings.catch_warnings():  # a plan is small: Numba warns of every launch of a few blocks
        warnings.simplefilter("ignore")
        kernel[blocks, threads, stream, shared_bytes](*views)


def scratch(shape: tuple[int, ...]) -> Any:
    """Uninitialised int32."""
    if SIMULATED:
        return np.empty(shape, np.int32)
    import cupy

    memory = cupy.empty(shape, np.int32)
    return DeviceArray(memory.data.ptr, shape, np.dtype(np.int32), memory.device.id, memory)


def flat(x: Any) -> Any:
    """The same buffer with one dimension."""
    return x.reshape(-1) if SIMULATED else replace(x, shape=(x.size,))
