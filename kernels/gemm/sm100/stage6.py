"""Stage 6: one pair of CTAs per pair of SMs, and the epilogue under the next tile's mainloop.

Idea: tensor memory has 512 columns and an accumulator takes 256. With two of them, the MMA fills
one while the epilogue warps empty the other; so a CTA is persistent, and computes one tile after
the other. The loads continue across the border between tiles: the ring never drains.

Changed since stage 5: the grid has as many CTAs as the GPU has SMs; each role is a loop over tiles
(schedulers/dispatch.py), which are dealt out in fixed steps, row of tiles by row of tiles; a ring
of two accumulators stands between `compute_tiles` and `store_tiles`. An accumulator is free again
as soon as it has been read into registers, before it is stored.

Gained for each tile: its start (launch, barriers, tensor memory, the first load: some 3000 cycles)
and its epilogue (reading and storing 64 KB a CTA: 1000 to 2000), of the 32768 cycles that its MMAs
take at K=4096. The public ladders see 1.03 to 1.13 times stage 5.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.arch import arch as arch_named
from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.tma import PairOperands, load_operand, store_operand
from cutex.device.atoms.tmem import LANES, Tmem, fence_after_sync, fence_before_sync
from cutex.device.atoms.umma import Umma, UmmaProduct, umma
from cutex.device.epilogue.sm100.tma_store import EpilogueStore, drain_stores
from cutex.device.pipeline import AccRing, PairRing, Ring, is_leader, publish_barriers, sync_cluster
from cutex.kernels.gemm.sm100.stage3 import Warp
from cutex.kernels.gemm.sm100.stage5 import Stage5
from cutex.schedulers.clc import CTAS
from cutex.schedulers.dispatch import Dispatcher
from cutex.schedulers.order import TileCounts
from cutex.schedulers.persistent import StaticPersistent
from cutex.schedulers.raster import Raster


class Stage6(Stage5):
    """The kernel of stage 6: its barriers and its memory.

    barrier          arrives                             waits
    ab.full[slot]    as in stage 5                       MMA of the leader
    ab.empty[slot]   as in stage 5                       LOAD of its CTA
    acc.full[slot]   1: the commit of the last MMA of    the epilogue warps of its CTA
                     a tile, in both CTAs
    acc.empty[slot]  1 an epilogue warp of both CTAs:    MMA of the leader, before a tile
                     8 at the leader's
    (sub-tile)       as in stage 4
    (cluster)        as in stage 5

    smem of a CTA    as in stage 5, and 16 bytes of      tmem   columns
                     barriers for each accumulator       acc    tile_n * num_acc    512
    """

    number = 6

    @property
    def num_epilogue_warps(self) -> int:
        return LANES // 32

    @property
    def raster(self) -> Raster:
        return Raster(group=1, along="m", serpentine=False)

    def scheduler(self) -> StaticPersistent:
        c = self.config
        return StaticPersistent(
            self.raster,
            cluster=(2, 1),
            num_ctas=c.num_ctas or arch_named(self.arch).num_sms,
        )

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        c = self.config
        a = load_operand(mA, self.slots(mA.element_type, c.tile_m // 2), pair=True)
        b = load_operand(mB, self.slots(mB.element_type, c.tile_n // 2), pair=True)
        out = store_operand(mC, self.epilogue_slots(mC.element_type))
        self.kernel(a, b, out).launch(
            grid=self.scheduler().grid(self.counts(mC)),
            block=(self.num_threads, 1, 1),
            cluster=(2, 1, 1),
            min_blocks_per_mp=1,  # smem takes a whole SM: ptxas need not save registers
            stream=stream,
        )

    def counts(self, mC: cute.Tensor) -> TileCounts:
        """The numbers of tiles of one CTA of a pair."""
        return TileCounts.of(mC, (self.config.tile_m // 2, self.config.tile_n))

    def dispatcher(self, smem: SmemAllocator, mC: cute.Tensor) -> Dispatcher:
        """The dispatcher that hands out the tiles of mC (M, N) to the roles."""
        return self.scheduler().walk(self.counts(mC))

    @cute.kernel
    def kernel(self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, out: cpasync.TmaInfo) -> None:
        c = self.config
        dtype = out.atom.value_type
        warp = cute.arch.warp_idx()
        smem = SmemAllocator()
        sA = allocate_slots(smem, dtype, a.smem_layout)  # (bM / 2, bK, SLOT)
        sB = allocate_slots(smem, dtype, b.smem_layout)  # (bN / 2, bK, SLOT)
        sC = allocate_slots(smem, dtype, out.smem_layout)  # (128, epiN, SLOT)
        ab = PairRing.allocate(smem, "ab", c.num_stages, c.stage_bytes, consumers=1)
        acc = AccRing.of(smem, c.num_acc, readers=CTAS * self.num_epilogue_warps)
        dispatch = self.dispatcher(smem, out.tma_tensor)
        tmem = Tmem.allocate(smem, columns=c.tile_n * c.num_acc, pair=True)
        if warp == Warp.MMA:
            tmem.acquire()
        publish_barriers((ab, acc, *dispatch.barriers), cluster=True, with_data=True)
        pointer = tmem.pointer()

        mma = umma(Umma(256, c.tile_n, dtype, pair=True), sA, sB, pointer, c.num_acc)
        if warp == Warp.LOAD:
            self.load_tiles(PairOperands(a, b, sA, sB), ab, dispatch)
        elif warp == Warp.MMA:
            if is_leader():
                num_k_tiles = cute.ceil_div(cute.size(a.tma_tensor, mode=[1]), c.k_of(16))
                self.compute_tiles(mma, ab, acc, num_k_tiles, dispatch)
        elif warp < Warp.LOAD:
            self.store_tiles(mma.acc, EpilogueStore(out, sC), acc, dispatch)
        else:
            dispatch.schedule()
        sync_cluster()
        if warp == Warp.MMA:
            fence_after_sync()
            tmem.free(pointer)

    @cute.jit
    def load_tiles(
        self, operands: PairOperands, ab: Ring, dispatch: cutlass.Constexpr[Dispatcher]
    ) -> None:
        fill = ab.producer()
        ticket = dispatch.first()
        while ticket.valid:
            loads = operands.loads(dispatch.tile(ticket))
            for k_tile in cutlass.range(loads.num_k_tiles, unroll=1):
                loads.load(k_tile, fill.slot, ab.acquire(fill))
                fill.advance()
            ticket = dispatch.next(ticket)

    @cute.jit
    def compute_tiles(
        self,
        mma: UmmaProduct,
        ab: Ring,
        acc: AccRing,
        num_k_tiles: Int32,
        dispatch: cutlass.Constexpr[Dispatcher],
    ) -> None:
        take, fill = ab.consumer(), acc.producer()
        ticket = dispatch.first()
        while ticket.valid:
            acc_full = acc.acquire(fill)
            fence_after_sync()
            into = mma.into(fill.slot)
            for k_tile in cutlass.range(num_k_tiles, unroll=1):
                ab.wait_full(take)
                into.issue(take.slot, accumulate=k_tile > 0)
                into.commit(ab.empty[take.slot])
                take.advance()
            into.commit(acc_full)
            fill.advance()
            ticket = dispatch.next(ticket)

    @cute.jit
    def store_tiles(
        self,
        tCtAcc: cute.Tensor,
        epilogue: EpilogueStore,
        acc: AccRing,
        dispatch: cutlass.Constexpr[Dispatcher],
    ) -> None:
        take = acc.consumer()
        ticket = dispatch.first()
        while ticket.valid:
            tile = dispatch.tile(ticket)
            store = epilogue.tile(tCtAcc[(None, None), 0, 0, take.slot], tile)
            parts = store.parts
            acc.wait_full(take)
            fence_after_sync()
            for part in cutlass.range_constexpr(parts.num_parts):
                tTR_rAcc = parts.load(part)
                if cutlass.const_expr(part == parts.num_parts - 1):
                    fence_before_sync()
                    acc.release(take)
                store.store(tTR_rAcc, part)
            take.advance()
            ticket = dispatch.next(ticket)
        drain_stores()
