"""The torch module: results of the library, gradients, compiled code. test_torch_weights.py tests weights
that change."""

import copy
import functools
import pickle
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fp8moe
import fp8moe.torch
from fp8moe import Activation, RouterConfig
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch.layer import FP8FlowMoE
from fp8moe.adapters.torch.router import Router, _on_tensor_cores, _product, _product_backward, _sum, parts
from fp8moe.runtime.dispatch import cached_recordings, clear_recordings
from fp8moe.runtime.record_trees import arrays_in

TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 70, 256, 128, 4, 2


def module(recipe="fp8_flow", experts=EXPERTS, **options):
    torch.manual_seed(0)
    return FP8FlowMoE(HIDDEN, FFN, experts, TOPK, recipe=recipe, **options)


def tokens(seed=1, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, HIDDEN, generator=g).to(dtype).requires_grad_()


def backward(layer, x, seed=2):
    y = layer(x)
    g = torch.Generator().manual_seed(seed)
    y.backward(torch.randn(y.shape, generator=g).to(y.dtype))
    return y


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise"])
def test_module_equals_the_library(recipe, recompute):
    layer, x = module(recipe, recompute=recompute, activation=Activation(clamp=7.0)), tokens()
    y = backward(layer, x)
    w13, w2 = (w.detach().clone().requires_grad_() for w in (layer.w13, layer.w2))
    other = x.detach().clone().requires_grad_()
    _, ids, probs = layer.route(other)
    z = fp8moe.torch.moe_experts(
        other, w13, w2, ids, probs, recipe=recipe, recompute=recompute, activation=Activation(clamp=7.0)
    )
    g = torch.Generator().manual_seed(2)
    z.backward(torch.randn(z.shape, generator=g).to(z.dtype))
    for a, b in ((y, z), (x.grad, other.grad), (layer.w13.grad, w13.grad), (layer.w2.grad, w2.grad)):
        assert torch.equal(a, b)
    assert layer.router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
def test_strided_inputs(recipe):
    """Tokens, ids and probabilities of any strides."""
    layer = module(recipe)
    x, ids = torch.randn(TOKENS, HIDDEN), torch.randint(0, EXPERTS, (TOKENS, TOPK))
    probs = torch.rand(TOKENS, TOPK)
    strided = [t.t().contiguous().t() for t in (x, ids, probs)]
    assert torch.equal(layer(*strided), layer(x, ids, probs))
    assert torch.equal(layer(strided[0]), layer(x))


def test_recipes_are_close():
    """At most twelve E4M3 roundings in a chain: sqrt(12) * 2^-4 / sqrt(3), as in tests/test_moe.py."""
    results = {}
    for recipe in ("bf16", "fp8_blockwise", "fp8_flow"):
        layer, x = module(recipe), tokens()
        y = backward(layer, x)
        grads = [p.grad for p in layer.parameters() if p is not layer.router.weight]
        results[recipe] = [y, x.grad, *grads]
    for recipe in ("fp8_blockwise", "fp8_flow"):
        for a, b in zip(results[recipe], results["bf16"], strict=True):
            assert (a - b).float().norm() <= 0.125 * b.float().norm()


def test_bf16_against_float64():
    layer, x = module("bf16"), tokens()
    backward(layer, x)
    exact = copy.deepcopy(layer).double()
    other = x.detach().double().requires_grad_()
    _, ids, probs = layer.route(x.detach())
    y, total = torch.zeros_like(other), other
    for e in range(EXPERTS):
        gate, up = (total @ exact.w13[e].t()).chunk(2, dim=-1)
        share = (probs.double() * (ids == e)).sum(dim=-1, keepdim=True)
        y = y + share * ((torch.nn.functional.silu(gate) * up) @ exact.w2[e].t())
    exact.zero_grad()
    g = torch.Generator().manual_seed(2)
    y.backward(torch.randn(y.shape, generator=g).bfloat16().double())
    for a, b in ((layer.w13.grad, exact.w13.grad), (layer.w2.grad, exact.w2.grad)):
        # a dozen bfloat16 roundings of 2^-9 each in a chain
        assert (a - b).norm() <= 12 * 2.0**-9 * b.norm()


def test_shard_placement_avoids_padding():
    from fp8moe.adapters.torch.fsdp import padded_elements, shard_placement

    def dim(shape, ranks):
        actual = shard_placement(ranks)(torch.nn.Parameter(torch.empty(shape, device="meta")))
        return None if actual is None else actual.dim

    assert [dim((8, 4096, 7168), n) for n in (4, 8, 64, 7, 11)] == [0, 0, 1, 2, None]
    assert padded_elements((8, 4096, 7168), 64) == 56 * 4096 * 7168
    assert padded_elements((8, 4096, 7168), 64, 1) == 0
    assert padded_elements((3, 4, 5), 7, 2) == padded_elements((3, 4, 5), 7, -1) == 2 * 12
    with pytest.raises(ValueError, match="ranks: got 0"):
        shard_placement(0)
    for wrong, words in (
        (lambda: shard_placement(2.5), "ranks: got float; wanted an integer"),  # divides 5
        (lambda: padded_elements((8, 4), 0), "ranks: got 0"),
        (lambda: padded_elements((8, 4), 2, 2), "dimension: got 2; wanted an integer from -2 to 1"),
        (lambda: padded_elements((), 2), "shape: got a scalar.s; wanted a dimension"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            wrong()


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_to_main_grad(dtype, recipe):
    plain, layer = module(recipe=recipe), module(recipe=recipe)
    for w in (layer.w13, layer.w2):
        w.main_grad = torch.zeros(w.shape, dtype=dtype)
    for seed in (3, 4):
        backward(plain, tokens(seed), seed)
        backward(layer, tokens(seed), seed)
    for name in ("w13", "w2"):
        w, other = getattr(layer, name), getattr(plain, name)
        assert w.grad is None
        assert w.grad_added_to_main_grad
        # bfloat16 rounds once per micro-batch, by 2^-9; so does torch's grouped product of plain weights
        bound = 2 * 2.0**-9 if dtype == torch.bfloat16 or recipe == "bf16" else 1e-6
        assert (w.main_grad.float() - other.grad).norm() <= bound * other.grad.norm()
    assert layer.router.weight.grad is not None


def test_state_dict_deepcopy_and_shapes():
    layer = module(dtype=torch.bfloat16)
    x = tokens(dtype=torch.float32)
    y = layer(x.reshape(7, 10, HIDDEN))
    assert y.shape == (7, 10, HIDDEN)
    assert y.dtype == torch.float32
    assert set(layer.state_dict()) == {"router.weight", "w13", "w2"}
    other = module(dtype=torch.bfloat16)
    with torch.no_grad():
        other.w13.zero_()
    other(x)
    other.load_state_dict(layer.state_dict())
    for twin in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x).reshape(y.shape), y)
    assert "recipe='fp8_flow'" in repr(layer)
    assert fp8moe.torch.FP8FlowMoE is FP8FlowMoE


