"""Grouped GEMM: one matrix product per expert, over the rows given by offsets in device memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.formats import BFLOAT16
from fp8moe.records import ArrayLike, ArraySpec, PermutationPlan, Permuted, Quantized, QuantTensor
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import Call, current, enter, operation

BACKENDS = (None, "wgmma", "mma", "cublas", "plain")
#: backends that copy the offsets to the host, and therefore cannot be captured in a CUDA graph
SYNCHRONISING_BACKENDS = frozenset({"cublas"})


def _backend_of(call: Call, backend: str | None) -> str | None:
    checks.choice("backend", backend, BACKENDS)
    if backend is not None and call.device == "cpu":
        raise not_on_cpu("backend", backend)
    return backend


def _limit_of(call: Call, num_sms: int | None) -> int | None:
    limit = check_limit(num_sms)
    if limit is not None and call.device == "cpu":
        raise not_on_cpu("num_sms", limit)
    return limit


def check_limit(num_sms: int | None, backend: str | None = None) -> int | None:
    """Check ``num_sms``, except for the limit of the device; raises as `grouped_gemm`. backend: the one that
    every product will have, where it is known; None: the fastest."""
    if num_sms is None:
        return None
    limit = checks.integer("num_sms", num_sms, 2)
    if backend not in (None, "wgmma"):
        raise ValueError(
            f"num_sms: got {num_sms} with backend={backend!r}, which cannot limit itself; wanted None, or "
            "backend='wgmma' or None"
        )
    if limit % 2:
        raise ValueError(f"num_sms: got {num_sms}; wanted an even number: multiprocessors work in pairs")
    return limit


def not_on_cpu(name: str, value: str | int) -> ValueError:
    return ValueError(f"{name}: got {value!r} for arrays on the CPU; wanted None, or arrays on CUDA")


def _check_counts(tokens_per_expert: Any, experts: int) -> None:
    if tokens_per_expert is not None:
        checks.dtype("tokens_per_expert", tokens_per_expert, (checks.INT32,))
        checks.shape("tokens_per_expert", tokens_per_expert, (experts,))


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
    """Multiply each expert's rows by the expert's weights: out[rows of e] = x[rows of e] @ w[e].T.

    Parameters
    ----------
    x : ArrayLike or QuantTensor, [P, K]
        Row-wise codes with block (1, 128), layout "compact" or "gemm_ready"; or an array of bfloat16,
        float16, float32 or float64.
    w : ArrayLike or QuantTensor, [E, N, K]
        Codes with block (128, 128), contracted along the last dimension of their data: ``rowwise`` of
        `quantize_weights` for the forward, ``columnwise`` for dgrad; or an array of x's dtype.
    expert_offsets : ArrayLike, int32, [E+1]
        On x's device. The rows of expert e are offsets[e]:offsets[e+1].
    tokens_per_expert : ArrayLike or None, int32, [E]
        Number of each expert's rows that are not padding; None: all. Padding rows must be zeros in x, and are
        zeros in the result (on CUDA NaN in columns whose weights are not finite). If at most 64 rows of an
        expert's last 128 are not padding, the FP8 kernel of "wgmma" multiplies only those 64: 1 to 2 % less
        time with a thousand rows per expert, 7 to 11 % with a few.
    transpose_w : bool
        For arrays only: w is [E, K, N], and out[rows of e] = x[rows of e] @ w[e] (dgrad). For FP8 weights,
        pass the tensor of the other orientation instead.
    backend : str or None
        On CUDA only. None: the fastest backend that supports the product; ``python -m fp8moe info`` lists
        them. "wgmma": Hopper's warpgroup MMA (compute capability 9.0; N a multiple of 8, K a multiple of 16,
        16-byte aligned memory). "mma": mma.sync, on compute capability 8.0 and later; bfloat16, float16 and
        FP8 of any shape. FP8 is multiplied as FP8 on 8.9 and 12.x, elsewhere as float16, which represents
        every code exactly. "cublas": on any device, one cuBLAS call per expert; FP8 is decoded to bfloat16
        first (exact for power-of-two scales). It reads the offsets, which **synchronises once**, and supports
        bfloat16, float16, float32 and FP8. "plain": a simple kernel that supports everything, hundreds of
        times slower.
    num_sms : int or None
        On CUDA, for products by "wgmma": the maximum number of the GPU's multiprocessors to use, an even
        number from 2 to all; None: all. A limit is not needed to run beside another kernel: tiles are
        scheduled on the multiprocessors that are free. The result does not depend on it.

    Returns
    -------
    ArrayLike, [P, N]
        bfloat16 for FP8, else x's dtype. Rows that belong to no expert are zeros.

    Raises
    ------
    TypeError
        For operands of different kinds or dtypes.
    ValueError
        For shapes that do not fit, or a backend that does not support the product. With ``backend=None`` also
        for float32 and float64 products of more than 1 GFLOP on CUDA, which no tensor core kernel supports.

    Notes
    -----
    FP8: tensor-core partial sums are promoted to float32 accumulators every 128 elements of the contraction
    (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). "wgmma" and "mma" multiply the two operands' scales before
    they multiply a partial sum by them: where that product is below 2^-126, precision is lost, and where it
    exceeds float32's range, sums of zero are NaN.

    With ``backend=None`` on compute capability 9.0, a product of more than 1 GFLOP that "wgmma" does not
    support emits a RuntimeWarning with the reason.

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
    quantized = isinstance(a.x, (QuantTensor, Quantized))  # of which `quant_tensor` names the one to pass
    if quantized:
        checks.quant_tensor("x", a.x, ((1, 128),), ("compact", "gemm_ready"))
        checks.quant_tensor("w", a.w, ((128, 128),), fix="pass fp8moe.quantize_weights(w).rowwise")
    else:
        checks.dtype("x", a.x, checks.FLOATS)
        fix = "pass x=fp8moe.quantize(x)" if isinstance(a.w, (QuantTensor, Quantized)) else ""
        checks.dtype("w", a.w, (a.x.dtype,), fix)
    if quantized and transpose_w:
        raise ValueError(
            "transpose_w: got True with FP8 weights; wanted it with plain arrays; pass the columnwise "
            "tensor of quantize(w, block=(128, 128), columnwise=True)"
        )
    checks.shape("x", a.x, ("P", "K"))
    contraction = a.x.shape[1]
    w = a.w.data if quantized else a.w
    fix = ""
    if not quantized and not transpose_w and len(w.shape) == 3 and w.shape[1] == contraction:
        fix = "pass transpose_w=True for w [E, K, N]"
    checks.shape("w", w, ("E", contraction, "N") if transpose_w else ("E", "N", contraction), fix)
    checks.offsets(call, "expert_offsets", a.expert_offsets, experts=w.shape[0] + 1)
    _check_counts(a.tokens_per_expert, w.shape[0])
    options: dict[str, Any] = {"transpose_w": transpose_w, "backend": backend, "num_sms": num_sms}
    return raw_grouped_gemm(a.x, a.w, a.expert_offsets, a.tokens_per_expert, **options)


