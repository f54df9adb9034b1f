"""The experts of a MoE layer as functions of tensors: the common basis of the adapters to other libraries.

They accept any floating-point dtype and strides, weights as pairs, and widths that are not multiples of 128,
and convert them to the operands of `fp8moe.adapters.torch.experts`. All conversions are torch operations, so
autograd and torch.compile handle them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives
from torch.nn.functional import pad

from fp8moe import Quantized, QuantTensor
from fp8moe.activation import SWIGLU, Activation, halves_of
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch.experts import FP8_BLOCK, check_backend, experts, main_grad_of
from fp8moe.adapters.torch.grouped import by_grouped_mm, rows_by_grouped_mm
from fp8moe.adapters.torch.halves import asked_for
from fp8moe.adapters.torch.library import differentiable, spec_of
from fp8moe.adapters.torch.operation import check_float, check_tensor, refuse_transforms
from fp8moe.expert_parallel.protocols import chunks_of
from fp8moe.layer.moe import experts_of
from fp8moe.layer.options import RECOMPUTE
from fp8moe.layer.recipes import GRADIENTS, RECIPES, RecipeName
from fp8moe.ops.grouped_gemm import BACKENDS, check_limit
from fp8moe.runtime import checks

__all__ = ["moe_experts", "moe_experts_permuted", "quantize_fp8_weights"]

# torch 2.13 renamed it and warns about the old name
_all_gather: Any = (
    getattr(_functional_collectives, "all_gather_single_autograd", None)
    or _functional_collectives.all_gather_tensor_autograd
)


def moe_experts(
    x: Tensor,
    w13: Tensor | Quantized | tuple[Tensor, Tensor],
    w2: Tensor | Quantized,
    topk_ids: Tensor,
    topk_probs: Tensor,
    *,
    recipe: RecipeName = "fp8_flow",
    recompute: str | None = None,
    activation: Activation = SWIGLU,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    comm: Any = None,
    fp8_weights: tuple[Quantized, Quantized] | None = None,
    backend: str | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """Compute the experts of a layer, with gradients for all arguments except the ids, eagerly and compiled.

    y[t] = sum over t's experts e of prob * (w2[e] @ act(w13[e] @ x[t] + bias13[e]) + bias2[e]).

    Parameters
    ----------
    x : Tensor, any floating-point dtype and strides, [..., H]
        Tokens. The FP8 recipes multiply them as bfloat16, "bf16" in their dtype or, under autocast, in
        autocast's.
    w13 : Tensor, [E, 2F, H], or tuple of two, [E, F, H] each, or Quantized
        Gates before ups, in one tensor or as a pair (w1, w3); [E, F, H] for an activation without a gate. Any
        strides, leaf tensors or not. bfloat16, float16 or float32, for "bf16" also float64; for the FP8
        recipes also the result of `fp8moe.quantize_weights`, which has no gradient. Gradients have the
        weights' dtype; w1 and w3 get separate gradients. If a weight has a ``main_grad``, the products add
        its gradient to that, provided they use the weight itself: if it is cast, concatenated or padded first
        ("bf16", "fp8_blockwise", ``bias13``), its gradient is returned as ``grad``. If F is not a multiple of
        128, the FP8 recipes pad the codes with zeros up to the next one. "fp8_flow" does not copy weights,
        not even pairs, padded or transposed ones; only the gradient of a padded w13 in one tensor is copied
        once. The other recipes concatenate pairs, and "fp8_blockwise" pads.
    w2 : Tensor or Quantized, [E, H, F]
        As ``w13``.
    topk_ids : Tensor, int32 or int64, [..., k]
        Global expert ids; ids below 0 or from E on mean no expert.
    topk_probs : Tensor, floating point, [..., k]
        Factors of the experts' outputs.
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        As in `fp8moe.moe_forward`.
    recompute : None or "moe_expert"
        As in `fp8moe.moe_forward`.
    activation : Activation
        Activation between the two products.
    bias13 : Tensor or None, floating point, [E, 2F]
        Bias of the first product, as in gpt-oss. It is appended to w13 as columns that multiply ones appended
        to x: in FP8 four columns, whose sum equals the bias to within 2^-16.
    bias2 : Tensor or None, floating point, [E, H]
        Bias of the second product, added by torch: in float32, for each row by itself.
    comm : Comm or None
        Communicator that sends rows between ranks (`fp8moe.expert_parallel`). w13 and w2 are then this rank's
        experts, and the ids are global. Compiled code remains one graph (``fullgraph=True``) with a
        `fp8moe.torch.ProcessGroup` or another Transport that has a ``handle``. bias2 is
        gathered from all ranks, which requires the attribute ``group``, a torch.distributed.ProcessGroup.
    fp8_weights : tuple of two Quantized, or None
        Result of `quantize_fp8_weights` for w13, w2 and bias13, used in the products. The caller guarantees
        that the weights have not changed since, so micro-batches can share one set. w13, w2 and bias13 get
        their gradients as usual.
    backend : "wgmma", "mma", "cublas", "plain" or None
        Kernels of all products, the backward's included, as described in `fp8moe.grouped_gemm` ("cublas"
        synchronises); None: the fastest. With "bf16", None may also select torch's grouped product where that
        is faster, and a name selects this library's kernels.
    num_sms : int or None
        Maximum number of SMs that each product may use, as in `fp8moe.moe_forward`, to leave the others to
        work on another stream. With "bf16" a number selects this library's kernels.

    Returns
    -------
    Tensor, [..., H]
        The outputs in x's dtype and shape.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype, shape or range, naming the argument; and, before any work, for a backend that does
        not support these products on x's device or a num_sms that it cannot respect.
    NotImplementedError
        Inside transforms of torch.func, and for a ``comm`` without the attributes that compiled code or bias2
        needs.

    Notes
    -----
    The computation is `fp8moe.moe_forward` and `fp8moe.moe_backward`, whose notes cite the sources of the
    recipes.

    Examples
    --------
    >>> import torch
    >>> import fp8moe.torch
    >>> x, w13, w2 = torch.ones(1, 1), torch.tensor([[[100.0], [2.0]]]), torch.tensor([[[1.0]]])
    >>> ids, probs = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), 0.5, requires_grad=True)
    >>> y = fp8moe.torch.moe_experts(x, w13, w2, ids, probs, recipe="bf16")
    >>> y.backward(torch.ones(1, 1))
    >>> y.item(), probs.grad.item()
    (100.0, 200.0)
    """
    product_options = bias13, bias2, fp8_weights, backend, num_sms
    options = _Options(recipe, recompute, activation, *product_options, comm=comm)
    return _moe_experts("moe_experts", x, w13, w2, topk_ids, topk_probs, options)


def moe_experts_permuted(
    x: Tensor,
    w13: Tensor | Quantized | tuple[Tensor, Tensor],
    w2: Tensor | Quantized,
    tokens_per_expert: Tensor,
    probs: Tensor,
    *,
    recipe: RecipeName = "fp8_flow",
    recompute: str | None = None,
    activation: Activation = SWIGLU,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    align_size: int = 1,
    fp8_weights: tuple[Quantized, Quantized] | None = None,
    backend: str | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """Compute `moe_experts` for rows that a dispatcher has permuted, and possibly padded.

    y[i] = probs[i] * (w2[e] @ act(w13[e] @ x[i] + bias13[e]) + bias2[e]) for row i of expert e. Nothing
    synchronises.

    Parameters
    ----------
    x : Tensor, any floating-point dtype and strides, [N, H]
        Rows of expert 0, then of expert 1, and so on; rows after the last expert's are ignored. FP8 rows have
        no gradient in torch; pass them to `fp8moe.moe_forward_permuted`.
    w13 : Tensor, [E, 2F, H], or tuple of two, [E, F, H] each, or Quantized
        As in `moe_experts`.
    w2 : Tensor or Quantized, [E, H, F]
        As in `moe_experts`.
    tokens_per_expert : Tensor, int32 or int64, [E]
        Number of rows of each expert, on x's device.
    probs : Tensor, floating point, [N]
        Factor of each row's output.
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        As in `moe_experts`.
    recompute : None or "moe_expert"
        As in `moe_experts`.
    activation : Activation
        As in `moe_experts`.
    bias13 : Tensor or None, floating point, [E, 2F]
        As in `moe_experts`.
    bias2 : Tensor or None, floating point, [E, H]
        As in `moe_experts`.
    align_size : int
        Each expert's rows in x are padded to a multiple of this number, with rows and probs of zeros;
        tokens_per_expert may include the padding or not. The FP8 recipes accept multiples of 128, with which
        they read x in place, and 1, with which they pad it in one additional pass.
    fp8_weights : tuple of two Quantized, or None
        As in `moe_experts`.
    backend : "wgmma", "mma", "cublas", "plain" or None
        As in `moe_experts`.
    num_sms : int or None
        As in `moe_experts`.

    Returns
    -------
    Tensor, [N, H]
        The outputs in x's dtype; zeros after the last expert's rows.

    Raises
    ------
    TypeError, ValueError
        As in `moe_experts`, and for a `fp8moe.QuantTensor`.
    NotImplementedError
        Inside transforms of torch.func.

    Examples
    --------
    >>> import torch
    >>> import fp8moe.torch
    >>> x, w13, w2 = torch.ones(2, 1), torch.tensor([[[100.0], [2.0]]]), torch.tensor([[[1.0]]])
    >>> rows = torch.tensor([2]), torch.tensor([0.5, 1.0])
    >>> fp8moe.torch.moe_experts_permuted(x, w13, w2, *rows, recipe="bf16").tolist()
    [[100.0], [200.0]]
    """
    if isinstance(x, QuantTensor):
        raise TypeError(
            "x: got a QuantTensor, which has no gradient in torch; wanted a tensor; pass it to "
            "fp8moe.moe_forward_permuted"
        )
    checks.integer("align_size", align_size, 1)
    product_options = bias13, bias2, fp8_weights, backend, num_sms
    options = _Options(recipe, recompute, activation, *product_options, align_size=align_size)
    return _moe_experts("moe_experts_permuted", x, w13, w2, tokens_per_expert, probs, options)


class _Options(NamedTuple):
    """Options of `moe_experts`, or with a nonzero align_size of `moe_experts_permuted`."""

    recipe: RecipeName
    recompute: str | None
    activation: Activation
    bias13: Tensor | None
    bias2: Tensor | None
    fp8_weights: tuple[Quantized, Quantized] | None
    backend: str | None
    num_sms: int | None
    comm: Any = None
    align_size: int = 0


def _moe_experts(
    name: str, x: Tensor, w13: Any, w2: Any, ids: Tensor, probs: Tensor, options: _Options
) -> Tensor:
    """`moe_experts` and `moe_experts_permuted`, which passes counts as ids."""
    refuse_transforms(name)
    checks.choice("recipe", options.recipe, RECIPES)
    checks.choice("recompute", options.recompute, RECOMPUTE)
    checks.choice("backend", options.backend, BACKENDS)
    check_limit(options.num_sms)
    check_float("x", x)
    check_tensor("tokens_per_expert" if options.align_size else "topk_ids", ids)
    check_float("probs" if options.align_size else "topk_probs", probs)
    device_type, dtype = x.device.type, torch.bfloat16 if options.recipe != "bf16" else x.dtype
    if not torch.is_autocast_enabled(device_type):
        return _experts_in_dtype(dtype, x, w13, w2, ids, probs, options)
    if options.recipe == "bf16":
        dtype = torch.get_autocast_dtype(device_type)
    # float16 autocast would reject concatenating bfloat16 weights with their biases, and would add biases in
    # float16
    with torch.autocast(device_type, enabled=False):
        return _experts_in_dtype(dtype, x, w13, w2, ids, probs, options)


def _experts_in_dtype(
    dtype: torch.dtype, x: Tensor, w13: Any, w2: Any, ids: Tensor, probs: Tensor, options: _Options
) -> Tensor:
    recipe, recompute, activation, bias13, bias2, fp8_weights, backend, num_sms, comm, align_size = options
    explicit, ffn = backend is not None or num_sms is not None, None
    checks.options("activation", activation, Activation)
    halves = halves_of(activation.kind)
    weights: list[Any] = _checked_weights(w13, w2, bias13, recipe, halves)
    num_experts = _check_sizes(x, weights, bias2)
    if align_size:
        checks.shape("tokens_per_expert", ids, (num_experts,))
    if recipe == "bf16":  # before a bias is appended, which would be rounded to the weights' dtype
        weights = [tuple(p.to(dtype) for p in w) if isinstance(w, tuple) else w.to(dtype) for w in weights]
    if explicit and not torch.compiler.is_compiling():
        _check_backend(x, weights, options, dtype)
    unchanged = recipe == "fp8_flow" and bias13 is None
    if not unchanged:
        weights = _joined_weights(weights, bias13, recipe, halves)
    elif (width := _ffn_of(weights[0], weights[1], halves)) is not None and width % FP8_BLOCK[1]:
        ffn = width
    if recipe == "bf16":
        if fp8_weights is not None:
            raise ValueError('fp8_weights: got some with recipe "bf16"; wanted None')
        weights = [w.contiguous() for w in weights]
    if fp8_weights is not None:
        _check_fp8_weights(fp8_weights, weights, halves)
    operands: Any = fp8_weights or weights
    if recipe != "bf16" and fp8_weights is None:
        operands = _quantized(weights, halves) if unchanged else [_quantized_weight(w) for w in weights]
    masters = [None if isinstance(w, Quantized) else w for w in weights]
    hidden = x.shape[-1]
    rows = x.reshape(-1, hidden).to(dtype).contiguous()
    if not align_size:
        for name, t in (("topk_ids", ids), ("topk_probs", probs)):
            if t.dim() < 2:
                checks.shape(name, t, (rows.shape[0], "k"))
            if t.dim() > 2 and t.shape[:-1] != x.shape[:-1]:  # for [T, k] the layer checks T
                wanted = ", ".join(map(str, (*x.shape[:-1], "k")))
                raise ValueError(
                    f"{name}: got shape {list(t.shape)}; wanted [{wanted}], for x {list(x.shape)}"
                )
        ids, probs = (t.flatten(0, -2) for t in (ids, probs))
    ids, probs = ids.contiguous(), probs.contiguous()
    if bias13 is not None:
        before, ones, after = _bias_columns(hidden, recipe)
        added = rows.new_ones(rows.shape[0], ones)
        rows = torch.cat((pad(rows, (0, before)), pad(added, (0, after))), dim=1)
    layer: dict[str, Any] = {"recompute": recompute, "activation": activation}
    layer |= {"align_size": align_size} if align_size else {"comm": comm}
    if bias2 is not None and comm is not None:
        _check_gathers_bias(comm)
        layer["announced"] = {"gathers_bias": True}
    if recipe == "bf16" and not explicit and _grouped_mm_takes(rows, weights[0], weights[1], comm):
        product = rows_by_grouped_mm if align_size else by_grouped_mm
        y = product(rows, weights[0], weights[1], ids, probs, **layer)
    else:
        layer |= {"recipe": recipe, "backend": backend, "num_sms": num_sms, "ffn": ffn}
        y = experts(rows, masters[0], masters[1], ids, probs, operands, **layer)
    if bias13 is not None:
        y = y[:, :hidden]
    if bias2 is not None:
        if comm is not None:  # after the experts' exchange, by whose header all ranks know that all have one
            bias2 = _all_gather(bias2.contiguous(), 0, comm.group)
        if align_size:
            ids, probs = _expert_of_rows(ids, rows.shape[0], align_size)[:, None], probs[:, None]
        biased = _with_biases(y, bias2, ids, probs)
        # rows of no expert: zeros times a NaN in their gradients would be a gradient of the bias
        y = torch.where(ids < bias2.shape[0], biased, y) if align_size else biased
    return y.to(x.dtype).reshape(x.shape)


def _check_backend(x: Tensor, weights: list[Any], options: _Options, dtype: torch.dtype) -> None:
    """Raises, before weights are quantised, for a backend that does not support the products."""
    (w13, w2), activation, hidden = weights, options.activation, x.shape[-1]
    ffn = _ffn_of(w13, w2, halves_of(activation.kind))
    if ffn is None:
        ffn = w2.rowwise.shape[2]
    if options.recipe != "fp8_flow" or options.bias13 is not None:  # as `_joined_weights` pads them
        ffn = ffn if options.recipe == "bf16" else _round_up_to_block(ffn)
    if options.bias13 is not None:
        hidden += sum(_bias_columns(hidden, options.recipe))
    first = w13[0] if isinstance(w13, tuple) else w13
    check_backend(
        x,
        options.backend,
        options.num_sms,
        recipe=options.recipe,
        activation=activation,
        dtype=str(dtype).removeprefix("torch."),
        experts=experts_of(first),
        hidden=hidden,
        ffn=ffn,
        gradients=GRADIENTS if torch.is_grad_enabled() else (),
    )


def _grouped_mm_takes(x: Tensor, w13: Tensor, w2: Tensor, comm: Any) -> bool:
    """Whether torch computes the products: for bfloat16 rows of multiples of 16 bytes, without a
    ``main_grad``."""
    if comm is not None and (torch.compiler.is_compiling() or chunks_of(comm) > 1):
        return False
    whole = all(w.shape[2] % 8 == 0 for w in (w13, w2))
    return x.dtype == torch.bfloat16 and whole and all(main_grad_of(w) is None for w in (w13, w2))


def _expert_of_rows(tokens_per_expert: Tensor, rows: int, align_size: int) -> Tensor:
    """[rows]: the expert of each row, E for rows after the last expert's."""
    ends = ((tokens_per_expert + (align_size - 1)) // align_size * align_size).cumsum(0)
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)


