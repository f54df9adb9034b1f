"""Planning as Numba kernels, in two launches; a worked example is in `fp8moe.reference.plan`.

What: a stable counting sort of the T * k entries by expert, in chunks of tokens, without atomic claims.
`_rank_entries` (`_rank_mask` for a mask) ranks each entry among those of its expert in its chunk;
`_place_entries` adds what earlier chunks and experts hold, and writes the map.
How a rank is found: each entry sets its bit in its expert's row of bits in shared memory; its rank is the
number of set bits before it. So no thread waits for another, and the order is that of the entries.
Bytes: the ids (or the mask) once, a rank an entry and a count a chunk and expert in between, the map once;
so little that latency is all.
"""

from __future__ import annotations

from typing import Any

from fp8moe.kernels_cuda.numba_cuda import BLOCK, as_octets, cuda, int32, run, scratch, uint32, uint64
from fp8moe.records import PermutationPlan

CHUNK = 512  # entries a block ranks at least: 64 blocks at 4096 tokens, top-8
MASK_CHUNK = 64  # tokens of a mask a block ranks at least
MAX_CHUNKS = 128  # every block of the second launch reads the counts of all chunks
BITS = 8192  # words of bits in shared memory
LOW_BITS, LOWEST_BITS = uint64(0x7F7F7F7F7F7F7F7F), uint64(0x0101010101010101)  # of every byte


