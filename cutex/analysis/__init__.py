"""Analysis of a kernel without a run: rooflines, bounds, layouts."""
