"""The public operations for JAX, eagerly and inside ``jax.jit``, with gradients.

Names and arguments are those of `fp8moe`; records are pytrees. A traced operation becomes one custom call
(`fp8moe.adapters.jax.calls`): on CUDA its kernels run on XLA's stream, in memory that XLA allocates,
temporaries included. JAX's persistent compilation cache stores such programs, and
``jax.export.export(function, disabled_checks=fp8moe.jax.EXPORT_CHECKS)`` exports them; a process that
loads one must import `fp8moe.jax` first. Shapes are static: a plan has its static bound, and values are not
checked. A jax.Array to add to (``out``, ``dw13``, ``dw2``) is not changed; the sum is returned, in the same
memory if XLA can reuse it.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import typing
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

try:
    import jax
    import jax.export
    import jax.numpy as jnp

    if jax.__version_info__ < (0, 10):
        raise ImportError(f"this is jax {jax.__version__}")
except ImportError as error:
    raise ImportError(f"fp8moe.jax needs jax 0.10 or later ({error}): pip install 'jax>=0.10'") from None

import fp8moe
from fp8moe import Routed, RouterConfig
from fp8moe.activation import SWIGLU, Activation
from fp8moe.adapters.jax import calls as jax_calls
from fp8moe.ops.permute import check_map_of_ids
from fp8moe.records import (
    Options,
    PermutationPlan,
    Permuted,
    QuantTensor,
    SortedChunks,
)
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import Function
from fp8moe.runtime.docstrings import differentiable_in, docstring_of
from fp8moe.runtime.record_trees import METADATA_TYPES, arrays_in

__all__ = [
    "EXPORT_CHECKS",
    "dequantize",
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "moe_backward",
    "moe_forward",
    "pad",
    "permute",
    "permute_and_pad",
    "permute_backward",
    "permute_gemm",
    "permute_transpose",
    "plan_index_map",
    "plan_routing_map",
    "plan_row_map",
    "plan_topk",
    "quantize",
    "quantize_weights",
    "route",
    "route_backward",
    "scaling_aware_transpose",
    "sort_chunks",
    "sort_chunks_backward",
    "swiglu",
    "swiglu_backward",
    "swiglu_quantize",
    "swiglu_quantize_backward",
    "to_layout",
    "transpose_codes",
    "unpad",
    "unpermute",
    "unpermute_backward",
]

#: ``disabled_checks`` for ``jax.export.export``, which rejects custom calls it does not know
EXPORT_CHECKS = tuple(map(jax.export.DisabledSafetyCheck.custom_call, jax_calls.TARGETS))

# ---------------------------------------------------------------- records as pytrees


def _flatten(record: Any) -> tuple[list[Any], Any]:
    """(arrays and nested records, static structure). A field is static by its declared type, not by its
    value: a tree of the same structure may have numbers in place of arrays."""
    static, dynamic = _fields(record.__class__)
    values = tuple((n, getattr(record, n)) for n in static)
    return [getattr(record, n) for n in dynamic], (dynamic, values)


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a record type's static fields, and of those with arrays or nested records."""
    hints = typing.get_type_hints(kind)
    static = tuple(name for name, hint in hints.items() if _is_static(hint))
    return static, tuple(name for name in hints if name not in static)


def _is_static(hint: Any) -> bool:
    """Whether all values of a declared type are metadata."""
    if parts := typing.get_args(hint):
        return all(_is_static(part) for part in parts if part is not ...)
    return hint in METADATA_TYPES or (isinstance(hint, type) and issubclass(hint, Options))


def _unflatten(kind: type, structure: Any, children: Any) -> Any:
    names, static = structure
    record: Any = object.__new__(kind)
    record.__dict__.update(dict(static), **dict(zip(names, children, strict=True)))
    return record


for _kind in jax_calls.RECORDS:
    jax.tree_util.register_pytree_node(_kind, _flatten, functools.partial(_unflatten, _kind))

# ---------------------------------------------------------------- tracing


