"""Stage 1: a tree in smem, whose second half is added to the first.

The threads that add are the first ones, so that whole warps leave the loop, and those that stay
read neighbouring words: no lane idles beside one that works until a warp is left.
"""

from __future__ import annotations

from cutlass import Float32, Int32, cute

from cutex.kernels.reduce.stage0 import Stage0


class Stage1(Stage0):
    @cute.jit
    def total(self, x: Float32, sums: cute.Tensor, thread: Int32) -> Float32:
        sums[thread] = x
        cute.arch.sync_threads()
        step = Int32(self.config.threads // 2)
        while step > 0:
            if thread < step:
                sums[thread] = sums[thread] + sums[thread + step]
            cute.arch.sync_threads()
            step //= 2
        return sums[0]
