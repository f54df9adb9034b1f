"""Operations inside a ``jax.shard_map`` that checks over which devices arrays vary, as it does by default."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import generator
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import fp8moe
from fp8moe.adapters.jax import layer as jax_layer
from fp8moe.adapters.jax import ops as jax_ops

T, H, F, E, K = 16, 128, 128, 4, 2
MESH = Mesh(np.array(jax.devices()), ("d",))
RNG = generator()
SPLIT, SAME = P("d"), P()


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


x, dy, bias, w13, w2 = normal(T, H), normal(T, H), normal(E), normal(E, 2 * F, H) / 11, normal(E, H, F) / 11
ids, probs = jnp.asarray(RNG.integers(-1, E, (T, K)), jnp.int32), jnp.asarray(RNG.random((T, K)), jnp.float32)
sizes = jnp.full(8, T // 8, jnp.int32)


def layer(x, w13, w2, probs, ids, ffn=jax_layer.moe_experts, **options):
    return ffn(x, w13, w2, ids, probs, recipe="bf16", **options)


def repeated(x, w13, w2, probs, ids):
    run = jax.checkpoint(lambda x: layer(x, w13, w2, probs, ids))
    return jax.lax.scan(lambda x, _: (run(x), None), x, length=2)[0]


def moved(x, probs, ids):
    plan = jax_ops.plan_topk(ids, E)
    rows = jax_ops.permute(x, plan, probs)
    return jax_ops.unpermute(rows.data * rows.probs[:, None], plan, probs)


def resized(x, sizes):
    rows = len(x)
    padded = jax_ops.pad(x, sizes, 4, num_out_tokens=2 * rows)
    swapped = jax_ops.sort_chunks(x, sizes, jnp.arange(len(sizes)) ^ 1, num_out_tokens=rows)
    return jax_ops.unpad(padded, sizes, 4, num_out_tokens=rows) * swapped.data


def activated(x, scale, probs):
    return jax_ops.swiglu(jnp.concatenate([x, x * scale], 1), probs[:, 0])


def routed(x, bias):
    config = fp8moe.RouterConfig(topk=K, score_function="sigmoid")
    return x * jax_ops.route(x[:, :E], config, expert_bias=bias).topk_probs.sum(1, keepdims=True)


def gradients(function, arrays, integers):
    loss = lambda *a: jnp.vdot(dy, function(*a, *integers))  # noqa: E731
    return jax.jit(jax.grad(loss, argnums=tuple(range(len(arrays)))))(*arrays)


def on_devices(function, in_specs, **options):
    return jax.shard_map(function, mesh=MESH, in_specs=in_specs, out_specs=SPLIT, **options)


for function, arrays, specs, integers in (
    (layer, (x, w13, w2, probs), (SPLIT, SAME, SAME, SPLIT), (ids,)),
    (repeated, (x, w13, w2, probs), (SPLIT, SAME, SAME, SPLIT), (ids,)),
    (moved, (x, probs), (SPLIT, SPLIT), (ids,)),
    (resized, (x,), (SPLIT,), (sizes,)),
    (activated, (x, jnp.float32(2), probs), (SPLIT, SAME, SPLIT), ()),
    (routed, (x, bias), (SPLIT, SAME), ()),
):
    results = gradients(on_devices(function, (*specs, *(SPLIT for _ in integers))), arrays, integers)
    for a, b in zip(results, gradients(function, arrays, integers), strict=True):
        # at most six successive sums of at most 128 float32 products, in another order on several devices,
        # each with an error of at most 128 * 2^-24 of its terms
        assert np.linalg.norm(a - b) <= 6 * 128 * 2.0**-24 * np.linalg.norm(b), function

by_experts = functools.partial(layer, ffn=jax_layer.moe_experts, axis_name="d")
checked, unchecked = (
    gradients(on_devices(by_experts, SPLIT, check_vma=check), (x, w13, w2, probs), (ids,))
    for check in (True, False)
)
for a, b in zip(checked, unchecked, strict=True):
    np.testing.assert_array_equal(a, b)

with pytest.raises(ValueError, match="out_specs"):  # results of a device's own rows vary
    jax.jit(jax.shard_map(lambda x: jax_ops.quantize(x).data, mesh=MESH, in_specs=SPLIT, out_specs=SAME))(x)
print("right")
