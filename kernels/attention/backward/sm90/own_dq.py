"""AllGradients: the role of a warpgroup that owns 64 keys, sums dK and dV of them, and computes its
share of dQ over all keys of its CTA: half of the columns, or all of them of every other block.

    dV += P^T dO, dQ = dS K, dK += dS^T Q

Each of two such warpgroups writes its dS^T to smem, and waits for the other's before it starts dQ.
One warp of the third warpgroup loads, and takes tiles of keys from a counter, the next one when the
last load of a tile is issued: so the next tile's queries, V and K come as soon as this one's have
been read. dQ goes through two blocks' slots of smem, dV and dK go out through the same.

In any order, dQ of a block is computed beside dV and dK of the next one, so that no warpgroup waits
for the other's dS. With `alternate`, one starts S and dP when the other has started its own, then
dV, dQ and dK in the same way: one has the tensor cores while the other has exponentials.

Where adds come in one order, two more warps of the third warpgroup wait for turns, and add.
Blocks of keys add to a tile of dQ one after another, those of the first keys first. A warp adds
what one warpgroup computes: it waits for its CTA's turn at these, and passes it on when its adds
have landed. Nobody else waits for that, but for slots of smem.

Blocks of queries are taken from the last to the first: all blocks of keys see the last, so that
those that begin together follow each other through the queries, each a turn behind the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cutex.device.atoms.wgmma import WARPGROUP
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.row_store import SummedTile
from cutex.device.pipeline import Barrier, PipelineState
from cutex.device.turns import await_turn, pass_turn
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.sm90.keys import KeyGradients
from cutex.kernels.attention.backward.sm90.load import Load
from cutex.kernels.attention.backward.sm90.queries import QueryGradients
from cutex.kernels.attention.backward.sm90.scores import STORE_BARRIER, Products, round_operand
from cutex.kernels.attention.backward.sm90.shared import Shared
from cutex.kernels.attention.backward.tiles import Walk, turn_of


@dataclass(frozen=True)
class AllGradients(KeyGradients):
    queries: QueryGradients  # whose product and adds are this role's

    @staticmethod
    def of_all(config: BackwardConfig, shared: Shared, queries: QueryGradients) -> AllGradients:
        thread, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        products = Products.of(config, shared, wg, ("dv", "dk"))
        return AllGradients(config, shared, products, wg, queries)

    @cute.jit
    def run_all(self, walk: Walk, dk: cpasync.TmaInfo, dv: cpasync.TmaInfo) -> None:
        """Sum and store the gradients of one tile of keys after the other."""
        s = self.shared
        state, number, phase = s.q.consumer(), Int32(0), Int32(0)
        ticket = walk.dispatch.first()
        if self.keys == 1:
            self.leave()
        while ticket.valid:
            tile = walk.tile(ticket)
            if tile.has_keys(self.config):
                mine = replace(self, shared=replace(s, tile=tile))
                state, number = mine.sum_tile(state, number, phase)
                mine.store(dk, dv, number)
                phase ^= 1
            ticket = walk.dispatch.next(ticket)
        if self.keys == 0:
            self.enter()  # the other's last turn is over
        # NOTE: every warp has adds that read smem
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def sum_tile(
        self, state: PipelineState, number: Int32, phase: Int32
    ) -> tuple[PipelineState, Int32]:
        """Sum over the blocks of a tile of parity `phase`, which begins at slot `state` of Q and dO
        and at block `number` of all that the CTA takes; return these two behind it."""
        s, products = self.shared, self.products[0]
        products.dv.acc.fill(0.0)
        products.dk.acc.fill(0.0)
        blocks, own = s.m_blocks(), self.own_blocks()
        total, m_block = (blocks.end - blocks.first) * s.heads_per_kv, s.first_block(blocks)
        tile = s.tiles.tile(self.config, s.first_head(), s.tile.batch, s.tile.seq_q)
        s.v_loaded.wait(phase)
        s.k_loaded.wait(phase)
        rP, rdS = self.operands()
        self.await_stores()
        before = tile + m_block  # the tile of the sums of the block before
        for i in cutlass.range(total, unroll=1):
            at = state, number + i, m_block, own, rP, rdS
            if cutlass.const_expr(self.config.whole_dq):
                if at[1] % 2 == self.keys:
                    self.block(*at, (tile + m_block, number + i))
                else:
                    self.block(*at, None)
            else:
                if i > 0:
                    self.block(*at, (before, number + i - 1))
                else:
                    self.block(*at, None)
            state.advance()
            before = tile + m_block
            m_block = s.block_after(m_block, blocks)
            if m_block == s.first_block(blocks):
                tile += s.tiles.per_head
        if cutlass.const_expr(not self.config.whole_dq):  # noqa: SIM102 - known when tracing
            if total > 0:
                self.last_dq(before, number + total - 1)
        self.arrive(s.v_read)
        self.arrive(s.k_read)
        return state, number + total

    @cute.jit
    def block(
        self,
        state: PipelineState,
        number: Int32,
        m_block: Int32,
        own: Blocks,
        rP: cute.Tensor,
        rdS: cute.Tensor,
        of_dq: tuple[Int32, Int32] | None,
    ) -> None:
        """Sum over block `number` of the CTA's, and compute dQ, or this warpgroup's columns of it,
        of the block that `of_dq` says: its tile of the sums, and its number.

        NOTE: no branch on a mask or the like while products run: ptxas would wait for each of them.
        But the wait for a slot of dS stands before that for dP^T, because ptxas moves exponentials
        and loads behind a wait for products, where nothing of this warpgroup runs, and seldom
        behind a branch.
        """
        s, products = self.shared, self.products[0]
        self.enter()
        acc_s, acc_dp = self.start_s(state), self.start_dp(state)
        self.leave()
        lse = self.of_columns(0, state, 0)
        warpgroup.wait_group(1)
        self.probabilities(acc_s, m_block, own, state, 0, lse)
        delta, ds = self.of_columns(1, state, 0), s.ds.state(number)
        s.ds.wait_empty(ds)
        warpgroup.wait_group(0)
        round_operand(rP, acc_s)
        self.gradients(acc_s, acc_dp, rdS, state, 0, delta)
        self.write_ds(rdS, ds)
        self.enter()
        products.dv.of(rP).issue(state.slot, True)
        if cutlass.const_expr(of_dq is not None):
            if cutlass.const_expr(self.config.whole_dq):
                warpgroup.wait_group(0)  # for the registers of P
            acc_dq = self.start_dq(of_dq[1])
        products.dk.of(rdS).issue(state.slot, True)
        self.leave()
        warpgroup.wait_group(1)
        s.do.release(state)
        if cutlass.const_expr(of_dq is not None):
            self.hand_on(acc_dq, *of_dq)
        warpgroup.wait_group(0)
        s.q.release(state)

    @cute.jit
    def last_dq(self, tile: Int32, number: Int32) -> None:
        """Compute dQ of a tile of keys' last block."""
        self.enter()
        acc_dq = self.start_dq(number)
        self.leave()
        warpgroup.wait_group(0)
        self.hand_on(acc_dq, tile, number)

    @cute.jit
    def hand_on(self, acc_dq: cute.Tensor, tile: Int32, number: Int32) -> None:
        """Release dS of block `number`, whose dQ is computed, and start adding this warp's part of
        it to the tile of the sums, or let the warp that adds do it."""
        queue, queries, ds = self.shared.queue, self.queries, self.shared.ds
        ds.release(ds.state(number))
        if cutlass.const_expr(queue is None):
            slot = number % 2 * self.config.key_tiles + self.keys
            queries.add_from_smem(acc_dq, tile, self.keys, slot)
        else:
            queue.await_empty(number, self.keys)
            queries.write_slot(acc_dq, self.keys)
            queue.hand_over(self.keys)

    @staticmethod
    def arrive(barrier: Barrier) -> None:
        """Arrive once for this warp."""
        with cute.arch.elect_one():
            barrier.arrive()

    @cute.jit
    def start_dq(self, number: Int32) -> cute.Tensor:
        """Start this warpgroup's columns of dQ of block `number`, once both have handed dS over."""
        c, s = self.config, self.shared
        ds = s.ds.state(number)
        s.ds.full.wait(ds.phase, ds.slot)
        dq = self.queries.product(s.sK, c.head_dim, 0 if c.whole_dq else self.keys)
        acc = dq.mma.accumulator()
        for keys in cutlass.range_constexpr(c.key_tiles):
            tQrdS = dq.a[None, None, None, ds.slot * c.key_tiles + keys]
            dq.of(tQrdS).into(acc).issue(keys, keys > 0)
        return acc

    @cute.jit
    def await_stores(self) -> None:
        """Wait until the stores of the tile before have read smem, for all warps."""
        self.stored()
        cute.arch.barrier(barrier_id=STORE_BARRIER + self.keys, number_of_threads=WARPGROUP)

    @cute.jit
    def store(self, dk: cpasync.TmaInfo, dv: cpasync.TmaInfo, number: Int32) -> None:
        """Start the stores of dV and dK, through this warpgroup's slots of dQ; the CTA has taken
        `number` blocks before."""
        s, product = self.shared, self.products[0].dk
        if cutlass.const_expr(s.queue is not None):
            s.queue.await_all_empty(number, self.keys)
        # NOTE: each warp's adds, and the stores of the tile before, have read what is written here
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=STORE_BARRIER + self.keys, number_of_threads=WARPGROUP)
        self.store_tile(dv, self.products[0].dv, s.sdV)
        product.acc.store(product.acc.load() * s.args.scale)
        self.store_tile(dk, product, s.sdK)


