"""Ranks of Megatron-Core on the CPU: the layer compared with Megatron's own experts. test_megatron.py calls
`start`, which forks the ranks, because importing Megatron takes longer than most of the comparisons;
Megatron spawns processes to write a checkpoint, which would run a script again.

Megatron's SequentialMLP is the oracle, with the same weights, tokens and optimizer.
"""

import contextlib
import copy
import logging
import multiprocessing
import os
import sys
import traceback
import warnings

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, apply_factories
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from fp8moe import megatron
from fp8moe.adapters.megatron.layer import chosen

RANK, FOLDER = 0, ""  # set by `start`
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
torch.set_num_threads(1)
torch.cuda.current_device = lambda: torch.device("cpu")  # Megatron calls it directly

E, HIDDEN, FFN, VOCAB, LENGTH = 4, 128, 128, 256, 16


class NoTracker:
    """Replaces the states of CUDA's random generators."""

    def is_initialized(self):
        return True

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        yield

    def get_states(self):
        return {}

    def set_states(self, states):
        pass


class NoStream:
    """In the place of streams and of events."""

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass


torch.cuda.synchronize = lambda *_: None
torch.cuda.current_stream = torch.cuda.Stream = lambda *_: NoStream()
torch.cuda.stream = lambda *_: contextlib.nullcontext()
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # asked for by Megatron's sequence parallelism
megatron_random._get_cuda_rng_state = megatron_random._set_cuda_rng_state = lambda *_, **__: None
megatron_random._CUDA_RNG_STATE_TRACKER = NoTracker()
megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
# which leaves tensors that are on the CPU already as they are, also where lists are wanted
token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
    tensor.numpy() if as_numpy else tensor
)
whole_norm = WrappedTorchNorm.__new__


def norm(cls, config, *arguments, **options):
    """torch's norm, which Megatron refuses with sequence parallelism; it normalises each token by itself."""
    config = copy.copy(config)
    config.sequence_parallel = False
    return whole_norm(cls, config, *arguments, **options)


WrappedTorchNorm.__new__ = norm
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16 reads it without Transformer Engine too


def parallel(ep, tp=1, expert_tp=1):
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=expert_tp,
    )


def config(**options):
    plain = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 2 * FFN,
        "moe_ffn_hidden_size": FFN,
        "moe_shared_expert_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_moe_experts": E,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "sequence_parallel": parallel_state.get_tensor_model_parallel_world_size() > 1,
        "use_cpu_initialization": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**plain | options)


def gpt(recipe=None, dispatcher="fp8moe", seed=0, **options):
    """A model with Megatron's own experts if recipe is None."""
    torch.manual_seed(seed + parallel_state.get_expert_model_parallel_rank())
    spec = get_gpt_layer_local_spec(num_experts=E, moe_grouped_gemm=False)
    if recipe is not None:
        spec = megatron.use_fp8_flow(spec, recipe=recipe, dispatcher=dispatcher)
    model = GPTModel(config(**options), spec, VOCAB, LENGTH, position_embedding_type="rope")
    for name, p in model.named_parameters():
        if (
            "experts" in name and "shared" not in name
        ):  # the only ones that differ between data parallel ranks
            continue
        group = (
            parallel_state.get_data_parallel_group() if getattr(p, "tensor_model_parallel", False) else None
        )
        torch.distributed.broadcast(p.data, group=group, group_src=0)
    return model


def batch(step):
    generator = torch.Generator().manual_seed(100 * step + parallel_state.get_data_parallel_rank())
    ids = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    return (ids[:, :-1].contiguous(), positions, mask), ids[:, 1:].contiguous()


def loss_of(model, step):
    inputs, labels = batch(step)
    return model(*inputs, labels=labels).mean()


