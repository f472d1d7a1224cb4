"""Stage 2: three slots. While one is multiplied, the copies of the next two tiles are under way:
what memory takes passes meanwhile, and one barrier a tile is left of two, before a slot is read
for the first time and the one before it is filled again."""

from __future__ import annotations

from cutex.kernels.gemm.sm80.general import General
from cutex.kernels.gemm.sm80.stage1 import Stage1


class Stage2(Stage1):
    min_stages = General.min_stages
    mainloop = General.mainloop
