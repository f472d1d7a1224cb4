"""The GEMM with an unaligned first operand on Hopper: out = ops(A @ B), A (M, K) with M contiguous.

The roles are the general GEMM's (kernels/gemm/sm90), with other loads of A (operand.py), and an MMA
role that reads A into registers (mma.py); schedulers, clusters, split K, and epilogues are as they
are.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.compile import Argument
from cutex.device.atoms.mma import MAJORS, allocate_slots
from cutex.device.atoms.multicast import AbOperands, SharedRing
from cutex.device.atoms.tma import store_operand
from cutex.device.atoms.wgmma import Wgmma, WgmmaProduct
from cutex.device.pipeline import Barrier, publish_barriers
from cutex.kernels.gemm.signature import GeneralConfig, modes, tile_counts
from cutex.kernels.gemm.sm90.exchange import Exchange
from cutex.kernels.gemm.sm90.general import General
from cutex.kernels.gemm.sm90.mma import MmaRole
from cutex.kernels.gemm.unaligned.config import UnalignedConfig
from cutex.kernels.gemm.unaligned.sm90.mma import KTiles, UnalignedSplitK
from cutex.kernels.gemm.unaligned.sm90.operand import (
    Folded,
    UnalignedOperands,
    allocate,
    folded,
    rows_of,
)
from cutex.kernels.gemm.w4.sm90.mma import Widen, WidenStreamK
from cutex.schedulers.stream_k import StreamedTiles


class Unaligned:
    """A CTA computes tiles of out: a load warp, and warpgroups that read A and run wgmma.

    Barriers and roles are the general kernel's (sm90/general.py); in place of its sA:

    smem            bytes
    sA              (tile_m + fold) * tile_k * 2 * num_stages

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

    def mma_role(
        self,
        k_tiles: KTiles,
        sB: cute.Tensor,
        workspace: tuple[cute.Tensor, cute.Tensor] | None,
        sums: Barrier | None,
    ) -> MmaRole:
        g, c = self.general, self.tiles
        scheduler = g.scheduler
        if sums is not None:
            return UnalignedSplitK(g.config, c, scheduler, g.cluster, sums, sB, k_tiles)
        if isinstance(scheduler, StreamedTiles):
            assert workspace is not None  # as the config has it
            return WidenStreamK(g.config, c, scheduler, Exchange(c, sB, *workspace), k_tiles)
        return Widen(g.config, c, scheduler, k_tiles)

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
        out, given = mOut, tuple(passed)
        if cutlass.const_expr(self.config.out.tma):
            slots = g.epilogue_slots(mOut.element_type)
            out = store_operand(mOut, slots)
            given = g.preload(given, slots)
        self.kernel(a, b, out, given, workspace).launch(
            grid=g.scheduler.grid(tile_counts(c, g.config.product(mOut))),
            block=(g.num_threads, 1, 1),
            cluster=(c.cluster_m, c.cluster_n, c.split_k),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

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
        kind = b.atom.value_type
        smem = SmemAllocator()
        sA = allocate(smem, kind, c)  # (boxM, boxK, FOLD, SLOT)
        sB = allocate_slots(smem, kind, b.smem_layout)  # (bN, bK, SLOT)
        mOut, sC = out, None
        if cutlass.const_expr(self.config.out.tma):
            mOut = out.tma_tensor
            sC = allocate_slots(smem, out.atom.value_type, out.smem_layout)  # (64, epiN, SLOT)
        mProduct = g.config.product(mOut)
        readers = g.mma_warps.count
        ab = SharedRing.of_cluster(smem, "ab", c.num_stages, c.stage_bytes, readers, g.cluster)
        held, sums = None, None
        if cutlass.const_expr(g.preloaded is not None):
            held = Barrier.allocate(smem, "held", arrivals=1, slots=g.num_slots)
        if cutlass.const_expr(c.split_k > 1):
            sums = Barrier.allocate(smem, "sums", arrivals=1)
        of_b = AbOperands(None, b, None, sB, g.config.k_major)
        operands = UnalignedOperands(a, sA, of_b, c.tile_m)
        warp = cute.arch.warp_idx()
        load = g.load_role
        if warp == g.load_warps.first:
            load.start(operands, mProduct)
        barriers = tuple(x for x in (ab, held, sums) if x is not None)
        publish_barriers(barriers, cluster=g.cluster.size > 1)
        if warp >= self.general.load_warps.first:
            self.general.give_registers()
            if warp == self.general.load_warps.first:
                load.run(operands, ab, mProduct)
        else:
            self.general.take_registers()
            k_tiles = KTiles(rows_of(sA, a.stride, warp // 4))
            mma = self.product(kind, sB)
            bound = self.config.bind(mProduct, passed)
            epilogue = self.general.epilogue(out, sC, None, bound, held)
            role = self.mma_role(k_tiles, sB, workspace, sums)
            role.run(mma, ab, epilogue, operands.num_k_tiles, mProduct)
            epilogue.drain()

    def product(self, kind: Any, sB: cute.Tensor) -> WgmmaProduct:
        """This warpgroup's part of A @ B; operand A is given later."""
        c = self.tiles
        b_major = MAJORS[self.config.k_major[1]]
        mma = Wgmma(c.tile_n, kind, b_major=b_major, warpgroups=c.mma_warpgroups)
        return WgmmaProduct(mma, None, mma.b_slots(sB), mma.accumulator(c.tile_m, c.tile_n))
