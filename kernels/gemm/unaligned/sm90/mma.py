"""The mainloop of the kernel of unaligned operands: threads read operand A from smem, element by
element, into registers."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.wgmma import WgmmaProduct
from cutex.device.pipeline import PipelineState
from cutex.kernels.gemm.sm90.register_operand import release_before, zero
from cutex.kernels.gemm.unaligned.config import TILE_K
from cutex.kernels.gemm.unaligned.sm90.operand import Rows


@cute.jit
def multiplied(
    mma: WgmmaProduct, ab: SharedRing, take: PipelineState, rows: Rows, count: Int32
) -> PipelineState:
    """mma.acc = A @ B^T over `count` K tiles from slot `take` on; return the state after. All slots
    are released."""
    mma.acc.fill(zero())
    tCrA = mma.mma.a_registers(TILE_K)
    for block in cutlass.range(count, unroll=1):
        ab.wait_full(take)
        raw = rows.read(take.slot)
        warpgroup.wait_group(0)  # the wgmmas before have read their operand A
        release_before(ab, take, block > 0)
        rows.ordered(raw, tCrA)
        mma.of(tCrA).issue(take.slot, accumulate=True)
        take.advance()
    warpgroup.wait_group(0)
    release_before(ab, take, count > 0)
    return take


@dataclass(frozen=True)
class KTiles:
    """The mainloop: K tiles of A, from registers, by B."""

    rows: Rows

    def run(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, count: Int32
    ) -> PipelineState:
        return multiplied(mma, ab, take, self.rows, count)
