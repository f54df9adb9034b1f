"""The expert layer: forward and backward, in one process or over ranks, in three precision recipes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from fp8moe.activation import SWIGLU, Activation
from fp8moe.expert_parallel import (
    Comm,
    Dispatched,
    DispatchedRows,
    combine,
    overflow,
)
from fp8moe.expert_parallel.exchange import prepare_dispatch
from fp8moe.expert_parallel.overlap import overlapped_backward, overlapped_forward
from fp8moe.expert_parallel.protocols import Settings, capacity_of, check_comm, chunks_of, with_spare
from fp8moe.layer.checks import (
    check_backward,
    check_before_sending,
    check_dy,
    check_fields_of_operands,
    check_gradients,
    check_later_chunk,
    check_layer,
    check_operands,
    check_permuted,
    check_saved,
    check_saved_tensors,
    check_sums,
    check_wanted,
    with_bias,
)
from fp8moe.layer.options import LayerOptions, layer_options
from fp8moe.layer.permuted_rows import (
    PlacedRows,
    pad_rows,
    place_rows,
    unpad_rows,
)
from fp8moe.layer.recipes import GRADIENTS, RecipeName, cast, of_h, of_inputs
from fp8moe.layer.saved import Saved, SavedForWeights
from fp8moe.ops.bias import raw_expert_sums
from fp8moe.ops.plan import raw_plan_topk, static_bound
from fp8moe.ops.quantize import (
    quantize,
    quantize_parts,
    raw_quantize,
    times_overwritten,
    transpose_codes,
)
from fp8moe.records import ArrayLike, MoEGrads, PermutationPlan, Quantized, QuantTensor
from fp8moe.runtime import checks, counters
from fp8moe.runtime.dispatch import current, operation


def quantize_weights(
    x: ArrayLike | tuple[ArrayLike, ...],
    *,
    fmt: str = "e4m3",
    parts: int = 1,
    rows: int | None = None,
    columns: int | None = None,
    transposed: bool = False,
    columnwise: bool = True,
    out: Quantized | None = None,
) -> Quantized:
    """Quantise weights in (128, 128) blocks, row-wise and transposed, reading them once.

    To be called once per step, for all micro-batches. No option makes an intermediate copy.

    Parameters
    ----------
    x : ArrayLike, bfloat16, float16 or float32, [E, N, K], or a tuple of them
        The weights of all experts. The rows of several arrays, such as (w1, w3), are concatenated.
    fmt : "e4m3" or "e5m2"
        Format of the codes.
    parts : int
        Number of equal parts of one array's rows: 2 for w13.
    rows : int or None
        Rows of each part in the result, filled with zeros. A multiple of 128 if there are several parts.
    columns : int or None
        Columns of the result, filled with zeros.
    transposed : bool
        Whether x is stored transposed, [E, K, N].
    columnwise : bool
        Whether to make the transposed codes; without them each `moe_backward` derives them
        (``weight_copies="rowwise"``).
    out : Quantized or None
        The previous step's result, whose memory is overwritten (see `quantize`). `moe_backward` of a forward
        that read the old codes then raises.

    Returns
    -------
    Quantized
        ``rowwise`` for the forward; ``columnwise``, stored transposed, for dgrad, or None.

    Raises
    ------
    TypeError, ValueError
        As for `quantize`, and for sizes that do not fit.

    Examples
    --------
    >>> w = fp8moe.quantize_weights(np.ones((2, 128, 256), np.float32))
    >>> w.rowwise.data.shape, w.columnwise.data.shape, w.columnwise.shape
    ((2, 128, 256), (2, 256, 128), (2, 128, 256))
    >>> w1, w3 = np.ones((2, 2, 100, 256), np.float32)
    >>> fp8moe.quantize_weights((w1, w3), rows=128).rowwise.shape
    (2, 256, 256)
    """
    whole = rows is None and columns is None and transposed is False and columnwise is True
    if whole and not isinstance(x, tuple) and type(parts) is int and parts == 1:
        return quantize(x, fmt=fmt, block=(128, 128), columnwise=True, out=out)  # type: ignore[no-any-return]
    options: dict[str, Any] = {"parts": parts, "rows": rows, "columns": columns, "transposed": transposed}
    return quantize_parts(x, fmt=fmt, **options, columnwise=columnwise, out=out)  # type: ignore[no-any-return]


def experts_of(w: Any) -> int:
    """The number of experts of quantised or plain weights."""
    return int(w.shape[0])


def moe_forward(
    x: ArrayLike,
    w13: ArrayLike,
    w2: ArrayLike,
    topk_ids: ArrayLike,
    topk_probs: ArrayLike,
    *,
    recipe: RecipeName = "fp8_flow",
    recompute: str | None = None,
    save: str = "bf16",
    activation: Activation = SWIGLU,
    bias13: ArrayLike | None = None,
    comm: Comm | None = None,
    gradients: Collection[str] = GRADIENTS,
    backend: str | None = None,
    num_sms: int | None = None,
    weight_copies: str = "both",
) -> tuple[Any, Saved]:
    """The expert layer: y[t] = sum over t's experts e of prob * w2[e] @ swiglu(w13[e] @ x[t] + bias13[e]).

    Parameters
    ----------
    x : ArrayLike, bfloat16, [T, H]
        For "bf16" also float16, float32 or float64.
    w13 : ArrayLike or Quantized, [E, 2F, H]
        For "bf16" in x's dtype. For the FP8 recipes bfloat16, float16 or float32, or the result of
        `quantize_weights`, also without ``columnwise``, and F must be a multiple of 128. [E, F, H] for an
        activation without a gate.
    w2 : ArrayLike or Quantized, [E, H, F]
        As ``w13``.
    topk_ids : ArrayLike, int32 or int64, [T, k]
        Expert ids. A negative id, or one of at least E, means no expert.
    topk_probs : ArrayLike, floating point, [T, k]
        Weights of the experts' outputs.
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        The precision.
    recompute : None or "moe_expert"
        "moe_expert": save only the input of fc1, for "fp8_flow" before its permutation; the backward
        recomputes fc1 and the activation, but not dispatch.
    save : "bf16" or "fp8"
        Form in which the output of fc1, h, is saved: "bf16", in its dtype, or for "fp8_flow" without
        recompute "fp8", e4m3 codes, half the bytes. The forward uses h in bfloat16 and writes the codes in
        the same pass; the backward reads the codes, so that dprobs and the gradients of all else but y differ
        by what rounding h to 2^-4 changes (``docs/concepts/recipes.md`` has the bound).
    activation : Activation
        The activation between the two GEMMs.
    bias13 : ArrayLike or None, float32 (float64 for float64 weights), [E, 2F]
        Added to the first GEMM's float32 sums before they are rounded; with backend "cublas" it is first
        rounded to their dtype.
    comm : Comm or None
        The transport between ranks, for expert parallelism (`fp8moe.expert_parallel`). w13 and w2 are then
        this rank's experts, topk_ids number the experts of all ranks, and the weight gradients are this
        rank's.
    gradients : collection of str
        Gradients that `moe_backward` will compute, of "dx", "dprobs", "dw13", "dw2" and "dbias13". Tensors
        that only the other gradients need are neither computed nor saved. For inference pass (): every
        intermediate is then freed after its last use.
    backend : str or None
        The backend of all GEMMs, including the backward's; as for `grouped_gemm`.
    num_sms : int or None
        Maximum number of the GPU's multiprocessors for each GEMM, as for `grouped_gemm`; also for the
        backward, unless it is given its own. It does not apply to the memory-bound kernels between the GEMMs,
        which are short. Results do not depend on it.
    weight_copies : "both" or "rowwise"
        Orientations of the FP8 weights that are made and saved. "rowwise": only the one that the forward
        reads, one byte a weight. Each backward derives the other with `transpose_codes`, bit for bit the
        same, for one weight after the other, and releases it after that weight's dgrad (with
        ``overlap_chunks`` after the last chunk's). "bf16" makes none.

    Returns
    -------
    y : ArrayLike, [T, H]
        In x's dtype. The call does not synchronise with the host, except to read row counts for a ``comm``
        without a `fp8moe.expert_parallel.Capacity`.
    saved : Saved
        For `moe_backward`.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit each other.

    Notes
    -----
    "fp8_flow" is the dataflow of arXiv 2511.02302, with two casts. "fp8_blockwise" requantises every operand
    that is read in the other orientation, twelve casts in total.

    A NaN in an operand reaches every result that depends on it. An infinity does so with "bf16" only: the FP8
    recipes quantise it to the format's largest number under a scale of 1 (see `quantize`), so that a check of
    the gradients for infinities has to look at x and at dy as well. With save="fp8" an infinity of h is saved
    as NaN.

    Examples
    --------
    >>> x, w13, w2 = np.ones((1, 1)), np.array([[[100.0], [2.0]]]), np.array([[[1.0]]])
    >>> ids, probs = np.zeros((1, 1), np.int32), np.full((1, 1), 0.5)
    >>> y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="bf16")
    >>> y.tolist()
    [[100.0]]
    """
    options = layer_options(activation, recipe, recompute, save, backend, num_sms, weight_copies)
    operands = x, w13, w2, topk_ids, topk_probs, options
    return forward(*operands, bias13=bias13, comm=comm, gradients=gradients)


def forward(
    x: Any,
    w13: Any,
    w2: Any,
    topk_ids: Any,
    topk_probs: Any,
    options: LayerOptions,
    *,
    bias13: Any,
    comm: Comm | None,
    gradients: Collection[str],
    kept: Collection[str] | None = None,
    announced: dict[str, Any] | None = None,
) -> tuple[Any, Saved]:
    """`moe_forward`. Saves the tensors that the gradients ``kept`` need, by default ``gradients``; to the
    other ranks it announces a backward that computes ``gradients``, and ``announced``: fields of
    `Settings`."""
    if comm is not None:
        check_comm(comm)
    check_gradients(gradients)
    gradients = with_bias(gradients, bias13)
    kept = tuple(gradients if kept is None else kept)
    if isinstance(x, QuantTensor):
        raise TypeError(
            "x: got a QuantTensor; wanted an array; pass fp8moe.dequantize(x), or permuted rows to "
            "moe_forward_permuted"
        )
    overwritten = _overwritten(w13, w2, options)
    operands = x, w13, w2, topk_ids, topk_probs
    if comm is None:
        y, saved = experts_forward(*operands, options, kept, None, bias13)
    else:
        check_before_sending(*operands, options, kept, bias13)
        settings = Settings(options, **announced or {})
        y, saved = _forward_over_ranks(*operands, options, kept, bias13, comm, gradients, settings)
    return y, _recorded(saved, overwritten)


def _forward_over_ranks(
    x: Any,
    w13: Any,
    w2: Any,
    topk_ids: Any,
    topk_probs: Any,
    options: LayerOptions,
    kept: tuple[str, ...],
    bias13: Any,
    comm: Comm,
    gradients: tuple[str, ...],
    settings: Settings,
) -> tuple[Any, Saved]:
    recipe, experts = options.precision, experts_of(w13)
    fmt, chunks = recipe.format_between_ranks, chunks_of(comm)
    if chunks > 1 and recipe.quantizes:  # once for all chunks
        columnwise = options.keeps_columnwise
        w13, w2 = (
            w if isinstance(w, Quantized) else quantize_weights(w, columnwise=columnwise) for w in (w13, w2)
        )
    saved_chunks: list[Saved] = []

    def products(received: Dispatched | DispatchedRows) -> Any:
        if isinstance(received, DispatchedRows):
            rows_given = received.x, w13, w2, received.tokens_per_expert, received.probs
            y, saved = permuted_experts_forward(*rows_given, options, kept, received.align_size, bias13)
        else:
            # rounded up, so that steps with similar row counts share shapes, and with them the recording
            entries = received.num_entries if capacity_of(comm) else with_spare(received.num_entries)
            rows = static_bound(entries, experts, recipe.align_size)
            tokens = received.x, w13, w2, received.topk_ids, received.topk_probs
            y, saved = experts_forward(*tokens, options, kept, rows, bias13)
        saved_chunks.append(replace(saved, route=received.route))
        return y

    inputs = x, topk_ids, topk_probs, experts * comm.world_size, comm
    of_all_ranks: dict[str, Any] = {"gradients": gradients, "settings": settings}
    if chunks > 1:
        y = overlapped_forward(*inputs, fmt=fmt, chunks=chunks, experts=products, **of_all_ranks)
    else:
        received = prepare_dispatch(*inputs, fmt, spare=True, **of_all_ranks)(False).wait()
        y = combine(products(received), received.route, comm)
    saved = replace(
        saved_chunks[0],
        later=tuple(replace(chunk, w13=None, w2=None, bias13=None) for chunk in saved_chunks[1:]),
    )
    if capacity_of(comm) is not None:
        for rows, entries in overflow(saved):
            comm.record_overflow(rows, entries)  # type: ignore[union-attr]
    return y, saved


def _overwritten(w13: Any, w2: Any, options: LayerOptions) -> tuple[int | None, int | None]:
    """How often those codes have been overwritten that are saved of weights given in quantised form."""
    first, second = None, None
    if isinstance(w13, Quantized):
        first = times_overwritten(read_by_backward("w13", w13, options), "w13")
    if isinstance(w2, Quantized):
        second = times_overwritten(read_by_backward("w2", w2, options), "w2")
    return first, second


def _recorded(saved: Saved, overwritten: tuple[int | None, int | None]) -> Saved:
    if overwritten != (None, None):
        saved = saved.changed(overwritten=overwritten)
    if counters.counting():
        counters.record_saved(saved.nbytes)
    return saved


def moe_forward_permuted(
    x: ArrayLike | QuantTensor,
    w13: ArrayLike,
    w2: ArrayLike,
    tokens_per_expert: ArrayLike,
    probs: ArrayLike,
    *,
    recipe: RecipeName = "fp8_flow",
    recompute: str | None = None,
    save: str = "bf16",
    activation: Activation = SWIGLU,
    bias13: ArrayLike | None = None,
    align_size: int = 1,
    gradients: Collection[str] = GRADIENTS,
    backend: str | None = None,
    num_sms: int | None = None,
    weight_copies: str = "both",
) -> tuple[Any, Saved]:
    """The expert layer on already permuted rows: y[i] = probs[i] * w2[e] @ swiglu(w13[e] @ x[i] + bias13[e]).

    The call does not synchronise with the host. If an FP8 recipe needs each expert's rows padded and they are
    not, they are padded inside, which costs one more pass over the rows.

    Parameters
    ----------
    x : ArrayLike or QuantTensor, [N, H]
        Rows sorted by expert: bfloat16 (for "bf16" also float16, float32 or float64), or, for the FP8
        recipes, row-wise codes with block (1, 128), which are used as they are; for "fp8_flow" with w13's
        gradient, their scales must be powers of two. Rows past the last expert's belong to no expert.
    w13 : ArrayLike or Quantized, [E, 2F, H]
        As for `moe_forward`.
    w2 : ArrayLike or Quantized, [E, H, F]
        As for `moe_forward`.
    tokens_per_expert : ArrayLike, int32 or int64, [E]
        Number of rows of each expert, on x's device.
    probs : ArrayLike, floating point, [N]
        Weight of each row's output.
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        The precision.
    recompute : None or "moe_expert"
        As for `moe_forward`.
    save : "bf16" or "fp8"
        As for `moe_forward`.
    activation : Activation
        The activation between the two GEMMs.
    bias13 : ArrayLike or None, float32 (float64 for float64 weights), [E, 2F]
        As for `moe_forward`.
    align_size : int
        Each expert's rows in x are already padded to a multiple of it, with zero rows and zero probs, which
        ``tokens_per_expert`` may or may not include. The FP8 recipes accept 1 and multiples of 128; the
        latter need no padding inside. On CUDA the padding is checked only with FP8MOE_CHECK=1.
    gradients : collection of str
        As for `moe_forward`; "dprobs" is the gradient of ``probs``.
    backend : str or None
        As for `moe_forward`.
    num_sms : int or None
        As for `moe_forward`.
    weight_copies : "both" or "rowwise"
        As for `moe_forward`.

    Returns
    -------
    y : ArrayLike, [N, H]
        In x's dtype; bfloat16 for a `QuantTensor`. Zeros past the last expert's rows.
    saved : Saved
        For `moe_backward`, whose dx is [N, H] and whose dprobs is [N].

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit each other.

    Notes
    -----
    This is `moe_forward` without the permutation: `permute`, this function and `unpermute` give bitwise the
    same result.

    Examples
    --------
    >>> x, w13, w2 = np.ones((2, 1)), np.array([[[100.0], [2.0]]]), np.array([[[1.0]]])
    >>> rows = np.array([2], np.int32), np.array([0.5, 1.0])
    >>> fp8moe.moe_forward_permuted(x, w13, w2, *rows, recipe="bf16")[0].tolist()
    [[100.0], [200.0]]
    """
    options = layer_options(activation, recipe, recompute, save, backend, num_sms, weight_copies)
    arrays = x, w13, w2, tokens_per_expert, probs
    return forward_permuted(*arrays, options, bias13=bias13, align_size=align_size, gradients=gradients)


def forward_permuted(
    x: Any,
    w13: Any,
    w2: Any,
    tokens_per_expert: Any,
    probs: Any,
    options: LayerOptions,
    *,
    bias13: Any,
    align_size: int,
    gradients: Collection[str],
) -> tuple[Any, Saved]:
    """`moe_forward_permuted`."""
    align_size = checks.integer("align_size", align_size, 1)
    check_gradients(gradients)
    arrays = x, w13, w2, tokens_per_expert, probs
    gradients = with_bias(gradients, bias13)
    y, saved = permuted_experts_forward(*arrays, options, gradients, align_size, bias13)
    return y, _recorded(saved, _overwritten(w13, w2, options))


@operation
def experts_forward(
    x: Any,
    w13: Any,
    w2: Any,
    topk_ids: Any,
    topk_probs: Any,
    options: LayerOptions,
    gradients: Collection[str],
    num_out_tokens: int | None = None,
    bias13: Any = None,
) -> tuple[Any, Saved]:
    """`moe_forward` for this rank's experts; x is a QuantTensor if other ranks sent it quantised."""
    given = {"x": x, "w13": w13, "w2": w2, "topk_ids": topk_ids, "topk_probs": topk_probs, "bias13": bias13}
    check_layer(options, gradients, **given)
    recipe, experts = options.precision, experts_of(w13)
    checks.expert_ids(current.call, "topk_ids", topk_ids, experts)
    if not isinstance(x, QuantTensor):
        x = cast(recipe, x)
    sizes: dict[str, Any] = {"align_size": recipe.align_size, "num_out_tokens": num_out_tokens}
    plan = raw_plan_topk(topk_ids, experts, **sizes)
    y, saved = _by_plan(x, w13, w2, bias13, plan, topk_probs, options, gradients)
    return y, _foreseeing_backward(y, saved, gradients)


