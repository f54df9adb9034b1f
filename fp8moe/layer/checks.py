"""Checks of the expert layer's arguments: before anything is computed, sent, or added to a gradient."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from fp8moe.expert_parallel.protocols import check_comm
from fp8moe.formats import BFLOAT16, round_up
from fp8moe.layer.options import LayerOptions
from fp8moe.layer.permuted_rows import PlacedRows
from fp8moe.layer.recipes import GRADIENTS, Recipe, parts_of
from fp8moe.layer.saved import Saved, SavedForWeights
from fp8moe.ops.bias import num_chunks
from fp8moe.ops.grouped_gemm import not_on_cpu
from fp8moe.ops.quantize import times_overwritten
from fp8moe.records import PermutationPlan, Quantized, QuantTensor
from fp8moe.runtime import checks
from fp8moe.runtime.call import load_backend
from fp8moe.runtime.dispatch import NOWHERE, Call, current, enter, operation
from fp8moe.runtime.interop import Device
from fp8moe.runtime.record_trees import is_metadata

FLOAT64 = np.dtype(np.float64)


def check_gradients(gradients: Any) -> None:
    if type(gradients) is tuple and gradients == GRADIENTS:
        return
    if isinstance(gradients, str) or not isinstance(gradients, Collection) or hasattr(gradients, "dtype"):
        raise TypeError(f"gradients: got {type(gradients).__name__}; wanted a collection of {GRADIENTS}")
    for name in gradients:
        checks.choice("gradients", name, GRADIENTS)


def with_bias(gradients: Collection[str], bias13: Any) -> tuple[str, ...]:
    """The gradients that there are, of a layer with or without a bias."""
    if bias13 is None and gradients is GRADIENTS:
        return _WITHOUT_BIAS
    return tuple([name for name in gradients if name != "dbias13" or bias13 is not None])


_WITHOUT_BIAS = GRADIENTS[:-1]


def check_layer(options: LayerOptions, gradients: Collection[str], **arrays: Any) -> None:
    call = enter(**arrays)
    a = call.args
    _check_codes("x", a.x, options.precision)  # of another rank
    _check_rows_and_weights(options, a)
    checks.dtype("topk_ids", a.topk_ids, checks.INTEGERS)
    checks.shape("topk_ids", a.topk_ids, (a.x.shape[0], "k"))
    checks.dtype("topk_probs", a.topk_probs, checks.FLOATS)
    checks.shape("topk_probs", a.topk_probs, tuple(a.topk_ids.shape))
    _check_backend_of(call, options, gradients)


@operation
def check_before_sending(
    x: Any,
    w13: Any,
    w2: Any,
    topk_ids: Any,
    topk_probs: Any,
    options: LayerOptions,
    gradients: Collection[str],
    bias13: Any,
) -> None:
    """`check_layer` as an operation, so that it runs once per set of shapes."""
    given = {"x": x, "w13": w13, "w2": w2, "topk_ids": topk_ids, "topk_probs": topk_probs, "bias13": bias13}
    check_layer(options, gradients, **given)


def check_permuted(options: LayerOptions, align_size: int, gradients: Collection[str], **arrays: Any) -> None:
    call, recipe = enter(**arrays), options.precision
    a = call.args
    _check_codes("x", a.x, recipe)
    if isinstance(a.x, QuantTensor) and recipe.scaling_aware and "dw13" in gradients:  # which transposes x
        checks.powers_of_two(call, "x", a.x)
    experts = _check_rows_and_weights(options, a)
    checks.dtype("tokens_per_expert", a.tokens_per_expert, checks.INTEGERS)
    checks.shape("tokens_per_expert", a.tokens_per_expert, (experts,))
    checks.dtype("probs", a.probs, checks.FLOATS)
    checks.shape("probs", a.probs, (a.x.shape[0],))
    wanted = recipe.align_size
    if align_size != 1 and align_size % wanted:
        raise ValueError(
            f"align_size: got {align_size}; wanted 1 for rows without padding, or a multiple of {wanted} for "
            f"recipe {recipe.name!r}"
        )
    _check_backend_of(call, options, gradients)


def _check_codes(name: str, x: Any, recipe: Recipe) -> None:
    """Check rows that are quantised already."""
    if isinstance(x, QuantTensor):
        if not recipe.quantizes:
            raise TypeError(
                f'{name}: got a QuantTensor with recipe "{recipe.name}"; wanted an array; pass '
                f"fp8moe.dequantize({name})"
            )
        checks.quant_tensor(name, x, ((1, 128),))


def _check_rows_and_weights(options: LayerOptions, a: Any) -> int:
    """Check x and the weights; returns the number of experts."""
    recipe, activation = options.precision, options.activation
    quantized = recipe.quantizes
    checks.shape("x", a.x, ("T", "H"))
    if not isinstance(a.x, QuantTensor):
        fix = 'pass x in bfloat16 (ml_dtypes.bfloat16 in NumPy and CuPy), or recipe="bf16"'
        checks.dtype("x", a.x, recipe.dtypes, fix if quantized else "")
    hidden = a.x.shape[1]
    for name in ("w13", "w2"):
        w = getattr(a, name)
        if isinstance(w, Quantized):
            if not quantized:
                raise TypeError(f'{name}: got quantised weights; wanted an array for recipe "{recipe.name}"')
            check_codes_of_forward(name, w)
            sizes: tuple[int | str, ...] = "E", "N", "K"
            for side, transposed in (("rowwise", False), ("columnwise", True)):
                if (q := getattr(w, side)) is None:
                    continue
                checks.quant_tensor(f"{name}.{side}", q, ((128, 128),))
                checks.shape(f"{name}.{side}", q, sizes)
                if q.transposed != transposed:
                    raise ValueError(
                        f"{name}.{side}: got transposed={q.transposed}; wanted {transposed}; pass "
                        f"fp8moe.quantize_weights({name})"
                    )
                sizes = q.shape
            setattr(a, name, w.rowwise)
        elif getattr(w, "dtype", None) not in (dtypes := recipe.weight_dtypes or (a.x.dtype,)):
            checks.dtype(name, w, dtypes, _as_weights(name, w, dtypes[-1].name, quantized))
    rows = "2F" if activation.gated else "F"
    checks.shape("w13", a.w13, ("E", rows, hidden), _stored_transposed(a.w13, 1, hidden, quantized))
    experts, width, _ = a.w13.shape
    if width % activation.columns(recipe.ffn_multiple):
        ffn = round_up(activation.width(width), recipe.ffn_multiple)
        rows_option = f"parts=2, rows={ffn}" if activation.gated else f"rows={ffn}"
        wanted = (
            "twice a multiple of 128, so that no block spans both halves"
            if activation.gated
            else "a multiple of 128"
        )
        wanted += f"; pass quantize_weights(w13, {rows_option}) and quantize_weights(w2, columns={ffn})"
        raise ValueError(f"w13: got {rows} = {width}; wanted {wanted if quantized else 'an even number'}")
    fix = _stored_transposed(a.w2, 2, hidden, quantized)
    checks.shape("w2", a.w2, (experts, hidden, activation.width(width)), fix)
    _check_bias("bias13", a.bias13, None if quantized else a.w13.dtype, (experts, width))
    return int(experts)


def _check_bias(name: str, bias13: Any, of_weights: Any, shape: tuple[int, ...]) -> None:
    """of_weights: the weights' dtype if they are not quantised."""
    if bias13 is not None:
        wanted = np.dtype(np.float64) if of_weights == np.float64 else checks.FLOAT32
        checks.dtype(name, bias13, (wanted,), f"pass it in {wanted}, in which it is added")
        checks.shape(name, bias13, shape)


