"""The GEMM of an operand whose rows are any number of elements apart: a (M, K) with M contiguous, as
the gradient of a weight has it for an odd number of output features."""
