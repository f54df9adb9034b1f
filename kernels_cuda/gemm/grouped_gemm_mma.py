"""Launchers of grouped_gemm_mma.cu and grouped_gemm_wgrad_mma.cu: bfloat16, float16 and FP8 on every tensor
core from sm_80 on."""

from __future__ import annotations

from typing import Any

from fp8moe.kernels_cuda.gemm.product import Product, product_of_grouped_gemm, product_of_wgrad
from fp8moe.kernels_cuda.runtime.configuration import Configuration
from fp8moe.kernels_cuda.runtime.encodings import FORMATS, KIND_NAMES, KINDS
from fp8moe.kernels_cuda.runtime.launch import current_architecture, launch, threads
from fp8moe.records import QuantTensor

# Must match mma_pipeline.cuh.
ROWS = 128
LINE = 128  # bytes
STAGES = 3
WARP_ROWS = 64
MOST_BLOCKS = 2**31 - 1


def unsupported_reasons(product: Product, architecture: str) -> list[str]:
    """Reasons why these kernels do not support a product; empty if they do."""
    why = []
    if not product.quantized and product.operands[0] not in ("bfloat16", "float16"):
        why.append(f"the operands are {product.operands[0]}, not bfloat16, float16 or FP8")
    if _number(architecture) < 80:
        why.append(f"the device is {architecture}, not sm_80 or later")
    contraction = product.depth if product.verb == "grouped_gemm" else product.rows
    if contraction >= 2**30:
        why.append(f"the contraction, {contraction}, is too long")
    if not why and configuration(product, architecture).blocks > MOST_BLOCKS:  # type: ignore[operator]
        why.append(f"{product.rows} rows are too many")
    return why


def tile_columns(product: Product, architecture: str) -> int:
    """Columns of an output tile."""
    narrow = _has_little_shared_memory(architecture) or _warp_columns(product, architecture) == 32
    return 128 if narrow else 256


def configuration(product: Product, architecture: str) -> Configuration:
    """One thread block per tile. Rows per expert are known on the device only: the forward launches as many
    blocks as there can be tiles."""
    columns = tile_columns(product, architecture)
    warps = ROWS // WARP_ROWS * (columns // _warp_columns(product, architecture))
    if product.verb == "grouped_gemm":
        blocks = (threads(product.rows, ROWS) + product.experts) * threads(product.width, columns)
    else:
        blocks = product.experts * threads(product.width, ROWS) * threads(product.depth, columns)
    return Configuration(blocks, 32 * warps, STAGES * (ROWS + columns) * LINE)


def _warp_columns(product: Product, architecture: str) -> int:
    """64; fewer if a warp has two sets of sums, of FP8 products and of all their K-steps."""
    of_columns = product.verb == "grouped_gemm_wgrad" and not product.blocks
    one_set = _number(architecture) >= 90 and not _has_little_shared_memory(architecture) and not of_columns
    return 64 if one_set or not product.quantized else 32


def _number(architecture: str) -> int:
    return int("".join(filter(str.isdigit, architecture)))


def _has_little_shared_memory(architecture: str) -> bool:
    """99 KB per thread block instead of 163 or 227."""
    return (number := _number(architecture)) in (86, 89) or number >= 120


def grouped_gemm(x: Any, w: Any, expert_offsets: Any, *, bias: Any, transpose_w: bool, out: Any) -> None:
    product = product_of_grouped_gemm(x, w, expert_offsets, bias, transpose_w, out)
    if isinstance(x, QuantTensor):
        defines = _formats(x, w)
        strides = (1, x.scales.shape[1]) if x.layout == "gemm_ready" else (x.scales.shape[1], 1)
        operands: tuple[Any, ...] = x.data, x.scales, *strides, w.data, w.scales
    else:
        defines = f"KIND={KIND_NAMES[x.dtype]}", f"TRANSPOSED={int(transpose_w)}"
        operands = x, None, 0, 0, w, None
    here = configuration(product, current_architecture())
    launch(
        "grouped_gemm_mma",
        "grouped_gemm_mma",
        *here.grid,
        *operands,
        expert_offsets,
        product.experts,
        product.rows,
        product.width,
        product.depth,
        out,
        bias,
        shared=here.shared,
        defines=defines,
    )


def grouped_gemm_wgrad(
    dy: Any, x: Any, expert_offsets: Any, *, accumulate: bool, pitch: int, out: Any
) -> None:
    product = product_of_wgrad(dy, x, expert_offsets, out)
    if isinstance(dy, QuantTensor):
        defines: tuple[str, ...] = *_formats(dy, x), f"BLOCKS={int(product.blocks)}"
        known = min(dy.scales.shape[0], x.scales.shape[0])
        operands: tuple[Any, ...] = dy.data, dy.scales, x.data, x.scales, known
    else:
        defines = (f"KIND={KIND_NAMES[x.dtype]}",)
        operands = dy, None, x, None, 0
    here = configuration(product, current_architecture())
    launch(
        "grouped_gemm_wgrad_mma",
        "grouped_gemm_wgrad_mma",
        *here.grid,
        *operands,
        expert_offsets,
        product.experts,
        product.rows,
        product.width,
        product.depth,
        pitch,
        accumulate,
        KINDS[out.dtype],
        out,
        shared=here.shared,
        defines=defines,
    )


def _formats(a: QuantTensor, b: QuantTensor) -> tuple[str, str]:
    return f"A_FMT={FORMATS[a.fmt]}", f"B_FMT={FORMATS[b.fmt]}"
