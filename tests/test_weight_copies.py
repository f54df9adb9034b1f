"""``weight_copies``: FP8 weights that keep only row-wise codes give the bits of both orientations,
in half the memory, through every form of the layer."""

import itertools
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from backends import on_cuda
from cases import BF16, assert_same, generator, layer_inputs, same_bits, values

import fp8moe
import fp8moe.torch
from fp8moe import Quantized
from fp8moe.layer.recipes import RECIPES
from fp8moe.runtime.record_trees import arrays_in, map_arrays, nbytes
from fp8moe.torch import FP8FlowMoE, moe_experts, quantize_fp8_weights, weights_unchanged

RNG = generator()
H, F, E = 256, 128, 4
FP8 = [name for name, recipe in RECIPES.items() if recipe.quantizes]
ONE = {"weight_copies": "rowwise"}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def one_byte(*weights):
    """Bytes of the row-wise codes and scales of weights, arrays or records, of whole blocks."""
    return sum(int(np.prod(w.shape)) for w in weights) * (1 + 4 / 128**2)


def assert_gradients(expected, actual):
    for a, b in zip(arrays_in(expected), arrays_in(actual), strict=True):
        assert same_bits(a, b)


# ---------------------------------------------------------------- the layer


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", FP8)
def test_the_bits_are_those_of_both_orientations(recipe, recompute):
    given, dy = layer_inputs(RNG.integers(2**31))
    w13, w2 = given["w13"], given["w2"]
    w13[0], w2[1, :, :128] = 0, 0  # blocks of zeros
    options = {"recipe": recipe, "recompute": recompute}
    y, saved = fp8moe.moe_forward(**given, **options)
    expected = y, fp8moe.moe_backward(saved, dy)
    q13, q2 = fp8moe.quantize_weights(w13), fp8moe.quantize_weights(w2)
    halves = [fp8moe.quantize_weights(w, columnwise=False) for w in (w13, w2)]
    assert_same((q13.rowwise, q2.rowwise), tuple(halves))
    assert [w.columnwise for w in halves] == [None, None]
    for weights, copies in (
        ((w13, w2), "rowwise"),
        ((q13, q2), "rowwise"),
        (halves, "rowwise"),
        (halves, "both"),
        ((q13, halves[1]), "both"),
        ((halves[0], w2), "both"),
    ):
        arguments = given | dict(zip(("w13", "w2"), weights, strict=True))
        y, saved = fp8moe.moe_forward(**arguments, **options, weight_copies=copies)
        assert_gradients(expected, (y, fp8moe.moe_backward(saved, dy)))
        first, operands = fp8moe.moe_backward_input(saved, dy)
        rest = fp8moe.moe_backward_weight(operands)
        assert_gradients(expected, (y, replace(first, dw13=rest.dw13, dw2=rest.dw2)))
        for w, kept in zip(weights, (saved.w13, saved.w2), strict=True):
            derived = copies == "rowwise" or getattr(w, "columnwise", w) is None
            assert (kept.columnwise is None) == derived
            if derived:
                assert nbytes(kept) == one_byte(w)


def test_what_is_not_finite_stays_in_its_place():
    given, dy = layer_inputs(RNG.integers(2**31))
    for name, value in (("w13", np.nan), ("w2", np.inf), ("w2", np.nan)):
        weights = given | {name: given[name].copy()}
        weights[name].reshape(-1)[RNG.integers(0, weights[name].size, 5)] = value
        results = []
        for copies in ("both", "rowwise"):
            y, saved = fp8moe.moe_forward(**weights, recipe="fp8_flow", weight_copies=copies)
            results.append((y, fp8moe.moe_backward(saved, dy)))
        assert_gradients(*results)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_weights_in_parts_and_in_other_layouts(fmt):
    w1, w3 = RNG.standard_normal((2, 3, 72, 200)).astype(BF16)
    for x, options in (
        ((w1, w3), {"rows": 128}),
        (np.concatenate([w1, w3], axis=1), {"parts": 2, "rows": 128, "columns": 256}),
        (w1, {"transposed": True, "columns": 128}),
        (w1, {"rows": 128}),
        (w1, {}),
    ):
        both = fp8moe.quantize_weights(x, fmt=fmt, **options)
        one = fp8moe.quantize_weights(x, fmt=fmt, columnwise=False, **options)
        assert_same(both.rowwise, one.rowwise)
        assert_same(both.columnwise, fp8moe.transpose_codes(one.rowwise))
        assert fp8moe.quantize_weights(x, fmt=fmt, columnwise=False, **options, out=one) is one
        with pytest.raises(ValueError, match=r"^out: got"):  # the other half would keep its old codes
            fp8moe.quantize_weights(x, fmt=fmt, columnwise=False, **options, out=both)
        with pytest.raises(ValueError, match=r"^out: got"):
            fp8moe.quantize_weights(x, fmt=fmt, **options, out=one)


