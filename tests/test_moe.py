"""The layer compared with a dense float64 torch layer and its autograd; casts and saved tensors of each
recipe."""

import collections
import functools
import importlib
import itertools
import sys
import types
import typing
from dataclasses import replace
from pathlib import Path

import cuda_on_cpu
import numpy as np
import pytest
import torch
from backends import only_on_cpu, only_on_gpu
from cases import (
    ACTIVATIONS,
    BF16,
    assert_close,
    assert_same,
    generator,
    layer_inputs,
    same_bits,
    values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import torch_swiglu

import fp8moe
from fp8moe import Quantized, QuantTensor
from fp8moe.activation import SWIGLU, Activation
from fp8moe.layer.options import LayerArguments, LayerFields, LayerOptions
from fp8moe.layer.recipes import RECIPES, RecipeName
from fp8moe.records import ArraySpec
from fp8moe.runtime import dispatch
from fp8moe.runtime.interop import NUMPY
from fp8moe.runtime.record_trees import arrays_in
from fp8moe.runtime.recording import DryRun

RNG = generator()


def torch_layer(inputs, dy, activation=SWIGLU):
    """Every expert applied to every token, then the sum over the selected ones, in float64."""
    x, w13, w2, probs = (
        torch.tensor(inputs[n].astype(np.float64), requires_grad=True)
        for n in ("x", "w13", "w2", "topk_probs")
    )
    every = torch.einsum(
        "tef,ehf->teh", torch_swiglu(torch.einsum("th,enh->ten", x, w13), None, activation), w2
    )
    ids = torch.tensor(inputs["topk_ids"].astype(np.int64))
    chosen = torch.take_along_dim(every, ids.clamp(min=0)[:, :, None], 1)
    y = (chosen * (probs * (ids >= 0))[:, :, None]).sum(1)
    y.backward(torch.tensor(dy.astype(np.float64)))
    return [v.detach().numpy() for v in (y, x.grad, probs.grad, w13.grad, w2.grad)]


def run(inputs, dy, recipe, recompute=None, activation=SWIGLU):
    y, saved = fp8moe.moe_forward(**inputs, recipe=recipe, recompute=recompute, activation=activation)
    g = fp8moe.moe_backward(saved, dy)
    return [y, g.dx, g.dprobs, g.dw13, g.dw2], saved


def relative(a, b):
    norm = np.linalg.norm(b)
    return np.linalg.norm(a.astype(np.float64) - b) / norm if norm else np.abs(a).max(initial=0)


@given(st.integers(0, 2**32 - 1), st.sampled_from((0.0, 0.3, 1.0)), st.sampled_from(ACTIVATIONS))
@settings(max_examples=15)
def test_float64_layer_equals_torch_autograd(seed, dropped, activation):
    inputs, dy = layer_inputs(seed, 33, 12, 7, 3, dtype=np.float64, dropped=dropped)
    inputs["w13"] = inputs["w13"][:, : activation.columns(7)].copy()
    for recompute in (None, "moe_expert"):
        got, _ = run(inputs, dy, "bf16", recompute, activation=activation)
        for a, b in zip(got, torch_layer(inputs, dy, activation=activation), strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
# its discontinuity amplifies rounding errors
@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a.clamp != 0.5])
def test_recipes_stay_within_their_precision(recipe, activation):
    inputs, dy = layer_inputs(1, dropped=0.1)
    inputs["w13"] = inputs["w13"][:, : activation.columns(128)].copy()
    exact = torch_layer(inputs, dy, activation=activation)
    got, _ = run(inputs, dy, recipe, activation=activation)
    # The mean square error of a rounding to p significant bits is at most 2^-p / sqrt(3): e4m3 2^-4, bfloat16
    # 2^-8. The longest chain of factors, dw13, has six roundings of operands (x, w13, a, dy, w2, dh), and the
    # slope of the sigmoid at most doubles those of h; errors add in squares: sqrt(6 + 3 * 2) * 2^-4 /
    # sqrt(3).
    bits = 8 if recipe == "bf16" else 4
    bound = 12**0.5 * 2.0**-bits / 3**0.5
    for a, b in zip(got, exact, strict=True):
        assert relative(a, b) < bound


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fp8_flow_makes_the_activation_of_h(activation, recompute):
    """w2's gradient is that of the scaling-aware transpose of the codes that the forward multiplied, bit for
    bit, of which nothing is saved; alone, it saves these codes and not h, which is larger."""
    inputs, dy = layer_inputs(9, dropped=0.1)
    inputs["w13"] = inputs["w13"][:, : activation.columns(128)].copy()
    options = {"recipe": "fp8_flow", "activation": activation}
    _, whole = fp8moe.moe_forward(**inputs, **options)
    plan, offsets = whole.plan, whole.plan.expert_offsets
    placed = {"expert_offsets": offsets, "align_size": plan.align_size}
    rowwise = fp8moe.swiglu_quantize(whole.h, whole.probs, activation=activation, **placed)
    a = fp8moe.scaling_aware_transpose(rowwise, **placed, target="block")
    rows = fp8moe.permute_transpose(fp8moe.quantize(dy), plan, target="block")
    wanted = fp8moe.grouped_gemm_wgrad(rows, a, offsets)
    for gradients in (("dx", "dprobs", "dw13", "dw2"), ("dx", "dw2"), ("dw2",)):
        alone = gradients == ("dw2",) and not recompute
        _, saved = fp8moe.moe_forward(**inputs, **options, recompute=recompute, gradients=gradients)
        assert (saved.a is None, saved.h is None) == (not alone, alone or recompute is not None)
        assert same_bits(fp8moe.moe_backward(saved, dy, gradients=gradients).dw2, wanted)
        if alone:
            assert_same(saved.a, rowwise)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
def test_recompute_is_bitwise_equal_and_saves_memory(recipe):
    inputs, dy = layer_inputs(2)
    plain, saved = run(inputs, dy, recipe)
    again, small = run(inputs, dy, recipe, "moe_expert")
    for a, b in zip(plain, again, strict=True):
        assert same_bits(a, b)
    assert small.h is None
    assert small.a is None
    assert small.nbytes < saved.nbytes


@pytest.mark.parametrize("recipe", fp8moe.layer.recipes.RECIPES)
def test_gradients_in_bfloat16_are_those_in_float32_rounded_once(recipe):
    inputs, dy = layer_inputs(8)
    wide, saved = run(inputs, dy, recipe)
    g = fp8moe.moe_backward(saved, dy, dtype="bfloat16")
    for narrow, same in zip((g.dx, g.dprobs, g.dw13, g.dw2), wide[1:], strict=True):
        assert same_bits(narrow, same.astype(narrow.dtype))
    assert g.dw13.dtype == g.dw2.dtype == BF16
    with pytest.raises(ValueError, match="dtype"):
        fp8moe.moe_backward(saved, dy, dtype="int8")


