"""The CUDA backend compared with the reference: the same public calls with GPU arrays and poisoned
outputs."""

import contextlib
import gc
import threading
import time

import numpy as np
import pytest
from backend_checks import (
    gathered_products,
    gradients_apart,
    products_of_16_bits,
    products_of_scales_far_apart,
    wgrad_skips_padding,
    wgrad_takes_any_scales,
)
from cases import (
    BF16,
    assert_same,
    generator,
    layer_inputs,
    poison,
    relative,
    same_bits,
    values,
)

import fp8moe
from benchmarks.beside import occupied
from fp8moe.records import DeviceArray
from fp8moe.runtime.record_trees import map_arrays

pytestmark = pytest.mark.gpu
KINDS = (BF16, np.dtype(np.float16), np.dtype(np.float32))


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    """All device memory that the library allocates for outputs is poisoned."""
    cupy = pytest.importorskip("cupy")
    for kind in {type(f) for f in fp8moe.runtime.interop.FRAMEWORKS.values()}:
        if "empty" not in vars(kind):
            continue

        def poisoned(self, spec, device, empty=kind.empty):
            raw = empty(self, spec, device)
            if isinstance(raw, DeviceArray) and raw.nbytes and device != fp8moe.runtime.dispatch.NOWHERE:
                with cupy.cuda.Device(device):
                    cupy.cuda.runtime.memsetAsync(raw.ptr, poison(raw.dtype), raw.nbytes, self.stream(device))
            return raw

        monkeypatch.setattr(kind, "empty", poisoned)


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_outputs_are_poisoned(framework):
    module = pytest.importorskip(framework)
    array = module.zeros(4) if framework == "cupy" else module.zeros(4, device="cuda")
    call = fp8moe.runtime.dispatch.enter(x=array)
    for dtype in (np.dtype(np.uint8), np.dtype(np.float32)):
        raw = call.empty(fp8moe.records.ArraySpec((7,), dtype))
        assert (call.to_host(raw).view(np.uint8) == poison(dtype)).all()


def upload(value):
    import cupy

    return map_arrays(lambda a: cupy.asarray(a), value)


def download(value):
    import cupy

    return map_arrays(lambda a: cupy.asnumpy(a), value)


def both(function, *arguments, **options):
    """(result on the CPU, result on CUDA copied to the host)."""
    expected = function(*arguments, **{k: v for k, v in options.items() if k != "backend"})
    actual = function(*(upload(a) for a in arguments), **{k: upload(v) for k, v in options.items()})
    return expected, download(actual)


@pytest.mark.parametrize("ffn", [128, 72])
def test_gradients_of_w1_and_w3_as_a_pair(ffn):
    gradients_apart(both, ffn)


def test_a_hundred_repeats_of_each_fp8_operation():
    rng = np.random.default_rng(3)
    h = upload((rng.standard_normal((300, 512)) * 4).astype(BF16))
    grad = upload(rng.standard_normal((300, 256)).astype(BF16))
    probs = upload(rng.random(300).astype(np.float32))
    offsets = upload(np.array([0, 48, 48, 208, 288], np.int32))
    plan = upload(fp8moe.plan_topk(rng.integers(0, 4, (300, 2)).astype(np.int32), 4, align_size=16))
    q = fp8moe.quantize(h)

    def run():
        ways = fp8moe.quantize(h, columnwise=True)
        transposed = fp8moe.scaling_aware_transpose(q, offsets, align_size=16)
        gathered = fp8moe.permute_transpose(q, plan)
        blocks = fp8moe.scaling_aware_transpose(q, target="block")
        options = {"expert_offsets": offsets, "align_size": 16}
        y = fp8moe.swiglu_quantize(h, probs, columnwise=True, **options)
        g = fp8moe.swiglu_quantize_backward(grad, h, probs, expert_offsets=offsets)
        return download((ways, transposed.data[:, :288], gathered.scales, blocks, y.rowwise, g))

    first = run()
    for _ in range(100):
        assert_same(run(), first)


def assert_close(pair, bound):
    a, b = (v.astype(np.float64) for v in pair)
    assert np.linalg.norm(b - a) <= bound * max(np.linalg.norm(a), 1e-30)


def skip_where_not(backend):
    cupy = pytest.importorskip("cupy")
    if backend == "wgmma" and cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs compute capability 9.0")


