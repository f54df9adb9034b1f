"""The expert layer, written once against the public operations, in three recipes.

"fp8_flow" (arXiv 2511.02302) stays in FP8 between two casts, one of the input and one of the output's
gradient: rows travel quantised, SwiGLU quantises what it computes, and the weight gradients' column-wise
operands come from the scaling-aware transpose. "fp8_blockwise" is the baseline with bfloat16 between
kernels, which dequantises and requantises for every column-wise operand: 12 casts. "bf16" has none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from fp8moe import checks, counters
from fp8moe.activation import SWIGLU, Activation
from fp8moe.dispatch import enter, operation
from fp8moe.expert_parallel import Comm, combine, combine_backward, dispatch, dispatch_backward
from fp8moe.formats import BFLOAT16
from fp8moe.grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from fp8moe.permute import permute, permute_backward, unpermute, unpermute_backward
from fp8moe.plan import plan_topk, static_bound
from fp8moe.quantize import dequantize, quantize, times_overwritten
from fp8moe.record_trees import nbytes
from fp8moe.records import ArrayLike, MoEGrads, PermutationPlan, Quantized, QuantTensor, Record
from fp8moe.swiglu import swiglu, swiglu_backward, swiglu_quantize, swiglu_quantize_backward
from fp8moe.transpose import permute_transpose, scaling_aware_transpose

RECIPES = ("bf16", "fp8_blockwise", "fp8_flow")
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
    """

    recipe: str
    recompute: str | None
    plan: PermutationPlan
    probs: Any
    x: Any
    h: Any
    a: Any
    w13: Any
    w2: Any
    activation: Activation = SWIGLU
    route: Any = None  # of expert parallelism
    overwritten: tuple[int | None, int | None] = (None, None)

    @property
    def nbytes(self) -> int:
        """Bytes saved for the backward, the weights apart."""
        return nbytes(self.plan, self.probs, self.x, self.h, self.a, self.route)

    def needed_for(self, gradients: Collection[str]) -> Saved:
        """Without what only other gradients need: with frozen weights (LoRA) x and a."""
        x = self.x if "dw13" in gradients or self.recompute else None
        return replace(self, x=x, a=self.a if "dw2" in gradients else None)


def quantize_weights(x: ArrayLike, *, fmt: str = "e4m3", out: Quantized | None = None) -> Quantized:
    """Quantise weights by (128, 128) blocks, row-wise and transposed, from one read.

    Once a step, however many micro-batches use them.

    Parameters
    ----------
    x : ArrayLike, bfloat16, float16 or float32, [E, N, K]
        The weights of all experts.
    fmt : "e4m3" or "e5m2"
        Format of the codes.
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
        As `quantize`.

    Examples
    --------
    >>> w = fp8moe.quantize_weights(np.ones((2, 128, 256), np.float32))
    >>> w.rowwise.data.shape, w.columnwise.data.shape, w.columnwise.shape
    ((2, 128, 256), (2, 256, 128), (2, 128, 256))
    """
    return quantize(x, fmt=fmt, block=(128, 128), columnwise=True, out=out)


