"""Weight gradients that the GEMM adds to ``grad``, and those that it must not. Doors to other libraries have
tests of their own, by `check_added`."""

import contextlib

import numpy as np
import pytest
import torch
from cases import SEED
from grad_sums import check_added, float32_gradients, local, some_grads, sums
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fp8moe
import fp8moe.torch
from fp8moe.adapters.torch import accumulation, grouped
from fp8moe.adapters.torch.distributed.process_group import ProcessGroup
from fp8moe.adapters.torch.sharding import local_of
from fp8moe.torch import FP8FlowMoE, gather_fp8, set_fuse_wgrad_accumulation

T, H, F, E, K = 48, 128, 128, 4, 2
BF16 = torch.bfloat16


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    with torch.device(request.param):
        yield request.param


def weights(dtype=BF16, ffn=F, pair=False):
    """w13 (or w1 and w3) and w2."""
    rows = (ffn, ffn) if pair else (2 * ffn,)
    first = [torch.randn(E, n, H).div(H**0.5) for n in rows]
    return [w.to(dtype).requires_grad_() for w in (*first, torch.randn(E, H, ffn).div(ffn**0.5))]


def routed(dtype=BF16):
    """Rows, ids, probabilities and the gradient of y."""
    probs, ids = torch.rand(T, E).topk(K)
    return torch.randn(T, H).to(dtype), ids, probs, torch.randn(T, H)


def function(w, data, **options):
    """y of `moe_experts`. w: as `weights` returns them."""
    x, ids, probs, _ = data
    w13 = w[0] if len(w) == 2 else tuple(w[:2])
    return fp8moe.torch.moe_experts(x, w13, w[-1], ids, probs, **options)


def backward(w, data, **options):
    """A forward and a backward of `moe_experts`."""
    y = function(w, data, **options)
    y.backward(data[3].to(y.dtype))


def permuted(w, data, **options):
    x, _, _, dy = data
    counts = torch.tensor([7, 0, 30, 11])
    probs = torch.linspace(0.1, 1, T)
    fp8moe.torch.moe_experts_permuted(x, w[0], w[1], counts, probs, **options).backward(dy.to(x.dtype))


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


# ---------------------------------------------------------------- where the GEMM adds


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise"])
def test_the_functions_add_in_the_gemm(recipe, recompute, device):
    options = {"recipe": recipe, "recompute": recompute}
    w, data = weights(), routed()
    check_added(w, lambda: backward(w, data, **options))
    check_added(w, lambda: permuted(w, data, **options))
    if recipe == "fp8_flow":  # the other concatenates w1 and w3
        pair = weights(pair=True)
        check_added(pair, lambda: backward(pair, data, **options))


def test_weights_padded_to_multiples_of_128(device):
    """The GEMM adds to separate weights, and to each half of w13 in one tensor."""
    data = routed()
    for pair in (True, False):
        w = weights(ffn=72, pair=pair)
        check_added(w, lambda w=w: backward(w, data))


def test_experts_with_biases(device):
    """The weights' gradients are added in the GEMMs, the biases' by autograd."""
    w, data = weights(), routed()
    biases = {
        name: torch.randn(E, n).to(BF16).requires_grad_() for name, n in (("bias13", 2 * F), ("bias2", H))
    }
    check_added(w, lambda: backward(w, data, **biases))
    assert all(b.grad.any() for b in biases.values())


@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_float32_weights_get_the_same_bits(recipe, device):
    w, data = weights(torch.float32), routed(torch.float32)
    check_added(w, lambda: backward(w, data, recipe=recipe))
    set_fuse_wgrad_accumulation(False)
    try:
        check_added(w, lambda: backward(w, data, recipe=recipe))
    finally:
        set_fuse_wgrad_accumulation(True)


def test_the_module_adds_in_the_gemm(device):
    layer = FP8FlowMoE(H, F, E, K, dtype=BF16)
    x, _, _, dy = routed()
    check_added([layer.w13, layer.w2], lambda: layer(x).backward(dy.to(BF16)))


