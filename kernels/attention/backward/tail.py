"""The last tiles of keys, cut along their queries so that all CTAs finish together.

If the tiles do not fill the SMs in whole rounds, SMs idle in the last one: of 4096 tiles on 132
SMs, 4 remain and take as long as 132. So the steps of the remaining tiles (one step is a block of
queries of one head) are laid end to end, and cut into one share per CTA, equal to within one step
(Stream-K: Osama, Merrill, Cecka, Garland and Owens, PPoPP 2023).

A share is no longer than a tile: the rear of one tile and then the front of the next, or a part of
one. A CTA processes the front first, so the sums of other CTAs are mostly ready when it reaches the
rear, whose dK and dV it completes. Shares are handed out in order, so those that it waits for have
started.

Plain operators only: Python ints run it, and the same code traces in the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutex.device.attention.block_info import larger, smaller
from cutex.schedulers.order import select


class Piece(NamedTuple):
    """Steps `first` to `end` of the tile that the order has at `index`."""

    index: Any
    first: Any
    end: Any


@dataclass(frozen=True)
class Tail:
    """The sequence of work: whole tiles, then the shares of the remaining ones."""

    tiles: Any  # of the order
    steps: Any  # of a tile
    ctas: int  # that run at one time
    least: int  # steps of a share that is a part of a tile
    cost: int  # of a second piece and of others' sums, in steps

    @property
    def whole(self) -> Any:
        """How many tiles are processed whole."""
        return self.tiles // self.ctas * self.ctas

    @property
    def shares(self) -> Any:
        """The number of shares that the remaining tiles are cut into: no cuts where these cost more
        than they save."""
        left = self.tiles - self.whole
        shares = smaller(left * self.steps // self.least, self.ctas)
        pays = left * self.steps + shares * self.cost < shares * self.steps
        return select(pays, shares, left)

    @property
    def total(self) -> Any:
        return self.whole + self.shares

    def cut(self, share: Any) -> Any:
        """The step, with all steps laid end to end, at which share `share` starts and the one
        before it ends."""
        steps, shares = (self.tiles - self.whole) * self.steps, larger(self.shares, 1)
        each = steps // shares
        return share * each + smaller(share, steps - each * shares)

    def pieces(self, number: Any) -> Any:
        """The number of pieces of number `number`."""
        share = number - self.whole
        first, end = self.cut(share), self.cut(share + 1)
        two = select((end - 1) // self.steps > first // self.steps, 2, 1)
        return select(number >= self.whole, two, 1)

    def piece(self, number: Any, which: Any) -> Piece:
        """Piece `which` of number `number`: of two, first the front of a tile, then the rear of the
        one before."""
        share = number - self.whole
        begin, stop = self.cut(share), self.cut(share + 1)
        tile = (stop - 1) // self.steps - which
        first = larger(begin - tile * self.steps, 0)
        end = smaller(stop - tile * self.steps, self.steps)
        cut = number >= self.whole
        return Piece(
            select(cut, self.whole + tile, number), select(cut, first, 0),
            select(cut, end, self.steps),
        )  # fmt: skip


def spare_sums(tail: Tail) -> int:
    """The most shares whose sums are left for another CTA: 0 if no tile is cut."""
    return tail.shares if tail.shares > tail.tiles - tail.whole else 0
