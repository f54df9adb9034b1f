"""`moe_experts` itself: weights as pairs, any width, biases, FP8 weights quantised by the caller."""

import functools
import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import FP8_NOISE
from torch.nn.functional import pad

import fp8moe
import fp8moe.torch
from fp8moe import Activation
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch.functional import moe_experts, moe_experts_permuted
from fp8moe.adapters.torch.layer import FP8FlowMoE
from fp8moe.adapters.torch.operands import quantize_fp8_weights
from fp8moe.layer import checks as layer_checks
from fp8moe.layer import moe
from fp8moe.layer.saved import Saved
from fp8moe.runtime import dispatch

E, H, F, T, K = 4, 96, 72, 37, 2
LINEAR = torch.nn.Linear(H, F)
RECIPES = ("bf16", "fp8_blockwise", "fp8_flow")


def problem(width=F):
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    ids[torch.rand(T, K) < 0.1] = -1
    x, dy = (torch.randn(T, H, dtype=torch.bfloat16) for _ in range(2))
    weights = torch.randn(E, width, H) / 10, torch.randn(E, width, H) / 10, torch.randn(E, H, width) / 8
    return x, *weights, ids, torch.rand(T, K), dy


def results(call, leaves, dy):
    """The output and the gradients of all leaves."""
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_same_sums(actual, true):
    """Compares sums of the same products in float32, whose order in a BLAS depends on their number, rounded
    once."""
    bound = 2.0**-8 if true.dtype == torch.bfloat16 else 2.0**-16
    assert (actual - true).double().norm() <= bound * true.double().norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_other_leading_dimensions_raise(recipe):
    """Ids and probabilities of [S, B] for tokens of [B, S] would be those of other tokens."""
    x, w1, w3, w2, ids, probs, _ = problem()
    x, ids, probs = (torch.stack([t, t]) for t in (x, ids, probs))
    message = rf"got shape \[{T}, 2, {K}\]; wanted \[2, {T}, k\], for x \[2, {T}, {H}\]"
    with pytest.raises(ValueError, match=f"topk_ids: {message}"):
        moe_experts(x, (w1, w3), w2, ids.transpose(0, 1), probs.transpose(0, 1), recipe=recipe)
    with pytest.raises(ValueError, match=f"topk_probs: {message}"):
        moe_experts(x, (w1, w3), w2, ids, probs.transpose(0, 1), recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_pairs_of_any_width(recipe):
    """Equal to w13 in one tensor padded with zeros to a multiple of 128, which change no product."""
    x, w1, w3, w2, ids, probs, dy = problem()
    dtype = torch.bfloat16 if recipe == "bf16" else torch.float32
    leaves = [x, *(w.to(dtype) for w in (w1, w3, w2)), probs]
    missing = 128 - F

    def apart(x, w1, w3, w2, probs):
        return moe_experts(x, (w1, w3), w2, ids, probs, recipe=recipe)

    def whole(x, w1, w3, w2, probs):
        w13 = torch.cat([pad(w, (0, 0, 0, missing)) for w in (w1, w3)], dim=1)
        return fp8moe.torch.moe_experts(x, w13, pad(w2, (0, missing)), ids, probs, recipe=recipe)

    def strided(x, w1, w3, w2, probs):
        w13 = torch.cat((w1, w3), dim=1).transpose(1, 2).contiguous().transpose(1, 2)
        return moe_experts(x[None], w13, w2, ids[None], probs[None], recipe=recipe)[0]

    wanted = results(whole, leaves, dy)
    for call in (apart, strided):
        for actual, true in zip(results(call, leaves, dy), wanted, strict=True):
            assert_same_sums(actual, true)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("apart", [True, False])
def test_padded_weights_are_not_concatenated_or_copied(monkeypatch, mode, apart):
    """With fp8_flow and a bias; the gradients added to ``main_grad`` equal those that are returned without
    it."""
    x, w1, w3, w2, ids, probs, dy = problem()
    weights = [*([w1, w3, w2] if apart else [torch.cat((w1, w3), dim=1), w2]), torch.randn(E, 2 * F)]

    def call(x, *weights):
        *w13, w2, bias13 = weights
        return moe_experts(x, tuple(w13) if apart else w13[0], w2, ids, probs, bias13=bias13)

    wanted = results(call, [x, *weights], dy)
    torch.compiler.reset()
    if mode == "compiled":
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    for actual, true in zip(results(call, [x, *weights], dy), wanted, strict=True):
        assert torch.equal(actual, true)
    *leaves, bias13 = (torch.nn.Parameter(w.clone()) for w in weights)
    for w in leaves:
        w.main_grad = torch.ones_like(w)
    if apart:
        for module, name in ((torch, "cat"), (torch.nn.functional, "pad")):
            monkeypatch.setattr(module, name, None)
    y = call(x, *leaves, bias13)
    monkeypatch.undo()
    y.backward(dy)
    assert torch.equal(bias13.grad, wanted[-1])
    for w, true in zip(leaves, wanted[2:-1], strict=True):
        assert w.grad is None
        # one addition in float32, of products whose sums are the same
        assert (w.main_grad - (1 + true)).abs().max() <= 2.0**-23 * (1 + true.abs().max())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
def test_autocast_to_float16_with_bfloat16_weights(recipe, bias):
    """The FP8 recipes give the same results as without autocast, which affects neither concatenation nor
    addition."""
    x, w1, w3, w2, ids, probs, dy = problem()
    w1, w3, w2 = (w.bfloat16() for w in (w1, w3, w2))
    biases = {}
    if bias:
        biases = {"bias13": torch.randn(w1.shape[0], 2 * w1.shape[1]), "bias2": torch.randn(w2.shape[:2])}

    def call(x, *w):
        return moe_experts(x, w[:2], w[2], ids, probs, recipe=recipe, **biases)

    def under_autocast(x, *w):
        with torch.autocast("cpu", torch.float16):
            return call(x, *w)

    def in_float16(x, *w):
        return call(x.half(), *w).to(x.dtype)

    plain = in_float16 if recipe == "bf16" else call
    leaves = [x, w1, w3, w2]
    for actual, wanted in zip(results(under_autocast, leaves, dy), results(plain, leaves, dy), strict=True):
        assert torch.equal(actual, wanted)


def test_backward_under_autocast_to_float16():
    """Also with gradients of padded weights, which are concatenated."""
    x, w1, w3, w2, ids, probs, dy = problem()
    leaves = [x, torch.cat((w1, w3), dim=1).bfloat16(), w2.bfloat16()]
    wanted = results(lambda x, *w: moe_experts(x, *w, ids, probs), leaves, dy)
    with torch.autocast("cpu", torch.float16):
        actual = results(lambda x, *w: moe_experts(x, *w, ids, probs), leaves, dy)
    for a, b in zip(actual, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise"])
def test_backward_of_one_padded_and_biased_tensor_under_autocast_to_float16(recipe):
    """Of an expert width that is padded, with biases, in the gradients of large and of tiny losses, which
    float16 could not represent."""
    x, w1, w3, w2, ids, probs, dy = problem()
    leaves = [x, torch.cat((w1, w3), dim=1).bfloat16(), w2.bfloat16(), torch.randn(w2.shape[:2]), probs]
    bias13 = torch.randn(w1.shape[0], 2 * w1.shape[1])

    def call(x, w13, w2, bias2, probs):
        return moe_experts(x, w13, w2, ids, probs, recipe=recipe, bias13=bias13, bias2=bias2)

    for scale in (2.0**-20, 1.0, 2.0**24):
        wanted = results(call, leaves, dy * scale)
        with torch.autocast("cpu", torch.float16):
            actual = results(call, leaves, dy * scale)
        for a, b in zip(actual, wanted, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("recipe", "compiled"), [("fp8_flow", False), ("fp8_blockwise", False), ("bf16", False), ("bf16", True)]
)
def test_a_biased_row_depends_on_itself_alone(recipe, compiled, device):
    """y and the gradients of x and of the probabilities, bit for bit: alone, among other rows, in another
    order, and given as rows of their experts. The products of "bf16" may be BLAS's, which depend on the
    number of rows, so there they are of zeros."""
    tokens, experts, k, hidden = 60, 16, 4, 77
    torch.compiler.reset()
    x, dy = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
    w13, w2, bias2 = (torch.randn(experts, *shape) / 8 for shape in ((2 * F, hidden), (hidden, F), (hidden,)))
    if recipe == "bf16":
        w13, w2 = torch.zeros_like(w13), torch.zeros_like(w2)
    ids, probs = torch.rand(tokens, experts).topk(k).indices - 1, torch.rand(tokens, k)  # some without expert
    x, dy, w13, w2, bias2, ids, probs = (a.to(device) for a in (x, dy, w13, w2, bias2, ids, probs))

    def step(door, rows, routing, probs):
        leaves = [a.clone().requires_grad_() for a in (x[rows], probs[rows], bias2)]
        call = torch.compile(door, backend="aot_eager", fullgraph=True, dynamic=True) if compiled else door
        y = call(leaves[0], w13, w2, routing, leaves[1], recipe=recipe, bias2=leaves[2])
        return [y.detach(), *torch.autograd.grad(y, leaves, dy[rows])]

    every, order = torch.arange(tokens, device=device), torch.randperm(tokens, device=device)
    whole = step(moe_experts, every, ids, probs)
    assert torch.equal(step(moe_experts, every, ids, probs)[3], whole[3])
    for rows in (order[:3],) if compiled else (order, order[:7], order[:3], *order[:4, None]):
        *some, _ = step(moe_experts, rows, ids[rows], probs)
        for a, b in zip(some, whole, strict=False):
            assert torch.equal(a, b[rows])
    ids, probs = ids[:, :1].clamp(min=0), probs[:, :1]  # one expert each, whose rows they are
    whole, rows = step(moe_experts, every, ids, probs), ids[:, 0].argsort()
    counts = ids[:, 0].bincount(minlength=experts)
    *sorted_by_expert, _ = step(moe_experts_permuted, rows, counts, probs[:, 0])
    for a, b in zip(sorted_by_expert, whole, strict=False):
        assert torch.equal(a, b[rows].reshape(a.shape))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("biased", [False, True])
def test_ids_of_no_expert_add_no_bias(biased, device):
    """Also where the biases of all experts are NaN, and the probabilities are."""
    x, w1, w3, w2, _, _, dy = problem()
    ids = torch.tensor([[-1, E], [E + 1, -5]], device=device)[torch.arange(len(x)) % 2]
    probs = torch.full(ids.shape, torch.nan, device=device)
    biases = {"bias13": torch.randn(E, 2 * F, device=device)} if biased else {}
    x, w1, w3, w2, dy = (a.to(device) for a in (x, w1, w3, w2, dy))
    bias2 = torch.full((E, H), torch.nan, device=device)

    def call(x, probs):
        return moe_experts(x, (w1, w3), w2, ids, probs, bias2=bias2, **biases)

    for actual in results(call, [x, probs], dy):
        assert not actual.any()  # nor NaN, which is true


@pytest.mark.parametrize("change", ["experts", "ffn"])
def test_fp8_weights_of_another_size_raise(change):
    x, w1, w3, w2, ids, probs, _ = problem()
    more = [torch.cat((w, w)) for w in (w1, w3, w2)]
    if change == "ffn":
        more = [torch.cat((w1, w1), dim=1), torch.cat((w3, w3), dim=1), torch.cat((w2, w2), dim=2)]
    codes = quantize_fp8_weights((more[0], more[1]), more[2])
    with torch.no_grad(), pytest.raises(ValueError, match="fp8_weights of w13: got shape"):
        moe_experts(x, (w1, w3), w2, ids, probs, fp8_weights=codes)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("width", [F, 128])
def test_main_grad_of_bfloat16_weights_is_not_rounded(width, compiled):
    """A float32 ``main_grad`` gets the sums in float32, also if padding is cut from both halves of w13."""
    x, w1, w3, w2, ids, probs, dy = problem(width)
    weights = [torch.nn.Parameter(w.bfloat16()) for w in (torch.cat((w1, w3), dim=1), w2)]
    same_in_float32 = [torch.nn.Parameter(w.detach().float()) for w in weights]
    torch.compiler.reset()
    call = torch.compile(moe_experts, backend="aot_eager") if compiled else moe_experts
    moe_experts(x, *same_in_float32, ids, probs).backward(dy)
    for w in weights:
        w.main_grad = torch.zeros(w.shape)
    call(x, *weights, ids, probs).backward(dy)
    for w, wanted in zip(weights, same_in_float32, strict=True):
        assert torch.equal(w.main_grad, wanted.grad)


@pytest.mark.parametrize(
    "backward", [torch.autograd.grad, lambda y, x: y.backward(inputs=[x])], ids=["grad", "inputs"]
)
def test_a_compiled_gradient_of_the_input_only_does_not_change_main_grad(backward):
    x, w1, w3, w2, ids, probs, _ = problem()
    x.requires_grad_()
    weights = [torch.nn.Parameter(w) for w in (w1, w3, w2)]
    for w in weights:
        w.main_grad = torch.zeros_like(w)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, *w: moe_experts(x, w[:2], w[2], ids, probs), backend="aot_eager")
    y = compiled(x, *weights).sum()
    with pytest.raises(RuntimeError, match="without the gradients of all weights"):
        backward(y, x)
    assert not any(w.main_grad.any() for w in weights)


def test_one_frozen_half():
    x, w1, w3, w2, ids, probs, dy = problem()
    _, _, *wanted = results(lambda x, *w: moe_experts(x, w[:2], w[2], ids, probs), [x, w1, w3, w2], dy)
    w3.requires_grad_()
    w1.main_grad = torch.zeros_like(w1)
    moe_experts(x, (w1, w3), w2, ids, probs).backward(dy)
    assert torch.equal(w3.grad, wanted[1])
    assert w1.grad is None
    assert not w1.main_grad.any()


@pytest.mark.parametrize("apart", [True, False])
def test_frozen_padded_weights(apart):
    """Only x's gradient is computed, as with LoRA on other layers."""
    x, w1, w3, w2, ids, probs, dy = problem()
    arguments = (w1, w3) if apart else torch.cat((w1, w3), dim=1)
    _, wanted, *_ = results(lambda x, *w: moe_experts(x, w[:2], w[2], ids, probs), [x, w1, w3, w2], dy)
    _, actual = results(lambda x: moe_experts(x, arguments, w2, ids, probs), [x], dy)
    assert torch.equal(actual, wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "kind"), [*zip(RECIPES, ("relu2", "gelu", "relu2"), strict=True)])
