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
from backend_checks import (
    gathered_products,
    products_of_16_bits,
    products_of_scales_far_apart,
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
from fp8moe import selftest
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


def test_calls_on_results_of_recordings(monkeypatch):
    """Several calls share one recording."""
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
