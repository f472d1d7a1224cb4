"""Attention's shared parts: lengths, bands, masks and the online softmax, for every arch."""
