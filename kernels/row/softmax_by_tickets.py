"""Softmax of dense rows by bulk copies, whose CTAs that stay draw the rows that they take."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute

from cutex.compile import Argument
from cutex.device.pipeline import publish_barriers
from cutex.device.row.bulk import BulkRing, Run
from cutex.kernels.row.by_tickets import DRAWN, END, FOREVER, ByTickets
from cutex.kernels.row.kernel import launch_of_groups, reductions
from cutex.kernels.row.softmax_bulk import RowsBulkConfig, SoftmaxBulk


@dataclass(frozen=True)
class RowsTicketsConfig(RowsBulkConfig):
    """Rows by bulk copies that are drawn by tickets."""


class SoftmaxByTickets(ByTickets, SoftmaxBulk):
    """The softmax of dense rows, of which each CTA, or cluster, takes what nobody has taken."""

    title = "softmax_by_tickets"

    def __init__(self, config: RowsTicketsConfig) -> None:
        super().__init__(config)
        self.stages = config.slots

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        *tensors, groups = super().operands(dtype)
        return (*tensors, DRAWN, groups)

    @cute.jit
    def __call__(
        self, mX: cute.Tensor, mY: cute.Tensor, mDrawn: cute.Tensor, groups: Int32, stream
    ) -> None:
        how = launch_of_groups(self.tile, self.config.resident, groups, stream)
        self.kernel(mX, mY, mDrawn, groups).launch(**how)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor, mDrawn: cute.Tensor, groups: Int32) -> None:
        c, tile, dense = self.config, self.tile, self.dense
        places = self.places()
        (reduction,) = reductions(tile, 2, repeated=True, by_cta=True)
        ring = BulkRing.allocate(mX.element_type, dense.elements(mX.element_type.width), c.slots)
        publish_barriers((ring.full,))
        tickets = self.tickets(mX, mDrawn, groups)
        drawn = self.first_ones(mX, ring, places, tickets)
        words = dense.words(mX, tickets.chunk(tickets.own))
        turn = Int32(0)
        ring.wait(turn)
        row = places[turn]
        while row != END:
            span = turn, Int32(FOREVER)
            self.row(dense, words, ring[turn], dense.begin(mX, row), reduction, span)
            drawn = self.leave((mX, mY), row, ring, places, tickets, drawn, turn)
            turn += 1
            ring.wait(turn)
            row = places[turn]
        self.end(tickets, drawn[0])

    def run(self, mX: cute.Tensor, row: Int32, like: cute.Tensor | None = None) -> Run:
        return self.dense.run(mX, row, like)
