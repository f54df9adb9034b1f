"""Self-test: checks every operation of every backend on this machine against independent arithmetic.

CPU results are compared with float64 arithmetic and loops in this package. CUDA results are compared with the
CPU's, bitwise where an operation only copies bytes or scales by powers of two. The experts in torch and JAX,
where they are installed, are compared with NumPy's. The purpose is to find errors specific to a user's
machine: its compiler, driver, kernel cache, BLAS, or build of ml_dtypes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from fp8moe.runtime.interop import BackendUnavailable
from fp8moe.runtime.tables import line
from fp8moe.selftest.cuda import cuda_check
from fp8moe.selftest.frameworks import FRAMEWORKS, NotChecked
from fp8moe.selftest.inputs import Inputs
from fp8moe.selftest.operations import CHECKS


def main(device: str, seed: int | None, as_json: bool = False) -> int:
    """Run every check that this machine supports; returns 1 if one fails, 2 if CUDA was requested but is
    missing."""
    seed = int(np.random.SeedSequence().entropy % 2**32) if seed is None else seed  # type: ignore[operator]
    done: list[dict[str, Any]] = []
    if not as_json:
        print(f"seed {seed}")
    for on, name, check in _checks(device, seed):
        done.append({"device": on, "name": name, **_result(check)})
        if not as_json:
            print(line((on, name, _in_words(**done[-1])), (-5, -22, -1)))
    failed = sum(one["state"] == "FAILED" for one in done)
    missing = device == "cuda" and done[0]["name"] == NO_DEVICE
    if as_json:
        print(json.dumps({"seed": seed, "failed": failed, "checks": done}))
    elif not missing:
        print("all checks passed" if not failed else f"{failed} FAILED")
    return 2 if missing else 1 if failed else 0


#: name of what is reported in place of the checks of a device that is not there
NO_DEVICE = "all"


def _checks(device: str, seed: int) -> Iterator[tuple[str, str, Callable[[], None]]]:
    if device in ("all", "cpu"):
        for name, check in CHECKS.items():
            yield "cpu", name, partial(check, Inputs(seed))
        yield from _checks_of_frameworks("cpu", seed)
    if device in ("all", "cuda"):
        try:
            cuda = cuda_check(seed)
        except BackendUnavailable as error:
            yield "cuda", NO_DEVICE, partial(_not_checked, str(error))
        else:
            for name, compare in cuda.checks().items():
                yield "cuda", name, compare
            yield from _checks_of_frameworks("cuda", seed)


def _checks_of_frameworks(device: str, seed: int) -> Iterator[tuple[str, str, Callable[[], None]]]:
    inputs = [Inputs(seed + n) for n in range(3)]
    for name, check in FRAMEWORKS.items():
        yield device, name, partial(check, device, inputs)


def _not_checked(why: str) -> None:
    raise NotChecked(why)


def _result(check: Callable[[], None]) -> dict[str, Any]:
    start = time.perf_counter()
    state, detail = "ok", ""
    try:
        check()
    except NotChecked as error:
        state, detail = "not checked", str(error)
    except Exception as error:
        state, detail = "FAILED", f"{type(error).__name__}: {error}"
    return {"state": state, "detail": detail, "seconds": round(time.perf_counter() - start, 3)}


def _in_words(state: str, detail: str, seconds: float, **_: Any) -> str:
    if state == "ok":
        return f"ok      {seconds:.2f} s"
    return f"{state}: {detail}" if state == "not checked" else f"{state}  {detail}"
