"""Load: what the warpgroups of the scores do between blocks: each loads the keys of its own slot.

A warpgroup has nothing to do between handing over P of a block and QK of the next one in the same
slot, which is loaded when PV of the block has freed it. So it starts that load itself, one block
ahead of its products, over the borders of parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms.tma import tile_loads
from cutex.device.pipeline import PipelineState
from cutex.device.row_source import UNROLLED, Box, BoxLoads, cache_box_rows
from cutex.kernels.attention.decode.shared import Rows
from cutex.kernels.attention.decode.splits import EntrySpan, Splits
from cutex.kernels.attention.mla.sm90.config import SLOTS
from cutex.kernels.attention.mla.sm90.shared import GROUPS, Shared

WARP = 32


class Cursor(NamedTuple):
    """Where the loads of a slot have come to."""

    at: Int32  # the position behind the present part
    span: EntrySpan
    entry: Int32  # the present part: its entry,
    head: Int32  # the owner of its unit,
    first: Int32  # its first block,
    n_block: Int32  # and this slot's next block, which there is none of if below `first`
    slot: Int32  # of the block behind this part
    phase: Int32  # of this slot's next load


@dataclass(frozen=True)
class Load:
    q: cpasync.TmaInfo
    kv: cpasync.TmaInfo
    pitch: Int32  # rows from one page, or one sequence, to the next
    slot: Int32  # whose keys this warp loads
    number: Int32  # of this warp among those that load
    shared: Shared

    def begin(self, splits: Splits, span: EntrySpan) -> Cursor:
        """The cursor before the first load."""
        zero = Int32(0)
        return Cursor(splits.begin, span, zero, zero, zero, Int32(-1), zero, Int32(1))

    @cute.jit
    def queries(self, rows: Rows, fill: PipelineState) -> None:
        """Load Q of a part, zeros where there are no rows; the first of the warps does."""
        s = self.shared
        if (self.number == 0) & (self.slot == 0):
            operand = cpasync.TmaInfo(
                self.q.atom, self.q.tma_tensor[None, None, rows.batch], self.q.smem_layout
            )
            full = s.q.acquire(fill)
            tile_loads(operand, s.sQ, rows.m_block).load(0, 0, full)

    @cute.jit
    def next(self, splits: Splits, end: Int32, cursor: Cursor) -> Cursor:
        """Load the next block of this slot, if there is one, as soon as the slot is free."""
        s = self.shared
        if self.number < s.config.load_warps:
            cursor = self.found(splits, end, cursor)
            if cursor.n_block >= cursor.first:
                batch, _ = s.entry(cursor.entry)
                keys = s.sizes.keys(s.args, batch)
                source = s.source(batch, keys, self.pitch)
                loads = BoxLoads(self.kv, source, s.sKV, s.kv_head(cursor.head))
                fill = PipelineState(SLOTS, self.slot, cursor.phase)
                self.block(loads, self.boxes_of(loads, cursor.n_block), fill)
                cursor = cursor._replace(n_block=cursor.n_block - SLOTS, phase=cursor.phase ^ 1)
        return cursor

    @cute.jit
    def found(self, splits: Splits, end: Int32, cursor: Cursor) -> Cursor:
        """The cursor at the next part that has a block for this slot."""
        s = self.shared
        at, span, entry, head, first, n_block, slot, phase = cursor
        while (n_block < first) & (at < end):
            span = s.span_at(splits, at, span)
            piece = splits.piece(at, span)
            at = piece.after
            if piece.end > piece.first:
                blocks = s.of_piece(piece)
                entry, head, first = piece.entry, piece.head, blocks.first
                n_block = blocks.end - 1 - (slot ^ self.slot)
                slot = (slot + blocks.end - blocks.first) % SLOTS
        return Cursor(at, span, entry, head, first, n_block, slot, phase)

    @property
    def boxes(self) -> int:
        """The boxes of a block that this warp loads."""
        c = self.shared.config
        return c.tile_n // cache_box_rows(c.page_size, c.tile_n) // c.load_warps

    @cute.jit
    def boxes_of(self, loads: BoxLoads, n_block: Int32) -> Box:
        """The boxes of block `n_block` that this warp loads, one in each lane."""
        c, lane = self.shared.config, cute.arch.lane_idx()
        number, rows = self.number * self.boxes + lane % self.boxes, loads.box[0]
        return loads.source.box(n_block * c.tile_n + number * rows, rows)

    @cute.jit
    def block(self, loads: BoxLoads, found: Box, fill: PipelineState) -> None:
        """Load this warp's share of a block of keys, group by group of its chunks."""
        s, boxes = self.shared, self.boxes
        mine = self.number * boxes
        sX = cute.flat_divide(s.sKV, loads.box)  # (boxRows, boxD, BOX, CHUNK, SLOT)
        for group in cutlass.range_constexpr(len(GROUPS)):
            s.kv.acquire(fill, group)
            slot = sX[None, None, None, None, fill.slot]
            full = s.kv.filled(fill, 0)
            for i in cutlass.range(boxes, unroll_full=boxes <= UNROLLED):
                gX = loads.columns_of(Box(*(cute.arch.shuffle_sync(x, i) for x in found)))
                for n in cutlass.range_constexpr(len(GROUPS[group])):
                    self.chunk(gX, slot[None, None, mine + i, None], full, group, n)

    @cute.jit
    def chunk(
        self,
        gX: cute.Tensor,
        sX: cute.Tensor,
        full: cute.Pointer,
        group: cutlass.Constexpr[int],
        number: cutlass.Constexpr[int],
    ) -> None:
        """Start the load of a chunk of a box, from gX to sX (boxRows, boxD, CHUNK)."""
        chunk = GROUPS[group][number]
        tXsX, tXgX = cpasync.tma_partition(
            self.kv.atom, 0, cute.make_layout(1), cute.group_modes(sX[None, None, chunk], 0, 2),
            cute.group_modes(gX[None, None, chunk], 0, 2),
        )  # (TMA), (TMA)  # fmt: skip
        bar = full + self.shared.kv.wave_of(chunk)
        cute.copy(self.kv.atom, tXgX, tXsX, tma_bar_ptr=bar)
