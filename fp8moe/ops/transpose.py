"""FP8 transpose by adjusting exponents, without dequantisation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp8moe.formats import BLOCKED_128X4, COLUMN_BLOCK, LAYOUTS, Block, blocked_shape, ceil_div
from fp8moe.ops.quantize import quant_spec
from fp8moe.records import ArrayLike, ArraySpec, PermutationPlan, QuantTensor
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import current, enter, operation


@operation
def scaling_aware_transpose(
    q: QuantTensor,
    expert_offsets: ArrayLike | None = None,
    *,
    target: str = "column",
    align_size: int = 1,
    layout: str = "compact",
) -> QuantTensor:
    """Convert row-wise FP8 to column-wise FP8 by adjusting the codes' exponents.

    Parameters
    ----------
    q : QuantTensor, [M, K]
        Row-wise and compact, with block (1, 128) and power-of-two scales, or with block (1, 32).
    expert_offsets : ArrayLike, int32, [E+1], or None
        First row of each expert. Column blocks then restart at each expert: expert e's codes are ``data[:,
        offsets[e]:offsets[e+1]]``, and it has its own rows of scales, in the order of the experts. Values
        past the last offset are unspecified.
    target : "column", "tile" or "block"
        "column": each column block gets the power of two that quantising its values would choose, so the
        result is bitwise equal to exact dequantisation followed by quantisation in (128, 1) blocks. "tile":
        one scale per 128 x 128 tile, the largest row scale among its rows that are not all zero, stored once
        per column block as for "column". "block": the codes of "tile" with one stored scale per (128, 128)
        block. `grouped_gemm_wgrad` is 20 % faster with these. Not for MXFP8, and every expert offset must be
        a multiple of 128.
    align_size : int
        Every expert offset is a multiple of it. If it is a multiple of the block's rows B the scales have
        ceil(M/B) rows; otherwise the upper bound over all possible offsets.
    layout : "compact" or "blocked_128x4"
        Layout of the result's scales, see `to_layout`. "blocked_128x4" is for MXFP8; experts may start at any
        row.

    Returns
    -------
    QuantTensor, [M, K]
        Column-wise: data [K, M], scales [blocks, K]. For target="block": block (128, 128) with
        ``transposed``, data [K, M], scales [ceil(K/128), ceil(M/128)], zeros in blocks without rows of an
        expert.

    Raises
    ------
    TypeError
        For an unsupported block.
    ValueError
        For scales that are not powers of two (on CUDA with FP8MOE_CHECK=1), or offsets that do not fit.

    Notes
    -----
    The method is from arXiv 2511.02302, with correct rounding: every code is exact if it is representable,
    otherwise rounded to nearest even, including subnormals. -0 and NaN are preserved. Rows of zeros, or with
    scale 0, do not contribute to a block's scale. MXFP8 scales are rounded up, whatever ``scale_rounding``
    the rows had, so that no value saturates; a column block with a NaN becomes NaN as a whole, as in
    `quantize` ("tile": a tile with a row's scale of NaN). The additional rounding error of "tile" and "block"
    over "column" is at most 2^-10 times the tile's scale, which for rows made by `quantize` is 2^-17 of the
    tile's largest value.

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
    check_transpose(a.q.block, experts, align_size, target, layout)
    checks.powers_of_two(call, "q", a.q)
    options: dict[str, Any] = {"target": target, "align_size": align_size, "layout": layout}
    return raw_scaling_aware_transpose(a.q, a.expert_offsets, **options)


def raw_scaling_aware_transpose(
    q: QuantTensor,
    expert_offsets: Any = None,
    *,
    target: str = "column",
    align_size: int = 1,
    layout: str = "compact",
) -> QuantTensor:
    call = current.call
    experts = None if expert_offsets is None else expert_offsets.shape[0] - 1
    out: QuantTensor = call.empty(transpose_spec(q, q.shape[0], experts, align_size, target, layout))
    call.run("transpose", "scaling_aware_transpose", q, expert_offsets, target=target, out=out)
    return out


@operation
def permute_transpose(
    q: QuantTensor, plan: PermutationPlan, *, target: str = "column", layout: str = "compact"
) -> QuantTensor:
    """Permute rows to their experts and transpose them in one pass.

    Equals `scaling_aware_transpose` of ``permute(q, plan).data``, without storing the permuted rows. Training
    can therefore save the unpermuted rows, which are k times smaller.

    Parameters
    ----------
    q : QuantTensor, [T, K]
        Row-wise and compact, as for `scaling_aware_transpose`.
    plan : PermutationPlan
        A plan for the T tokens of ``q``.
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
        As for `scaling_aware_transpose`, and for a plan with another number of tokens.

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
    check_transpose(a.q.block, a.plan.num_experts, a.plan.align_size, target, layout)
    checks.powers_of_two(call, "q", a.q)
    return raw_permute_transpose(a.q, a.plan, target=target, layout=layout)


def raw_permute_transpose(
    q: QuantTensor, plan: PermutationPlan, *, target: str = "column", layout: str = "compact"
) -> QuantTensor:
    call, rows = current.call, plan.num_out_tokens
    out: QuantTensor = call.empty(transpose_spec(q, rows, plan.num_experts, plan.align_size, target, layout))
    call.run("transpose", "permute_transpose", q, plan, target=target, out=out)
    return out


def check_transpose(block: Block, experts: int | None, align_size: int, target: str, layout: str) -> None:
    checks.choice("target", target, ("column", "tile", "block"))
    checks.choice("layout", layout, ("compact", BLOCKED_128X4))
    if transposed_block(block, target) not in LAYOUTS[layout]:
        raise ValueError(
            f"layout: got {layout!r} for a result of block {transposed_block(block, target)}; wanted it with "
            "(1, 32) only"
        )
    if target != "block":
        return
    if block != (1, 128):
        raise TypeError(f'q.block: got {block} with target="block"; wanted (1, 128)')
    if experts is not None and align_size % 128:
        raise ValueError(
            f'align_size: got {align_size} with target="block"; wanted a multiple of 128, because every '
            "expert must start at a block boundary"
        )


def transpose_spec(
    q: Any,
    rows: int,
    experts: int | None,
    align_size: int,
    target: str = "column",
    layout: str = "compact",
) -> QuantTensor:
    """Shapes of transposed rows."""
    block = transposed_block(q.block, target)
    if layout == BLOCKED_128X4:
        shape = rows, q.shape[1]
        scales = blocked_shape(shape, block, tiles_of_rows(rows, experts, align_size))
        spec = quant_spec(shape, q.fmt, block, layout)
        return replace(spec, scales=ArraySpec(scales, spec.scales.dtype))
    if target == "block":
        return quant_spec((rows, q.shape[1]), q.fmt, block, "compact", transposed=True)
    scale_rows = None if experts is None else column_scale_rows(rows, experts, block[0], align_size)
    return quant_spec((rows, q.shape[1]), q.fmt, block, "compact", scale_rows)


def transposed_block(block: Block, target: str) -> tuple[int, int]:
    """The block of the transposed tensor, given the block of the row-wise one."""
    return (128, 128) if target == "block" else COLUMN_BLOCK[block]


def tiles_of_rows(rows: int, experts: int | None, align_size: int) -> int:
    """Number of tiles of 128 rows in the blocked layout; a tile has rows of one expert only."""
    return ceil_div(rows, 128) if experts is None else column_scale_rows(rows, experts, 128, align_size)


def column_scale_rows(rows: int, experts: int, block_rows: int, align_size: int) -> int:
    """Number of rows of scales of a column-wise tensor with several experts.

    Expert e with m_e rows needs ceil(m_e / block_rows) rows of scales; the experts' rows are stored
    consecutively. If every m_e is a multiple of block_rows the sum is ceil(rows / block_rows), as without
    experts; otherwise this function returns the upper bound over all routings.
    """
    if align_size % block_rows == 0 or experts == 0:
        return ceil_div(rows, block_rows)
    return (rows + min(experts, rows) * (block_rows - 1)) // block_rows
