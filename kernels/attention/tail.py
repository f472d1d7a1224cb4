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

from cutex.device.attention.block_info import ceil_div, larger, smaller
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

    @property
    def is_cut(self) -> Any:
        """Whether shares may leave sums for another CTA."""
        return self.shares > self.tiles - self.whole

    def start(self, index: Any) -> Any:
        """The step, with all steps laid end to end, at which the tile at `index` starts."""
        return (index - self.whole) * self.steps

    def steps_of(self, index: Any) -> Any:
        """The steps of the tile at `index`."""
        return self.steps

    def cut(self, share: Any) -> Any:
        """The step, with all steps laid end to end, at which share `share` starts and the one
        before it ends."""
        steps, shares = (self.tiles - self.whole) * self.steps, larger(self.shares, 1)
        each = steps // shares
        return share * each + smaller(share, steps - each * shares)

    def holder(self, step: Any) -> Any:
        """The share that has `step` of all steps, laid end to end."""
        steps, shares = (self.tiles - self.whole) * self.steps, larger(self.shares, 1)
        each = larger(steps // shares, 1)
        longer = steps - each * shares  # shares of one step more, the first ones
        return select(step < longer * (each + 1), step // (each + 1), (step - longer) // each)

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


@dataclass(frozen=True)
class Ramp:
    """The steps of the tiles of a unit (a head of K and V of a batch entry) with a causal mask:
    fewer for each further block of keys, since its first queries do not see them."""

    count: Any  # blocks of keys
    blocks: Any  # of queries
    heads: Any  # that share the unit
    shift: Any  # keys less queries
    tile_m: int
    tile_n: int  # a multiple of tile_m

    @property
    def hidden(self) -> Any:
        """How many blocks of queries from the first on, were there so many, see block 0: of queries
        before the first key, less than none."""
        ahead = ceil_div(larger(self.shift, 0), self.tile_m)
        return ahead - larger(-self.shift, 0) // self.tile_m

    def first(self, n_block: Any) -> Any:
        """The first block of queries that sees a block of keys."""
        return larger(n_block * (self.tile_n // self.tile_m) - self.hidden, 0)

    def steps_of(self, n_block: Any) -> Any:
        return (self.blocks - self.first(n_block)) * self.heads

    def before(self, n_block: Any) -> Any:
        """The steps of all blocks of keys before `n_block`."""
        each, hidden = self.tile_n // self.tile_m, self.hidden
        begins = smaller((larger(hidden, 0) + each - 1) // each, n_block)  # whose `first` is > 0
        later = n_block - begins
        missing = each * later * (begins + n_block - 1) // 2 - hidden * later
        return (n_block * self.blocks - missing) * self.heads

    def holding(self, step: Any) -> Any:
        """The block of keys of which `step` is one, by bisection."""
        found = step * 0
        for bit in reversed(range(MOST_BLOCKS.bit_length() - 1)):
            further = found + (1 << bit)
            is_before = self.before(smaller(further, self.count)) <= step
            found = select(is_before, select(further < self.count, further, found), found)
        return found


MOST_BLOCKS = 1024  # of keys of a unit whose steps differ


@dataclass(frozen=True)
class RampTail(Tail):
    """The same where a unit's tiles take fewer and fewer steps: all of them are cut, into shares
    that may hold several tiles."""

    ramp: Any = None  # a Ramp; `steps` are those of a unit

    @property
    def whole(self) -> Any:
        return self.tiles * 0

    @property
    def steps_in_all(self) -> Any:
        return self.tiles // self.ramp.count * self.steps

    @property
    def shares(self) -> Any:
        return larger(smaller(self.steps_in_all // self.least, self.ctas), 1)

    @property
    def is_cut(self) -> Any:
        return self.shares > 1

    def start(self, index: Any) -> Any:
        unit = index // self.ramp.count
        return unit * self.steps + self.ramp.before(index - unit * self.ramp.count)

    def steps_of(self, index: Any) -> Any:
        return self.ramp.steps_of(index % self.ramp.count)

    def holding(self, step: Any) -> Any:
        """The index of the tile of which `step` is one."""
        unit = step // self.steps
        return unit * self.ramp.count + self.ramp.holding(step - unit * self.steps)

    def cut(self, share: Any) -> Any:
        steps, shares = self.steps_in_all, self.shares
        each = steps // shares
        return share * each + smaller(share, steps - each * shares)

    def pieces(self, number: Any) -> Any:
        return self.holding(self.cut(number + 1) - 1) - self.holding(self.cut(number)) + 1

    def piece(self, number: Any, which: Any) -> Piece:
        """Piece `which` of number `number`, from the front of its last tile to the rear of its
        first."""
        begin, stop = self.cut(number), self.cut(number + 1)
        index = self.holding(stop - 1) - which
        start = self.start(index)
        end = smaller(stop - start, self.steps_of(index))
        return Piece(index, larger(begin - start, 0), end)


def spare_sums(tail: Tail) -> int:
    """The most shares whose sums are left for another CTA: 0 if no tile is cut."""
    return tail.shares if tail.is_cut else 0
