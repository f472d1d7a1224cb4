"""Norms of rows of any length that lie one behind the other, many of them as one run of memory.

What a CTA has of them comes and goes by whole vectors, through smem, whose ends are two for all its
rows. There thread t of T has the words t, t + T, t + 2T and so on of a row: from the word of 32
bits in which the row begins, so that the columns of a thread are the same in every row of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.row import in_smem
from cutex.device.row.columns import Columns
from cutex.device.row.reduction import RowReduction, add, lanes
from cutex.device.row.tile import VECTOR_BYTES, WARP, RowTile
from cutex.kernels.row.kernel import ThisRow, reductions
from cutex.kernels.row.norm import Normed, merged
from cutex.kernels.row.norm_in_turns import InTurnsConfig, NormInTurns


@dataclass(frozen=True)
class DenseConfig(InTurnsConfig):
    """A norm of dense rows, whatever their length.

    The tile's vectors are those of all rows of a CTA. words: of 32 bits, that a thread has of a
    row; the first and the last of a row lie partly in its neighbours.
    """

    words: int = 1


@dataclass(frozen=True)
class Words:
    """The words of a row that one thread has: `per` elements each, the first word `lead` of them
    before the row of `n` columns."""

    threads: int
    count: int
    per: int
    lead: Int32
    n: Int32

    def column(self, word: int) -> Int32:
        """The first column of a word; -1 if that lies before the row."""
        return Int32(self.number(word) * self.per - self.lead)

    def number(self, word: int) -> Int32:
        """Which of the row's words it is."""
        return Int32(cute.arch.thread_idx()[0] % self.threads + word * self.threads)

    def is_edge(self, word: int) -> bool:
        """Whether elements of it may lie outside of the row."""
        return word in (0, self.count - 1)

    def is_whole(self, word: int) -> Boolean:
        first = self.column(word)
        return (first >= 0) & (first + self.per <= self.n)

    def holds(self, word: int, element: int) -> Boolean:
        column = self.column(word) + element
        return (column >= 0) & (column < self.n)

    def own(self) -> Float32:
        """How many columns of the row this thread has."""
        found = Float32(0)
        for word in range(self.count):
            for element in range(self.per):
                found += self.holds(word, element).to(Float32) if self.is_edge(word) else 1.0
        return found

    @cute.jit
    def load(self, sX: cute.Tensor, begin: Int32, exists: Boolean) -> cute.Tensor:
        """The elements of the row at sX[begin] in registers; 0 where there are none."""
        rX = cute.make_rmem_tensor(self.count * self.per, sX.element_type)
        rX.fill(0)
        rWords, sWords = (cute.recast_tensor(x, Int32) for x in (rX, sX))
        first = (begin - self.lead) // self.per
        for word in cutlass.range_constexpr(self.count):
            if cutlass.const_expr(not self.is_edge(word)):
                if exists:
                    rWords[word] = sWords[first + self.number(word)]
            elif exists & self.is_whole(word):
                rWords[word] = sWords[first + self.number(word)]
            elif exists:
                for i in cutlass.range_constexpr(self.per):
                    if self.holds(word, i):
                        rX[word * self.per + i] = sX[begin + self.column(word) + i]
        return rX

    @cute.jit
    def store(self, rX: cute.Tensor, sX: cute.Tensor, begin: Int32) -> None:
        """Write the elements of the row to sX[begin] and behind it."""
        rWords, sWords = (cute.recast_tensor(x, Int32) for x in (rX, sX))
        first = (begin - self.lead) // self.per
        for word in cutlass.range_constexpr(self.count):
            if cutlass.const_expr(not self.is_edge(word)) or self.is_whole(word):
                sWords[first + self.number(word)] = rWords[word]
            else:
                for i in cutlass.range_constexpr(self.per):
                    if self.holds(word, i):
                        sX[begin + self.column(word) + i] = rX[word * self.per + i]

    @cute.jit
    def weights(self, mW: cute.Tensor) -> cute.Tensor:
        """The elements of mW (N) in these columns, in registers; 0 where there are none."""
        rW = cute.make_rmem_tensor(self.count * self.per, mW.element_type)
        rW.fill(0)
        for word in cutlass.range_constexpr(self.count):
            for i in cutlass.range_constexpr(self.per):
                if cutlass.const_expr(not self.is_edge(word)) or self.holds(word, i):
                    rW[word * self.per + i] = mW[self.column(word) + i]
        return rW

    @cute.jit
    def where_held(self, x: Any) -> Any:
        """x, 0 outside of the row."""
        rX = cute.make_rmem_tensor(self.count * self.per, Float32)
        rX.store(x)
        for word in cutlass.range_constexpr(self.count):
            if cutlass.const_expr(self.is_edge(word)):
                for i in cutlass.range_constexpr(self.per):
                    at = word * self.per + i
                    rX[at] = cutlass.select_(self.holds(word, i), rX[at], Float32(0))
        return rX.load()


