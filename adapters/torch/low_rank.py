"""Adapters (LoRA) of a layer's frozen weights, as parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp8moe.adapters.torch.lora import LoRA


class LowRank(nn.Module):
    """The adapter of a weight [E, out, in]: parameters lora_A [E, r, in] and lora_B [E, out, r]."""

    def __init__(self, shape: tuple[int, ...], rank: int, scaling: float, dropout: float, **options: Any):
        super().__init__()
        experts, rows, columns = shape
        self.lora_A = nn.Parameter(torch.empty(experts, rank, columns, **options))
        self.lora_B = nn.Parameter(torch.empty(experts, rows, rank, **options))
        self.scaling, self.dropout = scaling, dropout
        self.reset_parameters()
        self.adapter()  # which checks the numbers

    def reset_parameters(self) -> None:
        """A uniform of variance 1 / (3 in) and B of zeros, as PEFT's: the weight is unchanged at first."""
        nn.init.uniform_(self.lora_A, -(bound := self.lora_A.shape[2] ** -0.5), bound)
        nn.init.zeros_(self.lora_B)

    def adapter(self) -> LoRA:
        """Of a forward, in which training decides about dropout."""
        return LoRA(self.lora_A, self.lora_B, self.scaling, self.dropout if self.training else 0.0)

    def extra_repr(self) -> str:
        experts, rows, rank = self.lora_B.shape
        sizes = f"{experts} x {rows} x {self.lora_A.shape[2]}"
        return f"{sizes}, rank={rank}, scaling={self.scaling}, dropout={self.dropout}"


def pair_of(adapters: Any) -> tuple[LoRA | None, LoRA | None]:
    """The adapters by name as `moe_experts` takes them, of w13 and of w2."""
    first, second = (adapters[n].adapter() if n in adapters else None for n in ("w13", "w2"))
    return first, second
