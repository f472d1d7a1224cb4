"""Attention of few queries and long caches: keys in pages or not, split over CTAs."""
