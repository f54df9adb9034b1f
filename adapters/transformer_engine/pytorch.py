"""Drop-in replacement for the permutation functions of ``transformer_engine.pytorch`` (checked against 2.20).

Arguments, order and results are the same: the layout of the row map, ``pad_offsets=None`` if every expert is
already aligned, and zero rows for a probability of exactly 0.0 (only in `moe_permute_with_probs` and its
padded variant), which callers use to drop tokens from a routing of fixed width. FP8 tensors are
`fp8moe.QuantTensor` instead of Transformer Engine's tensor classes. Tensors may have any strides:
non-contiguous ones are copied first.

    import fp8moe.transformer_engine.pytorch as te   # in place of: import transformer_engine.pytorch as te
"""

import warnings
from dataclasses import replace
from typing import Any

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor

from fp8moe import PermutationPlan, QuantTensor
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch.library import operator_of
from fp8moe.formats import round_up
from fp8moe.ops import row_maps

__all__ = [
    "Fp8Padding",
    "Fp8Unpadding",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]

Rows = Any  # a tensor or a QuantTensor


def moe_permute(
    inp: Rows,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Rows, Tensor]:
    """Permute rows into expert order.

    Parameters
    ----------
    inp : Tensor or QuantTensor, [T, H]
        A tensor of any dtype, or row-wise codes, whose scales are permuted too.
    routing_map : Tensor, bool or integer [T, E], or int32 or int64 [T, k]
        "mask": nonzero where a token is routed. "index": expert ids, used only for sorting, so they may have
        any size; negative ids have no row.
    num_out_tokens : int
        Number of rows of the result; further rows are dropped. "mask": -1 for the number of routed rows,
        which **synchronises once**. "index": 0 or less for T * k.
    max_token_num : int
        Not used; in Transformer Engine a hint for the workspace size.
    map_type : "mask" or "index"
        Meaning of ``routing_map``.

    Returns
    -------
    rows : Tensor or QuantTensor, [num_out_tokens, H]
        Sorted by expert, then by token. Differentiable in ``inp``.
    row_id_map : Tensor, int32
        Argument of `moe_unpermute`. "mask": [T, 2E+1], as `fp8moe.PermutationPlan.row_id_map`. "index":
        [k * T], with the row of token t's entry j at j * T + t, -1 if it is dropped.

    Raises
    ------
    TypeError, ValueError
        For a routing_map of another dtype or shape, or an invalid map_type.

    Notes
    -----
    Replaces ``transformer_engine.pytorch.moe_permute``.

    Examples
    --------
    >>> import torch
    >>> import fp8moe.transformer_engine.pytorch as te
    >>> x, mask = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0, 1], [1, 1], [1, 0]])
    >>> rows, row_id_map = te.moe_permute(x, mask, num_out_tokens=4)
    >>> rows.ravel().tolist(), row_id_map.tolist()[1]
    ([2.0, 3.0, 1.0, 2.0], [3, 0, 1, 0, 2])
    """
    if map_type == "index":
        return _permute_by_index(inp, routing_map, num_out_tokens)
    _check_map_type(map_type)
    plan = _mask_plan(routing_map, num_out_tokens)
    return torch_ops.permute(contiguous(inp), plan).data, plan.row_id_map


def moe_permute_with_probs(
    inp: Rows, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Rows, Tensor, Tensor]:
    """Permute rows and their probabilities into expert order, by a mask.

    Parameters
    ----------
    inp : Tensor or QuantTensor, [T, H]
        As in `moe_permute`.
    probs : Tensor, floating point, [T, E]
        Routing probabilities. A row with a probability of exactly 0.0 becomes zeros, by which callers drop
        tokens from a routing of fixed width; its gradient still reaches its token.
    routing_map : Tensor, bool or integer, [T, E]
        Nonzero where a token is routed.
    num_out_tokens : int
        As in `moe_permute`.

    Returns
    -------
    rows : Tensor or QuantTensor, [num_out_tokens, H]
        Rows in expert order. Differentiable in ``inp``.
    probs : Tensor, [num_out_tokens]
        Probabilities of the rows. Differentiable in ``probs``.
    row_id_map : Tensor, int32, [T, 2 * E + 1]
        Argument of `moe_unpermute`.

    Raises
    ------
    TypeError, ValueError
        As in `moe_permute`, and for probs of another shape.

    Notes
    -----
    Replaces ``transformer_engine.pytorch.moe_permute_with_probs``.

    Examples
    --------
    >>> import torch
    >>> import fp8moe.transformer_engine.pytorch as te
    >>> x, mask = torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 1], [1, 1]])
    >>> probs = torch.tensor([[0.0, 0.5], [0.25, 0.0]])
    >>> rows, moved, _ = te.moe_permute_with_probs(x, probs, mask, num_out_tokens=3)
    >>> rows.ravel().tolist(), moved.tolist()
    ([2.0, 1.0, 0.0], [0.25, 0.5, 0.0])
    """
    plan = _mask_plan(routing_map, num_out_tokens)
    rows, moved = _permute_with_probs(inp, probs, plan)
    return rows, moved, plan.row_id_map


