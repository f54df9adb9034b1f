"""The expert layer in JAX, eagerly and inside ``jax.jit``: on the arrays of one device, on sharded tokens, or
with the experts distributed over the devices of a mesh axis.

The layer is one ``custom_vjp`` with bfloat16 (or float32) inputs and outputs, so the FP8 tensors between are
never inputs or outputs of a differentiated function. Shapes are static.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Unpack

from fp8moe.adapters import needs

with needs("jax"):
    import jax
import jax.numpy as jnp
import numpy as np

from fp8moe.activation import SWIGLU, Activation
from fp8moe.adapters.jax import calls as jax_calls
from fp8moe.adapters.jax import expert_parallel
from fp8moe.adapters.jax import ops as jax_ops
from fp8moe.formats import BFLOAT16, round_up
from fp8moe.layer.options import LayerArguments, LayerOptions, options_of
from fp8moe.records import MoEGrads, Quantized, QuantTensor
from fp8moe.runtime import checks

__all__ = ["moe_experts"]


def moe_experts(
    x: Any,
    w13: Any,
    w2: Any,
    topk_ids: Any,
    topk_probs: Any,
    *,
    activation: Activation = SWIGLU,
    transposed: bool = False,
    token_sharding: jax.sharding.NamedSharding | None = None,
    axis_name: str | None = None,
    capacity: int | None = None,
    num_out_tokens: int | None = None,
    **options: Unpack[LayerArguments],
) -> Any:
    """Compute the experts of a layer for any float dtypes and weight layouts, with gradients.

    Parameters
    ----------
    x : jax.Array, floating point, [..., H]
        Tokens. The FP8 recipes multiply them as bfloat16, "bf16" in their own dtype.
    w13 : jax.Array, tuple of two, or Quantized
        [E, 2F, H], gates before ups, or a tuple of the two, [E, F, H] each; [E, F, H] for an activation
        without gates. bfloat16, float16 or float32, such as master weights; for "bf16" also float64. Or, for
        the FP8 recipes, the result of `quantize_weights`, for weights of any layout; it has no gradient.
    w2 : jax.Array or Quantized
        [E, H, F]. As ``w13``.
    topk_ids : jax.Array, int32 or int64, [..., k]
        Global expert ids; ids below 0 or from E on mean no expert.
    topk_probs : jax.Array, floating point, [..., k]
        Factors of the experts' outputs.
    activation : Activation
        Activation between the two GEMMs.
    transposed : bool
        Whether the weights have the layout of ``jax.lax.ragged_dot``, as in MaxText's and Transformer
        Engine's layers: w13 [E, H, 2F] or (wi_0, wi_1) [E, H, F] each, and w2, their wo, [E, F, H].
    token_sharding : NamedSharding or None
        Sharding of x's leading dimensions over the devices of a mesh, in a program that XLA partitions: each
        device computes its own tokens, with weights that XLA gathers, and the weight gradients are summed
        over devices. Not allowed inside ``shard_map``, where a device has access to its own arrays only.
    axis_name : str or None
        Expert parallelism, inside ``jax.shard_map`` with any ``check_vma``: the name of the mesh axis over
        whose W devices the experts are distributed. w13 and w2 are then those of this device's E / W experts,
        and x this device's T tokens.
    capacity : int or None
        With ``axis_name``: maximum number of rows from one device to another; tokens beyond it are dropped,
        as if their ids for that device were negative. None: T, which is always sufficient. Every device
        receives W * capacity rows.
    num_out_tokens : int or None
        With ``axis_name``: rows of the device's own permutation plan (`fp8moe.plan_topk`); overflow is
        dropped. None: the static bound, sufficient for any routing.
    **options : recipe, recompute, save, backend, num_sms, weight_copies
        As in `fp8moe.moe_forward`, with its defaults. ``backend`` and ``num_sms`` are also those of the
        backward; "cublas" synchronises, and is slow inside ``jax.jit``. With ``axis_name`` and "fp8_flow",
        rows are sent in FP8.

    Returns
    -------
    jax.Array, [..., H]
        The outputs in x's dtype. Differentiable in x, w13, w2 and topk_probs, with gradients in their dtypes.

    Raises
    ------
    TypeError, ValueError
        For arguments of the wrong dtype or inconsistent shapes; for a program that XLA partitions, without
        token_sharding; for a backend or num_sms on the CPU. Whether a device supports the requested backend
        is checked at the launch: inside ``jax.jit`` XLA raises an error with the ValueError's text.

    Notes
    -----
    The layer is `fp8moe.moe_forward`. The quantise operation for (128, 128) blocks reads weights of all these
    layouts once and writes both orientations, gates and ups into one array of codes, with zeros up to the
    next multiple of 128 if F is not one, so the FP8 recipes need no copy of the weights. "bf16" transposes
    and concatenates the weights.

    With ``axis_name`` a token is sent once to every device that has one of its experts
    (`fp8moe.expert_parallel.blocks`), by one ``all_to_all`` of bytes; a second one returns its sums.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fp8moe.jax
    >>> x, w13, w2 = jnp.ones((1, 1)), jnp.array([[[100.0], [2.0]]]), jnp.array([[[1.0]]])
    >>> ids, probs = jnp.zeros((1, 1), int), jnp.full((1, 1), 0.5)
    >>> layer = lambda x, w2: fp8moe.jax.moe_experts(x, w13, w2, ids, probs, recipe="bf16").sum()
    >>> y, (_, dw2) = jax.jit(jax.value_and_grad(layer, argnums=(0, 1)))(x, w2)
    >>> float(y), float(dw2[0, 0, 0])
    (100.0, 100.0)

    The experts of several devices:

    >>> mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("ep",)), jax.P("ep")
    >>> layer = lambda *arrays: fp8moe.jax.moe_experts(*arrays, axis_name="ep", recipe="bf16")
    >>> layer = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=spec, out_specs=spec))
    >>> layer(x, w13, w2, ids, probs).tolist()
    [[100.0]]
    """
    how = options_of("moe_experts", options, activation=activation)
    layer = _Layer(how, checks.flag("transposed", transposed), axis_name, capacity, num_out_tokens)
    names = axis_name if isinstance(axis_name, tuple) and axis_name else (axis_name,)
    if axis_name is not None and not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name: got {type(axis_name).__name__}; wanted the name of a mesh's axis")
    if not isinstance(token_sharding, (jax.sharding.NamedSharding, type(None))):
        raise TypeError(f"token_sharding: got {type(token_sharding).__name__}; wanted a NamedSharding")
    if axis_name is None:
        for name, value in (("capacity", capacity), ("num_out_tokens", num_out_tokens)):
            if value is not None:
                raise ValueError(f"{name}: got {value} without axis_name; wanted None, or the axis, too")
    elif token_sharding is not None:
        raise ValueError(
            f"token_sharding: got {token_sharding.spec} with axis_name={axis_name!r}; wanted one of them: "
            "the sharding in a program that XLA partitions, or the axis inside jax.shard_map"
        )
    if token_sharding is None:
        return _moe_of_any_dtype(x, w13, w2, topk_ids, topk_probs, layer)
    jax_ops.require_arrays(x=x, topk_ids=topk_ids, topk_probs=topk_probs)
    tokens, everywhere = token_sharding.spec, jax.sharding.PartitionSpec()
    if len(tokens) >= x.ndim:
        raise ValueError(
            f"token_sharding: got {tokens} for x {list(x.shape)}; wanted the sharding of its leading "
            "dimensions only, because a product contracts over all features of a token"
        )
    mesh, specs = token_sharding.mesh, (tokens, everywhere, everywhere, tokens, tokens)
    arrays = x, w13, w2, topk_ids, topk_probs
    if jax.sharding.AxisType.Explicit in mesh.axis_types:  # only `reshard` gathers arrays of explicit axes
        arrays = tuple(
            jax.tree.map(lambda a, s=spec: jax.reshard(a, jax.sharding.NamedSharding(mesh, s)), array)
            for array, spec in zip(arrays, specs, strict=True)
        )
    device_layer = functools.partial(_moe_of_any_dtype, layer=layer)
    run = jax.shard_map(device_layer, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    return run(*arrays)


class _Layer(NamedTuple):
    """Static arguments of a layer: its options, and what only JAX's has."""

    options: LayerOptions
    transposed: bool
    axis: str | None
    capacity: int | None
    num_out_tokens: int | None


