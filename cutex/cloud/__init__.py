"""Renting a GPU: prices, preflight, and the part that runs in the container."""
