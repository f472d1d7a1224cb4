"""Tiles that are equally wide within a group, packed into rounds.

Clusters take equal steps through the tiles of all groups, and those of some groups are wider. So
wider ones come first, and where the last round would be short, a few groups are divided into more
tiles than they need, narrower ones. Both cost nothing but time before the first tile, and with few
rounds tell: of 16 tiles of columns and 8 groups of some 650 rows the last of 66 clusters ends 5 %
earlier (docs/facts/grouped.md#grouped-packed).

A group's tiles are of two widths, a step apart, so that together they are as wide as its rows: its
first tiles are the wider ones.

    order    of each place in the tables: the group that has it,      filled in with the tables of
             the width of its first tile, and how many are as wide    groups (ragged.py)
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.work_tile import WorkTile
from cutex.schedulers.level import LevelOrder, LevelTiles, Widths
from cutex.schedulers.order import TileCounts, select
from cutex.schedulers.ragged import WARP, Only, RowGroups, group_edges, inclusive_scan
from cutex.schedulers.raster import RasterOrder, clusters

# a word of `order` is a group, a width times GROUPS, and a number of tiles times both
GROUPS, WIDTHS, MOST_WIDE = 1024, 256, 2**13
SORTED = 4  # lanes' groups, up to which groups are sorted
MORE = 8  # tiles fewer than which there are more than needed
COST = 6  # rows' worth of time of a tile, beside its products
WORTH = 64  # of the time, a part in so many is worth more tiles
FINE = 16  # parts of a row that times are counted in


@dataclass(frozen=True)
class Packing:
    """The numbers of tiles among which is chosen: `tiles` of all groups together, and up to MORE
    more.

    Plain operators only: Python ints run it, and the same code traces in the DSL.
    """

    rows: Any  # of all groups
    tiles: Any  # that hold them
    across: Any  # clusters of tiles of the columns
    count: Any  # clusters at one time

    def time(self, more: Any) -> Any:
        """The time that all take with so many more, as if all were as wide."""
        tiles = cutlass.max(self.tiles + more, 1)
        rounds = clusters(tiles * self.across, self.count)
        return rounds * (cutlass.min(self.rows, 1 << 26) * FINE // tiles + COST * FINE)

    def worth(self, more: Any) -> Any:
        """Whether so many more take enough less time."""
        least, plain = self.time(more), self.time(0)
        return least + plain // WORTH < plain


@dataclass(frozen=True)
class LevelPlan:
    """Which group has which place, and the widths of its tiles, in smem, or in a list.

    Plain operators only, but for `allocate`: Python ints run it, and the same code traces in the
    DSL.
    """

    order: Any  # (most) Int32
    widths: Widths

    @staticmethod
    def allocate(smem: SmemAllocator, most: int, widths: Widths) -> LevelPlan:
        order = smem.allocate_tensor(Int32, cute.make_layout(most), byte_alignment=16)
        return LevelPlan(order, widths)

    def word(self, group: Any, rows: Any, number: Any) -> Any:
        """The word of a group whose rows are divided into so many tiles, at least one."""
        wide = select(number < MOST_WIDE, self.widths.wide(rows, number), 0)
        return (wide * WIDTHS + self.widths.shared(rows, number)) * GROUPS + group

    def group(self, place: Any) -> Any:
        """The group that has a place."""
        return self.order[place] % GROUPS

    def width(self, place: Any, tile: Any) -> Any:
        """The width of a tile, by its number within the group that has a place."""
        widest, wide = self._widths(place)
        narrow = (wide > 0) & (tile >= wide)
        return widest - select(narrow, self.widths.step, 0)

    def first(self, place: Any, tile: Any) -> Any:
        """The rows of the group before that tile."""
        widest, wide = self._widths(place)
        narrow = select(wide > 0, cutlass.max(tile - wide, 0), 0)
        return tile * widest - narrow * self.widths.step

    def _widths(self, place: Any) -> tuple[Any, Any]:
        """The width of a group's first tile, and how many are as wide; 0: all."""
        above = self.order[place] // GROUPS
        return above % WIDTHS, above // WIDTHS


@dataclass(frozen=True)
class PackedOrder(LevelOrder):
    """A LevelOrder of groups by their places, a tile's `group`; in every second round of `count`
    clusters the last comes first, as tiles become narrower."""

    count: Any = 1

    def tile(self, index: Any) -> WorkTile:
        before = index // self.count * self.count
        last = before + cutlass.min(self.total - before, self.count) - 1
        backwards = before // self.count % 2 == 1
        return LevelOrder.tile(self, select(backwards, last - (index - before), index))

    def order_of(self, group: Any) -> RasterOrder:
        cluster = self.cluster_m, self.cluster_n
        starts, across = self.groups.starts, clusters(self.tiles_n, self.cluster_m)
        number = (starts[group + 1] - starts[group]) // cutlass.max(across, 1)
        return RasterOrder.of(self.raster, TileCounts(self.tiles_n, number), cluster)


