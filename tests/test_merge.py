"""Adapters merged into weights, against float64 and NumPy's own rounding to e4m3; and layers as the tensors
of checkpoints."""

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fp8moe  # noqa: E402
from fp8moe.adapters.torch.low_rank import pair_of  # noqa: E402
from fp8moe.torch import FP8FlowMoE, LoRA, merge_lora, published_experts, quantize_weights  # noqa: E402

E, N, K, R = 3, 256, 160, 6
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def a_base(scales="float32"):
    """Codes with scales that are no powers of two; every tile has its largest code."""
    codes = torch.randn(E, N, K).mul(40).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes[:, ::128, ::128] = 448.0
    factors = torch.rand(E, 2, 2) + 0.2
    if scales == "tiny":
        factors = factors * 2.0**-126
    return fp8moe.from_block_fp8(codes.view(torch.uint8), factors)


def weights():
    return torch.randn(E, N, K), torch.randn(E, K, N // 2)


def an_adapter(size):
    return LoRA(torch.randn(E, R, K), torch.randn(E, N, R) * size, scaling=0.7)


def tiles(x):
    return np.repeat(np.repeat(x.double().numpy(), 128, 1), 128, 2)[:, :N, :K]


def values(q):
    return q.data.numpy().view(E4M3).astype(np.float64) * tiles(q.scales)


def sum_of(w, lora):
    added = 0.7 * (lora.b.double() @ lora.a.double()).numpy()
    return np.where(added == 0, w, w + added)  # with the sign of a zero


@pytest.mark.parametrize("size", [0.0, 1e-3, 3.0, 300.0])
@pytest.mark.parametrize("scales", ["float32", "tiny"])
def test_merged_codes(size, scales):
    """Scales grow by powers of two, no further than the sums need; codes are the nearest; what no adapter
    changes keeps its code."""
    base, lora = a_base(scales), an_adapter(size)
    before = base.rowwise.data.clone()
    merged, report = merge_lora(base, lora)
    assert torch.equal(base.rowwise.data, before)
    exact, factors = sum_of(values(base.rowwise), lora), merged.rowwise.scales
    doublings = np.log2((factors.double() / base.rowwise.scales.double()).numpy())
    largest = np.zeros((E, 2, 2))
    for i in range(2):
        for j in range(2):
            largest[:, i, j] = abs(exact[:, 128 * i : 128 * i + 128, 128 * j : 128 * j + 128]).max((1, 2))
    assert (largest <= 464 * factors.double().numpy()).all()
    grown = doublings > 0
    assert (doublings == np.floor(doublings)).all()
    assert (doublings >= 0).all()
    assert (largest > 464 * factors.double().numpy() / 2)[grown].all()
    if size != 3:  # of sums about as large as the codes' own values, some tiles'
        assert grown.any() == (size > 3 or (scales == "tiny" and size > 0))
    wanted = np.clip(exact / tiles(factors), -448, 448).astype(np.float32).astype(E4M3)
    np.testing.assert_array_equal(merged.rowwise.data.numpy(), wanted.view(np.uint8))
    transposed = merged.columnwise.data.transpose(1, 2).contiguous()
    assert torch.equal(transposed, merged.rowwise.data)
    if size == 0:
        assert torch.equal(merged.rowwise.data, before)
        assert (report.rounding, report.adapter) == (0, 0)
    norm = np.linalg.norm(exact)
    # sums of float64 in another order
    error = np.linalg.norm(values(merged.rowwise) - exact) / norm
    assert report.rounding == pytest.approx(error, rel=1e-9)
    added = sum_of(np.zeros((E, N, K)), lora)
    assert report.adapter == pytest.approx(np.linalg.norm(added) / norm, rel=1e-9)
    assert report.saturated == (abs(exact / tiles(factors)) > 448).sum()


def test_rounding_is_less_than_of_new_codes():
    """Of codes whose scales are kept, a small adapter's rounding is at most the adapter itself."""
    base, lora = a_base(), an_adapter(1e-4)
    merged, report = merge_lora(base, lora)
    exact = sum_of(values(base.rowwise), lora)
    anew = quantize_weights(torch.from_numpy(exact).float()).rowwise
    assert report.rounding <= report.adapter * (1 + 1e-9)  # sums of float64
    assert np.linalg.norm(values(anew) - exact) > 10 * np.linalg.norm(values(merged.rowwise) - exact)
    # steps between codes are ten thousand times the adapter
    assert report.kept < 0.5
    assert f"of which {report.kept:.0%} is kept; {report.saturated} values" in str(report)


@pytest.mark.parametrize("size", [1e-4, 0.02, 3.0])
def test_rounding_by_chance_keeps_small_adapters(size):
    """Each code is one of the two next to the sum; the sum is the expectation."""
    base, lora = a_base(), an_adapter(size)
    merged, report = merge_lora(base, lora, generator=torch.Generator().manual_seed(torch.seed() % 2**31))
    exact = sum_of(values(base.rowwise), lora)
    quotient = np.clip(exact / tiles(merged.rowwise.scales), -448, 448)
    codes = merged.rowwise.data.numpy().view(E4M3).astype(np.float64)
    known = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64)
    known = np.unique(known[np.isfinite(known)])
    below = known[np.searchsorted(known, quotient, side="right") - 1]
    above = known[np.minimum(np.searchsorted(known, quotient), len(known) - 1)]
    assert ((codes == below) | (codes == above)).all()
    # the error's variance is (q - below)(above - q): its part along the adapter within six deviations
    added = sum_of(np.zeros((E, N, K)), lora)
    factors = tiles(merged.rowwise.scales)
    variance = ((quotient - below) * (above - quotient) * (factors * added) ** 2).sum()
    clipped = ((quotient * factors - exact) * added).sum()
    assert abs(report.kept - 1 - clipped / (added**2).sum()) < 6 * variance**0.5 / (added**2).sum()
    wide = values(base.rowwise)
    found = ((values(merged.rowwise) - wide) * added).sum() / (added**2).sum()
    assert report.kept == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merged_values(dtype):
    """Rounded once."""
    w, lora = torch.randn(E, N, K).to(dtype), an_adapter(0.1)
    merged, report = merge_lora(w, lora)
    exact = torch.from_numpy(sum_of(w.double().numpy(), lora))
    assert torch.equal(merged, exact.to(dtype))
    assert merged.dtype == dtype
    error = (merged.double() - exact).norm() / exact.norm()
    assert report.rounding == pytest.approx(error.item(), rel=1e-9)
    assert report.saturated == 0


