"""The columns of a row in smem that begins with a vector, as vectors that go round its threads."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from cutex.device.row.tile import VECTOR_BYTES
from cutex.device.row.words import Words


@dataclass(frozen=True)
class VectorWords(Words):
    """The words of a row that one thread has, `vector` of them beside each other. The row begins
    with a slot, which is its alone, and is a whole number of vectors, of which only a thread's last
    `open` may lie behind it. Fewer instructions than word by word, since no vector lies across an
    end of the row, and its places in the slot are known."""

    vector: int = 4

    def number(self, word: int) -> Int32:
        turn, place = divmod(word, self.vector)
        thread = cute.arch.thread_idx()[0] % self.threads + turn * self.threads
        return Int32(thread * self.vector + place)

    def is_edge(self, word: int) -> bool:
        return (self.count - word - 1) // self.vector < self.open

    def is_begun(self, word: int) -> Boolean:
        """Whether a word's vector lies in the row."""
        return self.column(word - word % self.vector) < self.n

    def holds(self, word: int, element: int) -> Boolean:
        return self.is_begun(word)

    def load(self, sX: cute.Tensor, begin: Int32, exists: Boolean) -> cute.Tensor:
        rX = cute.make_rmem_tensor(self.count * self.per, sX.element_type)
        self.fetch(rX, cute.domain_offset((begin,), sX))
        return rX

    def load_again(self, sX: cute.Tensor, begin: Int32, exists: Boolean) -> cute.Tensor:
        return self.load(sX, begin, exists)

    def store(self, rX: cute.Tensor, sX: cute.Tensor, begin: Int32) -> None:
        self.keep(rX, cute.domain_offset((begin,), sX))

    def weights(self, mW: cute.Tensor) -> cute.Tensor:
        # mW begins with a vector, too
        rW = cute.make_rmem_tensor(self.count * self.per, mW.element_type)
        self.fetch(rW, mW)
        return rW

    @cute.jit
    def fetch(self, rX: cute.Tensor, sX: cute.Tensor) -> None:
        """Load this thread's vectors of a slot, or of a vector of columns; 0 outside of the row."""
        for i in cutlass.range_constexpr(self.count // self.vector):
            self.fetch_vector(self.own_vector(rX, i), sX, i)

    @cute.jit
    def fetch_vector(self, own: cute.Tensor, sX: cute.Tensor, i: cutlass.Constexpr[int]) -> None:
        """Load vector i of this thread to `own`; 0 outside of the row."""
        if cutlass.const_expr(self.is_edge(i * self.vector)):
            own.fill(0)
            if self.is_begun(i * self.vector):
                cute.autovec_copy(self.vector_of(sX, i), own)
        else:
            cute.autovec_copy(self.vector_of(sX, i), own)

    @cute.jit
    def keep(self, rX: cute.Tensor, sX: cute.Tensor) -> None:
        """Write this thread's vectors to a slot."""
        for i in cutlass.range_constexpr(self.count // self.vector):
            self.keep_vector(self.own_vector(rX, i), sX, i)

    @cute.jit
    def keep_vector(self, own: cute.Tensor, sX: cute.Tensor, i: cutlass.Constexpr[int]) -> None:
        """Write `own` as vector i of this thread."""
        edge = cutlass.const_expr(self.is_edge(i * self.vector))
        if cutlass.const_expr(not edge) or self.is_begun(i * self.vector):
            cute.autovec_copy(own, self.vector_of(sX, i))

    def own_vector(self, rX: cute.Tensor, i: int) -> cute.Tensor:
        """Vector i of rX, the elements of this thread (V)."""
        return cute.local_tile(rX, (self.vector * self.per,), (i,))

    def vector_of(self, sX: cute.Tensor, i: int) -> cute.Tensor:
        """Vector i of this thread in a slot, or in a vector of columns (V)."""
        elements, iterator = self.vector * self.per, sX.iterator
        start = (iterator + self.number(i * self.vector) * self.per).toint()
        align = min(VECTOR_BYTES, elements * sX.element_type.width // 8)
        p = cute.make_ptr(sX.element_type, start, iterator.memspace, assumed_align=align)
        return cute.make_tensor(p, cute.make_layout(elements))
