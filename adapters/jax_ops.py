"""The public operations for JAX, eagerly and inside ``jax.jit``, with gradients.

Names and arguments are those of `fp8moe`; records are pytrees. What is traced becomes one custom call an
operation (`fp8moe.adapters.jax_calls`): on CUDA its kernels run on XLA's stream, in XLA's memory, temporaries
included. JAX's persistent compilation cache keeps such programs, and ``jax.export.export(function,
disabled_checks=jax_ops.EXPORT_CHECKS)`` takes them; who loads one imports this module first. Shapes are
static: a plan has its static bound, and nothing looks at values. An array to add to (``out``, ``dw13``,
``dw2``) is not changed, the result is: XLA gives it the same memory where nobody needs the old one. An FP8
tensor never crosses an autodiff border: `moe_ffn` holds the whole FP8 segment in one ``custom_vjp``, bfloat16
(or float32) at both edges.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

try:
    import jax
    import jax.export
    import jax.numpy as jnp

    if jax.__version_info__ < (0, 10):
        raise ImportError(f"this is jax {jax.__version__}")
except ImportError as error:
    raise ImportError(
        f"fp8moe.adapters.jax_ops needs jax 0.10 or later ({error}): pip install 'jax>=0.10'"
    ) from None

import fp8moe
from fp8moe import Routed, RouterConfig, checks
from fp8moe.activation import SWIGLU, Activation
from fp8moe.adapters import jax_calls
from fp8moe.dispatch import Function
from fp8moe.docstrings import differentiable_in, docstring_of
from fp8moe.formats import BFLOAT16
from fp8moe.grouped_gemm import BACKENDS, check_limit
from fp8moe.moe import RECIPES, Saved
from fp8moe.record_trees import arrays_in, field_names, is_metadata
from fp8moe.records import (
    MoEGrads,
    PermutationPlan,
    Permuted,
    Quantized,
    QuantTensor,
    SortedChunks,
)

__all__ = [
    "dequantize",
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "moe_backward",
    "moe_ffn",
    "moe_forward",
    "pad",
    "permute",
    "permute_and_pad",
    "permute_backward",
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
    "unpad",
    "unpermute",
    "unpermute_backward",
]

WIDTH = 128  # of a block of FP8 weights
#: ``disabled_checks`` of ``jax.export.export``, which knows no custom calls but its own
EXPORT_CHECKS = tuple(map(jax.export.DisabledSafetyCheck.custom_call, jax_calls.TARGETS))

# ---------------------------------------------------------------- records as pytrees


def _flatten(record: Any) -> tuple[list[Any], Any]:
    """(its arrays and records, what is static)."""
    values = [(n, getattr(record, n)) for n in field_names(type(record)) or ()]
    static = tuple((n, v) for n, v in values if is_metadata(v))
    dynamic = [(n, v) for n, v in values if not is_metadata(v)]
    return [v for _, v in dynamic], (tuple(n for n, _ in dynamic), static)


def _unflatten(kind: type, structure: Any, children: Any) -> Any:
    names, static = structure
    record: Any = object.__new__(kind)
    record.__dict__.update(dict(static), **dict(zip(names, children, strict=True)))
    return record


for _kind in jax_calls.RECORDS:
    jax.tree_util.register_pytree_node(_kind, _flatten, functools.partial(_unflatten, _kind))

# ---------------------------------------------------------------- tracing


def traceable(function: Function) -> Function:
    """A public function, or one that calls several, that also takes traced arrays: one step of the jitted
    program, which allocates nothing of its own."""
    parameters = inspect.signature(function)
    changed = {"out", "dw13", "dw2"} & set(parameters.parameters)  # arguments that are added to, in place
    name = jax_calls.name_function(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        leaves = [a for v in (*args, *options.values()) for a in arrays_in(v)]
        in_place: Any = ()
        if changed:
            given = parameters.bind(*args, **options).arguments
            arrays = (a for name in changed for a in arrays_in(given.get(name)))
            in_place = [a for a in arrays if isinstance(a, jax.Array)]
        if in_place or any(isinstance(a, jax.core.Tracer) for a in leaves):
            return jax_calls.call(name, args, options, leaves, set(map(id, in_place)))
        return function(*args, **options)

    note = "One step of the program inside ``jax.jit``, at shapes that are known then. It has no gradient."
    if changed:
        note += (
            " What it adds to is not changed: the result is, in the same memory where nobody needs the old."
        )
    call.__doc__ = docstring_of(function, "jax.Array", note)
    return call  # type: ignore[return-value]


def documented(core: Any, *differentiable: str) -> Callable[[Function], Function]:
    """The docstring of a function of the core for one that has gradients."""

    def document(function: Function) -> Function:
        note = f"{differentiable_in(differentiable)}; inside ``jax.jit`` one step of the program."
        function.__doc__ = docstring_of(core, "jax.Array", note)
        return function

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
    options = (("fill_padding", fill_padding), ("zero_unweighted", zero_unweighted))
    of_rows: dict[str, Any] = {**dict(options), "layout": layout}
    if layout != "compact" and not isinstance(x, QuantTensor):
        return _permute_op(x, plan, probs, **of_rows)  # which says what has such a layout
    if not may_need_grad(x) and isinstance(probs, jax.core.Tracer):
        _, moved = _permute(no_columns(probs), probs, plan, options)
        weights = jax.lax.stop_gradient(probs) if zero_unweighted else None
        if isinstance(x, QuantTensor):
            data = _permute_op(x, plan, weights, **of_rows).data
        else:
            data, _ = _permute(x, weights, plan, options)
        return Permuted(data, moved, plan)
    if isinstance(x, QuantTensor):
        return _permute_op(x, plan, probs, **of_rows)
    return Permuted(*_permute(x, probs, plan, options), plan)


def may_need_grad(x: Any) -> bool:
    """Whether rows are of a kind that has a gradient. Codes are not: their probabilities, which may have one,
    move apart from them, beside rows of no columns."""
    return not isinstance(x, QuantTensor) and x.dtype in checks.FLOATS


def no_columns(probs: Any) -> Any:
    return jnp.zeros((probs.shape[0], 0), probs.dtype)


def refuse_codes(grad: Any) -> None:
    """Float8 rows have a cotangent in JAX, of their own dtype."""
    if grad.dtype not in checks.FLOATS:
        raise TypeError(
            f"x: got {grad.dtype} rows that are differentiated; wanted bfloat16, float16, float32 or float64 "
            "ones; pass jax.lax.stop_gradient(x)"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _permute(x: Any, probs: Any, plan: PermutationPlan, options: Any) -> tuple[Any, Any]:
    moved = _permute_op(x, plan, probs, **dict(options))
    return moved.data, moved.probs


def _permute_fwd(x, probs, plan, options):  # type: ignore[no-untyped-def]
    return _permute(x, probs, plan, options), (plan, probs)


def _permute_bwd(options, kept, grads):  # type: ignore[no-untyped-def]
    plan, probs = kept
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
        plan = plan_topk(routing_map, num_experts, align_size=align_size, num_out_tokens=num_out_tokens)
    return permute(x, plan, probs, fill_padding=fill_padding, layout=layout)


@documented(fp8moe.unpermute, "x", "merging_probs")
def unpermute(x: Any, plan: PermutationPlan, merging_probs: Any = None) -> Any:
    if isinstance(x, QuantTensor):
        return _unpermute_op(x, plan, merging_probs)
    return _unpermute(x, merging_probs, plan)


@jax.custom_vjp
def _unpermute(x: Any, merging_probs: Any, plan: PermutationPlan) -> Any:
    return _unpermute_op(x, plan, merging_probs)


def _unpermute_fwd(x, merging_probs, plan):  # type: ignore[no-untyped-def]
    return _unpermute(x, merging_probs, plan), (None if merging_probs is None else x, merging_probs, plan)


def _unpermute_bwd(kept, grad):  # type: ignore[no-untyped-def]
    x, probs, plan = kept
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


def _sort_bwd(options, num_out_tokens, kept, grads):  # type: ignore[no-untyped-def]
    sizes, indices, probs, like = kept
    refuse_codes(grads.data)
    dprobs = None if probs is None else grads.probs
    dx, dprobs = sort_chunks_backward(
        grads.data, sizes, indices, dprobs, num_tokens=like.shape[0], **dict(options)
    )
    return dx, None if probs is None else dprobs.astype(probs.dtype), None, None


_sort.defvjp(_sort_fwd, _sort_bwd)


@documented(fp8moe.pad, "x")
def pad(x: Any, tokens_per_expert: Any, align_size: int, *, num_out_tokens: int | None = None) -> Any:
    return _pad(x, tokens_per_expert, "pad", align_size, num_out_tokens)


@documented(fp8moe.unpad, "x")
def unpad(x: Any, tokens_per_expert: Any, align_size: int, *, num_out_tokens: int | None = None) -> Any:
    return _pad(x, tokens_per_expert, "unpad", align_size, num_out_tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _pad(x, counts, verb, align_size, rows):  # type: ignore[no-untyped-def]
    return (_pad_op if verb == "pad" else _unpad_op)(x, counts, align_size, num_out_tokens=rows)


def _pad_fwd(x, counts, verb, align_size, rows):  # type: ignore[no-untyped-def]
    return _pad(x, counts, verb, align_size, rows), (counts, x[:, :0])


def _pad_bwd(verb, align_size, rows, kept, grad):  # type: ignore[no-untyped-def]
    counts, like = kept
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
    return _swiglu(h, probs, activation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _swiglu(h, probs, activation):  # type: ignore[no-untyped-def]
    return _swiglu_op(h, probs, activation=activation)


def _swiglu_fwd(h, probs, activation):  # type: ignore[no-untyped-def]
    return _swiglu(h, probs, activation), (h, probs)


def _swiglu_bwd(activation, kept, grad):  # type: ignore[no-untyped-def]
    h, probs = kept
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
) -> Routed:
    return _route(logits, expert_bias, config, num_sequences)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _route(logits, expert_bias, config, num_sequences):  # type: ignore[no-untyped-def]
    return _route_op(logits, config, expert_bias=expert_bias, num_sequences=num_sequences)


def _route_fwd(logits, expert_bias, config, num_sequences):  # type: ignore[no-untyped-def]
    routed = _route(logits, expert_bias, config, num_sequences)
    return routed, (logits, expert_bias, routed.topk_ids, routed.tokens_per_expert)


def _route_bwd(config, num_sequences, kept, grads):  # type: ignore[no-untyped-def]
    logits, expert_bias, ids, counts = kept
    losses = {}
    if counts is not None:
        losses = {"grad_aux_loss": grads.aux_loss, "grad_z_loss": grads.z_loss, "tokens_per_expert": counts}
    grad = route_backward(grads.topk_probs, logits, ids, config, **losses)
    return grad, None if expert_bias is None else jax.numpy.zeros_like(
        expert_bias
    )  # it decides a choice only


_route.defvjp(_route_fwd, _route_bwd)


def moe_ffn(
    x: Any,
    w13: Any,
    w2: Any,
    topk_ids: Any,
    topk_probs: Any,
    *,
    recipe: str,
    recompute: str | None = None,
    activation: Activation = SWIGLU,
    transposed: bool = False,
    token_sharding: jax.sharding.NamedSharding | None = None,
    backend: str | None = None,
    num_sms: int | None = None,
) -> Any:
    """The experts of a layer in any floats and layouts, with gradients: `fp8moe.moe_forward`.

    Parameters
    ----------
    x : jax.Array, floating point, [..., H]
        The FP8 recipes multiply it as bfloat16, "bf16" in its own dtype.
    w13 : jax.Array, tuple of two, or Quantized
        [E, 2F, H], gates before ups, or the two apart, [E, F, H] each. Any float, float32 masters too; or,
        for the FP8 recipes, what `quantize_weights` returned, of weights in any layout; it has no gradient.
    w2 : jax.Array or Quantized
        [E, H, F].
    topk_ids : jax.Array, int32 or int64, [..., k]
        Below 0, or E and more, for no expert.
    topk_probs : jax.Array, floating point, [..., k]
        Factors of the experts' results.
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        The precision.
    recompute : None or "moe_expert"
        As in `fp8moe.moe_forward`.
    activation : Activation
        Between the two products.
    transposed : bool
        Weights come as ``jax.lax.ragged_dot`` takes them, as MaxText's and Transformer Engine's layers have
        them: w13 [E, H, 2F] or (wi_0, wi_1) [E, H, F] each, and w2, their wo, [E, F, H].
    token_sharding : NamedSharding or None
        How x's leading dimensions are spread over the devices of a mesh, in a program that XLA partitions:
        each device computes its own tokens, by weights that XLA gathers, and their gradients are summed. Not
        inside ``shard_map``, where a device sees nothing but its own arrays.
    backend : "wgmma", "mma", "cublas", "plain" or None
        By which kernels all products are made on CUDA, the backward's too, as `fp8moe.grouped_gemm` takes it;
        None: the fastest. "cublas" synchronises, and is slow inside ``jax.jit``.
    num_sms : int or None
        How many of the GPU's multiprocessors all products may use at most, as of `fp8moe.moe_forward`.

    Returns
    -------
    jax.Array, [..., H]
        In x's dtype. Differentiable in x, w13, w2 and topk_probs, in their dtypes.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit each other; for a program that XLA partitions, without token_sharding;
        for a backend or num_sms on the CPU. What a device's products cannot be made by is known where they
        are launched: inside ``jax.jit`` that is an error of XLA, with the ValueError's text.

    Notes
    -----
    A (128, 128)-blocked quantise writes both orientations from one read, gates and ups into one array of
    codes, and zeros up to the next multiple of 128 where F is none: the FP8 recipes take all these weights
    without a copy. "bf16" transposes and joins the weights themselves.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from fp8moe.adapters import jax_ops
    >>> x, w13, w2 = jnp.ones((1, 1)), jnp.array([[[100.0], [2.0]]]), jnp.array([[[1.0]]])
    >>> ids, probs = jnp.zeros((1, 1), int), jnp.full((1, 1), 0.5)
    >>> layer = lambda x, w2: jax_ops.moe_ffn(x, w13, w2, ids, probs, recipe="bf16").sum()
    >>> y, (_, dw2) = jax.jit(jax.value_and_grad(layer, argnums=(0, 1)))(x, w2)
    >>> float(y), float(dw2[0, 0, 0])
    (100.0, 100.0)
    """
    checks.choice("recipe", recipe, RECIPES)
    checks.choice("backend", backend, BACKENDS)
    layer = _Layer(recipe, recompute, activation, transposed, backend, check_limit(num_sms))
    if token_sharding is None:
        return _any_floats(x, w13, w2, topk_ids, topk_probs, layer)
    tokens, everywhere = token_sharding.spec, jax.sharding.PartitionSpec()
    if len(tokens) >= x.ndim:
        raise ValueError(
            f"token_sharding: got {tokens} for x {list(x.shape)}; wanted the sharding of its leading "
            "dimensions alone, since all of a token's features are multiplied together"
        )
    mesh, specs = token_sharding.mesh, (tokens, everywhere, everywhere, tokens, tokens)
    arrays = x, w13, w2, topk_ids, topk_probs
    if jax.sharding.AxisType.Explicit in mesh.axis_types:  # which nothing but this gathers
        arrays = tuple(
            jax.tree.map(lambda a, s=spec: jax.reshard(a, jax.sharding.NamedSharding(mesh, s)), array)
            for array, spec in zip(arrays, specs, strict=True)
        )
    of_a_device = functools.partial(_any_floats, layer=layer)
    run = jax.shard_map(of_a_device, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    return run(*arrays)


class _Layer(NamedTuple):
    """What is static of a layer."""

    recipe: str
    recompute: str | None
    activation: Activation
    transposed: bool
    backend: str | None
    num_sms: int | None


def _any_floats(x: Any, w13: Any, w2: Any, ids: Any, probs: Any, layer: _Layer) -> Any:
    rows, *weights = operands(x, w13, w2, layer.recipe, layer.transposed)
    layer = layer._replace(transposed=layer.transposed and layer.recipe != "bf16")
    ids, probs = (a.reshape(-1, a.shape[-1]) for a in (ids, probs))
    return _moe(rows, *weights, probs, ids, layer).astype(x.dtype).reshape(x.shape)


def operands(x: Any, w13: Any, w2: Any, recipe: str, transposed: bool) -> tuple[Any, Any, Any]:
    """x [T, H], w13 and w2 in the dtypes in which ``recipe`` takes them, with JAX's gradients; for "bf16" w13
    is [E, 2F, H] and w2 [E, H, F] then."""
    parts = w13 if isinstance(w13, tuple) else (w13,)
    for name, a in [("x", x), *(("w13", w) for w in parts), ("w2", w2)]:
        if isinstance(a, Quantized):
            if isinstance(w13, tuple) and name == "w13":
                raise TypeError("w13: got a tuple of Quantized; wanted quantize_weights((gates, ups), ...)")
            if recipe == "bf16":
                raise TypeError(f'{name}: got quantised weights; wanted an array for recipe "bf16"')
        elif a.dtype not in checks.FLOATS:
            raise TypeError(f"{name}: got dtype {a.dtype}; wanted a floating-point one")
    if isinstance(w13, tuple) and (len(w13) != 2 or w13[0].shape != w13[1].shape):
        raise ValueError(
            f"w13: got a tuple of shapes {[list(w.shape) for w in w13]}; wanted gates and ups, two arrays of "
            "one shape"
        )
    rows = x.reshape(-1, x.shape[-1])
    if recipe != "bf16":
        return rows.astype(jnp.bfloat16), w13, w2
    gate_up = jnp.concatenate(parts, 2 if transposed else 1) if len(parts) > 1 else w13
    w13, w2 = (w.astype(x.dtype) for w in (gate_up, w2))
    return rows, *(w.swapaxes(1, 2) if transposed else w for w in (w13, w2))


def multiplied(w13: Any, w2: Any, recipe: str, transposed: bool) -> tuple[Any, Any]:
    """Of `operands`' weights what `fp8moe.moe_forward` takes."""
    apart, ffn = isinstance(w13, tuple), _ffn(w13, w2, transposed)
    if recipe == "bf16" or ffn is None or not (apart or transposed or ffn % WIDTH):
        return w13, w2
    whole = ffn + -ffn % WIDTH
    if _is_float(w13):
        w13 = quantize_weights(w13, parts=1 if apart else 2, rows=whole, transposed=transposed)
    if _is_float(w2):
        w2 = quantize_weights(w2, columns=whole, transposed=transposed)
    return w13, w2


