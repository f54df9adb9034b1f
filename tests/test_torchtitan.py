"""`fp8moe.adapters.torchtitan` in torchtitan."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import FP8_NOISE
from grad_sums import check_added
from oracles import torch_swiglu

pytest.importorskip("torchtitan")
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    DeepEPTokenDispatcher,
    HybridEPTokenDispatcher,
    LocalTokenDispatcher,
)
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.models.qwen3 import model_registry

from fp8moe import Activation
from fp8moe.adapters.torchtitan import FP8MoEConverter, FP8RoutedExperts
from fp8moe.torch import diagnose

pytestmark = pytest.mark.filterwarnings("ignore")
D, F, E, K, B, L = 64, 48, 4, 2, 3, 7


def config(inner=GroupedExperts):
    return RoutedExperts.Config(
        inner_experts=inner.Config(dim=D, hidden_dim=F, num_experts=E),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K),
    )


def converted(config, **options):
    return FP8MoEConverter.Config(**options).build().convert(config)


def routed():
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(B * L)])
    return (
        torch.randn(B, L, D),
        torch.rand(B, L, K),
        ids.reshape(B, L, K),
        torch.bincount(ids.ravel(), minlength=E),
    )


def exact(experts, x, scores, ids, dy):
    """y and gradients, expert by expert in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (x, scores, *experts.parameters())]
    x, scores, *weights = leaves
    w = dict(zip((n.split(".")[-1] for n, _ in experts.named_parameters()), weights, strict=True))
    activation, b1, b3, b2 = Activation(), *(torch.zeros(E, n, dtype=torch.float64) for n in (F, F, D))
    if "mlp1_weight_EGD" in w:  # gates and ups alternate
        activation = Activation("swiglu", 7.0, 1.702, 1.0)
        w["w1_EFD"], w["w3_EFD"] = (w["mlp1_weight_EGD"][:, i::2] for i in (0, 1))
        b1, b3 = (w["mlp1_bias_EG"][:, i::2] for i in (0, 1))
        w["w2_EDF"], b2 = w["mlp2_weight_EDF"], w["mlp2_bias_ED"]
    y = torch.zeros(B * L, D, dtype=torch.float64)
    flat, of = x.reshape(-1, D), ids.reshape(-1, K)
    for t in range(B * L):
        for k in range(K):
            e = of[t, k]
            h = torch.cat((w["w1_EFD"][e] @ flat[t] + b1[e], w["w3_EFD"][e] @ flat[t] + b3[e]))
            a = torch_swiglu(h[None], None, activation)[0]
            out = scores.reshape(-1, K)[t, k] * (w["w2_EDF"][e] @ a + b2[e])
            y = y.index_add(0, torch.tensor([t]), out[None])
    y.backward(dy.reshape(-1, D).double())
    return [y.detach().reshape(B, L, D), *(t.grad for t in leaves)]


def results(experts, x, scores, ids, counts, dy):
    leaves = [t.detach().clone().requires_grad_() for t in (x, scores)]
    experts.zero_grad()
    y = experts(leaves[0], leaves[1], ids, counts)
    assert y.dtype == x.dtype
    y.backward(dy)
    return [y.detach(), *(t.grad for t in leaves), *(p.grad.clone() for p in experts.parameters())]


