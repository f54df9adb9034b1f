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

__all__ = [
    "PureJaxPermState",
    "compute_ragged_all_to_all_params",
    "compute_reverse_ragged_all_to_all_params",
    "local_permute_after_a2a",
    "local_unpermute_before_a2a",
    "pure_jax_token_combine",
    "pure_jax_token_dispatch",
    "routing_map_to_selected_experts",
    "sort_chunks_by_index",
    "token_combine",
    "token_dispatch",
]


def token_dispatch(
    inp: Any,
    routing_map: Any,
    num_out_tokens: int,
    probs: Any = None,
    align_size: int | None = None,
) -> tuple[Any, Any, Any, Any, Any]:
    """Rows and their probabilities in expert order, by a mask.

    Parameters
    ----------
    inp : jax.Array, [T, H] or [batch, sequence, H]
        Of any dtype.
    routing_map : jax.Array, [T, E] or [batch, sequence, E]
        1 where a token is routed, or 0.
    num_out_tokens : int
        Routed rows, a number that is known while tracing.
    probs : jax.Array, floating point, as routing_map, or None
        To move along.
    align_size : int or None
        Each expert's rows are padded to a multiple of it, with zeros.

    Returns
    -------
    rows : jax.Array, [num_out_tokens, H]
        With ``align_size`` (num_out_tokens + E * (align_size - 1)) // align_size * align_size rows, zeros
        past the last expert. Differentiable in ``inp``.
    probs : jax.Array, [rows], or None
        Differentiable in ``probs``.
    row_id_map : jax.Array, int32, [T, 2E+1]
        For `token_combine`.
    pad_offsets : jax.Array, int32, [E], or None
        For `token_combine`; None without ``align_size``.
    tokens_per_expert : jax.Array, int32, [E]
        With padding.

    Raises
    ------
    TypeError
        For rows of another dtype that are differentiated.
    ValueError
        For num_out_tokens that is no positive int, or no multiple of the devices that tokens are spread over.

    Notes
    -----
    ``transformer_engine.jax.permutation.token_dispatch``. Where ``jax.jit`` gets tokens sharded over n
    devices, each device moves its own, as in the original: each has 1/n of the rows (num_out_tokens with its
    padding), row numbers count from 0 on each, counts and pad_offsets are those of all. Pass
    num_out_tokens=tokens * topk, so that every device has room; the rows of one that has not are NaN.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fp8moe.adapters import transformer_engine_jax as te
    >>> x, mask = jnp.array([[1.0], [2.0]]), jnp.array([[0, 1], [1, 1]])
    >>> rows, _, row_id_map, _, counts = te.token_dispatch(x, mask, 3)
    >>> rows.ravel().tolist(), counts.tolist()
    ([2.0, 1.0, 2.0], [1, 2])
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
    """Sum each token's rows, each times its merging probability where given.

    Parameters
    ----------
    inp : jax.Array, floating point, [rows, H]
        In the order of `token_dispatch`. Padding, which no token has, is not read.
    row_id_map : jax.Array, int32, [T, 2E+1]
        Of `token_dispatch`.
    merging_probs : jax.Array, floating point, [T, E] or [batch, sequence, E], or None
        Factors of the rows.
    pad_offsets : jax.Array, int32, [E], or None
        Of `token_dispatch`.

    Returns
    -------
    jax.Array, [T, H]
        In inp's dtype, summed in float32 (float64 for float64). Differentiable in ``inp`` and
        ``merging_probs``.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit the map.

    Notes
    -----
    ``transformer_engine.jax.permutation.token_combine``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fp8moe.adapters import transformer_engine_jax as te
    >>> x, mask = jnp.array([[1.0], [2.0]]), jnp.array([[0, 1], [1, 1]])
    >>> rows, _, row_id_map, *_ = te.token_dispatch(x, mask, 3)
    >>> te.token_combine(rows, row_id_map).ravel().tolist()
    [1.0, 4.0]
    """
    experts = (row_id_map.shape[1] - 1) // 2
    pads = jnp.zeros(experts, jnp.int32) if pad_offsets is None else pad_offsets.astype(jnp.int32)
    return jax_tokens.combine(inp, row_id_map, None if merging_probs is None else _rows(merging_probs), pads)


def sort_chunks_by_index(inp: Any, split_sizes: Any, sorted_indices: Any) -> tuple[Any, Any]:
    """Chunks of rows in another order.

    Parameters
    ----------
    inp : jax.Array, [N, H] or [batch, sequence, H]
        Chunk after chunk.
    split_sizes : jax.Array, int32 or int64, [C]
        Rows of the chunks. Rows past them stay where they are.
    sorted_indices : jax.Array, int32 or int64, [C]
        Chunk j of the result is chunk ``sorted_indices[j]`` of inp.

    Returns
    -------
    rows : jax.Array, [N, H]
        Differentiable in ``inp``.
    row_id_map : jax.Array, int32, [N]
        The row that each came to.

    Raises
    ------
    TypeError, ValueError
        As `fp8moe.sort_chunks`.

    Notes
    -----
    ``transformer_engine.jax.permutation.sort_chunks_by_index``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fp8moe.adapters import transformer_engine_jax as te
    >>> rows, to = te.sort_chunks_by_index(
    ...     jnp.array([[1.0], [2.0], [3.0]]), jnp.array([2, 1]), jnp.array([1, 0])
    ... )
    >>> rows.ravel().tolist(), to.tolist()
    ([3.0, 1.0, 2.0], [1, 2, 0])
    """
    x = _rows(inp)
    rows = jax_ops.sort_chunks(x, split_sizes, sorted_indices, keep_rest=True).data
    return rows, chunk_orders.moved_rows(jnp, split_sizes, sorted_indices, x.shape[0])


# ---------------------------------------------------------------- by sorting, of XLA's operations alone


def routing_map_to_selected_experts(sparse_probs: Any, routing_map: Any, topk: int) -> tuple[Any, Any]:
    """Ids and probabilities of each token's experts, of a mask.

    Parameters
    ----------
    sparse_probs : jax.Array, [..., E]
        Of all experts.
    routing_map : jax.Array, [..., E]
        Nonzero for topk experts of each token.
    topk : int
        How many these are.

    Returns
    -------
    selected_experts : jax.Array, integer, [..., topk]
        Ascending.
    weights : jax.Array, [..., topk]
        Their entries of ``sparse_probs``.

    Notes
    -----
    ``transformer_engine.jax.permutation.routing_map_to_selected_experts``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fp8moe.adapters import transformer_engine_jax as te
    >>> mask = jnp.array([[0, 1, 1]])
    >>> [a.tolist() for a in te.routing_map_to_selected_experts(mask * 0.5, mask, 2)]
    [[[1, 2]], [[0.5, 0.5]]]
    """
    ids = chunk_orders.selected_experts(jnp, routing_map, topk)
    return ids, jnp.take_along_axis(sparse_probs, ids, axis=-1)


class PureJaxPermState(NamedTuple):
    """What `pure_jax_token_combine` needs of a dispatch.

    Parameters
    ----------
    sorted_indices : jax.Array, integer, [R]
        Of each row its entry, numbered token by token, then paddings.
    num_real_tokens : int
        Entries, T * topk.
    padding_size : int
        R less those.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fp8moe.adapters import transformer_engine_jax as te
    >>> te.pure_jax_token_dispatch(jnp.ones((2, 1)), jnp.array([[1], [0]]), 2, 1)[1].padding_size
    0
    """

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
    """Rows by expert, by sorting, of XLA's operations alone.

    Parameters
    ----------
    inputs : jax.Array, [T, H] or [batch, sequence, H]
        Of any dtype.
    selected_experts : jax.Array, integer, [T, k] or [batch, sequence, k]
        Ids of experts.
    num_experts : int
        E.
    num_experts_per_tok : int
        k.
    align_size : int
        Where it is not 0, each expert's rows are padded with zeros to a multiple of it, in R = T * k + E *
        (align_size - 1) rows; those past the last expert are zeros.
    roll_to_expert_id : int or None
        The expert that comes first, those before it last.

    Returns
    -------
    rows : jax.Array, [R, H]
        Differentiable in ``inputs``.
    state : PureJaxPermState
        For `pure_jax_token_combine`.
    group_sizes : jax.Array, integer, [E]
        Rows of the experts, in the order in which they lie, padding included.

    Raises
    ------
    ValueError
        For ids of another width, or an align_size below 0.

    Notes
    -----
    ``transformer_engine.jax.permutation.pure_jax_token_dispatch``. With roll_to_expert_id the original has
    group_sizes rolled twice without align_size, and with it the zeros that are left among the experts.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fp8moe.adapters import transformer_engine_jax as te
    >>> x, ids = jnp.array([[1.0], [2.0]]), jnp.array([[1, 0], [1, 0]])
    >>> rows, _, sizes = te.pure_jax_token_dispatch(x, ids, 2, 2)
    >>> rows.ravel().tolist(), sizes.tolist()
    ([1.0, 2.0, 1.0, 2.0], [2, 2])
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
    """Sum each token's rows of `pure_jax_token_dispatch`'s order by its weights.

    Parameters
    ----------
    expert_outputs : jax.Array, floating point, [R, H]
        In the order of the dispatch.
    perm_state : PureJaxPermState
        Of the dispatch.
    routing_weights : jax.Array, floating point, [batch * sequence, k]
        Factors of the rows.
    num_experts_per_tok : int
        k.
    batch_size : int
        Of the result.
    sequence_length : int
        Of the result.

    Returns
    -------
    jax.Array, [batch_size, sequence_length, H]
        In the rows' dtype, in which it is summed as in the original. Differentiable in ``expert_outputs`` and
        ``routing_weights``.

    Notes
    -----
    ``transformer_engine.jax.permutation.pure_jax_token_combine``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fp8moe.adapters import transformer_engine_jax as te
    >>> x, ids = jnp.array([[1.0], [2.0]]), jnp.array([[1, 0], [1, 0]])
    >>> rows, state, _ = te.pure_jax_token_dispatch(x, ids, 2, 2)
    >>> te.pure_jax_token_combine(rows, state, jnp.full((2, 2), 0.5), 2, 1, 2).ravel().tolist()
    [1.0, 2.0]
    """
    entries, hidden = batch_size * sequence_length * num_experts_per_tok, expert_outputs.shape[-1]
    rows = jax_tokens.unsort_entries(expert_outputs, perm_state.sorted_indices, entries)
    weights = routing_weights.reshape(-1, num_experts_per_tok).astype(rows.dtype)
    y = jnp.einsum("tkh,tk->th", rows.reshape(-1, num_experts_per_tok, hidden), weights)
    return y.reshape(batch_size, sequence_length, hidden)


