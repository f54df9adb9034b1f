"""Expert parallelism by PyTorch's symmetric memory: ranks write into each other's GPUs.

    comm = SymmetricMemory(group, window_bytes(ranks, tokens, hidden, topk))
    y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow", comm=comm)

For up to eight GPUs that reach each other over NVLink. One kernel gathers a rank's rows, quantises them, and
stores them where they are wanted. For NCCL the same rows are written to memory, gathered into a second
buffer, and copied from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory

from fp8moe.adapters.torch_distributed import ProcessGroup
from fp8moe.expert_parallel import Counts, Pending
from fp8moe.formats import round_up

__all__ = ["SymmetricMemory", "window_bytes"]

MOST_RANKS = 8  # as the kernels' windows
WINDOWS = 2  # in turn, so that one exchange may be on its way while another's rows are read


def window_bytes(ranks: int, tokens: int, hidden: int, topk: int, itemsize: int = 2) -> int:
    """Count the room for whatever the routing says: all tokens of all ranks at one of them.

    Parameters
    ----------
    ranks : int
        Of the group.
    tokens : int
        Of a rank, at most.
    hidden : int
        Values of a token.
    topk : int
        Experts of a token, each with an id and a probability.
    itemsize : int
        Bytes of a value, of x and of the gradients.

    Returns
    -------
    int
        Bytes: ``room`` of `SymmetricMemory`.

    Examples
    --------
    >>> from fp8moe.adapters.torch_symmetric_memory import window_bytes
    >>> window_bytes(ranks=8, tokens=4096, hidden=7168, topk=8)
    472907776
    """
    parts = hidden * itemsize, topk * 4, topk * 8  # probabilities may be float64
    return ranks * tokens * sum(round_up(size, 16) for size in parts)


class SymmetricMemory(ProcessGroup):
    """A `fp8moe.expert_parallel.PeerMemory` over the NCCL group of GPUs of one host (or NVLink domain).

    All ranks of the group make it at the same time, each with its GPU as the current device.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or None
        Of at most eight ranks; None: the default group.
    room : int
        Bytes that one exchange may bring a rank, `window_bytes` of the most there can be; twice that is
        allocated on each GPU. An exchange that does not fit goes through NCCL, as the counts do.
    timeout : float
        Seconds after which the barriers give up, and the process with them.
    overlap_chunks : int
        As of `fp8moe.adapters.torch_distributed.ProcessGroup`.

    Raises
    ------
    ValueError
        For more ranks, or no room.

    Notes
    -----
    Writing waits on the device until all ranks have read what the window held before, and reading until all
    have written: two barriers, 6 us. At most two exchanges are on their way: a third raises RuntimeError
    until the first is waited for. What reads an exchange's rows has to be launched before the second one
    after it, on the same stream.

    Examples
    --------
    >>> from fp8moe.adapters.torch_symmetric_memory import SymmetricMemory, window_bytes
    >>> room = window_bytes(ranks=2, tokens=1024, hidden=4096, topk=8)
    >>> room
    16973824
    >>> comm = SymmetricMemory(group, room)  # doctest: +SKIP
    """

    def __init__(
        self, group: Any = None, room: int = 1 << 30, *, timeout: float = 600.0, overlap_chunks: int = 1
    ):
        super().__init__(group, overlap_chunks=overlap_chunks)
        if self.world_size > MOST_RANKS:
            raise ValueError(
                f"group: got {self.world_size} ranks; wanted at most {MOST_RANKS}; use ProcessGroup"
            )
        if room <= 0:
            raise ValueError(f"room: got {room}; wanted bytes, as window_bytes() counts them")
        self._size = round_up(room, 512)
        self._timeout = round(timeout * 1e3)
        self._device = torch.device("cuda", torch.cuda.current_device())
        memory = symmetric_memory.empty(WINDOWS * self._size, dtype=torch.uint8, device=self._device)
        self._memory = symmetric_memory.rendezvous(memory, self.group)
        shape = (WINDOWS, self._size)
        self._windows = [self._memory.get_buffer(r, shape, torch.uint8, 0) for r in range(self.world_size)]
        self._stream = torch.cuda.Stream(self._device)
        self._turn = 0
        self._pending: list[Pending | None] = [None] * WINDOWS

    def fits(self, counts: Counts, row_bytes: int) -> bool:
        """Tell whether `deliver` has room for such rows.

        Parameters
        ----------
        counts : Counts
            ``counts[a][b]`` rows from a to b.
        row_bytes : int
            Bytes of a row.

        Returns
        -------
        bool
            The same on all ranks.
        """
        return max(map(sum, zip(*counts, strict=True))) * row_bytes <= self._size

    def deliver(
        self, write: Callable[[tuple[Any, ...]], None], counts: Counts, row_bytes: int, async_op: bool
    ) -> Pending:
        """Have rows written into the ranks' memory, as `fp8moe.expert_parallel.PeerMemory.deliver`.

        Parameters
        ----------
        write : function
            Called once, with uint8 [rows for it, row_bytes] of each rank's memory; launches what fills them.
        counts : Counts
            ``counts[a][b]`` rows from a to b.
        row_bytes : int
            Bytes of a row.
        async_op : bool
            Whether the caller waits for it later.

        Returns
        -------
        Pending
            Of uint8 [rows from the ranks, row_bytes], until two more have been asked for.

        Raises
        ------
        RuntimeError
            For a third exchange while two are on their way.
        """
        turn, rank = self._turn, self.rank
        before = self._pending[turn]
        if before is not None and not before.waited:
            raise RuntimeError(f"got a third exchange while {WINDOWS} are on their way; wait() for the first")
        self._turn = (turn + 1) % WINDOWS
        windows = tuple(
            self._rows(r, turn, sum(row[r] for row in counts[:rank]), counts[rank][r], row_bytes)
            for r in range(self.world_size)
        )
        arriving = self._rows(rank, turn, 0, sum(row[rank] for row in counts), row_bytes)
        if not async_op and all(p is None or p.waited for p in self._pending):
            # events between streams would take the host longer than the launches
            self._between_barriers(write, windows)
            return Pending(lambda: arriving)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._between_barriers(write, windows)
            arrived = self._stream.record_event()

        def finish(kept: Any = write) -> Any:  # what it reads is read until then
            torch.cuda.current_stream(self._device).wait_event(arrived)
            return arriving

        pending = self._pending[turn] = Pending(finish)
        return pending

    def _between_barriers(self, write: Callable[[tuple[Any, ...]], None], windows: tuple[Any, ...]) -> None:
        """All have read what the windows held, then all have written."""
        self._memory.barrier(timeout_ms=self._timeout)
        write(windows)
        self._memory.barrier(timeout_ms=self._timeout)

    def _rows(self, rank: int, turn: int, first: int, count: int, row_bytes: int) -> torch.Tensor:
        """Rows [count, row_bytes] of a rank's window, from its row ``first`` on."""
        view = self._windows[rank][turn][first * row_bytes : (first + count) * row_bytes]
        return view.view(count, row_bytes)