def test_casts_launches_and_bytes():
    inputs, dy = layer_inputs(3, tokens=512, k=2)
    casts, kept = {}, {}
    for recipe in ("bf16", "fp8_blockwise", "fp8_flow"):
        for recompute in (None, "moe_expert"):
            with fp8moe.trace() as outer, fp8moe.trace() as t:
                _, saved = run(inputs, dy, recipe, recompute)
            casts[recipe, recompute] = t.casts
            kept[recipe, recompute] = t.saved_bytes
            assert t.saved_bytes == saved.nbytes
            assert t.num_launches == sum(t.launches.values()) == outer.num_launches
            assert t.weight_casts == (0 if recipe == "bf16" else 2)
    assert casts["fp8_flow", None] == casts["fp8_flow", "moe_expert"] == 2
    assert casts["fp8_blockwise", None] == 12
    assert casts["bf16", None] == 0
    assert kept["fp8_flow", None] < kept["fp8_blockwise", None] < kept["bf16", None] * 1.3
    assert kept["fp8_flow", "moe_expert"] < kept["bf16", "moe_expert"]
    # one in the forward, one for the gradient, one for h; no permuted rows are stored
    for recompute, launches in ((None, 2), ("moe_expert", 3)):
        with fp8moe.trace() as t:
            run(inputs, dy, "fp8_flow", recompute)
        assert (t.launches["permute"], t.launches["permute_gemm"]) == (0, launches)


def test_micro_batches_can_share_quantised_weights():
    inputs, dy = layer_inputs(4)
    plain, _ = run(inputs, dy, "fp8_flow")
    for name in ("w13", "w2"):
        inputs[name] = fp8moe.quantize_weights(inputs[name])
    with fp8moe.trace() as t:
        again, _ = run(inputs, dy, "fp8_flow")
    assert t.weight_casts == 0
    for a, b in zip(plain, again, strict=True):
        assert same_bits(a, b)


#: launches allowed in each half of the backward; "fp8_blockwise" has casts other than dy's
OF_INPUTS = {
    "quantize",
    "permute",
    "permute_gemm",
    "grouped_gemm",
    "swiglu",
    "swiglu_quantize",
    "swiglu_backward",
    "swiglu_quantize_backward",
    "permute_backward",
    "unpermute_backward",
    "unpermute",
}
OF_WEIGHTS = {"permute_transpose", "scaling_aware_transpose", "dequantize", "quantize", "grouped_gemm_wgrad"}
SUBSETS = [
    names for count in range(1, 5) for names in itertools.combinations(("dx", "dprobs", "dw13", "dw2"), count)
]


@pytest.mark.parametrize("recipe", fp8moe.layer.recipes.RECIPES)
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_halves_of_the_backward_equal_the_whole(recipe, recompute):
    """The same bits, launches and casts for any set of gradients; each half launches only its own
    operations."""
    inputs, dy = layer_inputs(12, dropped=0.1)
    _, saved = fp8moe.moe_forward(**inputs, recipe=recipe, recompute=recompute)
    for gradients in SUBSETS:
        with fp8moe.trace() as whole:
            wanted = fp8moe.moe_backward(saved, dy, gradients=gradients)
        with fp8moe.trace() as first:
            of_inputs, operands = fp8moe.moe_backward_input(saved, dy, gradients=gradients)
        with fp8moe.trace() as second:
            of_weights = fp8moe.moe_backward_weight(operands)
        assert of_inputs.dw13 is of_inputs.dw2 is of_weights.dx is of_weights.dprobs is None
        actual = of_inputs.dx, of_inputs.dprobs, of_weights.dw13, of_weights.dw2
        for a, b in zip(actual, (wanted.dx, wanted.dprobs, wanted.dw13, wanted.dw2), strict=True):
            assert (a is None) == (b is None), gradients
            assert a is None or same_bits(a, b), gradients
        assert first.launches + second.launches == whole.launches
        assert first.casts + second.casts == whole.casts
        # w2's gradient alone: nothing reads h in the pass that would make the activation's transposed codes
        alone = {"scaling_aware_transpose"} if recipe == "fp8_flow" and gradients == ("dw2",) else set()
        assert set(first.launches) <= OF_INPUTS | alone
        assert set(second.launches) <= OF_WEIGHTS
        of_weights_wanted = sum(name in gradients for name in ("dw13", "dw2"))
        assert second.launches["grouped_gemm_wgrad"] == of_weights_wanted
        if not of_weights_wanted:
            assert second.num_launches == operands.nbytes - saved.plan.data.nbytes == 0
        gemms = 1 if recompute else 0
        if "dx" in gradients or "dprobs" in gradients:
            gemms += 2
        elif "dw13" in gradients:
            gemms += 1
        assert first.launches["grouped_gemm"] + first.launches["permute_gemm"] == gemms
        assert first.launches["permute_gemm"] == (recipe == "fp8_flow") * (
            bool(recompute) + (set(gradients) != {"dw2"})
        )


@pytest.mark.parametrize("recipe", fp8moe.layer.recipes.RECIPES)
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_frozen_weights_need_no_transpose(recipe, recompute):
    """Frozen weights, as with LoRA: forward and backward launch no wgrad and no transpose, and save less
    memory."""
    inputs, dy = layer_inputs(13)
    options = {"recipe": recipe, "recompute": recompute}
    whole, kept = run(inputs, dy, **options)
    of_inputs = {"gradients": ("dx", "dprobs")}
    with fp8moe.trace() as t:
        y, saved = fp8moe.moe_forward(**inputs, **options, **of_inputs)
        g = fp8moe.moe_backward(saved, dy, **of_inputs)
    for a, b in zip((y, g.dx, g.dprobs), whole, strict=False):
        assert same_bits(a, b)
    assert not {*t.launches} & {"grouped_gemm_wgrad", "permute_transpose", "scaling_aware_transpose"}
    assert t.launches["dequantize"] == 0
    assert t.casts == {"bf16": 0, "fp8_flow": 2, "fp8_blockwise": 4}[recipe]
    if not recompute:
        assert saved.nbytes < kept.nbytes


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", fp8moe.layer.recipes.RECIPES)
def test_memory_between_the_halves_of_the_backward(recipe, recompute):
    """The exact number of bytes of `SavedForWeights`; no weights and no h are kept."""
    tokens, hidden, ffn = 96, 256, 128
    inputs, dy = layer_inputs(14, tokens, hidden, ffn)
    _, saved = fp8moe.moe_forward(**inputs, recipe=recipe, recompute=recompute)
    _, operands = fp8moe.moe_backward_input(saved, dy)
    rows = saved.plan.num_out_tokens
    rows_of_x_and_dy = tokens if recipe == "fp8_flow" else rows
    wanted = 2 * rows_of_x_and_dy * hidden + rows * ffn + 2 * rows * ffn
    wanted *= 2 if recipe == "bf16" else 1
    arrays = operands.dy, operands.a, operands.dh, operands.x
    codes, scales = arrays, 0
    if recipe != "bf16":
        codes, scales = [q.data for q in arrays], sum(q.scales.nbytes for q in arrays)
    assert sum(a.nbytes for a in codes) == wanted
    assert scales <= wanted / 32
    assert operands.nbytes == wanted + scales + operands.plan.data.nbytes


