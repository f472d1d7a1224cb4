"""One tile per CTA, in grid order: x walks down M, y along N."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32, cute


class WorkTile(NamedTuple):
    """Which tile of C; in tiles, not elements."""

    m: Int32
    n: Int32


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
