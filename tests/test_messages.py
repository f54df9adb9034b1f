"""Messages between ranks: rows of several arrays packed into bytes, and back."""

from functools import partial

import numpy as np
import pytest
from backends import only_on_cpu, over
from cases import BF16, assert_same, generator, same_bits, values

import fp8moe
from fp8moe import expert_parallel

RNG = generator()


@over(
    "dtype, rows, columns, k",
    on_cpu=[(BF16, 11, 512, 4), (BF16, 11, 256, 3), (np.float32, 11, 2176, 8)],
    on_gpu=[
        (dtype, *sizes)
        for dtype in (BF16, np.float32)
        for sizes in ((300, 512, 4), (70, 384, 3), (1000, 7168, 8))
    ],
)
def test_rows_are_packed_and_unpacked(backend, dtype, rows, columns, k):
    """With and without quantisation, with widths that are and are not multiples of a vector."""
    x, probs = values(RNG, (rows, columns), dtype), RNG.random((rows, k)).astype(np.float32)
    ids = RNG.integers(-1, 12, (rows, k))
    assert_same(*backend.both(lambda i: expert_parallel.messages.rank_mask(i, 4, 3), ids))
    local, actual = backend.both(lambda i: expert_parallel.messages.local_ids(i, 4, 4), ids)
    assert_same(local, actual)
    for ranks in (3, 70):
        mask = RNG.random((rows, ranks)) < 0.3
        for capacity, topk in ((1, 5), (rows // 4, 2), (rows // 2, ranks), (rows + 3, 4)):
            everywhere = fp8moe.plan_routing_map(mask, topk=topk)
            limited = backend.both(
                lambda p, c=capacity: expert_parallel.messages.limit_rows(p, c), everywhere
            )
            assert_same(*limited)
            assert_same(*backend.both(fp8moe.permute, x, limited[0]))
            assert_same(*backend.both(fp8moe.unpermute, fp8moe.permute(x, limited[0]).data, limited[0]))
    q = fp8moe.quantize(x)
    for parts in ((x, local, probs), (q.data, q.scales, local, probs), (probs,), (x[:, :0], probs)):
        message, actual = backend.both(expert_parallel.messages.pack, *parts)
        assert_same(message, actual)
        shapes = tuple((p.shape[1:], p.dtype.name) for p in parts)
        apart, actual = backend.both(
            lambda m, shapes=shapes: expert_parallel.messages.unpack(m, shapes), message
        )
        assert_same(parts, apart)
        assert_same(parts, actual)
        more = partial(expert_parallel.messages.unpack_first, parts=shapes, size=rows + 5)
        for apart in backend.both(more, message):
            zeros = tuple(np.zeros((5, *p.shape[1:]), p.dtype) for p in parts)
            assert_same(parts, tuple(p[:rows] for p in apart))
            assert_same(zeros, tuple(p[rows:] for p in apart))
        if len(parts) > 2:  # ids and probabilities at the end
            for apart in backend.both(partial(more, own=(2, 3)), message):
                assert_same((*parts[:-2], probs), tuple(p[:rows] for p in (*apart[:-2], apart[-1])))
                assert same_bits(apart[-2][:rows], expert_parallel.messages.local_ids(local, 2, 3))
                np.testing.assert_array_equal(apart[-2][rows:], -1)
    for fmt in ("e4m3", "e5m2"):
        for others in ((local, probs), ()):
            pack = expert_parallel.messages.quantize_and_pack
            assert_same(*backend.both(lambda x, *p, fmt=fmt, pack=pack: pack(x, fmt, *p), x, *others))
    # into three windows, with the plan of the ranks or in the rows' order, with rows around them that must
    # not change
    plan = fp8moe.plan_routing_map(expert_parallel.messages.rank_mask(ids, 4, 3)[0], topk=min(k, 3))
    by_rank, sent = expert_parallel.messages.pack_by_rank, int(plan.tokens_per_expert.sum())
    for arguments, fmt, others in (
        (x, "e4m3", (local, probs)),
        (x, None, (local, probs)),
        (x, None, ()),
        (q, None, ()),
    ):
        one = expert_parallel.messages.Message(arguments, fmt, others).pack()
        found = backend.both(
            lambda x, p, *o, fmt=fmt: by_rank(x, fmt, p, False, *o), arguments, plan, *others
        )
        for packed in found:  # rows without a token are not written
            assert same_bits(np.asarray(packed)[:sent], fp8moe.permute(one, plan).data[:sent])
        limited = expert_parallel.messages.limit_rows(plan, max(rows // 4, 1))
        filled = backend.both(
            lambda x, p, *o, fmt=fmt: by_rank(x, fmt, p, True, *o), arguments, limited, *others
        )
        assert_same(*filled)
        assert same_bits(filled[0], fp8moe.permute(one, limited).data)
    halves = np.array([rows // 2, 0, rows - rows // 2])
    for counts, row_id_map in ((plan.tokens_per_expert, plan.row_id_map), (halves, None)):
        for fmt in (None, "e4m3"):
            message = expert_parallel.messages.Message(x, fmt, (local, probs))
            poison = [RNG.integers(0, 256, (n + 2, message.row_bytes)).astype(np.uint8) for n in counts]

            def into(x, row_id_map, local, probs, *poison, fmt=fmt):
                around = tuple(expert_parallel.messages.pack(p) for p in poison)
                inside = tuple(within(w) for w in around)
                expert_parallel.messages.Message(x, fmt, (local, probs)).write(row_id_map, inside)
                return around

            assert_same(*backend.both(into, x, row_id_map, local, probs, *poison))


def within(window):
    """The window without its first and last row."""
    host = getattr(window, "host", None)
    return window[1:-1] if host is None else type(window)(host[1:-1])


@only_on_cpu
def test_invalid_windows_raise(backend, monkeypatch):
    rows, *windows = (backend.upload(np.zeros((n, 16), np.uint8)) for n in (9, *[1] * 9))
    with pytest.raises(ValueError, match="windows: got 9; wanted at most 8"):
        expert_parallel.messages.Message(rows, None).write(None, tuple(windows))
    for fmt, dtype in ((None, np.uint8), ("e4m3", BF16)):
        rows = backend.upload(np.zeros((9, 128), dtype))
        message = expert_parallel.messages.Message(rows, fmt)
        window = backend.upload(np.zeros((8, message.row_bytes), np.uint8))
        with pytest.raises(ValueError, match="windows: got 8 rows in all; wanted 9, the messages'"):
            message.write(None, (window,))
