"""Expert parallelism over `torch.distributed`: NCCL on GPUs, gloo on the CPU.

comm = fp8moe.torch.ProcessGroup(group)      # None: the default group
y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow", comm=comm)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from fp8moe.adapters import needs

with needs("torch"):
    import torch
import torch.distributed as dist
from torch import Tensor

from fp8moe import expert_parallel
from fp8moe.adapters.torch.arguments import handle_of
from fp8moe.adapters.torch.distributed.lost_ranks import LostRankWatch, RankLost
from fp8moe.expert_parallel import Capacity, Counts, Dispatched, DispatchedRows, Pending
from fp8moe.expert_parallel.exchange import prepare_dispatch
from fp8moe.expert_parallel.protocols import Settings
from fp8moe.runtime import checks

__all__ = ["ProcessGroup", "RankLost"]

# torch 2.13 renamed it and warns about the old name
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroup:
    """A `fp8moe.expert_parallel.Transport` over a process group, for torch tensors and (gloo) NumPy arrays.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or None
        Process group; None: the default group.
    capacity : Capacity or None
        With a `fp8moe.expert_parallel.Capacity` every forward and backward sends a fixed number of rows and
        does not synchronise with the host. After a first forward of the same kind outside the capture, it can
        be captured in a CUDA graph. `overflow` returns how many rows were dropped; check it regularly.
    overlap_chunks : int
        Number of chunks into which `fp8moe.moe_forward` and its backward divide the tokens, so that the
        exchange of one chunk overlaps the products of another.

    Raises
    ------
    TypeError, ValueError
        For an invalid capacity or number of chunks, and for a group without this rank.
    RankLost
        In an exchange, if a rank exits or does not take part within the group's timeout; the message names
        the rank. With NCCL this is detected while the host waits in ``counts``, after nine tenths of the
        timeout, before torch's watchdog aborts the process. The group cannot be used afterwards.

    Notes
    -----
    An exchange is one `all_to_all_single` of bytes. NCCL runs it on a separate stream; ``Pending.wait`` makes
    the current stream wait for it, not the host. With a capacity, only the group's own timeout detects a lost
    rank.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> from fp8moe.torch import ProcessGroup
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> comm = ProcessGroup()
    >>> x, w13, w2 = torch.ones(1, 1), torch.tensor([[[100.0], [2.0]]]), torch.tensor([[[1.0]]])
    >>> ids, probs = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 0.5)
    >>> fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="bf16", comm=comm)[0].item()
    100.0
    >>> dist.destroy_process_group()
    """

    def __init__(self, group: Any = None, capacity: Capacity | None = None, overlap_chunks: int = 1):
        self.capacity, self.overlap_chunks = capacity, overlap_chunks
        if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns on the other ranks
            raise of_other_ranks("group")
        if not (group is None or isinstance(group, dist.ProcessGroup)):
            raise TypeError(
                f"group: got {type(group).__name__}; wanted a torch.distributed.ProcessGroup, such as "
                "mesh.get_group() of a DeviceMesh"
            )
        self._group: Any = dist.group.WORLD if group is None else group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._handle = handle_of(self)  # compiled code finds the group by it
        self._watch = LostRankWatch(self.group)
        self._headers: dict[Any, Tensor] = {}  # one per kind of layer
        self._gathered: dict[Any, tuple[Tensor, Tensor]] = {}  # counts of all ranks: `_buffers`
        self._agreed: set[Any] = set()  # headers known to be equal on all ranks
        self._overflow: Tensor | None = None  # dropped rows and entries of all forwards

    @property
    def capacity(self) -> Capacity | None:
        """As in the constructor; it may be set between forwards, on all ranks."""
        return self._capacity

    @capacity.setter
    def capacity(self, value: Capacity | None) -> None:
        if value is not None:
            checks.options("capacity", value, Capacity)
        self._capacity = value

    @property
    def overlap_chunks(self) -> int:
        """As in the constructor; it may be set between forwards, on all ranks."""
        return self._overlap_chunks

    @overlap_chunks.setter
    def overlap_chunks(self, value: int) -> None:
        self._overlap_chunks = checks.integer("overlap_chunks", value, 1)

    @property
    def group(self) -> Any:
        """The `torch.distributed.ProcessGroup`."""
        return self._group

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """W, the number of ranks."""
        return self._world_size

    @property
    def handle(self) -> Tensor:
        """A number by which compiled code finds this object."""
        return self._handle

    def __deepcopy__(self, memo: Any) -> ProcessGroup:
        return self  # copies of a layer communicate with the same ranks

    def counts(self, counts: tuple[Any, ...], header: dict[str, int]) -> list[Counts]:
        """Exchange row counts between all ranks, as `fp8moe.expert_parallel.Transport.counts`.

        Parameters
        ----------
        counts : tuple of arrays, int32, [W]
            Number of rows this rank sends to each rank.
        header : dict of str to int
            Values that must be equal on all ranks.

        Returns
        -------
        list of Counts
            For each entry of ``counts``, the numbers from every rank to every rank, on the host. On CUDA this
            **synchronises once**.

        Raises
        ------
        ValueError
            On all ranks, if the headers differ.
        RuntimeError
            `RankLost`.
        """
        tensors = [_tensor(c) for c in counts]
        values, device, world = tuple(header.values()), tensors[0].device, self.world_size
        if (values, device) not in self._headers:  # copying it to the device synchronises
            self._headers[values, device] = torch.tensor(values, dtype=torch.int32, device=device)
        message = torch.cat([*tensors, self._headers[values, device]])
        messages, on_host = self._buffers(world * len(message), device)
        self._watch.start(lambda: _all_gather(messages, message, self.group), device)
        if device.type == "cuda":
            on_host.copy_(messages, non_blocking=True)
            self._watch.wait_for(device)  # the only synchronisation
        return expert_parallel.counts_of(on_host.view(world, -1).tolist(), header, self.rank)

    def _buffers(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Buffers for the counts of all ranks, on the device and on the host. They are reused, because
        allocating page-locked memory is slow; the host reads them before the next exchange."""
        if (size, device) not in self._gathered:
            with torch.inference_mode(False):
                messages = torch.empty(size, dtype=torch.int32, device=device)
                on_host = messages
                if device.type == "cuda":
                    on_host = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=True)
            self._gathered[size, device] = messages, on_host
        return self._gathered[size, device]

    def agree(self, header: dict[str, int], like: Any) -> None:
        """Compare a header between ranks once, as `fp8moe.expert_parallel.Bounded.agree`.

        Parameters
        ----------
        header : dict of str to int
            Values that must be equal on all ranks.
        like : array
            Any array on the device.

        Returns
        -------
        None
            Returns immediately if the header was compared before; otherwise it **synchronises**.

        Raises
        ------
        ValueError
            On all ranks, if the headers differ.
        RuntimeError
            For a new header during CUDA graph capture; `RankLost`.
        """
        kind = tuple(header.values())
        if kind in self._agreed:
            return
        tensor = _tensor(like)
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "capacity: got the first dispatch of its kind inside a CUDA graph; wanted an earlier one, in "
                "which the ranks compare their headers; run a forward before the capture"
            )
        zeros = tensor.new_zeros(self.world_size, dtype=torch.int32)
        self.counts((zeros, zeros), header)  # two, as from a rank without a capacity, which is then named
        if self._overflow is None:  # allocated outside of any graph's memory pool
            with torch.inference_mode(False):
                self._overflow = torch.zeros(2, dtype=torch.int64, device=tensor.device)
        self._agreed.add(kind)

    def record_overflow(self, rows: Any, entries: Any) -> None:
        """Add to the counters of `overflow`, as `fp8moe.expert_parallel.Bounded.record_overflow`.

        Parameters
        ----------
        rows : array, int32, [1]
            Number of rows that were not sent.
        entries : array, int32, [1]
            Number of (token, expert) entries that were dropped.

        Returns
        -------
        None
            The call does not synchronise.
        """
        assert self._overflow is not None
        self._overflow += torch.cat((_tensor(rows), _tensor(entries)))

    def overflow(self, *, reset: bool = False) -> Tensor:
        """Return the number of dropped rows and entries since the last ``reset``.

        Parameters
        ----------
        reset : bool
            Whether to reset the counters afterwards.

        Returns
        -------
        Tensor, int64, [2]
            On the device: rows that this rank did not send, and entries that its own experts dropped, of all
            forwards, including replays of CUDA graphs and recomputations. The call does not synchronise.

        Raises
        ------
        RuntimeError
            If no forward with a capacity has run.
        """
        if self._overflow is None:
            raise RuntimeError("overflow: got no forward with a capacity so far; wanted one; run it first")
        counted = self._overflow.clone()
        if reset:
            self._overflow.zero_()
        return counted

    def exchange(self, rows: Any, counts: Counts, size: int | None = None) -> Pending:
        """Send rows to other ranks, as `fp8moe.expert_parallel.Transport.exchange`.

        Parameters
        ----------
        rows : Tensor, or with gloo ndarray, [N, columns]
            Rows to send, grouped by destination rank; the rows after them are not sent.
        counts : Counts
            ``counts[a][b]`` rows from rank a to rank b.
        size : int or None
            Number of rows of the result; None: the number of received rows.

        Returns
        -------
        Pending
            The received rows, of the same type and dtype, grouped by source rank.

        Raises
        ------
        RuntimeError
            `RankLost`.
        """
        tensor, sent, received = _tensor(rows), counts[self.rank], [row[self.rank] for row in counts]
        received_rows = tensor.new_empty((sum(received) if size is None else size, *tensor.shape[1:]))
        # not by the stride of the first dimension, which a contiguous tensor of one row may have any of
        width = tensor.shape[1:].numel() * tensor.itemsize
        splits = ([width * n for n in received], [width * n for n in sent])
        outgoing, incoming = _as_bytes(tensor)[: sum(splits[1])], _as_bytes(received_rows)[: sum(splits[0])]
        work = self._watch.start(
            lambda: dist.all_to_all_single(incoming, outgoing, *splits, self.group, async_op=True),
            tensor.device,
        )

        def finish(kept_alive: Tensor = outgoing) -> Any:  # the exchange reads its memory until then
            self._watch.guard(work.wait, tensor.device)
            return received_rows.numpy().view(rows.dtype) if isinstance(rows, np.ndarray) else received_rows

        return Pending(finish)


