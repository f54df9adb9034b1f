"""Random inputs of the self-test, and comparisons of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe.records import QuantTensor

TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 300, 256, 128, 5, 3
ALIGN = 16
PERMUTED_ROWS = (TOKENS * TOPK + EXPERTS * (ALIGN - 1)) // ALIGN * ALIGN  # the plans' static bound
MIRRORED_EXPERTS = 6  # of both ranks of `fp8moe.selftest.ranks.Mirror`
BF16 = 2.0**-8  # larger than the rounding of a result to bfloat16
OFFSETS = np.array([0, 100, 100, 228, 290, TOKENS], np.int32)
ACTIVATIONS = (
    fp8moe.Activation(),
    fp8moe.Activation(clamp=1.501, alpha=1.702, linear_offset=1.0),  # no bfloat16 value equals the clamp
    fp8moe.Activation("geglu"),
    fp8moe.Activation("geglu_tanh"),
    fp8moe.Activation("gelu"),
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
        # gate and up of 96 rows: block FP8 with tiles of each, and MXFP4
        self.codes = rng.integers(0, 0x7F, (EXPERTS, 192, HIDDEN), np.uint8)
        self.scale_inv = rng.lognormal(-4, 1, (EXPERTS, 2, 1, HIDDEN // 128)).astype(np.float32)
        self.blocks = rng.integers(0, 256, (EXPERTS, 192, HIDDEN // 2), np.uint8)
        self.exponents = rng.integers(110, 124, (EXPERTS, 192, HIDDEN // 32), np.uint8)
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
        self.spoilt = self.spread.copy()  # some blocks of 32 with NaN, infinities or both
        for value, places in zip((np.nan, np.inf, -np.inf), rng.integers(0, TOKENS, (3, 20)), strict=True):
            self.spoilt[places, rng.integers(0, HIDDEN, 20)] = value
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


def wide_values(x: Any, offsets: Any = None) -> Any:
    """The values of an operand in float64, [rows, columns]."""
    if not isinstance(x, QuantTensor):
        return x.astype(np.float64)
    return fp8moe.dequantize(x, expert_offsets=None if x.transposed else offsets).astype(np.float64)


def equal(got: Any, wanted: Any, label: str) -> None:
    got, wanted = np.asarray(got), np.asarray(wanted)
    if got.shape != wanted.shape:
        raise ValueError(f"{label}: got shape {got.shape}; wanted {wanted.shape}")
    with np.errstate(invalid="ignore"):  # NaN differs from everything
        wrong = int(np.sum(got != wanted))
    if wrong:
        raise ValueError(f"{label}: {wrong} values differ")


def near(got: Any, wanted: Any, bound: float, label: str, of_one: float | None = None) -> None:
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
