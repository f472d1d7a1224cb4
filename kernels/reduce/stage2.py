"""Stage 2: the tree unrolled, its last five rounds within a warp.

The number of threads is known when the kernel is compiled, so no counter, comparison and jump is
left; and 32 threads that add to themselves need no barrier of the CTA, only of their warp.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from cutex.kernels.reduce.stage0 import WARP
from cutex.kernels.reduce.stage1 import Stage1


class Stage2(Stage1):
    @cute.jit
    def total(self, x: Float32, sums: cute.Tensor, thread: Int32) -> Float32:
        sums[thread] = x
        cute.arch.sync_threads()
        for round_ in cutlass.range_constexpr(self.config.threads.bit_length() - 1):
            step = self.config.threads >> (round_ + 1)
            if thread < step:
                sums[thread] = sums[thread] + sums[thread + step]
            if cutlass.const_expr(step >= WARP):
                cute.arch.sync_threads()
            else:
                cute.arch.sync_warp()
        return sums[0]
