"""Weights in (128, 128) blocks, as other libraries lay them out: transposed, or gates and ups apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fp8moe.records import Quantized, QuantTensor

WIDTH = 128  # of a block: what FP8 weights' ffn width must be a multiple of


def transpose_weights(q: Quantized) -> Quantized:
    """Of what `quantize_weights` made of [E, K, N] what it makes of the transposed weights [E, N, K].

    A block's codes and scale do not depend on its orientation, and both are there: they change places, and
    nothing is copied.

    >>> q = fp8moe.quantize_weights(np.ones((2, 128, 256), np.float32))
    >>> transpose_weights(q).rowwise.data is q.columnwise.data, transpose_weights(q).rowwise.shape
    (True, (2, 256, 128))
    """
    return Quantized(replace(q.columnwise, transposed=False), replace(q.rowwise, transposed=True))


def join_weights(parts: Sequence[Quantized], concatenate: Callable[[list[Any], int], Any]) -> Quantized:
    """Of what `quantize_weights` made of several [E, N, K], N multiples of 128, what it makes of them one
    below the other, [E, sum of N, K]: w13 of gates and ups.

    concatenate: joins a framework's arrays along an axis.
    """

    def join(sides: list[QuantTensor]) -> QuantTensor:
        axis = 2 if sides[0].transposed else 1
        data, scales = (concatenate([getattr(s, n) for s in sides], axis) for n in ("data", "scales"))
        return replace(sides[0], data=data, scales=scales)

    return Quantized(join([p.rowwise for p in parts]), join([p.columnwise for p in parts]))
