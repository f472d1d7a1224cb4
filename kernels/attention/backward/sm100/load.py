"""Load: the role of the warp that brings everything by TMA: K and V once; of each block of queries,
Q with its rows' LSE and delta, and dO."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from cutex.device.attention.rows import Rows, tile_loads
from cutex.device.pipeline import Barrier
from cutex.kernels.attention.backward.sm100.shared import Shared
from cutex.kernels.attention.backward.tiles import bulk_load


@dataclass(frozen=True)
class Load:
    shared: Shared
    q: Rows  # with the TMA operand each
    k: Rows
    v: Rows
    do: Rows
    stats: cute.Tensor  # (tiles, 2 * bM) LSE, then delta

    @cute.jit
    def run(self) -> None:
        s = self.shared
        b = s.barriers
        blocks = s.m_blocks()
        total = s.total(blocks)
        fill_q, fill_do = b.q.producer(), b.do.producer()
        head, m_block = s.first_head(), blocks.first
        for i in cutlass.range(total, unroll=1):
            if i == 0:
                self.keys(self.k, s.sK, b.k_loaded)
            of = (head, s.tile.batch, s.tile.seq_q)
            tile = s.tiles.tile(s.config, *of) + m_block
            full = b.q.acquire(fill_q)
            tile_loads(self.q, s.sQ, of).load(m_block, fill_q.slot, full)
            bulk_load(self.stats[tile, None], s.stats[None, fill_q.slot], full)
            if i == 0:
                self.keys(self.v, s.sV, b.v_loaded)
            full = b.do.acquire(fill_do)
            tile_loads(self.do, s.sdO, of).load(m_block, fill_do.slot, full)
            fill_q.advance()
            fill_do.advance()
            m_block += 1
            if m_block == blocks.end:
                m_block = blocks.first
                head += 1

    @cute.jit
    def keys(self, rows: Rows, sX: cute.Tensor, loaded: Barrier) -> None:
        """Load the CTA's rows of K or V."""
        s = self.shared
        with cute.arch.elect_one():
            loaded.arrive_expecting(cute.size(sX) * sX.element_type.width // 8)
        of = (s.tile.head_kv, s.tile.batch, s.tile.seq_k)
        tile_loads(rows, sX, of).load(s.tile.n_block, Int32(0), loaded[0])
