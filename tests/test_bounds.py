"""Bounds of offsets, counts, scales and row maps: out-of-range values raise an error naming the argument
where the host can read them, and on CUDA, where it cannot, the kernels never access memory outside the
arrays."""

import importlib.util
import inspect
import itertools
import re
import warnings
from dataclasses import fields, replace

import cuda_on_cpu
import numpy as np
import pytest
from calls import CALLS
from cases import BF16, assert_same, generator, plan_with, same_bits, values
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8moe
from fp8moe.ops.bias import add_biases, add_biases_backward
from fp8moe.runtime.record_trees import arrays_in, map_arrays

RNG = generator()
IDS = np.array([[0, 1], [1, 2], [0, 2]], np.int32)
X = RNG.standard_normal((3, 256)).astype(np.float32)
PROBS = np.ones((3, 2), np.float32)
PLAN = fp8moe.plan_topk(IDS, 3, align_size=4)  # 12 rows
ROWS = RNG.standard_normal((12, 256)).astype(np.float32)
MASK_PLAN = fp8moe.plan_routing_map(np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]], bool), align_size=4, topk=2)
ROW_MAP = PLAN.row_id_map
H2 = np.ones((64, 256), np.float32)
COLUMNS = fp8moe.quantize(RNG.standard_normal((256, 128)).astype(np.float32), block=(128, 1))
BLOCKS = fp8moe.scaling_aware_transpose(fp8moe.quantize(np.ones((256, 128), np.float32)), target="block")


def ints(*values):
    return np.array(values, np.int32)


def changed(array, place, value):
    array = array.copy()
    array[place] = value
    return array


def mapped(place, value, plan=PLAN):
    return plan_with(plan, row_id_map=changed(plan.row_id_map, place, value))


