"""Planning as Numba kernels, in two launches; `fp8moe.reference.plan` has a worked example.

The plan is a stable counting sort of the T * k entries by expert, in chunks of tokens, without atomic claims.
`_count_entries` or `_count_mask` counts each chunk's entries per expert. `_place_entries` adds the counts of
earlier chunks and experts, ranks each entry among those of its expert in its chunk, and writes the map. For a
mask, `_place_mask` first lists the tokens' experts, concurrently with the counting launch.
Ranks: each entry sets its bit in its expert's bit row in shared memory; its rank is the number of set bits
before it. No thread waits for another, and the order of the entries is kept. In a mask a token has an expert
at most once, so bits stand for tokens: with 256 experts, most of them unset, 16 tokens are placed at a time
instead of 2.
Traffic: the ids or the mask twice, one count per chunk and expert in between, the map once. This is so little
that latency dominates: hence 32-bit arithmetic throughout, which Numba needs to be told at every step, and
programmatic dependent launch of the second kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fp8moe.kernels_cuda.runtime.numba_cuda import (
    BLOCK,
    as_words,
    cuda,
    inlined,
    launch,
    pdl_launch_dependents,
    pdl_wait,
    run,
    scratch,
    shared_limit,
    uint32,
    uint64,
)
from fp8moe.records import PermutationPlan

MASK_PIECE = 4096  # entries of a mask, set or not, that a thread block places at a time
CHUNK = 512  # minimum entries per thread block: 64 blocks at 4096 tokens, top-8
MAX_CHUNKS = 128  # every block of the second launch reads the counts of all chunks
BITS = 8192  # maximum words of bits in shared memory
GROUP = 16  # experts whose counts one thread sums
IN_FLIGHT = 16  # loads in flight per thread
NONE = uint32(0xFFFFFFFF)  # no expert, no row
LOW_BITS, TOP_BITS = uint32(0x7F7F7F7F), uint32(0x80808080)  # in every byte
SIDE_BY_SIDE = uint32(0x00204081)  # times TOP_BITS: moves the four top bits next to each other


class Sizes(NamedTuple):
    """A routing and its partition, common to both launches."""

    tokens: int
    width: int  # maximum experts per token
    experts: int
    align: int
    num_out_tokens: int
    chunks: int
    per_chunk: int  # tokens
    piece: int  # tokens of a chunk placed at a time
    bit_words: int  # words of 32 bits per expert; a bit is an entry, or a token of a mask
    mask_words: int  # words of 32 experts per token of a mask
    shift: int  # 1 << shift >= mask_words threads process a token of a mask
    step: int  # tokens of a mask processed at a time


class Arrays(NamedTuple):
    """The plan's arrays that the second launch writes."""

    row_id_map: Any
    slots: Any  # None for a mask
    tokens_per_expert: Any
    padded_tokens_per_expert: Any
    pad_offsets: Any
    expert_offsets: Any
    overflow: Any


def plan_topk(topk_ids: Any, *, out: PermutationPlan) -> None:
    sizes = plan_sizes(out)
    _refuse_too_many(sizes)
    (counts,) = scratch(_counted(sizes.chunks) * (sizes.experts + 1))
    run(_count_entries, _counted(sizes.chunks), 4 * (sizes.experts + 1), topk_ids, sizes, counts)
    run(_place_entries, sizes.chunks, _placing_bytes(sizes), topk_ids, None, sizes, counts, _arrays(out))


def plan_routing_map(routing_map: Any, *, out: PermutationPlan) -> None:
    sizes = plan_sizes(out)
    _refuse_too_many(sizes)
    ids, counts = scratch(sizes.tokens * sizes.width, _counted(sizes.chunks) * (sizes.experts + 1))
    by_words = routing_map.dtype.itemsize == 1 and sizes.experts > 0 and sizes.experts % 8 == 0
    mask = as_words(routing_map) if by_words else routing_map
    count, place = (_count_mask_words, _place_mask_words) if by_words else (_count_mask, _place_mask)
    run(count, _counted(sizes.chunks), 4 * (sizes.experts + 1 + sizes.step), mask, sizes, counts)
    shared = max(_placing_bytes(sizes), 4 * (sizes.step << sizes.shift))
    run(place, sizes.chunks, shared, ids, mask, sizes, counts, _arrays(out))


