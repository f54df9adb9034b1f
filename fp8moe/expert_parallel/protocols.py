"""What moves rows between ranks, and the records of an exchange: what adapters implement and return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

from fp8moe.records import PermutationPlan, Record


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
        """The first rows of rows [N, columns], rank by rank, to the ranks: ``counts[a][b]`` from a to b. The
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
