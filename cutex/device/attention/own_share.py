"""OwnShare: the share that a CTA has of tiles that are cut along their keys (split_row.py), found
by its load warp, since only the card may know how long sequences are.

Where there are CTAs enough, each tile may be cut into equal parts of at most a quota of blocks of
keys, the fewest that CTAs suffice for: of a warp, each lane tries a quota.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.atoms.scalar import reciprocal
from cutex.device.attention.block_info import ceil_div, larger, smaller
from cutex.device.attention.split_row import (
    MOST_PARTS,
    SECOND,
    SHORTEST,
    START,
    PartPlace,
    Piece,
    Row,
    TileSpan,
    size_alone,
    turn_of,
)
from cutex.device.work_tile import WorkTile
from cutex.schedulers.order import select

WARP = 32
NEVER = 2**30
# so that a product rounded up yields no part too many; one too few is a part that is longer
ROUNDED_DOWN = 1 - 2**-20


@dataclass(frozen=True)
class Tiles:
    """The tiles of all sequences, of which each lane of a warp has every 32nd. Where all are alike,
    they count as one."""

    config: Any  # of the kernel
    sizes: Any
    args: Any
    order: Any  # of the tiles of sequences that are alike

    @property
    def heads(self) -> Int32:
        """The heads, or groups of packed heads, that own tiles."""
        return self.sizes.heads // self.config.pack

    @property
    def sequences(self) -> Int32:
        return self.sizes.batch if self.config.has_lengths else Int32(1)

    @cute.jit
    def counts(self, first: Int32) -> tuple[Int32, Int32]:
        """Of this lane's sequence, of those from `first` on, the tiles and their blocks of keys."""
        c, sequence = self.config, first + cute.arch.lane_idx()
        known = cutlass.min(sequence, self.sequences - 1)
        q, k = (x.of(known) for x in self.sizes.seqlens(self.args))
        tiles = self.heads * ceil_div(q.length * c.pack, c.tile_m)
        if cutlass.const_expr(not c.has_lengths):
            tiles *= self.sizes.batch
        steps = ceil_div(k.length, c.tile_n)
        return (tiles if sequence < self.sequences else Int32(0)), steps

    @cute.jit
    def totals(self) -> tuple[Int32, Int32, Int32]:
        """The blocks of keys of all tiles, those of the longest, and how many tiles there are."""
        total, longest, tiles = Int32(0), Int32(0), Int32(0)
        for first in cutlass.range(0, self.sequences, WARP, unroll=1):
            here, steps = self.counts(first)
            total += here * steps
            tiles += here
            longest = cutlass.max(longest, steps if here > 0 else Int32(0))
        total, tiles = (cute.arch.warp_redux_sync(x, "add") for x in (total, tiles))
        return total, cute.arch.warp_redux_sync(longest, "max"), tiles

    @cute.jit
    def parts(self, per_quota: Float32) -> Int32:
        """How many parts all tiles have, of a quota whose reciprocal each lane has."""
        used = Int32(0)
        for first in cutlass.range(0, self.sequences, WARP, unroll=1):
            tiles, steps = self.counts(first)
            for i in cutlass.range(cutlass.min(self.sequences - first, WARP), unroll=1):
                parts = parts_of(cute.arch.shuffle_sync(steps, i), per_quota)
                used += cute.arch.shuffle_sync(tiles, i) * parts
        return used

    @cute.jit
    def work(self, sequence: Int32, tile: Int32, tiles: Int32) -> WorkTile:
        """Tile `tile` of a sequence that has so many."""
        if cutlass.const_expr(not self.config.has_lengths):
            return self.order.tile(turn_of(tile, tiles, self.config.num_ctas))
        m_blocks = larger(tiles // self.heads, 1)
        head = tile // m_blocks
        return WorkTile(tile - head * m_blocks, head=head, batch=sequence)


def parts_of(steps: Any, per_quota: Any) -> Any:
    """The parts of a tile of `steps` blocks of keys, given the reciprocal of the quota."""
    return smaller(Int32(Float32(larger(steps - 1, 0)) * per_quota) + 1, MOST_PARTS)


class OwnPiece(NamedTuple):
    """A piece of this CTA's share."""

    work: WorkTile
    piece: Piece
    place: PartPlace


@dataclass(frozen=True)
class OwnShare:
    """The share of this CTA, from `begin` to `end` of the row of all tiles."""

    tiles: Tiles
    per_quota: Float32  # the reciprocal of the quota of equal parts; 0: shares end anywhere
    row: Row
    begin: Int32
    end: Int32

    @staticmethod
    def find(tiles: Tiles) -> OwnShare:
        """A whole warp calls it."""
        per_quota, length, shares = row_of(tiles, tiles.config.num_ctas)
        row, (cta, _, _) = Row.of(length, shares), cute.arch.block_idx()
        cta = smaller(cta, shares)
        return OwnShare(tiles, per_quota, row, row.cut(cta), row.cut(smaller(cta + 1, shares)))

    @cute.jit
    def piece(self, at: Int32) -> OwnPiece:
        """The piece that begins at `at` of this share. A whole warp calls it."""
        tiles, begin = self.tiles, Int32(0)
        sequence, here, each, seen = Int32(0), Int32(1), Int32(1), Int32(0)
        for first in cutlass.range(0, tiles.sequences, WARP, unroll=1):
            of_lane, steps = tiles.counts(first)
            weights = weight_of(steps, self.per_quota)
            for i in cutlass.range(cutlass.min(tiles.sequences - first, WARP), unroll=1):
                count, weight = (cute.arch.shuffle_sync(x, i) for x in (of_lane, weights))
                if (at >= seen) & (at < seen + count * weight):
                    sequence, begin, here, each = first + i, seen, count, weight
                seen += count * weight
        piece = TileSpan(begin, here, each).piece(at, self.end)
        return OwnPiece(tiles.work(sequence, piece.tile, here), piece, self.place(piece))

    @cute.jit
    def place(self, piece: Piece) -> PartPlace:
        """The place of a piece of this share in its tile."""
        cta, _, _ = cute.arch.block_idx()
        first, last = cta, cta
        # NOTE: each takes two divisions, on the way to the first load
        if piece.begin > 0:
            first = self.row.holder(piece.first)
        if piece.end < piece.weight:
            last = self.row.holder(piece.first + piece.weight - 1)
        return PartPlace(first, cta - first, last - first + 1)


def weight_of(steps: Any, per_quota: Any) -> Any:
    """The weight of a tile of `steps` blocks of keys: its parts, if these are equal."""
    return select(per_quota > 0.0, parts_of(steps, per_quota), larger(steps, 1) + START)


@cute.jit
def row_of(tiles: cutlass.Constexpr[Tiles], ctas: int) -> tuple[Float32, Int32, Int32]:
    """The reciprocal of the quota of equal parts, 0 where shares that end anywhere are faster; the
    length of the row of all tiles, and the number of its shares."""
    total, longest, count = tiles.totals()
    most = size_alone(total, longest, count, ctas)
    least = larger((total + ctas - 1) // ctas, SHORTEST)
    mine = least + larger(most - least, 0) * cute.arch.lane_idx() // (WARP - 1)
    per_quota = reciprocal(Float32(mine)) * ROUNDED_DOWN
    used = tiles.parts(per_quota)
    best = cute.arch.warp_redux_sync(select(used <= ctas, mine, NEVER), "min")
    lane = cutlass.min(cute.arch.popc(cute.arch.vote_ballot_sync(mine < best)), WARP - 1)
    per_quota, used = (cute.arch.shuffle_sync(x, lane) for x in (per_quota, used))
    length = Int32(0)
    for first in cutlass.range(0, tiles.sequences, WARP, unroll=1):
        here, steps = tiles.counts(first)
        length += here * weight_of(steps, Float32(0.0))
    length = cute.arch.warp_redux_sync(length, "add")
    alone = (most > 0) & (best <= length // ctas + SECOND)
    per_quota = per_quota if alone else Float32(0.0)
    length = used if alone else length
    shares = used if alone else cutlass.min(ceil_div(length, SHORTEST + START), ctas)
    return per_quota, length, larger(shares, 1)
