"""Kernels for rows, bound by memory: each row is read once, and kept in registers. For any arch."""
