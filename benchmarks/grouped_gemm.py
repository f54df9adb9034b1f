"""Grouped GEMM, in multiply-adds a second; with many small experts, in bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import fp8moe
from fp8moe.benchmarks.harness import Case, close, host, tall
from fp8moe.formats import BFLOAT16

# columns, contraction of the forward product: DeepSeek-V3's and Qwen3's experts
FORWARD = [(4096, 7168), (7168, 2048), (6144, 7168), (7168, 3072)]
WGRAD = [(4096, 7168), (7168, 2048)]
DRAWN = 4096  # rows that are drawn; they come again past the last, which no kernel can use


def cases(quick: bool) -> list[Case]:
    if quick:
        return [
            forward(512, 256, 256, 4),
            *(wgrad(512, 256, 128, 4, t) for t in ("column", "block")),
            *(forward_bf16(512, 256, 128, 4, dgrad=dgrad) for dgrad in (False, True)),
            wgrad_bf16(512, 256, 128, 4),
        ]
    return [
        *(forward(32_768, *shape, 8) for shape in FORWARD),
        forward(32_768, 7168, 2048, 256),
        *(wgrad(32_768, *shape, 8, target) for target in ("column", "block") for shape in WGRAD),
        wgrad(32_768, *WGRAD[0], 8, "column", accumulate=True),
        wgrad(32_768, *WGRAD[0], 8, "block", accumulate=True),
        *(forward_bf16(32_768, *shape, 8, dgrad=dgrad) for dgrad in (False, True) for shape in WGRAD),
        *(wgrad_bf16(32_768, *shape, 8, dtype) for dtype in ("float32", "bfloat16") for shape in WGRAD),
        wgrad_bf16(32_768, *WGRAD[0], 8, accumulate=True),
    ]


def forward(rows: int, width: int, depth: int, groups: int) -> Case:
    x = fp8moe.quantize(tall(min(rows, DRAWN), depth))
    w = fp8moe.quantize(tall(width, depth, 1), block=(128, 128))
    last = fp8moe.dequantize(x)[-1].astype(np.float64) @ fp8moe.dequantize(w).astype(np.float64).T
    again = rows // len(x.data)
    nbytes = rows * (depth + 4 * -(-depth // 128) + 2 * width) + groups * width * depth

    def prepare(xd: Any, xs: Any, wd: Any, ws: Any, offsets: Any) -> tuple[Any, ...]:
        x = fp8moe.QuantTensor(np.concatenate([xd] * again), np.concatenate([xs] * again))
        codes, scales = (a[None].repeat(groups, 0) for a in (wd, ws))
        return x, fp8moe.QuantTensor(codes, scales, block=(128, 128)), offsets

    return Case(
        "grouped_gemm fp8",
        f"{rows} x {width} x {depth}, {groups} experts",
        (x.data, x.scales, w.data, w.scales, even(rows, groups)),
        fp8moe.grouped_gemm,
        # bfloat16 has 8 bits
        lambda y, *_: close(host(y[-1:])[0], last, 2.0**-8),
        nbytes=nbytes if groups > 100 else 0,
        flops=2 * rows * width * depth,
        prepare=prepare,
    )


def wgrad(rows: int, width: int, depth: int, groups: int, target: str, accumulate: bool = False) -> Case:
    drawn = min(rows, DRAWN)
    again = rows // drawn
    first = rows // groups  # rows of the first expert, among those that are drawn
    rowwise = [fp8moe.quantize(tall(drawn, n, i)) for i, n in enumerate((width, depth))]
    dy, x = (fp8moe.scaling_aware_transpose(q, target=target) for q in rowwise)
    wide = [fp8moe.dequantize(q)[:first].astype(np.float64) for q in rowwise]
    product = wide[0][:, :4].T @ wide[1]
    along = (1, 0, 1, 0) if target == "column" else (1, 1, 1, 1)  # rows lie, in codes and scales

    def prepare(*arrays: Any) -> tuple[Any, ...]:
        *codes_and_scales, offsets = arrays
        a, b, c, d = (np.concatenate([v] * again, i) for v, i in zip(codes_and_scales, along, strict=True))
        kind = {"block": (128, 1)} if target == "column" else {"block": (128, 128), "transposed": True}
        dy, x = fp8moe.QuantTensor(a, b, **kind), fp8moe.QuantTensor(c, d, **kind)
        if not accumulate:
            return dy, x, offsets
        return dy, x, offsets, fp8moe.grouped_gemm_wgrad(dy, x, offsets)

    def right(out: Any, *_: np.ndarray) -> bool:
        # sums of float32 and the tensor cores' 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2), and
        # what the transpose rounds, which is far less
        return close(host(out[0, :4]), product * (2 if accumulate else 1), 2.0**-11)

    return Case(
        "grouped_gemm_wgrad fp8"
        + (" blocks" if target == "block" else "")
        + (", added" if accumulate else ""),
        f"{rows} x {width} x {depth}, {groups} experts",
        (dy.data, dy.scales, x.data, x.scales, even(rows, groups)),
        fp8moe.grouped_gemm_wgrad,
        right,
        flops=2 * rows * width * depth,
        prepare=prepare,
    )


def forward_bf16(rows: int, width: int, depth: int, groups: int, *, dgrad: bool) -> Case:
    """dgrad: of the same layer, so with the weights' other dimension contracted."""
    w = tall(width, depth, 1).astype(BFLOAT16)
    x = tall(min(rows, DRAWN), width if dgrad else depth).astype(BFLOAT16)
    wide = w.astype(np.float64)
    last = x[-1].astype(np.float64) @ (wide if dgrad else wide.T)

    def prepare(x: Any, w: Any, offsets: Any) -> tuple[Any, ...]:
        return repeated(x, rows // len(x)), repeated(w[None], groups), offsets

    return Case(
        "grouped_gemm bfloat16" + (", dgrad" if dgrad else ""),
        f"{rows} x {width} x {depth}, {groups} experts",
        (x, w, even(rows, groups)),
        partial(fp8moe.grouped_gemm, transpose_w=dgrad),
        # bfloat16 has 8 bits
        lambda y, *_: close(host(y[-1:])[0], last, 2.0**-8),
        flops=2 * rows * width * depth,
        prepare=prepare,
    )


def wgrad_bf16(
    rows: int, width: int, depth: int, groups: int, dtype: str = "float32", *, accumulate: bool = False
) -> Case:
    first = rows // groups  # rows of the first expert, among those that are drawn
    dy, x = (tall(min(rows, DRAWN), n, i).astype(BFLOAT16) for i, n in enumerate((width, depth)))
    product = dy[:first, :4].astype(np.float64).T @ x[:first].astype(np.float64)

    def prepare(dy: Any, x: Any, offsets: Any) -> tuple[Any, ...]:
        operands = *(repeated(a, rows // len(a)) for a in (dy, x)), offsets
        return (*operands, fp8moe.grouped_gemm_wgrad(*operands, dtype=dtype)) if accumulate else operands

    return Case(
        f"grouped_gemm_wgrad bfloat16, {dtype}" + (", added" if accumulate else ""),
        f"{rows} x {width} x {depth}, {groups} experts",
        (dy, x, even(rows, groups)),
        fp8moe.grouped_gemm_wgrad if accumulate else partial(fp8moe.grouped_gemm_wgrad, dtype=dtype),
        # as many roundings in float32 as rows, or bfloat16's 8 bits
        lambda out, *_: close(
            host(out[0, :4]),
            product * (2 if accumulate else 1),
            2.0**-8 if dtype == "bfloat16" else first * 2.0**-23,
        ),
        flops=2 * rows * width * depth,
        prepare=prepare,
    )


def repeated(drawn: Any, times: int) -> Any:
    """The rows that were drawn again and again; as integers, which every array library concatenates."""
    return np.concatenate([drawn.view(np.int16)] * times).view(BFLOAT16)


def even(rows: int, groups: int) -> np.ndarray:
    return (np.arange(groups + 1) * (rows // groups)).astype(np.int32)