def _check_gathers_bias(comm: Any) -> None:
    """Biases of all ranks' experts are gathered; their gradient is the sum over ranks."""
    if getattr(comm, "group", None) is None:
        raise NotImplementedError(
            f"bias2: got one with a comm of {type(comm).__name__} without an attribute `group`; wanted its "
            "torch.distributed.ProcessGroup there, or no bias"
        )


class _WithBiases(torch.autograd.Function):
    """y [T, H] + the sum over a row's experts of prob * bias, in at least float32, rounded once to y's dtype.

    A row's y and gradients of probabilities depend on this row alone, which a matrix product of
    probabilities [T, E] and biases does not promise: BLAS chooses its order of sums by the number of rows.
    torch's bags of embeddings sum a row's entries in their order, and its gradient of weights is one dot
    product per entry.
    """

    @staticmethod
    def forward(ctx: Any, y: Any, bias2: Any, ids: Any, probs: Any) -> Any:
        ctx.save_for_backward(bias2, ids, probs)
        ctx.wide = torch.promote_types(y.dtype, torch.float32)
        named, experts, firsts = _bags(ids, bias2.shape[0])
        weights, biases = torch.where(named, probs, 0).to(ctx.wide).flatten(), bias2.to(ctx.wide).contiguous()
        sums, *_ = torch.embedding_bag(biases, experts, firsts, mode=_SUM, per_sample_weights=weights)
        return sums.add_(y).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        bias2, ids, probs = ctx.saved_tensors
        needs_y, needs_bias, _, needs_probs = asked_for(ctx)
        grad_bias = grad_probs = None
        if needs_bias:
            shares = _probs_by_expert(ids, probs, bias2.shape[0]).to(grad.dtype)
            with torch.autocast(grad.device.type, enabled=False):
                grad_bias = (shares.t() @ grad).to(bias2.dtype)
        if needs_probs:
            rows, biases = grad.to(ctx.wide).contiguous(), bias2.to(ctx.wide).contiguous()
            rest = -rows.shape[1] % 16  # BLAS's dot products depend on a row's place in a line of 64 bytes
            if rest:
                rows, biases = pad(rows, (0, rest)), pad(biases, (0, rest))
            named, experts, firsts = _bags(ids, bias2.shape[0])
            bags = torch.arange(ids.shape[0], device=ids.device, dtype=ids.dtype)
            bags = bags.repeat_interleave(ids.shape[1])
            dots = _weights_backward(rows, biases, experts, firsts, bags, _SUM)
            grad_probs = torch.where(named, dots.view(ids.shape), 0).to(probs.dtype)
        return grad if needs_y else None, grad_bias, None, grad_probs


