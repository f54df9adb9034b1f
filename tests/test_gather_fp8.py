"""`fp8moe.torch.gather_fp8`: experts' weights that ``fully_shard`` gathers as FP8 codes. Codes, outputs,
gradients and weights after optimizer steps equal, bit for bit, those of gathered masters."""

import copy
import io
import itertools
import logging
import os
import pickle
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from fp8moe.adapters.torch.gathered import GatheredFP8, SentAsFP8
from fp8moe.torch import (
    FP8FlowMoE,
    gather_fp8,
    quantize_fp8_weights,
    shard_placement,
    weights_unchanged,
)

T, H = 40, 256
DEVICE = "cpu"  # of a process on two GPUs another one
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def layer_of(experts=4, ffn=128, **options):
    torch.manual_seed(0)
    return FP8FlowMoE(H, ffn, num_experts=experts, topk=2, **{"device": DEVICE, **options})


def rows(seed):
    return torch.randn(T, H, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def first(*sizes):
    """A mesh of the two ranks."""
    if sizes == (1,):  # each rank's own
        return first(2, 1)["shards"]
    names = ("replicas", "shards")[-len(sizes) :]
    return init_device_mesh(DEVICE, sizes, mesh_dim_names=names)


# ---------------------------------------------------------------- on two ranks

#: layers whose weights are sharded along each dimension, padded and not: experts, ffn, placement
SHARDINGS = {
    "experts": (4, 128, None),
    "padded experts": (4, 200, None),
    "rows": (3, 128, shard_placement(2)),
    "columns": (3, 256, lambda p: Shard(p.ndim - 1)),
}


def gathers_the_codes_of_masters(rank, folder):
    """Before and after AdamW's step; the masters, gathered by DTensor, are quantised whole."""
    for (experts, ffn, place), policy in itertools.product(
        SHARDINGS.values(), (MixedPrecisionPolicy(), BF16)
    ):
        layer = gather_fp8(layer_of(experts, ffn))
        fully_shard(layer, mesh=first(2), shard_placement_fn=place, mp_policy=policy)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
        for _ in range(2):
            masters = [w.full_tensor().detach().clone() for w in (layer.w13, layer.w2)]
            wanted = quantize_fp8_weights(*(w.to(policy.param_dtype or w.dtype) for w in masters))
            layer.unshard()
            for w, master, codes in zip((layer.w13, layer.w2), masters, wanted, strict=True):
                assert type(w) is GatheredFP8
                assert w.shape == master.shape
                assert w.dtype == (policy.param_dtype or master.dtype)
                assert torch.equal(w.codes, codes.rowwise.data)
                assert torch.equal(w.scales, codes.rowwise.scales)
            layer.reshard()
            for p in layer.parameters():
                p.grad = torch.sin(p.detach() * 100)
            optimizer.step()


def trained(model, optimizer_of=torch.optim.AdamW, steps=2, forward=None, scope=False, **options):
    """Outputs, gradients and weights of some steps of two micro-batches."""
    optimizer = optimizer_of(model.parameters(), lr=0.05, **options)
    seen = []
    for turn in range(steps):
        with weights_unchanged(model) if scope else torch.enable_grad():
            for micro_batch in range(2):
                x = rows(100 * turn + 10 * micro_batch + dist.get_rank()).requires_grad_()
                y = (forward or model)(x)
                (y * y).mean().backward()
                seen += y.detach(), x.grad
        seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
        seen += [p.grad.full_tensor() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        for state in optimizer.state.values():
            tensors = [t._local_tensor for t in state.values() if isinstance(t, DTensor)]
            assert not any(isinstance(t, SentAsFP8) for t in tensors)
    with torch.no_grad():
        seen.append((forward or model)(rows(dist.get_rank())))
    model.reshard()
    weights = [p.full_tensor().detach() for p in model.parameters()]
    return [*seen, *(getattr(w, "masters", w) for w in weights)]  # of one rank it is the rank's own


def same(build, shard, message=None, **options):
    """Whether training gives the same bits with `gather_fp8` and without it; the model with it."""
    results = []
    for gather in (False, True):
        model = build()
        if gather:
            assert gather_fp8(model) is model
        shard(model)
        results.append(trained(model, **{n: o(model) if n == "forward" else o for n, o in options.items()}))
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        assert type(a) is type(b) is torch.Tensor
        assert torch.equal(a, b), message
    return model


def trains_as_with_gathered_masters(rank, folder):
    def sharded(place=None, mesh=(2,), **options):
        options = {"reshard_after_forward": True, **options}  # also of a root
        return lambda model: fully_shard(model, mesh=first(*mesh), shard_placement_fn=place, **options)

    def block(**options):
        return lambda: nn.Sequential(nn.LayerNorm(H, device=DEVICE), layer_of(**options))

    fused, foreach = {"fused": True}, {"foreach": True}
    for name, (experts, ffn, place) in SHARDINGS.items():
        same(block(experts=experts, ffn=ffn), sharded(place), name, **fused)
    rows_of_three = SHARDINGS["rows"][2]
    same(block(), sharded(reshard_after_forward=False), "kept", **foreach)
    same(block(), sharded(reshard_after_forward=False), "kept", scope=True)
    same(block(), sharded(), "scope", scope=True)
    for recompute in (None, "moe_expert"):  # whose backwards read codes in memory that is gathered again
        one_orientation = block(experts=3, recompute=recompute, weight_copies="rowwise")
        same(one_orientation, sharded(rows_of_three), recompute, **foreach)
    same(block(weight_copies="rowwise"), sharded(), "one orientation", steps=1)
    same(block(recipe="fp8_blockwise"), sharded(), "blockwise", optimizer_of=torch.optim.SGD)
    same(block(), sharded(mp_policy=BF16), "bfloat16")
    same(block(), sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), "offload")
    for mesh in ((1,), (2, 1), (1, 2)):
        same(block(ffn=200), sharded(mesh=mesh), mesh, steps=1)

    def checkpointed(model):
        return lambda x: checkpoint(model, x, use_reentrant=False)

    same(block(), sharded(), "checkpoint", forward=checkpointed, steps=1)

    def twice(model):  # gradients are reduced, and weights resharded, after the second micro-batch
        calls = itertools.count()

        def forward(x):
            last = next(calls) % 2 == 1
            model.set_reshard_after_backward(last)
            model.set_requires_gradient_sync(last)
            return model(x)

        return forward

    halves = partial(layer_of, dtype=torch.bfloat16)  # whose sums are rounded to it by the GEMM
    same(halves, sharded(), "accumulation", optimizer_of=torch.optim.SGD, forward=twice)
    model = same(lambda: layer_of(5), sharded(), "fallback", steps=1)
    assert "w13: masters, for 5 experts on 2 ranks; w2: masters, for" in repr(model)


class Counted(DefaultAllGather):
    """Bytes that this rank sends in each gather."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.sent.append(input_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, group, async_op)


def sends_a_byte_a_weight(rank, folder):
    """In the forward and, where weights are resharded after it, in the backward."""
    ids = torch.stack((torch.arange(T) % 3, (torch.arange(T) + 1) % 3), 1)
    for (experts, ffn, place), reshard in itertools.product(SHARDINGS.values(), (True, False)):
        layer = gather_fp8(layer_of(experts, ffn, router=False))
        fully_shard(layer, mesh=first(2), shard_placement_fn=place, reshard_after_forward=reshard)
        layer.set_custom_all_gather(counted := Counted())
        layer(rows(rank), ids.to(DEVICE), torch.full((T, 2), 0.5, device=DEVICE)).sum().backward()
        width = -(-ffn // 128) * 128
        codes = experts * 3 * width * H
        scales = 4 * codes // 128**2 if place is None else 0  # of other shardings they travel by themselves
        # a root keeps its weights after the forward, so the backward gathers only where it is told to
        assert counted.sent == [(codes + scales) // 2] * (2 if reshard else 1)


def says_what_it_gathers(rank, folder):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fp8moe").addHandler(handler)
    cases = [
        (3, 128, None, "w13: masters, for 3 experts on 2 ranks; w2: masters, for 3 experts on 2 ranks"),
        (
            3,
            192,
            shard_placement(2),
            "w13: masters, for shards of 192 rows, no multiple of 128; w2: masters, ",
        ),
        (4, 200, None, "w13: FP8 codes; w2: FP8 codes"),
        (
            3,
            128,
            lambda p: Shard(1) if p.ndim == 3 and p.shape[2] == 256 else None,
            "w13: FP8 codes; w2: masters, for 3 experts on 2 ranks",
        ),
    ]
    for experts, ffn, place, wanted in cases:
        layer = gather_fp8(layer_of(experts, ffn))
        assert "fully_shard gathers w13: FP8 codes, if shards are of whole blocks; w2: FP8 codes, if" in repr(
            layer
        )
        fully_shard(layer, mesh=first(2), shard_placement_fn=place)
        for _ in range(2):
            layer(rows(rank)).sum().backward()
        assert f"fully_shard gathers {wanted}" in repr(layer)
        assert len(records) == wanted.count("masters"), records
        assert all(r.startswith("gather_fp8: fully_shard gathers w") for r in records)
        records.clear()
    for experts, ffn, place, _ in cases:
        shard = partial(fully_shard, mesh=first(2), shard_placement_fn=place)
        same(partial(layer_of, experts, ffn), shard, steps=1)


def keeps_checkpoints(rank, folder):
    """State dicts are of masters, and can be loaded with `gather_fp8` and without it."""
    x, mesh, whole = rows(7), first(2), StateDictOptions(full_state_dict=True)

    def output(model):
        with torch.no_grad():
            y = model(x)
        model.reshard()  # a root keeps its weights
        return y

    def others():
        for gather in (True, False):
            yield fully_shard(gather_fp8(layer_of()) if gather else layer_of(), mesh=mesh)

    layer = fully_shard(gather_fp8(layer_of()), mesh=mesh)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(x).sum().backward()
    optimizer.step()
    y = output(layer)
    state = layer.state_dict()
    assert all(type(w.to_local()) is torch.Tensor for w in state.values())
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True, map_location=DEVICE)
    full = get_model_state_dict(layer, options=whole)
    alone = layer_of()
    alone.load_state_dict(full)
    assert torch.equal(alone(x), y)
    for other in others():
        for assign, called in itertools.product(
            (False, True), (False, True)
        ):  # before a gather and after one
            with torch.no_grad():
                for p in other.parameters():
                    p.mul_(1.5)
            if called:
                assert not torch.equal(output(other), y)
            kind = type(other.w13._local_tensor)
            other.load_state_dict(copy.deepcopy(state), assign=assign)
            assert type(other.w13._local_tensor) is kind
            assert torch.equal(output(other), y), (assign, called)
        set_model_state_dict(other, full, options=whole)
        assert torch.equal(output(other), y)
    assert kind is torch.Tensor
    assert type(layer.w13._local_tensor) is SentAsFP8
    parts = dict(zip(("model", "optimizer"), get_state_dict(layer, optimizer), strict=True))
    dcp.save(parts, checkpoint_id=folder + "/c")
    for other in others():
        with torch.no_grad():
            other.w13.zero_()
        loaded = {"model": get_model_state_dict(other)}
        dcp.load(loaded, checkpoint_id=folder + "/c")
        set_model_state_dict(other, loaded["model"])
        assert torch.equal(output(other), y)
    empty = fully_shard(gather_fp8(layer_of(device="meta")), mesh=mesh)
    empty.to_empty(device=DEVICE)
    for model in (empty, alone):
        torch.manual_seed(0)
        model.reset_parameters()
    assert torch.equal(output(empty), alone(x))
    assert "w2: FP8 codes" in repr(empty)


CHECKS = (
    gathers_the_codes_of_masters,
    trains_as_with_gathered_masters,
    sends_a_byte_a_weight,
    says_what_it_gathers,
    keeps_checkpoints,
)


def two_ranks(rank, folder, device):
    global DEVICE
    DEVICE = device
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for check in CHECKS:
        check(rank, folder)
    dist.barrier()
    os._exit(0)  # gloo's threads are not always joined at Python's exit


# ---------------------------------------------------------------- in one process


def test_weights_before_fully_shard():
    """They are copied, pickled and moved as others, and no forward takes them for whole weights."""
    layer, x = gather_fp8(layer_of(ffn=200)), rows(0)
    y = layer_of(ffn=200)(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.double().float()):
        assert type(twin.w13) is SentAsFP8
        assert isinstance(twin.w13, nn.Parameter)
        assert gather_fp8(twin) is twin
        assert twin.w13.padding is twin._fp8_gathers["w13"]
        with pytest.raises(
            TypeError, match=r"w13: got a SentAsFP8, .*; call fully_shard on the layer or a mo"
        ):
            twin(x)
        state = twin.state_dict()
        assert {type(w) for w in state.values()} == {torch.Tensor}
        alone = layer_of(ffn=200)
        with torch.no_grad():
            alone.w13.zero_()
        alone.load_state_dict(state)
        assert torch.equal(alone(x), y)
        for assign in (False, True):
            new = {name: torch.randn_like(w) for name, w in state.items()}
            twin.load_state_dict(new, assign=assign)
            assert type(twin.w13) is SentAsFP8
            assert isinstance(twin.w13, nn.Parameter)
            assert torch.equal(twin.w13.masters, new["w13"])
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.state_dict()["w2"].clone()
    layer.w2.grad = torch.ones_like(layer.w2)
    optimizer.step()
    assert torch.equal(layer.state_dict()["w2"], before - 1)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_refusals(one_rank):
    """Of what has no codes to gather, and of operations that would read values of gathered weights."""
    with pytest.raises(TypeError, match="model: got Tensor; wanted a Module"):
        gather_fp8(torch.ones(2))
    for model in (nn.Linear(2, 2), layer_of(recipe="bf16")):
        with pytest.raises(ValueError, match=r"model: got .*, without experts in an FP8 recipe"):
            gather_fp8(model)
    with pytest.raises(TypeError, match=r"w13: got a weight that is sharded already.*before fully_shard"):
        gather_fp8(fully_shard(layer_of(), mesh=one_rank))
    layer = fully_shard(gather_fp8(layer_of()), mesh=one_rank)
    layer(rows(0), is_first_microbatch=True)
    with pytest.raises(
        TypeError, match=r"w13: got FP8 codes that fully_shard has gathered.*quantize_weights"
    ):
        layer.quantize_weights()
    for name, read in {
        "add.Tensor": lambda w: w + 1,
        "clone.default": lambda w: w.clone(),
        "_to_copy.default": lambda w: w.bfloat16(),
        "mul_.Tensor": lambda w: w.detach().mul_(2),
        "dot.default": lambda w: torch.ones(2).dot(w),
        "transpose.int": lambda w: w.mT,
        "view.default": lambda w: w.flatten(),
    }.items():
        with pytest.raises(
            RuntimeError, match=f"w2: got aten.{name} of a weight that fully_shard has gather"
        ):
            read(layer.w2)
    for zeros in (torch.zeros_like(layer.w2), layer.w2.new_zeros(3)):
        assert type(zeros) is torch.Tensor
        assert zeros.is_contiguous()
        assert not zeros.any()
    layer.reshard()
    layer.recipe = "bf16"
    with pytest.raises(
        RuntimeError, match=r"w13: got aten\._to_copy\.default of a weight that fully_shard has"
    ):
        layer(rows(0))


def test_nothing_of_weights_is_held_for_the_backward(one_rank):
    """With one orientation the backward reads codes where fully_shard gathers them again."""
    layer = gather_fp8(layer_of(weight_copies="rowwise"))
    fully_shard(layer, mesh=one_rank, reshard_after_forward=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(rows(0))
    codes = [t for t in saved if t.dtype == torch.uint8 and t.ndim == 3]
    assert [t.shape for t in codes] == [(4, 2 * 128, H), (4, H, 128)]
    assert not any(t.untyped_storage().nbytes() for t in codes)
    y.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled(one_rank):
    """Codes and scales are inputs of the compiled graph."""
    results = []
    for compiled in (False, True):
        layer = fully_shard(gather_fp8(layer_of(router=False)), mesh=one_rank)
        if compiled:
            layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
        x, ids = rows(0).requires_grad_(), torch.arange(2 * T).view(T, 2) % 4
        y = layer(x, ids, torch.full((T, 2), 0.5))
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad.full_tensor() for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu(2))])
def test_on_two_ranks(device, tmp_path):
    torch.multiprocessing.spawn(two_ranks, (str(tmp_path), device), nprocs=2)


def test_readers_of_the_memory_get_the_masters():
    layer = gather_fp8(layer_of())
    w = layer.w13.detach()
    wanted = layer.state_dict()["w13"]
    assert torch.equal(torch.from_dlpack(w), wanted)
    assert np.array_equal(np.from_dlpack(w), wanted.numpy())
    file = io.BytesIO()
    torch.save({"w13": w}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["w13"], wanted)
    layer.share_memory()
    assert layer.state_dict()["w13"].is_shared()


def test_weights_of_two_modules_are_refused():
    layers = nn.ModuleList([layer_of(), layer_of()])
    layers[1].w13 = layers[0].w13
    with pytest.raises(ValueError, match="w13: got a parameter that two modules have"):
        gather_fp8(layers)
