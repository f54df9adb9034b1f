"""Planning as Numba kernels, in two launches; a worked example is in `fp8moe.reference.plan`.

What: a stable counting sort of the T * k entries by expert, in chunks of tokens, without atomic claims.
`_count_entries`, or `_count_mask`, counts each expert's entries in a chunk; `_place_entries` adds what
earlier chunks and experts hold, ranks each entry among those of its expert in its chunk, and writes the map.
Of a mask `_place_mask` first writes down the tokens' experts, while the other launch counts them.
How a rank is found: each entry sets its bit in its expert's row of bits in shared memory; its rank is the
number of set bits before it. So no thread waits for another, and the order is that of the entries.
Bytes: the ids or the mask twice, a count a chunk and expert in between, the map once; so little that
latency is all: hence 32-bit arithmetic throughout, which Numba must be asked for at every step, and a second
launch that begins while the first is under way (programmatic dependent launch).
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from fp8moe.kernels_cuda.numba_cuda import (
    BLOCK,
    as_words,
    cuda,
    inlined,
    pdl_launch_dependents,
    pdl_wait,
    run,
    scratch,
    shared_limit,
    uint32,
    uint64,
)
from fp8moe.records import PermutationPlan

CHUNK = 512  # entries a block counts and places at least: 64 blocks at 4096 tokens, top-8
MAX_CHUNKS = 128  # every block of the second launch reads the counts of all chunks
BITS = 8192  # words of bits in shared memory, at most
GROUP = 16  # experts whose sums a thread adds one by one
IN_FLIGHT = 16  # loads of a thread
NONE = uint32(0xFFFFFFFF)  # no expert, no row
LISTS = OCTETS = False  # see `variant`
LOW_BITS, TOP_BITS = uint32(0x7F7F7F7F), uint32(0x80808080)  # of every byte
SIDE_BY_SIDE = uint32(0x00204081)  # times TOP_BITS: the four as a word's four highest


def plan_topk(topk_ids: Any, *, out: PermutationPlan) -> None:
    tokens, width = topk_ids.shape
    experts = out.num_experts
    per_chunk, chunks = _chunks(tokens, width)
    _refuse_too_many(out)
    (counts,) = scratch(_counted(chunks) * (experts + 1))
    arguments = (topk_ids, tokens * width, per_chunk * width, experts, counts)
    run(_count_entries, _counted(chunks), 4 * (experts + 1), *arguments)
    shared, arguments = _placing(counts, tokens, per_chunk, chunks, out)
    run(_place_entries, chunks, shared, topk_ids, 0, 0, 0, topk_ids, *arguments)


def plan_routing_map(routing_map: Any, *, out: PermutationPlan) -> None:
    tokens, width, experts = out.num_tokens, out.max_experts_per_token, out.num_experts
    per_chunk, chunks = _chunks(tokens, width)
    _refuse_too_many(out)
    ids, counts = scratch(tokens * width, _counted(chunks) * (experts + 1))
    words = max(1, -(-experts // 32))  # of a token
    shift = (words - 1).bit_length()  # that many threads have a token, or more turns
    step = max(1, min(per_chunk, BLOCK >> shift))
    by_words = routing_map.dtype.itemsize == 1 and experts > 0 and experts % 8 == 0
    mask = as_words(routing_map) if by_words else routing_map
    count, place = (_count_mask_words, _place_mask_words) if by_words else (_count_mask, _place_mask)
    arguments = (mask, tokens, experts, words, shift, width, per_chunk, step, counts)
    run(count, _counted(chunks), 4 * (experts + 1 + step), *arguments)
    shared, arguments = _placing(counts, tokens, per_chunk, chunks, out)
    shared = max(shared, 4 * (step << shift))
    run(place, chunks, shared, mask, words, shift, step, ids, *arguments)


def _chunks(tokens: int, width: int) -> tuple[int, int]:
    """(tokens of a chunk, chunks); at most MAX_CHUNKS of whole pieces, see `_place_entries`."""
    least = max(1, CHUNK // max(width, 1))
    per_chunk = least * max(1, -(-tokens // (least * MAX_CHUNKS)))
    return per_chunk, max(1, -(-tokens // per_chunk))


def _counted(chunks: int) -> int:
    """Rows of the counts: the chunks, and none in those after them, so that no load asks."""
    return -(-chunks // IN_FLIGHT) * IN_FLIGHT


def _piece(out: PermutationPlan) -> tuple[int, int, int]:
    """What `_place_entries` has room for: tokens at a time, words of 32 entries, bytes of shared memory."""
    width, experts = out.max_experts_per_token, out.num_experts
    groups = -(-experts // GROUP)
    piece = max(1, BLOCK // max(width, 1))
    words = max(1, min(-(-piece * width // 32), BITS // max(experts, 1)))
    return piece, words, 4 * ((4 + words) * experts + 2 * groups + piece * (2 * width + 1) + 2)


def _refuse_too_many(out: PermutationPlan) -> None:
    *_, shared = _piece(out)
    if shared > shared_limit():
        raise ValueError(
            f"num_experts: got {out.num_experts}, {out.max_experts_per_token} of a token, whose counts take "
            f"{shared} bytes; wanted at most {shared_limit()}, the shared memory of this device's blocks"
        )


def _placing(counts: Any, tokens: int, per_chunk: int, chunks: int, out: Any) -> tuple[int, tuple[Any, ...]]:
    """(bytes of shared memory, what `_place_entries` takes after the ids)."""
    piece, words, shared = _piece(out)
    return shared, (
        counts,
        tokens,
        out.max_experts_per_token,
        out.num_experts,
        chunks,
        per_chunk,
        piece,
        words,
        out.align_size,
        out.num_out_tokens,
        out.row_id_map,
        out.slots,
        out.tokens_per_expert,
        out.padded_tokens_per_expert,
        out.pad_offsets,
        out.expert_offsets,
        out.overflow,
    )


def _count_entries(ids, entries, per_chunk, experts, counts):  # type: ignore[no-untyped-def]
    """One block a chunk of entries. counts [chunk, experts + 1]: entries of each expert, and 0, where
    `_count_places` has those that a mask's token has too many."""
    shared = cuda.shared.array(0, uint32)  # the counts
    chunk, thread, threads = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x), uint32(cuda.blockDim.x)
    bins = uint32(experts + 1)
    begin = uint32(chunk * uint32(per_chunk))
    end = uint32(min(begin + per_chunk, entries))
    i = thread
    while i < bins:
        shared[i] = uint32(0)
        i = uint32(i + threads)
    pdl_wait()
    pdl_launch_dependents()
    cuda.syncthreads()
    i = uint32(begin + thread)
    while i < end:
        expert = ids[i]
        if expert >= 0 and expert < experts:
            cuda.atomic.add(shared, uint32(expert), uint32(1))
        i = uint32(i + threads)
    cuda.syncthreads()
    i = thread
    while i < bins:
        counts[uint32(chunk * bins + i)] = shared[i]
        i = uint32(i + threads)