@dataclass(frozen=True)
class PackedTiles(LevelTiles):
    """A scheduler like LevelTiles, whose tables are by places."""

    plan: Any = None  # LevelPlan

    def order_of(self, tiles_m: Int32 | int) -> PackedOrder:
        place = self.raster, self.groups, self.tile[1], tiles_m, *self.cluster
        _, _, count = cute.arch.grid_dim()
        return PackedOrder(*place, self.widths, count)

    @cute.jit
    def fill(
        self,
        edges: cute.Tensor,
        rows: Int32,
        columns: Int32 | int,
        padded: cutlass.Constexpr[bool] = False,
        only: cutlass.Constexpr[Only | None] = None,
    ) -> None:
        """Fill in the tables, and make the plan; as RaggedTiles.fill."""
        groups, lane, count = self.groups, cute.arch.lane_idx(), cute.size(edges)
        across = clusters(clusters(columns, self.tile[0]), self.cluster[0])
        each = groups.most // WARP  # groups of a lane
        begin, end, tiles, place = (cute.make_rmem_tensor(each, Int32) for _ in range(4))
        wasted, known, needed = Int32(0), Int32(0), Int32(0)
        for i in cutlass.range_constexpr(each):
            begin[i], end[i] = group_edges(edges, i * WARP + lane, count, rows, padded)
            tiles[i] = self.widths.tiles(end[i] - begin[i])
            place[i] = i * WARP + lane
            needed, known = needed + tiles[i], known + end[i] - begin[i]
            if cutlass.const_expr(only is not None):
                wasted = wasted + only.wasted(end[i] - begin[i])
        known, needed = (cute.arch.warp_reduction(x, operator.add) for x in (known, needed))
        if cutlass.const_expr(each <= SORTED):
            _, _, at_once = cute.arch.grid_dim()
            self.divide(begin, end, tiles, Packing(known, needed, across, at_once))
            self.sort(begin, end, tiles, place)
        for i in cutlass.range_constexpr(each):
            groups.begins[place[i]], groups.ends[place[i]] = begin[i], end[i]
            groups.starts[place[i]] = tiles[i] * across
            word = self.plan.word(i * WARP + lane, end[i] - begin[i], cutlass.max(tiles[i], 1))
            self.plan.order[place[i]] = word
        cute.arch.sync_warp()
        total = Int32(0)
        for i in cutlass.range_constexpr(each):
            number = groups.starts[i * WARP + lane]
            upto = inclusive_scan(number, lane)
            groups.starts[i * WARP + lane] = total + upto - number
            total += cute.arch.shuffle_sync(upto, WARP - 1)
        if cutlass.const_expr(only is not None):
            wasted = cute.arch.warp_reduction(wasted, operator.add)
            total = only.tiles(total, wasted, known)
        if lane == 0:
            groups.starts[groups.most] = total

    @cute.jit
    def divide(
        self, begin: cute.Tensor, end: cute.Tensor, tiles: cute.Tensor, packing: Packing
    ) -> None:
        """Add to the `tiles` of this lane's groups as many as `packing` says that all groups should
        have more, each to the group that has the widest."""
        lane = cute.arch.lane_idx()
        more = cutlass.min(lane, MORE - 1)
        time = Int32(packing.time(more)) // FINE * WARP + more
        more = cute.arch.warp_reduction(time, cutlass.min) % WARP
        more = select(packing.worth(more), more, 0)
        for _ in cutlass.range(0, more, unroll=1):
            widest = Int32(0)
            for i in cutlass.range_constexpr(cute.size(tiles)):
                width = self.widths.shared(end[i] - begin[i], cutlass.max(tiles[i], 1))
                mine = select(tiles[i] > 0, width, 0) * GROUPS + i * WARP + lane
                widest = cutlass.max(widest, mine)
            widest = cute.arch.warp_reduction(widest, cutlass.max)
            for i in cutlass.range_constexpr(cute.size(tiles)):
                tiles[i] = tiles[i] + select(widest % GROUPS == i * WARP + lane, 1, 0)

    @cute.jit
    def sort(
        self, begin: cute.Tensor, end: cute.Tensor, tiles: cute.Tensor, place: cute.Tensor
    ) -> None:
        """Find the places of this lane's groups, those with the widest tiles first: each width in
        turn, lanes that have it find out how many before them do."""
        lower = (Int32(1) << cute.arch.lane_idx()) - 1
        first = Int32(0)
        for number in cutlass.range(0, self.widths.most // self.widths.step, unroll=1):
            due = self.widths.most - number * self.widths.step
            for i in cutlass.range_constexpr(cute.size(tiles)):
                width = self.widths.shared(end[i] - begin[i], cutlass.max(tiles[i], 1))
                lanes = Int32(cute.arch.vote_ballot_sync(width == due))
                here = first + Int32(cute.arch.popc(lanes & lower))
                place[i] = select(width == due, here, place[i])
                first += Int32(cute.arch.popc(lanes))


def packed(
    tiles: PackedTiles, edges: Sequence[int], rows: int, columns: int, count: int
) -> PackedOrder:
    """The order of `tiles` on the host, with the tables of `fill` as lists, for `count` clusters at
    one time."""
    most, widths = tiles.groups.most, tiles.widths
    bounds = [group_edges(edges, group, len(edges), rows) for group in range(most)]
    across = clusters(clusters(columns, tiles.tile[0]), tiles.cluster[0])
    lengths = [int(end - begin) for begin, end in bounds]
    numbers = [int(widths.tiles(length)) for length in lengths]

    def width(group: int) -> int:
        return int(widths.shared(lengths[group], max(numbers[group], 1)))

    places = list(range(most))
    if most <= SORTED * WARP:
        packing = Packing(sum(lengths), sum(numbers), across, count)
        more = min(range(MORE), key=lambda x: (packing.time(x) // FINE, x))
        for _ in range(more if packing.worth(more) else 0):
            numbers[max(range(most), key=lambda g: (width(g) * bool(numbers[g]), g))] += 1
        places.sort(key=lambda g: (-width(g), g))
    begins, ends = ([int(bounds[g][i]) for g in places] for i in range(2))
    starts = [0, *itertools.accumulate(numbers[g] * across for g in places)]
    groups = RowGroups(begins, ends, starts, most)
    place = tiles.raster, groups, tiles.tile[1], clusters(columns, tiles.tile[0]), *tiles.cluster
    return PackedOrder(*place, widths, count)
