"""Stage 9: the tile, the order and the side that is cut are chosen for each problem.

Idea: no tile is best everywhere, so let the kernel take every one that the hardware has room for,
and choose by the problem (kernels/gemm/choose.py).

- tile_m = 512: a pair computes two accumulators that share B. A CTA loads 48 KB for 1024 cycles of
  MMA instead of 64: 171 FLOP a byte instead of 128, a quarter less through L2. All of tensor memory
  is one tile. So at its end one accumulator takes its last steps before the other, and at the
  beginning of the next its first ones: while one is read out, the other computes.
- tile_m = 256, two accumulators, tile_n from 64 to 256 by 32: stage 8's overlap, and a width that
  fills the last wave. 512x8192x5376 takes 64 tiles of 256x256, 64 of 74 pairs; or 74 of 256x224.
- swap_ab: where M is small, compute C^T = B A^T: the 256 rows of a tile come from N.
- split_k: where there are too few tiles, pairs of one cluster share the K of a tile. Each leaves
  its sums in smem, and each adds up a share of the columns from all of them, always in the same
  order: no workspace, no second kernel, the same bits in every run.

Changed since stage 8: `mma` and `epilogue` loop over the accumulators of a tile; a sub-tile is on
its way out of tensor memory while the one before is stored; C may leave transposed, and leaves L2
first, for A and B to stay; and the kernel starts while the one before it ends (griddepcontrol):
barriers and tensor memory are ready when its results are.

Public figures: 512x256 gives about 1.1 times at 4096 and above, wave fit 1.15
times where it applies, the early start up to 1.16 times on the smallest problems.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import (
    Umma,
    contiguous_lanes_layout,
    slots_layout,
)
from cutex.device.atoms.tma import EVICT_FIRST, PairOperands, load_operand, store_operand
from cutex.device.atoms.tmem import LANES, fence_after_sync, fence_before_sync
from cutex.device.epilogue.stores import SubTiles, TileOut, WayOut, drain_stores
from cutex.device.pipeline import (
    AccRing,
    PipelineState,
    Ring,
    sync_cluster,
)
from cutex.kernels.gemm.sm100.stage3 import Warp
from cutex.kernels.gemm.sm100.stage8 import Stage8
from cutex.schedulers.queue import CTAS, OneTileQueue

VECTOR = 4  # fp32 sums that move at a time: 16 bytes


class Stage9(Stage8):
    """Barriers as in stage 8; acc.full and acc.empty are those of one of a tile's accumulators.

    smem of a CTA   bytes, tile_m = 512                             tmem   columns
    sA              tile_m / 2 * tile_k * 2 * num_stages  131072    acc    tile_n * num_acc   512
    sB              tile_n / 2 * tile_k * 2 * num_stages  65536
    sC              128 * epi_n * 2 * epi_stages          32768
    barriers        as in stage 8
    sums            128 * tile_n * 4, where split_k > 1

    With split_k there is one tile a cluster, nobody asks for tiles, and
    (cluster)       all threads, the sums being in smem       the epilogue warps, to add up
    """

    number = 9

    @property
    def num_blocks(self) -> int:
        """Accumulators of a tile, of 256 rows each."""
        return self.config.tile_m // 256

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        c = self.config
        if cutlass.const_expr(c.swap_ab):
            mA, mB = mB, mA
            mC = cute.make_tensor(mC.iterator, cute.select(mC.layout, mode=[1, 0]))
        a = load_operand(mA, self.slots(mA.element_type, c.tile_m // 2), pair=True)
        b = load_operand(mB, self.slots(mB.element_type, c.tile_n // 2), pair=True)
        out = store_operand(mC, self.epilogue_slots(mC.element_type))
        cluster = (CTAS * c.split_k, 1, 1)
        self.kernel(a, b, out).launch(
            grid=(cluster[0] * self.num_tiles(mC), 1, 1),
            block=(self.num_threads, 1, 1),
            cluster=cluster,
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def way_out(self, out: cpasync.TmaInfo, sC: cute.Tensor, smem: SmemAllocator) -> WayOut:
        return WayOut(out, sC, EVICT_FIRST, self.allocate_sums(smem))

    @cute.jit
    def finish(self, tCtAcc: cute.Tensor, way_out: WayOut, queue: cutlass.Constexpr[Any]) -> None:
        if cutlass.const_expr(self.config.split_k > 1):
            if cute.arch.warp_idx() < Warp.LOAD:
                self.add_up(tCtAcc, way_out, queue)
            sync_cluster()

    def k_tiles(self, num_k_tiles: Int32) -> tuple[Int32, Int32]:
        """NOTE: a share may reach past K, where TMA fills in zeros."""
        split = self.config.split_k
        if split == 1:
            return super().k_tiles(num_k_tiles)
        count = (num_k_tiles + (split - 1)) // split
        first = self.share * count
        return first, first + count

    @property
    def share(self) -> Int32:
        """Which of the pairs of a cluster this CTA belongs to."""
        return cute.arch.block_idx_in_cluster() // CTAS

    def make_queue(self, smem: SmemAllocator, mC: cute.Tensor) -> Any:
        split = self.config.split_k
        if split == 1:
            return super().make_queue(smem, mC)
        return OneTileQueue(self.pair_tiles(mC), CTAS * split)

    @cute.jit
    def schedule(self, queue: cutlass.Constexpr[Any]) -> None:
        if cutlass.const_expr(self.config.split_k == 1):
            Stage8.schedule(self, queue)

    def epilogue_slots(self, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
        """Sub-tiles of C, or of C^T, whose columns are then contiguous: (128, epiN, SLOT)."""
        c = self.config
        if not c.swap_ab:
            return slots_layout(dtype, 128, c.epi_n, c.epi_stages, swizzle=c.epi_n * 2)
        return contiguous_lanes_layout(c.epi_n, c.epi_stages)

    @cute.jit
    def load(self, operands: PairOperands, ab: Ring, queue: cutlass.Constexpr[Any]) -> None:
        operands.prefetch()
        cute.arch.griddepcontrol_wait()
        Stage8.load(self, operands, ab, queue)
        cute.arch.griddepcontrol_launch_dependents()

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
            first = fill.slot
            head = cutlass.min(self.skew, num_k_tiles)
            tail = cutlass.min(self.skew, num_k_tiles - head)
            for block in cutlass.range_constexpr(self.num_blocks):
                acc.acquire(fill)
                fence_after_sync()
                self.steps(mma.into(first + block, block), ab, take, head, block, fresh=True)
                fill.advance()
            take.skip(head)
            for _ in cutlass.range(num_k_tiles - head - tail, unroll=1):
                ab.wait_full(take)
                for block in cutlass.range_constexpr(self.num_blocks):
                    mma.into(first + block, block).issue(take.slot, accumulate=True)
                mma.commit(ab.empty[take.slot])
                take.advance()
            for block in cutlass.range_constexpr(self.num_blocks):
                self.steps(mma.into(first + block, block), ab, take, tail, block, fresh=False)
                mma.commit(acc.full[first + block])
            take.skip(tail)
            ticket = queue.next(ticket)

    @property
    def skew(self) -> int:
        """Steps at either end of a tile that one block takes before the other: the first is then
        complete, and read, while the second still computes. Where tensor memory holds two tiles
        nothing needs that."""
        c = self.config
        return 1 if c.num_acc > self.num_blocks else max(1, c.num_stages // 2)

    @cute.jit
    def steps(
        self,
        mma: Umma,
        ab: Ring,
        take: PipelineState,
        count: Int32,
        block: cutlass.Constexpr[int],
        fresh: cutlass.Constexpr[bool],
    ) -> None:
        """`count` steps of one block, from the slot of `take` on; the last block empties them."""
        state = PipelineState(take.num_slots, take.slot, take.phase)
        for step in cutlass.range(count, unroll=1):
            ab.wait_full(state)
            mma.issue(state.slot, accumulate=step > 0 if fresh else True)
            if cutlass.const_expr(block == self.num_blocks - 1):
                mma.commit(ab.empty[state.slot])
            state.advance()

    @cute.jit
    def epilogue(
        self,
        tCtAcc: cute.Tensor,
        way_out: WayOut,
        acc: AccRing,
        queue: cutlass.Constexpr[Any],
    ) -> None:
        if cutlass.const_expr(self.config.split_k > 1):
            self.leave_sums(tCtAcc, way_out, acc, queue)
        else:
            self.store_tiles(tCtAcc, way_out, acc, queue)

    @cute.jit
    def store_tiles(
        self,
        tCtAcc: cute.Tensor,
        way_out: WayOut,
        acc: AccRing,
        queue: cutlass.Constexpr[Any],
    ) -> None:
        take = acc.consumer()
        way_out.prefetch()
        cute.arch.griddepcontrol_wait()
        ticket = queue.first()
        while ticket.valid:
            tile = queue.tile(ticket)
            for block in cutlass.range_constexpr(self.num_blocks):
                row_tile = tile.m * self.num_blocks + block
                leaving = way_out.of(tCtAcc[(None, None), 0, 0, take.slot], tile, row_tile)
                acc.wait_full(take)
                fence_after_sync()
                self.store_block(leaving, acc, take)
                take.advance()
            ticket = queue.next(ticket)
        drain_stores()

    @cute.jit
    def store_block(self, leaving: TileOut, acc: AccRing, take: PipelineState) -> None:
        """One accumulator: a sub-tile is on its way out of tensor memory while the one before is
        stored."""
        parts = leaving.parts
        following = parts.start_load(0)
        for part in cutlass.range_constexpr(parts.num_parts):
            tTR_rAcc = following
            parts.wait_loads()
            if cutlass.const_expr(part < parts.num_parts - 1):
                following = parts.start_load(part + 1)
            else:
                fence_before_sync()
                acc.release(take)
            leaving.store(tTR_rAcc, part, part)

    def allocate_sums(self, smem: SmemAllocator) -> cute.Tensor | None:
        """(VECTOR, NumVectors, THREAD): a row of sums a thread; one vector of all, side by side."""
        if self.config.split_k == 1:
            return None
        vectors = self.config.tile_n // VECTOR
        layout = cute.make_layout((VECTOR, vectors, LANES), stride=(1, VECTOR * LANES, VECTOR))
        return smem.allocate_tensor(Float32, layout, byte_alignment=128)

    @cute.jit
    def leave_sums(
        self,
        tCtAcc: cute.Tensor,
        way_out: WayOut,
        acc: AccRing,
        queue: cutlass.Constexpr[Any],
    ) -> None:
        """This CTA's rows of the accumulator, to smem."""
        thread, _, _ = cute.arch.thread_idx()
        tile = queue.tile(queue.first())
        parts = way_out.of(tCtAcc[(None, None), 0, 0, 0], tile, tile.m).parts
        vectors = self.vectors(parts)
        mine = cute.logical_divide(way_out.sums[None, None, thread], (None, vectors))
        acc.wait_full(acc.consumer())
        fence_after_sync()
        for part in cutlass.range_constexpr(parts.num_parts):
            tTR_rAcc = parts.load(part)
            flat = cute.make_tensor(tTR_rAcc.iterator, cute.make_layout((VECTOR, vectors)))
            cute.autovec_copy(flat, mine[None, (None, part)])
        fence_before_sync()

    def vectors(self, parts: SubTiles) -> int:
        """Of sums in a thread's row of a sub-tile."""
        return self.config.tile_n // parts.num_parts // VECTOR

    @cute.jit
    def add_up(self, tCtAcc: cute.Tensor, way_out: WayOut, queue: cutlass.Constexpr[Any]) -> None:
        """Every split_k-th sub-tile of this CTA's rows, from its share on, of all pairs."""
        c, sums = self.config, way_out.sums
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_wait()
        tile = queue.tile(queue.first())
        leaving = way_out.of(tCtAcc[(None, None), 0, 0, 0], tile, tile.m)
        parts = leaving.parts
        vectors = self.vectors(parts)
        load = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=32 * VECTOR)
        for turn in cutlass.range_constexpr(-(-parts.num_parts // c.split_k)):
            part = turn * c.split_k + self.share
            if part < parts.num_parts:
                total = cute.make_rmem_tensor((VECTOR, vectors), Float32)
                total.fill(0.0)
                for pair in cutlass.range_constexpr(c.split_k):
                    rank = CTAS * pair + cute.arch.block_idx_in_cluster() % CTAS
                    theirs = cute.make_tensor(
                        cute.arch.map_dsmem_ptr(sums.iterator, rank), sums.layout
                    )
                    theirs = cute.logical_divide(theirs[None, None, thread], (None, vectors))
                    values = cute.make_rmem_tensor_like(total)
                    cute.copy(load, theirs[None, (None, part)], values)
                    total.store(total.load() + values.load())
                leaving.store(total, turn, part)
        drain_stores()
