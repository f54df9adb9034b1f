"""Statistics of an expert layer in JAX: values lost by quantisation, expert loads, and ids without an expert.

Functions of the layer's inputs, since a layer has no state in JAX: call them beside `fp8moe.jax.moe_experts`,
eagerly or inside ``jax.jit``, and return what they give with the program's results. They read x twice, have
no gradient, and read nothing back to the host.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fp8moe.adapters import needs

with needs("jax"):
    import jax
import jax.numpy as jnp

from fp8moe.adapters.jax import ops as jax_ops
from fp8moe.expert_parallel.blocks import device_blocks
from fp8moe.formats import FORMATS
from fp8moe.runtime import checks

__all__ = ["LayerStats", "TensorStats", "layer_stats", "tensor_stats"]

FORMAT = "e4m3"  # format of activations and gradients in the FP8 recipes, with blocks of (1, 128)


class TensorStats(NamedTuple):
    """Effects of quantising one array, as in `fp8moe.torch.TensorStats`.

    Attributes
    ----------
    amax : jax.Array, float32, scalar
        Largest magnitude; infinite or NaN if a value is.
    nonfinite : jax.Array, int32, scalar
        Number of infinities and NaN.
    saturated : jax.Array, int32, scalar
        Number of values larger than their code.
    flushed : jax.Array, int32, scalar
        Number of nonzero values with a zero code.
    """

    amax: Any
    nonfinite: Any
    saturated: Any
    flushed: Any


class LayerStats(NamedTuple):
    """Statistics of the inputs of a layer.

    Attributes
    ----------
    rows_per_expert : jax.Array, int32, [E]
        Number of these tokens' rows of each expert.
    overflow : jax.Array, int32, scalar
        Number of rows that the ``capacity`` of `fp8moe.jax.moe_experts` drops.
    invalid_ids : jax.Array, int32, scalar
        Number of ids of num_experts and more, whose rows are dropped although no negative id says so: any is
        an error, such as ids that count from one.
    negative_ids : jax.Array, int32, scalar
        Number of ids below 0, which mean no expert, such as those of padding.
    x : TensorStats
        The tokens in bfloat16, before they are quantised.
    """

    rows_per_expert: Any
    overflow: Any
    invalid_ids: Any
    negative_ids: Any
    x: TensorStats


def tensor_stats(values: Any) -> TensorStats:
    """Count the effects of quantising to e4m3 by (1, 128) blocks with power-of-two scales.

    Parameters
    ----------
    values : jax.Array, bfloat16, float16 or float32, [M, K]
        The values.

    Returns
    -------
    TensorStats
        Scalars on the same device.

    Raises
    ------
    TypeError, ValueError
        As in `fp8moe.quantize`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fp8moe.jax
    >>> int(fp8moe.jax.tensor_stats(jnp.array([[448.0, 1e-6, jnp.inf, 0.0]])).nonfinite)
    1
    """
    jax_ops.require_arrays(values=values)
    values = jax.lax.stop_gradient(jnp.asarray(values))
    q = jax_ops.quantize(values, fmt=FORMAT)
    magnitudes = jnp.abs(values.astype(jnp.float32))
    codes, limits = q.data & 0x7F, jnp.repeat(q.scales * FORMATS[FORMAT].max, 128, axis=1)
    return TensorStats(
        magnitudes.max(initial=0),
        (~jnp.isfinite(values)).sum(),
        (magnitudes > limits[:, : values.shape[1]]).sum(),
        ((codes == 0) & (magnitudes > 0)).sum(),
    )


def layer_stats(
    x: Any, topk_ids: Any, num_experts: int, *, devices: int = 1, capacity: int | None = None
) -> LayerStats:
    """Statistics of what a layer gets: `fp8moe.jax.moe_experts`, with ``axis_name`` that of one device.

    Parameters
    ----------
    x : jax.Array, floating point, [..., H]
        The layer's tokens.
    topk_ids : jax.Array, int32 or int64, [..., k]
        The layer's ids.
    num_experts : int
        E, over all devices.
    devices : int
        Number of devices that share the experts: ``jax.lax.axis_size(axis_name)``.
    capacity : int or None
        The layer's.

    Returns
    -------
    LayerStats
        Arrays on the device.

    Raises
    ------
    TypeError, ValueError
        For arguments of the wrong dtype or inconsistent shapes.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fp8moe.jax
    >>> ids = jnp.array([[1, 2], [3, 4], [4, -1]])  # of four experts, counted from one
    >>> stats = jax.jit(fp8moe.jax.layer_stats, static_argnums=2)(jnp.ones((3, 8)), ids, 4)
    >>> int(stats.invalid_ids), int(stats.negative_ids), stats.rows_per_expert.tolist()
    (2, 1, [0, 1, 1, 1])
    """
    ids, _ = jax_ops.of_tokens(x, topk_ids, topk_ids)
    num_experts = checks.integer("num_experts", num_experts, 1, checks.MAX_EXPERTS)
    devices = checks.integer("devices", devices, 1)
    if num_experts % devices:
        raise ValueError(f"devices: got {devices} for {num_experts} experts; wanted a divisor of them")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"topk_ids: got dtype {ids.dtype}; wanted int32, int64")
    invalid, negative = ids >= num_experts, ids < 0
    rows = jnp.bincount(jnp.where(invalid | negative, num_experts, ids).ravel(), length=num_experts)
    overflow = jnp.zeros((), jnp.int32)
    if capacity is not None:
        blocks = device_blocks(jnp, ids, num_experts // devices, devices, len(ids))  # room for every token
        sent = (blocks.places < len(ids)).sum(axis=0)
        overflow = jnp.maximum(sent - checks.integer("capacity", capacity, 1), 0).sum()
    tokens = jnp.asarray(x).reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(jnp.bfloat16)
    return LayerStats(rows, overflow, invalid.sum(), negative.sum(), tensor_stats(tokens))
