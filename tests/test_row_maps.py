"""Transformer Engine's row maps by index, against loops."""

import numpy as np
import pytest
from cases import SEED

import fp8moe
from fp8moe import row_maps

ARRAYS = row_maps.NumPy()


@pytest.mark.parametrize("rows", [9, 5, 12])
def test_index_map_of_the_example(rows):
    ids = np.array([[1, 0], [2, 1], [0, 2], [1, 0], [1, -1]], np.int32)
    wanted = np.array([3, 7, 1, 5, 6, 0, 4, 8, 2, -1])
    index_map = row_maps.index_map(ARRAYS, ids, rows)
    assert index_map.dtype == np.int32
    assert index_map.tolist() == np.where(wanted < rows, wanted, -1).tolist()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(6, 3), (5, 1), (0, 2)])
def test_rows_by_index(shape, dtype):
    """A loop over entries, by id and then by token; ids of any size."""
    random = np.random.default_rng(SEED)
    ids = random.choice(np.array([-3, -1, 0, 5, 2**31 - 1], dtype), shape)
    tokens, k = shape
    keep = max(0, tokens * k - 4)
    entries = [(int(ids[t, j]), t * k + j) for t in range(tokens) for j in range(k) if ids[t, j] >= 0]
    order = [entry for _, entry in sorted(entries)][:keep]
    index_map = row_maps.index_map(ARRAYS, ids, keep)
    wanted = np.full(k * tokens, -1)
    for row, entry in enumerate(order):
        wanted[entry % k * tokens + entry // k] = row
    assert index_map.tolist() == wanted.tolist()
    plan = fp8moe.plan_index_map(index_map, k, num_out_tokens=keep)
    x = random.standard_normal((tokens, 4)).astype(np.float32)
    moved = fp8moe.permute(x, plan).data
    assert np.array_equal(moved[: len(order)], x[[entry // k for entry in order]])
    assert not moved[len(order) :].any()
    probs = random.random(shape).astype(np.float32)
    kept = np.zeros(shape, np.float32)
    for entry in order:
        kept[entry // k, entry % k] = 1
    # k products and sums in float32: (k + 1) 2^-24 of sums of magnitudes
    bound = (k + 1) * 2.0**-24 * (np.abs(x) * (probs * kept).sum(axis=1, keepdims=True))
    wanted = x.astype(np.float64) * (probs * kept).astype(np.float64).sum(axis=1, keepdims=True)
    assert (np.abs(fp8moe.unpermute(moved, plan, probs) - wanted) <= bound).all()
