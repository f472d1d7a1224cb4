"""Load: the warps of the MLA kernel that load keys, wherever they are."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int16, Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms.tma import tile_loads
from cutex.device.pipeline import PipelineState
from cutex.device.row_source import UNROLLED, Box, BoxLoads, DenseRows, PagedRows, RowSource
from cutex.kernels.attention.decode.rows import Rows
from cutex.kernels.attention.mla.config import MlaConfig
from cutex.kernels.attention.mla.sm90.shared import GROUPS, Shared

WARP = 32


def box_rows(config: MlaConfig) -> int:
    """The rows of a box, of which a block is loaded in a whole number."""
    page = config.page_size
    source = PagedRows(None, 0, page, 0) if page else DenseRows(0, 0)
    return source.box_rows(config.tile_n)


@dataclass(frozen=True)
class Load:
    q: cpasync.TmaInfo
    kv: cpasync.TmaInfo
    pitch: Int32  # rows from one page, or one sequence, to the next
    number: Int32  # of this warp among those that load
    shared: Shared

    @cute.jit
    def run(self) -> None:
        """Load the keys of this CTA's parts, the last block of each first."""
        s = self.shared
        splits, place, end = s.begin()
        fill, q_fill = s.kv.producer(), s.q.producer()
        at = splits.begin
        while at < end:
            place = s.place(splits, at, place)
            piece = splits.piece(at, place)
            at = piece.after
            if piece.end > piece.first:
                blocks = s.of_piece(piece)
                batch, _ = s.entry(piece.entry)
                if blocks.end > blocks.first:
                    self.queries(s.rows(piece), q_fill)
                    q_fill.advance()
                loads = BoxLoads(self.kv, self.source(batch), s.sKV, s.kv_head(piece.head))
                found, per_lookup = Box(Int32(0), Int32(0)), WARP // self.boxes
                for i in cutlass.range(blocks.end - blocks.first, unroll=1):
                    n_block = blocks.end - 1 - i
                    if i % per_lookup == 0:
                        found = self.boxes_of(loads, n_block)
                    self.block(loads, found, i % per_lookup * self.boxes, fill)
                    fill.advance()
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(s.config.share):
            s.kv.drain(fill)

    @cute.jit
    def queries(self, rows: Rows, fill: PipelineState) -> None:
        """Load Q of a part, zeros where there are no rows; the first of the warps does."""
        s = self.shared
        if self.number == 0:
            operand = cpasync.TmaInfo(
                self.q.atom, self.q.tma_tensor[None, None, rows.batch], self.q.smem_layout
            )
            full = s.q.acquire(fill)
            tile_loads(operand, s.sQ, rows.m_block).load(0, 0, full)

    @property
    def boxes(self) -> int:
        """The boxes of a block that this warp loads."""
        c = self.shared.config
        return c.tile_n // box_rows(c) // c.load_warps

    @cute.jit
    def boxes_of(self, loads: BoxLoads, n_block: Int32) -> Box:
        """The boxes of block `n_block` and of some before it, one in each lane: so a page table is
        waited for once for all of these."""
        c, lane = self.shared.config, cute.arch.lane_idx()
        at = cutlass.max(n_block - lane // self.boxes, 0) * c.tile_n
        number = self.number * self.boxes + lane % self.boxes
        return loads.source.box(at + number * box_rows(c), box_rows(c))

    @cute.jit
    def block(self, loads: BoxLoads, found: Box, first: Int32, fill: PipelineState) -> None:
        """Load this warp's share of a block of keys, group by group of its chunks; its boxes are
        those of the lanes from `first` on."""
        s, boxes = self.shared, self.boxes
        mine = self.number * boxes
        sX = cute.flat_divide(s.sKV, loads.box)  # (boxRows, boxD, BOX, CHUNK, SLOT)
        for group in cutlass.range_constexpr(len(GROUPS)):
            s.kv.acquire(fill, group)
            slot = sX[None, None, None, None, fill.slot]
            full = s.kv.filled(fill, 0)
            for i in cutlass.range(boxes, unroll_full=boxes <= UNROLLED):
                gX = loads.columns_of(Box(*(cute.arch.shuffle_sync(x, first + i) for x in found)))
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
        """Start the load of a box's chunk, gX (boxRows, boxD, CHUNK) to sX (boxRows, boxD, CHUNK);
        of two CTAs that share their loads each has every second chunk."""
        chunk, one = GROUPS[group][number], cute.make_layout(1)
        tXsX, tXgX = cpasync.tma_partition(
            self.kv.atom, 0, one, cute.group_modes(sX[None, None, chunk], 0, 2),
            cute.group_modes(gX[None, None, chunk], 0, 2),
        )  # (TMA), (TMA)  # fmt: skip
        bar = full + self.shared.kv.wave_of(chunk)
        if cutlass.const_expr(not self.shared.config.share):
            cute.copy(self.kv.atom, tXgX, tXsX, tma_bar_ptr=bar)
        elif cute.arch.block_idx_in_cluster() == (number + group) % 2:
            cute.copy(self.kv.atom, tXgX, tXsX, tma_bar_ptr=bar, mcast_mask=Int16(3))

    def source(self, batch: Int32) -> RowSource:
        """The rows of a sequence's cache."""
        s = self.shared
        keys = s.sizes.keys(s.passed, batch)
        if s.config.page_size:
            table = s.passed.page_table[batch, None]
            return PagedRows(table, keys, s.config.page_size, self.pitch)
        return DenseRows(batch * self.pitch, keys)
