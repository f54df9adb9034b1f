"""The experts in eager mode: a torch.autograd.Function over the core's record of a forward.

Autograd owns every tensor that the backward needs, and the record of the forward is one of shapes, with the
place of each array among these tensors: a record that held them would keep them alive, and out of sight of
saved-tensor hooks and checkpointing. A `Step` is what calls of one kind have in common. Its forward and its
backward are calls of arrays alone, which look at nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fp8moe
from fp8moe.activation import halves_of
from fp8moe.adapters.torch.accumulation import accumulators_of, no_entries
from fp8moe.adapters.torch.arguments import (
    NO_TARGETS,
    NUMBERS,
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
from fp8moe.adapters.torch.halves import Half, keeps_graph, runs
from fp8moe.adapters.torch.library import dispatch_modes, once_differentiable, operator, spec_of
from fp8moe.adapters.torch.main_grad import (
    OF_WEIGHTS,
    main_grads_of,
    set_added,
    shared_zeros,
    wants_zeros,
    weight_gradients,
)
from fp8moe.adapters.torch.operands import quantized_by
from fp8moe.expert_parallel.protocols import Engine, implements
from fp8moe.layer import moe
from fp8moe.layer.saved import Saved
from fp8moe.records import ArraySpec
from fp8moe.runtime import counters
from fp8moe.runtime.dispatch import Fixed
from fp8moe.runtime.record_trees import arrays_in, map_arrays
from fp8moe.runtime.recording import Layout, Recording, check_part, raw_part


class Step:
    """What calls of the experts with the same options, on tensors of the same kinds, have in common.

    options: its ``formats`` are empty. names: of the gradients of the Function's tensors, in their order.
    dtypes: of w13 (or w1), w3 and w2. weights: w13 and w2 with a placeholder for each array; then, if the
    forward quantises them, whether each is stored transposed, otherwise None.
    """

    def __init__(
        self,
        options: Options,
        names: tuple[str, ...],
        dtypes: tuple[torch.dtype | None, ...],
        dtype_of_probs: torch.dtype,
        weights: Any,
    ):
        self.options, self.names, self.weights = options, names, weights
        self.dtypes, self.dtype_of_probs = dtypes, dtype_of_probs
        self.gradients = names_of(options.gradients)
        rows = ("tokens_per_expert", "probs") if options.align_size else ("topk_ids", "topk_probs")
        of_weights = (name for name, w in zip(("w13", "w2"), weights[:2], strict=True) for _ in arrays_in(w))
        self.forward = Fixed("experts_forward", self._forward, ("x", *rows, *of_weights, "bias13"))

    def _forward(self, arrays: Sequence[Any], _: Any) -> tuple[tuple[Any, ...], Any]:
        x, ids, probs, *rest = arrays
        layer, remaining = self.options.layer, iter(rest)
        w13, w2, transposed = map_arrays(lambda _: next(remaining), self.weights)
        bias13 = next(remaining, None)
        if transposed is not None:
            how = halves_of(layer.activation.kind), layer.keeps_columnwise, transposed
            w13, w2 = quantized_by(fp8moe.quantize_weights, w13, w2, *how)
        operands = x, w13, w2, ids, probs, layer, self.gradients
        if align := self.options.align_size:
            y, saved = moe.permuted_experts_forward(*operands, align, bias13)
        else:
            y, saved = moe.experts_forward(*operands, None, bias13)
        return (y,), saved if self.gradients else ()

    def backward(self, layout: Layout, requested: tuple[str, ...], added: tuple[bool, ...]) -> Fixed:
        """The backward of a forward that has saved its arrays so. added: whether the gradients of w13 (or
        w1), w3 and w2 are added to an array that is written to."""
        backward: Fixed | None = layout.made.get((requested, added))
        if backward is None:
            names = *["saved"] * (1 + max(number for number, _ in layout.leaves)), "dy"
            run = partial(self._backward, layout, requested, added)
            backward = Fixed("experts_backward", run, names)
            layout.made[requested, added] = backward
        return backward

    def _backward(
        self, layout: Layout, requested: tuple[str, ...], added: tuple[bool, ...], arrays: Any, out: Any
    ) -> tuple[tuple[Any, ...], Any]:
        *kept, dy = arrays
        remaining = iter(out)
        targets = [next(remaining) if is_added else None for is_added in added]
        backward = partial(moe.experts_backward, layout.record(kept, raw_part), dy, gradients=requested)
        return tuple(weight_gradients(backward, targets, self.dtypes, False, self.options)), ()


step_of = lru_cache(maxsize=1024)(Step)


class Given(NamedTuple):
    """A call of a step, beside what autograd has to see.

    arrays: the rest of what the forward reads: the weights' arrays and the bias. parameters: whose
    ``main_grad`` is used. recording: of the forward at ``addresses``, where they are known.
    forward: in place of the step's, a function that returns y and `Saved`."""

    step: Step
    arrays: list[Tensor]
    parameters: Sequence[Any]
    recording: Recording | None = None
    addresses: Sequence[int] = ()
    forward: Callable[..., Any] | None = None
    comm: Any = None
    collector: Any = None


class Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, w3, w2, bias13, probs, ids, given):  # type: ignore[no-untyped-def]
        step = given.step
        if given.forward is not None:
            y, saved = given.forward(x, ids, probs)
            tensors, layout = _laid_out(saved.changed(overwritten=(None, None)) if step.gradients else None)
        elif given.recording is not None:
            arrays = [x, ids, probs, *given.arrays]
            (y,), tensors, layout = given.recording.replay([*given.addresses], arrays)
        else:
            (y,), tensors, layout = step.forward([x, ids, probs, *given.arrays])
        if step.gradients:
            # autograd detects overwritten codes, even if saved-tensor hooks have moved them
            ctx.save_for_backward(*tensors)
            if given.forward is None and counters.counting():
                counters.record_saved(layout.like.nbytes)
        ctx.layout, ctx.half, ctx.num_rows = layout, None, probs.shape
        ctx.step, ctx.parameters = step, given.parameters
        ctx.comm, ctx.collector = given.comm, given.collector
        ctx.is_fixed = given.forward is None
        return y

    @staticmethod
    @torch.compiler.disable
    @partial(once_differentiable, saves_inputs=False)
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        step, nodes = ctx.step, [node for node, _ in ctx.next_functions]
        gradients, named = step.gradients, zip(step.names, nodes, strict=True)
        asked = {name for name, node in named if node is not None and runs(node)}
        requested = tuple([name for name in gradients if name in asked])
        half, ctx.half = ctx.half, None
        if len(requested) == len(gradients) and ctx.is_fixed and half is None and not dispatch_modes():
            source = layout = ctx.layout
            tensors = [*_saved_by_autograd(ctx), dy.contiguous()]

            def backward(targets: list[Tensor | None]) -> list[Tensor | None]:
                added = tuple([t is not None for t in targets])
                out = tuple([t for t in targets if t is not None])
                return step.backward(layout, requested, added)(tensors, out)[0]
        else:
            source, backward = _by_record(ctx, dy, half, requested)
        dx, dprobs, *rest = _backward(ctx, backward, source, requested, nodes)
        return dx, *rest, _in_dtype(dprobs, step.dtype_of_probs), None, None


