"""The permutation functions of ``transformer_engine.jax``.

Needs ``pip install 'fp8moe[jax]'``.
"""

from fp8moe.adapters.transformer_engine.jax import (
    PureJaxPermState,
    compute_ragged_all_to_all_params,
    compute_reverse_ragged_all_to_all_params,
    local_permute_after_a2a,
    local_unpermute_before_a2a,
    pure_jax_token_combine,
    pure_jax_token_dispatch,
    routing_map_to_selected_experts,
    sort_chunks_by_index,
    token_combine,
    token_dispatch,
)

__all__ = [
    "PureJaxPermState",
    "compute_ragged_all_to_all_params",
    "compute_reverse_ragged_all_to_all_params",
    "local_permute_after_a2a",
    "local_unpermute_before_a2a",
    "pure_jax_token_combine",
    "pure_jax_token_dispatch",
    "routing_map_to_selected_experts",
    "sort_chunks_by_index",
    "token_combine",
    "token_dispatch",
]
