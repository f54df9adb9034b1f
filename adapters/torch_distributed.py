"""Expert parallelism over `torch.distributed`: NCCL on GPUs, gloo on the CPU.

comm = fp8moe.adapters.torch_distributed.ProcessGroup(group)      # None: the default group
y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow", comm=comm)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fp8moe import checks, expert_parallel
from fp8moe.adapters.torch_experts import handle_of
from fp8moe.adapters.torch_lost_ranks import LostRankWatch, RankLost
from fp8moe.expert_parallel import Capacity, Counts, Dispatched, DispatchedRows, Pending

__all__ = ["ProcessGroup", "RankLost"]

# torch 2.13 has another name for it, and warns of the old one
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroup:
    """A `fp8moe.expert_parallel.Transport` over a process group; torch tensors, and NumPy arrays with gloo.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or None
        None: the default group.
    capacity : Capacity or None
        With a `fp8moe.expert_parallel.Capacity` every forward and backward moves as many rows as it says,
        nothing waits for the host, and a CUDA graph holds them, after a first forward of the same kind
        outside of it. What it left out `overflow` tells; read that now and then.
    overlap_chunks : int
        Chunks of tokens that `fp8moe.moe_forward` and its backward take one after another, so that the rows
        of one travel beside the products of another.

    Raises
    ------
    TypeError, ValueError
        For a capacity or a number of chunks that is none.
    RankLost
        In an exchange, for a rank that leaves or does not come within the group's timeout, naming it. With
        NCCL that is seen where the host waits, in ``counts``, after nine tenths of the timeout, before
        torch's watchdog ends the process; the group is of no use then.

    Notes
    -----
    One `all_to_all_single` an exchange, of bytes. NCCL's runs on a stream of its own; ``Pending.wait`` has
    the current stream wait for it, not the host. With a capacity no rank is seen to be lost but by the
    group's own timeout.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> from fp8moe.adapters.torch_distributed import ProcessGroup
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> comm = ProcessGroup()
    >>> x, w13, w2 = torch.ones(1, 1), torch.tensor([[[100.0], [2.0]]]), torch.tensor([[[1.0]]])
    >>> ids, probs = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 0.5)
    >>> fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="bf16", comm=comm)[0].item()
    100.0
    >>> dist.destroy_process_group()
    """

    def __init__(self, group: Any = None, capacity: Capacity | None = None, overlap_chunks: int = 1):
        if capacity is not None:
            checks.options("capacity", capacity, Capacity)
        self.capacity, self.overlap_chunks = capacity, checks.integer("overlap_chunks", overlap_chunks, 1)
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.handle = handle_of(self)  # by which compiled code finds it
        self._watch = LostRankWatch(self.group)
        self._headers: dict[Any, Tensor] = {}  # one for each kind of layer
        self._gathered: dict[Any, tuple[Tensor, Tensor]] = {}  # counts of all ranks: `_buffers`
        self._agreed: set[Any] = set()  # headers that are the same on all ranks
        self._overflow: Tensor | None = None  # rows and entries, of all forwards

    def counts(self, counts: tuple[Any, ...], header: dict[str, int]) -> list[Counts]:
        """Tell every rank its numbers, as `fp8moe.expert_parallel.Transport.counts`.

        Parameters
        ----------
        counts : tuple of arrays, int32, [W]
            Numbers for each rank.
        header : dict of str to int
            What must be the same on all ranks.

        Returns
        -------
        list of Counts
            For each of ``counts``, on the host, what every rank told every rank. On CUDA this **synchronises
            once**.

        Raises
        ------
        ValueError
            On all ranks, for headers that differ.
        RuntimeError
            `RankLost`.
        """
        known = [_tensor(c) for c in counts]
        values, device, world = tuple(header.values()), known[0].device, self.world_size
        if (values, device) not in self._headers:  # a copy to the device waits
            self._headers[values, device] = torch.tensor(values, dtype=torch.int32, device=device)
        message = torch.cat([*known, self._headers[values, device]])
        messages, on_host = self._buffers(world * len(message), device)
        self._watch.start(lambda: _all_gather(messages, message, self.group))
        if device.type == "cuda":
            on_host.copy_(messages, non_blocking=True)
            self._watch.wait_for(device)  # the one synchronisation
        return expert_parallel.counts_of(on_host.view(world, -1).tolist(), header, self.rank)

    def _buffers(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """What the counts of all ranks come to on the device, and on the host, where they are read before
        the next ones come: kept, as page-locked memory takes long to get."""
        if (size, device) not in self._gathered:
            with torch.inference_mode(False):
                messages = torch.empty(size, dtype=torch.int32, device=device)
                on_host = messages
                if device.type == "cuda":
                    on_host = torch.empty(size, dtype=torch.int32, pin_memory=True)
            self._gathered[size, device] = messages, on_host
        return self._gathered[size, device]

    def agree(self, header: dict[str, int], like: Any) -> None:
        """Compare a header once, as `fp8moe.expert_parallel.Bounded.agree`.

        Parameters
        ----------
        header : dict of str to int
            What must be the same on all ranks.
        like : array
            Any on the device.

        Returns
        -------
        None
            At once, for a header that was compared before; else it **synchronises**.

        Raises
        ------
        ValueError
            On all ranks, for headers that differ.
        RuntimeError
            For a new header while a CUDA graph is captured; `RankLost`.
        """
        kind = tuple(header.values())
        if kind in self._agreed:
            return
        known = _tensor(like)
        if known.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "capacity: got the first dispatch of its kind inside of a CUDA graph; wanted one before, in "
                "which the ranks compare theirs; run a forward before the capture"
            )
        self.counts((known.new_zeros(self.world_size, dtype=torch.int32),), header)
        if self._overflow is None:  # here, and not in a graph's own memory
            with torch.inference_mode(False):
                self._overflow = torch.zeros(2, dtype=torch.int64, device=known.device)
        self._agreed.add(kind)

    def record_overflow(self, rows: Any, entries: Any) -> None:
        """Add to what `overflow` tells, as `fp8moe.expert_parallel.Bounded.record_overflow`.

        Parameters
        ----------
        rows : array, int32, [1]
            Rows that were not sent.
        entries : array, int32, [1]
            Entries that had no room.

        Returns
        -------
        None
            Nothing waits.
        """
        assert self._overflow is not None
        self._overflow += torch.cat((_tensor(rows), _tensor(entries)))

    def overflow(self, *, reset: bool = False) -> Tensor:
        """What a capacity left out of all forwards since the last ``reset``, replayed and repeated ones too.

        Parameters
        ----------
        reset : bool
            Whether to count from 0 on after this.

        Returns
        -------
        Tensor, int64, [2]
            On the device: rows that this rank did not send, and entries that its own experts had no room for.
            Nothing waits until it is read.

        Raises
        ------
        RuntimeError
            Where no forward with a capacity has run.
        """
        if self._overflow is None:
            raise RuntimeError("overflow: got no forward with a capacity before; wanted one")
        counted = self._overflow.clone()
        if reset:
            self._overflow.zero_()
        return counted

    def exchange(self, rows: Any, counts: Counts, size: int | None = None) -> Pending:
        """Move rows to their ranks, as `fp8moe.expert_parallel.Transport.exchange`.

        Parameters
        ----------
        rows : Tensor, or with gloo ndarray, [N, columns]
            The first of them, rank by rank.
        counts : Counts
            ``counts[a][b]`` rows from a to b.
        size : int or None
            Rows of the result; None: as many as arrive.

        Returns
        -------
        Pending
            Of what arrives, of the same kind and dtype.

        Raises
        ------
        RuntimeError
            `RankLost`.
        """
        given, sent, received = _tensor(rows), counts[self.rank], [row[self.rank] for row in counts]
        arriving = given.new_empty((sum(received) if size is None else size, *given.shape[1:]))
        width = given.stride(0) * given.itemsize if given.numel() else arriving.stride(0) * arriving.itemsize
        splits = ([width * n for n in received], [width * n for n in sent])
        outgoing, into = _as_bytes(given)[: sum(splits[1])], _as_bytes(arriving)[: sum(splits[0])]
        work = self._watch.start(
            lambda: dist.all_to_all_single(into, outgoing, *splits, self.group, async_op=True)
        )

        def finish(kept: Tensor = outgoing) -> Any:  # its memory is read until then
            self._watch.guard(work.wait)
            return arriving.numpy().view(rows.dtype) if isinstance(rows, np.ndarray) else arriving

        return Pending(finish)


def dispatch(
    x: Tensor, topk_ids: Tensor, topk_probs: Tensor, num_experts: int, comm: Any
) -> Dispatched | DispatchedRows:
    """`fp8moe.expert_parallel.dispatch` of an array, with gradients for x and topk_probs."""
    rows, probs, rest = _Dispatch.apply(x, topk_probs, topk_ids, num_experts, comm)
    if isinstance(rest, DispatchedRows):
        return replace(rest, x=rows, probs=probs)
    return replace(rest, x=rows, topk_probs=probs)


def combine(y: Tensor, route: Any, comm: Any) -> Tensor:
    """`fp8moe.expert_parallel.combine`, with a gradient for y."""
    return _Combine.apply(y, route, comm)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probs, ids, num_experts, comm):  # type: ignore[no-untyped-def]
        arrived = expert_parallel.dispatch(x.contiguous(), ids, probs.contiguous(), num_experts, comm)
        ctx.route, ctx.comm = arrived.route, comm
        probs = arrived.probs if isinstance(arrived, DispatchedRows) else arrived.topk_probs
        return arrived.x, probs, arrived

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx, dprobs, _):  # type: ignore[no-untyped-def]
        grads = dx.contiguous(), dprobs.contiguous()
        return *expert_parallel.dispatch_backward(*grads, ctx.route, ctx.comm), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, route, comm):  # type: ignore[no-untyped-def]
        ctx.route, ctx.comm = route, comm
        return expert_parallel.combine(y.contiguous(), route, comm)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return expert_parallel.combine_backward(dy.contiguous(), ctx.route, ctx.comm), None, None


def _as_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def _tensor(x: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x.detach()
    if not isinstance(x, np.ndarray):
        raise TypeError(f"rows: got {type(x).__module__}.{type(x).__qualname__}; wanted torch tensors")
    # torch knows no ml_dtypes: the bytes will do
    return torch.from_numpy(x if x.dtype.kind in "iuf" and x.dtype.isbuiltin == 1 else x.view(np.uint8))
