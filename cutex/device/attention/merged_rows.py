"""The rows of a tile, over parts of their keys in as many CTAs, merged by all of these
(row_stats.py).

A warp leaves what it has in global memory, waits for the warps of its number in the other CTAs, and
merges some of the columns of their common rows. The largest weight is taken out, so that none
overflows. Sums are in the order of the parts, so bits do not depend on time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from cutex.device.atoms.scalar import exp2, reciprocal
from cutex.device.attention.row_stats import (
    FIELDS,
    KEPT_FIELDS,
    LN2_REST,
    KeptStats,
    RowStats,
    log2_of_ratio,
)
from cutex.device.attention.row_store import RoundedRow
from cutex.device.attention.softmax import LN2
from cutex.device.last_arrival import is_last_arrival

LANES, VECTOR, ROWS_OF_THREAD, ROWS_OF_WARP = 32, 4, 2, 16
STATS = KEPT_FIELDS  # numbers of a row besides O
AT_ONCE = 4  # vectors of a thread that are loaded together
UNDER_WAY = 8  # vectors of a thread whose loads are under way together
QUAD = 4  # threads that hold a row
LOOKED_AT = 4  # parts whose stats a thread loads together


def slots_after(part: Int32) -> Int32:
    """How many slots after part 0 another one is. A CTA has two: one for the rows of which it has a
    later part, and one for those of which it has the first."""
    return cutlass.max(2 * part - 1, 0)


def numbers_of_warp(columns: int) -> int:
    """The numbers that a warp leaves of rows of so many columns."""
    return ROWS_OF_WARP * (columns + STATS)


@dataclass(frozen=True)
class MergedRows:
    """The 16 rows of a warp, of which `parts` CTAs have a part each; this one has number `part`."""

    sums: cute.Tensor  # fp32 in global memory: of each part the stats of all rows, then O
    count: cute.Pointer  # Int32 in global memory, 0 before and after: warps that have left theirs
    stride: Int32  # numbers from one slot to the next
    part: Int32
    parts: Int32
    columns: int  # of O
    rows: tuple[RoundedRow, ...]  # of O, where this thread's are stored
    exists: tuple[Boolean, ...]  # whether they are of the sequence
    dtype: type[cutlass.Numeric]  # of O

    @property
    def vectors(self) -> int:
        """The vectors of O that a thread has."""
        return self.columns // 8

    def place(self, part: Int32, first: Int32 | int, size: int) -> cute.Tensor:
        """`size` numbers of a part, from `first` on."""
        # NOTE: else the place would not be known to be a multiple of 16 bytes
        at = Int64(slots_after(part)) * self.stride + first
        at = cute.assume(at, divby=VECTOR)
        return cute.make_tensor(self.sums.iterator + at, cute.make_layout(size))

    def stats_at(self, part: Int32, row: int) -> cute.Tensor:
        """The stats of row `row` of this thread in a part."""
        at = (row * 8 + cute.arch.lane_idx() // 4) * STATS
        return self.place(part, at, STATS)

    def vector_at(self, part: Int32, number: Int32 | int) -> cute.Tensor:
        """Vector `number` of this thread in a part: two columns of each of its rows."""
        at = ROWS_OF_WARP * STATS + (number * LANES + cute.arch.lane_idx()) * VECTOR
        return self.place(part, at, VECTOR)

    @cute.jit
    def leave(self, acc: cute.Tensor, stats: cute.Tensor) -> None:
        """Leave O, divided by its sums, and the stats (STATS, rows) of this part to all."""
        if cute.arch.lane_idx() % 4 == 0:
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                self.stats_at(self.part, r).store(stats[None, r].load())
        mine = cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, self.vectors)))
        for j in cutlass.range_constexpr(self.vectors):
            self.vector_at(self.part, j).store(mine[None, j].load())
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.atomic_add(self.count, Int32(1), sem="release", scope="gpu")

    @cute.jit
    def merge(self, store_lse: cutlass.Constexpr[Callable[[cute.Tensor], None] | None]) -> None:
        """Wait for all parts, and store this part's columns of O and, if it is the last part, by
        `store_lse` the LSE of all keys (rows)."""
        first, end = (self.vectors * i // self.parts for i in (self.part, self.part + 1))
        if first < end:
            self._await()
            lse = cute.make_rmem_tensor(cute.make_layout(ROWS_OF_THREAD), Float32)
            best, total = self._weigh(lse)
            if cutlass.const_expr(store_lse is not None):  # noqa: SIM102 - known when tracing
                if self.part + 1 == self.parts:  # which has columns in any case
                    store_lse(lse)
            whole = (end - first) // AT_ONCE
            for i in cutlass.range(whole, unroll=1):
                self._columns(first + i * AT_ONCE, AT_ONCE, best, total)
            for j in cutlass.range(first + whole * AT_ONCE, end, unroll=1):
                self._columns(j, 1, best, total)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                is_last_arrival(self.count, self.parts + cutlass.min(self.parts, self.vectors))

    @cute.jit
    def _await(self) -> None:
        if cute.arch.lane_idx() == 0:
            left = cute.arch.load(self.count, Int32, sem="acquire", scope="gpu")
            while left < self.parts:
                left = cute.arch.load(self.count, Int32, sem="acquire", scope="gpu")
        cute.arch.sync_warp()

    @cute.jit
    def _held(self, first: Int32, step: cutlass.Constexpr[int], held: cute.Tensor) -> None:
        """Load the stats of this thread's rows of every `step`-th part from `first` on into `held`
        (STATS, rows, parts); a sum of 0 of those that there are not."""
        for i in cutlass.range_constexpr(cute.size(held, mode=[2])):
            part = first + i * step
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                at = self.stats_at(cutlass.min(part, self.parts - 1), r)
                held[None, r, i].store(at.load())
        for i in cutlass.range_constexpr(cute.size(held, mode=[2])):
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                exists = first + i * step < self.parts
                held[0, r, i] = held[0, r, i] if exists else Float32(0.0)

    @cute.jit
    def _weigh(self, lse: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """Of each row the RowStats of the largest part, (FIELDS, rows), and the factor of its
        weight (rows): 1 / sum of w, in units of 2^(e + r) of it. Sets LSE of all.

        Each of the four threads that hold a row looks at every fourth part."""
        layout = cute.make_layout((FIELDS, ROWS_OF_THREAD))
        best = cute.make_rmem_tensor(layout, Float32)
        held = cute.make_rmem_tensor(cute.make_layout((STATS, ROWS_OF_THREAD, LOOKED_AT)), Float32)
        total = cute.make_rmem_tensor(cute.make_layout(ROWS_OF_THREAD), Float32)
        best.fill(0.0)
        total.fill(0.0)
        mine = cute.arch.lane_idx() % QUAD
        for first in cutlass.range(0, self.parts, QUAD * LOOKED_AT, unroll=1):
            self._held(first + mine, QUAD, held)
            for i in cutlass.range_constexpr(LOOKED_AT):
                for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                    other = KeptStats(*(held[x, r, i] for x in range(STATS))).known
                    self._include(other, other.n, best, total, r)
        for lane in (1, 2):
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                other = RowStats(
                    *(cute.arch.shuffle_sync_bfly(best[x, r], offset=lane) for x in range(FIELDS))
                )
                more = cute.arch.shuffle_sync_bfly(total[r], offset=lane)
                self._include(other, more, best, total, r)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            n, empty = best[0, r], total[r] == 0.0
            rest = log2_of_ratio(total[r], n)
            rest = rest * LN2 + rest * LN2_REST
            lse[r] = -Float32.inf if empty else best[3, r] + (best[4, r] + rest)
            total[r] = Float32(0.0) if empty else reciprocal(total[r])
        return best, total

    @staticmethod
    @cute.jit
    def _include(
        other: RowStats,
        more: Float32,
        best: cute.Tensor,
        total: cute.Tensor,
        r: cutlass.Constexpr[int],
    ) -> None:
        """Add a part, or several of which `other` is the largest and `more` the sum, to those known
        of row `r`. Without a branch, which loads could not be moved over."""
        known = RowStats(*(best[x, r] for x in range(FIELDS)))
        above = other.above(known)
        # NOTE: a part without keys has n = 0 and says nothing by its e and r
        counts, empty = other.n != 0.0, known.n == 0.0
        exceeds = counts & (empty | (above > 0.0))
        mine = total[r] * exp2(-cute.arch.fmax(above, 0.0))
        theirs = more * exp2(cute.arch.fmin(above, 0.0))
        mine = Float32(0.0) if empty else mine
        theirs = more if empty else theirs
        total[r] = mine + theirs if counts else total[r]
        for x, value in enumerate(other):
            best[x, r] = value if exceeds else best[x, r]

    @cute.jit
    def _columns(
        self,
        first: Int32,
        count: cutlass.Constexpr[int],
        best: cute.Tensor,
        total: cute.Tensor,
    ) -> None:
        """Merge `count` vectors from `first` on, and store them."""
        at_once = UNDER_WAY // count  # parts
        acc = cute.make_rmem_tensor(cute.make_layout((VECTOR, count)), Float32)
        more = cute.make_rmem_tensor(cute.make_layout((VECTOR, count, at_once)), Float32)
        held = cute.make_rmem_tensor(cute.make_layout((STATS, ROWS_OF_THREAD, at_once)), Float32)
        acc.fill(0.0)
        for start in cutlass.range(0, self.parts, at_once, unroll=1):
            for i in cutlass.range_constexpr(at_once):
                part = cutlass.min(start + i, self.parts - 1)
                for j in cutlass.range_constexpr(count):
                    more[None, j, i].store(self.vector_at(part, first + j).load())
            self._held(start, 1, held)
            for i in cutlass.range_constexpr(at_once):
                for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                    other = KeptStats(*(held[x, r, i] for x in range(STATS))).known
                    above = other.above(RowStats(*(best[x, r] for x in range(FIELDS))))
                    weight = other.n * exp2(above) * total[r]
                    weight = Float32(0.0) if other.n == 0.0 else weight
                    for j in cutlass.range_constexpr(count):
                        for column in cutlass.range_constexpr(2):
                            acc[2 * r + column, j] += more[2 * r + column, j, i] * weight
        pair = cute.make_rmem_tensor(cute.make_layout(2), self.dtype)
        for j in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                for i in cutlass.range_constexpr(2):
                    pair[i] = acc[2 * r + i, j].to(self.dtype)
                if self.exists[r]:
                    self.rows[r].store_pair(first + j, cute.arch.lane_idx() % QUAD, pair)