def trained(model, steps=2):
    """Losses of a few steps, and the first step's gradients by the parameter names of Megatron's experts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, grads = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.item())
        if not step:
            grads = by_expert({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    return losses, grads


def by_expert(tensors):
    named = {}
    for name, tensor in tensors.items():
        for ours, theirs in (("experts.weight1", "linear_fc1"), ("experts.weight2", "linear_fc2")):
            if name.endswith(ours):
                start = name.removesuffix(ours)
                named |= {
                    f"{start}experts.local_experts.{e}.{theirs}.weight": t for e, t in enumerate(tensor)
                }
                break
        else:
            named[name] = tensor
    return named


def losses(ep):
    """Compares the first losses and gradients with SequentialMLP's, for several recipes."""
    parallel(ep)
    kinds = [(recipe, "fp8moe", {}) for recipe in ("bf16", "fp8_flow", "fp8_blockwise")]
    kinds += [("fp8_flow", "megatron", {})]
    if ep == 1:
        selective = {"recompute_granularity": "selective", "moe_grouped_gemm": True}
        kinds += [("bf16", "fp8moe", {**selective, "recompute_modules": ["moe_act"]})]
        kinds += [("fp8_flow", "fp8moe", {**selective, "recompute_modules": ["moe"]})]
    compared(kinds)


def compared(kinds, **common):
    """Initial weights, losses and gradients of kinds (recipe, dispatcher, options), compared with
    SequentialMLP's."""
    plain, ep = gpt(**common), parallel_state.get_expert_model_parallel_world_size()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    start = {n: p.detach().clone() for n, p in plain.named_parameters()}
    wanted, grads = trained(plain)
    for recipe, dispatcher, options in kinds:
        model = gpt(recipe, dispatcher, **common | options)
        assert all(torch.equal(p, start[n]) for n, p in by_expert(dict(model.named_parameters())).items())
        layer = model.decoder.layers[0].mlp
        assert isinstance(layer, MoELayer)
        assert isinstance(layer, megatron.FP8FlowMoELayer) == (dispatcher == "fp8moe")
        assert isinstance(layer.experts, megatron.FP8FlowExperts)
        assert layer.experts.recompute == ("moe_expert" if "moe_act" in str(options) else None)
        theirs = plain.decoder.layers[0].mlp.experts.local_experts[0].linear_fc1.weight
        assert layer.experts.weight1.allreduce == theirs.allreduce
        actual, ours = trained(model)
        # fp8_flow: measured with the layer's prototype; bf16 multiplies in the parameters' dtype, float32
        limit = 1e-6 if recipe == "bf16" else 1e-3
        for a, b in zip(actual, wanted, strict=True):
            assert abs(a - b) <= limit * b, (recipe, dispatcher, options, actual, wanted)
        print(f"EP {ep} {recipe} by {dispatcher} {options}: {actual[0]:.5f} for {wanted[0]:.5f}")
        assert ours.keys() == grads.keys()
        for name, g in grads.items():
            # dw13 depends on six FP8 operands, each with an error of at most 2^-4 / sqrt(3) in the mean
            # square. A router's gradient has one such error per token, so the norm of n of them varies by 1 /
            # sqrt(2 n) of itself: four standard deviations
            far, tokens = torch.linalg.norm(ours[name] - g) / torch.linalg.norm(g), 2 * LENGTH / tp
            noise = 0.09 * (1 + 4 / (2 * tokens) ** 0.5) if "router" in name else 0.1
            assert far <= (1e-4 if recipe == "bf16" else noise), (recipe, name, far)


def in_bfloat16():
    """bfloat16 parameters, as in training: the losses are within the bounds set for the layer's prototype."""
    options = {"params_dtype": torch.bfloat16, "bf16": True}
    wanted, _ = trained(gpt(**options), steps=1)
    for recipe in ("bf16", "fp8_flow"):
        actual, _ = trained(gpt(recipe, **options), steps=1)
        print(f"{recipe}, bfloat16 parameters: {actual[0]:.5f} for {wanted[0]:.5f}")
        assert abs(actual[0] - wanted[0]) <= 1e-3 * wanted[0]


