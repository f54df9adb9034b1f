"""Weights of published checkpoints, block FP8 and MXFP4, as the records that the layer multiplies by.

These functions run once for a model, not in its steps: they are not recorded.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp8moe.formats import BFLOAT16, FLOAT8_DTYPES, ceil_div
from fp8moe.ops.quantize import padded_sizes, parts_spec, quant_spec, raw_transpose_codes
from fp8moe.records import ArrayLike, ArraySpec, Quantized, QuantTensor
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import Call, enter

UINT8 = np.dtype(np.uint8)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def from_block_fp8(
    codes: ArrayLike | list[ArrayLike] | tuple[ArrayLike | list[ArrayLike], ...],
    scale_inv: ArrayLike | list[ArrayLike] | tuple[ArrayLike | list[ArrayLike], ...],
    *,
    parts: int = 1,
    rows: int | None = None,
    columns: int | None = None,
    transposed: bool = False,
    columnwise: bool = True,
    share: bool = False,
) -> Quantized:
    """Take over weights in block FP8, as DeepSeek-V3, Qwen3-FP8 and others publish them, byte by byte.

    Parameters
    ----------
    codes : ArrayLike, uint8 or float8_e4m3fn, [E, N, K], a list of E arrays [N, K], or a tuple of these
        The experts' e4m3 codes, in one array or one by one. The rows of several, such as (gate, up), are
        concatenated.
    scale_inv : ArrayLike, float32, bfloat16, uint8 or float8_e8m0fnu, or lists and tuples as ``codes``
        What the codes of each 128 x 128 tile are multiplied by: [E, ceil(N/128), ceil(K/128)], without E in
        a list; where each of several parts in one array has tiles of its own, [E, parts, ceil(N/parts/128),
        ceil(K/128)]; one scale per expert, [E], [E, 1] or [E, 1, 1]; or one for all, [1]. uint8: UE8M0, the
        scale 2^(byte - 127).
    parts : int
        Number of equal parts of the rows of each array: 2 for gate and up, stacked.
    rows : int or None
        Rows of each part in the result, filled with zeros. A multiple of 128 if there are several parts.
    columns : int or None
        Columns of the result, filled with zeros.
    transposed : bool
        Whether codes and scales are stored with their last two dimensions exchanged: [E, K, N]; tiles of
        parts [E, ceil(K/128), parts, ceil(N/parts/128)].
    columnwise : bool
        Whether to make the transposed codes, too; see `quantize_weights`.
    share : bool
        Whether the row-wise codes and scales are the arrays themselves, which must not change while the
        result is used, if they are as the result has them: uint8, [E, N, K], with float32 scales of tiles,
        and nothing to fill up or to transpose. Otherwise, and for the transposed codes, memory is new.

    Returns
    -------
    Quantized
        As `quantize_weights` returns it, with the codes and scales that were given; `to_block_fp8` gives them
        back, one scale of several tiles as one for each.

    Raises
    ------
    TypeError
        For a wrong dtype, or missing scales.
    ValueError
        For shapes that do not fit each other, tiles that span two parts, codes of NaN, and scales that are
        not positive and finite. To find such codes and scales in CUDA memory synchronises: with
        FP8MOE_CHECK=1 only.

    Notes
    -----
    Scales need not be powers of two: GEMMs and `dequantize` multiply by any, and to transpose a tile only
    moves it. Those below 2^-126, of experts that hardly exist, are subnormal numbers and kept as they are.

    A tile that spans gate and up, of stacked weights of which neither half is a multiple of 128 rows, has one
    scale for both, but the layer's tiles of the two are apart: no exact result exists, hence the error.

    Examples
    --------
    >>> codes, scales = np.full((2, 96, 160), 0x38, np.uint8), np.full((2, 1, 2), 0.75, np.float32)
    >>> w13 = fp8moe.from_block_fp8((codes, codes), (scales, scales), rows=128)
    >>> w13.shape, fp8moe.dequantize(w13.rowwise)[1, 95:97, 159].tolist()
    ((2, 256, 160), [0.75, 0.0])
    """
    transposed, columnwise = checks.flag("transposed", transposed), checks.flag("columnwise", columnwise)
    share = checks.flag("share", share)
    call, pieces, experts = _enter("codes", codes, "scale_inv", scale_inv)
    wanted = UINT8, FLOAT8_DTYPES["e4m3"]
    (height, width), of, each = _sizes(pieces, ("N", "K"), wanted, parts, "pass e4m3 codes, or their bytes")
    if transposed:
        height, width = width, height
    parts, real = of * each, height // each
    height, columns = padded_sizes("codes", height * of, width, parts, parts, rows, columns)
    height_of_part = height // parts
    moves = []
    for piece in pieces:
        tiles = _strides_of_tiles(piece, each, transposed)
        _check_values(call, piece)
        for i in range(each):
            source, target = (i * real, 0), ((piece.part + i) * height_of_part, 0)
            sizes = (real, width), (height_of_part, columns)
            if transposed:
                source, target = source[::-1], target[::-1]
                sizes = sizes[0][::-1], sizes[1][::-1]
            strides = tiles[0] + i * tiles[1], *tiles[2:]
            moves.append((piece, strides, (*source, *sizes[0]), (piece.expert, *target, *sizes[1])))
    spec: Any = parts_spec(ArraySpec((experts, height, columns), UINT8), "e4m3", columnwise)
    given = pieces[0].array, pieces[0].scales
    wanted = spec.rowwise.data, spec.rowwise.scales
    same = all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(given, wanted, strict=True))
    if share and same and not transposed:
        rowwise, made = spec.rowwise.changed(data=given[0], scales=given[1]), spec.changed(rowwise=None)
        out = call.empty(made)
        result = Quantized(rowwise, out.columnwise)
    else:
        result = out = call.empty(spec)
    stored = Quantized(out.columnwise, out.rowwise) if transposed else out
    for piece, *places in moves:
        options = dict(zip(("strides", "source", "target"), places, strict=True))
        call.run("forms", "place_tiles", piece.stack(), _bytes(piece.scales), out=stored, **options)
    return call.leave(result)  # type: ignore[no-any-return]


def from_mxfp4(
    blocks: ArrayLike | list[ArrayLike] | tuple[ArrayLike | list[ArrayLike], ...],
    scales: ArrayLike | list[ArrayLike] | tuple[ArrayLike | list[ArrayLike], ...],
    *,
    parts: int = 1,
    interleaved: bool = False,
    rows: int | None = None,
    columns: int | None = None,
    columnwise: bool = True,
) -> tuple[Quantized, ArrayLike]:
    """Convert weights in MXFP4, as gpt-oss publishes them, to e4m3 codes with one scale per 128 x 128 tile.

    Parameters
    ----------
    blocks : ArrayLike, uint8 or int8, [E, N, K/32, 16] or [E, N, K/2], or lists and tuples
        e2m1 codes, two to a byte, the low four bits first; all experts in one array, one by one in a list,
        and several of these in a tuple, such as (gate, up), as for `from_block_fp8`.
    scales : ArrayLike, uint8 or float8_e8m0fnu, [E, N, K/32], or lists and tuples
        The blocks' UE8M0 scales, 2^(byte - 127).
    parts : int
        Number of equal parts of the rows of each array: 2 for gate and up.
    interleaved : bool
        Whether row i of an array belongs to part i % parts, as gpt-oss' gate and up, not the first rows to
        the first part.
    rows : int or None
        Rows of each part in the result, filled with zeros. A multiple of 128 if there are several parts.
    columns : int or None
        Columns of the result, filled with zeros.
    columnwise : bool
        Whether to make the transposed codes, too; see `quantize_weights`.

    Returns
    -------
    weights : Quantized
        As `quantize_weights` returns it, [E, N, K], each part's rows together.
    rounded : ArrayLike, int32, [E]
        How many values of each expert are not exact, on the device of ``blocks``. Almost always zeros.

    Raises
    ------
    TypeError
        For a wrong dtype, or missing scales.
    ValueError
        For shapes that do not fit each other, and for scales of NaN, byte 255. To find these in CUDA memory
        synchronises: with FP8MOE_CHECK=1 only; without it, their codes become NaN.

    Notes
    -----
    A tile's scale is 2^-6 times the largest scale of those of its blocks that are not all zero, but at least
    2^-126: e2m1's largest value, 6, then is the code of 384, and its smallest, 0.5, is exact under scales
    down to 2^-14 times the largest, where it is e4m3's smallest, 2^-9. Below, values are rounded to nearest
    even, with an error of at most 2^-10 times the tile's scale, 2^-16 times the largest scale.

    Examples
    --------
    >>> blocks, scales = np.full((1, 4, 2, 16), 0x21, np.uint8), np.full((1, 4, 2), 127, np.uint8)
    >>> w, rounded = fp8moe.from_mxfp4(blocks, scales)  # 0.5 and 1 in turn
    >>> fp8moe.dequantize(w.rowwise)[0, 0, :2].tolist(), rounded.tolist()
    ([0.5, 1.0], [0])
    """
    interleaved, columnwise = checks.flag("interleaved", interleaved), checks.flag("columnwise", columnwise)
    call, pieces, experts = _enter("blocks", blocks, "scales", scales)
    by_blocks = len(pieces[0].array.shape) - len(pieces[0].lead) == 3
    wanted = UINT8, np.dtype(np.int8)
    names = ("N", "K/32", 16) if by_blocks else ("N", "K/2")
    (height, *rest), of, each = _sizes(pieces, names, wanted, parts, "pass e2m1 codes, two to a byte")
    width = 2 * math.prod(rest)
    if width % 32:
        raise ValueError(
            f"blocks: got {width // 2} bytes a row; wanted a multiple of 16, a block of 32 codes"
        )
    if interleaved and (each == 1 or of > 1):
        raise ValueError(
            f"interleaved: got True with parts={parts}; wanted parts=2, or more, of one array whose rows "
            "take turns"
        )
    parts, real = of * each, height // each
    total, columns = padded_sizes("blocks", height * of, width, parts, parts, rows, columns)
    for piece in pieces:
        checks.dtype(piece.of_scales, piece.scales, (UINT8, E8M0), "pass E8M0 scales, or their bytes")
        checks.shape(piece.of_scales, piece.scales, (*piece.lead, height, width // 32))
        values = call.values(_bytes(piece.scales))
        if values is not None and len(found := np.argwhere(values == 255)):
            raise ValueError(
                f"{piece.of_scales}: got NaN, byte 255, at {found[0].tolist()}; wanted finite scales"
            )
    out: Quantized = call.empty(parts_spec(ArraySpec((experts, total, columns), UINT8), "e4m3", columnwise))
    rounded = call.upload(np.zeros(experts, checks.INT32))
    for piece in pieces:
        nibbles, given = piece.stack(height, width // 2), _bytes(piece.scales)
        given = _reshaped(given, (nibbles.shape[0], height, width // 32))
        for i in range(each):
            source = (i, each, real) if interleaved else (i * real, 1, real)
            target = piece.expert, (piece.part + i) * (total // parts), 0, total // parts, columns
            options = {"source": source, "target": target, "rounded": rounded}
            call.run("forms", "place_mxfp4", nibbles, given, out=out, **options)
    return call.leave(out), call.leave(rounded)


def to_block_fp8(
    q: Quantized | QuantTensor,
    *,
    parts: int = 1,
    rows: int | None = None,
    columns: int | None = None,
    scale_dtype: str = "float32",
) -> tuple[Any, Any]:
    """Codes and scales of weights as block FP8 checkpoints store them: what `from_block_fp8` was given.

    Parameters
    ----------
    q : Quantized or QuantTensor, e4m3, [E, N, K]
        With (128, 128) blocks, as `quantize_weights`, `from_block_fp8` and `from_mxfp4` return it.
    parts : int
        Number of equal parts of the rows, to be stored apart: 2 for gate and up. N/parts must be a multiple
        of 128.
    rows : int or None
        Rows of each part without the zeros that fill it up.
    columns : int or None
        Columns without the zeros that fill them up.
    scale_dtype : "float32", "bfloat16" or "ue8m0"
        Of the scales. The last two, "ue8m0" as uint8, must be exact; to make sure of it this reads the
        scales, which synchronises.

    Returns
    -------
    codes : ArrayLike, uint8, [E, rows, columns], or a tuple of them
        A tuple for several parts. Without anything to cut q's own codes, not a copy.
    scale_inv : ArrayLike, [E, ceil(rows/128), ceil(columns/128)], or a tuple of them
        ``weight_scale_inv``.

    Raises
    ------
    TypeError
        For another block or format.
    ValueError
        For sizes that do not fit, and scales that ``scale_dtype`` does not have.

    Examples
    --------
    >>> w13 = fp8moe.quantize_weights(np.ones((2, 192, 160), np.float32), parts=2, rows=128)
    >>> (gate, up), (scales, _) = fp8moe.to_block_fp8(w13, parts=2, rows=96)
    >>> gate.shape, scales.shape, (gate == up).all().item()
    ((2, 96, 160), (2, 1, 2), True)
    """
    checks.choice("scale_dtype", scale_dtype, ("float32", "bfloat16", "ue8m0"))
    parts = checks.integer("parts", parts, 1)
    if isinstance(q, Quantized):
        q = q.columnwise if q.rowwise is None else q.rowwise
    call = enter(q=q)
    raw = checks.quant_tensor("q", call.args.q, ((128, 128),))
    checks.shape("q", raw, ("E", "N", "K"))
    if raw.fmt != "e4m3":
        raise TypeError(f"q.fmt: got {raw.fmt!r}; wanted 'e4m3', which block FP8 checkpoints have")
    experts, height, width = raw.shape
    if height % parts or (parts > 1 and height // parts % 128):
        raise ValueError(f"parts: got {parts} of {height} rows; wanted parts of a multiple of 128 rows each")
    rows = height // parts if rows is None else checks.integer("rows", rows, 1, height // parts)
    columns = width if columns is None else checks.integer("columns", columns, 1, width)
    scales = None if scale_dtype == "float32" else _narrowed(call.to_host(raw.scales), scale_dtype)
    if raw.transposed:
        raw = call.perform(raw_transpose_codes, raw)
    if scales is not None:
        scales = np.ascontiguousarray(np.swapaxes(scales, 1, 2)) if raw is not call.args.q else scales
    if (parts, rows, columns) == (1, height, width):
        of_codes, of_scales = [raw.data], [raw.scales if scales is None else call.upload(scales)]
    else:
        of_codes, of_scales = [], []
        down, right = raw.scales.shape[1:]
        for part in range(parts):
            cut = call.empty(quant_spec((experts, rows, columns), "e4m3", (128, 128), "compact"))
            first, tile = part * (height // parts), part * (down // parts)
            options = {"source": (first, 0, rows, columns), "target": (0, 0, 0, rows, columns)}
            options["strides"] = tile * right, down * right, right, 1
            call.run("forms", "place_tiles", raw.data, raw.scales, out=Quantized(cut), **options)
            of_codes.append(cut.data)
            tiles = slice(tile, tile + ceil_div(rows, 128)), slice(ceil_div(columns, 128))
            of_scales.append(
                cut.scales if scales is None else call.upload(np.ascontiguousarray(scales[:, *tiles]))
            )
    if parts == 1:
        return call.leave(of_codes[0]), call.leave(of_scales[0])
    return call.leave(tuple(of_codes)), call.leave(tuple(of_scales))


def _narrowed(scales: np.ndarray, dtype: str) -> np.ndarray:
    """float32 scales as bfloat16 or as UE8M0's bytes, by their bits, as a thread may flush subnormals."""
    bits = scales.view(np.uint32)
    if dtype == "bfloat16":
        narrow, exact = (bits >> 16).astype(np.uint16).view(BFLOAT16), bits & 0xFFFF == 0
    else:
        normal = (bits & 0x7FFFFF == 0) & (bits > 0) & (bits < 0x7F800000)
        narrow, exact = (bits >> 23).astype(UINT8), normal | (bits == 0x400000)  # 2^-127, byte 0
    inexact = np.argwhere(~exact)
    if len(inexact):
        at = inexact[0].tolist()
        raise ValueError(
            f"scale_dtype: got {dtype!r} with a scale of {scales[*at]} at {at}; wanted scales that it has; "
            "pass scale_dtype='float32'"
        )
    return narrow


