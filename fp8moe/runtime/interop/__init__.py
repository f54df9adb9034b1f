"""Conversion of each framework's arrays to raw buffers, and of results to the caller's framework.

A raw buffer is a `numpy.ndarray` on the CPU and a `DeviceArray` on CUDA. Arguments are never copied. No
framework is imported here: if an argument is one of its arrays, it is in `sys.modules` already.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np

from fp8moe.records import DeviceArray
from fp8moe.runtime.interop.base import (
    BackendUnavailable,
    Device,
    Framework,
    RawArray,
    describe_device,
    dtype_named,
    load_module,
    no_array,
    require_cupy,
)
from fp8moe.runtime.interop.cupy import Cupy
from fp8moe.runtime.interop.dlpack import EXCHANGED
from fp8moe.runtime.interop.jax import Jax
from fp8moe.runtime.interop.numba import Numba
from fp8moe.runtime.interop.torch import StandsForOthers, Torch
from fp8moe.runtime.record_trees import field_names

__all__ = [
    "NUMPY",
    "BackendUnavailable",
    "Device",
    "Framework",
    "RawArray",
    "describe_device",
    "dtype_named",
    "framework_of",
    "framework_of_type",
    "load_module",
    "no_array",
    "require_cupy",
]

NUMPY = Framework()
_STANDS_FOR_OTHERS = StandsForOthers()
FRAMEWORKS: dict[str, Framework] = {
    "numpy": NUMPY,
    "torch": Torch(),
    "cupy": Cupy(),
    "jax": Jax(),
    "jaxlib": Jax(),
    "numba": Numba(),
    "numba_cuda": Numba(),
}


def framework_of(x: Any, name: str) -> Framework:
    """The framework of an array, given by the package of its type."""
    framework = framework_of_type(type(x))  # type: ignore[arg-type]
    if framework is None:
        raise no_array(x, name)
    return framework


@lru_cache(maxsize=256)
def framework_of_type(kind: Any) -> Framework | None:
    """The framework of a type; None if it is not an array type, such as a record."""
    if kind is DeviceArray or field_names(kind) is not None:
        return None
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        framework = FRAMEWORKS.get(package)
        if framework is None:
            continue
        if not issubclass(kind, _array_types(package)):
            return None
        if (
            package == "torch"
            and kind.__torch_dispatch__ is not sys.modules["torch"].Tensor.__torch_dispatch__
        ):
            return _STANDS_FOR_OTHERS
        return framework
    if hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__"):
        return EXCHANGED
    return None


def _array_types(home: str) -> Any:
    """The array types of a package."""
    if home == "torch":
        return sys.modules["torch"].Tensor
    if home in ("jax", "jaxlib"):
        return sys.modules["jax"].Array, sys.modules["jax"].core.Tracer, np.ndarray
    return {"numpy": np.ndarray, "cupy": getattr(sys.modules.get("cupy"), "ndarray", object)}.get(
        home, object
    )
