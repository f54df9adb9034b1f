"""The nouns: frozen records that operations take and return.

Their array fields hold whatever kind of array the caller brought (NumPy, torch, CuPy, JAX, ...). Inside
the library the same records carry raw buffers, and, where only shapes are known, `ArraySpec` leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from fp8moe.formats import Block, is_columnwise

Array = Any  # an array of the caller's kind; no framework is named here
Rows = Any  # an array or a QuantTensor


# These two are not frozen: a call makes some twenty, and a frozen dataclass costs the host 0.9 us, not 0.2.


@dataclass(slots=True)
class ArraySpec:
    """Shape and dtype of an array that does not exist yet."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(slots=True, eq=False)
class DeviceArray:
    """A C-contiguous array in CUDA memory: what kernels are launched on. ``owner`` keeps it alive; the array
    starts ``start`` bytes after the owner's own first byte."""

    ptr: int
    shape: tuple[int, ...]
    dtype: np.dtype
    device: int
    owner: Any
    start: int = 0

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def view(self, dtype: np.dtype) -> DeviceArray:
        """The same bytes as another dtype of the same size."""
        return replace(self, dtype=np.dtype(dtype))


class Options:
    """A frozen record of plain values, which can be compared and hashed: no arrays."""


class Record:
    """A record of arrays. One that a call returned remembers its raw form (`border.Call.leave`): the next
    call need not look at every array again, and on CUDA the caller's arrays are made when they are asked for.
    So are a raw plan's, which lie in one allocation (`border.Call.empty`).
    """

    def __getattr__(self, name: str) -> Any:
        # only reached for what is not in __dict__
        kept = self.__dict__
        array: Any = None
        if "_raw" in kept and name in (field_names(type(self)) or ()):
            raw, _, family, _ = kept["_raw"]
            found = getattr(raw, name)
            memory = raw.__dict__["_packed"][0] if "_packed" in raw.__dict__ else found
            if not family.lies(memory):
                raise RuntimeError(
                    f"{type(self).__name__}.{name}: its memory was freed or moved, by resize_, set_ or .data "
                    "of a tensor that shares it"
                )
            array = family.wrap(found)
        elif "_packed" in kept and name in kept["_packed"][1]:
            memory, layout = kept["_packed"]
            shape, start = layout[name]
            array = DeviceArray(memory.ptr + start, shape, memory.dtype, memory.device, memory.owner, start)
        if array is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        kept[name] = array
        return array

    def __getstate__(self) -> dict[str, Any]:
        # what is remembered are addresses of these very arrays: no copy and no pickle may carry it
        return {name: getattr(self, name) for name in field_names(type(self)) or ()}


