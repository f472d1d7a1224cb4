"""The two products of attention by wgmma: S = Q K^T and O += P V.

P comes from the registers that S was computed in: a thread holds 16 columns of an accumulator in
the same places as 16 columns of operand A (PTX ISA, "Register Fragments for wgmma.mma_async"), so
all that remains to be done is rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cutex.device.atoms.mma import WARPGROUP

ROWS = 64  # rows of one wgmma
K = 16  # elements of 16 bits along K in one wgmma


def make_mma(
    warpgroups: int,
    columns: int,
    dtype: type[cutlass.Numeric],
    a_in_registers: bool,
    b_rows_contiguous: bool,
) -> cute.TiledMma:
    """The tiled wgmma of 64 rows per warpgroup, whose B is K-major or, as V is, contiguous along
    its rows."""
    source = warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM
    b_major = OperandMajorMode.MN if b_rows_contiguous else OperandMajorMode.K
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (ROWS, columns, K), source, OperandMajorMode.K, b_major
    )
    return cute.make_tiled_mma(op, (warpgroups, 1, 1))


# Operand A: registers ((2, 2, 2), 1, MMA_K) or descriptors (MMA, MMA_M, MMA_K); or both: registers
# for the first blocks of K, descriptors for all
Operand = cute.Tensor | tuple[cute.Tensor, cute.Tensor]


class Product(NamedTuple):
    """A warpgroup's wgmma over all of K, with B from a slot of smem."""

    tiled_mma: cute.TiledMma
    tCrB: cute.Tensor  # (MMA, MMA_N, MMA_K, SLOT) descriptors

    @cute.jit
    def issue(
        self, acc: cute.Tensor, tCrA: cute.Tensor, slot: Int32, accumulate: cutlass.Boolean
    ) -> None:
        """Start acc = A @ B[slot]^T, plus acc if `accumulate`, as one group; A is (MMA, MMA_M,
        MMA_K), registers or descriptors."""
        warpgroup.fence()
        self.steps(acc, tCrA, slot, accumulate)
        warpgroup.commit_group()

    @cute.jit
    def steps(
        self,
        acc: cute.Tensor,
        tCrA: cute.Tensor,
        slot: Int32,
        accumulate: cutlass.Boolean,
        first: cutlass.Constexpr[int] = 0,
    ) -> None:
        """Issue the wgmma of A's blocks of K, from block `first` on."""
        # NOTE: setting a field changes the object, which must not outlive the loop it is set in
        tiled_mma = cute.make_tiled_mma(self.tiled_mma.op, self.tiled_mma.thr_layout_vmnk.shape[1:])
        for k_block in cutlass.range_constexpr(first, cute.size(tCrA, mode=[2])):
            tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate if k_block == 0 else True)
            tCrB = self.tCrB[None, None, k_block, slot]
            cute.gemm(tiled_mma, acc, tCrA[None, None, k_block], tCrB, acc)

    @cute.jit
    def accumulator(self, columns: cutlass.Constexpr[int]) -> cute.Tensor:
        """fp32 registers for 64 rows per warpgroup: (MMA, 1, 1)."""
        rows = cute.size(self.tiled_mma) // WARPGROUP * ROWS
        shape = self.tiled_mma.partition_shape_C((rows, columns))
        return self.tiled_mma.make_fragment_C(shape)


class MixedProduct(NamedTuple):
    """A Product whose A is in registers up to some block of K, and in smem from there on."""

    rs: Product
    ss: Product

    @cute.jit
    def issue(
        self,
        acc: cute.Tensor,
        tCrA: tuple[cute.Tensor, cute.Tensor],
        slot: Int32,
        accumulate: cutlass.Boolean,
    ) -> None:
        """Start the product as Product.issue does, with A given as (registers, smem
        descriptors)."""
        registers, smem = tCrA
        warpgroup.fence()
        self.rs.steps(acc, registers, slot, accumulate)
        self.ss.steps(acc, smem, slot, True, cute.size(registers, mode=[2]))
        warpgroup.commit_group()

    def accumulator(self, columns: int) -> cute.Tensor:
        return self.ss.accumulator(columns)


@cute.jit
def product(tiled_mma: cute.TiledMma, sB: cute.Tensor) -> Product:
    """This warpgroup's part in the product with sB (bN, bK, SLOT)."""
    thr_mma = tiled_mma.get_slice(first_thread(tiled_mma))
    return Product(tiled_mma, tiled_mma.make_fragment_B(thr_mma.partition_B(sB)))


@cute.jit
def first_thread(tiled_mma: cute.TiledMma) -> Int32:
    """The first thread of this warpgroup, warp-uniform, so that descriptors are in uniform
    registers."""
    thread, _, _ = cute.arch.thread_idx()
    return cute.arch.make_warp_uniform(thread % cute.size(tiled_mma) // WARPGROUP) * WARPGROUP


@cute.jit
def a_from_smem(tiled_mma: cute.TiledMma, sA: cute.Tensor) -> cute.Tensor:
    """The descriptors (MMA, MMA_M, MMA_K, SLOT) of this warpgroup's rows of sA (bM, bK, SLOT)."""
    thr_mma = tiled_mma.get_slice(first_thread(tiled_mma))
    return tiled_mma.make_fragment_A(thr_mma.partition_A(sA))


@cute.jit
def a_registers(columns: cutlass.Constexpr[int], dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Registers for an operand A of 64 rows: ((2, 2, 2), 1, MMA_K)."""
    return cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, columns // K)), dtype)


@cute.jit
def round_to(tCrA: cute.Tensor, acc: cute.Tensor) -> None:
    """Round an accumulator, ((2, 2, N / 8), 1, 1), into an operand A, ((2, 2, 2), 1, N / 16)."""
    # NOTE: 16 columns at a time: vectors of other lengths than powers of two are packed one by one
    layout = cute.make_layout((8, cute.size(acc) // 8))
    wide = cute.make_tensor(acc.iterator, layout)
    narrow = cute.make_tensor(tCrA.iterator, layout)
    for k_block in cutlass.range_constexpr(cute.size(acc) // 8):
        narrow[None, k_block].store(wide[None, k_block].load().to(tCrA.element_type))
