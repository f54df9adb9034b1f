"""Permutation compared with torch's index_select, scatter and autograd, on poisoned outputs."""

import importlib
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from backend_checks import rest_stays
from cases import BF16, generator, layout, mask_of, poisoned, routings, same_bits, unmask, values
from hypothesis import given
from hypothesis import strategies as st

import fp8moe
from fp8moe.ops.permute import rows_spec
from fp8moe.records import ArraySpec, QuantTensor
from fp8moe.runtime.record_trees import map_arrays

reference = importlib.import_module("fp8moe.reference.permute")

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


@pytest.mark.parametrize("quantized", [False, True])
def test_keep_rest_keeps_rows_after_the_chunks(quantized):
    rng = generator()
    x = values(rng, (17, 128), BF16)
    x = fp8moe.quantize(x) if quantized else x
    sizes, order = np.array([4, 0, 3, 5]), np.array([2, 3, 1, 0], np.int32)
    rest_stays(lambda a: a, lambda a: a, x, sizes, order)
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
