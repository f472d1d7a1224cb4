"""The GEMM ladder of sm_100a."""
