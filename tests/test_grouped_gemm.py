"""Grouped GEMM compared with float64 products of the dequantised operands, and with torch in bfloat16; its
kernels with the reference."""

import contextlib
import ctypes
import functools
import importlib
import itertools
import random
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from backends import GPU, ON_CPU, only_on_cpu, only_on_gpu, over
from cases import (
    BF16,
    SEED,
    assert_close,
    assert_same,
    from_float8,
    generator,
    offsets_of,
    relative,
    same_bits,
    values,
)
from hypothesis import given
from hypothesis import strategies as st

import fp8moe
from fp8moe.ops.grouped_gemm import (
    add_grouped_gemm,
    raw_grouped_gemm_wgrad,
    raw_grouped_gemm_wgrad_of_parts,
)
from fp8moe.ops.quantize import columns_of
from fp8moe.runtime.dispatch import operation

RNG = generator()
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


# ---------------------------------------------------------------- kernels


def random_operands(counts, width, depth, fmts):
    offsets = offsets_of(counts)
    rows = (int(offsets[-1]) // 16 + 1) * 16
    x, dy = (
        fp8moe.quantize(values(RNG, (rows, n)), fmt=f) for n, f in zip((depth, width), fmts, strict=True)
    )
    w = fp8moe.quantize(values(RNG, (len(counts), width, depth)), block=(128, 128))
    x.data[offsets[-1] :] = dy.data[offsets[-1] :] = 0x7F  # NaN after the last expert
    return x, w, dy, offsets


def wgrad_agrees(backend, operands, offsets, gemm):
    """New and accumulated gradients, in both dtypes."""
    # the tensor cores sum with about 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2): an error of
    # 2^-13 of the sum so far, at each of four additions
    sums = 2.0**-11 if backend is GPU and gemm == "wgmma" else 1e-5
    for dtype, bound in (("float32", sums), ("bfloat16", 2.0**-8 + (sums if backend is GPU else 0))):
        new = backend.both(fp8moe.grouped_gemm_wgrad, *operands, offsets, backend=gemm, dtype=dtype)
        assert_close(new, bound)
        assert new[1].dtype.name == dtype
        into = RNG.standard_normal(new[0].shape).astype(new[0].dtype)
        expected = fp8moe.grouped_gemm_wgrad(*operands, offsets, into.copy())
        arguments = map(backend.upload, (*operands, offsets, into.copy()))
        actual = fp8moe.grouped_gemm_wgrad(*arguments, backend=gemm)
        assert_close((expected, backend.download(actual)), bound)


SIZES = [(200, 304), (1024, 1280), (1152, 1280)]


@over(
    "gemm, counts, width, depth, fmts",
    on_cpu=[
        ("wgmma", [128, 0, 256], 264, 144, ("e4m3", "e4m3")),
        ("wgmma", [5, 130, 1], 520, 272, ("e5m2", "e4m3")),
        ("wgmma", [0, 0], 8, 16, ("e4m3", "e5m2")),
        ("wgmma", [300], 24, 640, ("e5m2", "e5m2")),
        ("wgmma", [3, 0, 0, 0, 0, 1, 0, 300, 5], 264, 752, ("e4m3", "e4m3")),
        ("mma", [5, 130, 1], 136, 144, ("e5m2", "e4m3")),
        ("plain", [5, 0, 30], 20, 40, ("e5m2", "e4m3")),
    ],
    on_gpu=[
        (gemm, counts, *sizes, ("e4m3", "e5m2"))
        for gemm in ("plain", "mma", "wgmma", "cublas")
        for counts in ([128, 0, 256], [5, 130, 0], [0, 0, 0], [2000, 1, 700], [4200, 300, 0])
        for sizes in SIZES
    ],
)
def test_products_of_codes(backend, gemm, counts, width, depth, fmts):
    backend.skip_without(gemm)
    x, w, dy, offsets = random_operands(counts, width, depth, fmts)
    # float32 sums in another order, then one rounding to bfloat16's 8 bits
    for a in (x, fp8moe.to_layout(x, "gemm_ready")):
        pair = backend.both(fp8moe.grouped_gemm, a, w, offsets, backend=gemm)
        assert_close(pair, 2.0**-8)
        assert not pair[1][offsets[-1] :].astype(np.float32).any()
    wgrad_agrees(backend, [fp8moe.scaling_aware_transpose(q, offsets) for q in (dy, x)], offsets, gemm)


@operation
def wgrad_of_halves(dy, x, offsets, out, width, backend):
    """The first columns of each half of dy, whose others are padding."""
    parts = [columns_of(dy, first, width) for first in (0, dy.shape[1] // 2)]
    options = {"dtype": "bfloat16", "tokens_per_expert": None, "backend": backend, "num_sms": None}
    return raw_grouped_gemm_wgrad_of_parts(parts, x, offsets, out, **options)


@over(
    "gemm, counts, width, depth",
    on_cpu=[(gemm, [128, 0, 256], 136, 144) for gemm in ("wgmma", "mma", "plain")],
    on_gpu=[
        (gemm, [128, 0, 2560, 0], width, 1280)
        for gemm in ("wgmma", "mma", "plain", "cublas")
        for width in (136, 320, 2880)
    ],
)
def test_gradients_of_both_halves_in_one_array(backend, gemm, counts, width, depth):
    """Each has the bits of a gradient of its own, new in bfloat16 and added to float32."""
    backend.skip_without(gemm)
    offsets, whole = offsets_of(counts), -(-width // 128) * 128
    rows = int(offsets[-1]) + 128
    dy, x = (
        fp8moe.scaling_aware_transpose(
            fp8moe.quantize(values(RNG, (rows, n))), offsets, target="block", align_size=128
        )
        for n in (2 * whole, depth)
    )
    before = values(RNG, (len(counts), 2 * width, depth))

    def alone(dy, x, offsets, out, width, backend):
        return [
            wgrad_of_one(dy, x, offsets, None if out is None else out[i], first, width, backend)
            for i, first in enumerate((0, whole))
        ]

    halves = [np.ascontiguousarray(before[:, i * width : (i + 1) * width]) for i in (0, 1)]
    for target, parts in ((None, None), (before, halves)):
        given = [dy, x, offsets]
        if backend is ON_CPU:
            with pytest.MonkeyPatch.context() as patch:
                backend.start(patch, architecture="sm_90a", multiprocessors=2)
                got, apart = in_place(backend, gemm, given, target, parts, width, alone)
        else:
            got, apart = in_place(backend, gemm, given, target, parts, width, alone)
        assert_same(got, np.concatenate(apart, axis=1))


def in_place(backend, gemm, given, target, parts, width, alone):
    given = [backend.upload(a) for a in given]
    out = None if target is None else backend.upload(target.copy())
    outs = None if parts is None else [backend.upload(a) for a in parts]
    got = wgrad_of_halves(*given, out, width, gemm)
    return backend.download(got), [backend.download(a) for a in alone(*given, outs, width, gemm)]


@operation
def wgrad_of_one(dy, x, offsets, out, first, width, backend):
    options = {"dtype": "bfloat16", "backend": backend}
    return raw_grouped_gemm_wgrad(columns_of(dy, first, width), x, offsets, out, **options)


@over(
    "tokens, experts, topk, width, depth, align_size, options, device",
    on_cpu=[
        (40, 3, 2, 264, 272, 128, {}, {}),
        (200, 2, 2, 136, 144, 128, {"fmts": ("e5m2", "e4m3")}, {}),
        (70, 4, 3, 520, 640, 16, {"spare": 50, "fmts": ("e4m3", "e5m2")}, {}),
        (30, 2, 1, 24, 512, 1, {"spare": -140}, {}),
        (150, 9, 1, 24, 768, 128, {}, {}),
        (1, 1, 1, 8, 16, 128, {}, {}),
        (40, 3, 2, 40, 144, 16, {}, {"architecture": "sm_89"}),  # by mma
    ],
    on_gpu=[
        (3000, 16, 4, 2064, 1168, 128, {}, {}),
        (1000, 3, 2, 520, 512, 16, {"fmts": ("e5m2", "e4m3"), "spare": 300}, {}),
        (700, 40, 8, 264, 2048, 1, {"spare": -999}, {}),
        (5000, 128, 8, 768, 128, 128, {"fmts": ("e4m3", "e5m2")}, {}),
        (1, 2, 1, 8, 16, 128, {}, {}),
    ],
)
def test_gathered_products(backend, tokens, experts, topk, width, depth, align_size, options, device):
    """Half tiles, pairs side by side, scales loaded for one, two or four K-steps at a time, dropped rows, and
    rows past the last expert."""
    backend.skip_without("wgmma")
    both = functools.partial(backend.both, **device)
    gathered_products(both, RNG, tokens, experts, topk, width, depth, align_size, **options)


def gathered_products(
    both, rng, tokens, experts, topk, width, depth, align_size, fmts=("e4m3", "e4m3"), *, spare=0
):
    """`permute_gemm` has the bits of `permute` and `grouped_gemm` on the same backend, and approximately
    those of the reference. spare: rows by which the result is too short for all tokens' rows, or, if
    negative, too long."""
    ids = rng.integers(-1, experts, (tokens, topk)).astype(np.int32)
    rows = (
        fp8moe.plan_topk(ids, experts, align_size=align_size, num_out_tokens="exact").num_out_tokens - spare
    )
    plan = fp8moe.plan_topk(ids, experts, align_size=align_size, num_out_tokens=max(rows, 0))
    x = fp8moe.quantize(values(rng, (tokens, depth), BF16), fmt=fmts[0])
    w = fp8moe.quantize(values(rng, (experts, width, depth)), block=(128, 128), fmt=fmts[1])
    probs = rng.random((tokens, topk)).astype(np.float32)

    def in_two_steps(x, w, plan, probs):
        moved = fp8moe.permute(x, plan, probs)
        counts = plan.tokens_per_expert
        return fp8moe.grouped_gemm(moved.data, w, plan.expert_offsets, counts), moved.probs

    def in_one(x, w, plan, probs):
        moved = fp8moe.permute_gemm(x, w, plan, probs)
        return moved.data, moved.probs

    expected, actual = both(in_one, x, w, plan, probs)
    assert_same(both(in_two_steps, x, w, plan, probs), (expected, actual))
    # float32 sums in another order, then one rounding to bfloat16's 8 bits
    assert relative(actual[0], expected[0]) <= 2.0**-8


@only_on_cpu
def test_gathered_products_without_tokens(backend):
    plan = fp8moe.plan_topk(np.zeros((0, 2), np.int32), 2, num_out_tokens=40)
    x = fp8moe.QuantTensor(np.zeros((0, 128), np.uint8), np.zeros((0, 1), np.float32))
    w = fp8moe.quantize(values(RNG, (2, 24, 128)), block=(128, 128))
    expected, actual = backend.both(fp8moe.permute_gemm, x, w, plan, np.zeros((0, 2), np.float32))
    assert_same((expected.data, expected.probs), (actual.data, actual.probs))


@only_on_cpu
@pytest.mark.parametrize(
    ("gemm", "counts", "width", "depth", "fmts"),
    [
        ("wgmma", [128, 0, 256], 264, 144, ("e4m3", "e4m3")),
        ("wgmma", [384, 128], 520, 272, ("e5m2", "e4m3")),
        ("mma", [128, 0, 128], 140, 136, ("e4m3", "e5m2")),
        ("plain", [128, 0, 128], 20, 140, ("e5m2", "e4m3")),
        ("cublas", [128, 0, 256], 140, 40, ("e4m3", "e4m3")),
    ],
)
def test_wgrad_of_blocks(backend, gemm, counts, width, depth, fmts, blas):
    x, _, dy, offsets = random_operands(counts, width, depth, fmts)
    offsets[0] = 128 * (gemm == "wgmma")  # rows without an expert before the first one
    transposed = [fp8moe.scaling_aware_transpose(q, target="block") for q in (dy, x)]
    wgrad_agrees(backend, transposed, offsets, gemm)


@only_on_gpu
@pytest.mark.parametrize("gemm", ["plain", "mma", "wgmma", "cublas"])
@pytest.mark.parametrize("counts", [[128, 0, 256], [0, 0, 0], [2048, 128, 640], [4224, 384, 0]])
@pytest.mark.parametrize(("width", "depth"), [(200, 304), (1024, 1280), (1152, 1280)])
def test_wgrad_of_blocks_between_rows_of_nan(backend, counts, width, depth, gemm):
    backend.skip_without(gemm)
    rng = np.random.default_rng(24)
    offsets = (128 + np.concatenate(([0], np.cumsum(counts)))).astype(np.int32)
    x, dy = (
        fp8moe.quantize(values(rng, (int(offsets[-1]) + 48, n)), fmt=fmt)
        for n, fmt in ((depth, "e4m3"), (width, "e5m2"))
    )
    for q in (x, dy):  # NaN in rows without an expert
        q.data[:128] = q.data[offsets[-1] :] = 0x7F
    transposed = [fp8moe.scaling_aware_transpose(q, target="block") for q in (dy, x)]
    wgrad_agrees(backend, transposed, offsets, gemm)


@over(
    "width, depth, dtype, accumulate, device",
    # with 10 multiprocessors the last tiles are computed in halves
    on_cpu=[
        (*sizes, {"multiprocessors": count})
        for sizes in ((144, 264, np.float32, False), (40, 24, BF16, True), (264, 16, BF16, False))
        for count in (2, 10)
    ],
    on_gpu=[
        (*sizes, dtype, accumulate, {})
        for sizes in ((144, 264), (1024, 1288))
        for accumulate in (False, True)
        for dtype in (np.float32, BF16)
    ],
)
def test_wgrad_skips_padding(backend, monkeypatch, width, depth, dtype, accumulate, device):
    """tokens_per_expert gives the same bits as without, if padding is zeros; NaN in groups of 32 rows of
    padding, and behind the last expert, have no effect."""
    backend.skip_without("wgmma")
    backend.start(monkeypatch, **device)
    counts = np.array([0, 1, 32, 33, 64, 95, 128, 160, 289, 5, 0, 70], np.int32)
    held = -(-counts // 128) * 128
    held[9] = 384  # two blocks of padding
    held[-1] = 70  # the codes behind belong to no expert
    offsets = np.concatenate(([128], 128 + np.cumsum(held))).astype(np.int32)
    rows = int(offsets[-1]) + 26  # a multiple of 16
    real, skipped = np.zeros((2, rows), bool)
    for count, lo, hi in zip(counts, offsets, offsets[1:], strict=False):
        real[lo : lo + count] = True
        skipped[min(lo + -(-count // 32) * 32, hi) : hi] = True
    skipped[: offsets[0]] = skipped[offsets[-1] :] = True
    counts[[0, 6]] = -3, 1000  # as none, and as all of 128
    operands = []
    for n, fmt in ((width, "e4m3"), (depth, "e5m2")):
        a = np.where(real[:, None], RNG.standard_normal((rows, n)), 0).astype(np.float32)
        operands.append(fp8moe.scaling_aware_transpose(fp8moe.quantize(a, fmt=fmt), target="block"))
    into = RNG.standard_normal((len(counts), width, depth)).astype(dtype)

    def gradient(pair, **options):
        out = backend.upload(into.copy()) if accumulate else None
        pair, where = [backend.upload(q) for q in pair], backend.upload(offsets)
        options |= {} if accumulate else {"dtype": np.dtype(dtype).name}
        return backend.download(fp8moe.grouped_gemm_wgrad(*pair, where, out, backend="wgmma", **options))

    wanted = gradient(operands)
    assert np.isfinite(wanted.astype(np.float32)).all()
    assert same_bits(gradient(operands, tokens_per_expert=backend.upload(counts)), wanted)
    poisoned = [replace(q, data=np.where(skipped, np.uint8(0x7F), q.data)) for q in operands]
    assert np.isnan(gradient(poisoned).astype(np.float32)).any()
    assert same_bits(gradient(poisoned, tokens_per_expert=backend.upload(counts)), wanted)


@over(
    "counts, rows, width, depth",
    on_cpu=[([5, 130, 1, 200], 336, 144, 264)],
    on_gpu=[([5, 130, 1, 864], 1008, 520, 1280)],
)
def test_wgrad_accepts_any_scales(backend, counts, rows, width, depth):
    backend.skip_without("wgmma")
    offsets = offsets_of(counts)
    q = [fp8moe.quantize(RNG.standard_normal((rows, n)).astype(np.float32)) for n in (width, depth)]
    dy, x = (fp8moe.scaling_aware_transpose(a, offsets) for a in q)
    # scales far from 1 with the same products give bitwise equal gradients; some scales are not powers of
    # two; NaN appears only where expected

    def run(*operands):
        return backend.both(fp8moe.grouped_gemm_wgrad, *operands, offsets, backend="wgmma")

    def times(q, factor):
        return replace(q, scales=(q.scales * factor).astype(np.float32))

    _, plain = run(dy, x)
    for far in (2.0**-70, 2.0**70):
        assert_same(run(times(dy, far), times(x, 1 / far))[1], plain)
    odd = [np.where(RNG.random(q.scales.shape) < 0.01, 1.7, 1) for q in (dy, x)]
    arguments = [times(q, f) for q, f in zip((dy, x), odd, strict=True)]
    wanted, new = run(*arguments)
    assert relative(new, wanted) <= 2.0**-11  # the tensor cores' 14 bits
    arguments[0].scales[-1, 3] = np.nan  # a scale of the last block's rows, column 3
    _, new = run(*arguments)
    assert np.isnan(new[-1, 3]).all()
    assert not np.isnan(new[:-1]).any()
    assert not np.isnan(new[-1, :3]).any()


@only_on_cpu
def test_wgrad_where_some_experts_begin_at_no_multiple_of_16(backend, monkeypatch):
    """A block computes tiles loaded by TMA after tiles loaded without: the loading warp must not run
    ahead."""
    from fp8moe.kernels_cuda.runtime import driver

    x, _, dy, offsets = random_operands([8, 888] * 3, 24, 40, ("e4m3", "e4m3"))
    transposed = [fp8moe.scaling_aware_transpose(q, offsets) for q in (dy, x)]
    wanted = fp8moe.grouped_gemm_wgrad(*transposed, offsets)
    monkeypatch.setattr(driver, "multiprocessors", lambda device: 2)
    arguments = [backend.upload(a) for a in (*transposed, offsets)]
    new = backend.download(fp8moe.grouped_gemm_wgrad(*arguments, backend="wgmma"))
    assert relative(new, wanted) <= 1e-5


@only_on_gpu
@pytest.mark.parametrize("counts", [[8, 888] * 40, [9, 29, 92, 21, 46, 2, 89] * 40])
@pytest.mark.parametrize("num_sms", [2, None])
def test_wgrad_where_many_experts_begin_at_no_multiple_of_16(backend, num_sms, counts):
    """Tiles loaded by TMA after tiles loaded without it: the loading warp must stay in step with the
    others."""
    rng = np.random.default_rng(7)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    rows = (int(offsets[-1]) + 15) // 16 * 16
    q = [fp8moe.quantize(rng.standard_normal((rows, n)).astype(np.float32)) for n in (264, 520)]
    transposed = [fp8moe.scaling_aware_transpose(a, offsets) for a in q]
    wanted = fp8moe.grouped_gemm_wgrad(*transposed, offsets)
    arrays = [backend.upload(a) for a in (*transposed, offsets)]
    for _ in range(5):
        new = backend.download(fp8moe.grouped_gemm_wgrad(*arrays, num_sms=num_sms, backend="wgmma"))
        assert relative(new, wanted) <= 2.0**-11  # the tensor cores' 14 bits


@only_on_cpu
@pytest.mark.parametrize("offsets", [(9, 38, 130, 151, 197, 199), (51, 102, 193, 210, 262, 2**31 - 1)])
def test_wgrad_where_no_expert_begins_at_a_multiple_of_16(backend, offsets):
    """No tile is loaded by TMA; the warp that would issue the loads must not fall behind by a round of
    stages, which caused a deadlock."""
    offsets = np.array(offsets, np.int32)
    dy, x = (
        fp8moe.scaling_aware_transpose(fp8moe.quantize(values(RNG, (272, 128))), offsets) for _ in range(2)
    )
    for _ in range(10):  # in another thread order each time
        expected, actual = backend.both(fp8moe.grouped_gemm_wgrad, dy, x, offsets, backend="wgmma")
        assert relative(actual, expected) <= 1e-5


@over(
    "gemm, device",
    on_cpu=[("mma", {"architecture": chip}) for chip in ("sm_86", "sm_89", "sm_90a")],
    on_gpu=[("plain", {}), ("mma", {})],
)
def test_products_of_scales_far_apart(backend, monkeypatch, gemm, device):
    """Products of codes against float64, with scales that differ between steps by up to 2^80, some of them
    zero; NaN affects only the sums of its own lines."""
    backend.start(monkeypatch, **device)
    offsets, width, depth = np.array([0, 384, 512], np.int32), 136, 272
    spans = list(itertools.pairwise(offsets))

    def far(q):
        scales = np.exp2(RNG.integers(-40, 41, q.scales.shape)) * RNG.uniform(1, 2, q.scales.shape)
        near = RNG.random(len(scales)) < 0.3  # lines with similar scales in all steps
        scales[near] = RNG.uniform(1, 2, scales[near].shape)
        scales[RNG.random(scales.shape) < 0.03] = 0
        return replace(q, scales=scales.astype(np.float32))

    def wide(q):
        codes, scales = from_float8(q.data, q.fmt).astype(np.float64), q.scales.astype(np.float64)
        if q.block == (128, 1):
            scales = scales.T
        for axis in (-2, -1):
            block = 1 if codes.shape[axis] == scales.shape[axis] else 128
            scales = scales.repeat(block, axis).take(np.arange(codes.shape[axis]), axis)
        return codes * scales

    def check(got, pairs, terms, rounding):
        """got[i]: the product of pairs[i], each a sum of ``terms`` products."""
        # each addition has a relative error of at most 2^-23, with four additional roundings per step of 128
        bound = (terms + 4 * terms / 128) * 2.0**-23 + rounding
        for part, (a, b) in zip(got, pairs, strict=True):
            wanted, size = a @ b.T, np.abs(a) @ np.abs(b).T
            known = ~np.isnan(wanted)
            assert known.any()
            np.testing.assert_array_equal(np.isnan(part), ~known)
            assert (np.abs(part.astype(np.float64) - wanted) <= bound * size)[known].all()

    x, dy = (fp8moe.quantize(RNG.standard_normal((512, n)).astype(np.float32)) for n in (depth, width))
    w = far(fp8moe.quantize(RNG.standard_normal((2, width, depth)).astype(np.float32), block=(128, 128)))
    rows = far(x)
    rows.scales[7, 2] = np.nan
    rows.scales[9] = 0  # as of padding
    got = backend.download(fp8moe.grouped_gemm(*map(backend.upload, (rows, w, offsets)), backend=gemm))
    wide_rows, wide_w = wide(rows), wide(w)
    pairs = [(wide_rows[lo:hi], wide_w[e]) for e, (lo, hi) in enumerate(spans)]
    check([got[lo:hi] for lo, hi in spans], pairs, depth, 2.0**-8)
    for target in ({}, {"target": "block"}):
        operands = [
            far(fp8moe.scaling_aware_transpose(q, offsets, align_size=128, **target)) for q in (dy, x)
        ]
        operands[0].scales[1, 1] = np.nan
        got = backend.download(
            fp8moe.grouped_gemm_wgrad(*map(backend.upload, (*operands, offsets)), backend=gemm)
        )
        a, b = map(wide, operands)
        check(got, [(a[:, lo:hi], b[:, lo:hi]) for lo, hi in spans], 384, 0.0)


@over(
    "dtype, counts, width, depth, stages",
    on_cpu=[
        (BF16, [5, 0, 130], 264, 72, None),
        (np.dtype(np.float16), [70, 1, 64], 136, 200, 3),  # as with many experts
        (BF16, [0, 0], 8, 16, None),
    ],
    on_gpu=[
        (dtype, *sizes, None)
        for sizes in (
            ([128, 0, 256], 264, 144),
            ([5, 130, 1], 520, 1288),
            ([0, 0, 0], 64, 64),
            ([2000, 1, 700], 1024, 1280),
            ([4200, 300, 0], 1152, 72),
            ([640], 2048, 8),
            ([33] * 300, 256, 136),  # more experts than fit beside four stages
        )
        for dtype in (BF16, np.dtype(np.float16))
    ],
)
def test_products_of_16_bits_by_wgmma(backend, monkeypatch, dtype, counts, width, depth, stages):
    """Forward, dgrad and wgrad of bfloat16 or float16 against float64, with NaN in rows before the first and
    after the last expert."""
    from fp8moe.kernels_cuda.gemm import grouped_gemm_wgmma16

    backend.skip_without("wgmma")
    if stages:
        monkeypatch.setattr(grouped_gemm_wgmma16, "stages", lambda verb, experts: stages)
    offsets = (3 + np.concatenate(([0], np.cumsum(counts)))).astype(np.int32)
    shapes = (int(offsets[-1]) + 5, depth), (len(counts), width, depth), (int(offsets[-1]) + 5, width)
    x, w, dy = (RNG.standard_normal(shape).astype(dtype) for shape in shapes)
    for rows in (x, dy):
        rows[: offsets[0]] = rows[offsets[-1] :] = np.nan
    wide_x, wide_w, wide_dy = (a.astype(np.float64) for a in (x, w, dy))
    wanted, wanted_dx, wanted_dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    for e, (lo, hi) in enumerate(itertools.pairwise(offsets)):
        wanted[lo:hi] = wide_x[lo:hi] @ wide_w[e].T
        wanted_dx[lo:hi] = wide_dy[lo:hi] @ wide_w[e]
        wanted_dw[e] = wide_dy[lo:hi].T @ wide_x[lo:hi]
    # products are exact in float32; each addition has a relative error of at most 2^-23 of the sum so far,
    # which is on average below the final sum, and the result is rounded to 8 or 11 significant bits, with an
    # error below one unit of the last
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}
    bound = rounding[dtype.name] + max(width, depth) * 2.0**-23
    x, w, dy, offsets = map(backend.upload, (x, w, dy, offsets))
    for rows, product, transpose_w in ((x, wanted, False), (dy, wanted_dx, True)):
        got = backend.download(
            fp8moe.grouped_gemm(rows, w, offsets, transpose_w=transpose_w, backend="wgmma")
        )
        assert got.dtype == dtype
        assert relative(got, product) <= bound
    for out in ("float32", "bfloat16"):
        bound = rounding[out] + max(counts) * 2.0**-23
        got = backend.download(fp8moe.grouped_gemm_wgrad(dy, x, offsets, dtype=out, backend="wgmma"))
        assert got.dtype.name == out
        assert relative(got, wanted_dw) <= bound
        into = RNG.standard_normal(wanted_dw.shape).astype(got.dtype)
        added = fp8moe.grouped_gemm_wgrad(dy, x, offsets, backend.upload(into.copy()), backend="wgmma")
        added, total = backend.download(added), wanted_dw + into.astype(np.float64)
        assert relative(added, total) <= bound + rounding[out] / 2


@over(
    "counts, width, depth",
    reference=[([5, 0, 130], 264, 16)],
    on_cpu=[([5, 0, 130], 264, 16), ([3, 300], 72, 80), ([0, 0], 8, 16)],
    on_gpu=[
        ([128, 0, 256], 264, 16),
        ([5, 130, 1], 520, 24),
        ([2000, 1, 700], 1536, 256),
        ([33] * 300, 256, 16),
    ],
)
@pytest.mark.parametrize("transpose_w", [False, True])
def test_add_grouped_gemm(backend, counts, width, depth, transpose_w):
    """In place, rounded once, against float64; an infinity of out stays in its place, rows of no expert are
    zeros."""
    backend.skip_without("wgmma")
    offsets = (3 + np.concatenate(([0], np.cumsum(counts)))).astype(np.int32)
    rows = int(offsets[-1]) + 5
    shapes = (rows, width), (rows, depth), (len(counts), width, depth)
    addend, x, w = (RNG.standard_normal(shape).astype(BF16) for shape in shapes)
    addend[: offsets[0]] = addend[offsets[-1] :] = x[: offsets[0]] = x[offsets[-1] :] = np.nan
    exact, size = addend.astype(np.float64), np.abs(addend.astype(np.float64))
    for e, (lo, hi) in enumerate(itertools.pairwise(offsets)):
        wide_x, wide_w = x[lo:hi].astype(np.float64), w[e].astype(np.float64).T
        exact[lo:hi] += wide_x @ wide_w
        size[lo:hi] += np.abs(wide_x) @ np.abs(wide_w)
    odd = RNG.random(addend.shape) < 0.01
    odd[: offsets[0]] = odd[offsets[-1] :] = False
    addend[odd] = np.inf
    if transpose_w:
        w = np.ascontiguousarray(w.transpose(0, 2, 1))
    out, *operands = map(backend.upload, (addend, x, w, offsets))
    result = add_grouped_gemm(out, *operands, transpose_w=transpose_w)
    got = backend.download(result).astype(np.float64)
    assert np.isinf(got[odd]).all()
    own = np.zeros(addend.shape, bool)
    own[offsets[0] : offsets[-1]] = True
    assert not got[~own].any()
    # depth + 1 roundings to float32 of sums of at most the terms' magnitudes (tensor cores truncate: twice
    # the unit), and one to bfloat16
    bound = 2.0**-8 * np.abs(exact) + 2 * 2.0**-24 * (depth + 1) * size
    assert (np.abs(got - exact) <= bound)[own & ~odd].all()


@only_on_cpu
@pytest.mark.parametrize(
    ("dtype", "counts", "width", "depth"),
    [
        (BF16, [5, 0, 130], 272, 72),
        (np.float16, [200], 40, 136),
        (BF16, [3, 4], 21, 35),
        (BF16, [0, 0], 8, 16),
    ],
)
def test_products_of_16_bits_beside_rows_of_nan(backend, dtype, counts, width, depth):
    """mma.sync products with rows that have no expert, including NaN, before the first and after the last
    expert."""
    offsets = 2 + offsets_of(counts)
    rows, experts = int(offsets[-1]) + 7, len(counts)
    x, dy, w, wt = (
        RNG.standard_normal(shape).astype(dtype)
        for shape in ((rows, depth), (rows, width), (experts, width, depth), (experts, depth, width))
    )
    for a in (x, dy):
        a[:2] = a[offsets[-1] :] = np.nan
    for b, transpose_w in ((w, False), (wt, True)):
        expected, actual = backend.both(
            fp8moe.grouped_gemm, x, b, offsets, transpose_w=transpose_w, backend="mma"
        )
        # float32 sums in another order, then one rounding
        wide = [a.astype(np.float64) for a in (actual, expected)]  # squares of float16 would overflow
        assert relative(*wide) <= (2.0**-8 if dtype is BF16 else 2.0**-11)
        assert not actual[:2].any()
        assert not actual[offsets[-1] :].any()
    wgrad_agrees(backend, (dy, x), offsets, "mma")


@only_on_gpu
@pytest.mark.parametrize("gemm", ["plain", "mma", None])
@pytest.mark.parametrize("dtype", [BF16, np.float16])
@pytest.mark.parametrize("counts", [[128, 0, 256], [5, 130, 0], [0, 0, 0], [1000, 1, 700]])
@pytest.mark.parametrize(("width", "depth"), [(200, 304), (1024, 1280), (21, 35), (40, 30)])
def test_products_of_plain_arrays(backend, width, depth, counts, dtype, gemm):
    """Rows without an expert, including NaN, before the first and after the last expert."""
    rng = np.random.default_rng(5)
    offsets = 3 + np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    rows = int(offsets[-1]) + 6
    x, w, wt, dy = (
        rng.standard_normal(s).astype(dtype)
        for s in ((rows, depth), (3, width, depth), (3, depth, width), (rows, width))
    )
    for a in (x, dy):
        a[: offsets[0]] = a[offsets[-1] :] = np.nan
    # float32 sums in another order, then one rounding
    for b, transpose_w in ((w, False), (wt, True)):
        pair = backend.both(fp8moe.grouped_gemm, x, b, offsets, transpose_w=transpose_w, backend=gemm)
        assert_close(pair, 2.0**-8 if dtype is BF16 else 2.0**-11)
    wgrad_agrees(backend, (dy, x), offsets, gemm)


@only_on_gpu
@pytest.mark.parametrize("align_size", [1, 16, 128])
@pytest.mark.parametrize(("width", "depth"), [(256, 272), (520, 512), (2064, 144)])
def test_tiles_of_at_most_half_the_rows(backend, align_size, width, depth):
    """Last tiles of an expert with at most half a tile of rows use a smaller product: same bits, zeros in
    padding."""
    backend.skip_without("wgmma")
    rng = generator()
    counts = np.concatenate(
        (rng.integers(0, 400, 40), [0, 1, 63, 64, 65, 127, 128, 129, 192, 193, 256 + 64, 0])
    )
    padded = -(-counts // align_size) * align_size
    offsets = np.concatenate(([0], np.cumsum(padded))).astype(np.int32)
    real = np.concatenate([np.arange(p) < n for p, n in zip(padded, counts, strict=True)])
    x = rng.standard_normal((len(real) + 200, depth)).astype(BF16)
    x[: len(real)][~real] = 0
    w = rng.standard_normal((len(counts), width, depth)).astype(BF16)
    q, wq = fp8moe.quantize(backend.upload(x)), fp8moe.quantize(backend.upload(w), block=(128, 128))
    offsets, all_rows = backend.upload(offsets), backend.upload(counts.astype(np.int32))
    wanted = backend.download(fp8moe.grouped_gemm(q, wq, offsets, backend="plain"))
    got = [
        backend.download(fp8moe.grouped_gemm(q, wq, offsets, n, backend="wgmma")) for n in (None, all_rows)
    ]
    assert_same(got[1], got[0])
    # both round float32 sums of the same products in another order: a difference of one bfloat16 step
    assert relative(got[0], wanted.astype(np.float64)) < 2.0**-7
    assert not got[0][len(real) :].any()
    assert not got[0][: len(real)][~real].any()


@only_on_cpu
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89"])
def test_other_tensor_cores(backend, architecture):
    """Codes decoded by integer operations, in wide and narrow tiles, and codes multiplied directly."""
    formats = random.Random(f"{SEED} {architecture}").choice([("e4m3", "e4m3"), ("e5m2", "e4m3")])
    x, w, dy, offsets = random_operands([3, 130], 136, 144, formats)
    expected, actual = backend.both(fp8moe.grouped_gemm, x, w, offsets, architecture=architecture)
    assert relative(actual, expected) <= 2.0**-8
    transposed = [fp8moe.scaling_aware_transpose(q, offsets) for q in (dy, x)]
    expected, actual = backend.both(
        fp8moe.grouped_gemm_wgrad, *transposed, offsets, architecture=architecture
    )
    assert relative(actual, expected) <= 1e-5  # float32 sums in another order


@only_on_cpu
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_every_code_is_multiplied_exactly(backend, fmt, architecture):
    """Each code multiplied by one, including NaN, infinities and all subnormals."""
    codes = np.arange(256, dtype=np.uint8)
    x = fp8moe.QuantTensor(np.zeros((256, 128), np.uint8), np.ones((256, 1), np.float32), fmt, (1, 128))
    x.data[:, 5] = codes
    one = np.zeros((1, 8, 128), np.float32)
    one[0, :, 5] = 1
    w = fp8moe.quantize(one, block=(128, 128))
    expected, actual = backend.both(
        fp8moe.grouped_gemm, x, w, np.array([0, 256], np.int32), architecture=architecture, backend="mma"
    )
    np.testing.assert_array_equal(actual.astype(np.float32), expected.astype(np.float32))
    assert np.isnan(expected).any()


@only_on_cpu
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_weight_gradients_without_scales_are_nan(backend, monkeypatch, architecture):
    """Of experts whose last rows have no scales, because the operands were quantised without experts, or (one
    scale per block) whose first row shares a block with the expert before."""
    x, dy = (fp8moe.quantize(RNG.standard_normal((384, n)).astype(np.float32)) for n in (144, 264))
    for target, offsets in (("column", [0, 100, 200, 384]), ("block", [0, 100, 384])):
        operands = [fp8moe.scaling_aware_transpose(q, target=target) for q in (dy, x)]
        first = [replace(q, data=q.data[:, :100].copy()) for q in operands]  # the rows of the first expert
        if target == "block":
            first = [replace(q, scales=q.scales[:, :1].copy()) for q in first]
        wanted = fp8moe.grouped_gemm_wgrad(*first, np.array([0, 100], np.int32))
        with monkeypatch.context() as patch:
            backend.start(patch, architecture=architecture)
            arrays = [backend.upload(a) for a in (*operands, np.array(offsets, np.int32))]
            actual = backend.download(fp8moe.grouped_gemm_wgrad(*arrays, backend="mma"))
        assert relative(actual[:1], wanted) <= 1e-5  # float32 sums in another order
        assert np.isnan(actual[-1]).all()


@only_on_cpu
@pytest.mark.parametrize("gemm", [None, "wgmma", "mma", "plain"])
def test_products_without_experts(backend, gemm):
    """The driver rejects tensor maps of weights without elements."""
    x, w, offsets = values(RNG, (16, 128), BF16), values(RNG, (0, 128, 128), BF16), np.zeros(1, np.int32)
    q, codes = fp8moe.quantize(x), fp8moe.quantize(w, block=(128, 128))
    plan = fp8moe.plan_topk(np.full((16, 1), -1, np.int32), 0)
    for function, *arguments in (
        (fp8moe.grouped_gemm, x, w, offsets),
        (fp8moe.grouped_gemm, q, codes, offsets),
        (fp8moe.permute_gemm, q, codes, plan),
        (fp8moe.grouped_gemm_wgrad, x, x, offsets),
    ):
        assert_same(*backend.both(function, *arguments, backend=gemm))


@only_on_cpu
def test_products_unsupported_by_wgmma_use_mma(backend):
    x, w, _, offsets = random_operands([3, 4], 20, 128, ("e4m3", "e4m3"))
    with fp8moe.trace() as traced:
        assert relative(*backend.both(fp8moe.grouped_gemm, x, w, offsets)[::-1]) <= 2.0**-8
    assert traced.launches["grouped_gemm"] == 2
    with pytest.raises(ValueError, match=r"backend: got 'wgmma'.*N is 20, no multiple of 8"):
        backend.both(fp8moe.grouped_gemm, x, w, offsets, backend="wgmma")
    transposed = fp8moe.scaling_aware_transpose(x, offsets)
    odd = np.zeros(2 * 128 * 128 + 1, np.float32)[1:].reshape(2, 128, 128)  # not aligned to 16 bytes
    _, actual = backend.both(fp8moe.grouped_gemm_wgrad, transposed, transposed, offsets, odd)
    assert actual.any()


@only_on_cpu
def test_large_products_with_a_slow_kernel_raise_or_warn(backend, monkeypatch):
    grouped_gemm = importlib.import_module("fp8moe.kernels_cuda.grouped_gemm")
    monkeypatch.setattr(grouped_gemm, "MANY", 1000)
    x, w, _, offsets = random_operands([3, 4], 20, 128, ("e4m3", "e4m3"))
    with pytest.warns(RuntimeWarning, match=r"grouped_gemm: mma multiplies.*N is 20, no multiple of 8"):
        backend.both(fp8moe.grouped_gemm, x, w, offsets)
    backend.both(fp8moe.grouped_gemm, x, w, offsets, backend="mma")
    wide = np.ones((4, 16), np.float32), np.ones((1, 16, 16), np.float32), np.array([0, 4], np.int32)
    with pytest.raises(ValueError, match=r"backend: got None .*the operands are float32"):
        backend.both(fp8moe.grouped_gemm, *wide)
    assert_same(*backend.both(fp8moe.grouped_gemm, *wide, backend="plain"))


# ---------------------------------------------------------------- limits of multiprocessors


@only_on_cpu
def test_products_with_an_sm_limit(backend, monkeypatch):
    """Bitwise equal for any assignment of tiles; only kernels that distribute tiles dynamically support a
    limit."""
    from fp8moe.kernels_cuda.runtime import driver

    monkeypatch.setattr(driver, "multiprocessors", lambda device: 6)
    x, w, _, offsets = random_operands([5, 130, 1], 520, 144, ("e4m3", "e4m3"))
    arrays = [backend.upload(a) for a in (x, w, offsets)]
    wanted = backend.download(fp8moe.grouped_gemm(*arrays))
    for num_sms in (2, 4, 6):
        assert_same(backend.download(fp8moe.grouped_gemm(*arrays, num_sms=num_sms)), wanted)
    with pytest.raises(ValueError, match="num_sms: got 8; wanted an even number from 2 to 6"):
        fp8moe.grouped_gemm(*arrays, num_sms=8)
    for gemm in ("mma", "plain", "cublas"):
        with pytest.raises(ValueError, match=f"num_sms: got 4 for a product by '{gemm}'"):
            fp8moe.grouped_gemm(*arrays, backend=gemm, num_sms=4)


@only_on_cpu
def test_sm_limit_on_a_rank_without_rows(backend):
    """No products are computed, and the weight gradients are zeros."""
    x, w = values(RNG, (0, 128), BF16), values(RNG, (2, 128, 128), BF16)
    offsets = np.zeros(3, np.int32)
    for options in ({}, {"num_sms": 2}):
        with pytest.MonkeyPatch.context() as patch:
            backend.start(patch)
            arrays = [backend.upload(a) for a in (x, w, offsets)]
            fp8moe.grouped_gemm(*arrays, **options)
            dw = fp8moe.grouped_gemm_wgrad(arrays[0], arrays[0], arrays[2], **options)
            assert not backend.download(dw).any()


def fewer(divisor):
    """The device's number of multiprocessors over this divisor, as an even number."""
    import cupy

    return cupy.cuda.Device().attributes["MultiProcessorCount"] // divisor // 2 * 2


def products_of_wgmma(rng, counts, width, depth):
    """All wgmma products of some operands, FP8 and bfloat16, as a function of num_sms."""
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    x, dy = (rng.standard_normal((int(offsets[-1]), n)).astype(BF16) for n in (depth, width))
    w = rng.standard_normal((len(counts), width, depth)).astype(BF16)
    x, dy, w, offsets = map(GPU.upload, (x, dy, w, offsets))
    q, dq, wq = fp8moe.quantize(x), fp8moe.quantize(dy), fp8moe.quantize_weights(w)
    wgrad = [
        [fp8moe.scaling_aware_transpose(a, offsets) for a in (dq, q)],
        [fp8moe.scaling_aware_transpose(a, target="block") for a in (dq, q)],
        (dy, x),
    ]

    def run(num_sms=None):
        keywords = {"backend": "wgmma", "num_sms": num_sms}
        return (
            fp8moe.grouped_gemm(q, wq.rowwise, offsets, **keywords),
            fp8moe.grouped_gemm(dq, wq.columnwise, offsets, **keywords),
            fp8moe.grouped_gemm(x, w, offsets, **keywords),
            fp8moe.grouped_gemm(dy, w, offsets, transpose_w=True, **keywords),
            *(
                fp8moe.grouped_gemm_wgrad(*of, offsets, dtype=d, **keywords)
                for of in wgrad
                for d in ("float32", "bfloat16")
            ),
        )

    return run


@only_on_gpu
@pytest.mark.parametrize(
    ("counts", "width", "depth"),
    [([256, 0, 128, 640], 528, 272), ([128] * 40, 272, 144), ([0, 4096, 2048], 2064, 528)],
)
def test_products_with_sm_limits(backend, counts, width, depth):
    """Results are bitwise equal on all multiprocessors, on a few, and next to a kernel that occupies some;
    repeatedly, and in graphs."""
    backend.skip_without("wgmma")
    import cupy

    from benchmarks.beside import occupied

    run = products_of_wgmma(generator(), counts, width, depth)
    wanted = backend.download(run())
    for num_sms in (2, 4, 66, fewer(1)):
        assert_same(backend.download(run(num_sms)), wanted)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        run()
        stream.begin_capture()
        captured = [run(), run(8)]
        graph = stream.end_capture()
    for blocks, cluster in ((1, 1), (8, 4), (33, 1), (64, 1)):
        with occupied(blocks, cluster), cupy.cuda.Stream(non_blocking=True) as stream:
            actual = run()
            graph.launch(stream)
            stream.synchronize()
        for got in (actual, *captured):
            assert_same(backend.download(got), wanted)
            for a in got:
                a.view(np.uint8).fill(0)
        cupy.cuda.Device().synchronize()


@only_on_gpu
def test_products_on_several_streams_are_independent(backend):
    """Concurrent products on several streams, each with its own tile counter."""
    backend.skip_without("wgmma")
    import cupy

    run = products_of_wgmma(generator(), [640, 128, 0, 256], 1040, 272)
    wanted = backend.download(run())
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    actual = []
    cupy.cuda.Device().synchronize()
    for _ in range(5):
        for stream in streams:
            with stream:
                actual.append(run(24))
    cupy.cuda.Device().synchronize()
    for got in actual:
        assert_same(backend.download(got), wanted)


# ---------------------------------------------------------------- cuBLAS, in NumPy

CUBLAS = "fp8moe.kernels_cuda.gemm.cublas"


def column_major(address, dtype, rows, columns, stride):
    """A matrix as BLAS interprets memory."""
    memory = (ctypes.c_char * (((columns - 1) * stride + rows) * dtype.itemsize)).from_address(address)
    flat = np.frombuffer(memory, dtype)
    return np.lib.stride_tricks.as_strided(
        flat, (rows, columns), (dtype.itemsize, stride * dtype.itemsize), writeable=True
    )


class Blas:
    """The cuBLAS functions that cublas.py uses, in NumPy."""

    def gemmEx(self, handle, op_a, op_b, m, n, k, alpha, *rest):
        a, a_type, a_stride, b, b_type, b_stride, beta, c, c_type, c_stride, compute, algorithm = rest
        cublas = importlib.import_module(CUBLAS)
        dtypes = {code: dtype for dtype, code in cublas.TYPES.items()}
        assert (handle, compute, algorithm) == ("handle", 68, -1)
        x = column_major(a, dtypes[a_type], *((k, m) if op_a else (m, k)), a_stride).astype(np.float32)
        y = column_major(b, dtypes[b_type], *((n, k) if op_b else (k, n)), b_stride).astype(np.float32)
        out = column_major(c, dtypes[c_type], m, n, c_stride)
        scale, add = (ctypes.c_float.from_address(at).value for at in (alpha, beta))
        out[:] = scale * (x.T if op_a else x) @ (y.T if op_b else y) + (add * out if add else 0)


@pytest.fixture
def blas(monkeypatch):
    fake = types.SimpleNamespace(
        device=types.SimpleNamespace(get_cublas_handle=lambda: "handle"),
        Stream=types.SimpleNamespace(from_external=lambda stream: contextlib.nullcontext()),
    )
    cublas = pytest.importorskip(CUBLAS)
    monkeypatch.setattr(cublas, "cupy", types.SimpleNamespace(cuda=fake))
    monkeypatch.setattr(cublas, "library", Blas)


@only_on_cpu
@pytest.mark.parametrize("counts", [[16, 0, 32], [0, 48, 16]])
def test_cublas_backend_multiplies_expert_by_expert(backend, counts, blas):
    offsets = offsets_of([*counts, 0])
    rows, width, depth, experts = sum(counts) + 8, 40, 128, len(counts) + 1
    a, dy = (fp8moe.quantize(RNG.standard_normal((rows, n)).astype(BF16)) for n in (depth, width))
    w = RNG.standard_normal((experts, width, depth)).astype(np.float32)
    q = fp8moe.quantize(w, block=(128, 128))
    expected, theirs = backend.both(fp8moe.grouped_gemm, a, q, offsets, backend="cublas")
    assert relative(theirs, expected) < 2.0**-8  # two float32 sums, each rounded to bfloat16
    transposed = [fp8moe.scaling_aware_transpose(v, offsets) for v in (dy, a)]
    expected, theirs = backend.both(fp8moe.grouped_gemm_wgrad, *transposed, offsets, backend="cublas")
    assert relative(theirs, expected) < 1e-5
    x = RNG.standard_normal((rows, depth)).astype(np.float32)
    y = RNG.standard_normal((rows, width)).astype(np.float32)
    assert relative(*reversed(backend.both(fp8moe.grouped_gemm, x, w, offsets, backend="cublas"))) < 1e-5
    back = backend.both(fp8moe.grouped_gemm, y, w, offsets, backend="cublas", transpose_w=True)
    assert relative(*reversed(back)) < 1e-5
    into = RNG.standard_normal((experts, width, depth)).astype(np.float32)
    wanted = fp8moe.grouped_gemm_wgrad(y, x, offsets, into.copy())
    with pytest.MonkeyPatch.context() as patch:
        backend.start(patch)
        arguments = [backend.upload(v) for v in (y, x, offsets, into.copy())]
        actual = fp8moe.grouped_gemm_wgrad(*arguments, backend="cublas")
    assert relative(actual.host, wanted) < 1e-5