# ---------------------------------------------------------------- around ``jax.lax.ragged_all_to_all``


def compute_ragged_all_to_all_params(
    all_shards_tokens_per_expert: Any, shard_id: Any, num_expert_shards: int
) -> tuple[Any, Any, Any, Any]:
    """With what `jax.lax.ragged_all_to_all` sends rows, sorted by expert, to the shards of their experts.

    Parameters
    ----------
    all_shards_tokens_per_expert : jax.Array, integer, [num_expert_shards, E]
        Of each shard the counts of its own tokens.
    shard_id : jax.Array or int
        This shard; may be traced.
    num_expert_shards : int
        Over which the experts are spread, in order.

    Returns
    -------
    input_offsets : jax.Array, [num_expert_shards]
        Where the rows for each shard start here.
    send_sizes : jax.Array, [num_expert_shards]
        How many they are.
    output_offsets : jax.Array, [num_expert_shards]
        Where they start there.
    recv_sizes : jax.Array, [num_expert_shards]
        How many come from each.

    Raises
    ------
    ValueError
        For counts of another shape.

    Notes
    -----
    ``transformer_engine.jax.permutation.compute_ragged_all_to_all_params``; the rules are
    `fp8moe.chunk_orders`'.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fp8moe.adapters import transformer_engine_jax as te
    >>> counts = jnp.array([[2, 0, 1, 3], [1, 1, 0, 2]])
    >>> [a.tolist() for a in te.compute_ragged_all_to_all_params(counts, 1, 2)]
    [[0, 2], [2, 2], [2, 4], [4, 2]]
    """
    counts = chunk_orders.counts_between_shards(all_shards_tokens_per_expert, num_expert_shards)
    return tuple(chunk_orders.exchange_of(jnp, counts.sum(axis=2), shard_id))


