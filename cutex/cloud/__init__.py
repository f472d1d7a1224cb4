"""Renting a GPU: prices, preflight, what runs in the container."""
