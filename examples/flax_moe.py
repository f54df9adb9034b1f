"""A Flax NNX expert layer in MaxText's layout, trained with optax: with `jax.lax.ragged_dot` and with fp8moe.

python examples/flax_moe.py [steps]   (pip install flax optax; on the CPU, or on CUDA if jax finds a GPU)
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import fp8moe.jax
from fp8moe.demo.text import shakespeare

# an ffn of 96 is not a multiple of 128 and is padded internally
WINDOW, HIDDEN, FFN, EXPERTS, TOPK, BATCH = 16, 128, 96, 8, 2, 16


class Experts(nnx.Module):
    """Top-k routed SwiGLU experts; float32 parameters with the names and layouts of MaxText."""

    def __init__(self, backend, rngs):
        init, last = nnx.initializers.lecun_normal(), nnx.initializers.lecun_normal(batch_axis=0)
        self.backend = backend
        self.gate = nnx.Linear(HIDDEN, EXPERTS, use_bias=False, kernel_init=init, rngs=rngs)
        self.wi_0 = nnx.Param(last(rngs.params(), (EXPERTS, HIDDEN, FFN)))
        self.wi_1 = nnx.Param(last(rngs.params(), (EXPERTS, HIDDEN, FFN)))
        self.wo = nnx.Param(last(rngs.params(), (EXPERTS, FFN, HIDDEN)))

    def __call__(self, x):  # [B, L, H]
        probs, ids = jax.lax.top_k(jax.nn.softmax(self.gate(x)), TOPK)
        wi_0, wi_1, wo = self.wi_0[...], self.wi_1[...], self.wo[...]
        if self.backend == "ragged_dot":
            return by_ragged_dot(x.astype(jnp.bfloat16), wi_0, wi_1, wo, ids, probs).astype(x.dtype)
        return fp8moe.jax.moe_experts(x, (wi_0, wi_1), wo, ids, probs, recipe=self.backend, transposed=True)


def by_ragged_dot(x, wi_0, wi_1, wo, ids, probs):
    """The same layer in bfloat16 by XLA: sort rows by expert, three GEMMs, add rows to their tokens."""
    rows, experts = x.reshape(-1, HIDDEN), ids.reshape(-1)
    order = jnp.argsort(experts)
    sizes = jnp.bincount(experts, length=EXPERTS).astype(jnp.int32)
    wi_0, wi_1, wo = (w.astype(x.dtype) for w in (wi_0, wi_1, wo))
    rows = rows[order // TOPK]
    h = jax.nn.silu(jax.lax.ragged_dot(rows, wi_0, sizes)) * jax.lax.ragged_dot(rows, wi_1, sizes)
    out = jax.lax.ragged_dot(h, wo, sizes) * probs.reshape(-1)[order, None].astype(x.dtype)
    return jnp.zeros((x.size // HIDDEN, HIDDEN), x.dtype).at[order // TOPK].add(out).reshape(x.shape)


class Model(nnx.Module):
    """Predicts the byte after each position of a window from the bytes up to it."""

    def __init__(self, backend, rngs):
        self.embed = nnx.Embed(256, HIDDEN, rngs=rngs)
        self.mix = nnx.Param(jnp.tril(jnp.ones((WINDOW, WINDOW))) / jnp.arange(1, WINDOW + 1)[:, None])
        self.experts = Experts(backend, rngs)
        self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, 256, rngs=rngs)

    def __call__(self, text):
        x = self.embed(text)
        x = x + jnp.einsum("qk,bkh->bqh", jnp.tril(self.mix[...]), x)
        return self.head(x + self.experts(self.norm(x)))


@nnx.jit
def step(model, optimizer, text):
    def loss(model):
        logits = model(text[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="?", type=int, default=4)
    steps = parser.parse_args().steps
    source = shakespeare()
    for backend in ("ragged_dot", "bf16", "fp8_flow"):
        model = Model(backend, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
        generator = np.random.default_rng(0)
        for i in range(steps):
            starts = generator.integers(0, len(source) - WINDOW - 1, (BATCH, 1))
            text = jnp.asarray(source[starts + np.arange(WINDOW + 1)].astype(np.int32))
            value = step(model, optimizer, text)
            if i in (0, steps - 1):
                print(f"{backend:10} step {i:4} loss {value:.4f}")
            if i == 0:  # after compilation
                begin = time.perf_counter()
        if steps > 1:
            seconds = time.perf_counter() - begin
            print(f"{backend:10} {BATCH * WINDOW * (steps - 1) / seconds:,.0f} tokens/s")


if __name__ == "__main__":
    main()
