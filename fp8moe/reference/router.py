"""The router in NumPy: scores in float64, rounded once to float32.

Four experts in two groups, of which a token selects one, top-2, sigmoid scores, expert 3 with bias 0.5:

    scores           0.9  0.1 | 0.6  0.3
    + bias           0.9  0.1 | 0.6  0.8      two best of each group: 1.0 and 1.4, so the second
    chosen           3 (0.8), 2 (0.6)         weights by scores: 0.3 / 0.9 and 0.6 / 0.9
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.formats import BFLOAT16

EPSILON = 1e-20  # as in DeepSeek-V3, added to the sum of a token's weights


def route(
    logits: np.ndarray,
    expert_bias: np.ndarray | None,
    padding_mask: np.ndarray | None,
    *,
    config: Any,
    out: Any,
) -> None:
    kept, logits = _without_padding(padding_mask, logits)
    scores = _scores(logits, config.score_function)
    rounded = scores.astype(np.float32)
    by_logits = expert_bias is None and config.num_groups == 1
    choice = logits if by_logits else rounded if expert_bias is None else rounded + expert_bias
    ids = _largest(_eligible(choice, config), config.topk)
    weights = np.take_along_axis(scores, ids, 1)
    if config.renormalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + EPSILON)
    out.topk_ids[:] = np.where(kept[:, None], ids, -1)
    out.topk_probs[:] = np.where(kept[:, None], weights * config.scaling_factor, 0)
    if out.aux_loss is None:
        return
    tokens, experts = logits.shape
    sequences, length = len(out.tokens_per_expert), tokens // len(out.tokens_per_expert)
    counts = np.zeros((sequences, experts), np.int64)
    np.add.at(counts, (np.arange(tokens)[kept, None] // max(length, 1), ids[kept]), 1)
    shares = _shares(logits, scores, config.score_function)
    shares[~kept] = 0
    sums = shares.reshape(sequences, length, experts).sum(axis=1)
    lengths = kept.reshape(sequences, length).sum(axis=1)
    out.tokens_per_expert[:] = counts
    out.aux_loss[:] = (counts * sums * aux_coefficients(lengths, experts, config.topk)[:, None]).sum()
    out.z_loss[:] = (_log_sum_exp(logits)[kept] ** 2).sum() / max(lengths.sum(), 1)


def route_backward(
    grad_probs: np.ndarray,
    logits: np.ndarray,
    topk_ids: np.ndarray,
    tokens_per_expert: np.ndarray | None,
    grad_aux_loss: np.ndarray | None,
    grad_z_loss: np.ndarray | None,
    padding_mask: np.ndarray | None,
    *,
    config: Any,
    split: bool,
    out: np.ndarray,
) -> None:
    tokens, experts = logits.shape
    kept, logits = _without_padding(padding_mask, logits)
    sequences = 1 if tokens_per_expert is None else len(tokens_per_expert)
    lengths = np.full(sequences, tokens // sequences)
    if padding_mask is not None and tokens_per_expert is not None:
        lengths = tokens_per_expert.sum(axis=1, dtype=np.int64) / config.topk  # a token is counted k times
    scores = _scores(logits, config.score_function)
    exists = (topk_ids >= 0) & (topk_ids < experts)
    ids = np.where(exists, topk_ids, 0)
    chosen = np.where(exists, np.take_along_axis(scores, ids, 1), 0)
    grads = np.where(exists, grad_probs * np.float64(config.scaling_factor), 0)
    if config.renormalize:
        total = chosen.sum(axis=1, keepdims=True) + EPSILON
        grads = np.where(exists, (grads - (grads * chosen / total).sum(axis=1, keepdims=True)) / total, 0)
    of_scores = np.zeros_like(scores)
    np.add.at(of_scores, (np.arange(tokens)[:, None], ids), grads)
    if grad_aux_loss is not None and tokens_per_expert is not None:
        by = float(grad_aux_loss[0]) * aux_coefficients(lengths, experts, config.topk)
        of_shares = np.repeat(by[:, None] * tokens_per_expert, tokens // sequences, axis=0)
        shares = _shares(logits, scores, config.score_function)
        of_logits = shares * (of_shares - (of_shares * shares).sum(axis=1, keepdims=True))
    else:
        of_logits = np.zeros_like(scores)
    if config.score_function == "sigmoid":
        grad = (of_scores * scores + of_logits) * (1 - scores)
    else:
        grad = scores * (of_scores - (of_scores * scores).sum(axis=1, keepdims=True)) + of_logits
    if grad_z_loss is not None:
        by = float(grad_z_loss[0]) * 2 / max(lengths.sum(), 1)
        grad += by * _log_sum_exp(logits)[:, None] * _scores(logits, "softmax")
    result = np.where(kept[:, None], grad, 0).astype(np.float32)
    if not split:
        out[:] = result
        return
    for part in range(3):
        rounded = result.astype(BFLOAT16)
        out[:, part * experts : (part + 1) * experts] = rounded
        result = result - rounded.astype(np.float32)


def aux_coefficients(lengths: np.ndarray, experts: int, topk: int) -> np.ndarray:
    """Factor of each sequence's sum over experts of count * share; zero for a sequence without tokens, which
    is not in the mean."""
    present = lengths > 0
    lengths = np.maximum(lengths, 1).astype(np.float64)
    return present * experts / (topk * lengths**2 * max(present.sum(), 1))


def _without_padding(mask: np.ndarray | None, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(which tokens are no padding, the logits with zeros for padding, which may be NaN)."""
    if mask is None:
        return np.ones(len(logits), bool), logits
    return ~mask, np.where(mask[:, None], np.float32(0), logits)


