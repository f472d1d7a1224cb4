"""The columns of a vector-aligned row in smem, dealt to its threads as vectors."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from cutex.device.row.tile import VECTOR_BYTES
from cutex.device.row.words import Words


@dataclass(frozen=True)
class VectorWords(Words):
    """One thread's words of a row that starts its slot, `vector` consecutive words at a time.

    The row is alone in its slot and consists of whole vectors, so only the last `open` vectors of a
    thread may be past its end. This takes fewer instructions than `Words`: no vector is partial,
    and all slot offsets are known when the kernel is compiled."""

    vector: int = 4

    def number(self, word: int) -> Int32:
        turn, place = divmod(word, self.vector)
        thread = cute.arch.thread_idx()[0] % self.threads + turn * self.threads
        return Int32(thread * self.vector + place)

    def is_edge(self, word: int) -> bool:
        return (self.count - word - 1) // self.vector < self.open

    def is_begun(self, word: int) -> Boolean:
        """Whether a word's vector is inside the row."""
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
        """Load this thread's vectors from a slot, or from a vector of columns; 0 outside the
        row."""
        for i in cutlass.range_constexpr(self.count // self.vector):
            self.fetch_vector(self.own_vector(rX, i), sX, i)

    @cute.jit
    def fetch_vector(self, own: cute.Tensor, sX: cute.Tensor, i: cutlass.Constexpr[int]) -> None:
        """Load this thread's vector i into `own`; 0 outside the row."""
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
        """Write `own` as this thread's vector i."""
        edge = cutlass.const_expr(self.is_edge(i * self.vector))
        if cutlass.const_expr(not edge) or self.is_begun(i * self.vector):
            cute.autovec_copy(own, self.vector_of(sX, i))

    def own_vector(self, rX: cute.Tensor, i: int) -> cute.Tensor:
        """Vector i of rX, this thread's elements (V)."""
        return cute.local_tile(rX, (self.vector * self.per,), (i,))

    def vector_of(self, sX: cute.Tensor, i: int) -> cute.Tensor:
        """This thread's vector i of a slot, or of a vector of columns (V)."""
        elements, iterator = self.vector * self.per, sX.iterator
        start = (iterator + self.number(i * self.vector) * self.per).toint()
        align = min(VECTOR_BYTES, elements * sX.element_type.width // 8)
        p = cute.make_ptr(sX.element_type, start, iterator.memspace, assumed_align=align)
        return cute.make_tensor(p, cute.make_layout(elements))