def test_experts_without_a_gate(recipe, kind):
    """Squared ReLU or GELU, with and without biases, compared with float64; compiled results are bitwise
    equal."""
    x, w13, _, w2, ids, probs, dy = problem()
    dtype = torch.bfloat16 if recipe == "bf16" else torch.float32
    function = torch.nn.functional.gelu if kind == "gelu" else lambda h: torch.relu(h).square()
    activation, biases = Activation(kind), [torch.randn(E, F), torch.randn(E, H)]
    for added in ([], biases):
        leaves = [x, w13.to(dtype), w2.to(dtype), probs, *(b.to(dtype) for b in added)]

        def ours(x, w13, w2, probs, bias13=None, bias2=None):
            options = {"recipe": recipe, "activation": activation, "bias13": bias13, "bias2": bias2}
            return moe_experts(x, w13, w2, ids, probs, **options)

        def exact(x, w13, w2, probs, bias13=0.0, bias2=0.0):
            h = torch.einsum("th,enh->ten", x, w13) + bias13
            every = torch.einsum("tef,ehf->teh", function(h), w2) + bias2
            shares = torch.where(ids >= 0, probs, 0)[..., None]
            return (torch.take_along_dim(every, ids.clamp(min=0)[..., None], 1) * shares).sum(1)

        actual = results(ours, leaves, dy)
        for one, true in zip(actual, results(exact, [t.double() for t in leaves], dy.double()), strict=True):
            # as with biases; the square doubles an operand's error
            bound = 20 * 2.0**-9 if recipe == "bf16" else 0.2
            assert (one - true).norm() <= bound * true.norm()
        torch.compiler.reset()
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
        for a, b in zip(results(compiled, leaves, dy), actual, strict=True):
            assert torch.equal(a, b)
    with pytest.raises(ValueError, match="w13: got two tensors; wanted one of"):
        moe_experts(x, (w13, w13), w2, ids, probs, activation=activation)


