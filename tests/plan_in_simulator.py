"""Runs the CUDA plan kernels in Numba's simulator and compares with the oracle; test_plan.py starts it as a
process."""

import importlib

import numpy as np
from cases import generator, mask_of, poisoned

from fp8moe.ops.plan import plan_spec
from fp8moe.records import ArraySpec
from fp8moe.runtime.record_trees import arrays_in, map_arrays

assert importlib.import_module("fp8moe.kernels_cuda.runtime.numba_cuda").SIMULATED
kernels = importlib.import_module("fp8moe.kernels_cuda.plan")
reference = importlib.import_module("fp8moe.reference.plan")


def compare(verb, routing, spec):
    def poison(s):
        return poisoned(s.shape, s.dtype) if isinstance(s, ArraySpec) else s

    wanted, got = map_arrays(poison, spec), map_arrays(poison, spec)
    getattr(reference, verb)(routing, out=wanted)
    getattr(kernels, verb)(routing, out=got)
    for a, b in zip(arrays_in(wanted), arrays_in(got), strict=True):
        np.testing.assert_array_equal(a, b)


# sizes with several chunks, several steps per chunk and several words of bits, small enough for the simulator
rng = generator()
SMALL = ((0, 3, 2), (1, 1, 1), (9, 4, 3), (14, 9, 2), (5, 40, 6), (4, 70, 9))
for chunk, block, slots, words, shapes in (
    (8, 4, 128, 8192, SMALL),
    (40, 40, 2, 9, ((75, 5, 2), (40, 16, 3))),
):
    kernels.CHUNK, kernels.BLOCK, kernels.MAX_CHUNKS, kernels.BITS = chunk, block, slots, words
    for tokens, experts, k in shapes:
        ids = rng.integers(-2, experts + 2, (tokens, k)).astype(np.int32)
        for align, capacity in ((1, None), (4, tokens)):
            compare("plan_topk", ids, plan_spec(tokens, experts, k, align, capacity, has_slots=True))
        mask = mask_of(ids, experts)
        for width in (1, experts):
            compare("plan_routing_map", mask, plan_spec(tokens, experts, width, 4, None, has_slots=False))
print("equal")
