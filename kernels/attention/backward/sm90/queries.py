"""QueryGradients: the role of the warpgroup that computes dQ = dS K, block by block, and adds it to
the sums in global memory.

It adds straight from its registers, four numbers of a thread at a time: a tile of the sums is
stored in the order of the accumulators, so that a warp adds to 512 bytes in a row, and nothing
passes through smem, which is what the other products wait for.

Deterministic, CTAs add to a tile one after another: each warp waits for its turn at its part of the
tile, and passes it on when its adds are done.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cutex.device.atoms.mma import contiguous_rows_layout
from cutex.device.atoms.reduction import add_vector
from cutex.device.atoms.wgmma import ROWS, WARPGROUP, Wgmma, WgmmaProduct
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.sm90.load import Load
from cutex.kernels.attention.backward.sm90.shared import Shared

WIDE = 8  # columns of an accumulator of which a thread has 4 numbers


@dataclass(frozen=True)
class QueryGradients:
    config: BackwardConfig
    shared: Shared
    load: Load
    dq_sums: cute.Tensor  # (tiles, bM * D)

    @cute.jit
    def run(self) -> None:
        """Load everything, and compute dQ of each block when dS has been handed over."""
        c, s = self.config, self.shared
        loads = cute.arch.warp_idx() % 4 == 0
        blocks = s.m_blocks()
        count = blocks.end - blocks.first
        total = count * s.heads_per_kv
        if loads:
            self.load.keys()
            fill = s.q.producer()
            for i in cutlass.range(cutlass.min(total, c.num_stages), unroll=1):
                self.load.queries(i, fill)
                fill.advance()
        state, before = s.q.consumer(), s.q.consumer()
        s.k_loaded.wait(0)
        tile = s.tiles.tile(c, s.first_head(), s.tile.batch, s.tile.seq_q)
        m_block = blocks.first
        for i in cutlass.range(total, unroll=1):
            s.ds.full.wait(state.phase, state.slot)
            # NOTE: before the adds, which take long. Who handed this dS over has released the slots
            # of the block before.
            following = i - 1 + c.num_stages
            if loads & (i > 0) & (following < total):
                self.load.queries(following, before)
            before = PipelineState(c.num_stages, state.slot, state.phase)
            self.block(tile + m_block, m_block, state)
            state.advance()
            m_block += 1
            if m_block == blocks.end:
                m_block = blocks.first
                tile += s.tiles.per_head
        with cute.arch.elect_one():
            s.k_read.arrive()

    @cute.jit
    def block(self, tile: Int32, m_block: Int32, state: PipelineState) -> None:
        """Compute dQ of a block from the slot of dS, a part of its columns at a time, and release
        the slot."""
        c, s = self.config, self.shared
        sums = self.dq_sums[tile, None]  # (bM * D)
        thread, _, _ = cute.arch.thread_idx()
        vectors = cute.logical_divide(sums, cute.make_layout(4))  # (4, NumV)
        parts, units = c.head_dim // c.dq_columns, c.dq_columns // WIDE
        # NOTE: not unrolled, so that one part's accumulators do not outlive the next one's start
        for part in cutlass.range(parts, unroll=1):
            dq = self.product(part)
            acc = dq.mma.accumulator()
            for wg in cutlass.range_constexpr(c.warpgroups):
                tQrdS = dq.a[None, None, None, state.slot * c.warpgroups + wg]
                dq.of(tQrdS).into(acc).issue(wg, wg > 0)
            warpgroup.wait_group(0)
            if part == parts - 1:
                s.ds.release(state)
            if cutlass.const_expr(c.deterministic):  # noqa: SIM102 - known when tracing
                if part == 0:
                    self.await_turn(tile, m_block)
            for j in cutlass.range_constexpr(units):
                at = (part * units + j) * WARPGROUP + thread % WARPGROUP
                add_vector(vectors[None, at].iterator, tuple(acc[4 * j + i] for i in range(4)))

        if cutlass.const_expr(c.deterministic):
            self.pass_turn(tile, m_block)

    def turn(self, m_block: Int32) -> Int32:
        """How many key blocks add to a block of queries before this CTA's."""
        s = self.shared
        blocks = s.info.n_blocks(m_block, s.tile.seq_q.length, s.tile.seq_k.length)
        if self.config.last_first:
            return blocks.end - 1 - s.tile.n_block
        return s.tile.n_block - blocks.first

    def flag(self, tile: Int32) -> cute.Pointer:
        return self.shared.passed.turns[tile, None].iterator + cute.arch.warp_idx() % 4

    @cute.jit
    def await_turn(self, tile: Int32, m_block: Int32) -> None:
        turn, flag = self.turn(m_block), self.flag(tile)
        if cute.arch.lane_idx() == 0:
            now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
            while now != turn:
                now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
        cute.arch.sync_warp()

    @cute.jit
    def pass_turn(self, tile: Int32, m_block: Int32) -> None:
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.store(self.flag(tile), self.turn(m_block) + 1, sem="release", scope="gpu")

    def product(self, part: Int32) -> WgmmaProduct:
        """The product of a part of dQ's columns; its A is dS of all slots."""
        c, s = self.config, self.shared
        dtype, major = s.sK.element_type, OperandMajorMode.MN
        mma = Wgmma(c.dq_columns, dtype, a_major=major, b_major=major)
        slots = c.warpgroups * c.num_stages
        transposed = contiguous_rows_layout(dtype, c.tile_m, ROWS, slots)
        sdS = cute.make_tensor(s.sdS.iterator, transposed.outer)  # (bM, 64, WG * SLOT)
        transposed = contiguous_rows_layout(dtype, c.head_dim, ROWS, c.warpgroups)
        sKt = cute.make_tensor(s.sK.iterator, transposed.outer)  # (D, 64, WG)
        sKt = cute.local_tile(sKt, (c.dq_columns, ROWS, c.warpgroups), (part, 0, 0))
        return WgmmaProduct(mma, mma.a_slots(sdS), mma.b_slots(sKt), None)
