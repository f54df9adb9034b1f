"""The bias of the experts' second GEMM, added to y; that of the first is added in the GEMM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives
from torch.nn.functional import pad

from fp8moe.adapters.torch.halves import asked_for
from fp8moe.adapters.torch.library import differentiable, once_differentiable, operator_of
from fp8moe.ops.bias import add_biases, add_biases_backward

# torch 2.13 renamed it and warns about the old name
_all_gather: Any = (
    getattr(_functional_collectives, "all_gather_single_autograd", None)
    or _functional_collectives.all_gather_tensor_autograd
)


def add_bias(y: Tensor, bias2: Tensor, ids: Tensor, probs: Tensor, comm: Any, align_size: int) -> Tensor:
    """The first H columns of y [T, W] with the biases [E, H] of their rows' experts. ids and probs: as
    `apply_experts` has them."""
    if comm is not None:  # after the experts' exchange, by whose header all ranks know that all have one
        bias2 = _all_gather(bias2.contiguous(), 0, comm.group)
    if align_size:
        ids, probs = _expert_of_rows(ids, y.shape[0], align_size)[:, None], probs[:, None]
    return _with_biases(y, bias2, ids, probs, align_size > 0)  # type: ignore[no-any-return]


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


_add_biases = operator_of(add_biases, Tensor)
_add_biases_backward = operator_of(add_biases_backward, Tensor)


class _WithBiases(torch.autograd.Function):
    """`fp8moe.ops.bias.add_biases`, with gradients. has_tail: whether there may be rows of no expert, with
    anything in them, one id per row."""

    @staticmethod
    def forward(ctx: Any, y: Any, bias2: Any, ids: Any, probs: Any, has_tail: bool) -> Any:
        if isinstance(bias2, _functional_collectives.AsyncCollectiveTensor):  # gathered from all ranks
            bias2 = bias2.trigger_wait()
        ctx.save_for_backward(bias2, ids, probs)
        ctx.has_tail, ctx.rest = has_tail, y.shape[1] - bias2.shape[1]
        return _add_biases.run(y.contiguous(), bias2.contiguous(), ids, probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        bias2, ids, probs = ctx.saved_tensors
        needs_y, needs_bias, _, needs_probs = asked_for(ctx)
        grad_y = grad_bias = grad_probs = None
        if needs_y:
            grad_y = pad(grad, (0, ctx.rest)) if ctx.rest else grad
        if needs_bias:
            shares = _probs_by_expert(ids, probs, bias2.shape[0]).to(grad.dtype)
            # zeros times a NaN in the gradient of a row of no expert would be a gradient of the bias
            rows = torch.where(ids < bias2.shape[0], grad, 0) if ctx.has_tail else grad
            with torch.autocast(grad.device.type, enabled=False):
                grad_bias = (shares.t() @ rows).to(bias2.dtype)
        if needs_probs:
            grad_probs = _add_biases_backward.run(grad.contiguous(), bias2.contiguous(), ids, probs)
        return grad_y, grad_bias, None, grad_probs, None


_with_biases = differentiable(_WithBiases)


def _probs_by_expert(ids: Tensor, probs: Tensor, experts: int) -> Tensor:
    """[T, E], at least float32: sum of a token's probabilities for each expert."""
    probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    valid = (ids >= 0) & (ids < experts)
    shares = probs.new_zeros(ids.shape[0], experts)
    return shares.scatter_add(1, torch.where(valid, ids, 0).long(), torch.where(valid, probs, 0))
