"""Bucket planning compared with the numbers published for Megatron-FSDP and Megatron-LM PR #4979."""

import math
import types
import warnings

import pytest
from hypothesis import example, given
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
def test_min_policy_is_optimal_and_buckets_are_divisible(params, ranks):
    named = [(f"p{i}", shape, is_expert) for i, (shape, is_expert) in enumerate(params)]
    plans = {policy: plan_buckets(named, ranks, policy) for policy in POLICIES}
    assert plans["min"].padded_numel == min(p.padded_numel for p in plans.values())
    for plan in plans.values():
        assert sorted(n for b in plan.buckets for n in b.names) == sorted(n for n, _, _ in named)
        assert plan.numel == sum(math.prod(shape) for _, shape, _ in named)
        for bucket in plan.buckets:
            assert bucket.padded_numel % (ranks * bucket.factor) == 0
            # gaps of less than a chunk per parameter, then the padding
            gaps = bucket.factor * len(bucket.names)
            assert 0 <= bucket.padded_numel - bucket.numel < ranks * bucket.factor + gaps
            assert len({is_expert for n, _, is_expert in named if n in bucket.names}) == 1
    assert plans["min"].policy != "min"


@given(st.lists(shapes.filter(len), min_size=1, max_size=6), st.integers(1, 64))
@example([(3, 5), (12, 2)], 1)  # chunks of 10; of 24 elements, 4 fill the last chunk of 15
@example([(3, 5), (12, 2), (2, 1), (1, 1)], 1)  # of the two small ones, one fits behind the 4
@example([(3, 7), (4,)], 1)  # a small one fills the last chunk
def test_merge_is_megatron_fsdps_own_layout(shapes, ranks):
    """The size of the bucket that the installed package builds with the given chunk-size factor."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        buffers = pytest.importorskip("megatron_fsdp.param_and_grad_buffer")
    shapes = [s for s in shapes if 0 not in s]
    if not shapes:
        return
    (bucket,) = plan_buckets([(f"p{i}", s, True) for i, s in enumerate(shapes)], ranks, "merge").buckets
    params = [torch.nn.Parameter(torch.empty(s, device="meta")) for s in shapes]
    config = types.SimpleNamespace(data_parallel_sharding_strategy="optim_grads_params")
    groups = theirs(torch, buffers, params)
    assert [bucket.factor] == [g.chunk_size_factor for g in groups]
    sizes = [p.shape for p in groups[0].params]
    _, index, shard = buffers.build_data_parallel_buffer_index(
        sizes, 0, ranks, True, config, 0, bucket.factor
    )
    assert bucket.padded_numel == index.size == ranks * shard.size


def theirs(torch, buffers, params):
    """The groups that megatron-fsdp makes of expert parameters of any size."""
    module = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict({"experts": torch.nn.ParameterList(params)})})
    policy = buffers.BucketingPolicy(suggested_bucket_size=None)
    return buffers._get_parameter_groups(module, policy, {})[0]


@pytest.mark.parametrize(
    ("params", "ranks", "policy", "words"),
    [
        ([("a", (2,), True)], 0, "min", "data_parallel_size: got 0"),
        ([("a", (2,), True)], 2, "best", "policy: got 'best'"),
        ([("a", (2,), True), ("a", (3,), True)], 2, "min", "name twice"),
        ([("a", (-2,), True)], 2, "min", r"params\[0\].shape: got -2"),
    ],
)
def test_validation_errors(params, ranks, policy, words):
    with pytest.raises(ValueError, match=words):
        plan_buckets(params, ranks, policy)


@pytest.mark.parametrize("params", [[("a", (2,))], [(1, (2,), True)], [("a", (2,), 1)], [7]])
def test_malformed_params(params):
    with pytest.raises(TypeError, match=r"params\[0\]"):
        plan_buckets(params, 2)


@pytest.mark.parametrize(
    ("params", "words"),
    [(None, "params: got NoneType"), ([("a", 5, True)], r"params\[0\]: got \('a', 5, True\)")],
)
def test_invalid_parameter_lists_are_named(params, words):
    with pytest.raises(TypeError, match=words):
        plan_buckets(params, 8)
