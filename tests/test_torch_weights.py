"""Weights that change: after every kind of write the layer is bitwise equal to a new layer with the same
weights; within `weights_unchanged` one set of FP8 copies serves all forwards."""

import contextlib
import copy
import gc
import os
import re
import sys
import threading

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.utils.parametrize
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import set_model_state_dict

import fp8moe
import fp8moe.torch
from fp8moe import RouterConfig
from fp8moe.adapters.torch import weights as torch_weights
from fp8moe.adapters.torch.layer import FP8FlowMoE
from fp8moe.adapters.torch.operands import quantize_fp8_weights
from fp8moe.adapters.torch.router import Router
from fp8moe.adapters.torch.sharding import LoadPlanner
from fp8moe.adapters.torch.weights import FP8Weights, weights_unchanged
from fp8moe.runtime.record_trees import arrays_in

TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 70, 256, 128, 4, 2
WEIGHTS = ("w13", "w2")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def module(device="cpu", experts=EXPERTS, **options):
    torch.manual_seed(0)
    return FP8FlowMoE(HIDDEN, FFN, experts, TOPK, device=device, **options)


def tokens(device="cpu", seed=None):
    g = torch.Generator()
    g.seed() if seed is None else g.manual_seed(seed)
    return torch.randn(TOKENS, HIDDEN, generator=g).bfloat16().to(device)


def step(forward, layer, x, seed=2):
    """[y, dx, gradients of the parameters] of one forward and backward."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = forward(x)
    g = torch.Generator().manual_seed(seed)
    y.backward(torch.randn(y.shape, generator=g).to(y))
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def fresh(layer):
    """A new layer with the current values of the weights."""
    new = module(next(layer.parameters()).device, experts=layer.w13.shape[0], recipe=layer.recipe)
    for p, q in zip(new.parameters(), layer.parameters(), strict=True):
        p.data = q.detach().clone()
    return new


def assert_fresh(layer, forward=None):
    """Compares with a new layer: without gradients, with them, and without again."""
    forward = layer if forward is None else forward
    x, new = tokens(layer.w13.device), fresh(layer)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(forward(x), new(x))
        for a, b in zip(step(forward, layer, x), step(new, new, x), strict=True):
            assert torch.equal(a, b)


def evaluate(layer, forward=None):
    with torch.no_grad():
        (layer if forward is None else forward)(tokens(layer.w13.device))


# events before the weights are written, which leave different FP8 copies behind
BEFORE = {
    "training": lambda layer: step(layer, layer, tokens(layer.w13.device)),
    "evaluation": evaluate,
    "training, evaluation": lambda layer: (step(layer, layer, tokens(layer.w13.device)), evaluate(layer)),
    "a scope": lambda layer: in_a_scope(layer),
    "a first micro-batch without gradients": lambda layer: first_micro_batch(layer),
    "quantize_weights, training": lambda layer: (
        layer.quantize_weights(),
        step(layer, layer, tokens(layer.w13.device)),
    ),
}


def in_a_scope(layer):
    with weights_unchanged(layer):
        step(layer, layer, tokens(layer.w13.device))


def first_micro_batch(layer):
    with torch.no_grad():
        layer(tokens(layer.w13.device), is_first_microbatch=True)


OPTIMIZERS = {
    "SGD": {"lr": 0.5, "momentum": 0.9},
    "Adam": {"lr": 0.05},
    "AdamW": {"lr": 0.05},
    "Adagrad": {"lr": 0.5},
}


@pytest.mark.parametrize("form", ["plain", "foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(device, name, form):
    layer = module(device)
    implementation = {"fused": True} if form == "fused" else {"foreach": form == "foreach"}
    optimizer = getattr(torch.optim, name)(layer.parameters(), **OPTIMIZERS[name], **implementation)
    if (name, form, device) == ("Adagrad", "fused", "cuda"):
        pytest.skip("torch has none")
    before = layer(tokens(device, 0)).detach()
    for _ in range(2):
        step(layer, layer, tokens(device))
        optimizer.step()
        assert_fresh(layer)
    assert not torch.equal(layer(tokens(device, 0)), before)


def multiply_data(layer):
    for name in WEIGHTS:
        getattr(layer, name).data.mul_(1.5)


def multiply_in_no_grad(layer):
    with torch.no_grad():
        torch._foreach_mul_([layer.w13, layer.w2], 1.5)


def other_data(layer):
    """Freed memory may be reused at the same address."""
    for name in WEIGHTS:
        w = getattr(layer, name)
        new = w.detach() * 1.5
        w.data = torch.empty(0, device=w.device)
        w.data = new


def other_parameters(layer):
    for name in WEIGHTS:
        setattr(layer, name, torch.nn.Parameter(getattr(layer, name).detach() * 1.5))


def by_another_library(layer):
    """NumPy or CuPy writes to the same memory, without incrementing version counters."""
    for name in WEIGHTS:
        w = getattr(layer, name).detach()
        array = w.numpy() if w.device.type == "cpu" else pytest.importorskip("cupy").from_dlpack(w)
        array *= np.float32(1.5)


def load_into(layer):
    layer.load_state_dict({k: v * 1.5 for k, v in layer.state_dict().items()})


def load_by_assignment(layer):
    layer.load_state_dict({k: v * 1.5 for k, v in layer.state_dict().items()}, assign=True)


def swap_an_average_in_and_out(layer):
    kept = {name: getattr(layer, name).data for name in WEIGHTS}
    for name in WEIGHTS:
        getattr(layer, name).data = kept[name] * 1.5
    assert_fresh(layer)
    for name in WEIGHTS:
        getattr(layer, name).data = kept[name]


def copy_an_average_in_and_out(layer):
    kept = {name: getattr(layer, name).detach().clone() for name in WEIGHTS}
    for name in WEIGHTS:
        getattr(layer, name).data.mul_(1.5)
    evaluate(layer)
    assert_fresh(layer)
    for name in WEIGHTS:
        getattr(layer, name).data.copy_(kept[name])


WRITERS = [
    multiply_data,
    multiply_in_no_grad,
    other_data,
    other_parameters,
    by_another_library,
    load_into,
    load_by_assignment,
    swap_an_average_in_and_out,
    copy_an_average_in_and_out,
]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("before", BEFORE)
def test_weights_written_by_any_means_are_quantised_again(device, before, write):
    layer = module(device)
    assert_fresh(layer)
    BEFORE[before](layer)
    write(layer)
    assert_fresh(layer)


@pytest.mark.parametrize("before", BEFORE)
def test_a_flat_buffer_that_parameters_view(device, before):
    """As in Megatron's distributed optimizer and in DeepSpeed."""
    layer = module(device)
    flat = torch.cat([getattr(layer, name).detach().reshape(-1) for name in WEIGHTS])
    start = 0
    for name in WEIGHTS:
        w = getattr(layer, name)
        w.data = flat[start : start + w.numel()].view(w.shape)
        start += w.numel()
    BEFORE[before](layer)
    flat.mul_(1.5)
    assert_fresh(layer)


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise"])
def test_evaluation_between_training_steps(device, recipe):
    layer = module(device, recipe=recipe)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05, fused=True)
    for _ in range(3):
        evaluate(layer)
        step(layer, layer, tokens(device))
        optimizer.step()
        with torch.no_grad():
            assert torch.equal(layer(tokens(device, 1)), fresh(layer)(tokens(device, 1)))
    assert_fresh(layer)


