"""The host's work of small steps: the number of Python calls of each door, without a device and a driver.

A call takes 0.2 to 0.4 us of an H200's host. The bounds leave a tenth for other versions of torch.
"""

import gc
import importlib.util
import os
import sys

import pytest
import torch
import torch_on_device

import fp8moe
import fp8moe.torch
from fp8moe.adapters.torch import experts as experts_of_torch
from fp8moe.adapters.torch import functional, grouped

pytestmark = pytest.mark.skipif(
    os.name != "posix" or importlib.util.find_spec("cupy") is None, reason="needs sched_yield and CuPy"
)
T, H, F, E, K = 64, 512, 256, 8, 2
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    torch_on_device.without_kernels(monkeypatch)


def leaf(*shape, dtype=BF16):
    return torch.randn(shape).to(dtype).requires_grad_()


def routed():
    return torch.randint(E, (T, K), dtype=torch.int32), torch.rand(T, K).requires_grad_()


def experts(**options):
    x, w13, w2, (ids, probs) = leaf(T, H), leaf(E, 2 * F, H), leaf(E, H, F), routed()
    return lambda: fp8moe.torch.moe_experts(x, w13, w2, ids, probs, **options), (x, w13, w2, probs)


def layer(**options):
    x, moe = leaf(T, H), fp8moe.torch.FP8FlowMoE(H, F, E, K, dtype=BF16, **options)
    return lambda: moe(x), (x, *moe.parameters())


def frozen_layer():
    codes = fp8moe.torch.quantize_fp8_weights(torch.randn(E, 2 * F, H), torch.randn(E, H, F))
    x, moe = leaf(T, H), fp8moe.torch.FP8FlowMoE.from_quantized(*codes, K, dtype=BF16)
    return lambda: moe(x), (x, *moe.parameters())


def experts_of_codes():
    x, w13, w2, (ids, probs) = leaf(T, H), leaf(E, 2 * F, H), leaf(E, H, F), routed()
    options = {"fp8_weights": fp8moe.torch.quantize_fp8_weights(w13, w2)}
    return lambda: fp8moe.torch.moe_experts(x, w13, w2, ids, probs, **options), (x, w13, w2, probs)


def of_transformers():
    transformers = pytest.importorskip("transformers")
    importlib.import_module("fp8moe.transformers").enable(name="fp8moe_host_time")
    qwen3 = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    sizes = {"hidden_size": H, "moe_intermediate_size": F, "num_experts": E, "num_experts_per_tok": K}
    config = transformers.Qwen3MoeConfig(**sizes)
    config._experts_implementation = "fp8moe_host_time"
    module, x, (ids, probs) = qwen3.Qwen3MoeExperts(config).to(BF16), leaf(T, H), routed()
    return lambda: module(x, ids, probs), (x, probs, *module.parameters())


def permute_and_pad():
    x, (ids, probs), rows = leaf(T, H), routed(), T * K + E * 16
    options = {"num_experts": E, "align_size": 16, "num_out_tokens": rows}
    return lambda: fp8moe.torch.permute_and_pad(x, ids, probs.detach(), **options).data, (x,)


def calls_of(function, *arguments):
    """The number of Python calls of its third run, and its result."""
    called = []
    gc.disable()  # callbacks of a collection are calls, too
    sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code))
    try:
        result = function(*arguments)
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(called), result


#: of the forward, of the backward, and of one that adds to gradients
DOORS = {
    "experts": (experts, 29, 85, 110),
    "experts by blocks": (lambda: experts(recipe="fp8_blockwise"), 29, 85, 110),
    "experts of codes": (experts_of_codes, 32, 85, 110),
    "layer": (layer, 116, 130, 155),
    "frozen layer": (frozen_layer, 137, 130, 130),
    "transformers": (of_transformers, 100, 85, 110),
    "permute and pad": (permute_and_pad, 22, 50, 50),
}


@pytest.mark.parametrize("door", DOORS)
def test_python_calls_of_a_step(door):
    make, *most = DOORS[door]
    forward, leaves = make()
    dy = torch.randn_like(forward())
    for _ in range(2):
        for t in leaves:
            t.grad = None
        counted, y = calls_of(forward)
        of_backward = []
        for again in (True, True, False):
            of_backward.append(calls_of(lambda y=y, again=again: y.backward(dy, retain_graph=again))[0])
    counts = counted, of_backward[0], of_backward[-1]
    print(door, counts)
    assert all(0 < count <= bound for count, bound in zip(counts, most, strict=True)), counts


def test_padding_has_no_expert_in_calls_like_earlier_ones(monkeypatch):
    """Whatever a subclass's routing says: a call is looked up with the ids that it computes with."""

    class Layer(fp8moe.torch.FP8FlowMoE):
        def route(self, tokens, padding_mask=None):
            return tokens, *given

    x, given, padding = leaf(T, H), routed(), torch.rand(T) < 0.5
    module, called = Layer(H, F, E, K, dtype=BF16), []
    run = experts_of_torch.Like.run
    monkeypatch.setattr(experts_of_torch.Like, "run", lambda like: called.append(like.arrays[1]) or run(like))
    for _ in range(2):
        module(x, padding_mask=padding)
    (ids,) = called
    assert torch.equal(ids, given[0].masked_fill(padding[:, None], -1))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_only_calls_that_convert_nothing_are_looked_up(monkeypatch, dtype):
    """Recipe "bf16" multiplies in the rows' dtype: a recording for copies of the weights is none for them."""
    monkeypatch.setattr(grouped, "on_hopper", lambda x: True)
    x, called = leaf(T, H), []
    module = fp8moe.torch.FP8FlowMoE(H, F, E, K, recipe="bf16", dtype=dtype, router=False)
    run = experts_of_torch.Like.run
    monkeypatch.setattr(experts_of_torch.Like, "run", lambda like: called.append(like) or run(like))
    for _ in range(3):
        module(x, *routed())
    assert len(called) == (2 if dtype == BF16 else 0)


