"""Stores of an accumulator in tensor memory through an epilogue's operations.

A thread holds one row of a sub-tile, so its columns are neighbours: operations load 16 bytes at a
time, and a gate finds its factor in the next register. Then the sub-tile is rounded and stored by
TMA, half as wide after a gate; or element by element, to any strides.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms.tma import EVICT_FIRST, TileStores, matrix, tile_stores
from cutex.device.atoms.tmem import LANES
from cutex.device.epilogue.epilogue_ops import BoundOps, Fragment
from cutex.device.epilogue.sm100.tma_store import SubTiles, sub_tiles
from cutex.device.work_tile import WorkTile


@dataclass(frozen=True)
class FusedTileStore:
    """The store of one tile's accumulator by a thread that holds one row, `columns` columns at a
    time."""

    parts: SubTiles
    target: TileStores | cute.Tensor  # or out (M, N), for single elements
    ops: BoundOps
    row: Int32  # this thread's row of the product
    first_column: Int32  # the tile's first column, in sub-tiles
    columns: int
    batch: Int32 | int

    @cute.jit
    def store(self, tTR_rAcc: cute.Tensor, turn: cutlass.Constexpr[int], part: Int32) -> None:
        """Store sub-tile `part`, the `turn`-th one of this tile that this CTA stores."""
        column_tile = self.first_column + part
        x = self.fragment(tTR_rAcc, column_tile * self.columns)
        if cutlass.const_expr(isinstance(self.target, cute.Tensor)):
            self.ops.store_elements(x, self.target)
        else:
            self.parts.store(x.values, self.target, turn, column_tile)

    @cute.jit
    def store_next(self, tTR_rAcc: cute.Tensor, turn: Int32, part: Int32) -> None:
        """Store sub-tile `part`, the `turn`-th one, in a loop over all of them that is not
        unrolled."""
        column_tile = self.first_column + part
        x = self.fragment(tTR_rAcc, column_tile * self.columns)
        if cutlass.const_expr(isinstance(self.target, cute.Tensor)):
            self.ops.store_elements(x, self.target)
        else:
            self.parts.store_next(x.values, self.target, turn, column_tile)

    def fragment(self, tTR_rAcc: cute.Tensor, column: Int32) -> Fragment:
        """The fragment of columns from `column` on, after the operations."""
        count, ops = self.columns, self.ops
        fixed, run = (self.row,), tuple(column + i for i in range(count))
        if ops.transposed:  # the accumulator's rows are out's columns
            values = cute.make_tensor(tTR_rAcc.iterator, cute.make_layout((count, 1)))
            x = Fragment(values, run, fixed, self.batch, ops.bounds, run=1)
        else:
            layout = cute.make_layout((1, count), stride=(count, 1))
            values = cute.make_tensor(tTR_rAcc.iterator, layout)
            x = Fragment(values, fixed, run, self.batch, ops.bounds, run=count)
        return ops.apply(x)


@dataclass(frozen=True)
class FusedEpilogueStore:
    """The store of accumulators to out through the operations: by TMA, or element by element."""

    out: cpasync.TmaInfo | cute.Tensor  # or out (M, N) or (M, N, L), for single elements
    sC: cute.Tensor | None  # (128, epiN, SLOT)
    columns: int  # columns of the product in a sub-tile: epiN, or twice that before a gate
    ops: BoundOps

    def prefetch(self) -> None:
        if self.sC is not None:
            cpasync.prefetch_descriptor(self.out.atom)

    @cute.jit
    def tile(self, tAcc: cute.Tensor, tile: WorkTile, row_tile: Int32) -> FusedTileStore:
        """The store of tAcc (128, bN) to the 128 rows of block `row_tile` and to `tile`'s
        columns."""
        thread, _, _ = cute.arch.thread_idx()
        parts = sub_tiles(tAcc, self.sC, thread, self.columns)
        target = self.out
        if cutlass.const_expr(self.sC is not None):
            target = tile_stores(matrix(self.out, tile), self.sC, row_tile, EVICT_FIRST)
        elif cutlass.const_expr(cute.rank(self.out) == 3):
            target = self.out[None, None, tile.batch]  # (M, N)
        row, first = row_tile * LANES + thread, tile.n * parts.num_parts
        return FusedTileStore(parts, target, self.ops, row, first, self.columns, tile.batch)
