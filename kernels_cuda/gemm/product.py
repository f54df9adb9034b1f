"""Description of a grouped product: all that `grouped_gemm.choose` depends on."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fp8moe.records import QuantTensor
from fp8moe.runtime.record_trees import arrays_in


class Product(NamedTuple):
    verb: str  # "grouped_gemm" or "grouped_gemm_wgrad"
    operands: tuple[str, str]  # FP8 formats, or dtypes
    out: str  # dtype
    experts: int
    rows: int  # P
    width: int  # N
    depth: int  # K
    alignment: int = 16  # bytes, at most 16, to which codes, scales and out are aligned
    transpose_w: bool = False  # plain arrays: w is [E, K, N]
    blocks: bool = False  # FP8 wgrad: one scale per (128, 128) block

    @property
    def quantized(self) -> bool:
        return self.operands[0] in ("e4m3", "e5m2")

    @property
    def flops(self) -> int:
        """Counts all rows of the operands, whether or not an expert has them, unless there are no experts."""
        return 2 * self.rows * self.width * self.depth if self.experts else 0


def product_of_grouped_gemm(
    x: Any, w: Any, expert_offsets: Any, bias: Any, transpose_w: bool, out: Any
) -> Product:
    rows, width = out.shape
    return Product(
        "grouped_gemm",
        (_format(x), _format(w)),
        out.dtype.name,
        expert_offsets.shape[0] - 1,
        rows,
        width,
        x.shape[1],
        _alignment(x, w, bias, out),
        transpose_w=transpose_w,
    )


def product_of_sum(addend: Any, a: Any, b: Any, out: Any) -> Product:
    (rows, depth), width = a.shape, b.shape[1]
    dtypes, alignment = (_format(a), _format(b)), _alignment(addend, a, b, out)
    sizes = {"experts": 1, "rows": rows, "width": width, "depth": depth}
    return Product("grouped_gemm", dtypes, out.dtype.name, **sizes, alignment=alignment, transpose_w=True)


def product_of_wgrad(dy: Any, x: Any, expert_offsets: Any, out: Any) -> Product:
    experts, width, depth = expert_offsets.shape[0] - 1, dy.shape[1], x.shape[1]
    blocks = isinstance(dy, QuantTensor) and dy.transposed
    read = (dy.data, x.data) if blocks else (dy, x)  # scalar loads of block scales need no alignment
    return Product(
        "grouped_gemm_wgrad",
        (_format(dy), _format(x)),
        out.dtype.name,
        experts,
        dy.shape[0],
        width,
        depth,
        _alignment(*read, out),
        blocks=blocks,
    )


def products_of_layer(
    operands: str,
    *,
    experts: int,
    hidden: int,
    columns: int,
    width: int,
    ffn: int,
    gradients: tuple[str, ...],
) -> list[Product]:
    """Grouped products of a layer's forward (`fp8moe.layer.recipes`) and of the backward for these
    gradients, for any number of rows.

    columns, width: zero-padded widths of the first product's result and of the activation; ffn: width of the
    activation without padding.
    """
    quantized = operands in ("e4m3", "e5m2")
    out, pair, rows = "bfloat16" if quantized else operands, (operands, operands), 128
    forward = Product("grouped_gemm", pair, out, experts, rows, columns, hidden)
    products = [forward, forward._replace(width=hidden, depth=width)]
    transposed = forward._replace(transpose_w=not quantized)
    if gradients:
        products.append(transposed._replace(width=width, depth=hidden))
    if "dx" in gradients or "dprobs" in gradients:
        products.append(transposed._replace(width=hidden, depth=columns))
    of_weights = Product(
        "grouped_gemm_wgrad",
        pair,
        "float64" if operands == "float64" else "float32",
        experts,
        rows,
        0,
        hidden,
    )
    if "dw2" in gradients:
        products.append(of_weights._replace(width=hidden, depth=ffn))
    if "dw13" in gradients:  # for one half, if padded with zeros
        products.append(of_weights._replace(width=columns if ffn == width else ffn))
    return products


def _format(x: Any) -> str:
    return x.fmt if isinstance(x, QuantTensor) else str(x.dtype.name)


def _alignment(*operands: Any) -> int:
    return math.gcd(16, *(a.ptr for x in operands for a in arrays_in(x)))
