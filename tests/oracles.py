"""Independent oracles: expected results by exact fractions, float64 or torch, without the library."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import torch
from cases import MAX, from_float8, generator, to_float8

EXPONENTS = np.arange(-127, 128)  # of E8M0; the index is the byte


def e8m0(amax, fmt, rounding="up"):
    """Scale bytes of MXFP8 for float32 ``amax``, by tables in float64, whose entries are exact.

    "up": the smallest scale for which the largest code is at least amax. Transformer Engine divides in
    float32, whose steps below 2^-126 are 2^-149, so 2^-127 also covers values up to half a step above it.
    "floor": the largest power of two within amax, divided by the format's largest power of two; infinity is
    2^128, as its bits say. The byte of NaN is E8M0's own NaN.
    """
    amax = np.asarray(amax, np.float64)
    if rounding == "up":
        scales = np.exp2(EXPONENTS)
        scales[0] += 2.0**-150
        byte = np.where(np.isinf(amax), 254, np.searchsorted(MAX[fmt] * scales, amax))
    else:
        emax = {"e4m3": 8, "e5m2": 15}[fmt]
        amax = np.where(np.isinf(amax), 2.0**128, amax)
        byte = np.maximum(np.searchsorted(np.exp2(EXPONENTS + emax), amax, side="right") - 1, 0)
    return np.where(np.isnan(amax), 255, byte).astype(np.uint8)


def e8m0_values(byte):
    """Scales in float64."""
    return np.where(np.asarray(byte) == 255, np.nan, np.exp2(np.asarray(byte, np.float64) - 127))


def at_boundaries(fmt, dtype):
    """Magnitudes on both sides of every boundary where a block's exponent changes, with either rounding: five
    successive bit patterns around each, the smallest, the largest and random ones."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    largest = int(np.array(ml_dtypes.finfo(dtype).max, dtype).view(unsigned))
    edges = np.concatenate([np.exp2(EXPONENTS) * MAX[fmt], np.exp2(np.arange(-149.0, 128))])
    edges = edges[edges <= float(ml_dtypes.finfo(dtype).max)].astype(dtype).view(unsigned).astype(np.int64)
    near = (edges[:, None] + np.arange(-2, 3)).ravel()
    some = generator().integers(0, largest, 1000, endpoint=True)
    bits = np.unique(np.clip(np.concatenate([near, some, np.arange(3), [largest - 1, largest]]), 0, largest))
    return bits.astype(unsigned).view(dtype)


def blocks_of(amax, rng):
    """[N, 32]: each row contains its amax, at a random position and with a random sign, and smaller
    numbers."""
    x = (amax.astype(np.float64)[:, None] * rng.uniform(-1, 1, (len(amax), 32))).astype(amax.dtype)
    x[np.arange(len(amax)), rng.integers(0, 32, len(amax))] = amax * rng.choice([-1, 1], len(amax))
    return x


def quantized_scale(amax, fmt, pow2, mx, rounding="up"):
    """The scale of one block by exact fractions; None means 1."""
    if mx:
        return float(e8m0_values(e8m0(amax, fmt, rounding)))
    if amax == 0 or not math.isfinite(amax):
        return 1.0
    if pow2:  # the smallest power of two that is at least amax / max, without division or floats
        ratio, exponent = Fraction(float(amax)) / Fraction(MAX[fmt]), -126
        while Fraction(2) ** exponent < ratio:
            exponent += 1
        return 2.0**exponent
    # a seventh is at least 1/14 of a step from the middle between two float32, so float64 may round before
    ratio = Fraction(float(amax)) / Fraction(MAX[fmt])
    return max(float(np.float32(float(ratio))), 2.0**-126)


