"""Stage 3: up to eight CTAs share a row, and add up in distributed smem.

A CTA of 1024 threads with many registers each leaves an SM to one row at a time, whose loads,
reduction and stores follow one another. A row shared by small CTAs on several SMs leaves each SM
room for several rows in different phases. `kernels/row/choose.py` picks the tile.
"""

from __future__ import annotations

from cutex.kernels.norm import WITH_CLUSTERS
from cutex.kernels.norm.stage2 import Stage2


class Stage3(Stage2):
    archs = WITH_CLUSTERS
