"""Tiles of ragged groups in rows that end with narrower ones, so that all clusters end together.

Tiles of one width leave part of a matrix's last columns empty, and clusters idle in the last round:
of 64 rows of 20 tiles, 66 clusters have 19 or 20. Here each row of tiles has some wide tiles and
some narrow ones, which the device chooses, as it alone knows how many rows there are. Clusters take
equal steps through the wide tiles of all groups. Those left out by the last of them begin the
narrow ones, and take up to a few each before all take equal steps through the rest.

A cluster takes a narrow tile when its wide ones come to the same rows, which L2 then still has, and
its neighbours take those beside it.

    plan     wide and narrow tiles of a row,              written by the warp that fills in the
             and how many narrow ones are taken first     tables, in smem, read by every role
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.work_tile import WorkTile, place_in_cluster
from cutex.schedulers.order import GroupedOrder, TileCounts, select
from cutex.schedulers.ragged import WARP, Only, RaggedOrder, RaggedTiles
from cutex.schedulers.raster import clusters

UNIT = 16  # columns, of which both widths are multiples
MOST_AHEAD = 4  # choices of narrow tiles that are taken first; a warp's lanes look at one each
COSTS = 4, 30  # columns' worth of time of a wide and of a narrow tile, beside its products
NEVER = 1 << 25  # later than any end, times WARP an Int32


@dataclass(frozen=True)
class Trim:
    """The tiles that cover the columns of a matrix, `wide` ones and then `narrow` ones, and how
    many narrow ones clusters with fewer wide ones take before others do.

    Plain operators only: Python ints run it, and the same code traces in the DSL.
    """

    widths: tuple[int, int]  # columns of a wide tile and of a narrow one
    wide: Any
    narrow: Any
    ahead: Any

    @staticmethod
    def choice(widths: tuple[int, int], columns: Any, number: Any) -> Trim:
        """Choice `number`, below WARP, for a matrix of `columns`; number 0 has no narrow tile."""
        wide, narrow = (width // UNIT for width in widths)
        few = number // MOST_AHEAD
        left = cutlass.max(clusters(columns, UNIT) - few * narrow, 0)
        return Trim(widths, clusters(left, wide), few, number - few * MOST_AHEAD)

    @property
    def tiles(self) -> Any:
        """The tiles of a row."""
        return self.wide + self.narrow

    def is_narrow(self, n: Any) -> Any:
        return n >= self.wide

    def first(self, n: Any) -> Any:
        """The first column of tile `n`."""
        wide, narrow = self.widths
        after = self.wide * wide + (n - self.wide) * narrow
        return select(self.is_narrow(n), after, n * wide)

    def ends(self, strips: Any, count: Any) -> Any:
        """When the last of `count` clusters has ended with `strips` rows of tiles, in columns; at
        most NEVER, and that without a wide tile."""
        late = strips * self.wide % count
        first, other = (Share.of(self, strips, count, x).time for x in (0, late))
        time = cutlass.min(cutlass.max(first, other), NEVER)
        return select(self.wide < 1, NEVER, time)


@dataclass(frozen=True)
class Share:
    """What one cluster computes of `strips` rows of tiles: wide tiles `cluster`, + `count`, ...; of
    the narrow ones number `narrow(0)`, ...

    Plain operators only: Python ints run it, and the same code traces in the DSL.
    """

    trim: Trim
    cluster: Any
    count: Any  # clusters
    others: Any  # clusters that the last wide tiles leave out: all, if those are a whole round
    place: Any  # among all clusters, of which the others come first
    wides: Any
    narrows: Any

    @staticmethod
    def of(trim: Trim, strips: Any, count: Any, cluster: Any) -> Share:
        total, few = strips * trim.wide, strips * trim.narrow
        late = total % count
        others = count - late
        place = select(cluster < late, others + cluster, cluster - late)
        wides = total // count + select(cluster < late, 1, 0)
        ahead = cutlass.min(clusters(cutlass.max(few - place, 0), others), trim.ahead)
        ahead = select(place < others, ahead, 0)
        rest = clusters(cutlass.max(few - trim.ahead * others - place, 0), count)
        return Share(trim, cluster, count, others, place, wides, ahead + rest)

    @property
    def tiles(self) -> Any:
        return self.wides + self.narrows

    @property
    def time(self) -> Any:
        """The time that the tiles take, in columns."""
        wide, narrow = (w + more for w, more in zip(self.trim.widths, COSTS, strict=True))
        return self.wides * wide + self.narrows * narrow

    def narrow(self, number: Any) -> Any:
        """The index of this cluster's narrow tile `number` among all narrow ones."""
        ahead = self.trim.ahead
        early = (self.place < self.others) & (number < ahead)
        number = number - select(self.place < self.others, ahead, 0)
        later = ahead * self.others + number * self.count
        return self.place + select(early, (number + ahead) * self.others, later)

    def next(self, wides: Any, narrows: Any) -> tuple[Any, Any]:
        """Whether this cluster's next tile is narrow, and its number among all such tiles,
        after so many wide and narrow ones."""
        trim, number = self.trim, self.narrow(narrows)
        wide = self.cluster + wides * self.count
        due = number // cutlass.max(trim.narrow, 1) <= wide // trim.wide  # their rows of tiles
        is_narrow = (narrows < self.narrows) & (due | (wides >= self.wides))
        return is_narrow, select(is_narrow, number, wide)


