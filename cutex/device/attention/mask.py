"""Mask: which scores of a block of an accumulator count, as one keep-word per row.

In a row of a wgmma accumulator a thread holds columns 8 j + 2 t + {0, 1} of every 8, where t is its
place among the four threads of the row; of an accumulator in tensor memory it holds whole rows. The
number of its columns below a bound is arithmetic on the bound, so a row's keep-word takes two
shifts, whatever the width of the block, and each score one select.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.atoms.scalar import low_bits
from cutex.device.attention.block_info import Band

WORD = 32


def count_below(bound: Int32, quad: Int32 | None) -> Int32:
    """The number of columns of this thread, counted from its first, that are below `bound`."""
    bound = cutlass.max(bound, 0)
    if quad is None:
        return bound
    return bound // 8 * 2 + cutlass.min(cutlass.max(bound % 8 - 2 * quad, 0), 2)


class Mask(NamedTuple):
    """The keys that the rows of one thread may see.

    `queries` are the query indices of the thread's rows; `quad` is the thread's place among the
    four threads of a row, None where a thread holds whole rows.
    """

    band: Band
    tile_n: int
    seqlen_q: Int32
    seqlen_k: Int32
    queries: tuple[Int32, ...]
    quad: Int32 | None = None

    def key(self, c: int, n_block: Int32) -> Int32:
        """The index of the key in this thread's column c."""
        if self.quad is None:
            return n_block * self.tile_n + c
        return n_block * self.tile_n + 2 * self.quad + self.step(c)

    def step(self, c: int) -> int:
        """How many keys this thread's column c is after its first."""
        return c if self.quad is None else 8 * (c // 2) + c % 2

    def diagonal(self, r: int) -> Int32:
        """The key that is aligned with the query of row r."""
        return self.seqlen_k - self.seqlen_q + self.queries[r]

    @property
    def has_begin(self) -> bool:
        """Whether a row may see keys only from some key on."""
        return self.band.lo is not None

    @cute.jit
    def apply(self, scores: cute.Tensor, n_block: Int32, column: int = 0) -> None:
        """Set the `scores` (rows, columns) that do not count to -inf; they are this thread's
        columns of block `n_block` from `column` on."""
        hide(self, scores, n_block * self.tile_n + column)

    @cute.jit
    def seen(self, r: cutlass.Constexpr[int], n_block: Int32, columns: int) -> Int32:
        """How many of this thread's first `columns` columns of block `n_block` row r sees."""
        end, begin = self._bounds(r, n_block * self.tile_n)
        seen = cutlass.min(count_below(end, self.quad), columns)
        if cutlass.const_expr(self.has_begin):
            seen -= cutlass.min(count_below(begin, self.quad), seen)
        return seen

    def _bounds(self, r: int, first_key: Int32) -> tuple[Int32, Int32]:
        """The keys that row r sees, as an (end, begin) pair relative to `first_key`."""
        shift = self.diagonal(r)
        end, begin = self.seqlen_k, Int32(0)
        if self.band.hi is not None:
            end = cutlass.min(end, shift + self.band.hi + 1)
        if self.band.lo is not None:
            begin = cutlass.max(shift + self.band.lo, 0)
        return end - first_key, begin - first_key


class KeyMask(NamedTuple):
    """The queries that may see the keys that are the rows of one thread, in a block of transposed
    scores; its columns are tile_m queries."""

    band: Band
    tile_m: int
    seqlen_q: Int32
    seqlen_k: Int32
    keys: tuple[Int32, ...]
    quad: Int32 | None = None

    @property
    def has_begin(self) -> bool:
        """Whether a key may be seen only from some query on."""
        return self.band.hi is not None

    @cute.jit
    def apply(self, scores: cute.Tensor, m_block: Int32) -> None:
        """Set the `scores` (rows, columns) of block `m_block` that do not count to -inf."""
        hide(self, scores, m_block * self.tile_m)

    def _bounds(self, r: int, first_query: Int32) -> tuple[Int32, Int32]:
        """The queries that see the key of row r, as an (end, begin) pair relative to
        `first_query`."""
        key = self.keys[r]
        shift = key - (self.seqlen_k - self.seqlen_q)
        end, begin = self.seqlen_q, Int32(0)
        if self.band.lo is not None:
            end = cutlass.min(end, shift - self.band.lo + 1)
        if self.band.hi is not None:
            begin = cutlass.max(shift - self.band.hi, 0)
        exists = cutlass.min(cutlass.max(self.seqlen_k - key, 0), 1)
        return exists * (end - first_query), begin - first_query


@cute.jit
def hide(mask: Mask | KeyMask, scores: cute.Tensor, first: Int32) -> None:
    """Set the `scores` (rows, columns) outside of the mask's bounds to -inf; `first` is the index
    of column 0."""
    num_columns = cute.size(scores, mode=[1])
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        end, begin = mask._bounds(r, first)
        below = count_below(end, mask.quad)
        if cutlass.const_expr(mask.has_begin):
            before = count_below(begin, mask.quad)
        for word in cutlass.range_constexpr((num_columns + WORD - 1) // WORD):
            keep = low_bits(cutlass.max(below - word * WORD, 0))
            if cutlass.const_expr(mask.has_begin):
                keep &= ~low_bits(cutlass.max(before - word * WORD, 0))
            for bit in cutlass.range_constexpr(min(WORD, num_columns - word * WORD)):
                c = word * WORD + bit
                kept = (keep & (1 << bit)) != 0
                scores[r, c] = scores[r, c] if kept else -Float32.inf
