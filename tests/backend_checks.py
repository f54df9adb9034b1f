"""Checks that compare two backends, used by the tests of the CPU harness and of the GPU:
``both(function, *arguments)`` returns the results of the reference and of the other backend."""

import itertools
from dataclasses import replace

import numpy as np
from cases import (
    BF16,
    assert_same,
    from_float8,
    layer_inputs,
    relative,
    same_bits,
    values,
)

import fp8moe


def wgrad_takes_any_scales(both, rng, offsets, dy, x):
    """Scales far from 1 with the same products give bitwise equal gradients; some scales are not powers of
    two; NaN appears only where expected. ``both`` returns the results of the reference and of the other
    backend."""

    def run(*operands):
        return both(fp8moe.grouped_gemm_wgrad, *operands, offsets, backend="wgmma")

    def times(q, factor):
        return replace(q, scales=(q.scales * factor).astype(np.float32))

    _, plain = run(dy, x)
    for far in (2.0**-70, 2.0**70):
        assert_same(run(times(dy, far), times(x, 1 / far))[1], plain)
    odd = [np.where(rng.random(q.scales.shape) < 0.01, 1.7, 1) for q in (dy, x)]
    arguments = [times(q, f) for q, f in zip((dy, x), odd, strict=True)]
    wanted, new = run(*arguments)
    assert relative(new, wanted) <= 2.0**-11  # the tensor cores' 14 bits, as in test_cuda.py
    arguments[0].scales[-1, 3] = np.nan  # a scale of the last block's rows, column 3
    _, new = run(*arguments)
    assert np.isnan(new[-1, 3]).all()
    assert not np.isnan(new[:-1]).any()
    assert not np.isnan(new[-1, :3]).any()


def wgrad_skips_padding(upload, download, rng, width, depth, dtype, accumulate):
    """tokens_per_expert gives the same bits as without, if padding is zeros; NaN in groups of 32 rows of
    padding, and behind the last expert, have no effect."""
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
        a = np.where(real[:, None], rng.standard_normal((rows, n)), 0).astype(np.float32)
        operands.append(fp8moe.scaling_aware_transpose(fp8moe.quantize(a, fmt=fmt), target="block"))
    into = rng.standard_normal((len(counts), width, depth)).astype(dtype)

    def gradient(pair, **options):
        out = upload(into.copy()) if accumulate else None
        pair, where = [upload(q) for q in pair], upload(offsets)
        options |= {} if accumulate else {"dtype": np.dtype(dtype).name}
        return download(fp8moe.grouped_gemm_wgrad(*pair, where, out, backend="wgmma", **options))

    wanted = gradient(operands)
    assert np.isfinite(wanted.astype(np.float32)).all()
    assert same_bits(gradient(operands, tokens_per_expert=upload(counts)), wanted)
    poisoned = [replace(q, data=np.where(skipped, np.uint8(0x7F), q.data)) for q in operands]
    assert np.isnan(gradient(poisoned).astype(np.float32)).any()
    assert same_bits(gradient(poisoned, tokens_per_expert=upload(counts)), wanted)


def products_of_16_bits(upload, download, rng, dtype, counts, width, depth, backend):
    """Forward, dgrad and wgrad of bfloat16 or float16 against float64, with NaN in rows before the first and
    after the last expert."""
    offsets = (3 + np.concatenate(([0], np.cumsum(counts)))).astype(np.int32)
    shapes = (int(offsets[-1]) + 5, depth), (len(counts), width, depth), (int(offsets[-1]) + 5, width)
    x, w, dy = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
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
    x, w, dy, offsets = map(upload, (x, w, dy, offsets))
    for rows, product, transpose_w in ((x, wanted, False), (dy, wanted_dx, True)):
        got = download(fp8moe.grouped_gemm(rows, w, offsets, transpose_w=transpose_w, backend=backend))
        assert got.dtype == dtype
        assert relative(got, product) <= bound
    for out in ("float32", "bfloat16"):
        bound = rounding[out] + max(counts) * 2.0**-23
        got = download(fp8moe.grouped_gemm_wgrad(dy, x, offsets, dtype=out, backend=backend))
        assert got.dtype.name == out
        assert relative(got, wanted_dw) <= bound
        into = rng.standard_normal(wanted_dw.shape).astype(got.dtype)
        added = fp8moe.grouped_gemm_wgrad(dy, x, offsets, upload(into.copy()), backend=backend)
        assert relative(download(added), wanted_dw + into.astype(np.float64)) <= bound + rounding[out] / 2