@dataclass(frozen=True)
class QuantTensor(Record):
    """A block-scaled tensor: value = decode(data) * the scale of its block.

    data: uint8 codes [M, K] (row-wise), [K, M] (column-wise blocks, stored transposed), [E, N, K]
        (weights), [M, K/2] (``e2m1``, two to a byte, low nibble first).
    scales: what multiplies back to the value (Transformer Engine's ``scale_inv``). float32, or uint8
        E8M0 exponents (block 32), or uint8 e4m3 (block 16). Row-wise compact: [M, ceil(K/B)];
        ``gemm_ready``: [ceil(K/128), roundup(M, 4)]; column-wise: [ceil(M/B), K]; weights:
        [E, ceil(N/128), ceil(K/128)]; one scale a tensor: [1].
    fmt: "e4m3" (no infinities, max 448), "e5m2", or "e2m1".
    block: (1, 128), (128, 1), (128, 128), (1, 32), (32, 1), (1, 16), or None: one scale a tensor.
    layout: "compact" or "gemm_ready", of row-wise scales.
    """

    data: Array
    scales: Array
    fmt: str = "e4m3"
    block: Block = (1, 128)
    layout: str = "compact"

    @property
    def columnwise(self) -> bool:
        return is_columnwise(self.block)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [M, K] (or [E, N, K]), whatever the layout of the codes."""
        shape = tuple(self.data.shape)
        if self.columnwise:
            return shape[::-1]
        return (*shape[:-1], shape[-1] * 2) if self.fmt == "e2m1" else shape


def in_blocks(q: Any) -> bool:
    """Whether a product's operand is a QuantTensor of (128, 128) blocks. A weight gradient's is transposed
    then, and `shape` is that of the transpose."""
    return isinstance(q, QuantTensor) and q.block == (128, 128)


@dataclass(frozen=True)
class Quantized(Record):
    """Both orientations of one tensor: ``rowwise`` and the transposed ``columnwise`` one. Weights that are
    kept for a backward that does not need the row-wise one (`fp8moe.moe.Saved`) have None there."""

    rowwise: QuantTensor
    columnwise: QuantTensor


@dataclass(frozen=True)
class PermutationPlan(Record):
    """Where every routed row goes. All arrays lie on the device of the routing they came from.

    Symbols: T tokens, E experts, R the most experts a token may have, A the alignment.

    row_id_map: int32 [T, 2R+1]. Row t: n_t destination rows before padding offsets, in descending
        order; from column R on their n_t expert ids; in the last column n_t. The rest is -1. With
        R = E this is Transformer Engine's layout.
    slots: int32 [T, R], for each entry the column of topk_ids it came from, -1 past n_t; None for a
        plan made from a mask.
    tokens_per_expert, padded_tokens_per_expert, pad_offsets: int32 [E]; pad_offsets[e] is the padding
        of all experts before e, so entry (row, e) lies at row + pad_offsets[e].
    expert_offsets: int32 [E+1], the padded starts; the last is P, the rows the routing asks for.
    overflow: int32 [1], routed rows that found no room and are not in the map.
    num_out_tokens: rows a permuted buffer has; nothing is written past it.
    align_size: A.

    The counts and offsets speak of the routing, also when ``num_out_tokens`` was too small for it;
    whoever reads rows through ``expert_offsets`` stops at ``num_out_tokens``.
    """

    row_id_map: Array
    slots: Array
    tokens_per_expert: Array
    padded_tokens_per_expert: Array
    pad_offsets: Array
    expert_offsets: Array
    overflow: Array
    num_out_tokens: int
    align_size: int

    def __post_init__(self) -> None:
        for name in ("num_out_tokens", "align_size"):
            value = getattr(self, name)
            if isinstance(value, np.integer):
                object.__setattr__(self, name, int(value))

    @property
    def num_tokens(self) -> int:
        return self.row_id_map.shape[0]

    @property
    def num_experts(self) -> int:
        return self.tokens_per_expert.shape[0]

    @property
    def max_experts_per_token(self) -> int:
        """R of the row map."""
        return (self.row_id_map.shape[1] - 1) // 2

    @property
    def prob_columns(self) -> int:
        """Columns of a [T, .] probability array that goes with this plan: k, or E for a mask."""
        return self.num_experts if self.slots is None else self.max_experts_per_token


@dataclass(frozen=True)
class Permuted(Record):
    """Rows in expert order, with their probabilities and the plan that put them there."""

    data: Rows
    probs: Array
    plan: PermutationPlan

    @property
    def row_id_map(self) -> Array:
        return self.plan.row_id_map

    @property
    def pad_offsets(self) -> Array:
        return self.plan.pad_offsets

    @property
    def tokens_per_expert(self) -> Array:
        return self.plan.tokens_per_expert


@dataclass(frozen=True)
class SortedChunks(Record):
    """Chunks in their new order. ``group_offsets`` int32 [G+1]: padded starts of the chunk groups."""

    data: Rows
    probs: Array
    group_offsets: Array


@dataclass(frozen=True)
class SwigluGrad(Record):
    """dh: quantised gradient [P, 2F] (`Quantized` when both orientations were asked for), or a plain
    array from `swiglu_backward`; dprobs: float32 [P], None without probs."""

    dh: Any
    dprobs: Array


@dataclass(frozen=True)
class MoEGrads(Record):
    """dx [T, H] and dprobs [T, k] in their inputs' dtypes; dw13 [E, 2F, H], dw2 [E, H, F] float32, or
    as asked for."""

    dx: Array
    dprobs: Array
    dw13: Array
    dw2: Array


#: of fields that are no arrays
METADATA_TYPES = frozenset({int, float, str, bool, type(None)})
#: of integers that a compiler has not fixed yet, which it adds itself (`fp8moe.adapters.torch_ops`)
SYMBOLIC_TYPES: set[type] = set()


def is_metadata(value: Any) -> bool:
    """Whether a field is not an array: None, a number, a name, a block."""
    if type(value) in METADATA_TYPES or type(value) in SYMBOLIC_TYPES:
        return True
    if isinstance(value, tuple):
        return all(map(is_metadata, value))
    return isinstance(value, (str, int, float, Options))  # of a type of its own, as numpy.float64


_field_names: dict[type, tuple[str, ...] | None] = {ArraySpec: None, DeviceArray: None}


def field_names(kind: type) -> tuple[str, ...] | None:
    """Fields of a type of record; None for any other type."""
    try:
        return _field_names[kind]
    except KeyError:
        names = tuple(f.name for f in fields(kind)) if is_dataclass(kind) else None
        return _field_names.setdefault(kind, names)


def map_arrays(fn: Callable[[str, Any], Any], value: Any, name: str = "") -> Any:
    """Replace every array in a record, tuple or plain value by ``fn(name, array)``."""
    if is_metadata(value):
        return value
    if isinstance(value, tuple):
        return tuple(map_arrays(fn, v, f"{name}[{i}]") for i, v in enumerate(value))
    names = field_names(type(value))
    if names is None:
        return fn(name, value)
    prefix = f"{name}." if name else ""
    new = object.__new__(type(value))
    for field in names:
        new.__dict__[field] = map_arrays(fn, getattr(value, field), prefix + field)
    return new


def arrays_in(value: Any) -> list[Any]:
    """Every array in a record, tuple or plain value."""
    found: list[Any] = []
    map_arrays(lambda _, a: found.append(a), value)
    return found


def nbytes(*values: Any) -> int:
    """Bytes of all arrays in the given records, an array that appears twice counted once."""
    unique = {id(a): a for value in values for a in arrays_in(value)}
    return sum(a.nbytes for a in unique.values())