def accumulate(layer, optimizer, micro_batches, convention):
    """One optimizer step over several micro-batches; returns (sum of losses, casts of weights)."""
    total = 0.0
    with fp8moe.trace() as traced:
        if convention == "scope":
            with weights_unchanged(torch.nn.Sequential(torch.nn.Identity(), layer)):
                for x in micro_batches:
                    loss = layer(x).float().square().mean()
                    loss.backward()
                    total += loss.item()
        else:
            for i, x in enumerate(micro_batches):
                first = i == 0 if convention == "argument" else None
                loss = layer(x, is_first_microbatch=first).float().square().mean()
                loss.backward()
                total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total, traced.weight_casts


@pytest.mark.parametrize("convention", ["scope", "argument"])
@pytest.mark.parametrize("fused", [False, True])
def test_gradient_accumulation(device, convention, fused):
    """Four micro-batches share one set of copies, with the same results as four sets."""
    layers = [module(device), module(device)]
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.05, fused=fused) for layer in layers]
    for turn in range(3):
        batch = [tokens(device, 10 * turn + i) for i in range(4)]
        with_one = accumulate(layers[0], optimizers[0], batch, convention)
        with_four = accumulate(layers[1], optimizers[1], batch, "outside")
        assert with_one[0] == with_four[0]
        assert (with_one[1], with_four[1]) == (2, 8)
    for p, q in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(p, q)
    if convention == "scope":
        assert layers[0].fp8_weight_nbytes == 0
    assert_fresh(layers[0])


class Scaled(torch.nn.Module):
    """A parametrization: a weight that is computed anew on each access."""

    def forward(self, w):
        return w * 2


def test_parametrized_weights_are_kept_only_if_cached():
    layer, x = module(), tokens()
    torch.nn.utils.parametrize.register_parametrization(layer, "w13", Scaled())
    wanted = layer(x)
    message = r"w13: got a weight that is computed anew.*torch\.nn\.utils\.parametrize\.cached"
    with pytest.raises(RuntimeError, match=message), weights_unchanged(layer):
        pass
    with pytest.raises(RuntimeError, match=message):
        layer(x, is_first_microbatch=True)
    with torch.nn.utils.parametrize.cached(), weights_unchanged(layer):
        assert torch.equal(layer(x), wanted)
    assert torch.equal(layer(x), wanted)


