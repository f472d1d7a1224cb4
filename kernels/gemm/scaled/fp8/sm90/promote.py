"""The MMA roles that promote: after each 128 of K, sums leave the tensor core for fp32 registers.

Hopper's fp8 MMAs keep 13 bits below the largest of what they add up, so the sums of one block of K
are scaled and added to others in fp32 (DeepSeek-V3, arXiv 2412.19437, 3.3.2). Two warpgroups
alternate by themselves: while one adds, the MMAs of the other run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.wgmma import ROWS, WgmmaProduct
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.scaled.fp8.config import Fp8Config
from cutex.kernels.gemm.scaled.fp8.sm90.factors import TileFactors
from cutex.kernels.gemm.signature import tile_counts
from cutex.kernels.gemm.sm90.mma import EpilogueStore, MmaRole
from cutex.kernels.gemm.sm90.roles import Walk
from cutex.kernels.gemm.sm90.split_k import SplitK


@cute.jit
def promoted(
    mma: WgmmaProduct,
    ab: SharedRing,
    take: PipelineState,
    factors: cutlass.Constexpr[Any],
    first: Int32 | int,
    count: Int32,
) -> PipelineState:
    """Add up `count` blocks of K from `first` on, each scaled by its factors, in mma.acc; return
    the state after. All slots are released.

    The sums of a block are of 64 rows at a time, so that one set of registers serves all rows of a
    warpgroup.
    """
    c: Fp8Config = factors.tiles
    total, waves = mma.acc, cute.size(mma.acc, mode=[1])
    total.fill(0.0)
    size = cute.size(total) // waves
    of_waves = cute.make_tensor(total.iterator, cute.make_layout((size, waves)))  # (V, MMA_M)
    acc = mma.mma.accumulator(ROWS * c.mma_warpgroups, c.tile_n)  # (MMA, 1, MMA_N)
    part = cute.make_tensor(acc.iterator, cute.make_layout(size))  # (V)
    for k_tile in cutlass.range(first, first + count, unroll=1):
        ab.wait_full(take)
        for wave in cutlass.range_constexpr(waves):
            mma.of_rows(wave).into(acc).issue(take.slot, accumulate=False)
            block = factors.read(take.slot, k_tile, wave)
            warpgroup.wait_group(0)
            if cutlass.const_expr(wave == waves - 1):
                cute.arch.sync_warp()  # its lanes have read their factors
                ab.release(take)
            block.add(of_waves[None, wave], part)
        take.advance()
    return take


@dataclass(frozen=True)
class Promote(MmaRole):
    """All warpgroups compute a tile, each its own rows, promoting, and store it."""

    tiles: Fp8Config
    factors: tuple[Any, Any]  # of both sides, as FactoredOperands has them
    slots: tuple[Any, Any]

    @cute.jit
    def run(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: EpilogueStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        take = ab.consumer()
        for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            tile = walk.tile_at(index)
            take = promoted(mma, ab, take, self.factors_of(tile), 0, num_k_tiles)
            self.store(mma, epilogue, tile)

    def factors_of(self, tile: WorkTile) -> TileFactors:
        """The factors of a tile."""
        return TileFactors(self.tiles, self.factors, self.slots, tile)


@dataclass(frozen=True)
class PromoteSplitK(SplitK):
    """A CTA promotes a share of one tile's K, and exchanges sums in fp32 (sm90/split_k.py)."""

    tiles: Fp8Config
    factors: tuple[Any, Any]
    slots: tuple[Any, Any]

    def compute(self, mma: WgmmaProduct, ab: SharedRing, walk: Walk, count: Int32) -> None:
        factors = TileFactors(self.tiles, self.factors, self.slots, walk.tile_at(walk.start))
        promoted(mma, ab, ab.consumer(), factors, walk.split * count, count)
