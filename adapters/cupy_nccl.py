"""Expert parallelism over CuPy's NCCL bindings, without another framework.

uid = nccl.get_unique_id()            # cupy.cuda.nccl; created on one rank and sent to the others
comm = Communicator(nccl.NcclCommunicator(world_size, uid, rank), rank, world_size)
y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow", comm=comm)
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from cupy.cuda import nccl

from fp8moe.expert_parallel import Counts, Pending, counts_of

__all__ = ["Communicator"]

INT8 = 0  # ncclInt8


class Communicator:
    """A `fp8moe.expert_parallel.Transport` of CuPy arrays.

    Every exchange is one NCCL group of sends and receives on a separate stream; ``Pending.wait`` makes the
    current stream wait for it. If a rank exits, NCCL blocks forever on the others, so the launcher must
    monitor its ranks.

    Parameters
    ----------
    communicator : cupy.cuda.nccl.NcclCommunicator
        Communicator of the current device.
    rank : int
        Rank of this process.
    world_size : int
        W, the number of ranks.

    Examples
    --------
    >>> from cupy.cuda import nccl  # doctest: +SKIP
    >>> only = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)  # doctest: +SKIP
    >>> Communicator(only, 0, 1).exchange(cupy.ones((2, 4)), ((2,),)).wait().shape  # doctest: +SKIP
    (2, 4)
    """

    def __init__(self, communicator: Any, rank: int, world_size: int):
        self._communicator, self._rank, self._world_size = communicator, rank, world_size
        self._stream = cupy.cuda.Stream(non_blocking=True)

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._rank

    @property
    def world_size(self) -> int:
        """W, the number of ranks."""
        return self._world_size

    def counts(self, counts: tuple[Any, ...], header: dict[str, int]) -> list[Counts]:
        """Exchange row counts between all ranks.

        Parameters
        ----------
        counts : tuple of cupy.ndarray, int32, [W]
            Number of rows this rank sends to each rank.
        header : dict of str to int
            Values that must be equal on all ranks.

        Returns
        -------
        list of Counts
            For each entry of ``counts``, the numbers from every rank to every rank, on the host. The call
            synchronises.

        Raises
        ------
        ValueError
            On all ranks, if the headers differ.
        """
        numbers = cupy.concatenate([*counts, cupy.array(list(header.values()), dtype=np.int32)])
        gathered = cupy.empty((self.world_size, len(numbers)), np.int32)
        stream = cupy.cuda.get_current_stream()
        self._communicator.allGather(numbers.data.ptr, gathered.data.ptr, numbers.nbytes, INT8, stream.ptr)
        return counts_of(gathered.get().tolist(), header, self.rank)  # the only synchronisation

    def exchange(self, rows: Any, counts: Counts, size: int | None = None) -> Pending:
        """Send rows to other ranks.

        Parameters
        ----------
        rows : cupy.ndarray, [N, ...]
            Rows to send, grouped by destination rank; the rows after them are not sent.
        counts : Counts
            ``counts[a][b]`` rows from rank a to rank b.
        size : int or None
            Number of rows of the result; None: the number of received rows.

        Returns
        -------
        Pending
            ``wait()`` returns rows of the same dtype: first the received rows, grouped by source rank.
        """
        sent, received = counts[self.rank], [row[self.rank] for row in counts]
        received_rows = cupy.empty((sum(received) if size is None else size, *rows.shape[1:]), rows.dtype)
        width = int(np.prod(rows.shape[1:], dtype=np.int64)) * rows.dtype.itemsize
        return self._group(rows, received_rows, [width * n for n in sent], [width * n for n in received])

    def _group(self, sent_rows: Any, received_rows: Any, sent: list[int], received: list[int]) -> Pending:
        """Send and receive bytes; each rank's part follows the previous rank's part in both arrays."""
        self._stream.wait_event(cupy.cuda.get_current_stream().record())
        nccl.groupStart()
        source, target = sent_rows.data.ptr, received_rows.data.ptr
        for rank in range(self.world_size):
            if sent[rank]:
                self._communicator.send(source, sent[rank], INT8, rank, self._stream.ptr)
            if received[rank]:
                self._communicator.recv(target, received[rank], INT8, rank, self._stream.ptr)
            source, target = source + sent[rank], target + received[rank]
        nccl.groupEnd()
        done = self._stream.record()

        # NCCL reads its memory until the event; CuPy's memory pool does not know
        def finish(kept_alive: Any = sent_rows) -> Any:
            cupy.cuda.get_current_stream().wait_event(done)
            return received_rows

        return Pending(finish)
