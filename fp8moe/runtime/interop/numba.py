"""Numba's device arrays."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from fp8moe.runtime.interop.base import Framework, RawArray, require_cupy
from fp8moe.runtime.interop.cupy import cupy_view
from fp8moe.runtime.interop.dlpack import EXCHANGED


class Numba(Framework):
    name = "numba"
    always_writable = True

    def view(self, x: Any, name: str) -> RawArray:
        return EXCHANGED.view(x, name)

    def wrap(self, raw: RawArray) -> Any:
        if isinstance(raw, np.ndarray):
            return raw
        return sys.modules["numba.cuda"].as_cuda_array(cupy_view(require_cupy("a result"), raw))
