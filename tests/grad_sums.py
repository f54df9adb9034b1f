"""What a backward leaves in ``grad`` if the GEMM adds to it, and if autograd adds a separate gradient."""

import torch
from torch.distributed.tensor import DTensor


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def float32_gradients(weights, run):
    """The gradients that ``run``, a forward and a backward, gives the weights, in float32."""
    for w in weights:
        w.main_grad = torch.zeros_like(w, dtype=torch.float32)
    run()
    found = [local(w.main_grad) for w in weights]
    for w in weights:
        for name in ("main_grad", "grad_added_to_main_grad", "_fp8moe_set_grad_added_to_main_grad"):
            delattr(w, name)
        w.grad = None
    return found


def sums(old, gradient):
    """grad after one rounding, that of the GEMM's float32 sum, and after two, of the gradient and of the sum.
    They differ, so that bfloat16 results show who has added."""
    fused, apart = (old.float() + gradient).to(old.dtype), old + gradient.to(old.dtype)
    assert old.dtype is torch.float32 or not torch.equal(fused, apart)
    return fused, apart


def some_grads(weights):
    """Gives every weight a random grad, and returns their values."""
    for w in weights:
        w.grad = torch.empty_like(w.detach())
        local(w.grad).copy_(torch.randn(local(w).shape) * 8)
    return [local(w.grad).clone() for w in weights]


def check_added(weights, run, fused=True):
    """Checks that ``run`` adds to existing gradients, in the GEMM or not: of all weights, or of each."""
    exact, old = float32_gradients(weights, run), some_grads(weights)
    addresses = [local(w.grad).data_ptr() for w in weights]
    run()
    fused = [fused] * len(weights) if isinstance(fused, bool) else fused
    for w, before, gradient, is_fused, address in zip(weights, old, exact, fused, addresses, strict=True):
        wanted = sums(before, gradient)
        assert torch.equal(local(w.grad), wanted[0 if is_fused else 1])
        assert local(w.grad).data_ptr() == address
