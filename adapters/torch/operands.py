"""Weights as the GEMMs of a call read them: checks of what a caller holds, padding, FP8 codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fp8moe import Quantized, QuantTensor
from fp8moe.activation import SWIGLU, Activation, halves_of
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch.gathered import is_gathered, quantized_of
from fp8moe.adapters.torch.library import spec_of
from fp8moe.adapters.torch.operation import check_float
from fp8moe.layer.checks import check_codes_of_forward
from fp8moe.layer.moe import experts_of
from fp8moe.layer.options import WEIGHT_COPIES, LayerOptions
from fp8moe.layer.recipes import RECIPES, Recipe
from fp8moe.runtime import checks
from fp8moe.runtime.record_trees import arrays_in

__all__ = ["quantize_fp8_weights"]

#: block of FP8 weights, with codes and scales of both orientations
FP8_BLOCK = (128, 128)


class Operands(NamedTuple):
    """The weights of a call.

    masters: w13, for "fp8_flow" possibly the pair (w1, w3), and w2: they get the gradients. None for one that
        was given as codes, which has no gradient.
    codes: what the GEMMs read in place of the masters; None: the masters, in the rows' dtype, or codes that
        the forward makes of them.
    ffn: F, if codes are padded with zeros and the masters are not.
    parameters: those that the masters are parts of, whose ``main_grad`` is used; None: the masters.
    bias13: as `fp8moe.moe_forward` takes it; its gradient is autograd's.
    """

    masters: Sequence[Any]
    codes: Sequence[Quantized] | None
    ffn: int | None = None
    parameters: Sequence[Tensor] | None = None
    bias13: Tensor | None = None


def operands_of(
    weights: list[Any],
    bias13: Tensor | None,
    fp8_weights: tuple[Quantized, Quantized] | None,
    options: LayerOptions,
) -> Operands:
    """Of weights from `checked_weights`, for the recipe "bf16" in the rows' dtype."""
    recipe, halves = options.precision, halves_of(options.activation.kind)
    ffn, width = None, ffn_of(weights[0], weights[1], halves)
    missing = -width % FP8_BLOCK[1] if recipe.quantizes and width is not None else 0
    if bias13 is not None:
        wide = torch.float64 if not recipe.quantizes and weights[1].dtype == torch.float64 else torch.float32
        bias13 = padded(bias13.to(wide), 1, halves, missing).contiguous()
    if not recipe.gradient_in_parts:
        weights = joined_weights(weights, halves, missing)
    elif missing:
        ffn = width
    if not recipe.quantizes:
        if fp8_weights is not None:
            raise ValueError('fp8_weights: got some with recipe "bf16"; wanted None')
        return Operands([w.contiguous() for w in weights], None, bias13=bias13)
    codes: Any = fp8_weights
    if fp8_weights is not None:
        _check_fp8_weights(fp8_weights, weights, halves)
    elif any(isinstance(w, Quantized) for w in weights):
        codes = codes_now(weights, options)
    masters = [None if isinstance(w, Quantized) else w for w in weights]
    return Operands(masters, codes, ffn, bias13=bias13)


def quantize_fp8_weights(
    w13: Tensor | tuple[Tensor, Tensor],
    w2: Tensor,
    *,
    activation: Activation = SWIGLU,
    weight_copies: str = "both",
    out: tuple[Quantized, Quantized] | None = None,
) -> tuple[Quantized, Quantized]:
    """Quantise weights for the ``fp8_weights`` argument of `moe_experts`, padded as it pads them.

    Parameters
    ----------
    w13 : Tensor, [E, 2F, H], or tuple of two, [E, F, H] each
        As in `moe_experts`.
    w2 : Tensor, [E, H, F]
        As in `moe_experts`.
    activation : Activation
        Activation of the layer; determines whether w13 has gates.
    weight_copies : "both" or "rowwise"
        Orientations to make, as in `moe_experts`; its own ``weight_copies`` says what it saves of them.
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
    columnwise = checks.choice("weight_copies", weight_copies, WEIGHT_COPIES) == "both"
    if out is not None and not (isinstance(out, tuple) and [type(o) for o in out] == [Quantized, Quantized]):
        raise TypeError(
            f"out: got {type(out).__name__}; wanted the two Quantized of an earlier call, or None"
        )
    halves = halves_of(activation.kind)
    weights = checked_weights(w13, w2, None, RECIPES["fp8_flow"], halves)
    return _quantized(weights, halves, columnwise, out)


def _check_fp8_weights(fp8_weights: tuple[Quantized, Quantized], weights: list[Any], halves: int) -> None:
    """Raises if fp8_weights do not have the shapes that `_quantized` gives; otherwise only a backward would
    fail."""
    pair = isinstance(fp8_weights, (tuple, list))
    if not pair or len(fp8_weights) != 2 or not all(isinstance(w, Quantized) for w in fp8_weights):
        got = f"({', '.join(type(w).__name__ for w in fp8_weights)})" if pair else type(fp8_weights).__name__
        raise TypeError(f"fp8_weights: got {got}; wanted the two Quantized of quantize_fp8_weights")
    for name, codes, w in zip(("w13", "w2"), fp8_weights, weights, strict=True):
        if isinstance(w, Quantized):
            expected = tuple(w.shape)
        elif name == "w13":
            first, parts = (w[0], 1) if isinstance(w, tuple) else (w, halves)
            rows = halves * round_up_to_block(first.shape[1] // parts)
            expected = first.shape[0], rows, first.shape[2]
        else:
            expected = *w.shape[:2], round_up_to_block(w.shape[2])
        check_codes(f"fp8_weights of {name}", codes)
        checks.shape(f"fp8_weights of {name}", codes, expected)


def codes_now(weights: Sequence[Any], options: LayerOptions) -> tuple[Quantized, Quantized]:
    """The codes of a forward's weights, made before it."""
    return _quantized(weights, halves_of(options.activation.kind), options.keeps_columnwise)


