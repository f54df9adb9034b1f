"""The scaling-aware transpose compared with exact dequantisation and quantisation in float64."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from backends import on_cuda, only_on_cpu, only_on_gpu, over
from cases import (
    BF16,
    assert_same,
    from_float8,
    generator,
    offsets_of,
    random_rowwise,
    routings,
    same_bits,
    values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import exact, stored, transposed

import fp8moe
from fp8moe import QuantTensor

RNG = generator()


def check(q, got, ranges, target="column"):
    codes, scales = transposed(q, ranges, target)
    height = q.block[1]
    assert same_bits(got.scales[: len(scales)], stored(scales, height == 32))
    for lo, hi in ranges:
        assert same_bits(got.data[:, lo:hi], codes[:, lo:hi])
    assert got.block == (height, 1)


def every_code_under_every_difference(fmt, width):
    """All 256 codes in a block with a row that sets the target scale 0 to 40 powers of two above and below
    their own."""
    every = np.arange(256, dtype=np.uint8)
    finite = np.isfinite(from_float8(every, fmt))
    largest = int(np.argmax(np.where(finite[:128], from_float8(every, fmt)[:128], -1)))
    for difference in range(41):
        for up in (False, True):
            codes = np.stack([every, np.full(256, largest, np.uint8)])
            # "up": the other row is the smaller one, so that codes move to a smaller target
            exponents = np.array([0, -difference if up else difference])
            scales = exponents[:, None] + np.zeros((2, 256 // width), int)
            stored = (scales + 127).astype(np.uint8) if width == 32 else np.exp2(scales).astype(np.float32)
            yield QuantTensor(codes, stored, fmt, (1, width))


def error_inputs(seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((256, 512))
    zero_row = x.copy()
    zero_row[17] = 0
    return {
        "rows * 2^U[-6,6]": x * np.exp2(rng.uniform(-6, 6, (256, 1))),
        "lognormal rows": x * np.exp(2 * rng.standard_normal((256, 1))),
        "one zero row": zero_row,
    }


@given(
    st.sampled_from((0, 1, 2, 127, 128, 129, 300)),
    st.sampled_from((0, 1, 31, 128, 200)),
    st.sampled_from(("e4m3", "e5m2")),
    st.sampled_from((128, 32)),
    st.sampled_from((0, 3, 20, 60)),
    st.sampled_from(("column", "tile")),
    st.integers(0, 2**32 - 1),
)
def test_transpose_equals_exact_requantisation(rows, cols, fmt, width, spread, target, seed):
    q = random_rowwise(np.random.default_rng(seed), rows, cols, fmt, width, spread)
    got = fp8moe.scaling_aware_transpose(q, target=target)
    assert got.data.shape == (cols, rows)
    assert got.scales.shape == (-(-rows // width), cols)
    check(q, got, [(0, rows)], target)


@given(
    st.lists(st.sampled_from((0, 1, 5, 127, 128, 130)), min_size=1, max_size=6),
    st.sampled_from((128, 32)),
    st.sampled_from(("column", "tile")),
    st.integers(0, 200),
    st.integers(0, 2**32 - 1),
)
def test_every_expert_has_its_own_blocks(counts, width, target, tail, seed):
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    rows = int(offsets[-1]) + tail
    q = random_rowwise(np.random.default_rng(seed), rows, 40, "e4m3", width, 4)
    got = fp8moe.scaling_aware_transpose(q, offsets, target=target)
    ranges = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    check(q, got, ranges, target)
    blocks = sum(-(-c // width) for c in counts)
    assert len(got.scales) >= blocks
    back = fp8moe.dequantize(got, expert_offsets=offsets)
    assert not back[offsets[-1] :].any()


def test_aligned_experts_need_no_additional_scales():
    q = fp8moe.quantize(values(np.random.default_rng(0), (512, 128)))
    offsets = np.array([0, 128, 128, 384], np.int32)
    got = fp8moe.scaling_aware_transpose(q, offsets, align_size=128)
    assert got.scales.shape == (4, 128)
    check(q, got, [(0, 128), (128, 128), (128, 384)])


def blocks_are_tiles(got, tile, offsets):
    """Compares target "block" with target "tile", for experts that begin at multiples of 128."""
    first, end = int(offsets[0]), int(offsets[-1])
    assert got.block == (128, 128)
    assert same_bits(got.data[:, first:end], tile.data[:, first:end])
    wanted = np.zeros(got.scales.shape, np.float32)
    scales = tile.scales[:, ::128].T
    strip = 0
    for lo, hi in itertools.pairwise(offsets):
        blocks = -(-(hi - lo) // 128)
        wanted[:, lo // 128 : lo // 128 + blocks] = scales[:, strip : strip + blocks]
        strip += blocks
    assert same_bits(got.scales, wanted)


@given(
    st.lists(st.sampled_from((0, 128, 256)), min_size=1, max_size=4),
    st.sampled_from((0, 128)),
    st.sampled_from((0, 5, 300)),
    st.sampled_from((1, 128, 200, 272)),
    st.sampled_from(("e4m3", "e5m2")),
    st.sampled_from((0, 3, 20, 60)),
    st.integers(0, 2**32 - 1),
)
def test_blocks_are_tiles(counts, first, tail, columns, fmt, spread, seed):
    offsets = (first + np.concatenate(([0], np.cumsum(counts)))).astype(np.int32)
    q = random_rowwise(np.random.default_rng(seed), int(offsets[-1]) + tail, columns, fmt, 128, spread)
    got = fp8moe.scaling_aware_transpose(q, offsets, target="block", align_size=128)
    tile = fp8moe.scaling_aware_transpose(q, offsets, target="tile", align_size=128)
    blocks_are_tiles(got, tile, offsets)
    one = fp8moe.scaling_aware_transpose(q, target="block")
    blocks_are_tiles(one, fp8moe.scaling_aware_transpose(q, target="tile"), np.array([0, len(q.data)]))
    wide, tall = fp8moe.dequantize(one), fp8moe.dequantize(fp8moe.scaling_aware_transpose(q, target="tile"))
    np.testing.assert_array_equal(wide, tall)


@pytest.mark.parametrize("target", ["column", "tile", "block"])
def test_the_shape_is_that_of_the_logical_matrix(target):
    q = random_rowwise(np.random.default_rng(0), 256, 384, "e4m3", 128, 0)  # spread 0: exact for every target
    got = fp8moe.scaling_aware_transpose(q, target=target)
    assert got.columnwise
    assert (got.shape, got.data.shape) == ((256, 384), (384, 256))
    np.testing.assert_array_equal(fp8moe.dequantize(got), fp8moe.dequantize(q))


def test_blocks_of_unaligned_experts_raise():
    q = fp8moe.quantize(np.ones((256, 128), np.float32))
    with pytest.raises(ValueError, match="expert_offsets: got 100"):
        fp8moe.scaling_aware_transpose(q, np.array([0, 100, 256], np.int32), target="block", align_size=128)


FORMATS_AND_WIDTHS = [(fmt, width) for fmt in ("e4m3", "e5m2") for width in (128, 32)]


@over("fmt, width", reference=FORMATS_AND_WIDTHS, on_gpu=FORMATS_AND_WIDTHS)
def test_every_code_under_every_scale_difference(backend, fmt, width):
    for q in every_code_under_every_difference(fmt, width):
        for target in ("column", "tile"):
            got = fp8moe.scaling_aware_transpose(backend.upload(q), target=target)
            check(q, backend.download(got), [(0, 2)], target)


def test_zeros_nan_and_rows_of_scale_zero():
    codes = np.array([[0x38, 0x80, 0x38], [0x00, 0x00, 0x7F], [0x38, 0x38, 0x38]], np.uint8)
    q = QuantTensor(codes, np.array([[1.0], [2.0**30], [0.0]], np.float32))
    got = fp8moe.scaling_aware_transpose(q)
    assert got.scales[0].tolist() == [2.0**-8, 1.0, 1.0]  # 1.0 of 256 * 2^-8; zeros; NaN
    assert got.data[1].tolist() == [0x80, 0x00, 0x00]  # -0 is preserved, scale 0 gives 0
    assert got.data[2, 1] == 0x7F
    tile = fp8moe.scaling_aware_transpose(QuantTensor(codes[:, :2].copy(), q.scales), target="tile")
    assert tile.scales.tolist() == [[1.0, 1.0]]  # not 2^30, because that row is all zero


@pytest.mark.parametrize("target", ["column", "tile"])
def test_mxfp8_scales_of_nan(target):
    """A block of rows of scale NaN makes its columns' blocks NaN, also if all of its codes are zeros."""
    for code in (0x40, 0, 0x7F):
        codes = np.array([[0x38] * 64, [code] * 32 + [0x40] * 32], np.uint8)
        q = QuantTensor(codes, np.array([[130, 100], [255, 127]], np.uint8), block=(1, 32))
        got = fp8moe.scaling_aware_transpose(q, target=target)
        assert (got.scales[0, :32] == 255).all()
        assert (got.data[:32] == 0x7F).all()
        # 2.0 is 256 * 2^-7; the largest row's scale is 2^0
        assert (got.scales[0, 32:] == (120 if target == "column" else 127)).all()


