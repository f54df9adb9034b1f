"""``jax.jit`` on CUDA gives bitwise the same results as eager calls of the kernels, which other tests compare
with the reference."""

import gc
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other tests need memory too

from cases import BF16, assert_same
from jax_cases import (
    IDS,
    OFFSETS,
    OPERATIONS,
    PLAN,
    PROBS,
    RNG,
    E,
    H,
    K,
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
from fp8moe import Activation
from fp8moe.adapters.jax import calls as jax_calls
from fp8moe.adapters.jax import ffi as jax_ffi
from fp8moe.adapters.jax import layer as jax_layer
from fp8moe.runtime import recording
from fp8moe.runtime.record_trees import map_arrays

pytestmark = pytest.mark.gpu


@pytest.fixture
def put():
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(str(error))
    return lambda value: map_arrays(lambda a: jax.device_put(a, device), value)


def upload(value):
    import cupy

    return map_arrays(lambda a: cupy.asarray(a), value)


def download(value):
    return map_arrays(lambda a: a.get() if hasattr(a, "get") else np.asarray(a), value)


@pytest.mark.filterwarnings("ignore:grouped_gemm.*no multiple of 16:RuntimeWarning")
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_under_jit_equal_the_kernels(name, put):
    args, options = OPERATIONS[name]
    verb = name.split()[0]
    wanted = download(getattr(fp8moe, verb)(*map(upload, args), **{k: upload(v) for k, v in options.items()}))
    static = [i for i, a in enumerate(args) if isinstance(a, (int, str))]
    traced = [put(a) for i, a in enumerate(args) if i not in static]

    @jax.jit
    def function(arrays, options):
        following = iter(arrays)
        arguments = [a if i in static else next(following) for i, a in enumerate(args)]
        return getattr(jax_ops, verb)(*arguments, **plain, **options)

    plain = {k: v for k, v in options.items() if map_arrays(lambda a: None, v) is v}
    arrays = {k: put(v) for k, v in options.items() if k not in plain}
    for _ in range(3):
        results = function(traced, arrays)
        assert all(d.platform == "gpu" for a in jax.tree.leaves(results) for d in a.devices())
        assert_same(specified(verb, wanted), specified(verb, download(results)))


def specified(verb, result):
    """The result without values after the last expert, which a transpose does not write."""
    if verb == "permute_transpose":
        return result.data[:, : PLAN.expert_offsets[-1]], result.scales
    return result


@pytest.mark.filterwarnings("ignore:grouped_gemm.*no multiple of 16:RuntimeWarning")
@pytest.mark.parametrize("backend", ["mma", "cublas", "plain"])
@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_backend_of_the_layer(recipe, backend, put):
    """In both directions bitwise equal to the library's own call with the same backend; an unsupported
    backend is an error of the program that contains the reason."""
    w13, w2 = weights(BF16 if recipe == "bf16" else np.float32)
    ids = put(IDS)

    def step(x, w13, w2, probs, dy, backend=backend):
        def layer(x, w13, w2, probs):
            return jax_layer.moe_experts(x, w13, w2, ids, probs, recipe=recipe, backend=backend)

        y, back = jax.vjp(layer, x, w13, w2, probs)
        return y, *back(dy)

    compiled = jax.jit(step)
    for _ in range(3):
        x, dy = (RNG.standard_normal((T, H)).astype(BF16) for _ in range(2))
        y, saved = fp8moe.moe_forward(*map(upload, (x, w13, w2, IDS, PROBS)), recipe=recipe, backend=backend)
        grads = fp8moe.moe_backward(saved, upload(dy))
        wanted = download((y, grads.dx, grads.dw13, grads.dw2, grads.dprobs))
        results = compiled(*map(put, (x, w13, w2, PROBS, dy)))
        for a, b in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(a), b.astype(a.dtype))


def test_unsupported_backend_is_named(put):
    wide = [put(a.astype(np.float32)) for a in (X, *weights(), PROBS)]

    def layer(x, w13, w2, probs):
        return jax_layer.moe_experts(x, w13, w2, put(IDS), probs, recipe="bf16", backend="wgmma")

    with pytest.raises(Exception, match="backend: got 'wgmma' for a product it does not take"):
        jax.block_until_ready(jax.jit(layer)(*wide))


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
def test_the_layers_gradients(recipe, recompute, put):
    w13, w2 = weights(BF16 if recipe == "bf16" else np.float32)
    ids = put(IDS)

    @jax.jit
    def gradients(x, w13, w2, probs, dy):
        def loss(x, w13, w2, probs):
            y = jax_layer.moe_experts(
                x, w13, w2, ids, probs, recipe=recipe, recompute=recompute, activation=Activation(clamp=2.0)
            )
            return (y.astype(jnp.float32) * dy).sum()

        return jax.grad(loss, argnums=(0, 1, 2, 3))(x, w13, w2, probs)

    for scale in (1, 2, -1):
        x, dy = (X * scale).astype(BF16), RNG.standard_normal((T, H)).astype(BF16)
        results = gradients(*map(put, (x, w13, w2, PROBS, dy)))
        _, saved = fp8moe.moe_forward(
            *map(upload, (x, w13, w2, IDS, PROBS)),
            recipe=recipe,
            recompute=recompute,
            activation=Activation(clamp=2.0),
        )
        wanted = download(fp8moe.moe_backward(saved, upload(dy)))
        for a, b in zip(results, (wanted.dx, wanted.dw13, wanted.dw2, wanted.dprobs), strict=True):
            np.testing.assert_array_equal(np.asarray(a), b.astype(a.dtype))


