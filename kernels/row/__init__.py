"""Memory-bound kernels over rows, for any arch: each row is read once and kept on chip."""
