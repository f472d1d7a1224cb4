"""Out: what a unit's results are written to, whole, or in parts that the last CTA merges; and
Partials: the parts of a unit's O and LSE in memory.

A part is O (bM, DV) in fp32, of which the rows that exist are written, and behind it LSE (bM).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from cutex.device.atoms.scalar import exp2, log2
from cutex.device.attention.row_store import VECTOR, PartialRow, RoundedRow
from cutex.device.attention.seqlen_info import store_lse
from cutex.device.attention.softmax import LN2, LOG2_E
from cutex.device.last_arrival import is_last_arrival
from cutex.kernels.attention.decode.shared import Rows, units_of
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
    parts: Any = None  # the Parts that a kernel combines (Combine); None: the last CTA merges

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


# ---- parts in memory


WARP = 32
IN_FLIGHT = 64  # words that a lane loads together, at most, and of how many parts
MOST_TOGETHER = 8


@dataclass(frozen=True)
class Partials:
    sums: cute.Tensor  # (words) fp32
    flags: cute.Tensor  # (units) Int32
    rows: int  # bM
    columns: int  # DV

    def part(self, slot: Int32) -> cute.Pointer:
        """Where the part in `slot` begins."""
        return self.sums.iterator + Int64(slot) * (self.rows * (self.columns + 1))

    def o_row(self, slot: Int32, row: Int32) -> cute.Tensor:
        """A row of O, as (VECTOR, columns / VECTOR)."""
        first = (self.part(slot) + row * self.columns).align(4 * VECTOR)
        return cute.make_tensor(first, cute.make_layout((VECTOR, self.columns // VECTOR)))

    def row(self, slot: Int32, row: Int32) -> PartialRow:
        """A row of O, to store it."""
        return PartialRow(self.o_row(slot, row))

    def lse(self, slot: Int32) -> cute.Tensor:
        """The LSE of all rows, (bM)."""
        first = self.part(slot) + self.rows * self.columns
        return cute.make_tensor(first, cute.make_layout(self.rows))

    @cute.jit
    def arrive(self, unit: Int32, parts: Int32) -> Boolean:
        """Count a part of `unit` as written; return whether it was the last. One thread calls it,
        behind a barrier of all that wrote."""
        return is_last_arrival(self.flags.iterator + unit, parts)

    @cute.jit
    def merge(
        self, piece: Piece, rows: tuple[Int32, ...], o: cute.Tensor, first: Int32 | int = 0
    ) -> tuple[Float32, ...]:
        """Sum up `rows` of all parts, each weighted by its share of the exponentials, into `o`
        (VECTOR, columns of this lane, rows), and return their LSE. A whole warp calls it; lane i
        has the vectors first + i, first + i + 32, ..."""
        totals, highest = self.sums_of(piece, rows, o, first, 0, 1)
        return tuple(
            self.normalised(o[None, None, r], totals[r], highest[r]) for r in range(len(rows))
        )

    @cute.jit
    def sums_of(
        self,
        piece: Piece,
        rows: tuple[Int32, ...],
        o: cute.Tensor,
        first: Int32 | int,
        begin: Int32 | int,
        step: cutlass.Constexpr[int],
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Sum up `rows` of the parts begin, begin + step, ... into `o`, as `merge` does. Returns,
        of each row, the sum of their weights and the largest LSE of all parts, which has weight
        1."""
        lane = cute.arch.lane_idx()
        highest = cute.make_rmem_tensor(cute.make_layout(len(rows)), Float32)
        total = cute.make_rmem_tensor(cute.make_layout(len(rows)), Float32)
        highest.fill(-Float32.inf)
        total.fill(0.0)
        o.fill(0.0)
        together = min(max(IN_FLIGHT // cute.size(o), 1), MOST_TOGETHER)
        parts = tuple(begin + i * step for i in range(together))
        # NOTE: on their way while the largest LSE is looked for
        held = self.loaded(piece, parts, rows, o, first)
        for part in cutlass.range(lane, piece.parts, WARP, unroll=1):
            for r in cutlass.range_constexpr(len(rows)):
                lse = self.lse(piece.slot_of(part))[rows[r]]
                highest[r] = cute.arch.fmax(highest[r], lse)
        for r in cutlass.range_constexpr(len(rows)):
            over_warp = cute.arch.warp_reduction_max(highest[r])
            highest[r] = Float32(0.0) if over_warp == -Float32.inf else over_warp
        self.add(piece, parts, held, (o, total), highest)
        stride = step * together
        for part in cutlass.range(begin + stride, piece.parts, stride, unroll=1):
            parts = tuple(part + i * step for i in range(together))
            self.add(piece, parts, self.loaded(piece, parts, rows, o, first), (o, total), highest)
        return total, highest

    @cute.jit
    def loaded(
        self,
        piece: Piece,
        parts: tuple[Int32, ...],
        rows: tuple[Int32, ...],
        o: cute.Tensor,
        first: Int32 | int,
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """O, of the columns of this lane, and LSE of `rows` of `parts`; where one does not exist,
        of the last.

        All is loaded before any is added; a loop that is unrolled would wait for each.
        """
        lane, vectors = cute.arch.lane_idx(), self.columns // VECTOR
        size = (VECTOR, cute.size(o, mode=[1]), len(rows), len(parts))
        values = cute.make_rmem_tensor(cute.make_layout(size), Float32)
        lses = cute.make_rmem_tensor(cute.make_layout((len(rows), len(parts))), Float32)
        for p in cutlass.range_constexpr(len(parts)):
            slot = piece.slot_of(cutlass.min(parts[p], piece.parts - 1))
            for r in cutlass.range_constexpr(len(rows)):
                lses[r, p] = self.lse(slot)[rows[r]]
                gO = self.o_row(slot, rows[r])
                for i in cutlass.range_constexpr(cute.size(o, mode=[1])):
                    vector = cutlass.min(first + lane + i * WARP, vectors - 1)
                    values[None, i, r, p].store(gO[None, vector].load())
        return values, lses

    @cute.jit
    def add(
        self,
        piece: Piece,
        parts: tuple[Int32, ...],
        held: tuple[cute.Tensor, cute.Tensor],
        sums: tuple[cute.Tensor, cute.Tensor],
        highest: cute.Tensor,
    ) -> None:
        """Add those of `parts` that exist, as they are `held`, to the sums, of O and of weights."""
        (values, lses), (o, total) = held, sums
        for p in cutlass.range_constexpr(len(parts)):
            for r in cutlass.range_constexpr(cute.size(total)):
                weight = exp2((lses[r, p] - highest[r]) * LOG2_E)
                weight = weight if parts[p] < piece.parts else Float32(0.0)
                total[r] += weight
                for i in cutlass.range_constexpr(cute.size(o, mode=[1])):
                    more = values[None, i, r, p].load() * weight
                    o[None, i, r].store(o[None, i, r].load() + more)

    @cute.jit
    def normalised(self, o: cute.Tensor, total: Float32, highest: Float32) -> Float32:
        """Divide a row's sum by the sum of its weights; return its LSE."""
        factor = Float32(0.0) if total == 0.0 else 1.0 / total
        o.store(o.load() * factor)
        return self._log_sum(total, highest)

    @staticmethod
    @cute.jit
    def _log_sum(total: Float32, shift: Float32) -> Float32:
        return -Float32.inf if total == 0.0 else shift + log2(total) * LN2


@cute.jit
def with_sink(lse: Float32, sink: Float32) -> tuple[Float32, Float32]:
    """The LSE of a row with one more key, of score `sink` and no value, and the factor by which its
    O is multiplied."""
    highest = cute.arch.fmax(lse, sink)
    shift = Float32(0.0) if highest == -Float32.inf else highest
    mine, other = exp2((lse - shift) * LOG2_E), exp2((sink - shift) * LOG2_E)
    total = mine + other
    empty = total == 0.0
    factor = Float32(0.0) if empty else mine / total
    return -Float32.inf if empty else shift + log2(total) * LN2, factor