def experts_of(w: Any) -> int:
    """How many experts weights are of, quantised or not."""
    return int((w.rowwise if isinstance(w, Quantized) else w).shape[0])


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
) -> tuple[Any, Saved]:
    """The experts of a layer: y[t] = sum over t's experts e of prob * w2[e] @ swiglu(w13[e] @ x[t]).

    Parameters
    ----------
    x : ArrayLike, bfloat16, [T, H]
        For "bf16" also float32 or float64, which then is the dtype of everything.
    w13 : ArrayLike or Quantized, [E, 2F, H]
        In x's dtype or float32, or, for the FP8 recipes, what `quantize_weights` returned. F must be a
        multiple of 128 for FP8.
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
        the others need is neither made nor kept; () for inference.

    Returns
    -------
    y : ArrayLike, [T, H]
        In x's dtype. Nothing synchronises with the host, but for the counts of rows where there is a
        ``comm``.
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
    how: dict[str, Any] = {"recipe": recipe, "recompute": recompute, "activation": activation}
    how["gradients"] = tuple(gradients)
    overwritten: Any = tuple(times_overwritten(w) if isinstance(w, Quantized) else None for w in (w13, w2))
    if comm is None:
        y, saved = experts_forward(x, w13, w2, topk_ids, topk_probs, **how)
    else:
        _check_layer(recipe, x=x, w13=w13, w2=w2, topk_ids=topk_ids, topk_probs=topk_probs)
        experts = experts_of(w13)
        arrived = dispatch(
            x, topk_ids, topk_probs, experts * comm.world_size, comm, fmt=FORMAT_BETWEEN_RANKS[recipe]
        )
        rows = static_bound(arrived.num_entries, experts, ALIGN_SIZE[recipe])
        y, saved = experts_forward(
            arrived.x, w13, w2, arrived.topk_ids, arrived.topk_probs, num_out_tokens=rows, **how
        )
        y, saved = combine(y, arrived.route, comm), replace(saved, route=arrived.route)
    if overwritten != (None, None):
        saved = replace(saved, overwritten=overwritten)
    if counters.counting():
        counters.record_saved(saved.nbytes)
    return y, saved


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
) -> tuple[Any, Saved]:
    """`moe_forward` of this rank's experts; x is quantised already where it came so from other ranks."""
    if not isinstance(x, QuantTensor):
        _check_layer(recipe, x=x, w13=w13, w2=w2, topk_ids=topk_ids, topk_probs=topk_probs)
        x = _cast(recipe, x)
    if recipe != "bf16":
        w13 = w13 if isinstance(w13, Quantized) else quantize_weights(w13)
        w2 = w2 if isinstance(w2, Quantized) else quantize_weights(w2)
    align = ALIGN_SIZE[recipe]
    plan = plan_topk(topk_ids, experts_of(w13), align_size=align, num_out_tokens=num_out_tokens)
    forward, _ = _STEPS[recipe]
    y, kept = forward(x, w13, w2, plan, topk_probs, activation, recompute is not None, gradients)
    if recipe != "bf16":
        w13, w2 = w13 if recompute else replace(w13, rowwise=None), replace(w2, rowwise=None)
    saved = Saved(recipe, recompute, plan, w13=w13, w2=w2, activation=activation, **kept)
    return y, saved.needed_for(gradients)


@operation
def experts_backward(
    saved: Saved,
    dy: Any,
    dw13: Any = None,
    dw2: Any = None,
    dtype: str = "float32",
    gradients: Collection[str] = GRADIENTS,
) -> MoEGrads:
    """`moe_backward` of this rank's experts; dy is quantised already where it came so from other ranks."""
    if not isinstance(dy, QuantTensor):
        _check_backward(saved, dy, dw13, dw2, dtype)
        dy = _cast(saved.recipe, dy)
    _, backward = _STEPS[saved.recipe]
    return backward(saved, dy, dw13, dw2, dtype, gradients)


