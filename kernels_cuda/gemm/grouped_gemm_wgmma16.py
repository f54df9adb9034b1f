"""Launchers of grouped_gemm_wgmma16.cu and grouped_gemm_wgrad_wgmma16.cu, for bfloat16 and float16 on
Hopper's tensor cores, with the names and signatures of `fp8moe.reference.grouped_gemm`."""

from __future__ import annotations

from typing import Any

from fp8moe.kernels_cuda.gemm.product import Product
from fp8moe.kernels_cuda.runtime.configuration import Configuration
from fp8moe.kernels_cuda.runtime.encodings import KIND_NAMES, KINDS
from fp8moe.kernels_cuda.runtime.launch import launch, multiprocessors, threads, zeroed_counter

# Must match wgmma_tiles.cuh and wgmma16_pipeline.cuh.
TILE_ROWS, TILE_COLUMNS = 128, 256
THREADS = 384
CLUSTER = 2  # thread blocks that share operands by multicast
BOXES = (64, 64)  # rows of one TMA box, per operand
STAGE_BYTES = (TILE_ROWS + TILE_COLUMNS) * 128
PART_BYTES = 64 * 528  # of a staged output tile
TURNS = 4  # ring of scheduled tiles
BLOCK_BYTES = 227 << 10


def unsupported_reasons(product: Product, architecture: str) -> list[str]:
    """Reasons why these kernels do not support a product; empty if they do."""
    why = []
    if architecture != "sm_90a":
        why.append(f"the device is {architecture}, not sm_90a")
    if product.operands not in (("bfloat16", "bfloat16"), ("float16", "float16")):
        why.append(f"the operands are {' and '.join(product.operands)}, not both bfloat16 or both float16")
    wanted = (product.operands[0],) if product.verb == "grouped_gemm" else ("float32", "bfloat16")
    if product.out not in wanted:
        why.append(f"out is {product.out}, not {' or '.join(wanted)}")
    sizes = {"N": product.width, "K": product.depth}
    why += [f"{name} is {size}, no multiple of 8" for name, size in sizes.items() if size % 8]
    if 0 in (product.experts, product.rows, product.depth):
        why.append("an operand is empty")
    if product.alignment % 16:
        why.append("arrays do not begin at a multiple of 16 bytes")
    if tiles_configuration(product.verb, product.experts, 2).shared > BLOCK_BYTES:
        why.append(f"{product.experts} experts are too many")
    # the kernels count the tiles of all experts, and rows of weights, in 32 bits
    tiles = (product.experts + 1) * threads(product.rows, TILE_ROWS) * threads(product.width, TILE_COLUMNS)
    if max(tiles, product.experts * max(product.width, product.depth)) >= 2**30:
        why.append(f"{product.rows} rows of {product.experts} experts are too many")
    return why


def stages(verb: str, experts: int) -> int:
    """Pipeline stages: four with one staging buffer for both warpgroups, or three with two buffers: for
    wgrad, whose K may be short (1.02 to 1.03 times as fast with 1024 rows per expert), for add_product, which
    loads the addend into them, and if the experts' table leaves no room for four."""
    fit = 4 * STAGE_BYTES + PART_BYTES + _rest_bytes(4, experts) <= BLOCK_BYTES
    return 4 if fit and verb == "grouped_gemm" else 3


def tiles_configuration(verb: str, experts: int, multiprocessors: int) -> Configuration:
    """One persistent thread block per SM, rounded down to whole clusters. verb: of a `Product`, or
    "add_product"."""
    count = stages(verb, experts)
    buffers = 2 if count == 3 else 1
    shared = count * STAGE_BYTES + buffers * PART_BYTES + _rest_bytes(count, experts)
    shared += 8 * 2 * (verb == "add_product")  # barriers of the addend's parts
    return Configuration(multiprocessors // CLUSTER * CLUSTER, THREADS, shared)


def _rest_bytes(stages: int, experts: int) -> int:
    """Barriers (two per stage, part of a tile, and turn), a WorkTile per turn, and the experts' table: two
    words per expert and for the end."""
    return 8 * (2 * stages + 4 + 2 * TURNS) + 16 * TURNS + 8 * (experts + 1)


def grouped_gemm(
    x: Any, w: Any, expert_offsets: Any, *, bias: Any, transpose_w: bool, num_sms: int | None, out: Any
) -> None:
    _launch_tiles(x, w, expert_offsets, None, bias, transpose_w, num_sms, out)


def add_grouped_gemm(
    x: Any, w: Any, expert_offsets: Any, *, transpose_w: bool, num_sms: int | None, out: Any
) -> None:
    # a thread block reads the part of out that it writes, and no other reads it
    _launch_tiles(x, w, expert_offsets, out, None, transpose_w, num_sms, out)


def add_product(addend: Any, a: Any, b: Any, *, out: Any) -> None:
    _launch_tiles(a, b, None, addend, None, True, None, out)


def _launch_tiles(
    x: Any,
    w: Any,
    expert_offsets: Any,
    addend: Any,
    bias: Any,
    transpose_w: bool,
    num_sms: int | None,
    out: Any,
) -> None:
    """out = x @ w (+ addend or bias) of each expert, of one without offsets."""
    rows, width = out.shape
    experts = 1 if expert_offsets is None else expert_offsets.shape[0] - 1
    verb = "grouped_gemm" if addend is None else "add_product"
    variant = f"TRANSPOSED={int(transpose_w)}", *(() if addend is None else ("ADDEND=1",))
    operands = x, w, expert_offsets, experts, rows, width, x.shape[1], out, addend, bias
    _launch(verb, "grouped_gemm_wgmma16", "grouped_gemm_tiles_16", variant, experts, num_sms, *operands)


def grouped_gemm_wgrad(
    dy: Any, x: Any, expert_offsets: Any, *, accumulate: bool, pitch: int, num_sms: int | None, out: Any
) -> None:
    experts, width, depth = out.shape
    assert pitch == width  # parts of an array are written of FP8 operands alone
    _launch(
        "grouped_gemm_wgrad",
        "grouped_gemm_wgrad_wgmma16",
        "grouped_gemm_wgrad_tiles_16",
        (),
        experts,
        num_sms,
        dy,
        x,
        expert_offsets,
        experts,
        dy.shape[0],
        width,
        depth,
        accumulate,
        KINDS[out.dtype],
        out,
    )


def _launch(
    verb: str,
    source: str,
    kernel: str,
    variant: tuple[str, ...],
    experts: int,
    num_sms: int | None,
    *arguments: Any,
) -> None:
    configuration = tiles_configuration(verb, experts, multiprocessors(num_sms))
    launch(
        source,
        kernel,
        configuration.blocks,
        configuration.threads,
        *arguments,
        zeroed_counter(),
        shared=configuration.shared,
        defines=(f"KIND={KIND_NAMES[arguments[0].dtype]}", *variant, f"STAGES={stages(verb, experts)}"),
        boxes=BOXES,
    )