def _quantized(
    weights: Sequence[Any], halves: int, columnwise: bool, out: tuple[Quantized, Quantized] | None = None
) -> tuple[Quantized, Quantized]:
    """FP8 codes of w13, or of the pair (w1, w3), and of w2, padded with zeros to a multiple of 128 of F."""
    w13, w2 = (quantized_of(w, columnwise) if is_gathered(w) else w for w in weights)
    return quantized_by(torch_ops.quantize_weights, w13, w2, halves, columnwise, out=out or (None, None))


def quantized_by(
    quantize: Any,
    w13: Any,
    w2: Any,
    halves: int,
    columnwise: bool,
    transposed: tuple[bool, bool] = (False, False),
    out: tuple[Any, Any] = (None, None),
) -> tuple[Quantized, Quantized]:
    """`_quantized` by a function like `fp8moe.quantize_weights`. transposed: as there, of w13 and of w2."""
    if not isinstance(w13, Quantized):
        tensors = w13 if isinstance(w13, tuple) else (w13,)
        ffn = len(tensors) * tensors[0].shape[1 + transposed[0]] // halves
        padding, _ = padding_of(len(tensors), ffn, halves)
        padding |= {"transposed": transposed[0], "columnwise": columnwise}
        w13 = quantize(w13, out=out[0], **padding)
    if not isinstance(w2, Quantized):
        _, padding = padding_of(1, w2.shape[2 - transposed[1]], halves)
        w2 = quantize(w2, out=out[1], transposed=transposed[1], columnwise=columnwise, **padding)
    return w13, w2


