"""The router's product, logits = x @ w.T in float32, on tensor cores where x is bfloat16 on CUDA.

torch multiplies float32 without tensor cores, after a cast of x to twice its bytes: 0.9 ms of the layer's
6.2 for 16,384 x 2048 rows and 128 experts, forward and backward. A float32 number is the sum of three
bfloat16 numbers (24 bits, 8 each), products of bfloat16 are exact in float32, and tensor cores add them in
float32. So one product of x with the three parts of w side by side has float32's accuracy (Henry, Tang and
Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision computations", ARITH
2019), and where w is bfloat16 it has one part.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Router(nn.Linear):
    """x [T, H] to float32 logits [T, E]. A module, so that what wraps modules (``fully_shard``) can."""

    def forward(self, x: Tensor) -> Tensor:
        return router_logits(x, self.weight)


def router_logits(x: Tensor, w: Tensor) -> Tensor:
    """x [T, H] @ w [E, H] transposed: float32 [T, E], also under autocast."""
    with torch.autocast(x.device.type, enabled=False):
        if x.is_cuda and x.dtype == torch.bfloat16 and w.dtype in (torch.bfloat16, torch.float32):
            return _Logits.apply(x, w)
        return x.float() @ w.float().t()


def parts(a: Tensor) -> list[Tensor]:
    """bfloat16 tensors whose sum is ``a``: itself, or three for float32 (exact where the third is normal)."""
    if a.dtype == torch.bfloat16:
        return [a]
    high = a.bfloat16()
    rest = a - high
    middle = rest.bfloat16()
    return [high, middle, (rest - middle).bfloat16()]


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, w)
        side_by_side = torch.cat(parts(w)).t()
        logits = torch.mm(x, side_by_side, out_dtype=torch.float32)
        return logits.view(len(x), -1, len(w)).sum(dim=1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, w = ctx.saved_tensors
        of_grad, of_w = parts(grad), parts(w)
        # the products of parts that count: two parts' 2^-8 each time one goes further
        pairs = [(g, v) for i, g in enumerate(of_grad) for j, v in enumerate(of_w) if i + j < 3]
        dx = torch.cat([g for g, _ in pairs], dim=1) @ torch.cat([v for _, v in pairs])
        dw = torch.mm(torch.cat(of_grad, dim=1).t(), x, out_dtype=torch.float32)
        return dx, dw.view(len(of_grad), len(w), -1).sum(dim=0).to(w.dtype)
