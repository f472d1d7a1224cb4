"""Stage 0: the least that works. TMA loads a tile, tcgen05 consumes it, one after the other.

Idea: one CTA computes 128x128 of C; the accumulator is in tensor memory. For each 64 of K, one
warp starts the TMA loads of A and B, waits for them, starts the MMA, and waits for it before the
next load may overwrite the buffer. Then four warps store the accumulator, one row per thread.

The buffer is not swizzled: core matrices of 8 rows x 16 bytes follow each other down the
rows, so a TMA box is 16 bytes wide, a tile takes eight boxes, and each row of a box is a
request for half an L2 sector. Expect a tenth of the peak: the MMA needs 256 cycles for such a tile,
and waits for 2048 such requests before it.
"""

from __future__ import annotations

from typing import NamedTuple

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
from cutex.kernels.gemm.launch import Gemm
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.schedulers.one_tile import OneTilePerCta


class Barriers(NamedTuple):
    loaded: Barrier
    mma_done: Barrier


class Stage0(Gemm):
    """The kernel of stage 0: its barriers and its memory.

    barrier   arrives                           waits
    loaded    1: warp 0, and the bytes by TMA   warp 0, before the MMA
    mma_done  1: the commit of warp 0           warp 0, before the next load
    (CTA)     all threads                       all threads, before the epilogue
    (CTA)     all threads                       all threads, before tensor memory is freed

    smem      bytes                                       tmem   columns
    sA        tile_m * k_bytes               16384     acc    tile_n    128
    sB        tile_n * k_bytes               16384
    barriers  16, and 4 for the address of tmem
    """

    arch = "sm_100a"
    number = 0
    config: Sm100Config
    swizzle = 16
    num_threads = LANES

    def barriers(self, smem: SmemAllocator) -> tuple[Barrier | Ring, ...]:
        return Barriers(
            loaded=Barrier.allocate(smem, "loaded", arrivals=1),
            mma_done=Barrier.allocate(smem, "mma done", arrivals=1),
        )

    @cute.kernel
    def kernel(self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, mC: cute.Tensor) -> None:
        c = self.config
        dtype = mC.element_type
        warp = cute.arch.warp_idx()
        smem = SmemAllocator()
        sA = allocate_slots(smem, dtype, a.smem_layout)  # (bM, bK, SLOT)
        sB = allocate_slots(smem, dtype, b.smem_layout)  # (bN, bK, SLOT)
        barriers = self.barriers(smem)
        tmem = Tmem.allocate(smem, columns=c.tile_n)
        if warp == 0:
            tmem.acquire()
        publish_barriers(barriers)
        acc = tmem.pointer()

        tile = OneTilePerCta.work_tile()
        loads = AbLoads(tile_loads(a, sA, tile.m), tile_loads(b, sB, tile.n))
        mma = umma(Umma(c.tile_m, c.tile_n, dtype), sA, sB, acc)
        if warp == 0:
            self.mainloop(loads, mma, barriers)
        cute.arch.sync_threads()
        fence_after_sync()
        thread, _, _ = cute.arch.thread_idx()
        store_accumulator(mma, mC, tile, thread)
        fence_before_sync()
        cute.arch.sync_threads()
        if warp == 0:
            fence_after_sync()
            tmem.free(acc)

    @cute.jit
    def mainloop(self, loads: AbLoads, mma: UmmaProduct, barriers: Barriers) -> None:
        """Compute the accumulator, which is complete when this returns. Warp 0 alone calls it."""
        loaded, mma_done = barriers.loaded, barriers.mma_done
        phase = Int32(0)
        for k_tile in cutlass.range(loads.num_k_tiles, unroll=1):
            with cute.arch.elect_one():
                loaded.arrive_expecting(self.config.stage_bytes)
            loads.load(k_tile, 0, loaded[0])
            loaded.wait(phase)
            mma.issue(0, accumulate=k_tile > 0)
            mma.commit(mma_done[0])
            mma_done.wait(phase)
            phase ^= 1
