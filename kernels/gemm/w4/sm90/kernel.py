"""The GEMM with a packed weight of 4 bits on Hopper: out = ops(x @ W^T).

The product is computed transposed: rows of the weight are wgmma's rows, since operand A may come
from registers, where codes are widened; rows of x are its columns, as many as there are. The roles
are the general GEMM's (kernels/gemm/sm90): its load role also loads blocks of weight (load.py),
its MMA role widens them (mma.py); its schedulers, clusters, split K and epilogues are as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
from cutlass import Float32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.compile import Argument
from cutex.device.atoms.mma import SMEM_ALIGN, allocate_slots
from cutex.device.atoms.multicast import AbOperands
from cutex.device.atoms.wgmma import WgmmaProduct
from cutex.device.pipeline import Barrier
from cutex.kernels.gemm.signature import transposed
from cutex.kernels.gemm.sm90.general import Barriers, General
from cutex.kernels.gemm.sm90.load import LoadTiles
from cutex.kernels.gemm.sm90.mma import Cooperative, MmaRole, register_product
from cutex.kernels.gemm.sm90.shared_k import Exchange, StreamK
from cutex.kernels.gemm.w4.fragments import Fragments, allocate_weights
from cutex.kernels.gemm.w4.signature import W4Signature
from cutex.kernels.gemm.w4.sm90.config import W4Config
from cutex.kernels.gemm.w4.sm90.load import W4LoadOneTile, W4LoadSegments, W4LoadTiles, W4Operands
from cutex.kernels.gemm.w4.sm90.mma import Blocks, WidenSplitK
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

    def own_sums(self, smem: SmemAllocator) -> cute.Tensor | None:
        """Where other CTAs send their sums if not to where x was.

        NOTE: to where x was if only wgmmas read it: the barrier of the cluster before does not
        order what threads have read, of x as of the weight.
        """
        if not (size := self.tiles.own_sums_bytes):
            return None
        return smem.allocate_tensor(Float32, cute.make_layout(size // 4), SMEM_ALIGN)

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
        smem = SmemAllocator()
        sW = allocate_weights(smem, c.format, c.strips, c.num_stages)  # (WORDS, STRIP, SLOT)
        sX = allocate_slots(smem, x.atom.value_type, x.smem_layout)  # (bN, bK, SLOT)
        mOut, sC = out, None
        if cutlass.const_expr(self.config.out.tma):
            mOut = out.tma_tensor
            sC = allocate_slots(smem, out.atom.value_type, out.smem_layout)  # (64, epiN, SLOT)
        mProduct = g.config.product(mOut)
        barriers = Barriers.allocate(smem, g)
        own = self.own_sums(smem)
        operands = W4Operands(mW, sW, AbOperands(None, x, None, sX))
        prepare = partial(self.prepare, operands, workspace, barriers.sums, own)
        g.run(self.load_role, operands, barriers, prepare, mProduct, (out, sC, rows, passed))

    def prepare(
        self,
        operands: W4Operands,
        workspace: tuple[cute.Tensor, cute.Tensor] | None,
        sums: Barrier | None,
        own: cute.Tensor | None,
    ) -> tuple[MmaRole, WgmmaProduct]:
        """The MMA role, and this warpgroup's part of W @ x^T. The MMA warps call it."""
        g, c, sX = self.general, self.tiles, operands.x.sB
        weights = Fragments(operands.sW, c.format, sX.element_type, c.scales_sums)
        blocks = Blocks(c, weights, sX)
        what = g.config, c, g.scheduler
        mma = register_product(c, sX)
        if sums is not None:
            place = sX if own is None else own
            num_blocks = operands.num_k_tiles
            return WidenSplitK(*what, g.cluster, sums, place, num_blocks, own=blocks), mma
        if isinstance(g.scheduler, StreamedTiles):
            assert workspace is not None  # as the config has it
            exchange = Exchange(c, sX, *workspace)
            return StreamK(g.config, c, g.scheduler, exchange, own=blocks), mma
        return Cooperative(*what, own=blocks), mma
