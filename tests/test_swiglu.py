"""SwiGLU compared with torch in float64, its backward with torch autograd, its quantised form with
quantise."""

import importlib

import numpy as np
import pytest
import torch
from backend_checks import transposed_in_the_same_pass
from cases import ACTIVATIONS, BF16, GPT_OSS, TILE_OFFSETS, from_float8, same_bits, to_float8, values
from hypothesis import given
from hypothesis import strategies as st
from oracles import quantized, stored, torch_swiglu

import fp8moe
from fp8moe import Activation

reference = importlib.import_module("fp8moe.reference.swiglu")


@given(
    st.sampled_from((0, 1, 2, 127, 129)),
    st.sampled_from((0, 1, 64, 130)),
    st.sampled_from(ACTIVATIONS),
    st.sampled_from((BF16, np.dtype(np.float32), np.dtype(np.float16))),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_forward_matches_torch(rows, width, activation, dtype, with_probs, seed):
    rng = np.random.default_rng(seed)
    h = values(rng, (rows, activation.columns(width))).clip(-60, 60).astype(dtype)
    probs = rng.random(rows).astype(np.float32) if with_probs else None
    exact = torch_swiglu(
        torch.from_numpy(h.astype(np.float64)),
        None if probs is None else torch.from_numpy(probs.astype(np.float64)),
        activation=activation,
    ).numpy()
    got = fp8moe.swiglu(h, probs, activation=activation)
    assert got.dtype == dtype
    # Five float32 roundings (sigmoid, two or three products, b + offset), each 2^-24 of the value; where b +
    # 1 cancels, 2^-24 of the operands. The argument of the sigmoid is rounded too: 2^-24 * |alpha a| (1 - s);
    # that of GELU by tanh three more times, each z times 2^-24, with z = a (1.6 + 0.0714 a^2), without effect
    # beyond 20.
    a = np.abs(h[:, :width].astype(np.float64))
    operand = 1 + np.abs(h[:, -width:].astype(np.float64))
    z = 2 * a + 0.3 * a**3 * ("tanh" in activation.kind)
    shifted = activation.linear_offset != 0
    float32 = np.abs(exact) * 2.0**-24 * (6 + z) + a * operand * 2.0**-23 * shifted
    cast = {BF16: 2.0**-8, np.dtype(np.float16): 2.0**-11}.get(dtype, 0) * np.abs(exact) * 1.01
    assert (np.abs(got.astype(np.float64) - exact) <= float32 + cast + 1e-7).all()


@given(
    st.sampled_from((1, 2, 65)),
    st.sampled_from((1, 64)),
    st.sampled_from(ACTIVATIONS),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_backward_matches_torch_autograd(rows, width, activation, with_probs, seed):
    rng = np.random.default_rng(seed)
    h = torch.tensor(rng.standard_normal((rows, activation.columns(width))) * 3, requires_grad=True)
    probs = torch.tensor(rng.random(rows), requires_grad=True) if with_probs else None
    grad = rng.standard_normal((rows, width))
    torch_swiglu(h, probs, activation=activation).backward(torch.tensor(grad))
    arguments = (grad, h.detach().numpy(), probs.detach().numpy() if with_probs else None)
    got = fp8moe.swiglu_backward(*arguments, activation=activation)
    # float64 throughout: about ten roundings of values up to 10^3, sums of 64
    np.testing.assert_allclose(got.dh, h.grad, rtol=1e-12, atol=1e-12)
    if with_probs:
        np.testing.assert_allclose(got.dprobs, probs.grad, rtol=1e-12, atol=1e-11)
    else:
        assert got.dprobs is None
    single = fp8moe.swiglu_backward(
        *(None if v is None else v.astype(np.float32) for v in arguments), activation=activation
    )
    # near the discontinuity of the clamp
    edge = np.abs(np.abs(h.detach().numpy()) - (activation.clamp or 1e9)) < 1e-5
    close = np.isclose(single.dh, h.grad, rtol=1e-4, atol=1e-5) | edge
    assert close.all()


@given(
    st.sampled_from((0, 1, 127, 128, 300)),
    st.sampled_from((128, 256)),
    st.sampled_from(((1, 128), (1, 32))),
    st.sampled_from(("e4m3", "e5m2")),
    st.sampled_from(ACTIVATIONS),
    st.integers(0, 2**32 - 1),
)
def test_quantised_forms_equal_quantising_the_float32_result(rows, width, block, fmt, activation, seed):
    rng = np.random.default_rng(seed)
    h = values(rng, (rows, activation.columns(width))).clip(-30, 30).astype(BF16)
    probs, grad = rng.random(rows).astype(np.float32), values(rng, (rows, width), BF16)
    both = fp8moe.swiglu_quantize(h, probs, fmt=fmt, block=block, columnwise=True, activation=activation)
    y = fp8moe.swiglu(h.astype(np.float32), probs, activation=activation)
    for q, b in ((both.rowwise, block), (both.columnwise, block[::-1])):
        codes, scales = quantized(y, fmt, b)
        assert same_bits(q.scales, stored(scales, 32 in b))
        assert same_bits(q.data, codes.T if q.columnwise else codes)
    single = fp8moe.swiglu_quantize(h, probs, fmt=fmt, block=block, activation=activation)
    assert same_bits(single.data, both.rowwise.data)
    got = fp8moe.swiglu_quantize_backward(
        grad, h, probs, fmt=fmt, block=block, columnwise=True, activation=activation
    )
    plain = fp8moe.swiglu_backward(
        grad.astype(np.float32), h.astype(np.float32), probs, activation=activation
    )
    for half in (slice(0, width), slice(width, 2 * width))[: 1 + activation.gated]:  # gate and up separately
        codes, _ = quantized(np.ascontiguousarray(plain.dh[:, half]), fmt, block)
        assert same_bits(got.dh.rowwise.data[:, half], codes)
    assert same_bits(got.dprobs, plain.dprobs)
    codes, _ = quantized(plain.dh, fmt, block[::-1])
    assert same_bits(got.dh.columnwise.data, codes.T)


def test_experts_have_their_own_column_blocks_and_the_tail_is_never_read():
    rng = np.random.default_rng(1)
    h = rng.standard_normal((300, 256)).astype(BF16)
    offsets = np.array([0, 100, 100, 230], np.int32)
    h[230:] = np.nan
    both = fp8moe.swiglu_quantize(h, columnwise=True, expert_offsets=offsets)
    y = fp8moe.swiglu(h[:230].astype(np.float32))
    block = 0
    for lo, hi in ((0, 100), (100, 230)):
        codes, scales = quantized(y[lo:hi], "e4m3", (128, 1))
        assert same_bits(both.columnwise.data[:, lo:hi], codes.T)
        assert same_bits(both.columnwise.scales[block : block + len(scales)], scales.astype(np.float32))
        block += len(scales)
    assert not np.isnan(from_float8(both.columnwise.data, "e4m3")).any()
    assert same_bits(both.rowwise.data[:230], to_float8(y / both.rowwise.scales[:230].astype(float), "e4m3"))


def test_blocks_across_gate_and_up_raise():
    with pytest.raises(ValueError, match="no block spans both halves"):
        fp8moe.swiglu_quantize_backward(np.ones((2, 64), np.float32), np.ones((2, 128), np.float32))


@given(
    st.sampled_from((1, 2, 65)),
    st.sampled_from((1, 64)),
    st.sampled_from(ACTIVATIONS),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_compiled_forms_equal_the_plain_ones(rows, width, activation, with_probs, seed):
    rng = np.random.default_rng(seed)
    h = values(rng, (rows, activation.columns(width)), awkward=True)
    probs = rng.random(rows).astype(np.float32) if with_probs else None
    grad = values(rng, (rows, width), awkward=True)
    act = activation
    np.testing.assert_array_equal(reference.forward(h, probs, act), reference.forward_plain(h, probs, act))
    dh, _ = reference.backward(grad, h, probs, act)
    np.testing.assert_array_equal(dh, reference.backward_plain(grad, h, probs, act)[0])
    if with_probs:
        h, grad = (rng.standard_normal(v.shape).astype(np.float32) for v in (h, grad))
        _, dprobs = reference.backward(grad, h, probs, act)
        # the same 64 float32 terms of at most 6 * 6 * 7, summed in float64 in another order
        bound = 64 * 64 * 6 * 6 * 7 * 2.0**-53
        np.testing.assert_allclose(
            dprobs, reference.backward_plain(grad, h, probs, act)[1], rtol=0, atol=bound
        )


def test_gradients_that_overflow_are_infinite():
    """Without warnings, because rows after the last expert's may contain any values."""
    h, grad, probs = np.ones((3, 256), BF16), np.full((3, 128), 3e38, BF16), np.full(3, 1.5, np.float32)
    g = fp8moe.swiglu_backward(grad, h, probs)
    assert np.isposinf(g.dprobs).all()  # each term is finite, their sum is not
    assert np.isposinf(g.dh[:, :128].astype(np.float32)).all()
    assert np.isposinf(fp8moe.swiglu_quantize_backward(grad, h, probs).dprobs).all()


def test_negative_zeros_of_an_activation_become_zeros():
    """Ranks compare representations."""
    activation = Activation(clamp=-0.0, alpha=-0.0, linear_offset=-0.0)
    assert repr(activation) == repr(Activation(clamp=0.0, alpha=0.0, linear_offset=0.0))


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"kind": "reglu"}, ValueError, "kind: got 'reglu'; wanted one of 'swiglu', 'geglu', 'geglu_tanh'"),
        (
            {"kind": "relu2", "clamp": 7.0},
            ValueError,
            "clamp: got 7.0 with kind='relu2'; wanted a gated kind",
        ),
        ({"kind": "gelu", "clamp": 7.0}, ValueError, "clamp: got 7.0 with kind='gelu'; wanted a gated kind"),
        ({"kind": "quick_gelu", "alpha": 2.0}, ValueError, "alpha: got 2.0 with kind='quick_gelu'"),
        ({"kind": "relu2", "linear_offset": 1}, ValueError, "linear_offset: got 1.0 with kind='relu2'"),
        ({"kind": "quick_geglu", "alpha": 2.0}, ValueError, "alpha: got 2.0 with kind='quick_geglu'"),
        ({"clamp": -1.0}, ValueError, "clamp: got -1.0"),
        ({"clamp": True}, TypeError, "clamp: got bool"),
        ({"alpha": "1"}, TypeError, "alpha: got str"),
        ({"alpha": float("nan")}, ValueError, "alpha: got nan"),
        ({"linear_offset": 1e39}, ValueError, "linear_offset: got 1e"),
        ({"kind": "geglu", "alpha": 1.702}, ValueError, "alpha: got 1.702 with kind='geglu'"),
    ],
)
def test_unknown_activations_raise(arguments, kind, words):
    with pytest.raises(kind, match=words):
        Activation(**arguments)


