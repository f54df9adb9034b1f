"""What moves rows between ranks, and the records of an exchange: what adapters implement and return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

from fp8moe import checks
from fp8moe.formats import round_up
from fp8moe.records import Options, PermutationPlan, Record


class Pending:
    """Something that is on its way. `wait` returns it, on the caller's stream."""

    def __init__(self, finish: Callable[[], Any]):
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    @property
    def waited(self) -> bool:
        """Whether it was waited for."""
        return self._finish is None

    def wait(self) -> Any:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result

    def then(self, function: Callable[[Any], Any]) -> Pending:
        return Pending(lambda: function(self.wait()))


Counts = tuple[tuple[int, ...], ...]  # [W][W]: from each rank to each


@dataclass(frozen=True)
class Capacity(Options):
    """How many rows there may be at most, by the caller's word: shapes follow from it, and no host has to
    know counts.

    rows: that a rank sends another, of one dispatch (``overlap_chunks`` make several of a forward); as many
        as a dispatch has tokens are never too few. A rank always sends each other this many, empty ones
        among them, and W times as many arrive.
    entries: (token, expert) pairs of a rank's own experts, from all ranks; None: W * rows * min(k, E / W),
        which are never too few. The buffers of permuted rows have this many rows, and those that align each
        expert's.

    Rows and entries past them are left out, as if their ids were below 0, those of later tokens first, or of
    later experts; `overflow` counts them.
    """

    rows: int
    entries: int | None = None

    def __post_init__(self) -> None:
        checks.integer("rows", self.rows, 1)
        if self.entries is not None:
            checks.integer("entries", self.entries, 1)


@runtime_checkable
class Transport(Protocol):
    """What moves rows between ranks; every rank calls the same methods in the same order.

    It may have an attribute ``overlap_chunks``, the same on all ranks: `fp8moe.moe_forward` and its backward
    then take the tokens in so many chunks, each a dispatch of its own, and move the rows of one beside the
    products of another (`fp8moe.expert_parallel.overlap`).
    """

    rank: int
    world_size: int

    def counts(self, counts: tuple[Any, ...], header: dict[str, int]) -> list[Counts]:
        """Tell every rank its numbers: each of ``counts`` is int32 [W]. Returns for each, on the host, what
        every rank told every rank, which **synchronises once** on CUDA. The header must be the same on all
        ranks: ValueError on all of them, naming the first that differs and what differs."""
        ...

    def exchange(self, rows: Any, counts: Counts, size: int | None = None) -> Pending:
        """The first rows of rows [N, columns], rank by rank, to the ranks: ``counts[a][b]`` from a to b. The
        result is of the same kind and dtype, and first in it the rows from the ranks; it has ``size`` rows,
        by default just these."""
        ...


@runtime_checkable
class Bounded(Transport, Protocol):
    """A transport whose `dispatch` moves as many rows as its ``capacity`` says, where that is not None, and
    asks the host for nothing: it never calls ``counts``."""

    capacity: Capacity | None

    def agree(self, header: dict[str, int], like: Any) -> None:
        """That the header is the same on all ranks: ValueError as of ``counts`` where it is not. It is looked
        at once for each header, which **synchronises**, and must come before a CUDA graph is captured. like:
        an array on the device."""
        ...

    def record_overflow(self, rows: Any, entries: Any) -> None:
        """Told by every `fp8moe.moe_forward` how many rows and entries there was no room for: int32 [1]
        each, on the device, which nothing looks at."""
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
        """``write`` is called once, with uint8 [``counts[this rank][r]``, row_bytes] of each rank r's memory,
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
    ) -> Dispatched | DispatchedRows: ...

    def combine(self, y: Any, route: Any, fmt: str | None) -> Any: ...

    def combine_backward(self, dy: Any, route: Any, fmt: str | None) -> Any: ...

    def dispatch_backward(self, dx: Any, dprobs: Any, route: Any) -> tuple[Any, Any]: ...


Comm = Transport | Engine


@dataclass(frozen=True)
class Route(Record):
    """Which rows went where. plan: the tokens' permutation into rank order, W "experts", in a buffer for the
    most rows that there can be, so that its shape is the same at every step. counts: rows from each rank to
    each. rows: of the arrays of what arrived, the first of which these are; None: just these."""

    plan: PermutationPlan
    counts: Counts
    rows: int | None = None

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


@dataclass(frozen=True)
class DispatchedRows(Record):
    """What arrived by an `Engine` that permutes: the rows of `fp8moe.moe_forward_permuted`, N of them. x:
    [N, H], as sent; tokens_per_expert: [E / W]; probs: [N]; align_size: what each expert's rows are padded to
    a multiple of. `Engine.dispatch_backward` has dprobs [N] of them then."""

    x: Any
    tokens_per_expert: Any
    probs: Any
    route: Any
    align_size: int


def with_spare(rows: int) -> int:
    """Rounded up by a thirty-second at most, and to a multiple of 16."""
    return round_up(rows, max(16, 1 << rows.bit_length() >> 6))


def capacity_of(comm: Any) -> Capacity | None:
    """Of a `Bounded` transport; None of any other."""
    return getattr(comm, "capacity", None)


def chunks_of(comm: Any) -> int:
    """The ``overlap_chunks`` of a transport; 1 of any other."""
    return getattr(comm, "overlap_chunks", 1)


def overflow(saved: Any) -> list[tuple[Any, Any]]:
    """What a forward with a `Capacity` left out, for each dispatch (one, or ``overlap_chunks``): (rows that
    this rank did not send, entries that its own experts had no room for), int32 [1] each, on the device.
    saved: what `fp8moe.moe_forward` returned."""
    if not isinstance(getattr(saved, "route", None), Route):
        raise TypeError(
            f"saved: got {type(saved).__name__}; wanted what moe_forward returned, with a Transport as comm"
        )
    return [(s.route.plan.overflow, s.plan.overflow) for s in (saved, *saved.later)]


def counts_of(gathered: Sequence[Sequence[int]], header: dict[str, int], rank: int) -> list[Counts]:
    """What `Transport.counts` returns, from each rank's numbers for the ranks, one count after the other, and
    after them its header, which is refused where it differs from this rank's."""
    world, numbers = len(gathered), len(gathered[0]) - len(header)
    for other, values in enumerate(gathered):
        for name, value in zip(header, values[numbers:], strict=True):
            if value != header[name]:
                raise ValueError(
                    f"{name}: rank {rank} has {header[name]}, rank {other} has {value}; wanted the same on "
                    "all ranks; nothing was sent"
                )
    return [tuple(tuple(values[i : i + world]) for values in gathered) for i in range(0, numbers, world)]


def implements(comm: Any, protocol: Any) -> bool:
    kind: Any = type(comm)
    return _implements(kind, protocol)


@cache
def _implements(kind: Any, protocol: Any) -> bool:
    """As isinstance, which looks at every attribute of a protocol anew, several times a call."""
    return all(hasattr(kind, name) for name in vars(protocol) if not name.startswith("_"))
