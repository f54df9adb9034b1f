"""Operators under dispatch modes in eager mode (selective checkpointing, counters of FLOPs), compiled code in
a process of its own, and torch.jit.trace."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fp8moe
import fp8moe.torch
from fp8moe import RouterConfig
from fp8moe.activation import Activation
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch.distributed.process_group import ProcessGroup
from fp8moe.adapters.torch.layer import FP8FlowMoE
from fp8moe.adapters.torch.library import OPERATORS
from fp8moe.adapters.torch.router import Router
from fp8moe.layer import moe
from fp8moe.ops.plan import static_bound

T, H, F, E, K = 40, 128, 100, 8, 2
RECIPES = ["bf16", "fp8_blockwise", "fp8_flow"]


def layer_of(recipe, **options):
    return FP8FlowMoE(H, 128 if recipe == "fp8_blockwise" else F, E, K, recipe=recipe, **options)


def rows(dtype=torch.float32):
    return torch.randn(T, H, dtype=dtype, requires_grad=True)


def gradients(y, *inputs):
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return [y, *torch.autograd.grad(y, inputs, dy)]


def assert_equal(actual, wanted):
    for a, b in zip(actual, wanted, strict=True):
        assert torch.equal(a, b)


class Seen(TorchDispatchMode):
    """Names of the library's operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fp8moe":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def selectively(function, policy):
    """The function under selective checkpointing, in which ``policy`` decides for all operators of this
    library."""

    def of_operator(_, op, *args, **kwargs):
        return policy if op.namespace == "fp8moe" else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, of_operator)
    return lambda *tensors: checkpoint(function, *tensors, use_reentrant=False, context_fn=contexts)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_compiled_as_the_first_thing_in_a_process():
    script = Path(__file__).with_name("compiled_first.py")
    seed = os.environ["FP8MOE_TEST_SEED"]
    done = subprocess.run([sys.executable, script, seed], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


# ---------------------------------------------------------------- selective checkpointing


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_selective_checkpointing_saves_is_not_computed_again(monkeypatch, recipe, recompute):
    layer, x, forwards = layer_of(recipe, recompute=recompute), rows(), []
    forward = moe.forward
    monkeypatch.setattr(
        moe, "forward", lambda *given, **options: (forwards.append(1), forward(*given, **options))[1]
    )
    inputs = x, *layer.parameters()
    y = layer(x)
    with fp8moe.trace() as traced:
        wanted = gradients(y, *inputs)
    for policy, again in ((CheckpointPolicy.MUST_SAVE, 0), (CheckpointPolicy.MUST_RECOMPUTE, 1)):
        y = selectively(layer, policy)(x)
        forwards.clear()
        with fp8moe.trace() as t:
            assert_equal(gradients(y, *inputs), wanted)
        assert len(forwards) == again
        assert (t.casts > traced.casts) == (again and recipe != "bf16")


def test_selective_checkpointing_of_operations():
    """Each operation is one operator, with the results that it has without a mode."""
    router, x, probs = Router(H, E, RouterConfig(K), expert_bias=True), rows(), torch.rand(T, K)
    ids = torch.randint(0, E, (T, K))
    w13, w2 = torch.randn(E, 2 * F, H, requires_grad=True), torch.randn(E, H, F, requires_grad=True)

    def step(x):
        _, of_router, aux_loss, *_ = router(x, num_sequences=2)
        plan = torch_ops.plan_topk(ids, E, align_size=128)
        moved = torch_ops.permute(x, plan, of_router)
        h = torch_ops.grouped_gemm(moved.data, w13, plan.expert_offsets)
        a = torch_ops.swiglu(h, moved.probs)
        y = torch_ops.unpermute(torch_ops.grouped_gemm(a, w2, plan.expert_offsets), plan)
        exact = torch_ops.plan_topk(ids, E, num_out_tokens="exact")  # has no operator, and works
        used = torch_ops.permute(x.detach(), exact).data.sum() * 0
        return y + fp8moe.torch.moe_experts(x, w13, w2, ids, probs) + aux_loss + used

    inputs = x, w13, w2, router.weight
    wanted = gradients(step(x), *inputs)
    with Seen() as forward:
        y = step(x)
    with Seen() as backward:
        assert_equal(gradients(y, *inputs), wanted)
    once = ["experts", "plan_topk", "quantize_weights", "route", "swiglu", "unpermute"]
    assert {name: forward.names.count(name) for name in once} == dict.fromkeys(once, 1) | {
        "quantize_weights": 2
    }
    assert sorted({"experts_gradients", "route_backward", "grouped_gemm_wgrad"} - {*backward.names}) == []
    y = selectively(step, CheckpointPolicy.MUST_SAVE)(x)
    with fp8moe.trace() as t:
        assert_equal(gradients(y, *inputs), wanted)
    assert t.casts == 1  # of dy by the experts


def test_modes_change_neither_statistics_nor_main_grads_nor_halves():
    x, dy = rows(torch.bfloat16), torch.randn(T, H).bfloat16()
    results = []
    for mode in (None, Seen()):
        torch.manual_seed(0)
        layer = layer_of("fp8_flow")
        layer.collect_stats = True
        with mode or torch.enable_grad():
            with torch.no_grad():
                layer(x)
            inference = layer.stats()
            y = layer(x)
            # as zero-bubble schedules do: the second half uses what the first has computed
            halves = [
                *torch.autograd.grad(y, x, dy, retain_graph=True),
                *torch.autograd.grad(y, (layer.w13, layer.w2), dy),
            ]
            layer.w13.main_grad, layer.w2.main_grad = torch.ones_like(layer.w13), torch.ones_like(layer.w2)
            for _ in range(2):
                layer(x).backward(dy)
        assert layer.w13.grad is None
        assert layer.w13.grad_added_to_main_grad
        stats = [s.saturated for s in (layer.stats().x, layer.stats().dy, inference.a)]
        stats += [inference.rows_per_expert, layer.stats().dy.amax]
        results.append([y, *halves, layer.w13.main_grad, layer.w2.main_grad, *stats])
    assert_equal(*results)
    assert {*mode.names} == {"quantize_weights", "route", "route_backward", "experts", "experts_gradients"}


def test_formats_of_quantised_weights():
    """Operators get codes as plain bytes: e5m2 must not be read as e4m3."""
    x, ids, probs = rows(), torch.randint(0, E, (T, K)), torch.rand(T, K)
    w13, w2 = _weights(128)
    codes = torch_ops.quantize_weights(w13, fmt="e5m2"), torch_ops.quantize_weights(w2)

    def step(x):
        return fp8moe.torch.moe_experts(x, *codes, ids, probs)

    wanted = gradients(step(x), x)
    with Seen() as seen:
        assert_equal(gradients(step(x), x), wanted)
    assert seen.names == ["experts", "experts_gradients"]
    torch.compiler.reset()
    assert_equal(gradients(torch.compile(step, backend="eager", fullgraph=True)(x), x), wanted)


# ---------------------------------------------------------------- expert parallelism


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_a_saved_exchange_are_not_sent_again(group, monkeypatch, recipe, chunks):
    comm, x = ProcessGroup(overlap_chunks=chunks), rows()
    w13, w2 = torch.randn(E, 2 * F, H, requires_grad=True), torch.randn(E, H, F, requires_grad=True)
    ids, probs, sent = torch.randint(0, E, (T, K)), torch.rand(T, K), []
    exchange = comm.exchange
    monkeypatch.setattr(comm, "exchange", lambda *given: (sent.append(1), exchange(*given))[1])
    options = {"recipe": recipe, "comm": comm, "backend": None}

    def step(x):
        return fp8moe.torch.moe_experts(x, w13, w2, ids, probs, **options)

    wanted = gradients(step(x), x, w13, w2)
    at_most = len(sent)
    sent.clear()
    assert_equal(gradients(selectively(step, CheckpointPolicy.MUST_SAVE)(x), x, w13, w2), wanted)
    assert len(sent) == at_most
    with FlopCounterMode(display=False) as counter:
        gradients(step(x), x, w13, w2)
    if recipe == "fp8_flow":
        assert counter.get_total_flops() == 3 * 2 * T * K * 3 * F * H


def test_a_saved_description_is_data(group):
    """A saved tensor may come from a file: what is in it is never executed."""
    comm, x = ProcessGroup(), rows()
    w13, w2 = torch.randn(E, 2 * H, H), torch.randn(E, H, H)
    ids, probs = torch.randint(0, E, (T, K)), torch.rand(T, K)
    names, arguments = [], {}

    class Kept(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.namespace == "fp8moe":
                names.append(func._opname)
                arguments[func._opname] = args, out
            return out

    with Kept():
        fp8moe.torch.moe_experts(x, w13, w2, ids, probs, comm=comm)
    _, (_, description, *saved) = arguments["experts_over_ranks"]
    described = json.loads(description.numpy().tobytes())
    assert [*described] == ["Saved"]
    operator = OPERATORS["experts_over_ranks_backward"]
    flat, _ = arguments["experts_over_ranks"]
    _, ids, probs, *_, weights, handle, targets, options = OPERATORS["experts_over_ranks"].unflatten(flat)
    backward_weights = [*weights[2:4], *weights[6:]]
    rest = saved, backward_weights, ids, probs, handle, targets, options
    dx = operator(torch.ones(T, H, dtype=torch.bfloat16), description, *rest)[0]
    assert dx.shape == (T, H)
    for content in (b"cos\nsystem\n(S'exit 1'\ntR.", json.dumps({"system": ["exit 1"]}).encode()):
        forged = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        with pytest.raises(ValueError):
            operator(torch.ones(T, H, dtype=torch.bfloat16), forged, *rest)


# ---------------------------------------------------------------- FLOPs


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_flops_of_a_layer(recipe, recompute, gated):
    """Of the rows routed and the layer's own sizes, without padding; only what is computed."""
    activation = Activation() if gated else Activation("relu2")
    layer = layer_of(recipe, recompute=recompute, activation=activation)
    x, first = rows(torch.bfloat16), 2 * T * K * H * (2 if gated else 1) * layer.ffn
    second, router = 2 * T * K * layer.ffn * H, 2 * T * E * H
    again, outputs, dy = first if recompute else 0, [], torch.randn(T, H).bfloat16()
    assert flops(lambda: layer(x.detach())) == first + second + router
    assert flops(lambda: outputs.append(layer(x))) == first + second + router
    (y,) = outputs
    whole = 2 * (first + second + router) + again
    assert flops(lambda: y.backward(dy, retain_graph=True)) == whole
    halves = [
        flops(lambda: torch.autograd.grad(y, x, dy, retain_graph=True)),
        flops(lambda: torch.autograd.grad(y, [layer.w13, layer.w2], dy)),
    ]
    assert halves == [first + second + router + again, first + second]
    frozen = layer_of(recipe, recompute=recompute, activation=activation).requires_grad_(False)
    y = frozen(x)
    assert flops(lambda: y.sum().backward()) == first + second + router + again


def test_flops_of_torchs_grouped_product():
    """Rows are padded to multiples of 16 for it; the device alone knows how many are."""
    layer = FP8FlowMoE(H, F - 4, E, K, recipe="bf16")
    x, bound = rows(), static_bound(T * K, E, 16)
    assert flops(lambda: layer(x).sum().backward()) == 3 * (2 * bound * 3 * (F - 4) * H + 2 * T * E * H)


def test_flops_of_operations():
    x, w, a = torch.randn(T, H), torch.randn(E, F, H), torch.randn(T, F)
    ids = torch.randint(0, E, (T, K))
    plan = torch_ops.plan_topk(ids, E, align_size=128)
    offsets = torch.linspace(0, T, E + 1).int()
    codes, padded = torch_ops.quantize_weights(w).rowwise, torch.randn(plan.num_out_tokens, H)
    q, wide = torch_ops.quantize(x), torch_ops.quantize(padded)
    assert flops(lambda: torch_ops.grouped_gemm(x, w, offsets)) == 2 * T * F * H
    assert flops(lambda: torch_ops.grouped_gemm(a, w, offsets, transpose_w=True)) == 2 * T * F * H
    p = plan.num_out_tokens
    assert flops(lambda: torch_ops.grouped_gemm(wide, codes, plan.expert_offsets)) == 2 * p * F * H
    assert flops(lambda: torch_ops.permute_gemm(q, codes, plan)) == 2 * T * K * F * H
    rows, weights = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = torch_ops.grouped_gemm(rows, weights, offsets)
    assert flops(lambda: y.sum().backward()) == 2 * 2 * T * F * H
    b = torch.randn(H, F)
    assert flops(lambda: OPERATORS["add_product"].run(a, x, b)) == 2 * T * H * F
    assert flops(lambda: fp8moe.torch.moe_experts_permuted(x, *_weights(), _counts(), torch.rand(T))) == (
        2 * T * 3 * F * H
    )


def _weights(ffn=F):
    return torch.randn(E, 2 * ffn, H), torch.randn(E, H, ffn)


def _counts():
    return torch.full((E,), T // E)


def test_every_operator_that_multiplies_has_a_formula():
    others = "add_biases add_biases_backward dequantize index_map pad permute permute_backward"
    others += " permute_transpose plan_index_map plan_row_map plan_routing_map plan_topk quantize"
    others += " quantize_weights route route_backward unpad unpermute scaling_aware_transpose sort_chunks"
    others += " sort_chunks_backward swiglu swiglu_backward transpose_codes"
    others = {*others.split(), "swiglu_quantize", "swiglu_quantize_backward", "unpermute_backward"}
    import fp8moe.adapters.transformer_engine.pytorch  # noqa: F401  declares others

    with_formula = {name for name, o in OPERATORS.items() if o.op.overloadpacket in flop_registry}
    assert {*OPERATORS} - with_formula - others == set()
    assert with_formula & others == set()


# ---------------------------------------------------------------- torch.jit.trace


def test_torchscript_traces_raise():
    x, ids, probs = torch.randn(T, H), torch.randint(0, E, (T, K)), torch.rand(T, K)
    w13, w2 = _weights()
    plan = torch_ops.plan_topk(ids, E)
    doors = {
        "FP8FlowMoE": layer_of("fp8_flow"),
        "Router": Router(H, E, RouterConfig(K)),
        "route": lambda x: fp8moe.torch.route(x[:, :E], RouterConfig(K)).topk_probs,
        "moe_experts": lambda x: fp8moe.torch.moe_experts(x, w13, w2, ids, probs),
        "moe_experts_permuted": lambda x: fp8moe.torch.moe_experts_permuted(
            x, w13, w2, _counts(), probs[:, 0]
        ),
        "x": lambda x: torch_ops.permute(x, plan).data,
        "h": torch_ops.swiglu,
    }
    for name, door in doors.items():
        with pytest.raises(NotImplementedError, match=f"^{name}: got a call inside torch.jit.trace.*wanted"):
            torch.jit.trace(door, x)
    assert np.isfinite(doors["moe_experts"](x).sum().item())  # works afterwards