def test_nan_stays_nan_through_every_step():
    """From quantising on: permuted, summed, transposed and decoded."""
    ids = np.array([[1], [0], [1], [0]], np.int32)
    x, plan = np.ones((4, 64), BF16), fp8moe.plan_topk(ids, 2, align_size=32)
    x[2, 40] = np.nan
    q = fp8moe.quantize(x, block=(1, 32))
    nan = np.zeros((4, 64), bool)
    nan[2, 32:] = True
    np.testing.assert_array_equal(np.isnan(fp8moe.dequantize(q)), nan)
    moved = fp8moe.permute(q, plan).data
    np.testing.assert_array_equal(np.isnan(fp8moe.unpermute(moved, plan)), nan)
    for target in ("column", "tile"):
        alone = fp8moe.scaling_aware_transpose(moved, plan.expert_offsets, target=target, align_size=32)
        assert_same(alone, fp8moe.permute_transpose(q, plan, target=target))
        values = fp8moe.dequantize(alone, expert_offsets=plan.expert_offsets)
        assert np.isnan(values[32:64, 32:]).all()  # the second expert's only block, padding included
        assert np.isfinite(values[:32]).all()
        assert np.isfinite(values[:, :32]).all()


@pytest.mark.parametrize("bad", [3.0, 1.5, -1.0, np.inf, np.nan])
def test_scales_that_are_not_powers_of_two_raise(bad):
    scales = np.ones((2, 1), np.float32)
    scales[1] = bad
    q = QuantTensor(np.ones((2, 8), np.uint8), scales)
    with pytest.raises(ValueError, match=r"q\.scales.*row 1.*powers of two.*pow2=True"):
        fp8moe.scaling_aware_transpose(q)


