"""Combine: the kernel that merges the parts of units that several CTAs had a part of.

A unit of 128 heads may be in a hundred parts of 128 KB each, which one CTA would read for longer
than all CTAs compute. So a warp for each row merges them, in a launch of its own, whose CTAs start
while those of the main kernel end.

The CTA that has a unit's part 0 writes where the others are: four words in front of all parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from cutex.kernels.attention.decode.out import Out
from cutex.kernels.attention.decode.partials import WARP, Partials
from cutex.kernels.attention.decode.rows import Rows
from cutex.kernels.attention.decode.signature import Passed, Sizes
from cutex.kernels.attention.decode.splits import Piece
from cutex.kernels.attention.mla.config import MlaConfig
from cutex.kernels.attention.mla.signature import blocks_of_rows

WORDS = 4  # of a unit: its parts, and the places of part 0, of part 1 and from it to the next
WARPS = 4  # of a CTA
FEW = 1024  # rows


@dataclass(frozen=True)
class Parts:
    """The parts of all units in memory, behind the words that say where they are."""

    passed: Passed
    units: Int32
    rows: int  # of a unit
    columns: int  # DV

    @property
    def partials(self) -> Partials:
        behind = self.passed.sums.iterator + self.units * WORDS
        sums = cute.make_tensor(behind.align(16), self.passed.sums.layout)
        return Partials(sums, None, self.rows, self.columns)

    def words(self, unit: Int32) -> cute.Tensor:
        """The words of a unit."""
        words = cute.recast_ptr(self.passed.sums.iterator, dtype=Int32) + unit * WORDS
        return cute.make_tensor(words.align(16), cute.make_layout(WORDS))

    @cute.jit
    def announce(self, unit: Int32, piece: Piece) -> None:
        """Write where the parts of a unit are; the thread that calls it has part 0."""
        words = cute.make_rmem_tensor(cute.make_layout(WORDS), Int32)
        for i, x in enumerate((piece.parts, piece.slot_0, piece.slot, piece.step)):
            words[i] = Int32(x)
        self.words(unit).store(words.load())

    @cute.jit
    def pieces(self, unit: Int32) -> Piece:
        """The parts of a unit, as the one number 0."""
        words = cute.make_rmem_tensor(cute.make_layout(WORDS), Int32)
        words.store(self.words(unit).load())
        zero = Int32(0)
        return Piece(
            zero, zero, zero, zero, zero, words[0], slot=words[2], step=words[3], slot_0=words[1],
            after=zero,
        )  # fmt: skip


def rows_of(passed: Passed, sizes: Sizes, batch: Int32, owner: Int32, tile_m: int) -> Rows:
    """The rows of a unit."""
    m_blocks = blocks_of_rows(sizes, tile_m)
    head = owner // m_blocks
    seq_q = sizes.queries(passed, batch)
    return Rows(batch, owner - head * m_blocks, head, seq_q, sizes.pack, tile_m)


class MlaOut(Out):
    """Where results are written; LSE of rows without keys is +inf, as FlashMLA's."""

    @cute.jit
    def store_lse(self, lse: Float32, rows: Rows, row: Int32) -> None:
        Out.store_lse(self, Float32.inf if lse == -Float32.inf else lse, rows, row)


class Combine:
    """A warp for each row of each unit; or a CTA, where there are too few to fill the GPU."""

    def __init__(self, config: MlaConfig) -> None:
        self.config = config

    @cute.jit
    def launch(self, mO: cute.Tensor, passed: Passed, sizes: Sizes, stream: Any) -> None:
        rows = cutlass.min(sizes.rows_q * sizes.pack, self.config.tile_m)
        across = Int32(WARPS) if sizes.units * rows <= FEW else Int32(1)  # warps of a row
        self.kernel(mO, passed, sizes, across).launch(
            grid=(sizes.units, cute.ceil_div(rows * across, WARPS), 1),
            block=(WARP * WARPS, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mO: cute.Tensor, passed: Passed, sizes: Sizes, across: Int32) -> None:
        unit, group, _ = cute.arch.block_idx()
        warp = cute.arch.warp_idx()
        row = group if across == WARPS else group * WARPS + warp
        batch = unit // sizes.heads
        rows = rows_of(passed, sizes, batch, unit - batch * sizes.heads, self.config.tile_m)
        parts = Parts(passed, sizes.units, self.config.tile_m, self.config.head_dim_v)
        out = MlaOut(self.config, mO, parts.partials, passed, None)
        cute.arch.griddepcontrol_wait()
        if row < rows.count:
            piece = parts.pieces(unit)
            if piece.parts > 1:
                if across == WARPS:
                    out.merge_rows(rows, piece, (row,), warp * WARP, WARPS)
                else:
                    out.merge_rows(rows, piece, (row,))
