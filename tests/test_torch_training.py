"""The layer in training loops: saved tensors, checkpointing, compiled code, frozen weights, autocast, scaled
losses, functional calls. All compared bitwise with the plain eager layer."""

import copy
import gc
import tracemalloc
import weakref
from contextlib import nullcontext

import pytest
import torch
from oracles import lost
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fp8moe
import fp8moe.torch
from fp8moe.adapters.torch import grouped
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch.arguments import Options, Targets
from fp8moe.adapters.torch.layer import FP8FlowMoE
from fp8moe.adapters.torch.library import OPERATORS
from fp8moe.layer.options import LayerOptions
from fp8moe.records import Record
from fp8moe.runtime.record_trees import arrays_in

HIDDEN, FFN, EXPERTS, TOPK = 256, 128, 4, 2
RECIPES = ["bf16", "fp8_blockwise", "fp8_flow"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def module(recipe="fp8_flow", device="cpu", experts=EXPERTS, **options):
    torch.manual_seed(0)
    return FP8FlowMoE(HIDDEN, FFN, experts, TOPK, recipe=recipe, device=device, **options)


def tokens(device="cpu", count=70, dtype=torch.bfloat16):
    return torch.randn(count, HIDDEN, dtype=dtype, device=device).requires_grad_()


def results(forward, layer, x):
    """y and all gradients."""
    x.grad = None
    layer.zero_grad()
    y = forward(x)
    y.backward(gradient_of(y))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def gradient_of(y):
    g = torch.Generator().manual_seed(2)
    return torch.randn(y.shape, generator=g).to(y)


def assert_equal(actual, wanted):
    for a, b in zip(actual, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def compiled(layer, **options):
    torch.compiler.reset()
    return torch.compile(layer, backend="aot_eager", fullgraph=True, **options)


# ---------------------------------------------------------------- saved tensors and their lifetime


class Packed:
    """The value that pack hooks return: autograd keeps it as long as it would keep the tensor."""

    def __init__(self, t):
        self.t = t


@pytest.mark.usefixtures("saved_apart")
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_tensors_end_with_the_backward(recipe, recompute, device):
    """They are released by the backward, although the loss is still referenced."""
    layer, x = module(recipe, device, recompute=recompute), tokens(device)
    kept = []

    def pack(t):
        packed = Packed(t)
        kept.append(weakref.ref(packed))
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.t):
        loss = layer(x).float().sum()
    assert len(kept) > 5
    assert all(ref() is not None for ref in kept)
    loss.backward()
    assert all(ref() is None for ref in kept)


@pytest.fixture
def poisoned_memory():
    """New tensors hold NaN, or the largest integer, until they are written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:.*deterministic")
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_detect_anomaly_without_a_nan(recipe, recompute, device, poisoned_memory):
    """torch's grouped product does not write the rows after the last expert's, of which there are some here:
    no expert has a multiple of 16 rows. Nothing reads them, but anomaly mode looks for NaN in every gradient.
    """
    layer, x = module(recipe, device, recompute=recompute), tokens(device, count=4)
    ids = torch.tensor([[0, 1]] * 4, device=device)
    probs = torch.full((4, TOPK), 0.5, device=device).requires_grad_()

    def forward(x):
        return layer(x, ids, probs)

    wanted = results(forward, layer, x)
    with torch.autograd.detect_anomaly():
        actual = results(forward, layer, x)
    assert_equal(actual, wanted)
    assert not any(t.isnan().any() for t in actual if t is not None)


def graph_of(y):
    """The autograd nodes before a tensor."""
    actual, todo = [], [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in actual:
            actual.append(node)
            todo += [next_ for next_, _ in node.next_functions]
    return actual


@pytest.mark.usefixtures("saved_apart")
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", ["fp8_blockwise", "fp8_flow"])
def test_all_saved_tensors_are_saved_by_autograd(recipe, recompute, device):
    """Hooks see as many bytes as `Saved` has, and no node holds other tensors."""
    layer, x = module(recipe, device, recompute=recompute), tokens(device)
    _, ids, probs = (t.detach() for t in layer.route(x))
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        y = layer(x, ids, probs.requires_grad_())
    weights = layer.w13.detach(), layer.w2.detach()
    options = {"recipe": recipe, "recompute": recompute}
    _, saved = fp8moe.moe_forward(x.detach(), *weights, ids, probs.detach(), **options)
    assert sum(sizes) == saved.nbytes + sum(a.nbytes for a in arrays_in((saved.w13, saved.w2)))
    for node in graph_of(y):
        held = [t for v in getattr(node, "__dict__", {}).values() for t in tensors_in(v)]
        assert not [t for t in held if not isinstance(t, torch.nn.Parameter)]


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_in(v)]
    if isinstance(value, Record):
        return [t for t in arrays_in(value) if isinstance(t, torch.Tensor)]
    return []


def test_operations_release_saved_tensors_after_the_backward(device):
    """Including the plan: everything is released after the backward, and modifications are detected."""

    def run():
        x, probs = (torch.rand(9, n, device=device, requires_grad=True) for n in (64, 2))
        ids = torch.randint(-1, 5, (9, 2), device=device, dtype=torch.int32)
        plan = torch_ops.plan_topk(ids, 4, align_size=4)
        moved = torch_ops.permute(x, plan, probs)
        rows = torch_ops.swiglu(moved.data, moved.probs)
        return plan, torch_ops.unpermute(rows, plan, probs)

    plan, y = run()
    for node in graph_of(y):
        assert not [t for v in getattr(node, "__dict__", {}).values() for t in tensors_in(v)], node
    row_map = weakref.ref(plan.row_id_map)
    del plan
    y.sum().backward()
    assert row_map() is None
    for array in ("row_id_map", "pad_offsets"):
        plan, y = run()
        getattr(plan, array).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointed(recipe, recompute, reentrant, device):
    layer, x = module(recipe, device, recompute=recompute), tokens(device)
    wanted = results(layer, layer, x)
    actual = results(lambda x: checkpoint(layer, x, use_reentrant=reentrant), layer, x)
    assert_equal(actual, wanted)


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "fp8_flow"])
def test_checkpointing_saves_the_input_only(recipe, device, frozen_objects):
    layer, x = module(recipe, device), tokens(device, count=1024)
    held = []
    for forward in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        forward(x).sum().backward()
        gc.collect()
        tracemalloc.start()
        start = memory(device)
        y = forward(x)
        gc.collect()
        held.append(memory(device) - start - y.nbytes)
        tracemalloc.stop()
        del y
    assert held[0] > x.numel()
    # autograd's records took 23 kB; the smallest tensor that a layer could save, x in FP8, has 256 KiB
    assert held[1] <= 2**16


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_forward_without_gradients_leaves_its_result_alone(recipe, recompute, device, frozen_objects):
    layer, x = module(recipe, device, recompute=recompute), tokens(device, count=1024)
    held = []
    for context in (nullcontext, torch.no_grad, torch.inference_mode):
        with context():
            layer(x)
            gc.collect()
            tracemalloc.start()
            start = memory(device)
            y = layer(x)
            gc.collect()
            held.append(memory(device) - start)
            tracemalloc.stop()
        nbytes = y.nbytes
        del y
    training, *inference = held
    # Python objects took 6 kB; the smallest tensor that a layer could keep, the FP8 rows of x, has 256 KiB
    assert max(inference) <= nbytes + 2**16
    if recipe != "bf16" or device == "cuda":  # torch's own memory on the CPU is not measured
        assert training > 2 * nbytes


def memory(device):
    """Bytes; on the CPU those of NumPy, which allocates the library's results."""
    return torch.cuda.memory_allocated() if device == "cuda" else tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_tensors_on_the_cpu(recipe, recompute, device):
    """Offloaded, and restored as other tensors."""
    layer, x = module(recipe, device, recompute=recompute), tokens(device)
    wanted = results(layer, layer, x)

    def offloaded(x):
        with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
            return layer(x)

    assert_equal(results(offloaded, layer, x), wanted)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        y = layer(x)  # saved tensors have moved
    x.grad = None
    layer.zero_grad()
    y.backward(gradient_of(y))
    assert_equal([y.detach(), x.grad, *(p.grad for p in layer.parameters())], wanted)


def test_two_backwards_of_one_forward(device):
    layer, x = module(device=device), tokens(device)
    y = layer(x)
    y.backward(gradient_of(y), retain_graph=True)
    once = [t.grad.clone() for t in (x, layer.w13, layer.w2)]
    y.backward(gradient_of(y))
    for t, g in zip((x, layer.w13, layer.w2), once, strict=True):
        assert torch.equal(t.grad, g + g)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(gradient_of(y))


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_bf16_weights_changed_before_the_backward_raise(recompute):
    layer, x = module("bf16", dtype=torch.bfloat16, recompute=recompute), tokens()
    y = layer(x)
    with torch.no_grad():
        layer.w2.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    a, b = (torch.randn(2, *s, dtype=torch.float64, requires_grad=True) for s in ((8, 8), (8, 4)))
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    ids, probs = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1, dtype=torch.float64)
    y = fp8moe.torch.moe_experts(x, a, b, ids, probs, recipe="bf16", recompute=recompute)
    with torch.no_grad():
        a.mul_(3)
    with pytest.raises(RuntimeError, match="w13, w2: got weights that were changed after the forward"):
        y.sum().backward()


