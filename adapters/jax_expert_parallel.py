"""Expert parallelism in JAX, inside ``jax.shard_map``, by XLA's own collectives.

What travels is what `fp8moe.expert_parallel` says: a token goes once to every device that has one of its
experts, in FP8 with its scales for "fp8_flow", ids and probabilities in the same message, and sums come
back. Shapes are static, so every device sends every other a block of ``capacity`` rows, and nothing looks at
counts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8moe import checks, moe
from fp8moe.activation import SWIGLU, Activation
from fp8moe.adapters import jax_ops
from fp8moe.expert_parallel.blocks import Blocks, device_blocks, local_ids
from fp8moe.grouped_gemm import BACKENDS
from fp8moe.plan import static_bound
from fp8moe.records import QuantTensor

_experts_forward = jax_ops.traceable(moe.experts_forward)
_experts_backward = jax_ops.traceable(moe.experts_backward)


def moe_ffn(
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
) -> Any:
    """`jax_ops.moe_ffn` of each device's tokens, with the experts of all devices along ``axis_name``: to be
    called inside ``jax.shard_map(..., check_vma=False)``.

    x, topk_ids, topk_probs: this device's tokens [..., H], [..., k]; ids are of all E experts, below 0 or E
        and more for none.
    w13, w2, transposed: this device's E / W experts, as `jax_ops.moe_ffn` takes them.
    capacity: rows that a device sends another at most; what would go beyond is left out, as if those ids were
        negative. T by default, which is never too few. With W devices W * capacity rows arrive at each.
    num_out_tokens: rows of the device's own plan (`plan_topk`), overflow left out; the static bound by
        default, which holds whatever the routing.
    backend: by which kernels the products are made, as `jax_ops.moe_ffn` takes it.

    Returns y in x's shape and dtype, with gradients for x, w13, w2 and topk_probs in their dtypes.
    """
    checks.choice("recipe", recipe, moe.RECIPES)
    checks.choice("backend", backend, BACKENDS)
    rows, w13, w2 = jax_ops.operands(x, w13, w2, recipe, transposed)
    if capacity is not None and not 0 < capacity <= rows.shape[0]:
        raise ValueError(f"capacity: got {capacity}; wanted 1 to the number of tokens, {rows.shape[0]}")
    capacity = rows.shape[0] if capacity is None else capacity
    ids, probs = (a.reshape(-1, a.shape[-1]) for a in (topk_ids, topk_probs))
    transposed = transposed and recipe != "bf16"  # which has them as the library's already
    layer = _Layer(axis_name, recipe, recompute, capacity, num_out_tokens, activation, transposed, backend)
    return _moe(rows, w13, w2, probs, ids, layer).astype(x.dtype).reshape(x.shape)


class _Layer(NamedTuple):
    """What is static of a layer."""

    axis: str
    recipe: str
    recompute: str | None
    capacity: int
    num_out_tokens: int | None
    activation: Activation
    transposed: bool
    backend: str | None


def dispatch(parts: Sequence[Any], blocks: Blocks, axis_name: str) -> list[Any]:
    """Rows of every part [T, ...] to the devices, in one exchange. Each comes as [W * C, ...], block by
    block; rows of no token are zeros, or -1 in integers."""
    rows = [
        jnp.take(p, blocks.tokens, axis=0, mode="fill", fill_value=-1 if p.dtype == jnp.int32 else 0)
        for p in parts
    ]
    buffers = [_as_bytes(r) for r in rows]
    came = jax.lax.all_to_all(jnp.concatenate(buffers, axis=-1), axis_name, 0, 0)
    ends = list(itertools.accumulate(o.shape[-1] for o in buffers))[:-1]
    arrived = [_from_bytes(o, r.dtype) for o, r in zip(jnp.split(came, ends, axis=-1), rows, strict=True)]
    return [a.reshape(-1, a.shape[-1]) for a in arrived]


def combine(rows: Any, blocks: Blocks, axis_name: str) -> Any:
    """What came back for each token, summed in float32 (float64 for float64): [W * C, H] -> [T, H]."""
    devices, capacity = blocks.tokens.shape
    back = jax.lax.all_to_all(rows.reshape(devices, capacity, -1), axis_name, 0, 0)
    wide = jnp.float64 if rows.dtype == jnp.float64 else jnp.float32
    total = jnp.zeros((len(blocks.places), rows.shape[-1]), wide)
    for device in range(devices):
        part = jnp.take(back[device], blocks.places[:, device], axis=0, mode="fill", fill_value=0)
        total += part.astype(wide)
    return total.astype(rows.dtype)


def _as_bytes(x: Any) -> Any:
    if x.dtype == jnp.uint8:
        return x
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)


def _from_bytes(x: Any, dtype: Any) -> Any:
    if dtype == jnp.uint8:
        return x
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, dtype.itemsize), dtype)


# ---------------------------------------------------------------- the layer


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _moe(x, w13, w2, probs, ids, layer):  # type: ignore[no-untyped-def]
    return _moe_fwd(x, w13, w2, probs, ids, layer, gradients=())[0]


def _moe_fwd(x, w13, w2, probs, ids, layer, gradients=None):  # type: ignore[no-untyped-def]
    devices = jax.lax.axis_size(layer.axis)
    weights = jax_ops.multiplied(w13, w2, layer.recipe, layer.transposed)
    experts = moe.experts_of(weights[0])
    blocks = device_blocks(jnp, ids, experts, devices, layer.capacity)
    *rows, local, moved = dispatch([*_parts(x, layer), ids.astype(jnp.int32), probs], blocks, layer.axis)
    local = local_ids(jnp, local, experts, jax.lax.axis_index(layer.axis))
    bound = layer.num_out_tokens
    if bound is None:
        entries = devices * layer.capacity * min(ids.shape[1], experts)
        bound = static_bound(entries, experts, moe.ALIGN_SIZE[layer.recipe])
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
    )
    return combine(y, blocks, layer.axis), (saved, blocks, jax_ops.like_weights(w13, w2), probs[:0])


def _moe_bwd(layer, kept, dy):  # type: ignore[no-untyped-def]
    saved, blocks, like, probs = kept
    rows = _rows_of(dispatch(_parts(dy, layer), blocks, layer.axis), layer)
    saved, options = jax_ops.backward_of(saved, like, layer.transposed)
    grads = _experts_backward(saved, rows, **options)
    dx, dprobs = (combine(g, blocks, layer.axis) for g in (grads.dx, grads.dprobs))
    weights = jax_ops.of_weights(grads, like, layer.transposed)
    return dx, *weights, dprobs.astype(probs.dtype), None


_moe.defvjp(_moe_fwd, _moe_bwd)


def _parts(x: Any, layer: _Layer) -> list[Any]:
    """x as it travels: its one cast for "fp8_flow"."""
    fmt = moe.FORMAT_BETWEEN_RANKS[layer.recipe]
    if fmt is None:
        return [x]
    q = jax_ops.quantize(x, fmt=fmt)
    return [q.data, q.scales]


def _rows_of(parts: Sequence[Any], layer: _Layer) -> Any:
    fmt = moe.FORMAT_BETWEEN_RANKS[layer.recipe]
    return parts[0] if fmt is None else QuantTensor(parts[0], parts[1], fmt)
