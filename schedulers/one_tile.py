"""One tile for each CTA or cluster: the hardware hands out tiles in the grid's own order."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Boolean, Int32, cute

from cutex.device.work_tile import WorkTile
from cutex.schedulers.dispatch import Ticket
from cutex.schedulers.order import TileCounts
from cutex.schedulers.raster import RasterOrder


class OneTilePerCta:
    """One tile for each CTA of a two-dimensional grid: x runs along M, y along N."""

    @staticmethod
    def grid(counts: TileCounts) -> tuple[Int32, Int32, int]:
        """The grid that covers a matrix of so many tiles."""
        return counts.m, counts.n, 1

    @staticmethod
    @cute.jit
    def work_tile() -> WorkTile:
        m, n, _ = cute.arch.block_idx()
        return WorkTile(m, n)


@dataclass(frozen=True)
class OwnNumber:
    """A source of one index: the number of the CTA or, with `ctas` > 1 along x, of its cluster."""

    ctas: int = 1
    barriers: tuple[()] = ()

    def first(self) -> Ticket:
        x, _, _ = cute.arch.block_idx()
        return Ticket(x // self.ctas, Int32(0))

    def ask(self, ticket: Ticket) -> Int32:
        return Int32(0)

    def next(self, ticket: Ticket, asked: Int32, total: Int32) -> Ticket:
        return Ticket(total, ticket.phase)


@dataclass(frozen=True)
class OneTilePerCluster:
    """A dispatcher of one tile for each cluster of `ctas` along x: cluster_m CTAs along M for each
    share of K, `WorkTile.split`."""

    order: RasterOrder
    ctas: int
    barriers: tuple[()] = ()

    def schedule(self) -> None:
        """Do nothing: tiles need not be asked for."""

    def first(self) -> Ticket:
        ticket = OwnNumber(self.ctas).first()
        return Ticket(ticket.index, ticket.phase, Boolean(True), Int32(0))

    def next(self, ticket: Ticket) -> Ticket:
        return Ticket(ticket.index, ticket.phase, Boolean(False), ticket.slot)

    def tile(self, ticket: Ticket) -> WorkTile:
        tile = self.order.tile(ticket.index)
        rank = cute.arch.block_idx_in_cluster()
        size = self.order.cluster_m
        return tile._replace(m=tile.m + rank % size, split=rank // size)
