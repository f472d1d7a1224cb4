"""Running a stage: the command line, timing, autotuning, probes."""