def test_shards_are_added_to_in_the_gemm(group):
    """As expert parallelism has them; tests/torch_functional_rank.py has the module on two ranks."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    plain, data = weights(), routed()
    exact = float32_gradients(plain, lambda: backward(plain, data))
    w = [torch.nn.Parameter(DTensor.from_local(t.detach(), mesh, [Shard(0)])) for t in plain]
    for part, hooked in ((local_of, False), (local_of, True), (DTensor.to_local, False)):
        handle = w[0].register_hook(lambda g: None) if hooked else contextlib.nullcontext()
        old = some_grads(w)
        with handle:
            backward([part(t) for t in w], data)
        for n, (t, before, gradient) in enumerate(zip(w, old, exact, strict=True)):
            fused = part is local_of and not (hooked and n == 0)
            assert t.grad.placements == t.placements
            assert torch.equal(local(t.grad), sums(before, gradient)[0 if fused else 1])


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_grouped_gemm_adds_in_the_gemm(transpose_w, dtype, device):
    w = torch.randn(E, H, F).to(dtype).requires_grad_()
    x, dy = (torch.randn(T, n).to(dtype) for n in ((H, F) if transpose_w else (F, H)))
    offsets = torch.tensor([0, 7, 7, 37, T], dtype=torch.int32)
    pair = (x, dy) if transpose_w else (dy, x)
    exact = fp8moe.grouped_gemm_wgrad(*pair, offsets)
    for graph in (False, True):
        (old,) = some_grads([w])
        y = fp8moe.torch.grouped_gemm(x, w, offsets, transpose_w=transpose_w)
        y.backward(dy, create_graph=graph)
        assert torch.equal(w.grad, sums(old, exact)[1 if graph else 0])


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_bfloat16_experts_of_this_librarys_gemms_add_in_them(recompute, device, monkeypatch):
    """As on Hopper. A separate gradient and each of the sums are rounded to bfloat16, by 2^-8 at most."""
    monkeypatch.setattr(grouped, "on_hopper", lambda x: True)
    w, data = weights(), routed()
    results = []
    for enabled in (True, False):
        set_fuse_wgrad_accumulation(enabled)
        try:
            torch.manual_seed(SEED)
            old = some_grads(w)
            backward(w, data, recipe="bf16", recompute=recompute)
        finally:
            set_fuse_wgrad_accumulation(True)
        results.append([t.grad.float() for t in w])
    for fused, apart, before in zip(*results, old, strict=True):
        gradient = ((apart - before.float()).abs() + 2.0**-8 * apart.abs()) / (1 - 2.0**-8)
        bound = 2.0**-8 * (fused.abs() + apart.abs() + gradient)
        assert ((fused - apart).abs() <= bound).all()
        assert not torch.equal(fused, apart)


@pytest.mark.parametrize("chunks", [1, 2])
def test_rows_of_other_ranks(chunks, group):
    """A sum over chunks, which is in float32, is rounded once."""
    w, data = weights(), routed()
    comm = ProcessGroup(overlap_chunks=chunks)
    check_added(w, lambda: backward(w, data, comm=comm), chunks == 1)


def test_zeros_are_added_to_in_the_first_micro_batch():
    """As after zero_grad(set_to_none=False); a first gradient has the same bits without a ``grad``."""
    w, data = weights(), routed()
    backward(w, data)
    first = [t.grad for t in w]
    for t in w:
        t.grad = torch.zeros_like(t)
    versions = [t.grad._version for t in w]
    backward(w, data)
    for t, wanted, version in zip(w, first, versions, strict=True):
        assert torch.equal(t.grad, wanted)
        assert t.grad._version > version


def test_one_weight_without_a_grad():
    w, data = weights(pair=True), routed()
    exact, old = float32_gradients(w, lambda: backward(w, data)), some_grads(w)
    w[1].grad = None
    backward(w, data)
    for t, before, gradient in zip(w, (old[0], None, old[2]), exact, strict=True):
        wanted = gradient.to(BF16) if before is None else sums(before, gradient)[0]
        assert torch.equal(t.grad, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_experts_add_in_the_gemm(reentrant):
    w, data = weights(), routed()
    data[0].requires_grad_()

    def run():
        y = checkpoint(function, w, data, use_reentrant=False)
        if reentrant:
            y = checkpoint(lambda x: function(w, (x, *data[1:])), data[0], use_reentrant=True)
        y.backward(data[3].to(BF16))

    check_added(w, run)


def test_weights_of_two_layers_and_of_a_penalty(device):
    """Each layer adds in its GEMM, then autograd adds the penalty's gradient, w."""
    w, data, other = weights(), routed(), routed()
    exact = [float32_gradients(w, lambda d=d: backward(w, d)) for d in (data, other)]
    old = some_grads(w)
    loss = sum((function(w, d).float() * d[3].to(BF16)).sum() for d in (data, other))
    (loss + sum(t.float().square().sum() / 2 for t in w)).backward()
    for t, before, a, b in zip(w, old, *exact, strict=True):
        either = [
            ((before.float() + g).to(BF16).float() + h).to(BF16) + t.detach() for g, h in ((a, b), (b, a))
        ]
        assert any(torch.equal(t.grad, wanted) for wanted in either)


