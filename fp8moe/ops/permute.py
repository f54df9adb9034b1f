"""Permutation of rows to experts and back, with padding, scales and probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fp8moe.formats import BFLOAT16, LAYOUTS
from fp8moe.ops.layout import blocked_rows_spec, check_blocked_rows
from fp8moe.ops.plan import (
    NumOutTokens,
    check_ids,
    check_mask,
    is_exact,
    raw_plan_routing_map,
    raw_plan_topk,
    requested_rows,
    static_bound,
)
from fp8moe.records import (
    ArrayLike,
    ArraySpec,
    PermutationPlan,
    Permuted,
    Quantized,
    QuantTensor,
    SortedChunks,
)
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import Call, current, enter, operation

#: blocks whose scales are permuted with their rows
ROW_BLOCKS = ((1, 128), (1, 32), (1, 16), None)


@operation
def permute(
    x: ArrayLike,
    plan: PermutationPlan,
    probs: ArrayLike | None = None,
    *,
    fill_padding: bool = True,
    zero_unweighted: bool = False,
    layout: str = "compact",
) -> Permuted:
    """Copy every token's row to each of its experts, padded to the plan's alignment.

    Parameters
    ----------
    x : ArrayLike or QuantTensor, [T, H]
        An array of any dtype, or a row-wise compact `QuantTensor` (one scale per tensor, 1x128, MXFP8,
        NVFP4), whose scales are permuted with its rows.
    plan : PermutationPlan
        A plan for the T tokens of ``x``.
    probs : ArrayLike, floating point, [T, k] or [T, E], or None
        [T, k] for a plan from top-k ids, [T, E] for one from a mask. Rows with probability 0.0 are permuted,
        too.
    fill_padding : bool
        Whether to write zeros (data, probs and scales) to rows that receive no token. Otherwise these rows
        are uninitialised.
    zero_unweighted : bool
        Whether to write zeros in place of the values (the codes, not the scales) of rows whose probability is
        exactly 0.0, which is how Transformer Engine's callers drop tokens. It does not change the gradient.
    layout : "compact" or "blocked_128x4"
        Layout of the result's scales, see `to_layout`. "blocked_128x4" is for MXFP8 and plans whose alignment
        is a multiple of 128.

    Returns
    -------
    Permuted
        data [num_out_tokens, H], probs [num_out_tokens] or None, and the plan.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit the plan, and for plans that do not give each row of an expert to one
        token (on CUDA with FP8MOE_CHECK=1).

    Notes
    -----
    Permuting and padding in one pass follows Transformer Engine PR #1921.

    Examples
    --------
    >>> plan = fp8moe.plan_topk(np.array([[1], [0], [1]], np.int32), 2, align_size=2, num_out_tokens="exact")
    >>> fp8moe.permute(np.array([[1.0], [2.0], [3.0]], np.float32), plan).data[:, 0].tolist()
    [2.0, 0.0, 1.0, 3.0]
    """
    call = enter(x=x, plan=plan, probs=probs)
    a = call.args
    checks.plan(call, a.plan, fills=True)
    options = _check_permute(a.x, a.plan, a.probs, fill_padding, zero_unweighted, layout)
    return raw_permute(a.x, a.plan, a.probs, **options)


def _check_permute(
    x: Any, plan: PermutationPlan, probs: Any, fill: bool, zero_unweighted: bool, layout: str
) -> dict[str, Any]:
    """Check all but the plan; returns the options of `raw_permute`."""
    tokens = plan.num_tokens
    if isinstance(x, (Quantized, QuantTensor)):
        _check_rows("x", x, tokens)
    checks.arrays(
        ("x", x, None, (tokens, "H")),
        ("probs", probs, checks.FLOATS, (tokens, plan.prob_columns)),
    )
    if type(fill) is not bool:
        fill = checks.flag("fill_padding", fill)
    if type(zero_unweighted) is not bool:
        zero_unweighted = checks.flag("zero_unweighted", zero_unweighted)
    if zero_unweighted and probs is None:
        raise ValueError("zero_unweighted: got True without probs; wanted probs, or False")
    if not isinstance(layout, str) or layout != "compact":
        checks.choice("layout", layout, LAYOUTS)
        check_blocked_rows(x, plan, layout)
    return {"fill_padding": fill, "zero_unweighted": zero_unweighted, "layout": layout}


def raw_permute(
    x: Any,
    plan: PermutationPlan,
    probs: Any = None,
    *,
    fill_padding: bool = True,
    zero_unweighted: bool = False,
    layout: str = "compact",
) -> Permuted:
    call, rows = current.call, plan.num_out_tokens
    if layout != "compact":
        data = call.empty(blocked_rows_spec(x, plan, layout))
    elif isinstance(x, QuantTensor):
        data = call.empty(rows_spec(x, rows))
    else:
        data = call.array((rows, x.shape[1]), x.dtype)
    out = Permuted(data, None if probs is None else call.array((rows,), probs.dtype), plan)
    options = {"fill_padding": fill_padding, "zero_unweighted": zero_unweighted}
    call.run("permute", "permute", x, plan, probs, **options, out=out)
    return out


def rows_spec(x: Any, rows: int) -> Any:
    """Spec of ``x``, an array or a row-wise QuantTensor, with another number of rows."""
    if not isinstance(x, QuantTensor):
        return ArraySpec((rows, *x.shape[1:]), x.dtype)
    scales = x.scales if x.block is None else ArraySpec((rows, x.scales.shape[1]), x.scales.dtype)
    return replace(x, data=ArraySpec((rows, x.data.shape[1]), x.data.dtype), scales=scales)


@operation
def permute_and_pad(
    x: ArrayLike,
    routing_map: ArrayLike,
    probs: ArrayLike | None = None,
    *,
    align_size: int,
    topk: int | None = None,
    num_out_tokens: NumOutTokens = None,
    num_experts: int | None = None,
    fill_padding: bool = True,
    layout: str = "compact",
) -> Permuted:
    """Plan and permute in one call.

    Parameters
    ----------
    x : ArrayLike or QuantTensor, [T, H]
        As for `permute`.
    routing_map : ArrayLike, [T, E] or [T, k]
        A mask as for `plan_routing_map`, or with ``num_experts`` the expert ids as for `plan_topk`.
    probs : ArrayLike or None
        As for `permute`.
    align_size : int
        Each expert's rows are padded to a multiple of it.
    topk : int or None
        As for `plan_routing_map`; for a mask only.
    num_out_tokens : int, "exact" or None
        As for `plan_topk`.
    num_experts : int or None
        E, if ``routing_map`` has expert ids.
    fill_padding : bool
        As for `permute`.
    layout : "compact" or "blocked_128x4"
        As for `permute`.

    Returns
    -------
    Permuted
        Has ``data, probs, row_id_map, pad_offsets, tokens_per_expert`` and the complete ``plan``.

    Raises
    ------
    TypeError, ValueError
        As for `plan_topk`, `plan_routing_map` and `permute`.

    Examples
    --------
    >>> x, mask = np.array([[1.0], [2.0]], np.float32), np.array([[0, 1], [1, 1]], bool)
    >>> fp8moe.permute_and_pad(x, mask, align_size=2).data[:, 0].tolist()
    [2.0, 0.0, 1.0, 2.0]
    """
    call = enter(x=x, routing_map=routing_map, probs=probs)
    a = call.args
    if num_experts is None:
        check_mask(a.routing_map)
        plan = raw_plan_routing_map(
            a.routing_map, align_size=align_size, topk=topk, num_out_tokens=num_out_tokens
        )
    else:
        check_map_of_ids(a.routing_map, topk, num_experts)
        num_experts = check_ids(call, "routing_map", a.routing_map, num_experts)
        plan = raw_plan_topk(a.routing_map, num_experts, align_size=align_size, num_out_tokens=num_out_tokens)
    options = _check_permute(a.x, plan, a.probs, fill_padding, False, layout)
    return raw_permute(a.x, plan, a.probs, **options)


def check_map_of_ids(routing_map: Any, topk: Any, num_experts: Any) -> None:
    """Check a routing map that comes with ``num_experts``."""
    if routing_map.dtype not in checks.INTEGERS:
        raise TypeError(
            f"num_experts: got {num_experts!r} with a routing_map of {routing_map.dtype.name}; wanted None "
            "with a mask [T, E], or int32 or int64 ids [T, k]"
        )
    if topk is not None:
        raise ValueError("topk: got one with num_experts; wanted None, because ids [T, k] determine it")


@operation
def unpermute(x: ArrayLike, plan: PermutationPlan, merging_probs: ArrayLike | None = None) -> Any:
    """Sum each token's rows: the inverse of `permute`.

    Parameters
    ----------
    x : ArrayLike or QuantTensor, [num_out_tokens, H]
        An array, or a row-wise compact `QuantTensor`, which is dequantised as it is read.
    plan : PermutationPlan
        The plan that permuted the rows.
    merging_probs : ArrayLike, floating point, [T, k] or [T, E], or None
        As in `permute`; each row is multiplied by its probability.

    Returns
    -------
    ArrayLike, [T, H]
        In x's dtype (bfloat16 for a `QuantTensor`), summed in float32 (float64 for float64) in the row map's
        order. The result of a token without experts is zeros. Only mapped rows are read, so NaN in padding or
        past the last expert does not affect the result.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit the plan.

    Examples
    --------
    >>> plan = fp8moe.plan_topk(np.array([[0, 1], [1, 0]], np.int32), 2)
    >>> rows = fp8moe.permute(np.array([[1.0], [2.0]], np.float32), plan).data
    >>> fp8moe.unpermute(rows, plan, np.array([[0.5, 0.25], [1.0, 1.0]], np.float32))[:, 0].tolist()
    [0.75, 4.0]
    """
    call = enter(x=x, plan=plan, merging_probs=merging_probs)
    a = call.args
    checks.plan(call, a.plan)
    _check_rows("x", a.x, a.plan.num_out_tokens)
    if not isinstance(a.x, QuantTensor):
        checks.dtype("x", a.x, checks.FLOATS)
    _check_probs("merging_probs", a.merging_probs, a.plan)
    return raw_unpermute(a.x, a.plan, a.merging_probs)


def raw_unpermute(x: Any, plan: PermutationPlan, merging_probs: Any = None) -> Any:
    call = current.call
    out = call.empty(unpermute_spec(x, plan))
    call.run("permute", "unpermute", x, plan, merging_probs, out=out)
    return out


def unpermute_spec(x: Any, plan: PermutationPlan) -> ArraySpec:
    if isinstance(x, QuantTensor):
        return ArraySpec((plan.num_tokens, x.shape[1]), BFLOAT16)
    return ArraySpec((plan.num_tokens, x.shape[1]), x.dtype)


@operation
def permute_backward(
    grad: ArrayLike, plan: PermutationPlan, grad_probs: ArrayLike | None = None
) -> tuple[Any, Any]:
    """Gradients of `permute` from the gradients of its data and probabilities.

    Parameters
    ----------
    grad : ArrayLike or QuantTensor, [num_out_tokens, H]
        The gradient of ``permute(...).data``.
    plan : PermutationPlan
        The forward's plan.
    grad_probs : ArrayLike, floating point, [num_out_tokens], or None
        The gradient of ``permute(...).probs``.

    Returns
    -------
    grad_x : ArrayLike, [T, H]
        `unpermute` of ``grad``.
    grad_probs : ArrayLike, [T, k] or [T, E], or None
        Zero where a token is not routed to the expert.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit the plan.

    Examples
    --------
    >>> plan = fp8moe.plan_topk(np.array([[0, 1], [1, -1]], np.int32), 2, num_out_tokens=3)
    >>> grad_x, grad_probs = fp8moe.permute_backward(np.ones((3, 1), np.float32), plan)
    >>> grad_x[:, 0].tolist(), grad_probs
    ([2.0, 1.0], None)
    """
    call = enter(grad=grad, plan=plan, grad_probs=grad_probs)
    a = call.args
    checks.plan(call, a.plan)
    _check_rows("grad", a.grad, a.plan.num_out_tokens)
    if not isinstance(a.grad, QuantTensor):
        checks.dtype("grad", a.grad, checks.FLOATS)
    checks.arrays(("grad_probs", a.grad_probs, checks.FLOATS, (a.plan.num_out_tokens,)))
    return raw_permute_backward(a.grad, a.plan, a.grad_probs)


def raw_permute_backward(grad: Any, plan: PermutationPlan, grad_probs: Any = None) -> tuple[Any, Any]:
    call = current.call
    out: tuple[Any, Any] = call.empty((unpermute_spec(grad, plan), _probs_spec(plan, grad_probs)))
    call.run("permute", "permute_backward", grad, plan, grad_probs, out=out)
    return out


@operation
def unpermute_backward(
    grad: ArrayLike, plan: PermutationPlan, x: ArrayLike | None = None, merging_probs: ArrayLike | None = None
) -> tuple[Any, Any]:
    """Gradients of `unpermute` from the gradient of its result.

    Parameters
    ----------
    grad : ArrayLike or QuantTensor, [T, H]
        A `QuantTensor` is allowed only without ``merging_probs``.
    plan : PermutationPlan
        The forward's plan.
    x : ArrayLike, [num_out_tokens, H], or None
        The argument of `unpermute`; required with ``merging_probs``, otherwise None.
    merging_probs : ArrayLike, [T, k] or [T, E], or None
        The argument of `unpermute`. With them each row of grad_x is its token's gradient times its
        probability, and the gradient of a probability is the dot product of the token's gradient and the row
        of x.

    Returns
    -------
    grad_x : ArrayLike, [num_out_tokens, H]
        Zeros in rows that receive no token.
    grad_merging_probs : ArrayLike, [T, k] or [T, E], or None
        None without ``merging_probs``.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit the plan, or a plan that `permute` refuses.

    Examples
    --------
    >>> plan = fp8moe.plan_topk(np.array([[0, 1], [1, -1]], np.int32), 2, num_out_tokens=4)
    >>> grad_x, _ = fp8moe.unpermute_backward(np.array([[1.0], [2.0]], np.float32), plan)
    >>> grad_x[:, 0].tolist()
    [1.0, 1.0, 2.0, 0.0]
    """
    call = enter(grad=grad, plan=plan, x=x, merging_probs=merging_probs)
    a = call.args
    checks.plan(call, a.plan, fills=True)
    _check_rows("grad", a.grad, a.plan.num_tokens)
    if (a.x is None) != (a.merging_probs is None):
        present, missing = ("x", "merging_probs") if a.merging_probs is None else ("merging_probs", "x")
        raise ValueError(f"{missing}: got None with {present}; wanted both, or neither")
    if a.merging_probs is not None:
        if isinstance(a.grad, QuantTensor):
            raise TypeError(
                "grad: got a QuantTensor with merging_probs; wanted an array; pass fp8moe.dequantize(grad)"
            )
        checks.dtype("grad", a.grad, checks.FLOATS)
        checks.arrays(("x", a.x, (a.grad.dtype,), (a.plan.num_out_tokens, a.grad.shape[1])))
        _check_probs("merging_probs", a.merging_probs, a.plan)
    return raw_unpermute_backward(a.grad, a.plan, a.x, a.merging_probs)


def raw_unpermute_backward(
    grad: Any, plan: PermutationPlan, x: Any = None, merging_probs: Any = None
) -> tuple[Any, Any]:
    call = current.call
    spec = rows_spec(grad, plan.num_out_tokens), _probs_spec(plan, merging_probs)
    out: tuple[Any, Any] = call.empty(spec)
    call.run("permute", "unpermute_backward", grad, plan, x, merging_probs, out=out)
    return out


@operation
def sort_chunks(
    x: ArrayLike,
    split_sizes: ArrayLike,
    sorted_indices: ArrayLike,
    probs: ArrayLike | None = None,
    *,
    align_size: int = 1,
    chunks_per_group: int = 1,
    num_out_tokens: int | None = None,
    keep_rest: bool = False,
) -> SortedChunks:
    """Reorder chunks of rows: chunk j of the result is input chunk ``sorted_indices[j]``.

    Parameters
    ----------
    x : ArrayLike or QuantTensor, [N, H]
        An array, or a row-wise compact `QuantTensor`.
    split_sizes : ArrayLike, int32 or int64, [C]
        Number of rows of each input chunk.
    sorted_indices : ArrayLike, int32 or int64, [C]
        A permutation of the chunks.
    probs : ArrayLike, floating point, [N], or None
        Probabilities, reordered with the rows.
    align_size : int
        A: every group of ``chunks_per_group`` successive result chunks (for example one expert's rows from
        all ranks) is padded with zero rows to a multiple of it.
    chunks_per_group : int
        Number of chunks per group.
    num_out_tokens : int or None
        Number of rows of the result. None: N for align_size 1, else the static bound ``((N + min(G, N) * (A -
        1)) // A) * A`` for G groups. Rows past the last group are zeros. If the rows do not fit, the call
        raises on the CPU; on CUDA, where reading the sizes would synchronise, the rows past the end are
        dropped.
    keep_rest : bool
        Whether rows of x past the last chunk are copied to the same place; for align_size 1 only.

    Returns
    -------
    SortedChunks
        data [num_out_tokens, H], probs [num_out_tokens] or None, and the offsets of the groups.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit each other.

    Examples
    --------
    >>> x = np.array([[1.0], [2.0], [3.0]], np.float32)
    >>> fp8moe.sort_chunks(x, np.array([1, 2], np.int32), np.array([1, 0], np.int32)).data[:, 0].tolist()
    [2.0, 3.0, 1.0]
    """
    call = enter(x=x, split_sizes=split_sizes, sorted_indices=sorted_indices, probs=probs)
    a = call.args
    rows = _check_rows("x", a.x, "N")
    align_size = checks.integer("align_size", align_size, 1)
    chunks_per_group = checks.integer("chunks_per_group", chunks_per_group, 1)
    groups = _check_chunks(a.split_sizes, a.sorted_indices, chunks_per_group)
    keep_rest = _check_rest(keep_rest, align_size)
    checks.arrays(("probs", a.probs, checks.FLOATS, (rows,)))
    bound = _most_rows(rows, groups, align_size)
    if num_out_tokens is not None:
        num_out_tokens = checks.integer("num_out_tokens", num_out_tokens, 0)
    rows_out = bound if num_out_tokens is None else num_out_tokens
    end = _end_of_chunks(call, a.split_sizes, a.sorted_indices, align_size, chunks_per_group, rows)
    checks.room("num_out_tokens", rows_out, end, "split_sizes")
    options: dict[str, Any] = {"align_size": align_size, "chunks_per_group": chunks_per_group}
    options["keep_rest"] = keep_rest
    return raw_sort_chunks(a.x, a.split_sizes, a.sorted_indices, a.probs, num_out_tokens=rows_out, **options)


def raw_sort_chunks(
    x: Any,
    split_sizes: Any,
    sorted_indices: Any,
    probs: Any,
    *,
    align_size: int,
    num_out_tokens: int,
    chunks_per_group: int = 1,
    keep_rest: bool = False,
) -> SortedChunks:
    """Also with sorted_indices None: in their present order."""
    call = current.call
    groups = split_sizes.shape[0] // chunks_per_group
    out: SortedChunks = call.empty(sort_chunks_spec(x, probs, groups, num_out_tokens))
    options = {"align_size": align_size, "chunks_per_group": chunks_per_group, "keep_rest": keep_rest}
    call.run("permute", "sort_chunks", x, split_sizes, sorted_indices, probs, **options, out=out)
    return out


def sort_chunks_spec(x: Any, probs: Any, groups: int, rows: int) -> SortedChunks:
    return SortedChunks(
        rows_spec(x, rows),
        None if probs is None else ArraySpec((rows,), probs.dtype),
        ArraySpec((groups + 1,), np.dtype(np.int32)),
    )


@operation
def sort_chunks_backward(
    grad: ArrayLike,
    split_sizes: ArrayLike,
    sorted_indices: ArrayLike,
    grad_probs: ArrayLike | None = None,
    *,
    align_size: int = 1,
    chunks_per_group: int = 1,
    num_tokens: int | None = None,
    keep_rest: bool = False,
) -> tuple[Any, Any]:
    """Gradients of `sort_chunks`: the inverse reordering.

    Parameters
    ----------
    grad : ArrayLike, [num_out_tokens, H]
        The gradient of the data.
    split_sizes : ArrayLike, int32 or int64, [C]
        The forward's.
    sorted_indices : ArrayLike, int32 or int64, [C]
        The forward's.
    grad_probs : ArrayLike, floating point, [num_out_tokens], or None
        The gradient of the probabilities.
    align_size : int
        The forward's.
    chunks_per_group : int
        The forward's.
    num_tokens : int or None
        Number of rows of the forward's input; None: as many as ``grad`` has. Rows of no chunk are zeros.
    keep_rest : bool
        The forward's.

    Returns
    -------
    grad_x : ArrayLike, [num_tokens, H]
        The gradient of ``x``.
    grad_probs : ArrayLike, [num_tokens], or None
        The gradient of ``probs``.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit each other.

    Examples
    --------
    >>> sizes, order = np.array([1, 2], np.int32), np.array([1, 0], np.int32)
    >>> grad = np.array([[2.0], [3.0], [1.0]], np.float32)
    >>> fp8moe.sort_chunks_backward(grad, sizes, order)[0][:, 0].tolist()
    [1.0, 2.0, 3.0]
    """
    call = enter(grad=grad, split_sizes=split_sizes, sorted_indices=sorted_indices, grad_probs=grad_probs)
    a = call.args
    moved = rows = _check_rows("grad", a.grad, "N")
    align_size = checks.integer("align_size", align_size, 1)
    chunks_per_group = checks.integer("chunks_per_group", chunks_per_group, 1)
    groups = _check_chunks(a.split_sizes, a.sorted_indices, chunks_per_group)
    keep_rest = _check_rest(keep_rest, align_size)
    checks.arrays(("grad_probs", a.grad_probs, checks.FLOATS, (rows,)))
    rows = rows if num_tokens is None else checks.integer("num_tokens", num_tokens, 0)
    _most_rows(rows, groups, align_size)
    end = _end_of_chunks(call, a.split_sizes, a.sorted_indices, align_size, chunks_per_group, rows)
    checks.room("grad", moved, end, "split_sizes")
    options: dict[str, Any] = {"align_size": align_size, "chunks_per_group": chunks_per_group}
    options["keep_rest"] = keep_rest
    return raw_sort_chunks_backward(
        a.grad, a.split_sizes, a.sorted_indices, a.grad_probs, num_tokens=rows, **options
    )


def raw_sort_chunks_backward(
    grad: Any,
    split_sizes: Any,
    sorted_indices: Any,
    grad_probs: Any,
    *,
    align_size: int,
    num_tokens: int,
    chunks_per_group: int = 1,
    keep_rest: bool = False,
) -> tuple[Any, Any]:
    """Also with sorted_indices None, as `raw_sort_chunks`."""
    call = current.call
    probs_spec = None if grad_probs is None else ArraySpec((num_tokens,), grad_probs.dtype)
    out: tuple[Any, Any] = call.empty((rows_spec(grad, num_tokens), probs_spec))
    options = {"align_size": align_size, "chunks_per_group": chunks_per_group, "keep_rest": keep_rest}
    call.run(
        "permute", "sort_chunks_backward", grad, split_sizes, sorted_indices, grad_probs, **options, out=out
    )
    return out


@operation
def pad(
    x: ArrayLike, tokens_per_expert: ArrayLike, align_size: int, *, num_out_tokens: NumOutTokens = None
) -> Any:
    """Pad each expert's rows with zero rows to a multiple of ``align_size``; `unpad` is its backward.

    Parameters
    ----------
    x : ArrayLike or QuantTensor, [N, H]
        An array, or a row-wise compact `QuantTensor`, with rows sorted by expert.
    tokens_per_expert : ArrayLike, int32 or int64, [E], or list or tuple of int
        Number of rows of each expert.
    align_size : int
        Each expert's rows are padded to a multiple of it.
    num_out_tokens : int, "exact" or None
        Number of rows of the result. None: exact for a list, the static bound for an array. "exact"
        **synchronises once** on CUDA.

    Returns
    -------
    ArrayLike or QuantTensor, [num_out_tokens, H]
        As ``x``.

    Raises
    ------
    TypeError
        For a wrong dtype.
    ValueError
        If the counts exceed the rows of x, or ``num_out_tokens``. On CUDA the values of an array are not
        read, and such rows are dropped.

    Examples
    --------
    >>> fp8moe.pad(np.array([[1.0], [2.0], [3.0]], np.float32), [1, 2], 2)[:, 0].tolist()
    [1.0, 0.0, 2.0, 3.0]
    """
    return _pad_or_unpad("pad", x, tokens_per_expert, align_size, num_out_tokens)


@operation
def unpad(
    x: ArrayLike, tokens_per_expert: ArrayLike, align_size: int, *, num_out_tokens: NumOutTokens = None
) -> Any:
    """Remove each expert's padding; `pad` is its backward.

    Parameters
    ----------
    x : ArrayLike or QuantTensor, [P, H]
        Padded rows, as `pad` returns them.
    tokens_per_expert : ArrayLike, int32 or int64, [E], or list or tuple of int
        Number of rows of each expert, without padding.
    align_size : int
        Each expert's rows were padded to a multiple of it.
    num_out_tokens : int, "exact" or None
        Number of rows of the result. None: exact for a list; for an array as many as x has, with zeros past
        the last expert's rows. "exact" **synchronises once** on CUDA.

    Returns
    -------
    ArrayLike or QuantTensor, [num_out_tokens, H]
        As ``x``.

    Raises
    ------
    TypeError
        For a wrong dtype.
    ValueError
        As for `pad`.

    Examples
    --------
    >>> fp8moe.unpad(np.array([[1.0], [0.0], [2.0], [3.0]], np.float32), [1, 2], 2)[:, 0].tolist()
    [1.0, 2.0, 3.0]
    """
    return _pad_or_unpad("unpad", x, tokens_per_expert, align_size, num_out_tokens)


def _pad_or_unpad(verb: str, x: Any, counts: Any, align_size: int, num_out_tokens: NumOutTokens) -> Any:
    align_size = checks.integer("align_size", align_size, 1)
    count_values: np.ndarray | None = None
    if isinstance(counts, (list, tuple)):
        count_values = np.array([checks.integer("tokens_per_expert", c, 0) for c in counts], np.int32)
        call = enter(x=x)
        counts = call.upload(count_values)
        num_out_tokens = "exact" if num_out_tokens is None else num_out_tokens
    else:
        call = enter(x=x, tokens_per_expert=counts)
        counts = call.args.tokens_per_expert
        checks.dtype("tokens_per_expert", counts, checks.INTEGERS)
        checks.shape("tokens_per_expert", counts, ("E",))
    rows = _check_rows("x", call.args.x, "N")
    bound = _most_rows(rows, counts.shape[0], align_size)
    exact = is_exact(num_out_tokens)
    if count_values is None:
        count_values = call.to_host(counts) if exact else call.values(counts)
    rows_out = bound if verb == "pad" else rows
    if num_out_tokens is not None and not exact:
        rows_out = requested_rows(num_out_tokens)
    if count_values is not None:
        checks.counts("tokens_per_expert", count_values, rows, "x")
        end, end_padded = int(count_values.sum()), _last_row(count_values, align_size)
        if exact:
            rows_out = int(_padded(count_values, align_size).sum()) if verb == "pad" else end
        if verb == "unpad":
            checks.room("x", rows, end_padded, "tokens_per_expert, padded to align_size")
        checks.room("num_out_tokens", rows_out, end_padded if verb == "pad" else end, "tokens_per_expert")
    return _raw_pad_or_unpad(verb, call.args.x, counts, align_size, rows_out)


def raw_pad(x: Any, tokens_per_expert: Any, align_size: int, *, num_out_tokens: int) -> Any:
    return _raw_pad_or_unpad("pad", x, tokens_per_expert, align_size, num_out_tokens)


def _raw_pad_or_unpad(verb: str, x: Any, counts: Any, align_size: int, rows: int) -> Any:
    call = current.call
    out = call.empty(rows_spec(x, rows))
    call.run("permute", verb, x, counts, align_size=align_size, out=out)
    return out


def _check_rows(name: str, x: Any, rows: int | str) -> int:
    if isinstance(x, Quantized):  # which has a shape, too
        raise TypeError(f"{name}: got a Quantized; wanted an array; pass its rowwise or columnwise")
    if isinstance(x, QuantTensor):
        checks.quant_tensor(name, x, ROW_BLOCKS)
        checks.shape(f"{name}.data", x.data, (rows, "H"))
        return x.data.shape[0]  # type: ignore[no-any-return]
    checks.shape(name, x, (rows, "H"))
    return x.shape[0]  # type: ignore[no-any-return]


def _check_probs(name: str, probs: Any, plan: PermutationPlan) -> None:
    checks.arrays((name, probs, checks.FLOATS, (plan.num_tokens, plan.prob_columns)))


def _probs_spec(plan: PermutationPlan, probs: Any) -> ArraySpec | None:
    return None if probs is None else ArraySpec((plan.num_tokens, plan.prob_columns), probs.dtype)


def _check_rest(keep_rest: bool, align_size: int) -> bool:
    if checks.flag("keep_rest", keep_rest) and align_size != 1:
        raise ValueError(
            f"keep_rest: got {keep_rest} with align_size={align_size}; wanted align_size=1, or False"
        )
    return bool(keep_rest)


def _check_chunks(sizes: Any, indices: Any, chunks_per_group: int) -> int:
    checks.dtype("split_sizes", sizes, checks.INTEGERS)
    checks.shape("split_sizes", sizes, ("C",))
    checks.dtype("sorted_indices", indices, checks.INTEGERS)
    checks.shape("sorted_indices", indices, tuple(sizes.shape))
    if sizes.shape[0] % chunks_per_group:
        raise ValueError(
            f"chunks_per_group: got {chunks_per_group} for {sizes.shape[0]} chunks; wanted a divisor"
        )
    return int(sizes.shape[0]) // chunks_per_group


def _end_of_chunks(
    call: Call, sizes: Any, indices: Any, align_size: int, chunks_per_group: int, rows: int
) -> int | None:
    """End of the last chunk in the forward's result, or None if the sizes cannot be read. rows: of its
    input."""
    size_values, order = call.values(sizes), call.values(indices)
    if size_values is None or order is None:
        return None
    checks.counts("split_sizes", size_values, rows, "the unsorted array")
    if not np.array_equal(np.sort(order), np.arange(len(size_values))):
        raise ValueError(f"sorted_indices: got {order}; wanted a permutation of 0 to {len(size_values) - 1}")
    return _last_row(size_values[order].reshape(-1, chunks_per_group).sum(axis=1), align_size)


def _padded(counts: np.ndarray, align_size: int) -> np.ndarray:
    return -(-counts.astype(np.int64) // align_size) * align_size


def _last_row(counts: np.ndarray, align_size: int) -> int:
    """End of the last non-empty group, when the groups before it are padded."""
    non_empty = np.flatnonzero(counts)
    if not len(non_empty):
        return 0
    return int(_padded(counts[: non_empty[-1]], align_size).sum()) + int(counts[non_empty[-1]])


def _most_rows(rows: int, groups: int, align_size: int) -> int:
    """Upper bound of the padded rows over all possible counts; raises if it exceeds int32."""
    bound = static_bound(rows, groups, align_size)
    checks.int32_offsets(rows, groups, align_size, bound)
    return bound