@inlined
def _routed(mask, by_words, experts, token, word):  # type: ignore[no-untyped-def]
    """A token's experts 32 * word and on, as 32 bits. by_words: the mask's bytes come eight to a word."""
    found = uint32(0)
    if by_words:
        there = uint32(uint32(experts) >> uint32(3))
        at = uint64(uint64(token) * uint64(there))
        for j in range(4):  # loads that do not wait for each other
            octet = uint32(4 * word + j)
            v = uint64(mask[at + uint64(min(octet, uint32(there - uint32(1))))])
            for half in range(2):
                part = uint32(v >> uint64(32 * half))
                # the four bytes' "not zero" as their top bits, then side by side
                part = uint32(uint32(uint32(uint32(part & LOW_BITS) + LOW_BITS) | part) & TOP_BITS)
                part = uint32(uint32(part * SIDE_BY_SIDE) >> uint32(28))
                if octet < there:
                    found = uint32(found | uint32(part << uint32(8 * j + 4 * half)))
    else:
        at = uint64(uint64(token) * uint64(experts))
        for j in range(32):
            expert = uint32(32 * word + j)
            if expert < uint32(experts) and mask[at + uint64(expert)] != 0:
                found = uint32(found | uint32(uint32(1) << uint32(j)))
    return found


def _count_mask(  # type: ignore[no-untyped-def]
    mask, tokens, experts, words, shift, width, per_chunk, step, counts
):
    """One block a chunk of tokens, ``step`` at a time; a thread has 32 experts of a token. counts
    [chunk, experts + 1]: entries of each expert, and those past a token's first ``width``."""
    shared = cuda.shared.array(0, uint32)  # the counts | entries of each token
    chunk, thread, threads = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x), uint32(cuda.blockDim.x)
    bins = uint32(experts + 1)
    i = thread
    while i < uint32(bins + uint32(step)):
        shared[i] = uint32(0)
        i = uint32(i + threads)
    cuda.syncthreads()
    pdl_wait()
    pdl_launch_dependents()
    start = uint32(chunk * uint32(per_chunk))
    end = uint32(min(start + per_chunk, tokens))
    while start < end:
        here = uint32(min(end - start, uint32(step)))
        i = thread
        while i < uint32(here << uint32(shift)):  # once, but for more than 32 * threads experts
            token = uint32(i >> uint32(shift))
            word = uint32(i - uint32(token << uint32(shift)))
            if word < uint32(words):
                left = uint32(_routed(mask, OCTETS, experts, uint32(start + token), word))
                cuda.atomic.add(shared, uint32(bins + token), uint32(cuda.popc(left)))
                while left != uint32(0):
                    expert = uint32(32 * word + cuda.ffs(left) - 1)
                    left = uint32(left & uint32(left - uint32(1)))
                    cuda.atomic.add(shared, expert, uint32(1))
            i = uint32(i + threads)
        cuda.syncthreads()
        i = thread
        while i < here:
            place = uint32(shared[uint32(bins + i)])
            shared[uint32(bins + i)] = uint32(0)
            if place > uint32(width):  # the last of its experts are too many
                cuda.atomic.add(shared, uint32(experts), uint32(place - uint32(width)))
                word = uint32(words)
                while place > uint32(width):
                    word = uint32(word - uint32(1))
                    left = uint32(_routed(mask, OCTETS, experts, uint32(start + i), word))
                    while left != uint32(0) and place > uint32(width):
                        bit = uint32(31 - cuda.clz(left))
                        left = uint32(left ^ uint32(uint32(1) << bit))
                        cuda.atomic.sub(shared, uint32(32 * word + bit), uint32(1))
                        place = uint32(place - uint32(1))
            i = uint32(i + threads)
        cuda.syncthreads()
        start = uint32(start + uint32(step))
    i = thread
    while i < bins:
        counts[uint32(chunk * bins + i)] = shared[i]
        i = uint32(i + threads)


