"""AdamW, in the pass that makes the FP8 codes of the weights that it has updated."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.formats import BFLOAT16
from fp8moe.ops.quantize import count_overwrites, padded_sizes, parts_spec
from fp8moe.records import ArrayLike, ArraySpec
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import enter, operation

DTYPES = BFLOAT16, checks.FLOAT32


@operation
def adamw(
    param: ArrayLike,
    grad: ArrayLike,
    exp_avg: ArrayLike,
    exp_avg_sq: ArrayLike,
    step: ArrayLike,
    settings: ArrayLike,
    *,
    parts: int = 1,
    rows: int | None = None,
    columns: int | None = None,
    columnwise: bool = True,
    first: int = 0,
    of: int | None = None,
    maximize: bool = False,
    out: Any = None,
) -> Any:
    """One step of AdamW in place, as torch.optim.AdamW's, and `fp8moe.quantize_weights` of what it makes.

    In float32: param -= lr weight_decay param; exp_avg and exp_avg_sq, averages of the gradient and of its
    square, are updated; param -= lr / (1 - beta1^step) exp_avg / (sqrt(exp_avg_sq / (1 - beta2^step)) + eps).
    Each of the three is rounded once to its dtype. The codes are those of the rounded param, bit for bit.

    Parameters
    ----------
    param : ArrayLike, bfloat16 or float32, [E, N, K]
        The weights. Written to, as are both averages.
    grad : ArrayLike of param's dtype, [E, N, K]
    exp_avg, exp_avg_sq : ArrayLike, bfloat16 or float32, both of one dtype, [E, N, K]
    step : ArrayLike, float32, [1]
        The number of this step, from 1 on.
    settings : ArrayLike, float64, [5]
        lr, beta1, beta2, eps and weight_decay, in the arrays' memory, so that a schedule of them makes no new
        recording of the call.
    parts, rows, columns
        Of param, as `fp8moe.quantize_weights` takes them.
    columnwise : bool
        Whether codes are made in both orientations, or row-wise only.
    first, of : int
        param has the parts from ``first`` on of the ``of`` parts of the codes' rows: (w1, w3) are two calls.
        None: all.
    maximize : bool
        Step along the gradient, not against it.
    out : Quantized or None
        Codes to write to and return: what an earlier call returned; None: new memory.

    Returns
    -------
    Quantized
        Codes of param, [E, of * rows, columns]; parts that are not in param are not written.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or shape, and for memory that overlaps.
    """
    call = enter(
        param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, step=step, settings=settings, out=out
    )
    a = call.args
    checks.arrays(("param", a.param, DTYPES, ("E", "N", "K")))
    shape = tuple(a.param.shape)
    checks.arrays(
        ("grad", a.grad, (a.param.dtype,), shape),
        ("exp_avg", a.exp_avg, DTYPES, shape),
        ("exp_avg_sq", a.exp_avg_sq, (a.exp_avg.dtype,), shape),
        ("step", a.step, (checks.FLOAT32,), (1,)),
        ("settings", a.settings, (np.dtype(np.float64),), (5,)),
    )
    maximize, columnwise = checks.flag("maximize", maximize), checks.flag("columnwise", columnwise)
    parts = checks.integer("parts", parts, 1)
    of = parts if of is None else checks.integer("of", of, parts)
    first = checks.integer("first", first, 0, of - parts)
    sizes = shape[0], *padded_sizes("param", shape[1], shape[2], parts, of, rows, columns)
    spec = parts_spec(ArraySpec(sizes, a.param.dtype), "e4m3", columnwise)
    given = {"grad": a.grad, "step": a.step, "settings": a.settings}
    checks.writable("param", (a.param, a.exp_avg, a.exp_avg_sq), **given)
    if a.out is None:
        codes = call.empty(spec)
    else:
        checks.like("out", codes := a.out, spec)
        checks.writable("out", codes, param=a.param, exp_avg=a.exp_avg, exp_avg_sq=a.exp_avg_sq, **given)
        count_overwrites(codes)
    call.count_overwrite(a.param)
    arrays = a.param, a.grad, a.exp_avg, a.exp_avg_sq, a.step, a.settings
    options = {"parts": parts, "first": first, "of": of, "maximize": maximize}
    call.run("adamw", "adamw", *arrays, out=codes, **options)
    return call.leave(codes)
