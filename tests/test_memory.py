"""What a layer saves for its backward, predicted and held; h in FP8, whose error has a derived bound."""

import argparse
import random
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from backends import EVERYWHERE, only_on_cpu, over
from cases import ACTIVATIONS, BF16, GPT_OSS, SEED, assert_same, generator, layer_inputs, same_bits, values

import fp8moe
from fp8moe import Activation, Quantized, QuantTensor
from fp8moe.__main__ import main
from fp8moe.layer.permuted_rows import PlacedRows
from fp8moe.layer.recipes import RECIPES
from fp8moe.ops.bias import raw_expert_sums, sums_of_chunks
from fp8moe.ops.swiglu import (
    coded_h,
    raw_swiglu_quantize,
    raw_swiglu_quantize_backward,
    transposed_y,
)
from fp8moe.runtime.dispatch import operation
from fp8moe.runtime.record_trees import nbytes
from fp8moe.torch import FP8FlowMoE
from fp8moe.torch import memory as torch_memory

RNG = generator()
OTHERS = (*ACTIVATIONS[1:], Activation("quick_gelu"))
OTHER = random.Random(SEED).choice([a for a in OTHERS if a.function != "gelu"])


@operation
def forward_and_codes(h, probs, offsets, activation):
    codes = coded_h(h)
    options = {"activation": activation, "expert_offsets": offsets, "align_size": 128}
    return raw_swiglu_quantize(h, probs, **options, codes_of_h=codes), codes


@operation
def backward_of(grad, h, probs, offsets, activation, transposed, with_sums):
    """All results of the backward, of h or of its codes."""
    of_rows = {"expert_offsets": offsets, "align_size": 128}
    plan, sums = PlacedRows(None, offsets, grad.shape[0], grad.shape[0], 128), None
    if with_sums:
        sums = sums_of_chunks(h.shape, plan)
    y = transposed_y(h, activation, **of_rows)
    options = {**of_rows, "activation": activation, "transposed": transposed}
    grads = raw_swiglu_quantize_backward(grad, h, probs, **options, sums=sums, y=y)
    return grads, y, None if sums is None else raw_expert_sums(sums, plan)


def awkward_h(rng, rows, columns):
    """Blocks of very different scales, a value much larger than the rest of its block, ties between codes,
    zeros, NaN, and infinities of both signs in both halves, one of them beside a NaN."""
    h = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-40, 4, (rows, 1))
    h[::5] = rng.standard_normal((len(h[::5]), columns))
    h[1::5] = rng.choice([1.0625, -1.1875, 0.53125, -3.625, 2.0**-9], (len(h[1::5]), columns))
    h[2::7, ::128] = 400
    h[3], h[4, :128] = 0, 0
    h[6, 1], h[7, 5], h[8, -3], h[9, 5], h[10, -3] = np.nan, np.inf, np.inf, -np.inf, -np.inf
    h[11, 1:4] = np.nan, np.inf, -0.0
    return h.astype(BF16)


def quantized_h(h):
    """What save="fp8" writes of h: `quantize` of it, where infinities have become NaN."""
    return fp8moe.quantize(np.where(np.isinf(h), np.array(np.nan, h.dtype), h))


