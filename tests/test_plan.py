"""Permutation plans compared with nested Python loops."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from backends import only_on_gpu
from cases import SEED, assert_same, generator, layout, mask_of, routings, rows_by_expert, same_bits, unmask
from hypothesis import given
from hypothesis import strategies as st

import fp8moe


def check_against_loops(plan, ids, num_experts, align, width, capacity=None, has_slots=True):
    lists = rows_by_expert(ids, num_experts)
    counts = [len(m) for m in lists]
    padded = [-(-c // align) * align for c in counts]
    entries, starts = layout(ids, num_experts, align)
    assert plan.tokens_per_expert.tolist() == counts
    assert plan.padded_tokens_per_expert.tolist() == padded
    assert plan.expert_offsets.tolist() == starts
    assert plan.pad_offsets.tolist() == [starts[e] - sum(counts[:e]) for e in range(num_experts)]
    capacity = plan.num_out_tokens if capacity is None else capacity
    kept = [e for e in entries if e[0] < capacity]
    assert plan.overflow.tolist() == [len(entries) - len(kept)]
    per_token = [[] for _ in range(len(ids))]
    for row, token, slot, expert in kept:
        per_token[token].append((row - plan.pad_offsets[expert], expert, slot))
    for token, entries_of_token in enumerate(per_token):
        entries_of_token.sort(reverse=True)
        got = plan.row_id_map[token].tolist()
        blank = [-1] * (width - len(entries_of_token))
        assert got[:width] == [m[0] for m in entries_of_token] + blank
        assert got[width : 2 * width] == [m[1] for m in entries_of_token] + blank
        assert got[-1] == len(entries_of_token)
        if has_slots:
            assert plan.slots[token].tolist() == [m[2] for m in entries_of_token] + blank


@given(routings())
def test_topk_matches_loops(case):
    ids, experts, align = case
    plan = fp8moe.plan_topk(ids, experts, align_size=align)
    check_against_loops(plan, ids, experts, align, ids.shape[1])
    entries = ids.size
    bound = (entries + min(experts, entries) * (align - 1)) // align * align
    assert plan.num_out_tokens == bound >= plan.expert_offsets[-1]
    exact = fp8moe.plan_topk(ids, experts, align_size=align, num_out_tokens="exact")
    assert exact.num_out_tokens == plan.expert_offsets[-1]
    assert same_bits(exact.row_id_map, plan.row_id_map)


@given(routings(), st.floats(0, 1.2))
def test_capacity_drops_and_counts(case, share):
    ids, experts, align = case
    needed = layout(ids, experts, align)[1][-1]
    capacity = int(needed * share)
    plan = fp8moe.plan_topk(ids, experts, align_size=align, num_out_tokens=capacity)
    assert plan.num_out_tokens == capacity
    check_against_loops(plan, ids, experts, align, ids.shape[1])


@given(routings(), st.sampled_from((bool, np.int32, np.int64, np.uint8)))
def test_mask_matches_loops(case, dtype):
    ids, experts, align = case
    mask = mask_of(ids, experts)
    plan = fp8moe.plan_routing_map(mask.astype(dtype), align_size=align)
    assert plan.slots is None
    assert plan.row_id_map.shape == (len(ids), 2 * experts + 1)
    assert plan.num_out_tokens == plan.expert_offsets[-1]  # exact by default
    check_against_loops(plan, unmask(mask), experts, align, experts, has_slots=False)


def test_mask_with_topk_drops_and_counts_the_excess():
    mask = np.array([[1, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    plan = fp8moe.plan_routing_map(mask, topk=2)
    assert plan.row_id_map.tolist() == [[1, 0, 1, 0, 2], [2, -1, 2, -1, 1], [-1, -1, -1, -1, 0]]
    assert plan.overflow.tolist() == [1]
    assert plan.num_out_tokens == 6
    plan = fp8moe.plan_routing_map(mask, topk=2, num_out_tokens=2)
    assert plan.row_id_map.tolist() == [[1, 0, 1, 0, 2], [-1, -1, -1, -1, 0], [-1, -1, -1, -1, 0]]
    assert plan.overflow.tolist() == [2]  # one of topk, one of the rows


def test_the_worked_example():
    ids = np.array([[0, 1], [1, 2], [0, 2], [1, 0], [1, -1]], np.int32)
    plan = fp8moe.plan_topk(ids, 3, align_size=4)
    assert plan.expert_offsets.tolist() == [0, 4, 8, 12]
    assert plan.pad_offsets.tolist() == [0, 1, 1]
    assert plan.row_id_map.tolist() == [
        [3, 0, 1, 0, 2],
        [7, 4, 2, 1, 2],
        [8, 1, 2, 0, 2],
        [5, 2, 1, 0, 2],
        [6, -1, 1, -1, 1],
    ]


def garbage_past_the_entries(row_id_map):
    """Transformer Engine's own maps contain uninitialised memory after a token's entries."""
    experts = row_id_map.shape[1] // 2
    blank = np.arange(experts) >= row_id_map[:, -1:]
    left = row_id_map.copy()
    left[:, :-1][np.tile(blank, 2)] = np.random.default_rng(SEED).integers(-3, experts + 3, 2 * blank.sum())
    return left


@given(routings(), st.booleans())
def test_row_map_matches_loops(case, garbage):
    """The plan of a map permutes rows like the original plan, and has the same expert counts."""
    ids, experts, align = case
    mask = mask_of(ids, experts)
    plan = fp8moe.plan_routing_map(mask, align_size=align)
    row_map = garbage_past_the_entries(plan.row_id_map) if garbage else plan.row_id_map
    again = fp8moe.plan_row_map(row_map, plan.pad_offsets, num_out_tokens=plan.num_out_tokens)
    assert again.num_out_tokens == plan.num_out_tokens
    assert (again.num_experts, again.max_experts_per_token, again.slots) == (experts, experts, None)
    assert same_bits(again.row_id_map, row_map)
    counts = [len(rows) for rows in rows_by_expert(unmask(mask), experts)]
    starts = layout(unmask(mask), experts, align)[1]
    assert again.tokens_per_expert.tolist() == again.padded_tokens_per_expert.tolist() == counts
    assert again.pad_offsets.tolist() == plan.pad_offsets.tolist()
    ends = [start + count for start, count in zip(starts, counts, strict=False)]
    assert again.expert_offsets.tolist() == [*starts[:experts], *(ends[-1:] or [0])]
    assert again.overflow.tolist() == [0]
    rows = np.random.default_rng(SEED).standard_normal((plan.num_out_tokens, 3)).astype(np.float32)
    probs = np.random.default_rng(SEED).random(mask.shape).astype(np.float32)
    assert same_bits(fp8moe.unpermute(rows, again, probs), fp8moe.unpermute(rows, plan, probs))
    tokens = np.random.default_rng(SEED).standard_normal((len(ids), 3)).astype(np.float32)
    assert same_bits(fp8moe.permute(tokens, again).data, fp8moe.permute(tokens, plan).data)


def test_row_map_without_padding():
    plan = fp8moe.plan_routing_map(np.array([[1, 0], [1, 1]], bool))
    again = fp8moe.plan_row_map(plan.row_id_map, num_out_tokens=3)
    assert again.pad_offsets.tolist() == [0, 0]
    assert again.expert_offsets.tolist() == [0, 2, 3]


def test_4096_tokens_257_experts():
    rng = np.random.default_rng(5)
    ids = rng.integers(-1, 257, (4096, 8)).astype(np.int32)
    check_against_loops(fp8moe.plan_topk(ids, 257, align_size=16), ids, 257, 16, 8)


def test_sizes_of_a_plan_may_be_numpy_integers():
    plan = fp8moe.plan_topk(np.zeros((3, 1), np.int32), 2, align_size=4)
    again = replace(plan, num_out_tokens=np.int64(4), align_size=np.int32(4))
    assert type(again.num_out_tokens) is type(again.align_size) is int
    assert fp8moe.permute(np.ones((3, 8), np.float32), again).data.shape == (4, 8)


def test_too_many_rows_for_an_int32_map_raise():
    from fp8moe.ops.plan import plan_spec

    with pytest.raises(ValueError, match="the range of int32 offsets"):
        plan_spec(2**20, 256, 2**12, 1, None, has_slots=True)


@pytest.mark.filterwarnings("ignore")
def test_the_cuda_kernels_in_numbas_simulator():
    script = Path(__file__).with_name("plan_in_simulator.py")
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    got = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert got.returncode == 0, got.stderr
    assert "equal" in got.stdout


@only_on_gpu
@pytest.mark.parametrize("dtype", [bool, np.int32])
@pytest.mark.parametrize(
    ("tokens", "experts"), [(3000, 256), (700, 512), (90, 1000), (5000, 7), (33, 4096), (0, 256), (40, 31)]
)
def test_plans_of_whole_masks(backend, tokens, experts, dtype):
    """Maps with a slot per expert, from the mask and from the map itself."""
    rng = generator()
    mask = (rng.random((tokens, experts)) < rng.random((tokens, 1)) * min(1, 20 / experts)).astype(dtype)
    for rows in ("exact", 3 * tokens):
        expected, actual = backend.both(fp8moe.plan_routing_map, mask, align_size=16, num_out_tokens=rows)
        assert_same(expected, actual)
        for pads in (expected.pad_offsets, None):
            options = {"num_out_tokens": expected.num_out_tokens}
            assert_same(*backend.both(fp8moe.plan_row_map, expected.row_id_map, pads, **options))
