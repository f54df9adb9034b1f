"""Transformer Engine's row maps from masks and ids, compared with plans and loops; their plans by kernels."""

import numpy as np
import pytest
from backends import only_on_cpu, over
from cases import BF16, SEED, assert_same, generator, values

import fp8moe
from fp8moe.ops import row_maps

RNG = generator()


def index_map(ids, rows):
    order = np.argsort(row_maps.sort_key(ids.reshape(-1), 8 * ids.itemsize), kind="stable")
    return row_maps.index_map(order, ids, rows)


@pytest.mark.parametrize("rows", [9, 5, 12])
def test_index_map_of_the_example(rows):
    ids = np.array([[1, 0], [2, 1], [0, 2], [1, 0], [1, -1]], np.int32)
    wanted = np.array([3, 7, 1, 5, 6, 0, 4, 8, 2, -1])
    row_id_map = index_map(ids, rows)
    assert row_id_map.dtype == np.int32
    assert row_id_map.tolist() == np.where(wanted < rows, wanted, -1).tolist()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(6, 3), (5, 1), (0, 2)])
def test_rows_by_index(shape, dtype):
    """A loop over entries, by id and then by token, with ids of any size."""
    random = np.random.default_rng(SEED)
    ids = random.choice(np.array([-3, -1, 0, 5, 2**31 - 1], dtype), shape)
    tokens, k = shape
    keep = max(0, tokens * k - 4)
    entries = [(int(ids[t, j]), t * k + j) for t in range(tokens) for j in range(k) if ids[t, j] >= 0]
    order = [entry for _, entry in sorted(entries)][:keep]
    row_id_map = index_map(ids, keep)
    wanted = np.full(k * tokens, -1)
    for row, entry in enumerate(order):
        wanted[entry % k * tokens + entry // k] = row
    assert row_id_map.tolist() == wanted.tolist()
    plan = fp8moe.plan_index_map(row_id_map, k, num_out_tokens=keep)
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


# ---------------------------------------------------------------- masks, in NumPy and in JAX


@pytest.fixture(params=["numpy", "jax.numpy"])
def xp(request):
    return pytest.importorskip(request.param)


@pytest.mark.parametrize("room", [None, 5, 0])
@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("shape", [(7, 3), (0, 3), (5, 1), (4, 0)])
def test_map_of_mask_equals_the_plans(xp, shape, align, room):
    mask = np.random.default_rng(SEED).random(shape) < 0.5
    rows = "exact" if room is None else room
    plan = fp8moe.plan_routing_map(mask, align_size=align, num_out_tokens=rows)
    padded, pads = row_maps.padded_counts(xp, xp.asarray(plan.tokens_per_expert), align)
    assert padded.tolist() == plan.padded_tokens_per_expert.tolist()
    assert pads.tolist() == plan.pad_offsets.tolist()
    row_map, overflow = row_maps.map_of_mask(xp, xp.asarray(mask.astype(np.int32)), pads, plan.num_out_tokens)
    assert np.asarray(row_map).dtype == np.int32
    assert row_map.tolist() == plan.row_id_map.tolist()
    assert int(overflow) == plan.overflow[0]
    token, expert = row_maps.row_sources(xp, row_map, pads, plan.num_out_tokens)
    numbers = np.arange(1, shape[0] + 1, dtype=np.int32).reshape(-1, 1)
    moved = fp8moe.permute(numbers, plan).data[:, 0]  # 0 for rows without a token
    assert token.tolist() == [t - 1 if t else shape[0] for t in moved]
    ends = plan.expert_offsets[1:]
    wanted = [int(np.searchsorted(ends, r, "right")) if t else shape[1] for r, t in enumerate(moved)]
    assert expert.tolist() == wanted


def test_sources_of_the_example(xp):
    mask = xp.asarray(np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0], [0, 1, 0]], np.int32))
    padded, pads = row_maps.padded_counts(xp, mask.sum(axis=0, dtype=xp.int32), 4)
    assert (padded.tolist(), pads.tolist()) == ([4, 4, 4], [0, 1, 1])
    row_map, _ = row_maps.map_of_mask(xp, mask, pads, 12)
    token, expert = row_maps.row_sources(xp, row_map, pads, 12)
    assert token.tolist() == [0, 2, 3, 5, 0, 1, 3, 4, 1, 2, 5, 5]
    assert expert.tolist() == [0, 0, 0, 3, 1, 1, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("align", [1, 4])
def test_map_of_a_devices_tokens_with_global_padding(xp, align):
    """Rows are numbered per device, padding is that of all devices together, as in Transformer Engine."""
    mask = np.random.default_rng(SEED).random((8, 3)) < 0.6
    _, pads = row_maps.padded_counts(np, mask.sum(axis=0, dtype=np.int32), align)
    for local_mask in (mask[:3], mask[3:]):
        row_map, _ = row_maps.map_of_mask(xp, xp.asarray(local_mask.astype(np.int32)), xp.asarray(pads), 99)
        alone = fp8moe.plan_routing_map(local_mask, num_out_tokens=99)
        assert row_map.tolist() == alone.row_id_map.tolist()


def test_arguments_of_an_index_map_are_checked():
    ids = np.zeros((3, 2), np.int32)
    with pytest.raises(ValueError, match=r"order: got shape \[5\]; wanted \[6\]"):
        row_maps.index_map(np.arange(5), ids, 6)
    with pytest.raises(TypeError, match="order: got dtype float64; wanted int32"):
        row_maps.index_map(np.arange(6.0), ids, 6)


# ---------------------------------------------------------------- plans of maps by kernels


@over(
    "tokens, topk, experts, twice",
    on_cpu=[(21, topk, 5, True) for topk in (1, 3, 40)],
    on_gpu=[(1000, topk, 50, False) for topk in (1, 8, 40)],
)
def test_plans_of_index_maps(backend, tokens, topk, experts, twice):
    rows = RNG.permutation(tokens * topk).astype(np.int32)
    rows[RNG.random(rows.size) < 0.3] = -1
    if twice:
        rows[-2:] = 5  # a row that two entries refer to
    assert_same(*backend.both(lambda m: fp8moe.plan_index_map(m, topk, num_out_tokens=rows.size), rows))
    order = RNG.permutation(tokens * topk)
    for dtype in (np.int32, np.int64):
        ids = RNG.integers(-2, experts, (tokens, topk)).astype(dtype)
        keep = tokens * 4 // 5 * topk
        assert_same(*backend.both(lambda o, i, keep=keep: row_maps.index_map(o, i, keep), order, ids))


@only_on_cpu
@pytest.mark.parametrize("experts", [1, 5, 150, 1300])
def test_plans_of_row_maps(backend, experts):
    plan = fp8moe.plan_routing_map(RNG.random((19, experts)) < 0.4, align_size=4)
    for pads in (plan.pad_offsets, None):
        assert_same(
            *backend.both(lambda m, p: fp8moe.plan_row_map(m, p, num_out_tokens=9), plan.row_id_map, pads)
        )


@only_on_cpu
def test_row_maps_that_no_plan_produces(backend):
    """Invalid expert ids, and a count beyond the map's width, do not lead to other accesses."""
    row_map = RNG.integers(-9, 9, (30, 11)).astype(np.int32)
    assert_same(*backend.both(lambda m: fp8moe.plan_row_map(m, num_out_tokens=9), row_map))


@only_on_cpu
def test_entries_after_a_tokens_last_one_are_no_rows(backend):
    """Whether they look like rows or like nothing."""
    plan = fp8moe.plan_routing_map(RNG.random((21, 5)) < 0.5, align_size=4)
    row_map = plan.row_id_map.copy()
    for entries in row_map:
        unused = np.arange(entries[10], 5)
        entries[unused] = RNG.choice([0, 7, -1, 2**31 - 1, -(2**31)], unused.size)
        entries[5 + unused] = RNG.choice([0, 4, 5, 2**31 - 1, -(2**31)], unused.size)
    assert (row_map[:, 10] < 5).any()

    def there_and_back(m, pads, x, probs):
        again = fp8moe.plan_row_map(m, pads, num_out_tokens=rows)
        return fp8moe.unpermute(x, again), fp8moe.permute_backward(x, again, probs)

    rows = plan.num_out_tokens
    x, probs = values(RNG, (rows, 520), BF16), RNG.random(rows).astype(np.float32)
    assert_same(*backend.both(there_and_back, row_map, plan.pad_offsets, x, probs))
