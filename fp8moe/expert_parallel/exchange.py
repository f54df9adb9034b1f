"""Dispatch, combine and their gradients: routing of rows to ranks, and assembly of the received rows."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fp8moe.activation import Activation
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
    NO_SETTINGS,
    ROUTER,
    Comm,
    Counts,
    DifferentRouters,
    Dispatched,
    Engine,
    PeerMemory,
    Pending,
    Route,
    Settings,
    Transport,
    backward_of,
    capacity_of,
    check_comm,
    chunks_of,
    implements,
    with_spare,
)
from fp8moe.layer.recipes import RECIPES
from fp8moe.ops.permute import unpermute
from fp8moe.ops.quantize import dequantize
from fp8moe.records import QuantTensor
from fp8moe.runtime import checks, counters
from fp8moe.runtime.dispatch import enter


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

    Parameters
    ----------
    x : ArrayLike, floating point, or QuantTensor, [T, H]
        The tokens; a `QuantTensor` is row-wise and compact.
    topk_ids : ArrayLike, int32 or int64, [T, k]
        Global expert ids; ids below 0 or from E on mean no expert.
    topk_probs : ArrayLike, floating point, [T, k]
        Weights of the experts' outputs.
    num_experts : int
        E, of all ranks together: a multiple of the number of ranks.
    comm : Transport or Engine
        The ranks and how they exchange rows, such as `fp8moe.torch.ProcessGroup`. Every
        rank calls this function.
    fmt : "e4m3", "e5m2" or None
        Format to which an array x, not of float64, is quantised in the pass that packs it, by 1x128 blocks
        with power-of-two scales; it is received as a `QuantTensor`. None: x is sent as it is.
    async_op : bool
        Return a `Pending`: work launched before its ``wait()`` overlaps the exchange.

    Returns
    -------
    Dispatched or DispatchedRows
        The rows received by this rank, `DispatchedRows` from an `Engine` that permutes; with ``async_op`` a
        `Pending` of it. The host reads the counts first, which **synchronises once** on CUDA; with the comm's
        `Capacity` nothing is read and nothing synchronises, except in the first dispatch of a kind.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit each other, and, on all ranks, for arguments that differ between ranks.
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
    settings: Settings = NO_SETTINGS,
) -> Callable[[bool], Pending]:
    """`dispatch` up to the sending of rows, which the returned function performs: every rank has announced
    its counts by then. The function takes ``async_op``.

    gradients: that the backward will compute, as in `fp8moe.moe_forward`. With the counts the ranks announce
    what their backwards will send, and all of them raise ValueError if that differs; an `Engine` and a
    transport with a capacity, which read no counts, do not detect it.
    spare: the received arrays get a few additional rows (`with_spare`), zeros with ids -1. Successive steps
    then mostly have equal shapes, for which launches are planned once: replanning a layer's forward and
    backward costs the host 1 ms.
    settings: what else must be equal on all ranks.
    """
    engine, world = _engine(comm), comm.world_size
    num_experts = checks.integer("num_experts", num_experts, 0)
    if num_experts % world:
        raise ValueError(f"num_experts: got {num_experts}; wanted a multiple of {world}, the ranks")
    if engine:
        check_rows(enter(x=x, topk_ids=topk_ids, topk_probs=topk_probs), num_experts)
        given = x, topk_ids, topk_probs, num_experts, fmt
        return lambda async_op: _pending(lambda: engine.dispatch(*given), async_op)
    capacity = capacity_of(comm)
    limit = None if capacity is None else capacity.rows
    # rows are packed before the counts are known, which keeps the device busy until they arrive
    packed = limit is not None or not implements(comm, PeerMemory)
    plan, entries, ids, rows = outgoing(x, topk_ids, topk_probs, num_experts, world, fmt, limit, packed)
    message = Message(x, fmt, (ids, topk_probs))
    experts, topk = num_experts // world, topk_ids.shape[1]
    options, gathers_bias, router, sums_router = settings
    block = message.like.block if isinstance(message.like, QuantTensor) else None
    header = {
        f"recipe, of {', '.join(RECIPES)}": -1 if options is None else [*RECIPES].index(options.recipe),
        "activation, by a checksum of its fields": _checksum(None if options is None else options.activation),
        "hidden": x.shape[1],
        "topk": topk,
        "num_experts": num_experts,
        "bytes of a row": message.row_bytes,
        f"rows, of {', '.join(FORMS)}": FORMS.index(form(message.like)),
        # one scale for 128 values, or MXFP8's four, have as many bytes
        "block": 0 if block is None else block[1],
        # of two dtypes, the padding of a message makes rows of equal size
        f"topk_probs, of {', '.join(FLOATS)}": FLOATS.index(message.dtype_of_last),
        "overlap_chunks": chunks_of(comm),
        "capacity.rows": 0 if capacity is None else capacity.rows,
        "bias2, whether given": int(gathers_bias),
        # ranks with a capacity do not compare it, but send as many numbers as those without
        BACKWARD: backward_of(gradients, sums_router) if capacity is None else 0,
        ROUTER: 0 if router is None else router(False),
    }
    transport: Any = comm
    if capacity is not None:
        transport.agree(header, entries)
        route = Route(plan, ((capacity.rows,) * world,) * world)
        arriving = capacity.entries or world * capacity.rows * min(topk, experts)
        first = 1
    else:
        numbers = plan.tokens_per_expert, entries
        try:
            counts, entered = transport.counts(numbers, header)
        except DifferentRouters:
            # on all ranks; some may have loaded a state dict, and sent the others the weights
            header[ROUTER] = 0 if router is None else router(True)
            counts, entered = transport.counts(numbers, header)
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


@lru_cache
def _checksum(activation: Activation | None) -> int:
    """31 bits, equal for equal activations in all processes."""
    return zlib.crc32(repr(activation).encode()) >> 1


def combine(
    y: Any, route: Any, comm: Comm, *, fmt: str | None = None, async_op: bool = False, out: Any = None
) -> Any:
    """Send each row back to its token's rank and sum every token's rows.

    Parameters
    ----------
    y : ArrayLike, floating point, [R, H]
        A result for each row that this rank received: the sum over its own experts.
    route : Route
        The ``route`` of what `dispatch` returned.
    comm : Transport or Engine
        As in `dispatch`.
    fmt : "e4m3", "e5m2" or None
        Format in which y is sent, by 1x128 blocks, at half the bytes of bfloat16 and one more rounding per
        rank; the result is then bfloat16. None: y is sent as it is.
    async_op : bool
        As in `dispatch`.
    out : ArrayLike or None, [T, H]
        Destination of the sums, in the result's dtype; None: a new array. None with an `Engine`.

    Returns
    -------
    ArrayLike, [T, H]
        The sums, in float32 and rounded to y's dtype; with ``async_op`` a `Pending` of them.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit each other.
    """
    if engine := _engine(comm):
        _no_out(out)
        return _finished(_pending(lambda: engine.combine(y, route, fmt), async_op), async_op)
    _check_received(route, comm, y=y)
    (y,) = _without_spare(route, comm, y)
    message = Message(y, fmt)

    def arrived(rows: Any) -> Any:
        y = rows_of(message.like, message.unpack(rows))
        if fmt is not None:
            # exact; with summation from FP8 rows 32,768 tokens take 3.8 ms, this way 2.3
            y = dequantize(y, dtype="bfloat16")
        return _sums(y, route, out)

    return _finished(_send_back(message, route, comm, async_op).then(arrived), async_op)


def combine_backward(
    dy: Any, route: Any, comm: Comm, *, fmt: str | None = None, async_op: bool = False
) -> Any:
    """The backward of `combine`: send each token's gradient along the forward's route.

    Parameters
    ----------
    dy : ArrayLike, floating point, or QuantTensor, [T, H]
        The gradient of the sums, like ``x`` of `dispatch`.
    route : Route
        The forward's.
    comm : Transport or Engine
        The forward's.
    fmt : "e4m3", "e5m2" or None
        As in `dispatch`.
    async_op : bool
        As in `dispatch`.

    Returns
    -------
    ArrayLike or QuantTensor, [R, H]
        The gradient of y, without synchronisation; with ``async_op`` a `Pending` of it.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit each other.
    """
    if engine := _engine(comm):
        return _finished(_pending(lambda: engine.combine_backward(dy, route, fmt), async_op), async_op)
    _check_route(route)
    checks.shape("dy", dy, (route.num_tokens, "H"))
    message = Message(dy, fmt)
    pending = _send(message, route, comm, async_op)

    def arrived(rows: Any) -> Any:
        return rows_of(message.like, message.unpack(rows, route.rows))

    return _finished(pending.then(arrived), async_op)


def dispatch_backward(
    dx: Any, dprobs: Any, route: Any, comm: Comm, *, async_op: bool = False, out: Any = (None, None)
) -> Any:
    """The backward of `dispatch`: send the gradients of received rows back, and sum those of every token.

    Parameters
    ----------
    dx : ArrayLike, floating point, [R, H]
        The gradient of the received rows.
    dprobs : ArrayLike, floating point, [R, k]
        The gradient of the received probabilities: zeros for the experts of other ranks.
    route : Route
        The forward's.
    comm : Transport or Engine
        The forward's.
    async_op : bool
        As in `dispatch`.
    out : tuple of two ArrayLike or None, [T, H] and [T, k]
        Destinations of the sums, as in `combine`.

    Returns
    -------
    dx : ArrayLike, [T, H]
        The sums of each token's rows, in float32 and rounded to dx's dtype. With ``async_op`` a `Pending` of
        both results.
    dprobs : ArrayLike, [T, k]
        As dx.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit each other.
    """
    if engine := _engine(comm):
        _no_out(*out)
        return _finished(_pending(lambda: engine.dispatch_backward(dx, dprobs, route), async_op), async_op)
    _check_received(route, comm, dx=dx, dprobs=dprobs)
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


def _check_route(route: Any) -> None:
    if not isinstance(route, Route):
        raise TypeError(
            f"route: got {type(route).__name__}; wanted a Route: the route of a dispatch's result"
        )


def _check_received(route: Any, comm: Any, **arrays: Any) -> None:
    """Check that arrays have one row for each row that this rank received."""
    _check_route(route)
    rows = sum(row[comm.rank] for row in route.counts) if route.rows is None else route.rows
    for name, array in arrays.items():
        checks.shape(name, array, (rows, "k" if name == "dprobs" else "H"))


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
    check_comm(comm)
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
