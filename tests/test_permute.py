"""Permutation compared with torch's index_select, scatter and autograd, on poisoned outputs; its kernels with
the reference."""

import importlib
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from backends import GPU, only_on_cpu, only_on_gpu
from cases import (
    BF16,
    assert_same,
    generator,
    layout,
    mask_of,
    poisoned,
    routings,
    same_bits,
    unmask,
    values,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8moe
from fp8moe.ops.permute import rows_spec
from fp8moe.records import ArraySpec, DeviceArray, QuantTensor
from fp8moe.runtime.record_trees import arrays_in, map_arrays

reference = importlib.import_module("fp8moe.reference.permute")
RNG = generator()

DTYPES = (
    np.dtype(np.float32),
    np.dtype(np.float16),
    BF16,
    np.dtype(np.float64),
    np.dtype(np.uint8),
    np.dtype(ml_dtypes.float8_e4m3fn),
    np.dtype(np.int64),
)


def poison(spec):
    return map_arrays(lambda s: poisoned(s.shape, s.dtype) if isinstance(s, ArraySpec) else s, spec)


def poisoned_rows(x, plan, probs):
    probs = None if probs is None else ArraySpec((plan.num_out_tokens,), probs.dtype)
    return poison(fp8moe.Permuted(rows_spec(x, plan.num_out_tokens), probs, None))


def bytes_of(x):
    return np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1 if x.size else 0)


def gathered(x, entries, rows):
    """torch index_select of bytes, zeros elsewhere."""
    out = torch.zeros((rows, bytes_of(x).shape[1]), dtype=torch.uint8)
    if entries:
        at = torch.tensor([e[0] for e in entries])
        source = torch.tensor([e[1] for e in entries])
        out[at] = torch.from_numpy(bytes_of(x)).index_select(0, source)
    return out.numpy()


@given(routings(), st.sampled_from(DTYPES), st.sampled_from((0, 1, 3, 16, 40)), st.booleans(), st.booleans())
def test_permute_moves_every_byte(case, dtype, width, fill, zero_unweighted):
    ids, experts, align = case
    rng = np.random.default_rng(0)
    x = np.frombuffer(bytearray(rng.bytes(len(ids) * width * dtype.itemsize)), dtype).reshape(len(ids), width)
    probs = rng.random(ids.shape).astype(np.float32)
    probs[rng.random(ids.shape) < 0.2] = 0  # rows with probability zero are still permuted
    plan = fp8moe.plan_topk(ids, experts, align_size=align)
    entries, _ = layout(ids, experts, align)
    out = poisoned_rows(x, plan, probs)
    reference.permute(x, plan, probs, fill_padding=fill, zero_unweighted=zero_unweighted, out=out)
    wanted = gathered(x, entries, plan.num_out_tokens)
    wanted_probs = np.zeros(plan.num_out_tokens, np.float32)
    for row, token, slot, _ in entries:
        wanted_probs[row] = probs[token, slot]
        if zero_unweighted and not probs[token, slot]:
            wanted[row] = 0
    if not fill:
        untouched = np.ones(plan.num_out_tokens, bool)
        untouched[[e[0] for e in entries]] = False
        wanted[untouched] = bytes_of(poisoned((1, 1), dtype))[0, 0]
        wanted_probs[untouched] = poisoned((1,), np.float32)[0]
    assert same_bits(bytes_of(out.data), wanted)
    assert same_bits(out.probs, wanted_probs)
    if fill and width:
        public = fp8moe.permute(x, plan, probs, zero_unweighted=zero_unweighted)
        assert public.data.dtype == dtype
        assert same_bits(bytes_of(public.data), wanted)
        assert public.plan is plan


@given(routings(experts=(1, 3, 8)))
def test_mask_probs_follow_their_rows(case):
    ids, experts, align = case
    mask = mask_of(ids, experts)
    probs = np.random.default_rng(1).random(mask.shape).astype(np.float16)
    got = fp8moe.permute_and_pad(probs, mask, probs, align_size=align)
    wanted = np.zeros(got.plan.num_out_tokens, np.float16)
    for row, token, _, expert in layout(unmask(mask), experts, align)[0]:
        wanted[row] = probs[token, expert]
    assert same_bits(got.probs, wanted)
    assert got.tokens_per_expert.tolist() == mask.sum(axis=0).tolist()
    assert len(got.pad_offsets) == experts


