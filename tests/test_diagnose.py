"""`fp8moe.torch.diagnose`: what it finds against NumPy and injected faults, and that it leaves no trace."""

import json
import random
import string
import sys
import threading
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from backends import over
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8moe
from fp8moe.__main__ import main
from fp8moe.adapters.torch import stats
from fp8moe.layer.casts import casts_of, layer_in_bf16, rounded
from fp8moe.torch import (
    FP8FlowMoE,
    GradientDiagnosis,
    LayerDiagnosis,
    LoRA,
    diagnose,
    moe_experts,
    moe_experts_permuted,
    quantize_fp8_weights,
)

E, H, F, T, K = 4, 128, 128, 48, 2
OPTIONS = {}, {"save": "fp8"}, {"recompute": "moe_expert"}, {"recipe": "fp8_blockwise"}


def layer_of(**options):
    return FP8FlowMoE(H, F, E, K, **options)


def square(y):
    return y.float().square().sum()


def operands(seed_rows=T):
    rng = np.random.default_rng()
    bf16 = ml_dtypes.bfloat16
    x, dy = (rng.standard_normal((seed_rows, H)).astype(bf16) for _ in range(2))
    w13, w2 = ((rng.standard_normal(s) / 11).astype(bf16) for s in ((E, 2 * F, H), (E, H, F)))
    ids = np.argsort(rng.random((seed_rows, E)), 1)[:, :K].astype(np.int32)
    return x, dy, w13, w2, ids, rng.random((seed_rows, K), np.float32)


def norm(a):
    return np.linalg.norm(np.asarray(a, np.float64))


def error(a, b):
    return norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)) / norm(b)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@over("size", reference=[(T,)], on_gpu=[(500,)])
def test_the_codes_are_those_that_the_layer_multiplies(backend, size, options):
    """The forms that the records of a step do not hold, transposed, are those that they hold."""
    x, dy, w13, w2, ids, probs = map(backend.upload, operands(size))
    codes = [fp8moe.quantize_weights(w) for w in (w13, w2)]
    _, saved = fp8moe.moe_forward(x, *codes, ids, probs, **options)
    _, step = fp8moe.moe_backward_input(saved, dy)
    for name in ("a", "dh"):
        codes_of = rounded(x, dy, *codes, saved, step, name).codes
        if saved.options.recipe == "fp8_flow":
            if saved.options.save == "fp8" and name == "a":
                continue  # the backward makes the columns of h's codes
            codes_of = fp8moe.scaling_aware_transpose(
                codes_of, saved.plan.expert_offsets, target="block", align_size=128
            )
        end = int(backend.download(saved.plan.expert_offsets)[-1])
        ours, layers = (backend.download(fp8moe.dequantize(q))[:end] for q in (codes_of, getattr(step, name)))
        np.testing.assert_array_equal(ours, layers)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@over("size", reference=[(T,)], on_gpu=[(500,)])
def test_the_layer_in_bf16(backend, size, options):
    """Without casts it is recipe "bf16"; with all of them the layer in FP8, but for roundings to bfloat16."""
    x, dy, w13, w2, ids, probs = map(backend.upload, operands(size))
    y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, **options)
    grads = fp8moe.moe_backward(saved, dy)
    of_bf16, expected = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="bf16")
    expected = fp8moe.moe_backward(expected, dy)
    how = x, dy, w13, w2, None, probs, saved.plan, saved.options
    exact, all_casts = layer_in_bf16(*how), layer_in_bf16(*how, casts_of(saved.options))
    down = backend.download
    for name in ("y", "dx", "dprobs", "dw13", "dw2"):
        base = down(of_bf16 if name == "y" else getattr(expected, name))
        fp8 = down(y if name == "y" else getattr(grads, name))
        # sums of the same numbers in another order: twice the rounding of bfloat16
        assert error(down(getattr(exact, name)), base) < 2**-8, name
        # the kernels quantise float32 values, here they are rounded to bfloat16 first: one in 2^5 falls to
        # the other neighbour, which adds (2^-5)^(1/2) = 0.18 of a cast's error
        assert error(down(getattr(all_casts, name)), fp8) < 0.5 * error(base, fp8), name


