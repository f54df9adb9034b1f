"""Grouped GEMM compared with float64 products of the dequantised operands, and with torch in bfloat16."""

import itertools

import numpy as np
import pytest
import torch
from cases import BF16, assert_same, offsets_of, relative, values
from hypothesis import given
from hypothesis import strategies as st

import fp8moe

COUNTS = st.lists(st.sampled_from((0, 1, 2, 127, 128, 129, 256)), min_size=1, max_size=6)


@given(COUNTS, st.sampled_from((1, 128, 200)), st.sampled_from((0, 128, 300)), st.integers(0, 2**32 - 1))
def test_fp8_forward(counts, width, depth, seed):
    rng = np.random.default_rng(seed)
    offsets = offsets_of(counts)
    rows = int(offsets[-1]) + 7
    x = fp8moe.quantize(values(rng, (rows, depth)))
    w = fp8moe.quantize(values(rng, (len(counts), width, depth)), block=(128, 128))
    x.data[offsets[-1] :] = 0x7F  # NaN after the last expert
    got = fp8moe.grouped_gemm(x, w, offsets)
    wide_x, wide_w = (fp8moe.dequantize(q).astype(np.float64) for q in (x, w))
    wanted = np.zeros((rows, width))
    for e, (lo, hi) in enumerate(itertools.pairwise(offsets)):
        wanted[lo:hi] = wide_x[lo:hi] @ wide_w[e].T
    # bfloat16 (8 significant bits) rounds each value by at most 2^-8 of it; float32 sums add about 1e-6
    assert relative(got, wanted) < 2.0**-8 + 1e-5
    assert got.dtype == BF16
    ready = fp8moe.grouped_gemm(fp8moe.to_layout(x, "gemm_ready"), w, offsets)
    np.testing.assert_array_equal(ready.astype(np.float32), got.astype(np.float32))


