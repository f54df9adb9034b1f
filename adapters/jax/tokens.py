"""Permutation of tokens to expert order and back, in programs that XLA partitions over devices.

If ``jax.jit`` gets tokens sharded over devices, each device permutes its own tokens to its own rows, as
Transformer Engine's operations do: row numbers start at 0 on every device, and each of n devices has 1/n of
the rows. On one device, or inside ``shard_map``, this library's kernels run; programs that XLA partitions use
XLA's operations instead, because a callback cannot be partitioned.

Row numbers are valid on their own device only, so a row map must keep its sharding, which decides over which
devices tokens are sharded; XLA may choose another one for the tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from fp8moe import PermutationPlan
from fp8moe.adapters.jax import ops as jax_ops
from fp8moe.ops import row_maps

# ---------------------------------------------------------------- with gradients


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def dispatch(x: Any, mask: Any, probs: Any, rows: int, align: int) -> tuple[Any, Any, Any, Any, Any]:
    """(rows, probabilities or None, row map, pad_offsets, tokens_per_expert) of an int32 mask [T, E]."""
    return _dispatch_fwd(x, mask, probs, rows, align)[0]


def _dispatch_fwd(x, mask, probs, rows, align):  # type: ignore[no-untyped-def]
    probs_list = [] if probs is None else [probs]
    dimensions = "tt" + "t" * len(probs_list), "rm.." + "r" * len(probs_list)
    data, row_map, pads, counts, *moved = _partitioned(_dispatch, _dispatch_part, *dimensions, rows, align)(
        x, mask, *probs_list
    )
    results = data, moved[0] if moved else None, row_map, pads, counts
    return results, (row_map, pads, probs)


def _dispatch_bwd(rows, align, residuals, grads):  # type: ignore[no-untyped-def]
    row_map, pads, probs = residuals
    jax_ops.refuse_codes(grads[0])
    grads_list = [] if probs is None else [grads[1]]
    dimensions = "m.r" + "r" * len(grads_list), "t" + "t" * len(grads_list)
    dx, *dprobs = _partitioned(_gather, _gather_part, *dimensions)(row_map, pads, grads[0], *grads_list)
    return dx, None, dprobs[0].astype(probs.dtype) if dprobs else None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def probs_of_rows(row_map: Any, pads: Any, probs: Any, rows: int) -> Any:
    """The probability of each row of a dispatch whose own rows have no gradient."""
    return _probs_of_rows_fwd(row_map, pads, probs, rows)[0]


def _probs_of_rows_fwd(row_map, pads, probs, rows):  # type: ignore[no-untyped-def]
    (moved,) = _partitioned(_probs, _probs_part, "m.t", "r", rows)(row_map, pads, probs)
    return moved, (row_map, pads, probs)


def _probs_of_rows_bwd(rows, residuals, grad):  # type: ignore[no-untyped-def]
    row_map, pads, probs = residuals
    gather = _partitioned(_gather, _gather_part, "m.rr", "tt")
    _, dprobs = gather(row_map, pads, jax_ops.no_columns(grad), grad)
    return None, None, dprobs.astype(probs.dtype)


probs_of_rows.defvjp(_probs_of_rows_fwd, _probs_of_rows_bwd)


@jax.custom_vjp
def combine(data: Any, row_map: Any, probs: Any, pads: Any) -> Any:
    """[T, H]: the sum of each token's rows, each multiplied by its probability if given."""
    return _combine_fwd(data, row_map, probs, pads)[0]


def _combine_fwd(data, row_map, probs, pads):  # type: ignore[no-untyped-def]
    probs_list = [] if probs is None else [probs]
    (out,) = _partitioned(_combine, _combine_part, "m.r" + "t" * len(probs_list), "t")(
        row_map, pads, data, *probs_list
    )
    return out, (row_map, pads, data if probs_list else data[:, :0], probs)


