"""Raster orders of tiles: pure bijections from an index to a tile.

The CTAs that run at one time hold consecutive indices, and the parts of A and B that they share
come from L2. Rows of tiles one after the other would share one row of A and all of B; a block that
is as high as it is wide shares the most. So the tiles are cut into bands, `group` clusters across;
within a band the order goes across first, then one step along. Every second band runs backwards,
and so begins with the operand that the band before has just used.

Plain operators only: Python ints run it, and the same code traces in the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32

from cutex.device.work_tile import WorkTile
from cutex.schedulers.order import Index, TileCounts

ALONG = ("m", "n")


@dataclass(frozen=True)
class Raster:
    """Bands of `group` clusters of rows ("m") or columns ("n"), walked along the other side."""

    group: int = 8
    along: str = "m"  # the side along which a band is `group` clusters wide; it changes fastest
    serpentine: bool = True

    def cluster(self, index: Index, clusters_m: Index, clusters_n: Index) -> tuple[Index, Index]:
        """The (m, n) of cluster `index` out of clusters_m * clusters_n."""
        across, length = (clusters_m, clusters_n) if self.along == "m" else (clusters_n, clusters_m)
        band = index // (self.group * length)
        place = index - band * (self.group * length)
        width = cutlass.min(self.group, across - band * self.group)  # the last band may be narrower
        step = place // width
        fast = band * self.group + place - step * width
        slow = step
        if self.serpentine:
            slow = step + (band & 1) * (length - 1 - 2 * step)
        return (fast, slow) if self.along == "m" else (slow, fast)


@dataclass(frozen=True)
class RasterOrder:
    """The tiles of a matrix in raster order, or of a batch of matrices, one after the other.

    An index counts clusters of cluster_m x cluster_n CTAs, each with a tile of its own.
    """

    raster: Raster
    clusters_m: Int32 | int
    clusters_n: Int32 | int
    cluster_m: int = 1
    cluster_n: int = 1
    batch: Int32 | int | None = None  # matrices; None: there is no batch

    @staticmethod
    def of(raster: Raster, counts: TileCounts, cluster: tuple[int, int] = (1, 1)) -> RasterOrder:
        """The order of clusters of CTAs that cover `counts` tiles."""
        m, n = clusters(counts.m, cluster[0]), clusters(counts.n, cluster[1])
        return RasterOrder(raster, m, n, *cluster, counts.batch)

    @property
    def total(self) -> Int32 | int:
        """The number of clusters."""
        return TileCounts(self.clusters_m, self.clusters_n, self.batch).total

    def tile(self, index: Int32 | int) -> WorkTile:
        """The tile of the first CTA of cluster `index`; its CTA (m, n) has the tile m rows below
        and n columns to the right."""
        batch: Int32 | int = 0
        if self.batch is not None:
            clusters = self.clusters_m * self.clusters_n
            batch = index // clusters
            index = index - batch * clusters
        m, n = self.raster.cluster(index, self.clusters_m, self.clusters_n)
        return WorkTile(m * self.cluster_m, n * self.cluster_n, batch=batch)


def clusters(tiles: Index, cluster: int) -> Index:
    """The number of clusters of `cluster` tiles that cover `tiles`; the last may extend over the
    edge."""
    return (tiles + (cluster - 1)) // cluster
