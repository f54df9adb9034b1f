"""A byte-level model of Shakespeare's plays with the expert layer in JAX: jitted steps, gradients by
`moe_experts`, bf16 and FP8.

python examples/jax_moe.py [steps]   (jax 0.10 or later; on the CPU, or on CUDA if jax finds a GPU)
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import fp8moe.jax
from fp8moe.demo.text import shakespeare

WINDOW, EMBED, FFN, EXPERTS, TOPK, TOKENS, LR = 16, 16, 128, 8, 2, 512, 0.3
HIDDEN = WINDOW * EMBED


def new_parameters(key):
    shapes = {
        "embed": (256, EMBED),
        "router": (HIDDEN, EXPERTS),
        "w13": (EXPERTS, 2 * FFN, HIDDEN),
        "w2": (EXPERTS, HIDDEN, FFN),
        "head": (HIDDEN, 256),
    }
    keys = jax.random.split(key, len(shapes))
    scale = {"embed": 1.0, "w2": FFN**-0.5}
    return {
        name: jax.random.normal(k, shape) * scale.get(name, HIDDEN**-0.5)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss(p, text, recipe):
    """Mean loss of predicting the byte after each window."""
    x = p["embed"][text[:, :-1]].reshape(len(text), HIDDEN)
    probs, ids = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), TOPK)
    weights = [p["w13"], p["w2"]]
    if recipe == "bf16":
        weights = [w.astype(jnp.bfloat16) for w in weights]
    y = fp8moe.jax.moe_experts(x.astype(jnp.bfloat16), *weights, ids, probs, recipe=recipe)
    logits = (x + y.astype(jnp.float32)) @ p["head"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, -1:], axis=1).mean()


@partial(jax.jit, static_argnames="recipe")
def step(p, text, recipe):
    value, grads = jax.value_and_grad(loss)(p, text, recipe)
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    return value, jax.tree.map(lambda w, g: w - LR * g / jnp.maximum(norm, 1.0), p, grads)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="?", type=int, default=10)
    steps = parser.parse_args().steps
    source = shakespeare()
    for recipe in ("bf16", "fp8_flow"):
        generator = np.random.default_rng(0)
        p = new_parameters(jax.random.PRNGKey(0))
        for i in range(steps):
            starts = generator.integers(0, len(source) - WINDOW - 1, (TOKENS, 1))
            text = jnp.asarray(source[starts + np.arange(WINDOW + 1)].astype(np.int32))
            value, p = step(p, text, recipe)
            if i in (0, steps - 1):
                print(f"{recipe:9} step {i:4} loss {value:.4f}")


if __name__ == "__main__":
    main()
