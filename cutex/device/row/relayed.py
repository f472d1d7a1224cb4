"""Reductions over rows that a cluster takes in turn, in steps between which nobody waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.pipeline import Barrier
from cutex.device.row.reduction import Gather, Values
from cutex.device.row.tile import RowTile

KEPT = 3  # slots of the warps' values: of the turn that is kept, the one before and one more
RELAYED = 4  # slots of the CTAs' values


@dataclass(frozen=True)
class RelayedReduction:
    """Reductions over the rows of a cluster, one after another, in three steps: each warp keeps
    what it has in its CTA; a barrier of the CTA later one warp relays what all of them kept to
    every CTA; and each warp combines what the CTAs sent. A row is begun one or two turns before it
    is finished, so that few wait for others.

    barrier     arrives                                         waits
    full[slot]  1: the warp of this CTA that relays, and        all threads
                4 * count bytes from each CTA of the cluster
    read[slot]  1 a CTA of the cluster, which has read the      the warp that relays
                slot
    """

    tile: RowTile
    count: int
    kept: Any  # (WARP, count, KEPT)
    parts: Any  # (CTA, count, RELAYED)
    full: Barrier
    read: Barrier

    @staticmethod
    def allocate(smem: SmemAllocator, tile: RowTile, count: int) -> RelayedReduction:
        if tile.rows > 1 or tile.ctas == 1 or tile.warps < 2:
            raise ValueError("reductions are relayed over one row of a cluster")
        kept = smem.allocate_tensor(Float32, cute.make_layout((tile.warps, count, KEPT)), 16)
        parts = smem.allocate_tensor(Float32, cute.make_layout((tile.ctas, count, RELAYED)), 16)
        full = Barrier.allocate(smem, "full", 1, RELAYED)
        read = Barrier.allocate(smem, "read", tile.ctas, RELAYED)
        return RelayedReduction(tile, count, kept, parts, full, read)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return self.full, self.read

    @cute.jit
    def start(self, values: Values, turn: Int32 | int) -> None:
        """Keep this warp's values for its CTA."""
        count, kept = cutlass.const_expr(self.count), self.kept
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(count):
                kept[cute.arch.warp_idx(), i, turn % KEPT] = values[i]

    @cute.jit
    def relay(self, gather: cutlass.Constexpr[Gather], turn: Int32 | int) -> None:
        """Send `gather` of the values of all warps to every CTA. One warp calls it, a barrier of
        the CTA after `start`."""
        lane, slot = cute.arch.lane_idx(), turn % RELAYED
        if lane == 0:
            self.full.arrive_expecting(4 * self.tile.ctas * self.count, slot)
        own = tuple(self.kept[lane % self.tile.warps, i, turn % KEPT] for i in range(self.count))
        found = gather([own], self.tile.warps)
        rank = cute.arch.block_idx_in_cluster()
        self.read.wait(turn // RELAYED % 2 ^ 1, slot)  # at once in the first round
        if lane < self.tile.ctas:  # one lane for each CTA
            for i in cutlass.range_constexpr(self.count):
                to = cute.domain_offset((rank, i, slot), self.parts).iterator
                word = found[i].bitcast(Int32)
                cute.arch.store_async_dsmem(to, word, self.full[slot], lane)

    @cute.jit
    def finish(
        self, gather: cutlass.Constexpr[Gather], turn: Int32 | int, turns: Int32 | int
    ) -> Values:
        """`gather` of what all CTAs sent."""
        slot, part = turn % RELAYED, cute.arch.lane_idx() % self.tile.ctas
        self.full.wait(turn // RELAYED % 2, slot)
        own = tuple(self.parts[part, i, slot] for i in range(self.count))
        return gather([own], self.tile.ctas)

    @cute.jit
    def release(self, turn: Int32 | int, turns: Int32 | int) -> None:
        """Let all CTAs write where this turn's values were. The warp that relays calls it, a
        barrier of the CTA after `finish`."""
        lane = cute.arch.lane_idx()
        # NOTE: only where the CTA waits for it: a signal to one that has ended is a fault
        if (lane < self.tile.ctas) & (turn + RELAYED < turns):
            cute.arch.mbarrier_arrive(self.read[turn % RELAYED], lane)
