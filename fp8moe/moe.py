"""The expert layer, written once against the public operations, in three recipes.

"fp8_flow" (arXiv 2511.02302) stays in FP8 between two casts, one of the input and one of the output's
gradient: rows travel quantised, SwiGLU quantises what it computes, and the weight gradients' column-wise
operands come from the scaling-aware transpose. "fp8_blockwise" is the baseline with bfloat16 between
kernels, which dequantises and requantises for every column-wise operand: 12 casts. "bf16" has none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from fp8moe import checks, counters
from fp8moe.activation import SWIGLU, Activation
from fp8moe.call import load_backend
from fp8moe.dispatch import NOWHERE, Call, enter, operation
from fp8moe.expert_parallel import (
    Comm,
    Dispatched,
    DispatchedRows,
    combine,
    overflow,
)
from fp8moe.expert_parallel.exchange import prepare_dispatch
from fp8moe.expert_parallel.overlap import overlapped_backward, overlapped_forward
from fp8moe.expert_parallel.protocols import capacity_of, chunks_of, with_spare
from fp8moe.formats import BFLOAT16, round_up
from fp8moe.grouped_gemm import (
    BACKENDS,
    check_limit,
    grouped_gemm,
    grouped_gemm_wgrad,
    not_on_cpu,
    products_by,
)
from fp8moe.interop import Device
from fp8moe.permuted_rows import (
    PlacedRows,
    pad_rows,
    permute,
    permute_backward,
    permute_transpose,
    place_rows,
    unpad_rows,
    unpermute,
    unpermute_backward,
)
from fp8moe.plan import plan_topk, static_bound
from fp8moe.quantize import columns_of, dequantize, quantize, quantize_parts, times_overwritten
from fp8moe.record_trees import nbytes
from fp8moe.records import ArrayLike, MoEGrads, PermutationPlan, Quantized, QuantTensor, Record
from fp8moe.swiglu import swiglu, swiglu_backward, swiglu_quantize, swiglu_quantize_backward
from fp8moe.transpose import scaling_aware_transpose

Recipe = Literal["bf16", "fp8_blockwise", "fp8_flow"]
RECIPES = get_args(Recipe)
#: rows of an expert are padded to this: the FP8 weight gradient contracts over blocks of 128 rows
ALIGN_SIZE = {"bf16": 1, "fp8_blockwise": 128, "fp8_flow": 128}
#: in what format the caller's rows travel and are permuted; None: as they are
FORMAT_BETWEEN_RANKS = {"fp8_flow": "e4m3", "fp8_blockwise": None, "bf16": None}
GRADIENTS = ("dx", "dprobs", "dw13", "dw2")


@dataclass(frozen=True)
class Saved(Record):
    """What `moe_forward` keeps for `moe_backward`.

    x: the input of fc1. fp8_flow: FP8, not yet permuted (k times smaller), or permuted with recompute;
        fp8_blockwise: FP8, permuted; bf16: bfloat16, permuted.
    h, a: fc1's output and the activation; None with recompute, which computes them again. fp8_flow: a is
        column-wise already, [F, P] in (128, 128) blocks.
    w13, w2: the weights as given or quantised, these without the row-wise codes where only the forward
        multiplies by them (all of w2's, and w13's but for recompute); ``nbytes`` leaves weights out.
    overwritten: how often the codes of w13 and of w2 had been overwritten (`quantize_weights` with ``out=``)
        when the forward read them; None for weights that it quantised itself.
    backend: by which kernels the forward's products were made, and the backward's are; None: the fastest.
    num_sms: of how many multiprocessors at most, as of the backend; None: all.
    later: of ``overlap_chunks``, what was kept of the chunks after the first, without the weights.
    """

    recipe: str
    recompute: str | None
    plan: PermutationPlan | PlacedRows
    probs: Any
    x: Any
    h: Any
    a: Any
    w13: Any
    w2: Any
    activation: Activation = SWIGLU
    route: Any = None  # of expert parallelism
    overwritten: tuple[int | None, int | None] = (None, None)
    backend: str | None = None
    num_sms: int | None = None
    later: tuple[Saved, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes saved for the backward, the weights apart."""
        return nbytes(self.plan, self.probs, self.x, self.h, self.a, self.route, self.later)

    @property
    def num_tokens(self) -> int:
        """Rows of dy."""
        if self.route is None:
            return self.plan.num_tokens
        return sum(chunk.route.num_tokens for chunk in (self, *self.later))

    def needed_for(self, gradients: Collection[str]) -> Saved:
        """Without what only other gradients need: with frozen weights (LoRA) x and a; without any, all but
        the plan and the route, which tell what was left out."""
        if not gradients:
            return replace(self, recompute=None, probs=None, x=None, h=None, a=None, w13=None, w2=None)
        x = self.x if "dw13" in gradients or self.recompute else None
        h = self.h if _of_h(gradients) else None
        return replace(self, x=x, h=h, a=self.a if "dw2" in gradients else None)


