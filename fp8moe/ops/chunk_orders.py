"""Chunk orders and ragged all-to-all sizes, with the conventions of Transformer Engine's JAX functions.

``xp`` is the arrays' module, ``numpy`` or ``jax.numpy``; the functions can be traced, as none reads a value.
Example: two shards with two experts each, whose tokens for the four experts are

    [[2, 0, 1, 3], [1, 1, 0, 2]]

- Shard 0 sends 2 rows to itself and 4 to shard 1; shard 1 sends 2 rows to shard 0 and 2 to itself.
- Shard 1 receives, by source shard, chunks of 1, 3 | 0, 2 rows for its experts 2 and 3.
- Sorted by expert these are the chunks 0, 2, 1, 3, with 1, 0 | 3, 2 rows; the inverse order is 0, 2, 1, 3.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from fp8moe.ops.row_maps import place
from fp8moe.records import Array


class Exchange(NamedTuple):
    """Arguments of `jax.lax.ragged_all_to_all`, [W] each: per target shard, the first row to send, the number
    of rows, and their first row at the target; per source shard, the number of rows received."""

    input_offsets: Array
    send_sizes: Array
    output_offsets: Array
    recv_sizes: Array


def counts_between_shards(tokens_per_expert: Array, shards: int) -> Array:
    """Reshape all shards' counts [source, E] to [source, target, experts per shard]."""
    if tokens_per_expert.shape[0] != shards or tokens_per_expert.shape[1] % shards:
        raise ValueError(
            f"all_shards_tokens_per_expert: got shape {list(tokens_per_expert.shape)}; wanted [{shards}, E], "
            f"E a multiple of num_expert_shards={shards}"
        )
    return tokens_per_expert.reshape(shards, shards, -1)


def exchange_of(xp: ModuleType, rows: Array, shard: Array | int) -> Exchange:
    """The exchange of one shard. rows: [source, target]; each target stores rows in the order of their
    sources. shard: index of this shard."""
    send_sizes, first_rows = rows[shard], xp.cumsum(rows, axis=0, dtype=rows.dtype) - rows
    return Exchange(
        xp.cumsum(send_sizes, dtype=send_sizes.dtype) - send_sizes,
        send_sizes,
        first_rows[shard],
        rows[:, shard],
    )


def transposed_order(xp: ModuleType, groups: int, chunks: int) -> Array:
    """int32 [groups * chunks], the order that changes chunks from group-major to chunk-major: the first chunk
    of every group, then the second, and so on. The inverse is ``transposed_order(xp, chunks, groups)``."""
    return xp.arange(groups * chunks, dtype=xp.int32).reshape(groups, chunks).T.reshape(-1)


def moved_rows(xp: ModuleType, split_sizes: Array, sorted_indices: Array, rows: int) -> Array:
    """int32 [rows], the destination of each row when its chunks are reordered (`fp8moe.sort_chunks` with
    ``keep_rest``). Rows past the last chunk keep their place."""
    ends, new_ends = xp.cumsum(split_sizes), xp.cumsum(split_sizes[sorted_indices])
    moved_by = xp.append(place(xp.zeros_like(ends), sorted_indices, new_ends) - ends, 0)
    row = xp.arange(rows)
    return (row + moved_by[xp.searchsorted(ends, row, side="right")]).astype(xp.int32)


def entries_with_padding(
    xp: ModuleType, ids: Array, tokens_per_expert: Array, align_size: int
) -> tuple[Array, Array]:
    """(ids [N] of the entries, followed by ids [E * (align_size - 1)] of padding rows; padded counts [E]).

    A stable sort by these ids gives the permutation: each expert's entries, then the padding rows that
    complete a multiple of align_size. Unused padding rows have id E and come last.
    """
    experts = len(tokens_per_expert)
    missing = -tokens_per_expert % align_size
    used = xp.arange(align_size - 1) < missing[:, None]
    padding = xp.where(used, xp.arange(experts)[:, None], experts).reshape(-1)
    return xp.concatenate([ids, padding.astype(ids.dtype)]), tokens_per_expert + missing


def selected_experts(xp: ModuleType, routing_map: Array, topk: int) -> Array:
    """Ids [..., topk] of each token's experts, ascending, from a mask [..., E] with topk experts per
    token."""
    experts = routing_map.shape[-1]
    return xp.argsort((routing_map != 0).astype(xp.uint8), axis=-1, stable=True)[..., experts - topk :]
