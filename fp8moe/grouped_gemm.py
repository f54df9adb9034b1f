"""Grouped GEMM: one matrix product an expert, over the rows that device-side offsets give it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe import checks
from fp8moe.dispatch import Call, enter, operation
from fp8moe.formats import BFLOAT16
from fp8moe.records import ArraySpec, QuantTensor

BACKENDS = (None, "wgmma", "cublas", "plain")


def _check_backend(call: Call, backend: str | None) -> None:
    checks.choice("backend", backend, BACKENDS)
    if backend is not None and call.device == "cpu":
        raise ValueError(f"backend: got {backend!r} for arrays on the CPU; wanted None, or arrays on CUDA")


@operation
def grouped_gemm(
    x: Any, w: Any, expert_offsets: Any, *, transpose_w: bool = False, backend: str | None = None
) -> Any:
    """out[rows of e] = x[rows of e] @ w[e].T, for every expert e.

    x: row-wise `QuantTensor` [P, K], block (1, 128), compact or gemm_ready; or a plain array.
    w: `QuantTensor` of block (128, 128), contracted along the last dimension of its codes [E, N, K]: the
        ``rowwise`` one of `quantize_weights` for the forward, its ``columnwise`` one for dgrad; or a plain
        array [E, N, K] of x's dtype.
    expert_offsets: int32 [E+1] on x's device; rows of expert e are offsets[e]:offsets[e+1].
    transpose_w: plain arrays only: w is [E, K, N], and x is multiplied by w[e] itself (dgrad). Of FP8 weights
        the orientation says it.
    backend: on CUDA only. "wgmma": FP8 on Hopper's tensor cores, or a ValueError that says why not (compute
        capability 9.0; N a multiple of 8, K of 16). "plain": a simple kernel that takes everything, hundreds
        of times slower. None: the first if it can, else the second, with a RuntimeWarning for FP8. "cublas":
        on any device, an expert at a time by cuBLAS, FP8 decoded to bfloat16 first (exact for power-of-two
        scales); it reads the offsets, which **synchronises once**, and wants bfloat16, float16 or float32.

    FP8: float32 accumulation, promoted every 128 of the contraction; returns bfloat16 [P, N]. Plain
    arrays (bfloat16, float16, float32, float64) are the baseline: float32 accumulation, x's dtype out.
    Rows no expert has are zeros.
    """
    call = enter(x=x, w=w, expert_offsets=expert_offsets)
    a = call.args
    _check_backend(call, backend)
    transpose_w = checks.flag("transpose_w", transpose_w)
    quantized = isinstance(a.x, QuantTensor)
    if quantized:
        checks.quant_tensor("x", a.x, ((1, 128),), ("compact", "gemm_ready"))
        checks.quant_tensor("w", a.w, ((128, 128),))
    else:
        checks.dtype("x", a.x, checks.FLOATS)
        checks.dtype("w", a.w, (a.x.dtype,))
    if quantized and transpose_w:
        raise ValueError(
            "transpose_w: got True with FP8 weights; wanted it with plain arrays; pass the columnwise "
            "tensor of quantize(w, block=(128, 128), columnwise=True)"
        )
    checks.shape("x", a.x, ("P", "K"))
    contraction = a.x.shape[1]
    w = a.w.data if quantized else a.w
    checks.shape("w", w, ("E", contraction, "N") if transpose_w else ("E", "N", contraction))
    experts, width = w.shape[0], w.shape[2 if transpose_w else 1]
    checks.offsets(call, "expert_offsets", a.expert_offsets, experts=experts + 1)
    out = call.empty(ArraySpec((a.x.shape[0], width), BFLOAT16 if quantized else a.x.dtype))
    call.run(
        "grouped_gemm",
        "grouped_gemm",
        a.x,
        a.w,
        a.expert_offsets,
        transpose_w=transpose_w,
        backend=backend,
        out=out,
    )
    return call.leave(out)


@operation
def grouped_gemm_wgrad(
    dy: Any,
    x: Any,
    expert_offsets: Any,
    out: Any = None,
    *,
    dtype: str = "float32",
    backend: str | None = None,
) -> Any:
    """out[e] = dy[rows of e].T @ x[rows of e]: the weights' gradient [E, N, K].

    dy, x: column-wise `QuantTensor`, logical [P, N] and [P, K], blocks (128, 1) that start anew with every
        expert (as `scaling_aware_transpose` makes them), or transposed (128, 128) blocks (as it makes them
        with target="block"), a fifth faster: every offset then is a multiple of 128; or plain arrays of
        these shapes.
    out: float32 or bfloat16 [E, N, K] to add to, in place, and return; None: a new one of ``dtype``.
    backend: as `grouped_gemm` takes it; "wgmma" wants P a multiple of 16, N of 4, K of 8, and float32 or
        bfloat16 out.
    An expert without rows gives zeros. Offsets that ask for more blocks than there are scales are refused on
    the CPU; on CUDA, where looking would synchronise, their products are NaN.
    """
    call = enter(dy=dy, x=x, expert_offsets=expert_offsets, out=out)
    a = call.args
    _check_backend(call, backend)
    if isinstance(a.dy, QuantTensor):
        for name, q, blocks in (("dy", a.dy, ((128, 1), (128, 128))), ("x", a.x, (a.dy.block,))):
            if not checks.quant_tensor(name, q, blocks).columnwise:
                raise ValueError(
                    f"{name}.transposed: got False; wanted codes stored transposed; pass "
                    'fp8moe.scaling_aware_transpose(..., target="block")'
                )
    else:
        checks.dtype("dy", a.dy, checks.FLOATS)
        checks.dtype("x", a.x, (a.dy.dtype,))
    checks.shape("dy", a.dy, ("P", "N"))
    checks.shape("x", a.x, (a.dy.shape[0], "K"))
    width, depth = a.dy.shape[1], a.x.shape[1]
    height = 128 if isinstance(a.dy, QuantTensor) and a.dy.transposed else 1
    checks.offsets(call, "expert_offsets", a.expert_offsets, align_size=height, align="the block's rows")
    for name, q in (("dy", a.dy), ("x", a.x)):
        if isinstance(q, QuantTensor) and not q.transposed:
            checks.column_scales(call, name, q, a.expert_offsets)
    shape = (a.expert_offsets.shape[0] - 1, width, depth)
    if a.out is None:
        checks.choice("dtype", dtype, ("float32", "bfloat16", "float64"))
        result = call.empty(ArraySpec(shape, BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)))
    else:
        checks.dtype("out", a.out, checks.FLOATS)
        checks.shape("out", a.out, shape)
        checks.writable("out", a.out, dy=a.dy, x=a.x, expert_offsets=a.expert_offsets)
        result = a.out
    call.run(
        "grouped_gemm",
        "grouped_gemm_wgrad",
        a.dy,
        a.x,
        a.expert_offsets,
        accumulate=a.out is not None,
        backend=backend,
        out=result,
    )
    return call.leave(result) if out is None else out