class NormDense(NormInTurns):
    """The norm of dense rows, without a residual. All rows of a CTA are on their way to smem
    (cp.async) before the first is looked at; the norm takes the place of the row there."""

    title = "norm_dense"

    def __init__(self, config: DenseConfig) -> None:
        super().__init__(config)
        tile = config.tile
        if tile.rows % 2:
            raise ValueError("a CTA has an even number of dense rows at one time")

    @property
    def chunk(self) -> RowTile:
        """The tile of all rows of a CTA as one."""
        return replace(self.tile, rows=1, threads=self.tile.num_threads)

    @property
    def group(self) -> int:
        """The threads of a warp that share a row."""
        return min(self.tile.threads, WARP)

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, mY: cute.Tensor, optional: dict[str, cute.Tensor], eps: Float32
    ) -> None:
        c, tile, chunk = self.config, self.tile, self.chunk
        sums = reductions(tile, *c.reduced, repeated=True)[0]
        slots = cute.make_layout(chunk.threads * chunk.vectors * chunk.width)
        sX = SmemAllocator().allocate_tensor(mX.element_type, slots, VECTOR_BYTES)
        first = Int32(cute.arch.block_idx()[0] * (tile.rows * c.turns))
        rows, n = (Int32(cute.size(mX, mode=[i])) for i in range(2))
        count = cutlass.min(rows - first, tile.rows * c.turns)
        gX, gY = (run(m, first, count) for m in (mX, mY))
        columns = Columns.of(chunk, gX)
        between = (first > 0) & (first + count < rows) & (n >= chunk.width)
        in_smem.fetch(columns, gX, sX, between)
        shift = Int32(cute.arch.thread_idx()[0] * chunk.width) - columns.first
        own = Int32(cute.arch.thread_idx()[0] // tile.threads)
        per = 32 // mX.element_type.width
        # NOTE: the same in all turns, since an even number of rows lies between them
        words = Words(tile.threads, c.words, per, (shift + own * n) % per, n)
        held = {name: words.weights(optional[name]) for name in c.vectors}
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        of_warp = lanes((words.own(),), add, self.group)[0] if c.centred else Float32(0)
        for turn in cutlass.range(c.turns, unroll=1):
            row = turn * tile.rows + own
            exists, begin = row < count, shift + row * n
            rX = words.load(sX, begin, exists)
            x = rX.load().to(Float32)
            mean, squares = self.moments_of(x, words, of_warp, sums, turn)
            rstd = cute.math.rsqrt(squares / Float32(n) + eps)
            y = (x - mean if c.centred else x) * rstd
            if cutlass.const_expr(c.weight):
                y = y * held["weight"].load().to(Float32)
            if cutlass.const_expr(c.bias):
                y = y + held["bias"].load().to(Float32)
            rX.store(y.to(sX.element_type))
            if exists:
                words.store(rX, sX, begin)
                this = ThisRow(first + row, rows)
                found = Normed(this, Columns(tile, n, Int32(0)), None, None, mean, rstd)
                self.store_rest(found, optional)
        cute.arch.sync_threads()
        in_smem.store(columns, sX, gY)

    def moments_of(
        self, x: Any, words: Words, of_warp: Float32, sums: RowReduction, turn: Int32
    ) -> tuple[Any, Any]:
        """The mean of the row of which this thread has x, 0 outside of it, and its warp `of_warp`
        columns, and the sum of squares of the differences from it; an RMS norm's mean is 0. Within
        a warp the mean comes first, then the squares; warps meet once, with both."""
        c = self.config

        def summed(values: Any) -> Float32:
            own = values.reduce(cute.ReductionOp.ADD, Float32(0), 0)
            return lanes((own,), add, self.group)[0]

        if not c.centred:
            return Float32(0), sums.of_warps((summed(x * x),), add, turn, c.turns)[0]
        mean = summed(x) / cute.arch.fmax(of_warp, Float32(1))
        d = words.where_held(x - mean)
        _, mean, squares = sums.of_warps((of_warp, mean, summed(d * d)), merged, turn, c.turns)
        return mean, squares


def run(mX: cute.Tensor, first: Int32, count: Int32) -> cute.Tensor:
    """So many rows of mX (M, N), which is dense, from the first on, as one (count * N)."""
    return cute.make_tensor(
        mX[first, None].iterator, cute.make_layout(count * Int32(cute.size(mX, mode=[1])))
    )
