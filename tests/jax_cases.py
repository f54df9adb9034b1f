"""Operations and their arguments for the tests of the JAX adapter on the CPU and on CUDA: an operation of the
adapter that has none here has those of `calls`."""

import inspect

import numpy as np
import pytest
from calls import CALLS
from cases import BF16

import fp8moe
from fp8moe import Activation

jax = pytest.importorskip("jax")
# also on machines with a GPU, which test_jax_cuda.py tests
jax.config.update("jax_default_device", jax.devices("cpu")[0])
jnp = jax.numpy
jax_ops = pytest.importorskip("fp8moe.adapters.jax.ops")

T, H, F, E, K = 40, 256, 128, 4, 2
RNG = np.random.default_rng(5)

IDS = RNG.integers(-1, E, (T, K)).astype(np.int32)
MASK = RNG.random((T, E)) < 0.4
X = RNG.standard_normal((T, H)).astype(BF16)
PROBS = RNG.random((T, K)).astype(np.float32)
Q = fp8moe.quantize(X)
PLAN = fp8moe.plan_topk(IDS, E, align_size=16)
PLAN_128, MX = fp8moe.plan_topk(IDS, E, align_size=128), fp8moe.quantize(X, block=(1, 32))
ROWS = RNG.standard_normal((PLAN.num_out_tokens, H)).astype(BF16)
OFFSETS = np.array([0, 16, 16, 30, T], np.int32)
SIZES, ORDER = np.array([5, 0, 20, 15], np.int32), np.array([2, 0, 3, 1], np.int32)
W = fp8moe.quantize_weights(RNG.standard_normal((E, H, H)).astype(np.float32))
COLUMNS = fp8moe.scaling_aware_transpose(Q, OFFSETS)
BLOCKS, ONE_HAS_ALL = fp8moe.scaling_aware_transpose(Q, target="block"), np.array([0, T, T, T, T], np.int32)
OPERATIONS = {
    "plan_topk": ((IDS, E), {"align_size": 16}),
    "plan_routing_map": ((MASK,), {"align_size": 8, "topk": E}),
    "plan_row_map": ((fp8moe.plan_routing_map(MASK).row_id_map,), {"num_out_tokens": 70}),
    "plan_index_map": ((RNG.permutation(T * K).astype(np.int32), K), {"num_out_tokens": 70}),
    "permute": ((X, PLAN, PROBS), {}),
    "permute without unweighted rows": ((X, PLAN, np.floor(PROBS * 2)), {"zero_unweighted": True}),
    "permute of FP8": ((Q, PLAN, PROBS), {}),
    "permute_and_pad": ((X, IDS, PROBS), {"align_size": 16, "num_experts": E}),
    "unpermute": ((ROWS, PLAN, PROBS), {}),
    "permute_backward": ((ROWS, PLAN), {}),
    "unpermute_backward": ((X, PLAN, ROWS, PROBS), {}),
    "sort_chunks": ((X, SIZES, ORDER), {"align_size": 8, "num_out_tokens": 64}),
    "sort_chunks of FP8": ((Q, SIZES, ORDER), {"num_out_tokens": T}),
    "sort_chunks_backward": ((X, SIZES, ORDER), {"num_tokens": T}),
    "pad": ((X, SIZES, 16), {"num_out_tokens": 96}),
    "unpad": ((X, np.array([3, 0, 9, 1], np.int32), 8), {}),
    "quantize": ((X,), {"columnwise": True}),
    "quantize MXFP8": ((X,), {"block": (1, 32), "fmt": "e5m2"}),
    "quantize MXFP8, as OCP has it": ((X,), {"block": (1, 32), "scale_rounding": "floor"}),
    "dequantize": ((Q,), {"dtype": "bfloat16"}),
    "to_layout": ((Q, "gemm_ready"), {}),
    "scaling_aware_transpose": ((Q, OFFSETS), {}),
    "permute_gemm": ((Q, W.rowwise, PLAN, PROBS), {}),
    "permute_transpose": ((Q, PLAN), {}),
    "scaling_aware_transpose to blocks": ((Q,), {"target": "block"}),
    "permute_transpose to blocks": ((Q, PLAN_128), {"target": "block"}),
    "quantize to blocked scales": ((X,), {"block": (1, 32), "columnwise": True, "layout": "blocked_128x4"}),
    "to_layout of experts": ((MX, "blocked_128x4", OFFSETS), {}),
    "permute to blocked scales": ((MX, PLAN_128, PROBS), {"layout": "blocked_128x4"}),
    "permute_transpose to blocked scales": ((MX, PLAN), {"layout": "blocked_128x4"}),
    "swiglu": ((X,), {"activation": Activation(clamp=1.5)}),
    "swiglu_backward": ((X[:, :128].copy(), X), {}),
    "swiglu_quantize": ((X,), {"columnwise": True, "expert_offsets": OFFSETS}),
    "swiglu_quantize_backward": ((X[:, :128].copy(), X), {}),
    "grouped_gemm": ((Q, W.rowwise, OFFSETS), {}),
    "grouped_gemm_wgrad": ((COLUMNS, COLUMNS, OFFSETS), {}),
    "grouped_gemm_wgrad of blocks": ((BLOCKS, BLOCKS, ONE_HAS_ALL), {}),
}


def from_calls(name):
    """(args, options): the arguments without gaps before them are positional."""
    given = dict(CALLS[name])
    args = []
    for parameter in inspect.signature(getattr(fp8moe, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.name not in given:
            break
        args.append(given.pop(parameter.name))
    return tuple(args), given


# layers and routers have tests of their own
OPERATIONS |= {
    name: from_calls(name)
    for name in jax_ops.__all__
    if name in CALLS and name not in OPERATIONS and not name.startswith(("moe_", "route"))
}


def weights(dtype=np.float32):
    rng = np.random.default_rng(2)
    shapes = ((E, 2 * F, H), (E, H, F))
    return [(rng.standard_normal(s) / s[-1] ** 0.5).astype(dtype) for s in shapes]


def in_float8(x, offsets):
    """Codes as JAX's float8 array, as argument and as result."""
    q = jax_ops.quantize(x)
    codes = fp8moe.QuantTensor(jax.lax.bitcast_convert_type(q.data, jnp.float8_e4m3fn), q.scales)
    return jax_ops.dequantize(codes), jax_ops.scaling_aware_transpose(codes, offsets)
