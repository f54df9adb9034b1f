"""The experts of a MoE layer as one function of tensors: what adapters to other libraries stand on.

It takes what a user has (any float, any strides, weights in halves, widths that are no multiples of 128)
and hands `fp8moe.adapters.torch_experts` what that takes. Every step is torch's own, so autograd and
compilers see through it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.functional import pad

from fp8moe import Quantized, QuantTensor, checks
from fp8moe.activation import SWIGLU, Activation, halves_of
from fp8moe.adapters import torch_ops
from fp8moe.adapters.torch_experts import FP8_BLOCK, check_backend, experts, main_grad_of
from fp8moe.adapters.torch_grouped import by_grouped_mm, rows_by_grouped_mm
from fp8moe.adapters.torch_library import spec_of
from fp8moe.adapters.torch_operation import check_float, refuse_transforms
from fp8moe.expert_parallel.protocols import chunks_of
from fp8moe.grouped_gemm import BACKENDS, check_limit
from fp8moe.moe import GRADIENTS, RECIPES, Recipe, experts_of

__all__ = ["moe_experts", "moe_experts_permuted", "quantize_fp8_weights"]


def moe_experts(
    x: Tensor,
    w13: Tensor | Quantized | tuple[Tensor, Tensor],
    w2: Tensor | Quantized,
    topk_ids: Tensor,
    topk_probs: Tensor,
    *,
    recipe: Recipe = "fp8_flow",
    recompute: str | None = None,
    activation: Activation = SWIGLU,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    comm: Any = None,
    fp8_weights: tuple[Quantized, Quantized] | None = None,
    backend: str | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """The experts of a layer, with gradients for all but the ids, eagerly and compiled.

    y[t] = sum over t's experts e of prob * (w2[e] @ act(w13[e] @ x[t] + bias13[e]) + bias2[e]).

    Parameters
    ----------
    x : Tensor, any floating-point dtype and strides, [..., H]
        The FP8 recipes multiply it as bfloat16, "bf16" in its dtype, under autocast in that of the context.
    w13 : Tensor, [E, 2F, H], or tuple of two, [E, F, H] each, or Quantized
        Gates before ups, or the two apart; [E, F, H] for an activation without a gate. Any floating-point
        dtype and strides, leaves or not; or, for the FP8 recipes, what `fp8moe.quantize_weights` returned,
        which has no gradient. Gradients come in the weights' dtype, of w1 and w3 apart, too; each may have a
        ``main_grad``, to which it is added where the products take the weight as it is: where it is cast,
        joined or padded before ("bf16", "fp8_blockwise", ``bias13``), it comes as its ``grad``. Where F is no
        multiple of 128, the FP8 recipes multiply by codes with zeros up to the next one. "fp8_flow" copies no
        weights on the way, halves, padded or transposed; the gradient of a padded w13 in one piece is copied
        once. The other recipes join the halves, "fp8_blockwise" pads.
    w2 : Tensor or Quantized, [E, H, F]
        As ``w13``.
    topk_ids : Tensor, int32 or int64, [..., k]
        Below 0, or E and more, for no expert.
    topk_probs : Tensor, floating point, [..., k]
        Factors of the experts' results.
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        As of `fp8moe.moe_forward`.
    recompute : None or "moe_expert"
        As of `fp8moe.moe_forward`.
    activation : Activation
        Between the two products.
    bias13 : Tensor or None, floating point, [E, 2F]
        As gpt-oss has. It becomes columns of w13, which multiply ones after x's; in FP8 four, whose sum is
        the bias to 2^-16.
    bias2 : Tensor or None, floating point, [E, H]
        Added by torch.
    comm : Comm or None
        What moves rows between ranks (`fp8moe.expert_parallel`): w13 and w2 are this rank's experts then, and
        ids name those of all. Compiled, it is one graph all the same (``fullgraph=True``), for a
        `fp8moe.adapters.torch_distributed.ProcessGroup` or another Transport that has a ``handle``. bias2 is
        gathered from all ranks, which takes the attribute ``group``, a torch.distributed.ProcessGroup.
    fp8_weights : tuple of two Quantized, or None
        What `quantize_fp8_weights` made of w13, w2 and bias13, to multiply by. The caller says by it that
        they have not changed since: micro-batches share one set. All get their gradients the same.
    backend : "wgmma", "mma", "cublas", "plain" or None
        By which kernels all products are made, of the backward, too, as `fp8moe.grouped_gemm` describes them
        ("cublas" synchronises); None: the fastest. For "bf16" None also takes torch's grouped product, where
        that is faster, and a name means this library's kernels.
    num_sms : int or None
        How many of the GPU's multiprocessors all products may use at most, as of `fp8moe.moe_forward`, for
        what another stream does meanwhile. For "bf16" a number means this library's kernels.

    Returns
    -------
    Tensor, [..., H]
        In x's dtype and shape.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype, shape or range, by the argument's name, and for a backend that does not make these
        products on x's device, or a num_sms that they cannot keep to, before any work.
    NotImplementedError
        Inside transforms of torch.func, and for a ``comm`` without what compiled code or bias2 wants of it.

    Notes
    -----
    `fp8moe.moe_forward` and `fp8moe.moe_backward`, whose notes say where the recipes come from.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.adapters import torch_ops
    >>> x, w13, w2 = torch.ones(1, 1), torch.tensor([[[100.0], [2.0]]]), torch.tensor([[[1.0]]])
    >>> ids, probs = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), 0.5, requires_grad=True)
    >>> y = torch_ops.moe_experts(x, w13, w2, ids, probs, recipe="bf16")
    >>> y.backward(torch.ones(1, 1))
    >>> y.item(), probs.grad.item()
    (100.0, 200.0)
    """
    of_products = bias13, bias2, fp8_weights, backend, num_sms
    options = _Options(recipe, recompute, activation, *of_products, comm=comm)
    return _moe_experts("moe_experts", x, w13, w2, topk_ids, topk_probs, options)


def moe_experts_permuted(
    x: Tensor,
    w13: Tensor | Quantized | tuple[Tensor, Tensor],
    w2: Tensor | Quantized,
    tokens_per_expert: Tensor,
    probs: Tensor,
    *,
    recipe: Recipe = "fp8_flow",
    recompute: str | None = None,
    activation: Activation = SWIGLU,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    align_size: int = 1,
    fp8_weights: tuple[Quantized, Quantized] | None = None,
    backend: str | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """`moe_experts` of rows that a dispatcher has permuted, and may have padded.

    y[i] = probs[i] * (w2[e] @ act(w13[e] @ x[i] + bias13[e]) + bias2[e]) for row i of expert e. Nothing
    synchronises.

    Parameters
    ----------
    x : Tensor, any floating-point dtype and strides, [N, H]
        Rows of expert 0, then of expert 1, and so on; those past the last expert's belong to none. FP8 rows,
        which have no gradient in torch, are for `fp8moe.moe_forward_permuted`.
    w13 : Tensor, [E, 2F, H], or tuple of two, [E, F, H] each, or Quantized
        As for `moe_experts`.
    w2 : Tensor or Quantized, [E, H, F]
        As for `moe_experts`.
    tokens_per_expert : Tensor, int32 or int64, [E]
        Rows of each expert, on x's device.
    probs : Tensor, floating point, [N]
        Factor of each row's result.
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        As for `moe_experts`.
    recompute : None or "moe_expert"
        As for `moe_experts`.
    activation : Activation
        As for `moe_experts`.
    bias13 : Tensor or None, floating point, [E, 2F]
        As for `moe_experts`.
    bias2 : Tensor or None, floating point, [E, H]
        As for `moe_experts`.
    align_size : int
        What each expert's rows are padded to a multiple of in x, with rows and probs of zeros;
        tokens_per_expert may count these or not. With a multiple of 128 the FP8 recipes read them where they
        lie; others are padded inside, by a pass more.
    fp8_weights : tuple of two Quantized, or None
        As for `moe_experts`.
    backend : "wgmma", "mma", "cublas", "plain" or None
        As for `moe_experts`.
    num_sms : int or None
        As for `moe_experts`.

    Returns
    -------
    Tensor, [N, H]
        In x's dtype; zeros past the last expert's rows.

    Raises
    ------
    TypeError, ValueError
        As `moe_experts`, and for a `fp8moe.QuantTensor`.
    NotImplementedError
        Inside transforms of torch.func.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.adapters import torch_ops
    >>> x, w13, w2 = torch.ones(2, 1), torch.tensor([[[100.0], [2.0]]]), torch.tensor([[[1.0]]])
    >>> rows = torch.tensor([2]), torch.tensor([0.5, 1.0])
    >>> torch_ops.moe_experts_permuted(x, w13, w2, *rows, recipe="bf16").tolist()
    [[100.0], [200.0]]
    """
    if isinstance(x, QuantTensor):
        raise TypeError(
            "x: got a QuantTensor, through which no gradient goes in torch; wanted a tensor; pass it to "
            "fp8moe.moe_forward_permuted"
        )
    checks.integer("align_size", align_size, 1)
    of_products = bias13, bias2, fp8_weights, backend, num_sms
    options = _Options(recipe, recompute, activation, *of_products, align_size=align_size)
    return _moe_experts("moe_experts_permuted", x, w13, w2, tokens_per_expert, probs, options)


class _Options(NamedTuple):
    """Options of `moe_experts`, and with an align_size other than 0 of `moe_experts_permuted`."""

    recipe: Recipe
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
    """`moe_experts`, and `moe_experts_permuted`, whose counts are passed as ids."""
    refuse_transforms(name)
    checks.choice("recipe", options.recipe, RECIPES)
    checks.choice("backend", options.backend, BACKENDS)
    check_limit(options.num_sms)
    check_float("x", x)
    check_float("probs" if options.align_size else "topk_probs", probs)
    place, dtype = x.device.type, torch.bfloat16 if options.recipe != "bf16" else x.dtype
    if not torch.is_autocast_enabled(place):
        return _multiplied_in(dtype, x, w13, w2, ids, probs, options)
    if options.recipe == "bf16":
        dtype = torch.get_autocast_dtype(place)
    # under float16 torch would refuse to join bfloat16 weights with their biases, and add those in float16
    with torch.autocast(place, enabled=False):
        return _multiplied_in(dtype, x, w13, w2, ids, probs, options)


def _multiplied_in(
    dtype: torch.dtype, x: Tensor, w13: Any, w2: Any, ids: Tensor, probs: Tensor, options: _Options
) -> Tensor:
    recipe, recompute, activation, bias13, bias2, fp8_weights, backend, num_sms, comm, align_size = options
    by_name, ffn = backend is not None or num_sms is not None, None
    checks.options("activation", activation, Activation)
    halves = halves_of(activation.kind)
    given: list[Any] = _checked(w13, w2, bias13, recipe, halves)
    if by_name and not torch.compiler.is_compiling():
        _check_backend(x, given, options, dtype)
    as_given = recipe == "fp8_flow" and bias13 is None
    if not as_given:
        given = _whole(given, bias13, recipe, halves)
    elif (width := _ffn_of(given[0], given[1], halves)) is not None and width % FP8_BLOCK[1]:
        ffn = width
    if bias2 is not None and comm is not None:
        bias2 = _of_all_ranks(bias2, comm)
    if recipe == "bf16":
        if fp8_weights is not None:
            raise ValueError('fp8_weights: got some with recipe "bf16"; wanted None')
        given = [w.to(dtype).contiguous() for w in given]
    if fp8_weights is not None:
        _check_fp8_weights(fp8_weights, given, halves)
    multiplied: Any = fp8_weights or given
    if recipe != "bf16" and fp8_weights is None:
        multiplied = _quantized(given, halves) if as_given else [_codes(w) for w in given]
    weights = [None if isinstance(w, Quantized) else w for w in given]
    hidden = x.shape[-1]
    rows = x.reshape(-1, hidden).to(dtype).contiguous()
    if not align_size:
        ids, probs = (t.reshape(-1, t.shape[-1]) for t in (ids, probs))
    ids, probs = ids.contiguous(), probs.contiguous()
    if bias13 is not None:
        before, ones, after = _columns(hidden, recipe)
        added = rows.new_ones(rows.shape[0], ones)
        rows = torch.cat((pad(rows, (0, before)), pad(added, (0, after))), dim=1)
    layer: dict[str, Any] = {"recompute": recompute, "activation": activation}
    layer |= {"align_size": align_size} if align_size else {"comm": comm}
    if recipe == "bf16" and not by_name and _grouped_mm_takes(rows, given[0], given[1], comm):
        product = rows_by_grouped_mm if align_size else by_grouped_mm
        y = product(rows, given[0], given[1], ids, probs, **layer)
    else:
        layer |= {"recipe": recipe, "backend": backend, "num_sms": num_sms, "ffn": ffn}
        y = experts(rows, weights[0], weights[1], ids, probs, multiplied, **layer)
    if bias13 is not None:
        y = y[:, :hidden]
    if bias2 is not None:
        if align_size:
            ids, probs = _expert_of_rows(ids, len(rows), align_size)[:, None], probs[:, None]
        y = y + _shares(ids, probs, bias2.shape[0]).to(y.dtype) @ bias2.to(y.dtype)
    return y.to(x.dtype).reshape(x.shape)


def _check_backend(x: Tensor, weights: list[Any], options: _Options, dtype: torch.dtype) -> None:
    """Raise for a backend that the products do not take, before weights are quantised."""
    (w13, w2), activation, hidden = weights, options.activation, x.shape[-1]
    ffn = _ffn_of(w13, w2, halves_of(activation.kind))
    if ffn is None:
        ffn = w2.rowwise.shape[2]
    if options.recipe != "fp8_flow" or options.bias13 is not None:  # as `_whole` makes them
        ffn = ffn if options.recipe == "bf16" else _whole_blocks(ffn)
    if options.bias13 is not None:
        hidden += sum(_columns(hidden, options.recipe))
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
    """Whether torch multiplies: bfloat16 in multiples of 16 bytes, and no ``main_grad`` to add to."""
    if comm is not None and (torch.compiler.is_compiling() or chunks_of(comm) > 1):
        return False
    whole = all(w.shape[2] % 8 == 0 for w in (w13, w2))
    return x.dtype == torch.bfloat16 and whole and all(main_grad_of(w) is None for w in (w13, w2))


def _expert_of_rows(tokens_per_expert: Tensor, rows: int, align_size: int) -> Tensor:
    """[rows], E for those past the last expert's."""
    ends = ((tokens_per_expert + (align_size - 1)) // align_size * align_size).cumsum(0)
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)