@over(
    "activation, rows",
    reference=[(Activation(), 384), (GPT_OSS, 384), (OTHER, 500)],
    on_cpu=[(Activation(), 384), (Activation(), 500)],  # 500 rows do not fill tiles
    on_gpu=[(a, rows) for a in (*ACTIVATIONS, OTHERS[-1]) for rows in (384, 500, 8192)],
)
def test_codes_of_h_stand_for_h(backend, activation, rows):
    """The forward writes what `quantize` makes of h, NaN for infinities, and changes nothing else; the
    backward of the codes is bit for bit that of the values that they represent, which bfloat16 holds
    exactly."""
    width = 256
    h = awkward_h(RNG, rows, activation.columns(width))
    probs, grad = RNG.random(rows).astype(np.float32), values(RNG, (rows, width), BF16)
    offsets = np.array([0, 128, 128, 384], np.int32)
    options = {"activation": activation, "expert_offsets": offsets, "align_size": 128}
    y, codes = backend.both(forward_and_codes, h, probs, offsets, activation)[1]
    assert_same(y, backend.both(fp8moe.swiglu_quantize, h, probs, **options)[1])
    wanted = quantized_h(h)
    assert_same((codes.data[:384], codes.scales[:384]), (wanted.data[:384], wanted.scales[:384]))
    represented = fp8moe.dequantize(wanted, dtype="bfloat16")
    assert same_bits(represented.astype(np.float32), fp8moe.dequantize(wanted))
    for transposed, with_sums in ((True, False), (True, True), (False, False)):
        others = probs, offsets, activation, transposed, with_sums
        of_codes, of_values = (backend.both(backward_of, grad, x, *others)[1] for x in (wanted, represented))
        rowwise = [replace(g, dh=g.dh.rowwise if transposed else g.dh) for g, *_ in (of_codes, of_values)]
        if rows % 128 == 0:
            assert_same(*rowwise)
            assert_same(of_codes[2], of_values[2])
        else:
            nearby = differences(represented.astype(np.float32), grad.astype(np.float32), probs, activation)
            assert_neighbours(*(g.dh for g in rowwise), nearby)
            if with_sums:
                for expert, (start, end) in enumerate(pairwise(offsets)):
                    sums = np.stack([g[2][expert] for g in (of_codes, of_values)])
                    most = nearby[start:end].sum(axis=0) + 2.0**-16 * np.abs(sums).max(axis=0)
                    assert_near(*sums, most)
        columns = [(of_codes[1], of_values[1])]
        if transposed:
            columns.append((of_codes[0].dh.columnwise, of_values[0].dh.columnwise))
        for pair in columns if rows % 128 == 0 else ():  # rows of no expert are not written
            assert_same(*((q.data[:, :384], q.scales) for q in pair))


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_codes_of_rows_that_are_not_whole_blocks(backend):
    """Halves of 192 columns: no kernel writes the codes in the same pass."""
    h = awkward_h(RNG, 40, 384)
    codes = backend.both(forward_and_codes, h, None, None, Activation())[1][1]
    assert_same(codes, quantized_h(h))


COUNTS = [((30, 1, 40, 5, 20),), ((128, 256, 128, 128, 128),)]  # tokens of each expert


@over("counts", reference=COUNTS, on_cpu=COUNTS, on_gpu=COUNTS)
def test_infinities_of_h_reach_the_gradients(backend, counts):
    """Experts 0 to 3 have an infinite column of h, by their bias: NaN is in every gradient that reads it, as
    for a NaN in h, nowhere else, and wherever save="bf16" has a value that is not finite."""
    ffn, column, rows = 128, 37, sum(counts)
    w13, w2 = values(RNG, (5, 2 * ffn, 128), BF16), values(RNG, (5, 128, ffn), BF16)
    x, dy = values(RNG, (rows, 128), BF16), values(RNG, (rows, 128), BF16)
    bias = np.zeros((5, 2 * ffn), np.float32)
    bias[[0, 1], column] = 3.4e38, -3.4e38  # finite in float32, infinite in bfloat16
    bias[[2, 3], ffn + column] = 3.4e38, -3.4e38
    given = x, w13, w2, np.array(counts, np.int32), RNG.random(rows, np.float32), bias, dy
    plain, coded = (backend.both(layer_gradients, *given, save)[1] for save in ("bf16", "fp8"))
    hit, dw13, dw2 = np.arange(rows) < rows - counts[-1], np.zeros(w13.shape, bool), np.zeros(w2.shape, bool)
    dw13[:4, column] = dw13[:2, ffn + column] = dw2[:4, :, column] = True
    dx = np.broadcast_to(hit[:, None], x.shape)
    for name, nan in {"dx": dx, "dprobs": hit, "dw13": dw13, "dw2": dw2}.items():
        got, of_plain = (np.asarray(getattr(g, name), np.float32) for g in (coded, plain))
        np.testing.assert_array_equal(np.isnan(got), nan, err_msg=name)
        assert np.isfinite(got[~nan]).all(), name
        assert np.isfinite(of_plain[~nan]).all(), name
    assert not np.isfinite(plain.dprobs[hit]).any()
    assert np.isnan(plain.dw13[:2, column]).all()


