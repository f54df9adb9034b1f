"""Device operations of `fp8moe.expert_parallel`: rows packed into messages, and expert ids by rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fp8moe.formats import round_up
from fp8moe.records import PermutationPlan, QuantTensor
from fp8moe.reference.quantize import quantize


def quantize_and_pack(
    x: np.ndarray,
    parts: tuple[np.ndarray, ...],
    row_id_map: np.ndarray | None,
    *,
    like: QuantTensor,
    out: tuple[np.ndarray, ...],
) -> None:
    made = [np.empty(s.shape, s.dtype) for s in (like.data, like.scales)]
    quantize(x, round_up=True, eps=0.0, out=replace(like, data=made[0], scales=made[1]))
    pack_rows((*made, *parts), row_id_map, out=out)


def pack_rows(
    parts: tuple[np.ndarray, ...], row_id_map: np.ndarray | None, *, out: tuple[np.ndarray, ...]
) -> None:
    """Writes each row's message to its slots in the concatenated windows [n, bytes]. Slots come from a plan
    whose experts are the windows; without a map, row r goes to slot r."""
    messages = np.zeros((len(parts[0]), out[0].shape[1]), np.uint8)
    at = 0
    for part in parts:
        view = _as_bytes(part)
        messages[:, at : at + view.shape[1]] = view
        at += round_up(view.shape[1], 16)
    rows = places = np.arange(len(messages))
    if row_id_map is not None:
        most = row_id_map.shape[1] // 2
        rows, columns = np.nonzero(np.arange(most) < row_id_map[:, -1:])
        places = row_id_map[rows, columns]
    before = 0
    for window in out:
        inside = (places >= before) & (places < before + len(window))
        window[places[inside] - before] = messages[rows[inside]]
        before += len(window)


def unpack_rows(packed: np.ndarray, *, out: tuple[np.ndarray, ...]) -> None:
    """Unpacks into the first rows of the arrays; zeroes the others."""
    at = 0
    for part in out:
        view = _as_bytes(part)
        view[len(packed) :] = 0
        view[: len(packed)] = packed[:, at : at + view.shape[1]]
        at += round_up(view.shape[1], 16)


def rank_mask(topk_ids: np.ndarray, *, experts: int, out: tuple[np.ndarray, np.ndarray]) -> None:
    mask, entries = out
    mask[:] = 0
    ranks = len(entries)
    tokens, places = np.nonzero((topk_ids >= 0) & (topk_ids < experts * ranks))
    rank = topk_ids[tokens, places] // experts
    mask[tokens, rank] = 1
    entries[:] = np.bincount(rank, minlength=ranks)


def local_ids(ids: np.ndarray, *, first: int, experts: int, rows: int, out: np.ndarray) -> None:
    """Local ids of the first ``rows`` rows; -1 in the others."""
    inside = (ids >= first) & (ids < first + experts)
    inside[rows:] = False
    out[:] = np.where(inside, ids - first, -1)


def limit_rows(plan: PermutationPlan, *, capacity: int, out: PermutationPlan) -> None:
    """The plan with exactly ``capacity`` rows per expert (here: per rank); rows of later tokens beyond it are
    dropped. Capacity 2 for the plan in `fp8moe.reference.plan`, without its padding:

        rank 0 gets tokens 0 2       rows 0 1        rows 0..1      dropped: token 3
        rank 1 gets tokens 0 1       rows 2 3        rows 2..3      dropped: tokens 3 4
        rank 2 gets tokens 1 2       rows 4 5        rows 4..5      pad_offsets 0 0 0
    """
    counts = plan.tokens_per_expert.astype(np.int64)
    kept = np.minimum(counts, capacity)
    before, starts = (np.cumsum(rows) - rows for rows in (counts, kept))
    width, ranks = plan.max_experts_per_token, plan.num_experts
    token, column = np.nonzero(np.arange(width) < plan.row_id_map[:, -1:])
    row, rank = plan.row_id_map[token, column], plan.row_id_map[token, width + column]
    place = row - before[rank]
    fits = place < capacity
    token, rank, place = token[fits], rank[fits], place[fits]
    column = np.arange(len(token)) - np.searchsorted(token, token)
    out.row_id_map[:] = -1
    out.row_id_map[token, column] = starts[rank] + place
    out.row_id_map[token, width + column] = rank
    out.row_id_map[:, -1] = np.bincount(token, minlength=plan.num_tokens)
    out.tokens_per_expert[:] = kept
    out.padded_tokens_per_expert[:] = capacity
    out.pad_offsets[:] = np.arange(ranks) * capacity - starts
    out.expert_offsets[:] = np.arange(ranks + 1) * capacity
    out.overflow[:] = plan.overflow + (counts - kept).sum()


def _as_bytes(part: np.ndarray) -> np.ndarray:
    return part.view(np.uint8).reshape(len(part), part.nbytes // max(len(part), 1))
