"""Reductions over the successive rows of a group of CTAs without a cluster, through gmem.

Clusters have 2, 4, 8 or 16 CTAs of one part of a GPU, and leave SMs without one. A group has any
number of CTAs anywhere, all of them resident.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from cutex.device.last_arrival import is_last_arrival
from cutex.device.pipeline import Barrier
from cutex.device.row.reduction import Gather, Values
from cutex.device.row.tile import WARP, RowTile

LOW = (1 << 32) - 1  # the half of a word that has its value; the other has its turn


def slots_of(ahead: int) -> int:
    """The slots of a group's words, of rows begun `ahead` turns before they end. A CTA that writes
    those of a turn has finished the row of `ahead + 1` turns before, so that all others have read
    those of `2 * (ahead + 1)` turns before."""
    return 2 * (ahead + 1)


def words_of(groups: int, sharers: int, count: int, ahead: int) -> int:
    """The words of 32 bits that a launch's groups write to each other: each group has a counter of
    its CTAs that have read all, and a word of 64 bits for each value, CTA and slot."""
    return 2 * groups * (1 + sharers * count * slots_of(ahead))


@dataclass(frozen=True)
class ExchangedReduction:
    """Reductions over successive rows, each shared by `sharers` CTAs.

    A row is started `ahead` turns before it is finished, which hides the exchange. Two warps do
    nothing else: one publishes what the CTA's warps have of each row, the other collects what all
    CTAs have published. A value and the turn that it is of share a word, so no fence is needed.

    barrier        arrives                                       waits
    started[slot]  1 a warp that has a part of the row           both warps that exchange
    full[slot]     2: the warp that publishes has read `kept`,   all warps that have a part
                   and the one that collects has written `found`
    """

    tile: RowTile
    sharers: int
    count: int  # values of a warp
    sent: int  # the last ones of these, which CTAs send each other
    kept: Any  # (WARP, count, SLOT)
    found: Any  # (sent, SLOT)
    started: Barrier
    full: Barrier
    counter: cute.Pointer
    words: Any  # (CTA, sent, SLOT) of this group, Int64

    @staticmethod
    def allocate(
        tile: RowTile, sharers: int, count: int, ahead: int, mWords: cute.Tensor, group: Int32,
        groups: Int32,
    ) -> ExchangedReduction:  # fmt: skip
        """mWords: `words_of` words of 32 bits, all 0; group: this CTA's, of how many."""
        if tile.rows > 1 or tile.ctas > 1 or tile.warps < 1:
            raise ValueError("reductions are exchanged over one row of CTAs without a cluster")
        smem, slots, sent = SmemAllocator(), ahead + 1, min(count, 2)
        kept = smem.allocate_tensor(Float32, cute.make_layout((tile.warps, count, slots)), 16)
        found = smem.allocate_tensor(Float32, cute.make_layout((sent, slots)), 16)
        started = Barrier.allocate(smem, "started", tile.warps, slots)
        full = Barrier.allocate(smem, "full", 2, slots)
        layout = cute.make_layout((sharers, sent, slots_of(ahead)))
        own = cute.recast_ptr(mWords.iterator, dtype=Int64) + groups
        words = cute.make_tensor(own + group * cute.size(layout), layout)
        counter = mWords.iterator + 2 * group
        return ExchangedReduction(
            tile, sharers, count, sent, kept, found, started, full, counter, words
        )

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return self.started, self.full

    @property
    def slots(self) -> int:
        return self.full.slots

    @cute.jit
    def start(self, values: Values, turn: Int32 | int) -> None:
        """Leave this warp's values for the warp that publishes."""
        count, kept, slot = cutlass.const_expr(self.count), self.kept, turn % self.slots
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(count):
                kept[cute.arch.warp_idx(), i, slot] = values[i]
            self.started.arrive(slot)

    @cute.jit
    def finish(
        self, gather: cutlass.Constexpr[Gather], turn: Int32 | int, turns: Int32 | int
    ) -> Values:
        """`gather` of the values of all CTAs, as the warp that collects has left it."""
        slot = turn % self.slots
        self.full.wait(turn // self.slots % 2, slot)
        return tuple(self.found[i, slot] for i in range(self.sent))

    @cute.jit
    def publish(self, gather: cutlass.Constexpr[Gather], rank: Int32, turn: Int32) -> None:
        """Publish this CTA's values of a turn's row. The warp that does this calls it."""
        lane, slot = cute.arch.lane_idx(), turn % self.slots
        self.started.wait(turn // self.slots % 2, slot)
        own = tuple(self.kept[lane % self.tile.warps, i, slot] for i in range(self.count))
        values = gather([own], self.tile.warps)[-self.sent :]
        if lane == 0:
            for i in cutlass.range_constexpr(self.sent):
                word = Int64(values[i].bitcast(Int32)) & LOW | Int64(turn + 1) << 32
                cute.arch.store(self.at(rank, i, turn), word, sem="relaxed", scope="gpu")
            self.full.arrive(slot)

    @cute.jit
    def collect(
        self, gather: cutlass.Constexpr[Gather], counts: list[Float32], turn: Int32
    ) -> None:
        """Gather what all CTAs publish of a turn's row. The warp that does this calls it.

        counts: how many columns the CTAs have whose values this lane takes; 0 past the last one.
        """
        lane, slot = Int32(cute.arch.lane_idx()), turn % self.slots
        self.started.wait(turn // self.slots % 2, slot)  # all have read what was found before
        values = self.taken(turn)
        parts = []
        for i in cutlass.range_constexpr(self.lanes_turns):
            here = lane + i * WARP < self.sharers
            last = cutlass.select_(here, values[self.sent - 1, i], Float32(0))
            parts.append((last,) if self.sent == 1 else (counts[i], values[0, i], last))
        values_of_row, found = gather(parts, WARP), self.found
        if lane == 0:
            for i in cutlass.range_constexpr(self.sent):
                found[i, slot] = values_of_row[i]
            self.full.arrive(slot)

    @property
    def lanes_turns(self) -> int:
        """How many CTAs' values a lane of the warp that collects takes."""
        return -(-self.sharers // WARP)

    @cute.jit
    def taken(self, turn: Int32) -> cute.Tensor:
        """The values (sent, CTA of this lane) of a turn, once all are there."""
        shape = self.sent, self.lanes_turns
        values = cute.make_rmem_tensor(shape, Float32)
        is_there = self.look(values, turn)
        while ~is_there:
            is_there = self.look(values, turn)
        return values

    @cute.jit
    def look(self, values: cute.Tensor, turn: Int32) -> Boolean:
        """Load the words of this lane's CTAs; whether all are of this turn."""
        lane, is_there = Int32(cute.arch.lane_idx()), Boolean(True)
        words = cute.make_rmem_tensor(values.shape, Int64)
        for i in cutlass.range_constexpr(self.lanes_turns):
            rank = cutlass.min(lane + i * WARP, self.sharers - 1)
            for j in cutlass.range_constexpr(self.sent):
                words[j, i] = cute.arch.load(
                    self.at(rank, j, turn), Int64, sem="relaxed", scope="gpu"
                )
        for i in cutlass.range_constexpr(self.lanes_turns):
            for j in cutlass.range_constexpr(self.sent):
                is_there = is_there & (Int32(words[j, i] >> 32) == turn + 1)
                values[j, i] = Int32(words[j, i] & LOW).bitcast(Float32)
        return is_there

    def at(self, rank: Int32, value: int, turn: Int32) -> cute.Pointer:
        """The word of a CTA's value of a turn."""
        slot = turn % cute.size(self.words, mode=[2])
        return cute.domain_offset((rank, value, slot), self.words).iterator

    @cute.jit
    def leave(self) -> None:
        """Zero the group's words, in whichever CTA finds that all others have read the last ones.
        The warp that collects calls it."""
        lane, is_last = Int32(cute.arch.lane_idx()), Int32(0)
        if lane == 0:
            is_last = Int32(is_last_arrival(self.counter, Int32(self.sharers)))
        if cute.arch.shuffle_sync(is_last, 0) != 0:
            for i in cutlass.range(lane, cute.size(self.words), WARP, unroll=1):
                cute.arch.store(self.words.iterator + i, Int64(0), sem="relaxed", scope="gpu")
