"""Rows of one sequence and head as TMA sees them: loads past the end give zeros, stores past it
write nothing, also where another sequence's rows follow.

A dense side, (batch, seqlen, heads, D), has a mode for the batch, so TMA's own bounds end it. A
ragged one, (total, heads, D), or a dense one of which only some rows count, needs an end that moves
(as in device/row_source.py, which also has pages and single rows). Its tensor map has three modes
along the rows, x, y and z, whose coordinates for row r of a sequence of `length` rows at `offset`
are

    x = END - length + r,  y = offset + length,  z = END,  with END = 2^30 the size of mode x

so that x runs out of bounds just where the sequence ends. With strides s, s and 2^34 - s bytes the
address is (offset + r) * s + 2^64, and TMA's addresses wrap. (As in triton's ragged descriptors.)

Where `pack` query heads share the rows of a tile, mode 0 is (heads, rows): row r of a tile is query
r // pack of head r % pack.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int16, Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms.mma import slots_layout
from cutex.device.atoms.multicast import SharedTileLoads
from cutex.device.atoms.tma import TileLoads
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.row_source import END, WRAP, swizzle_bytes


def tma_view(mX: cute.Tensor, pack: int, ragged: bool) -> cute.Tensor:
    """mX as (X, D, H, B) if it is dense, (X, D, H, Y, Z) if `ragged`; with `pack` > 1, mode X is
    (heads, X) and there is no mode H."""
    shape, stride = mX.shape, mX.stride
    batch_modes: tuple[Any, ...]
    batch_strides: tuple[Any, ...]
    if ragged:
        if len(shape) == 4:  # batch entries one after the other
            batch, rows, heads, d = shape
            _, row, head, one = stride
            total = batch * rows
        else:
            total, heads, d = shape
            row, head, one = stride
        rows = END
        batch_modes = (total + 1, END + 1)
        batch_strides = (row, WRAP * 8 // mX.element_type.width - row)
    else:
        batch, rows, heads, d = shape
        batch_stride, row, head, one = stride
        batch_modes, batch_strides = (batch,), (batch_stride,)
    if pack == 1:
        shape, stride = (rows, d, heads), (row, one, head)
    else:
        shape, stride = ((heads, rows), d), ((head, row), one)
    layout = cute.make_layout((*shape, *batch_modes), stride=(*stride, *batch_strides))
    return cute.make_tensor(mX.iterator, layout)


class Rows(NamedTuple):
    """A TMA operand (X, D, ..) as tma_view makes it, and how its rows are packed."""

    info: cpasync.TmaInfo
    pack: int
    ragged: bool

    @cute.jit
    def of(self, head: Int32, batch: Int32, seqlen: SeqlenInfo) -> cute.Tensor:
        """The rows (X, D) of one head, or of one group of `pack` heads, of one sequence."""
        mX = self.info.tma_tensor
        if cutlass.const_expr(self.pack > 1):
            mX = cute.domain_offset(((head * self.pack, 0), *self._nothing(mX)), mX)
        else:
            mX = mX[None, None, head, *((None,) * (cute.rank(mX) - 3))]
        if cutlass.const_expr(not self.ragged):
            return mX[None, None, batch]
        first = Int32(END) - seqlen.length
        begin = (0, first) if self.pack > 1 else first
        mX = cute.domain_offset((begin, *self._nothing(mX)), mX)
        return mX[None, None, seqlen.offset + seqlen.length, END]

    @staticmethod
    def _nothing(mX: cute.Tensor) -> tuple[int, ...]:
        return (0,) * (cute.rank(mX) - 1)

    def tiler(self, rows: int, columns: int) -> cute.Tile:
        """The tiler of `rows` packed rows by `columns`."""
        if self.pack > 1:
            return (self.pack, rows // self.pack), columns
        return rows, columns

    @cute.jit
    def tiles(
        self,
        head: Int32,
        batch: Int32,
        seqlen: SeqlenInfo,
        tile: cutlass.Constexpr,
        part: Int32 | int = 0,
    ) -> cute.Tensor:
        """The tiles (bRows, bColumns, Rest) of one head of one sequence, from column tile `part`;
        `tile` is (rows, columns)."""
        first = ((0, None), part) if self.pack > 1 else (None, part)
        return cute.local_tile(self.of(head, batch, seqlen), self.tiler(*tile), first)


def tma_operand(
    op: Any,
    mX: cute.Tensor,
    rows: Rows,
    tile: tuple[int, int],
    num_slots: int,
    sharers: int = 1,
) -> cpasync.TmaInfo:
    """The TMA atom and tensor that move tiles (rows, columns) between mX and smem slots, columns
    contiguous, with the widest swizzle that divides a row evenly; each of `sharers` CTAs moves an
    equal part of a tile's rows."""
    swizzle = swizzle_bytes(tile[1] * mX.element_type.width // 8)
    slots = slots_layout(mX.element_type, *tile, num_slots, swizzle)
    view = tma_view(mX, rows.pack, rows.ragged)
    return cpasync.make_tiled_tma_atom(op, view, slots, rows.tiler(*tile), num_multicast=sharers)


@cute.jit
def tile_loads(
    rows: Rows,
    sX: cute.Tensor,
    of: tuple[Int32, Int32, SeqlenInfo],
    part: Int32 | int = 0,
    sharers: cutlass.Constexpr[int] = 1,
) -> TileLoads | SharedTileLoads:
    """The loads of one head of one sequence, `of` (head, batch, seqlen), from column tile `part`,
    into sX (rows, columns, SLOT); with `sharers`, those of this CTA's part of each tile, into the
    smem of all CTAs of its cluster."""
    gX = rows.tiles(*of, (cute.size(sX, mode=[0]), cute.size(sX, mode=[1])), part)
    number = cute.arch.block_idx_in_cluster() if sharers > 1 else 0
    tXsX, tXgX = cpasync.tma_partition(
        rows.info.atom,
        number,
        cute.make_layout(sharers),
        cute.group_modes(sX, 0, 2),
        cute.group_modes(gX, 0, 2),
    )  # (TMA, SLOT), (TMA, Rest)
    if cutlass.const_expr(sharers > 1):
        return SharedTileLoads(rows.info.atom, tXgX, tXsX, Int16((1 << sharers) - 1))
    return TileLoads(rows.info.atom, tXgX, tXsX)
