"""Weights of 4 bits: `cutex.pack_w4`, and `cutex.matmul` with one."""
