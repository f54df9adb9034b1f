"""Expert parallelism: rows travel to the ranks that hold their experts, and sums travel back.

Each of W ranks holds E / W experts, in order. A token goes once to every rank that has one of its experts,
with all its expert ids and probabilities behind it in the same message; there `fp8moe.plan_topk` sees rows
with local ids, and the other ids as none. Each rank sums its own experts' rows of a token, and the token's
rank sums over ranks. So for k experts on W ranks a token costs min(k, W) rows each way at most, and FP8 rows
with their scales half of what bfloat16's cost (the FP8-Flow-MoE paper, arXiv 2511.02302: quantise before
dispatch).

How bytes move is a `Transport`: `fp8moe.adapters.torch_distributed` (NCCL, gloo) or `.cupy_nccl`. What moves
rows by itself is an `Engine`: `.deep_ep`. JAX has its own collectives: `.jax_expert_parallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fp8moe import border, checks, tracing
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

    def wait(self) -> Any:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result

    def then(self, function: Callable[[Any], Any]) -> Pending:
        return Pending(lambda: function(self.wait()))


class Transport(Protocol):
    """What moves rows between ranks; every rank calls the same methods in the same order."""

    rank: int
    world_size: int

    def counts(self, counts: tuple[Any, ...], header: dict[str, int]) -> list[tuple[list[int], list[int]]]:
        """Tell every rank its number: each of ``counts`` is int32 [W]. Returns for each what this rank told,
        and was told by, the ranks, on the host, which **synchronises once** on CUDA. The header must be the
        same on all ranks: ValueError on all of them, naming the first that differs and what differs."""
        ...

    def exchange(
        self, rows: Any, sent: Sequence[int], received: Sequence[int], size: int | None = None
    ) -> Pending:
        """The first sum(sent) of rows [N, columns], rank by rank, to the ranks. The result is of the same
        kind and dtype, its first sum(received) rows from the ranks; it has ``size`` rows, by default just
        these."""
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
    most rows that there can be, so that its shape is the same at every step. sent, received: rows to and from
    each rank."""

    plan: PermutationPlan
    sent: tuple[int, ...]
    received: tuple[int, ...]

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
    negative for none. topk_probs: float [T, k]. num_experts: E of all ranks together. fmt: "e4m3" or "e5m2":
    x is quantised by 1x128 blocks with power-of-two scales on its way into the message, in the same pass, and
    arrives as a `QuantTensor`.

    Returns `Dispatched`, or with ``async_op`` a `Pending` of it: what is launched before its ``wait()`` runs
    beside the exchange. The counts are known to the host before, which **synchronises once** on CUDA.
    """
    world = comm.world_size
    if num_experts % world:
        raise ValueError(f"num_experts: got {num_experts}; wanted a multiple of {world}, the ranks")
    a = border.enter(x=x, topk_ids=topk_ids, topk_probs=topk_probs).args
    checks.shape("x", a.x, ("T", "H"))
    if not isinstance(a.x, QuantTensor):
        checks.dtype("x", a.x, checks.FLOATS)
    checks.dtype("topk_ids", a.topk_ids, checks.INTEGERS)
    checks.shape("topk_ids", a.topk_ids, (a.x.shape[0], "k"))
    checks.dtype("topk_probs", a.topk_probs, checks.FLOATS)
    checks.shape("topk_probs", a.topk_probs, tuple(a.topk_ids.shape))
    if isinstance(comm, Engine):
        return _now(async_op, lambda: comm.dispatch(x, topk_ids, topk_probs, num_experts, fmt))
    experts, topk = num_experts // world, a.topk_ids.shape[1]
    mask, entries = _rank_mask(topk_ids, experts, world)
    plan = plan_routing_map(mask, topk=min(topk, world))
    like, packed = _packed(x, a.x, fmt, _local_ids(topk_ids, 0, num_experts), topk_probs)
    header = {
        "hidden": a.x.shape[1],
        "topk": topk,
        "num_experts": num_experts,
        "bytes of a row": int(packed.shape[1]),
        f"rows, of {', '.join(FORMS)}": FORMS.index(_form(like)),
    }
    (sent, received), (_, arriving) = comm.counts((plan.tokens_per_expert, entries), header)
    route = Route(plan, tuple(sent), tuple(received))
    parts = *_parts_like(like), ((topk,), "int32"), ((topk,), a.topk_probs.dtype.name)

    def arrived(rows: Any) -> Dispatched:
        *data, ids, probs = _unpack(rows, parts)
        return Dispatched(
            _rows_of(like, data), _local_ids(ids, comm.rank * experts, experts), probs, route, sum(arriving)
        )

    return _finished(_send(packed, route, comm).then(arrived), async_op)


def combine(y: Any, route: Any, comm: Comm, *, fmt: str | None = None, async_op: bool = False) -> Any:
    """Send each row back and sum every token's: y [R, H] -> [T, H], in float32, rounded to y's dtype.

    fmt: "e4m3" or "e5m2" sends y in FP8, by 1x128 blocks, at half the bytes of bfloat16 and a rounding more
    for each rank; the result is bfloat16 then.
    """
    if isinstance(comm, Engine):
        return _now(async_op, lambda: comm.combine(y, route, fmt))
    if fmt is None:
        return _finished(_back(y, route, comm).then(lambda rows: unpermute(rows, route.plan)), async_op)
    like, packed = _packed(y, border.enter(y=y).args.y, fmt)

    def arrived(rows: Any) -> Any:
        # exact; summed from FP8 rows 32,768 tokens take 3.8 ms, so 2.3 (h200-tuning.jsonl)
        wide = dequantize(_rows_of(like, _unpack(rows, _parts_like(like))), dtype="bfloat16")
        return unpermute(wide, route.plan)

    return _finished(_back(packed, route, comm).then(arrived), async_op)


def dispatch_gradient(
    dy: Any, route: Any, comm: Comm, *, fmt: str | None = None, async_op: bool = False
) -> Any:
    """The backward of `combine`: dy [T, H] -> [R, H], by the same route, and nothing synchronises. dy and fmt
    are as `dispatch` has x and fmt."""
    if isinstance(comm, Engine):
        return _now(async_op, lambda: comm.dispatch_gradient(dy, route, fmt))
    like, packed = _packed(dy, border.enter(dy=dy).args.dy, fmt)
    pending = _send(packed, route, comm)
    return _finished(pending.then(lambda rows: _rows_of(like, _unpack(rows, _parts_like(like)))), async_op)


def combine_gradient(dx: Any, dprobs: Any, route: Any, comm: Comm, *, async_op: bool = False) -> Any:
    """The backward of `dispatch`: (dx [R, H], dprobs [R, k]) -> (dx [T, H], dprobs [T, k]). An expert's
    probability has its gradient from its own rank, zeros from the others."""
    if isinstance(comm, Engine):
        return _now(async_op, lambda: comm.combine_gradient(dx, dprobs, route))
    a = border.enter(dx=dx, dprobs=dprobs).args
    parts = tuple((tuple(p.shape[1:]), p.dtype.name) for p in (a.dx, a.dprobs))

    def arrived(rows: Any) -> tuple[Any, Any]:
        return tuple(unpermute(part, route.plan) for part in _unpack(rows, parts))  # type: ignore[return-value]

    return _finished(_back(_pack(dx, dprobs), route, comm).then(arrived), async_op)


def same_on_all_ranks(header: dict[str, int], heard: Sequence[Sequence[int]], rank: int) -> None:
    """Refuse what differs: heard are the header's values of every rank."""
    for other, values in enumerate(heard):
        for name, theirs in zip(header, values, strict=True):
            if theirs != header[name]:
                raise ValueError(
                    f"{name}: rank {rank} has {header[name]}, rank {other} has {theirs}; wanted the same on "
                    "all ranks; nothing was sent"
                )


