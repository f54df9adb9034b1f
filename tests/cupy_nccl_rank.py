"""One rank of test_expert_parallel.py with CuPy only: ``python cupy_nccl_rank.py RANK WORLD FILE``."""

import ast
import sys
import time
from pathlib import Path

import cupy
import numpy as np
from cases import BF16, assert_same
from cupy.cuda import nccl

import fp8moe
from fp8moe.adapters.cupy_nccl import Communicator
from fp8moe.runtime.record_trees import map_arrays

RANK, WORLD, FILE = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


def put(value):
    return map_arrays(lambda a: cupy.asarray(a), value)


def get(value):
    return map_arrays(lambda a: cupy.asnumpy(a), value)


cupy.cuda.Device(RANK).use()
if RANK == 0:
    part = FILE.with_suffix(".part")
    part.write_text(repr(nccl.get_unique_id()))
    part.rename(FILE)
while not FILE.exists():
    time.sleep(0.05)
comm = Communicator(nccl.NcclCommunicator(WORLD, ast.literal_eval(FILE.read_text()), RANK), RANK, WORLD)

rng = np.random.default_rng(0)
tokens, hidden, ffn, experts = 48, 256, 128, 2 * WORLD
x, dy = (rng.standard_normal((tokens * WORLD, hidden)).astype(BF16) for _ in range(2))
ids = rng.integers(-1, experts, (tokens * WORLD, 1))  # one expert per token, for the same bits as on one GPU
probs = rng.random((tokens * WORLD, 1)).astype(np.float32)
w13 = rng.standard_normal((experts, 2 * ffn, hidden)).astype(np.float32)
w2 = rng.standard_normal((experts, hidden, ffn)).astype(np.float32)
own, local = slice(tokens * RANK, tokens * (RANK + 1)), slice(2 * RANK, 2 * RANK + 2)
alone, kept = fp8moe.moe_forward(*map(put, (x, w13, w2, ids, probs)), recipe="fp8_flow")
wanted = get(fp8moe.moe_backward(kept, put(dy)))
for _ in range(3):
    arguments = map(put, (x[own], w13[local], w2[local], ids[own], probs[own]))
    y, saved = fp8moe.moe_forward(*arguments, recipe="fp8_flow", comm=comm)
    grads = get(fp8moe.moe_backward(saved, put(dy[own]), comm=comm))
    assert_same(get(alone)[own], get(y))
    assert_same(wanted.dx[own], grads.dx)
    assert_same(wanted.dprobs[own], grads.dprobs)
    assert_same(wanted.dw13[local], grads.dw13)
    assert_same(wanted.dw2[local], grads.dw2)
print("right", flush=True)
