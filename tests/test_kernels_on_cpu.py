"""The CUDA backend compared with the reference without a GPU; `cuda_on_cpu` documents the method and its
limits."""

import collections
import contextlib
import ctypes
import functools
import random
import threading
import types
from dataclasses import replace

import cuda_on_cpu
import numpy as np
import pytest
import router_checks
from backend_checks import (
    gathered_products,
    messages,
    products_of_16_bits,
    products_of_scales_far_apart,
    rest_stays,
    rows_without_room_are_left_out,
    wgrad_skips_padding,
    wgrad_takes_any_scales,
)
from cases import (
    BF16,
    SEED,
    assert_same,
    generator,
    offsets_of,
    relative,
    values,
)

import fp8moe
from fp8moe import expert_parallel, selftest
from fp8moe.ops import row_maps
from fp8moe.ops.router import add_product
from fp8moe.runtime import dispatch
from fp8moe.runtime.recording import Recording

pytest.importorskip("cupy")
grouped_gemm = pytest.importorskip("fp8moe.kernels_cuda.grouped_gemm")
cublas = pytest.importorskip("fp8moe.kernels_cuda.gemm.cublas")
pytestmark = pytest.mark.skipif(not cuda_on_cpu.available, reason="needs g++")
RNG = generator()


def both(function, *arguments, architecture="sm_90a", multiprocessors=2, **options):
    """(the reference's result, the CUDA backend's result)."""
    expected = function(*arguments, **{k: v for k, v in options.items() if k != "backend"})
    with pytest.MonkeyPatch.context() as patch:
        cuda_on_cpu.install(patch, architecture=architecture, multiprocessors=multiprocessors)
        uploaded = [cuda_on_cpu.upload(a) for a in arguments]
        actual = function(*uploaded, **{k: cuda_on_cpu.upload(v) for k, v in options.items()})
        return expected, cuda_on_cpu.download(actual)


def a_plan(tokens, experts, k, align, by_mask=False):
    ids = RNG.integers(-1, experts, (tokens, k)).astype(np.int32)
    if not by_mask:
        return fp8moe.plan_topk(ids, experts, align_size=align)
    mask = np.zeros((tokens, experts), bool)
    for t, row in enumerate(ids):
        mask[t, row[row >= 0]] = True
    return fp8moe.plan_routing_map(mask, align_size=align, topk=k)


@pytest.mark.parametrize("by_mask", [False, True])
@pytest.mark.parametrize("columns", [6200, 520, 24, 5])
def test_permute_and_unpermute(by_mask, columns):
    rows_there_and_back(a_plan(21, 5, 3, 4, by_mask), columns)


@pytest.mark.parametrize("columns", [600, 5])
def test_permute_with_more_experts_than_a_block_caches(columns):
    mask = RNG.random((5, 150)) < RNG.random((5, 1))
    mask[2] = True
    rows_there_and_back(fp8moe.plan_routing_map(mask, align_size=4, topk=150), columns)


def test_more_experts_of_a_token_than_a_warp_and_columns_than_a_block_handle_at_once():
    mask = RNG.random((3, 230)) < 0.95
    rows_there_and_back(fp8moe.plan_routing_map(mask, align_size=4, topk=230), 1100)


def test_rows_of_a_plan_without_entries():
    plan = fp8moe.plan_topk(np.full((3, 2), -1, np.int32), 4, align_size=4, num_out_tokens=7)
    rows_there_and_back(plan, 520)


@pytest.mark.parametrize("experts", [1, 5, 150, 1300])
def test_plans_of_row_maps(experts):
    plan = fp8moe.plan_routing_map(RNG.random((19, experts)) < 0.4, align_size=4)
    for pads in (plan.pad_offsets, None):
        assert_same(*both(lambda m, p: fp8moe.plan_row_map(m, p, num_out_tokens=9), plan.row_id_map, pads))


@pytest.mark.parametrize("topk", [1, 3, 40])
def test_plans_of_index_maps(topk):
    rows = RNG.permutation(21 * topk).astype(np.int32)
    rows[RNG.random(rows.size) < 0.3] = -1
    rows[-2:] = 5  # a row that two entries refer to
    options = {"num_out_tokens": rows.size}
    assert_same(*both(lambda m: fp8moe.plan_index_map(m, topk, **options), rows))
    order = RNG.permutation(21 * topk)
    for dtype in (np.int32, np.int64):
        ids = RNG.integers(-2, 5, (21, topk)).astype(dtype)
        assert_same(*both(lambda o, i: row_maps.index_map(o, i, 17 * topk), order, ids))