def compute_reverse_ragged_all_to_all_params(
    all_shards_tokens_per_expert: Any, shard_id: Any, num_expert_shards: int
) -> tuple[Any, Any, Any, Any]:
    """With what `jax.lax.ragged_all_to_all` sends the rows back.

    Parameters
    ----------
    all_shards_tokens_per_expert : jax.Array, integer, [num_expert_shards, E]
        As for `compute_ragged_all_to_all_params`.
    shard_id : jax.Array or int
        This shard; may be traced.
    num_expert_shards : int
        Over which the experts are spread, in order.

    Returns
    -------
    input_offsets : jax.Array, [num_expert_shards]
        Where the rows for each shard start here.
    send_sizes : jax.Array, [num_expert_shards]
        How many they are.
    output_offsets : jax.Array, [num_expert_shards]
        Where they start there.
    recv_sizes : jax.Array, [num_expert_shards]
        How many come from each.

    Raises
    ------
    ValueError
        For counts of another shape.

    Notes
    -----
    ``transformer_engine.jax.permutation.compute_reverse_ragged_all_to_all_params``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fp8moe.adapters import transformer_engine_jax as te
    >>> counts = jnp.array([[2, 0, 1, 3], [1, 1, 0, 2]])
    >>> [a.tolist() for a in te.compute_reverse_ragged_all_to_all_params(counts, 1, 2)]
    [[0, 4], [4, 2], [2, 2], [2, 2]]
    """
    counts = chunk_orders.counts_between_shards(all_shards_tokens_per_expert, num_expert_shards)
    return tuple(chunk_orders.exchange_of(jnp, counts.sum(axis=2).T, shard_id))