@pytest.mark.parametrize("kind", ["tensor", "1x128", "mxfp8", "nvfp4"])
def test_scales_are_permuted_with_their_rows(kind):
    rng = np.random.default_rng(2)
    tokens, width, experts = 37, 200, 5
    ids = rng.integers(-1, experts, (tokens, 3)).astype(np.int32)
    plan = fp8moe.plan_topk(ids, experts, align_size=16)
    codes = rng.integers(0, 256, (tokens, width), np.uint8)
    q = {
        "tensor": QuantTensor(codes, np.array([0.5], np.float32), block=None),
        "1x128": QuantTensor(codes, rng.random((tokens, 2)).astype(np.float32)),
        "mxfp8": QuantTensor(codes, rng.integers(110, 140, (tokens, 7), np.uint8), block=(1, 32)),
        "nvfp4": QuantTensor(
            np.ascontiguousarray(codes[:, :104]),
            rng.integers(0, 127, (tokens, 13), np.uint8),
            "e2m1",
            (1, 16),
        ),
    }[kind]
    got = fp8moe.permute(q, plan).data
    entries, _ = layout(ids, experts, 16)
    assert same_bits(got.data, gathered(q.data, entries, plan.num_out_tokens))
    if kind == "tensor":
        assert got.scales.tolist() == [0.5]
    else:
        assert same_bits(bytes_of(got.scales), gathered(q.scales, entries, plan.num_out_tokens))
    assert (got.fmt, got.block) == (q.fmt, q.block)
    # unpermute dequantises: decode with ml_dtypes, sum with torch in float64
    back = fp8moe.unpermute(got, plan)
    assert back.dtype == BF16
    dense = fp8moe.dequantize(q).astype(np.float64)
    counts = (ids >= 0).sum(axis=1)
    finite = np.isfinite(dense)
    wanted = dense * counts[:, None]
    # at most 3 float32 additions and the rounding to bfloat16: 3 * 2^-24 + 2^-8 of the value
    bound = np.abs(wanted) * (3 * 2.0**-24 + 2.0**-8)
    error = np.abs(back.astype(np.float64) - wanted)
    assert (error[finite] <= bound[finite]).all()


@given(routings(), st.sampled_from((BF16, np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))))
def test_unpermute_sums_within_the_rounding_of_its_additions(case, dtype):
    ids, experts, align = case
    rng = np.random.default_rng(3)
    plan = fp8moe.plan_topk(ids, experts, align_size=align)
    x = values(rng, (plan.num_out_tokens, 9), dtype)
    probs = rng.random(ids.shape).astype(np.float32)
    entries, _ = layout(ids, experts, align)
    mapped = np.zeros(plan.num_out_tokens, bool)
    mapped[[e[0] for e in entries]] = True
    x[~mapped] = np.nan  # values in padding and after the last row reach no sum
    exact, magnitude = np.zeros((2, len(ids), 9))
    for row, token, slot, _ in entries:
        term = x[row].astype(np.float64) * probs[token, slot]
        exact[token] += term
        magnitude[token] += np.abs(term)
    got = fp8moe.unpermute(x, plan, probs)
    assert got.dtype == dtype
    wide = 2.0**-53 if dtype == np.float64 else 2.0**-24
    last = {BF16: 2.0**-8, np.dtype(np.float16): 2.0**-11}.get(dtype, 0)
    # n products and n additions, each with an error of half an ulp of a partial sum; then one cast of the
    # result
    bound = magnitude * (2 * ids.shape[1] * wide) + np.abs(exact) * last * 1.01 + 6e-8
    assert (np.abs(got.astype(np.float64) - exact) <= bound).all()
    plain = fp8moe.unpermute(x, plan)
    ones = fp8moe.unpermute(x, plan, np.ones_like(probs))
    assert same_bits(plain, ones)


@given(routings(), st.sampled_from((BF16, np.dtype(np.float32))), st.booleans())
def test_compiled_unpermute_equals_its_plain_form(case, dtype, weighted):
    ids, experts, align = case
    rng = np.random.default_rng(4)
    plan = fp8moe.plan_topk(ids, experts, align_size=align)
    x = values(rng, (plan.num_out_tokens, 33), dtype, awkward=True)
    probs = rng.random(ids.shape).astype(np.float32) if weighted else None
    with np.errstate(over="ignore", invalid="ignore"):
        got = fp8moe.unpermute(x, plan, probs)
        entries = reference.Entries(plan)
        rows = np.full(ids.shape, -1, np.int64)
        rows[entries.token, entries.place] = entries.row
        weights = None
        if weighted:
            weights = np.zeros(ids.shape, np.float32)
            weights[entries.token, entries.place] = probs[entries.token, entries.column]
        wanted = poisoned(got.shape, dtype)
        reference.merge_plain(x, rows, weights, wanted)
    both_nan = np.isnan(got.astype(np.float32)) & np.isnan(wanted.astype(np.float32))
    bits = np.dtype(f"u{dtype.itemsize}")
    assert (both_nan | (got.view(bits) == wanted.view(bits))).all()


