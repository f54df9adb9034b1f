"""Drop-in replacement for the functions of ``transformer_engine.jax.permutation`` (checked against 2.20).
Arguments, order and results are the same, with gradients for rows and probabilities, also in jitted code.

Unlike in the original, NaN values are not hidden: an expert's output for a token reaches the token's sum.
Padding, which belongs to no token, is never read.

    import fp8moe.transformer_engine.jax as permutation
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fp8moe.adapters import needs

with needs("jax"):
    import jax.numpy as jnp
import numpy as np

from fp8moe.adapters.jax import ops as jax_ops
from fp8moe.adapters.jax import tokens as jax_tokens
from fp8moe.ops import chunk_orders

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
    """Permute rows and their probabilities into expert order, by a mask.

    Parameters
    ----------
    inp : jax.Array, [T, H] or [batch, sequence, H]
        Rows of any dtype.
    routing_map : jax.Array, [T, E] or [batch, sequence, E]
        1 where a token is routed, otherwise 0.
    num_out_tokens : int
        Number of routed rows, static while tracing.
    probs : jax.Array, floating point, as routing_map, or None
        Routing probabilities, permuted too. A row with a probability of exactly 0.0 becomes zeros, by which
        callers drop tokens from a routing of fixed width; its gradient still reaches its token.
    align_size : int or None
        Each expert's rows are padded with zeros to a multiple of this number.

    Returns
    -------
    rows : jax.Array, [num_out_tokens, H]
        Rows in expert order. With ``align_size`` there are (num_out_tokens + E * (align_size - 1)) //
        align_size * align_size rows, zeros after the last expert's. Differentiable in ``inp``.
    probs : jax.Array, [rows], or None
        Probabilities of the rows. Differentiable in ``probs``.
    row_id_map : jax.Array, int32, [T, 2 * E + 1]
        Argument of `token_combine`.
    pad_offsets : jax.Array, int32, [E], or None
        Argument of `token_combine`; None without ``align_size``.
    tokens_per_expert : jax.Array, int32, [E]
        Number of rows of each expert, with padding.

    Raises
    ------
    TypeError
        For rows of a non-differentiable dtype that are differentiated.
    ValueError
        If num_out_tokens is not a positive int, or it or T is no multiple of the number of devices that the
        tokens are sharded over.

    Notes
    -----
    Replaces ``transformer_engine.jax.permutation.token_dispatch``. If ``jax.jit`` gets tokens sharded over n
    devices, each device permutes its own tokens, as in the original: each has 1/n of the rows (num_out_tokens
    with padding), row numbers start at 0 on each device, and counts and pad_offsets are those of all devices.
    The rows of every device are sufficient with num_out_tokens=tokens * topk, and with align_size=A above 1
    with num_out_tokens=tokens * topk + n * num_experts * (A - 1). If they are not, all rows of that device
    are NaN, if they are floating-point numbers; of integers the last ones are missing.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fp8moe.transformer_engine.jax as te
    >>> x, mask = jnp.array([[1.0], [2.0]]), jnp.array([[0, 1], [1, 1]])
    >>> rows, _, row_id_map, _, counts = te.token_dispatch(x, mask, 3)
    >>> rows.ravel().tolist(), counts.tolist()
    ([2.0, 1.0, 2.0], [1, 2])
    """
    if isinstance(num_out_tokens, np.integer):  # as a sum of a NumPy mask
        num_out_tokens = int(num_out_tokens)
    if not isinstance(num_out_tokens, int) or num_out_tokens <= 0:
        raise ValueError(
            f"num_out_tokens: got {num_out_tokens!r}; wanted the number of routed rows, 1 or more; pass "
            "tokens * topk"
        )
    x, mask = _rows(inp), _rows(routing_map).astype(jnp.int32)
    align = align_size or 1
    rows = (num_out_tokens + mask.shape[1] * (align - 1)) // align * align
    flat = None if probs is None else _rows(probs)
    separate_probs = flat is not None and not jax_ops.may_need_grad(x)
    data, moved, row_map, pads, counts = jax_tokens.dispatch(
        x, mask, None if separate_probs else flat, rows, align
    )
    if separate_probs:
        moved = jax_tokens.probs_of_rows(row_map, pads, flat, rows)
        data = jax_tokens.without_unweighted(data, moved)
    return data, moved, row_map, None if align_size is None else pads, counts


def token_combine(inp: Any, row_id_map: Any, merging_probs: Any = None, pad_offsets: Any = None) -> Any:
    """Sum each token's rows, each multiplied by its merging probability if given.

    Parameters
    ----------
    inp : jax.Array, floating point, [rows, H]
        Rows in the order of `token_dispatch`. Padding is not read.
    row_id_map : jax.Array, int32, [T, 2 * E + 1]
        Row map of `token_dispatch`.
    merging_probs : jax.Array, floating point, [T, E] or [batch, sequence, E], or None
        Factors of the rows.
    pad_offsets : jax.Array, int32, [E], or None
        As returned by `token_dispatch`.

    Returns
    -------
    jax.Array, [T, H]
        The sums in inp's dtype, computed in float32 (float64 for float64). Differentiable in ``inp`` and
        ``merging_probs``.

    Raises
    ------
    TypeError, ValueError
        For arguments that are inconsistent with the map.

    Notes
    -----
    Replaces ``transformer_engine.jax.permutation.token_combine``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fp8moe.transformer_engine.jax as te
    >>> x, mask = jnp.array([[1.0], [2.0]]), jnp.array([[0, 1], [1, 1]])
    >>> rows, _, row_id_map, *_ = te.token_dispatch(x, mask, 3)
    >>> te.token_combine(rows, row_id_map).ravel().tolist()
    [1.0, 4.0]
    """
    experts = (row_id_map.shape[1] - 1) // 2
    pads = jnp.zeros(experts, jnp.int32) if pad_offsets is None else pad_offsets.astype(jnp.int32)
    return jax_tokens.combine(inp, row_id_map, None if merging_probs is None else _rows(merging_probs), pads)


def sort_chunks_by_index(inp: Any, split_sizes: Any, sorted_indices: Any) -> tuple[Any, Any]:
    """Reorder chunks of rows.

    Parameters
    ----------
    inp : jax.Array, [N, H] or [batch, sequence, H]
        Rows, chunk after chunk.
    split_sizes : jax.Array, int32 or int64, [C]
        Number of rows of each chunk. Rows after the last chunk are copied unchanged.
    sorted_indices : jax.Array, int32 or int64, [C]
        Chunk j of the result is chunk ``sorted_indices[j]`` of inp.

    Returns
    -------
    rows : jax.Array, [N, H]
        Reordered rows. Differentiable in ``inp``.
    row_id_map : jax.Array, int32, [N]
        The row of the result that each row of inp is copied to.

    Raises
    ------
    TypeError, ValueError
        As in `fp8moe.sort_chunks`.

    Notes
    -----
    Replaces ``transformer_engine.jax.permutation.sort_chunks_by_index``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fp8moe.transformer_engine.jax as te
    >>> rows, to = te.sort_chunks_by_index(
    ...     jnp.array([[1.0], [2.0], [3.0]]), jnp.array([2, 1]), jnp.array([1, 0])
    ... )
    >>> rows.ravel().tolist(), to.tolist()
    ([3.0, 1.0, 2.0], [1, 2, 0])
    """
    x = _rows(inp)
    rows = jax_ops.sort_chunks(x, split_sizes, sorted_indices, keep_rest=True).data
    return rows, chunk_orders.moved_rows(jnp, split_sizes, sorted_indices, x.shape[0])


# ---------------------------------------------------------------- by sorting, with XLA's operations only


def routing_map_to_selected_experts(sparse_probs: Any, routing_map: Any, topk: int) -> tuple[Any, Any]:
    """Convert a mask to ids and probabilities of each token's experts.

    Parameters
    ----------
    sparse_probs : jax.Array, [..., E]
        Probabilities of all experts.
    routing_map : jax.Array, [..., E]
        Nonzero for topk experts of each token.
    topk : int
        Number of experts per token.

    Returns
    -------
    selected_experts : jax.Array, integer, [..., topk]
        Expert ids in ascending order.
    weights : jax.Array, [..., topk]
        Entries of ``sparse_probs`` for these ids.

    Notes
    -----
    Replaces ``transformer_engine.jax.permutation.routing_map_to_selected_experts``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fp8moe.transformer_engine.jax as te
    >>> mask = jnp.array([[0, 1, 1]])
    >>> [a.tolist() for a in te.routing_map_to_selected_experts(mask * 0.5, mask, 2)]
    [[[1, 2]], [[0.5, 0.5]]]
    """
    ids = chunk_orders.selected_experts(jnp, routing_map, topk)
    return ids, jnp.take_along_axis(sparse_probs, ids, axis=-1)


class PureJaxPermState(NamedTuple):
    """State of a dispatch, for `pure_jax_token_combine`.

    Parameters
    ----------
    sorted_indices : jax.Array, integer, [R]
        Entry of each row; entries are numbered token by token, followed by the padding.
    num_real_tokens : int
        Number of entries, T * topk.
    padding_size : int
        Number of padding rows, R - T * topk.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fp8moe.transformer_engine.jax as te
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
    """Permute rows into expert order by a sort, with XLA's operations only.

    Parameters
    ----------
    inputs : jax.Array, [T, H] or [batch, sequence, H]
        Rows of any dtype.
    selected_experts : jax.Array, integer, [T, k] or [batch, sequence, k]
        Expert ids.
    num_experts : int
        E, number of experts.
    num_experts_per_tok : int
        k, number of experts per token.
    align_size : int
        If not 0, each expert's rows are padded with zeros to a multiple of this number, in R = T * k + E *
        (align_size - 1) rows; those after the last expert's are zeros.
    roll_to_expert_id : int or None
        The expert that comes first; the experts before it are moved to the end.

    Returns
    -------
    rows : jax.Array, [R, H]
        Rows in expert order. Differentiable in ``inputs``.
    state : PureJaxPermState
        Argument of `pure_jax_token_combine`.
    group_sizes : jax.Array, integer, [E]
        Number of rows of each expert with padding, in the order of the rows.

    Raises
    ------
    ValueError
        For ids of another width, or a negative align_size.

    Notes
    -----
    Replaces ``transformer_engine.jax.permutation.pure_jax_token_dispatch``. With roll_to_expert_id the
    original rolls group_sizes twice without align_size, and with align_size it places the remaining zero rows
    between the experts.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fp8moe.transformer_engine.jax as te
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
    if ids.dtype != jnp.int64:  # differences, and num_experts itself, must be representable
        ids = ids.astype(jnp.int32)
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
    """Sum each token's rows from `pure_jax_token_dispatch`, weighted by the routing weights.

    Parameters
    ----------
    expert_outputs : jax.Array, floating point, [R, H]
        Rows in the order of the dispatch.
    perm_state : PureJaxPermState
        State of the dispatch.
    routing_weights : jax.Array, floating point, [batch * sequence, k]
        Factors of the rows.
    num_experts_per_tok : int
        k, number of experts per token.
    batch_size : int
        Batch size of the result.
    sequence_length : int
        Sequence length of the result.

    Returns
    -------
    jax.Array, [batch_size, sequence_length, H]
        The sums in the rows' dtype, computed in that dtype as in the original. Differentiable in
        ``expert_outputs`` and ``routing_weights``.

    Notes
    -----
    Replaces ``transformer_engine.jax.permutation.pure_jax_token_combine``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fp8moe.transformer_engine.jax as te
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


