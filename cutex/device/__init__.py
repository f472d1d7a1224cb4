"""Traced code that kernels share: instructions, barriers, epilogues."""
