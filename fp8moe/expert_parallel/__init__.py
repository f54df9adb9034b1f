"""Expert parallelism: rows travel to the ranks that hold their experts, and sums travel back.

Each of W ranks holds E / W experts, in order. A token goes once to every rank that has one of its experts,
with all its expert ids and probabilities behind it in the same message; there `fp8moe.plan_topk` sees rows
with local ids, and the other ids as none. Each rank sums its own experts' rows of a token, and the token's
rank sums over ranks. So for k experts on W ranks a token costs min(k, W) rows each way at most, and FP8 rows
with their scales half of what bfloat16's cost (the FP8-Flow-MoE paper, arXiv 2511.02302: quantise before
dispatch).

Where no host is to be asked how many rows there are (`Capacity`), each rank sends each other the same number,
zeros behind its own, whose ids are of no expert.

How bytes move is a `Transport`: `fp8moe.adapters.torch_distributed` (NCCL, gloo) or `.cupy_nccl`. Where ranks
can write into each other's memory it is `PeerMemory`: `.torch_symmetric_memory`. What moves rows by itself is
an `Engine`: `.deep_ep`. JAX has its own collectives: `.jax_expert_parallel`.
"""

from fp8moe.expert_parallel.exchange import combine, combine_backward, dispatch, dispatch_backward
from fp8moe.expert_parallel.protocols import (
    Bounded,
    Capacity,
    Comm,
    Counts,
    Dispatched,
    DispatchedRows,
    Engine,
    PeerMemory,
    Pending,
    Route,
    Transport,
    counts_of,
    overflow,
)

__all__ = [
    "Bounded",
    "Capacity",
    "Comm",
    "Counts",
    "Dispatched",
    "DispatchedRows",
    "Engine",
    "PeerMemory",
    "Pending",
    "Route",
    "Transport",
    "combine",
    "combine_backward",
    "counts_of",
    "dispatch",
    "dispatch_backward",
    "overflow",
]