def wgrad_agrees(transposed, offsets, backend):
    """New and accumulated gradients, in both dtypes."""
    rng = np.random.default_rng(25)
    # the tensor cores sum with about 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2): an error of
    # 2^-13 of the sum so far, at each of four additions
    bound = 2.0**-11 if backend == "wgmma" else 1e-5
    for dtype, rounding in (("float32", 0.0), ("bfloat16", 2.0**-8)):
        new = both(fp8moe.grouped_gemm_wgrad, *transposed, offsets, backend=backend, dtype=dtype)
        assert_close(new, bound + rounding)
        into = rng.standard_normal(new[0].shape).astype(new[0].dtype)
        expected = fp8moe.grouped_gemm_wgrad(*transposed, offsets, into.copy())
        actual = fp8moe.grouped_gemm_wgrad(*map(upload, (*transposed, offsets, into)), backend=backend)
        assert_close((expected, download(actual)), bound + rounding)


@pytest.mark.parametrize("backend", ["plain", "mma", "wgmma", "cublas"])
@pytest.mark.parametrize("counts", [[128, 0, 256], [5, 130, 0], [0, 0, 0], [2000, 1, 700], [4200, 300, 0]])
@pytest.mark.parametrize(("width", "depth"), [(200, 304), (1024, 1280), (1152, 1280)])
def test_grouped_gemm(counts, width, depth, backend):
    skip_where_not(backend)
    rng = np.random.default_rng(4)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    rows = (int(offsets[-1]) // 16 + 1) * 16
    x, w = (
        fp8moe.quantize(values(rng, (rows, depth))),
        fp8moe.quantize_weights(values(rng, (3, width, depth))),
    )
    dy = fp8moe.quantize(values(rng, (rows, width)), fmt="e5m2")
    x.data[offsets[-1] :] = dy.data[offsets[-1] :] = 0x7F  # NaN after the last expert
    # sums in another order: float32 partial sums, then one rounding to bfloat16
    for a in (x, fp8moe.to_layout(x, "gemm_ready")):
        pair = both(fp8moe.grouped_gemm, a, w.rowwise, offsets, backend=backend)
        assert_close(pair, 2.0**-8)
        assert not pair[1][offsets[-1] :].astype(np.float32).any()
    transposed = [fp8moe.scaling_aware_transpose(q, offsets) for q in (dy, x)]
    wgrad_agrees(transposed, offsets, backend)


@pytest.mark.parametrize("backend", ["plain", "mma", "wgmma", "cublas"])
@pytest.mark.parametrize("counts", [[128, 0, 256], [0, 0, 0], [2048, 128, 640], [4224, 384, 0]])
@pytest.mark.parametrize(("width", "depth"), [(200, 304), (1024, 1280), (1152, 1280)])
def test_grouped_gemm_wgrad_of_blocks(counts, width, depth, backend):
    skip_where_not(backend)
    rng = np.random.default_rng(24)
    offsets = (128 + np.concatenate(([0], np.cumsum(counts)))).astype(np.int32)
    x, dy = (
        fp8moe.quantize(values(rng, (int(offsets[-1]) + 48, n)), fmt=fmt)
        for n, fmt in ((depth, "e4m3"), (width, "e5m2"))
    )
    for q in (x, dy):  # NaN in rows without an expert
        q.data[:128] = q.data[offsets[-1] :] = 0x7F
    transposed = [fp8moe.scaling_aware_transpose(q, target="block") for q in (dy, x)]
    wgrad_agrees(transposed, offsets, backend)


@pytest.mark.parametrize(("width", "depth"), [(144, 264), (1024, 1288)])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_wgrad_skips_padding(width, depth, dtype, accumulate):
    skip_where_not("wgmma")
    wgrad_skips_padding(upload, download, generator(), width, depth, dtype, accumulate)


def test_grouped_gemm_wgrad_accepts_any_scales():
    skip_where_not("wgmma")
    rng = np.random.default_rng(14)
    offsets = np.array([0, 5, 135, 136, 1000], np.int32)
    q = [fp8moe.quantize(rng.standard_normal((1008, n)).astype(np.float32)) for n in (520, 1280)]
    wgrad_takes_any_scales(both, rng, offsets, *(fp8moe.scaling_aware_transpose(a, offsets) for a in q))


@pytest.mark.parametrize("counts", [[8, 888] * 40, [9, 29, 92, 21, 46, 2, 89] * 40])
@pytest.mark.parametrize("num_sms", [2, None])
def test_grouped_gemm_wgrad_where_some_experts_begin_at_no_multiple_of_16(num_sms, counts):
    """Tiles loaded by TMA after tiles loaded without it: the loading warp must stay in step with the
    others."""
    rng = np.random.default_rng(7)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    rows = (int(offsets[-1]) + 15) // 16 * 16
    q = [fp8moe.quantize(rng.standard_normal((rows, n)).astype(np.float32)) for n in (264, 520)]
    transposed = [fp8moe.scaling_aware_transpose(a, offsets) for a in q]
    wanted = fp8moe.grouped_gemm_wgrad(*transposed, offsets)
    arrays = [upload(a) for a in (*transposed, offsets)]
    for _ in range(5):
        new = download(fp8moe.grouped_gemm_wgrad(*arrays, num_sms=num_sms, backend="wgmma"))
        assert relative(new, wanted) <= 2.0**-11  # the tensor cores' 14 bits


@pytest.mark.parametrize("backend", ["plain", "mma"])
def test_products_of_scales_far_apart(backend):
    products_of_scales_far_apart(upload, download, generator(), backend)


@pytest.mark.parametrize("backend", ["plain", "mma", None])
@pytest.mark.parametrize("dtype", [BF16, np.float16])
@pytest.mark.parametrize("counts", [[128, 0, 256], [5, 130, 0], [0, 0, 0], [1000, 1, 700]])
@pytest.mark.parametrize(("width", "depth"), [(200, 304), (1024, 1280), (21, 35), (40, 30)])
def test_grouped_gemm_of_plain_arrays(width, depth, counts, dtype, backend):
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
        pair = both(fp8moe.grouped_gemm, x, b, offsets, transpose_w=transpose_w, backend=backend)
        assert_close(pair, 2.0**-8 if dtype is BF16 else 2.0**-11)
    wgrad_agrees((dy, x), offsets, backend)


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)])
@pytest.mark.parametrize(
    ("counts", "width", "depth"),
    [
        ([128, 0, 256], 264, 144),
        ([5, 130, 1], 520, 1288),
        ([0, 0, 0], 64, 64),
        ([2000, 1, 700], 1024, 1280),
        ([4200, 300, 0], 1152, 72),
        ([640], 2048, 8),
        ([33] * 300, 256, 136),  # more experts than fit beside four stages
    ],
)
def test_products_of_16_bits_by_wgmma(dtype, counts, width, depth):
    skip_where_not("wgmma")
    products_of_16_bits(upload, download, generator(), dtype, counts, width, depth, "wgmma")