@inlined
def _list_experts(  # type: ignore[no-untyped-def]
    mask, by_words, tokens, experts, words, shift, width, per_chunk, step, ids
):
    """Of the tokens of the block's chunk. ids: the experts of each in ascending order, at most ``width``,
    then -1."""
    shared = cuda.shared.array(0, uint32)  # experts in each word of 32
    chunk, thread, threads = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x), uint32(cuda.blockDim.x)
    start = uint32(chunk * uint32(per_chunk))
    end = uint32(min(start + per_chunk, tokens))
    while start < end:
        here = uint32(min(end - start, uint32(step)) << uint32(shift))
        first = uint32(0)
        while first < here:
            i = uint32(first + thread)
            token = uint32(i >> uint32(shift))
            word = uint32(i - uint32(token << uint32(shift)))
            mine = i < here and word < uint32(words)
            left = uint32(0)
            if mine:
                left = uint32(_routed(mask, by_words, experts, uint32(start + token), word))
                shared[i] = uint32(cuda.popc(left))
            cuda.syncthreads()
            if mine:
                place, w = uint32(0), uint32(0)
                while w < word:
                    for u in range(8):  # loads that do not wait for each other
                        there = uint32(w + uint32(u)) < word
                        before = shared[uint32(i - (uint32(word - w - uint32(u)) if there else uint32(0)))]
                        place = uint32(place + (before if there else uint32(0)))
                    w = uint32(w + uint32(8))
                entry = uint64(uint64(start + token) * uint64(width))
                while left != uint32(0) and place < uint32(width):
                    ids[entry + uint64(place)] = uint32(32 * word + cuda.ffs(left) - 1)
                    left = uint32(left & uint32(left - uint32(1)))
                    place = uint32(place + uint32(1))
                if uint32(word + uint32(1)) == uint32(words):
                    while place < uint32(width):
                        ids[entry + uint64(place)] = -1
                        place = uint32(place + uint32(1))
            first = uint32(first + threads)
        cuda.syncthreads()
        start = uint32(start + uint32(step))