def test_scan_checkpoint_and_vmap(put):
    w13, w2 = map(put, weights())
    x, probs, ids = put(X), put(PROBS), put(IDS)

    def layer(x, _=None):
        return jax_layer.moe_experts(x, w13, w2, ids, probs, recipe="fp8_flow").astype(x.dtype), None

    def twice(x):
        return layer(layer(x)[0])[0].astype(jnp.float32).sum()

    def stacked(x):
        return jax.lax.scan(layer, x, None, length=2)[0].astype(jnp.float32).sum()

    wanted = jax.jit(jax.grad(twice))(x)
    for function in (stacked, lambda x: jax.checkpoint(twice)(x)):
        np.testing.assert_array_equal(np.asarray(jax.jit(jax.grad(function))(x)), np.asarray(wanted))
    many = jnp.stack([x, 2 * x, -x])
    for a, b in zip(jax.jit(jax.vmap(lambda x: layer(x)[0]))(many), many, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(jax.jit(layer)(b)[0]))


def test_array_to_add_to_is_not_changed(put):
    rows = put(RNG.standard_normal((128, 128)).astype(np.float32))
    into, offsets = put(np.ones((1, 128, 128), np.float32)), put(np.array([0, 128], np.int32))
    function = jax.jit(jax_ops.grouped_gemm_wgrad)
    once = np.asarray(function(rows, rows, offsets, into))
    np.testing.assert_array_equal(np.asarray(into), 1)
    arguments = jax.jit(jax_ops.grouped_gemm_wgrad, donate_argnums=3)
    np.testing.assert_array_equal(once, np.asarray(arguments(rows, rows, offsets, into)))
    np.testing.assert_allclose(once[0], 1 + np.asarray(rows).T @ np.asarray(rows), rtol=1e-4, atol=1e-3)


def test_float8_arrays_are_codes(put):
    back, transposed = download(jax.jit(in_float8)(put(X), put(OFFSETS)))
    np.testing.assert_array_equal(back, fp8moe.dequantize(Q))
    end = OFFSETS[-1]
    assert_same(fp8moe.scaling_aware_transpose(Q, OFFSETS).data[:, :end], transposed.data[:, :end])


def test_eager_calls_equal_the_kernels(put):
    assert IDS.shape[1] == K
    plan = jax_ops.plan_topk(put(IDS), E, align_size=16)
    moved = jax_ops.permute(put(X), plan, put(PROBS))
    back = jax_ops.unpermute(moved.data, plan)
    wanted = fp8moe.unpermute(fp8moe.permute(X, fp8moe.plan_topk(IDS, E, align_size=16)).data, download(plan))
    assert_same(wanted, download(back))


def test_program_captured_in_a_cuda_graph(put, monkeypatch):
    """Six layers and a plan in one jitted function: equal to eager results for every input, without Python
    during replays."""
    w13, w2 = map(put, weights())
    ids, probs = put(IDS), put(PROBS)
    calls = []
    run = recording.GivenMemory.run
    monkeypatch.setattr(recording.GivenMemory, "run", lambda self, *a: (calls.append(1), run(self, *a))[1])

    @jax.jit
    def program(x, ids):
        plan = jax_ops.plan_topk(ids, E, align_size=16)
        for _ in range(6):
            x = jax_layer.moe_experts(x, w13, w2, ids, probs, recipe="fp8_flow").astype(x.dtype)
        return jax_ops.permute(x, plan, probs).data

    for turn in range(6):
        x = (X * (turn + 1)).astype(BF16)
        y = upload(x)
        for _ in range(6):
            y, _ = fp8moe.moe_forward(y, *map(upload, (*weights(), IDS, PROBS)), recipe="fp8_flow")
        plan = fp8moe.plan_topk(upload(IDS), E, align_size=16)
        wanted = download(fp8moe.permute(y, plan).data)
        assert_same(wanted, download(program(put(x), ids)))
    arguments = put(X)
    for _ in range(3):
        jax.block_until_ready(program(arguments, ids))
    before = len(calls)
    for _ in range(5):
        jax.block_until_ready(program(arguments, ids))
    if jax_calls.GRAPHS:
        assert len(calls) - before < 5 * 8


