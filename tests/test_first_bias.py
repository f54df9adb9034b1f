"""The bias of the first GEMM and its gradient, against float64; torch layers' results are in
test_torch_functional.py."""

import functools
import itertools

import numpy as np
import pytest
import torch
from backends import over
from cases import (
    BF16,
    GPT_OSS,
    assert_close,
    assert_same,
    generator,
    layer_inputs,
    offsets_of,
    relative,
    same_bits,
    values,
)
from oracles import torch_swiglu

import fp8moe
from fp8moe.layer.permuted_rows import PlacedRows
from fp8moe.ops.bias import raw_chunk_sums, raw_expert_sums, sums_of_chunks
from fp8moe.ops.grouped_gemm import raw_grouped_gemm, raw_permute_gemm
from fp8moe.ops.permute import raw_permute
from fp8moe.ops.swiglu import raw_swiglu_quantize_backward
from fp8moe.runtime.dispatch import operation

RNG = generator()
RECIPES = "bf16", "fp8_blockwise", "fp8_flow"
EVERY = "dx", "dprobs", "dw13", "dw2", "dbias13"


@operation
def biased_gemm(x, w, offsets, bias, *, backend=None):
    return raw_grouped_gemm(x, w, offsets, bias=bias, backend=backend)


@over(
    "gemm, dtype, counts, width, depth",
    reference=[(None, kind, [5, 0, 30], 20, 40) for kind in ("e4m3", BF16, np.float32, np.float64)],
    on_cpu=[
        ("wgmma", "e4m3", [300, 0, 5, 130], 264, 272),  # half and whole tiles, of one and of two columns
        ("wgmma", "e4m3", [129], 40, 640),
        ("wgmma", BF16, [130, 0, 5], 392, 136),
        ("mma", "e4m3", [5, 0, 130], 136, 144),
        ("mma", BF16, [40, 3], 21, 40),
        ("plain", np.float32, [5, 0, 30], 20, 40),
        ("plain", np.float64, [5, 0, 30], 20, 40),
    ],
    on_gpu=[
        (gemm, kind, counts, *sizes)
        for gemm in ("plain", "mma", "wgmma", "cublas")
        for kind in ("e4m3", BF16)
        for counts in ([128, 0, 256], [2000, 1, 0, 700])
        for sizes in ((200, 304), (1152, 1280))
    ],
)
def test_the_gemm_adds_the_bias(backend, gemm, dtype, counts, width, depth):
    """Of the row's expert, before it rounds; not to rows of no expert. An expert without rows, and one with,
    have NaN as bias."""
    backend.skip_without(gemm)
    offsets, wide = offsets_of(counts), np.float64 if dtype == np.float64 else np.float32
    rows = int(offsets[-1]) + 3
    x, w = values(RNG, (rows, depth)), values(RNG, (len(counts), width, depth))
    bias = (RNG.standard_normal((len(counts), width)) * np.exp2(RNG.integers(-8, 24, width))).astype(wide)
    bias[np.array(counts) == 0] = np.nan
    if len(counts) > 1:
        bias[0, 3] = np.nan
    if dtype == "e4m3":
        x, w = fp8moe.quantize(x), fp8moe.quantize(w, block=(128, 128))
        exact = [fp8moe.dequantize(q).astype(np.float64) for q in (x, w)]
    else:
        x, w = x.astype(dtype), w.astype(dtype)
        exact = [a.astype(np.float64) for a in (x, w)]
    both = backend.both(biased_gemm, x, w, offsets, bias, **({} if gemm is None else {"backend": gemm}))
    true, size, most = np.zeros((3, rows, width))
    for e, (lo, hi) in enumerate(itertools.pairwise(offsets)):
        true[lo:hi] = exact[0][lo:hi] @ exact[1][e].T + bias[e]
        size[lo:hi] = np.abs(exact[0][lo:hi]) @ np.abs(exact[1][e]).T + np.abs(bias[e])
        most[lo:hi] = of_32(exact[0][lo:hi]) @ of_32(exact[1][e]).T
    for out in both:
        # sums of depth + 1 values in float32; then the result's rounding
        unit = {"e4m3": 2.0**-8, BF16: 2.0**-8}.get(dtype, 0.0)
        error_of_sums = (depth + 2) * 2.0 ** (-53 if wide == np.float64 else -24) * size
        if gemm in ("wgmma", "mma"):
            # a tensor core adds 32 products to the sum of up to 96, all cut to 14 bits of the largest
            error_of_sums += 2.0**-13 * (32 * most + 4 * size)
        # by "cublas" the bias is rounded first
        of_bias = 2.0**-8 * size if gemm == "cublas" else 0
        bound = unit * np.abs(true) + (1 + unit) * error_of_sums + of_bias
        error = np.abs(out.astype(np.float64) - true)
        np.testing.assert_array_equal(np.isnan(error), np.isnan(true))
        assert not (error > bound).any()
        assert not out[rows - 3 :].astype(np.float32).any()


