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
    """The copies by which a CTA's threads fill slots with the tiles of a row of tiles of mX.

    A thread copies one chunk of several lines. K-major: rows past the last are copied from it,
    and their products are not stored.
    """

    operand: SmemOperand
    mX: cute.Tensor  # (Rows, K)
    step: int  # lines from one copy of a thread to its next
    line: Int32  # the first, in the tile
    along: Int32  # the chunk's first element, in the line
    sources: list[cute.Pointer]  # of each line, in the first tile
    rows_left: Int32  # of mX, from the chunk's first: of lines of rows

    @staticmethod
    def of(operand: SmemOperand, mX: cute.Tensor, row: Int32, num_threads: int, thread: Int32):
        layout = operand.layout
        lines, of_line = layout.rows, layout.tile_k
        if not layout.k_major:
            lines, of_line = of_line, lines
        chunks = of_line // CHUNK
        step, line, along = num_threads // chunks, thread // chunks, thread % chunks * CHUNK
        last = cute.size(mX, mode=[0]) - 1
        sources = []
        for i in range(0, lines, step):
            where = cutlass.min(row + line + i, last), along
            if not layout.k_major:
                where = row + along, line + i
            sources.append(mX.iterator + cute.crd2idx(where, mX.layout))
        rows_left = last + 1 - row - along
        return TileCopies(operand, mX, step, line, along, sources, rows_left)

    @cute.jit
    def fill(self, k_tile: Int32 | int, slot: Int32 | int) -> None:
        """Have tile `k_tile` copied into `slot`; zeros outside of mX."""
        layout, sX = self.operand.layout, self.operand.written
        from_k, size_k = k_tile * layout.tile_k, cute.size(self.mX, mode=[1])
        ahead = cute.crd2idx((0, from_k), self.mX.layout)
        left = _bytes(size_k - from_k - self.along if layout.k_major else self.rows_left)
        for i in cutlass.range_constexpr(len(self.sources)):
            k = from_k + self.line + i * self.step
            read = left
            if cutlass.const_expr(not layout.k_major):
                read = left if k < size_k else Int32(0)
            copy_async(self.place(sX, i, slot), self.sources[i] + ahead, 16, read)

    def place(self, sX: cute.Tensor, i: int, slot: Int32 | int) -> cute.Pointer:
        """Where copy `i` goes.

        NOTE: 8 lines on the swizzle is the same, so that the place is a constant away.
        """
        layout = self.operand.layout
        whole = self.step % 8 == 0
        line = self.line if whole else self.line + i * self.step
        at, k = (line, self.along) if layout.k_major else (self.along, line)
        first = sX.iterator + cute.crd2idx((at, k, slot), sX.layout)
        return first + i * self.step * layout.line if whole else first


def _bytes(elements: Int32) -> Int32:
    """The bytes of a chunk of which so many elements are there."""
    return cutlass.max(0, cutlass.min(elements, CHUNK)) * 2
