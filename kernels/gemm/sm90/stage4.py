"""Stage 4: registers move from the load warps to the MMA warps.

Idea: an SM has 64K registers. The ninth warp of stage 3 needs few, but the compiler gives all nine
the same, and with a warpgroup of its own for the loads it could give none more than 168. setmaxnreg
lets warpgroups trade: the load warpgroup keeps 40 a thread, each of the two MMA warpgroups gets
232, enough for 192 accumulators: tiles up to 256x192, or 128x192 by one warpgroup alone (stage 8).

Changed since stage 3: the load role has a warpgroup, because setmaxnreg counts by warpgroups (three
of its warps have nothing to do and end), and `kernel` trades registers.

Measured: 605 TFLOPS, 1.00 times stage 3, with the same tile of 128x256. 256x192 makes 110 FLOP
of each byte that comes through L2 instead of 85, and is 3 % slower: bytes are not what limits here,
and the larger tile has a longer epilogue, which nothing hides yet.
"""

from __future__ import annotations

from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.tma import AbLoads, tile_loads
from cutex.device.atoms.wgmma import Wgmma, wgmma
from cutex.device.epilogue.sm90.register_store import store_accumulators
from cutex.device.pipeline import Ring, Warps, publish_barriers
from cutex.kernels.gemm.sm90.stage3 import Stage3
from cutex.schedulers.one_tile import OneTilePerCta


class Stage4(Stage3):
    """The kernel of stage 4: its barriers and its memory.

    barriers and smem: as in stage 3.

    registers   threads                   of each
    LOAD        128                       40      24 where the MMA needs more than 208 accumulators
    MMA         128 * warpgroups (2)      232     240
    """

    number = 4

    @property
    def mma_warps(self) -> Warps:
        return Warps(first=0, count=4 * self.config.mma_warpgroups)

    @property
    def load_warps(self) -> Warps:
        """The load warps: a whole warpgroup, of which only the first warp works."""
        return Warps(first=self.mma_warps.end, count=4)

    @property
    def num_threads(self) -> int:
        return self.mma_warps.threads + self.load_warps.threads

    def give_registers(self) -> None:
        """Release registers. The load warpgroup calls it."""
        if registers := self.config.registers:
            cute.arch.setmaxregister_decrease(registers.load)

    def take_registers(self) -> None:
        """Wait until the load warpgroup has released registers, and take them. MMA warpgroups call
        it."""
        if registers := self.config.registers:
            cute.arch.setmaxregister_increase(registers.mma)

    @cute.kernel
    def kernel(self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, mC: cute.Tensor) -> None:
        c = self.config
        dtype = mC.element_type
        smem = SmemAllocator()
        sA = allocate_slots(smem, dtype, a.smem_layout)  # (bM, bK, SLOT)
        sB = allocate_slots(smem, dtype, b.smem_layout)  # (bN, bK, SLOT)
        ab = Ring.allocate(smem, "ab", c.num_stages, c.stage_bytes, consumers=self.mma_warps.count)
        publish_barriers((ab,))

        tile = OneTilePerCta.work_tile()
        loads = AbLoads(tile_loads(a, sA, tile.m), tile_loads(b, sB, tile.n))
        warp = cute.arch.warp_idx()
        if warp >= self.load_warps.first:
            self.give_registers()
            if warp == self.load_warps.first:
                self.load(loads, ab)
        else:
            self.take_registers()
            mma = wgmma(Wgmma(c.tile_n, dtype, warpgroups=c.mma_warpgroups), sA, sB)
            self.mma(mma, ab, loads.num_k_tiles)
            thread, _, _ = cute.arch.thread_idx()
            store_accumulators(mma, mC, tile, (c.tile_m, c.tile_n), thread)
