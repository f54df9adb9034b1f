"""Launchers of transpose.cu, with the names and signatures of `fp8moe.reference.transpose`."""

from __future__ import annotations

from typing import Any

from fp8moe.formats import BLOCKED_128X4, is_mx
from fp8moe.kernels_cuda.layout import compact_scratch, to_layout
from fp8moe.kernels_cuda.permute import sources
from fp8moe.kernels_cuda.quantize import TILE, make_strips, strips_with_scales, tiles_down
from fp8moe.kernels_cuda.runtime.configuration import Configuration
from fp8moe.kernels_cuda.runtime.encodings import FORMATS, formats, with_experts
from fp8moe.kernels_cuda.runtime.launch import fill_bytes, launch, threads
from fp8moe.records import PermutationPlan, QuantTensor


def transpose_configuration(strips: int, columns: int, *, mx: bool) -> Configuration:
    """Configuration of scaling_aware_transpose: one thread block per tile, consecutive blocks in a column of
    tiles."""
    return Configuration((tiles_down(strips, mx=mx), threads(columns, TILE)), TILE)


def scaling_aware_transpose(q: QuantTensor, expert_offsets: Any, *, target: str, out: QuantTensor) -> None:
    _transpose(q, q.data.shape[0], None, expert_offsets, target, out)


def permute_transpose(q: QuantTensor, plan: PermutationPlan, *, target: str, out: QuantTensor) -> None:
    source, _ = sources(plan, columns=False)
    _transpose(q, plan.num_out_tokens, source, plan.expert_offsets, target, out)


def _transpose(q: QuantTensor, rows: int, source: Any, offsets: Any, target: str, out: QuantTensor) -> None:
    assert q.block is not None
    assert out.block is not None
    mx = is_mx(q.block)
    blocks = target == "block"
    columns, count = q.data.shape[1], out.scales.shape[1] if blocks else strips_with_scales(out)
    whole = columns % (128 if mx else 16) == 0 and q.data.ptr % 16 == 0 and out.scales.ptr % 16 == 0
    whole &= q.scales.ptr % 4 == 0  # of mx, four are loaded together
    if whole:
        launch(
            "transpose",
            "scaling_aware_transpose",
            *transpose_configuration(count, columns, mx=mx).grid,
            q.data,
            q.scales,
            source,
            *with_experts(offsets),
            rows,
            columns,
            count,
            blocks,
            out.data,
            out.scales,
            defines=(*formats(out), f"TILE_TARGET={int(target != 'column')}"),
        )
        return
    if out.layout == BLOCKED_128X4:
        compact = compact_scratch(out)
        _transpose(q, rows, source, offsets, target, compact)
        to_layout(compact, offsets, out=out)
        return
    if blocks:
        fill_bytes(out.scales, 0)
    strips = make_strips(offsets, 1, rows, out.block[0], count)
    grid = (count, threads(columns, 128))
    rule = (q.block[1], FORMATS[q.fmt], mx, target != "column", blocks)
    arguments = (q.data, q.scales, source, strips, rows, columns, *rule, out.data, out.scales)
    launch("transpose", "scaling_aware_transpose_plain", grid, 128, *arguments)
