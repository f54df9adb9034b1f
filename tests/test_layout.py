"""MXFP8 scales in the 128x4 blocked layout, compared with torch's own implementation."""

import functools
from dataclasses import replace

import cuda_on_cpu
import numpy as np
import pytest
from backends import only_on_cpu, over
from cases import BF16, KINDS, assert_same, generator, offsets_of, same_bits, values

import fp8moe
from fp8moe.formats import swapped
from fp8moe.runtime.record_trees import map_arrays

torch = pytest.importorskip("torch")
torch_descriptions = pytest.importorskip("torch_descriptions")
RNG = generator()
ROW, COLUMN = (1, 32), (32, 1)
SIZES = [(1, 32), (128, 128), (130, 96), (257, 200), (64, 416)]
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


def in_blocked(result, offsets=None, **options):
    """The result of a call with compact scales, converted."""
    if isinstance(result, fp8moe.Quantized):
        return fp8moe.Quantized(in_blocked(result.rowwise), in_blocked(result.columnwise))
    return fp8moe.to_layout(result, "blocked_128x4", offsets, **options)


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


@pytest.mark.parametrize("block", [ROW, COLUMN])
@over(
    "shapes, columns, groups",
    reference=[(SIZES, 160, GROUPS)],
    on_cpu=[(SIZES, 160, [*GROUPS, RNG.integers(0, 50, 70).tolist()])],
    on_gpu=[
        (
            [(1, 32), (130, 96), (4096, 2048), (3000, 7168), (257, 200)],
            2048,
            [[128, 0, 4096], RNG.integers(0, 300, 8).tolist(), RNG.integers(0, 90, 300).tolist()],
        )
    ],
)
def test_conversion_to_the_blocked_layout_and_back(backend, shapes, columns, groups, block):
    sizes = [(*shape, None) for shape in shapes]
    sizes += [(sum(experts) + 40, columns, experts) for experts in groups]
    for rows, width, experts in sizes:
        q = tensor(rows, width, block, experts)
        offsets = () if experts is None else (offsets_of(experts),)
        blocked, actual = backend.both(lambda q, *o: fp8moe.to_layout(q, "blocked_128x4", *o), q, *offsets)
        assert_same(blocked, actual)
        back, actual = backend.both(lambda q, *o: fp8moe.to_layout(q, "compact", *o), blocked, *offsets)
        assert_same(back, actual)
        if experts is None:
            assert same_bits(actual.scales, q.scales)


@only_on_cpu
def test_kernels_write_only_existing_tiles(backend, monkeypatch):
    """On a device offsets are not checked: scales beyond the available tiles are dropped."""
    q, offsets = tensor(384, 160, COLUMN), np.array([0, 100, 384], np.int32)  # needs 4 tiles, has 3
    guards = []

    def guarded(self, spec, device):
        memory = np.full(spec.nbytes + 4096, 0xA5, np.uint8)
        guards.append(memory[spec.nbytes :])
        return cuda_on_cpu.raw(memory[: spec.nbytes].view(spec.dtype).reshape(spec.shape))

    monkeypatch.setattr(cuda_on_cpu.Device, "empty", guarded)
    fp8moe.to_layout(backend.upload(q), "blocked_128x4", backend.upload(offsets), align_size=128)
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


OF_KERNELS = [
    {"block": block, "fmt": fmt, "columnwise": columnwise}
    for fmt in ("e4m3", "e5m2")
    for block, columnwise in ((ROW, False), (COLUMN, False), (ROW, True))
]


@over(
    "dtype, options, shapes",
    reference=[
        (BF16, options, [shape])
        for options in QUANTISED
        for shape in [*SIZES, (0, 64), (131, 128), (256, 384), (40, 31)]
    ],
    on_cpu=[(BF16, options, [(130, 96), (131, 128), (256, 384), (33, 31), (5, 64)]) for options in QUANTISED],
    on_gpu=[
        (dtype, options, [(4096, 2048), (1000, 7168), (130, 96), (33, 31), (131, 128)])
        for dtype in KINDS
        for options in OF_KERNELS
    ],
)
def test_quantise_writes_the_blocked_layout(backend, dtype, options, shapes):
    for shape in shapes:
        x = values(RNG, shape, dtype, awkward=True)
        expected, actual = backend.both(fp8moe.quantize, x, **options, layout="blocked_128x4")
        assert_same(expected, actual)
        assert_same(in_blocked(fp8moe.quantize(x, **options)), actual)
        out = backend.upload(poisoned(actual))
        assert fp8moe.quantize(backend.upload(x), **options, layout="blocked_128x4", out=out) is out
        assert_same(actual, backend.download(out))


def poisoned(result):
    return map_arrays(lambda a: np.full_like(a, 0xA5), result)