def layer_gradients(x, w13, w2, counts, probs, bias, dy, save):
    _, saved = fp8moe.moe_forward_permuted(x, w13, w2, counts, probs, bias13=bias, save=save)
    return fp8moe.moe_backward(saved, dy)


def test_statistics_count_infinities_of_h():
    """An expert's column of h is infinite: so is the activation's, and each row has one such value."""
    counts = []
    for save in ("bf16", "fp8"):
        layer = FP8FlowMoE(128, 128, 1, 1, save=save, router=False, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.w13[0, 37] = 3e38
        layer.collect_stats = True
        x = torch.full((5, 128), 448.0, dtype=torch.bfloat16)
        y = layer(x, topk_ids=torch.zeros(5, 1, dtype=torch.int32), topk_probs=torch.ones(5, 1))
        y.sum().backward()
        counts.append(layer.stats().a.nonfinite.item())
    assert counts == [5, 5]


def differences(h, grad, probs, activation):
    """The most by which dh of two kernels differs: rows that do not fill tiles take one kernel for float32
    values and another for bfloat16's. Each takes its sigmoid, tanh or erf within 2^-20, which is absolute
    where the function or its derivative comes near zero: a gate's value and slope are that function times a
    factor and a summand of at most 1 + |a|^3 (GeLU's tanh; beyond 8 all are 0 or 1), and the linear half."""
    width = grad.shape[1]
    a, u = h[:, :width], h[:, width:] if activation.gated else np.ones_like(grad)
    with np.errstate(invalid="ignore", over="ignore"):
        most = (
            2.0**-18 * np.abs(grad * probs[:, None]) * (1 + np.minimum(np.abs(a), 8) ** 3) * (1 + np.abs(u))
        )
    return np.tile(most, 2 if activation.gated else 1)


def assert_neighbours(a, b, nearby):
    """Codes of values that are ``nearby``: beside that a code apart, 2^-3 of a value, 2^-9 of the scale."""
    values = [fp8moe.dequantize(q) for q in (a, b)]
    scales = np.maximum(*(np.repeat(q.scales, 128, axis=1) for q in (a, b)))
    code = np.maximum(2.0**-3 * np.abs(values).max(axis=0), 2.0**-9 * scales)
    assert_near(*values, code + nearby)
    assert (a.scales != b.scales).mean() <= 1e-3


def assert_near(a, b, most):
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    with np.errstate(invalid="ignore"):
        assert (~(np.abs(a - b) > most)).all()


def changes(h, codes):
    """The most by which rounding to e4m3 moves each value: 2^-4 of it, or half of the subnormal spacing 2^-9
    under its block's scale, which is below amax / 224."""
    blocks = np.abs(h.reshape(len(h), -1, 128))
    floor = np.broadcast_to(blocks.max(axis=2, keepdims=True) * 2.0**-10 / 224, blocks.shape)
    most = np.maximum(2.0**-4 * blocks, floor).reshape(h.shape)
    assert (np.abs(fp8moe.dequantize(codes) - h) <= most).all()
    return most


def slopes(activation):
    """The largest magnitudes of the gate's first and second derivative, from a fine grid: Lipschitz bounds
    of the function and of its derivative. None, None for squared ReLU, whose first is not bounded."""
    if activation.function == "relu2":
        return None, 2.0
    a = np.linspace(-12, 12, 48_001)[:, None] / activation.alpha
    first = fp8moe.swiglu_backward(np.ones_like(a), a, activation=_gate(activation)).dh[:, 0]
    second = np.abs(np.diff(first) / np.diff(a[:, 0])).max()
    return np.abs(first).max() * (1 + 1e-5), second * (1 + 1e-3)


def bounds(h, most, grad, probs, activation):
    """(of y, of dh, of dprobs): the most that a change of h by at most ``most`` changes them, by the mean
    value theorem; where a limit of the clamp lies in between, a gradient may appear or vanish."""
    width = grad.shape[1]
    a, of_a = np.ascontiguousarray(h[:, :width]), most[:, :width]
    limit = np.inf if activation.clamp is None else activation.clamp
    first, second = slopes(activation)
    if first is None:
        first = 2 * (np.abs(a) + of_a)
    gate = fp8moe.swiglu(np.minimum(a, limit), activation=_gate(activation))
    slope = np.abs(fp8moe.swiglu_backward(np.ones_like(a), a, activation=_gate(activation)).dh)
    b, of_b = np.ones_like(a), np.zeros_like(a)
    if activation.gated:
        b, of_b = np.clip(h[:, width:], -limit, limit) + activation.linear_offset, most[:, width:]
    p, g = probs[:, None], np.abs(grad)
    b_after, gate_after = np.abs(b) + of_b, np.abs(gate) + first * of_a
    of_y = np.abs(gate) * of_b + b_after * first * of_a
    crossed = np.abs(a - limit) <= of_a
    da = g * p * (slope * of_b + b_after * second * of_a + crossed * b_after * first)
    db = g * p * (first * of_a + (np.abs(np.abs(h[:, -width:]) - limit) <= of_b) * gate_after)
    of_dh = np.concatenate([da, db], axis=1) if activation.gated else da
    return p * of_y, of_dh, (g * of_y).sum(axis=1)


def _gate(activation):
    alpha = activation.alpha if activation.function == "silu" else 1.0
    return Activation(activation.function, alpha=alpha)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_error_of_saving_h_in_fp8_is_bounded(activation):
    """Of y, dh and dprobs, in float64: for ties, for values that vanish beside a large one of their block,
    and where the sigmoid bends most. The bound is not loose either: some dh comes within a factor of 16."""
    width = 256
    h = awkward_h(RNG, 300, activation.columns(width)).astype(np.float64)
    h[~np.isfinite(h)] = 0
    codes = fp8moe.quantize(h.astype(np.float32))
    most = changes(h, codes)
    grad, probs = RNG.standard_normal((300, width)), RNG.random(300)
    rounded = fp8moe.dequantize(codes).astype(np.float64)
    of_y, of_dh, of_dprobs = bounds(h, most, grad, probs, activation)
    one, two = (fp8moe.swiglu_backward(grad, x, probs, activation=activation) for x in (h, rounded))
    y = [fp8moe.swiglu(x, probs, activation=activation) for x in (h, rounded)]
    tiny = 2.0**-40  # of the float64 computation
    assert (np.abs(y[0] - y[1]) <= of_y * (1 + tiny) + tiny * np.abs(y[0])).all()
    assert (np.abs(one.dh - two.dh) <= of_dh * (1 + tiny) + tiny * np.abs(one.dh)).all()
    assert (np.abs(one.dprobs - two.dprobs) <= of_dprobs * (1 + tiny) + tiny).all()
    assert (np.abs(one.dh - two.dh) > of_dh / 16).any()


@pytest.mark.parametrize("activation", [Activation(), GPT_OSS, Activation("relu2")])
def test_layer_with_h_in_fp8(activation):
    """The forward is bit for bit the same; what the backward computes of h stays within the derived bounds,
    and half of h's bytes are saved. The operands of the weight gradients are compared, as these are sums
    over them."""
    inputs, dy = layer_inputs(7, tokens=128, ffn=256, dropped=0.1)
    inputs["w13"] = inputs["w13"][:, : activation.columns(256)].copy()
    rng = np.random.default_rng(8)
    bias = rng.standard_normal((4, activation.columns(256))) * 2.0 ** rng.integers(-6, 3, (4, 1))
    options = {"activation": activation, "bias13": bias.astype(np.float32)}
    with fp8moe.trace() as t:
        y, plain = fp8moe.moe_forward(**inputs, **options)
        grads, operands = fp8moe.moe_backward_input(plain, dy)
    with fp8moe.trace() as u:
        same, saved = fp8moe.moe_forward(**inputs, **options, save="fp8")
        coded, others = fp8moe.moe_backward_input(saved, dy)
    assert same_bits(y, same)
    assert (t.casts, t.launches) == (u.casts, u.launches)
    assert_same(saved.h, fp8moe.quantize(plain.h))
    assert plain.nbytes - saved.nbytes == plain.h.nbytes - saved.h.data.nbytes - saved.h.scales.nbytes
    h, probs = plain.h.astype(np.float64), plain.probs.astype(np.float64)
    dout = fp8moe.dequantize(fp8moe.permute(fp8moe.quantize(dy), plain.plan).data, dtype="bfloat16")
    rows = plain.plan.expert_offsets[-1]
    da = fp8moe.grouped_gemm(
        fp8moe.quantize(dout), fp8moe.quantize_weights(inputs["w2"]).columnwise, plain.plan.expert_offsets
    ).astype(np.float64)
    of_y, of_dh, of_dprobs = bounds(h, changes(h, saved.h), da, probs, activation)
    for one, two, bound in ((operands.a, others.a, of_y), (operands.dh, others.dh, of_dh)):
        # both are rounded to codes, 2^-4 of a value or half of the spacing under the tile's scale, twice:
        # when they are made row-wise, and moved to that scale
        values = [fp8moe.dequantize(q)[:rows].astype(np.float64) for q in (one, two)]
        tile = [np.repeat(np.repeat(q.scales.T, 128, 0), 128, 1)[:rows] for q in (one, two)]
        rounding = sum(
            2.0**-3 * np.abs(v) / (1 - 2.0**-4) + s * 2.0**-9 for v, s in zip(values, tile, strict=True)
        )
        assert (np.abs(values[0] - values[1]) <= bound[:rows] + rounding).all()
    # dprobs of a token's expert is that of its row: the same terms in float32, summed in float64
    terms = (np.abs(da) * np.abs(fp8moe.swiglu(h, activation=activation))).sum(axis=1)
    of_rows, change = of_dprobs + 2.0**-18 * (terms + of_dprobs), np.abs(coded.dprobs - grads.dprobs)
    for expert, first in enumerate(plain.plan.expert_offsets[:-1]):
        token, entry = np.nonzero(inputs["topk_ids"] == expert)  # rows in the order of tokens
        assert (change[token, entry] <= of_rows[first : first + len(token)]).all()
    whole, halves = fp8moe.moe_backward(saved, dy), fp8moe.moe_backward_weight(others)
    assert_same((whole.dx, whole.dw13, whole.dw2), (coded.dx, halves.dw13, halves.dw2))


@pytest.mark.parametrize("gradients", [("dw2",), ("dx", "dw2"), ("dx",), ("dw13",), ("dbias13", "dw2")])
def test_subsets_of_gradients_with_h_in_fp8(gradients):
    """Each is bit for bit what a backward of all computes of the same codes."""
    inputs, dy = layer_inputs(3, dropped=0.1)
    bias = RNG.standard_normal((4, 256)).astype(np.float32)
    _, saved = fp8moe.moe_forward(**inputs, bias13=bias, save="fp8")
    whole = fp8moe.moe_backward(saved, dy)
    _, alone = fp8moe.moe_forward(**inputs, bias13=bias, save="fp8", gradients=gradients)
    if gradients == ("dw2",):  # of the codes that the forward multiplied, and nothing of h is saved
        assert alone.h is None
        assert_same(alone.a, fp8moe.moe_forward(**inputs, bias13=bias, gradients=gradients)[1].a)
        alone = saved
    assert isinstance(alone.h, QuantTensor)
    got = fp8moe.moe_backward(alone, dy, gradients=gradients)
    for name in gradients:
        assert same_bits(getattr(got, name), getattr(whole, name)), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"save": "int8"}, "save: got 'int8'; wanted"),
        ({"save": "fp8", "recipe": "bf16"}, "save: got 'fp8' with recipe='bf16'; wanted it with 'fp8_flow'"),
        ({"save": "fp8", "recipe": "fp8_blockwise"}, "save: got 'fp8' with recipe='fp8_blockwise'"),
        ({"save": "fp8", "recompute": "moe_expert"}, "save: got 'fp8' with recompute='moe_expert'"),
    ],
)
def test_what_cannot_be_saved_in_fp8_is_refused(options, words):
    inputs, _ = layer_inputs(3)
    with pytest.raises(ValueError, match=words):
        fp8moe.moe_forward(**inputs, **options)