def _combine_bwd(residuals, grad):  # type: ignore[no-untyped-def]
    row_map, pads, data, probs = residuals
    operands = [] if probs is None else [data, probs]
    dimensions = "m.t" + "rt"[: len(operands)], "rt"[: max(1, len(operands))]
    grads = _partitioned(_scatter, _scatter_part, *dimensions, data.shape[0])(row_map, pads, grad, *operands)
    return grads[0], None, grads[1].astype(probs.dtype) if operands else None, None


combine.defvjp(_combine_fwd, _combine_bwd)

# ---------------------------------------------------------------- kernels, for unpartitioned programs


def _dispatch(rows, align, x, mask, *probs):  # type: ignore[no-untyped-def]
    plan = jax_ops.plan_routing_map(mask, align_size=align, num_out_tokens=rows)
    moved = jax_ops._permute_op(x, plan, *probs, zero_unweighted=bool(probs))
    counts = plan.padded_tokens_per_expert if align > 1 else plan.tokens_per_expert
    results = moved.data, plan.row_id_map, plan.pad_offsets, counts
    return (*results, moved.probs) if probs else results


def _probs(rows, row_map, pads, probs):  # type: ignore[no-untyped-def]
    plan = _plan_of(row_map, pads, rows)
    return (jax_ops._permute_op(jax_ops.no_columns(probs), plan, probs).probs,)


def _gather(row_map, pads, grad, *grad_probs):  # type: ignore[no-untyped-def]
    dx, dprobs = jax_ops.permute_backward(grad, _plan_of(row_map, pads, grad.shape[0]), *grad_probs)
    return (dx, dprobs) if grad_probs else (dx,)


def _combine(row_map, pads, data, *probs):  # type: ignore[no-untyped-def]
    return (jax_ops._unpermute_op(data, _plan_of(row_map, pads, data.shape[0]), *probs),)


def _scatter(rows, row_map, pads, grad, *data_and_probs):  # type: ignore[no-untyped-def]
    grads = jax_ops.unpermute_backward(grad, _plan_of(row_map, pads, rows), *data_and_probs)
    return grads if data_and_probs else grads[:1]


def _plan_of(row_map: Any, pads: Any, rows: int) -> PermutationPlan:
    return jax_ops.plan_row_map(row_map, pads, num_out_tokens=rows)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- XLA's operations, for one device's tokens
#
# ``axes``: mesh axes over which tokens are sharded. Counts and padding are summed over all devices, as in
# Transformer Engine. If the tokens of a device need more rows than its share, Transformer Engine's operations
# write out of bounds; here all rows of that device become NaN.


def _dispatch_part(axes, devices, rows, align, x, mask, *probs):  # type: ignore[no-untyped-def]
    rows //= devices
    mask = (mask != 0).astype(jnp.int32)
    local = mask.sum(axis=0, dtype=jnp.int32)
    counts, pads = row_maps.padded_counts(jnp, jax.lax.psum(local, axes) if axes else local, align)
    row_map, overflow = row_maps.map_of_mask(jnp, mask, pads, rows)
    token, expert = row_maps.row_sources(jnp, row_map, pads, rows)
    data, entries = _rows_of(x, token), [_entries_of(p, token, expert) for p in probs]
    for of_rows in entries:
        data = without_unweighted(data, of_rows)
    if jnp.issubdtype(data.dtype, jnp.floating):
        data = jnp.where(overflow > 0, jnp.nan, data).astype(data.dtype)
    return data, row_map, pads, counts, *entries


