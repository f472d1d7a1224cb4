"""The tiles of packed sequences: only those that exist, the longest sequence's first.

In an order over the blocks of the longest sequence, shorter ones have indices without work, each of
which costs a CTA a round trip through L2, and a long sequence that comes last leaves most SMs idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

LANES = 32


class RankedTile(NamedTuple):
    """A tile of a sequence."""

    block: Int32
    head: Int32
    batch: Int32
    blocks: Int32  # of the sequence


@dataclass(frozen=True)
class Ranked:
    """The plain order's tiles (blocks of a head, heads of a sequence) of sequences by rank."""

    # (batch + 1, 3) by rank: a sequence, and the blocks of those before; the last counts all
    # blocks; by sequence: its rank
    ranks: cute.Tensor
    heads: Int32
    batch: Int32
    most: Int32  # blocks of the longest sequence
    interleaved: bool  # of a sequence, blocks of all heads in turn, not one head after the other
    last_first: bool = False  # blocks from the last to the first
    tail: Any = None  # about how many tiles at the end are interleaved; None: all
    # interleaved heads follow one another in groups that have about so many tiles; None: all in one
    wave: Any = None

    @property
    def total(self) -> Int32:
        return self.before(self.batch)

    def before(self, rank: Int32) -> Int32:
        """The tiles of all sequences before that of a rank."""
        return self.heads * self.ranks[rank, 1]

    @cute.jit
    def rank_of(self, number: Int32) -> Int32:
        """The rank of the sequence of tile `number`. A whole warp calls it."""
        first = Int32(0)
        # NOTE: the tiles before rank `batch` are all, more than `number`
        while self.before(cutlass.min(first + LANES, self.batch)) <= number:
            first += LANES
        begun = self.before(cutlass.min(first + cute.arch.lane_idx(), self.batch)) <= number
        return first + cute.arch.popc(cute.arch.vote_ballot_sync(begun)) - 1

    @cute.jit
    def tile(self, number: Int32) -> RankedTile:
        """Tile `number` where a sequence's heads follow one another. A whole warp calls it."""
        rank = self.rank_of(number)
        batch, blocks = self.ranks[rank, 0], self.ranks[rank + 1, 1] - self.ranks[rank, 1]
        rest = number - self.before(rank)
        return RankedTile(rest % blocks, rest // blocks, batch, blocks)

    def number(self, block: Int32, head: Int32, batch: Int32) -> Int32:
        """The number of a tile where a sequence's heads follow one another."""
        rank = self.ranks[batch, 2]
        blocks = self.ranks[rank + 1, 1] - self.ranks[rank, 1]
        return self.before(rank) + head * blocks + block

    @cute.jit
    def index(self, number: Int32) -> Int32:
        """The plain order's index of tile `number`. A whole warp calls it."""
        ranks, rank = self.ranks, self.rank_of(number)
        batch, blocks = ranks[rank, 0], ranks[rank + 1, 1] - ranks[rank, 1]
        rest = number - self.before(rank)
        if cutlass.const_expr(self.interleaved):
            first, heads = Int32(0), self.heads
            if cutlass.const_expr(self.wave is not None):
                group = cutlass.max((self.wave + blocks - 1) // blocks, 1)
                first = rest // (group * blocks) * group
                heads = cutlass.min(group, heads - first)
            elif cutlass.const_expr(self.tail is not None):
                first = self.heads_in_order(rank, blocks)
                heads -= first
                if rest < first * blocks:
                    first, heads = rest // blocks, Int32(1)
            rest -= first * blocks
            block, head = rest // heads, first + rest % heads
        else:
            head, block = rest // blocks, rest % blocks
        if cutlass.const_expr(self.last_first):
            block = blocks - 1 - block
        return (batch * self.heads + head) * self.most + block

    @cute.jit
    def heads_in_order(self, rank: Int32, blocks: Int32) -> Int32:
        """The number of a sequence's heads that follow one another before the rest are interleaved
        by block: the interleaved ones are its last, with `tail` tiles in all, if they include the
        last tiles of all sequences."""
        alone = self.heads
        if self.before(rank + 1) > self.total - self.tail:
            alone = cutlass.max(self.heads - (self.tail + blocks - 1) // blocks, Int32(0))
        return alone
