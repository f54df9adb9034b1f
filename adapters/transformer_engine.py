"""Drop-in for the permutation names of ``transformer_engine.pytorch`` (checked against version 2.20).

Same arguments, order and results: the row map's layout, ``pad_offsets=None`` when every expert is aligned,
and zero rows for a probability of exactly 0.0 (`moe_permute_with_probs` and its padded twin only), which
their callers use to drop tokens from a routing of fixed width. FP8 goes through
`fp8moe.QuantTensor` in place of Transformer Engine's own tensor classes. Tensors may have any strides: those
that are not contiguous are copied first.

    import fp8moe.adapters.transformer_engine as te   # in place of: import transformer_engine.pytorch as te
"""

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8moe import PermutationPlan, QuantTensor, row_maps
from fp8moe.adapters import torch_ops
from fp8moe.formats import round_up

Rows = Any  # a tensor or a QuantTensor


def moe_permute(
    inp: Rows,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Rows, Tensor]:
    """Rows in expert order, and the map that `moe_unpermute` takes.

    inp: [T, H]. map_type "mask": routing_map [T, E] of 0 and 1; num_out_tokens: rows of the result, which
    here may also be -1: counted, which synchronises once. The map is int32 [T, 2E+1].
    map_type "index": routing_map int32 [T, k] of expert ids; num_out_tokens <= 0 means T * k; rows
    past it are dropped. The map is int32 [k * T]: the row of entry (t, j) at j * T + t, -1 if dropped.
    Only the order of the ids counts, not how large they are; a negative one takes no row.
    max_token_num is a hint for a workspace that is not needed here.
    """
    if map_type == "index":
        return _permute_by_index(inp, routing_map, num_out_tokens)
    _check_map_type(map_type)
    plan = _mask_plan(routing_map, num_out_tokens)
    return torch_ops.permute(contiguous(inp), plan).data, plan.row_id_map


def moe_permute_with_probs(
    inp: Rows, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Rows, Tensor, Tensor]:
    """(rows, probs [rows], row map) by a mask; probs [T, E]. A row whose probability is 0.0 is zeros.

    num_out_tokens: as for `moe_permute`.
    """
    plan = _mask_plan(routing_map, num_out_tokens)
    rows, moved = _permute_with_probs(inp, probs, plan)
    return rows, moved, plan.row_id_map


def moe_permute_and_pad_with_probs(
    inp: Rows, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Rows, Tensor, Tensor, Tensor | None, Tensor]:
    """(rows, probs, row map, pad_offsets or None, padded tokens_per_expert int64) by a mask.

    pad_offsets is None when every expert is aligned already. Like the original it synchronises once, for
    the sizes. Padding rows and their probabilities are zeros.
    """
    if tokens_per_expert is None:
        raise ValueError("tokens_per_expert: got None; wanted the counts [E] of the mask")
    if align_size <= 0:
        raise ValueError(f"align_size: got {align_size}; wanted 1 or more")
    plan = torch_ops.plan_routing_map(contiguous(routing_map), align_size=align_size, num_out_tokens="exact")
    rows, moved = _permute_with_probs(inp, probs, plan)
    padded = plan.padded_tokens_per_expert.long()
    aligned = plan.num_out_tokens == int(plan.tokens_per_expert.sum())
    return rows, moved, plan.row_id_map, None if aligned else plan.pad_offsets, padded


