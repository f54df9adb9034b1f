"""Planning as Numba kernels; a worked example is in `fp8moe.reference.plan`.

First form: right and plain. One thread an expert walks over all entries, so that rows inside an expert keep
the order of their tokens without atomics; then one thread a token sorts its few entries.
"""

from __future__ import annotations

from typing import Any

from fp8moe.kernels_cuda.numba_cuda import cuda, jit, run, scratch
from fp8moe.records import PermutationPlan


def plan_topk(topk_ids: Any, *, out: PermutationPlan) -> None:
    run(_clear, 1, out.overflow)
    _place(topk_ids, out.slots, out)


def plan_routing_map(routing_map: Any, *, out: PermutationPlan) -> None:
    tokens, width = out.num_tokens, out.max_experts_per_token
    ids = scratch((tokens, width))
    run(_clear, 1, out.overflow)
    run(_mask_to_ids, tokens, routing_map, ids, out.overflow)
    _place(ids, scratch((tokens, width)), out)


def _place(ids: Any, slots: Any, out: PermutationPlan) -> None:
    rank = scratch(tuple(ids.shape))
    run(_rank_in_expert, out.num_experts, ids, rank, out.tokens_per_expert)
    counts, padded = out.tokens_per_expert, out.padded_tokens_per_expert
    run(_offsets, 1, counts, out.align_size, padded, out.pad_offsets, out.expert_offsets)
    arguments = (ids, rank, out.expert_offsets, out.pad_offsets, out.num_out_tokens)
    run(_map_token, out.num_tokens, *arguments, out.row_id_map, slots, out.overflow)


@jit
def _clear(overflow):  # type: ignore[no-untyped-def]
    if cuda.grid(1) == 0:
        overflow[0] = 0


@jit
def _mask_to_ids(mask, ids, overflow):  # type: ignore[no-untyped-def]
    """A token's experts in ascending order, -1 behind them; those past the width are counted."""
    token = cuda.grid(1)
    if token >= mask.shape[0]:
        return
    found = 0
    for expert in range(mask.shape[1]):
        if mask[token, expert] != 0:
            if found < ids.shape[1]:
                ids[token, found] = expert
            else:
                cuda.atomic.add(overflow, 0, 1)
            found += 1
    for place in range(found, ids.shape[1]):
        ids[token, place] = -1


@jit
def _rank_in_expert(ids, rank, counts):  # type: ignore[no-untyped-def]
    expert = cuda.grid(1)
    if expert >= counts.shape[0]:
        return
    count = 0
    for token in range(ids.shape[0]):
        for slot in range(ids.shape[1]):
            if ids[token, slot] == expert:
                rank[token, slot] = count
                count += 1
    counts[expert] = count


@jit
def _offsets(counts, align, padded, pad_offsets, expert_offsets):  # type: ignore[no-untyped-def]
    if cuda.grid(1) != 0:
        return
    start = 0
    compact = 0
    expert_offsets[0] = 0
    for expert in range(counts.shape[0]):
        rows = (counts[expert] + align - 1) // align * align
        padded[expert] = rows
        pad_offsets[expert] = start - compact
        start += rows
        compact += counts[expert]
        expert_offsets[expert + 1] = start


@jit
def _map_token(ids, rank, expert_offsets, pad_offsets, num_out_tokens, row_id_map, slots, overflow):  # type: ignore[no-untyped-def]
    """One row of the map: insertion sort of the token's entries by descending row."""
    token = cuda.grid(1)
    if token >= ids.shape[0]:
        return
    width = ids.shape[1]
    count = 0
    for place in range(2 * width):
        row_id_map[token, place] = -1
    for place in range(width):
        slots[token, place] = -1
    for slot in range(width):
        expert = ids[token, slot]
        if expert < 0:
            continue
        if expert >= pad_offsets.shape[0]:  # no such expert: dropped, as a row without room
            cuda.atomic.add(overflow, 0, 1)
            continue
        padded_row = expert_offsets[expert] + rank[token, slot]
        if padded_row >= num_out_tokens:
            cuda.atomic.add(overflow, 0, 1)
            continue
        row = padded_row - pad_offsets[expert]
        place = count
        while place > 0 and row_id_map[token, place - 1] < row:
            row_id_map[token, place] = row_id_map[token, place - 1]
            row_id_map[token, width + place] = row_id_map[token, width + place - 1]
            slots[token, place] = slots[token, place - 1]
            place -= 1
        row_id_map[token, place] = row
        row_id_map[token, width + place] = expert
        slots[token, place] = slot
        count += 1
    row_id_map[token, 2 * width] = count
