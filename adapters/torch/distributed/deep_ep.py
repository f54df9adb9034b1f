"""Expert parallelism by DeepEP V2, if it is installed.

    buffer = fp8moe.torch.ElasticBuffer(group, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8)
    comm = fp8moe.torch.DeepEPEngine(buffer)
    y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow", comm=comm)

``ElasticBuffer`` sends rows with their scales and probabilities and writes them in the order of the experts'
products (its expanded layout, each expert's rows padded with zeros), so no permutation follows. The class
below is therefore a `fp8moe.expert_parallel.Engine`, not a transport of bytes. It is written against the API
of DeepEP at dd758ca (after v1.2.1) and tested with a stub that has the same signatures. V1's ``Buffer``
raises a TypeError.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from fp8moe.adapters import needs

with needs("torch"):
    import torch

import fp8moe
from fp8moe import QuantTensor
from fp8moe.expert_parallel import DispatchedRows
from fp8moe.formats import FLOAT8_DTYPES

__all__ = ["DeepEPEngine", "DeepEPRoute"]

ALIGN_SIZE = 128  # required by the FP8 products, valid for the others


@dataclass(frozen=True)
class DeepEPRoute:
    """Routing of a dispatch, as combine and the backward need it.

    Attributes
    ----------
    handle : object
        DeepEP's handle.
    num_tokens : int
        Number of tokens before the dispatch.
    """

    handle: Any
    num_tokens: int


class DeepEPEngine:
    """A `fp8moe.expert_parallel.Engine` that uses DeepEP V2's ``ElasticBuffer``.

    Rows are sent in bfloat16 or, with 1x128 blocks, in e4m3. Sums are returned in bfloat16, the only dtype
    that DeepEP sums. The host reads the row counts once per forward; the backward reuses the handle and does
    not synchronise.

    Parameters
    ----------
    buffer : fp8moe.torch.ElasticBuffer
        Created with allow_multiple_reduction=True.

    Raises
    ------
    TypeError
        For another type of buffer, such as V1's.
    ValueError
        For a buffer that cannot return the gradients of the probabilities.

    Examples
    --------
    >>> import fp8moe.torch
    >>> fp8moe.torch.DeepEPEngine("V1's Buffer")
    Traceback (most recent call last):
    TypeError: buffer: got str; wanted DeepEP V2's fp8moe.torch.ElasticBuffer
    """

    def __init__(self, buffer: Any):
        if not hasattr(buffer, "allow_multiple_reduction"):
            raise TypeError(
                f"buffer: got {type(buffer).__name__}; wanted DeepEP V2's fp8moe.torch.ElasticBuffer"
            )
        if not buffer.allow_multiple_reduction:
            raise ValueError(
                "buffer: got one with allow_multiple_reduction=False, which cannot return the gradients of "
                "expanded rows' probabilities; wanted True"
            )
        self._buffer = buffer

    @property
    def group(self) -> Any:
        """The buffer's process group."""
        return self._buffer.group

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._buffer.rank_idx  # type: ignore[no-any-return]

    @property
    def world_size(self) -> int:
        """W, the number of ranks."""
        return self._buffer.num_ranks  # type: ignore[no-any-return]

    def dispatch(
        self, x: Any, topk_ids: Any, topk_probs: Any, num_experts: int, fmt: str | None
    ) -> DispatchedRows:
        """Send tokens to the ranks of their experts.

        Parameters
        ----------
        x : Tensor or QuantTensor, [T, H]
            bfloat16, or row-wise e4m3 codes of block (1, 128).
        topk_ids : Tensor, integer, [T, k]
            Global expert ids; ids below 0 or from E on mean no expert.
        topk_probs : Tensor, floating point, [T, k]
            Factors of the experts' outputs.
        num_experts : int
            E, over all ranks.
        fmt : "e4m3" or None
            Format to which an array is quantised before it is sent.

        Returns
        -------
        DispatchedRows
            This rank's rows in expert order, each expert's rows padded to a multiple of 128. The host waits
            for their counts.

        Raises
        ------
        ValueError
            For another format.
        """
        message, template = _dispatch_argument(x, fmt)
        id_dtype = getattr(sys.modules.get("deep_ep"), "topk_idx_t", torch.int64)
        valid = (topk_ids >= 0) & (topk_ids < num_experts)
        received, _, probs, handle, _ = self._buffer.dispatch(
            message,
            topk_idx=torch.where(valid, topk_ids, -1).to(id_dtype),
            topk_weights=topk_probs.float(),
            num_experts=num_experts,
            expert_alignment=ALIGN_SIZE,
            do_expand=True,
            do_zero_padding=True,
        )
        counts = handle.num_unaligned_recv_tokens_per_expert
        route = DeepEPRoute(handle, len(topk_ids))
        return DispatchedRows(_received_rows(received, template), counts, probs, route, ALIGN_SIZE)

    def combine(self, y: Any, route: DeepEPRoute, fmt: str | None) -> Any:
        """Return the sums of the experts' outputs to the ranks of their tokens.

        Parameters
        ----------
        y : Tensor, bfloat16, [N, H]
            Outputs for the dispatched rows.
        route : DeepEPRoute
            The route returned by the dispatch.
        fmt : None
            DeepEP combines bfloat16 only.

        Returns
        -------
        Tensor, bfloat16, [T, H]
            One sum per token.

        Raises
        ------
        ValueError
            If a format is given.
        """
        if fmt is not None:
            raise ValueError(f"fmt: got {fmt!r}; wanted None: DeepEP combines bfloat16 only")
        return self._buffer.combine(y, route.handle)[0]

    def combine_backward(self, dy: Any, route: DeepEPRoute, fmt: str | None) -> Any:
        """Compute the gradient of `combine`: each token's gradient is sent to its rows.

        Parameters
        ----------
        dy : Tensor or QuantTensor, [T, H]
            Gradient of the sums.
        route : DeepEPRoute
            The route returned by the dispatch.
        fmt : "e4m3" or None
            As in `dispatch`.

        Returns
        -------
        Tensor or QuantTensor, [N, H]
            Gradients in the order of the rows.

        Raises
        ------
        ValueError
            For another format.
        """
        message, template = _dispatch_argument(dy, fmt)
        options = {"handle": route.handle, "do_expand": True, "do_zero_padding": True}
        return _received_rows(self._buffer.dispatch(message, **options)[0], template)

    def dispatch_backward(self, dx: Any, dprobs: Any, route: DeepEPRoute) -> tuple[Any, Any]:
        """Compute the gradient of `dispatch`: the rows' gradients, summed on the ranks of their tokens.

        Parameters
        ----------
        dx : Tensor, bfloat16, [N, H]
            Gradient of the rows.
        dprobs : Tensor, floating point, [N]
            Gradient of the rows' probabilities.
        route : DeepEPRoute
            The route returned by the dispatch.

        Returns
        -------
        dx : Tensor, bfloat16, [T, H]
            Gradient of the tokens.
        dprobs : Tensor, float32, [T, k]
            Gradient of the probabilities, zero for ids of no expert.
        """
        sums, probs, _ = self._buffer.combine(dx, route.handle, topk_weights=dprobs.float())
        # DeepEP leaves the values of ids of no expert undefined
        return sums, torch.where(route.handle.topk_idx >= 0, probs, 0)


def _dispatch_argument(x: Any, fmt: str | None) -> tuple[Any, QuantTensor | None]:
    """DeepEP's input: an array, or codes in torch's float8 with their scales [T, H / 128]; and the quantised
    tensor or None."""
    q = x if isinstance(x, QuantTensor) else None if fmt is None else fp8moe.quantize(x, fmt=fmt)
    if q is None:
        return x, None
    if q.fmt != "e4m3":
        raise ValueError(f"fmt: got {q.fmt!r}; wanted 'e4m3', the format that DeepEP dispatches")
    return (q.data.view(getattr(torch, FLOAT8_DTYPES[q.fmt].name)), q.scales), q


def _received_rows(received: Any, template: QuantTensor | None) -> Any:
    if template is None:
        return received
    codes, scales = received
    return QuantTensor(codes.view(torch.uint8), scales.contiguous(), template.fmt, template.block)
