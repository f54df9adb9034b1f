"""The layer for permuted rows, compared bitwise with the layer that permutes itself, and with a float64 torch
implementation."""

import warnings

import cuda_on_cpu
import numpy as np
import pytest
import torch
from cases import BF16, assert_same, generator, layer_inputs, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import torch_swiglu

import fp8moe
from fp8moe import Activation
from fp8moe.activation import SWIGLU
from fp8moe.adapters.torch.functional import moe_experts, moe_experts_permuted
from fp8moe.adapters.torch.operands import quantize_fp8_weights
from fp8moe.layer.permuted_rows import place_rows, unpad_rows
from fp8moe.layer.recipes import RECIPES
from fp8moe.records import ArraySpec
from fp8moe.runtime import dispatch
from fp8moe.runtime.record_trees import arrays_in, map_arrays
from fp8moe.runtime.recording import GivenMemory

RNG = generator()


def permuted(inputs, dy, align_size, counts_padding, tail=0):
    """The layer's inputs as a dispatcher permutes them, and the inverse for its results; ``tail`` rows of NaN
    follow."""
    x, experts = inputs["x"], len(inputs["w13"])
    plan = fp8moe.plan_topk(inputs["topk_ids"], experts, align_size=align_size, num_out_tokens="exact")
    moved = fp8moe.permute(x, plan, inputs["topk_probs"])
    dys, _ = fp8moe.unpermute_backward(dy, plan)
    behind = np.full((tail, x.shape[1]), np.nan, x.dtype)
    rows, dys = (np.concatenate([a, behind]) for a in (moved.data, dys))
    probs = np.concatenate([moved.probs, np.full(tail, np.nan, moved.probs.dtype)])
    counts = plan.padded_tokens_per_expert if counts_padding else plan.tokens_per_expert
    return plan, rows, counts, probs, dys


def whole(inputs, dy, **options):
    y, saved = fp8moe.moe_forward(**inputs, **options)
    return (y, *arrays_in(fp8moe.moe_backward(saved, dy)))


def in_halves(saved, dy):
    """Gradients by `moe_backward_input` and `moe_backward_weight`."""
    of_inputs, operands = fp8moe.moe_backward_input(saved, dy)
    return arrays_in(of_inputs) + arrays_in(fp8moe.moe_backward_weight(operands))


def around(plan, results):
    """Results for permuted rows, in the order of the tokens."""
    y, dx, dprobs, *dw = results
    rows = plan.num_out_tokens
    for tail in (y[rows:], dx[rows:], dprobs[rows:]):
        assert not np.asarray(tail, np.float64).any()
    y = fp8moe.unpermute(y[:rows].copy(), plan)
    dx, dprobs = fp8moe.permute_backward(dx[:rows].copy(), plan, dprobs[:rows].copy())
    return (y, dx, dprobs, *dw)


@given(
    st.sampled_from([*RECIPES]),
    st.sampled_from((None, "moe_expert")),
    st.sampled_from(((1, 0), (1, 5), (128, 0), (128, 128), (256, 256))),
    st.booleans(),
    st.sampled_from((np.int32, np.int64)),
    st.integers(0, 2**32 - 1),
    st.sampled_from((SWIGLU, Activation("geglu", clamp=0.5, linear_offset=1.0))),
)
@settings(max_examples=25)
def test_permuted_layer_equals_the_layer(recipe, recompute, layout, padding, kind, seed, activation):
    """Padded by the layer or by the caller, with counts that include the padding or not; the tail has no
    expert."""
    align_size, tail = layout
    tokens = int(np.random.default_rng(seed).integers(0, 60))
    # a BLAS sums in another order for other numbers of rows; float64 shows that this is the only difference
    other_order = recipe == "bf16" and align_size > 1
    dtype = np.dtype(np.float64) if other_order else BF16
    inputs, dy = layer_inputs(seed, tokens, experts=5, dropped=0.4, dtype=dtype)
    inputs["topk_ids"][inputs["topk_ids"] == 3] = -1  # an expert without rows
    options = {"recipe": recipe, "recompute": recompute, "activation": activation}
    plan, rows, counts, probs, dys = permuted(inputs, dy, align_size, padding, tail)
    w13, w2 = inputs["w13"], inputs["w2"]
    y, saved = fp8moe.moe_forward_permuted(
        rows, w13, w2, counts.astype(kind), probs, align_size=align_size, **options
    )
    grads = arrays_in(fp8moe.moe_backward(saved, dys))
    for a, b in zip(in_halves(saved, dys), grads, strict=True):
        assert same_bits(a, b)
    actual = around(plan, (y, *grads))
    for a, b in zip(actual, whole(inputs, dy, **options), strict=True):
        if other_order:
            np.testing.assert_allclose(a, b, rtol=1e-6 if a.dtype == np.float32 else 1e-11, atol=1e-11)
        else:
            assert same_bits(a, b)


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise"])
@pytest.mark.parametrize("align_size", [1, 128])
def test_rows_in_fp8(recipe, align_size):
    """FP8 rows are not quantised again, in either direction."""
    inputs, dy = layer_inputs(3)
    _, rows, counts, probs, dys = permuted(inputs, dy, align_size, False)
    weights = inputs["w13"], inputs["w2"]
    options = {"recipe": recipe, "align_size": align_size}
    results, casts = [], []
    for given_rows, given_dy in ((rows, dys), (fp8moe.quantize(rows), fp8moe.quantize(dys))):
        with fp8moe.trace() as counted:
            y, saved = fp8moe.moe_forward_permuted(given_rows, *weights, counts, probs, **options)
            results.append((y, *arrays_in(fp8moe.moe_backward(saved, given_dy))))
        casts.append(counted.casts)
    for a, b in zip(*results, strict=True):
        assert same_bits(a, b)
    assert casts[0] - casts[1] == 2


