"""Rows that threads share: their loads and stores, and reductions over them."""
