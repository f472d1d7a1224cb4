"""The barriers and the state that the roles of a pair of CTAs share, and PairLoad, the role that
brings what is in smem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.tma import TileLoads
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.rows import tile_loads
from cutex.device.pipeline import Barrier, PairRing, PipelineState, is_leader
from cutex.kernels.attention.backward.config import ELEMENT
from cutex.kernels.attention.backward.sm100.pairs.config import CTAS, HALF, PairConfig
from cutex.kernels.attention.backward.sm100.shared import Barriers, Shared, following


class LeaderBarrier(Barrier):
    """A barrier of the pair's leader, on which warps of both CTAs arrive."""

    @staticmethod
    def of(smem: SmemAllocator, event: str, arrivals: int) -> LeaderBarrier:
        return LeaderBarrier(**vars(Barrier.allocate(smem, event, arrivals=arrivals)))

    def arrive(self, slot: Int32 | int = 0) -> None:
        self.arrive_at_leader(slot)


@dataclass(frozen=True)
class PairBarriers(Barriers):
    """The barriers of a pair: of those that MMA waits for the leader's count, for both CTAs; its
    commits arrive in both.

    barrier       arrives                                     waits
    k, v loaded   1: the leader's LOAD, and all bytes         MMA; with V come the 256 keys of K^T
    q, do, qt,    full 1: the leader's LOAD, and all bytes    MMA
    dot, rows     empty 1: the commit of S, dP, dK, dV, dP    LOAD
    s_full        1: the commit of S^T                        COMPUTE
    p_full        1 a COMPUTE warp of both: P^T is there      MMA, before dV
    dp_full       1: the commit of dP^T, and so of dQ and dK  COMPUTE, also before it writes dS over
                  of the block before, in both CTAs           that of the block before, or sends it
    staged        1 a COMPUTE warp: its part of dS is in      EXCHANGE
                  smem, of this CTA's queries and the other's
    received      1: EXCHANGE, and the other's dS             MMA, before dQ; EXCHANGE
    ds_full       1 a COMPUTE warp of both: dS is there       MMA, before dK
    sent          1: EXCHANGE of the other CTA has received   MMA, before dQ
    dq_full       1: the commit of dQ                         ADD
    dq_empty      1 an ADD warp of both: dQ is in registers   MMA, before dP of the next block
    sums_done     1: the commit of all                        COMPUTE, before it stores dK and dV
    """

    qt: Any = None  # a PairRing each
    dot: Any = None
    rows: Any = None
    staged: Any = None  # a Barrier each
    received: Any = None
    sent: Any = None

    @staticmethod
    def of(smem: SmemAllocator, c: PairConfig) -> PairBarriers:
        computing, adding = 4 * c.groups, 4
        operand = CTAS * HALF * c.head_dim * ELEMENT
        slots = {"q": 1, "do": 1, "qt": 1, "dot": 1, "rows": c.num_stages}
        rings = {
            name: PairRing.allocate(
                smem, name, count, operand if name != "rows" else c.stats_bytes, consumers=1
            )
            for name, count in slots.items()
        }
        of_each = {
            "k_loaded": 1, "v_loaded": 1, "s_full": 1, "dp_full": 1, "staged": computing,
            "received": 1, "dq_full": 1, "sums_done": 1,
        }  # fmt: skip
        of_leader = {
            "p_full": CTAS * computing, "ds_full": CTAS * computing, "sent": 1,
            "dq_empty": CTAS * adding,
        }  # fmt: skip
        each = {
            name: Barrier.allocate(smem, name.replace("_", " "), arrivals=count)
            for name, count in of_each.items()
        }
        leaders = {
            name: LeaderBarrier.of(smem, name.replace("_", " "), count)
            for name, count in of_leader.items()
        }
        every: dict[str, Any] = {**rings, **each, **leaders}
        return PairBarriers(**every)