def _send(packed: Any, route: Route, comm: Transport) -> Pending:
    """The tokens' rows to their ranks."""
    rows = permute(packed, route.plan, fill_padding=False).data
    return _exchange(rows, route.sent, route.received, comm)


def _back(rows: Any, route: Route, comm: Transport) -> Pending:
    return _exchange(rows, route.received, route.sent, comm, route.plan.num_out_tokens)


def _exchange(
    rows: Any, sent: Sequence[int], received: Sequence[int], comm: Transport, size: int | None = None
) -> Pending:
    raw = border.enter(rows=rows).args.rows
    others = sum(sent) - sent[comm.rank]
    tracing.record_sent(others * raw.shape[1] * raw.dtype.itemsize)
    return comm.exchange(rows, sent, received, size)


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


def _packed(x: Any, raw: Any, fmt: str | None, *parts: Any) -> tuple[Any, Any]:
    """(what x's rows will be, as shapes; the message of x's rows and the parts'). raw: x as buffers."""
    if fmt is None:
        return raw, _pack(*_parts(x), *parts)
    checks.dtype("x", raw, checks.QUANTIZABLE)
    like = quantize_spec(raw, fmt, (1, 128), "compact", False)
    return like, _quantize_and_pack(x, fmt, *parts)


def _parts_like(like: Any) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shape of a row, and dtype, of each part that a tensor's rows have in a message."""
    parts = (like.data, like.scales) if isinstance(like, QuantTensor) else (like,)
    return tuple((tuple(p.shape[1:]), p.dtype.name) for p in parts)


