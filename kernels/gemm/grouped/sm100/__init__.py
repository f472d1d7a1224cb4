"""Grouped GEMM kernels for Blackwell."""
