"""Operations and layers captured in a CUDA graph and replayed with other inputs."""

import contextlib
import gc
import time

import numpy as np
import pytest
from backends import GPU
from cases import BF16, assert_same
from torch_rows import there_and_back, torch_case

import fp8moe

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_outputs")]


@pytest.mark.sanitize
def test_cupy_graph_keeps_its_scratch_memory():
    import cupy

    rng = np.random.default_rng(14)
    ids = GPU.upload(rng.integers(0, 8, (400, 2)).astype(np.int32))
    x = GPU.upload(rng.standard_normal((400, 256)).astype(BF16))

    def run():
        plan = fp8moe.plan_topk(ids, 8, align_size=16)
        return fp8moe.permute(x, plan)

    run()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        captured = run()
        graph = stream.end_capture()
        others = [cupy.full(1600, 7, cupy.int32) for _ in range(50)]  # uses up the memory in the pool
        ids[...] = GPU.upload(rng.integers(0, 8, (400, 2)).astype(np.int32))
        graph.launch(stream)
        stream.synchronize()
    wanted = fp8moe.permute(GPU.download(x), fp8moe.plan_topk(GPU.download(ids), 8, align_size=16))
    assert_same(wanted.plan, GPU.download(captured.plan))
    assert_same(wanted.data, GPU.download(captured.data))
    assert all(bool((o == 7).all()) for o in others)

    from fp8moe.kernels_cuda.runtime import driver

    def capture():
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            run()
            return stream.end_capture(), driver.count_kept_by_graphs()

    first, kept = capture()
    second, kept_by_both = capture()
    assert kept_by_both > kept
    del first, second
    gc.collect()
    # memory of the two graphs is released by a thread of the driver, some time after they are destroyed
    for _ in range(1000):
        if (now_kept := capture()[1]) == kept:
            break
        time.sleep(0.01)
    assert now_kept == kept


def test_torchs_forward_and_backward():
    torch, ids, x, probs = torch_case()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            x.grad = probs.grad = None
            there_and_back(ids, x, probs).backward()
    torch.cuda.current_stream().wait_stream(stream)
    x.grad = probs.grad = None
    graph = torch.cuda.CUDAGraph()
    # the same stream, as the autograd engine's thread may still hold AccumulateGrad nodes of the last
    # iteration, and torch warns of those of another stream
    with torch.cuda.graph(graph, stream=stream):
        there_and_back(ids, x, probs).backward()
    for seed in range(3):
        with torch.no_grad():
            ids.copy_(torch.rand(96, 8, device="cuda").argsort(1)[:, :3].int())
            x.normal_()
            probs.uniform_()
        filler = [torch.full((1 << 16,), seed, device="cuda") for _ in range(20)]
        graph.replay()
        grads = x.grad.clone(), probs.grad.clone()
        a, b = x.detach().clone().requires_grad_(), probs.detach().clone().requires_grad_()
        there_and_back(ids, a, b).backward()
        assert torch.equal(a.grad, grads[0])
        assert torch.equal(b.grad, grads[1])
        assert all(bool((f == seed).all()) for f in filler)


def fp8_there_and_back(ids, x):
    """Quantise, permute with scales, transpose, and sum the rows back."""
    import fp8moe.torch as torch_ops

    q = torch_ops.quantize(x)
    plan = torch_ops.plan_topk(ids, 8, align_size=16)
    moved = torch_ops.permute(torch_ops.dequantize(q, dtype="bfloat16"), plan)
    transposed = torch_ops.scaling_aware_transpose(torch_ops.quantize(moved.data), plan.expert_offsets)
    return torch_ops.unpermute(moved.data, plan), transposed.scales