@dataclass(frozen=True)
class Supply:
    """The role of the warp that asks for tiles, and loads everything."""

    config: BackwardConfig
    shared: Shared
    load: Load

    @cute.jit
    def run(self, walk: Walk) -> None:
        s, dispatch = self.shared, walk.dispatch
        fill, phase = s.q.producer(), Int32(0)
        ticket, announcing = dispatch.first(), dispatch.announcing()
        while ticket.valid:
            tile = walk.tile(ticket)
            if tile.has_keys(self.config):
                load = replace(self.load, shared=replace(s, tile=tile))
                fill = load.next_tile(fill, phase)
                phase ^= 1
            # NOTE: only when the last load is issued: a CTA that is late gets fewer tiles
            ticket = dispatch.announce(ticket, announcing)
            announcing.advance()


@dataclass(frozen=True)
class SumsQueue:
    """The slots, one for each warpgroup, through which it hands dQ of every other block to the warp
    that adds it.

    barrier       arrives                                     waits
    dq full[wg]   1 a warp of the warpgroup that owns keys,   the warp that adds
                  its part of a block's dQ being in smem
    dq empty[wg]  1: the warp that adds, its adds having      that warpgroup
                  read smem
    """

    full: Barrier
    empty: Barrier

    @staticmethod
    def allocate(smem: SmemAllocator, config: BackwardConfig) -> SumsQueue:
        full = Barrier.allocate(smem, "dq full", arrivals=4, slots=config.dq_slots)
        empty = Barrier.allocate(smem, "dq empty", arrivals=1, slots=config.dq_slots)
        return SumsQueue(full, empty)

    def init(self) -> None:
        self.full.init()
        self.empty.init()

    def await_full(self, number: Int32, wg: Int32) -> None:
        """Wait until dQ of block `number` is in smem."""
        self.full.wait(number // 2 % 2, wg)

    def await_empty(self, number: Int32, wg: Int32 | int) -> None:
        """Wait until dQ of block `number` - 2 has been read."""
        # NOTE: a wait for parity 1 on a fresh barrier returns at once: every slot starts empty.
        self.empty.wait(number // 2 % 2 ^ 1, wg)

    def await_all_empty(self, number: Int32, wg: Int32 | int) -> None:
        """Wait until what the warpgroup computed of the blocks before `number` has been read."""
        self.await_empty(number + (number + wg) % 2, wg)

    def hand_over(self, wg: Int32 | int) -> None:
        """Arrive once for this warp: its part of a block's dQ is in smem."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.full.arrive(wg)

    def release(self, wg: Int32) -> None:
        with cute.arch.elect_one():
            self.empty.arrive(wg)


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
            if (number + i) % 2 == self.wg:
                self.add(tile + m_block, m_block, number + i)
            m_block = s.block_after(m_block, blocks)
            if m_block == s.first_block(blocks):
                tile += s.tiles.per_head
        return number + total

    @cute.jit
    def add(self, tile: Int32, m_block: Int32, number: Int32) -> None:
        """Add dQ of block `number` to its tile, in the CTA's turn."""
        s, turns = self.shared, self.shared.args.turns
        turn = turn_of(self.config, s.info, s.tile, m_block)
        await_turn(turns, tile, Int32(0), turn)
        s.queue.await_full(number, self.wg)
        self.start(tile)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        s.queue.release(self.wg)
        self.landed()
        pass_turn(turns, tile, Int32(0), turn)

    @cute.jit
    def start(self, tile: Int32) -> None:
        """Start adding the warpgroup's slot, a lane for each part that a warp wrote to it."""
        lane = cute.arch.lane_idx()
        if lane < 4:
            mine = self.shared.sdQ[None, lane, self.wg]
            sums = SummedTile(self.sums[tile, None])
            sums.add_slot(mine, lane * cute.size(mine), Boolean(True))

    @staticmethod
    def landed() -> None:
        """Wait until this thread's adds have landed, and order what is stored next behind them."""
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")
