"""The MMA roles that promote: after each 128 of K, sums leave the tensor core for fp32 registers.

Hopper's fp8 MMAs keep 13 bits below the largest of what they add up, so the sums of one block of K
are scaled and added to others in fp32 (DeepSeek-V3, arXiv 2412.19437, 3.3.2). Two warpgroups
alternate by themselves: while one adds, the MMAs of the other run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.wgmma import ROWS, WARPGROUP, WgmmaProduct
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.scaled.fp8.config import Fp8Config
from cutex.kernels.gemm.scaled.fp8.sm90.factors import LANES, TileFactors
from cutex.kernels.gemm.signature import tile_counts
from cutex.kernels.gemm.sm90.mma import EpilogueStore, MmaRole, PartStore, Walk
from cutex.kernels.gemm.sm90.shared_k import SUMS_BARRIER, VECTOR, SplitK, thread_vectors


@dataclass(frozen=True)
class Promotion:
    """The sums of one tile, promoted: total += part * factors, for each block of K."""

    mma: WgmmaProduct
    ab: SharedRing
    factors: TileFactors
    part: cute.Tensor  # (MMA, 1, MMA_N) the sums of one block, of 64 rows
    held: cute.Tensor | None  # the shared factors of LANES blocks, one in each lane

    @cute.jit
    def add_blocks(
        self, take: PipelineState, seen: cutlass.Boolean, first: Int32, end: Int32
    ) -> tuple[PipelineState, cutlass.Boolean]:
        """Add up the blocks of K from `first` on, at most LANES of them, and release their slots.

        The sums of a block are of 64 rows at a time, so that one set of registers serves all rows
        of a warpgroup. `seen`: whether the next slot is known to be full. The barrier is looked at
        before sums are added, so that the next MMA need not wait for the answer.
        """
        mma, factors, waves = self.mma, self.factors, self.factors.waves
        size = cute.size(self.part)
        total = cute.make_tensor(mma.acc.iterator, cute.make_layout((size, waves)))  # (V, MMA_M)
        part = cute.make_tensor(self.part.iterator, cute.make_layout(size))  # (V)
        step = factors.tiles.steps
        for k_tile in cutlass.range(first + factors.turn(), end, step, unroll=1):
            full = cute.arch.vote_all_sync(seen)
            if not full:
                self.ab.wait_full(take)
            for wave in cutlass.range_constexpr(waves):
                rows = factors.rows(take.slot, wave)
                mma.of_rows(wave).into(self.part).issue(take.slot, accumulate=False)
                block = factors.of_block(take.slot, self.held, k_tile - first, wave, rows)
                warpgroup.wait_group(0)
                if cutlass.const_expr(wave == waves - 1):
                    cute.arch.sync_warp()  # its lanes have read their factors
                    self.ab.release(take)
                    for _ in cutlass.range_constexpr(step):
                        take.advance()
                    seen = self.ab.sees_full(take)
                block.add(total[None, wave], part)
        return take, seen


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
    the state after. All slots are released."""
    c: Fp8Config = factors.tiles
    mma.acc.fill(0.0)
    part = mma.mma.accumulator(ROWS * c.readers, c.tile_n)  # (MMA, 1, MMA_N)
    if cutlass.const_expr(c.alternating):
        take.skip(factors.turn())
    end, seen = first + count, cutlass.Boolean(False)
    num_shared = len(factors.shared())
    if cutlass.const_expr(num_shared == 0):
        take, seen = Promotion(mma, ab, factors, part, None).add_blocks(take, seen, first, end)
        return take
    held, ahead = (cute.make_rmem_tensor(num_shared, Float32) for _ in range(2))
    for i, value in enumerate(factors.load_shared(first)):
        ahead[i] = value
    promotion = Promotion(mma, ab, factors, part, held)
    for begin in cutlass.range(first, end, LANES, unroll=1):
        held.store(ahead.load())
        for i, value in enumerate(factors.load_shared(begin + LANES)):
            ahead[i] = value
        take, seen = promotion.add_blocks(take, seen, begin, cutlass.min(begin + LANES, end))
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
        cute.arch.griddepcontrol_wait()  # the kernel before may write shared factors
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
    """A CTA promotes a share of one tile's K, and exchanges sums in fp32 (sm90/shared_k.py)."""

    tiles: Fp8Config
    factors: tuple[Any, Any]
    slots: tuple[Any, Any]

    def compute(self, mma: WgmmaProduct, ab: SharedRing, walk: Walk, count: Int32) -> None:
        cute.arch.griddepcontrol_wait()  # the kernel before may write shared factors
        factors = TileFactors(self.tiles, self.factors, self.slots, walk.tile_at(walk.start))
        promoted(mma, ab, ab.consumer(), factors, walk.split * count, count)