@pytest.mark.parametrize("inner", [GroupedExperts, GptOssGroupedExperts])
@pytest.mark.parametrize(
    ("recipe", "recompute"), [("bf16", None), ("fp8_flow", None), ("fp8_flow", "moe_expert")]
)
def test_routed_experts(recipe, recompute, inner):
    plain = config(inner).build()
    experts = converted(config(inner), recipe=recipe, recompute=recompute).build()
    assert type(experts) is FP8RoutedExperts
    for p in plain.parameters():
        torch.nn.init.normal_(p, std=0.3)
    experts.load_state_dict(plain.state_dict(), strict=True)  # the same names, shapes and dtypes
    for module, prefix in ((experts, "inner_experts."), (experts.inner_experts, "")):
        codes = {n: p.to(torch.float8_e4m3fn) for n, p in module.state_dict().items()}
        with pytest.raises(
            TypeError, match=rf"^{prefix}\w+_E\w+: got dtype torch.float8_e4m3fn, codes without"
        ):
            module.load_state_dict(codes)
    x, scores, ids, counts = routed()
    dy = torch.randn(B, L, D)
    wanted = exact(experts, x, scores, ids, dy)
    # successive float32 sums of at most D + F products
    bound = 4 * (D + F) * 2.0**-24 if recipe == "bf16" else FP8_NOISE
    for actual, true in zip(results(experts, x, scores, ids, counts, dy), wanted, strict=True):
        assert (actual - true).norm() <= bound * true.norm()
    rows = (t.flatten(0, 1) for t in (x, scores, ids))  # [T, D], as later versions of torchtitan pass them
    assert torch.equal(experts(*rows, counts), experts(x, scores, ids, counts).flatten(0, 1))
    # torchtitan's own experts multiply in bfloat16: about six roundings of 2^-9 of operands and results.
    # Those of gpt-oss take bfloat16 only, and round biases, sums with them, and four times in the activation.
    own, roundings = (x, 6) if inner is GroupedExperts else (x.bfloat16(), 14)
    y = plain(own, scores, ids, counts)
    assert (y - wanted[0]).norm() <= roundings * 2.0**-9 * wanted[0].norm()


@pytest.mark.parametrize("inner", [GroupedExperts, GptOssGroupedExperts])
def test_diagnose(inner):
    experts = converted(config(inner), recipe="fp8_flow", save="fp8").build()
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.1)
    (layer,) = diagnose(experts, routed(), loss=lambda y: y.square().sum()).layers
    assert (layer.kind, layer.save, layer.tokens) == ("FP8RoutedExperts", "fp8", B * L)
    assert {*layer.gradients} == {"dx", "dprobs", "dw13", "dw2"}  # a bias of experts is no router
    assert all(g.error < g.limit for g in layer.gradients.values())
    assert all(p.grad is None for p in experts.parameters())


def test_the_gemms_add_weight_gradients_to_grad():
    experts = converted(config()).build().bfloat16()
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x, *rest = routed()
    dy = torch.randn(B, L, D).bfloat16()
    check_added([*experts.parameters()], lambda: experts(x.bfloat16(), *rest).backward(dy))


@pytest.mark.parametrize(("option", "value", "wrong"), [("backend", "mma", "cutlass"), ("num_sms", 4, 3)])
def test_backend_and_limit_reach_the_products(option, value, wrong):
    experts = converted(config(), **{option: value}).build()
    with pytest.raises(ValueError, match=f"{option}: got {value!r} for arrays on the CPU"):
        experts(*routed())
    with pytest.raises(ValueError, match=f"{option}: got {wrong!r}; wanted"):
        converted(config(), **{option: wrong})


