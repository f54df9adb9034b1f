"""`fp8moe.jax.moe_experts` as JAX trainers call it: layouts, dtypes, widths, stored programs, devices."""

import functools
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import BF16, generator, same_bits
from jax_cases import E, H, K, T, jax, jax_ops, jnp

import fp8moe
from fp8moe.adapters.jax import layer as jax_layer
from fp8moe.layer.options import LayerFields

HERE = Path(__file__).parent
FP8 = ("fp8_flow", "fp8_blockwise")


def problem(hidden=H, ffn=128, dtype=np.float32):
    """x, w1, w3, w2, ids, probs and dy, with master weights and x of the same dtype."""
    rng = generator()
    x, dy = (rng.standard_normal((2, T // 2, hidden)).astype(dtype) for _ in range(2))
    w1, w3 = (
        (
            rng.standard_normal((E, ffn, hidden)) / hidden**0.5 * 2.0 ** rng.integers(-3, 4, (E, ffn, 1))
        ).astype(dtype)
        for _ in range(2)
    )
    w2 = (rng.standard_normal((E, hidden, ffn)) / ffn**0.5).astype(dtype)
    ids = rng.integers(-1, E + 1, (2, T // 2, K)).astype(np.int32)  # -1 and E are no experts
    return x, w1, w3, w2, ids, rng.random(ids.shape).astype(np.float32), dy


def in_layout(w1, w3, w2, transposed, apart):
    turn = (lambda w: np.ascontiguousarray(w.swapaxes(1, 2))) if transposed else (lambda w: w)
    gate_up = tuple(map(turn, (w1, w3))) if apart else turn(np.concatenate([w1, w3], 1))
    return gate_up, turn(w2)


def by_the_library(x, w1, w3, w2, ids, probs, dy, recipe, **options):
    """y, dx, dprobs, dw1, dw3, dw2 with NumPy, with ffn padded explicitly."""
    ffn, rows = w1.shape[1], (-1, x.shape[-1])
    dtype = x.dtype if recipe == "bf16" else BF16
    missing = 0 if recipe == "bf16" else -ffn % 128
    w1, w3 = (np.pad(w, [(0, 0), (0, missing), (0, 0)]) for w in (w1, w3))
    w13, w2 = np.concatenate([w1, w3], 1), np.pad(w2, [(0, 0), (0, 0), (0, missing)])
    y, saved = fp8moe.moe_forward(
        x.astype(dtype).reshape(rows),
        w13,
        w2,
        ids.reshape(-1, K),
        probs.reshape(-1, K),
        recipe=recipe,
        **options,
    )
    of_bf16 = w1.dtype == BF16
    grads = fp8moe.moe_backward(
        saved, dy.astype(dtype).reshape(rows), dtype="bfloat16" if of_bf16 else "float32"
    )
    dw1, dw3 = (half[:, :ffn] for half in np.split(grads.dw13, 2, 1))
    arrays = [y.reshape(x.shape), grads.dx.reshape(x.shape), grads.dprobs.reshape(probs.shape)]
    kinds = [x.dtype, x.dtype, probs.dtype, *[w1.dtype] * 3]
    arrays += [dw1, dw3, grads.dw2[:, :, :ffn]]
    return [a.astype(kind) for a, kind in zip(arrays, kinds, strict=True)]


def step(layer):
    """y and the gradients of x, probs, w13 and w2."""

    def run(x, w13, w2, ids, probs, dy):
        y, back = jax.vjp(lambda x, p, w13, w2: layer(x, w13, w2, ids, p), x, probs, w13, w2)
        return y, *back(dy)

    return run


def by_jax(arguments, transposed=False, apart=False, **options):
    x, w1, w3, w2, ids, probs, dy = arguments
    w13, w2 = in_layout(w1, w3, w2, transposed, apart)
    layer = step(lambda *a: jax_layer.moe_experts(*a, transposed=transposed, **options))
    arrays = jax.tree.map(jnp.asarray, (x, w13, w2, ids, probs, dy))
    y, dx, dprobs, dw13, dw2 = jax.tree.map(np.asarray, jax.jit(layer)(*arrays))
    assert jax.tree.structure(dw13) == jax.tree.structure(w13)
    dw1, dw3 = dw13 if apart else np.split(dw13, 2, 2 if transposed else 1)
    turned = [w.swapaxes(1, 2) if transposed else w for w in (dw1, dw3, dw2)]
    return [y, dx, dprobs, *turned]


def check(results, wanted):
    names = ("y", "dx", "dprobs", "dw1", "dw3", "dw2")
    for name, a, b in zip(names, results, wanted, strict=True):
        assert a.dtype == b.dtype, name
        assert same_bits(np.ascontiguousarray(a), np.ascontiguousarray(b)), name


@pytest.fixture
def sums_in_one_order(monkeypatch):
    """FP8 products whose sums do not depend on the product's shape, as BLAS's do with NumPy 2.5: JAX
    multiplies w1 and w3 apart, and without padding."""

    def promoted(a, b):
        blocks = range(0, a.shape[1], 128)
        return sum(np.einsum("mk,nk->mn", a[:, k : k + 128], b[:, k : k + 128]) for k in blocks)

    monkeypatch.setattr(importlib.import_module("fp8moe.reference.grouped_gemm"), "_promoted", promoted)


@pytest.mark.usefixtures("sums_in_one_order")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "fp8_flow"},
        {"recipe": "fp8_flow", "recompute": "moe_expert"},
        {"recipe": "fp8_flow", "save": "fp8"},
        {"recipe": "fp8_blockwise"},
    ],
)
def test_weight_layouts_give_the_same_bits(options, apart, transposed):
    """Float32 master weights and three-dimensional x: bitwise equal results for all weight layouts."""
    arguments = problem()
    check(by_jax(arguments, transposed, apart, **options), by_the_library(*arguments, **options))


@pytest.mark.parametrize("transposed", [False, True])
def test_weight_layouts_without_fp8(transposed):
    arguments = problem(hidden=24, ffn=40)
    check(by_jax(arguments, transposed, apart=True, recipe="bf16"), by_the_library(*arguments, recipe="bf16"))


def test_master_weights_with_another_dtype_than_x():
    arguments = [a.astype(BF16) if i in (0, 6) else a for i, a in enumerate(problem())]
    wanted = by_the_library(
        *(a.astype(BF16) if i in (1, 2, 3) else a for i, a in enumerate(arguments)), recipe="bf16"
    )
    results = by_jax(arguments, recipe="bf16")
    assert [a.dtype for a in results[3:]] == [np.float32] * 3
    check([a.astype(b.dtype) for a, b in zip(results, wanted, strict=True)], wanted)


@pytest.mark.usefixtures("sums_in_one_order")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("recipe", FP8)
def test_widths_that_are_not_multiples_of_128(recipe, apart, transposed):
    arguments = problem(hidden=144, ffn=72)
    check(by_jax(arguments, transposed, apart, recipe=recipe), by_the_library(*arguments, recipe=recipe))


@pytest.mark.usefixtures("sums_in_one_order")
@pytest.mark.parametrize("ffn", [72, 128])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", FP8)
def test_activation_without_gates(recipe, transposed, ffn):
    x, w1, _, w2, ids, probs, dy = problem(ffn=ffn)
    options, missing = {"recipe": recipe, "activation": fp8moe.Activation("relu2")}, -ffn % 128
    y, saved = fp8moe.moe_forward(
        x.astype(BF16).reshape(-1, H),
        np.pad(w1, [(0, 0), (0, missing), (0, 0)]),
        np.pad(w2, [(0, 0), (0, 0), (0, missing)]),
        ids.reshape(-1, K),
        probs.reshape(-1, K),
        **options,
    )
    grads = fp8moe.moe_backward(saved, dy.astype(BF16).reshape(-1, H))
    wanted = [y, grads.dx, grads.dprobs, grads.dw13[:, :ffn], grads.dw2[:, :, :ffn]]
    turn = (lambda w: w.swapaxes(1, 2)) if transposed else (lambda w: w)
    layer = step(lambda *a: jax_layer.moe_experts(*a, transposed=transposed, **options))
    y, dx, dprobs, dw13, dw2 = jax.jit(layer)(*map(jnp.asarray, (x, turn(w1), turn(w2), ids, probs, dy)))
    for a, b in zip((y, dx, dprobs, turn(dw13), turn(dw2)), wanted, strict=True):
        np.testing.assert_array_equal(a, b.astype(np.float32).reshape(a.shape))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_numpy_arguments(recipe, transposed):
    """NumPy arrays, bfloat16 ones among them, give the bits of JAX's arrays, differentiated or not."""
    x, w1, w3, w2, ids, probs, dy = problem(dtype=BF16)
    arrays = x, *in_layout(w1, w3, w2, transposed, apart=False), probs

    def layer(x, w13, w2, probs):
        return jax_layer.moe_experts(x, w13, w2, ids, probs, recipe=recipe, transposed=transposed)

    np.testing.assert_array_equal(layer(*arrays), layer(*map(jnp.asarray, arrays)))
    for i in range(len(arrays)):
        grads = [
            jax.grad(lambda *a: (layer(*a) * dy).astype(jnp.float32).sum(), argnums=i)(*given)
            for given in (arrays, [*map(jnp.asarray, arrays)])
        ]
        np.testing.assert_array_equal(*grads)


@pytest.mark.parametrize("axis_name", [None, "ep"])
@pytest.mark.parametrize(("tokens", "topk"), [(0, K), (3, 0), (0, 0)])
@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_no_tokens_or_no_experts_of_a_token(recipe, tokens, topk, axis_name):
    layer = functools.partial(jax_layer.moe_experts, recipe=recipe)
    if axis_name is not None:
        layer = functools.partial(layer, axis_name=axis_name)
        one, spec = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("ep",)), jax.P("ep")
        layer = jax.shard_map(layer, mesh=one, in_specs=spec, out_specs=spec, check_vma=False)
    _, w1, w3, w2, *_ = problem()
    x, probs, ids = jnp.ones((tokens, H)), jnp.ones((tokens, topk)), jnp.zeros((tokens, topk), jnp.int32)
    arrays = x, jnp.concatenate([w1, w3], 1), jnp.asarray(w2), ids, probs, x
    results = jax.jit(step(layer))(*arrays)
    for result, like in zip(results, (x, x, probs, *arrays[1:3]), strict=True):
        np.testing.assert_array_equal(result, np.zeros(like.shape))


def test_padded_widths_against_float64():
    """Compared with float64 without padding."""
    x, w1, w3, w2, ids, probs, dy = problem(hidden=144, ffn=72)
    y = by_jax((x, w1, w3, w2, ids, probs, dy), recipe="fp8_flow")[0]
    wide = [a.astype(np.float64) for a in (x, w1, w3, w2)]
    wanted = np.zeros(x.shape)
    for e in range(E):
        a, b = (wide[0] @ w[e].T for w in wide[1:3])
        share = np.where(ids == e, probs, 0).sum(-1, keepdims=True)
        wanted += share * (a / (1 + np.exp(-a)) * b @ wide[3][e].T)
    # e4m3 rounds a value by at most 2^-4 of it, five times between x and y (x, w1 and w3, which are
    # multiplied, the activation and w2); errors of a sum's terms differ in sign
    assert np.linalg.norm(y - wanted) < 5 * 2.0**-4 / 2 * np.linalg.norm(wanted)


def test_codes_of_transposed_weights():
    """Weights quantised once in their own layout, for several steps, give the same result without a
    gradient."""
    x, w1, w3, w2, ids, probs, dy = problem(ffn=72)
    (wi_0, wi_1), wo = jax.tree.map(jnp.asarray, in_layout(w1, w3, w2, transposed=True, apart=True))
    codes = [
        jax_ops.quantize_weights((wi_0, wi_1), rows=128, transposed=True),
        jax_ops.quantize_weights(wo, columns=128, transposed=True),
    ]
    y, back = jax.vjp(
        jax.jit(lambda x: jax_layer.moe_experts(x, *codes, ids, probs, recipe="fp8_flow")), jnp.asarray(x)
    )
    wanted = by_the_library(x, w1, w3, w2, ids, probs, dy, "fp8_flow")
    assert same_bits(np.asarray(y), wanted[0])
    assert same_bits(np.asarray(back(jnp.asarray(dy))[0]), wanted[1])


def test_the_flax_layer_against_ragged_dot():
    """In float32, where both are sums of about a hundred products."""
    pytest.importorskip("flax")
    spec = importlib.util.spec_from_file_location("flax_moe", HERE.parent / "examples/flax_moe.py")
    flax_moe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(flax_moe)
    hidden, ffn, experts, k = flax_moe.HIDDEN, flax_moe.FFN, flax_moe.EXPERTS, flax_moe.TOPK
    rng = generator()
    shapes = (2, 30, hidden), (experts, hidden, ffn), (experts, hidden, ffn), (experts, ffn, hidden)
    arrays = [(rng.standard_normal(s) / s[1] ** 0.5).astype(np.float32) for s in shapes]
    ids = jnp.asarray(np.argsort(rng.random((2, 30, experts)), axis=-1)[..., :k])
    probs, dy = rng.random(ids.shape).astype(np.float32), rng.standard_normal(shapes[0]).astype(np.float32)

    def ours(x, wi_0, wi_1, wo, probs):
        return jax_layer.moe_experts(x, (wi_0, wi_1), wo, ids, probs, recipe="bf16", transposed=True)

    def ragged(x, wi_0, wi_1, wo, probs):
        return flax_moe.by_ragged_dot(x, wi_0, wi_1, wo, ids, probs)

    results = []
    for layer in (ours, ragged):
        y, back = jax.jit(lambda *a, layer=layer: jax.vjp(layer, *a))(*map(jnp.asarray, (*arrays, probs)))
        results.append((y, *back(dy)))
    for result, wanted in zip(*(map(np.asarray, r) for r in results), strict=True):
        # three successive sums of at most 128 float32 products, each with an error of at most 128 * 2^-24 of
        # its terms
        assert np.linalg.norm(result - wanted) <= 3 * 128 * 2.0**-24 * np.linalg.norm(wanted)


REFUSED = {
    "three parts": (
        lambda x, w, v: ((w, w, w), v),
        ValueError,
        r"w13: got a tuple of .*; wanted gates and ups",
    ),
    "parts of two shapes": (lambda x, w, v: ((w, w[:, :1]), v), ValueError, "w13: got a tuple of"),
    "a list of parts": (
        lambda x, w, v: ([w, w], v),
        TypeError,
        r"w13: got a list of 2; wanted an array or a tuple of two; pass tuple\(w13\)",
    ),
    "a list of experts": (
        lambda x, w, v: (list(w), v),
        TypeError,
        r"w13: got a list of \d; wanted an array or a tuple of two; pass jax.numpy.stack\(w13\)",
    ),
    "an empty tuple": (lambda x, w, v: ((), v), TypeError, "w13: got an empty tuple; wanted an array"),
    "lists of numbers": (
        lambda x, w, v: (w, v.tolist()),
        TypeError,
        r"w2: got builtins.list; wanted an array of JAX or NumPy; pass jax.numpy.asarray\(w2\)",
    ),
    "integers": (lambda x, w, v: (w.astype(jnp.int32), v), TypeError, "w13: got dtype int32"),
    "codes": (
        lambda x, w, v: (w, jax_ops.quantize_weights(v)),
        TypeError,
        'w2: got quantised weights; wanted an array for recipe "bf16"',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inconsistent_arguments_raise(name):
    weights, kind, message = REFUSED[name]
    x, w1, w3, w2, ids, probs, _ = map(jnp.asarray, problem())
    with pytest.raises(kind, match=message):
        jax_layer.moe_experts(x, *weights(x, jnp.concatenate([w1, w3], 1), w2), ids, probs, recipe="bf16")
    with pytest.raises(ValueError, match="recipe: got 'fp8'"):
        jax_layer.moe_experts(x, w1, w2, ids, probs, recipe="fp8")


@pytest.mark.parametrize("axis_name", [None, "ep"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("widths", [(72, 100), (128, 100), (256, 128)])
@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
def test_different_widths_of_the_weights_raise(recipe, widths, transposed, axis_name):
    """Also widths that are equal after padding."""
    layer, options = jax_layer.moe_experts, {"recipe": recipe, "transposed": transposed}
    if axis_name is not None:
        options["axis_name"] = axis_name
    (x, w1, w3, *_), (*_, w2, ids, probs, _) = (problem(ffn=ffn) for ffn in widths)
    for apart, name, factor in ((True, "F", 1), (False, "2F", 2)):
        wrong, right = (f"{name} = {factor * ffn}" for ffn in widths)
        with pytest.raises(ValueError, match=f"w13: got {wrong} with F = {widths[1]} of w2; wanted {right}"):
            layer(jnp.asarray(x), *in_layout(w1, w3, w2, transposed, apart), ids, probs, **options)
    with pytest.raises(ValueError, match="w13: got gates and ups for kind='relu2'"):
        layer(x, (w1, w3), w2, ids, probs, **options, activation=fp8moe.Activation("relu2"))


@pytest.mark.parametrize("axis_name", [None, "ep"])
@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_other_numbers_of_dimensions_raise(recipe, axis_name):
    layer, options = jax_layer.moe_experts, {"recipe": recipe}
    if axis_name is not None:
        options["axis_name"] = axis_name
    x, w1, w3, w2, ids, probs, _ = map(jnp.asarray, problem())
    given = {"x": x, "w13": (w1, w3), "w2": w2, "topk_ids": ids, "topk_probs": probs}
    row = {"x": x[0, 0], "topk_ids": ids[0, 0], "topk_probs": probs[0, 0]}
    for name, changed, wanted in (
        ("w13", {"w13": (w1[0], w3[0])}, "three dimensions, the first of experts"),
        ("w13", {"w13": w1[None]}, "three dimensions"),
        ("w2", {"w2": w2[0]}, "three dimensions"),
        ("x", {"x": jnp.ones(())}, r"\[\.\.\., H\]"),
        ("topk_ids", {**row, "topk_ids": ids[0, 0, 0]}, r"\[k\]"),
        ("topk_probs", {**row, "topk_probs": probs[0, 0, 0]}, r"\[k\]"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: got shape \[.*\]; wanted {wanted}"):
            layer(**{**given, **changed}, **options)


@pytest.mark.parametrize("recipe", FP8)
def test_parts_of_two_dtypes_raise(recipe):
    x, w1, w3, w2, ids, probs, _ = map(jnp.asarray, problem())
    weights = (w1, w3.astype(jnp.bfloat16)), w2
    with pytest.raises(TypeError, match="w13: got a tuple of float32 and bfloat16; wanted one dtype"):
        jax_layer.moe_experts(x, *weights, ids, probs, recipe=recipe)


@pytest.mark.parametrize("name", ["x", "w13", "w2"])
def test_codes_without_scales_raise(name):
    x, w1, w3, w2, ids, probs, _ = map(jnp.asarray, problem())
    given = {"x": x, "w13": jnp.concatenate((w1, w3), 1), "w2": w2, "topk_ids": ids, "topk_probs": probs}
    for dtype in ("float8_e4m3fn", "int8"):
        codes = given | {name: given[name].astype(dtype)}
        with pytest.raises(TypeError, match=rf"^{name}: got dtype {dtype}, codes without scales; wanted"):
            jax_layer.moe_experts(**codes)
    with pytest.raises(TypeError, match=rf"^{name}: got dtype int32; wanted .*; pass {name}\.astype"):
        jax_layer.moe_experts(**given | {name: given[name].astype(jnp.int32)})


def test_options_of_one_kind_of_parallelism_without_it_raise():
    x, w1, w3, w2, ids, probs, _ = map(jnp.asarray, problem())
    arrays = x, (w1, w3), w2, ids, probs
    for name in ("capacity", "num_out_tokens"):
        with pytest.raises(ValueError, match=f"{name}: got 8 without axis_name; wanted None"):
            jax_layer.moe_experts(*arrays, **{name: 8})
    sharding = jax.NamedSharding(jax.make_mesh((1,), ("ep",)), jax.P("ep"))
    with pytest.raises(ValueError, match=r"token_sharding: got .* with axis_name='ep'; wanted one of them"):
        jax_layer.moe_experts(*arrays, token_sharding=sharding, axis_name="ep")
    with pytest.raises(TypeError, match=r"^moe_experts\(\) got an unexpected keyword argument 'num_sm'"):
        jax_layer.moe_experts(*arrays, num_sm=8)


def test_default_recipe():
    """The same as of the layer for NumPy's arrays, and for torch's."""
    x, w1, w3, w2, ids, probs, _ = map(jnp.asarray, problem())
    arrays = x, (w1, w3), w2, ids, probs
    wanted = jax_layer.moe_experts(*arrays, recipe="fp8_flow")
    np.testing.assert_array_equal(jax_layer.moe_experts(*arrays), wanted)
    for core in (fp8moe.moe_forward, fp8moe.moe_forward_permuted):
        assert inspect.signature(core).parameters["recipe"].default == LayerFields().recipe == "fp8_flow"


@pytest.mark.parametrize("axis_name", [None, "ep"])
def test_words_for_transposed_raise(axis_name):
    layer, options = jax_layer.moe_experts, {"recipe": "bf16"}
    if axis_name is not None:
        options["axis_name"] = axis_name
    x, w1, w3, w2, ids, probs, _ = map(jnp.asarray, problem())
    with pytest.raises(TypeError, match="transposed: got str; wanted True or False"):
        layer(x, (w1, w3), w2, ids, probs, transposed="false", **options)


@pytest.mark.parametrize("axis_name", [None, "ep"])
def test_other_leading_dimensions_raise(axis_name):
    """Ids and probabilities of [S, B] for tokens of [B, S] would be those of other tokens."""
    layer, options = jax_layer.moe_experts, {"recipe": "bf16"}
    if axis_name is not None:
        options["axis_name"] = axis_name
    x, w1, w3, w2, ids, probs, _ = map(jnp.asarray, problem())
    weights, half = ((w1, w3), w2), T // 2
    message = rf"got shape \[{half}, 2, {K}\]; wanted \[2, {half}, k\], for x \[2, {half}, {H}\]"
    with pytest.raises(ValueError, match=f"topk_ids: {message}"):
        layer(x, *weights, ids.swapaxes(0, 1), probs.swapaxes(0, 1), **options)
    with pytest.raises(ValueError, match=f"topk_probs: {message}"):
        layer(x, *weights, ids, probs.swapaxes(0, 1), **options)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("hidden", "ffn"), [(64, 24), (64, 32), (64, 64)])
@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_weights_of_the_other_layout_name_the_option(recipe, hidden, ffn, transposed, apart):
    """Also those whose gates and ups, or both weights, are square."""
    rng = np.random.default_rng(0)
    w1, w3 = rng.standard_normal((2, 2, ffn, hidden)).astype(np.float32)
    w2 = rng.standard_normal((2, hidden, ffn)).astype(np.float32)
    x, ids, probs = jnp.ones((4, hidden)), jnp.zeros((4, 1), int), jnp.ones((4, 1))
    weights = in_layout(w1, w3, w2, transposed, apart)
    jax_layer.moe_experts(x, *weights, ids, probs, recipe=recipe, transposed=transposed)
    if hidden == ffn and apart:
        return  # which fit in both layouts
    with pytest.raises(ValueError, match=f"w13: got .*; pass transposed={transposed} for weights"):
        jax_layer.moe_experts(x, *weights, ids, probs, recipe=recipe, transposed=not transposed)


@pytest.mark.parametrize("axis_name", [None, "ep", "sharded tokens"])
@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_probs"])
def test_lists_are_refused_by_name(name, axis_name):
    layer, options = jax_layer.moe_experts, {"recipe": "bf16"}
    if axis_name == "ep":
        options["axis_name"] = axis_name
    elif axis_name is not None:
        mesh = jax.make_mesh((1,), ("ep",), (jax.sharding.AxisType.Auto,))
        options["token_sharding"] = jax.NamedSharding(mesh, jax.P("ep"))
    x, w1, w3, w2, ids, probs, _ = map(jnp.asarray, problem())
    given = {"x": x, "topk_ids": ids, "topk_probs": probs}
    given[name] = np.asarray(given[name]).tolist()
    with pytest.raises(TypeError, match=f"{name}: got builtins.list; wanted an array"):
        jax.jit(lambda w13: layer(w13=w13, w2=w2, **given, **options))((w1, w3))


def test_one_leading_dimension_for_ids():
    x, w1, w3, w2, ids, probs, _ = map(jnp.asarray, problem())
    flat = (a.reshape(-1, K) for a in (ids, probs))
    y, wanted = (
        jax_layer.moe_experts(x, (w1, w3), w2, *routing, recipe="bf16") for routing in (flat, (ids, probs))
    )
    np.testing.assert_array_equal(y, wanted)


# ---------------------------------------------------------------- backends


def gradient_by(backend, axis_name=None, num_sms=None):
    """A program that computes the layer's gradient, and its arguments."""
    _, w1, w3, w2, *_ = problem()
    w13, ids = jnp.asarray(np.concatenate([w1, w3], 1)), jnp.zeros((T, 1), jnp.int32)
    arrays = jnp.ones((T, H)), w13, jnp.asarray(w2), ids, jnp.ones((T, 1))
    layer, options = jax_layer.moe_experts, {"recipe": "fp8_flow", "backend": backend, "num_sms": num_sms}
    if axis_name is not None:
        options["axis_name"] = axis_name
    return jax.grad(lambda *a: layer(*a, **options).sum()), arrays


@pytest.mark.parametrize("axis_name", [None, "ep"])
@pytest.mark.parametrize(
    ("backend", "num_sms"),
    [(None, None), ("wgmma", None), ("mma", None), ("cublas", None), ("plain", None), (None, 8)],
)
def test_backend_and_limit_of_both_directions(backend, num_sms, axis_name):
    """The lowered CUDA program contains the backend and the SM limit for all products, and no CUDA graph if
    the backend reads the offsets back."""
    gradient, arrays = gradient_by(backend, axis_name, num_sms)
    if axis_name is not None:
        mesh = jax.make_mesh((1,), (axis_name,), devices=jax.devices("cpu")[:1])
        spec = jax.sharding.PartitionSpec()
        gradient = jax.shard_map(gradient, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(gradient).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r'custom_call @(fp8moe_call\w*)\(.*?call = "(.*?)"', program)  # with \22 for quotes
    products = [(target, text) for target, text in calls if "experts_" in text or "moe_" in text]
    assert len(products) == 2  # forward and backward
    for target, text in products:
        assert set(re.findall(r"backend\\22:(?:\\22)?(\w+)", text)) == {backend or "null"}
        assert set(re.findall(r"num_sms\\22:(\w+)", text)) == {str(num_sms or "null")}
        assert target == ("fp8moe_call" if backend == "cublas" else "fp8moe_call_in_graph")


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("backend", ["wgmma", "mma", "cublas", "plain"])
def test_backend_on_the_cpu_raises(backend, jit):
    gradient, arrays = gradient_by(backend)
    run = jax.jit(gradient) if jit else gradient
    with pytest.raises(ValueError, match=f"backend: got '{backend}' for arrays on the CPU; wanted None"):
        run(*arrays)


@pytest.mark.parametrize("jit", [False, True])
def test_sm_limit_on_the_cpu_raises(jit):
    gradient, arrays = gradient_by(None, num_sms=4)
    run = jax.jit(gradient) if jit else gradient
    with pytest.raises(ValueError, match="num_sms: got 4 for arrays on the CPU; wanted None"):
        run(*arrays)
    with pytest.raises(ValueError, match="num_sms: got 3; wanted an even number"):
        gradient_by(None, num_sms=3)[0](*arrays)


@pytest.mark.parametrize("axis_name", [None, "ep"])
def test_unknown_backend_raises(axis_name):
    gradient, arrays = gradient_by("wmma", axis_name)
    with pytest.raises(ValueError, match="backend: got 'wmma'; wanted one of None, 'wgmma', 'mma', 'cublas'"):
        gradient(*arrays)


# ---------------------------------------------------------------- missing gradients

WITHOUT = {
    "quantize_weights": (lambda w: jax_ops.quantize_weights(w).rowwise.scales, "pass the float arrays to"),
    "quantize": (lambda w: jax_ops.quantize(w[0]).scales, "pass the float arrays to fp8moe.jax.moe_experts"),
    "swiglu_quantize": (lambda w: jax_ops.swiglu_quantize(w[0]).scales, "pass the float arrays to"),
    "grouped_gemm": (
        lambda w: jax_ops.grouped_gemm(w[0], w, jnp.array([0, 64, 128], jnp.int32)),
        "call fp8moe.jax.moe_experts, which has gradients",
    ),
    "swiglu_backward": (
        lambda w: jax_ops.swiglu_backward(w[0, :, :64], w[0]).dh,
        "it computes a gradient, and has no second derivative",
    ),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", WITHOUT)
def test_non_differentiable_operations_raise(name, jit):
    function, instead = WITHOUT[name]
    w = jnp.asarray(generator().standard_normal((2, 128, 128)).astype(np.float32))
    run = jax.jit(function) if jit else function
    with pytest.raises(TypeError, match=f"{name}: got arrays that are differentiated.*{instead}"):
        jax.grad(lambda w: run(w).sum())(w)
    jax.grad(lambda w: run(jax.lax.stop_gradient(w)).sum())(w)  # as the message suggests


# ---------------------------------------------------------------- stored programs, several devices


FOUR_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


def run_script(*arguments, **environment):
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


def test_program_is_cached_and_exported(tmp_path):
    """The next process finds it in JAX's compilation cache, and can run what ``jax.export`` wrote."""
    pytest.importorskip("flatbuffers")
    script = HERE / "jax_stored.py"
    digest, hits = run_script(script, "make", tmp_path)
    assert hits == "0"
    of_exported, _, again, hits = run_script(script, "load", tmp_path)
    assert of_exported == again == digest
    assert hits == "1"


def test_symbolic_shapes_raise():
    (rows,) = jax.export.symbolic_shape("rows,")
    export = jax.export.export(jax.jit(jax_ops.quantize), disabled_checks=jax_ops.EXPORT_CHECKS)
    with pytest.raises(TypeError, match=r"quantize: got an array of symbolic shape \(rows, 128\)"):
        export(jax.ShapeDtypeStruct((rows, 128), jnp.float32))


def test_program_of_another_version_raises(monkeypatch):
    exported = jax.export.export(jax.jit(jax_ops.quantize), disabled_checks=jax_ops.EXPORT_CHECKS)(
        jnp.ones((8, 128))
    )
    monkeypatch.setattr(fp8moe, "__version__", "9.9")
    with pytest.raises(Exception, match=r"program: got one that was made with fp8moe .*; wanted 9.9"):
        jax.block_until_ready(exported.call(jnp.ones((8, 128))))


def test_program_partitioned_over_devices():
    assert run_script(HERE / "jax_sharded.py", **FOUR_DEVICES) == ["right"]


def test_shard_map_that_checks_axes():
    assert run_script(HERE / "jax_checked_axes.py", **FOUR_DEVICES) == ["right"]


def test_process_that_exits_before_its_results():
    """The gradient is not waited for, so XLA's threads still have to make its calls when Python exits."""
    program = (
        "import jax, jax.numpy as jnp\nfrom fp8moe import jax as jax_ops\nx = jnp.ones((16, 128))\n"
        "w13, w2 = jnp.ones((4, 256, 128)), jnp.ones((4, 128, 128))\nids = jnp.zeros((16, 1), int)\n"
        "run = lambda w13: jax_ops.moe_experts(x, w13, w2, ids, x[:, :1], recipe='fp8_flow').sum()\n"
        "jax.grad(jax.jit(run))(w13)\nprint('end')\n"
    )
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **FOUR_DEVICES}
    assert subprocess.run(command, timeout=120, env=environment, check=True, stdout=-1).stdout == b"end\n"


def test_the_programs_of_the_docs():
    pytest.importorskip("flatbuffers")
    programs = re.findall(r"```python\n(.*?)```", (HERE.parent / "docs/how-to/jax.md").read_text(), re.DOTALL)
    assert len(programs) == 3
    run_script("-W", "error", "-c", "\n".join(programs), **FOUR_DEVICES)