def moe_unpermute(
    inp: Rows,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Sum each token's rows, each times its merging probability where given.

    map_type "mask": merging_probs [T, E], restore_shape (T, H), by default inp's own.
    map_type "index": merging_probs float [T, k]; without them k is 1, as in the original.
    probs: the old name of merging_probs. pad_offsets: from `moe_permute_and_pad_with_probs`.
    """
    if probs is not None:
        if merging_probs is not None:
            raise ValueError("probs: got it beside merging_probs; wanted one of them; probs is deprecated")
        warnings.warn("probs is deprecated; use merging_probs", DeprecationWarning, stacklevel=2)
        merging_probs = probs
    inp, row_id_map, merging_probs = contiguous(inp), contiguous(row_id_map), contiguous(merging_probs)
    if map_type == "index":
        return _unpermute_by_index(inp, row_id_map, merging_probs)
    _check_map_type(map_type)
    num_rows = inp.data.shape[0] if isinstance(inp, QuantTensor) else inp.shape[0]
    tokens = num_rows if restore_shape is None else restore_shape[0]
    if row_id_map.shape[0] != tokens:
        raise ValueError(
            f"restore_shape: got {tokens} tokens for a row map of {row_id_map.shape[0]}; wanted the same; "
            "pass restore_shape=(T, H)"
        )
    row_id_map = row_id_map.to(torch.int32)
    pads = None if pad_offsets is None else pad_offsets.to(torch.int32).contiguous()
    plan = row_maps.plan_of_map(_ARRAYS, row_id_map, pads, num_rows)
    return torch_ops.unpermute(inp, plan, merging_probs)


def moe_sort_chunks_by_index(inp: Rows, split_sizes: Tensor, sorted_index: Tensor) -> Rows:
    """Chunks of rows in another order: chunk j of the result is chunk ``sorted_index[j]`` of inp. Rows past
    the chunks stay where they are."""
    chunks = contiguous(split_sizes), contiguous(sorted_index)
    return torch_ops.sort_chunks(contiguous(inp), *chunks, keep_rest=True).data


def moe_sort_chunks_by_index_with_probs(
    inp: Rows, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Rows, Tensor]:
    """`moe_sort_chunks_by_index` that moves probs [N] along."""
    chunks = contiguous(split_sizes), contiguous(sorted_index)
    got = torch_ops.sort_chunks(contiguous(inp), *chunks, contiguous(probs), keep_rest=True)
    return got.data, got.probs


class Fp8Padding(torch.nn.Module):
    """Pad each of ``num_gemms`` successive groups of rows to a multiple of ``align_size``.

    align_size: 16 for per-tensor and blockwise FP8, 32 for MXFP8; by default 16.
    """

    def __init__(self, num_gemms: int, align_size: int | None = None):
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or 16

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """(padded rows, padded splits); inp itself when nothing is to do."""
        padded = _padded_splits(self, m_splits)
        if padded == m_splits:
            return inp, m_splits
        return _resize(torch_ops.pad, inp, m_splits, self.align_size, sum(padded)), padded


class Fp8Unpadding(torch.nn.Module):
    """Take the padding of `Fp8Padding` out again."""

    def __init__(self, num_gemms: int, align_size: int | None = None):
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or 16

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        """Rows without padding; inp itself when there is none. m_splits: the real sizes."""
        if _padded_splits(self, m_splits) == m_splits:
            return inp
        return _resize(torch_ops.unpad, inp, m_splits, self.align_size, sum(m_splits))


def _padded_splits(module: Fp8Padding | Fp8Unpadding, m_splits: list[int]) -> list[int]:
    if len(m_splits) != module.num_gemms:
        raise ValueError(f"m_splits: got {len(m_splits)} sizes; wanted num_gemms = {module.num_gemms}")
    return [round_up(m, module.align_size) for m in m_splits]


def _resize(verb, inp: Tensor, m_splits: list[int], align_size: int, rows: int) -> Tensor:  # type: ignore[no-untyped-def]
    flat = contiguous(inp.reshape(-1, inp.shape[-1]))
    counts = torch.tensor(m_splits, dtype=torch.int32).to(inp.device)
    return verb(flat, counts, align_size, num_out_tokens=rows)


def contiguous(x: Any) -> Any:
    """A tensor, the tensors of a QuantTensor, or None, as the kernels take them."""
    if isinstance(x, Tensor):
        return x.contiguous()
    if x is None:
        return x
    return replace(x, data=x.data.contiguous(), scales=x.scales.contiguous())


def _check_map_type(map_type: str) -> None:
    if map_type != "mask":
        raise ValueError(f"map_type: got {map_type!r}; wanted 'mask' or 'index'")


def _mask_plan(routing_map: Tensor, num_out_tokens: int) -> PermutationPlan:
    rows: Any = "exact" if num_out_tokens is None or num_out_tokens < 0 else num_out_tokens
    return torch_ops.plan_routing_map(contiguous(routing_map), num_out_tokens=rows)


def _permute_with_probs(inp: Rows, probs: Tensor, plan: PermutationPlan) -> tuple[Rows, Tensor]:
    moved = torch_ops.permute(contiguous(inp), plan, contiguous(probs))
    dropped = (moved.probs == 0).unsqueeze(1)
    if isinstance(moved.data, QuantTensor):
        return replace(moved.data, data=moved.data.data.masked_fill(dropped, 0)), moved.probs
    # Only the values: as in the original, the gradient of a dropped row still reaches its token.
    return _ZeroRows.apply(moved.data, dropped), moved.probs


class _ZeroRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, dropped):  # type: ignore[no-untyped-def]
        return rows.masked_fill(dropped, 0)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


class _Arrays:
    """torch's `fp8moe.row_maps.Namespace`."""

    where: Any = staticmethod(torch.where)
    join: Any = staticmethod(torch.cat)

    def side_by_side(self, arrays: list[Tensor]) -> Tensor:
        return torch.cat(arrays, dim=1)

    def sum_rows(self, x: Tensor) -> Tensor:
        return x.sum(dim=1, keepdim=True, dtype=torch.int32)

    def count(self, numbers: Tensor, bins: int) -> Tensor:
        ones = torch.ones_like(numbers, dtype=torch.int32)
        return ones.new_zeros(bins).scatter_add(0, numbers.long(), ones)

    def running_sum(self, x: Tensor) -> Tensor:
        return x.cumsum(0, dtype=torch.int32)

    def ranks(self, x: Tensor) -> Tensor:
        order = x.sort(stable=True).indices
        numbers = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        return torch.empty_like(numbers).scatter_(0, order, numbers)

    def descending(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.sort(dim=1, descending=True, stable=True)
        return values, places.to(torch.int32)


_ARRAYS = _Arrays()


def _permute_by_index(inp: Rows, indices: Tensor, num_out_tokens: int) -> tuple[Rows, Tensor]:
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"routing_map: got dtype {indices.dtype}; wanted int32 or int64, the ids of experts")
    if indices.dim() != 2:
        raise ValueError(f"routing_map: got shape {list(indices.shape)}; wanted [T, k]")
    tokens, k = indices.shape
    num_rows = num_out_tokens if tokens and num_out_tokens > 0 else tokens * k
    row_id_map = row_maps.index_map(_ARRAYS, indices, num_rows)
    plan = row_maps.plan_of_index_map(_ARRAYS, row_id_map, k, num_rows)
    return torch_ops.permute(contiguous(inp), plan).data, row_id_map


def _unpermute_by_index(inp: Rows, row_id_map: Tensor, probs: Tensor | None) -> Tensor:
    if probs is not None and probs.dtype != torch.float32:
        warnings.warn(f"probs of {probs.dtype} are converted to float32", stacklevel=3)
        probs = probs.to(torch.float32)
    k = 1 if probs is None else probs.shape[1]
    num_rows = inp.data.shape[0] if isinstance(inp, QuantTensor) else inp.shape[0]
    return torch_ops.unpermute(inp, row_maps.plan_of_index_map(_ARRAYS, row_id_map, k, num_rows), probs)
