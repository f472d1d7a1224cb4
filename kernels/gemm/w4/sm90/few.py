"""The product of few rows of x by mma.sync.

A wgmma with operand A in registers takes some 40 cycles however few columns there are, so that 64
rows and a block of K take as long as memory needs to bring them. mma.sync takes its operands from
the same registers, half of them where there are 8 columns, and what it leaves is laid out as a
wgmma's accumulators are (PTX ISA, "Matrix Fragments for mma.m16n8k16").
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp

from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.wgmma import WARPGROUP, WgmmaProduct
from cutex.device.pipeline import PipelineState
from cutex.kernels.gemm.w4.fragments import COLUMNS, WORDS, Fragments, warpgroup_mma
from cutex.kernels.gemm.w4.sm90.config import W4Config
from cutex.problem.w4.layout import BLOCK_K, HALF_K, HALVES


@cute.jit
def widened_few(
    mma: WgmmaProduct,
    sX: cute.Tensor,
    ab: SharedRing,
    take: PipelineState,
    tiles: cutlass.Constexpr[W4Config],
    weights: cutlass.Constexpr[Fragments],
    count: Int32,
) -> PipelineState:
    """mma.acc = W @ x^T over `count` blocks of K from slot `take` on, x in slots sX (bN, bK, SLOT);
    return the state after. All slots are released.

    A block is a chain of loads, conversions and products, each of which waits for the one before,
    with few warps to fill the time: so two blocks are computed side by side where that is faster.
    """
    mma.acc.fill(0.0)
    few, side_by_side = FewRows(mma, sX, ab, tiles, weights), tiles.side_by_side
    for _ in cutlass.range(count // side_by_side, unroll=1):
        take = few.add(take, side_by_side)
    if cutlass.const_expr(side_by_side > 1):
        for _ in cutlass.range(count % side_by_side, unroll=1):
            take = few.add(take, 1)
    return take


@dataclass(frozen=True)
class FewRows:
    """The products of blocks of a weight by few rows of x.

    An mma.sync takes some 33 cycles, and one that adds to its sums waits for it: so those of half a
    block have sums of their own, and those of the other half add to them. Scales of groups of 64
    and more multiply the sums of a group, which are fewer than its weights. Of up to 8 rows of x,
    the 8 columns behind are left out.
    """

    mma: WgmmaProduct
    sX: cute.Tensor  # (bN, bK, SLOT)
    ab: SharedRing
    tiles: W4Config
    weights: Fragments

    @cute.jit
    def add(self, take: PipelineState, num: cutlass.Constexpr[int]) -> PipelineState:
        """mma.acc += W @ x^T over `num` blocks of K; return the state after."""
        total, tiles, weights = self.mma.acc, self.tiles, self.weights
        waves, columns = cute.size(total, mode=[1]), tiles.columns_computed
        size = cute.size(total) // waves
        one = cute.make_layout(((2, 2), 1, columns // COLUMNS))  # (MMA, 1, MMA_N)
        thread, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
        tiled_mma = warpgroup_mma(weights.kind, columns)
        thr_mma = tiled_mma.get_slice(thread % WARPGROUP)
        sB = cute.local_tile(self.sX, (columns, BLOCK_K), (0, 0, None))  # (N, bK, SLOT)
        partitioned = thr_mma.partition_B(sB[None, None, 0])
        load = cute.make_copy_atom(LdMatrix8x8x16bOp(False, columns // 4), weights.kind)
        s2r = cute.make_tiled_copy_B(load, tiled_mma).get_slice(thread % WARPGROUP)
        tXsX = s2r.partition_S(sB)  # (CPY, CPY_N, CPY_K, SLOT)
        states, loaded = [], []
        for _ in cutlass.range_constexpr(num):
            self.ab.wait_full(take)
            tCrB = tiled_mma.make_fragment_B(partitioned)  # (MMA, MMA_N, MMA_K)
            cute.copy(s2r, tXsX[None, None, None, take.slot], s2r.retile(tCrB))
            states.append(PipelineState(take.num_slots, take.slot, take.phase))
            loaded.append(tCrB)
            take.advance()
        for wave in cutlass.range_constexpr(waves):
            strip = wave * tiles.mma_warpgroups + wg
            acc = cute.make_tensor(total.iterator + wave * size, one)
            for i in cutlass.range_constexpr(num):
                self.add_strip(acc, strip, states[i].slot, tiled_mma, loaded[i])
        cute.arch.sync_warp()  # its lanes have read the slots
        for i in cutlass.range_constexpr(num):
            self.ab.release(states[i])
        return take

    def add_strip(
        self,
        acc: cute.Tensor,
        strip: Int32,
        slot: Int32,
        tiled_mma: cute.TiledMma,
        tCrB: cute.Tensor,
    ) -> None:
        """acc (MMA, 1, MMA_N) += the block of `strip` in `slot`, by x (MMA, MMA_N, MMA_K)."""
        weights = self.weights
        tCrA = self.mma.mma.a_registers(HALF_K)  # (MMA, 1, MMA_K)
        sums = [cute.make_rmem_tensor(acc.layout, Float32) for _ in range(WORDS)]
        factors = weights.factors(strip, slot)
        for half in range(HALVES):
            weights.widen(weights.codes(strip, half, slot), factors, half, tCrA)
            add_half(tiled_mma, tCrA, tCrB, half, sums, weights.begins_group(half))
            if weights.ends_group(half) and weights.scales_sums:
                weights.add_scaled(added(sums), factors, half, acc)
            elif weights.ends_group(half):
                acc.store(acc.load() + added(sums).load())


def add_half(
    mma: cute.TiledMma,
    tCrA: cute.Tensor,
    tCrB: cute.Tensor,
    half: int,
    sums: list[cute.Tensor],
    first: bool,
) -> None:
    """sums[i] (MMA, 1, MMA_N) += A @ B^T of the i-th 16 of K of half a block, A (MMA, 1, MMA_K) of
    that half, B (MMA, MMA_N, all K); with `first` they begin at zero."""
    for i, acc in enumerate(sums):
        if first:
            acc.fill(0.0)
        cute.gemm(mma, acc, tCrA[None, None, i], tCrB[None, None, half * WORDS + i], acc)


def added(sums: list[cute.Tensor]) -> cute.Tensor:
    """The sum of all of `sums`, in the first of them."""
    for step in (1, 2):
        for i in range(0, len(sums), 2 * step):
            sums[i].store(sums[i].load() + sums[i + step].load())
    return sums[0]
