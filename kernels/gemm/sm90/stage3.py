"""Stage 3: warp specialisation. A warp of its own loads; two warpgroups do nothing but wgmma.

Idea: in stage 2, warp 0 waits for a slot to be empty between its own MMAs, and its whole warpgroup
with it. Give the loads to a ninth warp, and the only thing that an MMA ever waits for is data.

Changed since stage 2: `kernel` sends each warp to its role, `load` or `mma`, which are the two
halves of stage 2's `mainloop`.

Nine warps leave 224 registers a thread, enough for 128 accumulators, so nothing needs to be moved
between the roles yet (setmaxnreg, stage 4).

Measured: 605 TFLOPS, 1.00 times stage 2: no gain. Stage 2 waits for no slot that is not long
empty, since four are more than one MMA in flight needs, and its other warpgroup computes meanwhile.
It stays for what the stages after it do with a role of its own: fill the ring while the MMA warps
store (7), and serve two warpgroups with different tiles (8).
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.tma import AbLoads, tile_loads
from cutex.device.atoms.wgmma import WARPGROUP, Wgmma, WgmmaProduct, wgmma
from cutex.device.epilogue.sm90.register_store import store_accumulators
from cutex.device.pipeline import Ring, Warps, publish_barriers
from cutex.kernels.gemm.sm90.stage2 import Stage2
from cutex.schedulers.one_tile import OneTilePerCta


class Stage3(Stage2):
    """The kernel of stage 3: its barriers and its memory.

    barrier         arrives                             waits
    ab.full[slot]   1: LOAD, and the bytes by TMA       MMA warps, before wgmma
    ab.empty[slot]  1 an MMA warp, its wgmma being done LOAD, before it loads

    smem: as in stage 2.
    """

    number = 3

    @property
    def mma_warps(self) -> Warps:
        return Warps(first=0, count=self.config.tile_m // 64 * WARPGROUP // 32)

    @property
    def load_warp(self) -> Warps:
        return Warps(first=self.mma_warps.end, count=1)

    @property
    def num_threads(self) -> int:
        return self.mma_warps.threads + self.load_warp.threads

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
        if warp == self.load_warp.first:
            self.load(loads, ab)
        else:
            mma = wgmma(Wgmma(c.tile_n, dtype, warpgroups=c.mma_warpgroups), sA, sB)
            self.mma(mma, ab, loads.num_k_tiles)
            thread, _, _ = cute.arch.thread_idx()
            store_accumulators(mma, mC, tile, (c.tile_m, c.tile_n), thread)

    @cute.jit
    def load(self, loads: AbLoads, ab: Ring) -> None:
        fill = ab.producer()
        for k_tile in cutlass.range(loads.num_k_tiles, unroll=1):
            loads.load(k_tile, fill.slot, ab.acquire(fill))
            fill.advance()

    @cute.jit
    def mma(self, mma: WgmmaProduct, ab: Ring, num_k_tiles: Int32) -> None:
        take, done = ab.consumer(), ab.consumer()
        ab.wait_full(take)
        mma.issue(take.slot, accumulate=False)
        take.advance()
        for _ in cutlass.range(1, num_k_tiles, unroll=1):
            ab.wait_full(take)
            mma.issue(take.slot, accumulate=True)
            take.advance()
            warpgroup.wait_group(1)
            ab.release(done)  # of the tile before
            done.advance()
        warpgroup.wait_group(0)
