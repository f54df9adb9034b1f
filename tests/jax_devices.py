"""The layer on several JAX devices compared with one device: ``python jax_devices.py DEVICES``."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BF16, generator, same_bits
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fp8moe import Activation
from fp8moe.adapters.jax import layer as jax_layer
from fp8moe.adapters.transformer_engine import jax as te

COUNT = int(sys.argv[1])
H, F, T, E = 256, 128, 16, 2 * COUNT
MESH = Mesh(np.array(jax.devices()[:COUNT]), ("ep",))
RNG = generator()


def anywhere(k):
    ids = np.argsort(RNG.random((COUNT * T, E)), axis=1)[:, :k]
    return np.where(RNG.random(ids.shape) < 0.15, -1, ids)


def to_one_device(k):
    return np.argsort(RNG.random((COUNT * T, 2)), axis=1)[:, :k] + E - 2


def problem(ids, recipe):
    x, dy = (RNG.standard_normal((COUNT * T, H)).astype(BF16) for _ in range(2))
    probs = RNG.random(ids.shape).astype(np.float32)
    w13 = (RNG.standard_normal((E, 2 * F, H)) / 16).astype(np.float32)
    w2 = (RNG.standard_normal((E, H, F)) / 11).astype(np.float32)
    if recipe == "bf16":
        w13, w2 = w13.astype(BF16), w2.astype(BF16)
    return x, w13, w2, probs, ids.astype(np.int32), dy


def step(ffn, **options):
    """(y, gradients of x, w13, w2 and probs) of a layer."""

    def run(x, w13, w2, probs, ids, dy):
        layer = functools.partial(ffn, topk_ids=ids, **options)
        y, back = jax.vjp(lambda x, w13, w2, p: layer(x, w13, w2, topk_probs=p), x, w13, w2, probs)
        return y, *back(dy)

    return run


def on_all(arguments, **options):
    run = step(jax_layer.moe_experts, axis_name="ep", **options)
    shards = {"mesh": MESH, "in_specs": (P("ep"),) * 6, "out_specs": P("ep"), "check_vma": False}
    return [np.asarray(a) for a in jax.jit(jax.shard_map(run, **shards))(*arguments)]


def on_one(arguments, **options):
    return [np.asarray(a) for a in jax.jit(step(jax_layer.moe_experts, **options))(*arguments)]


def same_as_one(k, ids, recipe, recompute=None, transposed=False):
    arguments, options = (
        problem(ids, recipe),
        {"recipe": recipe, "recompute": recompute, "activation": Activation(clamp=3.0)},
    )
    if transposed:
        x, w13, w2, *rest = arguments
        arguments = x, *(np.ascontiguousarray(w.swapaxes(1, 2)) for w in (w13, w2)), *rest
        options["transposed"] = True
    results, wanted = on_all(arguments, **options), on_one(arguments, **options)
    for name, a, b in zip(("y", "dx", "dw13", "dw2", "dprobs"), results, wanted, strict=True):
        if k == 1 or name.startswith(("dw", "dp")):
            assert same_bits(a, b), (name, recipe, k)
            continue
        # each device's sum is rounded once more, to bfloat16: an error of at most half of 2^-7 of it, for at
        # most k devices, whose sums are at most the largest row's
        far = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
        assert far <= k * 2.0**-8 * 2 * np.abs(b.astype(np.float64)).max(), (name, far)


def left_out():
    """Rows beyond the capacity are dropped as if their ids were negative."""
    ids = to_one_device(2)
    arguments = problem(ids, "fp8_flow")
    results = on_all(arguments, recipe="fp8_flow", capacity=5)
    kept = np.where((np.arange(COUNT * T) % T < 5)[:, None], ids, -1).astype(np.int32)
    wanted = on_all((*arguments[:4], kept, arguments[5]), recipe="fp8_flow")
    for a, b in zip(results, wanted, strict=True):
        assert same_bits(a, b)


def ids_beyond_int32():
    """Int64 ids of no expert whose lower 32 bits are those of an expert."""
    arguments = problem(anywhere(2), "bf16")
    *given, ids, dy = arguments
    wide = np.where(ids < 0, RNG.choice([-1, 1, 2**29], ids.shape) * 2**32, ids)
    with jax.enable_x64(True):
        results = on_all((*given, wide.astype(np.int64), dy), recipe="bf16")
    for a, b in zip(results, on_all(arguments, recipe="bf16"), strict=True):
        assert same_bits(a, b)


def own_tokens_of_each(align):
    """Transformer Engine's functions with tokens sharded over devices: each device permutes its own tokens,
    counts and padding are those of all devices, and gradients are those of the permuted rows."""
    k, size = 2, 16
    mask = np.zeros((COUNT * T, E), bool)
    np.put_along_axis(mask, np.argsort(RNG.random(mask.shape), axis=1)[:, :k], True, axis=1)
    x, dy = RNG.integers(-8, 9, (2, COUNT * T, size)).astype(np.float32)
    probs = RNG.integers(0, 4, mask.shape).astype(np.float32)  # rows of probability 0 become zeros
    counts = mask.sum(0)
    padded = -(-counts // (align or 1)) * (align or 1)
    pads = np.cumsum(padded - counts) - (padded - counts)
    num_out_tokens = COUNT * T * k if align is None else COUNT * (T * k + E * align)
    share = (
        num_out_tokens if align is None else (num_out_tokens + E * (align - 1)) // align * align
    ) // COUNT
    spread = [jax.device_put(a, jax.NamedSharding(MESH, P("ep"))) for a in (x, mask, probs, dy)]

    def run(x, mask, probs):
        rows, moved, row_map, pads, total = te.token_dispatch(x, mask, num_out_tokens, probs, align)
        y = te.token_combine(rows * moved[:, None], row_map, None, pads)
        return rows, moved, total, y

    @jax.jit
    def both_orientations(x, mask, probs, dy):
        (rows, moved, total, y), back = jax.vjp(lambda x, p: run(x, mask, p), x, probs)
        return rows, moved, total, y, *back((rows * 0, moved * 0, np.zeros(E, jax.dtypes.float0), dy))

    rows, moved, total, y, dx, dprobs = map(np.asarray, both_orientations(*spread))
    assert total.tolist() == padded.tolist()
    wanted_rows, wanted_moved = np.zeros((COUNT * share, size)), np.zeros(COUNT * share)
    for device in range(COUNT):
        at = device * share
        for e in range(E):
            for t in range(device * T, (device + 1) * T):
                if mask[t, e]:
                    wanted_rows[at + pads[e]] = x[t] * (probs[t, e] != 0)
                    wanted_moved[at + pads[e]] = probs[t, e]
                    at += 1
    # small integers, whose sums are exact
    np.testing.assert_array_equal(rows, wanted_rows)
    np.testing.assert_array_equal(moved, wanted_moved)
    weights = np.where(mask, probs, 0).sum(1, keepdims=True)
    np.testing.assert_array_equal(y, x * weights)
    np.testing.assert_array_equal(dx, dy * weights)
    np.testing.assert_array_equal(dprobs, np.where(mask & (probs != 0), (x * dy).sum(1, keepdims=True), 0))


assert len(MESH.devices) == COUNT
for align in (None, 4):
    own_tokens_of_each(align)
for k, ids in ((1, anywhere(1)), (2, anywhere(2)), (2, to_one_device(2)), (2, np.full((COUNT * T, 2), -1))):
    same_as_one(k, ids, "fp8_flow")
for recipe, recompute in (("fp8_flow", "moe_expert"), ("fp8_blockwise", None), ("bf16", None)):
    same_as_one(2, anywhere(2), recipe, recompute)
same_as_one(2, anywhere(2), "fp8_flow", transposed=True)
left_out()
ids_beyond_int32()
with pytest.raises(ValueError, match="capacity: got 0; wanted 1 to the number of tokens, 16"):
    on_all(problem(anywhere(1), "fp8_flow"), recipe="fp8_flow", capacity=0)
print("right on", jnp.zeros(1).device.platform)
