"""Expert parallelism by DeepEP, where it is installed: its FP8 tuple in, a `QuantTensor` out.

    comm = fp8moe.adapters.deep_ep.Engine(deep_ep.Buffer(group, nvlink_bytes), group.rank(), group.size())
    y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow", comm=comm)

DeepEP's normal kernels (``Buffer.get_dispatch_layout``, ``dispatch``, ``combine``) move rows with their ids
and probabilities themselves, so this is a whole `fp8moe.expert_parallel.Engine`, not a transport of bytes.
Written against DeepEP's documented calls and tested with a stand-in of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import fp8moe
from fp8moe import QuantTensor
from fp8moe.expert_parallel import Dispatched
from fp8moe.formats import FLOAT8_DTYPES


@dataclass(frozen=True)
class DeepEPRoute:
    """DeepEP's handle of a dispatch, and how many tokens it came from."""

    handle: Any
    num_tokens: int


class Engine:
    """What `fp8moe.expert_parallel` does, by a DeepEP buffer. Rows travel in bfloat16 or, by 1x128 blocks, in
    FP8; sums come back in bfloat16, which is all that DeepEP sums."""

    def __init__(self, buffer: Any, rank: int, world_size: int):
        self._buffer, self.rank, self.world_size = buffer, rank, world_size
        self.group = getattr(buffer, "group", None)  # the torch.distributed.ProcessGroup

    def dispatch(
        self, x: Any, topk_ids: Any, topk_probs: Any, num_experts: int, fmt: str | None
    ) -> Dispatched:
        ids = topk_ids.to(torch.int64)
        per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(ids, num_experts)
        given, like = _given(x, fmt)
        received, local, probs, counts, handle, _ = self._buffer.dispatch(
            given,
            topk_idx=ids,
            topk_weights=topk_probs.float(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        route = DeepEPRoute(handle, len(ids))
        return Dispatched(_taken(received, like), local.to(torch.int32), probs, route, sum(counts))

    def combine(self, y: Any, route: DeepEPRoute, fmt: str | None) -> Any:
        if fmt is not None:
            raise ValueError(f"fmt: got {fmt!r}; wanted None: DeepEP combines bfloat16 only")
        return self._buffer.combine(y, route.handle)[0]

    def combine_backward(self, dy: Any, route: DeepEPRoute, fmt: str | None) -> Any:
        given, like = _given(dy, fmt)
        return _taken(self._buffer.dispatch(given, handle=route.handle)[0], like)

    def dispatch_backward(self, dx: Any, dprobs: Any, route: DeepEPRoute) -> tuple[Any, Any]:
        found, probs, _ = self._buffer.combine(dx, route.handle, topk_weights=dprobs.float())
        return found, probs


def _given(x: Any, fmt: str | None) -> tuple[Any, QuantTensor | None]:
    """What DeepEP takes: an array, or codes in torch's float8 with their scales [T, H / 128]."""
    q = x if isinstance(x, QuantTensor) else None if fmt is None else fp8moe.quantize(x, fmt=fmt)
    if q is None:
        return x, None
    return (q.data.view(getattr(torch, FLOAT8_DTYPES[q.fmt].name)), q.scales), q


def _taken(received: Any, like: QuantTensor | None) -> Any:
    if like is None:
        return received
    codes, scales = received
    return QuantTensor(codes.view(torch.uint8), scales.contiguous(), like.fmt, like.block)
