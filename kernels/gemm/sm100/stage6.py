"""Stage 6: one pair of CTAs per pair of SMs, and the epilogue under the next tile's mainloop.

Idea: tensor memory has 512 columns and an accumulator takes 256. With two of them, the MMA fills
one while the epilogue warps empty the other; so a CTA stays, and works through one tile after the
other. The loads run on across the border between tiles: the ring never drains.

Changed since stage 5: the grid has as many CTAs as the GPU has SMs; each role is a loop over tiles
(schedulers/queue.py), which are dealt out in fixed steps, row of tiles by row of tiles; a ring of
two accumulators stands between `mma` and `epilogue`. An accumulator is free again as soon as it has
been read into registers, before it is stored.

Gained for each tile: the way in (launch, barriers, tensor memory, the first load: some 3000
cycles) and the way out (reading and storing 64 KB a CTA: 1000 to 2000), of the 32768 cycles that
its MMAs take at K=4096. The public ladders see 1.03 to 1.13 times stage 5.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.arch import arch as arch_named
from cutex.device.atoms.mma import Umma, allocate_slots, make_umma, umma
from cutex.device.atoms.tma import PairOperands, load_operand, store_operand
from cutex.device.atoms.tmem import LANES, Tmem, fence_after_sync, fence_before_sync
from cutex.device.epilogue.stores import WayOut, drain_stores
from cutex.device.pipeline import AccRing, PairRing, Ring, is_leader, publish_barriers, sync_cluster
from cutex.kernels.gemm.sm100.stage3 import Warp
from cutex.kernels.gemm.sm100.stage5 import Stage5
from cutex.schedulers.persistent import StaticPersistent
from cutex.schedulers.queue import CTAS, StaticQueue
from cutex.schedulers.raster import Raster


class Stage6(Stage5):
    """
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
            tile=(c.tile_m // 2, c.tile_n),
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
            grid=self.scheduler().grid(mC),
            block=(self.num_threads, 1, 1),
            cluster=(2, 1, 1),
            min_blocks_per_mp=1,  # smem takes a whole SM: ptxas need not save registers
            stream=stream,
        )

    def make_queue(self, smem: SmemAllocator, mC: cute.Tensor) -> StaticQueue:
        """Where the roles learn which tile of mC (M, N) comes next."""
        return StaticQueue(self.scheduler().walk(mC))

    @cute.kernel
    def kernel(self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, out: cpasync.TmaInfo) -> None:
        dtype = out.atom.value_type
        smem = SmemAllocator()
        sA = allocate_slots(smem, dtype, a.smem_layout)  # (bM / 2, bK, SLOT)
        sB = allocate_slots(smem, dtype, b.smem_layout)  # (bN / 2, bK, SLOT)
        sC = allocate_slots(smem, dtype, out.smem_layout)  # (128, epiN, SLOT)
        mma = make_umma(256, self.config.tile_n, dtype, pair=True)
        way_out = self.way_out(out, sC, smem)
        self.run(mma, PairOperands(a, b, sA, sB), way_out, out.tma_tensor, smem)

    def way_out(self, out: cpasync.TmaInfo, sC: cute.Tensor, smem: SmemAllocator) -> WayOut:
        return WayOut(out, sC)

    @cute.jit
    def run(
        self,
        tiled_mma: cute.TiledMma,
        operands: PairOperands,
        way_out: WayOut,
        mC: cute.Tensor,
        smem: cutlass.Constexpr[SmemAllocator],
    ) -> None:
        """The kernel, once the slots of A, B and C are allocated; mC (M, N) is what tiles cover."""
        c = self.config
        warp = cute.arch.warp_idx()
        ab = PairRing.allocate(smem, "ab", c.num_stages, c.stage_bytes, consumers=1)
        acc = AccRing.of(smem, c.num_acc, readers=CTAS * self.num_epilogue_warps)
        queue = self.make_queue(smem, mC)
        tmem = Tmem.allocate(smem, columns=c.tile_n * c.num_acc, pair=True)
        if warp == Warp.MMA:
            tmem.acquire()
        publish_barriers((ab, acc, *queue.barriers), cluster=True, with_data=True)
        pointer = tmem.pointer()

        mma = umma(tiled_mma, operands.sA, operands.sB, pointer, c.num_acc)
        if warp == Warp.LOAD:
            self.load(operands, ab, queue)
        elif warp == Warp.MMA:
            if is_leader():
                tile_k = cute.size(operands.sA, mode=[1])
                first, end = self.k_tiles(cute.ceil_div(operands.k, tile_k))
                self.mma(mma, ab, acc, end - first, queue)
        elif warp < Warp.LOAD:
            self.epilogue(mma.tCtAcc, way_out, acc, queue)
        else:
            self.schedule(queue)
        sync_cluster()
        self.finish(mma.tCtAcc, way_out, queue)
        if warp == Warp.MMA:
            fence_after_sync()
            tmem.free(pointer)

    def finish(self, tCtAcc: cute.Tensor, way_out: WayOut, queue: Any) -> None:
        """Nothing is left to do when the whole cluster has computed its tiles (stage 9)."""

    def k_tiles(self, num_k_tiles: Int32) -> tuple[Int32, Int32]:
        """The first of those that this pair computes, and the one past the last."""
        return Int32(0), num_k_tiles

    def schedule(self, queue: Any) -> None:
        """No warp does this: in a static queue nobody needs to be asked (stage 8)."""

    @cute.jit
    def load(self, operands: PairOperands, ab: Ring, queue: cutlass.Constexpr[Any]) -> None:
        fill = ab.producer()
        ticket = queue.first()
        while ticket.valid:
            loads = operands.loads(queue.tile(ticket))
            first, end = self.k_tiles(loads.num_k_tiles)
            for k_tile in cutlass.range(first, end, unroll=1):
                loads.load(k_tile, fill.slot, ab.acquire(fill))
                fill.advance()
            ticket = queue.next(ticket)

    @cute.jit
    def mma(
        self,
        mma: Umma,
        ab: Ring,
        acc: AccRing,
        num_k_tiles: Int32,
        queue: cutlass.Constexpr[Any],
    ) -> None:
        take, fill = ab.consumer(), acc.producer()
        ticket = queue.first()
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
            ticket = queue.next(ticket)

    @cute.jit
    def epilogue(
        self,
        tCtAcc: cute.Tensor,
        way_out: WayOut,
        acc: AccRing,
        queue: cutlass.Constexpr[Any],
    ) -> None:
        take = acc.consumer()
        ticket = queue.first()
        while ticket.valid:
            tile = queue.tile(ticket)
            leaving = way_out.of(tCtAcc[(None, None), 0, 0, take.slot], tile, tile.m)
            parts = leaving.parts
            acc.wait_full(take)
            fence_after_sync()
            for part in cutlass.range_constexpr(parts.num_parts):
                tTR_rAcc = parts.load(part)
                if cutlass.const_expr(part == parts.num_parts - 1):
                    fence_before_sync()
                    acc.release(take)
                leaving.store(tTR_rAcc, part, part)
            take.advance()
            ticket = queue.next(ticket)
        drain_stores()
