"""fp8moe for Megatron-Core: its MoE layer in FP8, or its token permutation alone.

Needs ``pip install 'fp8moe[megatron]'``.
"""

from fp8moe.adapters.megatron.layer import FP8FlowExperts, FP8FlowMoELayer, use_fp8_flow
from fp8moe.adapters.megatron.permutation import (
    Enabled,
    align_size,
    enable,
    permute,
    permute_and_pad_with_probs,
    permute_with_probs,
)

__all__ = [
    "Enabled",
    "FP8FlowExperts",
    "FP8FlowMoELayer",
    "align_size",
    "enable",
    "permute",
    "permute_and_pad_with_probs",
    "permute_with_probs",
    "use_fp8_flow",
]
