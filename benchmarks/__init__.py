"""Comparisons, pictures and tables of the documentation; results are in ``results/`` as JSON lines.

Run from the root of a checkout: ``python -m benchmarks.NAME``. ``fp8moe bench`` is in `fp8moe.bench`.
"""