REFUSED = {
    "offsets that are no multiples": (
        lambda: fp8moe.swiglu_quantize(
            H2, columnwise=True, expert_offsets=np.arange(65, dtype=np.int32), align_size=128
        ),
        r"expert_offsets: got 1 .*multiples of align_size, 128",
    ),
    "offsets that go back": (
        lambda: fp8moe.swiglu_quantize(H2, columnwise=True, expert_offsets=ints(*[0, 64] * 51)),
        r"expert_offsets: got 0 after 64",
    ),
    "offsets below zero": (
        lambda: fp8moe.swiglu_quantize(H2, expert_offsets=ints(-5, 64)),
        r"expert_offsets: got -5",
    ),
    "offsets of a backward": (
        lambda: fp8moe.swiglu_quantize_backward(H2[:, :128].copy(), H2, expert_offsets=ints(0, 60, 50)),
        r"expert_offsets: got 50 after 60",
    ),
    "offsets of a transpose": (
        lambda: fp8moe.scaling_aware_transpose(fp8moe.quantize(H2), ints(0, 20, 64), align_size=16),
        r"expert_offsets: got 20 .*align_size, 16",
    ),
    "offsets of a transpose to blocks": (
        lambda: fp8moe.scaling_aware_transpose(
            fp8moe.quantize(np.ones((256, 128), np.float32)), ints(0, 20, 64), align_size=128, target="block"
        ),
        r"expert_offsets: got 20 .*128",
    ),
    "offsets of a product": (
        lambda: fp8moe.grouped_gemm(ROWS, np.ones((2, 8, 256), np.float32), ints(0, 9, 6)),
        r"expert_offsets: got 6 after 9",
    ),
    "offsets of a weight gradient": (
        lambda: fp8moe.grouped_gemm_wgrad(ROWS, ROWS, ints(3, 2, 6)),
        r"expert_offsets: got 2 after 3",
    ),
    "offsets of a weight gradient of blocks": (
        lambda: fp8moe.grouped_gemm_wgrad(BLOCKS, BLOCKS, ints(0, 100, 256)),
        r"expert_offsets: got 100 .*128",
    ),
    "offsets of a plan": (
        lambda: fp8moe.permute_transpose(fp8moe.quantize(X), replace(PLAN, align_size=128)),
        r"plan.expert_offsets: got 4 .*plan.align_size, 128",
    ),
    "scales of a dequantize": (
        lambda: fp8moe.dequantize(COLUMNS, expert_offsets=ints(0, 100, 200, 256)),
        r"q.scales: got 2 rows of blocks; wanted 3.*expert_offsets",
    ),
    "scales of a weight gradient": (
        lambda: fp8moe.grouped_gemm_wgrad(COLUMNS, COLUMNS, ints(0, 100, 200, 256)),
        r"dy.scales: got 2 rows of blocks; wanted 3.*expert_offsets",
    ),
    "scales of a weight gradient's other operand": (
        lambda: fp8moe.grouped_gemm_wgrad(
            replace(COLUMNS, scales=np.ones((9, 128), np.float32)), COLUMNS, ints(0, 100, 200, 256)
        ),
        r"x.scales: got 2 rows of blocks; wanted 3",
    ),
    "a row past x": (
        lambda: fp8moe.unpermute(ROWS, mapped((1, 0), 12)),
        r"plan.row_id_map: got row .* wanted 0 to 11",
    ),
    "a row past a smaller x": (
        lambda: fp8moe.unpermute(ROWS[:4].copy(), replace(PLAN, num_out_tokens=4)),
        r"plan.row_id_map: got row .*num_out_tokens",
    ),
    "a row before x": (lambda: fp8moe.permute(X, mapped((0, 0), -7)), r"plan.row_id_map: got row -"),
    "a row that padding takes past x": (
        lambda: fp8moe.permute_backward(ROWS, plan_with(PLAN, pad_offsets=ints(0, 0, 2**30))),
        r"plan.row_id_map: got row 10737",
    ),
    "a row that no token goes to": (
        lambda: fp8moe.permute(X, fp8moe.plan_index_map(ints(5, -1, 3), 1, num_out_tokens=8)),
        r"plan.row_id_map: got 0 tokens for row 0; wanted .* one token for each",
    ),
    "a row of two tokens": (
        lambda: fp8moe.permute(X, fp8moe.plan_index_map(ints(0, 1, 1), 1, num_out_tokens=3)),
        r"plan.row_id_map: got 2 tokens for row 1",
    ),
    "a token in a row of padding": (
        lambda: fp8moe.unpermute_backward(X, mapped((0, 0), 1)),
        r"plan.row_id_map: got 1 tokens for row 3; wanted",
    ),
    "no such expert": (lambda: fp8moe.permute(X, mapped((0, 2), 3)), r"plan.row_id_map: got expert 3"),
    "no such expert, of a mask": (
        lambda: fp8moe.unpermute_backward(X, mapped((0, 3), -1, MASK_PLAN)),
        r"plan.row_id_map: got expert -1",
    ),
    "more experts than places": (
        lambda: fp8moe.permute(X, mapped((2, 4), 3)),
        r"plan.row_id_map: got 3 experts of a token; wanted 0 to 2",
    ),
    "no such slot": (
        lambda: fp8moe.permute(X, plan_with(PLAN, slots=changed(PLAN.slots, (0, 0), 2)), PROBS),
        r"plan.slots: got column 2",
    ),
    "a plan of floats": (
        lambda: fp8moe.permute(X, replace(PLAN, data=PLAN.data.astype(np.float32)), PROBS),
        r"plan.data: got dtype float32; wanted int32",
    ),
    "no rows at all": (
        lambda: fp8moe.permute(X, replace(PLAN, num_out_tokens=-3)),
        r"plan.num_out_tokens: got -3",
    ),
    "no alignment": (lambda: fp8moe.permute(X, replace(PLAN, align_size=0)), r"plan.align_size: got 0"),
    "chunks that wrap": (
        lambda: fp8moe.sort_chunks(X, ints(1, 1, 1), ints(0, 1, 2), align_size=2**30, num_out_tokens=8),
        r"align_size: got 1073741824.* int32",
    ),
    "a plan that wraps": (
        lambda: fp8moe.plan_topk(ints(0, 1, 2, 3, 4)[None], 5, align_size=2**30, num_out_tokens=8),
        r"align_size: got 1073741824.* int32",
    ),
    "a mask that wraps": (
        lambda: fp8moe.plan_routing_map(np.ones((1, 5), bool), align_size=2**30, num_out_tokens=8),
        r"align_size: got 1073741824.* int32",
    ),
    "padding that wraps": (
        lambda: fp8moe.pad(X, ints(1, 1, 1), 2**30, num_out_tokens=3),
        r"align_size: got 1073741824.* int32",
    ),
    "experts past memory": (lambda: fp8moe.plan_topk(IDS, 2**31 - 1), r"num_experts: got 2147483647"),
    "sizes that sum past int64": (
        lambda: fp8moe.sort_chunks(X, np.full(4, 2**62), np.arange(4)),
        r"split_sizes: got sizes that sum",
    ),
    "chunks that do not fit": (
        lambda: fp8moe.sort_chunks(X, ints(2, 1), ints(1, 0), num_out_tokens=2),
        r"num_out_tokens: got 2 rows; wanted at least 3",
    ),
    "chunks of a backward that do not fit": (
        lambda: fp8moe.sort_chunks_backward(X, ints(2, 1), ints(1, 0), align_size=4),
        r"grad: got 3 rows; wanted at least 6",
    ),
    "counts past x": (lambda: fp8moe.pad(X, [2, 9], 4), r"tokens_per_expert: got .*11.* 3 rows of x"),
    "counts past x in an array": (
        lambda: fp8moe.pad(X, ints(2, 9), 4),
        r"tokens_per_expert: got .*11.* 3 rows of x",
    ),
    "negative counts": (lambda: fp8moe.pad(X, ints(-2, 3), 4), r"tokens_per_expert: got .*-2"),
    "negative counts, exact": (
        lambda: fp8moe.pad(X, ints(-5), 4, num_out_tokens="exact"),
        r"tokens_per_expert: got .*-5",
    ),
    "huge counts": (lambda: fp8moe.pad(X, np.array([10**12]), 4), r"tokens_per_expert: got .*1000000000000"),
    "huge counts that wrap": (lambda: fp8moe.pad(X, np.full(4, 2**62), 4), r"tokens_per_expert: got"),
    "a result too small to pad into": (
        lambda: fp8moe.pad(X, ints(2, 1), 4, num_out_tokens=4),
        r"num_out_tokens: got 4 rows; wanted at least 5",
    ),
    "padded counts past x": (
        lambda: fp8moe.unpad(X, ints(1, 1), 4),
        r"x: got 3 rows; wanted at least 5 for tokens_per_expert",
    ),
    "a result too small to unpad into": (
        lambda: fp8moe.unpad(ROWS, ints(3, 2), 4, num_out_tokens=4),
        r"num_out_tokens: got 4 rows; wanted at least 5",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_out_of_range_indices_raise(case):
    call, words = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def test_offsets_may_exclude_rows():
    """Offsets may start after row 0 and end before or after the last row; a plan with too few rows has the
    offsets of the full routing."""
    for offsets in (ints(4, 8, 12), ints(0, 4, 4), ints(0, 8, 400), ints(0, 64, 64)):
        h = RNG.standard_normal((60, 256)).astype(np.float32)
        got = fp8moe.swiglu_quantize(h, columnwise=True, expert_offsets=offsets, align_size=4)
        y = fp8moe.swiglu(h)
        strip = 0
        for lo, hi in zip(offsets.clip(0, 60), offsets[1:].clip(0, 60), strict=False):
            if lo < hi:
                alone = fp8moe.quantize(y[lo:hi].copy(), block=(128, 1))
                assert same_bits(got.columnwise.data[:, lo:hi], alone.data)
                assert same_bits(got.columnwise.scales[strip], alone.scales[0])
                strip += 1


def test_row_map_entries_past_the_count_are_ignored():
    plan = fp8moe.plan_topk(ints([0, -1], [-1, -1], [1, 0]), 2)
    junk = plan.row_id_map.copy()
    junk[0, [1, 3]] = 77, 99
    junk[1, :4] = -77
    other = plan_with(plan, row_id_map=junk)
    rows = fp8moe.permute(X, plan).data
    assert same_bits(fp8moe.permute(X, other).data, rows)
    for function in (fp8moe.unpermute, lambda r, p: fp8moe.permute_backward(r, p)[0]):
        assert same_bits(function(rows, other), function(rows, plan))
    assert_same(*(fp8moe.unpermute_backward(X, p, rows, PROBS) for p in (other, plan)))


def test_maps_of_some_rows_are_merged():
    """Reading asks for no more than that rows are there; only who writes must know of all."""
    plan = fp8moe.plan_index_map(ints(11, -1, 7, 11, 2, -1), 2, num_out_tokens=12)
    wanted = np.stack([ROWS[11] + ROWS[11], ROWS[2], ROWS[7]])
    assert same_bits(fp8moe.unpermute(ROWS, plan), wanted)
    assert same_bits(fp8moe.permute_backward(ROWS, plan)[0], wanted)


@pytest.mark.parametrize("by_mask", [False, True])
def test_no_experts(by_mask):
    """Without experts the sums are zeros, and all gradients exist, empty or zero."""
    if by_mask:
        plan = fp8moe.plan_routing_map(np.ones((3, 0), bool), num_out_tokens=8)
    else:
        plan = fp8moe.plan_topk(np.full((3, 2), -1, np.int32), 0, num_out_tokens=8)
    probs = np.ones((3, plan.prob_columns), np.float32)
    moved = fp8moe.permute(X, plan, probs)
    assert moved.data.shape == (8, 256)
    assert not moved.data.any()
    rows = np.full((8, 256), np.nan, np.float32)
    for back in (fp8moe.unpermute(rows, plan), fp8moe.unpermute(rows, plan, probs)):
        assert back.shape == (3, 256)
        assert not back.any()
    assert all(not g.any() for g in fp8moe.permute_backward(rows, plan, rows[:, 0].copy()))
    assert all(not g.any() for g in fp8moe.unpermute_backward(X, plan, rows, probs))
    q = fp8moe.scaling_aware_transpose(fp8moe.quantize(np.ones((300, 128), np.float32)), ints(0))
    again = fp8moe.QuantTensor(q.data, q.scales, q.fmt, q.block)
    assert not fp8moe.dequantize(again, expert_offsets=ints(0)).any()
    assert fp8moe.grouped_gemm_wgrad(q, q, ints(0)).shape == (0, 128, 128)


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
def test_layer_without_experts(recipe):
    x, probs = np.ones((4, 128), BF16), np.ones((4, 2), np.float32)
    w13, w2 = np.ones((0, 256, 128), BF16), np.ones((0, 128, 128), BF16)
    y, saved = fp8moe.moe_forward(x, w13, w2, np.full((4, 2), -1, np.int32), probs, recipe=recipe)
    assert y.shape == (4, 128)
    assert not y.any()
    grads = fp8moe.moe_backward(saved, x)
    assert not grads.dx.any()
    assert not grads.dprobs.any()
    assert (grads.dw13.shape, grads.dw2.shape) == ((0, 256, 128), (0, 128, 128))


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("block", [(1, 128), (1, 32)])
def test_rows_without_columns(columnwise, block):
    h, grad, probs = np.ones((4, 0), np.float32), np.ones((4, 0), np.float32), np.ones(4, np.float32)
    options = {"columnwise": columnwise, "block": block}
    got = fp8moe.swiglu_quantize_backward(grad, h, probs, **options)
    assert not got.dprobs.any()
    assert not fp8moe.swiglu_backward(grad, h, probs).dprobs.any()
    fp8moe.swiglu_quantize(h, probs, **options)


X32 = RNG.standard_normal((512, 128)).astype(np.float32)
LAYER = {
    "x": np.ones((4, 128), BF16),
    "w13": np.ones((2, 256, 128), BF16),
    "w2": np.ones((2, 128, 128), BF16),
    "topk_ids": np.zeros((4, 1), np.int32),
    "topk_probs": np.ones((4, 1), np.float32),
}


def overlapping_quantize():
    fresh = fp8moe.quantize(X)
    codes = X.view(np.uint8).reshape(-1)[-fresh.data.size :].reshape(fresh.data.shape)
    fp8moe.quantize(X, out=replace(fresh, data=codes, scales=fresh.scales.copy()))


def quantize_into_itself():
    memory = np.zeros(3 * 256, np.uint8)
    scales = memory[: 3 * 2 * 4].view(np.float32).reshape(3, 2)
    fp8moe.quantize(X, out=fp8moe.QuantTensor(memory.reshape(3, 256), scales))


OVERLAPS = {
    "quantize": (overlapping_quantize, "out: got memory that overlaps x"),
    "quantize, codes and scales": (quantize_into_itself, "out: got memory that overlaps out"),
    "a weight gradient": (
        lambda: fp8moe.grouped_gemm_wgrad(X32, X32, ints(0, 10, 512), X32[:256].reshape(2, 128, 128)),
        "out: got memory that overlaps dy",
    ),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_outputs_that_overlap_other_arguments_raise(case):
    call, words = OVERLAPS[case]
    before = X.copy(), X32.copy()
    with pytest.raises(ValueError, match=words):
        call()
    assert same_bits(before[0], X)
    assert same_bits(before[1], X32)


def read_only(array):
    array.flags.writeable = False
    return array


def sums(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dw13": sums(3)}, r"dw13: got shape \[3\]; wanted \[2, 256, 128\]"),
        ({"dw13": sums(2, 256, 128).astype(np.int32)}, "dw13: got dtype int32"),
        ({"dw13": sums(2, 128, 256)}, "dw13: got shape"),
        ({"dw13": read_only(sums(2, 256, 128))}, "dw13: got numpy.ndarray, which is read-only"),
        ({"dw13": sums(2, 256, 128)[:, ::2]}, r"dw13: got shape .* with strides"),
        ({"dw2": sums(2, 256, 128)}, r"dw2: got shape .*wanted \[2, 128, 128\]"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"comm": 3}, "comm: got"),
        ({"dy": np.ones((4, 128), np.float16)}, "dy: got dtype float16; wanted bfloat16"),
    ],
)
def test_backward_validates_before_it_writes(recipe, given, words):
    y, saved = fp8moe.moe_forward(**LAYER, recipe=recipe)
    arguments = {"dy": y, "dw13": sums(2, 256, 128), "dw2": sums(2, 128, 128), **given}
    with pytest.raises((ValueError, TypeError), match=words):
        fp8moe.moe_backward(saved, **arguments)
    assert not arguments["dw13"].any()
    assert not arguments["dw2"].any()


def test_overlapping_gradient_outputs_raise():
    y, saved = fp8moe.moe_forward(**LAYER, recipe="fp8_flow")
    memory = sums(2 * 256 * 128 + 100)
    dw13, dw2 = memory[: 2 * 256 * 128].reshape(2, 256, 128), memory[-2 * 128 * 128 :].reshape(2, 128, 128)
    with pytest.raises(ValueError, match="dw2: got memory that overlaps dw13"):
        fp8moe.moe_backward(saved, y, dw13=dw13, dw2=dw2)
    assert not memory.any()


def test_weights_with_inconsistent_orientations_raise():
    w13, w2 = (fp8moe.quantize_weights(LAYER[name]) for name in ("w13", "w2"))
    torn = replace(w13, columnwise=w2.columnwise)
    with pytest.raises(ValueError, match=r"w13.columnwise: got shape"):
        fp8moe.moe_forward(**{**LAYER, "w13": torn, "w2": w2}, recipe="fp8_flow")


@pytest.mark.parametrize("integer_type", [np.uint8, np.int8, np.uint16, np.int64])
def test_narrow_integer_dtypes_keep_their_values(integer_type):
    """Options of every public function as narrow integers: with 100 and 120, products and sums exceed 8
    bits."""
    sizes, order, many = ints(10, 20, 10), ints(2, 0, 1), np.ones((40, 256), np.float32)
    for align in (100, 120):
        few = integer_type(align)
        assert_same(
            fp8moe.sort_chunks(many, sizes, order, align_size=few, chunks_per_group=integer_type(1)),
            fp8moe.sort_chunks(many, sizes, order, align_size=align),
        )
        padded = fp8moe.sort_chunks(many, sizes, order, align_size=align).data
        assert_same(
            fp8moe.sort_chunks_backward(padded, sizes, order, align_size=few, num_tokens=integer_type(40)),
            fp8moe.sort_chunks_backward(padded, sizes, order, align_size=align, num_tokens=40),
        )
        assert_same(fp8moe.pad(many, sizes, few), fp8moe.pad(many, sizes, align))
        assert_same(fp8moe.unpad(padded, sizes, few), fp8moe.unpad(padded, sizes, align))
        plans = [fp8moe.plan_topk(IDS, a, align_size=a, num_out_tokens=a) for a in (few, align)]
        assert plans[0].num_out_tokens == plans[1].num_out_tokens
        assert_same(*plans)
        assert_same(*(fp8moe.plan_routing_map(IDS, topk=a, align_size=a) for a in (few, align)))
        q = fp8moe.quantize(many)
        assert_same(*(fp8moe.scaling_aware_transpose(q, ints(0, 40), align_size=a) for a in (few, align)))
        h = {"expert_offsets": ints(0, 40), "columnwise": True}
        assert_same(*(fp8moe.swiglu_quantize(many, align_size=a, **h) for a in (few, align)))
    block = (
        (integer_type(1), integer_type(127) + integer_type(1))
        if integer_type is not np.int8
        else (integer_type(1), integer_type(32))
    )
    q = fp8moe.quantize(many, block=block)
    assert [type(n) for n in q.block] == [int, int]
    assert (
        fp8moe.fsdp.plan_buckets([("w", (integer_type(8), integer_type(100)), True)], integer_type(100)).numel
        == 800
    )


# ---------------------------------------------------------------- on CUDA: memory accesses are bounded for
# all values

GUARD = 1 << 16  # bytes before and after every array
needs_emulation = pytest.mark.skipif(
    not cuda_on_cpu.available or importlib.util.find_spec("cupy") is None, reason="needs g++ and CuPy"
)


class Memory:
    """Allocates every array between two guard regions, filled with numbers by ``junk``."""

    def __init__(self, junk):
        self.junk, self.made = junk, []

    def array(self, shape, dtype):
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        # small integers, so that offsets read from here lead to no distant address
        number = (
            self.junk if dtype.kind == "i" else 0x38 + self.junk if dtype.kind == "u" else 1.0 + self.junk
        )
        whole = np.full((size + 2 * GUARD) // dtype.itemsize + 16, number, dtype).view(np.uint8)
        start = GUARD - whole.ctypes.data % 16
        self.made.append((whole, start, start + size, whole.copy()))
        whole[start : start + size] = 0xA5
        return whole[start : start + size].view(dtype).reshape(shape)

    def upload(self, value):
        def placed(array):
            host = self.array(array.shape, array.dtype)
            host[...] = array
            return cuda_on_cpu.Array(host)

        return map_arrays(placed, value)

    def assert_untouched(self):
        for whole, start, end, before in self.made:
            assert (whole[:start] == before[:start]).all()
            assert (whole[end:] == before[end:]).all()


def stays_inside(function, *arguments, alike=True, **options):
    """The result of the CUDA backend; checks that the guard regions are unchanged and, with ``alike``, that
    the result does not depend on their contents."""
    results = []
    for junk in range(1 + alike):
        memory = Memory(junk)
        with pytest.MonkeyPatch.context() as patch:
            cuda_on_cpu.install(patch)
            patch.setattr(
                cuda_on_cpu.Device,
                "empty",
                lambda _, spec, device, m=memory: cuda_on_cpu.raw(m.array(spec.shape, spec.dtype)),
            )
            given = [memory.upload(a) for a in arguments]
            result = function(*given, **{k: memory.upload(v) for k, v in options.items()})
            results.append(cuda_on_cpu.download(result))
        memory.assert_untouched()
    assert_same(results[0], results[-1])
    return results[0]


FAR = (-(2**31), -1000, 3000, 2**31 - 1)  # no two of them cancel


def ruined(array, wrong=FAR, rate=0.3):
    """Replaces some of an array's integers."""
    array = array.copy()
    which = RNG.random(array.shape) < rate
    array[which] = RNG.choice(wrong, which.sum())
    return array


def ruined_plan(plan):
    """Invalid entries in which no two map to the same row: which one is written last would be undefined."""
    names = ["pad_offsets", "tokens_per_expert", "expert_offsets", *["slots"] * (plan.slots is not None)]
    row_id_map = ruined(plan.row_id_map, (*FAR, -1))
    return plan_with(plan, row_id_map=row_id_map, **{name: ruined(getattr(plan, name)) for name in names})


def cut(moved):
    return moved.data, moved.probs


@needs_emulation
@pytest.mark.parametrize("columns", [512, 5])
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)])
def test_plans_of_random_values_write_only_their_outputs(columns, dtype):
    for by_mask in (False, True):
        ids = RNG.integers(-1, 5, (21, 3)).astype(np.int32)
        if by_mask:
            plan = fp8moe.plan_routing_map(RNG.random((21, 5)) < 0.5, align_size=4, topk=5)
        else:
            plan = fp8moe.plan_topk(ids, 5, align_size=4)
        plan = ruined_plan(plan)
        x = RNG.standard_normal((21, columns)).astype(dtype)
        rows = RNG.standard_normal((plan.num_out_tokens, columns)).astype(dtype)
        probs = RNG.random((21, plan.prob_columns)).astype(np.float32)
        grads = RNG.random(plan.num_out_tokens).astype(np.float32)
        stays_inside(lambda x, p, w: cut(fp8moe.permute(x, p, w, fill_padding=False)), x, plan, probs)
        stays_inside(fp8moe.unpermute, rows, plan)
        stays_inside(fp8moe.unpermute, rows, plan, probs)
        stays_inside(fp8moe.permute_backward, rows, plan, grads)
        # rows treated as padding may also be mapped, and either may be written last
        stays_inside(lambda x, p, w: cut(fp8moe.permute(x, p, w)), x, plan, probs, alike=False)
        stays_inside(fp8moe.unpermute_backward, x, plan, alike=False)
        stays_inside(fp8moe.unpermute_backward, x, plan, rows, probs, alike=False)
        q = fp8moe.quantize(values(RNG, (21, columns), BF16))
        stays_inside(lambda q, p: cut(fp8moe.permute(q, p, fill_padding=False)), q, plan)
        stays_inside(fp8moe.permute_transpose, q, plan)
        if columns % 16 == 0 and dtype == BF16:
            w = fp8moe.quantize(values(RNG, (5, 16, columns)), block=(128, 128))
            ordered = plan_with(plan, expert_offsets=np.sort(plan.expert_offsets))
            stays_inside(lambda x, w, p, a: cut(fp8moe.permute_gemm(x, w, p, a)), q, w, ordered, probs)


