"""Kernels that take the time of single instructions, where only a real GPU can tell."""
