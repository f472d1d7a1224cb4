"""The product of few rows of x by mma.sync.

A wgmma with operand A in registers takes some 40 cycles however few columns there are, so that 64
rows and a block of K take as long as memory needs to bring them. mma.sync takes its operands from
the same registers, half of them where there are 8 columns, and what it leaves is laid out as a
wgmma's accumulators are (PTX ISA, "Matrix Fragments for mma.m16n8k16").
"""

from __future__ import annotations

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

    An mma.sync takes some 33 cycles, and one that adds to its sums waits for it: so those of half a
    block have sums of their own, and those of the other half add to them. Scales of groups of 64
    and more multiply the sums of a group, which are fewer than its weights. Of up to 8 rows of x,
    the 8 columns behind are left out.
    """
    total, waves = mma.acc, cute.size(mma.acc, mode=[1])
    total.fill(0.0)
    size = cute.size(total) // waves
    one = cute.make_layout(((2, 2), 1, tiles.columns_computed // COLUMNS))  # (MMA, 1, MMA_N)
    thread, _, _ = cute.arch.thread_idx()
    wg = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
    columns = tiles.columns_computed
    tiled_mma = warpgroup_mma(weights.kind, columns)
    thr_mma = tiled_mma.get_slice(thread % WARPGROUP)
    sB = cute.local_tile(sX, (columns, BLOCK_K), (0, 0, None))  # (N, bK, SLOT)
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB[None, None, 0]))  # (MMA, MMA_N, MMA_K)
    load = cute.make_copy_atom(LdMatrix8x8x16bOp(False, columns // 4), weights.kind)
    s2r = cute.make_tiled_copy_B(load, tiled_mma).get_slice(thread % WARPGROUP)
    tXsX, tXrX = s2r.partition_S(sB), s2r.retile(tCrB)  # (CPY, CPY_N, CPY_K[, SLOT])
    tCrA = mma.mma.a_registers(HALF_K)  # (MMA, 1, MMA_K)
    sums = [cute.make_rmem_tensor(one, Float32) for _ in range(WORDS)]  # each (MMA, 1, MMA_N)
    for _ in cutlass.range(count, unroll=1):
        ab.wait_full(take)
        cute.copy(s2r, tXsX[None, None, None, take.slot], tXrX)
        for wave in cutlass.range_constexpr(waves):
            strip = wave * tiles.mma_warpgroups + wg
            acc = cute.make_tensor(total.iterator + wave * size, one)
            factors = weights.factors(strip, take.slot)
            for half in cutlass.range_constexpr(HALVES):
                codes = weights.codes(strip, half, take.slot)
                weights.widen(codes, factors, half, tCrA)
                add_half(tiled_mma, tCrA, tCrB, half, sums, weights.begins_group(half))
                if cutlass.const_expr(weights.ends_group(half) and weights.scales_sums):
                    weights.add_scaled(added(sums), factors, half, acc)
                elif cutlass.const_expr(weights.ends_group(half)):
                    acc.store(acc.load() + added(sums).load())
        cute.arch.sync_warp()  # its lanes have read the slot
        ab.release(take)
        take.advance()
    return take


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
