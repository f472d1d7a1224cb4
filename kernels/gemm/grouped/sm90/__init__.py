"""Grouped GEMM kernels for Hopper."""
