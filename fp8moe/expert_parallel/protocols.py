"""Interfaces of transports, which adapters implement, and the records of an exchange."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fp8moe.formats import round_up
from fp8moe.layer.options import LayerOptions
from fp8moe.records import Options, PermutationPlan, Record
from fp8moe.runtime import checks


class Pending:
    """A result in flight. `wait` returns it, on the caller's stream."""

    def __init__(self, finish: Callable[[], Any]):
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    @property
    def waited(self) -> bool:
        """Whether `wait` was called."""
        return self._finish is None

    def wait(self) -> Any:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result

    def then(self, function: Callable[[Any], Any]) -> Pending:
        return Pending(lambda: function(self.wait()))


Counts = tuple[tuple[int, ...], ...]  # [W][W]: rows from each rank to each


@dataclass(frozen=True)
class Capacity(Options):
    """An upper bound of row counts, stated by the caller: it determines shapes, and the host never reads
    counts.

    Rows and entries beyond the bounds are dropped, as if their ids were below 0, those of later tokens or
    later experts first; `overflow` counts them. Only torch's ``bias2`` is still added for them: the rank that
    adds it does not know what the others dropped.

    Attributes
    ----------
    rows : int
        Rows that a rank sends another, per dispatch (``overlap_chunks`` make several per forward); a
        dispatch's number of tokens always suffices. A rank always sends every rank this many rows, including
        empty ones, and receives W times as many.
    entries : int, optional
        (token, expert) pairs of a rank's own experts, from all ranks; None: W * rows * min(k, E / W), which
        suffices where no token names an expert twice. The buffers of permuted rows have this many rows plus
        the experts' alignment.
    """

    rows: int
    entries: int | None = None

    def __post_init__(self) -> None:
        checks.integer("rows", self.rows, 1)
        if self.entries is not None:
            checks.integer("entries", self.entries, 1)


