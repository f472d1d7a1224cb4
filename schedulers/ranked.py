"""The tiles of packed sequences: only those that they have, the longest sequence's first.

In an order over the blocks of the longest sequence, shorter ones have indices without work, which
cost a CTA a round through L2 each, and a long sequence that comes last leaves most SMs idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

LANES = 32


@dataclass(frozen=True)
class Ranked:
    """The plain order's tiles (blocks of a head, heads of a sequence) of sequences by rank."""

    # (batch + 1, 2) by rank: a sequence, and the blocks of those before; the last counts all blocks
    ranks: cute.Tensor
    heads: Int32
    batch: Int32
    most: Int32  # blocks of the longest sequence
    interleaved: bool  # of a sequence, blocks of all heads in turn, not one head after the other
    last_first: bool = False  # blocks from the last to the first

    @property
    def total(self) -> Int32:
        return self.before(self.batch)

    def before(self, rank: Int32) -> Int32:
        """The tiles of all sequences before that of a rank."""
        return self.heads * self.ranks[rank, 1]

    @cute.jit
    def index(self, number: Int32) -> Int32:
        """The plain order's index of tile `number`. A whole warp calls it."""
        ranks, first = self.ranks, Int32(0)
        # NOTE: the tiles before rank `batch` are all, more than `number`
        while self.before(cutlass.min(first + LANES, self.batch)) <= number:
            first += LANES
        begun = self.before(cutlass.min(first + cute.arch.lane_idx(), self.batch)) <= number
        rank = first + cute.arch.popc(cute.arch.vote_ballot_sync(begun)) - 1
        batch, blocks = ranks[rank, 0], ranks[rank + 1, 1] - ranks[rank, 1]
        rest = number - self.before(rank)
        if cutlass.const_expr(self.interleaved):
            block, head = rest // self.heads, rest % self.heads
        else:
            head, block = rest // blocks, rest % blocks
        if cutlass.const_expr(self.last_first):
            block = blocks - 1 - block
        return (batch * self.heads + head) * self.most + block