class _Piece(NamedTuple):
    """Codes and scales of one array: of one expert or of all, of one part or of several."""

    part: int  # the first
    expert: int
    lead: tuple[int, ...]  # (E,) of all experts; () of one in a list
    name: str
    array: Any
    of_scales: str
    scales: Any

    def stack(self, *shape: int) -> Any:
        """The codes as bytes, [E or 1, N, K]."""
        return _reshaped(_bytes(self.array), (*(self.lead or (1,)), *(shape or self.array.shape[-2:])))


def _enter(name: str, codes: Any, of_scales: str, scales: Any) -> tuple[Call, list[_Piece], int]:
    """The call, its arrays of codes with their scales, and the number of experts."""
    if scales is None:
        raise TypeError(f"{of_scales}: got None; wanted the scales without which {name} have no values")
    call = enter(**{name: _without_lists(codes), of_scales: _without_lists(scales)})
    given = vars(call.args)
    if _kind(codes, tuple) != _kind(scales, tuple):
        raise ValueError(f"{of_scales}: got {_described(scales)}; wanted {_described(codes)}, as {name}")
    pieces: list[_Piece] = []
    counts = []
    beside = _parts_of(of_scales, scales, given[of_scales])
    for part, (n, x, array) in enumerate(_parts_of(name, codes, given[name])):
        m, y, factors = beside[part]
        if _kind(x, list) != _kind(y, list):
            raise ValueError(f"{m}: got {_described(y)}; wanted {_described(x)}, as {n}")
        if isinstance(x, list):
            counts.append(len(x))
            both = enumerate(zip(array, factors, strict=True))
            pieces += [_Piece(part, e, (), f"{n}[{e}]", a, f"{m}[{e}]", b) for e, (a, b) in both]
        else:
            checks.require_array(n, array)
            counts.append(int(array.shape[0]) if len(array.shape) else 0)
            pieces.append(_Piece(part, 0, (counts[-1],), n, array, m, factors))
        if counts[-1] != counts[0]:
            raise ValueError(f"{n}: got {counts[-1]} experts; wanted {counts[0]}, as the first part")
    if not pieces:
        raise ValueError(
            f"{name}: got {_described(codes)}; wanted an array, or a list of one for each expert"
        )
    return call, pieces, counts[0]


