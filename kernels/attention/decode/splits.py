"""Splits: which CTA works on which keys, so that all have as many, whatever the lengths.

A unit is a block of packed rows of one sequence and one head of K and V, with the blocks of keys
that its rows see. All units stand in one row, entry by entry (a sequence and its block of rows),
head by head, and the row is cut into as many equal shares as there are CTAs; a unit is counted as
`start` blocks longer than it is, at its front, for what its begin and end take. So lengths need
be known on the device only, and the cuts of one long sequence and of a ragged batch are alike
(Osama et al., "Stream-K", PPoPP 2023; FlashMLA's metadata are such shares).

CTAs come in teams, of which each has one of as many neighbouring heads and the same keys: rows of
K and V hold all heads, one after the other, and memory is read faster if they are read at the same
time.

With `num_splits` each unit is cut into that many parts instead, at borders that its own length
alone decides; a part is done by the CTA in whose share it begins. So a sequence's result does not
depend on the others in the batch.

Where there are more teams than units, each part may have a team to itself instead (`size`): a share
that ends one unit and begins another takes longer than a part that is some blocks longer. Then
the row counts parts, and each team has one.

Plain operators only: Python ints run it, and the same code traces in the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Float32, Int32

from cutex.device.atoms.scalar import reciprocal
from cutex.device.attention.block_info import larger, smaller
from cutex.schedulers.order import select

NEVER = 2**30  # blocks of a part without a border


class EntrySpan(NamedTuple):
    """A batch entry's range on the axis along which all units are laid end to end."""

    entry: Any
    begin: Any  # the position of its first unit
    blocks: Any  # of keys, of each of its units: at least 1; 0 for an entry without rows

    def weight(self, start: int) -> Any:
        """The length of a unit."""
        return weight(self.blocks, start)


class Piece(NamedTuple):
    """A part of a unit, the work of one CTA."""

    entry: Any
    head: Any
    first: Any  # block of keys, counted from the unit's first
    end: Any  # not more than `first`: there is nothing to do
    part: Any  # number of this part of the unit
    parts: Any
    slot: Any  # in memory, of part 1; part i has those `step` further for each
    step: Any
    slot_0: Any  # of part 0
    after: Any  # where the CTA goes on

    def slot_of(self, part: Any) -> Any:
        return select(part == 0, self.slot_0, self.slot + (part - 1) * self.step)