@needs_emulation
@pytest.mark.parametrize(("columns", "dtype"), [(520, BF16), (5, BF16), (24, np.dtype(np.float32))])
def test_biases_of_random_ids_write_only_their_outputs(columns, dtype):
    y, bias = (RNG.standard_normal((n, columns)).astype(dtype) for n in (9, 5))
    ids = ruined(RNG.integers(0, 5, (9, 3)), (*FAR, -1, 5, 2**32, -(2**32)))
    for kind in (np.int32, np.int64):
        rest = bias, ids.astype(kind), RNG.random((9, 3)).astype(np.float32)
        stays_inside(add_biases, y, *rest)
        stays_inside(add_biases_backward, y, *rest)


@needs_emulation
@pytest.mark.parametrize("ascending", [True, False])
def test_random_offsets_write_only_their_outputs(ascending):
    rows = 272
    h = RNG.standard_normal((rows, 256)).astype(BF16)
    q = fp8moe.quantize(RNG.standard_normal((rows, 128)).astype(np.float32))
    odd = fp8moe.quantize(RNG.standard_normal((rows, 40)).astype(np.float32))
    columns = fp8moe.quantize(RNG.standard_normal((rows, 128)).astype(np.float32), block=(128, 1))
    transposed = fp8moe.scaling_aware_transpose(q, target="block")
    w = fp8moe.quantize(np.ones((5, 16, 128), np.float32), block=(128, 128))
    offsets = ruined(np.sort(RNG.integers(0, rows + 1, 6)).astype(np.int32), (*FAR, 3, 130), 0.4)
    if ascending:
        offsets.sort()
    else:  # overlapping experts, where it is undefined whose rows are written last
        offsets = offsets[::-1].copy()

    def inside(function, *arguments, **options):
        stays_inside(function, *arguments, alike=ascending, **options)

    for columnwise, align in itertools.product((False, True), (1, 128)):
        options = {"expert_offsets": offsets, "columnwise": columnwise, "align_size": align}
        inside(fp8moe.swiglu_quantize, h, **options)
        inside(fp8moe.swiglu_quantize_backward, h[:, :128].copy(), h, **options)
    for target, align in (("column", 1), ("column", 128), ("tile", 1), ("block", 128)):
        for x in (q, odd):
            inside(fp8moe.scaling_aware_transpose, x, offsets, target=target, align_size=align)
    inside(fp8moe.dequantize, columns, expert_offsets=offsets)
    for backend in ("wgmma", "mma", "plain"):
        inside(fp8moe.grouped_gemm, q, w, offsets, backend=backend)
        for pair in (columns, transposed):
            inside(fp8moe.grouped_gemm_wgrad, pair, pair, offsets, backend=backend)
    plain, weights = RNG.standard_normal((rows, 40)).astype(BF16), np.ones((5, 16, 40), BF16)
    inside(fp8moe.grouped_gemm, plain, weights, offsets, backend="mma")
    inside(fp8moe.grouped_gemm_wgrad, plain, plain, offsets, backend="mma")