def _as_weights(name: str, w: Any, dtype: str, quantized: bool) -> str:
    """How to pass weights of another kind or dtype, for errors."""
    if quantized and isinstance(w, QuantTensor):
        return f"pass fp8moe.Quantized({name})"
    if name == "w13" and isinstance(w, tuple):
        return "pass both in one array, [E, 2F, H]" + (", or quantize_weights((w1, w3))" if quantized else "")
    given = getattr(w, "dtype", None)
    codes = f", times the scales of its codes{checks.as_block_fp8(name, given) if quantized else ''}"
    return f"pass {name} in {dtype}" + (codes if getattr(given, "itemsize", 0) == 1 else "")


def check_codes_of_forward(name: str, w: Quantized) -> None:
    """Refuse weights without the codes that the forward reads, of which the others could be derived."""
    if w.rowwise is not None:
        return
    fix = "quantize_weights"
    if w.columnwise is not None:
        fix = f"Quantized(fp8moe.transpose_codes({name}.columnwise), {name}.columnwise)"
    raise TypeError(
        f"{name}.rowwise: got None; wanted the codes that the forward multiplies by; pass fp8moe.{fix}"
    )


def _stored_transposed(w: Any, axis: int, hidden: int, quantized: bool) -> str:
    """How to pass weights that are stored transposed, as w seems to be: its dimension ``axis`` is H. Names
    both weights, because the other may be transposed and square."""
    if isinstance(w, QuantTensor) or len(w.shape) != 3:
        return ""
    if w.shape[axis] != hidden or w.shape[3 - axis] == hidden:
        return ""
    if quantized:
        return "pass weights stored [E, in, out] as quantize_weights(w13, transposed=True), and w2 likewise"
    return "pass contiguous copies of weights stored [E, in, out], with the last two dimensions swapped"


