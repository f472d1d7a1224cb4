"""A counter in global memory: CTAs take the next tile when they need one (any arch).

Tiles that differ in their work, or SMs that differ in their speed, leave a static walk with CTAs
that end late. Here CTA c of G begins with index c, and every further index is G plus what the
counter held when the CTA asked. The last to be refused sets the counter back, so that the next
launch finds it as this one did.

One warp of a CTA asks ahead, through a ring of indices in smem that every role reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.pipeline import Barrier, PipelineState
from cutex.device.work_tile import WorkTile
from cutex.schedulers.dispatch import Order, Ticket

DEPTH = 2  # indices that may be unread


@dataclass(frozen=True)
class CounterDispatch:
    """A dispatcher of one CTA of a grid along x, of no more CTAs than there are tiles.

    barrier          arrives                                  waits
    announced[slot]  1: the asking warp, having written the   every role
                     index
    read[slot]       1 a warp that has read the index         the asking warp
    """

    order: Order
    total: Int32  # tiles
    counter: cute.Tensor  # (1) Int32 in global memory, 0 before and after a launch
    indices: cute.Tensor  # (SLOT) Int32 in smem
    announced: Barrier
    read: Barrier

    @staticmethod
    def allocate(
        smem: SmemAllocator, order: Order, total: Int32, counter: cute.Tensor, readers: int
    ) -> CounterDispatch:
        """`readers`: warps of this CTA that follow the sequence, the asking warp not among them."""
        indices = smem.allocate_tensor(Int32, cute.make_layout(DEPTH), byte_alignment=16)
        announced = Barrier.allocate(smem, "tile announced", arrivals=1, slots=DEPTH)
        read = Barrier.allocate(smem, "tile read", arrivals=readers, slots=DEPTH)
        return CounterDispatch(order, total, counter, indices, announced, read)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return self.announced, self.read

    def first(self) -> Ticket:
        index, _, _ = cute.arch.block_idx()
        return Ticket(index, index < self.total, Int32(0), Int32(0))

    @cute.jit
    def next(self, ticket: Ticket) -> Ticket:
        """Wait for the next index and read it. A whole warp."""
        self.announced.wait(ticket.phase, ticket.slot)
        index = self.indices[ticket.slot]
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.read.arrive(ticket.slot)
        state = PipelineState(DEPTH, ticket.slot, ticket.phase)
        state.advance()
        return Ticket(index, index < self.total, state.slot, state.phase)

    def tile(self, ticket: Ticket) -> WorkTile:
        return self.order.tile(ticket.index)

    @cute.jit
    def schedule(self) -> None:
        """Ask for one tile after the other and announce each, until there is none. One warp."""
        state = PipelineState(DEPTH, Int32(0), Int32(1))
        indices = self.indices
        index, _, _ = cute.arch.block_idx()
        while index < self.total:
            index = self.ask()
            self.read.wait(state.phase, state.slot)
            with cute.arch.elect_one():
                indices[state.slot] = index
                self.announced.arrive(state.slot)
            state.advance()

    @cute.jit
    def ask(self) -> Int32:
        """The next index, no less than `total` if there is none. A whole warp."""
        ctas, _, _ = cute.arch.grid_dim()
        counter, taken = self.counter, Int32(0)
        if cute.arch.lane_idx() == 0:
            taken = ctas + cute.arch.atomic_add(
                counter.iterator, Int32(1), sem="relaxed", scope="gpu"
            )
            if taken == self.total + ctas - 1:  # every CTA has been refused
                counter[0] = Int32(0)
        return cute.arch.shuffle_sync(taken, 0)