def test_codes_whose_scales_are_no_powers_of_two_are_refused_before_any_work():
    """The transposes for the weight gradients need powers of two; an accumulator must not be half
    written."""
    x, dy = (RNG.standard_normal((256, 128)).astype(BF16) for _ in range(2))
    w13, w2 = (RNG.standard_normal((2, n, 128)).astype(BF16) for n in (256, 128))
    counts, probs = np.full(2, 128, np.int32), np.ones(256, np.float32)
    options = {"align_size": 128, "recipe": "fp8_flow"}
    codes = fp8moe.quantize(x, pow2=False)
    with pytest.raises(ValueError, match=r"x\.scales: got .* wanted powers of two"):
        fp8moe.moe_forward_permuted(codes, w13, w2, counts, probs, **options)
    for blockwise in ({"recipe": "fp8_blockwise"}, {"gradients": ("dx", "dw2")}):
        fp8moe.moe_forward_permuted(codes, w13, w2, counts, probs, **{**options, **blockwise})
    _, saved = fp8moe.moe_forward_permuted(x, w13, w2, counts, probs, **options)
    dw13, dw2 = np.zeros((2, 256, 128), np.float32), np.zeros((2, 128, 128), np.float32)
    codes = fp8moe.quantize(dy, pow2=False)
    for function, sums in (
        (fp8moe.moe_backward, {"dw13": dw13, "dw2": dw2}),
        (fp8moe.moe_backward_input, {}),
    ):
        with pytest.raises(ValueError, match=r"dy\.scales: got .* wanted powers of two"):
            function(saved, codes, **sums)
    assert not dw13.any()
    assert not dw2.any()
    fp8moe.moe_backward(saved, codes, gradients=("dx", "dw13"))


def test_aligned_rows_are_not_copied():
    inputs, dy = layer_inputs(4)
    _, rows, counts, probs, dys = permuted(inputs, dy, 128, False)
    q, of_dy = fp8moe.quantize(rows), fp8moe.quantize(dys)
    weights = inputs["w13"], inputs["w2"]
    moving = {"permute", "unpermute", "permute_backward", "pad", "unpad", "sort_chunks_backward"}
    with fp8moe.trace() as counted:
        _, saved = fp8moe.moe_forward_permuted(q, *weights, counts, probs, recipe="fp8_flow", align_size=128)
        fp8moe.moe_backward(saved, of_dy)
    assert np.shares_memory(saved.x.data, q.data)
    assert np.shares_memory(saved.probs, probs)
    assert not moving & set(counted.launches)
    assert counted.launches["sort_chunks"] == 1  # without data: only the experts' offsets