def test_descriptions_of_a_program_are_decoded_once(put):
    """Each call site has its own description, because it has its own scratch memory."""
    w13, w2 = map(put, weights())
    ids, probs, x = put(IDS), put(PROBS), put(X)

    @jax.jit
    def program(x):
        for _ in range(3):
            x = jax_layer.moe_experts(x, w13, w2, ids, probs, recipe="fp8_flow").astype(x.dtype)
        return x

    before = jax_calls.places_called()
    jax.block_until_ready(program(x))
    after = jax_calls.places_called()
    assert after - before <= 3
    for _ in range(5):
        jax.block_until_ready(program(x))
    assert jax_calls.places_called() == after


def test_dropped_programs_release_their_scratch_memory(put):
    """Also programs that were captured in a graph; those that can still run keep theirs, and stay right."""
    w13, w2 = map(put, weights())
    ids, probs, x = put(IDS), put(PROBS), put(X)

    def program(factor):
        def layer(x):
            y = jax_layer.moe_experts(x * factor, w13, w2, ids, probs, recipe="fp8_flow")
            return jax_layer.moe_experts(y.astype(x.dtype), w13, w2, ids, probs, recipe="fp8_flow")

        return jax.jit(layer)

    def called_is(wanted):
        for _ in range(100):  # XLA's threads may hold a program a little longer than its results
            gc.collect()
            if jax_calls.places_called() == wanted:
                return True
            time.sleep(0.05)
        return False

    gc.collect()
    before, kept = jax_calls.places_called(), program(2)
    for _ in range(5):
        wanted = np.asarray(kept(x))
    with_kept = jax_calls.places_called()
    assert with_kept > before
    plans = []
    for factor in (1, 3, 4):
        dropped = program(factor)
        for _ in range(5):
            y = dropped(x)
        for site in jax_ffi.live_sites():
            if "described" in site.kept:
                plans += [weakref.ref(plan) for plan in site.kept["described"].memory.devices.values()]
        jax.block_until_ready(y)
        del dropped, y, site
        assert called_is(with_kept)
        np.testing.assert_array_equal(np.asarray(kept(x)), wanted)
    alive = {id(plan()) for plan in plans if plan() is not None}
    own = [s.kept["described"].memory for s in jax_ffi.live_sites() if "described" in s.kept]
    assert alive == {id(plan) for layout in own for plan in layout.devices.values()}
    del kept
    assert called_is(before)


@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_layouts_of_weights(recipe, put):
    """MaxText's layout and the library's give bitwise equal results."""
    w13, w2 = weights()
    ids, probs = put(IDS), put(PROBS)
    dy = put(RNG.standard_normal((T, H)).astype(np.float32))

    def gradients(x, w13, w2, **options):
        def layer(x, w13, w2):
            return jax_layer.moe_experts(x, w13, w2, ids, probs, recipe=recipe, **options)

        y, back = jax.vjp(layer, x, w13, w2)
        return y, *back(dy)

    x = X.astype(np.float32)
    y, dx, dw13, dw2 = jax.jit(gradients)(*map(put, (x, w13, w2)))
    wi = tuple(put(np.ascontiguousarray(w.swapaxes(1, 2))) for w in np.split(w13, 2, 1))
    wo = put(np.ascontiguousarray(w2.swapaxes(1, 2)))
    turned = jax.jit(lambda *a: gradients(*a, transposed=True))(put(x), wi, wo)
    np.testing.assert_array_equal(np.asarray(turned[0]), np.asarray(y))
    np.testing.assert_array_equal(np.asarray(turned[1]), np.asarray(dx))
    joined = np.concatenate([np.asarray(w).swapaxes(1, 2) for w in turned[2]], 1)
    np.testing.assert_array_equal(joined, np.asarray(dw13))
    np.testing.assert_array_equal(np.asarray(turned[3]).swapaxes(1, 2), np.asarray(dw2))


def test_program_is_cached_and_exported(tmp_path):
    """The next process finds it in JAX's compilation cache, and can run what ``jax.export`` wrote."""
    pytest.importorskip("flatbuffers")

    def run(verb):
        script = Path(__file__).with_name("jax_stored.py")
        environment = {**os.environ, "JAX_PLATFORMS": "cuda"}
        command = [sys.executable, script, verb, tmp_path]
        process = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert process.returncode == 0, process.stderr
        return process.stdout.split()

    digest, hits = run("make")
    assert hits == "0"
    of_exported, _, again, hits = run("load")
    assert of_exported == again == digest
    assert hits == "1"


def test_error_of_a_call_reaches_the_caller(put, monkeypatch):
    """The caller gets the error's text from XLA, and the next call works."""
    program = jax.jit(jax_ops.quantize)
    monkeypatch.setattr(recording.GivenMemory, "run", lambda *a: 1 / 0)
    with pytest.raises(Exception, match="ZeroDivisionError: division by zero"):
        jax.block_until_ready(program(put(X)))
    monkeypatch.undo()
    assert_same(fp8moe.quantize(X), download(program(put(X))))
