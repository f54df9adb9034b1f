"""The experts of a layer in torch, with gradients, in eager mode and in compiled code.

`experts` takes a router's choice and the weights as the products use them; `fp8moe.torch`
and the module of `fp8moe.torch` call it. Every tensor that the backward needs is saved by
autograd: it is released with the backward, checkpointing and saved-tensor hooks apply to it, and in-place
modifications are detected.
"""

from __future__ import annotations

import itertools
import json
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

import fp8moe
from fp8moe import PermutationPlan, Quantized, QuantTensor
from fp8moe.activation import Activation
from fp8moe.adapters.torch.halves import (
    Half,
    asked_for,
    is_asked_for,
    keeps_graph,
    leaves_not_asked_for,
)
from fp8moe.adapters.torch.library import (
    NAMESPACE,
    as_arguments,
    dispatch_modes,
    library,
    like,
    once_differentiable,
    operator,
    records_operators,
    refuse_export,
    spec_of,
)
from fp8moe.adapters.torch.operands import FP8_BLOCK, Operands
from fp8moe.adapters.torch.stats import Collector
from fp8moe.expert_parallel.protocols import Engine, Route, chunks_of, implements
from fp8moe.formats import BFLOAT16
from fp8moe.layer import checks as layer_checks
from fp8moe.layer import moe
from fp8moe.layer.options import LayerOptions
from fp8moe.layer.permuted_rows import PlacedRows
from fp8moe.layer.saved import Saved, SavedForWeights
from fp8moe.records import ArraySpec
from fp8moe.records import Options as CheckedOptions
from fp8moe.runtime import checks
from fp8moe.runtime.record_trees import METADATA_TYPES, arrays_in, field_names, map_arrays
from fp8moe.runtime.recording import result_specs


@as_arguments
class Options(NamedTuple):
    """Arguments of `experts` other than tensors, and what follows from its tensors.

    w13_is_pair: whether w13 is given as w1 and w3. gradients: names of the gradients, separated by commas.
    for_statistics: whether to save what the statistics are computed from, also if no backward follows.
    gathers_bias, sums_router: as in `fp8moe.expert_parallel.protocols.Settings`. is_routed: whether the
        layer's own router has chosen the ids.
    formats: of w13's and w2's codes, for operators, which get these as plain tensors.
    """

    layer: LayerOptions
    align_size: int
    ffn: int | None
    w13_is_pair: bool
    gradients: str
    for_statistics: bool
    gathers_bias: bool
    is_routed: bool
    sums_router: bool
    formats: str = ""

    @property
    def saves(self) -> bool:
        """Whether the forward saves tensors."""
        return bool(self.gradients) or self.for_statistics


@as_arguments
class Targets(NamedTuple):
    """Where compiled code writes the gradients of w13 (or w1), w3 and w2.

    main_grad13, main_grad3, main_grad2: the ``main_grad`` that each gradient is added to, None to return it
    instead. return_zeros: which of the gradients added to a ``main_grad`` also return zeros, as a ``grad``.
    handle: as in `experts`.
    """

    main_grad13: Tensor | None
    main_grad3: Tensor | None
    main_grad2: Tensor | None
    dtype13: torch.dtype
    dtype2: torch.dtype
    return_zeros: list[bool]
    handle: Tensor | None


#: arguments of the backward operators that they write
_MAIN_GRADS = "targets_main_grad13", "targets_main_grad3", "targets_main_grad2"


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
    """`fp8moe.moe_forward`, differentiable by `fp8moe.moe_backward` in x, topk_probs, w13 and w2.

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
    (w13, w2), gemm_weights, ffn, parameters = weights
    w1, w3 = w13 if isinstance(w13, tuple) else (w13, None)  # w1 is all of w13 if there is no w3
    if gemm_weights is None:
        gemm_weights = [w.detach().to(x.dtype) for w in (w13, w2)]
    inputs = (("dx", x), ("dprobs", topk_probs), ("dw13", w1), ("dw13", w3), ("dw2", w2))
    parameters = (w1, w3, w2) if parameters is None else (parameters[0], None, parameters[1])
    recording = torch.is_grad_enabled()
    needed = {name: recording and t is not None and t.requires_grad for name, t in reversed(inputs)}
    needed["dw13"] |= recording and w3 is not None and w3.requires_grad
    gradients = [name for name in ("dx", "dprobs", "dw13", "dw2") if needed[name]]
    announced = announced or {}
    told = announced.get("gathers_bias", False), "router" in announced, announced.get("sums_router", False)
    saves = ",".join(gradients), collector is not None
    options = Options(layer, align_size, ffn, w3 is not None, *saves, *told)
    masters = w1, w3, w2
    if not (torch.compiler.is_compiling() or isinstance(x, FakeTensor) or records_operators()):
        rest = parameters, comm, handle, collector, options
        return _Eager.apply(x, *masters, topk_probs, topk_ids, gemm_weights, *rest)
    refuse_export(x, *masters, topk_probs)
    options = _with_formats(options, gemm_weights)
    tensors = [t for w in gemm_weights for t in arrays_in(w)]
    mains = _mains(parameters, gradients)
    zeros = [m is not None and wants_zeros(w) for m, w in zip(mains, parameters, strict=True)]
    first, second = (torch.bfloat16 if w is None else w.dtype for w in (w1, w2))
    targets = Targets(mains[0], mains[1], mains[2], first, second, zeros, handle)
    if comm is not None:
        operands = x, topk_ids, topk_probs, *masters, tensors, handle_of_comm(comm)
        return _forward_over_ranks_op(*operands, targets, options)[0]
    return _Compiled.apply(x, *masters, topk_probs, topk_ids, tensors, targets, options)


def check_backend(x: Tensor, layer: LayerOptions, **sizes: Any) -> None:
    """`fp8moe.layer.checks.check_backend` for x's device, if the options limit the GEMMs."""
    if layer.limits_gemms:
        layer_checks.check_backend(layer, "cpu" if x.device.type == "cpu" else x.device.index, **sizes)


