"""Drop-in for the names of ``transformer_engine.jax.permutation`` (checked against version 2.20): same
arguments, order and results, with gradients for the rows and the probabilities, in jitted code too.

Unlike there, no NaN is hidden: what an expert makes of a token reaches the token's row, and padding, which
no token reads, is never read.

    from fp8moe.adapters import transformer_engine_jax as permutation
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fp8moe.adapters import jax_ops, jax_tokens


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

    Where ``jax.jit`` gets tokens sharded over n devices, each device moves its own, as in the original: each
    has 1/n of the rows (num_out_tokens with its padding), row numbers count from 0 on each, counts and
    pad_offsets are those of all. Pass num_out_tokens=tokens * topk, so that every device has room; the rows
    of one that has not are NaN.
    """
    if not isinstance(num_out_tokens, int) or num_out_tokens <= 0:
        raise ValueError(
            f"num_out_tokens: got {num_out_tokens!r}; wanted the number of routed rows, 1 or more; pass "
            "tokens * topk"
        )
    x, mask = _rows(inp), _rows(routing_map).astype(jnp.int32)
    align = align_size or 1
    rows = (num_out_tokens + mask.shape[1] * (align - 1)) // align * align
    flat = None if probs is None else _rows(probs)
    apart = flat is not None and not jax_ops.may_need_grad(x)
    found = jax_tokens.dispatch(x, mask, None if apart else flat, rows, align)
    data, moved, row_map, pads, counts = found
    if apart:
        moved = jax_tokens.dispatch(jax_ops.no_columns(flat), mask, flat, rows, align)[1]
    return data, moved, row_map, None if align_size is None else pads, counts


def token_combine(inp: Any, row_id_map: Any, merging_probs: Any = None, pad_offsets: Any = None) -> Any:
    """[T, H]: each token's rows summed, each times its merging probability where given.

    inp: [rows, H] in the order of `token_dispatch`. merging_probs: [T, E] or [batch, sequence, E].
    """
    experts = (row_id_map.shape[1] - 1) // 2
    pads = jnp.zeros(experts, jnp.int32) if pad_offsets is None else pad_offsets.astype(jnp.int32)
    return jax_tokens.combine(inp, row_id_map, None if merging_probs is None else _rows(merging_probs), pads)


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
