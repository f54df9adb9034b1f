"""MXFP8 scales in the 128x4 blocked layout, compared with torch's own implementation."""

import importlib.util
from dataclasses import replace

import cuda_on_cpu
import numpy as np
import pytest
from backend_checks import (
    blocked_scales_of_permute,
    blocked_scales_of_permute_transpose,
    blocked_scales_of_quantise,
    blocked_scales_of_transposes,
    in_blocked,
    scales_in_both_layouts,
)
from cases import BF16, assert_same, generator, offsets_of, same_bits, values

import fp8moe
from fp8moe.formats import swapped
from fp8moe.runtime.record_trees import map_arrays

torch = pytest.importorskip("torch")
torch_descriptions = pytest.importorskip("torch_descriptions")
RNG = generator()
ROW, COLUMN = (1, 32), (32, 1)
SIZES = [(1, 32), (128, 128), (130, 96), (257, 200), (64, 416)]
needs_compiler = pytest.mark.skipif(
    not (cuda_on_cpu.available and importlib.util.find_spec("cupy")), reason="needs g++ and CuPy"
)
GROUPS = [[128, 0, 256], [5, 0, 130, 1, 0], [0, 0], [300], [32, 64, 33]]


def tensor(rows, columns, block, experts=None):
    """Random codes with a random byte for every scale."""
    shape = (rows, columns) if block == ROW else (columns, rows)
    if block == ROW:
        scales = (rows, -(-columns // 32))
    else:
        sizes = [rows] if experts is None else experts
        scales = (max(sum(-(-s // 32) for s in sizes), -(-rows // 32)), columns)
    return fp8moe.QuantTensor(random_bytes(shape), random_bytes(scales), block=block)


def random_bytes(shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def by_torch(scales):
    """torch's layout of the scales [outer, inner] of one operand."""
    return torch_descriptions.to_blocked(torch.from_numpy(np.ascontiguousarray(scales))).numpy()


def by_torch_of_groups(q, sizes):
    """torch's layout of each expert's scales, concatenated, as scaled_grouped_mm reads them."""
    parts, row, strip = [], 0, 0
    for size in sizes:
        strips = -(-size // 32)
        of_expert = q.scales[row : row + size] if q.block == ROW else q.scales[strip : strip + strips].T
        parts.append(by_torch(of_expert) if size else np.zeros(0, np.uint8))
        row, strip = row + size, strip + strips
    return np.concatenate(parts)


@pytest.mark.parametrize("block", [ROW, COLUMN])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_blocked_layout_equals_torchs(rows, columns, block):
    q = tensor(rows, columns, block)
    blocked = fp8moe.to_layout(q, "blocked_128x4")
    assert blocked.data is q.data
    assert blocked.layout == "blocked_128x4"
    outer, inner = q.scales.shape if block == ROW else swapped(q.scales.shape)
    assert blocked.scales.shape == (-(-outer // 128) * 128, -(-inner // 4) * 4)
    assert same_bits(blocked.scales.ravel(), by_torch(q.scales if block == ROW else q.scales.T))
    back = fp8moe.to_layout(blocked, "compact")
    assert same_bits(back.scales, q.scales)
    assert (back.layout, back.block) == ("compact", block)


def test_the_index_formula_of_cublas():
    """Offset in a tile: (outer % 32) * 16 + (outer / 32) * 4 + inner; tiles of a row of tiles are
    consecutive."""
    q = tensor(300, 300, ROW)
    blocked = fp8moe.to_layout(q, "blocked_128x4").scales.ravel()
    across = 3  # 10 blocks of 32, in fours
    for r, b in zip(RNG.integers(0, 300, 100).tolist(), RNG.integers(0, 10, 100).tolist(), strict=True):
        tile = (r // 128) * across + b // 4
        assert blocked[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + b % 4] == q.scales[r, b]


@pytest.mark.parametrize("block", [ROW, COLUMN])
@pytest.mark.parametrize("sizes", GROUPS)
@pytest.mark.parametrize("rest", [0, 40])
def test_experts_begin_new_tiles(block, sizes, rest):
    rows, offsets = sum(sizes) + rest, offsets_of(sizes)
    q = tensor(rows, 160, block, sizes)
    blocked = fp8moe.to_layout(q, "blocked_128x4", offsets)
    wanted = by_torch_of_groups(q, sizes)
    actual = blocked.scales.ravel()
    assert same_bits(actual[: len(wanted)], wanted)
    assert not actual[len(wanted) :].any()
    assert blocked.scales.shape[0] >= (rows if block == ROW else 160)  # torch's own check
    back = fp8moe.to_layout(blocked, "compact", offsets)
    used = sum(sizes) if block == ROW else sum(-(-s // 32) for s in sizes)
    assert same_bits(back.scales[:used], q.scales[:used])
    assert not back.scales[used:].any()
    fp8moe.runtime.checks.quant_tensor("back", back, (block,))


def test_aligned_experts_need_no_offsets_row_wise():
    offsets = offsets_of([128, 0, 256])
    q = tensor(384, 64, ROW)
    alone = fp8moe.to_layout(q, "blocked_128x4")
    assert same_bits(alone.scales, fp8moe.to_layout(q, "blocked_128x4", offsets, align_size=128).scales)


@needs_compiler
@pytest.mark.parametrize("block", [ROW, COLUMN])
def test_kernels(block):
    for rows, columns in SIZES:
        scales_in_both_layouts(cuda_on_cpu.both, RNG, rows, columns, block)
    for sizes in [*GROUPS, RNG.integers(0, 50, 70).tolist()]:
        scales_in_both_layouts(cuda_on_cpu.both, RNG, sum(sizes) + 20, 160, block, sizes)


@needs_compiler
def test_kernels_write_only_existing_tiles(monkeypatch):
    """On a device offsets are not checked: scales beyond the available tiles are dropped."""
    q, offsets = tensor(384, 160, COLUMN), np.array([0, 100, 384], np.int32)  # needs 4 tiles, has 3
    guards = []

    def guarded(self, spec, device):
        memory = np.full(spec.nbytes + 4096, 0xA5, np.uint8)
        guards.append(memory[spec.nbytes :])
        return cuda_on_cpu.raw(memory[: spec.nbytes].view(spec.dtype).reshape(spec.shape))

    monkeypatch.setattr(cuda_on_cpu.Device, "empty", guarded)
    cuda_on_cpu.install(monkeypatch)
    fp8moe.to_layout(cuda_on_cpu.upload(q), "blocked_128x4", cuda_on_cpu.upload(offsets), align_size=128)
    assert guards
    assert all((guard == 0xA5).all() for guard in guards)


@pytest.mark.parametrize(
    ("q", "arguments", "error", "words"),
    [
        (fp8moe.quantize(np.ones((4, 128), np.float32)), ("blocked_128x4",), TypeError, r"\(1, 32\)"),
        (tensor(4, 64, ROW), ("gemm_ready",), TypeError, r"q\.block: got \(1, 32\) with layout='gemm_ready'"),
        (tensor(4, 64, ROW), ("blocked",), ValueError, "layout: got 'blocked'"),
        (
            tensor(4, 64, ROW),
            ("compact", offsets_of([4])),
            ValueError,
            "expert_offsets: got offsets for a conversion from layout 'compact' to 'compact'",
        ),
        (
            tensor(64, 64, COLUMN),
            ("blocked_128x4", offsets_of([33, 31])),
            ValueError,
            r"q\.scales: got 2 rows of blocks; wanted 3",
        ),
        (
            replace(tensor(64, 64, ROW), scales=np.zeros((128, 2), np.uint8), layout="blocked_128x4"),
            ("compact",),
            ValueError,
            r"q\.scales: got shape \[128, 2\]; wanted \[128, 4\]",
        ),
        (
            fp8moe.to_layout(tensor(64, 64, ROW), "blocked_128x4"),
            ("compact", offsets_of([33, 31])),
            ValueError,
            r"q\.scales: got 1 tiles of 128 rows; wanted 2",
        ),
    ],
)
def test_validation_errors(q, arguments, error, words):
    with pytest.raises(error, match=words):
        fp8moe.to_layout(q, *arguments)


QUANTISED = [
    {"block": ROW},
    {"block": COLUMN, "fmt": "e5m2"},
    {"block": ROW, "columnwise": True, "scale_rounding": "floor"},
]


@pytest.mark.parametrize("options", QUANTISED)
@pytest.mark.parametrize(("rows", "columns"), [*SIZES, (0, 64), (131, 128), (256, 384), (40, 31)])
def test_quantise_writes_the_blocked_layout(rows, columns, options):
    x = values(RNG, (rows, columns), BF16)
    actual = fp8moe.quantize(x, **options, layout="blocked_128x4")
    assert_same(in_blocked(fp8moe.quantize(x, **options)), actual)
    out = poisoned(actual)
    assert fp8moe.quantize(x, **options, layout="blocked_128x4", out=out) is out
    assert_same(actual, out)


def poisoned(result):
    return map_arrays(lambda a: np.full_like(a, 0xA5), result)


@needs_compiler
@pytest.mark.parametrize("options", QUANTISED)
def test_quantise_on_cuda(options):
    for rows, columns in [(130, 96), (131, 128), (256, 384), (33, 31), (5, 64)]:
        blocked_scales_of_quantise(cuda_on_cpu.both, values(RNG, (rows, columns), BF16), **options)


def rowwise(rows, columns, fmt="e4m3"):
    """Rows of very different magnitudes, including NaN and NaN scales."""
    q = fp8moe.quantize(values(RNG, (rows, columns), BF16, awkward=True), block=ROW, fmt=fmt)
    q.scales[RNG.random(q.scales.shape) < 0.01] = 255
    return q


TRANSPOSED = [(128, None), (1, GROUPS[0]), (128, GROUPS[0]), (1, GROUPS[1]), (32, [32, 96, 0, 64])]


@pytest.mark.parametrize("target", ["column", "tile"])
@pytest.mark.parametrize(("align_size", "sizes"), TRANSPOSED)
@pytest.mark.parametrize("columns", [256, 48])
def test_the_transpose_writes_the_blocked_layout(align_size, sizes, target, columns):
    offsets = None if sizes is None else offsets_of(sizes)
    q = rowwise(300 if sizes is None else sum(sizes), columns)
    options = {"target": target, "align_size": align_size}
    compact = fp8moe.scaling_aware_transpose(q, offsets, **options)
    actual = fp8moe.scaling_aware_transpose(q, offsets, **options, layout="blocked_128x4")
    of_align = {} if sizes is None else {"align_size": align_size}
    assert_same(fp8moe.to_layout(compact, "blocked_128x4", offsets, **of_align), actual)


@needs_compiler
@pytest.mark.parametrize("target", ["column", "tile"])
@pytest.mark.parametrize("columns", [128, 48])
def test_the_transpose_on_cuda(target, columns):
    for fmt, sizes in zip(("e4m3", "e5m2", "e4m3", "e4m3"), (None, *GROUPS[:2], [7] * 34), strict=True):
        blocked_scales_of_transposes(cuda_on_cpu.both, RNG, sizes, columns, fmt, target)


@pytest.mark.parametrize("align_size", [1, 128])
def test_permute_transpose(align_size):
    q, plan = rowwise(50, 128), a_plan(50, 3, align_size)
    compact = fp8moe.permute_transpose(q, plan)
    wanted = fp8moe.to_layout(compact, "blocked_128x4", plan.expert_offsets, align_size=align_size)
    assert_same(wanted, fp8moe.permute_transpose(q, plan, layout="blocked_128x4"))


@needs_compiler
@pytest.mark.parametrize("align_size", [1, 128])
def test_permute_transpose_on_cuda(align_size):
    blocked_scales_of_permute_transpose(cuda_on_cpu.both, RNG, 50, 3, 128, align_size)


@needs_compiler
@pytest.mark.parametrize(("columns", "num_out_tokens"), [(512, None), (512, 200), (96, None), (96, 140)])
def test_permute_on_cuda(columns, num_out_tokens):
    blocked_scales_of_permute(cuda_on_cpu.both, RNG, 40, 3, columns, num_out_tokens)


@needs_compiler
def test_permute_before_bulk_copies():
    """The kernels for compute capabilities below 9.0."""

    def both(function, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            cuda_on_cpu.install(patch, architecture="sm_80")
            theirs = cuda_on_cpu.download(function(*map(cuda_on_cpu.upload, arguments)))
        return function(*arguments), theirs

    blocked_scales_of_permute(both, RNG, 40, 3, 512)


def test_permute_and_pad_writes_the_blocked_layout():
    q, ids = rowwise(20, 160), RNG.integers(-1, 3, (20, 2)).astype(np.int32)
    options = {"align_size": 128, "num_experts": 3}
    actual = fp8moe.permute_and_pad(q, ids, **options, layout="blocked_128x4")
    assert_same(in_blocked(fp8moe.permute_and_pad(q, ids, **options).data), actual.data)


@pytest.mark.parametrize(
    ("x", "align_size", "error", "words"),
    [
        (np.ones((4, 64), np.float32), 128, TypeError, "x: got an array of float32 with layout='blocked"),
        (fp8moe.quantize(np.ones((4, 128), np.float32)), 128, TypeError, r"x: got \(1, 128\) with layout="),
        (tensor(4, 64, ROW), 64, ValueError, "align_size of 64; wanted a multiple of 128.*to_layout"),
    ],
)
def test_validation_errors_of_permute(x, align_size, error, words):
    with pytest.raises(error, match=words):
        fp8moe.permute(x, a_plan(4, 2, align_size), layout="blocked_128x4")


def a_plan(tokens, experts, align_size, **options):
    ids = RNG.integers(-1, experts, (tokens, 2)).astype(np.int32)
    return fp8moe.plan_topk(ids, experts, align_size=align_size, **options)