def test_two_backwards_of_one_graph():
    w, data = weights(), routed()
    exact, old = float32_gradients(w, lambda: backward(w, data)), some_grads(w)
    y = function(w, data)
    for _ in range(2):
        y.backward(data[3].to(BF16), retain_graph=True)
    for t, wanted, gradient in zip(w, old, exact, strict=True):
        for _ in range(2):
            wanted = sums(wanted, gradient)[0]
        assert torch.equal(t.grad, wanted)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_float32_grad_of_narrow_weights_gets_the_float32_sum(dtype):
    """By ``grad_dtype``; autograd's sum would have the gradient rounded to the weight's dtype."""
    w, data = weights(dtype), routed()
    exact = float32_gradients(w, lambda: backward(w, data))
    for t in w:
        t.grad_dtype = torch.float32
        t.grad = torch.randn(t.shape)
    old = [t.grad.clone() for t in w]
    backward(w, data)
    for t, before, gradient in zip(w, old, exact, strict=True):
        assert torch.equal(t.grad, before + gradient)
        assert not torch.equal(t.grad, before + gradient.to(dtype).float())


def test_dispatch_modes_change_no_bits():
    w, data = weights(), routed()
    accumulation._no_entries.cache_clear()  # made in a mode, whose tensors it must not keep
    with FlopCounterMode(display=False):
        check_added(w, lambda: backward(w, data))
    check_added(w, lambda: backward(w, data))


def test_deterministic_algorithms(device):
    w, data = weights(), routed()
    accumulation._no_entries.cache_clear()
    torch.use_deterministic_algorithms(True)
    try:
        check_added(w, lambda: backward(w, data))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_graph_that_has_saved_the_old_grad_notices():
    w, data = weights(), routed()
    some_grads(w)
    scale = torch.ones((), dtype=BF16, requires_grad=True)
    other = (scale * w[0].grad).sum()
    backward(w, data)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


# ---------------------------------------------------------------- streams


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_layers_on_two_streams():
    """One adds in its GEMM; the gradient of the other is separate, and autograd adds it afterwards."""
    with torch.device("cuda"):
        w, data, other = weights(), routed(), routed()
        exact = [float32_gradients(w, lambda d=d: backward(w, d)) for d in (data, other)]
        for _ in range(10):
            old, current, results = some_grads(w), torch.cuda.current_stream(), []
            for d in (data, other):
                stream = torch.cuda.Stream()
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    results.append((function(w, d).float() * d[3].to(BF16)).sum())
                current.wait_stream(stream)
            sum(results).backward()
            for t, before, a, b in zip(w, old, *exact, strict=True):
                either = [(before.float() + g).to(BF16) + h.to(BF16) for g, h in ((a, b), (b, a))]
                assert any(torch.equal(t.grad, wanted) for wanted in either)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_a_step_on_another_stream(captured):
    """Also in a CUDA graph, which adds to the memory of the ``grad`` that it was captured with."""
    with torch.device("cuda"):
        w, data = weights(), routed()
        exact = float32_gradients(w, lambda: backward(w, data))
        some_grads(w)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                backward(w, data)
        torch.cuda.current_stream().wait_stream(stream)
        if captured:
            with torch.cuda.graph(graph, stream=stream):
                backward(w, data)
        old = [t.grad.clone() for t in w]
        for _ in range(2):
            if captured:
                graph.replay()
            else:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    backward(w, data)
                torch.cuda.current_stream().wait_stream(stream)
        for t, wanted, gradient in zip(w, old, exact, strict=True):
            for _ in range(2):
                wanted = sums(wanted, gradient)[0]
            assert torch.equal(t.grad, wanted)