def test_transposed_weights_are_read_in_place(monkeypatch):
    x, w1, w3, w2, ids, probs, dy = problem()
    weights = torch.cat((w1, w3), dim=1), w2
    wanted = results(lambda x, *w: moe_experts(x, *w, ids, probs), [x, *weights], dy)
    quantize, orientations = fp8moe.quantize_weights, []
    monkeypatch.setattr(
        fp8moe,
        "quantize_weights",
        lambda *a, **options: orientations.append(options["transposed"]) or quantize(*a, **options),
    )
    stored = [w.mT.contiguous() for w in weights]
    actual = results(lambda x, *w: moe_experts(x, *(v.mT for v in w), ids, probs), [x, *stored], dy)
    assert orientations == [True, True]
    for a, b in zip(actual, wanted, strict=True):
        assert torch.equal(a if a.ndim == 2 else a.mT, b)


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_bf16_uses_torchs_grouped_product(monkeypatch, recompute):
    """With torch's grouped product instead of the plain kernel, the only one that `fp8moe.moe_forward` has
    for bfloat16 here."""
    x, w1, w3, w2, ids, probs, dy = problem()
    leaves = [x, torch.cat((w1, w3), dim=1).bfloat16(), w2.bfloat16(), probs]
    ours = {"recipe": "bf16", "recompute": recompute}
    actual, ran = [], []
    product = torch.nn.functional.grouped_mm

    def grouped_mm(*arguments, **options):
        ran.append(1)
        return product(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
    actual = results(lambda x, w13, w2, probs: moe_experts(x, w13, w2, ids, probs, **ours), leaves, dy)
    assert ran
    wide = [t.double() for t in leaves]
    wanted = results(lambda x, w13, w2, probs: of_loops(x, w13, w2, ids, probs), wide, dy.double())
    for one, true in zip(actual, wanted, strict=True):
        # the product, the activation and the sum over experts round to 8 bits: three roundings of 2^-9, and
        # as many in the backward
        assert torch.linalg.norm(one.double() - true) <= 6 * 2.0**-9 * torch.linalg.norm(true)


def of_loops(x, w13, w2, ids, probs):
    y = torch.zeros_like(x)
    for t, k in (ids >= 0).nonzero().tolist():
        gate, up = (w13[ids[t, k]] @ x[t]).chunk(2)
        y = y.index_add(
            0,
            torch.tensor([t]),
            (probs[t, k] * (w2[ids[t, k]] @ (torch.nn.functional.silu(gate) * up)))[None],
        )
    return y


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("bf16", torch.float64),
        ("fp8_blockwise", torch.float32),
        ("fp8_flow", torch.float32),
    ],
)
def test_biases(recipe, dtype):
    """Compared with the same experts in float64; compiled results are bitwise equal."""
    x, w1, w3, w2, ids, probs, dy = problem()
    w13, bias13, bias2 = torch.cat((w1, w3), dim=1), torch.randn(E, 2 * F), torch.randn(E, H)
    leaves = [x, w13.to(dtype), w2.to(dtype), probs, bias13.to(dtype), bias2.to(dtype)]
    if dtype == torch.float64:
        leaves, dy = [(t * 1.1).double() * 1.3 for t in leaves], dy.double()  # and no float32 numbers
    activation = Activation(clamp=7.0, alpha=1.702, linear_offset=1.0)

    def ours(x, w13, w2, probs, bias13, bias2):
        options = {"recipe": recipe, "activation": activation, "bias13": bias13, "bias2": bias2}
        return moe_experts(x, w13, w2, ids, probs, **options)

    def exact(x, w13, w2, probs, bias13, bias2):
        h = torch.einsum("th,enh->ten", x, w13) + bias13
        a = torch_ops.swiglu(h.reshape(-1, 2 * F), activation=activation).reshape(T, E, F)
        every = torch.einsum("tef,ehf->teh", a, w2) + bias2
        shares = torch.where(ids >= 0, probs, 0)[..., None]
        return (torch.take_along_dim(every, ids.clamp(min=0)[..., None], 1) * shares).sum(1)

    actual = results(ours, leaves, dy)
    wanted = results(exact, [t.double() for t in leaves], dy.double())
    for ours_, true in zip(actual, wanted, strict=True):
        # roundings of 2^-9 (bfloat16) or 0.026 on average (e4m3), of about ten operands and results; of 2^-53
        # for sums of some 2^8 values
        bound = {torch.bfloat16: 10 * 2.0**-9, torch.float64: 2.0**-44}.get(dtype, 0.16)
        assert (ours_ - true).norm() <= bound * true.norm()
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for a, b in zip(results(compiled, leaves, dy), actual, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bias_that_trains_alone(recipe):
    """With frozen weights, and in a dtype of its own; also with weights that are codes of the caller's."""
    x, w1, w3, w2, ids, probs, dy = problem()
    w13, bias = torch.cat((w1, w3), dim=1), torch.randn(E, 2 * F).bfloat16()

    def call(x, bias, w13=w13, w2=w2):
        return moe_experts(x, w13, w2, ids, probs, bias13=bias, recipe=recipe)

    y, _, wanted = results(call, [x, bias], dy)
    assert wanted.dtype == torch.bfloat16
    alone = results(lambda bias: call(x, bias), [bias], dy)
    every = results(lambda bias, w13, w2: call(x, bias, w13, w2), [bias, w13, w2], dy)
    for one, other in ((alone[0], y), (alone[1], wanted), (every[0], y), (every[1], wanted)):
        assert torch.equal(one, other)
    if recipe != "bf16":
        codes = quantize_fp8_weights(w13, w2)
        wide = pad(bias.unflatten(1, (2, F)), (0, codes[1].rowwise.shape[2] - F)).flatten(1)
        assert torch.equal(call(x, wide, *codes), y)
        with pytest.raises(ValueError, match=rf"bias13: got shape \[4, {2 * F}\]; wanted \[4, 256\]"):
            call(x, bias, *codes)


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise"])  # a BLAS sums by the number of rows
def test_biases_in_chunks_of_a_batch(recipe):
    """y, the rows' gradients and dbias2 have the whole batch's bits; dw13, dw2, dbias13 are the chunks' sums.

    The whole batch's have others: a weight gradient's operands share an exponent over 128 rows, and other
    rows are together there.
    """
    x, w1, w3, w2, ids, probs, dy = problem()
    leaves = [x, probs, torch.cat((w1, w3), dim=1), w2, torch.randn(E, 2 * F), torch.randn(E, H)]
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        in_chunks = fp8moe.torch.ProcessGroup(overlap_chunks=3)
        for recompute in (None, "moe_expert"):

            def call(x, probs, w13, w2, bias13, bias2, ids=ids, comm=None, recompute=recompute):
                options = {"recipe": recipe, "recompute": recompute, "bias13": bias13, "bias2": bias2}
                return moe_experts(x, w13, w2, ids, probs, comm=comm, **options)

            whole = results(call, leaves, dy)
            apart = results(lambda *a, call=call: call(*a, comm=in_chunks), leaves, dy)
            for i in (0, 1, 2, 6):  # dbias2 is made outside of the chunks
                assert torch.equal(apart[i], whole[i])
            alone = [
                results(functools.partial(call, ids=ids[t]), [x[t], probs[t], *leaves[2:]], dy[t])
                for t in (slice(T * i // 3, T * (i + 1) // 3) for i in range(3))
            ]
            for a, *parts in list(zip(apart, *alone, strict=True))[3:6]:
                true = sum(part.double() for part in parts)
                # two additions in float32, each of which rounds by at most 2^-24 of its result
                assert ((a - true).abs() <= 2 * 2.0**-24 * sum(part.abs() for part in parts).double()).all()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("of", ["functional", "torch_ops", "core", "quantize", "float8"])
def test_codes_overwritten_before_the_backward_raise(of, recompute, compiled):
    """Also if a caller quantises them with `fp8moe` itself, or views them as float8."""
    x, w1, w3, w2, ids, probs, dy = problem(128)
    w13 = torch.cat((w1, w3), dim=1)
    copies = quantize_fp8_weights(w13, w2)
    first, second = copies

    def as_float8(q):
        return replace(q, **{n: torch_ops.as_float8(getattr(q, n)) for n in ("rowwise", "columnwise")})

    overwrite = {
        "functional": lambda: quantize_fp8_weights(2 * w13, 2 * w2, out=copies),
        "torch_ops": lambda: torch_ops.quantize_weights(2 * w2, out=second),
        "core": lambda: fp8moe.quantize_weights(2 * w13, out=first),
        "quantize": lambda: torch_ops.quantize(2 * w2, block=(128, 128), columnwise=True, out=second),
        "float8": lambda: torch_ops.quantize_weights(2 * w2, out=as_float8(second)),
    }[of]

    def forward(x, probs):
        return moe_experts(x, w13, w2, ids, probs, fp8_weights=copies, recompute=recompute)

    torch.compiler.reset()
    call = torch.compile(forward, backend="aot_eager") if compiled else forward
    results(call, [x, probs], dy)
    y = call(x.requires_grad_(), probs)
    overwrite()
    with pytest.raises(RuntimeError, match=r"overwrote|modified by an inplace operation"):
        y.backward(dy)
    results(call, [x, probs], dy)


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise"])
def test_fp8_weights_argument(recipe):
    """The same copies with and without a bias, which they do not contain."""
    x, w1, w3, w2, ids, probs, dy = problem()
    leaves, bias = [x, w1, w3, w2, probs], torch.randn(E, 2 * F)
    for added in (None, bias):
        kept = quantize_fp8_weights((w1, w3), w2)

        def call(x, w1, w3, w2, probs, kept=kept, added=added):
            return moe_experts(x, (w1, w3), w2, ids, probs, bias13=added, fp8_weights=kept, recipe=recipe)

        plain = results(lambda *a, c=call: c(*a, kept=None), leaves, dy)
        for actual, true in zip(results(call, leaves, dy), plain, strict=True):
            assert torch.equal(actual, true)
        changed = [x, w1 * 2, w3, w2, probs]
        # the given codes are used, not the changed weights
        assert torch.equal(results(call, changed, dy)[0], plain[0])
        again = quantize_fp8_weights((w1 * 2, w3), w2, out=kept)
        assert again[0].rowwise.data.data_ptr() == kept[0].rowwise.data.data_ptr()
        assert not torch.equal(results(call, changed, dy)[0], plain[0])


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"recipe": "fp4"}, ValueError, "recipe: got 'fp4'"),
        ({"w13": (torch.ones(E, F, H), torch.ones(E, F, H + 1))}, ValueError, "w13: got tensors of shapes"),
        (
            {"w13": (torch.ones(E, F, H), torch.ones(E, F, H).half())},
            TypeError,
            "w13: got w1 of torch.float32",
        ),
        (
            {"w2": torch.ones(E, H, F + 1)},
            ValueError,
            "w2: got shape .* wanted .E, H, 72., for the 144 rows of w13$",
        ),
        (
            {"w2": torch.ones(E, F, H)},
            ValueError,
            r"w2: got shape .* of w13; pass weights stored .* as .*, w2.transpose\(1, 2\)$",
        ),
        (
            {"w13": torch.ones(E, H, 2 * F)},
            ValueError,
            r"w2: got .* of w13; pass .* as w13.transpose\(1, 2\)",
        ),
        ({"w13": [torch.ones(E, F, H)] * 2}, TypeError, r"w13: got a list of 2, .*; pass tuple\(w13\)$"),
        (
            {"w13": [LINEAR] * E},
            TypeError,
            r"w13: got a list of 4, Linear; .*torch.stack\(\[m.weight for m in",
        ),
        (
            {"w13": (LINEAR,) * E},
            TypeError,
            r"w13: got a tuple of 4, Linear; .*torch.stack\(\[m.weight for m",
        ),
        ({"w2": torch.nn.ModuleList([LINEAR] * E)}, TypeError, r"w2: got a ModuleList of 4, .*in w2\]\)$"),
        ({"w2": LINEAR}, TypeError, "w2: got Linear; wanted a tensor"),
        (
            {"w13": tuple(torch.ones(E, F, H))},
            TypeError,
            r"w13: got a tuple of 4, .*torch.stack\(list\(w13\)\)$",
        ),
        ({"w13": ()}, TypeError, "w13: got a tuple of 0, nothing; wanted a tensor"),
        ({"w2": ()}, TypeError, "w2: got a tuple of 0, nothing; wanted a tensor"),
        (
            {"recipe": "fp8_flow", "w2": torch.ones(E, H, F).double()},
            TypeError,
            r'w2: got dtype float64; .*; pass w2.float\(\), or recipe="bf16"$',
        ),
        (
            {"topk_ids": torch.zeros(T, dtype=torch.int64)},
            ValueError,
            r"topk_ids: got shape \[37\]; wanted \[37, k\]; pass topk_ids.reshape\(-1, 1\)$",
        ),
        ({"topk_probs": torch.ones(T)}, ValueError, r"topk_probs: got shape \[37\]; wanted \[37, k\]"),
        ({"w13": torch.ones(E, F)}, ValueError, "w13: got shape"),
        ({"bias13": torch.ones(E)}, ValueError, "bias13: got shape"),
        (
            {"bias2": torch.ones(E, H), "comm": object()},
            NotImplementedError,
            "bias2: got one with a comm of object without an attribute `group`",
        ),
        ({"bias13": torch.ones(E, 2 * F + 1)}, ValueError, rf"bias13: got shape .* wanted \[4, {2 * F}\]"),
        ({"bias13": torch.ones(E, 2 * F).int()}, TypeError, "bias13: got dtype torch.int32"),
        ({"bias2": torch.ones(2, H)}, ValueError, rf"bias2: got shape \[2, {H}\]; wanted \[4, {H}\]"),
        ({"bias2": torch.ones(E, 1)}, ValueError, rf"bias2: got shape \[4, 1\]; wanted \[4, {H}\]"),
        ({"bias2": torch.ones(H)}, ValueError, rf"bias2: got shape \[{H}\]; wanted \[4, {H}\]"),
        ({"bias2": torch.ones(E, H).int()}, TypeError, "bias2: got dtype torch.int32"),
        ({"bias2": torch.ones(E, H, device="meta")}, TypeError, "bias2: got a tensor on meta"),
        ({"recompute": True}, ValueError, "recompute: got True; wanted one of None, 'moe_expert'"),
        ({"w2": torch.ones(E - 1, H, F)}, ValueError, rf"w2: got shape .* wanted \[4, {H}, F\]"),
        ({"w2": torch.ones(E, H + 8, F)}, ValueError, rf"w2: got shape .* wanted \[4, {H}, F\]"),
        ({"x": torch.ones(T, H + 8).bfloat16()}, ValueError, rf"w13: got shape .* wanted \[E, F, {H + 8}\]"),
        ({"recipe": "fp8_flow", "fp8_weights": (1,)}, TypeError, r"fp8_weights: got \(int\); wanted the two"),
        ({"recipe": "fp8_flow", "fp8_weights": 1}, TypeError, "fp8_weights: got int; wanted the two"),
        ({"recipe": "bf16", "fp8_weights": (1, 2)}, ValueError, 'fp8_weights: got some with recipe "bf16"'),
        ({"activation": "silu"}, TypeError, "activation: got str; wanted an fp8moe.Activation"),
    ],
)
def test_validation_errors(changed, error, words):
    x, w1, w3, w2, ids, probs, _ = problem()
    arguments = {"x": x, "w13": (w1, w3), "w2": w2, "topk_ids": ids, "topk_probs": probs, **changed}
    for recipe in RECIPES if "recipe" not in changed else (changed["recipe"],):
        with pytest.raises(error, match=words):
            moe_experts(**{**arguments, "recipe": recipe})


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_of_no_experts(recipe):
    """k = 0, which a product of sizes cannot tell the number of tokens from."""
    x, w1, w3, w2, *_ = problem()
    for leading in ((T,), (1, T)):
        leaves = [x.reshape(*leading, H), w1, w3, w2, torch.rand(*leading, 0)]
        ids = torch.zeros(*leading, 0, dtype=torch.int64)
        actual = results(
            lambda x, w1, w3, w2, p, ids=ids: moe_experts(x, (w1, w3), w2, ids, p, recipe=recipe),
            leaves,
            torch.randn_like(leaves[0]),
        )
        assert actual[0].shape == (*leading, H)
        assert not any(t.any() for t in actual)