def _scores(logits: np.ndarray, function: str) -> np.ndarray:
    x = logits.astype(np.float64)
    with np.errstate(all="ignore"):
        if function == "sigmoid":
            return 1 / (1 + np.exp(-x))
        x = np.exp(x - x.max(axis=1, keepdims=True, initial=-np.inf))
        return x / x.sum(axis=1, keepdims=True)


def _shares(logits: np.ndarray, scores: np.ndarray, function: str) -> np.ndarray:
    """A token's scores normalised to sum to 1, as softmax scores are. Before that, sigmoid scores of tokens
    with negative logits only are divided by e^(largest logit), because their sum may be zero in float64."""
    if function == "sigmoid":
        top = logits.max(axis=1, keepdims=True, initial=-np.inf).astype(np.float64)
        with np.errstate(all="ignore"):
            lifted = np.exp(logits - top) / (1 + np.exp(logits.astype(np.float64)))
        scores = np.where(top < 0, lifted, scores)
    return scores / scores.sum(axis=1, keepdims=True)


def _log_sum_exp(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    top = x.max(axis=1, initial=-np.inf)
    with np.errstate(all="ignore"):
        return top + np.log(np.exp(x - top[:, None]).sum(axis=1))


def _eligible(choice: np.ndarray, config: Any) -> tuple[np.ndarray, np.ndarray]:
    """(selection scores, which experts a token may choose)."""
    tokens, experts = choice.shape
    groups = config.num_groups
    if groups == 1:
        return choice, np.ones_like(choice, bool)
    by_group = choice.reshape(tokens * groups, experts // groups)
    best = np.take_along_axis(by_group, _largest((by_group, np.ones_like(by_group, bool)), 2), 1)
    sums = best.sum(axis=1, dtype=np.float32).reshape(tokens, groups)
    allowed = np.zeros((tokens, groups), bool)
    np.put_along_axis(allowed, _largest((sums, ~allowed), config.topk_groups), True, 1)
    return choice, np.repeat(allowed, experts // groups, axis=1)


def _largest(eligible: tuple[np.ndarray, np.ndarray], count: int) -> np.ndarray:
    """Columns of each row's largest, in descending order; the first among equals; NaN after all numbers."""
    values, allowed = eligible
    nan = np.isnan(values)
    descending = -np.where(nan, 0, values)
    columns = np.broadcast_to(np.arange(values.shape[1]), values.shape)
    return np.lexsort((columns, descending, nan, ~allowed), axis=1)[:, :count]


def add_product(addend: np.ndarray, a: np.ndarray, b: np.ndarray, *, out: np.ndarray) -> None:
    out[:] = (addend.astype(np.float32) + a.astype(np.float32) @ b.astype(np.float32)).astype(BFLOAT16)
