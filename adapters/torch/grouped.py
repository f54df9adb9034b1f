"""The recipe "bf16" composed of public operations that torch's autograd differentiates: permutation, two
grouped GEMMs, activation, unpermutation.

It is the second implementation of that recipe, beside the core's, because its GEMMs are torch's, which are
the fastest on every architecture but Hopper. There this library's are 2 to 5 % faster, and the core's recipe,
one call in each direction, takes the host a fifth of the time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fp8moe.activation import Activation
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch.distributed import process_group as torch_distributed
from fp8moe.adapters.torch.halves import Half, asked_for, keeps_graph
from fp8moe.adapters.torch.library import once_differentiable
from fp8moe.adapters.torch.main_grad import main_grad_of
from fp8moe.adapters.torch.operands import Operands
from fp8moe.adapters.torch.operation import on_hopper
from fp8moe.expert_parallel import DispatchedRows
from fp8moe.expert_parallel.protocols import Settings, capacity_of, check_comm, chunks_of
from fp8moe.layer.options import LayerOptions
from fp8moe.ops.plan import static_bound
from fp8moe.runtime import checks


def suits_public_operations(x: Tensor, weights: Operands, options: LayerOptions, comm: Any) -> bool:
    """Whether `by_public_operations` computes the experts, and not the core's recipe: the one place that
    decides between the two implementations of "bf16". It does for bfloat16 rows of multiples of 16 bytes, as
    torch's product requires, but not on Hopper. Only the core has a choice of backend, a limit of SMs,
    chunks, ranks in compiled code, a ``main_grad`` that the GEMM adds to, and a bias that it adds.
    """
    if is_always_the_cores(x, options) or x.dtype != torch.bfloat16 or weights.bias13 is not None:
        return False
    if comm is not None and (torch.compiler.is_compiling() or chunks_of(comm) > 1):
        return False
    if any(w.shape[2] % 8 for w in weights.masters):
        return False
    return all(main_grad_of(w) is None for w in weights.parameters or weights.masters)


def is_always_the_cores(x: Tensor, options: LayerOptions) -> bool:
    """Whether the core's recipe computes all experts with these options on x's device."""
    return options.precision.quantizes or options.limits_gemms or on_hopper(x)


def by_public_operations(
    x: Tensor,
    weights: Operands,
    ids: Tensor,
    probs: Tensor,
    options: LayerOptions,
    *,
    comm: Any,
    align_size: int,
    announced: dict[str, Any] | None,
) -> Tensor:
    """As `fp8moe.adapters.torch.experts.experts`, for which `suits_public_operations` holds."""
    w13, w2 = weights.masters
    w13, w2 = w13.to(x.dtype), w2.to(x.dtype)
    if align_size:
        return _of_permuted_rows(x, w13, w2, ids, probs, options, align_size)
    checks.shape("topk_ids", ids, (x.shape[0], "k"))
    checks.shape("topk_probs", probs, tuple(ids.shape))
    rows, experts = None, len(w13)
    if comm is not None:
        check_comm(comm)
        inputs = {"dx": x, "dprobs": probs, "dw13": w13, "dw2": w2}
        gradients = [name for name, t in inputs.items() if torch.is_grad_enabled() and t.requires_grad]
        given = x, ids, probs, experts * comm.world_size, comm
        settings = Settings(options, **announced or {})
        dispatched = torch_distributed.dispatch(*given, gradients, settings)
        if isinstance(dispatched, DispatchedRows):
            operands = dispatched.x, w13, w2, dispatched.tokens_per_expert, dispatched.probs
            y = _of_permuted_rows(*operands, options, dispatched.align_size)
            return torch_distributed.combine(y, dispatched.route, comm)
        x, ids, probs = dispatched.x, dispatched.topk_ids, dispatched.topk_probs
        rows = static_bound(dispatched.num_entries, experts, 16)
    # torch's grouped product requires rows and offsets in multiples of 16 bytes
    plan = torch_ops.plan_topk(ids, experts, align_size=16, num_out_tokens=rows)
    moved = torch_ops.permute(x, plan, probs.float())
    offsets = plan.expert_offsets
    if comm is not None and capacity_of(comm) is not None:
        comm.record_overflow(dispatched.route.plan.overflow, plan.overflow)
        # torch's product would compute past the last row
        offsets = offsets.clamp(max=plan.num_out_tokens)
    y = _products_of(options)(moved.data, moved.probs, w13, w2, offsets, options.activation)
    y = torch_ops.unpermute(y, plan)
    return y if comm is None else torch_distributed.combine(y, dispatched.route, comm)


def _of_permuted_rows(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    tokens_per_expert: Tensor,
    probs: Tensor,
    options: LayerOptions,
    align_size: int,
) -> Tensor:
    """`fp8moe.moe_forward_permuted` with recipe "bf16": x [N, H], probs [N]."""
    counts = tokens_per_expert
    if align_size > 1:  # padding rows are counted as rows
        counts = (counts + (align_size - 1)) // align_size * align_size
    order = torch.arange(len(counts), device=counts.device)
    moved = torch_ops.sort_chunks(x, counts, order, probs.float(), align_size=16)
    operands = moved.data, moved.probs, w13, w2, moved.group_offsets
    y = _products_of(options)(*operands, options.activation)
    return torch_ops.unpad(y, counts, 16, num_out_tokens=x.shape[0])  # type: ignore[no-any-return]


def _products_of(options: LayerOptions) -> Any:
    return _products if options.recompute is None else _Recomputed.apply


def _product(x: Tensor, w: Tensor, offsets: Tensor, *, transpose_w: bool = False) -> Tensor:
    """x @ w[e].T, or x @ w[e], for each expert's rows."""
    return nn.functional.grouped_mm(x, w if transpose_w else w.transpose(1, 2), offs=offsets[1:])


