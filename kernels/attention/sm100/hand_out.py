"""HandOut: where a CTA's load warp, or each of a pair's two, gets its next tile from.

    one      its CTA, or pair, has the tile of its number, and no other
    static   every so many-th tile
    dynamic  a counter in global memory
    clc      the hardware: the grid has a CTA, or pair, for every tile, and a running one takes over
             those that have not started (PTX ISA, clusterlaunchcontrol.try_cancel)

The two load warps of a pair must take the same tiles in the same order. The hardware answers both
at once; and whether a tile has to be computed again they tell each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int128, cute
from cutlass.memory import SmemAllocator

from cutex.device.pipeline import Barrier, PipelineState, is_leader
from cutex.kernels.attention.sm100.config import Sm100Config

REPLY_BYTES = 16
VOTES = 2  # slots: one CTA may be a vote ahead of the other


@dataclass(frozen=True)
class HandOut:
    """
    barrier    arrives                                             waits
    asked      1: LOAD, of a pair the leader's at both CTAs, and   LOAD
               the reply, 16 bytes, by the hardware
    heard      1: LOAD of a pair's other CTA has read the reply    LOAD of the leader
    vote[slot] 1: LOAD, 1: the other CTA's, which has read the     LOAD
               vote before, and 4 bytes from there
    """

    config: Sm100Config
    counter: cute.Tensor | None
    reply: cute.Pointer  # 16 bytes of smem
    votes: cute.Tensor  # (SLOT) of the other CTA
    asked: Barrier
    heard: Barrier
    vote: Barrier

    @staticmethod
    def allocate(smem: SmemAllocator, config: Sm100Config, counter: cute.Tensor | None) -> HandOut:
        return HandOut(
            config,
            counter,
            smem.allocate_array(Int128, 1),
            cute.make_tensor(smem.allocate_array(Int32, VOTES), cute.make_layout(VOTES)),
            Barrier.allocate(smem, "tile asked for", arrivals=1),
            Barrier.allocate(smem, "tile heard of", arrivals=1),
            Barrier.allocate(smem, "vote", arrivals=2, slots=VOTES),
        )

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Those that this config uses."""
        c = self.config
        used = ((self.asked, c.dispatch == "clc"), (self.heard, c.dispatch == "clc" and c.pair),
                (self.vote, c.may_fail and c.pair))  # fmt: skip
        return tuple(barrier for barrier, there in used if there)

    def first(self) -> Int32:
        x, _, _ = cute.arch.block_idx()
        return x // self.config.ctas

    @cute.jit
    def next(self, index: Int32, total: Int32, turn: PipelineState) -> Int32:
        """The index after `index`, no less than `total` if there is none; `turn` counts calls. A
        whole warp."""
        ctas, _, _ = cute.arch.grid_dim()
        dispatch = self.config.dispatch
        if cutlass.const_expr(dispatch == "one"):
            index = total
        elif cutlass.const_expr(dispatch == "static"):
            index += ctas // self.config.ctas
        elif cutlass.const_expr(dispatch == "clc"):
            index = self._answer(total, turn)
        else:
            counter, asked = self.counter, Int32(0)
            if cute.arch.lane_idx() == 0:
                asked = ctas + cute.arch.atomic_add(
                    counter.iterator, Int32(1), sem="relaxed", scope="gpu"
                )
                if asked == total + ctas - 1:  # the last to ask leaves it as it was
                    counter[0] = Int32(0)
            index = cute.arch.shuffle_sync(asked, 0)
        return index

    @cute.jit
    def _answer(self, total: Int32, turn: PipelineState) -> Int32:
        """The hardware's."""
        if cutlass.const_expr(self.config.pair):
            if is_leader():
                self.heard.wait(turn.phase ^ 1)
                lane = cute.arch.lane_idx()
                if lane < self.config.ctas:
                    self.asked.arrive_expecting_at(lane, REPLY_BYTES)
                with cute.arch.elect_one():
                    cute.arch.issue_clc_query(self.asked[0], self.reply)
        else:
            with cute.arch.elect_one():
                self.asked.arrive_expecting(REPLY_BYTES)
                cute.arch.issue_clc_query(self.asked[0], self.reply, multicast=False)
        self.asked.wait(turn.phase)
        x, _, _, taken = cute.arch.clc_response(self.reply)
        cute.arch.fence_view_async_shared()  # NOTE: the next reply comes through the async proxy
        cute.arch.sync_warp()
        if cutlass.const_expr(self.config.pair):  # noqa: SIM102 - known when tracing
            if not is_leader():
                with cute.arch.elect_one():
                    self.heard.arrive_at_leader()
        return x // self.config.ctas if taken != 0 else total

    @cute.jit
    def either(self, failed: Boolean, turn: PipelineState) -> Boolean:
        """Whether a tile `failed` in one of the CTAs of a pair; `turn` counts calls. A whole
        warp."""
        slot = turn.slot
        peer = cute.arch.block_idx_in_cluster() ^ 1
        with cute.arch.elect_one():
            self.vote.arrive_expecting(4, slot)
            # NOTE: st.async does not say that this warp has read the vote before; an arrival does
            cute.arch.mbarrier_arrive(self.vote[slot], peer)
            cute.arch.store_async_dsmem(
                self.votes.iterator + slot, Int32(failed), self.vote[slot], peer
            )
        self.vote.wait(turn.phase, slot)
        other = self.votes[slot] != 0
        cute.arch.sync_warp()
        return failed | other
