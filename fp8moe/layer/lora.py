"""Low-rank adapters (LoRA) beside the frozen weights of the experts: both linear halves of the layer, forward
and backward, on the permuted rows that the layer's own GEMMs multiply.

A half is y = x @ w[e].T + (z @ a[e].T) @ b[e].T, with z the rows that its adapter reads: x, or x after
dropout. The sum w + b @ a is never formed, and w has no gradient. The adapters' GEMMs are 16-bit (for the
recipe "bf16" in the rows' dtype) whatever the recipe of the weights; both FP8 recipes round the rows of w's
GEMM in the same places, because they differ in weight gradients alone. The activation between the halves is
the caller's.

adds: whether the adapter's GEMM adds to the result of w's, which has a kernel where `add_grouped_gemm` has
(`fp8moe.ops.grouped_gemm`). Otherwise both results are returned, and the sum is the caller's.
"""

from __future__ import annotations

from typing import Any

from fp8moe.layer.checks import check_layer
from fp8moe.layer.moe import experts_of
from fp8moe.layer.options import LayerOptions
from fp8moe.layer.permuted_rows import int32_counts
from fp8moe.layer.recipes import columnwise
from fp8moe.ops.grouped_gemm import (
    raw_add_grouped_gemm,
    raw_grouped_gemm,
    raw_grouped_gemm_wgrad,
    raw_permute_gemm,
)
from fp8moe.ops.permute import raw_permute, raw_permute_backward, raw_unpermute
from fp8moe.ops.plan import raw_plan_topk
from fp8moe.ops.quantize import raw_quantize
from fp8moe.records import PermutationPlan
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import current, operation

#: ranks are padded with zeros to a multiple of it, as "wgmma" needs where it contracts over them
RANK_MULTIPLE = 16


@operation
def first_forward(
    x: Any,
    z: Any,
    w13: Any,
    w2: Any,
    bias13: Any,
    topk_ids: Any,
    topk_probs: Any,
    a: Any,
    b: Any,
    options: LayerOptions,
    adds: bool,
) -> tuple[PermutationPlan, Any, Any, Any, Any]:
    """(plan, h, low, probs, u): h [P, 2F]; low [P, 2F], which is still to be added to it, or None; the rows'
    probabilities; u = z @ a.T [P, R], for `first_backward`, or None without an adapter (a None). z: None for
    x. a: [E, R, H]; b: [E, 2F, R], in x's dtype. Checks the whole layer's arguments but these two, whose
    shapes the caller has checked."""
    given = {"x": x, "w13": w13, "w2": w2, "topk_ids": topk_ids, "topk_probs": topk_probs, "bias13": bias13}
    check_layer(options, (), **given)
    recipe, experts = options.precision, experts_of(w13)
    checks.expert_ids(current.call, "topk_ids", topk_ids, experts)
    plan = raw_plan_topk(topk_ids, experts, align_size=recipe.align_size, num_out_tokens=None)
    rows = None
    if recipe.quantizes:
        moved = raw_permute_gemm(raw_quantize(x), w13.rowwise, plan, topk_probs, bias=bias13, **options.gemm)
        h, probs = moved.data, moved.probs
        del moved
    else:
        moved = raw_permute(x, plan, topk_probs)
        rows, probs = moved.data, moved.probs
        del moved
        h = raw_grouped_gemm(rows, w13, plan.expert_offsets, bias=bias13, **options.gemm)
    if a is None:
        return plan, h, None, probs, None
    if rows is None or z is not None:
        rows = raw_permute(x if z is None else z, plan, None).data
    u = raw_grouped_gemm(rows, a, plan.expert_offsets, **options.gemm)
    del rows
    return plan, *_with_low(h, u, b, plan.expert_offsets, options, adds), probs, u


@operation
def first_backward(
    dh: Any,
    dprobs: Any,
    z: Any,
    u: Any,
    w13: Any,
    a: Any,
    b: Any,
    plan: PermutationPlan,
    options: LayerOptions,
    requested: tuple[str, ...],
    adds: bool,
) -> tuple[Any, Any, Any, Any, Any]:
    """(dx, dprobs, dz, da, db), each None unless ``requested``; with ``adds`` dz, which is None, is in dx.
    dh [P, 2F], dprobs [P]."""
    offsets, gemm = plan.expert_offsets, options.gemm
    dx, dz, da, dprobs_of_tokens = None, None, None, None
    v, db = _adapter_backward(dh, u, b, offsets, options, requested)
    if "dx" in requested or "dprobs" in requested:
        if options.precision.quantizes:
            rows = raw_grouped_gemm(raw_quantize(dh), columnwise(w13), offsets, int32_counts(plan), **gemm)
        else:
            rows = raw_grouped_gemm(dh, w13, offsets, transpose_w=True, **gemm)
        if adds and "dz" in requested:
            raw_add_grouped_gemm(rows, v, a, offsets, transpose_w=True, num_sms=options.num_sms)
        dx, dprobs_of_tokens = raw_permute_backward(rows, plan, dprobs)
        del rows
    if "dz" in requested and not adds:
        dz, _ = raw_permute_backward(raw_grouped_gemm(v, a, offsets, transpose_w=True, **gemm), plan, None)
    if "da" in requested:
        da = raw_grouped_gemm_wgrad(v, raw_permute(z, plan, None).data, offsets, **_wgrad(dh, gemm))
    return dx, dprobs_of_tokens, dz, da, db


