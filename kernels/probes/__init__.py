"""Kernels that measure the time of single instructions, for figures that need a real GPU."""
