"""Thin adapters to frameworks: views in, allocation, stream, autograd, views out. No maths.

Each module imports its framework; none is imported by `fp8moe` itself.
"""
