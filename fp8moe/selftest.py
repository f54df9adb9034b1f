"""Self-test: checks every operation of every backend on this machine against independent arithmetic.

CPU results are compared with float64 arithmetic and loops in this module. CUDA results are compared with the
CPU's, bitwise where an operation only copies bytes or scales by powers of two. The purpose is to find errors
specific to a user's machine: its compiler, driver, kernel cache or BLAS.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe import expert_parallel
from fp8moe.call import load_backend
from fp8moe.expert_parallel import Counts, Pending
from fp8moe.formats import FLOAT8_DTYPES
from fp8moe.interop import BackendUnavailable, load_module, require_cupy
from fp8moe.record_trees import map_arrays
from fp8moe.records import QuantTensor
from fp8moe.router import add_product

TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 300, 256, 128, 5, 3
PRODUCT_ROWS = 1008  # rows of the grouped GEMMs on CUDA


class Inputs:
    """Random inputs of one run."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.rng = rng
        bf16 = ml_dtypes.bfloat16
        self.x = rng.standard_normal((TOKENS, HIDDEN)).astype(bf16)
        self.ids = rng.integers(-1, EXPERTS, (TOKENS, TOPK)).astype(np.int32)
        self.probs = rng.random((TOKENS, TOPK)).astype(np.float32)
        self.w13 = (rng.standard_normal((EXPERTS, 2 * FFN, HIDDEN)) / HIDDEN**0.5).astype(bf16)
        self.w2 = (rng.standard_normal((EXPERTS, HIDDEN, FFN)) / FFN**0.5).astype(bf16)
        self.dy = rng.standard_normal((TOKENS, HIDDEN)).astype(bf16)
        self.wide = np.concatenate([self.x, self.dy], axis=1)


def check_plan_and_permute(i: Inputs) -> None:
    plan = fp8moe.plan_topk(i.ids, EXPERTS, align_size=16)
    permuted = fp8moe.permute(i.x, plan, i.probs)
    row = 0
    for expert in range(EXPERTS):
        for token, slot in np.argwhere(i.ids == expert):
            _equal(permuted.data[row], i.x[token], f"row {row}")
            _equal(permuted.probs[row], i.probs[token, slot], f"probability {row}")
            row += 1
        while row % 16:
            _equal(permuted.data[row].view(np.uint16), 0, f"padding row {row}")
            row += 1
    _equal(plan.expert_offsets[-1], row, "rows in all")


def check_unpermute(i: Inputs) -> None:
    plan = fp8moe.plan_topk(i.ids, EXPERTS, align_size=16)
    rows = fp8moe.permute(i.x, plan).data
    got = fp8moe.unpermute(rows, plan, i.probs).astype(np.float64)
    weight = (i.probs * (i.ids >= 0)).astype(np.float64).sum(axis=1)
    wanted = i.x.astype(np.float64) * weight[:, None]
    _near(got, wanted, 2.0**-8, "sums")


def check_quantize(i: Inputs) -> None:
    for fmt, dtype in FLOAT8_DTYPES.items():
        q = fp8moe.quantize(i.x, fmt=fmt)
        blocks = i.x.astype(np.float64).reshape(TOKENS, -1, 128)
        limit = float(ml_dtypes.finfo(dtype).max)
        scales = np.exp2(np.ceil(np.log2(np.abs(blocks).max(axis=2) / limit)))
        _equal(q.scales, scales, f"{fmt} scales")
        codes = (blocks / scales[:, :, None]).reshape(i.x.shape).astype(dtype).view(np.uint8)
        _equal(q.data, codes, f"{fmt} codes")
        decoded = (q.data.view(dtype).astype(np.float64).reshape(blocks.shape) * scales[:, :, None]).reshape(
            i.x.shape
        )
        _equal(fp8moe.dequantize(q), decoded, f"{fmt} values")


