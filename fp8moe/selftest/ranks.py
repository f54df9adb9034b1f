"""Checks of messages between ranks, by transports that need no other process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fp8moe
from fp8moe import expert_parallel
from fp8moe.expert_parallel import Counts, Pending
from fp8moe.runtime.interop import require_cupy
from fp8moe.selftest.inputs import MIRRORED_EXPERTS, Inputs, equal


class Alone:
    """A transport for a single rank."""

    rank, world_size = 0, 1

    def __init__(self, xp: Any):
        self.xp = xp

    def counts(self, counts: tuple[Any, ...], header: dict[str, int]) -> list[Counts]:
        return [((int(c[0]),),) for c in counts]

    def exchange(self, rows: Any, counts: Counts, size: int | None = None) -> Pending:
        received = self.xp.empty((counts[0][0] if size is None else size, *rows.shape[1:]), rows.dtype)
        received[: counts[0][0]] = rows[: counts[0][0]]
        return Pending(lambda: received)


class AloneByWindows(Alone):
    """A single-rank transport through windows: rows are written directly to the receiver's memory."""

    def fits(self, counts: Counts, row_bytes: int) -> bool:
        return True

    def deliver(
        self, write: Callable[[tuple[Any, ...]], None], counts: Counts, row_bytes: int, async_op: bool
    ) -> Pending:
        window = self.xp.empty((counts[0][0], row_bytes), np.uint8)
        write((window,))
        return Pending(lambda: window)


class Mirror(Alone):
    """The first of two ranks, of which the second has the same tokens. ``back``: the rows that the second
    returns to `combine`."""

    world_size = 2
    back: Any = None

    def counts(self, counts: tuple[Any, ...], header: dict[str, int]) -> list[Counts]:
        return [(tuple(map(int, c)),) * 2 for c in counts]

    def exchange(self, rows: Any, counts: Counts, size: int | None = None) -> Pending:
        own = rows[: counts[0][0]].view("uint8")  # bytes: CuPy lacks functions of bfloat16
        of_second = own if self.back is None else self.back.view("uint8").reshape(-1, *own.shape[1:])
        received = self.xp.concatenate([own, of_second]).view(rows.dtype)
        return super().exchange(received, ((len(received),),), size)


def messages(x: Any, ids: Any, probs: Any, of_second: Any) -> tuple[Any, ...]:
    xp = np if isinstance(x, np.ndarray) else require_cupy("the CUDA selftest")
    results = []
    for kind in (Alone, AloneByWindows, Mirror):
        for fmt in (None, "e4m3"):
            comm = kind(xp)
            dispatched = expert_parallel.dispatch(x, ids, probs, MIRRORED_EXPERTS, comm, fmt=fmt)
            rows = dispatched.x if fmt is None else fp8moe.dequantize(dispatched.x, dtype="bfloat16")
            if isinstance(comm, Mirror):
                whole = x if fmt is None else fp8moe.dequantize(fp8moe.quantize(x), dtype="bfloat16")
                comm.back = whole.view("uint16")[of_second]
            back = expert_parallel.combine(rows, dispatched.route, comm)
            results.append((dispatched.x, dispatched.topk_ids, dispatched.topk_probs, back))
    return tuple(results)


def compare_messages(i: Inputs, *results: Any) -> None:
    q, half = fp8moe.quantize(i.wide), MIRRORED_EXPERTS // 2
    wide = fp8moe.dequantize(q).astype(i.x.dtype)
    of_first, of_second = (i.ids >= 0) & (i.ids < half), i.ids >= half
    for n, (x, ids, probs, back) in enumerate(results):
        mirrored, coded = n >= 4, n % 2 == 1
        label = f"{('exchange', 'windows', 'two ranks')[n // 2]}, {'e4m3' if coded else 'bfloat16'}"
        here = of_first if mirrored else i.ids >= 0
        tokens = np.flatnonzero(here.any(axis=1))
        tokens = np.concatenate([tokens, tokens]) if mirrored else tokens
        if coded:
            equal(x.data, q.data[tokens], f"{label}: codes")
            equal(x.scales, q.scales[tokens], f"{label}: scales")
        else:
            equal(x, i.wide[tokens], f"{label}: rows")
        equal(ids, np.where(here, i.ids, -1)[tokens], f"{label}: expert ids")
        equal(probs, i.probs[tokens], f"{label}: probabilities")
        ranks = here.any(axis=1, keepdims=True) + 1.0 * (of_second.any(axis=1, keepdims=True) & mirrored)
        equal(back, (wide if coded else i.wide) * ranks, f"{label}: rows that came back")