def test_altered_codes_of_h_are_refused():
    inputs, dy = layer_inputs(3)
    _, saved = fp8moe.moe_forward(**inputs, save="fp8")
    _, plain = fp8moe.moe_forward(**inputs)
    other = fp8moe.quantize(plain.h, fmt="e5m2")
    for h in (plain.h, other, replace(saved.h, data=saved.h.data[:-1].copy()), Quantized(saved.h)):
        with pytest.raises((TypeError, ValueError), match=r"\bsaved\.h\b"):
            fp8moe.moe_backward(replace(saved, h=h), dy)
    with pytest.raises(TypeError, match=r"\bsaved\.h\b"):
        fp8moe.moe_backward(replace(plain, h=saved.h), dy)


# ---------------------------------------------------------------- the account

FORMS = [
    *({"recipe": recipe, "recompute": again} for recipe in RECIPES for again in (None, "moe_expert")),
    {"save": "fp8"},
    {"save": "fp8", "weight_copies": "rowwise"},
    {"recompute": "moe_expert", "weight_copies": "rowwise"},
]


@pytest.mark.parametrize("options", FORMS, ids=lambda o: " ".join(map(str, o.values())))
def test_account_is_what_a_layer_holds(options):
    """By part, in bytes, for any gradients: the arrays of the record, and those of the gradients."""
    for activation, gradients, with_bias in (
        (Activation(), ("dx", "dprobs", "dw13", "dw2"), True),
        (Activation("relu2"), ("dx", "dprobs", "dw13", "dw2"), False),
        *((Activation(), of, False) for of in (("dx",), ("dw13",), ("dw2",), ("dx", "dw2"), ())),
    ):
        inputs, dy = layer_inputs(5, tokens=70, hidden=256, ffn=256, experts=5)
        inputs["w13"] = inputs["w13"][:, : activation.columns(256)].copy()
        bias = np.zeros((5, 512), np.float32) if with_bias else None
        how = {**options, "activation": activation, "gradients": gradients}
        _, saved = fp8moe.moe_forward(**inputs, **how, bias13=bias)
        grads = fp8moe.moe_backward(saved, dy, gradients=gradients)
        account = fp8moe.memory(70, 256, 256, 5, 2, bias13=with_bias, **how)
        assert account.saved == saved.nbytes == sum(nbytes(getattr(account_part(saved), n)) for n in PARTS)
        for name in PARTS:
            assert getattr(account, name) == nbytes(getattr(account_part(saved), name)), name
        copies = (saved.w13, saved.w2) if options.get("recipe") != "bf16" else ()
        assert account.copies_saved == nbytes(*copies)
        assert account.results == nbytes(grads)
        both = [
            fp8moe.quantize_weights(inputs[n], columnwise="weight_copies" not in options) for n in WEIGHTS
        ]
        assert account.copies == (0 if options.get("recipe") == "bf16" else nbytes(*both))
        assert account.forward >= account.saved + dy.nbytes  # y
        assert account.backward >= account.saved + account.results
        assert account.peak == max(account.forward + account.copies, account.backward + account.copies_saved)


