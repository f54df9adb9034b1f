"""The experts in eager mode: a torch.autograd.Function over the core's record of a forward.

Autograd owns every tensor that the backward needs, and the record of the forward has placeholders for them:
a record that held them would keep them alive, and out of sight of saved-tensor hooks and checkpointing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fp8moe
from fp8moe.adapters.torch.accumulation import accumulators_of, no_entries
from fp8moe.adapters.torch.arguments import (
    NO_TARGETS,
    NUMBERS,
    PLACEHOLDER,
    Options,
    call_forward,
    handle_of,
    names_of,
    weights_of_backward,
    with_formats,
)
from fp8moe.adapters.torch.compiled import forward_op, known_results, saved_of, specs_of
from fp8moe.adapters.torch.compiled_over_ranks import described_by, forward_over_ranks_op
from fp8moe.adapters.torch.flops import multiplications_of
from fp8moe.adapters.torch.halves import Half, asked_for, keeps_graph
from fp8moe.adapters.torch.library import dispatch_modes, once_differentiable, operator
from fp8moe.adapters.torch.main_grad import (
    OF_WEIGHTS,
    main_grads_of,
    set_added,
    shared_zeros,
    wants_zeros,
    weight_gradients,
)
from fp8moe.expert_parallel.protocols import Engine, implements
from fp8moe.layer import moe
from fp8moe.layer.saved import Saved, SavedForWeights
from fp8moe.runtime.record_trees import arrays_in, map_arrays


class Experts(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x, w1, w3, w2, bias13, probs, ids, gemm_weights, parameters, comm, handle, collector, options
    ):
        forward: Any = _forward_by_operator if dispatch_modes() else call_forward
        y, saved = forward(x, ids, probs, gemm_weights, options, comm, handle)
        if collector is not None:
            ranks = 1 if comm is None else comm.world_size
            num_experts = moe.experts_of(gemm_weights[0]) * ranks
            collector.forward(x, ids, num_experts, saved, options.ffn)
        if options.gradients:
            # autograd detects overwritten codes, even if saved-tensor hooks have moved them
            tensors: list[Tensor] = []

            def take(a: Any) -> Any:
                if not isinstance(a, Tensor):
                    return a
                tensors.append(a)
                return PLACEHOLDER

            ctx.saved = map_arrays(take, saved.changed(overwritten=(None, None)))
            ctx.save_for_backward(*tensors)
        of_weights = ("dw13", w1), ("dw13", w3), ("dw2", w2), ("dbias13", bias13)
        inputs = (("dx", x), *of_weights, ("dprobs", probs), ("", ids))
        ctx.names, ctx.half = [name for name, t in inputs if t is not None], None
        ctx.parameters, ctx.comm, ctx.options = parameters, comm, options
        ctx.dtypes = [None if w is None else w.dtype for w in (w1, w3, w2)], probs.dtype
        ctx.collector, ctx.num_rows = collector, probs.numel()
        return y

    @staticmethod
    @torch.compiler.disable
    @partial(once_differentiable, saves_inputs=False)
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        gradients = names_of(ctx.options.gradients)
        requested = _requested_gradients(ctx)
        requested_weights = [name for name in requested if name not in ("dx", "dprobs")]
        later = [name for name in gradients if name not in ("dx", "dprobs", *requested_weights)]
        half, ctx.half = ctx.half, None
        if half is not None and not later and requested == requested_weights and half.is_of(dy):
            source: Any = half.operands
            backward: Any = partial(fp8moe.moe_backward_weight, half.operands)
        else:
            source = saved = _saved_by_autograd(ctx)
            if ctx.collector is not None:
                ctx.collector.backward(dy)
            arguments = {"dy": dy.contiguous(), "comm": ctx.comm}
            if later and not requested_weights and keeps_graph():

                def backward(**_: Any) -> Any:
                    grads, operands = fp8moe.moe_backward_input(saved, **arguments, gradients=gradients)
                    ctx.half = Half(dy, operands)
                    return grads
            else:
                backward = partial(fp8moe.moe_backward, saved, **arguments, gradients=requested)
        if dispatch_modes():
            work = multiplications_of(source, ctx.num_rows, dy.shape[1], requested, ctx.options)
            backward = partial(_backward_in_view, backward, dy, source, work)
        dx, dprobs, *rest = _backward(ctx, backward, source, requested)
        return dx, *rest, None if dprobs is None else dprobs.to(ctx.dtypes[1]), *[None] * 7


def _saved_by_autograd(ctx: Any) -> Saved:
    try:
        tensors = iter(ctx.saved_tensors)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        codes = ctx.options.layer.precision.quantizes
        changed = "FP8 copies that quantize_weights() overwrote" if codes else "weights that were changed"
        what = f"w13, w2: got {changed}"
        if re.search(r"\b(Int|Long)Tensor", str(error)):
            what = "topk_ids, tokens_per_expert: got ids or counts that were changed"
        raise RuntimeError(
            f"{what} after the forward; wanted the forward's own; run the backward first"
        ) from error
    return map_arrays(lambda a: next(tensors) if a is PLACEHOLDER else a, ctx.saved)  # type: ignore[no-any-return]


def _forward_by_operator(
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    gemm_weights: Any,
    options: Options,
    comm: Any,
    handle: Tensor | None,
) -> tuple[Tensor, Saved | None]:
    """`call_forward` by its operator, which dispatch modes see: selective checkpointing may return the
    results of an earlier call in place of calling it. An Engine, whose record is its own, is called
    directly."""
    if comm is not None and implements(comm, Engine):
        return call_forward(x, ids, probs, gemm_weights, options, comm, handle)
    tensors = [t for w in gemm_weights for t in arrays_in(w)]
    options = with_formats(options, gemm_weights)
    if comm is None:
        y, *saved_tensors = forward_op.run(x, tensors, ids, probs, options)
        if not options.saves:
            return y, None
        _, saved_like = known_results(specs_of(x, ids, probs, gemm_weights), options)
    else:
        of_comm = getattr(comm, "handle", None)
        operands = (
            x,
            ids,
            probs,
            None,
            None,
            None,
            None,
            tensors,
            handle_of(comm) if of_comm is None else of_comm,
        )
        targets = NO_TARGETS._replace(handle=handle)
        y, *results = forward_over_ranks_op.run(*operands, targets, options)
        if not results:
            return y, None
        description, *saved_tensors = results
        saved_like = described_by(description)
    return y, saved_of(saved_like, saved_tensors, weights_of_backward(tensors, options), options)


_calls: dict[int, Callable[[], list[Tensor]]] = {}  # of the operator below, by number


def _backward_in_view(backward: Any, dy: Tensor, source: Any, products: int, **accumulators: Any) -> Any:
    """The result of ``backward(**accumulators)``, called by an operator that dispatch modes see. source: the
    record that it reads. products: number of multiplications in its matrix products."""
    written = arrays_in((accumulators["dw13"], accumulators["dw2"]))
    grads, number = None, next(NUMBERS)

    def is_new(a: Tensor) -> bool:
        return all(a is not t for t in written)

    def call() -> list[Tensor]:
        nonlocal grads
        grads = backward(**accumulators)
        return [a for a in arrays_in(grads) if is_new(a)]

    _calls[number] = call
    try:
        new = iter(_gradients_op.run(dy, arrays_in(source), written, products, number))
    finally:
        del _calls[number]
    return map_arrays(lambda a: next(new) if is_new(a) else a, grads)


@operator(
    "experts_gradients",
    writes=("main_grads",),
    flops=lambda dy, saved, main_grads, products, call: 2 * products,
)
def _gradients_op(
    dy: Tensor, saved: list[Tensor], main_grads: list[Tensor], products: int, call: int
) -> list[Any]:
    """The call with this number, with the tensors that it reads and writes."""
    if call not in _calls:
        raise RuntimeError(
            "experts_gradients: got a call outside of the backward that it is a part of; wanted the backward "
            "itself; a graph recorded of a backward must also record the forward"
        )
    return _calls[call]()


def _requested_gradients(ctx: Any) -> list[str]:
    """The gradients that the running backward call uses, of those in ``options.gradients``."""
    requested = set(itertools.compress(ctx.names, asked_for(ctx)))
    return [name for name in names_of(ctx.options.gradients) if name in requested]


def _accumulators(ctx: Any, source: Saved | SavedForWeights) -> list[Tensor | None]:
    """The ``grad`` of each weight that the running backward may add its gradient to."""
    if source.later:  # each chunk would round the sum
        return [None] * 3
    following = zip(ctx.names, ctx.next_functions, strict=False)
    nodes = iter([node for name, (node, _) in following if name in OF_WEIGHTS])
    return accumulators_of(ctx, [None if dtype is None else next(nodes) for dtype in ctx.dtypes[0]])


def _backward(
    ctx: Any, backward: Any, source: Saved | SavedForWeights, requested: Collection[str]
) -> list[Tensor | None]:
    """dx, dprobs, dw13 (or dw1), dw3, dw2 and dbias13, None for those that are not requested."""
    parameters, dtypes, options = ctx.parameters, ctx.dtypes[0], ctx.options
    mains, own = main_grads_of(parameters, requested), _accumulators(ctx, source)
    targets = [grad if main is None else main for main, grad in zip(mains, own, strict=True)]
    # torch.autograd.grad raises for None
    is_partial = len(requested) < len(names_of(options.gradients))
    dx, dprobs, *weight_grads, dbias13 = weight_gradients(backward, source, targets, dtypes, options)
    grads: list[Tensor | None] = []
    for w, main, grad, dtype, new in zip(parameters, mains, own, dtypes, weight_grads, strict=True):
        if main is not None:
            grads.append(shared_zeros(main, dtype) if is_partial or wants_zeros(w) else None)
            set_added(w)
        elif grad is not None:
            grads.append(no_entries(grad))
        else:
            grads.append(None if new is None else new.to(dtype))
    of_inputs = dx if "dx" in requested else None, dprobs if "dprobs" in requested else None
    return [*of_inputs, *grads, dbias13]