@pytest.mark.parametrize("given", ["one", "both"])
def test_codes_overwritten_before_they_are_transposed_raise(given):
    arguments, dy = layer_inputs(RNG.integers(2**31))
    columnwise = given == "both"
    for name in ("w13", "w2"):
        w = arguments[name]
        changed = arguments | {name: fp8moe.quantize_weights(w, columnwise=columnwise)}
        _, saved = fp8moe.moe_forward(**changed, recipe="fp8_flow", **ONE)
        fp8moe.moe_backward(saved, dy)
        fp8moe.quantize_weights(w * 2, columnwise=columnwise, out=changed[name])
        with pytest.raises(
            RuntimeError, match=f"{name}: got FP8 codes that quantize_weights has overwritten"
        ):
            fp8moe.moe_backward(saved, dy)


def test_what_the_forward_reads_is_asked_for_by_name():
    given, _ = layer_inputs(7)
    q = fp8moe.quantize_weights(given["w2"])
    for w, fix in (
        (
            Quantized(None, q.columnwise),
            r"Quantized\(fp8moe.transpose_codes\(w2.columnwise\), w2.columnwise\)",
        ),
        (Quantized(None), "quantize_weights"),
    ):
        with pytest.raises(TypeError, match=rf"w2.rowwise: got None; wanted .*; pass fp8moe.{fix}$"):
            fp8moe.moe_forward(**given | {"w2": w}, recipe="fp8_flow")
        tensors = [torch.tensor(given[n].astype(np.float32)) for n in ("x", "w13")]
        rest = [torch.tensor(given[n]) for n in ("topk_ids", "topk_probs")]
        with pytest.raises(TypeError, match=r"w2.rowwise: got None"):
            moe_experts(*tensors, map_arrays(torch.tensor, w), *rest)
    with pytest.raises(TypeError, match=r"w2: got a QuantTensor; .*; pass fp8moe.Quantized\(w2\)$"):
        fp8moe.moe_forward(**given | {"w2": q.rowwise}, recipe="fp8_flow")
    with pytest.raises(TypeError, match=r"w2: got QuantTensor; .*; pass fp8moe.Quantized\(w2\)$"):
        moe_experts(*tensors, map_arrays(torch.tensor, q.rowwise), *rest)
    w = fp8moe.quantize_weights(given["w2"], columnwise=False)
    swapped = Quantized(fp8moe.transpose_codes(w.rowwise))
    with pytest.raises(ValueError, match=r"w2.rowwise: got transposed=True; wanted False"):
        fp8moe.moe_forward(**given | {"w2": swapped}, recipe="fp8_flow")
    with pytest.raises(TypeError, match=r"q.block: got \(1, 128\); wanted \(128, 128\)"):
        fp8moe.transpose_codes(fp8moe.quantize(given["w13"][0], fmt="e5m2"))
    with pytest.raises(ValueError, match=r"weight_copies: got 'columnwise'; wanted .*both.*rowwise"):
        fp8moe.moe_forward(**given, weight_copies="columnwise")


@pytest.mark.parametrize("recipe", FP8)
def test_chunks_derive_once(group, recipe, monkeypatch):
    given, dy = layer_inputs(RNG.integers(2**31))
    x, w13, w2, probs = (torch.tensor(given[n].astype(np.float32)) for n in ("x", "w13", "w2", "topk_probs"))
    results = []
    for copies in ("both", "rowwise"):
        comm = fp8moe.torch.ProcessGroup(overlap_chunks=2)
        leaves = [t.clone().requires_grad_() for t in (x.bfloat16(), w13, w2, probs)]
        options = {"recipe": recipe, "comm": comm, "weight_copies": copies}
        y = moe_experts(*leaves[:3], torch.tensor(given["topk_ids"]), leaves[3], **options)
        with fp8moe.trace() as traced:
            y.backward(torch.tensor(dy.astype(np.float32)).bfloat16())
        results.append([y, *(t.grad for t in leaves)])
        assert traced.launches["transpose_codes"] == (2 if copies == "rowwise" else 0)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@on_cuda
def test_by_kernels_and_recordings(backend, monkeypatch):
    """Poisoned memory; the second call of each is a recording's."""
    backend.start(monkeypatch)
    x, w13, w2, dy = (values(RNG, s, BF16) for s in ((5, 128), (2, 256, 128), (2, 128, 128), (5, 128)))
    rows = np.array([3, 2], np.int32), RNG.random(5, np.float32)
    *layer, dy = map(backend.upload, (x, w13, w2, *rows, dy))
    results = []
    for copies in ("both", "rowwise", "rowwise"):
        y, saved = fp8moe.moe_forward_permuted(*layer, weight_copies=copies)
        with fp8moe.trace() as traced:
            grads = fp8moe.moe_backward(saved, dy)
        assert traced.launches["transpose_codes"] == (2 if copies == "rowwise" else 0)
        results.append(backend.download((y, grads)))
    assert_gradients(*results[:2])
    assert_gradients(*results[1:])


# ---------------------------------------------------------------- torch


