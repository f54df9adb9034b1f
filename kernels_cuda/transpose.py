"""Launchers of transpose.cu: the same names and signatures as `fp8moe.reference.transpose`."""

from __future__ import annotations

from typing import Any

from fp8moe.formats import is_mx
from fp8moe.kernels_cuda.configuration import Configuration
from fp8moe.kernels_cuda.encodings import FORMATS, formats
from fp8moe.kernels_cuda.launch import fill_bytes, launch, threads
from fp8moe.kernels_cuda.permute import permute, sources
from fp8moe.kernels_cuda.quantize import TILE, make_strips, tiles_down, with_experts
from fp8moe.records import PermutationPlan, Permuted, Quantized, QuantTensor

# Rows of tiles that permute_both_ways makes at a time: with 32 columns of tiles that is what a GPU of 132
# multiprocessors has under way, so that row-wise and transposed codes are both written in long pieces.
GROUP = 32


def transpose_configuration(strips: int, columns: int, *, mx: bool) -> Configuration:
    """Of scaling_aware_transpose: a block a tile, rows of tiles first."""
    return Configuration((tiles_down(strips, mx=mx), threads(columns, TILE)), TILE)


def scaling_aware_transpose(q: QuantTensor, expert_offsets: Any, *, target: str, out: QuantTensor) -> None:
    _transpose(q, q.data.shape[0], None, expert_offsets, target, out)


def permute_transpose(q: QuantTensor, plan: PermutationPlan, *, target: str, out: Any) -> None:
    columnwise = out
    if isinstance(out, Quantized):
        columnwise = out.columnwise
        if target == "block" and _whole(q, out.rowwise, columnwise):
            _permute_both_ways(q, plan, out)
            return
        permute(q, plan, None, fill_padding=True, out=Permuted(out.rowwise, None, plan))
    source, _ = sources(plan)
    _transpose(q, plan.num_out_tokens, source, plan.expert_offsets, target, columnwise)


def both_ways_configuration(strips: int, columns: int) -> Configuration:
    """Of permute_both_ways: a block a tile."""
    return Configuration(strips * threads(columns, TILE), TILE)


def _permute_both_ways(q: QuantTensor, plan: PermutationPlan, out: Quantized) -> None:
    source, _ = sources(plan)
    columns, strips = q.data.shape[1], out.columnwise.scales.shape[1]
    configuration = both_ways_configuration(strips, columns)
    launch(
        "transpose",
        "permute_both_ways",
        configuration.blocks,
        configuration.threads,
        q.data,
        q.scales,
        source,
        *with_experts(plan.expert_offsets),
        plan.num_out_tokens,
        columns,
        strips,
        GROUP,
        out.rowwise.data,
        out.rowwise.scales,
        out.columnwise.data,
        out.columnwise.scales,
        defines=(*formats(q), "TILE_TARGET=1"),
    )


def _whole(q: QuantTensor, rowwise: QuantTensor, columnwise: QuantTensor) -> bool:
    """Whether permute_both_ways can move these codes, 16 bytes at a time."""
    arrays = (q.data, q.scales, rowwise.data, rowwise.scales, columnwise.data, columnwise.scales)
    return q.data.shape[1] % 16 == 0 and all(a.ptr % 16 == 0 for a in arrays)


def _transpose(q: QuantTensor, rows: int, source: Any, offsets: Any, target: str, out: QuantTensor) -> None:
    assert q.block is not None
    assert out.block is not None
    mx = is_mx(q.block)
    blocks = target == "block"
    columns, count = q.data.shape[1], out.scales.shape[1 if blocks else 0]
    if columns % (128 if mx else 16) == 0 and q.data.ptr % 16 == 0 and out.scales.ptr % 16 == 0:
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
            defines=(*formats(q), f"TILE_TARGET={int(target != 'column')}"),
        )
        return
    if blocks:
        fill_bytes(out.scales, 0)
    strips = make_strips(offsets, 1, rows, out.block[0], count)
    grid = (count, threads(columns, 128))
    rule = (q.block[1], FORMATS[q.fmt], mx, target != "column", blocks)
    arguments = (q.data, q.scales, source, strips, rows, columns, *rule, out.data, out.scales)
    launch("transpose", "scaling_aware_transpose_plain", grid, 128, *arguments)
