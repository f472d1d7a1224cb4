"""The MMA roles of the kernel of 4-bit weights: codes are widened in registers, which are wgmma's
operand A.

A thread widens half a block of K while the wgmmas of the half before run: registers of two halves,
and the wait for one group of wgmmas comes before its registers are written again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op

from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.wgmma import ROWS, WgmmaProduct
from cutex.device.pipeline import PipelineState
from cutex.kernels.gemm.sm90.mma import Cooperative, StreamK
from cutex.kernels.gemm.sm90.roles import Walk
from cutex.kernels.gemm.sm90.split_k import SplitK
from cutex.kernels.gemm.w4.fragments import WORDS, Fragments
from cutex.kernels.gemm.w4.sm90.config import W4Config
from cutex.kernels.gemm.w4.sm90.few import widened_few
from cutex.kernels.gemm.w4.sm90.load import block_share
from cutex.problem.w4.layout import HALF_K, HALVES
from cutex.schedulers.order import select


@dsl_user_op
def zero(*, loc=None, ip=None) -> Float32:
    """0, of which the compiler does not know that it is: it else computes what is done with the
    accumulators for a loop that ends and for one that never begins apart, of the former before the
    wait for its wgmmas."""
    ptx = "mov.b32 $0, 0;"
    return Float32(llvm.inline_asm(T.f32(), [], ptx, "=f", has_side_effects=True, loc=loc, ip=ip))


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
    total.fill(zero())
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
                    release_before(ab, take, block > 0)
                weights.widen(codes, factors, half, halves[half])
                issue_half(mma, halves[half], half, take.slot, acc)
        take.advance()
    warpgroup.wait_group(0)
    release_before(ab, take, count > 0)
    return take


@cute.jit
def release_before(ab: SharedRing, take: PipelineState, there_is_one: Boolean) -> None:
    """Release the slot before `take`, whose wgmmas are done, if there is one in use.

    NOTE: a branch here, with wgmmas in flight that have operand A in registers, would have ptxas
    wait for each one at once; this arrival is predicated.
    """
    slot = select(take.slot == 0, take.num_slots, take.slot) - 1
    lane = cute.arch.lane_idx()
    if (lane < ab.cluster.neighbours) & there_is_one:
        if cutlass.const_expr(ab.cluster.size == 1):
            ab.empty.arrive(slot)
        else:
            cute.arch.mbarrier_arrive(ab.empty[slot], ab.cluster.neighbour(lane))


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


class Mainloop(Protocol):
    """A mainloop with operand A in registers, wherever they come from."""

    def run(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, count: Int32
    ) -> PipelineState:
        """mma.acc = A @ B^T over `count` K tiles from slot `take` on; return the state after."""


@dataclass(frozen=True)
class Widen(Cooperative):
    """All warpgroups compute a tile, each its own rows, and store it."""

    blocks: Mainloop

    def accumulate(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, num_k_tiles: Int32
    ) -> PipelineState:
        return self.blocks.run(mma, ab, take, num_k_tiles)


@dataclass(frozen=True)
class WidenSplitK(SplitK):
    """A CTA computes a share of one tile's K, and exchanges sums in fp32 (sm90/split_k.py)."""

    blocks: Blocks
    num_blocks: Any  # of all of K

    def compute(self, mma: WgmmaProduct, ab: SharedRing, walk: Walk, count: Int32) -> None:
        _, mine = block_share(self.blocks.tiles, walk.split, self.num_blocks)
        self.blocks.run(mma, ab, ab.consumer(), mine)


@dataclass(frozen=True)
class WidenStreamK(StreamK):
    """All warpgroups compute one segment of a tile's K at a time, and CTAs exchange their sums in
    global memory (sm90/mma.py, StreamK)."""

    blocks: Mainloop

    def accumulate(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, num_k_tiles: Int32
    ) -> PipelineState:
        return self.blocks.run(mma, ab, take, num_k_tiles)
