"""Operands of the adapter for torch's MXFP8 products, tested with stubs that check them like torch and
multiply them."""

import inspect
import itertools

import numpy as np
import pytest
from cases import generator, offsets_of

import fp8moe

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("fp8moe.adapters.torch.scaled_mm")
torch_descriptions = pytest.importorskip("torch_descriptions")
functional = torch.nn.functional
RNG = generator()
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn


def scaled_mm(
    mat_a,
    mat_b,
    scale_a,
    scale_recipe_a,
    scale_b,
    scale_recipe_b,
    swizzle_a=None,
    swizzle_b=None,
    bias=None,
    output_dtype=torch.bfloat16,
    contraction_dim=(),
    use_fast_accum=False,
):
    """Checks its operands like torch's meta function `_check_scaled_mm_sizes_v2`."""
    _check_recipes(scale_recipe_a, scale_recipe_b, swizzle_a, swizzle_b)
    assert mat_a.is_contiguous()
    assert mat_b.t().is_contiguous()
    for mat, scale in ((mat_a, scale_a), (mat_b.t(), scale_b)):
        assert mat.dtype == E4M3
        assert scale.dtype == E8M0
        assert scale.numel() == -(-mat.shape[0] // 128) * 128 * (-(-mat.shape[1] // 128) * 4)
    return (_decoded(mat_a, scale_a) @ _decoded(mat_b.t(), scale_b).t()).to(output_dtype)


def scaled_grouped_mm(
    mat_a,
    mat_b,
    scale_a,
    scale_recipe_a,
    scale_b,
    scale_recipe_b,
    swizzle_a=None,
    swizzle_b=None,
    bias=None,
    offs=None,
    output_dtype=torch.bfloat16,
    contraction_dim=(),
    use_fast_accum=False,
):
    """Checks its operands like ATen's GroupedBlas.cpp, and reads each group's scales at the positions of
    torchao's reference: groups of rows in multiples of 128, groups of the contraction in multiples of 4
    blocks."""
    _check_recipes(scale_recipe_a, scale_recipe_b, swizzle_a, swizzle_b)
    assert mat_a.dtype == mat_b.dtype == E4M3
    assert scale_a.dtype == scale_b.dtype == E8M0
    assert offs.dtype == torch.int32
    assert offs.dim() == 1
    assert mat_a.is_contiguous()
    assert mat_b.transpose(-1, -2).is_contiguous()
    assert mat_a.shape[-1] % 16 == mat_b.shape[-1] % 16 == mat_b.shape[-2] % 16 == 0
    assert scale_a.dim() == 2
    assert scale_a.shape[0] >= mat_a.shape[0]
    firsts = [0, *offs.tolist()]
    flat_a, flat_b, at_a, at_b = scale_a.flatten(), scale_b.flatten(), 0, 0
    if mat_b.dim() == 3:
        groups, depth, width = mat_b.shape
        assert scale_b.shape == (groups, -(-depth // 128) * 4 * (-(-width // 128) * 128))
        out = torch.full((mat_a.shape[0], width), 7.0)
        for g, (lo, hi) in enumerate(itertools.pairwise(firsts)):
            count = -(-(hi - lo) // 128) * 128 * (-(-depth // 128) * 4)
            x = _decoded(mat_a[lo:hi], flat_a[at_a : at_a + count])
            out[lo:hi] = x @ _decoded(mat_b[g].t(), scale_b[g]).t()
            at_a += count
        return out.to(output_dtype)
    assert scale_b.dim() == 2
    assert scale_b.shape[0] >= mat_b.shape[1]
    out = torch.zeros(len(offs), mat_a.shape[0], mat_b.shape[1])
    for g, (lo, hi) in enumerate(itertools.pairwise(firsts)):
        blocks = -(-(hi - lo) // 128) * 4
        count_a, count_b = (-(-rows // 128) * 128 * blocks for rows in (mat_a.shape[0], mat_b.shape[1]))
        a = _decoded(mat_a[:, lo:hi], flat_a[at_a : at_a + count_a])
        out[g] = a @ _decoded(mat_b[lo:hi].t(), flat_b[at_b : at_b + count_b]).t()
        at_a, at_b = at_a + count_a, at_b + count_b
    return out.to(output_dtype)


def _check_recipes(recipe_a, recipe_b, swizzle_a, swizzle_b):
    assert recipe_a == recipe_b == functional.ScalingType.BlockWise1x32
    assert swizzle_a == swizzle_b == functional.SwizzleType.SWIZZLE_32_4_4


def _decoded(codes, scales):
    """Values of codes [outer, contraction], by torch's own definition of the layout."""
    if not codes.numel():
        return codes.float()
    each = torch_descriptions.from_blocked(codes, scales.view(torch.uint8), 32).view(E8M0).float()
    return codes.float() * each.repeat_interleave(32, 1)


@pytest.fixture
def blackwell(monkeypatch):
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(functional, "scaled_grouped_mm", scaled_grouped_mm)
    monkeypatch.setattr(adapter, "_capability", lambda device: (10, 0))


@pytest.mark.parametrize("stand_in", [scaled_mm, scaled_grouped_mm])
def test_stand_ins_have_torchs_signatures(stand_in):
    theirs = inspect.signature(getattr(functional, stand_in.__name__)).parameters
    ours = inspect.signature(stand_in).parameters
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


def mx(rows, columns, layout="blocked_128x4", offsets=None):
    """(codes, their values in float64)."""
    x = torch.from_numpy(RNG.standard_normal((rows, columns)).astype(np.float32))
    q = fp8moe.quantize(x, block=(1, 32))
    wide = fp8moe.dequantize(q).double()
    return (q if layout == "compact" else fp8moe.to_layout(q, layout, offsets)), wide


def assert_product(actual, a, b):
    """Compares with a @ b.T summed in float32, n products by n - 1 additions in any order, then rounded to 8
    bits."""
    n = a.shape[1]
    sums = n * 2.0**-24 * (a.abs() @ b.abs().t())
    assert ((actual.double() - a @ b.t()).abs() <= 2.0**-8 * (a @ b.t()).abs() + 1.01 * sums).all()


def test_scaled_mm(blackwell):
    (x, a), (w, b) = mx(200, 160), mx(144, 160)
    assert_product(adapter.scaled_mm(x, w), a, b)


@pytest.mark.parametrize("sizes", [[128, 0, 256], [5, 0, 130, 1]])
def test_scaled_grouped_mm(blackwell, sizes):
    offsets = torch.from_numpy(offsets_of(sizes))
    aligned = all(s % 128 == 0 for s in sizes)
    x, a = mx(sum(sizes), 96, offsets=None if aligned else offsets)
    w, b = mx(len(sizes) * 128, 96)
    actual = adapter.scaled_grouped_mm(x, w, offsets)
    for e, weights in enumerate(b.view(len(sizes), 128, 96)):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        assert_product(actual[rows], a[rows], weights)


@pytest.mark.parametrize("sizes", [[128, 0, 256], [32, 64, 0, 160]])
def test_scaled_grouped_mm_wgrad(blackwell, sizes):
    offsets = torch.from_numpy(offsets_of(sizes))
    columns = []
    for width in (80, 128):
        q, _ = mx(sum(sizes), width, layout="compact")
        column = fp8moe.scaling_aware_transpose(q, offsets, layout="blocked_128x4")
        compact = fp8moe.scaling_aware_transpose(q, offsets)
        columns.append((column, fp8moe.dequantize(compact, expert_offsets=offsets).double()))
    (dy, a), (x, b) = columns
    actual = adapter.scaled_grouped_mm_wgrad(dy, x, offsets)
    for e in range(len(sizes)):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        assert_product(actual[e], a[rows].t(), b[rows].t())


@pytest.mark.parametrize(
    ("capability", "grouped", "works"),
    [
        (None, False, False),
        ((8, 0), False, False),
        ((9, 0), False, False),
        ((9, 0), True, False),
        ((10, 0), True, True),
        ((10, 3), True, True),
        ((12, 0), False, True),
        ((12, 0), True, False),
    ],
)
def test_unsupported_devices_raise(monkeypatch, blackwell, capability, grouped, works):
    monkeypatch.setattr(adapter, "_capability", lambda device: capability)
    (x, _), (w, _) = mx(128, 64), mx(128, 64)
    offsets = torch.tensor([0, 128], dtype=torch.int32)
    call = (lambda: adapter.scaled_grouped_mm(x, w, offsets)) if grouped else lambda: adapter.scaled_mm(x, w)
    if works:
        assert call().shape == (128, 128)
        return
    with pytest.raises(TypeError, match=r"wanted compute capability 10\.(x|0 or later)"):
        call()


def test_cpu_raises():
    (x, _), (w, _) = mx(128, 64), mx(128, 64)
    with pytest.raises(TypeError, match="scaled_mm: got MXFP8 operands on cpu; wanted compute capability"):
        adapter.scaled_mm(x, w)


def test_validation_errors(blackwell):
    (x, _), (w, _) = mx(128, 64), mx(128, 96)
    offsets = torch.tensor([0, 128], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"w: got \[128, 96\]; wanted \[N, 64\]"):
        adapter.scaled_mm(x, w)
    with pytest.raises(ValueError, match=r"w: got \[128, 96\] with x \[128, 64\] and 1 experts"):
        adapter.scaled_grouped_mm(x, w, offsets)
    with pytest.raises(TypeError, match=r"x\.layout: got 'compact'; wanted blocked_128x4"):
        adapter.scaled_mm(mx(128, 64, layout="compact")[0], w)
    e5m2 = fp8moe.quantize(torch.ones(128, 64), block=(1, 32), fmt="e5m2", layout="blocked_128x4")
    with pytest.raises(TypeError, match=r"w\.fmt: got 'e5m2'"):
        adapter.scaled_mm(x, e5m2)