class Masked(torch.nn.Module):
    """A parametrization with another random mask at each access."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def forward(self, w):
        self.masks.append(torch.randint(0, 2, w.shape).to(w))
        return w * self.masks[-1]


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_forward_and_gradient_use_one_evaluation_of_a_parametrized_weight(recipe, compiled):
    layer, plain, x = module(recipe=recipe), module(recipe=recipe), tokens()
    masks = {}
    for name in WEIGHTS:
        torch.nn.utils.parametrize.register_parametrization(layer, name, Masked())
        masks[name] = layer.parametrizations[name][0].masks
        masks[name].clear()
    if compiled:
        layer.compile(backend="aot_eager", fullgraph=True)
    y = layer(x)
    y.sum().backward()
    for name in WEIGHTS:
        original = layer.parametrizations[name].original
        if compiled:  # the masks of the trace are not tensors
            assert 0.4 < (original.grad == 0).float().mean() < 0.7
        else:
            (mask,) = masks[name]
            assert not original.grad[mask == 0].any()
            getattr(plain, name).data = original.detach() * mask
    if not compiled:
        assert torch.equal(plain(x), y)


def test_weights_unchanged_for_evaluation(device):
    layer = module(device)
    wanted = [fresh(layer)(tokens(device, seed)).detach() for seed in range(3)]
    with weights_unchanged(layer), layer.weights_unchanged(), fp8moe.trace() as traced:
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                for seed in range(3):
                    assert torch.equal(layer(tokens(device, seed)), wanted[seed])
        step(layer, layer, tokens(device))
    assert traced.weight_casts == 0  # made on entry
    assert layer.fp8_weight_nbytes == 0


def test_copies_made_in_inference_mode_can_be_trained_with(device):
    layer = module(device)
    with torch.inference_mode():
        layer(tokens(device), is_first_microbatch=True)
    x = tokens(device).requires_grad_()
    layer(x, is_first_microbatch=False).sum().backward()
    assert x.grad.abs().sum() > 0


def test_changed_weights_in_a_scope_raise(device):
    x = tokens(device)
    for fused in (False, True):
        layer = module(device)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05, fused=fused)
        with weights_unchanged(layer):
            step(layer, layer, x)
            optimizer.step()
            for guard in (torch.enable_grad, torch.no_grad):
                with (
                    guard(),
                    pytest.raises(
                        RuntimeError, match="w13: got changed weights although they were declared unchanged"
                    ),
                ):
                    layer(x)
        assert_fresh(layer)
    for write in (multiply_in_no_grad, other_data, other_parameters, load_by_assignment):
        layer = module(device)
        with weights_unchanged(layer):
            write(layer)
            with pytest.raises(
                RuntimeError, match="w13: got changed weights although they were declared unchanged"
            ):
                layer(x)
            layer.quantize_weights()  # declares that the weights have changed
            with torch.no_grad():
                assert torch.equal(layer(x), fresh(layer)(x))
        assert_fresh(layer)
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, device=device))], fused=True)
    other.param_groups[0]["params"][0].grad = torch.ones(3, device=device)
    with weights_unchanged(layer):
        other.step()
        layer(x)


def test_frozen_weights_of_an_optimizer_are_unchanged(device):
    """Optimizers are often given all parameters of a model; they skip those without a gradient."""
    layer, x = module(device), tokens(device)
    for name in WEIGHTS:
        getattr(layer, name).requires_grad_(False)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05, fused=True)
    with weights_unchanged(layer):
        for _ in range(2):
            layer(x).sum().backward()
            optimizer.step()
    layer.w2.requires_grad_(True)
    with weights_unchanged(layer):
        layer(x).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="w13: got changed weights"):
            layer(x)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, TypeError, "is_first_microbatch: got int; wanted True or False"),
        (np.False_, RuntimeError, "is_first_microbatch: got False, and there are no FP8 copies"),
    ],
)
def test_other_kinds_of_false(value, error, message):
    with pytest.raises(error, match=message):
        module()(tokens(), is_first_microbatch=value)


def test_a_list_of_layers_is_refused():
    with (
        pytest.raises(TypeError, match="model: got list; wanted a Module"),
        weights_unchanged([module()]),
    ):
        pass


def test_is_first_microbatch_false_without_copies_raises(device):
    layer, x = module(device), tokens(device)
    with pytest.raises(RuntimeError, match="is_first_microbatch: got False, and there are no FP8 copies"):
        layer(x, is_first_microbatch=False)
    layer(x, is_first_microbatch=True)
    with torch.no_grad():
        layer(x)  # an evaluation quantises for itself, and does not release the copies
    layer(x, is_first_microbatch=False)
    with torch.no_grad():
        layer.w2.mul_(2.0)
    with pytest.raises(RuntimeError, match="w2: got changed weights"):
        layer(x, is_first_microbatch=False)
    layer(x)  # without the context's copies, which are released
    with pytest.raises(RuntimeError, match="there are no FP8 copies"):
        layer(x, is_first_microbatch=False)


def test_copies_for_forwards_without_gradients(device):
    """Kept on request until a forward with gradients runs or a change is detected."""
    layer, x = module(device), tokens(device)
    layer.quantize_weights()
    with torch.no_grad(), fp8moe.trace() as traced:
        layer(x), layer(x)
        assert traced.weight_casts == 0
        layer.w13.mul_(2.0)
        assert torch.equal(layer(x), fresh(layer)(x))
        assert traced.weight_casts == 2 + 2
    layer.quantize_weights()
    step(layer, layer, x)
    assert layer.fp8_weight_nbytes == 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_after_quantize_weights(device, fused):
    """A backward, copies, then a step: a fused step does not increment version counters."""
    layer = module(device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=fused)
    layer(tokens(device)).sum().backward()
    layer.quantize_weights()
    optimizer.step()
    assert_fresh(layer)


def test_step_after_is_first_microbatch_raises(device):
    layer = module(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    layer(tokens(device), is_first_microbatch=True).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="w13: got changed weights"):
        layer(tokens(device), is_first_microbatch=False)


class FlatEngine:
    """Steps as DeepSpeed's ZeRO-1 and ZeRO-2, its BF16_Optimizer, and Megatron-LM's distributed optimizer:
    weights are parts of a flat buffer, the optimizer steps a float32 copy of it, which is no parameter."""

    mark = "_hp_mapping"

    def __init__(self, layer):
        self.parameters = list(layer.parameters())
        self.flat = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        parts = self.flat.split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            p.data = part.view(p.shape)
            setattr(p, self.mark, None)  # what it is on ranks that step other weights
        self.master = self.flat.clone().float().requires_grad_()
        self.optimizer = torch.optim.AdamW([self.master], lr=0.1)

    def step(self):
        self.master.grad = torch.cat([p.grad.reshape(-1).float() for p in self.parameters])
        for p in self.parameters:
            p.grad = None
        self.optimizer.step()
        self.flat.data.copy_(self.master.data)


class MasterEngine:
    """Steps as DeepSpeed's FP16_UnfusedOptimizer, Megatron-LM's Float16OptimizerWithFloat16Params and Apex:
    one float32 copy of each weight."""

    def __init__(self, layer):
        self.parameters = list(layer.parameters())
        self.masters = [p.detach().clone().float().requires_grad_() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.1)

    def step(self):
        for master, p in zip(self.masters, self.parameters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        self.optimizer.step()
        for master, p in zip(self.masters, self.parameters, strict=True):
            p.data.copy_(master.data)


class PartitioningEngine:
    """Partitions and steps as DeepSpeed's ZeRO-3 on one rank of several: between forwards a weight's data is
    an empty tensor, and in every forward and backward new memory; ``ds_tensor`` keeps the values."""

    def __init__(self, layer):
        self.layer = layer
        for number, p in enumerate(layer.parameters()):
            p.ds_id, p.ds_shape, p.ds_status = number, p.shape, "AVAILABLE"
            p.ds_tensor = p.detach().reshape(-1).clone()
            p.register_post_accumulate_grad_hook(self._reduce)
        self.masters = [p.ds_tensor.clone().float().requires_grad_() for p in layer.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.1)
        layer.register_forward_pre_hook(lambda *_: self.gather())
        layer.register_forward_hook(self._after_forward)
        self.partition()

    def gather(self):
        for p in self.layer.parameters():
            p.data, p.ds_status = p.ds_tensor.clone().view(p.ds_shape), "AVAILABLE"

    def partition(self):
        for p in self.layer.parameters():
            p.data, p.ds_status = torch.empty(0, dtype=p.dtype, device=p.device), "NOT_AVAILABLE"

    def _after_forward(self, layer, inputs, y):
        self.partition()
        if y.requires_grad:
            y.register_hook(lambda _: self.gather())

    def _reduce(self, p):
        master = self.masters[p.ds_id]
        master.grad = p.grad.reshape(-1).float() + (0 if master.grad is None else master.grad)
        p.grad = None

    def step(self):
        self.partition()
        self.optimizer.step()
        for master, p in zip(self.masters, self.layer.parameters(), strict=True):
            p.ds_tensor.data.copy_(master.data)
            master.grad = None


ENGINES = FlatEngine, MasterEngine, PartitioningEngine


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_of_an_engine(device, engine):
    """An engine steps tensors of its own, and writes the weights from them: after that the copies are not
    used."""
    layer, x = module(device), tokens(device)
    stepping = engine(layer)
    message = "w13: got changed weights .*" + ("an engine such as " * (engine is MasterEngine)) + "DeepSpeed"

    def micro_batches():
        return [step_of(layer, x, first=first) for first in (True, False)]

    for _ in range(2):  # correct use
        first, second = micro_batches()
        assert torch.equal(first, second)
        with torch.no_grad():
            assert torch.equal(layer(x), first)
        stepping.step()
        with pytest.raises(RuntimeError, match=message):
            layer(x, is_first_microbatch=False)
        with torch.no_grad():
            assert not torch.equal(layer(x), first)
    for _ in range(2):
        with weights_unchanged(torch.nn.Sequential(layer)), fp8moe.trace() as traced:
            first, second = step_of(layer, x), step_of(layer, x)
            assert torch.equal(first, second)
            assert traced.weight_casts == (2 if engine is PartitioningEngine else 0)  # once: here, on entry
            stepping.step()
            with pytest.raises(RuntimeError, match=message):
                layer(x)
        with torch.no_grad():
            assert not torch.equal(layer(x), first)


def step_of(layer, x, first=None):
    y = layer(x, is_first_microbatch=first)
    y.float().square().mean().backward()
    return y.detach()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_of_an_engine_after_quantize_weights(device, engine):
    layer, x = module(device), tokens(device)
    stepping = engine(layer)
    before = step_of(layer, x)
    if engine is PartitioningEngine:
        stepping.gather()  # deepspeed.zero.GatheredParameters
    layer.quantize_weights()
    if engine is PartitioningEngine:
        stepping.partition()
    with torch.no_grad(), fp8moe.trace() as traced:
        assert torch.equal(layer(x), before)
        assert traced.weight_casts == 0
        stepping.step()
        after = layer(x)
        assert traced.weight_casts == 2
    assert not torch.equal(after, before)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_of_an_engine_of_another_model(device, frozen):
    """It outdates the copies of weights that it may have written, not those of frozen ones."""
    teacher, student = module(device).requires_grad_(not frozen), module(device)
    stepping, x = FlatEngine(student), tokens(device)
    with weights_unchanged(teacher):
        y = teacher(x)
        step_of(student, x)
        stepping.step()
        if frozen:
            assert torch.equal(teacher(x), y)
        else:
            with pytest.raises(RuntimeError, match=r"w13: got changed .* requires_grad_\(False\)"):
                teacher(x)


def test_weights_that_deepspeed_has_partitioned():
    layer = module()
    wanted, stepping, x, probs = repr(layer), PartitioningEngine(layer), tokens(), torch.ones(TOKENS, TOPK)
    assert repr(layer) == wanted
    ids = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    message = r"w13: got a weight that DeepSpeed's ZeRO-3 .* \[4, 256, 256\]; call the engine"
    for call in (
        layer.quantize_weights,
        lambda: layer.forward(x),  # not by the engine, whose hooks gather
        lambda: fp8moe.torch.moe_experts(x, layer.w13, layer.w2, ids, probs),
        lambda: quantize_fp8_weights(layer.w13, layer.w2),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    w13 = layer.w13.ds_tensor.view(layer.w13.ds_shape)
    layer.w13.data = w13
    layer.w2.data = layer.w2.ds_tensor.view(layer.w2.ds_shape)
    with pytest.raises(TypeError, match=r"router.weight: got a weight that DeepSpeed's ZeRO-3"):
        layer.forward(x)
    stepping.gather()
    assert torch.equal(layer.forward(x), fresh(layer)(x))


def test_a_step_while_another_thread_makes_copies(monkeypatch):
    """A layer is added to the set of layers with copies while the step iterates over it."""
    layers = [module() for _ in range(3)]
    for layer in layers[:2]:
        layer.quantize_weights()
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    read = FP8Weights.__getattribute__
    threads = []

    def interrupted(weights, name):
        if name == "copies" and not threads and threading.current_thread() is threading.main_thread():
            threads.append(threading.Thread(target=layers[2].quantize_weights))
            threads[0].start()
            threads[0].join()
        return read(weights, name)

    monkeypatch.setattr(FP8Weights, "__getattribute__", interrupted)
    optimizer.step()
    assert threads


def test_two_sets_of_weights_in_one_buffer(device):
    layer = module(device)
    sets = torch.stack((layer.w13.detach(), torch.randn_like(layer.w13)))
    layer.w13.data = sets[0]
    layer.quantize_weights()
    layer.w13.data = sets[1]
    assert_fresh(layer)
    with layer.weights_unchanged():
        layer.w13.data = sets[0]
        with pytest.raises(RuntimeError, match="w13: got changed weights"):
            layer(tokens(device))


def test_backward_uses_the_codes_of_its_forward(device):
    """If weights change between forward and backward, gradients are those for the forward's weights."""
    x = tokens(device)
    wanted = step(*[module(device)] * 2, x)
    for forward in ("eager", "compiled"):
        layer = module(device)
        inputs = x.clone().requires_grad_()
        torch.compiler.reset()
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if forward == "compiled" else layer
        y = run(inputs)
        layer.w13.data.mul_(2.0)
        layer.w2.data.zero_()
        g = torch.Generator().manual_seed(2)
        y.backward(torch.randn(y.shape, generator=g).to(y))
        actual = [y.detach(), inputs.grad, *(p.grad for p in layer.parameters())]
        for a, b in zip(actual, wanted, strict=True):
            assert torch.equal(a, b)


