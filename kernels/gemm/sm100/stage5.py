"""Stage 5: two CTAs run one MMA, 256x256.

Idea: the tensor cores of two neighbouring SMs can work as one. Each CTA holds half the rows of A
and half the rows of B, and each tensor core reads its own half of A and both halves of B, the other
one straight from the neighbour's smem. Nothing is loaded twice within the pair.

Changed since stage 4: the kernel runs in clusters of two. The CTA of even rank, the leader, starts
the MMAs for both; both CTAs' loads arrive on its barriers, and its commits on the barriers of both.
`load`, `mma` and `epilogue` are as they were.

A CTA loads 32 KB instead of 48 for the same 512 cycles of MMA: a third less through L2, 128 FLOP a
byte instead of 85, and 64 bytes a cycle from L2 for each SM instead of 96, which 148 of them could
not get. The MMA reads 64 bytes of smem in a cycle instead of 96. And the ring is six deep instead
of four: 192 KB cover 3072 cycles of MMA, twice the latency of memory, instead of 2048.

The public ladders see 1.08 to 1.15 times stage 4 from this.
"""

from __future__ import annotations

from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.tma import AbLoads, load_operand, store_operand, tile_loads, tile_stores
from cutex.device.atoms.tmem import Tmem, fence_after_sync
from cutex.device.atoms.umma import Umma, umma
from cutex.device.epilogue.sm100.tma_store import sub_tiles
from cutex.device.pipeline import Barrier, PairRing, is_leader, publish_barriers, sync_cluster
from cutex.kernels.gemm.sm100.stage2 import Barriers
from cutex.kernels.gemm.sm100.stage3 import Warp
from cutex.kernels.gemm.sm100.stage4 import Stage4
from cutex.schedulers.one_tile import OneTilePerCta


class Stage5(Stage4):
    """The kernel of stage 5: its barriers and its memory.

    barrier         arrives                             waits
    ab.full[slot]   1: LOAD of the leader, and the      MMA of the leader
                    bytes of both CTAs by TMA
    ab.empty[slot]  1: the commit of its MMA, in both   LOAD of its CTA
    acc_full        1: the commit of the last MMA,      the epilogue warps of its CTA
                    in both
    (sub-tile)      as in stage 4, each CTA its own
    (cluster)       all threads                         all threads, before tensor memory is freed:
                                                        until then the leader signals its peer

    smem of a CTA   bytes                                          tmem   columns
    sA              tile_m / 2 * k_bytes * num_stages  98304    acc    tile_n    256
    sB              tile_n / 2 * k_bytes * num_stages  98304
    sC              tile_m / 2 * epi_n * 2 * epi_stages   32768
    barriers        as in stage 2
    """

    number = 5

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        c = self.config
        a = load_operand(mA, self.slots(mA.element_type, c.tile_m // 2), pair=True)
        b = load_operand(mB, self.slots(mB.element_type, c.tile_n // 2), pair=True)
        out = store_operand(mC, self.epilogue_slots(mC.element_type))
        m, n, _ = self.counts(mC)
        self.kernel(a, b, out).launch(
            grid=(2 * m, n, 1), block=(self.num_threads, 1, 1), cluster=(2, 1, 1), stream=stream
        )

    def barriers(self, smem: SmemAllocator) -> Barriers:
        c = self.config
        return Barriers(
            ab=PairRing.allocate(smem, "ab", c.num_stages, c.stage_bytes, consumers=1),
            acc_full=Barrier.allocate(smem, "acc full", arrivals=1),
        )

    @cute.kernel
    def kernel(self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, out: cpasync.TmaInfo) -> None:
        c = self.config
        dtype = out.atom.value_type
        warp = cute.arch.warp_idx()
        rank = cute.arch.block_idx_in_cluster()
        smem = SmemAllocator()
        sA = allocate_slots(smem, dtype, a.smem_layout)  # (bM / 2, bK, SLOT)
        sB = allocate_slots(smem, dtype, b.smem_layout)  # (bN / 2, bK, SLOT)
        sC = allocate_slots(smem, dtype, out.smem_layout)  # (bM / 2, epiN, SLOT)
        ab, acc_full = self.barriers(smem)
        tmem = Tmem.allocate(smem, columns=c.tile_n, pair=True)
        if warp == Warp.MMA:
            tmem.acquire()
        publish_barriers((ab, acc_full), cluster=True, with_data=True)
        acc = tmem.pointer()

        tile = OneTilePerCta.work_tile()  # tile.m counts the rows of a CTA, tile.n those of a pair
        loads = AbLoads(tile_loads(a, sA, tile.m), tile_loads(b, sB, 2 * tile.n + rank))
        mma = umma(Umma(c.tile_m, c.tile_n, dtype, pair=True), sA, sB, acc)
        if warp == Warp.LOAD:
            self.load(loads, ab)
        elif warp == Warp.MMA:
            if is_leader():
                self.mma(mma, ab, acc_full, loads.num_k_tiles)
        else:
            thread, _, _ = cute.arch.thread_idx()
            parts = sub_tiles(mma.acc[(None, None), 0, 0], sC, thread)
            self.epilogue(parts, tile_stores(out, sC, tile.m), tile.n, acc_full)
        sync_cluster()
        if warp == Warp.MMA:
            fence_after_sync()
            tmem.free(acc)
