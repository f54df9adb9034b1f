"""Launchers of router.cu, with the names and signatures of `fp8moe.reference.router`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.kernels_cuda.gemm import grouped_gemm_wgmma16
from fp8moe.kernels_cuda.gemm.product import product_of_sum
from fp8moe.kernels_cuda.runtime.configuration import Configuration
from fp8moe.kernels_cuda.runtime.launch import current_architecture, launch, multiprocessors, scratch, threads

PER_LANE = (1, 4, 8, 32)  # compiled variants: experts per lane
WARPS = 8  # must match router.cu


def tokens_configuration(tokens: int) -> Configuration:
    """Configuration of route_tokens without losses and of route_backward_tokens: one warp per token."""
    return Configuration(threads(tokens, 4), 4 * 32)


def losses_configuration(length: int, sequences: int, experts: int, multiprocessors: int) -> Configuration:
    """Configuration of route_tokens with losses: several tokens per warp, so that there are fewer partial
    sums; about three thread blocks per SM, but no more than there are tokens for."""
    blocks = max(1, min(threads(length, WARPS), 3 * multiprocessors // sequences))
    return Configuration((blocks, sequences), 32 * WARPS, 4 * (WARPS + 1) * experts + 4 * WARPS)


def route(logits: Any, expert_bias: Any, padding_mask: Any, *, config: Any, out: Any) -> None:
    tokens, experts = logits.shape
    sequences = 1 if out.aux_loss is None else out.tokens_per_expert.shape[0]
    length = tokens // sequences
    partial: tuple[Any, ...] = (None, None, None)
    if out.aux_loss is None:
        configuration = tokens_configuration(tokens)
    else:
        configuration = losses_configuration(length, sequences, experts, multiprocessors())
        blocks = configuration.blocks[0]  # type: ignore[index]
        shape = (sequences * blocks, experts)
        partial = scratch(shape, np.float32), scratch(shape, np.int32), scratch(shape[:1], np.float32)
    launch(
        "router",
        "route_tokens",
        *configuration.grid,
        logits,
        expert_bias,
        padding_mask,
        length,
        experts,
        config.topk,
        config.score_function == "sigmoid",
        config.num_groups,
        config.topk_groups,
        config.renormalize,
        config.scaling_factor,
        out.topk_ids,
        out.topk_probs,
        *partial,
        shared=configuration.shared,
        defines=_variant(experts, out.aux_loss is not None or padding_mask is not None),
    )
    if out.aux_loss is None:
        return
    columns = threads(experts, 32)
    losses = scratch((sequences, columns), np.float64)
    launch(
        "router",
        "route_losses",
        (columns, sequences),
        8 * 32,
        *partial[:2],
        blocks,
        experts,
        out.tokens_per_expert,
        losses,
        defines=_variant(experts, True),
    )
    factors = None
    if padding_mask is not None:
        factors = _factors(out.tokens_per_expert, config.topk, _variant(experts, True))
    launch(
        "router",
        "route_total",
        1,
        256,
        losses,
        sequences,
        columns,
        partial[2],
        sequences * blocks,
        aux_coefficient(tokens, sequences, experts, config.topk),
        1 / max(tokens, 1),
        factors,
        out.aux_loss,
        out.z_loss,
        defines=_variant(experts, True),
    )


def route_backward(
    grad_probs: Any,
    logits: Any,
    topk_ids: Any,
    tokens_per_expert: Any,
    grad_aux_loss: Any,
    grad_z_loss: Any,
    padding_mask: Any,
    *,
    config: Any,
    split: bool,
    out: Any,
) -> None:
    tokens, experts = logits.shape
    sequences = 1 if tokens_per_expert is None else tokens_per_expert.shape[0]
    factors = None
    if padding_mask is not None and (grad_aux_loss is not None or grad_z_loss is not None):
        factors = _factors(tokens_per_expert, config.topk, _variant(experts, False))
    launch(
        "router",
        "route_backward_tokens",
        *tokens_configuration(tokens).grid,
        grad_probs,
        logits,
        topk_ids,
        padding_mask,
        tokens,
        tokens // sequences,
        experts,
        config.topk,
        config.score_function == "sigmoid",
        config.renormalize,
        config.scaling_factor,
        tokens_per_expert,
        grad_aux_loss,
        aux_coefficient(tokens, sequences, experts, config.topk),
        grad_z_loss,
        1 / max(tokens, 1),
        factors,
        sequences,
        split,
        out,
        defines=_variant(experts, False),
    )


def add_product(addend: Any, a: Any, b: Any, *, out: Any) -> None:
    if not out.size:
        return
    if why := grouped_gemm_wgmma16.unsupported_reasons(
        product_of_sum(addend, a, b, out), current_architecture()
    ):
        raise ValueError(
            f"addend, a, b: got a sum that no kernel takes ({'; '.join(why)}); wanted one as described in "
            "add_product; use a GEMM and an addition"
        )
    grouped_gemm_wgmma16.add_product(addend, a, b, out=out)


def _factors(tokens_per_expert: Any, topk: int, variant: tuple[str, ...]) -> Any:
    """The losses' coefficients of sequences with padding: of each one's auxiliary loss, and of the z-loss."""
    sequences, experts = tokens_per_expert.shape
    factors = scratch((sequences + 1,), np.float32)
    launch(
        "router",
        "route_factors",
        1,
        256,
        tokens_per_expert,
        sequences,
        experts,
        topk,
        factors,
        defines=variant,
    )
    return factors


def aux_coefficient(tokens: int, sequences: int, experts: int, topk: int) -> float:
    """Factor of the sum over sequences and experts of count * share."""
    length = max(tokens // sequences, 1)
    return experts / (topk * length * length * sequences)


def _variant(experts: int, losses: bool) -> tuple[str, ...]:
    return f"PER_LANE={next(n for n in PER_LANE if experts <= 32 * n)}", f"LOSSES={int(losses)}"
