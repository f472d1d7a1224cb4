"""The epilogue role of accumulators that share columns of tensor memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from cutex.device.atoms.tmem import fence_before_sync
from cutex.device.epilogue.sm100.fused_store import FusedTileStore
from cutex.device.pipeline import AccRing, PipelineState
from cutex.kernels.gemm.sm100.epilogue import StoreTiles


@dataclass(frozen=True)
class StoreOverlapped(StoreTiles):
    """StoreTiles for two accumulators of which the first ends with columns that the second begins
    with. These are read first, and the next tile's MMAs start while the rest is read.

    NOTE: the ring has one slot, whose phases are the two accumulators in turn: a tile may start
    when the columns that it shares with the tile before are free; the rest of its accumulator was
    read before that tile's.
    """

    shared_parts: int  # sub-tiles with shared columns

    def taken(self, take: PipelineState) -> Int32:
        return take.phase

    def part(self, turn: Int32 | int, take: PipelineState, num_parts: int) -> Int32:
        """The sub-tile that is read at `turn`: of the first accumulator the last one first."""
        last = num_parts - 1
        return (1 - take.phase) * (last - 2 * turn) + turn

    @cute.jit
    def store_unrolled(self, store: FusedTileStore, acc: AccRing, take: PipelineState) -> None:
        parts = store.parts
        following = parts.start_load(self.part(0, take, parts.num_parts))
        for turn in cutlass.range_constexpr(parts.num_parts):
            tTR_rAcc = following
            parts.wait_loads()
            if cutlass.const_expr(turn == self.shared_parts - 1):
                fence_before_sync()
                acc.release(take)
            if cutlass.const_expr(turn < parts.num_parts - 1):
                following = parts.start_load(self.part(turn + 1, take, parts.num_parts))
            store.store(tTR_rAcc, turn, self.part(turn, take, parts.num_parts))

    @cute.jit
    def store_in_loop(self, store: FusedTileStore, acc: AccRing, take: PipelineState) -> None:
        parts = store.parts
        following = parts.start_load(self.part(0, take, parts.num_parts))
        for turn in cutlass.range(parts.num_parts, unroll=1):
            parts.wait_loads()
            tTR_rAcc = cute.make_rmem_tensor_like(following)
            tTR_rAcc.store(following.load())
            if turn == self.shared_parts - 1:
                fence_before_sync()
                acc.release(take)
            if turn < parts.num_parts - 1:
                parts.start_load_into(following, self.part(turn + 1, take, parts.num_parts))
            store.store_next(tTR_rAcc, turn, self.part(turn, take, parts.num_parts))