def of_32(x):
    """The largest magnitude of each 32 values of a row."""
    return np.abs(np.pad(x, ((0, 0), (0, -x.shape[1] % 32)))).reshape(len(x), -(-x.shape[1] // 32), 32).max(2)


@operation
def gathered(x, w, plan, bias):
    return raw_permute_gemm(x, w, plan, bias=bias).data


@operation
def permuted(x, w, plan, bias):
    rows = raw_permute(x, plan).data
    return raw_grouped_gemm(rows, w, plan.expert_offsets, plan.tokens_per_expert, bias=bias)


@over(
    "tokens, experts, topk, width, depth",
    on_cpu=[(150, 4, 2, 264, 272), (20, 9, 1, 24, 144)],
    on_gpu=[(3000, 16, 4, 2064, 1168), (700, 40, 8, 264, 2048)],
)
def test_gathered_rows_with_a_bias(backend, tokens, experts, topk, width, depth):
    """As those of a permutation, bit for bit."""
    backend.skip_without("wgmma")
    ids = RNG.integers(0, experts - 1, (tokens, topk)).astype(np.int32)
    plan = fp8moe.plan_topk(ids, experts, align_size=128)
    x = fp8moe.quantize(values(RNG, (tokens, depth), BF16))
    w = fp8moe.quantize(values(RNG, (experts, width, depth)), block=(128, 128))
    bias = values(RNG, (experts, width))
    bias[-1] = np.nan
    assert_same(*(backend.both(f, x, w, plan, bias)[1] for f in (gathered, permuted)))
    expected, actual = backend.both(gathered, x, w, plan, bias)
    real = plan_rows(plan)
    # float32 sums in another order, then one rounding to bfloat16's 8 bits
    assert relative(actual[real], expected[real].astype(np.float64)) <= 2.0**-8


def plan_rows(plan):
    """The rows that are not padding."""
    starts = zip(plan.expert_offsets, plan.tokens_per_expert, strict=False)
    return np.concatenate([np.arange(start, start + count) for start, count in starts])


@operation
def gradients_and_sums(grad, h, probs, offsets, activation):
    plan = PlacedRows(None, offsets, h.shape[0], h.shape[0], 128)
    sums = sums_of_chunks(h.shape, plan)
    options = {"activation": activation, "expert_offsets": offsets, "align_size": 128, "transposed": True}
    g = raw_swiglu_quantize_backward(grad, h, probs, **options, sums=sums)
    return g, raw_expert_sums(sums, plan)


@over(
    "counts, width, activation, kind",
    reference=[([128, 0, 256], 128, GPT_OSS, BF16)],
    on_cpu=[([128, 0, 256], 256, GPT_OSS, BF16), ([128], 96, GPT_OSS, BF16)],
    on_gpu=[
        ([128, 0, 2560, 0], width, activation, BF16)
        for width in (96, 1280)
        for activation in (
            fp8moe.Activation(),
            GPT_OSS,
            fp8moe.Activation("gelu"),
            fp8moe.Activation("relu2"),
        )
    ],
)
def test_sums_of_an_activations_gradient(backend, counts, width, activation, kind):
    """Of its float32 values, whatever is quantised; of rows of no expert nothing."""
    offsets = offsets_of(counts)
    rows = int(offsets[-1]) + 128
    grad, h = (
        values(RNG, (rows, width), kind),
        RNG.standard_normal((rows, activation.columns(width))).astype(kind),
    )
    probs = RNG.random(rows).astype(np.float32)
    grad[offsets[-1] :] = np.nan
    leaf = torch.tensor(h.astype(np.float64), requires_grad=True)
    y = torch_swiglu(leaf, torch.tensor(probs.astype(np.float64)), activation)
    dh = torch.autograd.grad(y, leaf, torch.tensor(grad.astype(np.float64)))[0].numpy()
    with_sums = backend.both(gradients_and_sums, grad, h, probs, offsets, activation)
    for _, sums in with_sums:
        for e, (lo, hi) in enumerate(itertools.pairwise(offsets)):
            size = (
                np.abs(grad[lo:hi].astype(np.float64)).sum() / width * (1 + np.abs(dh[lo:hi]).max(initial=0))
            )
            # each value within some twenty roundings to float32, and the fast sigmoid within 2^-20
            bound = 2.0**-18 * (np.abs(dh[lo:hi]).sum(axis=0) + 2.0**-4 * size)
            assert (np.abs(sums[e] - dh[lo:hi].sum(axis=0)) <= bound).all()
    if width % 128 == 0:  # the sums change nothing else
        options = {"activation": activation, "expert_offsets": offsets, "align_size": 128, "transposed": True}
        plain = backend.both(fp8moe.swiglu_quantize_backward, grad, h, probs, **options)
        for a, (b, _) in zip(plain, with_sums, strict=True):
            assert_same((a.dh.rowwise, a.dprobs), (b.dh.rowwise, b.dprobs))


@over(
    "kind, counts, align, width",
    reference=[
        (k, c, a, 24) for k in (BF16, np.float64) for c, a in (([130, 0, 7, 300], 1), ([128, 0, 256], 128))
    ],
    on_cpu=[
        *((k, [130, 0, 7, 300, 1], 1, 1032) for k in (BF16, np.float32)),
        *((k, [3, 128, 0, 256], 1, 21) for k in (BF16, np.float64)),
        (BF16, [128, 0, 256], 128, 16),
    ],
    on_gpu=[
        (k, counts, align, width)
        for k in (BF16, np.float16, np.float32, np.float64)
        for width in (21, 5760)
        for counts, align in (([5000, 0, 7, 300], 1), ([128, 0, 2560], 128))
    ],
)
def test_sums_over_experts_rows(backend, kind, counts, align, width):
    """New ones, and added to those of an earlier chunk of a batch. Rows of no expert are NaN."""
    offsets, rows = offsets_of(counts), sum(counts) + 128
    x = values(RNG, (rows, width)).astype(kind)
    x[offsets[-1] :] = np.nan

    @operation
    def twice(x, offsets):
        plan = PlacedRows(None, offsets, rows, rows, align)
        sums = raw_chunk_sums(x, plan)
        return raw_expert_sums(sums, plan, raw_expert_sums(sums, plan))

    for got in backend.both(twice, x, offsets):
        assert got.dtype == (np.float64 if kind == np.float64 else np.float32)
        for e, (lo, hi) in enumerate(itertools.pairwise(offsets)):
            exact = 2 * x[lo:hi].astype(np.float64)
            # 128 sums in float32, and the result's roundings; in float64 also the oracle's sums
            unit = (hi - lo + 4) * 2.0**-52 if kind == np.float64 else 130 * 2.0**-24
            assert (np.abs(got[e] - exact.sum(axis=0)) <= unit * np.abs(exact).sum(axis=0)).all()


def inputs_of(seed, dtype=BF16, **sizes):
    """Of experts of which the last has no row; with a bias that is no bfloat16."""
    inputs, dy = layer_inputs(seed, dtype=dtype, **sizes)
    inputs["topk_ids"][inputs["topk_ids"] == len(inputs["w13"]) - 1] = -1
    bias = RNG.standard_normal(inputs["w13"].shape[:2]) * RNG.choice([0.25, 1.0], inputs["w13"].shape[1])
    return inputs | {"bias13": bias.astype(np.float64 if dtype == np.float64 else np.float32)}, dy


def exact_layer(inputs, dy, activation):
    """y and the gradients of x, the probabilities, w13, w2 and the bias, by torch in float64."""
    names = "x", "topk_probs", "w13", "w2", "bias13"
    x, probs, w13, w2, bias = leaves = [
        torch.tensor(inputs[n].astype(np.float64), requires_grad=True) for n in names
    ]
    h = torch.einsum("th,enh->ten", x, w13) + bias
    every = torch.einsum("tef,ehf->teh", torch_swiglu(h, None, activation), w2)
    ids = torch.tensor(inputs["topk_ids"].astype(np.int64))
    chosen = torch.take_along_dim(every, ids.clamp(min=0)[:, :, None], 1)
    y = (chosen * (probs * (ids >= 0))[:, :, None]).sum(1)
    return [
        t.numpy() for t in (y.detach(), *torch.autograd.grad(y, leaves, torch.tensor(dy.astype(np.float64))))
    ]


def step(
    x, w13, w2, topk_ids, topk_probs, bias13, dy, *, gradients=EVERY, halves=False, dtype="float32", **options
):
    y, saved = fp8moe.moe_forward(
        x, w13, w2, topk_ids, topk_probs, bias13=bias13, gradients=gradients, **options
    )
    if halves:
        g, operands = fp8moe.moe_backward_input(saved, dy, gradients=gradients)
        del saved
        of_weights = fp8moe.moe_backward_weight(operands, dtype=dtype)
        return y, g.dx, g.dprobs, *(getattr(of_weights, n) for n in EVERY[2:])
    g = fp8moe.moe_backward(saved, dy, gradients=gradients, dtype=dtype)
    return y, *(getattr(g, n) for n in EVERY)


def close_to_exact(results, inputs, dy, recipe, activation):
    # as in test_moe.py's test_recipes_stay_within_their_precision
    bound = {"bf16": 2.0**-8, "float64": 1e-10}.get(recipe, 2.0**-4) * 12**0.5 / 3**0.5
    for actual, true in zip(results, exact_layer(inputs, dy, activation), strict=True):
        error = np.linalg.norm(actual.astype(np.float64) - true)
        assert error <= bound * np.linalg.norm(true)


@pytest.mark.parametrize("activation", [fp8moe.Activation(), GPT_OSS, fp8moe.Activation("relu2")], ids=str)
def test_a_float64_layer_equals_torchs(activation):
    inputs, dy = inputs_of(5, np.float64, tokens=300, hidden=12, ffn=7)
    for name in ("w13", "bias13"):
        inputs[name] = inputs[name][:, : activation.columns(7)].copy()
    results = step(**inputs, dy=dy, recipe="bf16", activation=activation, dtype="float64")
    assert results[-1].dtype == np.float64
    close_to_exact(results, inputs, dy, "float64", activation)


@over(
    "recipe, activation, tokens",
    reference=[(recipe, GPT_OSS, 400) for recipe in RECIPES],
    on_gpu=[
        (recipe, a, tokens)
        for recipe in RECIPES
        for a in (GPT_OSS, fp8moe.Activation(), fp8moe.Activation("relu2"))
        for tokens in (40, 3000)
    ],
)
def test_a_layer_with_bias(backend, recipe, activation, tokens):
    """Every gradient; that of the bias of the expert without rows is zero."""
    inputs, dy = inputs_of(6, tokens=tokens, hidden=136 if recipe == "bf16" else 128)
    for name in ("w13", "bias13"):
        inputs[name] = inputs[name][:, : activation.columns(128)].copy()
    call = functools.partial(step, recipe=recipe, activation=activation)
    for results in backend.both(lambda *arrays: call(*arrays), *inputs.values(), dy):
        close_to_exact(results, inputs, dy, recipe, activation)
        assert not results[-1][-1].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_bits(recipe):
    """With recomputation, in halves, for some of the gradients, of quantised weights, and of permuted rows
    with and without padding."""
    inputs, dy = inputs_of(8, tokens=300, dropped=0.2)
    plain = step(**inputs, dy=dy, recipe=recipe)
    others = [
        step(**inputs, dy=dy, recipe=recipe, recompute="moe_expert"),
        step(**inputs, dy=dy, recipe=recipe, halves=True),
        step(**inputs, dy=dy, recipe=recipe, recompute="moe_expert", halves=True),
    ]
    if recipe != "bf16":
        codes = {name: fp8moe.quantize_weights(inputs[name]) for name in ("w13", "w2")}
        others.append(step(**inputs | codes, dy=dy, recipe=recipe))
    for other in others:
        assert all(same_bits(a, b) for a, b in zip(plain, other, strict=True))
    for gradients in (("dbias13",), ("dw2", "dbias13"), ("dx", "dbias13"), ("dw13",)):
        some = step(**inputs, dy=dy, recipe=recipe, gradients=gradients)
        for name, got, whole in zip(EVERY, some[1:], plain[1:], strict=True):
            assert (got is not None) == (name in gradients or (name == "dprobs" and "dx" in gradients))
            assert got is None or same_bits(got, whole)
    x, ids = inputs["x"], inputs["topk_ids"][:, 0].copy()
    rows = np.argsort(np.where(ids < 0, len(inputs["w13"]), ids), kind="stable")[: (ids >= 0).sum()]
    one = inputs | {"topk_ids": ids[:, None], "topk_probs": inputs["topk_probs"][:, :1].copy()}
    whole = step(**one, dy=dy, recipe=recipe)
    counts = np.bincount(ids[ids >= 0], minlength=len(inputs["w13"])).astype(np.int32)
    for align in (1, 128):
        places = np.concatenate(
            [np.arange(n) + start for n, start in zip(counts, padded_starts(counts, align), strict=True)]
        )
        size = int(padded_starts(counts, align)[-1] + -(-counts[-1] // align) * align)

        def placed(a, places=places, size=size):
            out = np.zeros((size, *a.shape[1:]), a.dtype)
            out[places] = a[rows]
            return out

        y, saved = fp8moe.moe_forward_permuted(
            placed(x),
            inputs["w13"],
            inputs["w2"],
            counts,
            placed(one["topk_probs"][:, 0]),
            bias13=inputs["bias13"],
            recipe=recipe,
            align_size=align,
        )
        g = fp8moe.moe_backward(saved, placed(dy))
        assert same_bits(y[places], whole[0][rows])
        for got, wanted in zip((g.dw13, g.dw2, g.dbias13), whole[3:], strict=True):
            # chunks of rows may begin elsewhere
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def padded_starts(counts, align):
    padded = -(-counts // align) * align
    return np.cumsum(padded) - padded


@pytest.mark.parametrize("recipe", RECIPES)
def test_nan_in_an_experts_bias_reaches_its_own_rows_alone(recipe):
    inputs, dy = inputs_of(9, tokens=300)
    plain = step(**inputs, dy=dy, recipe=recipe)
    inputs["bias13"] = inputs["bias13"].copy()
    inputs["bias13"][0] = inputs["bias13"][-1] = np.nan  # the last one has no rows
    got = step(**inputs, dy=dy, recipe=recipe)
    touched = (inputs["topk_ids"] == 0).any(axis=1)
    for a, b in zip(got[:2], plain[:2], strict=True):
        assert same_bits(a[~touched], b[~touched])
        assert np.isnan(a[touched].astype(np.float32)).any(axis=1).all()
    for a, b in zip(got[3:], plain[3:], strict=True):
        assert same_bits(a[1:], b[1:])
        assert np.isnan(a[0]).any()


@pytest.mark.parametrize(
    ("bias", "error", "words"),
    [
        (np.zeros((4, 256), BF16), TypeError, "bias13: got dtype bfloat16; wanted float32"),
        (np.zeros((4, 256)), TypeError, "bias13: got dtype float64; wanted float32"),
        (np.zeros((4, 255), np.float32), ValueError, r"bias13: got shape \[4, 255\]; wanted \[4, 256\]"),
        (np.zeros((3, 256), np.float32), ValueError, r"bias13: got shape \[3, 256\]; wanted \[4, 256\]"),
    ],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_wrong_biases_raise(recipe, bias, error, words):
    inputs, _ = layer_inputs(3)
    with pytest.raises(error, match=words):
        fp8moe.moe_forward(**inputs, bias13=bias, recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_without_bias_has_no_gradient_of_one(recipe):
    inputs, dy = layer_inputs(4)
    y, saved = fp8moe.moe_forward(**inputs, recipe=recipe)
    zero = fp8moe.moe_forward(**inputs, recipe=recipe, bias13=np.zeros(inputs["w13"].shape[:2], np.float32))
    assert_same(y, zero[0])
    g, same = fp8moe.moe_backward(saved, dy), fp8moe.moe_backward(zero[1], dy)
    assert g.dbias13 is None
    assert same.dbias13 is not None
    assert_close((g.dw13, same.dw13), 0.0)
