"""The state that all roles of a CTA share: its tiles, and the barriers between the roles; and the
role that announces and loads the tiles.

Every role walks the same sequence of tiles, which the load warp announces in a ring of words, and
derives from the words, by BlockInfo, the blocks of keys that each Q tile touches. So roles need not
communicate loop bounds, only data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.attention.block_info import BlockInfo, Blocks, Path
from cutex.device.attention.rows import Rows, tile_loads
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.pipeline import Barrier, PairRing, PipelineState, Ring
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.forward.sm100.config import Sm100ForwardConfig
from cutex.kernels.attention.signature import KernelArgs, Sizes
from cutex.kernels.attention.work_ring import NORMAL, WorkRing
from cutex.schedulers.dispatch import SelfDispatch


@dataclass(frozen=True)
class TileRing(WorkRing):
    """The ring of announced tiles.

    barrier         arrives                                   waits
    q.full[slot]    1: LOAD, having written the words         all other roles
    q.empty[slot]   1 a warp of these, done with the tile     LOAD
    """

    event: ClassVar[str] = "tile"

    def _arm(self, slot: Int32) -> None:
        self.q.full.arrive(slot)


class Span(NamedTuple):
    """The blocks of keys of one Q tile, counted down from the last block that any Q tile of the CTA
    touches: `count` of them, the first `start` blocks later."""

    start: Int32
    count: Int32


@dataclass(frozen=True)
class Barriers:
    """The barriers between the roles.

    barrier          arrives                                    waits
    q.full[t]        1: LOAD, and the bytes by TMA              MMA, before a tile's first QK
    q.empty[t]       1: the commit of a tile's last QK          LOAD
    k.full, v.full   1: LOAD, and the bytes by TMA              MMA
    k.empty, v.empty 1: the commit of the last MMA that reads   LOAD
    s_full[b]        1: the commit of QK                        SOFTMAX
    p_first[b]       1 a SOFTMAX warp: S is read, O is scaled,  MMA, before PV
                     the first columns of P are there
    p_rest[b]        1 a SOFTMAX warp: the others are           MMA, within PV
    pv_done          1: the commit of PV, where q_tiles is 1    SOFTMAX, before it scales O
    scaled[t, slot]  1 a SOFTMAX warp: its rows' factors        EPILOGUE
    o_full[t]        1: the commit of a tile's last PV          EPILOGUE
    o_empty[t]       1 an EPILOGUE warp: O is in registers      MMA, before a tile's first PV

    t counts the Q tiles of a CTA, b the blocks of scores in tensor memory, and a slot is one of the
    tiles' ring, because SOFTMAX may be a tile ahead of EPILOGUE. Of a pair, MMA is the
    leader's; commits arrive in both CTAs, and what MMA waits for counts the warps of both.
    """

    q: Ring
    k: Ring
    v: Ring
    s_full: Barrier
    p_first: Barrier
    p_rest: Barrier
    pv_done: Barrier
    scaled: Barrier
    o_full: Barrier
    o_empty: Barrier

    @staticmethod
    def allocate(smem: SmemAllocator, c: Sm100ForwardConfig) -> Barriers:
        ring = PairRing if c.pair else Ring
        stages, tiles, warps = c.num_stages, c.q_tiles, 4
        return Barriers(
            ring.allocate(smem, "q", tiles, c.q_bytes * c.ctas, consumers=1),
            ring.allocate(smem, "k", stages, c.k_bytes * c.ctas, consumers=1),
            ring.allocate(smem, "v", stages, c.v_bytes * c.ctas, consumers=1),
            Barrier.allocate(smem, "s full", arrivals=1, slots=2),
            Barrier.allocate(smem, "first of p", arrivals=warps * c.ctas, slots=2),
            Barrier.allocate(smem, "rest of p", arrivals=warps * c.ctas, slots=2),
            Barrier.allocate(smem, "p v done", arrivals=1),
            Barrier.allocate(smem, "scaled", arrivals=warps, slots=tiles * c.work_slots),
            Barrier.allocate(smem, "o full", arrivals=1, slots=tiles),
            Barrier.allocate(smem, "o empty", arrivals=warps * c.ctas, slots=tiles),
        )

    @property
    def all(self) -> tuple[Barrier | Ring, ...]:
        return (
            self.q, self.k, self.v, self.s_full, self.p_first, self.p_rest, self.pv_done,
            self.scaled, self.o_full, self.o_empty,
        )  # fmt: skip


@dataclass(frozen=True)
class Shared:
    """The smem, barriers, lengths and arguments that all roles of a CTA use."""

    config: Sm100ForwardConfig
    sQ: cute.Tensor  # (128, D, TILE)
    sK: cute.Tensor  # (bN / ctas, D, SLOT)
    sV: cute.Tensor  # (bN, DV / ctas, SLOT)
    sO: cute.Tensor  # (128, O_PART, SLOT)
    factors: cute.Tensor  # (128, TILE, work SLOT) fp32
    work: TileRing
    barriers: Barriers
    tmem: cute.Pointer
    info: BlockInfo  # for blocks of the rows of one MMA
    args: KernelArgs
    sizes: Sizes

    @cute.jit
    def lengths(self, batch: Int32) -> tuple[SeqlenInfo, SeqlenInfo]:
        """The lengths of the queries and of the keys of a sequence."""
        q, k = self.sizes.seqlens(self.args)
        return q.of(batch), k.of(batch)

    @cute.jit
    def blocks(
        self, work: WorkTile, t: Int32 | int, seqlen_q: Int32, seqlen_k: Int32
    ) -> tuple[Blocks, Int32]:
        """The blocks that Q tile t touches, and their number; 0 for a Q tile beyond the last
        row."""
        c = self.config
        m_block = work.m * c.q_tiles + t
        found = self.info.n_blocks(m_block, seqlen_q, seqlen_k)
        beyond = m_block * c.mma_rows >= seqlen_q * c.pack
        return found, Int32(0) if beyond else cutlass.max(found.end - found.first, 0)

    @cute.jit
    def turn(self, work: WorkTile, end: Int32, seqlen_q: Int32, seqlen_k: Int32) -> Int32:
        """How many blocks of `work`, the last of which is end - 1, precede block 0 (Path): at least
        one, and those that some Q tile masks."""
        clean_end = end - 1
        for t in cutlass.range_constexpr(self.config.q_tiles):
            blocks, count = self.blocks(work, t, seqlen_q, seqlen_k)
            mine = blocks.clean_end if count > 0 else clean_end
            clean_end = cutlass.min(clean_end, mine)
        return end - clean_end

    @cute.jit
    def spans(self, work: WorkTile, seqlen_q: Int32, seqlen_k: Int32) -> tuple[Int32, Int32, tuple]:
        """The end of the blocks that `work` touches, their number, and the span of each Q tile."""
        found = [self.blocks(work, t, seqlen_q, seqlen_k) for t in range(self.config.q_tiles)]
        blocks, count = found[0]
        end, first = blocks.end, blocks.end - count
        for other, more in found[1:]:
            mine = count > 0
            both = mine & (more > 0)
            other_first = other.end - more
            higher = cutlass.max(end, other.end) if both else (end if mine else other.end)
            lower = cutlass.min(first, other_first) if both else (first if mine else other_first)
            end, first = higher, lower
        return end, end - first, tuple(Span(end - b.end, n) for b, n in found)

    @cute.jit
    def signal(self, barrier: Barrier, slot: Int32) -> None:
        """Arrive once for this warp where MMA waits: for a pair, at the leader's barrier."""
        with cute.arch.elect_one():
            if cutlass.const_expr(self.config.pair):
                barrier.arrive_at_leader(slot)
            else:
                barrier.arrive(slot)

    def rank(self) -> Int32 | int:
        """The rank of this CTA among those of its tile."""
        return cute.arch.block_idx_in_cluster() if self.config.pair else 0

    def row_block(self, work: WorkTile, t: Int32 | int) -> Int32:
        """The index of this CTA's 128 rows of a Q tile, counted in blocks of 128 rows."""
        c = self.config
        return (work.m * c.q_tiles + t) * c.ctas + self.rank()


# ---- the role that loads


Fills = tuple[PipelineState, PipelineState, PipelineState]  # states in the rings of Q, K and V


@dataclass(frozen=True)
class Load:
    """The load role: it announces tiles, and loads their Q, K and V."""

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
        turn = shared.turn(work, end, seq_q.length, seq_k.length) if c.turns else None
        path = Path(end - 1, -1, turn)
        for i in cutlass.range(count, unroll=1):
            n_block = path.block(i)
            loads_k.load(n_block * c.ctas + rank, k_fill.slot, b.k.acquire(k_fill))
            k_fill.advance()
            loads_v.load(n_block, v_fill.slot, b.v.acquire(v_fill))
            v_fill.advance()
        return q_fill, k_fill, v_fill
