"""Drop-in for the names of ``transformer_engine.jax.permutation`` (checked against version 2.20): same
arguments, order and results, with gradients for the rows and the probabilities, in jitted code too.

Unlike there, no NaN is hidden: what an expert makes of a token reaches the token's row, and padding, which
no token reads, is never read.

    from fp8moe.adapters import transformer_engine_jax as permutation
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fp8moe import PermutationPlan
from fp8moe.adapters import jax_ops


def token_dispatch(
    inp: Any,
    routing_map: Any,
    num_out_tokens: int,
    probs: Any = None,
    align_size: int | None = None,
) -> tuple[Any, Any, Any, Any, Any]:
    """(rows in expert order, their probs or None, row_id_map, pad_offsets or None, tokens_per_expert).

    inp: [T, H] or [batch, sequence, H]. routing_map: 1 or 0, [T, E] or [batch, sequence, E]; probs likewise.
    num_out_tokens: routed rows, a number known while tracing. align_size: pad every expert to a multiple of
        it; the result then has (num_out_tokens + E * (align_size - 1)) // align_size * align_size rows, zeros
        past the last expert, and tokens_per_expert counts padded rows.
    row_id_map is int32 [T, 2E+1]; it and pad_offsets are what `token_combine` takes.
    """
    if not isinstance(num_out_tokens, int) or num_out_tokens <= 0:
        raise ValueError(
            f"num_out_tokens: got {num_out_tokens!r}; wanted the number of routed rows, 1 or more; pass "
            "tokens * topk"
        )
    x, mask = _rows(inp), _rows(routing_map)
    experts, align = mask.shape[1], align_size or 1
    rows = (num_out_tokens + experts * (align - 1)) // align * align
    plan = jax_ops.plan_routing_map(mask.astype(jnp.int32), align_size=align, num_out_tokens=rows)
    moved = jax_ops.permute(x, plan, None if probs is None else _rows(probs))
    if align_size is None:
        return moved.data, moved.probs, plan.row_id_map, None, plan.tokens_per_expert
    return moved.data, moved.probs, plan.row_id_map, plan.pad_offsets, plan.padded_tokens_per_expert


def token_combine(inp: Any, row_id_map: Any, merging_probs: Any = None, pad_offsets: Any = None) -> Any:
    """[T, H]: each token's rows summed, each times its merging probability where given.

    inp: [rows, H] in the order of `token_dispatch`. merging_probs: [T, E] or [batch, sequence, E].
    """
    plan = _plan_from_map(row_id_map, pad_offsets, inp.shape[0])
    return jax_ops.unpermute(inp, plan, None if merging_probs is None else _rows(merging_probs))


def sort_chunks_by_index(inp: Any, split_sizes: Any, sorted_indices: Any) -> tuple[Any, Any]:
    """(rows with their chunks in another order, the row each came to, int32 [T])."""
    x = _rows(inp)
    rows = jax_ops.sort_chunks(x, split_sizes, sorted_indices, num_out_tokens=x.shape[0]).data
    ends, there = jnp.cumsum(split_sizes), jnp.cumsum(split_sizes[sorted_indices])
    moved_by = jnp.zeros_like(ends).at[sorted_indices].set(there) - ends
    row = jnp.arange(x.shape[0])
    return rows, (row + moved_by[jnp.searchsorted(ends, row, side="right")]).astype(jnp.int32)


def _rows(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


def _plan_from_map(row_id_map: Any, pad_offsets: Any, rows: int) -> PermutationPlan:
    """The plan that a row map and padding offsets belong to, counted again from the map. The last expert's
    padding cannot be told from the tail behind it, and need not be."""
    experts = (row_id_map.shape[1] - 1) // 2
    expert_of = row_id_map[:, experts : 2 * experts].reshape(-1)
    expert_of = jnp.where(expert_of < 0, experts, expert_of)  # the last bin takes the blanks
    counts = jnp.zeros(experts + 1, jnp.int32).at[expert_of].add(1)[:experts]
    pads = jnp.zeros_like(counts) if pad_offsets is None else pad_offsets.astype(jnp.int32)
    ends = jnp.cumsum(counts).astype(jnp.int32) + pads
    return PermutationPlan(
        row_id_map=row_id_map,
        slots=None,
        tokens_per_expert=counts,
        padded_tokens_per_expert=counts,
        pad_offsets=pads,
        expert_offsets=jnp.concatenate([ends - counts, ends[-1:]]),
        overflow=jnp.zeros(1, jnp.int32),
        num_out_tokens=rows,
        align_size=1,
    )
