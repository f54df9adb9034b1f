"""Quantise to FP8 by blocks, and back."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from fp8moe.formats import (
    BFLOAT16,
    BLOCKED_128X4,
    BLOCKS,
    COLUMN_BLOCK,
    FORMATS,
    LAYOUTS,
    Block,
    ceil_div,
    data_shape,
    is_columnwise,
    is_mx,
    scale_shape,
    swapped,
)
from fp8moe.records import ArrayLike, ArraySpec, DeviceArray, Quantized, QuantTensor
from fp8moe.runtime import checks, counters, interop
from fp8moe.runtime.call import overwrite_counts, place_of
from fp8moe.runtime.dispatch import current, enter, operation

#: the blocks quantize writes; (1, 16) is moved and dequantised only
QUANTIZE_BLOCKS = tuple(block for block in BLOCKS if block != (1, 16))
_TRANSPOSED: dict[Block, Block] = {**COLUMN_BLOCK, (128, 128): (128, 128)}


def count_overwrites(q: QuantTensor | Quantized) -> None:
    """Counts a write to codes that a caller has given, for `times_overwritten`."""
    for side in (q.columnwise, q.rowwise) if isinstance(q, Quantized) else (q,):
        if side is not None:
            current.call.count_overwrite(side.data)


def times_overwritten(q: QuantTensor | Quantized, name: str = "q") -> int | None:
    """How often `quantize` has written to these codes with ``out=``: who keeps them to read them later
    compares this number. Of two orientations, each of which can be written alone, it is the sum. None while
    only shapes are known, and for a record without codes, which the operation that reads them refuses.
    ``name``: of the record, for errors."""
    if isinstance(q, Quantized):
        counts = []
        for n, side in (("rowwise", q.rowwise), ("columnwise", q.columnwise)):
            if side is not None:
                counts.append(times_overwritten(side, f"{name}.{n}"))
        return None if not counts or None in counts else sum(counts)  # type: ignore[arg-type]
    if not isinstance(q, QuantTensor):
        return None
    codes = q.data
    if isinstance(codes, (np.ndarray, DeviceArray)):  # as inside of an operation
        place = place_of(codes)
    else:
        place = interop.framework_of(codes, f"{name}.data").place(codes, f"{name}.data")
    return None if place is None else overwrite_counts.get(place, 0)


@operation
def quantize(
    x: ArrayLike,
    *,
    fmt: str = "e4m3",
    block: Block = (1, 128),
    pow2: bool = True,
    eps: float = 0.0,
    layout: str = "compact",
    columnwise: bool = False,
    scale_rounding: str = "up",
    out: Any = None,
) -> Any:
    """Quantise by blocks.

    Parameters
    ----------
    x : ArrayLike, bfloat16, float16 or float32, [M, K]
        With (128, 128) blocks also [E, N, K].
    fmt : "e4m3" or "e5m2"
        Format of the codes.
    block : tuple of int or None
        (1, 128), (128, 1) (the result is stored transposed), (128, 128), (1, 32) and (32, 1) (MXFP8), or
        None: one scale for the tensor.
    pow2 : bool
        Power-of-two scales.
    eps : float
        The least amax of a block.
    layout : "compact", "gemm_ready" or "blocked_128x4"
        "gemm_ready", for (1, 128): scales [ceil(K/128), roundup(M, 4)], zeros past M. "blocked_128x4", for
        MXFP8, of both orientations where both are made: as `to_layout` says.
    columnwise : bool
        Return `Quantized`, with the transposed tensor beside the row-wise one, from one read. For (128, 128)
        it is what dgrad multiplies by.
    scale_rounding : "up" or "floor"
        Of MXFP8's scales: "up", so that no value saturates, or "floor". Only here: whatever else makes MXFP8
        scales, `swiglu_quantize` and `scaling_aware_transpose`, rounds them up.
    out : QuantTensor, Quantized or None
        What the same call returned before, to write to and return; None: new memory.

    Returns
    -------
    QuantTensor or Quantized
        `Quantized` with ``columnwise``.

    Raises
    ------
    TypeError
        For a wrong dtype or format.
    ValueError
        For a wrong shape, block or option.

    Notes
    -----
    Per block, in float32: amax = max(|x|, eps); scale = amax / max_of_format, rounded up to a power of two
    for pow2; code = x * (1 / scale), saturated, rounded to nearest even. With eps=1e-4 these are DeepGEMM's
    codes and scales, of both settings of its use_ue8m0. NaN stays NaN, an infinity becomes the format's
    largest number, as in Transformer Engine (`FP8FlowMoE.stats` counts them). An amax of 0, infinity or NaN
    gives scale 1; scales are at least 2^-126, so that none is subnormal.

    MXFP8: the scale is 2^e, stored as E8M0, the byte e + 127. "up" is NVIDIA's recipe for training (arXiv
    2506.08027; torchao calls it RCEIL), and bit for bit Transformer Engine's scale for every amax: e =
    ceil(log2(amax / max_of_format)), the quotient rounded to float32. "floor" is the OCP MX specification
    1.0, section 6.3: e = floor(log2(amax)) - emax of the format, so what lies above max_of_format * 2^e
    saturates. Both: e is at least -127, which zeros have. Infinity stays infinity: its block has the scale
    2^127 ("up") or 2^(128 - emax) and the format's largest code, whose product exceeds float32.

    A NaN makes its whole MXFP8 block NaN, as in torchao and Transformer Engine, so that one look at the
    scales finds what training has spoilt: the scale is E8M0's NaN, byte 255; all codes are NaN ("up"), or
    those of finite values are zeros ("floor", torchao's). Blocks of other shapes keep a NaN to its element,
    under scale 1.

    Examples
    --------
    >>> q = fp8moe.quantize(np.full((1, 128), 3.0, np.float32))
    >>> q.data[0, 0].item(), q.scales.item()  # 384 times 2^-7
    (124, 0.0078125)
    """
    call = enter(x=x, out=out)
    array, result = call.args.x, call.args.out
    checks.dtype("x", array, checks.QUANTIZABLE, "pass x as float32")
    eps = checks.number("eps", eps, 0.0)
    pow2 = checks.flag("pow2", pow2)
    block, columnwise = check_quantize(array, fmt, block, layout, columnwise, scale_rounding)
    if is_mx(block) and not pow2:
        raise ValueError(
            f"pow2: got False with block {block}; wanted True, as MXFP8 scales are powers of two"
        )
    if result is not None:
        checks.like("out", result, quantize_spec(array, fmt, block, layout, columnwise))
        checks.writable("out", result, x=array)
    options: dict[str, Any] = {"fmt": fmt, "block": block, "layout": layout, "columnwise": columnwise}
    round_up = scale_rounding == "up" if is_mx(block) else pow2
    return raw_quantize(array, round_up=round_up, eps=eps, out=result, **options)


def raw_quantize(
    x: Any,
    *,
    fmt: str = "e4m3",
    block: Block = (1, 128),
    round_up: bool = True,
    eps: float = 0.0,
    layout: str = "compact",
    columnwise: bool = False,
    out: Any = None,
) -> Any:
    """round_up: of MXFP8 scales; of the others, to powers of two."""
    call = current.call
    counters.record_cast(weight=block == (128, 128))
    if out is None:
        out = call.empty(quantize_spec(x, fmt, block, layout, columnwise))
    else:
        count_overwrites(out)
    call.run("quantize", "quantize", x, round_up=round_up, eps=eps, out=out)
    return out


@operation
def quantize_parts(
    x: Any,
    *,
    fmt: str = "e4m3",
    parts: int = 1,
    rows: int | None = None,
    columns: int | None = None,
    transposed: bool = False,
    columnwise: bool = True,
    out: Any = None,
) -> Any:
    """`fp8moe.quantize_weights` of arrays that the result's rows consist of, with zeros up to other sizes."""
    call = enter(x=x, out=out)
    given, result = call.args.x, call.args.out
    arrays = given if isinstance(given, tuple) else (given,)
    if not arrays:
        raise ValueError("x: got an empty tuple; wanted an array, or a tuple of them")
    checks.flag("transposed", transposed)
    columnwise = checks.flag("columnwise", columnwise)
    parts = checks.integer("parts", parts, 1)
    if isinstance(given, tuple):
        if parts not in (1, len(arrays)):
            raise ValueError(
                f"parts: got {parts} with a tuple of {len(arrays)}; wanted 1 or {len(arrays)}, or one array"
            )
        parts = len(arrays)
    dims = ("E", "K", "N") if transposed else ("E", "N", "K")
    for i, array in enumerate(arrays):
        name = f"x[{i}]" if isinstance(given, tuple) else "x"
        dtypes, fix = (checks.QUANTIZABLE, f"pass {name} as float32") if i == 0 else ((arrays[0].dtype,), "")
        checks.dtype(name, array, dtypes, fix)
        checks.shape(name, array, dims if i == 0 else tuple(arrays[0].shape))
    experts, height, width = swapped(arrays[0].shape) if transposed else arrays[0].shape
    height *= len(arrays)
    sizes = experts, *padded_sizes("x", height, width, parts, parts, rows, columns)
    checks.choice("fmt", fmt, FORMATS)
    spec = parts_spec(ArraySpec(sizes, arrays[0].dtype), fmt, columnwise)
    if result is None:
        result = call.empty(spec)
    else:
        checks.like("out", result, spec)
        checks.writable("out", result, x=given)
    counters.record_cast(weight=True)
    options = {"count": parts, "transposed": transposed, "round_up": True, "eps": 0.0}
    if out is not None:
        count_overwrites(result)
    call.run("quantize", "quantize_parts", arrays, out=result, **options)
    return result


def padded_sizes(
    name: str, height: int, width: int, parts: int, of: int, rows: int | None, columns: int | None
) -> tuple[int, int]:
    """Rows and columns of codes that consist of ``of`` parts, of which an array ``name`` with this height and
    width has ``parts``. rows, columns: of a part, filled up with zeros; None: as many as it has."""
    if height % parts:
        raise ValueError(f"{name}: got {height} rows; wanted a multiple of parts = {parts}")
    height //= parts
    rows = height if rows is None else checks.integer("rows", rows, height)
    columns = width if columns is None else checks.integer("columns", columns, width)
    if of > 1 and rows % 128:
        raise ValueError(
            f"rows: got {rows} of each of {of} parts; wanted a multiple of 128, a block; "
            f"pass rows={ceil_div(rows, 128) * 128}, which fills up with zeros"
        )
    return of * rows, columns


def parts_spec(whole: ArraySpec, fmt: str, columnwise: bool) -> Quantized:
    """Codes of weights in both orientations, or row-wise only."""
    spec: Any = quantize_spec(whole, fmt, (128, 128), "compact", columnwise)
    return spec if columnwise else Quantized(spec)  # type: ignore[no-any-return]


def check_quantize(
    x: Any, fmt: str, block: Block, layout: str, columnwise: bool, scale_rounding: str = "up"
) -> tuple[Block, bool]:
    """Refuse combinations that do not exist; returns ``block`` and ``columnwise``."""
    block = checks.block("block", block, QUANTIZE_BLOCKS)
    columnwise = checks.flag("columnwise", columnwise)
    checks.choice("fmt", fmt, FORMATS)
    checks.choice("layout", layout, LAYOUTS)
    if checks.choice("scale_rounding", scale_rounding, ("up", "floor")) != "up" and not is_mx(block):
        raise ValueError(
            f"scale_rounding: got {scale_rounding!r} with block {block}; wanted it with (1, 32) or (32, 1)"
        )
    if block not in LAYOUTS[layout]:
        blocks = " or ".join(map(str, LAYOUTS[layout]))
        raise ValueError(f"layout: got {layout!r} with block {block}; wanted it with {blocks} only")
    if block == (128, 128) and x.ndim == 3:
        checks.shape("x", x, ("E", "N", "K"))
    else:
        checks.shape("x", x, ("M", "K"))
    if columnwise and block not in _TRANSPOSED:
        raise ValueError(f"columnwise: got True with block {block}; wanted a row-wise block or (128, 128)")
    return block, columnwise


def quantize_spec(x: Any, fmt: str, block: Block, layout: str, columnwise: bool) -> Any:
    """Shapes of what `quantize` returns."""
    rowwise = quant_spec(x.shape, fmt, block, layout)
    if not columnwise:
        return rowwise
    transposed = block == (128, 128)
    layout = layout if layout == BLOCKED_128X4 else "compact"
    return Quantized(rowwise, quant_spec(x.shape, fmt, _TRANSPOSED[block], layout, transposed=transposed))


def quant_spec(
    shape: tuple[int, ...],
    fmt: str,
    block: Block,
    layout: str,
    scale_rows: int | None = None,
    transposed: bool = False,
) -> QuantTensor:
    """Shapes of a QuantTensor of logical shape ``shape``; ``scale_rows`` where there are several experts."""
    sizes = shape if scale_rows is None else (*shape, scale_rows)
    make = _cached_spec if _SIZES.issuperset(map(type, sizes)) else _quant_spec
    return make(shape, fmt, block, layout, scale_rows, transposed)


def _quant_spec(
    shape: tuple[int, ...],
    fmt: str,
    block: Block,
    layout: str,
    scale_rows: int | None,
    transposed: bool,
) -> QuantTensor:
    scales = scale_shape(shape, block, layout, transposed)
    if scale_rows is not None:
        scales = (scale_rows, *scales[1:])
    return QuantTensor(
        ArraySpec(data_shape(shape, fmt, block, transposed), np.dtype(np.uint8)),
        ArraySpec(scales, BLOCKS[block][1]),
        fmt,
        block,
        layout,
        transposed,
    )


_SIZES = frozenset({int})  # symbolic ones are not hashable
_cached_spec = lru_cache(maxsize=1024)(_quant_spec)


@operation
def transpose_codes(q: QuantTensor) -> QuantTensor:
    """The other orientation of (128, 128) blocks, from the codes: bit for bit what `quantize` makes with it.

    A block has one scale in both orientations, so codes and scales are only moved, 2 bytes a value, in place
    of the 3 to 6 of quantising again.

    Parameters
    ----------
    q : QuantTensor, [M, K] or [E, N, K]
        With block (128, 128), in either orientation.

    Returns
    -------
    QuantTensor, [M, K] or [E, N, K]
        The same values with the other ``transposed``: codes and scales with their last two dimensions
        swapped.

    Raises
    ------
    TypeError
        For another block, whose scales are not those of the other orientation (see
        `scaling_aware_transpose`).
    ValueError
        For codes and scales that do not fit each other.

    Examples
    --------
    >>> w = fp8moe.quantize_weights(np.ones((2, 128, 256), np.float32))
    >>> columnwise = fp8moe.transpose_codes(w.rowwise)
    >>> columnwise.transposed, columnwise.data.shape, bool((columnwise.data == w.columnwise.data).all())
    (True, (2, 256, 128), True)
    """
    call = enter(q=q)
    checks.quant_tensor("q", call.args.q, ((128, 128),))
    checks.shape("q", call.args.q, ("E", "N", "K") if call.args.q.data.ndim == 3 else ("M", "K"))
    return raw_transpose_codes(call.args.q)


def raw_transpose_codes(q: QuantTensor) -> QuantTensor:
    call = current.call
    out: QuantTensor = call.empty(quant_spec(q.shape, q.fmt, q.block, q.layout, transposed=not q.transposed))
    call.run("quantize", "transpose_codes", q, out=out)
    return out


def columns_of(q: QuantTensor, first: int, count: int) -> QuantTensor:
    """Columns of raw transposed (128, 128) blocks, which lie together; ``first`` is a multiple of 128."""
    if (first, count) == (0, q.shape[1]):
        return q
    blocks = first // 128, ceil_div(count, 128)
    data, scales = _rows_of(q.data, first, count), _rows_of(q.scales, *blocks)
    return replace(q, data=data, scales=scales)


def _rows_of(x: Any, first: int, count: int) -> Any:
    if isinstance(x, np.ndarray):
        return x[first : first + count]
    return x.part(first * x.shape[1], (count, x.shape[1]))


@operation
def dequantize(q: QuantTensor, *, dtype: str = "float32", expert_offsets: ArrayLike | None = None) -> Any:
    """Decode: value = code * scale, in float32, rounded to ``dtype``.

    Parameters
    ----------
    q : QuantTensor
        Of any block; compact or gemm_ready.
    dtype : "float32" or "bfloat16"
        Of the result.
    expert_offsets : ArrayLike, int32, [E+1], or None
        For a column-wise tensor whose blocks start anew with every expert; rows past the last offset are
        zeros.

    Returns
    -------
    ArrayLike, [M, K] or [E, N, K]
        The logical matrix, also of codes that are stored transposed.

    Raises
    ------
    TypeError, ValueError
        For codes and scales that do not fit each other.

    Examples
    --------
    >>> fp8moe.dequantize(fp8moe.quantize(np.full((1, 128), 3.0, np.float32)))[0, :2].tolist()
    [3.0, 3.0]
    """
    call = enter(q=q, expert_offsets=expert_offsets)
    a = call.args
    checks.quant_tensor("q", a.q, BLOCKS, ("compact", "gemm_ready"))
    checks.choice("dtype", dtype, ("float32", "bfloat16"))
    if a.expert_offsets is not None:
        checks.offsets(call, "expert_offsets", a.expert_offsets)
        if is_columnwise(a.q.block):
            checks.column_scales(call, "q", a.q, a.expert_offsets)
    return raw_dequantize(a.q, dtype=dtype, expert_offsets=a.expert_offsets)


def raw_dequantize(q: QuantTensor, *, dtype: str = "float32", expert_offsets: Any = None) -> Any:
    call = current.call
    out = call.empty(ArraySpec(q.shape, BFLOAT16 if dtype == "bfloat16" else checks.FLOAT32))
    counters.record_cast(weight=q.block == (128, 128))
    call.run("quantize", "dequantize", q, expert_offsets=expert_offsets, out=out)
    return out