@pytest.mark.parametrize("align_size", [1, 16, 128])
@pytest.mark.parametrize(("width", "depth"), [(256, 272), (520, 512), (2064, 144)])
def test_products_of_padded_rows(align_size, width, depth):
    """Last tiles of an expert with at most half a tile of rows use a smaller product: same bits, zeros in
    padding."""
    skip_where_not("wgmma")
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
    q, wq = fp8moe.quantize(upload(x)), fp8moe.quantize(upload(w), block=(128, 128))
    offsets, all_rows = upload(offsets), upload(counts.astype(np.int32))
    wanted = download(fp8moe.grouped_gemm(q, wq, offsets, backend="plain"))
    got = [download(fp8moe.grouped_gemm(q, wq, offsets, n, backend="wgmma")) for n in (None, all_rows)]
    assert_same(got[1], got[0])
    # both round float32 sums of the same products in another order: a difference of one bfloat16 step
    assert relative(got[0], wanted.astype(np.float64)) < 2.0**-7
    assert not got[0][len(real) :].any()
    assert not got[0][: len(real)][~real].any()


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "width", "depth", "align_size", "options"),
    [
        (3000, 16, 4, 2064, 1168, 128, {}),
        (1000, 3, 2, 520, 512, 16, {"fmts": ("e5m2", "e4m3"), "spare": 300}),
        (700, 40, 8, 264, 2048, 1, {"spare": -999}),
        (5000, 128, 8, 768, 128, 128, {"fmts": ("e4m3", "e5m2")}),
        (1, 2, 1, 8, 16, 128, {}),
    ],
)
def test_gathered_products(tokens, experts, topk, width, depth, align_size, options):
    skip_where_not("wgmma")
    gathered_products(both, generator(), tokens, experts, topk, width, depth, align_size, **options)


def fewer(divisor):
    """The device's number of multiprocessors over this divisor, as an even number."""
    import cupy

    return cupy.cuda.Device().attributes["MultiProcessorCount"] // divisor // 2 * 2


def products_of_wgmma(rng, counts, width, depth):
    """All wgmma products of some operands, FP8 and bfloat16, as a function of num_sms."""
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    x, dy = (rng.standard_normal((int(offsets[-1]), n)).astype(BF16) for n in (depth, width))
    w = rng.standard_normal((len(counts), width, depth)).astype(BF16)
    x, dy, w, offsets = map(upload, (x, dy, w, offsets))
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


@pytest.mark.parametrize(
    ("counts", "width", "depth"),
    [([256, 0, 128, 640], 528, 272), ([128] * 40, 272, 144), ([0, 4096, 2048], 2064, 528)],
)
def test_products_with_sm_limits(counts, width, depth):
    """Results are bitwise equal on all multiprocessors, on a few, and next to a kernel that occupies some;
    repeatedly, and in graphs."""
    skip_where_not("wgmma")
    import cupy

    run = products_of_wgmma(generator(), counts, width, depth)
    wanted = download(run())
    for num_sms in (2, 4, 66, fewer(1)):
        assert_same(download(run(num_sms)), wanted)
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
            assert_same(download(got), wanted)
            for a in got:
                a.view(np.uint8).fill(0)
        cupy.cuda.Device().synchronize()


