"""A user's program for type checkers, checked by `make lint` with ``mypy --strict``. It is never run.

`assert_type` fails if a decorator loses a function's signature, and ``type: ignore`` comments fail if they
hide no error.
"""

from typing import Any, assert_type

import jax
import numpy as np
import torch

import fp8moe
import fp8moe.torch
from fp8moe import (
    MoEGrads,
    PermutationPlan,
    Permuted,
    Quantized,
    QuantTensor,
    Routed,
    RouterConfig,
    SortedChunks,
    Trace,
)
from fp8moe.adapters import transformers
from fp8moe.adapters.jax import layer as jax_layer
from fp8moe.adapters.jax import ops as jax_ops
from fp8moe.adapters.torch import fsdp as torch_fsdp
from fp8moe.adapters.torch import layer as torch_moe
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch import weights as torch_weights
from fp8moe.adapters.torch.distributed.process_group import ProcessGroup


def core(x: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> int:
    plan = fp8moe.plan_topk(ids, num_experts=8, align_size=128)
    assert_type(plan, PermutationPlan)
    assert_type(plan.num_out_tokens, int)
    q: QuantTensor = fp8moe.quantize(x, fmt="e4m3", block=(1, 128))
    assert_type(q.fmt, str)
    rows = fp8moe.permute(q, plan)
    assert_type(rows, Permuted)
    columns = fp8moe.scaling_aware_transpose(rows.data, plan.expert_offsets, align_size=128)
    assert_type(columns, QuantTensor)
    assert_type(fp8moe.permute_transpose(q, plan), QuantTensor)
    assert_type(fp8moe.sort_chunks(x, offsets, offsets), SortedChunks)
    weights = fp8moe.quantize_weights(x)
    assert_type(weights, Quantized)
    assert_type(fp8moe.permute_gemm(q, weights.rowwise, plan), Permuted)
    routed = fp8moe.route(x, RouterConfig(topk=8, score_function="sigmoid"))
    assert_type(routed, Routed)
    with fp8moe.trace() as traced:
        y, saved = fp8moe.moe_forward(x, weights, weights, ids, x, recipe="fp8_flow")
        grads = fp8moe.moe_backward(saved, y)
    assert_type(traced, Trace)
    assert_type(grads, MoEGrads)
    buckets = fp8moe.fsdp.plan_buckets([("w", (8, 128), True)], data_parallel_size=4)
    return traced.casts + buckets.buckets[0].padded_numel


def torch_client(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    plan = torch_ops.plan_topk(ids, num_experts=8)
    assert_type(plan, PermutationPlan)
    assert_type(torch_ops.permute(x, plan), Permuted)
    y = fp8moe.torch.moe_experts(x, w13, w2, ids, torch.ones(ids.shape), recipe="fp8_flow")
    assert_type(y, torch.Tensor)
    y = fp8moe.torch.moe_experts(x, w13, w2, ids, torch.ones(ids.shape), comm=ProcessGroup())
    layer = torch_moe.FP8FlowMoE(256, 128, 8, 2, recipe="bf16")
    with torch_weights.weights_unchanged(layer):
        z: torch.Tensor = layer(y)
    torch_fsdp.shard_placement(8)(layer.w13)
    transformers.enable("fp8_flow", recompute="moe_expert", name="fp8moe")
    return z


def jax_client(x: jax.Array, w13: jax.Array, w2: jax.Array, ids: jax.Array) -> jax.Array:
    plan = jax_ops.plan_topk(ids, num_experts=8, align_size=128)
    assert_type(plan, PermutationPlan)
    q: QuantTensor = jax_ops.quantize(x)
    assert_type(jax_ops.permute(q, plan), Permuted)
    assert_type(jax_ops.scaling_aware_transpose(q), QuantTensor)
    y: jax.Array = jax_layer.moe_experts(x, w13, w2, ids, x, recipe="fp8_flow")
    return y


def refused(x: np.ndarray[Any, Any], plan: PermutationPlan) -> None:
    """Errors that a type checker must report."""
    fp8moe.quantise(x)  # type: ignore[attr-defined]
    fp8moe.quantize(x, blocks=(1, 128))  # type: ignore[call-arg]
    fp8moe.permute(x)  # type: ignore[call-arg]
    fp8moe.plan_topk(x, num_experts="8")  # type: ignore[arg-type]
    RouterConfig(topk=8, score_function="softplus")  # type: ignore[arg-type]
    torch_ops.permute(x, plan, prob=x)  # type: ignore[call-arg]
    jax_layer.moe_experts(x, x, x, x)  # type: ignore[call-arg]
    jax_layer.moe_experts(x, x, x, x, x, recompute="experts", num_sm=8)  # type: ignore[call-arg]
    jax_layer.moe_experts(x, x, x, x, x, recipe="fp8")  # type: ignore[arg-type]
    jax_ops.permute(x, plan, fill=True)  # type: ignore[call-arg]
    torch_moe.FP8FlowMoE(256, 128, 8, 2, recipe="fp8")  # type: ignore[arg-type]
    transformers.enable("fp16")  # type: ignore[arg-type]
    plan.num_experts = 4  # type: ignore[misc]
