"""Norms of dense rows by bulk copies, whose CTAs that stay draw the rows that they take."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument
from cutex.device.pipeline import publish_barriers
from cutex.device.row.bulk import BulkRing
from cutex.device.row.tickets import Places
from cutex.kernels.row.by_tickets import DRAWN, END, FOREVER, ByTickets
from cutex.kernels.row.kernel import launch_of_groups, relayed, repeated
from cutex.kernels.row.norm_bulk import BulkConfig, NormBulk
from cutex.kernels.row.norm_by_words import NormByWords


@dataclass(frozen=True)
class TicketsConfig(BulkConfig):
    """A norm by bulk copies, but of rows that a cluster takes by halves.

    each: the turns of a ticket, of CTAs alone."""

    each: int = 1


class NormByTickets(ByTickets, NormBulk):
    """The norm of dense rows, of which each CTA, or cluster, takes what nobody has taken."""

    title = "norm_by_tickets"

    def __init__(self, config: TicketsConfig) -> None:
        super().__init__(config)
        if config.halves:
            raise ValueError("rows by tickets all begin alike")
        if config.each > 1 and self.tile.ctas > 1:
            raise ValueError(f"each={config.each}: a cluster draws a ticket for each turn")
        self.stages, self.each = config.stages, config.each

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        *tensors, eps, groups = super().operands(dtype)
        return (*tensors, DRAWN, eps, groups)

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
        places = self.places()
        sums = (relayed if c.relays else repeated)(tile, *c.reduced)
        words = tile.num_threads * c.words
        ring = BulkRing.allocate(mX.element_type, words * 32 // mX.element_type.width, c.stages)
        publish_barriers((ring.full,))
        tickets = self.tickets(mX, mDrawn, groups)
        drawn = self.first_ones(mX, ring, places, tickets)
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
            drawn = self.leave((mX, mY), chunk, ring, places, tickets, drawn, turn)
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
        self.end(tickets, drawn[0])

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
