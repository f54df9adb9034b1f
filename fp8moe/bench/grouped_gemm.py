"""Grouped GEMM, in operations per second; with many small experts, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import fp8moe
from fp8moe.bench.harness import Case, Size, close, host, routing, tall
from fp8moe.formats import BFLOAT16

# (columns, contraction) of the forward product: experts of DeepSeek-V3 and Qwen3
FORWARD = [(4096, 7168), (7168, 2048), (6144, 7168), (7168, 3072)]
WGRAD = [(4096, 7168), (7168, 2048)]
DISTINCT_ROWS = 4096  # number of distinct random rows; they are repeated, which does not help a kernel


def cases(size: Size) -> Iterator[Case]:
    if size != "cuda":
        rows, n, k = (512, 256, 128) if size == "quick" else (2048, 1024, 512)
        yield forward(rows, n, 2 * k, 4)
        yield from gathered(rows // 2, n, 2 * k, 4, 2)
        for target in ("column", "block"):
            yield wgrad(rows, n, k, 4, target)
        for dgrad in (False, True):
            yield forward_bf16(rows, n, k, 4, dgrad=dgrad)
        yield wgrad_bf16(rows, n, k, 4)
        return
    for shape in FORWARD:
        yield forward(32_768, *shape, 8)
    yield forward(32_768, 7168, 2048, 256)
    yield from gathered(16_384, 1536, 2048, 128, 8)
    yield from gathered(8192, 3072, 4096, 32, 8)
    for target in ("column", "block"):
        for shape in WGRAD:
            yield wgrad(32_768, *shape, 8, target)
    for target in ("column", "block"):
        yield wgrad(32_768, *WGRAD[0], 8, target, accumulate=True)
    for dgrad in (False, True):
        for shape in WGRAD:
            yield forward_bf16(32_768, *shape, 8, dgrad=dgrad)
    for dtype in ("float32", "bfloat16"):
        for shape in WGRAD:
            yield wgrad_bf16(32_768, *shape, 8, dtype)
    yield wgrad_bf16(32_768, *WGRAD[0], 8, accumulate=True)


def forward(rows: int, n: int, k: int, groups: int) -> Case:
    x = fp8moe.quantize(tall(min(rows, DISTINCT_ROWS), k))
    w = fp8moe.quantize(tall(n, k, 1), block=(128, 128))
    last = fp8moe.dequantize(x)[-1].astype(np.float64) @ fp8moe.dequantize(w).astype(np.float64).T
    repeats = rows // len(x.data)
    nbytes = rows * (k + 4 * -(-k // 128) + 2 * n) + groups * n * k

    def prepare(xd: Any, xs: Any, wd: Any, ws: Any, offsets: Any) -> tuple[Any, ...]:
        x = fp8moe.QuantTensor(np.concatenate([xd] * repeats), np.concatenate([xs] * repeats))
        codes, scales = (a[None].repeat(groups, 0) for a in (wd, ws))
        return x, fp8moe.QuantTensor(codes, scales, block=(128, 128)), offsets

    return Case(
        "grouped_gemm fp8",
        f"{rows} x {n} x {k}, {groups} experts",
        (x.data, x.scales, w.data, w.scales, even(rows, groups)),
        fp8moe.grouped_gemm,
        # bfloat16 has 8 bits
        lambda y, *_: close(host(y[-1:])[0], last, 2.0**-8),
        nbytes=nbytes if groups > 100 else 0,
        flops=2 * rows * n * k,
        prepare=prepare,
    )


def gathered(tokens: int, n: int, k: int, experts: int, topk: int) -> list[Case]:
    """The first product of a layer from rows that are not permuted: gathered by the product, or permuted
    before it."""
    x = fp8moe.quantize(tall(min(tokens, DISTINCT_ROWS), k))
    w = fp8moe.quantize(tall(n, k, 1), block=(128, 128))
    ids = routing(tokens, experts, topk)
    token = int(np.argmax((ids == 0).any(axis=1))) % len(x.data)  # of the first row of expert 0
    first = fp8moe.dequantize(x)[token].astype(np.float64) @ fp8moe.dequantize(w).astype(np.float64).T

    def prepare(xd: Any, xs: Any, wd: Any, ws: Any, ids: Any) -> tuple[Any, ...]:
        codes, scales = (np.concatenate([a] * (tokens // len(a))) for a in (xd, xs))
        wd, ws = (a[None].repeat(experts, 0) for a in (wd, ws))
        w = fp8moe.QuantTensor(wd, ws, block=(128, 128))
        return fp8moe.QuantTensor(codes, scales), w, fp8moe.plan_topk(ids, experts, align_size=128)

    def in_two_steps(x: Any, w: Any, plan: Any) -> Any:
        rows = fp8moe.permute(x, plan).data
        return fp8moe.grouped_gemm(rows, w, plan.expert_offsets, plan.tokens_per_expert)

    return [
        Case(
            name,
            f"{tokens} tokens, {n} x {k}, {experts} experts top-{topk}",
            (x.data, x.scales, w.data, w.scales, ids),
            run,
            lambda y, *_: close(host(y[:1])[0], first, 2.0**-8),  # bfloat16 has 8 bits
            flops=2 * tokens * topk * n * k,
            prepare=prepare,
        )
        for name, run in (
            ("permute_gemm fp8", lambda *a: fp8moe.permute_gemm(*a).data),
            ("permute, grouped_gemm fp8", in_two_steps),
        )
    ]


def wgrad(rows: int, n: int, k: int, groups: int, target: str, accumulate: bool = False) -> Case:
    distinct = min(rows, DISTINCT_ROWS)
    repeats = rows // distinct
    first = rows // groups  # rows of the first expert within the distinct rows
    rowwise = [fp8moe.quantize(tall(distinct, columns, i)) for i, columns in enumerate((n, k))]
    dy, x = (fp8moe.scaling_aware_transpose(q, target=target) for q in rowwise)
    exact = [fp8moe.dequantize(q)[:first].astype(np.float64) for q in rowwise]
    product = exact[0][:, :4].T @ exact[1]
    row_axes = (1, 0, 1, 0) if target == "column" else (1, 1, 1, 1)  # axis of the rows in codes and scales

    def prepare(*arrays: Any) -> tuple[Any, ...]:
        *codes_and_scales, offsets = arrays
        a, b, c, d = (
            np.concatenate([v] * repeats, i) for v, i in zip(codes_and_scales, row_axes, strict=True)
        )
        options = {"block": (128, 1)} if target == "column" else {"block": (128, 128), "transposed": True}
        dy, x = fp8moe.QuantTensor(a, b, **options), fp8moe.QuantTensor(c, d, **options)
        if not accumulate:
            return dy, x, offsets
        return dy, x, offsets, fp8moe.grouped_gemm_wgrad(dy, x, offsets)

    def right(out: Any, *_: np.ndarray) -> bool:
        # float32 sums and the tensor cores' 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2); rounding
        # by the transpose is much smaller
        return close(host(out[0, :4]), product * (2 if accumulate else 1), 2.0**-11)

    return Case(
        "grouped_gemm_wgrad fp8"
        + (" blocks" if target == "block" else "")
        + (", accumulated" if accumulate else ""),
        f"{rows} x {n} x {k}, {groups} experts",
        (dy.data, dy.scales, x.data, x.scales, even(rows, groups)),
        fp8moe.grouped_gemm_wgrad,
        right,
        flops=2 * rows * n * k,
        prepare=prepare,
    )


def forward_bf16(rows: int, n: int, k: int, groups: int, *, dgrad: bool) -> Case:
    """dgrad: the product of the same layer with the weights' other dimension contracted."""
    w = tall(n, k, 1).astype(BFLOAT16)
    x = tall(min(rows, DISTINCT_ROWS), n if dgrad else k).astype(BFLOAT16)
    exact = w.astype(np.float64)
    last = x[-1].astype(np.float64) @ (exact if dgrad else exact.T)

    def prepare(x: Any, w: Any, offsets: Any) -> tuple[Any, ...]:
        return repeated(x, rows // len(x)), repeated(w[None], groups), offsets

    return Case(
        "grouped_gemm bfloat16" + (", dgrad" if dgrad else ""),
        f"{rows} x {n} x {k}, {groups} experts",
        (x, w, even(rows, groups)),
        partial(fp8moe.grouped_gemm, transpose_w=dgrad),
        # bfloat16 has 8 bits
        lambda y, *_: close(host(y[-1:])[0], last, 2.0**-8),
        flops=2 * rows * n * k,
        prepare=prepare,
    )


def wgrad_bf16(
    rows: int, n: int, k: int, groups: int, dtype: str = "float32", *, accumulate: bool = False
) -> Case:
    first = rows // groups  # rows of the first expert within the distinct rows
    dy, x = (tall(min(rows, DISTINCT_ROWS), columns, i).astype(BFLOAT16) for i, columns in enumerate((n, k)))
    product = dy[:first, :4].astype(np.float64).T @ x[:first].astype(np.float64)

    def prepare(dy: Any, x: Any, offsets: Any) -> tuple[Any, ...]:
        operands = *(repeated(a, rows // len(a)) for a in (dy, x)), offsets
        return (*operands, fp8moe.grouped_gemm_wgrad(*operands, dtype=dtype)) if accumulate else operands

    return Case(
        f"grouped_gemm_wgrad bfloat16, {dtype}" + (", accumulated" if accumulate else ""),
        f"{rows} x {n} x {k}, {groups} experts",
        (dy, x, even(rows, groups)),
        fp8moe.grouped_gemm_wgrad if accumulate else partial(fp8moe.grouped_gemm_wgrad, dtype=dtype),
        # one float32 rounding per row, or bfloat16's 8 bits
        lambda out, *_: close(
            host(out[0, :4]),
            product * (2 if accumulate else 1),
            2.0**-8 if dtype == "bfloat16" else first * 2.0**-23,
        ),
        flops=2 * rows * n * k,
        prepare=prepare,
    )


def repeated(rows: Any, times: int) -> Any:
    """The rows repeated; viewed as integers, which every array library can concatenate."""
    return np.concatenate([rows.view(np.int16)] * times).view(BFLOAT16)


def even(rows: int, groups: int) -> np.ndarray:
    return (np.arange(groups + 1) * (rows // groups)).astype(np.int32)
