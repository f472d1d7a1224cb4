"""Stage 8: each warp computes 64x64 of C, each of its threads 16x8.

For 4 of K a thread loads 24 times 16 bytes for 512 FMAs, instead of 16 times for 256, and a warp, 4
lanes by 8, reads 128 rows for 64x64 products, the fewest there can be. The CTA is 4 warps, and
two of them fit an SM: a thread may have 255 registers, 128 of which are sums.
"""

from __future__ import annotations

from cutlass import Int32

from cutex.kernels.gemm.simt.stage0 import WARP
from cutex.kernels.gemm.simt.stage5 import Lines
from cutex.kernels.gemm.simt.stage7 import Stage7

LANES_M, LANES_N = 4, 8  # of a warp


class Stage8(Stage7):
    def rows(self, thread: Int32) -> Lines:
        c = self.config
        warp = thread // WARP // (c.tile_n // (LANES_N * c.thread_n))
        first = warp * LANES_M * c.thread_m + 2 * (thread % WARP // LANES_N)
        # pairs of neighbours, 8 apart: a step leaves bits 1 and 2, which are the lane's
        return Lines(first, tuple(8 * (i // 2) + i % 2 for i in range(c.thread_m)))

    def columns(self, thread: Int32) -> Lines:
        c = self.config
        warp = thread // WARP % (c.tile_n // (LANES_N * c.thread_n))
        first = warp * LANES_N * c.thread_n + thread % LANES_N
        return Lines(first, tuple(LANES_N * i for i in range(c.thread_n)))
