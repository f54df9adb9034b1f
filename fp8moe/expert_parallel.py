"""Expert parallelism: rows travel to the ranks that hold their experts, and sums travel back.

Each of W ranks holds E / W experts, in order. A token goes once to every rank that has one of its experts,
with all its expert ids and probabilities behind it in the same message; there `fp8moe.plan_topk` sees rows
with local ids, and the other ids as none. Each rank sums its own experts' rows of a token, and the token's
rank sums over ranks. So for k experts on W ranks a token costs min(k, W) rows each way at most, and FP8 rows
with their scales half of what bfloat16's cost (the FP8-Flow-MoE paper, arXiv 2511.02302: quantise before
dispatch).

How bytes move is a `Transport`: `fp8moe.adapters.torch_distributed` (NCCL, gloo) or `.cupy_nccl`. Where ranks
can write into each other's memory it is `PeerMemory`: `.torch_symmetric_memory`. What moves rows by itself is
an `Engine`: `.deep_ep`. JAX has its own collectives: `.jax_expert_parallel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fp8moe import checks, tracing
from fp8moe.dispatch import enter, operation
from fp8moe.formats import round_up
from fp8moe.interop import dtype_named
from fp8moe.permute import permute, unpermute
from fp8moe.plan import plan_routing_map
from fp8moe.quantize import dequantize, quantize_spec
from fp8moe.records import ArraySpec, PermutationPlan, QuantTensor, Record

UINT8 = np.dtype(np.uint8)
FORMS = ("bfloat16", "float16", "float32", "float64", "e4m3", "e5m2", "e2m1")  # what rows are sent as


class Pending:
    """Something that is on its way. `wait` returns it, on the caller's stream."""

    def __init__(self, finish: Callable[[], Any]):
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    @property
    def done(self) -> bool:
        """Whether it was waited for."""
        return self._finish is None

    def wait(self) -> Any:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result

    def then(self, function: Callable[[Any], Any]) -> Pending:
        return Pending(lambda: function(self.wait()))


Counts = tuple[tuple[int, ...], ...]  # [W][W]: from each rank to each


@runtime_checkable
class Transport(Protocol):
    """What moves rows between ranks; every rank calls the same methods in the same order."""

    rank: int
    world_size: int

    def counts(self, counts: tuple[Any, ...], header: dict[str, int]) -> list[Counts]:
        """Tell every rank its numbers: each of ``counts`` is int32 [W]. Returns for each, on the host, what
        every rank told every rank, which **synchronises once** on CUDA. The header must be the same on all
        ranks: ValueError on all of them, naming the first that differs and what differs."""
        ...

    def exchange(self, rows: Any, counts: Counts, size: int | None = None) -> Pending:
        """The first rows of rows [N, columns], rank by rank, to the ranks: counts[a][b] from a to b. The
        result is of the same kind and dtype, and first in it the rows from the ranks; it has ``size`` rows,
        by default just these."""
        ...


@runtime_checkable
class PeerMemory(Transport, Protocol):
    """A transport whose ranks, eight at most, write into each other's memory: rows are gathered, and
    quantised, on their way there."""

    def fits(self, counts: Counts, row_bytes: int) -> bool:
        """Whether `deliver` has room for such rows; where not, `exchange` moves them."""
        ...

    def deliver(
        self, write: Callable[[tuple[Any, ...]], None], counts: Counts, row_bytes: int, async_op: bool
    ) -> Pending:
        """``write`` is called once, with uint8 [counts[this rank][r], row_bytes] of each rank r's memory,
        and launches what fills them. The result is uint8 [rows from the ranks, row_bytes]; it may be used
        until two more have been asked for. Without ``async_op`` it is waited for at once."""
        ...