def _check_backend_of(call: Call, options: LayerOptions, gradients: Collection[str]) -> None:
    """`check_backend` for arrays that `_check_rows_and_weights` has checked."""
    if not options.limits_gemms:
        return
    w13, w2 = call.args.w13, call.args.w2
    check_backend(
        options,
        call.device,
        dtype="" if options.precision.quantizes else w13.dtype.name,
        experts=w13.shape[0],
        hidden=w13.shape[2],
        ffn=w2.shape[2],
        gradients=gradients,
    )


def check_backend(
    options: LayerOptions,
    device: Device,
    *,
    dtype: str,
    experts: int,
    hidden: int,
    ffn: int,
    gradients: Collection[str] = GRADIENTS,
) -> None:
    """Raise, before anything is computed, if the backend does not support every GEMM of a layer on a device,
    or a GEMM does not support ``num_sms``.

    dtype: dtype of operands that are not quantised. ffn: F without the padding of FP8 weights. Requirements
    on the number of rows or on the alignment of arrays are not checked here.

    Raises ValueError, and TypeError for a dtype.
    """
    if not options.limits_gemms or device == NOWHERE:
        return
    _refuse_on_cpu(options, device)
    recipe = options.precision
    width = round_up(ffn, recipe.ffn_multiple)
    load_backend(device, "grouped_gemm").check_layer(
        options.backend,
        options.num_sms,
        device,
        operands="e4m3" if recipe.quantizes else dtype,
        experts=experts,
        hidden=hidden,
        columns=options.activation.columns(width),
        width=width,
        ffn=ffn,
        gradients=tuple(gradients),
    )


def _refuse_on_cpu(options: LayerOptions, device: Device) -> None:
    if options.limits_gemms and device == "cpu":
        raise not_on_cpu(*next((name, value) for name, value in options.gemm.items() if value is not None))


def _check_fields(name: str, record: Any, arrays: tuple[str, ...]) -> None:
    """Check the kinds of a record's fields, which `dataclasses.replace` may have altered; arrays: the names
    of those that are arrays or None."""
    if not isinstance(record.options, LayerOptions):
        raise TypeError(f"{name}.options: got {type(record.options).__name__}; wanted the forward's")
    if not isinstance(record.plan, (PermutationPlan, PlacedRows)):
        raise TypeError(f"{name}.plan: got {type(record.plan).__name__}; wanted the forward's")
    in_fp8 = _IN_FP8 if record.options.precision.quantizes else ()
    for field in arrays:
        value = getattr(record, field)
        if value is None:
            continue
        quantised = isinstance(value, QuantTensor)
        if not quantised and (is_metadata(value) or isinstance(value, (list, tuple))):
            raise TypeError(f"{name}.{field}: got {type(value).__name__}; wanted the forward's array")
        if quantised != (field in in_fp8 or (field == "h" and record.options.save == "fp8")):
            raise TypeError(
                f"{name}.{field}: got a {type(value).__name__}; wanted what {record.options.recipe!r} saves"
            )


