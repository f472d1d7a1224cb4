"""The load and MMA roles of the general kernel, one warp each.

Each role follows the tiles that its dispatcher announces, at its own speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from cutex.device.atoms.tma import PairOperands
from cutex.device.atoms.tmem import fence_after_sync
from cutex.device.atoms.umma import UmmaProduct
from cutex.device.pipeline import AccRing, PipelineState, Ring
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.schedulers.dispatch import Dispatcher


@dataclass(frozen=True)
class Load:
    """The load role: one warp fills the ring with A and B, for each tile all of K or this pair's
    share."""

    tiles: Sm100Config

    @cute.jit
    def run(
        self, operands: PairOperands, ab: Ring, dispatch: cutlass.Constexpr[Dispatcher]
    ) -> None:
        operands.prefetch()
        cute.arch.griddepcontrol_wait()
        fill = ab.producer()
        ticket = dispatch.first()
        while ticket.valid:
            tile = dispatch.tile(ticket)
            loads = operands.loads(tile)
            count = k_share(self.tiles, loads.num_k_tiles)
            # NOTE: a share may extend past K, where TMA fills in zeros
            for k_tile in cutlass.range(tile.split * count, tile.split * count + count, unroll=1):
                loads.load(k_tile, fill.slot, ab.acquire(fill))
                fill.advance()
            ticket = dispatch.next(ticket)
        cute.arch.griddepcontrol_launch_dependents()


@dataclass(frozen=True)
class Mma:
    """The MMA role: one warp of the leader starts the MMAs of a pair, for each accumulator (256
    rows) of a tile in turn."""

    tiles: Sm100Config

    @property
    def skew(self) -> int:
        """The number of steps of K by which one block of a tile is ahead of the other.

        The first block is then complete, and read, while the second still computes; 1 where tensor
        memory holds two tiles, which makes that unnecessary.
        """
        c = self.tiles
        return 1 if c.num_acc > c.num_blocks else max(1, c.num_stages // 2)

    @cute.jit
    def run(
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
            take, fill = self.tile(mma, ab, acc, (take, fill), num_k_tiles)
            ticket = dispatch.next(ticket)

    @cute.jit
    def tile(
        self,
        mma: UmmaProduct,
        ab: Ring,
        acc: AccRing,
        states: tuple[PipelineState, PipelineState],
        num_k_tiles: Int32,
    ) -> tuple[PipelineState, PipelineState]:
        """Start the MMAs of one tile; `states`: of the slot that is taken next, and of the
        accumulator that is filled next. Return the states after."""
        take, fill = states
        first = fill.slot
        head = cutlass.min(self.skew, num_k_tiles)
        tail = cutlass.min(self.skew, num_k_tiles - head)
        for block in cutlass.range_constexpr(self.tiles.num_blocks):
            acc.acquire(fill)
            fence_after_sync()
            into = mma.of_rows(block).into(first + block)
            self.steps(into, ab, take, head, block, fresh=True)
            fill.advance()
        take.skip(head)
        for _ in cutlass.range(num_k_tiles - head - tail, unroll=1):
            ab.wait_full(take)
            for block in cutlass.range_constexpr(self.tiles.num_blocks):
                mma.of_rows(block).into(first + block).issue(take.slot, accumulate=True)
            mma.commit(ab.empty[take.slot])
            take.advance()
        for block in cutlass.range_constexpr(self.tiles.num_blocks):
            into = mma.of_rows(block).into(first + block)
            self.steps(into, ab, take, tail, block, fresh=False)
            mma.commit(acc.full[first + block])
        take.skip(tail)
        return take, fill

    @cute.jit
    def steps(
        self,
        mma: UmmaProduct,
        ab: Ring,
        take: PipelineState,
        count: Int32,
        block: cutlass.Constexpr[int],
        fresh: cutlass.Constexpr[bool],
    ) -> None:
        """Issue `count` steps of K of one block, from the slot of `take` on; the last block
        releases the slots."""
        state = PipelineState(take.num_slots, take.slot, take.phase)
        for step in cutlass.range(count, unroll=1):
            ab.wait_full(state)
            mma.issue(state.slot, accumulate=step > 0 if fresh else True)
            if cutlass.const_expr(block == self.tiles.num_blocks - 1):
                mma.commit(ab.empty[state.slot])
            state.advance()


def k_share(tiles: Sm100Config, num_k_tiles: Int32) -> Int32:
    """The number of K tiles of each of the split_k pairs that share them."""
    return (num_k_tiles + (tiles.split_k - 1)) // tiles.split_k
