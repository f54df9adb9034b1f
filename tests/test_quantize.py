"""Quantise compared with float64 arithmetic and ml_dtypes casts, block by block."""

import importlib
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import torch
from backends import on_cuda, only_on_cpu, only_on_gpu, over
from cases import (
    BF16,
    FLOAT8,
    KINDS,
    MAX,
    SIZES,
    assert_same,
    from_float8,
    generator,
    poisoned,
    same_bits,
    to_float8,
    values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import at_boundaries, blocks_of, e8m0, quantized, quantized_scale, stored

import fp8moe
from fp8moe.runtime.record_trees import arrays_in, map_arrays

reference = importlib.import_module("fp8moe.reference.quantize")


RNG = generator()
MX_BLOCKS = ((1, 32), (32, 1))


def transformer_engines_e8m0(amax, fmt):
    """Transformer Engine's float_to_e8m0(amax * max_norm_rcp), line by line, for float32."""
    value = np.asarray(amax, np.float32) * np.float32(1.0 / MAX[fmt])
    u = value.view(np.uint32)
    exponent, mantissa = u >> 23, u & 0x7FFFFF
    up = ((mantissa > 0) & (exponent != 0xFE)) & ~((exponent == 0) & (mantissa <= 0x400000))
    actual = np.where(value == 0, 0, exponent + up)
    return np.where(np.isnan(value), 0xFF, np.where(np.isinf(value), 0xFE, actual)).astype(np.uint8)


SIZES_K = (0, 1, 31, 32, 33, 127, 128, 129, 300)


@given(
    st.sampled_from(SIZES),
    st.sampled_from(SIZES_K),
    st.sampled_from(("e4m3", "e5m2")),
    st.sampled_from(((1, 128), (128, 1), (128, 128), (1, 32), (32, 1))),
    st.sampled_from((BF16, np.dtype(np.float16), np.dtype(np.float32))),
    st.booleans(),
    st.sampled_from((0.0, 1e-4, 2.0)),
    st.booleans(),
    st.sampled_from(("up", "floor")),
    st.integers(0, 2**32 - 1),
)
def test_quantize_matches_float64(rows, cols, fmt, block, dtype, pow2, eps, awkward, rounding, seed):
    x = values(np.random.default_rng(seed), (rows, cols), dtype, awkward)
    rounding, pow2 = (rounding, True) if block in MX_BLOCKS else ("up", pow2)
    q = fp8moe.quantize(x, fmt=fmt, block=block, pow2=pow2, eps=eps, scale_rounding=rounding)
    assert q.shape == (rows, cols)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        codes, scales = quantized(x, fmt, block, pow2, eps, rounding)
    assert same_bits(q.scales, stored(scales, 32 in block))
    assert same_bits(q.data, codes.T if q.columnwise else codes)
    assert not (q.scales == 0).any() or 32 in block


@given(
    st.sampled_from((1, 2, 127, 129)),
    st.sampled_from((1, 127, 128, 300)),
    st.sampled_from(("e4m3", "e5m2")),
    st.sampled_from(((1, 128), (128, 1), (128, 128), (1, 32), (32, 1))),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_compiled_form_equals_the_plain_one(rows, cols, fmt, block, round_up, seed):
    x = values(np.random.default_rng(seed), (rows, cols), np.float32, awkward=True)
    kind = fp8moe.QuantTensor(None, None, fmt, block)
    strips = reference.strips_of(x.shape, block)
    dtype = np.uint8 if 32 in block else np.float32
    results = []
    for form in (reference.quantize_strips, reference.quantize_strips_plain):
        codes = poisoned(x.shape, np.uint8)
        scales = poisoned((len(strips), -(-cols // block[1])), dtype)
        form(x, strips, block[1], kind, round_up, 0.0, codes, scales)
        results.append((codes, scales))
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize("width", [128, 32])
def test_scales_of_no_rows_are_zeros(width):
    """With experts there may be more rows of scales than blocks."""
    x, offsets = np.ones((5, 3), np.float32), np.array([0, 2, 2, 4], np.int32)
    scales = poisoned((6, 3), np.float32 if width == 128 else np.uint8)
    out = fp8moe.QuantTensor(poisoned((3, 5), np.uint8), scales, block=(width, 1))
    reference.quantize(x, round_up=True, eps=0.0, out=out, expert_offsets=offsets)
    assert scales[:2].all()
    assert not scales[2:].any()


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_bfloat16_value_is_encoded_as_ml_dtypes_does(fmt):
    """All 65,536 bit patterns at scale 1, each in a block with a value that makes the scale 1."""
    every = np.arange(65536, dtype=np.uint16).view(BF16)
    x = every.astype(np.float32)
    inside = np.abs(x) <= MAX[fmt]
    x = np.where(inside, x, np.float32(0))
    block = np.zeros((65536, 128), np.float32)
    block[:, 0], block[:, 1] = x, MAX[fmt]
    q = fp8moe.quantize(block.astype(BF16), fmt=fmt)
    assert (q.scales == 1).all()
    wanted = block.astype(FLOAT8[fmt]).view(np.uint8)
    assert same_bits(q.data, wanted)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_pow2_scales_are_the_ceiling_for_every_normal_amax(fmt):
    """Truncating 448/amax and rounding amax/448 up to a power of two give the same scale, for every bfloat16
    amax."""
    amax = np.arange(0x0080, 0x7F80, dtype=np.uint16).view(BF16)
    q = fp8moe.quantize(amax[:, None], fmt=fmt)
    for value, scale in zip(amax.astype(np.float64)[::17], q.scales[::17, 0], strict=True):
        assert scale == quantized_scale(value, fmt, True, False)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_special_values(fmt):
    x = np.zeros((6, 128), np.float32)
    x[0, 0] = np.nan
    x[0, 1] = 3.0
    x[1, 0], x[1, 1] = np.inf, -np.inf
    x[2, 0] = -0.0
    x[3, 0] = 1e-45  # a subnormal amax: the scale stays normal
    x[4, 0] = 3e38
    x[5, 0] = -MAX[fmt] * 1.01
    q = fp8moe.quantize(x, fmt=fmt)
    assert q.scales[0] == 1
    assert q.data[0, 0] == 0x7F
    assert from_float8(q.data[0:1, 1:2], fmt) == 3.0
    assert from_float8(q.data[1, :2], fmt).tolist() == [MAX[fmt], -MAX[fmt]]
    assert q.data[2, 0] == 0x80
    assert q.scales[3] == 2.0**-126
    assert q.scales[4] > 2.0**100
    assert q.scales[5] == 2


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)])
def test_mxfp8_on_both_sides_of_every_boundary(dtype, fmt, rounding):
    amax = at_boundaries(fmt, dtype)
    if dtype.itemsize == 2:  # every finite number instead
        every = np.arange(0x8000, dtype=np.uint16).view(dtype)
        amax = every[np.isfinite(every.astype(np.float32))]
    x = blocks_of(amax, generator())
    wanted = e8m0(amax, fmt, rounding)
    if dtype == np.float32:  # every byte of a finite block; other dtypes cannot produce all of them
        assert set(wanted.tolist()) == set(range(int(e8m0(np.finfo(np.float32).max, fmt, rounding)) + 1))
    scaled = x.astype(np.float64) / np.exp2(wanted.astype(np.float64) - 127)[:, None]
    q = fp8moe.quantize(x, fmt=fmt, block=(1, 32), scale_rounding=rounding)
    assert same_bits(q.scales, wanted[:, None])
    assert same_bits(q.data, to_float8(scaled, fmt))
    transposed = fp8moe.quantize(x.T.copy(), fmt=fmt, block=(32, 1), scale_rounding=rounding)
    assert same_bits(transposed.scales, wanted[None])
    assert same_bits(transposed.data, q.data)
    both = fp8moe.quantize(x, fmt=fmt, block=(1, 32), scale_rounding=rounding, columnwise=True)
    assert_same(both.rowwise, q)
    assert_same(both.columnwise, fp8moe.quantize(x, fmt=fmt, block=(32, 1), scale_rounding=rounding))
    if rounding == "up":  # the block's range is fully used and nothing saturates
        assert np.abs(scaled).max() <= MAX[fmt] * (1 + 2.0**-23)
        assert (np.abs(scaled).max(axis=1)[wanted > 0] > MAX[fmt] / 2).all()


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)])
def test_mxfp8_scales_are_transformer_engines(dtype, fmt):
    amax = np.append(at_boundaries(fmt, dtype), np.array([np.inf, np.nan], dtype))
    q = fp8moe.quantize(amax[:, None], fmt=fmt, block=(1, 32))
    assert same_bits(q.scales[:, 0], transformer_engines_e8m0(amax, fmt))


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_special_values_of_mxfp8(fmt, rounding):
    x, emax = np.zeros((6, 32), np.float32), {"e4m3": 8, "e5m2": 15}[fmt]
    x[1, 3] = -0.0
    x[2, :3] = np.inf, -np.inf, 3e38
    x[3, :3] = np.nan, np.inf, 3.0
    x[4, 0] = -1e-45
    x[5, 0] = np.finfo(np.float32).max
    q = fp8moe.quantize(x, fmt=fmt, block=(1, 32), scale_rounding=rounding)
    assert q.scales[:5, 0].tolist() == [0, 0, {"up": 254, "floor": 255 - emax}[rounding], 255, 0]
    assert q.scales[5, 0] == 127 - emax + {"up": 128, "floor": 127}[rounding]
    assert not (q.data[:2] & 0x7F).any()
    assert q.data[1, 3] == 0x80
    back = fp8moe.dequantize(q)
    assert back[2, :2].tolist() == [np.inf, -np.inf]  # 448 * 2^127 and 448 * 2^120 exceed float32
    assert back[2, 2] == 1.75 * 2.0**127
    assert np.isnan(back[3]).all()
    nan = 32 if rounding == "up" else 2
    assert q.data[3].tolist() == [0x7F] * nan + [0] * (32 - nan)
    assert np.isinf(back[5, 0]) == (rounding == "up")  # 2^128 is the nearest, or 1.75 * 2^127
    assert not fp8moe.quantize(np.zeros((32, 3), BF16), block=(32, 1)).scales.any()


