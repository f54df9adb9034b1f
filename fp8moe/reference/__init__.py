"""The oracle and the CPU backend: every operation in NumPy, one module a topic.

Functions write into the buffers of the record ``out`` that they are given, and take raw NumPy arrays
that the public functions have checked. ``fp8moe.kernels_cuda`` has the same names and signatures. Where a
loop is compiled for speed, its plain form stands beside it and a test holds them equal.
"""
