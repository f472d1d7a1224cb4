"""Epilogues of wgmma: accumulators start in registers."""