WEIGHTS, PARTS = ("w13", "w2"), ("x", "h", "a", "probs", "routing")


def account_part(saved):
    return argparse.Namespace(**{n: getattr(saved, n, saved.plan) for n in PARTS})


@pytest.mark.parametrize("options", FORMS[2:], ids=lambda o: " ".join(map(str, o.values())))
def test_account_of_a_torch_layer(options):
    """What autograd keeps, from the first storage to the last, of a layer whose widths are padded."""
    ffn = 256 if options.get("recipe") == "fp8_blockwise" else 200
    layer = FP8FlowMoE(256, ffn, 5, 2, **options)
    x = torch.randn(70, 256, dtype=torch.bfloat16, requires_grad=True)
    _, ids, probs = (t.detach() for t in layer.route(x))
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x, ids, probs.requires_grad_())
    masters = {w.untyped_storage().data_ptr() for w in layer.parameters()}
    [account] = torch_memory(layer, 70).values()
    held = sum(size for at, size in kept.items() if at not in masters)
    assert held == account.saved + account.copies_saved
    y.sum().backward()


def test_account_of_a_large_layer():
    """In closed form, at a published model's sizes: what is saved is at most T H + 2 k T F bytes of codes, a
    half or less of the 2 T H + 4 k T F of the leanest layers in bfloat16, and what is held at once while dh
    is made is da, and the codes of dh, twice, and of the activation."""
    tokens, hidden, ffn, experts, topk = 16_384, 2048, 768, 128, 8
    with_h, without = (fp8moe.memory(tokens, hidden, ffn, experts, topk, save=s) for s in ("fp8", "bf16"))
    rows = tokens * topk + experts * 127 // 128 * 128  # padded
    assert with_h.x == tokens * hidden * (1 + 4 / 128)
    assert with_h.h <= 2 * rows * ffn * (1 + 4 / 128)
    assert with_h.h == without.h * (1 + 4 / 128) / 2
    assert with_h.a == 0
    leanest = 2 * tokens * hidden + 4 * tokens * topk * ffn
    padding = rows / (tokens * topk)
    assert with_h.x + with_h.h <= leanest / 2 * (1 + 4 / 128) * padding
    dh_and_a = with_h.h * (1 + (1 + 4 / 128**2) / (1 + 4 / 128)) + with_h.h / 2 / (1 + 4 / 128)
    assert with_h.backward >= with_h.saved + with_h.h / (1 + 4 / 128) + dh_and_a


