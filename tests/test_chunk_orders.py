"""Orders of chunks and fixed-size blocks, in NumPy and in JAX, against worked examples and loops."""

import numpy as np
import pytest
from cases import SEED

import fp8moe
from fp8moe.expert_parallel.blocks import device_blocks, local_ids
from fp8moe.ops import chunk_orders

MODULES = ["numpy", "jax.numpy"]


@pytest.fixture(params=MODULES)
def xp(request):
    return pytest.importorskip(request.param)


def ints(xp, *values):
    return xp.asarray(np.array(values, np.int32))


def test_exchange_of_the_example(xp):
    counts = chunk_orders.counts_between_shards(ints(xp, [2, 0, 1, 3], [1, 1, 0, 2]), 2)
    rows = counts.sum(axis=2)
    assert rows.tolist() == [[2, 4], [2, 2]]
    exchange = chunk_orders.exchange_of(xp, rows, 1)
    assert [a.tolist() for a in exchange] == [[0, 2], [2, 2], [2, 4], [4, 2]]
    arrived = counts[:, 1]
    order = chunk_orders.transposed_order(xp, 2, 2)
    assert order.tolist() == [0, 2, 1, 3]
    assert arrived.reshape(-1)[order].tolist() == [1, 0, 3, 2]


def test_exchange_moves_every_row():
    """Rows that contain their source and number, sent by the offsets: every target receives them ordered by
    source."""
    random = np.random.default_rng(SEED)
    shards = 3
    rows = random.integers(0, 5, (shards, shards))
    sent = [np.arange(rows[s].sum()) + 100 * s for s in range(shards)]
    received = [np.full(rows[:, t].sum(), -1) for t in range(shards)]
    for source in range(shards):
        exchange = chunk_orders.exchange_of(np, rows, source)
        assert exchange.recv_sizes.tolist() == rows[:, source].tolist()
        for target in range(shards):
            first, size, to = (a[target] for a in exchange[:3])
            received[target][to : to + size] = sent[source][first : first + size]
    for target in range(shards):
        parts = [np.split(sent[s], np.cumsum(rows[s])[:-1])[target] for s in range(shards)]
        assert received[target].tolist() == np.concatenate(parts).tolist()


def test_orders_of_groups_and_back(xp):
    for groups, chunks in ((2, 3), (4, 1), (1, 5)):
        transposed = np.asarray(chunk_orders.transposed_order(xp, groups, chunks))
        back = np.asarray(chunk_orders.transposed_order(xp, chunks, groups))
        assert transposed.tolist() == [g * chunks + c for c in range(chunks) for g in range(groups)]
        assert transposed[back].tolist() == list(range(groups * chunks))


def test_moved_rows_are_those_of_sort_chunks(xp):
    random = np.random.default_rng(SEED)
    sizes, order = random.integers(0, 4, 6).astype(np.int32), random.permutation(6).astype(np.int32)
    rows = int(sizes.sum()) + 2
    moved = fp8moe.sort_chunks(np.arange(rows).reshape(-1, 1), sizes, order, keep_rest=True).data[:, 0]
    to = np.asarray(chunk_orders.moved_rows(xp, xp.asarray(sizes), xp.asarray(order), rows))
    assert to.dtype == np.int32
    assert moved[to].tolist() == list(range(rows))


def test_entries_with_padding_sort_into_padded_experts(xp):
    ids = np.random.default_rng(SEED).integers(0, 4, 13).astype(np.int32)
    counts = np.bincount(ids, minlength=4)
    padded_ids, padded = chunk_orders.entries_with_padding(xp, xp.asarray(ids), xp.asarray(counts), 4)
    assert padded.tolist() == [-(-c // 4) * 4 for c in counts]
    order = np.argsort(np.asarray(padded_ids), kind="stable")
    wanted = []
    for e in range(4):
        own = [n for n, expert in enumerate(ids) if expert == e]
        wanted += own + [-1] * (-len(own) % 4)
    rows = np.where(order < len(ids), order, -1)
    assert rows[: len(wanted)].tolist() == wanted
    assert (rows[len(wanted) :] == -1).all()
    assert len(rows) == len(ids) + 4 * 3


def test_selected_experts_of_a_mask(xp):
    mask = ints(xp, [0, 1, 0, 1], [1, 1, 0, 0])
    assert chunk_orders.selected_experts(xp, mask, 2).tolist() == [[1, 3], [0, 1]]


# ---------------------------------------------------------------- fixed-size blocks


def test_blocks_of_the_example(xp):
    blocks = device_blocks(xp, ints(xp, [0, 3], [1, 0], [2, -1]), 2, 2, 2)
    assert blocks.tokens.tolist() == [[0, 1], [0, 2]]
    assert blocks.places.tolist() == [[0, 0], [1, 2], [2, 1]]


@pytest.mark.parametrize("capacity", [1, 4, 9])
def test_blocks_match_loops(xp, capacity):
    tokens, experts, devices = 9, 2, 3
    ids = np.random.default_rng(SEED).integers(-2, experts * devices + 2, (tokens, 3)).astype(np.int32)
    blocks = device_blocks(xp, xp.asarray(ids), experts, devices, capacity)
    wanted = np.full((devices, capacity), tokens)
    places = np.full((tokens, devices), capacity)
    for device in range(devices):
        going = [t for t in range(tokens) if any(i >= 0 and i // experts == device for i in ids[t])]
        for row, token in enumerate(going[:capacity]):
            wanted[device, row] = token
            places[token, device] = row
        own = np.asarray(local_ids(xp, xp.asarray(ids), experts, device))
        for id_, local in zip(ids.reshape(-1), own.reshape(-1), strict=True):
            assert local == (id_ - device * experts if id_ // experts == device else -1)
    assert blocks.tokens.tolist() == wanted.tolist()
    assert blocks.places.tolist() == places.tolist()