def quantized(x, fmt, block, pow2=True, eps=0.0, rounding="up"):
    """(codes, scales), both in the order of x, by loops over blocks."""
    x32 = x.astype(np.float32)
    rows, cols = x.shape
    bm, bk = block
    scales = np.zeros((-(-rows // bm), -(-cols // bk)))
    codes = np.zeros(x.shape, np.uint8)
    mx = 32 in block
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * bm, (i + 1) * bm), slice(j * bk, (j + 1) * bk))
            amax = np.abs(x32[part]).max()
            amax = amax if np.isnan(amax) else max(amax, np.float32(eps))
            scale = scales[i, j] = quantized_scale(float(amax), fmt, pow2, mx, rounding)
            if mx or pow2:
                if mx and rounding == "floor" and np.isnan(scale):
                    scale = np.inf  # torchao divides by the float32 of exponent 255: codes of 0 and NaN
                y = x32[part].astype(np.float64) / scale  # a power of two, so this is exact
            else:
                y = x32[part] * (np.float32(1) / np.float32(scale))  # rounded twice, as in the specification
            codes[part] = to_float8(y, fmt)
    return codes, scales


def stored(scales, mx):
    if not mx:
        return scales.astype(np.float32)
    return np.where(np.isnan(scales), 255, np.log2(scales) + 127).astype(np.uint8)


def torch_swiglu(h, probs, activation):
    functions = {
        "silu": lambda a: a * torch.sigmoid(activation.alpha * a),
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda a: torch.nn.functional.gelu(a, approximate="tanh"),
        "relu2": lambda a: torch.relu(a).square(),
    }
    if activation.kind in functions:  # without a gate
        y = functions[activation.kind](h)
        return y if probs is None else y * probs[:, None]
    a, b = h.chunk(2, dim=-1)
    if activation.clamp is not None:
        a, b = a.clamp(max=activation.clamp), b.clamp(-activation.clamp, activation.clamp)
    of_gate = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}[activation.kind]
    y = functions[of_gate](a) * (b + activation.linear_offset)
    return y if probs is None else y * probs[:, None]


def exact(q):
    width = q.block[1]
    scales = e8m0_values(q.scales) if width == 32 else q.scales.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return from_float8(q.data, q.fmt) * np.repeat(scales, width, axis=1)[:, : q.data.shape[1]]


def transposed(q, ranges, target="column"):
    """(codes [K, M], scales [blocks, K]) in float64."""
    x, height = exact(q), q.block[1]
    codes, scales = np.zeros(x.shape[::-1], np.uint8), []
    for lo, hi in ranges:
        for r in range(lo, hi, height):
            block = x[r : min(r + height, hi)]
            if target == "column":
                row = [
                    quantized_scale(float(a), q.fmt, True, height == 32) for a in np.abs(block).max(axis=0)
                ]
            else:
                row = tile_scales(q, r, min(r + height, hi))
            scales.append(row)
            codes[:, r : r + len(block)] = to_float8(block / row, q.fmt).T
    return codes, np.array(scales).reshape(len(scales), x.shape[1])


def tile_scales(q, lo, hi):
    row = []
    for c in range(0, q.data.shape[1], q.block[1]):
        part = q.data[lo:hi, c : c + q.block[1]]
        occupied = ((part & 0x7F) != 0).any(axis=1)
        scales = q.scales[lo:hi, c // q.block[1]]
        if q.block[1] == 32:
            occupied |= scales == 255  # NaN times 0 is NaN
            scales = e8m0_values(scales)
        scales = scales[occupied & (scales != 0)]
        nothing = 2.0**-127 if q.block[1] == 32 else 1.0
        row += [float(scales.max()) if len(scales) else nothing] * part.shape[1]
    return row


def lost(values):
    """amax of float64 values, and the numbers of non-finite, saturated and flushed ones, from ml_dtypes
    codes."""
    saturated = flushed = 0
    for row in values:
        for start in range(0, len(row), 128):
            block = row[start : start + 128]
            amax = np.abs(block).max()
            scale = 1.0 if amax == 0 or not np.isfinite(amax) else 2.0 ** -np.floor(np.log2(448 / amax))
            codes = np.clip(block / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
            saturated += (np.abs(block) > 448 * scale).sum()
            flushed += ((codes == 0) & (block != 0)).sum()
    return np.abs(values).max(), (~np.isfinite(values)).sum(), saturated, flushed
