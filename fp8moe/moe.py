"""The expert layer in three precision recipes, composed of the public operations.

"fp8_flow" (arXiv 2511.02302) has two explicit casts, of the input and of the output gradient. Rows are
dispatched and permuted in FP8, the SwiGLU kernel quantises its result, and the scaling-aware transpose makes
the column-wise operands of the weight gradients. "fp8_blockwise" is the baseline with bfloat16 between
kernels, which dequantises and requantises every column-wise operand: 12 casts. "bf16" has no casts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

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
from fp8moe.expert_parallel.protocols import capacity_of, check_comm, chunks_of, with_spare
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
    int32_counts,
    pad_rows,
    permute,
    permute_backward,
    permute_gemm,
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

Recipe = Literal["bf16", "fp8_blockwise", "fp8_flow"]
RECIPES = get_args(Recipe)
RECOMPUTE = None, "moe_expert"
#: each expert's rows are padded to a multiple of it: the FP8 weight gradient contracts over blocks of 128
#: rows
ALIGN_SIZE = {"bf16": 1, "fp8_blockwise": 128, "fp8_flow": 128}
#: format in which rows are dispatched and permuted; None: unchanged
FORMAT_BETWEEN_RANKS = {"fp8_flow": "e4m3", "fp8_blockwise": None, "bf16": None}
GRADIENTS = ("dx", "dprobs", "dw13", "dw2")


@dataclass(frozen=True)
class Saved(Record):
    """The tensors that `moe_forward` saves for `moe_backward`.

    x: the input of fc1. fp8_flow: FP8, before the permutation (k times smaller); fp8_blockwise: FP8,
    permuted; bf16: bfloat16, permuted. h, a: fc1's output and the activation's output; None with recompute,
    which computes them again. fp8_flow: a is column-wise, [F, P] in (128, 128) blocks. w13, w2: the weights,
    as given or quantised. Quantised weights are saved without row-wise codes that only the forward uses
    (always w2's; w13's unless recompute). ``nbytes`` does not include the weights.
    overwritten: how often the codes of w13 and of w2 had been overwritten (`quantize_weights` with ``out=``)
    when the forward read them; None for weights that the forward quantised. backend: the GEMM backend of
    forward and backward; None: the fastest. num_sms: maximum number of multiprocessors of these GEMMs; None:
    all. later: with ``overlap_chunks``, the records of the chunks after the first, without the weights.
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
        """Bytes saved for the backward, without the weights."""
        return nbytes(self.plan, self.probs, self.x, self.h, self.a, self.route, self.later)

    @property
    def num_tokens(self) -> int:
        """Number of rows of dy."""
        if self.route is None:
            return self.plan.num_tokens
        return sum(chunk.route.num_tokens for chunk in (self, *self.later))

    def needed_for(self, gradients: Collection[str]) -> Saved:
        """A copy without the tensors that only other gradients need: with frozen weights (LoRA), without x
        and a; with no gradients, only the plan and the route, so that errors can name what is missing."""
        if not gradients:
            return replace(self, recompute=None, probs=None, x=None, h=None, a=None, w13=None, w2=None)
        x = self.x if "dw13" in gradients or self.recompute else None
        h = self.h if _of_h(gradients) else None
        return replace(self, x=x, h=h, a=self.a if "dw2" in gradients else None)


@dataclass(frozen=True)
class SavedForWeights(Record):
    """The operands of the weight gradients, which `moe_backward_input` saves for `moe_backward_weight`.

    Size in bytes without scales, for P permuted rows, T tokens, and F padded as in the weights: "fp8_flow" T
    H (dy) + P F (a) + T H (x) + 2 P F (dh); "fp8_blockwise" P H + P F + P H + 2 P F; "bf16" twice that of
    "fp8_blockwise". x, and a without recompute, share the forward's memory, and dy may share the caller's:
    this memory must not be modified before the weight gradients have been computed. The weights and h are not
    included, so the forward's `Saved` may be deleted.

    dy, a: operands of w2's gradient; None if it is not requested. dy: fp8_flow: FP8, before the permutation;
    the others: permuted. a: fp8_flow: column-wise; the others: row-wise. dh, x: operands of w13's gradient;
    None if it is not requested. dh: fp8_flow: column-wise; the others: row-wise. x: as in `Saved`. later:
    with ``overlap_chunks``, the records of the chunks after the first.
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
        """Total bytes, including memory shared with the forward's `Saved` and with the caller."""
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
    out : Quantized or None
        The previous step's result, whose memory is overwritten (see `quantize`). `moe_backward` of a forward
        that read the old codes then raises.

    Returns
    -------
    Quantized
        ``rowwise`` for the forward; ``columnwise``, stored transposed, for dgrad.

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
    if not isinstance(x, tuple) and (parts, rows, columns, transposed) == (1, None, None, False):
        return quantize(x, fmt=fmt, block=(128, 128), columnwise=True, out=out)  # type: ignore[no-any-return]
    options: dict[str, Any] = {"parts": parts, "rows": rows, "columns": columns, "transposed": transposed}
    return quantize_parts(x, fmt=fmt, **options, out=out)  # type: ignore[no-any-return]