def _check_traced(x: Tensor, weights: Any, options: Options) -> None:
    """`check_backend` for fake tensors, whose sizes become static thereby."""
    if not options.layer.limits_gemms:
        return
    w13, w2 = ((w.columnwise if isinstance(w, Quantized) else w).shape for w in weights)
    check_backend(
        x,
        options.layer,
        dtype=str(x.dtype).removeprefix("torch."),
        experts=int(w13[0]),
        hidden=int(w13[2]),
        ffn=int(w2[2] if options.ffn is None else options.ffn),
        gradients=_names(options.gradients),
    )


def main_grad_of(w: Tensor | None) -> Tensor | None:
    """The ``main_grad`` to which a parameter's gradient is added (Megatron's convention), or None.

    Megatron-FSDP's is a communication buffer with other contents, as ``overwrite_main_grad`` says; it copies
    the ``grad`` into it.
    """
    if w is None or getattr(w, "overwrite_main_grad", False) or hasattr(w, "__fsdp_param__"):
        return None
    main = getattr(w, "main_grad", None)
    if main is None:
        return None
    main, wanted = (t.to_local() if isinstance(t, DTensor) else t for t in (main, w))
    if main.shape != wanted.shape:
        raise ValueError(
            f"main_grad: got shape {list(main.shape)}; wanted {list(wanted.shape)}, its parameter's"
        )
    if not main.is_contiguous():
        raise ValueError(f"main_grad: got strides {main.stride()}; wanted C-contiguous memory")
    return main


def _sides_of(
    tensors: Iterable[Any], transposed: tuple[bool, ...], formats: tuple[str, ...]
) -> list[QuantTensor]:
    """Weights of these orientations and formats, from alternating codes and scales."""
    arrays = list(tensors)
    sides = zip(arrays[::2], arrays[1::2], transposed, formats, strict=True)
    return [QuantTensor(q, scales, fmt, FP8_BLOCK, transposed=t) for q, scales, t, fmt in sides]


def _names(gradients: str) -> tuple[str, ...]:
    return tuple(gradients.split(",")) if gradients else ()


def _call_forward(
    x: Any,
    ids: Any,
    probs: Any,
    weights: Any,
    options: Options,
    comm: Any,
    handle: Tensor | None = None,
) -> tuple[Any, Saved]:
    """`fp8moe.moe_forward`, or `fp8moe.moe_forward_permuted` for permuted rows. handle: as in `experts`."""
    operands, gradients = (x, *weights, ids, probs, options.layer), _names(options.gradients)
    if options.align_size:
        return moe.forward_permuted(*operands, align_size=options.align_size, gradients=gradients)
    kept = gradients
    if options.for_statistics and not kept:
        kept = "dx", "dprobs"
    elif comm is None:
        return moe.forward(*operands, comm=None, gradients=gradients)
    router = None
    if options.is_routed and handle is not None:
        router = _layers[int(handle)].router_checksum
    announced = {"gathers_bias": options.gathers_bias, "router": router, "sums_router": options.sums_router}
    return moe.forward(*operands, comm=comm, gradients=gradients, kept=kept, announced=announced)


# ---------------------------------------------------------------- eager mode


class _Placeholder:
    """Replaces a tensor that autograd saved in a record."""