def _is_float(w: Any) -> bool:
    return not isinstance(w, Quantized)


def _ffn(w13: Any, w2: Any, transposed: bool) -> int | None:
    """F of weights that are floats; None where there are none."""
    if _is_float(w2):
        return int(w2.shape[1 if transposed else 2])
    if isinstance(w13, tuple):
        return int(w13[0].shape[2 if transposed else 1])
    return int(w13.shape[2 if transposed else 1]) // 2 if _is_float(w13) else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _moe(x, w13, w2, probs, ids, layer):  # type: ignore[no-untyped-def]
    return _moe_fwd(x, w13, w2, probs, ids, layer, gradients=())[0]


def _moe_fwd(x, w13, w2, probs, ids, layer, gradients=None):  # type: ignore[no-untyped-def]
    y, saved = moe_forward(
        x,
        *multiplied(w13, w2, layer.recipe, layer.transposed),
        ids,
        probs,
        recipe=layer.recipe,
        recompute=layer.recompute,
        activation=layer.activation,
        gradients=wanted_gradients(w13, w2) if gradients is None else gradients,
        backend=layer.backend,
        num_sms=layer.num_sms,
    )
    return y, (saved, like_weights(w13, w2), probs[:0])


def _moe_bwd(layer, kept, dy):  # type: ignore[no-untyped-def]
    saved, like, probs = kept
    grads = moe_backward(saved, dy, **backward_options(saved, like, layer.transposed))
    return grads.dx, *of_weights(grads, like, layer.transposed), grads.dprobs.astype(probs.dtype), None