def experts_of(w: Any) -> int:
    """The number of experts of quantised or plain weights."""
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
    """Raise, before anything is computed, if the backend does not support every GEMM of a layer on a device,
    or a GEMM does not support ``num_sms``.

    dtype: dtype of the operands for "bf16". ffn: F without the padding of FP8 weights. Requirements on the
    number of rows or on the alignment of arrays are not checked here.

    Raises ValueError, and TypeError for a dtype.
    """
    checks.choice("backend", backend, BACKENDS)
    num_sms = check_limit(num_sms)
    options = {n: v for n, v in (("backend", backend), ("num_sms", num_sms)) if v is not None}
    if not options or device == NOWHERE:
        return
    if device == "cpu":
        raise not_on_cpu(*next(iter(options.items())))
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
    """Forward of the expert layer: y[t] = sum over t's experts e of prob * w2[e] @ swiglu(w13[e] @ x[t]).

    Parameters
    ----------
    x : ArrayLike, bfloat16, [T, H]
        For "bf16" also float16, float32 or float64.
    w13 : ArrayLike or Quantized, [E, 2F, H]
        For "bf16" in x's dtype. For the FP8 recipes bfloat16, float16 or float32, or the result of
        `quantize_weights`, and F must be a multiple of 128. [E, F, H] for an activation without a gate.
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
    activation : Activation
        The activation between the two GEMMs.
    comm : Comm or None
        The transport between ranks, for expert parallelism (`fp8moe.expert_parallel`). w13 and w2 are then
        this rank's experts, topk_ids number the experts of all ranks, and the weight gradients are this
        rank's.
    gradients : collection of str
        Gradients that `moe_backward` will compute, of "dx", "dprobs", "dw13" and "dw2". Tensors that only the
        other gradients need are neither computed nor saved. For inference pass (): every intermediate is then
        freed after its last use.
    backend : str or None
        The backend of all GEMMs, including the backward's; as for `grouped_gemm`.
    num_sms : int or None
        Maximum number of the GPU's multiprocessors for each GEMM, as for `grouped_gemm`; also for the
        backward, unless it is given its own. It does not apply to the memory-bound kernels between the GEMMs,
        which are short. Results do not depend on it.

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
    the gradients for infinities has to look at x and at dy as well.

    Examples
    --------
    >>> x, w13, w2 = np.ones((1, 1)), np.array([[[100.0], [2.0]]]), np.array([[[1.0]]])
    >>> ids, probs = np.zeros((1, 1), np.int32), np.full((1, 1), 0.5)
    >>> y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="bf16")
    >>> y.tolist()
    [[100.0]]
    """
    options: dict[str, Any] = {"recipe": recipe, "recompute": recompute, "activation": activation}
    options |= {"comm": comm, "gradients": gradients, "backend": backend, "num_sms": num_sms}
    return forward_keeping(gradients, x, w13, w2, topk_ids, topk_probs, **options)