@needs_emulation
@pytest.mark.parametrize("ascending", [True, False])
def test_random_offsets_write_only_their_blocked_scales(ascending):
    rows = 272
    offsets = ruined(np.sort(RNG.integers(0, rows + 1, 6)).astype(np.int32), (*FAR, 3, 130), 0.4)
    offsets = np.sort(offsets) if ascending else offsets[::-1].copy()
    blocked = {"layout": "blocked_128x4"}
    for width, align in itertools.product((128, 40), (1, 128)):
        x = RNG.standard_normal((rows, width)).astype(np.float32)
        q = fp8moe.quantize(x, block=(1, 32))
        options = {"alike": ascending, "align_size": align}
        stays_inside(fp8moe.scaling_aware_transpose, q, offsets, **options, **blocked)
        for one in (q, fp8moe.quantize(x, block=(32, 1))):
            stays_inside(
                lambda q, o, **k: fp8moe.to_layout(q, "blocked_128x4", o, **k), one, offsets, **options
            )
            there = fp8moe.to_layout(one, "blocked_128x4")
            stays_inside(lambda q, o, **k: fp8moe.to_layout(q, "compact", o, **k), there, offsets, **options)
    plan = ruined_plan(fp8moe.plan_topk(RNG.integers(-1, 5, (21, 3)).astype(np.int32), 5, align_size=128))
    for width in (512, 96):
        q = fp8moe.quantize(values(RNG, (21, width), BF16), block=(1, 32))
        stays_inside(lambda q, p: cut(fp8moe.permute(q, p, **blocked)), q, plan, alike=False)
        stays_inside(lambda q, p: fp8moe.permute_transpose(q, p, **blocked), q, plan, alike=False)


