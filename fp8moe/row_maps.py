"""Transformer Engine's row maps as plans, and the reverse: the layout rules that adapters share.

A map says for every token to which rows it goes. They are a few integers a token, so these are functions of
whatever arrays the caller has, also of ones that a compiler traces, in the few operations of `Namespace`.

By expert (``map_type="mask"``): int32 [T, 2E+1], a plan's ``row_id_map`` with R = E. By index
(``map_type="index"``): int32 [k * T], the row of a token's entry j at j * T + t, -1 where it is dropped.
Five tokens, three experts, ids [[1, 0], [2, 1], [0, 2], [1, 0], [1, -1]] (those of `fp8moe.reference.plan`):

    expert 0 gets entries (0, 1) (2, 0) (3, 1)             rows 0 1 2
    expert 1 gets entries (0, 0) (1, 1) (3, 0) (4, 0)      rows 3 4 5 6
    expert 2 gets entries (1, 0) (2, 1)                    rows 7 8
    map by index: 3 7 1 5 6 | 0 4 8 2 -1
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from fp8moe.records import Array, PermutationPlan, pack_plan


class Namespace(Protocol):
    """What is asked of a framework. Each returns int32, and looks at no value."""

    def where(self, condition: Array, x: Any, y: Any) -> Array: ...

    def join(self, arrays: list[Array]) -> Array:
        """One after another along the first dimension."""

    def side_by_side(self, arrays: list[Array]) -> Array:
        """Along the second dimension."""

    def sum_rows(self, x: Array) -> Array:
        """[M, 1] of [M, N]."""

    def count(self, numbers: Array, bins: int) -> Array:
        """[bins]: how often each number from 0 on is in [N]."""

    def running_sum(self, x: Array) -> Array:
        """Of [N], with the element itself."""

    def ranks(self, x: Array) -> Array:
        """[N]: the place of each element in ascending order, equal ones in the order that they have."""

    def descending(self, x: Array) -> tuple[Array, Array]:
        """Each row of [M, N] in descending order, equal ones in the order that they have; their places."""


class NumPy:
    """The `Namespace` of NumPy arrays."""

    where = staticmethod(np.where)
    join = staticmethod(np.concatenate)

    def side_by_side(self, arrays: list[Array]) -> Array:
        return np.concatenate(arrays, axis=1)

    def sum_rows(self, x: Array) -> Array:
        return x.sum(axis=1, keepdims=True, dtype=np.int32)

    def count(self, numbers: Array, bins: int) -> Array:
        return np.bincount(numbers, minlength=bins).astype(np.int32)

    def running_sum(self, x: Array) -> Array:
        return np.cumsum(x, dtype=np.int32)

    def ranks(self, x: Array) -> Array:
        return np.argsort(np.argsort(x, kind="stable"), kind="stable").astype(np.int32)

    def descending(self, x: Array) -> tuple[Array, Array]:
        places = np.argsort(-x.astype(np.int64), axis=1, kind="stable")
        return np.take_along_axis(x, places, axis=1), places.astype(np.int32)


def plan_of_map(
    arrays: Namespace, row_id_map: Array, pad_offsets: Array | None, num_out_tokens: int
) -> PermutationPlan:
    """The plan that a map by expert and its padding belong to, counted again from the map.

    row_id_map: int32 [T, 2E+1]. pad_offsets: int32 [E], or None where no expert is padded. num_out_tokens:
    rows of the permuted buffer.

    The last expert's padding cannot be told from the tail after it, and need not be.
    """
    experts = (row_id_map.shape[1] - 1) // 2
    expert_of = row_id_map[:, experts : 2 * experts].reshape(-1)
    expert_of = arrays.where(expert_of < 0, experts, expert_of)  # the last bin takes the blanks
    bins = arrays.count(expert_of, experts + 1)
    counts, zero = bins[:experts], bins[:1] * 0
    padding = counts * 0 if pad_offsets is None else pad_offsets
    ends = arrays.running_sum(counts) + padding
    return pack_plan(
        arrays.join,
        num_out_tokens=num_out_tokens,
        align_size=1,
        row_id_map=row_id_map,
        tokens_per_expert=counts,
        padded_tokens_per_expert=counts,
        pad_offsets=padding,
        expert_offsets=arrays.join([ends - counts, ends[-1:] if experts else zero]),
        overflow=zero,
    )


def index_map(arrays: Namespace, topk_ids: Array, num_out_tokens: int) -> Array:
    """The map by index, int32 [k * T], of integer ids [T, k].

    Rows lie by ascending id, and of one id by token: only the order of the ids counts, not how large they
    are. A negative one takes no row. Rows from num_out_tokens on are dropped.
    """
    flat = topk_ids.reshape(-1)
    row = arrays.ranks(flat) - arrays.count(arrays.where(flat < 0, 0, 1), 2)[0]  # negative ones come first
    row = arrays.where((row >= 0) & (row < num_out_tokens), row, -1)
    return row.reshape(topk_ids.shape).T.reshape(-1)


def plan_of_index_map(
    arrays: Namespace, row_id_map: Array, topk: int, num_out_tokens: int
) -> PermutationPlan:
    """The plan that moves rows as a map by index says, of one expert that all entries are of: where an
    entry's row is depends on the order of the ids alone.

    row_id_map: int32 [topk * T]. num_out_tokens: rows of the permuted buffer.
    """
    rows, places = arrays.descending(row_id_map.reshape(topk, -1).T)
    routed = rows >= 0
    routed_rows = arrays.where(routed, 1, rows * 0)
    total = arrays.count(routed_rows.reshape(-1), 2)[1:]
    zero = total * 0
    return pack_plan(
        arrays.join,
        num_out_tokens=num_out_tokens,
        align_size=1,
        row_id_map=arrays.side_by_side([rows, routed_rows - 1, arrays.sum_rows(routed_rows)]),
        slots=arrays.where(routed, places, -1),
        tokens_per_expert=total,
        padded_tokens_per_expert=total,
        pad_offsets=zero,
        expert_offsets=arrays.join([zero, total]),
        overflow=zero,
    )
