"""Statistics of a layer in JAX, compared with counts in NumPy and with the rows that a layer drops."""

import numpy as np
import pytest
from cases import BF16, generator
from oracles import lost

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from fp8moe.adapters.jax import stats as jax_stats  # noqa: E402

RNG = generator()
T, H, E, K = 24, 200, 6, 2


@pytest.mark.parametrize("jitted", [False, True])
def test_stats_of_a_layer(jitted):
    x = RNG.standard_normal((2, T // 2, H)) * np.exp2(RNG.integers(-12, 12, (2, T // 2, H)))
    x[0, 3, 5], x[1, 4, 199] = np.inf, -np.inf
    x[1, 0, :128] = 0
    ids = RNG.integers(-2, E + 2, (2, T // 2, K)).astype(np.int32)
    capacity, devices = 3, 2

    def run(x, ids):
        def loss(x):
            stats = jax_stats.layer_stats(x, ids, E, devices=devices, capacity=capacity)
            return x[0, 0, 0], stats

        return jax.grad(loss, has_aux=True)(x)  # beside a differentiated layer

    grad, stats = (jax.jit(run) if jitted else run)(jnp.asarray(x, jnp.float32), ids)
    assert np.count_nonzero(grad) == 1
    flat = ids.ravel().tolist()
    assert stats.rows_per_expert.tolist() == [flat.count(e) for e in range(E)]
    assert int(stats.invalid_ids) == sum(i >= E for i in flat)
    assert int(stats.negative_ids) == sum(i < 0 for i in flat)
    wide = x.astype(np.float32).astype(BF16).astype(np.float64).reshape(T, H)
    assert tuple(float(c) for c in stats.x) == tuple(map(float, lost(wide)))
    assert stats.x.nonfinite == 2
    assert stats.x.flushed > 100
    # a token goes once to each device that has one of its experts
    sent = [{i // (E // devices) for i in row if 0 <= i < E} for row in ids.reshape(T, K).tolist()]
    to_each = [sum(device in to for to in sent) for device in range(devices)]
    assert int(stats.overflow) == sum(max(n - capacity, 0) for n in to_each) > 0
    assert int(jax_stats.layer_stats(x.astype(np.float32), ids, E).overflow) == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"topk_ids": np.ones((3, K), np.float32)}, TypeError, "topk_ids: got dtype float32; wanted int32"),
        (
            {"topk_ids": np.ones((4, K), np.int32)},
            ValueError,
            r"topk_ids: got shape \[4, 2\]; wanted \[3, k\]",
        ),
        ({"topk_ids": [[0, 1]] * 3}, TypeError, "topk_ids: got builtins.list; wanted an array"),
        ({"num_experts": 0}, ValueError, "num_experts: got 0"),
        ({"devices": 4}, ValueError, "devices: got 4 for 6 experts; wanted a divisor"),
        ({"capacity": 0}, ValueError, "capacity: got 0"),
    ],
)
def test_refused_arguments(change, error, message):
    arguments = {"x": np.ones((3, H), np.float32), "topk_ids": np.ones((3, K), np.int32), "num_experts": E}
    with pytest.raises(error, match=message):
        jax_stats.layer_stats(**arguments | change)