# ---------------------------------------------------------------- for ``jax.lax.ragged_all_to_all``


def compute_ragged_all_to_all_params(
    all_shards_tokens_per_expert: Any, shard_id: Any, num_expert_shards: int
) -> tuple[Any, Any, Any, Any]:
    """Compute the arguments of `jax.lax.ragged_all_to_all` that send sorted rows to their experts' shards.

    Parameters
    ----------
    all_shards_tokens_per_expert : jax.Array, integer, [num_expert_shards, E]
        Token counts of each shard's own tokens.
    shard_id : jax.Array or int
        Index of this shard; may be traced.
    num_expert_shards : int
        Number of shards, each with consecutive experts.

    Returns
    -------
    input_offsets : jax.Array, [num_expert_shards]
        First row for each shard in the input.
    send_sizes : jax.Array, [num_expert_shards]
        Number of rows for each shard.
    output_offsets : jax.Array, [num_expert_shards]
        First row of this shard's rows in each shard's output.
    recv_sizes : jax.Array, [num_expert_shards]
        Number of rows from each shard.

    Raises
    ------
    ValueError
        For counts of another shape.

    Notes
    -----
    Replaces ``transformer_engine.jax.permutation.compute_ragged_all_to_all_params``;
    `fp8moe.ops.chunk_orders` defines the order.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fp8moe.transformer_engine.jax as te
    >>> counts = jnp.array([[2, 0, 1, 3], [1, 1, 0, 2]])
    >>> [a.tolist() for a in te.compute_ragged_all_to_all_params(counts, 1, 2)]
    [[0, 2], [2, 2], [2, 4], [4, 2]]
    """
    counts = chunk_orders.counts_between_shards(all_shards_tokens_per_expert, num_expert_shards)
    return tuple(chunk_orders.exchange_of(jnp, counts.sum(axis=2), shard_id))