_IN_FP8 = frozenset(("x", "a", "dy", "dh"))
#: the gradients that need what a forward saves
_DEPENDENTS = {"x": ("dw13",), "h": ("dx", "dprobs", "dw13", "dbias13"), "a": ("dw2",)}


def with_names(name: str, record: Any) -> list[tuple[str, Any]]:
    """The record, and those of the chunks after the first, with their names."""
    later = record.later
    if type(later) is not tuple or not all(isinstance(chunk, type(record)) for chunk in later):
        raise TypeError(
            f"{name}.later: got {type(later).__name__}; wanted a tuple of {type(record).__name__}"
        )
    return [(name, record), *((f"{name}.later[{n}]", chunk) for n, chunk in enumerate(later))]


def check_saved(saved: Any, comm: Any, gradients: Any) -> tuple[str, ...]:
    """Check that the forward saved what the gradients need, and that no FP8 weight was overwritten since.
    Returns the gradients."""
    if not isinstance(saved, Saved):
        raise TypeError(f"saved: got {type(saved).__name__}; wanted the second result of moe_forward")
    chunks = with_names("saved", saved)
    for name, chunk in chunks:
        _check_fields(name, chunk, ("probs", "x", "h", "a", "bias13"))
    recipe = saved.options.precision
    for field in ("w13", "w2"):
        weight = getattr(saved, field)
        if weight is None:
            continue
        quantised = isinstance(weight, (Quantized, QuantTensor))
        no_array = not quantised and (is_metadata(weight) or isinstance(weight, (list, tuple)))
        if no_array or quantised != recipe.quantizes:
            raise TypeError(f"saved.{field}: got {type(weight).__name__}; wanted the forward's weights")
    if type(saved.overwritten) is not tuple or len(saved.overwritten) != 2:
        raise TypeError(f"saved.overwritten: got {type(saved.overwritten).__name__}; wanted the forward's")
    check_gradients(gradients)
    if gradients and saved.w13 is None:
        raise ValueError(
            "saved: got the record of a forward with gradients=(), which saves no tensors; wanted these "
            "gradients in the forward's gradients, too"
        )
    gradients = with_bias(gradients, saved.bias13)
    if saved.w2 is None and not {*gradients} <= {"dw2"}:
        raise TypeError("saved.w2: got None; wanted the forward's weights")
    for name, chunk in chunks if saved.w13 is not None else ():
        if chunk.probs is None:  # the activation's backward would take them for ones
            raise TypeError(f"{name}.probs: got None; wanted the forward's array")
        for field, dependents in _DEPENDENTS.items():
            if getattr(chunk, field) is not None:
                continue
            missing = [gradient for gradient in gradients if gradient in dependents]
            if saved.options.recompute:  # of x and w13
                if gradients and field == "x":
                    raise TypeError(f"{name}.x: got None; wanted the forward's rows, for recompute")
            elif missing and not (field == "a" and recipe.makes_activation and chunk.h is not None):
                raise ValueError(
                    f"gradients: got {missing[0]!r}, but {name}.{field} is None; wanted it in the forward's "
                    "gradients, too"
                )
    for name, w, count in zip(("w13", "w2"), (saved.w13, saved.w2), saved.overwritten, strict=True):
        now = None if count is None or w is None else times_overwritten(w, name)
        if now is not None and now != count:  # None also if only shapes are known
            raise RuntimeError(
                f"{name}: got FP8 codes that quantize_weights has overwritten since the forward; wanted "
                "those that the forward read; run the backward first, or quantise without out="
            )
    if comm is not None:
        check_comm(comm)
    if (comm is None) != (saved.route is None):
        raise ValueError(
            f"comm: got {comm}; wanted {'None' if saved.route is None else 'a transport'}, as in the forward "
            "(saved.route)"
        )
    return gradients


