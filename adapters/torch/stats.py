"""Statistics of an FP8 layer: overflow, values lost by quantisation, expert loads.

All statistics remain on the device until they are read, so collecting them does not synchronise. It reads
each tensor twice more and is therefore optional (`fp8moe.torch.FP8FlowMoE.collect_stats`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor

import fp8moe
from fp8moe.expert_parallel.protocols import Route
from fp8moe.formats import FORMATS

__all__ = ["LayerStats", "TensorStats", "tensor_stats"]

#: what computes the experts in place of this library, `fp8moe.torch.diagnose` while it runs: by its thread,
#: and by ``~task`` of its backward, in which autograd's thread of a GPU computes checkpointed layers again
observers: dict[int, Callable[..., Tensor]] = {}


def observer() -> Callable[..., Tensor] | None:
    """That of this thread, or of the backward that runs in it; compiled code has none."""
    if not observers:
        return None
    return observers.get(threading.get_ident()) or observers.get(~torch._C._current_graph_task_id())


FORMAT = "e4m3"  # format of activations and gradients in the FP8 recipes, with blocks of (1, 128)


@dataclass(frozen=True)
class TensorStats:
    """Effects of quantising one tensor.

    Attributes
    ----------
    amax : Tensor, float32, scalar
        Largest magnitude; infinite or NaN if a value is.
    nonfinite : Tensor, int64, scalar
        Number of infinities and NaN. Infinities are quantised to the format's largest number (448), as in
        Transformer Engine, so afterwards this count is the only trace of them.
    saturated : Tensor, int64, scalar
        Number of values larger than their code.
    flushed : Tensor, int64, scalar
        Number of nonzero values with a zero code.
    elements : int or Tensor, int64, scalar
        Number of values; a tensor for `LayerStats.a`, whose number of rows only the device knows.
    """

    amax: Tensor
    nonfinite: Tensor
    saturated: Tensor
    flushed: Tensor
    elements: int | Tensor


@dataclass(frozen=True)
class LayerStats:
    """Statistics of a layer's last forward and backward, of tensors before quantisation.

    Attributes
    ----------
    rows_per_expert : Tensor, int32, [E]
        Number of rows of each of this rank's experts.
    overflow : Tensor, int32, [1]
        Number of dropped rows: with a `fp8moe.expert_parallel.Capacity`, of rows that this rank did not send,
        and of those that its own experts had no room for.
    invalid_ids : Tensor, int64, scalar
        Number of this rank's expert ids of num_experts and more, whose rows are dropped although no negative
        id says so: any is an error, such as ids that count from one (FP8MOE_CHECK=1 raises for them).
    negative_ids : Tensor, int64, scalar
        Number of this rank's expert ids below 0, which mean no expert, such as those of padding.
    x : TensorStats
        Input of the layer.
    a : TensorStats or None
        Activation between the two products, without padding; None if ``recompute`` or a gradient of w2 only
        does not save it.
    dy : TensorStats or None
        Gradient of the output; None before a backward.
    """

    rows_per_expert: Tensor
    overflow: Tensor
    invalid_ids: Tensor
    negative_ids: Tensor
    x: TensorStats
    a: TensorStats | None
    dy: TensorStats | None = None


def tensor_stats(values: Tensor) -> TensorStats:
    """Count the effects of quantising to e4m3 by (1, 128) blocks with power-of-two scales.

    Parameters
    ----------
    values : Tensor, floating point, [M, K]
        Values on any device; the call does not synchronise.

    Returns
    -------
    TensorStats
        Statistics on the same device.

    Raises
    ------
    TypeError, ValueError
        As in `fp8moe.quantize`.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.torch import tensor_stats
    >>> stats = tensor_stats(torch.tensor([[448.0, 1e-6, float("inf"), 0.0]]))
    >>> stats.nonfinite.item(), stats.elements
    (1, 4)
    """
    values = values.detach()
    q = fp8moe.quantize(values.contiguous(), fmt=FORMAT)
    finite, magnitudes = values.isfinite(), values.abs().float()
    codes, largest = q.data & 0x7F, FORMATS[FORMAT].max
    limits = (q.scales * largest).repeat_interleave(128, dim=1)[:, : values.shape[1]]
    return TensorStats(
        magnitudes.amax() if magnitudes.numel() else magnitudes.new_zeros(()),
        (~finite).sum(),
        (magnitudes > limits).sum(),
        ((codes == 0) & (magnitudes > 0)).sum(),
        values.numel(),
    )


def of_forward(x: Tensor, ids: Tensor, num_experts: int, saved: Any, ffn: int | None) -> LayerStats:
    """Statistics from the layer's input and the record of `fp8moe.moe_forward`; num_experts: over all ranks;
    ffn: F, if the weights are padded. Raises NotImplementedError for chunks."""
    if saved.later:
        raise NotImplementedError("collect_stats: got True with overlap_chunks; wanted False")
    a = None
    if saved.h is not None:
        h = fp8moe.dequantize(saved.h, dtype="bfloat16") if saved.options.save == "fp8" else saved.h
        activated = fp8moe.swiglu(h, saved.probs, activation=saved.options.activation)
        offsets, counts = saved.plan.expert_offsets, saved.plan.tokens_per_expert
        rows = torch.arange(len(activated), dtype=offsets.dtype, device=x.device)
        expert = torch.searchsorted(offsets[1:], rows, right=True).clamp(max=len(counts) - 1)
        counted = rows < (offsets[:-1] + counts)[expert]  # no padding
        a = tensor_stats(torch.where(counted[:, None], activated, 0))
        a = replace(a, elements=counted.sum() * (ffn or activated.shape[1]))
    overflow = saved.plan.overflow
    if isinstance(saved.route, Route):
        overflow = overflow + saved.route.plan.overflow
    invalid, negative = (ids >= num_experts).sum(), (ids < 0).sum()
    return LayerStats(saved.plan.tokens_per_expert, overflow, invalid, negative, tensor_stats(x), a)


class Collector:
    """Collects the statistics of a layer."""

    def __init__(self) -> None:
        self.stats: LayerStats | None = None

    def forward(self, *forward: Any) -> None:
        """The arguments of `of_forward`."""
        self.stats = of_forward(*forward)

    def backward(self, dy: Tensor) -> None:
        if self.stats is not None:
            self.stats = replace(self.stats, dy=tensor_stats(dy))
