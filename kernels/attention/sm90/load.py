"""Load: the warp of the Hopper forward that hands out tiles and loads their Q, K and V."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from cutex.device.attention.rows import Rows, tile_loads
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.config import ForwardConfig
from cutex.kernels.attention.order import TileOrder
from cutex.kernels.attention.sm90.shared import Shared
from cutex.kernels.attention.work_ring import NORMAL, SAFE
from cutex.schedulers.dispatch import Source, Turn

Fills = tuple[PipelineState, PipelineState]  # states in the rings of K and of V
Lengths = tuple[SeqlenInfo, SeqlenInfo]  # of queries and of keys


@dataclass(frozen=True)
class Load:
    config: ForwardConfig
    order: TileOrder
    q: Rows  # with the TMA operand each
    k: Rows
    v: Rows
    source: Source
    shared: Shared

    @cute.jit
    def run(self) -> None:
        """Announce and load tile after tile.

        When a slot of Q comes back, its result is checked: a tile that failed is announced again in
        safe mode, before any other. When no tile is left, the remaining slots are waited for in
        turn.
        """
        c, order, ring = self.config, self.order, self.shared.work
        q_fill, fills = ring.q.producer(), (self.shared.k.producer(), self.shared.v.producer())
        ring.clear()
        turn = self.source.first()
        looked_at = Int32(0)  # slots checked and valid since the last tile was announced
        while turn.index < order.total or looked_at < c.q_stages:
            back = PipelineState(c.q_stages, q_fill.slot, q_fill.phase)
            back.skip(looked_at)
            ring.q.empty.wait(back.phase, back.slot)
            failed = ring.take_back(back.slot)
            work, mode = ring.work(back.slot), Int32(SAFE)
            if not failed:
                work = order.tile(cutlass.min(turn.index, order.total - 1))
                mode = Int32(NORMAL)
            if not failed and turn.index >= order.total:
                looked_at += 1
            else:
                looked_at = Int32(0)
                lengths = self.shared.lengths(work.batch)
                asked = Int32(0)
                if lengths[0].length * c.pack > work.m * c.tile_m:
                    fills, asked = self.tile(work, mode, turn, lengths, q_fill, fills)
                    q_fill.advance()
                else:
                    asked = self.ask(mode, turn)
                if not failed:
                    turn = self.source.next(turn, asked, order.total)
        ring.end(q_fill)

    @cute.jit
    def tile(
        self,
        work: WorkTile,
        mode: Int32,
        turn: Turn,
        lengths: Lengths,
        q_fill: PipelineState,
        fills: Fills,
    ) -> tuple[Fills, Int32]:
        """Load Q, and K and V block by block in the order in which the products need them. Return
        the states after, and the result of `ask`.

        NOTE: it asks for the next tile when all but the last load are issued: the answer is there
        when the last slot is empty, and a CTA that is late still gets fewer tiles.
        """
        shared, c = self.shared, self.config
        k_fill, v_fill = fills
        seq_q, seq_k = lengths
        blocks = shared.info.n_blocks(work.m, seq_q.length, seq_k.length)
        forwards = self.order.is_forwards(turn.index, c.num_ctas) if c.alternates else None
        path = blocks.path(forwards)
        head_kv = work.head // self.order.heads_per_kv
        loads_q = tile_loads(self.q, shared.sQ, (work.head, work.batch, seq_q))
        loads_k = tile_loads(self.k, shared.sK, (head_kv, work.batch, seq_k))
        loads_v = tile_loads(self.v, shared.sV, (head_kv, work.batch, seq_k))
        full = shared.work.announce(q_fill, mode, work, seq_q, seq_k, forwards)
        for wg in cutlass.range_constexpr(c.warpgroups):
            slot = q_fill.slot * c.warpgroups + wg
            loads_q.load(work.m * c.warpgroups + wg, slot, full)
        asked = Int32(0)
        if blocks.end > blocks.first:
            loads_k.load(path.block(0), k_fill.slot, shared.k.acquire(k_fill))
            k_fill.advance()
            for i in cutlass.range(blocks.end - 1 - blocks.first, unroll=1):
                loads_k.load(path.block(i + 1), k_fill.slot, shared.k.acquire(k_fill))
                k_fill.advance()
                loads_v.load(path.block(i), v_fill.slot, shared.v.acquire(v_fill))
                v_fill.advance()
            asked = self.ask(mode, turn)
            last = path.block(blocks.end - 1 - blocks.first)
            loads_v.load(last, v_fill.slot, shared.v.acquire(v_fill))
            v_fill.advance()
        else:
            asked = self.ask(mode, turn)
        return (k_fill, v_fill), asked

    @cute.jit
    def ask(self, mode: Int32, turn: Turn) -> Int32:
        """Ask for the next tile, unless this tile is a repeated one."""
        asked = Int32(0)
        if mode == NORMAL:
            asked = self.source.ask(turn)
        return asked
