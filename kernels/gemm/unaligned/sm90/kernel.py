"""The GEMM with an unaligned first operand on Hopper: out = ops(A @ B), A (M, K) with M contiguous.

The roles are the general GEMM's (kernels/gemm/sm90), with other loads of A (operand.py), and an MMA
role that reads A into registers; schedulers, clusters, split K, and epilogues are as they
are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cutex.compile import Argument
from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.multicast import AbOperands, SharedRing
from cutex.device.atoms.scalar import hidden_zero
from cutex.device.atoms.wgmma import WgmmaProduct
from cutex.device.pipeline import Barrier, PipelineState
from cutex.kernels.gemm.signature import GeneralConfig, modes
from cutex.kernels.gemm.sm90.general import Barriers, General
from cutex.kernels.gemm.sm90.mma import Cooperative, MmaRole, register_product
from cutex.kernels.gemm.sm90.shared_k import Exchange, SplitK, StreamK
from cutex.kernels.gemm.unaligned.config import TILE_K, UnalignedConfig
from cutex.kernels.gemm.unaligned.sm90.operand import (
    Folded,
    Rows,
    UnalignedOperands,
    allocate,
    folded,
    rows_of,
)
from cutex.schedulers.stream_k import StreamedTiles


@cute.jit
def multiplied(
    mma: WgmmaProduct, ab: SharedRing, take: PipelineState, rows: Rows, count: Int32
) -> PipelineState:
    """mma.acc = A @ B^T over `count` K tiles from slot `take` on; return the state after. All slots
    are released."""
    mma.acc.fill(hidden_zero())
    tCrA = mma.mma.a_registers(TILE_K)
    for block in cutlass.range(count, unroll=1):
        ab.wait_full(take)
        raw = rows.read(take.slot)
        warpgroup.wait_group(0)  # the wgmmas before have read their operand A
        ab.release_before(take, block > 0)
        rows.ordered(raw, tCrA)
        mma.of(tCrA).issue(take.slot, accumulate=True)
        take.advance()
    warpgroup.wait_group(0)
    ab.release_before(take, count > 0)
    return take


@dataclass(frozen=True)
class KTiles:
    """The mainloop: K tiles of A, from registers, by B."""

    rows: Rows

    def run(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, count: Int32
    ) -> PipelineState:
        return multiplied(mma, ab, take, self.rows, count)


class Unaligned:
    """A CTA computes tiles of out: a load warp, and warpgroups that read A and run wgmma.

    Barriers and roles are the general kernel's (sm90/general.py); in place of its sA:

    smem            bytes
    sA              (tile_m + fold) * k_bytes * num_stages

    registers of an MMA thread beside its accumulators: 16 of operand A, and 16 that it reads.
    """

    arch = "sm_90a"
    dtypes = ("bf16", "fp16")

    def __init__(self, config: GeneralConfig) -> None:
        assert isinstance(config.tiles, UnalignedConfig)
        self.config, self.tiles = config, config.tiles
        self.general = General(config)

    @property
    def name(self) -> str:
        return "sm90_gemm_unaligned"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return self.config.arguments()

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, *rest) -> None:
        """Launch with a (M, K), b (K, N), out (M, N), the operations' arguments, with stream_k the
        workspace (sums, flags), and a stream."""
        *passed, stream = rest
        c, g = self.tiles, self.general
        workspace = None
        if cutlass.const_expr(c.workspace is not None):
            *passed, total, flags = passed
            workspace = total, flags
        a = folded(mA, c)
        b = g.load_operand(modes(mB, True), c.tile_n, c.cluster_m, g.config.k_major[1])
        out, _, given = g.stored(mOut, tuple(passed))
        g.start(self.kernel(a, b, out, given, workspace), mOut, stream)

    @cute.kernel
    def kernel(
        self,
        a: Folded,
        b: cpasync.TmaInfo,
        out: Any,
        passed: tuple[Any, ...],
        workspace: tuple[cute.Tensor, cute.Tensor] | None,
    ) -> None:
        """Run the roles; `out`, `passed` and `workspace` are the general kernel's."""
        c, g = self.tiles, self.general
        smem = SmemAllocator()
        sA = allocate(smem, b.atom.value_type, c)  # (boxM, boxK, FOLD, SLOT)
        sB = allocate_slots(smem, b.atom.value_type, b.smem_layout)  # (bN, bK, SLOT)
        mOut, sC = out, None
        if cutlass.const_expr(self.config.out.tma):
            mOut = out.tma_tensor
            sC = allocate_slots(smem, out.atom.value_type, out.smem_layout)  # (64, epiN, SLOT)
        mProduct = g.config.product(mOut)
        barriers = Barriers.allocate(smem, g)
        of_b = AbOperands(None, b, None, sB, g.config.k_major)
        operands = UnalignedOperands(a, sA, of_b, c.tile_m)
        prepare = partial(self.prepare, operands, workspace, barriers.sums)
        g.run(g.load_role, operands, barriers, prepare, mProduct, (out, sC, None, passed))

    def prepare(
        self,
        operands: UnalignedOperands,
        workspace: tuple[cute.Tensor, cute.Tensor] | None,
        sums: Barrier | None,
    ) -> tuple[MmaRole, WgmmaProduct]:
        """The MMA role, and this warpgroup's part of A @ B. The MMA warps call it."""
        g, c, sB = self.general, self.tiles, operands.general.sB
        k_tiles = KTiles(rows_of(operands.sA, operands.a.stride, cute.arch.warp_idx() // 4))
        mma = register_product(c, sB, self.config.k_major[1])
        what = g.config, c, g.scheduler
        if sums is not None:
            return SplitK(*what, g.cluster, sums, sB, own=k_tiles), mma
        if isinstance(g.scheduler, StreamedTiles):
            assert workspace is not None  # as the config has it
            exchange = Exchange(c, sB, *workspace)
            return StreamK(g.config, c, g.scheduler, exchange, own=k_tiles), mma
        return Cooperative(*what, own=k_tiles), mma