def test_accounts_are_refused_by_name(capsys):
    for arguments, options, kind, words in (
        ((-1, 256, 256, 4, 2), {}, ValueError, "tokens: got -1"),
        ((64, 0, 256, 4, 2), {}, ValueError, "hidden: got 0"),
        ((64, 256, 256.0, 4, 2), {}, TypeError, "ffn: got float"),
        ((64, 256, 256, 4, 2), {"dtype": "int8"}, ValueError, "dtype: got 'int8'"),
        ((64, 256, 256, 4, 2), {"gradients": ("dy",)}, ValueError, "gradients: got"),
        ((64, 256, 256, 4, 2), {"saves": "fp8"}, TypeError, "unexpected keyword argument 'saves'"),
        ((64, 256, 256, 4, 2), {"dtype": "float32"}, TypeError, "x: got dtype float32"),
    ):
        with pytest.raises(kind, match=words):
            fp8moe.memory(*arguments, **options)
    with pytest.raises(ValueError, match="model: got one without an FP8FlowMoE"):
        torch_memory(torch.nn.Linear(2, 2), 8)
    with pytest.raises(NotImplementedError, match="model: got a layer with recipe='bf16'"):
        torch_memory(FP8FlowMoE(256, 128, 2, 1, recipe="bf16"), 8)
    with pytest.raises(TypeError, match="model: got int; wanted a Module"):
        torch_memory(3, 8)
    assert main(["info", "--memory", "4096", "2048", "768", "8", "2"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    saved = {name: float(value) for name, value, *_ in (re.split(r"\s{2,}", line.strip()) for line in lines)}
    assert saved["fp8_flow"] == round(fp8moe.memory(4096, 2048, 768, 8, 2).saved / 2**20, 1)
    assert saved["fp8_flow, save=fp8"] < saved["fp8_flow"] < saved["fp8_blockwise"] < saved["bf16"]
    assert head.split()[4:] == ["saved", "x", "h", "a", "copies", "copies", "saved", *head.split()[11:]]


@only_on_cpu
def test_account_with_the_kernels_memory(backend, monkeypatch):
    """At least that of SwiGLU's backward, whose contributions to dprobs are eight bytes for each row and tile
    of 128 features; all else stays."""
    sizes = 4096, 1024, 768, 8, 2
    without = fp8moe.memory(*sizes)
    backend.start(monkeypatch, architecture="sm_90a", multiprocessors=132)
    account = fp8moe.memory(*sizes, device=0)
    rows = (4096 * 2 + 8 * 127) // 128 * 128
    assert without.workspace is None
    assert account.workspace >= 8 * rows * 768 // 128
    assert replace(account, forward=0, backward=0, workspace=None) == replace(without, forward=0, backward=0)
    for name in ("forward", "backward"):
        more = getattr(account, name) - getattr(without, name)
        assert 0 <= more <= account.workspace
