"""Rows of dense matrices, bulk-copied one at a time by persistent CTAs."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.row.bulk import BulkRing, Run, lead_of
from cutex.device.row.tile import RowTile
from cutex.device.row.vector_words import VectorWords
from cutex.device.row.words import Words


@dataclass(frozen=True)
class PackedRows:
    """Rows of dense (M, N) matrices with equal alignment, processed one at a time by a CTA, or by a
    cluster whose CTAs each take a part. A thread holds `count` 32-bit words of a row.

    vector: the words of a vector where rows start on a vector boundary; of a thread's vectors the
    last `open` may be past the row's end. 0: rows start anywhere."""

    tile: RowTile
    count: int
    vector: int = 0
    open: int = 0

    def elements(self, bits: int) -> int:
        """The elements of this many bits that a slot has room for."""
        return self.tile.num_threads * self.count * 32 // bits

    def words(self, mX: cute.Tensor, group: Int32) -> Words:
        """This thread's words, valid for all rows of a group: an even number of rows apart, they
        have the same offset from a word."""
        first, parts = self.run(mX, group), self.tile.ctas > 1
        per = 32 // mX.element_type.width
        lead, columns = first.lead & (per - 1), Int32(cute.size(first.gX))
        if self.vector:
            how = Int32(0), columns, self.open, True, self.vector
            return VectorWords(self.tile.threads, self.count, per, *how)
        return Words(self.tile.threads, self.count, per, lead, columns, 1 + parts, True)

    def column(self, n: Int32) -> Int32:
        """The first column of this CTA's part of a row of n."""
        if self.tile.ctas == 1:
            return Int32(0)
        return self.part(n) * Int32(cute.arch.block_idx_in_cluster())

    def part(self, n: Int32) -> Int32:
        """The columns of each CTA's part of a row of n, except the last: a multiple of 8."""
        return cute.ceil_div(cute.ceil_div(n, self.tile.ctas), 8) * 8

    def begin(self, mX: cute.Tensor, row: Int32) -> Int32:
        """The offset in its slot of this CTA's part of a row of mX (M, N), in elements."""
        n = Int32(cute.size(mX, mode=[1]))
        return lead_of(mX, row * n + self.column(n))

    def run(self, mX: cute.Tensor, row: Int32, like: cute.Tensor | None = None) -> Run:
        """This CTA's part of a row of mX (M, N), at the slot offset of `like`'s."""
        rows, n = (Int32(cute.size(mX, mode=[i])) for i in range(2))
        column, count = self.column(n), n
        if self.tile.ctas > 1:
            count = cutlass.min(self.part(n), n - column)
        gX = cute.make_tensor(mX[row, None].iterator + column, cute.make_layout(count))
        last = (row + 1 >= rows) & (column + count >= n)
        lead = self.begin(mX if like is None else like, row)
        return Run(gX, lead, (row > 0) | (column > 0), ~last, self.vector > 0)

    @cute.jit
    def fetch(self, mX: cute.Tensor, row: Int32, ring: BulkRing, turn: Int32 | int) -> None:
        """Start the copy of a row into its slot; nothing past the last row."""
        if (row < cute.size(mX, mode=[0])) & (cute.arch.thread_idx()[0] == 0):
            ring.load(self.run(mX, row), turn)

    def group(
        self, words: Words, slot: cute.Tensor, begin: Int32, first: int, count: int
    ) -> list[Float32]:
        """The elements of `count` words, from word `first` on, of the row at offset `begin` of a
        slot, in fp32; 0 outside the row. If rows are vectors: of one vector."""
        if isinstance(words, VectorWords):
            rX = cute.make_rmem_tensor(count * words.per, slot.element_type)
            words.fetch_vector(rX, cute.domain_offset((begin,), slot), first // self.vector)
            return [x for word in range(count) for x in words.pair(rX, word)]
        return [
            x for word in range(first, first + count) for x in self.pair(words, slot, begin, word)
        ]

    def pair(self, words: Words, slot: cute.Tensor, begin: Int32, word: int) -> list[Float32]:
        """The elements of one word of the row at offset `begin` of a slot, in fp32; 0 outside the
        row."""
        rX = cute.make_rmem_tensor(words.per, slot.element_type)
        rX_words = cute.recast_tensor(rX, Int32)
        rX_words[0] = words.loaded(words.own_words(slot, begin), word)
        return words.pair(rX, 0)

    def keep(
        self, words: Words, found: list[Float32], slot: cute.Tensor, begin: Int32, first: int
    ) -> None:
        """Write the elements of the words from `first` on back to their place in a slot."""
        rY = cute.make_rmem_tensor(len(found), Float32)
        for i, x in enumerate(found):
            rY[i] = x
        rOut = cute.make_rmem_tensor(len(found), slot.element_type)
        rOut.store(rY.load().to(slot.element_type))
        if isinstance(words, VectorWords):
            words.keep_vector(rOut, cute.domain_offset((begin,), slot), first // self.vector)
        else:
            self.keep_words(words, cute.recast_tensor(rOut, Int32), slot, begin, first)

    @cute.jit
    def keep_words(
        self, words: Words, rWords: cute.Tensor, slot: cute.Tensor, begin: Int32,
        first: cutlass.Constexpr[int],
    ) -> None:  # fmt: skip
        """Write the words rWords, from `first` on, back to their place in a slot."""
        own = words.own_words(slot, begin)
        for i in cutlass.range_constexpr(cute.size(rWords)):
            word = first + i
            if cutlass.const_expr(not words.is_edge(word)) or words.is_begun(word):
                own[word] = rWords[i]