@runtime_checkable
class Engine(Protocol):
    """What does the four steps itself: `dispatch` and the others below hand over to it."""

    rank: int
    world_size: int

    def dispatch(
        self, x: Any, topk_ids: Any, topk_probs: Any, num_experts: int, fmt: str | None
    ) -> Dispatched: ...

    def combine(self, y: Any, route: Any, fmt: str | None) -> Any: ...

    def dispatch_gradient(self, dy: Any, route: Any, fmt: str | None) -> Any: ...

    def combine_gradient(self, dx: Any, dprobs: Any, route: Any) -> tuple[Any, Any]: ...


Comm = Transport | Engine


@dataclass(frozen=True)
class Route(Record):
    """Which rows went where. plan: the tokens' permutation into rank order, W "experts", in a buffer for the
    most rows that there can be, so that its shape is the same at every step. counts: rows from each rank to
    each."""

    plan: PermutationPlan
    counts: Counts

    @property
    def num_tokens(self) -> int:
        return self.plan.num_tokens


@dataclass(frozen=True)
class Dispatched(Record):
    """What arrived at this rank, R rows. x: [R, H], as sent; topk_ids: int32 [R, k], this rank's experts from
    0 on, -1 for others; topk_probs: [R, k] in the dtype sent. num_entries: how many ids are not -1, so
    ``plan_topk(..., num_out_tokens=static_bound(num_entries, ...))`` needs to look at nothing."""

    x: Any
    topk_ids: Any
    topk_probs: Any
    route: Any
    num_entries: int


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
    beside the exchange. The counts are known to the host before, which **synchronises once** on CUDA.
    """
    world = comm.world_size
    num_experts = checks.integer("num_experts", num_experts, 0)
    if num_experts % world:
        raise ValueError(f"num_experts: got {num_experts}; wanted a multiple of {world}, the ranks")
    a = enter(x=x, topk_ids=topk_ids, topk_probs=topk_probs).args
    checks.shape("x", a.x, ("T", "H"))
    if not isinstance(a.x, QuantTensor):
        checks.dtype("x", a.x, checks.FLOATS)
    checks.dtype("topk_ids", a.topk_ids, checks.INTEGERS)
    checks.shape("topk_ids", a.topk_ids, (a.x.shape[0], "k"))
    checks.dtype("topk_probs", a.topk_probs, checks.FLOATS)
    checks.shape("topk_probs", a.topk_probs, tuple(a.topk_ids.shape))
    if engine := _engine(comm):
        return _now(async_op, lambda: engine.dispatch(x, topk_ids, topk_probs, num_experts, fmt))
    experts, topk = num_experts // world, a.topk_ids.shape[1]
    mask, entries = _rank_mask(topk_ids, experts, world)
    plan = plan_routing_map(mask, topk=min(topk, world))
    # each rank looks for its own: what is no expert may travel as it is
    ids = topk_ids if a.topk_ids.dtype == checks.INT32 else _local_ids(topk_ids, 0, num_experts)
    message = _Message(x, fmt, (ids, topk_probs))
    if not _is_a(comm, PeerMemory):
        message.pack()  # something to do for the device until the counts are here
    header = {
        "hidden": a.x.shape[1],
        "topk": topk,
        "num_experts": num_experts,
        "bytes of a row": message.row_bytes,
        f"rows, of {', '.join(FORMS)}": FORMS.index(_form(message.like)),
    }
    transport: Any = comm
    counts, entered = transport.counts((plan.tokens_per_expert, entries), header)
    route, arriving = Route(plan, counts), sum(row[comm.rank] for row in entered)

    def arrived(rows: Any) -> Dispatched:
        *data, ids, probs = message.apart(rows)
        ids = _local_ids(ids, comm.rank * experts, experts)
        return Dispatched(_rows_of(message.like, data), ids, probs, route, arriving)

    return _finished(_send(message, route, comm, async_op).then(arrived), async_op)


def combine(y: Any, route: Any, comm: Comm, *, fmt: str | None = None, async_op: bool = False) -> Any:
    """Send each row back and sum every token's: y [R, H] -> [T, H], in float32, rounded to y's dtype.

    fmt: "e4m3" or "e5m2" sends y in FP8, by 1x128 blocks, at half the bytes of bfloat16 and a rounding more
    for each rank; the result is bfloat16 then.
    """
    if engine := _engine(comm):
        return _now(async_op, lambda: engine.combine(y, route, fmt))
    message = _Message(y, fmt)

    def arrived(rows: Any) -> Any:
        y = _rows_of(message.like, message.apart(rows))
        if fmt is not None:
            # exact; summed from FP8 rows 32,768 tokens take 3.8 ms, so 2.3 (h200-tuning.jsonl)
            y = dequantize(y, dtype="bfloat16")
        return _sums(y, route)

    return _finished(_back(message, route, comm, async_op).then(arrived), async_op)


def dispatch_gradient(
    dy: Any, route: Any, comm: Comm, *, fmt: str | None = None, async_op: bool = False
) -> Any:
    """The backward of `combine`: dy [T, H] -> [R, H], by the same route, and nothing synchronises. dy and fmt
    are as `dispatch` has x and fmt."""
    if engine := _engine(comm):
        return _now(async_op, lambda: engine.dispatch_gradient(dy, route, fmt))
    message = _Message(dy, fmt)
    pending = _send(message, route, comm, async_op)
    return _finished(pending.then(lambda rows: _rows_of(message.like, message.apart(rows))), async_op)


def combine_gradient(dx: Any, dprobs: Any, route: Any, comm: Comm, *, async_op: bool = False) -> Any:
    """The backward of `dispatch`: (dx [R, H], dprobs [R, k]) -> (dx [T, H], dprobs [T, k]). An expert's
    probability has its gradient from its own rank, zeros from the others."""
    if engine := _engine(comm):
        return _now(async_op, lambda: engine.combine_gradient(dx, dprobs, route))
    message = _Message(dx, None, (dprobs,))

    def arrived(rows: Any) -> tuple[Any, Any]:
        return tuple(_sums(part, route) for part in message.apart(rows))  # type: ignore[return-value]

    return _finished(_back(message, route, comm, async_op).then(arrived), async_op)


def counts_of(heard: Sequence[Sequence[int]], header: dict[str, int], rank: int) -> list[Counts]:
    """What `Transport.counts` returns, from what each rank said: its numbers for the ranks, one count after
    the other, and behind them the header, which is refused where it differs from this rank's."""
    world, numbers = len(heard), len(heard[0]) - len(header)
    for other, said in enumerate(heard):
        for name, theirs in zip(header, said[numbers:], strict=True):
            if theirs != header[name]:
                raise ValueError(
                    f"{name}: rank {rank} has {header[name]}, rank {other} has {theirs}; wanted the same on "
                    "all ranks; nothing was sent"
                )
    return [tuple(tuple(said[i : i + world]) for said in heard) for i in range(0, numbers, world)]