@operation
def permuted_experts_forward(
    x: Any,
    w13: Any,
    w2: Any,
    tokens_per_expert: Any,
    probs: Any,
    options: LayerOptions,
    gradients: Collection[str],
    align_size: int,
    bias13: Any = None,
) -> tuple[Any, Saved]:
    """`moe_forward_permuted`."""
    recipe = options.precision
    given = {"x": x, "w13": w13, "w2": w2, "tokens_per_expert": tokens_per_expert, "probs": probs}
    given["bias13"] = bias13
    check_permuted(options, align_size, gradients, **given)
    if not isinstance(x, QuantTensor):
        x = cast(recipe, x)
    x, probs, rows = place_rows(x, tokens_per_expert, probs, align_size, recipe.align_size)
    y, saved = _by_plan(x, w13, w2, bias13, rows, probs, options, gradients)
    y = unpad_rows(y, rows)[0]
    return y, _foreseeing_backward(y, saved, gradients)


def _foreseeing_backward(y: Any, saved: Saved, gradients: Collection[str]) -> Saved:
    if gradients:
        current.call.foresee(experts_backward, saved, y, None, None, "float32", gradients)
    return saved


def _by_plan(
    x: Any,
    w13: Any,
    w2: Any,
    bias13: Any,
    plan: PermutationPlan | PlacedRows,
    probs: Any,
    options: LayerOptions,
    gradients: Collection[str],
) -> tuple[Any, Saved]:
    """Forward of the experts, given a plan or placed rows."""
    recipe = options.precision
    if recipe.quantizes:
        w13, w2 = _quantized(w13, options), _quantized(w2, options)
    y, fields = recipe.forward(x, w13, w2, bias13, plan, probs, options, gradients)
    if recipe.quantizes:
        w13, w2 = read_by_backward("w13", w13, options), read_by_backward("w2", w2, options)
    saved = Saved(options, plan, w13=w13, w2=w2, bias13=bias13, **fields)
    return y, saved.needed_for(gradients)


