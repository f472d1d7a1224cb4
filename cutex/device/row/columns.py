"""The columns of a row that a thread holds: loads to registers, and stores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.device.row.tile import VECTOR_BYTES, RowTile

LOW_HALVES, MIDDLE_HALVES = 0x3210, 0x5432  # selectors of prmt: a word, and the one 16 bits further


@dataclass(frozen=True)
class Columns:
    """The vectors of a row of `n` elements that one thread holds.

    A row that is not `aligned` starts in the middle of a vector of gmem. Its vectors are those of
    gmem; the partial ones at its two ends are stored element by element. They are loaded whole
    where the memory beside the row may be read, since element loads would wait for the warp's
    vector loads (docs/facts/rows.md#rows-ends-loaded-whole).
    """

    tile: RowTile
    n: Int32
    first: Int32  # the column of the first vector; negative if that begins before the row

    @staticmethod
    def of(tile: RowTile, gX: cute.Tensor) -> Columns:
        """This thread's columns of gX (N), and of every row with the same offset from a vector."""
        first = thread_of(tile) * tile.width
        if not tile.aligned:
            bytes_ = gX.element_type.width // 8
            first -= Int32(gX.iterator.toint() // bytes_ % tile.width)
        return Columns(tile, cute.size(gX), first)

    def moved(self, chunk: Int32) -> Columns:
        """The same thread's columns `chunk` tiles further on, in a row longer than a tile."""
        first = self.first + chunk * (self.step * self.tile.vectors)
        return replace(self, tile=replace(self.tile, inner=False), first=first)

    def cut(self, n: Int32) -> Columns:
        """These columns, limited to the first `n` of the row."""
        return replace(self, tile=replace(self.tile, inner=False), n=n)

    def where(self, exists: Boolean) -> Columns:
        """These columns if the row exists, otherwise none."""
        return self.cut(Int32(cutlass.select_(exists, Int32(self.n), Int32(0))))

    @property
    def step(self) -> int:
        """The distance in columns between two consecutive vectors of a thread."""
        return self.tile.threads * self.tile.ctas * self.tile.width

    def may_begin(self, vector: int) -> bool:
        """Whether the row may start in the middle of a vector."""
        return not self.tile.aligned and (vector == 0 or not self.tile.inner)

    def may_end(self, vector: int) -> bool:
        """Whether the row may end before or inside a vector."""
        return vector >= self.tile.vectors - 2 or not self.tile.inner

    def has(self, vector: int) -> Boolean:
        """Whether all of a vector is inside the row."""
        column = self.first + vector * self.step
        if self.tile.aligned:
            return column < self.n
        found = Boolean(True)
        if self.may_begin(vector):
            found = column >= 0
        if self.may_end(vector):
            found = found & (column + self.tile.width <= self.n)
        return found

    def has_element(self, vector: int, element: int) -> Boolean:
        """Whether an element of a vector is inside the row."""
        column = self.first + vector * self.step
        found = Boolean(True)
        if self.may_begin(vector):
            found = column >= -element
        if self.may_end(vector):
            found = found & (self.n - column > element)
        return found

    def holds(self, column: Int32) -> Boolean:
        return (column >= 0) & (column < self.n)

    def overlaps(self, vector: int) -> Boolean:
        """Whether any element of a vector is inside the row."""
        column = self.first + vector * self.step
        if self.tile.inner:
            return column < self.n if self.may_end(vector) else Boolean(True)
        return (column + self.tile.width > 0) & (column < self.n)

    def is_end(self, vector: int) -> Boolean:
        """Whether a vector is partly inside the row and partly outside."""
        return self.overlaps(vector) & ~self.has(vector)

    @cute.jit
    def load(
        self, gX: cute.Tensor, fill: cutlass.Constexpr[Any] = 0, between: Boolean | None = None
    ) -> cute.Tensor:
        """Load this thread's elements of gX (N) into registers (V, NumV), with `fill` outside the
        row.

        between: whether one vector before and one after the row may be read, too."""
        rX = cute.make_rmem_tensor((self.tile.width, self.tile.vectors), gX.element_type)
        rX.fill(fill)
        if cutlass.const_expr(self.tile.aligned or between is None):
            self.fetch(gX, rX)
        else:
            self.fetch_across(gX, rX, fill, between)
        return rX

    @cute.jit
    def fetch_across(
        self, gX: cute.Tensor, rX: cute.Tensor, fill: cutlass.Constexpr[Any], between: Boolean
    ) -> None:
        """Load the elements of gX (N) into rX (V, NumV).

        Partial vectors at its ends are loaded whole and the elements outside set to `fill` if the
        row is `between` others; otherwise they are loaded element by element."""
        tile = self.tile
        for i in cutlass.range_constexpr(tile.vectors):
            if self.has(i) | (between & self.overlaps(i)):
                cute.autovec_copy(self.vector(gX, i), rX[None, i])
        for i in cutlass.range_constexpr(tile.vectors):
            if cutlass.const_expr(self.may_begin(i) or self.may_end(i)):  # noqa: SIM102 (traced)
                if self.is_end(i):
                    if ~between:
                        self.fetch_elements(gX, rX, i)
                    self.fill_outside(rX, i, fill)

    @cute.jit
    def fetch_elements(self, gX: cute.Tensor, rX: cute.Tensor, i: cutlass.Constexpr[int]) -> None:
        """Load the elements of vector i that are inside gX (N), one by one."""
        for j in cutlass.range_constexpr(self.tile.width):
            if self.has_element(i, j):
                rX[j, i] = gX[self.first + i * self.step + j]

    @cute.jit
    def fill_outside(
        self, rX: cute.Tensor, i: cutlass.Constexpr[int], fill: cutlass.Constexpr[Any]
    ) -> None:
        """Set the elements of vector i of rX (V, NumV) that are outside the row to `fill`, by
        masking 32-bit words: one or two instructions each."""
        per = 32 // rX.element_type.width  # elements of a word
        rFill = cute.make_rmem_tensor(per, rX.element_type)
        rFill.fill(fill)
        words, fills = cute.recast_tensor(rX[None, i], Int32), cute.recast_tensor(rFill, Int32)
        for word in cutlass.range_constexpr(self.tile.width // per):
            mask = Int32(0)
            for e in cutlass.range_constexpr(per):
                bits = -1 if per == 1 else (0xFFFF, -0x10000)[e]
                mask |= cutlass.select_(self.has_element(i, word * per + e), Int32(bits), Int32(0))
            words[word] = (words[word] & mask) | (fills[0] & ~mask)

    @cute.jit
    def fetch(self, gX: cute.Tensor, rX: cute.Tensor, whole: Boolean | None = None) -> None:
        """Load the elements of gX (N) into rX (V, NumV); registers outside the row keep their
        values.

        whole: whether all vectors of the tile are inside a row of any alignment."""
        if cutlass.const_expr(self.tile.aligned or whole is None):
            self.fetch_asking(gX, rX)
        elif whole:
            for i in cutlass.range_constexpr(self.tile.vectors):
                cute.autovec_copy(self.vector(gX, i), rX[None, i])
        else:
            self.fetch_asking(gX, rX)

    @cute.jit
    def fetch_asking(self, gX: cute.Tensor, rX: cute.Tensor) -> None:
        """Like `fetch`, with a bounds check for each vector."""
        tile = self.tile
        for i in cutlass.range_constexpr(tile.vectors):
            if self.has(i):
                cute.autovec_copy(self.vector(gX, i), rX[None, i])
            elif cutlass.const_expr(not tile.aligned):  # noqa: SIM102 (the other is traced)
                if self.overlaps(i):
                    self.fetch_elements(gX, rX, i)

    @cute.jit
    def store(self, rX: cute.Tensor, gX: cute.Tensor) -> None:
        """Write rX (V, NumV) to gX (N)."""
        tile = self.tile
        for i in cutlass.range_constexpr(tile.vectors):
            if self.has(i):
                cute.autovec_copy(rX[None, i], self.vector(gX, i))
            elif cutlass.const_expr(not tile.aligned):  # noqa: SIM102 (the other is traced)
                if self.overlaps(i):
                    for j in cutlass.range_constexpr(tile.width):
                        if self.has_element(i, j):
                            gX[self.first + i * self.step + j] = rX[j, i]

    def held(self, mW: cute.Tensor) -> cute.Tensor:
        """This thread's columns of mW (N), a vector of any alignment shared by all rows, in
        registers (V, NumV)."""
        return self.load(mW) if self.tile.aligned else self.realigned(mW)

    @cute.jit
    def realigned(self, mW: cute.Tensor) -> cute.Tensor:
        """The same for rows of any alignment: each vector straddles two vectors of mW and is
        extracted from them; at the ends of mW it is loaded element by element."""
        tile, element = self.tile, mW.element_type
        width, bytes_ = tile.width, mW.element_type.width // 8
        start = (mW.iterator + self.first).toint() // bytes_
        apart = Int32(start % width)  # from a vector of memory to where this one begins
        rBoth = cute.make_rmem_tensor((2 * width, tile.vectors), element)
        rBoth.fill(0)
        rW = cute.make_rmem_tensor((width, tile.vectors), element)
        for i in cutlass.range_constexpr(tile.vectors):
            if self.is_inside(i, apart):
                moved = replace(self, first=self.first - apart)
                for half in cutlass.range_constexpr(2):
                    source = replace(moved, first=moved.first + half * width).vector(mW, i)
                    cute.autovec_copy(source, cute.local_tile(rBoth[None, i], (width,), (half,)))
        for i in cutlass.range_constexpr(tile.vectors):
            words = cute.recast_tensor(rBoth[None, i], Int32)  # (2 words of a vector)
            cut = window([words[k] for k in range(cute.size(words))], apart, element.width)
            rWords = cute.recast_tensor(rW[None, i], Int32)
            for k in cutlass.range_constexpr(len(cut)):
                rWords[k] = cut[k]
            if self.overlaps(i) & (not self.is_inside(i, apart)):
                for j in cutlass.range_constexpr(width):
                    column = self.first + i * self.step + j
                    if self.holds(column):
                        rW[j, i] = mW[column]
        return rW

    def is_inside(self, vector: int, apart: Int32) -> Boolean:
        """Whether both gmem vectors that a vector straddles are inside the row."""
        column = self.first + vector * self.step - apart
        return (column >= 0) & (column + 2 * self.tile.width <= self.n)

    def count(self) -> Int32:
        """The number of the row's elements that this thread holds."""
        found = Int32(0)
        for i in range(self.tile.vectors):
            column = self.first + i * self.step
            end = cutlass.min(column + self.tile.width, self.n)
            found += cutlass.max(end - cutlass.max(column, 0), 0)
        return found

    def squares(self, x: Any) -> Float32:
        """The sum of squares of x (V, NumV) over the columns inside the row."""
        tile, total = self.tile, Float32(0)
        rX = cute.make_rmem_tensor((tile.width, tile.vectors), Float32)
        rX.store(x)
        for i in range(tile.vectors):
            own = Float32(0)
            for j in range(tile.width):
                held = tile.aligned or self.has_element(i, j)
                element = rX[j, i] if tile.aligned else cutlass.select_(held, rX[j, i], Float32(0))
                own += element * element
            total += cutlass.select_(self.has(i), own, Float32(0)) if tile.aligned else own
        return total

    @cute.jit
    def where_held(self, x: Any) -> Any:
        """x (V, NumV), with 0 in columns outside the row."""
        rX = cute.make_rmem_tensor((self.tile.width, self.tile.vectors), Float32)
        rX.store(x)
        for i in cutlass.range_constexpr(self.tile.vectors):
            if not self.has(i):
                for j in cutlass.range_constexpr(self.tile.width):
                    if cutlass.const_expr(self.tile.aligned):
                        rX[j, i] = Float32(0)
                    else:
                        rX[j, i] = cutlass.select_(self.has_element(i, j), rX[j, i], Float32(0))
        return rX.load()

    def is_first_of_row(self) -> Boolean:
        """Whether this is the first of the threads that share the row."""
        first = cute.arch.thread_idx()[0] % self.tile.threads == 0
        if self.tile.ctas > 1:
            first = first & (cute.arch.block_idx_in_cluster() == 0)
        return first

    def zeros(self) -> cute.Tensor:
        """Zeros in fp32 registers (V, NumV)."""
        rX = cute.make_rmem_tensor((self.tile.width, self.tile.vectors), Float32)
        rX.fill(0.0)
        return rX

    def rounded(self, x: Any, mX: cute.Tensor) -> cute.Tensor:
        """x (V, NumV) in registers of mX's type."""
        rX = cute.make_rmem_tensor((self.tile.width, self.tile.vectors), mX.element_type)
        rX.store(x.to(mX.element_type))
        return rX

    def vector(self, gX: cute.Tensor, i: int) -> cute.Tensor:
        """This thread's vector i of gX (N), aligned to its own size."""
        width, bits = self.tile.width, gX.element_type.width
        start = (gX.iterator + (self.first + i * self.step)).toint()
        align = min(width * bits // 8, VECTOR_BYTES)
        p = cute.make_ptr(gX.element_type, start, cute.AddressSpace.gmem, assumed_align=align)
        return cute.make_tensor(p, cute.make_layout(width))


def thread_of(tile: RowTile) -> Int32:
    """The number of a thread among those that share its row."""
    thread = cute.arch.thread_idx()[0] % tile.threads
    if tile.ctas > 1:
        thread += cute.arch.block_idx_in_cluster() * tile.threads
    return Int32(thread)


def window(words: list[Int32], first: Int32, bits: int) -> list[Int32]:
    """Half of the words, starting at element `first` (16 or 32 bits each, in the first half):
    shifts by powers of two words, then by half a word."""
    count = len(words) // 2
    at = first if bits == 32 else first >> 1
    for power in reversed(range((count - 1).bit_length())):
        by = 1 << power
        far = at & by != 0
        words = [cutlass.select_(far, words[i + by], words[i]) for i in range(len(words) - by)]
    if bits == 32:
        return words[:count]
    halves = cutlass.select_(first & 1 != 0, Int32(MIDDLE_HALVES), Int32(LOW_HALVES))
    return [Int32(cute.arch.prmt(words[i], words[i + 1], halves)) for i in range(count)]