def test_quick_gelu_is_silu_with_an_alpha():
    assert Activation("quick_geglu", clamp=7.0) == Activation(alpha=1.702, clamp=7.0)
    assert Activation("quick_gelu") == Activation("silu", alpha=1.702)


def test_relu2_of_awkward_numbers():
    """The activation without a gate for infinities, NaN and values that overflow, as in torch."""
    h = np.array([[-np.inf, np.inf, np.nan, -0.0, 3e38, -1e-40, 1e-30, -2.0, 3.0]], np.float32)
    x = torch.tensor(h, requires_grad=True)
    y = torch_swiglu(x, None, Activation("relu2"))
    y.sum().backward()
    np.testing.assert_array_equal(fp8moe.swiglu(h, activation=Activation("relu2")), y.detach())
    g = fp8moe.swiglu_backward(np.ones_like(h), h, activation=Activation("relu2"))
    np.testing.assert_array_equal(g.dh, x.grad)


@pytest.mark.parametrize("kind", ["geglu", "geglu_tanh", "gelu", "gelu_tanh"])
def test_gelu_of_every_bfloat16(kind):
    """The function and its derivative for every finite bfloat16, compared with torch's in float64."""
    every = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    every = every[np.isfinite(every.astype(np.float32))].astype(np.float32)
    every = every[np.abs(every) < 1e12]  # beyond, the cube of a float32 overflows
    h = np.stack([every, np.ones_like(every)][: Activation(kind).columns(1)], axis=1)
    x = torch.from_numpy(every.astype(np.float64)).requires_grad_()
    y = torch.nn.functional.gelu(x, approximate="tanh" if "tanh" in kind else "none")
    y.sum().backward()
    activation = Activation(kind)
    actual = fp8moe.swiglu(h, activation=activation)[:, 0]
    slope = fp8moe.swiglu_backward(np.ones((len(h), 1), np.float32), h, activation=activation).dh[:, 0]
    exact, a = y.detach().numpy(), np.abs(every.astype(np.float64))
    # as above; torch's own 1 + erf has an error of 2^-53 of one, and floats below 2^-126 of 2^-149
    z, torch_error = 2 * a + 0.3 * a**3 * ("tanh" in kind), (1 + a) * 2.0**-51 + 2.0**-140
    assert (np.abs(actual - exact) <= np.abs(exact) * 2.0**-24 * (6 + z) + torch_error).all()
    # The derivative has two terms, s below 1 and a slope below 1.2 that decreases like exp(-a^2 / 3). Both
    # have the error of z, which matters only where neither s nor 1 - s vanishes.
    fades = np.exp(-np.minimum(a, 30) / 2)
    bound = 2.0**-24 * (8 + 2 * z * fades) * np.minimum(2.2, 4 * ((every > 0) + fades))
    assert (np.abs(slope - x.grad.numpy()) <= bound + torch_error).all()


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("offsets", TILE_OFFSETS)
def test_transposed_in_the_same_pass(fmt, offsets):
    def on_cpu(function, *arguments, **options):
        return None, function(*arguments, **options)

    for dtype, activation in ((BF16, Activation()), (np.float32, GPT_OSS)):
        transposed_in_the_same_pass(on_cpu, dtype, fmt, activation, 512, offsets)


@pytest.mark.parametrize("function", [fp8moe.swiglu_quantize, fp8moe.swiglu_quantize_backward])
def test_invalid_transposes_raise(function):
    h, grad = np.ones((256, 256), np.float32), np.ones((256, 128), np.float32)
    arguments = (h,) if function is fp8moe.swiglu_quantize else (grad, h)
    with pytest.raises(ValueError, match="columnwise, transposed: got both"):
        function(*arguments, columnwise=True, transposed=True)
    with pytest.raises(ValueError, match=r"block: got \(1, 32\) with transposed=True; wanted \(1, 128\)"):
        function(*arguments, block=(1, 32), transposed=True)
    with pytest.raises(ValueError, match="align_size: got 1"):
        function(*arguments, expert_offsets=np.array([0, 100], np.int32), transposed=True)