def quantised(values):
    """(values of the codes, scales) of 1 x 128 blocks, in float64."""
    values = np.asarray(values, np.float64)
    blocks = values.reshape(len(values), -1, 128)
    scales = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(-1, keepdims=True) / 448))
    codes = np.clip(blocks / scales, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return tuple(a.reshape(values.shape) for a in (codes * scales, np.broadcast_to(scales, blocks.shape)))


class Injected(nn.Module):
    """Changes the rows between two layers."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(x)


def model_of(change=None, **options):
    middle = [] if change is None else [Injected(change)]
    return nn.Sequential(nn.Linear(H, H), layer_of(**options), *middle, layer_of(**options))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_clean_model_is_within_the_limits(options, device):
    found = diagnose(model_of(**options).to(device), torch.randn(T, H, device=device), loss=square)
    assert [layer.name for layer in found.layers] == ["1", "2"]
    assert found.findings == []
    for layer in found.layers:
        for name, t in layer.tensors.items():
            if name == "y" or (name == "h" and "save" not in options):
                assert t.error is None
                assert 0 < t.deviation < 0.2
                continue
            assert t.error <= t.limit <= (2**-4 + 2**-8) * (1 + 1e-4), name  # small values of a tile
            assert "^T" in name or t.error > 2**-7, name
            assert t.saturated == t.nonfinite == t.lost == 0, name
        for name in ("dx", "dprobs", "dw13", "dw2"):
            g = layer.gradients[name]
            assert 2**-8 < g.error < g.limit, name
            # vectors of lengths 1 and norm_ratio, whose difference is error
            square_of_error = 1 + g.norm_ratio**2 - 2 * g.norm_ratio * g.cosine
            np.testing.assert_allclose(g.error**2, square_of_error, rtol=1e-6, atol=1e-12)
            assert 0.5 < sum(e**2 for e in g.of_casts.values()) ** 0.5 / g.error < 2, name
        assert "router" in layer.gradients
    gradients = [g for layer in found.layers for g in layer.gradients.values()]
    for cast, cost in found.costs.items():
        assert cost == pytest.approx(
            np.sqrt(np.mean([g.of_casts[cast] ** 2 for g in gradients if cast in g.of_casts]))
        )
    assert [*found.costs.values()] == sorted(found.costs.values(), reverse=True)
    assert {*found.costs} == {"x", "w13", "a", "w2", "dy", "dh"} | ({"h"} if "save" in options else set())
    json.dumps(found.as_dict(), allow_nan=False)
    assert "Every error is within" in str(found)


def test_the_numbers_are_those_of_numpy():
    x = torch.randn(T, H) * 2.0 ** torch.randint(-20, 4, (T, H))
    found = diagnose(layer_of(), x, loss=square).layers[0].tensors["x"]
    values = x.to(torch.bfloat16).double().numpy()
    of_codes, scales = quantised(values)
    assert found.error == pytest.approx(error(of_codes, values), rel=1e-5)
    assert found.flushed == ((of_codes == 0) & (values != 0)).sum() / (values != 0).sum() > 0
    assert found.exponents == (np.log2(scales.min()), np.log2(scales.max()))
    assert (found.saturated, found.nonfinite) == (0, 0)


def test_saturated_values_are_named_at_their_layer():
    """An infinity gives its block the scale 1, so that others above 448 saturate, too."""

    def change(x):
        x = x.clone()
        x[3, 7], x[3, 8], x[3, 9], x[4, 9] = float("inf"), 1000.0, -500.0, 1000.0
        return x

    found = diagnose(model_of(change), torch.randn(T, H), loss=square)
    first, second = found.layers
    assert (first.tensors["x"].saturated, first.tensors["x"].nonfinite) == (0, 0)
    assert second.tensors["x"].saturated == pytest.approx(3 / (T * H), rel=0.01)  # some may be zeros
    assert (second.tensors["x"].nonfinite, second.tensors["x"].nonfinite_rows) == (1, 1)
    assert any(text.startswith("3: x: 1 values in 1 rows are infinite or NaN") for text in found.findings)
    assert not any(text.startswith("1: x:") for text in found.findings)
    json.dumps(found.as_dict(), allow_nan=False)


def test_rows_of_nan_are_named():
    weight = torch.ones(T, 1)
    weight[[5, 11]] = float("nan")
    found = diagnose(model_of(), torch.randn(T, H), loss=lambda y: square(y * weight))
    dy = found.layers[1].tensors["dy"]
    assert (dy.nonfinite, dy.nonfinite_rows) == (2 * H, 2)
    (text,) = [text for text in found.findings if text.startswith("2: dy:")]
    assert "after this layer" in text
    assert found.layers[1].tensors["x"].nonfinite == 0
    assert any(text.startswith("2: dw2: error nan") for text in found.findings)


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_flushed_rows_of_a_weight_are_named(name):
    """Rows 2^-30 of the others in their tile have codes of zero."""
    model = model_of()
    w = getattr(model[2], name)
    with torch.no_grad():
        w[1, :64] *= 2**-30
    found = diagnose(model, torch.randn(T, H), loss=square)
    clean, t = (layer.tensors[name] for layer in found.layers)
    assert clean.lost == 0
    assert t.lost == 64 / (w.shape[0] * w.shape[1])
    assert t.flushed == pytest.approx(64 * w.shape[2] / w.numel(), abs=1e-4)
    (text,) = found.findings
    assert text.startswith(f"2: {name}: ")
    assert 'recipe="bf16"' in text


def test_a_flushed_column_of_rows_is_named():
    small = torch.ones(H)
    small[:32] = 2**-30
    found = diagnose(model_of(lambda x: x * small), torch.randn(T, H), loss=square)
    assert found.layers[0].tensors["x"].lost == 0
    assert found.layers[1].tensors["x"].lost == 32 / H
    assert any(text.startswith("3: x: 25.0% of its rows or columns") for text in found.findings)


def test_columns_that_only_the_transpose_loses_ask_for_other_tiles():
    """Tokens with a gradient far below that of others in their 128 rows, in columns of their own."""
    scale = torch.zeros(T, H)
    scale[: T // 2, H // 2 :], scale[T // 2 :, : H // 2] = 2**-30, 1.0
    x, ids, probs = torch.randn(T, H), torch.zeros(T, 1, dtype=torch.int32), torch.ones(T, 1)
    for recipe, expected in (("fp8_flow", {"dy^T": 0.5}), ("fp8_blockwise", {})):
        layer = FP8FlowMoE(H, F, 1, 1, recipe=recipe, router=False)
        found = diagnose(layer, (x, ids, probs), loss=lambda y: (y * scale * torch.randn(T, H)).sum())
        tensors = found.layers[0].tensors
        assert {
            name: tensors[name].lost for name in ("x", "dy", "x^T", "dy^T") if tensors[name].lost
        } == expected
        texts = [text for text in found.findings if "dy^T" in text]
        change = 'recipe="fp8_blockwise", which has a scale for each column of 128 rows'
        assert [text.rpartition(": ")[2] for text in texts] == [change] * len(expected)


def test_scales_too_small_for_products_ask_for_a_larger_loss():
    found = diagnose(layer_of(), torch.randn(T, H), loss=lambda y: square(y) * 2.0**-113)
    (text,) = [text for text in found.findings if text.startswith("(model): dy: ")]
    tensors = found.layers[0].tensors
    least = tensors["dy"].exponents[0] + tensors["w2"].exponents[0]
    assert least < -126
    assert text.endswith(f"multiply the loss by 2^{-126 - least}")


def test_a_gradient_beyond_its_limit_names_the_cast():
    gradients = {
        "dw2": GradientDiagnosis(0.9, 1.0, 0.4, 0.14, {"x": 0.02, "h": 0.39}),
        "dw13": GradientDiagnosis(0.9, 1.0, 0.4, 0.14, {"x": 0.3, "h": 0.03}),
        "dx": GradientDiagnosis(0.999, 1.0, 0.04, 0.14, {"x": 0.03}),
        "router": GradientDiagnosis(0.1, 1.0, 0.9, None, {}),
    }
    names = "x", "w13", "a", "w2", "dy", "dh", "a^T", "x^T", "dy^T", "dh^T"
    empty = dict.fromkeys(names, fp8moe.torch.TensorDiagnosis())
    layer = LayerDiagnosis("a", "Layer", "fp8_flow", "fp8", 1, 0, empty, gradients)
    first, second = layer.findings()
    assert first.startswith("dw2: ")
    assert first.endswith('cast of h (39.00%): save="bf16"')
    assert second.startswith("dw13: ")
    assert second.endswith('cast of x (30.00%): recipe="bf16" for this layer')


def test_tokens_that_are_routed_otherwise_are_counted():
    model, seen = model_of(), []
    model[2].router.register_forward_hook(lambda _, given, out: seen.append(out[1].sort(-1).values))
    found = diagnose(model, torch.randn(20 * T, H), loss=square)
    in_bf16, in_fp8 = seen
    assert found.layers[0].rerouted == 0
    assert found.layers[1].rerouted == (in_bf16 != in_fp8).any(-1).sum() > 0


def test_losses_are_those_of_the_two_recipes():
    model, x = model_of(), torch.randn(T, H)
    found = diagnose(model, x, loss=square)
    assert square(model(x)).item() == pytest.approx(found.loss, rel=1e-6)
    model[1].recipe = model[2].recipe = "bf16"  # torch's product on the CPU, other sums
    assert square(model(x)).item() == pytest.approx(found.loss_in_bf16, rel=2**-6)


# ---------------------------------------------------------------- other forms of the experts


class Function(nn.Module):
    """`moe_experts`, or with ``permuted`` the same on permuted rows, as a dispatcher hands them over."""

    def __init__(self, ids, probs, permuted=False, pair=False, ffn=F, **options):
        super().__init__()
        parts = (torch.randn(E, 2 * ffn, H) / 11).chunk(1 + pair, 1)
        self.w13 = nn.ParameterList([nn.Parameter(p.contiguous()) for p in parts])
        self.w2 = nn.Parameter(torch.randn(E, H, ffn) / 11)
        self.ids, self.probs, self.permuted, self.options = ids, nn.Parameter(probs), permuted, options

    def forward(self, x):
        w13 = (*self.w13,) if len(self.w13) > 1 else self.w13[0]
        if not self.permuted:
            return moe_experts(x, w13, self.w2, self.ids, self.probs, **self.options)
        plan = fp8moe.torch.plan_topk(self.ids, E)
        rows = fp8moe.torch.permute(x, plan, self.probs)
        given = rows.data, w13, self.w2, plan.tokens_per_expert, rows.probs
        return fp8moe.torch.unpermute(moe_experts_permuted(*given, **self.options), plan)


def routing():
    return torch.rand(T, E).argsort(-1)[:, :K].int(), torch.rand(T, K)


def test_permuted_rows_are_those_of_tokens():
    ids, probs = routing()
    tokens, permuted = Function(ids, probs), Function(ids, probs, permuted=True)
    permuted.load_state_dict(tokens.state_dict())
    x = torch.randn(T, H)
    a, b = (diagnose(m, x, loss=square).layers[0] for m in (tokens, permuted))
    assert a.tensors["a"] == b.tensors["a"]
    assert a.tensors["w13"] == b.tensors["w13"]
    for name in ("dw13", "dw2"):  # dy of a row is rounded to bfloat16 in torch's sum of permuted rows
        assert a.gradients[name].error == pytest.approx(b.gradients[name].error, rel=0.1)
    assert (a.rerouted, b.rerouted) == (0, None)


@pytest.mark.parametrize(
    "given",
    [{"pair": True}, {"ffn": 48}, {"recipe": "bf16"}, {"bias13": torch.randn(E, 2 * F)}],
    ids=lambda given: next(iter(given)),  # the same in every process of a run
)
def test_forms_of_weights(given):
    """What is padded counts nowhere, and a layer in bf16 is diagnosed in fp8_flow."""
    model = Function(*routing(), **given)
    found = diagnose(model, torch.randn(T, H), loss=square)
    (layer,) = found.layers
    assert found.findings == []
    assert layer.recipe == "fp8_flow"
    assert layer.tensors["w2"].exponents[1] < 0  # of padding it is 0
    (layer,) = diagnose(model, torch.randn(T, H), loss=square, recipe="fp8_flow", save="fp8").layers
    assert 2**-7 < layer.tensors["h"].error < layer.tensors["h"].limit


def test_weights_that_are_codes():
    model = Function(*routing())
    codes = quantize_fp8_weights(model.w13[0].detach(), model.w2.detach())
    x = torch.randn(T, H, requires_grad=True)
    found = diagnose(model, lambda: square(moe_experts(x, *codes, model.ids, model.probs)))
    tensors = found.layers[0].tensors
    assert tensors["w13"].error == tensors["w2"].error == 0
    assert tensors["x"].error > 2**-7
    assert x.grad is None


def test_frozen_layers():
    """Of codes only; none of their buffers is copied."""
    weights = quantize_fp8_weights(torch.randn(E, 2 * F, H) / 11, torch.randn(E, H, F) / 11)
    layer = FP8FlowMoE.from_quantized(*weights, topk=K)
    codes = {name: t.clone() for name, t in layer.state_dict().items()}
    found = diagnose(nn.Sequential(nn.Linear(H, H), layer), torch.randn(T, H), loss=square)
    tensors = found.layers[0].tensors
    assert found.findings == []
    assert tensors["w13"].error == tensors["w2"].error == 0 < 2**-7 < tensors["dh"].error
    assert "router" in found.layers[0].gradients
    assert all(
        torch.equal(t.view(torch.uint8), codes[n].view(torch.uint8)) for n, t in layer.state_dict().items()
    )


def test_transformers_experts():
    transformers = pytest.importorskip("transformers", minversion="5.23")
    import fp8moe.transformers

    fp8moe.transformers.enable(save="fp8", name="fp8moe_diagnosed")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": E, "num_experts_per_tok": K}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 32}
    config = transformers.Qwen3MoeConfig(**sizes, vocab_size=128, intermediate_size=64)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="fp8moe_diagnosed")
    ids = torch.randint(0, 128, (2, 16))
    model.train()
    found = diagnose(model, {"input_ids": ids, "labels": ids})
    assert [layer.name for layer in found.layers] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert {(layer.kind, layer.save) for layer in found.layers} == {("Qwen3MoeExperts", "fp8")}
    assert all({"router", "dw13"} <= {*layer.gradients} for layer in found.layers)
    assert found.findings == []
    model.activation_checkpointing_enable()
    again = diagnose(model, {"input_ids": ids, "labels": ids})
    assert [layer.tensors for layer in again.layers] == [layer.tensors for layer in found.layers]


def test_what_a_gpu_computes_again_in_another_thread(monkeypatch):
    """Autograd's own, in which a backward on a GPU runs."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.experts, self.last = nn.Linear(H, H), layer_of(), nn.Linear(H, H)

        def part(self, x):
            return self.last(self.experts(self.first(x)).tanh())

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=False)

    model, x = Checkpointed(), torch.randn(T, H)
    found = diagnose(model, x, loss=square)
    own, in_backward = threading.get_ident(), lambda: torch._C._current_graph_task_id() != -1
    monkeypatch.setattr(stats, "threading", SimpleNamespace(get_ident=lambda: own + in_backward()))
    again = diagnose(model, x, loss=square)
    assert (again.layers, again.loss) == (found.layers, found.loss)
    assert stats.observers == {}


