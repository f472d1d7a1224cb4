"""Stage 7: tiles in an order that lets L2 serve most of what they load.

Idea: the 74 pairs of CTAs work on consecutive tiles. Dealt out row by row, at 8192x8192 they cover
two rows of 32 tiles and a bit, and so read all of B and three rows of A in each wave: 35 strips of
256 x K. A block of 8 by 9 tiles reads 8 strips of A and 10 of B: half. So go through the tiles in
bands of `raster_group` rows, and through every second band backwards (schedulers/raster.py).

Changed since stage 6: `raster`.

At K=4096 a strip has 2 MB. A wave of 32768 cycles at 1.9 GHz takes 17 us, in which memory delivers
120 MB: neither order is bound by it on paper, but 73 MB a wave are 60 % of the rate, with all pairs
asking for the same strips at nearly the same time, and 36 MB is 30 %. Others measured 1.05 to 1.15
times on 8192-sized problems, next to nothing where A and B fit in L2 (126 MB) together.
"""

from __future__ import annotations

from cutex.kernels.gemm.sm100.stage6 import Stage6
from cutex.schedulers.raster import Raster


class Stage7(Stage6):
    """Barriers, smem and tensor memory as in stage 6."""

    number = 7

    @property
    def raster(self) -> Raster:
        return Raster(group=self.config.raster_group, along=self.config.raster_along)
