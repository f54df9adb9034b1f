"""The experts in compiled code, in one process: two operators of tensors and plain values.

The shapes of the tensors saved for the second follow from the inputs' shapes. The second's writes to
``main_grad`` are declared, so compilers neither remove nor reorder it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

import fp8moe
from fp8moe import Quantized
from fp8moe.adapters.torch.arguments import (
    LAYERS,
    MAIN_GRADS,
    Options,
    Targets,
    call_forward,
    check_traced,
    names_of,
    saved_weights,
    weights_of,
    weights_of_backward,
)
from fp8moe.adapters.torch.flops import backward_flops, forward_flops
from fp8moe.adapters.torch.halves import is_asked_for, keeps_graph, leaves_not_asked_for
from fp8moe.adapters.torch.library import like, operator, spec_of
from fp8moe.adapters.torch.main_grad import (
    OF_WEIGHTS,
    main_grad_of,
    set_added,
    weight_gradients,
)
from fp8moe.formats import BFLOAT16
from fp8moe.layer.saved import Saved
from fp8moe.records import ArraySpec
from fp8moe.runtime.record_trees import arrays_in, map_arrays
from fp8moe.runtime.recording import result_specs


class Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, w3, w2, bias13, probs, ids, gemm_weights, targets, options):  # type: ignore[no-untyped-def]
        y, *saved = forward_op(x, gemm_weights, ids, probs, options)
        backward_weights = weights_of_backward(gemm_weights, options)
        if options.gradients:
            ctx.save_for_backward(ids, probs, *backward_weights, *saved)
        # ``main_grad`` is not saved: autograd would reject a backward after another one has added to it
        ctx.num_backward_weights = len(backward_weights)
        ctx.targets, ctx.options = targets, options
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        ids, probs, *rest = ctx.saved_tensors
        backward_weights, saved = rest[: ctx.num_backward_weights], rest[ctx.num_backward_weights :]
        operands = dy.contiguous(), saved, backward_weights, ids, probs
        grads = _backward_op(*operands, ctx.targets, ctx.options)
        dx, dprobs, *weight_grads = returned_gradients(grads, ctx.targets, ctx.options, probs)
        return dx, *weight_grads, dprobs, *[None] * 4


def returned_gradients(grads: Any, targets: Targets, options: Options, probs: Tensor) -> list[Tensor | None]:
    """The gradients for autograd from the results of an operator, in which empty tensors represent None."""
    dx, dprobs, *weight_grads, dbias13 = grads
    names = names_of(options.gradients)
    has_grad = [name in names for name in OF_WEIGHTS]
    has_grad[1] &= options.w13_is_pair
    rest = zip(has_grad, weight_grads, targets[:3], targets.return_zeros, strict=True)
    return [
        dx if "dx" in names else None,
        dprobs.to(probs.dtype) if "dprobs" in names else None,
        *(dw if returned and (main is None or zero) else None for returned, dw, main, zero in rest),
        dbias13 if "dbias13" in names else None,
    ]


def _forward(x: Any, ids: Any, probs: Any, weights: Any, options: Options) -> tuple[Any, Saved]:
    """y, and the saved tensors without the weights."""
    y, saved = call_forward(x, ids, probs, weights, options, None)
    return y, without_weights(saved)


def without_weights(saved: Saved) -> Saved:
    return replace(saved, w13=None, w2=None, bias13=None, overwritten=(None, None))


def results_of(specs: Any, options: Options) -> tuple[Any, Saved]:
    """Specs of the results of `_forward`, from specs of x, ids, probs and the weights."""
    return result_specs(  # type: ignore[no-any-return]
        lambda a: _forward(a[0], a[1], a[2], a[3:], options), [ArraySpec(*s) for s in specs]
    )


known_results = lru_cache(maxsize=256)(results_of)


def specs_of(x: Any, ids: Any, probs: Any, kept_weights: Any) -> Any:
    """Arguments of `results_of`; x may be any tensor of x's spec. FP8 weights may have one orientation
    only."""
    specs = [spec_of(t) for t in (x, ids, probs)]
    for w in kept_weights:
        if isinstance(w, Quantized):
            specs.append(ArraySpec(w.shape, BFLOAT16))
        else:
            specs.append(spec_of(w))
    return tuple((s.shape, s.dtype) for s in specs)


def _forward_fake(
    x: Tensor, gemm_weights: list[Tensor], ids: Tensor, probs: Tensor, options: Options
) -> list[Tensor]:
    weights = weights_of(options, gemm_weights)
    check_traced(x, weights, options)
    y, saved_like = results_of(specs_of(x, ids, probs, weights), options)
    return [like(a, x.device) for a in (y, *(arrays_in(saved_like) if options.saves else ()))]


@operator(
    "experts",
    fake=_forward_fake,
    flops=lambda x, weights, ids, probs, options: forward_flops(x, weights, ids, options),
)
def forward_op(
    x: Tensor, gemm_weights: list[Tensor], ids: Tensor, probs: Tensor, options: Options
) -> list[Any]:
    y, saved = _forward(x, ids, probs, weights_of(options, gemm_weights), options)
    saved_tensors = arrays_in(saved) if options.saves else []
    # a compiler requires that results do not alias inputs, as the counts of permuted rows would
    input_addresses = {t.untyped_storage().data_ptr() for t in (x, ids, probs)}
    saved_tensors = [
        t.clone() if t.untyped_storage().data_ptr() in input_addresses else t for t in saved_tensors
    ]
    return [y, *saved_tensors]


def fake_gradients(
    dy: Tensor,
    saved_tensors: list[Tensor] | None,
    backward_weights: list[Tensor],
    ids: Tensor,
    probs: Tensor,
    targets: Targets,
    options: Options,
) -> tuple[Tensor, ...]:
    """Results of the backward operators. saved_tensors: None if their shapes depend on other ranks' rows."""
    _, saved_like = results_of(specs_of(dy, ids, probs, saved_weights(options, backward_weights)), options)
    specs = arrays_in(saved_like) if saved_tensors is None else [spec_of(t) for t in saved_tensors]

    def backward(arrays: Any) -> Any:
        dy, *rest = arrays
        saved = saved_of(saved_like, rest[: len(specs)], rest[len(specs) :], options)
        dw13 = (None, None) if options.w13_is_pair else None
        return fp8moe.moe_backward(
            saved, dy, dw13=dw13, ffn=options.ffn, gradients=names_of(options.gradients)
        )

    g = result_specs(backward, [spec_of(dy), *specs, *(spec_of(t) for t in backward_weights)])
    grads = [_no_gradient(dy) if a is None else like(a, dy.device) for a in (g.dx, g.dprobs)]
    parts = g.dw13 if isinstance(g.dw13, tuple) else (g.dw13, None)
    shapes = [None if part is None else part.shape for part in (*parts, g.dw2)]
    for shape, main, dtype, zero in zip(
        shapes, targets[:3], _dtypes(targets), targets.return_zeros, strict=True
    ):
        shape = shape if shape is not None and (main is None or zero) else _NO_GRADIENT_SHAPE
        grads.append(torch.empty(shape, dtype=dtype, device=dy.device))
    return *grads, _no_gradient(dy) if g.dbias13 is None else like(g.dbias13, dy.device)


