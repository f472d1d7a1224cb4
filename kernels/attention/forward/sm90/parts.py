"""The tiles of the last round, cut along their keys so that all CTAs end together.

Where tiles without a mask do not fill the SMs in whole rounds, those of the last are cut into equal
shares (tail.py). A share is the rear of one tile's keys and, before it, the front of the
next one's, or a part of one tile. Whoever has the rear completes the tile; what others have of it
comes through global memory (device/attention/kept_rows.py), but for a part that has failed: then
the whole tile is computed again in retry mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Boolean, Int32

from cutex.device.attention.block_info import ceil_div, larger
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.order import AttentionOrder
from cutex.kernels.attention.tail import Tail
from cutex.schedulers.order import select

MOST = 256  # shares, more than a GPU has SMs
LEAST = 4  # blocks of keys of a share, at least; and an eighth of those of a tile
# blocks of keys that a share must save: what its second part and handing over cost; of as many
# warpgroups
COST = {1: 8, 2: 8, 3: 16}


class Part(NamedTuple):
    """Blocks `first` to `end` of the keys of the tile that the order has at `index`."""

    index: Int32
    first: Int32
    end: Int32
    # what becomes of it. 0: it is a whole tile; -1 - s: it is kept, as what share s has of a tile;
    # else it completes its tile: MOST times its share, and how many shares before have the rest
    word: Int32
    is_last: Boolean  # whether its share has no further part


@dataclass(frozen=True)
class FoundTail(Tail):
    """A Tail whose counts are found once, not at each use."""

    whole: Any = None
    shares: Any = None

    @staticmethod
    def of(tail: Tail) -> FoundTail:
        fields = tail.tiles, tail.steps, tail.ctas, tail.least, tail.cost
        return FoundTail(*fields, tail.whole, tail.shares)


@dataclass(frozen=True)
class PartsOrder:
    """What is handed out: whole tiles of `order`, then the shares of the others."""

    order: AttentionOrder
    tail: Tail

    @staticmethod
    def of(order: AttentionOrder, config: Any, rows_k: Int32) -> PartsOrder:
        steps = ceil_div(rows_k, config.tile_n)
        return PartsOrder(order, FoundTail.of(tail_of(config, order.total, steps)))

    @property
    def total(self) -> Any:
        return self.tail.total

    def tile(self, index: Any) -> WorkTile:
        """The tile of the first part of number `index`."""
        return self.order.tile(self.part(index, 0).index)

    def whole(self, index: Int32) -> Part:
        """All keys of a tile."""
        return Part(index, Int32(0), Int32(self.tail.steps), Int32(0), Boolean(True))

    def part(self, number: Any, which: Any) -> Part:
        """Part `which` of number `number` of what is handed out."""
        tail = self.tail
        piece, share = tail.piece(number, which), number - tail.whole
        before = share - tail.holder(tail.start(piece.index))
        completes = select(piece.first > 0, share * MOST + before, 0)
        word = select(piece.end < tail.steps, -1 - share, completes)
        is_last = which + 1 == tail.pieces(number)
        return Part(piece.index, piece.first, piece.end, word, is_last)


def tail_of(config: Any, tiles: Any, steps: Any) -> Tail:
    """The cuts of `tiles` tiles of `steps` blocks of keys."""
    least = larger(steps // 8, LEAST)
    return Tail(tiles, steps, config.num_ctas // config.ctas, least, COST[config.warpgroups])
