"""Epilogues of tcgen05.mma: accumulators start in tensor memory."""