def test_choice_of_another_router():
    layer, x = module(), tokens()
    _, ids, probs = layer.route(x)
    assert torch.equal(layer(x, ids, probs), layer(x))
    with pytest.raises(ValueError, match="got one of them; wanted both"):
        layer(x, ids)
    assert torch.allclose(probs.sum(-1), torch.ones(TOKENS))
    *_, raw = module(normalize_probs=False).route(x)
    assert (raw.sum(-1) < 1).all()


@pytest.mark.parametrize(
    ("recipe", "recompute"),
    [("bf16", None), ("fp8_blockwise", None), ("fp8_flow", None), ("fp8_flow", "moe_expert")],
)
def test_compiled_as_one_graph(recipe, recompute):
    layer, x = module(recipe, recompute=recompute, activation=Activation(clamp=7.0)), tokens()
    block = torch.nn.Sequential(torch.nn.LayerNorm(HIDDEN, dtype=torch.bfloat16), layer)
    torch.compiler.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):  # with new FP8 copies of the weights
        actual = []
        for forward in (block, compiled):
            x.grad = None
            block.zero_grad()
            y = backward(forward, x)
            actual.append([y, x.grad.clone(), *(p.grad.clone() for p in layer.parameters())])
        for a, b in zip(*actual, strict=True):
            assert torch.equal(a, b)
        optimizer.step()


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_subclass_overrides_route(mode):
    """A subclass overrides `route`; the experts use its choice, and its probabilities get gradients."""

    class Halved(FP8FlowMoE):
        def route(self, tokens):
            rows, ids, probs = super().route(tokens)
            return rows, ids.flip(1), probs.flip(1) / 2

    class WithoutRows(FP8FlowMoE):
        def route(self, tokens):
            return super().route(tokens)[1:]

    torch.manual_seed(0)
    layer, x = Halved(HIDDEN, FFN, EXPERTS, TOPK), tokens()
    _, ids, probs = FP8FlowMoE.route(layer, x)
    wanted = FP8FlowMoE.forward(layer, x, ids.flip(1), probs.flip(1) / 2)
    run = layer if mode == "eager" else torch.compile(layer, backend="aot_eager", fullgraph=True)
    y = run(x)
    assert torch.equal(y, wanted)
    dy = torch.randn_like(y)
    leaves = [x, *layer.parameters()]
    for actual, true in zip(
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(wanted, leaves, dy), strict=True
    ):
        assert torch.equal(actual, true)
    with pytest.raises(ValueError, match="route: got 2 results; wanted"):
        WithoutRows(HIDDEN, FFN, EXPERTS, TOPK)(x)


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_compiled_code_saves_the_same_tensors(recompute):
    """FP8 rows, and never the bfloat16 input; the expert ids; and only the weight codes that the backward
    uses."""
    layer, x, kept = module(recompute=recompute), tokens(), {}
    _, ids, probs = (t.detach() for t in layer.route(x))
    probs.requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        compiled(x, ids, probs)
    weights = [fp8moe.quantize_weights(w.detach()) for w in (layer.w13, layer.w2)]
    options = {"recipe": layer.recipe, "recompute": recompute}
    _, saved = fp8moe.moe_forward(x.detach(), *weights, ids, probs.detach(), **options)
    codes = sum(a.nbytes for a in arrays_in((saved.w13, saved.w2)))
    assert sum(t.nbytes for t in kept.values()) == saved.nbytes + codes + ids.nbytes + probs.nbytes


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_any_width(recipe, mode, main_grad):
    """Bitwise equal to the layer with weights padded with zeros to a multiple of 128. The state dict has the
    original widths."""
    torch.manual_seed(0)
    hidden, ffn = (96, 72) if recipe == "fp8_flow" else (100, 71)
    layer = FP8FlowMoE(hidden, ffn, EXPERTS, TOPK, recipe=recipe, normalize_probs=False)
    assert layer.w13.shape == (EXPERTS, 2 * ffn, hidden)
    wide = FP8FlowMoE(hidden, 128, EXPERTS, TOPK, recipe=recipe, normalize_probs=False)
    halves = [torch.nn.functional.pad(h, (0, 0, 0, 128 - ffn)) for h in layer.w13.chunk(2, dim=1)]
    w2 = torch.nn.functional.pad(layer.w2, (0, 128 - ffn))
    wide.load_state_dict({"router.weight": layer.router.weight, "w13": torch.cat(halves, dim=1), "w2": w2})
    x = torch.randn(TOKENS, hidden).bfloat16().requires_grad_()
    y = backward(wide, x)
    wanted = [
        y,
        x.grad,
        wide.w13.grad.unflatten(1, (2, 128))[:, :, :ffn].flatten(1, 2),
        wide.w2.grad[..., :ffn],
    ]
    x.grad = None
    if main_grad and recipe == "fp8_flow":
        for w in (layer.w13, layer.w2):
            w.main_grad = torch.zeros_like(w)
    torch.compiler.reset()
    forward = torch.compile(layer, backend="aot_eager", fullgraph=True) if mode == "compiled" else layer
    y = backward(forward, x)
    grads = [w.grad if w.grad is not None else w.main_grad for w in (layer.w13, layer.w2)]
    for actual, true in zip([y, x.grad, *grads], wanted, strict=True):
        if recipe == "fp8_flow":  # float32 sums, whose order in a BLAS depends on the width, rounded once
            bound = 2.0**-8 if true.dtype == torch.bfloat16 else 2.0**-16
            assert (actual - true).float().norm() <= bound * true.float().norm()
        else:  # a dozen bfloat16 roundings of 2^-9 each in a chain, and sums in another order
            assert (actual - true).float().norm() <= 12 * 2.0**-9 * true.float().norm()
    if recipe == "fp8_flow" and mode == "eager":
        with layer.weights_unchanged():
            assert torch.equal(layer(x), y)
            assert layer.fp8_weight_nbytes > 0