_moe.defvjp(_moe_fwd, _moe_bwd)


def wanted_gradients(w13: Any, w2: Any) -> tuple[str, ...]:
    """Those of arrays: quantised weights have none."""
    return "dx", "dprobs", *(n for n, w in {"dw13": w13, "dw2": w2}.items() if _is_float(w))


def like_weights(*weights: Any) -> list[Any]:
    """What a backward needs of weights to give `of_weights`: their dtypes and widths, or that they are
    quantised."""
    return [jax.tree.map(lambda a: a[:0], w) if _is_float(w) else w for w in weights]


def backward_options(saved: Saved, like: list[Any], transposed: bool) -> dict[str, Any]:
    """What `moe_backward` takes for gradients of the weights' own widths, bfloat16 at once where all are: of
    "fp8_flow" gates and ups apart where so the weights are, or were filled up with zeros."""
    ffn = _ffn(like[0], like[1], transposed)
    padded = None if ffn is None or ffn % WIDTH == 0 else ffn
    apart = saved.recipe == "fp8_flow" and (padded is not None or isinstance(like[0], tuple))
    whole = all(a.dtype == BFLOAT16 for a in jax.tree.leaves(like))
    return {
        "dw13": (None, None) if apart else None,
        "dtype": "bfloat16" if whole else "float32",
        "gradients": wanted_gradients(*like),
        "ffn": padded if apart else None,
    }


