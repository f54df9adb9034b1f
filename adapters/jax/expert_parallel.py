"""Expert parallelism in JAX, inside ``jax.shard_map``, with XLA's own collectives.

The messages are those of `fp8moe.expert_parallel`: a token is sent once to every device that has one of its
experts, with "fp8_flow" in FP8 with its scales, with ids and probabilities in the same message, and the sums
are sent back. Shapes are static: every device sends every other device a block of ``capacity`` rows, and the
host reads no counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fp8moe.adapters.jax import ops as jax_ops
from fp8moe.expert_parallel.blocks import Blocks, device_blocks, local_ids
from fp8moe.expert_parallel.messages import checked_ids
from fp8moe.layer import moe
from fp8moe.layer.options import LayerOptions
from fp8moe.layer.saved import Saved
from fp8moe.ops.plan import static_bound
from fp8moe.records import MoEGrads, QuantTensor
from fp8moe.runtime import checks

_experts_forward = jax_ops.traceable(moe.experts_forward)
_experts_backward = jax_ops.traceable(moe.experts_backward)
_checked_ids = jax_ops.traceable(checked_ids)


def forward(
    x: Any,
    w13: Any,
    w2: Any,
    ids: Any,
    probs: Any,
    options: LayerOptions,
    gradients: tuple[str, ...],
    axis: str,
    capacity: int,
    num_out_tokens: int | None,
) -> tuple[Any, Saved, Blocks]:
    """`fp8moe.moe_forward` with the experts of all devices of a mesh axis. The last result says where each
    token was sent. capacity, num_out_tokens: as in `fp8moe.jax.moe_experts`."""
    devices, experts = jax.lax.axis_size(axis), moe.experts_of(w13)
    if checks.reads_values():  # while this is traced; `local_ids` would make them negative without a word
        ids = _checked_ids(ids, experts * devices)
    blocks = device_blocks(jnp, ids, experts, devices, capacity)
    # int64 ids of no expert may not fit int32
    sent = local_ids(jnp, ids, experts * devices, 0).astype(jnp.int32)
    fmt = options.precision.format_between_ranks
    *rows, local, moved = dispatch([*_parts(x, fmt), sent, probs], blocks, axis)
    local = local_ids(jnp, local, experts, jax.lax.axis_index(axis))
    if num_out_tokens is None:
        entries = devices * capacity * min(ids.shape[1], experts)
        num_out_tokens = static_bound(entries, experts, options.precision.align_size)
    arrays = _rows_of(rows, fmt), w13, w2, local, moved
    y, saved = _experts_forward(*arrays, options, gradients, num_out_tokens)
    return combine(y, blocks, axis), saved, blocks


def backward(saved: Saved, blocks: Blocks, dy: Any, axis: str, **options: Any) -> MoEGrads:
    """`fp8moe.moe_backward`, with its options."""
    fmt = saved.options.precision.format_between_ranks
    rows = _rows_of(dispatch(_parts(dy, fmt), blocks, axis), fmt)
    grads = _experts_backward(saved, rows, **options)
    return replace(grads, dx=combine(grads.dx, blocks, axis), dprobs=combine(grads.dprobs, blocks, axis))


def _parts(x: Any, fmt: str | None) -> list[Any]:
    """x as it is sent: quantised for "fp8_flow", with the recipe's only cast of it."""
    if fmt is None:
        return [x]
    q = jax_ops.quantize(x, fmt=fmt)
    return [q.data, q.scales]


def _rows_of(parts: Sequence[Any], fmt: str | None) -> Any:
    return parts[0] if fmt is None else QuantTensor(parts[0], parts[1], fmt)


def dispatch(parts: Sequence[Any], blocks: Blocks, axis_name: str) -> list[Any]:
    """Sends rows of every array in parts [T, ...] to the devices, in one exchange. The results are
    [W * C, ...], block by block; rows without a token are zeros, or -1 for integers."""
    rows = [
        jnp.asarray(part).at[blocks.tokens].get(mode="fill", fill_value=-1 if part.dtype == jnp.int32 else 0)
        for part in parts
    ]
    buffers = [_as_bytes(rows_of_part) for rows_of_part in rows]
    received = jax.lax.all_to_all(jnp.concatenate(buffers, axis=-1), axis_name, 0, 0)
    ends = list(itertools.accumulate(buffer.shape[-1] for buffer in buffers))[:-1]
    arrays = [
        _from_bytes(buffer, rows_of_part.dtype)
        for buffer, rows_of_part in zip(jnp.split(received, ends, axis=-1), rows, strict=True)
    ]
    return [*map(jax_ops.as_matrix, arrays)]


def combine(rows: Any, blocks: Blocks, axis_name: str) -> Any:
    """Sends rows back and sums those of each token in float32 (float64 for float64): [W * C, H] -> [T, H]."""
    devices, capacity = blocks.tokens.shape
    back = jax.lax.all_to_all(rows.reshape(devices, capacity, rows.shape[1]), axis_name, 0, 0)
    sum_dtype = jnp.float64 if rows.dtype == jnp.float64 else jnp.float32
    total = jnp.zeros((len(blocks.places), rows.shape[-1]), sum_dtype)
    for device in range(devices):
        part = jnp.take(back[device], blocks.places[:, device], axis=0, mode="fill", fill_value=0)
        total += part.astype(sum_dtype)
    return total.astype(rows.dtype)


def _as_bytes(x: Any) -> Any:
    if x.dtype == jnp.uint8:
        return x
    width = x.shape[-1] * x.dtype.itemsize
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], width)


def _from_bytes(x: Any, dtype: Any) -> Any:
    if dtype == jnp.uint8:
        return x
    width = x.shape[-1] // dtype.itemsize
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], width, dtype.itemsize), dtype)
