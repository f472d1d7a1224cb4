"""The MMA roles of kernels whose operand A is in registers, where threads make it (w4/,
unaligned/): the general kernel's (mma.py), with a mainloop of the kernel's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from cutex.device.atoms.mma import MAJORS
from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.wgmma import Wgmma, WgmmaProduct
from cutex.device.pipeline import PipelineState
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.mma import Cooperative, StreamK
from cutex.kernels.gemm.sm90.roles import Walk
from cutex.kernels.gemm.sm90.split_k import SplitK
from cutex.schedulers.order import select


@dsl_user_op
def zero(*, loc=None, ip=None) -> Float32:
    """0, of which the compiler does not know that it is: it else computes what is done with the
    accumulators for a loop that ends and for one that never begins apart, of the former before the
    wait for its wgmmas."""
    ptx = "mov.b32 $0, 0;"
    return Float32(llvm.inline_asm(T.f32(), [], ptx, "=f", has_side_effects=True, loc=loc, ip=ip))


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


class Mainloop(Protocol):
    """A mainloop with operand A in registers, wherever they come from."""

    def run(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, count: Int32
    ) -> PipelineState:
        """mma.acc = A @ B^T over `count` K tiles from slot `take` on; return the state after. All
        slots are released."""


@dataclass(frozen=True)
class RegisterCooperative(Cooperative):
    """All warpgroups compute a tile, each its own rows, and store it."""

    mainloop: Mainloop

    def accumulate(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, num_k_tiles: Int32
    ) -> PipelineState:
        return self.mainloop.run(mma, ab, take, num_k_tiles)


@dataclass(frozen=True)
class RegisterSplitK(SplitK):
    """A CTA computes a share of one tile's K, and exchanges sums in fp32 (split_k.py)."""

    mainloop: Mainloop

    def compute(self, mma: WgmmaProduct, ab: SharedRing, walk: Walk, count: Int32) -> None:
        self.mainloop.run(mma, ab, ab.consumer(), count)


@dataclass(frozen=True)
class RegisterStreamK(StreamK):
    """All warpgroups compute one segment of a tile's K at a time, and CTAs exchange their sums in
    global memory (mma.py, StreamK)."""

    mainloop: Mainloop

    accumulate = RegisterCooperative.accumulate


def register_product(tiles: Sm90Config, sB: cute.Tensor, k_major: bool = True) -> WgmmaProduct:
    """This warpgroup's part of A @ B^T, B contiguous along K or not; operand A is given later."""
    c, kind = tiles, sB.element_type
    mma = Wgmma(c.tile_n, kind, b_major=MAJORS[k_major], warpgroups=c.mma_warpgroups)
    return WgmmaProduct(mma, None, mma.b_slots(sB), mma.accumulator(c.tile_m, c.tile_n))