def _dtypes(targets: Targets) -> tuple[torch.dtype, ...]:
    """Dtypes of the gradients of w13 (or w1), w3 and w2."""
    return targets.dtype13, targets.dtype13, targets.dtype2


_NO_GRADIENT_SHAPE = (0,)  # shape of the tensors that represent None


def _no_gradient(dy: Tensor) -> Tensor:
    return dy.new_empty(_NO_GRADIENT_SHAPE, dtype=torch.float32)


def saved_of(like: Saved, saved_tensors: Any, backward_weights: Any, options: Options) -> Saved:
    """The record of `_forward` with its arrays, and the weights."""
    remaining = iter(saved_tensors)
    saved = map_arrays(lambda a: next(remaining), like)
    w13, w2, *bias = saved_weights(options, backward_weights)
    return replace(saved, w13=w13, w2=w2, bias13=bias[0] if bias else None)


@operator(
    "experts_backward",
    writes=MAIN_GRADS,
    fake=fake_gradients,
    flops=lambda dy, _, weights, ids, *rest: backward_flops(dy, weights, ids, rest[-1]),
)
def _backward_op(
    dy: Tensor,
    saved_tensors: list[Tensor],
    backward_weights: list[Tensor],
    ids: Tensor,
    probs: Tensor,
    targets: Targets,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, saved_like = known_results(specs_of(dy, ids, probs, saved_weights(options, backward_weights)), options)
    return results_of_backward(
        saved_of(saved_like, saved_tensors, backward_weights, options), dy, targets, options
    )


def results_of_backward(
    saved: Saved, dy: Tensor, targets: Targets, options: Options, comm: Any = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    mains, dtypes, handle = targets[:3], _dtypes(targets), targets.handle
    if any(main is not None for main in mains) and keeps_graph():
        raise RuntimeError(
            "main_grad: got a backward of a compiled layer that keeps its graph (retain_graph=True, or "
            "torch.autograd.grad of some inputs, as in zero-bubble schedules), whose second run would add "
            "all gradients again; wanted one backward, or the layer in a function under "
            "torch.compiler.disable"
        )
    layer = None if handle is None else LAYERS.get(int(handle))
    for name, main in zip(("w13", "w3", "w2"), mains, strict=True):
        if main is not None and layer is not None and not is_asked_for(getattr(layer, name)):
            raise RuntimeError(
                f"main_grad: got a backward of a compiled layer without the gradient of {name} "
                "(torch.autograd.grad, or backward(inputs=...), of other tensors), which it would still add; "
                "wanted backward(), or the layer in a function under torch.compiler.disable"
            )
    added = layer is None and any(main is not None for main in mains)
    if added and any(main_grad_of(w) is not None for w in leaves_not_asked_for()):
        raise RuntimeError(
            "main_grad: got a backward of compiled experts without the gradients of all weights "
            "(torch.autograd.grad, or backward(inputs=...), of other tensors), which it would still add; "
            "wanted backward(), or the experts in a function under torch.compiler.disable"
        )
    backward = partial(fp8moe.moe_backward, saved, dy, comm=comm, gradients=names_of(options.gradients))
    dx, dprobs, *weight_grads, dbias13 = weight_gradients(backward, mains, dtypes, bool(saved.later), options)
    grads = [_no_gradient(dy) if a is None else a for a in (dx, dprobs)]
    for name, new, main, dtype, zero in zip(
        ("w13", "w3", "w2"), weight_grads, mains, dtypes, targets.return_zeros, strict=True
    ):
        if main is None:
            grads.append(dy.new_empty(_NO_GRADIENT_SHAPE, dtype=dtype) if new is None else new.to(dtype))
            continue
        grads.append(dy.new_zeros(main.shape if zero else _NO_GRADIENT_SHAPE, dtype=dtype))
        if layer is not None:
            set_added(getattr(layer, name))
    return *grads, _no_gradient(dy) if dbias13 is None else dbias13  # type: ignore[return-value]
