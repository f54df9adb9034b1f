"""Expert parallelism by DeepEP V2, where it is installed.

    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8)
    comm = fp8moe.adapters.deep_ep.Engine(buffer)
    y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow", comm=comm)

``ElasticBuffer`` moves rows with their scales and probabilities and puts them where the experts' products
want them (its expanded layout, each expert's rows padded with zeros), so nothing is permuted after it: this
is a whole `fp8moe.expert_parallel.Engine`, not a transport of bytes. Written against the calls of DeepEP at
dd758ca (after v1.2.1), and tested with a stand-in that has their signatures. V1's ``Buffer`` is refused.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

import fp8moe
from fp8moe import QuantTensor
from fp8moe.expert_parallel import DispatchedRows
from fp8moe.formats import FLOAT8_DTYPES

__all__ = ["DeepEPRoute", "Engine"]

ALIGN_SIZE = 128  # what the FP8 products want; the others take it


@dataclass(frozen=True)
class DeepEPRoute:
    """Where the rows of a dispatch went.

    Attributes
    ----------
    handle : object
        DeepEP's.
    num_tokens : int
        How many tokens it came from.
    """

    handle: Any
    num_tokens: int


class Engine:
    """A `fp8moe.expert_parallel.Engine` by DeepEP V2's ``ElasticBuffer``.

    Rows travel in bfloat16 or, by 1x128 blocks, in e4m3; sums come back in bfloat16, which is all that DeepEP
    sums. Its host learns the counts of rows once a forward; the backward reuses its handle and waits for
    nothing.

    Parameters
    ----------
    buffer : deep_ep.ElasticBuffer
        With allow_multiple_reduction=True.

    Raises
    ------
    TypeError
        For a buffer of another kind, as V1's.
    ValueError
        For one that cannot bring the probabilities' gradients back.

    Examples
    --------
    >>> from fp8moe.adapters import deep_ep
    >>> deep_ep.Engine("V1's Buffer")
    Traceback (most recent call last):
    TypeError: buffer: got str; wanted DeepEP V2's deep_ep.ElasticBuffer
    """

    def __init__(self, buffer: Any):
        if not hasattr(buffer, "allow_multiple_reduction"):
            raise TypeError(f"buffer: got {type(buffer).__name__}; wanted DeepEP V2's deep_ep.ElasticBuffer")
        if not buffer.allow_multiple_reduction:
            raise ValueError(
                "buffer: got one with allow_multiple_reduction=False, which brings no gradients of expanded "
                "rows' probabilities back; wanted True"
            )
        self._buffer, self.group = buffer, buffer.group
        self.rank, self.world_size = buffer.rank_idx, buffer.num_ranks

    def dispatch(
        self, x: Any, topk_ids: Any, topk_probs: Any, num_experts: int, fmt: str | None
    ) -> DispatchedRows:
        """Tokens to the ranks of their experts.

        Parameters
        ----------
        x : Tensor or QuantTensor, [T, H]
            bfloat16, or row-wise e4m3 codes of block (1, 128).
        topk_ids : Tensor, integer, [T, k]
            Of all ranks' experts, below 0 or E and more for none.
        topk_probs : Tensor, floating point, [T, k]
            Factors of the experts' results.
        num_experts : int
            E, of all ranks.
        fmt : "e4m3" or None
            In what an array is quantised before it travels.

        Returns
        -------
        DispatchedRows
            This rank's rows, expert by expert, each expert's padded to a multiple of 128. The host waits for
            their counts.

        Raises
        ------
        ValueError
            For another format.
        """
        given, like = _given(x, fmt)
        kind = getattr(sys.modules.get("deep_ep"), "topk_idx_t", torch.int64)
        there = (topk_ids >= 0) & (topk_ids < num_experts)
        received, _, probs, handle, _ = self._buffer.dispatch(
            given,
            topk_idx=torch.where(there, topk_ids, -1).to(kind),
            topk_weights=topk_probs.float(),
            num_experts=num_experts,
            expert_alignment=ALIGN_SIZE,
            do_expand=True,
            do_zero_padding=True,
        )
        counts = handle.num_unaligned_recv_tokens_per_expert
        route = DeepEPRoute(handle, len(topk_ids))
        return DispatchedRows(_taken(received, like), counts, probs, route, ALIGN_SIZE)

    def combine(self, y: Any, route: DeepEPRoute, fmt: str | None) -> Any:
        """Sums of the experts' results, back at their tokens' ranks.

        Parameters
        ----------
        y : Tensor, bfloat16, [N, H]
            Results of the rows that were dispatched.
        route : DeepEPRoute
            Of the dispatch.
        fmt : None
            DeepEP combines bfloat16 only.

        Returns
        -------
        Tensor, bfloat16, [T, H]
            A sum for each token.

        Raises
        ------
        ValueError
            For a format.
        """
        if fmt is not None:
            raise ValueError(f"fmt: got {fmt!r}; wanted None: DeepEP combines bfloat16 only")
        return self._buffer.combine(y, route.handle)[0]

    def combine_backward(self, dy: Any, route: DeepEPRoute, fmt: str | None) -> Any:
        """The gradient of `combine`: each token's to its rows.

        Parameters
        ----------
        dy : Tensor or QuantTensor, [T, H]
            The gradient of the sums.
        route : DeepEPRoute
            Of the dispatch.
        fmt : "e4m3" or None
            As for `dispatch`.

        Returns
        -------
        Tensor or QuantTensor, [N, H]
            In the rows' order.

        Raises
        ------
        ValueError
            For another format.
        """
        given, like = _given(dy, fmt)
        options = {"handle": route.handle, "do_expand": True, "do_zero_padding": True}
        return _taken(self._buffer.dispatch(given, **options)[0], like)

    def dispatch_backward(self, dx: Any, dprobs: Any, route: DeepEPRoute) -> tuple[Any, Any]:
        """The gradient of `dispatch`: sums of the rows', back at their tokens' ranks.

        Parameters
        ----------
        dx : Tensor, bfloat16, [N, H]
            The gradient of the rows.
        dprobs : Tensor, floating point, [N]
            The gradient of their probabilities.
        route : DeepEPRoute
            Of the dispatch.

        Returns
        -------
        dx : Tensor, bfloat16, [T, H]
            Of the tokens.
        dprobs : Tensor, float32, [T, k]
            Zero where an id is no expert.
        """
        sums, probs, _ = self._buffer.combine(dx, route.handle, topk_weights=dprobs.float())
        # of an id that is no expert DeepEP promises nothing
        return sums, torch.where(route.handle.topk_idx >= 0, probs, 0)


def _given(x: Any, fmt: str | None) -> tuple[Any, QuantTensor | None]:
    """What DeepEP takes: an array, or codes in torch's float8 with their scales [T, H / 128]."""
    q = x if isinstance(x, QuantTensor) else None if fmt is None else fp8moe.quantize(x, fmt=fmt)
    if q is None:
        return x, None
    if q.fmt != "e4m3":
        raise ValueError(f"fmt: got {q.fmt!r}; wanted 'e4m3', the format that DeepEP dispatches")
    return (q.data.view(getattr(torch, FLOAT8_DTYPES[q.fmt].name)), q.scales), q


def _taken(received: Any, like: QuantTensor | None) -> Any:
    if like is None:
        return received
    codes, scales = received
    return QuantTensor(codes.view(torch.uint8), scales.contiguous(), like.fmt, like.block)
