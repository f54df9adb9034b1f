"""Expert ids that name no expert: with FP8MOE_CHECK=1 every id that is not negative is an expert's, at every
door; without it ids that are none's have no expert."""

import re

import cuda_on_cpu
import numpy as np
import pytest
import torch
from cases import BF16, assert_same, generator
from torch.distributed import HashStore, destroy_process_group, init_process_group

import fp8moe
import fp8moe.torch
from fp8moe import RouterConfig
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch.layer import FP8FlowMoE
from fp8moe.layer.recipes import RECIPES

RNG = generator()
T, H, F, E, K = 6, 128, 128, 4, 2
X, DY, LOGITS = RNG.standard_normal((3, T, H)).astype(np.float32)
W13 = RNG.standard_normal((E, 2 * F, H)).astype(np.float32) / 12
W2 = RNG.standard_normal((E, H, F)).astype(np.float32) / 12
PROBS = RNG.random((T, K)).astype(np.float32)


def tensors(*arrays):
    return [torch.from_numpy(a) for a in arrays]


def numpy_layer(recipe):
    dtype = np.float32 if recipe == "bf16" else BF16
    x, w13, w2 = (a.astype(dtype) for a in (X, W13, W2))
    return lambda ids: fp8moe.moe_forward(x, w13, w2, ids, PROBS, recipe=recipe)[0].astype(np.float32)


def torch_function(recipe, dtype="float32", **options):
    x, w13, w2, probs = tensors(X, W13, W2, PROBS)
    x, w13, w2 = (t.to(getattr(torch, dtype)) for t in (x, w13, w2))
    return lambda ids: (
        fp8moe.torch.moe_experts(x, w13, w2, *tensors(ids), probs, recipe=recipe, **options).float().numpy()
    )


def torch_module(recipe, **options):
    layer = FP8FlowMoE(H, F, E, K, recipe=recipe, router=False, **options)
    x, probs = tensors(X, PROBS)
    return lambda ids: layer(x, *tensors(ids), probs).detach().numpy()


def route_backward(ids):
    config = RouterConfig(K)
    return fp8moe.route_backward(PROBS, LOGITS[:, :E].copy(), ids.astype(np.int32), config)


def permuted(ids):
    return fp8moe.permute_and_pad(X, ids, align_size=1, num_experts=E, num_out_tokens=T * K).data


DOORS = {
    "plan_topk": lambda: lambda ids: fp8moe.plan_topk(ids, E).row_id_map,
    "torch plan_topk": lambda: lambda ids: torch_ops.plan_topk(*tensors(ids), E).row_id_map.numpy(),
    "permute_and_pad": lambda: permuted,
    "route_backward": lambda: route_backward,
    **{f"moe_forward {recipe}": (lambda recipe=recipe: numpy_layer(recipe)) for recipe in RECIPES},
    **{f"moe_experts {recipe}": (lambda recipe=recipe: torch_function(recipe)) for recipe in RECIPES},
    # by torch's grouped product
    "moe_experts bf16 of bfloat16": lambda: torch_function("bf16", "bfloat16"),
    "moe_experts with bias2": lambda: torch_function("fp8_flow", bias2=torch.ones(E, H)),
    "FP8FlowMoE": lambda: torch_module("fp8_flow"),
    "FP8FlowMoE bf16": lambda: torch_module("bf16"),
}


def agrees(door, ids):
    """Without the check an id that names no expert is like a negative one; with it the error names it."""
    beyond = ids.copy()
    beyond[ids < 0] = RNG.choice([E, E + 1, 2**31 - 1], (ids < 0).sum())
    beyond[3, 1] = E
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8MOE_CHECK", "0")
        wanted = door(ids)
        assert np.abs(wanted).max() > 0
        assert_same(door(beyond), wanted)
        patch.setenv("FP8MOE_CHECK", "1")
        assert_same(door(ids), wanted)
        # counted from one, which needs no id above E; and any other
        for wrong in (np.where(ids < 0, ids, ids % E + 1), beyond):
            with pytest.raises(
                Exception, match=rf"(topk_ids|routing_map): got an expert id of {wrong.max()};"
            ):
                door(wrong)


