"""Messages between ranks: one row of bytes with a row of each array side by side, and the device operations
on them: pack, quantise and pack, unpack, and expert ids by rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fp8moe.formats import round_up
from fp8moe.ops.permute import raw_permute
from fp8moe.ops.plan import plan_routing_map
from fp8moe.ops.quantize import check_quantize, quantize_spec
from fp8moe.records import ArraySpec, PermutationPlan, QuantTensor
from fp8moe.runtime import checks, counters
from fp8moe.runtime.dispatch import Call, enter, operation
from fp8moe.runtime.interop import dtype_named
from fp8moe.runtime.record_trees import map_arrays

UINT8 = np.dtype(np.uint8)
MOST_PLACES = 3  # slots per row up to which `pack_by_rank` packs unquantised rows in one pass
FLOATS = tuple(dtype.name for dtype in checks.FLOATS)
FORMS = (*FLOATS, "e4m3", "e5m2", "e2m1")  # row formats of messages


class Message:
    """A row of x, quantised while packed if ``fmt`` is set, followed by a row of each part."""

    def __init__(self, x: Any, fmt: str | None, parts: tuple[Any, ...] = ()):
        self.x, self.fmt, self.parts = x, fmt, parts
        layout = _message_layout(x, fmt, parts)
        self.like, self._shapes, self.row_bytes, self.plain = layout
        self._packed: Any = None

    @property
    def dtype_of_last(self) -> str:
        """Name of the dtype of the last part."""
        return self._shapes[-1][1]

    def pack(self) -> Any:
        """The messages in a buffer of their own, packed once."""
        if self._packed is None:
            self._packed = self.x if self.plain else _packed(self.x, self.fmt, self.parts)
        return self._packed

    def pack_by_rank(self, plan: PermutationPlan, zeros: bool) -> Any:
        """The messages in the order of a plan whose experts are ranks: `pack_by_rank`."""
        return pack_by_rank(self.x, self.fmt, plan, zeros, *self.parts)

    def write(self, row_id_map: Any, windows: tuple[Any, ...]) -> None:
        """Writes the messages into the ranks' windows."""
        if self.fmt is None:
            pack_into(windows, row_id_map, *_parts(self.x), *self.parts)
        else:
            quantize_and_pack_into(windows, row_id_map, self.x, self.like, *self.parts)

    def unpack(self, rows: Any, size: int | None = None) -> tuple[Any, ...]:
        """x's arrays and the parts, unpacked from messages. size: as in `unpack_first`."""
        if self.plain:  # and rows has that many rows
            return (rows.view(self.x.dtype),)
        return unpack(rows, self._shapes) if size is None else unpack_first(rows, self._shapes, size)

    def unpack_with_ids(
        self, rows: Any, first: int, experts: int, size: int | None = None
    ) -> tuple[Any, ...]:
        """The same for messages whose parts are expert ids and probabilities; ids as from `local_ids`."""
        if size is None:
            return unpack_with_ids(rows, self._shapes, first, experts)
        return unpack_first(rows, self._shapes, size, (first, experts))

    def kept(self, rows: Any, size: int | None = None) -> Any:
        """A copy of the messages if the caller may keep what `unpack` returns: a peer's window is reused."""
        if not self.plain:
            return rows
        return (unpack(rows, self._shapes) if size is None else unpack_first(rows, self._shapes, size))[0]


class _MessageLayout(NamedTuple):
    """like: shapes and dtypes of x's rows as sent. shapes: per array, a row's shape and its dtype. plain: a
    single array whose rows are the messages themselves."""

    like: Any
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    row_bytes: int
    plain: bool


_layouts: dict[Any, _MessageLayout] = {}
LAYOUTS_KEPT = 256


def _message_layout(x: Any, fmt: str | None, parts: tuple[Any, ...]) -> _MessageLayout:
    """Cached by shapes and dtypes: computing it takes 20 us, five times per step."""
    key = _layout_key(x, fmt, parts)
    if key is not None and (known := _layouts.get(key)) is not None:
        return known
    raw = enter(x=x, parts=parts).args
    like = raw.x
    if fmt is not None:
        checks.dtype("x", raw.x, checks.QUANTIZABLE)
        check_quantize(raw.x, fmt, (1, 128), "compact", False)
        like = quantize_spec(raw.x, fmt, (1, 128), "compact", False)
    like = map_arrays(lambda a: ArraySpec(tuple(a.shape), a.dtype), like)  # holds no memory
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
    """Cache key of a message's layout; None for arrays whose shapes and dtypes only `enter` can determine."""
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
    """The arrays that x's rows consist of."""
    if not isinstance(x, QuantTensor):
        return (x,)
    if x.columnwise or x.layout != "compact" or x.block in (None, (128, 128)):
        raise ValueError(
            f"x: got block {x.block}, layout {x.layout!r}; wanted row-wise blocks with compact scales"
        )
    return x.data, x.scales