def check_saved_tensors(saved: Saved, gradients: Collection[str], name: str = "saved") -> None:
    """Check the tensors that the forward saved, which `dataclasses.replace` may have altered: no operation of
    the backward checks them again."""
    call, recipe, plan = current.call, saved.options.precision, saved.plan
    _refuse_on_cpu(saved.options, call.device)
    if saved.w13 is None:  # nothing is computed of the others
        _check_plan(call, name, plan, recipe, "E")
        return
    dtypes: tuple[Any, ...] = (BFLOAT16,) if recipe.quantizes else checks.FLOATS
    experts, columns, hidden = _check_weights(f"{name}.w13", saved.w13, recipe, dtypes, ("E", "N", "H"))
    multiple = saved.options.activation.columns(recipe.ffn_multiple)
    if columns % multiple:
        raise ValueError(f"{name}.w13: got {columns} rows; wanted a multiple of {multiple}, as the forward's")
    if saved.options.recompute and gradients and recipe.quantizes and saved.w13.rowwise is None:
        raise TypeError(f"{name}.w13.rowwise: got None; wanted the forward's codes, for recompute")
    ffn = saved.options.activation.width(columns)
    if not recipe.quantizes:
        dtypes = (saved.w13.dtype,)
    if saved.w2 is not None:
        _check_weights(f"{name}.w2", saved.w2, recipe, dtypes, (experts, hidden, ffn))
    rows = _check_plan(call, name, plan, recipe, experts)
    _check_rows(f"{name}.x", saved.x, recipe, dtypes, (_rows_of_x(plan, recipe), hidden))
    if saved.x is not None and recipe.scaling_aware and "dw13" in gradients:  # which transposes x
        checks.powers_of_two(call, f"{name}.x", saved.x)
    checks.arrays((f"{name}.probs", saved.probs, checks.FLOATS, (rows,)))
    if isinstance(saved.h, QuantTensor):
        _check_rows(f"{name}.h", saved.h, recipe, dtypes, (rows, columns))
        if saved.h.fmt != "e4m3":
            raise TypeError(f"{name}.h.fmt: got {saved.h.fmt!r}; wanted 'e4m3'")
    else:
        checks.arrays((f"{name}.h", saved.h, dtypes, (rows, columns)))
    of_weights = None if recipe.quantizes else saved.w13.dtype
    _check_bias(f"{name}.bias13", saved.bias13, of_weights, (experts, columns))
    _check_rows(f"{name}.a", saved.a, recipe, dtypes, (rows, ffn))
    if saved.a is not None and recipe.scaling_aware:  # it is transposed
        checks.powers_of_two(call, f"{name}.a", saved.a)


@operation
def check_later_chunk(
    name: str,
    record: Saved | SavedForWeights,
    gradients: Collection[str],
    into: SavedForWeights | None = None,
) -> None:
    """Check the arrays of a chunk after the first before anything is sent, or added. into: the first chunk,
    to whose sums those of ``record`` are added."""
    if isinstance(record, Saved):
        check_saved_tensors(record, gradients, name)
    else:
        if into is not None:
            _check_operands(into)
        _check_operands(record, name, into)


def _check_weights(
    name: str, w: Any, recipe: Recipe, dtypes: tuple[Any, ...], wanted: tuple[int | str, ...]
) -> tuple[int, int, int]:
    """Check the weights that a forward saved; returns their shape. dtypes: of those that are no codes."""
    if recipe.quantizes:
        if not isinstance(w, Quantized):
            raise TypeError(f"{name}: got a {type(w).__name__}; wanted the forward's weights")
        if w.rowwise is None and w.columnwise is None:
            raise TypeError(f"{name}: got neither rowwise nor columnwise; wanted the forward's weights")
        if w.columnwise is not None:
            _check_blocks(f"{name}.columnwise", w.columnwise, wanted, transposed=True)
            wanted = w.columnwise.shape
        if w.rowwise is not None:
            _check_blocks(f"{name}.rowwise", w.rowwise, wanted, transposed=False)
    else:
        checks.dtype(name, w, dtypes)
        checks.shape(name, w, wanted)
    return w.shape  # type: ignore[no-any-return]


def _check_blocks(name: str, q: Any, wanted: tuple[int | str, ...], *, transposed: bool) -> None:
    """Check a tensor in blocks of (128, 128)."""
    checks.quant_tensor(name, q, ((128, 128),))
    checks.shape(name, q, wanted)
    if q.transposed != transposed:
        raise ValueError(
            f"{name}.transposed: got {q.transposed}; wanted {transposed}, as the forward saved it"
        )