def test_products_on_several_streams_are_independent():
    """Concurrent products on several streams, each with its own tile counter."""
    skip_where_not("wgmma")
    import cupy

    run = products_of_wgmma(generator(), [640, 128, 0, 256], 1040, 272)
    wanted = download(run())
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    actual = []
    cupy.cuda.Device().synchronize()
    for _ in range(5):
        for stream in streams:
            with stream:
                actual.append(run(24))
    cupy.cuda.Device().synchronize()
    for got in actual:
        assert_same(download(got), wanted)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_layer(recipe, recompute):
    inputs, dy = layer_inputs(7, tokens=300, dropped=0.1)

    def run(x, w13, w2, ids, probs, dy):
        with fp8moe.trace() as traced:
            y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe=recipe, recompute=recompute)
            g = fp8moe.moe_backward(saved, dy)
        casts.append(traced.casts)
        return y, g.dx, g.dprobs, g.dw13, g.dw2

    casts = []
    expected, actual = both(run, *inputs.values(), dy)
    assert casts[0] == casts[1]
    for pair in zip(expected, actual, strict=True):
        # bfloat16 between the kernels is rounded from sums in another order, and then codes may differ
        assert_close(pair, 0.02)


def test_torch_tensors_use_torchs_memory_and_stream():
    torch = pytest.importorskip("torch")
    from fp8moe.adapters.torch import ops as torch_ops

    rng = np.random.default_rng(8)
    x, ids = values(rng, (64, 256), BF16), rng.integers(-1, 4, (64, 2)).astype(np.int32)
    cpu = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        xd = cpu.cuda(non_blocking=True).requires_grad_()
        plan = torch_ops.plan_topk(torch.from_numpy(ids).cuda(), 4, align_size=16)
        moved = torch_ops.permute(xd, plan).data
        y = torch_ops.unpermute(moved, plan)
        y.float().sum().backward()
    torch.cuda.synchronize()
    counts = torch.from_numpy((ids >= 0).sum(1)).float()[:, None]
    assert torch.equal(xd.grad.float().cpu(), counts.expand(64, 256))
    wanted = fp8moe.unpermute(fp8moe.permute(x, fp8moe.plan_topk(ids, 4)).data, fp8moe.plan_topk(ids, 4))
    assert same_bits(y.detach().cpu().view(torch.int16).numpy(), wanted.view(np.int16))
    q = fp8moe.quantize(xd.detach())
    assert q.data.is_cuda
    assert same_bits(q.data.cpu().numpy(), fp8moe.quantize(x).data)


def test_other_frameworks_arrays():
    jax = pytest.importorskip("jax")
    x = np.random.default_rng(9).standard_normal((16, 256)).astype(np.float32)
    wanted = fp8moe.quantize(x)
    q = fp8moe.quantize(jax.device_put(x, jax.devices()[0]))
    assert same_bits(np.asarray(q.data), wanted.data)
    from numba import cuda

    q = fp8moe.quantize(cuda.to_device(x))
    assert same_bits(q.data.copy_to_host(), wanted.data)


def test_a_hundred_repeats_are_bit_equal():
    inputs, dy = layer_inputs(9)
    inputs, dy = {k: upload(v) for k, v in inputs.items()}, upload(dy)

    def run():
        y, saved = fp8moe.moe_forward(**inputs, recipe="fp8_flow")
        g = fp8moe.moe_backward(saved, dy)
        return download((y, g.dx, g.dprobs, g.dw13, g.dw2))

    first = run()
    for _ in range(100):
        for a, b in zip(run(), first, strict=True):
            assert same_bits(a, b)


