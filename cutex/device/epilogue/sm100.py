"""An SM100 accumulator's rows on their way out, through the epilogue's operations.

A thread holds one row of a sub-tile, so its columns are neighbours: pieces load 16 bytes at a time,
and a gate finds what it multiplies in the next register. Then the sub-tile is rounded and leaves by
TMA as in stage 4, half as wide behind a gate; or element by element, to any strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms.tma import EVICT_FIRST, matrix, tile_stores
from cutex.device.atoms.tmem import LANES
from cutex.device.epilogue import epilogue_ops as fusion
from cutex.device.epilogue.sm90 import Fusion
from cutex.device.epilogue.stores import SubTiles, sub_tiles
from cutex.schedulers.one_tile import WorkTile
from cutex.schedulers.persistent import BatchTile


@dataclass(frozen=True)
class FusedTileOut:
    """A TileOut with pieces: one thread's row, a sub-tile of `columns` at a time."""

    parts: SubTiles
    target: Any  # TileStores, or out (M, N) for single elements
    fused: Fusion
    row: Int32  # of the product
    first_column: Int32  # of the tile, in sub-tiles
    columns: int
    batch: Int32 | int

    @cute.jit
    def store(self, tTR_rAcc: cute.Tensor, turn: cutlass.Constexpr[int], part: Int32) -> None:
        """Sub-tile `part`, as the `turn`-th of this tile to leave."""
        column_tile = self.first_column + part
        x = self.fragment(tTR_rAcc, column_tile * self.columns)
        if cutlass.const_expr(isinstance(self.target, cute.Tensor)):
            self.fused.store_elements(x, self.target)
        else:
            self.parts.store(x.values, self.target, turn, column_tile)

    @cute.jit
    def store_next(self, tTR_rAcc: cute.Tensor, part: Int32) -> None:
        """Sub-tile `part`, in a loop over all of them that is not unrolled."""
        column_tile = self.first_column + part
        x = self.fragment(tTR_rAcc, column_tile * self.columns)
        if cutlass.const_expr(isinstance(self.target, cute.Tensor)):
            self.fused.store_elements(x, self.target)
        else:
            self.parts.store_next(x.values, self.target, part, column_tile)

    def fragment(self, tTR_rAcc: cute.Tensor, column: Int32) -> fusion.Fragment:
        """What the pieces leave of the columns from `column` on."""
        count = self.columns
        fixed, run = (self.row,), tuple(column + i for i in range(count))
        if self.fused.transposed:  # the accumulator's rows are out's columns
            values = cute.make_tensor(tTR_rAcc.iterator, cute.make_layout((count, 1)))
            x = fusion.Fragment(values, run, fixed, self.batch, self.fused.bounds, run=1)
        else:
            layout = cute.make_layout((1, count), stride=(count, 1))
            values = cute.make_tensor(tTR_rAcc.iterator, layout)
            x = fusion.Fragment(values, fixed, run, self.batch, self.fused.bounds, run=count)
        return fusion.apply(self.fused.pieces, x, self.fused.passed)


@dataclass(frozen=True)
class FusedWayOut:
    """A WayOut with pieces, and with a batch."""

    out: cpasync.TmaInfo | cute.Tensor  # or out (M, N) or (M, N, L), for single elements
    sC: cute.Tensor | None  # (128, epiN, SLOT)
    columns: int  # of the product in a sub-tile; epiN, or twice that before a gate
    fused: Fusion
    sums: cute.Tensor | None  # as of WayOut

    def prefetch(self) -> None:
        if self.sC is not None:
            cpasync.prefetch_descriptor(self.out.atom)

    @cute.jit
    def of(self, tAcc: cute.Tensor, tile: WorkTile | BatchTile, row_tile: Int32) -> FusedTileOut:
        """Of this thread's row of tAcc (128, bN), which is row_tile's, by 128, of the tile."""
        thread, _, _ = cute.arch.thread_idx()
        parts = sub_tiles(tAcc, self.sC, thread, self.columns)
        batch: Any = tile.entry if isinstance(tile, BatchTile) else 0
        target = self.out
        if cutlass.const_expr(self.sC is not None):
            target = tile_stores(matrix(self.out, tile), self.sC, row_tile, EVICT_FIRST)
        elif cutlass.const_expr(cute.rank(self.out) == 3):
            target = self.out[None, None, batch]  # (M, N)
        row, first = row_tile * LANES + thread, tile.n * parts.num_parts
        return FusedTileOut(parts, target, self.fused, row, first, self.columns, batch)
