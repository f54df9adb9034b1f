"""The experts of a layer in torch, with gradients, in eager mode and in compiled code.

`experts` takes a router's choice and the weights as the GEMMs read them. Every tensor that the backward needs
is saved by autograd: it is released with the backward, checkpointing and saved-tensor hooks apply to it, and
in-place modifications are detected.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fp8moe import Quantized, QuantTensor
from fp8moe.adapters.torch import compiled, eager
from fp8moe.adapters.torch.arguments import (
    PLACEHOLDER,
    Options,
    Targets,
    handle_of_comm,
    with_formats,
)
from fp8moe.adapters.torch.compiled_over_ranks import forward_over_ranks_op
from fp8moe.adapters.torch.library import (
    PLAIN,
    as_bytes,
    dispatch_modes,
    records_operators,
    refuse_export,
)
from fp8moe.adapters.torch.main_grad import main_grads_of, wants_zeros
from fp8moe.adapters.torch.operands import Operands, codes_now
from fp8moe.adapters.torch.stats import Collector, observers
from fp8moe.layer.options import LayerOptions
from fp8moe.layer.recipes import GRADIENTS
from fp8moe.runtime import checks, interop
from fp8moe.runtime.dispatch import known, remember
from fp8moe.runtime.record_trees import arrays_in, map_arrays
from fp8moe.runtime.recording import Recording


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
    like: Like | None = None,
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
    like: of the caller's call; if it has the tensors of this one, later calls like it need no look at them.

    Only the required gradients are computed, and only their inputs are saved. If a parameter has a
    ``main_grad``, its gradient is added to that and ``grad_added_to_main_grad`` is set. If the parameter had
    the latter attribute before, as Megatron's DistributedDataParallel sets it, its ``grad`` becomes zeros
    that share memory, because Megatron expects a ``grad`` and discards it; otherwise its ``grad`` remains
    None.
    """
    (w13, w2), codes, ffn, whole, bias13 = weights
    w1, w3 = w13 if isinstance(w13, tuple) else (w13, None)  # w1 is all of w13 if there is no w3
    leaves = w1, w3, w2, bias13
    parameters = (w1, w3, w2) if whole is None else (whole[0], None, whole[1])
    inputs = ("dx", x), ("dw13", w1), ("dw13", w3), ("dw2", w2), ("dbias13", bias13), ("dprobs", topk_probs)
    recording = torch.is_grad_enabled()
    needed = {name for name, t in inputs if recording and t is not None and t.requires_grad}
    gradients = ",".join([name for name in GRADIENTS if name in needed])
    announced = announced or {}
    told = announced.get("gathers_bias", False), "router" in announced, announced.get("sums_router", False)
    options = Options(layer, align_size, ffn, w3 is not None, gradients, collector is not None, *told)
    is_eager = not (torch.compiler.is_compiling() or isinstance(x, FakeTensor) or records_operators())
    alone = is_eager and comm is None and collector is None and not dispatch_modes()
    read, transposed = codes, None
    if codes is None and not layer.precision.quantizes:
        read = [w.detach().to(x.dtype).contiguous() for w in (w13, w2)]
    if read is None and alone and (transposed := stored_transposed(w13, w2)) is not None:
        read = as_stored(w13, transposed[0]), as_stored(w2, transposed[1])
    elif read is None:
        read = codes_now((w13, w2), layer)
    if codes is not None or layer.precision.quantizes:
        read = map_arrays(as_bytes, tuple(read))
    gemm_weights = [*read] if bias13 is None else [*read, bias13.detach()]
    if is_eager:
        names = tuple([name for name, t in (*inputs, ("", topk_ids)) if t is not None])
        dtypes = tuple([None if w is None else w.dtype for w in (w1, w3, w2)])
        form = *map_arrays(lambda _: PLACEHOLDER, tuple(read)), transposed
        step = eager.step_of(options, names, dtypes, topk_probs.dtype, form)
        if alone:
            given = eager.Given(step, arrays_in(tuple(gemm_weights)), parameters)
            if like is not None:
                like.remember(step, [x, topk_ids, topk_probs, *given.arrays], leaves)
        else:
            by_record = partial(eager.by_record, gemm_weights, options, comm, handle, collector)
            given = eager.Given(step, [], parameters, forward=by_record, comm=comm, collector=collector)
        return eager.apply(x, *leaves, topk_probs, topk_ids, given)  # type: ignore[no-any-return]
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


def stored_transposed(w13: Any, w2: Any) -> tuple[bool, bool] | None:
    """Whether w13 and w2 are stored transposed, in the memory of contiguous weights; None where a forward
    cannot quantise them as they are."""
    found = []
    for parts in (w13 if isinstance(w13, tuple) else (w13,), (w2,)):
        if not all(type(w) in PLAIN for w in parts):
            return None
        transposed = not all(w.is_contiguous() for w in parts)
        if transposed and not all(w.mT.is_contiguous() for w in parts):
            return None
        found.append(transposed)
    return found[0], found[1]