def test_layers_without_a_gradient_are_named():
    """Also a layer without tokens, and one whose tokens have no expert."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.frozen, self.empty = layer_of(), layer_of(), layer_of()

        def forward(self, x, ids):
            with torch.no_grad():
                x = self.frozen(x)
            return self.used(x, ids, torch.rand(T, K)).square().sum() + self.empty(x[:0]).sum()

    found = diagnose(Model(), (torch.randn(T, H), torch.full((T, K), -1)))
    assert [layer.name for layer in found.layers] == ["used", "empty"]
    assert [layer.tokens for layer in found.layers] == [T, 0]
    assert found.not_reached == ("frozen",)
    assert "no gradient reached them: frozen" in str(found)
    assert found.findings == []
    assert diagnose(model_of(), torch.randn(T, H), loss=square).not_reached == ()


def test_compiled_modules_run_eagerly():
    def refuse(*_):
        raise AssertionError("compiled")

    compiled = torch.compile(model_of(), backend=refuse)
    assert [layer.name for layer in diagnose(compiled, torch.randn(T, H), loss=square).layers] == ["1", "2"]


# ---------------------------------------------------------------- the model is as before


class Everything(nn.Module):
    """Dropout, statistics of batches, a parameter with a ``main_grad``, experts with copies of weights."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(H, H), nn.BatchNorm1d(H), nn.Dropout(0.5)
        self.off = nn.Dropout(0.5)
        self.experts = layer_of()
        self.seen, self.fail_at, self.calls = [], None, 0

    def forward(self, x):
        self.seen.append(self.calls)
        self.calls += 1
        self.last = x
        x = self.off(self.drop(self.norm(self.first(x)))) + random.random() + np.random.rand()  # noqa: NPY002
        y = self.experts(x)
        if self.fail_at == ("forward", len(self.seen)):
            raise KeyError("forward")
        if self.fail_at == ("backward", len(self.seen)):
            y.register_hook(self.fail)
        return y

    def fail(self, _):
        raise KeyError("backward")


