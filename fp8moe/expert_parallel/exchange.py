"""Dispatch, combine and their gradients: which rows go to which ranks, and what is made of those that
arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fp8moe import checks, counters
from fp8moe.dispatch import enter
from fp8moe.expert_parallel.messages import (
    FORMS,
    Message,
    check_rows,
    form,
    outgoing,
    part_of,
    rows_of,
    sum_rows,
)
from fp8moe.expert_parallel.protocols import (
    Comm,
    Counts,
    Dispatched,
    Engine,
    PeerMemory,
    Pending,
    Route,
    Transport,
    capacity_of,
    implements,
    with_spare,
)
from fp8moe.permute import unpermute
from fp8moe.quantize import dequantize


def dispatch(
    x: Any,
    topk_ids: Any,
    topk_probs: Any,
    num_experts: int,
    comm: Comm,
    *,
    fmt: str | None = None,
    async_op: bool = False,
) -> Any:
    """Send every token to the ranks of its experts.

    x: row-wise compact `QuantTensor` or array [T, H]. topk_ids: int32 or int64 [T, k], of all ranks' experts,
    below 0 or E and more for none. topk_probs: float [T, k]. num_experts: E of all ranks together. fmt:
    "e4m3" or "e5m2": x is quantised by 1x128 blocks with power-of-two scales on its way into the message, in
    the same pass, and arrives as a `QuantTensor`.

    Returns `Dispatched`, or with ``async_op`` a `Pending` of it: what is launched before its ``wait()`` runs
    beside the exchange. The counts are known to the host before, which **synchronises once** on CUDA; with a
    `Capacity` of the comm's, nothing is known and nothing synchronises, but for the first dispatch of a kind.
    """
    return _finished(prepare_dispatch(x, topk_ids, topk_probs, num_experts, comm, fmt)(async_op), async_op)


def prepare_dispatch(
    x: Any,
    topk_ids: Any,
    topk_probs: Any,
    num_experts: int,
    comm: Comm,
    fmt: str | None,
    *,
    spare: bool = False,
) -> Callable[[bool], Pending]:
    """All of `dispatch` but for the sending of rows, which the result does: after this every rank has told
    its counts. It takes ``async_op``.

    spare: the arrays of what arrives have a few more rows than that (`with_spare`), zeros whose ids are -1. A
    step after another has the same shapes then, most of the time, for which launches are planned once:
    planned anew, a layer's forward and backward take the host 1 ms more.
    """
    world = comm.world_size
    num_experts = checks.integer("num_experts", num_experts, 0)
    if num_experts % world:
        raise ValueError(f"num_experts: got {num_experts}; wanted a multiple of {world}, the ranks")
    if engine := _engine(comm):
        a = enter(x=x, topk_ids=topk_ids, topk_probs=topk_probs).args
        check_rows(a.x, a.topk_ids, a.topk_probs)
        given = x, topk_ids, topk_probs, num_experts, fmt
        return lambda async_op: _pending(lambda: engine.dispatch(*given), async_op)
    capacity = capacity_of(comm)
    limit = None if capacity is None else capacity.rows
    # rows are packed before the counts are known: something to do for the device until they are here
    packed = limit is not None or not implements(comm, PeerMemory)
    plan, entries, ids, rows = outgoing(x, topk_ids, topk_probs, num_experts, world, fmt, limit, packed)
    message = Message(x, fmt, (ids, topk_probs))
    experts, topk = num_experts // world, topk_ids.shape[1]
    header = {
        "hidden": x.shape[1],
        "topk": topk,
        "num_experts": num_experts,
        "bytes of a row": message.row_bytes,
        f"rows, of {', '.join(FORMS)}": FORMS.index(form(message.like)),
    }
    transport: Any = comm
    if capacity is not None:
        transport.agree({**header, "capacity.rows": capacity.rows}, entries)
        route = Route(plan, ((capacity.rows,) * world,) * world)
        arriving = capacity.entries or world * capacity.rows * min(topk, experts)
        first = 1
    else:
        counts, entered = transport.counts((plan.tokens_per_expert, entries), header)
        rows_here = with_spare(sum(row[comm.rank] for row in counts)) if spare else None
        route, arriving = Route(plan, counts, rows_here), sum(row[comm.rank] for row in entered)
        first = 0

    def arrived(received: Any) -> Dispatched:
        *data, ids, probs = message.unpack_with_ids(
            received, first + comm.rank * experts, experts, route.rows
        )
        return Dispatched(rows_of(message.like, data), ids, probs, route, arriving)

    if rows is not None:
        transport = comm
        return lambda async_op: exchange_rows(rows, message.row_bytes, route.counts, transport).then(arrived)
    return lambda async_op: _send(message, route, comm, async_op).then(arrived)


def combine(
    y: Any, route: Any, comm: Comm, *, fmt: str | None = None, async_op: bool = False, out: Any = None
) -> Any:
    """Send each row back and sum every token's: y [R, H] -> [T, H], in float32, rounded to y's dtype.

    out: what to write the sums to; of an `Engine` None.
    fmt: "e4m3" or "e5m2" sends y in FP8, by 1x128 blocks, at half the bytes of bfloat16 and a rounding more
    for each rank; the result is bfloat16 then.
    """
    if engine := _engine(comm):
        _no_out(out)
        return _finished(_pending(lambda: engine.combine(y, route, fmt), async_op), async_op)
    (y,) = _without_spare(route, comm, y)
    message = Message(y, fmt)

    def arrived(rows: Any) -> Any:
        y = rows_of(message.like, message.unpack(rows))
        if fmt is not None:
            # exact; summed from FP8 rows 32,768 tokens take 3.8 ms, so 2.3 (h200-tuning.jsonl)
            y = dequantize(y, dtype="bfloat16")
        return _sums(y, route, out)

    return _finished(_send_back(message, route, comm, async_op).then(arrived), async_op)


def combine_backward(
    dy: Any, route: Any, comm: Comm, *, fmt: str | None = None, async_op: bool = False
) -> Any:
    """The backward of `combine`: dy [T, H] -> [R, H], by the same route, and nothing synchronises. dy and fmt
    are as `dispatch` has x and fmt."""
    if engine := _engine(comm):
        return _finished(_pending(lambda: engine.combine_backward(dy, route, fmt), async_op), async_op)
    message = Message(dy, fmt)
    pending = _send(message, route, comm, async_op)

    def arrived(rows: Any) -> Any:
        return rows_of(message.like, message.unpack(rows, route.rows))

    return _finished(pending.then(arrived), async_op)


def dispatch_backward(
    dx: Any, dprobs: Any, route: Any, comm: Comm, *, async_op: bool = False, out: Any = (None, None)
) -> Any:
    """The backward of `dispatch`: (dx [R, H], dprobs [R, k]) -> (dx [T, H], dprobs [T, k]). An expert's
    probability has its gradient from its own rank, zeros from the others. out: as of `combine`, of both."""
    if engine := _engine(comm):
        _no_out(*out)
        return _finished(_pending(lambda: engine.dispatch_backward(dx, dprobs, route), async_op), async_op)
    dx, dprobs = _without_spare(route, comm, dx, dprobs)
    message = Message(dx, None, (dprobs,))

    def arrived(rows: Any) -> tuple[Any, Any]:
        parts = zip(message.unpack(rows), out, strict=True)
        return tuple(_sums(part, route, into) for part, into in parts)  # type: ignore[return-value]

    return _finished(_send_back(message, route, comm, async_op).then(arrived), async_op)


def _send(message: Message, route: Route, comm: Any, async_op: bool) -> Pending:
    """The tokens' rows to their ranks."""
    if (pending := deliver(message, route.plan.row_id_map, route.counts, comm, async_op)) is not None:
        return pending.then(lambda rows: message.kept(rows, route.rows))
    # a plan without a capacity has no rows that are nobody's among those that are sent
    rows = message.pack_by_rank(route.plan, capacity_of(comm) is not None)
    return exchange_rows(rows, message.row_bytes, route.counts, comm, route.rows if message.plain else None)


