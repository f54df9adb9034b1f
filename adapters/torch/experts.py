"""The experts of a layer in torch, with gradients, in eager mode and in compiled code.

`experts` takes a router's choice and the weights as the GEMMs read them. Every tensor that the backward needs
is saved by autograd: it is released with the backward, checkpointing and saved-tensor hooks apply to it, and
in-place modifications are detected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fp8moe.adapters.torch import compiled, eager
from fp8moe.adapters.torch.arguments import Options, Targets, handle_of_comm, with_formats
from fp8moe.adapters.torch.compiled_over_ranks import forward_over_ranks_op
from fp8moe.adapters.torch.library import records_operators, refuse_export
from fp8moe.adapters.torch.main_grad import main_grads_of, wants_zeros
from fp8moe.adapters.torch.operands import Operands
from fp8moe.adapters.torch.stats import Collector
from fp8moe.layer.options import LayerOptions
from fp8moe.layer.recipes import GRADIENTS
from fp8moe.runtime.record_trees import arrays_in


def experts(
    x: Tensor,
    weights: Operands,
    topk_ids: Tensor,
    topk_probs: Tensor,
    layer: LayerOptions,
    *,
    comm: Any = None,
    handle: Tensor | None = None,
    collector: Collector | None = None,
    align_size: int = 0,
    announced: dict[str, Any] | None = None,
) -> Tensor:
    """`fp8moe.moe_forward`, differentiable by `fp8moe.moe_backward` in x, topk_probs, w13, w2 and bias13.

    x, topk_ids, topk_probs: [T, H], [T, k] and [T, k], contiguous, with the dtypes of `fp8moe.moe_forward`.
    align_size: if nonzero, rows are already permuted, and these three are x, tokens_per_expert and probs of
        `fp8moe.moe_forward_permuted`.
    layer: compiled code checks during tracing whether the GEMMs support its backend and num_sms; eager
        callers check with `check_backend` before they quantise.
    handle: from `handle_of`; compiled code finds the layer by it, to set ``grad_added_to_main_grad`` of its
        parameters.
    collector: of statistics, in eager mode.
    announced: to the other ranks, further fields of `fp8moe.expert_parallel.protocols.Settings`; the router
        is found by ``handle``: its layer's ``router_checksum``.

    Only the required gradients are computed, and only their inputs are saved. If a parameter has a
    ``main_grad``, its gradient is added to that and ``grad_added_to_main_grad`` is set. If the parameter had
    the latter attribute before, as Megatron's DistributedDataParallel sets it, its ``grad`` becomes zeros
    that share memory, because Megatron expects a ``grad`` and discards it; otherwise its ``grad`` remains
    None.
    """
    (w13, w2), codes, ffn, whole, bias13 = weights
    w1, w3 = w13 if isinstance(w13, tuple) else (w13, None)  # w1 is all of w13 if there is no w3
    gemm_weights = [w.detach().to(x.dtype) for w in (w13, w2)] if codes is None else [*codes]
    if bias13 is not None:
        gemm_weights.append(bias13.detach())
    inputs = (("dx", x), ("dprobs", topk_probs), ("dw13", w1), ("dw13", w3), ("dw2", w2), ("dbias13", bias13))
    parameters = (w1, w3, w2) if whole is None else (whole[0], None, whole[1])
    recording = torch.is_grad_enabled()
    needed = {name: recording and t is not None and t.requires_grad for name, t in reversed(inputs)}
    needed["dw13"] |= recording and w3 is not None and w3.requires_grad
    gradients = [name for name in GRADIENTS if needed[name]]
    announced = announced or {}
    told = announced.get("gathers_bias", False), "router" in announced, announced.get("sums_router", False)
    saves = ",".join(gradients), collector is not None
    options = Options(layer, align_size, ffn, w3 is not None, *saves, *told)
    leaves = w1, w3, w2, bias13
    if not (torch.compiler.is_compiling() or isinstance(x, FakeTensor) or records_operators()):
        rest = parameters, comm, handle, collector, options
        return eager.Experts.apply(x, *leaves, topk_probs, topk_ids, gemm_weights, *rest)
    refuse_export(x, *leaves, topk_probs)
    options = with_formats(options, gemm_weights)
    tensors = [t for w in gemm_weights for t in arrays_in(w)]
    mains = main_grads_of(parameters, gradients)
    zeros = [m is not None and wants_zeros(w) for m, w in zip(mains, parameters, strict=True)]
    first, second = (torch.bfloat16 if w is None else w.dtype for w in (w1, w2))
    targets = Targets(mains[0], mains[1], mains[2], first, second, zeros, handle)
    if comm is not None:
        operands = x, topk_ids, topk_probs, *leaves, tensors, handle_of_comm(comm)
        return forward_over_ranks_op(*operands, targets, options)[0]
    return compiled.Experts.apply(x, *leaves, topk_probs, topk_ids, tensors, targets, options)
