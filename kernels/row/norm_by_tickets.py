"""Norms of dense rows by bulk copies, whose CTAs that stay draw the rows that they take.

SMs do not come by memory's bytes at one rate, so that of equal shares some end long before others
(docs/facts/rows.md#rows-shares). Here the first rows of a CTA, or of a cluster, are those of
NormBulk, as many as are on their way at one time; each one more is the next that nobody has taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.compile import Argument, Operand
from cutex.device.pipeline import publish_barriers, sync_cluster
from cutex.device.row.bulk import BulkRing
from cutex.device.row.tickets import Places, Tickets
from cutex.kernels.row.kernel import launch_of_groups, relayed, repeated
from cutex.kernels.row.norm_bulk import BulkConfig, NormBulk
from cutex.kernels.row.norm_by_words import NormByWords

END = -1  # a chunk behind the last one
FOREVER = 1 << 30  # turns, of a loop that does not know how many it has


@dataclass(frozen=True)
class TicketsConfig(BulkConfig):
    """A norm by bulk copies, but of rows that a cluster takes by halves."""


class NormByTickets(NormBulk):
    """The norm of dense rows. Thread 0 of a CTA, or of a cluster's first one, draws tickets; that
    of each CTA starts the copies, and leaves beside a slot which chunk is in it.

    smem            bytes
    places          4 * stages; of a cluster 4 * TOLD + 8 * TOLD more
    """

    title = "norm_by_tickets"

    def __init__(self, config: TicketsConfig) -> None:
        super().__init__(config)
        if config.halves:
            raise ValueError("rows by tickets all begin alike")

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        *tensors, eps, groups = super().operands(dtype)
        drawn = Operand("drawn", ("kinds",), "int32", aligned=False, whole=False)
        return (*tensors, drawn, eps, groups)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, *rest) -> None:
        c = self.config
        *given, mDrawn, eps, groups, stream = rest
        optional = dict(zip(c.optional, given, strict=True))
        how = launch_of_groups(self.tile, c.resident, groups, stream)
        self.kernel(mX, mY, optional, mDrawn, eps, groups).launch(**how)

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, mY: cute.Tensor, optional: dict[str, cute.Tensor],
        mDrawn: cute.Tensor, eps: Float32, groups: Int32,
    ) -> None:  # fmt: skip
        c, tile = self.config, self.tile
        places = Places.allocate(c.stages, tile.ctas)
        if cutlass.const_expr(tile.ctas > 1):
            publish_barriers((places.told,))  # to the cluster with those of the sums
        sums = (relayed if c.relays else repeated)(tile, *c.reduced)
        words = tile.num_threads * c.words
        ring = BulkRing.allocate(mX.element_type, words * 32 // mX.element_type.width, c.stages)
        publish_barriers((ring.full,))
        tickets = self.tickets(mX, mDrawn, groups)
        for turn in cutlass.range_constexpr(c.stages - 1):
            self.take(mX, ring, places, turn, tickets.first(turn), tickets)
        # the ticket drawn last, and the one that the cluster was told of last
        ticket = said = tickets.left
        if (tickets.left > 0) & self.is_first():
            said = Int32(0)
            if cute.arch.thread_idx()[0] == 0:
                ticket = tickets.draw()
        taken = tickets.first(tickets.early - 1)  # the number of the last chunk that was told
        norm = self.norm(mX, tickets.chunk(tickets.own), optional, sums)
        chunk = later = last = Int32(END)  # of this turn, and of one and two turns later
        chunk = self.arrived(mX, ring, places, norm, Int32(0))
        if cutlass.const_expr(c.ahead > 1):
            later = self.arrived(mX, ring, places, norm, Int32(1))
        if cutlass.const_expr(c.ahead > 0):
            cute.arch.sync_threads()
        if cutlass.const_expr(c.relays):
            self.relay_of(norm, Int32(0), chunk)
        if cutlass.const_expr(c.relays and c.ahead > 1):
            self.relay_of(norm, Int32(1), later)
        turn = Int32(0)
        while chunk != END:
            if cutlass.const_expr(c.ahead > 0):
                last = self.arrived(mX, ring, places, norm, turn + c.ahead)
            self.rows((mX, mY), chunk, ring[turn], norm, (turn, Int32(FOREVER)), eps, optional)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            if cute.arch.warp_idx() == 0:
                self.run(mY, chunk, mX).store(ring[turn])
                # the slot of the turn before, whose rows are on their way out
                cute.arch.cp_async_bulk_wait_group(1, read=True)
                if cutlass.const_expr(tile.ctas == 1):
                    taken = tickets.number(ticket)
                else:
                    said = self.told(places, tickets, ticket, said, turn)
                    taken = self.heard(places, tickets, taken, turn)
                self.take(mX, ring, places, turn + (c.stages - 1), taken, tickets)
                if (cute.arch.thread_idx()[0] == 0) & (ticket < tickets.left):
                    ticket = tickets.draw()  # on its way for a turn
            if cutlass.const_expr(c.relays):
                self.release(norm, turn, Int32(FOREVER))
                self.relay_of(norm, turn + c.ahead, last)
            turn += 1
            if cutlass.const_expr(c.ahead == 0):
                chunk = self.arrived(mX, ring, places, norm, turn)
            elif cutlass.const_expr(c.ahead == 1):
                chunk = last
            else:
                chunk = later
                later = last
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        if (cute.arch.thread_idx()[0] == 0) & self.is_first():
            tickets.end(ticket)
        if cutlass.const_expr(tile.ctas > 1):
            sync_cluster()  # nobody ends whom others still signal

    def tickets(self, mX: cute.Tensor, mDrawn: cute.Tensor, groups: Int32) -> Tickets:
        """The chunks of this group: of an odd number of elements of 16 bits, every other one."""
        rows = Int32(cute.size(mX, mode=[0]))
        group, per = Int32(cute.arch.block_idx()[0]) // self.tile.ctas, 32 // mX.element_type.width
        odd = Int32(cute.size(mX, mode=[1])) * self.tile.rows & (per - 1)
        kinds = Int32(1 + odd)
        kind = group % kinds
        count = (cute.ceil_div(rows, self.tile.rows) - kind + kinds - 1) // kinds
        # a cluster's CTAs are told of a turn in the turn before they take it
        early = self.config.stages - 1 + (self.tile.ctas > 1)
        drawn = mDrawn.iterator + kind
        return Tickets(drawn, group // kinds, groups // kinds, kind, kinds, count, early)

    def is_first(self) -> Boolean:
        """Whether this CTA draws tickets: the first of its cluster."""
        return self.rank() == 0 if self.tile.ctas > 1 else Boolean(True)

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
        of_slots, slot = places.of_slots, turn % self.config.stages
        if cute.arch.thread_idx()[0] == 0:
            if number < tickets.count:
                of_slots[slot] = tickets.chunk(number)
                ring.load(self.run(mX, tickets.chunk(number)), turn)
            else:
                of_slots[slot] = Int32(END)
                ring.full.arrive(slot)

    @cute.jit
    def arrived(
        self, mX: cute.Tensor, ring: BulkRing, places: Places, norm: NormByWords, turn: Int32
    ) -> Int32:
        """The chunk of a turn, once it is in its slot; its sums are begun, if they are ahead."""
        ring.wait(turn)
        chunk = places[turn]
        if cutlass.const_expr(self.config.ahead > 0):  # noqa: SIM102 (the other is traced)
            if chunk != END:
                norm.start(ring[turn], self.begin(mX, chunk), turn)
        return chunk

    @cute.jit
    def relay_of(self, norm: NormByWords, turn: Int32, chunk: Int32) -> None:
        """Send this CTA's sums of a turn's chunk, if there is one, which all threads have begun."""
        self.relay(norm, turn, Int32(cutlass.select_(chunk == END, Int32(0), Int32(FOREVER))))