def test_experts_without_a_gate():
    layer = module(activation=Activation("relu2"))
    assert layer.w13.shape == (EXPERTS, FFN, HIDDEN)
    x = tokens()
    y = backward(layer, x)
    other = x.detach().clone().requires_grad_()
    _, ids, probs = (t.detach() for t in layer.route(other))
    weights = [w.detach().clone().requires_grad_() for w in (layer.w13, layer.w2)]
    z = fp8moe.torch.moe_experts(other, *weights, ids, probs, activation=layer.activation)
    g = torch.Generator().manual_seed(2)
    z.backward(torch.randn(z.shape, generator=g).to(z.dtype))
    for a, b in ((y, z), (layer.w13.grad, weights[0].grad), (layer.w2.grad, weights[1].grad)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
def test_no_tokens(recipe, recompute, compiled):
    torch.compiler.reset()
    layer = module(recipe, recompute=recompute)
    x = torch.empty(0, HIDDEN, requires_grad=True)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    y = call(x)
    y.sum().backward()  # its incoming gradient has strides of zero
    assert y.shape == x.grad.shape == (0, HIDDEN)
    assert all(torch.equal(w.grad, torch.zeros_like(w)) for w in layer.parameters())


def test_layers_share_compiled_code():
    torch.compiler.reset()
    layers = [module(), copy.deepcopy(module())]
    with torch.no_grad():
        layers[1].w2.mul_(2.0)
    x = tokens().detach()
    wanted = [layer(x) for layer in layers]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for layer, y in zip(layers, wanted, strict=True):
            assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), y)
    more = torch.cat([x, x])  # another number of tokens is another graph
    compiled = torch.compile(layers[0], backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(more), torch.cat([wanted[0], wanted[0]]))


@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_compiled_gradients_are_added_to_main_grad(recipe):
    torch.compiler.reset()
    layer, x = module(recipe=recipe), tokens()
    for w in (layer.w13, layer.w2):
        w.main_grad = torch.ones_like(w)
    backward(layer, x)
    wanted = [w.main_grad.clone() for w in (layer.w13, layer.w2)]
    for w in (layer.w13, layer.w2):
        w.main_grad.fill_(1.0)
        w.grad_added_to_main_grad = False
    backward(torch.compile(layer, backend="aot_eager", fullgraph=True), x)
    for w, main in zip((layer.w13, layer.w2), wanted, strict=True):
        assert torch.equal(w.main_grad, main)
        assert w.grad is None
        assert w.grad_added_to_main_grad


@pytest.mark.parametrize("attribute", ["overwrite_main_grad", "__fsdp_param__"])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_main_grad_to_overwrite_is_not_added_to(mode, attribute):
    """Megatron-FSDP's ``main_grad`` has the contents of an earlier step: gradients are returned."""
    torch.compiler.reset()
    plain, layer, x = module(), module(), tokens()
    backward(plain, x)
    for w in (layer.w13, layer.w2):
        w.main_grad, w.grad_added_to_main_grad = torch.full_like(w, float("nan")), False
        setattr(w, attribute, True)
    backward(layer if mode == "eager" else torch.compile(layer, backend="aot_eager", fullgraph=True), x)
    for name in ("w13", "w2"):
        w = getattr(layer, name)
        assert torch.equal(w.grad, getattr(plain, name).grad)
        assert w.main_grad.isnan().all()
        assert not w.grad_added_to_main_grad


