"""Frozen records that operations take and return.

Their array fields hold the caller's kind of array (NumPy, torch, CuPy, JAX, ...). Inside
the library the same records carry raw buffers, and, where only shapes are known, `ArraySpec` leaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fp8moe.formats import Block, is_columnwise, swapped

Array = Any  # an array of the caller's kind; no framework is named here
#: What operations take as an array: contiguous ones of NumPy, CuPy, torch, JAX or Numba, or anything with
#: DLPack, all of a call on one device. Results are of the same kind.
ArrayLike = Any
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
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, start: int, shape: tuple[int, ...]) -> ArraySpec:
        """An array of some of its elements."""
        return ArraySpec(shape, self.dtype)


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
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, dtype: np.dtype) -> DeviceArray:
        """The same bytes as another dtype of the same size."""
        return replace(self, dtype=np.dtype(dtype))

    def part(self, start: int, shape: tuple[int, ...], dtype: np.dtype | None = None) -> DeviceArray:
        """An array of the memory from element ``start`` on, of another dtype where one is given."""
        offset = start * self.dtype.itemsize
        dtype = self.dtype if dtype is None else dtype
        return DeviceArray(self.ptr + offset, shape, dtype, self.device, self.owner, self.start + offset)


class Options:
    """A frozen record of plain values, which can be compared and hashed: no arrays."""


class Record:
    """A frozen record of arrays and plain values, which operations take and return."""


@dataclass(frozen=True)
class QuantTensor(Record):
    """A block-scaled tensor: value = decode(data) * the scale of its block.

    Attributes
    ----------
    data : ArrayLike, uint8
        Codes [M, K] (row-wise), [K, M] (column-wise: stored transposed), [E, N, K] or [E, K, N] (weights,
        row-wise and column-wise), [M, K/2] (``e2m1``, two to a byte, low nibble first).
    scales : ArrayLike, float32 or uint8
        What multiplies back to the value (Transformer Engine's ``scale_inv``): float32, or uint8 E8M0
        exponents (block 32), or uint8 e4m3 (block 16). Row-wise compact: [M, ceil(K/B)]; ``gemm_ready``:
        [ceil(K/128), roundup(M, 4)]; column-wise: [ceil(M/B), K]; ``blocked_128x4``: as `to_layout` says; of
        (128, 128) blocks: as the codes lie, one for each 128 x 128 of them; one scale a tensor: [1].
    fmt : "e4m3", "e5m2" or "e2m1"
        Format of the codes; e4m3 has no infinities, and 448 is its largest number.
    block : tuple of int or None
        (1, 128), (128, 1), (128, 128), (1, 32), (32, 1), (1, 16), or None: one scale a tensor. Rows and
        columns of the logical matrix.
    layout : "compact", "gemm_ready" or "blocked_128x4"
        Of the scales: "gemm_ready" of block (1, 128), "blocked_128x4" of MXFP8.
    transposed : bool
        Of (128, 128) blocks, whether codes and scales are stored transposed. Blocks (128, 1) and (32, 1)
        always are, the others never.
    """

    data: Array
    scales: Array
    fmt: str = "e4m3"
    block: Block = (1, 128)
    layout: str = "compact"
    transposed: bool = False

    @property
    def columnwise(self) -> bool:
        """Whether the codes are stored transposed."""
        return self.transposed or is_columnwise(self.block)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [M, K] (or [E, N, K]), whatever the layout of the codes."""
        shape = tuple(self.data.shape)
        if self.columnwise:
            return swapped(shape)
        return (*shape[:-1], shape[-1] * 2) if self.fmt == "e2m1" else shape


@dataclass(frozen=True)
class Quantized(Record):
    """Both orientations of one tensor.

    Attributes
    ----------
    rowwise : QuantTensor
        Stored as it is. None in weights that are saved for a backward that does not need it
        (`fp8moe.moe.Saved`).
    columnwise : QuantTensor
        Stored transposed.
    """

    rowwise: QuantTensor
    columnwise: QuantTensor


@dataclass(frozen=True)
class PermutationPlan(Record):
    """Where every routed row goes.

    It lies on the device of the routing it came from, in one array of which the properties below are views.
    Symbols: T tokens, E experts, R the most experts a token may have, A the alignment. The counts and offsets
    speak of the routing, also when ``num_out_tokens`` was too small for it; whoever reads rows through
    ``expert_offsets`` stops at ``num_out_tokens``.

    Attributes
    ----------
    data : ArrayLike, int32, [size]
        All arrays of the plan, one after another.
    num_tokens : int
        T.
    num_experts : int
        E.
    max_experts_per_token : int
        R.
    has_slots : bool
        Whether there are ``slots``: of a plan from top-k ids, not of one from a mask.
    num_out_tokens : int
        Rows that a permuted buffer has; nothing is written past it.
    align_size : int
        A.
    """

    data: Array
    num_tokens: int
    num_experts: int
    max_experts_per_token: int
    has_slots: bool
    num_out_tokens: int
    align_size: int

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_experts", "max_experts_per_token", "num_out_tokens", "align_size"):
            value = getattr(self, name)
            if isinstance(value, np.integer):
                object.__setattr__(self, name, int(value))

    @property
    def row_id_map(self) -> Array:
        """int32 [T, 2R+1]. Row t: n_t destination rows before padding offsets, in descending order; from
        column R on their n_t expert ids; in the last column n_t. The rest is -1. With R = E this is
        Transformer Engine's layout."""
        return self._part("row_id_map")

    @property
    def slots(self) -> Array:
        """int32 [T, R], for each entry the column of topk_ids it came from, -1 past n_t; or None."""
        return self._part("slots") if self.has_slots else None

    @property
    def tokens_per_expert(self) -> Array:
        """int32 [E]."""
        return self._part("tokens_per_expert")

    @property
    def padded_tokens_per_expert(self) -> Array:
        """int32 [E], multiples of A."""
        return self._part("padded_tokens_per_expert")

    @property
    def pad_offsets(self) -> Array:
        """int32 [E], the padding of all experts before e: entry (row, e) lies at row + pad_offsets[e]."""
        return self._part("pad_offsets")

    @property
    def expert_offsets(self) -> Array:
        """int32 [E+1], the padded starts; the last is P, the rows the routing asks for."""
        return self._part("expert_offsets")

    @property
    def overflow(self) -> Array:
        """int32 [1], routed rows that found no room and are not in the map."""
        return self._part("overflow")

    @property
    def prob_columns(self) -> int:
        """Columns of a [T, .] probability array that goes with this plan: k, or E for a mask."""
        return self.max_experts_per_token if self.has_slots else self.num_experts

    @property
    def size(self) -> int:
        """Elements that ``data`` has."""
        return self.layout[0]

    @property
    def layout(self) -> PlanLayout:
        return plan_layout(self.num_tokens, self.num_experts, self.max_experts_per_token, self.has_slots)

    def _part(self, name: str) -> Array:
        start, shape = self.layout[1][name]
        if type(self.data) in (DeviceArray, ArraySpec):
            return self.data.part(start, shape)
        return self.data[start : start + math.prod(shape)].reshape(shape)


#: elements of a plan's ``data``, and of its arrays by name the first element and the shape
PlanLayout = tuple[int, dict[str, tuple[int, tuple[int, ...]]]]


def plan_layout(tokens: int, experts: int, width: int, has_slots: bool) -> PlanLayout:
    """The arrays whose place depends on the number of tokens come last: compilers know the places of the
    others."""
    shapes: dict[str, tuple[int, ...]] = {
        "tokens_per_expert": (experts,),
        "padded_tokens_per_expert": (experts,),
        "pad_offsets": (experts,),
        "expert_offsets": (experts + 1,),
        "overflow": (1,),
        "row_id_map": (tokens, 2 * width + 1),
    }
    if has_slots:
        shapes["slots"] = tokens, width
    places, start = {}, 0
    for name, shape in shapes.items():
        places[name] = start, shape
        start += math.prod(shape)
    return start, places


cached_plan_layout = lru_cache(maxsize=1024)(plan_layout)  # of sizes that are numbers, outside of compilers


@dataclass(frozen=True)
class Permuted(Record):
    """Rows in expert order, with their probabilities and the plan that put them there.

    Attributes
    ----------
    data : ArrayLike or QuantTensor, [num_out_tokens, H]
        The rows.
    probs : ArrayLike, [num_out_tokens], or None
        Their probabilities.
    plan : PermutationPlan
        Where they came from.
    """

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
    """Chunks of rows in their new order.

    Attributes
    ----------
    data : ArrayLike or QuantTensor, [num_out_tokens, H]
        The rows.
    probs : ArrayLike, [num_out_tokens], or None
        Their probabilities.
    group_offsets : ArrayLike, int32, [G+1]
        Padded first rows of the groups of chunks, and the last one's end.
    """

    data: Rows
    probs: Array
    group_offsets: Array


@dataclass(frozen=True)
class SwigluGrad(Record):
    """Gradients of SwiGLU.

    Attributes
    ----------
    dh : ArrayLike, QuantTensor or Quantized, [P, 2F]
        An array of `swiglu_backward`; `Quantized` where both orientations were asked for.
    dprobs : ArrayLike, float32, [P], or None
        None without probabilities. float64 where h is.
    """

    dh: Any
    dprobs: Array


@dataclass(frozen=True)
class MoEGrads(Record):
    """Gradients of a layer's experts.

    Attributes
    ----------
    dx : ArrayLike, [T, H], or None
        In x's dtype.
    dprobs : ArrayLike, float32, [T, k], or None
        Of the router's probabilities.
    dw13 : ArrayLike, [E, 2F, H], or None, or a tuple of two
        float32, or as asked for; [E, F, H] each of w1 and w3 apart.
    dw2 : ArrayLike, [E, H, F], or None
        As ``dw13``.
    """

    dx: Array
    dprobs: Array
    dw13: Array
    dw2: Array
