"""`trace()`: counts the casts, launches and saved bytes of a run."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fp8moe.runtime.scopes import Opening, Scope, is_open

Event = tuple[str, Any]  # a field of `Trace`, and its increment, or the name of the launched operation


@dataclass
class Trace:
    """Counts of one `trace` block.

    Attributes
    ----------
    casts : int
        Explicit casts of activations and gradients: one per `quantize` or `dequantize` call, as the
        FP8-Flow-MoE paper (arXiv 2511.02302) counts them. Casts fused into another operation and casts of
        weights are not included.
    weight_casts : int
        `quantize` calls with (128, 128) blocks.
    launches : Counter of str
        Backend calls, by operation.
    saved_bytes : int
        Bytes that `moe_forward` saved for `moe_backward`.
    sent_bytes : int
        Bytes of rows sent to other ranks (`fp8moe.expert_parallel`).
    """

    casts: int = 0
    weight_casts: int = 0
    launches: Counter[str] = field(default_factory=Counter)
    saved_bytes: int = 0
    sent_bytes: int = 0

    @property
    def num_launches(self) -> int:
        return sum(self.launches.values())

    def count(self, event: Event) -> None:
        field, amount = event
        if field == "launches":
            self.launches[amount] += 1
        else:
            setattr(self, field, getattr(self, field) + amount)


#: the active counters of this thread; each is called for every event
active: ContextVar[tuple[Callable[[Event], None], ...]] = ContextVar("fp8moe_traces", default=())
counting = active.get


class _Counter:
    """Counts while a block is open; after it, the next event removes it."""

    def __init__(self, opening: weakref.ref[Opening], counts: Trace):
        self._opening, self._counts = opening, counts

    def __call__(self, event: Event) -> None:
        if is_open(self._opening):
            self._counts.count(event)
        else:
            active.set(tuple(count for count in counting() if count is not self))


class _Tracing(Scope):
    def enter(self, opening: weakref.ref[Opening]) -> Trace:
        counts = Trace()
        active.set((*counting(), _Counter(opening, counts)))
        return counts


def trace() -> AbstractContextManager[Trace]:
    """Count casts, launches and bytes inside a ``with`` block. Blocks may be nested; each has its own counts.

    Only calls of this thread are counted, and none inside ``jax.jit``. torch runs the backward of CUDA
    tensors in threads of its own, unless ``torch.autograd.set_multithreading_enabled(False)``.

    Returns
    -------
    context manager of Trace
        The counts, updated until the block ends.

    Examples
    --------
    >>> with fp8moe.trace() as counts:
    ...     q = fp8moe.quantize(np.ones((1, 128), np.float32))
    >>> counts.casts
    1
    """
    return _Tracing()


def record(field: str, amount: Any) -> None:
    for count in counting():
        count((field, amount))


def record_cast(weight: bool) -> None:
    for count in counting():
        count(("weight_casts" if weight else "casts", 1))


def record_saved(nbytes: int) -> None:
    record("saved_bytes", nbytes)


def record_sent(nbytes: int) -> None:
    record("sent_bytes", nbytes)
