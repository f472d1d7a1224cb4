"""Tiles of ragged groups of rows, such as the tokens of experts: as many as each group needs.

The rows of a list belong to consecutive groups, whose ends only the device knows. Each tile has
rows of one group. Groups have different numbers of tiles, but all tiles have the same width and the
same work, so CTAs that take equal steps through all of them share the work evenly, however uneven
the groups are: no two differ by more than one tile.

    edges    ends (torch's `offs`) or counts      read by one warp of each CTA
    tables   begins, ends, starts                 in its smem, where every role looks a tile up

Ends that no grouping has are taken for the nearest that one has: each is clamped to the rows there
are, and a group that would end before it begins is empty.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.work_tile import WorkTile
from cutex.schedulers.order import GroupedOrder, TileCounts, select
from cutex.schedulers.persistent import StaticWalk
from cutex.schedulers.raster import Raster, RasterOrder, clusters

WARP = 32
CHUNK_ROWS = 128  # rows of a group whose scale factors are together (atoms/scale_factors.py)
FILLED = 24  # groups fill their tiles if at most one row in so many is computed in vain


@dataclass(frozen=True)
class Only:
    """Which groups a kernel computes, of two kernels that are launched for the same ones: those
    that together fill tiles of `unit` rows, if `full`, or those that do not.

    Plain operators only: Python ints run it, and the same code traces in the DSL.
    """

    unit: int
    full: bool

    def wasted(self, rows: Any) -> Any:
        """The rows of tiles that a group of `rows` rows leaves empty."""
        return clusters(rows, self.unit) * self.unit - rows

    def tiles(self, total: Any, wasted: Any, rows: Any) -> Any:
        """`total` tiles, or none: of groups of `rows` rows in all, which waste so many."""
        some, none = (total, 0) if self.full else (0, total)
        return select(wasted * FILLED <= rows, some, none)


@dataclass(frozen=True)
class RowGroups:
    """Groups of rows, in lists or in tensors of Int32: of each the first row, the row after the
    last, and the number of its first cluster of tiles; after them, that of all."""

    begins: Any  # (most)
    ends: Any  # (most)
    starts: Any  # (most + 1)
    most: int  # entries; those past the last group's are empty groups
    chunks: Any = None  # (most): chunks of CHUNK_ROWS rows of one group, before each group's first

    @staticmethod
    def allocate(smem: SmemAllocator, most: int, with_chunks: bool = False) -> RowGroups:
        """Tables in smem for `most` groups, a multiple of 32; `RaggedTiles.fill` fills them in."""
        begins, ends, starts = (
            smem.allocate_tensor(Int32, cute.make_layout(size), byte_alignment=16)
            for size in (most, most, most + 1)
        )
        chunks = None
        if with_chunks:
            chunks = smem.allocate_tensor(Int32, cute.make_layout(most), byte_alignment=16)
        return RowGroups(begins, ends, starts, most, chunks)

    def rows(self, group: Any) -> Any:
        """The number of rows of a group."""
        return self.ends[group] - self.begins[group]

    def steps(self, group: Any, size: int) -> Any:
        """The steps of `size` rows that cover a group; at least one, which an empty group begins
        and ends after."""
        return cutlass.max(clusters(self.rows(group), size), 1)


@dataclass(frozen=True)
class RaggedOrder:
    """The tiles of all groups, one group after the other, each in raster order. An index counts
    clusters of cluster_m x cluster_n CTAs; m counts a group's own tiles.

    Plain operators only: Python ints and lists run it, and the same code traces in the DSL.
    """

    raster: Raster
    groups: RowGroups
    tile_rows: int
    tiles_n: Int32 | int  # tiles that cover the columns
    cluster_m: int = 1
    cluster_n: int = 1

    @property
    def total(self) -> Any:
        return self.groups.starts[self.groups.most]

    def tile(self, index: Any) -> WorkTile:
        return GroupedOrder(self.groups.starts, self.groups.most, self.order_of).tile(index)

    def order_of(self, group: Any) -> RasterOrder:
        """The order of the tiles of a group."""
        cluster = self.cluster_m, self.cluster_n
        return RasterOrder.of(self.raster, self.counts(self.groups.rows(group)), cluster)

    def counts(self, rows: Any) -> TileCounts:
        """The tiles that cover this many rows."""
        return TileCounts(clusters(rows, self.tile_rows), self.tiles_n)

    def clusters_of(self, rows: Any) -> Any:
        """The clusters of tiles that cover this many rows."""
        return RasterOrder.of(
            self.raster, self.counts(rows), (self.cluster_m, self.cluster_n)
        ).total


@dataclass(frozen=True)
class RaggedTiles:
    """A scheduler of persistent clusters (x along M, y along N, z counts them), which take equal
    steps through the tiles of all groups."""

    raster: Raster
    tile: tuple[int, int]  # (bM, bN)
    cluster: tuple[int, int]
    groups: RowGroups

    def order(self, columns: Int32 | int) -> RaggedOrder:
        """The order of tiles that cover `columns`."""
        tiles_n = clusters(columns, self.tile[1])
        return RaggedOrder(self.raster, self.groups, self.tile[0], tiles_n, *self.cluster)

    def walk(self, counts: TileCounts) -> StaticWalk:
        """The walk of this CTA's cluster; of `counts`, only those along N are known so far."""
        order = RaggedOrder(self.raster, self.groups, self.tile[0], counts.n, *self.cluster)
        _, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        return StaticWalk(order, first, order.total, step, Int32(0))

    @cute.jit
    def fill(
        self,
        edges: cute.Tensor,
        rows: Int32,
        columns: Int32 | int,
        padded: cutlass.Constexpr[bool] = False,
        only: cutlass.Constexpr[Only | None] = None,
    ) -> None:
        """Fill in the tables of the groups of `rows` rows. One warp calls it; a barrier of the CTA
        must follow.

        edges: (groups) Int32, where each group ends; or, if they are `padded` to equal parts of all
        rows, how many rows each has. only: which groups have tiles at all; None: any.
        """
        groups, order = self.groups, self.order(columns)
        begins, ends, starts = groups.begins, groups.ends, groups.starts
        lane, count = cute.arch.lane_idx(), cute.size(edges)
        total, chunks = Int32(0), Int32(0)
        wasted, known = Int32(0), Int32(0)  # by groups of this lane
        for first in cutlass.range_constexpr(0, groups.most, WARP):
            group = first + lane
            begin, end = group_edges(edges, group, count, rows, padded)
            number = order.clusters_of(end - begin)
            upto = inclusive_scan(number, lane)
            begins[group], ends[group] = begin, end
            starts[group] = total + upto - number
            total += cute.arch.shuffle_sync(upto, WARP - 1)
            if cutlass.const_expr(only is not None):
                wasted, known = wasted + only.wasted(end - begin), known + end - begin
            if cutlass.const_expr(groups.chunks is not None):
                number = clusters(end - begin, CHUNK_ROWS)
                upto = inclusive_scan(number, lane)
                groups.chunks[group] = chunks + upto - number
                chunks += cute.arch.shuffle_sync(upto, WARP - 1)
        if cutlass.const_expr(only is not None):
            wasted, known = (cute.arch.warp_reduction(x, operator.add) for x in (wasted, known))
            total = only.tiles(total, wasted, known)
        if lane == 0:
            starts[groups.most] = total