@needs_emulation
@pytest.mark.parametrize("backend", ["wgmma", "mma", "plain"])
def test_codes_without_scales_are_nan(backend):
    """Offsets in device memory that require more scale blocks than there are: codes without a scale become
    NaN."""
    x = RNG.standard_normal((272, 128)).astype(np.float32)
    columns, offsets = (
        fp8moe.quantize(x, block=(128, 1)),
        ints(0, 64, 128, 192, 272),
    )  # 3 scales for 4 experts
    got = stays_inside(fp8moe.dequantize, columns, expert_offsets=offsets)
    assert np.isfinite(got[:192]).all()
    assert np.isnan(got[192:]).all()
    got = stays_inside(fp8moe.grouped_gemm_wgrad, columns, columns, offsets, backend=backend)
    assert np.isfinite(got[:3]).all()
    assert np.isnan(got[3]).all()
    # a block whose first row is inside another expert's block has no scale either
    blocks = fp8moe.scaling_aware_transpose(fp8moe.quantize(x), target="block")
    got = stays_inside(fp8moe.grouped_gemm_wgrad, blocks, blocks, ints(0, 128, 200, 272), backend=backend)
    assert np.isfinite(got[:2]).all()
    assert np.isnan(got[2]).all()


@needs_emulation
@pytest.mark.parametrize("backend", ["wgmma", "mma", "plain"])
def test_both_devices_reject_offsets_beyond_the_scales(monkeypatch, backend):
    """CUDA raises the same errors as the CPU if value checks are enabled."""
    columns = fp8moe.quantize(RNG.standard_normal((256, 128)).astype(np.float32), block=(128, 1))
    offsets = ints(0, 10, 20, 30, 256)
    options = {"backend": backend}
    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setenv("FP8MOE_CHECK", "1")
    words = set()
    for move in (lambda a: a, cuda_on_cpu.upload):
        q, where = move(columns), move(offsets)
        with pytest.raises(ValueError, match=r"dy\.scales: got 2 rows of blocks; wanted 5") as error:
            fp8moe.grouped_gemm_wgrad(q, q, where, **({} if move is not cuda_on_cpu.upload else options))
        words.add(str(error.value))
        with pytest.raises(ValueError, match=r"q\.scales: got 2 rows of blocks; wanted 5"):
            fp8moe.dequantize(q, expert_offsets=where)
    assert len(words) == 1