def dropped():
    """Tokens beyond an expert's capacity have no expert, in both layers."""
    parallel(1)
    options = {"moe_token_dispatcher_type": "alltoall", "moe_expert_capacity_factor": 0.5}
    model, plain = gpt("bf16", **options), gpt()
    plain.config.moe_expert_capacity_factor = 0.5  # read by its router; "alltoall" requires CUDA streams
    (a, ours), (b, theirs) = trained(model), trained(plain)
    for one, other in zip(a, b, strict=True):
        assert abs(one - other) <= 1e-6 * other
    for name, g in theirs.items():
        assert torch.linalg.norm(ours[name] - g) <= 1e-4 * torch.linalg.norm(g), name
    probs = torch.tensor([[0.5, 0.0, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False, False], [False, False, True, False]])
    ids, chosen_probs = chosen(mask, probs, 2)
    assert ids[0].tolist() == [0, 1]  # selected although its probability is 0
    assert sorted(ids[1].tolist()) == [-1, 2]
    chosen_probs.sum().backward()
    assert probs.grad.tolist() == [[1, 1, 0, 0], [0, 0, 1, 0]]


def split_experts():
    """Experts split over expert-tensor-parallel ranks, beside and without tensor and expert parallelism."""
    overlap = {"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "alltoall"}
    for tp, ep, expert_tp in ((2, 2, 2), (2, 1, 2), (1, 2, 2), (2, 4, 1)):
        parallel(ep, tp, expert_tp)
        kinds = [("bf16", "fp8moe", {})]
        if (tp, ep) == (2, 2):
            kinds += [("fp8_flow", "fp8moe", {}), ("bf16", "megatron", {}), ("fp8_flow", "megatron", {})]
            kinds += [("bf16", "fp8moe", overlap)]
        if expert_tp == 1:  # gloo gathers no rows of different numbers
            kinds += [("bf16", "megatron", overlap)]
        compared(kinds)
        if expert_tp > 1:
            same_pieces()
        if (tp, ep) == (2, 2):
            in_bfloat16()
        if (tp, ep) == (2, 1):
            distributed_optimizer()
    saved_and_loaded_in_parts()
    # without a gate; in one layer, because rounding to FP8 moves tokens to other experts of the next one
    gelu = {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu, "num_layers": 1}
    parallel(2, 2, 2)
    compared([("bf16", "fp8moe", {}), ("fp8_flow", "megatron", {})], **gelu)
    same_pieces(**gelu)


def pieces(model, metadata=None):
    """What Megatron writes to a checkpoint, by key and offset."""
    state = model.sharded_state_dict(metadata=metadata)
    apply_factories(state)
    actual = {}
    for piece in nested_values(state):
        if isinstance(piece, ShardedBase):
            place = getattr(piece, "global_offset", None)
            shape = getattr(piece, "global_shape", None), getattr(piece, "local_shape", None)
            axes = getattr(piece, "axis_fragmentations", None), getattr(piece, "prepend_axis_num", None)
            assert (piece.key, place) not in actual
            actual[piece.key, place] = (*shape, axes, piece.replica_id, piece.data)
    return actual


def same_pieces(**options):
    for metadata in (None, {"singleton_local_shards": True}):
        ours, theirs = pieces(gpt("fp8_flow", **options), metadata), pieces(gpt(**options), metadata)
        assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
        for key, (*place, data) in ours.items():
            *wanted, other = theirs[key]
            assert place == wanted, (key, place, wanted)
            assert torch.equal(data, other) if torch.is_tensor(data) else type(data) is type(other), key
        print(f"{len(ours)} of {len(theirs)} pieces alike")


def saved_and_loaded():
    """Saved with one number of ranks and kind of experts, loaded with the others."""
    kinds = [(ep, recipe) for ep in (1, 2) for recipe in (None, "fp8_flow")]
    weights = {}
    for ep, recipe in kinds:
        parallel(ep)
        folder = f"{FOLDER}/{ep}-{recipe}"
        if RANK == 0:
            os.makedirs(folder)
        torch.distributed.barrier()
        model = gpt(recipe, seed=5)
        weights[ep, recipe] = gathered(model)
        dist_checkpointing.save(model.sharded_state_dict(), folder)
    for ep, recipe in kinds:
        parallel(ep)
        for (ep_before, recipe_before), before in weights.items():
            model = gpt(recipe, seed=6)
            assert any((a != before[n]).any() for n, a in gathered(model).items())
            state = dist_checkpointing.load(
                model.sharded_state_dict(), f"{FOLDER}/{ep_before}-{recipe_before}"
            )
            model.load_state_dict(state)
            after = gathered(model)
            assert before.keys() == after.keys()
            for name, value in before.items():
                assert torch.equal(value, after[name]), (ep, recipe, ep_before, recipe_before, name)


def saved_and_loaded_in_parts():
    """As above, from and to experts that are split over ranks."""
    for n, (recipe, places, other, other_places) in enumerate(
        (("fp8_flow", (2, 2, 2), None, (2, 1, 2)), (None, (4, 2, 1), "fp8_flow", (1, 2, 2)))
    ):
        folder = f"{FOLDER}/parts-{n}"
        if RANK == 0:
            os.makedirs(folder)
        parallel(*places)
        model = gpt(recipe, seed=5)
        before = gathered(model)
        dist_checkpointing.save(model.sharded_state_dict(), folder)
        parallel(*other_places)
        model = gpt(other, seed=6)
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), folder))
        after = gathered(model)
        for name in (name for name in before if "local_experts" in name):
            assert torch.equal(before[name], after[name]), (n, name)


