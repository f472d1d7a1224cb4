"""Operands of mma.sync in shared memory: their layout, and the copies that fill it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.async_copy import copy_async
from cutex.kernels.gemm.sm80.config import LINE

CHUNK = 8  # 16-bit elements of a copy of 16 bytes


@dataclass(frozen=True)
class SmemLayout:
    """The layout (bRows, bK, SLOT) of the tiles of A or B, in lines of what is contiguous.

    K-major: a line is a row's tile_k. Otherwise it is 64 rows of one k. The chunks of a line are
    permuted by XOR with the line's number, so that 8 lines that ldmatrix reads at one place, of
    128 bytes or of 64, are in different banks.
    """

    rows: int
    tile_k: int
    num_slots: int
    k_major: bool = True
    swizzled: bool = True

    @property
    def plain(self) -> cute.Layout:
        rows, k, slots = self.rows, self.tile_k, self.num_slots
        if self.k_major:
            return cute.make_layout((rows, k, slots), stride=(k, 1, rows * k))
        lines = (1, LINE * k)  # of 64 rows, then of the next 64
        return cute.make_layout(((LINE, rows // LINE), k, slots), stride=(lines, LINE, rows * k))

    def swizzle(self, unit: int) -> cute.Swizzle:
        """The swizzle of offsets, of which 16 bytes have 2^unit: 3 of elements, 4 of bytes."""
        bits = 3 if self.line == LINE else 2
        return cute.make_swizzle(bits if self.swizzled else 0, unit, 3)

    @property
    def line(self) -> int:
        """The elements of a line."""
        return self.tile_k if self.k_major else LINE


class SmemOperand(NamedTuple):
    """The tiles of A or B: as copies write them, and as ldmatrix reads them."""

    layout: SmemLayout
    written: cute.Tensor  # (bRows, bK, SLOT)
    read: cute.Tensor  # the same; the swizzle belongs to the pointer, as partitions need it

    @staticmethod
    def allocate(smem: SmemAllocator, dtype, layout: SmemLayout) -> SmemOperand:
        read = smem.allocate_tensor(dtype, layout.plain, 1024, swizzle=layout.swizzle(4))
        written = cute.make_composed_layout(layout.swizzle(3), 0, layout.plain)
        no_swizzle = cute.recast_ptr(read.iterator, cute.make_swizzle(0, 4, 3))
        return SmemOperand(layout, cute.make_tensor(no_swizzle, written), read)


class TileCopies(NamedTuple):
    """The copies by which a CTA's threads fill slots with the tiles of a row of tiles of mX."""

    operand: SmemOperand
    mX: cute.Tensor  # (Rows, K)
    row: Int32  # the first
    num_threads: int
    thread: Int32

    @cute.jit
    def fill(self, k_tile: Int32 | int, slot: Int32 | int) -> None:
        """Have tile `k_tile` copied into `slot`; zeros outside of mX."""
        layout, sX = self.operand.layout, self.operand.written
        contiguous = layout.tile_k if layout.k_major else layout.rows
        lines = layout.rows if layout.k_major else layout.tile_k
        chunks = contiguous // CHUNK
        step = self.num_threads // chunks  # lines at a time
        along, first = self.thread % chunks * CHUNK, self.thread // chunks
        for i in cutlass.range_constexpr(lines // step):
            line = first + i * step
            at, k = (line, along) if layout.k_major else (along, line)
            row, from_k = self.row + at, k_tile * layout.tile_k + k
            left = self.left(row, from_k)
            source = self.mX.iterator + cute.crd2idx((row, from_k), self.mX.layout)
            to = sX.iterator + cute.crd2idx((at, k, slot), sX.layout)
            copy_async(to, source, 16, left)

    @cute.jit
    def left(self, row: Int32, k: Int32) -> Int32:
        """The bytes of the chunk from (row, k) that mX has, up to 16."""
        rows, size_k = (cute.size(self.mX, mode=[i]) for i in range(2))
        inside = row < rows and k < size_k
        left = size_k - k if self.operand.layout.k_major else rows - row
        return cutlass.min(left, CHUNK) * 2 if inside else Int32(0)