def raw_grouped_gemm(
    x: Any,
    w: Any,
    expert_offsets: Any,
    tokens_per_expert: Any = None,
    *,
    bias: Any = None,
    transpose_w: bool = False,
    backend: str | None = None,
    num_sms: int | None = None,
) -> Any:
    """bias: [E, N], float32, or float64 if x is: added to the float32 (float64) sums of an expert's rows
    before they are rounded. Padding rows are then it, or zeros. By "cublas" it is first rounded to the
    result's dtype."""
    call, quantized = current.call, isinstance(x, QuantTensor)
    columns = (w.data if quantized else w).shape[2 if transpose_w else 1]
    out = call.empty(ArraySpec((x.shape[0], columns), BFLOAT16 if quantized else x.dtype))
    options = {"bias": bias, "transpose_w": transpose_w, "backend": backend, "num_sms": num_sms}
    call.run("grouped_gemm", "grouped_gemm", x, w, expert_offsets, tokens_per_expert, **options, out=out)
    return out


@operation
def add_grouped_gemm(
    out: ArrayLike,
    x: ArrayLike,
    w: ArrayLike,
    expert_offsets: ArrayLike,
    *,
    transpose_w: bool = False,
    num_sms: int | None = None,
) -> Any:
    """Add `grouped_gemm` of arrays to out, in place: out[rows of e] += x[rows of e] @ w[e].T.

    The sums are float32 (float64 for float64) and rounded once. On CUDA for compute capability 9.0 only, with
    bfloat16, N and K multiples of 8 and arrays that begin at a multiple of 16 bytes.

    Parameters
    ----------
    out : ArrayLike, floating point, [P, N]
        In x's dtype; zeros are written to rows that belong to no expert.
    x, w, expert_offsets, transpose_w, num_sms :
        As in `grouped_gemm`.

    Returns
    -------
    ArrayLike, [P, N]
        ``out``.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or shape, or on CUDA for a sum that the kernel does not take.
    """
    call = enter(out=out, x=x, w=w, expert_offsets=expert_offsets)
    a = call.args
    num_sms = _limit_of(call, num_sms)
    transpose_w = checks.flag("transpose_w", transpose_w)
    checks.dtype("x", a.x, checks.FLOATS)
    for name in ("w", "out"):
        checks.dtype(name, getattr(a, name), (a.x.dtype,))
    checks.shape("out", a.out, ("P", "N"))
    rows, width = a.out.shape
    checks.shape("x", a.x, (rows, "K"))
    depth = a.x.shape[1]
    checks.shape("w", a.w, ("E", depth, width) if transpose_w else ("E", width, depth))
    checks.offsets(call, "expert_offsets", a.expert_offsets, experts=a.w.shape[0] + 1)
    checks.writable("out", a.out, x=a.x, w=a.w, expert_offsets=a.expert_offsets)
    return raw_add_grouped_gemm(a.out, a.x, a.w, a.expert_offsets, transpose_w=transpose_w, num_sms=num_sms)