def _kind(x: Any, sequence: type) -> int | None:
    """The length of a tuple, or of a list; None for others."""
    return len(x) if isinstance(x, sequence) else None  # type: ignore[arg-type]


def _without_lists(x: Any) -> Any:
    return tuple(map(_without_lists, x)) if isinstance(x, (list, tuple)) else x


def _parts_of(name: str, given: Any, raw: Any) -> list[tuple[str, Any, Any]]:
    if not isinstance(given, tuple):
        return [(name, given, raw)]
    return [(f"{name}[{i}]", x, array) for i, (x, array) in enumerate(zip(given, raw, strict=True))]


def _described(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f"a {type(x).__name__} of {len(x)}"
    return "one array"


def _sizes(
    pieces: list[_Piece], names: tuple[int | str, ...], dtypes: Any, parts: Any, fix: str
) -> tuple[tuple[int, ...], int, int]:
    """Check all codes: the sizes of each array without E, the number of parts that came, and of parts in
    each of them."""
    parts = checks.integer("parts", parts, 1)
    first = pieces[0]
    for piece in pieces:
        checks.dtype(piece.name, piece.array, dtypes, fix)
        lead = piece.lead and ("E",)
        wanted = names if piece is first else tuple(first.array.shape[len(first.lead) :])
        checks.shape(piece.name, piece.array, (*lead, *wanted))
    of = pieces[-1].part + 1
    if of > 1 and parts not in (1, of):
        raise ValueError(f"parts: got {parts} with a tuple of {of}; wanted 1 or {of}, or one array")
    sizes = tuple(first.array.shape[len(first.lead) :])
    return sizes, of, parts if of == 1 else 1


def _strides_of_tiles(piece: _Piece, each: int, transposed: bool) -> tuple[int, ...]:
    """Where the scales of an array's tiles are: the first, then from one part, matrix, row of tiles and tile
    to the next. Checks their shape and dtype."""
    dtypes = checks.FLOAT32, BFLOAT16, UINT8, E8M0
    checks.dtype(piece.of_scales, piece.scales, dtypes, "pass the scales as float32")
    got, lead = tuple(piece.scales.shape), piece.lead
    if got in ((), (1,)):
        return 0, 0, 0, 0, 0
    if got in (lead, (*lead, 1), (*lead, 1, 1)):
        return 0, 0, 1, 0, 0
    along = int(transposed)  # the dimension that parts divide
    size = piece.array.shape[-2:][along] // each
    down, right = (ceil_div(size, 128) for size in piece.array.shape[-2:])
    tiles = ceil_div(size, 128)
    whole = *lead, down, right
    apart = (*lead, down, each, tiles) if transposed else (*lead, each, tiles, right)
    if each > 1 and got == apart:
        matrix, row = math.prod(apart[-3:]), each * tiles if transposed else right
        return 0, tiles * (1 if transposed else right), matrix, row, 1
    if got == whole and (each == 1 or size % 128 == 0):
        return 0, tiles * (1 if transposed else right) if each > 1 else 0, down * right, right, 1
    fix = ""
    if got == whole:
        fix = (
            f"; tiles of {each} parts of {size} rows would span two parts; if each part has tiles of its "
            f"own, pass {piece.of_scales}.reshape({', '.join(map(str, apart))})"
        )
        if math.prod(apart) != math.prod(whole):
            fix = (
                f"; tiles of {each} parts of {size} rows would span two parts, which no scale serves exactly"
            )
        fix += ", or dequantise, and pass fp8moe.quantize_weights the values"
    wanted = apart if each > 1 and size % 128 else whole
    raise ValueError(
        f"{piece.of_scales}: got shape {list(got)}; wanted {list(wanted)}, a scale for each tile of "
        f"{piece.name}, {list(piece.array.shape)}{fix}"
    )


def _check_values(call: Call, piece: _Piece) -> None:
    """Refuse codes of NaN, and scales that are not positive and finite, where they can be read."""
    scales = call.values(_bytes(piece.scales))
    if scales is not None and len(found := np.argwhere(~_are_positive(scales))):
        at = found[0].tolist()
        got = "NaN, byte 255" if scales.dtype == UINT8 else scales[*at]
        raise ValueError(f"{piece.of_scales}: got {got} at {at}; wanted positive, finite scales")
    codes = call.values(piece.stack())
    for expert, matrix in enumerate(() if codes is None else codes):
        is_nan = (matrix & 0x7F) == 0x7F
        if is_nan.any():  # argwhere takes four times as long
            first = np.argwhere(is_nan)[0].tolist()
            at = [*(piece.lead and [expert]), *first]
            raise ValueError(f"{piece.name}: got NaN, byte {matrix[*first]}, at {at}; wanted finite codes")


def _are_positive(scales: np.ndarray) -> np.ndarray:
    """By their bits: a thread that flushes subnormals takes them for zeros."""
    if scales.dtype == UINT8:
        return scales != 255
    integer, infinity = ("int16", 0x7F80) if scales.dtype == BFLOAT16 else ("int32", 0x7F800000)
    bits: np.ndarray = scales.view(np.dtype(integer))
    return (bits > 0) & (bits < infinity)


def _bytes(x: Any) -> Any:
    return x.view(UINT8) if x.dtype.itemsize == 1 and x.dtype != UINT8 else x


def _reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    return x.reshape(shape) if isinstance(x, np.ndarray) else x.part(0, shape)