def of_weights(grads: MoEGrads, like: list[Any], transposed: bool) -> list[Any]:
    """Weights' gradients in their dtypes and layouts, none for quantised ones."""
    (w13, w2), (dw13, dw2) = like, (grads.dw13, grads.dw2)
    ffn = _ffn(w13, w2, transposed)
    if _is_float(w2):
        dw2 = _in_layout(dw2[:, :, :ffn], w2, transposed)
    if isinstance(w13, tuple):
        halves = dw13 if isinstance(dw13, tuple) else jnp.split(dw13, 2, 1)
        dw13 = tuple(_in_layout(half[:, :ffn], w, transposed) for half, w in zip(halves, w13, strict=True))
    elif _is_float(w13):
        if not isinstance(dw13, tuple) and dw13.shape[1] > w13.shape[2 if transposed else 1]:
            dw13 = jnp.split(dw13, 2, 1)  # each half has zeros beyond F
        if not isinstance(dw13, jax.Array):
            dw13 = jnp.concatenate([half[:, :ffn] for half in dw13], 1)
        dw13 = _in_layout(dw13, w13, transposed)
    return [dw if _is_float(w) else None for w, dw in ((w13, dw13), (w2, dw2))]


def _in_layout(grad: Any, like: Any, transposed: bool) -> Any:
    return (grad.swapaxes(1, 2) if transposed else grad).astype(like.dtype)
