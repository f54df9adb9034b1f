"""Expert parallelism: rows are sent to the ranks that hold their experts, and sums are sent back.

Each of W ranks holds E / W consecutive experts. A token is sent once to every rank that has one of its
experts, with all its expert ids and probabilities appended to the message; there `fp8moe.plan_topk` sees
local ids, and -1 for other ranks' experts. Each rank sums its own experts' rows of a token, and the token's
rank sums over ranks. So for k experts on W ranks a token costs at most min(k, W) rows in each direction, and
FP8 rows with their scales cost half of bfloat16's (the FP8-Flow-MoE paper, arXiv 2511.02302: quantise before
dispatch).

With a `Capacity` the host never reads row counts: each rank sends every rank the same number of rows, padded
with zeros whose ids belong to no expert.

A `Transport` moves the bytes: `fp8moe.torch.ProcessGroup` (NCCL, gloo) or `fp8moe.cupy.Communicator`. If
ranks can write to each other's memory it is a `PeerMemory`: `fp8moe.torch.SymmetricMemory`. A library with
its own dispatch and combine is an `Engine`: `fp8moe.torch.DeepEPEngine`. JAX has its own collectives:
`fp8moe.jax.moe_experts` with ``axis_name``.
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