@given(routings(sizes=(0, 1, 2, 33), experts=(1, 3, 8)), st.booleans())
def test_backwards_match_torch_autograd(case, by_mask):
    ids, experts, align = case
    rng = np.random.default_rng(5)
    if by_mask:
        mask = mask_of(ids, experts)
        ids = unmask(mask)
        plan = fp8moe.plan_routing_map(mask, align_size=align)
        columns = experts
    else:
        plan = fp8moe.plan_topk(ids, experts, align_size=align)
        columns = ids.shape[1]
    entries, _ = layout(ids, experts, align)
    row, token, slot, expert = (torch.tensor([e[i] for e in entries], dtype=torch.long) for i in range(4))
    column = expert if by_mask else slot
    rows, width = plan.num_out_tokens, 6

    x = torch.tensor(values(rng, (len(ids), width), np.float64), requires_grad=True)
    p = torch.tensor(rng.random((len(ids), columns)), requires_grad=True)
    moved = torch.zeros(rows, width, dtype=torch.float64).index_put((row,), x.index_select(0, token))
    moved_p = torch.zeros(rows, dtype=torch.float64).index_put((row,), p[token, column])
    g, gp = torch.tensor(rng.standard_normal((rows, width))), torch.tensor(rng.standard_normal(rows))
    ((moved * g).sum() + (moved_p * gp).sum()).backward()
    grad_x, grad_p = fp8moe.permute_backward(g.numpy(), plan, gp.numpy())
    np.testing.assert_allclose(grad_x, x.grad, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(grad_p, p.grad)

    y = torch.tensor(values(rng, (rows, width), np.float64), requires_grad=True)
    q = torch.tensor(rng.random((len(ids), columns)), requires_grad=True)
    merged = torch.zeros(len(ids), width, dtype=torch.float64).index_add(
        0, token, y[row] * q[token, column][:, None]
    )
    dm = torch.tensor(rng.standard_normal(tuple(merged.shape)))
    (merged * dm).sum().backward()
    grad_y, grad_q = fp8moe.unpermute_backward(dm.numpy(), plan, y.detach().numpy(), q.detach().numpy())
    np.testing.assert_array_equal(grad_y, y.grad)
    # a dot product of 6 float64 terms of magnitude up to 2^9 * 4
    np.testing.assert_allclose(grad_q, q.grad, rtol=0, atol=6 * 2**11 * 2.0**-52)
    np.testing.assert_array_equal(
        fp8moe.unpermute_backward(dm.numpy(), plan)[0],
        torch.zeros(rows, width, dtype=torch.float64).index_put((row,), dm[token]),
    )


def test_a_zero_probability_keeps_its_gradient():
    ids = np.array([[0, 1]], np.int32)
    plan = fp8moe.plan_topk(ids, 2)
    x = np.array([[3.0, 4.0], [5.0, 6.0]], np.float32)
    _, grad = fp8moe.unpermute_backward(np.ones((1, 2), np.float32), plan, x, np.zeros((1, 2), np.float32))
    assert grad.tolist() == [[7.0, 11.0]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, BF16])
def test_overflowing_sums_are_infinite(dtype):
    """Overflow gives infinities, without warnings, as on a GPU."""
    large = 6e4 if dtype == np.float16 else 3e38
    plan = fp8moe.plan_topk(np.array([[0, 1]], np.int32), 2)
    x, probs = np.full((2, 16), large, dtype), np.full((1, 2), 1.5, np.float32)
    for weights in (None, probs):
        assert np.isposinf(fp8moe.unpermute(x, plan, weights).astype(np.float32)).all()
    grad_x, grad_probs = fp8moe.unpermute_backward(x[:1], plan, x, probs)
    assert np.isposinf(grad_x.astype(np.float32)).all()
    assert np.isposinf(grad_probs).all() == (dtype != np.float16)


def test_backwards_accept_quantised_gradients():
    rng = np.random.default_rng(6)
    ids = rng.integers(-1, 4, (50, 2)).astype(np.int32)
    plan = fp8moe.plan_topk(ids, 4, align_size=16)
    q = fp8moe.quantize(values(rng, (50, 256), BF16))
    moved, _ = fp8moe.unpermute_backward(q, plan)
    assert same_bits(moved.data, fp8moe.permute(q, plan).data.data)
    grad, none = fp8moe.permute_backward(moved, plan)
    assert none is None
    assert same_bits(grad, fp8moe.unpermute(moved, plan))


def test_capacity_overflow_writes_nothing_outside():
    rng = np.random.default_rng(7)
    ids = rng.integers(0, 3, (40, 2)).astype(np.int32)
    plan = fp8moe.plan_topk(ids, 3, align_size=16, num_out_tokens=23)
    guarded = poisoned((23 + 100, 8), np.float32)
    x = values(rng, (40, 8))
    out = replace(poisoned_rows(x, plan, None), data=guarded[:23])
    reference.permute(x, plan, None, fill_padding=True, zero_unweighted=False, out=out)
    assert same_bits(guarded[23:], poisoned((100, 8), np.float32))
    entries = [e for e in layout(ids, 3, 16)[0] if e[0] < 23]
    assert plan.overflow.tolist() == [80 - len(entries)]
    assert same_bits(bytes_of(guarded[:23]), gathered(x, entries, 23))


