"""Softmax of rows that are scaled and masked as they are read, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument, Operand, Scalar
from cutex.device.row.columns import Columns
from cutex.device.row.reduction import add
from cutex.device.row.tile import RowTile
from cutex.device.stream_order import wait_for_kernel_before
from cutex.kernels.row.kernel import RowKernel, ThisRow, launch_of, matrix, reductions, row_of
from cutex.kernels.row.softmax import above, combined, exp

KEEP = "uint8"  # the dtype of a mask that says which elements count; another is added


@dataclass(frozen=True)
class SoftmaxMaskedConfig:
    """A softmax of scaled rows, the kind of mask, and the tile."""

    tile: RowTile
    mask: str = ""  # the dtype of the mask; "": none
    vectors: bool = False  # whether the mask is loaded as x is, by whole vectors
    causal: bool = False  # row r of S has its first N - S + r + 1 columns


class SoftmaxMasked(RowKernel):
    """y = softmax(x * scale + mask), or only over the elements that a boolean mask keeps; 0 in a
    row with none left."""

    title = "softmax_masked"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        c = self.config
        sizes = ("outer", "middle", "inner", "n")  # whose first three are the rows
        mask = Operand("mask", sizes, c.mask, contiguous=None, aligned=False, whole=False)
        return (
            matrix("x", dtype, c.tile), matrix("y", dtype, c.tile), *([mask] if c.mask else []),
            Scalar("scale"), Scalar("queries", "int32"),
        )  # fmt: skip

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, *rest) -> None:
        *mask, scale, queries, stream = rest
        self.kernel(mX, mY, tuple(mask), scale, queries).launch(
            **launch_of(self.config.tile, mX, stream)
        )

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, mY: cute.Tensor, mask: tuple, scale: Float32, queries: Int32
    ) -> None:
        c, tile = self.config, self.config.tile
        (reduction,) = reductions(tile, 2)
        this = ThisRow.of(tile, mX)
        columns = Columns.of(tile, this(mX))
        seen = columns
        if cutlass.const_expr(c.causal):  # what is masked is not loaded
            row = cutlass.min(this.row, this.rows - 1) % queries
            n = Int32(columns.n)
            seen = columns.cut(cutlass.max(cutlass.min(n - queries + row + 1, n), 0))
        wait_for_kernel_before()
        rX = row_of(mX, this, seen)  # (V, NumV)
        rM: Any = None
        if cutlass.const_expr(c.mask):
            rM = self.masks(seen, self.row_of(mask[0], this))  # (V, NumV)
        x = self.scores(seen, rX, rM, scale).load()
        own = x.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        e = exp(x - above(own))
        total = e.reduce(cute.ReductionOp.ADD, Float32(0), 0)
        top, total = combined(reduction, (own, total))
        # NOTE: not of above(own): where a thread has only -inf, and the row's maximum is far below
        # 0, that would be inf, and 0 times it NaN
        factor = exp(own - above(top)) * cute.arch.rcp_approx(total)
        if cutlass.const_expr(c.mask != "" or c.causal):  # else NaN, as of a row of -inf elsewhere
            factor = cutlass.select_(top == -Float32.inf, Float32(0), factor)
        if this.exists:
            columns.store(columns.rounded(e * factor, mY), this(mY))

    def row_of(self, mMask: cute.Tensor, this: ThisRow) -> cute.Tensor:
        """The mask (N) of a row, broadcast to x's rows."""
        row = cutlass.min(this.row, this.rows - 1)
        _, middle, inner, _ = mMask.shape
        at = row // inner
        return mMask[at // middle, at % middle, row % inner, None]

    @cute.jit
    def masks(self, columns: Columns, gM: cute.Tensor) -> cute.Tensor:
        """The elements of gM (N) in registers (V, NumV), 0 outside the row."""
        c, tile = self.config, self.config.tile
        if cutlass.const_expr(c.vectors):
            rM = columns.load(gM)
        else:
            rM = cute.make_rmem_tensor((tile.width, tile.vectors), gM.element_type)
            rM.fill(0)
            for i in cutlass.range_constexpr(tile.vectors):
                for j in cutlass.range_constexpr(tile.width):
                    column = columns.first + i * columns.step + j
                    if columns.holds(column):
                        rM[j, i] = gM[column]
        return rM

    @cute.jit
    def scores(self, columns: Columns, rX: cute.Tensor, rM: Any, scale: Float32) -> cute.Tensor:
        """The scaled elements (V, NumV) in fp32, -inf where they are masked or outside the row."""
        c, tile = self.config, self.config.tile
        rS = cute.make_rmem_tensor((tile.width, tile.vectors), Float32)
        for i in cutlass.range_constexpr(tile.vectors):
            for j in cutlass.range_constexpr(tile.width):
                kept = columns.holds(columns.first + i * columns.step + j)
                score = rX[j, i].to(Float32) * scale
                if cutlass.const_expr(c.mask == KEEP):
                    kept = kept & (rM[j, i] != 0)
                elif cutlass.const_expr(c.mask):
                    score = score + rM[j, i].to(Float32)
                rS[j, i] = cutlass.select_(kept, score, -Float32.inf)
        return rS


class SoftmaxScaledBackward(RowKernel):
    """dx = scale * y * (dy - sum of y * dy)."""

    title = "softmax_scaled_backward"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        rows = tuple(matrix(name, dtype, self.tile) for name in ("y", "dy", "dx"))
        return (*rows, Scalar("scale"))

    @cute.jit
    def __call__(self, mY, mdY, mdX, scale: Float32, stream) -> None:
        self.kernel(mY, mdY, mdX, scale).launch(**launch_of(self.tile, mY, stream))

    @cute.kernel
    def kernel(self, mY: cute.Tensor, mdY: cute.Tensor, mdX: cute.Tensor, scale: Float32) -> None:
        (reduction,) = reductions(self.tile, 1)
        this = ThisRow.of(self.tile, mY)
        columns = Columns.of(self.tile, this(mY))
        wait_for_kernel_before()
        y = row_of(mY, this, columns).load().to(Float32)  # (V, NumV)
        dy = row_of(mdY, this, columns).load().to(Float32)  # (V, NumV)
        (total,) = reduction(((y * dy).reduce(cute.ReductionOp.ADD, Float32(0), 0),), add)
        if this.exists:
            columns.store(columns.rounded(y * (dy - total) * scale, mdX), this(mdX))