def test_overwritten_codes_raise(device, monkeypatch):
    """Only copies that a CUDA graph reads are overwritten, and they keep their addresses, because a graph may
    be replayed at any time."""
    places, quantize = [], torch_weights.quantize_fp8_weights

    def recorded(*weights, **options):
        copies = quantize(*weights, **options)
        places.append([a.data_ptr() for a in arrays_in(copies)])
        return copies

    monkeypatch.setattr(torch_weights, "quantize_fp8_weights", recorded)
    layer, x = module(device), tokens(device).requires_grad_()
    with weights_unchanged(layer):
        with monkeypatch.context() as capture:
            capture.setattr(torch_weights, "is_capturing", lambda w: True)
            y = layer(x)
        layer.quantize_weights()
        with pytest.raises(RuntimeError, match="w13, w2: got FP8 copies that quantize_weights"):
            y.sum().backward()
        layer(x).sum().backward()
    with weights_unchanged(layer):
        layer(x)
    assert len(places) == 3
    assert places[0] == places[1] == places[2]
    assert_fresh(layer)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scope", [False, True])
def test_activation_checkpointing(device, scope, reentrant):
    """Copies are recomputed with the other tensors, unless a context keeps them."""
    from torch.utils.checkpoint import checkpoint

    layer, x = module(device), tokens(device, 3)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05, fused=True)
    for _ in range(2):
        wanted = step(*[fresh(layer)] * 2, x)
        with fp8moe.trace() as traced:
            run = lambda x: checkpoint(layer, x, use_reentrant=reentrant)  # noqa: E731
            if scope:
                with weights_unchanged(layer):
                    actual = step(run, layer, x)
            else:
                actual = step(run, layer, x)
        if device == "cpu":  # trace() does not record autograd's own threads
            assert traced.weight_casts == (2 if scope else 4)
        for a, b in zip(actual, wanted, strict=True):
            assert torch.equal(a, b)
        optimizer.step()


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise"])
def test_compiled(device, recipe):
    torch.compiler.reset()
    layer = module(device, recipe=recipe)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05, fused=True)
    for _ in range(2):
        step(compiled, layer, tokens(device))
        optimizer.step()
        assert_fresh(layer, compiled)
        evaluate(layer, compiled)
        by_another_library(layer)
        assert_fresh(layer, compiled)
        with weights_unchanged(layer), fp8moe.trace() as traced:
            assert_fresh_in_scope(layer, compiled)
        assert traced.weight_casts == 0
    layer.quantize_weights()
    assert layer.fp8_weight_nbytes
    with torch.no_grad():
        compiled(tokens(device))
    assert layer.fp8_weight_nbytes == 0
    with weights_unchanged(layer):
        optimizer.step()
        with pytest.raises(Exception, match="got changed weights although they were declared unchanged"):
            compiled(tokens(device))
    for first in (True, False):
        with pytest.raises(Exception, match=f"is_first_microbatch: got {first} in compiled code"):
            compiled(tokens(device), is_first_microbatch=first)


