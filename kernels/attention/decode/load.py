"""Load: the warps of the decode kernel that load K and V, wherever they are."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.row_source import BoxLoads, DenseRows, PagedRows, RowSource
from cutex.kernels.attention.decode.shared import Shared


@dataclass(frozen=True)
class Load:
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    pitch_k: Int32  # rows from one page, or one sequence, to the next
    pitch_v: Int32
    number: Int32  # of this warp among those that load
    shared: Shared

    @cute.jit
    def run(self) -> None:
        """Load the keys of this CTA's parts, in the order in which the products need them."""
        s = self.shared
        splits, place, end = s.begin()
        k_fill, v_fill = s.k.producer(), s.v.producer()
        at = splits.begin
        while at < end:
            place = s.place(splits, at, place)
            piece = splits.piece(at, place)
            at = piece.after
            if piece.end > piece.first:
                blocks = s.of_piece(piece)
                batch, _ = s.entry(piece.entry)
                keys = s.sizes.keys(s.passed, batch)
                head = s.kv_head(piece.head)
                of_k, of_v = (self.source(batch, keys, x) for x in (self.pitch_k, self.pitch_v))
                loads_k = BoxLoads(self.k, of_k, s.sK, head)
                loads_v = BoxLoads(self.v, of_v, s.sV, head)
                share = 0, self.number, s.config.load_warps
                if blocks.end > blocks.first:
                    loads_k.load(blocks.end - 1, k_fill.slot, s.k.acquire(k_fill), *share)
                    k_fill.advance()
                    for i in cutlass.range(blocks.end - 1 - blocks.first, unroll=1):
                        block = blocks.end - 1 - i
                        loads_k.load(block - 1, k_fill.slot, s.k.acquire(k_fill), *share)
                        k_fill.advance()
                        loads_v.load(block, v_fill.slot, s.v.acquire(v_fill), *share)
                        v_fill.advance()
                    loads_v.load(blocks.first, v_fill.slot, s.v.acquire(v_fill), *share)
                    v_fill.advance()

    def source(self, batch: Int32, keys: Int32, pitch: Int32) -> RowSource:
        """The rows of a sequence's cache."""
        passed, c = self.shared.passed, self.shared.config
        if c.page_size:
            return PagedRows(passed.page_table[batch, None], keys, c.page_size, pitch)
        entry = Int32(passed.batch_idx[batch]) if c.batch_idx else batch
        return DenseRows(entry * pitch, keys)
