"""Which of a launch's chunks of rows a group of CTAs takes next: the first that nobody has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.count import next_number
from cutex.device.pipeline import Barrier

# numbers on their way to a cluster's CTAs: by the signals of a row's sums all have read one before
# that of six turns later is sent
TOLD = 8


@dataclass(frozen=True)
class Tickets:
    """The chunks of rows that this group takes: every `kinds`-th of all, which begin alike, from
    the `kind`-th on, numbered up to `count`. The first `early` turns of each of `members` groups
    need no ticket.

    Tickets are counted in global memory. A group draws until it gets a number behind the last, so
    that there are as many as chunks but the first ones, by `each`, and one more for each member;
    who drew the last one leaves the count zeroed.
    """

    drawn: cute.Pointer
    own: Int32
    members: Int32
    kind: Int32
    kinds: Int32
    count: Int32
    early: int
    each: int = 1  # chunks of a ticket, one after another

    @property
    def given(self) -> Int32:
        return self.members * self.early

    def first(self, turn: int) -> Int32:
        """The number of the chunk of a turn that needs no ticket."""
        return self.own + turn * self.members

    def chunk(self, number: Int32) -> Int32:
        return number * self.kinds + self.kind

    @property
    def left(self) -> Int32:
        """How many tickets are for chunks; 0 or less if none has to be drawn."""
        chunks = self.count - self.given
        return chunks if self.each == 1 else Int32(cute.ceil_div(chunks, self.each))

    def draw(self) -> Int32:
        """A ticket. Lane 0 calls it, and should not look at it before its next turn."""
        return next_number(self.drawn)

    def number(self, ticket: Int32) -> Int32:
        """The number of a ticket's first chunk; behind the last one if there is none."""
        return (ticket if self.each == 1 else ticket * self.each) + self.given

    @cute.jit
    def end(self, ticket: Int32) -> None:
        """Leave the count zeroed, if `ticket`, this group's last one, was the last of all."""
        if (self.left > 0) & (ticket == self.left + self.members - 1):
            cute.arch.store(self.drawn, Int32(0), sem="relaxed", scope="gpu")


@dataclass(frozen=True)
class Places:
    """Which chunk of rows is in each slot; and where a cluster's CTAs are told what comes next.

    barrier     arrives                                         waits
    told[slot]  1: thread 0 of this CTA, and 4 bytes from the   thread 0
                first CTA of the cluster
    """

    of_slots: cute.Tensor  # (STAGE)
    numbers: Any  # (TOLD); None of a CTA alone
    told: Any  # Barrier

    @staticmethod
    def allocate(stages: int, ctas: int) -> Places:
        smem = SmemAllocator()
        of_slots = smem.allocate_tensor(Int32, cute.make_layout(stages), 16)
        if ctas == 1:
            return Places(of_slots, None, None)
        numbers = smem.allocate_tensor(Int32, cute.make_layout(TOLD), 16)
        return Places(of_slots, numbers, Barrier.allocate(smem, "told", 1, TOLD))

    def __getitem__(self, turn: Int32 | int) -> Int32:
        return self.of_slots[turn % cute.size(self.of_slots)]

    @cute.jit
    def tell(self, word: Int32, index: Int32, ctas: cutlass.Constexpr[int]) -> None:
        """Send every CTA of the cluster the number drawn as the index-th. A warp calls it."""
        slot, lane = index % TOLD, cute.arch.lane_idx()
        if lane < ctas:
            to = self.numbers.iterator + slot
            cute.arch.store_async_dsmem(to, word, self.told[slot], lane)

    @cute.jit
    def hear(self, index: Int32) -> Int32:
        """The number that was drawn as the index-th. Thread 0 calls it."""
        slot = index % TOLD
        self.told.arrive_expecting(4, slot)
        self.told.wait(index // TOLD % 2, slot)
        return self.numbers[slot]