def test_a_scope_inside_of_compiled_code(monkeypatch):
    """The scope breaks the graph; nothing is left over whose destructor raises."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    torch.compiler.reset()
    layer, x = module(), tokens()

    @torch.compile(backend="eager")
    def forward(x):
        with weights_unchanged(layer):
            return layer(x)

    with torch.no_grad():
        assert torch.equal(forward(x), layer(x))
    assert layer.fp8_weight_nbytes == 0
    gc.collect()
    assert not unraisable


def assert_fresh_in_scope(layer, forward):
    x = tokens(layer.w13.device, 5)
    counting = fp8moe.runtime.counters.active.set(())  # do not count the copies of the other layer
    new = fresh(layer)
    wanted = step(new, new, x)
    fp8moe.runtime.counters.active.reset(counting)
    for _ in range(2):
        for a, b in zip(step(forward, layer, x), wanted, strict=True):
            assert torch.equal(a, b)


def test_plain_weights_of_the_functional_layer(device):
    """fp8moe.torch.moe_experts and moe_forward quantise the given weights in every call."""
    layer, x = module(device), tokens(device)
    _, ids, probs = (t.detach() for t in layer.route(x))
    optimizer = torch.optim.AdamW([layer.w13, layer.w2], lr=0.05, fused=True)
    for _ in range(3):
        y = fp8moe.torch.moe_experts(x, layer.w13, layer.w2, ids, probs, recipe="fp8_flow")
        assert torch.equal(y, fresh(layer)(x, ids, probs))
        weights = layer.w13.detach(), layer.w2.detach()
        again, _ = fp8moe.moe_forward(x, *weights, ids, probs, recipe="fp8_flow")
        assert torch.equal(y, again)
        y.float().square().mean().backward()
        optimizer.step()
    by_another_library(layer)
    again, _ = fp8moe.moe_forward(x, *weights, ids, probs, recipe="fp8_flow")
    assert torch.equal(again, fresh(layer)(x, ids, probs))


def test_with_a_process_group(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer = module(process_group=dist.group.WORLD)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05, fused=True)
        for _ in range(2):
            step(layer, layer, tokens())
            optimizer.step()
            assert_fresh(layer)
        by_another_library(layer)
        assert_fresh(layer)
        batch = [tokens(seed=i) for i in range(4)]
        assert accumulate(layer, optimizer, batch, "scope")[1] == 2
        assert_fresh(layer)
    finally:
        dist.destroy_process_group()


def copies_alive():
    """All existing FP8 tensors of the size of the layer's whole weights."""
    gc.collect()
    sizes = {3 * 2 * FFN * HIDDEN, 3 * FFN * HIDDEN}
    return sum(t.numel() in sizes for t in fp8_tensors())


