"""One rank of test_torch_functional.py, for compiled code over several ranks: ``python
torch_functional_rank.py RANK WORLD FILE``."""

import contextlib
import os
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from grad_sums import check_added

from fp8moe import Activation
from fp8moe.adapters.torch.accumulation import set_fuse_wgrad_accumulation
from fp8moe.adapters.torch.distributed.process_group import ProcessGroup
from fp8moe.adapters.torch.functional import moe_experts
from fp8moe.adapters.torch.layer import FP8FlowMoE
from fp8moe.expert_parallel import Capacity

warnings.filterwarnings("error", ".*torch.distributed.* is deprecated", FutureWarning)
RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])
H, F, E, K = 128, 72, 2 * WORLD, 2
torch.manual_seed(0)  # the same routers
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=WORLD)
comm = ProcessGroup()
own = slice(RANK * E // WORLD, (RANK + 1) * E // WORLD)


def numbers(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def results(call, leaves, dy):
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def compiled(function):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def check(recipe, recompute, biased, comm):
    """Compiled and eager results over the ranks are bitwise equal, and close to those of all experts on one
    rank, for several numbers of tokens."""
    dtype = torch.bfloat16 if recipe == "bf16" else torch.float32
    w1, w3 = (numbers(E, F, H, seed=s).to(dtype) / 10 for s in (1, 2))
    w2 = numbers(E, H, F, seed=3).to(dtype) / 8
    biases = [numbers(E, 2 * F, seed=4).to(dtype), numbers(E, H, seed=5).to(dtype)] if biased else []
    activation = Activation(clamp=7.0, alpha=1.702, linear_offset=1.0)

    def call(ids, x, probs, w1, w3, w2, *biases, over=None):
        bias13, bias2 = biases or (None, None)
        options = {"recipe": recipe, "recompute": recompute, "activation": activation, "comm": over}
        return moe_experts(x, (w1, w3), w2, ids, probs, bias13=bias13, bias2=bias2, **options)

    run = compiled(lambda *a: call(*a, over=comm))
    for tokens in (24, 17, 33):
        seed = 100 * tokens + RANK
        x, dy = (numbers(tokens, H, seed=seed + s).bfloat16() for s in (0, 50))
        ids = torch.randint(-1, E, (tokens, K), generator=torch.Generator().manual_seed(seed))
        probs = numbers(tokens, K, seed=seed + 1).abs()
        local = [w[own] for w in (w1, w3, w2, *biases)]
        actual = results(lambda *a, i=ids: run(i, *a), [x, probs, *local], dy)
        eager = results(lambda *a, i=ids: call(i, *a, over=comm), [x, probs, *local], dy)
        wanted = results(lambda *a, i=ids: call(i, *a), [x, probs, w1, w3, w2, *biases], dy)
        wanted[3:] = [w.contiguous() for w in wanted[3:]]
        for w in wanted[3:]:
            dist.all_reduce(w)
        wanted[3:] = [w[own] for w in wanted[3:]]
        for a, b, c in zip(actual, eager, wanted, strict=True):
            if recipe != "bf16":  # its products are torch's and not compiled
                assert torch.equal(a, b)
            # y and dx: sums of bfloat16 rows of two ranks; gradients: in bfloat16, or sums in another order
            assert (a - c).float().norm() <= 0.02 * c.float().norm(), (recipe, a.shape)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    with torch.no_grad():
        assert torch.equal(run(ids, x, probs, *local), actual[0])


bounded = ProcessGroup(capacity=Capacity(33))
for case in (("fp8_flow", "moe_expert", True, comm), ("bf16", None, False, bounded)):
    check(*case)
assert bounded.overflow().tolist() == [0, 0]


def of_layer(layer, forward, x, *routed, **options):
    """y, its gradients of x and of all parameters, which `main_grad` of w13 takes in the grad's place."""
    layer.w13.main_grad.zero_()
    layer.zero_grad()
    x = x.clone().requires_grad_("padding_mask" in options)
    y = forward(x, *routed, **options)
    y.backward(numbers(*x.shape, seed=RANK).bfloat16())
    assert layer.w13.grad is None
    local = [None if w.grad is None else w.grad.to_local() for w in (layer.router.weight, layer.w2)]
    return [y.detach(), x.grad, layer.w13.main_grad.clone(), *local]


tokens = 24
x = numbers(tokens, H, seed=RANK).bfloat16()
routed = torch.arange(tokens * K).reshape(tokens, K) % E, numbers(tokens, K, seed=RANK + 20).abs()
# rank 1 also without a token of its own
some, all_of_rank_1 = numbers(tokens, seed=RANK + 40) < 0, torch.full([tokens], RANK == 1)
for recipe in ("fp8_flow", "bf16"):
    layer = FP8FlowMoE(H, F, E, K, recipe=recipe, process_group=dist.group.WORLD)
    layer.w13.main_grad = torch.zeros(E // WORLD, 2 * F, H)
    run = compiled(layer)
    for padding, given in ((None, ()), (some, ()), (all_of_rank_1, ()), (some, routed)):
        options = {} if padding is None else {"padding_mask": padding}
        rows = x if padding is None else x.masked_fill(padding[:, None], torch.nan)
        eager, actual = (of_layer(layer, forward, rows, *given, **options) for forward in (layer, run))
        for a, b in zip(eager, actual, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
        y, dx, *of_weights = actual
        assert all(g.any() for g in of_weights if g is not None)
        if padding is None:
            continue
        for result in (y, dx):
            assert not result[padding].any()
            assert result[~padding].any(dim=1).all()


for router in (layer.router.weight.detach().to_local() + RANK, torch.zeros(E, H)):  # once different
    layer.load_state_dict({"router.weight": router}, strict=False)
    if router.any():
        with pytest.raises(ValueError, match=r"router: got weights .* checksums: .* nothing was sent"):
            run(x)
assert run(x).shape == x.shape


class Other:
    """A transport without a handle."""

    rank, world_size = RANK, WORLD
    counts, exchange = comm.counts, comm.exchange


w13, w2, other = layer.w13.to_local(), layer.w2.to_local(), Other()
ids, probs = torch.zeros(24, 1, dtype=torch.int64), torch.ones(24, 1)
run = compiled(lambda x: moe_experts(x, w13, w2, ids, probs, comm=other))
# raised by Dynamo
with pytest.raises(Exception, match="comm: got a Other without a handle in compiled code"):
    run(x)
for call in (moe_experts, compiled(moe_experts)):
    with pytest.raises(Exception, match="backend: got 'mma' for arrays on the CPU"):
        call(x, w13, w2, ids, probs, comm=comm, backend="mma")

# GEMMs that add to this rank's part of a sharded grad, and to the grads that DistributedDataParallel reduces
layer = FP8FlowMoE(H, 128, E, K, process_group=dist.group.WORLD, dtype=torch.bfloat16)
dy = numbers(*x.shape, seed=RANK).bfloat16()
check_added([layer.w13, layer.w2], lambda: layer(x).backward(dy))
for as_view in (False, True):
    reduced = []
    for enabled in (True, False):  # of float32 gradients the bits are the same
        set_fuse_wgrad_accumulation(enabled)
        torch.manual_seed(0)
        layer = FP8FlowMoE(H, 128, E, K)
        ddp = torch.nn.parallel.DistributedDataParallel(layer, gradient_as_bucket_view=as_view)
        for number in range(4):
            with ddp.no_sync() if number % 2 == 0 else contextlib.nullcontext():
                ddp(x * (number + 1)).backward(dy)
        reduced.append([w.grad.clone() for w in layer.parameters()])
    for a, b in zip(*reduced, strict=True):
        assert a.any()
        assert torch.equal(a, b)
dist.barrier()
dist.destroy_process_group()
print("right", flush=True)
os._exit(0)  # gloo's threads are not always joined at Python's exit