def state(model):
    """Everything that a training step changes."""
    of_tensors = {
        **model.state_dict(),
        **{f"{n}.grad": p.grad for n, p in model.named_parameters()},
        **{f"{n}.main_grad": getattr(p, "main_grad", None) for n, p in model.named_parameters()},
        "cpu generator": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.random.get_state()[1].astype(np.int64)),  # noqa: NPY002
    }
    others = {
        "python": random.getstate(),
        "numpy": np.random.get_state()[2],  # noqa: NPY002
        "modes": [m.training for m in model.modules()],
        "attributes": (model.calls, id(getattr(model, "last", None))),
        "added": [hasattr(p, "grad_added_to_main_grad") for p in model.parameters()],
        "copies": model.experts.fp8_weight_nbytes,
        "statistics": id(model.experts.stats()),
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "grads": [id(p.grad) for p in model.parameters()],
    }
    return {n: None if t is None else t.detach().clone() for n, t in of_tensors.items()}, others


@pytest.mark.parametrize("fail_at", [None, ("forward", 2), ("backward", 1), ("backward", 2)])
def test_the_model_is_as_before(fail_at):
    model, x = Everything(), torch.randn(T, H)
    model.experts.collect_stats = True
    model.first.weight.main_grad = torch.randn(H, H)
    model.experts.w13.main_grad = torch.randn(E, 2 * F, H)
    square(model(x)).backward()
    model.experts.quantize_weights()
    model.off.eval()
    model.fail_at = fail_at
    model.seen.clear()
    before = state(model)
    with fp8moe.trace() as traced:
        if fail_at is None:
            first, second = (str(diagnose(model, x, loss=square)) for _ in range(2))
            assert first == second  # from the same state of the generators
        else:
            with pytest.raises(KeyError, match=fail_at[0]):
                diagnose(model, x, loss=square)
    assert traced.casts == traced.num_launches == 0
    after = state(model)
    assert before[1] == after[1]
    for name, value in before[0].items():
        given = after[0][name]
        assert (value is None and given is None) or torch.equal(value, given), name
    model.fail_at = None
    square(model(x)).backward()  # and it trains as before