class _Message:
    """A row of x, quantised on its way if ``fmt`` says so, and of the parts behind it, side by side."""

    def __init__(self, x: Any, fmt: str | None, parts: tuple[Any, ...] = ()):
        self.x, self.fmt, self.parts = x, fmt, parts
        raw = enter(x=x, parts=parts).args
        self.like = raw.x  # what x's rows will be
        if fmt is not None:
            checks.dtype("x", raw.x, checks.QUANTIZABLE)
            self.like = quantize_spec(raw.x, fmt, (1, 128), "compact", False)
        each = (*_parts(self.like), *raw.parts)
        self._shapes = tuple((tuple(p.shape[1:]), p.dtype.name) for p in each)
        self.row_bytes = _message(each).shape[1]
        # one array whose rows are messages as they are
        self._plain = fmt is None and len(each) == 1 and _row_bytes(each[0]) == self.row_bytes
        self._packed: Any = None

    def pack(self) -> Any:
        """The messages in memory of their own, made once."""
        if self._packed is None:
            if self._plain:
                self._packed = self.x
            elif self.fmt is None:
                self._packed = _pack(*_parts(self.x), *self.parts)
            else:
                self._packed = _quantize_and_pack(self.x, self.fmt, *self.parts)
        return self._packed

    def write(self, row_id_map: Any, windows: tuple[Any, ...]) -> None:
        """The messages into the ranks' windows."""
        if self.fmt is None:
            _pack_into(windows, row_id_map, *_parts(self.x), *self.parts)
        else:
            _quantize_and_pack_into(windows, row_id_map, self.x, self.like, *self.parts)

    def apart(self, rows: Any) -> tuple[Any, ...]:
        """x's parts, and the others, of messages."""
        return (rows.view(self.x.dtype),) if self._plain else _unpack(rows, self._shapes)

    def kept(self, rows: Any) -> Any:
        """The messages where the caller may keep what `apart` makes of them: a peer's window is written
        again."""
        return _unpack(rows, self._shapes)[0] if self._plain else rows