# ---------------------------------------------------------------- recomputation in bf16


@pytest.mark.parametrize("gemm", ["torch's", "ours"])
def test_bf16_with_recompute(gemm, device, monkeypatch):
    if gemm == "ours":  # as on Hopper
        monkeypatch.setattr(grouped, "on_hopper", lambda x: True)
    plain, layer, x = module("bf16", device), module("bf16", device, recompute="moe_expert"), tokens(device)
    assert_equal(results(layer, layer, x), results(plain, plain, x))
    assert_equal(results(compiled(layer), layer, x), results(plain, plain, x))


@pytest.mark.usefixtures("saved_apart")
def test_bf16_with_recompute_keeps_neither_product_nor_activation(device):
    widths = {}
    for recompute in (None, "moe_expert"):
        layer = FP8FlowMoE(HIDDEN, 384, EXPERTS, TOPK, recipe="bf16", recompute=recompute, device=device)
        x, shapes = tokens(device), []
        _, ids, probs = (t.detach() for t in layer.route(x))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, s=shapes: s.append(t.shape) or t, lambda t: t
        ):
            layer(x, ids, probs)
        widths[recompute] = {shape[-1] for shape in shapes if len(shape) == 2}
    assert {768, 384} <= widths[None]
    assert not {768, 384} & widths["moe_expert"]


