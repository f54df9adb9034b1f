"""One rank of test_expert_parallel.py: ``python expert_parallel_rank.py CASE,.. RANK WORLD FILE DEVICE``;
CASE/peer: by writing into each other's memory."""

import datetime
import os
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import BF16, same_bits

import fp8moe
from fp8moe import expert_parallel
from fp8moe.adapters.torch_distributed import ProcessGroup, RankLost
from fp8moe.adapters.torch_moe import FP8FlowMoE
from fp8moe.adapters.torch_symmetric_memory import SymmetricMemory
from fp8moe.records import map_arrays

CASE, RANK, WORLD, FILE, DEVICE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
H, F, E = 512, 128, 2 * WORLD  # H: quantised straight into messages from 512 on
RECIPES = [("fp8_flow", None), ("fp8_flow", "moe_expert"), ("fp8_blockwise", None), ("bf16", None)]


def put(value):
    """To this rank's device, as torch's tensors."""

    def one(_, a):
        if a.dtype == BF16:
            return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16).to(DEVICE)
        return torch.from_numpy(np.ascontiguousarray(a)).to(DEVICE)

    return map_arrays(one, value)


def get(value):
    def one(_, a):
        a = a.detach().cpu()
        return a.view(torch.int16).numpy().view(BF16) if a.dtype == torch.bfloat16 else a.numpy()

    return map_arrays(one, value)


def problem(counts, k, ids_of, seed=0):
    """All ranks' tokens, the same on every rank; a rank's own are a slice."""
    rng = np.random.default_rng(seed)
    tokens = sum(counts)
    x, dy = (rng.standard_normal((tokens, H)).astype(np.float32).astype(BF16) for _ in range(2))
    ids = ids_of(rng, tokens, k).astype(np.int64)
    probs = rng.random((tokens, k)).astype(np.float32)
    w13 = rng.standard_normal((E, 2 * F, H)).astype(np.float32) / 16
    w2 = rng.standard_normal((E, H, F)).astype(np.float32) / 11
    start = sum(counts[:RANK])
    return x, dy, ids, probs, w13, w2, slice(start, start + counts[RANK])


def anywhere(rng, tokens, k):
    ids = np.argsort(rng.random((tokens, E)), axis=1)[:, :k]
    return np.where(rng.random((tokens, k)) < 0.15, -1, ids)


def to_one_rank(rng, tokens, k):
    return np.argsort(rng.random((tokens, 2)), axis=1)[:, :k] + 2 * (WORLD - 1)


def not_to_expert_1(rng, tokens, k):
    ids = anywhere(rng, tokens, k)
    return np.where(ids == 1, -1, ids)


COUNTS = [21, 9, 30, 4][:WORLD]
NONE_HERE = [0, 17, 5, 8][:WORLD]  # a rank without tokens
ROUTINGS = [
    (COUNTS, 1, anywhere),
    (COUNTS, 3, anywhere),
    (NONE_HERE, 2, anywhere),
    (COUNTS, 2, to_one_rank),
    (COUNTS, 2, not_to_expert_1),
    ([0] * WORLD, 2, anywhere),
]


def layers(comm):
    for number, (counts, k, ids_of) in enumerate(ROUTINGS):
        for recipe, recompute in RECIPES if number < 2 else RECIPES[:1]:
            layer(comm, counts, k, ids_of, recipe, recompute, number)


def layer(comm, counts, k, ids_of, recipe, recompute, seed):
    x, dy, ids, probs, w13, w2, own = problem(counts, k, ids_of, seed)
    if recipe == "bf16":
        w13, w2 = w13.astype(BF16), w2.astype(BF16)
    how = {"recipe": recipe, "recompute": recompute, "clamp": 3.0}
    mine = slice(2 * RANK, 2 * RANK + 2)
    with fp8moe.trace() as counted:
        given = map(put, (x[own], w13[mine], w2[mine], ids[own], probs[own]))
        y, saved = fp8moe.moe_forward(*given, **how, comm=comm)
        grads = get(fp8moe.moe_backward(saved, put(dy[own]), comm=comm))
    if recipe == "fp8_flow":
        assert counted.casts == 2
    everything = (x, w13, w2, ids, probs) if DEVICE == "cpu" else map(put, (x, w13, w2, ids, probs))
    alone, kept = fp8moe.moe_forward(*everything, **how)
    wanted = fp8moe.moe_backward(kept, dy if DEVICE == "cpu" else put(dy))
    if DEVICE != "cpu":
        alone, wanted = get(alone), get(wanted)
    # the same rows in the same order at each expert: the same bits
    for name, a, b in (
        ("dw13", grads.dw13, wanted.dw13[mine]),
        ("dw2", grads.dw2, wanted.dw2[mine]),
        ("dprobs", grads.dprobs, wanted.dprobs[own]),
    ):
        assert same_bits(a, b), (name, recipe, k, RANK)
    for name, a, b in (("y", get(y), alone[own]), ("dx", grads.dx, wanted.dx[own])):
        if k == 1:
            assert same_bits(a, b), (name, recipe, RANK)
            continue
        # each rank's sum is rounded once more, to bfloat16: half of 2^-7 of it, for at most k ranks whose
        # sums are no larger than the largest row's
        far = np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0)
        assert far <= k * 2.0**-8 * 2 * max(np.abs(b.astype(np.float64)).max(initial=0), 1e-30), (name, far)


