"""Messages between ranks: a row of each array side by side in one row of bytes, and what a device does for
them: pack, quantise and pack, unpack, and which ids belong to which rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fp8moe import checks, counters
from fp8moe.dispatch import Call, enter, operation
from fp8moe.formats import round_up
from fp8moe.interop import dtype_named
from fp8moe.permute import permute
from fp8moe.plan import plan_routing_map
from fp8moe.quantize import quantize_spec
from fp8moe.record_trees import map_arrays
from fp8moe.records import ArraySpec, PermutationPlan, QuantTensor

UINT8 = np.dtype(np.uint8)
MOST_PLACES = 3  # of a row that `pack_by_rank` packs in one pass without quantising it
FORMS = ("bfloat16", "float16", "float32", "float64", "e4m3", "e5m2", "e2m1")  # what rows are sent as


class Message:
    """A row of x, quantised on its way if ``fmt`` says so, and of the parts behind it, side by side."""

    def __init__(self, x: Any, fmt: str | None, parts: tuple[Any, ...] = ()):
        self.x, self.fmt, self.parts = x, fmt, parts
        layout = _message_layout(x, fmt, parts)
        self.like, self._shapes, self.row_bytes, self.plain = layout
        self._packed: Any = None

    def pack(self) -> Any:
        """The messages in memory of their own, made once."""
        if self._packed is None:
            self._packed = self.x if self.plain else _packed(self.x, self.fmt, self.parts)
        return self._packed

    def pack_by_rank(self, plan: PermutationPlan, zeros: bool) -> Any:
        """The messages in the order of a plan of ranks: `pack_by_rank`."""
        return pack_by_rank(self.x, self.fmt, plan, zeros, *self.parts)

    def write(self, row_id_map: Any, windows: tuple[Any, ...]) -> None:
        """The messages into the ranks' windows."""
        if self.fmt is None:
            pack_into(windows, row_id_map, *_parts(self.x), *self.parts)
        else:
            quantize_and_pack_into(windows, row_id_map, self.x, self.like, *self.parts)

    def unpack(self, rows: Any, size: int | None = None) -> tuple[Any, ...]:
        """x's parts, and the others, of messages. size: as of `unpack_first`."""
        if self.plain:  # and there are so many
            return (rows.view(self.x.dtype),)
        return unpack(rows, self._shapes) if size is None else unpack_first(rows, self._shapes, size)

    def unpack_with_ids(
        self, rows: Any, first: int, experts: int, size: int | None = None
    ) -> tuple[Any, ...]:
        """The same of messages whose parts are expert ids and probabilities, the ids as of `local_ids`."""
        if size is None:
            return unpack_with_ids(rows, self._shapes, first, experts)
        return unpack_first(rows, self._shapes, size, (first, experts))

    def kept(self, rows: Any, size: int | None = None) -> Any:
        """The messages where the caller may keep what `unpack` makes of them: a peer's window is written
        again."""
        if not self.plain:
            return rows
        return (unpack(rows, self._shapes) if size is None else unpack_first(rows, self._shapes, size))[0]


class _MessageLayout(NamedTuple):
    """like: what x's rows will be. shapes: of a row, and dtype, of each array. plain: one array whose rows
    are messages as they are."""

    like: Any
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    row_bytes: int
    plain: bool


_layouts: dict[Any, _MessageLayout] = {}
LAYOUTS_KEPT = 256


def _message_layout(x: Any, fmt: str | None, parts: tuple[Any, ...]) -> _MessageLayout:
    """Found once for given shapes and dtypes: 20 us, five times a step."""
    key = _layout_key(x, fmt, parts)
    if key is not None and (known := _layouts.get(key)) is not None:
        return known
    raw = enter(x=x, parts=parts).args
    like = raw.x
    if fmt is not None:
        checks.dtype("x", raw.x, checks.QUANTIZABLE)
        like = quantize_spec(raw.x, fmt, (1, 128), "compact", False)
    like = map_arrays(lambda _, a: ArraySpec(tuple(a.shape), a.dtype), like)  # no memory is held
    each = (*_parts(like), *raw.parts)
    shapes = tuple((tuple(p.shape[1:]), p.dtype.name) for p in each)
    size = message_spec(each).shape[1]
    new = _MessageLayout(like, shapes, size, fmt is None and len(each) == 1 and row_bytes(each[0]) == size)
    if key is not None:
        if len(_layouts) >= LAYOUTS_KEPT:
            _layouts.clear()
        _layouts[key] = new
    return new


