"""The GEMM of an operand with any stride: a (M, K) with M contiguous, as a weight's gradient has it
for an odd number of output features."""
