"""Rows shared by threads: loads, stores and reductions."""
