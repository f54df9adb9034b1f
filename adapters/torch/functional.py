"""The experts of a MoE layer as functions of tensors, on which the module and the adapters to other libraries
are built.

They accept any floating-point dtype and strides, weights as pairs, and widths that are not multiples of 128,
and convert them to the operands of `fp8moe.adapters.torch.experts`. All conversions are torch operations, so
autograd and torch.compile handle them.
"""

from __future__ import annotations

from typing import Any

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor

from fp8moe import Quantized, QuantTensor
from fp8moe.activation import SWIGLU, Activation, halves_of
from fp8moe.adapters.torch.arguments import check_backend
from fp8moe.adapters.torch.biases import add_bias, check_gathers_bias
from fp8moe.adapters.torch.experts import Like, experts, like_of
from fp8moe.adapters.torch.grouped import by_public_operations, is_always_the_cores, suits_public_operations
from fp8moe.adapters.torch.lora import LoRA, check_lora, experts_with_lora
from fp8moe.adapters.torch.operands import (
    Operands,
    check_sizes,
    checked_weights,
    ffn_of,
    operands_of,
    round_up_to_block,
)
from fp8moe.adapters.torch.operation import check_float, check_tensor, refuse_transforms
from fp8moe.adapters.torch.stats import Collector, observer
from fp8moe.adapters.torch.weights import copies_of_function, share_copies
from fp8moe.layer.moe import experts_of
from fp8moe.layer.options import LayerOptions
from fp8moe.layer.recipes import GRADIENTS, RecipeName
from fp8moe.runtime import checks

__all__ = ["moe_experts", "moe_experts_permuted"]


def moe_experts(
    x: Tensor,
    w13: Tensor | Quantized | tuple[Tensor, Tensor],
    w2: Tensor | Quantized,
    topk_ids: Tensor,
    topk_probs: Tensor,
    *,
    recipe: RecipeName = "fp8_flow",
    recompute: str | None = None,
    save: str = "bf16",
    activation: Activation = SWIGLU,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    comm: Any = None,
    fp8_weights: tuple[Quantized, Quantized] | None = None,
    is_first_microbatch: bool | None = None,
    backend: str | None = None,
    num_sms: int | None = None,
    weight_copies: str = "both",
    lora: tuple[LoRA | None, LoRA | None] | None = None,
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
        ("bf16", "fp8_blockwise"), its gradient is returned as ``grad``. They also add to an existing
        ``grad``, as `set_fuse_wgrad_accumulation` says. If F is not a multiple of 128, the FP8 recipes pad
        the codes with zeros up to the next one. "fp8_flow" does not copy weights, not even pairs, padded or
        transposed ones. The other recipes concatenate pairs, and "fp8_blockwise" pads.
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
    save : "bf16" or "fp8"
        As in `fp8moe.moe_forward`.
    activation : Activation
        Activation between the two products.
    bias13 : Tensor or None, floating point, [E, 2F]
        Bias of the first GEMM, as in gpt-oss. The GEMM adds it to its float32 sums (float64 for float64)
        before they are rounded. With it "bf16" is computed by this library's GEMMs on every device, not by
        torch's. Its gradient is the sum over an expert's rows of the gradient of the GEMM's result, for
        "fp8_flow" of its float32 values before they are quantised, else of its values in their dtype.
    bias2 : Tensor or None, floating point, [E, H]
        Bias of the second product, added in float32 (float64 for float64), for each row by itself.
    comm : Comm or None
        Communicator that sends rows between ranks (`fp8moe.expert_parallel`). w13 and w2 are then this rank's
        experts, and the ids are global. Compiled code remains one graph (``fullgraph=True``) with a
        `fp8moe.torch.ProcessGroup` or another Transport that has a ``handle``. bias2 is
        gathered from all ranks, which requires the attribute ``group``, a torch.distributed.ProcessGroup.
    fp8_weights : tuple of two Quantized, or None
        Result of `quantize_fp8_weights` for w13 and w2, used in the GEMMs. The caller guarantees that the
        weights have not changed since, so micro-batches can share one set. w13 and w2 get
        their gradients as usual.
    is_first_microbatch : bool or None
        In eager mode, for weights that are the same tensors in every call. True: keep the FP8 copies that
        this call makes; False: use those that True kept, if no change of the weights is detected; None: make
        copies for this call alone, except inside `weights_unchanged`.
    backend : "wgmma", "mma", "cublas", "plain" or None
        Kernels of all products, the backward's included, as described in `fp8moe.grouped_gemm` ("cublas"
        synchronises); None: the fastest. With "bf16", None may also select torch's grouped product where that
        is faster, and a name selects this library's kernels.
    num_sms : int or None
        Maximum number of SMs that each product may use, as in `fp8moe.moe_forward`, to leave the others to
        work on another stream. With "bf16" a number selects this library's kernels.
    weight_copies : "both" or "rowwise"
        Orientations of the FP8 weights that are made and saved, as in `fp8moe.moe_forward`: "rowwise" halves
        their memory, and each backward derives the other orientation.
    lora : tuple of two LoRA or None, or None
        Low-rank adapters of w13 and of w2. The weights and bias13 must be frozen: they have no gradient, and
        the sum of a weight and B @ A is never formed. The adapters' GEMMs multiply in the rows' dtype
        (bfloat16 with the FP8 recipes). The FP8 recipes quantise the activation after it is rounded to
        bfloat16, and so its gradient. ``recompute`` makes everything but y again. Not with ``comm``
        and ``save``, nor in make_fx, torch.export and with fake tensors; compiled code has a graph break.

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
        Inside transforms of torch.func, for a ``comm`` without the attributes that compiled code or bias2
        needs, and for what ``lora`` cannot be combined with.

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
    operands = x, w13, w2, topk_ids, topk_probs, bias13, bias2, fp8_weights
    how = activation, recipe, recompute, save, backend, num_sms, weight_copies
    like = None
    if comm is None and is_first_microbatch is None and lora is None:
        like = _like(how, *operands)
        if like is not None and like.known is not None:
            return like.run()
    given = "moe_experts", *operands, is_first_microbatch, LayerOptions(*how)
    if lora is not None:
        return _with_adapters(*given, comm=comm, lora=lora)  # type: ignore[no-any-return]
    return _checked(*given, comm=comm, like=like)


