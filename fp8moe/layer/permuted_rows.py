"""Rows that another library has already permuted: their placement, and the permutation's operations on them.

A dispatcher of another library (Megatron-Core, DeepEP, HybridEP, NCCL-EP) returns rows sorted by expert and
the number of rows of each expert. From these counts `place_rows` makes a `PlacedRows`, which takes the place
of a `PermutationPlan` in the expert layer. `permute` and the other functions below do what the operations of
these names do, on raw buffers that the layer has checked, and accept either; for `PlacedRows` they move no
data. Where the kernels need each expert's rows padded and they are not, `pad_rows` and `unpad_rows` do it
around the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8moe.ops.grouped_gemm import raw_grouped_gemm, raw_permute_gemm
from fp8moe.ops.permute import (
    raw_pad,
    raw_permute,
    raw_permute_backward,
    raw_sort_chunks,
    raw_sort_chunks_backward,
    raw_unpermute,
    raw_unpermute_backward,
)
from fp8moe.ops.plan import static_bound
from fp8moe.ops.transpose import raw_permute_transpose, raw_scaling_aware_transpose
from fp8moe.records import ArraySpec, PermutationPlan, Permuted, QuantTensor, Record
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import Call, current


@dataclass(frozen=True)
class PlacedRows(Record):
    """Placement of rows that are sorted by expert.

    tokens_per_expert: integer [E], the caller's counts; None if the caller's rows already have the alignment
    that the kernels need. expert_offsets: int32 [E+1], first row of each expert in the kernels' rows,
    multiples of align_size. num_tokens: number of the caller's rows. num_out_tokens: number of the kernels'
    rows, with padding.
    """

    tokens_per_expert: Any
    expert_offsets: Any
    num_tokens: int
    num_out_tokens: int
    align_size: int


def place_rows(x: Any, tokens_per_expert: Any, probs: Any, given: int, wanted: int) -> tuple[Any, Any, Any]:
    """(x, probs, `PlacedRows`) of raw buffers, padded if necessary; does not synchronise.

    given: alignment of each expert's rows in x. wanted: alignment that the kernels need.
    """
    rows, experts = x.shape[0], tokens_per_expert.shape[0]
    _check_counts(current.call, tokens_per_expert, probs, given, rows)
    if given % wanted == 0:
        # sorting rows with zero columns computes only the group offsets
        empty = current.call.empty(ArraySpec((rows, 0), np.dtype(np.uint8)))
        out = raw_sort_chunks(empty, tokens_per_expert, None, None, align_size=given, num_out_tokens=0)
        return x, probs, PlacedRows(None, out.group_offsets, rows, rows, given)
    padded_rows = static_bound(rows, experts, wanted)
    checks.int32_offsets(rows, experts, wanted, padded_rows)
    out = raw_sort_chunks(x, tokens_per_expert, None, probs, align_size=wanted, num_out_tokens=padded_rows)
    placed = PlacedRows(tokens_per_expert, out.group_offsets, rows, padded_rows, wanted)
    return out.data, out.probs, placed


def _check_counts(call: Call, counts: Any, probs: Any, align_size: int, rows: int) -> None:
    if rows % align_size:
        raise ValueError(
            f"x: got {rows} rows with align_size={align_size}; wanted a multiple of it, because each "
            "expert's rows are padded"
        )
    count_values = call.values(counts)
    if count_values is None:
        return
    padded = -(-count_values.astype(np.int64) // align_size) * align_size
    checks.counts("tokens_per_expert", count_values, rows, "x")
    if padded.sum() > rows:
        raise ValueError(
            f"tokens_per_expert: got {padded.sum()} rows, each expert's padded to {align_size}; wanted at "
            f"most x's {rows}"
        )
    weights = call.values(probs)
    if weights is None or align_size == 1:
        return
    starts = np.cumsum(padded) - padded
    for expert, (start, count, padded_count) in enumerate(zip(starts, count_values, padded, strict=True)):
        if weights[start + count : start + padded_count].any():
            raise ValueError(
                f"probs: got a non-zero value in the padding of expert {expert}; wanted zero rows and zero "
                "probs in padding"
            )


def pad_rows(x: Any, rows: PlacedRows) -> Any:
    """The caller's rows, padded for the kernels if necessary."""
    if rows.tokens_per_expert is None:
        return x
    return raw_pad(x, rows.tokens_per_expert, rows.align_size, num_out_tokens=rows.num_out_tokens)


def unpad_rows(x: Any, rows: PlacedRows, probs: Any = None) -> tuple[Any, Any]:
    """Rows and their probs in the caller's placement; zeros past the last expert's rows."""
    counts = rows.tokens_per_expert
    if counts is None:
        return x, probs
    sizes: dict[str, Any] = {"align_size": rows.align_size, "num_tokens": rows.num_tokens}
    return raw_sort_chunks_backward(x, counts, None, probs, **sizes)


# ---------------------------------------------------------------- operations on a plan or on placed rows


def permute(x: Any, plan: PermutationPlan | PlacedRows, probs: Any = None) -> Permuted:
    """`fp8moe.permute`."""
    if isinstance(plan, PlacedRows):
        return Permuted(x, probs, plan)  # type: ignore[arg-type]
    return raw_permute(x, plan, probs)


def permute_gemm(
    x: QuantTensor, w: QuantTensor, plan: PermutationPlan | PlacedRows, probs: Any = None, **gemm: Any
) -> Permuted:
    """`fp8moe.permute_gemm`."""
    if isinstance(plan, PlacedRows):
        h = raw_grouped_gemm(x, w, plan.expert_offsets, int32_counts(plan), **gemm)
        return Permuted(h, probs, plan)  # type: ignore[arg-type]
    return raw_permute_gemm(x, w, plan, probs, **gemm)


def int32_counts(plan: PermutationPlan | PlacedRows) -> Any:
    """Number of each expert's rows without padding, or None if no int32 counts are available."""
    counts = plan.tokens_per_expert
    return counts if counts is not None and counts.dtype == np.int32 else None


def unpermute(x: Any, plan: PermutationPlan | PlacedRows) -> Any:
    """`fp8moe.unpermute`."""
    return x if isinstance(plan, PlacedRows) else raw_unpermute(x, plan)


def permute_backward(grad: Any, plan: PermutationPlan | PlacedRows, grad_probs: Any) -> tuple[Any, Any]:
    """`fp8moe.permute_backward`."""
    if isinstance(plan, PlacedRows):
        return grad, grad_probs
    return raw_permute_backward(grad, plan, grad_probs)


def unpermute_backward(grad: Any, plan: PermutationPlan | PlacedRows) -> tuple[Any, Any]:
    """`fp8moe.unpermute_backward`."""
    if isinstance(plan, PlacedRows):
        return grad, None
    return raw_unpermute_backward(grad, plan)


def permute_transpose(q: QuantTensor, plan: PermutationPlan | PlacedRows, *, target: str) -> QuantTensor:
    """`fp8moe.permute_transpose`."""
    if isinstance(plan, PlacedRows):
        return raw_scaling_aware_transpose(q, plan.expert_offsets, target=target, align_size=plan.align_size)
    return raw_permute_transpose(q, plan, target=target)
