"""The shared memory layouts that both tensor core instructions read.

wgmma (Hopper, wgmma.py): four warps compute 64 rows, accumulators in registers.
tcgen05.mma (Blackwell, umma.py): one thread starts 128 rows, accumulators in tensor memory; or 256,
of which two CTAs hold half each.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, TFloat32, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.memory import SmemAllocator

INST_BYTES = 32  # bytes of K in one instruction: 16 elements of 16 bits
CORE_ROWS, CORE_BYTES = 8, 16  # a core matrix: 8 rows of 16 bytes, the unit of all layouts
TF32_ROWS = (2, 5, 2)  # the swizzle of fp32 operands that are contiguous along their rows, not K
MAJORS = {True: OperandMajorMode.K, False: OperandMajorMode.MN}  # by whether K is contiguous
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

    An atom is 8 steps of K by 16, 32, 64 or 128 bytes of rows, the largest that divides bRows
    evenly; of 16 bytes without a swizzle.
    fp32 takes 128 bytes and the swizzle that permutes units of 32 bytes (PTX ISA, "Shared Memory
    Layout and Swizzling").
    """
    width = contiguous_rows(rows, dtype.width)
    bits = {16: 0, 32: 1, 64: 2, 128: 3}[width * dtype.width // 8]
    swizzle = TF32_ROWS if dtype.width == 32 else (bits, 4, 3)
    atom = cute.make_composed_layout(
        cute.make_swizzle(*swizzle), 0, cute.make_layout((width, CORE_ROWS), stride=(1, width))
    )
    return cute.tile_to_shape(atom, (rows, k, num_slots), order=(1, 0, 2))


def contiguous_rows(rows: int, bits: int) -> int:
    """The contiguous rows of an atom of `contiguous_rows_layout`, whose elements have `bits`."""
    units = (128,) if bits == 32 else (128, 64, 32, 16)
    unit = next((u for u in units if rows * bits % (8 * u) == 0), None)
    if unit is None:
        raise ValueError(f"{rows} rows of {bits} bits are no multiple of {units[-1]} bytes")
    return unit * 8 // bits


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


def as_tf32(sX: cute.Tensor) -> cute.Tensor:
    """The fp32 slots `sX` (bRows, bK, SLOT), swizzled by 128 bytes, recast to tf32 for the MMA."""
    first = sX.stride[0]
    while isinstance(first, tuple):
        first = first[0]
    swizzle = cute.make_swizzle(*(TF32_ROWS if first == 1 else (3, 4, 3)))
    return cute.make_tensor(cute.recast_ptr(sX.iterator, swizzle, TFloat32), sX.layout)


def k_block_of(fragments: cute.Tensor, k_block: int, slot: Int32 | int) -> cute.Tensor:
    """One block of K of an MMA's operand, (MMA, MMA_MN, MMA_K) or, in slots, (MMA, MMA_MN, MMA_K,
    SLOT)."""
    if cute.rank(fragments) == 3:
        return fragments[None, None, k_block]
    return fragments[None, None, k_block, slot]
