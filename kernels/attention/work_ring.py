"""WorkRing: the slots of Q, each with the tile that it holds and whether the tile's result is
valid.

The load warp hands out tiles with their Q: a slot's words give its tile and the lengths of its
sequences, so that consumers get both after the barrier that they wait for anyway, without a read
of global memory. On releasing a slot, each consumer warp says whether its rows are valid; a tile
that is not is loaded again, to be computed in retry mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.pipeline import PipelineState, Ring
from cutex.device.work_tile import WorkTile

# how a slot's tile is to be computed; END: there are no more tiles; MERGE: it has been, in parts
END, NORMAL, RETRY, MERGE = range(4)
WORDS = 8  # words of a slot; the last is read in any case, because three are loaded as four
OF_PARTS = 4  # more, of tiles that are split: as many as are loaded at once, of which two count


@dataclass(frozen=True)
class WorkRing:
    """The ring of Q's slots and their words.

    barrier         arrives                                   waits
    q.full[slot]    1: LOAD, and the bytes by TMA             consumers, before the first QK
    q.empty[slot]   1 a consumer warp, done with the tile     LOAD
    """

    q: Ring
    # (WORDS, SLOT): mode; m, head, batch; offset, length; length of keys; whether forwards, or what
    # becomes of a part of a tile; of tiles that are split, the blocks of a part, its place and its
    # first block
    words: cute.Tensor
    failed: cute.Tensor  # (consumer warps, SLOT): whether a warp's rows must be done again

    event: ClassVar[str] = "q"

    @classmethod
    def allocate(
        cls,
        smem: SmemAllocator,
        num_slots: int,
        slot_bytes: int,
        consumer_warps: int,
        has_parts: bool = False,
    ) -> Self:
        count = WORDS + OF_PARTS * has_parts
        words = smem.allocate_array(Int32, count * num_slots)
        failed = smem.allocate_array(Int32, consumer_warps * num_slots)
        return cls(
            Ring.allocate(smem, cls.event, num_slots, slot_bytes, consumer_warps),
            cute.make_tensor(words, cute.make_layout((count, num_slots))),
            cute.make_tensor(failed, cute.make_layout((consumer_warps, num_slots))),
        )

    # ---- the load warp's side

    @cute.jit
    def clear(self) -> None:
        """Mark all slots as holding no failed tile, before the first tile."""
        lane, words = cute.arch.lane_idx(), self.failed
        for slot in cutlass.range_constexpr(self.q.num_slots):
            if lane < cute.size(words, mode=[0]):
                words[lane, slot] = Int32(0)
        cute.arch.sync_warp()

    def announce(
        self,
        state: PipelineState,
        mode: Int32,
        work: WorkTile,
        seq_q: SeqlenInfo | None = None,
        seq_k: SeqlenInfo | None = None,
        forwards: Int32 | None = None,
        part: Int32 | None = None,
        of_part: tuple[Int32, ...] = (),
    ) -> cute.Pointer:
        """Fill the words of an empty slot, arm its barrier and return it."""
        words = self.words
        with cute.arch.elect_one():
            values: tuple[Int32 | int, ...] = (mode, work.m, work.head, work.batch)
            if seq_q is not None and seq_k is not None:
                values = (*values, seq_q.offset, seq_q.length, seq_k.length)
            if forwards is not None:
                values = (*values, forwards)
            elif part is not None:
                values = (*values, part, *of_part)
            for i, value in enumerate(values):
                words[i, state.slot] = value
            self._arm(state.slot)
        return self.q.full[state.slot]

    @cute.jit
    def say(
        self,
        state: PipelineState,
        mode: int,
        work: WorkTile,
        seq_q: SeqlenInfo,
        seq_k: SeqlenInfo,
        place: Int32,
    ) -> None:
        """Fill the words of an empty slot for a part of a tile, of which nothing is loaded."""
        words = self.words
        with cute.arch.elect_one():
            lengths = seq_q.offset, seq_q.length, seq_k.length
            values = mode, work.m, work.head, work.batch, *lengths, 0, place, 0
            for i, value in enumerate(values):
                words[i, state.slot] = Int32(value)
            self.q.full.arrive(state.slot)

    def _arm(self, slot: Int32) -> None:
        self.q.full.arrive_expecting(self.q.slot_bytes, slot)

    @cute.jit
    def end(self, state: PipelineState) -> None:
        """Announce to the consumers that there are no more tiles."""
        words = self.words
        with cute.arch.elect_one():
            words[0, state.slot] = Int32(END)
            self.q.full.arrive(state.slot)

    @cute.jit
    def take_back(self, slot: Int32) -> Boolean:
        """Whether the tile of an emptied slot failed; the mark is cleared."""
        lane, words = cute.arch.lane_idx(), self.failed
        failed = Boolean(False)
        if lane < cute.size(words, mode=[0]):
            failed = words[lane, slot] != 0
        any_failed = cute.arch.vote_any_sync(failed)
        if failed:
            words[lane, slot] = Int32(0)
        cute.arch.sync_warp()
        return any_failed

    # ---- both sides

    def work(self, slot: Int32) -> WorkTile:
        m, head, batch = (self.words[i, slot] for i in (1, 2, 3))
        return WorkTile(m, head=head, batch=batch)

    def mode(self, slot: Int32) -> Int32:
        return self.words[0, slot]

    def lengths(self, slot: Int32) -> tuple[SeqlenInfo, Int32]:
        """The number of queries of the sequence, and the number of keys."""
        q = SeqlenInfo(self.words[4, slot], self.words[5, slot])
        return q, self.words[6, slot]

    def forwards(self, slot: Int32) -> Int32:
        """1 if the tile's keys are processed from the first to the last, 0 if the other way."""
        return self.words[7, slot]

    def part(self, slot: Int32) -> Int32:
        """What becomes of a part of a tile (forward/sm90/parts.py); 0: it is whole. Of a tile that
        is split, the blocks of keys of this part (device/attention/split_row.py)."""
        return cute.arch.make_warp_uniform(self.words[7, slot])

    def place(self, slot: Int32) -> Int32:
        """The word of the place of a part of a tile that is split."""
        return cute.arch.make_warp_uniform(self.words[8, slot])

    def first(self, slot: Int32) -> Int32:
        """The first block of keys of such a part."""
        return self.words[9, slot]

    # ---- the consumers' side

    @cute.jit
    def release(self, state: PipelineState, valid: Boolean) -> None:
        """Release the slot for this warp, and mark it as failed unless all its rows are `valid`.
        A whole warp calls it."""
        failed = Int32(1) - Int32(cute.arch.vote_all_sync(valid))
        words = self.failed
        with cute.arch.elect_one():
            words[cute.arch.warp_idx(), state.slot] = failed
        cute.arch.sync_warp()
        self.q.release(state)
