"""The store of an accumulator in tensor memory, through operations, to rows of out by an index.

A thread holds one row of a sub-tile, whose columns are neighbours: it stores 16 bytes at a time to
the row of out that the index gives it, from registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from cutex.device.atoms.tmem import LANES
from cutex.device.epilogue.epilogue_ops import BoundOps
from cutex.device.epilogue.scattered_rows import ScatteredRows
from cutex.device.epilogue.sm100.fused_store import FusedTileStore
from cutex.device.epilogue.sm100.tma_store import sub_tiles
from cutex.device.work_tile import WorkTile


@dataclass(frozen=True)
class ScatteredTileStore(FusedTileStore):
    """A FusedTileStore to one row of out."""

    rows: ScatteredRows
    to: Int32  # the row of out

    @cute.jit
    def store(self, tTR_rAcc: cute.Tensor, turn: cutlass.Constexpr[int], part: Int32) -> None:
        """Store sub-tile `part`."""
        self.store_next(tTR_rAcc, Int32(turn), part)

    @cute.jit
    def store_next(self, tTR_rAcc: cute.Tensor, turn: Int32, part: Int32) -> None:
        """Store sub-tile `part`; no slot is counted by `turn`."""
        rows = self.rows
        x = self.fragment(tTR_rAcc, (self.first_column + part) * self.columns)
        size = cute.size(x.values)
        flat = cute.make_tensor(x.values.iterator, cute.make_layout(size))  # (C)
        rounded = cute.make_rmem_tensor(size, rows.mOut.element_type)  # (C)
        rounded.store(flat.load().to(rows.mOut.element_type))
        vectors = cute.logical_divide(rounded, cute.make_layout(rows.width))  # (V, NumV)
        for v in cutlass.range_constexpr(cute.size(vectors, mode=[1])):
            rows.write(vectors[None, v], self.to, x.columns[v * rows.width])


@cute.jit
def scattered_tile_store(
    tAcc: cute.Tensor,
    tile: WorkTile,
    row_tile: Int32,
    columns: cutlass.Constexpr[int],
    ops: BoundOps,
    rows: ScatteredRows,
) -> ScatteredTileStore:
    """The store of tAcc (128, bN), `columns` of the product at a time, from the 128 rows of block
    `row_tile` of the product."""
    thread, _, _ = cute.arch.thread_idx()
    parts = sub_tiles(tAcc, None, thread, columns)
    row, first = row_tile * LANES + thread, tile.n * parts.num_parts
    return ScatteredTileStore(parts, rows.mOut, ops, row, first, columns, 0, rows, rows.target(row))
