"""The tcgen05.mma of attention, with operand A in shared or in tensor memory.

Each CTA of a pair holds half the rows of A and of the accumulator, and half of B.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from cutex.device.atoms.mma import instruction_tiles
from cutex.device.atoms.tmem import LANES

K = 16  # elements of 16 bits along K in one instruction


def make_umma16(
    columns: int,
    dtype: type[cutlass.Numeric],
    ctas: int,
    a_in_tmem: bool,
    b_rows_contiguous: bool,
) -> cute.TiledMma:
    """The tiled tcgen05.mma of 16-bit elements, 128 rows per CTA by `columns`."""
    group = tcgen05.CtaGroup.TWO if ctas == 2 else tcgen05.CtaGroup.ONE
    source = tcgen05.OperandSource.TMEM if a_in_tmem else tcgen05.OperandSource.SMEM
    b_major = OperandMajorMode.MN if b_rows_contiguous else OperandMajorMode.K
    shape = (LANES * ctas, columns, K)
    op = tcgen05.MmaF16BF16Op(dtype, Float32, shape, group, source, OperandMajorMode.K, b_major)
    return cute.make_tiled_mma(op)


class UmmaProduct(NamedTuple):
    """The product acc = A B^T, issued by one thread: B in a slot of smem, acc at a column of tensor
    memory."""

    tiled_mma: cute.TiledMma
    tCrB: cute.Tensor  # (MMA, MMA_N, MMA_K, SLOT) descriptors
    tCtAcc: cute.Tensor  # (MMA, 1, 1) fp32 at column 0

    @cute.jit
    def issue(
        self,
        column: Int32,
        tCrA: cute.Tensor,
        slot: Int32,
        accumulate: Boolean,
        k_blocks: cutlass.Constexpr[tuple[int, int]],
    ) -> None:
        """Start A B[slot]^T over `k_blocks` [first, end), added to acc, which the first block
        overwrites unless `accumulate`. A whole warp calls it.

        tCrA (MMA, MMA_M, MMA_K) is smem descriptors or tensor memory; acc begins at `column`.
        """
        # NOTE: setting a field changes the object, which must not outlive the loop it is set in
        tiled_mma = cute.make_tiled_mma(self.tiled_mma.op)
        acc = cute.make_tensor(self.tCtAcc.iterator + column, self.tCtAcc.layout)
        for k_block in cutlass.range_constexpr(*k_blocks):
            tiled_mma.set(tcgen05.Field.ACCUMULATE, accumulate if k_block == 0 else True)
            cute.gemm(
                tiled_mma,
                acc,
                tCrA[None, None, k_block],
                self.tCrB[None, None, k_block, slot],
                acc,
            )


@cute.jit
def umma_product(
    tiled_mma: cute.TiledMma, sB: cute.Tensor, tmem: cute.Pointer, columns: cutlass.Constexpr[int]
) -> UmmaProduct:
    """The product with sB (bN / ctas, bK, SLOT), whose accumulators have `columns` columns in the
    tensor memory from `tmem` on."""
    ctas = cute.size(tiled_mma.thr_id)
    acc = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C((LANES * ctas, columns)))
    tCrB = tiled_mma.make_fragment_B(instruction_tiles(sB, columns // ctas))
    return UmmaProduct(tiled_mma, tCrB, cute.make_tensor(tmem, acc.layout))


@cute.jit
def a_from_tmem(
    tiled_mma: cute.TiledMma,
    tmem: cute.Pointer,
    column: Int32,
    k: cutlass.Constexpr[int],
    dtype: cutlass.Constexpr[type[cutlass.Numeric]],
) -> cute.Tensor:
    """Operand A (MMA, MMA_M, MMA_K) of 128 rows per CTA and `k` elements, in tensor memory from
    `column` on."""
    ctas = cute.size(tiled_mma.thr_id)
    shape = tiled_mma.partition_shape_A((LANES * ctas, k))
    layout = tiled_mma.make_fragment_A(shape).layout
    return cute.make_tensor(cute.recast_ptr(tmem + column, dtype=dtype), layout)
