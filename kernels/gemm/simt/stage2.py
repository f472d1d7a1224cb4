"""Stage 2: tiles of A and B in shared memory, each word of which 32 threads use.

A CTA loads 32x32 of A and of B, coalesced as in stage 1, and each of its threads adds up 32
products from there: one load from global memory for 16 FMAs. The lanes of a warp have neighbouring
columns of C, that is rows of B: they read words that are 32 apart, all in one of the 32 banks,
which hands them out one after the other. The compiler joins four neighbours of K to a load of 16
bytes; each takes 32 wavefronts instead of 4.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.kernels.gemm.simt.stage0 import WARP, Stage0


class Stage2(Stage0):
    def layout(self) -> cute.Layout | cute.ComposedLayout:
        """The smem layout (bRows, bK) of a tile of A or B."""
        return cute.make_layout((WARP, WARP), stride=(WARP, 1))

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor) -> None:
        smem = SmemAllocator()
        sA = smem.allocate_tensor(Float32, self.layout(), 128)  # (bM, bK)
        sB = smem.allocate_tensor(Float32, self.layout(), 128)  # (bN, bK)
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        block_m, block_n, _ = cute.arch.block_idx()
        total = Float32(0)
        for k in cutlass.range(0, cute.size(mA, mode=[1]), WARP, unroll=1):
            sA[warp, lane] = self.loaded(mA, block_m * WARP + warp, k + lane)
            sB[warp, lane] = self.loaded(mB, block_n * WARP + warp, k + lane)
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(WARP):
                total += sA[warp, i] * sB[lane, i]
            cute.arch.sync_threads()
        m, n = block_m * WARP + warp, block_n * WARP + lane
        if m < cute.size(mC, mode=[0]) and n < cute.size(mC, mode=[1]):
            mC[m, n] = total

    @cute.jit
    def loaded(self, mX: cute.Tensor, row: Int32, k: Int32) -> Float32:
        """mX[row, k], or 0 outside of it."""
        x = Float32(0)
        if row < cute.size(mX, mode=[0]) and k < cute.size(mX, mode=[1]):
            x = mX[row, k]
        return x
