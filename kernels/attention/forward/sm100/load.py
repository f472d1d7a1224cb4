"""The load role: one warp hands out tiles, and loads Q, K and V by TMA.

Each CTA of a pair has one: it loads its own rows of Q and its half of K and V.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.attention.rows import Rows, tile_loads
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.forward.sm100.config import Sm100ForwardConfig
from cutex.kernels.attention.forward.sm100.tiles import Shared
from cutex.kernels.attention.work_ring import NORMAL
from cutex.schedulers.dispatch import SelfDispatch

Fills = tuple[PipelineState, PipelineState, PipelineState]  # states in the rings of Q, K and V


@dataclass(frozen=True)
class Load:
    config: Sm100ForwardConfig
    q: cpasync.TmaInfo
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    dispatch: SelfDispatch
    heads_per_kv: Int32  # owners of tiles that read one head of K and V

    @cute.jit
    def run(self, shared: Shared) -> None:
        """Announce and load tile after tile; when none is left, wait for the roles to be done with
        all, and say so."""
        c, tiles = self.config, shared.work
        for operand in (self.q, self.k, self.v):
            cpasync.prefetch_descriptor(operand.atom)
        fill = tiles.q.producer()
        b = shared.barriers
        q_fill, k_fill, v_fill = (
            PipelineState(1, Int32(0), Int32(1)),
            b.k.producer(),
            b.v.producer(),
        )
        ticket = self.dispatch.first()
        while ticket.valid:
            work = self.dispatch.tile(ticket)
            seq_q, seq_k = shared.lengths(work.batch)
            if work.m * c.tile_m < seq_q.length * c.pack:
                tiles.q.empty.wait(fill.phase, fill.slot)
                tiles.announce(fill, Int32(NORMAL), work, seq_q, seq_k)
                fill.advance()
                q_fill, k_fill, v_fill = self.load_tile(
                    shared, work, (seq_q, seq_k), (q_fill, k_fill, v_fill)
                )
            # ask only after these loads are issued: a CTA that is late gets fewer tiles
            ticket = self.dispatch.next(ticket)
        tiles.q.drain(fill)
        tiles.end(fill)
        if cutlass.const_expr(c.pair):
            # NOTE: the peer's MMA may still arrive here, so this CTA must not have exited
            for ring, state in ((b.k, k_fill), (b.v, v_fill)):
                for _ in cutlass.range_constexpr(c.num_stages):
                    ring.empty.wait(state.phase, state.slot)
                    state.advance()
            for t in cutlass.range_constexpr(c.q_tiles):
                b.q.empty.wait(q_fill.phase, t)

    @cute.jit
    def load_tile(
        self, shared: Shared, work: WorkTile, lengths: tuple[SeqlenInfo, SeqlenInfo], fills: Fills
    ) -> Fills:
        """Load Q, and K and V block by block in the order in which the products need them; return
        the states after."""
        c, b = self.config, shared.barriers
        seq_q, seq_k = lengths
        q_fill, k_fill, v_fill = fills
        end, count, _ = shared.spans(work, seq_q.length, seq_k.length)
        rank = shared.rank()
        head_kv = work.head // self.heads_per_kv
        of_q, of_k = Rows(self.q, c.pack, c.ragged_q), Rows(self.k, 1, c.ragged_k)
        of_v = Rows(self.v, 1, c.ragged_k)
        loads_q = tile_loads(of_q, shared.sQ, (work.head, work.batch, seq_q), 0)
        loads_k = tile_loads(of_k, shared.sK, (head_kv, work.batch, seq_k), 0)
        loads_v = tile_loads(of_v, shared.sV, (head_kv, work.batch, seq_k), rank)
        for t in cutlass.range_constexpr(c.q_tiles):
            state = PipelineState(c.q_tiles, Int32(t), q_fill.phase)
            loads_q.load(shared.row_block(work, t), t, b.q.acquire(state))
        q_fill.advance()
        for i in cutlass.range(count, unroll=1):
            n_block = end - 1 - i
            loads_k.load(n_block * c.ctas + rank, k_fill.slot, b.k.acquire(k_fill))
            k_fill.advance()
            loads_v.load(n_block, v_fill.slot, b.v.acquire(v_fill))
            v_fill.advance()
        return q_fill, k_fill, v_fill