@pytest.mark.parametrize("recipe", RECIPES)
def test_counts_of_another_number_of_experts_raise(recipe):
    x, w1, w3, w2, _, probs, _ = problem()
    counts = torch.tensor([5, 0, 20, T - 25, 0])
    with pytest.raises(ValueError, match=r"tokens_per_expert: got shape \[5\]; wanted \[4\]"):
        moe_experts_permuted(x, (w1, w3), w2, counts, probs[:, 0], recipe=recipe)


def test_biases_are_not_rounded_before_float32_products():
    """Neither to the dtype of the weights nor to that of the probabilities."""
    x, w1, w3, w2, ids, probs, _ = problem()
    x, ids = x.float(), ids[:, :1].clamp(min=0).repeat(1, 2)  # every token names its expert twice
    weights = [w.bfloat16() for w in (w1, w3, w2)]
    biases = torch.randn(E, 2 * F), torch.randn(E, H)
    options = {"bias13": biases[0], "bias2": biases[1], "recipe": "bf16"}
    y = moe_experts(x, tuple(weights[:2]), weights[2], ids, probs.bfloat16(), **options)
    w1, w3, w2 = (w.double()[ids[:, 0]] for w in weights)
    b1, b3 = (b.double()[ids[:, 0]] for b in biases[0].chunk(2, dim=1))
    a, b = ((w @ x.double()[:, :, None])[:, :, 0] + bias for w, bias in ((w1, b1), (w3, b3)))
    out = (w2 @ (torch.nn.functional.silu(a) * b)[:, :, None])[:, :, 0] + biases[1].double()[ids[:, 0]]
    true = out * probs.bfloat16().double().sum(dim=1, keepdim=True)
    # sums of H + 1, F and 2 products in float32; a rounding to bfloat16 is 2^-9 of the largest
    assert (y - true).abs().max() <= (H + F) * 2.0**-24 * 4 * true.abs().max()


