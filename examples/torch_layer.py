"""The experts in torch, with autograd. CUDA tensors work the same if the kernels are installed."""

import argparse

import torch

import fp8moe.torch

argparse.ArgumentParser(description=__doc__).parse_args()
torch.manual_seed(0)
tokens, hidden, ffn, experts, topk = 256, 256, 128, 8, 2
x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
w13 = (torch.randn(experts, 2 * ffn, hidden) / 16).bfloat16().requires_grad_()
w2 = (torch.randn(experts, hidden, ffn) / 11).bfloat16().requires_grad_()
router = torch.randn(hidden, experts, requires_grad=True)

scores, ids = (x.float() @ router).topk(topk)
y = fp8moe.torch.moe_experts(x, w13, w2, ids, scores.softmax(dim=-1), recipe="fp8_flow")
y.float().square().mean().backward()
print(y.shape, w13.grad.shape, router.grad.norm())
