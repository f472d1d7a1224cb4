"""The epilogue roles of the general kernel: four warps that read accumulators and store them.

StoreTiles: a tile is stored while the next is computed.
SplitK:     the pairs of a cluster exchange the sums of one tile; each stores a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.memory import SmemAllocator

from cutex.device.atoms.tmem import LANES, fence_after_sync, fence_before_sync
from cutex.device.epilogue.sm100.fused_store import FusedEpilogueStore, FusedTileStore
from cutex.device.epilogue.sm100.tma_store import SubTiles, drain_stores
from cutex.device.pipeline import AccRing, PipelineState
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.schedulers.clc import CTAS
from cutex.schedulers.dispatch import Dispatcher

VECTOR = 4  # fp32 sums in one access: 16 bytes


@dataclass(frozen=True)
class StoreTiles:
    """The epilogue of tiles whose whole K one pair computes."""

    tiles: Sm100Config
    unrolled: bool

    @cute.jit
    def run(
        self,
        tCtAcc: cute.Tensor,
        epilogue: FusedEpilogueStore,
        acc: AccRing,
        dispatch: cutlass.Constexpr[Dispatcher],
    ) -> None:
        take = acc.consumer()
        epilogue.prefetch()
        cute.arch.griddepcontrol_wait()
        ticket = dispatch.first()
        while ticket.valid:
            tile = dispatch.tile(ticket)
            for block in cutlass.range_constexpr(self.tiles.num_blocks):
                row_tile = tile.m * self.tiles.num_blocks + block
                tAcc = tCtAcc[(None, None), 0, 0, self.taken(take)]  # (128, bN)
                store = epilogue.tile(tAcc, tile, row_tile)
                acc.wait_full(take)
                fence_after_sync()
                if cutlass.const_expr(self.unrolled):
                    self.store_unrolled(store, acc, take)
                else:
                    self.store_in_loop(store, acc, take)
                take.advance()
            ticket = dispatch.next(ticket)
        drain_stores()

    def taken(self, take: PipelineState) -> Int32:
        """The accumulator that is read next."""
        return take.slot

    @cute.jit
    def store_unrolled(self, store: FusedTileStore, acc: AccRing, take: PipelineState) -> None:
        """Store one accumulator; the next sub-tile is loaded from tensor memory while one is
        stored."""
        parts = store.parts
        following = parts.start_load(0)
        for part in cutlass.range_constexpr(parts.num_parts):
            tTR_rAcc = following
            parts.wait_loads()
            if cutlass.const_expr(part < parts.num_parts - 1):
                following = parts.start_load(part + 1)
            else:
                fence_before_sync()
                acc.release(take)
            store.store(tTR_rAcc, part, part)

    @cute.jit
    def store_in_loop(self, store: FusedTileStore, acc: AccRing, take: PipelineState) -> None:
        """Store one accumulator in a loop over its sub-tiles.

        NOTE: unrolled, with bias, residual and scales, the code of both blocks' sub-tiles shares
        values that ptxas keeps in registers: 255 of them, and 2 KB of spills.
        """
        parts = store.parts
        following = parts.start_load(0)
        for part in cutlass.range(parts.num_parts, unroll=1):
            parts.wait_loads()
            tTR_rAcc = cute.make_rmem_tensor_like(following)
            tTR_rAcc.store(following.load())
            if part < parts.num_parts - 1:
                parts.start_load_into(following, part + 1)
            else:
                fence_before_sync()
                acc.release(take)
            store.store_next(tTR_rAcc, part, part)

    def finish(
        self, tCtAcc: cute.Tensor, epilogue: FusedEpilogueStore, dispatch: Dispatcher
    ) -> None:
        """Do nothing: all tiles are stored."""


@dataclass(frozen=True)
class SplitK:
    """The epilogue of a tile whose K the pairs of a cluster share: each writes its fp32 sums to
    smem, adds up every split_k-th sub-tile from all of them, in the same order in every run, and
    stores it."""

    tiles: Sm100Config
    sums: cute.Tensor  # (VECTOR, NumVectors, THREAD) in smem

    @staticmethod
    def allocate_sums(smem: SmemAllocator, tiles: Sm100Config) -> cute.Tensor:
        """Allocate the smem (VECTOR, NumVectors, THREAD) of the sums: one row per thread; the
        vectors of all threads with one number are adjacent."""
        count = tiles.tile_n // VECTOR
        layout = cute.make_layout((VECTOR, count, LANES), stride=(1, VECTOR * LANES, VECTOR))
        return smem.allocate_tensor(Float32, layout, byte_alignment=128)

    @cute.jit
    def run(
        self,
        tCtAcc: cute.Tensor,
        epilogue: FusedEpilogueStore,
        acc: AccRing,
        dispatch: cutlass.Constexpr[Dispatcher],
    ) -> None:
        """Write this CTA's rows of the accumulator to smem."""
        thread, _, _ = cute.arch.thread_idx()
        tile = dispatch.tile(dispatch.first())
        parts = epilogue.tile(tCtAcc[(None, None), 0, 0, 0], tile, tile.m).parts
        count = self.vectors(parts)
        sums = self.sums[None, None, thread]
        mine = cute.logical_divide(sums, (None, count))  # (VECTOR, (NumVectors, PART))
        acc.wait_full(acc.consumer())
        fence_after_sync()
        for part in cutlass.range_constexpr(parts.num_parts):
            tTR_rAcc = parts.load(part)
            flat = cute.make_tensor(tTR_rAcc.iterator, cute.make_layout((VECTOR, count)))
            cute.autovec_copy(flat, mine[None, (None, part)])
        fence_before_sync()

    @cute.jit
    def finish(
        self,
        tCtAcc: cute.Tensor,
        epilogue: FusedEpilogueStore,
        dispatch: cutlass.Constexpr[Dispatcher],
    ) -> None:
        """Add up and store this CTA's part, once all CTAs of the cluster have written their
        sums."""
        c, sums = self.tiles, self.sums
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_wait()
        tile = dispatch.tile(dispatch.first())
        store = epilogue.tile(tCtAcc[(None, None), 0, 0, 0], tile, tile.m)
        parts = store.parts
        count = self.vectors(parts)
        load = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=32 * VECTOR)
        for turn in cutlass.range_constexpr(-(-parts.num_parts // c.split_k)):
            part = turn * c.split_k + tile.split
            if part < parts.num_parts:
                total = cute.make_rmem_tensor((VECTOR, count), Float32)  # (VECTOR, NumVectors)
                total.fill(0.0)
                for pair in cutlass.range_constexpr(c.split_k):
                    rank = CTAS * pair + cute.arch.block_idx_in_cluster() % CTAS
                    theirs = cute.make_tensor(
                        cute.arch.map_dsmem_ptr(sums.iterator, rank), sums.layout
                    )
                    theirs = theirs[None, None, thread]
                    theirs = cute.logical_divide(theirs, (None, count))  # as mine in `run`
                    values = cute.make_rmem_tensor_like(total)
                    cute.copy(load, theirs[None, (None, part)], values)
                    total.store(total.load() + values.load())
                store.store(total, turn, part)
        drain_stores()

    def vectors(self, parts: SubTiles) -> int:
        """The number of vectors of sums in a thread's row of a sub-tile."""
        return self.tiles.tile_n // parts.num_parts // VECTOR