def given_ids():
    ids = np.stack([RNG.permutation(E)[:K] for _ in range(T)]).astype(np.int64)
    ids[2], ids[3, 1], ids[4, 0] = -1, -1, E - 1
    return ids


@pytest.mark.parametrize("name", DOORS)
def test_with_the_check_ids_beyond_the_experts_raise(name):
    agrees(DOORS[name](), given_ids())


def test_the_check_before_rows_are_sent():
    """Also where another library sends them (an Engine): it would take such ids for no expert."""
    from fp8moe.adapters.torch.distributed.process_group import ProcessGroup

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = ProcessGroup(torch.distributed.group.WORLD)
        ids = given_ids()
        for recipe, dtype in (("fp8_flow", "float32"), ("bf16", "bfloat16")):
            agrees(torch_function(recipe, dtype, comm=group), ids)
        agrees(torch_module("fp8_flow", process_group=torch.distributed.group.WORLD), ids)
    finally:
        destroy_process_group()


def test_the_check_in_jax():
    jax = pytest.importorskip("jax")
    from fp8moe.adapters.jax import layer as jax_layer

    def layer(ids):
        return jax_layer.moe_experts(X, W13, W2, ids, PROBS, recipe="fp8_flow")

    spec, mesh = jax.sharding.PartitionSpec("ep"), jax.sharding.Mesh(np.array(jax.devices()[:1]), ("ep",))

    def sharded(ids):  # traced anew, since the check is part of the program
        def run(*arrays):
            return jax_layer.moe_experts(*arrays, axis_name="ep", recipe="bf16")

        run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(run)(X, W13, W2, ids, PROBS)

    ids = given_ids().astype(np.int32)
    for run in (layer, jax.jit(layer)):
        agrees(lambda ids, run=run: np.asarray(run(ids.astype(np.int32))), ids)
    agrees(lambda ids: np.asarray(sharded(ids.astype(np.int32))), ids)


def test_transformers_declares_its_number_of_no_expert():
    """Its expert parallelism names the experts of other ranks E; elsewhere E is an error like any other."""
    pytest.importorskip("transformers", minversion="5.23")
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from fp8moe.adapters import transformers as adapter

    adapter.enable("bf16", name="fp8moe_ids")
    config = transformers.Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=F, num_experts=E)
    config._experts_implementation = "fp8moe_ids"
    experts = Qwen3MoeExperts(config)
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.1)
    x, probs = tensors(X, PROBS)

    def run(ids):
        return experts(x, *tensors(ids), probs).detach().numpy()

    ids = given_ids()
    agrees(run, ids)
    experts._is_expert_parallel = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8MOE_CHECK", "1")
        assert_same(run(np.where(ids < 0, E, ids)), run(ids))
        with pytest.raises(ValueError, match=rf"topk_ids: got an expert id of {E + 1};"):
            run(np.where(ids < 0, E + 1, ids))


def test_the_check_is_read_in_every_call(monkeypatch):
    """Also by calls whose launches were recorded before it was switched on."""
    ids = given_ids()
    beyond = np.where(ids < 0, E, ids).astype(np.int32)
    places = [lambda a: a]
    if cuda_on_cpu.available:
        pytest.importorskip("cupy")
        cuda_on_cpu.install(monkeypatch)
        places.append(cuda_on_cpu.upload)
    wanted = re.escape(f"topk_ids: got an expert id of {E}; wanted ids below num_experts={E}, or -1")
    for place in places:
        arguments = [place(a) for a in (PROBS, LOGITS[:, :E].copy(), beyond)]
        for value in ("0", "1", "", "1"):
            monkeypatch.setenv("FP8MOE_CHECK", value)
            if value != "1":
                fp8moe.route_backward(*arguments, RouterConfig(K))
                continue
            with pytest.raises(ValueError, match=wanted):
                fp8moe.route_backward(*arguments, RouterConfig(K))
