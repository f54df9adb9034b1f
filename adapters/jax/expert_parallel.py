"""Expert parallelism in JAX, inside ``jax.shard_map``, with XLA's own collectives.

The messages are those of `fp8moe.expert_parallel`: a token is sent once to every device that has one of its
experts, with "fp8_flow" in FP8 with its scales, with ids and probabilities in the same message, and the sums
are sent back. Shapes are static: every device sends every other device a block of ``capacity`` rows, and the
host reads no counts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from fp8moe.adapters import needs

with needs("jax"):
    import jax
import jax.numpy as jnp

from fp8moe.activation import SWIGLU, Activation
from fp8moe.adapters.jax import calls as jax_calls
from fp8moe.adapters.jax import ops as jax_ops
from fp8moe.expert_parallel.blocks import Blocks, device_blocks, local_ids
from fp8moe.expert_parallel.messages import checked_ids
from fp8moe.layer import moe, recipes
from fp8moe.ops.grouped_gemm import BACKENDS, check_limit
from fp8moe.ops.plan import static_bound
from fp8moe.records import QuantTensor
from fp8moe.runtime import checks

__all__ = ["moe_experts_over_axis"]

_experts_forward = jax_ops.traceable(moe.experts_forward)
_experts_backward = jax_ops.traceable(moe.experts_backward)
_checked_ids = jax_ops.traceable(checked_ids)


def moe_experts_over_axis(
    x: Any,
    w13: Any,
    w2: Any,
    topk_ids: Any,
    topk_probs: Any,
    *,
    axis_name: str,
    recipe: str,
    recompute: str | None = None,
    capacity: int | None = None,
    num_out_tokens: int | None = None,
    activation: Activation = SWIGLU,
    transposed: bool = False,
    backend: str | None = None,
    num_sms: int | None = None,
) -> Any:
    """Compute a layer's experts, distributed over the devices of a mesh axis, as `fp8moe.jax.moe_experts`.

    Call it inside ``jax.shard_map``, with any ``check_vma``.

    Parameters
    ----------
    x : jax.Array, floating point, [..., H]
        This device's T tokens.
    w13 : jax.Array, tuple of two, or Quantized
        Weights of this device's E / W experts, as in `fp8moe.jax.moe_experts`.
    w2 : jax.Array or Quantized
        As ``w13``.
    topk_ids : jax.Array, int32 or int64, [..., k]
        Global expert ids; ids below 0 or from E on mean no expert.
    topk_probs : jax.Array, floating point, [..., k]
        Factors of the experts' outputs.
    axis_name : str
        Name of the mesh axis, of W devices.
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        Precision; with "fp8_flow" rows are sent in FP8.
    recompute : None or "moe_expert"
        As in `fp8moe.moe_forward`.
    capacity : int or None
        Maximum number of rows from one device to another; tokens beyond it are dropped, as if their ids for
        that device were negative. None: T, which is always sufficient. Every device receives W * capacity
        rows.
    num_out_tokens : int or None
        Rows of the device's own permutation plan (`fp8moe.plan_topk`); overflow is dropped. None: the static
        bound, sufficient for any routing.
    activation : Activation
        Activation between the two products.
    transposed : bool
        As in `fp8moe.jax.moe_experts`.
    backend : "wgmma", "mma", "cublas", "plain" or None
        As in `fp8moe.jax.moe_experts`.
    num_sms : int or None
        As in `fp8moe.jax.moe_experts`.

    Returns
    -------
    jax.Array, [..., H]
        The outputs in x's dtype. Differentiable in x, w13, w2 and topk_probs, with gradients in their dtypes.

    Raises
    ------
    TypeError, ValueError
        For arguments of the wrong dtype or inconsistent shapes.

    Notes
    -----
    A token is sent once to every device that has one of its experts (`fp8moe.expert_parallel.blocks`), by one
    ``all_to_all`` of bytes; a second one returns its sums.

    Examples
    --------
    >>> import functools, jax, jax.numpy as jnp
    >>> import fp8moe.jax
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("ep",))
    >>> spec = jax.sharding.PartitionSpec("ep")
    >>> layer = functools.partial(fp8moe.jax.moe_experts_over_axis, axis_name="ep", recipe="bf16")
    >>> layer = jax.shard_map(layer, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    >>> x, w13, w2 = jnp.ones((1, 1)), jnp.array([[[100.0], [2.0]]]), jnp.array([[[1.0]]])
    >>> jax.jit(layer)(x, w13, w2, jnp.zeros((1, 1), int), jnp.full((1, 1), 0.5)).tolist()
    [[100.0]]
    """
    checks.choice("recipe", recipe, recipes.RECIPES)
    checks.choice("recompute", recompute, recipes.RECOMPUTE)
    checks.options("activation", activation, Activation)
    checks.choice("backend", backend, BACKENDS)
    transposed = checks.flag("transposed", transposed)
    rows, w13, w2 = jax_ops.operands(x, w13, w2, recipe, transposed, activation)
    if capacity is not None and not 0 < checks.integer("capacity", capacity, 0) <= rows.shape[0]:
        raise ValueError(f"capacity: got {capacity}; wanted 1 to the number of tokens, {rows.shape[0]}")
    capacity = rows.shape[0] if capacity is None else capacity
    ids, probs = jax_ops.of_tokens(x, topk_ids, topk_probs)
    transposed = transposed and recipe != "bf16"  # `operands` has transposed the weights of "bf16"
    product_options = activation, transposed, backend, check_limit(num_sms)
    layer = _Layer(axis_name, recipe, recompute, capacity, num_out_tokens, *product_options)
    arrays = jax_calls.vary_alike(rows, w13, w2, probs, ids)
    return _moe(*arrays, layer).astype(x.dtype).reshape(x.shape)


class _Layer(NamedTuple):
    """Static arguments of a layer."""

    axis: str
    recipe: str
    recompute: str | None
    capacity: int
    num_out_tokens: int | None
    activation: Activation
    transposed: bool
    backend: str | None
    num_sms: int | None


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


# ---------------------------------------------------------------- the layer


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _moe(x, w13, w2, probs, ids, layer):  # type: ignore[no-untyped-def]
    return _moe_fwd(x, w13, w2, probs, ids, layer, gradients=())[0]


def _moe_fwd(x, w13, w2, probs, ids, layer, gradients=None):  # type: ignore[no-untyped-def]
    devices = jax.lax.axis_size(layer.axis)
    weights = jax_ops.multiplied(w13, w2, layer)
    experts = moe.experts_of(weights[0])
    if checks.reads_values():  # while this is traced; `local_ids` would make them negative without a word
        ids = _checked_ids(ids, experts * devices)
    blocks = device_blocks(jnp, ids, experts, devices, layer.capacity)
    # int64 ids of no expert may not fit int32
    sent = local_ids(jnp, ids, experts * devices, 0).astype(jnp.int32)
    *rows, local, moved = dispatch([*_parts(x, layer), sent, probs], blocks, layer.axis)
    local = local_ids(jnp, local, experts, jax.lax.axis_index(layer.axis))
    bound = layer.num_out_tokens
    if bound is None:
        entries = devices * layer.capacity * min(ids.shape[1], experts)
        bound = static_bound(entries, experts, recipes.ALIGN_SIZE[layer.recipe])
    y, saved = _experts_forward(
        _rows_of(rows, layer),
        *weights,
        local,
        moved,
        recipe=layer.recipe,
        recompute=layer.recompute,
        num_out_tokens=bound,
        activation=layer.activation,
        gradients=jax_ops.wanted_gradients(w13, w2) if gradients is None else gradients,
        backend=layer.backend,
        num_sms=layer.num_sms,
    )
    return combine(y, blocks, layer.axis), (saved, blocks, jax_ops.like_weights(w13, w2), probs[:0])


def _moe_bwd(layer, residuals, dy):  # type: ignore[no-untyped-def]
    saved, blocks, like, probs = residuals
    rows = _rows_of(dispatch(_parts(dy, layer), blocks, layer.axis), layer)
    grads = _experts_backward(saved, rows, **jax_ops.backward_options(saved, like, layer))
    dx, dprobs = (combine(g, blocks, layer.axis) for g in (grads.dx, grads.dprobs))
    weights = jax_ops.of_weights(grads, like, layer)
    return dx, *weights, dprobs.astype(probs.dtype), None


_moe.defvjp(_moe_fwd, _moe_bwd)


def _parts(x: Any, layer: _Layer) -> list[Any]:
    """x as it is sent: quantised for "fp8_flow", with the recipe's only cast of it."""
    fmt = recipes.FORMAT_BETWEEN_RANKS[layer.recipe]
    if fmt is None:
        return [x]
    q = jax_ops.quantize(x, fmt=fmt)
    return [q.data, q.scales]


def _rows_of(parts: Sequence[Any], layer: _Layer) -> Any:
    fmt = recipes.FORMAT_BETWEEN_RANKS[layer.recipe]
    return parts[0] if fmt is None else QuantTensor(parts[0], parts[1], fmt)
