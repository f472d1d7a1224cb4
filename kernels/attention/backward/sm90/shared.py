"""The smem, rings and arguments that the roles of a CTA of the Hopper backward share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from cutex.device.attention.block_info import BlockInfo, Blocks
from cutex.device.pipeline import Barrier, PipelineState, Ring
from cutex.kernels.attention.backward.signature import KernelArgs, RowTiles


@dataclass(frozen=True)
class Handover:
    """A ring of slots that warps fill and other warps empty.

    full[slot]:  1 arrival of each warp that fills, when its part of the slot is written.
    empty[slot]: 1 arrival of each warp that empties, when its reads are complete.
    """

    num_slots: int
    full: Barrier
    empty: Barrier
    ctas: int = 1  # whose warps empty them

    @staticmethod
    def allocate(
        smem, name: str, num_slots: int, fillers: int, readers: int, ctas: int = 1
    ) -> Handover:
        full = Barrier.allocate(smem, f"{name} full", arrivals=fillers, slots=num_slots)
        empty = Barrier.allocate(smem, f"{name} empty", arrivals=readers * ctas, slots=num_slots)
        return Handover(num_slots, full, empty, ctas)

    def init(self) -> None:
        self.full.init()
        self.empty.init()

    def state(self, number: Int32 | int) -> PipelineState:
        """The state at block `number`, of warps that fill the slots as of those that empty them."""
        number = Int32(number)
        slots = self.num_slots
        return PipelineState(slots, number % slots, number // slots % 2)

    def wait_empty(self, state: PipelineState) -> None:
        """Wait until the slot is empty."""
        # NOTE: a wait for parity 1 on a fresh barrier returns at once: every slot starts empty.
        self.empty.wait(state.phase ^ 1, state.slot)

    def hand_over(self, state: PipelineState) -> None:
        """Arrive once for this warp: its part of the slot is written, also for wgmma to read."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.full.arrive(state.slot)

    def release(self, state: PipelineState) -> None:
        with cute.arch.elect_one():
            self.empty.arrive(state.slot)
            if self.ctas > 1:
                # NOTE: of CTA scope: it says that reads are complete, and publishes no data
                cute.arch.mbarrier_arrive(self.empty[state.slot], other_cta())

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


@dataclass(frozen=True)
class Shared:
    """What all roles of a CTA use."""

    sK: cute.Tensor  # (64, D, WG)
    sV: cute.Tensor  # (64, DV, WG)
    sQ: cute.Tensor  # (bM, D, SLOT)
    sdO: cute.Tensor  # (bM, DV, SLOT)
    # (64, bM, WG * SLOT): a warpgroup's keys by queries; of a pair, the other CTA's slots behind
    sdS: cute.Tensor
    sKp: Any  # (64, D / 2, WG) the other CTA's keys, of the columns that this one computes dQ of
    sdQ: cute.Tensor  # (4 * 32 * units, WARP, SLOT) a warp's part of columns of dQ
    sdK: Any  # (64, D, WG) dK on its way out, of CTAs that take several tiles; in the place of sdQ
    sdV: Any  # (64, DV, WG) dV, the same
    stats: cute.Tensor  # (2 * bM, SLOT) LSE, then delta
    k_loaded: Barrier
    v_loaded: Barrier
    q: Ring
    do: Ring
    ds: Handover
    ds_sent: Any  # the other CTA's dS is there
    k_read: Barrier  # by all but the warpgroups that store dK through its slots
    v_read: Barrier  # by the warpgroup that sums dK of wide head dims
    info: BlockInfo
    args: KernelArgs
    tiles: RowTiles
    tile: Any  # the Tile that a role is at; None until it has one
    heads_per_kv: Int32
    queue: Any = None  # the SumsQueue, where warps of their own add dQ
    descending: bool = False  # blocks of queries are taken from the last to the first

    def m_blocks(self) -> Blocks:
        """The blocks of queries that see one of the keys of the CTA, or of its pair."""
        lengths, ctas = (self.tile.seq_q.length, self.tile.seq_k.length), self.ds.ctas
        info = self.info._replace(tile_n=ctas * self.info.tile_n)
        return info.m_blocks(self.tile.n_block // ctas, *lengths)

    def first_block(self, blocks: Blocks) -> Int32:
        """The block of queries that is taken first."""
        return blocks.end - 1 if self.descending else blocks.first

    @cute.jit
    def block_after(self, m_block: Int32, blocks: Blocks) -> Int32:
        """The block after `m_block`, of the next head if it is a head's last."""
        if cutlass.const_expr(self.descending):
            return blocks.end - 1 if m_block == blocks.first else m_block - 1
        else:
            return blocks.first if m_block + 1 == blocks.end else m_block + 1

    def first_head(self) -> Int32:
        return self.tile.head_kv * self.heads_per_kv
