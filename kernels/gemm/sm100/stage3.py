"""Stage 3: warp specialisation. One warp loads, one runs the MMA, four store the result.

Idea: in stage 2 one warp issues loads and MMAs in turn, and while it waits for a slot to be empty
the tensor core may run dry. Two warps need not wait for each other, only for data and for slots.

Changed since stage 2: `kernel` sends each warp to its role. `load` is Hopper's, by import; `mma` is
the rest of the mainloop. The epilogue warps wait for the accumulator, not for a warp.

Expect 1.2 to 1.3 times stage 2: the MMAs run back to back, 512 cycles for each 64 of K. Not hidden
are the first load and the epilogue, which is long: each thread stores a row of its own, 512
bytes, and nothing overlaps it (stages 4 and 6).
"""

from __future__ import annotations

from enum import IntEnum

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.tma import AbLoads, tile_loads
from cutex.device.atoms.tmem import LANES, Tmem, fence_after_sync, fence_before_sync
from cutex.device.atoms.umma import Umma, UmmaProduct, umma
from cutex.device.epilogue.sm100.register_store import store_accumulator
from cutex.device.pipeline import Barrier, Ring, publish_barriers
from cutex.kernels.gemm.sm90.stage3 import Stage3 as HopperStage3
from cutex.kernels.gemm.sm100.stage2 import Stage2
from cutex.schedulers.one_tile import OneTilePerCta


class Warp(IntEnum):
    """The roles of the warps. Warps 0 to 3 are the epilogue: each may read only its own quarter of
    tensor memory."""

    LOAD = LANES // 32
    MMA = LOAD + 1
    END = MMA + 1


class Stage3(Stage2):
    """The kernel of stage 3: its barriers and its memory.

    barrier         arrives                           waits
    ab.full[slot]   1: LOAD, and the bytes by TMA     MMA
    ab.empty[slot]  1: the commit of its MMA          LOAD
    acc_full        1: the commit of the last MMA     the epilogue warps
    (CTA)           all threads                       all threads, before tensor memory is freed

    smem and tmem: as in stage 2.
    """

    number = 3
    num_threads = Warp.END * 32

    load = HopperStage3.load

    @cute.kernel
    def kernel(self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, mC: cute.Tensor) -> None:
        c = self.config
        dtype = mC.element_type
        warp = cute.arch.warp_idx()
        smem = SmemAllocator()
        sA = allocate_slots(smem, dtype, a.smem_layout)  # (bM, bK, SLOT)
        sB = allocate_slots(smem, dtype, b.smem_layout)  # (bN, bK, SLOT)
        ab, acc_full = self.barriers(smem)
        tmem = Tmem.allocate(smem, columns=c.tile_n)
        if warp == Warp.MMA:
            tmem.acquire()
        publish_barriers((ab, acc_full))
        acc = tmem.pointer()

        tile = OneTilePerCta.work_tile()
        loads = AbLoads(tile_loads(a, sA, tile.m), tile_loads(b, sB, tile.n))
        mma = umma(Umma(c.tile_m, c.tile_n, dtype), sA, sB, acc)
        if warp == Warp.LOAD:
            self.load(loads, ab)
        elif warp == Warp.MMA:
            self.mma(mma, ab, acc_full, loads.num_k_tiles)
        else:
            acc_full.wait(0)
            fence_after_sync()
            thread, _, _ = cute.arch.thread_idx()
            store_accumulator(mma, mC, tile, thread)
            fence_before_sync()
        cute.arch.sync_threads()
        if warp == Warp.MMA:
            fence_after_sync()
            tmem.free(acc)

    @cute.jit
    def mma(self, mma: UmmaProduct, ab: Ring, acc_full: Barrier, num_k_tiles: Int32) -> None:
        take = ab.consumer()
        for k_tile in cutlass.range(num_k_tiles, unroll=1):
            ab.wait_full(take)
            mma.issue(take.slot, accumulate=k_tile > 0)
            mma.commit(ab.empty[take.slot])
            take.advance()
        mma.commit(acc_full[0])