def sharded(rank, folder):
    """One of two processes: three steps of fused AdamW with `fully_shard` on a parent of the layer, and
    without. Three experts on two ranks would be padded to four."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from fp8moe.adapters.torch.fsdp import shard_placement

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for sharding in ("whole", "reshard", "keep", "reshard, scope", "keep, scope"):
        block = torch.nn.Sequential(torch.nn.LayerNorm(HIDDEN), module(experts=3))
        if sharding != "whole":
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
            fully_shard(
                block,
                mesh=mesh,
                shard_placement_fn=shard_placement(2),
                reshard_after_forward="reshard" in sharding,
            )
            assert [p.placements[0].dim for p in block.parameters()] == [0, 0, 1, 1, 1]
        optimizer = torch.optim.AdamW(block.parameters(), lr=0.05, fused=True)
        outputs = []
        for turn in range(3):
            with fp8moe.trace() as traced:
                if "scope" in sharding:
                    with weights_unchanged(block):
                        micro_batches(block, turn, outputs)
                else:
                    micro_batches(block, turn, outputs)
            assert traced.weight_casts == (2 if "scope" in sharding else 8), sharding
            assert copies_alive() == 0, sharding
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            outputs.append(block(tokens(seed=99).float()))
        if "reshard" in sharding:
            with pytest.raises(TypeError, match="w13: got a DTensor"):
                block[1].quantize_weights()
        results[sharding] = outputs
    for sharding, outputs in results.items():
        for a, b in zip(results["whole"], outputs, strict=True):
            assert torch.equal(a, b), sharding
    assert not torch.equal(results["whole"][0], results["whole"][8])
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads are not always joined at Python's exit


def micro_batches(block, turn, outputs):
    for micro_batch in range(4):
        y = block(tokens(seed=10 * turn + micro_batch).float())
        (y * y).mean().backward()
        outputs.append(y.detach())


def test_sharded_weights(tmp_path):
    """FSDP gathers weights into the same memory without incrementing version counters; no FP8 copy of whole
    weights survives a step."""
    torch.multiprocessing.spawn(sharded, (str(tmp_path),), nprocs=2)


def changed_shards(rank, folder):
    """One of two processes, which changes the shards while FP8 copies of the gathered weights are in use."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh, x = torch.distributed.device_mesh.init_device_mesh("cpu", (2,)), tokens(seed=1).float()

    def load(layer):
        layer.load_state_dict({k: v * 1.5 for k, v in layer.state_dict().items()})

    def multiply(layer):
        for p in layer.parameters():
            p.mul_(1.5)

    def multiply_parts(layer):
        for p in layer.parameters():
            p.to_local().mul_(1.5)

    def step(layer):
        for p in layer.parameters():
            p.grad = p.detach() * -0.5
        torch.optim.SGD(layer.parameters(), lr=1.0).step()

    with torch.no_grad():
        changed = module()
        multiply(changed)
        before, after = module()(x), changed(x)
        for write in (load, multiply, multiply_parts, step):
            parent = torch.nn.Sequential(module())
            layer = fully_shard(parent, mesh=mesh)[0]
            with weights_unchanged(parent):
                assert torch.equal(parent(x), before)
                parent.reshard()
                write(layer)
                with pytest.raises(RuntimeError, match="got changed weights although they were declared"):
                    parent(x)
                parent.reshard()
            assert torch.equal(parent(x), after), write
            layer = fully_shard(module(), mesh=mesh)
            layer(x, is_first_microbatch=True)
            layer.reshard()
            write(layer)
            assert torch.equal(layer(x), after), write
        layer = fully_shard(module(), mesh=mesh, reshard_after_forward=False)
        layer(x)
        layer.quantize_weights()
        load(layer)
        assert torch.equal(layer(x), after)
        layer(x, is_first_microbatch=True)
        load(layer)
        with pytest.raises(RuntimeError, match="got changed weights although they were declared"):
            layer(x, is_first_microbatch=False)
        for flat in (True, False):  # its weights have no memory between forwards, or are parts of a vector
            parent = FullyShardedDataParallel(module(), device_id=mesh.device_type, use_orig_params=not flat)
            for keep in (parent.module.quantize_weights, parent.module.weights_unchanged().__enter__):
                with pytest.raises(
                    TypeError, match=r"w13: got .* FullyShardedDataParallel .* use fully_shard"
                ):
                    keep()
            assert torch.equal(parent(x), before)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads are not always joined at Python's exit


