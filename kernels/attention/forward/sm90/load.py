"""Load: the warp of the Hopper forward that hands out tiles and loads their Q, K and V.

Of two CTAs that share K and V the first asks for tiles; before each tile the two exchange which it
is, and whether the one that came back failed. Each loads half the rows of a block, into the smem of
both, once the consumers of both have released the slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.attention.own_share import OwnShare
from cutex.device.attention.rows import Rows, tile_loads
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.attention.split_row import Part as SplitPart
from cutex.device.attention.split_row import part_of, within
from cutex.device.pipeline import Barrier, PipelineState, Ring
from cutex.device.row_source import BoxLoads, PagedRows
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.forward.sm90.parts import Part, PartsOrder
from cutex.kernels.attention.forward.sm90.shared import Shared
from cutex.kernels.attention.order import AttentionOrder
from cutex.kernels.attention.work_ring import MERGE, NORMAL, RETRY
from cutex.schedulers.dispatch import SelfDispatch, Ticket

AHEAD = 2  # one CTA of a pair may be an exchange ahead of the other

Fills = tuple[PipelineState, ...]  # states in the rings of K and of V, and of Q's slot if it waits
Lengths = tuple[SeqlenInfo, SeqlenInfo]  # of queries and of keys


class TileJob(NamedTuple):
    """A tile and how it is to be computed."""

    work: WorkTile
    mode: Int32
    lengths: Lengths
    forwards: Int32 | None  # 1: its keys from the first to the last; None: never
    part: Any  # of its keys, a Part or a SplitPart; None: all of them
    place: Int32 | None = None  # the word of a PartPlace, of a tile that is split


class Pages(NamedTuple):
    """K or V in pages, the TMA operand of box_operand."""

    info: cpasync.TmaInfo
    table: cute.Tensor  # (batch, max_pages) Int32
    page_size: int
    pitch: Int32  # rows from one page to the next

    def loads(self, sX: cute.Tensor, head: Int32, batch: Int32, seqlen: SeqlenInfo) -> BoxLoads:
        """The loads of the blocks of one head of one sequence into sX (bN, D, SLOT)."""
        source = PagedRows(self.table[batch, None], seqlen.length, self.page_size, self.pitch)
        return BoxLoads(self.info, source, sX, head)


@dataclass(frozen=True)
class PairExchange:
    """The exchange of one word per tile between the load warps of two CTAs, so that both take the
    same tiles in the same order.

    barrier          arrives                                             waits
    exchanged[slot]  1: LOAD, 1: the other CTA's, which has read the     LOAD
                     word before, and 4 bytes from there
    """

    words: cute.Tensor  # (SLOT), written by the other CTA
    exchanged: Barrier

    @staticmethod
    def allocate(smem: SmemAllocator) -> PairExchange:
        words = cute.make_tensor(smem.allocate_array(Int32, AHEAD), cute.make_layout(AHEAD))
        exchanged = Barrier.allocate(smem, "exchanged", arrivals=2, slots=AHEAD)
        return PairExchange(words, exchanged)

    @staticmethod
    def first() -> PipelineState:
        """The state of a load warp before its first exchange."""
        return PipelineState(AHEAD, Int32(0), Int32(0))

    @cute.jit
    def send(self, word: Int32, state: PipelineState) -> Int32:
        """Send `word` to the other CTA; return the one that it sends. A whole warp calls it."""
        slot = state.slot
        peer = cute.arch.block_idx_in_cluster() ^ 1
        with cute.arch.elect_one():
            self.exchanged.arrive_expecting(4, slot)
            # NOTE: this arrival says that this warp has read the word before; st.async does not
            cute.arch.mbarrier_arrive(self.exchanged[slot], peer)
            cute.arch.store_async_dsmem(
                self.words.iterator + slot, word, self.exchanged[slot], peer
            )
        self.exchanged.wait(state.phase, slot)
        other = self.words[slot]
        cute.arch.sync_warp()
        return other


@dataclass(frozen=True)
class Load:
    """The load role: it announces tiles, and loads their Q, K and V."""

    config: Sm90ForwardConfig
    q: Rows  # with the TMA operand each
    k: Rows | Pages
    v: Rows | Pages
    order: AttentionOrder | PartsOrder
    dispatch: SelfDispatch
    exchange: PairExchange | None  # of CTAs that share their loads
    shared: Shared

    @cute.jit
    def run(self) -> None:
        """Announce and load tile after tile.

        When a slot of Q comes back, its result is checked: a tile that failed is announced again in
        retry mode, before any other. When no tile is left, the remaining slots are waited for in
        turn.
        """
        c, order, ring = self.config, self.order, self.shared.work
        q_fill = ring.q.producer()
        fills: Fills = (self.shared.k.producer(), self.shared.v.producer())
        if cutlass.const_expr(c.q_waits):
            fills = (*fills, PipelineState(1, Int32(0), Int32(1)))
        ring.clear()
        ticket, exchanges = self.dispatch.first(), PairExchange.first()
        looked_at = Int32(0)  # slots checked and valid since the last tile was announced
        which = Int32(0)  # of a ticket's parts
        while ticket.valid or looked_at < c.work_slots:
            back = PipelineState(c.work_slots, q_fill.slot, q_fill.phase)
            back.skip(looked_at)
            ring.q.empty.wait(back.phase, back.slot)
            failed = ring.take_back(back.slot)
            failed, ticket, exchanges = self.agree(failed, ticket, exchanges)
            work, mode, forwards = ring.work(back.slot), Int32(RETRY), Int32(0)
            if cutlass.const_expr(c.alternates):
                forwards = ring.forwards(back.slot)  # as when it failed
            part = self.parts.whole(Int32(0)) if c.spread else None
            if not failed:
                number = cutlass.min(ticket.index, order.total - 1)
                if cutlass.const_expr(c.spread):
                    part = self.parts.whole(number)
                    if number >= self.parts.tail.whole:
                        part = self.parts.part(number, which)
                    number = part.index
                work = self.tiles.tile(number)
                mode = Int32(NORMAL)
                if cutlass.const_expr(c.alternates):
                    forwards = self.tiles.is_forwards(ticket.index, c.num_ctas // c.ctas)
            if not failed and not ticket.valid:
                looked_at += 1
            else:
                looked_at = Int32(0)
                lengths = self.shared.lengths(work.batch)
                asked = Int32(0)
                if lengths[0].length * c.pack > work.m * c.tile_m:
                    forwards_or_none = forwards if c.alternates else None
                    job = TileJob(work, mode, lengths, forwards_or_none, part)
                    fills, asked = self.tile(job, ticket, q_fill, fills)
                    q_fill.advance()
                else:
                    asked = self.ask(mode, ticket)
                moves = not failed
                if cutlass.const_expr(c.spread):
                    assert part is not None
                    moves = moves & part.is_last
                    which = Int32(0) if moves else which + Int32(not failed)
                if moves and self.asks():
                    ticket = self.dispatch.next(ticket, asked)
        ring.end(q_fill)
        for kv, fill in zip((self.shared.k, self.shared.v), fills[:2], strict=True):
            if cutlass.const_expr(c.share):
                kv.drain(fill)

    @property
    def tiles(self) -> AttentionOrder:
        """The order of whole tiles."""
        return self.order if isinstance(self.order, AttentionOrder) else self.order.order

    @property
    def parts(self) -> PartsOrder:
        assert isinstance(self.order, PartsOrder), "only tiles of such an order are cut"
        return self.order

    def agree(
        self, failed: Boolean, ticket: Ticket, exchanges: PipelineState
    ) -> tuple[Boolean, Ticket, PipelineState]:
        """Whether a tile failed in a CTA that shares these loads, and the ticket of the one
        that asks; and the state of the next exchange."""
        if self.exchange is not None:
            other = self.exchange.send(2 * ticket.index + Int32(failed), exchanges)
            exchanges.advance()
            failed = failed | (other % 2 == 1)
            follows = cute.arch.block_idx_in_cluster()  # 0: this CTA asks
            ticket = ticket.moved_to(ticket.index + follows * (other // 2 - ticket.index))
        return failed, ticket, exchanges

    def asks(self) -> Boolean:
        """Whether this CTA asks for tiles: of two that share loads the first."""
        return Boolean(True) if self.exchange is None else cute.arch.block_idx_in_cluster() == 0

    @cute.jit
    def tile(
        self, job: TileJob, ticket: Ticket, q_fill: PipelineState, fills: Fills
    ) -> tuple[Fills, Int32]:
        """Load Q, and K and V block by block in the order in which the products need them. Return
        the states after, and the result of `ask`.

        NOTE: it asks for the next tile when all but the last load are issued: the answer is there
        when the last slot is empty, and a CTA that is late still gets fewer tiles.
        """
        shared, c = self.shared, self.config
        k_fill, v_fill, *q_free = fills
        work, mode, (seq_q, seq_k), forwards, part, place = job
        word, is_last, of_loads = None, None, seq_k  # NOTE: ragged rows need their own end
        if cutlass.const_expr(c.spread):
            # NOTE: to the other roles a part is a tile with fewer keys
            word, is_last = part.word, part.is_last
            keys = cutlass.min(seq_k.length, part.end * c.tile_n) - part.first * c.tile_n
            seq_k = seq_k._replace(length=keys)
        elif cutlass.const_expr(c.split):
            word = part.count
            seq_k = seq_k._replace(length=seq_k.length - part.first * c.tile_n)
        blocks = shared.info.n_blocks(work.m, seq_q.length, seq_k.length)
        of_part: tuple[Any, ...] = ()
        if cutlass.const_expr(c.split):
            of_part = place, part.first
            blocks = within(blocks, word)
        turns = c.turns(shared.sK.element_type is BFloat16)
        path = blocks.path(forwards, blocks.turn() if turns else None)
        head_kv = work.head // self.tiles.heads_per_kv
        loads_q = tile_loads(self.q, shared.sQ, (work.head, work.batch, seq_q))
        of = head_kv, work.batch, of_loads
        loads_k, loads_v = self.blocks(self.k, shared.sK, of), self.blocks(self.v, shared.sV, of)
        full = shared.work.announce(q_fill, mode, work, seq_q, seq_k, forwards, word, of_part)
        q_slot = Int32(0) if c.q_waits else q_fill.slot
        if cutlass.const_expr(not c.q_waits):
            self.load_q(loads_q, work, q_slot, full)
        asked = Int32(0)
        if blocks.end > blocks.first:
            self.load_block(loads_k, self.behind(path.start, part), shared.k, k_fill)
            k_fill.advance()
            if cutlass.const_expr(c.q_waits):
                # NOTE: after the first K, whose slot is free before Q's
                self.shared.q_read.wait(q_free[0].phase)
                self.load_q(loads_q, work, q_slot, full)
            n_block = path.start
            for i in cutlass.range(blocks.end - 1 - blocks.first, unroll=1):
                next_block = path.block(i + 1)
                self.load_block(loads_k, self.behind(next_block, part), shared.k, k_fill)
                k_fill.advance()
                self.load_block(loads_v, self.behind(n_block, part), shared.v, v_fill)
                v_fill.advance()
                n_block = next_block
            asked = self.ask(mode, ticket, is_last)
            self.load_block(loads_v, self.behind(n_block, part), shared.v, v_fill)
            v_fill.advance()
        else:
            if cutlass.const_expr(c.q_waits):
                self.shared.q_read.wait(q_free[0].phase)
                self.load_q(loads_q, work, q_slot, full)
            asked = self.ask(mode, ticket)
        for state in q_free:
            state.advance()
        return (k_fill, v_fill, *q_free), asked

    @staticmethod
    def load_block(loads: Any, n_block: Int32, ring: Ring, fill: PipelineState) -> None:
        """Load block `n_block` into the ring's next slot."""
        if isinstance(loads, BoxLoads):
            found = loads.find(n_block)  # its pages, before the slot is waited for
            loads.load(n_block, fill.slot, ring.acquire(fill), found=found)
        else:
            loads.load(n_block, fill.slot, ring.acquire(fill))

    def load_q(self, loads_q: Any, work: WorkTile, slot: Int32, full: cute.Pointer) -> None:
        """Load the rows of all warpgroups into Q's `slot`."""
        for wg in range(self.config.warpgroups):
            own = slot * self.config.warpgroups + wg
            loads_q.load(self.shared.m_block(work, wg), own, full)

    def blocks(
        self, rows: Rows | Pages, sX: cute.Tensor, of: tuple[Int32, Int32, SeqlenInfo]
    ) -> Any:
        """The loads of the blocks of keys of one head of one sequence, `of` (head, batch,
        seqlen)."""
        if isinstance(rows, Pages):
            return rows.loads(sX, *of)
        return tile_loads(rows, sX, of, sharers=self.config.ctas)

    @staticmethod
    def behind(n_block: Int32, part: Part | SplitPart | None) -> Int32:
        """The number in its sequence of block `n_block` of a part."""
        return n_block if part is None else n_block + part.first

    @cute.jit
    def ask(self, mode: Int32, ticket: Ticket, is_last: Boolean | None = None) -> Int32:
        """Ask for the next tile, unless this tile is a repeated one, or not the `last` part of what
        the ticket stands for."""
        asked, asks = Int32(0), mode == NORMAL and self.asks()
        if cutlass.const_expr(is_last is not None):
            asks = asks & is_last
        if asks:
            asked = self.dispatch.ask(ticket)
        return asked