def _layout_key(x: Any, fmt: str | None, parts: tuple[Any, ...]) -> Any:
    """What a message's layout depends on; None of arrays that do not say it, but to `enter`."""
    try:
        key: list[Any] = [fmt]
        if isinstance(x, QuantTensor):
            key += [x.fmt, x.block, x.layout, x.transposed, x.scales.shape, x.scales.dtype]
            x = x.data
        for array in (x, *parts):
            key += [array.shape, array.dtype]
        return tuple(key)
    except AttributeError:
        return None


def _parts(x: Any) -> tuple[Any, ...]:
    """The arrays that rows of x consist of."""
    if not isinstance(x, QuantTensor):
        return (x,)
    if x.columnwise or x.layout != "compact" or x.block in (None, (128, 128)):
        raise ValueError(
            f"x: got block {x.block}, layout {x.layout!r}; wanted row-wise blocks with compact scales"
        )
    return x.data, x.scales


def form(like: Any) -> str:
    """What rows are sent as, one of `FORMS`."""
    return like.fmt if isinstance(like, QuantTensor) else like.dtype.name


def rows_of(like: Any, parts: Sequence[Any]) -> Any:
    """Rows of the kind of ``like``, of the arrays that they consist of."""
    if not isinstance(like, QuantTensor):
        return parts[0]
    return QuantTensor(parts[0], parts[1], like.fmt, like.block)


# ---------------------------------------------------------------- what a device does


def row_bytes(part: Any) -> int:
    """Bytes of a row of an array."""
    return math.prod(part.shape[1:]) * part.dtype.itemsize


@operation
def pack(*parts: Any) -> Any:
    """Up to four arrays' rows side by side, uint8 [N, bytes], each part at a multiple of 16."""
    call = enter(parts=parts)
    out = call.empty(message_spec(call.args.parts))
    call.run("expert_parallel", "pack_rows", call.args.parts, None, out=(out,))
    return call.leave(out)


@operation
def quantize_and_pack(x: Any, fmt: str, *parts: Any) -> Any:
    """The same of x, quantised, and the parts."""
    call = enter(x=x, parts=parts)
    like, out = _quantized_spec(call, call.args.x.shape[0], fmt)
    counters.record_cast(weight=False)
    a = call.args
    call.run("expert_parallel", "quantize_and_pack", a.x, a.parts, None, like=like, out=(out,))
    return call.leave(out)


def _quantized_spec(call: Call, rows: int, fmt: str) -> tuple[QuantTensor, Any]:
    """What x is quantised to, as shapes, and memory for ``rows`` messages of it."""
    like = quantize_spec(call.args.x, fmt, (1, 128), "compact", False)
    size = message_spec((like.data, like.scales, *call.args.parts)).shape[1]
    return like, call.empty(ArraySpec((rows, size), UINT8))


@operation
def pack_by_rank(x: Any, fmt: str | None, plan: PermutationPlan, zeros: bool, *parts: Any) -> Any:
    """Messages in the order of a plan of ranks, [num_out_tokens, bytes], or x's rows where these are messages
    as they are. zeros: rows that no token goes to are zeros, else whatever the memory held."""
    call = enter(x=x, plan=plan, parts=parts)
    a = call.args
    layout = _message_layout(a.x, fmt, a.parts)
    # In one pass; by two, a pass more over the messages. Rows that are not quantised are read once for each
    # of their places: with n of them 2 n rows in all for 3 + n
    if zeros or layout.plain or (fmt is None and a.plan.max_experts_per_token > MOST_PLACES):
        rows = a.x if layout.plain else _packed(a.x, fmt, a.parts)
        return call.leave(permute(rows, a.plan, fill_padding=zeros).data)
    rows, where = a.plan.num_out_tokens, a.plan.row_id_map
    if fmt is None:
        each = (*_parts(a.x), *a.parts)
        out = call.empty(ArraySpec((rows, layout.row_bytes), UINT8))
        call.run("expert_parallel", "pack_rows", each, where, out=(out,))
    else:
        like, out = _quantized_spec(call, rows, fmt)
        counters.record_cast(weight=False)
        call.run("expert_parallel", "quantize_and_pack", a.x, a.parts, where, like=like, out=(out,))
    return call.leave(out)


def _packed(x: Any, fmt: str | None, parts: tuple[Any, ...]) -> Any:
    return pack(*_parts(x), *parts) if fmt is None else quantize_and_pack(x, fmt, *parts)


