"""Weights of published checkpoints as records, against float64 arithmetic by loops over tiles and blocks."""

import ml_dtypes
import numpy as np
import pytest
from backends import EVERYWHERE, GPU, only_on_cpu, over
from cases import BF16, FP8_NOISE, generator
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8moe
from fp8moe.runtime.record_trees import arrays_in

everywhere = pytest.mark.parametrize("backend", EVERYWHERE)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
SCALES = ("float32", "bfloat16", "ue8m0", "powers")


def codes_of(rng, *shape):
    """Every e4m3 code but the two NaNs."""
    codes = rng.integers(0, 254, shape, np.uint8)
    return codes + (codes >= 0x7F)


def scales_of(rng, kind, *shape):
    """Any positive scales, some as small as 1e-38."""
    if kind == "ue8m0":
        return rng.integers(0, 255, shape, np.uint8)
    small = rng.random(shape) < 0.1
    scales = np.where(small, 1e-38, rng.lognormal(-4, 2, shape)).astype(np.float32)
    if kind == "powers":
        scales = np.ldexp(np.float32(1), np.frexp(scales)[1])
    return scales.astype(BF16) if kind == "bfloat16" else scales


def factors_of(scales):
    if scales.dtype == np.uint8:
        return 2.0 ** (scales.astype(np.float64) - 127)
    return scales.astype(np.float64)


def values_of(codes, scales):
    """[.., N, K] in float64: each tile's codes times its scale."""
    values = E4M3[codes]
    for r in range(scales.shape[-2]):
        for c in range(scales.shape[-1]):
            tile = values[..., 128 * r : 128 * r + 128, 128 * c : 128 * c + 128]
            tile *= factors_of(scales[..., r, c])[..., None, None]
    return values


