"""JAX arrays."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np

from fp8moe.records import ArraySpec
from fp8moe.runtime.interop.base import Device, Framework, RawArray, require_cupy
from fp8moe.runtime.interop.cupy import cupy_view
from fp8moe.runtime.interop.dlpack import EXCHANGED


class Jax(Framework):
    name = "jax"

    def __init__(self, device: Any = None, committed: bool = True):
        """device: the JAX device of CPU results; the CPU may have several (XLA's host platform devices)."""
        self._device, self._committed = device, committed

    def view(self, x: Any, name: str) -> RawArray:
        jax = sys.modules["jax"]
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"{name}: got {type(x).__name__}, a value being traced by JAX; call the function of this "
                "name in fp8moe.jax, or call this outside jax.jit"
            )
        if isinstance(x, np.ndarray):  # JAX's class of NumPy arrays; NumPy cannot export their bfloat16
            return super().view(np.asarray(x), name)
        try:
            return EXCHANGED.view(x, name)
        except TypeError:
            if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
                raise TypeError(
                    f"{name}: got dtype {x.dtype}; wanted numbers; for keys pass jax.random.key_data(x)"
                ) from None
            if x.is_deleted():
                raise ValueError(
                    f"{name}: got an array that was deleted or donated; wanted one that is alive"
                ) from None
            if len(x.devices()) != 1:
                raise TypeError(
                    f"{name}: got an array on {len(x.devices())} devices; wanted it on one; call this inside "
                    "jax.shard_map, through fp8moe.jax"
                ) from None
            raise

    def beside(self, x: Any) -> Framework:
        return self if isinstance(x, np.ndarray) else _jax_on(*x.devices(), x.committed)

    def empty(self, spec: ArraySpec, device: Device) -> RawArray:
        check_result(spec)
        return super().empty(spec, device)

    def wrap(self, raw: RawArray) -> Any:
        jax = sys.modules["jax"]
        if not isinstance(raw, np.ndarray):
            return jax.dlpack.from_dlpack(cupy_view(require_cupy("a result"), raw))
        if self._committed:  # unlike jax.numpy.asarray, compiles nothing per shape
            return jax.device_put(raw, self._device)
        with jax.default_device(self._device):
            return jax.device_put(raw)

    def is_read_only(self, x: Any) -> bool:
        return True


def check_result(spec: ArraySpec) -> None:
    if spec.dtype.itemsize == 8 and not sys.modules["jax"].config.jax_enable_x64:
        raise TypeError(
            f"dtype: got {spec.dtype.name}, which JAX would truncate to 32 bits; wanted a dtype of at most "
            '32 bits, or jax.config.update("jax_enable_x64", True)'
        )


@cache
def _jax_on(device: Any, committed: bool) -> Jax:
    return Jax(device, committed)
