"""The columns of a row of any alignment in smem, dealt to its threads as 32-bit words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int16, Int32, cute

HIGH = -65536  # the upper half of a word


@dataclass(frozen=True)
class Words:
    """One thread's 32-bit words of a row of `n` columns, `per` elements each.

    The first word holds `lead` elements that precede the row. All words are full except the first
    and the last `open`. alone: nobody else uses the other elements of the row's first and last
    word, and the row exists."""

    threads: int
    count: int
    per: int
    lead: Int32
    n: Int32
    open: int = 1
    alone: bool = False

    def column(self, word: int) -> Int32:
        """The first column of a word; -1 if it is before the row."""
        return Int32(self.number(word) * self.per - self.lead)

    def number(self, word: int) -> Int32:
        """The word's index in the row."""
        return Int32(cute.arch.thread_idx()[0] % self.threads + word * self.threads)

    def is_edge(self, word: int) -> bool:
        """Whether elements of a word may be outside the row."""
        return word == 0 or word >= self.count - self.open

    def is_whole(self, word: int) -> Boolean:
        first = self.column(word)
        return (first >= 0) & (first + self.per <= self.n)

    def holds(self, word: int, element: int) -> Boolean:
        column = self.column(word) + element
        return (column >= 0) & (column < self.n)

    def own(self) -> Float32:
        """The number of the row's columns that this thread holds."""
        found = Float32(0)
        for word in range(self.count):
            for element in range(self.per):
                found += self.holds(word, element).to(Float32) if self.is_edge(word) else 1.0
        return found

    def load(self, sX: cute.Tensor, begin: Int32, exists: Boolean) -> cute.Tensor:
        """Load this thread's elements of the row at sX[begin]; 0 outside the row."""
        rX = cute.make_rmem_tensor(self.count * self.per, sX.element_type)
        (self.load_alone if self.alone else self.load_shared)(rX, sX, begin, exists)
        return rX

    def store(self, rX: cute.Tensor, sX: cute.Tensor, begin: Int32) -> None:
        """Store this thread's elements to the row at sX[begin]."""
        (self.store_alone if self.alone else self.store_shared)(rX, sX, begin)

    @cute.jit
    def load_alone(self, rX: cute.Tensor, sX: cute.Tensor, begin: Int32, exists: Boolean) -> None:
        rWords, own = cute.recast_tensor(rX, Int32), self.own_words(sX, begin)
        for word in cutlass.range_constexpr(self.count):
            rWords[word] = self.loaded(own, word)

    @cute.jit
    def loaded(self, own: cute.Tensor, word: cutlass.Constexpr[int]) -> Int32:
        """A word of `own`, the words of a row that is alone in its slot, with bits outside the row
        cleared."""
        if cutlass.const_expr(not self.is_edge(word)):
            return own[word]
        return self.begun(own, word) & self.mask(word)

    @cute.jit
    def begun(self, own: cute.Tensor, word: cutlass.Constexpr[int]) -> Int32:
        """A word as it is in smem, neighbours included in the first and last; 0 past the row's
        end."""
        found = Int32(0)
        if self.is_begun(word):
            found = own[word]
        return found

    @cute.jit
    def load_again(self, sX: cute.Tensor, begin: Int32, exists: Boolean) -> cute.Tensor:
        """The thread's elements, read again to be changed and stored one by one; for a row alone in
        its slot, the first and last word include the neighbouring elements."""
        rX = cute.make_rmem_tensor(self.count * self.per, sX.element_type)
        if cutlass.const_expr(not self.alone):
            self.load_shared(rX, sX, begin, exists)
        else:
            rWords, own = cute.recast_tensor(rX, Int32), self.own_words(sX, begin)
            for word in cutlass.range_constexpr(self.count):
                edge = cutlass.const_expr(self.is_edge(word))
                rWords[word] = self.begun(own, word) if edge else own[word]
        return rX

    @cute.jit
    def store_alone(self, rX: cute.Tensor, sX: cute.Tensor, begin: Int32) -> None:
        rWords, own = cute.recast_tensor(rX, Int32), self.own_words(sX, begin)
        for word in cutlass.range_constexpr(self.count):
            if cutlass.const_expr(not self.is_edge(word)) or self.is_begun(word):
                own[word] = rWords[word]

    @cute.jit
    def load_shared(self, rX: cute.Tensor, sX: cute.Tensor, begin: Int32, exists: Boolean) -> None:
        rX.fill(0)
        rWords, own = cute.recast_tensor(rX, Int32), self.own_words(sX, begin)
        for word in cutlass.range_constexpr(self.count):
            if cutlass.const_expr(not self.is_edge(word)):
                if exists:
                    rWords[word] = own[word]
            elif exists & self.is_whole(word):
                rWords[word] = own[word]
            elif exists:
                for i in cutlass.range_constexpr(self.per):
                    if self.holds(word, i):
                        rX[word * self.per + i] = sX[begin + self.column(word) + i]

    @cute.jit
    def store_shared(self, rX: cute.Tensor, sX: cute.Tensor, begin: Int32) -> None:
        rWords, own = cute.recast_tensor(rX, Int32), self.own_words(sX, begin)
        for word in cutlass.range_constexpr(self.count):
            if cutlass.const_expr(not self.is_edge(word)) or self.is_whole(word):
                own[word] = rWords[word]
            else:
                for i in cutlass.range_constexpr(self.per):
                    if self.holds(word, i):
                        sX[begin + self.column(word) + i] = rX[word * self.per + i]

    def own_words(self, sX: cute.Tensor, begin: Int32) -> cute.Tensor:
        """This thread's words of the row at sX[begin] (WORD); begin - lead is a whole number of
        words."""
        first = (begin - self.lead >> self.per // 2) + self.number(0)
        own = cute.make_layout(self.count, stride=self.threads)
        return cute.make_tensor(cute.recast_tensor(sX, Int32).iterator + first, own)

    def mask(self, word: int) -> Int32:
        """The mask of a word's bits that are inside the row."""
        bits = 32 // self.per
        found = Int32(0)
        for i in range(self.per):
            own = (1 << bits) - 1 << i * bits
            own -= (own >> 31) << 32  # of 32 bits with a sign
            found |= cutlass.select_(self.holds(word, i), Int32(own), Int32(0))
        return found

    def is_begun(self, word: int) -> Boolean:
        """Whether a word starts before the end of the row."""
        return self.column(word) < self.n

    @cute.jit
    def weights(self, mW: cute.Tensor) -> cute.Tensor:
        """The elements of mW (N) in these columns, in registers; 0 outside the row."""
        rW = cute.make_rmem_tensor(self.count * self.per, mW.element_type)
        rW.fill(0)
        for word in cutlass.range_constexpr(self.count):
            for i in cutlass.range_constexpr(self.per):
                if cutlass.const_expr(not self.is_edge(word)) or self.holds(word, i):
                    rW[word * self.per + i] = mW[self.column(word) + i]
        return rW

    def elements(self, rX: cute.Tensor) -> list[Float32]:
        """The elements of the thread's words rX, in fp32."""
        return [x for word in range(self.count) for x in self.pair(rX, word)]

    def pair(self, rX: cute.Tensor, word: int) -> list[Float32]:
        """The elements of one word of rX, in fp32."""
        if self.per == 2 and rX.element_type is BFloat16:
            return halves(cute.recast_tensor(rX, Int32)[word], BFloat16)
        return [Float32(rX[word * self.per + i]) for i in range(self.per)]

    def where_held(self, x: list[Float32]) -> list[Float32]:
        """x, with 0 outside the row."""
        found = [*x]
        for word in range(self.count):
            if self.is_edge(word):
                for i in range(self.per):
                    at = word * self.per + i
                    found[at] = cutlass.select_(self.holds(word, i), x[at], Float32(0))
        return found


def halves(word: Int32, dtype: Any) -> list[Float32]:
    """The two elements of a word in fp32; one instruction each for bf16."""
    if dtype is BFloat16:
        return [(word << 16).bitcast(Float32), (word & HIGH).bitcast(Float32)]
    return [Float32(Int16(half).bitcast(dtype)) for half in (word, word >> 16)]
