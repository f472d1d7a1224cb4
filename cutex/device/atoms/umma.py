"""tcgen05.mma (Blackwell): the product of 128 rows of A with B, accumulated in tensor memory.

    mma = Umma(rows=128, columns=256, a_dtype=BFloat16)
    product = UmmaProduct(mma, mma.a_slots(sA), mma.b_slots(sB), mma.accumulator(tmem))
    product.issue(slot, accumulate=False)

One thread starts it for a CTA, or for a pair of CTAs, each of which holds half the rows of A, of B
and of the accumulator. Operand A is in slots of smem or, with K contiguous, in tensor memory; B is
in slots of smem. Elements of 16 and 8 bits and tf32 may be contiguous along either mode in smem.
A block-scaled kind is one more case of `Umma.op`; its scale factors, in tensor memory
(scale_factors.py), are one more field of the UmmaProduct, which `issue` sets for each block of K.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, TFloat32, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from cutex.device.atoms.mma import INST_BYTES, as_tf32, k_block_of
from cutex.device.atoms.scale_factors import BlockFactors

PAIR_MASK = 0b11  # the multicast mask of the two CTAs of a pair, from the leader's rank on


@dataclass(frozen=True)
class BlockScaling:
    """A factor of type `dtype` for each `vector` elements of K, of each row of A and of B."""

    dtype: type[cutlass.Numeric]
    vector: int


@dataclass(frozen=True)
class Umma:
    """A kind of tcgen05.mma: `rows` rows of A, of both CTAs of a pair, by `columns` rows of B, 32
    bytes of K an instruction."""

    rows: int
    columns: int
    a_dtype: type[cutlass.Numeric]
    b_dtype: type[cutlass.Numeric] | None = None  # None: A's; else another 8-bit type
    a_major: OperandMajorMode = OperandMajorMode.K  # of A in smem
    b_major: OperandMajorMode = OperandMajorMode.K
    pair: bool = False
    scaling: BlockScaling | None = None

    @property
    def ctas(self) -> int:
        return 2 if self.pair else 1

    # NOTE: the two methods that let the DSL carry a Umma, all of which is known when tracing
    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> Umma:
        return self

    @property
    def k(self) -> int:
        """The elements of K in one instruction."""
        return 8 * INST_BYTES // self.width

    @property
    def width(self) -> int:
        """The bits of an element in smem: 4 only where both operands have 4, else 8 or more."""
        if self.b_dtype is None:
            return self.a_dtype.width
        return max(self.a_dtype.width, self.b_dtype.width)

    @property
    def factors_per_inst(self) -> int:
        """The scale factors of a row that one instruction takes."""
        assert self.scaling is not None
        return self.k // self.scaling.vector

    def op(self, source: tcgen05.OperandSource) -> tcgen05.MmaOp:
        """The instruction, with A from `source`."""
        shape = (self.rows, self.columns, self.k)
        group = tcgen05.CtaGroup.TWO if self.pair else tcgen05.CtaGroup.ONE
        # NOTE: tensor memory holds A by K
        in_smem = source is tcgen05.OperandSource.SMEM
        how = shape, group, source, self.a_major if in_smem else OperandMajorMode.K, self.b_major
        if self.scaling is not None:
            return self._scaled_op(self.scaling, how)
        if self.a_dtype.width == 8:
            return tcgen05.MmaF8F6F4Op(self.a_dtype, self.b_dtype or self.a_dtype, Float32, *how)
        if self.a_dtype.width == 32:
            return tcgen05.MmaTF32Op(*how)
        return tcgen05.MmaF16BF16Op(self.a_dtype, Float32, *how)

    def _scaled_op(self, scaling: BlockScaling, how: tuple[Any, ...]) -> tcgen05.MmaOp:
        shape, group, source = how[:3]
        if self.width == 8:
            return tcgen05.MmaMXF8F6F4Op(self.a_dtype, self.b_dtype or self.a_dtype, *how)
        if scaling.vector == 32:
            return tcgen05.MmaMXF4Op(shape, group, source)
        return tcgen05.MmaMXF4NVF4Op(scaling.dtype, shape, group, source)

    def tiled(self, source: tcgen05.OperandSource = tcgen05.OperandSource.SMEM) -> cute.TiledMma:
        """The tiled MMA, with A from `source`."""
        return cute.make_tiled_mma(self.op(source))

    @cute.jit
    def a_slots(self, sA: cute.Tensor) -> cute.Tensor:
        """The descriptors of this CTA's sA (bM, bK, SLOT), which may hold several blocks of the
        rows that one instruction takes."""
        if cutlass.const_expr(sA.element_type is Float32):
            sA = as_tf32(sA)
        tiles = instruction_tiles(sA, self.rows // self.ctas)
        return self.tiled().make_fragment_A(tiles)  # (MMA, MMA_M, MMA_K, SLOT)

    @cute.jit
    def b_slots(self, sB: cute.Tensor) -> cute.Tensor:
        """The descriptors of this CTA's sB (bN, bK, SLOT)."""
        if cutlass.const_expr(sB.element_type is Float32):
            sB = as_tf32(sB)
        tiles = instruction_tiles(sB, self.columns // self.ctas)
        return self.tiled().make_fragment_B(tiles)  # (MMA, MMA_N, MMA_K, SLOT)

    @cute.jit
    def a_tmem(
        self, tmem: cute.Pointer, column: Int32 | int, k: cutlass.Constexpr[int]
    ) -> cute.Tensor:
        """A in tensor memory, `k` elements of K from `column` on."""
        tiled_mma = self.tiled(tcgen05.OperandSource.TMEM)
        shape = tiled_mma.partition_shape_A((self.rows, k))
        layout = tiled_mma.make_fragment_A(shape).layout
        dtype = TFloat32 if self.a_dtype.width == 32 else self.a_dtype
        pointer = cute.recast_ptr(tmem + column, dtype=dtype)
        return cute.make_tensor(pointer, layout)  # (MMA, MMA_M, MMA_K)

    @cute.jit
    def accumulator(self, tmem: cute.Pointer, slots: cutlass.Constexpr[int] = 0) -> cute.Tensor:
        """The fp32 accumulator at `tmem`; with `slots` > 0, so many side by side, in a mode of
        their own."""
        tiled_mma = self.tiled()
        shape = tiled_mma.partition_shape_C((self.rows, self.columns))
        if cutlass.const_expr(slots > 0):
            shape = cute.append(shape, slots)
        layout = tiled_mma.make_fragment_C(shape).layout
        return cute.make_tensor(tmem, layout)  # (MMA, MMA_M, MMA_N), or with a mode ACC


class UmmaProduct(NamedTuple):
    """acc = A @ B^T over all of K, or acc += A @ B^T, as the MMA warp starts it."""

    mma: Umma
    a: Any  # (MMA, MMA_M, MMA_K), then SLOT if in slots; None: given by `of`
    b: cute.Tensor  # (MMA, MMA_N, MMA_K, SLOT) descriptors
    acc: cute.Tensor  # (MMA, MMA_M, MMA_N) fp32 in tensor memory, here maybe with a mode ACC
    factors: BlockFactors | None = None  # of a block-scaled kind

    def of(self, a: cute.Tensor) -> UmmaProduct:
        """The product of another A."""
        return self._replace(a=a)

    def of_rows(self, block: int) -> UmmaProduct:
        """The product of row block `block` of A, of those in a slot."""
        one = (None, (None, block), None, None)  # (MMA, (1, MMA_M), MMA_K, SLOT)
        return self.of(cute.logical_divide(self.a, (None, 1, None, None))[one])

    def into(self, slot: Int32) -> UmmaProduct:
        """The product into accumulator `slot` of several."""
        return self._replace(acc=self.acc[None, None, None, slot])

    def at(self, column: Int32) -> UmmaProduct:
        """The product into the accumulator `column` columns further on."""
        return self._replace(acc=cute.make_tensor(self.acc.iterator + column, self.acc.layout))

    def issue(
        self,
        slot: Int32 | int,
        accumulate: cutlass.Boolean | bool,
        k_blocks: Iterable[int] | None = None,
    ) -> None:
        """Start acc = A @ B[slot]^T, plus acc if `accumulate`, over `k_blocks` or all of K; block 0
        overwrites, the others add. A whole warp calls it."""
        # NOTE: setting a field changes the object, which must not outlive the loop it is set in
        tiled_mma = self.mma.tiled(source_of(self.a))
        for k_block in range(cute.size(self.a, mode=[2])) if k_blocks is None else k_blocks:
            tiled_mma.set(tcgen05.Field.ACCUMULATE, accumulate if k_block == 0 else True)
            a, b = (k_block_of(x, k_block, slot) for x in (self.a, self.b))
            if self.factors is not None:
                assert self.mma.scaling is not None
                at = self.mma.scaling.dtype, k_block * self.mma.factors_per_inst
                tiled_mma.set(tcgen05.Field.SFA, self.factors.a.of_inst(*at))
                tiled_mma.set(tcgen05.Field.SFB, self.factors.b.of_inst(*at))
            cute.gemm(tiled_mma, self.acc, a, b, self.acc)

    @cute.jit
    def issue_first(
        self, slot: Int32 | int, accumulate: cutlass.Boolean | bool, count: Int32
    ) -> None:
        """As `issue`, over the first `count` blocks of K alone."""
        for k_block in cutlass.range_constexpr(cute.size(self.a, mode=[2])):
            if k_block < count:
                self.issue(slot, accumulate, (k_block,))

    def commit(self, barrier: cute.Pointer) -> None:
        """Arrive once on `barrier`, for a pair in both CTAs, when every MMA started so far is
        complete. A whole warp calls it."""
        commit(barrier, self.mma.pair)


def source_of(tCrA: cute.Tensor) -> tcgen05.OperandSource:
    """Whether fragments of A are in tensor memory or smem descriptors."""
    in_tmem = isinstance(tCrA.iterator, cute.Pointer)
    return tcgen05.OperandSource.TMEM if in_tmem else tcgen05.OperandSource.SMEM


@cute.jit
def umma(
    mma: Umma,
    sA: cute.Tensor,
    sB: cute.Tensor,
    tmem: cute.Pointer,
    num_acc: cutlass.Constexpr[int] = 0,
) -> UmmaProduct:
    """The product of the same slot each of this CTA's sA (bM, bK, SLOT) and sB (bN, bK, SLOT), into
    the accumulator at `tmem` or, with `num_acc` > 0, several."""
    return UmmaProduct(mma, mma.a_slots(sA), mma.b_slots(sB), mma.accumulator(tmem, num_acc))


@cute.jit
def commit(barrier: cute.Pointer, pair: cutlass.Constexpr[bool]) -> None:
    """Arrive once on `barrier` (with `pair`, on that of both CTAs) when every MMA started so far is
    complete. A whole warp calls it."""
    with cute.arch.elect_one():
        if cutlass.const_expr(pair):
            mask = Int32(PAIR_MASK) << (cute.arch.block_idx_in_cluster() // 2 * 2)
            tcgen05.commit(barrier, mask, tcgen05.CtaGroup.TWO)
        else:
            tcgen05.commit(barrier)


@cute.jit
def instruction_tiles(sX: cute.Tensor, rows: cutlass.Constexpr[int]) -> cute.Tensor:
    """sX (bRows, bK, SLOT) as (MMA, MMA_ROWS, MMA_K, SLOT): one instruction takes `rows` rows and
    32 bytes of K."""
    k = 8 * INST_BYTES // sX.element_type.width
    return cute.group_modes(cute.flat_divide(sX, (rows, k)), 0, 2)