def pack_into(windows: tuple[Any, ...], row_id_map: Any, *parts: Any) -> None:
    """The same into windows [n, bytes] that follow each other: each row to all its places of row_id_map, or
    row r to place r."""
    call = enter(parts=parts, row_id_map=row_id_map, windows=windows)
    a = call.args
    _check_room(a.parts[0].shape[0], a)
    call.run("expert_parallel", "pack_rows", a.parts, a.row_id_map, out=a.windows)


def quantize_and_pack_into(
    windows: tuple[Any, ...], row_id_map: Any, x: Any, like: QuantTensor, *parts: Any
) -> None:
    """`pack_into` of x, quantised, and the parts."""
    call = enter(x=x, parts=parts, row_id_map=row_id_map, windows=windows)
    a = call.args
    _check_room(a.x.shape[0], a)
    counters.record_cast(weight=False)
    call.run("expert_parallel", "quantize_and_pack", a.x, a.parts, a.row_id_map, like=like, out=a.windows)


def _check_room(rows: int, a: Any) -> None:
    """That windows without a map have as many rows as there are: what is past the last window's is another
    rank's memory."""
    room = sum(window.shape[0] for window in a.windows)
    if a.row_id_map is None and room != rows:
        raise ValueError(f"windows: got {room} rows in all; wanted {rows}, the messages'")


def message_spec(parts: Sequence[Any]) -> ArraySpec:
    """Messages of these arrays' rows."""
    return ArraySpec((parts[0].shape[0], sum(round_up(row_bytes(p), 16) for p in parts)), UINT8)


@operation
def unpack(packed: Any, parts: tuple[tuple[tuple[int, ...], str], ...]) -> tuple[Any, ...]:
    """The arrays again; parts: shape of a row, and dtype, of each."""
    call = enter(packed=packed)
    rows = call.args.packed.shape[0]
    specs = (ArraySpec((rows, *shape), dtype_named(dtype, "parts")) for shape, dtype in parts)
    out = call.empty(tuple(specs))
    call.run("expert_parallel", "unpack_rows", call.args.packed, out=out)
    return call.leave(out)


def unpack_first(
    packed: Any,
    parts: tuple[tuple[tuple[int, ...], str], ...],
    size: int,
    own: tuple[int, int] | None = None,
) -> tuple[Any, ...]:
    """`unpack` to arrays of ``size`` rows, of which these are the first; the others are zeros. Of other
    numbers of messages every time: no operation, whose launches would be planned for each.

    own: (first, experts), where the last two arrays are expert ids and probabilities: the ids are as of
    `local_ids` then, and -1 in rows after the first.
    """
    call = enter(packed=packed)
    out = call.empty(tuple(ArraySpec((size, *shape), dtype_named(dtype, "parts")) for shape, dtype in parts))
    call.run("expert_parallel", "unpack_rows", call.args.packed, out=out)
    if own is not None:
        *data, ids, probs = out
        local = call.empty(ArraySpec(tuple(ids.shape), checks.INT32))
        of_experts = {"first": own[0], "experts": own[1], "rows": call.args.packed.shape[0]}
        call.run("expert_parallel", "local_ids", ids, **of_experts, out=local)
        out = (*data, local, probs)
    return call.leave(out)  # type: ignore[no-any-return]


@operation
def unpack_with_ids(
    packed: Any, parts: tuple[tuple[tuple[int, ...], str], ...], first: int, experts: int
) -> tuple[Any, ...]:
    """The arrays again, of which the last two are expert ids and probabilities; the ids as of `local_ids`."""
    *rows, ids, probs = unpack(packed, parts)
    return (*rows, local_ids(ids, first, experts), probs)


@operation
def rank_mask(topk_ids: Any, experts: int, world: int) -> tuple[Any, Any]:
    """(mask [T, W], ids of each rank's experts [W])."""
    call = enter(topk_ids=topk_ids)
    tokens = call.args.topk_ids.shape[0]
    out = call.empty((ArraySpec((tokens, world), UINT8), ArraySpec((world,), checks.INT32)))
    call.run("expert_parallel", "rank_mask", call.args.topk_ids, experts=experts, out=out)
    return call.leave(out)


@operation
def local_ids(ids: Any, first: int, experts: int) -> Any:
    """Expert ids less ``first``, int32, -1 outside of 0 to ``experts``."""
    call = enter(ids=ids)
    out = call.empty(ArraySpec(tuple(call.args.ids.shape), checks.INT32))
    rows = call.args.ids.shape[0]
    call.run("expert_parallel", "local_ids", call.args.ids, first=first, experts=experts, rows=rows, out=out)
    return call.leave(out)


