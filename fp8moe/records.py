"""Frozen records, the arguments and results of operations.

Their array fields hold arrays of the caller's framework (NumPy, torch, CuPy, JAX, ...). Inside the library
the same records hold raw buffers, or `ArraySpec` where only shapes are known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fp8moe.formats import Block, is_columnwise, swapped

Array = Any  # an array of the caller's framework
#: Array arguments: contiguous arrays of NumPy, CuPy, torch, JAX or Numba, or any object with DLPack. All
#: arrays of a call must be on one device. Results are arrays of the same framework.
ArrayLike = Any
Rows = Any  # an array or a QuantTensor


# These two are not frozen: a call creates about twenty, and a frozen dataclass takes 0.9 us to create, not
# 0.2 us.


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
        """Spec of a contiguous part of the array."""
        return ArraySpec(shape, self.dtype)


@dataclass(slots=True, eq=False)
class DeviceArray:
    """A C-contiguous array in CUDA memory, as kernels receive it. ``owner`` keeps the memory alive; the array
    starts ``start`` bytes after the owner's first byte."""

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
        """The same memory as another dtype of the same size."""
        return replace(self, dtype=np.dtype(dtype))

    def part(self, start: int, shape: tuple[int, ...], dtype: np.dtype | None = None) -> DeviceArray:
        """The memory from element ``start`` on as an array, optionally of another dtype."""
        offset = start * self.dtype.itemsize
        dtype = self.dtype if dtype is None else dtype
        return DeviceArray(self.ptr + offset, shape, dtype, self.device, self.owner, self.start + offset)


class Options:
    """A frozen record of plain values without arrays, comparable and hashable."""


class Record:
    """A frozen record of arrays and plain values, argument or result of operations."""

    def changed(self, **fields: Any) -> Any:
        """`dataclasses.replace` of a record whose fields are not checked when it is made: 0.6 us, not 5."""
        new = object.__new__(type(self))
        new.__dict__.update(vars(self))
        new.__dict__.update(fields)
        return new


@dataclass(frozen=True)
class QuantTensor(Record):
    """A block-scaled tensor: value = decode(data) * the scale of its block.

    Attributes
    ----------
    data : ArrayLike, uint8
        Codes: [M, K] (row-wise); [K, M] (column-wise, stored transposed); [E, N, K] or [E, K, N] (weights,
        row-wise or column-wise); [M, K/2] (``e2m1``, two per byte, low nibble first).
    scales : ArrayLike, float32 or uint8
        Dequantisation scales (Transformer Engine's ``scale_inv``): float32, uint8 E8M0 exponents (block 32),
        or uint8 e4m3 (block 16). Shapes: row-wise compact [M, ceil(K/B)]; ``gemm_ready`` [ceil(K/128),
        roundup(M, 4)]; column-wise [ceil(M/B), K]; ``blocked_128x4`` see `to_layout`; (128, 128) blocks: the
        shape of ``data`` divided by 128 in both dimensions, rounded up; one scale per tensor [1].
    fmt : "e4m3", "e5m2" or "e2m1"
        Format of the codes. e4m3 is the variant without infinities, with largest value 448.
    block : tuple of int or None
        (1, 128), (128, 1), (128, 128), (1, 32), (32, 1) or (1, 16), in rows and columns of the logical
        matrix; None: one scale per tensor.
    layout : "compact", "gemm_ready" or "blocked_128x4"
        Layout of the scales: "gemm_ready" only for block (1, 128), "blocked_128x4" only for MXFP8.
    transposed : bool
        For (128, 128) blocks, whether codes and scales are stored transposed. Codes with block (128, 1) or
        (32, 1) always are, the others never.
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
        """The logical shape [M, K] (or [E, N, K]), independent of how the codes are stored."""
        shape = tuple(self.data.shape)
        if self.columnwise:
            return swapped(shape)
        return (*shape[:-1], shape[-1] * 2) if self.fmt == "e2m1" else shape


@dataclass(frozen=True)
class Quantized(Record):
    """Both orientations of one tensor, or one of them.

    Attributes
    ----------
    rowwise : QuantTensor
        Stored row-major. None in saved weights whose backward does not need it
        (`fp8moe.layer.saved.Saved`).
    columnwise : QuantTensor
        Stored transposed. None in weights of which the row-wise codes alone are kept: `transpose_codes`
        derives it.
    """

    rowwise: QuantTensor
    columnwise: QuantTensor = None  # type: ignore[assignment]  # readers of both need not ask

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, of whichever orientation there is."""
        return (self.columnwise if self.rowwise is None else self.rowwise).shape


