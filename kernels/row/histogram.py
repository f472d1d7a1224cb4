"""Counts of elements in bins of equal width: each CTA counts in smem, then adds to gmem; few
elements are counted by one cluster, whose CTAs read each other's counts."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Bound, Operand, Scalar
from cutex.device.pipeline import sync_cluster
from cutex.device.row.columns import Columns
from cutex.device.row.tile import RowTile
from cutex.kernels.row.kernel import RowKernel, matrix, parts_of

IN_SMEM = 8192  # bins that a CTA counts in its smem; of more, each element is added at once


@dataclass(frozen=True)
class HistogramConfig:
    """The number of bins, and the tile for a part of the elements; a tile of several CTAs is that
    of the only cluster, which needs no zeroed counts."""

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

    def __init__(self, config: HistogramConfig) -> None:
        super().__init__(config)
        if self.tile.ctas > 1 and not config.in_smem:
            raise ValueError(f"bins={config.bins}: a cluster counts at most {IN_SMEM}, in its smem")

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        bins = (Bound("bins", self.config.bins, self.config.bins),)
        counts = Operand("counts", ("bins",), "int64", aligned=False, whole=False, bounds=bins)
        numbers = Scalar("low"), Scalar("high"), Scalar("scale"), Scalar("ctas", "int32")
        return (matrix("x", dtype, self.tile), counts, *numbers)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mCounts: cute.Tensor, *rest) -> None:
        low, high, scale, ctas, stream = rest
        cluster = (self.tile.ctas, 1, 1) if self.tile.ctas > 1 else None
        self.kernel(mX, mCounts, (low, high, scale)).launch(
            grid=(ctas, 1, 1), block=(self.tile.num_threads, 1, 1), cluster=cluster, stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mCounts: cute.Tensor, numbers: tuple) -> None:
        c, tile = self.config, self.tile
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0] // tile.ctas
        step = cute.arch.grid_dim()[0] // tile.ctas
        own = mCounts
        if cutlass.const_expr(c.in_smem):
            own = SmemAllocator().allocate_tensor(Int32, cute.make_layout(c.bins), 16)  # (BINS)
            for b in cutlass.range(thread, c.bins, tile.num_threads, unroll=1):
                own[b] = Int32(0)
            cute.arch.sync_threads()
        gX = mX[0, None]  # (N)
        columns = Columns.of(tile, gX)
        for part in cutlass.range(block, parts_of(tile, gX), step, unroll=1):
            here = columns.moved(part)
            rX = here.load(gX, Float32.nan)  # (V, NumV)
            for i in cutlass.range_constexpr(tile.vectors):
                for j in cutlass.range_constexpr(tile.width):
                    self.count(own, rX[j, i].to(Float32), numbers)
        if cutlass.const_expr(tile.ctas > 1):
            self.add_up(own, mCounts)
        elif cutlass.const_expr(c.in_smem):
            cute.arch.sync_threads()
            for b in cutlass.range(thread, c.bins, tile.num_threads, unroll=1):
                found = own[b]
                if found != 0:
                    at = mCounts.iterator + b
                    cute.arch.atomic_add(at, Int64(found), sem="relaxed", scope="gpu")

    @cute.jit
    def add_up(self, own: cute.Tensor, mCounts: cute.Tensor) -> None:
        """Store the counts of all CTAs of the cluster, of which each adds up its share of bins."""
        tile, rank = self.tile, cute.arch.block_idx_in_cluster()
        first = rank * tile.num_threads + cute.arch.thread_idx()[0]
        load = cute.make_copy_atom(CopyUniversalOp(), Int32, num_bits_per_copy=32)
        sync_cluster()
        for b in cutlass.range(first, self.config.bins, tile.ctas * tile.num_threads, unroll=1):
            counts = cute.make_rmem_tensor((1, tile.ctas), Int32)
            for other in cutlass.range_constexpr(tile.ctas):
                theirs = cute.arch.map_dsmem_ptr(own.iterator, Int32(other))
                theirs = cute.make_tensor(theirs + b, cute.make_layout(1))
                cute.copy(load, theirs, counts[None, other])
            total = counts.load().reduce(cute.ReductionOp.ADD, Int32(0), 0)
            mCounts[b] = Int64(total)
        sync_cluster()  # nobody ends whose counts are still read

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