def _moe_of_any_dtype(x: Any, w13: Any, w2: Any, ids: Any, probs: Any, layer: _Layer) -> Any:
    rows, *weights = _operands(x, w13, w2, layer)
    # `_operands` has transposed weights that are not quantised
    layer = layer._replace(transposed=layer.transposed and layer.options.precision.quantizes)
    if layer.axis is not None:
        layer = layer._replace(capacity=_capacity(layer, rows.shape[0]))
    ids, probs = jax_ops.of_tokens(x, ids, probs)
    arrays = jax_calls.vary_alike(rows, *weights, probs, ids)
    return _moe(*arrays, layer).astype(x.dtype).reshape(x.shape)


def _capacity(layer: _Layer, tokens: int) -> int:
    if layer.capacity is None:
        return tokens
    capacity = checks.integer("capacity", layer.capacity, 0)
    if not 0 < capacity <= tokens:
        raise ValueError(f"capacity: got {capacity}; wanted 1 to the number of tokens, {tokens}")
    return capacity


def _operands(x: Any, w13: Any, w2: Any, layer: _Layer) -> tuple[Any, Any, Any]:
    """x [T, H], w13 and w2 in the dtypes that the recipe uses, with JAX's gradients; where it does not
    quantise, also with w13 as [E, 2F, H] and w2 as [E, H, F]."""
    recipe, activation, transposed = layer.options.precision, layer.options.activation, layer.transposed
    if isinstance(w13, list):
        fix = "tuple(w13)" if len(w13) == 2 else "jax.numpy.stack(w13)"
        raise TypeError(f"w13: got a list of {len(w13)}; wanted an array or a tuple of two; pass {fix}")
    if isinstance(w13, tuple) and not w13:
        raise TypeError("w13: got an empty tuple; wanted an array or a tuple of two")
    parts = w13 if isinstance(w13, tuple) else (w13,)
    for name, a in [("x", x), *(("w13", w) for w in parts), ("w2", w2)]:
        if isinstance(a, Quantized):
            if isinstance(w13, tuple) and name == "w13":
                raise TypeError("w13: got a tuple of Quantized; wanted quantize_weights((gates, ups), ...)")
            if not recipe.quantizes:
                raise TypeError(f'{name}: got quantised weights; wanted an array for recipe "{recipe.name}"')
        elif name != "x" and recipe.quantizes and isinstance(a, QuantTensor):
            raise TypeError(f"{name}: got a QuantTensor; wanted a Quantized; pass fp8moe.Quantized({name})")
        elif not isinstance(a, (jax.Array, np.ndarray)):
            raise jax_ops.no_jax_array(name, a)
        elif a.dtype not in checks.FLOATS:
            raise checks.not_values(name, a.dtype, f"{name}.astype('float32')")
        elif name != "x" and a.ndim != 3:
            raise ValueError(
                f"{name}: got shape {list(a.shape)}; wanted three dimensions, the first of experts"
            )
        elif not a.ndim:
            raise ValueError(f"{name}: got shape []; wanted [..., H]")
    if isinstance(w13, tuple) and (len(w13) != 2 or w13[0].shape != w13[1].shape):
        raise ValueError(
            f"w13: got a tuple of shapes {[list(w.shape) for w in w13]}; wanted gates and ups, two arrays of "
            "the same shape"
        )
    if isinstance(w13, tuple) and recipe.quantizes and w13[0].dtype != w13[1].dtype:
        raise TypeError(
            f"w13: got a tuple of {w13[0].dtype} and {w13[1].dtype}; wanted one dtype; pass both as one"
        )
    if isinstance(w13, tuple) and not activation.gated:
        raise ValueError(
            f"w13: got gates and ups for kind={activation.kind!r}, which has no gates; wanted one array"
        )
    if all(_is_float(w) and w.ndim == 3 for w in (*parts, w2)):
        # here, because widths that differ may be equal after padding
        given = [w.shape[2 if transposed else 1] for w in parts]
        ffn = int(w2.shape[1 if transposed else 2])
        stored = _other_layout(x, parts, w2, transposed, activation)
        if sum(given) != activation.columns(ffn):
            of_each = "F" if len(parts) > 1 or not activation.gated else "2F"
            raise ValueError(
                f"w13: got {of_each} = {given[0]} with F = {ffn} of w2; wanted "
                f"{of_each} = {activation.columns(ffn) // len(parts)}{stored}"
            )
        if stored and parts[0].shape[1 if transposed else 2] != x.shape[-1]:
            raise ValueError(f"w13: got shape {list(parts[0].shape)} for x {list(x.shape)}{stored}")
    rows = jax_ops.as_matrix(x)
    if recipe.quantizes:
        return rows.astype(jnp.bfloat16), w13, w2
    gate_up = jnp.concatenate(parts, 2 if transposed else 1) if len(parts) > 1 else w13
    w13, w2 = (w.astype(x.dtype) for w in (gate_up, w2))
    # NumPy's swapaxes would give a view that is not contiguous
    return rows, *(jnp.swapaxes(w, 1, 2) if transposed else w for w in (w13, w2))