def forward_keeping(
    kept: Collection[str], *operands: Any, comm: Comm | None, gradients: Collection[str], **options: Any
) -> tuple[Any, Saved]:
    """`moe_forward` which saves the tensors that the gradients ``kept`` need, and announces to the other
    ranks a backward that computes ``gradients``."""
    checks.choice("recipe", options["recipe"], RECIPES)
    checks.choice("recompute", options["recompute"], RECOMPUTE)
    if comm is not None:
        check_comm(comm)
    checks.options("activation", options["activation"], Activation)
    _check_gradients(gradients)
    checks.choice("backend", options["backend"], BACKENDS)
    options |= {"gradients": tuple(kept), "num_sms": check_limit(options["num_sms"])}
    x, w13, w2, ids, probs = operands
    if isinstance(x, QuantTensor):
        raise TypeError(
            "x: got a QuantTensor; wanted an array; pass fp8moe.dequantize(x), or permuted rows to "
            "moe_forward_permuted"
        )
    overwritten = _overwritten(w13, w2)
    if comm is None:
        y, saved = experts_forward(x, w13, w2, ids, probs, **options)
    else:
        checked = {name: value for name, value in options.items() if name != "recompute"}
        _check_before_sending(x, w13, w2, ids, probs, **checked)
        y, saved = _forward_over_ranks(x, w13, w2, ids, probs, comm, tuple(gradients), options)
    return y, _recorded(saved, overwritten)


def _forward_over_ranks(
    x: Any,
    w13: Any,
    w2: Any,
    topk_ids: Any,
    topk_probs: Any,
    comm: Comm,
    gradients: tuple[str, ...],
    options: dict[str, Any],
) -> tuple[Any, Saved]:
    recipe, experts = options["recipe"], experts_of(w13)
    fmt, chunks = FORMAT_BETWEEN_RANKS[recipe], chunks_of(comm)
    if chunks > 1 and recipe != "bf16":  # once for all chunks
        w13, w2 = (w if isinstance(w, Quantized) else quantize_weights(w) for w in (w13, w2))
    saved_chunks: list[Saved] = []

    def products(received: Dispatched | DispatchedRows) -> Any:
        if isinstance(received, DispatchedRows):
            row_arguments = received.tokens_per_expert, received.probs
            aligned = {**options, "align_size": received.align_size}
            y, saved = permuted_experts_forward(received.x, w13, w2, *row_arguments, **aligned)
        else:
            # rounded up, so that steps with similar row counts share shapes, and with them the cached launch
            # plan
            entries = received.num_entries if capacity_of(comm) else with_spare(received.num_entries)
            rows = static_bound(entries, experts, ALIGN_SIZE[recipe])
            y, saved = experts_forward(
                received.x, w13, w2, received.topk_ids, received.topk_probs, num_out_tokens=rows, **options
            )
        saved_chunks.append(replace(saved, route=received.route))
        return y

    inputs = x, topk_ids, topk_probs, experts * comm.world_size, comm
    if chunks > 1:
        y = overlapped_forward(*inputs, fmt=fmt, chunks=chunks, gradients=gradients, experts=products)
    else:
        received = prepare_dispatch(*inputs, fmt, gradients=gradients, spare=True)(False).wait()
        y = combine(products(received), received.route, comm)
    saved = replace(
        saved_chunks[0], later=tuple(replace(chunk, w13=None, w2=None) for chunk in saved_chunks[1:])
    )
    if capacity_of(comm) is not None:
        for rows, entries in overflow(saved):
            comm.record_overflow(rows, entries)  # type: ignore[union-attr]
    return y, saved


def _overwritten(w13: Any, w2: Any) -> tuple[int | None, int | None]:
    """How often the codes of weights given in quantised form have been overwritten."""
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
    """The expert layer on already permuted rows: y[i] = probs[i] * w2[e] @ swiglu(w13[e] @ x[i]).

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
    activation : Activation
        The activation between the two GEMMs.
    align_size : int
        Each expert's rows in x are already padded to a multiple of it, with zero rows and zero probs, which
        ``tokens_per_expert`` may or may not include. With a multiple of 128 the FP8 recipes need no padding
        of their own. On CUDA the padding is checked only with FP8MOE_CHECK=1.
    gradients : collection of str
        As for `moe_forward`; "dprobs" is the gradient of ``probs``.
    backend : str or None
        As for `moe_forward`.
    num_sms : int or None
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
    checks.choice("recipe", recipe, RECIPES)
    checks.choice("recompute", recompute, RECOMPUTE)
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
    """`moe_forward` for this rank's experts; x is a QuantTensor if other ranks sent it quantised."""
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
    """Forward of the experts, given a plan or placed rows."""
    if recipe != "bf16":
        w13 = w13 if isinstance(w13, Quantized) else quantize_weights(w13)
        w2 = w2 if isinstance(w2, Quantized) else quantize_weights(w2)
    forward, *_ = _STEPS[recipe]
    with products_by(backend, num_sms):
        recomputes = recompute is not None and bool(gradients)
        y, fields = forward(x, w13, w2, plan, probs, activation, recomputes, gradients)
    if recipe != "bf16":
        w13, w2 = w13 if recompute else replace(w13, rowwise=None), replace(w2, rowwise=None)
    fields.update(activation=activation, backend=backend, num_sms=num_sms)
    saved = Saved(recipe, recompute, plan, w13=w13, w2=w2, **fields)
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
    """`moe_backward` for this rank's experts; dy is a QuantTensor if other ranks sent it quantised."""
    _check_backward(saved, dy, dw13, dw2, dtype, gradients, ffn, saved.num_tokens)
    dx, dprobs, operands = _backward_input(saved, dy, gradients)
    dw13, dw2 = _backward_weight(operands, dw13, dw2, dtype, ffn)
    return MoEGrads(dx, dprobs, dw13, dw2)


