"""Permutation of tokens to expert order and back on a CUDA device; needs `pip install 'fp8moe[cuda13]'`."""

import argparse

import cupy as cp
import ml_dtypes

import fp8moe

argparse.ArgumentParser(description=__doc__).parse_args()
tokens, hidden, experts, topk = 4096, 2048, 64, 6
x = cp.random.standard_normal((tokens, hidden)).astype(ml_dtypes.bfloat16)
ids = cp.argsort(cp.random.random((tokens, experts)), axis=1)[:, :topk].astype(cp.int32)
probs = cp.full((tokens, topk), 1 / topk, cp.float32)

q = fp8moe.quantize(x)  # codes and scales are permuted together, and padded for a grouped GEMM
moved = fp8moe.permute_and_pad(q, cp.ascontiguousarray(ids), probs, num_experts=experts, align_size=128)
back = fp8moe.unpermute(moved.data, moved.plan, probs)  # dequantises, weights and sums
error = float(cp.linalg.norm((back - x).astype(cp.float32)) / cp.linalg.norm(x.astype(cp.float32)))
print(
    moved.data.data.shape,
    moved.plan.expert_offsets[-1],
    f"relative error of permute and unpermute: {error:.3f}",
)