_PLACEHOLDER = _Placeholder()


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, w3, w2, probs, ids, gemm_weights, parameters, comm, handle, collector, options):  # type: ignore[no-untyped-def]
        forward: Any = _forward_by_operator if dispatch_modes() else _call_forward
        y, saved = forward(x, ids, probs, gemm_weights, options, comm, handle)
        if collector is not None:
            ranks = 1 if comm is None else comm.world_size
            num_experts = moe.experts_of(gemm_weights[0]) * ranks
            collector.forward(x, ids, num_experts, saved, options.ffn)
        if options.gradients:
            # autograd detects overwritten codes, even if saved-tensor hooks have moved them
            saved = replace(saved, overwritten=(None, None))
            ctx.save_for_backward(*(a for a in arrays_in(saved) if isinstance(a, Tensor)))
            ctx.saved = map_arrays(lambda a: _PLACEHOLDER if isinstance(a, Tensor) else a, saved)
        inputs = (("dx", x), ("dw13", w1), ("dw13", w3), ("dw2", w2), ("dprobs", probs), ("", ids))
        ctx.names, ctx.half = [name for name, t in inputs if t is not None], None
        ctx.parameters, ctx.comm, ctx.options = parameters, comm, options
        ctx.dtypes = [None if w is None else w.dtype for w in (w1, w3, w2)], probs.dtype
        ctx.collector, ctx.num_rows = collector, probs.numel()
        return y

    @staticmethod
    @torch.compiler.disable
    @partial(once_differentiable, saves_inputs=False)
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        gradients = _names(ctx.options.gradients)
        requested = _requested_gradients(ctx)
        requested_weights = [name for name in requested if name in _OF_WEIGHTS]
        later = [name for name in gradients if name in _OF_WEIGHTS and name not in requested_weights]
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
        dtypes, probs_dtype = ctx.dtypes
        if dispatch_modes():
            work = _multiplications_of(source, ctx.num_rows, dy.shape[1], requested, ctx.options)
            backward = partial(_backward_in_view, backward, dy, source, work)
        dx, dprobs, *rest = _backward(backward, source, ctx.parameters, dtypes, requested, ctx.options)
        return dx, *rest, None if dprobs is None else dprobs.to(probs_dtype), *[None] * 7


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
    return map_arrays(lambda a: next(tensors) if a is _PLACEHOLDER else a, ctx.saved)  # type: ignore[no-any-return]


# ---- under a dispatch mode


def _forward_by_operator(
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    gemm_weights: Any,
    options: Options,
    comm: Any,
    handle: Tensor | None,
) -> tuple[Tensor, Saved | None]:
    """`_call_forward` by its operator, which dispatch modes see: selective checkpointing may return the
    results of an earlier call in place of calling it. An Engine, whose record is its own, is called
    directly."""
    if comm is not None and implements(comm, Engine):
        return _call_forward(x, ids, probs, gemm_weights, options, comm, handle)
    tensors = [t for w in gemm_weights for t in arrays_in(w)]
    options = _with_formats(options, gemm_weights)
    if comm is None:
        y, *saved_tensors = _forward_op.run(x, tensors, ids, probs, options)
        if not options.saves:
            return y, None
        _, saved_like = _known_results(_specs(x, ids, probs, gemm_weights), options)
    else:
        of_comm = getattr(comm, "handle", None)
        operands = x, ids, probs, None, None, None, tensors, handle_of(comm) if of_comm is None else of_comm
        targets = _NO_TARGETS._replace(handle=handle)
        y, *results = _forward_over_ranks_op.run(*operands, targets, options)
        if not results:
            return y, None
        description, *saved_tensors = results
        saved_like = _described_by(description)
    return y, _saved(saved_like, saved_tensors, _backward_weights(tensors, options), options)


_calls: dict[int, Callable[[], list[Tensor]]] = {}  # of the operator below, by number


def _backward_in_view(backward: Any, dy: Tensor, source: Any, products: int, **accumulators: Any) -> Any:
    """The result of ``backward(**accumulators)``, called by an operator that dispatch modes see. source: the
    record that it reads. products: number of multiplications in its matrix products."""
    written = arrays_in((accumulators["dw13"], accumulators["dw2"]))
    grads, number = None, next(_numbers)

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


# ---- multiplications, for counters of FLOPs


def _multiplications(
    products: Iterable[str], rows: int, hidden: int, ffn: int, activation: Activation
) -> int:
    """The number of multiplications in products of a layer. rows: (token, expert) pairs."""
    width = {name: activation.columns(ffn) for name in ("h", "dx", "dw13")}
    return rows * hidden * sum(width.get(name, ffn) for name in products)


def _products_of_backward(gradients: Collection[str], recompute: str | None) -> list[str]:
    """As the recipes compute them."""
    of_inputs = "dx" in gradients or "dprobs" in gradients
    products = ["h"] if recompute and gradients else []
    products += ["da"] if of_inputs or "dw13" in gradients else []
    products += ["dx"] if of_inputs else []
    return products + [name for name in ("dw13", "dw2") if name in gradients]


def _num_rows(x: Tensor, ids: Tensor, options: Options) -> int:
    """The number of rows routed to experts, or of permuted rows, padding included: the device alone knows how
    many rows belong to an expert. Over ranks those of this rank's tokens, as many as an average rank has."""
    return x.shape[0] if options.align_size else ids.numel()


