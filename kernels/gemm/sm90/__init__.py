"""The GEMM ladder of sm_90a."""
