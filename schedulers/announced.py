"""Tiles of a walk that one warp of a CTA looks up ahead of the roles that need them.

Finding a tile of ragged groups takes a search and two divisions, hundreds of clocks, which every
role would spend between two tiles. Here an otherwise idle warp writes the tiles to slots of smem,
and a role reads a few words.

    barrier          arrives                                  waits
    announced[slot]  1: the warp that looks up, having        every role
                     written the tile
    read[slot]       1 a warp that has read the tile          the warp that looks up
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.pipeline import Barrier, PipelineState
from cutex.device.work_tile import WorkTile
from cutex.schedulers.persistent import StaticWalk

DEPTH = 2  # tiles that may be unread
WORDS = 4  # of a slot: 16 bytes


class HeldTile(NamedTuple):
    """A tile in registers, which a loop may carry and replace."""

    fields: cute.Tensor  # those of a WorkTile

    @staticmethod
    def of(tile: WorkTile) -> HeldTile:
        held = HeldTile(cute.make_rmem_tensor(len(tile), Int32))
        held.put(tile)
        return held

    def put(self, tile: WorkTile) -> None:
        for i, field in enumerate(tile):
            self.fields[i] = Int32(field)

    @property
    def tile(self) -> WorkTile:
        return WorkTile(*(self.fields[i] for i in range(len(WorkTile._fields))))


@dataclass(frozen=True)
class AnnouncedTiles:
    """The slots for a CTA's tiles: `fields` of each, up to WORDS of a WorkTile's."""

    fields: tuple[str, ...]
    words: cute.Tensor  # (WORDS, SLOT) Int32 in smem
    announced: Barrier
    read: Barrier

    @classmethod
    def allocate(cls, smem: SmemAllocator, fields: tuple[str, ...], readers: int) -> Self:
        """Allocate the slots and their barriers; `readers` warps read each tile."""
        words = smem.allocate_tensor(Int32, cute.make_layout((WORDS, DEPTH)), byte_alignment=16)
        announced = Barrier.allocate(smem, "tile announced", arrivals=1, slots=DEPTH)
        read = Barrier.allocate(smem, "tile read", arrivals=readers, slots=DEPTH)
        return cls(fields, words, announced, read)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return self.announced, self.read

    def reader(self) -> PipelineState:
        """The state of a role before its first tile."""
        return PipelineState(DEPTH, Int32(0), Int32(0))

    @cute.jit
    def announce(self, walk: cutlass.Constexpr[StaticWalk]) -> None:
        """Look up the tiles of a walk and announce each. One warp calls it."""
        state = self.writer()
        for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            self.put(walk.tile_at(index), state)
            state.advance()

    def writer(self) -> PipelineState:
        """The state of the warp that looks up, before the first tile."""
        return PipelineState(DEPTH, Int32(0), Int32(1))

    @cute.jit
    def put(self, tile: WorkTile, state: PipelineState) -> None:
        """Announce a tile in the slot of `state`, once it has been read. A whole warp calls it."""
        self.read.wait(state.phase, state.slot)
        with cute.arch.elect_one():
            self.write(tile, state.slot)
            self.announced.arrive(state.slot)

    def write(self, tile: WorkTile, slot: Int32) -> None:
        for i, field in enumerate(self.fields):
            self.words[i, slot] = Int32(getattr(tile, field))

    @cute.jit
    def take(self, state: PipelineState) -> WorkTile:
        """Wait for the tile in the slot of `state` and read it. A whole warp calls it, and advances
        `state` then."""
        self.announced.wait(state.phase, state.slot)
        found = [self.words[i, state.slot] for i in range(len(self.fields))]
        cute.arch.sync_warp()  # its lanes have read the words
        with cute.arch.elect_one():
            self.read.arrive(state.slot)
        return WorkTile(Int32(0))._replace(**dict(zip(self.fields, found, strict=True)))