def test_inside_a_compiled_block():
    """Compiled into one graph, also for other numbers of tokens."""
    torch.compiler.reset()
    experts = converted(config()).build()
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.3)
    run = torch.compile(experts, backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for tokens in (7, 5, 11, 13, 17, 19, 23):
        x, ids = torch.randn(2, tokens, D), torch.randint(0, E, (2, tokens, K))
        scores, counts = torch.rand(2, tokens, K), torch.bincount(ids.ravel(), minlength=E)
        assert torch.equal(run(x, scores, ids, counts), experts(x, scores, ids, counts))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_converter_on_a_models_configuration():
    model = model_registry("debugmodel_moe", converters=[FP8MoEConverter.Config()]).model.build()
    layers = [m for m in model.modules() if isinstance(m, MoE)]
    assert layers
    assert all(type(m.routed_experts) is FP8RoutedExperts for m in layers)
    plain = model_registry("debugmodel_moe").model.build()
    shapes = [{n: (p.shape, p.dtype) for n, p in m.state_dict().items()} for m in (model, plain)]
    assert shapes[0] == shapes[1]
    layer, width = layers[0], layers[0].router.gate.weight.shape[1]
    with torch.no_grad():
        for p in layer.parameters():
            torch.nn.init.normal_(p, std=0.05)
    x = torch.randn(2, 8, width, requires_grad=True)
    layer(x).square().mean().backward()
    assert all(np.isfinite(p.grad.norm().item()) and p.grad.any() for p in layer.parameters())


def test_expert_parallelism_of_two_ranks(tmp_path):
    """With torchtitan's own meshes: results and gradients as on one rank, also compiled."""
    script = Path(__file__).with_name("torchtitan_rank.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-Wignore", script, str(rank), tmp_path / "file"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=240)
            assert rank.returncode == 0, output[-3000:]
    finally:
        for rank in ranks:
            rank.kill()


class OtherExperts(GroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass


def test_arguments_have_the_names_of_the_installed_torchtitan():
    """By which its parallelize() finds their shardings: x_BLD in 0.3, x_TD later."""
    names = RoutedExperts._cache_pos_arg_names(config().build())
    assert converted(config()).build()._cache_pos_arg_names() == names


def test_validation_errors():
    with pytest.raises(NotImplementedError, match="got OtherExperts; wanted GroupedExperts or GptOss"):
        converted(config(OtherExperts))
    with pytest.raises(ValueError, match="without routed experts; wanted one with them"):
        converted(model_registry("debugmodel").model)
    with pytest.raises(ValueError, match="recipe: got 'fp4'"):
        converted(config(), recipe="fp4")
    with pytest.raises(ValueError, match="backend: got 'cutlass'"):
        converted(config(), backend="cutlass")
    converter = FP8MoEConverter(FP8MoEConverter.Config())
    converter.config.recompute = "full"
    with pytest.raises(ValueError, match="recompute: got 'full'; wanted"):
        converter.convert(config())
    changed = converted(config())
    changed.num_sms = 3
    with pytest.raises(ValueError, match="num_sms: got 3; wanted an even number"):
        changed.build()
    experts, (x, scores, ids, counts) = converted(config(), backend="mma").build(), routed()
    assert "recipe='fp8_flow', recompute=None, save='bf16', backend='mma', num_sms=None" in repr(experts)
    with pytest.raises(ValueError, match="backend: got 'mma' for arrays on the CPU"):
        experts(x, scores, ids, counts)


def test_experts_that_a_later_converter_replaces_raise():
    """Only their weights would be read; their own forward would not be called."""
    both = converted(config())
    both.build()
    both.inner_experts = config(OtherExperts).inner_experts
    with pytest.raises(NotImplementedError, match="inner_experts: got OtherExperts; wanted Group"):
        both.build()


@pytest.mark.parametrize(
    ("dispatcher", "option", "value"),
    [
        (HybridEPTokenDispatcher, "non_blocking_capacity_factor", 0.5),
        (HybridEPTokenDispatcher, "non_blocking_capacity_factor", 1.0),
        (DeepEPTokenDispatcher, "cudagraphable", True),
    ],
)
def test_dispatchers_without_synchronisation_raise(dispatcher, option, value):
    """The dispatcher is not used, and the host reads row counts: the option would have no effect."""
    blocking, other = (
        dispatcher.Config(num_experts=E, top_k=K, num_max_tokens_per_rank=B * L, **options)
        for options in ({}, {option: value})
    )
    given = config()
    given.token_dispatcher = other
    message = f"{option}: got {value} .*wanted .*comm_backend"
    with pytest.raises(NotImplementedError, match=message):
        converted(given)
    given.token_dispatcher = blocking
    new = converted(given)
    new.token_dispatcher = other  # as torchtitan's overrides do, after the converters
    with pytest.raises(NotImplementedError, match=message):
        new.build()