def compute_reverse_ragged_all_to_all_params(
    all_shards_tokens_per_expert: Any, shard_id: Any, num_expert_shards: int
) -> tuple[Any, Any, Any, Any]:
    """Compute the arguments of `jax.lax.ragged_all_to_all` that send the rows back.

    Parameters
    ----------
    all_shards_tokens_per_expert : jax.Array, integer, [num_expert_shards, E]
        As in `compute_ragged_all_to_all_params`.
    shard_id : jax.Array or int
        Index of this shard; may be traced.
    num_expert_shards : int
        Number of shards, each with consecutive experts.

    Returns
    -------
    input_offsets : jax.Array, [num_expert_shards]
        First row for each shard in the input.
    send_sizes : jax.Array, [num_expert_shards]
        Number of rows for each shard.
    output_offsets : jax.Array, [num_expert_shards]
        First row of this shard's rows in each shard's output.
    recv_sizes : jax.Array, [num_expert_shards]
        Number of rows from each shard.

    Raises
    ------
    ValueError
        For counts of another shape.

    Notes
    -----
    Replaces ``transformer_engine.jax.permutation.compute_reverse_ragged_all_to_all_params``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fp8moe.transformer_engine.jax as te
    >>> counts = jnp.array([[2, 0, 1, 3], [1, 1, 0, 2]])
    >>> [a.tolist() for a in te.compute_reverse_ragged_all_to_all_params(counts, 1, 2)]
    [[0, 4], [4, 2], [2, 2], [2, 2]]
    """
    counts = chunk_orders.counts_between_shards(all_shards_tokens_per_expert, num_expert_shards)
    return tuple(chunk_orders.exchange_of(jnp, counts.sum(axis=2).T, shard_id))