def _flops_of_grouped_mm(a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Of all rows, including padding. a, b: shapes [P, K] and [E, K, N], or [N, P] and [P, K]."""
    return int(2 * a[0] * a[1] * b[-1])


if torch.ops.aten._grouped_mm not in flop_registry:  # as in torch 2.13
    register_flop_formula(torch.ops.aten._grouped_mm)(_flops_of_grouped_mm)


def _written(x: Tensor, offsets: Tensor) -> Tensor:
    """The offsets, with all rows to the end for the last expert in anomaly mode. torch's product does not
    write the rows after the last expert's: nothing reads them, but anomaly mode looks for NaN in every
    gradient. They are zeros in x and dy, and so in the products; always computing them would cost time."""
    if torch.compiler.is_compiling() or not torch.is_anomaly_enabled():
        return offsets
    return torch.cat((offsets[:-1], offsets.new_full((1,), x.shape[0])))


def _weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """dy.T @ x for each expert's rows, in bfloat16."""
    return nn.functional.grouped_mm(dy.t(), x, offs=offsets[1:])


def _products(
    x: Tensor, probs: Tensor, w13: Tensor, w2: Tensor, offsets: Tensor, activation: Activation
) -> Tensor:
    """The experts for permuted rows."""
    offsets = _written(x, offsets)
    h = _product(x, w13, offsets)
    a = torch_ops.swiglu(h, probs, activation=activation)
    return _product(a, w2, offsets)


class _Recomputed(torch.autograd.Function):
    """`_products` with recomputation of h and a in the backward. torch.utils.checkpoint would not detect
    weights that have changed since the forward."""

    @staticmethod
    def forward(ctx, x, probs, w13, w2, offsets, activation):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, probs, w13, w2, offsets)
        ctx.activation, ctx.half = activation, None
        return _products(x, probs, w13, w2, offsets, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, probs, w13, w2, offsets = ctx.saved_tensors
        offsets = _written(x, offsets)
        # Dynamo traces this; a compiled backward is never split
        if compiling := torch.compiler.is_compiling():
            requested, half = ctx.needs_input_grad, None
        else:
            requested, half, ctx.half = asked_for(ctx), ctx.half, None
        needs_dx, needs_dprobs, needs_dw13, needs_dw2, *_ = requested
        dx, dprobs, dw13, dw2 = None, None, None, None
        if half is not None and not (needs_dx or needs_dprobs) and half.is_of(dy):
            a, dh = half.operands
        else:
            later = (
                any(ctx.needs_input_grad[2:4])
                and not (needs_dw13 or needs_dw2 or compiling)
                and keeps_graph()
            )
            h, a = _product(x, w13, offsets), None
            if needs_dw2 or later:
                a = torch_ops.swiglu(h, probs, activation=ctx.activation)
            da = _product(dy.contiguous(), w2, offsets, transpose_w=True)
            dh, row_dprobs = torch_ops.swiglu_backward(da, h, probs, ctx.activation)
            dprobs = row_dprobs.to(probs.dtype) if needs_dprobs else None
            if needs_dx:
                dx = _product(dh, w13, offsets, transpose_w=True)
            if later:
                ctx.half = Half(dy, (a, dh))
        if needs_dw13:
            dw13 = _weight_gradient(dh, x, offsets)
        if needs_dw2:
            dw2 = _weight_gradient(dy.contiguous(), a, offsets)
        return dx, dprobs, dw13, dw2, None, None
