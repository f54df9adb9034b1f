"""Programs that XLA partitions over four devices: rejected, or with token_sharding each device computes its
own tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import generator, same_bits
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8moe.adapters.jax import layer as jax_layer
from fp8moe.adapters.jax import ops as jax_ops
from fp8moe.adapters.transformer_engine import jax as te

MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
T, H, F, E, K = 48, 128, 128, 4, 2
RNG = generator()


def put(array, *spec):
    return jax.device_put(array, NamedSharding(MESH, P(*spec)))


x, dy = (RNG.standard_normal((2, T // 2, H)).astype(np.float32) for _ in range(2))
wi = tuple((RNG.standard_normal((E, H, F)) / 11).astype(np.float32) for _ in range(2))
wo = (RNG.standard_normal((E, F, H)) / 11).astype(np.float32)
ids = RNG.integers(-1, E, (2, T // 2, K)).astype(np.int32)
probs = RNG.random(ids.shape).astype(np.float32)


def layer(x, wi, wo, ids, probs, **options):
    return jax_layer.moe_experts(x, wi, wo, ids, probs, recipe="fp8_flow", transposed=True, **options)


def step(x, wi, wo, ids, probs, dy, **options):
    y, back = jax.vjp(lambda x, wi, wo, p: layer(x, wi, wo, ids, p, **options), x, wi, wo, probs)
    return y, *back(dy)


# weights are sharded over both axes, as with full sharding; tokens over one axis or over both
weights = tuple(put(w, None, "data", "model") for w in wi), put(wo, "model", "data")
message = (
    "got a program that XLA partitions over 4 devices; wanted arrays of one device, because XLA would run "
    "the whole call on each; call it inside jax.shard_map over all axes of the mesh, or pass token_sharding "
    "to fp8moe.jax.moe_experts"
)
sharded = put(x, "data"), *weights, put(ids, "data"), put(probs, "data"), put(dy, "data")
with pytest.raises(ValueError, match=f"quantize_weights: {message}"):
    jax.jit(step)(*sharded)
with pytest.raises(ValueError, match=f"quantize: {message}"):
    jax.jit(lambda x: jax_ops.quantize(x.reshape(-1, H)))(put(x, "data"))
# also inside a shard_map with an axis that is left to XLA
some = jax.shard_map(
    jax_ops.quantize, mesh=MESH, in_specs=P(), out_specs=P(), axis_names={"model"}, check_vma=False
)
with pytest.raises(ValueError, match="quantize: got a program that XLA partitions over 2 devices"):
    jax.jit(some)(put(x.reshape(-1, H), "data"))

alone = [
    jax.tree.map(
        np.asarray, jax.jit(step)(x[i : i + 1], wi, wo, ids[i : i + 1], probs[i : i + 1], dy[i : i + 1])
    )
    for i in range(2)
]
run = jax.jit(lambda *a: step(*a, token_sharding=NamedSharding(MESH, P("data"))))
y, dx, dwi, dwo, dprobs = run(*sharded)
for name, result, parts in (("y", y, 0), ("dx", dx, 1), ("dprobs", dprobs, 4)):
    assert same_bits(np.asarray(result), np.concatenate([part[parts] for part in alone])), name
    assert result.sharding.spec[0] == "data", (name, result.sharding)
for result, first, second in zip((*dwi, dwo), *((*part[2], part[3]) for part in alone), strict=True):
    # XLA adds halves of each, from two devices along "model", in an unknown order: three additions
    assert (np.abs(result - (first + second)) <= 3 * 2.0**-24 * (np.abs(first) + np.abs(second))).all()
assert "all-gather" in run.lower(*sharded).compile().as_text()

# batch and length both sharded
both = NamedSharding(MESH, P("data", "model"))
y = jax.jit(lambda *a: layer(*a, token_sharding=both))(
    *(jax.device_put(a, both) for a in (x,)), *weights, ids, probs
)
assert same_bits(np.asarray(y), np.concatenate([part[0] for part in alone]))

with pytest.raises(
    ValueError, match=r"token_sharding: got .*; wanted the sharding of its leading dimensions only"
):
    layer(jnp.asarray(x), wi, wo, ids, probs, token_sharding=NamedSharding(MESH, P("data", None, "model")))
# Transformer Engine's functions where x, the probabilities and the result have different shardings: XLA moves
# some of them between the dispatch and the combine, and the rows' numbers must be those of one sharding
TOKENS = 16
mask = np.zeros((TOKENS, E), bool)
np.put_along_axis(mask, np.argsort(RNG.random(mask.shape), axis=1)[:, :K], True, axis=1)
x, dy = RNG.integers(-8, 9, (2, TOKENS, 8)).astype(np.float32)  # small integers, whose sums are exact
probs = RNG.integers(1, 9, mask.shape).astype(np.float32)


def moved(x, mask, probs):
    rows, row_probs, row_map, pads, _ = te.token_dispatch(x, mask, TOKENS * K, probs)
    return te.token_combine(rows * row_probs[:, None], row_map, None, pads)


def both_directions(x, mask, probs, dy):
    y, back = jax.vjp(lambda x, probs: moved(x, mask, probs), x, probs)
    return y, *back(dy)


factors = np.where(mask, probs, 0).sum(1, keepdims=True)
wanted = x * factors, dy * factors, np.where(mask, (x * dy).sum(1, keepdims=True), 0)
for of_x, of_probs, of_y in (
    (P("data"), P("data"), P(("data", "model"))),
    (P("data"), P(("data", "model")), P("data")),
    (P(None, "model"), P(), P("data")),
):
    run = jax.jit(both_directions, out_shardings=NamedSharding(MESH, of_y))
    results = run(put(x, *of_x), put(mask), put(probs, *of_probs), put(dy, *of_y))
    for result, expected in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(result, expected)
# XLA appends rows of any value to arrays that it cannot divide
short = jax.jit(lambda *arrays: moved(*(a[1:] for a in arrays)))
with pytest.raises(Exception, match="inp: got 15 tokens in a program that XLA partitions over 2 devices"):
    short(*(put(a, "data") for a in (x, mask, probs)))
# rows that have no gradient, whose probabilities are moved by an operation of their own
numbers = np.arange(1, 1 + TOKENS, dtype=np.float32)[:, None]
dispatch = jax.jit(lambda x, mask, probs: te.token_dispatch(x, mask, TOKENS * K, probs)[:2])
spread = put(np.broadcast_to(numbers, mask.shape), "model")
rows, row_probs = dispatch(put(numbers.astype(np.int32), "data"), put(mask), spread)
np.testing.assert_array_equal(rows[:, 0], row_probs)
print("right")
