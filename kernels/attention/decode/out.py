"""Out: what a unit's results are written to, whole, or in parts that the last CTA merges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.device.attention.row_store import VECTOR, RoundedRow
from cutex.device.attention.seqlen_info import store_lse
from cutex.kernels.attention.decode.partials import WARP, Partials, with_sink
from cutex.kernels.attention.decode.rows import Rows, units_of
from cutex.kernels.attention.decode.signature import Passed
from cutex.kernels.attention.decode.splits import Piece

BARRIER = 1  # a named barrier of the warps that write
THREADS = 128  # that write
TOGETHER = 4  # rows that a warp merges at a time, where there are many


@dataclass(frozen=True)
class Out:
    config: Any  # says `head_dim_v`, `sink` and `lse`
    mO: cute.Tensor
    partials: Partials
    passed: Passed
    last: Any  # (1) Int32 in smem: whether this CTA wrote a unit's last part; None: nobody asks
    parts: Any = None  # the Parts that a kernel combines (combine.py); None: the last CTA merges

    @staticmethod
    def sync() -> None:
        """A barrier of the threads that write."""
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=THREADS)

    def row(self, rows: Rows, row: Int32) -> RoundedRow:
        """A row of O, to store it."""
        return RoundedRow(rows.words(self.mO, row), units_of(self.mO))

    @cute.jit
    def finish_row(self, lse: Float32, rows: Rows, row: Int32) -> tuple[Float32, Float32]:
        """The LSE of a row with its sink, and the factor that its O still lacks."""
        factor = Float32(1.0)
        if cutlass.const_expr(self.config.sink):
            lse, factor = with_sink(lse, self.passed.sink[rows.head_of(row)])
        return lse, factor

    @cute.jit
    def store_lse(self, lse: Float32, rows: Rows, row: Int32) -> None:
        c, mLSE = self.config, self.passed.lse
        if cutlass.const_expr(c.lse):
            query, head = rows.query(row), rows.head_of(row)
            store_lse(mLSE, lse, rows.batch, head, rows.seq_q, query)

    @cute.jit
    def announce(self, piece: Piece, unit: Int32) -> None:
        """Say where the parts of a unit are, or that there is one, if this CTA has part 0."""
        if cutlass.const_expr(self.parts is not None):
            thread, _, _ = cute.arch.thread_idx()
            if (thread == 0) & (piece.part == 0):
                self.parts.announce(unit, piece)

    @cute.jit
    def end_part(self, rows: Rows, piece: Piece, unit: Int32) -> None:
        """Count a part, which this thread has written its share of, and merge all parts of the unit
        if it is the last; or leave that to the kernel that combines parts."""
        if cutlass.const_expr(self.parts is None):
            self.count_part(rows, piece, unit)

    @cute.jit
    def count_part(self, rows: Rows, piece: Piece, unit: Int32) -> None:
        last = self.last
        self.sync()
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            last[0] = Int32(self.partials.arrive(unit, piece.parts))
        self.sync()
        if last[0] != 0:
            self.merge(rows, piece)

    @cute.jit
    def merge(self, rows: Rows, piece: Piece) -> None:
        """Merge all parts of a unit and store O and LSE, a warp each row; or several rows at a
        time, where there are more rows than warps, which would else wait for memory for each."""
        warp, warps = cute.arch.warp_idx(), THREADS // WARP
        if rows.count > warps:
            for row in cutlass.range(warp, rows.count, warps * TOGETHER, unroll=1):
                self.merge_rows(rows, piece, tuple(row + i * warps for i in range(TOGETHER)))
        elif warp < rows.count:
            self.merge_rows(rows, piece, (warp,))

    @cute.jit
    def merge_rows(
        self,
        rows: Rows,
        piece: Piece,
        numbers: tuple[Int32, ...],
        first: Int32 | int = 0,
        warps: cutlass.Constexpr[int] = 1,
    ) -> None:
        """Merge rows of all parts of a unit, those of `numbers` that exist, of which the first
        does, and store O and LSE. A whole warp calls it; or `warps` do, each with as many columns,
        from vector `first` on."""
        count = -(-self.config.head_dim_v // (VECTOR * WARP * warps))
        o = cute.make_rmem_tensor(cute.make_layout((VECTOR, count, len(numbers))), Float32)
        existing = tuple(cutlass.min(row, rows.count - 1) for row in numbers)
        lses = self.partials.merge(piece, existing, o, first)
        for r in cutlass.range_constexpr(len(numbers)):
            exists = numbers[r] < rows.count
            self.store_row(rows, existing[r], exists, o[None, None, r], lses[r], first)

    @cute.jit
    def store_row(
        self,
        rows: Rows,
        row: Int32,
        exists: Boolean,
        o: cute.Tensor,
        lse: Float32,
        first: Int32 | int,
    ) -> None:
        """Store a row that is merged, if it exists, of which a lane has `o` (VECTOR, columns) from
        vector `first` on."""
        lane = cute.arch.lane_idx()
        vectors = cute.size(self.mO, mode=[cute.rank(self.mO) - 1]) // VECTOR
        narrow = cute.make_rmem_tensor(cute.make_layout(VECTOR), self.mO.element_type)
        of_row, factor = self.finish_row(lse, rows, row)
        gO = rows.words(self.mO, row)
        for i in cutlass.range_constexpr(cute.size(o, mode=[1])):
            vector = first + lane + i * WARP
            narrow.store((o[None, i].load() * factor).to(narrow.element_type))
            if (vector < vectors) & exists:
                for j in cutlass.range_constexpr(2):
                    gO[2 * vector + j] = cute.recast_tensor(narrow, Int32)[j]
        if (first + lane == 0) & exists:
            self.store_lse(of_row, rows, row)