@operation
def second_forward(
    act: Any, z: Any, w2: Any, a: Any, b: Any, plan: PermutationPlan, options: LayerOptions, adds: bool
) -> tuple[Any, Any, Any]:
    """(y, low, u): y [T, H]; low [T, H], which is still to be added to it, or None; u = z @ a.T [P, R], for
    `second_backward`, or None without an adapter (a None). act [P, F], None for u alone; a: [E, R, F]; b:
    [E, H, R], in z's dtype."""
    offsets, gemm = plan.expert_offsets, options.gemm
    if act is None:
        return None, None, None if a is None else raw_grouped_gemm(z, a, offsets, **gemm)
    if options.precision.quantizes:
        rows = raw_grouped_gemm(raw_quantize(act), w2.rowwise, offsets, int32_counts(plan), **gemm)
    else:
        rows = raw_grouped_gemm(act, w2, offsets, **gemm)
    if a is None:
        return raw_unpermute(rows, plan), None, None
    u = raw_grouped_gemm(z, a, offsets, **gemm)
    rows, low = _with_low(rows, u, b, offsets, options, adds)
    y = raw_unpermute(rows, plan)
    del rows
    return y, None if low is None else raw_unpermute(low, plan), u


@operation
def second_backward(
    dy: Any,
    z: Any,
    u: Any,
    w2: Any,
    a: Any,
    b: Any,
    plan: PermutationPlan,
    options: LayerOptions,
    requested: tuple[str, ...],
    adds: bool,
) -> tuple[Any, Any, Any, Any]:
    """(dact, dz, da, db), each None unless ``requested``; with ``adds`` dz, which is None, is in dact."""
    offsets, gemm = plan.expert_offsets, options.gemm
    dact, dz, da, rows = None, None, None, None
    if {"dz", "da", "db"}.intersection(requested) or not options.precision.quantizes:
        rows = raw_permute(dy, plan, None).data
    if "dact" in requested:
        if options.precision.quantizes:
            dact = raw_permute_gemm(raw_quantize(dy), columnwise(w2), plan, **gemm).data
        else:
            dact = raw_grouped_gemm(rows, w2, offsets, transpose_w=True, **gemm)
    v, db = _adapter_backward(rows, u, b, offsets, options, requested)
    del rows
    if "dz" in requested and adds:
        raw_add_grouped_gemm(dact, v, a, offsets, transpose_w=True, num_sms=options.num_sms)
    elif "dz" in requested:
        dz = raw_grouped_gemm(v, a, offsets, transpose_w=True, **gemm)
    if "da" in requested:
        da = raw_grouped_gemm_wgrad(v, z, offsets, **_wgrad(z, gemm))
    return dact, dz, da, db


def _with_low(rows: Any, u: Any, b: Any, offsets: Any, options: LayerOptions, adds: bool) -> tuple[Any, Any]:
    """rows + u @ b.T and None, or both of them."""
    if adds:
        return raw_add_grouped_gemm(rows, u, b, offsets, num_sms=options.num_sms), None
    return rows, raw_grouped_gemm(u, b, offsets, **options.gemm)


def _adapter_backward(
    grad: Any, u: Any, b: Any, offsets: Any, options: LayerOptions, requested: tuple[str, ...]
) -> tuple[Any, Any]:
    """v = grad @ b [P, R], which dz and da are made of, and db."""
    v, db = None, None
    if "dz" in requested or "da" in requested:
        v = raw_grouped_gemm(grad, b, offsets, transpose_w=True, **options.gemm)
    if "db" in requested:
        db = raw_grouped_gemm_wgrad(grad, u, offsets, **_wgrad(grad, options.gemm))
    return v, db


def _wgrad(rows: Any, gemm: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": "float64" if rows.dtype == "float64" else "float32", **gemm}
