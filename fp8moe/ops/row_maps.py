"""Row maps from masks and ids, in Transformer Engine's layouts, for NumPy and JAX arrays.

A row map gives the destination rows of every token. The map by expert (``map_type="mask"``) is a plan's
``row_id_map`` with R = E; `fp8moe.plan_row_map` makes a plan of it. The map by index (``map_type="index"``)
is int32 [k * T]: the row of token t's entry j is at j * T + t, and is -1 if the entry is dropped
(`fp8moe.plan_index_map`). Plans are usually made by kernels (`fp8moe.ops.plan`). The functions here are for
programs that a compiler partitions over devices, and for sorts of a framework.

Example: five tokens, three experts, ids [[1, 0], [2, 1], [0, 2], [1, 0], [1, -1]] (as in
`fp8moe.reference.plan`):

    expert 0 gets entries (0, 1) (2, 0) (3, 1)             rows 0 1 2
    expert 1 gets entries (0, 0) (1, 1) (3, 0) (4, 0)      rows 3 4 5 6
    expert 2 gets entries (1, 0) (2, 1)                    rows 7 8
    map by index: 3 7 1 5 6 | 0 4 8 2 -1

Padded to multiples of 4: rows 0 to 2, 4 to 7, 8 and 9 of 12; ``pad_offsets`` 0 1 1. Source of each row:

    token 0 2 3 5 | 0 1 3 4 | 1 2 5 5 (5: padding row); expert 0 0 0 3 | 1 1 1 1 | 2 2 3 3
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from fp8moe.records import Array, ArrayLike, ArraySpec
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import enter, operation


def sort_key(ids: Array, bits: int) -> Array:
    """Keys by which a stable sort puts entries in row order: ascending ids, then negative ids, which get no
    row. ids: integers of ``bits`` bits, of any magnitude."""
    return ids ^ -(1 << (bits - 1))  # inverts the sign bit


@operation
def index_map(order: ArrayLike, topk_ids: ArrayLike, num_out_tokens: int) -> Any:
    """The map by index, int32 [k * T], from ids [T, k] and from the order [T * k] in which a stable sort by
    their `sort_key` puts the entries t * k + j. Entries whose row is num_out_tokens or more are dropped."""
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


# ---------------------------------------------------------------- for NumPy or JAX arrays
# ``xp`` is the arrays' module, ``numpy`` or ``jax.numpy``. No function reads a value, so all can be traced.


def padded_counts(xp: ModuleType, tokens_per_expert: Array, align_size: int) -> tuple[Array, Array]:
    """(padded rows of each expert, total padding of the experts before it), int32 [E] each."""
    padding = -tokens_per_expert % align_size
    return tokens_per_expert + padding, xp.cumsum(padding, dtype=xp.int32) - padding


def map_of_mask(xp: ModuleType, mask: Array, pad_offsets: Array, num_out_tokens: int) -> tuple[Array, Array]:
    """(the map by expert, int32 [T, 2E+1], of an int32 mask [T, E] of 0 and 1; the number of dropped entries,
    int32 scalar).

    pad_offsets: int32 [E], as from `padded_counts` of these tokens or of a superset. An expert's first row is
    the number of rows of the experts before it in this mask, plus its pad offset. num_out_tokens: rows of the
    permuted buffer; entries beyond it are dropped.
    """
    counts = mask.sum(axis=0, dtype=xp.int32)
    # entries before it of the same expert, plus the rows of the experts before
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
    """(token, expert) of each row, int32 [num_out_tokens] each, from a map by expert. A row without a token
    gets T and E, which are past the end of any array indexed by them."""
    tokens, experts = row_id_map.shape[0], row_id_map.shape[1] // 2
    row, expert = row_id_map[:, :experts], row_id_map[:, experts : 2 * experts]
    padded = row + pad_offsets[xp.maximum(expert, 0)] if experts else row
    index = xp.where(row < 0, num_out_tokens, padded)
    token = xp.broadcast_to(xp.arange(tokens, dtype=xp.int32)[:, None], row.shape)
    blank = xp.full(num_out_tokens, tokens, xp.int32), xp.full(num_out_tokens, experts, xp.int32)
    return place(blank[0], index, token), place(blank[1], index, expert)


def place(array: Array, index: Any, values: Array) -> Array:
    """``array`` with ``values`` at ``index`` (an array or a tuple of arrays); indices past the end are
    ignored. A NumPy array is modified in place; for JAX a new array is returned."""
    if not isinstance(array, np.ndarray):
        return array.at[index].set(values, mode="drop")
    values, *indices = np.broadcast_arrays(values, *(index if isinstance(index, tuple) else (index,)))
    inside = np.all([i < size for i, size in zip(indices, array.shape, strict=True)], axis=0)
    array[tuple(i[inside] for i in indices)] = values[inside]
    return array
