"""The bias of the experts' second GEMM, added to their merged rows, and the gradient of the probabilities
that it is multiplied by; the gradient of the bias of the first GEMM, which that GEMM itself adds."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.records import ArrayLike, ArraySpec
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import current, enter, operation


@operation
def add_biases(y: ArrayLike, bias: ArrayLike, topk_ids: ArrayLike, topk_probs: ArrayLike) -> Any:
    """y[t] + sum over j of topk_probs[t, j] * bias[topk_ids[t, j]], as experts with an output bias (gpt-oss)
    have it.

    The sum is in float32 (float64 for float64), in the order of j, of fused multiply-adds in float32; y is
    added to it, and the result rounded once. A row depends on itself alone, whatever the number of rows,
    which a matrix product of probabilities [T, E] and biases does not promise.

    Parameters
    ----------
    y : ArrayLike, floating point, [T, W]
        The first H columns are the rows, so that those of wider products need no copy.
    bias : ArrayLike, floating point, [E, H]
    topk_ids : ArrayLike, int32 or int64, [T, k]
        Ids below 0 or from E on mean no expert and add nothing, whatever their probabilities.
    topk_probs : ArrayLike, floating point, [T, k]

    Returns
    -------
    ArrayLike, [T, H]
        A new array in y's dtype.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or shape.
    """
    call = enter(y=y, bias=bias, topk_ids=topk_ids, topk_probs=topk_probs)
    a = call.args
    checks.arrays(("y", a.y, checks.FLOATS, ("T", "W")))
    width = _check_biases(a.bias, a.topk_ids, a.topk_probs, a.y.shape[0])
    if width > a.y.shape[1]:
        raise ValueError(f"y: got shape {list(a.y.shape)}; wanted at least the {width} columns of bias")
    out = call.empty(ArraySpec((a.y.shape[0], width), a.y.dtype))
    call.run("bias", "add_biases", a.y, a.bias, a.topk_ids, a.topk_probs, out=out)
    return call.leave(out)


@operation
def add_biases_backward(grad: ArrayLike, bias: ArrayLike, topk_ids: ArrayLike, topk_probs: ArrayLike) -> Any:
    """The gradient of `add_biases` with respect to the probabilities: grad[t] . bias[topk_ids[t, j]].

    Summed in a fixed order that depends on H alone. The gradient of y is grad itself, that of the bias a
    matrix product.

    Parameters
    ----------
    grad : ArrayLike, floating point, [T, H]
    bias : ArrayLike, floating point, [E, H]
        The forward's.
    topk_ids : ArrayLike, int32 or int64, [T, k]
        The forward's.
    topk_probs : ArrayLike, floating point, [T, k]
        The forward's. Only their dtype counts.

    Returns
    -------
    ArrayLike, [T, k]
        In topk_probs' dtype; zero where an id means no expert.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or shape.
    """
    call = enter(grad=grad, bias=bias, topk_ids=topk_ids, topk_probs=topk_probs)
    a = call.args
    checks.arrays(("grad", a.grad, checks.FLOATS, ("T", "H")))
    width = _check_biases(a.bias, a.topk_ids, a.topk_probs, a.grad.shape[0])
    checks.shape("grad", a.grad, ("T", width))
    out = call.empty(ArraySpec(a.topk_probs.shape, a.topk_probs.dtype))
    call.run("bias", "add_biases_backward", a.grad, a.bias, a.topk_ids, a.topk_probs, out=out)
    return call.leave(out)


def _check_biases(bias: Any, topk_ids: Any, topk_probs: Any, tokens: int) -> int:
    """Returns H."""
    checks.arrays(
        ("bias", bias, checks.FLOATS, ("E", "H")),
        ("topk_ids", topk_ids, checks.INTEGERS, (tokens, "k")),
    )
    checks.arrays(("topk_probs", topk_probs, checks.FLOATS, tuple(topk_ids.shape)))
    return bias.shape[1]  # type: ignore[no-any-return]


CHUNK = 128  # rows


def sums_of_chunks(shape: tuple[int, int], plan: Any, dtype: Any = checks.FLOAT32) -> Any:
    """New memory for sums of each column of an array [P, N] over chunks of at most 128 rows of one expert.
    Chunk i of expert e is number offsets[e] // 128 + e + i, without e if every offset is a multiple of 128;
    others are not written.

    plan: with expert_offsets and align_size."""
    rows, width = shape
    return current.call.array((num_chunks(rows, plan), width), dtype)


def num_chunks(rows: int, plan: Any) -> int:
    return rows // CHUNK + (plan.expert_offsets.shape[0] - 1 if plan.align_size % CHUNK else 0)


def raw_chunk_sums(x: Any, plan: Any) -> Any:
    """`sums_of_chunks` of an array."""
    sums = sums_of_chunks(x.shape, plan, x.dtype if x.dtype == np.float64 else checks.FLOAT32)
    current.call.run("bias", "chunk_sums", x, plan.expert_offsets, out=sums)
    return sums


def raw_expert_sums(sums: Any, plan: Any, out: Any = None) -> Any:
    """[E, N] of sums' dtype: the sums over each expert's rows, of those of its chunks, in float64; added to
    out, and rounded once. Zeros for an expert without rows."""
    call, accumulate = current.call, out is not None
    experts = plan.expert_offsets.shape[0] - 1
    if out is None:
        out = call.array((experts, sums.shape[1]), sums.dtype)
    options = {"rows": plan.num_out_tokens, "accumulate": accumulate}
    call.run("bias", "expert_sums", sums, plan.expert_offsets, **options, out=out)
    return out
