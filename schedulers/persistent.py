"""Static persistent CTAs, one per SM, which take their share of the tiles in equal steps.

Cluster c of G takes the indices c, c + G, c + 2 G, ... of the order, so at any time the grid works
on neighbours in that order. All roles of a CTA compute the same sequence and need not communicate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import cutlass
from cutlass import Int32, cute

from cutex.device.work_tile import WorkTile, place_in_cluster
from cutex.schedulers.dispatch import Ticket
from cutex.schedulers.one_tile import OwnNumber
from cutex.schedulers.order import Order, TileCounts
from cutex.schedulers.raster import Raster, RasterOrder


@dataclass(frozen=True)
class EqualSteps(OwnNumber):
    """A source for CTAs, or clusters of `ctas`, of a grid along x: number c of G gets c, c + G, c +
    2 G, ..."""

    def next(self, ticket: Ticket, asked: Int32, total: Int32) -> Ticket:
        ctas, _, _ = cute.arch.grid_dim()
        return Ticket(ticket.index + ctas // self.ctas, ticket.phase)


class OrderOfClusters(Order, Protocol):
    """An order whose indices count clusters of cluster_m x cluster_n CTAs."""

    @property
    def cluster_m(self) -> int: ...

    @property
    def cluster_n(self) -> int: ...


@dataclass(frozen=True)
class StaticWalk:
    """A dispatcher of the indices `start`, `start + step`, ... below `end`.

    A kernel whose roles need no ticket loops over the indices and calls `tile_at`. The `splits`
    CTAs that share the K of a tile take the same indices, and differ in `split`.
    """

    order: OrderOfClusters
    start: Int32
    end: Int32
    step: Int32
    split: Int32
    splits: int = 1
    barriers: tuple[()] = ()

    def schedule(self) -> None:
        """Do nothing: tiles need not be asked for."""

    def first(self) -> Ticket:
        return Ticket(self.start, Int32(0), self.start < self.end, Int32(0))

    @cute.jit
    def next(self, ticket: Ticket) -> Ticket:
        index = ticket.index + self.step
        return Ticket(index, ticket.phase, index < self.end, ticket.slot)

    def tile(self, ticket: Ticket) -> WorkTile:
        return self.tile_at(ticket.index)

    @cute.jit
    def tile_at(self, index: Int32) -> WorkTile:
        tile = self.order.tile(index)
        m, n = place_in_cluster(self.order.cluster_m, self.order.cluster_n, self.splits)
        return tile._replace(m=tile.m + m, n=tile.n + n, split=self.split)


@dataclass(frozen=True)
class StaticPersistent:
    """A grid of clusters (x along M, y along N, z counts them) that loops over all tiles.

    With `split_k` > 1 a cluster has as many layers of CTAs along z, which share the K of its tiles;
    the grid then covers all tiles at once.
    """

    raster: Raster
    cluster: tuple[int, int]
    num_ctas: int  # CTAs that run at one time
    split_k: int = 1

    def grid(self, counts: TileCounts) -> tuple[int, int, Int32]:
        total = RasterOrder.of(self.raster, counts, self.cluster).total
        across, down = self.cluster
        if self.split_k > 1:
            return across, down, total * self.split_k
        at_once = max(1, self.num_ctas // (across * down))
        return across, down, cutlass.min(at_once, total)

    def walk(self, counts: TileCounts) -> StaticWalk:
        """The walk of this CTA's cluster."""
        order = RasterOrder.of(self.raster, counts, self.cluster)
        _, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        split = first % self.split_k
        first, step = first // self.split_k, step // self.split_k
        return StaticWalk(order, first, order.total, step, split, self.split_k)
