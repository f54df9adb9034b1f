"""Counts the Python calls, and the files that they are in, from a user's call to the kernel launch.
``python -m benchmarks.calls``, on CUDA with torch, and with JAX if it is installed.

`sys.setprofile` counts the calls up to the last kernel launch, without C functions. The first call for given
shapes records them and may be the first to use a kernel: calls that compile or load kernels are
counted separately.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import fp8moe
import fp8moe.torch
from fp8moe.adapters.torch.library import OPERATORS
from fp8moe.runtime.tables import line

TOKENS, EXPERTS, HIDDEN, TOPK = 512, 8, 512, 2
LAUNCHER = "kernels_cuda/runtime/replay.py", "run"  # the function that has the driver make launches
LOADERS = ("load_kernel", "load_numba_kernel", "_load_compiled")  # functions that compile and load kernels


class Counter:
    """Counts Python calls, files and changes of file up to the last launch, and separately calls that load
    kernels."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.last = self.loading_calls = 0
        self._loading: Any = None  # frame of the running loader

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if self._loading is not None:
            self.loading_calls += event == "call"
            if event == "return" and frame is self._loading:
                self._loading = None
        elif event == "call":
            code = frame.f_code
            if code.co_name in LOADERS:
                self._loading = frame
                self.loading_calls += 1
                return
            self.names.append(code.co_filename)
            if code.co_filename.endswith(LAUNCHER[0]) and code.co_name == LAUNCHER[1]:
                self.last = len(self.names)

    def cells(self) -> tuple[str, ...]:
        names = self.names[: self.last]
        changes = sum(a != b for a, b in itertools.pairwise(names))
        loading = f"and {self.loading_calls} that load kernels" if self.loading_calls else ""
        return f"{len(names)} calls", f"{len(set(names))} files", f"{changes} changes of file", loading


def count(name: str, call: Callable[[], Any]) -> Any:
    counter = Counter()
    sys.setprofile(counter)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    print(line((name, *counter.cells()), (-40, 12, 10, 22, -1)), flush=True)
    return result


def main() -> None:
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(EXPERTS, (TOKENS, TOPK), device="cuda", dtype=torch.int32)
    probs = torch.rand(TOKENS, TOPK, device="cuda")
    plan = fp8moe.torch.plan_topk(ids, EXPERTS, align_size=16)
    fp8moe.torch.permute(x[:2].clone(), fp8moe.torch.plan_topk(ids[:2].clone(), EXPERTS), probs[:2].clone())
    for nth in ("first", "second", "later"):
        count(f"torch, eager: permute, {nth}", lambda: fp8moe.torch.permute(x, plan, probs))
    operator = OPERATORS["permute"]
    options = [p.default for p in inspect.signature(fp8moe.permute).parameters.values()][3:]
    arguments = operator.flatten([x, plan, probs, *options])  # as a compiled graph calls it
    for nth in ("first", "later"):
        count(f"torch, operator: permute, {nth}", lambda: operator.op(*arguments))
    w13 = fp8moe.quantize_weights(torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN, device="cuda").bfloat16())
    w2 = fp8moe.quantize_weights(torch.randn(EXPERTS, HIDDEN, HIDDEN, device="cuda").bfloat16())
    for nth in ("first", "second"):
        y, saved = count(
            f"moe_forward, {nth}", partial(fp8moe.moe_forward, x, w13, w2, ids, probs, recipe="fp8_flow")
        )
        count(f"moe_backward, {nth}", partial(fp8moe.moe_backward, saved, y))
    if importlib.util.find_spec("jax") is not None:
        inside_jax()


def inside_jax() -> None:
    """A quantise operation in a jitted program, whose callbacks run in XLA's threads."""
    import jax

    import fp8moe.jax
    from fp8moe.runtime.recording import GivenMemory

    run = GivenMemory.run

    def counted(*arguments: Any) -> None:
        count("JAX, inside jit: quantize", lambda: run(*arguments))

    jitted = jax.jit(lambda x: fp8moe.jax.quantize(x).scales)
    GivenMemory.run = counted  # type: ignore
    for n in range(3):
        jitted(jax.numpy.full((TOKENS, HIDDEN), n + 1.0, jax.numpy.bfloat16)).block_until_ready()


if __name__ == "__main__":
    main()
