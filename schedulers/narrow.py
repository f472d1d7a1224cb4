"""Tiles of ragged groups, the last of whose columns are in narrower tiles.

Tiles of one width leave part of a matrix's last columns empty, and part of the CTAs idle in the
last round. Here a row of tiles ends with some of two thirds of the width: as many as have the last
CTA end first, which the device finds out, as it alone knows how many rows the groups have.

CTAs take equal steps through the wide tiles of all groups, and equal steps through the narrow ones,
which those CTAs begin that are left out by the last wide ones: so they end within a narrow tile of
each other. A CTA takes a narrow tile when its wide ones come to the same rows, which L2 then still
has. If all were taken at the end, what they load for few products would limit them
(docs/facts/grouped.md#grouped-fp8-narrow).

    plan     the numbers of wide and of narrow tiles     written by the warp that fills in the
             in a row of tiles                           tables, in smem, read by every role
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.work_tile import WorkTile
from cutex.schedulers.announced import AnnouncedTiles
from cutex.schedulers.order import GroupedOrder, TileCounts, select
from cutex.schedulers.ragged import Only, RaggedOrder, RaggedTiles
from cutex.schedulers.raster import clusters

WIDE, NARROW = 3, 2  # units of columns in a tile
TIMES = 16, 11  # of a wide and of a narrow tile: the latter loads more for its products
FIELDS = "wide", "narrow"
CHOICES = 4  # numbers of narrow tiles that are compared, each with WIDE more than the one before


@dataclass(frozen=True)
class ColumnTiles:
    """The tiles that cover the columns of a matrix: `wide` ones, and then `narrow` ones.

    Plain operators only: Python ints run it, and the same code traces in the DSL.
    """

    widest: int  # columns of a wide tile
    wide: Any  # how many there are, at least one
    narrow: Any

    @staticmethod
    def of(widest: int, columns: Any, strips: Any, ctas: Any) -> ColumnTiles:
        """Those with which the last of `ctas` that take equal steps ends first, of a product of
        `strips` rows of tiles."""
        units = clusters(columns, widest // WIDE)
        few = NARROW * units % WIDE  # narrow tiles that leave whole wide ones
        wide = (units - NARROW * few) // WIDE
        # NOTE: of so few columns that there would be no wide tile, one is partly empty
        none = wide < 1
        narrow = select(none, select(units > WIDE, 1, 0), few)
        # NOTE: narrow tiles load more for their products, so more of them have to gain 2 %
        first = best = ColumnTiles(widest, cutlass.max(wide, 1), narrow)
        least = best.ends(strips, ctas)
        for more in range(1, CHOICES):
            other = ColumnTiles(widest, first.wide - NARROW * more, first.narrow + WIDE * more)
            time = other.ends(strips, ctas)
            better = (other.wide >= 1) & (time * 50 < least * 49)
            chosen = (select(better, getattr(other, x), getattr(best, x)) for x in FIELDS)
            best, least = ColumnTiles(widest, *chosen), select(better, time, least)
        return best

    @property
    def narrow_width(self) -> int:
        return self.widest // WIDE * NARROW

    def ends(self, strips: Any, ctas: Any) -> Any:
        """When the last CTA has ended, in units of TIMES."""
        rounds, late = strips * self.wide // ctas, strips * self.wide % ctas
        after, odd = strips * self.narrow // ctas, strips * self.narrow % ctas
        of_wide, of_narrow = TIMES
        # the first `late` CTAs have a wide tile more, and take narrow ones after the others
        first = (rounds + 1) * of_wide + (after + select(odd > ctas - late, 1, 0)) * of_narrow
        others = rounds * of_wide + (after + select(odd > 0, 1, 0)) * of_narrow
        return select(late > 0, cutlass.max(first, others), others)

    def is_narrow(self, n: Any) -> Any:
        return n >= self.wide

    def first(self, n: Any) -> Any:
        """The first column of tile `n`."""
        narrow = self.wide * self.widest + (n - self.wide) * self.narrow_width
        return select(self.is_narrow(n), narrow, n * self.widest)


@dataclass(frozen=True)
class ColumnPlan:
    """The ColumnTiles of a product, in smem."""

    widest: int
    words: Any  # (2) Int32

    @staticmethod
    def allocate(smem: SmemAllocator, widest: int) -> ColumnPlan:
        return ColumnPlan(widest, smem.allocate_tensor(Int32, cute.make_layout(2)))

    def read(self) -> ColumnTiles:
        return ColumnTiles(self.widest, self.words[0], self.words[1])


@dataclass(frozen=True)
class NarrowOrder(RaggedOrder):
    """The wide tiles of all groups, as of RaggedOrder, and then the narrow ones of all groups,
    whose n follow those of the wide. The tables of groups count rows of tiles.

    No CTA walks it in this order (EqualShares).
    """

    narrow: Int32 | int = 0  # tiles of each row of tiles; `tiles_n` are wide

    @property
    def total(self) -> Any:
        return self.strips * (self.tiles_n + self.narrow)

    @property
    def strips(self) -> Any:
        """The rows of tiles of all groups."""
        return self.groups.starts[self.groups.most]

    def clusters_of(self, rows: Any) -> Any:
        return clusters(rows, self.tile_rows)

    def tile(self, index: Any) -> WorkTile:
        whole = self.strips * self.tiles_n
        late = index >= whole
        index = select(late, index - whole, index)
        across = select(late, self.narrow, self.tiles_n)
        starts, most = self.groups.starts, self.groups.most
        group = GroupedOrder(starts, most, self.order_of).group(index // cutlass.max(across, 1))
        down = self.counts(self.groups.rows(group)).m
        m, n = self.raster.cluster(index - starts[group] * across, down, across)
        return WorkTile(m, n + select(late, self.tiles_n, 0), group=group)


@dataclass(frozen=True)
class NarrowTiles(RaggedTiles):
    """A scheduler as RaggedTiles, of CTAs alone, whose tiles are those of a ColumnPlan."""

    plan: Any = None  # ColumnPlan

    def order(self, columns: Int32 | int) -> NarrowOrder:
        """The order, as far as it is known before the plan is."""
        return NarrowOrder(self.raster, self.groups, self.tile[0], 1)

    @cute.jit
    def fill(
        self,
        edges: cute.Tensor,
        rows: Int32,
        columns: Int32 | int,
        padded: cutlass.Constexpr[bool] = False,
        only: cutlass.Constexpr[Only | None] = None,
    ) -> None:
        """Fill in the tables, and make the plan. One warp calls it; a barrier of the CTA must
        follow."""
        RaggedTiles.fill(self, edges, rows, columns, padded, only)
        cute.arch.sync_warp()
        _, _, ctas = cute.arch.grid_dim()
        strips = self.groups.starts[self.groups.most]
        tiles = ColumnTiles.of(self.tile[1], columns, strips, ctas)
        wide, narrow = Int32(tiles.wide), Int32(tiles.narrow)
        if cute.arch.lane_idx() == 0:
            words = self.plan.words
            words[0], words[1] = wide, narrow

    def walk(self, counts: TileCounts) -> Any:  # EqualShares
        """The walk of this CTA, by the plan."""
        tiles = self.plan.read()
        place = self.raster, self.groups, self.tile[0], tiles.wide
        order = NarrowOrder(*place, narrow=tiles.narrow)
        _, _, cta = cute.arch.block_idx()
        _, _, ctas = cute.arch.grid_dim()
        return EqualShares(order, cta, ctas)


@dataclass(frozen=True)
class EqualShares:
    """The tiles of one of `ctas` CTAs: of the wide ones each `ctas`-th, and of the narrow ones.

    A role counts from `start` to `end`; the one that looks tiles up asks for the `next`.
    Plain operators only: Python ints run it, and the same code traces in the DSL.
    """

    order: NarrowOrder
    cta: Any
    ctas: Any
    start: int = 0
    step: int = 1

    @property
    def wide(self) -> Any:
        """The number of wide tiles of all CTAs."""
        return self.order.strips * self.order.tiles_n

    @property
    def first_narrow(self) -> Any:
        """The number of this CTA's first narrow tile: CTAs without a wide one in the last round
        begin."""
        late = self.wide % self.ctas
        return self.cta - late + select(self.cta < late, self.ctas, 0)

    @property
    def end(self) -> Any:
        narrow = self.order.strips * self.order.narrow
        firsts = (self.wide, self.cta), (narrow, self.first_narrow)
        wide, narrow = (clusters(cutlass.max(x - first, 0), self.ctas) for x, first in firsts)
        return wide + narrow

    def next(self, wide: Any, narrow: Any) -> tuple[Any, Any]:
        """Whether the next tile is narrow, and its index in the order, if the next ones of this CTA
        are the `wide`-th and the `narrow`-th of all."""
        order, whole = self.order, self.wide
        due = narrow // cutlass.max(order.narrow, 1) <= wide // order.tiles_n  # their rows of tiles
        there = narrow < order.strips * order.narrow
        is_narrow = there & (due | (wide >= whole))
        return is_narrow, select(is_narrow, whole + narrow, wide)

    @cute.jit
    def announce(self, announced: cutlass.Constexpr[AnnouncedTiles]) -> None:
        """Look up this CTA's tiles and announce each. One warp calls it."""
        state = announced.writer()
        wide, narrow = Int32(self.cta), Int32(self.first_narrow)
        for _ in cutlass.range(self.start, self.end, self.step, unroll=1):
            is_narrow, index = self.next(wide, narrow)
            announced.put(self.order.tile(index), state)
            wide += select(is_narrow, 0, self.ctas)
            narrow += select(is_narrow, self.ctas, 0)
            state.advance()
