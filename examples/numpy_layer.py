"""An expert layer in FP8, forward and backward, with NumPy alone."""

import argparse

import ml_dtypes
import numpy as np

import fp8moe

argparse.ArgumentParser(description=__doc__).parse_args()
rng = np.random.default_rng(0)
tokens, hidden, ffn, experts, topk = 256, 256, 128, 8, 2
x = rng.standard_normal((tokens, hidden)).astype(ml_dtypes.bfloat16)
w13 = (rng.standard_normal((experts, 2 * ffn, hidden)) / 16).astype(ml_dtypes.bfloat16)
w2 = (rng.standard_normal((experts, hidden, ffn)) / 11).astype(ml_dtypes.bfloat16)
ids = np.argsort(rng.random((tokens, experts)))[:, :topk].astype(np.int32)
probs = np.full((tokens, topk), 0.5, np.float32)

with fp8moe.trace() as traced:
    y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow")
    grads = fp8moe.moe_backward(saved, y)
print(y.shape, grads.dw13.shape, f"{traced.casts} casts, {traced.saved_bytes:,} bytes saved for backward")
