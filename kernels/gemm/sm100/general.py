"""The general GEMM on Blackwell: every layout, dtype and batch that stage 9 can tile.

What stage 9 does is inherited, what arguments there are comes from kernels/gemm/general.py; this
class changes what the roles are given:

- tcgen05.mma reads operands with either side contiguous in smem, fp32 (as tf32) too, in a swizzle
  of its own. A CTA loads the same rows of A and of B either way.
- A tile has a batch entry. An operand with one entry for all (L = 1) is read again for each.
- The way out runs the pieces (cutex/fused_rows.py) on each sub-tile, in fp32, then rounds it and
  stores it by TMA; or element by element, where TMA cannot step through out.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import (
    allocate_slots,
    contiguous_lanes_layout,
    contiguous_rows_layout,
    make_umma,
    slots_layout,
)
from cutex.device.atoms.tma import PairOperands, load_operand, store_operand
from cutex.device.atoms.tmem import LANES, fence_before_sync
from cutex.device.epilogue import epilogue_ops as fusion
from cutex.device.epilogue.sm100 import FusedTileOut, FusedWayOut
from cutex.device.pipeline import AccRing, PipelineState
from cutex.kernels.gemm.general import GeneralGemm
from cutex.kernels.gemm.sm100.stage9 import Stage9
from cutex.schedulers.queue import CTAS


class General(GeneralGemm, Stage9):
    """Barriers, tensor memory and smem: as in stage 9; behind a gate slots of C are half as wide,
    and where C leaves by element there are none."""

    @property
    def name(self) -> str:
        return "sm100_gemm_general"

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, *rest) -> None:
        c = self.config
        passed, stream = rest[:-1], rest[-1]
        mA, mB, mOut = self.oriented(mA, mB, mOut)
        a = load_operand(mA, self.load_slots(mA.element_type, c.tile_m, self.k_major[0]), pair=True)
        b = load_operand(mB, self.load_slots(mB.element_type, c.tile_n, self.k_major[1]), pair=True)
        out = mOut
        if cutlass.const_expr(c.out.tma):
            out = store_operand(mOut, self.epilogue_slots(mOut.element_type))
        cluster = (CTAS * c.split_k, 1, 1)
        self.kernel(a, b, out, passed).launch(
            grid=(cluster[0] * self.num_tiles(self.product(mOut)), 1, 1),
            block=(self.num_threads, 1, 1),
            cluster=cluster,
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def load_slots(
        self, dtype: type[cutlass.Numeric], rows: int, k_major: bool
    ) -> cute.ComposedLayout:
        """Of one CTA's half of `rows`."""
        c = self.config
        if k_major:
            return slots_layout(dtype, rows // CTAS, c.k_elements, c.num_stages, self.swizzle)
        return contiguous_rows_layout(dtype, rows // CTAS, c.k_elements, c.num_stages)

    @property
    def out_columns(self) -> int:
        """That leave at a time."""
        c = self.config
        return c.epi_columns // (2 if fusion.gated(c.pieces) else 1)

    def epilogue_slots(self, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
        c, columns = self.config, self.out_columns
        if c.columns_contiguous:
            swizzle = columns * dtype.width // 8
            return slots_layout(dtype, LANES, columns, c.epi_stages, swizzle)
        return contiguous_lanes_layout(columns, c.epi_stages)

    @cute.kernel
    def kernel(
        self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, out: Any, passed: tuple[Any, ...]
    ) -> None:
        c = self.config
        kinds = a.atom.value_type, b.atom.value_type
        smem = SmemAllocator()
        sA = allocate_slots(smem, kinds[0], a.smem_layout)  # (bM / 2, bK, SLOT)
        sB = allocate_slots(smem, kinds[1], b.smem_layout)  # (bN / 2, bK, SLOT)
        mOut, sC = out, None
        if cutlass.const_expr(c.out.tma):
            mOut = out.tma_tensor
            sC = allocate_slots(smem, out.atom.value_type, out.smem_layout)  # (128, epiN, SLOT)
        mProduct = self.product(mOut)
        majors = tuple(OperandMajorMode.K if k else OperandMajorMode.MN for k in self.k_major)
        mma = make_umma(256, c.tile_n, *kinds, majors, pair=True)
        fused, sums = self.fusion(mProduct, passed), self.allocate_sums(smem)
        way_out = FusedWayOut(out, sC, c.epi_columns, fused, sums)
        self.run(mma, PairOperands(a, b, sA, sB), way_out, mProduct, smem)

    @cute.jit
    def store_block(self, leaving: FusedTileOut, acc: AccRing, take: PipelineState) -> None:
        """With pieces, or element by element, in a loop.

        NOTE: unrolled, with bias, residual and scales, the sub-tiles of both blocks would be one
        piece of code of which ptxas keeps what they share: 255 registers and 2 KB of spills.
        """
        if cutlass.const_expr(self.config.pieces == () and self.config.out.tma):
            Stage9.store_block(self, leaving, acc, take)
        else:
            parts = leaving.parts
            following = parts.start_load(0)
            for part in cutlass.range(parts.num_parts, unroll=1):
                parts.wait_loads()
                tTR_rAcc = cute.make_rmem_tensor_like(following)
                tTR_rAcc.store(following.load())
                if part < parts.num_parts - 1:
                    parts.start_load_into(following, part + 1)
                else:
                    fence_before_sync()
                    acc.release(take)
                leaving.store_next(tTR_rAcc, part)
