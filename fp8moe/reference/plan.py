"""Planning: from the router's choice to the destination row of every (token, expert) entry.

Five tokens, three experts, align_size 4, topk_ids [[0,1],[1,2],[0,2],[1,0],[1,-1]]:

    expert 0 gets tokens 0 2 3     rows 0 1 2      padded to rows 0..3
    expert 1 gets tokens 0 1 3 4   rows 3 4 5 6    padded to rows 4..7     pad_offsets 0 1 1
    expert 2 gets tokens 1 2       rows 7 8        padded to rows 8..11    expert_offsets 0 4 8 12

    row_id_map  token 0: rows 3 0 | experts 1 0 | 2      token 3: rows 5 2 | experts 1 0 | 2
                token 1: rows 7 4 | experts 2 1 | 2      token 4: rows 6 -1 | experts 1 -1 | 1
                token 2: rows 8 1 | experts 2 0 | 2
"""

from __future__ import annotations

import numpy as np

from fp8moe.records import PermutationPlan


def plan_topk(topk_ids: np.ndarray, *, out: PermutationPlan) -> None:
    """Entries are the valid expert ids, token by token."""
    token, slot = np.nonzero((topk_ids >= 0) & (topk_ids < len(out.tokens_per_expert)))
    _place(token, topk_ids[token, slot], slot, dropped=0, out=out)


def plan_routing_map(routing_map: np.ndarray, *, out: PermutationPlan) -> None:
    """Entries are the non-zero elements, token by token; those beyond a token's first R have no slot in the
    map."""
    token, expert = np.nonzero(routing_map)
    rank = np.arange(len(token)) - np.searchsorted(token, token)
    fits = rank < out.max_experts_per_token
    dropped = int((~fits).sum())
    _place(token[fits], expert[fits], rank[fits], dropped=dropped, out=out)


def plan_row_map(row_id_map: np.ndarray, pad_offsets: np.ndarray | None, *, out: PermutationPlan) -> None:
    """Counts the map's entries, the first ones of each token; expert starts follow from the counts."""
    experts = out.num_experts
    is_entry = np.arange(experts) < row_id_map[:, -1:]
    named = row_id_map[:, experts:-1][is_entry]
    counts = np.bincount(named[(named >= 0) & (named < experts)], minlength=experts)
    ends = np.cumsum(counts)
    padding = np.zeros(experts, np.int64) if pad_offsets is None else pad_offsets
    out.row_id_map[:] = row_id_map
    out.tokens_per_expert[:] = out.padded_tokens_per_expert[:] = counts
    out.pad_offsets[:] = padding
    out.expert_offsets[:-1] = ends - counts + padding
    out.expert_offsets[-1:] = (ends + padding)[-1:] if experts else 0
    out.overflow[:] = 0


def plan_index_map(row_id_map: np.ndarray, *, out: PermutationPlan) -> None:
    """Each token's rows in descending order; among equal rows the earlier entry first."""
    topk = out.max_experts_per_token
    rows = np.maximum(row_id_map.reshape(topk, -1).T, -1)
    order = np.argsort(-rows.astype(np.int64), axis=1, kind="stable")
    rows = np.take_along_axis(rows, order, axis=1)
    is_entry = rows >= 0
    out.row_id_map[:, :topk] = rows
    out.row_id_map[:, topk:-1] = np.where(is_entry, 0, -1)
    out.row_id_map[:, -1] = is_entry.sum(axis=1)
    out.slots[:] = np.where(is_entry, order, -1)
    out.tokens_per_expert[:] = out.padded_tokens_per_expert[:] = is_entry.sum()
    out.pad_offsets[:] = 0
    out.expert_offsets[:] = 0, is_entry.sum()
    out.overflow[:] = 0


def index_map(order: np.ndarray, topk_ids: np.ndarray, num_out_tokens: int, *, out: np.ndarray) -> None:
    row = np.empty(order.size, np.int32)
    row[order] = np.arange(order.size)
    takes = (topk_ids.reshape(-1) >= 0) & (row < num_out_tokens)
    out[:] = np.where(takes, row, -1).reshape(topk_ids.shape).T.reshape(-1)


def _place(
    token: np.ndarray, expert: np.ndarray, slot: np.ndarray, dropped: int, out: PermutationPlan
) -> None:
    align, width = out.align_size, out.max_experts_per_token
    counts = np.bincount(expert, minlength=len(out.tokens_per_expert))
    padded = -(-counts // align) * align
    starts = np.concatenate(([0], np.cumsum(padded)))
    pad_offsets = starts[:-1] - (np.cumsum(counts) - counts)

    # Stable sort: rows within an expert keep the order of their tokens, and of a token's slots.
    row = np.empty(len(token), np.int64)
    row[np.argsort(expert, kind="stable")] = np.arange(len(token))
    fits = row + pad_offsets[expert] < out.num_out_tokens
    token, expert, slot, row = token[fits], expert[fits], slot[fits], row[fits]

    descending = np.lexsort((-row, token))
    token, expert, slot, row = (a[descending] for a in (token, expert, slot, row))
    place = np.arange(len(token)) - np.searchsorted(token, token)

    out.row_id_map[:] = -1
    out.row_id_map[token, place] = row
    out.row_id_map[token, width + place] = expert
    out.row_id_map[:, -1] = np.bincount(token, minlength=out.num_tokens)
    if out.slots is not None:
        out.slots[:] = -1
        out.slots[token, place] = slot
    out.tokens_per_expert[:] = counts
    out.padded_tokens_per_expert[:] = padded
    out.pad_offsets[:] = pad_offsets
    out.expert_offsets[:] = starts
    out.overflow[:] = dropped + (~fits).sum()