def check_transpose(i: Inputs) -> None:
    spread = i.x.astype(np.float32) * np.exp2(i.rng.integers(-6, 7, (TOKENS, 1))).astype(np.float32)
    q = fp8moe.quantize(spread)
    column = fp8moe.scaling_aware_transpose(q)
    oracle = fp8moe.quantize(fp8moe.dequantize(q), block=(128, 1))
    _equal(column.scales, oracle.scales, "scales")
    _equal(column.data, oracle.data, "codes")
    block = fp8moe.scaling_aware_transpose(q, target="block")
    scales = np.repeat(np.repeat(block.scales, 128, axis=0), 128, axis=1)[: q.shape[1], :TOKENS]
    bound = 2.0**-10 * scales  # half of a tile's smallest code
    error = np.abs(fp8moe.dequantize(block).astype(np.float64) - fp8moe.dequantize(q))
    _equal(error <= bound.T, np.ones_like(error, bool), "values of blocks")


def check_swiglu(i: Inputs) -> None:
    h = i.wide
    a, b = i.x.astype(np.float64), i.dy.astype(np.float64)
    y = fp8moe.swiglu(h.astype(np.float32)).astype(np.float64)
    _near(y, a / (1 + np.exp(-a)) * b, 1e-6, "values")
    _equal(fp8moe.swiglu_quantize(h).data, fp8moe.quantize(y.astype(np.float32)).data, "codes")


def check_router(i: Inputs) -> None:
    logits = i.x[:, :EXPERTS].astype(np.float32)
    config = fp8moe.RouterConfig(2)
    routed = fp8moe.route(logits, config, num_sequences=1)
    e = np.exp(logits.astype(np.float64))
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :2]
    chosen = np.take_along_axis(e, ids, 1)
    chosen /= chosen.sum(axis=1, keepdims=True)
    _equal(routed.topk_ids, ids, "ids")
    _near(routed.topk_probs, chosen, 1e-6, "probabilities")
    _equal(routed.tokens_per_expert[0], np.bincount(ids.ravel(), minlength=EXPERTS), "tokens per expert")
    z = np.log(e.sum(axis=1)) ** 2
    _near(routed.z_loss, z.mean(keepdims=True), 1e-6, "z loss")
    # gradient of the weights' sum of squares, through the softmax of the two selected logits
    grad = fp8moe.route_backward(2 * routed.topk_probs, logits, routed.topk_ids, config)
    wanted = np.zeros_like(e)
    inner = 2 * chosen - 2 * (chosen**2).sum(axis=1, keepdims=True)
    np.put_along_axis(wanted, ids, chosen * inner, 1)
    _near(grad, wanted, 1e-5, "gradient")


def check_grouped_gemm(i: Inputs) -> None:
    x = fp8moe.quantize(i.x)
    w = fp8moe.quantize_weights(i.w13).rowwise
    offsets = np.array([0, 100, 100, 228, 290, 300], np.int32)
    got = fp8moe.grouped_gemm(x, w, offsets).astype(np.float64)
    wide_x, wide_w = (fp8moe.dequantize(q).astype(np.float64) for q in (x, w))
    for e in range(EXPERTS):
        rows = slice(offsets[e], offsets[e + 1])
        _near(got[rows], wide_x[rows] @ wide_w[e].T, 2.0**-8, f"expert {e}")
    dy = i.dy.astype(np.float32)
    got = fp8moe.grouped_gemm_wgrad(dy, i.x.astype(np.float32), offsets)
    for e in range(EXPERTS):
        rows = slice(offsets[e], offsets[e + 1])
        _near(got[e], dy[rows].T.astype(np.float64) @ i.x[rows].astype(np.float64), 1e-5, f"gradient {e}")


class Alone:
    """A transport for a single rank."""

    rank, world_size = 0, 1

    def __init__(self, xp: Any):
        self.xp = xp

    def counts(self, counts: tuple[Any, ...], header: dict[str, int]) -> list[Counts]:
        return [((int(c[0]),),) for c in counts]

    def exchange(self, rows: Any, counts: Counts, size: int | None = None) -> Pending:
        received = self.xp.empty((counts[0][0] if size is None else size, *rows.shape[1:]), rows.dtype)
        received[: counts[0][0]] = rows[: counts[0][0]]
        return Pending(lambda: received)


