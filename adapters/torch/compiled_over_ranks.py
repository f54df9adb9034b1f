"""The experts in compiled code, over several ranks.

The number of rows from other ranks, and so the shapes of the saved tensors, are known only when the forward
runs. The operator returns the saved tensors with dynamic sizes, and after y a description of them, a tensor
too: an operator can return nothing else, and what one run of a graph leaves outside of its tensors is lost
to checkpoints and to a second backward. The gradient is registered with the operator, because Dynamo does
not support such sizes in a torch.autograd.Function.
"""

from __future__ import annotations

import json
from typing import Any, cast

import torch
from torch import Tensor

from fp8moe import PermutationPlan, QuantTensor
from fp8moe.activation import Activation
from fp8moe.adapters.torch.arguments import (
    LAYERS,
    MAIN_GRADS,
    PLACEHOLDER,
    Options,
    Targets,
    call_forward,
    check_traced,
    weights_of,
    weights_of_backward,
)
from fp8moe.adapters.torch.compiled import (
    fake_gradients,
    results_of,
    results_of_backward,
    returned_gradients,
    saved_of,
    specs_of,
    without_weights,
)
from fp8moe.adapters.torch.flops import backward_flops, forward_flops
from fp8moe.adapters.torch.library import NAMESPACE, library, like, operator
from fp8moe.expert_parallel.protocols import Route
from fp8moe.layer.options import LayerOptions
from fp8moe.layer.permuted_rows import PlacedRows
from fp8moe.layer.saved import Saved
from fp8moe.records import ArraySpec
from fp8moe.records import Options as CheckedOptions
from fp8moe.runtime import checks
from fp8moe.runtime.record_trees import METADATA_TYPES, arrays_in, field_names


def _forward_over_ranks_fake(
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    w1: Tensor | None,
    w3: Tensor | None,
    w2: Tensor | None,
    bias13: Tensor | None,
    gemm_weights: list[Tensor],
    comm: Tensor,
    targets: Targets,
    options: Options,
) -> list[Tensor]:
    weights = weights_of(options, gemm_weights)
    check_traced(x, weights, options)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not options.saves:
        return [y]
    _, saved_like = results_of(specs_of(x, ids, probs, weights), options)
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
    flops=lambda x, ids, *rest: forward_flops(x, rest[5], ids, rest[-1]),
)
@torch.compiler.disable  # Dynamo traces code that runs between two graphs
def forward_over_ranks_op(
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    w1: Tensor | None,
    w3: Tensor | None,
    w2: Tensor | None,
    bias13: Tensor | None,
    gemm_weights: list[Tensor],
    comm: Tensor,
    targets: Targets,
    options: Options,
) -> list[Any]:
    """The weights and the targets of their gradients are arguments for autograd only."""
    weights = weights_of(options, gemm_weights)
    y, saved = call_forward(x, ids, probs, weights, options, LAYERS[int(comm)], targets.handle)
    if not options.saves:
        return [y]
    saved = without_weights(saved)
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
        return PLACEHOLDER
    ((name, values),) = value.items()
    if (kind := _DESCRIBED.get(name)) is None:
        raise ValueError(f"saved_metadata: got a record {name!r}; wanted one of {', '.join(_DESCRIBED)}")
    fields = dict(zip(field_names(kind) or (), map(_from_description, values), strict=True))
    if issubclass(kind, CheckedOptions):
        return kind(**fields)
    record = object.__new__(kind)
    record.__dict__.update(fields)
    return record


def described_by(metadata: Tensor) -> Saved:
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
    return fake_gradients(dy, None, backward_weights, ids, probs, *rest)


@operator(
    "experts_over_ranks_backward",
    writes=MAIN_GRADS,
    fake=_backward_over_ranks_fake,
    flops=lambda dy, _, __, weights, ids, *rest: backward_flops(dy, weights, ids, rest[-1]),
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    saved = saved_of(described_by(saved_metadata), saved_tensors, backward_weights, options)
    return results_of_backward(saved, dy, targets, options, LAYERS[int(comm)])


def _keep_over_ranks(ctx: Any, inputs: Any, output: Any) -> None:
    _, ids, probs, *_, gemm_weights, comm, targets, options = forward_over_ranks_op.unflatten(inputs)
    if not options.gradients:
        return
    ctx.save_for_backward(*output[1:], ids, probs, *weights_of_backward(gemm_weights, options))
    ctx.mark_non_differentiable(*output[1:])
    ctx.num_saved, ctx.comm, ctx.targets, ctx.options = len(output) - 1, comm, targets, options
    ctx.num_gemm_weights, ctx.num_others = len(gemm_weights), len(inputs) - 8


def _backward_over_ranks(ctx: Any, grads: Any) -> Any:
    saved_metadata, *saved = ctx.saved_tensors
    saved_tensors, (ids, probs, *backward_weights) = saved[: ctx.num_saved - 1], saved[ctx.num_saved - 1 :]
    operands = grads[0].contiguous(), saved_metadata, saved_tensors, backward_weights, ids, probs, ctx.comm
    operator = _backward_over_ranks_op
    results = operator.op(*operator.flatten((*operands, ctx.targets, ctx.options)))
    dx, dprobs, *weight_grads = returned_gradients(results, ctx.targets, ctx.options, probs)
    return dx, None, dprobs, *weight_grads, [None] * ctx.num_gemm_weights, *[None] * ctx.num_others


torch.library.register_autograd(
    f"{NAMESPACE}::experts_over_ranks", _backward_over_ranks, setup_context=_keep_over_ranks, lib=library
)
