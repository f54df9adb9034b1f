"""One rank of test_torchtitan.py, with torchtitan's own expert parallelism: ``python torchtitan_rank.py RANK
FILE``."""

import copy
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torchtitan.distributed import parallel_dims
from torchtitan.distributed.utils import get_spmd_context
from torchtitan.models import gpt_oss
from torchtitan.models.common.moe import MoE
from torchtitan.models.gpt_oss.sharding import set_gpt_oss_sharding_config
from torchtitan.models.qwen3 import model_registry
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from fp8moe.adapters.torchtitan import FP8MoEConverter, FP8RoutedExperts

RANK, WORLD = int(sys.argv[1]), 2
os.environ.update(RANK=str(RANK), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(RANK))
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=WORLD)
parallel_dims.device_type = "cpu"  # without CUDA torchtitan would assume a GPU
degrees = {"dp_replicate": 1, "dp_shard": WORLD, "cp": 1, "tp": 1, "pp": 1, "ep": WORLD}


def meshes(backend, **others):
    dims = parallel_dims.ParallelDims(**degrees | others, world_size=WORLD, spmd_backend=backend)
    dims.build_mesh()
    return dims


def results(forward, x, dy, layer=None, *rest):
    layer, x = forward if layer is None else layer, x.clone().requires_grad_()
    layer.zero_grad()
    y = joined(forward(x, *rest))
    y.backward(dy)
    return [y.detach(), x.grad], {n: p.grad for n, p in layer.named_parameters()}


def joined(y):
    return y.full_tensor() if isinstance(y, DTensor) else y


def checkpointed(module):
    return lambda *given: checkpoint(module, *given, use_reentrant=False)


for backend, recipe in (("partial_dtensor", "bf16"), ("spmd_types", "fp8_flow")):
    dims = meshes(backend)
    model = model_registry("debugmodel_moe", converters=[FP8MoEConverter.Config(recipe=recipe)]).model
    set_qwen3_sharding_config(model, enable_sp=False, enable_ep=True)
    config = next(iter(model.traverse(MoE.Config)))[1]
    plain, layer = config.build(), config.build()
    assert type(layer.routed_experts) is FP8RoutedExperts
    torch.manual_seed(0)
    for p in plain.parameters():
        torch.nn.init.normal_(p, std=0.05)
    layer.load_state_dict(plain.state_dict())
    layer.parallelize(dims)
    generator = torch.Generator().manual_seed(RANK)
    x, dy = (torch.randn(2, 8, plain.router.gate.weight.shape[1], generator=generator) for _ in range(2))
    experts, num_experts = layer.routed_experts, plain.routed_experts.inner_experts.num_experts
    ids = torch.randint(0, num_experts, (2, 8, 2), generator=generator)
    counts = torch.bincount(ids.ravel(), minlength=num_experts)
    arguments = x, torch.rand(2, 8, 2, generator=generator), ids, counts
    # compiled and checkpointed, as torchtitan's blocks are: the first thing that the process computes
    torch.compiler.reset()
    block = torch.compile(checkpointed(experts), backend="aot_eager", fullgraph=True)
    compiled, of_compiled = results(block, x, dy, experts, *arguments[1:])
    y, of_eager = results(experts, x, dy, experts, *arguments[1:])
    # sums of two ranks' rows, in bfloat16 for FP8; weight gradients in another order
    bound = 2.0**-7 if recipe == "fp8_flow" else 2.0**-16
    for actual, true in ((compiled, y), (of_compiled.values(), of_eager.values())):
        for a, b in zip(actual, true, strict=True):
            a, b = (t.to_local() if isinstance(t, DTensor) else t for t in (a, b))
            assert (a - b).norm() <= bound * b.norm()
    rows, grads = results(layer, x, dy)
    wanted, wanted_grads = results(plain, x, dy)
    for actual, true in zip(rows, wanted, strict=True):
        assert (actual - true).norm() <= bound * true.norm(), (recipe, actual.shape)
    for name, grad in grads.items():
        if "experts" not in name:
            continue
        true = wanted_grads[name].contiguous()
        dist.all_reduce(true)
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        true = true.chunk(WORLD)[RANK]  # this rank's experts
        assert local.shape == true.shape
        assert (local - true).norm() <= bound * true.norm(), (recipe, name)
    if recipe == "fp8_flow":  # gathered as codes: a rank's experts, and without expert parallelism all
        converter = FP8MoEConverter.Config(gather_fp8=True)
        model = model_registry("debugmodel_moe", converters=[converter]).model
        set_qwen3_sharding_config(model, enable_sp=False, enable_ep=True)
        config = next(iter(model.traverse(MoE.Config)))[1]
        for of_masters, mesh in (
            (experts, dims.get_mesh("efsdp")),
            (plain.routed_experts, init_device_mesh("cpu", (WORLD,))),
        ):
            gathered = config.build()
            gathered.load_state_dict(plain.state_dict())
            if of_masters is experts:
                gathered.parallelize(dims)
            fully_shard(gathered.routed_experts, mesh=mesh)
            assert torch.equal(gathered.routed_experts(*arguments), of_masters(*arguments))
            assert repr(gathered).count("FP8 codes") == 3
    # as weight averaging does
    assert torch.equal(copy.deepcopy(experts)(*arguments), experts(*arguments))


