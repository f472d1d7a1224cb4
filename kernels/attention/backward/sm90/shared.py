"""The smem, rings and arguments that the roles of a CTA of the Hopper backward share, and the roles
of single warps, which move what others compute with.

Supply  loads everything, and asks for tiles
Zeros   zeroes sums of dQ that tiles to come add to
Adds    adds what others have computed of dQ, where adds come in one order
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.tma import bulk_load
from cutex.device.atoms.wgmma import ROWS
from cutex.device.attention.block_info import BlockInfo, Blocks, ceil_div
from cutex.device.attention.row_store import VECTOR, SummedTile
from cutex.device.attention.rows import Rows, tile_loads
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.handover import Handover
from cutex.device.pipeline import Barrier, PipelineState, Ring
from cutex.device.stream_order import await_kernel_before
from cutex.device.turns import await_turn, pass_turn
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.signature import KernelArgs, RowTiles, queries
from cutex.kernels.attention.backward.tiles import Tile, Walk, tiles_ahead, turn_of
from cutex.schedulers.order import select


@dataclass(frozen=True)
class SumsQueue:
    """The slots for dQ of two blocks, through which it is handed to the warps that add it.

    barrier         arrives                                  waits
    dq full[turn]   1 a warp of those that compute dQ,       the warp whose turn it is to add
                    its part being in smem
    dq empty[slot]  1: the warp that adds, its adds having   those that compute dQ
                    read smem
    """

    full: Barrier  # one for each warp that adds: a parity tells a phase only from the one before
    empty: Barrier
    turns: int

    @staticmethod
    def allocate(smem: SmemAllocator, config: BackwardConfig) -> SumsQueue:
        fillers = 4 * config.dq_warpgroups
        full = Barrier.allocate(smem, "dq full", arrivals=fillers, slots=config.adding_warps)
        empty = Barrier.allocate(smem, "dq empty", arrivals=1, slots=2)
        return SumsQueue(full, empty, config.adding_warps)

    def init(self) -> None:
        self.full.init()
        self.empty.init()

    def await_full(self, number: Int32) -> None:
        """Wait until dQ of block `number` is in smem."""
        self.full.wait(number // self.turns % 2, number % self.turns)

    def await_empty(self, number: Int32) -> None:
        """Wait until dQ of block `number` - 2 has been read."""
        # NOTE: a wait for parity 1 on a fresh barrier returns at once: every slot starts empty.
        self.empty.wait(number // 2 % 2 ^ 1, number % 2)

    def await_all_empty(self, number: Int32) -> None:
        """Wait until dQ of all blocks before `number` has been read."""
        self.await_empty(number)
        self.await_empty(number + 1)

    def hand_over(self, number: Int32) -> None:
        """Arrive once for this warp: its part of a block's dQ is in smem."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.full.arrive(number % self.turns)

    def release(self, number: Int32) -> None:
        with cute.arch.elect_one():
            self.empty.arrive(number % 2)