def spoilt(dtype, fmt):
    """[N, 128]: MXFP8 blocks at every boundary, and with NaN, both infinities or several of them."""
    rng = generator()
    x = blocks_of(at_boundaries(fmt, dtype), rng)
    x = x[rng.permutation(len(x))[: len(x) // 128 * 128]]
    where = rng.random((len(x), 4)) < 0.1
    for value, chosen in zip((np.nan, -np.nan, np.inf, -np.inf), where.T, strict=True):
        x[chosen, rng.integers(0, 32, chosen.sum())] = value
    return x.reshape(-1, 128)


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)])
def test_mxfp8_is_torchaos(dtype, fmt, rounding):
    """Bit for bit, where torchao is installed, but for the sign of its codes of NaN."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = spoilt(dtype, fmt)
    if dtype == np.float32 and rounding == "up":
        # torchao's logarithm in float32 is a whole number for quotients that are up to 2^-16 above a power
        # of two, and the exponent one less than the ceiling
        amax = np.abs(x.reshape(-1, 32)).max(axis=1).astype(np.float64) / MAX[fmt]
        with np.errstate(invalid="ignore"):
            above = np.frexp(amax)[0] * 2 - 1
        x.reshape(-1, 32)[(above > 0) & (above < 2.0**-16)] = 1
    mode = {"up": mx.ScaleCalculationMode.RCEIL, "floor": mx.ScaleCalculationMode.FLOOR}[rounding]
    x = torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) if dtype == BF16 else torch.from_numpy(x)
    scales, codes = mx.to_mx(x, {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt], 32, mode)
    scales, codes = (a.view(torch.uint8).numpy() for a in (scales, codes))
    assert (scales == 255).any()
    q = fp8moe.quantize(x, fmt=fmt, block=(1, 32), scale_rounding=rounding)
    assert same_bits(q.scales.numpy(), scales)
    # Under the smallest scale torchao multiplies by 1 or 2^126, not by its reciprocal 2^127.
    there = np.repeat(scales != 0, 32, axis=1)
    codes = np.where(np.isnan(from_float8(codes, fmt)), 0x7F, codes)
    assert same_bits(q.data.numpy()[there], codes[there])


def test_normal_numbers_do_not_saturate():
    x = generator().standard_normal((1024, 2048)).astype(np.float32)
    for rounding, saturates in (("up", False), ("floor", True)):
        q = fp8moe.quantize(x, block=(1, 32), scale_rounding=rounding)
        scales = np.repeat(np.exp2(q.scales.astype(np.float64) - 127), 32, axis=1)
        assert (np.abs(x) > MAX["e4m3"] * scales).any() == saturates


def test_unknown_roundings_raise():
    x = np.ones((32, 128), np.float32)
    with pytest.raises(ValueError, match=r"scale_rounding: got 'ceil'; wanted .*'up'.*'floor'"):
        fp8moe.quantize(x, block=(1, 32), scale_rounding="ceil")
    with fp8moe.trace() as traced, pytest.raises(ValueError, match=r"pow2: got False with block \(1, 32\)"):
        fp8moe.quantize(x, block=(1, 32), pow2=False)
    assert traced.casts == 0
    for block in ((1, 128), (128, 1), (128, 128), None):
        with pytest.raises(ValueError, match=r"scale_rounding: got 'floor' with block .*\(1, 32\)"):
            fp8moe.quantize(x, block=block, scale_rounding="floor")


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 127, 130])
def test_layouts_convert_for_any_number_of_rows(rows):
    x = values(np.random.default_rng(rows), (rows, 300), BF16)
    compact = fp8moe.quantize(x)
    ready = fp8moe.quantize(x, layout="gemm_ready")
    assert ready.scales.shape == (3, (rows + 3) // 4 * 4)
    assert same_bits(ready.scales[:, :rows], compact.scales.T)
    assert not ready.scales[:, rows:].any()
    assert same_bits(fp8moe.to_layout(compact, "gemm_ready").scales, ready.scales)
    back = fp8moe.to_layout(ready, "compact")
    assert same_bits(back.scales, compact.scales)
    assert back.data is ready.data
    assert same_bits(fp8moe.dequantize(ready), fp8moe.dequantize(compact))


@pytest.mark.parametrize("block", [(1, 128), (1, 32)])
def test_columnwise_is_returned_with_rowwise(block):
    x = values(np.random.default_rng(1), (200, 136), BF16)
    both = fp8moe.quantize(x, block=block, columnwise=True)
    assert same_bits(both.rowwise.data, fp8moe.quantize(x, block=block).data)
    codes, scales = quantized(x, "e4m3", block[::-1])
    assert same_bits(both.columnwise.data, codes.T)
    assert same_bits(both.columnwise.scales, stored(scales, 32 in block))


def test_weights_of_several_experts_and_their_transpose():
    w = values(np.random.default_rng(2), (3, 200, 136), BF16)
    both = fp8moe.quantize(w, block=(128, 128), columnwise=True)
    for e in range(3):
        codes, scales = quantized(w[e], "e4m3", (128, 128))
        assert same_bits(both.rowwise.data[e], codes)
        assert same_bits(both.rowwise.scales[e], scales.astype(np.float32))
    assert both.columnwise.transposed
    assert (both.columnwise.shape, both.columnwise.data.shape) == ((3, 200, 136), (3, 136, 200))
    assert same_bits(both.columnwise.data, both.rowwise.data.transpose(0, 2, 1).copy())
    assert same_bits(fp8moe.dequantize(both.columnwise), fp8moe.dequantize(both.rowwise))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("count", "num_arrays"), [(1, 1), (2, 1), (2, 2)])
def test_weights_in_parts_equal_their_padded_concatenation(count, num_arrays, transposed):
    rng = np.random.default_rng(3)
    halves = [values(rng, (3, 100, 72), BF16, awkward=True) for _ in range(count)]
    whole = np.zeros((3, count * 128, 200), BF16)
    for i, half in enumerate(halves):
        whole[:, i * 128 : i * 128 + 100, :72] = half
    wanted = fp8moe.quantize_weights(whole)
    arrays = halves if num_arrays == count else [np.concatenate(halves, axis=1)]
    if transposed:
        arrays = [a.transpose(0, 2, 1).copy() for a in arrays]
    out = fp8moe.quantize_weights(np.ones_like(whole))
    for a in arrays_in(out):
        a.view(np.uint8)[:] = 0xA5
    options = {
        "parts": count if num_arrays == 1 else 1,
        "rows": 128,
        "columns": 200,
        "transposed": transposed,
    }
    x = tuple(arrays) if num_arrays > 1 else arrays[0]
    for actual in (fp8moe.quantize_weights(x, **options), fp8moe.quantize_weights(x, **options, out=out)):
        assert_same(wanted, actual)


@pytest.mark.parametrize("shape", [(2, 0, 72), (2, 100, 0), (0, 100, 72)])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_without_elements_are_zeros_where_there_is_room(shape, transposed):
    experts, height, width = shape
    x = np.ones((experts, width, height) if transposed else shape, BF16)
    wanted = fp8moe.quantize_weights(np.zeros((experts, 256, 72), BF16))
    options = {"rows": 128, "columns": 72, "transposed": transposed}
    for arrays, parts in ((x, 2), ((x, x), 1)):
        got = fp8moe.quantize_weights(arrays, parts=parts, **options)
        assert_same(wanted, got)


@pytest.mark.parametrize(
    ("x", "keywords", "words"),
    [
        ((np.ones((1, 100, 8), BF16),) * 2, {}, "rows: got 100 of each of 2 parts; .* pass rows=128"),
        (np.ones((1, 255, 8), BF16), {"parts": 2}, "x: got 255 rows; wanted a multiple of parts = 2"),
        (np.ones((1, 256, 8), BF16), {"parts": 2, "rows": 64}, "rows: got 64"),
        (np.ones((1, 256, 8), BF16), {"columns": 7}, "columns: got 7"),
        ((np.ones((1, 128, 8), BF16), np.ones((1, 128, 9), BF16)), {}, r"x\[1\]: got shape \[1, 128, 9\]"),
        ((np.ones((1, 128, 8), BF16),) * 2, {"parts": 4}, "parts: got 4 with a tuple of 2; wanted 1 or 2"),
        ((np.ones((1, 128, 8), BF16),), {"parts": 2}, "parts: got 2 with a tuple of 1; wanted 1"),
    ],
)
def test_invalid_parts_raise(x, keywords, words):
    with pytest.raises(ValueError, match=words):
        fp8moe.quantize_weights(x, **keywords)


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"columnwise": True},
        {"block": (32, 1), "fmt": "e5m2"},
        {"layout": "gemm_ready"},
        {"block": (128, 128), "columnwise": True},
        {"block": None},
    ],
)
def test_quantize_with_out(keywords):
    rng = np.random.default_rng(6)
    first, second = (rng.standard_normal((130, 200)).astype(np.float32) for _ in range(2))
    q, wanted = fp8moe.quantize(first, **keywords), fp8moe.quantize(second, **keywords)
    places = [a.ctypes.data for a in arrays_in(q)]
    assert fp8moe.quantize(second, **keywords, out=q) is q
    assert [a.ctypes.data for a in arrays_in(q)] == places
    assert_same(wanted, q)


def test_invalid_out_raises():
    x = np.ones((130, 200), np.float32)
    q = fp8moe.quantize(x)
    for other in (x[:129], x[:, :199].copy()):
        with pytest.raises(ValueError, match=r"out: got .* wanted .*, as this call returns without out"):
            fp8moe.quantize(other, out=q)
    for keywords in ({"fmt": "e5m2"}, {"columnwise": True}, {"block": (1, 32)}, {"layout": "gemm_ready"}):
        with pytest.raises(ValueError, match="out: got"):
            fp8moe.quantize(x, **keywords, out=q)
    q.data.flags.writeable = False
    with pytest.raises(ValueError, match=r"out\.data: got .*, which is read-only"):
        fp8moe.quantize(x, out=q)


def test_one_scale_per_tensor():
    x = values(np.random.default_rng(3), (33, 65))
    q = fp8moe.quantize(x, block=None)
    scale = quantized_scale(float(np.abs(x).max()), "e4m3", True, False)
    assert q.scales.tolist() == [scale]
    assert same_bits(q.data, to_float8(x.astype(np.float64) / scale, "e4m3"))


@given(
    st.sampled_from(("e4m3", "e5m2")),
    st.sampled_from(((1, 128), (128, 1), (128, 128), (1, 32), (32, 1))),
    st.integers(0, 2**32 - 1),
)
def test_dequantize_is_code_times_scale(fmt, block, seed):
    rng = np.random.default_rng(seed)
    x = values(rng, (150, 140))
    q = fp8moe.quantize(x, fmt=fmt, block=block)
    codes = from_float8(q.data, fmt)
    codes = codes.T if q.columnwise else codes
    scales = 2.0 ** (q.scales.astype(np.float64) - 127) if q.scales.dtype == np.uint8 else q.scales
    factors = np.kron(scales, np.ones(block))[:150, :140]
    got = fp8moe.dequantize(q)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, codes * factors)
    # half an ulp of the code (relative 2^-4 or 2^-3), or of the smallest subnormal step, times the scale
    half = {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17)}[fmt]
    bound = np.maximum(np.abs(x) * half[0], factors * half[1])
    assert (np.abs(got - x) <= bound).all()
    assert same_bits(fp8moe.dequantize(q, dtype="bfloat16"), got.astype(BF16))


def test_nvfp4_rows_decode():
    codes = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], np.uint8)
    scale = np.array([[0x40]], np.uint8)  # 2.0 in e4m3
    q = fp8moe.QuantTensor(codes, scale, "e2m1", (1, 16))
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    wanted = [2 * m for m in magnitudes] + [-2 * m for m in magnitudes]
    assert fp8moe.dequantize(q)[0].tolist() == wanted


def test_float8_arrays_are_accepted_as_codes():
    q = fp8moe.quantize(values(np.random.default_rng(4), (3, 128)))
    as_float8 = fp8moe.QuantTensor(q.data.view(ml_dtypes.float8_e4m3fn), q.scales)
    assert same_bits(fp8moe.dequantize(as_float8), fp8moe.dequantize(q))


@pytest.mark.parametrize("rounding", ["up", "floor"])
@over(
    "dtype, fmt",
    on_cpu=[(BF16, "e4m3"), (np.dtype(np.float16), "e5m2"), (np.dtype(np.float32), "e4m3")],
    on_gpu=[(dtype, fmt) for dtype in KINDS for fmt in ("e4m3", "e5m2")],
)
def test_mxfp8_of_kernels_on_both_sides_of_every_boundary(backend, dtype, fmt, rounding):
    """MXFP8 rounding boundaries, including infinities and NaN, in every kernel that computes such scales."""
    rng = generator()
    x = blocks_of(at_boundaries(fmt, dtype), rng)
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], dtype)
    spoilt = rng.choice(len(x), 40, replace=False)
    x[spoilt, rng.integers(0, 32, 40)] = rng.choice(special, 40)
    x = x[rng.permutation(len(x))[: len(x) // 128 * 128]]
    options = {"fmt": fmt, "scale_rounding": rounding}
    rows, columns = x.reshape(-1, 128), x.reshape(-1, 128, 32).swapaxes(1, 2).reshape(-1, 128)
    assert_same(*backend.both(fp8moe.quantize, rows, block=(1, 32), **options))
    assert_same(*backend.both(fp8moe.quantize, rows[:, :100].copy(), block=(1, 32), **options))
    assert_same(*backend.both(fp8moe.quantize, columns[:, :100].copy(), block=(32, 1), **options))
    both_orientations = {"block": (1, 32), "columnwise": True, **options}
    assert_same(*backend.both(fp8moe.quantize, np.concatenate([rows, columns]), **both_orientations))


@on_cuda
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("rows", "columns"), [(3, 256), (130, 128), (5, 40)])
def test_every_block_and_orientation(backend, fmt, rows, columns):
    x = values(RNG, (rows, columns), BF16, awkward=True)
    blocks = ((1, 128), True), ((1, 128), False), ((1, 32), True), ((128, 1), False), ((128, 128), True)
    for block, pow2 in blocks:
        assert_same(*backend.both(fp8moe.quantize, x, fmt=fmt, block=block, pow2=pow2))
    assert_same(*backend.both(fp8moe.quantize, x, fmt=fmt, columnwise=True))
    assert_same(*backend.both(fp8moe.quantize, x, fmt=fmt, block=(1, 32), columnwise=True))
    expected, actual = backend.both(fp8moe.quantize, x, fmt=fmt, layout="gemm_ready")
    assert_same(expected, actual)
    for q in (expected, fp8moe.quantize(x, fmt=fmt, block=(1, 32)), fp8moe.quantize(x, fmt=fmt)):
        for dtype in ("float32", "bfloat16"):
            expected, actual = backend.both(fp8moe.dequantize, q, dtype=dtype)
            np.testing.assert_array_equal(actual.astype(np.float64), expected.astype(np.float64))


@only_on_gpu
@given(
    st.sampled_from((1, 2, 127, 130)),
    st.sampled_from((1, 33, 128, 300, 384)),
    st.sampled_from(("e4m3", "e5m2")),
    st.sampled_from(((1, 128), (128, 1), (128, 128), (1, 32), (32, 1), None)),
    st.sampled_from(KINDS),
    st.booleans(),
    st.sampled_from(("up", "floor")),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_any_block_of_any_shape(backend, rows, columns, fmt, block, dtype, pow2, rounding, seed):
    x = values(np.random.default_rng(seed), (rows, columns), dtype, awkward=True)
    options = {"fmt": fmt, "block": block}
    if block in ((1, 32), (32, 1)):
        options["scale_rounding"] = rounding
    else:
        options["pow2"] = pow2
    expected, actual = backend.both(fp8moe.quantize, x, **options)
    assert_same(expected, actual)
    if block in ((1, 128), (1, 32)):
        assert_same(*backend.both(fp8moe.quantize, x, **options, columnwise=True))
    for out in ("float32", "bfloat16"):
        a, b = backend.both(fp8moe.dequantize, expected, dtype=out)
        np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))


@only_on_gpu
def test_kernels_encode_every_bfloat16_value(backend):
    x = np.zeros((65536, 128), BF16)
    x[:, 0], x[:, 1] = np.arange(65536, dtype=np.uint16).view(BF16), 448
    for fmt in ("e4m3", "e5m2"):
        assert_same(*backend.both(fp8moe.quantize, x, fmt=fmt))


@on_cuda
def test_layouts_convert_by_kernels(backend):
    x = values(RNG, (130, 300), BF16)
    expected, actual = backend.both(fp8moe.quantize, x, layout="gemm_ready")
    assert_same(expected, actual)
    assert_same(*backend.both(fp8moe.to_layout, expected, layout="compact"))
    assert_same(*backend.both(fp8moe.to_layout, fp8moe.quantize(x), layout="gemm_ready"))
    assert_same(*backend.both(fp8moe.quantize, x, columnwise=True))


@only_on_cpu
@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (0, 0)])
def test_scale_per_tensor_of_an_empty_tensor(backend, shape):
    for eps in (0.0, 2.0):
        assert_same(*backend.both(fp8moe.quantize, np.empty(shape, BF16), block=None, eps=eps))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@over(
    "shapes",
    on_cpu=[([(2, 256, 384), (128, 128), (3, 384, 128), (2, 200, 136), (0, 128, 128), (2, 0, 128)],)],
    on_gpu=[([(3, 200, 136), (3, 256, 384), (2, 1152, 640), (1, 128, 128)],)],
)
def test_weights_of_whole_and_partial_blocks(backend, shapes, dtype, fmt):
    """Blocks without a remainder use quantize_weights, others the slower kernels."""
    for shape in shapes:
        w = values(RNG, shape, dtype, awkward=True)
        for pow2, eps in ((True, 0.0), (False, 0.0), (True, 2.0)):
            options = {"fmt": fmt, "block": (128, 128), "pow2": pow2, "eps": eps}
            assert_same(*backend.both(fp8moe.quantize, w, **options))
            assert_same(*backend.both(fp8moe.quantize, w, columnwise=True, **options))
        if len(shape) == 3:
            assert_same(*backend.both(fp8moe.quantize_weights, w, fmt=fmt))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@over(
    "shapes",
    reference=[([(2, 256, 384), (3, 200, 136), (130, 77), (2, 0, 128)],)],
    on_cpu=[([(2, 256, 384), (3, 200, 136), (2, 129, 77), (130, 144), (0, 128, 128)],)],
    on_gpu=[([(3, 256, 384), (5, 200, 136), (2, 1153, 653), (640, 1144), (40, 2880, 2944)],)],
)
def test_transposed_codes_are_those_that_are_quantised(backend, shapes, fmt):
    """All 256 codes and any scale, at any size; twice gives the codes back."""
    for shape in shapes:
        codes = RNG.integers(0, 256, shape).astype(np.uint8)
        scales = values(RNG, (*shape[:-2], *(-(-n // 128) for n in shape[-2:])), awkward=True)
        q = fp8moe.QuantTensor(codes, scales, fmt, (128, 128))
        other, actual = backend.both(fp8moe.transpose_codes, q)
        assert_same((codes.swapaxes(-1, -2), scales.swapaxes(-1, -2)), (actual.data, actual.scales))
        assert (actual.transposed, actual.shape, actual.fmt) == (True, shape, fmt)
        assert_same(q, backend.both(fp8moe.transpose_codes, other)[1])
        w = values(RNG, shape, awkward=True)
        w.reshape(-1)[: w.size // 2] = 0  # blocks of zeros
        expected = fp8moe.quantize(w, fmt=fmt, block=(128, 128), columnwise=True)
        assert_same(expected.columnwise, backend.both(fp8moe.transpose_codes, expected.rowwise)[1])


@on_cuda
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_transposed_codes_at_any_address(backend, shift, monkeypatch):
    backend.start(monkeypatch)
    codes = RNG.integers(0, 256, shift + 2 * 128 * 144).astype(np.uint8)
    scales = RNG.random((2, 1, 2)).astype(np.float32)
    data = backend.upload(codes)[shift:].reshape((2, 128, 144))
    q = fp8moe.QuantTensor(data, backend.upload(scales), "e4m3", (128, 128))
    actual = backend.download(fp8moe.transpose_codes(q))
    assert same_bits(codes[shift:].reshape(2, 128, 144).swapaxes(1, 2), actual.data)


#: shapes [N, K] of weights, number of parts, and rows of each part and columns of the result
PARTS = (
    ([(128, 256), (128, 256)], 1, None, None),
    ([(100, 72), (100, 72)], 1, 128, 72),
    ([(200, 136)], 2, 128, 200),
    ([(130, 201)], 1, None, 256),
    ([(6, 5), (6, 5)], 1, 256, 131),
)


@pytest.mark.parametrize("transposed", [False, True])
@over("dtype", on_cpu=[(BF16,), (np.dtype(np.float32),)], on_gpu=[(dtype,) for dtype in KINDS])
def test_weights_in_parts_by_kernels(backend, dtype, transposed):
    """Widths that are and are not multiples of eight, with any alignment, with zeros after the values of each
    part."""
    for shapes, parts, rows, columns in PARTS:
        for fmt in ("e4m3", "e5m2"):
            arrays = [values(RNG, (2, *shape), dtype, awkward=True) for shape in shapes]
            if transposed:
                arrays = [np.ascontiguousarray(np.swapaxes(a, 1, 2)) for a in arrays]

            def call(*arrays, fmt=fmt, parts=parts, rows=rows, columns=columns, columnwise=True):
                x = arrays if len(arrays) > 1 else arrays[0]
                keywords = {"parts": parts, "rows": rows, "columns": columns, "transposed": transposed}
                return fp8moe.quantize_weights(x, fmt=fmt, columnwise=columnwise, **keywords)

            expected, actual = backend.both(call, *arrays)
            assert_same(expected, actual)
            _, one = backend.both(partial(call, columnwise=False), *arrays)
            assert_same(expected.rowwise, one)


@only_on_cpu
@pytest.mark.parametrize(
    ("shapes", "options", "kernel"),
    [
        (((256, 384),), {"parts": 2, "rows": 128}, "quantize_weights"),  # w13 of a layer
        (((128, 256),), {"columns": 256}, "quantize_weights"),
        (((128, 256),) * 3, {"rows": 128}, "quantize_weights"),
        (((384, 256),) * 2, {"transposed": True}, "quantize_weights"),
        (((256, 384),), {"parts": 2, "rows": 256}, "quantize_weights_part"),
        (((128, 256),), {"columns": 384}, "quantize_weights_part"),
        (((120, 256),) * 2, {"rows": 128}, "quantize_weights_part"),
    ],
)
def test_weights_without_padding_use_the_faster_kernel(backend, monkeypatch, shapes, options, kernel):
    arrays = [values(RNG, (3, *shape), BF16, awkward=True) for shape in shapes]

    def call(*arrays):
        return fp8moe.quantize_weights(arrays if len(arrays) > 1 else arrays[0], **options)

    expected = call(*arrays)
    launched = backend.launched(monkeypatch)
    assert_same(expected, backend.download(call(*map(backend.upload, arrays))))
    # adjacent parts of one array together
    assert launched == [kernel] * (options.get("parts", len(arrays)) if "part" in kernel else len(arrays))


@only_on_cpu
def test_quantize_weights_into_given_memory(backend):
    weights = [RNG.standard_normal((2, 256, 128)).astype(np.float32) for _ in range(5)]
    wanted = [fp8moe.quantize_weights(w) for w in weights]
    q = fp8moe.quantize_weights(backend.upload(weights[0] * 3))
    for w, new in zip(weights, wanted, strict=True):  # from the third call on by the recording
        assert fp8moe.quantize_weights(backend.upload(w), out=q) is q
        assert_same(new, backend.download(q))


@only_on_cpu
@pytest.mark.parametrize("width", [128, 32])
@pytest.mark.parametrize("odd", ["rowwise.data", "rowwise.scales", "columnwise.data", "columnwise.scales"])
def test_quantize_to_memory_at_any_address(backend, monkeypatch, width, odd):
    """The fast kernel writes four codes, and zeroes four MXFP8 scales, at once."""
    x = values(RNG, (40, 128), BF16)
    options = {"block": (1, width), "columnwise": True}
    wanted = fp8moe.quantize(x, **options)

    side, field = odd.split(".")
    shifted = getattr(getattr(wanted, side), field)

    def memory(a):
        skip = int(a is shifted and a.dtype == np.uint8)  # float32 is always aligned
        return np.empty(a.size + skip, a.dtype)[skip:].reshape(a.shape)

    out = backend.upload(map_arrays(memory, wanted))
    assert fp8moe.quantize(backend.upload(x), **options, out=out) is out
    assert_same(wanted, backend.download(out))


@only_on_cpu
@pytest.mark.parametrize("shape", [(200, 136), (3, 256, 128), (2, 130, 200)])
def test_dequantize_transposed_blocks(backend, shape):
    weights = fp8moe.quantize(values(RNG, shape, BF16), block=(128, 128), columnwise=True)
    for dtype in ("float32", "bfloat16"):
        expected, actual = backend.both(fp8moe.dequantize, weights.columnwise, dtype=dtype)
        assert_same(expected, actual)
        assert same_bits(actual, fp8moe.dequantize(weights.rowwise, dtype=dtype))
