"""Expert parallelism over PyTorch's symmetric memory: ranks write directly to each other's GPUs.

    comm = SymmetricMemory(group, window_bytes(ranks, tokens, hidden, topk))
    y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow", comm=comm)

For up to eight GPUs connected by NVLink. One kernel gathers a rank's rows, quantises them and writes them to
their destinations. With NCCL the same rows are written to memory, gathered into a second buffer, and copied
from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8moe.adapters import needs

with needs("torch"):
    import torch
import torch.distributed._symmetric_memory as symmetric_memory

from fp8moe.adapters.torch.distributed.process_group import ProcessGroup
from fp8moe.expert_parallel import Counts, Pending
from fp8moe.formats import round_up

__all__ = ["MOST_RANKS", "SymmetricMemory", "window_bytes"]

MOST_RANKS = 8  # limit of the kernels
WINDOWS = 2  # used alternately: an exchange may run while another's rows are read


def window_bytes(ranks: int, tokens: int, hidden: int, topk: int, itemsize: int = 2) -> int:
    """Return the memory required for any routing: all tokens of all ranks on one rank.

    Parameters
    ----------
    ranks : int
        Number of ranks of the group.
    tokens : int
        Maximum number of tokens of a rank.
    hidden : int
        Number of features of a token.
    topk : int
        Number of experts per token, each with an id and a probability.
    itemsize : int
        Bytes per value of x and of the gradients.

    Returns
    -------
    int
        Number of bytes: ``room`` of `SymmetricMemory`.

    Examples
    --------
    >>> from fp8moe.torch import window_bytes
    >>> window_bytes(ranks=8, tokens=4096, hidden=7168, topk=8)
    472907776
    """
    parts = hidden * itemsize, topk * 4, topk * 8  # probabilities may be float64
    return ranks * tokens * sum(round_up(size, 16) for size in parts)


class SymmetricMemory(ProcessGroup):
    """A `fp8moe.expert_parallel.PeerMemory` over an NCCL group of GPUs of one host (or NVLink domain).

    All ranks of the group must create it at the same time, each with its GPU as the current device.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or None
        Process group of at most eight ranks; None: the default group.
    room : int
        Maximum number of bytes that a rank receives in one exchange, from `window_bytes`; twice that is
        allocated on each GPU. Larger exchanges use NCCL, as the counts always do.
    timeout : float
        Seconds after which a barrier fails and aborts the process.
    overlap_chunks : int
        As in `fp8moe.torch.ProcessGroup`.

    Raises
    ------
    ValueError
        For more than eight ranks, or a room of 0.

    Notes
    -----
    Before an exchange is written, the device waits until all ranks have read the previous contents of the
    window, and before it is read, until all have written: two barriers, 6 us. At most two exchanges can be
    pending: a third raises RuntimeError until the first is waited for. Kernels that read an exchange's rows
    must be launched before the second exchange after it, on the same stream.

    Examples
    --------
    >>> from fp8moe.torch import SymmetricMemory, window_bytes
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
            raise ValueError(f"room: got {room}; wanted a positive number of bytes; pass window_bytes(...)")
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
        """Return whether `deliver` has room for these rows.

        Parameters
        ----------
        counts : Counts
            ``counts[a][b]`` rows from rank a to rank b.
        row_bytes : int
            Size of a row.

        Returns
        -------
        bool
            The same value on all ranks.
        """
        return max(map(sum, zip(*counts, strict=True))) * row_bytes <= self._size

    def deliver(
        self, write: Callable[[tuple[Any, ...]], None], counts: Counts, row_bytes: int, async_op: bool
    ) -> Pending:
        """Write rows to the memory of other ranks, as `fp8moe.expert_parallel.PeerMemory.deliver`.

        Parameters
        ----------
        write : function
            Called once with the destination in each rank's memory, uint8 [rows, row_bytes]; launches the
            kernels that write it.
        counts : Counts
            ``counts[a][b]`` rows from rank a to rank b.
        row_bytes : int
            Size of a row.
        async_op : bool
            Whether the caller waits for the exchange later.

        Returns
        -------
        Pending
            The received rows, uint8 [rows, row_bytes], valid until two more exchanges have started.

        Raises
        ------
        RuntimeError
            For a third exchange while two are pending.
        """
        turn, rank = self._turn, self.rank
        previous = self._pending[turn]
        if previous is not None and not previous.waited:
            raise RuntimeError(
                f"deliver: got a third exchange while {WINDOWS} are pending; wait() for the first"
            )
        self._turn = (turn + 1) % WINDOWS
        windows = tuple(
            self._rows(r, turn, sum(row[r] for row in counts[:rank]), counts[rank][r], row_bytes)
            for r in range(self.world_size)
        )
        received_rows = self._rows(rank, turn, 0, sum(row[rank] for row in counts), row_bytes)
        if not async_op and all(p is None or p.waited for p in self._pending):
            # events between the streams would take the host longer than the launches
            self._between_barriers(write, windows)
            return Pending(lambda: received_rows)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._between_barriers(write, windows)
            event = self._stream.record_event()

        def finish(kept_alive: Any = write) -> Any:  # the memory that it reads must stay alive until then
            torch.cuda.current_stream(self._device).wait_event(event)
            return received_rows

        pending = self._pending[turn] = Pending(finish)
        return pending

    def _between_barriers(self, write: Callable[[tuple[Any, ...]], None], windows: tuple[Any, ...]) -> None:
        """Writes after all ranks have read the windows, and waits until all have written."""
        self._memory.barrier(timeout_ms=self._timeout)
        write(windows)
        self._memory.barrier(timeout_ms=self._timeout)

    def _rows(self, rank: int, turn: int, first: int, count: int, row_bytes: int) -> torch.Tensor:
        """Rows [count, row_bytes] of a rank's window, starting at row ``first``."""
        view = self._windows[rank][turn][first * row_bytes : (first + count) * row_bytes]
        return view.view(count, row_bytes)
