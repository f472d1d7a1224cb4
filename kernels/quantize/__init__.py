"""Quantization: elements and scale factors of blocks, along rows, columns or both, in one pass."""
