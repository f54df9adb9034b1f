"""Self-test: checks every operation of every backend on this machine against independent arithmetic.

CPU results are compared with float64 arithmetic and loops in this package. CUDA results are compared with the
CPU's, bitwise where an operation only copies bytes or scales by powers of two. The experts in torch and JAX,
where they are installed, are compared with NumPy's. The purpose is to find errors specific to a user's
machine: its compiler, driver, kernel cache, BLAS, or build of ml_dtypes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from fp8moe.runtime.interop import BackendUnavailable
from fp8moe.selftest.cuda import cuda_check
from fp8moe.selftest.frameworks import FRAMEWORKS, NotChecked
from fp8moe.selftest.inputs import Inputs
from fp8moe.selftest.operations import CHECKS


def main(device: str, seed: int | None) -> int:
    """Run every check that this machine supports; returns 1 if one fails, 2 if CUDA was requested but is
    missing."""
    seed = int(np.random.SeedSequence().entropy % 2**32) if seed is None else seed  # type: ignore[operator]
    print(f"seed {seed}")
    failures = 0
    if device in ("all", "cpu"):
        for name, check in CHECKS.items():
            failures += _report("cpu", name, partial(check, Inputs(seed)))
        failures += _report_frameworks("cpu", seed)
    if device in ("all", "cuda"):
        try:
            cuda = cuda_check(seed)
        except BackendUnavailable as error:
            print(f"cuda  not checked: {error}")
            if device == "cuda":
                return 2
        else:
            for name, compare in cuda.checks().items():
                failures += _report("cuda", name, compare)
            failures += _report_frameworks("cuda", seed)
    print("all checks passed" if not failures else f"{failures} FAILED")
    return 1 if failures else 0


def _report_frameworks(device: str, seed: int) -> int:
    inputs = [Inputs(seed + n) for n in range(3)]
    return sum(_report(device, name, partial(check, device, inputs)) for name, check in FRAMEWORKS.items())


def _report(device: str, name: str, check: Callable[[], None]) -> int:
    start = time.perf_counter()
    try:
        check()
    except NotChecked as error:
        print(f"{device:5} {name:22} not checked: {error}")
        return 0
    except Exception as error:
        print(f"{device:5} {name:22} FAILED  {type(error).__name__}: {error}")
        return 1
    print(f"{device:5} {name:22} ok      {time.perf_counter() - start:.2f} s")
    return 0