def _form(like: Any) -> str:
    return like.fmt if isinstance(like, QuantTensor) else like.dtype.name


def _rows_of(like: Any, parts: Sequence[Any]) -> Any:
    if not isinstance(like, QuantTensor):
        return parts[0]
    return QuantTensor(parts[0], parts[1], like.fmt, like.block)


# ---------------------------------------------------------------- what a device does


def _row_bytes(part: Any) -> int:
    return int(np.prod(part.shape[1:], dtype=np.int64)) * part.dtype.itemsize


@border.replayed
def _pack(*parts: Any) -> Any:
    """Up to four arrays' rows side by side, uint8 [N, bytes], each part at a multiple of 16."""
    call = border.enter(parts=parts)
    out = call.empty(_message(call.args.parts))
    call.run("expert_parallel", "pack_rows", call.args.parts, out=out)
    return call.leave(out)


@border.replayed
def _quantize_and_pack(x: Any, fmt: str, *parts: Any) -> Any:
    """The same of x, quantised, and the parts."""
    call = border.enter(x=x, parts=parts)
    raw = call.args.x
    like = quantize_spec(raw, fmt, (1, 128), "compact", False)
    out = call.empty(_message((like.data, like.scales, *call.args.parts)))
    tracing.record_cast(weight=False)
    call.run("expert_parallel", "quantize_and_pack", raw, call.args.parts, like=like, out=out)
    return call.leave(out)


def _message(parts: Sequence[Any]) -> ArraySpec:
    return ArraySpec((parts[0].shape[0], sum(-(-_row_bytes(p) // 16) * 16 for p in parts)), UINT8)


@border.replayed
def _unpack(packed: Any, parts: tuple[tuple[tuple[int, ...], str], ...]) -> tuple[Any, ...]:
    """The arrays again; parts: shape of a row, and dtype, of each."""
    call = border.enter(packed=packed)
    rows = call.args.packed.shape[0]
    specs = (ArraySpec((rows, *shape), border.dtype_named(dtype, "parts")) for shape, dtype in parts)
    out = call.empty(tuple(specs))
    call.run("expert_parallel", "unpack_rows", call.args.packed, out=out)
    return call.leave(out)


@border.replayed
def _rank_mask(topk_ids: Any, experts: int, world: int) -> tuple[Any, Any]:
    """(mask [T, W], ids of each rank's experts [W])."""
    call = border.enter(topk_ids=topk_ids)
    tokens = call.args.topk_ids.shape[0]
    out = call.empty((ArraySpec((tokens, world), UINT8), ArraySpec((world,), checks.INT32)))
    call.run("expert_parallel", "rank_mask", call.args.topk_ids, experts=experts, out=out)
    return call.leave(out)


@border.replayed
def _local_ids(ids: Any, first: int, experts: int) -> Any:
    call = border.enter(ids=ids)
    out = call.empty(ArraySpec(tuple(call.args.ids.shape), checks.INT32))
    call.run("expert_parallel", "local_ids", call.args.ids, first=first, experts=experts, out=out)
    return call.leave(out)