@operation
def experts_backward_input(
    saved: Saved, dy: Any, gradients: Collection[str] = GRADIENTS
) -> tuple[Any, Any, SavedForWeights]:
    """(dx, dprobs, operands) of `moe_backward_input`, for this rank's experts."""
    _check_dy(saved, dy, gradients, saved.num_tokens)
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
        "fp8_flow" only, and for gated activations only with dw13 as a tuple.
    comm : Comm or None
        The forward's ``comm``.
    gradients : collection of str
        Gradients to compute, of "dx", "dprobs", "dw13" and "dw2". The others are None, and whatever only they
        need is not computed (frozen weights save two of six GEMMs). "dx" and "dprobs" are always computed
        together.
    num_sms : int or None
        As for `moe_forward`, for this backward's GEMMs; None: the forward's value.

    Returns
    -------
    MoEGrads
        dx [T, H], dprobs [T, k] float32, and the weight gradients dw13 [E, 2F, H] and dw2 [E, H, F]: the
        accumulators, or new arrays of ``dtype`` (float64 for float64 inputs).

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
    gradients = _check_saved(saved, comm, gradients)
    saved = _limited(saved, num_sms)
    _check_wanted(dw13, dw2, gradients)
    ffn = None if ffn is None else checks.integer("ffn", ffn, 1)
    if comm is None or saved.route is None:
        return experts_backward(_of_this_rank(saved), dy, dw13, dw2, dtype, gradients, ffn)  # type: ignore[no-any-return]
    _check_backward(_of_this_rank(saved), dy, dw13, dw2, dtype, gradients, ffn, saved.num_tokens)
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
    """(dx, dprobs); ``weights`` is called with the operands of each chunk's weight gradients."""
    chunks = [saved, *(replace(chunk, w13=saved.w13, w2=saved.w2) for chunk in saved.later)]
    pending_operands: list[SavedForWeights] = []

    def inputs(number: int, dy: Any) -> tuple[Any, Any]:
        dx, dprobs, operands = experts_backward_input(_of_this_rank(chunks[number]), dy, gradients)
        pending_operands.append(operands)
        return dx, dprobs

    return overlapped_backward(
        dy,
        [chunk.route for chunk in chunks],
        comm,
        fmt=FORMAT_BETWEEN_RANKS[saved.recipe],
        inputs=inputs,
        weights=lambda _: weights(pending_operands.pop()),
    )


def _check_sums(dtype: str, gradients: Collection[str], dw13: Any, dw2: Any) -> None:
    """Check that the chunks' gradients are not summed in a new bfloat16 array; the caller may pass one."""
    for name, given in (("dw13", dw13), ("dw2", dw2)):
        if dtype == "bfloat16" and name in gradients and all(out is None for out in _parts(given)):
            raise ValueError(
                f"dtype: got {dtype!r} with overlap_chunks, which would round the sum after each chunk; "
                f"wanted 'float32', or an array to add to as {name}"
            )


def _added(operands: SavedForWeights, total: MoEGrads, dtype: str, ffn: int | None) -> MoEGrads:
    """``total`` with the chunk's weight gradients added."""
    if operands.dh is None and operands.a is None:
        return total
    dw13, dw2 = experts_backward_weight(operands, total.dw13, total.dw2, dtype, ffn)
    # a gradient that is not requested: the next chunk needs the caller's argument again, a pair for w1 and w3
    return replace(total, dw13=total.dw13 if dw13 is None else dw13, dw2=dw2)


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
        For `moe_backward_weight`; empty without "dw13" and "dw2".

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
    gradients = _check_saved(saved, comm, gradients)
    saved = _limited(saved, num_sms)
    if comm is None or saved.route is None:
        dx, dprobs, operands = experts_backward_input(_of_this_rank(saved), dy, gradients)
        return MoEGrads(dx, dprobs, None, None), operands
    _check_dy(saved, dy, gradients, saved.num_tokens)
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
        dw13 and dw2, each None if `moe_backward_input` was called without it; dx and dprobs are None.

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
    return total if "dw13" in wanted else replace(total, dw13=None)


