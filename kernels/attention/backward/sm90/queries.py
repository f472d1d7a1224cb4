"""QueryGradients: the role of the warpgroup that computes dQ = dS K, block by block, and adds it to
the sums in global memory.

A tile of the sums is stored in the order of the accumulators, warp by warp, so that a warp adds
contiguous bytes, and nothing is transposed. Columns are added either from a slot of smem, by a bulk
copy (`dq_slots` > 0), or straight from the registers, which needs fewer of them.

CTAs of a pair own neighbouring keys. Each computes half of the columns of dQ, over the keys of
both: it has these columns of the other one's K, and the two copy each other dS as soon as it is
there. So each adds half as much.

Deterministic, CTAs add to a tile one after another: each warp waits for its turn at its part of the
tile, and passes it on when its adds are done. It does both under a product: passes on the turn of
the block before, whose adds have landed by then, and waits for this block's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cutex.device.atoms.dsmem import copy_to_cta
from cutex.device.atoms.mma import contiguous_rows_layout
from cutex.device.atoms.wgmma import ROWS, Wgmma, WgmmaProduct
from cutex.device.attention.row_store import SummedTile
from cutex.device.pipeline import PipelineState
from cutex.device.turns import await_turn, pass_turn
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.sm90.shared import Shared, other_cta
from cutex.kernels.attention.backward.tiles import turn_of

WIDE = 8  # columns of an accumulator of which a thread has 4 numbers


@dataclass(frozen=True)
class QueryGradients:
    config: BackwardConfig
    shared: Shared
    load: Any  # a Load; None where another role loads
    dq_sums: cute.Tensor  # (tiles, bM * D)

    @cute.jit
    def run(self) -> None:
        """Load everything, and compute dQ of each block when dS has been handed over."""
        c, s = self.config, self.shared
        loads = cute.arch.warp_idx() % 4 == 0
        blocks = s.m_blocks()
        count = blocks.end - blocks.first
        total = count * s.heads_per_kv
        fill = s.q.producer()
        if loads:
            self.load.keys()
            for i in cutlass.range(cutlass.min(total, c.num_stages), unroll=1):
                self.load.queries(i, fill)
                fill.advance()
        s.k_loaded.wait(0)
        tile = s.tiles.tile(c, s.first_head(), s.tile.batch, s.tile.seq_q)
        m_block = blocks.first
        earlier, earlier_turn = tile, Int32(-1)  # of the block before
        for i in cutlass.range(total, unroll=1):
            ds = s.ds.state(i)
            s.ds.full.wait(ds.phase, ds.slot)
            if cutlass.const_expr(c.pairs):  # noqa: SIM102 - known when tracing
                if loads:
                    self.send(ds)
            # NOTE: before the adds, which take long. Who handed this dS over has released the slots
            # of the block before.
            following = i - 1 + c.num_stages
            if loads & (i > 0) & (following < total):
                self.load.queries(following, fill)
                fill.advance()
            turn = turn_of(c, s.info, s.tile, m_block) if c.deterministic else Int32(0)
            self.block(i, tile + m_block, turn, (earlier, earlier_turn))
            earlier, earlier_turn = tile + m_block, turn
            m_block += 1
            if m_block == blocks.end:
                m_block = blocks.first
                tile += s.tiles.per_head
        with cute.arch.elect_one():
            s.k_read.arrive()
        if cutlass.const_expr(c.deterministic):
            pass_turn(s.args.turns, earlier, self.turn_part(), earlier_turn)
        else:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        if cutlass.const_expr(c.pairs):
            s.ds.drain(total)  # the other CTA has nothing left to signal here

    @cute.jit
    def send(self, ds: PipelineState) -> None:
        """Copy a slot of dS to the other CTA. The first warp calls it."""
        c, s = self.config, self.shared
        with cute.arch.elect_one():
            s.ds_sent.arrive_expecting(c.ds_bytes, ds.slot)  # what the other one sends
            here = s.sdS[None, None, ds.slot * c.key_tiles].iterator
            there = s.sdS[None, None, (c.ds_slots + ds.slot) * c.key_tiles].iterator
            copy_to_cta(there, here, c.ds_bytes, s.ds_sent[ds.slot], other_cta())

    @cute.jit
    def block(self, number: Int32, tile: Int32, turn: Int32, earlier: tuple[Int32, Int32]) -> None:
        """Compute dQ of a block from its slot of dS, a part of the columns at a time, release the
        slot, and start adding."""
        c, s = self.config, self.shared
        ds = s.ds.state(number)
        parts = c.dq_width // c.dq_columns
        first = Int32(0)
        if cutlass.const_expr(c.pairs):
            first = cute.arch.block_idx_in_cluster() * parts
        # NOTE: not unrolled, so that one part's accumulators do not outlive the next one's start
        for part in cutlass.range(parts, unroll=1):
            dq = self.product(s.sK, c.head_dim, first + part)
            acc = dq.mma.accumulator()
            for keys in cutlass.range_constexpr(c.key_tiles):
                tQrdS = dq.a[None, None, None, ds.slot * c.key_tiles + keys]
                dq.of(tQrdS).into(acc).issue(keys, keys > 0)
            if cutlass.const_expr(c.pairs):
                if part == 0:
                    s.ds_sent.wait(ds.phase, ds.slot)
                dq = self.product(s.sKp, c.dq_width, part)
                for keys in cutlass.range_constexpr(c.key_tiles):
                    slot = (c.ds_slots + ds.slot) * c.key_tiles + keys
                    dq.of(dq.a[None, None, None, slot]).into(acc).issue(keys, True)
            if cutlass.const_expr(c.deterministic):  # noqa: SIM102 - known when tracing
                if part == 0:
                    pass_turn(s.args.turns, earlier[0], self.turn_part(), earlier[1])
                    await_turn(s.args.turns, tile, self.turn_part(), turn)
            warpgroup.wait_group(0)
            if part == parts - 1:
                s.ds.release(ds)
            if cutlass.const_expr(c.dq_slots > 0):
                self.add_from_smem(acc, tile, first + part, self.dq_slot(number, part))
            else:
                self.add_from_registers(acc, tile, first + part)

    def turn_part(self) -> Int32:
        """The part of a tile of dQ that this warp adds to."""
        part = cute.arch.warp_idx() % 4
        return part + 4 * cute.arch.block_idx_in_cluster() if self.config.pairs else part

    def dq_slot(self, number: Int32, part: Int32) -> Int32:
        """The slot of smem through which a part of dQ of block `number` is added."""
        parts = self.config.dq_width // self.config.dq_columns
        if parts % self.config.dq_slots == 0:
            return part % self.config.dq_slots
        return (number * parts + part) % self.config.dq_slots

    @cute.jit
    def add_from_smem(self, acc: cute.Tensor, tile: Int32, part: Int32, slot: Int32) -> None:
        """Start adding this warp's part of columns of dQ, through a slot of smem."""
        c = self.config
        warp, lane = cute.arch.warp_idx() % 4, cute.arch.lane_idx()
        cute.arch.cp_async_bulk_wait_group(c.dq_slots // c.dq_warpgroups - 1, read=True)
        cute.arch.sync_warp()
        self.write_slot(acc, slot)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        mine = self.shared.sdQ[None, warp, slot]  # (units * 128)
        number = warp * (c.head_dim // c.dq_columns) + part  # of equal parts of the tile
        sums = SummedTile(self.dq_sums[tile, None])
        sums.add_slot(mine, number * cute.size(mine), lane == 0)

    @cute.jit
    def write_slot(self, acc: cute.Tensor, slot: Int32) -> None:
        """Write this warp's part of columns of dQ to a slot of smem."""
        units = self.config.dq_columns // WIDE
        mine = self.shared.sdQ[None, cute.arch.warp_idx() % 4, slot]  # (units * 128)
        vectors = cute.logical_divide(mine, cute.make_layout(4))  # (4, NumV)
        numbers = cute.make_tensor(acc.iterator, cute.make_layout((4, units)))
        for j in cutlass.range_constexpr(units):
            cute.autovec_copy(numbers[None, j], vectors[None, j * 32 + cute.arch.lane_idx()])

    @cute.jit
    def add_from_registers(self, acc: cute.Tensor, tile: Int32, part: Int32) -> None:
        """Add this thread's numbers of columns of dQ, four at a time."""
        c = self.config
        warp, lane = cute.arch.warp_idx() % 4, cute.arch.lane_idx()
        sums, units = SummedTile(self.dq_sums[tile, None]), c.dq_columns // WIDE
        numbers = cute.make_tensor(acc.iterator, cute.make_layout((4, units)))
        for j in cutlass.range_constexpr(units):
            at = (warp * (c.head_dim // WIDE) + part * units + j) * 32 + lane
            sums.add(at, numbers[None, j])

    def product(self, sK: cute.Tensor, width: int, part: Int32) -> WgmmaProduct:
        """The product of a part of dQ's columns, of the `width` of sK; its A is dS of all slots."""
        c, s = self.config, self.shared
        dtype, major = sK.element_type, OperandMajorMode.MN
        mma = Wgmma(c.dq_columns, dtype, a_major=major, b_major=major)
        slots = c.key_tiles * c.ds_slots * c.key_ctas
        transposed = contiguous_rows_layout(dtype, c.tile_m, ROWS, slots)
        sdS = cute.make_tensor(s.sdS.iterator, transposed.outer)  # (bM, 64, WG * SLOT)
        transposed = contiguous_rows_layout(dtype, width, ROWS, c.key_tiles)
        sKt = cute.make_tensor(sK.iterator, transposed.outer)  # (D, 64, WG)
        sKt = cute.local_tile(sKt, (c.dq_columns, ROWS, c.key_tiles), (part, 0, 0))
        return WgmmaProduct(mma, mma.a_slots(sdS), mma.b_slots(sKt), None)
