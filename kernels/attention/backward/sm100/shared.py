"""The smem, tensor memory, barriers and arguments that the roles of a CTA of the Blackwell backward
share, and Load, the role that brings what is in smem."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.tma import bulk_load
from cutex.device.attention.block_info import BlockInfo, Blocks
from cutex.device.attention.rows import Rows, tile_loads
from cutex.device.pipeline import Barrier, PipelineState, Ring
from cutex.kernels.attention.backward.signature import KernelArgs, RowTiles
from cutex.kernels.attention.backward.sm100.config import Sm100BackwardConfig
from cutex.kernels.attention.backward.tiles import Tile, Walk


@dataclass(frozen=True, kw_only=True)
class Barriers:
    """The barriers between the roles.

    barrier       arrives                                     waits
    k, v loaded   1: LOAD, and the bytes by TMA               MMA, before it begins
    q.full        1: LOAD, and the bytes by TMA               MMA; COMPUTE, where it reads LSE
    q_rest        1: LOAD, and the bytes by TMA of the        MMA, halfway through S
                  second half of Q's columns, `early_s`
    q.empty       1: the commit of dK                         LOAD
    do.full       1: LOAD, and the bytes by TMA               MMA
    do.empty      1: the commit of dV                         LOAD
    s_full        1: the commit of S^T                        COMPUTE; by halves, LOAD
    p_full        1 a COMPUTE warp: P^T is in tensor memory   MMA, before dV
    dp_full       1: the commit of dP^T, and so of dQ and     COMPUTE, also before it writes dS
                  dK of the block before                      over that of the block before
    ds_full       1 a COMPUTE warp: dS is in smem, and dS^T   MMA, before dK and dQ
                  in tensor memory unless dK is late
    dq_full       1: the commit of a part of dQ, each slot    ADD
                  for a place that parts take in turn
    dq_empty      1 an ADD warp: the part is in registers     MMA, before the next, and before what
                                                              is over it
    sums_done     1: the commit of all                        COMPUTE, before it stores dK and dV

    Persistent, sums_done is also waited for by LOAD, before it loads K of the next tile, and then:

    dk, dv staged 1 a COMPUTE warp: its rows are in smem      STORE
    k, v empty    1: STORE, dK, or dV, having been read from  LOAD, before it loads K, V or Q there;
                  smem                                        of dS's COMPUTE, before it writes dS
    asked, read   those of ClcDispatch

    dV of the next tile waits for P^T alone, which all COMPUTE warps hand over when dK and dV are in
    registers.

    S^T of the next block waits for nobody, although it is over P^T: MMAs of one CTA are executed in
    the order in which they are started, and dV, which reads P^T, comes first. So it is with dP^T
    and dK, and with dQ and dK, where dQ is over dS^T.
    """

    k_loaded: Barrier
    v_loaded: Barrier
    q: Ring
    q_rest: Any = None  # a Barrier, if S is started with half of Q
    do: Ring
    s_full: Barrier
    p_full: Barrier
    dp_full: Barrier
    ds_full: Barrier
    dq_full: Barrier
    dq_empty: Barrier
    sums_done: Barrier
    dk_staged: Any = None  # a Barrier, as the next three, if CTAs are persistent
    dv_staged: Any = None
    k_empty: Any = None
    v_empty: Any = None

    @staticmethod
    def allocate(smem: SmemAllocator, c: Sm100BackwardConfig) -> Barriers:
        computing, adding = 4 * c.groups, 4
        between = {"dk_staged": 4, "dv_staged": 4, "k_empty": 1, "v_empty": 1}

        def barrier(event: str, arrivals: int, slots: int = 1) -> Barrier:
            return Barrier.allocate(smem, event, arrivals=arrivals, slots=slots)

        def ring(name: str, slots: int, slot_bytes: int) -> Ring:
            return Ring.allocate(smem, name, slots, slot_bytes, consumers=1)

        each: dict[str, Any] = {
            "k_loaded": barrier("k loaded", 1),
            "v_loaded": barrier("v loaded", 1),
            "q": ring("q", c.num_stages, c.first_q_bytes + c.stats_bytes),
            "q_rest": barrier("q rest", 1, c.num_stages) if c.early_s else None,
            "do": ring("do", c.do_stages, c.do_bytes),
            "s_full": barrier("s full", 1),
            "p_full": barrier("p full", computing),
            "dp_full": barrier("dp full", 1),
            "ds_full": barrier("ds full", computing),
            "dq_full": barrier("dq full", 1, len(c.dq_columns)),
            "dq_empty": barrier("dq empty", adding, len(c.dq_columns)),
            "sums_done": barrier("sums done", 1),
        }
        if c.persistent:
            each |= {name: barrier(name.replace("_", " "), n) for name, n in between.items()}
        return Barriers(**each)

    @property
    def all(self) -> tuple[Barrier | Ring, ...]:
        each = (getattr(self, x.name) for x in fields(self))
        return tuple(x for x in each if x is not None)


@dataclass(frozen=True)
class Shared:
    """What all roles of a CTA use."""

    config: Sm100BackwardConfig
    sK: cute.Tensor  # (128, D, 1)
    sV: cute.Tensor  # (128, DV, 1)
    sQ: cute.Tensor  # (bM, D, SLOT), by halves (bM, D / 2, SLOT)
    sdO: cute.Tensor  # (bM, DV, SLOT)
    sdS: cute.Tensor  # (bM, 128, 1), queries contiguous
    sdQ: cute.Tensor  # (PART * rows, WARP, SLOT) a warp's rows of columns of dQ
    stats: cute.Tensor  # (numbers of bM rows, SLOT) LSE and delta
    sRows: Any  # (bM, 16, SLOT) the same as a step of K, None if not folded
    sMinus: Any  # (128, 16, 2) what keys have there, for S and for dP
    barriers: Barriers
    tmem: cute.Pointer
    info: BlockInfo
    args: KernelArgs
    tiles: RowTiles
    tile: Tile
    split: Int32 | int  # which part of the columns of dK, dV and dQ is this CTA's
    heads_per_kv: Int32
    number: Int32 | int = 0  # of blocks that the CTA took before this tile's
    phase: Int32 | int = 0  # the parity of the CTA's tile

    def count(self, i: Int32) -> Int32:
        """The number of the tile's block i among all that the CTA takes."""
        return self.number + i if self.config.persistent else i

    def begun(self, state: PipelineState) -> PipelineState:
        """A role's initial `state` in a ring, at the tile's first block."""
        if self.config.persistent:
            state.skip(self.number)
        return state

    @property
    def other_half(self) -> int:
        """The slot of the half of Q's columns that is another CTA's."""
        return self.config.q_slots - 1

    def m_blocks(self) -> Blocks:
        """The blocks of queries that see one of the CTA's keys."""
        return self.info.m_blocks(self.tile.n_block, self.tile.seq_q.length, self.tile.seq_k.length)

    def total(self, blocks: Blocks) -> Int32:
        """The blocks of queries of all heads that share the keys."""
        return (blocks.end - blocks.first) * self.heads_per_kv

    def first_head(self) -> Int32:
        return self.tile.head_kv * self.heads_per_kv


