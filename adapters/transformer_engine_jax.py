"""Drop-in for the names of ``transformer_engine.jax.permutation`` (checked against version 2.20): same
arguments, order and results, with gradients for the rows and the probabilities, in jitted code too.

Unlike there, no NaN is hidden: what an expert makes of a token reaches the token's row, and padding, which
no token reads, is never read.

    from fp8moe.adapters import transformer_engine_jax as permutation
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from fp8moe import chunk_orders
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
    data, moved, row_map, pads, counts = jax_tokens.dispatch(x, mask, None if apart else flat, rows, align)
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
    """(rows with their chunks in another order, the row each came to, int32 [T]). Rows past the chunks stay
    where they are."""
    x = _rows(inp)
    rows = jax_ops.sort_chunks(x, split_sizes, sorted_indices, keep_rest=True).data
    return rows, chunk_orders.moved_rows(jnp, split_sizes, sorted_indices, x.shape[0])


# ---------------------------------------------------------------- by sorting, of XLA's operations alone


def routing_map_to_selected_experts(sparse_probs: Any, routing_map: Any, topk: int) -> tuple[Any, Any]:
    """(ids [T, topk] of each token's experts, ascending; their entries of sparse_probs [T, E]) of a mask
    [T, E] with topk experts in each row."""
    ids = chunk_orders.selected_experts(jnp, routing_map, topk)
    return ids, jnp.take_along_axis(sparse_probs, ids, axis=-1)


class PureJaxPermState(NamedTuple):
    """What `pure_jax_token_combine` needs of a dispatch. sorted_indices: [R], row r's entry, numbered token
    by token, then paddings; num_real_tokens: entries, T * topk; padding_size: R less those."""

    sorted_indices: Any
    num_real_tokens: int
    padding_size: int


def pure_jax_token_dispatch(
    inputs: Any,
    selected_experts: Any,
    num_experts: int,
    num_experts_per_tok: int,
    align_size: int = 0,
    roll_to_expert_id: int | None = None,
) -> tuple[Any, PureJaxPermState, Any]:
    """(rows by expert [R, H], state, group_sizes [num_experts]) by sorting, of XLA's operations alone.

    inputs: [T, H] or [batch, sequence, H]. selected_experts: ids [T, num_experts_per_tok], or in three
    dimensions. align_size: where it is not 0, each expert's rows are padded with zeros to a multiple of it,
    in R = T * topk + num_experts * (align_size - 1) rows; those past the last expert are zeros.
    roll_to_expert_id: the expert that comes first, those before it last. (Then the original has
    group_sizes rolled twice without align_size, and with it the zeros that are left among the experts.)
    """
    if selected_experts.shape[-1] != num_experts_per_tok:
        raise ValueError(
            f"num_experts_per_tok: got {num_experts_per_tok}; wanted {selected_experts.shape[-1]}, as "
            "selected_experts has"
        )
    if align_size < 0:
        raise ValueError(f"align_size: got {align_size}; wanted 0 or more")
    ids = selected_experts.reshape(-1)
    if roll_to_expert_id is not None:
        ids = (ids - roll_to_expert_id) % num_experts
    entries, counts = len(ids), jnp.bincount(ids, length=num_experts)
    if align_size > 1:
        ids, counts = chunk_orders.entries_with_padding(jnp, ids, counts, align_size)
    order = jnp.argsort(ids, stable=True)
    state = PureJaxPermState(order, entries, len(ids) - entries)
    return jax_tokens.sort_entries(_rows(inputs), order, num_experts_per_tok), state, counts


def pure_jax_token_combine(
    expert_outputs: Any,
    perm_state: PureJaxPermState,
    routing_weights: Any,
    num_experts_per_tok: int,
    batch_size: int,
    sequence_length: int,
) -> Any:
    """[batch_size, sequence_length, H]: each token's rows of `pure_jax_token_dispatch`'s order, summed by
    routing_weights [batch * sequence, num_experts_per_tok], in the rows' dtype as in the original."""
    entries, hidden = batch_size * sequence_length * num_experts_per_tok, expert_outputs.shape[-1]
    rows = jax_tokens.unsort_entries(expert_outputs, perm_state.sorted_indices, entries)
    weights = routing_weights.reshape(-1, num_experts_per_tok).astype(rows.dtype)
    y = jnp.einsum("tkh,tk->th", rows.reshape(-1, num_experts_per_tok, hidden), weights)
    return y.reshape(batch_size, sequence_length, hidden)


# ---------------------------------------------------------------- around ``jax.lax.ragged_all_to_all``


def compute_ragged_all_to_all_params(
    all_shards_tokens_per_expert: Any, shard_id: Any, num_expert_shards: int
) -> tuple[Any, Any, Any, Any]:
    """(input_offsets, send_sizes, output_offsets, recv_sizes), each [num_expert_shards], with which shard
    shard_id (may be traced) sends rows, sorted by expert, to the shards of their experts.

    all_shards_tokens_per_expert: [num_expert_shards, E], of each shard the counts of its own tokens.
    """
    counts = chunk_orders.counts_between_shards(all_shards_tokens_per_expert, num_expert_shards)
    return tuple(chunk_orders.exchange_of(jnp, counts.sum(axis=2), shard_id))


def compute_reverse_ragged_all_to_all_params(
    all_shards_tokens_per_expert: Any, shard_id: Any, num_expert_shards: int
) -> tuple[Any, Any, Any, Any]:
    """The same for the way back."""
    counts = chunk_orders.counts_between_shards(all_shards_tokens_per_expert, num_expert_shards)
    return tuple(chunk_orders.exchange_of(jnp, counts.sum(axis=2).T, shard_id))


def local_permute_after_a2a(
    x_recv: Any, all_shards_tokens_per_expert: Any, shard_id: Any, num_expert_shards: int
) -> tuple[Any, Any, dict[str, Any]]:
    """(rows by local expert, shape as x_recv's; counts of the local experts; state) of the rows [R, H] that
    arrived from shard after shard, each sorted by expert."""
    counts = chunk_orders.counts_between_shards(all_shards_tokens_per_expert, num_expert_shards)[:, shard_id]
    shards, experts = counts.shape
    by_expert = chunk_orders.transposed_order(jnp, shards, experts)
    by_shard = chunk_orders.transposed_order(jnp, experts, shards)
    state = {"sorted_split_sizes": counts.T.reshape(-1), "inverse_chunk_indices": by_shard}
    return sort_chunks_by_index(x_recv, counts.reshape(-1), by_expert)[0], counts.sum(axis=0), state


def local_unpermute_before_a2a(expert_outputs: Any, state: dict[str, Any]) -> Any:
    """Rows [R, H] back in the order of `local_permute_after_a2a`'s input, whose state this is."""
    chunks = state["sorted_split_sizes"], state["inverse_chunk_indices"]
    return sort_chunks_by_index(expert_outputs, *chunks)[0]


def _rows(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])
