"""Orders of chunks of rows, and which rows travel, as Transformer Engine's JAX functions have them.

``xp`` is the module of the arrays, ``numpy`` or ``jax.numpy``; no value is looked at. Two shards, two experts
on each, tokens of each shard for the four experts [[2, 0, 1, 3], [1, 1, 0, 2]]:

    shard 0 sends itself 2 rows and shard 1 four; shard 1 sends shard 0 two rows and itself two
    at shard 1 arrive chunks of 1, 3 | 0, 2 rows, shard after shard, of its experts 2 and 3
    by expert they are chunks 0, 2, 1, 3: 1, 0 | 3, 2 rows; and back again chunks 0, 2, 1, 3
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from fp8moe.records import Array
from fp8moe.row_maps import place


class Exchange(NamedTuple):
    """What `jax.lax.ragged_all_to_all` takes, [W] each: of the rows that this shard sends each where they
    start here, how many they are and where they start there; and how many come from each."""

    input_offsets: Array
    send_sizes: Array
    output_offsets: Array
    recv_sizes: Array


def counts_between_shards(tokens_per_expert: Array, shards: int) -> Array:
    """[source, target, experts of each] of all shards' counts [source, E]."""
    if tokens_per_expert.shape[0] != shards or tokens_per_expert.shape[1] % shards:
        raise ValueError(
            f"all_shards_tokens_per_expert: got shape {list(tokens_per_expert.shape)}; wanted [{shards}, E], "
            f"E a multiple of num_expert_shards={shards}"
        )
    return tokens_per_expert.reshape(shards, shards, -1)


def exchange_of(xp: ModuleType, rows: Array, shard: Array | int) -> Exchange:
    """rows: [source, target], of which each target has those of source after source. shard: this one."""
    to, before = rows[shard], xp.cumsum(rows, axis=0, dtype=rows.dtype) - rows
    return Exchange(xp.cumsum(to, dtype=to.dtype) - to, to, before[shard], rows[:, shard])


def transposed_order(xp: ModuleType, groups: int, chunks: int) -> Array:
    """int32 [groups * chunks], the order that brings ``chunks`` chunks of every group, group after group, to
    the first of every group, then the second, and so on. Back: of (chunks, groups)."""
    return xp.arange(groups * chunks, dtype=xp.int32).reshape(groups, chunks).T.reshape(-1)


def moved_rows(xp: ModuleType, split_sizes: Array, sorted_indices: Array, rows: int) -> Array:
    """int32 [rows], where each row comes to when its chunks lie in another order (`fp8moe.sort_chunks` with
    ``keep_rest``): rows past the chunks stay."""
    ends, there = xp.cumsum(split_sizes), xp.cumsum(split_sizes[sorted_indices])
    moved_by = xp.append(place(xp.zeros_like(ends), sorted_indices, there) - ends, 0)
    row = xp.arange(rows)
    return (row + moved_by[xp.searchsorted(ends, row, side="right")]).astype(xp.int32)


def entries_with_padding(
    xp: ModuleType, ids: Array, tokens_per_expert: Array, align_size: int
) -> tuple[Array, Array]:
    """(ids of entries [N], then of paddings [E * (align_size - 1)]; counts with padding [E]).

    A stable sort by these ids is the permutation: each expert's entries, then as many paddings as it lacks to
    a multiple; paddings that none lacks have id E, and come last.
    """
    experts = len(tokens_per_expert)
    missing = -tokens_per_expert % align_size
    wanted = xp.arange(align_size - 1) < missing[:, None]
    padding = xp.where(wanted, xp.arange(experts)[:, None], experts).reshape(-1)
    return xp.concatenate([ids, padding.astype(ids.dtype)]), tokens_per_expert + missing


def selected_experts(xp: ModuleType, routing_map: Array, topk: int) -> Array:
    """Ids [..., topk] of each token's experts, ascending, of a mask [..., E] with topk of them a token."""
    experts = routing_map.shape[-1]
    return xp.argsort(routing_map != 0, axis=-1, stable=True)[..., experts - topk :]