@given(routings(experts=(1, 3, 8)), st.sampled_from(((1, 128), (1, 32))), st.integers(0, 2**32 - 1))
def test_permute_transpose_equals_permute_and_transpose(case, block, seed):
    ids, experts, align = case
    rng = np.random.default_rng(seed)
    q = fp8moe.quantize(values(rng, (len(ids), 72), BF16), block=block)
    plan = fp8moe.plan_topk(ids, experts, align_size=align)
    got = fp8moe.permute_transpose(q, plan)
    rows = fp8moe.permute(q, plan).data
    wanted = fp8moe.scaling_aware_transpose(rows, plan.expert_offsets, align_size=align)
    assert same_bits(got.data, wanted.data)
    assert same_bits(got.scales, wanted.scales)
    if block == (1, 128):
        plan = fp8moe.plan_topk(ids, experts, align_size=128)
        rows = fp8moe.permute(q, plan).data
        got = fp8moe.permute_transpose(q, plan, target="block")
        keywords = {"target": "block", "align_size": 128}
        assert_same(got, fp8moe.scaling_aware_transpose(rows, plan.expert_offsets, **keywords))


@pytest.mark.parametrize("block", [(1, 128), (1, 32)])
@pytest.mark.parametrize(
    ("kind", "limit"),
    [("rows * 2^U[-6,6]", 2.6e-6), ("lognormal rows", 4.0e-6), ("one zero row", 0.0)],
)
@over("fmt", reference=[("e4m3",)], on_gpu=[("e4m3",), ("e5m2",)])
def test_the_error_table(backend, fmt, kind, limit, block):
    """Relative L2 error against the row-wise tensor, 256 x 512: the median of 9 random tensors is at most the
    limit of the library's specification (the published kernel: 4.7e-5, 1.25e-4 and 4.9), and a target per
    column is never worse than one per tile. Blocks of 32 have fewer rows that must share a scale. e5m2
    satisfies the limits per column too."""
    errors = {"column": [], "tile": []}
    for seed in range(9):
        q = fp8moe.quantize(error_inputs(seed)[kind].astype(np.float32), fmt=fmt, block=block)
        rowwise = exact(q)
        for target, of_target in errors.items():
            expected, got = backend.both(fp8moe.scaling_aware_transpose, q, target=target)
            assert_same(expected, got)
            back = fp8moe.dequantize(got).astype(np.float64)
            of_target.append(np.linalg.norm(back - rowwise) / np.linalg.norm(rowwise))
    column, tile = (np.array(of_target) for of_target in errors.values())
    print(f"{fmt} {block} {kind}: column {np.median(column):.2e}, tile {np.median(tile):.2e}")
    assert np.median(column) <= limit
    assert (column <= tile).all()
    # the second column of the specification; where it has 1.2e-7, the error of a single code: half of a
    # tile's smallest code, 2^-10, for values whose largest is at least 224 times the scale and whose root
    # mean square is a quarter of that
    of_tiles = {"rows * 2^U[-6,6]": 6.0e-6, "lognormal rows": 1.6e-5}.get(kind, 2.0**-10 / 56)
    assert np.median(tile) <= of_tiles or fmt == "e5m2"