def _other_layout(x: Any, parts: Any, w2: Any, transposed: bool, activation: Activation) -> str:
    """For errors: the option for weights that fit x in the other layout; "" if they do not."""
    hidden, (inner, outer) = x.shape[-1], (2, 1) if transposed else (1, 2)
    widths = sum(w.shape[outer] for w in parts), activation.columns(w2.shape[inner])
    if (
        any(n != hidden for n in (*(w.shape[inner] for w in parts), w2.shape[outer]))
        or widths[0] != widths[1]
    ):
        return ""
    return (
        f"; pass transposed={not transposed} for weights {'[E, out, in]' if transposed else '[E, in, out]'}"
    )


def _multiplied(w13: Any, w2: Any, layer: _Layer) -> tuple[Any, Any]:
    """The weights of `_operands` as `fp8moe.moe_forward` takes them, quantised if their layout requires
    it."""
    is_pair, ffn, recipe = isinstance(w13, tuple), _ffn(w13, w2, layer), layer.options.precision
    if not recipe.quantizes or ffn is None:
        return w13, w2
    if not (is_pair or layer.transposed or ffn % recipe.ffn_multiple):
        return w13, w2
    padded = round_up(ffn, recipe.ffn_multiple)
    how: Any = {"transposed": layer.transposed, "columnwise": layer.options.keeps_columnwise}
    if _is_float(w13):
        parts = 1 if is_pair or not layer.options.activation.gated else 2
        w13 = jax_ops.quantize_weights(w13, parts=parts, rows=padded, **how)
    if _is_float(w2):
        w2 = jax_ops.quantize_weights(w2, columns=padded, **how)
    return w13, w2


