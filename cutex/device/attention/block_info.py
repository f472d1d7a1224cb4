"""BlockInfo: which blocks of keys a block of queries touches, and which of these need a mask.

Everything follows from one band. Query q of seqlen_q may see key k of seqlen_k where

    lo <= k - q - (seqlen_k - seqlen_q) <= hi

so that the last query is aligned with the last key; None leaves a side open. Causal attention is
Band(None, 0), a sliding window of (left, right) is Band(-left, right). lo is at most hi; both may
lie on one side of the diagonal.

All methods use plain operators and run on Python ints as on the DSL's Int32: the tests compare them
with a boolean matrix, the kernels trace them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import cutlass
from cutlass import Int32

Int: TypeAlias = int | Int32


def smaller(a: Any, b: Any) -> Any:
    """The minimum of two numbers, which may be Python's or the DSL's."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else cutlass.min(a, b)


def larger(a: Any, b: Any) -> Any:
    """The maximum of two numbers, which may be Python's or the DSL's."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else cutlass.max(a, b)


def ceil_div(a: Any, b: int) -> Any:
    """a / b for `a` >= 0, rounded up."""
    return (a + (b - 1)) // b


class Band(NamedTuple):
    """The keys that a query may see, as bounds on k - q - (seqlen_k - seqlen_q)."""

    lo: Int | None = None
    hi: Int | None = None

    @property
    def bounded(self) -> bool:
        return self.lo is not None or self.hi is not None


class Path(NamedTuple):
    """The order in which blocks are visited: `start`, then every `step` (1 or -1) from it.

    turn: how many blocks are visited before block 0, which comes in front of the others that are
    left; None if it is the last of them. Only downwards.
    """

    start: Int
    step: Int
    turn: Int | None = None

    def block(self, i: Int) -> Int:
        if self.turn is None:
            return self.start + self.step * i
        beyond, reached = any_in(self.turn, i), any_in(self.turn, i + 1)
        return (self.start - i + beyond) * (1 - reached + beyond)

    @property
    def first(self) -> Int:
        return self.start if self.turn is None else self.block(0)

    def after(self, count: Int) -> Path:
        """What is left of the path after `count` blocks."""
        turn = None if self.turn is None else self.turn - count
        return Path(self.start + self.step * count, self.step, turn)


class Blocks(NamedTuple):
    """A range of blocks [first, end), of which [clean_first, clean_end) need no mask.

    first <= clean_first <= clean_end <= end.
    """

    first: Int
    end: Int
    clean_first: Int
    clean_end: Int

    def path(self, forwards: Int | None, turn: Int | None = None) -> Path:
        """The path from the last block to the first, or from the first to the last if `forwards` is
        1 (else it is 0 or None), or by `turn` (Path)."""
        if forwards is None:
            return Path(self.end - 1, -1, turn)
        last = self.end - 1
        return Path(last - forwards * (last - self.first), 2 * forwards - 1)

    def turn(self) -> Int:
        """How many blocks, of a range that begins with 0, are visited before block 0 where it is to
        come early: those that need a mask, and at least one."""
        return larger(self.end - self.clean_end, 1)

    def around(self, part: Blocks, forwards: Int | None) -> tuple[Int, Int]:
        """How many blocks of the path precede `part`, and how many follow it."""
        above, below = self.end - part.end, part.first - self.first
        if forwards is None:
            return above, below
        before = above + forwards * (below - above)
        return before, above + below - before

    def runs(self, forwards: Int | None) -> tuple[Int, Int, Int]:
        """The blocks after the first one on the path, in three runs: how many are masked, then
        clean, then masked again."""
        back = _runs_down(self.first, self.end, self.clean_first, self.clean_end)
        if forwards is None:
            return back
        mirrored = _runs_down(-self.end, -self.first, -self.clean_end, -self.clean_first)
        masked, clean, again = (b + forwards * (m - b) for b, m in zip(back, mirrored, strict=True))
        return masked, clean, again


def _runs_down(first: Int, end: Int, clean_first: Int, clean_end: Int) -> tuple[Int, Int, Int]:
    masked = larger(end - 1 - clean_end, 0)
    rest = end - 1 - masked
    again = smaller(clean_first, rest)
    return masked, rest - again, again - first


class BlockInfo(NamedTuple):
    """The relation between blocks of tile_m rows and blocks of tile_n keys.

    `pack` query heads that share a head of K and V share the rows: row r is query r // pack. Rows
    past the last query do not count: a block is clean if its rows within seqlen_q see all tile_n
    keys of it.
    """

    tile_m: int
    tile_n: int
    band: Band = Band()
    pack: int = 1

    def num_m_blocks(self, seqlen_q: Int) -> Int:
        return ceil_div(seqlen_q * self.pack, self.tile_m)

    def num_n_blocks(self, seqlen_k: Int) -> Int:
        return ceil_div(seqlen_k, self.tile_n)

    def queries(self, m_block: Int, seqlen_q: Int) -> tuple[Int, Int]:
        """The first and the last query of `m_block`, which has at least one."""
        first = m_block * self.tile_m // self.pack
        last = ((m_block + 1) * self.tile_m - 1) // self.pack
        return first, smaller(last, seqlen_q - 1)

    def n_blocks(self, m_block: Int, seqlen_q: Int, seqlen_k: Int) -> Blocks:
        """The blocks of keys that the rows of `m_block` touch."""
        first_q, last_q = self.queries(m_block, seqlen_q)
        shift = seqlen_k - seqlen_q
        begin, clean_begin = 0, 0  # of the keys that some row sees; of those that all rows see
        end, clean_end = seqlen_k, seqlen_k
        if self.band.lo is not None:
            begin = larger(first_q + shift + self.band.lo, 0)
            clean_begin = larger(last_q + shift + self.band.lo, 0)
        if self.band.hi is not None:
            end = larger(smaller(last_q + shift + self.band.hi + 1, seqlen_k), 0)
            clean_end = larger(smaller(first_q + shift + self.band.hi + 1, seqlen_k), 0)
        return self._blocks(begin, end, clean_begin, clean_end, self.tile_n)

    def ends_in_first_half(self, m_block: Int, seqlen_q: Int, seqlen_k: Int) -> Int:
        """1 if the rows of `m_block`, which see some key, see none in the second half of the last
        block that they touch, else 0; tile_n is even."""
        halves = self._replace(tile_n=self.tile_n // 2).n_blocks(m_block, seqlen_q, seqlen_k)
        return halves.end % 2

    def m_blocks(self, n_block: Int, seqlen_q: Int, seqlen_k: Int) -> Blocks:
        """The blocks of rows that see a key of `n_block`."""
        first_k = n_block * self.tile_n
        last_k = (n_block + 1) * self.tile_n - 1
        shift = seqlen_k - seqlen_q
        begin, clean_begin = 0, 0  # of the queries that see some key; of those that see all keys
        end, clean_end = seqlen_q, seqlen_q
        if self.band.hi is not None:
            begin = larger(first_k - shift - self.band.hi, 0)
            clean_begin = larger(last_k - shift - self.band.hi, 0)
        if self.band.lo is not None:
            existing = smaller(last_k, seqlen_k - 1)
            end = larger(smaller(existing - shift - self.band.lo + 1, seqlen_q), 0)
            clean_end = larger(smaller(first_k - shift - self.band.lo + 1, seqlen_q), 0)
        blocks = self._rows(begin, end, clean_begin, clean_end, seqlen_q)
        partial = any_in(seqlen_k, last_k + 1)  # a block of fewer keys is not clean
        return blocks._replace(
            clean_first=blocks.clean_first + partial * (blocks.end - blocks.clean_first),
            clean_end=blocks.clean_end + partial * (blocks.end - blocks.clean_end),
        )

    @staticmethod
    def _blocks(begin: Int, end: Int, clean_begin: Int, clean_end: Int, tile: int) -> Blocks:
        """The blocks of `tile` keys that [begin, end) touches; clean are those within [clean_begin,
        clean_end)."""
        first = begin // tile
        last = first + any_in(begin, end) * (ceil_div(end, tile) - first)
        return ordered(first, last, ceil_div(clean_begin, tile), clean_end // tile)

    def _rows(
        self, begin: Int, end: Int, clean_begin: Int, clean_end: Int, seqlen_q: Int
    ) -> Blocks:
        """The blocks of rows that queries [begin, end) touch; the last block of the sequence may be
        clean although it is not full."""
        first = begin * self.pack // self.tile_m
        last = ceil_div(end * self.pack, self.tile_m)
        last = first + any_in(begin, end) * (last - first)
        full = clean_end * self.pack // self.tile_m
        to_the_end = 1 - any_in(clean_end, seqlen_q)
        clean_last = full + to_the_end * (self.num_m_blocks(seqlen_q) - full)
        return ordered(first, last, ceil_div(clean_begin * self.pack, self.tile_m), clean_last)


def any_in(begin: Int, end: Int) -> Int:
    """1 if there is a number in [begin, end), else 0."""
    return smaller(larger(end - begin, 0), 1)


def ordered(first: Int, end: Int, clean_first: Int, clean_end: Int) -> Blocks:
    """Blocks [first, end) with the clean range clamped to them."""
    clean_first = smaller(larger(clean_first, first), end)
    return Blocks(first, end, clean_first, larger(smaller(clean_end, end), clean_first))
