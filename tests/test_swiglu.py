"""SwiGLU compared with torch in float64, its backward with torch autograd, its quantised form with quantise;
its kernels with the reference and with float64."""

import functools
import importlib
import itertools
import math
import random

import numpy as np
import pytest
import torch
from backends import on_cuda, only_on_cpu, only_on_gpu, over
from cases import (
    ACTIVATIONS,
    BF16,
    GPT_OSS,
    KINDS,
    SEED,
    TILE_OFFSETS,
    assert_close,
    assert_nearly_same,
    assert_same,
    from_float8,
    generator,
    same_bits,
    to_float8,
    values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import quantized, stored, torch_swiglu

import fp8moe
from fp8moe import Activation, Quantized, QuantTensor
from fp8moe.ops.swiglu import activation_spec, raw_swiglu_quantize_backward
from fp8moe.runtime.dispatch import current, operation
from fp8moe.runtime.record_trees import arrays_in

reference = importlib.import_module("fp8moe.reference.swiglu")
RNG = generator()
# Each activation is one more variant of a kernel, which takes 3 s to compile for the CPU: the run's seed
# selects one of those without a gate, and one beside the default for MXFP8 and float16.
UNGATED = Activation(random.Random(SEED).choice(("silu", "quick_gelu", "gelu", "gelu_tanh")))
ON_CPU = (
    *(Activation(), GPT_OSS, Activation("geglu"), Activation("geglu_tanh", 7.0), Activation("relu2")),
    UNGATED,
)
OTHER = random.Random(SEED).choice(ON_CPU[1:])
ON_GPU = (
    Activation(),
    GPT_OSS,
    Activation("geglu"),
    Activation("geglu_tanh", clamp=7.0),
    *(Activation(kind) for kind in ("silu", "quick_gelu", "gelu", "gelu_tanh", "relu2")),
)


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


def codes_are_transposed_in_the_same_pass(backend, dtype, fmt, activation, rows, offsets):
    """The column-wise codes written in the same pass are bitwise equal to the transpose of the row-wise
    codes, also for rows of zeros, of NaN and of very different scales."""
    rng = RNG
    width, columns = 384, activation.columns(384)
    h, grad = rng.standard_normal((rows, columns)) * 4, rng.standard_normal((rows, width))
    h[rng.random(h.shape) < 0.01] *= 100
    grad[rng.random(rows) < 0.2] *= 2.0 ** rng.integers(-60, 20)
    h[rng.random(rows) < 0.1] = 0
    h[rng.integers(0, rows, 2), rng.integers(0, columns, 2)] = np.nan, np.inf
    h[: rows // 4, :128] = 0  # tiles that contain only zeros
    with np.errstate(over="ignore"):
        h, grad = h.astype(dtype), grad.astype(dtype)
    probs = rng.random(rows).astype(np.float32)
    options = {"fmt": fmt, "activation": activation}
    by_expert = {} if offsets is None else {"expert_offsets": offsets, "align_size": 128}
    first, last = (0, rows) if offsets is None else (offsets[0], offsets[-1])

    def run(function, *arguments, **keywords):
        return backend.both(function, *arguments, **options, **by_expert, **keywords)[1]

    def check(actual, wanted):
        assert_same(actual.rowwise, wanted)
        transposed = backend.both(fp8moe.scaling_aware_transpose, wanted, target="block", **by_expert)[1]
        assert same_bits(actual.columnwise.data[:, first:last], transposed.data[:, first:last])
        assert same_bits(actual.columnwise.scales, transposed.scales)
        assert actual.columnwise.block == transposed.block

    def with_y(transposed, grad, h, probs=None, offsets=None):
        """The backward with the forward's transposed codes."""

        @operation
        def both(grad, h, probs, offsets):
            of_y = activation_spec(grad.shape, fmt, (1, 128), False, True, offsets, 128)
            y, placed = current.call.empty(of_y.columnwise), {"expert_offsets": offsets, "align_size": 128}
            of_dh = {"fmt": fmt, "activation": activation, "transposed": transposed}
            return raw_swiglu_quantize_backward(grad, h, probs, **of_dh, **placed, y=y), y

        return backend.both(both, grad, h, probs, offsets)[1]

    for weights in ((probs,), ()):
        arguments = (h, *weights)
        one, two = (run(fp8moe.swiglu_quantize, *arguments, transposed=t) for t in (True, False))
        check(one, two)
        for transposed in (True, False):
            grads, y = with_y(transposed, grad, *arguments, *([] if weights else [None]), offsets)
            check(Quantized(two, y), two)
            plain = run(fp8moe.swiglu_quantize_backward, grad, *arguments)
            assert_same(grads.dh.rowwise if transposed else grads.dh, plain.dh)
            if transposed:
                check(grads.dh, plain.dh)
            if weights:
                np.testing.assert_allclose(grads.dprobs, plain.dprobs, rtol=2.0**-22, atol=2.0**-149)
        one, two = (
            run(fp8moe.swiglu_quantize_backward, grad, *arguments, transposed=t) for t in (True, False)
        )
        check(one.dh, two.dh)
        if not weights:
            assert one.dprobs is two.dprobs is None
            continue
        # the same float32 terms in float64, in another order: rounding may differ
        np.testing.assert_allclose(one.dprobs, two.dprobs, rtol=2.0**-22, atol=2.0**-149)


@pytest.mark.parametrize("offsets", TILE_OFFSETS)
@over(
    "kinds, rows",
    reference=[([(BF16, fmt, Activation()), (np.float32, fmt, GPT_OSS)], 512) for fmt in ("e4m3", "e5m2")],
    on_cpu=[
        ([(BF16, "e4m3", Activation())], 512),
        ([(BF16, "e5m2", GPT_OSS)], 512),
        ([(np.float32, "e4m3", Activation("geglu"))], 512),
        ([(BF16, "e4m3", UNGATED)], 512),
        ([(BF16, "e4m3", Activation())], 520),  # rows that do not fill tiles: two launches
    ],
    on_gpu=[(list(itertools.product(KINDS, ("e4m3", "e5m2"), ON_GPU)), rows) for rows in (512, 520, 8192)],
)
def test_transposed_in_the_same_pass(backend, kinds, rows, offsets):
    for dtype, fmt, activation in kinds:
        codes_are_transposed_in_the_same_pass(backend, dtype, fmt, activation, rows, offsets)


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


def known(result, offsets):
    """Its arrays without values after the last expert, which are undefined in column-wise codes."""
    unknown = offsets is not None
    return tuple(
        a[:, offsets[0] : offsets[-1]] if unknown and a.shape == (128, 140) else a for a in arrays_in(result)
    )


@only_on_cpu
@pytest.mark.parametrize(
    ("block", "activation"),
    [*(((1, 128), a) for a in ON_CPU), ((1, 32), ON_CPU[0]), ((1, 32), OTHER)],
)
def test_each_activation_quantised(backend, activation, block):
    h = RNG.standard_normal((140, activation.columns(128))) * 4
    h[RNG.random(h.shape) < 0.01] *= 100  # outside the range of the fast sigmoid
    h = h.astype(BF16)
    grad, probs = RNG.standard_normal((140, 128)).astype(BF16), RNG.random(140).astype(np.float32)
    options = {"block": block, "activation": activation}
    for offsets in (None, np.array([20, 53, 53, 130], np.int32)):
        options["expert_offsets"] = offsets
        for columnwise in (False, True):
            options["columnwise"] = columnwise
            expected, actual = backend.both(fp8moe.swiglu_quantize, h, probs, **options)
            assert_nearly_same(*(known(r, offsets) for r in (expected, actual)))
        options["columnwise"] = False
        expected, actual = backend.both(fp8moe.swiglu_quantize_backward, grad, h, probs, **options)
        assert_nearly_same(expected.dh, actual.dh)
        assert np.linalg.norm(expected.dprobs - actual.dprobs) <= 2.0**-19 * np.linalg.norm(expected.dprobs)


@only_on_cpu
@pytest.mark.parametrize("block", [(1, 128), (1, 32)])
@pytest.mark.parametrize("width", [640, 1408, 4224])
def test_rows_of_several_blocks(backend, width, block):
    """Rows shorter than a warp's step, and rows longer than it."""
    h, grad = (RNG.standard_normal((5, n)).astype(BF16) for n in (2 * width, width))
    probs, last = RNG.random(5).astype(np.float32), np.array([0, 4], np.int32)
    for offsets in (None, last):
        options = {"block": block, "expert_offsets": offsets}
        assert_nearly_same(*backend.both(fp8moe.swiglu_quantize, h, probs, **options))
        expected, actual = backend.both(fp8moe.swiglu_quantize_backward, grad, h, probs, **options)
        assert_nearly_same(expected.dh, actual.dh)


def same_but_for(expected, actual, digits, near):
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
    np.testing.assert_array_equal(a[~np.isfinite(a)], b[~np.isfinite(b)])
    with np.errstate(invalid="ignore"):
        assert (~np.isfinite(a) | (np.abs(a - b) <= 2.0 ** (1 - digits) * np.abs(a) + near)).all()
    assert (a != b)[np.isfinite(a)].mean() < 0.01  # one in 2^(20 - digits) of them


@pytest.mark.parametrize("with_probs", [True, False])
@over(
    "dtype, rows, width, activation",
    on_cpu=[
        *((BF16, 9, width, a) for width in (128, 1408, 72) for a in ON_CPU),
        *((np.float16, 9, 640, a) for a in (ON_CPU[0], OTHER)),
    ],
    on_gpu=[
        (*sizes, a) for sizes in ((BF16, 1000, 1408), (np.float16, 70, 640), (BF16, 9, 72)) for a in ON_GPU
    ],
)
def test_unquantised(backend, dtype, rows, width, activation, with_probs):
    """Values and gradients in 16 bits, including NaN, infinities and large values. The backend's sigmoid may
    have a relative error of 2^-20, and float32 roundings are added."""
    h, grad = RNG.standard_normal((rows, activation.columns(width))) * 4, RNG.standard_normal((rows, width))
    h[RNG.random(h.shape) < 0.01] *= 100  # up to about 1600
    h[0, :3], h[0, -width] = (np.nan, -np.inf, np.inf), np.nan
    h, grad = h.astype(dtype), grad.astype(dtype)
    probs = RNG.random(rows).astype(np.float32) if with_probs else None
    arguments = (h, probs) if with_probs else (h,)
    digits = 8 if dtype == BF16 else 11  # one unit in the last place is 2^(1 - digits) of the value
    tiny = 2.0**-133 if dtype == BF16 else 2.0**-24  # the smallest positive number
    y, actual = backend.both(fp8moe.swiglu, *arguments, activation=activation)
    same_but_for(y, actual, digits, tiny)
    expected, actual = backend.both(fp8moe.swiglu_backward, grad, *arguments, activation=activation)
    # where da = grad p b (s + g (1 - s)) nearly cancels, the error 2^-20 is relative to its terms, up to 1 +
    # |alpha a|
    bare = np.where(np.isfinite(h), h, 0).astype(np.float64)
    a, b = np.abs(bare[:, :width]), np.abs(bare[:, -width:]) + 1  # relu2: a b bounds its a^2
    terms = np.abs(grad.astype(np.float64)) * b * (1 + 2 * a)
    terms = np.concatenate([terms] * (1 + activation.gated), axis=1)
    same_but_for(expected.dh, actual.dh, digits, tiny + 2.0**-18 * terms)
    assert (expected.dprobs is None) == (actual.dprobs is None) == (not with_probs)
    if with_probs:
        assert np.isnan(expected.dprobs[0])
        assert np.isnan(actual.dprobs[0])
        far = np.abs(expected.dprobs[1:].astype(np.float64) - actual.dprobs[1:])
        assert (far <= 2.0**-18 * (np.abs(grad.astype(np.float64)) * a * b)[1:].sum(axis=1)).all()


@only_on_cpu
@pytest.mark.parametrize("activation", [*ON_CPU, Activation("swiglu", 0.1, 1.7, 0.3)])
def test_float64_has_constants_of_float64(backend, activation):
    """Clamp, alpha and offset are no float32 numbers; a constant to eight digits is noticed."""
    h, grad = RNG.standard_normal((3, activation.columns(40))), RNG.standard_normal((3, 40))
    probs = RNG.random(3)
    # both make the same dozen roundings but for exp and erfc, within 2^-50 of themselves; where s + slope
    # nearly cancels, that is of the terms, which are up to 10 here
    y, theirs = backend.both(fp8moe.swiglu, h, probs, activation=activation)
    np.testing.assert_allclose(theirs, y, rtol=2.0**-46, atol=2.0**-46)
    ours, theirs = backend.both(fp8moe.swiglu_backward, grad, h, probs, activation=activation)
    np.testing.assert_allclose(theirs.dh, ours.dh, rtol=2.0**-46, atol=2.0**-46)
    np.testing.assert_allclose(theirs.dprobs, ours.dprobs, rtol=2.0**-46, atol=2.0**-40)


@on_cuda
def test_tiny_values_under_large_probabilities(backend):
    """If the scale factor times the probability is not representable in float32, values are still exact,
    including zeros."""
    h, grad = np.zeros((3, 256), BF16), np.zeros((3, 128), BF16)
    h[:, :5], h[:, 128:133], grad[:, :5] = 1e-20, [1e-17, 3e-18, 0, -1e-17, 1e-30], 1e-18
    probs = np.array([4, 16, 1e3], np.float32)
    rows = backend.both(fp8moe.swiglu_quantize, h, probs)
    grads = backend.both(fp8moe.swiglu_quantize_backward, grad, h, probs)
    for expected, actual in (rows, [g.dh for g in grads]):
        assert same_bits(expected.scales, actual.scales)
        assert (expected.data != 0).any()
        # a sigmoid with relative error 2^-20 may change a code by one
        assert (np.abs(expected.data.astype(int) - actual.data) <= 1).all()


@only_on_cpu
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_gates_far_below_zero(backend, dtype):
    """Sigmoids from 2^-100 to the smallest subnormal number, whose products with b are usual numbers."""
    gates = -(60 + 44 * RNG.random((128, 1))).astype(dtype)  # one per row, which has a scale of its own
    b = (2.0**12 * (1 + RNG.random((128, 128)))).astype(dtype)
    h = np.concatenate([np.repeat(gates, 128, axis=1), b], axis=1)
    probs = np.full(128, 2.0**100, np.float32)
    unit = np.abs(gates.astype(np.float64)) * b.astype(np.float64) * 2.0**-149 * 2.0**100
    for in_one_pass in (False, True):
        results = backend.both(fp8moe.swiglu_quantize, h, probs, transposed=in_one_pass)
        expected, actual = (fp8moe.dequantize(q.rowwise if in_one_pass else q) for q in results)
        assert expected.all(axis=1).mean() > 0.9
        # the sigmoid is within 2^-20 or one subnormal unit, which may change a code by one, 2^-3 of its value
        assert (np.abs(actual - expected) <= 2.0**-3 * np.abs(expected) + 1.5 * unit).all()


@on_cuda
def test_mxfp8_of_products_beyond_float32(backend):
    """MXFP8 blocks of zeros, of values whose product with the probability is infinite, of NaN, and under
    infinite probabilities, which make NaN of zeros."""
    a = np.zeros((6, 128), np.float32)
    a[1, :4] = 1.5 * 2.0**126, -1.5 * 2.0**126, 1.25 * 2.0**123, 1.25 * 2.0**40
    a[2, :2], a[3], a[4, :33], a[5, 32:] = (np.nan, 1.0), a[1], 1, -2
    h = np.concatenate([np.full((6, 128), 64), a / 64], axis=1).astype(BF16)  # with sigmoid 1
    probs = np.array([3, 8, 1, 1, np.inf, -np.inf], np.float32)
    for options in ({}, {"columnwise": True}):
        options |= {"block": (1, 32)}
        expected, actual = backend.both(fp8moe.swiglu_quantize, h, probs, **options)
        assert_same(expected, actual)
        q = actual.rowwise if "columnwise" in options else actual
        assert q.scales[:4].tolist() == [[0] * 4, [254, 0, 0, 0], [255, 0, 0, 0], [245, 0, 0, 0]]
        assert q.scales[4:].tolist() == [[254, 255, 255, 255], [255, 254, 254, 254]]
        # 1.25 * 2^126 by 2^127 is 0.625; 1.5 * 2^126 by 2^118 is 384
        wanted = [[448, -448, 0.625, 0], [384, -384, 40, 0]]
        assert from_float8(q.data[[1, 3], :4], "e4m3").tolist() == wanted
        assert (q.data[2, :32] == 0x7F).all()
        assert not q.data[2, 32:].any()
    grads = backend.both(fp8moe.swiglu_quantize_backward, a.astype(BF16), h, probs, block=(1, 32))
    assert same_bits(grads[0].dh.scales, grads[1].dh.scales)


@only_on_cpu
def test_vector_accesses_where_aligned(backend, monkeypatch):
    launched = backend.launched(monkeypatch)
    for dtype, width in ((BF16, 128), (np.float16, 256), (BF16, 120), (np.float32, 128)):
        h = backend.upload(RNG.standard_normal((3, 2 * width)).astype(dtype))
        fp8moe.swiglu(h)
        fp8moe.swiglu_backward(backend.upload(np.ones((3, width), dtype)), h)
    assert launched == 2 * ["swiglu_rows", "swiglu_backward_rows"] + 2 * ["swiglu_forward", "swiglu_backward"]


@only_on_gpu
@given(
    st.sampled_from((1, 65, 300)),
    st.sampled_from(((1, 128), (1, 32))),
    st.sampled_from(ON_GPU),
    st.sampled_from(KINDS),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=25)
def test_any_shape_and_activation(backend, rows, block, activation, dtype, seed):
    rng = np.random.default_rng(seed)
    h = values(rng, (rows, activation.columns(128))).clip(-30, 30).astype(dtype)
    grad, probs = values(rng, (rows, 128)).clip(-30, 30).astype(dtype), rng.random(rows).astype(np.float32)
    # Two float64 exponentials may differ in their last bit, so about one float32 sigmoid in 10^8 may: one
    # code differs by one, and a scale if it is the largest value of its block. None was observed here.
    for function, arguments in (
        (fp8moe.swiglu_quantize, (h, probs)),
        (fp8moe.swiglu_quantize_backward, (grad, h, probs)),
    ):
        options = {"block": block, "columnwise": True, "activation": activation}
        expected, actual = backend.both(function, *arguments, **options)
        for a, b in zip(arrays_in(expected), arrays_in(actual), strict=True):
            if function is fp8moe.swiglu_quantize or a.ndim > 1:  # not dprobs
                assert (a != b).mean() <= 1e-4
    assert_close(backend.both(fp8moe.swiglu, h, probs, activation=activation), 2.0**-7)
    expected, actual = backend.both(fp8moe.swiglu_backward, grad, h, probs, activation=activation)
    assert_close((expected.dh, actual.dh), 2.0**-7)
    # as in `test_unquantised`, relative to the magnitudes of the summands, which may cancel; the float32
    # sigmoid is the reference's, and a product has a few roundings; without a gate a and b are both h
    a, b = np.abs(h.astype(np.float64))[:, :128], np.abs(h.astype(np.float64))[:, -128:]
    terms = (np.abs(grad.astype(np.float64)) * a * (b + 1)).sum(axis=1)
    bound = 2.0**-20 if dtype == np.float32 else 2.0**-18
    assert (np.abs(expected.dprobs.astype(np.float64) - actual.dprobs) <= bound * terms).all()


UNDERFLOW = 2.0**-110  # float32's sigmoid ends at 2^-149, and is multiplied by factors of up to 2^39 here


def swiglu_in_float64(h, probs, activation, grad=None):
    """(value, bound of the error of float32 with a sigmoid of relative error 2^-20.4), of y or of dh.

    The error of a product of n float32 factors is n - 1 roundings of 2^-24 plus the errors of its factors: at
    most 2^-20 here. The error of the sum in da is relative to the magnitudes of its two terms. In GELU the
    arguments of erfc and exp, -a / sqrt(2) and -a^2 / 2, have two roundings each, which the functions amplify
    by a^2.
    """
    h, width = h.astype(np.float64), activation.width(h.shape[1])
    if activation.kind == "relu2":  # products of exact factors
        a, p = np.maximum(h, 0), probs.astype(np.float64)[:, None]
        y = a * a * p if grad is None else grad.astype(np.float64) * p * 2 * a
        return y, np.abs(y) * 2.0**-20 + UNDERFLOW
    a, b = h[:, :width], h[:, width:] if activation.gated else np.ones_like(h)
    limit = np.inf if activation.clamp is None else activation.clamp
    alpha, by_tanh = activation.alpha, activation.kind in ("geglu_tanh", "gelu_tanh")
    by_erf = activation.kind in ("geglu", "gelu")
    free_a, free_b = a <= limit, np.abs(b) <= limit
    a, b = np.minimum(a, limit), np.clip(b, -limit, limit) + activation.linear_offset
    line = 2 * np.sqrt(2 / np.pi)
    z = a * (line + line * 0.044715 * a**2) if by_tanh else alpha * a
    with np.errstate(over="ignore"):  # overflow to infinity, for which s is 0
        s = 1 / (1 + np.exp(-z))
    if by_erf:
        s = np.array([math.erfc(-v * math.sqrt(0.5)) / 2 for v in a.ravel()]).reshape(a.shape)
    rounding = 2.0**-20 + (a**2 * 2.0**-23 if by_erf else 0)
    p = probs.astype(np.float64)[:, None]
    if grad is None:
        y = a * s * b * p
        return y, np.abs(y) * rounding + UNDERFLOW
    scaled = grad.astype(np.float64) * p
    by = line + 3 * line * 0.044715 * a**2 if by_tanh else alpha
    inner = by * a * s * (1 - s)
    if by_erf:
        inner = a * np.exp(-(a**2) / 2) / np.sqrt(2 * np.pi)
    # 1 - s cancels: its error is that of s, however small the difference
    slack = s * rounding + np.abs(by * a * s) * (np.abs(1 - s) + s) * rounding
    dh, error = free_a * scaled * b * (s + inner), free_a * np.abs(scaled * b) * slack
    if activation.gated:
        of_b = free_b * scaled * a * s
        dh = np.concatenate([dh, of_b], axis=1)
        error = np.concatenate([error, np.abs(of_b) * rounding], axis=1)
    return dh, error + np.abs(dh) * 2.0**-20 + UNDERFLOW


def assert_rounded(q, exact, error):
    """Every scale is that of its block's largest magnitude, every code the nearest one, up to ``error``."""
    (_, width), fmt = q.block, q.fmt
    top = {"e4m3": 448.0, "e5m2": 57344.0}[fmt]
    blocks = exact.reshape(len(exact), -1, width)
    slack = error.reshape(blocks.shape)

    of_zeros, lowest = (-127, -127) if width == 32 else (0, -126)

    def exponent(amax):
        with np.errstate(divide="ignore"):
            e = -np.floor(np.log2(top / amax))
        return np.where(amax == 0, of_zeros, np.maximum(e, lowest))

    least = np.maximum(np.abs(blocks) - slack, 0).max(axis=2)
    high = exponent((np.abs(blocks) + slack).max(axis=2))
    got = q.scales.astype(np.float64) - 127 if width == 32 else np.log2(q.scales.astype(np.float64))
    vanished = (least == 0) & (got == of_zeros)  # a block that may be all zeros may have their scale
    assert (vanished | (got <= high) & ((got >= exponent(least)) | (least == 0))).all()
    scale = np.repeat(np.exp2(got), width, axis=1)
    finite = np.unique(from_float8(np.arange(256, dtype=np.uint8), fmt))
    finite = finite[np.isfinite(finite)]
    edges = np.concatenate(([-np.inf], (finite[1:] + finite[:-1]) / 2, [np.inf]))
    at = np.searchsorted(finite, from_float8(q.data, fmt))
    value, slack = exact / scale, error / scale
    assert (value + slack >= edges[at]).all()
    assert (value - slack <= edges[at + 1]).all()


def on_device(backend, options, function, *arguments, **keywords):
    uploaded = {name: backend.upload(value) for name, value in keywords.items()}
    return backend.download(function(*map(backend.upload, arguments), **uploaded, **options))


@only_on_gpu
@given(
    st.sampled_from((1, 33, 300)),
    st.sampled_from((128, 640, 1408, 4224)),
    st.sampled_from(((1, 128), (1, 32))),
    st.sampled_from(("e4m3", "e5m2")),
    st.sampled_from(ON_GPU),
    st.sampled_from(KINDS),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=30)
def test_quantised_in_one_pass(backend, rows, width, block, fmt, activation, dtype, seed):
    rng = np.random.default_rng(seed)
    # seven standard deviations of 4: from -28 to 28, and a few values beyond, where the exponential overflows
    h = (rng.standard_normal((rows, activation.columns(width))) * 4).astype(dtype)
    h[rng.random(h.shape) < 0.01] = -75
    grad, probs = rng.standard_normal((rows, width)).astype(dtype), rng.random(rows).astype(np.float32)
    options = {"fmt": fmt, "block": block, "activation": activation}
    run = functools.partial(on_device, backend, options)
    q = run(fp8moe.swiglu_quantize, h, probs)
    assert_rounded(q, *swiglu_in_float64(h, probs, activation=activation))
    got = run(fp8moe.swiglu_quantize_backward, grad, h, probs)
    assert_rounded(got.dh, *swiglu_in_float64(h, probs, grad=grad, activation=activation))
    y, _ = swiglu_in_float64(h, np.ones(rows), activation=activation)
    terms = grad.astype(np.float64) * y
    # eight products at a time in float32
    bound = np.abs(terms).sum(axis=1) * 2.0**-19
    assert (np.abs(got.dprobs - terms.sum(axis=1)) <= bound).all()
    whole = run(fp8moe.swiglu_quantize, h, probs, columnwise=True)
    assert_same(whole.rowwise, q)
    y, error = swiglu_in_float64(h, probs, activation=activation)
    for lo in range(0, rows, block[1]):
        # a column block, as rows of one block each
        strip, slack = (np.zeros((width, block[1])) for _ in range(2))
        here = slice(lo, min(lo + block[1], rows))
        strip[:, : here.stop - lo], slack[:, : here.stop - lo] = y[here].T, error[here].T
        codes = np.zeros((width, block[1]), np.uint8)
        codes[:, : here.stop - lo] = whole.columnwise.data[:, here]
        scales = np.ascontiguousarray(whole.columnwise.scales[lo // block[1]][:, None])
        assert_rounded(QuantTensor(codes, scales, fmt, block), strip, slack)
    # rows after the last offset are zeros
    offsets = np.array([rows // 5, rows // 2], np.int32)
    q = run(fp8moe.swiglu_quantize, h, probs, expert_offsets=offsets)
    assert not q.data[rows // 2 :].any()
    both_orientations = run(fp8moe.swiglu_quantize, h, probs, columnwise=True, expert_offsets=offsets)
    assert_same(both_orientations.rowwise, q)


@only_on_gpu
def test_nan_and_far_values(backend):
    h = np.zeros((2, 256), np.float32)
    h[0, :4], h[0, 128:132] = [-100, -88, 90, np.nan], 1
    h[1, :3], h[1, 128:131] = [-1e4, 1e4, np.inf], 1
    expected, actual = backend.both(fp8moe.swiglu_quantize, h)
    assert_same(expected, actual)