def test_changed_shards_are_detected(tmp_path):
    torch.multiprocessing.spawn(changed_shards, (str(tmp_path),), nprocs=2)


def shards_of_a_seed(rank, folder):
    """One of two processes: weights that are initialised in shards, from the meta device."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    from fp8moe.adapters.torch.fsdp import shard_placement

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for experts in (EXPERTS, 3):
        alone = module(experts=experts)
        torch.manual_seed(7)
        alone.reset_parameters()
        for place in (None, shard_placement(2), lambda p: Shard(p.ndim - 1)):
            layer = module("meta", experts=experts)
            fully_shard(layer, mesh=mesh, shard_placement_fn=place)
            layer.to_empty(device="cpu")
            torch.manual_seed(7)
            layer.reset_parameters()
            for p, q in zip(layer.parameters(), alone.parameters(), strict=True):
                assert torch.equal(p.full_tensor(), q)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads are not always joined at Python's exit


def test_a_seed_gives_the_same_weights_in_shards(tmp_path):
    """torch draws the same numbers for every shard on the CPU, so that experts would be equal."""
    torch.multiprocessing.spawn(shards_of_a_seed, (str(tmp_path),), nprocs=2)


@pytest.mark.usefixtures("saved_apart")
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_lifetime_of_fp8_copies(device, recompute, frozen_objects):
    """For the backward only the transposed codes are held, which it uses (with recompute also fc1's row-wise
    codes), and none after it."""
    layer = module(device, recompute=recompute)
    codes = layer.w13.numel() + layer.w2.numel() + (layer.w13.numel() if recompute else 0)
    kept = []
    x = tokens(device).requires_grad_()
    start = code_sizes(layer)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert sum(t.numel() for t in kept if t.dtype == torch.uint8 and t.ndim == 3) == codes
    assert code_sizes(layer) - start == codes
    kept.clear()
    y.sum().backward()
    assert code_sizes(layer) == start
    with torch.no_grad():
        layer(x)
    assert code_sizes(layer) == start
    with layer.weights_unchanged():
        assert code_sizes(layer) - start == 2 * (layer.w13.numel() + layer.w2.numel())
    assert code_sizes(layer) == start


def code_sizes(layer):
    """Sizes of all existing FP8 tensors with one code per element of a weight."""
    gc.collect()
    sizes = {getattr(layer, name).numel() for name in WEIGHTS}
    return sum(t.numel() for t in fp8_tensors() if t.numel() in sizes)


def fp8_tensors():
    tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.dtype == torch.uint8]
    return [t for t in tensors if isinstance(t.numel(), int)]  # not those of compilers, with symbolic sizes


CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)


def with_codes(state, name, dtype):
    return {**state, name: state[name].detach().abs().mul(448).to(dtype)}


@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
@pytest.mark.parametrize("assign", [False, True])
def test_codes_without_scales_are_not_loaded(recipe, assign):
    """torch's ``copy_`` would cast them to values."""
    layer, router = module(recipe=recipe), Router(HIDDEN, EXPERTS, RouterConfig(2), expert_bias=True)
    parametrized = module(recipe=recipe)
    torch.nn.utils.parametrize.register_parametrization(parametrized, "w13", Scaled())
    holder = torch.nn.ModuleDict({"plain": layer, "parametrized": parametrized, "router": router})
    before = {name: value.clone() for name, value in holder.state_dict().items()}
    for name in before:
        for dtype in CODES:
            state = with_codes(before, name, dtype)
            with pytest.raises(
                TypeError, match=rf"^{re.escape(name)}: got dtype {dtype}, codes without scales; wanted"
            ):
                holder.load_state_dict(state, assign=assign)
            with pytest.raises(
                TypeError, match=rf"^{re.escape(name)}: got dtype {dtype}, codes without scales; wanted"
            ):
                set_model_state_dict(holder, state)
    for name, value in holder.state_dict().items():
        assert torch.equal(value, before[name]), name
    holder.load_state_dict({name: value.half() for name, value in before.items()}, assign=assign)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_planner_refuses_the_codes_of_a_distributed_checkpoint(tmp_path):
    """`torch.distributed.checkpoint.load` writes into a module's tensors itself."""
    layer = module()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    for name, dtype in zip((*before, "w13"), CODES, strict=True):
        folder = str(tmp_path / str(dtype))
        dcp.save({"model": with_codes(before, name, dtype)}, checkpoint_id=folder, no_dist=True)
        with pytest.raises(CheckpointException, match=rf"model\.{re.escape(name)}: got dtype {dtype}"):
            dcp.load({"model": layer}, checkpoint_id=folder, planner=LoadPlanner(), no_dist=True)
        assert all(torch.equal(value, before[n]) for n, value in layer.state_dict().items())
    halves = {name: value.half() * 2 for name, value in before.items()}
    dcp.save({"model": halves}, checkpoint_id=str(tmp_path / "values"), no_dist=True)
    dcp.load({"model": layer}, checkpoint_id=str(tmp_path / "values"), planner=LoadPlanner(), no_dist=True)
    assert all(torch.equal(value, halves[n].float()) for n, value in layer.state_dict().items())


