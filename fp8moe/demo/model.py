"""A small transformer language model with the expert layer, with hand-written forward and backward.

    pieces of text -> embedding + position
    -> [RMS norm -> causal attention -> +, RMS norm -> router, top-k -> MoE -> +] x layers
    -> RMS norm -> softmax over the next piece

Everything except the expert layer is float32 and identical for all recipes; the expert layer is `moe_forward`
and `moe_backward`. The array module is NumPy or CuPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

import fp8moe
from fp8moe.formats import BFLOAT16
from fp8moe.layer.recipes import RecipeName

EPS = 1e-6


@dataclass(frozen=True)
class Config:
    """Hyperparameters of the model and of its training."""

    vocabulary: int = 512
    context: int = 32
    hidden: int = 128
    heads: int = 4
    ffn: int = 128
    experts: int = 8
    topk: int = 2
    layers: int = 2
    tokens: int = 1024
    steps: int = 200
    lr: float = 6e-3
    seed: int = 0
    seeds: int = 3  # of bf16, whose spread is the measure of a recipe's difference


class Model:
    """Parameters and Adam moments of one model. Every recipe starts from the same weights of a seed."""

    def __init__(self, config: Config, recipe: RecipeName, xp: ModuleType = np, seed: int = 0):
        self.config, self.recipe, self.xp = config, recipe, xp
        rng = np.random.default_rng(seed)
        h, f, e = config.hidden, config.ffn, config.experts
        shapes: dict[str, tuple[tuple[int, ...], float]] = {
            "embed": ((config.vocabulary, h), 0.5),
            "position": ((config.context, h), 0.1),
        }
        for layer in range(config.layers):
            shapes[f"qkv{layer}"] = ((h, 3 * h), h**-0.5)
            shapes[f"out{layer}"] = ((h, h), 0.5 * h**-0.5)
            shapes[f"router{layer}"] = ((h, e), h**-0.5)
            shapes[f"w13_{layer}"] = ((e, 2 * f, h), h**-0.5)
            shapes[f"w2_{layer}"] = ((e, h, f), 0.5 * f**-0.5)
        shapes["head"] = ((h, config.vocabulary), 0.5 * h**-0.5)
        self.params: dict[str, Any] = {
            name: xp.asarray(rng.standard_normal(shape, dtype=np.float32) * np.float32(scale))
            for name, (shape, scale) in shapes.items()
        }
        self.moments = {n: (xp.zeros_like(p), xp.zeros_like(p)) for n, p in self.params.items()}
        # Load balancing by a bias that affects the selection but not the probabilities (arXiv 2408.15664).
        self.balance = [xp.zeros(e, np.float32) for _ in range(config.layers)]
        self.mask = xp.asarray(np.triu(np.full((config.context,) * 2, -np.inf, np.float32), 1))
        self.steps_taken = 0

    def loss(self, pieces: Any) -> tuple[float, dict[str, Any]]:
        """(mean cross-entropy in nats of each row's pieces [B, context + 1] after the ones before them;
        gradients)."""
        xp, p, hidden = self.xp, self.params, self.config.hidden
        contexts, targets = pieces[:, :-1], pieces[:, 1:].reshape(-1)
        x, tape = self._forward(contexts)
        normed, scale = _rms_norm(xp, x)
        probs = _softmax(xp, normed @ p["head"])
        rows = xp.arange(len(targets))
        loss = float(-xp.log(probs[rows, targets] + 1e-30).mean())

        probs[rows, targets] -= 1
        dlogits = probs / len(targets)
        grads = {"head": normed.T @ dlogits}
        dx = _rms_norm_backward(dlogits @ p["head"].T, normed, scale)
        for layer in reversed(range(self.config.layers)):
            of_attention, of_experts = tape[layer]
            dx = dx + self._experts_backward(layer, dx, of_experts, grads)
            dx = dx + self._attention_backward(layer, dx, of_attention, grads)
        grads["position"] = dx.reshape(*contexts.shape, hidden).sum(axis=0)
        grads["embed"] = xp.zeros_like(p["embed"])
        xp.add.at(grads["embed"], contexts.reshape(-1), dx)
        return loss, grads

    def next_piece_probs(self, context: Any) -> Any:
        """Probabilities of the piece after each piece of one context [context]; those after it do not
        matter."""
        normed, _ = _rms_norm(self.xp, self._forward(context[None])[0])
        return _softmax(self.xp, normed @ self.params["head"])

    def adamw(self, grads: dict[str, Any], lr: float) -> None:
        """One step of AdamW (arXiv 1711.05101), in place: betas 0.9 and 0.95, weight decay 0.01."""
        self.steps_taken += 1
        t = self.steps_taken
        rate, decay = np.float32(lr * (1 - 0.95**t) ** 0.5 / (1 - 0.9**t)), np.float32(1 - lr * 0.01)
        update = _adamw if self.xp is np else _fused_adamw(self.xp)
        for name, g in grads.items():
            update(g, rate, decay, self.params[name], *self.moments[name])

    def _forward(self, contexts: Any) -> tuple[Any, list[Any]]:
        """(rows [B * context, hidden], what the backward of each layer needs)."""
        x = (self.params["embed"][contexts] + self.params["position"]).reshape(-1, self.config.hidden)
        tape = []
        for layer in range(self.config.layers):
            y, of_attention = self._attention(layer, x)
            x = x + y
            y, of_experts = self._experts(layer, x)
            x = x + y
            tape.append((of_attention, of_experts))
        return x, tape

    def _attention(self, layer: int, x: Any) -> tuple[Any, tuple[Any, ...]]:
        c, xp = self.config, self.xp
        normed, scale = _rms_norm(xp, x)
        qkv = (normed @ self.params[f"qkv{layer}"]).reshape(-1, c.context, 3, c.heads, c.hidden // c.heads)
        q, k, v = xp.ascontiguousarray(qkv.transpose(2, 0, 3, 1, 4))  # [B, heads, context, width of a head]
        scores = q @ k.swapaxes(2, 3) * np.float32(q.shape[3] ** -0.5) + self.mask
        weights = _softmax(xp, scores)
        mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        return mixed @ self.params[f"out{layer}"], (normed, scale, q, k, v, weights, mixed)

    def _attention_backward(self, layer: int, dy: Any, kept: tuple[Any, ...], grads: dict[str, Any]) -> Any:
        xp, (normed, scale, q, k, v, weights, mixed) = self.xp, kept
        grads[f"out{layer}"] = mixed.T @ dy
        rows, heads, context, width = q.shape
        dmixed = (dy @ self.params[f"out{layer}"].T).reshape(rows, context, heads, width)
        dmixed = xp.ascontiguousarray(dmixed.transpose(0, 2, 1, 3))  # strided operands take NumPy's own loops
        dweights = dmixed @ v.swapaxes(2, 3)
        dscores = weights * (dweights - (dweights * weights).sum(axis=3, keepdims=True))
        dscores *= np.float32(width**-0.5)
        parts = dscores @ k, dscores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ dmixed
        dqkv = xp.stack(parts).transpose(1, 3, 0, 2, 4).reshape(len(dy), -1)
        grads[f"qkv{layer}"] = normed.T @ dqkv
        return _rms_norm_backward(dqkv @ self.params[f"qkv{layer}"].T, normed, scale)

    def _experts(self, layer: int, x: Any) -> tuple[Any, tuple[Any, ...]]:
        xp, k = self.xp, self.config.topk
        normed, scale = _rms_norm(xp, x)
        scores = normed @ self.params[f"router{layer}"]
        ids = xp.argsort(-(scores + self.balance[layer]), axis=1)[:, :k]
        probs = _softmax(xp, xp.take_along_axis(scores, ids, axis=1))
        counts = xp.bincount(ids.reshape(-1), minlength=self.config.experts)
        self.balance[layer] += np.float32(0.001) * xp.sign(counts.mean() - counts).astype(np.float32)
        y, saved = fp8moe.moe_forward(
            normed.astype(BFLOAT16),
            self.params[f"w13_{layer}"].astype(BFLOAT16),
            self.params[f"w2_{layer}"].astype(BFLOAT16),
            xp.ascontiguousarray(ids.astype(np.int32)),
            probs,
            recipe=self.recipe,
        )
        return y.astype(np.float32), (normed, scale, ids, probs, saved)

    def _experts_backward(self, layer: int, dy: Any, kept: tuple[Any, ...], grads: dict[str, Any]) -> Any:
        xp = self.xp
        normed, scale, ids, probs, saved = kept
        g = fp8moe.moe_backward(saved, (dy * LOSS_SCALE).astype(BFLOAT16))
        grads[f"w13_{layer}"], grads[f"w2_{layer}"] = g.dw13 / LOSS_SCALE, g.dw2 / LOSS_SCALE
        dprobs = g.dprobs / LOSS_SCALE
        dchosen = probs * (dprobs - (dprobs * probs).sum(axis=1, keepdims=True))
        dscores = xp.zeros((len(ids), self.config.experts), np.float32)
        xp.put_along_axis(dscores, ids, dchosen, axis=1)
        grads[f"router{layer}"] = normed.T @ dscores
        dnormed = g.dx.astype(np.float32) / LOSS_SCALE + dscores @ self.params[f"router{layer}"].T
        return _rms_norm_backward(dnormed, normed, scale)


def _adamw(g: Any, rate: Any, decay: Any, p: Any, m: Any, v: Any) -> None:
    m += np.float32(0.1) * (g - m)
    v += np.float32(0.05) * (g * g - v)
    p *= decay
    p -= rate * m / (np.sqrt(v) + np.float32(1e-8))


@cache
def _fused_adamw(cupy: ModuleType) -> Any:
    """`_adamw` as a single kernel launch per parameter."""
    return cupy.ElementwiseKernel(
        "float32 g, float32 rate, float32 decay",
        "float32 p, float32 m, float32 v",
        """m += 0.1f * (g - m);
        v += 0.05f * (g * g - v);
        p = p * decay - rate * m / (sqrtf(v) + 1e-8f);""",
        "fused_adamw",
    )


#: gradients are means over a thousand pieces; this factor keeps them in the range of E4M3 and bfloat16
LOSS_SCALE = np.float32(1024)


def batches(pieces: np.ndarray, config: Config) -> Iterator[np.ndarray]:
    """Pieces [tokens / context, context + 1] at random positions, determined by the seed."""
    rng = np.random.default_rng(config.seed + 1)
    span = np.arange(config.context + 1)
    for _ in range(config.steps):
        starts = rng.integers(0, len(pieces) - config.context, config.tokens // config.context)
        yield pieces[starts[:, None] + span]


def learning_rate(config: Config, step: int) -> float:
    """Ten steps of linear warm-up; cosine decay to a twentieth."""
    warm = min(1.0, (step + 1) / 10)
    return config.lr * warm * (0.525 + 0.475 * float(np.cos(np.pi * step / config.steps)))


def _rms_norm(xp: ModuleType, x: Any) -> tuple[Any, Any]:
    scale = 1 / xp.sqrt((x * x).mean(axis=1, keepdims=True) + np.float32(EPS))
    return x * scale, scale


def _rms_norm_backward(dy: Any, normed: Any, scale: Any) -> Any:
    return scale * (dy - normed * (dy * normed).mean(axis=1, keepdims=True))


def _softmax(xp: ModuleType, z: Any) -> Any:
    z = xp.exp(z - z.max(axis=-1, keepdims=True))
    return z / z.sum(axis=-1, keepdims=True)
