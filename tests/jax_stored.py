"""A program stored by JAX's compilation cache and ``jax.export``: ``python jax_stored.py make|load FOLDER``.

Both commands print the results of a step and the number of cache hits.
"""

import hashlib
import sys
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

from fp8moe.adapters.jax import layer as jax_layer
from fp8moe.adapters.jax import ops as jax_ops

verb, folder = sys.argv[1], Path(sys.argv[2])
for name, value in {
    "jax_compilation_cache_dir": str(folder / "cache"),
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}.items():
    jax.config.update(name, value)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if "cache_hit" in name else None)


def loss(x, w13, w2, ids, probs):
    return jax_layer.moe_experts(x, w13, w2, ids, probs, recipe="fp8_flow").astype(jnp.float32).sum()


def arrays():
    rng = np.random.default_rng(3)
    shapes = {"x": (8, 128), "w13": (2, 256, 128), "w2": (2, 128, 128)}
    x, w13, w2 = (rng.standard_normal(s).astype(np.float32) for s in shapes.values())
    return x.astype(jnp.bfloat16), w13, w2, rng.integers(-1, 2, (8, 2)), rng.random((8, 2)).astype(np.float32)


def show(result):
    data = b"".join(np.asarray(a).tobytes() for a in jax.tree.leaves(result))
    print(hashlib.sha256(data).hexdigest(), len(hits))


step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 4)))
given = tuple(jnp.asarray(a) for a in arrays())
if verb == "make":
    exported = jax.export.export(step, disabled_checks=jax_ops.EXPORT_CHECKS)(*given)
    (folder / "step").write_bytes(exported.serialize())
else:  # before anything is traced in this process
    show(jax.export.deserialize((folder / "step").read_bytes()).call(*given))
    hits.clear()
show(step(*given))
