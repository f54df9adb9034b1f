"""The biases of the experts: of the first GEMM as columns of x and w13, of the second added by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives
from torch.nn.functional import pad

from fp8moe.adapters.torch.halves import asked_for
from fp8moe.adapters.torch.library import differentiable
from fp8moe.adapters.torch.operands import bias_columns
from fp8moe.layer.recipes import Recipe

# torch 2.13 renamed it and warns about the old name
_all_gather: Any = (
    getattr(_functional_collectives, "all_gather_single_autograd", None)
    or _functional_collectives.all_gather_tensor_autograd
)


def with_ones(rows: Tensor, recipe: Recipe) -> Tensor:
    """Rows of x with the columns that multiply w13's columns of the bias."""
    before, ones, after = bias_columns(rows.shape[1], recipe)
    added = rows.new_ones(rows.shape[0], ones)
    return torch.cat((pad(rows, (0, before)), pad(added, (0, after))), dim=1)


def add_bias(y: Tensor, bias2: Tensor, ids: Tensor, probs: Tensor, comm: Any, align_size: int) -> Tensor:
    """y with the biases of its rows' experts. ids and probs: as `apply_experts` has them."""
    if comm is not None:  # after the experts' exchange, by whose header all ranks know that all have one
        bias2 = _all_gather(bias2.contiguous(), 0, comm.group)
    if not align_size:
        return _with_biases(y, bias2, ids, probs)  # type: ignore[no-any-return]
    ids = _expert_of_rows(ids, y.shape[0], align_size)[:, None]
    biased = _with_biases(y, bias2, ids, probs[:, None])
    # rows of no expert: zeros times a NaN in their gradients would be a gradient of the bias
    return torch.where(ids < bias2.shape[0], biased, y)


def _expert_of_rows(tokens_per_expert: Tensor, rows: int, align_size: int) -> Tensor:
    """[rows]: the expert of each row, E for rows after the last expert's."""
    ends = ((tokens_per_expert + (align_size - 1)) // align_size * align_size).cumsum(0)
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)


def check_gathers_bias(comm: Any) -> None:
    """Biases of all ranks' experts are gathered; their gradient is the sum over ranks."""
    if getattr(comm, "group", None) is None:
        raise NotImplementedError(
            f"bias2: got one with a comm of {type(comm).__name__} without an attribute `group`; wanted its "
            "torch.distributed.ProcessGroup there, or no bias"
        )


class _WithBiases(torch.autograd.Function):
    """y [T, H] + the sum over a row's experts of prob * bias, in at least float32, rounded once to y's dtype.

    A row's y and gradients of probabilities depend on this row alone, which a matrix product of
    probabilities [T, E] and biases does not promise: BLAS chooses its order of sums by the number of rows.
    torch's bags of embeddings sum a row's entries in their order, and its gradient of weights is one dot
    product per entry.
    """

    @staticmethod
    def forward(ctx: Any, y: Any, bias2: Any, ids: Any, probs: Any) -> Any:
        ctx.save_for_backward(bias2, ids, probs)
        ctx.wide = torch.promote_types(y.dtype, torch.float32)
        named, experts, firsts = _bags(ids, bias2.shape[0])
        weights, biases = torch.where(named, probs, 0).to(ctx.wide).flatten(), bias2.to(ctx.wide).contiguous()
        sums, *_ = torch.embedding_bag(biases, experts, firsts, mode=_SUM, per_sample_weights=weights)
        return sums.add_(y).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        bias2, ids, probs = ctx.saved_tensors
        needs_y, needs_bias, _, needs_probs = asked_for(ctx)
        grad_bias = grad_probs = None
        if needs_bias:
            shares = _probs_by_expert(ids, probs, bias2.shape[0]).to(grad.dtype)
            with torch.autocast(grad.device.type, enabled=False):
                grad_bias = (shares.t() @ grad).to(bias2.dtype)
        if needs_probs:
            rows, biases = grad.to(ctx.wide).contiguous(), bias2.to(ctx.wide).contiguous()
            rest = -rows.shape[1] % 16  # BLAS's dot products depend on a row's place in a line of 64 bytes
            if rest:
                rows, biases = pad(rows, (0, rest)), pad(biases, (0, rest))
            named, experts, firsts = _bags(ids, bias2.shape[0])
            bags = torch.arange(ids.shape[0], device=ids.device, dtype=ids.dtype)
            bags = bags.repeat_interleave(ids.shape[1])
            dots = _weights_backward(rows, biases, experts, firsts, bags, _SUM)
            grad_probs = torch.where(named, dots.view(ids.shape), 0).to(probs.dtype)
        return grad if needs_y else None, grad_bias, None, grad_probs


_SUM = 0  # embedding_bag's mode
_weights_backward: Any = torch.ops.aten._embedding_bag_per_sample_weights_backward.default
_with_biases = differentiable(_WithBiases)


def _bags(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each of ids [T, k] is an expert's, [T * k] valid ids, and the place of each row's first."""
    named = (ids >= 0) & (ids < experts)
    firsts = torch.arange(ids.shape[0], device=ids.device, dtype=ids.dtype) * ids.shape[1]
    return named, torch.where(named, ids, 0).flatten(), firsts


def _probs_by_expert(ids: Tensor, probs: Tensor, experts: int) -> Tensor:
    """[T, E], at least float32: sum of a token's probabilities for each expert."""
    probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    valid = (ids >= 0) & (ids < experts)
    shares = probs.new_zeros(ids.shape[0], experts)
    return shares.scatter_add(1, torch.where(valid, ids, 0).long(), torch.where(valid, probs, 0))
