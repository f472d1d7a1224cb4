"""One CTA per SM, which walks its share of the tiles: static, in equal steps.

Cluster c of G takes the indices c, c + G, c + 2 G, ... of the raster order, so at any time the grid
works on neighbours in that order. All roles of a CTA walk alike and need not talk about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from cutex.schedulers.one_tile import WorkTile, place_in_cluster
from cutex.schedulers.raster import Raster, clusters


@dataclass(frozen=True)
class Walk:
    """The indices `first`, `first + step`, ... below `end`, and the tile of this CTA at each.

    Where tiles are split along K, `share` says which part of it is this CTA's."""

    raster: Raster
    cluster: tuple[int, int]  # CTAs along M and N
    clusters_m: Int32
    clusters_n: Int32
    first: Int32
    end: Int32
    step: Int32
    share: Int32

    @cute.jit
    def tile(self, index: Int32) -> WorkTile:
        m, n = self.raster.cluster(index, self.clusters_m, self.clusters_n)
        if cutlass.const_expr(self.cluster == (1, 1)):
            return WorkTile(m, n)
        rank_m, rank_n = place_in_cluster(*self.cluster)
        return WorkTile(m * self.cluster[0] + rank_m, n * self.cluster[1] + rank_n)


class BatchTile(NamedTuple):
    """A tile of one entry of a batch."""

    m: Int32
    n: Int32
    entry: Int32


@dataclass(frozen=True)
class BatchWalk(Walk):
    """One entry of a batch after the other, each in raster order."""

    @cute.jit
    def tile(self, index: Int32) -> BatchTile:
        per_entry = self.clusters_m * self.clusters_n
        entry = index // per_entry
        tile = Walk.tile(self, index - entry * per_entry)
        return BatchTile(tile.m, tile.n, entry)


@dataclass(frozen=True)
class StaticPersistent:
    """How a grid of clusters (x along M, y along N, z counts them) walks the tiles of C, which is
    (M, N) or, with a batch, (M, N, L).

    With `split_k` > 1 a cluster is as many CTAs deep along z, which share the K of one tile; the
    grid then covers all tiles at once.
    """

    raster: Raster
    tile: tuple[int, int]
    cluster: tuple[int, int]
    num_ctas: int  # that run at one time
    split_k: int = 1

    def counts(self, mC: cute.Tensor) -> tuple[Int32, Int32]:
        """Clusters along M and N that cover one matrix of mC."""
        tiles = cute.ceil_div(mC.shape[:2], self.tile)
        return tuple(clusters(t, c) for t, c in zip(tiles, self.cluster, strict=True))

    def total(self, mC: cute.Tensor) -> Int32:
        """Clusters that cover all of mC."""
        clusters_m, clusters_n = self.counts(mC)
        total = clusters_m * clusters_n
        return total * cute.size(mC, mode=[2]) if cute.rank(mC) == 3 else total

    def grid(self, mC: cute.Tensor) -> tuple[int, int, Int32]:
        total = self.total(mC)
        across, down = self.cluster
        if self.split_k > 1:
            return across, down, total * self.split_k
        at_once = max(1, self.num_ctas // (across * down))
        return across, down, cutlass.min(at_once, total)

    def walk(self, mC: cute.Tensor) -> Walk:
        """Of the cluster that this CTA belongs to."""
        clusters_m, clusters_n = self.counts(mC)
        _, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        share = first % self.split_k
        first, step, end = first // self.split_k, step // self.split_k, self.total(mC)
        walk = BatchWalk if cute.rank(mC) == 3 else Walk
        return walk(self.raster, self.cluster, clusters_m, clusters_n, first, end, step, share)