def _quantized(w: Any, options: LayerOptions) -> Quantized:
    if isinstance(w, Quantized):
        return w
    codes = raw_quantize(w, block=(128, 128), columnwise=options.keeps_columnwise)
    return codes if isinstance(codes, Quantized) else Quantized(codes)


def read_by_backward(name: str, w: Quantized, options: LayerOptions) -> Quantized:
    """A forward's codes of a weight without those that its backward does not read."""
    rowwise, columnwise = options.saved_orientations(name, w.columnwise is not None)
    return Quantized(w.rowwise if rowwise else None, w.columnwise if columnwise else None)  # type: ignore[arg-type]


@operation
def experts_backward(
    saved: Saved,
    dy: Any,
    dw13: Any = None,
    dw2: Any = None,
    dtype: str = "float32",
    gradients: Collection[str] = GRADIENTS,
    ffn: int | None = None,
) -> MoEGrads:
    """`moe_backward` for this rank's experts; dy is a QuantTensor if other ranks sent it quantised."""
    check_backward(saved, dy, dw13, dw2, dtype, gradients, ffn, saved.num_tokens)
    dx, dprobs, operands = _backward_input(saved, dy, gradients)
    weight_grads = _backward_weight(saved.options, saved.plan, operands, dw13, dw2, dtype, ffn, None)
    return MoEGrads(dx, dprobs, *weight_grads)


