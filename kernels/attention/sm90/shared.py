"""What the roles of a CTA of the Hopper forward share, and how its TMA operands are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms.mma import slots_layout
from cutex.device.attention.block_info import BlockInfo
from cutex.device.attention.rows import Rows, tma_view
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.pipeline import Ring
from cutex.kernels.attention.signature import Passed, Sizes
from cutex.kernels.attention.work_ring import WorkRing


@dataclass(frozen=True)
class Shared:
    """What all roles of a CTA see: smem, rings, lengths."""

    sQ: cute.Tensor  # (64, D, WG * SLOT)
    sK: cute.Tensor  # (bN, D, SLOT)
    sV: cute.Tensor  # (bN, DV, SLOT)
    sO: cute.Tensor  # (64, DV / o_parts, WG), or (64, DV, WG * SLOT) in place of Q
    work: WorkRing
    k: Ring
    v: Ring
    info: BlockInfo
    passed: Passed
    sizes: Sizes

    @cute.jit
    def lengths(self, batch: Int32) -> tuple[SeqlenInfo, SeqlenInfo]:
        """Of the queries and of the keys of a sequence."""
        q, k = self.sizes.seqlens(self.passed)
        return q.of(batch), k.of(batch)


def operand(
    op: Any, mX: cute.Tensor, rows: Rows, tile: tuple[int, int], num_slots: int
) -> cpasync.TmaInfo:
    """What moves tiles of (rows, columns) between mX and slots of smem, columns contiguous, in the
    widest swizzle that cuts them evenly."""
    row_bytes = tile[1] * mX.element_type.width // 8
    swizzle = next(s for s in (128, 64, 32) if row_bytes % s == 0)
    slots = slots_layout(mX.element_type, *tile, num_slots, swizzle)
    view = tma_view(mX, rows.pack, rows.ragged)
    return cpasync.make_tiled_tma_atom(op, view, slots, rows.tiler(*tile))
