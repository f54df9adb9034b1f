"""Megatron-Core: its permutation, and its MoE layer. `fp8moe.megatron` has the public names."""