def gathered(model):
    """All experts' whole weights, by global expert id."""
    group = parallel_state.get_expert_model_parallel_group()
    tensor_group = parallel_state.get_expert_tensor_parallel_group()
    ranks, tensors = group.size(), by_expert(dict(model.named_parameters()))
    actual = {}
    for name, p in tensors.items():
        start, local, rest = name.partition("local_experts.")
        if not local:
            actual[name] = p.detach().clone()
            continue
        number, _, rest = rest.partition(".")
        parts = [torch.empty_like(p) for _ in range(tensor_group.size())]
        torch.distributed.all_gather(parts, p.detach().contiguous(), group=tensor_group)
        if "linear_fc1" in rest:  # gates and ups
            whole = torch.cat([part.unflatten(0, (2, -1)) for part in parts], 1).flatten(0, 1)
        else:
            whole = torch.cat(parts, 1)
        every = [torch.empty_like(whole) for _ in range(ranks)]
        torch.distributed.all_gather(every, whole, group=group)
        for rank, value in enumerate(every):
            actual[f"{start}{local}{rank * (E // ranks) + int(number)}.{rest}"] = value
    return actual


def wrapped(recipe, gather_late=False):
    """Weights after two steps of two micro-batches in Megatron's wrapper, with its distributed optimizer.
    gather_late: each module's weights are gathered when it is called."""
    model = gpt(recipe, params_dtype=torch.float32)
    options = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True}
    options["overlap_param_gather"] = gather_late
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(**options, bucket_size=10_000), model
    )
    plain = {"optimizer": "adam", "lr": 1e-2, "use_distributed_optimizer": True, "clip_grad": 1.0}
    plain["overlap_param_gather"] = gather_late
    optimizer = get_megatron_optimizer(OptimizerConfig(**plain), [ddp])
    losses = []
    for step in range(2):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, 2 * step).backward()
        loss = loss_of(ddp, 2 * step + 1)
        loss.backward()
        finalize_model_grads([ddp])
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    if gather_late:
        ddp.disable_forward_pre_hook()
    return losses, gathered(model), ddp, optimizer


def distributed_optimizer():
    losses, wanted, *theirs = wrapped(None)
    actual, ours, *_ = wrapped("bf16")
    for a, b in zip(actual, losses, strict=True):
        assert abs(a - b) <= 1e-6 * b
    start = gathered(gpt())
    for name, value in wanted.items():
        # Adam's first steps follow the gradients' signs, which are arbitrary for gradients that are rounding
        # errors
        moved = torch.linalg.norm(value - start[name])
        assert torch.linalg.norm(ours[name] - value) <= 1e-2 * moved, name
    late, late_weights, *_ = wrapped("bf16", gather_late=True)
    assert late == actual
    assert all(torch.equal(value, ours[name]) for name, value in late_weights.items())
    flow, *_, ddp, optimizer = wrapped("fp8_flow")
    assert ddp.module.decoder.layers[0].mlp.experts.weight1.grad_added_to_main_grad
    assert abs(flow[0] - losses[0]) <= 1e-3 * losses[0]  # Adam's first step follows the gradients' signs
    return (ddp, optimizer), theirs


