"""The layer in torch's zero-bubble pipeline schedules, which split a backward into `stage_backward_input` and
`stage_backward_weight` of torch.distributed.pipelining."""

import collections

import pytest

torch = pytest.importorskip("torch")
from torch.distributed.pipelining._backward import (  # noqa: E402
    stage_backward_input,
    stage_backward_weight,
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import fp8moe  # noqa: E402
from fp8moe import RouterConfig  # noqa: E402
from fp8moe.adapters.torch import ops as torch_ops  # noqa: E402
from fp8moe.adapters.torch.functional import moe_experts  # noqa: E402
from fp8moe.adapters.torch.layer import FP8FlowMoE  # noqa: E402
from fp8moe.adapters.torch.router import Router  # noqa: E402


def products_of(traced):
    """[products of rows, weight gradients]"""
    of_rows = traced.launches["grouped_gemm"] + traced.launches["permute_gemm"]
    return [of_rows, traced.launches["grouped_gemm_wgrad"]]


class Operators(TorchDispatchMode):
    """Counts torch's operators by name."""

    def __enter__(self):
        self.counts = collections.Counter()
        super().__enter__()
        return self.counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **kwargs or {})


def in_halves(y, dy, x, weights, counted=fp8moe.trace):
    """Launches of the two halves, which leave gradients as `backward` does."""
    if torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 cannot split the backward of any torch.autograd.Function")
    weights = list(weights)
    with counted() as first:
        _, groups = stage_backward_input([y], [dy], [x], iter(weights))
    with counted() as second:
        stage_backward_weight(iter(weights), groups)
    return first, second


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_a_stage_of_two_layers(recipe, recompute):
    """Gradients are bitwise those of one backward, and no product is computed twice."""
    stage = torch.nn.Sequential(*(FP8FlowMoE(128, 128, 4, 2, recipe=recipe) for _ in range(2)))
    for layer in stage:
        layer.recompute = recompute
    x, dy = torch.randn(2, 40, 128)
    actual = []
    for halves in (False, True):
        stage.zero_grad()
        arguments = x.clone().requires_grad_()
        for micro_batch in (1.0, 2.0):  # gradients accumulate
            arguments.grad = None
            y = stage(arguments * micro_batch)
            with fp8moe.trace() as whole:
                if halves:
                    counted = Operators if recipe == "bf16" else fp8moe.trace
                    first, second = in_halves(y, dy, arguments, stage.parameters(), counted)
                else:
                    y.backward(dy)
        actual.append([arguments.grad, *(p.grad for p in stage.parameters())])
        products = 6 if recompute else 4
        if recipe == "bf16":  # with torch's products
            if halves:
                assert [counts["_grouped_mm"] for counts in (first, second)] == [products, 4]
            continue
        assert products_of(whole) == [products, 4]
        if halves:
            assert products_of(first) == [products, 0]
            assert products_of(second) == [0, 4]
    for a, b in zip(*actual, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("counts", [None, torch.tensor([16, 0, 24], dtype=torch.int32)])
def test_grouped_gemm_in_halves(transpose_w, counts):
    """Two successive products: each gradient is computed once, in its half."""
    x, dy = torch.randn(2, 40, 128)
    weights = torch.nn.ParameterList([*torch.randn(2, 3, 128, 128) / 11])
    offsets, actual = torch.tensor([0, 16, 16, 40], dtype=torch.int32), []
    for halves in (False, True):
        weights.zero_grad()
        arguments = x.clone().requires_grad_()
        y = arguments
        for w in weights:
            y = torch_ops.grouped_gemm(y, w, offsets, counts, transpose_w=transpose_w)
        if halves:
            launches = [products_of(t) for t in in_halves(y, dy, arguments, weights)]
            assert launches == [[2, 0], [0, 2]]
        else:
            y.backward(dy)
        actual.append([arguments.grad, *(w.grad for w in weights)])
    for a, b in zip(*actual, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("pass_rows", [False, True])
def test_router_in_halves(pass_rows):
    """With the halves computed by autograd itself: torch's schedules support nodes with several results only
    from torch 2.13 on."""
    x = torch.randn(300, 128, device="cuda").bfloat16().requires_grad_()
    router = Router(128, 8, RouterConfig(2), device="cuda")
    *rows, _, probs = router(x, pass_rows=pass_rows)
    y = sum(t.float().square().sum() for t in (probs, *rows))
    wanted = torch.autograd.grad(y, [x, router.weight], retain_graph=True)
    for leaf, grad in zip((x, router.weight), wanted, strict=True):
        with Operators() as counts:
            (actual,) = torch.autograd.grad(y, leaf, retain_graph=True)
        assert torch.equal(actual, grad)
        by_kernel = pass_rows and leaf is x and torch.cuda.get_device_capability() == (9, 0)
        assert counts["mm"] + counts["addmm"] == (not by_kernel)


@pytest.mark.parametrize("zeros", [False, True])
def test_main_grad_is_accumulated_once(zeros):
    """Also if Megatron set the attribute, and expects zeros as ``grad``."""
    actual = []
    x, dy = torch.randn(2, 40, 128)
    torch.manual_seed(3)
    layer = FP8FlowMoE(128, 128, 4, 2)
    for halves in (False, True):
        for w in (layer.w13, layer.w2):
            w.main_grad, w.grad = torch.full_like(w, 0.5), None
            if zeros:
                w.grad_added_to_main_grad = False
        arguments = x.clone().requires_grad_()
        y = layer(arguments)
        if halves:
            in_halves(y, dy, arguments, layer.parameters())
        else:
            y.backward(dy)
        assert all(w.grad is None or not w.grad.any() for w in (layer.w13, layer.w2))
        actual.append((layer.w13.main_grad, layer.w2.main_grad, arguments.grad))
    for a, b in zip(*actual, strict=True):
        assert torch.equal(a, b)


def problem():
    x, dy = (torch.randn(40, 128).bfloat16() for _ in range(2))
    w1, w3, w2 = torch.randn(3, 3, 128, 128) / 11
    ids, probs = torch.randint(-1, 3, (40, 2)), torch.rand(40, 2)
    leaves = [t.requires_grad_() for t in (x, w1, w3, w2, probs)]
    return leaves, ids, dy


def test_gradients_of_some_inputs_compute_only_those():
    leaves, ids, dy = problem()
    x, w1, w3, w2, probs = leaves

    def forward():
        return moe_experts(x, (w1, w3), w2, ids, probs)

    wanted = torch.autograd.grad(forward(), leaves, dy)
    cases = [
        ((0,), (2, 0)),
        ((4,), (2, 0)),
        ((1, 2), (1, 2)),
        ((3,), (0, 1)),
        ((0, 3), (2, 1)),
    ]
    for numbers, (products, of_weights) in cases:
        y = forward()
        with fp8moe.trace() as t:
            grads = torch.autograd.grad(y, [leaves[n] for n in numbers], dy)
        for n, a in zip(numbers, grads, strict=True):
            assert torch.equal(a, wanted[n]), n
        assert products_of(t) == [products, of_weights], numbers


def test_saved_half_is_used_once_for_the_same_gradient():
    """Another dy, a modified dy, the same dy again, and a whole backward after a half all start from the
    beginning."""
    leaves, ids, dy = problem()
    x, *weights = leaves[0], *leaves[1:4]

    def both(y, first, second):
        torch.autograd.grad(y, x, first, retain_graph=True)
        return torch.autograd.grad(y, weights, second, retain_graph=True)

    y = moe_experts(x, tuple(leaves[1:3]), leaves[3], ids, leaves[4])
    wanted = {s: torch.autograd.grad(y, weights, s * dy, retain_graph=True) for s in (1, 2)}
    changed = dy.clone()
    torch.autograd.grad(y, x, changed, retain_graph=True)
    changed.mul_(2)
    for grads, scale in (
        (both(y, dy, dy), 1),
        (torch.autograd.grad(y, weights, dy, retain_graph=True), 1),
        (both(y, dy, 2 * dy), 2),
        (torch.autograd.grad(y, weights, changed, retain_graph=True), 2),
    ):
        for a, b in zip(grads, wanted[scale], strict=True):
            assert torch.equal(a, b)
    torch.autograd.grad(y, x, dy, retain_graph=True)
    y.backward(dy)
    for w, b in zip(weights, wanted[1], strict=True):
        assert torch.equal(w.grad, b)


def test_no_half_is_saved_without_retain_graph():
    leaves, ids, dy = problem()
    for keep in (False, True):
        y = moe_experts(leaves[0], tuple(leaves[1:3]), leaves[3], ids, leaves[4])
        with fp8moe.trace() as t:
            torch.autograd.grad(y, leaves[0], dy, retain_graph=keep)
        node = next(n for n in nodes_of(y.grad_fn) if hasattr(n, "half"))
        assert (node.half is not None) == keep
        assert t.launches["grouped_gemm_wgrad"] == 0


def nodes_of(node):
    if node is not None:
        yield node
        for parent, _ in node.next_functions:
            yield from nodes_of(parent)


def test_compiled_layer_does_not_accumulate_main_grad_twice():
    """The compiled layer is one node of autograd's graph, which both halves would run completely."""
    # after earlier tests with dynamic sizes torch itself raises, because of donated buffers
    torch.compiler.reset()
    layer = FP8FlowMoE(128, 128, 4, 2)
    for w in (layer.w13, layer.w2):
        w.main_grad = torch.zeros_like(w, dtype=torch.float32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, dy = torch.randn(2, 40, 128)
    x.requires_grad_()
    with pytest.raises(
        RuntimeError, match="main_grad: got a backward of a compiled layer that keeps its graph"
    ):
        torch.autograd.grad(compiled(x), x, dy, retain_graph=True)  # like the first half of torch's schedules
    assert not layer.w13.main_grad.any()
    compiled(x).backward(dy)
    assert layer.w13.main_grad.any()


class Biased(torch.nn.Module):
    def __init__(self, recipe, recompute):
        super().__init__()
        self.options = {"recipe": recipe, "recompute": recompute}
        sizes = {"w13": (4, 256, 128), "w2": (4, 128, 128), "bias13": (4, 256), "bias2": (4, 128)}
        for name, size in sizes.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(size) / 8))

    def forward(self, x, ids, probs):
        biases = {"bias13": self.bias13, "bias2": self.bias2}
        return x + moe_experts(x, self.w13, self.w2, ids, probs, **self.options, **biases)


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_experts_with_biases(recipe, recompute):
    """The second half computes the biases' gradients, too, from what the first one kept."""
    experts, (x, dy) = Biased(recipe, recompute), torch.randn(2, 300, 128)
    ids, probs = torch.rand(300, 4).topk(2).indices, torch.rand(300, 2)
    actual = []
    for halves in (False, True):
        experts.zero_grad()
        rows = x.clone().requires_grad_()
        y = experts(rows, ids, probs)
        if halves:
            first, second = in_halves(y, dy, rows, experts.parameters())
            assert products_of(first) == [3 if recompute else 2, 0]
            assert products_of(second) == [0, 2]
        else:
            y.backward(dy)
        actual.append([rows.grad, *(p.grad for p in experts.parameters())])
    for one, other in zip(*actual, strict=True):
        assert torch.equal(one, other)
