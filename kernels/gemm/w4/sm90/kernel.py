"""The GEMM with a packed weight of 4 bits on Hopper: out = ops(x @ W^T).

The product is computed transposed: rows of the weight are wgmma's rows, since operand A may come
from registers, where codes are widened; rows of x are its columns, as many as there are. The roles
are the general GEMM's (kernels/gemm/sm90): its load role also loads blocks of weight (load.py),
its MMA role widens them (mma.py); its schedulers, clusters, split K and epilogues are as they are.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.compile import Argument
from cutex.device.atoms.mma import SMEM_ALIGN, allocate_slots
from cutex.device.atoms.multicast import AbOperands, SharedRing
from cutex.device.atoms.wgmma import Wgmma, WgmmaProduct
from cutex.device.pipeline import Barrier, publish_barriers
from cutex.kernels.gemm.signature import (
    transposed,
)
from cutex.kernels.gemm.sm90.exchange import Exchange
from cutex.kernels.gemm.sm90.general import General
from cutex.kernels.gemm.sm90.load import LoadTiles
from cutex.kernels.gemm.sm90.mma import MmaRole
from cutex.kernels.gemm.w4.fragments import Fragments, allocate_weights
from cutex.kernels.gemm.w4.signature import W4Signature
from cutex.kernels.gemm.w4.sm90.config import W4Config
from cutex.kernels.gemm.w4.sm90.load import W4LoadOneTile, W4LoadSegments, W4LoadTiles
from cutex.kernels.gemm.w4.sm90.mma import Blocks, Widen, WidenSplitK, WidenStreamK
from cutex.kernels.gemm.w4.sm90.operands import W4Operands
from cutex.schedulers.stream_k import StreamedTiles


class W4Gemm:
    """A CTA computes tiles of out transposed: a load warp, and warpgroups that widen codes and run
    wgmma.

    Barriers and roles are the general kernel's (sm90/general.py); in place of its sA:

    smem            bytes
    sW              weight_bytes * num_stages: blocks of the tile's strips

    registers of an MMA thread beside its accumulators: 32 of operand A, of two halves of a block.
    """

    arch = "sm_90a"
    dtypes = ("bf16", "fp16")

    def __init__(self, config: W4Signature) -> None:
        assert isinstance(config.tiles, W4Config)
        self.config, self.tiles = config, config.tiles
        self.general = General(config.general)

    @property
    def name(self) -> str:
        return "sm90_gemm_w4"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        if dtype != self.config.dtype:
            raise ValueError(f"x={self.config.dtype}: compiled for {dtype}")
        return self.config.arguments()

    @property
    def load_role(self) -> LoadTiles:
        g, c = self.general, self.tiles
        if c.one_tile:
            return W4LoadOneTile(c, g.cluster, g.scheduler, g.pace)
        if isinstance(g.scheduler, StreamedTiles):
            return W4LoadSegments(c, g.cluster, g.scheduler)
        return W4LoadTiles(c, g.cluster, g.scheduler)

    def mma_role(
        self,
        blocks: Blocks,
        workspace: tuple[cute.Tensor, cute.Tensor] | None,
        sums: tuple[Barrier, cute.Tensor] | None,
        mW: cute.Tensor,
    ) -> MmaRole:
        g, c = self.general, self.tiles
        what = g.config, c, g.scheduler
        if sums is not None:
            return WidenSplitK(*what, g.cluster, *sums, blocks, cute.size(mW, mode=[1]))
        if isinstance(g.scheduler, StreamedTiles):
            assert workspace is not None  # as the config has it
            what = g.config, c, g.scheduler
            return WidenStreamK(*what, Exchange(c, blocks.sX, *workspace), blocks)
        return Widen(*what, blocks)

    def sums(self, smem: SmemAllocator, sX: cute.Tensor) -> tuple[Barrier, cute.Tensor] | None:
        """With a split of K, the barrier of the sums of other CTAs, and where these send them.

        NOTE: to where x was if only wgmmas read it: the barrier of the cluster before does not
        order what threads have read, of x as of the weight.
        """
        if self.tiles.split_k == 1:
            return None
        barrier = Barrier.allocate(smem, "sums", arrivals=1)
        if not (size := self.tiles.own_sums_bytes):
            return barrier, sX
        return barrier, smem.allocate_tensor(Float32, cute.make_layout(size // 4), SMEM_ALIGN)

    def barrier_of(self, sums: tuple[Barrier, cute.Tensor] | None) -> Barrier | None:
        return None if sums is None else sums[0]

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor, mOut: cute.Tensor, *rest) -> None:
        """Launch with x (M, K), the packed weight (STRIP, RestK, WORDS), out (M, N), the
        operations' arguments and a stream."""
        *passed, stream = rest
        c, g = self.tiles, self.general
        workspace = None
        if cutlass.const_expr(c.workspace is not None):
            *passed, total, flags = passed
            workspace = total, flags
        mOut = transposed(mOut)
        x = g.load_operand(mX, c.tile_n, c.cluster_m, True)
        out, rows, given = g.stored(mOut, tuple(passed))
        g.start(self.kernel(mW, x, out, rows, given, workspace), mOut, stream)

    @cute.kernel
    def kernel(
        self,
        mW: cute.Tensor,
        x: cpasync.TmaInfo,
        out: Any,
        rows: cute.Tensor | None,
        passed: tuple[Any, ...],
        workspace: tuple[cute.Tensor, cute.Tensor] | None,
    ) -> None:
        """Run the roles; `out`, `rows`, `passed` and `workspace` are the general kernel's."""
        c, g = self.tiles, self.general
        kind = x.atom.value_type
        smem = SmemAllocator()
        sW = allocate_weights(smem, c.format, c.strips, c.num_stages)  # (WORDS, STRIP, SLOT)
        sX = allocate_slots(smem, kind, x.smem_layout)  # (bN, bK, SLOT)
        mOut, sC = out, None
        if cutlass.const_expr(self.config.out.tma):
            mOut = out.tma_tensor
            sC = allocate_slots(smem, out.atom.value_type, out.smem_layout)  # (64, epiN, SLOT)
        mProduct = g.config.product(mOut)
        readers = g.mma_warps.count
        ab = SharedRing.of_cluster(smem, "ab", c.num_stages, c.stage_bytes, readers, g.cluster)
        held = None
        if cutlass.const_expr(g.preloaded is not None):
            held = Barrier.allocate(smem, "held", arrivals=1, slots=g.num_slots)
        sums = self.sums(smem, sX)
        operands = W4Operands(mW, sW, AbOperands(None, x, None, sX))
        blocks = Blocks(c, Fragments(sW, c.format, kind), sX)
        load, mma_role = self.load_role, self.mma_role(blocks, workspace, sums, mW)
        warp = cute.arch.warp_idx()
        if warp == g.load_warps.first:
            load.start(operands, mProduct)
        barriers = tuple(x for x in (ab, held, self.barrier_of(sums)) if x is not None)
        publish_barriers(barriers, cluster=g.cluster.size > 1)
        if warp >= self.general.load_warps.first:
            self.general.give_registers()
            if warp == self.general.load_warps.first:
                load.run(operands, ab, mProduct)
        else:
            self.general.take_registers()
            mma = self.product(kind, sX)
            epilogue = self.epilogue(out, sC, rows, mProduct, passed, held)
            mma_role.run(mma, ab, epilogue, operands.num_k_tiles, mProduct)
            epilogue.drain()

    def product(self, kind: Any, sX: cute.Tensor) -> WgmmaProduct:
        """This warpgroup's part of W @ x^T; operand A is given later."""
        c = self.tiles
        mma = Wgmma(c.tile_n, kind, warpgroups=c.mma_warpgroups)
        return WgmmaProduct(mma, None, mma.b_slots(sX), mma.accumulator(c.tile_m, c.tile_n))

    def epilogue(self, out: Any, sC: Any, rows: Any, mProduct: Any, passed: Any, held: Any) -> Any:
        """The epilogue store of this thread's warpgroup, or of its warp."""
        bound = self.config.general.bind(mProduct, passed)
        return self.general.epilogue(out, sC, rows, bound, held)
