"""The FlashAttention forward on Hopper: persistent CTAs, one load warp, up to three warpgroups.

A CTA takes tiles of 64 rows for each warpgroup, of one head, or of a group of query heads packed
into rows, of one sequence. What makes it fast, each with its figure in docs/facts/attention.md:

- K and V stream through rings; QK of a block runs under the softmax of the one before, and the
  warpgroups alternate (block_loop.py).
- Of long sequences two CTAs take neighbouring rows, and each loads half of every block of K and V
  for both (load.py): L2 reads half as much, and what power that saves goes into the clock.
- Only blocks that the band cuts are masked, and in those that it does not cut no larger score is
  looked for; a tile whose sums overflow that way is computed again (guarded_softmax.py,
  work_ring.py).
- Tiles go to CTAs as they ask for them, the longest first, of as few heads at a time as fill the
  SMs; long causal ones take their keys so that CTAs read the same at one time (order.py). Q of the
  next tile is loaded before it begins, O of the one before is stored by TMA while it runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.memory import SmemAllocator

from cutex.compile import Argument
from cutex.device.atoms.mma import allocate_slots, contiguous_rows_layout
from cutex.device.atoms.multicast import Cluster, SharedRing
from cutex.device.atoms.wgmma import ROWS, WARPGROUP, Wgmma, WgmmaProduct
from cutex.device.attention.block_info import BlockInfo
from cutex.device.attention.guarded_softmax import GuardedSoftmax
from cutex.device.attention.mask import Mask
from cutex.device.attention.query import Query
from cutex.device.attention.rows import Rows, tma_operand
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.pipeline import OrderedBarrier, Ring, Warps, publish_barriers
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.forward.sm90.block_loop import BlockLoop
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.forward.sm90.load import Load
from cutex.kernels.attention.forward.sm90.shared import Shared
from cutex.kernels.attention.order import AttentionOrder, grid
from cutex.kernels.attention.signature import Passed, Sizes, arguments
from cutex.kernels.attention.vote import Vote
from cutex.kernels.attention.work_ring import END, SAFE, WorkRing
from cutex.schedulers.counter import Counter
from cutex.schedulers.dispatch import Source
from cutex.schedulers.one_tile import OwnNumber
from cutex.schedulers.persistent import EqualSteps

STORE_BARRIER = 1  # the first of one named barrier for each warpgroup
TURN_BARRIER = 4  # the first of one named barrier for each warpgroup's turn


class Registers(NamedTuple):
    """Registers per thread, by role; all threads of a CTA together have 65536."""

    load: int
    mma: int


class Forward:
    """The forward kernel: its barriers, memory and registers.

    barrier          arrives                                waits
    q.full[slot]     1: LOAD, and the bytes by TMA          MMA, before a tile's first QK
    q.empty[slot]    1 an MMA warp, done with the tile, or  LOAD
                     with its last QK (releases_early)
    k.full, v.full   1: LOAD, and the bytes by TMA          MMA
    k.empty, v.empty 1 an MMA warp, its product being done;  LOAD
                     of both CTAs that share the loads
    vote[slot]       see vote.py                            LOAD, of CTAs that share
    (turn)           the warpgroup that issued a step       the next, before it issues its own
    (warpgroup)      its threads, O being in smem           the same, before TMA stores it

    smem       bytes                                        hd 128   hd 64    hd 256
    sQ         rows * D * 2 * q_stages                      65536    49152    65536
    sK, sV     tile_n * (D + DV) * 2 * num_stages           131072   131072   131072
    sO         rows * DV * 2 / o_parts, or Q's place        32768    24576    32768
    words      less than 1024

    registers  threads                       of each: two warpgroups, three
    LOAD       128                           24               32
    MMA        128 * warpgroups              240              160
    """

    arch = "sm_90a"

    def __init__(self, config: Sm90ForwardConfig) -> None:
        if reason := config.why_not():
            raise ValueError(reason)
        self.config = config

    @property
    def name(self) -> str:
        return "sm90_attention_forward"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return arguments(self.config, dtype, counter=self.config.dispatch == "dynamic")

    @property
    def mma_warps(self) -> Warps:
        return Warps(first=0, count=4 * self.config.warpgroups)

    @property
    def load_warps(self) -> Warps:
        """The load warps: a whole warpgroup, of which only the first warp works."""
        return Warps(first=self.mma_warps.end, count=4)

    @property
    def num_threads(self) -> int:
        return self.mma_warps.threads + self.load_warps.threads

    @property
    def registers(self) -> Registers:
        return {1: Registers(56, 256), 2: Registers(24, 240), 3: Registers(32, 160)}[
            self.config.warpgroups
        ]

    @property
    def optimistic(self) -> bool:
        """Whether a tile may have to be computed again. Never with a user's functions, which might
        leave a row a single key."""
        return self.config.optimistic and not self.config.modified

    @property
    def releases_early(self) -> bool:
        """Whether Q's slot is released right after the last QK, without a result of the tile."""
        return self.config.own_o and not self.optimistic

    def source(self, passed: Passed) -> Source:
        """The source of LOAD's tiles."""
        if self.config.dispatch == "dynamic":
            return Counter(passed.counter, self.config.ctas)
        ctas = self.config.ctas
        return OwnNumber(ctas) if self.config.dispatch == "one" else EqualSteps(ctas)

    def rows(self, info: Any, side: str) -> Rows:
        """The rows of Q and O (side "q") or of K and V ("k"), as TMA sees them."""
        c = self.config
        return Rows(info, c.pack, c.ragged_q) if side == "q" else Rows(info, 1, c.ragged_k)

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, *rest
    ) -> None:
        c = self.config
        passed, stream = Passed.of(self.operands("bf16"), rest[:-1]), rest[-1]
        sizes = Sizes.of(c, mQ, mK, passed)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        of_q, of_k = self.rows(None, "q"), self.rows(None, "k")
        o_slots = c.warpgroups * (1 if c.own_o else c.q_stages)
        q = tma_operand(load, mQ, of_q, (ROWS, c.head_dim), c.warpgroups * c.q_stages)
        of_kv = cpasync.CopyBulkTensorTileG2SMulticastOp() if c.share else load
        k = tma_operand(of_kv, mK, of_k, (c.tile_n, c.head_dim), c.num_stages, c.ctas)
        v = tma_operand(of_kv, mV, of_k, (c.tile_n, c.head_dim_v), c.num_stages, c.ctas)
        o = tma_operand(store, mO, of_q, (ROWS, c.head_dim_v // c.o_parts), o_slots)
        self.kernel(q, k, v, o, passed, sizes).launch(
            grid=(grid(c, AttentionOrder.of(c, sizes).total), 1, 1),
            block=(self.num_threads, 1, 1),
            cluster=(c.ctas, 1, 1) if c.share else None,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        q: cpasync.TmaInfo,
        k: cpasync.TmaInfo,
        v: cpasync.TmaInfo,
        o: cpasync.TmaInfo,
        passed: Passed,
        sizes: Sizes,
    ) -> None:
        c = self.config
        dtype = q.atom.value_type
        smem = SmemAllocator()
        sQ = allocate_slots(smem, dtype, q.smem_layout)
        sK = allocate_slots(smem, dtype, k.smem_layout)
        sV = allocate_slots(smem, dtype, v.smem_layout)
        if cutlass.const_expr(c.own_o):
            sO = allocate_slots(smem, dtype, o.smem_layout)
        else:
            sO = cute.make_tensor(sQ.iterator, o.smem_layout.outer)
        consumers = self.mma_warps.count
        work = WorkRing.allocate(smem, c.q_stages, c.q_bytes, consumers)
        k_ring = self.ring(smem, "k", c.k_bytes)
        v_ring = self.ring(smem, "v", c.v_bytes)
        vote = Vote.allocate(smem) if c.share else None
        cast = () if vote is None else (vote.cast,)
        publish_barriers((work.q, k_ring, v_ring, *cast), cluster=c.share)
        info = BlockInfo(c.tile_m, c.tile_n, passed.band(c.causal), c.pack)
        shared = Shared(sQ, sK, sV, sO, work, k_ring, v_ring, info, passed, sizes, c.ctas)

        warp = cute.arch.warp_idx()
        if warp >= self.load_warps.first:
            cute.arch.setmaxregister_decrease(self.registers.load)
            if warp == self.load_warps.first:
                operands = self.rows(q, "q"), self.rows(k, "k"), self.rows(v, "k")
                order, source = AttentionOrder.of(c, sizes), self.source(passed)
                Load(c, order, *operands, source, vote, shared).run()
        else:
            cute.arch.setmaxregister_increase(self.registers.mma)
            self.compute(o, shared)

    def ring(self, smem: SmemAllocator, name: str, slot_bytes: int) -> Ring:
        """The ring of K or V."""
        c, consumers = self.config, self.mma_warps.count
        if not c.share:
            return Ring.allocate(smem, name, c.num_stages, slot_bytes, consumers)
        cluster = Cluster(c.ctas, 1)
        return SharedRing.of_cluster(smem, name, c.num_stages, slot_bytes, consumers, cluster)

    # ---- MMA

    @cute.jit
    def compute(self, o: cpasync.TmaInfo, shared: Shared) -> None:
        """Run the MMA role: each warpgroup computes its 64 rows of every tile."""
        c = self.config
        sQ, sK, sV, work_ring = shared.sQ, shared.sK, shared.sV, shared.work
        dtype = sQ.element_type
        thread, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        query = Query.of(sQ, sK, c.q_in_registers)
        half_qk = None
        if cutlass.const_expr(c.takes_halves):
            halves = cute.local_tile(sK, (c.tile_n // 2, c.head_dim, c.num_stages), (0, 0, 0))
            half_qk = Query.of(sQ, halves, c.q_in_registers).qk
        transposed = contiguous_rows_layout(dtype, c.head_dim_v, c.tile_n, c.num_stages)
        sVt = cute.make_tensor(sV.iterator, transposed.outer)  # (DV, bN, SLOT)
        pv_mma = Wgmma(c.head_dim_v, dtype, b_major=OperandMajorMode.MN)
        tOrV = pv_mma.b_slots(sVt)  # (MMA, MMA_N, MMA_K, SLOT)
        acc_o = pv_mma.accumulator()
        pv = WgmmaProduct(pv_mma, pv_mma.a_registers(c.tile_n), tOrV, acc_o)
        factors = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        lse = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        own_info = shared.info._replace(tile_m=ROWS)
        turns = OrderedBarrier(TURN_BARRIER) if c.warpgroups > 1 else None
        if cutlass.const_expr(c.warpgroups > 1):  # noqa: SIM102 - known when tracing
            if wg == c.warpgroups - 1:
                OrderedBarrier(TURN_BARRIER).signal(0)
        q_take, state = work_ring.q.consumer(), (shared.k.consumer(), shared.v.consumer())
        work_ring.q.wait_full(q_take)
        mode = work_ring.mode(q_take.slot)
        while mode != END:
            work = work_ring.work(q_take.slot)
            seq_q, seqlen_k = work_ring.lengths(q_take.slot)
            tile = shared.info.n_blocks(work.m, seq_q.length, seqlen_k)
            m_block = shared.m_block(work, wg)  # of this warpgroup's rows
            blocks = own_info.n_blocks(m_block, seq_q.length, seqlen_k)
            q_slot = q_take.slot * c.warpgroups + wg
            rows = self.thread_rows(m_block)
            score_ops = self.score_ops(shared, rows, work, seq_q.length, seqlen_k)
            slack = self.slack(dtype)
            softmax = GuardedSoftmax.of(score_ops.scale_log2(), slack, self.optimistic)
            valid = Boolean(True)
            tSrQ = query.of_slot(q_slot)
            qk_of_half = None if half_qk is None else half_qk.of(tSrQ)
            loop = BlockLoop(
                query.qk.of(tSrQ), qk_of_half, pv, shared.k, shared.v,
                score_ops, softmax, factors, turns, wg, c.warpgroups, self.optimistic,
            )  # fmt: skip
            forwards = work_ring.forwards(q_take.slot) if c.alternates else None
            before, after = tile.around(blocks, forwards)  # what only other warpgroups' rows see
            if blocks.end > blocks.first and m_block * ROWS < seq_q.length * c.pack:
                state = loop.pass_over(before, state, True)
                half = None
                if cutlass.const_expr(c.takes_halves):
                    half = own_info.ends_in_first_half(m_block, seq_q.length, seqlen_k)
                state = loop.run(blocks, half, state, mode == SAFE, forwards)
                if cutlass.const_expr(self.releases_early):
                    work_ring.release(q_take, valid)
                state = loop.last(state)
                state = loop.pass_over(after, state, True)
                sinks = self.sinks(shared.passed, rows, work)
                valid = softmax.finish(sinks, factors, lse)
                if cutlass.const_expr(dtype is cutlass.Float16):
                    # an infinite probability makes every column of O infinite or NaN
                    valid = valid & (acc_o[0] * 0.0 == 0.0) & (acc_o[2] * 0.0 == 0.0)
                valid = valid | (mode == SAFE)
                loop.scale_output()
            else:
                count = tile.end - tile.first
                state = loop.pass_over(cutlass.max(count - 1, 0), state, True)
                state = loop.pass_over(cutlass.min(count, 1), state, False)
                if cutlass.const_expr(self.releases_early):
                    work_ring.release(q_take, valid)
                acc_o.fill(0.0)
                self.without_keys(self.sinks(shared.passed, rows, work), lse)
            o_slot = wg if c.own_o else q_slot
            if cutlass.const_expr(c.own_o and not self.releases_early):
                work_ring.release(q_take, valid)
            self.store(o, shared, acc_o, work, m_block, seq_q, o_slot)
            if cutlass.const_expr(c.lse):
                self.store_lse(shared.passed.lse, lse, work, seq_q, rows)
            if cutlass.const_expr(not c.own_o):
                self.wait_stores()
                work_ring.release(q_take, valid)
            q_take.advance()
            work_ring.q.wait_full(q_take)
            mode = work_ring.mode(q_take.slot)
        self.wait_stores()

    def slack(self, dtype: type[cutlass.Numeric]) -> float:
        """The slack in powers of two; smaller for fp16, whose range ends at 2^16, which
        `Softmax.add` should not reach either."""
        return min(self.config.slack, 4.0) if dtype is cutlass.Float16 else self.config.slack

    def thread_rows(self, m_block: Int32) -> tuple[Int32, Int32]:
        """The two packed rows of a sequence's head that this thread holds."""
        thread, _, _ = cute.arch.thread_idx()
        row = m_block * ROWS + thread % WARPGROUP // 32 * 16 + thread % 32 // 4
        return row, row + 8

    def score_ops(self, shared: Shared, rows, work: WorkTile, seqlen_q, seqlen_k) -> ScoreOps:
        c, passed = self.config, shared.passed
        thread, _, _ = cute.arch.thread_idx()
        queries = tuple(row // c.pack for row in rows)
        heads = tuple(work.head * c.pack + row % c.pack for row in rows)
        mask = Mask(shared.info.band, c.tile_n, seqlen_q, seqlen_k, queries, thread % 4)
        functions = c.score_mod, c.mask_mod
        return ScoreOps(mask, passed.scale, passed.softcap, *functions, work.batch, heads)

    def sinks(self, passed: Passed, rows, work: WorkTile) -> tuple[Float32, ...]:
        if passed.sink is None:
            return ()
        pack = self.config.pack
        return tuple(passed.sink[work.head * pack + row % pack] for row in rows)

    @cute.jit
    def without_keys(self, sinks, lse: cute.Tensor) -> None:
        for r in cutlass.range_constexpr(2):
            lse[r] = sinks[r] if len(sinks) > 0 else -Float32.inf

    @cute.jit
    def store(
        self,
        o: cpasync.TmaInfo,
        shared: Shared,
        acc_o,
        work: WorkTile,
        m_block: Int32,
        seq_q: SeqlenInfo,
        slot: Int32,
    ) -> None:
        """Round O, write it to `slot`, one part of its columns at a time, and start the stores,
        which leave out rows past the end.

        NOTE: the two stores of a tile that is computed again have one address; the second waits
        until the first has been written, not only read.
        """
        c, sO = self.config, shared.sO
        thread, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        stores = cute.arch.warp_idx() % 4 == 0
        columns = c.head_dim_v // c.o_parts
        to_smem = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), sO.element_type)
        r2s = cute.make_tiled_copy_C(to_smem, Wgmma(columns, sO.element_type).tiled())
        tRS_sO = r2s.get_slice(thread % WARPGROUP).partition_D(sO[None, None, slot])
        tRS_rO = cute.make_rmem_tensor(tRS_sO.shape, sO.element_type)
        units = cute.size(acc_o) // 8 // c.o_parts  # of 8 registers, in a part
        narrow = cute.make_tensor(tRS_rO.iterator, cute.make_layout((8, units)))
        wide = cute.make_tensor(acc_o.iterator, cute.make_layout((8, units, c.o_parts)))
        for part in cutlass.range_constexpr(c.o_parts):
            if stores:
                cute.arch.cp_async_bulk_wait_group(0, read=part > 0 or not self.optimistic)
            cute.arch.barrier(barrier_id=STORE_BARRIER + wg, number_of_threads=WARPGROUP)
            for unit in cutlass.range_constexpr(units):
                narrow[None, unit].store(wide[None, unit, part].load().to(sO.element_type))
            cute.copy(r2s, tRS_rO, tRS_sO)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=STORE_BARRIER + wg, number_of_threads=WARPGROUP)
            if stores:
                tile = (ROWS, columns)
                gO = self.rows(o, "q").tiles(work.head, work.batch, seq_q, tile, part)
                from_smem, to_gmem = cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
                bSG_sO, bSG_gO = cpasync.tma_partition(
                    o.atom, 0, cute.make_layout(1), from_smem, to_gmem
                )
                cute.copy(o.atom, bSG_sO[None, slot], bSG_gO[None, m_block])
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def wait_stores(self) -> None:
        """Wait until TMA has read the smem that this warpgroup stores from."""
        if cute.arch.warp_idx() % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_lse(self, mLSE: cute.Tensor, lse, work: WorkTile, seq_q: SeqlenInfo, rows) -> None:
        """Store the LSE of a row by one of the four threads that hold it."""
        pack = self.config.pack
        thread, _, _ = cute.arch.thread_idx()
        for r in cutlass.range_constexpr(2):
            query, head = rows[r] // pack, work.head * pack + rows[r] % pack
            if thread % 4 == 0 and query < seq_q.length:
                if cutlass.const_expr(self.config.varlen_q):
                    mLSE[head, seq_q.offset + query] = lse[r]
                else:
                    mLSE[work.batch, head, query] = lse[r]
