"""Checks of the CUDA backend: its results against the CPU's, and every GEMM backend against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe.layer.recipes import RECIPES, RecipeName
from fp8moe.ops.router import add_product
from fp8moe.records import QuantTensor
from fp8moe.runtime.call import load_backend
from fp8moe.runtime.interop import BackendUnavailable, load_module, require_cupy
from fp8moe.runtime.record_trees import arrays_in, map_arrays
from fp8moe.selftest.frameworks import LAYER
from fp8moe.selftest.inputs import BF16, EXPERTS, FFN, HIDDEN, Check, Inputs, equal, near, wide_values
from fp8moe.selftest.operations import OPERATIONS

PRODUCT_ROWS = 1008  # rows of the grouped GEMMs on CUDA


def cuda_check(seed: int) -> CudaCheck:
    """Raises BackendUnavailable without CuPy or a CUDA device."""
    cupy = require_cupy("the CUDA selftest")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise BackendUnavailable(f"no CUDA device: {error}") from error
    if count == 0:
        raise BackendUnavailable("no CUDA device")
    return CudaCheck(cupy, [Inputs(seed + n) for n in range(3)])


class CudaCheck:
    """Compares the results of the public functions on CuPy and on NumPy arrays, for three different inputs:
    the first call records what it launches for its shapes (`fp8moe.runtime.recording`), the others replay
    it."""

    def __init__(self, cupy: Any, inputs: list[Inputs]):
        self.cupy, self.inputs = cupy, inputs

    def checks(self) -> dict[str, Callable[[], None]]:
        def layer(recipe: RecipeName) -> Callable[[], None]:
            def run(x: Any, w13: Any, w2: Any, ids: Any, probs: Any, dy: Any) -> Any:
                y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe=recipe)
                g = fp8moe.moe_backward(saved, dy)
                return y, g.dx, g.dprobs, g.dw13, g.dw2

            # other summation orders change last bits, and with them the rounding of some codes
            return lambda: self._compare(run, 2e-2, *LAYER, of_one=math.inf)

        def operation(check: Check) -> Callable[[], None]:
            return lambda: self._compare(check.run, check.bound, *check.arrays, of_one=check.of_one)

        return {
            "grouped products": self._check_products,
            **{name: operation(check) for name, check in OPERATIONS.items()},
            **{f"layer {r}": layer(r) for r in RECIPES},
        }

    def _check_products(self) -> None:
        """Compare every GEMM backend of this device with float64, for FP8 and bfloat16: experts that start at
        any row, and many tiles per multiprocessor, as in a training step but not in the layer's check."""
        driver = load_module("fp8moe.kernels_cuda.runtime.driver")
        for inputs in self.inputs:
            rng, bf16 = inputs.rng, ml_dtypes.bfloat16
            inside = np.sort(rng.integers(1, PRODUCT_ROWS, EXPERTS - 1))
            offsets = np.array([0, *inside, PRODUCT_ROWS], np.int32)
            x, dy = (rng.standard_normal((PRODUCT_ROWS, n)).astype(bf16) for n in (HIDDEN, 2 * FFN))
            codes = fp8moe.quantize(x)
            columns = [fp8moe.scaling_aware_transpose(fp8moe.quantize(a), offsets) for a in (dy, x)]
            multiples = (offsets // 128 * 128).astype(np.int32)
            blocks = [fp8moe.scaling_aware_transpose(fp8moe.quantize(a), target="block") for a in (dy, x)]
            weights = fp8moe.quantize_weights(inputs.w13).rowwise
            architecture = driver.architecture(0)
            for w, a in ((weights, codes), (inputs.w13, x)):
                wide_a, wide_w = wide_values(a), wide_values(w)
                wanted = np.zeros((PRODUCT_ROWS, 2 * FFN))
                for e in range(EXPERTS):
                    rows = slice(offsets[e], offsets[e + 1])
                    wanted[rows] = wide_a[rows] @ wide_w[e].T
                self._multiply(fp8moe.grouped_gemm, (a, w, offsets), wanted, architecture)
            ids = rng.integers(-1, EXPERTS, (PRODUCT_ROWS, 2)).astype(np.int32)
            plan = fp8moe.plan_topk(ids, EXPERTS, align_size=128, num_out_tokens="exact")
            rows_of_experts = np.split(
                fp8moe.permute(wide_values(codes), plan).data, plan.expert_offsets[1:-1]
            )
            wanted = np.concatenate(
                [
                    rows @ of_expert.T
                    for rows, of_expert in zip(rows_of_experts, wide_values(weights), strict=True)
                ]
            )
            self._multiply(permute_gemm, (codes, weights, plan), wanted, architecture)
            for (d, a), starts in ((columns, offsets), (blocks, multiples), ((dy, x), offsets)):
                wide_d, wide_a = wide_values(d, starts), wide_values(a, starts)
                parts = [slice(starts[e], starts[e + 1]) for e in range(EXPERTS)]
                wanted = np.stack([wide_d[rows].T @ wide_a[rows] for rows in parts])
                total = np.ones(wanted.shape, np.float32)  # a new gradient is part of the layer's check
                self._multiply(fp8moe.grouped_gemm_wgrad, (d, a, starts, total), wanted + 1, architecture)
            if architecture == "sm_90a":  # the only one that has this kernel
                w = np.ascontiguousarray(inputs.w13[0].T)
                got = add_product(*(self.cupy.asarray(a) for a in (dy, x, w)))
                wanted = wide_values(dy) + wide_values(x) @ wide_values(w)
                near(self.cupy.asnumpy(got), wanted, BF16, "add_product")

    def _multiply(self, function: Any, operands: tuple[Any, ...], wanted: Any, architecture: str) -> None:
        """Check a product with each backend, and "wgmma" also limited to two multiprocessors, which process
        all tiles."""
        kernels = load_backend(0, "grouped_gemm")
        kind = operands[0].fmt if isinstance(operands[0], QuantTensor) else operands[0].dtype.name
        shape = EXPERTS, PRODUCT_ROWS, 2 * FFN, HIDDEN
        verb = "grouped_gemm_wgrad" if function is fp8moe.grouped_gemm_wgrad else "grouped_gemm"
        product = kernels.Product(verb, (kind, kind), "bfloat16", *shape)
        for backend in kernels.backends(product, architecture):
            for num_sms in (None, 2) if backend == "wgmma" else (None,):
                arrays = [map_arrays(lambda a: self.cupy.asarray(a.copy()), o) for o in operands]
                got = function(*arrays, backend=backend, num_sms=num_sms)
                label = f"{function.__name__} of {kind} by {backend!r}, num_sms={num_sms}"
                # larger than the result's bfloat16 rounding and the 14-bit accumulation of FP8 tensor cores,
                # whose error is relative to the sum of magnitudes
                near(self.cupy.asnumpy(got), wanted, BF16, label, 4 * BF16)

    def _compare(
        self, function: Callable[..., Any], bound: float, *names: str, of_one: float | None = None
    ) -> None:
        """Compare ``function`` on both devices. ``names``: the attributes of `Inputs` that it takes."""
        for inputs in self.inputs:
            arrays = [getattr(inputs, name) for name in names]
            wanted = function(*arrays)
            got = function(*(self.cupy.asarray(a) for a in arrays))
            self._compare_values(got, wanted, bound, of_one)

    def _compare_values(self, got: Any, wanted: Any, bound: float, of_one: float | None) -> None:
        got_arrays = map(self.cupy.asnumpy, arrays_in(got))
        for n, (a, b) in enumerate(zip(got_arrays, arrays_in(wanted), strict=True)):
            if bound == 0:
                equal(a, b, f"array {n}")
            else:
                near(a, b, bound, f"array {n}", of_one)


def permute_gemm(*operands: Any, **options: Any) -> Any:
    return fp8moe.permute_gemm(*operands, **options).data