@dataclass(frozen=True)
class Splits:
    """The shares of the CTAs on the axis of all units."""

    heads: Any  # that own units
    quota: Any  # a share
    start: int
    num_splits: Any  # 0: a unit is cut where shares end
    cta: Any
    team: Any = 1  # CTAs of a team, which divides the heads
    size: Any = None  # blocks of a part that has a team to itself, at most; 0 or None: none has
    # whether no unit is cut, where num_splits is 0; None: num_splits may be any number
    whole: Any = None

    @staticmethod
    def size_alone(total: Any, longest: Any, units: Any, teams: Any) -> Any:
        """The blocks of the longest part if units, of `total` blocks in all and `longest` at most,
        are cut into no more parts than there are teams; 0 if there are more units than teams."""
        parts = larger(quotient(teams, larger(units, 1)), 1)
        each = quotient(longest + parts - 1, parts)
        spare = teams - units  # a unit has at most one part more than its blocks by the size
        by_total = quotient(total + spare - 1, larger(spare, 1))
        return smaller(each, select(spare > 0, by_total, NEVER))

    @staticmethod
    def quota_of(total: Any, teams: Any, least: int) -> Any:
        """The share of each team in `total` blocks."""
        return larger(quotient(total + teams - 1, teams), least)

    @staticmethod
    def team_of(heads: Any, most: int) -> Any:
        """The CTAs of a team: the largest number, up to `most`, that divides the heads."""
        team: Any = 1
        for size in range(2, most + 1):
            team = select(heads % size == 0, size, team)
        return team

    @staticmethod
    def slots(ctas: int, units: int, num_splits: int) -> int:
        """The number of slots that parts of units may need in memory."""
        return num_splits * units if num_splits else 2 * ctas

    @property
    def number(self) -> Any:
        """The number of this CTA's team."""
        return quotient(self.cta, self.team)

    @property
    def owners(self) -> Any:
        """The owners of units, as a team sees them."""
        return quotient(self.heads, self.team)

    @property
    def begin(self) -> Any:
        return self.number * self.quota

    @property
    def end(self) -> Any:
        return (self.number + 1) * self.quota

    def weight(self, blocks: Any) -> Any:
        """The length of a unit of `blocks` blocks on that axis."""
        if self.size is None:
            return weight(blocks, self.start)
        parts = quotient(blocks + self.size - 1, larger(self.size, 1))
        return select(self.size > 0, parts, weight(blocks, self.start))

    def units(self, blocks: Any) -> Any:
        """The length of an entry's units on the axis; a team's heads count once."""
        return self.owners * self.weight(blocks)

    def piece(self, at: Any, span: EntrySpan) -> Piece:
        """The part that begins at position `at` or after it, in one of the units of `span`."""
        length = weight(span.blocks, self.start)
        head = quotient(at - span.begin, length)
        unit = span.begin + head * length  # its position
        found = self._cut(at, unit, length)
        if self.whole is None:
            fixed = self._fixed(at, unit, span, head)
            found = tuple(
                select(self.num_splits > 0, y, x) for x, y in zip(found, fixed, strict=True)
            )
        else:
            found = self._whole(at, unit, length, found)
        first, end, part, parts, slot, step, slot_0, after = found
        return self._mine(
            Piece(span.entry, head, first, end, part, parts, slot, step, slot_0, after)
        )

    def piece_alone(self, at: Any, span: EntrySpan) -> Piece:
        """The part at position `at`, in one of the units of `span`, where each part has a team to
        itself: all parts of a unit are equally long, except the last."""
        parts = self.weight(span.blocks)
        head = quotient(at - span.begin, parts)
        unit = span.begin + head * parts  # its position
        part, long = at - unit, quotient(span.blocks + parts - 1, parts)
        first = smaller(part * long, span.blocks)
        end = smaller(first + long, span.blocks)
        return self._mine(
            Piece(span.entry, head, first, end, part, parts, unit + 1, 1, unit, at + 1)
        )

    def _mine(self, piece: Piece) -> Piece:
        """This CTA's part, of its team's."""
        member = self.cta - self.number * self.team
        slot, slot_0 = piece.slot * self.team + member, piece.slot_0 * self.team + member
        head, step = piece.head * self.team + member, piece.step * self.team
        return piece._replace(head=head, slot=slot, step=step, slot_0=slot_0)

    def _cut(self, at: Any, unit: Any, length: Any) -> tuple[Any, ...]:
        """A part that ends where the share does.

        The team of part 0 may have started with another unit's last part, which then has the first
        of its two slots.
        """
        first = larger(at - unit - self.start, 0)
        end = smaller(length, self.end - unit) - self.start
        front = quotient(unit + self.start, self.quota)  # the team of part 0
        parts = quotient(unit + length - 1, self.quota) - front + 1
        slots = 2 * (front + 1), 2, 2 * front + 1
        return first, end, self.number - front, parts, *slots, unit + length

    def _whole(self, at: Any, unit: Any, length: Any, cut: tuple[Any, ...]) -> tuple[Any, ...]:
        """A part as `cut` or, where units are whole, the unit, if it begins in the share."""
        first, end, part, parts, slot, step, slot_0, after = cut
        mine = (at <= unit + self.start) & (unit + self.start < self.end)
        first, end = (
            select(self.whole, 0, first),
            select(self.whole, select(mine, length - self.start, 0), end),
        )
        part, parts = select(self.whole, 0, part), select(self.whole, 1, parts)
        return first, end, part, parts, slot, step, slot_0, after

    def _fixed(self, at: Any, unit: Any, span: EntrySpan, head: Any) -> tuple[Any, ...]:
        """One of num_splits parts, if it starts in the share."""
        blocks = span.blocks
        size = larger((blocks + self.num_splits - 1) // larger(self.num_splits, 1), 1)
        part = (larger(at - unit - self.start, 0) + size - 1) // size
        first = part * size
        mine = unit + self.start + first < self.end
        end = select(mine, smaller(first + size, blocks), first)
        after = select(mine, unit + self.start + smaller(first + size, blocks), self.end)
        after = select(first < blocks, after, unit + blocks + self.start)
        parts = (blocks + size - 1) // size
        slot = (span.entry * (self.heads // self.team) + head) * self.num_splits
        return first, end, part, parts, slot + 1, 1, slot, after


@dataclass(frozen=True)
class EvenParts:
    """Units that may have up to `parts` parts each, whatever their lengths: a team processes every
    `teams`-th part. So a CTA needs no lengths but those of its own units."""

    heads: Any  # that own units
    cta: Any
    team: Any
    teams: Any
    parts: Any
    merge: int = 0  # a unit of no more than so many blocks more than its part would have is whole

    @property
    def owners(self) -> Any:
        """The owners of units, as a team sees them."""
        return quotient(self.heads, self.team)

    @property
    def begin(self) -> Any:
        """The position of the first part on the axis of all parts; a team's heads count once."""
        return quotient(self.cta, self.team)

    def entry(self, at: Any) -> Any:
        return quotient(quotient(at, self.parts), self.owners)

    def whole(self, at: Any) -> Piece:
        """The unit at position `at`, where units have one part."""
        entry = quotient(at, self.owners)
        head = (at - entry * self.owners) * self.team + self.cta - self.begin * self.team
        return Piece(entry, head, 0, NEVER, 0, 1, 0, 0, 0, at + self.teams)

    def piece(self, at: Any, blocks: Any) -> Piece:
        """The part at position `at` of a unit of `blocks` blocks; empty where earlier parts hold
        all of them."""
        unit = quotient(at, self.parts)
        part, entry = at - unit * self.parts, quotient(unit, self.owners)
        long = larger(quotient(blocks + self.parts - 1, self.parts), 1)
        long = select(blocks <= long + self.merge, larger(blocks, 1), long)
        first = smaller(part * long, blocks)
        member = self.cta - self.begin * self.team
        slot = unit * self.parts * self.team + member
        return Piece(
            entry, (unit - entry * self.owners) * self.team + member, first,
            smaller(first + long, blocks), part, quotient(blocks + long - 1, long),
            slot + self.team, self.team, slot, at + self.teams,
        )  # fmt: skip


def quotient(a: Any, b: Any) -> Any:
    """a // b for a >= 0 and b > 0.

    NOTE: by two reciprocals, the second of what the first leaves, it takes a third of the
    instructions of a division, which are fetched from memory before a CTA's first load
    (docs/facts/decode.md#short-walk).
    """
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    a, b = Int32(a), Int32(b)
    inverse = reciprocal(Float32(b))
    found = Int32(Float32(a) * inverse)
    found += Int32(Float32(a - found * b) * inverse)
    left = a - found * b
    return found + select(left >= b, 1, select(left < 0, -1, 0))


def are_many(units: Any, teams: Any) -> Any:
    """Whether at least two teams in three would have a unit."""
    return units * 3 >= teams * 2


def weight(blocks: Any, start: int) -> Any:
    """The length of a unit of `blocks` blocks; 0 if it does not exist."""
    return select(blocks > 0, blocks + start, 0)
