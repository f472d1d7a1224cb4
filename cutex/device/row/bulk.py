"""Bulk copies of runs of contiguous elements between gmem and slots of smem."""

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
    """Contiguous gmem elements that one bulk copy brings into a slot of smem.

    A run keeps its gmem offset from a 128-byte line in the slot. If elements of the same tensor
    stand `before` or `after` it, its first or last 16-byte unit is copied whole, neighbours
    included; otherwise the elements at that end are copied one by one."""

    gX: cute.Tensor  # (count)
    lead: Int32  # elements from the begin of a slot to the first
    after: Boolean
    before: Boolean
    whole: bool = False  # it begins with 16 bytes, and is a whole number of them

    @property
    def width(self) -> int:
        """The number of elements in 16 bytes."""
        return COPY_BYTES * 8 // self.gX.element_type.width

    @property
    def end(self) -> Int32:
        """The index in a slot one past the last element."""
        return self.lead + Int32(cute.size(self.gX))

    @cute.jit
    def load(self, slot: cute.Tensor, full: cute.Pointer) -> None:
        """Start the copy into a slot; one phase of `full` completes with it. Called by one
        thread."""
        if cutlass.const_expr(self.whole):
            self.copy(slot, full, self.lead, self.end)
        elif self.after & self.before:  # nearly always
            first, last = self.lead & -self.width, (self.end + (self.width - 1)) & -self.width
            self.copy(slot, full, first, last)
        else:
            self.load_ends(slot, full)

    @cute.jit
    def load_ends(self, slot: cute.Tensor, full: cute.Pointer) -> None:
        """Like `load`, for a run at an end of its tensor, where some elements are copied one by
        one."""
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

    @cute.jit
    def copy(self, slot: cute.Tensor, full: cute.Pointer, first: Int32, last: Int32) -> None:
        """Start the bulk copy of elements `first` to `last` of a slot, if there are any."""
        num_bytes = (last - first) * (COPY_BYTES // self.width)
        cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
        if num_bytes > 0:
            to = slot.iterator + first
            load_bulk(to, self.gX.iterator + (first - self.lead), num_bytes, full)

    def send(self, slot: cute.Tensor) -> None:
        """Start the copy from a slot to this run, in the bulk group that this thread commits next.
        The run must be `whole`."""
        num_bytes = (self.end - self.lead) * (COPY_BYTES // self.width)
        store_bulk(self.gX.iterator, slot.iterator + self.lead, num_bytes)

    @cute.jit
    def store(self, slot: cute.Tensor) -> None:
        """Start the copy from a slot to this run as a bulk group of its own; elements that share a
        16-byte unit with others are stored one by one. Called by all threads."""
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
        """The range of a slot whose 16-byte units belong to this run alone."""
        width = self.width
        if self.whole:
            return self.lead, self.end
        return (self.lead + (width - 1)) & -width, self.end & -width


def lead_of(mX: cute.Tensor, elements: Int32 | int) -> Int32:
    """The offset in its slot of an element of mX: as many elements past a 128-byte line as in gmem,
    so that no line of either side is split by a copy (docs/facts/rows.md#rows-bulk-lines).

    NOTE: `elements` may have overflowed 32 bits; only its lowest bits are used.
    """
    bits = mX.element_type.width
    return (Int32(mX.iterator.toint()) // (bits // 8) + elements) & (LINE_BYTES * 8 // bits - 1)


@dataclass(frozen=True)
class BulkRing:
    """A ring of smem slots that runs are copied to.

    barrier     arrives                                           waits
    full[slot]  1: the thread that starts the copy, and its bytes  all threads
    """

    slots: cute.Tensor  # (length, STAGE)
    full: Barrier

    @staticmethod
    def allocate(dtype: Any, elements: int, stages: int) -> BulkRing:
        """Allocate slots for runs of this many elements. The caller publishes the barriers."""
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
        """Start the copy of a run into the slot of a turn. Called by one thread."""
        run.load(self[turn], self.full[turn % self.stages])

    def wait(self, turn: Int32 | int) -> None:
        """Wait for the copy of this turn."""
        self.full.wait(turn // self.stages % 2, turn % self.stages)
