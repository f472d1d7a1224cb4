"""GEMM of fp8 with fp32 scale factors of blocks."""
