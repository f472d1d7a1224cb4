"""Few tiles, each cut along its keys into equal parts, for a CTA each.

Where there are at least twice as many SMs as tiles, each tile has as many CTAs as can run at one
time: few queries on many keys. All CTAs of a tile wait for each other and each merges some of its
columns (device/attention/merged_rows.py), so a launch has all of its CTAs run at one time, or none.
A part that fails is computed again before it is shared.

Plain operators only: Python ints run it, and the same code traces in the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutex.device.attention.block_info import Blocks, ceil_div, ordered, smaller
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.order import AttentionOrder

MOST_PARTS = 64  # of a tile: with more, the sums to be merged take longer than what they save
NUMBERS = 256  # shares, more than a GPU has SMs
# blocks of keys, of two warpgroups, that merging takes as long as: with its first part, and with so
# many more
MERGING, PARTS_A_BLOCK = 5, 8


class Part(NamedTuple):
    """Some blocks of the keys of a tile, from `first` on. To all roles but LOAD it is a tile whose
    keys begin there, and of which only so many blocks count."""

    share: Any  # the number of the CTA that has it
    first: Any
    count: Any

    @property
    def word(self) -> Any:
        """What other roles are told of it."""
        return self.count * NUMBERS + self.share


@dataclass(frozen=True)
class SplitOrder:
    """What is handed out: the parts of each tile of `order`, one after the other."""

    order: AttentionOrder
    parts: Any  # of a tile

    @property
    def total(self) -> Any:
        return self.order.total * self.parts

    def tile(self, index: Any) -> WorkTile:
        return self.order.tile(index // self.parts)

    def part(self, share: Any, blocks: Blocks) -> Part:
        """The part with number `share` of a tile that touches `blocks`."""
        count, which = blocks.end - blocks.first, share % self.parts
        first, end = (count * i // self.parts for i in (which, which + 1))
        return Part(share, blocks.first + first, end - first)


def parts_of(ctas: int, tiles: Any) -> Any:
    """How many parts each of `tiles` tiles is cut into for so many CTAs: 0 where there are too many
    tiles for one."""
    return smaller(ctas // tiles, MOST_PARTS)


def within(blocks: Blocks, word: Any) -> Blocks:
    """The blocks that are of the part that `word` tells of."""
    count = word // NUMBERS
    first, end = (smaller(x, count) for x in (blocks.first, blocks.end))
    return ordered(first, end, blocks.clean_first, blocks.clean_end)


def time_of(steps: int, parts: int) -> float:
    """The time of a tile of `steps` blocks of keys in so many parts, in blocks."""
    return float(ceil_div(steps, parts) + MERGING + parts // PARTS_A_BLOCK)