def same_transposes(pair, first, end):
    """Codes before the first and after the last expert are undefined."""
    expected, actual = pair
    assert same_bits(expected.data[:, first:end], actual.data[:, first:end])
    assert same_bits(expected.scales, actual.scales)


@on_cuda
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("width", [128, 32])
def test_lines_within_and_across_tiles(backend, fmt, width):
    odd = 208 if width == 128 else 128
    # lines of a result's columns are complete within a tile, across tiles, or experts start at arbitrary rows
    lines, across = ([128, 0, 256], odd, 5), ([144, 0, 176, 16, 32, 16], odd + 128, 30)
    for counts, columns, spread in (
        lines,
        across,
        ([130, 0, 16, 5], 256, 5),
        ([20, 44], odd, 100),
        ([20, 0, 33], 40, 60),
        ([0, 16] * 20, 128, 5),  # more experts than lanes, and than a warp examines at a time
        ([16, *[0] * 130, 5, 20], 128, 5),
    ):
        offsets = offsets_of(counts)
        q = random_rowwise(RNG, int(offsets[-1]), columns, fmt, width, spread)
        if width == 128:
            q.scales[(q.scales == 0) & (RNG.random(q.scales.shape) < 0.5)] = -0.0
        for target in ("column", "tile"):
            assert_same(*backend.both(fp8moe.scaling_aware_transpose, q, offsets, target=target))


@over(
    "block, fmt, tokens, experts, columns, align, target",
    on_cpu=[
        ((1, width), fmt, 30, 3, 128, align, target)
        for width in (128, 32)
        for fmt in ("e4m3", "e5m2")
        for align, target in ((16, "column"), (16, "tile"), (128, "block"))
        if (target, width) != ("block", 32)
    ],
    on_gpu=[
        ((1, 128), "e4m3", 50, 4, *case)
        for case in (
            (72, 16, "column"),
            (144, 16, "column"),
            (640, 128, "column"),
            (640, 1, "column"),
            (640, 1, "tile"),
            (144, 128, "block"),
            (72, 128, "block"),
        )
    ],
)
def test_permute_transpose_of_kernels(backend, block, fmt, tokens, experts, columns, align, target):
    q = fp8moe.quantize(values(RNG, (tokens, columns), BF16), fmt=fmt, block=block)
    plan = a_plan(tokens, experts, align)
    pair = backend.both(fp8moe.permute_transpose, q, plan, target=target)
    same_transposes(pair, 0, plan.expert_offsets[-1])


def a_plan(tokens, experts, align):
    return fp8moe.plan_topk(
        RNG.integers(-1, experts, (tokens, 2)).astype(np.int32), experts, align_size=align
    )


@only_on_gpu
def test_scales_are_checked_on_request(backend, monkeypatch):
    q = fp8moe.quantize(values(RNG, (50, 72), BF16))
    monkeypatch.setenv("FP8MOE_CHECK", "1")
    bad = QuantTensor(q.data, np.full_like(q.scales, 0.3))
    with pytest.raises(ValueError, match="powers of two"):
        fp8moe.scaling_aware_transpose(backend.upload(bad))