@dataclass(frozen=True)
class SplitLoad:
    """The load role where tiles are cut along their keys (split_row.py): it announces the pieces of
    this CTA's share and loads their Q, K and V; a piece that failed again, in retry mode, before
    any other; and then those pieces that are to be merged."""

    load: Load
    share: OwnShare

    @cute.jit
    def run(self) -> None:
        shared, share = self.load.shared, self.share
        c, ring = self.load.config, shared.work
        q_fill = ring.q.producer()
        fills: Fills = (shared.k.producer(), shared.v.producer())
        if cutlass.const_expr(c.q_waits):
            fills = (*fills, PipelineState(1, Int32(0), Int32(1)))
        ring.clear()
        ticket = self.load.dispatch.first()  # NOTE: there is nothing to ask for
        at, looked_at = Int32(share.begin), Int32(0)  # slots that came back since the last piece
        while at < share.end or looked_at < c.work_slots:
            back = PipelineState(c.work_slots, q_fill.slot, q_fill.phase)
            back.skip(looked_at)
            ring.q.empty.wait(back.phase, back.slot)
            failed = ring.take_back(back.slot)
            if not failed and at >= share.end:
                looked_at += 1
            else:
                looked_at = Int32(0)
                work, mode = ring.work(back.slot), Int32(RETRY)
                place = ring.place(back.slot)
                part = SplitPart(ring.first(back.slot), ring.part(back.slot))
                cuts = Int32(0), Int32(0), Int32(1)
                if not failed:
                    work, piece, of_tile = share.piece(at)
                    at, mode, place = piece.after, Int32(NORMAL), of_tile.word
                    cuts = piece.begin, piece.end, piece.weight
                lengths = shared.lengths(work.batch)
                if not failed:
                    length_q, length_k = (x.length for x in lengths)
                    part = part_of(shared.info.n_blocks(work.m, length_q, length_k), *cuts)
                job = TileJob(work, mode, lengths, None, part, place)
                fills, _ = self.load.tile(job, ticket, q_fill, fills)
                q_fill.advance()
        self.announce_merges(q_fill)

    @cute.jit
    def announce_merges(self, q_fill: PipelineState) -> None:
        """Announce again what is left of tiles, all of this CTA's being valid, and then the end."""
        shared, share = self.load.shared, self.share
        ring, at = shared.work, Int32(share.begin)
        while at < share.end:
            work, piece, place = share.piece(at)
            at = piece.after
            if place.parts > 1:
                ring.q.empty.wait(q_fill.phase, q_fill.slot)
                ring.say(q_fill, MERGE, work, *shared.lengths(work.batch), place.word)
                q_fill.advance()
        ring.q.empty.wait(q_fill.phase, q_fill.slot)
        ring.end(q_fill)