# ---------------------------------------------------------------- gradients of some inputs only


def products(traced):
    return sum(n for name, n in traced.launches.items() if "gemm" in name)


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("frozen", [("w13",), ("w2",), ("w13", "w2"), ("w13", "w2", "x", "router.weight")])
def test_frozen(recipe, recompute, frozen, device):
    """Frozen tensors get no gradient; the others get the same gradient as if all were trained."""
    if recompute and len(frozen) == 4:
        pytest.skip("nothing is left to compute again for")
    layer, x = module(recipe, device, recompute=recompute), tokens(device)
    wanted = results(layer, layer, x)
    names = ["y", "x", *(name for name, _ in layer.named_parameters())]
    for name, p in layer.named_parameters():
        p.requires_grad_(name not in frozen)
    x.requires_grad_("x" not in frozen)
    for forward in (layer, compiled(layer))[: 2 if recipe == "fp8_flow" else 1]:
        layer.zero_grad()
        x.grad = None
        y = forward(x)
        if y.requires_grad:
            y.backward(gradient_of(y))
        actual = [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
        pairs = zip(names, wanted, strict=True)
        assert_equal(actual, [None if name in frozen else value for name, value in pairs])


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "fp8_flow"])
def test_frozen_experts_skip_the_weight_gradients(recipe):
    layer, x = module(recipe), tokens()
    counts = []
    for frozen in (False, True):
        layer.w13.requires_grad_(not frozen)
        layer.w2.requires_grad_(not frozen)
        sizes = []
        hooks = (lambda t, s=sizes: s.append(t.nbytes) or t), (lambda t: t)
        with torch.autograd.graph.saved_tensors_hooks(*hooks), fp8moe.trace() as traced:
            results(layer, layer, x)
        counts.append((products(traced), sum(sizes)))
    assert [n for n, _ in counts] == [6, 4]
    assert counts[1][1] < counts[0][1]  # neither the input nor the activation is kept


def test_gradients_that_are_not_requested_by_name():
    x, w13, w2 = (torch.randn(s).bfloat16() for s in ((70, 256), (4, 256, 256), (4, 256, 128)))
    ids, probs = torch.randint(0, 4, (70, 2)), torch.rand(70, 2)
    _, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow")
    dy = torch.randn(70, 256).bfloat16()
    g = fp8moe.moe_backward(saved, dy, gradients=("dx",))
    assert g.dw13 is None
    assert g.dw2 is None
    assert torch.equal(g.dx, fp8moe.moe_backward(saved, dy).dx)
    with pytest.raises(ValueError, match="gradients: got 'dw'; wanted one of 'dx', 'dprobs', 'dw13', 'dw2'"):
        fp8moe.moe_backward(saved, dy, gradients=("dw",))
    less = saved.needed_for(("dx", "dw2"))
    assert less.x is None
    with pytest.raises(ValueError, match=r"gradients: got 'dw13', but saved\.x is None"):
        fp8moe.moe_backward(less, dy)
    with pytest.raises(ValueError, match="dw13: got an array to add to, but gradients has no 'dw13'"):
        fp8moe.moe_backward(saved, dy, dw13=torch.zeros(4, 256, 256), gradients=("dx",))


# ---------------------------------------------------------------- main_grad


@pytest.mark.parametrize("inputs_need_gradients", [True, False])
def test_main_grad_in_compiled_code(inputs_need_gradients, device):
    """If neither x nor the probabilities need a gradient, the backward has only side effects."""
    layer, x = module(device=device), tokens(device)
    _, ids, probs = (t.detach() for t in layer.route(x))
    x.requires_grad_(inputs_need_gradients)
    actual = []
    for forward in (layer, compiled(layer)):
        for w in (layer.w13, layer.w2):
            w.main_grad = torch.ones_like(w)
            w.grad_added_to_main_grad = False
        y = forward(x, ids, probs)
        y.backward(gradient_of(y))
        actual.append([w.main_grad for w in (layer.w13, layer.w2)])
        assert layer.w13.grad_added_to_main_grad is True
        assert layer.w2.grad_added_to_main_grad is True
    assert_equal(*actual)
    assert not torch.equal(actual[0][0], torch.ones_like(actual[0][0]))