@operation
def experts_backward_input(
    saved: Saved, dy: Any, gradients: Collection[str] = GRADIENTS
) -> tuple[Any, Any, SavedForWeights]:
    """(dx, dprobs, operands) of `moe_backward_input`, for this rank's experts."""
    check_saved_tensors(saved, gradients)
    check_dy(saved, dy, gradients, saved.num_tokens)
    dx, dprobs, operands = _backward_input(saved, dy, gradients)
    return dx, dprobs, SavedForWeights(saved.options, saved.plan, **operands)


@operation
def experts_backward_weight(
    operands: SavedForWeights, dw13: Any, dw2: Any, dtype: str, ffn: int | None, dbias13: Any
) -> tuple[Any, Any, Any]:
    """(dw13, dw2, dbias13) of `moe_backward_weight`; dbias13: of earlier chunks, is added to."""
    check_operands(operands, dw13, dw2, dtype, ffn)
    fields = operands.operands()
    return _backward_weight(operands.options, operands.plan, fields, dw13, dw2, dtype, ffn, dbias13)


def _backward_input(saved: Saved, dy: Any, gradients: Collection[str]) -> tuple[Any, Any, dict[str, Any]]:
    """(dx, dprobs, operands of the weight gradients by their names in `SavedForWeights`)."""
    if not isinstance(dy, QuantTensor):
        dy = cast(saved.options.precision, dy)
    rows = saved.plan
    if isinstance(rows, PlacedRows):
        dy = pad_rows(dy, rows)
    dx, dprobs, operands = saved.options.precision.backward_input(saved, dy, gradients)
    if isinstance(rows, PlacedRows) and dx is not None:
        dx, dprobs = unpad_rows(dx, rows, dprobs)
    return dx, dprobs, operands


