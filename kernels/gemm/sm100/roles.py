"""The load and MMA roles of the general kernel, one warp each.

A role follows the tiles that its dispatcher announces, in its own time.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from cutex.device.atoms.mma import Umma
from cutex.device.atoms.tma import PairOperands
from cutex.device.atoms.tmem import fence_after_sync
from cutex.device.pipeline import AccRing, PipelineState, Ring
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.schedulers.dispatch import Dispatcher


@dataclass(frozen=True)
class Load:
    """The load role: one warp fills the ring of A and B, of each tile all of K or its share."""

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
            # NOTE: a share may reach past K, where TMA fills in zeros
            for k_tile in cutlass.range(tile.split * count, tile.split * count + count, unroll=1):
                loads.load(k_tile, fill.slot, ab.acquire(fill))
                fill.advance()
            ticket = dispatch.next(ticket)
        cute.arch.griddepcontrol_launch_dependents()


@dataclass(frozen=True)
class Mma:
    """The MMA role: one warp of the leader starts the MMAs of a pair, for each accumulator of a
    tile, 256 rows each, in turn."""

    tiles: Sm100Config

    @property
    def skew(self) -> int:
        """Steps at either end of a tile that one block takes before the other: the first is then
        complete, and read, while the second still computes. Where tensor memory holds two tiles
        nothing needs that."""
        c = self.tiles
        return 1 if c.num_acc > c.num_blocks else max(1, c.num_stages // 2)

    @cute.jit
    def run(
        self,
        mma: Umma,
        ab: Ring,
        acc: AccRing,
        num_k_tiles: Int32,
        dispatch: cutlass.Constexpr[Dispatcher],
    ) -> None:
        take, fill = ab.consumer(), acc.producer()
        ticket = dispatch.first()
        while ticket.valid:
            first = fill.slot
            head = cutlass.min(self.skew, num_k_tiles)
            tail = cutlass.min(self.skew, num_k_tiles - head)
            for block in cutlass.range_constexpr(self.tiles.num_blocks):
                acc.acquire(fill)
                fence_after_sync()
                self.steps(mma.into(first + block, block), ab, take, head, block, fresh=True)
                fill.advance()
            take.skip(head)
            for _ in cutlass.range(num_k_tiles - head - tail, unroll=1):
                ab.wait_full(take)
                for block in cutlass.range_constexpr(self.tiles.num_blocks):
                    mma.into(first + block, block).issue(take.slot, accumulate=True)
                mma.commit(ab.empty[take.slot])
                take.advance()
            for block in cutlass.range_constexpr(self.tiles.num_blocks):
                self.steps(mma.into(first + block, block), ab, take, tail, block, fresh=False)
                mma.commit(acc.full[first + block])
            take.skip(tail)
            ticket = dispatch.next(ticket)

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
            if cutlass.const_expr(block == self.tiles.num_blocks - 1):
                mma.commit(ab.empty[state.slot])
            state.advance()


def k_share(tiles: Sm100Config, num_k_tiles: Int32) -> Int32:
    """K tiles of one of the split_k pairs that share them."""
    return (num_k_tiles + (tiles.split_k - 1)) // tiles.split_k
