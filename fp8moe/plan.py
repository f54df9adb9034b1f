"""Planning: where every routed row goes (see `fp8moe.PermutationPlan`, and `fp8moe.reference.plan` for a
worked five-token example)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from fp8moe import checks
from fp8moe.dispatch import Call, enter, operation
from fp8moe.records import ArrayLike, ArraySpec, PermutationPlan

NumOutTokens = int | Literal["exact"] | None


@operation
def plan_topk(
    topk_ids: ArrayLike, num_experts: int, *, align_size: int = 1, num_out_tokens: NumOutTokens = None
) -> PermutationPlan:
    """Plan a permutation from the expert ids of every token.

    Rows lie expert by expert, and of one expert by increasing token: the order is stable and deterministic.

    Parameters
    ----------
    topk_ids : ArrayLike, int32 or int64, [T, k]
        An id below 0, or of E and more, means no expert (with FP8MOE_CHECK=1 ids above E are refused). An
        expert that one token names twice makes two rows.
    num_experts : int
        E.
    align_size : int
        A: each expert's rows are padded to a multiple of it.
    num_out_tokens : int, "exact" or None
        Rows of the permuted buffer. None: the static bound ``((B + min(E, B) * (A - 1)) // A) * A`` with B =
        T * k, which needs no host synchronisation. "exact": the rows that the routing asks for; this
        **synchronises once** on CUDA. An int: that many; rows that do not fit are dropped and counted in
        ``overflow``.

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
    return raw_plan_topk(call, call.args.topk_ids, num_experts, align_size, num_out_tokens)


@operation
def plan_routing_map(
    routing_map: ArrayLike,
    *,
    align_size: int = 1,
    topk: int | None = None,
    num_out_tokens: NumOutTokens = None,
) -> PermutationPlan:
    """Plan a permutation from a mask of tokens and experts.

    Parameters
    ----------
    routing_map : ArrayLike, bool or integer, [T, E]
        Nonzero means routed.
    align_size : int
        A: each expert's rows are padded to a multiple of it.
    topk : int or None
        The most experts a token may have. It narrows the row map and bounds the rows; a token with more keeps
        its first ``topk`` experts, the others are counted in ``overflow``.
    num_out_tokens : int, "exact" or None
        As for `plan_topk`, with B = T * topk. With neither ``topk`` nor ``num_out_tokens`` the plan is exact,
        which **synchronises once** on CUDA.

    Returns
    -------
    PermutationPlan
        With ``topk=None`` its row map has Transformer Engine's layout.

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
    return raw_plan_routing_map(call, call.args.routing_map, align_size, topk, num_out_tokens)


@operation
def plan_row_map(
    row_id_map: ArrayLike, pad_offsets: ArrayLike | None = None, *, num_out_tokens: int
) -> PermutationPlan:
    """The plan that a row map of Transformer Engine's layout belongs to.

    What a caller has who was handed rows with their map and no plan; counts and offsets come from the map.

    Parameters
    ----------
    row_id_map : ArrayLike, int32, [T, 2E+1]
        As `PermutationPlan.row_id_map` is with R = E. Of each token its first n_t entries are read, whatever
        lies behind them.
    pad_offsets : ArrayLike, int32, [E], or None
        Padding of all experts before each; None where no expert is padded.
    num_out_tokens : int
        Rows of the permuted buffer.

    Returns
    -------
    PermutationPlan
        On the device of ``row_id_map``, of which it has a copy. Nothing synchronises. ``align_size`` is 1,
        ``padded_tokens_per_expert`` counts rows without padding, and the last offset is where the last
        expert's rows end: its padding cannot be told from the rows after it, and need not be.

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
    """The plan that moves rows as a map by index says, Transformer Engine's of ``map_type="index"``.

    Where an entry's row is depends on the order of the ids alone, so all entries are of one expert here.

    Parameters
    ----------
    row_id_map : ArrayLike, int32, [k * T]
        The row of a token's entry j at j * T + t, below 0 where it has none (`fp8moe.row_maps`). For
        `permute` and `unpermute_backward`, which write rows, the n entries that have one name the rows 0 to
        n - 1, each once: another map is refused on the CPU and with FP8MOE_CHECK=1; on CUDA, where looking
        would synchronise, they write zeros from row n on and leave rows before it that nobody names as they
        were allocated.
    topk : int
        k.
    num_out_tokens : int
        Rows of the permuted buffer.

    Returns
    -------
    PermutationPlan
        On the device of ``row_id_map``, of T tokens, k experts each, E = 1. Nothing synchronises.

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


def raw_plan_topk(
    call: Call,
    ids: Any,
    num_experts: int,
    align_size: int,
    num_out_tokens: NumOutTokens,
    name: str = "topk_ids",
) -> PermutationPlan:
    """`plan_topk` inside a call: raw arrays in and out. ``name``: of the ids."""
    checks.arrays((name, ids, checks.INTEGERS, ("T", "k")))
    num_experts = checks.integer("num_experts", num_experts, 0, checks.MAX_EXPERTS)
    checks.expert_ids(call, name, ids, num_experts)
    spec = plan_spec(ids.shape[0], num_experts, ids.shape[1], align_size, num_out_tokens, has_slots=True)
    return _run(call, "plan_topk", ids, spec, num_out_tokens)


def raw_plan_routing_map(
    call: Call, mask: Any, align_size: int, topk: int | None, num_out_tokens: NumOutTokens
) -> PermutationPlan:
    """`plan_routing_map` inside a call: raw arrays in and out."""
    if mask.dtype.kind not in "biu":
        raise TypeError(f"routing_map: got dtype {mask.dtype.name}; wanted bool or an integer type")
    checks.shape("routing_map", mask, ("T", "E"))
    if topk is None:
        num_out_tokens = "exact" if num_out_tokens is None else num_out_tokens
    tokens, experts = mask.shape
    spec = plan_spec(tokens, experts, places(topk, experts), align_size, num_out_tokens, has_slots=False)
    return _run(call, "plan_routing_map", mask, spec, num_out_tokens)


def places(topk: int | None, num_experts: int) -> int:
    """Entries of a token in a mask's row map."""
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
    """Shapes of a plan; for "exact", with the static bound in place of the rows not yet counted."""
    align_size = checks.integer("align_size", align_size, 1)
    if num_experts > checks.MAX_EXPERTS:
        raise ValueError(f"num_experts: got {num_experts}; wanted at most {checks.MAX_EXPERTS}")
    given = None if num_out_tokens is None or is_exact(num_out_tokens) else num_out_tokens
    rows = 0 if given is None else checks.integer("num_out_tokens", given, 0)
    if given is None or type(num_tokens) is int:  # torch would compile anew by what it learns of its sizes
        bound = static_bound(num_tokens * width, num_experts, align_size)
        checks.int32_offsets(num_tokens * width, num_experts, align_size, bound)
        rows = bound if given is None else rows
    shape = num_tokens, num_experts, width, has_slots
    plan = PermutationPlan(None, *shape, rows, align_size)
    return replace(plan, data=ArraySpec((plan.size,), checks.INT32))


def is_exact(num_out_tokens: Any) -> bool:
    return isinstance(num_out_tokens, str) and num_out_tokens == "exact"


def static_bound(entries: int, num_experts: int, align_size: int) -> int:
    """The most rows that ``entries`` routed rows can take, whatever the routing."""
    padding = min(num_experts, entries) * (align_size - 1)
    return (entries + padding) // align_size * align_size


def _run(
    call: Call, verb: str, routing: Any, spec: PermutationPlan, num_out_tokens: NumOutTokens
) -> PermutationPlan:
    out = call.empty(spec)
    call.run("plan", verb, routing, out=out)
    if is_exact(num_out_tokens):
        # The static bound drops nothing, so the maps are those of an exact plan already.
        rows = int(call.to_host(out.expert_offsets)[-1])
        out = replace(out, num_out_tokens=rows)
    return out
