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
from cutex.problem.w4.layout import HALF_K, HALVES


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

    Scales of groups of 64 and more multiply the sums of a group, which are fewer than its weights.
    """
    total, waves = mma.acc, cute.size(mma.acc, mode=[1])
    total.fill(0.0)
    size = cute.size(total) // waves
    one = cute.make_layout(((2, 2), 1, tiles.tile_n // COLUMNS))  # (MMA, 1, MMA_N)
    thread, _, _ = cute.arch.thread_idx()
    wg = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
    tiled_mma = warpgroup_mma(weights.kind)
    thr_mma = tiled_mma.get_slice(thread % WARPGROUP)
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sX[None, None, 0]))  # (MMA, MMA_N, MMA_K)
    load = cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), weights.kind)
    s2r = cute.make_tiled_copy_B(load, tiled_mma).get_slice(thread % WARPGROUP)
    tXsX, tXrX = s2r.partition_S(sX), s2r.retile(tCrB)  # (CPY, CPY_N, CPY_K[, SLOT])
    tCrA = mma.mma.a_registers(HALF_K)  # (MMA, 1, MMA_K)
    of_group = cute.make_rmem_tensor(one, Float32)  # (MMA, 1, MMA_N)
    for _ in cutlass.range(count, unroll=1):
        ab.wait_full(take)
        cute.copy(s2r, tXsX[None, None, None, take.slot], tXrX)
        for wave in cutlass.range_constexpr(waves):
            strip = wave * tiles.mma_warpgroups + wg
            acc = cute.make_tensor(total.iterator + wave * size, one)
            factors = weights.factors(strip, take.slot)
            to = of_group if cutlass.const_expr(weights.scales_sums) else acc
            for half in cutlass.range_constexpr(HALVES):
                if cutlass.const_expr(weights.scales_sums and weights.begins_group(half)):
                    of_group.fill(0.0)
                codes = weights.codes(strip, half, take.slot)
                weights.widen(codes, factors, half, tCrA)
                for k_block in cutlass.range_constexpr(WORDS):
                    b = tCrB[None, None, half * WORDS + k_block]
                    cute.gemm(tiled_mma, to, tCrA[None, None, k_block], b, to)
                if cutlass.const_expr(weights.scales_sums and weights.ends_group(half)):
                    weights.add_scaled(of_group, factors, half, acc)
        cute.arch.sync_warp()  # its lanes have read the slot
        ab.release(take)
        take.advance()
    return take
