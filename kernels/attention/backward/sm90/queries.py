"""The roles that compute dQ, and add it to the sums in global memory.

QueryGradients  a warpgroup of its own
AllGradients    a warpgroup that owns keys, too
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from cutex.device.atoms.dsmem import copy_to_cta
from cutex.device.atoms.mma import contiguous_rows_layout
from cutex.device.atoms.wgmma import ROWS, WARPGROUP, Wgmma, WgmmaProduct
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.row_store import SummedTile
from cutex.device.handover import other_cta
from cutex.device.pipeline import Barrier, PipelineState
from cutex.device.turns import await_turn, pass_turn
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.sm90.keys import KeyGradients
from cutex.kernels.attention.backward.sm90.scores import STORE_BARRIER, Products, round_operand
from cutex.kernels.attention.backward.sm90.shared import Shared, number_of_part
from cutex.kernels.attention.backward.tiles import Walk, turn_of

WIDE = 8  # columns of an accumulator of which a thread has 4 numbers


@dataclass(frozen=True)
class QueryGradients:
    """The role of the warpgroup that computes dQ = dS K, block by block, and adds it to the sums in
    global memory.

    A tile of the sums is stored in the order of the accumulators, warp by warp, so that a warp adds
    contiguous bytes, and nothing is transposed. Columns are added either from a slot of smem, by a
    bulk copy (`dq_slots` > 0), or straight from the registers, which needs fewer of them.

    CTAs of a pair own neighbouring keys. Each computes half of the columns of dQ, over the keys of
    both: it has these columns of the other one's K, and the two copy each other dS as soon as it is
    there. So each adds half as much.

    Deterministic, CTAs add to a tile one after another: each warp waits for its turn at its part of
    the tile, and passes it on when its adds are done. It does both under a product: passes on the
    turn of the block before, whose adds have landed by then, and waits for this block's.
    """

    config: BackwardConfig
    shared: Shared
    load: Any  # a Load; None where another role loads
    dq_sums: cute.Tensor  # (tiles, bM * D)

    @cute.jit
    def run(self) -> None:
        """Load everything, or with `dk_loads` what comes first, and compute dQ of each block when
        dS has been handed over."""
        c, s = self.config, self.shared
        loads = cute.arch.warp_idx() % 4 == 0
        blocks = s.m_blocks()
        count = blocks.end - blocks.first
        total = count * s.heads_per_kv
        fill = s.q.producer()
        if loads:
            self.load.keys()
            self.load.await_preprocess()
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
            if cutlass.const_expr(not c.dk_loads):  # noqa: SIM102 - known when tracing
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
        number = number_of_part(c, warp, part)
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
        columns = part
        if cutlass.const_expr(c.tile_m > ROWS):
            sdS = cute.local_tile(sdS, (ROWS, ROWS, slots), (part, 0, 0))
            columns = 0
        transposed = contiguous_rows_layout(dtype, width, ROWS, c.key_tiles)
        sKt = cute.make_tensor(sK.iterator, transposed.outer)  # (D, 64, WG)
        sKt = cute.local_tile(sKt, (c.dq_columns, ROWS, c.key_tiles), (columns, 0, 0))
        return WgmmaProduct(mma, mma.a_slots(sdS), mma.b_slots(sKt), None)


@dataclass(frozen=True)
class AllGradients(KeyGradients):
    """The role of a warpgroup that owns 64 keys, sums dK and dV of them, and computes its share of
    dQ over all keys of its CTA: half of the columns or, of 128 queries, 64 of them.

        dV += P^T dO, dQ = dS K, dK += dS^T Q

    Each of two such warpgroups writes its dS^T to smem, and waits for the other's before it starts
    dQ. One warp of the third warpgroup loads, and takes tiles of keys from a counter, the next one
    when the last load of a tile is issued: so the next tile's queries, V and K come as soon as this
    one's have been read. dQ goes through two blocks' slots of smem, dV and dK go out through the
    same.

    dQ of a block is computed beside dV and dK of the next one, so that no warpgroup waits for the
    other's dS. With `alternate`, one starts S and dP when the other has started its
    own, then dV, dQ and dK in the same way: one has the tensor cores while the other has
    exponentials. Where no query of a tile's first block sees a warpgroup's keys, it passes over it.

    Where adds come in one order, and the mask leaves out early queries, the last keys add first,
    and are taken first: those that begin together begin at queries of their own, two blocks apart,
    so that each adds behind the one before without a wait. The last group of heads is taken the
    other way around, so that the shortest tiles end last. Where the mask leaves out none, those
    of a head that begin together are spread over all queries (tiles.Rotation); of sequences of
    several lengths, and with a window, blocks of queries are taken from the last to the first.
    """

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
            if cutlass.const_expr(self.config.spread):
                for which in cutlass.range(walk.pieces(ticket), unroll=1):
                    tile, piece = walk.piece(ticket, which)
                    if tile.has_keys(self.config):
                        mine = replace(self, shared=replace(s, tile=tile))
                        state, number = mine.sum_tile(state, number, phase, piece)
                        mine.finish_piece(walk.dispatch.order, ticket, piece, (dk, dv, number))
                        phase ^= 1
            else:
                tile = walk.tile(ticket)
                if tile.has_keys(self.config):
                    mine = replace(self, shared=replace(s, tile=tile))
                    state, number = mine.sum_tile(state, number, phase)
                    mine.store_or_keep(dk, dv, number)
                    phase ^= 1
            ticket = walk.dispatch.next(ticket)
        if self.keys == 0:
            self.enter()  # the other's last turn is over
        # NOTE: every warp has adds that read smem
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def sum_tile(
        self, state: PipelineState, number: Int32, phase: Int32, piece: Any = None
    ) -> tuple[PipelineState, Int32]:
        """Sum over the blocks of a tile of parity `phase`, or of a `piece` of one, which begins at
        slot `state` of Q and dO and at block `number` of all that the CTA takes; return these two
        behind it."""
        s, products = self.shared, self.products[0]
        products.dv.acc.fill(0.0)
        products.dk.acc.fill(0.0)
        blocks, own = s.m_blocks(), self.own_blocks()
        total, m_block = (blocks.end - blocks.first) * s.heads_per_kv, s.first_block(blocks)
        tile = s.tiles.tile(self.config, s.first_head(), s.tile.batch, s.tile.seq_q)
        if cutlass.const_expr(piece is not None):
            total = piece.end - piece.first
            count = blocks.end - blocks.first
            head = piece.first // count
            m_block = blocks.first + piece.first - head * count
            tile += head * s.tiles.per_head
        s.v_loaded.wait(phase)
        s.k_loaded.wait(phase)
        rP, rdS = self.operands()
        self.await_stores()
        before = tile + m_block  # the tile of the sums of the block before
        for i in cutlass.range(total, unroll=1):
            at = state, number + i, m_block, own, rP, rdS
            if i > 0:
                self.block(*at, (before, number + i - 1))
            else:
                self.first_block(*at)
            state.advance()
            before = tile + m_block
            m_block = s.block_after(m_block, blocks)
            if m_block == s.first_block(blocks):
                tile += s.tiles.per_head
        self.arrive(s.v_read)
        if total > 0:
            self.last_dq(before, number + total - 1)
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
        of_dq: Any,
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
        c, lse, delta = self.config, None, None
        if cutlass.const_expr(c.early_stats):
            lse = self.of_columns(0, state, 0)
        warpgroup.wait_group(1)
        self.probabilities(acc_s, m_block, own, state, 0, lse)
        if cutlass.const_expr(c.tile_m == ROWS):  # of twice as many, registers do not suffice
            delta = self.of_columns(1, state, 0)
        ds = s.ds.state(number)
        s.ds.wait_empty(ds)
        warpgroup.wait_group(0)
        round_operand(rP, acc_s)
        self.gradients(acc_s, acc_dp, rdS, state, 0, delta)
        self.write_ds(rdS, ds)
        self.enter()
        if cutlass.const_expr(c.dq_last):
            products.dk.of(rdS).issue(state.slot, True)
        products.dv.of(rP).issue(state.slot, True)
        acc_dq: Any = None
        if cutlass.const_expr(of_dq is not None):
            acc_dq = self.start_dq(of_dq[1])
        if cutlass.const_expr(not c.dq_last):
            products.dk.of(rdS).issue(state.slot, True)
        self.leave()
        # NOTE: dS is for the next turn's dQ. It is handed over behind this turn's dQ, so that one
        # fence, which takes long, serves both; else the fence runs under the products.
        if cutlass.const_expr(of_dq is None or not c.one_fence):
            s.ds.hand_over(ds)
        self.finish(state, ds, acc_dq, of_dq)

    @cute.jit
    def finish(self, state: PipelineState, ds: PipelineState, acc_dq: Any, of_dq: Any) -> None:
        """Wait for the products of a turn, release what each has read, and hand on dQ and then the
        slot `ds` of dS."""
        s, dq = self.shared, of_dq is not None
        if cutlass.const_expr(self.config.dq_last):
            warpgroup.wait_group(1 + dq)
            s.q.release(state)
            warpgroup.wait_group(int(dq))
            s.do.release(state)
            if cutlass.const_expr(dq):
                warpgroup.wait_group(0)
                self.hand_on(acc_dq, *of_dq)
                self.hand_over_behind(ds)
        else:
            warpgroup.wait_group(1)
            s.do.release(state)
            if cutlass.const_expr(dq):
                self.hand_on(acc_dq, *of_dq)
                self.hand_over_behind(ds)
            warpgroup.wait_group(0)
            s.q.release(state)

    def hand_over_behind(self, ds: PipelineState) -> None:
        """Hand the slot `ds` of dS over behind the fence of dQ, if it has none of its own."""
        if self.config.one_fence:
            self.shared.ds.hand_over_fenced(ds)

    @cute.jit
    def first_block(
        self,
        state: PipelineState,
        number: Int32,
        m_block: Int32,
        own: Blocks,
        rP: cute.Tensor,
        rdS: cute.Tensor,
    ) -> None:
        """Sum over a tile's first block, unless none of its queries sees these keys."""
        at = state, number, m_block, own, rP, rdS
        if cutlass.const_expr(not self.config.passes_hidden):
            self.block(*at, None)
        elif (m_block < own.first) | (m_block >= own.end):
            self.hidden_block(state, number, rdS)
        else:
            self.block(*at, None)

    @cute.jit
    def hidden_block(self, state: PipelineState, number: Int32, rdS: cute.Tensor) -> None:
        """Take part in block `number`, a tile's first, of whose queries none sees these keys: dS is
        0."""
        s = self.shared
        ds = s.ds.state(number)
        self.enter()
        self.leave()
        rdS.fill(0.0)
        s.ds.wait_empty(ds)
        self.write_ds(rdS, ds)
        s.ds.hand_over(ds)
        self.enter()
        self.leave()
        s.q.wait_full(state)
        s.do.wait_full(state)
        self.release(state)

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
        slot = (number & 1) * self.config.key_tiles + self.keys
        if cutlass.const_expr(queue is None):
            queries.add_from_smem(acc_dq, tile, self.keys, slot)
        else:
            queue.await_empty(number)
            queries.write_slot(acc_dq, slot)
            queue.hand_over(number)

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
        dq = self.queries.product(s.sK, c.head_dim, self.keys)
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
            s.queue.await_all_empty(number)
        # NOTE: each warp's adds, and the stores of the tile before, have read what is written here
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=STORE_BARRIER + self.keys, number_of_threads=WARPGROUP)
        self.store_tile(dv, self.products[0].dv, s.sdV)
        product.acc.store(product.acc.load() * s.args.scale)
        self.store_tile(dk, product, s.sdK)