@pytest.mark.parametrize("ffn", [128, 72])
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_a_module_holds_one_byte_a_weight(device, recompute, ffn):
    results, x = [], torch.randn(37, H, device=device)
    for copies in ("both", "rowwise"):
        torch.manual_seed(0)
        layer = FP8FlowMoE(H, ffn, E, 2, device=device, recompute=recompute, weight_copies=copies)
        assert f"weight_copies={copies!r}" in repr(layer)
        with weights_unchanged(layer):
            held = layer.fp8_weight_nbytes
            y = layer(leaf := x.clone().requires_grad_())
            y.sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
        assert held == one_byte(torch.empty(E, 3 * 128, H)) * (2 if copies == "both" else 1)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    layer.quantize_weights()
    assert layer.fp8_weight_nbytes == held
    layer.weight_copies = "both"
    assert layer.fp8_weight_nbytes == 0
    layer.quantize_weights()
    assert layer.fp8_weight_nbytes == 2 * held


@pytest.mark.parametrize(
    ("recompute", "compiled"), [(None, False), ("moe_expert", False), ("moe_expert", True)]
)
def test_codes_given_to_the_function(device, recompute, compiled):
    """Of both weights, of one of them, as ``fp8_weights`` and as weights; with one half or with both."""
    torch.manual_seed(0)
    x, w13, w2 = torch.randn(37, H), torch.randn(E, 2 * F, H) / 16, torch.randn(E, H, F) / 16
    rest = torch.rand(37, E).topk(2).indices, torch.rand(37, 2)
    x, w13, w2, *rest = (t.to(device) for t in (x, w13, w2, *rest))
    results = []
    cases = [*itertools.product(itertools.product((True, False), repeat=2), ("both", "rowwise"))]
    # compilation takes seconds
    for halves, copies in [cases[0], cases[1], cases[2]] if compiled else cases:
        leaves = [t.clone().requires_grad_() for t in (x, w13, w2)]
        codes = tuple(
            q if both else Quantized(q.rowwise)
            for q, both in zip(quantize_fp8_weights(w13, w2), halves, strict=True)
        )

        def call(x, w13, w2, codes=codes, copies=copies):
            options = {"recompute": recompute, "weight_copies": copies}
            y = moe_experts(x, w13, w2, *rest, fp8_weights=codes, **options)
            return y + moe_experts(x, *codes, *rest, **options) + moe_experts(x, w13, w2, *rest, **options)

        torch.compiler.reset()
        function = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
        y = function(*leaves)
        y.square().sum().backward()
        results.append([y, *(t.grad for t in leaves)])
    for others in results[1:]:
        for a, b in zip(results[0], others, strict=True):
            assert torch.equal(a, b)


def test_a_module_that_keeps_copies_says_so_once(caplog):
    layer = FP8FlowMoE(H, F, E, topk=2, recipe="fp8_flow", weight_copies="rowwise")
    with caplog.at_level(logging.INFO, "fp8moe"):
        for _ in range(2):
            with weights_unchanged(layer):
                layer(torch.randn(8, H))
    told = [r.getMessage() for r in caplog.records if "copies" in r.getMessage()]
    assert told == [f"FP8 copies are kept of FP8FlowMoE, {one_byte(layer.w13, layer.w2):.0f} bytes"]


def test_the_backward_of_overwritten_codes_raises():
    x, w13, w2 = torch.randn(37, H, requires_grad=True), torch.randn(E, 2 * F, H), torch.randn(E, H, F)
    rest = torch.rand(37, E).topk(2).indices, torch.rand(37, 2)
    for copies in ("both", "rowwise"):
        codes = quantize_fp8_weights(w13, w2, weight_copies=copies)
        y = moe_experts(x, w13, w2, *rest, fp8_weights=codes, **ONE)
        quantize_fp8_weights(w13 * 2, w2, weight_copies=copies, out=codes)
        with pytest.raises(RuntimeError, match="got FP8 copies that quantize_weights"):
            y.sum().backward()


# ---------------------------------------------------------------- JAX


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("ffn", [128, 72])
def test_jax(ffn, recompute):
    jax = pytest.importorskip("jax")
    import fp8moe.jax

    x, w13, w2 = (RNG.standard_normal(s).astype(np.float32) for s in ((20, H), (E, 2 * ffn, H), (E, H, ffn)))
    ids, probs = RNG.integers(0, E, (20, 2)).astype(np.int32), RNG.random((20, 2)).astype(np.float32)
    results, sizes = [], []
    for copies in ("both", "rowwise"):

        def layer(x, w13, w2, probs, copies=copies):
            return fp8moe.jax.moe_experts(x, w13, w2, ids, probs, recompute=recompute, weight_copies=copies)

        y, pull = jax.vjp(jax.jit(layer), x, w13, w2, probs)
        results.append([y, *jax.jit(pull)(y)])
        kept = [a for a in jax.tree.leaves(pull) if a.ndim == 3 and a.dtype == np.uint8]
        sizes.append(sum(a.nbytes for a in kept))
    for a, b in zip(*results, strict=True):
        assert same_bits(np.asarray(a), np.asarray(b))
    one = E * 3 * 128 * H
    assert sizes == [one if recompute is None else one + E * 2 * 128 * H, one]
