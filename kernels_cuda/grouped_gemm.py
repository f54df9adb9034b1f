"""Launchers of grouped_gemm_wgmma.cu and grouped_gemm_wgrad_wgmma.cu, for FP8 on Hopper's tensor cores, and
of grouped_gemm.cu, for all else: the names and signatures of `fp8moe.reference.grouped_gemm`."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import numpy as np

from fp8moe.formats import BFLOAT16
from fp8moe.kernels_cuda import grouped_gemm_wgmma
from fp8moe.kernels_cuda.configuration import Configuration
from fp8moe.kernels_cuda.launch import (
    FORMATS,
    KINDS,
    current_architecture,
    launch,
    multiprocessors,
    threads,
)
from fp8moe.kernels_cuda.product import Product
from fp8moe.records import QuantTensor

# As in wgmma_pipeline.cuh.
TILE_COLUMNS = 256
THREADS = 384
CLUSTER = 2  # blocks that share what they read
BOXES = (64, TILE_COLUMNS // 2)  # rows of one copy, of each operand
STAGES = 3
SHARED_BYTES = STAGES * ((128 + TILE_COLUMNS) * (128 + 4) + 16) + 128 * 528 + 32  # codes, scales; a tile
TABLE_BYTES = 11 << 10  # what this leaves of a block's 227 KB for the experts' table


def tiles_configuration(experts: int, multiprocessors: int) -> Configuration:
    """Of the tensor cores' kernels: a persistent block a multiprocessor, whole clusters. The experts' table
    has two words for each, and for the end."""
    return Configuration(multiprocessors // CLUSTER * CLUSTER, THREADS, SHARED_BYTES + _table_bytes(experts))


def _table_bytes(experts: int) -> int:
    return 8 * (experts + 1)


def grouped_gemm(
    x: Any, w: Any, expert_offsets: Any, *, transpose_w: bool, backend: str | None, out: Any
) -> None:
    if backend == "cublas":
        _cublas().grouped_gemm(x, w, expert_offsets, transpose_w=transpose_w, out=out)
        return
    rows, width = out.shape
    quantized = isinstance(x, QuantTensor)
    strides = (0, 0)
    if quantized:
        ready = x.layout == "gemm_ready"
        strides = (1, x.scales.shape[1]) if ready else (x.scales.shape[1], 1)
    multiples = {"N": (width, 8), "K": (x.shape[1], 16)}
    if _by_wgmma(backend, quantized, x, w, out, expert_offsets, rows, multiples):
        experts = w.data.shape[0]
        _launch_tiles(
            "grouped_gemm_wgmma",
            "grouped_gemm_tiles",
            (),
            x,
            w,
            expert_offsets,
            x.scales,
            *strides,
            w.scales,
            expert_offsets,
            experts,
            rows,
            width,
            x.shape[1],
            out,
        )
        return
    if not quantized and _by_wgmma_16(backend, "grouped_gemm", x, w, out, expert_offsets, x.shape, width):
        grouped_gemm_wgmma.grouped_gemm(x, w, expert_offsets, transpose_w=transpose_w, out=out)
        return
    launch(
        "grouped_gemm",
        "grouped_gemm",
        (rows, threads(width, 128)),
        128,
        *((x.data, x.scales, *strides, FORMATS[x.fmt]) if quantized else (x, None, *strides, 0)),
        *((w.data, w.scales, FORMATS[w.fmt]) if quantized else (w, None, 0)),
        expert_offsets,
        expert_offsets.shape[0] - 1,
        rows,
        width,
        x.shape[1],
        quantized,
        0 if quantized else KINDS[x.dtype],
        transpose_w,
        KINDS[out.dtype],
        out,
    )


def grouped_gemm_wgrad(
    dy: Any, x: Any, expert_offsets: Any, *, accumulate: bool, backend: str | None, out: Any
) -> None:
    if backend == "cublas":
        _cublas().grouped_gemm_wgrad(dy, x, expert_offsets, accumulate=accumulate, out=out)
        return
    experts, width, depth = out.shape
    quantized = isinstance(dy, QuantTensor)
    rows, blocks = dy.shape[0], quantized and dy.transposed
    multiples = {"P": (rows, 16), "N": (width, 4), "K": (depth, 8)}
    known = min(dy.scales.shape[0], x.scales.shape[0]) if quantized else 0  # scales of columns
    if _by_wgmma(backend, quantized, dy, x, out, expert_offsets, rows, multiples):
        _launch_tiles(
            "grouped_gemm_wgrad_wgmma",
            "grouped_gemm_wgrad_tiles",
            (f"BLOCKS={int(blocks)}",),
            dy,
            x,
            expert_offsets,
            dy.data,
            x.data,
            dy.scales,
            x.scales,
            known,
            expert_offsets,
            experts,
            rows,
            width,
            depth,
            accumulate,
            KINDS[out.dtype],
            out,
        )
        return
    if not quantized and _by_wgmma_16(
        backend, "grouped_gemm_wgrad", dy, x, out, expert_offsets, (rows, depth), width
    ):
        grouped_gemm_wgmma.grouped_gemm_wgrad(dy, x, expert_offsets, accumulate=accumulate, out=out)
        return
    launch(
        "grouped_gemm",
        "grouped_gemm_wgrad",
        (experts * width, threads(depth, 128)),
        128,
        *((dy.data, dy.scales, FORMATS[dy.fmt]) if quantized else (dy, None, 0)),
        *((x.data, x.scales, FORMATS[x.fmt]) if quantized else (x, None, 0)),
        known,
        expert_offsets,
        rows,
        width,
        depth,
        quantized,
        blocks,
        0 if quantized else KINDS[dy.dtype],
        accumulate,
        KINDS[out.dtype],
        out,
    )


def _cublas() -> Any:
    return importlib.import_module("fp8moe.kernels_cuda.cublas")


def _by_wgmma_16(
    backend: str | None, verb: str, a: Any, b: Any, out: Any, offsets: Any, shape: tuple[int, int], width: int
) -> bool:
    if backend == "plain":
        return False
    names = (a.dtype.name, b.dtype.name)
    alignment = 16 if all(p.ptr % 16 == 0 for p in (a, b, out)) else 1
    product = Product(verb, names, out.dtype.name, offsets.shape[0] - 1, shape[0], width, shape[1], alignment)
    why = grouped_gemm_wgmma.takes(product, current_architecture())
    if why and backend == "wgmma":
        raise ValueError(f"backend: got 'wgmma' with {'; '.join(why)}; pass backend='cublas'")
    return not why


def _by_wgmma(
    backend: str | None,
    quantized: bool,
    a: Any,
    b: Any,
    out: Any,
    expert_offsets: Any,
    rows: int,
    multiples: dict[str, tuple[int, int]],
) -> bool:
    """Whether the tensor cores' kernel makes this product. That FP8 goes another way unasked is not passed
    over in silence: it is hundreds of times slower."""
    if backend == "plain" or not quantized or 0 in (a.data.size, b.data.size):
        return False
    why = []
    if (here := current_architecture()) != "sm_90a":
        why.append(f"the device is {here}, not sm_90a")
    why += [f"{name} is {n}, no multiple of {of}" for name, (n, of) in multiples.items() if n % of]
    if out.dtype not in (BFLOAT16, np.dtype(np.float32)):
        why.append(f"out is {out.dtype}, not float32 or bfloat16")
    if any(p.ptr % 16 for p in (a.data, a.scales, b.data, b.scales, out)):
        why.append("codes, scales or out do not begin at a multiple of 16 bytes")
    if _table_bytes(expert_offsets.size - 1) > TABLE_BYTES:
        why.append(f"{expert_offsets.size - 1} experts are too many")
    if expert_offsets.size * threads(rows, 128) * threads(out.shape[-1], TILE_COLUMNS) >= 2**30:
        why.append(f"{rows} rows are too many")  # the kernel counts tiles of every expert in 32 bits
    if not why:
        return True
    reason = f"FP8 operands that the tensor cores' kernel does not take: {'; '.join(why)}"
    if backend == "wgmma":
        raise ValueError(f"backend: got 'wgmma' with {reason}; pass backend='cublas'")
    warnings.warn(
        f"grouped_gemm: {reason}; a plain kernel, hundreds of times slower, multiplies them "
        "(backend='plain' says that this is meant; 'cublas' is faster, and looks at the offsets)",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def _launch_tiles(
    source: str, kernel: str, variant: tuple[str, ...], a: Any, b: Any, expert_offsets: Any, *arguments: Any
) -> None:
    configuration = tiles_configuration(expert_offsets.size - 1, multiprocessors())
    launch(
        source,
        kernel,
        configuration.blocks,
        configuration.threads,
        a.data,
        b.data,
        *arguments,
        shared=configuration.shared,
        defines=(f"A_FMT={FORMATS[a.fmt]}", f"B_FMT={FORMATS[b.fmt]}", *variant),
        boxes=BOXES,
    )