def group_edges(
    edges: Any, group: Any, count: Any, rows: Any, padded: bool = False
) -> tuple[Any, Any]:
    """Where the rows of `group`, of `count`, begin and end, out of `rows`; both are equal for an
    empty group, and for one past the last.

    Plain operators only: Python ints and lists run it, and the same code traces in the DSL.
    """
    last = cutlass.min(group, count - 1)
    edge = edges[last]
    if padded:
        pitch = rows // count
        begin = last * pitch
        end = begin + clamp(edge, pitch)
    else:
        before = edges[cutlass.max(last - 1, 0)]
        begin = select(last > 0, clamp(before, rows), 0)
        end = cutlass.max(clamp(edge, rows), begin)
    return begin, select(group < count, end, begin)


def clamp(x: Any, most: Any) -> Any:
    """x, clamped to [0, most]."""
    return cutlass.min(cutlass.max(x, 0), most)


@cute.jit
def inclusive_scan(x: Int32, lane: Int32) -> Int32:
    """The sum of x over the lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        other = cute.arch.shuffle_sync_up(x, distance)
        x = x + select(lane >= distance, other, 0)
    return x


def filled(
    tiles: RaggedTiles,
    edges: Sequence[int],
    rows: int,
    columns: int,
    padded: bool = False,
    only: Only | None = None,
) -> RaggedOrder:
    """The order of `tiles` on the host, with the tables of `fill` as lists."""
    most = tiles.groups.most
    bounds = [group_edges(edges, group, len(edges), rows, padded) for group in range(most)]
    order, starts = tiles.order(columns), [0]
    for begin, end in bounds:
        starts.append(starts[-1] + order.clusters_of(end - begin))
    begins, ends = ([int(x[i]) for x in bounds] for i in range(2))
    if only is not None:
        counts = [end - begin for begin, end in zip(begins, ends, strict=True)]
        starts[-1] = only.tiles(starts[-1], sum(map(only.wasted, counts)), sum(counts))
    groups = RowGroups(begins, ends, starts, most)
    return replace(tiles, groups=groups).order(columns)