@dataclass(frozen=True)
class SavedForWeights(Record):
    """What `moe_backward_input` keeps for `moe_backward_weight`: the operands of the weights' gradients.

    With F padded as the weights are, P permuted rows and T tokens it takes, scales apart, for "fp8_flow" T H
    (dy) + P F (a) + T H, or with recompute P H, (x) + 2 P F (dh) bytes; for "fp8_blockwise" P H + P F + P H +
    2 P F; for "bf16" twice that of "fp8_blockwise". x, and without recompute a, are the forward's own, and so
    may dy be the caller's: such memory must stay as it is until the weights' gradients are made. The weights
    are not among it, nor is h: the forward's `Saved` may be dropped.

    dy, a: of w2's gradient; None where it is not wanted. dy: fp8_flow: FP8, not yet permuted; the others:
        permuted. a: fp8_flow: column-wise, the others row-wise.
    dh, x: of w13's gradient; None where it is not wanted. dh: fp8_flow: column-wise, the others row-wise.
        x: as `Saved` has it.
    later: of the chunks after the first, where there are ``overlap_chunks``.
    """

    recipe: str
    recompute: str | None
    plan: PermutationPlan | PlacedRows
    dy: Any
    a: Any
    dh: Any
    x: Any
    activation: Activation = SWIGLU
    backend: str | None = None
    num_sms: int | None = None
    later: tuple[SavedForWeights, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that all of it takes, what it shares with the forward's `Saved` and the caller included."""
        return nbytes(self.plan, self.dy, self.a, self.dh, self.x, self.later)


def quantize_weights(
    x: ArrayLike | tuple[ArrayLike, ...],
    *,
    fmt: str = "e4m3",
    parts: int = 1,
    rows: int | None = None,
    columns: int | None = None,
    transposed: bool = False,
    out: Quantized | None = None,
) -> Quantized:
    """Quantise weights by (128, 128) blocks, row-wise and transposed, from one read.

    Once a step, however many micro-batches use them. Nothing is copied on the way, whatever the options.

    Parameters
    ----------
    x : ArrayLike, bfloat16, float16 or float32, [E, N, K], or a tuple of them
        The weights of all experts; of several arrays, such as (w1, w3), the rows one after another.
    fmt : "e4m3" or "e5m2"
        Format of the codes.
    parts : int
        Of how many equal parts the rows of one array consist: 2 for w13.
    rows : int or None
        Of each part in the result: zeros beyond x's. A multiple of 128 where there are several parts.
    columns : int or None
        Of the result, zeros beyond x's.
    transposed : bool
        x is [E, K, N], stored transposed.
    out : Quantized or None
        The memory of the step before (see `quantize`), which `moe_backward` of a forward that read the old
        codes then refuses.

    Returns
    -------
    Quantized
        ``rowwise`` for the forward, ``columnwise``, stored transposed, for dgrad.

    Raises
    ------
    TypeError, ValueError
        As `quantize`, and for sizes that do not fit.

    Examples
    --------
    >>> w = fp8moe.quantize_weights(np.ones((2, 128, 256), np.float32))
    >>> w.rowwise.data.shape, w.columnwise.data.shape, w.columnwise.shape
    ((2, 128, 256), (2, 256, 128), (2, 128, 256))
    >>> w1, w3 = np.ones((2, 2, 100, 256), np.float32)
    >>> fp8moe.quantize_weights((w1, w3), rows=128).rowwise.shape
    (2, 256, 256)
    """
    if not isinstance(x, tuple) and (parts, rows, columns, transposed) == (1, None, None, False):
        return quantize(x, fmt=fmt, block=(128, 128), columnwise=True, out=out)  # type: ignore[no-any-return]
    options: dict[str, Any] = {"parts": parts, "rows": rows, "columns": columns, "transposed": transposed}
    return quantize_parts(x, fmt=fmt, **options, out=out)  # type: ignore[no-any-return]


def experts_of(w: Any) -> int:
    """How many experts weights are of, quantised or not."""
    return int((w.rowwise if isinstance(w, Quantized) else w).shape[0])


def check_backend(
    backend: str | None,
    device: Device,
    *,
    recipe: str,
    activation: Activation,
    dtype: str,
    experts: int,
    hidden: int,
    ffn: int,
    gradients: Collection[str] = GRADIENTS,
    num_sms: int | None = None,
) -> None:
    """Refuse a backend that does not make every product of a layer on a device, and a limit that these do not
    keep to, before anything is computed.

    dtype: of the operands of "bf16". ffn: F without the zeros that FP8 weights are filled up with. What
    depends on the number of rows, or on where an array begins, is not known here.

    Raises ValueError, and TypeError for a dtype.
    """
    checks.choice("backend", backend, BACKENDS)
    num_sms = check_limit(num_sms)
    given = {n: v for n, v in (("backend", backend), ("num_sms", num_sms)) if v is not None}
    if not given or device == NOWHERE:
        return
    if device == "cpu":
        raise not_on_cpu(*next(iter(given.items())))
    width = ffn if recipe == "bf16" else round_up(ffn, 128)
    load_backend(device, "grouped_gemm").check_layer(
        backend,
        num_sms,
        device,
        operands=dtype if recipe == "bf16" else "e4m3",
        experts=experts,
        hidden=hidden,
        columns=activation.columns(width),
        width=width,
        ffn=ffn,
        gradients=tuple(gradients),
    )


def moe_forward(
    x: ArrayLike,
    w13: ArrayLike,
    w2: ArrayLike,
    topk_ids: ArrayLike,
    topk_probs: ArrayLike,
    *,
    recipe: str,
    recompute: str | None = None,
    activation: Activation = SWIGLU,
    comm: Comm | None = None,
    gradients: Collection[str] = GRADIENTS,
    backend: str | None = None,
    num_sms: int | None = None,
) -> tuple[Any, Saved]:
    """The experts of a layer: y[t] = sum over t's experts e of prob * w2[e] @ swiglu(w13[e] @ x[t]).

    Parameters
    ----------
    x : ArrayLike, bfloat16, [T, H]
        For "bf16" also float32 or float64, which then is the dtype of everything.
    w13 : ArrayLike or Quantized, [E, 2F, H]
        In x's dtype or float32, or, for the FP8 recipes, what `quantize_weights` returned. F must be a
        multiple of 128 for FP8. [E, F, H] for an activation without a gate.
    w2 : ArrayLike or Quantized, [E, H, F]
        As ``w13``.
    topk_ids : ArrayLike, int32 or int64, [T, k]
        Below 0, or E and more, for no expert.
    topk_probs : ArrayLike, floating point, [T, k]
        Factors of the experts' results.
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        The precision.
    recompute : None or "moe_expert"
        "moe_expert": keep only the input of fc1; the backward computes fc1 and the activation again, but
        never dispatch or permute.
    activation : Activation
        Between the two products.
    comm : Comm or None
        How rows move between ranks, for expert parallelism (`fp8moe.expert_parallel`): w13 and w2 are this
        rank's experts then, topk_ids name those of all ranks, and the weights' gradients are this rank's.
    gradients : collection of str
        Names of those that `moe_backward` will be asked for, of "dx", "dprobs", "dw13" and "dw2". What only
        the others need is neither made nor kept; () for inference, where nothing outlives the product that
        reads it.
    backend : str or None
        By which kernels all products are made, the backward's too: as `grouped_gemm` takes it.
    num_sms : int or None
        How many of the GPU's multiprocessors all products may use at most, the backward's too, unless that is
        told otherwise: as `grouped_gemm` takes it. The kernels between them, which are short and limited by
        memory, use what is free. No result depends on it.

    Returns
    -------
    y : ArrayLike, [T, H]
        In x's dtype. Nothing synchronises with the host, but for the counts of rows where there is a
        ``comm`` without a `fp8moe.expert_parallel.Capacity`.
    saved : Saved
        For `moe_backward`.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit each other.

    Notes
    -----
    "fp8_flow" is arXiv 2511.02302's dataflow with two casts; "fp8_blockwise" quantises again wherever an
    operand is read in the other orientation, with twelve.

    A NaN in an operand reaches every result that depends on it. An infinity does so with "bf16" only: the FP8
    recipes quantise it to the format's largest number under a scale of 1 (see `quantize`), so that a check of
    the gradients for infinities has to look at x and at dy as well.

    Examples
    --------
    >>> x, w13, w2 = np.ones((1, 1)), np.array([[[100.0], [2.0]]]), np.array([[[1.0]]])
    >>> ids, probs = np.zeros((1, 1), np.int32), np.full((1, 1), 0.5)
    >>> y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="bf16")
    >>> y.tolist()
    [[100.0]]
    """
    checks.choice("recipe", recipe, RECIPES)
    checks.choice("recompute", recompute, (None, "moe_expert"))
    _check_comm(comm)
    checks.options("activation", activation, Activation)
    _check_gradients(gradients)
    options: dict[str, Any] = {"recipe": recipe, "recompute": recompute, "activation": activation}
    checks.choice("backend", backend, BACKENDS)
    options.update(gradients=tuple(gradients), backend=backend, num_sms=check_limit(num_sms))
    overwritten = _overwritten(w13, w2)
    if comm is None:
        y, saved = experts_forward(x, w13, w2, topk_ids, topk_probs, **options)
    else:
        of_products = backend, options["num_sms"], options["gradients"]
        _check_before_sending(x, w13, w2, topk_ids, topk_probs, recipe, activation, *of_products)
        y, saved = _forward_over_ranks(x, w13, w2, topk_ids, topk_probs, comm, options)
    return y, _recorded(saved, overwritten)


def _forward_over_ranks(
    x: Any, w13: Any, w2: Any, topk_ids: Any, topk_probs: Any, comm: Comm, options: dict[str, Any]
) -> tuple[Any, Saved]:
    recipe, experts = options["recipe"], experts_of(w13)
    fmt, chunks = FORMAT_BETWEEN_RANKS[recipe], chunks_of(comm)
    if chunks > 1 and recipe != "bf16":  # once for all
        w13, w2 = (w if isinstance(w, Quantized) else quantize_weights(w) for w in (w13, w2))
    kept: list[Saved] = []

    def products(arrived: Dispatched | DispatchedRows) -> Any:
        if isinstance(arrived, DispatchedRows):
            of_rows = arrived.tokens_per_expert, arrived.probs
            aligned = {**options, "align_size": arrived.align_size}
            y, saved = permuted_experts_forward(arrived.x, w13, w2, *of_rows, **aligned)
        else:
            # steps whose rows are nearly as many have the same shapes, for which launches are planned once
            entries = arrived.num_entries if capacity_of(comm) else with_spare(arrived.num_entries)
            rows = static_bound(entries, experts, ALIGN_SIZE[recipe])
            y, saved = experts_forward(
                arrived.x, w13, w2, arrived.topk_ids, arrived.topk_probs, num_out_tokens=rows, **options
            )
        kept.append(replace(saved, route=arrived.route))
        return y

    given = x, topk_ids, topk_probs, experts * comm.world_size, comm
    if chunks > 1:
        y = overlapped_forward(*given, fmt=fmt, chunks=chunks, experts=products)
    else:
        arrived = prepare_dispatch(*given, fmt, spare=True)(False).wait()
        y = combine(products(arrived), arrived.route, comm)
    saved = replace(kept[0], later=tuple(replace(chunk, w13=None, w2=None) for chunk in kept[1:]))
    if capacity_of(comm) is not None:
        for rows, entries in overflow(saved):
            comm.record_overflow(rows, entries)  # type: ignore[union-attr]
    return y, saved


def _overwritten(w13: Any, w2: Any) -> tuple[int | None, int | None]:
    """How often the codes of weights that came quantised have been overwritten."""
    first, second = (times_overwritten(w) if isinstance(w, Quantized) else None for w in (w13, w2))
    return first, second


def _recorded(saved: Saved, overwritten: tuple[int | None, int | None]) -> Saved:
    if overwritten != (None, None):
        saved = replace(saved, overwritten=overwritten)
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
    recipe: str,
    recompute: str | None = None,
    activation: Activation = SWIGLU,
    align_size: int = 1,
    gradients: Collection[str] = GRADIENTS,
    backend: str | None = None,
    num_sms: int | None = None,
) -> tuple[Any, Saved]:
    """The experts of rows that a dispatcher has permuted: y[i] = probs[i] * w2[e] @ swiglu(w13[e] @ x[i]).

    Nothing synchronises with the host. Where the FP8 recipes want each expert's rows padded and they are not,
    they are padded inside, by one more pass over the rows.

    Parameters
    ----------
    x : ArrayLike or QuantTensor, [N, H]
        Rows of expert 0, then of expert 1, and so on: bfloat16 (for "bf16" also float32 or float64), or, for
        the FP8 recipes, row-wise codes of block (1, 128), which are not quantised again. Rows past the last
        expert's belong to none.
    w13 : ArrayLike or Quantized, [E, 2F, H]
        As for `moe_forward`.
    w2 : ArrayLike or Quantized, [E, H, F]
        As for `moe_forward`.
    tokens_per_expert : ArrayLike, int32 or int64, [E]
        Rows of each expert, on x's device.
    probs : ArrayLike, floating point, [N]
        Factor of each row's result.
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        The precision.
    recompute : None or "moe_expert"
        As for `moe_forward`.
    activation : Activation
        Between the two products.
    align_size : int
        What each expert's rows are padded to a multiple of in x already, with rows and probs of zeros;
        ``tokens_per_expert`` may count these or not. A multiple of 128 saves the FP8 recipes their own
        padding. On CUDA only FP8MOE_CHECK=1 looks whether it is so.
    gradients : collection of str
        As for `moe_forward`; "dprobs" is that of ``probs``.
    backend : str or None
        As for `moe_forward`.
    num_sms : int or None
        As for `moe_forward`.

    Returns
    -------
    y : ArrayLike, [N, H]
        In x's dtype, bfloat16 for a `QuantTensor`; zeros past the last expert's rows.
    saved : Saved
        For `moe_backward`, whose dx is [N, H] and whose dprobs is [N].

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit each other.

    Notes
    -----
    This is `moe_forward` without its permutation: with rows and probs of `permute`, and `unpermute` after it,
    it computes the same bits.

    Examples
    --------
    >>> x, w13, w2 = np.ones((2, 1)), np.array([[[100.0], [2.0]]]), np.array([[[1.0]]])
    >>> rows = np.array([2], np.int32), np.array([0.5, 1.0])
    >>> fp8moe.moe_forward_permuted(x, w13, w2, *rows, recipe="bf16")[0].tolist()
    [[100.0], [200.0]]
    """
    checks.choice("recipe", recipe, RECIPES)
    checks.choice("recompute", recompute, (None, "moe_expert"))
    checks.options("activation", activation, Activation)
    align_size = checks.integer("align_size", align_size, 1)
    checks.choice("backend", backend, BACKENDS)
    _check_gradients(gradients)
    y, saved = permuted_experts_forward(
        x,
        w13,
        w2,
        tokens_per_expert,
        probs,
        recipe=recipe,
        recompute=recompute,
        align_size=align_size,
        activation=activation,
        gradients=tuple(gradients),
        backend=backend,
        num_sms=check_limit(num_sms),
    )
    return y, _recorded(saved, _overwritten(w13, w2))