def _probs_part(axes, devices, rows, row_map, pads, probs):  # type: ignore[no-untyped-def]
    token, expert = row_maps.row_sources(jnp, row_map, pads, rows // devices)
    return (_entries_of(probs, token, expert),)


def _gather_part(axes, devices, row_map, pads, grad, *grad_probs):  # type: ignore[no-untyped-def]
    token, expert = row_maps.row_sources(jnp, row_map, pads, grad.shape[0])
    dx = _sums(grad, token, row_map.shape[0])
    return (dx, _to_entries(grad_probs[0], token, expert, row_map)) if grad_probs else (dx,)


def _combine_part(axes, devices, row_map, pads, data, *probs):  # type: ignore[no-untyped-def]
    token, expert = row_maps.row_sources(jnp, row_map, pads, data.shape[0])
    weights = [_entries_of(p, token, expert) for p in probs]
    return (_sums(data, token, row_map.shape[0], *weights),)


def _scatter_part(axes, devices, rows, row_map, pads, grad, *data_and_probs):  # type: ignore[no-untyped-def]
    token, expert = row_maps.row_sources(jnp, row_map, pads, rows // devices)
    moved = _rows_of(grad, token)
    if not data_and_probs:
        return (moved,)
    data, probs = data_and_probs
    sum_dtype = _wide(grad)
    weights = _entries_of(probs, token, expert).astype(sum_dtype)
    products = (moved.astype(sum_dtype) * data.astype(sum_dtype)).sum(axis=1).astype(probs.dtype)
    moved = (moved.astype(sum_dtype) * weights[:, None]).astype(grad.dtype)
    return moved, _to_entries(products, token, expert, row_map)


def _wide(x: Any) -> Any:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def _rows_of(x: Any, token: Any) -> Any:
    return x.at[token].get(mode="fill", fill_value=0)


def _entries_of(x: Any, token: Any, expert: Any) -> Any:
    return x.at[token, expert].get(mode="fill", fill_value=0)


def without_unweighted(data: Any, probs: Any) -> Any:
    """Rows with zeros where the probability is 0, as the kernels' ``zero_unweighted``."""
    return jnp.where(probs[:, None] == 0, jnp.zeros((), data.dtype), data)


def _to_entries(values: Any, token: Any, expert: Any, row_map: Any) -> Any:
    shape = row_map.shape[0], (row_map.shape[1] - 1) // 2
    return jnp.zeros(shape, values.dtype).at[token, expert].set(values, mode="drop")


def _sums(x: Any, token: Any, tokens: int, weights: Any = None) -> Any:
    """Sum of each token's rows; rows without a token are not read."""
    values = x.astype(_wide(x))
    if weights is not None:
        values *= weights.astype(values.dtype)[:, None]
    return jnp.zeros((tokens, x.shape[1]), values.dtype).at[token].add(values, mode="drop").astype(x.dtype)


# ---------------------------------------------------------------- sort of (token, expert) entries
#
# Each function is the gradient of the other, so both directions are gathers; XLA's own gradient of a gather
# is a scatter.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def sort_entries(x: Any, order: Any, topk: int) -> Any:
    """[len(order), H]: row r is the row of x [T, H] of the token of entry order[r], with ``topk`` entries per
    token; zeros for entry numbers from T * topk on."""
    return jnp.asarray(x).at[order // topk].get(mode="fill", fill_value=0)


def _sort_entries_fwd(x, order, topk):  # type: ignore[no-untyped-def]
    return sort_entries(x, order, topk), (order, x[:, :0])


def _sort_entries_bwd(topk, residuals, grad):  # type: ignore[no-untyped-def]
    order, like = residuals
    tokens = like.shape[0]
    rows = unsort_entries(grad, order, tokens * topk).reshape(tokens, topk, -1)
    return rows.astype(_wide(like)).sum(axis=1).astype(like.dtype), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def unsort_entries(rows: Any, order: Any, entries: int) -> Any:
    """[entries, H]: the inverse of the sort by ``order``, for the first ``entries`` entries."""
    return rows[jnp.argsort(order)[:entries]]


def _unsort_entries_fwd(rows, order, entries):  # type: ignore[no-untyped-def]
    return unsort_entries(rows, order, entries), order


def _unsort_entries_bwd(entries, order, grad):  # type: ignore[no-untyped-def]
    return sort_entries(grad, order, 1), None


sort_entries.defvjp(_sort_entries_fwd, _sort_entries_bwd)
unsort_entries.defvjp(_unsort_entries_fwd, _unsort_entries_bwd)

# ---------------------------------------------------------------- choice of kernels or XLA's operations


def _partitioned(whole: Any, part: Any, arguments: str, results: str, *static: int) -> Callable[..., Any]:
    """Returns a function that computes ``whole(*static, *arrays)``. Where XLA partitions the program, each
    device computes ``part(axes, devices, *static, *arrays)`` instead.

    arguments, results: for each array the meaning of its first dimension. "t": tokens; "m": tokens, of the
    row map; "r": the tokens' rows, sharded over the same devices; ".": replicated on every device.

    The sharding that XLA has chosen for the row map decides over which devices the tokens are sharded: it is
    the same in the dispatch, which numbers the rows of a device, and wherever the numbers are used. That of
    the other arrays may differ from one operation to the next.
    """
    traced = _partitioned_function(whole, part, arguments, results, static)

    def run(*arrays: Any) -> Any:
        return (traced if any(map(_may_be_partitioned, arrays)) else functools.partial(whole, *static))(
            *arrays
        )

    return run


def _may_be_partitioned(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and len(x.sharding.device_set) > 1)


@functools.lru_cache(maxsize=1024)
def _partitioned_function(
    whole: Any, part: Any, arguments: str, results: str, static: tuple[int, ...]
) -> Any:
    function = custom_partitioning(functools.partial(_flat, whole, static))

    def shardings(mesh: Any, axes: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        sharded, replicated = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((axes,), ()))
        operands, made = (
            tuple(replicated if kind == "." else sharded for kind in kinds) for kinds in (arguments, results)
        )
        return operands, made

    def axes_of(array: Any) -> Any:
        return array.sharding.spec[0] if array.sharding.spec else None

    def partition(mesh: Any, operands: Any, made: Any) -> Any:
        arrays = [*zip((*operands, *made), arguments + results, strict=True)]
        axes = next(axes_of(array) for array, kind in arrays if kind == "m")
        names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        devices = math.prod(mesh.shape[n] for n in names)
        for array, kind in arrays:
            if kind != "." and array.shape[0] % devices:
                name, unit = (
                    ("num_out_tokens", "rows, padding included,") if kind == "r" else ("inp", "tokens")
                )
                raise ValueError(
                    f"{name}: got {array.shape[0]} {unit} in a program that XLA partitions over {devices} "
                    "devices; wanted a multiple of the number of devices, because XLA would append tokens of "
                    "any value; pad the tokens"
                )
        operand_shardings, result_shardings = shardings(mesh, axes)
        device_part = functools.partial(part, names, devices, *static)
        return mesh, device_part, result_shardings, operand_shardings

    def infer_sharding(mesh: Any, operands: Any, made: Any) -> Any:  # of XLA's older partitioner, GSPMD
        axes = [axes_of(a) for a, kind in zip(operands, arguments, strict=True) if kind in "mt"]
        axes = axes[:1] if "m" in arguments else axes
        return shardings(mesh, next((a for a in axes if a is not None), None))[1]

    def rule(mesh: Any, operands: Any, made: Any) -> str:
        factors_left = (f"d{i}" for i in range(1000))

        def factors(kinds: str, types: Any) -> str:
            return ", ".join(
                " ".join(
                    (
                        next(factors_left) if kind == "." else kind.replace("m", "t"),
                        *(next(factors_left) for _ in t.shape[1:]),
                    )
                )
                for kind, t in zip(kinds, types, strict=True)
            )

        return f"{factors(arguments, operands)} -> {factors(results, made)}"

    function.def_partition(partition, infer_sharding_from_operands=infer_sharding, sharding_rule=rule)
    return jax.jit(sequential_vmap(function))


def _flat(whole: Any, static: tuple[int, ...], *arrays: Any) -> tuple[Any, ...]:
    return tuple(whole(*static, *arrays))
