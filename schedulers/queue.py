"""The sequence of tiles that one role works through, whoever hands them out.

A role of a persistent kernel is a loop:

    ticket = queue.first()
    while ticket.valid:
        tile = queue.tile(ticket)
        ...
        ticket = queue.next(ticket)

Every role of a CTA sees the same sequence, each at its own pace.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Boolean, Int32, cute

from cutex.schedulers.one_tile import WorkTile
from cutex.schedulers.persistent import BatchTile, Walk
from cutex.schedulers.raster import Raster

CTAS = 2  # of a pair, along M


class Ticket:
    """Where a role stands: an index of the raster order, and whether there is such a tile.

    `slot` and `phase` say where the next tile will be announced, if somebody announces it.
    """

    def __init__(self, index: Int32, valid: Boolean, slot: Int32, phase: Int32) -> None:
        self.index = index
        self.valid = valid
        self.slot = slot
        self.phase = phase

    # NOTE: the two methods that let the DSL carry a Ticket through a loop.
    def __extract_mlir_values__(self) -> list:
        return [x.ir_value() for x in (self.index, self.valid, self.slot, self.phase)]

    def __new_from_mlir_values__(self, values: list) -> Ticket:
        return Ticket(Int32(values[0]), Boolean(values[1]), Int32(values[2]), Int32(values[3]))


@dataclass(frozen=True)
class StaticQueue:
    """Every tile follows from the one before: nobody needs to be asked."""

    walk: Walk
    barriers: tuple[()] = ()

    def first(self) -> Ticket:
        return Ticket(self.walk.first, self.walk.first < self.walk.end, Int32(0), Int32(0))

    @cute.jit
    def next(self, ticket: Ticket) -> Ticket:
        index = ticket.index + self.walk.step
        return Ticket(index, index < self.walk.end, ticket.slot, ticket.phase)

    def tile(self, ticket: Ticket) -> WorkTile:
        return self.walk.tile(ticket.index)


@dataclass(frozen=True)
class PairTiles:
    """Which tile of C an index of the raster order is, for clusters that hold pairs of CTAs along
    M; with `batched`, of one entry of a batch after the other."""

    raster: Raster
    clusters_m: Int32
    clusters_n: Int32
    batched: bool = False

    def tile(self, index: Int32) -> WorkTile | BatchTile:
        """In rows of a CTA and columns of a pair."""
        per_entry = self.clusters_m * self.clusters_n
        entry = index // per_entry if self.batched else 0
        m, n = self.raster.cluster(index - entry * per_entry, self.clusters_m, self.clusters_n)
        row = CTAS * m + cute.arch.block_idx_in_cluster() % CTAS
        return BatchTile(row, n, entry) if self.batched else WorkTile(row, n)


@dataclass(frozen=True)
class OneTileQueue:
    """One tile for each cluster of `ctas` along x, pairs of which share it."""

    tiles: PairTiles
    ctas: int
    barriers: tuple[()] = ()

    def first(self) -> Ticket:
        x, _, _ = cute.arch.block_idx()
        return Ticket(x // self.ctas, Boolean(True), Int32(0), Int32(0))

    def next(self, ticket: Ticket) -> Ticket:
        return Ticket(ticket.index, Boolean(False), ticket.slot, ticket.phase)

    def tile(self, ticket: Ticket) -> WorkTile | BatchTile:
        return self.tiles.tile(ticket.index)
