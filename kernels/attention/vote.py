"""Vote: the load warps of a pair of CTAs exchange whether a tile has to be computed again, and on
Hopper which one is next, so that both take the same tiles in the same order."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Boolean, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.pipeline import Barrier, PipelineState

SLOTS = 2  # one CTA may be a vote ahead of the other


@dataclass(frozen=True)
class Vote:
    """The exchange of one word per tile between the two load warps.

    barrier     arrives                                             waits
    vote[slot]  1: LOAD, 1: the other CTA's, which has read the     LOAD
                vote before, and 4 bytes from there
    """

    votes: cute.Tensor  # (SLOT), written by the other CTA
    cast: Barrier

    @staticmethod
    def allocate(smem: SmemAllocator) -> Vote:
        votes = cute.make_tensor(smem.allocate_array(Int32, SLOTS), cute.make_layout(SLOTS))
        return Vote(votes, Barrier.allocate(smem, "vote", arrivals=2, slots=SLOTS))

    @staticmethod
    def first() -> PipelineState:
        """The state of a load warp before its first vote."""
        return PipelineState(SLOTS, Int32(0), Int32(0))

    def either(self, failed: Boolean, state: PipelineState) -> Boolean:
        """Whether a tile `failed` in one of the CTAs. A whole warp calls it."""
        return failed | (self.exchange(Int32(failed), state) != 0)

    @cute.jit
    def exchange(self, word: Int32, state: PipelineState) -> Int32:
        """Send `word` to the other CTA; return the one that it sends. A whole warp calls it."""
        slot = state.slot
        peer = cute.arch.block_idx_in_cluster() ^ 1
        with cute.arch.elect_one():
            self.cast.arrive_expecting(4, slot)
            # NOTE: this arrival says that this warp has read the vote before; st.async does not
            cute.arch.mbarrier_arrive(self.cast[slot], peer)
            cute.arch.store_async_dsmem(self.votes.iterator + slot, word, self.cast[slot], peer)
        self.cast.wait(state.phase, slot)
        other = self.votes[slot]
        cute.arch.sync_warp()
        return other