def form(like: Any) -> str:
    """The row format, one of `FORMS`."""
    return like.fmt if isinstance(like, QuantTensor) else like.dtype.name


def rows_of(like: Any, parts: Sequence[Any]) -> Any:
    """Rows of the same kind as ``like``, assembled from their arrays."""
    if not isinstance(like, QuantTensor):
        return parts[0]
    return QuantTensor(parts[0], parts[1], like.fmt, like.block)


# ---------------------------------------------------------------- what a device does


def row_bytes(part: Any) -> int:
    """Bytes per row of an array."""
    return math.prod(part.shape[1:]) * part.dtype.itemsize


@operation
def pack(*parts: Any) -> Any:
    """Up to four arrays' rows side by side, uint8 [N, bytes], each part at a multiple of 16 bytes."""
    call = enter(parts=parts)
    out = call.empty(message_spec(call.args.parts))
    call.run("expert_parallel", "pack_rows", call.args.parts, None, out=(out,))
    return call.leave(out)


@operation
def quantize_and_pack(x: Any, fmt: str, *parts: Any) -> Any:
    """The same for quantised x and the parts."""
    call = enter(x=x, parts=parts)
    like, out = _quantized_spec(call, call.args.x.shape[0], fmt)
    counters.record_cast(weight=False)
    a = call.args
    call.run("expert_parallel", "quantize_and_pack", a.x, a.parts, None, like=like, out=(out,))
    return call.leave(out)


def _quantized_spec(call: Call, rows: int, fmt: str) -> tuple[QuantTensor, Any]:
    """Shapes and dtypes of quantised x, and a buffer for ``rows`` messages of it."""
    like = quantize_spec(call.args.x, fmt, (1, 128), "compact", False)
    size = message_spec((like.data, like.scales, *call.args.parts)).shape[1]
    return like, call.empty(ArraySpec((rows, size), UINT8))


@operation
def pack_by_rank(x: Any, fmt: str | None, plan: PermutationPlan, zeros: bool, *parts: Any) -> Any:
    """Messages in the order of a plan of ranks, [num_out_tokens, bytes], or x's rows if they are the messages
    themselves. zeros: rows without a token are zeroed, otherwise uninitialised."""
    call = enter(x=x, plan=plan, parts=parts)
    a = call.args
    layout = _message_layout(a.x, fmt, a.parts)
    # One pass; two passes would read and write the messages once more. Unquantised rows are read once per
    # slot: with n slots 2 n rows of traffic instead of 3 + n
    if zeros or layout.plain or (fmt is None and a.plan.max_experts_per_token > MOST_PLACES):
        rows = a.x if layout.plain else _packed(a.x, fmt, a.parts)
        return call.leave(raw_permute(rows, a.plan, fill_padding=zeros).data)
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
    """Packs into the concatenated windows [n, bytes]: each row to all its slots in row_id_map, or row r to
    slot r."""
    call = enter(parts=parts, row_id_map=row_id_map, windows=windows)
    a = call.args
    _check_room(a.parts[0].shape[0], a)
    call.run("expert_parallel", "pack_rows", a.parts, a.row_id_map, out=a.windows)


def quantize_and_pack_into(
    windows: tuple[Any, ...], row_id_map: Any, x: Any, like: QuantTensor, *parts: Any
) -> None:
    """`pack_into` for quantised x and the parts."""
    call = enter(x=x, parts=parts, row_id_map=row_id_map, windows=windows)
    a = call.args
    _check_room(a.x.shape[0], a)
    counters.record_cast(weight=False)
    call.run("expert_parallel", "quantize_and_pack", a.x, a.parts, a.row_id_map, like=like, out=a.windows)


def _check_room(rows: int, a: Any) -> None:
    """Checks that windows without a map have room for all rows: memory past the last window belongs to
    another rank."""
    room = sum(window.shape[0] for window in a.windows)
    if a.row_id_map is None and room != rows:
        raise ValueError(f"windows: got {room} rows in all; wanted {rows}, the messages'")


def message_spec(parts: Sequence[Any]) -> ArraySpec:
    """Shape of messages of these arrays' rows."""
    return ArraySpec((parts[0].shape[0], sum(round_up(row_bytes(p), 16) for p in parts)), UINT8)


