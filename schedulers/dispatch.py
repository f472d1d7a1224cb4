"""The protocol of a scheduler: which work tile a CTA computes next.

A scheduler is an order times a source. An order (order.py) is a pure bijection from an index to a
work tile, which Python ints run too. A source hands out the indices:

    one_tile.py    each CTA or cluster has one, its own number
    persistent.py  as many as run at one time take equal steps
    by_gpc.py      the same, beginning with the place that each claims by where it runs
    counter.py     CTAs take them from a counter while the kernel runs
    clc.py         the hardware hands them out while the kernel runs (sm_100a)

ranked.py chooses, for a counter, the tiles of packed sequences out of a plain order.

Three hand out no indices. one_round.py and spread.py give each cluster one tile, which its number
says, where one round covers the result. stream_k.py cuts the steps along K of all tiles into equal
shares. announced.py has one warp look up the tiles of a walk for all roles.

Every role of a CTA follows a `Dispatcher`, the same way whatever its source is. All roles see the
same sequence, each at its own pace:

    ticket = dispatch.first()
    while ticket.valid:
        tile = dispatch.tile(ticket)
        ...
        ticket = dispatch.next(ticket)

`SelfDispatch` serves one warp, which asks its source itself, and may do so (`ask`) before other
work, and wait for the answer after it; where that warp also loads the operands, their ring
announces the tile to the other roles (attention: work_ring.py). Elsewhere a dispatcher has a warp
of its own ask, if its source has to be asked (`schedule`), and announces the answers to all roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cutlass import Boolean, Int32

from cutex.device.pipeline import Barrier
from cutex.device.work_tile import WorkTile
from cutex.schedulers.order import Order


class Ticket:
    """A position in a sequence of indices.

    Of a source it has the index, at least the number of tiles if none was left, and the parity of
    the barrier phase that its next answer completes. A dispatcher's also knows whether there is
    such a tile, which is announced with the index, or seen by its `order`; and, where a ring
    announces the next index, its slot.
    """

    def __init__(
        self,
        index: Int32,
        phase: Int32,
        valid: Boolean | None = None,
        slot: Int32 | None = None,
        order: Order | None = None,
    ) -> None:
        self.index = index
        self.phase = phase
        self.announced = valid
        self.slot = slot
        self.order = order

    @property
    def valid(self) -> Boolean:
        """Whether there is such a tile."""
        if self.announced is None:
            assert self.order is not None, "a source's ticket: a dispatcher knows the tiles"
            return self.index < self.order.total
        return self.announced

    def moved_to(self, index: Int32) -> Ticket:
        """The ticket with another index."""
        return Ticket(index, self.phase, self.announced, self.slot, self.order)

    # NOTE: the two methods that let the DSL carry a Ticket through a loop.
    def __extract_mlir_values__(self) -> list:
        values = (self.index, self.announced, self.slot, self.phase)
        return [x.ir_value() for x in values if x is not None]

    def __new_from_mlir_values__(self, values: list) -> Ticket:
        if self.announced is None:
            return Ticket(Int32(values[0]), Int32(values[1]), order=self.order)
        index, valid, slot, phase = values
        return Ticket(Int32(index), Int32(phase), Boolean(valid), Int32(slot))


class Source(Protocol):
    """What a dispatcher asks: it hands out each index once. One whole warp of a CTA, or of each CTA
    of a pair, calls its methods."""

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

    def next(self, ticket: Ticket) -> Ticket:
        """Wait for the next tile's ticket. A whole warp calls it."""

    def tile(self, ticket: Ticket) -> WorkTile: ...


@dataclass(frozen=True)
class SelfDispatch:
    """A dispatcher for one warp of a CTA, or of each CTA of a pair, that asks its source itself:
    for the next tile's ticket at once, or early, by `ask`."""

    order: Order
    source: Source

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return self.source.barriers

    def schedule(self) -> None:
        """Do nothing: the warp asks for itself."""

    def first(self) -> Ticket:
        return self._seen(self.source.first())

    def ask(self, ticket: Ticket) -> Int32:
        """Ask for the next tile; return the value that `next` takes."""
        return self.source.ask(ticket)

    def next(self, ticket: Ticket, asked: Int32 | None = None) -> Ticket:
        if asked is None:
            asked = self.source.ask(ticket)
        return self._seen(self.source.next(ticket, asked, self.order.total))

    def tile(self, ticket: Ticket) -> WorkTile:
        return self.order.tile(ticket.index)

    def _seen(self, ticket: Ticket) -> Ticket:
        return Ticket(ticket.index, ticket.phase, order=self.order)