@given(COUNTS, st.sampled_from((1, 16, 128)), st.booleans(), st.integers(0, 2**32 - 1))
def test_products_of_padded_rows(counts, align_size, quantized, seed):
    """Padding rows of the result are zeros, for any weights; the others equal those of a product of all
    rows."""
    rng = np.random.default_rng(seed)
    padded = [-(-n // align_size) * align_size for n in counts]
    offsets, real = offsets_of(padded), np.array(counts, np.int32)
    x = np.concatenate([values(rng, (n, 160)) for n in padded])
    padding = np.concatenate([np.arange(p) >= n for p, n in zip(padded, counts, strict=True)])
    x[padding] = 0
    w = values(rng, (len(counts), 24, 160))
    if quantized:
        x, w = fp8moe.quantize(x), fp8moe.quantize(w, block=(128, 128))
    wanted = fp8moe.grouped_gemm(x, w, offsets)
    assert_same(fp8moe.grouped_gemm(x, w, offsets, real), wanted)
    assert not wanted[padding].any()
    w = fp8moe.quantize(np.full((len(counts), 24, 160), np.nan, np.float32), block=(128, 128))
    got = fp8moe.grouped_gemm(fp8moe.quantize(np.zeros((len(padding), 160), np.float32)), w, offsets, real)
    assert not got[padding].any()
    assert np.isnan(got[~padding].astype(np.float32)).all()


@given(
    st.sampled_from((0, 1, 5, 140)),
    st.sampled_from((1, 128)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_permute_gemm_multiplies_each_token_by_its_experts(tokens, align_size, by_mask, weighted, seed):
    rng, experts, depth = np.random.default_rng(seed), 3, 200
    mask = rng.random((tokens, experts)) < 0.5
    ids = np.where(rng.random((tokens, 2)) < 0.8, rng.integers(0, experts, (tokens, 2)), -1).astype(np.int32)
    if by_mask:
        plan = fp8moe.plan_routing_map(mask, align_size=align_size, topk=experts)
    else:
        plan = fp8moe.plan_topk(ids, experts, align_size=align_size)
    x = fp8moe.quantize(values(rng, (tokens, depth)))
    w = fp8moe.quantize(values(rng, (experts, 24, depth)), block=(128, 128))
    probs = rng.random((tokens, plan.prob_columns)).astype(np.float32) if weighted else None
    got = fp8moe.permute_gemm(x, w, plan, probs)
    wanted, wanted_probs = np.zeros((plan.num_out_tokens, 24)), np.zeros(plan.num_out_tokens, np.float32)
    wide_x, wide_w = (fp8moe.dequantize(q).astype(np.float64) for q in (x, w))
    offsets, next_row = plan.expert_offsets, list(plan.expert_offsets[:-1])
    for e in range(experts):
        for t in range(tokens):
            places = [e] * int(mask[t, e]) if by_mask else [j for j in range(2) if ids[t, j] == e]
            for place in places:
                wanted[next_row[e]] = wide_x[t] @ wide_w[e].T
                if weighted:
                    wanted_probs[next_row[e]] = probs[t, place]
                next_row[e] += 1
        assert next_row[e] <= offsets[e + 1]
    # bfloat16 (8 significant bits) rounds each value by at most 2^-8 of it; float32 sums add about 1e-6
    assert relative(got.data, wanted) < 2.0**-8 + 1e-5
    assert (got.probs == wanted_probs).all() if weighted else got.probs is None


def test_counts_of_tokens_are_checked():
    x, w, offsets = np.ones((5, 4), np.float32), np.ones((2, 3, 4), np.float32), np.array([0, 3, 5], np.int32)
    with pytest.raises(TypeError, match="tokens_per_expert: got dtype int64; wanted int32"):
        fp8moe.grouped_gemm(x, w, offsets, np.array([3, 2]))
    with pytest.raises(ValueError, match=r"tokens_per_expert: got shape \[3\]; wanted \[2\]"):
        fp8moe.grouped_gemm(x, w, offsets, np.array([3, 2, 0], np.int32))
    # counts larger than the number of rows, and negative counts
    got = fp8moe.grouped_gemm(x, w, offsets, np.array([9, -1], np.int32))
    assert (got[:3] == 4).all()
    assert not got[3:].any()


def test_fp8_weights_are_contracted_along_their_codes():
    """``columnwise`` weights give the product with the transposed matrices: dgrad."""
    rng = np.random.default_rng(1)
    offsets = offsets_of([128, 0, 72])
    dy, w = fp8moe.quantize(values(rng, (200, 192))), values(rng, (3, 192, 128))
    both = fp8moe.quantize(w, block=(128, 128), columnwise=True)
    wanted = np.zeros((200, 128))
    wide_dy, wide_w = fp8moe.dequantize(dy).astype(np.float64), fp8moe.dequantize(both.rowwise)
    for e, (lo, hi) in enumerate(itertools.pairwise(offsets)):
        wanted[lo:hi] = wide_dy[lo:hi] @ wide_w[e].astype(np.float64)
    # as in test_fp8: rounding to bfloat16 and of float32 sums
    assert relative(fp8moe.grouped_gemm(dy, both.columnwise, offsets), wanted) < 2.0**-8 + 1e-5
    with pytest.raises(ValueError, match=r"w: got shape \[3, 192, 128\]"):
        fp8moe.grouped_gemm(dy, both.rowwise, offsets)


@given(COUNTS, st.booleans(), st.integers(0, 2**32 - 1))
def test_fp8_wgrad(counts, accumulate, seed):
    rng = np.random.default_rng(seed)
    offsets = offsets_of(counts)
    rows = int(offsets[-1])
    dy, x = (fp8moe.quantize(values(rng, (rows, n))) for n in (65, 40))
    dy, x = (fp8moe.scaling_aware_transpose(q, offsets) for q in (dy, x))
    out = rng.standard_normal((len(counts), 65, 40)).astype(np.float32) if accumulate else None
    before = 0 if out is None else out.astype(np.float64)
    got = fp8moe.grouped_gemm_wgrad(dy, x, offsets, out)
    assert out is None or got is out
    wide = [fp8moe.dequantize(q, expert_offsets=offsets).astype(np.float64) for q in (dy, x)]
    ranges = itertools.pairwise(offsets)
    products = np.stack([wide[0][lo:hi].T @ wide[1][lo:hi] for lo, hi in ranges])
    # float32 sums of up to 256 products, whose partial sums may cancel
    np.testing.assert_allclose(got, products + before, rtol=1e-4, atol=1e-4 * 2.0**16)
    assert relative(got, products + before) < 1e-5
    for e, count in enumerate(counts):
        if count == 0 and not accumulate:
            assert not got[e].any()


@given(
    st.lists(st.sampled_from((0, 128, 256)), min_size=1, max_size=4), st.booleans(), st.integers(0, 2**32 - 1)
)
def test_fp8_wgrad_of_blocks(counts, accumulate, seed):
    """Operands with (128, 128) blocks equal those with (128, 1) blocks of repeated scales."""
    rng = np.random.default_rng(seed)
    offsets = offsets_of(counts)
    q = [fp8moe.quantize(values(rng, (int(offsets[-1]) + 16, n))) for n in (65, 140)]
    blocks, tiles = (
        [fp8moe.scaling_aware_transpose(a, offsets, target=target, align_size=128) for a in q]
        for target in ("block", "tile")
    )
    for a in blocks:
        a.data[:, offsets[-1] :] = 0x7F  # NaN after the last expert
    out = rng.standard_normal((len(counts), 65, 140)).astype(np.float32) if accumulate else None
    wanted = fp8moe.grouped_gemm_wgrad(*tiles, offsets, None if out is None else out.copy())
    assert_same(fp8moe.grouped_gemm_wgrad(*blocks, offsets, out), wanted)


def test_fp8_wgrad_of_blocks_rejects_unaligned_offsets():
    q = fp8moe.scaling_aware_transpose(fp8moe.quantize(np.ones((256, 128), np.float32)), target="block")
    with pytest.raises(ValueError, match="expert_offsets: got 100"):
        fp8moe.grouped_gemm_wgrad(q, q, np.array([0, 100, 256], np.int32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_plain_arrays_match_torch(dtype):
    rng = np.random.default_rng(0)
    counts, width, depth = [3, 0, 130], 20, 30
    offsets = offsets_of(counts)
    np_dtype = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    x = rng.standard_normal((140, depth)).astype(np_dtype)
    w = rng.standard_normal((3, width, depth)).astype(np_dtype)
    dy = rng.standard_normal((140, width)).astype(np_dtype)
    out = fp8moe.grouped_gemm(x, w, offsets)
    dx = fp8moe.grouped_gemm(dy, w, offsets, transpose_w=True)
    dw = fp8moe.grouped_gemm_wgrad(dy, x, offsets, dtype="float64" if dtype == "float64" else "float32")
    tx, tw, tdy = (torch.from_numpy(v.astype(np.float64)) for v in (x, w, dy))
    cast = {"bfloat16": 2.0**-8, "float32": 2.0**-20, "float64": 1e-13}[dtype]
    for e, (lo, hi) in enumerate(itertools.pairwise(offsets)):
        bound = cast * np.maximum(np.sqrt(depth) * 3, 1)
        np.testing.assert_allclose(out[lo:hi].astype(float), tx[lo:hi] @ tw[e].T, rtol=cast, atol=bound)
        np.testing.assert_allclose(dx[lo:hi].astype(float), tdy[lo:hi] @ tw[e], rtol=cast, atol=bound)
        wide = 1e-13 if dtype == "float64" else 2.0**-20
        np.testing.assert_allclose(dw[e], tdy[lo:hi].T @ tx[lo:hi], rtol=wide, atol=wide * 130)
    assert not out[133:].astype(np.float32).any()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, BF16])
def test_overflowing_products_are_infinite(dtype):
    """Overflow gives infinities, without warnings, as on a GPU."""
    large, offsets = 6e4 if dtype == np.float16 else 3e38, np.array([0, 2], np.int32)
    x, w = np.full((2, 16), large, dtype), np.full((1, 16, 16), 2, dtype)
    assert np.isposinf(fp8moe.grouped_gemm(x, w, offsets).astype(np.float32)).all()
    if dtype != np.float16:
        assert np.isposinf(fp8moe.grouped_gemm_wgrad(x, w[0, :2], offsets)).all()
    q, wq = (
        fp8moe.quantize(np.full(s, 3e38, np.float32), block=b)
        for s, b in (((2, 128), (1, 128)), ((1, 128, 128), (128, 128)))
    )
    assert np.isposinf(fp8moe.grouped_gemm(q, wq, offsets).astype(np.float32)).all()


def test_offsets_beyond_the_rows_are_clamped():
    x = np.ones((5, 4), np.float32)
    w = np.ones((2, 3, 4), np.float32)
    got = fp8moe.grouped_gemm(x, w, np.array([0, 3, 9], np.int32))
    assert got.shape == (5, 3)
    assert (got == 4).all()


def test_sm_limit_is_validated():
    x, w, offsets = np.ones((5, 4), np.float32), np.ones((2, 3, 4), np.float32), np.array([0, 3, 5], np.int32)
    dy = np.ones((5, 3), np.float32)
    for call in (fp8moe.grouped_gemm, fp8moe.grouped_gemm_wgrad):
        arrays = (x, w, offsets) if call is fp8moe.grouped_gemm else (dy, x, offsets)
        for wrong, error, text in (
            (100, ValueError, "num_sms: got 100 for arrays on the CPU"),
            (7, ValueError, "num_sms: got 7; wanted an even number"),
            (0, ValueError, "num_sms: got 0; wanted an integer from 2"),
            (4.0, TypeError, "num_sms: got float"),
            (True, TypeError, "num_sms: got a bool"),
        ):
            with pytest.raises(error, match=text):
                call(*arrays, num_sms=wrong)