@cute.jit
def following(m_block: Int32, blocks: Blocks) -> Int32:
    """The block after `m_block`, of the next head if it is a head's last."""
    return blocks.first if m_block + 1 == blocks.end else m_block + 1


@dataclass(frozen=True)
class Load:
    """The role of the warp that brings everything by TMA: K and V once; of each block of queries, Q
    with its rows' LSE and delta, and dO."""

    shared: Shared
    q: Rows  # with the TMA operand each
    k: Rows
    v: Rows
    do: Rows
    stats: cute.Tensor  # (tiles, 2 * bM) LSE, then delta

    @cute.jit
    def run(self) -> None:
        s = self.shared
        b = s.barriers
        blocks = s.m_blocks()
        total = s.total(blocks)
        fill_q, fill_do = s.begun(b.q.producer()), s.begun(b.do.producer())
        head, m_block = s.first_head(), blocks.first
        # NOTE: slots of Q and dO are free before the smem of the last tile's K and V is
        late = s.config.persistent
        for i in cutlass.range(total, unroll=1):
            of = (head, s.tile.batch, s.tile.seq_q)
            if cutlass.const_expr(not late):  # noqa: SIM102 - known when tracing
                if i == 0:
                    self.keys(self.k, s.sK, b.k_loaded)
            if cutlass.const_expr(s.config.staged_in_q):  # noqa: SIM102 - known when tracing
                if i == 1:
                    b.v_empty.wait(s.phase ^ 1)
            self.queries(i, of, m_block, fill_q)
            if i == 0:
                if cutlass.const_expr(late):
                    self.await_k()
                    self.keys(self.k, s.sK, b.k_loaded)
                else:
                    self.keys(self.v, s.sV, b.v_loaded)
            full = b.do.acquire(fill_do)
            tile_loads(self.do, s.sdO, of).load(m_block, fill_do.slot, full)
            if cutlass.const_expr(late):  # noqa: SIM102 - known when tracing
                if i == 0:
                    self.await_v()
                    self.keys(self.v, s.sV, b.v_loaded)
            fill_q.advance()
            fill_do.advance()
            m_block += 1
            if m_block == blocks.end:
                m_block = blocks.first
                head += 1
        if cutlass.const_expr(s.config.staged_in_q):  # noqa: SIM102 - known when tracing
            if total == 1:
                b.v_empty.wait(s.phase ^ 1)
        if cutlass.const_expr(late):  # noqa: SIM102 - known when tracing
            if total == 0:
                self.no_block()

    @cute.jit
    def no_block(self) -> None:
        """Keep step with the other roles where no query sees the keys."""
        b = self.shared.barriers
        self.await_k()
        # NOTE: or MMA, which waits for nobody else here, would complete a second phase of sums_done
        # before COMPUTE has waited for the first
        b.v_empty.wait(self.shared.phase ^ 1)
        with cute.arch.elect_one():
            b.k_loaded.arrive()
            b.v_loaded.arrive()

    def await_k(self) -> None:
        """Wait until the smem of the last tile's K is free."""
        s, b = self.shared, self.shared.barriers
        empty = b.sums_done if s.config.staged_in_ds > 0 else b.k_empty
        empty.wait(s.phase ^ 1)

    def await_v(self) -> None:
        """Wait, behind `await_k`, until the smem of the last tile's V is free."""
        s = self.shared
        if s.config.staged_in_ds < 2 and not s.config.staged_in_q:
            s.barriers.v_empty.wait(s.phase ^ 1)

    @cute.jit
    def queries(self, i: Int32, of: Any, m_block: Int32, fill: PipelineState) -> None:
        """Load Q of block i, the queries m_block of `of` (head, batch, seqlen), with LSE and
        delta. By halves, the other CTA's columns come when S of the block before has read them."""
        s = self.shared
        c, b = s.config, s.barriers
        full = b.q.acquire(fill)
        if cutlass.const_expr(c.early_s):
            self.half_of_q(0, of).load(m_block, fill.slot, full)
        elif cutlass.const_expr(not c.halves):
            tile_loads(self.q, s.sQ, of).load(m_block, fill.slot, full)
        else:
            tile_loads(self.q, s.sQ, of, s.split).load(m_block, fill.slot, full)
            # NOTE: a wait for parity 1 on a fresh barrier returns at once
            b.s_full.wait((s.count(i) & 1) ^ 1)
            tile_loads(self.q, s.sQ, of, 1 - s.split).load(m_block, Int32(s.other_half), full)
        tile = s.tiles.tile(s.config, *of) + m_block
        bulk_load(self.stats[tile, None], s.stats[None, fill.slot], full)
        if cutlass.const_expr(c.early_s):
            with cute.arch.elect_one():
                b.q_rest.arrive_expecting(c.q_bytes - c.first_q_bytes, fill.slot)
            self.half_of_q(1, of).load(m_block, fill.slot, b.q_rest[fill.slot])

    def half_of_q(self, half: int, of: Any) -> Any:
        """The loads of half of Q's columns, into their part of a slot."""
        s, c = self.shared, self.shared.config
        columns = (c.tile_m, c.head_dim // 2, c.q_slots)
        return tile_loads(self.q, cute.local_tile(s.sQ, columns, (0, half, 0)), of, half)

    @cute.jit
    def keys(self, rows: Rows, sX: cute.Tensor, loaded: Barrier) -> None:
        """Load the tile's rows of K or V."""
        s = self.shared
        with cute.arch.elect_one():
            loaded.arrive_expecting(cute.size(sX) * sX.element_type.width // 8)
        of = (s.tile.head_kv, s.tile.batch, s.tile.seq_k)
        tile_loads(rows, sX, of).load(s.tile.n_block, Int32(0), loaded[0])


@cute.jit
def run_each(role: cutlass.Constexpr[Any], walk: Walk) -> None:
    """Run `role` for one tile of keys after the other."""
    number, phase = Int32(0), Int32(0)
    ticket = walk.dispatch.first()
    while ticket.valid:
        tile = walk.tile(ticket)
        if tile.has_keys(role.shared.config):
            s = replace(role.shared, tile=tile, number=number, phase=phase)
            replace(role, shared=s).run()
            number += s.total(s.m_blocks())
            phase ^= 1
        ticket = walk.dispatch.next(ticket)
