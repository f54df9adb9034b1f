"""Planning: where every routed row goes (see `fp8moe.PermutationPlan`, and `fp8moe.reference.plan` for a
worked five-token example)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from fp8moe import checks
from fp8moe.dispatch import Call, enter, operation
from fp8moe.records import ArraySpec, PermutationPlan

NumOutTokens = int | Literal["exact"] | None


@operation
def plan_topk(
    topk_ids: Any, num_experts: int, *, align_size: int = 1, num_out_tokens: NumOutTokens = None
) -> PermutationPlan:
    """Plan from the expert ids of every token.

    topk_ids: int32 or int64 [T, k]; an id below 0 or of E and more means no expert, on every device (with
        FP8MOE_CHECK=1 ids above E are refused); an expert named twice by one token makes two rows.
    num_experts: E.
    align_size: each expert's rows are padded to a multiple of it.
    num_out_tokens: rows of the permuted buffer. None: the static bound
        ``((B + min(E, B) * (A - 1)) // A) * A`` with B = T * k, which needs no host synchronisation.
        "exact": the rows the routing asks for; this **synchronises once** on CUDA. An int: that
        many; rows that do not fit are dropped and counted in ``overflow``.

    Rows lie expert by expert, inside an expert by increasing token: stable and deterministic.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or range.
    """
    call = enter(topk_ids=topk_ids)
    return call.leave(raw_plan_topk(call, call.args.topk_ids, num_experts, align_size, num_out_tokens))


@operation
def plan_routing_map(
    routing_map: Any,
    *,
    align_size: int = 1,
    topk: int | None = None,
    num_out_tokens: NumOutTokens = None,
) -> PermutationPlan:
    """Plan from a mask.

    routing_map: bool or integer [T, E]; nonzero means routed.
    topk: the most experts a token may have. It narrows the row map and bounds the rows; a token with
        more keeps its first ``topk`` experts, the others are counted in ``overflow``.
    align_size, num_out_tokens: as for `plan_topk`, with B = T * topk. With neither ``topk`` nor
        ``num_out_tokens`` the plan is exact, which **synchronises once** on CUDA.

    With ``topk=None`` the row map has Transformer Engine's layout.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or range.
    """
    call = enter(routing_map=routing_map)
    return call.leave(raw_plan_routing_map(call, call.args.routing_map, align_size, topk, num_out_tokens))


def raw_plan_topk(
    call: Call,
    ids: Any,
    num_experts: int,
    align_size: int,
    num_out_tokens: NumOutTokens,
    name: str = "topk_ids",
) -> PermutationPlan:
    """`plan_topk` inside a call: raw arrays in and out. ``name``: of the ids."""
    checks.dtype(name, ids, checks.INTEGERS)
    checks.shape(name, ids, ("T", "k"))
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