def local_permute_after_a2a(
    x_recv: Any, all_shards_tokens_per_expert: Any, shard_id: Any, num_expert_shards: int
) -> tuple[Any, Any, dict[str, Any]]:
    """Sort received rows, which each shard has sorted by expert, by expert over all shards.

    Parameters
    ----------
    x_recv : jax.Array, [R, H]
        Received rows; rows after them are copied unchanged.
    all_shards_tokens_per_expert : jax.Array, integer, [num_expert_shards, E]
        As in `compute_ragged_all_to_all_params`.
    shard_id : jax.Array or int
        Index of this shard; may be traced.
    num_expert_shards : int
        Number of shards, each with consecutive experts.

    Returns
    -------
    rows : jax.Array, [R, H]
        Sorted rows. Differentiable in ``x_recv``.
    tokens_per_expert : jax.Array, [E / num_expert_shards]
        Number of rows of each of this shard's experts.
    state : dict of str to jax.Array
        Argument of `local_unpermute_before_a2a`.

    Raises
    ------
    ValueError
        For counts of another shape.

    Notes
    -----
    Replaces ``transformer_engine.jax.permutation.local_permute_after_a2a``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fp8moe.transformer_engine.jax as te
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
    """Restore the order of `local_permute_after_a2a`'s input.

    Parameters
    ----------
    expert_outputs : jax.Array, [R, H]
        Rows in expert order.
    state : dict of str to jax.Array
        State from `local_permute_after_a2a`.

    Returns
    -------
    jax.Array, [R, H]
        Rows, shard after shard. Differentiable in ``expert_outputs``.

    Notes
    -----
    Replaces ``transformer_engine.jax.permutation.local_unpermute_before_a2a``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fp8moe.transformer_engine.jax as te
    >>> counts, arrived = jnp.array([[0, 0, 1, 1], [0, 0, 1, 2]]), jnp.arange(5.0).reshape(5, 1)
    >>> rows, _, state = te.local_permute_after_a2a(arrived, counts, 1, 2)
    >>> te.local_unpermute_before_a2a(rows, state).ravel().tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    chunks = state["sorted_split_sizes"], state["inverse_chunk_indices"]
    return sort_chunks_by_index(expert_outputs, *chunks)[0]


def _rows(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])