def raw_add_grouped_gemm(
    out: Any, x: Any, w: Any, expert_offsets: Any, *, transpose_w: bool = False, num_sms: int | None = None
) -> Any:
    options = {"transpose_w": transpose_w, "num_sms": num_sms}
    current.call.run("grouped_gemm", "add_grouped_gemm", x, w, expert_offsets, **options, out=out)
    return out


@operation
def permute_gemm(
    x: QuantTensor,
    w: QuantTensor,
    plan: PermutationPlan,
    probs: ArrayLike | None = None,
    *,
    backend: str | None = None,
    num_sms: int | None = None,
) -> Permuted:
    """Permute FP8 rows and multiply each expert's rows by its weights, without storing the permuted rows.

    Parameters
    ----------
    x : QuantTensor, [T, K]
        Row-wise codes with block (1, 128), layout "compact".
    w : QuantTensor, [E, N, K]
        As for `grouped_gemm`.
    plan : PermutationPlan
        A plan for the T tokens of ``x`` and E experts.
    probs : ArrayLike, floating point, [T, k] or [T, E], or None
        As for `permute`.
    backend : str or None
        As for `grouped_gemm`. Only "wgmma" gathers the rows inside the GEMM; the others permute them first.
    num_sms : int or None
        As for `grouped_gemm`.

    Returns
    -------
    Permuted
        data bfloat16 [num_out_tokens, N], the product; probs [num_out_tokens] or None, and the plan. Rows
        without a token are zeros.

    Raises
    ------
    TypeError, ValueError
        For operands that do not fit each other, and as for `permute` and `grouped_gemm`.

    Notes
    -----
    data is bitwise that of `grouped_gemm` for the result of `permute`. On an H200 the permutation adds 2 to 5
    % to the time of the GEMM; a `permute` before it adds 4 to 22 %, and its rows take K bytes each. SonicMoE
    (arXiv 2512.14080) gathers rows of bfloat16 in this way.

    Examples
    --------
    >>> x, w = np.ones((2, 128), np.float32), np.ones((2, 1, 128), np.float32) * [[[1.0]], [[2.0]]]
    >>> plan = fp8moe.plan_topk(np.array([[1], [0]], np.int32), 2)
    >>> q = fp8moe.quantize(x), fp8moe.quantize(w.astype(np.float32), block=(128, 128))
    >>> fp8moe.permute_gemm(*q, plan).data[:, 0].astype(float).tolist()
    [128.0, 256.0]
    """
    call = enter(x=x, w=w, plan=plan, probs=probs)
    a = call.args
    backend, num_sms = _backend_of(call, backend), _limit_of(call, num_sms)
    checks.plan(call, a.plan, fills=True)
    checks.quant_tensor("x", a.x, ((1, 128),))
    checks.quant_tensor("w", a.w, ((128, 128),))
    checks.shape("x.data", a.x.data, (a.plan.num_tokens, "K"))
    checks.shape("w.data", a.w.data, (a.plan.num_experts, "N", a.x.shape[1]))
    if a.probs is not None:
        checks.dtype("probs", a.probs, checks.FLOATS)
        checks.shape("probs", a.probs, (a.plan.num_tokens, a.plan.prob_columns))
    return raw_permute_gemm(a.x, a.w, a.plan, a.probs, backend=backend, num_sms=num_sms)


