"""Grouped GEMM: one matrix product an expert, over the rows that device-side offsets give it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fp8moe import checks
from fp8moe.dispatch import Call, enter, operation
from fp8moe.formats import BFLOAT16
from fp8moe.records import ArrayLike, ArraySpec, QuantTensor

BACKENDS = (None, "wgmma", "mma", "cublas", "plain")
#: those that read the offsets back, so that no CUDA graph holds them
SYNCHRONISING_BACKENDS = frozenset({"cublas"})


class _Scope(threading.local):
    backend: str | None = None
    num_sms: int | None = None


_scope = _Scope()


@contextmanager
def products_by(backend: str | None, num_sms: int | None = None) -> Iterator[None]:
    """Inside this context None means this backend, and this limit: what an operation that consists of several
    products is given (`moe_forward`), so that it has one name for all of them."""
    before = _scope.backend, _scope.num_sms
    _scope.backend, _scope.num_sms = backend, num_sms
    try:
        yield
    finally:
        _scope.backend, _scope.num_sms = before


def _backend_of(call: Call, backend: str | None) -> str | None:
    backend = _scope.backend if backend is None else backend
    checks.choice("backend", backend, BACKENDS)
    if backend is not None and call.device == "cpu":
        raise not_on_cpu("backend", backend)
    return backend


def _limit_of(call: Call, num_sms: int | None) -> int | None:
    limit = check_limit(_scope.num_sms if num_sms is None else num_sms)
    if limit is not None and call.device == "cpu":
        raise not_on_cpu("num_sms", limit)
    return limit


def check_limit(num_sms: int | None) -> int | None:
    """``num_sms``, as far as it does not depend on the device; raises as `grouped_gemm`."""
    if num_sms is None:
        return None
    limit = checks.integer("num_sms", num_sms, 2)
    if limit % 2:
        raise ValueError(f"num_sms: got {num_sms}; wanted an even number: multiprocessors work in pairs")
    return limit


def not_on_cpu(name: str, value: str | int) -> ValueError:
    return ValueError(f"{name}: got {value!r} for arrays on the CPU; wanted None, or arrays on CUDA")


@operation
def grouped_gemm(
    x: ArrayLike,
    w: ArrayLike,
    expert_offsets: ArrayLike,
    tokens_per_expert: ArrayLike | None = None,
    *,
    transpose_w: bool = False,
    backend: str | None = None,
    num_sms: int | None = None,
) -> Any:
    """Multiply each expert's rows by its weights: out[rows of e] = x[rows of e] @ w[e].T.

    Parameters
    ----------
    x : ArrayLike or QuantTensor, [P, K]
        Row-wise codes of block (1, 128), compact or gemm_ready; or an array of bfloat16, float16, float32 or
        float64.
    w : ArrayLike or QuantTensor, [E, N, K]
        Codes of block (128, 128), contracted along the last dimension of their data: the ``rowwise`` ones of
        `quantize_weights` for the forward, the ``columnwise`` ones for dgrad; or an array of x's dtype.
    expert_offsets : ArrayLike, int32, [E+1]
        On x's device; rows of expert e are offsets[e]:offsets[e+1].
    tokens_per_expert : ArrayLike or None, int32, [E]
        How many of each expert's rows are not padding; None: all. The rest must be zeros in x, and is zeros
        in the result (on CUDA NaN in columns whose weights are not finite). Where no more than 64 rows of an
        expert's last 128 are left, the FP8 kernel of "wgmma" multiplies only these: 1 to 2 % less time with a
        thousand rows an expert, 7 to 11 % with a few.
    transpose_w : bool
        Of arrays only: w is [E, K, N], and x is multiplied by w[e] itself (dgrad). Of FP8 weights the
        orientation says it.
    backend : str or None
        On CUDA only; None: the fastest that takes the product, as ``python -m fp8moe info`` lists them.
        "wgmma": Hopper's tensor cores (compute capability 9.0; N a multiple of 8, K of 16, memory that
        begins at multiples of 16 bytes). "mma": every tensor core from compute capability 8.0 on, by warps;
        bfloat16, float16 and FP8 of any shape, multiplied as FP8 on 8.9 and 12.x, else as float16, which
        every code is exactly. "cublas": on any device, an expert at a time by cuBLAS, FP8 decoded to bfloat16
        first (exact for power-of-two scales); it reads the offsets, which **synchronises once**, and wants
        bfloat16, float16 or float32. "plain": a simple kernel that takes everything, hundreds of times
        slower.
    num_sms : int or None
        On CUDA, of products by "wgmma": at most so many of the GPU's multiprocessors, an even number from 2
        to what it has; None: all. What another kernel holds needs no limit: tiles go to the multiprocessors
        that are free. The result does not depend on it.

    Returns
    -------
    ArrayLike, [P, N]
        bfloat16 for FP8, else x's dtype. Rows that no expert has are zeros.

    Raises
    ------
    TypeError
        For operands of different kinds or dtypes.
    ValueError
        For shapes that do not fit, or a backend that cannot multiply them. With None also for a product of
        more than 1 GFLOP that only the plain kernel takes: float32 and float64.

    Notes
    -----
    FP8: float32 accumulation, promoted every 128 of the contraction (DeepSeek-V3, arXiv 2412.19437, section
    3.3.2). With ``backend=None`` on compute capability 9.0, a RuntimeWarning says for a product of more than
    1 GFLOP why "wgmma" does not take it.

    Examples
    --------
    >>> x, w = np.ones((3, 2), np.float32), np.array([[[1.0, 1.0]], [[2.0, 3.0]]], np.float32)
    >>> fp8moe.grouped_gemm(x, w, np.array([0, 1, 3], np.int32))[:, 0].tolist()
    [2.0, 5.0, 5.0]
    """
    call = enter(x=x, w=w, expert_offsets=expert_offsets, tokens_per_expert=tokens_per_expert)
    a = call.args
    backend, num_sms = _backend_of(call, backend), _limit_of(call, num_sms)
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
    if a.tokens_per_expert is not None:
        checks.dtype("tokens_per_expert", a.tokens_per_expert, (np.dtype(np.int32),))
        checks.shape("tokens_per_expert", a.tokens_per_expert, (experts,))
    out = call.empty(ArraySpec((a.x.shape[0], width), BFLOAT16 if quantized else a.x.dtype))
    call.run(
        "grouped_gemm",
        "grouped_gemm",
        a.x,
        a.w,
        a.expert_offsets,
        a.tokens_per_expert,
        transpose_w=transpose_w,
        backend=backend,
        num_sms=num_sms,
        out=out,
    )
    return call.leave(out)


@operation
def grouped_gemm_wgrad(
    dy: ArrayLike,
    x: ArrayLike,
    expert_offsets: ArrayLike,
    out: ArrayLike | None = None,
    *,
    dtype: str = "float32",
    backend: str | None = None,
    num_sms: int | None = None,
) -> Any:
    """The weights' gradient: out[e] = dy[rows of e].T @ x[rows of e].

    Parameters
    ----------
    dy : ArrayLike or QuantTensor, [P, N]
        Column-wise codes: blocks (128, 1) that start anew with every expert (as `scaling_aware_transpose`
        makes them), or transposed (128, 128) blocks (as it makes them with target="block"), a fifth faster:
        every offset then is a multiple of 128. Or an array.
    x : ArrayLike or QuantTensor, [P, K]
        As ``dy``.
    expert_offsets : ArrayLike, int32, [E+1]
        Rows of expert e are offsets[e]:offsets[e+1].
    out : ArrayLike, float32 or bfloat16, [E, N, K], or None
        To add to, in place, and return; None: a new one of ``dtype``.
    dtype : "float32", "bfloat16" or "float64"
        Of a new result.
    backend : str or None
        As `grouped_gemm` takes it; "wgmma" wants P a multiple of 16, N of 4, K of 8, and float32 or bfloat16
        out. "mma" is slow for FP8 experts that begin at no multiple of 16 rows.
    num_sms : int or None
        As `grouped_gemm` takes it.

    Returns
    -------
    ArrayLike, [E, N, K]
        ``out``, or a new one. An expert without rows gives zeros.

    Raises
    ------
    TypeError
        For operands of different kinds or dtypes.
    ValueError
        For shapes that do not fit, or a backend that cannot multiply them. Offsets that ask for more blocks
        than there are scales, or begin inside a (128, 128) block, are refused on the CPU; on CUDA, where
        looking would synchronise, their products are NaN.

    Notes
    -----
    FP8 is accumulated as in `grouped_gemm`.

    Examples
    --------
    >>> dy, x = np.ones((3, 1), np.float32), np.array([[1.0], [2.0], [3.0]], np.float32)
    >>> fp8moe.grouped_gemm_wgrad(dy, x, np.array([0, 1, 3], np.int32)).ravel().tolist()
    [1.0, 5.0]
    """
    call = enter(dy=dy, x=x, expert_offsets=expert_offsets, out=out)
    a = call.args
    backend, num_sms = _backend_of(call, backend), _limit_of(call, num_sms)
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
        num_sms=num_sms,
        out=result,
    )
    return call.leave(result) if out is None else out
