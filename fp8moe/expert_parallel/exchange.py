"""Dispatch, combine and their gradients: routing of rows to ranks, and assembly of the received rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from fp8moe import checks, counters
from fp8moe.dispatch import enter
from fp8moe.expert_parallel.messages import (
    FLOATS,
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
    BACKWARD,
    Comm,
    Counts,
    Dispatched,
    Engine,
    PeerMemory,
    Pending,
    Route,
    Transport,
    backward_of,
    capacity_of,
    chunks_of,
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

    x: row-wise compact `QuantTensor` or array [T, H]. topk_ids: int32 or int64 [T, k], global expert ids; ids
    below 0 or from E on mean no expert. topk_probs: float [T, k]. num_experts: E, of all ranks together. fmt:
    "e4m3" or "e5m2": x is quantised by 1x128 blocks with power-of-two scales while it is packed, in the same
    pass, and is received as a `QuantTensor`.

    Returns `Dispatched`, or with ``async_op`` a `Pending` of it: work launched before its ``wait()`` overlaps
    the exchange. The host reads the counts first, which **synchronises once** on CUDA; with the comm's
    `Capacity` nothing is read and nothing synchronises, except in the first dispatch of a kind.
    """
    given = x, topk_ids, topk_probs, num_experts, comm, fmt
    return _finished(prepare_dispatch(*given, gradients=("dx", "dprobs"))(async_op), async_op)


def prepare_dispatch(
    x: Any,
    topk_ids: Any,
    topk_probs: Any,
    num_experts: int,
    comm: Comm,
    fmt: str | None,
    *,
    gradients: Collection[str],
    spare: bool = False,
) -> Callable[[bool], Pending]:
    """`dispatch` up to the sending of rows, which the returned function performs: every rank has announced
    its counts by then. The function takes ``async_op``.

    gradients: that the backward will compute, as in `fp8moe.moe_forward`. With the counts the ranks announce
    what their backwards will send, and all of them raise ValueError if that differs; an `Engine` and a
    transport with a capacity, which read no counts, do not detect it.
    spare: the received arrays get a few additional rows (`with_spare`), zeros with ids -1. Successive steps
    then mostly have equal shapes, for which launches are planned once: replanning a layer's forward and
    backward costs the host 1 ms.
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
    # rows are packed before the counts are known, which keeps the device busy until they arrive
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
        # of two dtypes, the padding of a message makes rows of equal size
        f"topk_probs, of {', '.join(FLOATS)}": FLOATS.index(message.dtype_of_last),
        "overlap_chunks": chunks_of(comm),
    }
    transport: Any = comm
    if capacity is not None:
        transport.agree({**header, "capacity.rows": capacity.rows}, entries)
        route = Route(plan, ((capacity.rows,) * world,) * world)
        arriving = capacity.entries or world * capacity.rows * min(topk, experts)
        first = 1
    else:
        header[BACKWARD] = backward_of(gradients)
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
    """Send each row back and sum every token's rows: y [R, H] -> [T, H], in float32, rounded to y's dtype.

    out: destination of the sums; None with an `Engine`.
    fmt: "e4m3" or "e5m2" sends y in FP8, by 1x128 blocks, at half the bytes of bfloat16 and one more rounding
    per rank; the result is then bfloat16.
    """
    if engine := _engine(comm):
        _no_out(out)
        return _finished(_pending(lambda: engine.combine(y, route, fmt), async_op), async_op)
    (y,) = _without_spare(route, comm, y)
    message = Message(y, fmt)

    def arrived(rows: Any) -> Any:
        y = rows_of(message.like, message.unpack(rows))
        if fmt is not None:
            # exact; with summation from FP8 rows 32,768 tokens take 3.8 ms, this way 2.3 (h200-tuning.jsonl)
            y = dequantize(y, dtype="bfloat16")
        return _sums(y, route, out)

    return _finished(_send_back(message, route, comm, async_op).then(arrived), async_op)


def combine_backward(
    dy: Any, route: Any, comm: Comm, *, fmt: str | None = None, async_op: bool = False
) -> Any:
    """The backward of `combine`: dy [T, H] -> [R, H], along the same route, without synchronisation. dy and
    fmt are like x and fmt of `dispatch`."""
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
    """The backward of `dispatch`: (dx [R, H], dprobs [R, k]) -> (dx [T, H], dprobs [T, k]). A probability's
    gradient comes from its expert's rank; the other ranks send zeros. out: as in `combine`, a pair."""
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
    """Sends the tokens' rows to their ranks."""
    if (pending := deliver(message, route.plan.row_id_map, route.counts, comm, async_op)) is not None:
        return pending.then(lambda rows: message.kept(rows, route.rows))
    # without a capacity, every row of the plan belongs to a token
    rows = message.pack_by_rank(route.plan, capacity_of(comm) is not None)
    return exchange_rows(rows, message.row_bytes, route.counts, comm, route.rows if message.plain else None)


def _send_back(message: Message, route: Route, comm: Any, async_op: bool) -> Pending:
    """Sends rows back to their ranks."""
    counts = tuple(zip(*route.counts, strict=True))
    if (pending := deliver(message, None, counts, comm, async_op)) is not None:
        return pending
    return exchange_rows(message.pack(), message.row_bytes, counts, comm, route.plan.num_out_tokens)


def _without_spare(route: Route, comm: Any, *arrays: Any) -> tuple[Any, ...]:
    """The received rows without spare ones, for a `PeerMemory`, which writes every row it is given. Other
    transports take the full array, whose shape is constant, and send its first rows."""
    if route.rows is None or not implements(comm, PeerMemory):
        return arrays
    rows = sum(row[comm.rank] for row in route.counts)
    return tuple(part_of(a, 0, rows) for a in arrays)


def _sums(rows: Any, route: Route, out: Any = None) -> Any:
    """Sums each token's returned rows: as many as the plan's buffer has, or exactly those received."""
    plan = route.plan
    if rows.shape[0] != plan.num_out_tokens:
        plan = replace(plan, num_out_tokens=rows.shape[0])
    return unpermute(rows, plan) if out is None else sum_rows(rows, plan, out)


def deliver(
    message: Message, row_id_map: Any, counts: Counts, comm: Any, async_op: bool = False
) -> Pending | None:
    """Writes the messages into the ranks' memory; None if the transport cannot or has no room."""
    row_bytes = message.row_bytes
    # windows keep earlier contents: with a capacity, unwritten rows would be taken for new ones
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
    """Sends rows, in rank order, to their ranks by `Transport.exchange`."""
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
    """Runs an engine's step: immediately, if the caller overlaps it with other work."""
    if not async_op:
        return Pending(action)
    result = action()
    return Pending(lambda: result)


def _finished(pending: Pending, async_op: bool) -> Any:
    return pending if async_op else pending.wait()