def _check_rows(
    name: str,
    x: Any,
    recipe: Recipe,
    dtypes: tuple[Any, ...],
    wanted: tuple[int | str, ...],
    *,
    transposed: bool = False,
) -> None:
    """Check rows in the precision of the recipe's GEMMs. transposed: codes that are stored transposed."""
    if x is None:
        return
    if not recipe.quantizes:
        checks.dtype(name, x, dtypes)
        checks.shape(name, x, wanted)
    elif transposed:
        _check_blocks(name, x, wanted, transposed=True)
    else:
        checks.quant_tensor(name, x, ((1, 128),))
        checks.shape(name, x, wanted)


def _check_plan(call: Call, name: str, plan: Any, recipe: Recipe, experts: int | str) -> int:
    """Check the forward's plan or placed rows; returns the number of permuted rows."""
    for size, low in (("num_tokens", 0), ("num_out_tokens", 0), ("align_size", 1)):
        checks.integer(f"{name}.plan.{size}", getattr(plan, size), low)
    if plan.align_size % recipe.align_size:
        raise ValueError(
            f"{name}.plan.align_size: got {plan.align_size}; wanted a multiple of {recipe.align_size}"
        )
    if isinstance(plan, PermutationPlan):
        checks.plan(call, plan, fills=True)
        if experts not in (plan.num_experts, "E"):
            raise ValueError(f"{name}.plan: got one for {plan.num_experts} experts; wanted {experts}")
    align: dict[str, Any] = {"align_size": plan.align_size, "align": "plan.align_size"}
    wanted = experts if isinstance(experts, str) else experts + 1
    checks.offsets(call, f"{name}.plan.expert_offsets", plan.expert_offsets, experts=wanted, **align)
    if isinstance(plan, PlacedRows):
        _check_places(call, f"{name}.plan", plan)
    return plan.num_out_tokens  # type: ignore[no-any-return]