def plan_topk(topk_ids: Any, *, out: PermutationPlan) -> None:
    tokens, width = topk_ids.shape
    experts = out.num_experts
    per_chunk = _per_chunk(tokens, max(1, CHUNK // max(width, 1)))
    chunks = max(1, -(-tokens // per_chunk))
    rank, counts = scratch(tokens * width, chunks * (experts + 1))
    words = max(1, min(-(-per_chunk * width // 32), CHUNK // 32, BITS // max(experts, 1)))
    shared = 4 * ((words + 1) * experts + 1)
    arguments = (topk_ids, tokens * width, per_chunk * width, words, experts, rank, counts)
    run(_rank_entries, chunks, shared, *arguments)
    _place(topk_ids, rank, counts, tokens, per_chunk, chunks, out)


def plan_routing_map(routing_map: Any, *, out: PermutationPlan) -> None:
    tokens, width = out.num_tokens, out.max_experts_per_token
    experts = out.num_experts
    per_chunk = _per_chunk(tokens, MASK_CHUNK)
    chunks = max(1, -(-tokens // per_chunk))
    ids, rank, counts = scratch(tokens * width, tokens * width, chunks * (experts + 1))
    step = min(per_chunk, MASK_CHUNK)
    shared = 4 * (step * -(-experts // 32) + (-(-step // 32) + 1) * experts + 1)
    octets = routing_map.dtype.itemsize == 1 and experts % 8 == 0
    mask = as_octets(routing_map) if octets else routing_map
    arguments = (mask, int(octets), tokens, experts, width, per_chunk, step, ids, rank, counts)
    run(_rank_mask, chunks, shared, *arguments)
    _place(ids, rank, counts, tokens, per_chunk, chunks, out)


def _per_chunk(tokens: int, least: int) -> int:
    """Tokens of a chunk: a multiple of ``least``, so that there are at most MAX_CHUNKS."""
    return least * max(1, -(-tokens // (least * MAX_CHUNKS)))


def _place(ids: Any, rank: Any, counts: Any, tokens: int, per_chunk: int, chunks: int, out: Any) -> None:
    width, experts = out.max_experts_per_token, out.num_experts
    piece = max(1, BLOCK // max(width, 1))  # tokens that a block places at a time
    groups = -(-experts // GROUP)
    run(
        _place_entries,
        chunks,
        4 * (4 * experts + 2 * groups + piece * (width + 1) + 1),
        ids,
        rank,
        counts,
        tokens,
        width,
        experts,
        chunks,
        per_chunk,
        piece,
        out.align_size,
        out.num_out_tokens,
        int(out.slots is not None),
        out.row_id_map,
        out.slots,
        out.tokens_per_expert,
        out.padded_tokens_per_expert,
        out.pad_offsets,
        out.expert_offsets,
        out.overflow,
    )


def _rank_entries(ids, entries, per_chunk, words, experts, rank, counts):  # type: ignore[no-untyped-def]
    """One block a chunk of entries, ``32 * words`` at a time. counts [chunk, experts + 1]: entries of each
    expert, and those of no expert that exists."""
    bits = cuda.shared.array(0, uint32)  # words x experts | how many each expert had so far | and nobody
    chunk, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    begin = chunk * per_chunk
    end = min(begin + per_chunk, entries)
    so_far = words * experts
    expert = thread
    while expert < experts + 1:
        bits[so_far + expert] = 0
        expert += threads
    start = begin
    while start < end:
        here = min(32 * words, end - start)
        i = thread
        while i < words * experts:
            bits[i] = 0
            i += threads
        cuda.syncthreads()
        i = thread
        while i < here:
            expert = ids[start + i]
            if expert >= experts:
                cuda.atomic.add(bits, so_far + experts, uint32(1))
            elif expert >= 0:
                cuda.atomic.or_(bits, (i >> 5) * experts + expert, uint32(1) << uint32(i & 31))
            i += threads
        cuda.syncthreads()
        i = thread
        while i < here:
            expert = ids[start + i]
            count = 0
            if expert >= 0 and expert < experts:
                word = i >> 5
                before = (uint32(1) << uint32(i & 31)) - uint32(1)
                count = int32(bits[so_far + expert]) + cuda.popc(bits[word * experts + expert] & before)
                for w in range(word):
                    count += cuda.popc(bits[w * experts + expert])
            rank[start + i] = count
            i += threads
        cuda.syncthreads()
        expert = thread
        while expert < experts:
            count = int32(bits[so_far + expert])
            for w in range(words):
                count += cuda.popc(bits[w * experts + expert])
            bits[so_far + expert] = count
            expert += threads
        cuda.syncthreads()
        start += 32 * words
    expert = thread
    while expert < experts + 1:
        counts[chunk * (experts + 1) + expert] = int32(bits[so_far + expert])
        expert += threads


def _rank_mask(  # type: ignore[no-untyped-def]
    mask, octets, tokens, experts, width, per_chunk, step, ids, rank, counts
):
    """One block a chunk of tokens, ``step`` at a time. ids: the experts of each token in ascending order,
    then -1. counts [chunk, experts + 1]: entries of each expert, and those past a token's first ``width``.
    octets: the mask's bytes come eight to a word."""
    bits = cuda.shared.array(0, uint32)  # a token's experts | an expert's tokens | counts so far
    chunk, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    words = (experts + 31) >> 5  # of a token
    rows = step * words
    so_far = rows + ((step + 31) >> 5) * experts
    expert = thread
    while expert < experts + 1:
        bits[so_far + expert] = 0
        expert += threads
    start = chunk * per_chunk
    end = min(start + per_chunk, tokens)
    while start < end:
        here = min(step, end - start)
        i = thread
        while i < so_far:
            bits[i] = 0
            i += threads
        cuda.syncthreads()
        if octets != 0:
            eighth = experts >> 3
            i = thread
            while i < here * eighth:
                v = uint64(mask[start * eighth + i])
                # the eight bytes' "not zero" as eight bits: into bit 7 of each byte, then side by side
                v = ((((v & LOW_BITS) + LOW_BITS) | v) >> uint64(7)) & LOWEST_BITS
                v = v | (v >> uint64(7))
                v = v | (v >> uint64(14))
                v = (v | (v >> uint64(28))) & uint64(255)
                if v != uint64(0):
                    t, octet = i // eighth, i % eighth
                    cuda.atomic.or_(bits, t * words + (octet >> 2), uint32(v << uint64(8 * (octet & 3))))
                i += threads
        else:
            i = thread
            while i < here * experts:
                if mask[start * experts + i] != 0:
                    t, expert = i // experts, i % experts
                    cuda.atomic.or_(bits, t * words + (expert >> 5), uint32(1) << uint32(expert & 31))
                i += threads
        cuda.syncthreads()
        i = thread
        while i < here * words:  # a word of a token: which experts have a place
            t, word = i // words, i % words
            place = 0
            for w in range(word):
                place += cuda.popc(bits[t * words + w])
            left = bits[i]
            while left != uint32(0) and place < width:
                expert = 32 * word + cuda.ffs(left) - 1
                left = left & (left - uint32(1))
                cuda.atomic.or_(bits, rows + (t >> 5) * experts + expert, uint32(1) << uint32(t & 31))
                place += 1
            i += threads
        cuda.syncthreads()
        i = thread
        while i < here * words:
            t, word = i // words, i % words
            place = 0
            for w in range(word):
                place += cuda.popc(bits[t * words + w])
            left = bits[i]
            entry = (start + t) * width
            while left != uint32(0):
                expert = 32 * word + cuda.ffs(left) - 1
                left = left & (left - uint32(1))
                if place < width:
                    before = (uint32(1) << uint32(t & 31)) - uint32(1)
                    count = int32(bits[so_far + expert])
                    count += cuda.popc(bits[rows + (t >> 5) * experts + expert] & before)
                    for w in range(t >> 5):
                        count += cuda.popc(bits[rows + w * experts + expert])
                    ids[entry + place] = expert
                    rank[entry + place] = count
                place += 1
            if word == words - 1:
                if place > width:
                    cuda.atomic.add(bits, so_far + experts, uint32(place - width))
                while place < width:
                    ids[entry + place] = -1
                    rank[entry + place] = 0
                    place += 1
            i += threads
        cuda.syncthreads()
        expert = thread
        while expert < experts:
            count = int32(bits[so_far + expert])
            for w in range((step + 31) >> 5):
                count += cuda.popc(bits[rows + w * experts + expert])
            bits[so_far + expert] = count
            expert += threads
        cuda.syncthreads()
        start += step
    expert = thread
    while expert < experts + 1:
        counts[chunk * (experts + 1) + expert] = int32(bits[so_far + expert])
        expert += threads


IN_FLIGHT = 16  # loads of a thread
GROUP = 16  # experts whose sums a thread adds one by one


def _place_entries(  # type: ignore[no-untyped-def]
    ids,
    rank,
    counts,
    tokens,
    width,
    experts,
    chunks,
    per_chunk,
    piece,
    align,
    num_out_tokens,
    has_slots,
    row_id_map,
    slots,
    tokens_per_expert,
    padded_tokens_per_expert,
    pad_offsets,
    expert_offsets,
    overflow,
):
    """One block a chunk: where each expert's rows of this chunk start, then one thread an entry."""
    # shared: rows, later where this chunk's rows start | rows of earlier chunks, later padding before
    #   | padded rows | rows | sums of GROUP experts: rows, padded | rows of the entries | entries kept | lost
    memory = cuda.shared.array(0, int32)
    chunk, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    starts, pads, padded, real = 0, experts, 2 * experts, 3 * experts
    groups = (experts + GROUP - 1) // GROUP
    sums = 4 * experts
    rows = sums + 2 * groups
    kept = rows + piece * width
    lost = kept + piece
    first = chunk * per_chunk
    last = min(first + per_chunk, tokens)
    # the first entry's loads travel while the counts are added up
    my_id, my_rank = -1, 0
    if thread < (last - first) * width:
        my_id, my_rank = ids[first * width + thread], rank[first * width + thread]

    expert = thread
    while expert < experts:
        memory[real + expert] = 0
        memory[pads + expert] = 0
        expert += threads
    if thread == 0:
        memory[lost] = 0
    cuda.syncthreads()
    lanes = max(min(experts, threads), 1)
    stride = threads // lanes  # threads that share an expert
    lane, part = thread % lanes, thread // lanes
    if part < stride:
        expert = lane
        while expert < experts:
            total, before = 0, 0
            jump = stride * (experts + 1)
            at = part * (experts + 1) + expert
            left = (chunks - part + stride - 1) // stride  # counts that this thread adds up
            early = (chunk - part + stride - 1) // stride  # of them, those of earlier chunks
            turn = 0
            while turn < left:
                for u in range(IN_FLIGHT):
                    count = counts[at + u * jump] if turn + u < left else 0
                    total += count
                    before += count if turn + u < early else 0
                at += IN_FLIGHT * jump
                turn += IN_FLIGHT
            cuda.atomic.add(memory, real + expert, total)  # integers: the order does not matter
            cuda.atomic.add(memory, pads + expert, before)
            expert += lanes
    cuda.syncthreads()
    expert = thread
    while expert < experts:
        memory[padded + expert] = (memory[real + expert] + align - 1) // align * align
        expert += threads
    cuda.syncthreads()
    group = thread
    while group < groups:
        total, total_padded = 0, 0
        for expert in range(group * GROUP, min(group * GROUP + GROUP, experts)):
            total += memory[real + expert]
            total_padded += memory[padded + expert]
        memory[sums + group] = total
        memory[sums + groups + group] = total_padded
        group += threads
    cuda.syncthreads()
    expert = thread
    while expert < experts:
        start, start_padded = 0, 0
        for group in range(expert // GROUP):
            start += memory[sums + group]
            start_padded += memory[sums + groups + group]
        for other in range(expert // GROUP * GROUP, expert):
            start += memory[real + other]
            start_padded += memory[padded + other]
        memory[starts + expert] = start_padded + memory[pads + expert]
        memory[pads + expert] = start_padded - start
        if chunk == 0:
            tokens_per_expert[expert] = memory[real + expert]
            padded_tokens_per_expert[expert] = memory[padded + expert]
            pad_offsets[expert] = start_padded - start
            expert_offsets[expert + 1] = start_padded + memory[padded + expert]
            room = max(num_out_tokens - start_padded, 0)
            cuda.atomic.add(memory, lost, max(memory[real + expert] - room, 0))
        expert += threads
    if chunk == 0:
        c = thread
        while c < chunks:
            cuda.atomic.add(memory, lost, counts[c * (experts + 1) + experts])
            c += threads
        cuda.syncthreads()
        if thread == 0:
            expert_offsets[0] = 0
            overflow[0] = memory[lost]

    token = first
    while token < last:
        here = min(piece, last - token)
        t = thread
        while t < here:
            memory[kept + t] = 0
            t += threads
        cuda.syncthreads()
        i = thread
        while i < here * width:
            if token == first and i == thread:
                expert, place = my_id, my_rank
            else:
                expert, place = ids[token * width + i], rank[token * width + i]
            row = -1
            if expert >= 0:
                if expert < experts:
                    padded_row = memory[starts + expert] + place
                    if padded_row < num_out_tokens:
                        row = padded_row - memory[pads + expert]
                if row >= 0:
                    cuda.atomic.add(memory, kept + i // width, 1)
            memory[rows + i] = row
            i += threads
        cuda.syncthreads()
        i = thread
        while i < here * width:
            t, slot = i // width, i % width
            row = memory[rows + i]
            place = 0  # descending rows, then the blanks
            if has_slots != 0:
                at = rows + i - slot
                if row >= 0:
                    for other in range(width):
                        place += 1 if memory[at + other] > row else 0
                else:
                    for other in range(width):
                        place += 1 if memory[at + other] >= 0 or other < slot else 0
                slots[(token + t) * width + place] = slot if row >= 0 else -1
            else:  # a mask's experts ascend, and with them the rows
                place = memory[kept + t] - 1 - slot if row >= 0 else slot
            at = (token + t) * (2 * width + 1)
            expert = -1
            if row >= 0:
                expert = ids[(token + t) * width + slot]
            row_id_map[at + place] = row
            row_id_map[at + width + place] = expert
            i += threads
        t = thread
        while t < here:
            row_id_map[(token + t) * (2 * width + 1) + 2 * width] = memory[kept + t]
            t += threads
        cuda.syncthreads()
        token += piece