# ---------------------------------------------------------------- backend and num_sms


def layers(recipe, backend, device="cpu", num_sms=None):
    """Name -> (call of every function with ``backend``, arguments with gradients); bfloat16 weights."""
    x, w1, w3, w2, ids, probs, _ = (t.to(device) for t in problem(width=128))
    weights = [w.bfloat16() for w in (torch.cat((w1, w3), dim=1), w2)]
    counts = torch.tensor([5, 0, 20, T - 25], device=device)
    options = {"recipe": recipe, "backend": backend, "num_sms": num_sms}
    layer = FP8FlowMoE(H, 128, E, K, **options, router=False, device=device)

    def tokens(x, w13, w2):
        return moe_experts(x, w13, w2, ids, probs, **options)

    def permuted(x, w13, w2):
        return moe_experts_permuted(x, w13, w2, counts, probs[:, 0].contiguous(), **options)

    def module(x):
        return layer(x, ids, probs)

    return {"tokens": (tokens, [x, *weights]), "permuted": (permuted, [x, *weights]), "module": (module, [x])}


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("asked", [{"backend": "mma"}, {"backend": None, "num_sms": 4}])
@pytest.mark.parametrize("recipe", RECIPES)
def test_unsupported_backend_raises_before_any_work(monkeypatch, recipe, asked, mode):
    multiply = []
    for name in ("quantize_weights", "moe_forward", "moe_forward_permuted"):
        function = getattr(fp8moe, name)

        def spied(*arguments, function=function, **options):
            if isinstance(arguments[0], torch.Tensor):  # not in a compiler's dry run
                multiply.append(1)
            return function(*arguments, **options)

        monkeypatch.setattr(fp8moe, name, spied)
    # Dynamo of torch 2.14 escapes quotes in it
    words = r"(backend: got \W+mma\W+|num_sms: got 4) for arrays on the CPU; wanted None"
    for call, leaves in layers(recipe, **asked).values():
        torch.compiler.reset()
        run = call if mode == "eager" else torch.compile(call, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match=words) as raised:
            run(*leaves)
        assert mode == "compiled" or raised.type is ValueError
    assert not multiply


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_backend_and_limit_reach_the_products_of_both_directions(monkeypatch, recipe, mode):
    """On the CPU, as if it had these backends, without passing them to the library."""
    for call, leaves in layers(recipe, "wgmma", num_sms=6).values():
        backends = []
        with monkeypatch.context() as patch:
            patch.setattr(layer_checks, "check_backend", lambda *arguments, **layer: None)
            for name in ("experts_forward", "permuted_experts_forward", "experts_backward"):
                patch.setattr(moe, name, without_backend(getattr(moe, name), backends))
            torch.compiler.reset()
            run = call if mode == "eager" else torch.compile(call, backend="aot_eager", fullgraph=True)
            leaves = [t.clone().requires_grad_() for t in leaves]
            y = run(*leaves)
            torch.autograd.grad(y, leaves, torch.ones_like(y))
        assert set(backends) == {("forward", "wgmma", 6), ("backward", "wgmma", 6)}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["wgmma", "mma", "cublas", "plain"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_backend_on_cuda(monkeypatch, recipe, backend):
    """The selected backend computes all products of both directions; compiled results are bitwise equal;
    compared with the plain kernels' results."""
    if backend == "wgmma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    grouped_gemm = importlib.import_module("fp8moe.kernels_cuda.grouped_gemm")
    choose, chosen = grouped_gemm.choose, []
    monkeypatch.setattr(
        grouped_gemm, "choose", lambda *arguments: chosen.append(choose(*arguments)) or chosen[-1]
    )
    results = {}
    for name in dict.fromkeys(("plain", backend)):
        torch.manual_seed(1)
        for kind, (call, leaves) in layers(recipe, name, "cuda").items():
            dispatch.clear_recordings()
            chosen.clear()
            torch.compiler.reset()
            compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
            leaves = [t.requires_grad_() for t in leaves]
            both = []
            for run in (call, compiled):
                y = run(*leaves)
                both.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
            assert {c.backend for c in chosen} == {name}
            for a, b in zip(*both, strict=True):
                assert torch.equal(a, b)
            results.setdefault(kind, []).append(both[0])
    for pair in results.values():
        for ours, plain in zip(pair[-1], pair[0], strict=True):
            # sums of at most 256 products in float32, by tensor cores within 2^-11 of the largest; values
            # near a rounding boundary of bfloat16, or of FP8, may be rounded either way
            bound = 2.0**-7 if recipe == "bf16" else FP8_NOISE
            assert (ours - plain).double().norm() <= bound * plain.double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_limit_on_cuda(monkeypatch, recipe):
    """Bitwise equal, eager and compiled, with products that use no more SMs than allowed."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    grouped_gemm = importlib.import_module("fp8moe.kernels_cuda.grouped_gemm")
    check, limits = grouped_gemm.check_limit, []

    def checked(num_sms, *rest):
        limits.append(num_sms)
        check(num_sms, *rest)

    monkeypatch.setattr(grouped_gemm, "check_limit", checked)
    results = {}
    for num_sms in (None, 8):
        torch.manual_seed(1)
        options = {"backend": "wgmma", "num_sms": num_sms}
        for kind, (call, leaves) in layers(recipe, device="cuda", **options).items():
            dispatch.clear_recordings()
            limits.clear()
            torch.compiler.reset()
            leaves = [t.requires_grad_() for t in leaves]
            for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
                y = run(*leaves)
                results.setdefault(kind, []).append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
            assert {limit for limit in limits if limit is not None} <= {num_sms}
            assert num_sms is None or len(limits) >= 4
    for first, *others in results.values():
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert torch.equal(a, b)
    multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    call, leaves = layers(recipe, "wgmma", "cuda", num_sms=multiprocessors + 2 - multiprocessors % 2)[
        "tokens"
    ]
    with pytest.raises(
        ValueError, match=f"num_sms: got .* wanted an even number from 2 to {multiprocessors}"
    ):
        call(*leaves)


def without_backend(function, backends):
    """The library's function called without backend, with a record of the requested ones."""

    def call(first, *arguments, **options):
        def free(asked):
            return replace(asked, backend=None, num_sms=None)

        if isinstance(first, Saved):
            backends.append(("backward", *first.options.gemm.values()))
            return function(replace(first, options=free(first.options)), *arguments, **options)
        *arrays, asked = arguments[:5]
        backends.append(("forward", *asked.gemm.values()))
        y, saved = function(first, *arrays, free(asked), *arguments[5:], **options)
        return y, replace(saved, options=asked)

    return call


def test_one_graph_over_several_ranks(tmp_path):
    """With ``comm``, and a bias that is gathered from all ranks: torch_functional_rank.py."""
    script = Path(__file__).with_name("torch_functional_rank.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-Wignore", script, str(rank), "2", tmp_path / "file"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=240)
            assert rank.returncode == 0, output[-3000:]
    finally:
        for rank in ranks:
            rank.kill()


def cut(x):
    """The tensor, with a storage that ends one element before it does."""
    whole = x.clone(memory_format=torch.preserve_format)
    whole.untyped_storage().resize_(whole.untyped_storage().nbytes() - whole.itemsize)
    return whole


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", ["x", "w13", "w2", "topk_ids", "topk_probs"])
def test_tensors_that_end_after_their_storage_raise(name, strided):
    x, gate, up, w2, ids, probs, _ = problem()
    arguments = {"x": x, "w13": torch.cat((gate, up), 1), "w2": w2, "topk_ids": ids, "topk_probs": probs}
    given = arguments[name]
    arguments[name] = cut(given.mT.contiguous().mT if strided else given)
    assert arguments[name].is_contiguous() != strided
    for recipe in ("bf16", "fp8_flow"):
        with pytest.raises(ValueError, match=rf"^{name}: got shape .* was resized"):
            moe_experts(**arguments, recipe=recipe)
    if name in ("w13", "w2"):
        with pytest.raises(ValueError, match=r"^x: got shape .* was resized"):
            torch_ops.quantize_weights(arguments[name])


def test_permuted_rows_of_other_numbers_have_their_own_gradients():
    """Padded to as many rows as earlier ones, so that what is saved has the same shapes."""
    x, w1, w3, w2, *_ = problem()
    w13 = torch.cat((w1, w3), dim=1)
    for rows in (5, 9, 7):
        counts = torch.zeros(len(w2), dtype=torch.int32)
        counts[:2] = torch.tensor([2, rows - 2])
        leaf, probs = x[:rows].detach().bfloat16().requires_grad_(), torch.rand(rows)
        dy = torch.randn(rows, x.shape[1]).bfloat16()
        moe_experts_permuted(leaf, w13.detach(), w2.detach(), counts, probs).backward(dy)
        codes = fp8moe.torch.quantize_fp8_weights(w13.detach(), w2.detach())
        given = leaf.detach(), *codes, counts, probs
        _, saved = fp8moe.moe_forward_permuted(*given, gradients=["dx"])
        assert torch.equal(leaf.grad, fp8moe.moe_backward(saved, dy, gradients=["dx"]).dx)