@dataclass(frozen=True)
class PairShared(Shared):
    """What the roles of a CTA of a pair use: sQ and sdO are (64, D, 1), sdS (64, 3 * 128, 1), whose
    last 128 keys are this CTA's, for the other's queries."""

    config: PairConfig
    barriers: PairBarriers
    sQt: Any = None  # (128, 64, 1) columns of this CTA
    sdOt: Any = None  # (128, 64, 1)
    sKt: Any = None  # (256, 64, 1)
    rank: Int32 | int = 0

    def m_blocks(self) -> Blocks:
        """The blocks of queries that see one of the pair's keys."""
        tile = self.tile
        return self.info.m_blocks(tile.n_block // CTAS, tile.seq_q.length, tile.seq_k.length)


class PairLoads(NamedTuple):
    """The TMA operands that are loaded."""

    q: Any  # Rows, (64, 128) each
    do: Any
    qt: Any  # Rows, (128, 64) each
    dot: Any
    k: Any  # Rows, (128, 128) each
    v: Any
    kt: Any  # Rows, (256, 64)
    stats: cpasync.TmaInfo  # (2 * tiles, numbers of 64 rows)


@dataclass(frozen=True)
class PairLoad:
    """The role of the warp that brings this CTA's part of everything."""

    shared: PairShared
    of: PairLoads

    @cute.jit
    def run(self) -> None:
        s = self.shared
        b = s.barriers
        blocks = s.m_blocks()
        total = s.total(blocks)
        q, do, qt, dot, rows = (x.producer() for x in (b.q, b.do, b.qt, b.dot, b.rows))
        head, m_block = s.first_head(), blocks.first
        if total > 0:
            self.keys(b.k_loaded, ((self.of.k, s.sK, s.tile.n_block, 0),))
            self.scored(head, m_block, q, rows)
            whole = (self.of.kt, s.sKt, s.tile.n_block // CTAS, s.rank)
            self.keys(b.v_loaded, ((self.of.v, s.sV, s.tile.n_block, 0), whole))
        for i in cutlass.range(total, unroll=1):
            self.half(b.do, do, self.of.do, s.sdO, head, m_block)
            self.columns(b.dot, dot, self.of.dot, s.sdOt, head, m_block)
            next_head = head + 1 if m_block + 1 == blocks.end else head
            next_block = following(m_block, blocks)
            q.advance()
            rows.advance()
            if i + 1 < total:
                self.scored(next_head, next_block, q, rows)
            self.columns(b.qt, qt, self.of.qt, s.sQt, head, m_block)
            head, m_block = next_head, next_block
            do.advance()
            qt.advance()
            dot.advance()

    @cute.jit
    def scored(self, head: Int32, m_block: Int32, q: PipelineState, rows: PipelineState) -> None:
        """Load this CTA's queries of a block, for S, and their LSE and delta."""
        s = self.shared
        self.half(s.barriers.q, q, self.of.q, s.sQ, head, m_block)
        full = s.barriers.rows.acquire(rows)
        tile = s.tiles.tile(s.config, head, s.tile.batch, s.tile.seq_q) + m_block
        count = cute.size(s.stats, mode=[0])
        # (1, numbers, SLOT), (1, numbers, Rest)
        numbers = cute.make_tensor(
            s.stats.iterator,
            cute.make_layout(
                (1, count, s.config.num_stages), stride=(0, 1, s.stats.layout.stride[1])
            ),
        )
        gX = cute.local_tile(self.of.stats.tma_tensor, (1, count), (None, 0))
        tXsX, tXgX = cpasync.tma_partition(
            self.of.stats.atom, 0, cute.make_layout(1), cute.group_modes(numbers, 0, 2),
            cute.group_modes(gX, 0, 2),
        )  # (TMA, SLOT), (TMA, Rest)  # fmt: skip
        TileLoads(self.of.stats.atom, tXgX, tXsX).load(tile * CTAS + s.rank, rows.slot, full)

    @cute.jit
    def half(
        self, ring: PairRing, fill: PipelineState, rows: Any, sX: cute.Tensor, head: Int32,
        m_block: Int32,
    ) -> None:  # fmt: skip
        """Load this CTA's queries of a block."""
        s = self.shared
        full = ring.acquire(fill)
        of = (head, s.tile.batch, s.tile.seq_q)
        tile_loads(rows, sX, of).load(m_block * CTAS + s.rank, fill.slot, full)

    @cute.jit
    def columns(
        self, ring: PairRing, fill: PipelineState, rows: Any, sX: cute.Tensor, head: Int32,
        m_block: Int32,
    ) -> None:  # fmt: skip
        """Load this CTA's columns of a block."""
        s = self.shared
        full = ring.acquire(fill)
        of = (head, s.tile.batch, s.tile.seq_q)
        tile_loads(rows, sX, of, s.rank).load(m_block, fill.slot, full)

    @cute.jit
    def keys(self, loaded: Barrier, operands: cutlass.Constexpr[tuple[Any, ...]]) -> None:
        """Load operands of the keys, (rows, smem, row tile, column tile) each."""
        s = self.shared
        if is_leader():
            with cute.arch.elect_one():
                count = sum(cute.size(sX) for _, sX, _, _ in operands)
                loaded.arrive_expecting(CTAS * count * ELEMENT)
        of = (s.tile.head_kv, s.tile.batch, s.tile.seq_k)
        for rows, sX, row, column in operands:
            tile_loads(rows, sX, of, column).load(row, Int32(0), loaded[0])