def raw_permute_gemm(
    x: QuantTensor,
    w: QuantTensor,
    plan: PermutationPlan,
    probs: Any = None,
    *,
    bias: Any = None,
    backend: str | None = None,
    num_sms: int | None = None,
) -> Permuted:
    """bias: as in `raw_grouped_gemm`."""
    call, rows = current.call, plan.num_out_tokens
    data = call.array((rows, w.data.shape[1]), BFLOAT16)
    out = Permuted(data, None if probs is None else call.array((rows,), probs.dtype), plan)
    options = {"bias": bias, "backend": backend, "num_sms": num_sms}
    call.run("grouped_gemm", "permute_gemm", x, w, plan, probs, **options, out=out)
    return out


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
    tokens_per_expert: ArrayLike | None = None,
) -> Any:
    """Weight gradient: out[e] = dy[rows of e].T @ x[rows of e].

    Parameters
    ----------
    dy : ArrayLike or QuantTensor, [P, N]
        Column-wise codes, as `scaling_aware_transpose` makes them: blocks (128, 1), which restart at each
        expert's first row, or with target="block" transposed (128, 128) blocks, which are 20 % faster and
        require every offset to be a multiple of 128. Or an array.
    x : ArrayLike or QuantTensor, [P, K]
        As ``dy``.
    expert_offsets : ArrayLike, int32, [E+1]
        The rows of expert e are offsets[e]:offsets[e+1].
    out : ArrayLike, floating point, [E, N, K], or None
        Accumulator: the gradient is added to it, and the sum is returned, in its memory. None: a new array of
        ``dtype``.
    dtype : "float32", "bfloat16" or "float64"
        Dtype of a new result.
    backend : str or None
        As for `grouped_gemm`. "wgmma" requires P to be a multiple of 16, N of 4 and K of 8, and a float32 or
        bfloat16 result. "mma" is slow for FP8 experts whose first row or number of rows is not a multiple of
        16.
    num_sms : int or None
        As for `grouped_gemm`.
    tokens_per_expert : ArrayLike or None, int32, [E]
        Number of each expert's rows that are not padding; None: all. Padding rows must be zeros. With (128,
        128) blocks, "wgmma" multiplies only the groups of 32 rows that have one of these rows: with a
        thousand rows per expert, this saves 4 % of the products.

    Returns
    -------
    ArrayLike, [E, N, K]
        ``out``, or a new array. The gradient of an expert without rows is zeros.

    Raises
    ------
    TypeError
        For operands of different kinds or dtypes.
    ValueError
        For shapes that do not fit, or a backend that does not support the product. On the CPU also for
        offsets that need more blocks than there are scales, or that start inside a (128, 128) block; on CUDA,
        where reading them would synchronise, such products are NaN instead.

    Notes
    -----
    FP8 products are accumulated as in `grouped_gemm`.

    Examples
    --------
    >>> dy, x = np.ones((3, 1), np.float32), np.array([[1.0], [2.0], [3.0]], np.float32)
    >>> fp8moe.grouped_gemm_wgrad(dy, x, np.array([0, 1, 3], np.int32)).ravel().tolist()
    [1.0, 5.0]
    """
    call = enter(dy=dy, x=x, expert_offsets=expert_offsets, out=out, tokens_per_expert=tokens_per_expert)
    a = call.args
    backend, num_sms = _backend_of(call, backend), _limit_of(call, num_sms)
    if isinstance(a.dy, (QuantTensor, Quantized)):
        blocks: tuple[Any, ...] = (128, 1), (128, 128)
        for name in ("dy", "x"):
            fix = f"pass fp8moe.scaling_aware_transpose({name}, expert_offsets)"
            q = checks.quant_tensor(name, getattr(a, name), blocks, fix=fix)
            if not q.columnwise:
                raise ValueError(
                    f"{name}.transposed: got False; wanted codes stored transposed; pass "
                    'fp8moe.scaling_aware_transpose(..., target="block")'
                )
            blocks = (q.block,)
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
    _check_counts(a.tokens_per_expert, shape[0])
    checks.choice("dtype", dtype, ("float32", "bfloat16", "float64"))
    if a.out is not None:
        checks.dtype("out", a.out, checks.FLOATS)
        checks.shape("out", a.out, shape)
        read = {"dy": a.dy, "x": a.x, "expert_offsets": a.expert_offsets}
        checks.writable("out", a.out, **read, tokens_per_expert=a.tokens_per_expert)
    options: dict[str, Any] = {"dtype": dtype, "backend": backend, "num_sms": num_sms}
    counts = a.tokens_per_expert
    return raw_grouped_gemm_wgrad(a.dy, a.x, a.expert_offsets, a.out, tokens_per_expert=counts, **options)


