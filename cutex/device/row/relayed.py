"""Reductions over the successive rows of a cluster, in steps that rarely wait."""

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
    """Reductions over successive rows of a cluster, in three steps: each warp writes its values to
    its CTA's smem; one CTA barrier later, one warp relays the CTA's combined value to every CTA;
    and each warp combines what the CTAs sent. A row is started one or two turns before it is
    finished, which hides the exchange.

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
        """Write this warp's values to its CTA's smem."""
        count, kept = cutlass.const_expr(self.count), self.kept
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(count):
                kept[cute.arch.warp_idx(), i, turn % KEPT] = values[i]

    @cute.jit
    def relay(self, gather: cutlass.Constexpr[Gather], turn: Int32 | int) -> None:
        """Send `gather` of the values of all warps of the CTA to every CTA. Called by one warp, one
        CTA barrier after `start`."""
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
        """`gather` of the values that all CTAs sent."""
        slot, part = turn % RELAYED, cute.arch.lane_idx() % self.tile.ctas
        self.full.wait(turn // RELAYED % 2, slot)
        own = tuple(self.parts[part, i, slot] for i in range(self.count))
        return gather([own], self.tile.ctas)

    @cute.jit
    def release(self, turn: Int32 | int, turns: Int32 | int) -> None:
        """Let all CTAs overwrite this turn's slot. Called by the relaying warp, one CTA barrier
        after `finish`."""
        lane = cute.arch.lane_idx()
        # NOTE: only where the CTA waits for it: a signal to one that has ended is a fault
        if (lane < self.tile.ctas) & (turn + RELAYED < turns):
            cute.arch.mbarrier_arrive(self.read[turn % RELAYED], lane)
