"""`trace()`: what a run casts, launches and keeps for its backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Trace:
    """Counts of what a `trace` block did.

    Attributes
    ----------
    casts : int
        Explicit casts of activations and gradients, one for each `quantize` or `dequantize` call (what the
        FP8-Flow-MoE paper, arXiv 2511.02302, counts). Casts fused into another operation and casts of weights
        are not in it.
    weight_casts : int
        `quantize` calls with (128, 128) blocks.
    launches : Counter of str
        Calls of a backend, by operation.
    saved_bytes : int
        Bytes that `moe_forward` saved for `moe_backward`.
    sent_bytes : int
        Bytes of rows that went to other ranks (`fp8moe.expert_parallel`).
    """

    casts: int = 0
    weight_casts: int = 0
    launches: Counter[str] = field(default_factory=Counter)
    saved_bytes: int = 0
    sent_bytes: int = 0

    @property
    def num_launches(self) -> int:
        return sum(self.launches.values())


_active: ContextVar[tuple[Trace, ...]] = ContextVar("fp8moe_traces", default=())


@contextmanager
def trace() -> Iterator[Trace]:
    """Count what happens inside a ``with`` block; blocks nest, and each counts its own.

    Returns
    -------
    Iterator of Trace
        The counts, which go on changing until the block ends.

    Examples
    --------
    >>> with fp8moe.trace() as counts:
    ...     q = fp8moe.quantize(np.ones((1, 128), np.float32))
    >>> counts.casts
    1
    """
    counts = Trace()
    token = _active.set((*_active.get(), counts))
    try:
        yield counts
    finally:
        _active.reset(token)


class TraceOnly:
    """As `trace`, and nothing else counts what happens inside."""

    def __enter__(self) -> Trace:
        counts = Trace()
        self._token = _active.set((counts,))
        return counts

    def __exit__(self, *_: object) -> None:
        _active.reset(self._token)


#: the traces that count now
counting = _active.get


def add(counts: Trace, to: tuple[Trace, ...]) -> None:
    """Count again what was counted once."""
    for one in to:
        one.casts += counts.casts
        one.weight_casts += counts.weight_casts
        one.launches.update(counts.launches)
        one.saved_bytes += counts.saved_bytes
        one.sent_bytes += counts.sent_bytes


def record_launch(verb: str) -> None:
    for counts in _active.get():
        counts.launches[verb] += 1


def record_cast(weight: bool) -> None:
    for counts in _active.get():
        if weight:
            counts.weight_casts += 1
        else:
            counts.casts += 1


def record_saved(nbytes: int) -> None:
    for counts in _active.get():
        counts.saved_bytes += nbytes


def record_sent(nbytes: int) -> None:
    for counts in _active.get():
        counts.sent_bytes += nbytes