def _backward_weight(
    options: LayerOptions,
    plan: PermutationPlan | PlacedRows,
    operands: dict[str, Any],
    dw13: Any,
    dw2: Any,
    dtype: str,
    ffn: int | None,
    dbias13: Any,
) -> tuple[Any, Any, Any]:
    """(dw13, dw2, dbias13). Takes each operand out of ``operands``, to be freed after its last use."""
    sums = operands.pop("dh_sums")
    if sums is not None:
        dbias13 = raw_expert_sums(sums, plan, dbias13)
        del sums
    return *options.precision.backward_weight(options, plan, operands, dw13, dw2, dtype, ffn), dbias13


def moe_backward(
    saved: Saved,
    dy: ArrayLike | QuantTensor,
    *,
    dw13: ArrayLike | tuple[ArrayLike | None, ArrayLike | None] | None = None,
    dw2: ArrayLike | None = None,
    dtype: str = "float32",
    ffn: int | None = None,
    comm: Comm | None = None,
    gradients: Collection[str] = GRADIENTS,
    num_sms: int | None = None,
) -> MoEGrads:
    """Gradients of `moe_forward` and of `moe_forward_permuted`.

    Parameters
    ----------
    saved : Saved
        The forward's second result.
    dy : ArrayLike or QuantTensor, [T, H]
        Gradient of y, in y's dtype; for the FP8 recipes also row-wise codes with block (1, 128), used as they
        are; for "fp8_flow" with w2's gradient, their scales must be powers of two.
    dw13 : ArrayLike, floating point, [E, 2F, H], or None, or a tuple of two
        Accumulator of w13's gradient, for gradient accumulation over micro-batches: the gradient is added in
        place. For "fp8_flow" also a tuple of two, [E, F, H] each or None, for w1 and w3 separately; the
        result then is a tuple, too.
    dw2 : ArrayLike, floating point, [E, H, F], or None
        Accumulator of w2's gradient, as ``dw13``.
    dtype : "float32", "bfloat16" or "float64"
        Dtype of new weight gradients; "bfloat16" is not allowed with ``overlap_chunks``.
    ffn : int or None
        F without the zeros that `quantize_weights` appended; the weight gradients have this size. For
        "fp8_flow" only.
    comm : Comm or None
        The forward's ``comm``.
    gradients : collection of str
        Gradients to compute, of "dx", "dprobs", "dw13", "dw2" and "dbias13". The others are None, and
        whatever only they need is not computed (frozen weights save two of six GEMMs). "dx" and "dprobs" are
        always computed together.
    num_sms : int or None
        As for `moe_forward`, for this backward's GEMMs; None: the forward's value.

    Returns
    -------
    MoEGrads
        dx [T, H], dprobs [T, k] float32, and the weight gradients dw13 [E, 2F, H] and dw2 [E, H, F]: the
        accumulators, or new arrays of ``dtype`` (float64 for float64 inputs). With bias13 also dbias13 [E,
        2F], new, float32 (float64 for float64 inputs), whatever ``dtype`` and ``ffn``: sums over each
        expert's rows of the gradient of the first GEMM's result, for "fp8_flow" of its float32 values before
        they are quantised, for the others of its values in their dtype.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit the forward.
    RuntimeError
        If the FP8 weights that the forward read have since been overwritten by ``quantize_weights(...,
        out=)``.

    Examples
    --------
    >>> x, w13, w2 = np.ones((1, 1)), np.array([[[100.0], [2.0]]]), np.array([[[1.0]]])
    >>> ids, probs = np.zeros((1, 1), np.int32), np.full((1, 1), 0.5)
    >>> y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="bf16")
    >>> g = fp8moe.moe_backward(saved, np.ones((1, 1)), dtype="float64")
    >>> g.dw2.item(), g.dprobs.item()
    (100.0, 200.0)
    """
    gradients = check_saved(saved, comm, gradients)
    saved = _limited(saved, num_sms)
    check_wanted(dw13, dw2, gradients)
    ffn = None if ffn is None else checks.integer("ffn", ffn, 1)
    if comm is None or saved.route is None:
        return experts_backward(_of_this_rank(saved), dy, dw13, dw2, dtype, gradients, ffn)  # type: ignore[no-any-return]
    check_backward(_of_this_rank(saved), dy, dw13, dw2, dtype, gradients, ffn, saved.num_tokens)
    if saved.later:
        check_sums(dtype, gradients, dw13, dw2)
    total = MoEGrads(None, None, dw13, dw2)

    def weights(operands: SavedForWeights) -> None:
        nonlocal total
        total = _added(operands, total, dtype, ffn)

    dx, dprobs = _backward_over_ranks(saved, dy, comm, gradients, weights)
    names = {name: getattr(total, name) for name in ("dw13", "dw2", "dbias13") if name in gradients}
    return replace(MoEGrads(dx, dprobs, None, None), **names)


