"""Stage 3: warps add up in registers.

A shuffle hands a lane's register to another lane: five of them add up a warp without smem and
without a barrier. Smem then has one word a warp, and one barrier is left of ten.
"""

from __future__ import annotations

import operator

from cutlass import Float32, Int32, cute

from cutex.kernels.reduce.stage0 import WARP
from cutex.kernels.reduce.stage2 import Stage2


class Stage3(Stage2):
    @cute.jit
    def total(self, x: Float32, sums: cute.Tensor, thread: Int32) -> Float32:
        warps = self.config.threads // WARP
        x = cute.arch.warp_reduction(x, operator.add)
        if thread % WARP == 0:
            sums[thread // WARP] = x
        cute.arch.sync_threads()
        return cute.arch.warp_reduction(sums[thread % warps], operator.add, threads_in_group=warps)
