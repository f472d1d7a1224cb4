"""Grouped GEMM: rows in groups, and a matrix for each, such as the experts of a mixture."""