def exact(x, w13, w2, counts, probs, dy):
    """Expert by expert in float64."""
    leaves = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in (x, probs, w13, w2)]
    x, probs, w13, w2 = leaves
    parts = zip(x.split(counts), probs.split(counts), w13, w2, strict=True)
    y = torch.cat([torch_swiglu(rows @ a.T, p, SWIGLU) @ b.T for rows, p, a, b in parts])
    y.backward(torch.tensor(dy.astype(np.float64)))
    return [y.detach().numpy(), *(t.grad.numpy() for t in leaves)]


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_float64_equals_torch_autograd(recompute):
    counts = [3, 0, 130, 1]
    rows = sum(counts)
    x, dy = RNG.standard_normal((2, rows, 12))
    w13, w2, probs = RNG.standard_normal((4, 14, 12)), RNG.standard_normal((4, 12, 7)), RNG.random(rows)
    y, saved = fp8moe.moe_forward_permuted(
        x, w13, w2, np.array(counts), probs, recipe="bf16", recompute=recompute
    )
    g = fp8moe.moe_backward(saved, dy, dtype="float64")
    actual = y, g.dx, g.dprobs, g.dw13, g.dw2
    for a, b in zip(actual, exact(x, w13, w2, counts, probs, dy), strict=True):
        # three nested sums of at most 130 terms; terms that cancel are at most ten times the largest sum
        assert np.abs(a - b).max() <= 10 * 3 * 130 * 2.0**-53 * np.abs(b).max()


@pytest.mark.parametrize("recipe", RECIPES)
def test_precision(recipe):
    counts = [40, 0, 17, 100]
    rows = sum(counts)
    x, dy = RNG.standard_normal((2, rows, 128)).astype(BF16)
    w13 = (RNG.standard_normal((4, 256, 128)) / 128**0.5).astype(BF16)
    w2 = (RNG.standard_normal((4, 128, 128)) / 128**0.5).astype(BF16)
    probs = RNG.random(rows).astype(np.float32)
    y, saved = fp8moe.moe_forward_permuted(x, w13, w2, np.array(counts), probs, recipe=recipe)
    g = fp8moe.moe_backward(saved, dy)
    actual = y, g.dx, g.dprobs, g.dw13, g.dw2
    # the mean square error of a rounding to p significant bits is at most 2^-p / sqrt(3), e4m3 2^-4 and
    # bfloat16 2^-8; the longest chain of factors, dw13, has six roundings of operands, each of which may
    # count twice in SwiGLU's product
    limit = 2 * 6**0.5 * (2.0**-8 if recipe == "bf16" else 2.0**-4) / 3**0.5
    for a, b in zip(actual, exact(x, w13, w2, counts, probs, dy), strict=True):
        assert np.linalg.norm(a.astype(np.float64) - b) <= limit * np.linalg.norm(b)


def test_requested_and_accumulated_gradients():
    inputs, dy = layer_inputs(5)
    _, rows, counts, probs, dys = permuted(inputs, dy, 1, False)
    weights = inputs["w13"], inputs["w2"]
    _, saved = fp8moe.moe_forward_permuted(rows, *weights, counts, probs, recipe="fp8_flow")
    every = fp8moe.moe_backward(saved, dys)
    before = [RNG.standard_normal(w.shape).astype(np.float32) for w in weights]
    dw13, dw2 = (b.copy() for b in before)
    added = fp8moe.moe_backward(saved, dys, dw13=dw13, dw2=dw2)
    assert added.dw13 is dw13
    for name, start in zip(("dw13", "dw2"), before, strict=True):
        np.testing.assert_array_equal(getattr(added, name), start + getattr(every, name))
    for names in (("dx", "dprobs"), ("dw13",), ("dw2",), ()):
        _, kept = fp8moe.moe_forward_permuted(
            rows, *weights, counts, probs, recipe="fp8_flow", gradients=names
        )
        some = fp8moe.moe_backward(kept, dys, gradients=names)
        for name in ("dx", "dprobs", "dw13", "dw2"):
            actual = getattr(some, name)
            assert actual is None if name not in names else same_bits(actual, getattr(every, name))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("align_size", [1, 128])
def test_no_values_are_read(recipe, align_size):
    """A dry run with shapes only raises for any read of values."""
    inputs, dy = layer_inputs(6)
    _, rows, counts, probs, dys = permuted(inputs, dy, align_size, False)
    given_arrays = [rows, inputs["w13"], inputs["w2"], counts, probs, dys]

    def step(arrays):
        *forward, dy = arrays
        y, saved = fp8moe.moe_forward_permuted(*forward, recipe=recipe, align_size=align_size)
        return y, fp8moe.moe_backward(saved, dy)

    layout = GivenMemory(step, [ArraySpec(a.shape, a.dtype) for a in given_arrays])
    shapes = [layout.outputs[n].shape for n in layout.leaves]
    assert shapes == [a.shape for a in arrays_in(step(given_arrays))]