# ---------------------------------------------------------------- copies of a layer


class _Identity(torch.nn.Module):
    def forward(self, w):
        return w * 1.0


class _WithItsOwnDeepcopy(FP8FlowMoE):
    def __deepcopy__(self, memo):
        new = self.__new__(type(self))
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new


@pytest.mark.parametrize("way", ["parametrized", "subclass", "replica", "subclass within a context"])
def test_a_copy_of_a_layer_multiplies_its_own_weights(way):
    """Also where it takes over all attributes, the state of the FP8 copies among them."""
    layer = (_WithItsOwnDeepcopy if "subclass" in way else FP8FlowMoE)(64, 128, num_experts=4, topk=2)
    x, names, context = torch.randn(8, 64), ("w13", "w2"), contextlib.nullcontext()
    if way == "parametrized":
        for name in names:
            torch.nn.utils.parametrize.register_parametrization(layer, name, _Identity())
        context = torch.nn.utils.parametrize.cached()
    if way == "replica":  # of nn.DataParallel
        layer.quantize_weights()
        new = layer._replicate_for_data_parallel()
        new.w13, new.w2, new._modules = 2 * layer.w13.detach(), 2 * layer.w2.detach(), dict(layer._modules)
    else:
        with weights_unchanged(layer) if "context" in way else contextlib.nullcontext():
            new = copy.deepcopy(layer)
        with torch.no_grad():
            for name in names:
                w = (
                    getattr(new.parametrizations, name).original
                    if way == "parametrized"
                    else getattr(new, name)
                )
                w.mul_(2)
    fresh = FP8FlowMoE(64, 128, num_experts=4, topk=2)
    with torch.no_grad():
        fresh.router.load_state_dict(layer.router.state_dict())
        fresh.w13.copy_(2 * layer.w13), fresh.w2.copy_(2 * layer.w2)
        wanted = fresh(x)
        assert torch.equal(new(x), wanted)
        if way != "replica":
            with context, weights_unchanged(new):
                assert torch.equal(new(x), wanted)
    if way == "parametrized":
        assert int(new._handle) != int(layer._handle)
