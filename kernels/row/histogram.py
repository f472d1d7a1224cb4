"""Counts of elements in bins of equal width: each CTA counts in smem, then adds to gmem."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Bound, Operand, Scalar
from cutex.device.row.columns import Columns
from cutex.device.row.tile import RowTile
from cutex.kernels.row.kernel import RowKernel, matrix, parts_of

IN_SMEM = 8192  # bins that a CTA counts in its smem; of more, each element is added at once


@dataclass(frozen=True)
class HistogramConfig:
    """The number of bins, and the tile for a part of the elements."""

    tile: RowTile
    bins: int

    @property
    def in_smem(self) -> bool:
        return self.bins <= IN_SMEM


class Histogram(RowKernel):
    """counts[b] += elements x (1, N) with b = floor((x - low) * scale), from low to high; high
    itself is of the last bin, and a NaN of none.

    smem            bytes
    own             4 * bins, where they fit
    """

    title = "histogram"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        bins = (Bound("bins", self.config.bins, self.config.bins),)
        counts = Operand("counts", ("bins",), "int64", aligned=False, whole=False, bounds=bins)
        numbers = Scalar("low"), Scalar("high"), Scalar("scale"), Scalar("ctas", "int32")
        return (matrix("x", dtype, self.tile), counts, *numbers)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mCounts: cute.Tensor, *rest) -> None:
        low, high, scale, ctas, stream = rest
        self.kernel(mX, mCounts, (low, high, scale)).launch(
            grid=(ctas, 1, 1), block=(self.tile.num_threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mCounts: cute.Tensor, numbers: tuple) -> None:
        c, tile = self.config, self.tile
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        own = mCounts
        if cutlass.const_expr(c.in_smem):
            own = SmemAllocator().allocate_tensor(Int32, cute.make_layout(c.bins), 16)  # (BINS)
            for b in cutlass.range(thread, c.bins, tile.num_threads, unroll=1):
                own[b] = Int32(0)
            cute.arch.sync_threads()
        gX = mX[0, None]  # (N)
        columns = Columns.of(tile, gX)
        for part in cutlass.range(block, parts_of(tile, gX), cute.arch.grid_dim()[0], unroll=1):
            here = columns.moved(part)
            rX = here.load(gX, Float32.nan)  # (V, NumV)
            for i in cutlass.range_constexpr(tile.vectors):
                for j in cutlass.range_constexpr(tile.width):
                    self.count(own, rX[j, i].to(Float32), numbers)
        if cutlass.const_expr(c.in_smem):
            cute.arch.sync_threads()
            for b in cutlass.range(thread, c.bins, tile.num_threads, unroll=1):
                found = own[b]
                if found != 0:
                    at = mCounts.iterator + b
                    cute.arch.atomic_add(at, Int64(found), sem="relaxed", scope="gpu")

    @cute.jit
    def count(self, own: cute.Tensor, x: Float32, numbers: tuple) -> None:
        """Count one element; NaN is in no bin."""
        low, high, scale = numbers
        if (x >= low) & (x <= high):
            b = cutlass.min(Int32((x - low) * scale), self.config.bins - 1)
            if cutlass.const_expr(self.config.in_smem):
                cute.arch.atomic_add(own.iterator + b, Int32(1), sem="relaxed", scope="cta")
            else:
                cute.arch.atomic_add(own.iterator + b, Int64(1), sem="relaxed", scope="gpu")