@given(
    st.lists(st.integers(0, 9), max_size=12),
    st.sampled_from((1, 4, 16)),
    st.sampled_from((1, 2, 3)),
    st.integers(0, 2**32 - 1),
)
def test_sort_chunks_matches_split_and_cat(sizes, align, group, seed):
    rng = np.random.default_rng(seed)
    sizes = sizes[: len(sizes) // group * group]
    order = rng.permutation(len(sizes)).astype(np.int32)
    rows = sum(sizes)
    x, probs = values(rng, (rows, 5)), rng.random(rows).astype(np.float32)
    got = fp8moe.sort_chunks(
        x, np.array(sizes, np.int64), order, probs, align_size=align, chunks_per_group=group
    )
    chunks = torch.from_numpy(x).split(sizes) if sizes else ()
    parts, starts = [], [0]
    for g in range(len(sizes) // group):
        block = torch.cat([chunks[c] for c in order[g * group : (g + 1) * group]])
        padding = -len(block) % align
        parts += [block, torch.zeros(padding, 5)]
        starts.append(starts[-1] + len(block) + padding)
    wanted = torch.zeros(got.data.shape)
    if parts:
        wanted[: starts[-1]] = torch.cat(parts)
    assert same_bits(got.data, wanted.numpy())
    assert got.group_offsets.tolist() == starts
    back, back_probs = fp8moe.sort_chunks_backward(
        got.data,
        np.array(sizes, np.int64),
        order,
        got.probs,
        align_size=align,
        chunks_per_group=group,
        num_tokens=rows,
    )
    assert same_bits(back, x)
    assert same_bits(back_probs, probs)


def test_sort_chunks_moves_scales():
    rng = np.random.default_rng(8)
    q = fp8moe.quantize(values(rng, (10, 256)))
    got = fp8moe.sort_chunks(q, np.array([3, 0, 7], np.int32), np.array([2, 0, 1], np.int32)).data
    order = [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert same_bits(got.data, q.data[order])
    assert same_bits(got.scales, q.scales[order])


def rest_stays(backend, x, sizes, order):
    """Rows after the chunks, with sufficient room and without."""
    assert sizes.sum() < len(arrays_in(x)[0])
    starts = np.cumsum(sizes) - sizes
    rows = [np.arange(starts[c], starts[c] + sizes[c]) for c in order]
    rows = np.concatenate([*rows, np.arange(sizes.sum(), len(arrays_in(x)[0]))])
    for count in (len(rows), int(sizes.sum()) + 1):
        got = fp8moe.sort_chunks(
            *map(backend.upload, (x, sizes, order)), keep_rest=True, num_out_tokens=count
        ).data
        assert_same(backend.download(got), map_arrays(lambda a, n=count: a[rows[:n]], x))
        back, _ = fp8moe.sort_chunks_backward(
            got, *map(backend.upload, (sizes, order)), keep_rest=True, num_tokens=len(rows)
        )
        kept = np.isin(np.arange(len(rows)), rows[:count])
        for a, b in zip(arrays_in(backend.download(back)), arrays_in(x), strict=True):
            assert same_bits(a[kept], b[kept])


@pytest.mark.parametrize("quantized", [False, True])
def test_keep_rest_keeps_rows_after_the_chunks(backend, quantized):
    x = values(RNG, (17, 128), BF16)
    x = fp8moe.quantize(x) if quantized else x
    sizes, order = np.array([4, 0, 3, 5]), np.array([2, 3, 1, 0], np.int32)
    rest_stays(backend, x, sizes, order)
    with pytest.raises(ValueError, match="keep_rest: got True with align_size=4"):
        fp8moe.sort_chunks(x, sizes, order, align_size=4, keep_rest=True)


@given(st.lists(st.integers(0, 40), max_size=6), st.sampled_from((1, 16, 128)))
def test_pad_and_unpad_are_each_others_inverse(counts, align):
    rng = np.random.default_rng(9)
    x = values(rng, (sum(counts), 4))
    wanted = torch.cat(
        [torch.cat([part, torch.zeros(-len(part) % align, 4)]) for part in torch.from_numpy(x).split(counts)]
        or [torch.zeros(0, 4)]
    ).numpy()
    assert same_bits(fp8moe.pad(x, counts, align), wanted)
    assert same_bits(fp8moe.unpad(wanted, counts, align), x)
    static = fp8moe.pad(x, np.array(counts, np.int32), align)
    assert same_bits(static[: len(wanted)], wanted)
    assert not static[len(wanted) :].any()
    back = fp8moe.unpad(static, np.array(counts, np.int32), align)
    assert same_bits(back[: len(x)], x)
    assert not back[len(x) :].any()


def test_topk_of_ids_is_refused():
    with pytest.raises(ValueError, match="topk: got one with num_experts; wanted None"):
        fp8moe.permute_and_pad(
            np.ones((2, 4)), np.zeros((2, 1), np.int32), align_size=4, num_experts=2, topk=1
        )


def a_plan(tokens, experts, k, align, by_mask=False):
    ids = RNG.integers(-1, experts, (tokens, k)).astype(np.int32)
    if not by_mask:
        return fp8moe.plan_topk(ids, experts, align_size=align)
    mask = np.zeros((tokens, experts), bool)
    for t, row in enumerate(ids):
        mask[t, row[row >= 0]] = True
    return fp8moe.plan_routing_map(mask, align_size=align, topk=k)


def cut(moved):
    """The result without its plan."""
    return moved.data, moved.probs


def rows_there_and_back(backend, plan, columns):
    x = values(RNG, (plan.num_tokens, columns), BF16)
    rows = values(RNG, (plan.num_out_tokens, columns), BF16)
    probs = RNG.random((plan.num_tokens, plan.prob_columns)).astype(np.float32)
    grads = RNG.random(plan.num_out_tokens).astype(np.float32)
    assert_same(*backend.both(lambda x, p, w: cut(fp8moe.permute(x, p, w)), x, plan, probs))
    assert_same(*backend.both(fp8moe.unpermute, rows, plan, probs))
    assert_same(*backend.both(fp8moe.unpermute, rows, plan))
    for dtype in (np.float32, BF16, np.float64):
        assert_same(*backend.both(fp8moe.permute_backward, rows, plan, grads.astype(dtype)))
    expected, actual = backend.both(fp8moe.unpermute_backward, x, plan, rows, probs)
    assert_same(expected[0], actual[0])
    # at most 32 products in float32 before float64, of magnitudes up to 2^16 here
    bound = 32 * 2.0**-24 * np.sqrt(columns) * 2.0**16
    np.testing.assert_allclose(actual[1], expected[1], rtol=2.0**-22, atol=bound)


@only_on_cpu
@pytest.mark.parametrize("by_mask", [False, True])
@pytest.mark.parametrize("columns", [6200, 520, 24, 5])
def test_rows_there_and_back(backend, by_mask, columns):
    rows_there_and_back(backend, a_plan(21, 5, 3, 4, by_mask), columns)


@only_on_cpu
@pytest.mark.parametrize("columns", [600, 5])
def test_more_experts_than_a_block_caches(backend, columns):
    mask = RNG.random((5, 150)) < RNG.random((5, 1))
    mask[2] = True
    rows_there_and_back(backend, fp8moe.plan_routing_map(mask, align_size=4, topk=150), columns)


@only_on_cpu
def test_more_experts_of_a_token_than_a_warp_and_columns_than_a_block_handle_at_once(backend):
    mask = RNG.random((3, 230)) < 0.95
    rows_there_and_back(backend, fp8moe.plan_routing_map(mask, align_size=4, topk=230), 1100)


@only_on_cpu
def test_rows_of_a_plan_without_entries(backend):
    plan = fp8moe.plan_topk(np.full((3, 2), -1, np.int32), 4, align_size=4, num_out_tokens=7)
    rows_there_and_back(backend, plan, 520)


@only_on_cpu
@pytest.mark.parametrize("columns", [512, 6200])
def test_padding_is_zeros_where_there_are_no_bulk_copies(backend, columns):
    """Below compute capability 9.0 there are no bulk copies from shared memory; zeros are written
    differently."""
    plan = a_plan(21, 5, 3, 16)
    x = values(RNG, (21, columns), BF16)
    assert_same(*backend.both(lambda x, p: cut(fp8moe.permute(x, p)), x, plan, architecture="sm_80"))


@only_on_cpu
@pytest.mark.parametrize("columns", [512, 20_000])
def test_scales_and_pieces(backend, columns):
    plan = a_plan(9, 4, 2, 16)
    q = fp8moe.quantize(values(RNG, (9, columns - columns % 128), BF16))
    assert_same(*backend.both(lambda q, p: cut(fp8moe.permute(q, p)), q, plan))
    x = values(RNG, (9, columns), BF16)
    assert_same(*backend.both(lambda x, p: cut(fp8moe.permute(x, p)), x, plan))


@only_on_cpu
@pytest.mark.parametrize("columns", [6200, 520, 5])
@pytest.mark.parametrize("by_mask", [False, True])
def test_rows_of_probabilities_of_zero(backend, by_mask, columns):
    plan = a_plan(21, 5, 3, 4, by_mask)
    x = values(RNG, (21, columns), BF16)
    probs = RNG.random((21, plan.prob_columns)).astype(np.float32)
    probs[RNG.random(probs.shape) < 0.4] = 0
    probs[RNG.random(probs.shape) < 0.2] = -(2.0**-149)  # not zero
    probs[0] = -0.0

    def moved(x, p, w):
        return cut(fp8moe.permute(x, p, w, zero_unweighted=True))

    for dtype in (np.float32, BF16, np.float64):
        assert_same(*backend.both(moved, x, plan, probs.astype(dtype)))
    q = fp8moe.quantize(values(RNG, (21, 128 * (columns // 128 + 1)), BF16))
    assert_same(*backend.both(moved, q, plan, probs))


@only_on_cpu
def test_rows_of_probabilities_of_zero_without_room_for_a_row(backend):
    """One scale per tensor, which is copied even if there are no rows."""
    plan = fp8moe.plan_topk(np.zeros((3, 1), np.int32), 1, num_out_tokens=0)
    q = fp8moe.quantize(values(RNG, (3, 128), BF16), block=None)
    probs = np.zeros((3, 1), np.float32)
    assert_same(
        *backend.both(lambda q, p, w: cut(fp8moe.permute(q, p, w, zero_unweighted=True)), q, plan, probs)
    )


@only_on_gpu
@pytest.mark.parametrize("columns", [7168, 24, 5])
def test_many_rows_of_probabilities_of_zero(backend, columns):
    rng = generator()
    ids = np.argsort(rng.random((300, 20)), axis=1)[:, :4].astype(np.int32)
    plan = fp8moe.plan_topk(ids, 20, align_size=16, num_out_tokens=1200)  # too few rows for all entries
    probs = rng.random(ids.shape).astype(np.float32) * (rng.random(ids.shape) < 0.5)
    for x in (values(rng, (300, columns), BF16), fp8moe.quantize(values(rng, (300, 256), BF16))):
        assert_same(
            *backend.both(lambda x, p, w: fp8moe.permute(x, p, w, zero_unweighted=True), x, plan, probs)
        )


@only_on_gpu
@given(routings(), st.booleans())
@settings(max_examples=40)
def test_plans_and_permutation(backend, case, by_mask):
    ids, experts, align = case
    rng = np.random.default_rng(0)
    if by_mask:
        mask = np.zeros((len(ids), experts), bool)
        for t, row in enumerate(ids):
            mask[t, row[(row >= 0) & (row < experts)]] = True
        expected, actual = backend.both(fp8moe.plan_routing_map, mask, align_size=align, topk=min(4, experts))
    else:
        expected, actual = backend.both(fp8moe.plan_topk, ids, experts, align_size=align)
    assert_same(expected, actual)
    x = values(rng, (len(ids), 24), BF16)
    probs = rng.random((len(ids), expected.prob_columns)).astype(np.float32)
    assert_same(*backend.both(lambda *a: fp8moe.permute(*a), x, expected, probs))
    rows = values(rng, (expected.num_out_tokens, 24), BF16)
    assert_same(*backend.both(fp8moe.unpermute, rows, expected, probs))
    grads = rng.random(expected.num_out_tokens).astype(np.float32)
    assert_same(*backend.both(fp8moe.permute_backward, rows, expected, grads))
    cpu, cuda = backend.both(fp8moe.unpermute_backward, x, expected, rows, probs)
    assert_same(cpu[0], cuda[0])
    # a thread sums up to 32 products in float32, the rest is float64: an error of 32 * 2^-24 of the sum of
    # magnitudes, which is at most 24 * 2^16 here
    np.testing.assert_allclose(cuda[1], cpu[1], rtol=2.0**-23, atol=32 * 2.0**-24 * 24 * 2.0**16)


@only_on_gpu
@pytest.mark.parametrize("kind", ["tensor", "1x128", "mxfp8", "nvfp4"])
def test_quantised_rows(backend, kind):
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (37, 256), np.uint8)
    q = {
        "tensor": QuantTensor(codes, np.array([0.5], np.float32), block=None),
        "1x128": QuantTensor(codes, rng.random((37, 2)).astype(np.float32)),
        "mxfp8": QuantTensor(codes, rng.integers(110, 140, (37, 8), np.uint8), block=(1, 32)),
        "nvfp4": QuantTensor(
            codes[:, :128].copy(), rng.integers(0, 127, (37, 16), np.uint8), "e2m1", (1, 16)
        ),
    }[kind]
    plan = fp8moe.plan_topk(rng.integers(-1, 5, (37, 3)).astype(np.int32), 5, align_size=16)
    expected, actual = backend.both(lambda q, p: fp8moe.permute(q, p).data, q, plan)
    assert_same(expected, actual)
    a, b = backend.both(fp8moe.unpermute, expected, plan)
    nan = np.isnan(a.astype(np.float32))
    assert (nan == np.isnan(b.astype(np.float32))).all()
    assert (nan | (a.view(np.uint16) == b.view(np.uint16))).all()
    a, b = backend.both(fp8moe.dequantize, q)
    np.testing.assert_array_equal(a, b)


@only_on_gpu
@pytest.mark.parametrize("hidden", [7168, 2048, 264, 40])
@pytest.mark.parametrize("align", [1, 16, 128])
def test_rows_of_real_widths(backend, hidden, align):
    rng = np.random.default_rng(10)
    ids = np.argsort(rng.random((150, 64)), axis=1)[:, :8].astype(np.int32)
    plan = fp8moe.plan_topk(ids, 64, align_size=align)
    x, probs = rng.standard_normal((150, hidden)).astype(BF16), rng.random((150, 8)).astype(np.float32)
    assert_same(*backend.both(fp8moe.permute, x, plan, probs))
    assert_same(*backend.both(fp8moe.permute, fp8moe.quantize(x), plan, probs))
    assert_same(*backend.both(fp8moe.permute, x, plan, probs, fill_padding=True))
    rows = rng.standard_normal((plan.num_out_tokens, hidden)).astype(BF16)
    assert_same(*backend.both(fp8moe.unpermute, rows, plan, probs))
    assert_same(*backend.both(fp8moe.unpermute, rows, plan))
    expected, actual = backend.both(fp8moe.unpermute_backward, x, plan, rows, probs)
    assert_same(expected[0], actual[0])
    # at most 32 products per thread in float32, of magnitudes below 6 * 6; then float64
    bound = 32 * 2.0**-24 * np.sqrt(hidden) * 36
    np.testing.assert_allclose(actual[1], expected[1], rtol=2.0**-22, atol=bound)


@only_on_gpu
def test_a_small_capacity_writes_nothing_outside(backend):
    import cupy

    rng = np.random.default_rng(11)
    ids = rng.integers(0, 3, (40, 2)).astype(np.int32)
    x = backend.upload(rng.standard_normal((40, 64)).astype(BF16))
    for capacity in (0, 1, 23, 47):
        plan = fp8moe.plan_topk(backend.upload(ids), 3, align_size=16, num_out_tokens=capacity)
        call = fp8moe.runtime.dispatch.enter(x=x, plan=plan)
        guarded = cupy.full((capacity + 64, 64), 0xA5A5, cupy.uint16)
        raw = DeviceArray(guarded.data.ptr, (capacity, 64), BF16, 0, guarded)
        spec = fp8moe.records.Permuted(raw, None, None)
        options = {"fill_padding": True, "zero_unweighted": False}
        call.run("permute", "permute", call.args.x, call.args.plan, None, **options, out=spec)
        got = cupy.asnumpy(guarded)
        assert (got[capacity:] == 0xA5A5).all()
        wanted = fp8moe.permute(cupy.asnumpy(x), backend.download(plan)).data
        assert same_bits(got[:capacity], wanted.view(np.uint16))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
def test_past_two_to_the_31_elements():
    import cupy

    tokens, hidden, k = 40_000, 7168, 8
    rng = np.random.default_rng(12)
    ids = rng.integers(0, 32, (tokens, k)).astype(np.int32)
    plan = fp8moe.plan_topk(GPU.upload(ids), 32, align_size=16)
    assert plan.num_out_tokens * hidden > 2**31
    x = cupy.random.randint(0x3F00, 0x4100, (tokens, hidden), dtype=cupy.int32).astype(cupy.uint16).view(BF16)
    rows = fp8moe.permute(x, plan).data
    host = GPU.download(plan)
    entries = rng.integers(0, tokens, 300)
    for token in entries:
        count = host.row_id_map[token, -1]
        for place in range(count):
            row = host.row_id_map[token, place] + host.pad_offsets[host.row_id_map[token, k + place]]
            assert bool((rows[int(row)].view(np.uint16) == x[int(token)].view(np.uint16)).all())
    last = int(host.expert_offsets[-1])
    assert not bool(rows[last:].view(np.uint16).any())
    merged = fp8moe.unpermute(rows, plan)
    # the sum of eight equal rows is eight times the row, exact in bfloat16
    wanted = x[entries].astype(cupy.float32) * 8
    assert bool((merged[entries].astype(cupy.float32) == wanted).all())


@only_on_gpu
def test_nan_in_padding_and_tail_is_never_read(backend):
    rng = np.random.default_rng(13)
    ids = rng.integers(-1, 6, (50, 3)).astype(np.int32)
    plan = fp8moe.plan_topk(ids, 6, align_size=16)
    rows = rng.standard_normal((plan.num_out_tokens, 256)).astype(BF16)
    mapped = np.zeros(plan.num_out_tokens, bool)
    for entry in plan.row_id_map:
        mapped[entry[: entry[-1]] + plan.pad_offsets[entry[3 : 3 + entry[-1]]]] = True
    wanted = fp8moe.unpermute(rows, plan)
    rows[~mapped] = np.nan
    q = fp8moe.quantize(rows)
    for x, y in ((rows, wanted), (q, fp8moe.unpermute(fp8moe.quantize(np.nan_to_num(rows)), plan))):
        assert np.isfinite(y.astype(np.float32)).all()
        assert_same(y, backend.download(fp8moe.unpermute(backend.upload(x), backend.upload(plan))))


# ---------------------------------------------------------------- chunks by kernels


def rows_without_room_are_left_out(backend, x, sizes, order):
    """On CUDA, where the host does not read the sizes: rows that have room are the same as with sufficient
    room."""
    full = fp8moe.sort_chunks(x, sizes, order)
    rows = int(full.group_offsets[-1])
    cut = map_arrays(lambda a: a[: rows // 2].copy(), full.data)
    got = fp8moe.sort_chunks(*map(backend.upload, (x, sizes, order)), num_out_tokens=rows // 2)
    assert_same(backend.download(got).data, cut)
    zeros = map_arrays(lambda a: np.concatenate([a[: rows // 2], np.zeros_like(a[rows // 2 :])]), full.data)
    wanted = fp8moe.sort_chunks_backward(zeros, sizes, order)
    arguments = map(backend.upload, (cut, sizes, order))
    assert_same(
        backend.download(fp8moe.sort_chunks_backward(*arguments, num_tokens=len(arrays_in(x)[0])))[0],
        wanted[0],
    )


@only_on_cpu
@pytest.mark.parametrize(
    ("chunks", "columns"), [(1, 64), (7, 1024), (12, 256), (8, 9216), (9, 3), (70, 64), (600, 16)]
)
def test_chunks_by_kernels(backend, chunks, columns):
    sizes = RNG.integers(0, 6, chunks) * (RNG.random(chunks) < 0.7)
    order = RNG.permutation(chunks).astype(np.int32)
    x = values(RNG, (int(sizes.sum()) + 3, columns), BF16)
    probs = RNG.random(len(x)).astype(np.float32)
    for align in (1, 8):
        expected, actual = backend.both(fp8moe.sort_chunks, x, sizes, order, probs, align_size=align)
        assert_same(expected, actual)
        options = {"align_size": align, "num_tokens": len(x)}
        assert_same(
            *backend.both(fp8moe.sort_chunks_backward, expected.data, sizes, order, expected.probs, **options)
        )
        assert_same(*backend.both(fp8moe.pad, x, sizes, align))
        assert_same(*backend.both(fp8moe.unpad, expected.data, sizes, align))
    q = fp8moe.quantize(values(RNG, (int(sizes.sum()), 512), BF16))
    if q.data.size:
        assert_same(*backend.both(fp8moe.sort_chunks, q, sizes, order))


@only_on_cpu
@pytest.mark.parametrize("columns", [256, 3])
def test_chunks_without_room(backend, columns):
    sizes, order = np.array([5, 0, 7, 4], np.int32), np.array([2, 0, 3, 1], np.int32)
    x = values(RNG, (18, columns), BF16)
    for rows in (x, fp8moe.quantize(x)):
        rows_without_room_are_left_out(backend, rows, sizes, order)
        rest_stays(backend, rows, sizes, order)


@only_on_gpu
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=12),
    st.sampled_from((1, 4)),
    st.sampled_from((1, 2)),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=30)
def test_chunks_and_padding(backend, sizes, align, group, seed):
    rng = np.random.default_rng(seed)
    sizes = sizes[: len(sizes) // group * group]
    order = rng.permutation(len(sizes)).astype(np.int32)
    x, probs = values(rng, (sum(sizes), 5)), rng.random(sum(sizes)).astype(np.float32)
    options = {"align_size": align, "chunks_per_group": group}
    sizes = np.array(sizes)
    expected, actual = backend.both(fp8moe.sort_chunks, x, sizes, order, probs, **options)
    assert_same(expected, actual)
    options["num_tokens"] = len(x)
    assert_same(
        *backend.both(fp8moe.sort_chunks_backward, expected.data, sizes, order, expected.probs, **options)
    )
    padded, actual = backend.both(fp8moe.pad, x, sizes, align)
    assert_same(padded, actual)
    assert_same(*backend.both(fp8moe.unpad, padded, sizes, align))


@only_on_gpu
@pytest.mark.parametrize("kind", ["bf16", "wide", "1x128", "mxfp8"])
@pytest.mark.parametrize("chunks", [1, 7, 300])
def test_sort_chunks_of_whole_vectors(backend, kind, chunks):
    """Rows of multiples of 16 bytes are moved by bulk copies; with empty chunks, padding and rows after the
    last chunk."""
    rng = np.random.default_rng(chunks)
    sizes = rng.integers(0, 6, chunks) * (rng.random(chunks) < 0.7)
    order = rng.permutation(chunks).astype(np.int32)
    rows = int(sizes.sum()) + 3
    x = {
        "bf16": lambda: values(rng, (rows, 520), BF16),
        "wide": lambda: values(rng, (rows, 5000), np.float32),
        "1x128": lambda: fp8moe.quantize(values(rng, (rows, 512), BF16)),
        "mxfp8": lambda: fp8moe.quantize(values(rng, (rows, 512), BF16), block=(1, 32)),
    }[kind]()
    probs = rng.random(rows).astype(np.float32)
    for align, tokens in ((1, None), (16, None), (4, rows + 4 * chunks)):
        options = {"align_size": align, "num_out_tokens": tokens}
        expected, actual = backend.both(fp8moe.sort_chunks, x, sizes, order, probs, **options)
        assert_same(expected, actual)
        options = {"align_size": align, "num_tokens": rows}
        assert_same(
            *backend.both(fp8moe.sort_chunks_backward, expected.data, sizes, order, expected.probs, **options)
        )
        assert_same(*backend.both(fp8moe.pad, x, sizes, align, num_out_tokens=tokens))
        assert_same(*backend.both(fp8moe.unpad, expected.data, sizes, align, num_out_tokens=rows))
    rows_without_room_are_left_out(backend, x, sizes, order)
    rest_stays(backend, x, sizes // 2, order)
