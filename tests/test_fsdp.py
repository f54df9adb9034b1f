"""Bucket planning against the figures published for Megatron-FSDP and Megatron-LM PR #4979."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.fsdp import POLICIES, plan_buckets


def gated_experts(experts, hidden, ffn):
    return [("w13", (experts, 2 * ffn, hidden), True), ("w2", (experts, hidden, ffn), True)]


@pytest.mark.parametrize(
    ("experts", "hidden", "ffn", "ranks", "policy", "ratio"),
    [
        (8, 7168, 2048, 8, "merge", 1.333),
        (8, 7168, 2048, 8, "split", 1.000),
        (8, 7168, 2048, 8, "last_dim", 1.000),
        (8, 7168, 2048, 16, "merge", 1.333),
        (8, 7168, 2048, 16, "split", 2.0),
        (8, 7168, 2048, 16, "last_dim", 1.0),
        (5, 4096, 1536, 4, "merge", 1.067),
        (5, 4096, 1536, 4, "split", 1.6),
    ],
)
def test_published_ratios(experts, hidden, ffn, ranks, policy, ratio):
    plan = plan_buckets(gated_experts(experts, hidden, ffn), ranks, policy)
    assert round(plan.ratio, 3) == ratio


def test_published_sizes():
    plan = plan_buckets(gated_experts(8, 7168, 2048), 8, "merge")
    (bucket,) = plan.buckets
    assert (plan.numel, plan.padded_numel, bucket.factor) == (352_321_536, 469_762_048, 29_360_128)
    assert plan.padding_share == pytest.approx(0.25)
    assert len(plan_buckets(gated_experts(8, 7168, 2048), 8, "split").buckets) == 2


shapes = st.lists(st.integers(0, 40), min_size=0, max_size=4).map(tuple)


@given(st.lists(st.tuples(shapes, st.booleans()), max_size=8), st.integers(1, 64))
def test_min_is_never_worse_and_every_bucket_divides(params, ranks):
    named = [(f"p{i}", shape, is_expert) for i, (shape, is_expert) in enumerate(params)]
    plans = {policy: plan_buckets(named, ranks, policy) for policy in POLICIES}
    assert plans["min"].padded_numel == min(p.padded_numel for p in plans.values())
    for plan in plans.values():
        assert sorted(n for b in plan.buckets for n in b.names) == sorted(n for n, _, _ in named)
        assert plan.numel == sum(math.prod(shape) for _, shape, _ in named)
        for bucket in plan.buckets:
            assert bucket.padded_numel % (ranks * bucket.factor) == 0
            assert 0 <= bucket.padded_numel - bucket.numel < ranks * bucket.factor
            assert len({is_expert for n, _, is_expert in named if n in bucket.names}) == 1
    assert plans["min"].policy != "min"


@pytest.mark.parametrize(
    ("params", "ranks", "policy", "words"),
    [
        ([("a", (2,), True)], 0, "min", "data_parallel_size: got 0"),
        ([("a", (2,), True)], 2, "best", "policy: got 'best'"),
        ([("a", (2,), True), ("a", (3,), True)], 2, "min", "name twice"),
        ([("a", (-2,), True)], 2, "min", r"params\[0\].shape: got -2"),
    ],
)
def test_refusals(params, ranks, policy, words):
    with pytest.raises(ValueError, match=words):
        plan_buckets(params, ranks, policy)


@pytest.mark.parametrize("params", [[("a", (2,))], [(1, (2,), True)], [("a", (2,), 1)], [7]])
def test_malformed_params(params):
    with pytest.raises(TypeError, match=r"params\[0\]"):
        plan_buckets(params, 2)
