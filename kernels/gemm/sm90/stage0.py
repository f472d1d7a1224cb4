"""Stage 0: the least that works. TMA loads a tile, wgmma consumes it, one after the other.

Idea: one CTA computes 128x128 of C with two warpgroups of 64 rows each. For each 64 of K, one warp
starts the TMA loads of A and B, all wait for them, all run wgmma, all wait for it, and only then
may the next load overwrite the buffer.

The buffer is not swizzled: core matrices of 8 rows x 16 bytes follow each other down the
rows, so a TMA box is 16 bytes wide, a tile takes eight boxes, and each row of a box is a
request for half an L2 sector. wgmma needs 512 cycles for such a tile, and waits for 2048 such
requests before it.

Measured (8192x8192x4096, bf16, one H200): 162 TFLOPS, a sixth of the peak.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.tma import AbLoads, tile_loads
from cutex.device.atoms.wgmma import WARPGROUP, Wgmma, WgmmaProduct, wgmma
from cutex.device.epilogue.sm90.register_store import store_accumulators
from cutex.device.pipeline import Barrier, Ring, publish_barriers
from cutex.kernels.gemm.launch import Gemm
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.schedulers.one_tile import OneTilePerCta


class Barriers(NamedTuple):
    loaded: Barrier


class Stage0(Gemm):
    """The kernel of stage 0: its barriers and its memory.

    barrier   arrives                           waits
    loaded    1: warp 0, and the bytes by TMA   all threads, before wgmma
    (CTA)     all threads                       all threads, before the next load

    smem      bytes
    sA        tile_m * k_bytes               16384
    sB        tile_n * k_bytes               16384
    loaded    8
    """

    arch = "sm_90a"
    number = 0
    config: Sm90Config
    swizzle = 16

    @property
    def num_threads(self) -> int:
        return self.config.tile_m // 64 * WARPGROUP

    def barriers(self, smem: SmemAllocator) -> tuple[Barrier | Ring, ...]:
        return Barriers(loaded=Barrier.allocate(smem, "loaded", arrivals=1))

    @cute.kernel
    def kernel(self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, mC: cute.Tensor) -> None:
        c = self.config
        dtype = mC.element_type
        smem = SmemAllocator()
        sA = allocate_slots(smem, dtype, a.smem_layout)  # (bM, bK, SLOT)
        sB = allocate_slots(smem, dtype, b.smem_layout)  # (bN, bK, SLOT)
        barriers = self.barriers(smem)
        publish_barriers(barriers)

        tile = OneTilePerCta.work_tile()
        loads = AbLoads(tile_loads(a, sA, tile.m), tile_loads(b, sB, tile.n))
        mma = wgmma(Wgmma(c.tile_n, dtype, warpgroups=c.mma_warpgroups), sA, sB)
        self.mainloop(loads, mma, barriers)
        thread, _, _ = cute.arch.thread_idx()
        store_accumulators(mma, mC, tile, (c.tile_m, c.tile_n), thread)

    @cute.jit
    def mainloop(self, loads: AbLoads, mma: WgmmaProduct, barriers: Barriers) -> None:
        loaded = barriers.loaded
        warp = cute.arch.warp_idx()
        phase = Int32(0)
        for k_tile in cutlass.range(loads.num_k_tiles, unroll=1):
            if warp == 0:
                with cute.arch.elect_one():
                    loaded.arrive_expecting(self.config.stage_bytes)
                loads.load(k_tile, 0, loaded[0])
            loaded.wait(phase)
            phase ^= 1
            mma.issue(0, accumulate=k_tile > 0)
            warpgroup.wait_group(0)
            cute.arch.sync_threads()