@runtime_checkable
class Transport(Protocol):
    """Moves rows between ranks; every rank calls the same methods in the same order.

    It may have an attribute ``overlap_chunks``, the same on all ranks: `fp8moe.moe_forward` and its backward
    then split the tokens into that many chunks, each with its own dispatch, and overlap the transfer of one
    with the products of another (`fp8moe.expert_parallel.overlap`).
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def counts(self, counts: tuple[Any, ...], header: dict[str, int]) -> list[Counts]:
        """All-gathers counts: each of ``counts`` is int32 [W]. Returns for each, on the host, every rank's
        numbers for every rank, which **synchronises once** on CUDA. The header must be equal on all ranks:
        otherwise ValueError on all of them, naming the first rank and entry that differ."""
        ...

    def exchange(self, rows: Any, counts: Counts, size: int | None = None) -> Pending:
        """Sends the first rows of rows [N, columns], rank by rank: ``counts[a][b]`` from rank a to rank b.
        The result has the same kind and dtype, starts with the received rows in rank order, and has ``size``
        rows, by default exactly the received ones."""
        ...


@runtime_checkable
class Bounded(Transport, Protocol):
    """A transport whose `dispatch` sends as many rows as its ``capacity`` says, if that is not None, without
    host involvement: it never calls ``counts``."""

    capacity: Capacity | None

    def agree(self, header: dict[str, int], like: Any) -> None:
        """Checks that the header is equal on all ranks: ValueError as in ``counts`` if not. It
        **synchronises** once per header, and must be called before a CUDA graph is captured. like: an array
        on the device."""
        ...

    def record_overflow(self, rows: Any, entries: Any) -> None:
        """Receives from every `fp8moe.moe_forward` the number of dropped rows and entries: int32 [1] each, on
        the device, without reading them."""
        ...


@runtime_checkable
class PeerMemory(Transport, Protocol):
    """A transport whose ranks, at most eight, write into each other's memory: rows are gathered and quantised
    while they are written there."""

    def fits(self, counts: Counts, row_bytes: int) -> bool:
        """Whether `deliver` has room for such rows; if not, `exchange` moves them."""
        ...

    def deliver(
        self, write: Callable[[tuple[Any, ...]], None], counts: Counts, row_bytes: int, async_op: bool
    ) -> Pending:
        """Calls ``write`` once, with uint8 [``counts[this rank][r]``, row_bytes] of each rank r's memory, to
        launch the kernels that fill them. The result is uint8 [received rows, row_bytes]; it stays valid
        until two more deliveries have been requested. Without ``async_op`` it is waited for immediately."""
        ...


@runtime_checkable
class Engine(Protocol):
    """A library that implements the four steps itself: `dispatch` and the others below delegate to it."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

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
    largest possible number of rows, so that its shape is constant. counts: rows from each rank to each. rows:
    number of rows of the received arrays, including spare ones; None: no spare rows."""

    plan: PermutationPlan
    counts: Counts
    rows: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.plan.num_tokens


@dataclass(frozen=True)
class Dispatched(Record):
    """The R rows received by this rank. x: [R, H], as sent; topk_ids: int32 [R, k], local expert ids, -1 for
    other ranks' experts; topk_probs: [R, k] in the dtype sent. num_entries: number of ids that are not -1, so
    that ``plan_topk(..., num_out_tokens=static_bound(num_entries, ...))`` does not synchronise."""

    x: Any
    topk_ids: Any
    topk_probs: Any
    route: Any
    num_entries: int


@dataclass(frozen=True)
class DispatchedRows(Record):
    """The N rows received from an `Engine` that permutes: input of `fp8moe.moe_forward_permuted`. x: [N, H],
    as sent; tokens_per_expert: [E / W]; probs: [N]; align_size: each expert's rows are padded to a multiple
    of it. `Engine.dispatch_backward` then takes dprobs [N]."""

    x: Any
    tokens_per_expert: Any
    probs: Any
    route: Any
    align_size: int


def check_comm(comm: Any) -> None:
    if not hasattr(comm, "world_size"):
        raise TypeError(
            f"comm: got {type(comm).__name__}; wanted a Transport or an Engine, such as "
            "fp8moe.torch.ProcessGroup(group)"
        )
    if capacity_of(comm) is None:
        return
    missing = [name for name in ("agree", "record_overflow") if not hasattr(comm, name)]
    if missing:
        raise TypeError(
            f"comm: got {type(comm).__name__} with a capacity and without {' and '.join(missing)}; wanted "
            "the methods of fp8moe.expert_parallel.Bounded, or capacity None"
        )


def with_spare(rows: int) -> int:
    """A row count rounded up by at most a thirty-second, to a multiple of 16."""
    return round_up(rows, max(16, 1 << rows.bit_length() >> 6))


def capacity_of(comm: Any) -> Capacity | None:
    """The capacity of a `Bounded` transport; None for any other."""
    return getattr(comm, "capacity", None)


def chunks_of(comm: Any) -> int:
    """The ``overlap_chunks`` of a transport; 1 for any other."""
    return getattr(comm, "overlap_chunks", 1)


def overflow(saved: Any) -> list[tuple[Any, Any]]:
    """What a forward with a `Capacity` dropped, per dispatch (one, or ``overlap_chunks``): (rows that this
    rank did not send, entries that exceeded its own experts' capacity), int32 [1] each, on the device. saved:
    returned by `fp8moe.moe_forward`."""
    if not isinstance(getattr(saved, "route", None), Route):
        raise TypeError(
            f"saved: got {type(saved).__name__}; wanted what moe_forward returned, with a Transport as comm"
        )
    return [(s.route.plan.overflow, s.plan.overflow) for s in (saved, *saved.later)]


class Settings(NamedTuple):
    """What a caller of `dispatch` wants to be equal on all ranks: entries of the header.

    options: the layer's, of which recipe and activation must be equal; None without a layer.
    gathers_bias: whether a bias is gathered from all ranks after the experts.
    router: of the layer whose router has chosen the ids, a function that returns a checksum of it, 31 bits,
        the same one as before, or with True a new one; None for ids from elsewhere.
    sums_router: whether the backward sums that router's gradient over the ranks.
    """

    options: LayerOptions | None = None
    gathers_bias: bool = False
    router: Callable[[bool], int] | None = None
    sums_router: bool = False


NO_SETTINGS = Settings()  # of a dispatch without a layer

BACKWARD = "backward"  # name in the header of what a rank's backward sends
SENT_BY_BACKWARD = (  # its values
    "nothing",
    "dy",
    "dy, and dx and dprobs",
    "dy, dx and dprobs, and the router's gradient",
)
ROUTER = "router"  # name in the header of a checksum of the router


def backward_of(gradients: Collection[str], sums_router: bool = False) -> int:
    """What the backward that computes these gradients sends, as an index of `SENT_BY_BACKWARD`."""
    if "dx" in gradients or "dprobs" in gradients:
        return 3 if sums_router else 2
    return min(len(gradients), 1)


class DifferentRouters(ValueError):
    """Raised on all ranks if nothing else in their headers differs than the router's checksum."""


def counts_of(gathered: Sequence[Sequence[int]], header: dict[str, int], rank: int) -> list[Counts]:
    """The result of `Transport.counts`, from each rank's numbers: one count after the other, then its header,
    which must equal this rank's. It raises the same kind of error on all ranks."""
    world, numbers = len(gathered), len(gathered[0]) - len(header)
    wanted = list(header.values())
    if all(values[numbers:] == wanted for values in gathered):
        return [tuple(tuple(values[i : i + world]) for values in gathered) for i in range(0, numbers, world)]
    for other, values in enumerate(gathered):
        for name, value in zip(header, values[numbers:], strict=True):
            if value == header[name] or name == ROUTER:
                continue
            if name == BACKWARD:
                raise _different_backward(_ranks_by_value(gathered, numbers, header, name))
            raise ValueError(
                f"{name}: rank {rank} has {header[name]}, rank {other} has {value}; wanted the same on all "
                "ranks; nothing was sent"
            )
    raise _different_routers(_ranks_by_value(gathered, numbers, header, ROUTER))


def _ranks_by_value(gathered: Any, numbers: int, header: dict[str, int], name: str) -> dict[int, list[int]]:
    place = numbers + list(header).index(name)
    ranks: dict[int, list[int]] = {}
    for rank, values in enumerate(gathered):
        ranks.setdefault(values[place], []).append(rank)
    return ranks


def _different_backward(ranks: dict[int, list[int]]) -> ValueError:
    plans = "; ".join(f"{SENT_BY_BACKWARD[code]} from ranks {ranks[code]}" for code in sorted(ranks))
    return ValueError(
        f"gradients: got a backward that will send {plans}; wanted the same from all ranks, since each waits "
        "for the others' rows; let x, and the router's weight, require a gradient on all ranks or on none, "
        "and run a forward without a backward (torch.no_grad(), or gradients=()) on all ranks or on none; "
        "nothing was sent"
    )


def _different_routers(ranks: dict[int, list[int]]) -> DifferentRouters:
    sums = ", ".join(f"{value or 'none'} on ranks {of_value}" for value, of_value in ranks.items())
    return DifferentRouters(
        f"router: got weights or configurations with different checksums: {sums}; wanted the same router on "
        "all ranks; make the layer after torch.manual_seed with one seed for all ranks, or load one state "
        "dict on all of them; nothing was sent"
    )


def implements(comm: Any, protocol: Any) -> bool:
    kind: Any = type(comm)
    return _implements(kind, protocol)


@cache
def _implements(kind: Any, protocol: Any) -> bool:
    """isinstance, cached: it inspects every attribute of a protocol at each call, several times per
    operation."""
    return all(hasattr(kind, name) for name in vars(protocol) if not name.startswith("_"))