class AloneByWindows(Alone):
    """A single-rank transport through windows: rows are written directly to the receiver's memory."""

    def fits(self, counts: Counts, row_bytes: int) -> bool:
        return True

    def deliver(
        self, write: Callable[[tuple[Any, ...]], None], counts: Counts, row_bytes: int, async_op: bool
    ) -> Pending:
        window = self.xp.empty((counts[0][0], row_bytes), np.uint8)
        write((window,))
        return Pending(lambda: window)


def check_messages(i: Inputs) -> None:
    x = i.wide
    q, routed = fp8moe.quantize(x), np.any(i.ids >= 0, axis=1)
    wide = fp8moe.dequantize(q).astype(i.x.dtype)
    for comm in (Alone(np), AloneByWindows(np)):
        dispatched = expert_parallel.dispatch(x, i.ids, i.probs, EXPERTS, comm, fmt="e4m3")
        _equal(dispatched.x.data, q.data[routed], "codes")
        _equal(dispatched.x.scales, q.scales[routed], "scales")
        _equal(dispatched.topk_ids, i.ids[routed], "expert ids")
        _equal(dispatched.topk_probs, i.probs[routed], "probabilities")
        combined = expert_parallel.combine(wide[routed], dispatched.route, comm)
        _equal(combined, wide * routed[:, None], "rows that came back")


def check_layer(i: Inputs) -> None:
    results = {}
    for recipe in ("bf16", "fp8_blockwise", "fp8_flow"):
        with fp8moe.trace() as traced:
            y, saved = fp8moe.moe_forward(i.x, i.w13, i.w2, i.ids, i.probs, recipe=recipe)
            grads = fp8moe.moe_backward(saved, i.dy)
        results[recipe] = [y, grads.dx, grads.dprobs, grads.dw13, grads.dw2]
        casts = {"bf16": 0, "fp8_blockwise": 12, "fp8_flow": 2}[recipe]
        _equal(traced.casts, casts, f"casts of {recipe}")
    # a chain of at most twelve E4M3 roundings: sqrt(12) * 2^-4 / sqrt(3), see tests/test_moe.py
    for recipe in ("fp8_blockwise", "fp8_flow"):
        for got, wanted in zip(results[recipe], results["bf16"], strict=True):
            _near(got.astype(np.float64), wanted.astype(np.float64), 0.125, recipe)


CHECKS: dict[str, Callable[[Inputs], None]] = {
    "plan, permute": check_plan_and_permute,
    "unpermute": check_unpermute,
    "quantize": check_quantize,
    "transpose": check_transpose,
    "swiglu": check_swiglu,
    "router": check_router,
    "grouped GEMM": check_grouped_gemm,
    "messages of ranks": check_messages,
    "layer": check_layer,
}


