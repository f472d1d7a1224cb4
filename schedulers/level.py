"""Tiles of ragged groups that are equally wide within a group.

A group's rows are the columns of an MMA here, which come in any multiple of 8. So a group is
divided into as few tiles as hold its rows, all of one width: less padding is computed than with
tiles of a fixed height, where each group's last tile is half empty in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from cutex.schedulers.order import TileCounts, select
from cutex.schedulers.persistent import StaticWalk
from cutex.schedulers.ragged import RaggedOrder, RaggedTiles
from cutex.schedulers.raster import clusters


@dataclass(frozen=True)
class Widths:
    """The widths that tiles may have: multiples of `step` above half of `most`, and of `coarse`
    below, where memory binds and padding costs little.

    Plain operators only: Python ints run it, and the same code traces in the DSL.
    """

    most: int
    step: int
    coarse: int

    @property
    def all(self) -> tuple[int, ...]:
        """All widths."""
        half = self.most // 2
        return tuple(
            w
            for w in range(self.step, self.most + 1, self.step)
            if w > half or w % self.coarse == 0
        )

    def of(self, rows: Any) -> Any:
        """The width of the tiles of a group of `rows` rows, at least one."""
        few = cutlass.max(clusters(rows, self.most), 1)
        return self.shared(rows, few)

    def shared(self, rows: Any, few: Any) -> Any:
        """The width of `few` tiles, at least as many as `tiles`, of a group of `rows` rows."""
        even = cutlass.max(clusters(rows, few), 1)
        coarse, fine = (clusters(even, x) * x for x in (self.coarse, self.step))
        return select(even > self.most // 2, fine, coarse)

    def wide(self, rows: Any, few: Any) -> Any:
        """How many of `few` tiles of a group must be as wide as `shared` says, where the others may
        be a step narrower; 0: all."""
        even = cutlass.max(clusters(rows, few), 1)
        return select(even > self.most // 2, clusters(rows, self.step) % few, 0)

    def tiles(self, rows: Any) -> Any:
        """The tiles of a group of `rows` rows: as few as the widest would take."""
        return clusters(rows, self.most)


@dataclass(frozen=True)
class LevelOrder(RaggedOrder):
    """The tiles of all groups, like RaggedOrder; m counts `tiles_n` tiles of the matrices' columns,
    and n a group's own."""

    widths: Widths = Widths(8, 8, 8)

    def counts(self, rows: Any) -> TileCounts:
        return TileCounts(self.tiles_n, self.widths.tiles(rows))


@dataclass(frozen=True)
class LevelTiles(RaggedTiles):
    """A scheduler like RaggedTiles, whose tiles have the matrices' columns as rows and a group's
    rows as columns."""

    widths: Widths = Widths(8, 8, 8)

    def order(self, columns: Int32 | int) -> LevelOrder:
        """The order of tiles that cover the matrices' `columns`."""
        return self.order_of(clusters(columns, self.tile[0]))

    def order_of(self, tiles_m: Int32 | int) -> LevelOrder:
        place = self.raster, self.groups, self.tile[1], tiles_m, *self.cluster
        return LevelOrder(*place, self.widths)

    def walk(self, counts: TileCounts) -> StaticWalk:
        """The walk of this CTA's cluster; of `counts`, only those along M are known so far."""
        order = self.order_of(counts.m)
        _, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        return StaticWalk(order, first, order.total, step, Int32(0))
