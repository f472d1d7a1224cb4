"""A counter in global memory: CTAs take the next tile when they need one (any arch).

Where tiles differ in work, or SMs in speed, some CTAs of a static walk finish late. Here CTA c of G
starts with index c, and every further index is G plus the counter's value when the CTA asked. The
last CTA to be refused resets the counter for the next launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.pipeline import Barrier, PipelineState
from cutex.device.work_tile import WorkTile
from cutex.schedulers.dispatch import Ticket
from cutex.schedulers.order import Order

DEPTH = 2  # indices that may be unread


@dataclass(frozen=True)
class Counter:
    """A source of tiles for CTAs of a grid along x, or for clusters of `ctas` of which one asks,
    with no more of these than there are tiles."""

    words: cute.Tensor  # Int32 in global memory, of which the first counts; 0 before and after
    ctas: int = 1
    barriers: tuple[()] = ()

    def first(self) -> Ticket:
        index, _, _ = cute.arch.block_idx()
        return Ticket(index // self.ctas, Int32(0))

    @cute.jit
    def ask(self, ticket: Ticket) -> Int32:
        """Increment the counter; return its old value, in lane 0."""
        asked = Int32(0)
        if cute.arch.lane_idx() == 0:
            asked = cute.arch.atomic_add(self.words.iterator, Int32(1), sem="relaxed", scope="gpu")
        return asked

    @cute.jit
    def next(self, ticket: Ticket, asked: Int32, total: Int32) -> Ticket:
        words = self.words
        if cute.arch.lane_idx() == 0 and asked == total - 1:
            words[0] = Int32(0)  # the counter is asked once for each tile: this was the last time
        ctas, _, _ = cute.arch.grid_dim()
        return Ticket(ctas // self.ctas + cute.arch.shuffle_sync(asked, 0), ticket.phase)


class Chosen(Protocol):
    """Some of an order's tiles, in a sequence of their own."""

    @property
    def total(self) -> Int32: ...

    def index(self, number: Int32) -> Int32:
        """The order's index of tile `number`, below the total. A whole warp calls it."""


@dataclass(frozen=True)
class CounterDispatch:
    """A dispatcher for a CTA whose asking warp writes the indices ahead into a ring in smem.

    barrier          arrives                                  waits
    announced[slot]  1: the asking warp, having written the   every role
                     index
    read[slot]       1 a warp that has read the index         the asking warp
    """

    order: Order
    source: Counter
    indices: cute.Tensor  # (SLOT) Int32 in smem
    announced: Barrier
    read: Barrier
    chosen: Any = None  # a Chosen; None: all of the order's tiles, in its sequence

    @staticmethod
    def allocate(
        smem: SmemAllocator, order: Order, counter: cute.Tensor, readers: int, chosen: Any = None
    ) -> CounterDispatch:
        """Allocate the ring and its barriers; `readers` is the number of warps of this CTA that
        follow the sequence, the asking one not included."""
        indices = smem.allocate_tensor(Int32, cute.make_layout(DEPTH), byte_alignment=16)
        announced = Barrier.allocate(smem, "tile announced", arrivals=1, slots=DEPTH)
        read = Barrier.allocate(smem, "tile read", arrivals=readers, slots=DEPTH)
        return CounterDispatch(order, Counter(counter), indices, announced, read, chosen)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return self.announced, self.read

    def first(self) -> Ticket:
        index = self.index(self.source.first().index)
        return Ticket(index, Int32(0), index < self.order.total, Int32(0))

    @property
    def total(self) -> Int32:
        """How many tiles are handed out."""
        return self.order.total if self.chosen is None else self.chosen.total

    @cute.jit
    def index(self, number: Int32) -> Int32:
        """The order's index of tile `number` of those handed out; the order's total past the
        last."""
        found = number
        if cutlass.const_expr(self.chosen is not None):
            found = self.order.total
            if number < self.total:
                found = self.chosen.index(number)
        return found

    @cute.jit
    def next(self, ticket: Ticket) -> Ticket:
        """Wait for the next index and return its ticket. A whole warp calls it."""
        self.announced.wait(ticket.phase, ticket.slot)
        index = self.indices[ticket.slot]
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.read.arrive(ticket.slot)
        state = PipelineState(DEPTH, ticket.slot, ticket.phase)
        state.advance()
        return Ticket(index, state.phase, index < self.order.total, state.slot)

    def tile(self, ticket: Ticket) -> WorkTile:
        return self.order.tile(ticket.index)

    @cute.jit
    def schedule(self) -> None:
        """Ask for one tile after the other and announce each, until there is none. One warp calls
        it."""
        state, ticket = self.announcing(), self.first()
        while ticket.valid:
            ticket = self.announce(ticket, state)
            state.advance()

    @staticmethod
    def announcing() -> PipelineState:
        """The state of the ring before the first announcement."""
        return PipelineState(DEPTH, Int32(0), Int32(1))

    @cute.jit
    def announce(self, ticket: Ticket, state: PipelineState) -> Ticket:
        """Ask for the next tile, announce it, and return its ticket: called instead of `schedule`
        and `next` by a warp that has other work, too."""
        indices = self.indices
        following = self.source.next(ticket, self.source.ask(ticket), self.total)
        index = self.index(following.index)
        self.read.wait(state.phase, state.slot)
        with cute.arch.elect_one():
            indices[state.slot] = index
            self.announced.arrive(state.slot)
        return Ticket(index, ticket.phase, index < self.order.total, ticket.slot)