def rows(comm):
    """What arrives, row by row; a result that is waited for later; FP8 on the way back; bytes."""
    x, _, ids, probs, _, _, own = problem(COUNTS, 3, anywhere, 7)
    q = fp8moe.quantize(x)
    given = put(fp8moe.QuantTensor(q.data[own].copy(), q.scales[own].copy())), put(ids[own]), put(probs[own])
    pending = expert_parallel.dispatch(*given, E, comm, async_op=True)
    beside = put(x).float().sum()  # launched while rows travel
    arrived = pending.wait()
    assert pending.wait() is arrived
    assert torch.isfinite(beside)
    local = np.where((ids // 2 == RANK) & (ids >= 0), ids - 2 * RANK, -1)
    here = np.flatnonzero((local >= 0).any(axis=1))
    found = get(arrived)
    assert same_bits(found.x.data, q.data[here])
    assert same_bits(found.x.scales, q.scales[here])
    np.testing.assert_array_equal(found.topk_ids, local[here])
    assert same_bits(found.topk_probs, probs[here])
    assert found.num_entries == (local >= 0).sum()

    y = put(x)[torch.from_numpy(here).to(DEVICE)]
    back = get(expert_parallel.combine(y, arrived.route, comm)).astype(np.float64)
    ranks = [len({i // 2 for i in row if i >= 0}) for row in ids[own]]
    np.testing.assert_array_equal(back, expected(x[own], ranks))
    in_fp8 = get(expert_parallel.combine(y, arrived.route, comm, fmt="e4m3")).astype(np.float64)
    # a code is within 2^-4 of its value, or of the smallest normal one, 2^-15 of its block's largest; then
    # bfloat16
    assert (np.abs(in_fp8 - back) <= 2.0**-4 * np.abs(back) + 2.0**-13 * 8 * max(ranks, default=0)).all()

    wide = np.random.default_rng(1).standard_normal((16, 7168)).astype(BF16)
    many = np.argsort(np.random.default_rng(2).random((16, 8 * WORLD)), axis=1)[:, :8]
    sent = []
    for rows in (fp8moe.quantize(put(wide)), put(wide)):
        with fp8moe.trace() as counted:
            expert_parallel.dispatch(rows, put(many), put(np.ones((16, 8), np.float32)), 8 * WORLD, comm)
        sent.append(counted.sent_bytes)
    assert 0 < sent[0] <= 0.52 * sent[1], sent


def expected(x, ranks):
    """The same row from each of a token's ranks: a sum in float32, rounded to bfloat16."""
    total = x.astype(np.float32) * np.array(ranks, np.float32)[:, None]
    return total.astype(BF16).astype(np.float64)


def refusals(comm):
    x, ids, probs = put(np.ones((4, H)).astype(BF16)), put(np.zeros((4, 2), np.int32)), put(np.ones((4, 2)))
    wider = put(np.ones((4, 2 * H)).astype(BF16))
    with pytest.raises(ValueError, match=r"hidden: rank .*nothing was sent"):
        expert_parallel.dispatch(wider if RANK == 1 else x, ids, probs, E, comm)
    with pytest.raises(ValueError, match=r"rows, of bfloat16.*nothing was sent"):
        expert_parallel.dispatch(x, ids, probs, E, comm, fmt="e5m2" if RANK == 1 else "e4m3")
    with pytest.raises(ValueError, match="num_experts"):
        expert_parallel.dispatch(x, ids, probs, E + 1, comm)
    with pytest.raises(ValueError, match="room: got 0"):
        SymmetricMemory(None, 0)
    with pytest.raises(TypeError, match="process_group: got str; wanted a torch"):
        FP8FlowMoE(H, F, E, 2, process_group="all")
    again = expert_parallel.dispatch(x, ids, probs, E, comm)  # and all goes on
    assert len(again.x) == (4 * WORLD if RANK == 0 else 0)


def module(comm):
    """The torch module, against one that holds all experts."""
    group = dist.group.WORLD if type(comm) is ProcessGroup else comm
    for recipe in ("fp8_flow", "bf16"):
        torch.manual_seed(3)
        alone = FP8FlowMoE(H, F, E, 2, recipe=recipe, device=DEVICE)
        ours = FP8FlowMoE(H, F, E, 2, recipe=recipe, device=DEVICE, process_group=group)
        mine = slice(2 * RANK, 2 * RANK + 2)
        with torch.no_grad():
            ours.router.weight.copy_(alone.router.weight)
            ours.w13.copy_(alone.w13[mine])
            ours.w2.copy_(alone.w2[mine])
        start = sum(COUNTS[:RANK])
        own = slice(start, start + COUNTS[RANK])
        x, dy = torch.randn(2, sum(COUNTS), H, device=DEVICE)
        x_alone, x_ours = x.clone().requires_grad_(), x[own].clone().requires_grad_()
        y_alone, y_ours = alone(x_alone), ours(x_ours)
        y_alone.backward(dy)
        y_ours.backward(dy[own])
        for a, b in ((y_ours, y_alone[own]), (x_ours.grad, x_alone.grad[own])):
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * b.abs().max().item())
        for a, b in ((ours.w13.grad, alone.w13.grad[mine]), (ours.w2.grad, alone.w2.grad[mine])):
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-7 * b.abs().max().item())
        gathered = ours.router.weight.grad.clone()
        dist.all_reduce(gathered)
        torch.testing.assert_close(gathered, alone.router.weight.grad, rtol=1e-2, atol=2e-2)


def in_turn(comm):
    """Two exchanges on their way, one after the other; no third; and what finds no room goes by NCCL."""
    x, ids = put(np.full((64, H), RANK + 1.0).astype(BF16)), put(np.arange(128).reshape(64, 2) % E)
    probs = put(np.ones((64, 2), np.float32))
    for _ in range(3):
        first, second = (expert_parallel.dispatch(x * n, ids, probs, E, comm, async_op=True) for n in (1, 2))
        with pytest.raises(RuntimeError, match="third exchange"):
            expert_parallel.dispatch(x, ids, probs, E, comm)
        second, first = second.wait(), first.wait()
        assert torch.equal(second.x, first.x * 2)
        assert first.x.float().sum() > 0
        back = expert_parallel.combine(second.x, second.route, comm)
        torch.testing.assert_close(back, x * 2, rtol=0, atol=0)  # both experts are on one rank
    small = SymmetricMemory(None, 1 << 12)
    assert not small.fits(first.route.counts, 2 * H)
    rows(small)


def lost(comm):
    x, ids, probs = put(np.ones((4, H)).astype(BF16)), put(np.zeros((4, 2), np.int32)), put(np.ones((4, 2)))
    expert_parallel.dispatch(x, ids, probs, E, comm)
    if DEVICE == "cuda":
        torch.cuda.synchronize()  # what it sent last has arrived
    if RANK != 1:
        with pytest.raises(RankLost, match="lost rank 1, seen by rank") as error:
            expert_parallel.dispatch(x, ids, probs, E, comm)
        assert error.value.ranks == [1]
    print("right", flush=True)
    os._exit(0)  # the group is broken: nothing to take down


if DEVICE == "cuda":
    torch.cuda.set_device(RANK)
dist.init_process_group(
    "nccl" if DEVICE == "cuda" else "gloo",
    init_method=f"file://{FILE}",
    rank=RANK,
    world_size=WORLD,
    timeout=datetime.timedelta(seconds=20 if CASE.startswith("lost") else 120),
)
cases = {"layers": layers, "rows": rows, "refusals": refusals, "module": module, "lost": lost}
for case in CASE.split(","):
    if case.endswith("/peer"):
        {**cases, "in_turn": in_turn}[case.removesuffix("/peer")](SymmetricMemory(None, 1 << 24))
    else:
        cases[case](ProcessGroup())
dist.destroy_process_group()
print("right", flush=True)