def _backward_over_ranks(
    saved: Saved,
    dy: Any,
    comm: Comm,
    gradients: Collection[str],
    weights: Callable[[SavedForWeights], None],
) -> tuple[Any, Any]:
    """(dx, dprobs); ``weights`` is called with the operands of each chunk's weight gradients."""
    if saved.later and saved.options.precision.quantizes:  # once for all chunks
        needed = {"w13": of_inputs(gradients), "w2": of_h(gradients)}
        derived: Any = {n: _with_columnwise(getattr(saved, n)) for n in needed if needed[n]}
        saved = replace(saved, **derived)
    weights_of_all = {"w13": saved.w13, "w2": saved.w2, "bias13": saved.bias13}
    chunks = [saved, *(replace(chunk, **weights_of_all) for chunk in saved.later)]
    for number, chunk in enumerate(chunks[1:]):  # before anything is sent
        check_later_chunk(f"saved.later[{number}]", _of_this_rank(chunk), gradients)
    pending_operands: list[SavedForWeights] = []

    def inputs(number: int, dy: Any) -> tuple[Any, Any]:
        dx, dprobs, operands = experts_backward_input(_of_this_rank(chunks[number]), dy, gradients)
        pending_operands.append(operands)
        return dx, dprobs

    return overlapped_backward(
        dy,
        [chunk.route for chunk in chunks],
        comm,
        fmt=saved.options.precision.format_between_ranks,
        inputs=inputs,
        weights=lambda _: weights(pending_operands.pop()),
    )


