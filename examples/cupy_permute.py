"""Rows to their experts and back on a CUDA device, no torch; needs `pip install 'fp8moe[cuda13]'`."""

import cupy as cp
import ml_dtypes

import fp8moe

tokens, hidden, experts, topk = 4096, 2048, 64, 6
x = cp.random.standard_normal((tokens, hidden)).astype(ml_dtypes.bfloat16)
ids = cp.argsort(cp.random.random((tokens, experts)), axis=1)[:, :topk].astype(cp.int32)
probs = cp.full((tokens, topk), 1 / topk, cp.float32)

q = fp8moe.quantize(x)  # codes and scales travel together, padded to what a grouped GEMM wants
moved = fp8moe.permute_and_pad(q, cp.ascontiguousarray(ids), probs, num_experts=experts, align_size=128)
back = fp8moe.unpermute(moved.data, moved.plan, probs)  # dequantised on the way in, weighted, summed
error = float(cp.linalg.norm((back - x).astype(cp.float32)) / cp.linalg.norm(x.astype(cp.float32)))
print(moved.data.data.shape, moved.plan.expert_offsets[-1], f"there and back: {error:.3f}")
