"""The tensor core instructions, with the shared memory layouts that they read.

wgmma (Hopper): four warps compute 64 rows, accumulators in registers.
tcgen05.mma (Blackwell): one thread starts 128 rows, accumulators in tensor memory; or 256, of which
two CTAs hold half each.
Both read A and B from shared memory through the same layouts.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, TFloat32, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05, warpgroup
from cutlass.memory import SmemAllocator

WARPGROUP = 128  # threads that execute one wgmma together
INST_BYTES = 32  # bytes of K in one instruction: 16 elements of 16 bits
CORE_ROWS, CORE_BYTES = 8, 16  # a core matrix: 8 rows of 16 bytes, the unit of all layouts
TF32_ROWS = (2, 5, 2)  # the swizzle of fp32 operands that are contiguous along their rows, not K
PAIR_MASK = 0b11  # the multicast mask of the two CTAs of a pair, from the leader's rank on
SMEM_ALIGN = 1024  # bytes: 8 rows of 128 bytes, the period of the widest swizzle


def slots_layout(
    dtype: type[cutlass.Numeric], rows: int, k: int, num_slots: int, swizzle: int
) -> cute.ComposedLayout:
    """The layout (bRows, bK, SLOT) of K-major tiles, in atoms of 8 rows of `swizzle` bytes: 16 (no
    swizzle), 32, 64 or 128.

    Within an atom, the 16-byte units of row r are permuted by XOR with r, so that the 8 rows of a
    core matrix fall into different banks (PTX ISA, "Shared Memory Matrix Layout").
    """
    bits = {16: 0, 32: 1, 64: 2, 128: 3}[swizzle]
    width = swizzle * 8 // dtype.width  # elements in a row of the atom
    atom = cute.make_composed_layout(
        cute.make_swizzle(bits, 4, 3), 0, cute.make_layout((CORE_ROWS, width), stride=(width, 1))
    )
    return cute.tile_to_shape(atom, (rows, k, num_slots), order=(0, 1, 2))


def rows_layout(
    dtype: type[cutlass.Numeric], rows: int, columns: int, num_slots: int
) -> cute.ComposedLayout:
    """The layout (bRows, bCols, SLOT) of tiles stored row by row: swizzled where the bytes of a row
    are a power of two; unswizzled otherwise, where the row stride, an odd multiple of 16 bytes,
    already spreads the rows over different banks."""
    row_bytes = columns * dtype.width // 8
    if row_bytes // CORE_BYTES % 2 == 0:
        return slots_layout(dtype, rows, columns, num_slots, swizzle=row_bytes)
    layout = cute.make_layout((rows, columns, num_slots), stride=(columns, 1, rows * columns))
    return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, layout)


def transposed_slots_layout(
    dtype: type[cutlass.Numeric], rows: int, columns: int, num_slots: int
) -> cute.ComposedLayout:
    """The layout (bRows, bCols, SLOT) of tiles contiguous along their rows, 128-byte swizzle."""
    width = 128 * 8 // dtype.width
    atom = cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3), 0, cute.make_layout((width, CORE_ROWS), stride=(1, width))
    )
    return cute.tile_to_shape(atom, (rows, columns, num_slots), order=(0, 1, 2))


def contiguous_rows_layout(
    dtype: type[cutlass.Numeric], rows: int, k: int, num_slots: int
) -> cute.ComposedLayout:
    """The layout (bRows, bK, SLOT) of operands whose rows mode is contiguous (MN-major), which
    wgmma reads for 16-bit elements, and tcgen05.mma for all.

    An atom is 8 steps of K by 32, 64 or 128 bytes of rows, the largest that divides bRows evenly.
    fp32 takes 128 bytes and the swizzle that permutes units of 32 bytes (PTX ISA, "Shared Memory
    Layout and Swizzling").
    """
    fp32 = dtype.width == 32
    units = (128,) if fp32 else (128, 64, 32)
    unit = next((u for u in units if rows * dtype.width % (8 * u) == 0), None)
    if unit is None:
        raise ValueError(f"{rows} rows of {dtype.width} bits are no multiple of {units[-1]} bytes")
    width, bits = unit * 8 // dtype.width, {32: 1, 64: 2, 128: 3}[unit]
    swizzle = TF32_ROWS if fp32 else (bits, 4, 3)
    atom = cute.make_composed_layout(
        cute.make_swizzle(*swizzle), 0, cute.make_layout((width, CORE_ROWS), stride=(1, width))
    )
    return cute.tile_to_shape(atom, (rows, k, num_slots), order=(1, 0, 2))


def contiguous_lanes_layout(columns: int, num_slots: int) -> cute.ComposedLayout:
    """The layout (128, bCols, SLOT) of tiles whose rows mode is contiguous, without a swizzle: the
    threads of a warp, one row each, write adjacent addresses."""
    layout = cute.make_layout((128, columns, num_slots), stride=(1, 128, 128 * columns))
    return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, layout)


def allocate_slots(
    smem: SmemAllocator, dtype: type[cutlass.Numeric], layout: cute.ComposedLayout
) -> cute.Tensor:
    """Allocate the slots of `layout` in smem: a tensor of the layout's shape, swizzled."""
    return smem.allocate_tensor(dtype, layout.outer, SMEM_ALIGN, swizzle=layout.inner)


class Wgmma(NamedTuple):
    """A CTA's wgmma: each warpgroup computes its own blocks of 64 rows, all columns."""

    tiled_mma: cute.TiledMma
    tCrA: cute.Tensor  # (MMA, MMA_M, MMA_K, SLOT) descriptors
    tCrB: cute.Tensor  # (MMA, MMA_N, MMA_K, SLOT) descriptors
    tCrAcc: cute.Tensor  # (MMA, MMA_M, MMA_N) fp32 registers
    sA: cute.Tensor  # (bM, bK, SLOT)

    @cute.jit
    def issue(self, slot: Int32, accumulate: cutlass.Boolean) -> None:
        """Start acc = A[slot] @ B[slot]^T, plus acc if `accumulate`, as one group."""
        tiled_mma = self.tiled_mma
        warpgroup.fence()
        for k_block in cutlass.range_constexpr(cute.size(self.tCrA, mode=[2])):
            tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate if k_block == 0 else True)
            tCrA, tCrB = self.tCrA[None, None, k_block, slot], self.tCrB[None, None, k_block, slot]
            cute.gemm(tiled_mma, self.tCrAcc, tCrA, tCrB, self.tCrAcc)
        warpgroup.commit_group()


