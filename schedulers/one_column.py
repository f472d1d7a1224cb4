"""One column of tiles, one for each cluster: where all columns of C fit into one side by side.

There is nothing to order, so a CTA knows its tile from its index. The raster's divisions took as
long before the first load, and again after the last MMA, as the store of the tile: at M = 128 and
N = K = 8192 0.4 us of 39 (docs/facts.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Int32, cute

from cutex.schedulers.one_tile import WorkTile, place_in_cluster
from cutex.schedulers.raster import clusters


class OneStep(NamedTuple):
    """The walk of a CTA that has one tile."""

    tile_m: Int32
    tile_n: Int32
    first: int = 0
    end: int = 1
    step: int = 1
    share: int = 0

    def tile(self, index: Int32) -> WorkTile:
        return WorkTile(self.tile_m, self.tile_n)


@dataclass(frozen=True)
class OneColumn:
    tile_m: int
    cluster: tuple[int, int]  # CTAs along M and N

    def grid(self, mC: cute.Tensor) -> tuple[int, int, Int32]:
        across, down = self.cluster
        return across, down, clusters(cute.ceil_div(mC.shape[0], self.tile_m), across)

    def walk(self, mC: cute.Tensor) -> OneStep:
        m, n = place_in_cluster(*self.cluster)
        _, _, cluster = cute.arch.block_idx()
        return OneStep(cluster * self.cluster[0] + m, n)
