"""Stage 5: one launch, whose last CTA adds up the sums of all.

As many CTAs as run at one time walk over the elements, each keeping its sum in registers. Each
writes it and counts itself by an atomic add, which releases what it wrote and acquires what those
before it did; the one that finds all others counted adds up their sums, in their order, so that the
bits are the same in every run. Two launches and their starts and ends are gone.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Operand
from cutex.device.last_arrival import is_last_arrival
from cutex.kernels.reduce.stage0 import WARP
from cutex.kernels.reduce.stage4 import Stage4


class Stage5(Stage4):
    def operands(self, dtype: str) -> tuple[Argument, ...]:
        x, first, _, total = super().operands(dtype)
        return x, first, Operand("counter", ("words",), "int32", whole=False), total

    @cute.jit
    def __call__(self, mX, mFirst, mCounter, mTotal, stream) -> None:
        parts = cute.ceil_div(cute.size(mX), self.elements(mX))
        ctas = cutlass.min(parts, self.config.ctas)
        self.once(mX, mFirst, mCounter, mTotal).launch(
            grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def once(self, mX, mFirst, mCounter, mTotal) -> None:
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout(WARP), 16)  # (WARP)
        is_last = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        ctas = cute.arch.grid_dim()[0]
        x = self.walked(mX, block, ctas, thread)
        total = self.total(x, sums, thread)
        if thread == 0:
            mFirst[block] = total
            is_last[0] = Int32(is_last_arrival(mCounter.iterator, ctas))
        cute.arch.sync_threads()
        if is_last[0] != 0:
            x = Float32(0)
            for cta in cutlass.range(thread, ctas, self.config.threads):
                x += mFirst[cta]
            total = self.total(x, sums, thread)
            if thread == 0:
                mTotal[0] = total

    @cute.jit
    def walked(self, mX: cute.Tensor, first: Int32, step: Int32, thread: Int32) -> Float32:
        """The sum of what this thread loads of the parts `first`, `first` + `step`, ..."""
        x = Float32(0)
        for part in cutlass.range(first, cute.ceil_div(cute.size(mX), self.elements(mX)), step):
            x += self.loaded(mX, part, thread)
        return x

    kernels = {"once": once}  # noqa: RUF012