# ---------------------------------------------------------------- refusals


CHECKPOINTED = nn.Sequential(layer_of())


def reentrant():
    x = torch.ones(1, H, requires_grad=True)
    return square(torch.utils.checkpoint.checkpoint(CHECKPOINTED, x, use_reentrant=True))


@pytest.mark.parametrize(
    ("model", "batch", "loss", "error", "match"),
    [
        (print, torch.ones(1, H), square, TypeError, "model: got builtin"),
        (nn.Linear(H, H), torch.ones(1, H), square, ValueError, "met no experts of this library"),
        (CHECKPOINTED, reentrant, None, ValueError, r"no gradient reaches its experts \(0\).*use_reentrant"),
        (layer_of(), torch.ones(1, H), None, ValueError, r"loss: got shape \[1, 128\]; wanted a scalar"),
        (layer_of(), torch.ones(1, H), lambda y: y.detach().sum(), ValueError, "without a gradient"),
        (layer_of(), 3, square, TypeError, "batch: got int"),
        (layer_of(), lambda: 1.0, square, TypeError, "loss: got a function with a batch"),
        (layer_of(), torch.ones(1, H), 3, TypeError, "loss: got int"),
    ],
)
def test_refusals(model, batch, loss, error, match):
    with pytest.raises(error, match=match):
        diagnose(model, batch, loss=loss)


