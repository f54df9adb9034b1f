"""Rows on a GPU for tests with torch, and a function of them."""

import pytest


def torch_case(requires_grad=True):
    torch = pytest.importorskip("torch")
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(96, 8, generator=g).argsort(1)[:, :3].int().cuda()
    x = torch.randn(96, 256, generator=g).bfloat16().cuda().requires_grad_(requires_grad)
    probs = torch.rand(96, 3, generator=g).cuda().requires_grad_(requires_grad)
    return torch, ids, x, probs


def there_and_back(ids, x, probs):
    import fp8moe.torch as torch_ops

    plan = torch_ops.plan_topk(ids, 8, align_size=16)
    moved = torch_ops.permute(x, plan, probs)
    y = torch_ops.unpermute(moved.data * moved.probs[:, None].to(x.dtype), plan, probs)
    return y.float().square().sum()
