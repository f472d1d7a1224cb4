"""GEMM by mma.sync, on the archs that have neither wgmma nor tcgen05."""