def _send(message: _Message, route: Route, comm: Any, async_op: bool) -> Pending:
    """The tokens' rows to their ranks."""
    if (pending := _deliver(message, route.plan.row_id_map, route.counts, comm, async_op)) is not None:
        return pending.then(message.kept)
    rows = permute(message.pack(), route.plan, fill_padding=False).data
    return _exchange(rows, route.counts, comm)


def _back(message: _Message, route: Route, comm: Any, async_op: bool) -> Pending:
    """Rows to where they came from."""
    counts = tuple(zip(*route.counts, strict=True))
    if (pending := _deliver(message, None, counts, comm, async_op)) is not None:
        return pending
    return _exchange(message.pack(), counts, comm, route.plan.num_out_tokens)


def _sums(rows: Any, route: Route) -> Any:
    """Each token's, of rows that came back: as many as the plan has room for, or just those."""
    plan = route.plan
    if rows.shape[0] != plan.num_out_tokens:
        plan = replace(plan, num_out_tokens=rows.shape[0])
    return unpermute(rows, plan)


def _deliver(
    message: _Message, row_id_map: Any, counts: Counts, comm: Any, async_op: bool = False
) -> Pending | None:
    row_bytes = message.row_bytes
    if not _is_a(comm, PeerMemory) or not comm.fits(counts, row_bytes):
        return None
    _record_sent(counts, row_bytes, comm)
    pending: Pending = comm.deliver(
        lambda windows: message.write(row_id_map, windows), counts, row_bytes, async_op
    )
    return pending


def _exchange(rows: Any, counts: Counts, comm: Transport, size: int | None = None) -> Pending:
    _record_sent(counts, _row_bytes(enter(rows=rows).args.rows), comm)
    return comm.exchange(rows, counts, size)


def _record_sent(counts: Counts, row_bytes: int, comm: Transport) -> None:
    sent = counts[comm.rank]
    tracing.record_sent((sum(sent) - sent[comm.rank]) * row_bytes)


def _is_a(comm: Any, protocol: Any) -> bool:
    kind: Any = type(comm)
    return _has(kind, protocol)


@cache
def _has(kind: Any, protocol: Any) -> bool:
    """As isinstance, which looks at every attribute of a protocol anew, several times a call."""
    return all(hasattr(kind, name) for name in vars(protocol) if not name.startswith("_"))


def _engine(comm: Comm) -> Any:
    return comm if _is_a(comm, Engine) else None


def _now(async_op: bool, action: Callable[[], Any]) -> Any:
    """An engine's step, done at once."""
    result = action()
    return Pending(lambda: result) if async_op else result


def _finished(pending: Pending, async_op: bool) -> Any:
    return pending if async_op else pending.wait()


def _parts(x: Any) -> tuple[Any, ...]:
    if not isinstance(x, QuantTensor):
        return (x,)
    if x.columnwise or x.layout != "compact" or x.block in (None, (128, 128)):
        raise ValueError(
            f"x: got block {x.block}, layout {x.layout!r}; wanted row-wise blocks with compact scales"
        )
    return x.data, x.scales


