"""What a trainer wants to see of an FP8 layer: overflow, lost values, how full the experts are.

Everything stays on the device until it is read, so that collecting does not synchronise. It reads each
tensor twice more, which is why it is asked for (`fp8moe.adapters.torch_moe.FP8FlowMoE.collect_stats`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fp8moe
from fp8moe.formats import FORMATS

__all__ = ["LayerStats", "TensorStats", "of_tensor"]

FORMAT = "e4m3"  # what the FP8 recipes quantise activations and gradients to, by blocks of (1, 128)


@dataclass(frozen=True)
class TensorStats:
    """What quantising did to one tensor.

    Attributes
    ----------
    amax : Tensor, float32, scalar
        The largest magnitude; infinite or NaN where a value is.
    nonfinite : Tensor, int64, scalar
        Infinities and NaN. An infinity is quantised to the format's largest number (448), as Transformer
        Engine does: from there on nothing shows that there was one, but for this count.
    saturated : Tensor, int64, scalar
        Values larger than their code's.
    flushed : Tensor, int64, scalar
        Values that are not zero and whose code is.
    elements : int
        Of how many values these are counted.
    """

    amax: Tensor
    nonfinite: Tensor
    saturated: Tensor
    flushed: Tensor
    elements: int


@dataclass(frozen=True)
class LayerStats:
    """The last forward of a layer, and the last backward; of tensors before they are quantised.

    Attributes
    ----------
    rows_per_expert : Tensor, int32, [E]
        Of this rank's experts.
    overflow : Tensor, int32, [1]
        Rows that found no room.
    x : TensorStats
        The layer's input.
    a : TensorStats or None
        The activation between the two products; None where ``recompute`` keeps it not.
    dy : TensorStats or None
        The gradient of the output; None before a backward.
    """

    rows_per_expert: Tensor
    overflow: Tensor
    x: TensorStats
    a: TensorStats | None
    dy: TensorStats | None = None


def of_tensor(values: Tensor) -> TensorStats:
    """Count what quantising by (1, 128) blocks with power-of-two scales to e4m3 does.

    Parameters
    ----------
    values : Tensor, floating point, [M, K]
        On any device; nothing synchronises.

    Returns
    -------
    TensorStats
        On the same device.

    Raises
    ------
    TypeError, ValueError
        As `fp8moe.quantize`.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.adapters.torch_stats import of_tensor
    >>> stats = of_tensor(torch.tensor([[448.0, 1e-6, float("inf"), 0.0]]))
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


def of_forward(x: Tensor, saved: Any) -> LayerStats:
    """From the layer's input and what `fp8moe.moe_forward` kept. Raises NotImplementedError for chunks."""
    if saved.later:
        raise NotImplementedError("collect_stats: got True with overlap_chunks; wanted False")
    a = None
    if saved.h is not None:
        activated = fp8moe.swiglu(saved.h, saved.probs, activation=saved.activation)
        rows = torch.arange(len(activated), device=x.device)
        # what lies in padding is nobody's
        activated = torch.where((rows < saved.plan.expert_offsets[-1])[:, None], activated, 0)
        a = of_tensor(activated)
    return LayerStats(saved.plan.tokens_per_expert, saved.plan.overflow, of_tensor(x), a)


class Collector:
    """Gathers a layer's."""

    def __init__(self) -> None:
        self.stats: LayerStats | None = None

    def forward(self, x: Tensor, saved: Any) -> None:
        self.stats = of_forward(x, saved)

    def backward(self, dy: Tensor) -> None:
        if self.stats is not None:
            self.stats = replace(self.stats, dy=of_tensor(dy))
