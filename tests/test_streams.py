"""The order of launches on streams of a GPU."""

import numpy as np
import pytest
from backends import GPU
from cases import BF16, same_bits, values

import fp8moe
from fp8moe.runtime import dispatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_outputs")]


@pytest.mark.sanitize
@pytest.mark.parametrize("captured", [False, True])
def test_launches_wait_for_each_other(monkeypatch, captured):
    """Blocks may start before the previous launch is complete, while data they read is still being written
    and data they overwrite is still being read. The previous operation is a kernel, a copy on the same
    stream, or a copy on another stream."""
    import cupy

    from fp8moe.kernels_cuda.runtime import driver

    monkeypatch.undo()  # filling outputs would separate the launches
    rng = np.random.default_rng(15)
    xs = [GPU.upload((rng.standard_normal((4096, 2048)) * 2.0**i).astype(BF16)) for i in range(2)]
    ids = GPU.upload(rng.integers(0, 8, (4096, 2)).astype(np.int32))
    x, q = cupy.empty_like(xs[0]), fp8moe.quantize(xs[0])
    end = int(fp8moe.plan_topk(ids, 8, align_size=128).expert_offsets[-1])  # values after it are undefined

    def chain():
        plan = fp8moe.plan_topk(ids, 8, align_size=128)
        rows = fp8moe.permute(fp8moe.quantize(x, out=q), plan).data
        transposed = fp8moe.scaling_aware_transpose(rows, plan.expert_offsets)
        y = fp8moe.unpermute(fp8moe.dequantize(rows), plan)
        both_orientations = fp8moe.quantize(y, columnwise=True)
        return (
            plan.row_id_map,
            transposed.data[:, :end],
            transposed.scales,
            y,
            both_orientations.columnwise.data,
        )

    with monkeypatch.context() as context:
        dispatch.clear_recordings()
        context.setattr(driver, "has_dependent_launch", lambda device: False)
        wanted = []
        for each in xs:
            x[...] = each
            wanted.append(chain())
            cupy.cuda.Device().synchronize()
    dispatch.clear_recordings()  # which do without, too
    actual = []
    with cupy.cuda.Stream(non_blocking=True) as stream:
        other = cupy.cuda.Stream(non_blocking=True)
        chain()
        if captured:
            stream.begin_capture()
        for i in range(20):
            if i % 4 < 2:
                cupy.copyto(x, xs[i % 2])
            else:
                other.wait_event(stream.record())
                with other:
                    cupy.copyto(x, xs[i % 2])
                stream.wait_event(other.record())
            actual.append(chain())
        if captured:
            stream.end_capture().launch(stream)
        stream.synchronize()
    for i, results in enumerate(actual):
        for a, b in zip(results, wanted[i % 2], strict=True):
            assert same_bits(cupy.asnumpy(a), cupy.asnumpy(b)), i


def test_an_exact_plan_waits_for_the_callers_stream():
    torch = pytest.importorskip("torch")
    ids = torch.zeros(64, 2, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # delays the write of the ids below
        ids.copy_(torch.arange(128, device="cuda").reshape(64, 2) % 8)
        plan = fp8moe.plan_topk(ids, 8, align_size=16, num_out_tokens="exact")
    assert plan.num_out_tokens == 128
    assert plan.tokens_per_expert.tolist() == [16] * 8


def test_torch_tensors_use_torchs_memory_and_stream():
    torch = pytest.importorskip("torch")
    import fp8moe.torch as torch_ops

    rng = np.random.default_rng(8)
    x, ids = values(rng, (64, 256), BF16), rng.integers(-1, 4, (64, 2)).astype(np.int32)
    cpu = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        xd = cpu.cuda(non_blocking=True).requires_grad_()
        plan = torch_ops.plan_topk(torch.from_numpy(ids).cuda(), 4, align_size=16)
        moved = torch_ops.permute(xd, plan).data
        y = torch_ops.unpermute(moved, plan)
        y.float().sum().backward()
    torch.cuda.synchronize()
    counts = torch.from_numpy((ids >= 0).sum(1)).float()[:, None]
    assert torch.equal(xd.grad.float().cpu(), counts.expand(64, 256))
    wanted = fp8moe.unpermute(fp8moe.permute(x, fp8moe.plan_topk(ids, 4)).data, fp8moe.plan_topk(ids, 4))
    assert same_bits(y.detach().cpu().view(torch.int16).numpy(), wanted.view(np.int16))
    q = fp8moe.quantize(xd.detach())
    assert q.data.is_cuda
    assert same_bits(q.data.cpu().numpy(), fp8moe.quantize(x).data)
