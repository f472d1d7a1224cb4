"""Stage 1: a warp computes an element of C, its lanes along K.

K is contiguous in A and in B, so the lanes of a warp load 32 neighbours: a whole line for each
load, where stage 0 asked for 32. Each lane adds up every 32nd product, and shuffles add up the
lanes. Still two loads an FMA, now of four sectors each.
"""

from __future__ import annotations

import operator

import cutlass
from cutlass import Float32, cute

from cutex.kernels.gemm.simt.stage0 import WARP, Stage0


class Stage1(Stage0):
    @property
    def num_threads(self) -> int:
        return self.config.tile_m * self.config.tile_n * WARP

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor) -> None:
        c, (block_m, block_n, _) = self.config, cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        m = block_m * c.tile_m + warp // c.tile_n
        n = block_n * c.tile_n + warp % c.tile_n
        if m < cute.size(mC, mode=[0]) and n < cute.size(mC, mode=[1]):
            total = Float32(0)
            for k in cutlass.range(lane, cute.size(mA, mode=[1]), WARP, unroll=4):
                total += mA[m, k] * mB[n, k]
            total = cute.arch.warp_reduction(total, operator.add)
            if lane == 0:
                mC[m, n] = total
