"""The state that the roles of a CTA of the Hopper forward share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Int32, cute

from cutex.device.atoms.wgmma import ROWS
from cutex.device.attention.block_info import BlockInfo, Blocks
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.pipeline import Ring
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.signature import KernelArgs, Sizes
from cutex.kernels.attention.work_ring import WorkRing


class OwnRows(NamedTuple):
    """The 64 rows of a tile that a warpgroup computes."""

    work: WorkTile
    m_block: Int32  # of 64 packed rows of the sequence's head
    rows: tuple[Int32, Int32]  # those that this thread holds, of the sequence's head
    seq_q: SeqlenInfo
    seqlen_k: Int32
    blocks: Blocks  # of keys, that they see


@dataclass(frozen=True)
class Shared:
    """The smem, rings, lengths and arguments that all roles of a CTA use."""

    sQ: cute.Tensor  # (64, D, WG * SLOT)
    sK: cute.Tensor  # (bN, D, SLOT)
    sV: cute.Tensor  # (bN, DV, SLOT)
    sO: cute.Tensor  # (64, DV / o_parts, WG), or (64, DV, WG * SLOT) in place of Q
    work: WorkRing
    k: Ring
    v: Ring
    info: BlockInfo
    args: KernelArgs
    sizes: Sizes
    ctas: int  # that share K and V
    q_read: Any  # the Barrier of Q's only slot, of tiles announced before it is free; None: `work`

    def m_block(self, work: WorkTile, warpgroup: Int32 | int) -> Int32:
        """The block of 64 rows that a warpgroup of this CTA computes."""
        warpgroups = self.info.tile_m // ROWS
        rank = 0 if self.ctas == 1 else cute.arch.block_idx_in_cluster()
        return work.m * warpgroups + rank * (warpgroups // self.ctas) + warpgroup

    @cute.jit
    def lengths(self, batch: Int32) -> tuple[SeqlenInfo, SeqlenInfo]:
        """The lengths of the queries and of the keys of a sequence."""
        q, k = self.sizes.seqlens(self.args)
        return q.of(batch), k.of(batch)
