"""Permute + pad and back: one read and one write of every row."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe.benchmarks.harness import Case, host, routing


def cases(quick: bool) -> list[Case]:
    shapes = [(512, 32, 512, 4, 16)] if quick else SHAPES
    return [case for shape in shapes for case in one_shape(*shape)]


# those of the FP8-Flow-MoE paper's own benchmark: tokens, experts, hidden, top-k, alignment
SHAPES = [(4096, 64, 2048, 6, 16), (4096, 256, 7168, 8, 16), (4096, 256, 7168, 8, 128)]


def one_shape(tokens: int, experts: int, hidden: int, topk: int, align: int) -> list[Case]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, hidden), dtype=np.float32).astype(ml_dtypes.bfloat16)
    q = fp8moe.quantize(x)
    ids = routing(tokens, experts, topk)
    probs = rng.random((tokens, topk), dtype=np.float32)
    rows = int(fp8moe.plan_topk(ids, experts, align_size=align).expert_offsets[-1])
    shape = f"{tokens},{experts},{hidden},{topk} A={align}"
    row = 2 * hidden
    fp8_row = hidden + 4 * q.scales.shape[1]

    def plan(ids: Any) -> fp8moe.PermutationPlan:
        return fp8moe.plan_topk(ids, experts, align_size=align, num_out_tokens="exact")

    return [
        Case(
            "permute+pad bf16",
            shape,
            (x, ids),
            fp8moe.permute,
            partial(_moved, tokens=x),
            nbytes=(tokens + rows) * row,
            prepare=lambda x, ids: (x, plan(ids)),
        ),
        Case(
            "permute+pad fp8+scales",
            shape,
            (q.data, q.scales, ids),
            fp8moe.permute,
            partial(_moved, tokens=q.data),
            nbytes=(tokens + rows) * fp8_row,
            prepare=lambda data, scales, ids: (fp8moe.QuantTensor(data, scales), plan(ids)),
        ),
        Case(
            "unpermute+unpad bf16",
            shape,
            (x, ids),
            fp8moe.unpermute,
            lambda y, *_: bool(
                np.allclose(host(y).astype(np.float32), topk * x.astype(np.float32), rtol=2.0**-8)
            ),
            nbytes=(tokens * topk + tokens) * row,
            prepare=lambda x, ids: (fp8moe.permute(x, plan(ids)).data, plan(ids)),
        ),
        Case(
            "unpermute backward, merging probs",
            shape,
            (x, ids, probs),
            fp8moe.unpermute_backward,
            lambda grads, *_: bool(
                np.allclose(host(grads[1]), (x.astype(np.float32) ** 2).sum(1, keepdims=True), rtol=1e-4)
            ),
            nbytes=(tokens + tokens * topk + rows) * row,
            prepare=lambda x, ids, probs: (x, plan(ids), fp8moe.permute(x, plan(ids)).data, probs),
        ),
    ]


def _moved(result: fp8moe.Permuted, *_: np.ndarray, tokens: np.ndarray) -> bool:
    """The first row of every token's map holds that token, byte for byte."""
    data = result.data.data if isinstance(result.data, fp8moe.QuantTensor) else result.data
    plan = result.plan
    row_map, pad_offsets = host(plan.row_id_map), host(plan.pad_offsets)
    first = row_map[:, 0] + pad_offsets[row_map[:, plan.max_experts_per_token]]
    kind = np.uint8 if tokens.dtype.itemsize == 1 else np.uint16
    return bool((host(data).view(kind)[first] == tokens.view(kind)).all())