# ---------------------------------------------------------------- where it must not


@contextlib.contextmanager
def _unfused():
    set_fuse_wgrad_accumulation(False)
    yield
    set_fuse_wgrad_accumulation(True)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", ["tensor", "before", "after", "multi"])
def test_a_hook_of_a_weight_gets_the_separate_gradient(kind, number):
    """Only that weight's is separate; after the hook's removal it is not."""
    w, data, seen = weights(), routed(), []
    node = torch.autograd.graph.get_gradient_edge(w[number]).node  # held, so that it keeps its hooks

    def hooked():
        if kind == "tensor":
            return w[number].register_hook(see)
        if kind == "before":
            return node.register_prehook(lambda grads: see(*grads))
        if kind == "after":
            return node.register_hook(lambda _, grads: see(*grads))
        return torch.autograd.graph.register_multi_grad_hook((w[number],), lambda grads: see(*grads))

    def see(g):
        seen.append(None if g is None else g.clone())  # None: added to a main_grad

    exact = float32_gradients(w, lambda: backward(w, data))
    handle = hooked()
    check_added(w, lambda: backward(w, data), [n != number for n in range(2)])
    assert torch.equal(seen[-1], exact[number].to(BF16))
    handle.remove()
    check_added(w, lambda: backward(w, data))


def test_a_hook_after_the_accumulation_runs_and_may_step():
    """As an optimizer in the backward."""
    w, data = weights(), routed()
    exact, old, before = float32_gradients(w, lambda: backward(w, data)), some_grads(w), w[1].detach().clone()

    def step(p):
        assert torch.equal(p.grad, sums(old[1], exact[1])[1])
        with torch.no_grad():
            p -= p.grad
        p.grad = None

    w[1].register_post_accumulate_grad_hook(step)
    backward(w, data)
    assert w[1].grad is None
    assert torch.equal(w[1], before - sums(old[1], exact[1])[1])


def test_a_hook_of_the_experts_node_gets_the_separate_gradients():
    w, data, seen = weights(), routed(), []

    def run():
        y = function(w, data)
        node = y.grad_fn
        while "Experts" not in node.name():
            node = node.next_functions[0][0]
        node.register_hook(lambda grads, _: seen.append(grads))
        y.backward(data[3].to(BF16))

    exact = float32_gradients(w, lambda: backward(w, data))
    old = some_grads(w)
    run()
    for t, before, gradient in zip(w, old, exact, strict=True):
        assert torch.equal(t.grad, sums(before, gradient)[1])
        assert any(
            g is not None and g.shape == t.shape and torch.equal(g, gradient.to(BF16)) for g in seen[0]
        )


def _compiled_autograd():
    return torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))


