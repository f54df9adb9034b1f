"""Row maps from masks and ids: Transformer Engine's layouts, as functions of whatever arrays the caller has.

A map says for every token to which rows it goes: by expert (``map_type="mask"``) a plan's ``row_id_map`` with
R = E, of which `fp8moe.plan_row_map` makes the plan; by index (``map_type="index"``) int32 [k * T], the row
of a token's entry j at j * T + t, -1 where it is dropped (`fp8moe.plan_index_map`). Plans are made by kernels
(`fp8moe.plan`); what is here serves programs that a compiler divides over devices, and sorts, which every
framework has.

Five tokens, three experts, ids [[1, 0], [2, 1], [0, 2], [1, 0], [1, -1]] (those of `fp8moe.reference.plan`):

    expert 0 gets entries (0, 1) (2, 0) (3, 1)             rows 0 1 2
    expert 1 gets entries (0, 0) (1, 1) (3, 0) (4, 0)      rows 3 4 5 6
    expert 2 gets entries (1, 0) (2, 1)                    rows 7 8
    map by index: 3 7 1 5 6 | 0 4 8 2 -1

Padded to multiples of 4: rows 0 to 2, 4 to 7, 8 and 9 of 12; ``pad_offsets`` 0 1 1; sources of the rows:

    token 0 2 3 5 | 0 1 3 4 | 1 2 5 5, 5 where a row has none; expert 0 0 0 3 | 1 1 1 1 | 2 2 3 3
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from fp8moe import checks
from fp8moe.dispatch import enter, operation
from fp8moe.records import Array, ArrayLike, ArraySpec


def sort_key(ids: Array, bits: int) -> Array:
    """By what a stable sort brings entries into the order of the rows, of integer ids of so many bits: by id,
    negative ones, which take no row, last. Only the order of the ids counts, not how large they are."""
    return ids ^ -(1 << (bits - 1))  # the sign turned around


@operation
def index_map(order: ArrayLike, topk_ids: ArrayLike, num_out_tokens: int) -> Any:
    """The map by index, int32 [k * T], of ids [T, k] and of the order, [T * k], in which `sort_key` of them
    sorts the entries t * k + j: rows from num_out_tokens on are dropped."""
    call = enter(order=order, topk_ids=topk_ids)
    order, topk_ids = call.args.order, call.args.topk_ids
    num_out_tokens = checks.integer("num_out_tokens", num_out_tokens, 0)
    checks.dtype("topk_ids", topk_ids, checks.INTEGERS)
    checks.shape("topk_ids", topk_ids, ("T", "k"))
    checks.dtype("order", order, checks.INTEGERS)
    entries = topk_ids.shape[0] * topk_ids.shape[1]
    checks.shape("order", order, (entries,))
    out = call.empty(ArraySpec((entries,), checks.INT32))
    call.run("plan", "index_map", order, topk_ids, num_out_tokens, out=out)
    return call.leave(out)


# ---------------------------------------------------------------- of NumPy's or JAX's arrays
#
# ``xp`` is the module of the arrays, ``numpy`` or ``jax.numpy``. No value is looked at.


def padded_counts(xp: ModuleType, tokens_per_expert: Array, align_size: int) -> tuple[Array, Array]:
    """(rows of each expert with its padding, padding of all experts before each), int32 [E]."""
    padding = -tokens_per_expert % align_size
    return tokens_per_expert + padding, xp.cumsum(padding, dtype=xp.int32) - padding


def map_of_mask(xp: ModuleType, mask: Array, pad_offsets: Array, num_out_tokens: int) -> tuple[Array, Array]:
    """(the map by expert, int32 [T, 2E+1], of a mask [T, E] of 0 and 1 in int32; how many of its entries have
    no room, int32 scalar).

    pad_offsets: int32 [E], as `padded_counts` has them of these tokens, or of more: rows of an expert start
    after those that the experts before have here, and after the padding that is said. num_out_tokens: rows of
    the permuted buffer; what comes later is dropped.
    """
    counts = mask.sum(axis=0, dtype=xp.int32)
    # ones before it of the same expert, and the rows of the experts before
    row = xp.cumsum(mask, axis=0, dtype=xp.int32) - mask + xp.cumsum(counts, dtype=xp.int32) - counts
    row = xp.where((mask != 0) & (row + pad_offsets < num_out_tokens), row, -1)
    expert = xp.argsort(-row, axis=1, stable=True).astype(xp.int32)
    row = xp.take_along_axis(row, expert, axis=1)
    entries = (row >= 0).sum(axis=1, keepdims=True, dtype=xp.int32)
    row_id_map = xp.concatenate([row, xp.where(row < 0, -1, expert), entries], axis=1)
    return row_id_map, counts.sum(dtype=xp.int32) - entries.sum(dtype=xp.int32)


def row_sources(
    xp: ModuleType, row_id_map: Array, pad_offsets: Array, num_out_tokens: int
) -> tuple[Array, Array]:
    """(token, expert) of each row, int32 [num_out_tokens] each, of a map by expert; T and E where a row has
    none, which lie past the end of whatever is indexed by them."""
    tokens, experts = row_id_map.shape[0], row_id_map.shape[1] // 2
    row, expert = row_id_map[:, :experts], row_id_map[:, experts : 2 * experts]
    padded = row + pad_offsets[xp.maximum(expert, 0)] if experts else row
    at = xp.where(row < 0, num_out_tokens, padded)
    token = xp.broadcast_to(xp.arange(tokens, dtype=xp.int32)[:, None], row.shape)
    blank = xp.full(num_out_tokens, tokens, xp.int32), xp.full(num_out_tokens, experts, xp.int32)
    return place(blank[0], at, token), place(blank[1], at, expert)


def place(array: Array, index: Any, values: Array) -> Array:
    """``array`` with ``values`` at ``index``, an array or a tuple of them; what lies past the end is dropped.
    NumPy's arrays are written to, XLA's are made anew."""
    if not isinstance(array, np.ndarray):
        return array.at[index].set(values, mode="drop")
    values, *at = np.broadcast_arrays(values, *(index if isinstance(index, tuple) else (index,)))
    inside = np.all([i < size for i, size in zip(at, array.shape, strict=True)], axis=0)
    array[tuple(i[inside] for i in at)] = values[inside]
    return array