def test_padded_weights():
    """Adapters of 96 rows of gate and of up beside codes that are padded to 128, and w2's columns."""
    w13, w2 = torch.randn(E, 192, K), torch.randn(E, K, 96)
    codes13, codes2 = fp8moe.torch.quantize_fp8_weights(w13, w2)
    first = LoRA(torch.randn(E, R, K), torch.randn(E, 192, R))
    second = LoRA(torch.randn(E, R, 96), torch.randn(E, K, R))
    merged, _ = merge_lora(codes13, first, parts=2)
    gates, ups = merged.rowwise.data.unflatten(1, (2, 128)).unbind(1)
    wide = fp8moe.dequantize(codes13.rowwise)
    wide = torch.cat((wide[:, :96], wide[:, 128:224]), 1)
    found = fp8moe.dequantize(merged.rowwise)
    found = torch.cat((found[:, :96], found[:, 128:224]), 1)
    exact = wide + first.b @ first.a
    assert (found - exact).norm() <= 2**-4 * exact.norm()
    assert not gates[:, 96:].any()
    assert not ups[:, 96:].any()
    merged, _ = merge_lora(codes2, second)
    assert not merged.rowwise.data[:, :, 96:].any()
    with pytest.raises(
        ValueError, match=r"lora: b: got shape \[3, 192, 6\]; wanted \[3, 256, 6\]; pass parts=2"
    ):
        merge_lora(codes13, first)


@pytest.mark.parametrize("wrong", ["weight", "a", "b"])
def test_what_is_not_finite_is_refused(wrong):
    base, lora = a_base(), an_adapter(1.0)
    broken = {"weight": base.rowwise.scales, "a": lora.a, "b": lora.b}[wrong]
    broken[1, 0, 0] = float("inf")
    with pytest.raises(ValueError, match="w: got NaN or infinity in the weight or its adapter"):
        merge_lora(base, lora)


def test_wrong_kinds():
    lora = an_adapter(1.0)
    with pytest.raises(TypeError, match=r"lora: got tuple; wanted fp8moe\.torch\.LoRA"):
        merge_lora(torch.ones(E, N, K), (lora.a, lora.b))
    with pytest.raises(TypeError, match=r"w: got torch\.int64; wanted a floating-point tensor"):
        merge_lora(torch.ones(E, N, K).long(), lora)
    with pytest.raises(ValueError, match=r"lora: a: got shape \[3, 6, 160\]; wanted \[3, 6, 128\]"):
        merge_lora(torch.ones(E, N, 128), lora)
    with pytest.raises(ValueError, match=r"w: got shape \[256, 160\]; wanted \[E, N, K\]"):
        merge_lora(torch.ones(N, K), lora)
    frozen = FP8FlowMoE.from_quantized(*fp8moe.torch.quantize_fp8_weights(*weights()), topk=2)
    with pytest.raises(TypeError, match=r"w: got FrozenWeight; .* w13\.quantized"):
        merge_lora(frozen.w13, lora)
    with pytest.raises(ValueError, match="sums beyond the largest value of the weight's dtype"):
        merge_lora(torch.full((E, N, K), 6e4, dtype=torch.float16), LoRA(lora.a, lora.b, 1e6))
    with pytest.raises(TypeError, match=r"generator: got int; .* pass torch\.Generator\('cpu'\)"):
        merge_lora(a_base(), lora, generator=0)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("ffn", [128, 96])
