"""Kernels of a mixture of experts beside its grouped GEMMs, bound by memory; for any arch."""
