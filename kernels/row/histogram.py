"""Counts of elements in bins of equal width: each CTA counts in smem, then adds to gmem; few
elements are counted by one cluster, whose CTAs send each other their counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Bound, Operand, Scalar
from cutex.device.pipeline import Barrier, publish_barriers
from cutex.device.row.columns import Columns
from cutex.device.row.tile import RowTile
from cutex.device.stream_order import may_overlap, wait_for_kernel_before
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


@dataclass(frozen=True)
class Shares:
    """The counts that the CTAs of a cluster send each other: every CTA adds up each `ctas`-th bin.

    barrier  arrives                                       waits
    full     1: thread 0 of this CTA, and 4 bytes of each  all threads
             CTA for each bin that is added up here
    """

    ctas: int
    bins: int
    counts: cute.Tensor  # (CTA, BIN of this CTA)
    full: Barrier

    @staticmethod
    def allocate(ctas: int, bins: int) -> Shares:
        smem, each = SmemAllocator(), -(-bins // ctas)
        counts = smem.allocate_tensor(Int32, cute.make_layout((ctas, each), stride=(each, 1)), 16)
        return Shares(ctas, bins, counts, Barrier.allocate(smem, "full", 1))

    @property
    def each(self) -> int:
        """The bins of a CTA; those behind the last one are counted as 0."""
        return -(-self.bins // self.ctas)

    @cute.jit
    def add_up(
        self, own: cute.Tensor, mCounts: cute.Tensor, threads: cutlass.Constexpr[int]
    ) -> None:
        """Send each CTA what this one counted for it; store the sums of what all counted for this
        one. All threads call it."""
        rank, thread = Int32(cute.arch.block_idx_in_cluster()), Int32(cute.arch.thread_idx()[0])
        if thread == 0:
            self.full.arrive_expecting(4 * self.ctas * self.each)
        cute.arch.cluster_wait()
        for b in cutlass.range(thread, self.ctas * self.each, threads, unroll=1):
            word = Int32(0)
            if b < self.bins:
                word = own[b]
            to = cute.domain_offset((rank, b // self.ctas), self.counts).iterator
            cute.arch.store_async_dsmem(to, word, self.full[0], b % self.ctas)
        self.full.wait(0)
        for i in cutlass.range(thread, self.each, threads, unroll=1):
            total = Int32(0)
            for other in cutlass.range_constexpr(self.ctas):
                total += self.counts[other, i]
            b = i * self.ctas + rank
            if b < self.bins:
                mCounts[b] = Int64(total)


class Histogram(RowKernel):
    """counts[b] += elements x (1, N) with b = floor((x - low) * scale), from low to high; high
    itself is of the last bin, and a NaN of none.

    smem            bytes
    own             4 * (bins + 1), where they fit; the last one counts what is in no bin
    counts          4 * bins, of a cluster
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
            grid=(ctas, 1, 1),
            block=(self.tile.num_threads, 1, 1),
            cluster=cluster,
            use_pdl=may_overlap(),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mCounts: cute.Tensor, numbers: tuple) -> None:
        c, tile = self.config, self.tile
        block, step = cute.arch.block_idx()[0] // tile.ctas, cute.arch.grid_dim()[0] // tile.ctas
        own: cute.Tensor = mCounts
        shares: Any = None
        if cutlass.const_expr(tile.ctas > 1):
            shares = Shares.allocate(tile.ctas, c.bins)
            publish_barriers((shares.full,), cluster=True, later=True)
        gX = mX[0, None]  # (N)
        columns, parts = Columns.of(tile, gX), parts_of(tile, gX)
        wait_for_kernel_before()
        rX = columns.moved(block).load(gX, Float32.nan)  # (V, NumV)
        if cutlass.const_expr(c.in_smem):
            own = SmemAllocator().allocate_tensor(
                Int32, cute.make_layout(c.bins + 1), 16
            )  # (BINS + 1)
            for b in cutlass.range(
                cute.arch.thread_idx()[0], c.bins + 1, tile.num_threads, unroll=1
            ):
                own[b] = Int32(0)
            cute.arch.sync_threads()
        for part in cutlass.range(block, parts, step, unroll=1):
            rHere = cute.make_rmem_tensor(rX.shape, rX.element_type)
            rHere.store(rX.load())
            rX.fill(Float32.nan)
            if part + step < parts:  # on its way while this one is counted
                columns.moved(part + step).fetch(gX, rX)
            for i in cutlass.range_constexpr(tile.vectors):
                for j in cutlass.range_constexpr(tile.width):
                    self.count(own, rHere[j, i].to(Float32), numbers)
        if cutlass.const_expr(c.in_smem):
            cute.arch.sync_threads()
            if cutlass.const_expr(tile.ctas > 1):
                shares.add_up(own, mCounts, tile.num_threads)
            else:
                self.add(own, mCounts)

    @cute.jit
    def add(self, own: cute.Tensor, mCounts: cute.Tensor) -> None:
        """Add this CTA's counts to those in gmem."""
        thread, threads = cute.arch.thread_idx()[0], self.tile.num_threads
        for b in cutlass.range(thread, self.config.bins, threads, unroll=1):
            found = own[b]
            if found != 0:
                at = mCounts.iterator + b
                cute.arch.atomic_add(at, Int64(found), sem="relaxed", scope="gpu")

    @cute.jit
    def count(self, own: cute.Tensor, x: Float32, numbers: tuple) -> None:
        """Count one element; NaN is in no bin."""
        low, high, scale = numbers
        is_inside = (x >= low) & (x <= high)
        b = cutlass.min(Int32((x - low) * scale), self.config.bins - 1)
        if cutlass.const_expr(self.config.in_smem):
            # without a branch, so that no element waits for the one before
            b = cutlass.select_(is_inside, b, Int32(self.config.bins))
            cute.arch.atomic_add(own.iterator + b, Int32(1), sem="relaxed", scope="cta")
        elif is_inside:
            cute.arch.atomic_add(own.iterator + b, Int64(1), sem="relaxed", scope="gpu")
