"""Launchers of grouped_gemm.cu: the same names and signatures as `fp8moe.reference.grouped_gemm`."""

from __future__ import annotations

from typing import Any

from fp8moe.kernels_cuda.launch import FORMATS, KINDS, launch, threads
from fp8moe.records import QuantTensor


def grouped_gemm(x: Any, w: Any, expert_offsets: Any, *, transpose_w: bool, out: Any) -> None:
    rows, width = out.shape
    quantized = isinstance(x, QuantTensor)
    strides = (0, 0)
    if quantized:
        ready = x.layout == "gemm_ready"
        strides = (1, x.scales.shape[1]) if ready else (x.scales.shape[1], 1)
    launch(
        "grouped_gemm",
        "grouped_gemm",
        (rows, threads(width, 128)),
        128,
        *((x.data, x.scales, *strides, FORMATS[x.fmt]) if quantized else (x, None, *strides, 0)),
        *((w.data, w.scales, FORMATS[w.fmt]) if quantized else (w, None, 0)),
        expert_offsets,
        w.shape[0],
        rows,
        width,
        x.shape[1],
        quantized,
        0 if quantized else KINDS[x.dtype],
        transpose_w,
        KINDS[out.dtype],
        out,
    )


def grouped_gemm_wgrad(dy: Any, x: Any, expert_offsets: Any, *, accumulate: bool, out: Any) -> None:
    experts, width, depth = out.shape
    quantized = isinstance(dy, QuantTensor)
    launch(
        "grouped_gemm",
        "grouped_gemm_wgrad",
        (experts * width, threads(depth, 128)),
        128,
        *((dy.data, dy.scales, FORMATS[dy.fmt]) if quantized else (dy, None, 0)),
        *((x.data, x.scales, FORMATS[x.fmt]) if quantized else (x, None, 0)),
        expert_offsets,
        dy.shape[0],
        width,
        depth,
        quantized,
        0 if quantized else KINDS[dy.dtype],
        accumulate,
        KINDS[out.dtype],
        out,
    )
