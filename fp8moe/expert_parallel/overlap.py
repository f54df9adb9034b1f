"""Chunked execution that overlaps one chunk's exchange with another chunk's grouped products.

Dispatch runs one chunk ahead, and a combine is waited for after the next chunk's products:

    forward    rows   dispatch 0 | dispatch 1 | combine 0, dispatch 2 | combine 1 ...
               host              | products 0 | products 1            | products 2 ...
    backward   rows   dy 0       | dy 1                       | dx 0, dy 2                 | dx 1 ...
               host              | dx products 0, dw products 0 | dx products 1, dw products 1 ...

At most two exchanges are in flight, and each is waited for before the second one after it starts:
`PeerMemory` has windows for two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from fp8moe.expert_parallel.exchange import (
    combine,
    combine_backward,
    dispatch_backward,
    prepare_dispatch,
)
from fp8moe.expert_parallel.messages import new_rows, part_of
from fp8moe.expert_parallel.protocols import Comm, Dispatched, Pending, Route, Settings


def chunk_bounds(tokens: int, chunks: int) -> list[tuple[int, int]]:
    """(first, end) of each chunk, sizes as equal as possible, the same number on every rank."""
    return list(itertools.pairwise(tokens * i // chunks for i in range(chunks + 1)))


def overlapped_forward(
    x: Any,
    topk_ids: Any,
    topk_probs: Any,
    num_experts: int,
    comm: Comm,
    *,
    fmt: str | None,
    chunks: int,
    gradients: Collection[str],
    settings: Settings,
    experts: Callable[[Dispatched], Any],
) -> Any:
    """y [T, H]; ``experts`` computes the results of received rows, chunk by chunk. gradients and settings: as
    in `prepare_dispatch`."""
    tokens = topk_ids.shape[0]
    bounds = chunk_bounds(tokens, chunks)

    def prepare(chunk: int) -> Callable[[bool], Pending]:
        rows, ids, probs = (part_of(a, *bounds[chunk]) for a in (x, topk_ids, topk_probs))
        given = rows, ids, probs, num_experts, comm, fmt
        return prepare_dispatch(*given, gradients=gradients, spare=True, settings=settings)

    pending, y, back = prepare(0)(True), None, None
    # hosts that wait for counts wait here, before any products
    following = [prepare(chunk) for chunk in range(1, chunks)]
    for chunk, (first, end) in enumerate(bounds):
        arrived = pending.wait()
        if chunk + 1 < chunks:
            pending = following[chunk](True)
        rows = experts(arrived)
        if back is not None:
            back.wait()
        y = new_rows(rows, tokens) if y is None else y
        back = combine(rows, arrived.route, comm, async_op=True, out=part_of(y, first, end))
    assert back is not None
    back.wait()
    return y


def overlapped_backward(
    dy: Any,
    routes: Sequence[Route],
    comm: Comm,
    *,
    fmt: str | None,
    inputs: Callable[[int, Any], tuple[Any, Any]],
    weights: Callable[[int], None],
) -> tuple[Any, Any]:
    """(dx [T, H], dprobs [T, k]), or None for both, for one chunk or several. inputs: computes (dx, dprobs)
    of a chunk's rows. weights: the remaining work of the chunk, which overlaps their transfer."""
    ends = [0, *itertools.accumulate(route.num_tokens for route in routes)]
    bounds, alone = list(itertools.pairwise(ends)), len(routes) == 1

    def send(chunk: int, async_op: bool) -> Any:
        part = dy if alone else part_of(dy, *bounds[chunk])
        return combine_backward(part, routes[chunk], comm, fmt=fmt, async_op=async_op)

    pending, grads, back = None, None, None
    for chunk, route in enumerate(routes):
        arrived = send(chunk, False) if pending is None else pending.wait()
        if chunk + 1 < len(routes):
            pending = send(chunk + 1, True)
        of_rows = inputs(chunk, arrived)
        if back is not None:
            back.wait()
        if of_rows[0] is not None and alone:
            back = dispatch_backward(*of_rows, route, comm, async_op=True)
        elif of_rows[0] is not None:
            grads = tuple(new_rows(a, ends[-1]) for a in of_rows) if grads is None else grads
            out = tuple(part_of(a, *bounds[chunk]) for a in grads)
            back = dispatch_backward(*of_rows, route, comm, async_op=True, out=out)
        weights(chunk)
    last = (None, None) if back is None else back.wait()
    return last if grads is None else grads  # type: ignore[return-value]