@pytest.mark.parametrize("forward", ["eager", "compiled"])
def test_main_grad_of_several_forwards_before_their_backwards(forward, device):
    """As in pipeline parallelism, including with main_grad reset to zero between forward and backward."""
    layer = module(device=device)
    call = layer if forward == "eager" else compiled(layer)
    xs = [tokens(device) for _ in range(2)]
    for w in (layer.w13, layer.w2):
        w.main_grad = torch.zeros_like(w)
    for x in xs:
        y = layer(x)
        y.backward(gradient_of(y))
    wanted = [w.main_grad.clone() for w in (layer.w13, layer.w2)]
    ys = [call(x) for x in xs]
    for w in (layer.w13, layer.w2):
        w.main_grad.zero_()
    for y in ys:
        y.backward(gradient_of(y))
    assert_equal([w.main_grad for w in (layer.w13, layer.w2)], wanted)


@pytest.mark.parametrize("forward", ["eager", "compiled"])
def test_megatron_gets_a_grad_of_zeros(forward):
    """Megatron's hook requires a ``grad`` if it set ``grad_added_to_main_grad``, and discards it; otherwise
    ``grad`` is None, so that no optimizer uses it."""
    for megatron in (True, False):
        layer, x = module(), tokens()
        call = layer if forward == "eager" else compiled(layer)
        for w in (layer.w13, layer.w2):
            w.main_grad = torch.zeros_like(w)
            if megatron:
                w.grad_added_to_main_grad = False
        for _ in range(2):
            y = call(x)
            y.backward(gradient_of(y))
            for w in (layer.w13, layer.w2):
                assert w.grad_added_to_main_grad
                assert (w.grad is not None) == megatron
                if megatron:
                    assert w.grad.shape == w.shape
                    assert not w.grad.any()


def test_zero_grads_share_memory_only_when_released():
    layers = [module(), module()]
    for layer in layers:
        for w in (layer.w13, layer.w2):
            w.main_grad, w.grad_added_to_main_grad = torch.zeros_like(w), False
        layer(tokens()).sum().backward()
    with torch.no_grad():
        layers[0].w13.grad.add_(1.0)
    assert not layers[1].w13.grad.any()
    for layer in layers:
        layer.zero_grad()
    layers[0](tokens()).sum().backward()
    assert not layers[0].w13.grad.any()


# ---------------------------------------------------------------- compiled code


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_other_numbers_of_tokens_do_not_recompile(recipe, dynamic):
    layer = module(recipe, experts=16)
    call = compiled(layer, dynamic=dynamic)
    # above and below multiples of 16 and of 128 rows, and fewer rows than experts
    counts = [64, 100, 7, 130, 33, 256, 300, 91, 77, 128, 5, 60, 2, 3, 16, 17, 127, 129, 31, 8]
    assert len(set(counts)) == 20
    for i, count in enumerate(counts):
        x = tokens(count=count)
        wanted = results(layer, layer, x)
        # the first number is compiled as static, unless specified otherwise, and the second as dynamic
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            assert_equal(results(call, layer, x), wanted)