@pytest.mark.parametrize("call", ["grad", "inputs"])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_gradient_of_the_input_only_does_not_change_main_grad(mode, call):
    torch.compiler.reset()
    layer, x = module(), tokens()
    for w in (layer.w13, layer.w2):
        w.main_grad = torch.zeros_like(w)
    forward = layer if mode == "eager" else torch.compile(layer, backend="aot_eager", fullgraph=True)
    y = forward(x).sum()

    def backward_to_x():
        if call == "grad":
            torch.autograd.grad(y, x)
        else:
            y.backward(inputs=[x])

    if mode == "eager":
        backward_to_x()
    else:
        with pytest.raises(RuntimeError, match="without the gradient of w13"):
            backward_to_x()
    assert not layer.w13.main_grad.any()
    assert not layer.w2.main_grad.any()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((256, 200, 4, 2), {"recipe": "fp8_blockwise"}, "ffn: got 200; wanted a multiple of 128"),
        ((0, 128, 4, 2), {}, "hidden: got 0"),
        ((256, 128, 4, 5), {}, "topk: got 5"),
        ((256, 128, 4, 2), {"recipe": "fp4"}, "recipe: got 'fp4'"),
        ((256, 128, 4, 2), {"recompute": "all"}, "recompute: got 'all'"),
        ((256, 128, "4", 2), {}, "num_experts: got str; wanted an integer"),
        ((256, 128, 4, 2.0), {}, "topk: got float; wanted an integer"),
        (
            (256, 128, 4, 2),
            {"router": "softmax"},
            r"router: got str; wanted an .*; make it by fp8moe\.RouterConfig\(topk, ",
        ),
        ((256, 128, 4, 2), {"router": None}, "router: got NoneType; wanted an fp8moe.RouterConfig"),
    ],
)
def test_validation_errors(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        FP8FlowMoE(*arguments, **options)


@pytest.mark.parametrize("router", [True, False])
def test_a_seed_gives_the_same_weights_through_the_meta_device(router):
    torch.manual_seed(7)
    wanted = FP8FlowMoE(256, 128, 4, 2, router=router).state_dict()
    layer = FP8FlowMoE(256, 128, 4, 2, router=router, device="meta").to_empty(device="cpu")
    torch.manual_seed(7)
    layer.reset_parameters()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
def test_wrong_tensors_raise(recipe):
    """In place of a result without the missing experts, or of memory that was never written."""
    x = torch.randn(10, 256)
    for name, replace, error, message in (
        ("w13", lambda w: w[:2], ValueError, r"got shape \[2, 256, 256\]; wanted \[4, 256, 256\]"),
        ("w2", lambda w: w[:2], ValueError, r"got shape \[2, 256, 128\]; wanted \[4, 256, 128\]"),
        ("router", lambda w: w[:2], ValueError, r"got shape \[2, 256\]; wanted \[4, 256\]"),
        ("router", lambda w: w.to("meta"), TypeError, "got a tensor on meta"),
        ("w13", lambda w: w.to("meta"), TypeError, "got a tensor on meta"),
        ("w2", lambda w: w.to("meta"), TypeError, "got a tensor on meta"),
        (
            "w13",
            lambda w: w.to(torch.float8_e4m3fn),
            TypeError,
            "got dtype torch.float8_e4m3fn, codes without",
        ),
        ("w2", lambda w: w.to(torch.float8_e5m2), TypeError, "got dtype torch.float8_e5m2, codes without"),
    ):
        layer = FP8FlowMoE(256, 128, 4, 2, recipe=recipe)
        owner, attribute = (layer.router, "weight") if name == "router" else (layer, name)
        weight = torch.nn.Parameter(replace(getattr(owner, attribute).detach()), requires_grad=False)
        setattr(owner, attribute, weight)
        with pytest.raises(error, match=f"{attribute}: {message}"):
            layer(x)
    layer = FP8FlowMoE(256, 128, 4, 2, recipe=recipe, device="meta")
    with pytest.raises(TypeError, match="x: got a tensor on meta"):
        layer(x.to("meta"))
    if recipe != "bf16":
        for keep in (layer.quantize_weights, layer.weights_unchanged().__enter__):
            with pytest.raises(TypeError, match="w13: got a tensor on meta"):
                keep()
    layer = FP8FlowMoE(256, 128, 4, 2, recipe=recipe)
    ids, probs = torch.zeros(10, 2, dtype=torch.int64), torch.ones(10, 2)
    for arguments, error, message in (
        ((ids[:9], probs[:9]), ValueError, r"topk_ids: got shape \[9, 2\]; wanted \[10, k\]"),
        ((ids, torch.ones(10, 4)), ValueError, r"topk_probs: got shape \[10, 4\]; wanted \[10, 2\]"),
        ((ids.tolist(), probs), TypeError, r"got list; wanted a tensor; pass torch\.tensor\(topk_ids\)"),
        ((ids, ids), TypeError, r"topk_probs: got dtype torch\.int64; wanted a floating-point dtype"),
    ):
        with pytest.raises(error, match=message):
            layer(x, *arguments)
    for bad in (x.to(torch.float8_e4m3fn), x.to(torch.float8_e5m2)):
        with pytest.raises(TypeError, match=r"x: got dtype torch\.float8_.*, codes without scales"):
            layer(bad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_routers_product_is_in_float32(dtype, device, autocast):
    """Compared with float64, by the sigmoids of all logits: sums of 512 (experts: 8, tokens: 300) products,
    each rounded to float32."""
    g = torch.Generator().manual_seed(0)
    router = Router(512, 8, RouterConfig(8, "sigmoid", renormalize=False), dtype=dtype, device=device)
    x = torch.randn(300, 512, generator=g).bfloat16().to(device).requires_grad_()
    with torch.no_grad():
        router.weight.copy_(torch.randn(8, 512, generator=g) / 22)  # logits with a standard deviation of one
    grad = torch.randn(300, 8, generator=g).to(device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        ids, probs = router(x)
    assert probs.dtype == torch.float32
    probs.backward(grad)
    x64, w64 = x.detach().double(), router.weight.detach().double()
    p64, of_p = (torch.zeros(300, 8, dtype=torch.float64, device=device) for _ in range(2))
    p64.scatter_(1, ids.long(), probs.detach().double())
    of_p.scatter_(1, ids.long(), grad.double())
    unit = 2.0**-24

    def check(actual, wanted, bound, rounding=0.0):
        assert ((actual.double() - wanted).abs() <= bound * unit + rounding * wanted.abs()).all()

    # the slope of a sigmoid is at most 1/4; it and its gradient have four roundings of numbers below 1
    check(p64, torch.sigmoid(x64 @ w64.t()), 512 / 4 * (x64.abs() @ w64.abs().t()) + 4)
    of_logits = of_p * p64 * (1 - p64)
    parts_of = 8 * of_logits.abs() + 4 * of_p.abs()
    check(x.grad, of_logits @ w64, parts_of @ w64.abs(), 2.0**-8)
    parts_of = 300 * of_logits.abs() + 4 * of_p.abs()
    check(
        router.weight.grad,
        of_logits.t() @ x64,
        parts_of.t() @ x64.abs(),
        0.0 if dtype == torch.float32 else 2.0**-8,
    )


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_product_on_tensor_cores_of_any_number_of_tokens(tokens, dtype):
    """By shapes alone, without a GPU: of no tokens the product of three parts was refused."""
    with FakeTensorMode():
        x = torch.empty(tokens, 64, device="cuda", dtype=torch.bfloat16)
        w = torch.empty(8, 64, device="cuda", dtype=dtype)
        assert _on_tensor_cores(x, w)
        logits, parts_of_w = _product(x, w)
        assert logits.shape == (tokens, 8)
        grad = torch.empty(tokens, 3 * 8, device="cuda", dtype=torch.bfloat16)
        assert [t.shape for t in _product_backward(grad, x, w, parts_of_w)] == [x.shape, w.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_tokens_on_cuda(recipe, dtype):
    layer = FP8FlowMoE(256, 128, 4, 2, recipe=recipe, dtype=dtype, device="cuda")
    x = torch.empty(0, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape
    assert all(not p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_routers_gradients_are_in_float32(dtype, compiled):
    """Also if the backward runs under autocast: eager, or compiled, which traces the backward in the autocast
    of the call. Gradients too small or too large for float16 are among them."""
    router, x = Router(64, 8, RouterConfig(2)), torch.randn(100, 64, requires_grad=True)
    torch.compiler.reset()
    run = torch.compile(router, backend="aot_eager", fullgraph=True) if compiled else router
    scales = torch.linspace(1, 2, 200).view(100, 2)

    def gradients(forward, scale, enabled):
        with torch.autocast("cpu", dtype, enabled=enabled):
            loss = (forward(x)[1] * scales).sum() * scale
            return torch.autograd.grad(loss, [x, router.weight])

    for scale in (2.0**-30, 1.0, 2.0**24):
        for actual, wanted in zip(gradients(run, scale, True), gradients(router, scale, False), strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_float32_is_the_sum_of_three_bfloat16_parts():
    x = torch.randn(10_000) * torch.exp2(torch.randint(-60, 60, (10_000,)))
    high, middle, low = (part.double() for part in parts(x))
    assert torch.equal(high + middle + low, x.double())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_routers_gradient_of_rows_is_added_alike_in_compiled_code(backend):
    """As an operator: of torch's addmm Inductor may round the product to bfloat16 before it adds it."""
    addend, a, b = (torch.randn(*shape).bfloat16() for shape in [(30, 16), (30, 24), (24, 16)])
    torch.library.opcheck(_sum.op, (addend, a, b), test_utils=("test_schema", "test_faketensor"))

    def call(addend, a, b):
        return _sum(addend, a, b)

    torch.compiler.reset()
    for rows in (addend, addend.repeat(1, 2)[:, ::2]):
        actual = torch.compile(call, fullgraph=True, backend=backend)(rows, a, b)
        assert torch.equal(actual, torch.addmm(rows, a, b))
        assert actual.is_contiguous()


def test_without_a_router():
    layer, x = module(), tokens()
    _, ids, probs = (t.detach() for t in layer.route(x))
    bare = FP8FlowMoE(layer.hidden, layer.ffn, layer.num_experts, layer.topk, router=False)
    assert [n for n, _ in bare.named_parameters()] == ["w13", "w2"]
    bare.load_state_dict({n: v for n, v in layer.state_dict().items() if n != "router.weight"})
    y = bare(x, ids, probs)
    assert torch.equal(y, layer(x, ids, probs))
    y.sum().backward()
    assert all(p.grad is not None for p in bare.parameters())
    with pytest.raises(
        ValueError, match="topk_ids, topk_probs: got neither in a layer made with router=False"
    ):
        bare(x)
    bare.reset_parameters()
    assert torch.equal(copy.deepcopy(bare)(x, ids, probs), bare(x, ids, probs))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_passed_through_the_router_get_both_gradients(dtype):
    """The sum of the router's and the experts' gradients of x is rounded once instead of twice."""
    router = Router(256, 16, RouterConfig(4), device="cuda", dtype=dtype)
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
    grad, of_probs = torch.randn_like(x), torch.randn(300, 4, device="cuda")

    def gradients(pass_rows):
        rows = x.clone().requires_grad_()
        router.zero_grad()
        passed, probs = router(rows, pass_rows=True)[::2] if pass_rows else (rows, router(rows)[1])
        torch.autograd.backward([passed, probs], [grad, of_probs])
        return rows.grad, router.weight.grad.clone()

    clear_recordings()
    (apart, dw), (together, same_dw) = gradients(False), gradients(True)
    if torch.cuda.get_device_capability() == (9, 0):
        assert "add_product" in [name for name, _ in cached_recordings()]
    assert torch.equal(dw, same_dw)
    # computed separately, the router's part is rounded, and always the sum, each by at most 2^-9 of itself
    part, apart = (apart.float() - grad.float()).abs(), apart.float()
    assert (
        (apart - together.float()).abs() <= 2.0**-8 * (part + apart.abs()) + 2.0**-8 * grad.float().abs()
    ).all()


@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
def test_dtypes_of_weights(recipe):
    """Weights that no forward accepts are refused when the layer is made."""
    for dtype in (torch.float64, torch.float8_e4m3fn, torch.int32):
        if recipe == "bf16" and dtype == torch.float64:
            assert module(recipe, dtype=dtype)(tokens()).shape == (TOKENS, HIDDEN)
            continue
        with pytest.raises(TypeError, match=rf"dtype: got {dtype}; wanted one of torch\.bfloat16, torch\."):
            module(recipe, dtype=dtype)
    assert module(recipe, dtype=None).w13.dtype == torch.float32


@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
def test_a_main_grad_of_other_strides_raises(recipe):
    layer = module(recipe)
    for w in (layer.w13, layer.w2):
        w.main_grad = torch.zeros_like(w)
    layer.w13.main_grad = layer.w13.main_grad.mT.contiguous().mT
    with pytest.raises(ValueError, match=r"main_grad: got strides \(65536, 1, 256\); wanted C-contiguous"):
        layer(tokens()).sum().backward()
    assert not layer.w2.main_grad.any()


@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
@pytest.mark.parametrize("shape", [(EXPERTS, 256, 512), (EXPERTS * 256 * 256,), (1, 256, 256)])
def test_a_main_grad_of_another_shape_raises(recipe, shape):
    layer = module(recipe)
    layer.w2.main_grad = torch.zeros_like(layer.w2)
    layer.w13.main_grad = torch.zeros(shape)
    wanted = re.escape(f"main_grad: got shape {list(shape)}; wanted {list(layer.w13.shape)}, its parameter's")
    with pytest.raises(ValueError, match=wanted):
        layer(tokens()).sum().backward()
    assert not layer.w2.main_grad.any()


def test_batched_gradients_raise():
    layer, router = FP8FlowMoE(256, 128, 4, 2), Router(256, 4, RouterConfig(2))
    for function in (layer, lambda x: router(x)[1]):
        x = torch.randn(10, 256).requires_grad_()
        y = function(x)
        with pytest.raises(NotImplementedError, match="backward: got batched gradients"):
            torch.autograd.grad(y, x, torch.ones(3, *y.shape), is_grads_batched=True)


@pytest.mark.parametrize("assign", [False, True])
def test_a_routers_bias_stays_in_float32(assign):
    router = Router(64, 8, RouterConfig(2), expert_bias=True)
    router.expert_bias += 2.0**-12 + 1
    state = {name: value.bfloat16() for name, value in router.state_dict().items()}
    router.load_state_dict(state, assign=assign)
    assert router.expert_bias.dtype == torch.float32
    assert torch.equal(router.expert_bias, torch.ones(8))
    assert router.weight.dtype == (torch.bfloat16 if assign else torch.float32)
    assert state["expert_bias"].dtype == torch.bfloat16  # the caller's
    router(torch.randn(5, 64))
    renamed = {name.replace("expert_bias", "bias"): value for name, value in state.items()}
    router.register_load_state_dict_pre_hook(
        lambda _, given, prefix, *rest: given.update({prefix + "expert_bias": given.pop(prefix + "bias")})
    )
    router.load_state_dict(renamed, assign=assign)
    assert router.expert_bias.dtype == torch.float32
    copy.deepcopy(router)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 4096}, "num_experts: got 4096 experts; wanted at most 1024 for a router"),
        (
            {"num_experts": 2**20 + 1, "router": False},
            "num_experts: got 1048577; wanted an integer from 1 to",
        ),
        ({"num_experts": 64, "topk": 33}, "topk: got 33; wanted an integer from 1 to 32"),
        ({"backend": "mma", "num_sms": 8}, "num_sms: got 8 with backend='mma', which cannot limit itself"),
        ({"backend": "plain", "num_sms": 8, "recipe": "bf16"}, "num_sms: got 8 with backend='plain'"),
    ],
)
def test_limits_known_to_the_constructor_raise_there(options, message):
    sizes = {"hidden": 8, "ffn": 8, "num_experts": 4, "topk": 2}
    with pytest.raises(ValueError, match=message):
        FP8FlowMoE(**sizes | options, device="meta")
    # without a router there is no limit of the router
    layer = FP8FlowMoE(8, 8, 1025, 33, router=False, device="meta", backend="wgmma", num_sms=8)
    assert layer.num_experts == 1025


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((8, 1025), ValueError, "num_experts: got 1025 experts; wanted at most 1024"),
        ((8, 0), ValueError, "num_experts: got 0; wanted an integer from 1"),
        ((0, 4), ValueError, "hidden: got 0; wanted an integer from 1"),
        ((8.0, 4), TypeError, "hidden: got float; wanted an integer"),
    ],
)
def test_sizes_that_a_router_module_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        Router(*arguments, RouterConfig(2))


OTHERS = {
    "recipe": ("bf16", "fp8", ValueError),
    "recompute": ("moe_expert", "full", ValueError),
    "save": ("fp8", "fp16", ValueError),
    "activation": (Activation(clamp=0.3), "swiglu", TypeError),
    "backend": ("plain", "cutlass", ValueError),
    "num_sms": (4, 3, ValueError),
    "weight_copies": ("rowwise", "columnwise", ValueError),
    "topk": (1, 9, ValueError),
    "collect_stats": (True, 1, TypeError),
}
FIXED = {"hidden": 512, "ffn": 256, "num_experts": 16}


def test_attributes_are_read_and_checked_or_fixed():
    """Options of a layer may be set later: they take effect, an invalid one is refused by its name and
    changes nothing; the sizes are fixed."""
    layer, x = FP8FlowMoE(256, 128, 8, 2), torch.randn(40, 256)
    of_torch = {n for n in (*vars(torch.nn.Module()), *dir(torch.nn.Module)) if not n.startswith("_")}
    public = {n for n in (*vars(layer), *dir(type(layer))) if not n.startswith("_")} - of_torch
    attributes = {n for n in public if not callable(getattr(type(layer), n, None))}
    assert attributes == {*OTHERS, *FIXED, "fp8_weight_nbytes", "lora"}
    for adapters in ("w13", torch.nn.Linear(2, 2), torch.nn.ModuleDict({"w13": torch.nn.Linear(2, 2)})):
        vars(layer).pop("lora", None)
        layer.lora = adapters
        with pytest.raises(
            TypeError, match=r"lora: got a (str|Linear|ModuleDict of others); wanted None, or"
        ):
            layer(x)
    layer.lora = None
    for name, value in (*FIXED.items(), ("fp8_weight_nbytes", 0)):
        before = getattr(layer, name)
        with pytest.raises(AttributeError, match=name):
            setattr(layer, name, value)
        assert getattr(layer, name) == before
    for compiled, names in ((False, OTHERS), (True, ("save", "activation", "topk", "collect_stats"))):
        for name in names:
            value, invalid, error = OTHERS[name]
            layer = FP8FlowMoE(256, 128, 8, 2)
            other = FP8FlowMoE(
                256, 128, 8, **{"topk": 2} | ({} if name == "collect_stats" else {name: value})
            )
            other.load_state_dict(layer.state_dict())
            forward = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
            y, shown, before = forward(x), repr(layer), getattr(layer, name)
            with pytest.raises(
                error, match=rf"^(config\.)?{name}: got {invalid!r}|^{name}: got (str|int); wanted"
            ):
                setattr(layer, name, invalid)
            assert getattr(layer, name) == before
            assert torch.equal(forward(x), y)
            setattr(layer, name, value)
            assert getattr(layer, name) == value
            if name == "collect_stats":
                if compiled:
                    with pytest.raises(RuntimeError, match="collect_stats: got True in compiled code"):
                        forward(x)
                else:
                    forward(x)
                    assert layer.stats().rows_per_expert.sum() == 40 * 2
                continue
            assert repr(layer) == repr(other) != shown
            if name in ("backend", "num_sms"):
                with pytest.raises(
                    ValueError, match=f"{name}: got {value!r} for arrays on the CPU"
                ) as caught:
                    forward(x)
                with pytest.raises(type(caught.value)):
                    other(x)
            else:
                given = x.clone().requires_grad_(), x.clone().requires_grad_()
                results = [backward(f, t) for f, t in zip((forward, other), given, strict=True)]
                assert torch.equal(*results)
                assert torch.equal(given[0].grad, given[1].grad)
                assert torch.equal(results[0], y) == (name in ("recompute", "save", "weight_copies"))


def test_options_that_do_not_fit_a_layer_raise():
    layer = FP8FlowMoE(64, 96, 8, 2, router=False)
    for name, value, error, words in (
        ("recipe", "fp8_blockwise", ValueError, "ffn: got 96; wanted a multiple of 128"),
        ("activation", Activation("relu2"), ValueError, "activation: got .*; wanted one with a gate"),
        ("topk", 3, AttributeError, "topk: got 3 in a layer without a `Router`; wanted 2"),
    ):
        shown = repr(layer)
        with pytest.raises(error, match=words):
            setattr(layer, name, value)
        assert repr(layer) == shown
    with pytest.raises(
        ValueError, match=r"topk_ids: got shape \[5, 3\]; wanted \[T, 2\], by the layer's topk"
    ):
        layer(torch.randn(5, 64), torch.zeros(5, 3, dtype=torch.int64), torch.ones(5, 3))
    router = Router(64, 8, RouterConfig(2))
    for config, words in ((2, "config: got int"), (RouterConfig(9), "config.topk: got 9; wanted at most 8")):
        with pytest.raises((TypeError, ValueError), match=words):
            router.config = config
    router.config = RouterConfig(3, "sigmoid")
    assert router(torch.randn(5, 64))[0].shape == (5, 3)
    assert "sigmoid" in repr(router)


@pytest.fixture
def mesh():
    """Of this process alone."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("router", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_dtensors_as_rows_are_refused_by_name(router, compiled, mesh):
    tensor = torch.distributed.tensor
    plain = torch.randn(6, 64)
    rows = tensor.DTensor.from_local(plain, mesh, [tensor.Shard(0)])
    ids, probs = torch.zeros(6, 2, dtype=torch.int32), torch.ones(6, 2)
    chosen = () if router else (ids, probs)
    of_x = r"x: got a DTensor of placements \(Shard\(dim=0\),\), .*pass x\.to_local\(\)"
    for recipe in ("bf16",) if compiled else ("bf16", "fp8_flow"):
        layer = FP8FlowMoE(64, 128, 4, 2, recipe=recipe, router=router)
        call = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
        with pytest.raises(torch._dynamo.exc.Unsupported if compiled else TypeError, match=of_x):
            call(rows, *chosen)
    torch.compiler.reset()
    if compiled or not router:
        return
    weights = layer.w13.detach(), layer.w2.detach()
    with pytest.raises(TypeError, match=of_x):
        layer.router(rows)
    with pytest.raises(TypeError, match=of_x):
        fp8moe.torch.moe_experts(rows, *weights, ids, probs)
    with pytest.raises(TypeError, match="logits: got a DTensor"):
        fp8moe.torch.route(rows, RouterConfig(2))
    with pytest.raises(TypeError, match=of_x):
        torch_ops.quantize(rows)
    of_ids = tensor.DTensor.from_local(ids, mesh, [tensor.Shard(0)])
    with pytest.raises(TypeError, match="topk_ids: got a DTensor"):
        layer(plain, of_ids, probs)
    w13 = tensor.DTensor.from_local(weights[0], mesh, [tensor.Shard(0)])
    for recipe in ("bf16", "fp8_flow"):
        with pytest.raises(TypeError, match="w13: got a DTensor"):
            fp8moe.torch.moe_experts(plain, w13, weights[1], ids, probs, recipe=recipe)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_inner_layer_of_a_sharded_root_is_refused_by_name(compiled, mesh):
    layer, x = FP8FlowMoE(64, 128, 4, 2), torch.randn(6, 64)
    root = torch.nn.Sequential(layer)
    y = root(x)
    torch.distributed.fsdp.fully_shard(root, mesh=mesh)
    call = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
    words = r"w13: got a DTensor of placements .*use fully_shard, which gathers weights for the"
    with pytest.raises(torch._dynamo.exc.Unsupported if compiled else TypeError, match=words):
        call(x)
    torch.compiler.reset()
    with pytest.raises(TypeError, match=r"weight: got a DTensor of placements .*; wanted the weight whole"):
        layer.router(x)
    assert torch.equal(root(x), y)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_by_name(layout):
    layer = FP8FlowMoE(64, 128, 4, 2)
    rows = torch.nested.nested_tensor([torch.randn(2, 64), torch.randn(3, 64)], layout=layout)
    ids, probs = torch.zeros(5, 2, dtype=torch.int32), torch.ones(5, 2)
    of_x = r"x: got a nested tensor; wanted .*; pass torch\.cat\(x\.unbind\(\)\)"
    for call in (
        layer,
        layer.router,
        lambda x: layer(x, ids, probs),
        lambda x: fp8moe.torch.moe_experts(x, layer.w13, layer.w2, ids, probs),
    ):
        with pytest.raises(TypeError, match=of_x):
            call(rows)
    assert layer(torch.cat(rows.unbind())).shape == (5, 64)


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [("fp8_flow", "eager"), ("fp8_flow", "compiled"), ("fp8_flow", "checkpointed"), ("bf16", "compiled")],
)
def test_padding_goes_to_no_expert(recipe, mode):
    """Bitwise the results of the other tokens alone, whatever the padding's values, ids and probabilities."""
    layer, whole = module(recipe), tokens().detach()
    torch.manual_seed(0)
    mask = torch.rand(TOKENS) < 0.3
    kept = ~mask
    x = whole.masked_fill(mask[:, None], torch.nan)
    ids = torch.randint(-1, EXPERTS, (TOKENS, TOPK))
    probs = torch.rand(TOKENS, TOPK)

    def call(x, ids, probs, mask=None):
        return layer(x, ids, probs, padding_mask=mask)

    def own(x, mask):
        return layer(x, padding_mask=mask)

    run = {
        "eager": lambda f: f,
        "compiled": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
        "checkpointed": lambda f: functools.partial(checkpoint, f, use_reentrant=False),
    }[mode]

    def results(f, x, *rest):
        layer.zero_grad()
        x = x.clone().requires_grad_()
        rest = [t.clone().requires_grad_() if t.is_floating_point() else t for t in rest]
        y = f(x, *rest)
        (y * whole[: y.numel() // HIDDEN].view_as(y)).sum().backward()
        of_rows = [y.detach(), x.grad, *(t.grad for t in rest if t.is_floating_point())]
        return of_rows, [p.grad for p in layer.parameters()]

    # sizes of x's leading dimensions, for x and for the mask
    shaped = x.reshape(2, -1, HIDDEN), ids, probs, mask.reshape(2, -1)
    ours, weights = results(run(call), *shaped)
    ours = [t.reshape(TOKENS, -1) for t in ours]
    assert not any(t[mask].any() for t in ours)
    layer.zero_grad()
    alone = [t[kept].clone().requires_grad_() if t.is_floating_point() else t[kept] for t in (x, ids, probs)]
    y = layer(*alone)
    (y * whole[kept]).sum().backward()
    for a, b in zip(ours, (y, alone[0].grad, alone[2].grad), strict=True):
        assert torch.equal(a[kept], b)
    for a, b in zip(weights, layer.parameters(), strict=True):
        assert torch.equal(a, b.grad) if a is not None else b.grad is None
    # with the layer's own router, whose weight gets no gradient of the padding either
    rows, weights = results(run(own), x, mask)
    assert not any(t[mask].any() for t in rows)
    assert all(t.isfinite().all() and t.any() for t in (*rows, *weights))


def test_a_subclass_that_does_not_know_padding():
    class Own(FP8FlowMoE):
        def route(self, tokens):
            return super().route(tokens)

    layer, x = Own(64, 64, 4, 2), torch.ones(6, 64)
    layer(x)
    with pytest.raises(TypeError, match="unexpected keyword argument 'padding_mask'"):
        layer(x, padding_mask=torch.zeros(6, dtype=torch.bool))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow"])
def test_compiled_as_one_graph_on_cuda(recipe):
    from fp8moe.adapters.torch.layer import FP8FlowMoE

    torch.manual_seed(0)
    layer = FP8FlowMoE(256, 128, 8, 2, recipe=recipe, device="cuda")
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    torch.compiler.reset()
    actual = []
    for forward in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        y = forward(x)
        actual.append([y, *torch.autograd.grad(y, [x, *layer.parameters()], dy)])
    for a, b in zip(*actual, strict=True):
        assert torch.equal(a, b)