def test_weights_half_accumulates_and_validates():
    inputs, dy = layer_inputs(15, ffn=256)
    _, saved = fp8moe.moe_forward(**inputs, recipe="fp8_flow")
    _, operands = fp8moe.moe_backward_input(saved, dy)
    rng = np.random.default_rng(16)
    for dtype in ("float32", "bfloat16"):
        for ffn in (256, 200):
            into = [rng.standard_normal((4, *s)).astype(dtype) for s in ((ffn, 128), (ffn, 128), (128, ffn))]
            twice = [a.copy() for a in into]
            options = {} if ffn == 256 else {"ffn": ffn}
            fp8moe.moe_backward(saved, dy, dw13=(into[0], into[1]), dw2=into[2], **options)
            g = fp8moe.moe_backward_weight(operands, dw13=(twice[0], twice[1]), dw2=twice[2], **options)
            assert (*g.dw13, g.dw2)[1] is twice[1]
            for a, b in zip(twice, into, strict=True):
                assert same_bits(a, b)
    bad = [
        ({"dw2": np.zeros((4, 128, 128), np.float32)}, ValueError, "dw2: got shape"),
        ({"dw13": np.zeros((4, 512, 128), np.int32)}, TypeError, "dw13: got dtype int32"),
        ({"ffn": 257}, ValueError, "ffn: got 257"),
        (
            {"ffn": 200, "dw13": np.zeros((4, 512, 128), np.float32)},
            ValueError,
            r"dw13: got .* wanted \[4, 400, 128\]",
        ),
        ({"ffn": 257, "dw13": (None, None)}, ValueError, "ffn: got 257"),
        ({"dtype": "int8"}, ValueError, "dtype"),
    ]
    for options, error, words in bad:
        with pytest.raises(error, match=words):
            fp8moe.moe_backward_weight(operands, **options)
    with pytest.raises(
        TypeError, match="operands: got Saved; wanted the second result of moe_backward_input"
    ):
        fp8moe.moe_backward_weight(saved)
    with pytest.raises(TypeError, match="saved: got SavedForWeights"):
        fp8moe.moe_backward_input(operands, dy)
    _, of_w2 = fp8moe.moe_backward_input(saved, dy, gradients=("dx", "dw2"))
    with pytest.raises(ValueError, match="dw13: got an array to add to, but gradients has no 'dw13'"):
        fp8moe.moe_backward_weight(of_w2, dw13=np.zeros((4, 512, 128), np.float32))
    # rows that need no permutation: dy itself is the operand
    memory, counts = np.zeros((4, 128, 128), np.float32), np.full(4, 24, np.int32)
    rows = memory.reshape(-1)[: 96 * 128].reshape(96, 128)
    weights = {n: inputs[n][:, :256, :128].astype(np.float32) for n in ("w13", "w2")}
    of_rows = {"tokens_per_expert": counts, "probs": np.ones(96, np.float32)}
    _, saved = fp8moe.moe_forward_permuted(rows, **weights, **of_rows, recipe="bf16")
    _, operands = fp8moe.moe_backward_input(saved, rows)
    assert operands.dy is rows
    with pytest.raises(ValueError, match="dw2: got memory that overlaps dy;"):
        fp8moe.moe_backward_weight(operands, dw2=memory)


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("ffn", [128, 72])
def test_gradients_of_w1_and_w3_as_a_pair(ffn, recompute):
    """Gradients of w1 and w3 as a pair equal those of w13, without the zeros of padded weights; new and
    accumulated."""
    inputs, dy = layer_inputs(9, ffn=256)
    w13, w2 = inputs.pop("w13")[:, :512], inputs.pop("w2")
    w1, w3 = (np.ascontiguousarray(w13[:, first : first + ffn]) for first in (0, 256))
    w2 = np.ascontiguousarray(w2[:, :, :ffn])
    padded = {
        "w13": fp8moe.quantize_weights((w1, w3), rows=128),
        "w2": fp8moe.quantize_weights(w2, columns=128),
    }
    _, saved = fp8moe.moe_forward(**inputs, **padded, recipe="fp8_flow", recompute=recompute)
    whole = fp8moe.moe_backward(saved, dy)
    options = {} if ffn == 128 else {"ffn": ffn}
    apart = fp8moe.moe_backward(saved, dy, dw13=(None, None), **options)
    wanted = whole.dw13[:, :ffn], whole.dw13[:, 128 : 128 + ffn], whole.dw2[:, :, :ffn]
    for name in ("dx", "dprobs"):
        assert same_bits(getattr(apart, name), getattr(whole, name))
    for actual, true in zip((*apart.dw13, apart.dw2), wanted, strict=True):
        assert actual.shape == true.shape
        # sums of 128 float32 products, whose order in a BLAS depends on the shape
        assert np.linalg.norm(actual - true) <= 128 * 2.0**-24 * np.linalg.norm(true)
    into = [np.random.default_rng(10).standard_normal(w.shape).astype(np.float32) for w in wanted]
    before = [w.copy() for w in into]
    if ffn != 128:  # in one array, without the padding after each half
        assert same_bits(fp8moe.moe_backward(saved, dy, **options).dw13, np.concatenate(apart.dw13, axis=1))
        one = np.concatenate(into[:2], axis=1)
        assert fp8moe.moe_backward(saved, dy, dw13=one, **options).dw13 is one
        total = np.concatenate([a + b for a, b in zip(before[:2], apart.dw13, strict=True)], axis=1)
        np.testing.assert_allclose(one, total, rtol=2.0**-22, atol=2.0**-22)
    added = fp8moe.moe_backward(saved, dy, dw13=(into[0], into[1]), dw2=into[2], **options)
    assert added.dw13[0] is into[0]
    for actual, old, new in zip(into, before, (*apart.dw13, apart.dw2), strict=True):
        np.testing.assert_allclose(actual, old + new, rtol=2.0**-22, atol=2.0**-22)