@dataclass(frozen=True)
class TrimPlan:
    """The Trim of a product, in smem."""

    widths: tuple[int, int]
    words: Any  # (3) Int32

    @staticmethod
    def allocate(smem: SmemAllocator, widths: tuple[int, int]) -> TrimPlan:
        return TrimPlan(widths, smem.allocate_tensor(Int32, cute.make_layout(3)))

    def read(self) -> Trim:
        return Trim(self.widths, *(self.words[i] for i in range(3)))


@dataclass(frozen=True)
class TrimmedOrder(RaggedOrder):
    """The wide tiles of all groups, one group after the other, and then their narrow ones, whose n
    follow those of the wide. The tables of groups count rows of clusters' tiles."""

    trim: Any = None  # Trim, once it is known

    @property
    def strips(self) -> Any:
        """The rows of tiles of all groups."""
        return self.groups.starts[self.groups.most]

    @property
    def total(self) -> Any:
        return self.strips * self.trim.tiles

    def clusters_of(self, rows: Any) -> Any:
        return clusters(rows, self.tile_rows * self.cluster_m)

    def tile(self, index: Any) -> WorkTile:
        whole = self.strips * self.trim.wide
        late = index >= whole
        return self.tile_of(late, index - select(late, whole, 0))

    def tile_of(self, narrow: Any, number: Any) -> WorkTile:
        """The first tile of cluster `number` of the narrow tiles, or of the wide."""
        across = cutlass.max(select(narrow, self.trim.narrow, self.trim.wide), 1)
        starts, most = self.groups.starts, self.groups.most
        group = GroupedOrder(starts, most, self.order_of).group(number // across)
        down = self.clusters_of(self.groups.rows(group))
        m, n = self.raster.cluster(number - starts[group] * across, down, across)
        return WorkTile(m * self.cluster_m, n + select(narrow, self.trim.wide, 0), group=group)


class Done(NamedTuple):
    """How many wide and narrow tiles of a cluster are done."""

    wides: Any
    narrows: Any

    def and_one(self, is_narrow: Any) -> Done:
        return Done(self.wides + select(is_narrow, 0, 1), self.narrows + select(is_narrow, 1, 0))


@dataclass(frozen=True)
class TrimmedWalk:
    """The tiles of a cluster, one after the other: each depends on what is done."""

    order: TrimmedOrder
    share: Share

    @property
    def tiles(self) -> Any:
        return self.share.tiles

    def next(self, done: Done) -> tuple[Any, WorkTile, Done]:
        """Whether the next tile is narrow, the tile of this CTA, and what is done after it."""
        is_narrow, number = self.share.next(*done)
        tile = self.order.tile_of(is_narrow, number)
        m, _ = place_in_cluster(self.order.cluster_m, 1)
        return is_narrow, tile._replace(m=tile.m + m), done.and_one(is_narrow)

    def skipped(self, done: Done) -> Done:
        """What is done after the next tile."""
        is_narrow, _ = self.share.next(*done)
        return done.and_one(is_narrow)


@dataclass(frozen=True)
class TrimmedTiles(RaggedTiles):
    """A scheduler as RaggedTiles, of clusters along M, whose tiles are those of a TrimPlan."""

    plan: Any = None  # TrimPlan

    def order(self, columns: Int32 | int) -> TrimmedOrder:
        """The order, as far as it is known before the plan is."""
        return TrimmedOrder(self.raster, self.groups, self.tile[0], 1, self.cluster[0])

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
        _, _, count = cute.arch.grid_dim()
        lane, strips = cute.arch.lane_idx(), self.groups.starts[self.groups.most]
        widths = self.plan.widths
        time = Int32(Trim.choice(widths, columns, lane).ends(strips, count))
        least = cute.arch.warp_reduction(time * WARP + lane, cutlass.min)
        best = Trim.choice(widths, columns, least % WARP)
        if lane == 0:
            words = self.plan.words
            words[0], words[1], words[2] = best.wide, best.narrow, best.ahead

    def walk(self, counts: TileCounts) -> Any:  # TrimmedWalk
        """The walk of this CTA's cluster, by the plan."""
        trim = self.plan.read()
        place = self.raster, self.groups, self.tile[0], trim.wide, self.cluster[0]
        order = TrimmedOrder(*place, trim=trim)
        _, _, cluster = cute.arch.block_idx()
        _, _, count = cute.arch.grid_dim()
        return TrimmedWalk(order, Share.of(trim, order.strips, count, cluster))
