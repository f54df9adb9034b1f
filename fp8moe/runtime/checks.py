"""Argument checks of the public functions. Errors name the argument, the value received and the one wanted.

TypeError for a wrong dtype, device or format; ValueError for shapes and ranges. The optional ``fix`` names
the call that corrects it.

Offsets, counts and row maps index other arrays. Where their values can be read (`Call.values`), they are
checked against the size of the indexed array here. On CUDA, where reading them would synchronise, the kernels
receive the bounds and ignore entries outside of them.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from fp8moe.formats import (
    BFLOAT16,
    BLOCKED_128X4,
    BLOCKS,
    LAYOUTS,
    Block,
    blocked_shape,
    blocked_tiles,
    is_columnwise,
    scale_shape,
)
from fp8moe.records import (
    DeviceArray,
    PermutationPlan,
    Quantized,
    QuantTensor,
    cached_plan_layout,
    plan_layout,
)
from fp8moe.runtime.record_trees import SYMBOLIC_TYPES, arrays_in, is_metadata, map_arrays

INT32 = np.dtype(np.int32)
FLOAT32 = np.dtype(np.float32)
BOOL = np.dtype(np.bool_)
INTEGERS = (INT32, np.dtype(np.int64))
MASKS = tuple(
    np.dtype(name)
    for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)
FLOATS = (BFLOAT16, np.dtype(np.float16), FLOAT32, np.dtype(np.float64))
QUANTIZABLE = (BFLOAT16, np.dtype(np.float16), FLOAT32)
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = float(np.finfo(np.float32).max)
#: the environment, FP8MOE_CHECK in it, and its value that switches the checks on: read in every call from
#: os.environ's own table in 0.06 us, because os.environ.get encodes and decodes for 1 us
_ENVIRONMENT: Any = os.environ
_CHECK: Any = "FP8MOE_CHECK"
_ON: Any = "1"
if os.name == "posix" and hasattr(os.environ, "_data"):
    _ENVIRONMENT, _CHECK, _ON = os.environ._data, os.fsencode(_CHECK), os.fsencode(_ON)
MAX_EXPERTS = 2**20  # a plan has arrays of this length


def reads_values() -> bool:
    """Whether FP8MOE_CHECK=1 now: values in CUDA memory are checked too, which synchronises, and expert
    ids."""
    return _ENVIRONMENT.get(_CHECK) == _ON


def dtype(name: str, x: Any, wanted: tuple[np.dtype, ...], fix: str = "") -> None:
    if type(x) is not DeviceArray and type(x) is not np.ndarray:
        if isinstance(x, (QuantTensor, Quantized)):
            raise TypeError(f"{name}: got a {type(x).__name__}; wanted a plain array{_fix(fix)}")
        require_array(name, x, fix)
    if x.dtype not in wanted:
        names = ", ".join(d.name for d in wanted)
        raise TypeError(f"{name}: got dtype {x.dtype.name}; wanted {names}{_fix(fix)}")


def not_values(name: str, dtype: Any, cast: str) -> TypeError:
    """The error for an array of codes or integers in place of values. cast: what makes them float32."""
    if "float" in str(dtype) or str(dtype).endswith("int8"):
        records = as_block_fp8(name, dtype) if name in ("w13", "w2") else ""
        return TypeError(
            f"{name}: got dtype {dtype}, codes without scales; wanted bfloat16, float16, float32 or "
            f"float64; pass {cast} times the scales{records}"
        )
    return TypeError(f"{name}: got dtype {dtype}; wanted a floating-point dtype; pass {cast}")


def as_block_fp8(name: str, dtype: Any) -> str:
    """Another way to pass codes of e4m3 with their scales, for errors."""
    is_e4m3 = str(dtype).endswith(("uint8", "e4m3fn"))
    return f", or fp8moe.from_block_fp8({name}, scale_inv)" if is_e4m3 else ""


def require_array(name: str, x: Any, fix: str = "") -> None:
    if is_metadata(x):
        raise TypeError(f"{name}: got {x!r}; wanted an array{_fix(fix)}")
    if not hasattr(x, "shape"):  # a tuple or a record
        fix = fix or ("pass its rowwise or columnwise" if isinstance(x, Quantized) else "")
        raise TypeError(f"{name}: got a {type(x).__name__}; wanted an array{_fix(fix)}")


def shape(name: str, x: Any, wanted: tuple[int | str, ...], fix: str = "") -> None:
    """Check a shape. ``wanted``: an int must match; a str names a size that may be any."""
    if type(x) is not DeviceArray and type(x) is not np.ndarray:
        require_array(name, x, fix)
    got = x.shape
    if len(got) == len(wanted):
        for g, w in zip(got, wanted, strict=True):
            if g != w and not isinstance(w, str):
                break
        else:
            return
    text = "[" + ", ".join(str(w) for w in wanted) + "]"
    if not fix and len(wanted) == 2 < len(got) and not isinstance(x, QuantTensor):
        rows = math.prod(got[:-1]), got[-1]
        if all(isinstance(w, str) or g == w for g, w in zip(rows, wanted, strict=True)):
            fix = f"pass {name}.reshape(-1, {got[-1]})"
    if not fix and len(wanted) == 2 and isinstance(wanted[1], str) and list(got) == [wanted[0]]:
        fix = f"pass {name}.reshape(-1, 1)"
    raise ValueError(f"{name}: got shape {list(got)}; wanted {text}{_fix(fix)}")


def arrays(*wanted: tuple[str, Any, tuple[np.dtype, ...] | None, tuple[int | str, ...]]) -> None:
    """Apply `dtype` and `shape` to each (name, array, dtypes or None, sizes), in one call. An array that is
    None is accepted."""
    for name, x, dtypes, sizes in wanted:
        if x is None:
            continue
        if type(x) is DeviceArray and len(x.shape) == len(sizes) and (dtypes is None or x.dtype in dtypes):
            for got, size in zip(x.shape, sizes, strict=True):
                if got != size and not isinstance(size, str):
                    break
            else:
                continue
        if dtypes is not None:
            dtype(name, x, dtypes)
        shape(name, x, sizes)


def like(name: str, given: Any, wanted: Any) -> None:
    """Check a record of output arrays: its type, shapes and dtypes must equal those of ``wanted``, whose
    arrays are specs."""

    def described(value: Any) -> Any:
        return map_arrays(lambda a: (tuple(a.shape), a.dtype.name), value)

    if type(given) is not type(wanted) or described(given) != described(wanted):
        raise ValueError(
            f"{name}: got {described(given)}; wanted {described(wanted)}, as this call returns without {name}"
        )


def writable(name: str, out: Any, **inputs: Any) -> None:
    """Check that output arrays are writable and overlap neither an input nor each other."""
    ranges = [(other, b) for other, value in inputs.items() for b in arrays_in(value)]
    for a in arrays_in(out):
        if isinstance(a, np.ndarray) and not a.flags.writeable:
            raise ValueError(f"{name}: got read-only memory; wanted a writable array, or None for a new one")
        for other, b in ranges:
            if overlap(a, b):
                raise ValueError(
                    f"{name}: got memory that overlaps {other}; wanted an array that does not overlap "
                    "another argument, or None for a new one"
                )
        ranges.append((name, a))


def overlap(a: Any, b: Any) -> bool:
    """Whether two raw arrays share a byte; arrays without memory (shapes only) do not."""
    first, second = _address(a), _address(b)
    return 0 < first < second + b.nbytes and 0 < second < first + a.nbytes and 0 not in (a.size, b.size)


def _address(a: Any) -> int:
    return a.ptr if type(a) is DeviceArray else a.__array_interface__["data"][0]


def integer(name: str, value: Any, low: int, high: int = MAX_INT32) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name}: got a bool; wanted an integer from {low} to {high}")
    if type(value) in SYMBOLIC_TYPES:  # a compiler's symbol: checked at run time
        return value  # type: ignore[no-any-return]
    if type(value) is not int:  # Dynamo's symbols are of type int, which operator.index would make constants
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name}: got {type(value).__name__}; wanted an integer") from None
    if not low <= value <= high:
        raise ValueError(f"{name}: got {value}; wanted an integer from {low} to {high}")
    return value


def number(name: str, value: Any, low: float) -> float:
    """Check a number within float32's finite range."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: got {type(value).__name__}; wanted a number")
    if not max(low, -MAX_FLOAT32) <= value <= MAX_FLOAT32:
        raise ValueError(
            f"{name}: got {value}; wanted a number from {max(low, -MAX_FLOAT32)} to {MAX_FLOAT32}"
        )
    return float(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: got {type(value).__name__}; wanted True or False")
    return bool(value)


def options(name: str, value: Any, wanted: type) -> None:
    if not isinstance(value, wanted):
        module = "fp8moe" if hasattr(sys.modules["fp8moe"], wanted.__name__) else "fp8moe.expert_parallel"
        made = f"{module}.{wanted.__name__}"
        fields = ", ".join(inspect.signature(wanted).parameters)
        raise TypeError(f"{name}: got {type(value).__name__}; wanted an {made}; make it by {made}({fields})")


def choice(name: str, value: Any, wanted: Iterable[Any]) -> Any:
    wanted = tuple(wanted)
    if not (value is None or isinstance(value, (str, tuple))) or value not in wanted:
        raise ValueError(f"{name}: got {value!r}; wanted one of {', '.join(map(repr, wanted))}")
    return value


def block(name: str, value: Any, wanted: Iterable[Block]) -> Block:
    """Check that a block is one of ``wanted``; returns it with sizes of type int."""
    if isinstance(value, tuple) and not _is_block(value):
        if any(isinstance(size, bool) or not hasattr(size, "__index__") for size in value):
            raise TypeError(f"{name}: got {value!r}; wanted one of {', '.join(map(repr, wanted))}")
        value = tuple([operator.index(size) for size in value])
    checked: Block = choice(name, value, wanted)
    return checked


def plan(call: Any, value: Any, *, fills: bool = False) -> PermutationPlan:
    """Check a plan: sizes, array shapes and, where they can be read, that its entries are valid indices of
    rows, experts and slots; with ``fills`` also that each row of an expert has exactly one entry, as
    operations that write rows require."""
    if not isinstance(value, PermutationPlan):
        raise TypeError(
            f"plan: got {type(value).__name__}; wanted a PermutationPlan from plan_topk or plan_routing_map"
        )
    concrete = True
    for size, low in _PLAN_SIZES.items():
        count = getattr(value, size)
        if type(count) is not int or not low <= count <= MAX_INT32:  # saves a call for each valid size
            integer(f"plan.{size}", count, low)
            concrete = False  # a compiler's symbolic size, which is not hashable
    if type(value.has_slots) is not bool:
        flag("plan.has_slots", value.has_slots)
    sizes = value.num_tokens, value.num_experts, value.max_experts_per_token, value.has_slots
    elements, _ = (cached_plan_layout if concrete else plan_layout)(*sizes)
    if type(value.data) is not DeviceArray or value.data.shape != (elements,) or value.data.dtype != INT32:
        shape("plan.data", value.data, (elements,))
        dtype("plan.data", value.data, (INT32,))
    if isinstance(value.data, np.ndarray) or call.reads_values:
        data = call.values(value.data)
        if data is not None:
            _entries(replace(value, data=data), fills)
    return value


_PLAN_SIZES = {
    "num_tokens": 0,
    "num_experts": 0,
    "max_experts_per_token": 0,
    "num_out_tokens": 0,
    "align_size": 1,
}


def _entries(plan: PermutationPlan, fills: bool) -> None:
    row_id_map, pads, slots = plan.row_id_map, plan.pad_offsets, plan.slots
    width, counts = plan.max_experts_per_token, row_id_map[:, -1]
    _within("plan.row_id_map", counts, width, "{} experts of a token")
    used = np.arange(width, dtype=np.int32) < counts[:, None]
    experts = row_id_map[:, width : 2 * width][used]
    _within("plan.row_id_map", experts, plan.num_experts - 1, "expert {}")
    rows = row_id_map[:, :width][used].astype(np.int64)
    _within("plan.row_id_map", rows, MAX_INT32, "row {}")
    reason = ", below plan.num_out_tokens; pass the num_out_tokens that the map was made for"
    _within(
        "plan.row_id_map",
        rows + pads[experts],
        plan.num_out_tokens - 1,
        "row {}, including padding",
        reason,
    )
    if slots is not None:
        _within("plan.slots", slots[used], plan.prob_columns - 1, "column {}")
    if fills:
        _each_row_once(plan, rows + pads[experts])


def _each_row_once(plan: PermutationPlan, rows: np.ndarray) -> None:
    """Check the rows of all entries: on CUDA only rows past those that each expert counts are zeroed."""
    starts = plan.expert_offsets[:-1].astype(np.int64)
    bounds = np.stack([starts, starts + plan.tokens_per_expert]).clip(0, plan.num_out_tokens)
    steps = np.zeros(plan.num_out_tokens + 1, np.int64)
    np.add.at(steps, bounds[0], 1)
    np.subtract.at(steps, bounds[1], 1)
    named = np.bincount(rows, minlength=plan.num_out_tokens)
    wrong = np.flatnonzero(named != np.cumsum(steps)[:-1])
    if len(wrong):
        row = wrong[0]
        raise ValueError(
            f"plan.row_id_map: got {named[row]} tokens for row {row}; wanted the rows that "
            "plan.tokens_per_expert counts from each expert's first on, one token for each"
        )


def _within(name: str, values: np.ndarray, high: int, template: str, reason: str = "") -> None:
    if not values.size:
        return
    low, top = int(values.min()), int(values.max())
    if low < 0 or top > high:
        outlier = template.format(low if low < 0 else top)
        raise ValueError(f"{name}: got {outlier}; wanted 0 to {high}{reason}")


def quant_tensor(
    name: str, q: Any, blocks: Iterable[Any], layouts: tuple[str, ...] = ("compact",), fix: str = ""
) -> QuantTensor:
    """Check a QuantTensor: one of the given blocks and layouts, with matching shapes of codes and scales.
    ``fix`` is for another block."""
    blocks = tuple(blocks)
    if isinstance(q, Quantized):
        sides = [s for s in ("rowwise", "columnwise") if getattr(getattr(q, s), "block", None) in blocks]
        fix = " or ".join(f"{name}.{side}" for side in sides or ("rowwise", "columnwise"))
        raise TypeError(f"{name}: got a Quantized; wanted a QuantTensor; pass {fix}")
    if not isinstance(q, QuantTensor):
        raise TypeError(
            f"{name}: got an array of {getattr(q, 'dtype', type(q).__name__)}; wanted a QuantTensor, "
            "as quantize returns"
        )
    if not _is_block(q.block) or q.block not in blocks:
        raise TypeError(f"{name}.block: got {q.block!r}; wanted {' or '.join(map(str, blocks))}{_fix(fix)}")
    formats, scale_dtype = BLOCKS[q.block]
    if not isinstance(q.fmt, str) or q.fmt not in formats:
        raise TypeError(f"{name}.fmt: got {q.fmt!r}; wanted {' or '.join(formats)} for block {q.block}")
    if not isinstance(q.layout, str) or q.layout not in layouts:
        raise TypeError(
            f"{name}.layout: got {q.layout!r}; wanted {' or '.join(layouts)}; fp8moe.to_layout converts"
        )
    if q.block not in LAYOUTS[q.layout]:
        wanted_blocks = " or ".join(map(str, LAYOUTS[q.layout]))
        raise TypeError(f"{name}.layout: got {q.layout!r} with block {q.block}; wanted block {wanted_blocks}")
    dtype(f"{name}.data", q.data, (np.dtype(np.uint8),))
    dtype(f"{name}.scales", q.scales, (scale_dtype,))
    if q.data.ndim not in ((2, 3) if q.block == (128, 128) else (2,)):
        raise ValueError(f"{name}.data: got shape {list(q.data.shape)}; wanted two dimensions")
    if type(q.transposed) is not bool or (q.transposed and q.block != (128, 128)):
        raise TypeError(
            f"{name}.transposed: got {q.transposed!r} with block {q.block}; wanted it with (128, 128) blocks "
            "only: codes with block (128, 1) or (32, 1) are always stored transposed"
        )
    wanted = scale_shape(q.shape, q.block, q.layout, q.transposed)
    if q.layout == BLOCKED_128X4:
        # with several experts there may be more tiles: see column_scale_rows
        shape(f"{name}.scales", q.scales, ("rows", "columns"))
        tiles, least = (blocked_tiles(s, q.block) for s in (q.scales.shape, wanted))
        if tiles < least or q.scales.shape != blocked_shape(q.shape, q.block, tiles):
            got = list(q.scales.shape)
            raise ValueError(f"{name}.scales: got shape {got}; wanted {list(wanted)}, or more tiles of rows")
    elif is_columnwise(q.block):
        # a column-wise tensor of several experts may hold more rows of blocks: see column_scale_rows
        shape(f"{name}.scales", q.scales, ("blocks", wanted[1]))
        if q.scales.shape[0] < wanted[0]:
            raise ValueError(
                f"{name}.scales: got {q.scales.shape[0]} rows of blocks; wanted at least {wanted[0]}"
            )
    else:
        shape(f"{name}.scales", q.scales, wanted)
    return q


def padding_mask(mask: Any, tokens: int) -> None:
    """Check a mask of padding tokens, bool [T]. Of other dtypes nothing says whether 1 is padding, as here,
    or a token, as in attention masks."""
    if mask is not None:
        dtype("padding_mask", mask, (BOOL,), PADDING)
        shape("padding_mask", mask, (tokens,))


#: what a mask of padding tokens has to be, for errors
PADDING = "True where a token is padding; pass attention_mask == 0 for an attention mask of ones and zeros"


def expert_ids(call: Any, name: str, ids: Any, num_experts: int) -> None:
    """With FP8MOE_CHECK=1: check that ids are below num_experts. Negative ids mean no expert."""
    values = call.values(ids) if call.reads_values else None
    if values is not None and values.max(initial=-1) >= num_experts:
        raise ValueError(
            f"{name}: got an expert id of {values.max()}; wanted ids below num_experts={num_experts}, or -1 "
            "for no expert; subtract 1 from ids that count from one"
        )


def offsets(
    call: Any,
    name: str,
    x: Any,
    *,
    experts: int | str = "E+1",
    align_size: int = 1,
    align: str = "align_size",
) -> None:
    """Check expert offsets: the first row of each expert and the end of the last, ascending. They need not
    cover all rows, and may exceed the number of rows. An expert that has rows starts at a multiple of
    ``align_size``; ``align`` is the argument's name in the error."""
    dtype(name, x, (INT32,))
    shape(name, x, (experts,))
    if x.shape[0] < 1:
        raise ValueError(f"{name}: got an empty array; wanted the E + 1 offsets of E experts")
    values = call.values(x)
    if values is None:
        return
    if values[0] < 0:
        raise ValueError(f"{name}: got {values[0]}; wanted ascending offsets from 0 on")
    descents = np.flatnonzero(values[1:] < values[:-1])
    if len(descents):
        previous, current = values[descents[0] : descents[0] + 2]
        raise ValueError(f"{name}: got {current} after {previous}; wanted ascending offsets")
    if align_size > 1:
        misaligned = values[:-1][(values[:-1] % align_size != 0) & (values[1:] > values[:-1])]
        if len(misaligned):
            raise ValueError(
                f"{name}: got {misaligned[0]} for an expert that has rows; wanted multiples of {align}, "
                f"{align_size}"
            )


def column_scales(call: Any, name: str, q: QuantTensor, expert_offsets: Any) -> None:
    """Check that a column-wise tensor has enough scales for the experts' rows."""
    values = call.values(expert_offsets)
    if values is None or q.block is None:
        return
    sizes = np.diff(values.clip(0, q.shape[0]).astype(np.int64))
    wanted, got = int((-(-sizes // q.block[0])).sum()), q.scales.shape[0]
    if got < wanted:
        raise ValueError(
            f"{name}.scales: got {got} rows of blocks; wanted {wanted}, as expert_offsets needs; pass the "
            "same expert_offsets and align_size to the function that makes the tensor"
        )


def _is_block(value: Any) -> bool:
    return value is None or (isinstance(value, tuple) and {*map(type, value)} <= {int})


def powers_of_two(call: Any, name: str, q: QuantTensor) -> None:
    """Check that scales [M, blocks] are powers of two, or zero."""
    scales = call.values(q.scales) if q.scales.dtype == FLOAT32 else None
    if scales is None:
        return
    invalid = np.argwhere((np.frexp(scales)[0] != 0.5) & (scales != 0))
    if len(invalid):
        row, block = invalid[0]
        raise ValueError(
            f"{name}.scales: got {scales[row, block]} at row {row}, block {block}; wanted powers of two, "
            "because a change of any other scale would round every value; quantise with pow2=True"
        )


def counts(name: str, x: np.ndarray, rows: int, of: str) -> None:
    """Check counts of rows: none is negative, and their sum is at most ``rows``."""
    low, top = x.min(initial=0), x.max(initial=0)
    if low < 0 or top > rows or int(x.sum()) > rows:
        total = sum(x.tolist())
        raise ValueError(
            f"{name}: got sizes that sum to {total}, the smallest {low}, the largest {top}; wanted none "
            f"negative and together at most the {rows} rows of {of}"
        )


def room(name: str, rows: int, wanted: int | None, by: str) -> None:
    """Check that the output has enough rows; ``wanted`` is None where the number is not known."""
    if wanted is not None and rows < wanted:
        raise ValueError(f"{name}: got {rows} rows; wanted at least {wanted} for {by}")


def int32_offsets(rows: int, groups: int, align_size: int, most: int) -> None:
    """Raise if the padded rows, up to ``most``, may exceed the range of int32 offsets."""
    if most > MAX_INT32:
        raise ValueError(
            f"align_size: got {align_size}, which pads {rows} rows of {groups} experts to as many as {most}; "
            f"wanted at most {MAX_INT32} padded rows, the range of int32 offsets; pass a smaller align_size, "
            "or reduce the rows, for example with topk="
        )


def _fix(fix: str) -> str:
    return f"; {fix}" if fix else ""
