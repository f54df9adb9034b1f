"""Conversion between the memory layouts of scales that different GEMMs read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fp8moe.formats import (
    BLOCKED_128X4,
    LAYOUTS,
    blocked_shape,
    blocked_tiles,
    is_columnwise,
    scale_shape,
)
from fp8moe.ops.quantize import quant_spec
from fp8moe.ops.transpose import column_scale_rows, tiles_of_rows
from fp8moe.records import ArrayLike, ArraySpec, PermutationPlan, QuantTensor
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import Call, enter

#: blocks that have more than one layout
BLOCKS_OF_LAYOUTS = tuple(dict.fromkeys(b for name in LAYOUTS if name != "compact" for b in LAYOUTS[name]))


def to_layout(
    q: QuantTensor, layout: str, expert_offsets: ArrayLike | None = None, *, align_size: int = 1
) -> QuantTensor:
    """The same tensor with its scales in another layout.

    Parameters
    ----------
    q : QuantTensor, [M, K]
        Block (1, 128), or MXFP8 with block (1, 32) or (32, 1).
    layout : "compact", "gemm_ready" or "blocked_128x4"
        "compact": scales [M, ceil(K/B)], column-wise [ceil(M/B), K]. "gemm_ready", for (1, 128):
        [ceil(K/128), roundup(M, 4)]. "blocked_128x4", for MXFP8: tiles of 128 rows of the GEMM operand by 4
        blocks along the contraction, as tcgen05, cuBLAS, CUTLASS and torch's ``scaled_mm`` read them;
        row-wise [roundup(M, 128), roundup(ceil(K/32), 4)], column-wise [roundup(K, 128), roundup(ceil(M/32),
        4)], with zeros past M and K.
    expert_offsets : ArrayLike, int32, [E+1], or None
        First row of each expert, for conversions to or from "blocked_128x4": every expert then starts a new
        tile, as torch's ``scaled_grouped_mm`` requires. Scales of rows that belong to no expert are not
        stored, and convert back to zeros. Row-wise tensors whose experts start at multiples of 128 rows need
        no offsets.
    align_size : int
        Every expert offset is a multiple of it. If it is a multiple of 128 there are ceil(M/128) tiles of
        rows; otherwise the upper bound over all possible offsets.

    Returns
    -------
    QuantTensor, [M, K]
        Shares the codes of ``q``. A tensor that already has the layout is returned unchanged.

    Raises
    ------
    TypeError
        For a block that does not support the layout.
    ValueError
        For an unknown layout, or offsets that do not fit.

    Notes
    -----
    A tile has 512 bytes; the scale of its row r and block b is byte (r % 32) * 16 + (r // 32) * 4 + b
    (cuBLAS, "1D block scaling factors layout"; torch's ``SwizzleType.SWIZZLE_32_4_4``). Tiles are stored in
    row-major order; for column-wise tensors, where the experts divide the contraction, in row-major order
    within each expert.

    Examples
    --------
    >>> q = fp8moe.quantize(np.ones((3, 256), np.float32))
    >>> fp8moe.to_layout(q, "gemm_ready").scales.shape
    (2, 4)
    >>> q = fp8moe.quantize(np.ones((130, 96), np.float32), block=(1, 32))
    >>> fp8moe.to_layout(q, "blocked_128x4").scales.shape
    (256, 4)
    """
    checks.choice("layout", layout, LAYOUTS)
    align_size = checks.integer("align_size", align_size, 1)
    call = enter(q=q, expert_offsets=expert_offsets)
    raw = checks.quant_tensor("q", call.args.q, BLOCKS_OF_LAYOUTS, tuple(LAYOUTS))
    if raw.block not in LAYOUTS[layout]:
        blocks = " or ".join(map(str, LAYOUTS[layout]))
        raise TypeError(f"q.block: got {raw.block} with layout={layout!r}; wanted {blocks}")
    experts = None
    if expert_offsets is not None:
        experts = _check_offsets(call, raw, layout, call.args.expert_offsets, align_size)
    if raw.layout == layout:
        return q
    spec = ArraySpec(converted_shape(raw, layout, experts, align_size), raw.scales.dtype)
    out = replace(raw, scales=call.empty(spec), layout=layout)
    call.run("layout", "to_layout", raw, call.args.expert_offsets, out=out)
    return replace(q, scales=call.leave(out.scales), layout=layout)


def _check_offsets(call: Call, q: QuantTensor, layout: str, offsets: Any, align_size: int) -> int:
    """Check offsets against the scales; returns the number of experts."""
    if (q.layout == BLOCKED_128X4) == (layout == BLOCKED_128X4):
        raise ValueError(
            f"expert_offsets: got offsets for a conversion from layout {q.layout!r} to {layout!r}; wanted "
            f"them only from or to {BLOCKED_128X4!r}; pass None"
        )
    checks.offsets(call, "expert_offsets", offsets, align_size=align_size)
    if layout == BLOCKED_128X4 and is_columnwise(q.block):
        checks.column_scales(call, "q", q, offsets)
    values = call.values(offsets)
    if q.layout == BLOCKED_128X4 and values is not None:
        sizes = np.diff(values.clip(0, q.shape[0]).astype(np.int64))
        wanted, tiles = int((-(-sizes // 128)).sum()), blocked_tiles(q.scales.shape, q.block)
        if tiles < wanted:
            raise ValueError(
                f"q.scales: got {tiles} tiles of 128 rows; wanted {wanted}, as expert_offsets needs; pass "
                "the same expert_offsets and align_size to the function that makes the layout"
            )
    return int(offsets.shape[0]) - 1


def converted_shape(q: QuantTensor, layout: str, experts: int | None, align_size: int) -> tuple[int, ...]:
    """Shape of the scales of ``q`` in ``layout``."""
    rows = q.shape[0]
    if layout == BLOCKED_128X4:
        return blocked_shape(q.shape, q.block, tiles_of_rows(rows, experts, align_size))
    if experts is not None and is_columnwise(q.block):
        return column_scale_rows(rows, experts, 32, align_size), q.shape[1]
    return scale_shape(q.shape, q.block, layout)


def check_blocked_rows(x: Any, plan: PermutationPlan, layout: str) -> None:
    checks.choice("layout", layout, ("compact", BLOCKED_128X4))
    if not isinstance(x, QuantTensor) or x.block != (1, 32):
        kind = x.block if isinstance(x, QuantTensor) else f"an array of {x.dtype}"
        raise TypeError(f"x: got {kind} with layout={layout!r}; wanted MXFP8, of block (1, 32)")
    if plan.align_size % 128:
        raise ValueError(
            f"layout: got {layout!r} with a plan's align_size of {plan.align_size}; wanted a multiple of "
            "128, because a tile has rows of one expert only; or permute compact scales, and convert them "
            "with fp8moe.to_layout(rows, layout, plan.expert_offsets)"
        )


def blocked_rows_spec(x: QuantTensor, plan: PermutationPlan, layout: str) -> QuantTensor:
    """Specs of the permuted rows of ``x``, with scales in the blocked layout."""
    return quant_spec((plan.num_out_tokens, x.shape[1]), x.fmt, (1, 32), layout)