class MmaTF32Op(warpgroup.MmaF8Op):
    """The wgmma of fp32 read as tf32 (PTX ISA, wgmma.mma_async .tf32), which the DSL lacks.

    The tensor core leaves out the 13 low bits of each element.
    """

    descriptive_name = "warpgroup TF32 MMA Operation"

    def _verify(self) -> None:
        object.__setattr__(self, "shape_mnk", (*self.shape_mnk[:2], 8))


def make_wgmma(
    warpgroups: int,
    tile_n: int,
    dtype: type[cutlass.Numeric],
    b_dtype: type[cutlass.Numeric] | None = None,
    a_major: OperandMajorMode = OperandMajorMode.K,
    b_major: OperandMajorMode = OperandMajorMode.K,
) -> cute.TiledMma:
    """The tiled wgmma of `warpgroups` warpgroups along M; one instruction computes 64 rows of
    `tile_n` columns for each."""
    shape = (64, tile_n, 8 * INST_BYTES // dtype.width)
    source = warpgroup.OperandSource.SMEM
    if dtype.width == 8:  # its B may be of another 8-bit type
        both = dtype, b_dtype or dtype
        op = warpgroup.MmaF8Op(*both, Float32, shape, source, a_major, b_major)
    elif dtype.width == 32:
        op = MmaTF32Op(TFloat32, TFloat32, Float32, shape, source, a_major, b_major)
    else:
        op = warpgroup.MmaF16BF16Op(dtype, Float32, shape, source, a_major, b_major)
    return cute.make_tiled_mma(op, (warpgroups, 1, 1))


def as_tf32(sX: cute.Tensor) -> cute.Tensor:
    """The fp32 slots `sX` (bRows, bK, SLOT), swizzled by 128 bytes, recast to tf32 for the MMA."""
    first = sX.stride[0]
    while isinstance(first, tuple):
        first = first[0]
    swizzle = cute.make_swizzle(*(TF32_ROWS if first == 1 else (3, 4, 3)))
    return cute.make_tensor(cute.recast_ptr(sX.iterator, swizzle, TFloat32), sX.layout)


@cute.jit
def wgmma(tiled_mma: cute.TiledMma, sA: cute.Tensor, sB: cute.Tensor) -> Wgmma:
    """The calling thread's part of the CTA's MMA on sA (bM, bK, SLOT) and sB (bN, bK, SLOT).

    The threads that run it are consecutive: `tiled_mma.size` of them, from a multiple of that on.
    """
    thread, _, _ = cute.arch.thread_idx()
    # NOTE: uniform in the warpgroup, so that descriptors are computed in uniform registers
    first = cute.arch.make_warp_uniform(thread % tiled_mma.size // WARPGROUP) * WARPGROUP
    thr_mma = tiled_mma.get_slice(first)
    if cutlass.const_expr(sA.element_type is Float32):
        sA, sB = as_tf32(sA), as_tf32(sB)
    tile_mn = (cute.size(sA, mode=[0]), cute.size(sB, mode=[0]))
    return Wgmma(
        tiled_mma,
        tiled_mma.make_fragment_A(thr_mma.partition_A(sA)),
        tiled_mma.make_fragment_B(thr_mma.partition_B(sB)),
        tiled_mma.make_fragment_C(tiled_mma.partition_shape_C(tile_mn)),
        sA,
    )


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


class Umma(NamedTuple):
    """The tcgen05.mma of a CTA, or of a pair of CTAs, whose leader issues it; the accumulator is in
    tensor memory."""

    tiled_mma: cute.TiledMma
    tCrA: cute.Tensor  # (MMA, MMA_M, MMA_K, SLOT) descriptors
    tCrB: cute.Tensor  # (MMA, MMA_N, MMA_K, SLOT) descriptors
    tCtAcc: cute.Tensor  # (MMA, MMA_M, MMA_N) fp32 in tensor memory, here maybe with a mode ACC

    def into(self, acc: Int32, block: int = 0) -> Umma:
        """The MMA of row block `block` of A into accumulator `acc`, of several side by side."""
        one = (None, (None, block), None, None)  # (MMA, (1, MMA_M), MMA_K, SLOT)
        return self._replace(
            tCrA=cute.logical_divide(self.tCrA, (None, 1, None, None))[one],
            tCtAcc=self.tCtAcc[None, None, None, acc],
        )

    @cute.jit
    def issue(self, slot: Int32, accumulate: cutlass.Boolean) -> None:
        """Start acc = A[slot] @ B[slot]^T, plus acc if `accumulate`. A whole warp calls it."""
        tiled_mma = self.tiled_mma
        for k_block in cutlass.range_constexpr(cute.size(self.tCrA, mode=[2])):
            tiled_mma.set(tcgen05.Field.ACCUMULATE, accumulate if k_block == 0 else True)
            tCrA, tCrB = self.tCrA[None, None, k_block, slot], self.tCrB[None, None, k_block, slot]
            cute.gemm(tiled_mma, self.tCtAcc, tCrA, tCrB, self.tCtAcc)

    @cute.jit
    def commit(self, barrier: cute.Pointer) -> None:
        """Arrive once on `barrier` when every MMA started so far is complete. A whole warp calls
        it.

        For a pair, the arrival is on that barrier in both CTAs.
        """
        commit(barrier, cute.size(self.tiled_mma.thr_id) == 2)


def make_umma(
    tile_m: int,
    tile_n: int,
    dtype: type[cutlass.Numeric],
    b_dtype: type[cutlass.Numeric] | None = None,
    majors: tuple[OperandMajorMode, OperandMajorMode] = (OperandMajorMode.K, OperandMajorMode.K),
    pair: bool = False,
) -> cute.TiledMma:
    """The tiled tcgen05.mma of `tile_m` x `tile_n` for 16-bit elements, 8-bit ones (B may have
    another 8-bit type), or fp32 as tf32."""
    shape = (tile_m, tile_n, 8 * INST_BYTES // dtype.width)
    group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE
    how = shape, group, tcgen05.OperandSource.SMEM, *majors
    if dtype.width == 8:
        return cute.make_tiled_mma(tcgen05.MmaF8F6F4Op(dtype, b_dtype or dtype, Float32, *how))
    if dtype.width == 32:
        return cute.make_tiled_mma(tcgen05.MmaTF32Op(*how))
    return cute.make_tiled_mma(tcgen05.MmaF16BF16Op(dtype, Float32, *how))


@cute.jit
def umma(
    tiled_mma: cute.TiledMma,
    sA: cute.Tensor,
    sB: cute.Tensor,
    tmem: cute.Pointer,
    num_acc: cutlass.Constexpr[int] = 0,
) -> Umma:
    """The MMA on this CTA's sA (bM, bK, SLOT) and sB (bN, bK, SLOT), with the accumulator at
    `tmem`.

    Each CTA of a pair holds half the rows of A, of B and of the accumulator. sA may hold several
    blocks of the rows that one instruction takes. With `num_acc` > 0, so many accumulators are side
    by side, in a mode of their own.
    """
    ctas = cute.size(tiled_mma.thr_id)
    m, n, _ = tiled_mma.shape_mnk
    if cutlass.const_expr(sA.element_type is Float32):
        sA, sB = as_tf32(sA), as_tf32(sB)
    shape = tiled_mma.partition_shape_C((m, n))
    if cutlass.const_expr(num_acc > 0):
        shape = cute.append(shape, num_acc)
    acc = tiled_mma.make_fragment_C(shape)
    return Umma(
        tiled_mma,
        tiled_mma.make_fragment_A(instruction_tiles(sA, m // ctas)),
        tiled_mma.make_fragment_B(instruction_tiles(sB, n // ctas)),
        cute.make_tensor(tmem, acc.layout),
    )


@cute.jit
def instruction_tiles(sX: cute.Tensor, rows: cutlass.Constexpr[int]) -> cute.Tensor:
    """sX (bRows, bK, SLOT) as (MMA, MMA_ROWS, MMA_K, SLOT): one instruction takes `rows` rows and
    32 bytes of K."""
    k = 8 * INST_BYTES // sX.element_type.width
    return cute.group_modes(cute.flat_divide(sX, (rows, k)), 0, 2)
