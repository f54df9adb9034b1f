"""Planning as Numba kernels: two launches for ids, three for a mask; a worked example is in
`fp8moe.reference.plan`.

What: a stable counting sort of the T * k entries by expert, in chunks of tokens, without atomic claims.
`_count_chunks` ranks each entry among those of its expert in its chunk;
`_place_chunks` adds what earlier chunks and experts hold, and writes the map, one thread an entry.
Bytes: the ids twice, a count for every chunk and expert, the map once; so little that latency is all.
"""

from __future__ import annotations

from typing import Any

from fp8moe.kernels_cuda.numba_cuda import BLOCK, WARP, cuda, flat, int32, jit, run, scratch
from fp8moe.records import PermutationPlan

CHUNK = 512  # entries a block ranks: 64 blocks at 4096 tokens, top-8


def plan_topk(topk_ids: Any, *, out: PermutationPlan) -> None:
    _place(topk_ids, out.slots, scratch((0,)), out)


def plan_routing_map(routing_map: Any, *, out: PermutationPlan) -> None:
    tokens, width = out.num_tokens, out.max_experts_per_token
    ids, excess = scratch((tokens, width)), scratch((tokens,))
    run(_mask_to_ids, tokens, WARP, 4 * WARP, routing_map, ids, excess)
    _place(ids, scratch((0, 0)), excess, out)


