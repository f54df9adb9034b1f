"""The JAX adapter on the CPU: bitwise equal results under jit, gradients, JAX's transformations."""

import functools
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cases import BF16, assert_same
from jax_cases import (
    IDS,
    OFFSETS,
    OPERATIONS,
    ORDER,
    PLAN,
    PROBS,
    RNG,
    SIZES,
    E,
    F,
    H,
    Q,
    T,
    X,
    in_float8,
    jax,
    jax_ops,
    jnp,
    weights,
)

import fp8moe
from fp8moe import Activation, RouterConfig
from fp8moe.adapters.jax import calls as jax_calls
from fp8moe.adapters.jax import ffi as jax_ffi
from fp8moe.adapters.jax import layer as jax_layer
from fp8moe.runtime.record_trees import map_arrays


def to_jax(value):
    return map_arrays(lambda a: jnp.asarray(a), value)


def to_numpy(value):
    return map_arrays(lambda a: np.asarray(a), value)


def jitted(function, *args, **options):
    """Calls the function with all arrays of args traced."""
    return to_numpy(jax.jit(lambda *a: function(*a, **options))(*map(to_jax, args)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_under_jit_equal_eager_ones(name):
    args, options = OPERATIONS[name]
    verb = name.split()[0]
    wanted = getattr(fp8moe, verb)(*args, **options)
    static = [i for i, a in enumerate(args) if isinstance(a, (int, str))]
    traced = [a for i, a in enumerate(args) if i not in static]

    def function(*arrays):
        following = iter(arrays)
        arguments = [a if i in static else next(following) for i, a in enumerate(args)]
        return getattr(jax_ops, verb)(*arguments, **{k: to_jax(v) for k, v in options.items()})

    assert_same(wanted, jitted(function, *traced))
    eager = function(*map(to_jax, traced))
    assert_same(wanted, to_numpy(eager))


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
def test_the_layers_gradients(recipe, recompute):
    w13, w2 = weights(BF16 if recipe == "bf16" else np.float32)
    dy = RNG.standard_normal((T, H)).astype(BF16)

    def loss(x, w13, w2, probs):
        y = jax_layer.moe_experts(
            x,
            w13,
            w2,
            IDS_ON_JAX,
            probs,
            recipe=recipe,
            recompute=recompute,
            activation=Activation(clamp=2.0),
        )
        return (y.astype(jnp.float32) * to_jax(dy)).sum()

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*map(to_jax, (X, w13, w2, PROBS)))
    _, saved = fp8moe.moe_forward(
        X, w13, w2, IDS, PROBS, recipe=recipe, recompute=recompute, activation=Activation(clamp=2.0)
    )
    wanted = fp8moe.moe_backward(saved, dy)
    for a, b in zip(grads, (wanted.dx, wanted.dw13, wanted.dw2, wanted.dprobs), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b.astype(a.dtype))


IDS_ON_JAX = jnp.asarray(IDS)


def test_jitted_step_uses_the_current_weights():
    """Compiled once, with different weights in every step, in donated memory: never uses earlier weights."""

    def step(w13, w2, x, probs):
        def loss(w13, w2):
            return (
                jax_layer.moe_experts(x, w13, w2, IDS_ON_JAX, probs, recipe="fp8_flow")
                .astype(jnp.float32)
                .sum()
            )

        value, grads = jax.value_and_grad(loss, argnums=(0, 1))(w13, w2)
        return value, w13 - 10 * grads[0], w2 - 10 * grads[1]

    step = jax.jit(step, donate_argnums=(0, 1))
    held = tuple(map(to_jax, weights()))
    values = []
    for _ in range(3):
        known = [np.array(w) for w in held]
        value, *held = step(*held, to_jax(X), to_jax(PROBS))
        y, saved = fp8moe.moe_forward(X, *known, IDS, PROBS, recipe="fp8_flow")
        grads = fp8moe.moe_backward(saved, np.ones_like(y))
        for updated, w, grad in zip(held, known, (grads.dw13, grads.dw2), strict=True):
            # w - 10 * grad has one rounding or two, depending on XLA's fusion
            np.testing.assert_allclose(updated, w - 10 * grad, rtol=2.0**-22, atol=2.0**-22 * np.abs(w).max())
        values.append(float(value))
    assert len(set(values)) == 3


def test_quantised_weights_have_no_gradient():
    """Those that exist in one orientation alone; the others' are the bits of NumPy's."""
    codes = [fp8moe.quantize_weights(w, columnwise=False) for w in weights()]

    def loss(x, w13, w2, probs):
        return jax_layer.moe_experts(x, w13, w2, IDS_ON_JAX, probs).astype(jnp.float32).sum()

    given = *map(to_jax, (X, *codes)), to_jax(PROBS)
    dx, dprobs = jax.jit(jax.grad(loss, argnums=(0, 3)))(*given)
    y, saved = fp8moe.moe_forward(X, *codes, IDS, PROBS)
    wanted = fp8moe.moe_backward(saved, np.ones_like(y), gradients=("dx", "dprobs"))
    assert_same((wanted.dx, wanted.dprobs), to_numpy((dx, dprobs)))
    with pytest.raises(TypeError, match=r"grad requires real- or .* got uint8"):
        jax.grad(loss, argnums=1)(*given)
    with pytest.raises(TypeError, match=r"w2: got a QuantTensor; .*; pass fp8moe.Quantized\(w2\)$"):
        loss(*given[:2], given[2].rowwise, given[3])


def test_gradients_of_moved_rows():
    """For a linear function, the gradient times a step equals the incoming gradient times the function of the
    step."""
    g, s = (RNG.standard_normal((PLAN.num_out_tokens, H)).astype(np.float32) for _ in range(2))
    x, dx = (RNG.standard_normal((T, H)).astype(np.float32) for _ in range(2))
    plan = to_jax(PLAN)
    cases = [
        (lambda x: jax_ops.permute(x, plan, to_jax(PROBS)).data, x, dx, g),
        (lambda p: jax_ops.permute(to_jax(x), plan, p).probs, PROBS, PROBS + 1, g[:, 0].copy()),
        (lambda r: jax_ops.unpermute(r, plan, to_jax(PROBS)), g, s, x),
        (lambda p: jax_ops.unpermute(to_jax(g), plan, p), PROBS, PROBS - 0.5, x),
        (lambda x: jax_ops.sort_chunks(x, SIZES, ORDER, align_size=8, num_out_tokens=64).data, x, dx, g[:64]),
        (lambda x: jax_ops.pad(x, to_jax(SIZES), 16, num_out_tokens=96), x, dx, np.resize(g, (96, H))),
    ]
    for function, at, step, grad in cases:
        out, back = jax.vjp(jax.jit(function), to_jax(at))
        (gradient,) = back(to_jax(grad[: len(out)]))
        moved = function(to_jax(at + step)) - out
        left, right = np.vdot(gradient, step), np.vdot(grad[: len(out)], moved)
        # float32 sums of len(out) * H products
        assert abs(left - right) <= 1e-4 * np.linalg.norm(grad) * np.linalg.norm(moved)


def test_gradient_of_swiglu():
    h = RNG.standard_normal((T, H)).astype(np.float32)

    def plain(h, p):
        a, b = jnp.split(h, 2, axis=-1)
        return (jax.nn.silu(a) * b * p[:, None] * jnp.arange(H // 2)).sum()

    def ours(h, p):
        return (jax_ops.swiglu(h, p) * jnp.arange(H // 2)).sum()

    probs = PROBS[:, 0].copy()
    for a, b in zip(*(jax.jit(jax.grad(f, (0, 1)))(h, probs) for f in (ours, plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_transformations():
    w13, w2 = map(to_jax, weights())
    x, probs = to_jax(X), to_jax(PROBS)

    def layer(x, _=None):
        return jax_layer.moe_experts(x, w13, w2, IDS_ON_JAX, probs, recipe="fp8_flow").astype(x.dtype), None

    def stacked(x):
        return jax.lax.scan(layer, x, None, length=2)[0].astype(jnp.float32).sum()

    def twice(x):
        return layer(layer(x)[0])[0].astype(jnp.float32).sum()

    wanted = jax.grad(twice)(x)
    for function in (stacked, lambda x: jax.checkpoint(twice)(x)):
        np.testing.assert_array_equal(np.asarray(jax.jit(jax.grad(function))(x)), np.asarray(wanted))
    many = jnp.stack([x, 2 * x, -x])
    for a, b in zip(jax.vmap(lambda x: layer(x)[0])(many), many, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(layer(b)[0]))


@pytest.mark.parametrize("jit", [False, True])
def test_float8_arrays_are_codes(jit):
    back, transposed = to_numpy((jax.jit(in_float8) if jit else in_float8)(*to_jax((X, OFFSETS))))
    np.testing.assert_array_equal(back, fp8moe.dequantize(Q))
    assert_same(fp8moe.scaling_aware_transpose(Q, OFFSETS), transposed)


def test_mxfp8_blocks_with_nan_are_nan():
    x = X.astype(np.float32)
    x[1, 5] = np.nan

    def work(x):
        q = jax_ops.quantize(x, block=(1, 32))
        return q, jax_ops.scaling_aware_transpose(q), jax_ops.dequantize(q)

    q, columns, back = jitted(work, x)
    np.testing.assert_array_equal(np.argwhere(q.scales == 255), [[1, 0]])
    np.testing.assert_array_equal(np.argwhere(np.isnan(back)), [[1, column] for column in range(32)])
    assert_same((q, columns), (fp8moe.quantize(x, block=(1, 32)), fp8moe.scaling_aware_transpose(q)))


@pytest.mark.parametrize("jit", [False, True])
def test_array_to_add_to_is_not_changed(jit):
    a, b = (RNG.standard_normal((T, H)).astype(np.float32) for _ in range(2))
    into = np.ones((E, H, H), np.float32)
    arguments = to_jax((a, b, OFFSETS, into))

    def function(a, b, offsets, into):
        return jax_ops.grouped_gemm_wgrad(a, b, offsets, into), into

    total, same = to_numpy((jax.jit(function) if jit else function)(*arguments))
    np.testing.assert_array_equal(total, fp8moe.grouped_gemm_wgrad(a, b, OFFSETS, into.copy()))
    for untouched in (same, arguments[3]):
        np.testing.assert_array_equal(untouched, into)


def test_numpy_array_to_add_to_in_a_program():
    """A constant of the program: the sum is returned, and the array is not changed."""
    into = np.ones((E, H, H), np.float32)
    x = X.astype(np.float32)  # one array: of equal operands BLAS computes a product in another order
    wanted = fp8moe.grouped_gemm_wgrad(x, x, OFFSETS, into.copy())
    step = jax.jit(lambda x: jax_ops.grouped_gemm_wgrad(x, x, OFFSETS, into))
    for _ in range(2):
        np.testing.assert_array_equal(step(x), wanted)
    assert (into == 1).all()
    codes = fp8moe.quantize(np.zeros_like(X))
    assert_same(fp8moe.quantize(X), to_numpy(jax.jit(lambda x: jax_ops.quantize(x, out=codes))(X)))


@pytest.mark.parametrize("jit", [False, True])
def test_one_array_to_add_to_twice(jit):
    """JAX's arrays are immutable, so one of them may be given for several sums."""
    w13, w2 = weights(BF16)
    dy, into = RNG.standard_normal((T, H)).astype(BF16), np.ones((E, F, H), np.float32)
    _, saved = fp8moe.moe_forward(X, w13, w2, IDS, PROBS, recipe="fp8_flow")
    wanted = fp8moe.moe_backward(saved, dy, dw13=(into.copy(), into.copy()))

    def function(saved, dy, into):
        return jax_ops.moe_backward(saved, dy, dw13=(into, into)), into

    grads, same = (jax.jit(function) if jit else function)(*to_jax((saved, dy, into)))
    assert_same(wanted, to_numpy(grads))
    np.testing.assert_array_equal(same, into)


@pytest.mark.parametrize("jit", [False, True])
def test_array_to_add_to_that_is_also_an_input(jit):
    x, dy, (w13, w2) = X.astype(np.float32), RNG.standard_normal((T, H)).astype(np.float32), weights()
    _, saved = fp8moe.moe_forward(x, w13, w2, IDS, PROBS, recipe="bf16")
    wanted = fp8moe.moe_backward(saved, dy, dw2=w2.copy())

    def function(saved, dy):
        return jax_ops.moe_backward(saved, dy, dw2=saved.w2)

    assert_same(wanted, to_numpy((jax.jit(function) if jit else function)(*to_jax((saved, dy)))))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recompute": "all"}, ValueError, "recompute: got 'all'"),
        (
            {"activation": "swiglu"},
            TypeError,
            r"activation: got str; wanted an fp8moe.Activation; make it by fp8moe.Activation\(kind, ",
        ),
        ({"token_sharding": jax.sharding.PartitionSpec("data")}, TypeError, "wanted a NamedSharding"),
    ],
)
def test_options_of_the_layer(options, error, message):
    w13, w2 = weights(BF16)
    with pytest.raises(error, match=message):
        jax_layer.moe_experts(X, w13, w2, IDS, PROBS, recipe="fp8_flow", **options)


def test_numpy_arrays_of_64_bits_in_a_program():
    """JAX makes 32-bit arrays of them, and the operation must read those."""
    x, (w13, w2), ids, probs = X, weights(BF16), IDS.astype(np.int64), PROBS.astype(np.float64)
    wanted, _ = fp8moe.moe_forward(x, w13, w2, IDS, PROBS, recipe="fp8_flow")
    layer = jax.jit(lambda x: jax_ops.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow")[0])
    np.testing.assert_array_equal(layer(x), wanted)
    plan = fp8moe.plan_topk(IDS, E)
    rows = fp8moe.quantize(RNG.standard_normal((plan.num_out_tokens, 128)).astype(np.float32))
    merged = jax.jit(lambda q: jax_ops.unpermute(q, to_jax(plan), probs))(to_jax(rows))
    np.testing.assert_array_equal(merged, fp8moe.unpermute(rows, plan, PROBS))
    q = fp8moe.quantize(x)
    moved = jax.jit(lambda q: jax_ops.permute(q, to_jax(plan), probs).probs)(to_jax(q))
    np.testing.assert_array_equal(moved, fp8moe.permute(q, plan, PROBS).probs)
    order, sizes = np.arange(E)[::-1].copy(), np.full(E, 2)
    grads = jax.jit(lambda g: jax_ops.sort_chunks_backward(g, sizes, order, num_tokens=2 * E))(X[: 2 * E])
    np.testing.assert_array_equal(
        jax.tree.leaves(grads)[0],
        jax.tree.leaves(fp8moe.sort_chunks_backward(X[: 2 * E], sizes, order, num_tokens=2 * E))[0],
    )


@pytest.mark.parametrize("accumulates", [False, True])
def test_quantised_weights_of_an_eager_forward_in_a_program(accumulates):
    """How often codes have been overwritten is unknown in a program, and never for jax.Arrays."""
    w13, w2 = (jax_ops.quantize_weights(jnp.asarray(w)) for w in weights(BF16))
    y, saved = jax_ops.moe_forward(to_jax(X), w13, w2, to_jax(IDS), to_jax(PROBS), recipe="fp8_flow")
    wanted = jax_ops.moe_backward(saved, y)
    if accumulates:
        actual = jax_ops.moe_backward(saved, y, dw2=jnp.zeros_like(wanted.dw2))
    else:
        actual = jax.jit(jax_ops.moe_backward)(saved, y)
    assert_same(to_numpy(wanted), to_numpy(actual))


def test_eager_vmap_compiles_once():
    x, f = jnp.asarray(RNG.standard_normal((3, 4, 8)), jnp.float32), jax.vmap(jax_ops.swiglu_backward, (0, 0))
    grad = x[..., :4] + 1
    wanted, before = jax.tree.map(np.asarray, f(grad, x)), jax_calls.places_called()
    for _ in range(3):
        assert_same(wanted, jax.tree.map(np.asarray, f(grad, x)))
    assert jax_calls.places_called() == before
    for i in range(3):
        assert_same(to_numpy(jax_ops.swiglu_backward(grad[i], x[i])).dh, wanted.dh[i])


def test_call_sites_live_as_long_as_their_program():
    """A program that can still run keeps its call sites while others are dropped, and a dropped one none."""
    x = jnp.ones((8, 128))

    def program(factor):
        return jax.jit(lambda x: jax_ops.dequantize(jax_ops.quantize(x * factor)))

    gc.collect()
    before, kept, compiled = jax_calls.places_called(), program(2), program(3).lower(x).compile()
    np.testing.assert_array_equal(kept(x) + compiled(x), 5)
    descriptions = [site.kept.get("described") for site in jax_ffi.live_sites()]
    for i in range(4):
        np.testing.assert_array_equal(program(2.0**i)(x), 2.0**i)
        gc.collect()
        assert jax_calls.places_called() == before + 4
    assert [site.kept.get("described") for site in jax_ffi.live_sites()] == descriptions
    np.testing.assert_array_equal(kept(x) + compiled(x), 5)
    layouts = [weakref.ref(d.memory) for d in descriptions if d is not None]
    del kept, compiled, descriptions
    gc.collect()
    gc.disable()  # scratch memory of dropped programs must not wait for garbage collection
    try:
        assert jax_calls.places_called() == before
        assert sum(layout() is not None for layout in layouts) == before
    finally:
        gc.enable()


def test_two_first_calls_of_a_call_site_at_once(monkeypatch):
    """Both use one description, whose scratch memory a captured graph uses."""
    site, made = jax_ffi.Site(b""), []

    class Memory:
        def run(self, *_):
            used.append(self)

    def description(call):
        made.append(SimpleNamespace(memory=Memory()))
        own = made[-1]
        if len(made) == 1:
            jax_calls._execute(call)  # as another thread does meanwhile
        return own

    used = []
    monkeypatch.setattr(jax_calls, "_checked_description", description)
    for _ in range(2):
        jax_calls._execute(jax_ffi.Call(site, (), (), 0, 0))
    assert len(made) == 2
    assert len(used) == 3
    assert len(set(used)) == 1


@pytest.mark.parametrize(
    ("x", "results", "message"),
    [
        (jnp.ones((8, 128), jnp.int32), [jnp.uint8, jnp.float32], r"arrays int32\[8, 128\]; wanted float32"),
        (jnp.ones((8, 256)), [jnp.uint8, jnp.float32], r"arrays float32\[8, 256\]; wanted float32\[8, 128\]"),
        (
            jnp.ones((8, 128)),
            [jnp.float8_e4m3fn, jnp.float32],
            r"results float8_e4m3fn\[8, 128\], float32\[8, 1\]; wanted uint8\[8, 128\], float32\[8, 1\]",
        ),
    ],
)
def test_buffers_other_than_described_raise(x, results, message):
    call = jax.make_jaxpr(jax_ops.quantize)(jnp.ones((8, 128))).eqns[0]
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, d) for v, d in zip(call.outvars, results, strict=True)]
    run = jax.ffi.ffi_call("fp8moe_call_in_graph", shapes)
    with pytest.raises(Exception, match=f"program: got {message}.*; trace the program again"):
        jax.block_until_ready(run(x, call=call.params["text"]))


def test_without_jit():
    """`jax.disable_jit` also reaches operations that are called eagerly."""
    x = jnp.asarray(RNG.standard_normal((3, 2, 8)), jnp.float32)
    wanted = jax.vmap(jax_ops.swiglu)(x)
    with jax.disable_jit():
        np.testing.assert_array_equal(jax.vmap(jax_ops.swiglu)(x), wanted)


def test_records_have_one_structure_for_all_values():
    q = jax_ops.quantize(jnp.ones((8, 128)))
    assert jax.tree.reduce(lambda a, b: a + b, jax.tree.map(lambda a: a.nbytes, q)) == 8 * 128 + 8 * 4
    assert jax.tree.structure(jax.tree.map(lambda a: 0, q)) == jax.tree.structure(q)
    many = jax.vmap(jax_ops.quantize)(jnp.ones((2, 8, 128)))
    axes = jax.tree.map(lambda a: 0, many)
    assert jax.vmap(jax_ops.dequantize, in_axes=(axes,))(many).shape == (2, 8, 128)


@pytest.mark.parametrize("dtype", [np.float32, jnp.float32, np.dtype("float32")])
def test_types_in_place_of_names(dtype):
    with pytest.raises(TypeError, match=r"dtype: got .*; wanted the name of the type, such as"):
        jax.jit(lambda q: jax_ops.dequantize(q, dtype=dtype))(to_jax(fp8moe.quantize(X)))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [jnp.int4, jnp.float4_e2m1fn, jnp.complex64])
def test_dtypes_of_other_widths_in_a_program(dtype, platform):
    """XLA packs two elements of 4 bits into a byte; kernels would move a byte of each."""
    permute = jax.jit(lambda x: jax_ops.permute(x, to_jax(PLAN)).data)
    name = np.dtype(dtype).name
    with pytest.raises(TypeError, match=f"permute: dtype {name} is not supported; wanted one of bool, int8"):
        permute.trace(jnp.ones((T, H), dtype)).lower(lowering_platforms=(platform,))


def test_random_keys_in_a_program():
    keys = jax.random.split(jax.random.key(0), (T, 2))
    with pytest.raises(TypeError, match="permute: dtype key<fry> is not supported; wanted one of bool"):
        jax.jit(lambda x: jax_ops.permute(x, to_jax(PLAN)).data)(keys)


def test_results_of_64_bits_in_a_program():
    a, offsets = jnp.ones((T, H)), jnp.asarray(OFFSETS)
    wgrad = jax.jit(lambda a: jax_ops.grouped_gemm_wgrad(a, a, offsets, dtype="float64"))
    with pytest.raises(TypeError, match="dtype: got float64, which JAX would truncate"):
        wgrad(a)
    with jax.enable_x64(True):
        assert wgrad(a).dtype == np.float64


def test_calls_in_a_program_are_not_counted():
    f, x = jax.jit(lambda x: jax_ops.dequantize(jax_ops.quantize(x))), jnp.ones((256, 1024))
    f(x).block_until_ready()
    with fp8moe.trace() as counts:
        f(x).block_until_ready()
    assert counts.casts == 0


def test_quantize_weights_with_out():
    w = weights()[0]
    again = jitted(lambda w, q: jax_ops.quantize_weights(w, out=q), w, fp8moe.quantize_weights(w * 3))
    assert_same(fp8moe.quantize_weights(w), again)
    eager = jax_ops.quantize_weights(to_jax(w), out=to_jax(fp8moe.quantize_weights(w * 3)))
    assert_same(fp8moe.quantize_weights(w), to_numpy(eager))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", [list, tuple])
def test_counts_as_numbers(kind, jit):
    """The result has exactly the rows that they count, also in a program."""
    rows, counts = RNG.standard_normal((13, H)).astype(np.float32), kind([3, np.int64(0), 9, 1])
    padded = fp8moe.pad(rows, counts, 8)
    for verb, x, wanted in ((jax_ops.pad, rows, padded), (jax_ops.unpad, padded, rows)):
        function = functools.partial(verb, tokens_per_expert=counts, align_size=8)
        y, back = jax.vjp(jax.jit(function) if jit else function, to_jax(x))
        np.testing.assert_array_equal(y, wanted)
        np.testing.assert_array_equal(back(y)[0], x)


def test_traced_counts_in_a_list_raise():
    with pytest.raises(TypeError, match=r"tokens_per_expert: got .*Tracer; wanted an integer"):
        jax.jit(lambda n: jax_ops.pad(jnp.ones((T, H)), [n, n], 8))(1)


NUMPY_SCALARS = {
    "plan_topk": ((IDS, np.int64(E)), {"align_size": np.int32(16)}),
    "quantize": ((X,), {"block": (np.int64(1), 128), "pow2": np.bool_(True), "eps": np.float32(0.5)}),
    "pad": ((X, SIZES, np.int64(16)), {"num_out_tokens": np.int64(96)}),
    "sort_chunks": ((X, SIZES, ORDER), {"keep_rest": np.bool_(True)}),
    "route": ((PROBS, RouterConfig(1)), {"num_sequences": np.int64(2)}),
}


@pytest.mark.parametrize("name", NUMPY_SCALARS)
def test_numpy_scalars_in_a_program(name):
    (x, *args), options = NUMPY_SCALARS[name]
    wanted = getattr(fp8moe, name)(x, *args, **options)
    assert_same(wanted, jitted(lambda x: getattr(jax_ops, name)(x, *args, **options), x))


@pytest.mark.parametrize("kind", [list, tuple, set])
def test_names_of_gradients_in_a_program(kind):
    def function(x, w13, w2):
        names = kind(["dx", "dprobs"])
        y, saved = jax_ops.moe_forward(x, w13, w2, IDS, PROBS, recipe="fp8_flow", gradients=names)
        return jax_ops.moe_backward(saved, y, gradients=names)

    grads = jitted(function, X, *weights(BF16))
    assert grads.dw13 is grads.dw2 is None
    assert grads.dx.shape == X.shape


def test_reading_values_while_tracing_raises():
    with pytest.raises(TypeError, match="pass num_out_tokens as a number"):
        jax.jit(lambda i: jax_ops.plan_topk(i, E, num_out_tokens="exact"))(IDS_ON_JAX)


def test_inconsistent_arguments_raise_while_tracing():
    with pytest.raises(ValueError, match="x"):
        jax.jit(lambda x: jax_ops.permute(x, to_jax(PLAN)))(jnp.ones((T + 1, H)))


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from fp8moe import jax as jax_ops
mesh = Mesh(np.array(jax.devices()), ("d",))
x = jax.random.normal(jax.random.PRNGKey(0), (64, 256)).astype(jnp.bfloat16)
def one(x):
    return jax_ops.dequantize(jax_ops.quantize(x), dtype="bfloat16")
both = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))(x)
assert len(jax.devices()) == 2 and (np.asarray(both) == np.asarray(one(x))).all()
"""


def test_two_devices():
    flags = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SHARDED], check=True, env=flags)


def on_devices(count, platform):
    script = Path(__file__).with_name("jax_devices.py")
    flags = {"JAX_PLATFORMS": platform, "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
    command = [sys.executable, script, str(count)]
    environment = {**os.environ, **flags}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    return process.stdout.strip() or process.stderr


@pytest.mark.parametrize("devices", [2, 4])
def test_expert_parallel(devices):
    assert on_devices(devices, "cpu") == "right on cpu"


@pytest.mark.parametrize("devices", [pytest.param(n, marks=pytest.mark.multigpu(n)) for n in (2, 4)])
def test_expert_parallel_on_gpus(devices):
    assert on_devices(devices, "cuda") == "right on gpu"


def test_import_without_jax_names_the_fix():
    code = "import sys; sys.modules['jax'] = None\nimport fp8moe.adapters.jax.ops"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'jax>=0.10'" in process.stderr
    version = "import jax; jax.__version_info__, jax.__version__ = (0, 9, 1), '0.9.1'"
    old = version + "\nimport fp8moe.adapters.jax.ops"
    process = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True)
    assert "needs jax 0.10 or later (this is jax 0.9.1)" in process.stderr


def plain_dispatch(x, mask, probs, align, rows):
    """Dispatch row by row in NumPy."""
    out, moved, place, starts = np.zeros((rows, x.shape[1]), x.dtype), np.zeros(rows, np.float32), {}, []
    at = 0
    for e in range(mask.shape[1]):
        starts.append(at)
        for t in np.flatnonzero(mask[:, e]):
            out[at], moved[at], place[t, e] = x[t], probs[t, e], at
            at += 1
        at = starts[-1] + -(-(at - starts[-1]) // align) * align
    return out, moved, place


@pytest.mark.parametrize("align", [None, 8])
@pytest.mark.parametrize("jit", [False, True])
def test_transformer_engines_names(align, jit):
    from fp8moe.adapters.transformer_engine import jax as te

    mask = RNG.random((2, T // 2, E)) < 0.4
    x, probs = X.astype(np.float32).reshape(2, T // 2, H), RNG.random((2, T // 2, E)).astype(np.float32)
    count = int(mask.sum())

    def there_and_back(x, probs):
        rows, moved, row_map, pads, counts = te.token_dispatch(x, mask_on_jax, count, probs, align)
        again = te.token_combine(rows, row_map, probs, pads)
        return rows, moved, counts, again

    mask_on_jax = jnp.asarray(mask)
    run = jax.jit(there_and_back) if jit else there_and_back
    rows, moved, counts, again = run(*map(jnp.asarray, (x, probs)))
    size = count if align is None else (count + E * (align - 1)) // align * align
    flat, flat_probs, flat_mask = x.reshape(T, H), probs.reshape(T, E), mask.reshape(T, E)
    wanted, wanted_probs, place = plain_dispatch(flat, flat_mask, flat_probs, align or 1, size)
    np.testing.assert_array_equal(rows, wanted)
    np.testing.assert_array_equal(moved, wanted_probs)
    padded = flat_mask.sum(0) if align is None else -(-flat_mask.sum(0) // align) * align
    np.testing.assert_array_equal(counts, padded)
    weights = np.where(flat_mask, flat_probs, 0).sum(1, keepdims=True)
    np.testing.assert_allclose(again, flat * weights, rtol=1e-5, atol=1e-5)

    def loss(x, probs):
        rows, moved, _, again = there_and_back(x, probs)
        return (again * 3).sum() + (moved * jnp.arange(size)).sum() + (rows * 2).sum()

    dx, dprobs = (jax.jit(jax.grad(loss, (0, 1))) if jit else jax.grad(loss, (0, 1)))(
        *map(jnp.asarray, (x, probs))
    )
    wanted_dx = 3 * weights + 2 * flat_mask.sum(1, keepdims=True)
    np.testing.assert_allclose(dx.reshape(T, H), np.broadcast_to(wanted_dx, (T, H)), rtol=1e-5)
    wanted_dp = np.zeros((T, E))
    for (t, e), at in place.items():
        wanted_dp[t, e] = at + 3 * flat[t].astype(np.float64).sum()
    np.testing.assert_allclose(dprobs.reshape(T, E), wanted_dp, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "int32", "float8_e4m3fn"])
@pytest.mark.parametrize("align", [None, 4])
@pytest.mark.parametrize("jit", [False, True])
def test_rows_of_probability_zero(jit, align, dtype):
    """As in Transformer Engine a row whose probability is 0 becomes zeros, by which callers drop tokens from
    a routing of fixed width; its gradient still reaches its token."""
    from fp8moe.adapters.transformer_engine import jax as te

    mask = np.zeros((T, E), bool)
    np.put_along_axis(mask, np.argsort(RNG.random((T, E)), axis=1)[:, :2], True, axis=1)
    probs = np.where(RNG.random((T, E)) < 0.5, RNG.random((T, E)) + 0.5, 0).astype(np.float32)
    x = jnp.asarray(RNG.integers(1, 9, (T, H)), dtype)  # numbers that each of the dtypes has

    def dispatch(x, probs):
        return te.token_dispatch(x, jnp.asarray(mask), 2 * T, probs, align)[:2]

    rows, moved = (jax.jit(dispatch) if jit else dispatch)(x, jnp.asarray(probs))
    kept, wanted_probs, place = plain_dispatch(np.asarray(x), mask, probs, align or 1, len(rows))
    for (t, e), at in place.items():
        kept[at] = np.where(probs[t, e] == 0, 0, kept[at])
    np.testing.assert_array_equal(np.asarray(rows).astype(np.float32), kept.astype(np.float32))
    np.testing.assert_array_equal(moved, wanted_probs)
    if dtype == "float32":
        dx = jax.grad(lambda x: dispatch(x, jnp.asarray(probs))[0].sum())(x)
        np.testing.assert_array_equal(dx, np.full((T, H), 2))


@pytest.mark.parametrize("jit", [False, True])
def test_transformer_engines_chunk_sort(jit):
    from fp8moe.adapters.transformer_engine import jax as te

    run = jax.jit(te.sort_chunks_by_index) if jit else te.sort_chunks_by_index
    out, row_map = run(*map(jnp.asarray, (X, SIZES, ORDER)))
    chunks = np.split(np.arange(T), np.cumsum(SIZES)[:-1])
    order = np.concatenate([chunks[i] for i in ORDER])
    np.testing.assert_array_equal(np.asarray(out).astype(np.float32), X[order].astype(np.float32))
    np.testing.assert_array_equal(np.asarray(row_map)[order], np.arange(T))


def test_nan_reaches_its_token():
    """NaN in a token's row reaches the token's sum; NaN in padding reaches no sum."""
    from fp8moe.adapters.transformer_engine import jax as te

    mask = jnp.asarray(np.eye(4, dtype=np.int32))
    x = jnp.ones((4, 8))
    rows, _, row_map, pads, _ = te.token_dispatch(x, mask, 4, align_size=2)
    poisoned = rows.at[1].set(jnp.nan)  # a padding row of the first expert
    assert np.isfinite(np.asarray(te.token_combine(poisoned, row_map, None, pads))).all()
    broken = np.asarray(te.token_combine(rows.at[2].set(jnp.nan), row_map, mask * 0.0, pads))
    assert np.isnan(broken[1]).all()
    assert np.isfinite(broken[[0, 2, 3]]).all()


def test_dispatch_without_a_count_raises():
    from fp8moe.adapters.transformer_engine import jax as te

    with pytest.raises(ValueError, match="num_out_tokens: got -1"):
        te.token_dispatch(jnp.ones((4, 8)), jnp.ones((4, 2)), -1)


# ---------------------------------------------------------------- Transformer Engine's other functions


@pytest.mark.parametrize("jit", [False, True])
def test_rows_after_the_chunks_are_unchanged(jit):
    from fp8moe.adapters.transformer_engine import jax as te

    sizes, order = np.array([3, 0, 4, 2], np.int32), np.array([2, 3, 1, 0], np.int32)
    x = RNG.standard_normal((12, 8)).astype(np.float32)
    wanted = np.array([3, 4, 5, 6, 7, 8, 0, 1, 2, 9, 10, 11])

    def run(x):
        return te.sort_chunks_by_index(x, jnp.asarray(sizes), jnp.asarray(order))

    out, row_map = (jax.jit(run) if jit else run)(jnp.asarray(x))
    np.testing.assert_array_equal(out, x[wanted])
    np.testing.assert_array_equal(np.asarray(row_map)[wanted], np.arange(12))
    weights = RNG.standard_normal((12, 8)).astype(np.float32)
    dx = jax.grad(lambda x: (run(x)[0] * weights).sum())(jnp.asarray(x))
    back = np.empty_like(weights)
    back[wanted] = weights
    np.testing.assert_array_equal(dx, back)


@pytest.mark.parametrize("align", [0, 1, 4])
@pytest.mark.parametrize("first", [None, 2])
def test_dispatch_by_sorting(align, first):
    """Compared with loops; gradients with those of the same sums over rows selected one by one."""
    from fp8moe.adapters.transformer_engine import jax as te

    experts, k, hidden, batch = 5, 2, 8, (2, 7)
    mask = np.zeros((14, experts), bool)
    np.put_along_axis(mask, np.argsort(RNG.random((14, experts)), axis=1)[:, :k], True, axis=1)
    probs = np.where(mask, RNG.random((14, experts)), 0).astype(np.float32)
    ids, weights = te.routing_map_to_selected_experts(jnp.asarray(probs), jnp.asarray(mask), k)
    assert [list(np.flatnonzero(row)) for row in mask] == np.asarray(ids).tolist()
    np.testing.assert_array_equal(weights, np.take_along_axis(probs, np.asarray(ids), 1))

    x = RNG.standard_normal((*batch, hidden)).astype(np.float32)
    lists = [[(t, s) for t in range(14) for s in range(k) if ids[t, s] == e] for e in range(experts)]
    lists = lists[first or 0 :] + lists[: first or 0]
    source, sizes = [], []
    for members in lists:
        padding = -len(members) % (align or 1)
        source += [*members, *[None] * padding]
        sizes.append(len(members) + padding)
    source += [None] * (28 + experts * max(align - 1, 0) - len(source))
    factors = RNG.standard_normal((len(source), hidden)).astype(np.float32)

    @jax.jit
    def run(x, weights):
        rows, state, counts = te.pure_jax_token_dispatch(x, ids.reshape(*batch, k), experts, k, align, first)
        assert state.num_real_tokens == 28
        assert state.padding_size == len(source) - 28
        return rows, counts, te.pure_jax_token_combine(rows * factors, state, weights, k, *batch)

    rows, counts, y = run(jnp.asarray(x), weights)
    flat, w = x.reshape(14, hidden), np.asarray(weights)
    wanted = np.array([np.zeros(hidden) if s is None else flat[s[0]] for s in source], np.float32)
    np.testing.assert_array_equal(rows, wanted)
    assert counts.tolist() == sizes
    wanted_y, dy = np.zeros((14, hidden)), RNG.standard_normal((14, hidden)).astype(np.float32)
    wanted_dx, wanted_dw = np.zeros((14, hidden)), np.zeros((14, k))
    for row, place in enumerate(source):
        if place is not None:
            t, s = place
            wanted_y[t] += w[t, s] * flat[t].astype(np.float64) * factors[row]
            wanted_dx[t] += w[t, s] * dy[t].astype(np.float64) * factors[row]
            wanted_dw[t, s] = (dy[t].astype(np.float64) * flat[t] * factors[row]).sum()
    _, back = jax.vjp(lambda x, w: run(x, w)[2], jnp.asarray(x), weights)
    dx, dw = back(jnp.asarray(dy.reshape(*batch, hidden)))
    # sums of at most 8 float32 products of values below about 30
    for result, true in ((y, wanted_y), (dx, wanted_dx), (dw, wanted_dw)):
        np.testing.assert_allclose(np.asarray(result).reshape(true.shape), true, rtol=0, atol=1e-4)


def test_numpy_arguments_of_transformer_engines_functions():
    """The original's functions take NumPy's arrays, and sums of a mask for num_out_tokens."""
    from fp8moe.adapters.transformer_engine import jax as te

    x, ids = (
        RNG.standard_normal((T, H)).astype(np.float32),
        RNG.permuted(np.tile(np.arange(E), (T, 1)), axis=1),
    )
    rows, state, _ = te.pure_jax_token_dispatch(x, ids, E, E)
    y = te.pure_jax_token_combine(np.asarray(rows), state, np.full((T, E), 1 / E, np.float32), E, 1, T)
    # the products by a power of two are exact; each of E - 1 additions rounds a sum of at most |x|
    np.testing.assert_allclose(y[0], x, rtol=(E - 1) * 2.0**-24)
    mask = RNG.random((T, E)) < 0.5
    counts = te.token_dispatch(x, mask, mask.sum())[4]
    np.testing.assert_array_equal(counts, mask.sum(0))


def test_parameters_of_a_ragged_all_to_all():
    """Every row is sent to its expert's shard, sorted by expert there, and sent back."""
    from fp8moe.adapters.transformer_engine import jax as te

    shards, local = 3, 2
    table = RNG.integers(0, 4, (shards, shards * local)).astype(np.int32)
    table[0, :2] = 0
    sent = [
        np.array([(s, e, i) for e in range(shards * local) for i in range(n[e])]).reshape(-1, 3)
        for s, n in enumerate(table)
    ]
    room = int(table.sum()) + 2

    def exchange(buffers, params):
        """jax.lax.ragged_all_to_all as documented."""
        out = [np.full((room, 3), -1) for _ in range(shards)]
        for source, (starts, sizes, places, _) in enumerate(params):
            for target in range(shards):
                n, at, to = sizes[target], starts[target], places[target]
                assert params[target][3][source] == n
                out[target][to : to + n] = buffers[source][at : at + n]
        return out

    def params(function):
        run = jax.jit(function, static_argnums=2)
        return [tuple(map(np.asarray, run(jnp.asarray(table), jnp.int32(s), shards))) for s in range(shards)]

    arrived = exchange(sent, params(te.compute_ragged_all_to_all_params))
    returned = []
    for shard, rows in enumerate(arrived):
        x = jnp.asarray(rows.astype(np.float32))
        ours, sizes, state = te.local_permute_after_a2a(x, jnp.asarray(table), jnp.int32(shard), shards)
        own = range(shard * local, (shard + 1) * local)
        wanted = [(s, e, i) for e in own for s in range(shards) for i in range(table[s, e])]
        np.testing.assert_array_equal(ours[: len(wanted)], np.array(wanted).reshape(-1, 3))
        assert sizes.tolist() == [int(table[:, e].sum()) for e in own]
        returned.append(np.asarray(te.local_unpermute_before_a2a(ours, state)).astype(int))
        np.testing.assert_array_equal(returned[-1], rows)
    back = exchange(returned, params(te.compute_reverse_ragged_all_to_all_params))
    for rows, before in zip(back, sent, strict=True):
        np.testing.assert_array_equal(rows[: len(before)], before)
    with pytest.raises(
        ValueError, match=r"all_shards_tokens_per_expert: got shape \[3, 6\]; wanted \[4, E\]"
    ):
        te.compute_ragged_all_to_all_params(jnp.asarray(table), 0, 4)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32])
def test_entries_by_ids_of_any_integers(dtype):
    """Differences of ids, and the number of experts, need not be representable in their dtype."""
    from fp8moe.adapters.transformer_engine import jax as te

    ids, x = np.array([[0], [5], [2], [3]]), jnp.arange(4.0)[:, None]
    for align in (0, 4):
        rows, _, counts = te.pure_jax_token_dispatch(x, jnp.asarray(ids.astype(dtype)), 6, 1, align, 3)
        wanted, _, wanted_counts = te.pure_jax_token_dispatch(x, jnp.asarray(ids), 6, 1, align, 3)
        np.testing.assert_array_equal(rows, wanted)
        np.testing.assert_array_equal(counts, wanted_counts)
    ids = np.arange(4)[:, None].astype(dtype)
    rows, *_ = te.pure_jax_token_dispatch(x, jnp.asarray(ids), 128 if dtype == np.int8 else 256, 1, 2)
    assert rows[:8:2].ravel().tolist() == [0, 1, 2, 3]