def traceable(function: Function) -> Function:
    """Wraps a function of the library so that it also accepts traced arrays: it becomes one operation of the
    jitted program and allocates no memory of its own."""
    parameters = inspect.signature(function)
    changed = {"out", "dw13", "dw2"} & set(parameters.parameters)  # arguments that are added to in place
    name = jax_calls.name_function(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        arrays = (a for v in (*args, *options.values()) for a in arrays_in(v))
        in_program, in_place = any(isinstance(a, jax.core.Tracer) for a in arrays), list[Any]()
        if changed:
            bound = parameters.bind(*args, **options).arguments
            in_place = [a for name in changed for a in arrays_in(bound.get(name))]
            # in a program NumPy arrays are constants; elsewhere they are changed
            in_program = in_program or any(isinstance(a, jax.Array) for a in in_place)
        if in_program:
            return jax_calls.call(name, args, options, set(map(id, in_place)))
        return function(*args, **options)

    note = "Inside ``jax.jit`` it is one operation of the program, with static shapes. It has no gradient."
    if changed:
        names = " or ".join(f"``{name}``" for name in sorted(changed))
        note += (
            f" A jax.Array given as {names} is never changed in place: the result is a new array, in the "
            "same memory if XLA can reuse it. A NumPy array is, outside of a program."
        )
    call.__doc__ = docstring_of(function, "jax.Array", note)
    return call  # type: ignore[return-value]


def documented(core: Any, *differentiable: str) -> Callable[[Function], Function]:
    """Gives a differentiable function the docstring of the core function, and names its arguments in what
    JAX raises for objects that are no arrays."""
    signature = inspect.signature(core)
    arrays = [n for n, p in signature.parameters.items() if re.search("Array|Rows|Plan", p.annotation)]

    def document(function: Function) -> Function:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                return function(*arguments, **options)
            except (TypeError, OverflowError):
                given = signature.bind(*arguments, **options).arguments
                for name in arrays:
                    for leaf in jax.tree_util.tree_leaves(given.get(name)):
                        if not _is_of_jax(leaf):
                            raise no_jax_array(name, leaf) from None
                raise

        note = f"{differentiable_in(differentiable)}; inside ``jax.jit`` it is one operation of the program."
        call.__doc__ = docstring_of(core, "jax.Array", note)
        return call  # type: ignore[return-value]

    return document


# ---------------------------------------------------------------- without gradients

plan_topk = traceable(fp8moe.plan_topk)
plan_routing_map = traceable(fp8moe.plan_routing_map)
plan_row_map = traceable(fp8moe.plan_row_map)
plan_index_map = traceable(fp8moe.plan_index_map)
quantize = traceable(fp8moe.quantize)
quantize_weights = traceable(fp8moe.quantize_weights)
dequantize = traceable(fp8moe.dequantize)
to_layout = traceable(fp8moe.to_layout)
transpose_codes = traceable(fp8moe.transpose_codes)
scaling_aware_transpose = traceable(fp8moe.scaling_aware_transpose)
permute_transpose = traceable(fp8moe.permute_transpose)
permute_backward = traceable(fp8moe.permute_backward)
unpermute_backward = traceable(fp8moe.unpermute_backward)
sort_chunks_backward = traceable(fp8moe.sort_chunks_backward)
route_backward = traceable(fp8moe.route_backward)
swiglu_backward = traceable(fp8moe.swiglu_backward)
swiglu_quantize = traceable(fp8moe.swiglu_quantize)
swiglu_quantize_backward = traceable(fp8moe.swiglu_quantize_backward)
grouped_gemm = traceable(fp8moe.grouped_gemm)
grouped_gemm_wgrad = traceable(fp8moe.grouped_gemm_wgrad)
permute_gemm = traceable(fp8moe.permute_gemm)
moe_forward = traceable(fp8moe.moe_forward)
moe_backward = traceable(fp8moe.moe_backward)
_permute_op = traceable(fp8moe.permute)
_unpermute_op = traceable(fp8moe.unpermute)
_sort_op = traceable(fp8moe.sort_chunks)
_pad_op = traceable(fp8moe.pad)
_unpad_op = traceable(fp8moe.unpad)
_swiglu_op = traceable(fp8moe.swiglu)
_route_op = traceable(fp8moe.route)

# ---------------------------------------------------------------- with gradients


@documented(fp8moe.permute, "x", "probs")
def permute(
    x: Any,
    plan: PermutationPlan,
    probs: Any = None,
    *,
    fill_padding: bool = True,
    zero_unweighted: bool = False,
    layout: str = "compact",
) -> Permuted:
    x, plan, probs = jax_calls.vary_alike(x, plan, probs)
    options = (("fill_padding", fill_padding), ("zero_unweighted", zero_unweighted))
    row_options: dict[str, Any] = {**dict(options), "layout": layout}
    if not (isinstance(layout, str) and layout == "compact") and not isinstance(x, QuantTensor):
        return _permute_op(x, plan, probs, **row_options)  # raises the ValueError of `fp8moe.permute`
    if not may_need_grad(x) and isinstance(probs, jax.core.Tracer):
        _, moved = _permute(no_columns(probs), probs, plan, options)
        weights = jax.lax.stop_gradient(probs) if zero_unweighted else None
        if isinstance(x, QuantTensor):
            data = _permute_op(x, plan, weights, **row_options).data
        else:
            data, _ = _permute(x, weights, plan, options)
        return Permuted(data, moved, plan)
    if isinstance(x, QuantTensor):
        return _permute_op(x, plan, probs, **row_options)
    return Permuted(*_permute(x, probs, plan, options), plan)


def may_need_grad(x: Any) -> bool:
    """Whether rows can have a gradient. FP8 codes cannot: their probabilities, which can, are permuted in a
    separate call, with rows of zero columns."""
    return not isinstance(x, QuantTensor) and getattr(x, "dtype", None) in checks.FLOATS


def no_columns(probs: Any) -> Any:
    return jnp.zeros((probs.shape[0], 0), probs.dtype)


def refuse_codes(grad: Any) -> None:
    """Raises for float8 rows: JAX would give them a cotangent of their own dtype."""
    if grad.dtype not in checks.FLOATS:
        raise TypeError(
            f"x: got {grad.dtype} rows that are differentiated; wanted bfloat16, float16, float32 or float64 "
            "rows; pass jax.lax.stop_gradient(x)"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _permute(x: Any, probs: Any, plan: PermutationPlan, options: Any) -> tuple[Any, Any]:
    moved = _permute_op(x, plan, probs, **dict(options))
    return moved.data, moved.probs


def _permute_fwd(x, probs, plan, options):  # type: ignore[no-untyped-def]
    return _permute(x, probs, plan, options), (plan, probs)


def _permute_bwd(options, residuals, grads):  # type: ignore[no-untyped-def]
    plan, probs = residuals
    refuse_codes(grads[0])
    dx, dprobs = permute_backward(grads[0], plan, None if probs is None else grads[1])
    return dx, None if probs is None else dprobs.astype(probs.dtype), None


_permute.defvjp(_permute_fwd, _permute_bwd)


@documented(fp8moe.permute_and_pad, "x", "probs")
def permute_and_pad(
    x: Any,
    routing_map: Any,
    probs: Any = None,
    *,
    align_size: int,
    topk: int | None = None,
    num_out_tokens: Any = None,
    num_experts: int | None = None,
    fill_padding: bool = True,
    layout: str = "compact",
) -> Permuted:
    if num_experts is None:
        plan = plan_routing_map(routing_map, align_size=align_size, topk=topk, num_out_tokens=num_out_tokens)
    else:
        check_map_of_ids(routing_map, topk, num_experts)
        plan = plan_topk(routing_map, num_experts, align_size=align_size, num_out_tokens=num_out_tokens)
    return permute(x, plan, probs, fill_padding=fill_padding, layout=layout)


@documented(fp8moe.unpermute, "x", "merging_probs")
def unpermute(x: Any, plan: PermutationPlan, merging_probs: Any = None) -> Any:
    if isinstance(x, QuantTensor):
        return _unpermute_op(x, plan, merging_probs)
    return _unpermute(*jax_calls.vary_alike(x, merging_probs, plan))


@jax.custom_vjp
def _unpermute(x: Any, merging_probs: Any, plan: PermutationPlan) -> Any:
    return _unpermute_op(x, plan, merging_probs)


def _unpermute_fwd(x, merging_probs, plan):  # type: ignore[no-untyped-def]
    return _unpermute(x, merging_probs, plan), (None if merging_probs is None else x, merging_probs, plan)


def _unpermute_bwd(residuals, grad):  # type: ignore[no-untyped-def]
    x, probs, plan = residuals
    dx, dprobs = unpermute_backward(grad, plan, x, probs)
    return dx, None if probs is None else dprobs.astype(probs.dtype), None


_unpermute.defvjp(_unpermute_fwd, _unpermute_bwd)


@documented(fp8moe.sort_chunks, "x", "probs")
def sort_chunks(
    x: Any,
    split_sizes: Any,
    sorted_indices: Any,
    probs: Any = None,
    *,
    align_size: int = 1,
    chunks_per_group: int = 1,
    num_out_tokens: int | None = None,
    keep_rest: bool = False,
) -> SortedChunks:
    x, probs, split_sizes, sorted_indices = jax_calls.vary_alike(x, probs, split_sizes, sorted_indices)
    options = (("align_size", align_size), ("chunks_per_group", chunks_per_group), ("keep_rest", keep_rest))
    by_name: dict[str, Any] = {"num_out_tokens": num_out_tokens, **dict(options)}
    if isinstance(probs, jax.core.Tracer) and not may_need_grad(x):
        moved = _sort(no_columns(probs), probs, split_sizes, sorted_indices, options, num_out_tokens)
        return replace(moved, data=sort_chunks(x, split_sizes, sorted_indices, **by_name).data)
    if isinstance(x, QuantTensor):
        return _sort_op(x, split_sizes, sorted_indices, probs, **by_name)
    return _sort(x, probs, split_sizes, sorted_indices, options, num_out_tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sort(x, probs, sizes, indices, options, num_out_tokens):  # type: ignore[no-untyped-def]
    return _sort_op(x, sizes, indices, probs, num_out_tokens=num_out_tokens, **dict(options))


def _sort_fwd(x, probs, sizes, indices, options, num_out_tokens):  # type: ignore[no-untyped-def]
    sorted_ = _sort(x, probs, sizes, indices, options, num_out_tokens)
    return sorted_, (sizes, indices, probs, x[:, :0])


def _sort_bwd(options, num_out_tokens, residuals, grads):  # type: ignore[no-untyped-def]
    sizes, indices, probs, like = residuals
    refuse_codes(grads.data)
    dprobs = None if probs is None else grads.probs
    dx, dprobs = sort_chunks_backward(
        grads.data, sizes, indices, dprobs, num_tokens=like.shape[0], **dict(options)
    )
    return dx, None if probs is None else dprobs.astype(probs.dtype), None, None


_sort.defvjp(_sort_fwd, _sort_bwd)


@jax.tree_util.register_static
class _Numbers(tuple[int, ...]):
    """Counts that are numbers: static in a program, and not differentiated."""


def _counts(tokens_per_expert: Any) -> Any:
    if not isinstance(tokens_per_expert, (list, tuple)):
        return tokens_per_expert
    return _Numbers(checks.integer("tokens_per_expert", n, 0) for n in tokens_per_expert)


@documented(fp8moe.pad, "x")
def pad(x: Any, tokens_per_expert: Any, align_size: int, *, num_out_tokens: int | None = None) -> Any:
    return _pad(*jax_calls.vary_alike(x, _counts(tokens_per_expert)), "pad", align_size, num_out_tokens)


@documented(fp8moe.unpad, "x")
def unpad(x: Any, tokens_per_expert: Any, align_size: int, *, num_out_tokens: int | None = None) -> Any:
    return _pad(*jax_calls.vary_alike(x, _counts(tokens_per_expert)), "unpad", align_size, num_out_tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _pad(x, counts, verb, align_size, rows):  # type: ignore[no-untyped-def]
    return (_pad_op if verb == "pad" else _unpad_op)(x, counts, align_size, num_out_tokens=rows)


def _pad_fwd(x, counts, verb, align_size, rows):  # type: ignore[no-untyped-def]
    return _pad(x, counts, verb, align_size, rows), (counts, x[:, :0])


def _pad_bwd(verb, align_size, rows, residuals, grad):  # type: ignore[no-untyped-def]
    counts, like = residuals
    back = _unpad_op if verb == "pad" else _pad_op
    return back(grad, counts, align_size, num_out_tokens=like.shape[0]), None


_pad.defvjp(_pad_fwd, _pad_bwd)


@documented(fp8moe.swiglu, "h", "probs")
def swiglu(
    h: Any,
    probs: Any = None,
    *,
    activation: Activation = SWIGLU,
) -> Any:
    return _swiglu(*jax_calls.vary_alike(h, probs), activation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _swiglu(h, probs, activation):  # type: ignore[no-untyped-def]
    return _swiglu_op(h, probs, activation=activation)


def _swiglu_fwd(h, probs, activation):  # type: ignore[no-untyped-def]
    return _swiglu(h, probs, activation), (h, probs)


def _swiglu_bwd(activation, residuals, grad):  # type: ignore[no-untyped-def]
    h, probs = residuals
    grads = swiglu_backward(grad, h, probs, activation=activation)
    return grads.dh, None if probs is None else grads.dprobs.astype(probs.dtype)


_swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)


@documented(fp8moe.route, "logits")
def route(
    logits: Any,
    config: RouterConfig,
    *,
    expert_bias: Any = None,
    num_sequences: int | None = None,
    padding_mask: Any = None,
) -> Routed:
    return _route(*jax_calls.vary_alike(logits, expert_bias, padding_mask), config, num_sequences)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _route(logits, expert_bias, padding_mask, config, num_sequences):  # type: ignore[no-untyped-def]
    options = {"expert_bias": expert_bias, "padding_mask": padding_mask}
    return _route_op(logits, config, num_sequences=num_sequences, **options)


def _route_fwd(logits, expert_bias, padding_mask, config, num_sequences):  # type: ignore[no-untyped-def]
    routed = _route(logits, expert_bias, padding_mask, config, num_sequences)
    return routed, (logits, expert_bias, padding_mask, routed.topk_ids, routed.tokens_per_expert)


def _route_bwd(config, num_sequences, residuals, grads):  # type: ignore[no-untyped-def]
    logits, expert_bias, padding_mask, ids, counts = residuals
    losses = {"padding_mask": padding_mask}
    if counts is not None:
        losses |= {"grad_aux_loss": grads.aux_loss, "grad_z_loss": grads.z_loss, "tokens_per_expert": counts}
    grad = route_backward(grads.topk_probs, logits, ids, config, **losses)
    # the bias changes only the choice of experts, so its gradient is zero
    return grad, None if expert_bias is None else jax.numpy.zeros_like(expert_bias), None


_route.defvjp(_route_fwd, _route_bwd)


# ---------------------------------------------------------------- arguments of a layer


def of_tokens(x: Any, ids: Any, probs: Any) -> list[Any]:
    """ids and probs as [T, k]. They have x's leading dimensions, or one for all tokens."""
    require_arrays(x=x, topk_ids=ids, topk_probs=probs)
    leading = x.shape[:-1]
    for name, a in (("topk_ids", ids), ("topk_probs", probs)):
        if not a.ndim or a.shape[:-1] not in (leading, (math.prod(leading),)):
            wanted = ", ".join(map(str, (*leading, "k")))
            raise ValueError(f"{name}: got shape {list(a.shape)}; wanted [{wanted}], for x {list(x.shape)}")
    return [as_matrix(a) for a in (ids, probs)]


def require_arrays(**values: Any) -> None:
    for name, a in values.items():
        if not isinstance(a, (jax.Array, np.ndarray)):
            raise no_jax_array(name, a)


def _is_of_jax(x: Any) -> bool:
    """Whether JAX takes an object for an array."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype.kind in "biufcV"  # V: of ml_dtypes
    return isinstance(x, (jax.Array, jax.core.Tracer, bool, float)) or (
        isinstance(x, int) and -(2**31) <= x < 2**31
    )


def no_jax_array(name: str, x: Any) -> TypeError:
    kind = f"{type(x).__module__}.{type(x).__qualname__}"
    return TypeError(f"{name}: got {kind}; wanted an array of JAX or NumPy; pass jax.numpy.asarray({name})")


def as_matrix(a: Any) -> Any:
    """[..., n] as [m, n]; the number of rows is not left to `reshape`, which cannot find it if n is 0."""
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
