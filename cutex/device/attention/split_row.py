"""Tiles cut along their keys into pieces, so that all CTAs have as many keys.

All tiles stand in one row, sequence by sequence, head by head, and each CTA has an equal share of
it: it ends one tile, has others whole, and begins another. Where that costs little more, each tile
is cut into equal parts instead, and a CTA has one of them; then the row counts parts. A piece that
is no whole tile is left in global memory, and when a CTA has left its own, it merges some columns
of each of their tiles (device/attention/merged_rows.py). CTAs wait for each other, so a launch has
all of them run at one time, or none. A piece that fails is computed again before it is left.

Plain operators only: Python ints run it, and the same code traces in the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutex.device.attention.block_info import Blocks, larger, ordered, smaller
from cutex.schedulers.order import select

MOST_PARTS = 64  # of a tile: with more, the sums to be merged take longer than what they save
NUMBERS = 256  # CTAs, more than a GPU has SMs
SHORTEST = 4  # blocks of keys of a part, at least, of tiles that are cut into equal ones
START = 2  # blocks of keys that the begin and the end of a tile take as long as
# the same of a second piece, of which a CTA has none where tiles are cut into equal parts
SECOND = 5


class Part(NamedTuple):
    """Some blocks of the keys of a tile, from `first` on. To all roles but LOAD it is a tile whose
    keys begin there, and of which only so many blocks count."""

    first: Any
    count: Any


class PartPlace(NamedTuple):
    """Which part of a tile a CTA has."""

    first: Any  # the number of the CTA that has the tile's first part; the others follow
    number: Any  # of this part
    parts: Any  # of the tile

    @property
    def word(self) -> Any:
        """What other roles are told of it."""
        return (self.first * NUMBERS + self.number) * NUMBERS + self.parts

    @staticmethod
    def told(word: Any) -> PartPlace:
        return PartPlace(word // NUMBERS**2, word // NUMBERS % NUMBERS, word % NUMBERS)

    @property
    def slot(self) -> Any:
        """The place in memory of the tile's first part. A CTA has two: one for a tile that it
        begins, one for a tile that others have begun."""
        return 2 * self.first + 1


class Piece(NamedTuple):
    """From `begin` to `end` of the `weight` of a tile, the work of one CTA."""

    tile: Any  # its number in its sequence
    begin: Any
    end: Any
    weight: Any
    first: Any  # where the tile begins in the row

    @property
    def after(self) -> Any:
        """Where the CTA goes on."""
        return self.first + self.end


def part_of(blocks: Blocks, begin: Any, end: Any, weight: Any) -> Part:
    """The part of a tile that touches `blocks` which a piece of it has."""
    count = blocks.end - blocks.first
    first, end = count * begin // weight, count * end // weight
    return Part(blocks.first + first, end - first)


class TileSpan(NamedTuple):
    """The tiles of a sequence in the row of all tiles."""

    begin: Any  # where its first one begins
    tiles: Any
    weight: Any  # of each

    def piece(self, at: Any, end: Any) -> Piece:
        """The piece of the tile that `at` is in, from there to the `end` of a share."""
        tile = (at - self.begin) // self.weight
        first = self.begin + tile * self.weight
        return Piece(tile, at - first, smaller(end - first, self.weight), self.weight, first)


@dataclass(frozen=True)
class Row:
    """The row of all tiles, in equal shares."""

    length: Any
    shares: Any
    each: Any  # the length of a share
    longer: Any  # shares of one more, the first ones

    @staticmethod
    def of(length: Any, shares: Any) -> Row:
        each = length // shares
        return Row(length, shares, each, length - each * shares)

    def cut(self, share: Any) -> Any:
        """Where share `share` begins and the one before it ends."""
        return share * self.each + smaller(share, self.longer)

    def holder(self, at: Any) -> Any:
        """The share that has the place `at`."""
        beyond = at - self.longer * (self.each + 1)
        later = self.longer + larger(beyond, 0) // larger(self.each, 1)
        return select(beyond < 0, at // (self.each + 1), later)


def turn_of(place: Any, tiles: Any, ctas: int) -> Any:
    """The number, in the order of all tiles, of the tile that has place `place` in the row, where
    all are alike: neighbouring CTAs then have neighbouring tiles at one time, which may read the
    same keys, also where each has several."""
    each = larger((tiles + ctas // 2) // ctas, 1)  # tiles of a CTA, nearly
    turns = tiles // each
    at = place // each
    turn = place - at * each
    return turn * turns + smaller(turn, tiles - turns * each) + at


def size_alone(total: Any, longest: Any, tiles: Any, ctas: int) -> Any:
    """The most blocks of a part if tiles, of `total` blocks in all and `longest` at most, are cut
    into equal parts, no more than there are CTAs; a tile has at most one part more than its blocks
    by the size. 0 for more tiles than CTAs."""
    parts = larger(ctas // larger(tiles, 1), 1)
    each = (longest + parts - 1) // parts
    spare = larger(ctas - tiles, 1)
    each = select(ctas > tiles, smaller(each, (total + spare - 1) // spare), each)
    return select(tiles > ctas, 0, each)


def within(blocks: Blocks, count: Any) -> Blocks:
    """The blocks that are of a part of so many."""
    first, end = (smaller(x, count) for x in (blocks.first, blocks.end))
    return ordered(first, end, blocks.clean_first, blocks.clean_end)
