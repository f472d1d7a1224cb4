"""Stage 4: the result is stored in sub-tiles, through smem and TMA.

Idea: in stage 3 each thread stores a row of its own, so the 32 threads of a warp touch 32 rows with
every instruction: 32 requests of 16 bytes each, half an L2 sector. Let TMA store instead. The four
epilogue warps take 32 columns of the accumulator at a time: tensor memory -> registers -> smem,
where TMA collects whole rows of 64 bytes, two sectors. While TMA reads one slot of smem the warps
fill the next, and TMA leaves out elements outside of C.

Changed since stage 3: `epilogue` is a role; C gets slots in smem, swizzled by 64 bytes, so that the
eight threads whose rows share a core matrix write to eight different groups of banks.

Expect the epilogue to shrink from 32 store instructions a row, 32 sectors each, to 8 sub-tiles of
one TMA instruction: from about 8000 cycles of half-used sectors to 64 KB at the rate of L2, 1000
to 2000. At K=4096 a tile's mainloop takes 32768 cycles, so this is some 10 to 20 %.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots, slots_layout
from cutex.device.atoms.tma import (
    AbLoads,
    TileStores,
    load_operand,
    store_operand,
    tile_loads,
    tile_stores,
)
from cutex.device.atoms.tmem import Tmem, fence_after_sync, fence_before_sync
from cutex.device.atoms.umma import Umma, umma
from cutex.device.epilogue.sm100.tma_store import SubTiles, drain_stores, sub_tiles
from cutex.device.pipeline import Barrier, publish_barriers
from cutex.kernels.gemm.config import ELEMENT
from cutex.kernels.gemm.sm100.stage3 import Stage3, Warp
from cutex.schedulers.one_tile import OneTilePerCta


class Stage4(Stage3):
    """The kernel of stage 4: its barriers and its memory.

    barrier         arrives                           waits
    (sub-tile)      the epilogue warps, having        the epilogue warps, before TMA stores this
                    written their rows of a slot      slot and before they write the next
    others as in stage 3

    smem      bytes                                       tmem   columns
    sA        tile_m * k_bytes * num_stages  65536     acc    tile_n    256
    sB        tile_n * k_bytes * num_stages  131072
    sC        tile_m * epi_n * 2 * epi_stages   32768
    barriers  as in stage 2
    """

    number = 4

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        c = self.config
        a = load_operand(mA, self.slots(mA.element_type, c.tile_m))
        b = load_operand(mB, self.slots(mB.element_type, c.tile_n))
        out = store_operand(mC, self.epilogue_slots(mC.element_type))
        grid = OneTilePerCta.grid(self.counts(mC))
        self.kernel(a, b, out).launch(grid=grid, block=(self.num_threads, 1, 1), stream=stream)

    def epilogue_slots(self, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
        """The smem layout (bM, epiN, SLOT) of sub-tiles of one CTA's part of C."""
        c = self.config
        rows = c.tile_m // c.ctas
        return slots_layout(dtype, rows, c.epi_n, c.epi_stages, swizzle=c.epi_n * ELEMENT)

    @cute.kernel
    def kernel(self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, out: cpasync.TmaInfo) -> None:
        c = self.config
        dtype = out.atom.value_type
        warp = cute.arch.warp_idx()
        smem = SmemAllocator()
        sA = allocate_slots(smem, dtype, a.smem_layout)  # (bM, bK, SLOT)
        sB = allocate_slots(smem, dtype, b.smem_layout)  # (bN, bK, SLOT)
        sC = allocate_slots(smem, dtype, out.smem_layout)  # (bM, epiN, SLOT)
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
            thread, _, _ = cute.arch.thread_idx()
            parts = sub_tiles(mma.acc[(None, None), 0, 0], sC, thread)
            self.epilogue(parts, tile_stores(out, sC, tile.m), tile.n, acc_full)
        cute.arch.sync_threads()
        if warp == Warp.MMA:
            fence_after_sync()
            tmem.free(acc)

    @cute.jit
    def epilogue(
        self, parts: SubTiles, stores: TileStores, n_tile: Int32, acc_full: Barrier
    ) -> None:
        acc_full.wait(0)
        fence_after_sync()
        for part in cutlass.range_constexpr(parts.num_parts):
            tTR_rAcc = parts.load(part)
            parts.store(tTR_rAcc, stores, part, n_tile * parts.num_parts + part)
        fence_before_sync()
        drain_stores()
