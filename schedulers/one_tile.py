"""One tile per CTA, in grid order: x walks down M, y along N."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32, cute


class WorkTile(NamedTuple):
    """Which tile of C; in tiles, not elements."""

    m: Int32
    n: Int32


def place_in_cluster(size_m: int, size_n: int) -> tuple[Int32, Int32]:
    """(m, n) of this CTA in a cluster of (size_m, size_n); its rank is m + n * size_m.

    NOTE: from the rank, which is one register to read. A CTA's index in each mode of its cluster is
    none, and costs divisions where every cycle shows: before the first load, after the last MMA.
    """
    if size_m * size_n == 1:
        return Int32(0), Int32(0)
    rank = cute.arch.block_idx_in_cluster()
    if size_n == 1:
        return rank, Int32(0)
    if size_m == 1:
        return Int32(0), rank
    return rank % size_m, rank // size_m


class OneTilePerCta:
    """The hardware hands out the tiles: a grid of them."""

    @staticmethod
    @cute.jit
    def grid(mC: cute.Tensor, tile: cute.Tile) -> tuple[Int32, Int32, int]:
        """The grid that covers mC (M, N) with `tile` (bM, bN)."""
        m, n = cute.ceil_div(mC.shape, tile)
        return m, n, 1

    @staticmethod
    @cute.jit
    def work_tile() -> WorkTile:
        m, n, _ = cute.arch.block_idx()
        return WorkTile(m, n)
