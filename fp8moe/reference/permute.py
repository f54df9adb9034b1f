"""Row movement: permute, unpermute, their backwards, chunk sort, pad and unpad.

All of them are gathers or merges. A *gather* has, for each output row, the input row it copies, or -1 for a
row of zeros. A *merge* sums the rows of each token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe.formats import BFLOAT16, BLOCKED_128X4
from fp8moe.records import PermutationPlan, QuantTensor, SortedChunks
from fp8moe.reference.layout import compact_scratch, to_layout
from fp8moe.reference.numerics import (
    DECODE,
    accumulator_of,
    decode_scales,
    quietly,
    split_rows,
    widen,
)
from fp8moe.runtime.loops import compiled

# ---------------------------------------------------------------- gathers


def permute(
    x: Any, plan: PermutationPlan, probs: Any, *, fill_padding: bool, zero_unweighted: bool, out: Any
) -> None:
    entries = Entries(plan)
    source = inverse(entries.row, entries.token, plan.num_out_tokens)
    if isinstance(x, QuantTensor) and out.data.layout == BLOCKED_128X4:
        compact = compact_scratch(out.data)
        gather_rows(x, source, fill_padding, compact)
        if not fill_padding:
            compact.scales[source < 0] = 0
        to_layout(compact, None, out=out.data)
    else:
        gather_rows(x, source, fill_padding, out.data)
    if probs is not None:
        if fill_padding:
            out.probs[:] = 0
        out.probs[entries.row] = probs[entries.token, entries.column]
    if zero_unweighted:
        unweighted = entries.row[probs[entries.token, entries.column] == 0]
        _data(out.data)[unweighted] = 0


@quietly
def unpermute_backward(
    grad: Any,
    plan: PermutationPlan,
    x: Any,
    merging_probs: np.ndarray | None,
    *,
    out: tuple[Any, Any],
) -> None:
    grad_x, grad_probs = out
    entries = Entries(plan)
    if merging_probs is None:
        gather_rows(grad, inverse(entries.row, entries.token, plan.num_out_tokens), True, grad_x)
        return
    wide = accumulator_of(grad.dtype)
    grad_wide = widen(grad, wide)
    weights = merging_probs[entries.token, entries.column].astype(wide)
    grad_x[:] = 0
    grad_x[entries.row] = (grad_wide[entries.token] * weights[:, None]).astype(grad.dtype)
    grad_probs[:] = 0
    # Summed in float64 and rounded once: within half an ulp of the exact sum, in any order.
    products = grad_wide[entries.token].astype(np.float64) * widen(x[entries.row], wide)
    grad_probs[entries.token, entries.column] = products.sum(axis=1).astype(grad_probs.dtype)


def sort_chunks(
    x: Any,
    split_sizes: np.ndarray,
    sorted_indices: np.ndarray | None,
    probs: np.ndarray | None,
    *,
    align_size: int,
    chunks_per_group: int,
    keep_rest: bool,
    out: SortedChunks,
) -> None:
    rows_in, rows_out = len(_data(x)), len(_data(out.data))
    source, group_offsets = _chunk_sources(
        split_sizes, sorted_indices, align_size, chunks_per_group, keep_rest, rows_in, rows_out
    )
    gather_rows(x, source, True, out.data)
    if probs is not None:
        gather_rows(probs, source, True, out.probs)
    out.group_offsets[:] = group_offsets


def sort_chunks_backward(
    grad: Any,
    split_sizes: np.ndarray,
    sorted_indices: np.ndarray | None,
    grad_probs: np.ndarray | None,
    *,
    align_size: int,
    chunks_per_group: int,
    keep_rest: bool,
    out: tuple[Any, Any],
) -> None:
    rows_in, rows_out = len(_data(out[0])), len(_data(grad))
    source, _ = _chunk_sources(
        split_sizes, sorted_indices, align_size, chunks_per_group, keep_rest, rows_in, rows_out
    )
    moved = np.nonzero(source >= 0)[0]
    back = inverse(source[moved], moved, rows_in)
    gather_rows(grad, back, True, out[0])
    if grad_probs is not None:
        gather_rows(grad_probs, back, True, out[1])


def pad(x: Any, tokens_per_expert: np.ndarray, *, align_size: int, out: Any) -> None:
    padded, compact = _padded_rows(tokens_per_expert, align_size)
    gather_rows(x, _inverse_within(padded, compact, len(_data(out)), len(_data(x))), True, out)


def unpad(x: Any, tokens_per_expert: np.ndarray, *, align_size: int, out: Any) -> None:
    padded, compact = _padded_rows(tokens_per_expert, align_size)
    gather_rows(x, _inverse_within(compact, padded, len(_data(out)), len(_data(x))), True, out)


def gather_rows(x: Any, source: np.ndarray, fill: bool, out: Any) -> None:
    """out[i] = x[source[i]]; where source is -1, zeros (with ``fill``) or unchanged."""
    if isinstance(x, QuantTensor):
        gather_rows(x.data, source, fill, out.data)
        if x.block is not None:
            gather_rows(x.scales, source, fill, out.scales)
        return
    rows_in, rows_out = _row_bytes(x), _row_bytes(out)
    split_rows(_gather_loop, len(out), rows_in, source, fill, rows_out, work=rows_out.size)


@compiled
def _gather_loop(first, last, x, source, fill, out):  # type: ignore[no-untyped-def]
    for i in range(first, last):
        row = source[i]
        if row >= 0:
            for j in range(out.shape[1]):
                out[i, j] = x[row, j]
        elif fill:
            for j in range(out.shape[1]):
                out[i, j] = 0


class Entries:
    """The entries of a row map as flat arrays: token, slot in the map, padded row, probability column."""

    def __init__(self, plan: PermutationPlan):
        width = plan.max_experts_per_token
        self.token, self.place = np.nonzero(np.arange(width) < plan.row_id_map[:, -1:])
        self.expert = plan.row_id_map[self.token, width + self.place]
        self.row = plan.row_id_map[self.token, self.place].astype(np.int64) + plan.pad_offsets[self.expert]
        self.column = self.expert if plan.slots is None else plan.slots[self.token, self.place]


def inverse(row: np.ndarray, value: np.ndarray, size: int) -> np.ndarray:
    """Source of each of ``size`` rows: source[row] = value, -1 elsewhere."""
    source = np.full(size, -1, np.int64)
    source[row] = value
    return source


def _inverse_within(row: np.ndarray, value: np.ndarray, rows: int, values: int) -> np.ndarray:
    """`inverse` without entries that exceed either buffer."""
    inside = (row < rows) & (value < values)
    return inverse(row[inside], value[inside], rows)


def _padded_rows(tokens_per_expert: np.ndarray, align: int) -> tuple[np.ndarray, np.ndarray]:
    """Padded row and compact row of every real row."""
    counts = np.maximum(tokens_per_expert.astype(np.int64), 0)
    padded = -(-counts // align) * align
    compact = np.arange(counts.sum())
    return compact + np.repeat(np.cumsum(padded - counts) - (padded - counts), counts), compact


def _chunk_sources(
    split_sizes: np.ndarray,
    sorted_indices: np.ndarray | None,
    align: int,
    chunks_per_group: int,
    keep_rest: bool,
    rows_in: int,
    rows_out: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Source row of every output row (-1 for padding and tail), and the padded starts of the groups."""
    if sorted_indices is None:
        sorted_indices = np.arange(len(split_sizes))
    sizes = split_sizes.astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    groups = len(sizes) // chunks_per_group
    group_rows = sizes[sorted_indices].reshape(groups, chunks_per_group).sum(axis=1)
    group_offsets = np.concatenate(([0], np.cumsum(-(-group_rows // align) * align)))
    source = np.full(rows_out, -1, np.int64)
    for group in range(groups):
        chunks = sorted_indices[group * chunks_per_group : (group + 1) * chunks_per_group]
        rows = np.concatenate([np.arange(starts[c], starts[c] + sizes[c]) for c in chunks])
        target = group_offsets[group] + np.arange(len(rows))
        inside = target < rows_out
        source[target[inside]] = rows[inside]
    if keep_rest:
        rest = np.arange(sizes.sum(), min(rows_in, rows_out))
        source[rest] = rest
    return source, group_offsets


# ---------------------------------------------------------------- merges


def unpermute(x: Any, plan: PermutationPlan, merging_probs: np.ndarray | None, *, out: np.ndarray) -> None:
    entries, width = Entries(plan), plan.max_experts_per_token
    rows = np.full((plan.num_tokens, width), -1, np.int64)
    rows[entries.token, entries.place] = entries.row
    weights = None
    if merging_probs is not None:
        weights = np.zeros(rows.shape, accumulator_of(out.dtype))
        weights[entries.token, entries.place] = merging_probs[entries.token, entries.column]
    if not isinstance(x, QuantTensor) and out.dtype in (BFLOAT16, np.dtype(np.float32)) and len(x):
        bits = np.uint16 if out.dtype == BFLOAT16 else np.uint32
        shift = np.uint32(16 if out.dtype == BFLOAT16 else 0)
        has_weights = weights is not None
        w = weights if weights is not None else np.ones((1, 1), np.float32)
        split_rows(
            _merge_loop,
            len(out),
            x.view(bits),
            shift,
            rows,
            w,
            has_weights,
            out.view(bits),
            work=out.size * width,
        )
    else:
        merge_plain(x, rows, weights, out)


@quietly
def merge_plain(x: Any, rows: np.ndarray, weights: np.ndarray | None, out: np.ndarray) -> None:
    """out[t] = sum over slots j of x[rows[t, j]] * weights[t, j], in that order, in float32."""
    wide = accumulator_of(out.dtype)
    total = np.zeros(out.shape, wide)
    for place in range(rows.shape[1]):
        has = rows[:, place] >= 0
        if not has.any():
            break  # slots are filled from the left
        values = _decoded_rows(x, rows[has, place], wide)
        if weights is not None:
            values = values * weights[has, place][:, None]
        total[has] += values
    out[:] = total.astype(out.dtype)


@compiled
def _merge_loop(first, last, bits, shift, rows, weights, has_weights, out):  # type: ignore[no-untyped-def]
    width = bits.shape[1]
    value_bits = np.empty(width, np.uint32)
    value = value_bits.view(np.float32)
    total = np.empty(width, np.float32)
    total_bits = total.view(np.uint32)
    for t in range(first, last):
        total[:] = np.float32(0)
        for place in range(rows.shape[1]):
            row = rows[t, place]
            if row < 0:
                break
            for i in range(width):
                value_bits[i] = np.uint32(np.uint32(bits[row, i]) << shift)
            if has_weights:
                w = weights[t, place]
                for i in range(width):
                    total[i] += value[i] * w
            else:
                for i in range(width):
                    total[i] += value[i]
        if shift == 0:
            for i in range(width):
                out[t, i] = total_bits[i]
        else:  # bfloat16, round to nearest even; a NaN stays a NaN
            for i in range(width):
                u = total_bits[i]
                odd = np.uint32(u >> np.uint32(16)) & np.uint32(1)
                rounded = np.uint32(np.uint32(u + np.uint32(0x7FFF)) + odd)
                if (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
                    rounded = u | np.uint32(0x400000)
                out[t, i] = np.uint32(rounded >> np.uint32(16))


def permute_backward(
    grad: Any, plan: PermutationPlan, grad_probs: np.ndarray | None, *, out: tuple[np.ndarray, Any]
) -> None:
    unpermute(grad, plan, None, out=out[0])
    if grad_probs is not None:
        entries = Entries(plan)
        out[1][:] = 0
        out[1][entries.token, entries.column] = grad_probs[entries.row]


# ---------------------------------------------------------------- shared


def _data(x: Any) -> np.ndarray:
    return x.data if isinstance(x, QuantTensor) else x


def _row_bytes(x: np.ndarray) -> np.ndarray:
    """Rows as bytes: copies do not depend on the dtype."""
    return x.reshape(len(x), -1 if x.size else 0).view(np.uint8)


def _decoded_rows(x: Any, rows: np.ndarray, wide: np.dtype) -> np.ndarray:
    if not isinstance(x, QuantTensor):
        return widen(x[rows], wide)
    codes = x.data[rows]
    if x.fmt == "e2m1":
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(len(codes), -1)
    values = DECODE[x.fmt][codes]
    scales = decode_scales(x.scales, x.block)
    if x.block is None:
        return values * scales[0]
    return values * np.repeat(scales[rows], x.block[1], axis=1)[:, : values.shape[1]]
