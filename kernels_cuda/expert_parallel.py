"""Launchers of expert_parallel.cu, with the names and signatures of `fp8moe.reference.expert_parallel`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp8moe.kernels_cuda.quantize import by_warps, quantize, rows_are_whole
from fp8moe.kernels_cuda.runtime.encodings import conversion
from fp8moe.kernels_cuda.runtime.launch import fill_bytes, launch, scratch, threads
from fp8moe.records import PermutationPlan, QuantTensor

PARTS = 4  # maximum arrays of pack_rows
PEERS = 8  # must match MOST_PEERS in expert_parallel.cu
NEVER = 2**62  # first slot of an unused window, past all rows


def quantize_and_pack(
    x: Any, parts: tuple[Any, ...], row_id_map: Any, *, like: QuantTensor, out: tuple[Any, ...]
) -> None:
    """Packs codes, scales and parts; in one pass if rows are whole vectors. like: shapes of x's codes and
    scales."""
    row_bytes = like.data.shape[1], like.scales.nbytes // x.shape[0]
    if (
        rows_are_whole(x, x.shape[1], replace(like, data=out[0]))
        and row_bytes[1] % 16 == 0
        and all(window.ptr % 16 == 0 for window in out)
        and x.size // 128 < 2**32
    ):
        variant = (*conversion(x, like), f"PEERS={PEERS if len(out) > 1 else 1}")
        arguments = (x, x.size // 8, x.shape[1] // 128, *_where(row_id_map, out))
        launch("expert_parallel", "quantize_messages", *by_warps(x.size).grid, *arguments, defines=variant)
        if parts:
            after = sum(row_bytes)
            rest = tuple(replace(w, ptr=w.ptr + after, start=w.start + after) for w in out)
            _pack(parts, row_id_map, rest)
        return
    codes, scales = (scratch(s.shape, s.dtype) for s in (like.data, like.scales))
    quantize(x, round_up=True, eps=0.0, out=replace(like, data=codes, scales=scales))
    _pack((codes, scales, *parts), row_id_map, out)


def pack_rows(parts: tuple[Any, ...], row_id_map: Any, *, out: tuple[Any, ...]) -> None:
    _pack(parts, row_id_map, out)


def unpack_rows(packed: Any, *, out: tuple[Any, ...]) -> None:
    rows, stride = packed.shape
    size = out[0].shape[0]
    arguments = (*_each(out, size), rows, stride, packed, size)
    launch("expert_parallel", "unpack_rows", threads(size, 8), 256, *arguments)


def _pack(parts: tuple[Any, ...], row_id_map: Any, out: tuple[Any, ...]) -> None:
    rows = parts[0].shape[0]
    arguments = (*_each(parts, rows), rows, *_where(row_id_map, out))
    launch("expert_parallel", "pack_rows", threads(rows, 8), 256, *arguments)


def _each(parts: tuple[Any, ...], rows: int) -> list[Any]:
    """The non-empty parts, each with its bytes per row, padded to PARTS."""
    arguments: list[Any] = []
    for part in parts:
        if part.nbytes:
            arguments += [part, part.nbytes // rows]
    return [*arguments, *[None, 0] * (PARTS - len(arguments) // 2)]


def _where(row_id_map: Any, windows: tuple[Any, ...]) -> list[Any]:
    """Arguments of the kernels' Windows."""
    if len(windows) > PEERS:
        raise ValueError(f"windows: got {len(windows)}; wanted at most {PEERS}; use a Transport by messages")
    arguments = [windows[0].shape[1], row_id_map, 0 if row_id_map is None else row_id_map.shape[1] // 2]
    before = 0
    for window in windows:
        arguments += [window, before]
        before += window.shape[0]
    return [*arguments, *[None, NEVER] * (PEERS - len(windows))]


def rank_mask(topk_ids: Any, *, experts: int, out: tuple[Any, Any]) -> None:
    tokens, k = topk_ids.shape
    mask, entries = out
    fill_bytes(entries, 0)
    arguments = (topk_ids, topk_ids.dtype.itemsize, tokens, k, experts, entries.shape[0], mask, entries)
    launch("expert_parallel", "rank_mask", threads(tokens), 256, *arguments)


def local_ids(ids: Any, *, first: int, experts: int, rows: int, out: Any) -> None:
    count = rows * ids.shape[1]
    arguments = (ids, ids.dtype.itemsize, count, first, experts, out)
    launch("expert_parallel", "local_ids", threads(count), 256, *arguments)
    fill_bytes(out.part(count, (ids.size - count,)), 0xFF)  # -1 in rows not received


def limit_rows(plan: PermutationPlan, *, capacity: int, out: PermutationPlan) -> None:
    ranks = plan.num_experts
    arguments = (plan.row_id_map, plan.tokens_per_expert, plan.expert_offsets, plan.overflow)
    sizes = plan.num_tokens, plan.max_experts_per_token, ranks, capacity
    new = (
        out.row_id_map,
        out.tokens_per_expert,
        out.padded_tokens_per_expert,
        out.pad_offsets,
        out.expert_offsets,
        out.overflow,
    )
    blocks = max(1, threads(plan.num_tokens))
    launch("expert_parallel", "limit_rows", blocks, 256, *arguments, *sizes, *new, shared=4 * ranks)