@dataclass(frozen=True)
class PermutationPlan(Record):
    """The destination row of every routed token.

    It is stored on the device of the routing, in one array; the properties below are views of it. Symbols: T
    tokens, E experts, R maximum experts per token, A alignment. Counts and offsets describe the complete
    routing, even if ``num_out_tokens`` is too small for it; readers of ``expert_offsets`` must stop at
    ``num_out_tokens``.

    Attributes
    ----------
    data : ArrayLike, int32, [size]
        All arrays of the plan, concatenated.
    num_tokens : int
        T.
    num_experts : int
        E.
    max_experts_per_token : int
        R.
    has_slots : bool
        Whether the plan has ``slots``: True for a plan from top-k ids, False for one from a mask.
    num_out_tokens : int
        Number of rows of the permuted buffer; nothing is written past it.
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
        """int32 [T, 2R+1]. Row t has n_t destination rows, before adding pad offsets, in descending order;
        from column R on, their n_t expert ids; in the last column, n_t. The other elements are -1. With R = E
        this is Transformer Engine's layout."""
        return self._part("row_id_map")

    @property
    def slots(self) -> Array:
        """int32 [T, R], the column of topk_ids of each entry, -1 past n_t; None for a plan from a mask."""
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
        """int32 [E], the total padding of the experts before e: entry (row, e) is stored at row +
        pad_offsets[e]."""
        return self._part("pad_offsets")

    @property
    def expert_offsets(self) -> Array:
        """int32 [E+1], the first row of each expert, with padding; the last is P, the rows that the routing
        needs."""
        return self._part("expert_offsets")

    @property
    def overflow(self) -> Array:
        """int32 [1], number of routed rows that did not fit and are not in the map."""
        return self._part("overflow")

    @property
    def prob_columns(self) -> int:
        """Number of columns of the probabilities for this plan: k, or E for a plan from a mask."""
        return self.max_experts_per_token if self.has_slots else self.num_experts

    @property
    def size(self) -> int:
        """Number of elements of ``data``."""
        return self.layout[0]

    @property
    def layout(self) -> PlanLayout:
        return plan_layout(self.num_tokens, self.num_experts, self.max_experts_per_token, self.has_slots)

    def _part(self, name: str) -> Array:
        kind = type(self.data)
        # not for a framework's arrays, as a compiler would trace the cache, nor for its symbols
        sizes = self.num_tokens, self.num_experts, self.max_experts_per_token
        cached = kind in (DeviceArray, np.ndarray) and [*map(type, sizes)] == [int, int, int]
        layout = cached_plan_layout if cached else plan_layout
        start, shape = layout(*sizes, self.has_slots)[1][name]
        if kind in (DeviceArray, ArraySpec):
            return self.data.part(start, shape)
        return self.data[start : start + math.prod(shape)].reshape(shape)


#: (number of elements of a plan's ``data``, {name of an array: (its first element, its shape)})
PlanLayout = tuple[int, dict[str, tuple[int, tuple[int, ...]]]]


def plan_layout(tokens: int, experts: int, width: int, has_slots: bool) -> PlanLayout:
    """Offsets and shapes of a plan's arrays. The two whose size depends on the number of tokens come last, so
    that the offsets of the others are constants for compilers."""
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
    offsets, start = {}, 0
    for name, shape in shapes.items():
        offsets[name] = start, shape
        start += math.prod(shape)
    return start, offsets


cached_plan_layout = lru_cache(maxsize=1024)(plan_layout)  # for integer sizes, not symbolic ones


@dataclass(frozen=True)
class Permuted(Record):
    """Rows sorted by expert, with their probabilities and the plan.

    Attributes
    ----------
    data : ArrayLike or QuantTensor, [num_out_tokens, H]
        The rows.
    probs : ArrayLike, [num_out_tokens], or None
        Their probabilities.
    plan : PermutationPlan
        The plan that permuted them.
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
    """Reordered chunks of rows.

    Attributes
    ----------
    data : ArrayLike or QuantTensor, [num_out_tokens, H]
        The rows.
    probs : ArrayLike, [num_out_tokens], or None
        Their probabilities.
    group_offsets : ArrayLike, int32, [G+1]
        First row of each group of chunks, with padding, and the end of the last group.
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
        An array from `swiglu_backward`; `Quantized` if both orientations were requested.
    dprobs : ArrayLike, float32, [P], or None
        None without probabilities; float64 if h is float64.
    """

    dh: Any
    dprobs: Array


@dataclass(frozen=True)
class MoEGrads(Record):
    """Gradients of an expert layer.

    Attributes
    ----------
    dx : ArrayLike, [T, H], or None
        In x's dtype.
    dprobs : ArrayLike, float32 (float64 for float64 inputs), [T, k], or None
        Gradient of the router's probabilities.
    dw13 : ArrayLike, [E, 2F, H], or None, or a tuple of two
        float32, or the requested dtype; a tuple has w1's and w3's gradients, [E, F, H] each.
    dw2 : ArrayLike, [E, H, F], or None
        As ``dw13``.
    dbias13 : ArrayLike, float32 (float64 for float64 inputs), [E, 2F], or None
        None for a layer without bias13.
    """

    dx: Array
    dprobs: Array
    dw13: Array
    dw2: Array
    dbias13: Array = None
