"""Running a stage: the command line, peers, timing, autotuning, probes."""