def tiles(*sizes):
    return tuple(-(-size // 128) for size in sizes)


def padded(values, rows, columns):
    _, height, width = values.shape
    return np.pad(values, ((0, 0), (0, rows - height), (0, columns - width)))


def check_orientations(w, wanted):
    """Both orientations have these float64 values, and zeros under positive scales elsewhere."""
    assert w.rowwise.data.dtype == np.uint8
    assert w.rowwise.scales.dtype == np.float32
    np.testing.assert_array_equal(values_of(w.rowwise.data, w.rowwise.scales), wanted)
    assert (w.rowwise.scales > 0).all()
    if w.columnwise is not None:
        assert w.columnwise.transposed
        other = fp8moe.transpose_codes(w.rowwise)
        np.testing.assert_array_equal(w.columnwise.data, other.data)
        np.testing.assert_array_equal(w.columnwise.scales, other.scales)


CASES = [
    # experts, rows of a part, columns; as the part's rows and columns in the result
    (2, 128, 256, None, None),
    (3, 96, 160, 128, None),
    (1, 192, 45, 256, 64),
    (2, 5, 300, 128, 384),
]


@everywhere
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("case", CASES)
def test_gate_and_up_apart(backend, monkeypatch, kind, case):
    """In one array of all experts, and in a list, one by one; both orientations, or row-wise only."""
    rng, (experts, height, width, rows, columns) = generator(), case
    pair = [codes_of(rng, experts, height, width) for _ in range(2)]
    scales = [scales_of(rng, kind, experts, *tiles(height, width)) for _ in range(2)]
    size = rows or height, columns or width
    wanted = np.concatenate(
        [padded(values_of(c, s), *size) for c, s in zip(pair, scales, strict=True)], axis=1
    )
    backend.start(monkeypatch)
    sizes = {"rows": rows, "columns": columns}
    given = [tuple(map(backend.upload, x)) for x in (pair, scales)]
    stacked = fp8moe.from_block_fp8(*given, **sizes)
    check_orientations(backend.download(stacked), wanted)
    lists = [tuple([backend.upload(one.copy()) for one in part] for part in x) for x in (pair, scales)]
    listed = fp8moe.from_block_fp8(*lists, **sizes, columnwise=False)
    assert listed.columnwise is None
    for a, b in zip(arrays_in(listed.rowwise), arrays_in(stacked.rowwise), strict=True):
        np.testing.assert_array_equal(backend.download(a), backend.download(b))
    dtype = "float32" if kind == "powers" else kind
    for q in (stacked, fp8moe.Quantized(None, stacked.columnwise)):
        sizes = {"rows": height, "columns": width, "scale_dtype": dtype}
        for back, part in zip(fp8moe.to_block_fp8(q, parts=2, **sizes), (pair, scales), strict=True):
            for a, b in zip(map(backend.download, back), part, strict=True):
                assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@everywhere
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("height", [256, 192])
def test_gate_and_up_stacked(backend, monkeypatch, transposed, height):
    """With tiles of the whole, where no tile spans both, and with tiles of each part."""
    rng, experts, width = generator(), 2, 200
    parts = codes_of(rng, experts, 2, height, width)
    scales = scales_of(rng, "float32", experts, 2, *tiles(height, width))
    wanted = np.concatenate(
        [padded(values_of(parts[:, i], scales[:, i]), 256, width) for i in range(2)], axis=1
    )
    codes = parts.reshape(experts, 2 * height, width)
    if transposed:
        codes, scales = codes.swapaxes(1, 2), scales.transpose(0, 3, 1, 2)
    codes, scales = np.ascontiguousarray(codes), np.ascontiguousarray(scales)
    forms = [scales]
    if height % 128 == 0:
        forms.append(
            scales.reshape(experts, scales.shape[1], -1) if transposed else scales.reshape(experts, 4, 2)
        )
    backend.start(monkeypatch)
    for form in forms:
        given = backend.upload(codes), backend.upload(form)
        w = fp8moe.from_block_fp8(*given, parts=2, rows=256, transposed=transposed)
        check_orientations(backend.download(w), wanted)


@everywhere
def test_one_scale_per_expert_or_for_all(backend, monkeypatch):
    """Also where a tile would span two parts."""
    rng = generator()
    codes = codes_of(rng, 3, 96, 130)
    backend.start(monkeypatch)
    for shape in ((3,), (3, 1), (3, 1, 1), (1,), ()):
        scales = np.asarray(scales_of(rng, "float32", *shape))
        values = E4M3[codes] * factors_of(scales).reshape(-1, 1, 1)
        halves = [padded(half, 128, 130) for half in np.split(values, 2, axis=1)]
        given = backend.upload(codes), backend.upload(scales)
        w = fp8moe.from_block_fp8(*given, parts=2, rows=128)
        check_orientations(backend.download(w), np.concatenate(halves, axis=1))


@everywhere
def test_arrays_that_are_shared(backend, monkeypatch):
    """If asked for, where they are as the record has them: gate and up stacked, or one array; never copies
    of other arrays, and never without being asked."""
    rng = generator()
    codes, scales = codes_of(rng, 2, 256, 160), scales_of(rng, "float32", 2, 2, 2)
    backend.start(monkeypatch)
    given = backend.upload(codes), backend.upload(scales)
    for parts in (1, 2):
        w = fp8moe.from_block_fp8(*given, parts=parts, share=True)
        assert w.rowwise.data is given[0]
        assert w.rowwise.scales is given[1]
        check_orientations(backend.download(w), values_of(codes, scales))
    alone = fp8moe.from_block_fp8(*given, columnwise=False, share=True)
    assert (alone.rowwise.data is given[0], alone.columnwise) == (True, None)
    assert fp8moe.from_block_fp8(*given).rowwise.data is not given[0]
    for options in ({"columns": 256}, {"rows": 384}):
        filled = fp8moe.from_block_fp8(*given, share=True, **options)
        size = options.get("rows", 256), options.get("columns", 160)
        check_orientations(backend.download(filled), padded(values_of(codes, scales), *size))
    narrow = scales.astype(BF16)
    w = fp8moe.from_block_fp8(given[0], backend.upload(narrow), share=True)
    check_orientations(backend.download(w), values_of(codes, narrow))


sizes = st.tuples(st.integers(1, 3), st.integers(1, 300), st.integers(1, 300))


@settings(max_examples=60, deadline=None)
@given(shape=sizes, kind=st.sampled_from(SCALES), transposed=st.booleans(), seed=st.integers(0, 2**32))
def test_round_trip(shape, kind, transposed, seed):
    """Block FP8 -> records -> block FP8 is an identity of bytes, from either orientation."""
    rng = np.random.default_rng(seed)
    codes, scales = codes_of(rng, *shape), scales_of(rng, kind, shape[0], *tiles(*shape[1:]))
    dtype = "float32" if kind == "powers" else kind
    w = fp8moe.from_block_fp8(codes.view(ml_dtypes.float8_e4m3fn), scales)
    for q in (w, w.rowwise, w.columnwise, fp8moe.Quantized(None, w.columnwise)):
        back, scales_back = fp8moe.to_block_fp8(q, scale_dtype=dtype)
        assert (back.dtype, scales_back.dtype) == (np.uint8, scales.dtype)
        assert back.tobytes() == codes.tobytes()
        assert scales_back.tobytes() == scales.tobytes()
    if transposed:
        turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (codes, scales)]
        for a, b in zip(
            *(arrays_in(x) for x in (w, fp8moe.from_block_fp8(*turned, transposed=True))), strict=True
        ):
            assert a.tobytes() == b.tobytes()


def mxfp4_of(rng, experts, height, width, spread):
    """e2m1 codes of any kind, blocks of zeros under any scale, and scales up to 2^spread apart."""
    codes = rng.integers(0, 16, (experts, height, width), np.uint8)
    zeros = rng.random((experts, height, width // 32)) < 0.1
    codes[np.repeat(zeros, 32, axis=2)] &= 8
    low = rng.integers(0, 255 - spread, (experts, 1, 1))
    scales = (low + rng.integers(0, spread + 1, zeros.shape)).astype(np.uint8)
    scales[zeros] = rng.integers(0, 255, np.count_nonzero(zeros))
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(experts, height, width // 32, 16)
    return codes, blocks, scales


def nearest(x):
    """The e4m3 codes of finite values, to nearest, ties to the even code: by comparison with every code."""
    finite = np.arange(0x7F)
    distance = np.abs(np.abs(x)[..., None] - E4M3[finite])
    best = distance == distance.min(axis=-1, keepdims=True)
    code = np.where(best & (finite % 2 == 0), finite, -1).max(axis=-1)
    code = np.where(code < 0, best.argmax(axis=-1), code)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def oracle(codes, scales):
    """(codes, scales, number of inexact values) of one matrix in e4m3, tile by tile in float64."""
    values = E2M1[codes] * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=1)
    out, count = np.empty(codes.shape, np.uint8), 0
    of_tiles = np.ones(tiles(*codes.shape), np.float64)
    for r, c in np.ndindex(of_tiles.shape):
        at = slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128)
        used = scales[at[0], 4 * c : 4 * c + 4][
            values[at].reshape(-1, (values[at].shape[1]) // 32, 32).any(-1)
        ]
        if used.size:
            of_tiles[r, c] = max(2.0 ** (int(used.max()) - 127 - 6), 2.0**-126)
        out[at] = nearest(values[at] / of_tiles[r, c])
        count += np.count_nonzero(E4M3[out[at]] * of_tiles[r, c] != values[at])
    return out, of_tiles, count


@everywhere
@pytest.mark.parametrize("spread", [14, 40])
@pytest.mark.parametrize(("height", "width", "rows", "columns"), [(256, 96, None, None), (90, 160, 128, 256)])
def test_mxfp4(backend, monkeypatch, spread, height, width, rows, columns):
    """gate and up stacked, interleaved, apart, and one expert at a time: the same codes, exact where the
    scales of a tile are at most 2^14 apart."""
    rng, experts = generator(), 2
    codes, blocks, scales = mxfp4_of(rng, experts, 2 * height, width, spread)
    halves = [
        [oracle(*(x[e][part] for x in (codes, scales))) for part in np.s_[:height, height:]]
        for e in range(experts)
    ]
    wanted = np.zeros((experts, 2, rows or height, columns or width), np.uint8)
    wanted_scales = np.ones((experts, 2, *tiles(*wanted.shape[2:])))
    for e, p in np.ndindex(experts, 2):
        part, of_tiles, _ = halves[e][p]
        wanted[e, p, :height, :width] = part
        wanted_scales[e, p, : len(of_tiles), : of_tiles.shape[1]] = of_tiles
    counts = [sum(half[2] for half in of_expert) for of_expert in halves]
    assert any(counts) == (spread > 14)

    def interleaved(x):
        pair = x.reshape(experts, 2, height, *x.shape[2:])
        return np.ascontiguousarray(pair.swapaxes(1, 2)).reshape(x.shape)

    def apart(x):
        return tuple(map(np.ascontiguousarray, np.split(x, 2, axis=1)))

    # cupy.asarray refuses ml_dtypes' E8M0; test_arrays_of_frameworks has torch's in CUDA memory
    e8m0 = np.uint8 if backend is GPU else ml_dtypes.float8_e8m0fnu
    forms = [
        ((blocks, scales), {"parts": 2}),
        ((interleaved(blocks), interleaved(scales)), {"parts": 2, "interleaved": True}),
        ((apart(blocks), apart(scales)), {}),
        (([*blocks.copy()], [*scales.view(e8m0).copy()]), {"parts": 2}),
        ((blocks.reshape(experts, 2 * height, -1).view(np.int8), scales), {"parts": 2, "columnwise": False}),
    ]
    backend.start(monkeypatch)
    for form, options in forms:
        w, rounded = fp8moe.from_mxfp4(*map(uploaded(backend), form), rows=rows, columns=columns, **options)
        w, rounded = backend.download(w), backend.download(rounded)
        check_orientations(w, values_of(w.rowwise.data, w.rowwise.scales))
        assert rounded.tolist() == counts
        assert rounded.dtype == np.int32
        np.testing.assert_array_equal(w.rowwise.data, wanted.reshape(w.shape))
        np.testing.assert_array_equal(w.rowwise.scales, wanted_scales.reshape(w.rowwise.scales.shape))


def uploaded(backend):
    def upload(x):
        return type(x)(map(upload, x)) if isinstance(x, (list, tuple)) else backend.upload(x)

    return upload


@over("hidden", reference=[(160,)], on_gpu=[(256,)])
def test_the_layer_multiplies_by_published_weights(backend, monkeypatch, hidden):
    """Gate and up of 96 rows: scales that are no powers of two, as dequantised weights in bfloat16; an expert
    that hardly exists, with scales of 1e-38, gives finite results."""
    rng, experts, ffn = generator(), 3, 96
    values = []
    for shape in ((ffn, hidden), (ffn, hidden), (hidden, ffn)):
        wide = rng.standard_normal((experts, *shape), np.float32)
        q = fp8moe.quantize(wide, block=(128, 128), pow2=False)
        assert np.any(np.frexp(q.scales)[0] != 0.5)
        q.scales[0] = 1e-38
        values.append(q)
    x, dy = (rng.standard_normal((40, hidden)).astype(BF16) for _ in range(2))
    ids = rng.integers(0, experts, (40, 2)).astype(np.int32)
    probs = rng.random((40, 2), np.float32)
    gradients = {"gradients": ("dx", "dprobs")}
    dense = [fp8moe.dequantize(q) for q in values]
    dense = np.concatenate(dense[:2], axis=1), dense[2]
    y, saved = fp8moe.moe_forward(x.astype(np.float32), *dense, ids, probs, recipe="bf16", **gradients)
    wanted = y, fp8moe.moe_backward(saved, dy.astype(np.float32), **gradients).dx
    backend.start(monkeypatch)
    codes = [backend.upload(q.data) for q in values]
    scales = [backend.upload(q.scales) for q in values]
    w13 = fp8moe.from_block_fp8((codes[0], codes[1]), (scales[0], scales[1]), rows=128)
    w2 = fp8moe.from_block_fp8(codes[2], scales[2], columns=128)
    rows, *routing = map(backend.upload, (x, ids, probs))
    y, saved = fp8moe.moe_forward(rows, w13, w2, *routing, recipe="fp8_flow", **gradients)
    actual = y, fp8moe.moe_backward(saved, backend.upload(dy), **gradients).dx
    for a, b in zip(map(backend.download, actual), wanted, strict=True):
        a, b = a.astype(np.float64), b.astype(np.float64)
        assert np.linalg.norm(a - b) < FP8_NOISE * np.linalg.norm(b)  # finite, too


CODES, TILES = np.zeros((2, 192, 160), np.uint8), np.ones((2, 2, 2), np.float32)
BLOCKS, EXPONENTS = np.zeros((2, 4, 3, 16), np.uint8), np.full((2, 4, 3), 120, np.uint8)


def changed(x, value, at=(1, 1, 1)):
    x = x.copy()
    x[at] = value
    return x


BLOCK_FP8_ERRORS = [
    ((CODES, None), {}, TypeError, "scale_inv: got None; wanted the scales"),
    (
        (CODES.astype(np.float32), TILES),
        {},
        TypeError,
        "codes: got dtype float32; wanted uint8, float8_e4m3fn",
    ),
    ((CODES.view(ml_dtypes.float8_e5m2), TILES), {}, TypeError, "codes: got dtype float8_e5m2"),
    ((CODES, TILES.astype(np.float64)), {}, TypeError, "scale_inv: got dtype float64"),
    ((CODES[0], TILES), {}, ValueError, r"codes: got shape \[192, 160\]; wanted \[E, N, K\]"),
    ((CODES, TILES[:, :1].copy()), {}, ValueError, r"scale_inv: got shape \[2, 1, 2\]; wanted \[2, 2, 2\]"),
    ((CODES, TILES), {"parts": 2, "rows": 128}, ValueError, r"span two parts; .*reshape\(2, 2, 1, 2\)"),
    ((CODES[:, :64].copy(), TILES[:, :1].copy()), {"parts": 2, "rows": 128}, ValueError, "serves exactly"),
    ((CODES, TILES), {"parts": 2}, ValueError, "rows: got 96 of each of 2 parts; .*rows=128"),
    ((CODES, TILES), {"rows": 100}, ValueError, "rows: got 100"),
    (([*CODES], TILES), {}, ValueError, "scale_inv: got one array; wanted a list of 2, as codes"),
    (([*CODES], [TILES[0]]), {}, ValueError, "scale_inv: got a list of 1; wanted a list of 2"),
    (((CODES, CODES), TILES), {}, ValueError, "scale_inv: got one array; wanted a tuple of 2"),
    (((CODES, CODES[:1]), (TILES, TILES[:1])), {}, ValueError, r"codes\[1\]: got 1 experts; wanted 2"),
    (((CODES, CODES[:, :5].copy()), (TILES, TILES)), {}, ValueError, r"codes\[1\]: got shape \[2, 5, 160\]"),
    (([], []), {}, ValueError, "codes: got a list of 0; wanted an array"),
    ((changed(CODES, 0xFF), TILES), {}, ValueError, r"codes: got NaN, byte 255, at \[1, 1, 1\]"),
    (([*changed(CODES, 0x7F)], [*TILES]), {}, ValueError, r"codes\[1\]: got NaN, byte 127, at \[1, 1\]"),
    *(
        (
            (CODES, changed(TILES, x)),
            {},
            ValueError,
            rf"scale_inv: got {got} at \[1, 1, 1\]; wanted positive, fin",
        )
        for x, got in ((0, "0.0"), (-0.5, "-0.5"), (np.inf, "inf"), (np.nan, "nan"))
    ),
    ((CODES, changed(TILES.astype(np.uint8), 255)), {}, ValueError, "scale_inv: got NaN, byte 255"),
    ((CODES, TILES), {"transposed": 1}, TypeError, "transposed: got int"),
]
MXFP4_ERRORS = [
    ((BLOCKS, None), {}, TypeError, "scales: got None"),
    ((BLOCKS.view(ml_dtypes.float8_e4m3fn), EXPONENTS), {}, TypeError, "blocks: got dtype float8_e4m3fn"),
    ((BLOCKS, EXPONENTS.astype(np.float32)), {}, TypeError, "scales: got dtype float32"),
    ((BLOCKS[..., :8].copy(), EXPONENTS), {}, ValueError, r"blocks: got shape \[2, 4, 3, 8\]; wanted"),
    ((BLOCKS.reshape(2, 4, -1)[..., :5].copy(), EXPONENTS), {}, ValueError, "blocks: got 5 bytes a row"),
    ((BLOCKS, EXPONENTS[:, :3].copy()), {}, ValueError, r"scales: got shape \[2, 3, 3\]; wanted \[2, 4, 3\]"),
    ((BLOCKS, changed(EXPONENTS, 255)), {}, ValueError, r"scales: got NaN, byte 255, at \[1, 1, 1\]"),
    ((BLOCKS, EXPONENTS), {"interleaved": True}, ValueError, "interleaved: got True with parts=1"),
    ((BLOCKS, EXPONENTS), {"parts": 3, "rows": 128}, ValueError, "blocks: got 4 rows; wanted a multiple of"),
]


@pytest.mark.parametrize(
    ("function", "arguments", "options", "error", "message"),
    [
        *(("from_block_fp8", *case) for case in BLOCK_FP8_ERRORS),
        *(("from_mxfp4", *case) for case in MXFP4_ERRORS),
    ],
)
def test_errors(function, arguments, options, error, message):
    with pytest.raises(error, match=message):
        getattr(fp8moe, function)(*arguments, **options)


@everywhere
@pytest.mark.parametrize("shape", [(0, 256, 64), (2, 0, 64), (2, 256, 0), (0, 0, 0)])
def test_sizes_of_zero(backend, monkeypatch, shape):
    backend.start(monkeypatch)
    codes, scales = np.zeros(shape, np.uint8), np.ones((shape[0], *tiles(*shape[1:])), np.float32)
    w = fp8moe.from_block_fp8(backend.upload(codes), backend.upload(scales), parts=2)
    found = backend.download(w)
    assert found.shape == found.columnwise.shape == shape
    back, scales_back = fp8moe.to_block_fp8(w, parts=2, scale_dtype="ue8m0")
    half = (shape[0], shape[1] // 2, shape[2])
    for a, b in zip(back, scales_back, strict=True):
        assert backend.download(a).shape == half
        assert backend.download(b).shape == (shape[0], *tiles(*half[1:]))
    blocks, exponents = (
        np.zeros((*shape[:2], shape[2] // 2), np.uint8),
        np.ones((*shape[:2], shape[2] // 32), np.uint8),
    )
    w, rounded = fp8moe.from_mxfp4(
        backend.upload(blocks), backend.upload(exponents), parts=2, interleaved=True
    )
    assert (backend.download(w).shape, backend.download(rounded).tolist()) == (shape, [0] * shape[0])


def test_errors_of_the_export():
    w = fp8moe.from_block_fp8(CODES, changed(TILES, 0.3))
    for dtype in ("bfloat16", "ue8m0"):
        with pytest.raises(
            ValueError, match=rf"scale_dtype: got '{dtype}' with a scale of 0.3\d* at \[1, 1, 1\]"
        ):
            fp8moe.to_block_fp8(w, scale_dtype=dtype)
    with pytest.raises(ValueError, match="parts: got 2 of 192 rows"):
        fp8moe.to_block_fp8(w, parts=2)
    with pytest.raises(ValueError, match="rows: got 193"):
        fp8moe.to_block_fp8(w, rows=193)
    with pytest.raises(TypeError, match=r"q.fmt: got 'e5m2'"):
        fp8moe.to_block_fp8(fp8moe.quantize(CODES.astype(np.float32), fmt="e5m2", block=(128, 128)))
    with pytest.raises(TypeError, match=r"q.block: got \(1, 128\)"):
        fp8moe.to_block_fp8(fp8moe.quantize(np.ones((2, 128), np.float32)))


@only_on_cpu
def test_values_in_cuda_memory_are_read_for_checks_only(backend, monkeypatch):
    """Without FP8MOE_CHECK nothing is read back, and codes of MXFP4 scales of NaN are NaN."""
    from fp8moe.kernels_cuda.runtime import launch

    backend.start(monkeypatch)
    reads, copy = [], launch.copy_to_host
    monkeypatch.setattr(launch, "copy_to_host", lambda x: reads.append(x) or copy(x))
    bad_codes, bad_scales = changed(CODES, 0x7F), changed(TILES, -1)
    bad_blocks = changed(EXPONENTS, 255)
    w = fp8moe.from_block_fp8(*map(backend.upload, (bad_codes, bad_scales)))
    mx, _ = fp8moe.from_mxfp4(*map(backend.upload, (BLOCKS, bad_blocks)))
    fp8moe.to_block_fp8(w)
    assert not reads
    nan = backend.download(mx).rowwise.data == 0x7F
    assert nan[1, 1, 32:64].all()
    assert np.count_nonzero(nan) == 32
    monkeypatch.setenv("FP8MOE_CHECK", "1")
    for arguments, message in (
        ((bad_codes, TILES), "codes: got NaN"),
        ((CODES, bad_scales), "scale_inv: got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            fp8moe.from_block_fp8(*map(backend.upload, arguments))
    with pytest.raises(ValueError, match="scales: got NaN"):
        fp8moe.from_mxfp4(*map(backend.upload, (BLOCKS, bad_blocks)))


def test_subnormal_scales_in_a_thread_that_flushes_them():
    torch = pytest.importorskip("torch")
    rng = generator()
    codes, scales = codes_of(rng, 1, 128, 256), np.array([[[1e-38, 2.0**-149]]], np.float32)
    wanted = values_of(codes, scales)
    flushes = torch.set_flush_denormal(True)
    try:
        w = fp8moe.from_block_fp8(codes, scales)
        back = fp8moe.to_block_fp8(w)[1].tobytes()
        with pytest.raises(ValueError, match="scale_dtype: got 'bfloat16'"):
            fp8moe.to_block_fp8(w, scale_dtype="bfloat16")
    finally:
        torch.set_flush_denormal(False)
    assert flushes
    assert back == scales.tobytes()
    check_orientations(w, wanted)


@pytest.mark.parametrize("framework", ["torch", "jax", pytest.param("torch on cuda", marks=pytest.mark.gpu)])
def test_arrays_of_frameworks(framework):
    """Results are the framework's arrays, with the bits of NumPy's; FP8 dtypes are read in place."""
    rng = generator()
    codes, scales = codes_of(rng, 2, 96, 160), scales_of(rng, "bfloat16", 2, *tiles(96, 160))
    _, blocks, exponents = mxfp4_of(rng, 2, 64, 96, 8)
    if framework != "jax":
        torch = pytest.importorskip("torch")
        device = "cuda" if framework == "torch on cuda" else "cpu"

        def array(x, dtype):
            x = x.view(np.int16) if dtype == "bfloat16" else x
            return torch.from_numpy(x.copy()).to(device).view(getattr(torch, dtype))

        def downloaded(x):
            return np.asarray(x.cpu())
    else:
        jax = pytest.importorskip("jax")

        def array(x, dtype):
            return jax.numpy.asarray(x.view(dtype if dtype != "bfloat16" else BF16))

        downloaded = np.asarray

    w = fp8moe.from_block_fp8(array(codes, "float8_e4m3fn"), array(scales, "bfloat16"))
    kind = type(array(codes, "uint8"))
    expected = fp8moe.from_block_fp8(codes, scales)
    mx, rounded = fp8moe.from_mxfp4(array(blocks, "uint8"), array(exponents, "float8_e8m0fnu"))
    expected_mx, _ = fp8moe.from_mxfp4(blocks, exponents)
    assert downloaded(rounded).tolist() == [0, 0]
    for got, wanted in ((w, expected), (mx, expected_mx)):
        for a, b in zip(arrays_in(got), arrays_in(wanted), strict=True):
            assert isinstance(a, kind)
            np.testing.assert_array_equal(downloaded(a), b)
    back, scales_back = fp8moe.to_block_fp8(w, scale_dtype="bfloat16")
    assert downloaded(back).tobytes() == codes.tobytes()
    assert scales_back.dtype == array(scales, "bfloat16").dtype


@pytest.mark.parametrize("door", ["core", "torch", "jax"])
def test_codes_in_place_of_weights_name_the_conversion(door):
    x, ids, probs = np.ones((4, 128), BF16), np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32)
    w13, w2 = np.zeros((2, 256, 128), np.uint8), np.zeros((2, 128, 128), np.uint8)
    if door == "torch":
        torch = pytest.importorskip("torch")
        experts = pytest.importorskip("fp8moe.torch").moe_experts
        w13, w2 = (torch.from_numpy(w).view(torch.float8_e4m3fn) for w in (w13, w2))
        x, ids, probs = torch.ones(4, 128).bfloat16(), torch.from_numpy(ids), torch.from_numpy(probs)
    else:
        w13, w2 = (w.view(ml_dtypes.float8_e4m3fn) for w in (w13, w2))
        experts = fp8moe.moe_forward
    if door == "jax":
        numpy = pytest.importorskip("jax").numpy
        experts = pytest.importorskip("fp8moe.jax").moe_experts
        x, w13, w2, ids, probs = map(numpy.asarray, (x, w13, w2, ids, probs))
    with pytest.raises(
        TypeError, match=r"w13: got dtype \S*float8_e4m3fn.* or .*fp8moe.from_block_fp8\(w13, scale"
    ):
        experts(x, w13, w2, ids, probs)


def test_transformers_reads_the_same_values():
    """gpt-oss: what transformers dequantises, [E, H, 2F] with gate and up interleaved, is in the codes."""
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    rng, experts, ffn, hidden = generator(), 2, 80, 96
    _, blocks, scales = mxfp4_of(rng, experts, 2 * ffn, hidden, 6)
    theirs = mxfp4.convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    w, rounded = fp8moe.from_mxfp4(blocks, scales, parts=2, interleaved=True, rows=128)
    assert not rounded.any()
    ours = fp8moe.dequantize(w.rowwise).reshape(experts, 2, 128, hidden)[:, :, :ffn]
    np.testing.assert_array_equal(ours, theirs.numpy().reshape(experts, hidden, ffn, 2).transpose(0, 3, 2, 1))
