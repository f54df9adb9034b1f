"""Operands of the DeepGEMM adapter, tested with a stub that multiplies them."""

import sys
import types

import numpy as np
import pytest
from cases import generator, offsets_of, relative, same_bits

import fp8moe

torch = pytest.importorskip("torch")
deepgemm = pytest.importorskip("fp8moe.adapters.torch.deepgemm")
RNG = np.random.default_rng(1)


def m_grouped_fp8_gemm_nt_contiguous(a, b, out, m_indices):
    """DeepGEMM's checks of its operands, and the product in float32."""
    (x, sx), (w, sw) = a, b
    assert x.dtype == w.dtype == torch.float8_e4m3fn
    assert sx.dtype == sw.dtype == torch.float32
    assert sx.shape == (x.shape[0], -(-x.shape[1] // 128))
    assert sw.shape == (w.shape[0], -(-w.shape[1] // 128), -(-w.shape[2] // 128))
    assert m_indices.dtype == torch.int32
    assert m_indices.shape == x.shape[:1]
    wide = x.float() * sx.repeat_interleave(128, 1)[:, : x.shape[1]]
    scales = sw.repeat_interleave(128, 1)[:, : w.shape[1]].repeat_interleave(128, 2)[:, :, : w.shape[2]]
    weights = w.float() * scales
    for e in range(len(w)):
        out[m_indices == e] = (wide[m_indices == e] @ weights[e].t()).to(out.dtype)


def cast(x, rows, columns, pow2):
    """What DeepGEMM's per_token_cast_to_fp8, per_channel_cast_to_fp8 and per_block_cast_to_fp8 compute, for
    blocks of ``rows`` by ``columns``: codes and scales, in x's order."""
    padding = -x.shape[1] % columns, -x.shape[0] % rows
    blocks = torch.nn.functional.pad(x, (0, padding[0], 0, padding[1]))
    height, width = blocks.shape
    blocks = blocks.reshape(height // rows, rows, width // columns, columns)
    scales = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    if pow2:  # up to the next exponent, unless the mantissa is zero
        bits = scales.view(torch.int32)
        scales = (((bits >> 23) + ((bits & 0x7FFFFF) != 0).int()) << 23).view(torch.float32)
    codes = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.reshape(height, width)[: x.shape[0], : x.shape[1]], scales[:, 0, :, 0]


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_codes_and_scales_are_deepgemms(dtype, pow2):
    rng = generator()
    cases = ((1, 128), (300, 1000)), ((128, 1), (256, 700)), ((128, 128), (1000, 1300))
    for (rows, columns), shape in cases:
        x = rng.standard_normal(shape) * np.exp2(rng.uniform(-20, 20, (shape[0], 1)))  # some below 1e-4
        x[:, :128] = 0
        x = torch.from_numpy(x).to(getattr(torch, dtype))
        codes, scales = cast(x, rows, columns, pow2)
        q = fp8moe.quantize(x, block=(rows, columns), pow2=pow2, eps=1e-4)
        assert same_bits(q.scales.numpy(), scales.numpy())
        assert same_bits(q.data.numpy(), (codes.t() if columns == 1 else codes).numpy())


@pytest.fixture
def installed(monkeypatch):
    fake = types.ModuleType("deep_gemm")
    fake.m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)


@pytest.mark.parametrize("layout", ["compact", "gemm_ready"])
def test_product_matches_grouped_gemm(layout, installed):
    offsets = torch.from_numpy(offsets_of([128, 0, 256]))
    x = fp8moe.quantize(torch.randn(384 + 6, 256), layout=layout)
    w = fp8moe.quantize_weights(torch.randn(3, 128, 256))
    out = torch.full((390, 128), 7.0, dtype=torch.bfloat16)
    assert deepgemm.deepgemm_grouped_gemm(x, w.rowwise, offsets, out) is out
    wanted = fp8moe.grouped_gemm(x, w.rowwise, offsets)
    assert relative(out[:384].float().numpy(), wanted[:384].float().numpy()) < 2.0**-8
    assert (out[384:] == 7).all()
    back = deepgemm.deepgemm_grouped_gemm(fp8moe.quantize(wanted), w.columnwise, offsets)
    assert back.shape == (390, 256)


def test_validation_errors(monkeypatch, installed):
    x, w = fp8moe.quantize(torch.randn(128, 256)), fp8moe.quantize_weights(torch.randn(1, 128, 256)).rowwise
    offsets = torch.tensor([0, 128], dtype=torch.int32)
    with pytest.raises(TypeError, match="e5m2"):
        deepgemm.deepgemm_grouped_gemm(fp8moe.quantize(torch.randn(128, 256), fmt="e5m2"), w, offsets)
    with pytest.raises(ValueError, match=r"\[128, 256\]"):
        deepgemm.deepgemm_grouped_gemm(x, w, offsets[:1])
    fake = sys.modules["deep_gemm"]
    for alignment in (64, 128):
        fake.get_mk_alignment_for_contiguous_layout = lambda alignment=alignment: alignment
        deepgemm.deepgemm_grouped_gemm(x, w, offsets)
    for alignment in (224, 256):  # a block of rows is multiplied by the weight of its first row's expert
        fake.get_mk_alignment_for_contiguous_layout = lambda alignment=alignment: alignment
        with pytest.raises(ValueError, match=f"deep_gemm: got blocks of {alignment} rows; wanted a divisor"):
            deepgemm.deepgemm_grouped_gemm(x, w, offsets)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(ImportError, match="another package"):
        deepgemm.deepgemm_grouped_gemm(x, w, offsets)
