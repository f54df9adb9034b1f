"""What autograd functions and operators of the experts get besides the tensors of a call: options, targets of
gradients, weights as plain tensors, and numbers by which a layer or a communicator is found.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8moe import Quantized, QuantTensor
from fp8moe.adapters.torch.library import as_arguments
from fp8moe.adapters.torch.operands import FP8_BLOCK
from fp8moe.expert_parallel.protocols import chunks_of
from fp8moe.layer import checks as layer_checks
from fp8moe.layer import moe
from fp8moe.layer.options import LayerOptions
from fp8moe.layer.saved import Saved


@as_arguments
class Options(NamedTuple):
    """Arguments of `experts` other than tensors, and what follows from its tensors.

    w13_is_pair: whether w13 is given as w1 and w3. gradients: names of the gradients, separated by commas.
    for_statistics: whether to save what the statistics are computed from, also if no backward follows.
    gathers_bias, sums_router: as in `fp8moe.expert_parallel.protocols.Settings`. is_routed: whether the
        layer's own router has chosen the ids.
    formats: of the row-wise and column-wise codes of w13 and of w2, separated by commas, nothing for codes
        that there are not; for operators, which get codes as plain tensors.
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
MAIN_GRADS = "targets_main_grad13", "targets_main_grad3", "targets_main_grad2"
NO_TARGETS = Targets(None, None, None, torch.bfloat16, torch.bfloat16, [False] * 3, None)


def names_of(gradients: str) -> tuple[str, ...]:
    return tuple(gradients.split(",")) if gradients else ()


def with_formats(options: Options, gemm_weights: Sequence[Any]) -> Options:
    """The options for an operator."""
    codes = [w for w in gemm_weights if isinstance(w, Quantized)]
    sides = [q for w in codes for q in (w.rowwise, w.columnwise)]
    return options._replace(formats=",".join(["" if q is None else q.fmt for q in sides]))


def _codes(formats: Sequence[str], tensors: Iterable[Any]) -> tuple[Any, ...]:
    """w13, w2 and what follows them, from alternating codes and scales, in the order of `arrays_in`. formats:
    of the row-wise and the column-wise codes of each, "" where there are none."""
    arrays, sides = iter(tensors), list[Any]()
    for fmt, transposed in zip(formats, (False, True, False, True), strict=True):
        data, scales = (next(arrays), next(arrays)) if fmt else (None, None)
        sides.append(QuantTensor(data, scales, fmt, FP8_BLOCK, transposed=transposed) if fmt else None)
    return Quantized(*sides[:2]), Quantized(*sides[2:]), *arrays


def weights_of(options: Options, tensors: Any) -> Any:
    """w13, w2 and, if there is one, bias13 from their arrays, in the order of `arrays_in`."""
    if not options.layer.precision.quantizes:
        return tuple(tensors)
    return _codes(options.formats.split(","), tensors)


def _saved_sides(options: Options) -> list[bool]:
    """Of each of ``formats``, whether the backward reads codes of that orientation of the forward's."""
    of_w13, of_w2 = options.formats.split(",")[1::2]
    saved = options.layer.saved_orientations
    return [*saved("w13", bool(of_w13)), *saved("w2", bool(of_w2))]


def saved_weights(options: Options, tensors: Any) -> tuple[Any, ...]:
    """Weights, and a bias, in the form of `Saved`, without codes that only the forward uses."""
    if not options.layer.precision.quantizes:
        return tuple(tensors)
    formats = zip(options.formats.split(","), _saved_sides(options), strict=True)
    return _codes([fmt if saved else "" for fmt, saved in formats], tensors)


def weights_of_backward(gemm_weights: list[Tensor], options: Options) -> list[Tensor]:
    """The weights that the backward reads, of those of the forward."""
    if not options.layer.precision.quantizes:
        return gemm_weights
    kept, rest = [], gemm_weights
    for fmt, saved in zip(options.formats.split(","), _saved_sides(options), strict=True):
        if fmt:
            kept += rest[:2] if saved else []
            rest = rest[2:]
    return [*kept, *rest]


class Placeholder:
    """Stands for a tensor in a record whose tensors are elsewhere; None would mean that there is none."""


PLACEHOLDER = Placeholder()


LAYERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
NUMBERS = itertools.count()


def handle_of(layer: Any) -> Tensor:
    """A tensor with a number by which operators find the layer or communicator. A plain number would be a
    constant of the compiled code, which would be recompiled for every layer."""
    number = next(NUMBERS)
    LAYERS[number] = layer
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
            "of fp8moe.adapters.torch.arguments; or call the layer in a function under torch.compiler.disable"
        )
    return handle  # type: ignore[no-any-return]


def call_forward(
    x: Any,
    ids: Any,
    probs: Any,
    weights: Any,
    options: Options,
    comm: Any,
    handle: Tensor | None = None,
) -> tuple[Any, Saved]:
    """`fp8moe.moe_forward`, or `fp8moe.moe_forward_permuted` for permuted rows. handle: as in `experts`."""
    w13, w2, *bias = weights
    operands, gradients = (x, w13, w2, ids, probs, options.layer), names_of(options.gradients)
    of_all: dict[str, Any] = {"gradients": gradients, "bias13": bias[0] if bias else None}
    if options.align_size:
        return moe.forward_permuted(*operands, align_size=options.align_size, **of_all)
    kept = gradients
    if options.for_statistics and not kept:
        kept = "dx", "dprobs"
    elif comm is None:
        return moe.forward(*operands, comm=None, **of_all)
    router = None
    if options.is_routed and handle is not None:
        router = LAYERS[int(handle)].router_checksum
    announced = {"gathers_bias": options.gathers_bias, "router": router, "sums_router": options.sums_router}
    return moe.forward(*operands, comm=comm, kept=kept, announced=announced, **of_all)


def check_backend(x: Tensor, layer: LayerOptions, **sizes: Any) -> None:
    """`fp8moe.layer.checks.check_backend` for x's device, if the options limit the GEMMs."""
    if layer.limits_gemms:
        layer_checks.check_backend(layer, "cpu" if x.device.type == "cpu" else x.device.index, **sizes)


def check_traced(x: Tensor, weights: Any, options: Options) -> None:
    """`check_backend` for fake tensors, whose sizes become static thereby."""
    if not options.layer.limits_gemms:
        return
    w13, w2 = (w.shape for w in weights[:2])
    check_backend(
        x,
        options.layer,
        dtype=str(x.dtype).removeprefix("torch."),
        experts=int(w13[0]),
        hidden=int(w13[2]),
        ffn=int(w2[2] if options.ffn is None else options.ffn),
        gradients=names_of(options.gradients),
    )
