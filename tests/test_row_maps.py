"""Transformer Engine's row maps as plans: against plans from the routing itself, and loops."""

import numpy as np
import pytest
from cases import SEED, same_bits

import fp8moe
from fp8moe import row_maps

ARRAYS = row_maps.NumPy()


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("shape", [(7, 3), (0, 3), (5, 1), (4, 0)])
def test_plan_of_map(shape, align):
    """What the map came from moves rows as the plan made of it again."""
    random = np.random.default_rng(SEED)
    mask = random.random(shape) < 0.5
    plan = fp8moe.plan_routing_map(mask, align_size=align)
    again = row_maps.plan_of_map(ARRAYS, plan.row_id_map, plan.pad_offsets, plan.num_out_tokens)
    assert np.array_equal(again.row_id_map, plan.row_id_map)
    assert np.array_equal(again.tokens_per_expert, plan.tokens_per_expert)
    assert np.array_equal(again.pad_offsets, plan.pad_offsets)
    assert np.array_equal(again.expert_offsets[:-1], plan.expert_offsets[:-1])
    rows = random.standard_normal((plan.num_out_tokens, 8)).astype(np.float32)
    probs = random.random(shape).astype(np.float32)
    assert same_bits(fp8moe.unpermute(rows, again, probs), fp8moe.unpermute(rows, plan, probs))


def test_plan_of_map_without_padding():
    plan = fp8moe.plan_routing_map(np.array([[1, 0], [1, 1]], bool))
    again = row_maps.plan_of_map(ARRAYS, plan.row_id_map, None, 3)
    assert again.pad_offsets.tolist() == [0, 0]
    assert again.expert_offsets.tolist() == [0, 2, 3]


@pytest.mark.parametrize("rows", [9, 5, 12])
def test_index_map_of_the_example(rows):
    ids = np.array([[1, 0], [2, 1], [0, 2], [1, 0], [1, -1]], np.int32)
    wanted = np.array([3, 7, 1, 5, 6, 0, 4, 8, 2, -1])
    found = row_maps.index_map(ARRAYS, ids, rows)
    assert found.dtype == np.int32
    assert found.tolist() == np.where(wanted < rows, wanted, -1).tolist()


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
    plan = row_maps.plan_of_index_map(ARRAYS, index_map, k, keep)
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