def padding_of(tensors: int, ffn: int, halves: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """How codes are padded to a multiple of 128 of F: arguments of `quantize_weights`, for w13, which is in
    so many tensors, and for w2."""
    width = round_up_to_block(ffn)
    return {"parts": halves // tensors, "rows": width}, {"columns": width}


def round_up_to_block(width: int) -> int:
    return width + -width % FP8_BLOCK[1]


def checked_weights(w13: Any, w2: Any, bias13: Tensor | None, recipe: Recipe, halves: int) -> list[Any]:
    """w13 (or w1 and w3) and w2, after checks of dtypes and shapes for the recipe."""
    parts: list[Any] = list(w13) if type(w13) is tuple and len(w13) in (1, 2) else [w13]
    for name, w in (*[("w13", w) for w in parts], ("w2", w2)):
        if not isinstance(w, (Tensor, Quantized)):
            raise _not_a_weight(name, w13 if name == "w13" else w2)
        if isinstance(w, Quantized):
            check_codes(name, w)
        check_float(name, w, 3)
        if not recipe.quantizes and isinstance(w, Quantized):
            raise TypeError(f'{name}: got quantised weights; wanted a tensor for recipe "bf16"')
        if recipe.quantizes and isinstance(w, Tensor):
            checks.dtype(name, spec_of(w), checks.QUANTIZABLE, f'pass {name}.float(), or recipe="bf16"')
    if bias13 is not None:
        check_float("bias13", bias13)
    if isinstance(parts[0], Quantized):
        if bias13 is not None:
            experts, rows, _ = parts[0].shape
            checks.shape(
                "bias13", bias13, (experts, halves * (ffn_of(parts[0], w2, halves) or rows // halves))
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


def check_codes(name: str, w: Quantized) -> None:
    """Checks that a forward can read weights in FP8, and that nobody waits for their gradients."""
    check_codes_of_forward(name, w)
    for t in arrays_in(w):
        if not isinstance(t, Tensor):
            raise TypeError(
                f"{name}: got a Quantized of {type(t).__module__}.{type(t).__qualname__}; wanted one of "
                "torch tensors; make it of such codes and scales, or by fp8moe.torch.quantize_weights"
            )
        if t.requires_grad:
            raise TypeError(
                f"{name}: got codes or scales that require grad, of which there is none; wanted them "
                "without; call .requires_grad_(False) on each"
            )


def _not_a_weight(name: str, w: Any) -> TypeError:
    """The error for weights that are no tensors, with the call that makes a tensor of them."""
    wanted = "a tensor [E, 2F, H], or a tuple of two [E, F, H]" if name == "w13" else "a tensor [E, H, F]"
    several = isinstance(w, (list, tuple, nn.ModuleList))
    items = list(w) if several else [w]
    kinds = " and ".join(sorted({type(item).__name__ for item in items})) or "nothing"
    got = f"a {type(w).__name__} of {len(items)}, {kinds}" if several else kinds
    fix = f"; pass fp8moe.Quantized({name})" if isinstance(w, QuantTensor) else ""
    if items and all(isinstance(item, nn.Module) for item in items):
        fix = f"; pass torch.stack([m.weight for m in {name}])" if several else "; pass its weights stacked"
    elif several and name == "w13" and len(items) == 2:
        fix = "; pass tuple(w13)" if all(isinstance(t, Tensor) and t.ndim == 3 for t in items) else ""
    elif items and all(isinstance(item, Tensor) for item in items):
        fix = f"; pass torch.stack(list({name}))"
    return TypeError(f"{name}: got {got}; wanted {wanted}{fix}")


def check_sizes(x: Tensor, weights: list[Any], bias2: Tensor | None) -> int:
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


def ffn_of(w13: Any, w2: Any, halves: int) -> int | None:
    """F from the shapes of the weights; None for quantised weights."""
    if isinstance(w13, tuple):
        return int(w13[0].shape[1])
    if isinstance(w13, Tensor):
        return int(w13.shape[1]) // halves
    return getattr(w2, "shape", (None,))[-1]


def joined_weights(weights: list[Any], halves: int, missing: int) -> list[Any]:
    """w13 [E, 2F, H] in one tensor and w2 [E, H, F], with F padded by ``missing``."""
    w13, w2 = weights
    if isinstance(w13, tuple):
        w13 = torch.cat([padded(w, 1, 1, missing) for w in w13], dim=1)
    elif isinstance(w13, Tensor):
        w13 = padded(w13, 1, halves, missing)
    w2 = padded(w2, 2, 1, missing) if isinstance(w2, Tensor) else w2
    return [w.contiguous() if isinstance(w, Tensor) else w for w in (w13, w2)]


def padded(x: Tensor, axis: int, parts: int, missing: int) -> Tensor:
    """x with ``missing`` zeros after each of so many equal parts of an axis."""
    if not missing:
        return x
    # not by unbind, whose backward torch's CPU autocast refuses for the other 16-bit dtype
    zeros = 0, 0, 0, missing
    return pad(x.unflatten(axis, (parts, -1)), zeros[2 * (axis + 1 == x.dim()) :]).flatten(axis, axis + 1)


class _WithoutValues(torch.autograd.Function):
    """`gates_before_ups` of a weight whose codes are multiplied: of the result only the gradient is used, and
    its values are NaN. In gpt-oss it would copy two thirds of the weights in every forward."""

    @staticmethod
    def forward(ctx: Any, interleaved: Tensor) -> Tensor:
        key = interleaved.dtype, interleaved.device
        if key not in _NAN:
            _NAN[key] = torch.full((), float("nan"), dtype=key[0], device=key[1])
        return _NAN[key].expand(interleaved.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


_NAN: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def gradient_of_gates_before_ups(interleaved: Tensor) -> Tensor:
    """`gates_before_ups` where only the gradient of the result is used, as of weights with FP8 codes."""
    if torch.compiler.is_compiling():  # which leaves out what nobody reads
        return gates_before_ups(interleaved)
    return _WithoutValues.apply(interleaved)  # type: ignore[no-any-return]


def gates_before_ups(interleaved: Tensor) -> Tensor:
    """[E, 2F, ...] with all gates before all ups, for pairs (gate, up). Without torch.cat, which bfloat16
    autocast rejects for float16 weights and vice versa."""
    return interleaved.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
