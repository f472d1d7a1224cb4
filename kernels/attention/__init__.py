"""The attention kernels, a folder for each operator, and what these share: the order of tiles, the
arguments of a launch, the rings of work tiles."""