def _of_all_ranks(bias2: Tensor, comm: Any) -> Tensor:
    """The biases of all experts; their gradient is the sum over ranks."""
    group = getattr(comm, "group", None)
    if group is None:
        raise NotImplementedError(
            f"bias2: got one with a comm of {type(comm).__name__} without an attribute `group`; wanted its "
            "torch.distributed.ProcessGroup there, or no bias"
        )
    return all_gather_tensor_autograd(bias2.contiguous(), 0, group)


def _shares(ids: Tensor, probs: Tensor, experts: int) -> Tensor:
    """[T, E]: the sum of a token's probabilities for each expert."""
    there = (ids >= 0) & (ids < experts)
    shares = probs.new_zeros(ids.shape[0], experts)
    return shares.scatter_add(1, torch.where(there, ids, 0).long(), torch.where(there, probs, 0))


def quantize_fp8_weights(
    w13: Tensor | tuple[Tensor, Tensor],
    w2: Tensor,
    bias13: Tensor | None = None,
    *,
    activation: Activation = SWIGLU,
    out: tuple[Quantized, Quantized] | None = None,
) -> tuple[Quantized, Quantized]:
    """The FP8 weights that `moe_experts` multiplies by, padded like there.

    Parameters
    ----------
    w13 : Tensor, [E, 2F, H], or tuple of two, [E, F, H] each
        As for `moe_experts`.
    w2 : Tensor, [E, H, F]
        As for `moe_experts`.
    bias13 : Tensor or None, floating point, [E, 2F]
        As for `moe_experts`.
    activation : Activation
        Says whether w13 has gates.
    out : tuple of two Quantized, or None
        What an earlier call returned, to write to.

    Returns
    -------
    tuple of two Quantized
        Of w13 and of w2: ``fp8_weights`` of `moe_experts`.

    Raises
    ------
    TypeError, ValueError
        As `moe_experts`.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.adapters.torch_functional import quantize_fp8_weights
    >>> w13, w2 = quantize_fp8_weights(torch.ones(4, 200, 256), torch.ones(4, 256, 100))
    >>> w13.rowwise.shape, w2.rowwise.shape
    ((4, 256, 256), (4, 256, 128))
    """
    halves = halves_of(activation.kind)
    given = _checked(w13, w2, bias13, "fp8_flow", halves)
    if bias13 is None:
        return _quantized(given, halves, out)
    whole = _whole(given, bias13, "fp8_flow", halves)
    first, second = (_codes(w, old) for w, old in zip(whole, out or (None, None), strict=True))
    return first, second


