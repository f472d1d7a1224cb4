"""Reductions over the threads of a row: part of a warp, a CTA, or a cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.pipeline import Barrier
from cutex.device.row.tile import WARP, RowTile

Values = tuple[Float32, ...]
Combine = Callable[[Values, Values], Values]  # associative and commutative
Gather = Callable[[list[Values], int], Values]  # of a lane's values, and of so many lanes
SLOTS = 2  # a warp may be a reduction ahead of another, never two


def add(x: Values, y: Values) -> Values:
    """Elementwise sums of two tuples of values."""
    return tuple(a + b for a, b in zip(x, y, strict=True))


@dataclass(frozen=True)
class RowReduction:
    """Reductions of `count` values of each thread over the threads of its row.

    Lanes combine by shuffles; the first lane of each warp writes what it has into the smem of
    every CTA that shares the row, and each warp combines all that was written. With `parts`, it
    writes into that of its own CTA; the first warp combines these, and sends one value to every
    CTA: a message takes its time, of which 8 CTAs of 8 warps would else each get 64.

    barrier     arrives                                       waits
    full[slot]  1: thread 0 of this CTA, and 4 * count bytes  all threads; only of a cluster,
                from each warp of the cluster, or each CTA    else a barrier of the CTA
    read[slot]  1 a warp of the cluster, or a CTA, the slot   who sends, before that; only where
                being read                                    reductions are repeated
    """

    tile: RowTile
    count: int
    words: Any  # (WARP of the row, row, count, SLOT); None if lanes of one warp share a row
    full: Any  # Barrier; None if one CTA has the row
    read: Any  # Barrier; None if reductions are not repeated
    parts: Any = None  # (CTA, count, SLOT); None where warps send

    @staticmethod
    def allocate(
        smem: SmemAllocator, tile: RowTile, count: int = 1, repeated: bool = False,
        by_cta: bool = False,
    ) -> RowReduction:  # fmt: skip
        """Allocate a reduction of `count` values; `repeated` if it is called more than twice.
        by_cta: a CTA of a cluster sends its warps' values as one; `start` and `finish` are then
        not called but by `of_warps`."""
        full = read = None
        if tile.warps * tile.ctas <= 1:
            return RowReduction(tile, count, None, full, read)
        if by_cta and tile.ctas > 1 and tile.rows == 1:
            shape = tile.warps, 1, count, SLOTS
            words = smem.allocate_tensor(Float32, cute.make_layout(shape), 16)
            parts = smem.allocate_tensor(Float32, cute.make_layout((tile.ctas, count, SLOTS)), 16)
            full = Barrier.allocate(smem, "full", 1, SLOTS)
            read = Barrier.allocate(smem, "read", tile.ctas, SLOTS) if repeated else None
            return RowReduction(tile, count, words, full, read, parts)
        shape = tile.warps * tile.ctas, tile.rows, count, SLOTS
        words = smem.allocate_tensor(Float32, cute.make_layout(shape), 16)
        if tile.ctas > 1:
            full = Barrier.allocate(smem, "full", 1, SLOTS)
        if tile.ctas > 1 and repeated:
            read = Barrier.allocate(smem, "read", tile.num_threads // WARP * tile.ctas, SLOTS)
        return RowReduction(tile, count, words, full, read)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Barriers to publish to the cluster before the first reduction."""
        return tuple(b for b in (self.full, self.read) if b is not None)

    @cute.jit
    def __call__(
        self,
        values: Values,
        combine: cutlass.Constexpr[Combine],
        turn: Int32 | int = 0,
        turns: Int32 | int = 1,
    ) -> Values:
        """The `combine` of the values of all threads of the row.

        Called by all threads of the CTA and of the cluster; `turn` counts the reductions of this
        kind from 0, of `turns` in all."""
        values = lanes(values, combine, min(self.tile.threads, WARP))
        return self.of_warps(values, pairwise(combine), turn, turns)

    @cute.jit
    def of_warps(
        self,
        values: Values,
        gather: cutlass.Constexpr[Gather],
        turn: Int32 | int = 0,
        turns: Int32 | int = 1,
        inner: cutlass.Constexpr[Gather | None] = None,
    ) -> Values:
        """Like a call, for values that are already equal in all lanes of a warp (or of a row inside
        it). inner: the gather of a CTA's part, if not the same."""
        if cutlass.const_expr(self.words is None):
            return values
        if cutlass.const_expr(self.parts is not None):
            if cutlass.const_expr(inner is None):
                inner = gather
            return self.by_ctas(values, gather, turn, turns, inner)
        self.start(values, turn)
        if cutlass.const_expr(self.full is None):
            cute.arch.sync_threads()
        return self.finish(gather, turn, turns)

    @cute.jit
    def by_ctas(
        self, values: Values, gather: cutlass.Constexpr[Gather], turn: Int32 | int,
        turns: Int32 | int, inner: cutlass.Constexpr[Gather],
    ) -> Values:  # fmt: skip
        """`gather` of what the CTAs' first warps send, `inner` of their warps' values."""
        tile, slot = self.tile, turn % SLOTS
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        self.keep(values, Int32(0), warp, slot)
        cute.arch.sync_threads()
        if warp == 0:
            if lane == 0:
                self.full.arrive_expecting(4 * tile.ctas * self.count, slot)
            own = tuple(self.words[lane % tile.warps, 0, i, slot] for i in range(self.count))
            found = inner([own], tile.warps)
            if cutlass.const_expr(self.read is not None):
                # all threads are behind their reads of the turn before
                # NOTE: only where the CTA waits for it: a signal to one that has ended is a fault
                if (lane < tile.ctas) & (turn > 0) & (turn - 1 + SLOTS < turns):
                    cute.arch.mbarrier_arrive(self.read[(turn + 1) % SLOTS], lane)
                self.read.wait(turn // SLOTS % 2 ^ 1, slot)  # at once in the first round
            if lane < tile.ctas:  # one lane for each CTA
                for i in cutlass.range_constexpr(self.count):
                    place = cute.arch.block_idx_in_cluster(), i, slot
                    to = cute.domain_offset(place, self.parts).iterator
                    word = Float32(found[i]).bitcast(Int32)
                    cute.arch.store_async_dsmem(to, word, self.full[slot], lane)
        self.full.wait(turn // SLOTS % 2, slot)
        part = lane % tile.ctas
        return gather([tuple(self.parts[part, i, slot] for i in range(self.count))], tile.ctas)

    @cute.jit
    def start(self, values: Values, turn: Int32 | int) -> None:
        """Write this warp's values where all warps of the row will read them; inside one CTA they
        are readable after its next barrier."""
        slot = turn % SLOTS
        row = cute.arch.thread_idx()[0] // self.tile.threads
        warp = cute.arch.warp_idx() % self.tile.warps
        if cutlass.const_expr(self.full is None):
            self.keep(values, row, warp, slot)
        else:
            if cutlass.const_expr(self.read is not None):
                self.read.wait(turn // SLOTS % 2 ^ 1, slot)  # at once in the first round
            self.send(values, row, warp, slot)

    @cute.jit
    def finish(
        self, gather: cutlass.Constexpr[Gather], turn: Int32 | int, turns: Int32 | int
    ) -> Values:
        """`gather` of the values of all warps of the row in this turn. A turn may start before the
        previous one is finished, but not earlier."""
        slot = turn % SLOTS
        row = cute.arch.thread_idx()[0] // self.tile.threads
        if cutlass.const_expr(self.full is not None):
            self.full.wait(turn // SLOTS % 2, slot)
        parts = self.tile.warps * self.tile.ctas
        found = gather(self.written(row, slot), min(parts, WARP))
        if cutlass.const_expr(self.read is not None):
            cute.arch.sync_warp()
            lane = cute.arch.lane_idx()
            # NOTE: only where the CTA waits for it: a signal to one that has ended is a fault
            if (lane < self.tile.ctas) & (turn + SLOTS < turns):  # one lane for each CTA
                cute.arch.mbarrier_arrive(self.read[slot], lane)
        return found

    @cute.jit
    def keep(self, values: Values, row: Int32, warp: Int32, slot: Int32 | int) -> None:
        """Write this warp's values into the smem of its CTA."""
        count, words = cutlass.const_expr(self.count), self.words
        if cute.arch.lane_idx() == 0:  # NOTE: elect.sync begins with sm_90
            for i in cutlass.range_constexpr(count):
                words[warp, row, i, slot] = values[i]

    @cute.jit
    def send(self, values: Values, row: Int32, warp: Int32, slot: Int32 | int) -> None:
        """Write this warp's values into the smem of every CTA of the cluster."""
        tile = self.tile
        if cute.arch.thread_idx()[0] == 0:
            words = tile.rows * tile.warps * tile.ctas * self.count
            self.full.arrive_expecting(4 * words, slot)
        place = cute.arch.block_idx_in_cluster() * tile.warps + warp
        lane = cute.arch.lane_idx()
        if lane < tile.ctas:  # one lane for each CTA
            for i in cutlass.range_constexpr(self.count):
                to = cute.domain_offset((place, row, i, slot), self.words).iterator
                word = values[i].bitcast(Int32)
                cute.arch.store_async_dsmem(to, word, self.full[slot], lane)

    def written(self, row: Int32, slot: Int32 | int) -> list[Values]:
        """The values that the row's warps have written, distributed over lanes, or repeated if
        there are fewer."""
        places = self.places()
        return [tuple(self.words[p, row, i, slot] for i in range(self.count)) for p in places]

    def places(self) -> list[Int32]:
        """The warps of the row whose values this lane combines first."""
        parts, lane = self.tile.warps * self.tile.ctas, cute.arch.lane_idx()
        return [lane % parts] + [more + lane for more in range(WARP, parts, WARP)]


def pairwise(combine: Combine) -> Gather:
    """A gather that combines a lane's values, then its group's by shuffles."""
    return lambda found, group: lanes(functools.reduce(combine, found), combine, group)


def lanes(values: Values, combine: Combine, group: int) -> Values:
    """The `combine` over `group` neighbouring lanes, by shuffles."""
    distance = group // 2
    while distance:
        other = tuple(cute.arch.shuffle_sync_bfly(x, offset=distance) for x in values)
        values = combine(values, other)
        distance //= 2
    return values
