"""Stage 8: the hardware hands out the tiles while the kernel runs.

Idea: dealt out in advance, tiles wait for the slowest SM: one that another kernel holds, that is
farther from the memory its tiles come from, or that simply has one tile more. Cluster launch
control lets a pair of CTAs ask for its next tile when it needs one (schedulers/clc.py).

Changed since stage 7: a seventh warp, `schedule`, asks; the grid has a cluster for every tile; the
raster order numbers these clusters instead of steps.

Asking takes one instruction and a reply of 16 bytes a tile, well ahead of its use, so nothing is
lost where the static order was good: 1024 tiles at 8192x8192 over 74 pairs are 13.8 waves either
way. Expect some percent where other kernels run, where K is short, or where SMs are unequal; the
public ladders report it only together with the raster order (1.15 times for both).
"""

from __future__ import annotations

from cutlass import cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.tma import load_operand, store_operand
from cutex.kernels.gemm.sm100.stage3 import Warp
from cutex.kernels.gemm.sm100.stage7 import Stage7
from cutex.schedulers.clc import CTAS, ClcDispatch
from cutex.schedulers.order import TileCounts
from cutex.schedulers.raster import RasterOrder


class Stage8(Stage7):
    """Barriers, smem and tensor memory as in stage 6, and those of schedulers/clc.py: 64 bytes."""

    number = 8
    num_threads = (Warp.END + 1) * 32  # the last warp, of the leader: schedule

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        c = self.config
        a = load_operand(mA, self.slots(mA.element_type, c.tile_m // 2), pair=True)
        b = load_operand(mB, self.slots(mB.element_type, c.tile_n // 2), pair=True)
        out = store_operand(mC, self.epilogue_slots(mC.element_type))
        m, n, _ = self.counts(mC)
        self.kernel(a, b, out).launch(
            grid=(CTAS * (m * n), 1, 1),
            block=(self.num_threads, 1, 1),
            cluster=(CTAS, 1, 1),
            min_blocks_per_mp=1,  # smem takes a whole SM: ptxas need not save registers
            stream=stream,
        )

    def counts(self, mC: cute.Tensor) -> TileCounts:
        """The numbers of tiles of a pair."""
        return TileCounts.of(mC, (self.config.tile_m, self.config.tile_n))

    def dispatcher(self, smem: SmemAllocator, mC: cute.Tensor) -> ClcDispatch:
        m, n, _ = self.counts(mC)
        order = RasterOrder(self.raster, m, n, CTAS)
        load, mma, schedule = 1, 1, 1  # warps
        readers = CTAS * (load + self.num_epilogue_warps) + mma + schedule
        return ClcDispatch.allocate(smem, order, readers)
