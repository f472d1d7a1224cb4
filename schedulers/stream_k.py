"""Stream-K: clusters take equal shares of all steps along K, not whole tiles.

Where the tiles do not fill the GPU in whole rounds, SMs are idle in the last one. So the K tiles of
all tiles are put in one row, tile after tile, and the row is cut into one share for each cluster,
equal to within one step (Osama, Merrill, Cecka, Garland and Owens, "Stream-K", PPoPP 2023). A share
is the rear part of one tile, whole tiles, and the front part of another; or a part of one.

A cluster works on its share from front to rear. The cluster that has the front of a tile finishes
it: it is the last to work on it, so the sums of the others are mostly ready when it needs them. The
others write their sums to the workspace, each at most once: only a share that begins within a tile
writes any.

Plain operators only: Python ints run it, and the same code traces in the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from cutex.device.work_tile import WorkTile, place_in_cluster
from cutex.schedulers.order import Index, TileCounts, select
from cutex.schedulers.persistent import StaticPersistent
from cutex.schedulers.raster import RasterOrder

LEAST = 4  # K tiles of a part, at least: fewer cost more than they save
FINISH = 4  # the time of a tile's end, adding others' sums and the store, in K tiles


class Segment(NamedTuple):
    """K tiles `first` to `first` + `count` of the tile that the order has at `index`."""

    index: Any
    first: Any
    count: Any


class Step(NamedTuple):
    """A position in the row of all steps: before K tile `k_tile` of a tile, not after its last."""

    tile: Any
    k_tile: Any


@dataclass(frozen=True)
class Shares:
    """The row of all steps, cut into shares."""

    tiles: Int32 | int
    k_tiles: Int32 | int  # of a tile, at least 1
    count: int

    def cut(self, number: Index) -> Step:
        """The step at which share `number` begins, and the one before it ends.

        A tile is counted as FINISH steps longer than it is, at its front. A cut that would leave
        fewer than LEAST K tiles of it on one side is moved to where the tile begins or ends.
        """
        length = self.k_tiles + FINISH
        steps = self.tiles * length
        each = steps // self.count
        at = number * each + cutlass.min(number, steps - each * self.count)
        tile = at // length
        k_tile = at - tile * length - FINISH
        at_front, at_end = k_tile < LEAST, self.k_tiles - k_tile < LEAST
        inside = select(at_end, 0, k_tile)
        return Step(tile + select(at_front, 0, select(at_end, 1, 0)), select(at_front, 0, inside))


@dataclass(frozen=True)
class StreamedWalk:
    """The segments of cluster `cluster`: whole tiles in the first `rounds`, then its share of the
    rest."""

    order: RasterOrder
    shares: Shares
    rounds: Int32 | int
    cluster: Int32 | int

    @property
    def share(self) -> Int32 | int:
        """The number of this cluster's share.

        NOTE: clusters wait for sums of later shares only. Shares go to clusters in reverse, so they
        wait for clusters that were launched before them: all of these run, or have run, and the
        grid needs no cooperative launch.
        """
        return self.shares.count - 1 - self.cluster

    @property
    def begin(self) -> Step:
        return self.shares.cut(self.share)

    @property
    def end(self) -> Step:
        return self.shares.cut(self.share + 1)

    @property
    def turns(self) -> Int32 | int:
        """The number of segments."""
        begin, end = self.begin, self.end
        return self.rounds + end.tile - begin.tile + select(end.k_tile > 0, 1, 0)

    def segment(self, turn: Index) -> Segment:
        begin, end, k_tiles = self.begin, self.end, self.shares.k_tiles
        streamed = turn - self.rounds  # negative: a whole tile of those before
        tile = begin.tile + streamed
        first = select(streamed == 0, begin.k_tile, 0)
        index = select(
            streamed < 0, turn * self.shares.count + self.cluster, self.first_streamed + tile
        )
        return Segment(index, first, select(tile == end.tile, end.k_tile, k_tiles) - first)

    @property
    def first_streamed(self) -> Int32 | int:
        """The index of the first tile that is split into shares."""
        return self.rounds * self.shares.count

    def tile(self, segment: Segment) -> WorkTile:
        """This CTA's tile."""
        tile = self.order.tile(segment.index)
        m, n = place_in_cluster(self.order.cluster_m, self.order.cluster_n)
        return tile._replace(m=tile.m + m, n=tile.n + n)


@dataclass(frozen=True)
class StreamedTiles(StaticPersistent):
    """A grid of clusters as of StaticPersistent; the tiles of the last `rounds` rounds are split
    along K, those before are taken whole, in equal steps."""

    rounds: int = 1

    @property
    def clusters(self) -> int:
        """The number of clusters that run at one time."""
        across, down = self.cluster
        return max(1, self.num_ctas // (across * down))

    def grid(self, counts: TileCounts) -> tuple[int, int, int]:
        return *self.cluster, self.clusters

    def streamed_walk(self, counts: TileCounts, num_k_tiles: Int32) -> StreamedWalk:
        """The walk of this CTA's cluster."""
        order = RasterOrder.of(self.raster, counts, self.cluster)
        _, _, cluster = cute.arch.block_idx()
        rounds = whole_rounds(order.total, self.clusters, self.rounds)
        shares = Shares(order.total - rounds * self.clusters, num_k_tiles, self.clusters)
        return StreamedWalk(order, shares, rounds, cluster)


def whole_rounds(tiles: Index, clusters: int, streamed: int) -> Index:
    """The number of rounds of whole tiles, before the last `streamed` rounds."""
    return cutlass.max((tiles + (clusters - 1)) // clusters - streamed, 0)
