"""One round of tiles: one for each cluster, in a number of columns that the kernel is made for.

There is nothing to order: a cluster's index is its tile, and neighbours have the same rows. The
raster's divisions took as long before the first load, and again after the last MMA, as the store of
the tile: at M = 128 and N = K = 8192 0.4 us of 39 (docs/facts.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Int32, cute

from cutex.device.work_tile import WorkTile, place_in_cluster
from cutex.schedulers.raster import clusters


class OneStep(NamedTuple):
    """The walk of a CTA that has one tile, to be followed like a StaticWalk."""

    tile: WorkTile
    start: int = 0
    end: int = 1
    step: int = 1
    split: int = 0

    def tile_at(self, index: Int32 | int) -> WorkTile:
        return self.tile


@dataclass(frozen=True)
class OneRound:
    """A grid of clusters, `columns` of them along N."""

    tile_m: int
    cluster: tuple[int, int]  # CTAs along M and N
    columns: int

    def grid(self, mC: cute.Tensor) -> tuple[int, int, Int32]:
        across, down = self.cluster
        rows = clusters(cute.ceil_div(mC.shape[0], self.tile_m), across)
        return across, down, rows if self.columns == 1 else rows * self.columns

    def walk(self, mC: cute.Tensor) -> OneStep:
        m, n = place_in_cluster(*self.cluster)
        _, _, cluster = cute.arch.block_idx()
        if self.columns > 1:
            n = n + cluster % self.columns * self.cluster[1]
            cluster = cluster // self.columns
        return OneStep(WorkTile(cluster * self.cluster[0] + m, n))
