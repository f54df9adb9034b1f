"""Served as trained: the experts compared with the arithmetic of serving engines (`serving`), and rows that
do not depend on the other rows of a batch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from backends import ON_CPU, REFERENCE, on_cuda, only_on_gpu, over
from cases import BF16, generator, layer_inputs, offsets_of, same_bits, values
from serving import ENGINES, OURS, Arithmetic, case, distance, serve, table

import fp8moe
from fp8moe.layer.recipes import RECIPES

RNG = generator()
PAGE = Path(__file__).parents[1] / "docs" / "concepts" / "serving.md"

# y's distance from the oracle's, in norm. If a share f of fc1's values are the next bfloat16, 2^-8 of the
# value away, some activations move by a step of e4m3, at most 2^-3: by sqrt(f * 2^-8 * 2^-3) of the norm,
# and y by as much. On the reference, float32 sums of 128 products in another order differ by at most 128 *
# 2^-24 of the magnitudes, so that f is at most 2^-9: 0.001. On CUDA the tensor cores' sums differ by
# 1.3e-4, a thirtieth of the step: 0.0045. The arithmetics that the tests tell apart are 0.03 or more away
# from each other.
REFERENCE_NORM, CUDA_NORM = 0.002, 0.009


def operands(shape):
    """Inputs, weights as codes, and what `serve` takes of both."""
    x, w13, w2, ids, probs = case(RNG, **shape)
    weights = [fp8moe.quantize_weights(w) for w in (w13, w2)]
    codes = [(w.rowwise.data, w.rowwise.scales) for w in weights]
    return (x, *weights, ids, probs), (x, *codes, ids, probs)


REAL = {"reference": [({},)], "on_gpu": [({"tokens": 300, "hidden": 512},)]}
SMALL = {"tokens": 6, "hidden": 128, "ffn": 128, "experts": 3, "topk": 2}


def is_served(backend, y, wanted):
    return distance(backend.download(y), wanted) <= (REFERENCE_NORM if backend is REFERENCE else CUDA_NORM)


@over("shape", **REAL)
@pytest.mark.parametrize("recipe", OURS)
def test_the_recipes_are_what_the_table_says(backend, monkeypatch, shape, recipe):
    arguments, codes = operands(shape)
    backend.start(monkeypatch)
    y, _ = fp8moe.moe_forward(*map(backend.upload, arguments), recipe=recipe)
    wanted = serve(*codes, OURS[recipe])
    assert is_served(backend, y, wanted)
    others = [replace(OURS[recipe], weights="rows"), replace(OURS[recipe], scales="float")]
    assert not any(is_served(backend, y, serve(*codes, other)) for other in others)


@over("shape", **REAL, on_cpu=[(SMALL,)])
@pytest.mark.parametrize("pow2", [True, False])
def test_operations_compute_what_an_engine_does(backend, monkeypatch, shape, pow2):
    """The program of the page: SGLang with DeepGEMM, with either scales."""
    (x, w13, w2, ids, probs), codes = operands(shape)
    backend.start(monkeypatch)
    plan = fp8moe.plan_topk(
        ids, len(codes[1][0]), align_size=128
    )  # not by the harness: its kernels are Numba's
    x, w13, w2, plan, weights = map(backend.upload, (x, w13, w2, plan, probs))
    scales = {"pow2": pow2, "eps": 1e-10}
    h = fp8moe.permute_gemm(fp8moe.quantize(x, **scales), w13.rowwise, plan).data
    a = fp8moe.quantize(fp8moe.swiglu(h), **scales)
    rows = fp8moe.grouped_gemm(a, w2.rowwise, plan.expert_offsets, plan.tokens_per_expert)
    y = fp8moe.unpermute(rows, plan, weights)
    how = replace(ENGINES["SGLang, DeepGEMM"], scales="ue8m0" if pow2 else "reciprocal")
    assert is_served(backend, y, serve(*codes, how))
    assert not is_served(backend, y, serve(*codes, replace(how, scales="float" if pow2 else "ue8m0")))


def test_the_table_of_the_page_is_what_the_engines_compute():
    text = PAGE.read_text()
    missing = [line for line in table() if line not in text.splitlines()]
    assert not missing, "python tests/serving.py prints the lines"


def test_weights_that_are_one_make_places_equal():
    """With one expert a token and a weight of 1, weights and order have no effect: "fp8_blockwise" is
    SGLang's arithmetic with powers of two, bit for bit of the same sums."""
    x, w13, w2, ids, _ = operands({"tokens": 32, "experts": 4, "topk": 1})[1]
    ones = np.ones(ids.shape, np.float32)
    engine = replace(ENGINES["SGLang, DeepGEMM"], scales="ue8m0")
    ours = serve(x, w13, w2, ids, ones, OURS["fp8_blockwise"])
    assert same_bits(ours, serve(x, w13, w2, ids, ones, engine))
    assert not same_bits(ours, serve(x, w13, w2, ids, ones, Arithmetic()))


