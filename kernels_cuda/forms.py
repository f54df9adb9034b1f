"""Launchers of forms.cu, with the names and signatures of `fp8moe.reference.forms`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.formats import BFLOAT16, swapped
from fp8moe.kernels_cuda.quantize import part_configuration
from fp8moe.kernels_cuda.runtime.launch import launch
from fp8moe.records import Quantized

SCALE_KINDS = {np.dtype(np.float32): 0, BFLOAT16: 1, np.dtype(np.uint8): 2}  # of forms.cu


def place_tiles(
    codes: Any,
    scales: Any,
    *,
    strides: tuple[int, int, int, int],
    source: tuple[int, int, int, int],
    target: tuple[int, int, int, int, int],
    out: Quantized,
) -> None:
    matrices, height, width = codes.shape
    row, column, rows, columns = source
    start, *steps = strides
    arguments = (
        *(codes.part(row * width + column, (1,)), height * width, width),
        *(scales.part(start, (1,)), SCALE_KINDS[scales.dtype], *steps),
        *(rows, columns),
    )
    _launch("place_tiles", matrices, arguments, target, out)


def place_mxfp4(
    nibbles: Any,
    scales: Any,
    *,
    source: tuple[int, int, int],
    target: tuple[int, int, int, int, int],
    rounded: Any,
    out: Quantized,
) -> None:
    matrices, height, width = nibbles.shape
    first, step, rows = source
    blocks = scales.shape[2]
    arguments = (
        *(nibbles.part(first * width, (1,)), height * width, step * width),
        *(scales.part(first * blocks, (1,)), height * blocks, step * blocks),
        *(rows, 2 * width, rounded),
    )
    _launch("place_mxfp4", matrices, arguments, target, out)


def _launch(
    kernel: str, matrices: int, source: tuple[Any, ...], target: tuple[int, ...], out: Quantized
) -> None:
    sides = [(None, None) if q is None else (q.data, q.scales) for q in (out.rowwise, out.columnwise)]
    sizes = swapped(out.columnwise.data.shape) if out.rowwise is None else out.rowwise.data.shape
    configuration = part_configuration(matrices, *target[3:])
    arguments = *source, *target, *sizes[1:], *sides[0], *sides[1]
    launch("forms", kernel, configuration.blocks, configuration.threads, *arguments)