def _check_fp8_weights(fp8_weights: tuple[Quantized, Quantized], weights: list[Any], halves: int) -> None:
    """Of the sizes that `_quantized` makes of these weights: of others only a backward would fail."""
    for name, codes, w in zip(("w13", "w2"), fp8_weights, weights, strict=True):
        if isinstance(w, Quantized):
            wanted = tuple(w.columnwise.shape)
        elif name == "w13":
            first, parts = (w[0], 1) if isinstance(w, tuple) else (w, halves)
            rows = halves * _whole_blocks(first.shape[1] // parts)
            wanted = first.shape[0], rows, first.shape[2]
        else:
            wanted = *w.shape[:2], _whole_blocks(w.shape[2])
        checks.shape(f"fp8_weights of {name}", codes.columnwise, wanted)


def _codes(w: Any, out: Quantized | None = None) -> Quantized:
    return w if isinstance(w, Quantized) else torch_ops.quantize_weights(w, out=out)


def _quantized(
    weights: list[Any], halves: int, out: tuple[Quantized, Quantized] | None = None
) -> tuple[Quantized, Quantized]:
    """FP8 codes of w13, or of w1 and w3, and of w2, filled up with zeros to a multiple of 128 for F."""
    (w13, w2), (out13, out2) = weights, out or (None, None)
    if isinstance(w13, tuple):
        w13 = torch_ops.quantize_weights(w13, out=out13, rows=_whole_blocks(w13[0].shape[1]))
    elif isinstance(w13, Tensor):
        rows = _whole_blocks(w13.shape[1] // halves)
        w13 = torch_ops.quantize_weights(w13, out=out13, parts=halves, rows=rows)
    if not isinstance(w2, Quantized):
        w2 = torch_ops.quantize_weights(w2, out=out2, columns=_whole_blocks(w2.shape[2]))
    return w13, w2


def _whole_blocks(width: int) -> int:
    return width + -width % FP8_BLOCK[1]


def _columns(hidden: int, recipe: str) -> tuple[int, int, int]:
    """Zeros, ones and zeros after x's columns: the ones in a block of their own, whose scale they decide."""
    if recipe == "bf16":
        return 0, 1, 15 - hidden % 16
    return -hidden % FP8_BLOCK[1], 4, FP8_BLOCK[1] - 4


def parts_of_bias(bias: Tensor, parts: int) -> Tensor:
    """[E, N, parts] in float32, whose sum is the bias: each but the last rounded to the four significant bits
    that e4m3 has. The gradient is that of the last. One part is the bias as it is, in its own dtype."""
    if parts == 1:
        return bias.unsqueeze(-1)
    left = bias.float()
    rounded = []
    for _ in range(parts - 1):
        part = ((left.detach().view(torch.int32) + (1 << 19)) & -(1 << 20)).view(torch.float32)
        rounded.append(part)
        left = left - part
    return torch.stack((*rounded, left), dim=-1)


def _checked(w13: Any, w2: Any, bias13: Tensor | None, recipe: str, halves: int) -> list[Any]:
    """w13 (or w1 and w3) and w2, of dtypes and shapes that the recipe takes."""
    parts: list[Any] = list(w13) if isinstance(w13, tuple) else [w13]
    for name, w in (*(("w13", w) for w in parts), ("w2", w2)):
        check_float(name, w, 3)
        if recipe == "bf16" and isinstance(w, Quantized):
            raise TypeError(f'{name}: got quantised weights; wanted a tensor for recipe "bf16"')
        if recipe != "bf16" and isinstance(w, Tensor):
            checks.dtype(name, spec_of(w), checks.QUANTIZABLE)
    if isinstance(parts[0], Quantized):
        if bias13 is not None:
            raise TypeError("bias13: got one with quantised w13; wanted tensors, or fp8_weights made with it")
        return [parts[0], w2]
    if len(parts) not in (1, 2) or parts[0].shape != parts[-1].shape:
        raise ValueError(
            f"w13: got tensors of shapes {[list(w.shape) for w in parts]}; wanted one of [E, 2F, H], or two "
            "of [E, F, H]"
        )
    if parts[0].dtype != parts[-1].dtype:
        raise TypeError(f"w13: got w1 of {parts[0].dtype}, w3 of {parts[1].dtype}; wanted one dtype")
    if len(parts) > halves:
        raise ValueError("w13: got two; wanted one of [E, F, H] for an activation without a gate")
    width = parts[0].shape[1] * len(parts)
    if isinstance(w2, Tensor) and halves * w2.shape[2] != width:
        wanted = width // halves
        raise ValueError(
            f"w2: got shape {list(w2.shape)}; wanted [E, H, {wanted}], for the {width} rows of w13"
        )
    return [tuple(parts) if len(parts) == 2 else parts[0], w2]


def _ffn_of(w13: Any, w2: Any, halves: int) -> int | None:
    """F, by the shapes of the weights; None for records of FP8 codes."""
    if isinstance(w13, tuple):
        return int(w13[0].shape[1])
    if isinstance(w13, Tensor):
        return int(w13.shape[1]) // halves
    return getattr(w2, "shape", (None,))[-1]


def _whole(weights: list[Any], bias13: Tensor | None, recipe: str, halves: int) -> list[Any]:
    """w13 [E, 2F, H] in one piece and w2 [E, H, F], F a multiple of 128 where FP8 wants it, with `_columns`
    for a bias."""
    w13, w2 = weights
    if isinstance(w13, Quantized):
        return [w13, w2 if isinstance(w2, Quantized) else w2.contiguous()]
    parts = list(w13) if isinstance(w13, tuple) else [w13]
    missing = 0 if recipe == "bf16" or isinstance(w2, Quantized) else -w2.shape[2] % FP8_BLOCK[1]
    if missing:
        if len(parts) < halves:
            parts = list(parts[0].unflatten(1, (2, -1)).unbind(1))
        parts, w2 = [pad(w, (0, 0, 0, missing)) for w in parts], pad(w2, (0, missing))
    gate_up = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if bias13 is not None:
        check_float("bias13", bias13, 2)
        before, ones, after = _columns(gate_up.shape[2], recipe)
        if missing:
            bias13 = pad(bias13.unflatten(1, (halves, -1)), (0, missing)).flatten(1)
        columns = parts_of_bias(bias13, ones).to(gate_up.dtype)
        gate_up = torch.cat((pad(gate_up, (0, before)), pad(columns, (0, after))), dim=2)
        w2 = pad(w2, (0, 0, 0, before + ones + after))
    return [w if isinstance(w, Quantized) else w.contiguous() for w in (gate_up, w2)]