def _with_columnwise(w: Quantized) -> Quantized:
    return replace(w, columnwise=transpose_codes(w.rowwise)) if w.columnwise is None else w


def _added(operands: SavedForWeights, total: MoEGrads, dtype: str, ffn: int | None) -> MoEGrads:
    """``total`` with the chunk's weight gradients added."""
    if operands.dh is None and operands.a is None and operands.dh_sums is None:
        return total
    accumulators = total.dw13, total.dw2, dtype, ffn, total.dbias13
    dw13, dw2, dbias13 = experts_backward_weight(operands, *accumulators)
    # a gradient that is not requested: the next chunk needs the caller's argument again, a pair for w1 and w3
    return replace(total, dw13=total.dw13 if dw13 is None else dw13, dw2=dw2, dbias13=dbias13)


def moe_backward_input(
    saved: Saved,
    dy: ArrayLike | QuantTensor,
    *,
    comm: Comm | None = None,
    gradients: Collection[str] = GRADIENTS,
    num_sms: int | None = None,
) -> tuple[MoEGrads, SavedForWeights]:
    """First half of `moe_backward`: the gradients of x and of the probabilities, for the previous layer.

    Parameters
    ----------
    saved : Saved
        The forward's second result; it may be deleted after this call.
    dy : ArrayLike or QuantTensor, [T, H]
        As for `moe_backward`. If it need not be cast or permuted (rows already permuted, and "bf16" or
        codes), the result refers to this memory, which must not be modified before `moe_backward_weight`.
    comm : Comm or None
        The forward's ``comm``. `moe_backward_weight` needs none.
    gradients : collection of str
        Gradients that both halves together compute, as for `moe_backward`.
    num_sms : int or None
        As for `moe_backward`, for the GEMMs of both halves.

    Returns
    -------
    grads : MoEGrads
        dx and dprobs; dw13 and dw2 are None.
    operands : SavedForWeights
        For `moe_backward_weight`; empty without "dw13", "dw2" and "dbias13".

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `moe_backward`.

    Notes
    -----
    Zero-bubble pipeline schedules (arXiv 2401.10241) call this half B, and `moe_backward_weight` W. Together
    they launch the same kernels as `moe_backward`, with bitwise the same results. This half has the dgrad
    GEMMs and the activation's backward, and with recompute fc1 and the activation; the other half has the
    transposes and the wgrad GEMMs.

    Examples
    --------
    >>> x, w13, w2 = np.ones((1, 1)), np.array([[[100.0], [2.0]]]), np.array([[[1.0]]])
    >>> ids, probs = np.zeros((1, 1), np.int32), np.full((1, 1), 0.5)
    >>> y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="bf16")
    >>> grads, operands = fp8moe.moe_backward_input(saved, np.ones((1, 1)))
    >>> grads.dprobs.item(), fp8moe.moe_backward_weight(operands, dtype="float64").dw2.item()
    (200.0, 100.0)
    """
    gradients = check_saved(saved, comm, gradients)
    saved = _limited(saved, num_sms)
    if comm is None or saved.route is None:
        dx, dprobs, operands = experts_backward_input(_of_this_rank(saved), dy, gradients)
        return MoEGrads(dx, dprobs, None, None), operands
    check_backward(_of_this_rank(saved), dy, None, None, "float32", gradients, None, saved.num_tokens)
    chunk_operands: list[SavedForWeights] = []
    dx, dprobs = _backward_over_ranks(saved, dy, comm, gradients, chunk_operands.append)
    return MoEGrads(dx, dprobs, None, None), replace(chunk_operands[0], later=tuple(chunk_operands[1:]))


