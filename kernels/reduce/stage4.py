"""Stage 4: each thread adds up four loads of 16 bytes before any of its neighbours' sums.

One element a thread is 2 or 4 bytes in flight, and a CTA of barriers and shuffles for 2 to 4 KB.
Here a thread has 64 bytes in flight, a load of a warp covers four lines, and the second and third
launch have 16 to 32 times less to do: what is left is bound by memory.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from cutex.kernels.reduce.stage3 import Stage3

BITS = 128  # of a load


class Stage4(Stage3):
    def elements(self, mX: cute.Tensor) -> int:
        return self.config.threads * self.config.vectors * (BITS // mX.element_type.width)

    @cute.jit
    def loaded(self, mX: cute.Tensor, block: Int32, thread: Int32) -> Float32:
        threads, vectors = self.config.threads, self.config.vectors
        width, n = BITS // mX.element_type.width, cute.size(mX)
        rX = cute.make_rmem_tensor((width, vectors), mX.element_type)  # (V, NumV)
        rX.fill(0)
        for i in cutlass.range_constexpr(vectors):
            at = ((block * vectors + i) * threads + thread) * width
            if at + width <= n:
                gX = cute.make_tensor((mX.iterator + at).align(16), cute.make_layout(width))  # (V)
                cute.autovec_copy(gX, rX[None, i])
            else:
                for j in cutlass.range_constexpr(width):
                    if at + j < n:
                        rX[j, i] = mX[at + j]
        return rX.load().to(Float32).reduce(cute.ReductionOp.ADD, Float32(0), 0)