def moe_backward(
    saved: Saved,
    dy: ArrayLike,
    *,
    dw13: ArrayLike | None = None,
    dw2: ArrayLike | None = None,
    dtype: str = "float32",
    comm: Comm | None = None,
    gradients: Collection[str] = GRADIENTS,
) -> MoEGrads:
    """Gradients of `moe_forward`.

    Parameters
    ----------
    saved : Saved
        What the forward returned.
    dy : ArrayLike, [T, H]
        In y's dtype.
    dw13 : ArrayLike, float32 or bfloat16, [E, 2F, H], or None
        To add the gradient of w13 to, in place: what several micro-batches sum up.
    dw2 : ArrayLike, float32 or bfloat16, [E, H, F], or None
        To add the gradient of w2 to.
    dtype : "float32", "bfloat16" or "float64"
        Of the weights' gradients where none are given.
    comm : Comm or None
        The forward's.
    gradients : collection of str
        Names of those that are wanted, of "dx", "dprobs", "dw13" and "dw2". What only the others need is not
        computed (with frozen weights two of six matrix products), and they are None; "dx" and "dprobs" come
        together.

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
    if not isinstance(saved, Saved):
        raise TypeError(f"saved: got {type(saved).__name__}; wanted what moe_forward returned")
    _check_gradients(gradients)
    for name, kept, gradient in (("x", saved.x, "dw13"), ("a", saved.a, "dw2")):
        if gradient in gradients and kept is None and not saved.recompute:
            raise ValueError(
                f"gradients: got {gradient!r}, and saved.{name} is None; wanted it among the forward's"
            )
    for name, given in (("dw13", dw13), ("dw2", dw2)):
        if given is not None and name not in gradients:
            raise ValueError(f"{name}: got an array to add to, and gradients without {name!r}; wanted both")
    for name, w, before in zip(("w13", "w2"), (saved.w13, saved.w2), saved.overwritten, strict=True):
        if before is not None and times_overwritten(w) != before:
            raise RuntimeError(
                f"{name}: got FP8 codes that quantize_weights overwrote after the forward; wanted the "
                "forward's own; run the backward first, or quantise into other memory"
            )
    route = saved.route
    _check_comm(comm)
    if (comm is None) != (route is None):
        raise ValueError(
            f"comm: got {comm}; wanted the forward's, {'none' if route is None else 'which had one'}"
        )
    gradients = tuple(gradients)
    if route is not None or saved.overwritten != (None, None):
        here = replace(saved, route=None, overwritten=(None, None))
    else:
        here = saved
    if comm is None or route is None:
        return experts_backward(here, dy, dw13, dw2, dtype, gradients)  # type: ignore[no-any-return]
    _check_backward(saved, dy, dw13, dw2, dtype)
    arrived = combine_backward(dy, route, comm, fmt=FORMAT_BETWEEN_RANKS[saved.recipe])
    grads: MoEGrads = experts_backward(here, arrived, dw13, dw2, dtype, gradients)
    if grads.dx is None:
        return grads
    dx, dprobs = dispatch_backward(grads.dx, grads.dprobs, route, comm)
    return replace(grads, dx=dx, dprobs=dprobs)


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


def _check_backward(saved: Saved, dy: Any, dw13: Any, dw2: Any, dtype: str) -> None:
    """All that `moe_backward` takes, before anything is added to dw13 or dw2."""
    a = enter(w13=saved.w13, w2=saved.w2, x=saved.x, a=saved.a, dy=dy, dw13=dw13, dw2=dw2).args
    quantized = saved.recipe != "bf16"
    checks.dtype("dy", a.dy, (BFLOAT16,) if quantized else (a.w13.dtype,))
    tokens = (saved.plan if saved.route is None else saved.route).num_tokens
    checks.shape("dy", a.dy, (tokens, _hidden(a.w13)))
    checks.choice("dtype", dtype, ("float32", "bfloat16", "float64"))
    kept = {"dy": a.dy, "x": a.x, "a": a.a, "w13": a.w13, "w2": a.w2}
    for name, w, out in (("dw13", a.w13, a.dw13), ("dw2", a.w2, a.dw2)):
        if out is None:
            continue
        checks.dtype(name, out, checks.FLOATS)
        # the column-wise copy is always kept
        checks.shape(name, out, (w.columnwise if quantized else w).shape)
        checks.writable(name, out, **kept)
        kept[name] = out


def _cast(recipe: str, x: Any) -> Any:
    fmt = FORMAT_BETWEEN_RANKS[recipe]
    return x if fmt is None else quantize(x, fmt=fmt)


def _check_layer(recipe: str, **arrays: Any) -> None:
    a = enter(**arrays).args
    quantized = recipe != "bf16"
    checks.shape("x", a.x, ("T", "H"))
    checks.dtype("x", a.x, (BFLOAT16,) if quantized else checks.FLOATS)
    tokens, hidden = a.x.shape
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
    checks.shape("w13", a.w13, ("E", "2F", hidden))
    experts, width, _ = a.w13.shape
    if width % (256 if quantized else 2):
        raise ValueError(
            f"w13: got 2F = {width}; wanted "
            + ("twice a multiple of 128, so that no block spans both halves" if quantized else "it even")
        )
    checks.shape("w2", a.w2, (experts, hidden, width // 2))
    checks.dtype("topk_ids", a.topk_ids, checks.INTEGERS)
    checks.shape("topk_ids", a.topk_ids, (tokens, "k"))
    checks.dtype("topk_probs", a.topk_probs, checks.FLOATS)
    checks.shape("topk_probs", a.topk_probs, tuple(a.topk_ids.shape))


# Each recipe is read from top to bottom; what differs between them is where casts stand.


def _forward_fp8_flow(x, w13, w2, plan, probs, activation, recompute, gradients):  # type: ignore[no-untyped-def]
    moved = permute(x, plan, probs)  # x in FP8 already, by cast 1
    h = grouped_gemm(moved.data, w13.rowwise, plan.expert_offsets)
    transposed = "dw2" in gradients and not recompute
    a = _activate(h, moved.probs, plan, activation, transposed)
    rowwise, columnwise = (a.rowwise, a.columnwise) if transposed else (a, None)
    y = unpermute(grouped_gemm(rowwise, w2.rowwise, plan.expert_offsets), plan)
    if recompute:
        return y, {"probs": moved.probs, "x": moved.data, "h": None, "a": None}
    return y, {"probs": moved.probs, "x": x, "h": h, "a": columnwise}


def _backward_fp8_flow(saved, dy, dw13, dw2, dtype, gradients):  # type: ignore[no-untyped-def]
    plan, offsets = saved.plan, saved.plan.expert_offsets
    h, a, dx, dprobs = saved.h, saved.a, None, None
    rowwise = "dw13" in gradients or _of_inputs(gradients)  # dy, in FP8 by cast 2, times w2
    if saved.recompute:
        h = grouped_gemm(saved.x, saved.w13.rowwise, offsets)
    if "dw2" in gradients:
        if saved.recompute:
            a = _activate(h, saved.probs, plan, saved.activation, transposed=True).columnwise
        # not of permuted rows, which are k times those to read: 360 us for 571 (131,072 x 7168, 32 experts)
        transposed = permute_transpose(dy, plan, target=_TARGET, rowwise=rowwise)
        if rowwise:  # both from one read
            dout, transposed = transposed.rowwise, transposed.columnwise
        dw2 = grouped_gemm_wgrad(transposed, a, offsets, dw2, dtype=dtype)
    if rowwise:
        if "dw2" not in gradients:
            dout = permute(dy, plan).data
        da = grouped_gemm(dout, saved.w2.columnwise, offsets)
        grad = swiglu_quantize_backward(
            da,
            h,
            saved.probs,
            expert_offsets=offsets,
            align_size=plan.align_size,
            activation=saved.activation,
            transposed="dw13" in gradients,
        )
        dh = grad.dh.rowwise if "dw13" in gradients else grad.dh
    if _of_inputs(gradients):
        dxe = grouped_gemm(dh, saved.w13.columnwise, offsets)
    if "dw13" in gradients:
        x = saved.x
        transposed = _transpose(x, plan) if saved.recompute else permute_transpose(x, plan, target=_TARGET)
        dw13 = grouped_gemm_wgrad(grad.dh.columnwise, transposed, offsets, dw13, dtype=dtype)
    if _of_inputs(gradients):
        dx, dprobs = permute_backward(dxe, plan, grad.dprobs)
    return MoEGrads(dx, dprobs, dw13, dw2)


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


def _forward_fp8_blockwise(x, w13, w2, plan, probs, activation, recompute, _):  # type: ignore[no-untyped-def]
    moved = permute(x, plan, probs)
    q = quantize(moved.data)  # cast 1
    h = grouped_gemm(q, w13.rowwise, plan.expert_offsets)
    a = quantize(swiglu(h, moved.probs, activation=activation))  # cast 2
    y = unpermute(grouped_gemm(a, w2.rowwise, plan.expert_offsets), plan)
    keep = {"h": None, "a": None} if recompute else {"h": h, "a": a}
    return y, {"probs": moved.probs, "x": q, **keep}


def _backward_fp8_blockwise(saved, dy, dw13, dw2, dtype, gradients):  # type: ignore[no-untyped-def]
    plan, offsets = saved.plan, saved.plan.expert_offsets
    h, a, dx, dprobs = saved.h, saved.a, None, None
    if saved.recompute:
        h = grouped_gemm(saved.x, saved.w13.rowwise, offsets)
        a = quantize(swiglu(h, saved.probs, activation=saved.activation)) if "dw2" in gradients else None
    dout = quantize(permute(dy, plan).data)  # cast 3
    da = grouped_gemm(dout, saved.w2.columnwise, offsets)
    if "dw2" in gradients:
        columnwise = _requantize(dout), _requantize(a)  # casts 4 to 7
        dw2 = grouped_gemm_wgrad(*columnwise, offsets, dw2, dtype=dtype)
    grad = swiglu_backward(da, h, saved.probs, activation=saved.activation)
    dh = quantize(grad.dh)  # cast 8
    if _of_inputs(gradients):
        dxe = grouped_gemm(dh, saved.w13.columnwise, offsets)
    if "dw13" in gradients:
        columnwise = _requantize(dh), _requantize(saved.x)  # casts 9 to 12
        dw13 = grouped_gemm_wgrad(*columnwise, offsets, dw13, dtype=dtype)
    if _of_inputs(gradients):
        dx, dprobs = permute_backward(dxe, plan, grad.dprobs)
    return MoEGrads(dx, dprobs, dw13, dw2)


def _requantize(q: Any) -> QuantTensor:
    """Row-wise to column-wise the long way. Experts start at multiples of 128, as the blocks do."""
    return quantize(dequantize(q, dtype="bfloat16"), block=(128, 1))


def _forward_bf16(x, w13, w2, plan, probs, activation, recompute, _):  # type: ignore[no-untyped-def]
    moved = permute(x, plan, probs)
    h = grouped_gemm(moved.data, w13, plan.expert_offsets)
    a = swiglu(h, moved.probs, activation=activation)
    y = unpermute(grouped_gemm(a, w2, plan.expert_offsets), plan)
    keep = {"h": None, "a": None} if recompute else {"h": h, "a": a}
    return y, {"probs": moved.probs, "x": moved.data, **keep}


def _backward_bf16(saved, dy, dw13, dw2, dtype, gradients):  # type: ignore[no-untyped-def]
    plan, offsets = saved.plan, saved.plan.expert_offsets
    h, a, dx, dprobs = saved.h, saved.a, None, None
    if saved.recompute:
        h = grouped_gemm(saved.x, saved.w13, offsets)
        a = swiglu(h, saved.probs, activation=saved.activation) if "dw2" in gradients else None
    if dtype == "float32" and dy.dtype == "float64":
        dtype = "float64"
    dout, _ = unpermute_backward(dy, plan)
    da = grouped_gemm(dout, saved.w2, offsets, transpose_w=True)
    if "dw2" in gradients:
        dw2 = grouped_gemm_wgrad(dout, a, offsets, dw2, dtype=dtype)
    grad = swiglu_backward(da, h, saved.probs, activation=saved.activation)
    if _of_inputs(gradients):
        dxe = grouped_gemm(grad.dh, saved.w13, offsets, transpose_w=True)
    if "dw13" in gradients:
        dw13 = grouped_gemm_wgrad(grad.dh, saved.x, offsets, dw13, dtype=dtype)
    if _of_inputs(gradients):
        dx, dprobs = permute_backward(dxe, plan, grad.dprobs)
    return MoEGrads(dx, dprobs, dw13, dw2)


_STEPS = {
    "fp8_flow": (_forward_fp8_flow, _backward_fp8_flow),
    "fp8_blockwise": (_forward_fp8_blockwise, _backward_fp8_blockwise),
    "bf16": (_forward_bf16, _backward_bf16),
}
