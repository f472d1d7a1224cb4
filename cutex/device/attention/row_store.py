"""Stores of rows of O and of dQ, by kind.

row_stores    16 bits, a tile at a time, through smem and by TMA
RoundedRow    16 bits, from registers
PartialRow    fp32 parts of O in a workspace, from registers
SummedTile    added to fp32 sums of dQ in a workspace, from registers or from smem

A thread that holds a whole row (tensor memory) stores some columns at a time; four threads that
hold a row together (wgmma) store pairs of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms.reduction import add_bulk, add_vector, store_bulk
from cutex.device.atoms.tma import TileStores
from cutex.device.attention.rows import Rows
from cutex.device.attention.seqlen_info import SeqlenInfo

UNIT = 8  # columns: 16 bytes of 16-bit elements, of which every head dim has a whole number
WORDS = 4  # of 32 bits in a unit
VECTOR = 4  # fp32 in 16 bytes


# ---- by TMA


@cute.jit
def row_stores(
    rows: Rows,
    sX: cute.Tensor,
    of: tuple[Int32, Int32, SeqlenInfo],
    part: Int32 | int = 0,
) -> TileStores:
    """The stores of sX (bRows, bColumns, SLOT) to the row tiles of one head of one sequence, `of`
    (head, batch, seqlen), in column tile `part`; they leave out rows past the end."""
    gX = rows.tiles(*of, (cute.size(sX, mode=[0]), cute.size(sX, mode=[1])), part)
    bSG_sX, bSG_gX = cpasync.tma_partition(
        rows.info.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(sX, 0, 2),
        cute.group_modes(gX, 0, 2),
    )  # (TMA, SLOT), (TMA, Rest)
    return TileStores(rows.info.atom, bSG_sX, bSG_gX)


# ---- from registers


class RoundedRow(NamedTuple):
    """A row of 16-bit elements in memory, as 32-bit words."""

    words: cute.Tensor  # (columns / 2) Int32
    units: Int32 | None  # of columns that exist; None: all that are stored

    @cute.jit
    def store_pair(self, unit: Int32, word: Int32, pair: cute.Tensor) -> None:
        """Store two columns, word `word` of `unit`."""
        if cutlass.const_expr(self.units is None) or unit < self.units:
            self.words[unit * WORDS + word] = cute.recast_tensor(pair, Int32)[0]

    @cute.jit
    def store(self, column: Int32 | int, rounded: cute.Tensor) -> None:
        """Store whole units from `column` on."""
        words = cute.recast_tensor(rounded, Int32)
        for j in cutlass.range_constexpr(cute.size(words) // WORDS):
            unit = column // UNIT + j
            to = (self.words.iterator + unit * WORDS).align(16)
            if cutlass.const_expr(self.units is None) or unit < self.units:
                cute.make_tensor(to, cute.make_layout(WORDS)).store(
                    cute.local_tile(words, (WORDS,), (j,)).load()
                )


class PartialRow(NamedTuple):
    """A row of a part of O in a workspace, in fp32."""

    vectors: cute.Tensor  # (VECTOR, columns / VECTOR)

    @cute.jit
    def store_pair(self, unit: Int32 | int, word: Int32, pair: cute.Tensor) -> None:
        """Store two columns, pair `word` of `unit`."""
        half = cute.size(self.vectors) // 2
        pairs = cute.make_tensor(self.vectors.iterator, cute.make_layout((2, half)))
        pairs[None, unit * WORDS + word].store(pair.load())

    @cute.jit
    def store(self, column: Int32 | int, values: cute.Tensor) -> None:
        """Store whole vectors from `column` on."""
        for j in cutlass.range_constexpr(cute.size(values) // VECTOR):
            self.vectors[None, column // VECTOR + j].store(
                cute.local_tile(values, (VECTOR,), (j,)).load()
            )


# ---- added to what is there


class SummedTile(NamedTuple):
    """A tile of fp32 sums in a workspace, which several CTAs add to, in any order of elements."""

    numbers: cute.Tensor  # (bRows * bColumns)

    @cute.jit
    def add(self, vector: Int32, values: cute.Tensor) -> None:
        """Add four numbers in registers to vector `vector` of the tile, each atomically."""
        vectors = cute.logical_divide(self.numbers, cute.make_layout(VECTOR))  # (VECTOR, NumV)
        to = vectors[None, vector].iterator
        add_vector(to, (values[0], values[1], values[2], values[3]))

    @cute.jit
    def add_slot(self, slot: cute.Tensor, first: Int32, starts: Boolean) -> None:
        """Start adding the contiguous `slot` of smem (numbers) to the numbers from `first` on, in a
        bulk group of the thread that `starts` it."""
        to = self.numbers.iterator + first
        if starts:
            add_bulk(to, slot.iterator, 4 * cute.size(slot))
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def put_slot(self, slot: cute.Tensor, first: Int32, begins: Boolean) -> None:
        """Like `add_slot`; but if nobody has added before and this `begins` the sums, store instead
        of adding. One thread calls it."""
        to, size = self.numbers.iterator + first, 4 * cute.size(slot)
        if begins:
            store_bulk(to, slot.iterator, size)
        else:
            add_bulk(to, slot.iterator, size)
        cute.arch.cp_async_bulk_commit_group()
