"""The protocol of a dispatcher: the sequence of work tiles that a CTA works through.

A scheduler is an order times a dispatch. An order (schedulers/raster.py) is a pure bijection from
an index to a work tile, which Python ints run too. A dispatcher hands out indices of it:

    one_tile.py    every cluster has one, its own number
    persistent.py  as many clusters as run at one time take equal steps
    counter.py     CTAs take them from a counter while the kernel runs
    clc.py         the hardware hands them out while the kernel runs (sm_100a)

A role of a persistent kernel is a loop, and every role of a CTA sees the same sequence, each at its
own pace:

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
    """A role's position in the sequence: an index of the order, and whether there is such a tile.

    `slot` and `phase` are those of the ring that announces the next index, if there is one.
    """

    def __init__(self, index: Int32, valid: Boolean, slot: Int32, phase: Int32) -> None:
        self.index = index
        self.valid = valid
        self.slot = slot
        self.phase = phase

    # NOTE: the two methods that let the DSL carry a Ticket through a loop.
    def __extract_mlir_values__(self) -> list:
        return [x.ir_value() for x in (self.index, self.valid, self.slot, self.phase)]

    def __new_from_mlir_values__(self, values: list) -> Ticket:
        return Ticket(Int32(values[0]), Boolean(values[1]), Int32(values[2]), Int32(values[3]))


class Order(Protocol):
    """A bijection from the indices 0, 1, ... to the work tiles of a problem."""

    def tile(self, index: Int32) -> WorkTile: ...


class Dispatcher(Protocol):
    """A sequence of work tiles, which the roles of a CTA follow."""

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """The barriers that a kernel initialises before any role asks."""

    def schedule(self) -> None:
        """The work of a scheduling warp, where tiles must be asked for; elsewhere nothing."""

    def first(self) -> Ticket: ...
    def next(self, ticket: Ticket) -> Ticket: ...
    def tile(self, ticket: Ticket) -> WorkTile: ...
