"""Rows that lie one behind the other, of which CTAs that stay take one in turn by bulk copies."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.row.bulk import BulkRing, Run
from cutex.device.row.tile import RowTile
from cutex.device.row.words import Words


@dataclass(frozen=True)
class PackedRows:
    """The rows of dense matrices (M, N) that begin alike, of each of which a CTA has one, or its
    cluster one and it a part; `count` words of 32 bits of it are a thread's."""

    tile: RowTile
    count: int

    def elements(self, bits: int) -> int:
        """The elements of so many bits that a slot has room for."""
        return self.tile.num_threads * self.count * 32 // bits

    def words(self, mX: cute.Tensor, group: Int32) -> Words:
        """This thread's words of all rows of a group, which begin alike to a word, since an even
        number of rows lies between them."""
        first, parts = self.run(mX, group), self.tile.ctas > 1
        per = 32 // mX.element_type.width
        lead, columns = first.lead & (per - 1), Int32(cute.size(first.gX))
        return Words(self.tile.threads, self.count, per, lead, columns, 1 + parts, True)

    def column(self, n: Int32) -> Int32:
        """The first column of this CTA's part of a row of n."""
        if self.tile.ctas == 1:
            return Int32(0)
        return self.part(n) * Int32(cute.arch.block_idx_in_cluster())

    def part(self, n: Int32) -> Int32:
        """The columns of a CTA's part of a row of n, but for the last part: a multiple of 8."""
        return cute.ceil_div(cute.ceil_div(n, self.tile.ctas), 8) * 8

    def run(self, mX: cute.Tensor, row: Int32) -> Run:
        """This CTA's part of a row of mX (M, N)."""
        rows, n = (Int32(cute.size(mX, mode=[i])) for i in range(2))
        column, count = self.column(n), n
        if self.tile.ctas > 1:
            count = cutlass.min(self.part(n), n - column)
        gX = cute.make_tensor(mX[row, None].iterator + column, cute.make_layout(count))
        last = (row + 1 >= rows) & (column + count >= n)
        return Run.of(gX, (row > 0) | (column > 0), ~last)

    @cute.jit
    def fetch(self, mX: cute.Tensor, row: Int32, ring: BulkRing, turn: Int32 | int) -> None:
        """Start the copy of a row to its slot; none behind the last."""
        if (row < cute.size(mX, mode=[0])) & (cute.arch.thread_idx()[0] == 0):
            ring.load(self.run(mX, row), turn)

    def pair(self, words: Words, slot: cute.Tensor, begin: Int32, word: int) -> list[Float32]:
        """The elements of a word of the row at element `begin` of a slot, in fp32; 0 outside."""
        rX = cute.make_rmem_tensor(words.per, slot.element_type)
        rX_words = cute.recast_tensor(rX, Int32)
        rX_words[0] = words.loaded(cute.recast_tensor(slot, Int32), begin, word)
        return words.pair(rX, 0)

    @cute.jit
    def keep(
        self, words: Words, found: list[Float32], slot: cute.Tensor, begin: Int32,
        first: cutlass.Constexpr[int],
    ) -> None:  # fmt: skip
        """Write elements, those of words from `first` on, to their place in a slot."""
        rY = cute.make_rmem_tensor(len(found), Float32)
        for i in cutlass.range_constexpr(len(found)):
            rY[i] = found[i]
        rOut = cute.make_rmem_tensor(len(found), slot.element_type)
        rOut.store(rY.load().to(slot.element_type))
        rWords, sWords = (cute.recast_tensor(x, Int32) for x in (rOut, slot))
        for i in cutlass.range_constexpr(len(found) // words.per):
            word = first + i
            if cutlass.const_expr(not words.is_edge(word)) or words.is_begun(word):
                sWords[words.place(begin, word)] = rWords[i]
