"""Launchers of grouped_gemm_wgmma.cu and grouped_gemm_wgrad_wgmma.cu: FP8 on Hopper's tensor cores."""

from __future__ import annotations

from typing import Any

from fp8moe.kernels_cuda.gemm.product import Product
from fp8moe.kernels_cuda.runtime.configuration import Configuration
from fp8moe.kernels_cuda.runtime.encodings import FORMATS, KINDS
from fp8moe.kernels_cuda.runtime.launch import launch, multiprocessors, threads, zeroed_counter
from fp8moe.records import QuantTensor

# Must match wgmma_pipeline.cuh.
TILE_COLUMNS = 256
THREADS = 384
GATHERING_THREADS = 128  # of wgmma_gather.cuh, in addition
CLUSTER = 2  # thread blocks that share operands by multicast
BOXES = (64, TILE_COLUMNS // 2)  # rows of one TMA box, per operand
STAGES = 3
TURN_BYTES = 4 * (2 * 8 + 16)  # of four scheduled tiles: two barriers and a WorkTile each
#: codes, scales; a tile
SHARED_BYTES = STAGES * ((128 + TILE_COLUMNS) * (128 + 4) + 16) + 128 * 528 + 16 + TURN_BYTES
BARRIER_BYTES = 8 * (STAGES + STAGES % 2)  # of the gathered stages
TABLE_BYTES = 11 << 10  # of a block's 227 KB, what remains for the experts' table


def tiles_configuration(
    verb: str, experts: int, multiprocessors: int, *, gather: bool = False
) -> Configuration:
    """One persistent thread block per SM, rounded down to whole clusters. gather: of the kernel that gathers
    its rows."""
    shared = SHARED_BYTES + _table_bytes(verb, experts) + gather * BARRIER_BYTES
    threads_of_block = THREADS + gather * GATHERING_THREADS
    return Configuration(multiprocessors // CLUSTER * CLUSTER, threads_of_block, shared)


def _table_bytes(verb: str, experts: int) -> int:
    """Bytes of the experts' table: two words per expert and for the end; the forward has one more byte per
    expert, whether its last tile is a half."""
    return (9 if verb == "grouped_gemm" else 8) * (experts + 1)


def unsupported_reasons(product: Product, architecture: str) -> list[str]:
    """Reasons why these kernels do not support a product; empty if they do."""
    why = []
    if not product.quantized:
        why.append(f"the operands are {product.operands[0]}, not FP8")
    if architecture != "sm_90a":
        why.append(f"the device is {architecture}, not sm_90a")
    rows, width, depth = product.rows, product.width, product.depth
    if product.verb == "grouped_gemm":
        multiples = {"N": (width, 8), "K": (depth, 16)}
    else:
        multiples = {"P": (rows, 16), "N": (width, 4), "K": (depth, 8)}
    why += [f"{name} is {n}, no multiple of {of}" for name, (n, of) in multiples.items() if n % of]
    if product.out not in ("bfloat16", "float32"):
        why.append(f"out is {product.out}, not float32 or bfloat16")
    if product.alignment < 16:
        why.append("codes, scales or out do not begin at a multiple of 16 bytes")
    if _table_bytes(product.verb, product.experts) > TABLE_BYTES:
        why.append(f"{product.experts} experts are too many")
    columns = width if product.verb == "grouped_gemm" else depth
    if (product.experts + 1) * threads(rows, 128) * threads(columns, TILE_COLUMNS) >= 2**30:
        why.append(f"{rows} rows are too many")  # the kernel counts tiles of every expert in 32 bits
    if 0 in (product.experts, rows, width, depth):
        why.append("an operand is empty")
    return why


def grouped_gemm(
    x: QuantTensor,
    w: QuantTensor,
    expert_offsets: Any,
    *,
    bias: Any,
    tokens_per_expert: Any,
    transpose_w: bool,
    num_sms: int | None,
    out: Any,
    sources: Any = None,
) -> None:
    """sources: int32 [P], the row of x that is each row of the product, -1 for a row of zeros; None: all rows
    of x, in order."""
    rows, width = out.shape
    ready = x.layout == "gemm_ready"
    strides = (1, x.scales.shape[1]) if ready else (x.scales.shape[1], 1)
    _launch_tiles(
        "grouped_gemm",
        "grouped_gemm_wgmma",
        "grouped_gemm_tiles",
        (*(() if sources is None else ("GATHER=1",)), *(() if bias is None else ("BIAS=1",))),
        num_sms,
        x,
        w,
        expert_offsets,
        x.scales,
        *strides,
        w.scales,
        expert_offsets,
        w.data.shape[0],
        rows,
        width,
        x.shape[1],
        out,
        tokens_per_expert,
        bias,
        *((None, 0, None) if sources is None else (x.data, x.shape[0], sources)),
    )


def grouped_gemm_wgrad(
    dy: QuantTensor,
    x: QuantTensor,
    expert_offsets: Any,
    *,
    tokens_per_expert: Any,
    accumulate: bool,
    pitch: int,
    num_sms: int | None,
    out: Any,
) -> None:
    _launch_tiles(
        "grouped_gemm_wgrad",
        "grouped_gemm_wgrad_wgmma",
        "grouped_gemm_wgrad_tiles",
        (f"BLOCKS={int(dy.transposed)}",),
        num_sms,
        dy,
        x,
        expert_offsets,
        dy.data,
        x.data,
        dy.scales,
        x.scales,
        min(dy.scales.shape[0], x.scales.shape[0]),
        expert_offsets,
        tokens_per_expert,
        expert_offsets.shape[0] - 1,
        *dy.shape,
        x.shape[1],
        pitch,
        accumulate,
        KINDS[out.dtype],
        out,
    )


def _launch_tiles(
    verb: str,
    source: str,
    kernel: str,
    variant: tuple[str, ...],
    num_sms: int | None,
    a: Any,
    b: Any,
    expert_offsets: Any,
    *arguments: Any,
) -> None:
    experts, gather = expert_offsets.size - 1, "GATHER=1" in variant
    configuration = tiles_configuration(verb, experts, multiprocessors(num_sms), gather=gather)
    launch(
        source,
        kernel,
        configuration.blocks,
        configuration.threads,
        a.data,
        b.data,
        *arguments,
        zeroed_counter(),
        shared=configuration.shared,
        defines=(f"A_FMT={FORMATS[a.fmt]}", f"B_FMT={FORMATS[b.fmt]}", *variant),
        boxes=BOXES,
    )
