"""Checks of activations, router, grouped GEMM and the layer on the CPU."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

import fp8moe
from fp8moe.records import QuantTensor
from fp8moe.selftest.inputs import (
    ACTIVATIONS,
    BF16,
    EXPERTS,
    FFN,
    HIDDEN,
    OFFSETS,
    ROUTERS,
    TOKENS,
    Inputs,
    equal,
    near,
    wide_values,
)
from fp8moe.selftest.rows import rows_of


def activations(h: Any, without_gate: Any, dy: Any, row_probs: Any) -> tuple[Any, ...]:
    results = []
    for activation in ACTIVATIONS:
        of = h if activation.gated else without_gate
        y = fp8moe.swiglu(of, row_probs, activation=activation)
        g = fp8moe.swiglu_backward(dy, of, row_probs, activation=activation)
        results.append((y, g.dh, g.dprobs))
    return tuple(results)


def compare_activations(i: Inputs, *results: Any) -> None:
    a, b = i.x.astype(np.float64), i.dy.astype(np.float64)
    grad, probs, step = i.dy.astype(np.float64), i.row_probs.astype(np.float64)[:, None], 1e-5
    for activation, (y, dh, dprobs) in zip(ACTIVATIONS, results, strict=True):
        label = f"{activation.kind}, clamp {activation.clamp}"
        of = partial(activated, activation)
        plain = of(a, b)
        near(y, plain * probs, 1e-6, f"{label}: values")
        near(dprobs, (grad * plain).sum(axis=1), 1e-5, f"{label}: dprobs")
        # central differences in float64 are exact to about 1e-9
        wanted = [grad * probs * (of(a + step, b) - of(a - step, b)) / (2 * step)]
        if activation.gated:
            wanted.append(grad * probs * (of(a, b + step) - of(a, b - step)) / (2 * step))
        near(dh, np.concatenate(wanted, axis=1), 1e-5, f"{label}: gradient")


def activated(activation: fp8moe.Activation, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The formula of an activation without its factor, in float64."""
    if activation.function == "relu2":
        return np.maximum(a, 0) ** 2
    if activation.clamp is not None:
        a, b = np.minimum(a, activation.clamp), np.clip(b, -activation.clamp, activation.clamp)
    if activation.function == "gelu":
        gate = np.vectorize(math.erf)(a / 2**0.5) / 2 + 0.5
    elif activation.function == "gelu_tanh":
        gate = (1 + np.tanh((2 / np.pi) ** 0.5 * (a + 0.044715 * a**3))) / 2
    else:
        gate = 1 / (1 + np.exp(-activation.alpha * a))
    return a * gate * (b + activation.linear_offset) if activation.gated else a * gate


def activated_codes(h: Any, dy: Any, row_probs: Any) -> tuple[Any, ...]:
    y = fp8moe.swiglu_quantize(h, row_probs, columnwise=True)
    g = fp8moe.swiglu_quantize_backward(dy, h, row_probs, columnwise=True)
    sides = y.rowwise, y.columnwise, g.dh.rowwise, g.dh.columnwise
    alone = fp8moe.swiglu_quantize(h, row_probs), fp8moe.swiglu_quantize_backward(dy, h, row_probs).dh
    return *(fp8moe.dequantize(q) for q in (*sides, *alone)), g.dprobs


def compare_activated_codes(i: Inputs, *got: Any) -> None:
    y, plain = fp8moe.swiglu(i.h32, i.row_probs), fp8moe.swiglu_backward(i.dy32, i.h32, i.row_probs)
    both = [fp8moe.quantize(a, columnwise=True) for a in (y, plain.dh)]
    rows = [fp8moe.dequantize(q.rowwise) for q in both]
    columns = [fp8moe.dequantize(q.columnwise) for q in both]
    wanted = rows[0], columns[0], rows[1], columns[1], *rows
    labels = "rows", "columns", "rows of dh", "columns of dh", "rows alone", "rows of dh alone"
    for found, values, label in zip(got, wanted, labels, strict=False):
        equal(found, values, label)
    near(got[6], plain.dprobs, 1e-5, "dprobs")