def _form(like: Any) -> str:
    return like.fmt if isinstance(like, QuantTensor) else like.dtype.name


def _rows_of(like: Any, parts: Sequence[Any]) -> Any:
    if not isinstance(like, QuantTensor):
        return parts[0]
    return QuantTensor(parts[0], parts[1], like.fmt, like.block)


# ---------------------------------------------------------------- what a device does


def _row_bytes(part: Any) -> int:
    return math.prod(part.shape[1:]) * part.dtype.itemsize


@operation
def _pack(*parts: Any) -> Any:
    """Up to four arrays' rows side by side, uint8 [N, bytes], each part at a multiple of 16."""
    call = enter(parts=parts)
    out = call.empty(_message(call.args.parts))
    call.run("expert_parallel", "pack_rows", call.args.parts, None, out=(out,))
    return call.leave(out)


@operation
def _quantize_and_pack(x: Any, fmt: str, *parts: Any) -> Any:
    """The same of x, quantised, and the parts."""
    call = enter(x=x, parts=parts)
    raw = call.args.x
    like = quantize_spec(raw, fmt, (1, 128), "compact", False)
    out = call.empty(_message((like.data, like.scales, *call.args.parts)))
    tracing.record_cast(weight=False)
    call.run("expert_parallel", "quantize_and_pack", raw, call.args.parts, None, like=like, out=(out,))
    return call.leave(out)


def _pack_into(windows: tuple[Any, ...], row_id_map: Any, *parts: Any) -> None:
    """The same into windows [n, bytes] that follow each other: each row to all its places of row_id_map, or
    row r to place r."""
    call = enter(parts=parts, row_id_map=row_id_map, windows=windows)
    a = call.args
    call.run("expert_parallel", "pack_rows", a.parts, a.row_id_map, out=a.windows)


def _quantize_and_pack_into(
    windows: tuple[Any, ...], row_id_map: Any, x: Any, like: QuantTensor, *parts: Any
) -> None:
    call = enter(x=x, parts=parts, row_id_map=row_id_map, windows=windows)
    a = call.args
    tracing.record_cast(weight=False)
    call.run("expert_parallel", "quantize_and_pack", a.x, a.parts, a.row_id_map, like=like, out=a.windows)


def _message(parts: Sequence[Any]) -> ArraySpec:
    return ArraySpec((parts[0].shape[0], sum(round_up(_row_bytes(p), 16) for p in parts)), UINT8)


@operation
def _unpack(packed: Any, parts: tuple[tuple[tuple[int, ...], str], ...]) -> tuple[Any, ...]:
    """The arrays again; parts: shape of a row, and dtype, of each."""
    call = enter(packed=packed)
    rows = call.args.packed.shape[0]
    specs = (ArraySpec((rows, *shape), dtype_named(dtype, "parts")) for shape, dtype in parts)
    out = call.empty(tuple(specs))
    call.run("expert_parallel", "unpack_rows", call.args.packed, out=out)
    return call.leave(out)


@operation
def _rank_mask(topk_ids: Any, experts: int, world: int) -> tuple[Any, Any]:
    """(mask [T, W], ids of each rank's experts [W])."""
    call = enter(topk_ids=topk_ids)
    tokens = call.args.topk_ids.shape[0]
    out = call.empty((ArraySpec((tokens, world), UINT8), ArraySpec((world,), checks.INT32)))
    call.run("expert_parallel", "rank_mask", call.args.topk_ids, experts=experts, out=out)
    return call.leave(out)


@operation
def _local_ids(ids: Any, first: int, experts: int) -> Any:
    call = enter(ids=ids)
    out = call.empty(ArraySpec(tuple(call.args.ids.shape), checks.INT32))
    call.run("expert_parallel", "local_ids", call.args.ids, first=first, experts=experts, out=out)
    return call.leave(out)