@needs_emulation
@pytest.mark.parametrize(
    ("height", "width", "kind"), [(96, 160, np.float32), (130, 37, BF16), (3, 256, np.uint8)]
)
def test_forms_of_checkpoints_write_only_their_outputs(height, width, kind):
    """Incomplete tiles, with parts that are filled up, in both storages."""
    codes = RNG.integers(0, 0x7F, (2, 2 * height, width), np.uint8)
    tiles = 2, 2, -(-height // 128), -(-width // 128)
    scales = RNG.integers(100, 140, tiles).astype(kind)
    options = {"parts": 2, "rows": 256, "columns": width + 3}
    w = stays_inside(fp8moe.from_block_fp8, codes, scales, **options)
    for q in (w, fp8moe.Quantized(None, w.columnwise)):
        stays_inside(lambda q: fp8moe.to_block_fp8(q, parts=2, rows=height, columns=width), q)
    turned = np.ascontiguousarray(codes.swapaxes(1, 2)), np.ascontiguousarray(scales.transpose(0, 3, 1, 2))
    assert_same(stays_inside(fp8moe.from_block_fp8, *turned, transposed=True, **options), w)
    blocks = RNG.integers(0, 256, (2, 2 * height, width // 32, 16), np.uint8)
    exponents = RNG.integers(0, 256, blocks.shape[:3]).astype(np.uint8)
    options["columns"] = blocks.shape[2] * 32 + 3
    stays_inside(fp8moe.from_mxfp4, blocks, exponents, interleaved=True, **options)


@needs_emulation
@pytest.mark.parametrize("columns", [128, 3])
def test_random_chunk_sizes_write_only_their_outputs(columns):
    x = RNG.standard_normal((40, columns)).astype(BF16)
    probs = RNG.random(40).astype(np.float32)
    for _ in range(4):
        sizes = ruined(RNG.integers(0, 8, 7).astype(np.int32))
        order = ruined(RNG.permutation(7).astype(np.int32))
        for align in (1, 16):
            options = {"align_size": align}
            stays_inside(fp8moe.sort_chunks, x, sizes.astype(np.int64), order, probs, **options)
            stays_inside(fp8moe.sort_chunks_backward, x, sizes, order, probs, **options)
            stays_inside(fp8moe.pad, x, sizes, align)
            stays_inside(fp8moe.unpad, x, sizes, align)


@needs_emulation
def test_sizes_beyond_device_limits_raise(monkeypatch):
    cuda_on_cpu.install(monkeypatch, shared_limit=64 << 10)
    x, sizes = cuda_on_cpu.upload(X), cuda_on_cpu.upload(np.zeros(4000, np.int32))
    with pytest.raises(ValueError, match="split_sizes: got 4000 chunks; wanted at most"):
        fp8moe.sort_chunks(x, sizes, cuda_on_cpu.upload(np.arange(4000, dtype=np.int32)))
    with pytest.raises(ValueError, match="tokens_per_expert: got 4000"):
        fp8moe.pad(x, sizes, 4)
    with pytest.raises(ValueError, match="num_experts: got 4000"):
        fp8moe.plan_topk(cuda_on_cpu.upload(IDS), 4000)
    with pytest.raises(ValueError, match="num_experts: got 4000"):
        fp8moe.plan_routing_map(cuda_on_cpu.upload(np.ones((3, 4000), bool)), topk=2)


@needs_emulation
@pytest.mark.parametrize("by_name", [False, True])
def test_recording_does_not_write_to_its_inputs(monkeypatch, by_name):
    cuda_on_cpu.install(monkeypatch)
    offsets = cuda_on_cpu.upload(ints(0, 100, 512))

    def add(dy, x, out):
        arguments = [cuda_on_cpu.upload(a) for a in (dy, x)]
        out = cuda_on_cpu.Array(out)
        if by_name:
            return fp8moe.grouped_gemm_wgrad(*arguments, offsets, out=out)
        return fp8moe.grouped_gemm_wgrad(*arguments, offsets, out)

    sums = [add(X32, X32.copy(), np.zeros((2, 128, 128), np.float32)).host for _ in range(4)]
    assert [type(plan) for _, plan in fp8moe.runtime.dispatch.cached_recordings()] == [
        fp8moe.runtime.recording.Recording
    ]
    assert same_bits(sums[0], sums[-1])
    memory = X32.copy()
    with pytest.raises(ValueError, match="out: got memory that overlaps dy;"):
        add(memory, X32.copy(), memory[:256].reshape(2, 128, 128))
    assert same_bits(memory, X32)


@needs_emulation
def test_values_on_cuda_are_validated_on_request(monkeypatch):
    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setenv("FP8MOE_CHECK", "1")
    rows, plan = cuda_on_cpu.upload(ROWS), cuda_on_cpu.upload(mapped((1, 0), 12))
    with pytest.raises(ValueError, match=r"plan\.row_id_map: got row"):
        fp8moe.unpermute(rows, plan)
    with pytest.raises(ValueError, match="expert_offsets: got 6 after 9"):
        fp8moe.grouped_gemm_wgrad(rows, rows, cuda_on_cpu.upload(ints(0, 9, 6)))
    with pytest.raises(ValueError, match="tokens_per_expert: got sizes that sum to 20"):
        fp8moe.pad(rows, cuda_on_cpu.upload(ints(0, 20)), 4)
    expert_ids = ints(0, 3, -1).reshape(3, 1)  # counted from one
    for ids in (expert_ids, cuda_on_cpu.upload(expert_ids)):
        with pytest.raises(
            ValueError, match="topk_ids: got an expert id of 3; wanted ids below num_experts=3"
        ):
            fp8moe.plan_topk(ids, 3)


# ---------------------------------------------------------------- random arguments: a correct result or an
# error that names an argument

NUMBERS = (-1, 0, 1, 2, 3, 5, 16, 100, 128, 2**30, 2**31 - 1, 2**31, 2**63, 1.5, np.nan, np.inf, 10**400)
OTHERS = (
    None,
    True,
    "e4m3",
    "exact",
    "",
    (1, 128),
    (1, 32),
    (1.0, 128.0),
    [2, 4],
    {},
    np.uint8(200),
    np.float32(1),
)
DTYPES = (np.int32, np.int64, np.uint8, np.float32, np.float64, np.float16, BF16, np.bool_)


def another_array(draw, array):
    """Changes the shape, dtype or values of an array."""
    change = draw(
        st.sampled_from(("values", "values", "values", "shape", "dtype", "empty", "masked", "strided"))
    )
    if change == "values" and array.size:
        array = array.copy()
        flat = array.reshape(-1)
        for _ in range(draw(st.integers(1, 3))):
            value = draw(st.sampled_from((-(2**31), -5, -1, 0, 1, 2, 3, 7, 64, 100, 1000, 2**31 - 1)))
            with np.errstate(all="ignore"):
                flat[draw(st.integers(0, flat.size - 1))] = np.array(value).astype(array.dtype)
        return array
    if change == "shape":
        axis = draw(st.integers(0, max(array.ndim - 1, 0)))
        size = draw(st.sampled_from((0, 1, 2, 3, 65, 128, 200)))
        return np.resize(array, (*array.shape[:axis], size, *array.shape[axis + 1 :])).astype(array.dtype)
    if change == "dtype":
        with np.errstate(all="ignore"):
            return array.astype(draw(st.sampled_from(DTYPES)))
    if change == "empty":
        return np.zeros(draw(st.sampled_from(((0,), (0, 128), (0, 0), (4, 0), ()))), array.dtype)
    if change == "masked":
        return np.ma.masked_array(array, mask=np.zeros(array.shape, bool))
    return np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array


@st.composite
def calls(draw):
    """A valid call of a public function with one to three arguments, or fields of them, changed."""
    function = draw(st.sampled_from(sorted(CALLS)))
    call = dict(CALLS[function])
    names = list(inspect.signature(getattr(fp8moe, function)).parameters)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(names))
        value = call.get(name)
        if isinstance(value, np.ndarray):
            call[name] = another_array(draw, value)
        elif isinstance(value, (fp8moe.QuantTensor, fp8moe.PermutationPlan)):
            field = draw(st.sampled_from([f.name for f in fields(value)]))
            old = getattr(value, field)
            if isinstance(old, np.ndarray):
                call[name] = replace(value, **{field: another_array(draw, old)})
            else:
                call[name] = replace(value, **{field: draw(st.sampled_from(NUMBERS + OTHERS))})
        elif name not in ("saved", "comm"):
            call[name] = draw(st.sampled_from(NUMBERS + OTHERS))
    return function, call


def outcome(function, call, junk):
    """The result of a call, or its error, with all new memory filled with junk."""
    memory = Memory(junk)

    def empty(self, spec, device):
        if spec.nbytes > 1 << 28:
            raise MemoryError
        array = memory.array(tuple(spec.shape), np.dtype(spec.dtype))
        array.reshape(-1).view(np.uint8)[...] = 0x11 * junk
        return array

    def placed(array):
        if type(array) is not np.ndarray or not array.flags.c_contiguous:
            return array
        copied = memory.array(array.shape, array.dtype)
        copied[...] = array
        return copied

    arguments = {
        k: v if k == "saved" else map_arrays(placed, v) if is_array_or_record(v) else v
        for k, v in call.items()
    }
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(fp8moe.runtime.interop.Framework, "empty", empty)
        try:
            result = getattr(fp8moe, function)(**arguments)
        except (ValueError, TypeError, MemoryError) as error:
            return error
    memory.assert_untouched()
    return result


def is_array_or_record(value):
    return isinstance(value, (np.ndarray, fp8moe.QuantTensor, fp8moe.PermutationPlan))


@given(calls())
@settings(max_examples=1000)
def test_random_arguments_give_a_result_or_an_error_naming_the_argument(case):
    function, call = case
    first, second = (outcome(function, call, junk) for junk in (0, 1))
    if isinstance(first, MemoryError):
        return
    if isinstance(first, Exception):
        names = "|".join(inspect.signature(getattr(fp8moe, function)).parameters)
        assert re.match(rf"({names})\b", str(first)) or "unexpected keyword" in str(first), (function, first)
        return
    numbers = [a for a in arrays_in(first) if isinstance(a, np.ndarray)]
    for a, b in zip(numbers, arrays_in(second), strict=True):
        assert same_bits(a, b), function
