"""The sums of dQ where adds come in one order: warps that wait for turns, and add.

Blocks of keys add to a tile of dQ one after another, those of the first keys first. A warp adds
what one warpgroup computes, half of the columns of each block or all of every other one: it waits
for its CTA's turn at these, and passes it on when its adds have landed. Nobody else waits for that,
but for slots of smem.

Blocks of queries are taken from the last to the first: all blocks of keys see the last, so that
those that begin together follow each other through the queries, each a turn behind the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.reduction import add_bulk
from cutex.device.pipeline import Barrier
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.sm90.shared import Shared
from cutex.kernels.attention.backward.tiles import Walk
from cutex.kernels.attention.backward.turns import await_turn, pass_turn, turn_of


@dataclass(frozen=True)
class SumsQueue:
    """The slots through which a warpgroup hands its part of dQ, block by block, to the warp that
    adds it: of half of the columns two for each warpgroup, of all columns one.

    barrier         arrives                                     waits
    dq full[slot]   1 a warp of the warpgroup that owns keys,   the warp that adds
                    its part of a block's dQ being in smem
    dq empty[slot]  1: the warp that adds, its adds having      that warpgroup
                    read smem
    """

    config: BackwardConfig
    full: Barrier
    empty: Barrier

    @staticmethod
    def allocate(smem: SmemAllocator, config: BackwardConfig) -> SumsQueue:
        full = Barrier.allocate(smem, "dq full", arrivals=4, slots=config.dq_slots)
        empty = Barrier.allocate(smem, "dq empty", arrivals=1, slots=config.dq_slots)
        return SumsQueue(config, full, empty)

    def init(self) -> None:
        self.full.init()
        self.empty.init()

    def slot(self, number: Int32, wg: Int32 | int) -> Int32:
        """The slot of warpgroup `wg` for the CTA's block `number`."""
        return wg if self.config.whole_dq else number % 2 * self.config.key_tiles + wg

    def await_full(self, number: Int32, wg: Int32) -> None:
        """Wait until the warpgroup's part of block `number` is in smem."""
        self.full.wait(number // 2 % 2, self.slot(number, wg))

    def await_empty(self, number: Int32, wg: Int32 | int) -> None:
        """Wait until the warpgroup's part of block `number` - 2 has been read."""
        # NOTE: a wait for parity 1 on a fresh barrier returns at once: every slot starts empty.
        self.empty.wait(number // 2 % 2 ^ 1, self.slot(number, wg))

    def await_all_empty(self, number: Int32, wg: Int32 | int) -> None:
        """Wait until what the warpgroup computed of the blocks before `number` has been read."""
        if self.config.whole_dq:
            self.await_empty(number + (number + wg) % 2, wg)
        else:
            self.await_empty(number, wg)
            self.await_empty(number + 1, wg)

    def hand_over(self, number: Int32, wg: Int32 | int) -> None:
        """Arrive once for this warp: its part of a block's dQ is in smem."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.full.arrive(self.slot(number, wg))

    def release(self, number: Int32, wg: Int32) -> None:
        with cute.arch.elect_one():
            self.empty.arrive(self.slot(number, wg))


@dataclass(frozen=True)
class Adds:
    """The role of a warp that adds what one warpgroup computes of dQ."""

    config: BackwardConfig
    shared: Shared
    sums: cute.Tensor  # (tiles, bM * D)
    wg: Int32  # the warpgroup

    @cute.jit
    def run(self, walk: Walk) -> None:
        number, ticket = Int32(0), walk.dispatch.first()
        while ticket.valid:
            tile = walk.tile(ticket)
            if tile.has_keys(self.config):
                mine = replace(self, shared=replace(self.shared, tile=tile))
                number = mine.add_blocks(number)
            ticket = walk.dispatch.next(ticket)

    @cute.jit
    def add_blocks(self, number: Int32) -> Int32:
        """Add the blocks of a tile of keys, which begin at block `number` of the CTA's; return the
        number behind them."""
        s, blocks = self.shared, self.shared.m_blocks()
        total, m_block = (blocks.end - blocks.first) * s.heads_per_kv, s.first_block(blocks)
        tile = s.tiles.tile(self.config, s.first_head(), s.tile.batch, s.tile.seq_q)
        for i in cutlass.range(total, unroll=1):
            if cutlass.const_expr(self.config.whole_dq):
                if (number + i) % 2 == self.wg:
                    self.add(tile + m_block, m_block, number + i)
            else:
                self.add(tile + m_block, m_block, number + i)
            m_block = s.block_after(m_block, blocks)
            if m_block == s.first_block(blocks):
                tile += s.tiles.per_head
        return number + total

    @cute.jit
    def add(self, tile: Int32, m_block: Int32, number: Int32) -> None:
        """Add this warp's part of block `number` to its tile, in the CTA's turn."""
        s, turns = self.shared, self.shared.args.turns
        turn, part = turn_of(self.config, s.info, s.tile, m_block), self.wg
        if cutlass.const_expr(self.config.whole_dq):
            part = Int32(0)
        await_turn(turns, tile, part, turn)
        s.queue.await_full(number, self.wg)
        self.start(tile, number)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        s.queue.release(number, self.wg)
        self.landed()
        pass_turn(turns, tile, part, turn)

    @cute.jit
    def start(self, tile: Int32, number: Int32) -> None:
        """Start adding block `number`, a lane for each part that a warp wrote to the slot."""
        c, s, lane = self.config, self.shared, cute.arch.lane_idx()
        parts = c.head_dim // c.dq_columns
        if lane < 4:
            mine = s.sdQ[None, lane, s.queue.slot(number, self.wg)]
            size = cute.size(mine)
            part = 0 if parts == 1 else self.wg
            to = self.sums[tile, None].iterator + (lane * parts + part) * size
            add_bulk(to, mine.iterator, 4 * size)
            cute.arch.cp_async_bulk_commit_group()

    @staticmethod
    def landed() -> None:
        """Wait until this thread's adds have landed, and order what is stored next behind them."""
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")