def _place_entries(  # type: ignore[no-untyped-def]
    mask,
    mask_words,
    shift,
    step,
    ids,
    counts,
    tokens,
    width,
    experts,
    chunks,
    per_chunk,
    piece,
    words,
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
    # shared: rows and padded rows, of each expert | of each GROUP of them | then, in `memory` alone, where
    #   this chunk's rows start | rows of earlier chunks, later padding before | bits | rows of the entries
    #   | their experts | entries of a token kept | lost
    wide = cuda.shared.array(0, uint64)  # the rows in the low half
    memory = cuda.shared.array(0, uint32)  # the same memory
    if LISTS:  # so far, and until `pdl_wait`, it runs beside the launch that counts
        _list_experts(mask, OCTETS, tokens, experts, mask_words, shift, width, per_chunk, step, ids)
    chunk, thread, threads = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x), uint32(cuda.blockDim.x)
    n, k, bins = uint32(experts), uint32(width), uint32(experts + 1)
    groups = uint32((n + uint32(GROUP - 1)) // uint32(GROUP))
    starts = uint32(2 * (n + groups))
    pads = uint32(starts + n)
    bits = uint32(pads + n)
    pairs = uint32(uint32(n * uint32(words) + uint32(1)) >> uint32(1))  # words of bits
    rows = uint32(bits + 2 * pairs)
    named = uint32(rows + uint32(piece) * k)
    kept = uint32(named + uint32(piece) * k)
    lost = uint32(kept + uint32(piece))
    first = uint32(chunk * uint32(per_chunk))
    last = uint32(min(first + per_chunk, tokens))
    mine = -1  # the first entry travels while the counts are added up
    if thread < uint32(uint32(last - first) * k):
        mine = ids[uint64(first) * uint64(k) + uint64(thread)]

    i = thread
    while i < n:
        wide[i] = uint64(0)
        memory[uint32(pads + i)] = uint32(0)
        i = uint32(i + threads)
    if thread == uint32(0):
        memory[lost] = uint32(0)
    cuda.syncthreads()
    pdl_wait()
    pdl_launch_dependents()
    lanes = uint32(max(min(n, threads), uint32(1)))
    stride = uint32(threads // lanes)  # threads that share an expert
    part = uint32(thread // lanes)
    if part < stride:
        expert = uint32(thread - part * lanes)
        while expert < n:
            total, before = uint32(0), uint32(0)
            c = uint32(part * uint32(IN_FLIGHT))
            while c < uint32(chunks):
                at = uint32(c * bins + expert)
                for u in range(IN_FLIGHT):
                    count = uint32(counts[at])
                    at = uint32(at + bins)
                    total = uint32(total + count)
                    before = uint32(before + (count if uint32(c + uint32(u)) < chunk else uint32(0)))
                c = uint32(c + stride * uint32(IN_FLIGHT))
            cuda.atomic.add(memory, uint32(2 * expert), total)  # integers: the order does not matter
            cuda.atomic.add(memory, uint32(pads + expert), before)
            expert = uint32(expert + lanes)
    cuda.syncthreads()
    i = thread
    while i < n:
        real = uint32(memory[uint32(2 * i)])
        padded = uint32(uint32(uint32(real + uint32(align - 1)) // uint32(align)) * uint32(align))
        memory[uint32(2 * i + 1)] = padded
        memory[uint32(starts + i)] = real
        i = uint32(i + threads)
    cuda.syncthreads()
    i = thread
    while i < groups:  # each expert's becomes what its group holds before it
        both, e, own = uint64(0), uint32(i * uint32(GROUP)), cuda.local.array(GROUP, uint64)
        for u in range(GROUP):  # loads that do not wait for each other
            own[u] = wide[uint32(min(uint32(e + uint32(u)), uint32(n - uint32(1))))]
        for u in range(GROUP):
            if uint32(e + uint32(u)) < n:
                wide[uint32(e + uint32(u))] = both
                both = both + own[u]
        wide[uint32(n + i)] = both
        i = uint32(i + threads)
    cuda.syncthreads()
    expert = thread
    while expert < n:
        both, g, before = wide[expert], uint32(0), uint32(expert // uint32(GROUP))
        while g < before:
            for u in range(GROUP):
                there = uint32(g + uint32(u)) < before
                sums = wide[uint32(n + (uint32(g + uint32(u)) if there else uint32(0)))]
                both = both + (sums if there else uint64(0))
            g = uint32(g + uint32(GROUP))
        padded_start = uint32(both >> uint64(32))
        padding = uint32(padded_start - uint32(both))
        real = uint32(memory[uint32(starts + expert)])
        memory[uint32(starts + expert)] = uint32(padded_start + memory[uint32(pads + expert)])
        memory[uint32(pads + expert)] = padding
        if chunk == uint32(0):
            padded = uint32(uint32(uint32(real + uint32(align - 1)) // uint32(align)) * uint32(align))
            tokens_per_expert[expert] = real
            padded_tokens_per_expert[expert] = padded
            pad_offsets[expert] = padding
            expert_offsets[uint32(expert + 1)] = uint32(padded_start + padded)
            room = uint32(num_out_tokens - min(num_out_tokens, padded_start))
            cuda.atomic.add(memory, lost, uint32(real - min(real, room)))
        expert = uint32(expert + threads)
    if chunk == uint32(0):
        i = thread
        while i < uint32(chunks):
            cuda.atomic.add(memory, lost, uint32(counts[uint32(i * bins + n)]))
            i = uint32(i + threads)
        cuda.syncthreads()
        if thread == uint32(0):
            expert_offsets[0] = 0
            overflow[0] = memory[lost]

    while first < last:
        here = uint32(min(uint32(piece), uint32(last - first)))
        entries = uint32(here * k)
        i = thread
        while i < here:
            memory[uint32(kept + i)] = uint32(0)
            i = uint32(i + threads)
        begin = uint32(0)
        while begin < entries:  # 32 * words entries: once, but for very many experts
            end = uint32(min(uint32(begin + uint32(32 * words)), entries))
            i = thread
            while i < pairs:
                wide[uint32(uint32(bits >> uint32(1)) + i)] = uint64(0)
                i = uint32(i + threads)
            cuda.syncthreads()
            i = uint32(begin + thread)
            while i < end:
                if first != uint32(chunk * uint32(per_chunk)) or i != thread:
                    mine = ids[uint64(first) * uint64(k) + uint64(i)]
                expert = NONE
                if mine >= 0 and mine < experts:
                    expert = uint32(mine)
                    at = uint32(bits + uint32(uint32(i - begin) >> uint32(5)) * n + expert)
                    cuda.atomic.or_(memory, at, uint32(uint32(1) << uint32(i & uint32(31))))
                memory[uint32(named + i)] = expert
                i = uint32(i + threads)
            cuda.syncthreads()
            i = uint32(begin + thread)
            while i < end:
                row, expert = NONE, uint32(memory[uint32(named + i)])
                if expert != NONE:
                    word = uint32(uint32(i - begin) >> uint32(5))
                    earlier = uint32(uint32(uint32(1) << uint32(i & uint32(31))) - uint32(1))
                    at = uint32(bits + expert)
                    place = uint32(memory[uint32(starts + expert)])
                    place = uint32(place + uint32(cuda.popc(uint32(memory[uint32(at + word * n)] & earlier))))
                    for _ in range(word):
                        place = uint32(place + uint32(cuda.popc(memory[at])))
                        at = uint32(at + n)
                    if place < uint32(num_out_tokens):
                        row = uint32(place - memory[uint32(pads + expert)])
                        cuda.atomic.add(memory, uint32(kept + uint32(i // k)), uint32(1))
                memory[uint32(rows + i)] = row
                i = uint32(i + threads)
            cuda.syncthreads()
            begin = end
            if begin < entries or uint32(first + here) < last:  # more to come: these rows are taken
                expert = thread
                while expert < n:
                    place = uint32(memory[uint32(starts + expert)])
                    for w in range(uint32(words)):
                        at = uint32(bits + uint32(w) * n + expert)
                        place = uint32(place + uint32(cuda.popc(memory[at])))
                    memory[uint32(starts + expert)] = place
                    expert = uint32(expert + threads)
                cuda.syncthreads()
        i = thread
        while i < entries:
            token = uint32(i // k)
            slot = uint32(i - token * k)
            row = uint32(memory[uint32(rows + i)])
            place = slot  # descending rows, then the blanks
            if not LISTS:
                place = uint32(0)
                at = uint32(rows + i - slot)
                for other in range(k):
                    theirs = uint32(memory[at])
                    at = uint32(at + uint32(1))
                    if row != NONE:
                        place = uint32(place + uint32(1 if theirs != NONE and theirs > row else 0))
                    else:
                        place = uint32(place + uint32(1 if theirs != NONE or uint32(other) < slot else 0))
                to = uint64(uint64(first + token) * uint64(k) + uint64(place))
                slots[to] = -1 if row == NONE else slot
            elif row != NONE:  # a mask's experts ascend, and with them the rows
                place = uint32(memory[uint32(kept + token)] - uint32(1) - slot)
            to = uint64(uint64(first + token) * uint64(2 * width + 1) + uint64(place))
            row_id_map[to] = -1 if row == NONE else row
            row_id_map[to + uint64(k)] = -1 if row == NONE else memory[uint32(named + i)]
            i = uint32(i + threads)
        i = thread
        while i < here:
            at = uint64(uint64(first + i) * uint64(2 * width + 1) + uint64(2 * width))
            row_id_map[at] = memory[uint32(kept + i)]
            i = uint32(i + threads)
        cuda.syncthreads()
        first = uint32(first + here)


def variant(kernel: Any, name: str, **constants: bool) -> Any:
    """A kernel with other constants: Numba leaves out what they rule out."""
    return FunctionType(kernel.__code__, {**globals(), **constants}, name)


_count_mask_words = variant(_count_mask, "_count_mask_words", OCTETS=True)
_place_mask = variant(_place_entries, "_place_mask", LISTS=True)
_place_mask_words = variant(_place_entries, "_place_mask_words", LISTS=True, OCTETS=True)
