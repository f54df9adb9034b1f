"""SwiGLU fused with quantise, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe.activation import SWIGLU
from fp8moe.bench.harness import Case, Size, close, host, tall
from fp8moe.ops.swiglu import coded_h, raw_swiglu_quantize, raw_swiglu_quantize_backward, transposed_y
from fp8moe.runtime.dispatch import operation

SHAPES = [(32_768, 2048), (24_576, 1408)]


@operation
def _with_codes_of_h(h: Any, probs: Any) -> Any:
    """The forward of "fp8_flow" with save="fp8"."""
    codes = coded_h(h)
    return raw_swiglu_quantize(h, probs, codes_of_h=codes), codes


@operation
def _with_activation(grad: Any, h: Any, probs: Any) -> Any:
    """The backward of "fp8_flow", with the transposed activation."""
    y = transposed_y(h, SWIGLU, None, 1)
    return raw_swiglu_quantize_backward(grad, h, probs, transposed=True, y=y), y


def cases(size: Size) -> Iterator[Case]:
    for shape in {"quick": [(512, 256)], "cpu": [(4096, 1408)], "cuda": SHAPES}[size]:
        yield from one_shape(*shape)


def one_shape(rows: int, width: int) -> list[Case]:
    h = tall(rows, 2 * width).astype(ml_dtypes.bfloat16)
    grad = tall(rows, width, seed=1).astype(ml_dtypes.bfloat16)
    probs = np.random.default_rng(2).random(rows, dtype=np.float32)
    top = slice(0, min(rows, 512))
    a, b = h[top, :width].astype(np.float32), h[top, width:].astype(np.float32)
    gate = a / (1 + np.exp(-a)) * probs[top, None]
    shape = f"{rows} x {width}"
    scales = 4 / 128

    def right(q: Any, *_: np.ndarray, expected: np.ndarray, columns: slice = slice(None)) -> bool:
        part = fp8moe.QuantTensor(host(q.data[top]), host(q.scales[top]), q.fmt, q.block)
        return close(fp8moe.dequantize(part)[:, columns], expected)

    def is_close(part: Any, expected: np.ndarray) -> bool:
        return close(host(part), expected, 2.0**-8)

    return [
        Case(
            "swiglu*prob",
            shape,
            (h, probs),
            fp8moe.swiglu,
            lambda y, *_: is_close(y[top], gate * b),
            nbytes=rows * width * 6 + probs.nbytes,
        ),
        Case(
            "swiglu backward",
            shape,
            (grad, h, probs),
            fp8moe.swiglu_backward,
            lambda g, *_: is_close(g.dh[top, width:], gate * grad[top].astype(np.float32)),
            nbytes=rows * width * 10 + 2 * probs.nbytes,
        ),
        Case(
            "swiglu*prob+quantize",
            shape,
            (h, probs),
            fp8moe.swiglu_quantize,
            partial(right, expected=gate * b),
            nbytes=int(rows * width * (5 + scales)) + probs.nbytes,
        ),
        Case(
            "swiglu*prob+quantize+transpose",
            shape,
            (h, probs),
            lambda h, probs: fp8moe.swiglu_quantize(h, probs, columnwise=True),
            lambda q, *_: right(q.rowwise, expected=gate * b),
            nbytes=int(rows * width * (6 + 2 * scales)) + probs.nbytes,
        ),
        Case(
            "swiglu*prob+quantize, transposed",
            shape,
            (h, probs),
            lambda h, probs: fp8moe.swiglu_quantize(h, probs, transposed=True),
            lambda q, *_: right(q.rowwise, expected=gate * b),
            nbytes=int(rows * width * (6 + scales)) + probs.nbytes,
        ),
        Case(
            "swiglu backward+quantize, transposed",
            shape,
            (grad, h, probs),
            lambda *arrays: fp8moe.swiglu_quantize_backward(*arrays, transposed=True),
            lambda g, *_: right(
                g.dh.rowwise, expected=gate * grad[top].astype(np.float32), columns=slice(width, None)
            ),
            nbytes=int(rows * width * (10 + 2 * scales)) + 2 * probs.nbytes,
        ),
        Case(
            "swiglu*prob+quantize, h in FP8",
            shape,
            (h, probs),
            _with_codes_of_h,
            lambda both, *_: right(both[0], expected=gate * b),
            nbytes=int(rows * width * (7 + 3 * scales)) + probs.nbytes,
        ),
        Case(
            "swiglu backward+quantize, and activation",
            shape,
            (grad, h, probs),
            _with_activation,
            lambda both, *_: right(
                both[0].dh.rowwise, expected=gate * grad[top].astype(np.float32), columns=slice(width, None)
            ),
            nbytes=int(rows * width * (11 + 2 * scales)) + 2 * probs.nbytes,
        ),
        Case(
            "swiglu backward+quantize",
            shape,
            (grad, h, probs),
            fp8moe.swiglu_quantize_backward,
            lambda g, *_: right(
                g.dh, expected=gate * grad[top].astype(np.float32), columns=slice(width, None)
            ),
            nbytes=int(rows * width * (8 + 2 * scales)) + 2 * probs.nbytes,
        ),
    ]