@only_on_gpu
@given(
    st.lists(st.sampled_from((0, 1, 5, 127, 128, 130)), min_size=1, max_size=5),
    st.sampled_from((128, 32)),
    st.sampled_from(("e4m3", "e5m2")),
    st.sampled_from(("column", "tile")),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_transposes_of_any_counts(backend, counts, width, fmt, target, seed):
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    q = random_rowwise(np.random.default_rng(seed), int(offsets[-1]), 200, fmt, width, 20)
    assert_same(*backend.both(fp8moe.scaling_aware_transpose, q, offsets, target=target))
    assert_same(*backend.both(fp8moe.scaling_aware_transpose, q, target=target))


@only_on_gpu
@given(
    st.lists(st.sampled_from((0, 1, 16, 48, 127, 128, 130, 256)), min_size=1, max_size=7),
    st.sampled_from((16, 112, 208, 640)),
    st.sampled_from((128, 32)),
    st.sampled_from(("e4m3", "e5m2")),
    st.sampled_from(("column", "column", "tile")),
    st.sampled_from((0, 5, 30, 120)),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=80)
def test_transpose_by_tiles(backend, counts, columns, width, fmt, target, spread, seed):
    """Columns in multiples of 16; blocks that cross tiles; scales within float32's range of each other, and
    beyond it."""
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    q = random_rowwise(np.random.default_rng(seed), int(offsets[-1]), columns, fmt, width, spread)
    assert_same(*backend.both(fp8moe.scaling_aware_transpose, q, offsets, target=target))
    assert_same(*backend.both(fp8moe.scaling_aware_transpose, q, target=target))


@on_cuda
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("columns", [40, 208])
def test_blocks_of_scales_near_and_far(backend, fmt, columns):
    offsets = np.array([128, 256, 256, 512], np.int32)
    options = {"target": "block", "align_size": 128}
    for spread in (0, 4, 20, 60):
        q = random_rowwise(RNG, 560, columns, fmt, 128, spread)
        same_transposes(backend.both(fp8moe.scaling_aware_transpose, q, offsets, **options), 128, 512)
        assert_same(*backend.both(fp8moe.scaling_aware_transpose, q, target="block"))


@only_on_gpu
@given(
    st.lists(st.sampled_from((0, 128, 384)), min_size=1, max_size=7),
    st.sampled_from((0, 256)),
    st.sampled_from((16, 72, 208, 640)),
    st.sampled_from(("e4m3", "e5m2")),
    st.sampled_from((0, 5, 30, 120)),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_transposes_to_blocks_of_any_counts(backend, counts, first, columns, fmt, spread, seed):
    offsets = (first + np.concatenate(([0], np.cumsum(counts)))).astype(np.int32)
    end = int(offsets[-1])
    q = random_rowwise(np.random.default_rng(seed), end + 37, columns, fmt, 128, spread)
    options = {"target": "block", "align_size": 128}
    same_transposes(backend.both(fp8moe.scaling_aware_transpose, q, offsets, **options), first, end)
    assert_same(*backend.both(fp8moe.scaling_aware_transpose, q, target="block"))


@only_on_gpu
def test_transpose_of_many_experts(backend):
    rng = np.random.default_rng(17)
    counts = rng.integers(0, 3, 700) * rng.integers(0, 70, 700)
    offsets = offsets_of(counts)
    q = random_rowwise(rng, int(offsets[-1]) + 37, 32, "e4m3", 128, 3)
    same_transposes(backend.both(fp8moe.scaling_aware_transpose, q, offsets), 0, offsets[-1])


@only_on_cpu
@pytest.mark.parametrize("skip", [1, 4])
@pytest.mark.parametrize("layout", ["compact", "blocked_128x4"])
def test_transpose_of_scales_at_any_address(backend, monkeypatch, skip, layout):
    """The fast kernel loads four MXFP8 scales at once, which must not be misaligned."""
    launched = backend.launched(monkeypatch)
    q, plan = fp8moe.quantize(values(RNG, (30, 128), BF16), block=(1, 32)), a_plan(30, 3, 32)
    packed = np.empty(q.scales.size + skip, np.uint8)[skip:].reshape(q.scales.shape)
    packed[:] = q.scales
    given = backend.upload(replace(q, scales=packed))
    for function, *arguments in ((fp8moe.scaling_aware_transpose,), (fp8moe.permute_transpose, plan)):
        expected = function(q, *arguments, layout=layout)
        actual = function(given, *(backend.upload(a) for a in arguments), layout=layout)
        end = arguments[0].expert_offsets[-1] if arguments else 30
        assert same_bits(expected.data[:, :end], backend.download(actual).data[:, :end])
        assert same_bits(expected.scales, backend.download(actual).scales)
    used = [name for name in launched if name.startswith("scaling_aware_transpose")]
    assert used == 2 * ["scaling_aware_transpose" + ("_plain" if skip == 1 else "")]
