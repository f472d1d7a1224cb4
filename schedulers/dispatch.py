"""The protocols of a scheduler: which work tile a CTA computes next.

A scheduler is an order times a source. An order (order.py) is a pure bijection from an index to a
work tile, which Python ints run too. A source hands out the indices:

    one_tile.py    each CTA or cluster has one, its own number
    persistent.py  as many as run at one time take equal steps
    counter.py     CTAs take them from a counter while the kernel runs
    clc.py         the hardware hands them out while the kernel runs (sm_100a)

Three hand out no indices. one_round.py and spread.py give each cluster one tile, which its number
says, where one round covers the result. stream_k.py cuts the steps along K of all tiles into equal
shares.

One warp of a CTA asks a source, `Source`, and may do other work before it needs the answer:

    ticket = source.first()
    while ticket.index < total:
        ...
        asked = source.ask(ticket)
        ...
        ticket = source.next(ticket, asked, total)

Where the asking warp also loads the operands, their ring announces the tile (attention:
work_ring.py). Elsewhere every role follows a `Dispatcher`, which asks its source in a warp of its
own, if it has to be asked. All roles of a CTA then see the same sequence, each at its own pace:

    ticket = dispatch.first()
    while ticket.valid:
        tile = dispatch.tile(ticket)
        ...
        ticket = dispatch.next(ticket)
"""

from __future__ import annotations

from typing import Protocol

from cutlass import Boolean, Int32

from cutex.device.pipeline import Barrier
from cutex.device.work_tile import WorkTile


class Ticket:
    """A position in a sequence of indices: of the warp that asks for them, or of a role.

    An asking warp's has the index, at least the number of tiles if none was left, and the parity
    of the barrier phase that its next answer completes. A role's also says whether there is such a
    tile, and the slot of the ring that announces the next index.
    """

    def __init__(
        self,
        index: Int32,
        phase: Int32,
        valid: Boolean | None = None,
        slot: Int32 | None = None,
    ) -> None:
        self.index = index
        self.phase = phase
        self.valid = valid
        self.slot = slot

    # NOTE: the two methods that let the DSL carry a Ticket through a loop.
    def __extract_mlir_values__(self) -> list:
        values = (self.index, self.valid, self.slot, self.phase)
        return [x.ir_value() for x in values if x is not None]

    def __new_from_mlir_values__(self, values: list) -> Ticket:
        if self.valid is None:
            return Ticket(Int32(values[0]), Int32(values[1]))
        index, valid, slot, phase = values
        return Ticket(Int32(index), Int32(phase), Boolean(valid), Int32(slot))


class Source(Protocol):
    """A source hands out each index once. One whole warp of a CTA, or of each CTA of a pair, calls
    its methods."""

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """The barriers that a kernel initialises before any warp asks."""

    def first(self) -> Ticket:
        """The ticket with the first index of a CTA or pair."""

    def ask(self, ticket: Ticket) -> Int32:
        """Ask for the next index; return the value that `next` takes."""

    def next(self, ticket: Ticket, asked: Int32, total: Int32) -> Ticket:
        """Wait for the answer; return the ticket with the next of `total` indices, if there is one
        left."""


class Dispatcher(Protocol):
    """A sequence of work tiles, which the roles of a CTA follow."""

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """The barriers that a kernel initialises before any role asks."""

    def schedule(self) -> None:
        """Do the work of a scheduling warp, where tiles must be asked for; elsewhere nothing."""

    def first(self) -> Ticket: ...
    def next(self, ticket: Ticket) -> Ticket: ...
    def tile(self, ticket: Ticket) -> WorkTile: ...
