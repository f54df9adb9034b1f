"""Codes of weights that are transposed, or gates and ups apart: those of the weights turned and joined."""

import numpy as np
import pytest
from cases import BF16, assert_same, generator

import fp8moe
from fp8moe.weights import join_weights, transpose_weights


def masters(shape, dtype):
    """Blocks of 128 differ in size, and so in their scales."""
    rng = generator()
    w = rng.standard_normal(shape)
    for start in range(0, shape[1], 128):
        for column in range(0, shape[2], 128):
            w[:, start : start + 128, column : column + 128] *= 2.0 ** rng.integers(-9, 10)
    return w.astype(dtype)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(3, 256, 384), (2, 72, 200), (0, 128, 128)])
def test_transposed(shape, fmt):
    w = masters(shape, np.float32)
    found = transpose_weights(fp8moe.quantize_weights(w, fmt=fmt))
    assert_same(fp8moe.quantize_weights(np.ascontiguousarray(w.swapaxes(1, 2)), fmt=fmt), found)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_joined(dtype):
    parts = [masters((2, n, 200), dtype) for n in (128, 256)]
    found = join_weights([fp8moe.quantize_weights(w) for w in parts], np.concatenate)
    assert_same(fp8moe.quantize_weights(np.concatenate(parts, 1)), found)