# ---- warpgroups that alternate
#
# The MMA role of two warpgroups that compute one tile together, each every second block of K.
#
# A small tile's wgmma take no longer than what stands between them: the wait for a slot, their own
# latency, and the additions of the block before. With a warpgroup for every second block these hide
# under the other's wgmma. At the end each has sums of all rows, and leaves the other those of every
# second part of the tile in the smem where the ring was (docs/facts/scaled.md#fp8-alternating).


@dataclass(frozen=True)
class PromoteAlternating(Promote):
    """Two warpgroups promote every second block of one tile each, and store every second part."""

    sA: cute.Tensor  # (bM, bK, SLOT), where the ring begins

    @cute.jit
    def run(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: PartStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        cute.arch.griddepcontrol_wait()  # the kernel before may write shared factors
        tile = walk.tile_at(walk.start)
        promoted(mma, ab, ab.consumer(), self.factors_of(tile), 0, num_k_tiles)
        self.add_up(mma, epilogue, tile)

    def origin(self, tile: WorkTile) -> tuple[Int32, int, Int32]:
        """The first row of a tile, the step to the next 64, and the first column, all in parts of
        64 x epiN: each warpgroup has all rows."""
        c = self.tiles
        return tile.m * (c.tile_m // 64), 1, tile.n * (c.tile_n // self.config.epi_columns)

    @cute.jit
    def add_up(self, mma: WgmmaProduct, epilogue: PartStore, tile: WorkTile) -> None:
        """Leave the other warpgroup the sums of its parts, add its own to this one's, and store
        them."""
        mine = cute.arch.warp_idx() // 4
        parts = epilogue.parts(mma.acc)  # (V, PART)
        size, num_parts = cute.size(parts, mode=[0]), cute.size(parts, mode=[1])
        place = self.place(size, num_parts)
        # NOTE: then both have read the whole ring
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=2 * WARPGROUP)
        for part in cutlass.range_constexpr(num_parts):
            if mine != part % 2:
                cute.autovec_copy(thread_vectors(parts[None, part]), place[None, None, part])
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=2 * WARPGROUP)
        row, step, column = self.origin(tile)
        per_row = self.tiles.tile_n // self.config.epi_columns
        for part in cutlass.range_constexpr(num_parts):
            turn = part // 2
            if mine == part % 2:
                total = cute.make_rmem_tensor(place.shape[:2], Float32)  # (VECTOR, NumVectors)
                here = thread_vectors(parts[None, part])  # (VECTOR, NumVectors)
                total.store(here.load() + place[None, None, part].load())
                if cutlass.const_expr(turn == 0 or self.tiles.epi_stages == 1):
                    epilogue.wait(0)
                values = cute.make_tensor(total.iterator, cute.make_layout(size))
                slot = turn % self.tiles.epi_stages
                where = row + part // per_row * step, column + part % per_row
                epilogue.store_part(values, slot, *where)

    def place(self, size: int, num_parts: int) -> cute.Tensor:
        """This thread's place (VECTOR, NumVectors, PART) for sums, in the smem where the ring
        was."""
        thread, _, _ = cute.arch.thread_idx()
        first = cute.recast_ptr(self.sA.iterator, dtype=Float32).align(4 * VECTOR)
        shape = VECTOR, size // VECTOR, num_parts, WARPGROUP
        stride = 1, VECTOR * WARPGROUP, size * WARPGROUP, VECTOR
        layout = cute.make_layout(shape, stride=stride)
        return cute.make_tensor(first, layout)[None, None, None, thread % WARPGROUP]
