"""Thin adapters to frameworks: array views, allocation, streams and autograd. They contain no maths.

Each module imports its framework. `fp8moe` itself imports none of these modules.
"""
