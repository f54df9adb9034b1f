"""Refusals, checked once at the public door: what argument, what came, what was wanted.

TypeError for a wrong dtype, device or format; ValueError for shapes and ranges. The optional ``fix`` is
the call that mends it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from fp8moe.formats import BFLOAT16, BLOCKS, scale_shape
from fp8moe.records import PermutationPlan, QuantTensor, arrays_in, map_arrays

INT32 = np.dtype(np.int32)
FLOAT32 = np.dtype(np.float32)
INTEGERS = (INT32, np.dtype(np.int64))
FLOATS = (BFLOAT16, np.dtype(np.float16), FLOAT32, np.dtype(np.float64))
QUANTIZABLE = (BFLOAT16, np.dtype(np.float16), FLOAT32)
MAX_INT32 = 2**31 - 1


def dtype(name: str, x: Any, wanted: tuple[np.dtype, ...], fix: str = "") -> None:
    if isinstance(x, QuantTensor):
        raise TypeError(f"{name}: got a QuantTensor; wanted a plain array{_fix(fix)}")
    if x is None:
        raise TypeError(f"{name}: got None; wanted an array{_fix(fix)}")
    if x.dtype not in wanted:
        names = ", ".join(d.name for d in wanted)
        raise TypeError(f"{name}: got dtype {x.dtype.name}; wanted {names}{_fix(fix)}")


def shape(name: str, x: Any, wanted: tuple[int | str, ...], fix: str = "") -> None:
    """``wanted``: an int must match, a str names a free size."""
    if x is None:
        raise TypeError(f"{name}: got None; wanted an array{_fix(fix)}")
    got = x.shape
    if len(got) == len(wanted):
        for g, w in zip(got, wanted, strict=True):
            if g != w and not isinstance(w, str):
                break
        else:
            return
    text = "[" + ", ".join(str(w) for w in wanted) + "]"
    raise ValueError(f"{name}: got shape {list(got)}; wanted {text}{_fix(fix)}")


def like(name: str, given: Any, wanted: Any) -> None:
    """A record of arrays to write to: the kind, shapes and dtypes of ``wanted``, whose arrays are specs."""

    def described(value: Any) -> Any:
        return map_arrays(lambda _, a: (tuple(a.shape), a.dtype.name), value)

    if type(given) is not type(wanted) or described(given) != described(wanted):
        raise ValueError(
            f"{name}: got {described(given)}; wanted {described(wanted)}, as the same call returns without it"
        )
    for a in arrays_in(given):
        if isinstance(a, np.ndarray) and not a.flags.writeable:
            raise ValueError(
                f"{name}: got read-only memory; wanted memory to write to, or None for new memory"
            )


def integer(name: str, value: Any, low: int, high: int = MAX_INT32) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name}: got a bool; wanted an integer from {low} to {high}")
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {type(value).__name__}; wanted an integer") from None
    if not low <= value <= high:
        raise ValueError(f"{name}: got {value}; wanted an integer from {low} to {high}")
    return value


def number(name: str, value: Any, low: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: got {type(value).__name__}; wanted a number")
    if not (np.isfinite(value) and value >= low):
        raise ValueError(f"{name}: got {value}; wanted a finite number of at least {low}")
    return float(value)


def choice(name: str, value: Any, wanted: Iterable[Any]) -> Any:
    wanted = tuple(wanted)
    if value not in wanted:
        raise ValueError(f"{name}: got {value!r}; wanted one of {', '.join(map(repr, wanted))}")
    return value


def fits(record: Any) -> bool:
    """Whether a call of this library made the record, so that its arrays fit each other."""
    return "_fits" in record.__dict__


def plan(value: Any) -> PermutationPlan:
    """A plan whose arrays fit each other."""
    if not isinstance(value, PermutationPlan):
        raise TypeError(
            f"plan: got {type(value).__name__}; wanted a PermutationPlan from plan_topk or plan_routing_map"
        )
    if fits(value):
        return value
    experts = value.num_experts
    shape("plan.row_id_map", value.row_id_map, ("T", 2 * value.max_experts_per_token + 1))
    if value.slots is not None:
        shape("plan.slots", value.slots, (value.num_tokens, value.max_experts_per_token))
    for name, length in (
        ("tokens_per_expert", experts),
        ("padded_tokens_per_expert", experts),
        ("pad_offsets", experts),
        ("expert_offsets", experts + 1),
        ("overflow", 1),
    ):
        shape(f"plan.{name}", getattr(value, name), (length,))
        dtype(f"plan.{name}", getattr(value, name), (INT32,))
    dtype("plan.row_id_map", value.row_id_map, (INT32,))
    return value


def quant_tensor(
    name: str, q: Any, blocks: Iterable[Any], layouts: tuple[str, ...] = ("compact",)
) -> QuantTensor:
    """A QuantTensor whose codes and scales fit each other, of one of the given blocks and layouts."""
    if not isinstance(q, QuantTensor):
        raise TypeError(
            f"{name}: got an array of {getattr(q, 'dtype', type(q).__name__)}; wanted a QuantTensor, "
            "as quantize returns"
        )
    blocks = tuple(blocks)
    if q.block not in blocks:
        raise TypeError(f"{name}.block: got {q.block}; wanted one of {', '.join(map(str, blocks))}")
    formats, scale_dtype = BLOCKS[q.block]
    if q.fmt not in formats:
        raise TypeError(f"{name}.fmt: got {q.fmt!r}; wanted {' or '.join(formats)} for block {q.block}")
    if q.layout not in layouts:
        raise TypeError(
            f"{name}.layout: got {q.layout!r}; wanted {' or '.join(layouts)}; fp8moe.to_layout converts"
        )
    if fits(q):
        return q
    dtype(f"{name}.data", q.data, (np.dtype(np.uint8),))
    dtype(f"{name}.scales", q.scales, (scale_dtype,))
    if q.data.ndim not in ((2, 3) if q.block == (128, 128) else (2,)):
        raise ValueError(f"{name}.data: got shape {list(q.data.shape)}; wanted two dimensions")
    wanted = scale_shape(q.shape, q.block, q.layout)
    if q.columnwise:
        # a column-wise tensor of several experts may hold more rows of blocks: see column_scale_rows
        shape(f"{name}.scales", q.scales, ("blocks", wanted[1]))
        if q.scales.shape[0] < wanted[0]:
            raise ValueError(
                f"{name}.scales: got {q.scales.shape[0]} rows of blocks; wanted at least {wanted[0]}"
            )
    else:
        shape(f"{name}.scales", q.scales, wanted)
    return q


def offsets(name: str, x: Any, experts: int | str = "E+1") -> None:
    dtype(name, x, (INT32,))
    shape(name, x, (experts,))
    if x.shape[0] < 1:
        raise ValueError(f"{name}: got an empty array; wanted the E + 1 offsets of E experts")


def _fix(fix: str) -> str:
    return f"; {fix}" if fix else ""