@dataclass(frozen=True)
class Shared:
    """What all roles of a CTA use."""

    sK: cute.Tensor  # (64, D, WG)
    sV: cute.Tensor  # (64, DV, WG)
    sQ: cute.Tensor  # (bM, D, SLOT)
    sdO: cute.Tensor  # (bM, DV, SLOT)
    # (64, bM, WG * SLOT): a warpgroup's keys by queries; of a pair, the other CTA's slots behind
    sdS: cute.Tensor
    sKp: Any  # (64, D / 2, WG) the other CTA's keys, of the columns that this one computes dQ of
    sdQ: cute.Tensor  # (4 * 32 * units, WARP, SLOT) a warp's part of columns of dQ
    sdK: Any  # (64, D, WG) dK on its way out, of CTAs that take several tiles; in the place of sdQ
    sdV: Any  # (64, DV, WG) dV, the same
    stats: cute.Tensor  # (2 * bM, SLOT) LSE, then delta
    k_loaded: Barrier
    v_loaded: Barrier
    q: Ring
    do: Ring
    ds: Handover
    ds_sent: Any  # the other CTA's dS is there
    k_read: Barrier  # by all but the warpgroups that store dK through its slots
    v_read: Barrier  # by the warpgroups that compute scores; of CTAs that take several tiles
    info: BlockInfo
    args: KernelArgs
    tiles: RowTiles
    tile: Any  # the Tile that a role is at; None until it has one
    heads_per_kv: Int32
    parts: Any = None  # the HeadParts, where the work of a head is divided
    queue: Any = None  # the SumsQueue, where warps of their own add dQ
    descending: bool = False  # blocks of queries are taken from the last to the first
    flips: bool = False  # they are taken so in the last group of heads

    def m_blocks(self) -> Blocks:
        """The blocks of queries that see any key of the CTA, or of its pair; of its part."""
        lengths, ctas = (self.tile.seq_q.length, self.tile.seq_k.length), self.ds.ctas
        info = self.info._replace(tile_n=ctas * self.info.tile_n)
        return self.tile.own(info.m_blocks(self.tile.n_block // ctas, *lengths))

    def first_block(self, blocks: Blocks) -> Int32:
        """The block of queries to start with."""
        if self.flips:
            return select(self.tile.flipped, blocks.end - 1, blocks.first)
        if self.tile.rotation is not None:
            return self.tile.rotation.start(self.tile.n_block)
        return blocks.end - 1 if self.descending else blocks.first

    @cute.jit
    def block_after(self, m_block: Int32, blocks: Blocks) -> Int32:
        """The block after `m_block`, of the next head if it is a head's last."""
        if cutlass.const_expr(self.flips):
            last = select(self.tile.flipped, blocks.first, blocks.end - 1)
            step = select(self.tile.flipped, -1, 1)
            return self.first_block(blocks) if m_block == last else m_block + step
        elif cutlass.const_expr(self.descending):
            return blocks.end - 1 if m_block == blocks.first else m_block - 1
        else:
            return blocks.first if m_block + 1 == blocks.end else m_block + 1

    def first_head(self) -> Int32:
        return self.tile.head_group * self.heads_per_kv


@dataclass(frozen=True)
class Load:
    """The loads of a CTA, by the first warp of the third warpgroup.

    K and V once; for each block of queries Q with its rows' LSE and delta, and dO. The warpgroup
    that computes dQ follows the others by a block, and waits for slots that they have just
    released.
    """

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
        """Load K and V, 64 keys for each warpgroup. A whole warp calls it, as the next methods."""
        c, s = self.config, self.shared
        self.of_keys(self.k, s.sK, s.k_loaded, c.pairs * c.tile_n * c.dq_width * 2)
        if cutlass.const_expr(c.pairs):
            of = (s.tile.key_head, s.tile.batch, s.tile.seq_k)
            loads = tile_loads(self.kp, s.sKp, of, part=cute.arch.block_idx_in_cluster())
            for wg in cutlass.range_constexpr(c.key_tiles):
                loads.load((s.tile.n_block ^ 1) * c.key_tiles + wg, wg, s.k_loaded[0])
        self.of_keys(self.v, s.sV, s.v_loaded)

    @cute.jit
    def of_keys(
        self, rows: Rows, sX: cute.Tensor, loaded: Barrier, more: cutlass.Constexpr[int] = 0
    ) -> None:
        """Load K or V, with `more` bytes behind the same barrier."""
        c, tile = self.config, self.shared.tile
        loads = tile_loads(rows, sX, (tile.key_head, tile.batch, tile.seq_k))
        with cute.arch.elect_one():
            loaded.arrive_expecting(c.tile_n * cute.size(sX, mode=[1]) * 2 + more)
        for wg in cutlass.range_constexpr(c.key_tiles):
            loads.load(tile.n_block * c.key_tiles + wg, wg, loaded[0])

    @cute.jit
    def next_tile(self, fill: PipelineState, phase: Int32, piece: Any = None) -> PipelineState:
        """Load a further tile of a persistent CTA, of parity `phase`, and its blocks of queries, or
        a `piece` of them; returns the state after. Slots that the tile before frees first are
        loaded first."""
        s, blocks = self.shared, self.shared.m_blocks()
        first, total = Int32(0), (blocks.end - blocks.first) * s.heads_per_kv
        if cutlass.const_expr(piece is not None):
            first, total = piece.first, piece.end
        if total > 0:
            self.q_of(first, fill)
            self.do_of(first, fill)
        s.v_read.wait(phase ^ 1)
        self.of_keys(self.v, s.sV, s.v_loaded)
        s.k_read.wait(phase ^ 1)
        self.of_keys(self.k, s.sK, s.k_loaded)
        self.await_preprocess()
        if total > 0:
            self.stats_of(first, fill)
            fill.advance()
        for i in cutlass.range(first + 1, total, unroll=1):
            self.queries(i, fill)
            fill.advance()
        return fill

    def await_preprocess(self) -> None:
        """Wait for LSE and delta, if the warp has not waited before."""
        if self.config.keys_first:
            await_kernel_before()

    @cute.jit
    def queries(self, number: Int32, state: PipelineState) -> None:
        """Load block `number`, counted over all heads of the CTA, once its slots are empty."""
        self.q_of(number, state)
        self.stats_of(number, state)
        self.do_of(number, state)

    @cute.jit
    def q_of(self, number: Int32, state: PipelineState) -> None:
        s, (of, m_block) = self.shared, self.place(number)
        full = s.q.acquire(state)
        tile_loads(self.q, s.sQ, of).load(m_block, state.slot, full)

    @cute.jit
    def do_of(self, number: Int32, state: PipelineState) -> None:
        s, (of, m_block) = self.shared, self.place(number)
        full = s.do.acquire(state)
        tile_loads(self.do, s.sdO, of).load(m_block, state.slot, full)

    @cute.jit
    def stats_of(self, number: Int32, state: PipelineState) -> None:
        """Load LSE and delta of a block, behind the barrier of its Q."""
        s, (of, m_block) = self.shared, self.place(number)
        tile = s.tiles.tile(self.config, *of) + m_block
        bulk_load(self.stats[tile, None], s.stats[None, state.slot], s.q.full[state.slot])

    @cute.jit
    def place(self, number: Int32) -> tuple[tuple[Int32, Int32, SeqlenInfo], Int32]:
        """The query head, batch entry and sequence of block `number`, and its number in these."""
        s = self.shared
        blocks = s.m_blocks()
        count = blocks.end - blocks.first
        turn = number // count
        m_block = blocks.first + number - turn * count
        if cutlass.const_expr(s.descending):
            m_block = blocks.end - 1 - number + turn * count
        elif cutlass.const_expr(s.tile.rotation is not None):
            m_block = s.tile.rotation.block(s.tile.n_block, number - turn * count)
        elif cutlass.const_expr(s.flips):
            m_block = select(s.tile.flipped, blocks.first + blocks.end - 1 - m_block, m_block)
        return (s.first_head() + turn, s.tile.batch, s.tile.seq_q), m_block


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
            if cutlass.const_expr(self.config.spread):
                for which in cutlass.range(walk.pieces(ticket), unroll=1):
                    fill, phase = self.supply(walk, *walk.piece(ticket, which), fill, phase)
            else:
                fill, phase = self.supply(walk, walk.tile(ticket), None, fill, phase)
            # NOTE: only when the last load is issued: a CTA that is late gets fewer tiles
            ticket = dispatch.announce(ticket, announcing)
            announcing.advance()
        self.load.await_preprocess()  # also where no tile has keys: convert waits for main alone

    @cute.jit
    def supply(
        self, walk: Walk, tile: Tile, piece: Any, fill: PipelineState, phase: Int32
    ) -> tuple[PipelineState, Int32]:
        """Load a tile or a piece of it; returns the state after, and the next parity."""
        if tile.has_keys(self.config):
            if cutlass.const_expr(self.config.late_zeros):
                await_zeros(walk, tile)
            load = replace(self.load, shared=replace(self.shared, tile=tile))
            fill = load.next_tile(fill, phase, piece)
            phase ^= 1
        return fill, phase


@dataclass(frozen=True)
class Zeros:
    """The role of the warp that zeroes sums of dQ: first a share of those that the first tiles add
    to; then, for each tile of keys that the CTA processes, a share of a unit (a head of K and V of
    a batch entry) that comes later.

    The sums of many heads do not fit into L2: zeroed by preprocess, they would go to HBM and come
    back when they are added to.

        flag           counts                                    waits
        zeroed[unit]   the unit's shares that are zero: as many  the warp that loads, before its
                       as it has tiles of keys                   first load of a tile of the unit
    """

    config: BackwardConfig
    sums: cute.Tensor  # (tiles, bM * D)
    tiles: RowTiles

    @cute.jit
    def run(self, walk: Walk) -> None:
        """Zero this CTA's shares. One warp calls it."""
        ahead, total = tiles_ahead(self.config, walk.sizes), walk.total
        number, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        while number < cutlass.min(ahead, total):
            self.share(walk, number)
            number += ctas
        ticket = walk.dispatch.first()
        while ticket.valid:
            number = walk.number(ticket) + ahead
            if number < total:
                self.share(walk, number)
            ticket = walk.dispatch.next(ticket)

    @cute.jit
    def share(self, walk: Walk, number: Int32) -> None:
        """Zero the unit's share with the tile's number, and count it."""
        sizes, of = walk.sizes, walk.numbered(number)
        seqlen = queries(walk.args, sizes.rows_q).of(of.batch)
        each = ceil_div(seqlen.length, self.config.tile_m)  # tiles of the sums of a head
        count = ceil_div(sizes.heads_per_kv * each, of.blocks)
        end = cutlass.min((of.block + 1) * count, sizes.heads_per_kv * each)
        for i in cutlass.range(of.block * count, end, unroll=1):
            head = of.head * sizes.heads_per_kv + i // each
            self.clear(self.tiles.tile(self.config, head, of.batch, seqlen) + i % each)
        cute.arch.fence_proxy("async.global")  # adds are bulk copies
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            flag = walk.args.zeroed.iterator + of.batch * sizes.heads_kv + of.head
            cute.arch.atomic_add(flag, Int32(1), sem="release", scope="gpu")

    @cute.jit
    def clear(self, tile: Int32) -> None:
        """Zero a tile of the sums."""
        vectors = cute.logical_divide(self.sums[tile, None], cute.make_layout(VECTOR))  # (4, NumV)
        zeros = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
        zeros.fill(0.0)
        count = self.config.tile_m * self.config.head_dim // VECTOR // 32
        for i in cutlass.range(count, unroll=8):
            cute.autovec_copy(zeros, vectors[None, i * 32 + cute.arch.lane_idx()])


@cute.jit
def await_zeros(walk: Walk, tile: Tile) -> None:
    """Wait until all sums of the tile's unit have been zeroed. A whole warp calls it."""
    sizes, shares = walk.sizes, walk.sizes.num_n_blocks
    if cutlass.const_expr(walk.config.ranked):
        shares = ceil_div(tile.seq_k.length, walk.config.tile_n)
    if cute.arch.lane_idx() == 0:
        flag = walk.args.zeroed.iterator + tile.batch * sizes.heads_kv + tile.head_kv
        now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
        while now != shares:
            now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
        cute.arch.fence_proxy("async.global")
    cute.arch.sync_warp()


def number_of_part(config: BackwardConfig, warp: Int32, part: Int32) -> Int32:
    """The index, among equal parts of a tile of the sums, of what a warp computes of part `part` of
    a block: some columns of 64 queries or, for two warpgroups, all columns of 64 queries each."""
    if config.tile_m > ROWS:
        return part * 4 + warp
    return warp * (config.head_dim // config.dq_columns) + part


@dataclass(frozen=True)
class Adds:
    """The role of one of the warps that add dQ, taking blocks in turn.

    Key blocks add to a tile of dQ one after another, and the first one stores instead, so that
    nobody zeroes the sums. A warp waits for its CTA's turn at a tile, and passes the turn on when
    its adds have landed. Nobody else waits for that, only for slots of smem.
    """

    config: BackwardConfig
    shared: Shared
    sums: cute.Tensor  # (tiles, bM * D)
    turn: Int32  # among the warps that add

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
        """Add the blocks of a tile of keys, starting at the CTA's block `number`; returns the
        number after them."""
        s, blocks = self.shared, self.shared.m_blocks()
        total, m_block = (blocks.end - blocks.first) * s.heads_per_kv, s.first_block(blocks)
        tile = s.tiles.tile(self.config, s.first_head(), s.tile.batch, s.tile.seq_q)
        end = number + total
        while number < end:
            if number % self.config.adding_warps == self.turn:
                self.add(tile + m_block, m_block, number)
            m_block = s.block_after(m_block, blocks)
            if m_block == s.first_block(blocks):
                tile += s.tiles.per_head
            number += 1
        return number

    @cute.jit
    def add(self, tile: Int32, m_block: Int32, number: Int32) -> None:
        """Add dQ of block `number` to its tile in the CTA's turn."""
        s, turns = self.shared, self.shared.args.turns
        turn = turn_of(self.config, s.info, s.tile, m_block)
        await_turn(turns, tile, Int32(0), turn)
        s.queue.await_full(number)
        self.start(tile, number % 2, turn == 0)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        s.queue.release(number)
        self.landed()
        pass_turn(turns, tile, Int32(0), turn)

    @cute.jit
    def start(self, tile: Int32, block: Int32, begins: Boolean) -> None:
        """Start adding the slots of a block, or storing them if that `begins` the tile's sums; one
        lane for each part written by a warp."""
        lane, slots = cute.arch.lane_idx(), self.config.key_tiles
        if lane < 4 * slots:
            mine = self.shared.sdQ[None, lane % 4, slots * block + lane // 4]
            sums = SummedTile(self.sums[tile, None])
            first = number_of_part(self.config, lane % 4, lane // 4) * cute.size(mine)
            sums.put_slot(mine, first, begins)

    @staticmethod
    def landed() -> None:
        """Wait until this thread's adds have landed, and order later stores after them."""
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")
