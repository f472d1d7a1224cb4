"""What kernels by bulk copies share whose CTAs that stay draw the rows that they take.

SMs do not come by memory's bytes at one rate, so that of equal shares some end long before others
(docs/facts/rows.md#rows-shares). Here the first rows of a CTA, or of a cluster, are those of equal
shares, as many as are on their way at one time; each one more is the next that nobody has taken.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from cutex.compile import Operand
from cutex.device.pipeline import publish_barriers, sync_cluster
from cutex.device.row.bulk import BulkRing
from cutex.device.row.tickets import Places, Tickets
from cutex.device.row.tile import RowTile

END = -1  # a chunk behind the last one
FOREVER = 1 << 30  # turns, of a loop that does not know how many it has
Drawn = tuple[Int32, Int32, Int32]  # the ticket drawn last, the one told last, the chunk told last
DRAWN = Operand("drawn", ("kinds",), "int32", aligned=False, whole=False)


class ByTickets:
    """Thread 0 of a CTA, or of a cluster's first one, draws tickets; that of each CTA starts the
    copies, and leaves beside a slot which chunk is in it.

    smem            bytes
    places          4 * stages; of a cluster 4 * TOLD + 8 * TOLD more
    """

    tile: RowTile
    stages: int
    each: int = 1  # chunks of a ticket, of CTAs alone
    run: Any  # (mX, chunk): this CTA's part of a chunk of rows of mX (M, N), a Run

    def places(self) -> Places:
        """Where chunks are told; a cluster's barrier is published with those of its sums."""
        places = Places.allocate(self.stages, self.tile.ctas)
        if self.tile.ctas > 1:
            publish_barriers((places.told,))
        return places

    def tickets(self, mX: cute.Tensor, mDrawn: cute.Tensor, groups: Int32) -> Tickets:
        """The chunks of this group: of an odd number of elements of 16 bits, every other one."""
        rows = Int32(cute.size(mX, mode=[0]))
        group, per = Int32(cute.arch.block_idx()[0]) // self.tile.ctas, 32 // mX.element_type.width
        odd = Int32(cute.size(mX, mode=[1])) * self.tile.rows & (per - 1)
        kinds = Int32(1 + odd)
        kind = group % kinds
        count = (cute.ceil_div(rows, self.tile.rows) - kind + kinds - 1) // kinds
        # a cluster's CTAs are told of a turn in the turn before they take it
        early = self.stages - 1 + (self.tile.ctas > 1)
        drawn = mDrawn.iterator + kind
        how = kind, kinds, count, early, self.each
        return Tickets(drawn, group // kinds, groups // kinds, *how)

    def is_first(self) -> Boolean:
        """Whether this CTA draws tickets: the first of its cluster."""
        if self.tile.ctas == 1:
            return Boolean(True)
        return Int32(cute.arch.block_idx_in_cluster()) == 0

    @cute.jit
    def first_ones(
        self, mX: cute.Tensor, ring: BulkRing, places: Places, tickets: Tickets
    ) -> Drawn:
        """Start the copies that need no ticket, and draw the first one."""
        for turn in cutlass.range_constexpr(self.stages - 1):
            self.take(mX, ring, places, turn, tickets.first(turn), tickets)
        ticket = said = tickets.left
        if (tickets.left > 0) & self.is_first():
            said = Int32(0)
            if cute.arch.thread_idx()[0] == 0:
                ticket = tickets.draw()
        return ticket, said, tickets.first(tickets.early - 1)

    @cute.jit
    def next_one(
        self, mX: cute.Tensor, ring: BulkRing, places: Places, tickets: Tickets, drawn: Drawn,
        turn: Int32,
    ) -> Drawn:  # fmt: skip
        """Start the copy to the slot that this turn has left free, and draw the next ticket. Warp 0
        calls it."""
        ticket, said, taken = drawn
        if cutlass.const_expr(self.each > 1):
            is_next = turn % self.each == 0
            taken = cutlass.select_(is_next, tickets.number(ticket), taken + 1)
        elif cutlass.const_expr(self.tile.ctas == 1):
            taken = tickets.number(ticket)
        else:
            said = self.told(places, tickets, ticket, said, turn)
            taken = self.heard(places, tickets, taken, turn)
        self.take(mX, ring, places, turn + (self.stages - 1), taken, tickets)
        draws = (cute.arch.thread_idx()[0] == 0) & (ticket < tickets.left)
        if cutlass.const_expr(self.each > 1):
            draws = draws & is_next
        if draws:
            ticket = tickets.draw()  # on its way for a turn
        return ticket, said, taken

    @cute.jit
    def told(
        self, places: Places, tickets: Tickets, ticket: Int32, said: Int32, turn: Int32
    ) -> Int32:
        """Tell the cluster of the ticket drawn last; return it, to all lanes of warp 0, which
        call it. Behind the last chunk there is nothing more to tell."""
        if said < tickets.left:
            said = cute.arch.shuffle_sync(ticket, 0)
            places.tell(said, turn, self.tile.ctas)
        return said

    @cute.jit
    def heard(self, places: Places, tickets: Tickets, taken: Int32, turn: Int32) -> Int32:
        """The number of the chunk whose copy is started in a turn, after `taken` in the turn
        before; that of the first turn needed no ticket. Thread 0 has it."""
        if (cute.arch.thread_idx()[0] == 0) & (turn > 0) & (taken < tickets.count):
            taken = tickets.count
            if tickets.left > 0:
                taken = tickets.number(places.hear(turn - 1))
        return taken

    @cute.jit
    def take(
        self, mX: cute.Tensor, ring: BulkRing, places: Places, turn: Any, number: Int32,
        tickets: Tickets,
    ) -> None:  # fmt: skip
        """Start the copy of a turn's chunk to its slot, and say which it is; behind the last one
        say that it was."""
        of_slots, slot = places.of_slots, turn % self.stages
        if cute.arch.thread_idx()[0] == 0:
            if number < tickets.count:
                of_slots[slot] = tickets.chunk(number)
                self.bring(mX, ring, tickets.chunk(number), turn)
            else:
                of_slots[slot] = Int32(END)
                ring.full.arrive(slot)

    def bring(self, mX: Any, ring: Any, chunk: Int32, turn: Int32 | int) -> None:
        """Start the copy of a chunk to the slot of a turn. One thread calls it."""
        ring.load(self.run(mX, chunk), turn)

    @cute.jit
    def leave(
        self, matrices: tuple, chunk: Int32, ring: BulkRing, places: Places, tickets: Tickets,
        drawn: Drawn, turn: Int32,
    ) -> Drawn:  # fmt: skip
        """End a turn, whose rows all threads have overwritten in their slot: start their copy to mY
        and, once that of the turn before has left its slot, the next one to it."""
        mX, mY = matrices
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if cute.arch.warp_idx() == 0:
            self.run(mY, chunk, mX).store(ring[turn])
            cute.arch.cp_async_bulk_wait_group(1, read=True)
            drawn = self.next_one(mX, ring, places, tickets, drawn, turn)
        return drawn

    @cute.jit
    def end(self, tickets: Tickets, ticket: Int32) -> None:
        """Wait for the last copies, and leave the count of tickets zeroed, in whichever group drew
        the last one."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        if (cute.arch.thread_idx()[0] == 0) & self.is_first():
            tickets.end(ticket)
        if cutlass.const_expr(self.tile.ctas > 1):
            sync_cluster()  # nobody ends whom others still signal