def test_transformer_engines_names_on_cuda():
    torch = pytest.importorskip("torch")
    from fp8moe.adapters.transformer_engine import pytorch as te

    g = torch.Generator().manual_seed(0)
    mask = (torch.rand(37, 5, generator=g) < 0.4).int()
    probs, x = torch.rand(37, 5, generator=g) * mask, torch.randn(37, 16, generator=g)
    ids = torch.rand(37, 5, generator=g).argsort(1)[:, :2].int()
    sizes, order = torch.tensor([30, 0, 7]), torch.tensor([2, 0, 1])

    def run(device):
        m, p, i, s, o = (t.to(device) for t in (mask, probs, ids, sizes, order))
        xd = x.to(device).requires_grad_()
        rows, moved, row_map, pad_offsets, padded = te.moe_permute_and_pad_with_probs(xd, p, m, m.sum(0), 16)
        back = te.moe_unpermute(
            rows, row_map, merging_probs=p, restore_shape=xd.shape, pad_offsets=pad_offsets
        )
        by_index, index_map = te.moe_permute(xd, i, map_type="index")
        again = te.moe_unpermute(
            by_index, index_map, torch.rand(37, 2).to(device) * 0 + 0.5, map_type="index"
        )
        chunks, chunk_probs = te.moe_sort_chunks_by_index_with_probs(xd, p[:, 0].contiguous(), s, o)
        (grad,) = torch.autograd.grad(back.sum() + again.sum() + chunks.sum(), xd)
        first = [rows, moved, row_map, pad_offsets, padded, back]
        return [*first, by_index, index_map, again, chunks, chunk_probs, grad]

    for a, b in zip(run("cpu"), run("cuda"), strict=True):
        assert b.is_cuda
        torch.testing.assert_close(a, b.cpu(), rtol=0, atol=0)


def test_arrays_on_cpu_and_cuda_raise():
    x, ids = np.ones((4, 128), np.float32), np.zeros((4, 1), np.int32)
    plan = fp8moe.plan_topk(ids, 2)
    with pytest.raises(TypeError, match="got an array on the CPU; wanted CUDA device 0"):
        fp8moe.permute(upload(x), plan)
    with pytest.raises(TypeError, match="got an array on CUDA device 0; wanted the CPU"):
        fp8moe.permute(x, upload(plan))