def test_gradients_of_padded_weights_without_a_gate():
    inputs, dy = layer_inputs(11)
    w13, w2 = inputs.pop("w13")[:, :72].copy(), inputs.pop("w2")[:, :, :72].copy()
    padded = {"w13": fp8moe.quantize_weights(w13, rows=128), "w2": fp8moe.quantize_weights(w2, columns=128)}
    _, saved = fp8moe.moe_forward(
        **inputs, **padded, recipe="fp8_flow", activation=fp8moe.Activation("relu2")
    )
    whole, cut = fp8moe.moe_backward(saved, dy), fp8moe.moe_backward(saved, dy, ffn=72)
    assert not whole.dw13[:, 72:].any()
    for actual, true in ((cut.dw13, whole.dw13[:, :72]), (cut.dw2, whole.dw2[:, :, :72])):
        assert np.linalg.norm(actual - true) <= 128 * 2.0**-24 * np.linalg.norm(true)
    with pytest.raises(ValueError, match=r"dw13: got two with .*relu2.*which has no gate"):
        fp8moe.moe_backward(saved, dy, dw13=(None, None))
    with pytest.raises(ValueError, match="w13: got F = 72"):
        fp8moe.moe_forward(**inputs, w13=w13, w2=w2, recipe="fp8_flow", activation=saved.options.activation)


def test_invalid_gradient_pairs_raise():
    inputs, dy = layer_inputs(9)
    _, saved = fp8moe.moe_forward(**inputs, recipe="fp8_flow")
    with pytest.raises(ValueError, match="ffn: got 129"):
        fp8moe.moe_backward(saved, dy, dw13=(None, None), ffn=129)
    with pytest.raises(ValueError, match=r"dw13\[1\]: got shape"):
        fp8moe.moe_backward(saved, dy, dw13=(None, np.zeros((4, 256, 128), np.float32)))
    for recipe in ("bf16", "fp8_blockwise"):
        _, saved = fp8moe.moe_forward(**inputs, recipe=recipe)
        with pytest.raises(ValueError, match=f"dw13: got two with recipe '{recipe}'"):
            fp8moe.moe_backward(saved, dy, dw13=(None, None))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
@pytest.mark.parametrize("kind", ["no tokens", "no expert chosen", "one expert", "k=1", "every expert"])
def test_extreme_routings(recipe, kind):
    inputs, dy = layer_inputs(5, tokens=0 if kind == "no tokens" else 64)
    if kind == "no expert chosen":
        inputs["topk_ids"][:] = -1
    elif kind == "one expert":
        inputs["topk_ids"][:] = 3
    elif kind == "k=1":
        inputs["topk_ids"] = inputs["topk_ids"][:, :1].copy()
        inputs["topk_probs"] = inputs["topk_probs"][:, :1].copy()
    elif kind == "every expert":
        inputs["topk_ids"] = np.tile(np.arange(4, dtype=np.int32), (64, 1))
        inputs["topk_probs"] = np.ones((64, 4), np.float32)
    got, _ = run(inputs, dy, recipe)
    bound = 12**0.5 * 2.0 ** -(8 if recipe == "bf16" else 4) / 3**0.5
    for a, b in zip(got, torch_layer(inputs, dy), strict=True):
        assert relative(a, b) < bound


def test_validation_errors_name_the_argument():
    inputs, dy = layer_inputs(6, hidden=384)
    w1, w3 = map(np.ascontiguousarray, np.split(inputs["w13"], 2, 1))
    bad = [
        ({"x": inputs["x"].astype(np.float32)}, TypeError, "x: got dtype float32; wanted bfloat16"),
        (
            {"w2": inputs["w2"].astype(np.float64)},
            TypeError,
            "w2: got dtype float64; .*; pass w2 in float32$",
        ),
        (
            {"w13": inputs["w13"].astype(np.int8)},
            TypeError,
            "w13: got dtype int8; .*; pass w13 in float32, times the scales of its codes$",
        ),
        ({"x": fp8moe.quantize(inputs["x"])}, TypeError, "x: got a QuantTensor; wanted an array"),
        (
            {"w13": inputs["w13"][:, :130].copy()},
            ValueError,
            r"w13: got 2F = 130; .* parts=2, rows=128\) and",
        ),
        (
            {"w13": inputs["w13"][:, :96].copy(), "activation": fp8moe.Activation("relu2")},
            ValueError,
            r"w13: got F = 96; .*pass quantize_weights\(w13, rows=128\) and .*\(w2, columns=128\)$",
        ),
        ({"w13": (w1, w3)}, TypeError, r"w13: got a tuple; .*or quantize_weights\(\(w1, w3\)\)$"),
        (
            {"w13": inputs["w13"].swapaxes(1, 2).copy()},
            ValueError,
            r"w13: got shape .*; pass weights stored .* as quantize_weights\(w13, transposed=True\)",
        ),
        (
            {"w2": inputs["w2"].swapaxes(1, 2).copy()},
            ValueError,
            r"w2: got shape .*; pass weights stored .* as quantize_weights\(w13, transposed=True\)",
        ),
        ({"w2": inputs["w2"][1:]}, ValueError, r"w2: got shape .*; wanted \[[0-9, ]*\]$"),
        ({"topk_ids": inputs["topk_probs"]}, TypeError, "topk_ids: got dtype float32"),
        ({"topk_probs": inputs["topk_probs"][:5].copy()}, ValueError, "topk_probs: got shape"),
        ({"recipe": "fp4"}, ValueError, "recipe: got 'fp4'"),
        ({"recompute": "all"}, ValueError, "recompute: got 'all'"),
    ]
    for change, error, words in bad:
        with pytest.raises(error, match=words):
            fp8moe.moe_forward(**{**inputs, "recipe": "fp8_flow", **change})
    _, saved = fp8moe.moe_forward(**inputs, recipe="fp8_flow")
    with pytest.raises(ValueError, match="dy: got shape"):
        fp8moe.moe_backward(saved, dy[:3].copy())
    with pytest.raises(TypeError, match="saved: got int"):
        fp8moe.moe_backward(3, dy)
    quantised = fp8moe.quantize_weights(inputs["w13"])
    with pytest.raises(TypeError, match="w13: got quantised weights"):
        fp8moe.moe_forward(**{**inputs, "w13": quantised}, recipe="bf16")