@pytest.mark.parametrize("recipe", RECIPES)
def test_number_of_tokens_that_depends_on_data_compiles(recipe):
    layer, x = module(recipe), tokens()
    kept = torch.rand(len(x)) < 0.5

    def call(x):
        return layer(x[kept])

    wanted = results(call, layer, x)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_equal(results(compiled(call), layer, x), wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_moe_experts_compiled(recipe, backend):
    torch.compiler.reset()
    layer, x = module(recipe), tokens()
    _, ids, probs = (t.detach() for t in layer.route(x))
    weights = [w.detach().clone().requires_grad_() for w in (layer.w13, layer.w2)]
    if recipe == "bf16":
        weights = [w.detach().bfloat16().requires_grad_() for w in weights]
    actual = []
    for call in (
        fp8moe.torch.moe_experts,
        torch.compile(fp8moe.torch.moe_experts, backend=backend, fullgraph=True),
    ):
        for t in (x, *weights):
            t.grad = None
        y = call(x, *weights, ids, probs, recipe=recipe)
        y.backward(gradient_of(y))
        actual.append([y.detach(), x.grad, *(w.grad for w in weights)])
    assert_equal(*actual)


# ---------------------------------------------------------------- arguments of moe_experts


@pytest.mark.parametrize("call", ["eager", "compiled"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_moe_experts_accepts_the_modules_inputs(recipe, call):
    torch.compiler.reset()
    layer, x = module(recipe), tokens(count=60).detach()
    _, ids, probs = (t.detach() for t in layer.route(x))
    weights = [w.detach().bfloat16() if recipe == "bf16" else w.detach() for w in (layer.w13, layer.w2)]
    plain = fp8moe.torch.moe_experts(x, *weights, ids, probs, recipe=recipe).detach()
    moe_experts = fp8moe.torch.moe_experts
    if call == "compiled":
        moe_experts = torch.compile(moe_experts, backend="aot_eager", fullgraph=True)

    def actual(*arguments):
        return moe_experts(*arguments, recipe=recipe)

    wide = torch.cat([x, x], dim=1)[:, :HIDDEN]  # rows of a wider buffer
    assert torch.equal(actual(wide, *weights, ids, probs), plain)
    strided = ids.t().contiguous().t(), torch.cat([probs, probs], dim=1)[:, :TOPK]
    assert torch.equal(actual(x, *weights, *strided), plain)
    three = actual(x.reshape(3, 20, HIDDEN), *weights, ids.reshape(3, 20, TOPK), probs.reshape(3, 20, TOPK))
    assert torch.equal(three.reshape(plain.shape), plain)
    if recipe != "bf16":
        y = actual(x.float(), *weights, ids, probs)
        assert y.dtype == torch.float32
        assert torch.equal(y, plain.float())
        quantized = [fp8moe.quantize_weights(w) for w in weights]
        assert torch.equal(actual(x, *quantized, ids, probs), plain)
    with torch.autocast("cpu", torch.bfloat16):
        y = actual(x.float(), *weights, ids, probs)
        assert y.dtype == torch.float32
        assert torch.equal(y, plain.float())


def test_moe_experts_errors_name_the_argument():
    layer, x = module(), tokens()
    _, ids, probs = (t.detach() for t in layer.route(x))
    weights = layer.w13.detach(), layer.w2.detach()
    with pytest.raises(TypeError, match="w13: got quantised weights"):
        fp8moe.torch.moe_experts(
            x, fp8moe.quantize_weights(weights[0]), weights[1], ids, probs, recipe="bf16"
        )
    with pytest.raises(ValueError, match="recipe: got 'fp4'"):
        fp8moe.torch.moe_experts(x, *weights, ids, probs, recipe="fp4")
    good = (x, *weights, ids, probs)
    integer, wide = torch.ones(70, HIDDEN, dtype=torch.int32), weights[1].double()
    for number, bad, error, message in (
        (0, integer, TypeError, "x: got dtype torch.int32; wanted a floating-point dtype"),
        (0, torch.tensor(1.0), ValueError, r"x: got shape \[\]; wanted at least 1 dimensions"),
        (0, None, TypeError, "x: got NoneType; wanted a tensor"),
        (2, wide, TypeError, "w2: got dtype float64; wanted bfloat16, float16, float32"),
        (1, weights[0][0], ValueError, "w13: got shape .*; wanted at least 3 dimensions"),
        (1, weights[0][:, :, :128], ValueError, "w13: got shape"),
        (3, ids[:60], ValueError, "topk_ids: got shape"),
        (3, probs, TypeError, "topk_ids: got dtype float32"),
        (4, ids, TypeError, "topk_probs: got dtype torch.int32"),
        (4, probs[:, :1], ValueError, "topk_probs: got shape"),
    ):
        arguments = [bad if i == number else a for i, a in enumerate(good)]
        with pytest.raises(error, match=message):
            fp8moe.torch.moe_experts(*arguments, recipe="fp8_flow")
    for recipe in RECIPES:
        for number, name in ((0, "x"), (1, "w13"), (2, "w2"), (4, "topk_probs")):
            for bad, message in (
                (good[number].to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn, codes without scales"),
                (good[number].to("meta"), "a tensor on meta"),
            ):
                arguments = [bad if i == number else a for i, a in enumerate(good)]
                with pytest.raises(TypeError, match=f"{name}: got {message}"):
                    fp8moe.torch.moe_experts(*arguments, recipe=recipe)
    with pytest.raises(TypeError, match=r"x: got dtype torch\.int32"):
        layer(integer)
    for shape in ((2, 2 * HIDDEN), (4, HIDDEN // 2), (HIDDEN - 1,)):
        with pytest.raises(ValueError, match=r"x: got shape .*; wanted \[..., 256\]"):
            layer(torch.randn(shape))


def test_torch_func_transforms_raise():
    layer, x = module(), tokens().detach()
    for call in (torch.func.grad(lambda x: layer(x).sum()), torch.func.vmap(layer)):
        with pytest.raises(NotImplementedError, match=r"inside a transform of torch\.func"):
            call(x.reshape(7, 10, HIDDEN))


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_second_derivatives_raise(recipe, recompute):
    """Also of a penalty on dx: where codes are saved in place of x, autograd would omit the experts' part."""
    layer, x = module(recipe, recompute=recompute), tokens()
    ids, probs = torch.zeros(len(x), TOPK, dtype=torch.int32), torch.ones(len(x), TOPK)

    def gradient(y, dy):
        return torch.autograd.grad(y, x, dy, create_graph=True)[0]

    for forward in (lambda: layer(x), lambda: layer(x, ids, probs)):
        y, dy = forward(), gradient_of(forward())
        with pytest.raises(RuntimeError, match="not twice differentiable"):
            (gradient(y, dy).square() + x).sum().backward()
        y = forward()
        with pytest.raises(RuntimeError, match="not twice differentiable"):
            torch.autograd.grad(y.sum() + gradient(y, dy).square().sum(), x)
        y = forward()
        with pytest.raises(RuntimeError, match="not twice differentiable"):
            gradient(y, dy.clone().requires_grad_()).sum().backward()


@pytest.mark.parametrize("trained", ["router", "experts", "x"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow"])
def test_export_that_would_lose_gradients_raises(recipe, trained):
    """An exported program contains only operators without gradients; its result would be a constant."""
    layer, x = module(recipe), tokens().detach()
    layer.requires_grad_(trained == "experts")
    layer.router.requires_grad_(trained == "router")
    x.requires_grad_(trained == "x")
    with pytest.raises(NotImplementedError, match=r"torch.export: .*; export under torch\.no_grad\(\)"):
        torch.export.export(layer, (x,))
    with torch.no_grad():
        program = torch.export.export(layer, (x,)).module()
        assert torch.equal(program(x), layer(x))


class Experts(torch.nn.Module):
    """`moe_experts_permuted` with biases, of the counts' experts."""

    def __init__(self, recipe):
        super().__init__()
        self.recipe = recipe
        for name, *shape in (("w13", 2 * FFN, HIDDEN), ("w2", HIDDEN, FFN), ("b13", 2 * FFN), ("b2", HIDDEN)):
            self.register_buffer(name, torch.randn(EXPERTS, *shape, dtype=torch.bfloat16))

    def forward(self, x, counts, probs):
        options = {"recipe": self.recipe, "bias13": self.b13, "bias2": self.b2}
        return fp8moe.torch.moe_experts_permuted(x, self.w13, self.w2, counts, probs, **options)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow"])
def test_exported_for_any_number_of_tokens(recipe, permuted, strict):
    """Without strict, torch.export runs the Python code itself, in which ``len`` is a constant."""
    torch.compiler.reset()
    layer = Experts(recipe) if permuted else module(recipe)

    def inputs(count):
        x = torch.randn(count, HIDDEN, dtype=torch.bfloat16)
        return (x, torch.tensor([count - 5, 0, 3, 2]), torch.rand(count)) if permuted else (x,)

    rows = {0: torch.export.Dim("rows", min=5, max=4096)}
    shapes = (rows, None, rows) if permuted else (rows,)
    with torch.no_grad():
        program = torch.export.export(layer, inputs(10), dynamic_shapes=shapes, strict=strict).module()
        for count in (10, 33):
            arguments = inputs(count)
            assert torch.equal(program(*arguments), layer(*arguments))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch reads it
@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow"])
def test_compiled_autograd_runs_the_backward_of_an_eager_forward(recipe):
    layer, x = module(recipe), tokens()
    wanted = results(layer, layer, x)
    x.grad = None
    layer.zero_grad()
    y = layer(x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        y.backward(gradient_of(y))
    assert_equal([y.detach(), x.grad, *(p.grad for p in layer.parameters())], wanted)


# ---------------------------------------------------------------- training loops


@pytest.mark.parametrize("recipe", RECIPES)
def test_functional_call(recipe, device):
    layer, x = module(recipe, device), tokens(device)
    other = {name: (p.detach() * 2).requires_grad_() for name, p in layer.named_parameters()}
    y = torch.func.functional_call(layer, other, (x,))
    y.backward(gradient_of(y))
    actual = [y.detach(), x.grad, *(p.grad for p in other.values())]
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    assert_equal(actual, results(twin, twin, x))
    assert all(p.grad is None for p in layer.parameters())


def test_scaled_losses(device):
    """A power of two as the loss scale changes no code; the optimizer's step with a scaler equals that
    without."""
    layer, x = module(device=device), tokens(device)
    plain = copy.deepcopy(layer)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    for net, scale in ((plain, None), (layer, scaler)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(x).float().square().mean()
            (loss if scale is None else scale.scale(loss)).backward()
            if scale is None:
                optimizer.step()
            else:
                scale.step(optimizer)
                scale.update()
    for a, b in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fake_tensors(recipe, recompute):
    """Shapes, dtypes and strides of all results are those of real tensors, as memory estimates require."""

    def described():
        layer, x = FP8FlowMoE(HIDDEN, FFN, EXPERTS, TOPK, recipe=recipe, recompute=recompute), tokens()
        with torch.no_grad():
            y = layer(x)
        with layer.weights_unchanged():
            trained = results(layer, layer, x)
        _, ids, probs = (t.detach() for t in layer.route(x.detach()))
        functional = fp8moe.torch.moe_experts(x, layer.w13, layer.w2, ids, probs, recipe=recipe)
        return [(t.shape, t.dtype, t.stride()) for t in (y, *trained, functional)]

    real = described()
    with FakeTensorMode():
        assert described() == real


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_make_fx_with_real_tensors(recipe, recompute):
    """The graph computes the results of other tokens, not of memory that was never written."""
    layer = module(recipe, recompute=recompute)

    def results_of(x):
        y = layer(x)
        return y, *torch.autograd.grad(y, (x, *layer.parameters()), torch.ones_like(y))

    graph, x = make_fx(results_of)(tokens()), tokens()
    with torch.no_grad():  # the graph has the backward's operators
        actual = graph(x)
    assert all(map(torch.equal, actual, results_of(x)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_deterministic_algorithms(recipe, device):
    layer, x = module(recipe, device), tokens(device)
    wanted = results(layer, layer, x)
    torch.use_deterministic_algorithms(True)
    try:
        assert_equal(results(layer, layer, x), wanted)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("recipe", RECIPES)
def test_inference_mode(recipe, device):
    layer, x = module(recipe, device), tokens(device)
    with torch.inference_mode():
        y = layer(x.clone())
    wanted = results(layer, layer, x)  # caches filled here are not used below
    assert torch.equal(y, wanted[0])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(recipe, dtype):
    layer, x = module(recipe), tokens()
    twin = copy.deepcopy(layer).to(dtype)
    assert twin.w13.dtype == dtype
    y, _, *grads = results(twin, twin, x)
    assert y.dtype == x.dtype
    assert all(g.dtype == dtype for g in grads)
    same = module(recipe)
    with torch.no_grad():
        for p, q in zip(same.parameters(), twin.parameters(), strict=True):
            p.copy_(q)
    wanted = results(same, same, x)
    assert torch.equal(y, wanted[0])
    assert_equal(grads[1:], [g.to(dtype) for g in wanted[3:]])


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", ["fp8_blockwise", "fp8_flow"])
def test_stats(recipe, recompute, device):
    layer, x = module(recipe, device, recompute=recompute), tokens(device)
    with torch.no_grad():
        x *= torch.exp2(torch.randint(-12, 12, x.shape, device=device))
        x[3, 5], x[4, 200] = float("inf"), float("-inf")
        x[9, :128] = 0
    with pytest.raises(RuntimeError, match="stats: got no forward with statistics"):
        layer.stats()
    layer.collect_stats = True
    y = layer(x)
    dy = gradient_of(y)
    y.backward(dy)
    stats = layer.stats()
    _, ids, _ = layer.route(x)
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    assert torch.equal(stats.rows_per_expert.long(), counts)
    assert not stats.overflow.any()
    for actual, values in ((stats.x, x), (stats.dy, dy)):
        counts = actual.amax, actual.nonfinite, actual.saturated, actual.flushed
        assert tuple(c.item() for c in counts) == lost(values.detach().cpu().double().numpy())
        assert actual.elements == values.numel()
    assert stats.x.nonfinite.item() == 2
    assert stats.x.flushed.item() > 100
    assert (stats.a is None) == (recompute is not None)
    with pytest.raises(RuntimeError, match="collect_stats: got True in compiled code"):
        compiled(layer)(x)
    twin = copy.deepcopy(layer)
    with pytest.raises(RuntimeError, match="stats: got no forward with statistics"):
        twin.stats()


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "fp8_flow"])
def test_stats_count_ids_without_an_expert(recipe, device):
    layer, x = module(recipe, device, router=False), tokens(device)
    layer.collect_stats = True
    ids = torch.randint(-2, EXPERTS + 2, (len(x), TOPK), device=device)
    for given in (ids, ids % EXPERTS, ids % EXPERTS + 1):  # the last ones count from one
        layer(x, given, torch.rand(len(x), TOPK, device=device))
        stats, flat = layer.stats(), given.flatten().tolist()
        assert stats.invalid_ids.item() == sum(i >= EXPERTS for i in flat)
        assert stats.negative_ids.item() == sum(i < 0 for i in flat)
        assert stats.rows_per_expert.tolist() == [flat.count(e) for e in range(EXPERTS)]


def test_stats_of_the_activation(device):
    """Compared with float64: the same values except for roundings of h and of a to bfloat16."""
    layer, x = module(device=device), tokens(device)
    layer.collect_stats = True
    with torch.no_grad():  # h, from which it is computed, is saved even so
        layer(x)
    without = layer.stats().a
    layer(x)
    assert torch.equal(layer.stats().a.amax, without.amax)
    _, ids, probs = layer.route(x)
    largest = 0.0
    for e in range(EXPERTS):
        share = (probs.double() * (ids == e)).sum(dim=-1, keepdim=True)
        gate, up = (x.double() @ layer.w13[e].double().t()).chunk(2, dim=-1)
        largest = max(largest, (share * torch.nn.functional.silu(gate) * up).abs().max().item())
    # two casts of x and w13 to E4M3 (at most 2^-4 each) in each factor, as in tests/test_moe.py
    assert layer.stats().a.amax.item() == pytest.approx(largest, rel=4 * 2.0**-4)
    assert layer.stats().a.nonfinite.item() == 0


def test_stats_do_not_count_padding(device):
    """Neither padding rows nor the columns that pad the FP8 copies of the weights."""
    torch.manual_seed(0)
    layer, x = FP8FlowMoE(HIDDEN, 96, EXPERTS, TOPK, device=device), tokens(device)
    layer.collect_stats = True
    layer(x)
    assert layer.stats().a.elements.item() == len(x) * TOPK * 96
    with torch.no_grad():
        layer.w13[1, 0] = float("nan")
    layer(x)
    stats = layer.stats()
    assert stats.a.nonfinite.item() == stats.rows_per_expert[1].item()


# ---------------------------------------------------------------- the operators


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_operator_schemas_and_fakes_are_correct(recipe, recompute):
    """Schemas (written arguments) and fakes (shapes, strides, symbols), with and without ``main_grad``."""
    layer, x = module(recipe), tokens().detach()
    _, ids, probs = (t.detach() for t in layer.route(x))
    weights = [w.detach().bfloat16() for w in (layer.w13, layer.w2)]
    gemm_weights = weights
    if recipe != "bf16":
        gemm_weights = arrays_in(tuple(fp8moe.quantize_weights(w) for w in weights))
    tests = ("test_schema", "test_faketensor")
    forward, backward = OPERATORS["experts"], OPERATORS["experts_backward"]
    formats = "" if recipe == "bf16" else "e4m3,e4m3,e4m3,e4m3"
    gradients = "dx,dprobs,dw13,dw2", False, False, False, False, formats
    every = Options(LayerOptions(fp8moe.Activation(), recipe, recompute), 0, None, False, *gradients)
    for options in (every, every._replace(gradients="dx,dprobs"), every._replace(gradients="")):
        arguments = forward.flatten((x, gemm_weights, ids, probs, options))
        torch.library.opcheck(forward.op, arguments, test_utils=tests)
        if not options.gradients:
            continue
        y, *saved_tensors = forward.op(*arguments)
        backward_weights = gemm_weights
        if recipe != "bf16":
            backward_weights = [
                *(gemm_weights[:2] if recompute else []),
                *gemm_weights[2:4],
                *gemm_weights[6:],
            ]
        cases = [((None,) * 3, [False] * 3, None, False)]
        if "dw13" in options.gradients:
            w13, w2 = (torch.zeros(w.shape) for w in weights)
            mains = w13, None, w2
            cases += [(mains, [False] * 3, None, False), (mains, [True, False, True], None, False)]
            if recipe == "fp8_flow":  # w1 and w3 as a pair, also padded
                halves = tuple(h.contiguous() for h in w13.chunk(2, dim=1))
                cut = torch.zeros(EXPERTS, 200, HIDDEN), None, torch.zeros(EXPERTS, HIDDEN, 100)
                cases += [((*halves, w2), [True, False, True], None, True), (cut, [False] * 3, 100, False)]
                cases += [((None,) * 3, [False] * 3, 100, is_pair) for is_pair in (True, False)]
        for mains, zeros, ffn, is_pair in cases:
            targets = Targets(*mains, torch.float32, torch.float32, zeros, None)
            given = gradient_of(y), saved_tensors, backward_weights, ids, probs, targets
            flat = backward.flatten((*given, options._replace(ffn=ffn, w13_is_pair=is_pair)))
            torch.library.opcheck(backward.op, flat, test_utils=tests)


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_memory_of_a_dropped_graph_is_freed_at_once(recipe, recompute, device, frozen_objects):
    """Not only when Python's collector next finds a reference cycle."""
    layer, x = module(recipe, device, recompute=recompute), tokens(device, count=1024)
    layer(x).sum().backward()
    layer.zero_grad(set_to_none=True)
    x.grad = None
    gc.collect()
    gc.disable()
    try:
        start = torch.cuda.memory_allocated() if device == "cuda" else 0
        y = layer(x)
        weak = weakref.ref(y)
        del y
        assert weak() is None
        if device == "cuda":
            assert torch.cuda.memory_allocated() == start
    finally:
        gc.enable()
