"""The oracle and the CPU backend: every operation in NumPy, one module per topic.

Functions write into the buffers of the given record ``out``, and take raw NumPy arrays that the public
functions have validated. ``fp8moe.kernels_cuda`` has the same names and signatures. Each compiled loop has a
plain counterpart next to it, and a test asserts that both agree.
"""
