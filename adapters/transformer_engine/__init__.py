"""Transformer Engine's permutation functions, for torch and for JAX, under its own names."""
