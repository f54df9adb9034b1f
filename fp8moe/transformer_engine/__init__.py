"""Transformer Engine's permutation functions under its names: `.pytorch` and `.jax`, as in its package."""