def main(device: str, seed: int | None) -> int:
    """Run every check that this machine supports; returns 1 if one fails, 2 if CUDA was requested but is
    missing."""
    seed = int(np.random.SeedSequence().entropy % 2**32) if seed is None else seed  # type: ignore[operator]
    print(f"seed {seed}")
    failures = 0
    if device in ("all", "cpu"):
        for name, check in CHECKS.items():
            failures += _report("cpu", name, partial(check, Inputs(seed)))
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
    print("all checks passed" if not failures else f"{failures} FAILED")
    return 1 if failures else 0


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
    the first call creates the launch plan of its shapes (`fp8moe.launch_plan`), the others replay it."""

    def __init__(self, cupy: Any, inputs: list[Inputs]):
        self.cupy, self.inputs = cupy, inputs

    def checks(self) -> dict[str, Callable[[], None]]:
        def layer(recipe: str) -> Callable[[], None]:
            def run(x: Any, w13: Any, w2: Any, ids: Any, probs: Any, dy: Any) -> Any:
                y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe=recipe)
                g = fp8moe.moe_backward(saved, dy)
                return y, g.dx, g.dprobs, g.dw13, g.dw2

            # other summation orders change last bits, and with them the rounding of some codes
            return lambda: self._compare(run, 2e-2, "x", "w13", "w2", "ids", "probs", "dy")

        def permute(x: Any, ids: Any, probs: Any) -> Any:
            moved = fp8moe.permute(fp8moe.quantize(x), fp8moe.plan_topk(ids, EXPERTS, align_size=16), probs)
            return moved.data, moved.probs, moved.plan

        def transpose(x: Any, ids: Any) -> Any:
            # exact, because values past the last expert are unspecified in a transposed tensor
            plan = fp8moe.plan_topk(ids, EXPERTS, align_size=128, num_out_tokens="exact")
            q = fp8moe.quantize(x)
            moved = fp8moe.permute(q, plan).data
            transposed = [fp8moe.permute_transpose(q, plan, target=target) for target in ("column", "block")]
            return *transposed, fp8moe.scaling_aware_transpose(moved)

        def messages(x: Any, ids: Any, probs: Any) -> Any:
            results: list[Any] = []
            xp = np if isinstance(x, np.ndarray) else self.cupy
            for comm in (Alone(xp), AloneByWindows(xp)):
                for fmt in (None, "e5m2"):
                    dispatched = expert_parallel.dispatch(x, ids, probs, EXPERTS, comm, fmt=fmt)
                    rows = dispatched.x if fmt is None else fp8moe.dequantize(dispatched.x, dtype="bfloat16")
                    back = expert_parallel.combine(rows, dispatched.route, comm)
                    results += [rows, dispatched.topk_ids, dispatched.topk_probs, back]
            return tuple(results)

        def route(x: Any) -> Any:
            config = fp8moe.RouterConfig(4)
            logits = x[:, :EXPERTS].astype("float32")
            routed = fp8moe.route(logits, config, num_sequences=1)
            grad = fp8moe.route_backward(routed.topk_probs, logits, routed.topk_ids, config)
            return routed.topk_ids, routed.topk_probs, routed.aux_loss, routed.z_loss, grad

        return {
            "grouped products": self._check_products,
            # float32 rounding; the ids are equal, because they are selected by logits
            "router": lambda: self._compare(route, 1e-5, "x"),
            "plan, permute": lambda: self._compare(permute, 0.0, "x", "ids", "probs"),
            "transpose": lambda: self._compare(transpose, 0.0, "x", "ids"),
            "messages of ranks": lambda: self._compare(messages, 0.0, "wide", "ids", "probs"),
            **{f"layer {r}": layer(r) for r in ("bf16", "fp8_blockwise", "fp8_flow")},
        }

    def _check_products(self) -> None:
        """Compare every GEMM backend of this device with float64, for FP8 and bfloat16: experts that start at
        any row, and many tiles per multiprocessor, as in a training step but not in the layer's check."""
        driver = load_module("fp8moe.kernels_cuda.driver")
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
                wide_a, wide_w = _wide(a), _wide(w)
                wanted = np.zeros((PRODUCT_ROWS, 2 * FFN))
                for e in range(EXPERTS):
                    rows = slice(offsets[e], offsets[e + 1])
                    wanted[rows] = wide_a[rows] @ wide_w[e].T
                self._multiply(fp8moe.grouped_gemm, (a, w, offsets), wanted, architecture)
            ids = rng.integers(-1, EXPERTS, (PRODUCT_ROWS, 2)).astype(np.int32)
            plan = fp8moe.plan_topk(ids, EXPERTS, align_size=128, num_out_tokens="exact")
            rows_of_experts = np.split(fp8moe.permute(_wide(codes), plan).data, plan.expert_offsets[1:-1])
            wanted = np.concatenate(
                [rows @ of_expert.T for rows, of_expert in zip(rows_of_experts, _wide(weights), strict=True)]
            )
            self._multiply(permute_gemm, (codes, weights, plan), wanted, architecture)
            for (d, a), starts in ((columns, offsets), (blocks, multiples), ((dy, x), offsets)):
                wide_d, wide_a = _wide(d, starts), _wide(a, starts)
                parts = [slice(starts[e], starts[e + 1]) for e in range(EXPERTS)]
                wanted = np.stack([wide_d[rows].T @ wide_a[rows] for rows in parts])
                self._multiply(fp8moe.grouped_gemm_wgrad, (d, a, starts), wanted, architecture)
            if architecture == "sm_90a":  # the only one that has this kernel
                w = np.ascontiguousarray(inputs.w13[0].T)
                got = add_product(*(self.cupy.asarray(a) for a in (dy, x, w)))
                wanted = _wide(dy) + _wide(x) @ _wide(w)
                _near(self.cupy.asnumpy(got).astype(np.float64), wanted, 2.0**-8, "add_product")

    def _multiply(self, function: Any, operands: tuple[Any, ...], wanted: Any, architecture: str) -> None:
        """Check a product with each backend, and "wgmma" also limited to two multiprocessors, which process
        all tiles."""
        kernels = load_backend(0, "grouped_gemm")
        arrays = [map_arrays(lambda a: self.cupy.asarray(a), operand) for operand in operands]
        kind = operands[0].fmt if isinstance(operands[0], QuantTensor) else operands[0].dtype.name
        shape = EXPERTS, PRODUCT_ROWS, 2 * FFN, HIDDEN
        verb = "grouped_gemm_wgrad" if function is fp8moe.grouped_gemm_wgrad else "grouped_gemm"
        product = kernels.Product(verb, (kind, kind), "bfloat16", *shape)
        for backend in kernels.backends(product, architecture):
            for num_sms in (None, 2) if backend == "wgmma" else (None,):
                got = function(*arrays, backend=backend, num_sms=num_sms)
                label = f"{function.__name__} of {kind} by {backend!r}, num_sms={num_sms}"
                # larger than the result's bfloat16 rounding and the 14-bit accumulation of FP8 tensor cores
                _near(self.cupy.asnumpy(got).astype(np.float64), wanted, 2.0**-8, label)

    def _compare(self, function: Callable[..., Any], bound: float, *names: str) -> None:
        """Compare ``function`` on both devices. ``names``: the attributes of `Inputs` that it takes."""
        for inputs in self.inputs:
            arrays = [getattr(inputs, name) for name in names]
            wanted = function(*arrays)
            got = function(*(self.cupy.asarray(a) for a in arrays))
            self._compare_values(got, wanted, bound)

    def _compare_values(self, got: Any, wanted: Any, bound: float) -> None:
        wanted_arrays: list[np.ndarray] = []
        map_arrays(lambda a: wanted_arrays.append(a), wanted)
        got_arrays: list[np.ndarray] = []
        map_arrays(lambda a: got_arrays.append(self.cupy.asnumpy(a)), got)
        for n, (a, b) in enumerate(zip(got_arrays, wanted_arrays, strict=True)):
            if bound == 0:
                _equal(a, b, f"array {n}")
            else:
                _near(a.astype(np.float64), b.astype(np.float64), bound, f"array {n}")