_SUM = 0  # embedding_bag's mode
_weights_backward: Any = torch.ops.aten._embedding_bag_per_sample_weights_backward.default
_with_biases = differentiable(_WithBiases)


def _bags(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each of ids [T, k] is an expert's, [T * k] valid ids, and the place of each row's first."""
    named = (ids >= 0) & (ids < experts)
    firsts = torch.arange(ids.shape[0], device=ids.device, dtype=ids.dtype) * ids.shape[1]
    return named, torch.where(named, ids, 0).flatten(), firsts


def _probs_by_expert(ids: Tensor, probs: Tensor, experts: int) -> Tensor:
    """[T, E], at least float32: sum of a token's probabilities for each expert."""
    probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    valid = (ids >= 0) & (ids < experts)
    shares = probs.new_zeros(ids.shape[0], experts)
    return shares.scatter_add(1, torch.where(valid, ids, 0).long(), torch.where(valid, probs, 0))


def quantize_fp8_weights(
    w13: Tensor | tuple[Tensor, Tensor],
    w2: Tensor,
    bias13: Tensor | None = None,
    *,
    activation: Activation = SWIGLU,
    out: tuple[Quantized, Quantized] | None = None,
) -> tuple[Quantized, Quantized]:
    """Quantise weights for the ``fp8_weights`` argument of `moe_experts`, padded as it pads them.

    Parameters
    ----------
    w13 : Tensor, [E, 2F, H], or tuple of two, [E, F, H] each
        As in `moe_experts`.
    w2 : Tensor, [E, H, F]
        As in `moe_experts`.
    bias13 : Tensor or None, floating point, [E, 2F]
        As in `moe_experts`.
    activation : Activation
        Activation of the layer; determines whether w13 has gates.
    out : tuple of two Quantized, or None
        Result of an earlier call, to overwrite.

    Returns
    -------
    tuple of two Quantized
        Codes of w13 and of w2.

    Raises
    ------
    TypeError, ValueError
        As in `moe_experts`.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.torch import quantize_fp8_weights
    >>> w13, w2 = quantize_fp8_weights(torch.ones(4, 200, 256), torch.ones(4, 256, 100))
    >>> w13.rowwise.shape, w2.rowwise.shape
    ((4, 256, 256), (4, 256, 128))
    """
    checks.options("activation", activation, Activation)
    if out is not None and not (isinstance(out, tuple) and [type(o) for o in out] == [Quantized, Quantized]):
        raise TypeError(
            f"out: got {type(out).__name__}; wanted the two Quantized of an earlier call, or None"
        )
    halves = halves_of(activation.kind)
    weights = _checked_weights(w13, w2, bias13, "fp8_flow", halves)
    if bias13 is None:
        return _quantized(weights, halves, out)
    whole = _joined_weights(weights, bias13, "fp8_flow", halves)
    first, second = (
        _quantized_weight(w, target) for w, target in zip(whole, out or (None, None), strict=True)
    )
    return first, second


def _check_fp8_weights(fp8_weights: tuple[Quantized, Quantized], weights: list[Any], halves: int) -> None:
    """Raises if fp8_weights do not have the shapes that `_quantized` gives; otherwise only a backward would
    fail."""
    pair = isinstance(fp8_weights, (tuple, list))
    if not pair or len(fp8_weights) != 2 or not all(isinstance(w, Quantized) for w in fp8_weights):
        got = f"({', '.join(type(w).__name__ for w in fp8_weights)})" if pair else type(fp8_weights).__name__
        raise TypeError(f"fp8_weights: got {got}; wanted the two Quantized of quantize_fp8_weights")
    for name, codes, w in zip(("w13", "w2"), fp8_weights, weights, strict=True):
        if isinstance(w, Quantized):
            expected = tuple(w.columnwise.shape)
        elif name == "w13":
            first, parts = (w[0], 1) if isinstance(w, tuple) else (w, halves)
            rows = halves * _round_up_to_block(first.shape[1] // parts)
            expected = first.shape[0], rows, first.shape[2]
        else:
            expected = *w.shape[:2], _round_up_to_block(w.shape[2])
        checks.shape(f"fp8_weights of {name}", codes.columnwise, expected)


def _quantized_weight(w: Any, out: Quantized | None = None) -> Quantized:
    return w if isinstance(w, Quantized) else torch_ops.quantize_weights(w, out=out)


def _quantized(
    weights: list[Any], halves: int, out: tuple[Quantized, Quantized] | None = None
) -> tuple[Quantized, Quantized]:
    """FP8 codes of w13, or of the pair (w1, w3), and of w2, padded with zeros to a multiple of 128 of F."""
    (w13, w2), (out13, out2) = weights, out or (None, None)
    if isinstance(w13, tuple):
        w13 = torch_ops.quantize_weights(w13, out=out13, rows=_round_up_to_block(w13[0].shape[1]))
    elif isinstance(w13, Tensor):
        rows = _round_up_to_block(w13.shape[1] // halves)
        w13 = torch_ops.quantize_weights(w13, out=out13, parts=halves, rows=rows)
    if not isinstance(w2, Quantized):
        w2 = torch_ops.quantize_weights(w2, out=out2, columns=_round_up_to_block(w2.shape[2]))
    return w13, w2


def _round_up_to_block(width: int) -> int:
    return width + -width % FP8_BLOCK[1]


def _bias_columns(hidden: int, recipe: str) -> tuple[int, int, int]:
    """Numbers of zero, one and zero columns after x's. The ones are in a block of their own, whose scale they
    determine."""
    if recipe == "bf16":
        return 0, 1, 15 - hidden % 16
    return -hidden % FP8_BLOCK[1], 4, FP8_BLOCK[1] - 4


def parts_of_bias(bias: Tensor, parts: int) -> Tensor:
    """[E, N, parts] in float32, with the bias as their sum: each part except the last is rounded to e4m3's
    four significant bits. The gradient is that of the last part. One part is the bias itself, in its own
    dtype."""
    if parts == 1:
        return bias.unsqueeze(-1)
    remainder = bias.float()
    rounded = []
    for _ in range(parts - 1):
        part = ((remainder.detach().view(torch.int32) + (1 << 19)) & -(1 << 20)).view(torch.float32)
        rounded.append(part)
        remainder = remainder - part
    return torch.stack((*rounded, remainder), dim=-1)


def gates_before_ups(interleaved: Tensor) -> Tensor:
    """[E, 2F, ...] with all gates before all ups, for pairs (gate, up). Without torch.cat, which bfloat16
    autocast rejects for float16 weights and vice versa."""
    return interleaved.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _checked_weights(w13: Any, w2: Any, bias13: Tensor | None, recipe: str, halves: int) -> list[Any]:
    """w13 (or w1 and w3) and w2, after checks of dtypes and shapes for the recipe."""
    parts: list[Any] = list(w13) if type(w13) is tuple and len(w13) in (1, 2) else [w13]
    for name, w in (*(("w13", w) for w in parts), ("w2", w2)):
        if not isinstance(w, (Tensor, Quantized)):
            raise _not_a_weight(name, w13 if name == "w13" else w2)
        check_float(name, w, 3)
        if recipe == "bf16" and isinstance(w, Quantized):
            raise TypeError(f'{name}: got quantised weights; wanted a tensor for recipe "bf16"')
        if recipe != "bf16" and isinstance(w, Tensor):
            checks.dtype(name, spec_of(w), checks.QUANTIZABLE, f'pass {name}.float(), or recipe="bf16"')
    if isinstance(parts[0], Quantized):
        if bias13 is not None:
            raise TypeError(
                "bias13: got one with quantised w13; wanted tensors, or fp8_weights that include it"
            )
        return [parts[0], w2]
    if parts[0].shape != parts[-1].shape:
        raise ValueError(
            f"w13: got tensors of shapes {[list(w.shape) for w in parts]}; wanted one of [E, 2F, H], or two "
            "of [E, F, H]"
        )
    if parts[0].dtype != parts[-1].dtype:
        raise TypeError(f"w13: got w1 of {parts[0].dtype}, w3 of {parts[1].dtype}; wanted one dtype")
    if len(parts) > halves:
        raise ValueError("w13: got two tensors; wanted one of [E, F, H] for an activation without a gate")
    width = parts[0].shape[1] * len(parts)
    if bias13 is not None:
        check_float("bias13", bias13)
        checks.shape("bias13", bias13, (parts[0].shape[0], width))
    if isinstance(w2, Tensor) and halves * w2.shape[2] != width:
        wanted = f"wanted [E, H, {width // halves}], for the {width} rows of w13"
        first, second = parts[0].shape[1:], w2.shape[1:]
        # one or both stored transposed
        stored = (first, second[::-1]), (first[::-1], second), (first[::-1], second[::-1])
        for (ffn, hidden), of_w2 in stored:
            if (hidden, ffn * len(parts)) == (of_w2[0], halves * of_w2[1]):
                wanted += "; pass weights stored [E, in, out] as w13.transpose(1, 2), w2.transpose(1, 2)"
                break
        raise ValueError(f"w2: got shape {list(w2.shape)}; {wanted}")
    return [tuple(parts) if len(parts) == 2 else parts[0], w2]


def _not_a_weight(name: str, w: Any) -> TypeError:
    """The error for weights that are no tensors, with the call that makes a tensor of them."""
    wanted = "a tensor [E, 2F, H], or a tuple of two [E, F, H]" if name == "w13" else "a tensor [E, H, F]"
    several = isinstance(w, (list, tuple, nn.ModuleList))
    items = list(w) if several else [w]
    kinds = " and ".join(sorted({type(item).__name__ for item in items})) or "nothing"
    got = f"a {type(w).__name__} of {len(items)}, {kinds}" if several else kinds
    fix = ""
    if items and all(isinstance(item, nn.Module) for item in items):
        fix = f"; pass torch.stack([m.weight for m in {name}])" if several else "; pass its weights stacked"
    elif several and name == "w13" and len(items) == 2:
        fix = "; pass tuple(w13)" if all(isinstance(t, Tensor) and t.ndim == 3 for t in items) else ""
    elif items and all(isinstance(item, Tensor) for item in items):
        fix = f"; pass torch.stack(list({name}))"
    return TypeError(f"{name}: got {got}; wanted {wanted}{fix}")


def _check_sizes(x: Tensor, weights: list[Any], bias2: Tensor | None) -> int:
    """Checks sizes that torch's operations would broadcast or report without a name; returns the number of
    experts."""
    w13, w2 = weights
    first = w13[0] if isinstance(w13, tuple) else w13
    experts, hidden = experts_of(first), x.shape[-1]
    if isinstance(first, Tensor):
        checks.shape("w13", first, ("E", "F" if isinstance(w13, tuple) else "2F", hidden))
    if isinstance(w2, Tensor):
        checks.shape("w2", w2, (experts, hidden, "F"))
    if bias2 is not None:
        check_float("bias2", bias2)
        checks.shape("bias2", bias2, (experts, hidden))
    return experts


def _ffn_of(w13: Any, w2: Any, halves: int) -> int | None:
    """F from the shapes of the weights; None for quantised weights."""
    if isinstance(w13, tuple):
        return int(w13[0].shape[1])
    if isinstance(w13, Tensor):
        return int(w13.shape[1]) // halves
    return getattr(w2, "shape", (None,))[-1]


def _joined_weights(weights: list[Any], bias13: Tensor | None, recipe: str, halves: int) -> list[Any]:
    """w13 [E, 2F, H] in one tensor and w2 [E, H, F], padded to a multiple of 128 of F for FP8, with the
    columns of `_bias_columns` for a bias."""
    w13, w2 = weights
    if isinstance(w13, Quantized):
        return [w13, w2 if isinstance(w2, Quantized) else w2.contiguous()]
    parts = list(w13) if isinstance(w13, tuple) else [w13]
    missing = 0 if recipe == "bf16" or isinstance(w2, Quantized) else -w2.shape[2] % FP8_BLOCK[1]
    if missing:  # not by unbind, whose backward torch's CPU autocast refuses for the other 16-bit dtype
        in_one = halves // len(parts)
        parts = [pad(w.unflatten(1, (in_one, -1)), (0, 0, 0, missing)).flatten(1, 2) for w in parts]
        w2 = pad(w2, (0, missing))
    gate_up = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if bias13 is not None:
        before, ones, after = _bias_columns(gate_up.shape[2], recipe)
        if missing:
            bias13 = pad(bias13.unflatten(1, (halves, -1)), (0, missing)).flatten(1)
        columns = parts_of_bias(bias13, ones).to(gate_up.dtype)
        gate_up = torch.cat((pad(gate_up, (0, before)), pad(columns, (0, after))), dim=2)
        w2 = pad(w2, (0, 0, 0, before + ones + after))
    return [w if isinstance(w, Quantized) else w.contiguous() for w in (gate_up, w2)]
