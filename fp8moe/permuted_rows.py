"""Rows that somebody else has permuted: where they lie, and the permutation's operations on them.

A dispatcher of another library (Megatron-Core, DeepEP, HybridEP, NCCL-EP) hands over rows expert by expert
and how many each has. `place_rows` makes of these counts what stands for a `PermutationPlan` in the expert
layer; `permute` and the others below have the names of `fp8moe.permute`, take either, and move nothing for
rows in place. Where kernels want each expert's rows padded and they are not, `pad_rows` and `unpad_rows` do
it around the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8moe import checks
from fp8moe.dispatch import Call, enter
from fp8moe.permute import pad, rows_spec, sort_chunks_spec
from fp8moe.permute import permute as permute_by_plan
from fp8moe.permute import permute_backward as permute_backward_by_plan
from fp8moe.permute import unpermute as unpermute_by_plan
from fp8moe.permute import unpermute_backward as unpermute_backward_by_plan
from fp8moe.plan import static_bound
from fp8moe.records import ArraySpec, PermutationPlan, Permuted, QuantTensor, Record, SortedChunks
from fp8moe.transpose import permute_transpose as permute_transpose_by_plan
from fp8moe.transpose import scaling_aware_transpose


@dataclass(frozen=True)
class PlacedRows(Record):
    """Rows of experts, one after the other.

    tokens_per_expert: integer [E], the caller's rows; None where these lie as the kernels want them.
    expert_offsets: int32 [E+1], first rows of the experts as the kernels see them, multiples of align_size.
    num_tokens: the caller's rows. num_out_tokens: the kernels'.
    """

    tokens_per_expert: Any
    expert_offsets: Any
    num_tokens: int
    num_out_tokens: int
    align_size: int


def place_rows(x: Any, tokens_per_expert: Any, probs: Any, given: int, wanted: int) -> tuple[Any, Any, Any]:
    """(x, probs, `PlacedRows`), padded where they must be; nothing synchronises.

    given, wanted: what each expert's rows are aligned to as they lie, and what the kernels want.
    """
    call = enter(x=x, tokens_per_expert=tokens_per_expert, probs=probs)
    a = call.args
    rows, experts = a.x.shape[0], a.tokens_per_expert.shape[0]
    _check_counts(call, a.tokens_per_expert, a.probs, given, rows)
    if given % wanted == 0:
        # a sort of rows without columns: their offsets are all that there is to it
        empty = call.empty(ArraySpec((rows, 0), np.dtype(np.uint8)))
        out = call.empty(sort_chunks_spec(empty, None, experts, 0))
        _sort(call, empty, a.tokens_per_expert, None, given, out)
        placed = PlacedRows(None, call.leave(out.group_offsets), rows, rows, given)
        return x, probs, placed
    padded_rows = static_bound(rows, experts, wanted)
    checks.int32_offsets(rows, experts, wanted, padded_rows)
    out = call.empty(sort_chunks_spec(a.x, a.probs, experts, padded_rows))
    _sort(call, a.x, a.tokens_per_expert, a.probs, wanted, out)
    out = call.leave(out)
    placed = PlacedRows(tokens_per_expert, out.group_offsets, rows, padded_rows, wanted)
    return out.data, out.probs, placed


def _check_counts(call: Call, counts: Any, probs: Any, align_size: int, rows: int) -> None:
    if rows % align_size:
        raise ValueError(
            f"x: got {rows} rows with align_size={align_size}; wanted a multiple, each expert's rows padded"
        )
    known = call.values(counts)
    if known is None:
        return
    padded = -(-known.astype(np.int64) // align_size) * align_size
    checks.counts("tokens_per_expert", known, rows, "x")
    if padded.sum() > rows:
        raise ValueError(
            f"tokens_per_expert: got {padded.sum()} rows, each expert's padded to {align_size}; wanted at "
            f"most x's {rows}"
        )
    weights = call.values(probs)
    if weights is None or align_size == 1:
        return
    starts = np.cumsum(padded) - padded
    for expert, (start, count, rows_there) in enumerate(zip(starts, known, padded, strict=True)):
        if weights[start + count : start + rows_there].any():
            raise ValueError(
                f"probs: got one that is not 0 in the padding of expert {expert}; wanted rows and probs of "
                "zeros there"
            )


def _sort(call: Call, x: Any, counts: Any, probs: Any, align_size: int, out: SortedChunks) -> None:
    """The chunks of the experts in the order in which they lie."""
    call.run(
        "permute",
        "sort_chunks",
        x,
        counts,
        None,
        probs,
        align_size=align_size,
        chunks_per_group=1,
        keep_rest=False,
        out=out,
    )


def pad_rows(x: Any, rows: PlacedRows) -> Any:
    """The caller's rows as the kernels want them."""
    if rows.tokens_per_expert is None:
        return x
    return pad(x, rows.tokens_per_expert, rows.align_size, num_out_tokens=rows.num_out_tokens)


def unpad_rows(x: Any, rows: PlacedRows, probs: Any = None) -> tuple[Any, Any]:
    """Rows, and a number of each, as the caller has them; zeros past the last expert's."""
    if rows.tokens_per_expert is None:
        return x, probs
    call = enter(x=x, counts=rows.tokens_per_expert, probs=probs)
    a = call.args
    probs_spec = None if probs is None else ArraySpec((rows.num_tokens,), a.probs.dtype)
    out = call.empty((rows_spec(a.x, rows.num_tokens), probs_spec))
    call.run(
        "permute",
        "sort_chunks_backward",
        a.x,
        a.counts,
        None,
        a.probs,
        align_size=rows.align_size,
        chunks_per_group=1,
        keep_rest=False,
        out=out,
    )
    return call.leave(out)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- by a plan, or in place


def permute(x: Any, plan: PermutationPlan | PlacedRows, probs: Any = None) -> Permuted:
    """`fp8moe.permute`."""
    if isinstance(plan, PlacedRows):
        return Permuted(x, probs, plan)  # type: ignore[arg-type]
    return permute_by_plan(x, plan, probs)  # type: ignore[no-any-return]


def unpermute(x: Any, plan: PermutationPlan | PlacedRows) -> Any:
    """`fp8moe.unpermute`."""
    return x if isinstance(plan, PlacedRows) else unpermute_by_plan(x, plan)


def permute_backward(grad: Any, plan: PermutationPlan | PlacedRows, grad_probs: Any) -> tuple[Any, Any]:
    """`fp8moe.permute_backward`."""
    if isinstance(plan, PlacedRows):
        return grad, grad_probs
    return permute_backward_by_plan(grad, plan, grad_probs)  # type: ignore[no-any-return]


def unpermute_backward(grad: Any, plan: PermutationPlan | PlacedRows) -> tuple[Any, Any]:
    """`fp8moe.unpermute_backward`."""
    if isinstance(plan, PlacedRows):
        return grad, None
    return unpermute_backward_by_plan(grad, plan)  # type: ignore[no-any-return]


def permute_transpose(q: QuantTensor, plan: PermutationPlan | PlacedRows, *, target: str) -> QuantTensor:
    """`fp8moe.permute_transpose`."""
    if isinstance(plan, PlacedRows):
        return scaling_aware_transpose(q, plan.expert_offsets, target=target, align_size=plan.align_size)
    return permute_transpose_by_plan(q, plan, target=target)  # type: ignore[no-any-return]
