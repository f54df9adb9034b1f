"""The permutation functions of ``transformer_engine.pytorch``.

Needs ``pip install 'fp8moe[torch]'``.
"""

from fp8moe.adapters.transformer_engine.pytorch import (
    Fp8Padding,
    Fp8Unpadding,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)

__all__ = [
    "Fp8Padding",
    "Fp8Unpadding",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]