def test_fp8_eager_and_compiled():
    torch, ids, x, _ = torch_case(False)
    for function in (
        fp8_there_and_back,
        torch.compile(fp8_there_and_back, fullgraph=True, backend="aot_eager"),
    ):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function(ids, x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = function(ids, x)
        for _ in range(3):
            ids.copy_(torch.rand(96, 8, device="cuda").argsort(1)[:, :3].int())
            x.normal_()
            graph.replay()
            for a, b in zip(actual, fp8_there_and_back(ids, x), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("scope", [False, True])
def test_the_torch_module(scope):
    """Captured forward and backward, replayed with other tokens and modified weights. A captured forward
    quantises the weights itself; captured in a weights_unchanged context it reads the copies of
    quantize_weights()."""
    torch, cupy = pytest.importorskip("torch"), pytest.importorskip("cupy")
    from fp8moe.torch import FP8FlowMoE, weights_unchanged

    torch.manual_seed(0)
    layer = FP8FlowMoE(256, 128, 8, 2, device="cuda")
    optimizer = torch.optim.AdamW([layer.w13, layer.w2], lr=0.05, fused=True)
    for w in (layer.w13, layer.w2):
        w.main_grad = torch.zeros_like(w)
    inputs = [torch.randn(300, 256, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    dy = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)

    def step(layer, x):
        layer.w13.main_grad.zero_()
        layer.w2.main_grad.zero_()
        y = layer(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        return y.detach(), dx, layer.w13.main_grad, layer.w2.main_grad

    x = inputs[0].clone().requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with weights_unchanged(layer) if scope else contextlib.nullcontext(), torch.cuda.graph(graph):
        captured = step(layer, x)
    for turn, tokens in enumerate(inputs):
        with torch.no_grad():
            x.copy_(tokens)
            if turn == 1:
                layer.w13.data.mul_(0.5)
            if turn == 2:
                for w in (layer.w13, layer.w2):
                    w.grad = torch.randn_like(w)
                optimizer.step()
                for w in (layer.w13, layer.w2):
                    w.grad = None
            if turn == 3:
                cupy.from_dlpack(layer.w2.detach())[:] *= np.float32(2)
        if scope:
            layer.quantize_weights()
        graph.replay()
        actual = [v.clone() for v in captured]
        new = FP8FlowMoE(256, 128, 8, 2, device="cuda")
        new.load_state_dict(layer.state_dict())
        for name in ("w13", "w2"):
            w = getattr(new, name)
            w.main_grad = torch.zeros_like(w)
        wanted = step(new, tokens.clone().requires_grad_())
        for a, b in zip(actual, wanted, strict=True):
            assert torch.equal(a, b)
        # eager forwards must not modify copies that the graph reads
        step(layer, tokens.clone().requires_grad_())


@pytest.mark.sanitize
def test_micro_batches_of_one_step():
    """A weights_unchanged context inside a captured step makes one set of copies per replay."""
    torch = pytest.importorskip("torch")
    from fp8moe.torch import FP8FlowMoE, weights_unchanged

    torch.manual_seed(0)
    layer = FP8FlowMoE(256, 128, 8, 2, device="cuda")
    batch = torch.randn(4, 100, 256, device="cuda", dtype=torch.bfloat16)

    def step(layer):
        layer.zero_grad()
        with weights_unchanged(layer):
            for x in batch:
                layer(x).float().square().mean().backward()
        return [p.grad for p in layer.parameters()]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(layer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with fp8moe.trace() as traced, torch.cuda.graph(graph, stream=side):
        captured = step(layer)
    assert traced.weight_casts == 2
    for _ in range(3):
        layer.w13.data.mul_(1.5)
        graph.replay()
        actual = [g.clone() for g in captured]
        new = FP8FlowMoE(256, 128, 8, 2, device="cuda")
        new.load_state_dict(layer.state_dict())
        for a, b in zip(actual, step(new), strict=True):
            assert torch.equal(a, b)
    other = FP8FlowMoE(256, 128, 8, 2, device="cuda")
    other.load_state_dict(layer.state_dict())
    side_graph = torch.cuda.CUDAGraph()
    with contextlib.ExitStack() as scope, torch.no_grad():
        with torch.cuda.graph(side_graph):
            scope.enter_context(weights_unchanged(other))
            other(batch[0])
        # copies that only a replay fills must not be used by eager forwards
        assert torch.equal(other(batch[0]), new(batch[0]))
