"""Combine: the kernel that merges the parts of units that several CTAs had a part of.

A unit may be in a hundred parts, of 64 rows each, which one CTA would read for longer than all CTAs
compute. So a warp for each row merges them, in a launch of its own, whose CTAs start while those of
the main kernel end.

The CTA that has a unit's part 0 writes where the others are: four words in front of all parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.attention.row_store import VECTOR
from cutex.kernels.attention.decode.config import WORDS
from cutex.kernels.attention.decode.out import WARP, Out, Partials
from cutex.kernels.attention.decode.shared import Rows
from cutex.kernels.attention.decode.signature import Passed, Sizes
from cutex.kernels.attention.decode.splits import Piece

WARPS = 4  # of a CTA
MIN_CTAS = 4  # of an SM
FEW = 1024  # rows
MOST_ROWS = 4  # of a warp
ROW_WORDS = 32  # of its rows, in a lane, at most


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
    def whole(self, unit: Int32) -> Piece:
        """The parts of a unit, as the one number 0."""
        words = cute.make_rmem_tensor(cute.make_layout(WORDS), Int32)
        words.store(self.words(unit).load())
        zero = Int32(0)
        return Piece(
            zero, zero, zero, zero, zero, words[0], slot=words[2], step=words[3], slot_0=words[1],
            after=zero,
        )  # fmt: skip


class Combine:
    """A warp for each row of each unit; or a CTA, where there are too few to fill the GPU; or for
    several rows, where units fill the GPU, so that few or none are cut, and what is left to do is
    mostly to begin and to end.

    An operator of other units, or results, derives its own: `rows` and `out`.
    """

    out: ClassVar[type[Out]] = Out

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def by_columns(self) -> bool:
        """Whether warps that share a row have columns each, not parts."""
        return bool(self.config.head_dim_v >= WARPS * WARP * VECTOR)

    @property
    def rows_of_warp(self) -> int:
        """The rows that a warp merges together where units fill the GPU."""
        words = -(-self.config.head_dim_v // (VECTOR * WARP)) * VECTOR
        return min(MOST_ROWS, max(ROW_WORDS // words, 1))

    def rows(self, passed: Passed, sizes: Sizes, unit: Int32) -> Rows:
        """The rows of a unit."""
        sizes = sizes.known(self.config)
        entry = unit // sizes.heads
        batch = entry // sizes.m_blocks
        m_block, head = sizes.owner(entry - batch * sizes.m_blocks, unit - entry * sizes.heads)
        seq_q = sizes.queries(passed, batch)
        return Rows(batch, m_block, head, seq_q, sizes.pack, self.config.tile_m)

    @cute.jit
    def launch(self, mO: cute.Tensor, passed: Passed, sizes: Sizes, stream: Any) -> None:
        rows = cutlass.min(sizes.rows_q * sizes.pack, self.config.tile_m)
        few = sizes.units * rows <= FEW
        if cutlass.const_expr(not self.by_columns):  # NOTE: the order of sums depends on it
            few = few | (passed.num_splits > 0)
        across = Int32(WARPS) if few else Int32(1)  # warps of a row
        fill = (sizes.units * 2 >= self.config.num_sms) & (across == 1)
        together = Int32(self.rows_of_warp) if fill else Int32(1)
        self.kernel(mO, passed, sizes, across, together).launch(
            grid=(sizes.units, cute.ceil_div(rows * across, WARPS * together), 1),
            block=(WARP * WARPS, 1, 1),
            # NOTE: else ptxas has each load wait where it is added (docs/facts/dsl.md#sunk-loads)
            min_blocks_per_mp=MIN_CTAS,
            preferred_smem_carveout=100,  # percent, as of the main kernel; else the DSL asks a GPU
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mO: cute.Tensor, passed: Passed, sizes: Sizes, across: Int32, together: Int32
    ) -> None:
        """Merge rows, each by `across` warps, or `together` by each warp."""
        unit, group, _ = cute.arch.block_idx()
        warp = cute.arch.warp_idx()
        row = group if across == WARPS else group * WARPS * together + warp
        rows = self.rows(passed, sizes, unit)
        parts = Parts(passed, sizes.units, self.config.tile_m, self.config.head_dim_v)
        out = self.out(self.config, mO, parts.partials, passed, None)
        cute.arch.griddepcontrol_wait()
        if row < rows.count:
            piece = parts.whole(unit)
            if piece.parts > 1:
                if across != WARPS:
                    if together == 1:
                        out.merge_rows(rows, piece, (row,))
                    else:
                        mine = tuple(row + i * WARPS for i in range(self.rows_of_warp))
                        out.merge_rows(rows, piece, mine)
                elif cutlass.const_expr(self.by_columns):
                    out.merge_rows(rows, piece, (row,), warp * WARP, WARPS)
                else:
                    self.merge_by_parts(out, rows, piece, row)

    @cute.jit
    def merge_by_parts(
        self, out: cutlass.Constexpr[Out], rows: Rows, piece: Piece, row: Int32
    ) -> None:
        """Merge a row, each warp every fourth part, and their sums in smem."""
        smem, warp, lane = SmemAllocator(), cute.arch.warp_idx(), cute.arch.lane_idx()
        count = -(-self.config.head_dim_v // (VECTOR * WARP))
        layout = cute.make_ordered_layout((VECTOR, WARP, count, WARPS), order=(0, 1, 2, 3))
        sO = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        of_warps = smem.allocate_tensor(Float32, cute.make_layout(WARPS))
        o = cute.make_rmem_tensor(cute.make_layout((VECTOR, count, 1)), Float32)
        totals, highest = out.partials.sums_of(piece, (row,), o, 0, warp, WARPS)
        for i in cutlass.range_constexpr(count):
            sO[None, lane, i, warp].store(o[None, i, 0].load())
        if lane == 0:
            of_warps[warp] = totals[0]
        cute.arch.sync_threads()
        if warp == 0:
            for other in cutlass.range_constexpr(1, WARPS):
                totals[0] += of_warps[other]
                for i in cutlass.range_constexpr(count):
                    added = sO[None, lane, i, other].load()
                    o[None, i, 0].store(o[None, i, 0].load() + added)
            lse = out.partials.normalised(o[None, None, 0], totals[0], highest[0])
            out.store_row(rows, row, Boolean(True), o[None, None, 0], lse, 0)


def out_of(config: Any, mO: cute.Tensor, passed: Passed, sizes: Sizes, last: cute.Tensor) -> Out:
    """Where a decode kernel writes its results."""
    c = config
    if not c.combined:
        partials = Partials(passed.sums, passed.flags, c.tile_m, c.head_dim_v)
        return Out(c, mO, partials, passed, last)
    parts = Parts(passed, sizes.units, c.tile_m, c.head_dim_v)
    return Out(c, mO, parts.partials, passed, None, parts)
