"""Tensor-core kernels of the grouped GEMM, launchers beside sources; `kernels_cuda.grouped_gemm` chooses."""