def of_other_ranks(name: str) -> ValueError:
    """The error for a group without this rank."""
    return ValueError(
        f"{name}: got the group of other ranks; wanted one with this rank; make layers and transports on the "
        "group's ranks only"
    )


def dispatch(
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    num_experts: int,
    comm: Any,
    gradients: Collection[str],
    settings: Settings,
) -> Dispatched | DispatchedRows:
    """`fp8moe.expert_parallel.dispatch` of an array, with gradients for x and topk_probs. gradients and
    settings: as in `fp8moe.expert_parallel.exchange.prepare_dispatch`."""
    options = {"gradients": gradients, "settings": settings}
    rows, probs, rest = _Dispatch.apply(x, topk_probs, topk_ids, num_experts, comm, options)
    if isinstance(rest, DispatchedRows):
        return replace(rest, x=rows, probs=probs)
    return replace(rest, x=rows, topk_probs=probs)


def combine(y: Tensor, route: Any, comm: Any) -> Tensor:
    """`fp8moe.expert_parallel.combine`, with a gradient for y."""
    return _Combine.apply(y, route, comm)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probs, ids, num_experts, comm, options):  # type: ignore[no-untyped-def]
        given = x.contiguous(), ids, probs.contiguous(), num_experts, comm, None
        dispatched = prepare_dispatch(*given, **options)(False).wait()
        ctx.route, ctx.comm = dispatched.route, comm
        probs = dispatched.probs if isinstance(dispatched, DispatchedRows) else dispatched.topk_probs
        return dispatched.x, probs, dispatched

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx, dprobs, _):  # type: ignore[no-untyped-def]
        grads = dx.contiguous(), dprobs.contiguous()
        return *expert_parallel.dispatch_backward(*grads, ctx.route, ctx.comm), *[None] * 4


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
    # torch has no equivalent of ml_dtypes; sending bytes is sufficient
    return torch.from_numpy(x if x.dtype.kind in "iuf" and x.dtype.isbuiltin == 1 else x.view(np.uint8))
