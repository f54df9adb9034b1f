"""Expert parallelism over CuPy's NCCL, with no other framework.

uid = nccl.get_unique_id()            # cupy.cuda.nccl; on one rank, given to the others
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

    Sends and receives of one NCCL group an exchange, on a stream of its own, which ``Pending.wait`` has the
    current stream wait for. A rank that leaves makes NCCL wait for ever: whoever starts the ranks has to
    watch them.

    Parameters
    ----------
    communicator : cupy.cuda.nccl.NcclCommunicator
        On the current device.
    rank : int
        This rank.
    world_size : int
        W.

    Examples
    --------
    >>> from cupy.cuda import nccl  # doctest: +SKIP
    >>> only = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)  # doctest: +SKIP
    >>> Communicator(only, 0, 1).exchange(cupy.ones((2, 4)), ((2,),)).wait().shape  # doctest: +SKIP
    (2, 4)
    """

    def __init__(self, communicator: Any, rank: int, world_size: int):
        self._communicator, self.rank, self.world_size = communicator, rank, world_size
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def counts(self, counts: tuple[Any, ...], header: dict[str, int]) -> list[Counts]:
        """Tell every rank its numbers.

        Parameters
        ----------
        counts : tuple of cupy.ndarray, int32, [W]
            This rank's numbers for every rank.
        header : dict of str to int
            What must be the same on all ranks.

        Returns
        -------
        list of Counts
            For each of ``counts`` what every rank told every rank, on the host, which waits for it.

        Raises
        ------
        ValueError
            On all ranks, where a header differs.
        """
        numbers = cupy.concatenate([*counts, cupy.array(list(header.values()), dtype=np.int32)])
        gathered = cupy.empty((self.world_size, len(numbers)), np.int32)
        stream = cupy.cuda.get_current_stream()
        self._communicator.allGather(numbers.data.ptr, gathered.data.ptr, numbers.nbytes, INT8, stream.ptr)
        return counts_of(gathered.get().tolist(), header, self.rank)  # the one synchronisation

    def exchange(self, rows: Any, counts: Counts, size: int | None = None) -> Pending:
        """Rows to the ranks that want them.

        Parameters
        ----------
        rows : cupy.ndarray, [N, ...]
            The first rows of it, rank by rank.
        counts : Counts
            ``counts[a][b]`` rows from rank a to rank b.
        size : int or None
            Rows of the result; None: those that come.

        Returns
        -------
        Pending
            ``wait()`` returns rows of the same dtype, first in them those that came, rank by rank.
        """
        sent, received = counts[self.rank], [row[self.rank] for row in counts]
        theirs = cupy.empty((sum(received) if size is None else size, *rows.shape[1:]), rows.dtype)
        width = int(np.prod(rows.shape[1:], dtype=np.int64)) * rows.dtype.itemsize
        return self._group(rows, theirs, [width * n for n in sent], [width * n for n in received])

    def _group(self, ours: Any, theirs: Any, sent: list[int], received: list[int]) -> Pending:
        """Bytes to and from each rank, one after the other in the two arrays."""
        self._stream.wait_event(cupy.cuda.get_current_stream().record())
        nccl.groupStart()
        out, into = ours.data.ptr, theirs.data.ptr
        for rank in range(self.world_size):
            if sent[rank]:
                self._communicator.send(out, sent[rank], INT8, rank, self._stream.ptr)
            if received[rank]:
                self._communicator.recv(into, received[rank], INT8, rank, self._stream.ptr)
            out, into = out + sent[rank], into + received[rank]
        nccl.groupEnd()
        done = self._stream.record()

        def finish(kept: Any = ours) -> Any:  # its memory is read until then, which CuPy's pool does not know
            cupy.cuda.get_current_stream().wait_event(done)
            return theirs

        return Pending(finish)
