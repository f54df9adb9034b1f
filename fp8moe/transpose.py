"""FP8 transpose by moving exponents, without a wider type in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp8moe import checks
from fp8moe.dispatch import enter, operation
from fp8moe.formats import BLOCKED_128X4, COLUMN_BLOCK, LAYOUTS, Block, blocked_shape, ceil_div
from fp8moe.quantize import quant_spec
from fp8moe.records import ArrayLike, ArraySpec, PermutationPlan, QuantTensor


@operation
def scaling_aware_transpose(
    q: QuantTensor,
    expert_offsets: ArrayLike | None = None,
    *,
    target: str = "column",
    align_size: int = 1,
    layout: str = "compact",
) -> QuantTensor:
    """Row-wise to column-wise FP8, by moving exponents.

    Parameters
    ----------
    q : QuantTensor, [M, K]
        Row-wise and compact, of block (1, 128) with power-of-two scales, or (1, 32).
    expert_offsets : ArrayLike, int32, [E+1], or None
        First rows of the experts. Column blocks then start anew with each expert: expert e's codes are
        ``data[:, offsets[e]:offsets[e+1]]`` with its own rows of scales, in the order of the experts. What
        lies past the last offset is unspecified.
    target : "column", "tile" or "block"
        "column": each column block gets the power of two that quantising its values afresh would choose, so
        the result equals dequantising exactly and quantising by (128, 1) blocks, bit for bit.
        "tile": one scale a 128 x 128 tile, the largest row scale of rows that are not all zero, in as many
        scales as "column" has.
        "block": the codes of "tile" in (128, 128) blocks, with as many scales as there are blocks.
        `grouped_gemm_wgrad` multiplies these a fifth faster. Not for MXFP8, and every expert offset must be a
        multiple of 128.
    align_size : int
        What every expert offset is a multiple of. With a multiple of the block's rows B the scales have
        ceil(M/B) rows, else as many as the experts can come to.
    layout : "compact" or "blocked_128x4"
        Of the result's scales; "blocked_128x4", for MXFP8, as `to_layout` says, also of experts that begin at
        any row.

    Returns
    -------
    QuantTensor, [M, K]
        Column-wise: data [K, M], scales [blocks, K]; for "block" of block (128, 128), ``transposed``: data
        [K, M], scales [ceil(K/128), ceil(M/128)], zeros where no expert has rows.

    Raises
    ------
    TypeError
        For another block.
    ValueError
        For scales that are not powers of two (on CUDA with FP8MOE_CHECK=1), or offsets that do not fit.

    Notes
    -----
    The idea is of arXiv 2511.02302; the rounding here is exact or nearest. Every code is exact when
    representable, else rounded to nearest even, subnormals too; -0 and NaN survive; rows of zeros or of scale
    0 raise no target. MXFP8's targets are rounded up, whatever ``scale_rounding`` its rows had, so nothing
    saturates. What a tile's scale rounds that a column's does not is at most 2^-10 times that scale, and so,
    of rows that `quantize` made, 2^-17 of the tile's largest value.

    Examples
    --------
    >>> q = fp8moe.quantize(np.ones((128, 256), np.float32))
    >>> t = fp8moe.scaling_aware_transpose(q)
    >>> t.data.shape, t.scales.shape, bool((fp8moe.dequantize(t) == 1).all())
    ((256, 128), (1, 256), True)
    """
    call = enter(q=q, expert_offsets=expert_offsets)
    a = call.args
    checks.quant_tensor("q", a.q, COLUMN_BLOCK)
    align_size = checks.integer("align_size", align_size, 1)
    experts = None
    if a.expert_offsets is not None:
        checks.offsets(call, "expert_offsets", a.expert_offsets, align_size=align_size)
        experts = a.expert_offsets.shape[0] - 1
    out = call.empty(transpose_spec(a.q, a.q.shape[0], experts, align_size, target, layout))
    checks.powers_of_two(call, "q", a.q)
    call.run("transpose", "scaling_aware_transpose", a.q, a.expert_offsets, target=target, out=out)
    return call.leave(out)


@operation
def permute_transpose(
    q: QuantTensor, plan: PermutationPlan, *, target: str = "column", layout: str = "compact"
) -> QuantTensor:
    """Gather rows to their experts and transpose, in one read.

    It is `scaling_aware_transpose` of ``permute(q, plan).data``, without making that: training can keep the
    unpermuted rows, k times smaller.

    Parameters
    ----------
    q : QuantTensor, [T, K]
        Row-wise and compact, as for `scaling_aware_transpose`.
    plan : PermutationPlan
        With the T tokens of ``q``.
    target : "column", "tile" or "block"
        As for `scaling_aware_transpose`.
    layout : "compact" or "blocked_128x4"
        As for `scaling_aware_transpose`.

    Returns
    -------
    QuantTensor, [num_out_tokens, K]
        Column-wise: data [K, num_out_tokens].

    Raises
    ------
    TypeError, ValueError
        As `scaling_aware_transpose`, and for a plan of other tokens.

    Examples
    --------
    >>> q = fp8moe.quantize(np.ones((4, 128), np.float32))
    >>> plan = fp8moe.plan_topk(np.array([[0], [1], [1], [0]], np.int32), 2)
    >>> fp8moe.permute_transpose(q, plan).data.shape
    (128, 4)
    """
    call = enter(q=q, plan=plan)
    a = call.args
    checks.plan(call, a.plan)
    align = {"align_size": a.plan.align_size, "align": "plan.align_size"}
    checks.offsets(call, "plan.expert_offsets", a.plan.expert_offsets, **align)
    checks.quant_tensor("q", a.q, COLUMN_BLOCK)
    checks.shape("q.data", a.q.data, (a.plan.num_tokens, "K"))
    spec = transpose_spec(a.q, a.plan.num_out_tokens, a.plan.num_experts, a.plan.align_size, target, layout)
    checks.powers_of_two(call, "q", a.q)
    out = call.empty(spec)
    call.run("transpose", "permute_transpose", a.q, a.plan, target=target, out=out)
    return call.leave(out)


def transpose_spec(
    q: Any,
    rows: int,
    experts: int | None,
    align_size: int,
    target: str = "column",
    layout: str = "compact",
) -> QuantTensor:
    checks.choice("target", target, ("column", "tile", "block"))
    checks.choice("layout", layout, ("compact", BLOCKED_128X4))
    block = transposed_block(q.block, target)
    if block not in LAYOUTS[layout]:
        raise ValueError(f"layout: got {layout!r} for a result of block {block}; wanted it with (1, 32) only")
    if layout == BLOCKED_128X4:
        shape = rows, q.shape[1]
        scales = blocked_shape(shape, block, tiles_of_rows(rows, experts, align_size))
        spec = quant_spec(shape, q.fmt, block, layout)
        return replace(spec, scales=ArraySpec(scales, spec.scales.dtype))
    if target == "block":
        if q.block != (1, 128):
            raise TypeError(f'q.block: got {q.block} with target="block"; wanted (1, 128)')
        if experts is not None and align_size % 128:
            raise ValueError(
                f'align_size: got {align_size} with target="block"; wanted a multiple of 128, as every '
                "expert offset then must be"
            )
        return quant_spec((rows, q.shape[1]), q.fmt, block, "compact", transposed=True)
    scale_rows = None if experts is None else column_scale_rows(rows, experts, block[0], align_size)
    return quant_spec((rows, q.shape[1]), q.fmt, block, "compact", scale_rows)


def transposed_block(block: Block, target: str) -> tuple[int, int]:
    """The result's block, for the row-wise ``block`` of what is transposed."""
    return (128, 128) if target == "block" else COLUMN_BLOCK[block]


def tiles_of_rows(rows: int, experts: int | None, align_size: int) -> int:
    """Tiles of 128 rows in the blocked layout, none of which has rows of two experts."""
    return ceil_div(rows, 128) if experts is None else column_scale_rows(rows, experts, 128, align_size)


def column_scale_rows(rows: int, experts: int, block_rows: int, align_size: int) -> int:
    """Rows of scales of a column-wise tensor of several experts.

    Expert e needs ceil(m_e / block_rows); they lie end to end. Where every m_e is a multiple of
    block_rows that is ceil(rows / block_rows), as without experts; else the most it can come to, whatever
    the routing.
    """
    if align_size % block_rows == 0 or experts == 0:
        return ceil_div(rows, block_rows)
    return (rows + min(experts, rows) * (block_rows - 1)) // block_rows
