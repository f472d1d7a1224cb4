"""Cluster launch control: the hardware hands out the tiles while the kernel runs (sm_100a).

The grid has a cluster of two CTAs for every tile. Those that fit run; a running cluster that wants
more work takes over one that has not started (PTX ISA, clusterlaunchcontrol.try_cancel). So an SM
that another kernel holds, or that was late, takes fewer tiles, and none waits for it.

One warp of the leader asks ahead, through a ring of replies. The hardware writes each reply into
the smem of both CTAs, where every role reads it. A refusal ends the sequence, for whatever reason
it came: clusters that were not taken over start on their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Boolean, Int32, Int128, cute
from cutlass.memory import SmemAllocator

from cutex.device.pipeline import Barrier, PipelineState, is_leader
from cutex.device.work_tile import WorkTile
from cutex.schedulers.dispatch import Ticket
from cutex.schedulers.raster import TileOrder

CTAS = 2  # of a cluster, along M
REPLY_BYTES = 16
DEPTH = 2  # replies that may be unread


@dataclass(frozen=True)
class ClcDispatch:
    """
    barrier        arrives                                  waits
    asked[slot]    1: the asking warp, on both CTAs', and   every role of its CTA
                   the reply, 16 bytes, by the hardware
    read[slot]     1 a warp that has read the reply, of     the asking warp
                   both CTAs, at the leader's
    """

    order: TileOrder
    replies: cute.Pointer  # in smem, 16 bytes a slot
    asked: Barrier
    read: Barrier

    @staticmethod
    def allocate(smem: SmemAllocator, order: TileOrder, readers: int) -> ClcDispatch:
        """`readers`: warps of both CTAs that follow the sequence, the one that asks among them."""
        replies = smem.allocate_array(Int128, DEPTH)
        asked = Barrier.allocate(smem, "tile asked for", arrivals=1, slots=DEPTH)
        read = Barrier.allocate(smem, "tile read", arrivals=readers, slots=DEPTH)
        return ClcDispatch(order, replies, asked, read)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return self.asked, self.read

    def first(self) -> Ticket:
        x, _, _ = cute.arch.block_idx()
        return Ticket(x // CTAS, Boolean(True), Int32(0), Int32(0))

    @cute.jit
    def next(self, ticket: Ticket) -> Ticket:
        """Wait for the reply and read it. A whole warp."""
        self.asked.wait(ticket.phase, ticket.slot)
        x, _, _, taken = cute.arch.clc_response(self.replies + ticket.slot)
        cute.arch.fence_view_async_shared()  # NOTE: the next reply comes through the async proxy
        with cute.arch.elect_one():
            self.read.arrive_at_leader(ticket.slot)
        state = PipelineState(DEPTH, ticket.slot, ticket.phase)
        state.advance()
        return Ticket(x // CTAS, taken != 0, state.slot, state.phase)

    @cute.jit
    def schedule(self) -> None:
        """Ask for one tile after the other, until there is none: one warp of the leader; the peer's
        has nothing to do."""
        if is_leader():
            lane = cute.arch.lane_idx()
            state = PipelineState(DEPTH, Int32(0), Int32(1))
            ticket = self.first()
            while ticket.valid:
                self.read.wait(state.phase, state.slot)
                if lane < CTAS:
                    self.asked.arrive_expecting_at(lane, REPLY_BYTES, state.slot)
                with cute.arch.elect_one():
                    cute.arch.issue_clc_query(self.asked[state.slot], self.replies + state.slot)
                state.advance()
                ticket = self.next(ticket)

    def tile(self, ticket: Ticket) -> WorkTile:
        tile = self.order.tile(ticket.index)
        return tile._replace(m=tile.m + cute.arch.block_idx_in_cluster() % CTAS)