def optimizers_saved(ep, ours, theirs):
    """The optimizer state of Megatron's experts can be loaded by this layer, and the reverse."""
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}

    def state_of(ddp, optimizer, loading=False):
        model = ddp.module.sharded_state_dict(metadata=metadata)
        state = optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": state}

    folders = [f"{FOLDER}/optimizer-{ep}-{n}" for n in range(2)]
    if RANK == 0:
        for folder in folders:
            os.makedirs(folder)
    torch.distributed.barrier()
    before = moments(*theirs)
    dist_checkpointing.save(state_of(*theirs), folders[0])
    for source, target in ((folders[0], ours), (folders[1], theirs)):
        loaded = dist_checkpointing.load(state_of(*target, loading=True), source)
        for part in getattr(target[1], "chained_optimizers", target[1:]):
            keep_step(part)
            for tensors in part.optimizer.state.values():
                tensors["exp_avg"].zero_()
                tensors["exp_avg_sq"].zero_()
        target[1].load_state_dict(loaded["optimizer"])
        after = moments(*target)
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert torch.equal(value, after[key]), key
        if target is ours:
            dist_checkpointing.save(state_of(*ours), folders[1])


def keep_step(optimizer):
    """torch's Adam stores a step count, which Megatron neither saves nor expects, as it uses Transformer
    Engine's."""
    original = optimizer._set_main_param_and_optimizer_states

    def set_states(p, tensors):
        step = optimizer._get_main_param_and_optimizer_states(p)["step"]
        original(p, {"step": step, **tensors})

    optimizer._set_main_param_and_optimizer_states = set_states


def moments(ddp, optimizer):
    """Adam's moments of every parameter, by expert; each rank has ranges of them."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    actual = {}
    for kind in ("exp_avg", "exp_avg_sq"):
        tensors = {}
        for name, p in ddp.module.named_parameters():
            whole = torch.zeros(p.numel())
            for part in parts:
                if p in part.model_param_gbuf_map:
                    place = part._get_model_param_range_map(p)["param"]
                    whole[place.start : place.end] = part._get_main_param_and_optimizer_states(p)[kind]
            experts = not getattr(p, "allreduce", True)
            group = (
                parallel_state.get_expert_data_parallel_group()
                if experts
                else parallel_state.get_data_parallel_group()
            )
            torch.distributed.all_reduce(whole, group=group)
            tensors[name] = whole.view(p.shape)
        actual |= {(kind, name): t for name, t in by_expert(tensors).items()}
    return actual


class OnTheCpu(torch.overrides.TorchFunctionMode):
    """Megatron's distributed optimizer creates tensors on CUDA and accepts no others."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        named = function is torch.Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if named else result


def joined(ranks, port):
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "gloo", rank=RANK, world_size=ranks, init_method=f"tcp://127.0.0.1:{port}"
    )


def main(ports):
    with OnTheCpu():
        joined(4, ports[0])
        split_experts()
        if RANK > 1:
            return
        joined(2, ports[1])
        for ep in (1, 2):
            losses(ep)
            in_bfloat16()
        dropped()
        for ep in (1, 2):
            parallel(ep)
            same_pieces()
        saved_and_loaded()
        for ep in (1, 2):
            parallel(ep)
            optimizers_saved(ep, *distributed_optimizer())


def start(folder, *ports):
    """Forks the ranks, each of which writes FOLDER/RANK.txt; exits with 0 if all of them succeeded."""
    global RANK, FOLDER
    FOLDER, ranks = folder, []
    for rank in range(4):
        ranks.append(os.fork())
        if not ranks[-1]:
            RANK = rank
            break
    else:
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        sys.exit(int(any(codes)))
    # not a pipe, which Megatron's child processes would keep open
    output = os.open(f"{folder}/{RANK}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    code = 1
    try:
        main(ports)
        print("right", flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    for child in multiprocessing.active_children():  # Megatron's processes that write checkpoints
        child.kill()
    os._exit(code)