@pytest.mark.parametrize(
    "context",
    [_unfused, torch.autograd.detect_anomaly, _compiled_autograd],
    ids=["option", "anomaly", "compiled_autograd"],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:The .grad attribute of a Tensor:UserWarning")
def test_contexts_that_keep_gradients_separate(context):
    w, data = weights(), routed()
    exact, old = float32_gradients(w, lambda: backward(w, data)), some_grads(w)
    with context():
        backward(w, data)
    for t, before, gradient in zip(w, old, exact, strict=True):
        assert torch.equal(t.grad, sums(before, gradient)[1])


def test_the_option_is_a_bool():
    with pytest.raises(TypeError, match="enabled: got int"):
        set_fuse_wgrad_accumulation(1)


def test_gradients_that_are_returned_are_not_added():
    w, data = weights(), routed()
    exact, old = float32_gradients(w, lambda: backward(w, data)), some_grads(w)
    x = data[0].requires_grad_()
    dy, edges = data[3].to(BF16), [torch.autograd.graph.get_gradient_edge(t) for t in w]
    for inputs in (w, edges, [*w, x]):
        grads = torch.autograd.grad(function(w, data), inputs, dy)
        assert all(torch.equal(g, d.to(BF16)) for g, d in zip(grads, exact, strict=False))
    function(w, data).backward(dy, inputs=[x])
    assert all(torch.equal(t.grad, before) for t, before in zip(w, old, strict=True))
    function(w, data).backward(dy, inputs=[w[1]])
    assert torch.equal(w[0].grad, old[0])
    assert torch.equal(w[1].grad, sums(old[1], exact[1])[0])


@pytest.mark.parametrize(
    "of_weight",
    [
        lambda w: w.view_as(w),
        lambda w: w * 1,
        lambda w: w.float(),
        lambda w: w.mT.contiguous().mT,
    ],
    ids=["view", "computed", "cast", "strides"],
)
def test_weights_computed_from_others(of_weight):
    w, data = weights(), routed()
    exact, old = float32_gradients(w, lambda: backward(w, data)), some_grads(w)
    backward([of_weight(t) for t in w], data)
    for t, before, gradient in zip(w, old, exact, strict=True):
        assert torch.equal(t.grad, sums(before, gradient)[1])


def _other_grad(kind, w):
    """A grad of w that the GEMM cannot add to."""
    if kind == "strides":
        return torch.randn(E, w.shape[2], w.shape[1]).to(w.dtype).mT
    if kind == "misaligned":
        return torch.randn(w.numel() + 1).to(w.dtype)[1:].view(w.shape)
    if kind == "derived":
        return torch.randn(w.shape).to(w.dtype).requires_grad_()
    return torch.randn(w.shape).to(w.dtype).to_sparse() if kind == "sparse" else None


@pytest.mark.parametrize("kind", ["strides", "misaligned", "derived", "sparse"])
@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_other_grads(kind):
    w, data = weights(), routed()
    exact = float32_gradients(w, lambda: backward(w, data))
    for t in w:
        t.grad = _other_grad(kind, t)
    old = [t.grad.detach().to_dense().clone() for t in w]
    backward(w, data)
    for t, before, gradient in zip(w, old, exact, strict=True):
        assert torch.equal(t.grad.detach().to_dense(), sums(before, gradient)[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes_that_the_fastest_gemms_do_not_add_to(dtype):
    recipe = "fp8_flow" if dtype is torch.float16 else "bf16"
    w, data = weights(dtype), routed(dtype)
    exact = []
    for _ in range(2):
        backward(w, data, recipe=recipe)
        exact.append([t.grad.clone() for t in w])
    for first, second in zip(*exact, strict=True):
        assert torch.equal(second, first + first)


def test_a_weight_given_twice():
    w, data = weights(pair=True), routed()
    exact = float32_gradients(w, lambda: backward(w, data))
    same, results = w[0], []
    for enabled in (True, False):
        set_fuse_wgrad_accumulation(enabled)
        try:
            torch.manual_seed(SEED)
            some_grads([same, w[2]])
            backward([same, same, w[2]], data)
        finally:
            set_fuse_wgrad_accumulation(True)
        results.append(same.grad)
    assert torch.equal(*results)
    assert exact[0].any()


def test_a_weight_frozen_after_the_forward():
    w, data = weights(), routed()
    old = some_grads(w)
    y = function(w, data)
    w[0].requires_grad_(False)
    y.backward(data[3].to(BF16))
    assert torch.equal(w[0].grad, old[0])
    assert not torch.equal(w[1].grad, old[1])


# ---------------------------------------------------------------- other owners of gradients


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_distributed_data_parallel(options, group):
    """Its reducer reads ``grad`` after each accumulation: micro-batches with and without a reduction."""
    layer = FP8FlowMoE(H, F, E, K, dtype=BF16)
    ddp, w = torch.nn.parallel.DistributedDataParallel(layer, **options), [layer.w13, layer.w2]
    batches = [routed() for _ in range(4)]

    def run(model, x, dy):
        model(x).backward(dy.to(BF16))

    exact = [float32_gradients(w, lambda x=x, dy=dy: run(layer, x, dy)) for x, _, _, dy in batches]
    wanted = [gradient.to(BF16) for gradient in exact[0]]
    for number, (x, _, _, dy) in enumerate(batches):
        with ddp.no_sync() if number in (1, 3) else contextlib.nullcontext():
            run(ddp, x, dy)
        if number > 0:
            wanted = [sums(old, gradient)[0] for old, gradient in zip(wanted, exact[number], strict=True)]
        assert all(torch.equal(t.grad, total) for t, total in zip(w, wanted, strict=True))


@pytest.mark.parametrize("needs_dx", [False, True])  # fully_shard reduces after it, or after the backward
@pytest.mark.parametrize("gathered", ["masters", "codes"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_fully_shard_that_reduces_in_the_last_micro_batch(reduce_dtype, gathered, needs_dx, group):
    """The unsharded gradients are added in the GEMM, unless fully_shard converts them to another dtype."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layer = FP8FlowMoE(H, F, E, K, dtype=BF16)
    batches = [routed() for _ in range(3)]
    exact = [
        float32_gradients([layer.w13, layer.w2], lambda x=x, dy=dy: layer(x).backward(dy.to(BF16)))
        for x, _, _, dy in batches
    ]
    if gathered == "codes":
        gather_fp8(layer)
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    for number, (x, _, _, dy) in enumerate(batches):
        layer.set_requires_gradient_sync(number == 2)
        layer(x.requires_grad_(needs_dx)).backward(dy.to(BF16))
    for t, first, *rest in zip((layer.w13, layer.w2), *exact, strict=True):
        wanted = first.to(BF16)
        for gradient in rest:
            fused, apart = sums(wanted, gradient)[0], wanted.float() + gradient.to(BF16).float()
            wanted = fused if reduce_dtype is None else apart
        assert torch.equal(local(t.grad), wanted.to(BF16))


def test_random_sequences_of_micro_batches():
    """Hooks that come and go, grads that are set to None or zeros, and the option, in any order: every grad
    is the sum of its gradients, rounded once or twice each time."""
    rng = np.random.default_rng(SEED)
    w = weights(pair=True)
    batches = [routed() for _ in range(3)]
    exact = [float32_gradients(w, lambda d=d: backward(w, d)) for d in batches]
    wanted, handles, enabled, counts = [None] * 3, [None] * 3, True, [0, 0]
    try:
        for number in range(40):
            # the first two do nothing else: the first gradients are stored, the second ones are added
            n, action = int(rng.integers(3)), rng.integers(6) if number > 1 else 5
            if action == 0 and handles[n] is None:
                register = w[n].register_hook if rng.integers(2) else w[n].register_post_accumulate_grad_hook
                handles[n] = register(lambda _: None)
            elif action == 1 and handles[n] is not None:
                handles[n].remove()
                handles[n] = None
            elif action == 2:
                w[n].grad = wanted[n] = None
            elif action == 3 and wanted[n] is not None:
                w[n].grad.zero_()
                wanted[n].zero_()
            elif action == 4 and rng.integers(3) == 0:
                enabled = not enabled
                set_fuse_wgrad_accumulation(enabled)
            batch = int(rng.integers(3))
            backward(w, batches[batch])
            for m, gradient in enumerate(exact[batch]):
                fused = enabled and handles[m] is None and wanted[m] is not None
                counts[fused] += 1
                if wanted[m] is None:
                    wanted[m] = gradient.to(BF16)
                elif fused:
                    wanted[m] = (wanted[m].float() + gradient).to(BF16)
                else:
                    wanted[m] = wanted[m] + gradient.to(BF16)
                assert torch.equal(w[m].grad, wanted[m])
    finally:
        set_fuse_wgrad_accumulation(True)
    assert min(counts) > 0
