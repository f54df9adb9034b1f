"""A byte-level language model with the expert layer, with hand-written forward and backward.

    window of bytes -> embedding, concatenated -> [RMS norm -> router, top-k -> MoE -> +] x layers
    -> RMS norm -> softmax over the next byte

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

BYTES = 256
EPS = 1e-6


@dataclass(frozen=True)
class Config:
    """Hyperparameters of the model and of its training."""

    window: int = 16
    embed: int = 16
    ffn: int = 128
    experts: int = 8
    topk: int = 2
    layers: int = 1
    tokens: int = 2048
    steps: int = 130
    lr: float = 3e-3
    seed: int = 0

    @property
    def hidden(self) -> int:
        return self.window * self.embed


class Model:
    """Parameters and Adam moments of one recipe's model."""

    def __init__(self, config: Config, recipe: RecipeName, xp: ModuleType = np):
        self.config, self.recipe, self.xp = config, recipe, xp
        rng = np.random.default_rng(config.seed)  # every recipe starts from the same weights
        h, f, e = config.hidden, config.ffn, config.experts
        shapes: dict[str, tuple[tuple[int, ...], float]] = {"embed": ((BYTES, config.embed), 1.0)}
        for layer in range(config.layers):
            shapes[f"router{layer}"] = ((h, e), h**-0.5)
            shapes[f"w13_{layer}"] = ((e, 2 * f, h), h**-0.5)
            shapes[f"w2_{layer}"] = ((e, h, f), 0.5 * f**-0.5)
        shapes["head"] = ((h, BYTES), h**-0.5)
        self.params: dict[str, Any] = {
            name: xp.asarray(rng.standard_normal(shape, dtype=np.float32) * np.float32(scale))
            for name, (shape, scale) in shapes.items()
        }
        self.moments = {n: (xp.zeros_like(p), xp.zeros_like(p)) for n, p in self.params.items()}
        # Load balancing by a bias that affects the selection but not the probabilities (arXiv 2408.15664).
        self.balance = [xp.zeros(e, np.float32) for _ in range(config.layers)]
        self.steps_taken = 0

    def loss(self, contexts: Any, targets: Any) -> tuple[float, dict[str, Any]]:
        """(mean cross-entropy in nats of ``targets``, the bytes after ``contexts`` [T, window];
        gradients)."""
        xp, p = self.xp, self.params
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
            dx = dx + self._layer_backward(layer, dx, tape[layer], grads)
        dembed = xp.zeros_like(p["embed"])
        xp.add.at(dembed, contexts.reshape(-1), dx.reshape(-1, self.config.embed))
        grads["embed"] = dembed
        return loss, grads

    def next_byte_probs(self, contexts: Any) -> Any:
        """Probabilities [T, 256] of the next byte after each context."""
        normed, _ = _rms_norm(self.xp, self._forward(contexts)[0])
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
        x = self.params["embed"][contexts].reshape(len(contexts), self.config.hidden)
        tape = []
        for layer in range(self.config.layers):
            y, layer_saved = self._layer_forward(layer, x)
            x = x + y
            tape.append(layer_saved)
        return x, tape

    def _layer_forward(self, layer: int, x: Any) -> tuple[Any, tuple[Any, ...]]:
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

    def _layer_backward(self, layer: int, dy: Any, kept: tuple[Any, ...], grads: dict[str, Any]) -> Any:
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


#: gradients are means over a few thousand bytes; this factor keeps them in the range of E4M3 and bfloat16
LOSS_SCALE = np.float32(1024)


def batches(text: np.ndarray, config: Config) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(contexts [T, window], targets [T]) at random positions, determined by the seed."""
    rng = np.random.default_rng(config.seed + 1)
    span = np.arange(config.window)
    for _ in range(config.steps):
        starts = rng.integers(0, len(text) - config.window, config.tokens)
        yield text[starts[:, None] + span], text[starts + config.window]


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
    z = xp.exp(z - z.max(axis=1, keepdims=True))
    return z / z.sum(axis=1, keepdims=True)