@pytest.mark.skipif(not cuda_on_cpu.available, reason="needs g++")
@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize(("given_align", "wanted"), [(1, 128), (1, 1), (128, 128), (256, 128)])
def test_place_rows_by_the_cuda_backend(monkeypatch, given_align, wanted, kind):
    """Permutation of rows, probabilities and offsets by the CUDA backend, and its inverse."""
    pytest.importorskip("cupy")
    counts = np.array([3, 0, 130, 1], kind)
    rows = int((-(-counts // given_align) * given_align).sum()) + given_align
    q = fp8moe.quantize(RNG.standard_normal((rows, 256)).astype(BF16))
    probs = np.zeros(rows, np.float32) if given_align > 1 else RNG.random(rows).astype(np.float32)
    back = RNG.standard_normal((640 if (given_align, wanted) == (1, 128) else rows, 256)).astype(BF16)
    back_probs = RNG.random(len(back)).astype(np.float32)

    @dispatch.operation
    def place(x, counts, probs):
        return place_rows(x, counts, probs, given_align, wanted)

    @dispatch.operation
    def unplace(x, probs, placed):
        return unpad_rows(x, placed, probs)

    expected = place(q, counts, probs)
    assert expected[2].num_out_tokens == len(back)
    expected_back = unplace(back, back_probs, expected[2])
    cuda_on_cpu.install(monkeypatch)
    up, down = cuda_on_cpu.upload, cuda_on_cpu.download
    actual = place(up(q), up(counts), up(probs))
    assert_same(expected, down(actual))
    assert_same(expected_back, down(unplace(up(back), up(back_probs), actual[2])))


@pytest.mark.skipif(not cuda_on_cpu.available, reason="needs g++")
@pytest.mark.parametrize("permuted_rows", [False, True])
def test_backend_by_the_cuda_backend(monkeypatch, permuted_rows):
    """The backend computes all products of both directions; one that the device does not support raises
    before any launch."""
    grouped_gemm = pytest.importorskip("fp8moe.kernels_cuda.grouped_gemm")
    inputs, dy = layer_inputs(6, 9, experts=3)
    if permuted_rows:
        _, rows, counts, probs, dy = permuted(inputs, dy, 1, False)
        inputs = {"x": rows, "tokens_per_expert": counts, "probs": probs} | {
            n: inputs[n] for n in ("w13", "w2")
        }
    forward = fp8moe.moe_forward_permuted if permuted_rows else fp8moe.moe_forward
    inputs, dy = {name: cuda_on_cpu.upload(a) for name, a in inputs.items()}, cuda_on_cpu.upload(dy)
    choose, chosen = grouped_gemm.choose, []
    monkeypatch.setattr(grouped_gemm, "choose", lambda *of: chosen.append(choose(*of)) or chosen[-1])
    if permuted_rows:  # the plan's kernels run only in Numba's simulator
        with monkeypatch.context() as patch:
            cuda_on_cpu.install(patch)
            _, saved = forward(**inputs, recipe="bf16", backend="plain")
            chosen.clear()
            fp8moe.moe_backward(saved, dy)
        assert [c.backend for c in chosen] == ["plain"] * 4
    cuda_on_cpu.install(monkeypatch, architecture="sm_80")
    for recipe in RECIPES:
        with fp8moe.trace() as counted, pytest.raises(ValueError, match=r"backend: got 'wgmma'.*sm_80, not"):
            forward(**inputs, recipe=recipe, backend="wgmma")
        assert not counted.launches


def test_validation_errors():
    inputs, dy = layer_inputs(8)
    _, rows, counts, probs, _ = permuted(inputs, dy, 128, False)
    w13, w2 = inputs["w13"], inputs["w2"]

    def call(rows=rows, counts=counts, probs=probs, recipe="fp8_flow", **options):
        return fp8moe.moe_forward_permuted(rows, w13, w2, counts, probs, recipe=recipe, **options)

    with pytest.raises(TypeError, match="tokens_per_expert: got dtype float32"):
        call(counts=counts.astype(np.float32))
    with pytest.raises(ValueError, match="tokens_per_expert: got shape"):
        call(counts=counts[:-1])
    with pytest.raises(ValueError, match="probs: got shape"):
        call(probs=probs[:-1])
    with pytest.raises(ValueError, match="backend: got 'cutlass'"):
        call(backend="cutlass")
    with pytest.raises(ValueError, match="backend: got 'mma' for arrays on the CPU"):
        call(backend="mma")
    with pytest.raises(TypeError, match=r'x: got a QuantTensor with recipe "bf16".*dequantize'):
        call(rows=fp8moe.quantize(rows), recipe="bf16")
    with pytest.raises(TypeError, match=r"x.block: got \(1, 32\)"):
        call(rows=fp8moe.quantize(rows, block=(1, 32)))
    with pytest.raises(ValueError, match=r"align_size: got 16; wanted 1.*or a multiple of 128"):
        call(align_size=16)
    with pytest.raises(ValueError, match="x: got 129 rows with align_size=128"):
        call(rows=rows[:129].copy(), probs=probs[:129].copy(), align_size=128)
    with pytest.raises(ValueError, match="tokens_per_expert: got sizes that sum to"):
        call(counts=counts + len(rows))
    with pytest.raises(ValueError, match=r"tokens_per_expert: got \d+ rows, each expert's padded to 128"):
        call(rows=rows[:-128].copy(), probs=probs[:-128].copy(), align_size=128)
    dirty = probs.copy()
    dirty[counts[0]] = 0.5
    with pytest.raises(ValueError, match="probs: got a non-zero value in the padding of expert 0"):
        call(probs=dirty, align_size=128)
    _, saved = call(recipe="bf16")
    with pytest.raises(TypeError, match='dy: got a QuantTensor with recipe "bf16"'):
        fp8moe.moe_backward(saved, fp8moe.quantize(rows))
    with pytest.raises(ValueError, match="dy: got shape"):
        fp8moe.moe_backward(saved, rows[1:].copy())


# ---------------------------------------------------------------- torch


def torch_problem(width=128, hidden=128):
    counts = torch.tensor([30, 0, 5, 64])
    n = int(counts.sum()) + 3  # rows without an expert at the end
    x, dy = torch.randn(2, n, hidden).bfloat16()
    w13, w2 = torch.randn(4, 2 * width, hidden) / 12, torch.randn(4, hidden, width) / 12
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor([*counts.tolist(), 3]))
    return x, w13, w2, counts, ids[:, None], torch.rand(n), dy


def results(call, leaves, dy):
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("recompute", "compiled"), [(None, False), ("moe_expert", False), ("moe_expert", True)]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_function_equals_moe_experts(recipe, recompute, compiled):
    """Like `moe_experts` with one id per row: gradients, halves, unaligned widths and biases."""
    x, w13, w2, counts, ids, probs, dy = torch_problem(width=72)
    dtype = torch.bfloat16 if recipe == "bf16" else torch.float32
    leaves = [x, w13.to(dtype), w2.to(dtype), probs, torch.randn(4, 144).to(dtype), torch.randn(4, 128)]
    options = {"recipe": recipe, "recompute": recompute}

    def actual(x, w13, w2, probs, bias13, bias2):
        biases = {"bias13": bias13, "bias2": bias2}
        return moe_experts_permuted(x, w13.chunk(2, 1), w2, counts, probs, **biases, **options)

    def wanted(x, w13, w2, probs, bias13, bias2):
        biases = {"bias13": bias13, "bias2": bias2}
        return moe_experts(x, w13.chunk(2, 1), w2, ids, probs[:, None], **biases, **options)

    call = torch.compile(actual, backend="aot_eager", fullgraph=True) if compiled else actual
    for a, b in zip(results(call, leaves, dy), results(wanted, leaves, dy), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_after_the_last_expert_affect_no_gradient(recipe):
    """NaN in x and dy there reaches no gradient, that of bias2 included."""
    experts, hidden, ffn = 3, 16, 24
    x, dy = torch.randn(10, hidden), torch.randn(10, hidden)
    shapes = (2 * ffn, hidden), (hidden, ffn), (2 * ffn,), (hidden,)
    leaves = [torch.randn(experts, *shape).requires_grad_() for shape in shapes]
    leaves += [torch.rand(10).requires_grad_()]
    counts = torch.tensor([2, 0, 5])

    def gradients(x, dy):
        x = x.clone().requires_grad_()
        w13, w2, bias13, bias2, probs = leaves
        options = {"recipe": recipe, "bias13": bias13, "bias2": bias2}
        y = moe_experts_permuted(x, w13, w2, counts, probs, **options)
        return torch.autograd.grad(y, [x, *leaves], dy)

    wanted = gradients(x, dy)
    x[7:] = dy[7:] = float("nan")
    for actual, plain in zip(gradients(x, dy), wanted, strict=True):
        assert torch.equal(actual, plain)


@pytest.mark.parametrize("recipe", RECIPES)
def test_counts_changed_before_the_backward(recipe):
    """Torch's product keeps its own offsets; the library's saves the counts, and raises."""
    x, counts = torch.randn(7, 16, requires_grad=True), torch.tensor([2, 0, 5], dtype=torch.int32)
    w13, w2 = torch.randn(3, 48, 16), torch.randn(3, 16, 24)
    arguments = {"recipe": recipe, "align_size": 1}
    (wanted,) = torch.autograd.grad(
        moe_experts_permuted(x, w13, w2, counts.clone(), torch.ones(7), **arguments).sum(), x
    )
    y = moe_experts_permuted(x, w13, w2, counts, torch.ones(7), **arguments)
    counts.zero_()
    if recipe == "bf16":
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], wanted)
        return
    with pytest.raises(RuntimeError, match="got ids or counts that were changed after the forward"):
        y.sum().backward()


def test_main_grad():
    x, w13, w2, counts, _, probs, dy = torch_problem()
    weights = [torch.nn.Parameter(w) for w in (w13, w2)]
    wanted = results(lambda *w: moe_experts_permuted(x, *w, counts, probs), weights, dy)[1:]
    for w in weights:
        w.main_grad = torch.ones_like(w)
    for _ in range(2):
        moe_experts_permuted(x, *weights, counts, probs).backward(dy)
    for w, dw in zip(weights, wanted, strict=True):
        assert w.grad is None
        assert torch.equal(w.main_grad, 1 + dw + dw)


def test_weights_quantised_once():
    x, w13, w2, counts, _, probs, _ = torch_problem()
    copies = quantize_fp8_weights(w13, w2)
    actual = moe_experts_permuted(x, w13, w2, counts, probs, fp8_weights=copies)
    assert torch.equal(actual, moe_experts_permuted(x, w13, w2, counts, probs))


def test_torch_validation_errors():
    x, w13, w2, counts, _, probs, _ = torch_problem()
    with pytest.raises(TypeError, match="x: got a QuantTensor, which has no gradient in torch"):
        moe_experts_permuted(fp8moe.quantize(x), w13, w2, counts, probs)
    with pytest.raises(ValueError, match="align_size"):
        moe_experts_permuted(x, w13, w2, counts, probs, align_size=0)
    with pytest.raises(TypeError, match="probs"):
        moe_experts_permuted(x, w13, w2, counts, probs.long())


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("align_size", [1, 128])
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_cuda(recipe, align_size, recompute):
    """Bitwise equal to the layer that permutes itself, also by the recording, without synchronisation.
    Halves of the backward give the same results as the whole."""
    inputs, dy = layer_inputs(9, tokens=200, hidden=256, ffn=128, dropped=0.2)
    plan, rows, counts, probs, dys = permuted(inputs, dy, align_size, False)
    put = {
        n: torch.from_numpy(a.view(np.int16)).cuda().view(torch.bfloat16)
        if a.dtype == BF16
        else torch.from_numpy(a).cuda()
        for n, a in {**inputs, "dy": dy, "rows": rows, "dys": dys}.items()
    }
    counts, probs = torch.from_numpy(counts).cuda(), torch.from_numpy(probs).cuda()
    options = {"recipe": recipe, "recompute": recompute}
    y, saved = fp8moe.moe_forward(*(put[n] for n in inputs), **options)
    wanted = y, *arrays_in(fp8moe.moe_backward(saved, put["dy"]))
    for _ in range(2):
        for a, b in zip(in_halves(saved, put["dy"]), wanted[1:], strict=True):
            assert torch.equal(a, b)
    place = map_arrays(lambda a: torch.from_numpy(a).cuda(), plan)
    torch.cuda.synchronize()
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            y, saved = fp8moe.moe_forward_permuted(
                put["rows"], put["w13"], put["w2"], counts, probs, align_size=align_size, **options
            )
            g = fp8moe.moe_backward(saved, put["dys"])
            halves = in_halves(saved, put["dys"])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        actual = (
            fp8moe.unpermute(y, place),
            *fp8moe.permute_backward(g.dx, place, g.dprobs),
            g.dw13,
            g.dw2,
        )
        for a, b in zip((*actual, *halves), (*wanted, *arrays_in(g)), strict=True):
            assert torch.equal(a, b)
