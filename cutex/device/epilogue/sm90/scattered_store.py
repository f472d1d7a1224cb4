"""The store of a wgmma's accumulators, through operations, to rows of out by an index.

TMA stores boxes, whose rows are neighbours; so each warp writes its 16 rows of a part to smem,
where stmatrix puts 8 rows of 16 bytes at once, reads them again by rows, and stores 16 bytes a
lane: whole lines of out.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from cutex.device.epilogue.epilogue_ops import BoundOps
from cutex.device.epilogue.scattered_rows import ScatteredRows
from cutex.device.epilogue.sm90.fused_store import apply_to_part, write_part
from cutex.device.epilogue.sm90.tma_store import WARP_ROWS, accumulator_parts, warpgroup_slots

LANES = 32


@dataclass(frozen=True)
class ScatteredStore:
    """The store of one warp's accumulators: registers -> smem of its own -> registers -> rows of
    out. No warp waits for another."""

    r2s: cute.TiledCopy
    tRS_sC: cute.Tensor  # (R2S, R2S_M, R2S_N, SLOT)
    sC: cute.Tensor  # (64, epiN, SLOT) of this warpgroup
    ops: BoundOps
    rows: ScatteredRows

    @property
    def shape(self) -> tuple[int, int, int]:
        """The rows and columns of a part of out, and the number of slots."""
        rows, columns, num_slots = (cute.size(self.sC, mode=[i]) for i in range(3))
        return rows, columns, num_slots

    @property
    def row_lanes(self) -> int:
        """The lanes that write a row of a part, 16 bytes each."""
        return self.shape[1] // self.rows.width

    @property
    def rows_at_once(self) -> int:
        """The rows that a warp writes at a time."""
        return min(WARP_ROWS, LANES // self.row_lanes)

    @cute.jit
    def store(self, acc: cute.Tensor, row_tile: Int32, row_step: Int32, column_tile: Int32) -> None:
        """Store `acc`; the arguments are those of WarpgroupStore.store."""
        rows, columns, num_slots = self.shape
        of_product = columns * 2 if self.ops.gated else columns
        parts = accumulator_parts(acc, rows * of_product)  # (V, PART)
        per_row = cute.size(parts, mode=[1]) // cute.size(acc, mode=[1])
        for block in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            row = (row_tile + block * row_step) * rows
            targets = self.targets(row)  # (PASS)
            for i in cutlass.range_constexpr(per_row):
                part, column = block * per_row + i, column_tile + i
                if cutlass.const_expr(part == 0 or num_slots == 1):
                    cute.arch.sync_warp()  # the last part's lanes have read it
                x = apply_to_part(self.ops, parts[None, part], (row, column * of_product), 0)
                slot = part % num_slots
                write_part(x, self.ops.gated, self.r2s, self.tRS_sC[None, None, None, slot])
                cute.arch.sync_warp()
                self.to_global(slot, targets, column * columns)

    @cute.jit
    def targets(self, row: Int32) -> cute.Tensor:
        """The rows of out for those that this lane writes, (PASS), of a part that begins at `row`
        of the product."""
        passes = WARP_ROWS // self.rows_at_once
        targets = cute.make_rmem_tensor(passes, Int32)  # (PASS)
        for i in cutlass.range_constexpr(passes):
            targets[i] = self.rows.target(row + self.place(i))
        return targets

    def place(self, number: int) -> Int32:
        """The row of a part that this lane writes in pass `number`."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() % 4
        return warp * WARP_ROWS + lane // self.row_lanes % WARP_ROWS + number * self.rows_at_once

    @cute.jit
    def to_global(self, slot: cutlass.Constexpr[int], targets: cute.Tensor, column: Int32) -> None:
        """Write this warp's rows of `slot` to the columns of out from `column` on."""
        width, kind = self.rows.width, self.sC.element_type
        vector = cute.make_copy_atom(CopyUniversalOp(), kind, num_bits_per_copy=128)
        vectors = cute.logical_divide(self.sC[None, None, slot], (1, width))  # ((1, M), (V, NumV))
        passes = cute.size(targets)
        lane = cute.arch.lane_idx()
        mine = lane % self.row_lanes
        values = cute.make_rmem_tensor((width, passes), kind)  # (V, PASS)
        for i in cutlass.range_constexpr(passes):
            cute.copy(vector, vectors[(0, self.place(i)), (None, mine)], values[None, i])
        # NOTE: of narrow parts, half of the lanes would write what the others do
        if lane < self.rows_at_once * self.row_lanes:
            for i in cutlass.range_constexpr(passes):
                self.rows.write(values[None, i], targets[i], column + mine * width)


@cute.jit
def scattered_store(
    sC: cute.Tensor, num_slots: cutlass.Constexpr[int], ops: BoundOps, rows: ScatteredRows
) -> ScatteredStore:
    """The store of this thread's warp; sC is (64, epiN, SLOT), each warpgroup has `num_slots`."""
    wide = cute.size(sC, mode=[1]) % 16 == 0
    op, bits = StMatrix8x8x16bOp(False, 4 if wide else 2), 0
    if cutlass.const_expr(sC.element_type.width == 32):
        op, bits = CopyUniversalOp(), 64
    r2s, tRS_sC, sC = warpgroup_slots(sC, num_slots, op, bits)
    return ScatteredStore(r2s, tRS_sC, sC, ops, rows)
