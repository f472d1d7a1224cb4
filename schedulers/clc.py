"""Cluster launch control: the hardware hands out the tiles while the kernel runs (sm_100a).

The grid has a CTA, or a cluster of two, for every tile. Those that fit run; a running one that
wants more work takes over one that has not started (PTX ISA, clusterlaunchcontrol.try_cancel). So
an SM that another kernel holds, or that was late, takes fewer tiles, and none waits for it.

One warp asks, for a pair the leader's, and the hardware writes the reply into the smem of both
CTAs. A refusal ends the sequence, whatever its reason: a CTA that was not taken over starts on its
own.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int128, cute
from cutlass.memory import SmemAllocator

from cutex.device.pipeline import Barrier, PipelineState, is_leader
from cutex.device.work_tile import WorkTile
from cutex.schedulers.dispatch import Ticket
from cutex.schedulers.order import Order

CTAS = 2  # CTAs of a pair, along M
REPLY_BYTES = 16
DEPTH = 2  # replies that may be unread


@dataclass(frozen=True)
class Replies:
    """The hardware's replies, in a ring of slots in the smem of each CTA.

    asked[slot]  1: the asking warp, on both CTAs', and the reply, 16 bytes, by the hardware
    """

    words: cute.Pointer  # 16 bytes a slot
    asked: Barrier
    ctas: int  # CTAs of a tile: 1, or 2 of a pair

    @staticmethod
    def allocate(smem: SmemAllocator, ctas: int, slots: int) -> Replies:
        words = smem.allocate_array(Int128, slots)
        return Replies(words, Barrier.allocate(smem, "tile asked for", 1, slots), ctas)

    def first(self) -> Int32:
        """The index of this CTA's or pair's first tile."""
        x, _, _ = cute.arch.block_idx()
        return self.index(x)

    def index(self, x: Int32) -> Int32:
        """The index of a tile, given the grid position `x` of its CTA."""
        return x // self.ctas

    @cute.jit
    def ask(self, slot: Int32 | int) -> None:
        """Ask once more, into a slot that all have read. A whole warp, for a pair the leader's,
        calls it."""
        if cutlass.const_expr(self.ctas == 1):
            with cute.arch.elect_one():
                self.asked.arrive_expecting(REPLY_BYTES, slot)
                cute.arch.issue_clc_query(self.asked[slot], self.words + slot, multicast=False)
        else:
            lane = cute.arch.lane_idx()
            if lane < self.ctas:
                self.asked.arrive_expecting_at(lane, REPLY_BYTES, slot)
            with cute.arch.elect_one():
                cute.arch.issue_clc_query(self.asked[slot], self.words + slot)

    @cute.jit
    def read(self, slot: Int32 | int, phase: Int32) -> tuple[Int32, Boolean]:
        """Wait for a reply; return the grid position of the CTA that is taken over, and whether
        there is one."""
        self.asked.wait(phase, slot)
        x, _, _, taken = cute.arch.clc_response(self.words + slot)
        cute.arch.fence_view_async_shared()  # NOTE: the next reply comes through the async proxy
        return x, taken != 0


@dataclass(frozen=True)
class LaunchControl:
    """A source of tiles for CTAs, or pairs of them.

    barrier  arrives                                             waits
    asked    those of Replies                                    the asking warps
    heard    1: the other CTA's asking warp has read the reply   that of the leader
    """

    replies: Replies
    heard: Barrier

    @staticmethod
    def allocate(smem: SmemAllocator, ctas: int) -> LaunchControl:
        replies = Replies.allocate(smem, ctas, slots=1)
        return LaunchControl(replies, Barrier.allocate(smem, "tile heard of", arrivals=1))

    @property
    def pair(self) -> bool:
        return self.replies.ctas > 1

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return (self.replies.asked, self.heard) if self.pair else (self.replies.asked,)

    def first(self) -> Ticket:
        return Ticket(self.replies.first(), Int32(0))

    @cute.jit
    def ask(self, ticket: Ticket) -> Int32:
        if cutlass.const_expr(self.pair):
            if is_leader():
                self.heard.wait(ticket.phase ^ 1)
                self.replies.ask(0)
        else:
            self.replies.ask(0)
        return Int32(0)

    @cute.jit
    def next(self, ticket: Ticket, asked: Int32, total: Int32) -> Ticket:
        x, taken = self.replies.read(0, ticket.phase)
        cute.arch.sync_warp()
        if cutlass.const_expr(self.pair):  # noqa: SIM102 - known when tracing
            if not is_leader():
                with cute.arch.elect_one():
                    self.heard.arrive_at_leader()
        index = self.replies.index(x)
        if not taken:
            index = total
        return Ticket(index, ticket.phase ^ 1)


@dataclass(frozen=True)
class ClcDispatch:
    """A dispatcher for CTAs, or pairs of them, in which one warp, of a pair the leader's, asks
    ahead, and every role of the CTA, or of both, reads the replies.

    barrier        arrives                                  waits
    asked[slot]    those of Replies                         every role of its CTA
    read[slot]     1 a warp that has read the reply, of a   the asking warp
                   pair of both CTAs, at the leader's
    """

    order: Order
    replies: Replies
    read: Barrier

    @staticmethod
    def allocate(smem: SmemAllocator, order: Order, readers: int, ctas: int = CTAS) -> ClcDispatch:
        """Allocate the barriers; `readers` is the number of warps, of a pair those of both CTAs,
        that follow the sequence, the asking one included."""
        replies = Replies.allocate(smem, ctas, DEPTH)
        read = Barrier.allocate(smem, "tile read", arrivals=readers, slots=DEPTH)
        return ClcDispatch(order, replies, read)

    @property
    def pair(self) -> bool:
        return self.replies.ctas > 1

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return self.replies.asked, self.read

    def first(self) -> Ticket:
        return Ticket(self.replies.first(), Int32(0), Boolean(True), Int32(0))

    @cute.jit
    def next(self, ticket: Ticket) -> Ticket:
        """Wait for the reply and return its ticket. A whole warp calls it."""
        x, taken = self.replies.read(ticket.slot, ticket.phase)
        with cute.arch.elect_one():
            if cutlass.const_expr(self.pair):
                self.read.arrive_at_leader(ticket.slot)
            else:
                self.read.arrive(ticket.slot)
        state = PipelineState(DEPTH, ticket.slot, ticket.phase)
        state.advance()
        return Ticket(self.replies.index(x), state.phase, taken, state.slot)

    @cute.jit
    def schedule(self) -> None:
        """Ask for one tile after the other, until there is none. One warp of each CTA calls it, and
        of a pair only the leader's asks."""
        if cutlass.const_expr(self.pair):
            if is_leader():
                self.ask_for_all()
        else:
            self.ask_for_all()

    @cute.jit
    def ask_for_all(self) -> None:
        state = PipelineState(DEPTH, Int32(0), Int32(1))
        ticket = self.first()
        while ticket.valid:
            self.read.wait(state.phase, state.slot)
            self.replies.ask(state.slot)
            state.advance()
            ticket = self.next(ticket)

    def tile(self, ticket: Ticket) -> WorkTile:
        """The tile of a ticket: a pair's is two CTAs' along M."""
        tile = self.order.tile(ticket.index)
        return tile._replace(m=tile.m + cute.arch.block_idx_in_cluster() % CTAS)