def _forward_flops(x: Tensor, gemm_weights: list[Tensor], ids: Tensor, options: Options) -> int:
    w2 = gemm_weights[4 if options.layer.precision.quantizes else 1]  # [E, H, F]
    sizes = _num_rows(x, ids, options), x.shape[1], options.ffn or w2.shape[2]
    return 2 * _multiplications(("h", "y"), *sizes, options.layer.activation)


def _backward_flops(dy: Tensor, backward_weights: list[Tensor], ids: Tensor, options: Options) -> int:
    w2 = backward_weights[-2 if options.layer.precision.quantizes else 1]  # [E, H, F], codes [E, F, H]
    ffn = options.ffn or w2.numel() // (w2.shape[0] * dy.shape[1])
    products = _products_of_backward(_names(options.gradients), options.layer.recompute)
    return 2 * _multiplications(
        products, _num_rows(dy, ids, options), dy.shape[1], ffn, options.layer.activation
    )


def _multiplications_of(
    source: Saved | SavedForWeights, rows: int, hidden: int, requested: Collection[str], options: Options
) -> int:
    """Of a backward in eager mode, or of its second half."""
    halves = options.layer.activation.columns(1)
    if isinstance(source, Saved):
        w2 = source.w2.columnwise if isinstance(source.w2, Quantized) else source.w2
        ffn, products = w2.shape[2], _products_of_backward(requested, options.layer.recompute)
    else:
        ffn = source.dh.shape[1] // halves if source.a is None else source.a.shape[1]
        products = list(requested)
    return _multiplications(products, rows, hidden, options.ffn or ffn, options.layer.activation)


# ---- the backward, or its two halves if torch.autograd.grad requests the gradients of some inputs only


def _requested_gradients(ctx: Any) -> list[str]:
    """The gradients that the running backward call uses, of those in ``options.gradients``."""
    requested = set(itertools.compress(ctx.names, asked_for(ctx)))
    return [name for name in _names(ctx.options.gradients) if name in requested]


def _backward(
    backward: Any,
    source: Saved | SavedForWeights,
    parameters: Any,
    dtypes: Any,
    requested: Collection[str],
    options: Options,
) -> list[Tensor | None]:
    """dx, dprobs, dw13 (or dw1), dw3 and dw2, None for those that are not requested."""
    mains = _mains(parameters, requested)
    # torch.autograd.grad raises for None
    is_partial = len(requested) < len(_names(options.gradients))
    dx, dprobs, *weight_grads = _gradients(backward, source, mains, dtypes, options)
    grads: list[Tensor | None] = []
    for w, main, dtype, new in zip(parameters, mains, dtypes, weight_grads, strict=True):
        if main is None:
            grads.append(None if new is None else new.to(dtype))
        else:
            grads.append(_zeros_like(main, dtype) if is_partial or wants_zeros(w) else None)
            set_added(w)
    return [dx if "dx" in requested else None, dprobs if "dprobs" in requested else None, *grads]


_OF_WEIGHTS = ("dw13", "dw13", "dw2")  # gradient names of w13 (or w1), w3 and w2


def _mains(weights: Any, gradients: Collection[str]) -> list[Tensor | None]:
    """The ``main_grad`` of each weight that gets a gradient, None for the others."""
    pairs = zip(_OF_WEIGHTS, weights, strict=True)
    return [
        main_grad_of(w) if n in gradients and w is not None and w.requires_grad else None for n, w in pairs
    ]


def _in_halves(options: Options) -> bool:
    """Whether the gradients of gates and ups are computed as a pair: if the weights are a pair, or if padding
    must be cut from each half."""
    return options.w13_is_pair or (options.ffn is not None and options.layer.activation.gated)


def _gradients(
    backward: Any, source: Saved | SavedForWeights, mains: Any, dtypes: Any, options: Options
) -> list[Tensor | None]:
    """dx, dprobs, dw13 (or dw1), dw3 and dw2; a weight gradient with an entry in ``mains`` is added to it.
    backward: `fp8moe.moe_backward` of ``source``, or one of its halves."""
    in_halves = _in_halves(options)
    main13, main3, main2 = mains
    halves = (main13, main3) if options.w13_is_pair else (None, None)
    # added below, not by the product, which adds sums in float32
    added_later = in_halves and not options.w13_is_pair and main13 is not None
    # bfloat16 directly if all weights are; float32 for other dtypes and for sums over chunks
    all_bfloat16 = {*dtypes} <= {None, torch.bfloat16} and not source.later and not added_later
    g = backward(
        dw13=halves if in_halves else main13,
        dw2=main2,
        dtype="bfloat16" if all_bfloat16 else "float32",
        ffn=options.ffn,
    )
    if g.dw13 is None or not in_halves:
        return [g.dx, g.dprobs, g.dw13, None, g.dw2]
    if options.w13_is_pair:
        return [g.dx, g.dprobs, *g.dw13, g.dw2]
    if main13 is None:
        with torch.autocast(g.dw13[0].device.type, enabled=False):  # of float16 it would reject bfloat16
            return [g.dx, g.dprobs, torch.cat(g.dw13, dim=1), None, g.dw2]
    for half, added in zip(main13.chunk(2, dim=1), g.dw13, strict=True):
        half.add_(added)
    return [g.dx, g.dprobs, main13, None, g.dw2]