def permute_gemm(*operands: Any, **options: Any) -> Any:
    return fp8moe.permute_gemm(*operands, **options).data


def _wide(x: Any, offsets: Any = None) -> Any:
    """The values of an operand in float64, [rows, columns]."""
    if not isinstance(x, QuantTensor):
        return x.astype(np.float64)
    return fp8moe.dequantize(x, expert_offsets=None if x.transposed else offsets).astype(np.float64)


def _report(device: str, name: str, check: Callable[[], None]) -> int:
    start = time.perf_counter()
    try:
        check()
    except Exception as error:
        print(f"{device:5} {name:22} FAILED  {type(error).__name__}: {error}")
        return 1
    print(f"{device:5} {name:22} ok      {time.perf_counter() - start:.2f} s")
    return 0


def _equal(got: Any, wanted: Any, label: str) -> None:
    if wrong := int(np.sum(np.asarray(got) != np.asarray(wanted))):
        raise ValueError(f"{label}: {wrong} values differ")


def _near(got: np.ndarray, wanted: np.ndarray, bound: float, label: str) -> None:
    error = np.linalg.norm(got - wanted) / max(float(np.linalg.norm(wanted)), 1e-300)
    if not error <= bound:
        raise ValueError(f"{label}: relative error {error:.2e}; wanted at most {bound:.2e}")
