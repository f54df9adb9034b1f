"""Planning: the destination row of every routed token (see `fp8moe.PermutationPlan`, and
`fp8moe.reference.plan` for a worked five-token example)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from fp8moe.records import ArrayLike, ArraySpec, PermutationPlan
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import Call, current, enter, operation
from fp8moe.runtime.record_trees import SYMBOLIC_TYPES

NumOutTokens = int | Literal["exact"] | None


@operation
def plan_topk(
    topk_ids: ArrayLike, num_experts: int, *, align_size: int = 1, num_out_tokens: NumOutTokens = None
) -> PermutationPlan:
    """Plan a permutation from the expert ids of every token.

    Rows are sorted by expert and, within an expert, by token: the order is stable and deterministic.

    Parameters
    ----------
    topk_ids : ArrayLike, int32 or int64, [T, k]
        Expert ids. A negative id, or one of at least E, means no expert (with FP8MOE_CHECK=1, ids of at least
        E raise). An id that a token has twice gives two rows.
    num_experts : int
        E, the number of experts.
    align_size : int
        A: each expert's rows are padded to a multiple of it.
    num_out_tokens : int, "exact" or None
        Number of rows of the permuted buffer. None: the static bound ``((B + min(E, B) * (A - 1)) // A) * A``
        with B = T * k, which needs no host synchronisation. "exact": the number of rows that the routing
        needs; this **synchronises once** on CUDA. An int: this number; rows that do not fit are dropped and
        counted in ``overflow``.

    Returns
    -------
    PermutationPlan
        On the device of ``topk_ids``.

    Raises
    ------
    TypeError
        For a wrong dtype.
    ValueError
        For a wrong shape or range.

    Examples
    --------
    >>> plan = fp8moe.plan_topk(np.array([[0, 2], [2, 1]], np.int32), 3)
    >>> plan.tokens_per_expert.tolist(), plan.expert_offsets.tolist()
    ([1, 1, 2], [0, 1, 2, 4])
    """
    call = enter(topk_ids=topk_ids)
    ids = call.args.topk_ids
    num_experts = check_ids(call, "topk_ids", ids, num_experts)
    return raw_plan_topk(ids, num_experts, align_size=align_size, num_out_tokens=num_out_tokens)


def check_ids(call: Call, name: str, ids: Any, num_experts: int) -> int:
    """Check expert ids, of the argument ``name``; returns the number of experts."""
    checks.dtype(name, ids, checks.INTEGERS)
    checks.shape(name, ids, ("T", "k"))
    num_experts = checks.integer("num_experts", num_experts, 0, checks.MAX_EXPERTS)
    checks.expert_ids(call, name, ids, num_experts)
    return num_experts


def raw_plan_topk(
    topk_ids: Any, num_experts: int, *, align_size: int = 1, num_out_tokens: NumOutTokens = None
) -> PermutationPlan:
    """Like `raw_plan_routing_map`, it checks ``align_size`` and the number of rows: `plan_spec` does."""
    tokens, topk = topk_ids.shape
    spec = plan_spec(tokens, num_experts, topk, align_size, num_out_tokens, has_slots=True)
    return _run("plan_topk", topk_ids, spec, num_out_tokens)


@operation
def plan_routing_map(
    routing_map: ArrayLike,
    *,
    align_size: int = 1,
    topk: int | None = None,
    num_out_tokens: NumOutTokens = None,
) -> PermutationPlan:
    """Plan a permutation from a routing mask [T, E].

    Parameters
    ----------
    routing_map : ArrayLike, bool or integer, [T, E]
        Nonzero where the token is routed to the expert.
    align_size : int
        A: each expert's rows are padded to a multiple of it.
    topk : int or None
        Maximum number of experts per token, which bounds the size of the row map and the number of rows. A
        token with more keeps its first ``topk`` experts; the others are counted in ``overflow``.
    num_out_tokens : int, "exact" or None
        As for `plan_topk`, with B = T * topk. With neither ``topk`` nor ``num_out_tokens`` the plan is exact,
        which **synchronises once** on CUDA.

    Returns
    -------
    PermutationPlan
        With ``topk=None``, its row map has Transformer Engine's layout.

    Raises
    ------
    TypeError
        For a wrong dtype.
    ValueError
        For a wrong shape or range.

    Examples
    --------
    >>> plan = fp8moe.plan_routing_map(np.array([[1, 0, 1], [0, 1, 1]], bool))
    >>> plan.num_out_tokens, plan.tokens_per_expert.tolist()
    (4, [1, 1, 2])
    """
    call = enter(routing_map=routing_map)
    check_mask(call.args.routing_map)
    options: dict[str, Any] = {"align_size": align_size, "topk": topk, "num_out_tokens": num_out_tokens}
    return raw_plan_routing_map(call.args.routing_map, **options)


def check_mask(routing_map: Any) -> None:
    checks.dtype("routing_map", routing_map, checks.MASKS)
    checks.shape("routing_map", routing_map, ("T", "E"))


def raw_plan_routing_map(
    routing_map: Any, *, align_size: int, topk: int | None, num_out_tokens: NumOutTokens
) -> PermutationPlan:
    if topk is None:
        num_out_tokens = "exact" if num_out_tokens is None else num_out_tokens
    tokens, experts = routing_map.shape
    spec = plan_spec(tokens, experts, places(topk, experts), align_size, num_out_tokens, has_slots=False)
    return _run("plan_routing_map", routing_map, spec, num_out_tokens)


@operation
def plan_row_map(
    row_id_map: ArrayLike, pad_offsets: ArrayLike | None = None, *, num_out_tokens: int
) -> PermutationPlan:
    """Make a plan from a row map in Transformer Engine's layout.

    For callers that received permuted rows with their row map but without a plan. Counts and offsets are
    computed from the map.

    Parameters
    ----------
    row_id_map : ArrayLike, int32, [T, 2 * E + 1]
        As `PermutationPlan.row_id_map` with R = E. Only the first n_t entries of token t are read; the others
        may have any value.
    pad_offsets : ArrayLike, int32, [E], or None
        Total padding of the experts before each expert; None: no padding.
    num_out_tokens : int
        Number of rows of the permuted buffer.

    Returns
    -------
    PermutationPlan
        On the device of ``row_id_map``, with a copy of it. The call does not synchronise. ``align_size`` is
        1, ``padded_tokens_per_expert`` does not include padding, and the last offset is the end of the last
        expert's rows without padding, because the map does not contain the last expert's padding.

    Raises
    ------
    TypeError
        For a wrong dtype.
    ValueError
        For a wrong shape or range.

    Examples
    --------
    >>> plan = fp8moe.plan_routing_map(np.array([[1, 0, 1], [0, 1, 1]], bool), align_size=2)
    >>> again = fp8moe.plan_row_map(plan.row_id_map, plan.pad_offsets, num_out_tokens=plan.num_out_tokens)
    >>> again.tokens_per_expert.tolist(), again.expert_offsets.tolist()
    ([1, 1, 2], [0, 2, 4, 6])
    """
    call = enter(row_id_map=row_id_map, pad_offsets=pad_offsets)
    row_id_map, pad_offsets = call.args.row_id_map, call.args.pad_offsets
    checks.dtype("row_id_map", row_id_map, (checks.INT32,))
    checks.shape("row_id_map", row_id_map, ("T", "2E+1"))
    if row_id_map.shape[1] % 2 == 0:
        raise ValueError(f"row_id_map: got shape {list(row_id_map.shape)}; wanted [T, 2E+1]")
    experts = row_id_map.shape[1] // 2
    if pad_offsets is not None:
        checks.dtype("pad_offsets", pad_offsets, (checks.INT32,))
        checks.shape("pad_offsets", pad_offsets, (experts,))
    num_out_tokens = checks.integer("num_out_tokens", num_out_tokens, 0)
    spec = plan_spec(row_id_map.shape[0], experts, experts, 1, num_out_tokens, has_slots=False)
    out = call.empty(spec)
    call.run("plan", "plan_row_map", row_id_map, pad_offsets, out=out)
    return call.leave(out)  # type: ignore[no-any-return]


@operation
def plan_index_map(row_id_map: ArrayLike, topk: int, *, num_out_tokens: int) -> PermutationPlan:
    """Make a plan from a map by index, Transformer Engine's ``map_type="index"``.

    The map gives destination rows but no expert ids, so the plan has a single expert.

    Parameters
    ----------
    row_id_map : ArrayLike, int32, [k * T]
        The row of token t's entry j is at j * T + t, negative if the entry is dropped
        (`fp8moe.ops.row_maps`). `permute` and `unpermute_backward`, which write rows, require that the n
        other entries are a permutation of the rows 0 to n - 1: other maps are refused on the CPU and with
        FP8MOE_CHECK=1. On CUDA, where reading them would synchronise, this is not checked: only the rows
        from n on are zeroed, and a row before n without an entry is left uninitialised.
    topk : int
        k.
    num_out_tokens : int
        Rows of the permuted buffer.

    Returns
    -------
    PermutationPlan
        On the device of ``row_id_map``, with T tokens, k entries per token, and E = 1. The call does not
        synchronise.

    Raises
    ------
    TypeError
        For a wrong dtype.
    ValueError
        For a wrong shape or range.

    Examples
    --------
    >>> plan = fp8moe.plan_index_map(np.array([1, 0, -1, 2], np.int32), 2, num_out_tokens=3)
    >>> fp8moe.permute(np.array([[1.0], [2.0]]), plan).data[:, 0].tolist()
    [2.0, 1.0, 2.0]
    """
    call = enter(row_id_map=row_id_map)
    row_id_map = call.args.row_id_map
    topk = checks.integer("topk", topk, 1)
    num_out_tokens = checks.integer("num_out_tokens", num_out_tokens, 0)
    checks.dtype("row_id_map", row_id_map, (checks.INT32,))
    checks.shape("row_id_map", row_id_map, ("k * T",))
    if row_id_map.shape[0] % topk:
        raise ValueError(
            f"row_id_map: got shape {list(row_id_map.shape)}; wanted [k * T], a multiple of topk={topk}"
        )
    spec = plan_spec(row_id_map.shape[0] // topk, 1, topk, 1, num_out_tokens, has_slots=True)
    out = call.empty(spec)
    call.run("plan", "plan_index_map", row_id_map, out=out)
    return call.leave(out)  # type: ignore[no-any-return]


def places(topk: int | None, num_experts: int) -> int:
    """Entries per token in the row map of a mask."""
    return num_experts if topk is None else min(checks.integer("topk", topk, 0), num_experts)


def plan_spec(
    num_tokens: int,
    num_experts: int,
    width: int,
    align_size: int,
    num_out_tokens: NumOutTokens,
    *,
    has_slots: bool,
) -> PermutationPlan:
    """Specs of a plan; for "exact", with the static bound until the rows have been counted."""
    align_size = checks.integer("align_size", align_size, 1)
    if num_experts > checks.MAX_EXPERTS:
        raise ValueError(f"num_experts: got {num_experts}; wanted at most {checks.MAX_EXPERTS}")
    requested = None if num_out_tokens is None or is_exact(num_out_tokens) else num_out_tokens
    rows = 0 if requested is None else requested_rows(requested)
    if requested is None or type(num_tokens) is int:  # not for symbols: a check would add guards
        bound = static_bound(num_tokens * width, num_experts, align_size)
        checks.int32_offsets(num_tokens * width, num_experts, align_size, bound)
        rows = bound if requested is None else rows
    shape = num_tokens, num_experts, width, has_slots
    plan = PermutationPlan(None, *shape, rows, align_size)
    return replace(plan, data=ArraySpec((plan.size,), checks.INT32))


def is_exact(num_out_tokens: Any) -> bool:
    return isinstance(num_out_tokens, str) and num_out_tokens == "exact"


def requested_rows(num_out_tokens: Any) -> int:
    """Check a ``num_out_tokens`` that is neither "exact" nor None."""
    if isinstance(num_out_tokens, str):
        raise ValueError(f'num_out_tokens: got {num_out_tokens!r}; wanted an integer, "exact" or None')
    return checks.integer("num_out_tokens", num_out_tokens, 0)


def static_bound(entries: int, num_experts: int, align_size: int) -> int:
    """Upper bound of the padded rows of ``entries`` routed rows, over all routings."""
    if type(entries) in SYMBOLIC_TYPES:  # min() would compare, and compile anew for fewer rows than experts
        occupied = entries.__sym_min__(num_experts)  # type: ignore[attr-defined]
    else:
        occupied = min(num_experts, entries)
    padding = occupied * (align_size - 1)
    return (entries + padding) // align_size * align_size


def _run(verb: str, routing: Any, spec: PermutationPlan, num_out_tokens: NumOutTokens) -> PermutationPlan:
    call = current.call
    out: PermutationPlan = call.empty(spec)
    call.run("plan", verb, routing, out=out)
    if is_exact(num_out_tokens):
        # With the static bound nothing is dropped, so only the number of rows changes.
        rows = int(call.to_host(out.expert_offsets)[-1])
        out = replace(out, num_out_tokens=rows)
    return out
