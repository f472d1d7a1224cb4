"""Traced code that kernels share: instructions, barriers, work tiles, epilogues."""