def _is_float(w: Any) -> bool:
    return not isinstance(w, Quantized)


def _ffn(w13: Any, w2: Any, layer: _Layer) -> int | None:
    """F of floating-point weights; None if both are quantised."""
    rows = 2 if layer.transposed else 1
    if _is_float(w2):
        return int(w2.shape[3 - rows])
    if isinstance(w13, tuple):
        return int(w13[0].shape[rows])
    return layer.options.activation.width(int(w13.shape[rows])) if _is_float(w13) else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _moe(x, w13, w2, probs, ids, layer):  # type: ignore[no-untyped-def]
    return _moe_fwd(x, w13, w2, probs, ids, layer, gradients=())[0]


def _moe_fwd(x, w13, w2, probs, ids, layer, gradients=None):  # type: ignore[no-untyped-def]
    arrays = x, *_multiplied(w13, w2, layer), ids, probs
    gradients = _wanted_gradients(w13, w2) if gradients is None else gradients
    if layer.axis is None:
        y, saved = jax_ops.moe_forward(*arrays, gradients=gradients, **vars(layer.options))
        blocks = None
    else:
        sizes = layer.capacity, layer.num_out_tokens
        y, saved, blocks = expert_parallel.forward(*arrays, layer.options, gradients, layer.axis, *sizes)
    return y, (saved, blocks, _like_weights(w13, w2), probs[:0])


