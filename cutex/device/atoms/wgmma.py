"""wgmma (Hopper): the product of a warpgroup's 64 rows of A with B, accumulated in registers.

    mma = Wgmma(columns=128, a_dtype=BFloat16)
    product = WgmmaProduct(mma, mma.a_slots(sA), mma.b_slots(sB), mma.accumulator())
    product.issue(slot, accumulate=False)

Operand A is in slots of smem, in registers, or in both: the first of K in registers, the rest in
smem. B is in slots of smem. 16-bit elements may be contiguous along either mode in smem, others
along K only. Another kind of element is one more case of `Wgmma.op`; wgmma takes no scale factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import cutlass
from cutlass import Float32, Int32, TFloat32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from cutex.device.atoms.mma import INST_BYTES, as_tf32, k_block_of
from cutex.device.atoms.scalar import pinned

WARPGROUP = 128  # threads that execute one wgmma together
ROWS = 64  # rows of A in one wgmma

# Fragments (MMA, MMA_M, MMA_K): registers or smem descriptors, the latter with a mode SLOT behind
# where the slot is that of `issue`; or registers for the first of K, and descriptors for all of it
OperandA: TypeAlias = cute.Tensor | tuple[cute.Tensor, cute.Tensor]


class MmaTF32Op(warpgroup.MmaF8Op):
    """The wgmma of fp32 read as tf32 (PTX ISA, wgmma.mma_async .tf32), which the DSL lacks.

    The tensor core leaves out the 13 low bits of each element.
    """

    descriptive_name = "warpgroup TF32 MMA Operation"

    def _verify(self) -> None:
        object.__setattr__(self, "shape_mnk", (*self.shape_mnk[:2], 8))


@dataclass(frozen=True)
class Wgmma:
    """A kind of wgmma: `warpgroups` warpgroups along M, each 64 rows of A by `columns` rows of B,
    32 bytes of K an instruction."""

    columns: int
    a_dtype: type[cutlass.Numeric]
    b_dtype: type[cutlass.Numeric] | None = None  # None: A's; else another 8-bit type
    a_major: OperandMajorMode = OperandMajorMode.K  # of A in smem
    b_major: OperandMajorMode = OperandMajorMode.K
    warpgroups: int = 1

    # NOTE: the two methods that let the DSL carry a Wgmma, all of which is known when tracing
    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> Wgmma:
        return self

    @property
    def k(self) -> int:
        """The elements of K in one instruction."""
        return 8 * INST_BYTES // self.a_dtype.width

    def op(self, source: warpgroup.OperandSource) -> warpgroup.MmaOp:
        """The instruction, with A from `source`."""
        shape = (ROWS, self.columns, self.k)
        # NOTE: registers hold A by K (PTX ISA, "Register Fragments for wgmma.mma_async")
        in_smem = source is warpgroup.OperandSource.SMEM
        majors = self.a_major if in_smem else OperandMajorMode.K, self.b_major
        how = shape, source, *majors
        if self.a_dtype.width == 16:
            return warpgroup.MmaF16BF16Op(self.a_dtype, Float32, *how)
        if OperandMajorMode.MN in majors:
            raise ValueError(f"{self.a_dtype}: wgmma takes it with K contiguous only")
        if self.a_dtype.width == 8:
            return warpgroup.MmaF8Op(self.a_dtype, self.b_dtype or self.a_dtype, Float32, *how)
        return MmaTF32Op(TFloat32, TFloat32, Float32, *how)

    def tiled(
        self, source: warpgroup.OperandSource = warpgroup.OperandSource.SMEM
    ) -> cute.TiledMma:
        """The tiled MMA of all warpgroups, with A from `source`."""
        return cute.make_tiled_mma(self.op(source), (self.warpgroups, 1, 1))

    @cute.jit
    def slice(self) -> cute.ThrMma:
        """The part of this thread's warpgroup.

        The threads that run the MMA are consecutive, from a multiple of their number on.
        """
        thread, _, _ = cute.arch.thread_idx()
        # NOTE: uniform in the warpgroup, so that descriptors are computed in uniform registers
        wg = cute.arch.make_warp_uniform(thread % (self.warpgroups * WARPGROUP) // WARPGROUP)
        return self.tiled().get_slice(wg * WARPGROUP)

    @cute.jit
    def a_slots(self, sA: cute.Tensor) -> cute.Tensor:
        """The descriptors of this warpgroup's rows of sA (bM, bK, SLOT)."""
        if cutlass.const_expr(sA.element_type is Float32):
            sA = as_tf32(sA)
        tCsA = self.slice().partition_A(sA)  # (MMA, MMA_M, MMA_K, SLOT)
        return self.tiled().make_fragment_A(tCsA)  # (MMA, MMA_M, MMA_K, SLOT)

    @cute.jit
    def b_slots(self, sB: cute.Tensor) -> cute.Tensor:
        """The descriptors of sB (bN, bK, SLOT)."""
        if cutlass.const_expr(sB.element_type is Float32):
            sB = as_tf32(sB)
        tCsB = self.slice().partition_B(sB)  # (MMA, MMA_N, MMA_K, SLOT)
        return self.tiled().make_fragment_B(tCsB)  # (MMA, MMA_N, MMA_K, SLOT)

    def a_registers(self, k: int) -> cute.Tensor:
        """Registers for 64 rows of A and `k` elements of K: ((32 bits, 2, 2), 1, MMA_K). Those of
        fp32 are tf32, to be written through `cute.recast_tensor`."""
        layout = cute.make_layout(((32 // self.a_dtype.width, 2, 2), 1, k // self.k))
        registers = cute.make_rmem_tensor(layout, self.a_dtype)
        return registers if self.a_dtype.width < 32 else cute.recast_tensor(registers, TFloat32)

    def accumulator(self, rows: int | None = None, columns: int | None = None) -> cute.Tensor:
        """fp32 registers (MMA, MMA_M, MMA_N) for `rows` rows of all warpgroups, by default 64 for
        each, and `columns`, by default one instruction's."""
        tiled_mma = self.tiled()
        shape = (rows or ROWS * self.warpgroups, columns or self.columns)
        return tiled_mma.make_fragment_C(tiled_mma.partition_shape_C(shape))


class WgmmaProduct(NamedTuple):
    """acc = A @ B^T over all of K, or acc += A @ B^T: this warpgroup's part of it."""

    mma: Wgmma
    a: Any  # an OperandA; None: given later, by `of`
    b: cute.Tensor  # (MMA, MMA_N, MMA_K, SLOT) descriptors
    acc: Any  # (MMA, MMA_M, MMA_N) fp32 registers; None: given later, by `into`

    def of(self, a: OperandA) -> WgmmaProduct:
        """The product of another A."""
        return self._replace(a=a)

    def of_rows(self, block: int) -> WgmmaProduct:
        """The product of each warpgroup's `block`-th 64 rows of an A in slots."""
        one = (None, (None, block), None, None)  # (MMA, (1, MMA_M), MMA_K, SLOT)
        return self.of(cute.logical_divide(self.a, (None, 1, None, None))[one])

    def into(self, acc: cute.Tensor) -> WgmmaProduct:
        """The product into another accumulator."""
        return self._replace(acc=acc)

    def issue(self, slot: Int32 | int, accumulate: cutlass.Boolean | bool) -> None:
        """Start acc = A @ B[slot]^T, plus acc if `accumulate`, as one group of wgmma."""
        warpgroup.fence()
        for k_blocks, tiled_mma, tCrA in self.sources():
            for k_block in k_blocks:
                tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate if k_block == 0 else True)
                operands = self.k_block(tCrA, k_block, slot)
                cute.gemm(tiled_mma, self.acc, *operands, self.acc)
        warpgroup.commit_group()

    def k_block(
        self, tCrA: cute.Tensor, k_block: int, slot: Int32 | int
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """One block of K of A and of B.

        NOTE: B first where A has no slot: ptxas orders the descriptors' additions as they are
        traced, and the kernels of both orders are measured.
        """
        if cute.rank(tCrA) == 4:
            return k_block_of(tCrA, k_block, slot), k_block_of(self.b, k_block, slot)
        b = k_block_of(self.b, k_block, slot)
        return k_block_of(tCrA, k_block, slot), b

    def sources(self) -> Iterator[tuple[range, cute.TiledMma, cute.Tensor]]:
        """The blocks of K in each source of A, with the MMA that reads it."""
        first = 0
        for tCrA in self.a if isinstance(self.a, tuple) else (self.a,):
            k_blocks = range(first, cute.size(tCrA, mode=[2]))
            # NOTE: setting a field changes the object, which must not outlive the loop it is set in
            yield k_blocks, self.mma.tiled(source_of(tCrA)), tCrA
            first = k_blocks.stop


def source_of(tCrA: cute.Tensor) -> warpgroup.OperandSource:
    """Whether fragments of A are registers or smem descriptors."""
    in_registers = isinstance(tCrA.iterator, cute.Pointer)
    return warpgroup.OperandSource.RMEM if in_registers else warpgroup.OperandSource.SMEM


@cute.jit
def wgmma(mma: Wgmma, sA: cute.Tensor, sB: cute.Tensor) -> WgmmaProduct:
    """The product of sA (bM, bK, SLOT) and sB (bN, bK, SLOT), in the same slot each, into registers
    of its own."""
    acc = mma.accumulator(cute.size(sA, mode=[0]), cute.size(sB, mode=[0]))
    return WgmmaProduct(mma, mma.a_slots(sA), mma.b_slots(sB), acc)


@cute.jit
def round_to(tCrA: cute.Tensor, acc: cute.Tensor) -> None:
    """Round an accumulator, ((2, 2, N / 8), 1, 1), into an operand A of 16 bits, ((2, 2, 2), 1,
    N / 16).

    A thread holds 16 columns of an accumulator in the same places as 16 columns of operand A (PTX
    ISA, "Register Fragments for wgmma.mma_async").
    """
    # NOTE: 16 columns at a time: vectors of other lengths than powers of two are packed one by one
    layout = cute.make_layout((8, cute.size(acc) // 8))
    wide = cute.make_tensor(acc.iterator, layout)
    narrow = cute.make_tensor(tCrA.iterator, layout)
    for k_block in cutlass.range_constexpr(cute.size(acc) // 8):
        narrow[None, k_block].store(wide[None, k_block].load().to(tCrA.element_type))


@cute.jit
def write_fragment(rX: cute.Tensor, mma: Wgmma, sX: cute.Tensor) -> None:
    """Write a warpgroup's accumulator, rounded, to sX (64, columns)."""
    thread, _, _ = cute.arch.thread_idx()
    to_smem = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), sX.element_type)
    r2s = cute.make_tiled_copy_C(to_smem, mma.tiled())
    tRS_sX = r2s.get_slice(thread % WARPGROUP).partition_D(sX)  # (R2S, R2S_M, R2S_N)
    layout = cute.make_rmem_tensor(tRS_sX.shape, sX.element_type).layout
    cute.copy(r2s, cute.make_tensor(rX.iterator, layout), tRS_sX)


@cute.jit
def pin(tCrA: cute.Tensor) -> None:
    """Have an operand A in registers computed where this is written."""
    words = cute.recast_tensor(tCrA, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = pinned(words[i])
