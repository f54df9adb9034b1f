"""Self-test: checks every operation of every backend on this machine against independent arithmetic.

CPU results are compared with float64 arithmetic and loops in this module. CUDA results are compared with the
CPU's, bitwise where an operation only copies bytes or scales by powers of two. The experts in torch and JAX,
where they are installed, are compared with NumPy's. The purpose is to find errors specific to a user's
machine: its compiler, driver, kernel cache, BLAS, or build of ml_dtypes.
"""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable, Sequence
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
from fp8moe.record_trees import arrays_in, map_arrays
from fp8moe.records import QuantTensor
from fp8moe.router import add_product

TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 300, 256, 128, 5, 3
ALIGN = 16
PERMUTED_ROWS = (TOKENS * TOPK + EXPERTS * (ALIGN - 1)) // ALIGN * ALIGN  # the plans' static bound
MIRRORED_EXPERTS = 6  # of both ranks of `Mirror`
PRODUCT_ROWS = 1008  # rows of the grouped GEMMs on CUDA
BF16 = 2.0**-8  # larger than the rounding of a result to bfloat16
OFFSETS = np.array([0, 100, 100, 228, 290, TOKENS], np.int32)
ACTIVATIONS = (
    fp8moe.Activation(),
    fp8moe.Activation(clamp=1.501, alpha=1.702, linear_offset=1.0),  # no bfloat16 value equals the clamp
    fp8moe.Activation("geglu"),
    fp8moe.Activation("geglu_tanh"),
    fp8moe.Activation("relu2"),
)
ROUTERS = (
    fp8moe.RouterConfig(2),
    fp8moe.RouterConfig(
        2, score_function="sigmoid", num_groups=4, topk_groups=2, renormalize=False, scaling_factor=2.5
    ),
)


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
        # blocks of many magnitudes, hence of many scales
        powers = np.exp2(rng.integers(-6, 7, (TOKENS, HIDDEN // 128))).astype(bf16)
        self.spread = self.x * np.repeat(powers, 128, axis=1)
        self.wide = np.concatenate([self.spread, self.dy], axis=1)
        self.h = np.concatenate([self.x, self.dy], axis=1)
        self.h32, self.x32, self.dy32 = (a.astype(np.float32) for a in (self.h, self.x, self.dy))
        self.row_probs = rng.random(TOKENS).astype(np.float32)
        mask = rng.random((TOKENS, EXPERTS)) < 0.4
        self.mask = mask & (np.cumsum(mask, axis=1) <= TOPK)
        self.mask_probs = rng.random((TOKENS, EXPERTS)).astype(np.float32)
        index = rng.permutation(2 * TOKENS).astype(np.int32)  # Transformer Engine's map, for two experts
        self.index = np.where(index < 2 * TOKENS - 50, index, -1).astype(np.int32)
        self.rows = rng.standard_normal((PERMUTED_ROWS, HIDDEN)).astype(bf16)
        self.rows_probs = rng.random(PERMUTED_ROWS).astype(np.float32)
        self.sizes = np.diff(OFFSETS)[rng.permutation(EXPERTS)].astype(np.int32)
        self.order = rng.permutation(EXPERTS).astype(np.int32)
        self.bias = (rng.standard_normal(8) / 4).astype(np.float32)
        logits = rng.standard_normal((2 * TOKENS, 8)).astype(np.float32)
        # without near ties of experts or groups, which rounding would decide
        choice = 1 / (1 + np.exp(-logits)) + self.bias
        compared = logits, choice, choice.reshape(2 * TOKENS, 4, 2).sum(axis=2)
        gaps = np.min([np.diff(np.sort(a, axis=1), axis=1).min(axis=1) for a in compared], axis=0)
        self.logits = logits[gaps > 1e-5][:TOKENS]
        self.grad_aux, self.grad_z = rng.random((2, 1)).astype(np.float32) + 1
        self.of_second = np.flatnonzero((self.ids >= MIRRORED_EXPERTS // 2).any(axis=1))


class Check:
    """An operation, and how its results are checked: on the CPU by ``compare``, with independent arithmetic,
    and on CUDA with the CPU's results.

    arrays: names of the attributes of `Inputs` that ``run`` takes. bound: of CUDA's relative difference from
    the CPU, 0 for equal bits. of_one: the same for each value; None: ``bound``.
    """

    def __init__(
        self,
        arrays: str,
        run: Callable[..., tuple[Any, ...]],
        compare: Callable[..., None],
        bound: float,
        of_one: float | None = None,
    ):
        self.arrays, self.run, self.compare = arrays.split(), run, compare
        self.bound, self.of_one = bound, of_one

    def __call__(self, i: Inputs) -> None:
        self.compare(i, *self.run(*(getattr(i, name) for name in self.arrays)))


def rows_of(ids: np.ndarray, align: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Destination rows of a plan, their tokens and slots, and the number of rows."""
    places, row = [], 0
    for expert in range(EXPERTS):
        for token, slot in np.argwhere(ids == expert):
            places.append((row, token, slot))
            row += 1
        row = -(-row // align) * align
    return *np.array(places).T, row  # type: ignore[return-value]


def plans(x: Any, ids: Any, probs: Any, mask: Any, mask_probs: Any, index: Any) -> tuple[Any, ...]:
    plan = fp8moe.plan_topk(ids, EXPERTS, align_size=ALIGN)
    by_mask = fp8moe.plan_routing_map(mask, align_size=ALIGN, num_out_tokens=PERMUTED_ROWS)
    again = fp8moe.plan_row_map(by_mask.row_id_map, by_mask.pad_offsets, num_out_tokens=PERMUTED_ROWS)
    by_index = fp8moe.plan_index_map(index, 2, num_out_tokens=2 * TOKENS)
    moved = [fp8moe.permute(x, p, w) for p, w in ((plan, probs), (by_mask, mask_probs), (again, mask_probs))]
    return *moved, fp8moe.permute(x, by_index).data


def compare_plans(i: Inputs, topk: Any, mask: Any, again: Any, index: Any) -> None:
    experts = np.where(i.mask, np.arange(EXPERTS), -1)
    for label, moved, ids, weights in (
        ("ids", topk, i.ids, i.probs),
        ("mask", mask, experts, i.mask_probs),
        ("row map", again, experts, i.mask_probs),
    ):
        rows, tokens, slots, last = rows_of(ids, ALIGN)
        wanted, wanted_probs = np.zeros_like(i.rows), np.zeros_like(i.rows_probs)
        wanted[rows], wanted_probs[rows] = i.x[tokens], weights[tokens, slots]
        _equal(moved.data[:last].view(np.uint16), wanted[:last].view(np.uint16), f"rows by {label}")
        _equal(moved.probs[:last], wanted_probs[:last], f"probabilities by {label}")
        counts = np.array([(ids == e).sum() for e in range(EXPERTS)])
        padded, plan = -(-counts // ALIGN) * ALIGN, moved.plan
        before = np.cumsum(padded - counts) - (padded - counts)
        _equal(plan.tokens_per_expert, counts, f"tokens per expert by {label}")
        ends = np.cumsum(padded)
        if label == "row map":  # which does not say where padding ends
            padded, ends[-1] = counts, ends[-1] - padded[-1] + counts[-1]
        _equal(plan.padded_tokens_per_expert, padded, f"padded tokens per expert by {label}")
        _equal(plan.expert_offsets, [0, *ends], f"expert offsets by {label}")
        _equal(plan.pad_offsets, before, f"pad offsets by {label}")
        _equal(plan.overflow, [0], f"overflow by {label}")
        width = ids.shape[1]
        row_map = np.full((TOKENS, 2 * width + 1), -1)
        row_map[:, -1] = 0
        rows, tokens, slots, _ = rows_of(ids, 1)
        for row, token, slot in sorted(zip(rows, tokens, slots, strict=True), reverse=True):
            n = row_map[token, -1]
            row_map[token, [n, width + n, -1]] = row, ids[token, slot], n + 1
        _equal(plan.row_id_map, row_map, f"row map by {label}")
    entries = np.argwhere(i.index >= 0)[:, 0]
    wanted = np.zeros_like(index)
    wanted[i.index[entries]] = i.x[entries % TOKENS]
    _equal(index, wanted, "rows by index")


def sums(x: Any, dy: Any, rows: Any, rows_probs: Any, ids: Any, probs: Any) -> tuple[Any, ...]:
    plan = fp8moe.plan_topk(ids, EXPERTS, align_size=ALIGN)
    codes = fp8moe.quantize(rows)
    grads = fp8moe.unpermute_backward(dy, plan, x=rows, merging_probs=probs)
    return (
        fp8moe.unpermute(rows, plan, probs),
        fp8moe.unpermute(rows, plan),
        fp8moe.unpermute(codes, plan, probs),
        *fp8moe.permute_backward(rows, plan, rows_probs),
        grads[1],
        fp8moe.permute(x, plan).data,
        fp8moe.unpermute_backward(dy, plan)[0],
        grads[0],
    )


def compare_sums(i: Inputs, *got: Any) -> None:
    rows, tokens, slots, last = rows_of(i.ids, ALIGN)
    wide, dy = i.rows.astype(np.float64), i.dy.astype(np.float64)
    codes = fp8moe.dequantize(fp8moe.quantize(i.rows)).astype(np.float64)
    weights = i.probs[tokens, slots].astype(np.float64)[:, None]

    def summed(values: np.ndarray) -> np.ndarray:
        total = np.zeros((TOKENS, HIDDEN))
        np.add.at(total, tokens, values)
        return total

    wanted_grad = np.zeros_like(wide)
    wanted_grad[rows] = dy[tokens] * weights
    moved = np.zeros_like(wide)
    moved[rows] = dy[tokens]
    grad_probs, dots = np.zeros((TOKENS, TOPK)), np.zeros((TOKENS, TOPK))
    grad_probs[tokens, slots] = i.rows_probs[rows]
    dots[tokens, slots] = (dy[tokens] * wide[rows]).sum(axis=1)
    _near(got[0], summed(wide[rows] * weights), BF16, "weighted sums")
    _near(got[1], summed(wide[rows]), BF16, "sums")
    _near(got[2], summed(codes[rows] * weights), BF16, "sums of codes")
    _near(got[3], summed(wide[rows]), BF16, "gradient of permute")
    _equal(got[4], grad_probs.astype(np.float32), "gradient of probabilities")
    _near(got[5], dots, 1e-5, "gradient of merging probabilities")
    _equal(got[7][:last], moved[:last], "gradient of unpermute")
    _near(got[8][:last], wanted_grad[:last], BF16, "gradient of weighted unpermute")


def chunks(x: Any, row_probs: Any, sizes: Any, order: Any) -> tuple[Any, ...]:
    codes = fp8moe.quantize(x)
    moved = fp8moe.sort_chunks(codes, sizes, order, row_probs, align_size=ALIGN)
    plain = fp8moe.sort_chunks(x, sizes, order, row_probs)
    back = fp8moe.sort_chunks_backward(plain.data, sizes, order, plain.probs)
    padded = fp8moe.pad(x, sizes, ALIGN)
    return moved, plain, back, padded, fp8moe.unpad(padded, sizes, ALIGN, num_out_tokens=TOKENS)


def compare_chunks(i: Inputs, moved: Any, plain: Any, back: Any, padded: Any, unpadded: Any) -> None:
    starts = np.cumsum(i.sizes) - i.sizes
    parts = [np.arange(start, start + size) for start, size in zip(starts, i.sizes, strict=True)]
    order = np.concatenate([parts[j] for j in i.order])
    _equal(plain.data, i.x[order], "chunks")
    _equal(plain.probs, i.row_probs[order], "probabilities of chunks")
    _equal(plain.group_offsets, [0, *np.cumsum(i.sizes[i.order])], "offsets of chunks")
    padded_sizes = -(-i.sizes[i.order] // ALIGN) * ALIGN
    _equal(moved.group_offsets, [0, *np.cumsum(padded_sizes)], "offsets of padded chunks")
    _equal(back[0], i.x, "gradient of chunks")
    _equal(back[1], i.row_probs, "gradient of probabilities")
    codes = fp8moe.quantize(i.x)
    for label, found, source, sequence in (
        ("codes", moved.data.data, codes.data, i.order),
        ("scales", moved.data.scales, codes.scales, i.order),
        ("probabilities", moved.probs, i.row_probs, i.order),
        ("rows", padded, i.x, range(EXPERTS)),
    ):
        wanted = np.zeros_like(found)
        row = 0
        for j in sequence:
            wanted[row : row + len(parts[j])] = source[parts[j]]
            row += -(-len(parts[j]) // ALIGN) * ALIGN
        _equal(found, wanted, f"padded {label}")
    _equal(unpadded, i.x, "unpadded rows")


def fp8_numbers(fmt: str) -> np.ndarray:
    """The finite numbers of a format from 0 up, whose codes are their places, from the format's bits."""
    mantissa, bias, codes = {"e4m3": (3, 7, 0x7F), "e5m2": (2, 15, 0x7C)}[fmt]
    exponent, fraction = np.divmod(np.arange(codes), 2**mantissa)
    implicit = np.where(exponent > 0, 2**mantissa, 0)
    return (fraction + implicit) * np.exp2(np.maximum(exponent, 1) - bias - mantissa)


def check_formats(i: Inputs) -> None:
    """The number formats of the installed ml_dtypes, by their bits."""
    wide = i.rng.standard_normal(1000).astype(np.float32)
    bits = wide.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    _equal(wide.astype(ml_dtypes.bfloat16).view(np.uint16), rounded, "rounding to bfloat16")
    values = (rounded.astype(np.uint32) << 16).view(np.float32)
    _equal(rounded.view(ml_dtypes.bfloat16).astype(np.float32), values, "values of bfloat16")
    for fmt, dtype in FLOAT8_DTYPES.items():
        numbers = fp8_numbers(fmt)
        codes = np.arange(len(numbers), dtype=np.uint8)
        _equal(codes.view(dtype).astype(np.float64), numbers, f"values of {fmt}")
        _equal((codes | 0x80).view(dtype).astype(np.float64), -numbers, f"negative values of {fmt}")
        x = (wide * numbers[-1] / np.abs(wide).max()).astype(np.float32)
        ties = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
        for numerals in (x, ties):
            wanted = rounded_to_fp8(numerals.astype(np.float64), numbers)
            _equal(numerals.astype(dtype).view(np.uint8), wanted, f"rounding to {fmt}")


def rounded_to_fp8(x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Codes of the nearest numbers, with even codes for ties."""
    above = np.searchsorted(numbers[:-1], np.abs(x))
    below = np.maximum(above - 1, 0)
    left, right = np.abs(x) - numbers[below], numbers[above] - np.abs(x)
    nearest = np.where((left < right) | ((left == right) & (below % 2 == 0)), below, above)
    return (nearest | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def quantized(spread: Any, w13: Any) -> tuple[Any, ...]:
    results: list[Any] = []
    for fmt in FLOAT8_DTYPES:
        for block in ((1, 128), (1, 32)):
            results.append(fp8moe.quantize(spread, fmt=fmt, block=block, columnwise=True))
        results.append(fp8moe.quantize_weights(w13, fmt=fmt))
    values = [fp8moe.dequantize(side) for q in results for side in (q.rowwise, q.columnwise)]
    return tuple(results), tuple(values)


def compare_quantized(i: Inputs, results: tuple[Any, ...], values: tuple[np.ndarray, ...]) -> None:
    decoded = iter(values)
    for q in results:
        for side, name in ((q.rowwise, "rows"), (q.columnwise, "columns")):
            rows, columns = side.block
            x = (i.w13 if rows == columns else i.spread).astype(np.float64)
            label = f"{side.fmt} {name} by {rows} x {columns}"
            codes, scales, wanted = quantized_by_blocks(x, side)
            _equal(side.data, codes, f"{label}: codes")
            _equal(side.scales, scales, f"{label}: scales")
            _equal(next(decoded), wanted, f"{label}: values")


def quantized_by_blocks(x: np.ndarray, like: QuantTensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes and scales of [..., M, K] in float64, in the orientation of ``like``, and the values."""
    numbers = fp8_numbers(like.fmt)
    down, right = like.block  # type: ignore[misc]
    whole = np.zeros((*x.shape[:-2], -(-x.shape[-2] // down) * down, -(-x.shape[-1] // right) * right))
    whole[..., : x.shape[-2], : x.shape[-1]] = x
    blocks = whole.reshape(*x.shape[:-2], whole.shape[-2] // down, down, whole.shape[-1] // right, right)
    exponents = np.ceil(np.log2(np.abs(blocks).max(axis=(-3, -1)) / numbers[-1]))
    scales = np.repeat(np.repeat(np.exp2(exponents), down, axis=-2), right, axis=-1)
    scales = scales[..., : x.shape[-2], : x.shape[-1]]
    codes = rounded_to_fp8(x / scales, numbers)
    values = np.where(codes & 0x80, -1, 1) * numbers[codes & 0x7F] * scales
    if like.transposed or right == 1:
        codes = codes.mT
    if like.transposed:
        exponents = exponents.mT
    stored = exponents + 127 if like.scales.dtype == np.uint8 else np.exp2(exponents)
    return codes, stored, values


def transposed(spread: Any, ids: Any) -> tuple[Any, ...]:
    # exact, because values past the last expert are unspecified in a transposed tensor
    plan = fp8moe.plan_topk(ids, EXPERTS, align_size=128, num_out_tokens="exact")
    q = fp8moe.quantize(spread)
    moved = fp8moe.permute(q, plan).data
    of_plan = [fp8moe.permute_transpose(q, plan, target=target) for target in ("column", "block")]
    return *of_plan, fp8moe.scaling_aware_transpose(moved), moved


def compare_transposed(i: Inputs, column: Any, block: Any, alone: Any, moved: Any) -> None:
    rows, tokens, _, last = rows_of(i.ids, 128)
    values = np.zeros((last, HIDDEN), np.float32)
    values[rows] = fp8moe.dequantize(fp8moe.quantize(i.spread))[tokens]
    _equal(fp8moe.dequantize(moved), values, "rows")
    wanted = fp8moe.quantize(values, block=(128, 1))
    for label, found in (("permuted", column), ("alone", alone)):
        _equal(found.scales, wanted.scales, f"scales, {label}")
        _equal(found.data, wanted.data, f"codes, {label}")
    scales = np.repeat(np.repeat(block.scales, 128, axis=0), 128, axis=1)[:HIDDEN, :last]
    bound = 2.0**-10 * scales  # half of a tile's smallest code
    error = np.abs(fp8moe.dequantize(block).astype(np.float64) - values)
    _equal(error <= bound.T, np.ones_like(error, bool), "values of blocks")


def layouts(spread: Any) -> tuple[Any, ...]:
    rows, mx = fp8moe.quantize(spread), fp8moe.quantize(spread, block=(1, 32))
    blocked = fp8moe.to_layout(mx, "blocked_128x4")
    back = fp8moe.to_layout(blocked, "compact").scales
    return rows.scales, fp8moe.to_layout(rows, "gemm_ready").scales, mx.scales, blocked.scales, back


def compare_layouts(i: Inputs, scales: Any, ready: Any, mx: Any, blocked: Any, back: Any) -> None:
    _equal(ready[:, :TOKENS], scales.T, "gemm_ready")
    row, column = np.indices(mx.shape)
    tiles = -(-mx.shape[1] // 4)
    at = (row // 128 * tiles + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    wanted = np.zeros(blocked.size, np.uint8)
    wanted[at] = mx
    _equal(blocked.reshape(-1), wanted, "blocked_128x4")
    _equal(back, mx, "from blocked_128x4")


def activations(h: Any, without_gate: Any, dy: Any, row_probs: Any) -> tuple[Any, ...]:
    results = []
    for activation in ACTIVATIONS:
        of = without_gate if activation.kind == "relu2" else h
        y = fp8moe.swiglu(of, row_probs, activation=activation)
        g = fp8moe.swiglu_backward(dy, of, row_probs, activation=activation)
        results.append((y, g.dh, g.dprobs))
    return tuple(results)


def compare_activations(i: Inputs, *results: Any) -> None:
    a, b = i.x.astype(np.float64), i.dy.astype(np.float64)
    grad, probs, step = i.dy.astype(np.float64), i.row_probs.astype(np.float64)[:, None], 1e-5
    for activation, (y, dh, dprobs) in zip(ACTIVATIONS, results, strict=True):
        label = f"{activation.kind}, clamp {activation.clamp}"
        of = partial(activated, activation)
        plain = of(a, b)
        _near(y, plain * probs, 1e-6, f"{label}: values")
        _near(dprobs, (grad * plain).sum(axis=1), 1e-5, f"{label}: dprobs")
        # central differences in float64 are exact to about 1e-9
        wanted = [grad * probs * (of(a + step, b) - of(a - step, b)) / (2 * step)]
        if activation.kind != "relu2":
            wanted.append(grad * probs * (of(a, b + step) - of(a, b - step)) / (2 * step))
        _near(dh, np.concatenate(wanted, axis=1), 1e-5, f"{label}: gradient")


def activated(activation: fp8moe.Activation, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The formula of an activation without its factor, in float64."""
    if activation.kind == "relu2":
        return np.maximum(a, 0) ** 2
    if activation.clamp is not None:
        a, b = np.minimum(a, activation.clamp), np.clip(b, -activation.clamp, activation.clamp)
    if activation.kind == "geglu":
        gate = np.vectorize(math.erf)(a / 2**0.5) / 2 + 0.5
    elif activation.kind == "geglu_tanh":
        gate = (1 + np.tanh((2 / np.pi) ** 0.5 * (a + 0.044715 * a**3))) / 2
    else:
        gate = 1 / (1 + np.exp(-activation.alpha * a))
    return a * gate * (b + activation.linear_offset)


def activated_codes(h: Any, dy: Any, row_probs: Any) -> tuple[Any, ...]:
    y = fp8moe.swiglu_quantize(h, row_probs, columnwise=True)
    g = fp8moe.swiglu_quantize_backward(dy, h, row_probs, columnwise=True)
    sides = y.rowwise, y.columnwise, g.dh.rowwise, g.dh.columnwise
    alone = fp8moe.swiglu_quantize(h, row_probs), fp8moe.swiglu_quantize_backward(dy, h, row_probs).dh
    return *(fp8moe.dequantize(q) for q in (*sides, *alone)), g.dprobs


def compare_activated_codes(i: Inputs, *got: Any) -> None:
    y, plain = fp8moe.swiglu(i.h32, i.row_probs), fp8moe.swiglu_backward(i.dy32, i.h32, i.row_probs)
    both = [fp8moe.quantize(a, columnwise=True) for a in (y, plain.dh)]
    rows = [fp8moe.dequantize(q.rowwise) for q in both]
    columns = [fp8moe.dequantize(q.columnwise) for q in both]
    wanted = rows[0], columns[0], rows[1], columns[1], *rows
    labels = "rows", "columns", "rows of dh", "columns of dh", "rows alone", "rows of dh alone"
    for found, values, label in zip(got, wanted, labels, strict=False):
        _equal(found, values, label)
    _near(got[6], plain.dprobs, 1e-5, "dprobs")


def routes(logits: Any, bias: Any, grad_aux: Any, grad_z: Any) -> tuple[Any, ...]:
    results = []
    for config, of in zip(ROUTERS, (None, bias), strict=True):
        r = fp8moe.route(logits, config, expert_bias=of, num_sequences=2)
        options = {"tokens_per_expert": r.tokens_per_expert, "grad_aux_loss": grad_aux, "grad_z_loss": grad_z}
        grad = fp8moe.route_backward(r.topk_probs, logits, r.topk_ids, config, **options)
        results.append((r.topk_ids, r.tokens_per_expert, r.topk_probs, r.aux_loss, r.z_loss, grad))
    return tuple(results)


def compare_routes(i: Inputs, *results: Any) -> None:
    logits = i.logits.astype(np.float64)
    for config, bias, (ids, counts, weights, aux, z, grad) in zip(
        ROUTERS, (None, i.bias), results, strict=True
    ):
        label = config.score_function
        losses = partial(routed_losses, config, ids=ids, counts=counts)
        wanted_weights, wanted_aux, wanted_z = losses(logits)
        choice = logits if bias is None else scores_of(config, logits) + bias
        if config.num_groups > 1:
            best = np.sort(choice.reshape(TOKENS, config.num_groups, -1), axis=2)[:, :, -2:]
            order = np.argsort(-best.sum(axis=2), axis=1, kind="stable")
            allowed = np.zeros((TOKENS, config.num_groups), bool)
            np.put_along_axis(allowed, order[:, : config.topk_groups], True, axis=1)
            choice = np.where(np.repeat(allowed, 8 // config.num_groups, axis=1), choice, -np.inf)
        _equal(ids, np.argsort(-choice, axis=1, kind="stable")[:, :2], f"{label}: ids")
        halves = np.split(ids, 2)
        _equal(counts, [np.bincount(h.ravel(), minlength=8) for h in halves], f"{label}: tokens per expert")
        _near(weights, wanted_weights, 1e-6, f"{label}: probabilities")
        _near(aux, np.array([wanted_aux.sum()]), 1e-6, f"{label}: auxiliary loss")
        _near(z, np.array([wanted_z.sum()]), 1e-6, f"{label}: z loss")
        step = 1e-5
        wanted = np.zeros_like(logits)
        for expert in range(8):  # a token's logits influence only its own terms, so all move at once
            ends = []
            for sign in (1, -1):
                moved = logits.copy()
                moved[:, expert] += sign * step
                w, a, zz = losses(moved)
                ends.append((w * weights).sum(axis=1) + i.grad_aux * a + i.grad_z * zz)
            wanted[:, expert] = (ends[0] - ends[1]) / (2 * step)
        _near(grad, wanted, 1e-5, f"{label}: gradient")


def scores_of(config: fp8moe.RouterConfig, logits: np.ndarray) -> np.ndarray:
    if config.score_function == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    e = np.exp(logits)
    return e / e.sum(axis=1, keepdims=True)


def routed_losses(
    config: fp8moe.RouterConfig, logits: np.ndarray, *, ids: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, and each token's terms of the auxiliary loss and of the z loss."""
    scores = scores_of(config, logits)
    weights = np.take_along_axis(scores, ids, axis=1)
    if config.renormalize:
        weights = weights / weights.sum(axis=1, keepdims=True)
    shares = scores / scores.sum(axis=1, keepdims=True)
    length = TOKENS // 2
    fractions = np.repeat(counts, length, axis=0) / (config.topk * length)
    aux = 8 * (fractions * shares).sum(axis=1) / length / 2
    z = np.log(np.exp(logits).sum(axis=1)) ** 2 / TOKENS
    return weights * config.scaling_factor, aux, z


def check_grouped_gemm(i: Inputs) -> None:
    x, w = fp8moe.quantize(i.x), fp8moe.quantize_weights(i.w13)
    dy = fp8moe.quantize(i.dy)
    parts = [slice(OFFSETS[e], OFFSETS[e + 1]) for e in range(EXPERTS)]
    for label, rows, weights, backward in (
        ("FP8", x, w.rowwise, False),
        ("FP8 backward", dy, w.columnwise, True),
        ("bfloat16", i.x, i.w13, False),
        ("bfloat16 backward", i.dy, i.w13, True),
    ):
        plain = not isinstance(weights, QuantTensor)
        got = fp8moe.grouped_gemm(rows, weights, OFFSETS, transpose_w=backward and plain)
        wide, wide_w = _wide(rows), _wide(weights) if backward else _wide(weights).mT
        for e, part in enumerate(parts):
            _near(got[part], wide[part] @ wide_w[e], BF16, f"{label}: expert {e}")
    columns = [fp8moe.scaling_aware_transpose(q, OFFSETS) for q in (dy, x)]
    starts = (OFFSETS // 128 * 128).astype(np.int32)
    blocks = [fp8moe.scaling_aware_transpose(q, target="block") for q in (dy, x)]
    for label, (d, a), offsets in (
        ("bfloat16", (i.dy, i.x), OFFSETS),
        ("FP8 columns", columns, OFFSETS),
        ("FP8 blocks", blocks, starts),
    ):
        wide_d, wide_a = _wide(d, offsets), _wide(a, offsets)
        total = np.ones((EXPERTS, HIDDEN, HIDDEN), np.float32)
        got = fp8moe.grouped_gemm_wgrad(d, a, offsets)
        fp8moe.grouped_gemm_wgrad(d, a, offsets, total)
        for e in range(EXPERTS):
            part = slice(offsets[e], offsets[e + 1])
            wanted = wide_d[part].T @ wide_a[part]
            _near(got[e], wanted, 1e-5, f"{label}: gradient of expert {e}")
            _near(total[e], wanted + 1, 1e-5, f"{label}: sum with the gradient of expert {e}")
    plan = fp8moe.plan_topk(i.ids, EXPERTS, align_size=128, num_out_tokens="exact")
    moved = fp8moe.permute_gemm(x, w.rowwise, plan, i.probs)
    rows, tokens, slots, last = rows_of(i.ids, 128)
    wanted, probs = np.zeros((last, 2 * FFN)), np.zeros(last, np.float32)
    probs[rows] = i.probs[tokens, slots]
    wide, wide_w = _wide(x), _wide(w.rowwise)
    for row, token, slot in zip(rows, tokens, slots, strict=True):
        wanted[row] = wide_w[i.ids[token, slot]] @ wide[token]
    _near(moved.data, wanted, BF16, "permuted product")
    _equal(moved.probs, probs, "permuted probabilities")


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


class Mirror(Alone):
    """The first of two ranks, of which the second has the same tokens. ``back``: the rows that the second
    returns to `combine`."""

    world_size = 2
    back: Any = None

    def counts(self, counts: tuple[Any, ...], header: dict[str, int]) -> list[Counts]:
        return [(tuple(map(int, c)),) * 2 for c in counts]

    def exchange(self, rows: Any, counts: Counts, size: int | None = None) -> Pending:
        own = rows[: counts[0][0]].view("uint8")  # bytes: CuPy lacks functions of bfloat16
        of_second = own if self.back is None else self.back.view("uint8").reshape(-1, *own.shape[1:])
        received = self.xp.concatenate([own, of_second]).view(rows.dtype)
        return super().exchange(received, ((len(received),),), size)


def messages(x: Any, ids: Any, probs: Any, of_second: Any) -> tuple[Any, ...]:
    xp = np if isinstance(x, np.ndarray) else require_cupy("the CUDA selftest")
    results = []
    for kind in (Alone, AloneByWindows, Mirror):
        for fmt in (None, "e4m3"):
            comm = kind(xp)
            dispatched = expert_parallel.dispatch(x, ids, probs, MIRRORED_EXPERTS, comm, fmt=fmt)
            rows = dispatched.x if fmt is None else fp8moe.dequantize(dispatched.x, dtype="bfloat16")
            if isinstance(comm, Mirror):
                whole = x if fmt is None else fp8moe.dequantize(fp8moe.quantize(x), dtype="bfloat16")
                comm.back = whole.view("uint16")[of_second]
            back = expert_parallel.combine(rows, dispatched.route, comm)
            results.append((dispatched.x, dispatched.topk_ids, dispatched.topk_probs, back))
    return tuple(results)


def compare_messages(i: Inputs, *results: Any) -> None:
    q, half = fp8moe.quantize(i.wide), MIRRORED_EXPERTS // 2
    wide = fp8moe.dequantize(q).astype(i.x.dtype)
    of_first, of_second = (i.ids >= 0) & (i.ids < half), i.ids >= half
    for n, (x, ids, probs, back) in enumerate(results):
        mirrored, coded = n >= 4, n % 2 == 1
        label = f"{('exchange', 'windows', 'two ranks')[n // 2]}, {'e4m3' if coded else 'bfloat16'}"
        here = of_first if mirrored else i.ids >= 0
        tokens = np.flatnonzero(here.any(axis=1))
        tokens = np.concatenate([tokens, tokens]) if mirrored else tokens
        if coded:
            _equal(x.data, q.data[tokens], f"{label}: codes")
            _equal(x.scales, q.scales[tokens], f"{label}: scales")
        else:
            _equal(x, i.wide[tokens], f"{label}: rows")
        _equal(ids, np.where(here, i.ids, -1)[tokens], f"{label}: expert ids")
        _equal(probs, i.probs[tokens], f"{label}: probabilities")
        ranks = here.any(axis=1, keepdims=True) + 1.0 * (of_second.any(axis=1, keepdims=True) & mirrored)
        _equal(back, (wide if coded else i.wide) * ranks, f"{label}: rows that came back")


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
            _near(got, wanted, 0.125, recipe, math.inf)


LAYER = "x", "w13", "w2", "ids", "probs", "dy"


class NotChecked(Exception):
    """A check that this machine cannot run."""


def check_torch(device: str, inputs: Sequence[Inputs]) -> None:
    """The experts of torch's tensors with their gradients; on CUDA on a stream of its own, and in a CUDA
    graph that is replayed with each of the other inputs."""
    torch, ops = framework("torch"), load_module("fp8moe.adapters.torch_ops")
    if device == "cuda" and not torch.cuda.is_available():
        raise NotChecked("torch finds no CUDA device")

    def tensor(a: np.ndarray) -> Any:
        if a.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(a).to(device)

    x, w13, w2, ids, probs, dy = (tensor(getattr(inputs[0], name)).clone() for name in LAYER)
    leaves = [t.requires_grad_() for t in (x, probs, w13, w2)]

    def step() -> Any:
        for leaf in leaves:
            leaf.grad = None
        y = ops.moe_experts(x, w13, w2, ids, probs, recipe="fp8_flow")
        y.backward(dy)
        return y

    def compare(i: Inputs, y: Any) -> None:
        compare_layer(device, i, [t.detach().float().cpu().numpy() for t in (y, *(a.grad for a in leaves))])

    _equal(ops.quantize(x.detach()).data.cpu().numpy(), fp8moe.quantize(inputs[0].x).data, "codes")
    if device == "cpu":
        compare(inputs[0], step())
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            y = step()
    torch.cuda.current_stream().wait_stream(stream)
    compare(inputs[0], y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = step()
    for i in inputs:
        with torch.no_grad():
            for t, name in zip((x, w13, w2, ids, probs, dy), LAYER, strict=True):
                t.copy_(tensor(getattr(i, name)))
        graph.replay()
        compare(i, y)


def check_jax(device: str, inputs: Sequence[Inputs]) -> None:
    """The experts of JAX's arrays with their gradients, in a compiled program."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others need memory too
    jax, ops = framework("jax"), load_module("fp8moe.adapters.jax_ops")
    try:
        place = jax.devices(device)[0]
    except RuntimeError as error:
        raise NotChecked(f"jax finds no {device} device") from error

    def loss(x: Any, probs: Any, w13: Any, w2: Any, ids: Any, dy: Any) -> Any:
        y = ops.moe_ffn(x, w13, w2, ids, probs, recipe="fp8_flow")
        return (y.astype("float32") * dy.astype("float32")).sum(), y

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    for i in inputs:
        x, w13, w2, ids, probs, dy = (jax.device_put(getattr(i, name), place) for name in LAYER)
        _equal(np.asarray(ops.quantize(x).data), fp8moe.quantize(i.x).data, "codes")
        grads, y = program(x, probs, w13, w2, ids, dy)
        compare_layer(device, i, [np.asarray(a).astype(np.float32) for a in (y, *grads)])


def framework(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise NotChecked(f"{name} is not installed")
    return load_module(name)


def compare_layer(device: str, i: Inputs, got: list[np.ndarray]) -> None:
    """Compare y, dx, dprobs, dw13 and dw2 of a framework with NumPy's."""
    wanted, saved = fp8moe.moe_forward(i.x, i.w13, i.w2, i.ids, i.probs, recipe="fp8_flow")
    g = fp8moe.moe_backward(saved, i.dy)
    for label, a, b in zip(
        ("y", "dx", "dprobs", "dw13", "dw2"), got, (wanted, g.dx, g.dprobs, g.dw13, g.dw2), strict=True
    ):
        if device == "cpu":
            _near(a, b, BF16, label)
        else:  # other summation orders change last bits, and with them the rounding of some codes
            _near(a, b, 2e-2, label, math.inf)


FRAMEWORKS = {"torch": check_torch, "jax": check_jax}

#: operations that both devices run
OPERATIONS = {
    "plan, permute": Check("x ids probs mask mask_probs index", plans, compare_plans, 0.0),
    # results of bfloat16, of sums with and without fused multiply-add
    "unpermute, gradients": Check("x dy rows rows_probs ids probs", sums, compare_sums, BF16),
    "chunks, padding": Check("x row_probs sizes order", chunks, compare_chunks, 0.0),
    "quantize": Check("spread w13", quantized, compare_quantized, 0.0),
    "transpose": Check("spread ids", transposed, compare_transposed, 0.0),
    "layouts of scales": Check("spread", layouts, compare_layouts, 0.0),
    "activations": Check("h32 x32 dy32 row_probs", activations, compare_activations, 1e-5),
    # float32 rounding changes a code by at most one, 2^-3 of its value
    "activations to FP8": Check("h dy row_probs", activated_codes, compare_activated_codes, 2.0**-8, 2.0**-3),
    # the ids are equal, because they are selected by logits
    "router": Check("logits bias grad_aux grad_z", routes, compare_routes, 1e-5),
    "messages of ranks": Check("wide ids probs of_second", messages, compare_messages, 0.0),
}
CHECKS: dict[str, Callable[[Inputs], None]] = {
    "number formats": check_formats,
    **OPERATIONS,
    "grouped GEMM": check_grouped_gemm,
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
            return lambda: self._compare(run, 2e-2, *LAYER, of_one=math.inf)

        def operation(check: Check) -> Callable[[], None]:
            return lambda: self._compare(check.run, check.bound, *check.arrays, of_one=check.of_one)

        return {
            "grouped products": self._check_products,
            **{name: operation(check) for name, check in OPERATIONS.items()},
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
                total = np.ones(wanted.shape, np.float32)  # a new gradient is part of the layer's check
                self._multiply(fp8moe.grouped_gemm_wgrad, (d, a, starts, total), wanted + 1, architecture)
            if architecture == "sm_90a":  # the only one that has this kernel
                w = np.ascontiguousarray(inputs.w13[0].T)
                got = add_product(*(self.cupy.asarray(a) for a in (dy, x, w)))
                wanted = _wide(dy) + _wide(x) @ _wide(w)
                _near(self.cupy.asnumpy(got), wanted, BF16, "add_product")

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
                _near(self.cupy.asnumpy(got), wanted, BF16, label, 4 * BF16)

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
                _equal(a, b, f"array {n}")
            else:
                _near(a, b, bound, f"array {n}", of_one)


def permute_gemm(*operands: Any, **options: Any) -> Any:
    return fp8moe.permute_gemm(*operands, **options).data


def _wide(x: Any, offsets: Any = None) -> Any:
    """The values of an operand in float64, [rows, columns]."""
    if not isinstance(x, QuantTensor):
        return x.astype(np.float64)
    return fp8moe.dequantize(x, expert_offsets=None if x.transposed else offsets).astype(np.float64)


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


def _equal(got: Any, wanted: Any, label: str) -> None:
    got, wanted = np.asarray(got), np.asarray(wanted)
    if got.shape != wanted.shape:
        raise ValueError(f"{label}: got shape {got.shape}; wanted {wanted.shape}")
    with np.errstate(invalid="ignore"):  # NaN differs from everything
        wrong = int(np.sum(got != wanted))
    if wrong:
        raise ValueError(f"{label}: {wrong} values differ")


def _near(got: Any, wanted: Any, bound: float, label: str, of_one: float | None = None) -> None:
    """Compare the norm of the difference, and each difference, with the value and the root mean square."""
    got, wanted = (np.asarray(a).astype(np.float64) for a in (got, wanted))
    if got.shape != wanted.shape:
        raise ValueError(f"{label}: got shape {got.shape}; wanted {wanted.shape}")
    if not got.size:
        return
    difference, norm = np.abs(got - wanted), max(float(np.linalg.norm(wanted)), 1e-300)
    error = float(np.linalg.norm(difference)) / norm
    if not error <= bound:
        raise ValueError(f"{label}: relative error {error:.2e}; wanted at most {bound:.2e}")
    of_one = bound if of_one is None else of_one
    error = float((difference / (np.abs(wanted) + norm / wanted.size**0.5)).max())
    if not error <= of_one:
        raise ValueError(f"{label}: relative error of one value {error:.2e}; wanted at most {of_one:.2e}")