def _check_places(call: Call, name: str, plan: PlacedRows) -> None:
    """Check the numbers of placed rows, whose ``expert_offsets`` have been checked."""
    if plan.tokens_per_expert is None:  # rows that lie where they lay
        if plan.num_tokens != plan.num_out_tokens:
            raise ValueError(
                f"{name}.num_tokens: got {plan.num_tokens}; wanted num_out_tokens, {plan.num_out_tokens}"
            )
        return
    counts, experts = f"{name}.tokens_per_expert", plan.expert_offsets.shape[0] - 1
    checks.arrays((counts, plan.tokens_per_expert, checks.INTEGERS, (experts,)))
    checks.int32_offsets(plan.num_tokens, experts, plan.align_size, plan.num_out_tokens)
    values = call.values(plan.tokens_per_expert)
    if values is not None:
        checks.counts(counts, values, plan.num_tokens, "the caller")
        padded = -(-values.astype(np.int64) // plan.align_size) * plan.align_size
        checks.room(f"{name}.num_out_tokens", plan.num_out_tokens, int(padded.sum()), counts)


def _rows_of_x(plan: PermutationPlan | PlacedRows, recipe: Recipe) -> int:
    """Rows of x and dy, as they are saved: before the permutation where the codes are transposed in it."""
    before = recipe.scaling_aware and isinstance(plan, PermutationPlan)
    return plan.num_tokens if before else plan.num_out_tokens


def check_dy(saved: Saved, dy: Any, gradients: Collection[str], tokens: int) -> None:
    call = enter(dy=dy, w13=saved.w13)
    a, recipe = call.args, saved.options.precision
    if isinstance(a.dy, QuantTensor):
        if not recipe.quantizes:
            raise TypeError(f'dy: got a QuantTensor with recipe "{recipe.name}"; wanted an array')
        checks.quant_tensor("dy", a.dy, ((1, 128),))
        if recipe.scaling_aware and "dw2" in gradients:  # which transposes dy
            checks.powers_of_two(call, "dy", a.dy)
    else:
        of_weights = not recipe.quantizes and a.w13 is not None
        checks.dtype("dy", a.dy, (a.w13.dtype,) if of_weights else recipe.dtypes)
    checks.shape("dy", a.dy, (tokens, "H" if a.w13 is None else a.w13.shape[2]))


@operation
def check_backward(
    saved: Saved,
    dy: Any,
    dw13: Any,
    dw2: Any,
    dtype: str,
    gradients: Collection[str],
    ffn: int | None,
    tokens: int,
) -> None:
    """Check all arguments of `moe_backward`, before anything is sent, or added to dw13 or dw2. An operation,
    so that it runs once per set of shapes. tokens: rows of dy."""
    check_saved_tensors(saved, gradients)
    check_dy(saved, dy, gradients, tokens)
    kept = {"dy": dy, "x": saved.x, "a": saved.a, "w13": saved.w13, "w2": saved.w2}
    weight_shapes: list[tuple[int, ...] | None] = [None, None]
    if (w13 := saved.w13) is not None:
        of_w13 = tuple(w13.shape)  # w2 has no say, as a gradient of w2 alone does not need it
        experts, columns, hidden = of_w13
        weight_shapes = [of_w13, (experts, hidden, saved.options.activation.width(columns))]
    _check_outputs(saved, kept, weight_shapes, dw13, dw2, dtype, ffn)


def check_fields_of_operands(operands: Any) -> list[tuple[str, SavedForWeights]]:
    """Check the kinds of the operands' fields, and that all chunks have the same; returns the chunks' records
    with their names."""
    if not isinstance(operands, SavedForWeights):
        raise TypeError(
            f"operands: got {type(operands).__name__}; wanted the second result of moe_backward_input"
        )
    chunks = with_names("operands", operands)
    for name, chunk in chunks:
        _check_fields(name, chunk, ("dy", "a", "dh", "x", "dh_sums"))
        for pair in (("dy", "a"), ("dh", "x"), ("dh_sums",)):
            missing = [field for field in pair if getattr(chunk, field) is None]
            if 0 < len(missing) < len(pair):
                raise ValueError(
                    f"{name}.{missing[0]}: got None; wanted it with {' and '.join(pair)}, or neither"
                )
            if (not missing) != (getattr(operands, pair[0]) is not None):
                raise ValueError(f"{name}.{pair[0]}: got one in some chunks only; wanted it in all or none")
    return chunks


def check_operands(operands: SavedForWeights, dw13: Any, dw2: Any, dtype: str, ffn: int | None) -> None:
    """Check all arguments of `moe_backward_weight`, before anything is added."""
    _check_operands(operands)
    kept = {name: getattr(operands, name) for name in ("dy", "a", "dh", "x")}
    experts = operands.plan.expert_offsets.shape[0] - 1
    weight_shapes = [
        None if left is None else (experts, left.shape[1], right.shape[1])
        for left, right in ((operands.dh, operands.x), (operands.dy, operands.a))
    ]
    kept = {n: value for n, value in (*kept.items(), ("dh_sums", operands.dh_sums)) if value is not None}
    _check_outputs(operands, kept, weight_shapes, dw13, dw2, dtype, ffn)


def _check_operands(
    operands: SavedForWeights, name: str = "operands", into: SavedForWeights | None = None
) -> None:
    call, recipe, plan = current.call, operands.options.precision, operands.plan
    _refuse_on_cpu(operands.options, call.device)
    experts = "E" if into is None else into.plan.expert_offsets.shape[0] - 1
    rows = _check_plan(call, name, plan, recipe, experts)
    outer = _rows_of_x(plan, recipe)
    if operands.dh_sums is not None:
        dh = operands.dh
        of_sums: list[Any] = [checks.FLOAT32, FLOAT64]
        if recipe.quantizes:
            of_sums = [checks.FLOAT32]
        elif dh is not None:
            of_sums = [FLOAT64 if dh.dtype == FLOAT64 else checks.FLOAT32]
        number, width = num_chunks(rows, plan), "2F" if dh is None else dh.shape[1]
        checks.arrays((f"{name}.dh_sums", operands.dh_sums, tuple(of_sums), (number, width)))
        if into is not None:
            wanted = (into.dh_sums.dtype,), (number, into.dh_sums.shape[1])
            checks.arrays((f"{name}.dh_sums", operands.dh_sums, *wanted))
    for left, right, of_rows in (("dy", "a", (outer, rows)), ("dh", "x", (rows, outer))):
        first, second = getattr(operands, left), getattr(operands, right)
        if first is None:
            continue
        for field, x, count, dtypes in (
            (left, first, of_rows[0], checks.FLOATS),
            (right, second, of_rows[1], (getattr(first, "dtype", None),)),
        ):
            transposed = recipe.scaling_aware and field in ("a", "dh")
            _check_rows(f"{name}.{field}", x, recipe, dtypes, (count, "K"), transposed=transposed)
            if recipe.scaling_aware and not transposed:  # it is transposed for the gradient
                checks.powers_of_two(call, f"{name}.{field}", x)


def _check_outputs(
    saved: Saved | SavedForWeights,
    kept: dict[str, Any],
    weight_shapes: Sequence[tuple[int, ...] | None],
    dw13: Any,
    dw2: Any,
    dtype: str,
    ffn: int | None,
) -> None:
    """Check the accumulators of weight gradients of the given shapes; they must not overlap ``kept``."""
    checks.choice("dtype", dtype, ("float32", "bfloat16", "float64"))
    recipe, activation = saved.options.precision, saved.options.activation
    separate, gated = isinstance(dw13, tuple), activation.gated
    if separate and not gated:
        raise ValueError(f"dw13: got two with {activation}, which has no gate; wanted one array or None")
    if (separate or ffn is not None) and not recipe.gradient_in_parts:
        argument = "dw13: got two" if separate else "ffn: got one"
        raise ValueError(f'{argument} with recipe {recipe.name!r}; wanted "fp8_flow"')
    shape_w13, shape_w2 = weight_shapes
    if ffn is not None:
        if shape_w13 is not None:
            checks.integer("ffn", ffn, 1, activation.width(shape_w13[1]))
            shape_w13 = shape_w13[0], ffn if separate else activation.columns(ffn), shape_w13[2]
        if shape_w2 is not None:
            checks.integer("ffn", ffn, 1, shape_w2[2])
            shape_w2 = *shape_w2[:2], ffn
    elif separate and shape_w13 is not None:
        shape_w13 = shape_w13[0], shape_w13[1] // 2, shape_w13[2]
    given = dw13 if any(part is not None for part in parts_of(dw13)) else None
    arrays = enter(**kept, dw13=given, dw2=dw2).args.__dict__
    outs = parts_of(arrays.pop("dw13")), (arrays.pop("dw2"),)
    names = ("dw13[0]", "dw13[1]") if separate else ("dw13",)
    outputs = [*zip(names, (shape_w13, shape_w13), outs[0], strict=False), ("dw2", shape_w2, *outs[1])]
    for name, shape, out in outputs:
        if out is None or shape is None:
            continue
        checks.dtype(name, out, checks.FLOATS)
        checks.shape(name, out, shape)
        checks.writable(name, out, **arrays, plan=saved.plan)
        arrays[name] = out


def check_wanted(dw13: Any, dw2: Any, gradients: Collection[str]) -> None:
    """Check that no accumulator is given for a gradient that is not requested."""
    if isinstance(dw13, tuple) and len(dw13) != 2:
        raise ValueError(
            f"dw13: got a tuple of {len(dw13)}; wanted an array, or a tuple of two, of w1 and w3"
        )
    if dw13 is None and dw2 is None:
        return
    for name, given in (("dw13", dw13), ("dw2", dw2)):
        if any(part is not None for part in parts_of(given)) and name not in gradients:
            raise ValueError(f"{name}: got an array to add to, but gradients has no {name!r}; wanted both")


def check_sums(dtype: str, gradients: Collection[str], dw13: Any, dw2: Any) -> None:
    """Check that the chunks' gradients are not summed in a new bfloat16 array; the caller may pass one."""
    for name, given in (("dw13", dw13), ("dw2", dw2)):
        if dtype == "bfloat16" and name in gradients and all(out is None for out in parts_of(given)):
            raise ValueError(
                f"dtype: got {dtype!r} with overlap_chunks, which would round the sum after each chunk; "
                f"wanted 'float32', or an array to add to as {name}"
            )
