"""Block-scaled GEMM on Blackwell: MXFP8, MXFP4, NVFP4, and fp8 with fp4."""
