"""Runs of a stage: the command line, timing, autotuning, probes; and the error of the clock."""