def _check_saved(saved: Any, comm: Any, gradients: Any) -> tuple[str, ...]:
    """Check that the forward saved what the gradients need, and that no FP8 weight was overwritten since.
    Returns the gradients."""
    if not isinstance(saved, Saved):
        raise TypeError(f"saved: got {type(saved).__name__}; wanted the second result of moe_forward")
    _check_gradients(gradients)
    if gradients and saved.w13 is None:
        raise ValueError(
            "saved: got the record of a forward with gradients=(), which saves no tensors; wanted these "
            "gradients in the forward's gradients, too"
        )
    requirements = ("x", saved.x, {"dw13"}), ("h", saved.h, {*GRADIENTS} - {"dw2"}), ("a", saved.a, {"dw2"})
    for name, saved_tensor, dependents in requirements:
        missing = [gradient for gradient in gradients if gradient in dependents]
        if missing and saved_tensor is None and not saved.recompute:
            raise ValueError(
                f"gradients: got {missing[0]!r}, but saved.{name} is None; wanted it in the forward's "
                "gradients, too"
            )
    for name, w, count in zip(("w13", "w2"), (saved.w13, saved.w2), saved.overwritten, strict=True):
        now = None if count is None or w is None else times_overwritten(w)
        if now is not None and now != count:  # None also if only shapes are known
            raise RuntimeError(
                f"{name}: got FP8 codes that quantize_weights has overwritten since the forward; wanted "
                "those that the forward read; run the backward first, or quantise without out="
            )
    if comm is not None:
        check_comm(comm)
    if (comm is None) != (saved.route is None):
        raise ValueError(
            f"comm: got {comm}; wanted {'None' if saved.route is None else 'a transport'}, as in the forward"
        )
    return tuple(gradients)


def _limited(saved: Any, num_sms: int | None) -> Any:
    """``saved`` with another limit than the forward's, for all chunks."""
    if num_sms is None:
        return saved
    later = tuple(_limited(chunk, num_sms) for chunk in saved.later)
    return replace(saved, num_sms=check_limit(num_sms), later=later)


def _check_wanted(dw13: Any, dw2: Any, gradients: Collection[str]) -> None:
    """Check that no accumulator is given for a gradient that is not requested."""
    for name, given in (("dw13", dw13), ("dw2", dw2)):
        if any(part is not None for part in _parts(given)) and name not in gradients:
            raise ValueError(f"{name}: got an array to add to, but gradients has no {name!r}; wanted both")


def _of_this_rank(saved: Saved) -> Saved:
    """``saved`` without the fields that only the public functions read."""
    if saved.route is None and saved.overwritten == (None, None):
        return saved
    return replace(saved, route=None, overwritten=(None, None), later=())


def _parts(dw13: Any) -> tuple[Any, ...]:
    """The accumulators of w1 and w3, or the single one of w13, as a tuple."""
    return dw13 if isinstance(dw13, tuple) else (dw13,)


def _hidden(w13: Any) -> int:
    return int((w13.columnwise if isinstance(w13, Quantized) else w13).shape[2])


def _of_inputs(gradients: Collection[str]) -> bool:
    return "dx" in gradients or "dprobs" in gradients


def _check_gradients(gradients: Any) -> None:
    if isinstance(gradients, str) or not isinstance(gradients, Collection):
        raise TypeError(f"gradients: got {type(gradients).__name__}; wanted a collection of {GRADIENTS}")
    for name in gradients:
        checks.choice("gradients", name, GRADIENTS)


