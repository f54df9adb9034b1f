"""Messages between ranks: a row of each array side by side in one row of bytes, and what a device does for
them: pack, quantise and pack, unpack, and which ids belong to which rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fp8moe import checks, counters
from fp8moe.dispatch import enter, operation
from fp8moe.formats import round_up
from fp8moe.interop import dtype_named
from fp8moe.quantize import quantize_spec
from fp8moe.records import ArraySpec, PermutationPlan, QuantTensor

UINT8 = np.dtype(np.uint8)
FORMS = ("bfloat16", "float16", "float32", "float64", "e4m3", "e5m2", "e2m1")  # what rows are sent as


class Message:
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
        self.row_bytes = message_spec(each).shape[1]
        # one array whose rows are messages as they are
        self._plain = fmt is None and len(each) == 1 and row_bytes(each[0]) == self.row_bytes
        self._packed: Any = None

    def pack(self) -> Any:
        """The messages in memory of their own, made once."""
        if self._packed is None:
            if self._plain:
                self._packed = self.x
            elif self.fmt is None:
                self._packed = pack(*_parts(self.x), *self.parts)
            else:
                self._packed = quantize_and_pack(self.x, self.fmt, *self.parts)
        return self._packed

    def write(self, row_id_map: Any, windows: tuple[Any, ...]) -> None:
        """The messages into the ranks' windows."""
        if self.fmt is None:
            pack_into(windows, row_id_map, *_parts(self.x), *self.parts)
        else:
            quantize_and_pack_into(windows, row_id_map, self.x, self.like, *self.parts)

    def unpack(self, rows: Any) -> tuple[Any, ...]:
        """x's parts, and the others, of messages."""
        return (rows.view(self.x.dtype),) if self._plain else unpack(rows, self._shapes)

    def kept(self, rows: Any) -> Any:
        """The messages where the caller may keep what `unpack` makes of them: a peer's window is written
        again."""
        return unpack(rows, self._shapes)[0] if self._plain else rows


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
    raw = call.args.x
    like = quantize_spec(raw, fmt, (1, 128), "compact", False)
    out = call.empty(message_spec((like.data, like.scales, *call.args.parts)))
    counters.record_cast(weight=False)
    call.run("expert_parallel", "quantize_and_pack", raw, call.args.parts, None, like=like, out=(out,))
    return call.leave(out)


def pack_into(windows: tuple[Any, ...], row_id_map: Any, *parts: Any) -> None:
    """The same into windows [n, bytes] that follow each other: each row to all its places of row_id_map, or
    row r to place r."""
    call = enter(parts=parts, row_id_map=row_id_map, windows=windows)
    a = call.args
    call.run("expert_parallel", "pack_rows", a.parts, a.row_id_map, out=a.windows)


def quantize_and_pack_into(
    windows: tuple[Any, ...], row_id_map: Any, x: Any, like: QuantTensor, *parts: Any
) -> None:
    """`pack_into` of x, quantised, and the parts."""
    call = enter(x=x, parts=parts, row_id_map=row_id_map, windows=windows)
    a = call.args
    counters.record_cast(weight=False)
    call.run("expert_parallel", "quantize_and_pack", a.x, a.parts, a.row_id_map, like=like, out=a.windows)


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
    call.run("expert_parallel", "local_ids", call.args.ids, first=first, experts=experts, out=out)
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
