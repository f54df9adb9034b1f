"""Launchers of expert_parallel.cu: the same names and signatures as `fp8moe.reference.expert_parallel`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp8moe.kernels_cuda.launch import conversion, fill_bytes, launch, scratch, threads
from fp8moe.kernels_cuda.quantize import quantize, quantize_rows, rows_are_whole
from fp8moe.records import QuantTensor

PARTS = 4  # that pack_rows takes


def quantize_and_pack(x: Any, parts: tuple[Any, ...], *, like: QuantTensor, out: Any) -> None:
    """like: what quantize would make of x, as shapes. In one pass where whole rows fit."""
    octets = like.data.shape[1], like.scales.nbytes // x.shape[0]
    blocks = x.size // 128
    if (
        rows_are_whole(x, x.shape[1], replace(like, data=out))
        and octets[1] % 16 == 0
        and out.ptr % 16 == 0
        and blocks < 2**32
    ):
        quantize_rows(x, True, 0.0, out.shape[1], out, None, (*conversion(x, like), "PACKED"))
        if parts:
            behind = replace(out, ptr=out.ptr + sum(octets))
            _pack(parts, behind, False)
        return
    codes, scales = (scratch(s.shape, s.dtype) for s in (like.data, like.scales))
    quantize(x, pow2=True, eps=0.0, out=replace(like, data=codes, scales=scales))
    _pack((codes, scales, *parts), out, False)


def pack_rows(parts: tuple[Any, ...], *, out: Any) -> None:
    _pack(parts, out, False)


def unpack_rows(packed: Any, *, out: tuple[Any, ...]) -> None:
    _pack(out, packed, True)


def _pack(parts: tuple[Any, ...], packed: Any, apart: bool) -> None:
    rows, stride = packed.shape
    arguments: list[Any] = []
    for part in (*parts, *[None] * (PARTS - len(parts))):
        arguments += [part, 0 if part is None else part.nbytes // rows]
    launch("expert_parallel", "pack_rows", threads(rows, 8), 256, *arguments, rows, stride, apart, packed)


def rank_mask(topk_ids: Any, *, experts: int, out: tuple[Any, Any]) -> None:
    tokens, k = topk_ids.shape
    mask, entries = out
    fill_bytes(entries, 0)
    arguments = (topk_ids, topk_ids.dtype.itemsize, tokens, k, experts, entries.shape[0], mask, entries)
    launch("expert_parallel", "rank_mask", threads(tokens), 256, *arguments)


def local_ids(ids: Any, *, first: int, experts: int, out: Any) -> None:
    arguments = (ids, ids.dtype.itemsize, ids.size, first, experts, out)
    launch("expert_parallel", "local_ids", threads(ids.size), 256, *arguments)
