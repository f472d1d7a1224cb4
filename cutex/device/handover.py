"""A ring of slots in smem that warps of a CTA, or of a pair of CTAs, hand to each other."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from cutex.device.pipeline import Barrier, PipelineState


@dataclass(frozen=True)
class Handover:
    """A ring of slots that some warps fill and others empty.

    full[slot]:  1 arrival of each warp that fills, when its part of the slot is written.
    empty[slot]: 1 arrival of each warp that empties, when its reads are complete; of `readers` of
    each CTA, and of `here` of this one.
    """

    num_slots: int
    full: Barrier
    empty: Barrier
    ctas: int = 1  # whose warps empty them

    @staticmethod
    def allocate(
        smem, name: str, num_slots: int, fillers: int, readers: int, ctas: int = 1, here: int = 0
    ) -> Handover:
        full = Barrier.allocate(smem, f"{name} full", arrivals=fillers, slots=num_slots)
        arrivals = readers * ctas + here
        empty = Barrier.allocate(smem, f"{name} empty", arrivals=arrivals, slots=num_slots)
        return Handover(num_slots, full, empty, ctas)

    def init(self) -> None:
        self.full.init()
        self.empty.init()

    def state(self, number: Int32 | int) -> PipelineState:
        """The state at block `number`, for the warps on either side of the ring."""
        number, slots = Int32(number), self.num_slots
        if slots.bit_count() == 1:  # of a signed number, % and // take four times as many
            return PipelineState(slots, number & slots - 1, number >> slots.bit_length() - 1 & 1)
        return PipelineState(slots, number % slots, number // slots % 2)

    def wait_empty(self, state: PipelineState) -> None:
        """Wait until the slot is empty."""
        # NOTE: a wait for parity 1 on a fresh barrier returns at once: every slot starts empty.
        self.empty.wait(state.phase ^ 1, state.slot)

    def hand_over(self, state: PipelineState) -> None:
        """Arrive once for this warp: its part of the slot is written, also for wgmma to read."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self.hand_over_fenced(state)

    def hand_over_fenced(self, state: PipelineState) -> None:
        """Like `hand_over`, with a fence and a warp barrier first."""
        with cute.arch.elect_one():
            self.full.arrive(state.slot)

    def release(self, state: PipelineState) -> None:
        with cute.arch.elect_one():
            self.empty.arrive(state.slot)
            if self.ctas > 1:
                # NOTE: of CTA scope: it says that reads are complete, and publishes no data
                cute.arch.mbarrier_arrive(self.empty[state.slot], other_cta())

    def release_here(self, state: PipelineState) -> None:
        """Release a slot that only this CTA reads."""
        with cute.arch.elect_one():
            self.empty.arrive(state.slot)

    @cute.jit
    def drain(self, total: Int32) -> None:
        """Wait until all `total` slots that were filled are empty again."""
        for back in cutlass.range_constexpr(self.num_slots):
            if total > back:
                state = self.state(total - 1 - back)
                self.empty.wait(state.phase, state.slot)


def other_cta() -> Int32:
    """The rank of the other CTA of a pair."""
    return cute.arch.block_idx_in_cluster() ^ 1