def plan_row_map(row_id_map: Any, pad_offsets: Any, *, out: PermutationPlan) -> None:
    """Launches row_map.cu: copies the map, which is nearly all of the traffic, and counts entries on the
    way."""
    counts, experts = out.tokens_per_expert, out.num_experts
    launch.fill_bytes(counts, 0)
    copies = row_id_map, out.num_tokens, experts, counts, out.row_id_map
    launch.launch("row_map", "copy_row_map", launch.threads(out.num_tokens, 8), 256, *copies)
    _find_offsets(pad_offsets, out)


def plan_index_map(row_id_map: Any, *, out: PermutationPlan) -> None:
    """Launches row_map.cu."""
    counts, topk = out.tokens_per_expert, out.max_experts_per_token
    launch.fill_bytes(counts, 0)
    results = counts, out.row_id_map, out.slots
    blocks = launch.threads(out.num_tokens * topk)
    launch.launch("row_map", "sort_index_map", blocks, 256, row_id_map, out.num_tokens, topk, *results)
    _find_offsets(None, out)


def index_map(order: Any, topk_ids: Any, num_out_tokens: int, *, out: Any) -> None:
    """Launches row_map.cu."""
    widths = order.dtype.itemsize == 8, topk_ids.dtype.itemsize == 8
    arguments = order, topk_ids, *widths, *topk_ids.shape, num_out_tokens, out
    launch.launch("row_map", "index_map_of_order", launch.threads(out.size), 256, *arguments)


def _find_offsets(pad_offsets: Any, out: PermutationPlan) -> None:
    """Computes the arrays that follow from the counts."""
    results = out.padded_tokens_per_expert, out.pad_offsets, out.expert_offsets, out.overflow
    arguments = out.tokens_per_expert, pad_offsets, out.num_experts
    launch.launch("row_map", "offsets_of_counts", 1, 1024, *arguments, *results)


