"""One cuBLAS product per expert, with FP8 operands decoded to bfloat16 first: for devices without a tensor
core kernel, and for plain arrays. Reads the offsets on the host, which synchronises once per call."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from fp8moe.formats import BFLOAT16, is_columnwise
from fp8moe.kernels_cuda.quantize import dequantize
from fp8moe.kernels_cuda.runtime.encodings import KINDS
from fp8moe.kernels_cuda.runtime.launch import (
    copy_to_host,
    current_stream,
    fill_bytes,
    launch,
    scratch,
    threads,
)
from fp8moe.records import QuantTensor

TYPES = {BFLOAT16: 14, np.dtype(np.float16): 2, np.dtype(np.float32): 0}  # cudaDataType
COMPUTE_32F, DEFAULT_ALGORITHM = 68, -1
NONE, TRANSPOSED = 0, 1


class _Stream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, current_stream()


def library() -> Any:
    try:
        from cupy_backends.cuda.libs import cublas
    except ImportError as error:
        raise ImportError(
            f"backend='cublas' needs the cuBLAS library ({str(error).splitlines()[0]}); "
            "pip install 'cuda-toolkit[cublas]==13.*' (or ==12.* for a CUDA 12 driver)"
        ) from error
    return cublas


def grouped_gemm(x: Any, w: Any, expert_offsets: Any, *, bias: Any, transpose_w: bool, out: Any) -> None:
    """A bias is rounded to out's dtype before it is added: cuBLAS adds what is in out."""
    transpose_w = transpose_w or (isinstance(w, QuantTensor) and w.transposed)
    x, w = _plain(x, None), _plain(w, None)
    depth, (rows_of_all, width) = x.shape[1], out.shape
    if bias is None:
        fill_bytes(out, 0)
    else:
        sizes = expert_offsets.shape[0] - 1, rows_of_all, width, KINDS[out.dtype]
        launch(
            "grouped_gemm",
            "fill_rows",
            (rows_of_all, threads(width, 128)),
            128,
            bias,
            expert_offsets,
            *sizes,
            out,
        )
    operation, stride = (NONE, width) if transpose_w else (TRANSPOSED, depth)
    multiply = _multiplier(w, x, out)
    for e, first, rows in _experts(expert_offsets, rows_of_all):
        # cuBLAS is column-major: it computes the transpose, out.T = w[e] @ x.T
        multiply(
            *(operation, NONE, width, rows, depth, 0.0 if bias is None else 1.0),
            *(e * width * depth, stride),
            *(first * depth, depth),
            *(first * width, width),
        )


def grouped_gemm_wgrad(
    dy: Any, x: Any, expert_offsets: Any, *, accumulate: bool, pitch: int, out: Any
) -> None:
    dy, x = _plain(dy, expert_offsets), _plain(x, expert_offsets)
    width, depth = dy.shape[1], x.shape[1]
    if not accumulate:
        for e in range(expert_offsets.shape[0] - 1 if pitch != width else 1):
            fill_bytes(out.part(e * pitch * depth, (width, depth)) if pitch != width else out, 0)
    multiply = _multiplier(x, dy, out)
    for e, first, rows in _experts(expert_offsets, dy.shape[0]):
        operands = (first * depth, depth), (first * width, width)
        multiply(
            NONE, TRANSPOSED, depth, width, rows, 1.0, *operands[0], *operands[1], e * pitch * depth, depth
        )


def _plain(x: Any, expert_offsets: Any) -> Any:
    """A tensor dequantised to bfloat16, which is exact if scales are powers of two."""
    if not isinstance(x, QuantTensor):
        if x.dtype not in TYPES:
            raise TypeError(f"backend: got 'cublas' with {x.dtype.name}; wanted bfloat16, float16 or float32")
        return x
    out = scratch(x.shape, BFLOAT16)
    dequantize(x, expert_offsets=expert_offsets if is_columnwise(x.block) else None, out=out)
    return out


def _experts(offsets: Any, rows: int) -> list[tuple[int, int, int]]:
    """(expert, first row, number of rows) of the experts that have rows."""
    ends = np.clip(copy_to_host(offsets), 0, rows)
    sizes = np.diff(ends)
    return [(int(e), int(ends[e]), int(sizes[e])) for e in np.flatnonzero(sizes > 0)]


def _multiplier(a: Any, b: Any, out: Any) -> Any:
    """A function that launches one product: operations, sizes, beta, then offset (in elements) and stride of
    each matrix."""
    cublas = library()
    if out.dtype not in TYPES:
        names = "bfloat16, float16 or float32"
        raise TypeError(f"backend: got 'cublas' with out of {out.dtype.name}; wanted {names}")
    handle, one = cupy.cuda.device.get_cublas_handle(), np.array(1.0, np.float32)
    stream = cupy.cuda.Stream.from_external(_Stream())

    def multiply(op_a, op_b, m, n, k, beta, a_at, a_stride, b_at, b_stride, out_at, out_stride):  # type: ignore[no-untyped-def]
        scale = np.array(beta, np.float32)
        operands = (
            *(a.ptr + a_at * a.dtype.itemsize, TYPES[a.dtype], a_stride),
            *(b.ptr + b_at * b.dtype.itemsize, TYPES[b.dtype], b_stride),
        )
        result = out.ptr + out_at * out.dtype.itemsize, TYPES[out.dtype], out_stride
        mode = COMPUTE_32F, DEFAULT_ALGORITHM
        with stream:
            cublas.gemmEx(
                handle, op_a, op_b, m, n, k, one.ctypes.data, *operands, scale.ctypes.data, *result, *mode
            )

    return multiply