def test_adapters_and_calls_within_another_are_refused():
    model = Function(*routing())
    model.w13[0].requires_grad_(False)
    model.w2.requires_grad_(False)
    lora = LoRA(torch.randn(E, 4, H).requires_grad_(), torch.zeros(E, 2 * F, 4).requires_grad_(), 4), None
    model.options = {"lora": lora}
    with pytest.raises(NotImplementedError, match=r"\(model\): got experts with adapters"):
        diagnose(model, torch.ones(T, H), loss=square)
    outer = layer_of()
    with pytest.raises(RuntimeError, match="within another"):
        diagnose(outer, lambda: diagnose(outer, torch.ones(1, H), loss=square).loss)
    for name, value in (("recipe", "bf16"), ("save", "fp4")):
        with pytest.raises(ValueError, match=name):
            diagnose(outer, torch.ones(1, H), loss=square, **{name: value})


# ---------------------------------------------------------------- the command


def test_the_command_on_a_model_of_transformers(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", minversion="5.23")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.train_from_iterator([*string.ascii_letters], tokenizers.trainers.BpeTrainer(show_progress=False))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": E, "num_experts_per_tok": K}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 32}
    config = transformers.Qwen3MoeConfig(**sizes, vocab_size=words.get_vocab_size(), intermediate_size=64)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    # of one token again and again, dprobs would be a few sums that may cancel, with any error
    (tmp_path / "text").write_text("".join(random.choices(string.ascii_letters, k=256)))
    arguments = "diagnose", str(tmp_path), "--text", str(tmp_path / "text"), "--device", "cpu"
    capsys.readouterr()
    assert main([*arguments, "--tokens", "256", "--save", "fp8", "--json"]) == 0
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert (layer["name"], layer["tokens"], layer["save"]) == ("model.layers.0.mlp.experts", 256, "fp8")
    assert main([*arguments, "--tokens", "1"]) == 2
    assert "--text: got 1 tokens; wanted 2 or more" in capsys.readouterr().err


