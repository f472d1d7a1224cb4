"""Stage 3: a word of padding after each row of a tile.

Rows that lie 33 words apart begin in 32 different banks: a load of a column of the tile takes one
wavefront, as one of a row does. It costs 1/32 of the smem, and rows that begin at no multiple of 16
bytes.
"""

from __future__ import annotations

from cutlass import cute

from cutex.kernels.gemm.simt.stage0 import WARP
from cutex.kernels.gemm.simt.stage2 import Stage2


class Stage3(Stage2):
    def layout(self) -> cute.Layout:
        return cute.make_layout((WARP, WARP), stride=(WARP + 1, 1))