# ---------------------------------------------------------------- rows of a batch


@only_on_gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_do_not_depend_on_the_batch(backend, monkeypatch, recipe):
    """y, dx and dprobs of a token have the same bits whatever tokens are in the batch, and wherever it is."""
    sizes = {"hidden": 512, "ffn": 256, "experts": 8, "k": 4}
    inputs, dy = layer_inputs(int(RNG.integers(2**32)), 1500, dropped=0.1, **sizes)
    backend.start(monkeypatch)

    def results(chosen):
        of_tokens = {"x", "topk_ids", "topk_probs"}
        arrays = {n: backend.upload(a[chosen] if n in of_tokens else a) for n, a in inputs.items()}
        y, saved = fp8moe.moe_forward(**arrays, recipe=recipe)
        grads = fp8moe.moe_backward(saved, backend.upload(dy[chosen]), gradients=("dx", "dprobs"))
        return backend.download((y, grads.dx, grads.dprobs))

    chosen = RNG.permutation(len(dy))
    whole = results(np.arange(len(dy)))
    for count in (700, 40, 1):
        for a, b in zip(whole, results(chosen[:count]), strict=True):
            assert same_bits(a[chosen[:count]], b)


@on_cuda
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_do_not_depend_on_the_other_rows(backend, monkeypatch, recipe):
    """As above, of rows that are permuted already: alone, last and among other rows of its expert."""
    rows, width = (4, 128) if backend is ON_CPU else (300, 512)
    counts = np.array([rows, 1], np.int32)
    x, dy = (values(RNG, (rows + 1, width), BF16) for _ in range(2))
    w13, w2 = values(RNG, (2, 256, width), BF16), values(RNG, (2, width, 128), BF16)
    probs = RNG.random(rows + 1, np.float32)
    backend.start(monkeypatch)

    def results(chosen, counts):
        arrays = x[chosen], w13, w2, counts, probs[chosen]
        y, saved = fp8moe.moe_forward_permuted(*map(backend.upload, arrays), recipe=recipe)
        grads = fp8moe.moe_backward(saved, backend.upload(dy[chosen]), gradients=("dx", "dprobs"))
        return backend.download((y, grads.dx, grads.dprobs))

    whole = results(np.arange(rows + 1), counts)
    row = int(RNG.integers(rows))
    for chosen in ([row], [*range(row), *range(row + 1, rows), row]):
        of_them = results(np.array(chosen), np.array([len(chosen), 0], np.int32))
        for a, b in zip(whole, of_them, strict=True):
            assert same_bits(a[row], b[-1])


# ---------------------------------------------------------------- DeepGEMM itself


@only_on_gpu
@pytest.mark.parametrize("pow2", [True, False])
def test_products_have_deepgemms_bits(backend, monkeypatch, pow2):
    """Both add the tensor cores' sums of 128 products, times the product of both scales, to float32 totals in
    one fused multiply-add, and round once."""
    pytest.importorskip("deep_gemm")
    torch = pytest.importorskip("torch")
    from fp8moe.torch import deepgemm_grouped_gemm

    backend.skip_without("wgmma")
    offsets = offsets_of([128, 0, 384, 256])
    x = fp8moe.quantize(values(RNG, (int(offsets[-1]), 1024), BF16), pow2=pow2)
    w = fp8moe.quantize(values(RNG, (4, 768, 1024), BF16), block=(128, 128), pow2=pow2)

    def tensors(q):
        codes = torch.from_numpy(q.data).cuda()
        return replace(q, data=codes, scales=torch.from_numpy(q.scales).cuda())

    arguments = tensors(x), tensors(w), torch.from_numpy(offsets).cuda()
    theirs = deepgemm_grouped_gemm(*arguments)
    assert torch.equal(
        fp8moe.grouped_gemm(*arguments, backend="wgmma").view(torch.int16), theirs.view(torch.int16)
    )