def routes(logits: Any, bias: Any, grad_aux: Any, grad_z: Any) -> tuple[Any, ...]:
    results = []
    for config, of in zip(ROUTERS, (None, bias), strict=True):
        r = fp8moe.route(logits, config, expert_bias=of, num_sequences=2)
        options = {"tokens_per_expert": r.tokens_per_expert, "grad_aux_loss": grad_aux, "grad_z_loss": grad_z}
        grad = fp8moe.route_backward(r.topk_probs, logits, r.topk_ids, config, **options)
        results.append((r.topk_ids, r.tokens_per_expert, r.topk_probs, r.aux_loss, r.z_loss, grad))
    return tuple(results)


def compare_routes(i: Inputs, *results: Any) -> None:
    logits = i.logits.astype(np.float64)
    for config, bias, (ids, counts, weights, aux, z, grad) in zip(
        ROUTERS, (None, i.bias), results, strict=True
    ):
        label = config.score_function
        losses = partial(routed_losses, config, ids=ids, counts=counts)
        wanted_weights, wanted_aux, wanted_z = losses(logits)
        choice = logits if bias is None else scores_of(config, logits) + bias
        if config.num_groups > 1:
            best = np.sort(choice.reshape(TOKENS, config.num_groups, -1), axis=2)[:, :, -2:]
            order = np.argsort(-best.sum(axis=2), axis=1, kind="stable")
            allowed = np.zeros((TOKENS, config.num_groups), bool)
            np.put_along_axis(allowed, order[:, : config.topk_groups], True, axis=1)
            choice = np.where(np.repeat(allowed, 8 // config.num_groups, axis=1), choice, -np.inf)
        equal(ids, np.argsort(-choice, axis=1, kind="stable")[:, :2], f"{label}: ids")
        halves = np.split(ids, 2)
        equal(counts, [np.bincount(h.ravel(), minlength=8) for h in halves], f"{label}: tokens per expert")
        near(weights, wanted_weights, 1e-6, f"{label}: probabilities")
        near(aux, np.array([wanted_aux.sum()]), 1e-6, f"{label}: auxiliary loss")
        near(z, np.array([wanted_z.sum()]), 1e-6, f"{label}: z loss")
        step = 1e-5
        wanted = np.zeros_like(logits)
        for expert in range(8):  # a token's logits influence only its own terms, so all move at once
            ends = []
            for sign in (1, -1):
                moved = logits.copy()
                moved[:, expert] += sign * step
                w, a, zz = losses(moved)
                ends.append((w * weights).sum(axis=1) + i.grad_aux * a + i.grad_z * zz)
            wanted[:, expert] = (ends[0] - ends[1]) / (2 * step)
        near(grad, wanted, 1e-5, f"{label}: gradient")


def scores_of(config: fp8moe.RouterConfig, logits: np.ndarray) -> np.ndarray:
    if config.score_function == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    e = np.exp(logits)
    return e / e.sum(axis=1, keepdims=True)


def routed_losses(
    config: fp8moe.RouterConfig, logits: np.ndarray, *, ids: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, and each token's terms of the auxiliary loss and of the z loss."""
    scores = scores_of(config, logits)
    weights = np.take_along_axis(scores, ids, axis=1)
    if config.renormalize:
        weights = weights / weights.sum(axis=1, keepdims=True)
    shares = scores / scores.sum(axis=1, keepdims=True)
    length = TOKENS // 2
    fractions = np.repeat(counts, length, axis=0) / (config.topk * length)
    aux = 8 * (fractions * shares).sum(axis=1) / length / 2
    z = np.log(np.exp(logits).sum(axis=1)) ** 2 / TOKENS
    return weights * config.scaling_factor, aux, z


def check_grouped_gemm(i: Inputs) -> None:
    x, w = fp8moe.quantize(i.x), fp8moe.quantize_weights(i.w13)
    dy = fp8moe.quantize(i.dy)
    parts = [slice(OFFSETS[e], OFFSETS[e + 1]) for e in range(EXPERTS)]
    for label, rows, weights, backward in (
        ("FP8", x, w.rowwise, False),
        ("FP8 backward", dy, w.columnwise, True),
        ("bfloat16", i.x, i.w13, False),
        ("bfloat16 backward", i.dy, i.w13, True),
    ):
        plain = not isinstance(weights, QuantTensor)
        got = fp8moe.grouped_gemm(rows, weights, OFFSETS, transpose_w=backward and plain)
        wide, wide_w = wide_values(rows), wide_values(weights) if backward else wide_values(weights).mT
        for e, part in enumerate(parts):
            near(got[part], wide[part] @ wide_w[e], BF16, f"{label}: expert {e}")
    columns = [fp8moe.scaling_aware_transpose(q, OFFSETS) for q in (dy, x)]
    starts = (OFFSETS // 128 * 128).astype(np.int32)
    blocks = [fp8moe.scaling_aware_transpose(q, target="block") for q in (dy, x)]
    for label, (d, a), offsets in (
        ("bfloat16", (i.dy, i.x), OFFSETS),
        ("FP8 columns", columns, OFFSETS),
        ("FP8 blocks", blocks, starts),
    ):
        wide_d, wide_a = wide_values(d, offsets), wide_values(a, offsets)
        total = np.ones((EXPERTS, HIDDEN, HIDDEN), np.float32)
        got = fp8moe.grouped_gemm_wgrad(d, a, offsets)
        fp8moe.grouped_gemm_wgrad(d, a, offsets, total)
        for e in range(EXPERTS):
            part = slice(offsets[e], offsets[e + 1])
            wanted = wide_d[part].T @ wide_a[part]
            near(got[e], wanted, 1e-5, f"{label}: gradient of expert {e}")
            near(total[e], wanted + 1, 1e-5, f"{label}: sum with the gradient of expert {e}")
    plan = fp8moe.plan_topk(i.ids, EXPERTS, align_size=128, num_out_tokens="exact")
    moved = fp8moe.permute_gemm(x, w.rowwise, plan, i.probs)
    rows, tokens, slots, last = rows_of(i.ids, 128)
    wanted, probs = np.zeros((last, 2 * FFN)), np.zeros(last, np.float32)
    probs[rows] = i.probs[tokens, slots]
    wide, wide_w = wide_values(x), wide_values(w.rowwise)
    for row, token, slot in zip(rows, tokens, slots, strict=True):
        wanted[row] = wide_w[i.ids[token, slot]] @ wide[token]
    near(moved.data, wanted, BF16, "permuted product")
    equal(moved.probs, probs, "permuted probabilities")


def check_layer(i: Inputs) -> None:
    results = {}
    for recipe in ("bf16", "fp8_blockwise", "fp8_flow"):
        with fp8moe.trace() as traced:
            y, saved = fp8moe.moe_forward(i.x, i.w13, i.w2, i.ids, i.probs, recipe=recipe)
            grads = fp8moe.moe_backward(saved, i.dy)
        results[recipe] = [y, grads.dx, grads.dprobs, grads.dw13, grads.dw2]
        casts = {"bf16": 0, "fp8_blockwise": 12, "fp8_flow": 2}[recipe]
        equal(traced.casts, casts, f"casts of {recipe}")
    # a chain of at most twelve E4M3 roundings: sqrt(12) * 2^-4 / sqrt(3), see tests/test_moe.py
    for recipe in ("fp8_blockwise", "fp8_flow"):
        for got, wanted in zip(results[recipe], results["bf16"], strict=True):
            near(got, wanted, 0.125, recipe, math.inf)
