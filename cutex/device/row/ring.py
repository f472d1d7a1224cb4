"""A cp.async ring of rows in smem, loaded ahead of the threads that use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.row.columns import Columns
from cutex.device.row.tile import RowTile

LEAST_BITS = 32  # of a vector that cp.async copies


@dataclass(frozen=True)
class RowRing:
    """A ring of smem slots for rows of several operands. Each thread copies the vectors that it
    will read itself (cp.async), so it waits for its own copies alone and no barrier is needed."""

    stages: int  # slots; 0: rows are loaded when they are needed
    words: Any  # (V, THREAD, NumV, OPERAND, STAGE)
    atom: Any

    @staticmethod
    def allocate(
        smem: SmemAllocator, tile: RowTile, dtype: Any, operands: int, stages: int
    ) -> RowRing:
        bits = tile.width * dtype.width
        if bits < LEAST_BITS or stages < 2:
            return RowRing(0, None, None)
        shape = tile.width, tile.num_threads, tile.vectors, operands, stages
        words = smem.allocate_tensor(dtype, cute.make_layout(shape), 16)
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), dtype, num_bits_per_copy=bits)
        return RowRing(stages, words, atom)

    @cute.jit
    def fetch(
        self, columns: Columns, matrices: tuple[cute.Tensor, ...], row: Int32, turn: Int32 | int
    ) -> None:
        """Start the copies of this turn's row of each matrix (M, N); nothing past the last row.
        Called once per turn."""
        if cutlass.const_expr(self.stages):
            thread = cute.arch.thread_idx()[0]
            if row < cute.size(matrices[0], mode=[0]):
                for k in cutlass.range_constexpr(len(matrices)):
                    for i in cutlass.range_constexpr(columns.tile.vectors):
                        if columns.has(i):
                            sX = self.words[None, thread, i, k, turn % self.stages]  # (V)
                            cute.copy(self.atom, columns.vector(matrices[k][row, None], i), sX)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def start(
        self, columns: Columns, matrices: tuple[cute.Tensor, ...], row: Int32, step: Int32
    ) -> None:
        """Start the copies of the first rows: one for every slot but the last."""
        for ahead in cutlass.range_constexpr(self.stages - 1):
            self.fetch(columns, matrices, row + ahead * step, ahead)

    @cute.jit
    def wait(self) -> None:
        """Wait for the rows of the oldest turn; copies of stages - 2 later turns may remain in
        flight."""
        if cutlass.const_expr(self.stages):
            cute.arch.cp_async_wait_group(self.stages - 2)

    @cute.jit
    def load(self, columns: Columns, gX: cute.Tensor, operand: int, turn: Int32) -> cute.Tensor:
        """Load this turn's row gX (N) into registers (V, NumV), 0 outside the row."""
        if cutlass.const_expr(not self.stages):
            rX = columns.load(gX)
        else:
            thread = cute.arch.thread_idx()[0]
            shape = columns.tile.width, columns.tile.vectors
            rX = cute.make_rmem_tensor(shape, gX.element_type)
            rX.fill(0)
            for i in cutlass.range_constexpr(columns.tile.vectors):
                if columns.has(i):
                    sX = self.words[None, thread, i, operand, turn % self.stages]  # (V)
                    cute.autovec_copy(sX, rX[None, i])
        return rX