def products_of_scales_far_apart(upload, download, rng, backend):
    """Products of codes against float64, with scales that differ between steps by up to 2^80, some of them
    zero; NaN affects only the sums of its own lines."""
    offsets, width, depth = np.array([0, 384, 512], np.int32), 136, 272
    spans = list(itertools.pairwise(offsets))

    def far(q):
        scales = np.exp2(rng.integers(-40, 41, q.scales.shape)) * rng.uniform(1, 2, q.scales.shape)
        near = rng.random(len(scales)) < 0.3  # lines with similar scales in all steps
        scales[near] = rng.uniform(1, 2, scales[near].shape)
        scales[rng.random(scales.shape) < 0.03] = 0
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

    x, dy = (fp8moe.quantize(rng.standard_normal((512, n)).astype(np.float32)) for n in (depth, width))
    w = far(fp8moe.quantize(rng.standard_normal((2, width, depth)).astype(np.float32), block=(128, 128)))
    rows = far(x)
    rows.scales[7, 2] = np.nan
    rows.scales[9] = 0  # as of padding
    got = download(fp8moe.grouped_gemm(*map(upload, (rows, w, offsets)), backend=backend))
    wide_rows, wide_w = wide(rows), wide(w)
    pairs = [(wide_rows[lo:hi], wide_w[e]) for e, (lo, hi) in enumerate(spans)]
    check([got[lo:hi] for lo, hi in spans], pairs, depth, 2.0**-8)
    for target in ({}, {"target": "block"}):
        operands = [
            far(fp8moe.scaling_aware_transpose(q, offsets, align_size=128, **target)) for q in (dy, x)
        ]
        operands[0].scales[1, 1] = np.nan
        got = download(fp8moe.grouped_gemm_wgrad(*map(upload, (*operands, offsets)), backend=backend))
        a, b = map(wide, operands)
        check(got, [(a[:, lo:hi], b[:, lo:hi]) for lo, hi in spans], 384, 0.0)


def gradients_apart(both, ffn):
    """Gradients of w1, w3 and padded w2: bitwise equal to those of w13 in one tensor, both new and
    accumulated."""
    inputs, dy = layer_inputs(9, ffn=256)
    w13 = inputs.pop("w13")
    w1, w3 = (np.ascontiguousarray(w13[:, first : first + ffn]) for first in (0, 256))
    w2 = np.ascontiguousarray(inputs.pop("w2")[:, :, :ffn])

    def run(x, ids, probs, w1, w3, w2, dy, *into):
        # accumulated in place, so each backend gets copies
        into = [a.copy() if isinstance(a, np.ndarray) else a for a in into]
        w13, w2 = fp8moe.quantize_weights((w1, w3), rows=128), fp8moe.quantize_weights(w2, columns=128)
        _, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow")
        whole = fp8moe.moe_backward(saved, dy)
        keywords = {} if ffn == 128 else {"ffn": ffn}
        apart = fp8moe.moe_backward(saved, dy, dw13=(None, None), **keywords)
        added = fp8moe.moe_backward(saved, dy, dw13=tuple(into[:2]), dw2=into[2], **keywords)
        return whole.dw13, whole.dw2, *apart.dw13, apart.dw2, *added.dw13, added.dw2

    into = [np.ones(w.shape, np.float32) for w in (w1, w3, w2)]
    _, (dw13, dw2, *actual) = both(run, *inputs.values(), w1, w3, w2, dy, *into)
    wanted = dw13[:, :ffn], dw13[:, 128 : 128 + ffn], dw2[:, :, :ffn]
    for apart, added, true in zip(actual[:3], actual[3:], wanted, strict=True):
        assert same_bits(apart, true)
        np.testing.assert_allclose(added, 1 + true, rtol=2.0**-22)


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
