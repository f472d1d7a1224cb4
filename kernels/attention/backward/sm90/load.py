"""Load: the loads of a CTA of the Hopper backward, by the first warp of the group that computes dQ.

K and V once; of each block of queries, Q with its rows' LSE and delta, and dO. That warpgroup
follows the others by a block, and waits for slots that they have just released.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from cutex.device.atoms.tma import bulk_load
from cutex.device.attention.rows import Rows, tile_loads
from cutex.device.pipeline import Barrier, PipelineState
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.sm90.shared import Shared


@dataclass(frozen=True)
class Load:
    config: BackwardConfig
    q: Rows  # with the TMA operand each
    k: Rows
    v: Rows
    do: Rows
    kp: Rows | None  # K of which a pair's other CTA has the keys, half of the columns
    stats: cute.Tensor  # (tiles, 2 * bM) LSE, then delta
    shared: Shared

    @cute.jit
    def keys(self) -> None:
        """Load K and V, 64 keys for each warpgroup. A whole warp calls it, as the next."""
        c, s = self.config, self.shared
        self.of_keys(self.k, s.sK, s.k_loaded, c.pairs * c.tile_n * c.dq_width * 2)
        if cutlass.const_expr(c.pairs):
            of = (s.tile.head_kv, s.tile.batch, s.tile.seq_k)
            loads = tile_loads(self.kp, s.sKp, of, part=cute.arch.block_idx_in_cluster())
            for wg in cutlass.range_constexpr(c.key_tiles):
                loads.load((s.tile.n_block ^ 1) * c.key_tiles + wg, wg, s.k_loaded[0])
        self.of_keys(self.v, s.sV, s.v_loaded)

    @cute.jit
    def of_keys(
        self, rows: Rows, sX: cute.Tensor, loaded: Barrier, more: cutlass.Constexpr[int] = 0
    ) -> None:
        """Load K or V; `more` bytes follow behind the same barrier."""
        c, tile = self.config, self.shared.tile
        loads = tile_loads(rows, sX, (tile.head_kv, tile.batch, tile.seq_k))
        with cute.arch.elect_one():
            loaded.arrive_expecting(c.tile_n * cute.size(sX, mode=[1]) * 2 + more)
        for wg in cutlass.range_constexpr(c.key_tiles):
            loads.load(tile.n_block * c.key_tiles + wg, wg, loaded[0])

    @cute.jit
    def next_tile(self, fill: PipelineState, phase: Int32) -> PipelineState:
        """Load one of several tiles of a CTA, of parity `phase`, and its blocks of queries; return
        the state behind them. What the tile before does not need any more comes first."""
        s, blocks = self.shared, self.shared.m_blocks()
        total = (blocks.end - blocks.first) * s.heads_per_kv
        if total > 0:
            self.queries(Int32(0), fill)
            fill.advance()
        s.v_read.wait(phase ^ 1)
        self.of_keys(self.v, s.sV, s.v_loaded)
        s.k_read.wait(phase ^ 1)
        self.of_keys(self.k, s.sK, s.k_loaded)
        for i in cutlass.range(1, total, unroll=1):
            self.queries(i, fill)
            fill.advance()
        return fill

    @cute.jit
    def queries(self, number: Int32, state: PipelineState) -> None:
        """Load block `number` of those that the CTA takes, of all its heads, once its slots are
        empty."""
        c, s = self.config, self.shared
        blocks = s.m_blocks()
        count = blocks.end - blocks.first
        turn = number // count
        m_block = blocks.first + number - turn * count
        if cutlass.const_expr(s.descending):
            m_block = blocks.end - 1 - number + turn * count
        of = (s.first_head() + turn, s.tile.batch, s.tile.seq_q)
        tile = s.tiles.tile(c, *of) + m_block
        full = s.q.acquire(state)
        tile_loads(self.q, s.sQ, of).load(m_block, state.slot, full)
        bulk_load(self.stats[tile, None], s.stats[None, state.slot], full)
        full = s.do.acquire(state)
        tile_loads(self.do, s.sdO, of).load(m_block, state.slot, full)
