"""Checks of number formats, quantisation, transposes and layouts of scales."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe.formats import FLOAT8_DTYPES
from fp8moe.records import Quantized, QuantTensor
from fp8moe.selftest.inputs import EXPERTS, HIDDEN, TOKENS, Inputs, equal
from fp8moe.selftest.rows import rows_of


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
    equal(wide.astype(ml_dtypes.bfloat16).view(np.uint16), rounded, "rounding to bfloat16")
    values = (rounded.astype(np.uint32) << 16).view(np.float32)
    equal(rounded.view(ml_dtypes.bfloat16).astype(np.float32), values, "values of bfloat16")
    for fmt, dtype in FLOAT8_DTYPES.items():
        numbers = fp8_numbers(fmt)
        codes = np.arange(len(numbers), dtype=np.uint8)
        equal(codes.view(dtype).astype(np.float64), numbers, f"values of {fmt}")
        equal((codes | 0x80).view(dtype).astype(np.float64), -numbers, f"negative values of {fmt}")
        x = (wide * numbers[-1] / np.abs(wide).max()).astype(np.float32)
        ties = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
        for numerals in (x, ties):
            wanted = rounded_to_fp8(numerals.astype(np.float64), numbers)
            equal(numerals.astype(dtype).view(np.uint8), wanted, f"rounding to {fmt}")


def rounded_to_fp8(x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Codes of the nearest numbers, with even codes for ties."""
    above = np.searchsorted(numbers[:-1], np.abs(x))
    below = np.maximum(above - 1, 0)
    left, right = np.abs(x) - numbers[below], numbers[above] - np.abs(x)
    nearest = np.where((left < right) | ((left == right) & (below % 2 == 0)), below, above)
    return (nearest | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def quantized(spread: Any, w13: Any, spoilt: Any) -> tuple[Any, ...]:
    results: list[Any] = []
    for fmt in FLOAT8_DTYPES:
        for block in ((1, 128), (1, 32)):
            results.append(fp8moe.quantize(spread, fmt=fmt, block=block, columnwise=True))
        results.append(fp8moe.quantize_weights(w13, fmt=fmt))
    rows_alone = fp8moe.quantize_weights(w13, columnwise=False).rowwise
    results.append(Quantized(rows_alone, fp8moe.transpose_codes(rows_alone)))
    values = [fp8moe.dequantize(side) for q in results for side in (q.rowwise, q.columnwise)]
    rows = fp8moe.quantize(spoilt, block=(1, 32))
    columns = fp8moe.quantize(spoilt, block=(32, 1)), fp8moe.scaling_aware_transpose(rows)
    return tuple(results), tuple(values), (rows, *columns)


def compare_quantized(
    i: Inputs, results: tuple[Any, ...], values: tuple[np.ndarray, ...], spoilt: tuple[Any, ...]
) -> None:
    rows, columns, transposed = spoilt
    nan = np.isnan(i.spoilt.astype(np.float32))
    whole = np.zeros((-(-TOKENS // 32) * 32, HIDDEN), bool)
    nan_of_rows = nan.reshape(TOKENS, -1, 32).any(axis=2).repeat(32, axis=1)
    for q, spread_nan in ((columns, nan), (transposed, nan_of_rows)):
        whole[:TOKENS] = spread_nan
        blocks = whole.reshape(-1, 32, HIDDEN).any(axis=1)
        equal(q.scales == 255, blocks, "columns with NaN: scales")
        equal(q.data == 0x7F, blocks.repeat(32, axis=0)[:TOKENS].T, "columns with NaN: codes")
    equal(rows.scales == 255, nan_of_rows[:, ::32], "rows with NaN: scales")
    equal(rows.data == 0x7F, nan_of_rows, "rows with NaN: codes")
    decoded = iter(values)
    for q in results:
        for side, name in ((q.rowwise, "rows"), (q.columnwise, "columns")):
            rows, columns = side.block
            x = (i.w13 if rows == columns else i.spread).astype(np.float64)
            label = f"{side.fmt} {name} by {rows} x {columns}"
            codes, scales, wanted = quantized_by_blocks(x, side)
            equal(side.data, codes, f"{label}: codes")
            equal(side.scales, scales, f"{label}: scales")
            equal(next(decoded), wanted, f"{label}: values")


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
    equal(fp8moe.dequantize(moved), values, "rows")
    wanted = fp8moe.quantize(values, block=(128, 1))
    for label, found in (("permuted", column), ("alone", alone)):
        equal(found.scales, wanted.scales, f"scales, {label}")
        equal(found.data, wanted.data, f"codes, {label}")
    scales = np.repeat(np.repeat(block.scales, 128, axis=0), 128, axis=1)[:HIDDEN, :last]
    bound = 2.0**-10 * scales  # half of a tile's smallest code
    error = np.abs(fp8moe.dequantize(block).astype(np.float64) - values)
    equal(error <= bound.T, np.ones_like(error, bool), "values of blocks")


def layouts(spread: Any) -> tuple[Any, ...]:
    rows, mx = fp8moe.quantize(spread), fp8moe.quantize(spread, block=(1, 32))
    blocked = fp8moe.to_layout(mx, "blocked_128x4")
    back = fp8moe.to_layout(blocked, "compact").scales
    return rows.scales, fp8moe.to_layout(rows, "gemm_ready").scales, mx.scales, blocked.scales, back


def compare_layouts(i: Inputs, scales: Any, ready: Any, mx: Any, blocked: Any, back: Any) -> None:
    equal(ready[:, :TOKENS], scales.T, "gemm_ready")
    row, column = np.indices(mx.shape)
    tiles = -(-mx.shape[1] // 4)
    at = (row // 128 * tiles + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    wanted = np.zeros(blocked.size, np.uint8)
    wanted[at] = mx
    equal(blocked.reshape(-1), wanted, "blocked_128x4")
    equal(back, mx, "from blocked_128x4")


def forms(codes: Any, scale_inv: Any, blocks: Any, exponents: Any) -> tuple[Any, ...]:
    w = fp8moe.from_block_fp8(codes, scale_inv, parts=2, rows=128)
    mx, rounded = fp8moe.from_mxfp4(blocks, exponents, parts=2, interleaved=True, rows=128)
    return w, fp8moe.to_block_fp8(w, parts=2, rows=96), mx, rounded


def compare_forms(i: Inputs, w: Quantized, back: Any, mx: Quantized, rounded: np.ndarray) -> None:
    codes = i.codes.reshape(EXPERTS, 2, 96, HIDDEN)
    for part in range(2):
        equal(back[0][part], codes[:, part], "codes of block FP8")
        equal(back[1][part], i.scale_inv[:, part], "scales of block FP8")
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = np.stack((i.blocks & 15, i.blocks >> 4), axis=-1).reshape(EXPERTS, 96, 2, HIDDEN)
    values = np.where(nibbles & 8, -1, 1) * numbers[nibbles & 7]
    values *= np.exp2(i.exponents.astype(np.float64) - 127).reshape(EXPERTS, 96, 2, -1).repeat(32, axis=3)
    equal(rounded, np.zeros(EXPERTS, np.int32), "rounded values of MXFP4")
    for q, wanted in ((w, None), (mx, values.swapaxes(1, 2))):
        padded = fp8moe.dequantize(q.rowwise).reshape(EXPERTS, 2, 128, HIDDEN)
        if wanted is not None:
            equal(padded[:, :, :96], wanted, "values of MXFP4")
        equal(padded[:, :, 96:], np.zeros((EXPERTS, 2, 32, HIDDEN)), "rows that are filled up")
        equal(q.columnwise.data, q.rowwise.data.swapaxes(1, 2), "transposed codes")
        equal(q.columnwise.scales, q.rowwise.scales.swapaxes(1, 2), "transposed scales")