@operation
def experts_forward(
    x: Any,
    w13: Any,
    w2: Any,
    topk_ids: Any,
    topk_probs: Any,
    *,
    recipe: str,
    recompute: str | None,
    num_out_tokens: int | None = None,
    activation: Activation,
    gradients: Collection[str] = GRADIENTS,
    backend: str | None = None,
    num_sms: int | None = None,
) -> tuple[Any, Saved]:
    """`moe_forward` of this rank's experts; x is quantised already where it came so from other ranks."""
    if not isinstance(x, QuantTensor):
        given = {"x": x, "w13": w13, "w2": w2, "topk_ids": topk_ids, "topk_probs": topk_probs}
        _check_layer(recipe, activation, backend, num_sms, gradients, **given)
        x = _cast(recipe, x)
    align = ALIGN_SIZE[recipe]
    plan = plan_topk(topk_ids, experts_of(w13), align_size=align, num_out_tokens=num_out_tokens)
    options = recipe, recompute, activation, gradients, backend, num_sms
    return _by_plan(x, w13, w2, plan, topk_probs, *options)


@operation
def permuted_experts_forward(
    x: Any,
    w13: Any,
    w2: Any,
    tokens_per_expert: Any,
    probs: Any,
    *,
    recipe: str,
    recompute: str | None,
    align_size: int,
    activation: Activation,
    gradients: Collection[str] = GRADIENTS,
    backend: str | None = None,
    num_sms: int | None = None,
) -> tuple[Any, Saved]:
    """`moe_forward_permuted`."""
    given = {"x": x, "w13": w13, "w2": w2, "tokens_per_expert": tokens_per_expert, "probs": probs}
    _check_permuted(recipe, activation, align_size, backend, num_sms, gradients, **given)
    if not isinstance(x, QuantTensor):
        x = _cast(recipe, x)
    x, probs, rows = place_rows(x, tokens_per_expert, probs, align_size, ALIGN_SIZE[recipe])
    options = recipe, recompute, activation, gradients, backend, num_sms
    y, saved = _by_plan(x, w13, w2, rows, probs, *options)
    return unpad_rows(y, rows)[0], saved