def gpt_oss_experts(recipe, hidden):
    """Configuration of an MoE layer of gpt-oss, sharded over tensor-parallel ranks, with narrow experts."""
    convert = [FP8MoEConverter.Config(recipe=recipe)]
    model = gpt_oss.model_registry("debugmodel", moe_comm_backend="standard", converters=convert).model
    set_gpt_oss_sharding_config(model, enable_sp=False, enable_ep=False)
    config = next(iter(model.traverse(MoE.Config)))[1]
    config.routed_experts.inner_experts.hidden_dim = hidden
    return config


def summed(module, name):
    """A parameter's gradient, of all ranks' rows or columns; as the trainer, it adds those of replicated ones
    where torchtitan declares them to be partial sums."""
    grad = module.get_parameter(name).grad
    if isinstance(grad, DTensor):
        return grad.full_tensor()
    owner, _, own = name.rpartition(".")
    kind = module.get_submodule(owner)._sharding_config.state_shardings[own].axis_types["tp"]
    if hasattr(kind, "dim"):
        parts = [torch.empty_like(grad) for _ in range(WORLD)]
        dist.all_gather(parts, grad)
        return torch.cat(parts, dim=kind.dim)
    if kind.backward_type().value == "P":
        dist.all_reduce(grad)
    return grad


def tensor_parallel(backend, recipe):
    """Experts of gpt-oss of which each rank has a part of the width: the sum over the ranks has each bias
    once, and all gradients are those of one rank. ``set_spmd_backend`` of torchtitan is not called."""
    dims = meshes(backend, dp_shard=1, tp=WORLD, ep=1)
    torch.manual_seed(2)  # the same tokens and weights on all ranks
    config = gpt_oss_experts(recipe, hidden=48)
    plain, layer = config.build(), config.build()
    for name, p in plain.named_parameters():
        torch.nn.init.normal_(p, std=1.0 if "bias" in name else 0.1)
    layer.load_state_dict(plain.state_dict())
    layer.parallelize(dims)
    x, dy = torch.randn(2, 2, 8, plain.router.gate.weight.shape[1])
    wanted, wanted_grads = results(plain, x, dy)
    with get_spmd_context(parallel_dims=dims)():
        actual, _ = results(layer, x, dy)
        bound = 2.0**-7 if recipe == "fp8_flow" else 2.0**-16  # as above
        for a, b in zip(actual, wanted, strict=True):
            assert (joined(a) - b).norm() <= bound * b.norm(), (backend, recipe, a.shape)
        for name, b in wanted_grads.items():
            assert (summed(layer, name) - b).norm() <= bound * b.norm(), (backend, recipe, name)
        # recomputed in a thread that knows no mesh, as the ones of a GPU's backward
        experts, grads = layer.routed_experts, []
        scores, ids = torch.rand(2, 8, 4, requires_grad=True), torch.randint(0, 8, (2, 8, 4))
        for forward in (experts, checkpointed(experts)):
            y = joined(forward(x, scores, ids, torch.bincount(ids.ravel(), minlength=8)))
            with ThreadPoolExecutor(1) as pool:
                grads += pool.submit(torch.autograd.grad, y, scores, dy).result()
        assert torch.equal(*grads)
    with pytest.raises(ValueError, match="tp: got 2 ranks for experts of hidden_dim 45; wanted a divisor"):
        gpt_oss_experts(recipe, hidden=45).build().parallelize(dims)


for case in (("partial_dtensor", "bf16"), ("partial_dtensor", "fp8_flow"), ("spmd_types", "fp8_flow")):
    tensor_parallel(*case)
# the weights are gathered for calls of the module that fully_shard was given
for whole in (True, False):
    experts = copy.deepcopy(plain.routed_experts)
    y = experts(*arguments)
    fully_shard(experts if whole else experts.inner_experts, mesh=init_device_mesh("cpu", (WORLD,)))
    if whole:
        assert torch.equal(experts(*arguments), y)
        continue
    with pytest.raises(
        RuntimeError, match=r"w1_EFD: got shape \[32, .* on a rank; wanted \[64, .*fully_shard"
    ):
        experts(*arguments)
dist.barrier()
dist.destroy_process_group()
print("right", flush=True)
os._exit(0)  # gloo's threads are not always joined at Python's exit