def test_weights_overwritten_before_the_backward_raise():
    inputs, dy = layer_inputs(7)
    for name in ("w13", "w2"):
        arguments = {**inputs, name: fp8moe.quantize_weights(inputs[name])}
        for overwrite in (
            lambda w, q: fp8moe.quantize_weights(w, out=q),
            lambda w, q: fp8moe.quantize(w, block=(128, 128), columnwise=True, out=q),
        ):
            _, saved = fp8moe.moe_forward(**arguments, recipe="fp8_flow")
            fp8moe.moe_backward(saved, dy)
            overwrite(inputs[name] * 2, arguments[name])
            with pytest.raises(
                RuntimeError, match=f"{name}: got FP8 codes that quantize_weights has overwritten"
            ):
                fp8moe.moe_backward(saved, dy)
            _, saved = fp8moe.moe_forward(**arguments, recipe="fp8_flow")
            fp8moe.moe_backward(saved, dy)
    # the other orientation alone, which the recomputation reads
    q = fp8moe.quantize_weights(inputs["w13"])
    _, saved = fp8moe.moe_forward(**{**inputs, "w13": q}, recompute="moe_expert")
    fp8moe.quantize_weights(-inputs["w13"], columnwise=False, out=fp8moe.Quantized(q.rowwise))
    with pytest.raises(RuntimeError, match="w13: got FP8 codes that quantize_weights has overwritten"):
        fp8moe.moe_backward(saved, dy)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["x", "dy", "topk_probs"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
def test_what_is_not_finite_in_an_operand(recipe, where, value):
    """NaN reaches all that depends on it, and no other token; an infinity stays one without FP8, which has
    448 in its place. What watches a training run for either must know."""
    inputs, dy = layer_inputs(9)
    operands = {name: a.copy() for name, a in (*inputs.items(), ("dy", dy))}
    operands[where][3, 1] = value
    y, saved = fp8moe.moe_forward(**{name: operands[name] for name in inputs}, recipe=recipe)
    grads = fp8moe.moe_backward(saved, operands["dy"])
    experts = set(operands["topk_ids"][3].tolist() if where != "topk_probs" else [operands["topk_ids"][3, 1]])
    survives = recipe == "bf16" or np.isnan(value)
    others = np.arange(len(dy)) != 3
    for result, depends in ((y, where != "dy"), (grads.dx, True), (grads.dprobs, where != "topk_probs")):
        assert np.isfinite(result[others].astype(np.float32)).all()
        # the gradient of a probability does not depend on it
        assert np.isfinite(result[3].astype(np.float32)).all() == (not (depends and survives))
    for result in (grads.dw13, grads.dw2):
        for e, of_expert in enumerate(result):
            assert np.isfinite(of_expert).all() == (not (e in experts and survives))


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
def test_a_backward_without_gradients_gives_none(recipe, recompute):
    """Of weights that were quantised before, too, which the forward does not keep then."""
    inputs, dy = layer_inputs(8)
    quantised = {n: fp8moe.quantize_weights(inputs[n]) for n in ("w13", "w2")}
    for weights in ({}, {} if recipe == "bf16" else quantised):
        options = {"recipe": recipe, "recompute": recompute, "gradients": ()}
        _, saved = fp8moe.moe_forward(**{**inputs, **weights}, **options)
        assert not arrays_in(fp8moe.moe_backward(saved, dy, gradients=()))
        grads, kept = fp8moe.moe_backward_input(saved, dy, gradients=())
        assert not arrays_in((grads, fp8moe.moe_backward_weight(kept)))


def on_descriptors(step, recipe, tokens, hidden, ffn, experts, k):
    """The result of ``step`` for a layer's arguments as shapes only, and its peak memory."""
    arrays = [ArraySpec((tokens, hidden), BF16), ArraySpec((tokens, k), np.dtype(np.int32))]
    arrays.append(ArraySpec((tokens, k), np.dtype(np.float32)))
    for shape in ((experts, 2 * ffn, hidden), (experts, hidden, ffn)):
        if recipe == "bf16":
            arrays.append(ArraySpec(shape, BF16))
            continue
        for e, n, m in (shape, (shape[0], shape[2], shape[1])):
            codes, scales = np.dtype(np.uint8), np.dtype(np.float32)
            arrays += [ArraySpec((e, n, m), codes), ArraySpec((e, n // 128, m // 128), scales)]

    def forward(arrays):
        x, ids, probs, *weights = arrays
        if recipe != "bf16":
            sides = zip(weights[::2], weights[1::2], (False, True) * 2, strict=True)
            sides = [QuantTensor(*of, "e4m3", (128, 128), transposed=t) for *of, t in sides]
            weights = Quantized(*sides[:2]), Quantized(*sides[2:])
        return step(x, *weights, ids, probs)

    call = DryRun([(a.shape, a.dtype, 0) for a in arrays], dispatch.NOWHERE, NUMPY)
    result = call.perform(forward, list(call.inputs))
    allocated = most = 0
    for step in call.steps:
        size = ArraySpec(*call.buffers[max(step, ~step)]).nbytes
        allocated += size if step >= 0 else -size
        most = max(most, allocated)
    return result, most


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
def test_inference_releases_temporaries_after_their_last_use(recipe, recompute):
    tokens, hidden, ffn, experts, k = 16_384, 2048, 768, 128, 8
    forward = functools.partial(fp8moe.moe_forward, recipe=recipe, recompute=recompute, gradients=())
    (y, saved), most = on_descriptors(forward, recipe, tokens, hidden, ffn, experts, k)
    assert arrays_in(saved) == arrays_in(saved.plan)  # which contains the number of rows per expert
    rows = saved.plan.num_out_tokens
    wide, narrow = 2 * rows * hidden, 2 * rows * ffn  # bfloat16
    first, second = 2 * narrow, wide  # results of the products
    moved, activated = (n // 2 + n // 64 for n in (wide, narrow))  # codes, and a float32 for every 128
    after = second + y.nbytes
    if recipe == "fp8_flow":
        x = tokens * hidden * (1 + 1 / 32)
        limit = x + max(first + activated, activated + second, after)
    elif recipe == "fp8_blockwise":
        limit = max(wide + moved, moved + first, first + narrow + activated, activated + second, after)
    else:
        limit = max(wide + first, first + narrow, narrow + second, after)
    # and a few numbers per row and entry
    assert limit <= most <= limit + 32 * (rows + tokens * k)
    with pytest.raises(ValueError, match=r"saved: got the record of a forward with gradients=\(\), which"):
        fp8moe.moe_backward(saved, y)


@pytest.mark.parametrize("copies", ["both", "rowwise"])
@pytest.mark.parametrize("experts", [8, 128])
def test_fp8_step_releases_temporaries_after_their_last_use(experts, copies):
    def step(*layer):
        y, saved = fp8moe.moe_forward(*layer, recipe="fp8_flow", weight_copies=copies)
        return y, saved, fp8moe.moe_backward(saved, y)

    tokens, hidden, ffn, k = 4096, 7168, 2048, 8
    (y, saved, grads), most = on_descriptors(step, "fp8_flow", tokens, hidden, ffn, experts, k)
    rows = saved.plan.num_out_tokens
    wide, narrow = 2 * rows * hidden, 2 * rows * ffn  # bfloat16
    dh = narrow + narrow // 32  # codes, and a float32 for every 128
    # blocks of (128, 128)
    columns, x_columns, a_columns = (n // 2 + n // 2**13 for n in (2 * narrow, wide, narrow))
    x = tokens * hidden * (1 + 1 / 32)
    saved_and_dy = x + 2 * narrow + y.nbytes + x
    assert saved.nbytes <= x + 2 * narrow + 32 * (rows + tokens * k)
    columns += a_columns  # of dh and, made in the same pass, of the activation
    new = columns + grads.dx.nbytes
    # codes that dgrad multiplies by, one weight after the other
    w2 = experts * hidden * ffn * (1 + 4 / 128**2) if copies == "rowwise" else 0
    limit = saved_and_dy + max(
        narrow + w2,
        narrow + dh + columns,
        dh + columns + wide + 2 * w2,
        new + wide,
        new + x_columns + grads.dw2.nbytes,
        # the rows of dy and the activation are freed
        new - x - a_columns + x_columns + grads.dw2.nbytes + grads.dw13.nbytes,
    )
    assert limit <= most <= limit + 32 * (rows + tokens * k)


def test_bf16_step_releases_temporaries_after_their_last_use():
    def step(*layer):
        y, saved = fp8moe.moe_forward(*layer, recipe="bf16")
        return y, saved, fp8moe.moe_backward(saved, y)

    tokens, hidden, ffn, experts, k = 16_384, 2048, 768, 128, 8
    (y, saved, grads), most = on_descriptors(step, "bf16", tokens, hidden, ffn, experts, k)
    rows = saved.plan.num_out_tokens
    wide, narrow = 2 * rows * hidden, 2 * rows * ffn
    dy, dh, dx = wide, 2 * narrow, grads.dx.nbytes
    limit = wide + 3 * narrow + y.nbytes  # saved, and y
    limit += max(dy + narrow + dh, dy + dh + wide + dx, dh + dx + grads.dw2.nbytes + grads.dw13.nbytes)
    assert limit <= most <= limit + 32 * (rows + tokens * k)


@pytest.mark.parametrize(
    ("kept", "asked", "name"),
    [("dw2", "dx", "h"), ("dw2", "dw13", "x"), ("dx", "dw2", "a"), ("dprobs", "dw13", "x")],
)
@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow"])
def test_gradients_that_were_not_saved_for_raise(recipe, kept, asked, name):
    inputs, dy = layer_inputs(3)
    _, saved = fp8moe.moe_forward(**inputs, recipe=recipe, gradients=[kept])
    fp8moe.moe_backward(saved, dy, gradients=[kept])
    if recipe == "fp8_flow" and name == "a":  # which is made of h
        _, whole = fp8moe.moe_forward(**inputs, recipe=recipe)
        got = fp8moe.moe_backward(saved, dy, gradients=[asked])
        assert same_bits(got.dw2, fp8moe.moe_backward(whole, dy).dw2)
        saved = replace(saved, h=None)
    with pytest.raises(ValueError, match=f"gradients: got '{asked}', but saved.{name} is None"):
        fp8moe.moe_backward(saved, dy, gradients=[asked])


@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_backend_and_limit_reach_all_products(monkeypatch, recipe, recompute):
    used = []
    products = importlib.import_module("fp8moe.reference.grouped_gemm")

    def recorded(product):
        def record(*arguments, backend, num_sms, **options):
            used.append((backend, num_sms))
            product(*arguments, backend=backend, num_sms=num_sms, **options)

        return record

    for verb in ("grouped_gemm", "grouped_gemm_wgrad"):
        monkeypatch.setattr(products, verb, recorded(getattr(products, verb)))
    # as if the arrays were on CUDA, where a backend can be selected
    layer = importlib.import_module("fp8moe.layer.checks")
    monkeypatch.setattr(layer, "_refuse_on_cpu", lambda options, device: None)
    monkeypatch.setattr(layer, "check_backend", lambda *arguments, **layer: None)
    inputs, dy = layer_inputs(3)
    options = {"recipe": recipe, "recompute": recompute}
    for backend, num_sms in (("mma", None), ("wgmma", 8), (None, 2), (None, None)):
        used.clear()
        _, saved = fp8moe.moe_forward(**inputs, **options, backend=backend, num_sms=num_sms)
        fp8moe.moe_backward(saved, dy)
        assert used == [(backend, num_sms)] * (7 if recompute else 6)
    # a different limit for the backward and its halves
    _, saved = fp8moe.moe_forward(**inputs, **options, num_sms=8)
    used.clear()
    fp8moe.moe_backward(saved, dy, num_sms=4)
    _, operands = fp8moe.moe_backward_input(saved, dy, num_sms=6)
    fp8moe.moe_backward_weight(operands)
    fp8moe.moe_backward_weight(operands, num_sms=2)
    whole = 5 if recompute else 4
    assert [limit for _, limit in used] == [4] * whole + [6] * whole + [2] * 2


def test_arguments_are_the_options():
    """What type checkers accept as arguments of a layer is what `LayerOptions` has, and the recipes there
    are."""
    hints = typing.get_type_hints(LayerOptions)
    assert hints.pop("activation") is Activation
    assert typing.get_type_hints(LayerArguments) == typing.get_type_hints(LayerFields) == hints
    assert LayerOptions(SWIGLU, **vars(LayerFields())) == LayerOptions(SWIGLU)
    assert typing.get_args(RecipeName) == tuple(RECIPES)
    assert all(name == recipe.name for name, recipe in RECIPES.items())


def test_backend_on_the_cpu_raises():
    inputs, _ = layer_inputs(3)
    with pytest.raises(ValueError, match=r"backend: got 'mma' for arrays on the CPU; wanted None"):
        fp8moe.moe_forward(**inputs, recipe="bf16", backend="mma")
    fp8moe.moe_forward(**inputs, recipe="bf16")
    with pytest.raises(ValueError, match=r"backend: got 'tensor'; wanted one of None, 'wgmma', 'mma'"):
        fp8moe.moe_forward(**inputs, recipe="bf16", backend="tensor")


@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow"])
def test_invalid_sm_limit_raises(recipe):
    """Raised before anything is computed or accumulated."""
    inputs, dy = layer_inputs(3)
    _, saved = fp8moe.moe_forward(**inputs, recipe=recipe)
    _, operands = fp8moe.moe_backward_input(saved, dy)
    dw2 = np.full(inputs["w2"].shape, 3, np.float32)
    nobody = types.SimpleNamespace(world_size=2)  # a transport that cannot send
    calls = (
        lambda limit: fp8moe.moe_forward(**inputs, recipe=recipe, num_sms=limit),
        lambda limit: fp8moe.moe_forward(**inputs, recipe=recipe, num_sms=limit, comm=nobody),
        lambda limit: fp8moe.moe_backward(saved, dy, dw2=dw2, num_sms=limit),
        lambda limit: fp8moe.moe_backward_input(saved, dy, num_sms=limit),
        lambda limit: fp8moe.moe_backward_weight(operands, dw2=dw2, num_sms=limit),
    )
    for call in calls:
        with pytest.raises(ValueError, match="num_sms: got 4 for arrays on the CPU; wanted None"):
            call(4)
        with pytest.raises(ValueError, match="num_sms: got 3; wanted an even number"):
            call(3)
        with pytest.raises(ValueError, match="num_sms: got 0; wanted an integer from 2"):
            call(0)
        with pytest.raises(TypeError, match="num_sms: got float"):
            call(4.0)
    assert (dw2 == 3).all()


# ---------------------------------------------------------------- kernels


@only_on_gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_recipes_on_cuda(backend, recipe, recompute):
    inputs, dy = layer_inputs(7, tokens=300, dropped=0.1)

    def run(x, w13, w2, ids, probs, dy):
        with fp8moe.trace() as traced:
            y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe=recipe, recompute=recompute)
            g = fp8moe.moe_backward(saved, dy)
        casts.append(traced.casts)
        return y, g.dx, g.dprobs, g.dw13, g.dw2

    casts = []
    expected, actual = backend.both(run, *inputs.values(), dy)
    assert casts[0] == casts[1]
    for pair in zip(expected, actual, strict=True):
        # bfloat16 between the kernels is rounded from sums in another order, and then codes may differ
        assert_close(pair, 0.02)


@only_on_gpu
@pytest.mark.parametrize("ffn", [128, 72])
def test_gradients_of_w1_and_w3_by_kernels(backend, ffn):
    """Gradients of w1, w3 and padded w2: bitwise equal to those of w13 in one tensor, both new and
    accumulated."""
    inputs, dy = layer_inputs(9, ffn=256)
    w13 = inputs.pop("w13")
    w1, w3 = (np.ascontiguousarray(w13[:, first : first + ffn]) for first in (0, 256))
    w2 = np.ascontiguousarray(inputs.pop("w2")[:, :, :ffn])

    def run(x, ids, probs, w1, w3, w2, dy, *into):
        # accumulated in place, so each backend gets copies
        into = [a.copy() if isinstance(a, np.ndarray) else a for a in into]
        w13, w2 = fp8moe.quantize_weights((w1, w3), rows=128), fp8moe.quantize_weights(w2, columns=128)
        _, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow")
        whole = fp8moe.moe_backward(saved, dy)
        keywords = {} if ffn == 128 else {"ffn": ffn}
        apart = fp8moe.moe_backward(saved, dy, dw13=(None, None), **keywords)
        added = fp8moe.moe_backward(saved, dy, dw13=tuple(into[:2]), dw2=into[2], **keywords)
        return whole.dw13, whole.dw2, *apart.dw13, apart.dw2, *added.dw13, added.dw2

    into = [np.ones(w.shape, np.float32) for w in (w1, w3, w2)]
    _, (dw13, dw2, *actual) = backend.both(run, *inputs.values(), w1, w3, w2, dy, *into)
    wanted = dw13[:, :ffn], dw13[:, 128 : 128 + ffn], dw2[:, :, :ffn]
    for apart, added, true in zip(actual[:3], actual[3:], wanted, strict=True):
        assert same_bits(apart, true)
        np.testing.assert_allclose(added, 1 + true, rtol=2.0**-22)


def of_grouped_products(monkeypatch):
    """Records the number of blocks of every grouped product launched from now on."""
    blocks = []

    def watch(name, x, values):
        if name.startswith("grouped_gemm"):
            blocks.append(x)

    monkeypatch.setattr(cuda_on_cpu, "watch", watch)
    return blocks


@only_on_cpu
@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_layer_with_an_sm_limit(backend, monkeypatch, recipe):
    """Every product of both passes respects the limit, also with recordings, and results are bitwise
    equal."""
    from fp8moe.kernels_cuda.runtime import driver

    monkeypatch.setattr(driver, "multiprocessors", lambda device: 6)
    blocks = of_grouped_products(monkeypatch)
    x, w13, w2, dy = (values(RNG, s, BF16) for s in ((5, 128), (2, 256, 128), (2, 128, 128), (5, 128)))
    rows = np.array([3, 2], np.int32), RNG.random(5, np.float32)
    *layer, dy = map(backend.upload, (x, w13, w2, *rows, dy))

    def step(forward=None, backward=None):
        blocks.clear()
        y, saved = fp8moe.moe_forward_permuted(*layer, recipe=recipe, num_sms=forward)
        split, blocks[:] = [*blocks], []
        grads = fp8moe.moe_backward(saved, dy, num_sms=backward)
        return backend.download((y, grads)), (split, [*blocks])

    wanted, grids = step()
    assert grids == ([6] * 2, [6] * 4)
    for limits, grids in (((2,), (2, 2)), ((None, 4), (6, 4))):
        results, launched = step(*limits)
        assert launched == ([grids[0]] * 2, [grids[1]] * 4)
        assert_same(results, wanted)
    _, saved = fp8moe.moe_forward_permuted(*layer, recipe=recipe, num_sms=4)
    _, operands = fp8moe.moe_backward_input(saved, dy)
    fp8moe.moe_backward_weight(operands)
    fp8moe.moe_backward_weight(operands, num_sms=2)
    assert blocks[-8:] == [4] * 6 + [2] * 2
    plans = collections.Counter(name for name, plan in dispatch.cached_recordings() if plan is not None)
    assert plans["permuted_experts_forward"] == len({None, 2, 4})
    assert plans["experts_backward"] == len({None, 2, 4})
    assert plans["experts_backward_weight"] == len({4, 2})
    with pytest.raises(ValueError, match="num_sms: got 8; wanted an even number from 2 to 6"):
        fp8moe.moe_forward_permuted(*layer, recipe=recipe, num_sms=8)
    with pytest.raises(ValueError, match="num_sms: got 2 with backend='mma', which cannot limit itself"):
        fp8moe.moe_forward_permuted(*layer, recipe=recipe, num_sms=2, backend="mma")


# ---------------------------------------------------------------- checks, once


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
def test_operations_inside_of_a_layer_are_not_checked_again(recipe, permuted):
    """No operation calls a check, except for the sizes of a new plan; the layer's own are few."""
    inputs, _ = layer_inputs(3)
    checked = []

    def event(frame, event, _):
        if event == "call" and frame.f_code.co_filename.endswith("runtime/checks.py"):
            caller = frame.f_back.f_code
            checked.append((Path(caller.co_filename).parent.name, caller.co_name))

    def forward():
        if not permuted:
            return fp8moe.moe_forward(**inputs, recipe=recipe)
        counts, probs = np.full(len(inputs["w13"]), 1, np.int32), np.ones(len(inputs["x"]), np.float32)
        rows = inputs["x"], inputs["w13"], inputs["w2"], counts, probs
        return fp8moe.moe_forward_permuted(*rows, recipe=recipe)

    y, saved = forward()
    _, operands = fp8moe.moe_backward_input(saved, y)
    for call, most in (
        (forward, 35),
        (lambda: fp8moe.moe_backward(saved, y), 110),
        (lambda: fp8moe.moe_backward_weight(operands), 110),
    ):
        checked.clear()
        sys.setprofile(event)
        try:
            call()
        finally:
            sys.setprofile(None)
        assert {name for folder, name in checked if folder == "ops"} <= {"plan_spec"}
        assert 0 < len(checked) <= most


@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
def test_a_backward_refuses_tensors_that_its_forward_did_not_save(recipe):
    """By name, as no operation of it checks them again: one row or column more, or another dtype."""
    inputs, dy = layer_inputs(3)
    _, saved = fp8moe.moe_forward(**inputs, recipe=recipe)
    _, operands = fp8moe.moe_backward_input(saved, dy)

    def longer(a):
        return np.concatenate([a, a[-1:]])

    def changed(value):
        if isinstance(value, Quantized):
            for q in changed(value.columnwise):
                yield replace(value, columnwise=q)
        elif isinstance(value, QuantTensor):
            for part in ("data", "scales"):
                yield replace(value, **{part: longer(getattr(value, part))})
            if not value.columnwise:
                yield replace(value, data=longer(value.data), scales=longer(value.scales))
            yield replace(value, block=(1, 32))
        else:
            yield longer(value)
            yield value.astype(np.int8)

    plan = saved.plan
    plans = [replace(plan, **{size: getattr(plan, size) + 1}) for size in ("num_tokens", "num_experts")]
    of_w2 = {"gradients": ["dw2"]}
    _, alone = fp8moe.moe_forward(**inputs, recipe=recipe, **of_w2)
    a = () if recipe == "fp8_flow" else ("a",)
    for name, record, fields, backward in (
        ("saved", saved, ("x", "h", "probs", "w13", "w2", *a), lambda r: fp8moe.moe_backward(r, dy)),
        ("saved", alone, ("a", "probs"), lambda r: fp8moe.moe_backward(r, dy, **of_w2)),
        ("operands", operands, ("dy", "a", "dh", "x"), fp8moe.moe_backward_weight),
    ):
        backward(record)
        for field in fields:
            named = "w13|w2" if field == "w13" else field  # w13 has the sizes of the others
            for value in changed(getattr(record, field)):
                with pytest.raises((TypeError, ValueError), match=rf"\b{name}\.({named})\b"):
                    backward(replace(record, **{field: value}))
        for other in plans:
            with pytest.raises((TypeError, ValueError), match=r"\bplan\b"):
                backward(replace(record, plan=other))


def _altered(recompute="moe_expert", recipe="fp8_flow"):
    x, w13, w2 = (
        RNG.standard_normal(shape).astype(BF16) for shape in ((4, 128), (2, 256, 128), (2, 128, 128))
    )
    ids, probs = np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32)
    options = {"recipe": recipe, "recompute": recompute}
    return *fp8moe.moe_forward(x, w13, w2, ids, probs, **options), w13


@pytest.mark.parametrize("rows", [128, 512])
def test_saved_codes_of_another_shape_than_the_transposed_ones_are_refused(rows):
    y, saved, _ = _altered()
    other = fp8moe.quantize_weights(np.ones((2, rows, 128), BF16)).rowwise
    saved = replace(saved, w13=Quantized(other, saved.w13.columnwise))
    with pytest.raises(ValueError, match=r"saved\.w13\.rowwise: got shape"):
        fp8moe.moe_backward(saved, y)


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
def test_accumulators_are_checked_without_saved_w2(recipe):
    """The gradient of w2 does not need w2; what it is added to must have its shape."""
    y, saved, _ = _altered(None, recipe)
    saved = replace(saved, w2=None)
    for out, error in (
        (np.zeros((3, 128, 128), np.float32), ValueError),
        (np.zeros((2, 128, 128), int), TypeError),
    ):
        with pytest.raises(error, match="dw2: got"):
            fp8moe.moe_backward(saved, y, dw2=out, gradients=("dw2",))


def test_saved_weights_of_two_dtypes_are_refused():
    y, saved, _ = _altered(None, "bf16")
    with pytest.raises(TypeError, match=r"saved\.w2: got dtype float16"):
        fp8moe.moe_backward(replace(saved, w2=saved.w2.astype(np.float16)), y)


@pytest.mark.parametrize(
    "change", [{"num_tokens": 128}, {"num_tokens": 384}, {"tokens_per_expert": np.array([100], np.int32)}]
)
def test_saved_places_that_do_not_fit_are_refused(change):
    rows, w13, w2 = (RNG.standard_normal(s).astype(BF16) for s in ((256, 128), (2, 256, 128), (2, 128, 128)))
    counts, probs = np.array([128, 128], np.int32), np.ones(256, np.float32)
    align = {"align_size": 1 if "tokens_per_expert" in change else 128}
    y, saved = fp8moe.moe_forward_permuted(rows, w13, w2, counts, probs, recipe="fp8_flow", **align)
    saved = replace(saved, plan=replace(saved.plan, **change))
    with pytest.raises(ValueError, match=r"saved\.plan\."):
        fp8moe.moe_backward(saved, y[: change.get("num_tokens", 256)])


def test_a_backward_without_w13s_gradient_takes_any_scales_of_x():
    """Only the transpose of x needs powers of two; with recompute and a frozen w13 nothing transposes it."""
    rows, w13, w2 = (RNG.standard_normal(s).astype(BF16) for s in ((256, 128), (2, 256, 128), (2, 128, 128)))
    counts, probs = np.array([128, 128], np.int32), np.ones(256, np.float32)
    options = {"recipe": "fp8_flow", "recompute": "moe_expert", "gradients": ("dx", "dprobs")}
    x = fp8moe.quantize(rows, pow2=False)
    y, saved = fp8moe.moe_forward_permuted(x, w13, w2, counts, probs, align_size=128, **options)
    assert fp8moe.moe_backward(saved, y, gradients=("dx", "dprobs")).dx.shape == (256, 128)


def test_recompute_without_what_it_reads_is_refused():
    y, saved, _ = _altered()
    with pytest.raises(TypeError, match=r"saved\.x: got None"):
        fp8moe.moe_backward(replace(saved, x=None), y)
    without = replace(saved.w13, rowwise=None)
    with pytest.raises(TypeError, match=r"saved\.w13\.rowwise: got None"):
        fp8moe.moe_backward(replace(saved, w13=without), y)
