"""Rows scaled in place by one number; where it is 1, nothing is read."""

from __future__ import annotations

from cutlass import Float32, cute

from cutex.compile import Argument
from cutex.device.row.columns import Columns
from cutex.kernels.row.cross_entropy import one
from cutex.kernels.row.kernel import RowKernel, matrix, parts_of


class Scale(RowKernel):
    """x = x * factor, part by part of a row."""

    title = "scale"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return matrix("x", dtype, self.tile), one("factor")

    @cute.jit
    def __call__(self, mX: cute.Tensor, mFactor: cute.Tensor, stream) -> None:
        tile = self.tile
        # NOTE: of a grid, only x may be above 65535
        blocks = parts_of(tile, mX[0, None]) * cute.ceil_div(cute.size(mX, mode=[0]), tile.rows)
        self.kernel(mX, mFactor).launch(
            grid=(blocks, 1, 1), block=(tile.num_threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mFactor: cute.Tensor) -> None:
        tile = self.tile
        factor = mFactor[0]
        if factor != Float32(1):
            parts, block = parts_of(tile, mX[0, None]), cute.arch.block_idx()[0]
            row = block // parts * tile.rows + cute.arch.thread_idx()[0] // tile.threads
            if row < cute.size(mX, mode=[0]):
                gX = mX[row, None]  # (N)
                columns = Columns.of(tile, gX).moved(block % parts)
                x = columns.load(gX).load().to(Float32)  # (V, NumV)
                columns.store(columns.rounded(x * factor, mX), gX)