def moe_permute_and_pad_with_probs(
    inp: Rows, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Rows, Tensor, Tensor, Tensor | None, Tensor]:
    """Permute rows and their probabilities into expert order with padding, by a mask.

    Parameters
    ----------
    inp : Tensor or QuantTensor, [T, H]
        As in `moe_permute`.
    probs : Tensor, floating point, [T, E]
        As in `moe_permute_with_probs`.
    routing_map : Tensor, bool or integer, [T, E]
        Nonzero where a token is routed.
    tokens_per_expert : Tensor, integer, [E]
        Number of rows of each expert in the mask; recomputed from the mask.
    align_size : int
        Each expert's rows are padded to a multiple of this number, with zero rows and probabilities.

    Returns
    -------
    rows : Tensor or QuantTensor, [P, H]
        P rows including padding. The host reads P, so like the original this **synchronises once**.
    probs : Tensor, [P]
        Probabilities of the rows.
    row_id_map : Tensor, int32, [T, 2 * E + 1]
        Argument of `moe_unpermute`.
    pad_offsets : Tensor, int32, [E], or None
        Argument of `moe_unpermute`: padding before each expert; None if all experts are aligned already.
    tokens_per_expert : Tensor, int64, [E]
        Number of rows of each expert, with padding.

    Raises
    ------
    TypeError, ValueError
        As in `moe_permute_with_probs`, and for an align_size below 1.

    Notes
    -----
    Replaces ``transformer_engine.pytorch.moe_permute_and_pad_with_probs``, its PR #1921.

    Examples
    --------
    >>> import torch
    >>> import fp8moe.transformer_engine.pytorch as te
    >>> x, mask = torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 1], [1, 1]])
    >>> rows, *_, pads, counts = te.moe_permute_and_pad_with_probs(x, mask.float(), mask, mask.sum(0), 2)
    >>> rows.ravel().tolist(), pads.tolist(), counts.tolist()
    ([2.0, 0.0, 1.0, 2.0], [0, 1], [2, 2])
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
    """Sum each token's rows, each multiplied by its merging probability if given.

    Parameters
    ----------
    inp : Tensor or QuantTensor, [rows, H]
        Rows in the order of `moe_permute`; codes are dequantised while they are read.
    row_id_map : Tensor, int32, [T, 2 * E + 1] or [k * T]
        Row map of `moe_permute`, or Transformer Engine's own.
    merging_probs : Tensor, floating point, [T, E] or [T, k], or None
        "mask": [T, E]. "index": [T, k], converted to float32; without them k is 1, as in the original.
    restore_shape : torch.Size or None
        (T, H) for "mask"; None: the shape of inp.
    map_type : "mask" or "index"
        Type of ``row_id_map``.
    probs : Tensor or None
        Deprecated name of ``merging_probs``.
    pad_offsets : Tensor, int32, [E], or None
        As returned by `moe_permute_and_pad_with_probs`; only with "mask".

    Returns
    -------
    Tensor, [T, H]
        The sums in inp's dtype, computed in float32 (float64 for float64). Differentiable in ``inp`` and
        ``merging_probs``. The call does not synchronise.

    Raises
    ------
    TypeError, ValueError
        For arguments that are inconsistent with the map.

    Notes
    -----
    Replaces ``transformer_engine.pytorch.moe_unpermute``. The permutation plan is recomputed in one pass over
    the map (`fp8moe.plan_row_map`, `fp8moe.plan_index_map`): it reads and writes 17 MB for 4096 tokens and
    256 experts, where the rows are 500 MB. If you have the plan, call `fp8moe.torch.unpermute`.

    Examples
    --------
    >>> import torch
    >>> import fp8moe.transformer_engine.pytorch as te
    >>> x, mask = torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 1], [1, 1]])
    >>> rows, row_id_map = te.moe_permute(x, mask, num_out_tokens=3)
    >>> te.moe_unpermute(rows, row_id_map, restore_shape=x.shape).ravel().tolist()
    [1.0, 4.0]
    """
    if probs is not None:
        if merging_probs is not None:
            raise ValueError(
                "probs: got it together with merging_probs; wanted one of them; probs is deprecated"
            )
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
    plan = torch_ops.plan_row_map(row_id_map, pads, num_out_tokens=num_rows)
    return torch_ops.unpermute(inp, plan, merging_probs)


def moe_sort_chunks_by_index(inp: Rows, split_sizes: Tensor, sorted_index: Tensor) -> Rows:
    """Reorder chunks of rows.

    Parameters
    ----------
    inp : Tensor or QuantTensor, [N, H]
        Rows, chunk after chunk.
    split_sizes : Tensor, int32 or int64, [C]
        Number of rows of each chunk. Rows after the last chunk are copied unchanged.
    sorted_index : Tensor, int32 or int64, [C]
        Chunk j of the result is chunk ``sorted_index[j]`` of inp.

    Returns
    -------
    Tensor or QuantTensor, [N, H]
        Reordered rows. Differentiable in ``inp``. The call does not synchronise.

    Raises
    ------
    TypeError, ValueError
        As in `fp8moe.sort_chunks`.

    Notes
    -----
    Replaces ``transformer_engine.pytorch.moe_sort_chunks_by_index``.

    Examples
    --------
    >>> import torch
    >>> import fp8moe.transformer_engine.pytorch as te
    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> te.moe_sort_chunks_by_index(x, torch.tensor([2, 1]), torch.tensor([1, 0])).ravel().tolist()
    [3.0, 1.0, 2.0]
    """
    chunks = contiguous(split_sizes), contiguous(sorted_index)
    return torch_ops.sort_chunks(contiguous(inp), *chunks, keep_rest=True).data


def moe_sort_chunks_by_index_with_probs(
    inp: Rows, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Rows, Tensor]:
    """Reorder chunks of rows and their probabilities.

    Parameters
    ----------
    inp : Tensor or QuantTensor, [N, H]
        As in `moe_sort_chunks_by_index`.
    probs : Tensor, floating point, [N]
        Probabilities of the rows.
    split_sizes : Tensor, int32 or int64, [C]
        As in `moe_sort_chunks_by_index`.
    sorted_index : Tensor, int32 or int64, [C]
        As in `moe_sort_chunks_by_index`.

    Returns
    -------
    rows : Tensor or QuantTensor, [N, H]
        Reordered rows. Differentiable in ``inp``.
    probs : Tensor, [N]
        Reordered probabilities. Differentiable in ``probs``.

    Raises
    ------
    TypeError, ValueError
        As in `fp8moe.sort_chunks`.

    Notes
    -----
    Replaces ``transformer_engine.pytorch.moe_sort_chunks_by_index_with_probs``.

    Examples
    --------
    >>> import torch
    >>> import fp8moe.transformer_engine.pytorch as te
    >>> x, probs = torch.tensor([[1.0], [2.0]]), torch.tensor([0.25, 0.5])
    >>> sizes, order = torch.tensor([1, 1]), torch.tensor([1, 0])
    >>> te.moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)[1].tolist()
    [0.5, 0.25]
    """
    chunks = contiguous(split_sizes), contiguous(sorted_index)
    moved = torch_ops.sort_chunks(contiguous(inp), *chunks, contiguous(probs), keep_rest=True)
    return moved.data, moved.probs


class Fp8Padding(torch.nn.Module):
    """Pad groups of rows with zeros, each to a multiple of the same size.

    Parameters
    ----------
    num_gemms : int
        Number of groups.
    align_size : int or None
        The multiple: 16 for per-tensor and blockwise FP8, 32 for MXFP8; None: 16, where the original follows
        the active recipe.

    Notes
    -----
    Replaces ``transformer_engine.pytorch.Fp8Padding``.

    Examples
    --------
    >>> import torch
    >>> import fp8moe.transformer_engine.pytorch as te
    >>> padded, splits = te.Fp8Padding(2, align_size=2)(torch.tensor([[1.0], [2.0], [3.0]]), [1, 2])
    >>> padded.ravel().tolist(), splits
    ([1.0, 0.0, 2.0, 3.0], [2, 2])
    """

    def __init__(self, num_gemms: int, align_size: int | None = None):
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or 16

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """Pad the groups.

        Parameters
        ----------
        inp : Tensor, [N, H]
            Rows, group after group.
        m_splits : list of int
            Number of rows of each group.

        Returns
        -------
        rows : Tensor, [P, H]
            Padded rows; inp itself if no padding is needed. Differentiable in ``inp``.
        m_splits : list of int
            Number of rows of each group, with padding.

        Raises
        ------
        ValueError
            For a wrong number of groups.
        """
        padded = _padded_splits(self, m_splits)
        if padded == m_splits:
            return inp, m_splits
        return _resize(torch_ops.pad, inp, m_splits, self.align_size, sum(padded)), padded


class Fp8Unpadding(torch.nn.Module):
    """Remove the padding of `Fp8Padding`.

    Parameters
    ----------
    num_gemms : int
        Number of groups.
    align_size : int or None
        As in `Fp8Padding`.

    Notes
    -----
    Replaces ``transformer_engine.pytorch.Fp8Unpadding``.

    Examples
    --------
    >>> import torch
    >>> import fp8moe.transformer_engine.pytorch as te
    >>> padded = torch.tensor([[1.0], [0.0], [2.0], [3.0]])
    >>> te.Fp8Unpadding(2, align_size=2)(padded, [1, 2]).ravel().tolist()
    [1.0, 2.0, 3.0]
    """

    def __init__(self, num_gemms: int, align_size: int | None = None):
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or 16

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        """Remove the padding.

        Parameters
        ----------
        inp : Tensor, [P, H]
            Padded rows, group after group.
        m_splits : list of int
            Number of rows of each group without padding.

        Returns
        -------
        Tensor, [N, H]
            Rows without padding; inp itself if there is none. Differentiable in ``inp``.

        Raises
        ------
        ValueError
            For a wrong number of groups.
        """
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
    """A tensor, or the tensors of a QuantTensor, contiguous as the kernels require; others unchanged."""
    if isinstance(x, Tensor):
        return x.contiguous()
    if not isinstance(x, QuantTensor):
        return x
    return replace(x, data=x.data.contiguous(), scales=x.scales.contiguous())


def _check_map_type(map_type: str) -> None:
    if map_type != "mask":
        raise ValueError(f"map_type: got {map_type!r}; wanted 'mask' or 'index'")


def _mask_plan(routing_map: Tensor, num_out_tokens: int) -> PermutationPlan:
    rows: Any = "exact" if num_out_tokens is None or num_out_tokens < 0 else num_out_tokens
    return torch_ops.plan_routing_map(contiguous(routing_map), num_out_tokens=rows)


def _permute_with_probs(inp: Rows, probs: Tensor, plan: PermutationPlan) -> tuple[Rows, Tensor]:
    moved = torch_ops.permute(contiguous(inp), plan, contiguous(probs), zero_unweighted=True)
    return moved.data, moved.probs


_index_map = operator_of(row_maps.index_map, Tensor)


def _permute_by_index(inp: Rows, indices: Tensor, num_out_tokens: int) -> tuple[Rows, Tensor]:
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"routing_map: got dtype {indices.dtype}; wanted int32 or int64, the ids of experts")
    if indices.dim() != 2:
        raise ValueError(f"routing_map: got shape {list(indices.shape)}; wanted [T, k]")
    tokens, k = indices.shape
    num_rows = num_out_tokens if tokens and num_out_tokens > 0 else tokens * k
    indices = indices.contiguous()
    order = row_maps.sort_key(indices.reshape(-1), 8 * indices.itemsize).sort(stable=True).indices
    row_id_map = _index_map(order, indices, num_rows)
    plan = torch_ops.plan_index_map(row_id_map, k, num_out_tokens=num_rows)
    return torch_ops.permute(contiguous(inp), plan).data, row_id_map


def _unpermute_by_index(inp: Rows, row_id_map: Tensor, probs: Tensor | None) -> Tensor:
    if probs is not None and probs.dtype != torch.float32:
        warnings.warn(f"probs of {probs.dtype} are converted to float32", stacklevel=3)
        probs = probs.to(torch.float32)
    k = 1 if probs is None else probs.shape[1]
    num_rows = inp.data.shape[0] if isinstance(inp, QuantTensor) else inp.shape[0]
    plan = torch_ops.plan_index_map(row_id_map, k, num_out_tokens=num_rows)
    return torch_ops.unpermute(inp, plan, probs)