def raw_grouped_gemm_wgrad(
    dy: Any,
    x: Any,
    expert_offsets: Any,
    out: Any = None,
    *,
    dtype: str = "float32",
    backend: str | None = None,
    num_sms: int | None = None,
    tokens_per_expert: Any = None,
) -> Any:
    return raw_grouped_gemm_wgrad_of_parts(
        [dy],
        x,
        expert_offsets,
        out,
        dtype=dtype,
        backend=backend,
        num_sms=num_sms,
        tokens_per_expert=tokens_per_expert,
    )


def raw_grouped_gemm_wgrad_of_parts(
    parts: list[Any],
    x: Any,
    expert_offsets: Any,
    out: Any = None,
    *,
    dtype: str,
    tokens_per_expert: Any,
    **gemm: Any,
) -> Any:
    """The gradients of several dy of equal widths, FP8 if there are several, one after the other in each
    expert's rows of out."""
    call, accumulate, width = current.call, out is not None, parts[0].shape[1]
    if out is None:
        shape = expert_offsets.shape[0] - 1, len(parts) * width, x.shape[1]
        out = call.empty(ArraySpec(shape, BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)))
    for i, dy in enumerate(parts):
        options = {"accumulate": accumulate, "first": i * width, **gemm}
        arguments = dy, x, expert_offsets, tokens_per_expert
        call.run("grouped_gemm", "grouped_gemm_wgrad", *arguments, **options, out=out)
    return out
