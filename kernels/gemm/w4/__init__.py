"""GEMM of 16-bit activations with a packed weight of 4 bits: out = ops(x @ W^T)."""