def _by_plan(
    x: Any,
    w13: Any,
    w2: Any,
    plan: PermutationPlan | PlacedRows,
    probs: Any,
    recipe: str,
    recompute: str | None,
    activation: Activation,
    gradients: Collection[str],
    backend: str | None,
    num_sms: int | None,
) -> tuple[Any, Saved]:
    """The experts of rows that have their places."""
    if recipe != "bf16":
        w13 = w13 if isinstance(w13, Quantized) else quantize_weights(w13)
        w2 = w2 if isinstance(w2, Quantized) else quantize_weights(w2)
    forward, *_ = _STEPS[recipe]
    with products_by(backend, num_sms):
        again = recompute is not None and bool(gradients)
        y, kept = forward(x, w13, w2, plan, probs, activation, again, gradients)
    if recipe != "bf16":
        w13, w2 = w13 if recompute else replace(w13, rowwise=None), replace(w2, rowwise=None)
    kept.update(activation=activation, backend=backend, num_sms=num_sms)
    saved = Saved(recipe, recompute, plan, w13=w13, w2=w2, **kept)
    return y, saved.needed_for(gradients)


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
    """`moe_backward` of this rank's experts; dy is quantised already where it came so from other ranks."""
    _check_backward(saved, dy, dw13, dw2, dtype, ffn)
    dx, dprobs, operands = _backward_input(saved, dy, gradients)
    dw13, dw2 = _backward_weight(operands, dw13, dw2, dtype, ffn)
    return MoEGrads(dx, dprobs, dw13, dw2)


@operation
def experts_backward_input(
    saved: Saved, dy: Any, gradients: Collection[str] = GRADIENTS
) -> tuple[Any, Any, SavedForWeights]:
    """(dx, dprobs, operands) of `moe_backward_input`, of this rank's experts."""
    _check_dy(saved, dy)
    return _backward_input(saved, dy, gradients)


@operation
def experts_backward_weight(
    operands: SavedForWeights, dw13: Any, dw2: Any, dtype: str, ffn: int | None
) -> tuple[Any, Any]:
    """(dw13, dw2) of `moe_backward_weight`."""
    _check_operands(operands, dw13, dw2, dtype, ffn)
    return _backward_weight(operands, dw13, dw2, dtype, ffn)


def _backward_input(saved: Saved, dy: Any, gradients: Collection[str]) -> tuple[Any, Any, SavedForWeights]:
    if not isinstance(dy, QuantTensor):
        dy = _cast(saved.recipe, dy)
    _, backward_input, _ = _STEPS[saved.recipe]
    rows = saved.plan
    if isinstance(rows, PlacedRows):
        dy = pad_rows(dy, rows)
    with products_by(saved.backend, saved.num_sms):
        dx, dprobs, operands = backward_input(saved, dy, gradients)
    if isinstance(rows, PlacedRows) and dx is not None:
        dx, dprobs = unpad_rows(dx, rows, dprobs)
    options: dict[str, Any] = {name: getattr(saved, name) for name in ("activation", "backend", "num_sms")}
    return dx, dprobs, SavedForWeights(saved.recipe, saved.recompute, rows, **operands, **options)