SCRIPT = """
import torch
from fp8moe.torch import FP8FlowMoE

def clean():
    return FP8FlowMoE(128, 128, 4, 2), torch.randn(16, 128), lambda y: y.square().sum()

def flushed():
    layer, *rest = clean()
    layer.w2.data[:, :64] *= 2**-30
    return layer, *rest

def wrong():
    return FP8FlowMoE(128, 128, 4, 2)
"""


def test_the_command_on_a_function(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    script = tmp_path / "diagnosed_script.py"
    script.write_text(SCRIPT)
    assert main(["diagnose", f"{script}:clean"]) == 0
    assert "Every error is within the limits" in capsys.readouterr().out
    assert main(["diagnose", "diagnosed_script:flushed"]) == 1  # its folder is on the path now
    assert "(model): w2: 50.0% of its rows or columns are lost" in capsys.readouterr().out
    for function, words in (("wrong", "wanted (model, batch)"), ("other", "does not define")):
        assert main(["diagnose", f"{script}:{function}"]) == 2
        assert words in capsys.readouterr().err
    for option in (("--device", "cpu"), ("--text", str(script)), ("--tokens", "16")):
        assert main(["diagnose", f"{script}:clean", *option]) == 2
        assert f"{option[0]}: got it with a function" in capsys.readouterr().err
    assert main(["diagnose", str(script)]) == 2
    assert "wanted one of its functions, as in" in capsys.readouterr().err
    assert main(["diagnose", f"{tmp_path}/none.py:f"]) == 2
    assert "wanted a file that exists" in capsys.readouterr().err