def moe_experts_permuted(
    x: Tensor,
    w13: Tensor | Quantized | tuple[Tensor, Tensor],
    w2: Tensor | Quantized,
    tokens_per_expert: Tensor,
    probs: Tensor,
    *,
    recipe: RecipeName = "fp8_flow",
    recompute: str | None = None,
    save: str = "bf16",
    activation: Activation = SWIGLU,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    align_size: int = 1,
    fp8_weights: tuple[Quantized, Quantized] | None = None,
    is_first_microbatch: bool | None = None,
    backend: str | None = None,
    num_sms: int | None = None,
    weight_copies: str = "both",
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
    save : "bf16" or "fp8"
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
    is_first_microbatch : bool or None
        As in `moe_experts`.
    backend : "wgmma", "mma", "cublas", "plain" or None
        As in `moe_experts`.
    num_sms : int or None
        As in `moe_experts`.
    weight_copies : "both" or "rowwise"
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
    operands = x, w13, w2, tokens_per_expert, probs, bias13, bias2, fp8_weights
    how = activation, recipe, recompute, save, backend, num_sms, weight_copies
    like = None
    if is_first_microbatch is None:
        like = _like((*how, align_size), *operands)
        if like is not None and like.known is not None:
            return like.run()
    options = LayerOptions(*how)
    of_call: dict[str, Any] = {"align_size": align_size, "like": like}
    return _checked("moe_experts_permuted", *operands, is_first_microbatch, options, **of_call)


def _like(
    how: tuple[Any, ...],
    x: Any,
    w13: Any,
    w2: Any,
    ids: Any,
    probs: Any,
    bias13: Any,
    bias2: Any,
    fp8_weights: Any,
) -> Like | None:
    """As `like_of`. Copies that calls share and a bias of the second GEMM are looked at in each call. how:
    `LayerOptions`' fields in their order, and further arguments."""
    if torch.compiler.is_dynamo_compiling() or bias2 is not None:
        return None
    if fp8_weights is None and share_copies():
        return None
    pair = w13 if type(w13) is tuple else (w13, None)
    if len(pair) != 2 or (pair is w13 and None in pair):
        return None
    how = *how, *map(type, how)  # 1 is a number of SMs, and True is not
    if torch.is_autocast_enabled("cuda"):
        how = *how, torch.get_autocast_dtype("cuda")
    return like_of(how, x, (*pair, w2, bias13), ids, probs, fp8_weights)


def _checked(
    name: str,
    x: Tensor,
    w13: Any,
    w2: Any,
    ids: Tensor,
    probs: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    fp8_weights: tuple[Quantized, Quantized] | None,
    first: bool | None,
    options: LayerOptions,
    *,
    comm: Any = None,
    align_size: int = 0,
    like: Like | None = None,
    lora: Any = None,
) -> Tensor:
    """`moe_experts`, or with an align_size `moe_experts_permuted`, which passes counts as ids."""
    refuse_transforms(name)
    check_float("x", x)
    check_tensor("tokens_per_expert" if align_size else "topk_ids", ids)
    check_float("probs" if align_size else "topk_probs", probs)
    quantizes = options.precision.quantizes
    operands: Any = x, w13, w2, ids, probs, bias13, bias2, fp8_weights
    operands = *operands, first, options, comm, align_size, like, lora
    device_type, dtype = x.device.type, torch.bfloat16 if quantizes else x.dtype
    if not torch.is_autocast_enabled(device_type):
        return _in_dtype(dtype, *operands)
    if not quantizes:
        dtype = torch.get_autocast_dtype(device_type)
    # float16 autocast would reject concatenating bfloat16 weights with their biases, and would add biases in
    # float16
    with torch.autocast(device_type, enabled=False):
        return _in_dtype(dtype, *operands)


def _in_dtype(
    dtype: torch.dtype,
    x: Tensor,
    w13: Any,
    w2: Any,
    ids: Tensor,
    probs: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    fp8_weights: tuple[Quantized, Quantized] | None,
    first: bool | None,
    options: LayerOptions,
    comm: Any,
    align_size: int,
    like: Like | None,
    lora: Any,
) -> Tensor:
    """`_checked`, with the dtype in which the GEMMs multiply, outside of autocast."""
    recipe, halves = options.precision, halves_of(options.activation.kind)
    weights: list[Any] = checked_weights(w13, w2, bias13, recipe, halves)
    num_experts = check_sizes(x, weights, bias2)
    if align_size:
        checks.shape("tokens_per_expert", ids, (num_experts,))
    rows: list[Tensor | None] = [x, probs, bias13]
    if lora is not None:
        lora = check_lora(lora, weights, bias13, options, comm)
        rows += [t for w in lora if w is not None for t in (w.a, w.b)]
    if not recipe.quantizes:
        weights = [tuple(p.to(dtype) for p in w) if isinstance(w, tuple) else w.to(dtype) for w in weights]
    if options.limits_gemms and not torch.compiler.is_compiling():
        _check_backend(x, weights, options, dtype)
    if first is not None:
        first = checks.flag("is_first_microbatch", first)
    if first is not None or (recipe.quantizes and fp8_weights is None):
        fp8_weights = _kept(rows, weights, fp8_weights, options, first)
    given = operands_of(weights, bias13, fp8_weights, options)
    of_call: dict[str, Any] = {"comm": comm, "align_size": align_size, "bias2": bias2, "like": like}
    of_call["lora"] = lora
    y = apply_experts(x, given, ids, probs, dtype, options, **of_call)
    return y.to(x.dtype).reshape(x.shape)


#: `_checked` with ``lora``, whose nodes of autograd no compiler traces
_with_adapters: Any = torch.compiler.disable(_checked)


def _kept(
    rows: list[Tensor | None],
    weights: list[Any],
    fp8_weights: tuple[Quantized, Quantized] | None,
    options: LayerOptions,
    first: bool | None,
) -> tuple[Quantized, Quantized] | None:
    """The FP8 copies of weights that are declared unchanged, None for others. rows: the call's other tensors
    that may have gradients. first: its ``is_first_microbatch``."""
    if torch.compiler.is_compiling():
        if first is not None:
            raise ValueError(f"is_first_microbatch: got {first} in compiled code; wanted None")
        return None
    if first is not None and (fp8_weights is not None or not options.precision.quantizes):
        other = "fp8_weights" if fp8_weights is not None else f"recipe {options.recipe!r}"
        raise ValueError(f"is_first_microbatch: got {first} with {other}; wanted None")
    masters = [*(weights[0] if isinstance(weights[0], tuple) else weights[:1]), weights[1]]
    tensors = [t for t in (*rows, *masters) if isinstance(t, Tensor)]
    recording = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return copies_of_function(weights[0], weights[1], options, recording, first)


def apply_experts(
    x: Tensor,
    weights: Operands,
    ids: Tensor,
    probs: Tensor,
    dtype: torch.dtype,
    options: LayerOptions,
    *,
    comm: Any = None,
    align_size: int = 0,
    bias2: Tensor | None = None,
    announced: dict[str, Any] | None = None,
    handle: Tensor | None = None,
    collector: Collector | None = None,
    like: Like | None = None,
    lora: Any = None,
) -> Tensor:
    """y [T, H] in ``dtype`` of tokens x [..., H], multiplied in this dtype: what the functions and the module
    have in common. Arguments as in `fp8moe.adapters.torch.experts.experts`; lora: of `check_lora`.
    """
    hidden = x.shape[-1]
    rows = (x if x.ndim == 2 else x.reshape(-1, hidden)).to(dtype).contiguous()
    if not align_size:
        for name, t in (("topk_ids", ids), ("topk_probs", probs)):
            if t.dim() < 2 or (t.dim() > 2 and x.dim() == 2):
                checks.shape(name, t, (rows.shape[0], "k"))
            if t.dim() > 2 and t.shape[:-1] != x.shape[:-1]:  # for [T, k] the layer checks T
                wanted = ", ".join(map(str, (*x.shape[:-1], "k")))
                raise ValueError(
                    f"{name}: got shape {list(t.shape)}; wanted [{wanted}], for x {list(x.shape)}"
                )
        ids, probs = (t if t.ndim == 2 else t.flatten(0, -2) for t in (ids, probs))
    ids, probs = ids.contiguous(), probs.contiguous()
    if bias2 is not None and comm is not None:
        check_gathers_bias(comm)
        announced = {"gathers_bias": True}
    exchange: dict[str, Any] = {"comm": comm, "align_size": align_size, "announced": announced}
    if (observed := observer()) is not None:
        y = observed(rows, weights, ids, probs, options, align_size, comm, lora)
    elif lora is not None:
        y = experts_with_lora(rows, weights, ids, probs, options, lora)
    elif suits_public_operations(rows, weights, options, comm):
        y = by_public_operations(rows, weights, ids, probs, options, **exchange)
    else:
        if not is_always_the_cores(rows, options):  # another call may have a ``main_grad``
            like = None
        exchange |= {"handle": handle, "collector": collector, "like": like}
        y = experts(rows, weights, ids, probs, options, **exchange)
    if bias2 is not None:
        return add_bias(y, bias2, ids, probs, comm, align_size)
    return y


def _check_backend(x: Tensor, weights: list[Any], options: LayerOptions, dtype: torch.dtype) -> None:
    """Raises, before weights are quantised, for a backend that does not support the GEMMs."""
    (w13, w2), recipe, hidden = weights, options.precision, x.shape[-1]
    ffn = ffn_of(w13, w2, halves_of(options.activation.kind))
    if ffn is None:
        ffn = w2.rowwise.shape[2]
    if recipe.quantizes and not recipe.gradient_in_parts:  # as they are joined
        ffn = round_up_to_block(ffn)
    sizes = {"experts": experts_of(w13[0] if isinstance(w13, tuple) else w13), "hidden": hidden, "ffn": ffn}
    gradients = GRADIENTS if torch.is_grad_enabled() else ()
    check_backend(x, options, dtype=str(dtype).removeprefix("torch."), gradients=gradients, **sizes)
