"""Transformer Engine's row maps by index, from ids.

A map says for every token to which rows it goes: by expert (``map_type="mask"``) a plan's ``row_id_map`` with
R = E, of which `fp8moe.plan_row_map` makes the plan; by index (``map_type="index"``) int32 [k * T], the row
of a token's entry j at j * T + t, -1 where it is dropped (`fp8moe.plan_index_map`). It takes a sort, which
every framework has, so the function here takes whatever arrays the caller has, also ones that a compiler
traces, in the operations of `Namespace`.
Five tokens, three experts, ids [[1, 0], [2, 1], [0, 2], [1, 0], [1, -1]] (those of `fp8moe.reference.plan`):

    expert 0 gets entries (0, 1) (2, 0) (3, 1)             rows 0 1 2
    expert 1 gets entries (0, 0) (1, 1) (3, 0) (4, 0)      rows 3 4 5 6
    expert 2 gets entries (1, 0) (2, 1)                    rows 7 8
    map by index: 3 7 1 5 6 | 0 4 8 2 -1
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from fp8moe.records import Array


class Namespace(Protocol):
    """What is asked of a framework. Each returns int32, and looks at no value."""

    def where(self, condition: Array, x: Any, y: Any) -> Array: ...

    def total(self, x: Array) -> Array:
        """[1] of all elements, numbers or truths."""

    def ranks(self, x: Array) -> Array:
        """[N]: the place of each element in ascending order, equal ones in the order that they have."""


class NumPy:
    """The `Namespace` of NumPy arrays."""

    where = staticmethod(np.where)

    def total(self, x: Array) -> Array:
        return x.sum(dtype=np.int32).reshape(1)

    def ranks(self, x: Array) -> Array:
        return np.argsort(np.argsort(x, kind="stable"), kind="stable").astype(np.int32)


def index_map(arrays: Namespace, topk_ids: Array, num_out_tokens: int) -> Array:
    """The map by index, int32 [k * T], of integer ids [T, k].

    Rows lie by ascending id, and of one id by token: only the order of the ids counts, not how large they
    are. A negative one takes no row. Rows from num_out_tokens on are dropped.
    """
    flat = topk_ids.reshape(-1)
    row = arrays.ranks(flat) - arrays.total(flat < 0)  # negative ones come first
    row = arrays.where((row >= 0) & (row < num_out_tokens), row, -1)
    return row.reshape(topk_ids.shape).T.reshape(-1)
