"""The expert layer on a CUDA device with CuPy arrays; needs `pip install 'fp8moe[cuda13]'`."""

import argparse

import cupy as cp
import ml_dtypes

import fp8moe

argparse.ArgumentParser(description=__doc__).parse_args()
tokens, hidden, ffn, experts, topk = 256, 256, 128, 8, 2
x = cp.random.standard_normal((tokens, hidden)).astype(ml_dtypes.bfloat16)
w13 = (cp.random.standard_normal((experts, 2 * ffn, hidden)) / 16).astype(ml_dtypes.bfloat16)
w2 = (cp.random.standard_normal((experts, hidden, ffn)) / 11).astype(ml_dtypes.bfloat16)
ids = cp.argsort(cp.random.random((tokens, experts)), axis=1)[:, :topk].astype(cp.int32)
ids, probs = cp.ascontiguousarray(ids), cp.full((tokens, topk), 0.5, cp.float32)

y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow")
grads = fp8moe.moe_backward(saved, y)
print(y.shape, grads.dw13.shape, f"{saved.nbytes:,} bytes saved for backward")