def rowwise(rows, columns, fmt="e4m3"):
    """Rows of very different magnitudes, including NaN and NaN scales."""
    q = fp8moe.quantize(values(RNG, (rows, columns), BF16, awkward=True), block=ROW, fmt=fmt)
    q.scales[RNG.random(q.scales.shape) < 0.01] = 255
    return q


@pytest.mark.parametrize("target", ["column", "tile"])
@over(
    "align_size, sizes, columns, fmt",
    reference=[
        (align_size, sizes, columns, "e4m3")
        for align_size, sizes in (
            *((128, None), (1, GROUPS[0]), (128, GROUPS[0])),
            *((1, GROUPS[1]), (32, [32, 96, 0, 64])),
        )
        for columns in (256, 48)
    ],
    on_cpu=[
        (1, sizes, columns, fmt)
        for sizes, fmt in ((None, "e4m3"), (GROUPS[0], "e5m2"), (GROUPS[1], "e4m3"), ([7] * 34, "e4m3"))
        for columns in (128, 48)
    ],
    on_gpu=[
        (1, sizes, columns, fmt)
        for sizes in (
            *(None, [128, 0, 1024, 300]),
            *(RNG.integers(0, 300, 8).tolist(), RNG.integers(0, 90, 300).tolist()),
        )
        for columns in (2048, 48)
        for fmt in ("e4m3", "e5m2")
    ],
)
def test_the_transpose_writes_the_blocked_layout(backend, align_size, sizes, columns, fmt, target):
    offsets = () if sizes is None else (offsets_of(sizes),)
    q = rowwise(300 if sizes is None else sum(sizes), columns, fmt)
    transpose = functools.partial(fp8moe.scaling_aware_transpose, target=target, align_size=align_size)
    expected, actual = backend.both(lambda *a: transpose(*a, layout="blocked_128x4"), q, *offsets)
    assert_same(expected, actual)
    of_align = {} if sizes is None else {"align_size": align_size}
    assert_same(fp8moe.to_layout(transpose(q, *offsets), "blocked_128x4", *offsets, **of_align), actual)


@pytest.mark.parametrize("align_size", [1, 128])
@over(
    "tokens, experts, columns",
    reference=[(50, 3, 128)],
    on_cpu=[(50, 3, 128)],
    on_gpu=[(1000, 16, 2048)],
)
def test_permute_transpose_writes_the_blocked_layout(backend, tokens, experts, columns, align_size):
    q, plan = rowwise(tokens, columns), a_plan(tokens, experts, align_size)
    compact = fp8moe.permute_transpose(q, plan)
    wanted = fp8moe.to_layout(compact, "blocked_128x4", plan.expert_offsets, align_size=align_size)
    for got in backend.both(lambda q, p: fp8moe.permute_transpose(q, p, layout="blocked_128x4"), q, plan):
        assert same_bits(wanted.scales, got.scales)
        used = plan.expert_offsets[-1]  # codes after it are undefined
        assert same_bits(wanted.data[:, :used], got.data[:, :used])


@over(
    "tokens, experts, columns, num_out_tokens, device",
    reference=[(40, 3, 512, None, {}), (40, 3, 96, 140, {})],
    on_cpu=[
        *((40, 3, columns, rows, {}) for columns, rows in ((512, None), (512, 200), (96, None), (96, 140))),
        (40, 3, 512, None, {"architecture": "sm_80"}),  # without bulk copies
    ],
    on_gpu=[
        (*sizes, columns, rows, {})
        for columns in (7168, 2048, 96)
        for *sizes, rows in ((1000, 16, None), (4096, 8, None), (300, 4, 1000))
    ],
)
def test_permute_writes_the_blocked_layout(backend, tokens, experts, columns, num_out_tokens, device):
    """Blocked scales written by permute equal its converted compact scales, including rows without a
    token."""
    plan = a_plan(tokens, experts, 128, num_out_tokens=num_out_tokens)
    q = fp8moe.quantize(values(RNG, (tokens, columns), BF16), block=ROW)
    probs = RNG.random((tokens, 2)).astype(np.float32)
    both = functools.partial(backend.both, **device)

    def permute(*arguments, **options):
        moved = fp8moe.permute(*arguments, layout="blocked_128x4", **options)
        return moved.data, moved.probs

    expected, actual = both(permute, q, plan, probs)
    assert_same(expected, actual)
    compact = fp8moe.permute(q, plan, probs)
    assert_same((in_blocked(compact.data), compact.probs), expected)
    assert_same(in_blocked(compact.data, plan.expert_offsets, align_size=128), expected[0])
    there = fp8moe.permute(np.ones((tokens, 1), np.float32), plan).data[:, 0] == 1
    for filled, _ in both(lambda q, p: permute(q, p, fill_padding=False), q, plan):
        back = fp8moe.to_layout(filled, "compact")
        assert same_bits(back.scales[there], compact.data.scales[there])
        assert same_bits(back.data[there], compact.data.data[there])


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