@operation
def unpack(packed: Any, parts: tuple[tuple[tuple[int, ...], str], ...]) -> tuple[Any, ...]:
    """Unpacks the arrays; parts: a row's shape and the dtype of each."""
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
    """`unpack` into the first rows of arrays with ``size`` rows; the others are zeros. Not a cached
    operation: the number of messages differs at every call, and each would be recorded.

    own: (first, experts), if the last two arrays are expert ids and probabilities: ids are then as from
    `local_ids`, and -1 in the other rows.
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
    """Unpacks arrays of which the last two are expert ids and probabilities; ids as from `local_ids`."""
    *rows, ids, probs = unpack(packed, parts)
    return (*rows, local_ids(ids, first, experts), probs)


@operation
def rank_mask(topk_ids: Any, experts: int, world: int) -> tuple[Any, Any]:
    """(mask [T, W], number of ids of each rank's experts [W])."""
    call = enter(topk_ids=topk_ids)
    tokens = call.args.topk_ids.shape[0]
    out = call.empty((ArraySpec((tokens, world), UINT8), ArraySpec((world,), checks.INT32)))
    call.run("expert_parallel", "rank_mask", call.args.topk_ids, experts=experts, out=out)
    return call.leave(out)


@operation
def local_ids(ids: Any, first: int, experts: int) -> Any:
    """Expert ids minus ``first``, int32, -1 outside of [0, ``experts``)."""
    call = enter(ids=ids)
    out = call.empty(ArraySpec(tuple(call.args.ids.shape), checks.INT32))
    rows = call.args.ids.shape[0]
    call.run("expert_parallel", "local_ids", call.args.ids, first=first, experts=experts, rows=rows, out=out)
    return call.leave(out)


@operation
def checked_ids(ids: Any, num_experts: int) -> Any:
    """`local_ids` of all experts; with FP8MOE_CHECK=1 ids of num_experts and more raise."""
    call = enter(ids=ids)
    checks.expert_ids(call, "topk_ids", call.args.ids, num_experts)
    return call.leave(local_ids(ids, 0, num_experts))


@operation
def limit_rows(plan: PermutationPlan, capacity: int) -> PermutationPlan:
    """A plan of ranks with exactly ``capacity`` rows per rank and no padding: rows of later tokens beyond it
    are dropped and counted in ``overflow``. Does not synchronise."""
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
    """What a rank sends, prepared before the other ranks' counts are known.

    plan: the tokens in rank order. entries: int32 [W], number of ids of each rank's experts. ids: int32 [T,
    k], as sent. rows: the messages in the plan's order, or None if they are written later.
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
    """Prepares a dispatch in one call. capacity: rows per rank, by a plan of `limit_rows`. packed: whether to
    pack the messages."""
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
    call = enter(x=x, topk_ids=topk_ids, topk_probs=topk_probs)
    a = call.args
    check_rows(call, num_experts)
    experts = num_experts // world
    mask, entries = rank_mask(topk_ids, experts, world)
    plan = plan_routing_map(mask, topk=min(topk_ids.shape[1], world))
    ids = topk_ids
    if capacity is not None:
        # Padding rows are zeros and must mean no expert, so expert e is sent as e + 1. Invalid ids, also 2^31
        # - 1, become 0
        ids, plan = local_ids(ids, -1, num_experts + 1), limit_rows(plan, capacity)
    elif a.topk_ids.dtype != checks.INT32:
        # the receiving rank ignores ids of other ranks, so invalid ids are sent unchanged
        ids = local_ids(ids, 0, num_experts)
    rows = pack_by_rank(x, fmt, plan, capacity is not None, ids, topk_probs) if packed else None
    return plan, entries, ids, rows


def check_rows(call: Call, num_experts: int) -> None:
    """Validates the raw arrays of `dispatch`."""
    x, topk_ids, topk_probs = call.args.x, call.args.topk_ids, call.args.topk_probs
    checks.shape("x", x, ("T", "H"))
    if not isinstance(x, QuantTensor):
        checks.dtype("x", x, checks.FLOATS)
    checks.dtype("topk_ids", topk_ids, checks.INTEGERS)
    checks.shape("topk_ids", topk_ids, (x.shape[0], "k"))
    checks.dtype("topk_probs", topk_probs, checks.FLOATS)
    checks.shape("topk_probs", topk_probs, tuple(topk_ids.shape))
    checks.expert_ids(call, "topk_ids", topk_ids, num_experts)


# ---------------------------------------------------------------- rows of some of the tokens


def part_of(x: Any, first: int, end: int) -> Any:
    """A view of rows first to end of an array or of a row-wise `QuantTensor`."""
    if isinstance(x, QuantTensor):
        return replace(x, data=x.data[first:end], scales=x.scales[first:end])
    return x[first:end]


@operation
def new_rows(like: Any, rows: int) -> Any:
    """A buffer for ``rows`` rows like those of an array."""
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
