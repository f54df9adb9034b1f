"""The experts of a MoE layer as one function of tensors: what adapters to other libraries stand on.

It takes what a user has (any float, any strides, weights in halves, widths that are no multiples of 128)
and hands `fp8moe.adapters.torch_experts` what that takes. Every step is torch's own, so autograd and
compilers see through it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe import Quantized, checks
from fp8moe.activation import SWIGLU, Activation
from fp8moe.adapters import torch_ops
from fp8moe.adapters.torch_experts import FP8_BLOCK, experts
from fp8moe.moe import RECIPES

Recipe = Literal["bf16", "fp8_blockwise", "fp8_flow"]


def moe_experts(
    x: Tensor,
    w13: Tensor | Quantized | tuple[Tensor, Tensor],
    w2: Tensor | Quantized,
    topk_ids: Tensor,
    topk_probs: Tensor,
    *,
    recipe: Recipe = "fp8_flow",
    recompute: str | None = None,
    activation: Activation = SWIGLU,
    comm: Any = None,
    fp8_weights: tuple[Quantized, Quantized] | None = None,
) -> Tensor:
    """y[t] = sum over t's experts e of prob * w2[e] @ act(w13[e] @ x[t]), with gradients for x, w13, w2 and
    topk_probs: `fp8moe.moe_forward` and `fp8moe.moe_backward` for torch, eagerly and compiled.

    x: [..., H], any float; y has its shape and dtype. The FP8 recipes multiply it as bfloat16, "bf16" in x's
        dtype, under autocast in that of the context.
    w13: [E, 2F, H], gates before ups, or the two apart, [E, F, H] each. w2: [E, H, F]. Any float, any
        strides, leaves or not; or, for the FP8 recipes, what `fp8moe.quantize_weights` returned, which has no
        gradient. Gradients come in the weights' dtype. Where F is no multiple of 128, the FP8 recipes
        multiply by copies with zeros up to the next one.
    topk_ids: int32 or int64 [..., k], below 0 or E and more for no expert. topk_probs: float [..., k].
    comm: what moves rows between ranks (`fp8moe.expert_parallel.Comm`): w13 and w2 are this rank's experts
        then, and ids name those of all.
    fp8_weights: what `quantize_fp8_weights` made of w13 and w2, to multiply by. The caller says by it that
        they have not changed since: micro-batches share one set. w13 and w2 get their gradients all the same.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or range, by the argument's name;
    NotImplementedError inside transforms of torch.func.
    """
    torch_ops.refuse_transforms("moe_experts")
    checks.choice("recipe", recipe, RECIPES)
    torch_ops.check_float("x", x)
    torch_ops.check_float("topk_probs", topk_probs)
    given, dtype = _weights(w13, w2, recipe), torch.bfloat16
    if recipe == "bf16":
        if fp8_weights is not None:
            raise ValueError('fp8_weights: got some with recipe "bf16"; wanted None')
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        given = [w.to(dtype).contiguous() for w in given]
    multiplied: Any = fp8_weights or given
    if recipe != "bf16" and fp8_weights is None:
        multiplied = [w if isinstance(w, Quantized) else torch_ops.quantize_weights(w) for w in given]
    weights = [None if isinstance(w, Quantized) else w for w in given]
    y = experts(
        x.reshape(-1, x.shape[-1]).to(dtype).contiguous(),
        weights[0],
        weights[1],
        topk_ids.reshape(-1, topk_ids.shape[-1]).contiguous(),
        topk_probs.reshape(-1, topk_probs.shape[-1]).contiguous(),
        multiplied,
        recipe=recipe,
        recompute=recompute,
        activation=activation,
        comm=comm,
    )
    return y.to(x.dtype).reshape(x.shape)


def quantize_fp8_weights(
    w13: Tensor | tuple[Tensor, Tensor], w2: Tensor, out: tuple[Quantized, Quantized] | None = None
) -> tuple[Quantized, Quantized]:
    """(w13, w2) as `moe_experts` multiplies by them in the FP8 recipes, padded like there. out: what an
    earlier call returned, to write to."""
    into = out or (None, None)
    pairs = zip(_weights(w13, w2, "fp8_flow"), into, strict=True)
    first, second = (torch_ops.quantize_weights(w, old) for w, old in pairs)
    return first, second


def _weights(w13: Any, w2: Any, recipe: str) -> list[Any]:
    """w13 [E, 2F, H] and w2 [E, H, F], F a multiple of 128 where FP8 wants it."""
    halves: list[Any] = list(w13) if isinstance(w13, tuple) else [w13]
    for name, w in (*(("w13", w) for w in halves), ("w2", w2)):
        torch_ops.check_float(name, w, 3)
        if recipe == "bf16" and isinstance(w, Quantized):
            raise TypeError(f'{name}: got quantised weights; wanted a tensor for recipe "bf16"')
        if recipe != "bf16" and isinstance(w, Tensor):
            checks.dtype(name, torch_ops.spec_of(w), checks.QUANTIZABLE)
    if isinstance(halves[0], Quantized):
        return [halves[0], w2]
    if len(halves) not in (1, 2) or halves[0].shape != halves[-1].shape:
        raise ValueError(
            f"w13: got tensors of shapes {[list(w.shape) for w in halves]}; wanted one of [E, 2F, H], or two "
            "of [E, F, H]"
        )
    missing = 0 if recipe == "bf16" or isinstance(w2, Quantized) else -w2.shape[2] % FP8_BLOCK[1]
    if missing:
        if len(halves) == 1:
            halves = list(halves[0].unflatten(1, (2, -1)).unbind(1))
        halves, w2 = [pad(w, (0, 0, 0, missing)) for w in halves], pad(w2, (0, missing))
    gate_up = halves[0] if len(halves) == 1 else torch.cat(halves, dim=1)
    return [w if isinstance(w, Quantized) else w.contiguous() for w in (gate_up, w2)]