def wants_zeros(w: Tensor | None) -> bool:
    """Whether ``grad_added_to_main_grad`` was set by the code that set ``main_grad``, as Megatron does: it
    asserts that a ``grad`` exists after the backward, and discards it."""
    return hasattr(w, "grad_added_to_main_grad") and not hasattr(w, _SET_HERE)


def set_added(w: Tensor) -> None:
    if not hasattr(w, "grad_added_to_main_grad"):
        setattr(w, _SET_HERE, True)
    w.grad_added_to_main_grad = True  # type: ignore[attr-defined]


_SET_HERE = "_fp8moe_set_grad_added_to_main_grad"


_zeros: dict[Any, Tensor] = {}


def _zeros_like(main: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros that reuse the same memory as long as nobody holds or has modified it. Autograd uses a tensor
    without other references as ``grad`` without a copy."""
    key = tuple(main.shape), dtype, main.device
    cached = _zeros.get(key)
    # a detached tensor shares the version counter of its base
    if cached is None or cached._version or torch._C._storage_Use_Count(cached.untyped_storage()._cdata) > 1:
        cached = _zeros[key] = torch.zeros_like(main, dtype=dtype)
    return cached.detach()


# ---------------------------------------------------------------- compiled code
#
# Two operators of tensors and plain values. The shapes of the tensors saved for the second follow from the
# inputs' shapes. The second's writes to ``main_grad`` are declared, so compilers neither remove nor reorder
# it.


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, w3, w2, probs, ids, gemm_weights, targets, options):  # type: ignore[no-untyped-def]
        y, *saved = _forward_op(x, gemm_weights, ids, probs, options)
        backward_weights = _backward_weights(gemm_weights, options)
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
        dx, dprobs, *weight_grads = _returned_gradients(grads, ctx.targets, ctx.options, probs)
        return dx, *weight_grads, dprobs, *[None] * 4


def _backward_weights(gemm_weights: list[Tensor], options: Options) -> list[Tensor]:
    """The operands of the backward's products, of those of the forward: row-wise codes are used in the
    forward only, except with recompute."""
    if not options.layer.precision.quantizes:
        return gemm_weights
    return [*(gemm_weights[:2] if options.layer.recompute else ()), *gemm_weights[2:4], *gemm_weights[6:]]


def _returned_gradients(grads: Any, targets: Targets, options: Options, probs: Tensor) -> list[Tensor | None]:
    """The gradients for autograd from the results of an operator, in which empty tensors represent None."""
    dx, dprobs, *weight_grads = grads
    names = _names(options.gradients)
    has_grad = [name in names for name in _OF_WEIGHTS]
    has_grad[1] &= options.w13_is_pair
    rest = zip(has_grad, weight_grads, targets[:3], targets.return_zeros, strict=True)
    return [
        dx if "dx" in names else None,
        dprobs.to(probs.dtype) if "dprobs" in names else None,
        *(dw if returned and (main is None or zero) else None for returned, dw, main, zero in rest),
    ]


_NO_TARGETS = Targets(None, None, None, torch.bfloat16, torch.bfloat16, [False] * 3, None)


_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def handle_of(layer: Any) -> Tensor:
    """A tensor with a number by which operators find the layer or communicator. A plain number would be a
    constant of the compiled code, which would be recompiled for every layer."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


def handle_of_comm(comm: Any) -> Tensor:
    """The ``handle`` of a `fp8moe.expert_parallel.Transport`, by which compiled code finds it."""
    if chunks_of(comm) > 1:
        raise NotImplementedError(
            f"overlap_chunks: got {chunks_of(comm)} in compiled code; wanted 1, or the layer in a function "
            "under torch.compiler.disable"
        )
    handle = getattr(comm, "handle", None)
    if handle is None:
        raise NotImplementedError(
            f"comm: got a {type(comm).__name__} without a handle in compiled code; wanted a "
            "fp8moe.torch.ProcessGroup, or a Transport with handle = handle_of(itself) "
            "of fp8moe.adapters.torch.experts; or call the layer in a function under torch.compiler.disable"
        )
    return handle  # type: ignore[no-any-return]


def _with_formats(options: Options, gemm_weights: Sequence[Any]) -> Options:
    """The options for an operator."""
    codes = [w for w in gemm_weights if isinstance(w, Quantized)]
    return options._replace(formats=",".join([w.columnwise.fmt for w in codes]))


def _weights(options: Options, tensors: Any) -> Any:
    """w13 and w2 from their arrays, in the order of `arrays_in`."""
    if not options.layer.precision.quantizes:
        return tuple(tensors)
    first, second = options.formats.split(",")
    sides = _sides_of(tensors, (False, True, False, True), (first, first, second, second))
    return Quantized(*sides[:2]), Quantized(*sides[2:])


def _saved_weights(options: Options, tensors: Any) -> tuple[Any, Any]:
    """Weights in the form of `Saved`, which does not contain codes that only the forward uses."""
    if not options.layer.precision.quantizes:
        return tuple(tensors)  # type: ignore[return-value]
    both = len(tensors) == 6  # of w13; of w2 only the column-wise codes are saved
    first, second = options.formats.split(",")
    formats = (first, first, second) if both else (first, second)
    *w13, w2 = _sides_of(tensors, (False, True, True) if both else (True, True), formats)
    return Quantized(*(w13 if both else (None, *w13))), Quantized(None, w2)  # type: ignore[arg-type]


def _forward(x: Any, ids: Any, probs: Any, weights: Any, options: Options) -> tuple[Any, Saved]:
    """y, and the saved tensors without the weights."""
    y, saved = _call_forward(x, ids, probs, weights, options, None)
    return y, replace(saved, w13=None, w2=None, overwritten=(None, None))


def _results(specs: Any, options: Options) -> tuple[Any, Saved]:
    """Specs of the results of `_forward`, from specs of x, ids, probs and the weights."""
    return result_specs(  # type: ignore[no-any-return]
        lambda a: _forward(a[0], a[1], a[2], a[3:], options), [ArraySpec(*s) for s in specs]
    )


_known_results = lru_cache(maxsize=256)(_results)


def _specs(x: Any, ids: Any, probs: Any, kept_weights: Any) -> Any:
    """Arguments of `_results`; x may be any tensor of x's spec. FP8 weights may have transposed codes
    only."""
    specs = [spec_of(t) for t in (x, ids, probs)]
    for w in kept_weights:
        if isinstance(w, Quantized):
            specs.append(ArraySpec(w.columnwise.shape, BFLOAT16))
        else:
            specs.append(spec_of(w))
    return tuple((s.shape, s.dtype) for s in specs)


def _forward_fake(
    x: Tensor, gemm_weights: list[Tensor], ids: Tensor, probs: Tensor, options: Options
) -> list[Tensor]:
    weights = _weights(options, gemm_weights)
    _check_traced(x, weights, options)
    y, saved_like = _results(_specs(x, ids, probs, weights), options)
    return [like(a, x.device) for a in (y, *(arrays_in(saved_like) if options.saves else ()))]


@operator(
    "experts",
    fake=_forward_fake,
    flops=lambda x, weights, ids, probs, options: _forward_flops(x, weights, ids, options),
)
def _forward_op(
    x: Tensor, gemm_weights: list[Tensor], ids: Tensor, probs: Tensor, options: Options
) -> list[Any]:
    y, saved = _forward(x, ids, probs, _weights(options, gemm_weights), options)
    saved_tensors = arrays_in(saved) if options.saves else []
    # a compiler requires that results do not alias inputs, as the counts of permuted rows would
    input_addresses = {t.untyped_storage().data_ptr() for t in (x, ids, probs)}
    saved_tensors = [
        t.clone() if t.untyped_storage().data_ptr() in input_addresses else t for t in saved_tensors
    ]
    return [y, *saved_tensors]


def _fake_gradients(
    dy: Tensor,
    saved_tensors: list[Tensor] | None,
    backward_weights: list[Tensor],
    ids: Tensor,
    probs: Tensor,
    targets: Targets,
    options: Options,
) -> tuple[Tensor, ...]:
    """Results of the backward operators. saved_tensors: None if their shapes depend on other ranks' rows."""
    halves = _in_halves(options)
    _, saved_like = _results(_specs(dy, ids, probs, _saved_weights(options, backward_weights)), options)
    specs = arrays_in(saved_like) if saved_tensors is None else [spec_of(t) for t in saved_tensors]

    def backward(arrays: Any) -> Any:
        dy, *rest = arrays
        saved = _saved(saved_like, rest[: len(specs)], rest[len(specs) :], options)
        dw13 = (None, None) if halves else None
        return fp8moe.moe_backward(saved, dy, dw13=dw13, ffn=options.ffn, gradients=_names(options.gradients))

    g = result_specs(backward, [spec_of(dy), *specs, *(spec_of(t) for t in backward_weights)])
    grads = [_no_gradient(dy) if a is None else like(a, dy.device) for a in (g.dx, g.dprobs)]
    parts = g.dw13 if halves and g.dw13 is not None else (g.dw13, None)
    shapes = [None if part is None else part.shape for part in (*parts, g.dw2)]
    if halves and not options.w13_is_pair and shapes[0] is not None:
        experts, half, hidden = shapes[0]
        shapes[:2] = (experts, 2 * half, hidden), None
    for shape, main, dtype, zero in zip(
        shapes, targets[:3], _dtypes(targets), targets.return_zeros, strict=True
    ):
        shape = shape if shape is not None and (main is None or zero) else _NO_GRADIENT_SHAPE
        grads.append(torch.empty(shape, dtype=dtype, device=dy.device))
    return tuple(grads)


def _dtypes(targets: Targets) -> tuple[torch.dtype, ...]:
    """Dtypes of the gradients of w13 (or w1), w3 and w2."""
    return targets.dtype13, targets.dtype13, targets.dtype2


_NO_GRADIENT_SHAPE = (0,)  # shape of the tensors that represent None


def _no_gradient(dy: Tensor) -> Tensor:
    return dy.new_empty(_NO_GRADIENT_SHAPE, dtype=torch.float32)


def _saved(like: Saved, saved_tensors: Any, backward_weights: Any, options: Options) -> Saved:
    """The record of `_forward` with its arrays, and the weights."""
    remaining = iter(saved_tensors)
    saved = map_arrays(lambda a: next(remaining), like)
    w13, w2 = _saved_weights(options, backward_weights)
    return replace(saved, w13=w13, w2=w2)


@operator(
    "experts_backward",
    writes=_MAIN_GRADS,
    fake=_fake_gradients,
    flops=lambda dy, _, weights, ids, *rest: _backward_flops(dy, weights, ids, rest[-1]),
)
def _backward_op(
    dy: Tensor,
    saved_tensors: list[Tensor],
    backward_weights: list[Tensor],
    ids: Tensor,
    probs: Tensor,
    targets: Targets,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, saved_like = _known_results(_specs(dy, ids, probs, _saved_weights(options, backward_weights)), options)
    return _results_of_backward(
        _saved(saved_like, saved_tensors, backward_weights, options), dy, targets, options
    )


def _results_of_backward(
    saved: Saved, dy: Tensor, targets: Targets, options: Options, comm: Any = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    mains, dtypes, handle = targets[:3], _dtypes(targets), targets.handle
    if any(main is not None for main in mains) and keeps_graph():
        raise RuntimeError(
            "main_grad: got a backward of a compiled layer that keeps its graph (retain_graph=True, or "
            "torch.autograd.grad of some inputs, as in zero-bubble schedules), whose second run would add "
            "all gradients again; wanted one backward, or the layer in a function under "
            "torch.compiler.disable"
        )
    layer = None if handle is None else _layers.get(int(handle))
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
    backward = partial(fp8moe.moe_backward, saved, dy, comm=comm, gradients=_names(options.gradients))
    dx, dprobs, *weight_grads = _gradients(backward, saved, mains, dtypes, options)
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
    return tuple(grads)  # type: ignore[return-value]


# ---------------------------------------------------------------- compiled code, over several ranks
#
# The number of rows from other ranks, and so the shapes of the saved tensors, are known only when the forward
# runs. The operator returns the saved tensors with dynamic sizes, and after y a description of them.
# The gradient is registered with the operator, because Dynamo does not support such sizes in a
# torch.autograd.Function.


def _forward_over_ranks_fake(
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    w1: Tensor | None,
    w3: Tensor | None,
    w2: Tensor | None,
    gemm_weights: list[Tensor],
    comm: Tensor,
    targets: Targets,
    options: Options,
) -> list[Tensor]:
    weights = _weights(options, gemm_weights)
    _check_traced(x, weights, options)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not options.saves:
        return [y]
    _, saved_like = _results(_specs(x, ids, probs, weights), options)
    # the last one is the row map of the exchange
    saved_specs = [*arrays_in(saved_like), ArraySpec((0,), checks.INT32)]
    size = torch.library.get_ctx().new_dynamic_size
    description = torch.empty(size(), dtype=torch.uint8, device="cpu")
    return [
        y,
        description,
        *(like(ArraySpec(tuple(cast(int, size()) for _ in a.shape), a.dtype), x.device) for a in saved_specs),
    ]


@operator(
    "experts_over_ranks",
    fake=_forward_over_ranks_fake,
    flops=lambda x, ids, *rest: _forward_flops(x, rest[4], ids, rest[-1]),
)
@torch.compiler.disable  # Dynamo traces code that runs between two graphs
def _forward_over_ranks_op(
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    w1: Tensor | None,
    w3: Tensor | None,
    w2: Tensor | None,
    gemm_weights: list[Tensor],
    comm: Tensor,
    targets: Targets,
    options: Options,
) -> list[Any]:
    """The weights and the targets of their gradients are arguments for autograd only."""
    weights = _weights(options, gemm_weights)
    y, saved = _call_forward(x, ids, probs, weights, options, _layers[int(comm)], targets.handle)
    if not options.saves:
        return [y]
    saved = replace(saved, w13=None, w2=None, overwritten=(None, None))
    description = json.dumps(_described(saved)).encode()
    return [y, torch.frombuffer(bytearray(description), dtype=torch.uint8), *arrays_in(saved)]


#: types of the records in a forward's record
_DESCRIBED = {
    kind.__name__: kind
    for kind in (Saved, LayerOptions, Route, PermutationPlan, PlacedRows, QuantTensor, Activation)
}


def _described(value: Any) -> Any:
    """A record as plain data for JSON: {} for an array, a list for a tuple, {name: fields} for a record. A
    saved tensor may be written to disk and read back; what it describes must not be code, as a pickle is."""
    kind = type(value)
    if kind is tuple:
        return [_described(part) for part in value]
    if kind.__name__ in _DESCRIBED:
        return {kind.__name__: [_described(getattr(value, field)) for field in field_names(kind) or ()]}
    if isinstance(value, Tensor):
        return {}
    if kind in METADATA_TYPES:
        return value
    raise NotImplementedError(
        f"comm: got a {kind.__module__}.{kind.__qualname__} in the record of its forward; wanted the records "
        "of fp8moe.expert_parallel's exchange; call the layer in a function under torch.compiler.disable"
    )


def _from_description(value: Any) -> Any:
    """The inverse of `_described`, with placeholders for arrays."""
    if isinstance(value, list):
        return tuple(map(_from_description, value))
    if not isinstance(value, dict):
        return value
    if not value:
        return _PLACEHOLDER
    ((name, values),) = value.items()
    if (kind := _DESCRIBED.get(name)) is None:
        raise ValueError(f"saved_metadata: got a record {name!r}; wanted one of {', '.join(_DESCRIBED)}")
    fields = dict(zip(field_names(kind) or (), map(_from_description, values), strict=True))
    if issubclass(kind, CheckedOptions):
        return kind(**fields)
    record = object.__new__(kind)
    record.__dict__.update(fields)
    return record


def _described_by(metadata: Tensor) -> Saved:
    """The record of a forward, without its arrays."""
    saved: Saved = _from_description(json.loads(metadata.numpy().tobytes()))
    return saved


def _backward_over_ranks_fake(
    dy: Tensor,
    saved_metadata: Tensor,
    saved_tensors: list[Tensor],
    backward_weights: list[Tensor],
    ids: Tensor,
    probs: Tensor,
    comm: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    return _fake_gradients(dy, None, backward_weights, ids, probs, *rest)


@operator(
    "experts_over_ranks_backward",
    writes=_MAIN_GRADS,
    fake=_backward_over_ranks_fake,
    flops=lambda dy, _, __, weights, ids, *rest: _backward_flops(dy, weights, ids, rest[-1]),
)
@torch.compiler.disable
def _backward_over_ranks_op(
    dy: Tensor,
    saved_metadata: Tensor,
    saved_tensors: list[Tensor],
    backward_weights: list[Tensor],
    ids: Tensor,
    probs: Tensor,
    comm: Tensor,
    targets: Targets,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    saved = _saved(_described_by(saved_metadata), saved_tensors, backward_weights, options)
    return _results_of_backward(saved, dy, targets, options, _layers[int(comm)])


def _keep_over_ranks(ctx: Any, inputs: Any, output: Any) -> None:
    _, ids, probs, *_, gemm_weights, comm, targets, options = _forward_over_ranks_op.unflatten(inputs)
    if not options.gradients:
        return
    ctx.save_for_backward(*output[1:], ids, probs, *_backward_weights(gemm_weights, options))
    ctx.mark_non_differentiable(*output[1:])
    ctx.num_saved, ctx.comm, ctx.targets, ctx.options = len(output) - 1, comm, targets, options
    ctx.num_gemm_weights, ctx.num_others = len(gemm_weights), len(inputs) - 7


def _backward_over_ranks(ctx: Any, grads: Any) -> Any:
    saved_metadata, *saved = ctx.saved_tensors
    saved_tensors, (ids, probs, *backward_weights) = saved[: ctx.num_saved - 1], saved[ctx.num_saved - 1 :]
    operands = grads[0].contiguous(), saved_metadata, saved_tensors, backward_weights, ids, probs, ctx.comm
    operator = _backward_over_ranks_op
    results = operator.op(*operator.flatten((*operands, ctx.targets, ctx.options)))
    dx, dprobs, *weight_grads = _returned_gradients(results, ctx.targets, ctx.options, probs)
    return dx, None, dprobs, *weight_grads, [None] * ctx.num_gemm_weights, *[None] * ctx.num_others


torch.library.register_autograd(
    f"{NAMESPACE}::experts_over_ranks", _backward_over_ranks, setup_context=_keep_over_ranks, lib=library
)