def _send_back(message: Message, route: Route, comm: Any, async_op: bool) -> Pending:
    """Rows to where they came from."""
    counts = tuple(zip(*route.counts, strict=True))
    if (pending := deliver(message, None, counts, comm, async_op)) is not None:
        return pending
    return exchange_rows(message.pack(), message.row_bytes, counts, comm, route.plan.num_out_tokens)


def _without_spare(route: Route, comm: Any, *arrays: Any) -> tuple[Any, ...]:
    """The rows that came, for a transport that is told to write each of them to its place; one that sends
    the first of them takes them all, whose shape lasts."""
    if route.rows is None or not implements(comm, PeerMemory):
        return arrays
    rows = sum(row[comm.rank] for row in route.counts)
    return tuple(part_of(a, 0, rows) for a in arrays)


def _sums(rows: Any, route: Route, out: Any = None) -> Any:
    """Each token's, of rows that came back: as many as the plan has room for, or just those."""
    plan = route.plan
    if rows.shape[0] != plan.num_out_tokens:
        plan = replace(plan, num_out_tokens=rows.shape[0])
    return unpermute(rows, plan) if out is None else sum_rows(rows, plan, out)


def deliver(
    message: Message, row_id_map: Any, counts: Counts, comm: Any, async_op: bool = False
) -> Pending | None:
    """The messages written into the ranks' memory; None where the transport cannot or has no room."""
    row_bytes = message.row_bytes
    # windows keep what was written before: with a capacity, rows that nobody writes would be taken for new
    if not implements(comm, PeerMemory) or capacity_of(comm) or not comm.fits(counts, row_bytes):
        return None
    _record_sent(counts, row_bytes, comm)
    pending: Pending = comm.deliver(
        lambda windows: message.write(row_id_map, windows), counts, row_bytes, async_op
    )
    return pending


def exchange_rows(
    rows: Any, row_bytes: int, counts: Counts, comm: Transport, size: int | None = None
) -> Pending:
    """Rows in rank order, to their ranks by `Transport.exchange`."""
    _record_sent(counts, row_bytes, comm)
    return comm.exchange(rows, counts, size)


def _record_sent(counts: Counts, row_bytes: int, comm: Transport) -> None:
    sent = counts[comm.rank]
    counters.record_sent((sum(sent) - sent[comm.rank]) * row_bytes)


def _engine(comm: Comm) -> Any:
    return comm if implements(comm, Engine) else None


def _no_out(*outs: Any) -> None:
    if any(out is not None for out in outs):
        raise ValueError("out: got memory to write to with an Engine; wanted None")


def _pending(action: Callable[[], Any], async_op: bool) -> Pending:
    """An engine's step: done at once where the caller does something beside it."""
    if not async_op:
        return Pending(action)
    result = action()
    return Pending(lambda: result)


def _finished(pending: Pending, async_op: bool) -> Any:
    return pending if async_op else pending.wait()