@pytest.mark.parametrize("columns", [6200, 520, 5])
@pytest.mark.parametrize("by_mask", [False, True])
def test_rows_of_probabilities_of_zero(by_mask, columns):
    plan = a_plan(21, 5, 3, 4, by_mask)
    x = values(RNG, (21, columns), BF16)
    probs = RNG.random((21, plan.prob_columns)).astype(np.float32)
    probs[RNG.random(probs.shape) < 0.4] = 0
    probs[RNG.random(probs.shape) < 0.2] = -(2.0**-149)  # not zero
    probs[0] = -0.0

    def moved(x, p, w):
        return cut(fp8moe.permute(x, p, w, zero_unweighted=True))

    for dtype in (np.float32, BF16, np.float64):
        assert_same(*both(moved, x, plan, probs.astype(dtype)))
    q = fp8moe.quantize(values(RNG, (21, 128 * (columns // 128 + 1)), BF16))
    assert_same(*both(moved, q, plan, probs))


def test_rows_of_probabilities_of_zero_without_room_for_a_row():
    """One scale per tensor, which is copied even if there are no rows."""
    plan = fp8moe.plan_topk(np.zeros((3, 1), np.int32), 1, num_out_tokens=0)
    q = fp8moe.quantize(values(RNG, (3, 128), BF16), block=None)
    probs = np.zeros((3, 1), np.float32)
    assert_same(*both(lambda q, p, w: cut(fp8moe.permute(q, p, w, zero_unweighted=True)), q, plan, probs))


def test_row_maps_that_no_plan_produces():
    """Invalid expert ids, and a count beyond the map's width, do not lead to other accesses."""
    row_map = RNG.integers(-9, 9, (30, 11)).astype(np.int32)
    assert_same(*both(lambda m: fp8moe.plan_row_map(m, num_out_tokens=9), row_map))


def test_entries_after_a_tokens_last_one_are_no_rows():
    """Whether they look like rows or like nothing."""
    plan = fp8moe.plan_routing_map(RNG.random((21, 5)) < 0.5, align_size=4)
    row_map = plan.row_id_map.copy()
    for entries in row_map:
        unused = np.arange(entries[10], 5)
        entries[unused] = RNG.choice([0, 7, -1, 2**31 - 1, -(2**31)], unused.size)
        entries[5 + unused] = RNG.choice([0, 4, 5, 2**31 - 1, -(2**31)], unused.size)
    assert (row_map[:, 10] < 5).any()

    def there_and_back(m, pads, x, probs):
        again = fp8moe.plan_row_map(m, pads, num_out_tokens=rows)
        return fp8moe.unpermute(x, again), fp8moe.permute_backward(x, again, probs)

    rows = plan.num_out_tokens
    x, probs = values(RNG, (rows, 520), BF16), RNG.random(rows).astype(np.float32)
    assert_same(*both(there_and_back, row_map, plan.pad_offsets, x, probs))


def rows_there_and_back(plan, columns):
    x = values(RNG, (plan.num_tokens, columns), BF16)
    rows = values(RNG, (plan.num_out_tokens, columns), BF16)
    probs = RNG.random((plan.num_tokens, plan.prob_columns)).astype(np.float32)
    grads = RNG.random(plan.num_out_tokens).astype(np.float32)
    assert_same(*both(lambda x, p, w: cut(fp8moe.permute(x, p, w)), x, plan, probs))
    assert_same(*both(fp8moe.unpermute, rows, plan, probs))
    assert_same(*both(fp8moe.unpermute, rows, plan))
    for dtype in (np.float32, BF16, np.float64):
        assert_same(*both(fp8moe.permute_backward, rows, plan, grads.astype(dtype)))
    expected, actual = both(fp8moe.unpermute_backward, x, plan, rows, probs)
    assert_same(expected[0], actual[0])
    # at most 32 products in float32 before float64, of magnitudes up to 2^16 here
    bound = 32 * 2.0**-24 * np.sqrt(columns) * 2.0**16
    np.testing.assert_allclose(actual[1], expected[1], rtol=2.0**-22, atol=bound)


@pytest.mark.parametrize("columns", [512, 6200])
def test_padding_is_zeros_where_there_are_no_bulk_copies(columns):
    """Below compute capability 9.0 there are no bulk copies from shared memory; zeros are written
    differently."""
    plan = a_plan(21, 5, 3, 16)
    x = values(RNG, (21, columns), BF16)
    assert_same(*both(lambda x, p: cut(fp8moe.permute(x, p)), x, plan, architecture="sm_80"))


def cut(moved):
    """The result without its plan."""
    return moved.data, moved.probs


@pytest.mark.parametrize("columns", [512, 20_000])
def test_scales_and_pieces(columns):
    plan = a_plan(9, 4, 2, 16)
    q = fp8moe.quantize(values(RNG, (9, columns - columns % 128), BF16))
    assert_same(*both(lambda q, p: cut(fp8moe.permute(q, p)), q, plan))
    x = values(RNG, (9, columns), BF16)
    assert_same(*both(lambda x, p: cut(fp8moe.permute(x, p)), x, plan))


@pytest.mark.parametrize(
    ("chunks", "columns"), [(1, 64), (7, 1024), (12, 256), (8, 9216), (9, 3), (70, 64), (600, 16)]
)
def test_chunks(chunks, columns):
    sizes = RNG.integers(0, 6, chunks) * (RNG.random(chunks) < 0.7)
    order = RNG.permutation(chunks).astype(np.int32)
    x = values(RNG, (int(sizes.sum()) + 3, columns), BF16)
    probs = RNG.random(len(x)).astype(np.float32)
    for align in (1, 8):
        expected, actual = both(fp8moe.sort_chunks, x, sizes, order, probs, align_size=align)
        assert_same(expected, actual)
        options = {"align_size": align, "num_tokens": len(x)}
        assert_same(
            *both(fp8moe.sort_chunks_backward, expected.data, sizes, order, expected.probs, **options)
        )
        assert_same(*both(fp8moe.pad, x, sizes, align))
        assert_same(*both(fp8moe.unpad, expected.data, sizes, align))
    q = fp8moe.quantize(values(RNG, (int(sizes.sum()), 512), BF16))
    if q.data.size:
        assert_same(*both(fp8moe.sort_chunks, q, sizes, order))


@pytest.mark.parametrize("columns", [256, 3])
def test_chunks_without_room(monkeypatch, columns):
    cuda_on_cpu.install(monkeypatch)
    sizes, order = np.array([5, 0, 7, 4], np.int32), np.array([2, 0, 3, 1], np.int32)
    x = values(RNG, (18, columns), BF16)
    for rows in (x, fp8moe.quantize(x)):
        rows_without_room_are_left_out(cuda_on_cpu.upload, cuda_on_cpu.download, rows, sizes, order)
        rest_stays(cuda_on_cpu.upload, cuda_on_cpu.download, rows, sizes, order)


def test_calls_on_results_of_recordings(monkeypatch):
    """Several calls share one plan."""
    transpose = fp8moe.scaling_aware_transpose
    inputs = [values(RNG, (40, 256), BF16) for _ in range(5)]
    wanted = [transpose(fp8moe.quantize(x)) for x in inputs]
    cuda_on_cpu.install(monkeypatch)
    dispatch.clear_recordings()
    for x, transposed in zip(inputs, wanted, strict=True):
        q = fp8moe.quantize(cuda_on_cpu.upload(x))
        assert_same(transposed, cuda_on_cpu.download(transpose(q)))
    assert len(dispatch.cached_recordings()) == 2


def wgrad_agrees(transposed, offsets, backend):
    """New and accumulated gradients, in both dtypes."""
    for dtype, bound in (("float32", 1e-5), ("bfloat16", 2.0**-8)):
        new = both(fp8moe.grouped_gemm_wgrad, *transposed, offsets, backend=backend, dtype=dtype)
        assert relative(*new[::-1]) <= bound
        assert new[1].dtype.name == dtype
        into = RNG.standard_normal(new[0].shape).astype(new[0].dtype)
        expected = fp8moe.grouped_gemm_wgrad(*transposed, offsets, into.copy())
        with pytest.MonkeyPatch.context() as patch:
            cuda_on_cpu.install(patch)
            arguments = [cuda_on_cpu.upload(a) for a in (*transposed, offsets, into)]
            actual = fp8moe.grouped_gemm_wgrad(*arguments, backend=backend)
        assert relative(cuda_on_cpu.download(actual), expected) <= bound


class OnHarness:
    """The parts of CuPy that `selftest.cuda.CudaCheck` uses, for kernels that run on the CPU."""

    asarray, asnumpy = staticmethod(cuda_on_cpu.upload), staticmethod(cuda_on_cpu.download)


@pytest.mark.parametrize("wrong", [None, "wgmma", "mma", "plain"])
def test_cuda_selftest_of_products_detects_a_wrong_backend(monkeypatch, wrong):
    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(selftest.cuda, "PRODUCT_ROWS", 144)
    make = grouped_gemm.grouped_gemm_wgrad

    def broken(dy, x, *arguments, backend, **options):
        operands = (x, dy) if backend == wrong else (dy, x)  # the gradient's transpose
        make(*operands, *arguments, backend=backend, **options)

    monkeypatch.setattr(grouped_gemm, "grouped_gemm_wgrad", broken)
    check = selftest.cuda.CudaCheck(OnHarness, [selftest.Inputs(int(RNG.integers(2**32)))])
    if wrong is None:
        check.checks()["grouped products"]()
    else:
        with pytest.raises(ValueError, match=f"wgrad of .* by '{wrong}'.*relative error"):
            check.checks()["grouped products"]()


def test_wgrad_where_some_experts_begin_at_no_multiple_of_16(monkeypatch):
    """A block computes tiles loaded by TMA after tiles loaded without: the loading warp must not run
    ahead."""
    from fp8moe.kernels_cuda.runtime import driver

    x, _, dy, offsets = random_operands([8, 888] * 3, 24, 40, ("e4m3", "e4m3"))
    transposed = [fp8moe.scaling_aware_transpose(q, offsets) for q in (dy, x)]
    wanted = fp8moe.grouped_gemm_wgrad(*transposed, offsets)
    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(driver, "multiprocessors", lambda device: 2)
    arguments = [cuda_on_cpu.upload(a) for a in (*transposed, offsets)]
    new = cuda_on_cpu.download(fp8moe.grouped_gemm_wgrad(*arguments, backend="wgmma"))
    assert relative(new, wanted) <= 1e-5


@pytest.mark.parametrize("offsets", [(9, 38, 130, 151, 197, 199), (51, 102, 193, 210, 262, 2**31 - 1)])
def test_wgrad_where_no_expert_begins_at_a_multiple_of_16(offsets):
    """No tile is loaded by TMA; the warp that would issue the loads must not fall behind by a round of
    stages, which caused a deadlock."""
    offsets = np.array(offsets, np.int32)
    dy, x = (
        fp8moe.scaling_aware_transpose(fp8moe.quantize(values(RNG, (272, 128))), offsets) for _ in range(2)
    )
    for _ in range(10):  # in another thread order each time
        expected, actual = both(fp8moe.grouped_gemm_wgrad, dy, x, offsets, backend="wgmma")
        assert relative(actual, expected) <= 1e-5


def random_operands(counts, width, depth, fmts):
    offsets = offsets_of(counts)
    rows = (int(offsets[-1]) // 16 + 1) * 16
    x, dy = (
        fp8moe.quantize(values(RNG, (rows, n)), fmt=f) for n, f in zip((depth, width), fmts, strict=True)
    )
    w = fp8moe.quantize(values(RNG, (len(counts), width, depth)), block=(128, 128))
    x.data[offsets[-1] :] = dy.data[offsets[-1] :] = 0x7F  # NaN after the last expert
    return x, w, dy, offsets


@pytest.mark.parametrize(
    ("backend", "counts", "width", "depth", "fmts"),
    [
        ("wgmma", [128, 0, 256], 264, 144, ("e4m3", "e4m3")),
        ("wgmma", [5, 130, 1], 520, 272, ("e5m2", "e4m3")),
        ("wgmma", [0, 0], 8, 16, ("e4m3", "e5m2")),
        ("wgmma", [300], 24, 640, ("e5m2", "e5m2")),
        ("wgmma", [3, 0, 0, 0, 0, 1, 0, 300, 5], 264, 752, ("e4m3", "e4m3")),
        ("mma", [5, 130, 1], 136, 144, ("e5m2", "e4m3")),
        ("plain", [5, 0, 30], 20, 40, ("e5m2", "e4m3")),
    ],
)
def test_grouped_gemm(backend, counts, width, depth, fmts):
    x, w, dy, offsets = random_operands(counts, width, depth, fmts)
    # float32 sums in another order, then one rounding to bfloat16's 8 bits
    for a in (x, fp8moe.to_layout(x, "gemm_ready")):
        pair = both(fp8moe.grouped_gemm, a, w, offsets, backend=backend)
        assert relative(*pair[::-1]) <= 2.0**-8
        assert not pair[1][offsets[-1] :].astype(np.float32).any()
    transposed = [fp8moe.scaling_aware_transpose(q, offsets) for q in (dy, x)]
    wgrad_agrees(transposed, offsets, backend)


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "width", "depth", "align_size", "options"),
    [
        (40, 3, 2, 264, 272, 128, {}),
        (200, 2, 2, 136, 144, 128, {"fmts": ("e5m2", "e4m3")}),
        (70, 4, 3, 520, 640, 16, {"spare": 50, "fmts": ("e4m3", "e5m2")}),
        (30, 2, 1, 24, 512, 1, {"spare": -140}),
        (150, 9, 1, 24, 768, 128, {}),
        (1, 1, 1, 8, 16, 128, {}),
    ],
)
def test_gathered_products(tokens, experts, topk, width, depth, align_size, options):
    """Half tiles, pairs side by side, scales loaded for one, two or four K-steps at a time, dropped rows, and
    rows past the last expert."""
    gathered_products(both, RNG, tokens, experts, topk, width, depth, align_size, **options)


def test_gathered_products_without_tokens():
    plan = fp8moe.plan_topk(np.zeros((0, 2), np.int32), 2, num_out_tokens=40)
    x = fp8moe.QuantTensor(np.zeros((0, 128), np.uint8), np.zeros((0, 1), np.float32))
    w = fp8moe.quantize(values(RNG, (2, 24, 128)), block=(128, 128))
    expected, actual = both(fp8moe.permute_gemm, x, w, plan, np.zeros((0, 2), np.float32))
    assert_same((expected.data, expected.probs), (actual.data, actual.probs))


def test_gathered_products_of_other_backends():
    with_mma = functools.partial(both, architecture="sm_89")
    gathered_products(with_mma, RNG, 40, 3, 2, 40, 144, 16)


@pytest.mark.parametrize(
    ("backend", "counts", "width", "depth", "fmts"),
    [
        ("wgmma", [128, 0, 256], 264, 144, ("e4m3", "e4m3")),
        ("wgmma", [384, 128], 520, 272, ("e5m2", "e4m3")),
        ("mma", [128, 0, 128], 140, 136, ("e4m3", "e5m2")),
        ("plain", [128, 0, 128], 20, 140, ("e5m2", "e4m3")),
        ("cublas", [128, 0, 256], 140, 40, ("e4m3", "e4m3")),
    ],
)
def test_wgrad_of_blocks(backend, counts, width, depth, fmts, blas):
    x, _, dy, offsets = random_operands(counts, width, depth, fmts)
    offsets[0] = 128 * (backend == "wgmma")  # rows without an expert before the first one
    transposed = [fp8moe.scaling_aware_transpose(q, target="block") for q in (dy, x)]
    wgrad_agrees(transposed, offsets, backend)


@pytest.mark.parametrize(
    ("width", "depth", "dtype", "accumulate"),
    [(144, 264, np.float32, False), (40, 24, BF16, True), (264, 16, BF16, False)],
)
@pytest.mark.parametrize("multiprocessors", [2, 10])  # with 10 the last tiles are computed in halves
def test_wgrad_skips_padding(monkeypatch, multiprocessors, width, depth, dtype, accumulate):
    cuda_on_cpu.install(monkeypatch, multiprocessors=multiprocessors)
    move = cuda_on_cpu.upload, cuda_on_cpu.download
    wgrad_skips_padding(*move, RNG, width, depth, dtype, accumulate)


def test_wgrad_accepts_any_scales():
    offsets = offsets_of([5, 130, 1, 200])
    x, dy = (fp8moe.quantize(RNG.standard_normal((336, n)).astype(np.float32)) for n in (144, 264))
    transposed = [fp8moe.scaling_aware_transpose(q, offsets) for q in (dy, x)]
    wgrad_takes_any_scales(both, RNG, offsets, *transposed)


@pytest.mark.parametrize(
    ("dtype", "counts", "width", "depth"),
    [
        (BF16, [5, 0, 130], 272, 72),
        (np.float16, [200], 40, 136),
        (BF16, [3, 4], 21, 35),
        (BF16, [0, 0], 8, 16),
    ],
)
def test_grouped_gemm_of_16_bits(dtype, counts, width, depth):
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
        expected, actual = both(fp8moe.grouped_gemm, x, b, offsets, transpose_w=transpose_w, backend="mma")
        # float32 sums in another order, then one rounding
        wide = [a.astype(np.float64) for a in (actual, expected)]  # squares of float16 would overflow
        assert relative(*wide) <= (2.0**-8 if dtype is BF16 else 2.0**-11)
        assert not actual[:2].any()
        assert not actual[offsets[-1] :].any()
    wgrad_agrees((dy, x), offsets, "mma")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89"])
def test_grouped_gemm_on_other_tensor_cores(architecture):
    """Codes decoded by integer operations, in wide and narrow tiles, and codes multiplied directly."""
    formats = random.Random(f"{SEED} {architecture}").choice([("e4m3", "e4m3"), ("e5m2", "e4m3")])
    x, w, dy, offsets = random_operands([3, 130], 136, 144, formats)
    expected, actual = both(fp8moe.grouped_gemm, x, w, offsets, architecture=architecture)
    assert relative(actual, expected) <= 2.0**-8
    transposed = [fp8moe.scaling_aware_transpose(q, offsets) for q in (dy, x)]
    expected, actual = both(fp8moe.grouped_gemm_wgrad, *transposed, offsets, architecture=architecture)
    assert relative(actual, expected) <= 1e-5  # float32 sums in another order


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_every_code_is_multiplied_exactly(fmt, architecture):
    """Each code multiplied by one, including NaN, infinities and all subnormals."""
    codes = np.arange(256, dtype=np.uint8)
    x = fp8moe.QuantTensor(np.zeros((256, 128), np.uint8), np.ones((256, 1), np.float32), fmt, (1, 128))
    x.data[:, 5] = codes
    one = np.zeros((1, 8, 128), np.float32)
    one[0, :, 5] = 1
    w = fp8moe.quantize(one, block=(128, 128))
    expected, actual = both(
        fp8moe.grouped_gemm, x, w, np.array([0, 256], np.int32), architecture=architecture, backend="mma"
    )
    np.testing.assert_array_equal(actual.astype(np.float32), expected.astype(np.float32))
    assert np.isnan(expected).any()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_weight_gradients_without_scales_are_nan(monkeypatch, architecture):
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
            cuda_on_cpu.install(patch, architecture=architecture)
            arrays = [cuda_on_cpu.upload(a) for a in (*operands, np.array(offsets, np.int32))]
            actual = cuda_on_cpu.download(fp8moe.grouped_gemm_wgrad(*arrays, backend="mma"))
        assert relative(actual[:1], wanted) <= 1e-5  # float32 sums in another order
        assert np.isnan(actual[-1]).all()


@pytest.mark.parametrize("sizes", router_checks.SUMS, ids=str)
@pytest.mark.parametrize("multiprocessors", [2, 10])  # with 10 the last tiles are computed in halves
def test_add_product(sizes, multiprocessors):
    router_checks.sums_agree(functools.partial(both, multiprocessors=multiprocessors), RNG, *sizes)


def test_add_product_needs_its_kernel():
    a = np.ones((16, 16), BF16)
    with pytest.raises(ValueError, match=r"addend, a, b: got a sum that no kernel takes \(.*sm_89"):
        both(add_product, a, a, a, architecture="sm_89")
    with pytest.raises(ValueError, match="K is 4, no multiple of 8"):
        both(add_product, a, a[:, :4].copy(), a[:4])
    with pytest.raises(ValueError, match=r"a: got shape \(16, 0\); wanted K of at least 1"):
        add_product(a, a[:, :0].copy(), a[:0])
    assert both(add_product, a[:0], a[:0], a)[1].shape == (0, 16)


@pytest.mark.parametrize("architecture", ["sm_86", "sm_89", "sm_90a"])
def test_products_of_scales_far_apart(monkeypatch, architecture):
    cuda_on_cpu.install(monkeypatch, architecture=architecture)
    products_of_scales_far_apart(cuda_on_cpu.upload, cuda_on_cpu.download, RNG, "mma")


@pytest.mark.parametrize(
    ("dtype", "counts", "width", "depth", "stages"),
    [
        (BF16, [5, 0, 130], 264, 72, None),
        (np.dtype(np.float16), [70, 1, 64], 136, 200, 3),  # as with many experts
        (BF16, [0, 0], 8, 16, None),
    ],
)
def test_products_of_16_bits(monkeypatch, dtype, counts, width, depth, stages):
    from fp8moe.kernels_cuda.gemm import grouped_gemm_wgmma16

    cuda_on_cpu.install(monkeypatch)
    if stages:
        monkeypatch.setattr(grouped_gemm_wgmma16, "stages", lambda verb, experts: stages)
    upload, download = cuda_on_cpu.upload, cuda_on_cpu.download
    products_of_16_bits(upload, download, RNG, dtype, counts, width, depth, "wgmma")


def test_products_with_an_sm_limit(monkeypatch):
    """Bitwise equal for any assignment of tiles; only kernels that distribute tiles dynamically support a
    limit."""
    from fp8moe.kernels_cuda.runtime import driver

    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(driver, "multiprocessors", lambda device: 6)
    x, w, _, offsets = random_operands([5, 130, 1], 520, 144, ("e4m3", "e4m3"))
    arrays = [cuda_on_cpu.upload(a) for a in (x, w, offsets)]
    wanted = cuda_on_cpu.download(fp8moe.grouped_gemm(*arrays))
    for num_sms in (2, 4, 6):
        assert_same(cuda_on_cpu.download(fp8moe.grouped_gemm(*arrays, num_sms=num_sms)), wanted)
    with pytest.raises(ValueError, match="num_sms: got 8; wanted an even number from 2 to 6"):
        fp8moe.grouped_gemm(*arrays, num_sms=8)
    for backend in ("mma", "plain", "cublas"):
        with pytest.raises(ValueError, match=f"num_sms: got 4 for a product by '{backend}'"):
            fp8moe.grouped_gemm(*arrays, backend=backend, num_sms=4)


def of_grouped_products(monkeypatch):
    """Records the number of blocks of every grouped product launched from now on."""
    from fp8moe.kernels_cuda.runtime import launch

    run, blocks = launch.launch_with_tensor_maps, []

    def launched(function, tiled, x, *rest):
        if function.function.__name__.startswith("run_grouped_gemm"):
            blocks.append(x)
        run(function, tiled, x, *rest)

    monkeypatch.setattr(launch, "launch_with_tensor_maps", launched)
    return blocks


@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_layer_with_an_sm_limit(monkeypatch, recipe):
    """Every product of both passes respects the limit, also with recordings, and results are bitwise
    equal."""
    from fp8moe.kernels_cuda.runtime import driver

    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(driver, "multiprocessors", lambda device: 6)
    blocks = of_grouped_products(monkeypatch)
    x, w13, w2, dy = (values(RNG, s, BF16) for s in ((5, 128), (2, 256, 128), (2, 128, 128), (5, 128)))
    rows = np.array([3, 2], np.int32), RNG.random(5, np.float32)
    *layer, dy = map(cuda_on_cpu.upload, (x, w13, w2, *rows, dy))

    def step(forward=None, backward=None):
        blocks.clear()
        y, saved = fp8moe.moe_forward_permuted(*layer, recipe=recipe, num_sms=forward)
        split, blocks[:] = [*blocks], []
        grads = fp8moe.moe_backward(saved, dy, num_sms=backward)
        return cuda_on_cpu.download((y, grads)), (split, [*blocks])

    wanted, grids = step()
    assert grids == ([6] * 2, [6] * 4)
    for limits, grids in (((2,), (2, 2)), ((None, 4), (6, 4))):
        results, launched = step(*limits)
        assert launched == ([grids[0]] * 2, [grids[1]] * 4)
        assert_same(results, wanted)
    _, saved = fp8moe.moe_forward_permuted(*layer, recipe=recipe, num_sms=4)
    _, operands = fp8moe.moe_backward_input(saved, dy)
    fp8moe.moe_backward_weight(operands)
    fp8moe.moe_backward_weight(operands, num_sms=2)
    assert blocks[-8:] == [4] * 6 + [2] * 2
    plans = collections.Counter(name for name, plan in dispatch.cached_recordings() if plan is not None)
    assert plans["permuted_experts_forward"] == len({None, 2, 4})
    assert plans["experts_backward"] == len({None, 2, 4})
    assert plans["experts_backward_weight"] == len({4, 2})
    with pytest.raises(ValueError, match="num_sms: got 8; wanted an even number from 2 to 6"):
        fp8moe.moe_forward_permuted(*layer, recipe=recipe, num_sms=8)
    with pytest.raises(ValueError, match="num_sms: got 2 with backend='mma', which cannot limit itself"):
        fp8moe.moe_forward_permuted(*layer, recipe=recipe, num_sms=2, backend="mma")


def test_sm_limit_on_a_rank_without_rows():
    """No products are computed, and the weight gradients are zeros."""
    x, w = values(RNG, (0, 128), BF16), values(RNG, (2, 128, 128), BF16)
    offsets = np.zeros(3, np.int32)
    for options in ({}, {"num_sms": 2}):
        with pytest.MonkeyPatch.context() as patch:
            cuda_on_cpu.install(patch)
            arrays = [cuda_on_cpu.upload(a) for a in (x, w, offsets)]
            fp8moe.grouped_gemm(*arrays, **options)
            dw = fp8moe.grouped_gemm_wgrad(arrays[0], arrays[0], arrays[2], **options)
            assert not cuda_on_cpu.download(dw).any()


@pytest.mark.parametrize("backend", [None, "wgmma", "mma", "plain"])
def test_products_without_experts(backend):
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
        assert_same(*both(function, *arguments, backend=backend))


def test_products_unsupported_by_wgmma_use_mma():
    x, w, _, offsets = random_operands([3, 4], 20, 128, ("e4m3", "e4m3"))
    with fp8moe.trace() as traced:
        assert relative(*both(fp8moe.grouped_gemm, x, w, offsets)[::-1]) <= 2.0**-8
    assert traced.launches["grouped_gemm"] == 2
    with pytest.raises(ValueError, match=r"backend: got 'wgmma'.*N is 20, no multiple of 8"):
        both(fp8moe.grouped_gemm, x, w, offsets, backend="wgmma")
    transposed = fp8moe.scaling_aware_transpose(x, offsets)
    odd = np.zeros(2 * 128 * 128 + 1, np.float32)[1:].reshape(2, 128, 128)  # not aligned to 16 bytes
    _, actual = both(fp8moe.grouped_gemm_wgrad, transposed, transposed, offsets, odd)
    assert actual.any()


def test_large_products_with_a_slow_kernel_raise_or_warn(monkeypatch):
    monkeypatch.setattr(grouped_gemm, "MANY", 1000)
    x, w, _, offsets = random_operands([3, 4], 20, 128, ("e4m3", "e4m3"))
    with pytest.warns(RuntimeWarning, match=r"grouped_gemm: mma multiplies.*N is 20, no multiple of 8"):
        both(fp8moe.grouped_gemm, x, w, offsets)
    both(fp8moe.grouped_gemm, x, w, offsets, backend="mma")
    wide = np.ones((4, 16), np.float32), np.ones((1, 16, 16), np.float32), np.array([0, 4], np.int32)
    with pytest.raises(ValueError, match=r"backend: got None .*the operands are float32"):
        both(fp8moe.grouped_gemm, *wide)
    assert_same(*both(fp8moe.grouped_gemm, *wide, backend="plain"))


def test_new_thread_sets_the_devices_context(monkeypatch):
    """Autograd's threads have no CUDA context, and the driver rejects launches without one."""
    runtime = cuda_on_cpu.install(monkeypatch)
    x = cuda_on_cpu.upload(values(RNG, (3, 128), BF16))

    def call():
        fp8moe.quantize(x)
        fp8moe.quantize(x)

    thread = threading.Thread(target=call)
    thread.start()
    name = thread.ident
    thread.join()
    assert runtime.bound_threads.count(name) == 1


def test_repeated_calls_replay_their_recording(monkeypatch):
    """From the third call on with the same shapes: other arrays, other results, no shared memory."""
    plans = [a_plan(21, 5, 3, 4) for _ in range(4)]
    inputs = [(values(RNG, (21, 256), BF16), plan, RNG.random((21, 3)).astype(np.float32)) for plan in plans]

    def work(x, plan, probs):
        moved = fp8moe.permute(x, plan, probs)
        both_orientations = fp8moe.quantize(x, columnwise=True)
        codes = fp8moe.permute(both_orientations.rowwise, plan, fill_padding=True).data
        back = fp8moe.unpermute(moved.data, plan, probs)
        transposed = fp8moe.scaling_aware_transpose(codes, plan.expert_offsets, align_size=4)
        grads = fp8moe.permute_backward(moved.data, plan, moved.probs)
        return moved.data, moved.probs, codes, back, both_orientations, transposed.scales, grads

    wanted = [work(*i) for i in inputs]
    cuda_on_cpu.install(monkeypatch)
    # results are kept alive, so none may share memory
    got = [work(*map(cuda_on_cpu.upload, i)) for i in inputs]
    assert [type(plan) for _, plan in dispatch.cached_recordings()] == [Recording] * 6
    for a, b in zip(wanted, got, strict=True):
        assert_same(a, cuda_on_cpu.download(b))


@pytest.mark.parametrize("elsewhere", ["x", "probs"])
def test_recording_rejects_arrays_on_two_devices(monkeypatch, elsewhere):
    arrays = {"x": values(RNG, (9, 64), BF16), "probs": RNG.random((9, 2)).astype(np.float32)}
    plan = a_plan(9, 4, 2, 4)
    cuda_on_cpu.install(monkeypatch)
    arrays, plan = {n: cuda_on_cpu.upload(a) for n, a in arrays.items()}, cuda_on_cpu.upload(plan)
    for _ in range(3):
        fp8moe.permute(arrays["x"], plan, arrays["probs"])
    assert len(dispatch.cached_recordings()) == 1
    arrays[elsewhere].device = 1
    with pytest.raises(TypeError, match=r"got an array on CUDA device \d; wanted CUDA device \d"):
        fp8moe.permute(arrays["x"], plan, arrays["probs"])


def test_calls_whose_recordings_are_not_cached(monkeypatch):
    plan = a_plan(9, 4, 2, 4)
    cuda_on_cpu.install(monkeypatch)
    upload = cuda_on_cpu.upload
    plan, x = upload(plan), upload(values(RNG, (9, 64), np.float32))
    for _ in range(4):  # errors are raised in every call
        with pytest.raises(ValueError, match="probs: got shape"):
            fp8moe.permute(x, plan, upload(np.ones((9, 3), np.float32)))
    for align in (1, 1, 1, True):  # True equals 1 but is not a valid alignment
        if align is True:
            with pytest.raises(TypeError, match="bool"):
                fp8moe.pad(x, upload(np.array([4, 5])), align)
        else:
            fp8moe.pad(x, upload(np.array([4, 5])), align)
    for _ in range(4):  # its number of rows depends on values
        counts = RNG.multinomial(9, [0.5, 0.5])
        padded = fp8moe.pad(x, upload(counts), 4, num_out_tokens="exact")
        assert len(padded.host) == sum(-(-c // 4) * 4 for c in counts)
    square = upload(np.eye(64, dtype=np.float32))
    for _ in range(3):  # two arguments in the same memory
        fp8moe.grouped_gemm_wgrad(square, square, upload(np.array([0, 64], np.int32)))
    planned = [name for name, plan in dispatch.cached_recordings() if plan is not None]
    assert planned == ["pad", "grouped_gemm_wgrad"]


def test_recordings_take_other_arguments_of_the_same_shape(monkeypatch):
    """Aliased arguments after calls with separate ones, keyword options, and an argument as output."""
    x, y = (RNG.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    offsets = np.array([0, 40, 64], np.int32)
    cuda_on_cpu.install(monkeypatch)
    upload = cuda_on_cpu.upload
    for a, b in ((x, y), (y, x), (x, y), (x, x), (y, y)):
        a_up, b_up = upload(a), upload(b)
        result = fp8moe.grouped_gemm_wgrad(a_up, a_up if a is b else b_up, upload(offsets), dtype="float32")
        np.testing.assert_allclose(result.host[0], a[:40].T @ b[:40], atol=1e-4)
        into = upload(np.ones((2, 64, 64), np.float32))
        again = fp8moe.grouped_gemm_wgrad(a_up, b_up, upload(offsets), out=into)
        assert again is into
        np.testing.assert_allclose(into.host[1], 1 + a[40:].T @ b[40:], atol=1e-4)
    assert [type(plan) for _, plan in dispatch.cached_recordings()] == [Recording] * 2


@pytest.mark.parametrize(("columns", "k", "dtype"), [(512, 4, BF16), (256, 3, BF16), (2176, 8, np.float32)])
def test_messages_between_ranks(columns, k, dtype):
    messages(both, RNG, 11, columns, k, dtype)


def test_invalid_windows_raise(monkeypatch):
    cuda_on_cpu.install(monkeypatch)
    rows, *windows = (cuda_on_cpu.upload(np.zeros((n, 16), np.uint8)) for n in (9, *[1] * 9))
    with pytest.raises(ValueError, match="windows: got 9; wanted at most 8"):
        expert_parallel.messages.Message(rows, None).write(None, tuple(windows))
    for fmt, dtype in ((None, np.uint8), ("e4m3", BF16)):
        rows = cuda_on_cpu.upload(np.zeros((9, 128), dtype))
        message = expert_parallel.messages.Message(rows, fmt)
        window = cuda_on_cpu.upload(np.zeros((8, message.row_bytes), np.uint8))
        with pytest.raises(ValueError, match="windows: got 8 rows in all; wanted 9, the messages'"):
            message.write(None, (window,))


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
    monkeypatch.setattr(cublas, "cupy", types.SimpleNamespace(cuda=fake))
    monkeypatch.setattr(cublas, "library", Blas)


@pytest.mark.parametrize("counts", [[16, 0, 32], [0, 48, 16]])
def test_cublas_backend_multiplies_expert_by_expert(counts, blas):
    offsets = offsets_of([*counts, 0])
    rows, width, depth, experts = sum(counts) + 8, 40, 128, len(counts) + 1
    a, dy = (fp8moe.quantize(RNG.standard_normal((rows, n)).astype(BF16)) for n in (depth, width))
    w = RNG.standard_normal((experts, width, depth)).astype(np.float32)
    q = fp8moe.quantize(w, block=(128, 128))
    expected, theirs = both(fp8moe.grouped_gemm, a, q, offsets, backend="cublas")
    assert relative(theirs, expected) < 2.0**-8  # two float32 sums, each rounded to bfloat16
    transposed = [fp8moe.scaling_aware_transpose(v, offsets) for v in (dy, a)]
    expected, theirs = both(fp8moe.grouped_gemm_wgrad, *transposed, offsets, backend="cublas")
    assert relative(theirs, expected) < 1e-5
    x = RNG.standard_normal((rows, depth)).astype(np.float32)
    y = RNG.standard_normal((rows, width)).astype(np.float32)
    assert relative(*reversed(both(fp8moe.grouped_gemm, x, w, offsets, backend="cublas"))) < 1e-5
    back = both(fp8moe.grouped_gemm, y, w, offsets, backend="cublas", transpose_w=True)
    assert relative(*reversed(back)) < 1e-5
    into = RNG.standard_normal((experts, width, depth)).astype(np.float32)
    wanted = fp8moe.grouped_gemm_wgrad(y, x, offsets, into.copy())
    with pytest.MonkeyPatch.context() as patch:
        cuda_on_cpu.install(patch)
        arguments = [cuda_on_cpu.upload(v) for v in (y, x, offsets, into.copy())]
        actual = fp8moe.grouped_gemm_wgrad(*arguments, backend="cublas")
    assert relative(actual.host, wanted) < 1e-5
