"""Compiles and launches kernels: the driver, NVRTC, Numba, and what launchers share."""
