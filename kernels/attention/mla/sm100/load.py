"""Load: the two warps of the Blackwell MLA kernel that load Q and, box by box, keys as K and as V,
each half of a slot: one alone would issue boxes more slowly than the MMAs read them.

K and V share a ring of slots, in the order in which the MMAs read them: K of a block comes before V
of the block before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms.tma import tile_loads
from cutex.device.pipeline import PipelineState
from cutex.device.row_source import UNROLLED, Box, BoxLoads, RowSource, cache_box_rows
from cutex.kernels.attention.decode.splits import Piece
from cutex.kernels.attention.mla.config import CHUNK, CHUNKS
from cutex.kernels.attention.mla.sm100.config import BOX, CTAS, DIMS, KEYS
from cutex.kernels.attention.mla.sm100.shared import Shared

OF_V = DIMS // CTAS // CHUNK  # chunks of a slot of V
GROUPS = KEYS // BOX  # of the keys of a block
BLOCKS = 32 // GROUPS  # that the lanes of a warp look up


class KeyBoxes(NamedTuple):
    """Where the keys of a block are: the box of each 32, or its smaller boxes, one in each lane."""

    first: Box
    second: Box
    third: Box
    fourth: Box


def no_box() -> Box:
    return Box(Int32(0), Int32(0))


def no_boxes() -> KeyBoxes:
    return KeyBoxes(*(no_box() for _ in range(GROUPS)))


@dataclass(frozen=True)
class Load:
    q: cpasync.TmaInfo
    kv: cpasync.TmaInfo
    pitch: Int32  # rows from one page, or one sequence, to the next
    number: Int32  # of this warp: the half of each slot that it loads
    shared: Shared

    @cute.jit
    def run(self) -> None:
        """Load the keys of this pair's parts, the last block of each first."""
        s = self.shared
        splits, span, end = s.begin()
        fill, q_fill = s.kv.producer(), s.q.producer()
        at = splits.begin
        while at < end:
            span = s.span_at(splits, at, span)
            piece = splits.piece(at, span)
            at = piece.after
            if piece.end > piece.first:
                blocks = s.of_piece(piece)
                if blocks.end > blocks.first:
                    self.queries(piece, q_fill)
                    q_fill.advance()
                    batch, _ = s.entry(piece.entry)
                    source = s.source(batch, s.sizes.keys(s.passed, batch), self.pitch)
                    loads = BoxLoads(self.kv, source, s.s32, s.kv_head(piece.head))
                    found, here = no_box(), no_boxes()
                    for i in cutlass.range(blocks.end - blocks.first, unroll=1):
                        n_block = blocks.end - 1 - i
                        if i % BLOCKS == 0:
                            found = self.lookup(source, n_block)
                        following = self.boxes(source, n_block, found, i % BLOCKS)
                        fill = self.keys(loads, following, fill)
                        if i > 0:
                            fill = self.values(loads, here, fill)
                        here = following
                    fill = self.values(loads, here, fill)
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def queries(self, piece: Piece, fill: PipelineState) -> None:
        """Load this CTA's rows of Q, zeros where there are none."""
        s = self.shared
        rows = s.own_rows(piece)
        operand = cpasync.TmaInfo(
            self.q.atom, self.q.tma_tensor[None, None, rows.batch], self.q.smem_layout
        )
        if self.number == 0:
            full, loads = s.q.acquire(fill), tile_loads(operand, s.sQ, rows.m_block)
            for chunk in cutlass.range_constexpr(CHUNKS):
                loads.load(chunk, chunk, full)

    @cute.jit
    def lookup(self, source: cutlass.Constexpr[RowSource], n_block: Int32) -> Box:
        """Where the keys of block `n_block` and of those before it are, a box in each lane: so a
        page table is waited for once for all of these."""
        lane = cute.arch.lane_idx()
        block = cutlass.max(n_block - lane // GROUPS, 0)
        return source.box(block * KEYS + lane % GROUPS * BOX, BOX)

    @cute.jit
    def boxes(
        self, source: cutlass.Constexpr[RowSource], n_block: Int32, found: Box, number: Int32
    ) -> KeyBoxes:
        """Where the keys of a block are: it is the block of this number that `found` has; or, in
        boxes of fewer rows, it is looked up."""
        rows = cache_box_rows(self.shared.config.page_size, BOX)
        if cutlass.const_expr(rows == BOX):
            lanes = [number * GROUPS + g for g in range(GROUPS)]
            return KeyBoxes(*(Box(*(cute.arch.shuffle_sync(x, i) for x in found)) for i in lanes))
        at = n_block * KEYS + cute.arch.lane_idx() % (BOX // rows) * rows
        return KeyBoxes(*(source.box(at + g * BOX, rows) for g in range(GROUPS)))

    @cute.jit
    def keys(
        self, loads: cutlass.Constexpr[BoxLoads], boxes: KeyBoxes, fill: PipelineState
    ) -> PipelineState:
        """Load 32 of this CTA's keys of a block as K, chunk by chunk."""
        number = cute.arch.block_idx_in_cluster() * (GROUPS // CTAS) + self.number
        mine = boxes[GROUPS - 1]
        for g in cutlass.range_constexpr(GROUPS - 1):
            mine = Box(*(x if number == g else y for x, y in zip(boxes[g], mine, strict=True)))
        for chunk in cutlass.range_constexpr(CHUNKS):
            full = self.shared.kv.acquire(fill)
            self.box(loads, mine, chunk, fill.slot, full)
            fill.advance()
        return fill

    @cute.jit
    def values(
        self, loads: cutlass.Constexpr[BoxLoads], boxes: KeyBoxes, fill: PipelineState
    ) -> PipelineState:
        """Load 64 of this CTA's columns of a block as V, for each of its products, in their
        order."""
        mine = cute.arch.block_idx_in_cluster() * OF_V + self.number
        for half in cutlass.range_constexpr(2):
            for g in cutlass.range_constexpr(GROUPS):
                full = self.shared.kv.acquire(fill)
                self.box(loads, boxes[g], half * (DIMS // CHUNK) + mine, fill.slot, full)
                fill.advance()
        return fill

    @cute.jit
    def box(
        self,
        loads: cutlass.Constexpr[BoxLoads],
        found: Box,
        chunk: Int32 | int,
        slot: Int32,
        full: cute.Pointer,
    ) -> None:
        """Start the load of 32 keys' chunk of columns into this warp's half of a slot."""
        count, one = BOX // loads.box[0], cute.make_layout(1)
        sX = cute.flat_divide(loads.sX, loads.box)  # (boxRows, boxD, BOX, 1, SLOT)
        for i in cutlass.range(count, unroll_full=count <= UNROLLED):
            gX = loads.columns_of(Box(*(cute.arch.shuffle_sync(x, i) for x in found)))
            tXsX, tXgX = cpasync.tma_partition(
                self.kv.atom, 0, one,
                cute.group_modes(sX[None, None, i, 0, 2 * slot + self.number], 0, 2),
                cute.group_modes(gX[None, None, chunk], 0, 2),
            )  # (TMA), (TMA)  # fmt: skip
            cute.copy(self.kv.atom, tXgX, tXsX, tma_bar_ptr=full)