@operation
def limit_rows(plan: PermutationPlan, capacity: int) -> PermutationPlan:
    """A plan of ranks without padding, with ``capacity`` rows for each, however many it has: of more, those
    of the later tokens are dropped and counted in ``overflow``. Nothing synchronises."""
    call = enter(plan=plan)
    a = call.args.plan
    rows = a.num_experts * capacity
    if rows > checks.MAX_INT32:
        raise ValueError(
            f"capacity: got {capacity} rows for each of {a.num_experts} ranks; wanted at most "
            f"{checks.MAX_INT32} in all"
        )
    out = replace(a, data=ArraySpec((a.size,), checks.INT32), num_out_tokens=rows, align_size=capacity)
    out = call.empty(out)
    call.run("expert_parallel", "limit_rows", a, capacity=capacity, out=out)
    return call.leave(out)  # type: ignore[no-any-return]


class Outgoing(NamedTuple):
    """What a rank sends, before it knows how much the others do.

    plan: the tokens in the order of the ranks. entries: int32 [W], ids of each rank's experts. ids: int32
    [T, k], as they travel. rows: the messages in the plan's order, or None where they are written later.
    """

    plan: PermutationPlan
    entries: Any
    ids: Any
    rows: Any


def outgoing(
    x: Any,
    topk_ids: Any,
    topk_probs: Any,
    num_experts: int,
    world: int,
    fmt: str | None,
    capacity: int | None,
    packed: bool,
) -> Outgoing:
    """One call for all that is launched. capacity: rows for each rank, by a plan of `limit_rows`. packed:
    whether to make the messages."""
    return Outgoing(*_outgoing(x, topk_ids, topk_probs, num_experts, world, fmt, capacity, packed))


@operation
def _outgoing(
    x: Any,
    topk_ids: Any,
    topk_probs: Any,
    num_experts: int,
    world: int,
    fmt: str | None,
    capacity: int | None,
    packed: bool,
) -> tuple[Any, ...]:
    a = enter(x=x, topk_ids=topk_ids, topk_probs=topk_probs).args
    check_rows(a.x, a.topk_ids, a.topk_probs)
    experts = num_experts // world
    mask, entries = rank_mask(topk_ids, experts, world)
    plan = plan_routing_map(mask, topk=min(topk_ids.shape[1], world))
    ids = topk_ids
    if capacity is not None:
        # rows of zeros fill each rank's share up: their ids must be none, so that of expert e is e + 1 on its
        # way. What is no expert before, 2^31 - 1 too, is none then
        ids, plan = local_ids(ids, -1, num_experts + 1), limit_rows(plan, capacity)
    elif a.topk_ids.dtype != checks.INT32:
        # each rank looks for its own: what is no expert may travel as it is
        ids = local_ids(ids, 0, num_experts)
    rows = pack_by_rank(x, fmt, plan, capacity is not None, ids, topk_probs) if packed else None
    return plan, entries, ids, rows


def check_rows(x: Any, topk_ids: Any, topk_probs: Any) -> None:
    """That raw arrays are what `dispatch` takes."""
    checks.shape("x", x, ("T", "H"))
    if not isinstance(x, QuantTensor):
        checks.dtype("x", x, checks.FLOATS)
    checks.dtype("topk_ids", topk_ids, checks.INTEGERS)
    checks.shape("topk_ids", topk_ids, (x.shape[0], "k"))
    checks.dtype("topk_probs", topk_probs, checks.FLOATS)
    checks.shape("topk_probs", topk_probs, tuple(topk_ids.shape))


# ---------------------------------------------------------------- rows of some of the tokens


def part_of(x: Any, first: int, end: int) -> Any:
    """Rows first to end of an array or of a row-wise `QuantTensor`, in its own memory."""
    if isinstance(x, QuantTensor):
        return replace(x, data=x.data[first:end], scales=x.scales[first:end])
    return x[first:end]


@operation
def new_rows(like: Any, rows: int) -> Any:
    """Memory for ``rows`` rows like those of an array."""
    call = enter(like=like)
    return call.leave(call.empty(ArraySpec((rows, *call.args.like.shape[1:]), call.args.like.dtype)))


@operation
def sum_rows(x: Any, plan: PermutationPlan, out: Any) -> Any:
    """`fp8moe.unpermute` of an array, written to ``out``."""
    call = enter(x=x, plan=plan, out=out)
    a = call.args
    checks.dtype("out", a.out, (a.x.dtype,))
    checks.shape("out", a.out, (a.plan.num_tokens, a.x.shape[1]))
    call.run("permute", "unpermute", a.x, a.plan, None, out=a.out)
    return call.leave(a.out)
