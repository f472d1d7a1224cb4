"""Blackwell's GEMM with a packed weight of 4 bits."""