def test_an_exact_plan_waits_for_the_callers_stream():
    torch = pytest.importorskip("torch")
    ids = torch.zeros(64, 2, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # delays the write of the ids below
        ids.copy_(torch.arange(128, device="cuda").reshape(64, 2) % 8)
        plan = fp8moe.plan_topk(ids, 8, align_size=16, num_out_tokens="exact")
    assert plan.num_out_tokens == 128
    assert plan.tokens_per_expert.tolist() == [16] * 8


def test_cupy_graph_keeps_its_scratch_memory():
    import cupy

    rng = np.random.default_rng(14)
    ids = upload(rng.integers(0, 8, (400, 2)).astype(np.int32))
    x = upload(rng.standard_normal((400, 256)).astype(BF16))

    def run():
        plan = fp8moe.plan_topk(ids, 8, align_size=16)
        return fp8moe.permute(x, plan)

    run()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        captured = run()
        graph = stream.end_capture()
        others = [cupy.full(1600, 7, cupy.int32) for _ in range(50)]  # uses up the memory in the pool
        ids[...] = upload(rng.integers(0, 8, (400, 2)).astype(np.int32))
        graph.launch(stream)
        stream.synchronize()
    wanted = fp8moe.permute(download(x), fp8moe.plan_topk(download(ids), 8, align_size=16))
    assert_same(wanted.plan, download(captured.plan))
    assert_same(wanted.data, download(captured.data))
    assert all(bool((o == 7).all()) for o in others)

    from fp8moe.kernels_cuda.runtime import driver

    def capture():
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            run()
            return stream.end_capture(), driver.count_kept_by_graphs()

    first, kept = capture()
    second, kept_by_both = capture()
    assert kept_by_both > kept
    del first, second
    gc.collect()
    # memory of the two graphs is released by a thread of the driver, some time after they are destroyed
    for _ in range(1000):
        if (now_kept := capture()[1]) == kept:
            break
        time.sleep(0.01)
    assert now_kept == kept


@pytest.mark.parametrize("captured", [False, True])
def test_launches_wait_for_each_other(monkeypatch, captured):
    """Blocks may start before the previous launch is complete, while data they read is still being written
    and data they overwrite is still being read. The previous operation is a kernel, a copy on the same
    stream, or a copy on another stream."""
    import cupy

    from fp8moe.kernels_cuda.runtime import driver

    monkeypatch.undo()  # filling outputs would separate the launches
    rng = np.random.default_rng(15)
    xs = [upload((rng.standard_normal((4096, 2048)) * 2.0**i).astype(BF16)) for i in range(2)]
    ids = upload(rng.integers(0, 8, (4096, 2)).astype(np.int32))
    x, q = cupy.empty_like(xs[0]), fp8moe.quantize(xs[0])
    end = int(fp8moe.plan_topk(ids, 8, align_size=128).expert_offsets[-1])  # values after it are undefined

    def chain():
        plan = fp8moe.plan_topk(ids, 8, align_size=128)
        rows = fp8moe.permute(fp8moe.quantize(x, out=q), plan).data
        transposed = fp8moe.scaling_aware_transpose(rows, plan.expert_offsets)
        y = fp8moe.unpermute(fp8moe.dequantize(rows), plan)
        both_orientations = fp8moe.quantize(y, columnwise=True)
        return (
            plan.row_id_map,
            transposed.data[:, :end],
            transposed.scales,
            y,
            both_orientations.columnwise.data,
        )

    with monkeypatch.context() as context:
        context.setattr(driver, "has_dependent_launch", lambda device: False)
        wanted = []
        for each in xs:
            x[...] = each
            wanted.append(chain())
            cupy.cuda.Device().synchronize()
    actual = []
    with cupy.cuda.Stream(non_blocking=True) as stream:
        other = cupy.cuda.Stream(non_blocking=True)
        chain()
        if captured:
            stream.begin_capture()
        for i in range(20):
            if i % 4 < 2:
                cupy.copyto(x, xs[i % 2])
            else:
                other.wait_event(stream.record())
                with other:
                    cupy.copyto(x, xs[i % 2])
                stream.wait_event(other.record())
            actual.append(chain())
        if captured:
            stream.end_capture().launch(stream)
        stream.synchronize()
    for i, results in enumerate(actual):
        for a, b in zip(results, wanted[i % 2], strict=True):
            assert same_bits(cupy.asnumpy(a), cupy.asnumpy(b)), i


def torch_case(requires_grad=True):
    torch = pytest.importorskip("torch")
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(96, 8, generator=g).argsort(1)[:, :3].int().cuda()
    x = torch.randn(96, 256, generator=g).bfloat16().cuda().requires_grad_(requires_grad)
    probs = torch.rand(96, 3, generator=g).cuda().requires_grad_(requires_grad)
    return torch, ids, x, probs


def there_and_back(ids, x, probs):
    from fp8moe.adapters.torch import ops as torch_ops

    plan = torch_ops.plan_topk(ids, 8, align_size=16)
    moved = torch_ops.permute(x, plan, probs)
    y = torch_ops.unpermute(moved.data * moved.probs[:, None].to(x.dtype), plan, probs)
    return y.float().square().sum()


def test_torch_compile_on_cuda_gives_the_same_gradients():
    torch, ids, x, probs = torch_case()
    there_and_back(ids, x, probs).backward()
    eager = x.grad.clone(), probs.grad.clone()
    x.grad = probs.grad = None
    torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(ids, x, probs).backward()
    assert torch.equal(x.grad, eager[0])
    assert torch.equal(probs.grad, eager[1])


def test_torch_cuda_graph_of_forward_and_backward():
    torch, ids, x, probs = torch_case()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            x.grad = probs.grad = None
            there_and_back(ids, x, probs).backward()
    torch.cuda.current_stream().wait_stream(stream)
    x.grad = probs.grad = None
    graph = torch.cuda.CUDAGraph()
    # the same stream, as the autograd engine's thread may still hold AccumulateGrad nodes of the last
    # iteration, and torch warns of those of another stream
    with torch.cuda.graph(graph, stream=stream):
        there_and_back(ids, x, probs).backward()
    for seed in range(3):
        with torch.no_grad():
            ids.copy_(torch.rand(96, 8, device="cuda").argsort(1)[:, :3].int())
            x.normal_()
            probs.uniform_()
        filler = [torch.full((1 << 16,), seed, device="cuda") for _ in range(20)]
        graph.replay()
        grads = x.grad.clone(), probs.grad.clone()
        a, b = x.detach().clone().requires_grad_(), probs.detach().clone().requires_grad_()
        there_and_back(ids, a, b).backward()
        assert torch.equal(a.grad, grads[0])
        assert torch.equal(b.grad, grads[1])
        assert all(bool((f == seed).all()) for f in filler)


def fp8_there_and_back(ids, x):
    """Quantise, permute with scales, transpose, and sum the rows back."""
    from fp8moe.adapters.torch import ops as torch_ops

    q = torch_ops.quantize(x)
    plan = torch_ops.plan_topk(ids, 8, align_size=16)
    moved = torch_ops.permute(torch_ops.dequantize(q, dtype="bfloat16"), plan)
    transposed = torch_ops.scaling_aware_transpose(torch_ops.quantize(moved.data), plan.expert_offsets)
    return torch_ops.unpermute(moved.data, plan), transposed.scales


def test_fp8_in_a_compiled_function_and_a_cuda_graph():
    torch, ids, x, _ = torch_case(False)
    for function in (
        fp8_there_and_back,
        torch.compile(fp8_there_and_back, fullgraph=True, backend="aot_eager"),
    ):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function(ids, x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = function(ids, x)
        for _ in range(3):
            ids.copy_(torch.rand(96, 8, device="cuda").argsort(1)[:, :3].int())
            x.normal_()
            graph.replay()
            for a, b in zip(actual, fp8_there_and_back(ids, x), strict=True):
                assert torch.equal(a, b)


def test_float8_dtypes_are_views():
    from fp8moe.adapters.torch import ops as torch_ops

    torch, _, x, _ = torch_case(False)
    q = torch_ops.quantize(x)
    viewed = torch_ops.as_float8(q)
    assert viewed.data.dtype == torch.float8_e4m3fn
    assert viewed.data.data_ptr() == q.data.data_ptr()
    expected, actual = (fp8moe.scaling_aware_transpose(a) for a in (q, viewed))
    assert torch.equal(expected.data, actual.data)
    assert torch.equal(fp8moe.dequantize(viewed), fp8moe.dequantize(q))


@pytest.fixture
def first_device():
    """Restores the current device: JAX's initialisation leaves the last device current in its thread."""
    runtime = pytest.importorskip("cupy").cuda.runtime
    before = runtime.getDevice()
    runtime.setDevice(0)
    yield
    runtime.setDevice(before)


@pytest.mark.multigpu
@pytest.mark.usefixtures("first_device")
def test_the_second_device():
    torch = pytest.importorskip("torch")
    _, ids, x, probs = torch_case(False)
    assert x.get_device() == 0
    inputs_on_second = [t.to("cuda:1") for t in (ids, x, probs)]
    for _ in range(4):  # recordings are cached by device
        assert torch.equal(there_and_back(*inputs_on_second).cpu(), there_and_back(ids, x, probs).cpu())
        assert torch.cuda.current_device() == 0
        expected, actual = (fp8moe.quantize(t.detach(), columnwise=True) for t in (x, inputs_on_second[1]))
        assert actual.rowwise.data.device == inputs_on_second[1].device
        transposed = [fp8moe.scaling_aware_transpose(q.rowwise).data.cpu() for q in (expected, actual)]
        assert torch.equal(*transposed)
    with torch.cuda.device(1):
        assert torch.equal(fp8moe.quantize(x.detach()).data, expected.rowwise.data)
        assert torch.cuda.current_device() == 1


@pytest.mark.multigpu
@pytest.mark.usefixtures("first_device")
def test_cupys_arrays_on_the_second_device():
    cupy = pytest.importorskip("cupy")
    x = values(np.random.default_rng(0), (64, 256), np.float32)
    ids = np.random.default_rng(1).integers(0, 4, (64, 2)).astype(np.int32)
    wanted = fp8moe.permute(x, fp8moe.plan_topk(ids, 4, align_size=16)).data
    for _ in range(4):
        for device in (0, 1):
            with cupy.cuda.Device(device):
                on = cupy.asarray(x), cupy.asarray(ids)
            got = fp8moe.permute(on[0], fp8moe.plan_topk(on[1], 4, align_size=16)).data
            assert got.device.id == device
            with cupy.cuda.Device(device):
                assert same_bits(cupy.asnumpy(got), wanted)
    assert cupy.cuda.runtime.getDevice() == 0


def test_an_eager_plan_in_a_compiled_function():
    from fp8moe.adapters.torch import ops as torch_ops

    torch, ids, x, probs = torch_case()
    plan = torch_ops.plan_topk(ids, 8, align_size=16)

    def permute_and_unpermute(x, probs):
        moved = torch_ops.permute(x, plan, probs)
        return torch_ops.unpermute(moved.data, plan, probs) + moved.probs.sum()

    got = torch.compile(permute_and_unpermute, fullgraph=True, backend="aot_eager")(x, probs)
    assert torch.equal(got, permute_and_unpermute(x, probs))


def test_a_plan_survives_copies_and_pickles():
    import copy
    import pickle

    torch, ids, x, _ = torch_case(False)
    plan = fp8moe.plan_topk(ids, 8, align_size=16)
    wanted = fp8moe.permute(x, plan).data
    twins = [copy.deepcopy(plan), pickle.loads(pickle.dumps(plan)), copy.copy(plan)]
    assert all("_raw" not in twin.__dict__ for twin in twins)
    del plan
    garbage = [torch.full((20_000,), -1, dtype=torch.int32, device="cuda") for _ in range(10)]
    for twin in twins:
        assert torch.equal(fp8moe.permute(x, twin).data, wanted)
    del garbage
    q = fp8moe.quantize(x)
    assert torch.equal(fp8moe.dequantize(copy.deepcopy(q)), fp8moe.dequantize(q))


@pytest.mark.parametrize("scope", [False, True])
def test_the_torch_module_in_a_cuda_graph(scope):
    """Captured forward and backward, replayed with other tokens and modified weights. A captured forward
    quantises the weights itself; captured in a weights_unchanged context it reads the copies of
    quantize_weights()."""
    torch, cupy = pytest.importorskip("torch"), pytest.importorskip("cupy")
    from fp8moe.adapters.torch.layer import FP8FlowMoE
    from fp8moe.adapters.torch.weights import weights_unchanged

    torch.manual_seed(0)
    layer = FP8FlowMoE(256, 128, 8, 2, device="cuda")
    optimizer = torch.optim.AdamW([layer.w13, layer.w2], lr=0.05, fused=True)
    for w in (layer.w13, layer.w2):
        w.main_grad = torch.zeros_like(w)
    inputs = [torch.randn(300, 256, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    dy = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)

    def step(layer, x):
        layer.w13.main_grad.zero_()
        layer.w2.main_grad.zero_()
        y = layer(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        return y.detach(), dx, layer.w13.main_grad, layer.w2.main_grad

    x = inputs[0].clone().requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with weights_unchanged(layer) if scope else contextlib.nullcontext(), torch.cuda.graph(graph):
        captured = step(layer, x)
    for turn, tokens in enumerate(inputs):
        with torch.no_grad():
            x.copy_(tokens)
            if turn == 1:
                layer.w13.data.mul_(0.5)
            if turn == 2:
                for w in (layer.w13, layer.w2):
                    w.grad = torch.randn_like(w)
                optimizer.step()
                for w in (layer.w13, layer.w2):
                    w.grad = None
            if turn == 3:
                cupy.from_dlpack(layer.w2.detach())[:] *= np.float32(2)
        if scope:
            layer.quantize_weights()
        graph.replay()
        actual = [v.clone() for v in captured]
        new = FP8FlowMoE(256, 128, 8, 2, device="cuda")
        new.load_state_dict(layer.state_dict())
        for name in ("w13", "w2"):
            w = getattr(new, name)
            w.main_grad = torch.zeros_like(w)
        wanted = step(new, tokens.clone().requires_grad_())
        for a, b in zip(actual, wanted, strict=True):
            assert torch.equal(a, b)
        # eager forwards must not modify copies that the graph reads
        step(layer, tokens.clone().requires_grad_())


def test_micro_batches_in_one_cuda_graph():
    """A weights_unchanged context inside a captured step makes one set of copies per replay."""
    torch = pytest.importorskip("torch")
    from fp8moe.adapters.torch.layer import FP8FlowMoE
    from fp8moe.adapters.torch.weights import weights_unchanged

    torch.manual_seed(0)
    layer = FP8FlowMoE(256, 128, 8, 2, device="cuda")
    batch = torch.randn(4, 100, 256, device="cuda", dtype=torch.bfloat16)

    def step(layer):
        layer.zero_grad()
        with weights_unchanged(layer):
            for x in batch:
                layer(x).float().square().mean().backward()
        return [p.grad for p in layer.parameters()]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(layer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with fp8moe.trace() as traced, torch.cuda.graph(graph, stream=side):
        captured = step(layer)
    assert traced.weight_casts == 2
    for _ in range(3):
        layer.w13.data.mul_(1.5)
        graph.replay()
        actual = [g.clone() for g in captured]
        new = FP8FlowMoE(256, 128, 8, 2, device="cuda")
        new.load_state_dict(layer.state_dict())
        for a, b in zip(actual, step(new), strict=True):
            assert torch.equal(a, b)
    other = FP8FlowMoE(256, 128, 8, 2, device="cuda")
    other.load_state_dict(layer.state_dict())
    side_graph = torch.cuda.CUDAGraph()
    with contextlib.ExitStack() as scope, torch.no_grad():
        with torch.cuda.graph(side_graph):
            scope.enter_context(weights_unchanged(other))
            other(batch[0])
        # copies that only a replay fills must not be used by eager forwards
        assert torch.equal(other(batch[0]), new(batch[0]))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow"])
def test_the_torch_module_compiled_as_one_graph(recipe):
    torch = pytest.importorskip("torch")
    from fp8moe.adapters.torch.layer import FP8FlowMoE

    torch.manual_seed(0)
    layer = FP8FlowMoE(256, 128, 8, 2, recipe=recipe, device="cuda")
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    torch.compiler.reset()
    actual = []
    for forward in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        y = forward(x)
        actual.append([y, *torch.autograd.grad(y, [x, *layer.parameters()], dy)])
    for a, b in zip(*actual, strict=True):
        assert torch.equal(a, b)


def test_a_new_thread_launches():
    """As in autograd's threads: a new thread has no current CUDA context."""
    torch = pytest.importorskip("torch")
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    wanted = fp8moe.quantize(x).data
    actual = []
    thread = threading.Thread(target=lambda: actual.append(fp8moe.quantize(x).data))
    thread.start()
    thread.join()
    assert torch.equal(actual[0], wanted)