def looked_up(monkeypatch):
    """The calls that are looked up from now on."""
    called, run = [], experts_of_torch.Like.run
    monkeypatch.setattr(experts_of_torch.Like, "run", lambda like: called.append(like) or run(like))
    return called


def test_what_is_refused_is_refused_after_a_call_that_is_not(monkeypatch):
    """A pair without its second half, masters without values, and rows that a subclass's routing loses."""
    x, w13, w2, (ids, probs) = leaf(T, H), leaf(E, 2 * F, H), leaf(E, H, F), routed()
    codes = fp8moe.torch.quantize_fp8_weights(w13, w2)
    called = looked_up(monkeypatch)
    for weights, options in ((w13, {}), (w13, {"fp8_weights": codes})):
        for _ in range(2):
            fp8moe.torch.moe_experts(x, weights, w2, ids, probs, **options)
    assert len(called) == 2
    meta = w13.detach().to("meta").requires_grad_()
    sparse = w13.detach().to_sparse().requires_grad_()
    for weights, options, message in (
        ((w13, None), {}, "w13: got a tuple of 2, NoneType and Tensor"),
        (meta, {"fp8_weights": codes}, "w13: got a tensor on meta, without values"),
        (sparse, {"fp8_weights": codes}, "w13: got layout torch.sparse_coo"),
    ):
        with pytest.raises(TypeError, match=message):
            fp8moe.torch.moe_experts(x, weights, w2, ids, probs, **options)

    class Layer(fp8moe.torch.FP8FlowMoE):
        def route(self, tokens, padding_mask=None):
            return tokens[:1], ids[:1], probs[:1]

    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        Layer(H, F, E, K, dtype=BF16)(x)


def test_codes_in_torchs_own_dtype_are_bytes():
    x, w13, w2, (ids, probs) = leaf(T, H), leaf(E, 2 * F, H), leaf(E, H, F), routed()
    codes = []
    for q in fp8moe.torch.quantize_fp8_weights(w13, w2):
        halves = {name: fp8moe.torch.as_float8(getattr(q, name)) for name in ("rowwise", "columnwise")}
        codes.append(fp8moe.Quantized(**halves))
    assert codes[0].rowwise.data.dtype == torch.float8_e4m3fn
    for _ in range(2):
        y = fp8moe.torch.moe_experts(x, w13, w2, ids, probs, fp8_weights=tuple(codes))
        assert y.shape == (T, H)
        y.sum().backward()


def test_main_grad_of_an_earlier_call_decides_nothing(monkeypatch):
    """Elsewhere than on Hopper, recipe "bf16" is computed by the core only for what torch cannot compute."""
    x, w13, w2, (ids, probs) = leaf(T, H), leaf(E, 2 * F, H), leaf(E, H, F), routed()
    called = looked_up(monkeypatch)
    w13.main_grad = torch.zeros_like(w13)
    for _ in range(2):
        fp8moe.torch.moe_experts(x, w13, w2, ids, probs, recipe="bf16")
    del w13.main_grad
    by_torch = []
    monkeypatch.setattr(functional, "by_public_operations", lambda x, *_, **__: by_torch.append(x) or x)
    fp8moe.torch.moe_experts(x, w13, w2, ids, probs, recipe="bf16")
    assert (len(by_torch), called) == (1, [])


def test_the_backward_reads_the_memory_of_its_forward(monkeypatch):
    """In first and in later calls, also if ``data`` has been replaced; a saved tensor of other bytes is
    refused, and one that lies at any address is copied to one that kernels can read."""
    monkeypatch.setattr(grouped, "on_hopper", lambda x: True)
    x, (ids, probs), called = leaf(T, H), routed(), looked_up(monkeypatch)
    for _ in range(2):
        w13, w2 = leaf(E, 2 * F, H), leaf(E, H, F)
        y, at, kept = fp8moe.torch.moe_experts(x, w13, w2, ids, probs, recipe="bf16"), w2.data_ptr(), w2.data
        w2.data = torch.empty(0, dtype=BF16)
        node = y.grad_fn
        while not hasattr(node, "saved_tensors"):  # of a view
            ((node, _),) = node.next_functions
        assert any(t.data_ptr() == at for t in node.saved_tensors)
        del kept
    assert len(called) == 1
    flat, at = torch.empty(1 << 26, dtype=torch.uint8), 1

    def at_an_odd_place(t):
        nonlocal at
        at += 1 - at % 2 if t.itemsize == 1 else -at % 16
        place = flat[at : at + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
        at += t.nbytes
        return place

    run, tensors = experts()
    for unpack, error in ((lambda t: t, None), (lambda t: t[:8] if t.ndim == 1 else t, "saved tensors: got")):
        for asked in (tensors, tensors[:1]):
            with torch.autograd.graph.saved_tensors_hooks(at_an_odd_place, unpack):
                y = run()
            if error is None:
                torch.autograd.grad(y, asked, torch.ones_like(y))
                continue
            with pytest.raises(RuntimeError, match=error):
                torch.autograd.grad(y, asked, torch.ones_like(y))
