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

    Returns y in x's shape and dtype, with gradients for x, w13, w2 and topk_probs in their dtypes.
    """
    checks.choice("recipe", recipe, moe.RECIPES)
    rows, w13, w2 = jax_ops.operands(x, w13, w2, recipe, transposed)
    if capacity is not None and not 0 < capacity <= rows.shape[0]:
        raise ValueError(f"capacity: got {capacity}; wanted 1 to the number of tokens, {rows.shape[0]}")
    capacity = rows.shape[0] if capacity is None else capacity
    ids, probs = (a.reshape(-1, a.shape[-1]) for a in (topk_ids, topk_probs))
    transposed = transposed and recipe != "bf16"  # which has them as the library's already
    how = _How(axis_name, recipe, recompute, capacity, num_out_tokens, activation, transposed)
    return _moe(rows, w13, w2, probs, ids, how).astype(x.dtype).reshape(x.shape)


class _How(NamedTuple):
    axis: str
    recipe: str
    recompute: str | None
    capacity: int
    num_out_tokens: int | None
    activation: Activation
    transposed: bool


class Route(NamedTuple):
    """Which tokens go where. tokens: int32 [W, C], the token of each row of the blocks to the devices, T
    where there is none. places: int32 [T, W], the row of the block of each device that a token goes to; else
    C."""

    tokens: Any
    places: Any


def route(topk_ids: Any, experts: int, devices: int, capacity: int) -> Route:
    """Blocks in the order of the tokens; `experts` of each device."""
    device = jnp.where(topk_ids >= 0, topk_ids // experts, -1)
    goes = (device[:, :, None] == jnp.arange(devices)).any(axis=1)  # [T, W]
    row = jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1
    places = jnp.where(goes & (row < capacity), row, capacity)
    tokens, to = jnp.indices(places.shape, dtype=jnp.int32)
    blocks = jnp.full((devices, capacity), len(topk_ids), jnp.int32)
    return Route(blocks.at[to, places].set(tokens, mode="drop"), places)


def dispatch(parts: Sequence[Any], route: Route, axis_name: str) -> list[Any]:
    """Rows of every part [T, ...] to the devices, in one exchange. Each comes as [W * C, ...], block by
    block; rows of no token are zeros, or -1 in integers."""
    blocks = [
        jnp.take(p, route.tokens, axis=0, mode="fill", fill_value=-1 if p.dtype == jnp.int32 else 0)
        for p in parts
    ]
    buffers = [_as_bytes(b) for b in blocks]
    came = jax.lax.all_to_all(jnp.concatenate(buffers, axis=-1), axis_name, 0, 0)
    ends = list(itertools.accumulate(o.shape[-1] for o in buffers))[:-1]
    found = [_from_bytes(o, b.dtype) for o, b in zip(jnp.split(came, ends, axis=-1), blocks, strict=True)]
    return [f.reshape(-1, f.shape[-1]) for f in found]


def combine(rows: Any, route: Route, axis_name: str) -> Any:
    """What came back for each token, summed in float32 (float64 for float64): [W * C, H] -> [T, H]."""
    devices, capacity = route.tokens.shape
    back = jax.lax.all_to_all(rows.reshape(devices, capacity, -1), axis_name, 0, 0)
    wide = jnp.float64 if rows.dtype == jnp.float64 else jnp.float32
    total = jnp.zeros((len(route.places), rows.shape[-1]), wide)
    for device in range(devices):
        part = jnp.take(back[device], route.places[:, device], axis=0, mode="fill", fill_value=0)
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
def _moe(x, w13, w2, probs, ids, how):  # type: ignore[no-untyped-def]
    return _moe_fwd(x, w13, w2, probs, ids, how, gradients=())[0]


def _moe_fwd(x, w13, w2, probs, ids, how, gradients=None):  # type: ignore[no-untyped-def]
    devices = jax.lax.axis_size(how.axis)
    weights = jax_ops.multiplied(w13, w2, how.recipe, how.transposed)
    experts = moe.experts_of(weights[0])
    way = route(ids, experts, devices, how.capacity)
    *rows, local, moved = dispatch([*_parts(x, how), ids.astype(jnp.int32), probs], way, how.axis)
    local -= jax.lax.axis_index(how.axis) * experts
    local = jnp.where((local >= 0) & (local < experts), local, -1)
    bound = how.num_out_tokens
    if bound is None:
        entries = devices * how.capacity * min(ids.shape[1], experts)
        bound = static_bound(entries, experts, moe.ALIGN_SIZE[how.recipe])
    y, saved = _experts_forward(
        _rows_of(rows, how),
        *weights,
        local,
        moved,
        recipe=how.recipe,
        recompute=how.recompute,
        num_out_tokens=bound,
        activation=how.activation,
        gradients=jax_ops.wanted_gradients(w13, w2) if gradients is None else gradients,
    )
    return combine(y, way, how.axis), (saved, way, jax_ops.like_weights(w13, w2), probs[:0])


def _moe_bwd(how, kept, dy):  # type: ignore[no-untyped-def]
    saved, way, like, probs = kept
    rows = _rows_of(dispatch(_parts(dy, how), way, how.axis), how)
    grads = _experts_backward(saved, rows, **jax_ops.backward_options(saved, like, how.transposed))
    dx, dprobs = (combine(g, way, how.axis) for g in (grads.dx, grads.dprobs))
    weights = jax_ops.of_weights(grads, like, how.transposed)
    return dx, *weights, dprobs.astype(probs.dtype), None


_moe.defvjp(_moe_fwd, _moe_bwd)


def _parts(x: Any, how: _How) -> list[Any]:
    """x as it travels: its one cast for "fp8_flow"."""
    fmt = moe.FORMAT_BETWEEN_RANKS[how.recipe]
    if fmt is None:
        return [x]
    q = jax_ops.quantize(x, fmt=fmt)
    return [q.data, q.scales]


def _rows_of(parts: Sequence[Any], how: _How) -> Any:
    fmt = moe.FORMAT_BETWEEN_RANKS[how.recipe]
    return parts[0] if fmt is None else QuantTensor(parts[0], parts[1], fmt)