def moe_backward_weight(
    operands: SavedForWeights,
    *,
    dw13: ArrayLike | tuple[ArrayLike | None, ArrayLike | None] | None = None,
    dw2: ArrayLike | None = None,
    dtype: str = "float32",
    ffn: int | None = None,
    num_sms: int | None = None,
) -> MoEGrads:
    """Second half of `moe_backward`: the weight gradients, which no other layer needs.

    Parameters
    ----------
    operands : SavedForWeights
        The second result of `moe_backward_input`. It is only read: calling this function twice adds twice.
    dw13 : ArrayLike, floating point, [E, 2F, H], or None, or a tuple of two
        Accumulator, as for `moe_backward`.
    dw2 : ArrayLike, floating point, [E, H, F], or None
        Accumulator, as for `moe_backward`.
    dtype : "float32", "bfloat16" or "float64"
        Dtype of new gradients.
    ffn : int or None
        As for `moe_backward`.
    num_sms : int or None
        As for `moe_backward`, for these GEMMs; None: the value of `moe_backward_input`.

    Returns
    -------
    MoEGrads
        dw13, dw2 and dbias13, each None if `moe_backward_input` was called without it; dx and dprobs are
        None.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit the operands.

    Notes
    -----
    See `moe_backward_input`. This half does not communicate, and does not read the weights.

    Examples
    --------
    >>> x, w13, w2 = np.ones((1, 1)), np.array([[[100.0], [2.0]]]), np.array([[[1.0]]])
    >>> ids, probs = np.zeros((1, 1), np.int32), np.full((1, 1), 0.5)
    >>> y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="bf16", gradients=["dw2"])
    >>> _, operands = fp8moe.moe_backward_input(saved, np.ones((1, 1)), gradients=["dw2"])
    >>> total = np.ones((1, 1, 1))
    >>> fp8moe.moe_backward_weight(operands, dw2=total).dw2 is total, total.item()
    (True, 101.0)
    """
    chunks = check_fields_of_operands(operands)
    operands = _limited(operands, num_sms)
    needed = ("dw13", operands.dh), ("dw2", operands.a), ("dbias13", operands.dh_sums)
    wanted = [name for name, x in needed if x is not None]
    check_wanted(dw13, dw2, wanted)
    ffn = None if ffn is None else checks.integer("ffn", ffn, 1)
    if not wanted:
        return MoEGrads(None, None, None, None)
    if operands.later:
        check_sums(dtype, wanted, dw13, dw2)
        for name, chunk in chunks[1:]:  # before anything is added
            check_later_chunk(name, chunk, wanted, replace(operands, later=()))
    total = MoEGrads(None, None, dw13, dw2)
    for chunk in (replace(operands, later=()), *operands.later):
        total = _added(chunk, total, dtype, ffn)
    return total if "dw13" in wanted else replace(total, dw13=None)


def _limited(saved: Any, num_sms: int | None) -> Any:
    """``saved`` with another limit than the forward's, for all chunks."""
    if num_sms is None:
        return saved
    later = tuple(_limited(chunk, num_sms) for chunk in saved.later)
    return replace(saved, options=replace(saved.options, num_sms=num_sms), later=later)


def _of_this_rank(saved: Saved) -> Saved:
    """``saved`` without the fields that only the public functions read."""
    if saved.route is None and saved.overwritten == (None, None):
        return saved
    return saved.changed(route=None, overwritten=(None, None), later=())  # type: ignore[no-any-return]
