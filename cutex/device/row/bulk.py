"""Runs of memory on their way to slots of smem and back, by bulk copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.bulk import load_bulk, store_bulk
from cutex.device.pipeline import Barrier
from cutex.device.row.tile import LINE_BYTES, slot_bytes

COPY_BYTES = 16  # a bulk copy has a whole number of these, and begins with one on both sides


@dataclass(frozen=True)
class Run:
    """Elements of gmem that one bulk copy brings to a slot of smem, at the same offset from a
    line of 128 bytes as in gmem. What shares the first or the last 16 bytes with them comes,
    too, if it is `after` or `before` elements of the same tensor; else those at the end come by the
    element."""

    gX: cute.Tensor  # (count)
    lead: Int32  # elements from the begin of a slot to the first
    after: Boolean
    before: Boolean
    whole: bool = False  # it begins with 16 bytes, and is a whole number of them

    @property
    def width(self) -> int:
        """The elements of 16 bytes."""
        return COPY_BYTES * 8 // self.gX.element_type.width

    @property
    def end(self) -> Int32:
        """The index in a slot after the last element."""
        return self.lead + Int32(cute.size(self.gX))

    @cute.jit
    def load(self, slot: cute.Tensor, full: cute.Pointer) -> None:
        """Start the copy to a slot; a phase of `full` completes with it. One thread calls it."""
        if cutlass.const_expr(self.whole):
            self.copy(slot, full, self.lead, self.end)
        elif self.after & self.before:  # nearly always
            first, last = self.lead & -self.width, (self.end + (self.width - 1)) & -self.width
            self.copy(slot, full, first, last)
        else:
            self.load_ends(slot, full)

    @cute.jit
    def load_ends(self, slot: cute.Tensor, full: cute.Pointer) -> None:
        """The same of a run at an end of its tensor, where elements come one by one."""
        width, end = self.width, self.end
        first, last = self.inner()
        if self.after:
            first = self.lead & -width
        if self.before:
            last = (end + (width - 1)) & -width
        if (first > self.lead) & ~self.after:
            for i in cutlass.range(self.lead, first, unroll=1):
                slot[i] = self.gX[i - self.lead]
        if ~self.before:
            for i in cutlass.range(last, end, unroll=1):
                slot[i] = self.gX[i - self.lead]
        self.copy(slot, full, first, last)

    def copy(self, slot: cute.Tensor, full: cute.Pointer, first: Int32, last: Int32) -> None:
        """Start the copy of what lies from `first` to `last` in a slot."""
        num_bytes = (last - first) * (COPY_BYTES // self.width)
        cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
        to = slot.iterator + first
        load_bulk(to, self.gX.iterator + (first - self.lead), num_bytes, full)

    def send(self, slot: cute.Tensor) -> None:
        """Start the copy of a slot to here, in the bulk group that this thread commits next; only
        of a `whole` run."""
        num_bytes = (self.end - self.lead) * (COPY_BYTES // self.width)
        store_bulk(self.gX.iterator, slot.iterator + self.lead, num_bytes)

    @cute.jit
    def store(self, slot: cute.Tensor) -> None:
        """Start the copy of a slot to here, a bulk group of its own; but for what shares its 16
        bytes with others, which is stored by the element. All threads call it."""
        thread, (first, last) = Int32(cute.arch.thread_idx()[0]), self.inner()
        if thread == 0:
            num_bytes = (last - first) * (COPY_BYTES // self.width)
            store_bulk(self.gX.iterator + (first - self.lead), slot.iterator + first, num_bytes)
            cute.arch.cp_async_bulk_commit_group()
        if cutlass.const_expr(not self.whole) and thread < self.width:
            if self.lead + thread < first:
                self.gX[thread] = slot[self.lead + thread]
            if last + thread < self.end:
                self.gX[last + thread - self.lead] = slot[last + thread]

    def inner(self) -> tuple[Int32, Int32]:
        """The range in a slot whose 16-byte units are all this run's own."""
        width = self.width
        if self.whole:
            return self.lead, self.end
        return (self.lead + (width - 1)) & -width, self.end & -width


def lead_of(mX: cute.Tensor, elements: Int32 | int) -> Int32:
    """Where in its slot an element of mX comes to: as far behind a line of 128 bytes as in gmem,
    so that no line of either is copied to, or from, two (docs/facts/rows.md#rows-bulk-lines).

    NOTE: `elements` may have overflown 32 bits, of which the lowest alone are wanted.
    """
    bits = mX.element_type.width
    return (Int32(mX.iterator.toint()) // (bits // 8) + elements) & (LINE_BYTES * 8 // bits - 1)


@dataclass(frozen=True)
class BulkRing:
    """Slots of smem that runs come to, turn after turn.

    barrier     arrives                                           waits
    full[slot]  1: the thread that starts the copy, and its bytes  all threads
    """

    slots: cute.Tensor  # (length, STAGE)
    full: Barrier

    @staticmethod
    def allocate(dtype: Any, elements: int, stages: int) -> BulkRing:
        """Slots for runs of so many elements; its barriers are to be published."""
        smem = SmemAllocator()
        full = Barrier.allocate(smem, "full", 1, stages)
        length = slot_bytes(elements * dtype.width // 8) * 8 // dtype.width
        layout = cute.make_layout((length, stages))
        return BulkRing(smem.allocate_tensor(dtype, layout, LINE_BYTES), full)

    @property
    def stages(self) -> int:
        return self.full.slots

    def __getitem__(self, turn: Int32 | int) -> cute.Tensor:
        """The slot of a turn (length)."""
        return self.slots[None, turn % self.stages]

    def load(self, run: Run, turn: Int32 | int) -> None:
        """Start the copy of a run to the slot of a turn. One thread calls it."""
        run.load(self[turn], self.full[turn % self.stages])

    def wait(self, turn: Int32 | int) -> None:
        """Wait for what was loaded for this turn."""
        self.full.wait(turn // self.stages % 2, turn % self.stages)