def _check_dy(saved: Saved, dy: Any, gradients: Collection[str], tokens: int) -> None:
    call = enter(dy=dy, w13=saved.w13)
    a = call.args
    quantized = saved.recipe != "bf16"
    if isinstance(a.dy, QuantTensor):
        if not quantized:
            raise TypeError('dy: got a QuantTensor with recipe "bf16"; wanted an array')
        checks.quant_tensor("dy", a.dy, ((1, 128),))
        if saved.recipe == "fp8_flow" and "dw2" in gradients:  # which transposes dy
            checks.powers_of_two(call, "dy", a.dy)
    else:
        weight_dtypes = checks.FLOATS if quantized or a.w13 is None else (a.w13.dtype,)
        checks.dtype("dy", a.dy, (BFLOAT16,) if quantized else weight_dtypes)
    checks.shape("dy", a.dy, (tokens, "H" if a.w13 is None else _hidden(a.w13)))


@operation
def _check_backward(
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
    _check_dy(saved, dy, gradients, tokens)
    kept = {"dy": dy, "x": saved.x, "a": saved.a, "w13": saved.w13, "w2": saved.w2}
    quantized = saved.recipe != "bf16"
    # the column-wise codes are always saved
    weight_shapes = [
        None if w is None else tuple((w.columnwise if quantized else w).shape) for w in (saved.w13, saved.w2)
    ]
    _check_outputs(saved, kept, weight_shapes, dw13, dw2, dtype, ffn)


def _check_operands(operands: SavedForWeights, dw13: Any, dw2: Any, dtype: str, ffn: int | None) -> None:
    """Check all arguments of `moe_backward_weight`, before anything is added."""
    kept = {name: getattr(operands, name) for name in ("dy", "a", "dh", "x")}
    experts = operands.plan.expert_offsets.shape[0] - 1
    weight_shapes = [
        None if left is None else (experts, left.shape[1], right.shape[1])
        for left, right in ((operands.dh, operands.x), (operands.dy, operands.a))
    ]
    kept = {name: value for name, value in kept.items() if value is not None}
    _check_outputs(operands, kept, weight_shapes, dw13, dw2, dtype, ffn)


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
    separate, gated = isinstance(dw13, tuple), saved.activation.gated
    if separate and not gated:
        raise ValueError(
            f"dw13: got two with {saved.activation}, which has no gate; wanted one array or None"
        )
    if (separate or ffn is not None) and saved.recipe != "fp8_flow":
        argument = "dw13: got two" if separate else "ffn: got one"
        raise ValueError(f'{argument} with recipe {saved.recipe!r}; wanted "fp8_flow"')
    shape_w13, shape_w2 = weight_shapes
    if ffn is not None:
        if not separate and gated:
            raise ValueError(
                f"dw13: got one with ffn={ffn}; wanted two, of w1 and w3; pass dw13=(None, None)"
            )
        if shape_w13 is not None:
            checks.integer("ffn", ffn, 1, saved.activation.width(shape_w13[1]))
            shape_w13 = shape_w13[0], ffn, shape_w13[2]
        if shape_w2 is not None:
            checks.integer("ffn", ffn, 1, shape_w2[2])
            shape_w2 = *shape_w2[:2], ffn
    elif separate and shape_w13 is not None:
        shape_w13 = shape_w13[0], shape_w13[1] // 2, shape_w13[2]
    given = dw13 if any(part is not None for part in _parts(dw13)) else None
    arrays = enter(**kept, dw13=given, dw2=dw2).args.__dict__
    outs = _parts(arrays.pop("dw13")), (arrays.pop("dw2"),)
    names = ("dw13[0]", "dw13[1]") if separate else ("dw13",)
    outputs = [*zip(names, (shape_w13, shape_w13), outs[0], strict=False), ("dw2", shape_w2, *outs[1])]
    for name, shape, out in outputs:
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
    """`_check_layer` as an operation, so that it runs once per set of shapes."""
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
        if recipe == "fp8_flow" and "dw13" in gradients:  # which transposes x
            checks.powers_of_two(call, "x", a.x)
    experts = _check_rows_and_weights(recipe, activation, a)
    checks.dtype("tokens_per_expert", a.tokens_per_expert, checks.INTEGERS)
    checks.shape("tokens_per_expert", a.tokens_per_expert, (experts,))
    checks.dtype("probs", a.probs, checks.FLOATS)
    checks.shape("probs", a.probs, (a.x.shape[0],))
    wanted = ALIGN_SIZE[recipe]
    if align_size != 1 and align_size % wanted:
        raise ValueError(
            f"align_size: got {align_size}; wanted 1 for rows without padding, or a multiple of {wanted} for "
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
    """`check_backend` for arrays that `_check_rows_and_weights` has checked."""
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


def _in_one(name: str, w: Any, quantized: bool) -> str:
    """How to pass w1 and w3, which came in a tuple, for errors."""
    if name != "w13" or not isinstance(w, tuple):
        return ""
    return "pass both in one array, [E, 2F, H]" + (", or quantize_weights((w1, w3))" if quantized else "")


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


def _check_rows_and_weights(recipe: str, activation: Activation, a: Any) -> int:
    """Check x and the weights; returns the number of experts."""
    quantized = recipe != "bf16"
    checks.shape("x", a.x, ("T", "H"))
    if not isinstance(a.x, QuantTensor):
        fix = 'pass x in bfloat16 (ml_dtypes.bfloat16 in NumPy and CuPy), or recipe="bf16"'
        checks.dtype("x", a.x, (BFLOAT16,) if quantized else checks.FLOATS, fix if quantized else "")
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
            checks.dtype(
                name, w, checks.QUANTIZABLE if quantized else (a.x.dtype,), _in_one(name, w, quantized)
            )
    rows = "2F" if activation.gated else "F"
    checks.shape("w13", a.w13, ("E", rows, hidden), _stored_transposed(a.w13, 1, hidden, quantized))
    experts, width, _ = a.w13.shape
    if width % activation.columns(128 if quantized else 1):
        ffn = round_up(activation.width(width), 128)
        options = f"parts=2, rows={ffn}" if activation.gated else f"rows={ffn}"
        wanted = (
            "twice a multiple of 128, so that no block spans both halves"
            if activation.gated
            else "a multiple of 128"
        )
        wanted += f"; pass quantize_weights(w13, {options}) and quantize_weights(w2, columns={ffn})"
        raise ValueError(f"w13: got {rows} = {width}; wanted {wanted if quantized else 'an even number'}")
    fix = _stored_transposed(a.w2, 2, hidden, quantized)
    checks.shape("w2", a.w2, (experts, hidden, activation.width(width)), fix)
    return int(experts)


# The recipes have the same structure and differ in where they cast. ``del`` frees permuted tensors, which
# have k rows per token, after their last use.


def _forward_fp8_flow(x, w13, w2, plan, probs, activation, recompute, gradients):  # type: ignore[no-untyped-def]
    first = permute_gemm(x, w13.rowwise, plan, probs)  # x is FP8 already: cast 1
    h, saved = first.data, {"probs": first.probs, "x": x}
    del first
    transposed = "dw2" in gradients and not recompute
    a = _activate(h, saved["probs"], plan, activation, transposed)
    rowwise, columnwise = (a.rowwise, a.columnwise) if transposed else (a, None)
    saved |= {"h": _kept_h(h, recompute, gradients), "a": columnwise}
    del h, a
    rows_of_y = grouped_gemm(rowwise, w2.rowwise, plan.expert_offsets, int32_counts(plan))
    del rowwise
    return unpermute(rows_of_y, plan), saved


def _kept_h(h: Any, recompute: bool, gradients: Collection[str]) -> Any:
    return None if recompute or not _of_h(gradients) else h


def _backward_input_fp8_flow(saved, dy, gradients):  # type: ignore[no-untyped-def]
    plan, offsets = saved.plan, saved.plan.expert_offsets
    h, a, dh, dx, dprobs = saved.h, saved.a, None, None, None
    if saved.recompute:
        h = permute_gemm(saved.x, saved.w13.rowwise, plan).data
        if "dw2" in gradients:
            a = _activate(h, saved.probs, plan, saved.activation, transposed=True).columnwise
    if _of_h(gradients):
        # dy is FP8 already: cast 2
        da = permute_gemm(dy, saved.w2.columnwise, plan).data
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
        dprobs_of_rows = grad.dprobs
        rowwise, dh = (grad.dh.rowwise, grad.dh.columnwise) if transposed else (grad.dh, None)
        del da, grad
    if _of_inputs(gradients):
        dxe = grouped_gemm(rowwise, saved.w13.columnwise, offsets, int32_counts(plan))
        del rowwise
        dx, dprobs = permute_backward(dxe, plan, dprobs_of_rows)
    # dy before the permutation: transposing its permuted rows would read k times as many (571 us, not 360;
    # 131,072 x 7168, 32 experts)
    return dx, dprobs, _operands(gradients, dy, a, dh, saved.x)


def _backward_weight_fp8_flow(operands, dw13, dw2, dtype, ffn):  # type: ignore[no-untyped-def]
    plan, offsets = operands.plan, operands.plan.expert_offsets
    a, dh, x = operands.a, operands.dh, operands.x
    options = {"dtype": dtype, "tokens_per_expert": int32_counts(plan)}
    if a is not None:
        transposed = permute_transpose(operands.dy, plan, target=_TARGET)
        a = columns_of(a, 0, ffn or a.shape[1])
        dw2 = grouped_gemm_wgrad(transposed, a, offsets, dw2, **options)
        del transposed
    if dh is None:
        return None, dw2
    transposed = permute_transpose(x, plan, target=_TARGET)
    parts = _parts_of_dh(dh, dw13, ffn)
    sums = [grouped_gemm_wgrad(half, transposed, offsets, out, **options) for half, out in parts]
    return tuple(sums) if isinstance(dw13, tuple) else sums[0], dw2


def _parts_of_dh(dh: QuantTensor, dw13: Any, ffn: int | None) -> list[tuple[QuantTensor, Any]]:
    """(columns of dh, accumulator of their gradient) for w13, or for w1 and w3 separately."""
    outs = _parts(dw13)
    width = dh.shape[1] // len(outs)
    return [(columns_of(dh, i * width, ffn or width), out) for i, out in enumerate(outs)]


def _activate(h, probs, plan, activation, transposed):  # type: ignore[no-untyped-def]
    options = {"activation": activation, "transposed": transposed}
    return swiglu_quantize(
        h, probs, expert_offsets=plan.expert_offsets, align_size=plan.align_size, **options
    )


# One scale per tile, as in the paper's transpose. One scale per column would keep the last bits of values of
# at most 2^-15 of their tile's maximum, but make the weight gradients 20 % slower.
_TARGET = "block"


def _forward_fp8_blockwise(x, w13, w2, plan, probs, activation, recompute, gradients):  # type: ignore[no-untyped-def]
    permuted = permute(x, plan, probs)
    q = _quantized(permuted.data)  # cast 1
    saved = {"probs": permuted.probs, "x": q if gradients else None}
    del permuted
    h = grouped_gemm(q, w13.rowwise, plan.expert_offsets)
    del q
    a = quantize(swiglu(h, saved["probs"], activation=activation))  # cast 2
    saved |= {"h": _kept_h(h, recompute, gradients), "a": None if recompute or not gradients else a}
    del h
    rows_of_y = grouped_gemm(a, w2.rowwise, plan.expert_offsets)
    del a
    return unpermute(rows_of_y, plan), saved


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
        dh, dprobs_of_rows = quantize(grad.dh), grad.dprobs  # cast 4
        del grad
    if _of_inputs(gradients):
        dxe = grouped_gemm(dh, saved.w13.columnwise, offsets)
        dx, dprobs = permute_backward(dxe, plan, dprobs_of_rows)
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
    """Rows in FP8; another library's dispatcher may have quantised them already."""
    return x if isinstance(x, QuantTensor) else quantize(x)  # type: ignore[no-any-return]


def _requantize(q: Any) -> QuantTensor:
    """Row-wise to column-wise by dequantising and quantising. Experts and blocks both start at multiples of
    128."""
    return quantize(dequantize(q, dtype="bfloat16"), block=(128, 1))


def _forward_bf16(x, w13, w2, plan, probs, activation, recompute, gradients):  # type: ignore[no-untyped-def]
    permuted = permute(x, plan, probs)
    h = grouped_gemm(permuted.data, w13, plan.expert_offsets)
    saved = {"probs": permuted.probs, "x": permuted.data if gradients else None}
    del permuted
    a = swiglu(h, saved["probs"], activation=activation)
    saved |= {"h": _kept_h(h, recompute, gradients), "a": None if recompute or not gradients else a}
    del h
    rows_of_y = grouped_gemm(a, w2, plan.expert_offsets)
    del a
    return unpermute(rows_of_y, plan), saved


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
    """The dtype of weight gradients: float64 for float64 operands, so that they are not rounded to
    float32."""
    return "float64" if dtype == "float32" and operand.dtype == "float64" else dtype


def _of_h(gradients: Collection[str]) -> bool:
    return "dw13" in gradients or _of_inputs(gradients)


def _operands(gradients: Collection[str], dy: Any, a: Any, dh: Any, x: Any) -> dict[str, Any]:
    """The operands of the weight gradients, as fields of `SavedForWeights`; None if not requested."""
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
