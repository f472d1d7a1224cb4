"""Load: the role of the warp that brings everything by TMA: K and V once; of each block of queries,
Q with its rows' LSE and delta, and dO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from cutex.device.attention.rows import Rows, tile_loads
from cutex.device.pipeline import Barrier, PipelineState
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
            of = (head, s.tile.batch, s.tile.seq_q)
            if i == 0:
                self.keys(self.k, s.sK, b.k_loaded)
            self.queries(i, of, m_block, fill_q)
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
    def queries(self, i: Int32, of: Any, m_block: Int32, fill: PipelineState) -> None:
        """Load Q of block i, the queries m_block of `of` (head, batch, seqlen), with LSE and
        delta. By halves, the other CTA's columns come when S of the block before has read them."""
        s = self.shared
        b = s.barriers
        full = b.q.acquire(fill)
        if cutlass.const_expr(not s.config.halves):
            tile_loads(self.q, s.sQ, of).load(m_block, fill.slot, full)
        else:
            tile_loads(self.q, s.sQ, of, s.split).load(m_block, fill.slot, full)
            # NOTE: a wait for parity 1 on a fresh barrier returns at once
            b.s_full.wait((i & 1) ^ 1)
            tile_loads(self.q, s.sQ, of, 1 - s.split).load(m_block, Int32(s.other_half), full)
        tile = s.tiles.tile(s.config, *of) + m_block
        bulk_load(self.stats[tile, None], s.stats[None, fill.slot], full)

    @cute.jit
    def keys(self, rows: Rows, sX: cute.Tensor, loaded: Barrier) -> None:
        """Load the CTA's rows of K or V."""
        s = self.shared
        with cute.arch.elect_one():
            loaded.arrive_expecting(cute.size(sX) * sX.element_type.width // 8)
        of = (s.tile.head_kv, s.tile.batch, s.tile.seq_k)
        tile_loads(rows, sX, of).load(s.tile.n_block, Int32(0), loaded[0])