def _place(ids: Any, slots: Any, excess: Any, out: PermutationPlan) -> None:
    tokens, width = ids.shape
    experts = out.num_experts
    per_chunk = max(1, CHUNK // max(width, 1))
    chunks = max(1, -(-tokens // per_chunk))
    rank, counts = scratch((tokens * width,)), scratch((chunks, experts))
    entries = per_chunk * max(width, 1)
    ids = flat(ids)
    shared = 4 * (entries + experts)
    run(_count_chunks, chunks, BLOCK, shared, ids, entries, rank, counts, out.overflow)
    run(
        _place_chunks,
        chunks,
        BLOCK,
        4 * (entries + 2 * experts + 2 * BLOCK + 1),
        ids,
        per_chunk,
        rank,
        counts,
        excess,
        out.align_size,
        out.num_out_tokens,
        out.row_id_map,
        slots,
        out.tokens_per_expert,
        out.padded_tokens_per_expert,
        out.pad_offsets,
        out.expert_offsets,
        out.overflow,
    )


@jit
def _mask_to_ids(mask, ids, excess):  # type: ignore[no-untyped-def]
    """One block a token: its experts in ascending order, then -1; excess: how many had no place."""
    found = cuda.shared.array(0, int32)
    token, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    experts, width = mask.shape[1], ids.shape[1]
    share = (experts + threads - 1) // threads
    begin = min(thread * share, experts)
    end = min(begin + share, experts)
    mine = 0
    for expert in range(begin, end):
        if mask[token, expert] != 0:
            mine += 1
    found[thread] = mine
    cuda.syncthreads()
    step = 1
    while step < threads:  # inclusive sums
        before = found[thread - step] if thread >= step else 0
        cuda.syncthreads()
        found[thread] += before
        cuda.syncthreads()
        step *= 2
    place = found[thread] - mine
    for expert in range(begin, end):
        if mask[token, expert] != 0:
            if place < width:
                ids[token, place] = expert
            place += 1
    total = found[threads - 1]
    for place in range(total + thread, width, threads):
        ids[token, place] = -1
    if thread == 0:
        excess[token] = max(total - width, 0)


@jit
def _count_chunks(ids, per_chunk, rank, counts, overflow):  # type: ignore[no-untyped-def]
    """One block a chunk of entries: each entry's rank in its expert there, and the counts."""
    memory = cuda.shared.array(0, int32)  # the entries | how many each expert has
    chunk, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    experts = counts.shape[1]
    first = chunk * per_chunk
    here = min(per_chunk, ids.shape[0] - first)
    for i in range(thread, here, threads):
        memory[i] = ids[first + i]
    for expert in range(thread, experts, threads):
        memory[per_chunk + expert] = 0
    cuda.syncthreads()
    for i in range(thread, here, threads):
        expert = memory[i]
        count = 0  # of the same expert before this one
        j = 0
        while j + 8 <= i:  # eight loads in flight
            a, b, c, d = memory[j], memory[j + 1], memory[j + 2], memory[j + 3]
            e, f, g, h = memory[j + 4], memory[j + 5], memory[j + 6], memory[j + 7]
            count += (1 if a == expert else 0) + (1 if b == expert else 0)
            count += (1 if c == expert else 0) + (1 if d == expert else 0)
            count += (1 if e == expert else 0) + (1 if f == expert else 0)
            count += (1 if g == expert else 0) + (1 if h == expert else 0)
            j += 8
        while j < i:
            count += 1 if memory[j] == expert else 0
            j += 1
        rank[first + i] = count
        if 0 <= expert < experts:
            cuda.atomic.add(memory, per_chunk + expert, 1)  # a count: the order does not matter
    cuda.syncthreads()
    for expert in range(thread, experts, threads):
        counts[chunk, expert] = memory[per_chunk + expert]
    if chunk == 0 and thread == 0:
        overflow[0] = 0


@jit
def _place_chunks(  # type: ignore[no-untyped-def]
    ids,
    per_chunk,
    rank,
    counts,
    excess,
    align,
    num_out_tokens,
    row_id_map,
    slots,
    tokens_per_expert,
    padded_tokens_per_expert,
    pad_offsets,
    expert_offsets,
    overflow,
):
    """One block a chunk: where each expert's rows of this chunk start, then one thread an entry."""
    memory = cuda.shared.array(0, int32)
    chunk, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    tokens, width = row_id_map.shape[0], (row_id_map.shape[1] - 1) // 2
    chunks, experts = counts.shape
    # in shared memory: rows of this chunk's entries | padded start | padding before | sums (two) | dropped
    starts = per_chunk * max(width, 1)
    pads = starts + experts
    sums = pads + experts
    dropped = sums + 2 * threads

    share = (experts + threads - 1) // threads
    begin = min(thread * share, experts)
    end = min(begin + share, experts)
    real = 0
    padded = 0
    for expert in range(begin, end):
        total = 0
        before = 0
        c = 0
        while c + 8 <= chunks:  # eight loads in flight
            c0, c1, c2, c3 = (
                counts[c, expert],
                counts[c + 1, expert],
                counts[c + 2, expert],
                counts[c + 3, expert],
            )
            c4, c5, c6, c7 = (
                counts[c + 4, expert],
                counts[c + 5, expert],
                counts[c + 6, expert],
                counts[c + 7, expert],
            )
            eight = c0 + c1 + c2 + c3 + c4 + c5 + c6 + c7
            total += eight
            if c + 8 <= chunk:
                before += eight
            else:
                before += (c0 if c < chunk else 0) + (c1 if c + 1 < chunk else 0)
                before += (c2 if c + 2 < chunk else 0) + (c3 if c + 3 < chunk else 0)
                before += (c4 if c + 4 < chunk else 0) + (c5 if c + 5 < chunk else 0)
                before += c6 if c + 6 < chunk else 0
            c += 8
        while c < chunks:
            count = counts[c, expert]
            total += count
            before += count if c < chunk else 0
            c += 1
        rows = (total + align - 1) // align * align
        memory[starts + expert] = padded + before  # of this thread's experts; the others are added below
        memory[pads + expert] = padded - real
        if chunk == 0:
            tokens_per_expert[expert] = total
            padded_tokens_per_expert[expert] = rows
            expert_offsets[expert + 1] = rows
        real += total
        padded += rows
    memory[sums + thread] = real
    memory[sums + threads + thread] = padded
    if thread == 0:
        memory[dropped] = 0
    cuda.syncthreads()
    step = 1
    while step < threads:  # inclusive sums over threads
        real_before = 0
        padded_before = 0
        if thread >= step:
            real_before = memory[sums + thread - step]
            padded_before = memory[sums + threads + thread - step]
        cuda.syncthreads()
        memory[sums + thread] += real_before
        memory[sums + threads + thread] += padded_before
        cuda.syncthreads()
        step *= 2
    real_before = memory[sums + thread] - real
    padded_before = memory[sums + threads + thread] - padded
    running = padded_before
    for expert in range(begin, end):
        memory[starts + expert] += padded_before
        memory[pads + expert] += padded_before - real_before
        if chunk == 0:
            pad_offsets[expert] = memory[pads + expert]
            running += expert_offsets[expert + 1]
            expert_offsets[expert + 1] = running
    if chunk == 0 and thread == 0:
        expert_offsets[0] = 0
    cuda.syncthreads()

    first = chunk * per_chunk
    here = min(per_chunk, tokens - first) * width
    for i in range(thread, here, threads):
        expert = ids[first * width + i]
        row = -1
        if expert >= 0:
            if expert < experts:
                padded_row = memory[starts + expert] + rank[first * width + i]
                if padded_row < num_out_tokens:
                    row = padded_row - memory[pads + expert]
            if row < 0:  # no room, or no such expert
                cuda.atomic.add(memory, dropped, 1)
        memory[i] = row
    cuda.syncthreads()

    for i in range(thread, here, threads):
        slot = i % width
        token = first + i // width
        row = memory[i]
        place = 0  # descending rows, then the blanks
        kept = 0
        for other in range(i - slot, i - slot + width):
            kept += 1 if memory[other] >= 0 else 0
            if row >= 0:
                place += 1 if memory[other] > row else 0
            else:
                place += 1 if memory[other] >= 0 or other < i else 0
        row_id_map[token, place] = row
        row_id_map[token, width + place] = ids[first * width + i] if row >= 0 else -1
        if slots.shape[0] > 0:
            slots[token, place] = slot if row >= 0 else -1
        if slot == 0:
            row_id_map[token, 2 * width] = kept
    if width == 0:
        for token in range(thread, tokens, threads):
            row_id_map[token, 0] = 0
    lost = 0
    for i in range(thread, min(per_chunk, excess.shape[0] - first), threads):
        lost += excess[first + i]
    if thread == 0:
        lost += memory[dropped]
    if lost > 0:
        cuda.atomic.add(overflow, 0, lost)