def as_stored(w: Any, transposed: bool) -> Any:
    if isinstance(w, tuple):
        return tuple([as_stored(part, transposed) for part in w])
    w = w.detach()
    return w.mT if transposed else w


# ---------------------------------------------------------------- calls like earlier ones


class Like(NamedTuple):
    """An eager call and what decides how it is computed: the kinds of its tensors, which of them require
    gradients, and its other arguments. One that equals an earlier call in this has passed the same checks,
    and needs no conversion.

    arrays: x, ids, probabilities and what the GEMMs read, at ``addresses``. leaves: w1, w3, w2 and bias13.
    known: the step and the recording of the earlier call, None without one.
    """

    key: tuple[Any, ...]
    arrays: list[Tensor]
    addresses: list[int]
    leaves: tuple[Tensor | None, ...]
    known: tuple[eager.Step, Recording] | None

    def run(self) -> Tensor:
        """y, as the earlier call has computed it."""
        step, recording = self.known  # type: ignore[misc]
        x, ids, probs, *rest = self.arrays
        if not step.options.layer.precision.quantizes:
            # saved as they are: the backward reads the forward's values, also if ``data`` is replaced
            rest = [w.detach() for w in rest]
        given = eager.Given(step, rest, self.leaves[:3], recording, self.addresses)
        return eager.apply(x, *self.leaves, probs, ids, given)  # type: ignore[no-any-return]

    def remember(self, step: eager.Step, arrays: list[Tensor], leaves: tuple[Any, ...]) -> None:
        """That a call has been checked which reads ``arrays``, if they are this one's: none is converted."""
        framework: Any = interop.framework_of_type(type(arrays[0]))  # type: ignore[arg-type]
        description = framework.describe(arrays, True)
        same = all(a is b for a, b in zip(self.leaves, leaves, strict=True))
        if description is None or description[1] != self.addresses or not same:
            return
        if any(a.dtype != b.dtype or a.shape != b.shape for a, b in zip(self.arrays, arrays, strict=True)):
            return
        if (recording := step.forward.recording(framework, description, arrays, ())) is not None:
            remember(self.key, (step, recording))


def like_of(
    how: tuple[Any, ...],
    x: Any,
    leaves: tuple[Any, ...],
    ids: Any,
    probs: Any,
    codes: Any = None,
) -> Like | None:
    """None for a call that has to be looked at as a whole. how: its other arguments. leaves: w1, w3, w2 and
    bias13. codes: two `Quantized` that the GEMMs read in place of w1, w3 and w2."""
    if type(x) not in PLAIN or dispatch_modes() or checks.reads_values() or observers:
        return None
    if torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active():
        return None
    arrays, kinds = [x, ids, probs], list[Any]()
    if codes is None:
        arrays += [t for t in leaves if t is not None]
    elif not _describe_codes(codes, leaves, arrays, kinds):
        return None
    framework: Any = interop.framework_of_type(type(x))  # type: ignore[arg-type]
    if (description := framework.describe(arrays, True)) is None:
        return None
    device, addresses, described = description
    recording = torch.is_grad_enabled()
    grads = [None if t is None else recording and t.requires_grad for t in (x, probs, *leaves)]
    key = how, framework, device, *grads, *described, *kinds
    try:
        return Like(key, arrays, addresses, leaves, known(key))
    except TypeError:  # not hashable, as no valid argument is
        return None


def _describe_codes(codes: Any, leaves: tuple[Any, ...], arrays: list[Any], kinds: list[Any]) -> bool:
    """Adds the arrays of the codes and the bias, and what else decides how they are read, with the kinds of
    the masters. False for records or masters of other types."""
    if type(codes) not in (tuple, list) or [*map(type, codes)] != [Quantized, Quantized]:
        return False
    for w in codes:
        for q in (w.rowwise, w.columnwise):
            if type(q) is QuantTensor:
                if getattr(q.data, "requires_grad", False) or getattr(q.scales, "requires_grad", False):
                    return False  # to be refused
                arrays += (q.data, q.scales)
                kinds += (q.fmt, q.block, q.layout, q.transposed)
            elif q is not None:
                return False
            kinds.append(q is None)
    for w in leaves[:3]:
        if w is not None:
            if type(w) not in PLAIN or w.layout is not torch.strided or (w.numel() and not w.data_ptr()):
                return False  # also one that has no memory
            kinds += (w.shape, w.dtype, w.device)
    if leaves[3] is not None:
        arrays.append(leaves[3])
    return True