def plan_sizes(plan: PermutationPlan) -> Sizes:
    """At most MAX_CHUNKS chunks, in whole pieces, with at most BITS words of bits."""
    tokens, width, experts = plan.num_tokens, plan.max_experts_per_token, plan.num_experts
    least = max(1, CHUNK // max(width, 1))
    per_chunk = least * max(1, -(-tokens // (least * MAX_CHUNKS)))
    piece = max(1, BLOCK // max(width, 1))
    bit_words, most_words = max(1, -(-piece * width // 32)), max(1, BITS // max(experts, 1))
    if not plan.has_slots:  # of a mask
        piece = min(max(piece, MASK_PIECE // max(width, 1)), per_chunk, 32 * most_words)
        bit_words = -(-piece // 32)
    mask_words = max(1, -(-experts // 32))
    shift = (mask_words - 1).bit_length()
    return Sizes(
        tokens=tokens,
        width=width,
        experts=experts,
        align=plan.align_size,
        num_out_tokens=plan.num_out_tokens,
        chunks=max(1, -(-tokens // per_chunk)),
        per_chunk=per_chunk,
        piece=piece,
        bit_words=min(bit_words, most_words),
        mask_words=mask_words,
        shift=shift,
        step=max(1, min(per_chunk, BLOCK >> shift)),
    )


def _counted(chunks: int) -> int:
    """Rows of the counts array: the chunks, and zero rows up to a multiple of IN_FLIGHT, so that loads need
    no predicate."""
    return -(-chunks // IN_FLIGHT) * IN_FLIGHT


def _placing_bytes(sizes: Sizes) -> int:
    """Shared memory of `_placing`'s kernels, see `_areas`."""
    groups = -(-sizes.experts // GROUP)
    of_experts = (4 + sizes.bit_words) * sizes.experts + 2 * groups
    return 4 * (of_experts + sizes.piece * (2 * sizes.width + 1) + 2)


def _refuse_too_many(sizes: Sizes) -> None:
    shared = _placing_bytes(sizes)
    if shared > shared_limit():
        raise ValueError(
            f"num_experts: got {sizes.experts}, {sizes.width} of a token, whose counts take "
            f"{shared} bytes; wanted at most {shared_limit()}, the shared memory of this device's blocks"
        )


def _arrays(plan: PermutationPlan) -> Arrays:
    return Arrays(*(getattr(plan, name) for name in Arrays._fields))


# ---------------------------------------------------------------- counts


def _count_entries(ids, sizes, counts):  # type: ignore[no-untyped-def]
    """One thread block per chunk of entries. counts [chunk, experts + 1]: entries of each expert, then 0
    (where `_count_mask` writes the entries beyond a token's ``width``)."""
    shared = cuda.shared.array(0, uint32)  # the counts
    chunk, thread, threads = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x), uint32(cuda.blockDim.x)
    bins, k = uint32(sizes.experts + 1), uint32(sizes.width)
    per_chunk = uint32(uint32(sizes.per_chunk) * k)
    begin = uint32(chunk * per_chunk)
    end = uint32(min(uint32(begin + per_chunk), uint32(uint32(sizes.tokens) * k)))
    _clear(shared, bins)
    pdl_wait()
    pdl_launch_dependents()
    cuda.syncthreads()
    i = uint32(begin + thread)
    while i < end:
        expert = ids[i]
        if expert >= 0 and expert < sizes.experts:
            cuda.atomic.add(shared, uint32(expert), uint32(1))
        i = uint32(i + threads)
    cuda.syncthreads()
    _write_counts(shared, counts, bins)


@inlined
def _clear(shared, size):  # type: ignore[no-untyped-def]
    i = uint32(cuda.threadIdx.x)
    while i < size:
        shared[i] = uint32(0)
        i = uint32(i + uint32(cuda.blockDim.x))


@inlined
def _write_counts(shared, counts, bins):  # type: ignore[no-untyped-def]
    """Writes a chunk's row of the counts."""
    i, start = uint32(cuda.threadIdx.x), uint32(uint32(cuda.blockIdx.x) * bins)
    while i < bins:
        counts[uint32(start + i)] = shared[i]
        i = uint32(i + uint32(cuda.blockDim.x))


@inlined
def _routed(mask, by_words, experts, token, word):  # type: ignore[no-untyped-def]
    """Bit mask of a token's experts 32 * word to 32 * word + 31. by_words: the mask is read eight bytes at a
    time."""
    bits = uint32(0)
    if by_words:
        words = uint32(uint32(experts) >> uint32(3))
        at = uint64(uint64(token) * uint64(words))
        for j in range(4):  # independent loads
            of_eight = uint32(4 * word + j)
            v = uint64(mask[at + uint64(min(of_eight, uint32(words - uint32(1))))])
            for half in range(2):
                part = uint32(v >> uint64(32 * half))
                # each non-zero byte sets its top bit; the four top bits then move next to each other
                part = uint32(uint32(uint32(uint32(part & LOW_BITS) + LOW_BITS) | part) & TOP_BITS)
                part = uint32(uint32(part * SIDE_BY_SIDE) >> uint32(28))
                if of_eight < words:
                    bits = uint32(bits | uint32(part << uint32(8 * j + 4 * half)))
    else:
        at = uint64(uint64(token) * uint64(experts))
        for j in range(32):
            expert = uint32(32 * word + j)
            if expert < uint32(experts) and mask[at + uint64(expert)] != 0:
                bits = uint32(bits | uint32(uint32(1) << uint32(j)))
    return bits


@inlined
def _take_back_excess(mask, by_words, sizes, shared, start, here):  # type: ignore[no-untyped-def]
    """For tokens with more than ``width`` experts: removes the last ones from the counts and adds their
    number to the excess. Resets the tokens' own counts."""
    thread, threads = uint32(cuda.threadIdx.x), uint32(cuda.blockDim.x)
    bins, width = uint32(sizes.experts + 1), uint32(sizes.width)
    i = thread
    while i < here:
        entries = uint32(shared[uint32(bins + i)])
        shared[uint32(bins + i)] = uint32(0)
        if entries > width:
            cuda.atomic.add(shared, uint32(sizes.experts), uint32(entries - width))
            word = uint32(sizes.mask_words)
            while entries > width:
                word = uint32(word - uint32(1))
                left = uint32(_routed(mask, by_words, sizes.experts, uint32(start + i), word))
                while left != uint32(0) and entries > width:
                    bit = uint32(31 - cuda.clz(left))
                    left = uint32(left ^ uint32(uint32(1) << bit))
                    cuda.atomic.sub(shared, uint32(32 * word + bit), uint32(1))
                    entries = uint32(entries - uint32(1))
        i = uint32(i + threads)


def _counting(name: str, by_words: bool) -> Any:
    """A kernel that counts a mask's entries. by_words: the mask is read eight bytes at a time."""

    def kernel(mask, sizes, counts):  # type: ignore[no-untyped-def]
        """One thread block per chunk of tokens, ``step`` at a time, 32 experts of a token per thread. counts
        [chunk, experts + 1]: entries of each expert, then those beyond a token's first ``width``."""
        shared = cuda.shared.array(0, uint32)  # the counts | entries of each token
        chunk, thread, threads = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x), uint32(cuda.blockDim.x)
        bins, shift = uint32(sizes.experts + 1), uint32(sizes.shift)
        _clear(shared, uint32(bins + uint32(sizes.step)))
        cuda.syncthreads()
        pdl_wait()
        pdl_launch_dependents()
        start = uint32(chunk * uint32(sizes.per_chunk))
        end = uint32(min(start + sizes.per_chunk, sizes.tokens))
        while start < end:
            here = uint32(min(end - start, uint32(sizes.step)))
            i = thread
            while i < uint32(here << shift):  # one iteration, unless there are more than 32 * threads experts
                token = uint32(i >> shift)
                word = uint32(i - uint32(token << shift))
                if word < uint32(sizes.mask_words):
                    left = uint32(_routed(mask, by_words, sizes.experts, uint32(start + token), word))
                    cuda.atomic.add(shared, uint32(bins + token), uint32(cuda.popc(left)))
                    while left != uint32(0):
                        expert = uint32(32 * word + cuda.ffs(left) - 1)
                        left = uint32(left & uint32(left - uint32(1)))
                        cuda.atomic.add(shared, expert, uint32(1))
                i = uint32(i + threads)
            cuda.syncthreads()
            _take_back_excess(mask, by_words, sizes, shared, start, here)
            cuda.syncthreads()
            start = uint32(start + uint32(sizes.step))
        _write_counts(shared, counts, bins)

    return _named(kernel, name)


def _named(kernel: Any, name: str) -> Any:
    kernel.__name__ = name
    return kernel


_count_mask = _counting("_count_mask", by_words=False)
_count_mask_words = _counting("_count_mask_words", by_words=True)


# ---------------------------------------------------------------- a mask's experts


@inlined
def _list_experts(mask, by_words, ids, sizes):  # type: ignore[no-untyped-def]
    """For the tokens of the thread block's chunk. ids: each token's experts in ascending order, at most
    ``width``, then -1."""
    shared = cuda.shared.array(0, uint32)  # experts in each word of 32
    chunk, thread, threads = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x), uint32(cuda.blockDim.x)
    shift = uint32(sizes.shift)
    start = uint32(chunk * uint32(sizes.per_chunk))
    end = uint32(min(start + sizes.per_chunk, sizes.tokens))
    while start < end:
        here = uint32(min(end - start, uint32(sizes.step)) << shift)
        first = uint32(0)
        while first < here:
            i = uint32(first + thread)
            token = uint32(i >> shift)
            word = uint32(i - uint32(token << shift))
            has_word = i < here and word < uint32(sizes.mask_words)
            left = uint32(0)
            if has_word:
                left = uint32(_routed(mask, by_words, sizes.experts, uint32(start + token), word))
                shared[i] = uint32(cuda.popc(left))
            cuda.syncthreads()
            if has_word:
                _list_word(left, word, uint32(start + token), i, shared, ids, sizes)
            first = uint32(first + threads)
        cuda.syncthreads()
        start = uint32(start + uint32(sizes.step))


@inlined
def _list_word(left, word, token, i, shared, ids, sizes):  # type: ignore[no-untyped-def]
    """Lists the experts of one word of a token after those of its earlier words; after the last word, -1. i:
    index of the word's count, which includes the earlier words."""
    width, place, w = uint32(sizes.width), uint32(0), uint32(0)
    while w < word:
        for u in range(8):  # independent loads
            is_earlier = uint32(w + uint32(u)) < word
            count = shared[uint32(i - (uint32(word - w - uint32(u)) if is_earlier else uint32(0)))]
            place = uint32(place + (count if is_earlier else uint32(0)))
        w = uint32(w + uint32(8))
    entry = uint64(uint64(token) * uint64(sizes.width))
    while left != uint32(0) and place < width:
        ids[entry + uint64(place)] = uint32(32 * word + cuda.ffs(left) - 1)
        left = uint32(left & uint32(left - uint32(1)))
        place = uint32(place + uint32(1))
    if uint32(word + uint32(1)) == uint32(sizes.mask_words):
        while place < width:
            ids[entry + uint64(place)] = -1
            place = uint32(place + uint32(1))


# ---------------------------------------------------------------- places


class Areas(NamedTuple):
    """Offsets of arrays in shared memory, in words. Before them are pairs of 32 bits, summed as 64: rows and
    padded rows of each expert, and of each GROUP of experts."""

    groups: Any  # number of groups
    starts: Any  # per expert: first row of this chunk
    pads: Any  # per expert: rows of earlier chunks, later the preceding padding
    bits: Any  # [bit_words, experts]
    pairs: Any  # number of 64-bit pairs
    rows: Any  # row of each entry of a piece
    named: Any  # expert of each entry of a piece
    kept: Any  # entries of each token of a piece
    lost: Any  # one word: entries that exceed the row capacity


@inlined
def _areas(sizes):  # type: ignore[no-untyped-def]
    n, entries = uint32(sizes.experts), uint32(uint32(sizes.piece) * uint32(sizes.width))
    groups = uint32((n + uint32(GROUP - 1)) // uint32(GROUP))
    starts = uint32(2 * (n + groups))
    pads = uint32(starts + n)
    bits = uint32(pads + n)
    pairs = uint32(uint32(n * uint32(sizes.bit_words) + uint32(1)) >> uint32(1))
    rows = uint32(bits + 2 * pairs)
    named = uint32(rows + entries)
    kept = uint32(named + entries)
    return Areas(groups, starts, pads, bits, pairs, rows, named, kept, uint32(kept + uint32(sizes.piece)))


@inlined
def _clear_sums(sizes, areas, wide, memory):  # type: ignore[no-untyped-def]
    i, n, threads = uint32(cuda.threadIdx.x), uint32(sizes.experts), uint32(cuda.blockDim.x)
    if i == uint32(0):
        memory[areas.lost] = uint32(0)
    while i < n:
        wide[i] = uint64(0)
        memory[uint32(areas.pads + i)] = uint32(0)
        i = uint32(i + threads)


@inlined
def _add_counts(sizes, counts, areas, memory):  # type: ignore[no-untyped-def]
    """Sums each expert's rows over all chunks and over the earlier chunks, by several threads per expert if
    available."""
    chunk, thread, threads = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x), uint32(cuda.blockDim.x)
    n, bins = uint32(sizes.experts), uint32(sizes.experts + 1)
    lanes = uint32(max(min(n, threads), uint32(1)))
    stride = uint32(threads // lanes)  # threads per expert
    part = uint32(thread // lanes)
    if part < stride:
        expert = uint32(thread - part * lanes)
        while expert < n:
            total, before = uint32(0), uint32(0)
            c = uint32(part * uint32(IN_FLIGHT))
            while c < uint32(sizes.chunks):
                at = uint32(c * bins + expert)
                for u in range(IN_FLIGHT):
                    count = uint32(counts[at])
                    at = uint32(at + bins)
                    total = uint32(total + count)
                    before = uint32(before + (count if uint32(c + uint32(u)) < chunk else uint32(0)))
                c = uint32(c + stride * uint32(IN_FLIGHT))
            cuda.atomic.add(memory, uint32(2 * expert), total)  # integer sum: the order does not matter
            cuda.atomic.add(memory, uint32(areas.pads + expert), before)
            expert = uint32(expert + lanes)


@inlined
def _padded(rows, sizes):  # type: ignore[no-untyped-def]
    align = uint32(sizes.align)
    return uint32(uint32(uint32(rows + uint32(sizes.align - 1)) // align) * align)


@inlined
def _pad_sums(sizes, areas, memory):  # type: ignore[no-untyped-def]
    """Stores each expert's padded rows next to its rows, and copies the rows to where its starts will be."""
    i = uint32(cuda.threadIdx.x)
    while i < uint32(sizes.experts):
        real = uint32(memory[uint32(2 * i)])
        memory[uint32(2 * i + 1)] = _padded(real, sizes)
        memory[uint32(areas.starts + i)] = real
        i = uint32(i + uint32(cuda.blockDim.x))


@inlined
def _sum_groups(sizes, areas, wide):  # type: ignore[no-untyped-def]
    """Replaces each expert's rows by the exclusive prefix sum within its group; appends each group's sum."""
    i, n = uint32(cuda.threadIdx.x), uint32(sizes.experts)
    while i < areas.groups:
        both, e, own = uint64(0), uint32(i * uint32(GROUP)), cuda.local.array(GROUP, uint64)
        for u in range(GROUP):  # independent loads
            own[u] = wide[uint32(min(uint32(e + uint32(u)), uint32(n - uint32(1))))]
        for u in range(GROUP):
            if uint32(e + uint32(u)) < n:
                wide[uint32(e + uint32(u))] = both
                both = both + own[u]
        wide[uint32(n + i)] = both
        i = uint32(i + uint32(cuda.blockDim.x))


@inlined
def _add_groups(sizes, out, areas, wide, memory):  # type: ignore[no-untyped-def]
    """Adds the sums of earlier groups, and computes each expert's start."""
    chunk, n, end = uint32(cuda.blockIdx.x), uint32(sizes.experts), sizes.num_out_tokens
    expert = uint32(cuda.threadIdx.x)
    while expert < n:
        both, g, groups = wide[expert], uint32(0), uint32(expert // uint32(GROUP))
        while g < groups:
            for u in range(GROUP):
                is_earlier = uint32(g + uint32(u)) < groups
                sums = wide[uint32(n + (uint32(g + uint32(u)) if is_earlier else uint32(0)))]
                both = both + (sums if is_earlier else uint64(0))
            g = uint32(g + uint32(GROUP))
        padded_start = uint32(both >> uint64(32))
        padding = uint32(padded_start - uint32(both))
        real = uint32(memory[uint32(areas.starts + expert)])
        memory[uint32(areas.starts + expert)] = uint32(padded_start + memory[uint32(areas.pads + expert)])
        memory[uint32(areas.pads + expert)] = padding
        if chunk == uint32(0):
            padded = _padded(real, sizes)
            out.tokens_per_expert[expert] = real
            out.padded_tokens_per_expert[expert] = padded
            out.pad_offsets[expert] = padding
            out.expert_offsets[uint32(expert + 1)] = uint32(padded_start + padded)
            room = uint32(end - min(end, padded_start))
            cuda.atomic.add(memory, areas.lost, uint32(real - min(real, room)))
        expert = uint32(expert + uint32(cuda.blockDim.x))


@inlined
def _write_overflow(sizes, counts, out, areas, memory):  # type: ignore[no-untyped-def]
    """Counts entries that exceed the row capacity, and those beyond ``width`` of a mask's tokens."""
    thread, n, bins = uint32(cuda.threadIdx.x), uint32(sizes.experts), uint32(sizes.experts + 1)
    i = thread
    while i < uint32(sizes.chunks):
        cuda.atomic.add(memory, areas.lost, uint32(counts[uint32(i * bins + n)]))
        i = uint32(i + uint32(cuda.blockDim.x))
    cuda.syncthreads()
    if thread == uint32(0):
        out.expert_offsets[0] = 0
        out.overflow[0] = memory[areas.lost]


@inlined
def _clear_kept(here, areas, memory):  # type: ignore[no-untyped-def]
    i = uint32(cuda.threadIdx.x)
    while i < here:
        memory[uint32(areas.kept + i)] = uint32(0)
        i = uint32(i + uint32(cuda.blockDim.x))


@inlined
def _clear_bits(areas, wide):  # type: ignore[no-untyped-def]
    i = uint32(cuda.threadIdx.x)
    while i < areas.pairs:
        wide[uint32(uint32(areas.bits >> uint32(1)) + i)] = uint64(0)
        i = uint32(i + uint32(cuda.blockDim.x))


@inlined
def _bit_of(by_token, i, begin, k):  # type: ignore[no-untyped-def]
    """Bit number of entry i: its index from ``begin`` on, or its token's."""
    return uint32(i // k) if by_token else uint32(i - begin)


@inlined
def _set_bits(by_token, ids, early_id, is_first, sizes, first, begin, end, areas, memory):  # type: ignore[no-untyped-def]
    """Records each entry's expert and sets its bit in that expert's row."""
    thread, n, k = uint32(cuda.threadIdx.x), uint32(sizes.experts), uint32(sizes.width)
    i = uint32(begin + thread)
    while i < end:
        id_ = early_id
        if not is_first or i != thread:
            id_ = ids[uint64(first) * uint64(k) + uint64(i)]
        expert = NONE
        if id_ >= 0 and id_ < sizes.experts:
            expert = uint32(id_)
            bit = _bit_of(by_token, i, begin, k)
            at = uint32(areas.bits + uint32(bit >> uint32(5)) * n + expert)
            cuda.atomic.or_(memory, at, uint32(uint32(1) << uint32(bit & uint32(31))))
        memory[uint32(areas.named + i)] = expert
        i = uint32(i + uint32(cuda.blockDim.x))


@inlined
def _find_rows(by_token, sizes, begin, end, areas, memory):  # type: ignore[no-untyped-def]
    """Each entry's row: its expert's start plus the number of set bits before its own."""
    n, k = uint32(sizes.experts), uint32(sizes.width)
    i = uint32(begin + uint32(cuda.threadIdx.x))
    while i < end:
        row, expert = NONE, uint32(memory[uint32(areas.named + i)])
        if expert != NONE:
            bit = _bit_of(by_token, i, begin, k)
            word = uint32(bit >> uint32(5))
            earlier = uint32(uint32(uint32(1) << uint32(bit & uint32(31))) - uint32(1))
            at = uint32(areas.bits + expert)
            place = uint32(memory[uint32(areas.starts + expert)])
            place = uint32(place + uint32(cuda.popc(uint32(memory[uint32(at + word * n)] & earlier))))
            for _ in range(word):
                place = uint32(place + uint32(cuda.popc(memory[at])))
                at = uint32(at + n)
            if place < uint32(sizes.num_out_tokens):
                row = uint32(place - memory[uint32(areas.pads + expert)])
                cuda.atomic.add(memory, uint32(areas.kept + uint32(i // k)), uint32(1))
        memory[uint32(areas.rows + i)] = row
        i = uint32(i + uint32(cuda.blockDim.x))


@inlined
def _take_rows(sizes, areas, memory):  # type: ignore[no-untyped-def]
    """Advances each expert's start by its number of set bits."""
    expert, n = uint32(cuda.threadIdx.x), uint32(sizes.experts)
    while expert < n:
        place = uint32(memory[uint32(areas.starts + expert)])
        for w in range(uint32(sizes.bit_words)):
            at = uint32(areas.bits + uint32(w) * n + expert)
            place = uint32(place + uint32(cuda.popc(memory[at])))
        memory[uint32(areas.starts + expert)] = place
        expert = uint32(expert + uint32(cuda.blockDim.x))


@inlined
def _write_map(ascending, sizes, first, here, out, areas, memory):  # type: ignore[no-untyped-def]
    """Writes the map of ``here`` tokens from ``first`` on: rows in descending order, then blanks."""
    thread, threads, k = uint32(cuda.threadIdx.x), uint32(cuda.blockDim.x), uint32(sizes.width)
    i = thread
    while i < uint32(here * k):
        token = uint32(i // k)
        slot = uint32(i - token * k)
        row = uint32(memory[uint32(areas.rows + i)])
        place = slot
        if not ascending:
            place = _place_in_token(row, slot, k, uint32(areas.rows + i - slot), memory)
            to = uint64(uint64(first + token) * uint64(k) + uint64(place))
            out.slots[to] = -1 if row == NONE else slot
        elif row != NONE:  # rows ascend with the experts
            place = uint32(memory[uint32(areas.kept + token)] - uint32(1) - slot)
        to = uint64(uint64(first + token) * uint64(2 * sizes.width + 1) + uint64(place))
        out.row_id_map[to] = -1 if row == NONE else row
        out.row_id_map[to + uint64(k)] = -1 if row == NONE else memory[uint32(areas.named + i)]
        i = uint32(i + threads)
    i = thread
    while i < here:
        at = uint64(uint64(first + i) * uint64(2 * sizes.width + 1) + uint64(2 * sizes.width))
        out.row_id_map[at] = memory[uint32(areas.kept + i)]
        i = uint32(i + threads)


@inlined
def _place_in_token(row, slot, k, at, memory):  # type: ignore[no-untyped-def]
    """Position of a row in its token's descending list of k rows, the first at ``at``; blanks follow in their
    order."""
    place = uint32(0)
    for i in range(k):
        other = uint32(memory[at])
        at = uint32(at + uint32(1))
        if row != NONE:
            place = uint32(place + uint32(1 if other != NONE and other > row else 0))
        else:
            place = uint32(place + uint32(1 if other != NONE or uint32(i) < slot else 0))
    return place


def _placing(name: str, from_mask: bool, by_words: bool = False) -> Any:
    """A kernel that writes a plan. from_mask: it first writes the ids, so that a token's experts ascend.
    by_words: the mask is read eight bytes at a time."""

    def kernel(ids, mask, sizes, counts, out):  # type: ignore[no-untyped-def]
        """One thread block per chunk: computes where each expert's rows of this chunk start, then places one
        entry per thread. Chunk 0 writes the plan's per-expert arrays."""
        wide = cuda.shared.array(0, uint64)  # 64-bit pairs: rows in the low half
        memory = cuda.shared.array(0, uint32)  # the same memory
        if from_mask:  # up to `pdl_wait` this runs concurrently with the counting launch
            _list_experts(mask, by_words, ids, sizes)
        areas = _areas(sizes)
        chunk, thread, k = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x), uint32(sizes.width)
        first = uint32(chunk * uint32(sizes.per_chunk))
        last = uint32(min(first + sizes.per_chunk, sizes.tokens))
        early_id = -1  # the thread's first entry is loaded while the counts are summed
        if thread < uint32(uint32(last - first) * k):
            early_id = ids[uint64(first) * uint64(k) + uint64(thread)]

        _clear_sums(sizes, areas, wide, memory)
        cuda.syncthreads()
        pdl_wait()
        pdl_launch_dependents()
        _add_counts(sizes, counts, areas, memory)
        cuda.syncthreads()
        _pad_sums(sizes, areas, memory)
        cuda.syncthreads()
        _sum_groups(sizes, areas, wide)
        cuda.syncthreads()
        _add_groups(sizes, out, areas, wide, memory)
        if chunk == uint32(0):
            _write_overflow(sizes, counts, out, areas, memory)

        while first < last:
            here = uint32(min(uint32(sizes.piece), uint32(last - first)))
            entries = uint32(here * k)
            is_first = first == uint32(chunk * uint32(sizes.per_chunk))
            _clear_kept(here, areas, memory)
            begin = uint32(0)
            while begin < entries:  # one iteration, unless there are very many experts
                end = entries
                if not from_mask:  # with a mask, the bits cover all tokens of the piece
                    end = uint32(min(uint32(begin + uint32(32 * sizes.bit_words)), entries))
                _clear_bits(areas, wide)
                cuda.syncthreads()
                _set_bits(from_mask, ids, early_id, is_first, sizes, first, begin, end, areas, memory)
                cuda.syncthreads()
                _find_rows(from_mask, sizes, begin, end, areas, memory)
                cuda.syncthreads()
                begin = end
                # more entries follow: advance past these rows
                if begin < entries or uint32(first + here) < last:
                    _take_rows(sizes, areas, memory)
                    cuda.syncthreads()
            _write_map(from_mask, sizes, first, here, out, areas, memory)
            cuda.syncthreads()
            first = uint32(first + here)

    return _named(kernel, name)


_place_entries = _placing("_place_entries", from_mask=False)
_place_mask = _placing("_place_mask", from_mask=True)
_place_mask_words = _placing("_place_mask_words", from_mask=True, by_words=True)


def kernels() -> list[tuple[Any, tuple[Any, ...]]]:
    """Every kernel with its arguments' types (`numba_cuda.kind_of`), for ids of both widths and masks of
    bool. Those of a mask of other integers, of a number of experts that is no multiple of 8, are left out."""
    sizes, out = (Sizes, ("i",) * len(Sizes._fields)), (Arrays, ("int32",) * len(Arrays._fields))
    topk = [
        kernel
        for ids in ("int32", "int64")
        for kernel in (
            (_count_entries, (ids, sizes, "int32")),
            (_place_entries, (ids, "int32", sizes, "int32", out)),
        )
    ]
    return topk + [
        kernel
        for count, place, mask in (
            (_count_mask_words, _place_mask_words, "uint64"),
            (_count_mask, _place_mask, "bool"),
        )
        for kernel in ((count, (mask, sizes, "int32")), (place, ("int32", mask, sizes, "int32", out)))
    ]