def _backward_weight(
    operands: SavedForWeights, dw13: Any, dw2: Any, dtype: str, ffn: int | None
) -> tuple[Any, Any]:
    *_, backward_weight = _STEPS[operands.recipe]
    with products_by(operands.backend, operands.num_sms):
        return backward_weight(operands, dw13, dw2, dtype, ffn)  # type: ignore[no-any-return]


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
        What the forward returned.
    dy : ArrayLike or QuantTensor, [T, H]
        In y's dtype; or, for the FP8 recipes, row-wise codes of block (1, 128), not quantised again.
    dw13 : ArrayLike, float32 or bfloat16, [E, 2F, H], or None, or a tuple of two
        To add the gradient of w13 to, in place: what several micro-batches sum up. For "fp8_flow" also two,
        [E, F, H] each or None, of w1 and w3 apart, which the result then has, too.
    dw2 : ArrayLike, float32 or bfloat16, [E, H, F], or None
        To add the gradient of w2 to.
    dtype : "float32", "bfloat16" or "float64"
        Of the weights' gradients where none are given; not "bfloat16" for ``overlap_chunks``.
    ffn : int or None
        F, where `quantize_weights` filled weights up with zeros: gradients have this width. For "fp8_flow",
        and with gates w1 and w3 apart.
    comm : Comm or None
        The forward's.
    gradients : collection of str
        Names of those that are wanted, of "dx", "dprobs", "dw13" and "dw2". What only the others need is not
        computed (with frozen weights two of six matrix products), and they are None; "dx" and "dprobs" come
        together.
    num_sms : int or None
        As for `moe_forward`, of this backward's products; None: the forward's.

    Returns
    -------
    MoEGrads
        dx [T, H], dprobs [T, k] float32, and the weights' gradients dw13 [E, 2F, H] and dw2 [E, H, F], those
        given or new ones of ``dtype`` (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit the forward.
    RuntimeError
        Where the FP8 weights that the forward read have been overwritten since, with ``quantize_weights(...,
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
    gradients = _check_saved(saved, comm, gradients)
    saved = _limited(saved, num_sms)
    _check_wanted(dw13, dw2, gradients)
    ffn = None if ffn is None else checks.integer("ffn", ffn, 1)
    if comm is None or saved.route is None:
        return experts_backward(_of_this_rank(saved), dy, dw13, dw2, dtype, gradients, ffn)  # type: ignore[no-any-return]
    _check_backward(saved, dy, dw13, dw2, dtype, ffn)
    if saved.later:
        _check_sums(dtype, gradients, dw13, dw2)
    total = MoEGrads(None, None, dw13, dw2)

    def weights(operands: SavedForWeights) -> None:
        nonlocal total
        total = _added(operands, total, dtype, ffn)

    dx, dprobs = _backward_over_ranks(saved, dy, comm, gradients, weights)
    names = {name: getattr(total, name) for name in ("dw13", "dw2") if name in gradients}
    return replace(MoEGrads(dx, dprobs, None, None), **names)


def _backward_over_ranks(
    saved: Saved,
    dy: Any,
    comm: Comm,
    gradients: Collection[str],
    weights: Callable[[SavedForWeights], None],
) -> tuple[Any, Any]:
    """(dx, dprobs); ``weights`` takes the operands of each chunk's weights' gradients."""
    chunks = [saved, *(replace(chunk, w13=saved.w13, w2=saved.w2) for chunk in saved.later)]
    left: list[SavedForWeights] = []

    def inputs(number: int, dy: Any) -> tuple[Any, Any]:
        dx, dprobs, operands = experts_backward_input(_of_this_rank(chunks[number]), dy, gradients)
        left.append(operands)
        return dx, dprobs

    return overlapped_backward(
        dy,
        [chunk.route for chunk in chunks],
        comm,
        fmt=FORMAT_BETWEEN_RANKS[saved.recipe],
        inputs=inputs,
        weights=lambda _: weights(left.pop()),
    )


def _check_sums(dtype: str, gradients: Collection[str], dw13: Any, dw2: Any) -> None:
    """That chunks are not summed in bfloat16 without the caller's word."""
    for name, given in (("dw13", dw13), ("dw2", dw2)):
        if dtype == "bfloat16" and name in gradients and all(out is None for out in _parts(given)):
            raise ValueError(
                f"dtype: got {dtype!r} with overlap_chunks, whose sums would be rounded one by one; wanted "
                f"'float32', or memory to add to as {name}"
            )


def _added(operands: SavedForWeights, total: MoEGrads, dtype: str, ffn: int | None) -> MoEGrads:
    """Weights' gradients added to those there are."""
    if operands.dh is None and operands.a is None:
        return total
    dw13, dw2 = experts_backward_weight(operands, total.dw13, total.dw2, dtype, ffn)
    return replace(total, dw13=dw13, dw2=dw2)


def moe_backward_input(
    saved: Saved,
    dy: ArrayLike | QuantTensor,
    *,
    comm: Comm | None = None,
    gradients: Collection[str] = GRADIENTS,
    num_sms: int | None = None,
) -> tuple[MoEGrads, SavedForWeights]:
    """The half of `moe_backward` that the layer before waits for: gradients of x and of the probabilities.

    Parameters
    ----------
    saved : Saved
        What the forward returned; it may be dropped after this.
    dy : ArrayLike or QuantTensor, [T, H]
        As for `moe_backward`. Where nothing has to be cast or moved (rows in place, and "bf16" or codes), the
        result refers to this memory: it must stay as it is until `moe_backward_weight`.
    comm : Comm or None
        The forward's. The other half needs none.
    gradients : collection of str
        Names of those that are wanted of both halves together, as for `moe_backward`.
    num_sms : int or None
        As for `moe_backward`, of the products of both halves.

    Returns
    -------
    grads : MoEGrads
        dx and dprobs; dw13 and dw2 are None.
    operands : SavedForWeights
        For `moe_backward_weight`; without "dw13" and "dw2" it holds nothing.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `moe_backward`.

    Notes
    -----
    What zero-bubble pipeline schedules call B, and `moe_backward_weight` W (arXiv 2401.10241). Both together
    launch what `moe_backward` launches, and compute the same bits: products by the transposed weights and the
    activation's gradient here, transposes and products for weights there. With recompute the activation is
    computed again here.

    Examples
    --------
    >>> x, w13, w2 = np.ones((1, 1)), np.array([[[100.0], [2.0]]]), np.array([[[1.0]]])
    >>> ids, probs = np.zeros((1, 1), np.int32), np.full((1, 1), 0.5)
    >>> y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="bf16")
    >>> grads, operands = fp8moe.moe_backward_input(saved, np.ones((1, 1)))
    >>> grads.dprobs.item(), fp8moe.moe_backward_weight(operands, dtype="float64").dw2.item()
    (200.0, 100.0)
    """
    gradients = _check_saved(saved, comm, gradients)
    saved = _limited(saved, num_sms)
    if comm is None or saved.route is None:
        dx, dprobs, operands = experts_backward_input(_of_this_rank(saved), dy, gradients)
        return MoEGrads(dx, dprobs, None, None), operands
    _check_dy(saved, dy)
    left: list[SavedForWeights] = []
    dx, dprobs = _backward_over_ranks(saved, dy, comm, gradients, left.append)
    return MoEGrads(dx, dprobs, None, None), replace(left[0], later=tuple(left[1:]))


def moe_backward_weight(
    operands: SavedForWeights,
    *,
    dw13: ArrayLike | tuple[ArrayLike | None, ArrayLike | None] | None = None,
    dw2: ArrayLike | None = None,
    dtype: str = "float32",
    ffn: int | None = None,
    num_sms: int | None = None,
) -> MoEGrads:
    """The half of `moe_backward` that nothing waits for: gradients of the weights.

    Parameters
    ----------
    operands : SavedForWeights
        What `moe_backward_input` returned. It is read only: called twice, this adds twice.
    dw13 : ArrayLike, float32 or bfloat16, [E, 2F, H], or None, or a tuple of two
        To add to, as for `moe_backward`.
    dw2 : ArrayLike, float32 or bfloat16, [E, H, F], or None
        To add to, as for `moe_backward`.
    dtype : "float32", "bfloat16" or "float64"
        Of the gradients where none are given.
    ffn : int or None
        As for `moe_backward`.
    num_sms : int or None
        As for `moe_backward`, of these products; None: as `moe_backward_input` had it.

    Returns
    -------
    MoEGrads
        dw13 and dw2, None where `moe_backward_input` was not asked for it; dx and dprobs are None.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit the operands.

    Notes
    -----
    See `moe_backward_input`. No rows move between ranks here, and nothing is read of the weights.

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
    if not isinstance(operands, SavedForWeights):
        raise TypeError(
            f"operands: got {type(operands).__name__}; wanted the second result of moe_backward_input"
        )
    operands = _limited(operands, num_sms)
    wanted = [name for name, x in (("dw13", operands.dh), ("dw2", operands.a)) if x is not None]
    _check_wanted(dw13, dw2, wanted)
    ffn = None if ffn is None else checks.integer("ffn", ffn, 1)
    if not wanted:
        return MoEGrads(None, None, None, None)
    if operands.later:
        _check_sums(dtype, wanted, dw13, dw2)
    total = MoEGrads(None, None, dw13, dw2)
    for chunk in (replace(operands, later=()), *operands.later):
        total = _added(chunk, total, dtype, ffn)
    return total


def _check_saved(saved: Any, comm: Any, gradients: Any) -> tuple[str, ...]:
    """That the forward kept what the gradients need, and nothing was overwritten since. The gradients."""
    if not isinstance(saved, Saved):
        raise TypeError(f"saved: got {type(saved).__name__}; wanted what moe_forward returned")
    _check_gradients(gradients)
    if gradients and saved.w13 is None:
        raise ValueError(
            "saved: got that of a forward with gradients=(), which keeps nothing; wanted the names of the "
            "gradients among the forward's"
        )
    needs = ("x", saved.x, {"dw13"}), ("h", saved.h, {*GRADIENTS} - {"dw2"}), ("a", saved.a, {"dw2"})
    for name, kept, of in needs:
        missing = [gradient for gradient in gradients if gradient in of]
        if missing and kept is None and not saved.recompute:
            raise ValueError(
                f"gradients: got {missing[0]!r}, and saved.{name} is None; wanted it among the forward's"
            )
    for name, w, before in zip(("w13", "w2"), (saved.w13, saved.w2), saved.overwritten, strict=True):
        if before is not None and w is not None and times_overwritten(w) != before:
            raise RuntimeError(
                f"{name}: got FP8 codes that quantize_weights overwrote after the forward; wanted the "
                "forward's own; run the backward first, or quantise into other memory"
            )
    _check_comm(comm)
    if (comm is None) != (saved.route is None):
        raise ValueError(
            f"comm: got {comm}; wanted the forward's, {'none' if saved.route is None else 'which had one'}"
        )
    return tuple(gradients)


def _limited(saved: Any, num_sms: int | None) -> Any:
    """With another limit than the forward's, for all chunks."""
    if num_sms is None:
        return saved
    later = tuple(_limited(chunk, num_sms) for chunk in saved.later)
    return replace(saved, num_sms=check_limit(num_sms), later=later)


def _check_wanted(dw13: Any, dw2: Any, gradients: Collection[str]) -> None:
    """That nothing is given to add to for gradients that are not wanted."""
    for name, given in (("dw13", dw13), ("dw2", dw2)):
        if any(part is not None for part in _parts(given)) and name not in gradients:
            raise ValueError(f"{name}: got an array to add to, and gradients without {name!r}; wanted both")


def _of_this_rank(saved: Saved) -> Saved:
    """Without what only the public functions look at."""
    if saved.route is None and saved.overwritten == (None, None):
        return saved
    return replace(saved, route=None, overwritten=(None, None), later=())


def _parts(dw13: Any) -> tuple[Any, ...]:
    """Of w1 and w3 apart, or the one of w13."""
    return dw13 if isinstance(dw13, tuple) else (dw13,)


def _hidden(w13: Any) -> int:
    return int((w13.columnwise if isinstance(w13, Quantized) else w13).shape[2])


def _of_inputs(gradients: Collection[str]) -> bool:
    return "dx" in gradients or "dprobs" in gradients


def _check_gradients(gradients: Any) -> None:
    if isinstance(gradients, str) or not isinstance(gradients, Collection):
        raise TypeError(f"gradients: got {type(gradients).__name__}; wanted names, as of {GRADIENTS}")
    for name in gradients:
        checks.choice("gradients", name, GRADIENTS)


def _check_comm(comm: Any) -> None:
    if comm is not None and not hasattr(comm, "world_size"):
        raise TypeError(
            f"comm: got {type(comm).__name__}; wanted what moves rows between ranks, as "
            "fp8moe.adapters.torch_distributed has, or None"
        )


def _check_dy(saved: Saved, dy: Any) -> None:
    a = enter(dy=dy, w13=saved.w13).args
    quantized = saved.recipe != "bf16"
    if isinstance(a.dy, QuantTensor):
        if not quantized:
            raise TypeError('dy: got a QuantTensor with recipe "bf16"; wanted an array')
        checks.quant_tensor("dy", a.dy, ((1, 128),))
    else:
        of_weights = checks.FLOATS if quantized or a.w13 is None else (a.w13.dtype,)
        checks.dtype("dy", a.dy, (BFLOAT16,) if quantized else of_weights)
    checks.shape("dy", a.dy, (saved.num_tokens, "H" if a.w13 is None else _hidden(a.w13)))


def _check_backward(saved: Saved, dy: Any, dw13: Any, dw2: Any, dtype: str, ffn: int | None) -> None:
    """All that `moe_backward` takes, before anything is added to dw13 or dw2."""
    _check_dy(saved, dy)
    kept = {"dy": dy, "x": saved.x, "a": saved.a, "w13": saved.w13, "w2": saved.w2}
    quantized = saved.recipe != "bf16"
    # the column-wise copy is always kept
    of_weights = [
        None if w is None else tuple((w.columnwise if quantized else w).shape) for w in (saved.w13, saved.w2)
    ]
    _check_outputs(saved, kept, of_weights, dw13, dw2, dtype, ffn)


def _check_operands(operands: SavedForWeights, dw13: Any, dw2: Any, dtype: str, ffn: int | None) -> None:
    """All that `moe_backward_weight` takes, before anything is added."""
    kept = {name: getattr(operands, name) for name in ("dy", "a", "dh", "x")}
    experts = operands.plan.expert_offsets.shape[0] - 1
    of_weights = [
        None if left is None else (experts, left.shape[1], right.shape[1])
        for left, right in ((operands.dh, operands.x), (operands.dy, operands.a))
    ]
    kept = {name: value for name, value in kept.items() if value is not None}
    _check_outputs(operands, kept, of_weights, dw13, dw2, dtype, ffn)


def _check_outputs(
    saved: Saved | SavedForWeights,
    kept: dict[str, Any],
    of_weights: Sequence[tuple[int, ...] | None],
    dw13: Any,
    dw2: Any,
    dtype: str,
    ffn: int | None,
) -> None:
    """What the gradients of weights of these shapes are added to: it may share no memory with ``kept``."""
    checks.choice("dtype", dtype, ("float32", "bfloat16", "float64"))
    apart, gated = isinstance(dw13, tuple), saved.activation.gated
    if apart and not gated:
        raise ValueError(f"dw13: got two with {saved.activation}; wanted one array or None, without a gate")
    if (apart or ffn is not None) and saved.recipe != "fp8_flow":
        raise ValueError(
            f'{"dw13: got two" if apart else "ffn: got one"} with recipe {saved.recipe!r}; wanted "fp8_flow"'
        )
    of_w13, of_w2 = of_weights
    if ffn is not None:
        if not apart and gated:
            raise ValueError(
                f"dw13: got one with ffn={ffn}; wanted two, of w1 and w3; pass dw13=(None, None)"
            )
        if of_w13 is not None:
            checks.integer("ffn", ffn, 1, saved.activation.width(of_w13[1]))
            of_w13 = of_w13[0], ffn, of_w13[2]
        if of_w2 is not None:
            checks.integer("ffn", ffn, 1, of_w2[2])
            of_w2 = *of_w2[:2], ffn
    elif apart and of_w13 is not None:
        of_w13 = of_w13[0], of_w13[1] // 2, of_w13[2]
    given = dw13 if any(part is not None for part in _parts(dw13)) else None
    arrays = enter(**kept, dw13=given, dw2=dw2).args.__dict__
    outs = _parts(arrays.pop("dw13")), (arrays.pop("dw2"),)
    names = ("dw13[0]", "dw13[1]") if apart else ("dw13",)
    each = [*zip(names, (of_w13, of_w13), outs[0], strict=False), ("dw2", of_w2, *outs[1])]
    for name, shape, out in each:
        if out is None or shape is None:
            continue
        checks.dtype(name, out, checks.FLOATS)
        checks.shape(name, out, shape)
        checks.writable(name, out, **arrays)
        arrays[name] = out


def _cast(recipe: str, x: Any) -> Any:
    fmt = FORMAT_BETWEEN_RANKS[recipe]
    return x if fmt is None else quantize(x, fmt=fmt)


@operation
def _check_before_sending(
    x: Any,
    w13: Any,
    w2: Any,
    topk_ids: Any,
    topk_probs: Any,
    recipe: str,
    activation: Activation,
    backend: str | None,
    num_sms: int | None,
    gradients: Collection[str],
) -> None:
    """`_check_layer`, once for given shapes."""
    given = {"x": x, "w13": w13, "w2": w2, "topk_ids": topk_ids, "topk_probs": topk_probs}
    _check_layer(recipe, activation, backend, num_sms, gradients, **given)


def _check_layer(
    recipe: str,
    activation: Activation,
    backend: str | None,
    num_sms: int | None,
    gradients: Collection[str],
    **arrays: Any,
) -> None:
    call = enter(**arrays)
    a = call.args
    _check_rows_and_weights(recipe, activation, a)
    checks.dtype("topk_ids", a.topk_ids, checks.INTEGERS)
    checks.shape("topk_ids", a.topk_ids, (a.x.shape[0], "k"))
    checks.dtype("topk_probs", a.topk_probs, checks.FLOATS)
    checks.shape("topk_probs", a.topk_probs, tuple(a.topk_ids.shape))
    _check_backend_of(call, recipe, activation, backend, num_sms, gradients)


def _check_permuted(
    recipe: str,
    activation: Activation,
    align_size: int,
    backend: str | None,
    num_sms: int | None,
    gradients: Collection[str],
    **arrays: Any,
) -> None:
    call = enter(**arrays)
    a = call.args
    if isinstance(a.x, QuantTensor):
        if recipe == "bf16":
            raise TypeError(
                'x: got a QuantTensor with recipe "bf16"; wanted an array; pass fp8moe.dequantize(x)'
            )
        checks.quant_tensor("x", a.x, ((1, 128),))
    experts = _check_rows_and_weights(recipe, activation, a)
    checks.dtype("tokens_per_expert", a.tokens_per_expert, checks.INTEGERS)
    checks.shape("tokens_per_expert", a.tokens_per_expert, (experts,))
    checks.dtype("probs", a.probs, checks.FLOATS)
    checks.shape("probs", a.probs, (a.x.shape[0],))
    wanted = ALIGN_SIZE[recipe]
    if align_size != 1 and align_size % wanted:
        raise ValueError(
            f"align_size: got {align_size}; wanted 1, of rows without padding, or a multiple of {wanted} for "
            f"recipe {recipe!r}"
        )
    _check_backend_of(call, recipe, activation, backend, num_sms, gradients)


def _check_backend_of(
    call: Call,
    recipe: str,
    activation: Activation,
    backend: str | None,
    num_sms: int | None,
    gradients: Collection[str],
) -> None:
    """Of arrays that `_check_rows_and_weights` has seen."""
    if backend is None and num_sms is None:
        return
    w13, w2 = call.args.w13, call.args.w2
    check_backend(
        backend,
        call.device,
        recipe=recipe,
        activation=activation,
        dtype=w13.dtype.name if recipe == "bf16" else "",
        experts=w13.shape[0],
        hidden=w13.shape[2],
        ffn=w2.shape[2],
        gradients=gradients,
        num_sms=num_sms,
    )


def _check_rows_and_weights(recipe: str, activation: Activation, a: Any) -> int:
    """The number of experts."""
    quantized = recipe != "bf16"
    checks.shape("x", a.x, ("T", "H"))
    if not isinstance(a.x, QuantTensor):
        checks.dtype("x", a.x, (BFLOAT16,) if quantized else checks.FLOATS)
    hidden = a.x.shape[1]
    for name in ("w13", "w2"):
        w = getattr(a, name)
        if isinstance(w, Quantized):
            if not quantized:
                raise TypeError(f'{name}: got quantised weights; wanted an array for recipe "bf16"')
            for side in ("rowwise", "columnwise"):
                checks.quant_tensor(f"{name}.{side}", getattr(w, side), ((128, 128),))
            checks.shape(f"{name}.rowwise", w.rowwise, ("E", "N", "K"))
            checks.shape(f"{name}.columnwise", w.columnwise, w.rowwise.shape)
            orientations = w.rowwise.transposed, w.columnwise.transposed
            if orientations != (False, True):
                raise ValueError(
                    f"{name}: got rowwise and columnwise with transposed={orientations}; wanted (False, "
                    f"True); pass fp8moe.quantize_weights({name})"
                )
            setattr(a, name, w.rowwise)
        else:
            checks.dtype(name, w, checks.QUANTIZABLE if quantized else (a.x.dtype,))
    checks.shape("w13", a.w13, ("E", "2F" if activation.gated else "F", hidden))
    experts, width, _ = a.w13.shape
    if width % activation.columns(128 if quantized else 1):
        why = "twice a multiple of 128, so that no block spans both halves" if quantized else "it even"
        raise ValueError(
            f"w13: got 2F = {width}; wanted {why}"
            if activation.gated
            else f"w13: got F = {width}; wanted a multiple of 128; pass quantize_weights(w13, rows=...)"
        )
    checks.shape("w2", a.w2, (experts, hidden, activation.width(width)))
    return int(experts)


# Each recipe is read from top to bottom; what differs between them is where casts stand. Memory is released
# where its last name goes: rows by ``del`` as soon as they have been read, of k rows a token each.


def _forward_fp8_flow(x, w13, w2, plan, probs, activation, recompute, gradients):  # type: ignore[no-untyped-def]
    moved = permute(x, plan, probs)  # x in FP8 already, by cast 1
    rows = _rows_of(plan)
    h = grouped_gemm(moved.data, w13.rowwise, *rows)
    kept = {"probs": moved.probs, "x": moved.data if recompute else x}
    del moved
    transposed = "dw2" in gradients and not recompute
    a = _activate(h, kept["probs"], plan, activation, transposed)
    rowwise, columnwise = (a.rowwise, a.columnwise) if transposed else (a, None)
    kept |= {"h": _kept_h(h, recompute, gradients), "a": columnwise}
    del h, a
    rows_of_y = grouped_gemm(rowwise, w2.rowwise, *rows)
    del rowwise
    return unpermute(rows_of_y, plan), kept


def _kept_h(h: Any, recompute: bool, gradients: Collection[str]) -> Any:
    return None if recompute or not _of_h(gradients) else h


def _backward_input_fp8_flow(saved, dy, gradients):  # type: ignore[no-untyped-def]
    plan, offsets = saved.plan, saved.plan.expert_offsets
    rows = _rows_of(plan)
    h, a, dh, dx, dprobs = saved.h, saved.a, None, None, None
    if saved.recompute:
        h = grouped_gemm(saved.x, saved.w13.rowwise, *rows)
        if "dw2" in gradients:
            a = _activate(h, saved.probs, plan, saved.activation, transposed=True).columnwise
    if _of_h(gradients):
        # dy in FP8 already, by cast 2
        da = grouped_gemm(permute(dy, plan).data, saved.w2.columnwise, *rows)
        transposed = "dw13" in gradients
        grad = swiglu_quantize_backward(
            da,
            h,
            saved.probs,
            expert_offsets=offsets,
            align_size=plan.align_size,
            activation=saved.activation,
            transposed=transposed,
        )
        of_probs = grad.dprobs
        rowwise, dh = (grad.dh.rowwise, grad.dh.columnwise) if transposed else (grad.dh, None)
        del da, grad
    if _of_inputs(gradients):
        dxe = grouped_gemm(rowwise, saved.w13.columnwise, *rows)
        del rowwise
        dx, dprobs = permute_backward(dxe, plan, of_probs)
    # dy as it came, not its permuted rows, which are k times those to transpose: 360 us for 571 (131,072 x
    # 7168, 32 experts)
    return dx, dprobs, _operands(gradients, dy, a, dh, saved.x)


def _backward_weight_fp8_flow(operands, dw13, dw2, dtype, ffn):  # type: ignore[no-untyped-def]
    plan, offsets = operands.plan, operands.plan.expert_offsets
    a, dh, x = operands.a, operands.dh, operands.x
    if a is not None:
        transposed = permute_transpose(operands.dy, plan, target=_TARGET)
        a = columns_of(a, 0, ffn or a.shape[1])
        dw2 = grouped_gemm_wgrad(transposed, a, offsets, dw2, dtype=dtype)
        del transposed
    if dh is None:
        return None, dw2
    transposed = _transpose(x, plan) if operands.recompute else permute_transpose(x, plan, target=_TARGET)
    parts = _parts_of_dh(dh, dw13, ffn)
    sums = [grouped_gemm_wgrad(half, transposed, offsets, out, dtype=dtype) for half, out in parts]
    return tuple(sums) if isinstance(dw13, tuple) else sums[0], dw2


def _rows_of(plan: PermutationPlan | PlacedRows) -> tuple[Any, Any]:
    """Where each expert's rows begin, and how many are not padding; None where that is not known in int32."""
    counts = plan.tokens_per_expert
    return plan.expert_offsets, counts if counts is not None and counts.dtype == np.int32 else None


def _parts_of_dh(dh: QuantTensor, dw13: Any, ffn: int | None) -> list[tuple[QuantTensor, Any]]:
    """Columns of dh, and what to add their gradient to: of w13, or of w1 and w3 apart."""
    outs = _parts(dw13)
    width = dh.shape[1] // len(outs)
    return [(columns_of(dh, i * width, ffn or width), out) for i, out in enumerate(outs)]


def _activate(h, probs, plan, activation, transposed):  # type: ignore[no-untyped-def]
    options = {"activation": activation, "transposed": transposed}
    return swiglu_quantize(
        h, probs, expert_offsets=plan.expert_offsets, align_size=plan.align_size, **options
    )


# One scale a tile, as the paper's transpose has. A column's own would keep the last bits of values that are
# 2^-15 of their tile's largest, or less, and cost the weights' gradients a fifth of their speed.
_TARGET = "block"


def _transpose(q: Any, plan: PermutationPlan) -> QuantTensor:
    return scaling_aware_transpose(q, plan.expert_offsets, target=_TARGET, align_size=plan.align_size)


def _forward_fp8_blockwise(x, w13, w2, plan, probs, activation, recompute, gradients):  # type: ignore[no-untyped-def]
    moved = permute(x, plan, probs)
    q = _quantized(moved.data)  # cast 1
    kept = {"probs": moved.probs, "x": q if gradients else None}
    del moved
    h = grouped_gemm(q, w13.rowwise, plan.expert_offsets)
    del q
    a = quantize(swiglu(h, kept["probs"], activation=activation))  # cast 2
    kept |= {"h": _kept_h(h, recompute, gradients), "a": None if recompute or not gradients else a}
    del h
    rows_of_y = grouped_gemm(a, w2.rowwise, plan.expert_offsets)
    del a
    return unpermute(rows_of_y, plan), kept


def _backward_input_fp8_blockwise(saved, dy, gradients):  # type: ignore[no-untyped-def]
    plan, offsets = saved.plan, saved.plan.expert_offsets
    h, a, dh, dx, dprobs = saved.h, saved.a, None, None, None
    if saved.recompute:
        h = grouped_gemm(saved.x, saved.w13.rowwise, offsets)
        a = quantize(swiglu(h, saved.probs, activation=saved.activation)) if "dw2" in gradients else None
    dout = _quantized(permute(dy, plan).data)  # cast 3
    if _of_h(gradients):
        da = grouped_gemm(dout, saved.w2.columnwise, offsets)
        grad = swiglu_backward(da, h, saved.probs, activation=saved.activation)
        del da
        dh, of_probs = quantize(grad.dh), grad.dprobs  # cast 4
        del grad
    if _of_inputs(gradients):
        dxe = grouped_gemm(dh, saved.w13.columnwise, offsets)
        dx, dprobs = permute_backward(dxe, plan, of_probs)
    return dx, dprobs, _operands(gradients, dout, a, dh, saved.x)


def _backward_weight_fp8_blockwise(operands, dw13, dw2, dtype, _):  # type: ignore[no-untyped-def]
    offsets = operands.plan.expert_offsets
    if operands.a is not None:
        columnwise = _requantize(operands.dy), _requantize(operands.a)  # casts 5 to 8
        dw2 = grouped_gemm_wgrad(*columnwise, offsets, dw2, dtype=dtype)
        del columnwise
    if operands.dh is not None:
        columnwise = _requantize(operands.dh), _requantize(operands.x)  # casts 9 to 12
        dw13 = grouped_gemm_wgrad(*columnwise, offsets, dw13, dtype=dtype)
    return dw13, dw2


def _quantized(x: Any) -> QuantTensor:
    """Rows in FP8, unless they came so from another library's dispatcher."""
    return x if isinstance(x, QuantTensor) else quantize(x)  # type: ignore[no-any-return]


def _requantize(q: Any) -> QuantTensor:
    """Row-wise to column-wise the long way. Experts start at multiples of 128, as the blocks do."""
    return quantize(dequantize(q, dtype="bfloat16"), block=(128, 1))


def _forward_bf16(x, w13, w2, plan, probs, activation, recompute, gradients):  # type: ignore[no-untyped-def]
    moved = permute(x, plan, probs)
    h = grouped_gemm(moved.data, w13, plan.expert_offsets)
    kept = {"probs": moved.probs, "x": moved.data if gradients else None}
    del moved
    a = swiglu(h, kept["probs"], activation=activation)
    kept |= {"h": _kept_h(h, recompute, gradients), "a": None if recompute or not gradients else a}
    del h
    rows_of_y = grouped_gemm(a, w2, plan.expert_offsets)
    del a
    return unpermute(rows_of_y, plan), kept


def _backward_input_bf16(saved, dy, gradients):  # type: ignore[no-untyped-def]
    plan, offsets = saved.plan, saved.plan.expert_offsets
    h, a, dh, dx, dprobs = saved.h, saved.a, None, None, None
    if saved.recompute:
        h = grouped_gemm(saved.x, saved.w13, offsets)
        a = swiglu(h, saved.probs, activation=saved.activation) if "dw2" in gradients else None
    dout, _ = unpermute_backward(dy, plan)
    if _of_h(gradients):
        da = grouped_gemm(dout, saved.w2, offsets, transpose_w=True)
        grad = swiglu_backward(da, h, saved.probs, activation=saved.activation)
        del da
        dh = grad.dh
    if _of_inputs(gradients):
        dxe = grouped_gemm(dh, saved.w13, offsets, transpose_w=True)
        dx, dprobs = permute_backward(dxe, plan, grad.dprobs)
    return dx, dprobs, _operands(gradients, dout, a, dh, saved.x)


def _backward_weight_bf16(operands, dw13, dw2, dtype, _):  # type: ignore[no-untyped-def]
    offsets = operands.plan.expert_offsets
    if operands.a is not None:
        dw2 = grouped_gemm_wgrad(operands.dy, operands.a, offsets, dw2, dtype=_at_least(dtype, operands.dy))
    if operands.dh is not None:
        dw13 = grouped_gemm_wgrad(operands.dh, operands.x, offsets, dw13, dtype=_at_least(dtype, operands.dh))
    return dw13, dw2


def _at_least(dtype: str, operand: Any) -> str:
    """The weights' gradients of float64 operands are not rounded to float32."""
    return "float64" if dtype == "float32" and operand.dtype == "float64" else dtype


def _of_h(gradients: Collection[str]) -> bool:
    return "dw13" in gradients or _of_inputs(gradients)


def _operands(gradients: Collection[str], dy: Any, a: Any, dh: Any, x: Any) -> dict[str, Any]:
    """Of the weights' gradients, as `SavedForWeights` has them; None for those that are not wanted."""
    of_w2, of_w13 = "dw2" in gradients, "dw13" in gradients
    return {
        "dy": dy if of_w2 else None,
        "a": a if of_w2 else None,
        "dh": dh if of_w13 else None,
        "x": x if of_w13 else None,
    }


_STEPS = {
    "fp8_flow": (_forward_fp8_flow, _backward_input_fp8_flow, _backward_weight_fp8_flow),
    "fp8_blockwise": (_forward_fp8_blockwise, _backward_input_fp8_blockwise, _backward_weight_fp8_blockwise),
    "bf16": (_forward_bf16, _backward_input_bf16, _backward_weight_bf16),
}