def local_permute_after_a2a(
    x_recv: Any, all_shards_tokens_per_expert: Any, shard_id: Any, num_expert_shards: int
) -> tuple[Any, Any, dict[str, Any]]:
    """Rows that arrived from shard after shard, each sorted by expert, by expert alone.

    Parameters
    ----------
    x_recv : jax.Array, [R, H]
        What arrived, and whatever lies after it.
    all_shards_tokens_per_expert : jax.Array, integer, [num_expert_shards, E]
        As for `compute_ragged_all_to_all_params`.
    shard_id : jax.Array or int
        This shard; may be traced.
    num_expert_shards : int
        Over which the experts are spread, in order.

    Returns
    -------
    rows : jax.Array, [R, H]
        Differentiable in ``x_recv``.
    tokens_per_expert : jax.Array, [E / num_expert_shards]
        Of this shard's experts.
    state : dict of str to jax.Array
        For `local_unpermute_before_a2a`.

    Raises
    ------
    ValueError
        For counts of another shape.

    Notes
    -----
    ``transformer_engine.jax.permutation.local_permute_after_a2a``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fp8moe.adapters import transformer_engine_jax as te
    >>> counts, arrived = jnp.array([[0, 0, 1, 1], [0, 0, 1, 2]]), jnp.arange(5.0).reshape(5, 1)
    >>> rows, sizes, _ = te.local_permute_after_a2a(arrived, counts, 1, 2)
    >>> rows.ravel().tolist(), sizes.tolist()
    ([0.0, 2.0, 1.0, 3.0, 4.0], [2, 3])
    """
    counts = chunk_orders.counts_between_shards(all_shards_tokens_per_expert, num_expert_shards)[:, shard_id]
    shards, experts = counts.shape
    by_expert = chunk_orders.transposed_order(jnp, shards, experts)
    by_shard = chunk_orders.transposed_order(jnp, experts, shards)
    state = {"sorted_split_sizes": counts.T.reshape(-1), "inverse_chunk_indices": by_shard}
    return sort_chunks_by_index(x_recv, counts.reshape(-1), by_expert)[0], counts.sum(axis=0), state


def local_unpermute_before_a2a(expert_outputs: Any, state: dict[str, Any]) -> Any:
    """Rows back in the order of `local_permute_after_a2a`'s input.

    Parameters
    ----------
    expert_outputs : jax.Array, [R, H]
        By expert.
    state : dict of str to jax.Array
        Of `local_permute_after_a2a`.

    Returns
    -------
    jax.Array, [R, H]
        Shard after shard. Differentiable in ``expert_outputs``.

    Notes
    -----
    ``transformer_engine.jax.permutation.local_unpermute_before_a2a``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fp8moe.adapters import transformer_engine_jax as te
    >>> counts, arrived = jnp.array([[0, 0, 1, 1], [0, 0, 1, 2]]), jnp.arange(5.0).reshape(5, 1)
    >>> rows, _, state = te.local_permute_after_a2a(arrived, counts, 1, 2)
    >>> te.local_unpermute_before_a2a(rows, state).ravel().tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    chunks = state["sorted_split_sizes"], state["inverse_chunk_indices"]
    return sort_chunks_by_index(expert_outputs, *chunks)[0]


def _rows(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])
