"""Fitting of the cost models that choose configs, and timing what they are fitted to."""