def _laid_out(saved: Saved | None) -> tuple[list[Tensor], Layout]:
    """The tensors of a record, and their places. What else an Engine's route holds stays there."""
    tensors: list[Tensor] = []

    def take(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return spec_of(value)

    like = map_arrays(take, saved)
    return tensors, Layout(like, tuple([(i, 0) for i in range(len(tensors))]))


apply = super(torch.autograd.Function, Experts).apply  # type: ignore[misc]


def _by_record(ctx: Any, dy: Tensor, half: Half | None, requested: tuple[str, ...]) -> tuple[Any, Any]:
    """The record that a backward reads, and the backward as a function of its accumulators: for a part of the
    gradients, over ranks, and where a dispatch mode sees it."""
    step = ctx.step
    gradients, options = step.gradients, step.options
    requested_weights = tuple([name for name in requested if name not in ("dx", "dprobs")])
    later = [name for name in gradients if name not in ("dx", "dprobs", *requested_weights)]
    if half is not None and not later and requested == requested_weights and half.is_of(dy):
        source: Any = half.operands
        backward: Any = partial(fp8moe.moe_backward_weight, half.operands)
    else:
        source = saved = ctx.layout.record(_saved_by_autograd(ctx), _part)
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
        work = multiplications_of(source, ctx.num_rows.numel(), dy.shape[1], requested, options)
        backward = partial(_backward_in_view, backward, dy, source, work)
    return source, lambda targets: weight_gradients(
        backward, targets, step.dtypes, bool(source.later), options
    )


def _part(t: Tensor, start: int, spec: ArraySpec) -> Tensor:
    """The array that begins at a byte of a saved tensor."""
    dtype = getattr(torch, spec.dtype.name)
    if t.shape == spec.shape and t.dtype == dtype:
        return t
    check_part(t.shape, t.itemsize, start, spec)
    return t[start : start + spec.nbytes].view(dtype).view(spec.shape)


def _in_dtype(grad: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return grad if grad is None or grad.dtype == dtype else grad.to(dtype)


def _aligned(t: Tensor) -> Tensor:
    """A saved tensor, in which arrays of any dtype may lie. Hooks may have put one of bytes anywhere."""
    return t.clone() if t.ndim == 1 and t.dtype == torch.uint8 and t.data_ptr() % 16 else t


def _saved_by_autograd(ctx: Any) -> Sequence[Tensor]:
    try:
        return [_aligned(t) for t in ctx.saved_tensors]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        codes = ctx.step.options.layer.precision.quantizes
        changed = "FP8 copies that quantize_weights() overwrote" if codes else "weights that were changed"
        what = f"w13, w2: got {changed}"
        if re.search(r"\b(Int|Long)Tensor", str(error)):
            what = "topk_ids, tokens_per_expert: got ids or counts that were changed"
        raise RuntimeError(
            f"{what} after the forward; wanted the forward's own; run the backward first"
        ) from error


def by_record(
    gemm_weights: Any, options: Options, comm: Any, handle: Any, collector: Any, x: Any, ids: Any, probs: Any
) -> tuple[Tensor, Saved | None]:
    """y and `Saved` of a forward over ranks, with statistics, or that a dispatch mode sees."""
    forward: Any = _forward_by_operator if dispatch_modes() else call_forward
    y, saved = forward(x, ids, probs, gemm_weights, options, comm, handle)
    if collector is not None:
        ranks = 1 if comm is None else comm.world_size
        collector.forward(x, ids, moe.experts_of(gemm_weights[0]) * ranks, saved, options.ffn)
    return y, saved


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


def _accumulators(ctx: Any, later: bool, nodes: Sequence[Any]) -> list[Tensor | None]:
    """The ``grad`` of each weight that the running backward may add its gradient to. later: whether there are
    chunks, each of which would round the sum. nodes: those that get the gradients."""
    if later:
        return [None] * 3
    of_weights = iter([node for name, node in zip(ctx.step.names, nodes, strict=True) if name in OF_WEIGHTS])
    return accumulators_of(ctx, [None if dtype is None else next(of_weights) for dtype in ctx.step.dtypes])


def _backward(
    ctx: Any, backward: Any, source: Any, requested: Collection[str], nodes: Sequence[Any]
) -> list[Tensor | None]:
    """dx, dprobs, dw13 (or dw1), dw3, dw2 and dbias13, None for those that are not requested."""
    step, parameters = ctx.step, ctx.parameters
    mains = main_grads_of(parameters, requested)
    own = _accumulators(ctx, bool(getattr(source, "later", ())), nodes)
    targets = [grad if main is None else main for main, grad in zip(mains, own, strict=True)]
    # torch.autograd.grad raises for None
    is_partial = len(requested) < len(step.gradients)
    dx, dprobs, *weight_grads, dbias13 = backward(targets)
    grads: list[Tensor | None] = []
    for w, main, grad, dtype, new in zip(parameters, mains, own, step.dtypes, weight_grads, strict=True):
        if main is not None:
            grads.append(shared_zeros(main, dtype) if is_partial or wants_zeros(w) else None)
            set_added(w)
        elif grad is not None:
            grads.append(no_entries(grad))
        else:
            grads.append(_in_dtype(new, dtype))
    return [dx if "dx" in requested else None, dprobs if "dprobs" in requested else None, *grads, dbias13]
