"""Launchers of adamw.cu, with the names and signatures of `fp8moe.reference.adamw`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.kernels_cuda.quantize import part_configuration
from fp8moe.kernels_cuda.runtime.encodings import KIND_NAMES
from fp8moe.kernels_cuda.runtime.launch import launch, scratch
from fp8moe.records import Quantized

FACTORS = 8  # must match adamw.cu


def adamw(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    step: Any,
    settings: Any,
    *,
    parts: int,
    first: int,
    of: int,
    maximize: bool,
    out: Quantized,
) -> None:
    matrices, rows, columns = out.rowwise.data.shape
    arrays = param, grad, exp_avg, exp_avg_sq
    real, part = param.shape[1] // parts, rows // of
    if real == part:  # the parts follow each other in both
        first, real, part, parts = first * part, real * parts, part * parts, 1
    else:
        first *= part
    aligned = param.shape[2] % 8 == 0 and all(x.ptr % 16 == 0 for x in arrays)
    sides = [*filter(None, (out.rowwise, out.columnwise))]
    whole = real == part and part % 128 == 0 and param.shape[2] == columns and columns % 128 == 0
    whole = whole and aligned and all(side.data.ptr % 16 == 0 for side in sides)
    kinds = f"KIND={KIND_NAMES[param.dtype]}", f"STATE={KIND_NAMES[exp_avg.dtype]}"
    defines = (*kinds, f"WHOLE={int(whole)}")
    factors = scratch((FACTORS,), np.float32)
    launch("adamw", "adamw_factors", 1, 1, step, settings, factors, defines=defines)
    configuration = part_configuration(matrices, part, columns)
    for i in range(parts):
        launch(
            "adamw",
            "adamw",
            configuration.blocks,
            configuration.threads,
            *(x.part(i * real * param.shape[2], x.shape) for x in arrays),
            factors,
            -1.0 if maximize else 1.0,
            aligned,
            param.shape[1] * param.shape[2],
            param.shape[2],
            real,
            param.shape[2],
            first + i * part,
            0,
            part,
            columns,
            rows,
            columns,
            out.rowwise.data,
            out.rowwise.scales,
            *((None, None) if out.columnwise is None else (out.columnwise.data, out.columnwise.scales)),
            defines=defines,
        )
