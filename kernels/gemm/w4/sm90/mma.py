"""The mainloop of the kernel of 4-bit weights: codes are widened in registers, which are wgmma's
operand A.

A thread widens half a block of K while the wgmmas of the half before run: registers of two halves,
and the wait for one group of wgmmas comes before its registers are written again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.scalar import hidden_zero
from cutex.device.atoms.wgmma import ROWS, WgmmaProduct
from cutex.device.pipeline import PipelineState
from cutex.kernels.gemm.sm90.mma import Walk
from cutex.kernels.gemm.sm90.shared_k import SplitK
from cutex.kernels.gemm.w4.fragments import WORDS, Fragments
from cutex.kernels.gemm.w4.sm90.config import W4Config
from cutex.kernels.gemm.w4.sm90.few import widened_few
from cutex.kernels.gemm.w4.sm90.load import block_share
from cutex.problem.w4.layout import HALF_K, HALVES


@cute.jit
def widened(
    mma: WgmmaProduct,
    ab: SharedRing,
    take: PipelineState,
    tiles: cutlass.Constexpr[W4Config],
    weights: cutlass.Constexpr[Fragments],
    count: Int32,
) -> PipelineState:
    """mma.acc = W @ x^T over `count` blocks of K from slot `take` on; return the state after. All
    slots are released.

    The accumulators of a warpgroup are of `waves` times 64 rows, each of which has wgmmas of its
    own.
    """
    total, waves = mma.acc, cute.size(mma.acc, mode=[1])
    total.fill(hidden_zero())
    one = mma.mma.accumulator(ROWS * tiles.mma_warpgroups, tiles.tile_n).layout  # (MMA, 1, MMA_N)
    size = cute.size(total) // waves
    wg = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
    halves = [mma.mma.a_registers(HALF_K) for _ in range(HALVES)]
    for block in cutlass.range(count, unroll=1):
        ab.wait_full(take)
        for wave in cutlass.range_constexpr(waves):
            strip = wave * tiles.mma_warpgroups + wg
            acc = cute.make_tensor(total.iterator + wave * size, one)
            factors = weights.factors(strip, take.slot)
            for half in cutlass.range_constexpr(HALVES):
                codes = weights.codes(strip, half, take.slot)
                warpgroup.wait_group(1)  # that which read these registers
                if cutlass.const_expr(wave == 0 and half == 1):
                    ab.release_before(take, block > 0)
                weights.widen(codes, factors, half, halves[half])
                issue_half(mma, halves[half], half, take.slot, acc)
        take.advance()
    warpgroup.wait_group(0)
    ab.release_before(take, count > 0)
    return take


def issue_half(
    mma: WgmmaProduct, tCrA: cute.Tensor, half: int, slot: Int32, acc: cute.Tensor
) -> None:
    """Start acc += A @ B[slot]^T of half a block of K, as one group of wgmmas."""
    warpgroup.fence()
    tiled_mma = mma.mma.tiled(warpgroup.OperandSource.RMEM)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    for k_block in range(WORDS):
        b = mma.b[None, None, half * WORDS + k_block, slot]
        cute.gemm(tiled_mma, acc, tCrA[None, None, k_block], b, acc)
    warpgroup.commit_group()


@dataclass(frozen=True)
class Blocks:
    """The mainloop: blocks of a weight, widened, by x."""

    tiles: W4Config
    weights: Fragments
    sX: cute.Tensor  # (bN, bK, SLOT)

    def run(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, count: Int32
    ) -> PipelineState:
        """mma.acc = W @ x^T over `count` blocks from slot `take` on; return the state after."""
        if self.tiles.few:
            return widened_few(mma, self.sX, ab, take, self.tiles, self.weights, count)
        return widened(mma, ab, take, self.tiles, self.weights, count)


@dataclass(frozen=True)
class WidenSplitK(SplitK):
    """A SplitK whose shares are of blocks."""

    tiles: W4Config
    num_blocks: Any  # of all of K

    def compute(self, mma: WgmmaProduct, ab: SharedRing, walk: Walk, count: Int32) -> None:
        _, mine = block_share(self.tiles, walk.split, self.num_blocks)
        self.accumulate(mma, ab, ab.consumer(), mine)
