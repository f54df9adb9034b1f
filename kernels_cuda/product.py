"""What a grouped product is, as far as the choice of its kernel depends on it."""

from __future__ import annotations

from typing import NamedTuple


class Product(NamedTuple):
    """A grouped product, as far as the choice of its kernel depends on it."""

    verb: str  # "grouped_gemm" or "grouped_gemm_wgrad"
    operands: tuple[str, str]  # of each operand: e4m3, e5m2, bfloat16, float16, float32 or float64
    out: str  # dtype's name
    experts: int
    rows: int
    width: int
    depth: int
    alignment: int = 16  # bytes, at most 16: all arrays begin at multiples of it
    transpose_w: bool = False  # grouped_gemm of plain arrays: w is [E, K, N]
    blocks: bool = False  # wgrad of FP8: one scale a (128, 128) block

    @property
    def quantized(self) -> bool:
        return self.operands[0] in ("e4m3", "e5m2")

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.width * self.depth
