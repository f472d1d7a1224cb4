"""One round of tiles: one per cluster, in a number of columns or rows fixed at compile time.

There is nothing to order: a cluster's index is its tile, and neighbours share the operand whose
loads dominate: with few columns A, of which they load the same rows; with few rows B. The raster's
divisions took as long before the first load, and again after the last MMA, as the store of the
tile: at M = 128 and N = K = 8192, 0.4 us of 39 (docs/facts/gemm.md#tile-s-place-cta).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Int32, cute

from cutex.device.work_tile import WorkTile, place_in_cluster
from cutex.schedulers.order import TileCounts
from cutex.schedulers.raster import clusters


class OneStep(NamedTuple):
    """The walk of a CTA that has one tile, with the interface of StaticWalk."""

    tile: WorkTile
    start: int = 0
    end: int = 1
    step: int = 1

    @property
    def split(self) -> Int32 | int:
        return self.tile.split

    def tile_at(self, index: Int32 | int) -> WorkTile:
        return self.tile


@dataclass(frozen=True)
class OneRound:
    """A grid of clusters with one tile each: `columns` of them along N, or `rows` of them along M.

    With `split_k` > 1 a cluster has as many layers of them along z, which share the K of its tiles.
    """

    cluster: tuple[int, int]  # CTAs along M and N
    columns: int
    rows: int = 0
    split_k: int = 1

    def grid(self, counts: TileCounts) -> tuple[int, int, Int32]:
        across, down = self.cluster
        side = 1 if self.rows else 0
        along = clusters((counts.m, counts.n)[side], self.cluster[side])
        return across, down, along * ((self.rows or self.columns) * self.split_k)

    def walk(self, counts: TileCounts) -> OneStep:
        m, n = place_in_cluster(*self.cluster, self.split_k)
        _, _, index = cute.arch.block_idx()
        split: Int32 | int = 0
        if self.split_k > 1:
            index, split = index // self.split_k, index % self.split_k
        few = self.rows or self.columns
        place: Int32 | int = 0
        if few > 1:
            index, place = index // few, index % few
        row, column = (place, index) if self.rows else (index, place)
        across, down = self.cluster
        return OneStep(WorkTile(row * across + m, column * down + n, split=split))
