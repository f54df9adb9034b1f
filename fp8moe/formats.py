"""The number formats: their bit fields and limits, and the scale dtype of each block."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

Block = tuple[int, int] | None

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8_DTYPES = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}


@dataclass(frozen=True)
class Format:
    """Bit fields of an FP8 format (arXiv 2209.05433): sign, exponent, mantissa. ``max``: largest value."""

    name: str
    mantissa_bits: int
    bias: int
    max: float
    nan: int = 0x7F  # the canonical NaN, which CUDA's conversions write for both formats

    @property
    def emax(self) -> int:
        """Exponent of the largest value (OCP MX calls it emax_elem): 8 for e4m3, 15 for e5m2."""
        return int(np.floor(np.log2(self.max)))


FORMATS = {
    "e4m3": Format("e4m3", mantissa_bits=3, bias=7, max=448.0),
    "e5m2": Format("e5m2", mantissa_bits=2, bias=15, max=57344.0),
}

# Scales are always normal float32 numbers: a GPU that flushes subnormals would turn smaller ones into zero.
MIN_SCALE_EXPONENT = -126

#: block -> (formats allowed for its codes, dtype of its scales). None: one scale for the whole tensor.
BLOCKS: dict[Block, tuple[tuple[str, ...], np.dtype]] = {
    (1, 128): (("e4m3", "e5m2"), np.dtype(np.float32)),
    (128, 1): (("e4m3", "e5m2"), np.dtype(np.float32)),
    (128, 128): (("e4m3", "e5m2"), np.dtype(np.float32)),
    (1, 32): (("e4m3", "e5m2"), np.dtype(np.uint8)),
    (32, 1): (("e4m3", "e5m2"), np.dtype(np.uint8)),
    (1, 16): (("e2m1",), np.dtype(np.uint8)),
    None: (("e4m3", "e5m2"), np.dtype(np.float32)),
}


#: layout of scales -> the blocks that support it; every block supports "compact"
LAYOUTS: dict[str, tuple[Block, ...]] = {
    "compact": tuple(BLOCKS),
    "gemm_ready": ((1, 128),),
    "blocked_128x4": ((1, 32), (32, 1)),
}
BLOCKED_128X4 = "blocked_128x4"

#: row-wise block -> the block of the transposed tensor
COLUMN_BLOCK: dict[Block, tuple[int, int]] = {(1, 128): (128, 1), (1, 32): (32, 1)}


def is_mx(block: Block) -> bool:
    """Whether it is an OCP MX block: 32 values that share one E8M0 exponent."""
    return block in ((1, 32), (32, 1))


def is_columnwise(block: Block) -> bool:
    """Whether the block extends along a column, in which case the codes are stored transposed."""
    return block in ((128, 1), (32, 1))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def scale_shape(
    shape: tuple[int, ...], block: Block, layout: str, transposed: bool = False
) -> tuple[int, ...]:
    """Shape of the scales of a tensor of logical shape ``shape`` ([M, K], or [E, N, K] for weights).

    ``transposed``: for (128, 128) blocks, whether the codes, and with them the scales, are stored transposed.
    """
    if block is None:
        return (1,)
    if layout == BLOCKED_128X4:
        return blocked_shape(shape, block, ceil_div(shape[0], 128))
    *lead, m, k = swapped(shape) if transposed else shape
    rows, cols = ceil_div(m, block[0]), ceil_div(k, block[1])
    if layout == "gemm_ready" and block[0] == 1:
        return (cols, round_up(m, 4))
    return (*lead, rows, cols)


def blocked_shape(shape: tuple[int, ...], block: Block, tiles: int) -> tuple[int, int]:
    """Shape of MXFP8 scales in the 128x4 blocked layout: the GEMM operand's rows by blocks along the
    contraction. ``tiles``: number of tiles of all experts, each of 128 rows of the logical [M, K]."""
    if is_columnwise(block):
        return round_up(shape[1], 128), 4 * tiles
    return 128 * tiles, round_up(ceil_div(shape[1], 32), 4)


def blocked_tiles(scales_shape: tuple[int, ...], block: Block) -> int:
    """The number of tiles, of 128 rows of the logical matrix each, in scales of this shape."""
    return scales_shape[1] // 4 if is_columnwise(block) else scales_shape[0] // 128


def swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with its last two dimensions exchanged."""
    return (*shape[:-2], shape[-1], shape[-2])


def data_shape(shape: tuple[int, ...], fmt: str, block: Block, transposed: bool = False) -> tuple[int, ...]:
    """Shape of the codes of a tensor of logical shape ``shape``."""
    if transposed or is_columnwise(block):
        return swapped(shape)
    return (*shape[:-1], shape[-1] // 2) if fmt == "e2m1" else tuple(shape)