def test_published_experts_are_the_codes_of_the_forward(gated, ffn):
    """Of a trained layer; of a layer of these codes; and with adapters, those of `merge_lora`."""
    activation = fp8moe.Activation("swiglu" if gated else "silu")
    layer = FP8FlowMoE(K, ffn, num_experts=E, topk=2, activation=activation)
    names = ("gate", "up", "down")[not gated :]
    tensors, reports = published_experts(layer, "model.mlp.experts.")
    assert reports == {}
    assert len(tensors) == E * len(names) * 2
    w13, w2 = fp8moe.torch.quantize_fp8_weights(layer.w13, layer.w2, activation=activation)
    given = []
    for name in names:
        keys = [f"model.mlp.experts.{e}.{name}_proj.weight" for e in range(E)]
        assert {tensors[key].dtype for key in keys} == {torch.float8_e4m3fn}
        given.append(([tensors[k] for k in keys], [tensors[f"{k}_scale_inv"] for k in keys]))
    parts, width = given[:-1], -(-ffn // 128) * 128
    again13 = fp8moe.from_block_fp8(
        tuple([codes for codes, _ in parts]), tuple([scales for _, scales in parts]), rows=width
    )
    again2 = fp8moe.from_block_fp8(*given[-1], columns=width)
    for again, w in ((again13, w13), (again2, w2)):
        assert torch.equal(again.rowwise.data, w.rowwise.data)
        assert torch.equal(again.rowwise.scales, w.rowwise.scales)
    if ffn == 96:
        return
    frozen = FP8FlowMoE.from_quantized(again13, again2, topk=2, activation=activation)
    found, _ = published_experts(frozen, "model.mlp.experts.")
    assert all(torch.equal(t.view(torch.uint8), found[n].view(torch.uint8)) for n, t in tensors.items())
    frozen.add_lora(R)
    for p in frozen.lora.parameters():
        torch.nn.init.normal_(p)
    found, reports = published_experts(frozen)
    merged, report = merge_lora(again2, pair_of(frozen.lora)[1])
    assert reports["w2"] == report
    assert torch.equal(found["experts.2.down_proj.weight"].view(torch.uint8), merged.rowwise.data[2])
    assert torch.equal(found["experts.2.down_proj.weight_scale_inv"], merged.rowwise.scales[2])
    merged, report = merge_lora(again13, pair_of(frozen.lora)[0])
    assert reports["w13"] == report
    assert torch.equal(found["experts.1.up_proj.weight"].view(torch.uint8), merged.rowwise.data[1, -128:])


def test_what_published_experts_refuses():
    with pytest.raises(TypeError, match="layer: got Linear; wanted FP8FlowMoE"):
        published_experts(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="layer: got recipe 'bf16', which multiplies by no FP8 codes"):
        published_experts(FP8FlowMoE(128, 128, num_experts=2, topk=1, recipe="bf16"))
    layer = FP8FlowMoE(128, 128, num_experts=2, topk=1)
    with pytest.raises(ValueError, match=r"prefix: got 'model\.experts'; wanted a name with a dot"):
        published_experts(layer, "model.experts")
    layer.w2.data[1, 3, 5] = float("nan")
    with pytest.raises(ValueError, match="w2: got NaN or infinity; wanted finite weights"):
        published_experts(layer)
    codes = fp8moe.torch.quantize_fp8_weights(*weights())
    layer = FP8FlowMoE.from_quantized(*codes, topk=2)
    layer.w2.weight_scale_inv[2, 1, 0] = 0
    with pytest.raises(ValueError, match=r"w2\.weight_scale_inv: got scales that are not positive"):
        published_experts(layer)
    layer.w13.weight[1, 2, 3] = 0xFF
    with pytest.raises(ValueError, match=r"w13\.weight: got NaN or infinity"):
        published_experts(layer)
    codes = fp8moe.torch.quantize_fp8_weights(*weights())
    with pytest.raises(
        ValueError, match=r"w13: got values other than zero beyond the layer's ffn = 96; .*128"
    ):
        published_experts(FP8FlowMoE.from_quantized(*codes, topk=2, ffn=96))


def test_experts_of_a_rank_have_their_numbers_among_all():
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        group = torch.distributed.group.WORLD
        layer = FP8FlowMoE(128, 128, num_experts=4, topk=2, process_group=group)
        with CommDebugMode() as sent:
            tensors, _ = published_experts(layer)
        assert sent.get_total_counts() == 0
        assert {name.split(".")[1] for name in tensors} == {"2", "3"}
    finally:
        torch.distributed.destroy_process_group()