def _moe_bwd(layer, residuals, dy):  # type: ignore[no-untyped-def]
    saved, blocks, like, probs = residuals
    options = _backward_options(like, layer)
    if layer.axis is None:
        grads = jax_ops.moe_backward(saved, dy, **options)
    else:
        grads = expert_parallel.backward(saved, blocks, dy, layer.axis, **options)
    return grads.dx, *_of_weights(grads, like, layer), grads.dprobs.astype(probs.dtype), None


_moe.defvjp(_moe_fwd, _moe_bwd)


def _wanted_gradients(w13: Any, w2: Any) -> tuple[str, ...]:
    """Gradients to compute; quantised weights have none."""
    return "dx", "dprobs", *(n for n, w in {"dw13": w13, "dw2": w2}.items() if _is_float(w))


def _like_weights(*weights: Any) -> list[Any]:
    """Placeholders for the weights in the backward, as `_of_weights` takes them: empty arrays of their dtypes
    and widths, also in the records of quantised weights."""
    return [jax.tree.map(lambda a: a[:0], w) for w in weights]


def _backward_options(like: list[Any], layer: _Layer) -> dict[str, Any]:
    """Options of `fp8moe.moe_backward` for weight gradients of the original widths, in bfloat16 if all
    weights are. With "fp8_flow", dw13 is a pair if the weights are a pair, or were padded and have gates."""
    ffn, recipe = _ffn(like[0], like[1], layer), layer.options.precision
    is_padded = ffn is not None and ffn % recipe.ffn_multiple and layer.options.activation.gated
    padded = ffn if is_padded else None
    is_pair = recipe.gradient_in_parts and (padded is not None or isinstance(like[0], tuple))
    all_bfloat16 = all(a.dtype == BFLOAT16 for a in jax.tree.leaves(like))
    return {
        "dw13": (None, None) if is_pair else None,
        "dtype": "bfloat16" if all_bfloat16 else "float32",
        "gradients": _wanted_gradients(*like),
        "ffn": padded if is_pair else None,
    }


def _of_weights(grads: MoEGrads, like: list[Any], layer: _Layer) -> list[Any]:
    """Weight gradients in the weights' dtypes and layouts, None for quantised weights."""
    (w13, w2), (dw13, dw2), transposed = like, (grads.dw13, grads.dw2), layer.transposed
    ffn = _ffn(w13, w2, layer)
    if _is_float(w2):
        dw2 = _in_layout(dw2[:, :, :ffn], w2, transposed)
    if isinstance(w13, tuple):
        halves = dw13 if isinstance(dw13, tuple) else jnp.split(dw13, 2, 1)
        dw13 = tuple(_in_layout(half[:, :ffn], w, transposed) for half, w in zip(halves, w13, strict=True))
    elif _is_float(w13):
        if not isinstance(dw13, tuple) and dw13.shape[1] > w13.shape[2 if transposed else 1]:
            dw13 = jnp.split(dw13, layer.options.activation.columns(1), 1)  # each half has zeros after F
        if not isinstance(dw13, jax.Array):
            dw13 = jnp.concatenate([half[:, :ffn] for half in dw13], 1)
        dw13 = _in_layout(dw13, w13, transposed)
    return [dw if _is_float(w) else None for w, dw in ((w13, dw13), (w2, dw2))]


def _in_layout(grad: Any, like: Any, transposed: bool) -> Any:
    return (grad.swapaxes(1, 2) if transposed else grad).astype(like.dtype)
